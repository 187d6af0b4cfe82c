//! The second launch of the gradients of scale and bias: the lines of sums that CTAs left, added up column by column in the order of the CTAs.

use serde::{Deserialize, Serialize};
use verdigris_kir::face::{Header, Kernel, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::Read;
use verdigris_kir::program::KernelRef;
use verdigris_tensor::DType;

use crate::fuse::compute::{self, Compute};
use crate::fuse::operand::OperandArgs;
use crate::fuse::strided::{self, Strided};
use crate::fuse::value::AnyVal;
use crate::layout::space::Extents;

const THREADS: u32 = 256;
/// Columns of a CTA: a lane each.
pub(super) const COLUMNS: u32 = 32;
const WARPS: u32 = THREADS / 32;
/// Lines that are on their way at a time.
const UNROLL: u32 = 4;

/// Everything that shapes the kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct JoinSpec {
    dtype: DType,
    double: bool,
    /// Dims of the vector.
    rank: usize,
}

verdigris_kir::parameters! {
    /// Of the kernel that adds lines up.
    pub(super) struct Join / JoinArgs of JoinSpec as spec {
        pub(super) columns: u32,
        pub(super) lines: u32,
        pub(super) space: Extents = spec.rank,
        pub(super) parts: Read = spec.bytes(),
        pub(super) to: OperandArgs = strided::declaration(spec.dtype, spec.rank, true),
    }
}

impl JoinSpec {
    pub(super) fn new(dtype: DType, compute: DType, rank: usize) -> JoinSpec {
        JoinSpec { dtype, double: compute == DType::F64, rank }
    }

    fn bytes(&self) -> u32 {
        if self.double { 8 } else { 4 }
    }

    fn name(&self) -> String {
        format!("norm_rows_join{}_d{}_{}", if self.double { "_f64" } else { "" }, self.rank, self.dtype)
    }

    fn target(&self) -> Target {
        compute::target_of(self.dtype)
    }

    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas: 1, cluster: 1 };
        build(header, |k| if self.double { self.body::<f64>(k) } else { self.body::<f32>(k) })
    }

    /// Lanes stand along columns, warps share the lines out.
    fn body<'k, T: Compute>(&self, k: Kernel<'k>) {
        let Join { columns, lines, space, parts, to } = Join::declare(k, self);
        let to = Strided::new(self.dtype, to);
        let bytes = T::TY.bytes();
        let (lane, warp) = (k.lane(), k.thread() >> 5);
        let column = k.cta() * COLUMNS + lane;
        let inside = column.lt(columns);
        let from = parts.at(column.min(columns - 1), bytes);
        let sum = k.var(T::constant(k, 0.0));
        let turns = (lines + (WARPS - 1) - warp) >> WARPS.ilog2();
        k.range_unrolled(turns, UNROLL, |turn| {
            let line = warp + turn * WARPS;
            sum.set(sum.get() + k.ld_global::<T>(from + line.mul_wide(columns) * u64::from(bytes), 0));
        });
        let scratch = k.shared("warps", THREADS * bytes, 16).address();
        k.st_shared(scratch + k.thread() * bytes, 0, sum.get());
        k.bar_sync();
        k.when(inside & warp.eq(0), || {
            let own = |other: u32| k.ld_shared::<T>(scratch + lane * bytes, i64::from(other * COLUMNS * bytes));
            let whole = (1..WARPS).fold(own(0), |sum, other| sum + own(other));
            to.store(&space.index(column), AnyVal::of(whole));
        });
    }
}
