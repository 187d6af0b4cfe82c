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
use verdigris_graph::{Loss, LossReduction, Problem, RowFunction, SoftmaxProblem, View};
use verdigris_kir::face::{Divisor, Header, Kernel, Pointer, SharedPiece, Val, Var, build};
use verdigris_kir::ir::{KernelBody, Target, Ty};
use verdigris_kir::program::{Address, Arg, Base, KernelRef, Launch, Program, Residency, Step};
use verdigris_tensor::DType;

use crate::arch::Arch;
use crate::engine::{Candidate, Cost, Engine, EngineId, KnobSpace, Knobs, Notes, Reason, Refusal};
use crate::parts::compute;
use crate::parts::space::Region;
use crate::parts::steps::{AnyVal, Chained, Raw, load_raw, store_raw};
use crate::parts::{lanes, math};

const ID: EngineId = EngineId { name: "softmax.rows", number: 500 };

/// The engines of this family.
pub static ENGINES: &[&dyn Engine] = &[&Rows];

const THREADS: u32 = 256;
const WARPS: u32 = THREADS / 32;

/// The engine.
#[derive(Clone, Copy, Debug)]
struct Rows;

impl Engine for Rows {
    fn id(&self) -> EngineId {
        ID
    }

    fn accept(&self, problem: &Problem, arch: &Arch) -> Result<Box<dyn Candidate>, Refusal> {
        let Problem::Softmax(problem) = problem else {
            return Err(ID.refusal(Reason::Problem, format_args!("{}, taken is softmax", problem.kind())));
        };
        let extent = problem.extent;
        ID.require(extent < 1 << 31, Reason::Extent, format_args!("rows of {extent} elements, taken below 2^31"))?;
        let rank = problem.rows.len();
        ID.require(rank < verdigris_tensor::MAX_RANK, Reason::Extent, format_args!("{rank} dims of rows, taken are 7"))?;
        let accepted = Accepted { problem: problem.clone(), arch: arch.clone() };
        let target = accepted.spec().target();
        ID.require(arch.runs(target), Reason::Target, format_args!("element types that need {}", target.ptx()))?;
        Ok(Box::new(accepted))
    }

