//! Tensor maps: which of them the driver accepts, and which bytes TMA moves for given coordinates.
//!
//! **Order in shared memory.** A tiled box lies packed, innermost dimension first; an im2col column lies pixel by pixel, the channels of a
//! pixel together. The XOR pattern then acts on the address bits, so it repeats with the absolute address.
//!
//! **Outside.** An element is outside if any of its coordinates is below 0 or at least the extent. Loads fill it, stores and reductions
//! leave it out. Loads cut the innermost dimension element by element, so a 16-byte chunk may be partly inside. Stores and reductions do not:
//! where a row of the tensor ends within a chunk, an H200 writes all of it, and so what lies behind the row (seen behind rows of 40 bytes, in
//! every type of 16 bits). Nothing documents that, so they ask for rows of whole chunks here.
//!
//! **Stores** begin inside: no coordinate lies before the tensor or, under im2col, before the lower corner, and the corners keep the walk inside
//! the tensor. Else an H200 ends the kernel with an illegal instruction.
//!
//! **Innermost coordinate.** It must lie a multiple of 16 bytes from the start of a row, below 0 too, in loads, stores and reductions, tiled
//! and im2col. No document says so; an H200 ends a kernel that breaks it with an illegal instruction (each of a dozen coordinates from −8 to
//! 40 that are multiples works, each that is not fails, for 16- and 32-bit elements alike).
//!
//! **Im2col.** The walk starts at the given position, advances by the traversal stride along W up to `W − 1 + upper_corner`, then returns to
//! `lower_corner` and advances H, then D, then the image. The filter offset is added to every position of the walk.
//!
//! Source: CUDA driver API, `cuTensorMapEncodeTiled` and `cuTensorMapEncodeIm2col`; PTX ISA, "Tensors".

use crate::ir::{MapType, Swizzle, Ty};
use crate::program::{Fill, MapSpec};
use std::fmt;
use verdigris_tensor::num::{Rounding, tf32_round};

/// Alignment of the shared address of a tensor copy.
pub const SHARED_ALIGNMENT_BYTES: u32 = 128;

/// Alignment of the tensor's address.
pub const GLOBAL_ALIGNMENT_BYTES: u64 = 16;

/// A tensor map that the driver refuses, or a copy that this model does not describe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapError {
    /// The rank is outside 1–5 (tiled) or 3–5 (im2col).
    Rank {
        /// The rank.
        rank: u32,
        /// The mode.
        im2col: bool,
    },
    /// A list has not as many numbers as the rank asks for.
    Count {
        /// The list.
        list: &'static str,
        /// Numbers given.
        given: usize,
        /// Numbers needed.
        needed: usize,
    },
    /// A number is outside its range.
    Range {
        /// What it is.
        what: &'static str,
        /// Its dimension, innermost 0.
        dimension: usize,
        /// Its value.
        value: i64,
        /// The smallest allowed.
        low: i64,
        /// The largest allowed.
        high: i64,
    },
    /// A number is not a multiple of what the engine needs.
    Multiple {
        /// What it is.
        what: &'static str,
        /// Its dimension, innermost 0.
        dimension: usize,
        /// Its value.
        value: u64,
        /// What it must be a multiple of.
        of: u64,
    },
    /// The innermost row of the box is longer than a row of the swizzle pattern.
    BeyondSpan {
        /// Bytes of the box's row.
        row_bytes: u32,
        /// The swizzle.
        swizzle: Swizzle,
    },
    /// The innermost row of a swizzled box is shorter than a row of the pattern. The driver accepts it; where its rows then lie is not
    /// documented, so a copy with it is refused here.
    BelowSpan {
        /// Bytes of the box's row.
        row_bytes: u32,
        /// The swizzle.
        swizzle: Swizzle,
    },
    /// The corners leave no position to visit.
    EmptyBox {
        /// Dimension, innermost 0.
        dimension: usize,
        /// First position.
        first: i64,
        /// Last position.
        last: i64,
    },
    /// NaN fill of a type without NaN.
    FillType {
        /// The type.
        ty: MapType,
    },
    /// The innermost coordinate is not a multiple of 16 bytes.
    Coordinate {
        /// The coordinate, in elements.
        coordinate: i32,
        /// Elements in 16 bytes.
        elements: u32,
    },
    /// A store or a reduction whose box begins before the tensor.
    StoreBefore {
        /// The dimension, innermost 0.
        dimension: usize,
        /// The coordinate.
        coordinate: i32,
    },
    /// An im2col store whose walk leaves the tensor, by a lower corner below 0 or an upper one above, or that begins before its lower corner.
    StoreCorner {
        /// The dimension, innermost 0.
        dimension: usize,
        /// The corner.
        corner: i32,
    },
    /// A store or a reduction into rows that end within a 16-byte chunk.
    StoreChunk {
        /// Bytes of a row inside the tensor.
        row_bytes: u64,
    },
    /// An im2col store with a traversal stride: whether the stride applies to stores is not documented, so it is refused here.
    StridedStore,
}

