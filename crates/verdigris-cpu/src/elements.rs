//! Bytes as numbers: widened when they are read, rounded once when they are written.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;
use verdigris_tensor::num::{self, Rounding};
use verdigris_tensor::{DType, Layout, LayoutError};

use crate::error::Error;
use crate::real::Real;
use crate::scratch::{Lent, Scratch, unwind};

/// Elements that one thread converts at a time.
const CHUNK: usize = 1 << 14;

/// A tensor that is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    pub(crate) dtype: DType,
    pub(crate) layout: Layout,
    /// From the first element on, at least as long as the layout spans.
    pub(crate) bytes: &'a [u8],
}

/// A tensor that is written.
#[derive(Debug)]
pub(crate) struct ViewMut<'a> {
    pub(crate) dtype: DType,
    pub(crate) layout: Layout,
    /// From the first element on, at least as long as the layout spans.
    pub(crate) bytes: &'a mut [u8],
}

/// The elements of a tensor as numbers, in place or converted.
#[derive(Debug)]
pub(crate) struct Loaded<'a, 's, T: Real> {
    numbers: Numbers<'a, 's, T>,
    /// Where they lie in [`Loaded::data`].
    pub(crate) layout: Layout,
}

#[derive(Debug)]
enum Numbers<'a, 's, T: Real> {
    Borrowed(&'a [T]),
    Converted(Lent<'s, T>),
}

impl<'s, T: Real> Loaded<'_, 's, T> {
    /// Numbers that were computed.
    pub(crate) fn converted(numbers: Lent<'s, T>, layout: Layout) -> Self {
        Loaded { numbers: Numbers::Converted(numbers), layout }
    }

    pub(crate) fn data(&self) -> &[T] {
        match &self.numbers {
            Numbers::Borrowed(data) => data,
            Numbers::Converted(data) => data,
        }
    }

    pub(crate) fn strides(&self) -> Vec<usize> {
        self.layout.strides().iter().map(|&stride| stride as usize).collect()
    }
}

/// Whether elements of this type are numbers of type `T` as they lie.
fn is_same<T: Real>(dtype: DType) -> bool {
    dtype.is_float() && dtype.bytes() == size_of::<T>() && dtype != DType::Tf32
}

impl<'a> View<'a> {
    pub(crate) fn span(&self) -> usize {
        self.layout.span_elements() as usize
    }

    /// As numbers, with strides as they are; a tensor with wide gaps is packed.
    pub(crate) fn load<'s, T: Real>(&self, scratch: &'s Scratch) -> Loaded<'a, 's, T> {
        if let Some(data) = self.borrow::<T>() {
            return Loaded { numbers: Numbers::Borrowed(data), layout: self.layout };
        }
        if self.span() as u64 > 2 * self.layout.elements() {
            return self.load_row_major(scratch);
        }
        let mut numbers = T::pool(scratch).lend(self.span());
        let size = self.dtype.bytes();
        (numbers.par_chunks_mut(CHUNK).zip(self.bytes.par_chunks(CHUNK * size))).for_each(|(to, from)| widen(self.dtype, from, to));
        Loaded { numbers: Numbers::Converted(numbers), layout: self.layout }
    }

