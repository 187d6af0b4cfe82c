//! `softmax.rows`: softmax, cross-entropy and their gradients ([`verdigris_graph::SoftmaxProblem`] has the formulas).
//!
//! It takes all of them: any element types, any strides, any number of rows, rows of fewer than 2^31 elements.
//!
//! **Method.** A warp takes a row of up to 1024 elements, a CTA a longer one; up to 4096 elements are read once and kept in registers, longer rows
//! are read again for each step (maximum, sum, result), from L2 where they fit. Where rows lie side by side and not their elements, as the
//! classes of a channels-first tensor do, each thread takes a row, and neighbouring threads read neighbours. Losses of all rows are added up by
//! one CTA, always in the same order.
//!
//! **When it wins.** There is no other engine for these.
//!
//! **Numbers.** In f32 (f64 where an operand is f64); the maximum is taken off before exponentials, of which those below the normal numbers of f32
//! (2⁻¹²⁶) become 0. Results repeat bit for bit.

use serde::{Deserialize, Serialize};
use verdigris_graph::{LossReduction, Problem, RowFunction, SoftmaxProblem};
use verdigris_kir::face::{Header, Kernel, SharedPiece, Val, Var, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::{Read, ReadWrite, Write};
use verdigris_kir::program::{Address, KernelRef, Launch, Program, Step};
use verdigris_tensor::DType;

use crate::algorithm::{Algorithm, Listed};
use crate::arch::Arch;
use crate::cost::{Stream, Traffic, Work};
use crate::engine::{Engine, EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::compute::{self, Compute};
use crate::fuse::operand::{OperandArgs, OperandDecl};
use crate::fuse::strided::{self, Strided};
use crate::fuse::value::{AnyVal, store_raw};
use crate::fuse::{lanes, math};
use crate::layout::space::{Extents, Region, element};

/// The engines of this family.
pub static ENGINES: &[&dyn Engine] = &[&Listed::<Rows>::new()];

const THREADS: u32 = 256;
const WARPS: u32 = THREADS / 32;

/// An accepted problem.
#[derive(Clone, Debug)]
struct Rows {
    problem: SoftmaxProblem,
    spec: Spec,
}

impl Algorithm for Rows {
    const ID: EngineId = EngineId { name: "softmax.rows", number: 500 };
    const VERSION: u32 = 1;
    type Config = ();

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Softmax(problem) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is softmax", problem.kind())));
        };
        let extent = problem.extent;
        Self::ID.require(extent < 1 << 31, Reason::Extent, format_args!("rows of {extent} elements, taken below 2^31"))?;
        let rank = problem.rows.len();
        Self::ID.require(rank < verdigris_tensor::MAX_RANK, Reason::Extent, format_args!("{rank} dims of rows, taken are 7"))?;
        let spec = Spec::of(problem);
        let target = spec.target();
        Self::ID.require(arch.runs(target), Reason::Target, format_args!("element types that need {}", target.ptx()))?;
        Ok(Rows { problem: problem.clone(), spec })
    }

    fn configs(&self) -> Vec<()> {
        vec![()]
    }

    fn knobs((): &()) -> Knobs {
        Knobs::default()
    }

    fn notes(&self, (): &()) -> Notes {
        Notes::of(self.problem.compute)
    }

    fn work(&self, (): &()) -> Work {
        let elements = self.problem.row_count() as f64 * self.problem.extent as f64;
        let reads = if self.spec.held == 0 { 2.0 } else { 1.0 };
        let bytes: f64 = (self.problem.operands().into_iter())
            .filter(|(_, view, _)| view.strides.last().is_some_and(|&stride| stride > 0))
            .map(|(_, view, written)| elements * view.dtype.bytes() as f64 * if written { 1.0 } else { reads })
            .sum();
        let joined = matches!(self.spec.kind, Kind::CrossEntropy { kept: true, .. } | Kind::CrossEntropyBackward { counted: true, .. });
        Work::default().beside([Stream::new(Traffic::Lines, bytes).in_launches(if joined { 2.0 } else { 1.0 })])
    }

    fn lower(&self, (): &()) -> Result<Program, Refusal> {
        let (p, spec) = (&self.problem, &self.spec);
        let mut program = Program { buffer_alignment_bytes: vec![1; p.slots().len()], ..Program::default() };
        if p.is_empty() {
            return Ok(program);
        }
        let bytes = p.compute.bytes() as u64;
        let kept = matches!(spec.kind, Kind::CrossEntropy { kept: true, .. });
        let counted = matches!(spec.kind, Kind::CrossEntropyBackward { counted: true, .. });
        let loss = match &p.function {
            RowFunction::CrossEntropy { loss_spec, .. } | RowFunction::CrossEntropyBackward { loss_spec, .. } => Some(loss_spec),
            _ => None,
        };
        let ignore_index = loss.and_then(|loss| loss.ignore_index).unwrap_or(0);
        let mean = loss.is_some_and(|loss| loss.reduction == LossReduction::Mean);
        let sums = kept.then(|| ["losses", "weights"].map(|name| program.add_scratch(name, p.row_count() * bytes)));
        let count = counted.then(|| program.add_scratch("count", 8));
        let regions = Region::all(&p.rows, 1);
        if let (Some(count), RowFunction::CrossEntropyBackward { labels, .. }) = (count, &p.function) {
            program.steps.push(Step::Fill { at: count, bytes: 8, value: 0 });
            let counting = Spec { types: vec![labels.dtype], rank: spec.rank, ..Spec::plain(Kind::Count, THREADS, 0) };
            for region in &regions {
                let args = CountArgs {
                    rows: region.points(1),
                    ignore_index,
                    extents: region.extents.clone(),
                    labels: strided::argument(labels, &region.first),
                    count,
                };
                program.launch(Launch::new(counting.clone().kernel(), [1; 3], args.bound(&counting)));
            }
        }
        let mut done = 0u64;
        for region in &regions {
            let rows = region.points(1);
            let loss = loss.map(|loss| LossArgs {
                smoothing: loss.smoothing.0,
                classes: p.extent as f64,
                ignore_index,
                sums: sums.map(|sums| sums.map(|sum| Address { offset_bytes: done * bytes, ..sum })),
                counted: count,
                count: spec.counts_all().then(|| if mean { p.row_count() as f64 } else { 1.0 }),
            });
            let operands = p.operands().into_iter().filter(|(name, ..)| !(kept && *name == "loss"));
            let args = OfRowsArgs {
                rows,
                extent: p.extent as u32,
                extents: region.extents.clone(),
                operands: operands.map(|(_, view, _)| strided::argument(view, &region.first)).collect(),
                loss,
            };
            let ctas = rows.div_ceil(THREADS / spec.team);
            program.launch(Launch::new(spec.clone().kernel(), [ctas, 1, 1], args.bound(spec)));
            done += u64::from(rows);
        }
        if let (Some([losses, weights]), RowFunction::CrossEntropy { loss, .. }) = (sums, &p.function) {
            let plain = Spec::plain(Kind::Join { mean }, THREADS, 0);
            let join = Spec { double: spec.double, types: vec![loss.dtype], rank: 0, ..plain };
            let args = JoinArgs { rows: p.row_count(), losses, weights: mean.then_some(weights), loss: element(loss, []) };
            program.launch(Launch::new(join.clone().kernel(), [1; 3], args.bound(&join)));
        }
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let mut specs = Vec::new();
        let forms = [(32, 1), (32, 2), (32, 4), (32, 8), (32, 16), (32, 32), (THREADS, 8), (THREADS, 16), (THREADS, 0), (1, 0)];
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            for (team, held) in forms {
                for kind in [Kind::Softmax, Kind::LogSoftmax] {
                    specs.push(Spec { types: vec![dtype; 2], ..Spec::plain(kind, team, held) });
                }
                for kind in [Kind::SoftmaxBackward, Kind::LogSoftmaxBackward] {
                    specs.push(Spec { types: vec![dtype; 3], ..Spec::plain(kind, team, held) });
                }
            }
        }
        specs.into_iter().filter(|spec| spec.target() <= target).map(Spec::kernel).collect()
    }
}