    fn catalog(&self, target: Target) -> Vec<KernelRef> {
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
        self.types.iter().map(|&dtype| compute::target_of(dtype)).max().unwrap_or(Target::Sm80)
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas: 1, cluster: 1 };
        build(header, |k| if self.double { self.body::<f64>(k) } else { self.body::<f32>(k) })
    }

    fn body<'k, T: Chained>(&self, k: Kernel<'k>) {
        match self.kind {
            Kind::Count => self.count::<T>(k),
            Kind::Join { mean } => self.join::<T>(k, mean),
            _ => self.rows::<T>(k),
        }
    }

    /// One CTA goes through all labels.
    fn count<'k, T: Chained>(&self, k: Kernel<'k>) {
        let rows = k.scalar::<u32>("rows");
        let ignored = k.scalar::<i64>("ignore_index");
        let divisors: Vec<Divisor<'k>> = (1..self.rank).map(|_| k.divisor("extent")).collect();
        let labels = Operand::declare(k, self.types[0], self.rank, false);
        let to = k.in_out("count", 8);
        let sum = k.var(0.0f64);
        k.range_step(k.thread(), rows, THREADS, |row| {
            let label = labels.label(k, &split(row, &divisors, self.rank));
            sum.set(sum + k.select(label.eq(ignored), 0.0f64, 1.0f64));
        });
        let scratch = k.shared("warps", lanes::scratch_bytes(WARPS, 8), 16);
        let whole = lanes::over_cta(k, scratch, WARPS, sum.get(), &|x, y| x + y);
        // Launches for the parts of a giant add to what stands there.
        k.when(k.thread().eq(0), || {
            let before = k.ld_global::<f64>(to.address(), 0);
            k.st_global(to.address(), 0, before + whole);
        });
    }

    /// One CTA adds up all row losses.
    fn join<'k, T: Chained>(&self, k: Kernel<'k>, mean: bool) {
        let rows = k.scalar::<u64>("rows");
        let bytes = T::TY.bytes();
        let from = k.input("losses", bytes);
        let weights = mean.then(|| k.input("weights", bytes));
        let to = k.output("loss", self.types[0].bytes() as u32);
        let zero = T::constant(k, 0.0);
        let (sum, weight) = (k.var(zero), k.var(zero));
        let row = k.var(k.thread().widen());
        k.while_(
            || row.lt(rows),
            || {
                let at = row.get() * u64::from(bytes);
                sum.set(sum + k.ld_global::<T>(from.address() + at, 0));
                if let Some(weights) = weights {
                    weight.set(weight + k.ld_global::<T>(weights.address() + at, 0));
                }
                row.set(row + u64::from(THREADS));
            },
        );
        let scratch = k.shared("warps", lanes::scratch_bytes(WARPS, bytes), 16);
        let add = |x: Val<'k, T>, y: Val<'k, T>| x + y;
        let total = lanes::over_cta(k, scratch, WARPS, sum.get(), &add);
        let total = if mean { T::quotient(total, lanes::over_cta(k, scratch, WARPS, weight.get(), &add)) } else { total };
        k.when(k.thread().eq(0), || store_raw(k, to.address(), &[T::wrap(total).encoded(k, self.types[0])]));
    }

    fn rows<'k, T: Chained>(&self, k: Kernel<'k>) {
        let rows = k.scalar::<u32>("rows");
        let extent = k.scalar::<u32>("extent");
        let divisors: Vec<Divisor<'k>> = (1..self.rank).map(|_| k.divisor("extent")).collect();
        let number = |value: f64| T::constant(k, value);
        let (team, member, row) = match self.team {
            1 => (1, k.constant(0u32), k.cta() * THREADS + k.thread()),
            team => (team, k.thread() & (team - 1), k.cta() * (THREADS / team) + (k.thread() >> team.ilog2())),
        };
        // All threads stay together; those without a row take the last one and write nothing.
        let inside = row.lt(rows);
        let row = row.min(rows - 1);
        let index = split(row, &divisors, self.rank);
        let scratch = (team == THREADS).then(|| k.shared("warps", lanes::scratch_bytes(WARPS, T::TY.bytes()), 16));
        let share = Share { k, extent, member, team, held: self.held, scratch };
        let mut types = self.types.iter().copied();
        let mut operand = |written: bool| Operand::declare(k, types.next().unwrap_or(DType::F32), self.rank, written);
        match self.kind {
            Kind::Softmax | Kind::LogSoftmax => {
                let (x, y) = (operand(false), operand(true));
                let x = share.hold::<T>(&x, &index);
                let (peak, sum) = share.peak_and_sum(&x);
                let to = y.row(&index);
                let scale = T::quotient(number(1.0), sum);
                let below = math::log(sum);
                share.each(|at, slot| {
                    let shifted = x.value(at, slot) - peak;
                    let value = if self.kind == Kind::LogSoftmax { shifted - below } else { T::exp(shifted) * scale };
                    k.when(inside, || to.store(at, T::wrap(value)));
                });
            }
            Kind::SoftmaxBackward | Kind::LogSoftmaxBackward => {
                let (y, dy, dx) = (operand(false), operand(false), operand(true));
                let (y, dy) = (share.hold::<T>(&y, &index), share.hold::<T>(&dy, &index));
                let log = self.kind == Kind::LogSoftmaxBackward;
                let sum = share.sum(|at, slot| {
                    let dy = dy.value(at, slot);
                    if log { dy } else { dy * y.value(at, slot) }
                });
                let to = dx.row(&index);
                share.each(|at, slot| {
                    let (y, dy) = (y.value(at, slot), dy.value(at, slot));
                    let value = if log { k.fma(T::exp(y), -sum, dy) } else { y * (dy - sum) };
                    k.when(inside, || to.store(at, T::wrap(value)));
                });
            }
            Kind::CrossEntropy { smooth, ignore, lse, kept } => {
                let (logits, labels) = (operand(false), operand(false));
                let loss = (!kept).then(|| operand(true));
                let lse = lse.then(|| operand(true));
                let spread = T::from_f64(k.scalar::<f64>("smoothing"));
                let classes = T::from_f64(k.scalar::<f64>("classes"));
                let ignored = k.scalar::<i64>("ignore_index");
                let parts = kept.then(|| {
                    let bytes = T::TY.bytes();
                    (k.output("losses", bytes), k.output("weights", bytes))
                });
                let x = share.hold::<T>(&logits, &index);
                let (peak, sum) = share.peak_and_sum(&x);
                let whole = peak + math::log(sum);
                let all = if smooth { share.sum(|at, slot| x.value(at, slot)) } else { number(0.0) };
                k.when(inside & member.eq(0), || {
                    let label = labels.label(k, &index);
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
                        let skipped = label.eq(ignored);
                        value = k.select(skipped, number(0.0), value);
                        weight = k.select(skipped, number(0.0), weight);
                    }
                    if let Some(loss) = &loss {
                        loss.row(&index).store(k.constant(0u32), T::wrap(value));
                    }
                    if let Some(lse) = &lse {
                        lse.row(&index).store(k.constant(0u32), T::wrap(whole));
                    }
                    if let Some((losses, weights)) = parts {
                        k.st_global(losses.at(row, T::TY.bytes()), 0, value);
                        k.st_global(weights.at(row, T::TY.bytes()), 0, weight);
                    }
                });
            }
            Kind::CrossEntropyBackward { ignore, lse, counted } => {
                let (logits, labels, dloss) = (operand(false), operand(false), operand(false));
                let lse = lse.then(|| operand(false));
                let dlogits = operand(true);
                let spread = T::from_f64(k.scalar::<f64>("smoothing"));
                let classes = T::from_f64(k.scalar::<f64>("classes"));
                let ignored = k.scalar::<i64>("ignore_index");
                let count = if counted {
                    let from = k.input("count", 8);
                    T::from_f64(k.ld_global::<f64>(from.address(), 0))
                } else {
                    T::from_f64(k.scalar::<f64>("count"))
                };
                let x = share.hold::<T>(&logits, &index);
                let whole = match &lse {
                    Some(lse) => lse.row(&index).load::<T>(k.constant(0u32)),
                    None => {
                        let (peak, sum) = share.peak_and_sum(&x);
                        peak + math::log(sum)
                    }
                };
                let label = labels.label(k, &index);
                let known = label.ge(0i64) & label.lt(extent.widen().bitcast::<i64>());
                let gradient = T::quotient(dloss.row(&index).load::<T>(k.constant(0u32)), count);
                let gradient = k.select(known, gradient, number(f64::NAN));
                let each_class = T::quotient(spread, classes);
                let to = dlogits.row(&index);
                let target = label.unsigned().low32();
                share.each(|at, slot| {
                    let hit = k.select(at.eq(target), number(1.0) - spread, number(0.0));
                    let mut value = gradient * (T::exp(x.value(at, slot) - whole) - hit - each_class);
                    if ignore {
                        value = k.select(label.eq(ignored), number(0.0), value);
                    }
                    k.when(inside, || to.store(at, T::wrap(value)));
                });
            }
            Kind::Count | Kind::Join { .. } => {}
        }
    }
}

