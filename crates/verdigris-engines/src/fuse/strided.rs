//! Operands that lie over a space by strides, read and written as values of the pointwise language.

use verdigris_graph::View;
use verdigris_kir::face::{Bf16x2, F16x2, FloatScalar, Kernel, Mbarrier, Val, Var};
use verdigris_kir::inst::{Cache, CvtRound};
use verdigris_kir::program::Address;
use verdigris_tensor::DType;

use super::compute::{self, Compute};
use super::operand::{Layout, Operand, OperandArgs, OperandDecl, OperandSpec, Strides, Walk};
use super::steps::Role;
use super::value::{AnyVal, Raw, elements_of, load_raw, load_words, store_raw, store_values, store_values_with, store_words};
use crate::layout::space::element;

fn role(written: bool) -> Role {
    if written { Role::Written } else { Role::Read }
}

/// The declaration of an operand over `rank` dims.
pub(crate) fn declaration(dtype: DType, rank: usize, written: bool) -> OperandDecl {
    OperandDecl { spec: OperandSpec { dtype, walk: Walk::PerRow }, layout: Layout::Space(rank), together: 1, is: role(written) }
}

/// Those of operands of these types, of which the last `outputs` are written.
pub(crate) fn declarations(types: &[DType], rank: usize, outputs: usize) -> Vec<OperandDecl> {
    types.iter().enumerate().map(|(i, &dtype)| declaration(dtype, rank, i + outputs >= types.len())).collect()
}

/// The declaration of an operand whose last dim lies side by side and is taken `vector` elements at a time; `rank` counts the dims in front of it.
pub(crate) fn lines_declaration(dtype: DType, rank: usize, vector: u32, written: bool) -> OperandDecl {
    OperandDecl { spec: OperandSpec { dtype, walk: Walk::Row }, layout: Layout::Space(rank), together: vector, is: role(written) }
}

/// The argument for such an operand from an index on.
pub(crate) fn lines_argument(view: &View, first: &[u64]) -> OperandArgs {
    let strides = Strides::from(view).at(element(view, first.iter().copied())).of_lines();
    // One element for the whole line has no neighbours; a dim of one element may have any stride.
    let spec = OperandSpec { walk: Walk::Row, ..strides.spec() };
    strides.arguments(spec)
}

/// How many neighbours along the last dim an access of all these views over `dims` may take: as [`neighbours_of`] each of them, at most 16 bytes of the
/// widest.
pub(crate) fn vector_of<'v>(views: impl IntoIterator<Item = &'v View>, dims: &[u64]) -> u32 {
    let limit = |view: &View| neighbours_of(view, dims).min(16 / view.dtype.bytes() as u32);
    views.into_iter().map(limit).min().unwrap_or(1)
}

/// How many neighbours along the last dim an access of a view over `dims` may take: the largest power of two up to 16 that strides, offset and the extent
/// allow; 1 where neighbours do not lie side by side.
pub(crate) fn neighbours_of(view: &View, dims: &[u64]) -> u32 {
    let (Some((&extent, outer)), Some(&stride)) = (dims.split_last(), view.strides.last()) else { return 1 };
    if stride != 1 {
        return 1;
    }
    let strides = view.strides.iter().zip(outer).filter(|(_, extent)| **extent > 1);
    let bits = strides.fold(view.offset | extent | 16, |bits, (stride, _)| bits | stride);
    1 << bits.trailing_zeros()
}

/// Whether the lines of all these views over `dims` begin equally far from a whole vector of `vector` elements, wherever that is.
pub(crate) fn begin_alike<'v>(views: impl IntoIterator<Item = &'v View>, dims: &[u64], vector: u32) -> bool {
    let far = |stride: u64| stride % u64::from(vector);
    let outer = &dims[..dims.len().saturating_sub(1)];
    let of = |view: &View| -> Vec<u64> {
        // A dim of one element may have any stride.
        let strides = view.strides.iter().zip(outer).map(|(&stride, &extent)| if extent > 1 { far(stride) } else { 0 });
        strides.chain([far(view.offset)]).collect()
    };
    let mut views = views.into_iter().map(of);
    views.next().is_none_or(|first| views.all(|other| other == first))
}

/// The argument for an operand with the strides of a view that begins elsewhere than its buffer does: in scratch. Of a line, the view has the strides of the
/// dims in front of it.
pub(crate) fn argument_at(view: &View, first: Address) -> OperandArgs {
    let strides = Strides::from(view).at(first);
    strides.arguments(strides.spec())
}