/// What is computed, as far as it shapes code.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Softmax,
    LogSoftmax,
    SoftmaxBackward,
    LogSoftmaxBackward,
    /// Row losses; `lse`: the log-sum-exp is stored too; `kept`: losses and weights go to scratch to be added up.
    CrossEntropy {
        smooth: bool,
        ignore: bool,
        lse: bool,
        kept: bool,
    },
    /// `lse`: the log-sum-exp is read; `counted`: the number of rows is read from scratch.
    CrossEntropyBackward {
        ignore: bool,
        lse: bool,
        counted: bool,
    },
    /// The number of rows that are not ignored.
    Count,
    /// Losses added up, and divided by the weights' sum for a mean.
    Join {
        mean: bool,
    },
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct Spec {
    kind: Kind,
    double: bool,
    /// Element types of the operands, in the order of slots.
    types: Vec<DType>,
    /// Threads of a row: 1, 32 or 256.
    team: u32,
    /// Elements of a row that each thread holds; 0 reads them again at each step.
    held: u32,
    /// Dims of the rows.
    rank: usize,
}

impl Spec {
    fn of(p: &SoftmaxProblem) -> Spec {
        let rank = p.rows.len();
        let double = p.compute == DType::F64;
        let kind = match &p.function {
            RowFunction::Softmax { log: false, .. } => Kind::Softmax,
            RowFunction::Softmax { log: true, .. } => Kind::LogSoftmax,
            RowFunction::SoftmaxBackward { log: false, .. } => Kind::SoftmaxBackward,
            RowFunction::SoftmaxBackward { log: true, .. } => Kind::LogSoftmaxBackward,
            RowFunction::CrossEntropy { loss_spec, lse, .. } => Kind::CrossEntropy {
                smooth: loss_spec.smoothing.0 > 0.0,
                ignore: loss_spec.ignore_index.is_some(),
                lse: lse.is_some(),
                kept: loss_spec.reduction != LossReduction::None,
            },
            RowFunction::CrossEntropyBackward { loss_spec, lse, .. } => {
                let ignore = loss_spec.ignore_index.is_some();
                Kind::CrossEntropyBackward { ignore, lse: lse.is_some(), counted: ignore && loss_spec.reduction == LossReduction::Mean }
            }
        };
        let kept = matches!(kind, Kind::CrossEntropy { kept: true, .. });
        let types = p.operands().into_iter().filter(|(name, ..)| !(kept && *name == "loss")).map(|(_, view, _)| view.dtype).collect();
        // The operand whose strides tell how rows lie.
        let strides = match &p.function {
            RowFunction::Softmax { x: main, .. }
            | RowFunction::SoftmaxBackward { y: main, .. }
            | RowFunction::CrossEntropy { logits: main, .. }
            | RowFunction::CrossEntropyBackward { logits: main, .. } => &main.strides,
        };
        let beside = rank > 0 && strides[rank - 1] < strides[rank] && p.rows[rank - 1] >= 8;
        let (team, held) = match (beside, p.extent.max(1)) {
            (true, _) => (1, 0),
            (false, extent @ ..=1024) => (32, (extent.div_ceil(32) as u32).next_power_of_two()),
            (false, ..=2048) => (THREADS, 8),
            (false, ..=4096) => (THREADS, 16),
            (false, _) => (THREADS, 0),
        };
        // Two rows of f64 take four registers an element.
        let held = if double && held > 16 { 0 } else { held };
        Spec { kind, double, types, team, held, rank }
    }

