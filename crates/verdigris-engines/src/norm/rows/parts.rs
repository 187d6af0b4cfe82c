//! The second launch of the gradients of scale and bias: the lines of sums that CTAs left, added up column by column in the order of the CTAs, both by one launch.

use serde::{Deserialize, Serialize};
use verdigris_kir::face::{Header, Kernel, Val, build};
use verdigris_kir::inst::Special;
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::Read;
use verdigris_kir::program::KernelRef;
use verdigris_tensor::DType;

use crate::fuse::compute::{self, Compute};
use crate::fuse::operand::OperandArgs;
use crate::fuse::strided::{self, Strided};
use crate::fuse::value::AnyVal;
use crate::layout::space::Extents;

/// Columns of a CTA: a lane each.
pub(super) const COLUMNS: u32 = 32;
/// Warps of a CTA that goes through any number of lines: of many CTAs, and of so few that each has an SM.
const WARPS: [u32; 2] = [8, 32];
/// Lines that are on their way at a time.
const UNROLL: u32 = 8;
/// Warps of a CTA whose loads are all on their way at a time: of few lines, and of as many as there may be.
const AT_ONCE: [u32; 2] = [8, 32];
/// The most lines that are all on their way at a time.
pub(super) const MOST_AT_ONCE: u32 = AT_ONCE[1] * UNROLL;

/// Everything that shapes the kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct JoinSpec {
    /// Of each vector.
    dtypes: Vec<DType>,
    double: bool,
    /// Dims of the vectors.
    rank: usize,
    /// It starts while the launch in front of it ends.
    pub(super) overlaps: bool,
    /// Warps of a CTA.
    warps: u32,
    /// All lines are on their way at a time; elsewhere warps go on until there is no line left.
    at_once: bool,
}

verdigris_kir::parameters! {
    /// Of the kernel that adds lines up.
    pub(super) struct Join / JoinArgs of JoinSpec as spec {
        pub(super) columns: u32,
        pub(super) lines: u32,
        pub(super) space: Extents = spec.rank,
        /// All lines of the first vector, then those of the second.
        pub(super) parts: Read = spec.bytes(),
        pub(super) to: Vec<OperandArgs> = spec.dtypes.iter().map(|&dtype| strided::declaration(dtype, spec.rank, true)).collect::<Vec<_>>(),
    }
}

impl JoinSpec {
    pub(super) fn new(dtypes: Vec<DType>, compute: DType, rank: usize, overlaps: bool) -> JoinSpec {
        JoinSpec { dtypes, double: compute == DType::F64, rank, overlaps, warps: WARPS[0], at_once: false }
    }

    /// The same for at most [`MOST_AT_ONCE`] lines, whose loads are all on their way at a time.
    pub(super) fn at_once(self, lines: u32) -> JoinSpec {
        let [few, many] = AT_ONCE;
        JoinSpec { at_once: true, warps: if lines <= few * UNROLL { few } else { many }, ..self }
    }

    /// The same of more warps, where CTAs are few.
    pub(super) fn of_few_ctas(self) -> JoinSpec {
        JoinSpec { warps: WARPS[1], ..self }
    }

    fn bytes(&self) -> u32 {
        if self.double { 8 } else { 4 }
    }

    fn name(&self) -> String {
        let dtypes: String = self.dtypes.iter().map(|dtype| format!("_{dtype}")).collect();
        let overlapped = if self.overlaps { "_overlapped" } else { "" };
        let at_once = match (self.at_once, self.warps) {
            (true, warps) => format!("_once{warps}"),
            (false, warps) if warps == WARPS[0] => String::new(),
            (false, warps) => format!("_warps{warps}"),
        };
        format!("norm_rows_join{}_d{}{dtypes}{at_once}{overlapped}", if self.double { "_f64" } else { "" }, self.rank)
    }

    pub(super) fn target(&self) -> Target {
        let own = if self.overlaps { Target::Sm90 } else { Target::Sm80 };
        compute::target_of_all(self.dtypes.iter().copied()).max(own)
    }

    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.target(), threads: 32 * self.warps, min_ctas: 1, cluster: 1 };
        build(header, |k| if self.double { self.body::<f64>(k) } else { self.body::<f32>(k) })
    }

    /// Lanes stand along columns, warps share the lines out; CTAs of another `y` have another vector.
    fn body<'k, T: Compute>(&self, k: Kernel<'k>) {
        let Join { columns, lines, space, parts, to } = Join::declare(k, self);
        if self.overlaps {
            k.griddep_wait();
        }
        let (bytes, warps) = (T::TY.bytes(), self.warps);
        let to: Vec<Strided<'k>> = self.dtypes.iter().zip(to).map(|(&dtype, to)| Strided::new(dtype, to)).collect();
        let vector = k.special(Special::CtaY);
        let (lane, warp) = (k.lane(), k.thread() >> 5);
        let column = k.cta() * COLUMNS + lane;
        let inside = column.lt(columns);
        let from = parts.at(column.min(columns - 1), bytes) + (vector * lines).mul_wide(columns) * u64::from(bytes);
        let load = |line: Val<'k, u32>| k.ld_global::<T>(from + line.mul_wide(columns) * u64::from(bytes), 0);
        // A warp without a line takes the last one and does not count it, so that no load waits for a branch.
        let lines_from = |first: Val<'k, u32>| {
            let lines_of_warp = (0..UNROLL).map(|turn| first + turn * warps);
            let loaded: Vec<_> = lines_of_warp.map(|line| (line.lt(lines), load(line.min(lines - 1)))).collect();
            let values = loaded.into_iter().map(|(inside, value)| k.select(inside, value, T::constant(k, 0.0)));
            values.reduce(|sum, value| sum + value).unwrap_or_else(|| T::constant(k, 0.0))
        };
        let own = if self.at_once {
            lines_from(warp)
        } else {
            let sum = k.var(T::constant(k, 0.0));
            k.range_step(warp, lines, warps * UNROLL, |first| sum.set(sum.get() + lines_from(first)));
            sum.get()
        };
        let scratch = k.shared("warps", 32 * warps * bytes, 16).address();
        k.st_shared(scratch + k.thread() * bytes, 0, own);
        k.bar_sync();
        k.when(inside & warp.eq(0), || {
            let own = |other: u32| k.ld_shared::<T>(scratch + lane * bytes, i64::from(other * COLUMNS * bytes));
            let whole = (1..warps).fold(own(0), |sum, other| sum + own(other));
            let index = space.index(column);
            for (number, to) in (0u32..).zip(&to) {
                k.when(vector.eq(number), || to.store(&index, AnyVal::of(whole)));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_lines_of_a_join_at_once_are_on_their_way() {
        let join = JoinSpec::new(vec![DType::F32], DType::F32, 1, false);
        for lines in 1..=MOST_AT_ONCE {
            let warps = join.clone().at_once(lines).warps;
            assert!(lines <= warps * UNROLL, "{lines} lines, {warps} warps that load {UNROLL} each");
        }
    }
}
