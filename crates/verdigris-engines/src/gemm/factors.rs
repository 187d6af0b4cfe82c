//! Factors of an operand's blocks, as kernels read them: one f32 for each block of an outer index (m of A, n of B) and of k.

use verdigris_graph::Scale;
use verdigris_kir::face::Val;
use verdigris_kir::params::{Divide, Read};

use crate::layout::batch::{BatchStridesBytes, Chunk, Indices};

verdigris_kir::parameters! {
    /// Parameters of one operand's factors; strides in bytes.
    #[derive(Clone, Copy, Debug)]
    pub(super) struct Factors / #[derive(Clone, Copy, Debug)] FactorsArgs of () as _spec {
        factors: Read = 4,
        outer_stride: u64,
        k_stride: u64,
        /// Elements of a block.
        outer: Divide,
        along_k: Divide,
        batch: BatchStridesBytes = (),
    }
}

impl FactorsArgs {
    /// Those of an operand whose blocks have factors.
    pub(super) fn of(scale: Option<&Scale>, chunk: &Chunk) -> Option<FactorsArgs> {
        let Some(Scale::Block { outer, k, factors }) = scale else { return None };
        // A block larger than any index is one block.
        let [outer, along_k] = [*outer, *k].map(|extent| u32::try_from(extent).unwrap_or(u32::MAX));
        Some(FactorsArgs {
            factors: chunk.address(factors, 0, 0),
            outer_stride: factors.row_stride * 4,
            k_stride: factors.column_stride * 4,
            outer,
            along_k,
            batch: chunk.strides_bytes(factors),
        })
    }
}

impl<'k> Factors<'k> {
    /// Where the factors of a matrix of the batch begin.
    pub(super) fn matrix(&self, indices: Indices<'k>) -> Val<'k, u64> {
        self.batch.matrix(self.factors, indices)
    }

    /// How far behind its beginning the factors of outer index `index` are.
    pub(super) fn outer_bytes(&self, index: Val<'k, u32>) -> Val<'k, u64> {
        self.outer.quotient(index).widen() * self.outer_stride
    }

    /// The same where a block is one index wide.
    pub(super) fn single_bytes(&self, index: Val<'k, u32>) -> Val<'k, u64> {
        index.widen() * self.outer_stride
    }

    /// And how far those of `index` along k.
    pub(super) fn k_bytes(&self, index: Val<'k, u32>) -> Val<'k, u64> {
        self.along_k.quotient(index).widen() * self.k_stride
    }
}