    fn plain(kind: Kind, team: u32, held: u32) -> Spec {
        Spec { kind, double: false, types: Vec::new(), team, held, rank: 1 }
    }

    fn name(&self) -> String {
        let flag = |set: bool, word: &str| if set { format!("_{word}") } else { String::new() };
        let kind = match self.kind {
            Kind::Softmax => "forward".to_owned(),
            Kind::LogSoftmax => "log_forward".to_owned(),
            Kind::SoftmaxBackward => "backward".to_owned(),
            Kind::LogSoftmaxBackward => "log_backward".to_owned(),
            Kind::CrossEntropy { smooth, ignore, lse, kept } => {
                format!("loss{}{}{}{}", flag(smooth, "smooth"), flag(ignore, "ignore"), flag(lse, "lse"), flag(kept, "kept"))
            }
            Kind::CrossEntropyBackward { ignore, lse, counted } => {
                format!("loss_backward{}{}{}", flag(ignore, "ignore"), flag(lse, "lse"), flag(counted, "counted"))
            }
            Kind::Count => "count".to_owned(),
            Kind::Join { mean } => format!("join{}", flag(mean, "mean")),
        };
        let types: Vec<&str> = self.types.iter().map(|dtype| dtype.name()).collect();
        let double = flag(self.double, "f64");
        format!("softmax_{kind}{double}_team{}x{}_d{}_{}", self.team, self.held, self.rank, types.join("_"))
    }

