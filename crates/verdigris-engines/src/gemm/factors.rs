//! Factors of an operand's blocks, as kernels read them: one f32 for each block of an outer index (m of A, n of B) and of k.

use verdigris_graph::Matrix;
use verdigris_kir::face::{Divisor, Kernel, Pointer, Val};
use verdigris_kir::ir::Ty;
use verdigris_kir::program::Arg;

use crate::parts::batch::{BatchStrides, Chunk, Indices};

/// Parameters of one operand's factors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Factors<'k> {
    pointer: Pointer<'k>,
    outer_stride: Val<'k, u64>,
    k_stride: Val<'k, u64>,
    outer: Divisor<'k>,
    along_k: Divisor<'k>,
    batch: BatchStrides<'k>,
}

/// The arguments of [`Factors::declare`]: factors of blocks of `outer` by `k` elements.
pub(super) fn args(factors: &Matrix, chunk: &Chunk, outer: u64, k: u64) -> Vec<Arg> {
    // A block larger than any index is one block.
    let divisor = |extent: u64| Arg::Divisor(u32::try_from(extent).unwrap_or(u32::MAX));
    let mut args = vec![
        Arg::Pointer(chunk.address(factors, 0, 0)),
        Arg::Scalar(Ty::U64, factors.row_stride * 4),
        Arg::Scalar(Ty::U64, factors.column_stride * 4),
        divisor(outer),
        divisor(k),
    ];
    args.extend(BatchStrides::args(chunk.strides_bytes(factors)));
    args
}

impl<'k> Factors<'k> {
    /// Declares the parameters.
    pub(super) fn declare(k: Kernel<'k>) -> Self {
        Factors {
            pointer: k.input("factors", 4),
            outer_stride: k.scalar("factors_outer_bytes"),
            k_stride: k.scalar("factors_k_bytes"),
            outer: k.divisor("block_outer"),
            along_k: k.divisor("block_k"),
            batch: BatchStrides::declare(k, ["stride2_bytes", "stride1_bytes", "stride0_bytes"]),
        }
    }

    /// Where the factors of a matrix of the batch begin.
    pub(super) fn matrix(&self, indices: Indices<'k>) -> Val<'k, u64> {
        self.batch.matrix(self.pointer, indices)
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