fn split<'k>(point: Val<'k, u32>, divisors: &[Divisor<'k>], rank: usize) -> Vec<Val<'k, u32>> {
    let mut index = Vec::new();
    let mut rest = point;
    for divisor in divisors.iter().rev() {
        let (outer, inner) = divisor.split(rest);
        index.push(inner);
        rest = outer;
    }
    if rank > 0 {
        index.push(rest);
    }
    index.reverse();
    index
}

/// An operand: strides over the rows' dims and along the axis, in bytes.
#[derive(Clone, Debug)]
struct Operand<'k> {
    dtype: DType,
    pointer: Pointer<'k>,
    strides: Vec<Val<'k, u64>>,
    along: Val<'k, u64>,
}

impl<'k> Operand<'k> {
    fn declare(k: Kernel<'k>, dtype: DType, rank: usize, written: bool) -> Operand<'k> {
        let bytes = dtype.bytes() as u32;
        let pointer = if written { k.output("output", bytes) } else { k.input("input", bytes) };
        Operand { dtype, pointer, strides: (0..rank).map(|_| k.scalar("row_stride_bytes")).collect(), along: k.scalar("stride_bytes") }
    }

    /// The arguments of [`Operand::declare`].
    fn args(view: &View, region: &Region) -> Vec<Arg> {
        let bytes = view.dtype.bytes() as u64;
        let first: u64 = view.strides.iter().zip(&region.first).map(|(stride, first)| stride * first).sum();
        let mut args =
            vec![Arg::Pointer(Address { base: Base::Buffer(view.slot.0 as usize), offset_bytes: (view.offset + first) * bytes })];
        args.extend(view.strides.iter().map(|stride| Arg::Scalar(Ty::U64, stride * bytes)));
        args
    }

    fn row(&self, index: &[Val<'k, u32>]) -> Row<'k> {
        let address = self.strides.iter().zip(index).fold(self.pointer.address(), |address, (&stride, &i)| address + i.widen() * stride);
        Row { dtype: self.dtype, address, along: self.along }
    }

    /// The label of a row.
    fn label(&self, k: Kernel<'k>, index: &[Val<'k, u32>]) -> Val<'k, i64> {
        match load_raw(k, self.dtype, self.row(index).address, 1)[0] {
            Raw::B8(bits) if self.dtype == DType::I8 => ((bits << 24).signed() >> 24).widen(),
            Raw::B8(bits) => bits.signed().widen(),
            Raw::B16(bits) => bits.convert(verdigris_kir::inst::CvtRound::None),
            Raw::B32(bits) => bits.signed().widen(),
            Raw::B64(bits) => bits.bitcast(),
        }
    }
}

/// An operand at a row.
#[derive(Clone, Copy, Debug)]
struct Row<'k> {
    dtype: DType,
    address: Val<'k, u64>,
    along: Val<'k, u64>,
}

