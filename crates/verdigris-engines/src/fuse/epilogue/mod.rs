//! What stands between a finished sum and the result: alpha, beta·C, and the steps behind them.
//!
//! ```text
//! v = alpha · sA · sB · sum + beta · C[m, n]       of products; beta = 0 reads no C
//! run the steps from v on                          bias, residual, activation, scale, rounding, auxiliary store
//! D[m, n] = v
//! ```
//!
//! An [`EpilogueSpec`] is the part that shapes code; strides, factors and attributes are arguments ([`EpilogueArgs`], a group of parameters for
//! kernels' own groups). Operands are matrices of a batch or tensors of a convolution, whose pixels are rows and whose channels are columns.
//! A kernel declares the epilogue once, places it at an element and applies it from there to the right:
//!
//! ```text
//! let Parameters { epilogue, .. } = Parameters::declare(k, spec);   // epilogue: EpilogueArgs = spec.epilogue.over_matrices()
//! let place = epilogue.begin(batch_indices).at(row, column);        // addresses of all operands, computed once
//! let v = place.apply(sum, 8);                                      // the element 8 columns to the right
//! place.store(v, 8);
//! ```
//!
//! The caller guards: `apply` and `store` are for elements inside of the result. The pair forms serve two neighbouring columns with one
//! access an operand; they need [`EpilogueSpec::pairs`] and an even column.

mod place;

use serde::{Deserialize, Serialize};
use verdigris_graph::{ConvProblem, EpilogueStep, GemmProblem, HostScalar, Matrix, Precision, Scale, Slot};
use verdigris_kir::face::Kernel;
use verdigris_kir::ir::Target;
use verdigris_kir::params::{Arguments, Parameter, Read};
use verdigris_kir::program::{Address, Arg};
use verdigris_tensor::DType;

use crate::fuse::compute::{self, Compute};
use crate::fuse::operand::{Layout, OperandArgs, OperandDecl, Strides};
use crate::fuse::steps::{self, Number, Numbers, OperandWord, Role, Step, Steps, host_number};
use crate::layout::batch::Chunk;

pub use crate::fuse::operand::{OperandSpec, Walk};
pub use place::{Epilogue, Place};
pub(crate) use place::{Fetched, Pixel};

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
    /// Steps in order, from what is given on; none where nothing is done.
    pub steps: Vec<Step<OperandSpec>>,
    /// D.
    pub d: OperandSpec,
    /// D is stored by [`Place::store`]; otherwise by other means (a tensor map), and has no parameters here.
    pub stores_d: bool,
    /// D is the exact integer sum: nothing is computed and [`Place::store_exact`] stores it.
    pub exact: bool,
    /// Two neighbouring columns may be accessed at once: rows, matrices and operands begin at multiples of two elements.
    pub pairs: bool,
    /// D may turn out to lie where C does: then, with a beta of 1, it is added to where it is stored, and C is not read.
    #[serde(default)]
    pub adds: bool,
}

impl EpilogueSpec {
    /// The spec of a product's epilogue. `pairs` where the strides allow it, provided that each buffer is aligned to two elements (16 bytes for
    /// f64 and i64), which the program then declares.
    pub fn of(problem: &GemmProblem) -> EpilogueSpec {
        let c = problem.c.as_ref().map(Strides::from);
        let of_steps = Self::of_steps(&problem.epilogue, &problem.d, problem.precision, problem.is_exact_integer());
        EpilogueSpec {
            scale_a: matches!(problem.scale_a, Some(Scale::Tensor { .. })),
            scale_b: matches!(problem.scale_b, Some(Scale::Tensor { .. })),
            pairs: of_steps.pairs && c.as_ref().is_none_or(Strides::takes_pairs),
            c: c.map(|c| c.spec()),
            ..of_steps
        }
    }

    /// The spec of a convolution's epilogue. `pairs` as of a product's.
    pub(crate) fn of_conv(problem: &ConvProblem) -> EpilogueSpec {
        Self::of_steps(&problem.epilogue, problem.result(), problem.precision, problem.is_exact_integer())
    }

    fn of_steps<'p, P>(steps: &'p [EpilogueStep<P>], d: &'p P, precision: Precision, exact: bool) -> EpilogueSpec
    where
        Strides: From<&'p P>,
    {
        let steps = Steps::of_value(steps, |operand| Strides::from(operand).slot());
        EpilogueSpec {
            double: precision == Precision::F64,
            steps: steps.spec(|&operand| Strides::from(operand).spec()),
            exact,
            pairs: steps.strided().chain([&d]).all(|&operand| Strides::from(operand).takes_pairs()),
            ..EpilogueSpec::plain(Strides::from(d).spec())
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
            adds: false,
        }
    }

    /// The same for a kernel that stores D by a tensor map, by which f32 can be added to what is in memory: rounded as it would be beside C, which is then neither
    /// loaded nor waited for.
    pub(crate) fn adding(self, problem: &GemmProblem) -> EpilogueSpec {
        let lies_as = |c: &Matrix| {
            let d = &problem.d;
            (c.dtype, c.row_stride, c.column_stride, &c.batch_strides) == (DType::F32, d.row_stride, d.column_stride, &d.batch_strides)
        };
        let can_be_in_place = self.d.dtype == DType::F32 && problem.c.as_ref().is_some_and(lies_as);
        EpilogueSpec { adds: can_be_in_place && self.steps.is_empty() && !self.double && !self.exact && !self.stores_d, ..self }
    }

