//! `pool.direct`: max and average pooling and their gradients ([`verdigris_graph::PoolProblem`] has the formulas).
//!
//! It takes all of them: one to three spatial dims, sliding and adaptive windows, dilation, padding, indices, any element types and strides.
//!
//! **Method.** A thread for each element of what is written, threads along its innermost dim: channels of a channels-last tensor, pixels of a
//! channels-first one. It goes through its window (forward), or through the windows that hold its element (backward), so that nothing is
//! added atomically. Overlapping windows meet in L1.
//!
//! **When it wins.** There is no other engine for pooling.
//!
//! **Numbers.** Means and gradients are summed in f32 (f64), in the order of the windows; results repeat bit for bit.

use serde::{Deserialize, Serialize};
use verdigris_graph::{PoolMode, PoolPass, PoolProblem, Problem, View, Windows};
use verdigris_kir::face::{Header, Kernel, Val, Var, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::Divide;
use verdigris_kir::program::{KernelRef, Launch, Program};
use verdigris_tensor::DType;

use crate::algorithm::{Algorithm, Listed};
use crate::arch::Arch;
use crate::cost::{Stream, Traffic, Work};
use crate::engine::{Engine, EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::compute::{self, Compute};
use crate::fuse::operand::OperandArgs;
use crate::fuse::strided::{self, Strided};
use crate::fuse::value::AnyVal;
use crate::layout::space::{Extents, Region};

/// The engines of this family.
pub static ENGINES: &[&dyn Engine] = &[&Listed::<Direct>::new()];

const THREADS: u32 = 256;
/// Beyond it, positions within windows would not count in 31 bits.
const LIMIT: u64 = 1 << 30;

/// An accepted problem.
#[derive(Clone, Debug)]
struct Direct {
    problem: PoolProblem,
    spec: Spec,
}

impl Algorithm for Direct {
    const ID: EngineId = EngineId { name: "pool.direct", number: 600 };
    const VERSION: u32 = 1;
    type Config = ();

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Pool(problem) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is pool", problem.kind())));
        };
        for i in 0..3 {
            let (extent, out) = (problem.extents[i], problem.out[i]);
            let reach = match problem.windows[i] {
                Windows::Sliding { taps, stride, dilation, pad_before } => {
                    (taps.saturating_mul(dilation)).saturating_add(out.saturating_mul(stride)).saturating_add(pad_before)
                }
                Windows::Adaptive => extent.saturating_mul(out),
            };
            let largest = extent.max(out).max(reach);
            Self::ID.require(
                largest < LIMIT,
                Reason::Extent,
                format_args!("windows that reach {largest} elements far, taken below 2^30"),
            )?;
        }
        let spec = Spec::of(problem);
        let target = spec.target();
        Self::ID.require(arch.runs(target), Reason::Target, format_args!("element types that need {}", target.ptx()))?;
        Ok(Direct { problem: problem.clone(), spec })
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
        let bytes: f64 = (self.problem.operands().into_iter())
            .map(|(_, view, dims, _)| dims.iter().map(|&dim| dim as f64).product::<f64>() * view.dtype.bytes() as f64)
            .sum();
        // Some ten instructions for each tap.
        let issued = self.problem.flops() * 10.0 / 32.0;
        Work::default().beside([Stream::new(Traffic::Lines, bytes).issuing(issued)])
    }

    fn lower(&self, (): &()) -> Result<Program, Refusal> {
        let (p, spec) = (&self.problem, &self.spec);
        let mut program = Program { buffer_alignment_bytes: vec![1; p.slots().len()], ..Program::default() };
        if p.is_empty() {
            return Ok(program);
        }
        let (_, dims) = written(p);
        let kernel = spec.clone().kernel();
        for region in Region::all(&spec.order.map(|dim| dims[dim]), 1) {
            let mut first = [0; 5];
            spec.order.iter().zip(&region.first).for_each(|(&dim, &at)| first[dim] = at);
            let points = region.points(1);
            let args = PoolArgs {
                points,
                extents: region.extents,
                first: [first[2], first[3], first[4]].map(|first| first as u32),
                axes: (0..3).map(|i| Axis::args(p.extents[i] as u32, p.out[i] as u32, &p.windows[i])).collect(),
                operands: p.operands().into_iter().map(|(_, view, ..)| strided::argument(view, &first[..2])).collect(),
            };
            program.launch(Launch::new(kernel.clone(), [points.div_ceil(THREADS), 1, 1], args.bound(spec)));
        }
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let mut specs = Vec::new();
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            for order in [[0, 2, 3, 4, 1], [0, 1, 2, 3, 4]] {
                let kinds = [
                    (Kind::Max { index: false }, vec![dtype; 2]),
                    (Kind::Max { index: true }, vec![dtype, dtype, DType::I32]),
                    (Kind::Average { padded: false }, vec![dtype; 2]),
                    (Kind::Average { padded: true }, vec![dtype; 2]),
                    (Kind::MaxBackward { index: false }, vec![dtype; 3]),
                    (Kind::MaxBackward { index: true }, vec![dtype, DType::I32, dtype]),
                    (Kind::AverageBackward { padded: false }, vec![dtype; 2]),
                    (Kind::AverageBackward { padded: true }, vec![dtype; 2]),
                ];
                for adaptive in [[false; 3], [false, true, true]] {
                    specs.extend(kinds.iter().map(|(kind, types)| Spec {
                        kind: *kind,
                        double: false,
                        types: types.clone(),
                        adaptive,
                        order,
                    }));
                }
            }
        }
        specs.into_iter().filter(|spec| spec.target() <= target).map(Spec::kernel).collect()
    }
}

