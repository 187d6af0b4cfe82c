//! What stands between a finished sum and D: alpha, beta·C, and the fused pointwise chain, compiled into a kernel.
//!
//! ```text
//! v = alpha · sA · sB · sum + beta · C[m, n]       beta = 0 reads no C
//! for step in steps: v = step(v)                   bias, residual, activation, scale, rounding, auxiliary store
//! D[m, n] = v
//! ```
//!
//! An [`EpilogueSpec`] is the part that shapes code; strides, factors and attributes are arguments ([`EpilogueArgs`], a group of parameters for
//! kernels' own groups). A kernel declares the epilogue once, begins it for a matrix, places it at an element and applies it from there to
//! the right:
//!
//! ```text
//! let Parameters { epilogue, .. } = Parameters::declare(k, spec);   // epilogue: EpilogueArgs = spec.epilogue.over_matrices()
//! let matrix = epilogue.begin(batch_indices);
//! let place = matrix.at(row, column);               // addresses of all operands, computed once
//! let v = place.apply(sum, 8);                       // the element 8 columns to the right
//! place.store(v, 8);
//! ```
//!
//! The caller guards: `apply` and `store` are for elements inside of the matrix. The pair forms serve two neighbouring columns with one
//! access an operand; they need [`EpilogueSpec::pairs`] and an even column.

use std::marker::PhantomData;

use serde::{Deserialize, Serialize};
use verdigris_graph::{BinaryOp, EpilogueStep, GemmProblem, HostScalar, Matrix, Precision, Scale, Slot, UnaryOp};
use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::ir::Target;
use verdigris_kir::params::{Arguments, HostNumber, Parameter, Read};
use verdigris_kir::program::{Address, Arg};
use verdigris_tensor::DType;

use super::compute::{self, Compute};
use super::operand::{Access, Attribute, Factor, Layout, Operand, OperandArgs, OperandDecl};
use crate::layout::batch::{Chunk, Indices};

/// How an operand's elements lie: the size class of its strides.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Walk {
    /// Neighbouring columns are neighbouring elements; rows have a stride (0 for a bias over n).
    Row,
    /// One element for all columns; rows have a stride (0 for a single value).
    PerRow,
    /// A stride each.
    Strided,
}

/// A matrix that the epilogue reads or writes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct OperandSpec {
    /// Element type.
    pub dtype: DType,
    /// How it lies.
    pub walk: Walk,
}

impl OperandSpec {
    /// The class of a matrix.
    pub fn of(matrix: &Matrix) -> OperandSpec {
        let walk = match matrix.column_stride {
            1 => Walk::Row,
            0 => Walk::PerRow,
            _ => Walk::Strided,
        };
        OperandSpec { dtype: matrix.dtype, walk }
    }

    /// The class that serves any strides.
    pub fn strided(dtype: DType) -> OperandSpec {
        OperandSpec { dtype, walk: Walk::Strided }
    }

    fn word(self) -> String {
        let walk = match self.walk {
            Walk::Row => "",
            Walk::PerRow => "p",
            Walk::Strided => "s",
        };
        format!("{}{walk}", self.dtype)
    }
}

/// One step, as far as it shapes code.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepSpec {
    /// A function of the value; attributes inside are arguments, so they are zero here.
    Unary(UnaryOp),
    /// A function of the value and an operand.
    Binary(BinaryOp, OperandSpec, bool),
    /// A factor from the host.
    Scale,
    /// Rounding.
    Round(DType),
    /// An auxiliary store.
    Store(OperandSpec),
}

impl StepSpec {
    /// The part of a step that shapes code; `operand` says it of an operand.
    pub(super) fn of<P>(step: &EpilogueStep<P>, operand: impl Fn(&P) -> OperandSpec) -> StepSpec {
        match step {
            EpilogueStep::Unary(f) => StepSpec::Unary(without_attributes(*f)),
            EpilogueStep::Binary { f, operand: read, v_is_right } => StepSpec::Binary(*f, operand(read), *v_is_right),
            EpilogueStep::Scale { .. } => StepSpec::Scale,
            EpilogueStep::Round { dtype } => StepSpec::Round(*dtype),
            EpilogueStep::Store { target } => StepSpec::Store(operand(target)),
        }
    }

    /// The least chip that has the conversions.
    pub(super) fn target(&self) -> Target {
        match self {
            StepSpec::Binary(_, operand, _) | StepSpec::Store(operand) => compute::target_of(operand.dtype),
            StepSpec::Round(dtype) => compute::target_of(*dtype),
            StepSpec::Unary(_) | StepSpec::Scale => Target::Sm80,
        }
    }

