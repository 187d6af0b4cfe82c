//! The function of scores: steps of the pointwise language, run for one score after the other.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt::Write;

use serde::{Deserialize, Serialize};
use verdigris_graph::{AttentionProblem, BinaryOp, Chain, ChainStep, TernaryOp, UnaryOp};
use verdigris_kir::face::{Kernel, Pointer, Val, Var};
use verdigris_kir::inst::CvtRound;
use verdigris_kir::params::{HostNumber, Read};
use verdigris_tensor::DType;

use super::score_mod::{Element, KeyRows, QueryRows};
use crate::engine::{EngineId, Reason, Refusal};
use crate::fuse::operand::Walk;
use crate::fuse::steps::{self, Code, Numbers, OperandWord, Operands, Step, Steps};
use crate::fuse::value::{AnyVal, load_raw};
use crate::layout::space::element;

/// What a step reads beside scores and numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Source {
    /// An element of the operand of this number, and how it lies.
    Tensor { number: u32, dtype: DType, lies: Lies },
    /// An element of a table, the operand of this number, and how its entries lie: side by side, or apart.
    Table { number: u32, dtype: DType, is_apart: bool },
    /// A coordinate: batch, head, query or key.
    Place(u32),
}

/// How an operand lies over the pairs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct Lies {
    keys: Walk,
    /// Whether it may be another for each query; else what is read for one is read for all.
    by_query: bool,
}

impl Lies {
    /// Anyhow.
    pub(super) const ANY: Lies = Lies { keys: Walk::Strided, by_query: true };

    /// By strides over batch, head, query and key.
    pub(super) fn of(strides: &[u64]) -> Lies {
        let stride = |dim: usize| strides.get(dim).copied().unwrap_or(0);
        Lies { keys: Walk::of(stride(3)), by_query: stride(2) > 0 }
    }

    const fn word(self) -> &'static str {
        match (self.keys, self.by_query) {
            (Walk::Row, true) => "row",
            (Walk::PerRow, true) => "one",
            (Walk::Strided, true) => "apart",
            (Walk::Row, false) => "key",
            (Walk::PerRow, false) => "only",
            (Walk::Strided, false) => "keyapart",
        }
    }
}

impl OperandWord for Source {
    fn dtype(&self) -> DType {
        match *self {
            Source::Tensor { dtype, .. } | Source::Table { dtype, .. } => dtype,
            Source::Place(_) => DType::F32,
        }
    }

    fn word(&self, _: bool) -> String {
        match *self {
            Source::Tensor { number, dtype, lies } => format!("{dtype}{}{number}", lies.word()),
            Source::Table { number, dtype, is_apart } => format!("{dtype}{}{number}", if is_apart { "tableapart" } else { "table" }),
            Source::Place(axis) => ["batch", "head", "query", "key"][axis as usize].to_owned(),
        }
    }
}

/// The steps of a problem as they shape code; none where it has no function. `lies` says how an operand does, by its strides.
pub(super) fn steps_of(p: &AttentionProblem, lies: impl Fn(&[u64]) -> Lies) -> Vec<Step<Source>> {
    p.score.as_ref().map_or_else(Vec::new, |chain| steps_of_chain(chain, lies))
}

/// Those of a function, with its slope or without.
pub(super) fn steps_of_chain(chain: &Chain, lies: impl Fn(&[u64]) -> Lies) -> Vec<Step<Source>> {
    let (mut numbers, all) = (0.., Steps::of_chain(chain));
    let mut number = || numbers.next().unwrap_or(0);
    let one = |(step, own): (&Step<_>, &ChainStep)| match own {
        ChainStep::Load { from, .. } => Step::Load(Source::Tensor { number: number(), dtype: from.dtype, lies: lies(&from.strides) }),
        ChainStep::Gather { from, x, .. } => {
            let is_apart = lies(&from.strides).keys != Walk::Row;
            Step::Gather(Source::Table { number: number(), dtype: from.dtype, is_apart }, *x)
        }
        ChainStep::Index { strides } => Step::Load(Source::Place(strides.iter().position(|&stride| stride == 1).unwrap_or(0) as u32)),
        // What is left reads no memory.
        _ => step.map(|_| Source::Place(0)),
    };
    all.steps.iter().zip(&chain.steps).map(one).collect()
}

