//! The steps of a convolution on the activations that it reads, before they are multiplied.
//!
//! ```text
//! v = x[n, c, i]
//! for step in steps: v = step(v)      vectors over channels, activations, factors, rounding
//! v rounded to the type that x is stored as
//! ```
//!
//! The arithmetic of a step is that of an epilogue.

use std::marker::PhantomData;

use serde::{Deserialize, Serialize};
use verdigris_graph::{Channels, ConvProblem};
use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::ir::Target;
use verdigris_kir::params::{Arguments, Parameter};
use verdigris_kir::program::Address;
use verdigris_tensor::DType;

use super::compute::{self, Compute};
use super::epilogue::{OperandSpec, Step, StepArgs, StepDecl, StepSpec};
use super::operand::{Layout, Operand, OperandArgs};

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

    /// The declaration of its parameters, computing in f64 or in f32: the spec of [`PrologueArgs`].
    pub(crate) fn over_channels(&self, double: bool) -> PrologueDecl {
        PrologueDecl { spec: self.clone(), double }
    }

    /// The arguments of [`PrologueSpec::over_channels`].
    pub(crate) fn arguments(&self, problem: &ConvProblem) -> PrologueArgs {
        let vector = |_: OperandSpec, vector: &Channels| OperandArgs {
            operand: Address::buffer(vector.slot.0 as usize),
            row_strides: Vec::new(),
            column_stride: Some(vector.stride * vector.dtype.bytes() as u64),
            batch: None,
        };
        PrologueArgs(self.steps.iter().zip(&problem.prologue).map(|(spec, step)| spec.arguments(step, &vector)).collect())
    }
}

/// What the parameters of a prologue are made from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct PrologueDecl {
    spec: PrologueSpec,
    double: bool,
}

impl PrologueDecl {
    fn steps(&self) -> Vec<StepDecl> {
        let steps = self.spec.steps.iter();
        steps.map(|&step| StepDecl { step, layout: Layout::Channels, pairs: false, double: self.double }).collect()
    }
}

/// The arguments of a prologue, as a parameter: [`Prologue`] in the kernel.
#[derive(Clone, Debug)]
pub(crate) struct PrologueArgs(Vec<StepArgs>);

impl Parameter for PrologueArgs {
    type Spec = PrologueDecl;
    type Value<'k> = Prologue<'k>;
    type Argument = PrologueArgs;

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, name: &'static str, decl: &PrologueDecl) -> Prologue<'k> {
        Prologue { k, decl: decl.clone(), steps: Vec::<StepArgs>::declare(k, name, &decl.steps()), computed: PhantomData }
    }

    fn bind(argument: PrologueArgs, name: &'static str, decl: &PrologueDecl, to: &mut Arguments) {
        Vec::<StepArgs>::bind(argument.0, name, &decl.steps(), to);
    }
}

/// A declared prologue that computes in `T`.
#[derive(Clone, Debug)]
pub(crate) struct Prologue<'k, T: Compute = f32> {
    k: Kernel<'k>,
    decl: PrologueDecl,
    steps: Vec<Step<'k>>,
    computed: PhantomData<fn() -> T>,
}

impl<'k> Prologue<'k> {
    /// The same in the type that it computes in, which its declaration says.
    pub(crate) fn of<T: Compute>(self) -> Prologue<'k, T> {
        debug_assert_eq!(self.decl.double, T::DTYPE == DType::F64, "the compute type is the declaration's");
        let Prologue { k, decl, steps, .. } = self;
        Prologue { k, decl, steps, computed: PhantomData }
    }
}

impl<'k, T: Compute> Prologue<'k, T> {
    /// What an activation of a channel becomes. Reads the channel's vectors.
    #[track_caller]
    pub(crate) fn apply(&self, value: Val<'k, T>, channel: Val<'k, u32>) -> Val<'k, T> {
        let k = self.k;
        k.scope(std::panic::Location::caller(), || {
            let load = |spec: OperandSpec, vector: &Operand<'k>| {
                let stride = vector.column_stride.expect("a vector over channels has one");
                [compute::load(k, spec.dtype, vector.operand.address() + channel.widen() * stride, 0)]
            };
            let PrologueSpec { dtype, steps } = &self.decl.spec;
            // A prologue stores nothing; the problem is checked for it.
            let [value] =
                steps.iter().zip(&self.steps).fold([value], |values, (spec, step)| step.apply(spec, k, values, load, |_, _, _| {}));
            compute::round_to(k, *dtype, value)
        })
    }
}
