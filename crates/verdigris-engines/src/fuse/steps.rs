//! Steps: the one vocabulary in which maps, prologues, epilogues and what surrounds reductions are said, and its one evaluator.
//!
//! A list of [`Step`]s is straight-line code: each gives a value that later ones name by its position. As a part of a kernel's spec a step
//! says what shapes code; its numbers (factors of the host, attributes of functions) are arguments ([`Numbers`]), and how operands are
//! reached is said by whoever runs the steps ([`Operands`]).

use serde::{Deserialize, Serialize};
use verdigris_graph::{BinaryOp, Chain, ChainStep, Drawn, EpilogueStep, HostScalar, RowPlace, Slot, TernaryOp, UnaryOp, View, Window};
use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::ir::Target;
use verdigris_kir::params::{Arguments, AtExecution, HostNumber, Parameter};
use verdigris_tensor::DType;

use super::compute::{self, Compute};
use super::functions;
use super::philox;
use super::value::{AnyVal, HostVal, Raw};

/// What an epilogue that draws random numbers may spill of a thread's registers: 20 bytes are the most that tiles were seen to.
const DRAWN_SPILL_BYTES: u32 = 24;

/// One step; `O` says what is known of an operand in memory. Attributes of functions are 0 where they are arguments.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step<O> {
    /// An element of an operand.
    Load(O),
    /// An element of a table, at the place that a step says. Of score functions.
    Gather(O, u32),
    /// What is handed to the steps: a sum, an activation.
    Given,
    /// A factor from the host, fixed or given at execution; of the type of what it meets.
    Scalar,
    /// A coordinate.
    Index,
    /// Which number an element has, as strides tell it. Gives no value: the next random number is of it. Of epilogues.
    Number(O),
    /// A word of a random state in memory: a pointer comes with the first of the four. Of epilogues.
    Word(u32),
    /// Half of an integer from the host, given at execution: the upper one, or the lower.
    Half(bool),
    /// A random number of the state whose words these are.
    Random(Drawn, [u32; 4]),
    /// `f(x)`.
    Unary(UnaryOp, u32),
    /// `f(x, z)`.
    Binary(BinaryOp, [u32; 2]),
    /// `f(x, z, t)`.
    Ternary(TernaryOp, [u32; 3]),
    /// `x`, as if it had been stored and read again.
    Round(DType, u32),
    /// Stores `x`, rounded. Gives no value.
    Store(O, u32),
}

/// What strides of a step are for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Role {
    /// Memory that is read.
    Read,
    /// Memory that is written.
    Written,
    /// No memory: they count elements.
    Counted,
}

/// What a spec says of an operand in memory.
pub trait OperandWord {
    /// Its element type.
    fn dtype(&self) -> DType;

    /// The part of a kernel's name that says how it is read or written.
    fn word(&self, written: bool) -> String;
}

impl<O> Step<O> {
    /// The same with another word on its operand.
    pub(crate) fn map<P>(&self, operand: impl FnOnce(&O) -> P) -> Step<P> {
        match *self {
            Step::Load(ref from) => Step::Load(operand(from)),
            Step::Gather(ref from, x) => Step::Gather(operand(from), x),
            Step::Given => Step::Given,
            Step::Scalar => Step::Scalar,
            Step::Index => Step::Index,
            Step::Number(ref of) => Step::Number(operand(of)),
            Step::Word(word) => Step::Word(word),
            Step::Half(upper) => Step::Half(upper),
            Step::Random(distribution, state) => Step::Random(distribution, state),
            Step::Unary(f, x) => Step::Unary(f, x),
            Step::Binary(f, of) => Step::Binary(f, of),
            Step::Ternary(f, of) => Step::Ternary(f, of),
            Step::Round(dtype, x) => Step::Round(dtype, x),
            Step::Store(ref to, x) => Step::Store(operand(to), x),
        }
    }

    /// The operand, and whether it is written.
    pub(crate) fn operand(&self) -> Option<(&O, bool)> {
        match self {
            Step::Load(from) | Step::Gather(from, _) => Some((from, false)),
            Step::Store(to, _) => Some((to, true)),
            _ => None,
        }
    }

