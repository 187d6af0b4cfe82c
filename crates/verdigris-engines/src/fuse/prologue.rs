//! The steps of a convolution on the activations that it reads, before they are multiplied.
//!
//! ```text
//! v = x[n, c, i]
//! run the steps from v on                          vectors over channels, activations, factors, rounding
//! v rounded to the type that x is stored as
//! ```
//!
//! They are those of an epilogue whose operands are vectors over channels, placed at a channel.

use serde::{Deserialize, Serialize};
use verdigris_graph::ConvProblem;
use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::ir::Target;
use verdigris_kir::params::{Arguments, Parameter};
use verdigris_tensor::DType;

use super::compute::{self, Compute};
use super::epilogue::{Epilogue, EpilogueArgs, EpilogueDecl, EpilogueSpec, OperandSpec};
use super::operand::Layout;
use super::steps::{self, Step, Steps};

/// The part of a prologue that shapes code.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(crate) struct PrologueSpec {
    /// The type of what is read, and of what comes out.
    dtype: DType,
    steps: Vec<Step<OperandSpec>>,
}

impl PrologueSpec {
    /// The spec of a problem's prologue.
    pub(crate) fn of(problem: &ConvProblem) -> PrologueSpec {
        let steps = Steps::of_value(&problem.prologue, |vector| vector.slot).spec(|vector| OperandSpec::strided(vector.dtype));
        PrologueSpec { dtype: problem.activations().dtype, steps }
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
        steps::target(&self.steps)
    }

    /// The part of a kernel's name that says all of this, with a `_` in front; nothing for no steps.
    pub(crate) fn name(&self) -> String {
        let steps: String = steps::names(&self.steps).map(|step| format!("_{step}")).collect();
        if steps.is_empty() { steps } else { format!("_pre{steps}") }
    }

    fn epilogue(&self, double: bool) -> EpilogueSpec {
        EpilogueSpec { double, steps: self.steps.clone(), stores_d: false, ..EpilogueSpec::plain(OperandSpec::strided(self.dtype)) }
    }

    /// The declaration of its parameters, computing in f64 or in f32: the spec of [`PrologueArgs`].
    pub(crate) fn over_channels(&self, double: bool) -> EpilogueDecl {
        EpilogueDecl { spec: self.epilogue(double), layout: Layout::Channels }
    }

    /// The arguments of [`PrologueSpec::over_channels`].
    pub(crate) fn arguments(&self, problem: &ConvProblem) -> PrologueArgs {
        PrologueArgs(Box::new(self.epilogue(false).arguments_of_steps(&problem.prologue, None, |vector| vector.into())))
    }
}

/// The arguments of a prologue, as a parameter: [`Prologue`] in the kernel. Most of what an epilogue's have room for is not there.
#[derive(Clone, Debug)]
pub(crate) struct PrologueArgs(Box<EpilogueArgs>);

impl Parameter for PrologueArgs {
    type Spec = EpilogueDecl;
    type Value<'k> = Prologue<'k>;
    type Argument = PrologueArgs;

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, name: &'static str, decl: &EpilogueDecl) -> Prologue<'k> {
        Prologue { dtype: decl.spec.d.dtype, steps: EpilogueArgs::declare(k, name, decl) }
    }

    fn bind(argument: PrologueArgs, name: &'static str, decl: &EpilogueDecl, to: &mut Arguments) {
        EpilogueArgs::bind(*argument.0, name, decl, to);
    }
}

/// A declared prologue that computes in `T`.
#[derive(Clone, Debug)]
pub(crate) struct Prologue<'k, T: Compute = f32> {
    dtype: DType,
    steps: Epilogue<'k, T>,
}

impl<'k> Prologue<'k> {
    /// The same in the type that it computes in, which its declaration says.
    pub(crate) fn of<T: Compute>(self) -> Prologue<'k, T> {
        Prologue { dtype: self.dtype, steps: self.steps.of() }
    }
}

impl<'k, T: Compute> Prologue<'k, T> {
    /// What an activation of a channel becomes. Reads the channel's vectors.
    #[track_caller]
    pub(crate) fn apply(&self, value: Val<'k, T>, channel: Val<'k, u32>) -> Val<'k, T> {
        let k = value.kernel();
        k.scope(std::panic::Location::caller(), || compute::round_to(k, self.dtype, self.steps.at_channel(channel).apply(value, 0)))
    }
}