impl fmt::Display for MapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MapError::Rank { rank, im2col: false } => write!(f, "tensor map of rank {rank}, tiled maps have 1 to 5"),
            MapError::Rank { rank, im2col: true } => write!(f, "tensor map of rank {rank}, im2col maps have 3 to 5"),
            MapError::Count { list, given, needed } => write!(f, "tensor map has {given} {list}, its rank needs {needed}"),
            MapError::Range { what, dimension, value, low, high } => {
                write!(f, "tensor map: {what} of dimension {dimension} is {value}, must be {low} to {high}")
            }
            MapError::Multiple { what, dimension, value, of } => {
                write!(f, "tensor map: {what} of dimension {dimension} is {value}, must be a multiple of {of}")
            }
            MapError::BeyondSpan { row_bytes, swizzle } => {
                write!(
                    f,
                    "tensor map: a row of the box has {row_bytes} bytes, more than the {} of swizzle {swizzle:?}",
                    swizzle.span_bytes()
                )
            }
            MapError::BelowSpan { row_bytes, swizzle } => write!(
                f,
                "tensor copy: a row of the box has {row_bytes} bytes, fewer than the {} of swizzle {swizzle:?}; where such rows lie is not documented",
                swizzle.span_bytes()
            ),
            MapError::EmptyBox { dimension, first, last } => {
                write!(f, "tensor map: the corners of dimension {dimension} run from {first} to {last}, nothing is visited")
            }
            MapError::FillType { ty } => write!(f, "tensor map: NaN fill needs a float type, elements are {ty:?}"),
            MapError::Coordinate { coordinate, elements } => write!(
                f,
                "tensor copy: the innermost coordinate is {coordinate}, must be a multiple of {elements} (16 bytes); an H200 stops with an illegal instruction"
            ),
            MapError::StoreBefore { dimension, coordinate } => write!(
                f,
                "tensor copy: a store begins at {coordinate} in dimension {dimension}, before the tensor; an H200 stops with an illegal instruction"
            ),
            MapError::StoreCorner { dimension, corner } => write!(
                f,
                "tensor copy: an im2col store begins before its lower corner or leaves the tensor, the corner is {corner} in dimension {dimension}; an H200 stops with an illegal instruction"
            ),
            MapError::StoreChunk { row_bytes } => write!(
                f,
                "tensor copy: a store into rows of {row_bytes} bytes, which must be a multiple of 16; an H200 writes what lies behind them too"
            ),
            MapError::StridedStore => write!(f, "tensor copy: an im2col store with a traversal stride other than 1 is not documented"),
        }
    }
}

impl std::error::Error for MapError {}

fn count(list: &'static str, given: usize, needed: usize) -> Result<(), MapError> {
    if given == needed { Ok(()) } else { Err(MapError::Count { list, given, needed }) }
}

fn range(what: &'static str, dimension: usize, value: i64, low: i64, high: i64) -> Result<(), MapError> {
    if (low..=high).contains(&value) { Ok(()) } else { Err(MapError::Range { what, dimension, value, low, high }) }
}

fn multiple(what: &'static str, dimension: usize, value: u64, of: u64) -> Result<(), MapError> {
    if value.is_multiple_of(of) { Ok(()) } else { Err(MapError::Multiple { what, dimension, value, of }) }
}

/// Largest corner offset (exclusive above, inclusive below with the sign changed) by rank.
const fn corner_limit(rank: u32) -> i64 {
    match rank {
        3 => 1 << 15,
        4 => 1 << 7,
        _ => 1 << 4,
    }
}

/// Largest filter offset of an im2col load, by rank: 16, 8 or 5 bits.
pub const fn offset_limit(rank: u32) -> u16 {
    match rank {
        3 => u16::MAX,
        4 => u8::MAX as u16,
        _ => 31,
    }
}