impl<'k> Row<'k> {
    fn at(&self, position: Val<'k, u32>) -> Val<'k, u64> {
        if position.as_constant() == Some(0) { self.address } else { self.address + position.widen() * self.along }
    }

    fn load<T: Chained>(&self, position: Val<'k, u32>) -> Val<'k, T> {
        let k = self.address.kernel();
        AnyVal::Stored(self.dtype, load_raw(k, self.dtype, self.at(position), 1)[0]).get(k)
    }

    fn store(&self, position: Val<'k, u32>, value: AnyVal<'k>) {
        let k = self.address.kernel();
        store_raw(k, self.at(position), &[value.encoded(k, self.dtype)]);
    }
}

/// A row that is read: from registers if it is held.
#[derive(Clone, Debug)]
struct Held<'k, T> {
    row: Row<'k>,
    values: Vec<Var<'k, T>>,
}

impl<'k, T: Chained> Held<'k, T> {
    fn value(&self, position: Val<'k, u32>, slot: Option<usize>) -> Val<'k, T> {
        match slot {
            Some(slot) => self.values[slot].get(),
            None => self.load(position),
        }
    }

    fn load(&self, position: Val<'k, u32>) -> Val<'k, T> {
        self.row.load(position)
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

    fn hold<T: Chained>(&self, operand: &Operand<'k>, index: &[Val<'k, u32>]) -> Held<'k, T> {
        let zero = T::constant(self.k, 0.0);
        let held = Held { row: operand.row(index), values: (0..self.held).map(|_| self.k.var(zero)).collect() };
        if self.held > 0 {
            self.each(|at, slot| {
                if let Some(slot) = slot {
                    held.values[slot].set(held.load(at));
                }
            });
        }
        held
    }

    fn over_team<T: Chained>(&self, own: Val<'k, T>, combine: &impl Fn(Val<'k, T>, Val<'k, T>) -> Val<'k, T>) -> Val<'k, T> {
        match (self.team, self.scratch) {
            (1, _) => own,
            (_, Some(scratch)) => lanes::over_cta(self.k, scratch, WARPS, own, combine),
            (_, None) => lanes::over_warp(self.k, own, combine),
        }
    }