/// The argument for an operand from an index on.
pub(crate) fn argument(view: &View, first: &[u64]) -> OperandArgs {
    let strides = Strides::from(view).at(element(view, first.iter().copied()));
    strides.arguments(strides.spec())
}

/// An operand in a kernel, or what is left of one at an index of its first dims.
#[derive(Clone, Debug)]
pub(crate) struct Strided<'k> {
    pub dtype: DType,
    address: Val<'k, u64>,
    strides_bytes: Vec<Val<'k, u64>>,
}

impl<'k> Strided<'k> {
    /// A declared operand.
    #[track_caller]
    pub(crate) fn new(dtype: DType, operand: Operand<'k>) -> Self {
        Strided { dtype, address: operand.start(), strides_bytes: operand.row_strides }
    }

    /// Declared operands of these types.
    #[track_caller]
    pub(crate) fn all(dtypes: &[DType], operands: Vec<Operand<'k>>) -> Vec<Self> {
        dtypes.iter().zip(operands).map(|(&dtype, operand)| Strided::new(dtype, operand)).collect()
    }

    #[track_caller]
    fn address(&self, index: &[Val<'k, u32>]) -> Val<'k, u64> {
        self.strides_bytes.iter().zip(index).fold(self.address, |address, (&stride, &i)| address + i.widen() * stride)
    }

    /// What is left at an index of the first dims.
    #[track_caller]
    pub(crate) fn at(&self, index: &[Val<'k, u32>]) -> Strided<'k> {
        let strides_bytes = self.strides_bytes.iter().skip(index.len()).copied().collect();
        Strided { dtype: self.dtype, address: self.address(index), strides_bytes }
    }

    /// How far an index along one of its dims is from 0, in bytes.
    #[track_caller]
    pub(crate) fn distance(&self, dim: usize, index: Val<'k, u32>) -> Val<'k, u64> {
        index.widen() * self.strides_bytes[dim]
    }

    /// The same, so many bytes further on.
    #[track_caller]
    pub(crate) fn moved(&self, distance_bytes: Val<'k, u64>) -> Strided<'k> {
        Strided { address: self.address + distance_bytes, ..self.clone() }
    }

    /// The first element, as it is stored.
    #[track_caller]
    pub(crate) fn first(&self) -> AnyVal<'k> {
        AnyVal::Stored(self.dtype, self.raw(&[]))
    }

    /// The line at an index of all dims but the last, which was declared to be taken `vector` elements at a time.
    #[track_caller]
    pub(crate) fn line(&self, index: &[Val<'k, u32>], vector: u32) -> Line<'k> {
        Line { dtype: self.dtype, address: self.address(index), vector }
    }

    /// The bits at an index; dims that it leaves out are at 0.
    #[track_caller]
    fn raw(&self, index: &[Val<'k, u32>]) -> Raw<'k> {
        load_raw(self.address.kernel(), self.dtype, self.address(index), 1)[0]
    }

    /// The element at an index; dims that it leaves out are at 0.
    #[track_caller]
    pub(crate) fn load<T: Compute>(&self, index: &[Val<'k, u32>]) -> Val<'k, T> {
        AnyVal::Stored(self.dtype, self.raw(index)).get(self.address.kernel())
    }

    /// The element, of an integer type.
    #[track_caller]
    pub(crate) fn load_integer(&self, index: &[Val<'k, u32>]) -> Val<'k, i64> {
        match self.raw(index) {
            Raw::B8(bits) if self.dtype == DType::I8 => ((bits << 24).signed() >> 24).widen(),
            Raw::B8(bits) => bits.signed().widen(),
            Raw::B16(bits) => bits.convert(CvtRound::None),
            Raw::B32(bits) => bits.signed().widen(),
            Raw::B64(bits) => bits.bitcast(),
        }
    }

    /// Rounds and stores an element.
    #[track_caller]
    pub(crate) fn store(&self, index: &[Val<'k, u32>], value: AnyVal<'k>) {
        let (k, address) = (self.address.kernel(), self.address(index));
        store_raw(k, address, &[value.encoded(k, self.dtype)]);
    }
}

/// Elements side by side in memory, a vector of them to an access.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Line<'k> {
    dtype: DType,
    address: Val<'k, u64>,
    vector: u32,
}

/// A vector of neighbours as it is stored: few registers for many elements.
#[derive(Clone, Debug)]
pub(crate) struct Packed<'k> {
    dtype: DType,
    vector: u32,
    words: Vec<Val<'k, u32>>,
}

impl<'k> Line<'k> {
    fn place(&self, number: Val<'k, u32>) -> Val<'k, u64> {
        self.address + number.mul_wide(self.vector * self.dtype.bytes() as u32)
    }

    /// How many of its elements, which are taken one by one, stand in front of the first that begins `vector` of them in memory.
    #[track_caller]
    pub(crate) fn in_front_of(&self, vector: u32) -> Val<'k, u32> {
        let place = self.address.low32() >> (self.dtype.bytes() as u32).ilog2();
        (self.address.kernel().constant(0u32) - place) & (vector - 1)
    }

    /// The elements from one on, of a line that is taken one by one, taken by vectors.
    #[track_caller]
    pub(crate) fn vectors_from(&self, element: Val<'k, u32>, vector: u32) -> Line<'k> {
        Line { address: self.address + element.mul_wide(self.dtype.bytes() as u32), vector, ..*self }
    }

    /// Loads the vector of that number.
    #[track_caller]
    pub(crate) fn load(&self, number: Val<'k, u32>) -> Packed<'k> {
        Packed::load(self.dtype, self.vector, self.place(number), Cache::Default)
    }

    /// The same of what nobody reads again: L1 keeps what is read often; with `streams`, all caches evict it first.
    #[track_caller]
    pub(crate) fn load_once(&self, number: Val<'k, u32>, streams: bool) -> Packed<'k> {
        let cache = if streams { Cache::Streaming } else { Cache::NoAllocate };
        Packed::load(self.dtype, self.vector, self.place(number), cache)
    }

    /// Starts a copy of the vector of that number, of 4, 8 or 16 bytes, to shared memory.
    #[track_caller]
    pub(crate) fn start_copy(&self, number: Val<'k, u32>, to: Val<'k, u32>, offset_bytes: i64) {
        let bytes = self.vector * self.dtype.bytes() as u32;
        self.address.kernel().cp_async(to, offset_bytes, self.place(number), 0, bytes as u8, bytes);
    }

    /// Starts the copy of the line's first bytes, a multiple of 16, to shared memory; completes on `barrier`.
    #[track_caller]
    pub(crate) fn start_bulk_copy(&self, to: Val<'k, u32>, bytes: Val<'k, u32>, barrier: Mbarrier<'k>) {
        self.address.kernel().bulk_load(to, self.address, bytes, barrier);
    }

    /// Loads the vector of that number where a condition holds; elsewhere zeros.
    #[track_caller]
    pub(crate) fn load_where(&self, inside: Val<'k, bool>, number: Val<'k, u32>) -> Packed<'k> {
        let k = self.address.kernel();
        let kept = Kept::new(k, self.dtype, self.vector);
        k.when(inside, || kept.set(&self.load(number)));
        kept.get()
    }

    /// Loads the element of that number.
    #[track_caller]
    pub(crate) fn element<T: Compute>(&self, number: Val<'k, u32>) -> Val<'k, T> {
        let (k, bytes) = (self.address.kernel(), self.dtype.bytes() as u32);
        AnyVal::Stored(self.dtype, load_raw(k, self.dtype, self.address + number.mul_wide(bytes), 1)[0]).get(k)
    }

    /// Stores the vector of that number: of the line's type, and whole words.
    #[track_caller]
    pub(crate) fn store_packed(&self, number: Val<'k, u32>, packed: &Packed<'k>) {
        store_words(self.address.kernel(), self.place(number), &packed.words, Cache::Default);
    }

    /// Rounds and stores the vector of that number.
    #[track_caller]
    pub(crate) fn store<T: Compute>(&self, number: Val<'k, u32>, values: &[Val<'k, T>]) {
        self.store_values(number, &values.iter().map(|&value| AnyVal::of(value)).collect::<Vec<_>>());
    }

    /// The same with a streaming hint: caches evict it first.
    #[track_caller]
    pub(crate) fn store_streaming<T: Compute>(&self, number: Val<'k, u32>, values: &[Val<'k, T>]) {
        let values: Vec<AnyVal<'k>> = values.iter().map(|&value| AnyVal::of(value)).collect();
        store_values_with(self.address.kernel(), self.dtype, self.place(number), &values, Cache::Streaming);
    }

    /// The same of values of any types.
    #[track_caller]
    pub(crate) fn store_values(&self, number: Val<'k, u32>, values: &[AnyVal<'k>]) {
        store_values(self.address.kernel(), self.dtype, self.place(number), values);
    }
}

/// A vector of neighbours in variables, for one that comes in place of another.
#[derive(Clone, Debug)]
pub(crate) struct Kept<'k> {
    dtype: DType,
    vector: u32,
    words: Vec<Var<'k, u32>>,
}

impl<'k> Kept<'k> {
    /// Of zeros.
    #[track_caller]
    pub(crate) fn new(k: Kernel<'k>, dtype: DType, vector: u32) -> Self {
        Kept { dtype, vector, words: (0..words_of(dtype, vector)).map(|_| k.var(0u32)).collect() }
    }

    /// Of what is there already.
    #[track_caller]
    pub(crate) fn of(first: &Packed<'k>) -> Self {
        let words = first.words.iter().map(|&word| word.kernel().var(word)).collect();
        Kept { dtype: first.dtype, vector: first.vector, words }
    }

    /// Keeps what has been copied to shared memory.
    #[track_caller]
    pub(crate) fn set_copied(&self, k: Kernel<'k>, from: Val<'k, u32>, offset_bytes: i64) {
        self.set(&Packed::load_copied(k, self.dtype, self.vector, from, offset_bytes));
    }

    /// Keeps another.
    #[track_caller]
    pub(crate) fn set(&self, packed: &Packed<'k>) {
        self.words.iter().zip(&packed.words).for_each(|(word, new)| word.set(*new));
    }

    /// What is kept now.
    #[track_caller]
    pub(crate) fn get(&self) -> Packed<'k> {
        Packed { dtype: self.dtype, vector: self.vector, words: self.words.iter().map(|word| word.get()).collect() }
    }
}

/// The greater of each two 16-bit floats in a word, NaN where one of them is.
#[track_caller]
fn greater_pair<'k>(dtype: DType, x: Val<'k, u32>, y: Val<'k, u32>) -> Val<'k, u32> {
    fn of<'k, P: FloatScalar>(x: Val<'k, u32>, y: Val<'k, u32>) -> Val<'k, u32> {
        x.bitcast::<P>().max_nan(y.bitcast::<P>()).bitcast()
    }
    if dtype == DType::Bf16 { of::<Bf16x2>(x, y) } else { of::<F16x2>(x, y) }
}

/// Registers that a vector of neighbours takes as it is stored.
pub(crate) fn words_of(dtype: DType, vector: u32) -> u32 {
    (vector * dtype.bytes() as u32).div_ceil(4)
}

impl<'k> Packed<'k> {
    /// Loads the vector at an address.
    #[track_caller]
    pub(crate) fn load(dtype: DType, vector: u32, address: Val<'k, u64>, cache: Cache) -> Self {
        Packed { dtype, vector, words: load_words(address.kernel(), address, vector * dtype.bytes() as u32, cache) }
    }

    /// Loads a vector that has been copied to shared memory.
    #[track_caller]
    pub(crate) fn load_copied(k: Kernel<'k>, dtype: DType, vector: u32, from: Val<'k, u32>, offset_bytes: i64) -> Self {
        let words = match words_of(dtype, vector) {
            1 => vec![k.ld_shared::<u32>(from, offset_bytes)],
            many => k.ld_shared_vector::<u32>(from, offset_bytes, many as u8),
        };
        Packed { dtype, vector, words }
    }

    /// Whether it is pairs of 16-bit floats.
    fn is_pairs(&self) -> bool {
        matches!(self.dtype, DType::F16 | DType::Bf16) && self.vector >= 2
    }

    /// Its elements.
    #[track_caller]
    pub(crate) fn values<T: Compute>(&self, k: Kernel<'k>) -> Vec<Val<'k, T>> {
        if self.is_pairs() {
            let pairs = self.words.iter().map(|&word| compute::widen_pair(k, self.dtype, word));
            return pairs.flatten().map(T::from_f32).collect();
        }
        let raws = elements_of(k, self.dtype, &self.words, self.vector);
        raws.into_iter().map(|raw| AnyVal::Stored(self.dtype, raw).get(k)).collect()
    }

    /// Its elements, as they are stored.
    #[track_caller]
    pub(crate) fn stored(&self, k: Kernel<'k>) -> Vec<AnyVal<'k>> {
        elements_of(k, self.dtype, &self.words, self.vector).into_iter().map(|raw| AnyVal::Stored(self.dtype, raw)).collect()
    }

    /// The same where a condition holds, else zeros.
    #[track_caller]
    pub(crate) fn only_where(&self, k: Kernel<'k>, condition: Val<'k, bool>) -> Packed<'k> {
        Packed { words: self.words.iter().map(|&word| k.select(condition, word, 0u32)).collect(), ..*self }
    }

    /// The greatest of its elements, NaN if one is: of 16-bit floats without widening them.
    #[track_caller]
    pub(crate) fn greatest<T: Compute>(&self, k: Kernel<'k>) -> Val<'k, T> {
        let pair = self.words.iter().copied().reduce(|x, y| greater_pair(self.dtype, x, y));
        let values = match pair.filter(|_| self.is_pairs()) {
            Some(pair) => compute::widen_pair(k, self.dtype, pair).map(T::from_f32).to_vec(),
            None => self.values(k),
        };
        values.into_iter().reduce(|x, y| T::max_nan(x, y)).expect("a vector has elements")
    }

    /// Whether [`Packed::greater`] has elements of this type, as many to an access.
    pub(crate) fn is_compared(dtype: DType, vector: u32) -> bool {
        dtype == DType::F32 || (matches!(dtype, DType::F16 | DType::Bf16) && vector >= 2)
    }

    /// So many elements of −∞, of a type that is compared.
    #[track_caller]
    pub(crate) fn least(k: Kernel<'k>, dtype: DType, vector: u32) -> Packed<'k> {
        let word = match dtype {
            DType::Bf16 => 0xff80_ff80_u32,
            DType::F16 => 0xfc00_fc00,
            _ => 0xff80_0000,
        };
        Packed { dtype, vector, words: (0..words_of(dtype, vector)).map(|_| k.constant(word)).collect() }
    }

    /// The greater of each two elements, NaN where one of them is, without widening them.
    #[track_caller]
    pub(crate) fn greater(&self, other: &Packed<'k>) -> Packed<'k> {
        let greater = |(&x, &y): (&Val<'k, u32>, &Val<'k, u32>)| match self.dtype {
            DType::F32 => x.bitcast::<f32>().max_nan(y.bitcast::<f32>()).bitcast(),
            dtype => greater_pair(dtype, x, y),
        };
        Packed { words: self.words.iter().zip(&other.words).map(greater).collect(), ..*self }
    }

    /// The same elements in words that the assembler does not know to be the same; `zero` is a number that it does not know to be 0. What is widened
    /// again is then not kept wide from one time to the next, for which there would be no registers.
    #[track_caller]
    pub(crate) fn again(&self, zero: Val<'k, u32>) -> Packed<'k> {
        Packed { words: self.words.iter().map(|&word| word ^ zero).collect(), ..*self }
    }

    /// Which of its elements, integers of 32 or 64 bits, are a number below 2³¹.
    #[track_caller]
    pub(crate) fn are(&self, k: Kernel<'k>, number: Val<'k, u32>) -> Vec<Val<'k, bool>> {
        let is = |raw| match raw {
            Raw::B8(bits) | Raw::B32(bits) => bits.eq(number),
            Raw::B16(bits) => bits.convert::<u32>(CvtRound::None).eq(number),
            Raw::B64(bits) => bits.eq(number.widen()),
        };
        elements_of(k, self.dtype, &self.words, self.vector).into_iter().map(is).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_graph::Slot;

    #[test]
    fn an_access_takes_what_strides_offset_and_extent_allow() {
        let view = |offset, strides: &[u64]| View { slot: Slot(0), dtype: DType::Bf16, offset, strides: strides.to_vec() };
        for (offset, strides, dims, want) in [
            (0, [64, 1], [5, 64], 16),
            (0, [64, 1], [5, 24], 8),
            (4, [64, 1], [5, 64], 4),
            (0, [66, 1], [5, 64], 2),
            // One row has no next one.
            (0, [67, 1], [1, 64], 16),
            (0, [64, 1], [5, 63], 1),
            (0, [64, 2], [5, 32], 1),
            (0, [1, 0], [64, 32], 1),
        ] {
            assert_eq!(neighbours_of(&view(offset, &strides), &dims), want, "{offset} {strides:?} {dims:?}");
        }
        let alike = |other: &View| begin_alike([&view(1, &[67, 1]), other], &[5, 67], 8);
        assert!(alike(&view(9, &[3, 1])), "the same elements of 16 bytes");
        assert!(!alike(&view(2, &[67, 1])) && !alike(&view(1, &[68, 1])));
        let wide = View { dtype: DType::F32, ..view(0, &[64, 1]) };
        assert_eq!(vector_of([&view(0, &[64, 1]), &wide], &[5, 64]), 4, "16 bytes of the widest");
    }
}