/// Checks a tensor map as the driver does when it encodes one.
pub fn check(spec: &MapSpec) -> Result<(), MapError> {
    let decl = &spec.decl;
    let rank = decl.rank as usize;
    if !(if decl.im2col { 3..=5 } else { 1..=5 }).contains(&decl.rank) {
        return Err(MapError::Rank { rank: decl.rank, im2col: decl.im2col });
    }
    count("extents", spec.dims.len(), rank)?;
    count("strides", spec.strides_bytes.len(), rank - 1)?;
    count("traversal strides", spec.element_strides.len(), rank)?;
    count("box extents", decl.box_dims.len(), if decl.im2col { 2 } else { rank })?;
    let corners = if decl.im2col { rank - 2 } else { 0 };
    count("lower corner offsets", spec.lower_corner.len(), corners)?;
    count("upper corner offsets", spec.upper_corner.len(), corners)?;
    for (dimension, &extent) in spec.dims.iter().enumerate() {
        range("the extent", dimension, i64::try_from(extent).unwrap_or(i64::MAX), 1, 1 << 32)?;
    }
    for (index, &stride) in spec.strides_bytes.iter().enumerate() {
        range("the byte stride", index + 1, i64::try_from(stride).unwrap_or(i64::MAX), 0, (1 << 40) - 1)?;
        multiple("the byte stride", index + 1, stride, 16)?;
    }
    for (dimension, &stride) in spec.element_strides.iter().enumerate() {
        range("the traversal stride", dimension, i64::from(stride), 1, 8)?;
    }
    if decl.im2col {
        range("channels per pixel", 0, i64::from(decl.box_dims[0]), 1, 256)?;
        range("pixels per column", 1, i64::from(decl.box_dims[1]), 1, 1024)?;
        let limit = corner_limit(decl.rank);
        for (index, (&lower, &upper)) in spec.lower_corner.iter().zip(&spec.upper_corner).enumerate() {
            range("the lower corner", index + 1, i64::from(lower), -limit, limit - 1)?;
            range("the upper corner", index + 1, i64::from(upper), -limit, limit - 1)?;
            let last = spec.dims[index + 1] as i64 - 1 + i64::from(upper);
            if i64::from(lower) > last {
                return Err(MapError::EmptyBox { dimension: index + 1, first: i64::from(lower), last });
            }
        }
    } else {
        for (dimension, &extent) in decl.box_dims.iter().enumerate() {
            range("the box extent", dimension, i64::from(extent), 1, 256)?;
        }
    }
    let row_bytes = decl.box_dims[0] * decl.ty.bytes();
    multiple("bytes of the box's row", 0, u64::from(row_bytes), 16)?;
    if decl.swizzle != Swizzle::None && row_bytes > decl.swizzle.span_bytes() {
        return Err(MapError::BeyondSpan { row_bytes, swizzle: decl.swizzle });
    }
    if spec.fill == Fill::Nan && matches!(decl.ty, MapType::U8 | MapType::U16 | MapType::U32 | MapType::S32 | MapType::U64) {
        return Err(MapError::FillType { ty: decl.ty });
    }
    Ok(())
}

/// Checks the address of the tensor.
pub fn check_address(address: u64) -> Result<(), MapError> {
    multiple("the address", 0, address, GLOBAL_ALIGNMENT_BYTES)
}

/// Rows of the box (tiled: all positions of the dimensions beyond the innermost; im2col: pixels), and bytes of each.
///
/// With a traversal stride a tiled box of extent `b` has `⌈b / stride⌉` positions; the innermost stride has no effect.
fn rows(spec: &MapSpec) -> (u64, u32) {
    let decl = &spec.decl;
    let row_bytes = decl.box_dims[0] * decl.ty.bytes();
    if decl.im2col {
        return (u64::from(decl.box_dims[1]), row_bytes);
    }
    let rows =
        decl.box_dims.iter().zip(&spec.element_strides).skip(1).map(|(&extent, &stride)| u64::from(extent.div_ceil(stride))).product();
    (rows, row_bytes)
}

/// Bytes that a load of the box brings into shared memory and reports to its mbarrier. The map must have passed [`check`], which does not
/// bound the box as a whole: one that no shared memory holds gives `u32::MAX`.
pub fn copy_bytes(spec: &MapSpec) -> u32 {
    let (rows, row_bytes) = rows(spec);
    u32::try_from(rows * u64::from(row_bytes)).unwrap_or(u32::MAX)
}