    fn sum<T: Chained>(&self, value: impl Fn(Val<'k, u32>, Option<usize>) -> Val<'k, T>) -> Val<'k, T> {
        let sum = self.k.var(T::constant(self.k, 0.0));
        self.each(|at, slot| sum.set(sum + value(at, slot)));
        self.over_team(sum.get(), &|x, y| x + y)
    }

    /// `M` and `S`. A row of −∞ alone has `M` = −∞ and NaN for `S`.
    fn peak_and_sum<T: Chained>(&self, x: &Held<'k, T>) -> (Val<'k, T>, Val<'k, T>) {
        let peak = self.k.var(T::constant(self.k, f64::NEG_INFINITY));
        self.each(|at, slot| peak.set(T::max_nan(peak.get(), x.value(at, slot))));
        let peak = self.over_team(peak.get(), &|x, y| T::max_nan(x, y));
        (peak, self.sum(|at, slot| T::exp(x.value(at, slot) - peak)))
    }
}

/// An accepted problem.
#[derive(Clone, Debug)]
struct Accepted {
    problem: SoftmaxProblem,
    arch: Arch,
}

impl Accepted {
    /// The operand whose strides tell how rows lie.
    fn main(&self) -> &View {
        match &self.problem.function {
            RowFunction::Softmax { x, .. } => x,
            RowFunction::SoftmaxBackward { y, .. } => y,
            RowFunction::CrossEntropy { logits, .. } | RowFunction::CrossEntropyBackward { logits, .. } => logits,
        }
    }

    fn loss(&self) -> Option<&Loss> {
        match &self.problem.function {
            RowFunction::CrossEntropy { loss_spec, .. } | RowFunction::CrossEntropyBackward { loss_spec, .. } => Some(loss_spec),
            _ => None,
        }
    }

    fn spec(&self) -> Spec {
        let p = &self.problem;
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
        let strides = &self.main().strides;
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

    fn us(&self) -> f64 {
        let spec = self.spec();
        let elements = self.problem.row_count() as f64 * self.problem.extent as f64;
        let reads = if spec.held == 0 { 2.0 } else { 1.0 };
        let bytes: f64 = (self.problem.operands().into_iter())
            .filter(|(_, view, _)| view.strides.last().is_some_and(|&stride| stride > 0))
            .map(|(_, view, written)| elements * view.dtype.bytes() as f64 * if written { 1.0 } else { reads })
            .sum();
        let launches = if matches!(spec.kind, Kind::CrossEntropy { kept: true, .. } | Kind::CrossEntropyBackward { counted: true, .. }) {
            6.0
        } else {
            3.0
        };
        launches + bytes / (self.arch.memory_gb_per_s * 1e3)
    }
}

impl Candidate for Accepted {
    fn knobs(&self) -> KnobSpace {
        KnobSpace::new(Knobs::default(), [])
    }

    fn notes(&self, _: &Knobs) -> Result<Notes, Refusal> {
        Ok(Notes {
            tensor_core: false,
            deterministic: true,
            down_convert: None,
            accumulator: self.problem.compute,
            reduced_sums: false,
            split_operands: false,
        })
    }

    fn cost(&self, _: &Knobs) -> Result<Cost, Refusal> {
        Ok(Cost { us: self.us(), leaves_out: "L2 hits, exponentials, the tail of few rows" })
    }