    /// What has strides: the operand, or the number of an element.
    pub(super) fn strided(&self) -> Option<(&O, Role)> {
        match self {
            Step::Load(from) | Step::Gather(from, _) => Some((from, Role::Read)),
            Step::Store(to, _) => Some((to, Role::Written)),
            Step::Number(of) => Some((of, Role::Counted)),
            _ => None,
        }
    }

    /// Whether it computes.
    pub(crate) fn is_function(&self) -> bool {
        matches!(self, Step::Random(..) | Step::Unary(..) | Step::Binary(..) | Step::Ternary(..))
    }

    /// How many of its numbers are arguments.
    fn numbers(&self) -> usize {
        match *self {
            Step::Scalar | Step::Half(_) => 1,
            Step::Unary(f, _) | Step::Binary(BinaryOp::Backward(f), _) => functions::parted(f).1.len(),
            _ => 0,
        }
    }
}

impl<O: OperandWord> Step<O> {
    /// The part of a kernel's name that says all of this.
    fn name(&self) -> String {
        match *self {
            Step::Load(ref from) => from.word(false),
            Step::Gather(ref from, x) => format!("{}at{x}", from.word(false)),
            Step::Given => "given".to_owned(),
            Step::Scalar => "factor".to_owned(),
            Step::Index => "index".to_owned(),
            Step::Number(ref of) => format!("number{}", of.word(false)),
            Step::Word(word) => format!("word{word}"),
            Step::Half(upper) => if upper { "upper" } else { "lower" }.to_owned(),
            Step::Random(Drawn::Uniform, [a, b, c, d]) => format!("random{a}_{b}_{c}_{d}"),
            Step::Random(Drawn::Normal, [a, b, c, d]) => format!("normal{a}_{b}_{c}_{d}"),
            Step::Unary(f, x) => format!("{}{x}", f.name()),
            Step::Binary(BinaryOp::Backward(f), [x, z]) => format!("d{}{x}_{z}", f.name()),
            Step::Binary(f, [x, z]) => format!("{}{x}_{z}", f.name()),
            Step::Ternary(f, [x, z, t]) => format!("{}{x}_{z}_{t}", f.name()),
            Step::Round(dtype, x) => format!("to{dtype}{x}"),
            Step::Store(ref to, x) => format!("{}of{x}", to.word(true)),
        }
    }
}

/// The names of steps, in order.
pub(crate) fn names<O: OperandWord>(steps: &[Step<O>]) -> impl Iterator<Item = String> {
    steps.iter().map(Step::name)
}

/// The least chip that has the conversions.
pub(crate) fn target<O: OperandWord>(steps: &[Step<O>]) -> Target {
    compute::target_of_all(steps.iter().filter_map(|step| match *step {
        Step::Load(ref operand) | Step::Gather(ref operand, _) | Step::Store(ref operand, _) => Some(operand.dtype()),
        Step::Round(dtype, _) => Some(dtype),
        _ => None,
    }))
}

// ---- from problems -----------------------------------------------------------------------------------------------------

/// Steps of a problem: operands where they lie, and the numbers of each step.
#[derive(Clone, Debug)]
pub(crate) struct Steps<P> {
    pub(crate) steps: Vec<Step<P>>,
    pub(crate) numbers: Vec<Vec<HostNumber>>,
}

impl<P> Steps<P> {
    fn push(&mut self, step: Step<P>, numbers: Vec<HostNumber>) -> u32 {
        self.steps.push(step);
        self.numbers.push(numbers);
        self.steps.len() as u32 - 1
    }

    /// The part that shapes code.
    pub(super) fn spec<O>(&self, operand: impl Fn(&P) -> O) -> Vec<Step<O>> {
        self.steps.iter().map(|step| step.map(&operand)).collect()
    }

    /// What has strides, in order: what is read and written, and the numbers of elements.
    pub(super) fn strided(&self) -> impl Iterator<Item = &P> {
        self.steps.iter().filter_map(|step| step.strided()).map(|(operand, _)| operand)
    }

    /// What is read and written, in order.
    pub(super) fn operands(&self) -> impl Iterator<Item = &P> {
        self.steps.iter().filter_map(|step| step.operand()).map(|(operand, _)| operand)
    }
}