    /// The operand, and what is done with it.
    pub(super) fn operand(&self) -> Option<(OperandSpec, Access)> {
        match *self {
            StepSpec::Binary(_, operand, _) => Some((operand, Access::Read)),
            StepSpec::Store(operand) => Some((operand, Access::Write)),
            _ => None,
        }
    }

    /// The arguments of [`Step`]; `operand` says those of an operand.
    pub(super) fn arguments<P>(&self, step: &EpilogueStep<P>, operand: &impl Fn(OperandSpec, &P) -> OperandArgs) -> StepArgs {
        StepArgs {
            attributes: if let EpilogueStep::Unary(f) = step { attributes(*f) } else { Vec::new() },
            operand: match (self.operand(), step) {
                (Some((spec, _)), EpilogueStep::Binary { operand: place, .. } | EpilogueStep::Store { target: place }) => {
                    Some(operand(spec, place))
                }
                _ => None,
            },
            factor: if let EpilogueStep::Scale { factor } = step { Some(host_number(*factor)) } else { None },
        }
    }

    /// The part of a kernel's name that says all of this.
    pub(super) fn name(&self) -> String {
        match self {
            StepSpec::Unary(f) => f.name().to_owned(),
            StepSpec::Binary(f, operand, right) => format!("{}{}{}", if *right { "r" } else { "" }, f.name(), operand.word()),
            StepSpec::Scale => "scale".to_owned(),
            StepSpec::Round(dtype) => format!("to{dtype}"),
            StepSpec::Store(operand) => format!("aux{}", operand.word()),
        }
    }
}

/// The part of an epilogue that shapes code.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct EpilogueSpec {
    /// Computed in f64 instead of f32.
    pub double: bool,
    /// A is scaled by one factor in device memory.
    pub scale_a: bool,
    /// B likewise.
    pub scale_b: bool,
    /// C, where `beta · C` is added.
    pub c: Option<OperandSpec>,
    /// Steps in order.
    pub steps: Vec<StepSpec>,
    /// D.
    pub d: OperandSpec,
    /// D is stored by [`Place::store`]; otherwise by other means (a tensor map), and has no parameters here.
    pub stores_d: bool,
    /// D is the exact integer sum: nothing is computed and [`Place::store_exact`] stores it.
    pub exact: bool,
    /// Two neighbouring columns may be accessed at once: rows, matrices and operands begin at multiples of two elements.
    pub pairs: bool,
}

impl EpilogueSpec {
    /// The spec of a problem's epilogue. `pairs` where the strides allow it, provided that each buffer is aligned to two elements (16 bytes for
    /// f64 and i64), which the program then declares.
    pub fn of(problem: &GemmProblem) -> EpilogueSpec {
        EpilogueSpec {
            double: problem.precision == Precision::F64,
            scale_a: matches!(problem.scale_a, Some(Scale::Tensor { .. })),
            scale_b: matches!(problem.scale_b, Some(Scale::Tensor { .. })),
            c: problem.c.as_ref().map(OperandSpec::of),
            steps: problem.epilogue.iter().map(|step| StepSpec::of(step, OperandSpec::of)).collect(),
            d: OperandSpec::of(&problem.d),
            stores_d: true,
            exact: problem.is_exact_integer(),
            pairs: operands(problem).all(pairs_fit),
        }
    }

    /// A plain epilogue: alpha, no C, no steps.
    pub fn plain(d: OperandSpec) -> EpilogueSpec {
        EpilogueSpec {
            double: false,
            scale_a: false,
            scale_b: false,
            c: None,
            steps: Vec::new(),
            d,
            stores_d: true,
            exact: false,
            pairs: false,
        }
    }

    /// The same with every operand in the class that serves any strides, one element at a time.
    pub fn strided(mut self) -> EpilogueSpec {
        let relax = |operand: &mut OperandSpec| operand.walk = Walk::Strided;
        relax(&mut self.d);
        self.c.iter_mut().for_each(relax);
        for step in &mut self.steps {
            if let StepSpec::Binary(_, operand, _) | StepSpec::Store(operand) = step {
                relax(operand);
            }
        }
        self.pairs = false;
        self
    }

    /// Whether only alpha, scales and C are at work: then the spec belongs to a catalog, else a user's graph made it.
    pub fn is_plain(&self) -> bool {
        self.steps.is_empty()
    }