/// A run of bytes that a tensor copy moves: contiguous in shared memory and in the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its shared address, with the swizzle applied.
    pub shared_address: u32,
    /// Its length; within one 16-byte chunk if the map is swizzled.
    pub bytes: u32,
    /// Its distance from the tensor's address; `None` where it is outside and filled.
    pub global_offset: Option<u64>,
}

/// Calls `visit` for each run of bytes that a load at `coordinates` (innermost first) writes into shared memory, in packed order of the
/// box. Together the runs cover the box.
///
/// `offsets` are the filter offsets of an im2col load, W first; none for a tiled one. The map must have passed [`check`].
pub fn load_segments(
    spec: &MapSpec,
    shared_address: u32,
    coordinates: &[i32],
    offsets: &[u16],
    mut visit: impl FnMut(Segment),
) -> Result<(), MapError> {
    let spatial = if spec.decl.im2col { spec.decl.rank as usize - 2 } else { 0 };
    count("filter offsets", offsets.len(), spatial)?;
    for (index, &offset) in offsets.iter().enumerate() {
        range("the filter offset", index + 1, i64::from(offset), 0, i64::from(offset_limit(spec.decl.rank)))?;
    }
    segments(spec, shared_address, coordinates, offsets, &mut visit)
}

/// Calls `visit` for each run of bytes that a store or a reduction at `coordinates` takes from shared memory: those inside the tensor.
pub fn store_segments(spec: &MapSpec, shared_address: u32, coordinates: &[i32], mut visit: impl FnMut(Segment)) -> Result<(), MapError> {
    if spec.decl.im2col && spec.element_strides.iter().any(|&stride| stride != 1) {
        return Err(MapError::StridedStore);
    }
    // Loads may begin there. On an H200 each of two stores with a coordinate below 0 failed, each of five without one went well.
    if let Some(dimension) = coordinates.iter().position(|&coordinate| coordinate < 0) {
        return Err(MapError::StoreBefore { dimension, coordinate: coordinates[dimension] });
    }
    let leaves = |(&lower, &upper): (&i32, &i32)| [lower.min(0), upper.max(0)].into_iter().find(|&corner| corner != 0);
    let corners = spec.lower_corner.iter().zip(&spec.upper_corner).map(leaves).enumerate();
    if let Some((index, corner)) = corners.into_iter().find_map(|(index, corner)| Some((index, corner?))) {
        return Err(MapError::StoreCorner { dimension: index + 1, corner });
    }
    let starts = coordinates.iter().skip(1).zip(&spec.lower_corner).enumerate();
    if let Some((index, (_, &corner))) = starts.into_iter().find(|(_, (coordinate, corner))| coordinate < corner) {
        return Err(MapError::StoreCorner { dimension: index + 1, corner });
    }
    let row_bytes = spec.dims.first().map_or(0, |&extent| extent.saturating_mul(u64::from(spec.decl.ty.bytes())));
    if !row_bytes.is_multiple_of(16) {
        return Err(MapError::StoreChunk { row_bytes });
    }
    let no_offsets = [0; 3];
    let spatial = if spec.decl.im2col { spec.decl.rank as usize - 2 } else { 0 };
    segments(spec, shared_address, coordinates, &no_offsets[..spatial], &mut |segment| {
        if segment.global_offset.is_some() {
            visit(segment);
        }
    })
}

fn segments(
    spec: &MapSpec,
    shared_address: u32,
    coordinates: &[i32],
    offsets: &[u16],
    visit: &mut impl FnMut(Segment),
) -> Result<(), MapError> {
    let decl = &spec.decl;
    let rank = decl.rank as usize;
    count("coordinates", coordinates.len(), rank)?;
    multiple("the shared address", 0, u64::from(shared_address), u64::from(SHARED_ALIGNMENT_BYTES))?;
    let chunk_elements = 16 / decl.ty.bytes();
    if coordinates[0].rem_euclid(chunk_elements as i32) != 0 {
        return Err(MapError::Coordinate { coordinate: coordinates[0], elements: chunk_elements });
    }
    let (row_count, row_bytes) = rows(spec);
    if decl.swizzle != Swizzle::None && row_bytes < decl.swizzle.span_bytes() {
        return Err(MapError::BelowSpan { row_bytes, swizzle: decl.swizzle });
    }
    let end = i64::from(shared_address) + row_count as i64 * i64::from(row_bytes);
    range("the end of the box in shared memory", 0, end, 0, i64::from(u32::MAX))?;
    // Positions of the dimensions beyond the innermost: of the row in hand.
    let first: [i64; 4] = std::array::from_fn(|i| if i + 1 < rank { i64::from(coordinates[i + 1]) } else { 0 });
    let mut position = first;
    let mut step = [0u32; 4];
    for row in 0..row_count as u32 {
        let mut base = Some(0u64);
        for (i, (&extent, &stride_bytes)) in spec.dims[1..].iter().zip(&spec.strides_bytes).enumerate() {
            let at = position[i] + offsets.get(i).map_or(0, |&offset| i64::from(offset));
            let inside = at >= 0 && at < extent as i64;
            base = base.filter(|_| inside).map(|base| base.saturating_add((at as u64).saturating_mul(stride_bytes)));
        }
        emit_row(spec, shared_address + row * row_bytes, i64::from(coordinates[0]), base, visit);
        if decl.im2col {
            next_pixel(spec, &mut position);
        } else {
            for i in 0..rank - 1 {
                let stride = spec.element_strides[i + 1];
                step[i] += 1;
                position[i] += i64::from(stride);
                if step[i] < decl.box_dims[i + 1].div_ceil(stride) {
                    break;
                }
                step[i] = 0;
                position[i] = first[i];
            }
        }
    }
    Ok(())
}