    fn target(&self) -> Target {
        compute::target_of_all(self.types.iter().copied())
    }

    /// Bytes of what is computed in.
    fn bytes(&self) -> u32 {
        if self.double { 8 } else { 4 }
    }

    fn operands(&self) -> Vec<OperandDecl> {
        let outputs = match self.kind {
            Kind::CrossEntropy { lse, kept, .. } => usize::from(lse) + usize::from(!kept),
            _ => 1,
        };
        strided::declarations(&self.types, self.rank + 1, outputs)
    }

    fn has_loss(&self) -> bool {
        matches!(self.kind, Kind::CrossEntropy { .. } | Kind::CrossEntropyBackward { .. })
    }

    /// The number of rows that a loss was divided by is an argument.
    fn counts_all(&self) -> bool {
        matches!(self.kind, Kind::CrossEntropyBackward { counted: false, .. })
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas: 1, cluster: 1 };
        build(header, |k| if self.double { self.body::<f64>(k) } else { self.body::<f32>(k) })
    }

    fn body<'k, T: Compute>(&self, k: Kernel<'k>) {
        match self.kind {
            Kind::Count => self.count(k),
            Kind::Join { .. } => self.join::<T>(k),
            _ => self.rows::<T>(k),
        }
    }

    /// One CTA goes through all labels.
    fn count(&self, k: Kernel<'_>) {
        let Count { rows, ignore_index, extents, labels, count } = Count::declare(k, self);
        let labels = Strided::new(self.types[0], labels);
        let sum = k.var(0.0f64);
        k.range_step(k.thread(), rows, THREADS, |row| {
            let label = labels.load_integer(&extents.index(row));
            sum.set(sum + k.select(label.eq(ignore_index), 0.0f64, 1.0f64));
        });
        let scratch = k.shared("warps", lanes::scratch_bytes(WARPS, 8), 16);
        let whole = lanes::over_cta(k, scratch, WARPS, sum.get(), &|x, y| x + y);
        // Launches for the parts of a giant add to what stands there.
        k.when(k.thread().eq(0), || {
            let before = k.ld_global::<f64>(count.address(), 0);
            k.st_global(count.address(), 0, before + whole);
        });
    }

    /// One CTA adds up all row losses.
    fn join<'k, T: Compute>(&self, k: Kernel<'k>) {
        let Join { rows, losses, weights, loss } = Join::declare(k, self);
        let bytes = T::TY.bytes();
        let zero = T::constant(k, 0.0);
        let (sum, weight) = (k.var(zero), k.var(zero));
        let row = k.var(k.thread().widen());
        k.while_(
            || row.lt(rows),
            || {
                let at = row.get() * u64::from(bytes);
                sum.set(sum + k.ld_global::<T>(losses.address() + at, 0));
                if let Some(weights) = weights {
                    weight.set(weight + k.ld_global::<T>(weights.address() + at, 0));
                }
                row.set(row + u64::from(THREADS));
            },
        );
        let scratch = k.shared("warps", lanes::scratch_bytes(WARPS, bytes), 16);
        let add = |x: Val<'k, T>, y: Val<'k, T>| x + y;
        let total = lanes::over_cta(k, scratch, WARPS, sum.get(), &add);
        let total = if weights.is_some() { T::quotient(total, lanes::over_cta(k, scratch, WARPS, weight.get(), &add)) } else { total };
        k.when(k.thread().eq(0), || store_raw(k, loss.address(), &[AnyVal::of(total).encoded(k, self.types[0])]));
    }

    fn rows<'k, T: Compute>(&self, k: Kernel<'k>) {
        let OfRows { rows, extent, extents, operands, loss } = OfRows::declare(k, self);
        let operands = Strided::all(&self.types, operands);
        let number = |value: f64| T::constant(k, value);
        let (team, member, row) = match self.team {
            1 => (1, k.constant(0u32), k.cta() * THREADS + k.thread()),
            team => (team, k.thread() & (team - 1), k.cta() * (THREADS / team) + (k.thread() >> team.ilog2())),
        };
        // All threads stay together; those without a row take the last one and write nothing.
        let inside = row.lt(rows);
        let row = row.min(rows - 1);
        let index = extents.index(row);
        let scratch = lanes::team_scratch::<T>(k, team);
        let share = Share { k, extent, member, team, held: self.held, scratch };
        match (self.kind, operands.as_slice()) {
            (Kind::Softmax | Kind::LogSoftmax, [x, y]) => {
                let x = share.hold::<T>(x, &index);
                let (peak, sum) = share.peak_and_sum(&x);
                let to = y.at(&index);
                let scale = T::quotient(number(1.0), sum);
                let below = math::log(sum);
                share.each(|at, slot| {
                    let shifted = x.value(at, slot) - peak;
                    let value = if self.kind == Kind::LogSoftmax { shifted - below } else { T::exp(shifted) * scale };
                    k.when(inside, || to.store(&[at], AnyVal::of(value)));
                });
            }
            (Kind::SoftmaxBackward | Kind::LogSoftmaxBackward, [y, dy, dx]) => {
                let (y, dy) = (share.hold::<T>(y, &index), share.hold::<T>(dy, &index));
                let log = self.kind == Kind::LogSoftmaxBackward;
                let sum = share.sum(|at, slot| {
                    let dy = dy.value(at, slot);
                    if log { dy } else { dy * y.value(at, slot) }
                });
                let to = dx.at(&index);
                share.each(|at, slot| {
                    let (y, dy) = (y.value(at, slot), dy.value(at, slot));
                    let value = if log { k.fma(T::exp(y), -sum, dy) } else { y * (dy - sum) };
                    k.when(inside, || to.store(&[at], AnyVal::of(value)));
                });
            }
            (Kind::CrossEntropy { smooth, ignore, kept, .. }, [logits, labels, results @ ..]) => {
                let Some(LossValues { smoothing, classes, ignore_index, sums, .. }) = loss else { return };
                let (loss, lse) = if kept { (None, results.first()) } else { (results.first(), results.get(1)) };
                let (spread, classes) = (T::from_f64(smoothing), T::from_f64(classes));
                let x = share.hold::<T>(logits, &index);
                let (peak, sum) = share.peak_and_sum(&x);
                let whole = peak + math::log(sum);
                let all = if smooth { share.sum(|at, slot| x.value(at, slot)) } else { number(0.0) };
                k.when(inside & member.eq(0), || {
                    let label = labels.load_integer(&index);
                    let known = label.ge(0i64) & label.lt(extent.widen().bitcast::<i64>());
                    let target = k.var(number(f64::NAN));
                    k.when(known, || target.set(x.load(label.unsigned().low32())));
                    let kept_part = number(1.0) - spread;
                    let mut value = whole - kept_part * target.get();
                    if smooth {
                        value = value - T::quotient(spread, classes) * all;
                    }
                    let mut weight = number(1.0);
                    if ignore {
                        let skipped = label.eq(ignore_index);
                        value = k.select(skipped, number(0.0), value);
                        weight = k.select(skipped, number(0.0), weight);
                    }
                    if let Some(loss) = loss {
                        loss.store(&index, AnyVal::of(value));
                    }
                    if let Some(lse) = lse {
                        lse.store(&index, AnyVal::of(whole));
                    }
                    if let Some([losses, weights]) = sums {
                        k.st_global(losses.at(row, T::TY.bytes()), 0, value);
                        k.st_global(weights.at(row, T::TY.bytes()), 0, weight);
                    }
                });
            }
            (Kind::CrossEntropyBackward { ignore, .. }, [logits, labels, dloss, lse @ .., dlogits]) => {
                let Some(LossValues { smoothing, classes, ignore_index, counted, count, .. }) = loss else { return };
                let (spread, classes) = (T::from_f64(smoothing), T::from_f64(classes));
                let count = match (counted, count) {
                    (Some(from), _) => k.ld_global::<f64>(from.address(), 0),
                    (None, count) => count.expect("a number that is not counted is given"),
                };
                let count = T::from_f64(count);
                let x = share.hold::<T>(logits, &index);
                let whole = match lse.first() {
                    Some(lse) => lse.load::<T>(&index),
                    None => {
                        let (peak, sum) = share.peak_and_sum(&x);
                        peak + math::log(sum)
                    }
                };
                let label = labels.load_integer(&index);
                let known = label.ge(0i64) & label.lt(extent.widen().bitcast::<i64>());
                let gradient = T::quotient(dloss.load::<T>(&index), count);
                let gradient = k.select(known, gradient, number(f64::NAN));
                let each_class = T::quotient(spread, classes);
                let to = dlogits.at(&index);
                let target = label.unsigned().low32();
                share.each(|at, slot| {
                    let hit = k.select(at.eq(target), number(1.0) - spread, number(0.0));
                    let mut value = gradient * (T::exp(x.value(at, slot) - whole) - hit - each_class);
                    if ignore {
                        value = k.select(label.eq(ignore_index), number(0.0), value);
                    }
                    k.when(inside, || to.store(&[at], AnyVal::of(value)));
                });
            }
            (kind, operands) => unreachable!("{kind:?} of {} operands", operands.len()),
        }
    }
}