    /// As numbers, packed row-major.
    pub(crate) fn load_row_major<'s, T: Real>(&self, scratch: &'s Scratch) -> Loaded<'a, 's, T> {
        if self.layout.is_row_major()
            && let Some(data) = self.borrow::<T>()
        {
            return Loaded { numbers: Numbers::Borrowed(data), layout: self.layout };
        }
        let layout = row_major(&self.layout);
        let mut numbers = T::pool(scratch).lend(layout.elements() as usize);
        numbers.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, to)| self.gather(chunk * CHUNK, to));
        Loaded { numbers: Numbers::Converted(numbers), layout }
    }

    fn borrow<T: Real>(&self) -> Option<&'a [T]> {
        if !is_same::<T>(self.dtype) {
            return None;
        }
        bytemuck::try_cast_slice(&self.bytes[..self.span() * self.dtype.bytes()]).ok()
    }

    /// The elements from row-major position `start` on.
    pub(crate) fn gather<T: Real>(&self, start: usize, to: &mut [T]) {
        let size = self.dtype.bytes();
        for_runs(&self.layout, start, to.len(), |place, offset, stride, len| {
            let to = &mut to[place..place + len];
            if stride == 1 {
                widen(self.dtype, &self.bytes[offset * size..(offset + len) * size], to);
            } else {
                let mut buffer = [0u8; 64 * 8];
                for (i, to) in to.chunks_mut(64).enumerate() {
                    for (j, element) in buffer.chunks_exact_mut(size).take(to.len()).enumerate() {
                        let from = (offset + (i * 64 + j) * stride) * size;
                        element.copy_from_slice(&self.bytes[from..from + size]);
                    }
                    widen(self.dtype, &buffer[..to.len() * size], to);
                }
            }
        });
    }

    /// Element `offset` as an integer; only for integer types.
    pub(crate) fn integer(&self, offset: usize) -> i64 {
        let bytes = &self.bytes[offset * self.dtype.bytes()..];
        match self.dtype {
            DType::I8 => i64::from(bytes[0] as i8),
            DType::I32 => bytes.first_chunk().map_or(0, |bytes| i64::from(i32::from_le_bytes(*bytes))),
            DType::I64 => bytes.first_chunk().map_or(0, |bytes| i64::from_le_bytes(*bytes)),
            _ => i64::from(bytes[0]),
        }
    }
}

/// Whether two layouts of the same dims put each element at the same place.
pub(crate) fn same_places(a: &Layout, b: &Layout) -> bool {
    a.is_empty() || (0..a.rank()).all(|i| a.dims()[i] == 1 || a.strides()[i] == b.strides()[i])
}

/// The packed row-major layout of the same dims.
pub(crate) fn row_major(layout: &Layout) -> Layout {
    let mut strides = vec![0; layout.rank()];
    let mut stride = 1u64;
    for (place, &dim) in strides.iter_mut().zip(layout.dims()).rev() {
        *place = stride;
        stride = stride.saturating_mul(dim.max(1));
    }
    Layout::new(layout.dims(), &strides).unwrap_or(*layout)
}

/// A layout repeated over `dims`, within [`crate::scratch::caught`]; where it cannot be, that is the error of the run.
pub(crate) fn broadcast(tensor: &str, layout: &Layout, dims: &[u64]) -> Layout {
    layout.broadcast_to(dims).unwrap_or_else(|source| no_layout(tensor, source))
}

/// Ends what [`crate::scratch::caught`] computes: a tensor cannot be seen as an op has to see it.
pub(crate) fn no_layout(tensor: &str, source: LayoutError) -> ! {
    unwind(Error::Graph(verdigris_graph::Error::Layout { tensor: tensor.to_owned(), source }))
}

/// Visits the elements at row-major positions `start .. start + count` in lines: (place from `start`, offset, stride, length).
pub(crate) fn for_runs(layout: &Layout, start: usize, count: usize, mut visit: impl FnMut(usize, usize, usize, usize)) {
    let rank = layout.rank();
    if rank == 0 || count == 0 {
        if count > 0 {
            visit(0, 0, 1, 1);
        }
        return;
    }
    let (dims, strides) = (layout.dims(), layout.strides());
    let line = dims[rank - 1] as usize;
    let mut index = [0usize; verdigris_tensor::MAX_RANK];
    let mut rest = start;
    for i in (0..rank).rev() {
        index[i] = rest % dims[i] as usize;
        rest /= dims[i] as usize;
    }
    let mut place = 0;
    while place < count {
        let len = (line - index[rank - 1]).min(count - place);
        let offset: usize = (0..rank).map(|i| index[i] * strides[i] as usize).sum();
        visit(place, offset, strides[rank - 1] as usize, len);
        place += len;
        index[rank - 1] = 0;
        for i in (0..rank - 1).rev() {
            index[i] += 1;
            if index[i] < dims[i] as usize {
                break;
            }
            index[i] = 0;
        }
    }
}