/// Steps of each kind, of which catalogs have kernels: `t + (query − key) · number + table[query, key]`.
pub(super) fn sample() -> Vec<Step<Source>> {
    let table = Source::Tensor { number: 0, dtype: DType::F32, lies: Lies { keys: Walk::Row, by_query: true } };
    vec![
        Step::Given,
        Step::Load(Source::Place(2)),
        Step::Load(Source::Place(3)),
        Step::Binary(BinaryOp::Sub, [1, 2]),
        Step::Scalar,
        Step::Binary(BinaryOp::Mul, [3, 4]),
        Step::Binary(BinaryOp::Add, [0, 5]),
        Step::Load(table),
        Step::Binary(BinaryOp::Add, [6, 7]),
    ]
}

/// As [`sample`], with steps of a slope that no number is: `20 · tanh(t / 20) + (query − key) · number + table[query, key]`, and the step that is the score.
pub(super) fn sloped_sample() -> (Vec<Step<Source>>, u32) {
    let table = Source::Tensor { number: 0, dtype: DType::F32, lies: Lies { keys: Walk::Row, by_query: true } };
    let steps = vec![
        Step::Given,
        Step::Scalar,
        Step::Binary(BinaryOp::Div, [0, 1]),
        Step::Unary(UnaryOp::Tanh, 2),
        Step::Binary(BinaryOp::Mul, [3, 1]),
        Step::Load(Source::Place(2)),
        Step::Load(Source::Place(3)),
        Step::Binary(BinaryOp::Sub, [5, 6]),
        Step::Scalar,
        Step::Binary(BinaryOp::Mul, [7, 8]),
        Step::Binary(BinaryOp::Add, [4, 9]),
        Step::Load(table),
        Step::Binary(BinaryOp::Add, [10, 11]),
        Step::Binary(BinaryOp::Backward(UnaryOp::Tanh), [1, 2]),
        Step::Binary(BinaryOp::Div, [13, 1]),
    ];
    (steps, 12)
}

/// Of functions whose slope with respect to what they read is 1, as [`sample`]: `t + table[head, query − key + number]`, of which step 5 is the place, and the step that is
/// the score; and `t + read[query]`.
pub(super) fn read_samples() -> [(Vec<Step<Source>>, u32); 2] {
    let table = Source::Table { number: 0, dtype: DType::F32, is_apart: false };
    let by_table = vec![
        Step::Given,
        Step::Load(Source::Place(2)),
        Step::Load(Source::Place(3)),
        Step::Binary(BinaryOp::Sub, [1, 2]),
        Step::Scalar,
        Step::Binary(BinaryOp::Add, [3, 4]),
        Step::Gather(table, 5),
        Step::Binary(BinaryOp::Add, [0, 6]),
        Step::Scalar,
    ];
    let of_query = Source::Tensor { number: 0, dtype: DType::F32, lies: Lies { keys: Walk::PerRow, by_query: true } };
    let by_query = vec![Step::Given, Step::Load(of_query), Step::Binary(BinaryOp::Add, [0, 1]), Step::Scalar];
    [(by_table, 7), (by_query, 2)]
}

/// The numbers of the steps of a function, with its slope or without.
pub(super) fn numbers_of_chain(chain: &Chain) -> Vec<Vec<HostNumber>> {
    Steps::of_chain(chain).numbers
}

/// Writes the part of a kernel's name that says the steps.
pub(super) fn write_name(to: &mut impl Write, steps: &[Step<Source>]) -> std::fmt::Result {
    steps::names(steps).try_for_each(|name| write!(to, "_{name}"))
}

/// Instructions that a function takes for a score, about.
pub(super) fn instructions(p: &AttentionProblem) -> f64 {
    let of = |step: &ChainStep| match step {
        ChainStep::Load { .. } => 3.0,
        // Its place, brought into the table, and the address.
        ChainStep::Gather { .. } => 7.0,
        ChainStep::Index { .. } => 0.5,
        ChainStep::Unary { f, .. } => match f {
            UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Relu | UnaryOp::Floor | UnaryOp::Ceil | UnaryOp::Round | UnaryOp::Affine { .. } => 1.0,
            UnaryOp::Identity => 0.0,
            UnaryOp::Exp => 6.0,
            _ => 15.0,
        },
        ChainStep::Binary { f: BinaryOp::Div, .. } => 10.0,
        ChainStep::Binary { f: BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul | BinaryOp::Max | BinaryOp::Min, .. } => 1.0,
        ChainStep::Binary { .. } => 3.0,
        ChainStep::Ternary { f: TernaryOp::Select, .. } | ChainStep::Round { .. } => 2.0,
        ChainStep::Ternary { .. } => 4.0,
        _ => 0.0,
    };
    p.score.iter().flat_map(|chain| &chain.steps).map(of).sum()
}