/// What is written, and its dims.
fn written(problem: &PoolProblem) -> (&View, [u64; 5]) {
    match &problem.pass {
        PoolPass::Forward { y, .. } => (y, problem.y_dims()),
        PoolPass::Backward { dx, .. } => (dx, problem.x_dims()),
    }
}

/// What is computed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    /// `index`: the place of the maximum is stored.
    Max {
        index: bool,
    },
    /// `padded`: padding counts.
    Average {
        padded: bool,
    },
    /// `index`: the place of the maximum is read; otherwise it is found again.
    MaxBackward {
        index: bool,
    },
    AverageBackward {
        padded: bool,
    },
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct Spec {
    kind: Kind,
    double: bool,
    /// Element types of the operands, in the order of slots.
    types: Vec<DType>,
    adaptive: [bool; 3],
    /// The dims `[n, c, depth, height, width]` from the slowest to the fastest that threads run through.
    order: [usize; 5],
}

impl Spec {
    fn of(p: &PoolProblem) -> Spec {
        let kind = match (&p.pass, p.mode) {
            (PoolPass::Forward { index, .. }, PoolMode::Max) => Kind::Max { index: index.is_some() },
            (PoolPass::Forward { .. }, PoolMode::Average { count_include_pad }) => Kind::Average { padded: count_include_pad },
            (PoolPass::Backward { index, .. }, PoolMode::Max) => Kind::MaxBackward { index: index.is_some() },
            (PoolPass::Backward { .. }, PoolMode::Average { count_include_pad }) => Kind::AverageBackward { padded: count_include_pad },
        };
        let (written, dims) = written(p);
        // Channels fastest if they are so in what is written.
        let spatial = (2..5).filter(|&d| dims[d] > 1).map(|d| written.strides[d]).min().unwrap_or(u64::MAX);
        let last = dims[1] > 1 && written.strides[1] < spatial;
        Spec {
            kind,
            double: p.compute == DType::F64,
            types: p.operands().into_iter().map(|(_, view, ..)| view.dtype).collect(),
            adaptive: p.windows.map(|windows| windows == Windows::Adaptive),
            order: if last { [0, 2, 3, 4, 1] } else { [0, 1, 2, 3, 4] },
        }
    }

    fn name(&self) -> String {
        let (kind, flag) = match self.kind {
            Kind::Max { index } | Kind::MaxBackward { index } => ("max", if index { "_index" } else { "" }),
            Kind::Average { padded } | Kind::AverageBackward { padded } => ("average", if padded { "_padded" } else { "" }),
        };
        let backward = if matches!(self.kind, Kind::MaxBackward { .. } | Kind::AverageBackward { .. }) { "_backward" } else { "" };
        let types: Vec<&str> = self.types.iter().map(|dtype| dtype.name()).collect();
        let adaptive: String = self.adaptive.iter().map(|&adaptive| if adaptive { 'a' } else { 's' }).collect();
        let order: String = self.order.iter().map(|dim| char::from(b"ncdhw"[*dim])).collect();
        format!("pool_{kind}{flag}{backward}{}_{adaptive}_{order}_{}", if self.double { "_f64" } else { "" }, types.join("_"))
    }