    fn program(&self, knobs: &Knobs) -> Result<Program, Refusal> {
        ID.require(*knobs == Knobs::default(), Reason::Knobs, format_args!("{knobs}, there are no knobs"))?;
        let p = &self.problem;
        let spec = self.spec();
        let mut alignments = vec![1; p.slots().len()];
        for (_, view, _) in p.operands() {
            alignments[view.slot.0 as usize] = view.dtype.bytes() as u64;
        }
        let mut program = Program { buffer_alignment_bytes: alignments, ..Program::default() };
        if p.is_empty() {
            return Ok(program);
        }
        let rank = p.rows.len();
        let bytes = p.compute.bytes() as u64;
        let kept = matches!(spec.kind, Kind::CrossEntropy { kept: true, .. });
        let counted = matches!(spec.kind, Kind::CrossEntropyBackward { counted: true, .. });
        let loss = self.loss();
        let ignored = loss.and_then(|loss| loss.ignore_index).unwrap_or(0);
        let mean = loss.is_some_and(|loss| loss.reduction == LossReduction::Mean);
        let launch = |kernel: KernelRef, ctas: u32, args: Vec<Arg>| {
            Step::Launch(Launch { kernel, grid: [ctas, 1, 1], residency: Residency::Any, overlap: false, args: args.into() })
        };
        let losses = kept.then(|| program.add_scratch("losses", p.row_count() * bytes));
        let weights = kept.then(|| program.add_scratch("weights", p.row_count() * bytes));
        let count = counted.then(|| program.add_scratch("count", 8));
        let regions = Region::all(&p.rows, 1);
        let rows_args = |region: &Region| {
            let mut args = vec![Arg::Scalar(Ty::U32, region.points(1).into())];
            args.push(Arg::Scalar(Ty::U32, p.extent));
            args.extend(region.extents.iter().skip(1).map(|&extent| Arg::Divisor(extent)));
            args
        };
        if let (Some(count), RowFunction::CrossEntropyBackward { labels, .. }) = (count, &p.function) {
            program.steps.push(Step::Fill { at: count, bytes: 8, value: 0 });
            let kernel = Spec { types: vec![labels.dtype], rank, ..Spec::plain(Kind::Count, THREADS, 0) }.kernel();
            for region in &regions {
                let mut args = rows_args(region);
                args[1] = Arg::Scalar(Ty::S64, ignored as u64);
                args.extend(Operand::args(labels, region));
                args.push(Arg::Pointer(count));
                program.steps.push(launch(kernel.clone(), 1, args));
            }
        }
        let kernel = spec.clone().kernel();
        let mut done = 0u64;
        for region in &regions {
            let mut args = rows_args(region);
            for (_, view, _) in p.operands().into_iter().filter(|(name, ..)| !(kept && *name == "loss")) {
                args.extend(Operand::args(view, region));
            }
            if let Some(loss) = loss {
                args.push(Arg::Scalar(Ty::F64, loss.smoothing.0.to_bits()));
                args.push(Arg::Scalar(Ty::F64, (p.extent as f64).to_bits()));
                args.push(Arg::Scalar(Ty::S64, ignored as u64));
            }
            for part in [losses, weights].into_iter().flatten() {
                args.push(Arg::Pointer(Address { offset_bytes: done * bytes, ..part }));
            }
            if matches!(spec.kind, Kind::CrossEntropyBackward { .. }) {
                let whole = if mean { p.row_count() as f64 } else { 1.0 };
                args.push(count.map_or(Arg::Scalar(Ty::F64, whole.to_bits()), Arg::Pointer));
            }
            let rows_of_cta = THREADS / spec.team;
            program.steps.push(launch(kernel.clone(), region.points(1).div_ceil(rows_of_cta), args));
            done += u64::from(region.points(1));
        }
        if let (Some(losses), Some(weights), RowFunction::CrossEntropy { loss, .. }) = (losses, weights, &p.function) {
            let kernel =
                Spec { double: spec.double, types: vec![loss.dtype], rank: 0, ..Spec::plain(Kind::Join { mean }, THREADS, 0) }.kernel();
            let mut args = vec![Arg::Scalar(Ty::U64, p.row_count()), Arg::Pointer(losses)];
            if mean {
                args.push(Arg::Pointer(weights));
            }
            let at = Address { base: Base::Buffer(loss.slot.0 as usize), offset_bytes: loss.offset * loss.dtype.bytes() as u64 };
            args.push(Arg::Pointer(at));
            program.steps.push(launch(kernel, 1, args));
        }
        Ok(program)
    }
}