/// What kernels of tensor cores ask of a function: one whose steps take a few instructions each, for they stand once for each score of a thread.
///
/// # Errors
/// A refusal that names the first requirement not met.
pub(super) fn require(id: EngineId, p: &AttentionProblem) -> Result<(), Refusal> {
    for step in p.score.iter().flat_map(|chain| &chain.steps) {
        let (name, is_short) = match step {
            ChainStep::Unary { f, .. } => (f.name(), f.in_epilogue()),
            ChainStep::Binary { f, .. } => (f.name(), f.in_epilogue()),
            _ => continue,
        };
        id.require(is_short, Reason::Epilogue, format_args!("{name} in the score function, hundreds of instructions for each score"))?;
    }
    for (name, given) in [("a bias", p.bias.is_some()), ("slopes", p.slopes.is_some())] {
        let rule = format_args!("{name} beside a score function, taken is what one of its steps adds");
        id.require(!given, Reason::Epilogue, rule)?;
    }
    for (name, view) in p.score_operands() {
        id.require(view.dtype != DType::F64, Reason::DType, format_args!("{name} of f64, taken is u8, i32, f16, bf16, f32"))?;
    }
    Ok(())
}

verdigris_kir::parameters! {
    /// An operand of the function.
    pub(super) struct Operand / #[derive(Debug)] OperandArgs of Declared as spec {
        pub(super) start: Read = spec.dtype.bytes() as u32,
        /// Bytes from one batch, head and query to the next.
        pub(super) strides: [u64; 3],
        /// And from one key, or entry of a table, to the next.
        pub(super) key_stride: Option<u64> = (spec.keys == Walk::Strided).then_some(()),
        /// The number of the last entry of a table.
        pub(super) last_entry: Option<f32> = spec.is_table.then_some(()),
    }
}

verdigris_kir::parameters! {
    /// What a kernel is told of the function whose steps it has.
    pub(super) struct Function / #[derive(Debug)] FunctionArgs of Vec<Step<Source>> as steps {
        pub(super) operands: Vec<OperandArgs> = declared(steps),
        pub(super) numbers: Numbers = steps::numbers(steps, false),
    }
}

/// What a kernel knows of an operand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Declared {
    dtype: DType,
    keys: Walk,
    is_table: bool,
}

/// The operands of steps in the order of their numbers.
fn declared(steps: &[Step<Source>]) -> Vec<Declared> {
    let of = |step: &Step<Source>| match *step {
        Step::Load(Source::Tensor { dtype, lies, .. }) => Some(Declared { dtype, keys: lies.keys, is_table: false }),
        Step::Gather(Source::Table { dtype, is_apart, .. }, _) => {
            Some(Declared { dtype, keys: if is_apart { Walk::Strided } else { Walk::Row }, is_table: true })
        }
        _ => None,
    };
    steps.iter().filter_map(of).collect()
}

/// The numbers of the last entries of the operands that are tables, in the order of operands; none of others.
pub(super) fn last_entries(chain: &Chain) -> impl Iterator<Item = Option<u64>> {
    chain.steps.iter().filter(|step| step.view().is_some()).map(|step| match step {
        ChainStep::Gather { extent, .. } => Some(extent.saturating_sub(1)),
        _ => None,
    })
}

/// The numbers of the operands that steps read as tables.
pub(super) fn tables(steps: &[Step<Source>]) -> impl Iterator<Item = u32> {
    steps.iter().filter_map(|step| if let Step::Gather(Source::Table { number, .. }, _) = step { Some(*number) } else { None })
}

/// The step that says the place in the table of this number, if it is one.
pub(super) fn place_of_table(steps: &[Step<Source>], own: u32) -> Option<u32> {
    steps.iter().find_map(|step| match *step {
        Step::Gather(Source::Table { number, .. }, x) if number == own => Some(x),
        _ => None,
    })
}

/// The place in a table that a number says: rounded, and brought into it. Below 2^23 a number is told by the lowest bits of its sum with that.
pub(super) fn place_in_table<'k>(place: Val<'k, f32>, last: Val<'k, f32>) -> Val<'k, u32> {
    const FAR: f32 = 8_388_608.0;
    (place.max(0.0).min(last) + FAR).bitcast::<u32>() - FAR.to_bits()
}