    fn target(&self) -> Target {
        compute::target_of_all(self.types.iter().copied())
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas: 1, cluster: 1 };
        build(header, |k| if self.double { self.body::<f64>(k) } else { self.body::<f32>(k) })
    }

    fn body<'k, T: Compute>(&self, k: Kernel<'k>) {
        let Pool { points, extents, first, axes, operands } = Pool::declare(k, self);
        let operands = Strided::all(&self.types, operands);
        let point = k.cta() * THREADS + k.thread();
        // The position of this thread in the dims of what is written.
        let mut index = [k.constant(0u32); 5];
        for (&dim, at) in self.order.iter().zip(extents.index(point)) {
            index[dim] = at;
        }
        let (outer, [depth, height, width]) = ([index[0], index[1]], [index[2], index[3], index[4]]);
        let place = [depth + first[0], height + first[1], width + first[2]];
        let number = |value: f64| T::constant(k, value);
        match (self.kind, operands.as_slice()) {
            (Kind::Max { .. }, [x, y, places @ ..]) => {
                let x = x.at(&outer);
                k.when(point.lt(points), || {
                    let winner = Winner::<T>::find(k, &axes, place, &|at| x.load(&at));
                    y.at(&outer).store(&place, winner.value(k, y.dtype));
                    if let [places] = places {
                        places.at(&outer).store(&place, AnyVal::I64(winner.place.get().widen()));
                    }
                });
            }
            (Kind::Average { padded }, [x, y]) => {
                let x = x.at(&outer);
                k.when(point.lt(points), || {
                    let sum = k.var(number(0.0));
                    let count = k.var(0u32);
                    taps(k, &axes, place, &|at, inside| {
                        k.when(inside, || {
                            sum.set(sum + x.load::<T>(&at));
                            count.set(count + 1);
                        });
                    });
                    let count = if padded { window_size(k, &axes, place) } else { count.get() };
                    let mean = T::quotient(sum.get(), T::from_i32(count.signed()));
                    // A window that meets no element.
                    let mean = k.select(count.eq(0), number(0.0), mean);
                    y.at(&outer).store(&place, AnyVal::of(mean));
                });
            }
            (Kind::MaxBackward { index }, [dy, known, dx]) => {
                // Where the maximum was, or what it is found in again.
                let (dy, known) = (dy.at(&outer), known.at(&outer));
                let mine = (place[0] * axes[1].extent + place[1]) * axes[2].extent + place[2];
                k.when(point.lt(points), || {
                    let sum = k.var(number(0.0));
                    windows(k, &axes, place, &|out| {
                        let won = if index {
                            known.load_integer(&out).eq(mine.widen().bitcast::<i64>())
                        } else {
                            Winner::<T>::find(k, &axes, out, &|at| known.load(&at)).place.eq(mine.signed())
                        };
                        k.when(won, || sum.set(sum + dy.load::<T>(&out)));
                    });
                    dx.at(&outer).store(&place, AnyVal::of(sum.get()));
                });
            }
            (Kind::AverageBackward { padded }, [dy, dx]) => {
                let dy = dy.at(&outer);
                k.when(point.lt(points), || {
                    let sum = k.var(number(0.0));
                    windows(k, &axes, place, &|out| {
                        let count = if padded { window_size(k, &axes, out) } else { inside_size(k, &axes, out) };
                        let share = T::quotient(dy.load::<T>(&out), T::from_i32(count.signed()));
                        sum.set(sum + share);
                    });
                    dx.at(&outer).store(&place, AnyVal::of(sum.get()));
                });
            }
            (kind, operands) => unreachable!("{kind:?} of {} operands", operands.len()),
        }
    }
}

verdigris_kir::parameters! {
    /// Of every kernel here.
    struct Pool / PoolArgs of Spec as spec {
        points: u32,
        /// In the order that threads run through.
        extents: Extents = 5,
        /// The first window or element along each spatial dim.
        first: [u32; 3],
        axes: Vec<AxisArgs> = spec.adaptive.to_vec(),
        operands: Vec<OperandArgs> = strided::declarations(&spec.types, 5, if spec.kind == (Kind::Max { index: true }) { 2 } else { 1 }),
    }
}

verdigris_kir::parameters! {
    /// Windows along a spatial dim, adaptive or sliding.
    #[derive(Clone, Copy, Debug)]
    struct Axis / AxisArgs of bool as adaptive {
        extent: u32,
        out: u32,
        adaptive: Option<AdaptiveArgs> = adaptive.then_some(()),
        sliding: Option<SlidingArgs> = (!adaptive).then_some(()),
    }
}