    /// Whether a sum of zero leaves as zero, whatever is in memory: nothing but alpha is at work, which convolutions have at 1.
    pub fn keeps_zero(&self) -> bool {
        self.is_plain() && self.c.is_none() && !self.scale_a && !self.scale_b
    }

    /// Whether applying it loads or stores elements, so that it may be applied inside of D only.
    pub fn reads_memory(&self) -> bool {
        self.c.is_some() || self.steps.iter().any(|step| matches!(step, StepSpec::Binary(..) | StepSpec::Store(_)))
    }

    /// The least chip that has the conversions.
    pub fn target(&self) -> Target {
        let steps = self.steps.iter().map(StepSpec::target);
        let operands = self.c.iter().chain([&self.d]).map(|operand| compute::target_of(operand.dtype));
        steps.chain(operands).max().unwrap_or(Target::Sm80)
    }

    /// The part of a kernel's name that says all of this.
    pub fn name(&self) -> String {
        let mut words = vec![self.d.word()];
        if !self.stores_d {
            words.push("map".to_owned());
        }
        if self.double {
            words.push("double".to_owned());
        }
        if self.exact {
            words.push("exact".to_owned());
        }
        if self.pairs {
            words.push("x2".to_owned());
        }
        if self.scale_a || self.scale_b {
            words.push(format!("scale{}{}", if self.scale_a { "a" } else { "" }, if self.scale_b { "b" } else { "" }));
        }
        words.extend(self.c.map(|c| format!("c{}", c.word())));
        words.extend(self.steps.iter().map(StepSpec::name));
        words.join("_")
    }

    /// The declaration of its parameters over matrices of a batch: the spec of [`EpilogueArgs`].
    pub fn over_matrices(&self) -> EpilogueDecl {
        EpilogueDecl { spec: self.clone(), layout: Layout::Matrices }
    }

    /// The arguments for a part of a problem that begins at `(row, column)`.
    pub fn arguments(&self, problem: &GemmProblem, chunk: &Chunk, row: u64, column: u64) -> EpilogueArgs {
        let operand = |spec: OperandSpec, matrix: &Matrix| {
            let bytes = matrix.dtype.bytes() as u64;
            OperandArgs {
                operand: chunk.address(matrix, row, column),
                row_strides: vec![matrix.row_stride * bytes],
                column_stride: (spec.walk == Walk::Strided).then_some(matrix.column_stride * bytes),
                batch: Some(chunk.strides_bytes(matrix)),
            }
        };
        let scales = [&problem.scale_a, &problem.scale_b].into_iter().filter_map(|scale| match scale {
            Some(Scale::Tensor { slot }) => Some(Address::buffer(slot.0 as usize)),
            _ => None,
        });
        let computes = !self.exact;
        EpilogueArgs(ValuesArgs {
            alpha: computes.then(|| host_number(problem.alpha)),
            scales: scales.filter(|_| computes).collect(),
            beta: (computes && self.c.is_some()).then(|| host_number(problem.beta)),
            c: self.c.zip(problem.c.as_ref()).filter(|_| computes).map(|(spec, c)| operand(spec, c)),
            ..self.step_arguments(&problem.epilogue, self.stores_d.then(|| operand(self.d, &problem.d)), &operand)
        })
    }

    /// The arguments for steps and D, and none for anything else.
    fn step_arguments<P>(
        &self,
        steps: &[EpilogueStep<P>],
        d: Option<OperandArgs>,
        operand: &impl Fn(OperandSpec, &P) -> OperandArgs,
    ) -> ValuesArgs {
        let steps = self.steps.iter().zip(steps).filter(|_| !self.exact).map(|(spec, step)| spec.arguments(step, operand));
        ValuesArgs { alpha: None, scales: Vec::new(), beta: None, c: None, steps: steps.collect(), d }
    }

    /// The arguments for an epilogue without factors of the sum, whose operands are of another kind than matrices.
    pub(super) fn arguments_of_steps<P>(
        &self,
        steps: &[EpilogueStep<P>],
        d: &P,
        operand: impl Fn(OperandSpec, &P) -> OperandArgs,
    ) -> EpilogueArgs {
        EpilogueArgs(self.step_arguments(steps, self.stores_d.then(|| operand(self.d, d)), &operand))
    }
}

/// C, the operands of the steps, and D.
fn operands(problem: &GemmProblem) -> impl Iterator<Item = &Matrix> {
    let steps = problem.epilogue.iter().filter_map(|step| match step {
        EpilogueStep::Binary { operand: matrix, .. } | EpilogueStep::Store { target: matrix } => Some(matrix),
        _ => None,
    });
    problem.c.iter().chain(steps).chain([&problem.d])
}