verdigris_kir::parameters! {
    /// Of the kernel that counts rows.
    struct Count / CountArgs of Spec as spec {
        rows: u32,
        ignore_index: i64,
        extents: Extents = spec.rank,
        labels: OperandArgs = strided::declaration(spec.types[0], spec.rank + 1, false),
        /// Launches for the parts of a giant add to what stands there.
        count: ReadWrite = 8,
    }
}

verdigris_kir::parameters! {
    /// Of the kernel that adds up losses.
    struct Join / JoinArgs of Spec as spec {
        rows: u64,
        losses: Read = spec.bytes(),
        weights: Option<Read> = (spec.kind == Kind::Join { mean: true }).then(|| spec.bytes()),
        loss: Write = spec.types[0].bytes() as u32,
    }
}

verdigris_kir::parameters! {
    /// Of the kernels that go through rows.
    struct OfRows / OfRowsArgs of Spec as spec {
        rows: u32,
        extent: u32,
        extents: Extents = spec.rank,
        operands: Vec<OperandArgs> = spec.operands(),
        loss: Option<LossArgs> = spec.has_loss().then(|| spec.clone()),
    }
}

verdigris_kir::parameters! {
    /// Of a loss and its gradient.
    struct LossValues / LossArgs of Spec as spec {
        smoothing: f64,
        classes: f64,
        ignore_index: i64,
        /// Where losses and weights of the rows go to be added up.
        sums: Option<[Write; 2]> = matches!(spec.kind, Kind::CrossEntropy { kept: true, .. }).then(|| spec.bytes()),
        /// The number of rows that are not ignored, or of all.
        counted: Option<Read> = matches!(spec.kind, Kind::CrossEntropyBackward { counted: true, .. }).then_some(8),
        count: Option<f64> = spec.counts_all().then_some(()),
    }
}

