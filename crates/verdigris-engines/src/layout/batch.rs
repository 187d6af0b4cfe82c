//! Batches of matrices: which launch, which CTA, which matrix.
//!
//! A launch covers up to three batch dims, the innermost of the problem; grid y and z count the products. What is more (a fourth dim, or
//! more products than a grid has) becomes further launches.

use verdigris_graph::Matrix;
use verdigris_kir::face::{Kernel, Pointer, Val};
use verdigris_kir::inst::Special;
use verdigris_kir::params::{Arguments, Divide, Parameter};
use verdigris_kir::program::{Address, Base};

/// Batch dims that one launch covers.
pub const DIMS: usize = 3;

/// The most products of one launch; grid y and z reach up to 65 535 each.
const LAUNCH_PRODUCTS: u64 = 1 << 30;

/// The part of a batch that one launch covers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chunk {
    /// The first index of each batch dim of the problem.
    pub first: Vec<u64>,
    /// How many indices of the last three dims, outermost first; 1 where the problem has fewer.
    pub extents: [u32; DIMS],
}

impl Chunk {
    /// Cuts a batch into launches. No batch dims make one chunk; a dim of 0 makes none.
    pub fn all(batch: &[u64]) -> Vec<Chunk> {
        if batch.contains(&0) {
            return Vec::new();
        }
        let mut sizes: Vec<u64> = vec![1; batch.len()];
        let mut room = LAUNCH_PRODUCTS;
        for (size, &extent) in sizes.iter_mut().zip(batch).rev().take(DIMS) {
            *size = extent.min(room).max(1);
            room /= *size;
        }
        let mut chunks = vec![Chunk { first: Vec::new(), extents: [1; DIMS] }];
        for (axis, (&extent, &size)) in batch.iter().zip(&sizes).enumerate() {
            chunks = chunks
                .into_iter()
                .flat_map(|chunk| {
                    (0..extent.div_ceil(size)).map(move |i| {
                        let mut next = chunk.clone();
                        next.first.push(i * size);
                        if let Some(place) = (axis + DIMS).checked_sub(batch.len()) {
                            next.extents[place] = size.min(extent - i * size) as u32;
                        }
                        next
                    })
                })
                .collect();
        }
        chunks
    }

    /// Products of this launch.
    pub fn count(&self) -> u32 {
        self.extents.iter().product()
    }

    /// Grid y and z.
    pub fn grid(&self) -> [u32; 2] {
        let y = self.count().min(65535);
        [y, self.count().div_ceil(y)]
    }

    /// The arguments of [`BatchIndex`].
    pub fn index(&self) -> BatchIndexArgs {
        BatchIndexArgs { batch_count: self.count(), batch_inner: self.extents[2], batch_middle: self.extents[1] }
    }

    /// Strides over the dims of the launch, in bytes: the argument of [`BatchStridesBytes`].
    pub fn strides_bytes(&self, matrix: &Matrix) -> [u64; DIMS] {
        let mut strides = [0; DIMS];
        for (stride, &elements) in strides.iter_mut().rev().zip(matrix.batch_strides.iter().rev()) {
            *stride = elements * matrix.dtype.bytes() as u64;
        }
        strides
    }

    /// Where `(row, column)` of the launch's first matrix lies.
    pub fn address(&self, matrix: &Matrix, row: u64, column: u64) -> Address {
        let offset_bytes = matrix.offset(&self.first, row, column) * matrix.dtype.bytes() as u64;
        Address { base: Base::Buffer(matrix.slot.0 as usize), offset_bytes }
    }
}

/// Indices of the three dims of a launch, outermost first.
pub type Indices<'k> = [Val<'k, u32>; DIMS];

verdigris_kir::parameters! {
    /// Which product of the batch a CTA works on: the number of products, and the extents of the two inner dims.
    #[derive(Clone, Copy, Debug)]
    pub struct BatchIndex / #[derive(Clone, Copy, Debug, PartialEq, Eq)] BatchIndexArgs of () as _spec {
        batch_count: u32,
        batch_inner: Divide,
        batch_middle: Divide,
    }
}

impl<'k> BatchIndex<'k> {
    /// The indices of the product that this CTA works on, by grid y and z. Ends CTAs beyond the last one, so it stands at the top level.
    #[track_caller]
    pub fn of_cta(&self) -> Indices<'k> {
        let k = self.batch_count.kernel();
        let product = k.special(Special::CtaZ) * k.special(Special::GridY) + k.special(Special::CtaY);
        k.stop_when(product.ge(self.batch_count));
        self.split(product)
    }

    /// The indices of product `product`.
    #[track_caller]
    pub fn split(&self, product: Val<'k, u32>) -> Indices<'k> {
        let (rest, inner) = self.batch_inner.split(product);
        let (outer, middle) = self.batch_middle.split(rest);
        [outer, middle, inner]
    }
}

/// Strides of one operand over the three dims, in bytes, as a parameter: [`BatchStrides`] in the kernel.
#[derive(Clone, Copy, Debug)]
pub enum BatchStridesBytes {}

impl Parameter for BatchStridesBytes {
    type Spec = ();
    type Value<'k> = BatchStrides<'k>;
    type Argument = [u64; DIMS];

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, name: &'static str, (): &()) -> BatchStrides<'k> {
        BatchStrides(<[u64; DIMS]>::declare(k, name, &()))
    }

    fn bind(strides_bytes: [u64; DIMS], name: &'static str, (): &(), to: &mut Arguments) {
        <[u64; DIMS]>::bind(strides_bytes, name, &(), to);
    }
}

/// Strides of one operand over the three dims, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct BatchStrides<'k>([Val<'k, u64>; DIMS]);

impl<'k> BatchStrides<'k> {
    /// The address of the matrix at `indices`, the first one being at `pointer`.
    #[track_caller]
    pub fn matrix(&self, pointer: Pointer<'k>, indices: Indices<'k>) -> Val<'k, u64> {
        self.from(pointer.address(), indices)
    }

    /// The same from the address of the first one, or from its number where elements are counted.
    #[track_caller]
    pub(crate) fn from(&self, first: Val<'k, u64>, indices: Indices<'k>) -> Val<'k, u64> {
        let mut address = first;
        for (index, stride) in indices.into_iter().zip(self.0) {
            address = address + index.widen() * stride;
        }
        address
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_a_batch_once() {
        assert_eq!(Chunk::all(&[]), [Chunk { first: vec![], extents: [1, 1, 1] }]);
        assert_eq!(Chunk::all(&[7, 0]), []);
        assert_eq!(Chunk::all(&[5, 7]), [Chunk { first: vec![0, 0], extents: [1, 5, 7] }]);
        let four = Chunk::all(&[2, 3, 4, 5]);
        assert_eq!(four.len(), 2);
        assert_eq!(four[1], Chunk { first: vec![1, 0, 0, 0], extents: [3, 4, 5] });
        let large = Chunk::all(&[3, 1 << 31]);
        assert_eq!(large.len(), 6);
        assert_eq!(large[1], Chunk { first: vec![0, 1 << 30], extents: [1, 1, 1 << 30] });
        let total: u64 = Chunk::all(&[11, 3 << 29]).iter().map(|chunk| u64::from(chunk.count())).sum();
        assert_eq!(total, 11 * (3 << 29));
        for chunk in four.iter().chain(&large) {
            let [y, z] = chunk.grid();
            assert!(y <= 65535 && z <= 65535 && u64::from(y) * u64::from(z) >= u64::from(chunk.count()));
        }
    }
}