    /// Whether it draws random numbers, of which neighbours share the work.
    pub(crate) fn draws(&self) -> bool {
        self.steps.iter().any(|step| matches!(step, Step::Random(..)))
    }

    /// The same with every operand in the class that serves any strides, one element at a time.
    pub fn strided(mut self) -> EpilogueSpec {
        self.d = OperandSpec::strided(self.d.dtype);
        self.c = self.c.map(|c| OperandSpec::strided(c.dtype));
        self.steps = self.steps.iter().map(|step| step.map(|operand| OperandSpec::strided(operand.dtype))).collect();
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
        self.c.is_some() || self.steps.iter().any(|step| step.operand().is_some())
    }

    /// The least chip that has the conversions.
    pub fn target(&self) -> Target {
        let operands = self.c.iter().chain([&self.d]).map(|operand| operand.dtype);
        steps::target(&self.steps).max(compute::target_of_all(operands))
    }

    /// The part of a kernel's name that says all of this.
    pub fn name(&self) -> String {
        let mut words = vec![self.d.word(false)];
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
        words.extend(self.c.map(|c| format!("c{}", c.word(false))));
        if self.adds {
            words.push("adds".to_owned());
        }
        words.extend(steps::names(&self.steps));
        words.join("_")
    }

    /// The declaration of its parameters over matrices of a batch: the spec of [`EpilogueArgs`].
    pub fn over_matrices(&self) -> EpilogueDecl {
        EpilogueDecl { spec: self.clone(), layout: Layout::Matrices }
    }

    /// The declaration of its parameters over tensors, for [`Epilogue::at_pixel`]: the spec of [`EpilogueArgs`].
    pub(crate) fn over_tensors(&self) -> EpilogueDecl {
        EpilogueDecl { spec: self.clone(), layout: Layout::Tensors }
    }

    /// Declares the parameters over tensors.
    pub(crate) fn declare_conv<'k, T: Compute>(&self, k: Kernel<'k>) -> Epilogue<'k, T> {
        EpilogueArgs::declare(k, "", &self.over_tensors()).of()
    }

    /// The arguments for a part of a product that begins at `(row, column)`.
    pub fn arguments(&self, problem: &GemmProblem, chunk: &Chunk, row: u64, column: u64) -> EpilogueArgs {
        let part = |matrix: &Matrix| Strides::of_part(matrix, chunk, row, column);
        let EpilogueArgs(of_steps) = self.arguments_of_steps(&problem.epilogue, Some(&problem.d), part);
        let scales = [&problem.scale_a, &problem.scale_b].into_iter().filter_map(|scale| match scale {
            Some(Scale::Tensor { slot }) => Some(Address::buffer(slot.0 as usize)),
            _ => None,
        });
        EpilogueArgs(ValuesArgs {
            alpha: (!self.exact).then(|| host_number(problem.alpha)),
            scales: scales.filter(|_| !self.exact).collect(),
            beta: self.c.map(|_| host_number(problem.beta)),
            c: self.c.zip(problem.c.as_ref()).map(|(spec, c)| part(c).arguments(spec)),
            place_of_d: self.adds.then(|| chunk.address(&problem.d, row, column)),
            ..of_steps
        })
    }

    /// The arguments of a plain epilogue of sums that are no product of matrices: D's first matrix begins at `first`.
    pub(crate) fn plain_arguments(&self, d: &Matrix, chunk: &Chunk, first: Address) -> EpilogueArgs {
        let EpilogueArgs(of_d) = self.arguments_of_steps(&[], Some(d), |d| Strides::of_part(d, chunk, 0, 0).at(first));
        EpilogueArgs(ValuesArgs { alpha: Some(host_number(HostScalar::ONE)), ..of_d })
    }

    /// The arguments of [`EpilogueSpec::over_tensors`].
    pub(crate) fn conv_arguments(&self, problem: &ConvProblem) -> EpilogueArgs {
        self.arguments_of_steps(&problem.epilogue, Some(problem.result()), |tensor| tensor.into())
    }

    /// The same, for a launch whose arguments are listed.
    pub(crate) fn conv_args(&self, problem: &ConvProblem) -> Vec<Arg> {
        self.conv_arguments(problem).0.bound(&self.over_tensors()).into_iter().collect()
    }

    /// The arguments for steps and D, and none for anything else.
    pub(in crate::fuse) fn arguments_of_steps<P>(
        &self,
        list: &[EpilogueStep<P>],
        d: Option<&P>,
        strides: impl Fn(&P) -> Strides,
    ) -> EpilogueArgs {
        let Steps { steps, numbers } = Steps::of_value(list, |operand| strides(operand).slot());
        let pairs = self.steps.iter().zip(&steps).filter_map(|(spec, step)| spec.strided().zip(step.strided()));
        let states = list.iter().filter_map(|step| match step {
            EpilogueStep::Random { number, offset: None, .. } => Some(Address::buffer(strides(number).slot().0 as usize)),
            _ => None,
        });
        EpilogueArgs(ValuesArgs {
            alpha: None,
            scales: Vec::new(),
            beta: None,
            c: None,
            place_of_d: None,
            operands: pairs
                .map(|((spec, is), (operand, _))| {
                    let strides = strides(operand);
                    if is == Role::Counted { strides.counts(*spec) } else { strides.arguments(*spec) }
                })
                .collect(),
            states: states.take(self.states()).collect(),
            // A kernel that leaves the steps to a later launch has none of them.
            numbers: numbers.into_iter().take(self.steps.len()).collect(),
            d: d.filter(|_| self.stores_d).map(|d| strides(d).arguments(self.d)),
        })
    }

    /// How many states of random numbers it reads from memory.
    fn states(&self) -> usize {
        self.steps.iter().filter(|step| matches!(step, Step::Word(0))).count()
    }

    /// The alignment in bytes that the epilogue of a convolution relies on, by buffer slot.
    pub(crate) fn conv_alignments(&self, problem: &ConvProblem) -> impl Iterator<Item = (Slot, u64)> + use<> {
        let many = if self.pairs { 2 } else { 1 };
        let steps = Steps::of_value(&problem.epilogue, |tensor| tensor.slot);
        let slots: Vec<_> = steps.operands().chain([&problem.result()]).map(|&tensor| Strides::from(tensor).alignment(many)).collect();
        slots.into_iter()
    }
}

