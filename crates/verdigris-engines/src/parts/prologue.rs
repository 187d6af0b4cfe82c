//! The steps of a convolution on the activations that it reads, before they are multiplied.
//!
//! ```text
//! v = x[n, c, i]
//! for step in steps: v = step(v)      vectors over channels, activations, factors, rounding
//! v rounded to the type that x is stored as
//! ```
//!
//! The arithmetic of a step is that of an epilogue.

use serde::{Deserialize, Serialize};
use verdigris_graph::{Channels, ConvProblem, EpilogueStep, Slot};
use verdigris_kir::face::{Kernel, Pointer, Val};
use verdigris_kir::ir::{Target, Ty};
use verdigris_kir::program::{Address, Arg};
use verdigris_tensor::DType;

use super::compute::{self, Compute};
use super::epilogue::{OperandSpec, Step, StepSpec};

/// The part of a prologue that shapes code.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(crate) struct PrologueSpec {
    /// The type of what is read, and of what comes out.
    dtype: DType,
    steps: Vec<StepSpec>,
}

impl PrologueSpec {
    /// The spec of a problem's prologue.
    pub(crate) fn of(problem: &ConvProblem) -> PrologueSpec {
        let operand = |vector: &Channels| OperandSpec::strided(vector.dtype);
        PrologueSpec {
            dtype: problem.activations().dtype,
            steps: problem.prologue.iter().map(|step| StepSpec::of(step, operand)).collect(),
        }
    }

    /// No steps.
    pub(crate) fn none(dtype: DType) -> PrologueSpec {
        PrologueSpec { dtype, steps: Vec::new() }
    }

    /// Whether it does nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// The least chip that has the conversions.
    pub(crate) fn target(&self) -> Target {
        self.steps.iter().map(StepSpec::target).max().unwrap_or(Target::Sm80)
    }

    /// The part of a kernel's name that says all of this, with a `_` in front; nothing for no steps.
    pub(crate) fn name(&self) -> String {
        let steps: String = self.steps.iter().map(|step| format!("_{}", step.name())).collect();
        if steps.is_empty() { steps } else { format!("_pre{steps}") }
    }

    /// Declares the parameters.
    pub(crate) fn declare<'k, T: Compute>(&self, k: Kernel<'k>) -> Prologue<'k, T> {
        let vector = |spec: OperandSpec, _| Vector {
            dtype: spec.dtype,
            pointer: k.input("channel_vector", spec.dtype.bytes() as u32),
            stride: k.scalar("channel_vector_stride_bytes"),
        };
        Prologue { k, dtype: self.dtype, steps: self.steps.iter().map(|step| Step::declare(k, step, &vector)).collect() }
    }

    /// The arguments of [`PrologueSpec::declare`].
    pub(crate) fn args(&self, problem: &ConvProblem) -> Vec<Arg> {
        let mut args = Vec::new();
        let vector = |args: &mut Vec<Arg>, _: OperandSpec, vector: &Channels| {
            args.push(Arg::Pointer(Address::buffer(vector.slot.0 as usize)));
            args.push(Arg::Scalar(Ty::U64, vector.stride * vector.dtype.bytes() as u64));
        };
        let double = problem.precision.epilogue() == DType::F64;
        for (spec, step) in self.steps.iter().zip(&problem.prologue) {
            spec.args(step, double, &mut args, &vector);
        }
        args
    }

    /// The alignment in bytes that the prologue relies on, by buffer slot.
    pub(crate) fn alignments(problem: &ConvProblem) -> impl Iterator<Item = (Slot, u64)> {
        problem.prologue.iter().filter_map(|step| match step {
            EpilogueStep::Binary { operand, .. } => Some((operand.slot, operand.dtype.bytes() as u64)),
            _ => None,
        })
    }
}

/// A vector over channels.
#[derive(Clone, Copy, Debug)]
struct Vector<'k> {
    dtype: DType,
    pointer: Pointer<'k>,
    stride: Val<'k, u64>,
}

/// A declared prologue.
#[derive(Clone, Debug)]
pub(crate) struct Prologue<'k, T: Compute> {
    k: Kernel<'k>,
    dtype: DType,
    steps: Vec<Step<'k, T, Vector<'k>>>,
}

impl<'k, T: Compute> Prologue<'k, T> {
    /// What an activation of a channel becomes. Reads the channel's vectors.
    #[track_caller]
    pub(crate) fn apply(&self, value: Val<'k, T>, channel: Val<'k, u32>) -> Val<'k, T> {
        let k = self.k;
        k.scope(std::panic::Location::caller(), || {
            let load =
                |vector: &Vector<'k>| [compute::load(k, vector.dtype, vector.pointer.address() + channel.widen() * vector.stride, 0)];
            // A prologue stores nothing; the problem is checked for it.
            let [value] = self.steps.iter().fold([value], |values, step| step.apply(k, values, load, |_, _| {}));
            compute::round_to(k, self.dtype, value)
        })
    }
}
