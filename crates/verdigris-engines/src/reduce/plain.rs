//! Plain reductions of rows whose elements lie side by side: which are some, where the engines of long and of short ones part, and what shapes the kernels of both.

use serde::{Deserialize, Serialize};
use verdigris_graph::{ChainStep, Problem, ReduceProblem, ReductionOp, View};
use verdigris_kir::face::Val;
use verdigris_kir::ir::Target;
use verdigris_tensor::DType;

use crate::engine::{EngineId, Reason, Refusal};
use crate::fuse::compute::{self, Compute};

/// An access.
pub(super) const VECTOR_BYTES: u32 = 16;
/// The shortest rows that teams of lanes take: of 98 bytes, `reduce.simt` takes 6.2 us for 65,536 where these teams take 9.3 (one H200).
pub(super) const LEAST_BYTES: u64 = 192;

/// What is reduced, and how.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct Plain {
    /// A maximum in place of a sum, which is divided for a mean.
    pub(super) max: bool,
    pub(super) from: DType,
    pub(super) to: DType,
}

impl Plain {
    pub(super) fn of(f: ReductionOp, from: &View, to: &View) -> Plain {
        Plain { max: f == ReductionOp::Max, from: from.dtype, to: to.dtype }
    }

    /// Those that catalogs have.
    pub(super) fn all() -> impl Iterator<Item = Plain> {
        let types = [DType::F32, DType::F16, DType::Bf16].into_iter().flat_map(|from| {
            let to = if from == DType::F32 { vec![from] } else { vec![from, DType::F32] };
            to.into_iter().map(move |to| (from, to))
        });
        types.flat_map(|(from, to)| [false, true].map(|max| Plain { max, from, to }))
    }

    pub(super) fn name(self) -> &'static str {
        if self.max { "max" } else { "sum" }
    }

    pub(super) fn target(self) -> Target {
        compute::target_of_all([self.from, self.to])
    }

    pub(super) fn combine<'k>(self, x: Val<'k, f32>, y: Val<'k, f32>) -> Val<'k, f32> {
        if self.max { <f32 as Compute>::max_nan(x, y) } else { x + y }
    }
}

/// What the sum of a row of so many elements is divided by.
pub(super) fn divisor(f: ReductionOp, depth: u32) -> u32 {
    if f == ReductionOp::Avg { depth } else { 1 }
}

/// A plain reduction of rows whose elements lie side by side, with what it reads and writes.
pub(super) fn plain_rows(id: EngineId, problem: &Problem) -> Result<(&ReduceProblem, &View, &View), Refusal> {
    let Problem::Reduce(p) = problem else {
        return Err(id.refusal(Reason::Problem, format_args!("{}, taken is reduce", problem.kind())));
    };
    let is_taken = matches!(p.f, ReductionOp::Add | ReductionOp::Avg | ReductionOp::Max);
    id.require(is_taken, Reason::Problem, format_args!("{}, taken are sums, means and maxima", p.f.name()))?;
    let (from, to) = match (&p.before.steps[..], &p.after.steps[..]) {
        ([ChainStep::Load { from, window: None }], [ChainStep::Given, ChainStep::Store { x: 0, to, at: None }]) => (from, to),
        _ => return Err(id.refusal(Reason::Epilogue, "steps before or behind, taken are none")),
    };
    let is_float = [DType::F32, DType::F16, DType::Bf16].contains(&from.dtype);
    let is_taken = is_float && p.accumulator == DType::F32 && [from.dtype, DType::F32].contains(&to.dtype);
    let reason =
        format_args!("{} to {} in {}, taken are f32, f16 and bf16 to the same or to f32, in f32", from.dtype, to.dtype, p.accumulator);
    id.require(is_taken, Reason::DType, reason)?;
    let (ranks, stride) = ([p.kept.len(), p.reduced.len()], from.strides.last().copied());
    let is_rows = ranks[0] <= 1 && ranks[1] == 1 && stride == Some(1);
    id.require(is_rows, Reason::Layout, format_args!("{ranks:?} dims with strides {:?}, taken are rows without gaps", from.strides))?;
    Ok((p, from, to))
}