impl FunctionArgs {
    /// Of a problem that has a function.
    pub(super) fn of(p: &AttentionProblem) -> FunctionArgs {
        FunctionArgs::with(p, p.score.as_ref().unwrap_or(&Chain::default()))
    }

    /// Of a problem whose kernels have these steps, the function's and its slope's.
    pub(super) fn with(p: &AttentionProblem, chain: &Chain) -> FunctionArgs {
        let operand = |((_, view), last): ((_, &verdigris_graph::View), Option<u64>)| {
            let bytes = |axis: usize| view.strides[axis] * view.dtype.bytes() as u64;
            let walk = Walk::of(view.strides[3]);
            let is_apart = walk == Walk::Strided || (last.is_some() && walk == Walk::PerRow);
            let last_entry = last.map(|last| last as f32);
            OperandArgs {
                start: element(view, []),
                strides: [bytes(0), bytes(1), bytes(2)],
                key_stride: is_apart.then(|| bytes(3)),
                last_entry,
            }
        };
        let lasts = p.score.iter().flat_map(last_entries);
        FunctionArgs { operands: p.score_operands().zip(lasts).map(operand).collect(), numbers: numbers_of_chain(chain) }
    }
}

/// The function at a head of queries.
pub(super) struct OfHead<'f, 'k> {
    function: &'f Function<'k>,
    steps: &'f [Step<Source>],
    /// The operands there.
    starts: Vec<Pointer<'k>>,
    /// Batch and head.
    places: [Val<'k, u32>; 2],
}

impl<'k> Function<'k> {
    /// At a head of queries.
    #[track_caller]
    pub(super) fn of_head<'f>(&'f self, steps: &'f [Step<Source>], batch: Val<'k, u32>, head: Val<'k, u32>) -> OfHead<'f, 'k> {
        let start = |operand: &Operand<'k>| {
            let [of_batch, of_head, _] = operand.strides;
            operand.start.moved(batch.widen() * of_batch + head.widen() * of_head)
        };
        OfHead { function: self, steps, starts: self.operands.iter().map(start).collect(), places: [batch, head] }
    }
}

/// Where the elements of an operand are read for the scores of a block.
enum Reach<'k> {
    /// Read already: one for each of the two queries.
    Known([AnyVal<'k>; 2]),
    /// From the first key of each of the queries on, so many bytes from one key to the next.
    From([Val<'k, u64>; 2], Option<Val<'k, u64>>),
}

/// For which scores an operand of this number was read: where it is another for each, those of one of the thread's two rows, or of a column.
type ReadFor = (u32, Option<usize>, Option<u32>);

/// What was read of operands for more than one score.
#[derive(Default)]
struct Shared<'k>(RefCell<HashMap<ReadFor, AnyVal<'k>>>);

impl<'k> Shared<'k> {
    /// Read at the first score that asks for it, as a number that steps compute with.
    fn read(&self, k: Kernel<'k>, at: ReadFor, read: impl FnOnce() -> AnyVal<'k>) -> AnyVal<'k> {
        *self.0.borrow_mut().entry(at).or_insert_with(|| AnyVal::of(read().get::<f32>(k)))
    }
}

/// What the steps read at one score.
struct AtScore<'a, 'k> {
    k: Kernel<'k>,
    reaches: &'a [Reach<'k>],
    shared: &'a Shared<'k>,
    column: u32,
    operands: &'a [Operand<'k>],
    places: [Val<'k, f32>; 4],
    half: usize,
    /// Where columns may reach beyond the last key, the key; else the column behind the first.
    key: Result<u32, Val<'k, u32>>,
}