fn pairs_fit(matrix: &Matrix) -> bool {
    match OperandSpec::of(matrix).walk {
        Walk::Row => matrix.row_stride.is_multiple_of(2) && matrix.batch_strides.iter().all(|stride| stride.is_multiple_of(2)),
        // One element for two columns: no pair access.
        Walk::PerRow => true,
        Walk::Strided => false,
    }
}

fn attributes(f: UnaryOp) -> Vec<f64> {
    match f {
        UnaryOp::LeakyRelu { slope } => vec![slope.0],
        UnaryOp::Clamp { lower, upper } => vec![lower.0, upper.0],
        _ => Vec::new(),
    }
}

fn without_attributes(f: UnaryOp) -> UnaryOp {
    let zero = verdigris_graph::Real(0.0);
    match f {
        UnaryOp::LeakyRelu { .. } => UnaryOp::LeakyRelu { slope: zero },
        UnaryOp::Clamp { .. } => UnaryOp::Clamp { lower: zero, upper: zero },
        other => other,
    }
}

fn host_number(scalar: HostScalar<Slot>) -> HostNumber {
    match scalar {
        HostScalar::Bound(slot) => HostNumber::Bound(slot.0 as usize),
        HostScalar::Fixed(value) => HostNumber::Fixed(value.0),
    }
}

/// What the parameters of one step are made from.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepDecl {
    pub(super) step: StepSpec,
    pub(super) layout: Layout,
    pub(super) pairs: bool,
    pub(super) double: bool,
}

impl StepDecl {
    fn attributes(&self) -> usize {
        if let StepSpec::Unary(f) = self.step { attributes(f).len() } else { 0 }
    }

    fn operand(&self) -> Option<OperandDecl> {
        self.step.operand().map(|(spec, access)| OperandDecl { spec, layout: self.layout, pairs: self.pairs, access })
    }
}

verdigris_kir::parameters! {
    /// Parameters of one step.
    #[derive(Clone, Debug)]
    pub(super) struct Step / #[derive(Clone, Debug)] StepArgs of StepDecl as decl {
        attributes: Vec<Attribute> = vec![decl.double; decl.attributes()],
        pub(super) operand: Option<OperandArgs> = decl.operand(),
        factor: Option<Factor> = (decl.step == StepSpec::Scale).then_some(decl.double),
    }
}

impl<'k> Step<'k> {
    /// The value behind the step, which is `spec`. `load` reads the operand, `store` writes to it.
    pub(super) fn apply<T: Compute, const N: usize>(
        &self,
        spec: &StepSpec,
        k: Kernel<'k>,
        values: [Val<'k, T>; N],
        load: impl FnOnce(OperandSpec, &Operand<'k>) -> [Val<'k, T>; N],
        store: impl FnOnce(OperandSpec, &Operand<'k>, [Val<'k, T>; N]),
    ) -> [Val<'k, T>; N] {
        match (*spec, &self.operand, self.factor) {
            (StepSpec::Unary(f), ..) => {
                let attributes: Vec<_> = self.attributes.iter().map(|attribute| attribute.get()).collect();
                values.map(|value| compute::unary(f, value, &attributes))
            }
            (StepSpec::Scale, _, Some(factor)) => values.map(|value| value * factor.get()),
            (StepSpec::Round(dtype), ..) => values.map(|value| compute::round_to(k, dtype, value)),
            (StepSpec::Binary(f, spec, right_argument), Some(operand), _) => {
                let others = load(spec, operand);
                std::array::from_fn(|i| {
                    let (x, y) = if right_argument { (others[i], values[i]) } else { (values[i], others[i]) };
                    binary(f, x, y)
                })
            }
            (StepSpec::Store(spec), Some(operand), _) => {
                store(spec, operand, values);
                values
            }
            (step, ..) => unreachable!("{step:?} is declared by its spec"),
        }
    }
}

/// What the parameters of an epilogue are made from: [`EpilogueSpec::over_matrices`] of a product, `over_tensors` of a
/// convolution.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EpilogueDecl {
    pub(super) spec: EpilogueSpec,
    pub(super) layout: Layout,
}

impl EpilogueDecl {
    fn factor(&self, exists: bool) -> Option<bool> {
        (exists && !self.spec.exact).then_some(self.spec.double)
    }