impl<'p, P> Steps<&'p P> {
    /// The steps that a value goes through one after another; none where nothing is done. `slot`: that of an operand.
    pub(super) fn of_value(list: &'p [EpilogueStep<P>], slot: impl Fn(&'p P) -> Slot) -> Self {
        let mut all = Steps { steps: Vec::new(), numbers: Vec::new() };
        if list.is_empty() {
            return all;
        }
        let mut v = all.push(Step::Given, Vec::new());
        for step in list {
            match step {
                EpilogueStep::Unary(f) => {
                    let (f, attributes) = unary(*f);
                    v = all.push(Step::Unary(f, v), attributes);
                }
                EpilogueStep::Binary { f, operand, v_is_right } => {
                    let other = all.push(Step::Load(operand), Vec::new());
                    let (f, attributes) = binary(*f);
                    v = all.push(Step::Binary(f, if *v_is_right { [other, v] } else { [v, other] }), attributes);
                }
                EpilogueStep::Random { f, v_is_right, distribution, number, offset, through } => {
                    let words = [0, 1, 2, 3].map(|word: u32| match offset {
                        None => all.push(Step::Word(word), Vec::new()),
                        Some(offset) => {
                            let integer = HostScalar::Bound(if word < 2 { slot(number) } else { *offset });
                            all.push(Step::Half(word % 2 == 1), vec![host_number(integer)])
                        }
                    });
                    all.push(Step::Number(number), Vec::new());
                    let mut drawn = all.push(Step::Random(*distribution, words), Vec::new());
                    for f in through {
                        let (f, attributes) = unary(*f);
                        drawn = all.push(Step::Unary(f, drawn), attributes);
                    }
                    let (f, attributes) = binary(*f);
                    v = all.push(Step::Binary(f, if *v_is_right { [drawn, v] } else { [v, drawn] }), attributes);
                }
                EpilogueStep::Scale { factor } => {
                    let factor = all.push(Step::Scalar, vec![host_number(*factor)]);
                    v = all.push(Step::Binary(BinaryOp::Mul, [v, factor]), Vec::new());
                }
                EpilogueStep::Round { dtype } => v = all.push(Step::Round(*dtype, v), Vec::new()),
                EpilogueStep::Store { target } => {
                    all.push(Step::Store(target, v), Vec::new());
                }
            }
        }
        all
    }
}

/// An operand of a chain: where it lies, where in the space it is loaded, and which row a store is to.
pub(crate) type InChain<'p> = (&'p View, Option<&'p Window>, Option<&'p RowPlace>);

impl<'p> Steps<InChain<'p>> {
    /// The steps of a chain.
    pub(crate) fn of_chain(chain: &'p Chain) -> Self {
        let mut all = Steps { steps: Vec::new(), numbers: Vec::new() };
        for step in &chain.steps {
            let (step, numbers) = match *step {
                ChainStep::Load { ref from, ref window } => (Step::Load((from, window.as_ref(), None)), Vec::new()),
                ChainStep::Gather { ref from, x, .. } => (Step::Gather((from, None, None), x), Vec::new()),
                ChainStep::Given => (Step::Given, Vec::new()),
                ChainStep::Scalar(factor) => (Step::Scalar, vec![host_number(factor)]),
                ChainStep::Index { .. } => (Step::Index, Vec::new()),
                ChainStep::Half { slot, upper } => (Step::Half(upper), vec![host_number(HostScalar::Bound(slot))]),
                ChainStep::Random { distribution, state, .. } => (Step::Random(distribution, state), Vec::new()),
                ChainStep::Unary { f, x } => {
                    let (f, attributes) = unary(f);
                    (Step::Unary(f, x), attributes)
                }
                ChainStep::Binary { f, x, z } => {
                    let (f, attributes) = binary(f);
                    (Step::Binary(f, [x, z]), attributes)
                }
                ChainStep::Ternary { f, x, z, t } => (Step::Ternary(f, [x, z, t]), Vec::new()),
                ChainStep::Round { dtype, x } => (Step::Round(dtype, x), Vec::new()),
                ChainStep::Store { x, ref to, ref at } => (Step::Store((to, None, at.as_ref()), x), Vec::new()),
            };
            all.push(step, numbers);
        }
        all
    }
}

fn unary(f: UnaryOp) -> (UnaryOp, Vec<HostNumber>) {
    let (f, attributes) = functions::parted(f);
    (f, attributes.into_iter().map(HostNumber::Fixed).collect())
}