/// What the parameters of an epilogue are made from: [`EpilogueSpec::over_matrices`] of a product, `over_tensors` of a
/// convolution.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EpilogueDecl {
    pub(in crate::fuse) spec: EpilogueSpec,
    pub(in crate::fuse) layout: Layout,
}

impl EpilogueDecl {
    fn number(&self, exists: bool) -> Option<bool> {
        (exists && !self.spec.exact).then_some(self.spec.double)
    }

    fn operand(&self, spec: OperandSpec, is: Role) -> OperandDecl {
        OperandDecl { spec, layout: self.layout, together: if self.spec.pairs { 2 } else { 1 }, is }
    }

    fn operands(&self) -> Vec<OperandDecl> {
        self.spec.steps.iter().filter_map(|step| step.strided()).map(|(&spec, is)| self.operand(spec, is)).collect()
    }

    fn scales(&self) -> usize {
        if self.spec.exact { 0 } else { usize::from(self.spec.scale_a) + usize::from(self.spec.scale_b) }
    }
}

verdigris_kir::parameters! {
    #[derive(Clone, Debug)]
    pub(super) struct Values / #[derive(Clone, Debug)] ValuesArgs of EpilogueDecl as decl {
        pub(super) alpha: Option<Number> = decl.number(decl.layout == Layout::Matrices),
        pub(super) scales: Vec<Read> = vec![4; decl.scales()],
        pub(super) beta: Option<Number> = decl.number(decl.spec.c.is_some()),
        pub(super) c: Option<OperandArgs> = decl.spec.c.map(|c| decl.operand(c, Role::Read)),
        /// Where D lies, to be compared with where C does.
        pub(super) place_of_d: Option<Read> = decl.spec.adds.then_some(4),
        /// Of the steps that have one.
        pub(super) operands: Vec<OperandArgs> = decl.operands(),
        /// Of random numbers in memory, four words each.
        pub(super) states: Vec<Read> = vec![4; decl.spec.states()],
        pub(super) numbers: Numbers = steps::numbers(&decl.spec.steps, decl.spec.double),
        pub(super) d: Option<OperandArgs> = decl.spec.stores_d.then(|| decl.operand(decl.spec.d, Role::Written)),
    }
}

/// The arguments of an epilogue, as a parameter: [`Epilogue`] in the kernel.
#[derive(Clone, Debug)]
pub struct EpilogueArgs(ValuesArgs);

impl Parameter for EpilogueArgs {
    type Spec = EpilogueDecl;
    type Value<'k> = Epilogue<'k>;
    type Argument = EpilogueArgs;

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, _: &'static str, decl: &EpilogueDecl) -> Epilogue<'k> {
        Epilogue::new(k, decl.spec.clone(), Values::declare(k, decl))
    }

    fn bind(argument: EpilogueArgs, name: &'static str, decl: &EpilogueDecl, to: &mut Arguments) {
        ValuesArgs::bind(argument.0, name, decl, to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::batch::DIMS;
    use verdigris_graph::{BinaryOp, HostScalar, Real, UnaryOp};
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
        assert_eq!(
            EpilogueSpec::of(&one).name(),
            "bf16_x2_cbf16_given_bf16_add0_1_gelu_erf2_tof163_clamp4_auxbf16of5_factor_mul5_7_bf16p_sub9_8"
        );
    }

    #[test]
    fn odd_strides_forbid_pairs() {
        let mut problem = everything(DType::F32);
        problem.d.row_stride = 97;
        assert!(!EpilogueSpec::of(&problem).pairs);
    }
}