    fn operand(&self, spec: OperandSpec, access: Access) -> OperandDecl {
        OperandDecl { spec, layout: self.layout, pairs: self.spec.pairs, access }
    }

    fn steps(&self) -> Vec<StepDecl> {
        let EpilogueSpec { exact, double, pairs, .. } = self.spec;
        let steps = self.spec.steps.iter().filter(|_| !exact);
        steps.map(|&step| StepDecl { step, layout: self.layout, pairs, double }).collect()
    }

    fn scales(&self) -> usize {
        if self.spec.exact { 0 } else { usize::from(self.spec.scale_a) + usize::from(self.spec.scale_b) }
    }

    fn c(&self) -> Option<OperandSpec> {
        self.spec.c.filter(|_| !self.spec.exact)
    }
}

verdigris_kir::parameters! {
    #[derive(Clone, Debug)]
    struct Values / #[derive(Clone, Debug)] ValuesArgs of EpilogueDecl as decl {
        alpha: Option<Factor> = decl.factor(decl.layout == Layout::Matrices),
        scales: Vec<Read> = vec![4; decl.scales()],
        beta: Option<Factor> = decl.factor(decl.spec.c.is_some()),
        c: Option<OperandArgs> = decl.c().map(|c| decl.operand(c, Access::Read)),
        steps: Vec<StepArgs> = decl.steps(),
        d: Option<OperandArgs> = decl.spec.stores_d.then(|| decl.operand(decl.spec.d, Access::Write)),
    }
}

/// The arguments of an epilogue, as a parameter: [`Epilogue`] in the kernel.
#[derive(Clone, Debug)]
pub struct EpilogueArgs(ValuesArgs);

impl EpilogueArgs {
    /// In order, for a launch whose arguments are listed.
    pub(super) fn listed(self, decl: &EpilogueDecl) -> Vec<Arg> {
        self.0.bound(decl).into_iter().collect()
    }
}

impl Parameter for EpilogueArgs {
    type Spec = EpilogueDecl;
    type Value<'k> = Epilogue<'k>;
    type Argument = EpilogueArgs;

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, _: &'static str, decl: &EpilogueDecl) -> Epilogue<'k> {
        Epilogue { k, spec: decl.spec.clone(), values: Values::declare(k, decl), computed: PhantomData }
    }

    fn bind(argument: EpilogueArgs, name: &'static str, decl: &EpilogueDecl, to: &mut Arguments) {
        ValuesArgs::bind(argument.0, name, decl, to);
    }
}

/// A declared epilogue that computes in `T`.
#[derive(Clone, Debug)]
pub struct Epilogue<'k, T: Compute = f32> {
    k: Kernel<'k>,
    spec: EpilogueSpec,
    values: Values<'k>,
    computed: PhantomData<fn() -> T>,
}

impl<'k> Epilogue<'k> {
    /// The same in the type that it computes in: f64 exactly where [`EpilogueSpec::double`] says so.
    pub fn of<T: Compute>(self) -> Epilogue<'k, T> {
        debug_assert_eq!(self.spec.double, T::DTYPE == DType::F64, "the compute type is the spec's");
        let Epilogue { k, spec, values, .. } = self;
        Epilogue { k, spec, values, computed: PhantomData }
    }
}

impl<'k, T: Compute> Epilogue<'k, T> {
    pub(super) fn operands(&self) -> impl Iterator<Item = (OperandSpec, &Operand<'k>)> {
        let Values { c, steps, d, .. } = &self.values;
        let steps = self.spec.steps.iter().zip(steps).filter_map(|(spec, step)| Some((spec.operand()?.0, step.operand.as_ref()?)));
        self.spec.c.zip(c.as_ref()).into_iter().chain(steps).chain(d.iter().map(|d| (self.spec.d, d)))
    }