verdigris_kir::parameters! {
    /// What adaptive windows divide by.
    #[derive(Clone, Copy, Debug)]
    struct Adaptive / AdaptiveArgs of () as _spec {
        extent: Divide,
        out: Divide,
    }
}

verdigris_kir::parameters! {
    /// Of windows that slide.
    #[derive(Clone, Copy, Debug)]
    struct Sliding / SlidingArgs of () as _spec {
        taps: u32,
        stride: Divide,
        dilation: Divide,
        pad: u32,
    }
}

/// Windows along one spatial dim.
#[derive(Clone, Copy, Debug)]
enum Form<'k> {
    Sliding(Sliding<'k>),
    Adaptive(Adaptive<'k>),
}

impl<'k> Axis<'k> {
    fn form(&self) -> Form<'k> {
        let sliding = || Form::Sliding(self.sliding.expect("windows that are not adaptive slide"));
        self.adaptive.map_or_else(sliding, Form::Adaptive)
    }

    fn args(extent: u32, out: u32, windows: &Windows) -> AxisArgs {
        let (adaptive, sliding) = match *windows {
            Windows::Adaptive => (Some(AdaptiveArgs { extent: extent.max(1), out: out.max(1) }), None),
            Windows::Sliding { taps, stride, dilation, pad_before } => {
                let [taps, stride, dilation, pad] = [taps, stride, dilation, pad_before].map(|count| count as u32);
                (None, Some(SlidingArgs { taps, stride, dilation, pad }))
            }
        };
        AxisArgs { extent, out, adaptive, sliding }
    }

    /// The first tap of window `o`, how many there are, and the distance between them. A tap in front of the first element is a large number.
    fn window(&self, o: Val<'k, u32>) -> (Val<'k, u32>, Val<'k, u32>, Val<'k, u32>) {
        match &self.form() {
            Form::Sliding(Sliding { taps, stride, dilation, pad }) => (o * stride.value() - *pad, *taps, dilation.value()),
            Form::Adaptive(Adaptive { out, .. }) => {
                let k = o.kernel();
                let begin = out.quotient(o * self.extent);
                let end = out.quotient((o + 1) * self.extent + self.out - 1);
                (begin, end - begin, k.constant(1))
            }
        }
    }

    /// The first window that may hold element `i`, and how many there are to look at.
    fn holders(&self, i: Val<'k, u32>) -> (Val<'k, u32>, Val<'k, u32>) {
        let k = i.kernel();
        match &self.form() {
            Form::Sliding(Sliding { taps, stride, dilation, pad }) => {
                let reach = (*taps - 1) * dilation.value();
                let behind = i + *pad;
                // ⌈(behind − reach) / stride⌉, or 0, to ⌊behind / stride⌋.
                let first = k.select(behind.gt(reach), stride.quotient(behind - reach + stride.value() - 1), 0u32);
                let end = (stride.quotient(behind) + 1).min(self.out);
                (first, k.select(end.gt(first), end - first, 0u32))
            }
            Form::Adaptive(Adaptive { extent, .. }) => {
                // Window o holds i where ⌊o · extent / out⌋ ≤ i < ⌈(o + 1) · extent / out⌉.
                let first = extent.quotient(i * self.out);
                let end = extent.quotient((i + 1) * self.out + self.extent - 1).min(self.out);
                (first, end - first)
            }
        }
    }

    /// Whether a tap of window `o` is element `i`; windows that [`Axis::holders`] names may step over it.
    fn holds(&self, o: Val<'k, u32>, i: Val<'k, u32>) -> Val<'k, bool> {
        match &self.form() {
            Form::Sliding(Sliding { taps, stride, dilation, pad }) => {
                let distance = i + *pad - o * stride.value();
                let (tap, rest) = dilation.split(distance);
                rest.eq(0) & tap.lt(*taps)
            }
            Form::Adaptive(_) => {
                let (begin, count, _) = self.window(o);
                (i - begin).lt(count)
            }
        }
    }

    /// Taps of window `o` that are elements.
    fn inside(&self, k: Kernel<'k>, o: Val<'k, u32>) -> Val<'k, u32> {
        let (_, count, _) = self.window(o);
        match &self.form() {
            Form::Adaptive(_) => count,
            Form::Sliding(Sliding { dilation, pad, stride, .. }) => {
                // The first tap at or behind element 0, and the first at or behind the end.
                let at = o * stride.value();
                let skipped = k.select(at.lt(*pad), dilation.quotient(*pad - at + dilation.value() - 1), 0u32);
                let end = self.extent + *pad;
                let reached = k.select(at.lt(end), dilation.quotient(end - at + dilation.value() - 1), 0u32).min(count);
                k.select(reached.gt(skipped), reached - skipped, 0u32)
            }
        }
    }
}