/// The next pixel of an im2col walk: spatial dimensions first, then the image.
fn next_pixel(spec: &MapSpec, position: &mut [i64; 4]) {
    let spatial = spec.decl.rank as usize - 2;
    for (i, at) in position.iter_mut().enumerate().take(spatial) {
        *at += i64::from(spec.element_strides[i + 1]);
        if *at < spec.dims[i + 1] as i64 + i64::from(spec.upper_corner[i]) {
            return;
        }
        *at = i64::from(spec.lower_corner[i]);
    }
    position[spatial] += 1;
}

/// One row of the box: `shared` is its address before the swizzle, `from` the innermost coordinate, `base` the row's distance in the tensor.
fn emit_row(spec: &MapSpec, shared: u32, from: i64, base: Option<u64>, visit: &mut impl FnMut(Segment)) {
    let decl = &spec.decl;
    let width = i64::from(decl.ty.bytes());
    let row_bytes = decl.box_dims[0] * decl.ty.bytes();
    // The part of the row inside the tensor, in bytes of the row.
    let (inside_from, inside_to) = match base {
        Some(_) => {
            let clip = |element: i64| (element * width).clamp(0, i64::from(row_bytes)) as u32;
            (clip(-from), clip(spec.dims[0] as i64 - from))
        }
        None => (row_bytes, row_bytes),
    };
    let mut at = 0;
    while at < row_bytes {
        let mut end = if decl.swizzle == Swizzle::None { row_bytes } else { (at / 16 + 1) * 16 };
        for cut in [inside_from, inside_to] {
            if cut > at {
                end = end.min(cut);
            }
        }
        let inside = at >= inside_from && at < inside_to;
        visit(Segment {
            shared_address: decl.swizzle.apply(shared + at),
            bytes: end - at,
            global_offset: base.filter(|_| inside).map(|base| base + (from * width + i64::from(at)) as u64),
        });
        at = end;
    }
}

/// Bits of one element that a load puts where the box is outside the tensor.
pub const fn fill_element(ty: MapType, fill: Fill) -> u64 {
    match (fill, ty) {
        (Fill::Zero, _) => 0,
        // The bits that an H200 fills in, sixteen at a time.
        (Fill::Nan, MapType::F16 | MapType::Bf16) => 0x7ff7,
        (Fill::Nan, MapType::F64) => 0x7ff7_7ff7_7ff7_7ff7,
        (Fill::Nan, _) => 0x7ff7_7ff7,
    }
}

/// A 32-bit word as a load of a tf32 map delivers it: rounded to the nearest tf32, ties to even.
pub const fn tf32_in_flight(word: u32) -> u32 {
    tf32_round(f32::from_bits(word), Rounding::NearestEven).to_bits()
}

/// The type in which a reduction into the tensor computes; `None` where the engine has no reduction.
pub const fn reduction_type(ty: MapType) -> Option<Ty> {
    match ty {
        MapType::U32 => Some(Ty::U32),
        MapType::S32 => Some(Ty::S32),
        MapType::U64 => Some(Ty::U64),
        MapType::F16 => Some(Ty::F16),
        MapType::Bf16 => Some(Ty::Bf16),
        MapType::F32 | MapType::Tf32 => Some(Ty::F32),
        MapType::U8 | MapType::U16 | MapType::F64 => None,
    }
}