/// A row that is read: from registers if it is held.
#[derive(Clone, Debug)]
struct Held<'k, T> {
    row: Strided<'k>,
    values: Vec<Var<'k, T>>,
}

impl<'k, T: Compute> Held<'k, T> {
    fn value(&self, position: Val<'k, u32>, slot: Option<usize>) -> Val<'k, T> {
        match slot {
            Some(slot) => self.values[slot].get(),
            None => self.load(position),
        }
    }

    fn load(&self, position: Val<'k, u32>) -> Val<'k, T> {
        self.row.load(&[position])
    }
}

/// A thread's share of a row.
#[derive(Clone, Copy, Debug)]
struct Share<'k> {
    k: Kernel<'k>,
    extent: Val<'k, u32>,
    member: Val<'k, u32>,
    team: u32,
    held: u32,
    scratch: Option<SharedPiece<'k>>,
}

impl<'k> Share<'k> {
    /// Runs `f` for each element: its position, and where it is held.
    fn each(&self, f: impl Fn(Val<'k, u32>, Option<usize>)) {
        if self.held == 0 {
            self.k.range_step(self.member, self.extent, self.team, |at| f(at, None));
            return;
        }
        for slot in 0..self.held {
            let at = self.member + slot * self.team;
            self.k.when(at.lt(self.extent), || f(at, Some(slot as usize)));
        }
    }

    fn hold<T: Compute>(&self, operand: &Strided<'k>, index: &[Val<'k, u32>]) -> Held<'k, T> {
        let zero = T::constant(self.k, 0.0);
        let held = Held { row: operand.at(index), values: (0..self.held).map(|_| self.k.var(zero)).collect() };
        if self.held > 0 {
            self.each(|at, slot| {
                if let Some(slot) = slot {
                    held.values[slot].set(held.load(at));
                }
            });
        }
        held
    }

    fn sum<T: Compute>(&self, value: impl Fn(Val<'k, u32>, Option<usize>) -> Val<'k, T>) -> Val<'k, T> {
        let sum = self.k.var(T::constant(self.k, 0.0));
        self.each(|at, slot| sum.set(sum + value(at, slot)));
        lanes::over_team(self.k, self.team, self.scratch, sum.get(), &|x, y| x + y)
    }

    /// `M` and `S`. A row of −∞ alone has `M` = −∞ and NaN for `S`.
    fn peak_and_sum<T: Compute>(&self, x: &Held<'k, T>) -> (Val<'k, T>, Val<'k, T>) {
        let peak = self.k.var(T::constant(self.k, f64::NEG_INFINITY));
        self.each(|at, slot| peak.set(T::max_nan(peak.get(), x.value(at, slot))));
        let peak = lanes::over_team(self.k, self.team, self.scratch, peak.get(), &|x, y| T::max_nan(x, y));
        (peak, self.sum(|at, slot| T::exp(x.value(at, slot) - peak)))
    }
}