impl<'k> Operands<'k, Source> for AtScore<'_, 'k> {
    fn load(&self, _: usize, from: &Source) -> Vec<AnyVal<'k>> {
        vec![match *from {
            Source::Place(axis) => AnyVal::of(self.places[axis as usize]),
            Source::Table { .. } => unreachable!("tables are read at places"),
            Source::Tensor { number, dtype, lies } => match &self.reaches[number as usize] {
                Reach::Known(values) => values[self.half],
                Reach::From(rows, stride) => {
                    let read = || {
                        let (row, bytes) = (rows[self.half], dtype.bytes() as u32);
                        let at = match (self.key, stride) {
                            (Ok(column), None) => row + u64::from(column * bytes),
                            (Ok(column), Some(stride)) => row + *stride * u64::from(column),
                            (Err(key), None) => row + key.mul_wide(bytes),
                            (Err(key), Some(stride)) => row + key.widen() * *stride,
                        };
                        AnyVal::Stored(dtype, load_raw(self.k, dtype, at, 1)[0])
                    };
                    // Both rows of a thread have the same column.
                    if lies.by_query { read() } else { self.shared.read(self.k, (number, None, Some(self.column)), read) }
                }
            },
        }]
    }

    fn gather(&self, _: usize, from: &Source, place: AnyVal<'k>) -> AnyVal<'k> {
        let Source::Table { number, .. } = *from else { unreachable!("a table is one") };
        let Reach::From(rows, _) = &self.reaches[number as usize] else { unreachable!("a table is read at each score") };
        entry(self.k, &self.operands[number as usize], from, rows[self.half], place)
    }
}

/// Reads an entry of a table whose rows of a query begin at `row`.
fn entry<'k>(k: Kernel<'k>, table: &Operand<'k>, from: &Source, row: Val<'k, u64>, place: AnyVal<'k>) -> AnyVal<'k> {
    let (dtype, last) = (from.dtype(), table.last_entry.expect("a table has a last entry"));
    let place = place_in_table(place.get::<f32>(k), last);
    let at = match table.key_stride {
        None => row + place.mul_wide(dtype.bytes() as u32),
        Some(stride) => row + place.widen() * stride,
    };
    AnyVal::Stored(dtype, load_raw(k, dtype, at, 1)[0])
}

/// What the steps read at a score of a row that is a key.
struct AtKey<'a, 'k> {
    k: Kernel<'k>,
    /// The operands at the head.
    starts: &'a [Pointer<'k>],
    operands: &'a [Operand<'k>],
    shared: &'a Shared<'k>,
    places: [Val<'k, f32>; 4],
    /// Which of the thread's rows the key is, and which column the query.
    half: usize,
    column: u32,
    query: Val<'k, u32>,
    key: Val<'k, u32>,
}

impl<'k> Operands<'k, Source> for AtKey<'_, 'k> {
    fn load(&self, _: usize, from: &Source) -> Vec<AnyVal<'k>> {
        vec![match *from {
            Source::Place(axis) => AnyVal::of(self.places[axis as usize]),
            Source::Table { .. } => unreachable!("tables are read at places"),
            Source::Tensor { number, dtype, lies } => {
                let (start, operand) = (&self.starts[number as usize], &self.operands[number as usize]);
                let [_, _, of_query] = operand.strides;
                let read = || {
                    let row = if lies.by_query { start.moved(self.query.widen() * of_query).address() } else { start.address() };
                    let at = match (lies.keys, operand.key_stride) {
                        (Walk::PerRow, _) => row,
                        (_, None) => row + self.key.mul_wide(dtype.bytes() as u32),
                        (_, Some(stride)) => row + self.key.widen() * stride,
                    };
                    AnyVal::Stored(dtype, load_raw(self.k, dtype, at, 1)[0])
                };
                let (half, column) = (Some(self.half), Some(self.column));
                match (lies.keys, lies.by_query) {
                    (Walk::PerRow, true) => self.shared.read(self.k, (number, None, column), read),
                    (Walk::PerRow, false) => self.shared.read(self.k, (number, None, None), read),
                    (_, false) => self.shared.read(self.k, (number, half, None), read),
                    (_, true) => read(),
                }
            }
        }]
    }

    fn gather(&self, _: usize, from: &Source, place: AnyVal<'k>) -> AnyVal<'k> {
        let Source::Table { number, .. } = *from else { unreachable!("a table is one") };
        let (start, operand) = (&self.starts[number as usize], &self.operands[number as usize]);
        let row = start.moved(self.query.widen() * operand.strides[2]).address();
        entry(self.k, operand, from, row, place)
    }
}