    /// The same epilogue with its pair forms, for a branch in which an argument says that all operands lie in whole pairs: the spec then
    /// declares single elements, and the program the alignment of pairs where it takes the branch.
    pub fn paired(&self) -> Epilogue<'k, T> {
        let mut paired = self.clone();
        paired.spec.pairs = true;
        paired
    }

    /// Whether two neighbouring columns may be accessed at once.
    pub(crate) fn has_pairs(&self) -> bool {
        self.spec.pairs
    }

    /// Places it at a column of rows that start at `starts`, one for each operand.
    pub(super) fn place(
        &self,
        alpha: Option<Val<'k, T>>,
        starts: impl Iterator<Item = Val<'k, u64>>,
        column: Val<'k, u32>,
    ) -> Place<'_, 'k, T> {
        let address = |((spec, operand), row_start): ((OperandSpec, &Operand<'k>), Val<'k, u64>)| match (spec.walk, operand.column_stride) {
            (Walk::Row, _) => row_start + column.mul_wide(spec.dtype.bytes() as u32),
            (Walk::Strided, Some(stride)) => row_start + column.widen() * stride,
            _ => row_start,
        };
        Place { epilogue: self, alpha, addresses: self.operands().zip(starts).map(address).collect() }
    }

    /// The epilogue of one matrix of the batch. Reads the scale factors.
    #[track_caller]
    pub fn begin(&self, indices: Indices<'k>) -> MatrixEpilogue<'_, 'k, T> {
        let at = std::panic::Location::caller();
        self.k.scope(at, || {
            let alpha = self.values.alpha.map(|alpha| {
                let scales = self.values.scales.iter();
                scales.fold(alpha.get(), |alpha, scale| alpha * T::from_f32(self.k.ld_global::<f32>(scale.address(), 0)))
            });
            let matrix = |(_, operand): (OperandSpec, &Operand<'k>)| match operand.batch {
                Some(batch) => batch.matrix(operand.operand, indices),
                None => operand.operand.address(),
            };
            let matrices = self.operands().map(matrix).collect();
            MatrixEpilogue { epilogue: self, alpha, matrices }
        })
    }
}

/// An epilogue at one matrix of the batch.
#[derive(Clone, Debug)]
pub struct MatrixEpilogue<'e, 'k, T: Compute> {
    epilogue: &'e Epilogue<'k, T>,
    alpha: Option<Val<'k, T>>,
    matrices: Vec<Val<'k, u64>>,
}

impl<'e, 'k, T: Compute> MatrixEpilogue<'e, 'k, T> {
    /// Places the epilogue at `(row, column)`; the addresses of all operands are computed here.
    #[track_caller]
    pub fn at(&self, row: Val<'k, u32>, column: Val<'k, u32>) -> Place<'e, 'k, T> {
        let at = std::panic::Location::caller();
        self.epilogue.k.scope(at, || {
            let start =
                |((_, operand), &matrix): ((OperandSpec, &Operand<'k>), &Val<'k, u64>)| matrix + row.widen() * operand.row_strides[0];
            let starts = self.epilogue.operands().zip(&self.matrices).map(start);
            self.epilogue.place(self.alpha, starts, column)
        })
    }
}

/// An epilogue at one element, from which it reaches to the right.
#[derive(Clone, Debug)]
pub struct Place<'e, 'k, T: Compute> {
    epilogue: &'e Epilogue<'k, T>,
    alpha: Option<Val<'k, T>>,
    addresses: Vec<Val<'k, u64>>,
}

impl<'k, T: Compute> Place<'_, 'k, T> {
    /// Address and offset of operand `index`, `right` columns further on.
    fn reach(&self, index: usize, spec: OperandSpec, operand: &Operand<'k>, right: u32) -> (Val<'k, u64>, i64) {
        let address = self.addresses[index];
        match (spec.walk, operand.column_stride) {
            (Walk::Row, _) => (address, i64::from(right) * spec.dtype.bytes() as i64),
            (Walk::Strided, Some(stride)) if right > 0 => (address + stride * u64::from(right), 0),
            _ => (address, 0),
        }
    }

    /// The same column elsewhere: so many bytes further on in each operand, in the order of [`Epilogue::operands`].
    pub(super) fn advanced(mut self, bytes: &[Val<'k, u64>]) -> Self {
        self.addresses.iter_mut().zip(bytes).for_each(|(address, &bytes)| *address = *address + bytes);
        self
    }

    fn load<const N: usize>(&self, index: usize, spec: OperandSpec, operand: &Operand<'k>, right: u32) -> [Val<'k, T>; N] {
        let (k, dtype) = (self.epilogue.k, spec.dtype);
        let (address, offset) = self.reach(index, spec, operand, right);
        match (spec.walk, N) {
            (Walk::PerRow, _) => [compute::load(k, dtype, address, offset); N],
            (Walk::Row, 2) => {
                let pair = compute::load_pair(k, dtype, address, offset);
                std::array::from_fn(|i| pair[i])
            }
            _ => std::array::from_fn(|i| {
                let (address, offset) = self.reach(index, spec, operand, right + i as u32);
                compute::load(k, dtype, address, offset)
            }),
        }
    }

    fn write<const N: usize>(&self, index: usize, spec: OperandSpec, operand: &Operand<'k>, right: u32, values: [Val<'k, T>; N]) {
        let (k, dtype) = (self.epilogue.k, spec.dtype);
        if let (Walk::Row, [low, high]) = (spec.walk, values.as_slice()) {
            let (address, offset) = self.reach(index, spec, operand, right);
            compute::store_pair(k, dtype, address, offset, [*low, *high]);
            return;
        }
        for (i, value) in values.into_iter().enumerate() {
            let (address, offset) = self.reach(index, spec, operand, right + i as u32);
            compute::store(k, dtype, address, offset, value);
        }
    }