fn binary(f: BinaryOp) -> (BinaryOp, Vec<HostNumber>) {
    let BinaryOp::Backward(f) = f else { return (f, Vec::new()) };
    let (f, attributes) = unary(f);
    (BinaryOp::Backward(f), attributes)
}

/// A number of the host as an argument.
pub(crate) fn host_number(scalar: HostScalar<Slot>) -> HostNumber {
    match scalar {
        HostScalar::Bound(slot) => HostNumber::Bound(slot.0 as usize),
        HostScalar::Fixed(value) => HostNumber::Fixed(value.0),
    }
}

// ---- in a kernel -------------------------------------------------------------------------------------------------------

/// A number from the host. The spec is whether the kernel takes it in f64.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Number {}

impl Parameter for Number {
    type Spec = bool;
    type Value<'k> = HostVal<'k>;
    type Argument = HostNumber;

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, name: &'static str, double: &bool) -> HostVal<'k> {
        match double {
            true => HostVal::Double(AtExecution::<f64>::declare(k, name, &())),
            false => HostVal::Single(AtExecution::<f32>::declare(k, name, &())),
        }
    }

    fn bind(argument: HostNumber, name: &'static str, double: &bool, to: &mut Arguments) {
        match double {
            true => AtExecution::<f64>::bind(argument, name, &(), to),
            false => AtExecution::<f32>::bind(argument, name, &(), to),
        }
    }
}

/// How a kernel takes a number of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Taken {
    Single,
    Double,
    /// As an i64.
    Integer,
}

/// A number of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StepNumber {}

impl Parameter for StepNumber {
    type Spec = Taken;
    type Value<'k> = HostVal<'k>;
    type Argument = HostNumber;

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, name: &'static str, taken: &Taken) -> HostVal<'k> {
        match taken {
            Taken::Integer => HostVal::Integer(AtExecution::<i64>::declare(k, name, &())),
            taken => Number::declare(k, name, &(*taken == Taken::Double)),
        }
    }

    fn bind(argument: HostNumber, name: &'static str, taken: &Taken, to: &mut Arguments) {
        match (taken, argument) {
            (Taken::Integer, HostNumber::Bound(index)) => AtExecution::<i64>::bind(HostNumber::Bound(index), name, &(), to),
            (Taken::Integer, HostNumber::Fixed(value)) => AtExecution::<i64>::bind(HostNumber::Fixed(value as i64), name, &(), to),
            (taken, argument) => Number::bind(argument, name, &(*taken == Taken::Double), to),
        }
    }
}

/// The numbers of steps, a list for each.
pub(crate) type Numbers = Vec<Vec<StepNumber>>;

/// The declaration of [`Numbers`]; `double`: in f64.
pub(crate) fn numbers<O>(steps: &[Step<O>], double: bool) -> Vec<Vec<Taken>> {
    let taken = |step: &Step<O>| match step {
        Step::Half(_) => Taken::Integer,
        _ if double => Taken::Double,
        _ => Taken::Single,
    };
    steps.iter().map(|step| vec![taken(step); step.numbers()]).collect()
}

/// How steps reach their operands at the place where they are run. What steps that load alone do not ask for need not be given.
pub(crate) trait Operands<'k, O> {
    /// What step `step` loads: one element for all lanes, or one for each.
    fn load(&self, step: usize, from: &O) -> Vec<AnyVal<'k>>;

    /// What step `step` loads of a table at a place.
    fn gather(&self, step: usize, _from: &O, _place: AnyVal<'k>) -> AnyVal<'k> {
        unreachable!("step {step} reads a table among steps that load alone")
    }

    /// The word of a random state that step `step` asks for.
    fn word(&self, step: usize, _word: u32) -> AnyVal<'k> {
        unreachable!("step {step} draws a random number among steps that load alone")
    }

    /// The coordinate that step `step` asks for, of each lane.
    fn index(&self, step: usize) -> Vec<AnyVal<'k>> {
        unreachable!("step {step} is a coordinate among steps that load alone")
    }

    /// Whether the numbers of the lanes ([`Operands::index`]) are known to follow each other, from a multiple of as many as there are on, four at most.
    fn in_blocks(&self, _step: usize) -> bool {
        false
    }

    /// Stores a value of each lane.
    fn store(&self, step: usize, _to: &O, _values: &[AnyVal<'k>]) {
        unreachable!("step {step} stores among steps that load alone")
    }
}