impl ViewMut<'_> {
    /// Has `compute` fill numbers packed as `order` lays them out, and stores them. Where the tensor itself is of that type and layout,
    /// they are written in place.
    pub(crate) fn fill<T: Real>(self, scratch: &Scratch, order: Layout, compute: impl FnOnce(&mut [T])) {
        let elements = self.layout.elements() as usize;
        if is_same::<T>(self.dtype)
            && same_places(&self.layout, &order)
            && let Ok(place) = bytemuck::try_cast_slice_mut(&mut self.bytes[..elements * size_of::<T>()])
        {
            return compute(place);
        }
        let mut numbers = T::pool(scratch).lend(elements);
        compute(&mut numbers);
        self.store(&numbers, order);
    }

    /// Stores numbers that lie packed in `order`.
    pub(crate) fn store<T: Real>(self, numbers: &[T], order: Layout) {
        let (dtype, size) = (self.dtype, self.dtype.bytes());
        if same_places(&self.layout, &order) {
            let bytes = &mut self.bytes[..numbers.len() * size];
            (bytes.par_chunks_mut(CHUNK * size).zip(numbers.par_chunks(CHUNK))).for_each(|(to, from)| narrow(dtype, from, to));
            return;
        }
        self.scatter(order, |from, stride, to| {
            let mut line = [T::default(); 64];
            for (i, to) in to.chunks_mut(64 * size).enumerate() {
                let line = &mut line[..to.len() / size];
                for (j, place) in line.iter_mut().enumerate() {
                    *place = numbers[from + (i * 64 + j) * stride];
                }
                narrow(dtype, line, to);
            }
        });
    }

    /// Writes the tensor in lines along its fastest dim. `write` gets the offset and the stride of the line in a tensor of layout `from`
    /// (of the same dims), and the bytes to fill, packed.
    pub(crate) fn scatter(self, from: Layout, write: impl Fn(usize, usize, &mut [u8]) + Sync) {
        if self.layout.is_empty() {
            return;
        }
        let size = self.dtype.bytes();
        // Dims from the slowest of the target to the fastest; each steps past all that the faster ones span, so slices nest.
        let mut dims: Vec<Dim> = (0..self.layout.rank())
            .map(|i| Dim { count: self.layout.dims()[i] as usize, to: self.layout.strides()[i] as usize, from: from.strides()[i] as usize })
            .filter(|dim| dim.count > 1)
            .collect();
        dims.sort_by_key(|dim| std::cmp::Reverse(dim.to));
        let span = self.layout.span_elements() as usize * size;
        nest(&dims, size, 0, &mut self.bytes[..span], &write);
    }
}

#[derive(Clone, Copy)]
struct Dim {
    count: usize,
    to: usize,
    from: usize,
}

fn nest(dims: &[Dim], size: usize, from: usize, bytes: &mut [u8], write: &(impl Fn(usize, usize, &mut [u8]) + Sync)) {
    match dims {
        [] => write(from, 1, &mut bytes[..size]),
        [line] if line.to == 1 => write(from, line.from, &mut bytes[..line.count * size]),
        [dim, inner @ ..] => {
            let work: usize = inner.iter().map(|dim| dim.count).product();
            let each = |(i, bytes): (usize, &mut [u8])| nest(inner, size, from + i * dim.from, bytes, write);
            // Chunks begin at every step of the dim; the last may be shorter.
            if work * dim.count >= CHUNK {
                bytes.par_chunks_mut(dim.to * size).take(dim.count).enumerate().for_each(each);
            } else {
                bytes.chunks_mut(dim.to * size).take(dim.count).enumerate().for_each(each);
            }
        }
    }
}