    fn run<const N: usize>(&self, sums: [Val<'k, T>; N], right: u32) -> [Val<'k, T>; N] {
        let k = self.epilogue.k;
        let mut index = 0;
        let mut values = sums;
        if let Some(alpha) = self.alpha {
            values = values.map(|sum| sum * alpha);
        }
        let EpilogueSpec { c, steps, .. } = &self.epilogue.spec;
        let Values { beta, c: c_values, steps: step_values, .. } = &self.epilogue.values;
        if let (Some(beta), Some(spec), Some(c)) = (beta, *c, c_values) {
            let beta = beta.get::<T>();
            let with_c = values.map(|value| k.var(value));
            k.when(beta.ne(T::constant(k, 0.0)), || {
                for (value, c) in with_c.into_iter().zip(self.load::<N>(index, spec, c, right)) {
                    value.set(k.fma(beta, c, value));
                }
            });
            values = with_c.map(|value| value.get());
            index += 1;
        }
        for (spec, step) in steps.iter().zip(step_values) {
            let place = index;
            values = step.apply(
                spec,
                k,
                values,
                |spec, operand| self.load(place, spec, operand, right),
                |spec, operand, values| self.write(place, spec, operand, right, values),
            );
            index += usize::from(step.operand.is_some());
        }
        values
    }

    /// The result for a finished sum, `right` columns to the right of the place. Loads and stores what the chain says, but not D.
    #[track_caller]
    pub fn apply(&self, sum: Val<'k, T>, right: u32) -> Val<'k, T> {
        let at = std::panic::Location::caller();
        self.epilogue.k.scope(at, || self.run([sum], right)[0])
    }

    /// The same for two neighbouring columns, of which the first is even.
    #[track_caller]
    pub fn apply_pair(&self, sums: [Val<'k, T>; 2], right: u32) -> [Val<'k, T>; 2] {
        assert!(self.epilogue.spec.pairs, "pairs need strides of whole pairs");
        let at = std::panic::Location::caller();
        self.epilogue.k.scope(at, || self.run(sums, right))
    }

    fn d(&self) -> Option<(usize, OperandSpec, &Operand<'k>)> {
        self.epilogue.values.d.as_ref().map(|d| (self.addresses.len() - 1, self.epilogue.spec.d, d))
    }

    /// Rounds and stores an element of D. Where the spec says that D is stored by other means, there is nothing to store to: a panic.
    #[track_caller]
    pub fn store(&self, value: Val<'k, T>, right: u32) {
        let (index, spec, d) = self.d().expect("the spec stores D");
        let at = std::panic::Location::caller();
        self.epilogue.k.scope(at, || self.write(index, spec, d, right, [value]));
    }

    /// Rounds and stores two neighbouring elements of D, of which the first is in an even column.
    #[track_caller]
    pub fn store_pair(&self, values: [Val<'k, T>; 2], right: u32) {
        assert!(self.epilogue.spec.pairs, "pairs need strides of whole pairs");
        let (index, spec, d) = self.d().expect("the spec stores D");
        let at = std::panic::Location::caller();
        self.epilogue.k.scope(at, || self.write(index, spec, d, right, values));
    }

    /// Rounds and stores eight neighbouring elements of D at once. The caller knows that they are neighbours in memory, whatever the spec says,
    /// that each eight begins at a multiple of 16 bytes, and that D is of a 16-bit float or f32.
    #[track_caller]
    pub fn store_eight(&self, values: [Val<'k, T>; 8], right: u32) {
        let (index, spec, _) = self.d().expect("the spec stores D");
        let at = std::panic::Location::caller();
        let (k, dtype) = (self.epilogue.k, spec.dtype);
        k.scope(at, || compute::store_eight(k, dtype, self.addresses[index], i64::from(right) * dtype.bytes() as i64, values));
    }

    /// Stores an exact integer sum.
    #[track_caller]
    pub fn store_exact(&self, sum: Val<'k, i32>, right: u32) {
        let (index, spec, d) = self.d().expect("the spec stores D");
        let (address, offset) = self.reach(index, spec, d, right);
        self.epilogue.k.st_global(address, offset, sum);
    }
}

fn binary<'k, T: Compute>(f: BinaryOp, x: Val<'k, T>, y: Val<'k, T>) -> Val<'k, T> {
    match f {
        BinaryOp::Add => x + y,
        BinaryOp::Sub => x - y,
        BinaryOp::Mul => x * y,
        BinaryOp::Max => T::max_nan(x, y),
        BinaryOp::Min => T::min_nan(x, y),
        // `GemmProblem::canonical` is the gate.
        other => unreachable!("`{}` is no epilogue step", other.name()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::batch::DIMS;
    use verdigris_graph::Real;
    use verdigris_kir::face::{Header, build};
    use verdigris_kir::ir::KernelBody;
    use verdigris_kir::program::{KernelRef, Launch};

    /// A problem whose epilogue has every kind of step.
    fn everything(d: DType) -> GemmProblem {
        let mut problem = GemmProblem::packed(64, 96, 32, DType::Bf16, d).unwrap();
        let matrix = |slot| Matrix { slot: Slot(slot), ..problem.d.clone() };
        let bias = Matrix { row_stride: 0, ..matrix(4) };
        let per_row = Matrix { row_stride: 1, column_stride: 0, ..matrix(5) };
        problem.c = Some(matrix(3));
        problem.beta = HostScalar::Bound(Slot(7));
        problem.epilogue = vec![
            EpilogueStep::Binary { f: BinaryOp::Add, operand: bias, v_is_right: false },
            EpilogueStep::Unary(UnaryOp::GeluErf),
            EpilogueStep::Round { dtype: DType::F16 },
            EpilogueStep::Unary(UnaryOp::Clamp { lower: Real(-1.0), upper: Real(2.5) }),
            EpilogueStep::Store { target: matrix(6) },
            EpilogueStep::Scale { factor: HostScalar::Fixed(Real(0.3)) },
            EpilogueStep::Binary { f: BinaryOp::Sub, operand: per_row, v_is_right: true },
        ];
        problem.canonical().unwrap()
    }

    fn kernel(spec: &EpilogueSpec) -> KernelBody {
        build(Header { name: spec.name(), target: spec.target(), ..Header::default() }, |k| {
            let epilogue = EpilogueArgs::declare(k, "epilogue", &spec.over_matrices());
            let zero = k.constant(0u32);
            let place = epilogue.begin([zero; DIMS]).at(k.cta(), k.thread() * 2);
            let sum = k.constant(1.0f32);
            if spec.pairs {
                let pair = place.apply_pair([sum, sum], 0);
                place.store_pair(pair, 0);
            } else {
                place.store(place.apply(sum, 1), 1);
            }
        })
    }

    #[test]
    fn arguments_fit_the_declared_parameters() {
        for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_storage() && *dtype != DType::Bool) {
            let problem = everything(dtype);
            let spec = EpilogueSpec::of(&problem);
            assert!(spec.pairs);
            for spec in [spec.clone(), spec.strided()] {
                let body = kernel(&spec);
                let args = spec.arguments(&problem, &Chunk::all(&[])[0], 0, 2).0.bound(&spec.over_matrices());
                let kernel = KernelRef::new(spec.name(), move || kernel(&spec));
                assert_eq!(Launch::new(kernel, [1, 1, 1], args).check(&body), Ok(()));
            }
        }
    }

    #[test]
    fn attributes_and_extents_are_no_part_of_a_name() {
        let one = everything(DType::Bf16);
        let mut other = one.clone();
        for step in &mut other.epilogue {
            if let EpilogueStep::Unary(UnaryOp::Clamp { upper, .. }) = step {
                upper.0 = 7.0;
            }
        }
        assert_eq!(EpilogueSpec::of(&one), EpilogueSpec::of(&other));
        assert_eq!(EpilogueSpec::of(&one).name(), "bf16_x2_cbf16_addbf16_gelu_erf_tof16_clamp_auxbf16_scale_rsubbf16p");
    }

    #[test]
    fn odd_strides_forbid_pairs() {
        let mut problem = everything(DType::F32);
        problem.d.row_stride = 97;
        assert!(!EpilogueSpec::of(&problem).pairs);
    }
}