/// Steps in a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Code<'c, 'k, O> {
    pub(crate) steps: &'c [Step<O>],
    pub(crate) numbers: &'c [Vec<HostVal<'k>>],
    /// The type of all functions; where it is none, they compute in f64 if an operand is f64, else in f32.
    pub(crate) computed: Option<DType>,
    /// Elements that are handled at once: neighbours, for which loads and stores may be one access.
    pub(crate) lanes: usize,
}

impl<'k, O> Code<'_, 'k, O> {
    /// Runs the steps and returns the value of each, for each lane; one that serves all lanes stands once.
    pub(crate) fn run(&self, k: Kernel<'k>, given: &[AnyVal<'k>], operands: &impl Operands<'k, O>) -> Vec<Vec<AnyVal<'k>>> {
        let mut values: Vec<Vec<AnyVal<'k>>> = Vec::with_capacity(self.steps.len());
        for (i, step) in self.steps.iter().enumerate() {
            let of = |x: u32, lane: usize| {
                let all = &values[x as usize];
                all[lane.min(all.len() - 1)]
            };
            let each = |f: &dyn Fn(usize) -> AnyVal<'k>| (0..self.lanes).map(f).collect::<Vec<_>>();
            let next = match *step {
                Step::Load(ref from) => operands.load(i, from),
                Step::Gather(ref from, x) => each(&|lane| operands.gather(i, from, of(x, lane))),
                Step::Given => given.to_vec(),
                Step::Scalar => self.numbers[i].iter().map(|&number| AnyVal::Number(number)).collect(),
                Step::Index => operands.index(i),
                Step::Number(_) => {
                    // Ten rounds beside the sums of a large tile: a few words of them go to local memory, once a tile.
                    k.allow_spills(DRAWN_SPILL_BYTES);
                    Vec::new()
                }
                Step::Word(word) => vec![operands.word(i, word)],
                Step::Half(upper) => {
                    let half = |number: &HostVal<'k>| AnyVal::Stored(DType::I32, Raw::B32(number.half(upper)));
                    self.numbers[i].iter().map(half).collect()
                }
                Step::Random(distribution, state) => {
                    philox::numbers(k, distribution, state.map(|word| of(word, 0)), &operands.index(i), operands.in_blocks(i))
                }
                Step::Unary(_, x) => each(&|lane| self.function(k, i, &[of(x, lane)])),
                Step::Binary(_, all) => each(&|lane| self.function(k, i, &all.map(|x| of(x, lane)))),
                Step::Ternary(_, all) => each(&|lane| self.function(k, i, &all.map(|x| of(x, lane)))),
                Step::Round(dtype, x) => each(&|lane| of(x, lane).rounded(k, dtype)),
                Step::Store(ref to, x) => {
                    operands.store(i, to, &each(&|lane| of(x, lane)));
                    Vec::new()
                }
            };
            values.push(next);
        }
        values
    }

    fn function(&self, k: Kernel<'k>, step: usize, of: &[AnyVal<'k>]) -> AnyVal<'k> {
        match self.computed.map_or_else(|| of.iter().any(|value| value.is_double()), |dtype| dtype == DType::F64) {
            true => AnyVal::of(self.function_in::<f64>(k, step, of)),
            false => AnyVal::of(self.function_in::<f32>(k, step, of)),
        }
    }

    fn function_in<T: Compute>(&self, k: Kernel<'k>, step: usize, of: &[AnyVal<'k>]) -> Val<'k, T> {
        let of: Vec<Val<'k, T>> = of.iter().map(|value| value.get(k)).collect();
        let attributes: Vec<Val<'k, T>> = self.numbers[step].iter().map(|number| number.get()).collect();
        match (&self.steps[step], of.as_slice()) {
            (Step::Unary(f, _), &[x]) => functions::unary(*f, x, &attributes),
            (Step::Binary(f, _), &[x, z]) => functions::binary(*f, x, z, &attributes),
            (Step::Ternary(f, _), &[x, z, t]) => functions::ternary(*f, [x, z, t]),
            (_, of) => unreachable!("a function of {} values", of.len()),
        }
    }
}