/// Elements as numbers.
pub(crate) fn widen<T: Real>(dtype: DType, bytes: &[u8], to: &mut [T]) {
    fn each<T: Real, const SIZE: usize>(bytes: &[u8], to: &mut [T], read: impl Fn([u8; SIZE]) -> T) {
        for (to, from) in to.iter_mut().zip(bytes.as_chunks::<SIZE>().0) {
            *to = read(*from);
        }
    }
    /// By way of f32 where the values are f32's: a slice at a time.
    fn halves<T: Real, H: bytemuck::Pod>(bytes: &[u8], to: &mut [T], convert: impl Fn(&[H], &mut [f32])) {
        let mut codes = [H::zeroed(); 256];
        let mut wide = [0f32; 256];
        for (to, bytes) in to.chunks_mut(256).zip(bytes.chunks(256 * size_of::<H>())) {
            bytemuck::cast_slice_mut(&mut codes[..to.len()]).copy_from_slice(&bytes[..to.len() * size_of::<H>()]);
            convert(&codes[..to.len()], &mut wide[..to.len()]);
            for (to, &value) in to.iter_mut().zip(&wide) {
                *to = T::from_f32(value);
            }
        }
    }
    match dtype {
        DType::F64 => each(bytes, to, |b| T::from_f64(f64::from_le_bytes(b))),
        DType::F32 => each(bytes, to, |b| T::from_f32(f32::from_le_bytes(b))),
        DType::Tf32 => each(bytes, to, |b| T::from_f32(num::tf32_truncate(f32::from_le_bytes(b)))),
        DType::F16 => halves::<T, f16>(bytes, to, |from, to| from.convert_to_f32_slice(to)),
        DType::Bf16 => each(bytes, to, |b| T::from_f32(f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16))),
        DType::E4m3 => each(bytes, to, |[b]| T::from_f32(num::e4m3_to_f32(b))),
        DType::E5m2 => each(bytes, to, |[b]| T::from_f32(num::e5m2_to_f32(b))),
        DType::I8 => each(bytes, to, |[b]| T::from_f32(f32::from(b as i8))),
        DType::U8 => each(bytes, to, |[b]| T::from_f32(f32::from(b))),
        DType::I32 => each(bytes, to, |b| T::from_i64(i64::from(i32::from_le_bytes(b)))),
        DType::I64 => each(bytes, to, |b| T::from_i64(i64::from_le_bytes(b))),
        DType::Bool => each(bytes, to, |[b]| T::from_f32(f32::from(u8::from(b != 0)))),
    }
}

/// Numbers as elements, rounded to nearest even; fp8 and integers saturate.
pub(crate) fn narrow<T: Real>(dtype: DType, from: &[T], bytes: &mut [u8]) {
    fn each<T: Real, const SIZE: usize>(from: &[T], bytes: &mut [u8], write: impl Fn(T) -> [u8; SIZE]) {
        for (to, &value) in bytes.as_chunks_mut::<SIZE>().0.iter_mut().zip(from) {
            *to = write(value);
        }
    }
    match dtype {
        DType::F64 => each(from, bytes, |v| v.to_f64().to_le_bytes()),
        DType::F32 => each(from, bytes, |v| v.to_f32().to_le_bytes()),
        DType::Tf32 => each(from, bytes, |v| num::tf32_round(v.to_f32(), Rounding::NearestEven).to_le_bytes()),
        // From f64 in one step: by way of f32 it would be rounded twice.
        DType::F16 if size_of::<T>() == 8 => each(from, bytes, |v| num::f64_to_f16(v.to_f64()).to_le_bytes()),
        DType::Bf16 if size_of::<T>() == 8 => each(from, bytes, |v| num::f64_to_bf16(v.to_f64()).to_le_bytes()),
        DType::F16 => {
            let mut codes = [f16::ZERO; 256];
            let mut narrow = [0f32; 256];
            for (from, bytes) in from.chunks(256).zip(bytes.chunks_mut(512)) {
                for (to, &value) in narrow.iter_mut().zip(from) {
                    *to = value.to_f32();
                }
                codes[..from.len()].convert_from_f32_slice(&narrow[..from.len()]);
                bytes.copy_from_slice(bytemuck::cast_slice(&codes[..from.len()]));
            }
        }
        DType::Bf16 => each(from, bytes, |v| bf16::from_f32(v.to_f32()).to_le_bytes()),
        DType::E4m3 | DType::E5m2 | DType::I8 | DType::U8 | DType::Bool => each(from, bytes, |v| {
            let mut byte = [0];
            let _ = num::write_element(dtype, v.to_f64(), &mut byte);
            byte
        }),
        DType::I32 => each(from, bytes, |v| num::f64_to_i32(v.to_f64(), Rounding::NearestEven).to_le_bytes()),
        DType::I64 => each(from, bytes, |v| (v.to_f64().round_ties_even() as i64).to_le_bytes()),
    }
}