impl<'k> OfHead<'_, 'k> {
    /// Makes scores of products whose rows are keys, in place: the value of step `score` of each, times the factor. `slopes` get the value of the last step.
    #[track_caller]
    pub(super) fn apply_sloped(
        &self,
        k: Kernel<'k>,
        factor: Val<'k, f32>,
        elements: &[Element<'k>],
        at: &KeyRows<'k>,
        (score, slopes): (u32, &[Var<'k, f32>]),
    ) {
        let number = |place: Val<'k, u32>| place.convert::<f32>(CvtRound::Nearest);
        let [batch, head] = self.places.map(number);
        let code = Code { steps: self.steps, numbers: &self.function.numbers, computed: Some(DType::F32), lanes: 1 };
        let shared = Shared::default();
        for (&(element, half, column), slope) in elements.iter().zip(slopes) {
            let (query, key) = ((at.first_query + column).min(at.last_query), at.keys[half as usize]);
            let places = [batch, head, number(query), number(key)];
            let operands = AtKey {
                k,
                starts: &self.starts,
                operands: &self.function.operands,
                shared: &shared,
                places,
                half: half as usize,
                column,
                query,
                key,
            };
            let values = code.run(k, &[AnyVal::of(element * factor)], &operands);
            let of_step = |step: usize| values[step][0].get::<f32>(k);
            let (made, last) = (of_step(score as usize), of_step(values.len() - 1));
            element.set(made);
            slope.set(last);
        }
    }

    /// As [`OfHead::apply_sloped`], of products whose rows are queries.
    #[track_caller]
    pub(super) fn apply_sloped_by_queries(
        &self,
        k: Kernel<'k>,
        factor: Val<'k, f32>,
        elements: &[Element<'k>],
        at: &QueryRows<'k>,
        (score, slopes): (u32, &[Var<'k, f32>]),
    ) {
        self.for_each_score(k, factor, elements, at, |n, element, values| {
            let of_step = |step: usize| values[step][0].get::<f32>(k);
            let (made, last) = (of_step(score as usize), of_step(values.len() - 1));
            element.set(made);
            slopes[n].set(last);
        });
    }

    /// Makes scores of products, in place: the function of each, times the factor.
    #[track_caller]
    pub(super) fn apply(&self, k: Kernel<'k>, factor: Val<'k, f32>, elements: &[Element<'k>], at: &QueryRows<'k>) {
        self.for_each_score(k, factor, elements, at, |_, score, values| score.set(values[values.len() - 1][0].get::<f32>(k)));
    }

    /// Runs the steps for each score, whose product is times the factor; `body` is given its number, and the values of the steps.
    #[track_caller]
    pub(super) fn for_each_score(
        &self,
        k: Kernel<'k>,
        factor: Val<'k, f32>,
        elements: &[Element<'k>],
        at: &QueryRows<'k>,
        body: impl Fn(usize, Var<'k, f32>, &[Vec<AnyVal<'k>>]),
    ) {
        let number = |place: Val<'k, u32>| place.convert::<f32>(CvtRound::Nearest);
        let [batch, head] = self.places.map(number);
        let queries = at.queries.map(number);
        let first_key = number(at.first_key);
        let all = self.starts.iter().zip(&self.function.operands).zip(declared(self.steps));
        let reach = |((start, operand), spec): ((&Pointer<'k>, &Operand<'k>), Declared)| {
            let Declared { dtype, keys, is_table } = spec;
            let [_, _, of_query] = operand.strides;
            let rows = at.queries.map(|query| start.moved(query.widen() * of_query).address());
            match (keys, at.last_key) {
                _ if is_table => Reach::From(rows, operand.key_stride),
                (Walk::PerRow, _) => Reach::Known(rows.map(|row| AnyVal::Stored(dtype, load_raw(k, dtype, row, 1)[0]))),
                (_, Some(_)) => Reach::From(rows, operand.key_stride),
                (Walk::Row, None) => Reach::From(rows.map(|row| row + at.first_key.mul_wide(dtype.bytes() as u32)), None),
                (Walk::Strided, None) => Reach::From(
                    rows.map(|row| operand.key_stride.map_or(row, |stride| row + at.first_key.widen() * stride)),
                    operand.key_stride,
                ),
            }
        };
        let reaches: Vec<Reach<'k>> = all.map(reach).collect();
        let shared = Shared::default();
        let code = Code { steps: self.steps, numbers: &self.function.numbers, computed: Some(DType::F32), lanes: 1 };
        for (n, &(score, half, column)) in elements.iter().enumerate() {
            let half = half as usize;
            let places = [batch, head, queries[half], first_key + column as f32];
            let key = at.last_key.map_or(Ok(column), |last| Err((at.first_key + column).min(last)));
            let operands = AtScore { k, reaches: &reaches, shared: &shared, column, operands: &self.function.operands, places, half, key };
            body(n, score, &code.run(k, &[AnyVal::of(score * factor)], &operands));
        }
    }
}