type Place<'k> = [Val<'k, u32>; 3];

/// Goes through three dims, row-major: `step` says where a step of a dim leads and whether that counts, `f` is told all three and whether all do.
fn walk<'k>(
    k: Kernel<'k>,
    counts: [Val<'k, u32>; 3],
    step: &dyn Fn(usize, Val<'k, u32>) -> (Val<'k, u32>, Val<'k, bool>),
    f: &dyn Fn(Place<'k>, Val<'k, bool>),
) {
    k.range(counts[0], |a| {
        let (depth, in_depth) = step(0, a);
        k.range(counts[1], |b| {
            let (height, in_height) = step(1, b);
            let in_plane = in_depth & in_height;
            k.range(counts[2], |c| {
                let (width, in_width) = step(2, c);
                f([depth, height, width], in_plane & in_width);
            });
        });
    });
}

/// Runs `f` for each tap of a window, in row-major order, with whether it is an element.
fn taps<'k>(k: Kernel<'k>, axes: &[Axis<'k>], out: Place<'k>, f: &dyn Fn(Place<'k>, Val<'k, bool>)) {
    let windows: [_; 3] = std::array::from_fn(|axis| axes[axis].window(out[axis]));
    let tap = |axis: usize, t: Val<'k, u32>| {
        let at = windows[axis].0 + t * windows[axis].2;
        (at, at.lt(axes[axis].extent))
    };
    walk(k, windows.map(|(_, count, _)| count), &tap, f);
}

/// Runs `f` for each window that holds an element, in row-major order.
fn windows<'k>(k: Kernel<'k>, axes: &[Axis<'k>], at: Place<'k>, f: &dyn Fn(Place<'k>)) {
    let holders: [_; 3] = std::array::from_fn(|axis| axes[axis].holders(at[axis]));
    let window = |axis: usize, i: Val<'k, u32>| {
        let out = holders[axis].0 + i;
        (out, axes[axis].holds(out, at[axis]))
    };
    walk(k, holders.map(|(_, count)| count), &window, &|out, holds| k.when(holds, || f(out)));
}

fn window_size<'k>(k: Kernel<'k>, axes: &[Axis<'k>], out: Place<'k>) -> Val<'k, u32> {
    axes.iter().zip(out).fold(k.constant(1u32), |size, (axis, o)| size * axis.window(o).1)
}

fn inside_size<'k>(k: Kernel<'k>, axes: &[Axis<'k>], out: Place<'k>) -> Val<'k, u32> {
    axes.iter().zip(out).fold(k.constant(1u32), |size, (axis, o)| size * axis.inside(k, o))
}

/// The greatest element of a window: the first of equals, the first NaN before all.
#[derive(Clone, Copy, Debug)]
struct Winner<'k, T> {
    peak: Var<'k, T>,
    place: Var<'k, i32>,
}

impl<'k, T: Compute> Winner<'k, T> {
    fn find(k: Kernel<'k>, axes: &[Axis<'k>], out: Place<'k>, load: &dyn Fn(Place<'k>) -> Val<'k, T>) -> Self {
        let winner = Winner { peak: k.var(T::constant(k, f64::NEG_INFINITY)), place: k.var(-1i32) };
        taps(k, axes, out, &|at, inside| {
            k.when(inside, || {
                let value = load(at);
                let peak = winner.peak.get();
                let first = winner.place.lt(0);
                let is_nan = value.ne(value) & peak.eq(peak);
                k.when(first | is_nan | value.gt(peak), || {
                    winner.peak.set(value);
                    let place = (at[0] * axes[1].extent + at[1]) * axes[2].extent + at[2];
                    winner.place.set(place.signed());
                });
            });
        });
        winner
    }

    /// The maximum, to be stored as `dtype`: of an empty window the least value of an integer type.
    fn value(&self, k: Kernel<'k>, dtype: DType) -> AnyVal<'k> {
        let peak = self.peak.get();
        match dtype.integer_range() {
            Some((least, _)) => AnyVal::of(k.select(self.place.lt(0), T::constant(k, least as f64), peak)),
            None => AnyVal::of(peak),
        }
    }
}
