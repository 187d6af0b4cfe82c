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
use verdigris_kir::face::{Divisor, Header, Kernel, Pointer, Val, Var, build};
use verdigris_kir::inst::CvtRound;
use verdigris_kir::ir::{KernelBody, Target, Ty};
use verdigris_kir::program::{Address, Arg, Base, KernelRef, Launch, Program, Residency, Step};
use verdigris_tensor::DType;

use crate::arch::Arch;
use crate::engine::{Candidate, Cost, Engine, EngineId, KnobSpace, Knobs, Notes, Reason, Refusal};
use crate::parts::compute;
use crate::parts::space::Region;
use crate::parts::steps::{AnyVal, Chained, Raw, load_raw, store_raw};

const ID: EngineId = EngineId { name: "pool.direct", number: 600 };

/// The engines of this family.
pub static ENGINES: &[&dyn Engine] = &[&Direct];

const THREADS: u32 = 256;
/// Beyond it, positions within windows would not count in 31 bits.
const LIMIT: u64 = 1 << 30;

/// The engine.
#[derive(Clone, Copy, Debug)]
struct Direct;

impl Engine for Direct {
    fn id(&self) -> EngineId {
        ID
    }

    fn accept(&self, problem: &Problem, arch: &Arch) -> Result<Box<dyn Candidate>, Refusal> {
        let Problem::Pool(problem) = problem else {
            return Err(ID.refusal(Reason::Problem, format_args!("{}, taken is pool", problem.kind())));
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
            ID.require(largest < LIMIT, Reason::Extent, format_args!("windows that reach {largest} elements far, taken below 2^30"))?;
        }
        let accepted = Accepted { problem: problem.clone(), arch: arch.clone() };
        let target = accepted.spec().target();
        ID.require(arch.runs(target), Reason::Target, format_args!("element types that need {}", target.ptx()))?;
        Ok(Box::new(accepted))
    }

    fn catalog(&self, target: Target) -> Vec<KernelRef> {
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
    fn name(&self) -> String {
        let kind = match self.kind {
            Kind::Max { index: false } => "max",
            Kind::Max { index: true } => "max_index",
            Kind::Average { padded: false } => "average",
            Kind::Average { padded: true } => "average_padded",
            Kind::MaxBackward { index: false } => "max_backward",
            Kind::MaxBackward { index: true } => "max_index_backward",
            Kind::AverageBackward { padded: false } => "average_backward",
            Kind::AverageBackward { padded: true } => "average_padded_backward",
        };
        let types: Vec<&str> = self.types.iter().map(|dtype| dtype.name()).collect();
        let adaptive: String = self.adaptive.iter().map(|&adaptive| if adaptive { 'a' } else { 's' }).collect();
        let order: String = self.order.iter().map(|dim| char::from(b"ncdhw"[*dim])).collect();
        format!("pool_{kind}{}_{adaptive}_{order}_{}", if self.double { "_f64" } else { "" }, types.join("_"))
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
        let points = k.scalar::<u32>("points");
        let divisors: Vec<Divisor<'k>> = (1..5).map(|_| k.divisor("extent")).collect();
        let first: Vec<Val<'k, u32>> = (0..3).map(|_| k.scalar("first")).collect();
        let axes: Vec<Axis<'k>> = self.adaptive.iter().map(|&adaptive| Axis::declare(k, adaptive)).collect();
        let mut types = self.types.iter().copied();
        let mut operand = |written: bool| Operand::declare(k, types.next().unwrap_or(DType::F32), written);
        let point = k.cta() * THREADS + k.thread();
        // The position of this thread in the dims of what is written.
        let mut rest = point;
        let mut index = [k.constant(0u32); 5];
        for (&dim, divisor) in self.order[1..].iter().zip(&divisors).rev() {
            let (outer, inner) = divisor.split(rest);
            index[dim] = inner;
            rest = outer;
        }
        index[self.order[0]] = rest;
        let at: Vec<Val<'k, u32>> = (0..3).map(|i| index[i + 2] + first[i]).collect();
        let place = [at[0], at[1], at[2]];
        let number = |value: f64| T::constant(k, value);
        match self.kind {
            Kind::Max { index: wanted } => {
                let (x, y) = (operand(false), operand(true));
                let places = wanted.then(|| operand(true));
                let x = x.plane(&index);
                k.when(point.lt(points), || {
                    let winner = Winner::<T>::find(k, &axes, place, &|at| x.load(at));
                    y.plane(&index).store(place, winner.value(k, y.dtype));
                    if let Some(places) = &places {
                        places.plane(&index).store(place, AnyVal::I64(winner.place.get().widen()));
                    }
                });
            }
            Kind::Average { padded } => {
                let (x, y) = (operand(false), operand(true));
                let x = x.plane(&index);
                k.when(point.lt(points), || {
                    let sum = k.var(number(0.0));
                    let count = k.var(0u32);
                    taps(k, &axes, place, &|at, inside| {
                        k.when(inside, || {
                            sum.set(sum + x.load::<T>(at));
                            count.set(count + 1);
                        });
                    });
                    let count = if padded { window_size(k, &axes, place) } else { count.get() };
                    let mean = T::quotient(sum.get(), T::from_i32(count.signed()));
                    // A window that meets no element.
                    let mean = k.select(count.eq(0), number(0.0), mean);
                    y.plane(&index).store(place, T::wrap(mean));
                });
            }
            Kind::MaxBackward { index: stored } => {
                let dy = operand(false);
                let (x, places) = if stored { (None, Some(operand(false))) } else { (Some(operand(false)), None) };
                let dx = operand(true);
                let dy = dy.plane(&index);
                let x = x.map(|x| x.plane(&index));
                let places = places.map(|places| places.plane(&index));
                let mine = (place[0] * axes[1].extent + place[1]) * axes[2].extent + place[2];
                k.when(point.lt(points), || {
                    let sum = k.var(number(0.0));
                    windows(k, &axes, place, &|out| {
                        let won = match (&places, &x) {
                            (Some(places), _) => places.load_index(out).eq(mine.widen().bitcast::<i64>()),
                            (None, Some(x)) => Winner::<T>::find(k, &axes, out, &|at| x.load(at)).place.eq(mine.signed()),
                            (None, None) => k.constant(false),
                        };
                        k.when(won, || sum.set(sum + dy.load::<T>(out)));
                    });
                    dx.plane(&index).store(place, T::wrap(sum.get()));
                });
            }
            Kind::AverageBackward { padded } => {
                let (dy, dx) = (operand(false), operand(true));
                let dy = dy.plane(&index);
                k.when(point.lt(points), || {
                    let sum = k.var(number(0.0));
                    windows(k, &axes, place, &|out| {
                        let count = if padded { window_size(k, &axes, out) } else { inside_size(k, &axes, out) };
                        let share = T::quotient(dy.load::<T>(out), T::from_i32(count.signed()));
                        sum.set(sum + share);
                    });
                    dx.plane(&index).store(place, T::wrap(sum.get()));
                });
            }
        }
    }
}

/// Windows along one spatial dim.
#[derive(Clone, Debug)]
struct Axis<'k> {
    extent: Val<'k, u32>,
    out: Val<'k, u32>,
    form: AxisForm<'k>,
}

#[derive(Clone, Debug)]
enum AxisForm<'k> {
    Sliding { taps: Val<'k, u32>, stride: Divisor<'k>, dilation: Divisor<'k>, pad: Val<'k, u32> },
    Adaptive { extent: Divisor<'k>, out: Divisor<'k> },
}

impl<'k> Axis<'k> {
    fn declare(k: Kernel<'k>, adaptive: bool) -> Axis<'k> {
        let (extent, out) = (k.scalar("spatial"), k.scalar("out"));
        let form = if adaptive {
            AxisForm::Adaptive { extent: k.divisor("spatial_divisor"), out: k.divisor("out_divisor") }
        } else {
            AxisForm::Sliding { taps: k.scalar("taps"), stride: k.divisor("stride"), dilation: k.divisor("dilation"), pad: k.scalar("pad") }
        };
        Axis { extent, out, form }
    }

    /// The arguments of [`Axis::declare`].
    fn args(extent: u64, out: u64, windows: &Windows) -> Vec<Arg> {
        let mut args = vec![Arg::Scalar(Ty::U32, extent), Arg::Scalar(Ty::U32, out)];
        match *windows {
            Windows::Adaptive => args.extend([Arg::Divisor(extent.max(1) as u32), Arg::Divisor(out.max(1) as u32)]),
            Windows::Sliding { taps, stride, dilation, pad_before } => args.extend([
                Arg::Scalar(Ty::U32, taps),
                Arg::Divisor(stride as u32),
                Arg::Divisor(dilation as u32),
                Arg::Scalar(Ty::U32, pad_before),
            ]),
        }
        args
    }

    /// The first tap of window `o`, how many there are, and the distance between them. A tap in front of the first element is a large number.
    fn window(&self, o: Val<'k, u32>) -> (Val<'k, u32>, Val<'k, u32>, Val<'k, u32>) {
        match &self.form {
            AxisForm::Sliding { taps, stride, dilation, pad } => (o * stride.value() - *pad, *taps, dilation.value()),
            AxisForm::Adaptive { out, .. } => {
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
        match &self.form {
            AxisForm::Sliding { taps, stride, dilation, pad } => {
                let reach = (*taps - 1) * dilation.value();
                let behind = i + *pad;
                // ⌈(behind − reach) / stride⌉, or 0, to ⌊behind / stride⌋.
                let first = k.select(behind.gt(reach), stride.quotient(behind - reach + stride.value() - 1), 0u32);
                let end = (stride.quotient(behind) + 1).min(self.out);
                (first, k.select(end.gt(first), end - first, 0u32))
            }
            AxisForm::Adaptive { extent, .. } => {
                // Window o holds i where ⌊o · extent / out⌋ ≤ i < ⌈(o + 1) · extent / out⌉.
                let first = extent.quotient(i * self.out);
                let end = extent.quotient((i + 1) * self.out + self.extent - 1).min(self.out);
                (first, end - first)
            }
        }
    }

    /// Whether a tap of window `o` is element `i`; windows that [`Axis::holders`] names may step over it.
    fn holds(&self, o: Val<'k, u32>, i: Val<'k, u32>) -> Val<'k, bool> {
        match &self.form {
            AxisForm::Sliding { taps, stride, dilation, pad } => {
                let distance = i + *pad - o * stride.value();
                let (tap, rest) = dilation.split(distance);
                rest.eq(0) & tap.lt(*taps)
            }
            AxisForm::Adaptive { .. } => {
                let (begin, count, _) = self.window(o);
                (i - begin).lt(count)
            }
        }
    }

    /// Taps of window `o` that are elements.
    fn inside(&self, k: Kernel<'k>, o: Val<'k, u32>) -> Val<'k, u32> {
        let (_, count, _) = self.window(o);
        match &self.form {
            AxisForm::Adaptive { .. } => count,
            AxisForm::Sliding { dilation, pad, stride, .. } => {
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

/// Runs `f` for each tap of a window, in row-major order, with whether it is an element.
fn taps<'k>(k: Kernel<'k>, axes: &[Axis<'k>], out: Place<'k>, f: &dyn Fn(Place<'k>, Val<'k, bool>)) {
    let windows: Vec<_> = axes.iter().zip(out).map(|(axis, o)| axis.window(o)).collect();
    let tap = |axis: usize, t: Val<'k, u32>| windows[axis].0 + t * windows[axis].2;
    k.range(windows[0].1, |a| {
        let depth = tap(0, a);
        let in_depth = depth.lt(axes[0].extent);
        k.range(windows[1].1, |b| {
            let height = tap(1, b);
            let in_plane = in_depth & height.lt(axes[1].extent);
            k.range(windows[2].1, |c| {
                let width = tap(2, c);
                f([depth, height, width], in_plane & width.lt(axes[2].extent));
            });
        });
    });
}

/// Runs `f` for each window that holds an element, in row-major order.
fn windows<'k>(k: Kernel<'k>, axes: &[Axis<'k>], at: Place<'k>, f: &dyn Fn(Place<'k>)) {
    let holders: Vec<_> = axes.iter().zip(at).map(|(axis, i)| axis.holders(i)).collect();
    k.range(holders[0].1, |a| {
        let depth = holders[0].0 + a;
        let in_depth = axes[0].holds(depth, at[0]);
        k.range(holders[1].1, |b| {
            let height = holders[1].0 + b;
            let in_plane = in_depth & axes[1].holds(height, at[1]);
            k.range(holders[2].1, |c| {
                let width = holders[2].0 + c;
                k.when(in_plane & axes[2].holds(width, at[2]), || f([depth, height, width]));
            });
        });
    });
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

impl<'k, T: Chained> Winner<'k, T> {
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
            Some((least, _)) => T::wrap(k.select(self.place.lt(0), T::constant(k, least as f64), peak)),
            None => T::wrap(peak),
        }
    }
}

/// An operand: strides over `[n, c, depth, height, width]`, in bytes.
#[derive(Clone, Debug)]
struct Operand<'k> {
    dtype: DType,
    pointer: Pointer<'k>,
    strides: Vec<Val<'k, u64>>,
}

impl<'k> Operand<'k> {
    fn declare(k: Kernel<'k>, dtype: DType, written: bool) -> Operand<'k> {
        let bytes = dtype.bytes() as u32;
        let pointer = if written { k.output("output", bytes) } else { k.input("input", bytes) };
        Operand { dtype, pointer, strides: (0..5).map(|_| k.scalar("stride_bytes")).collect() }
    }

    /// The arguments of [`Operand::declare`], from image and channel `first` on.
    fn args(view: &View, first: [u64; 2]) -> Vec<Arg> {
        let bytes = view.dtype.bytes() as u64;
        let elements = view.offset + first[0] * view.strides[0] + first[1] * view.strides[1];
        let mut args = vec![Arg::Pointer(Address { base: Base::Buffer(view.slot.0 as usize), offset_bytes: elements * bytes })];
        args.extend(view.strides.iter().map(|stride| Arg::Scalar(Ty::U64, stride * bytes)));
        args
    }

    /// The spatial dims of one image and channel.
    fn plane(&self, index: &[Val<'k, u32>; 5]) -> Plane<'k> {
        let address = self.pointer.address() + index[0].widen() * self.strides[0] + index[1].widen() * self.strides[1];
        Plane { dtype: self.dtype, address, strides: [self.strides[2], self.strides[3], self.strides[4]] }
    }
}

#[derive(Clone, Copy, Debug)]
struct Plane<'k> {
    dtype: DType,
    address: Val<'k, u64>,
    strides: [Val<'k, u64>; 3],
}

impl<'k> Plane<'k> {
    fn at(&self, place: Place<'k>) -> Val<'k, u64> {
        place.into_iter().zip(self.strides).fold(self.address, |address, (i, stride)| address + i.widen() * stride)
    }

    fn load<T: Chained>(&self, place: Place<'k>) -> Val<'k, T> {
        let k = self.address.kernel();
        AnyVal::Stored(self.dtype, load_raw(k, self.dtype, self.at(place), 1)[0]).get(k)
    }

    fn load_index(&self, place: Place<'k>) -> Val<'k, i64> {
        match load_raw(self.address.kernel(), self.dtype, self.at(place), 1)[0] {
            Raw::B64(bits) => bits.bitcast(),
            Raw::B32(bits) => bits.signed().widen(),
            Raw::B16(bits) => bits.convert(CvtRound::None),
            Raw::B8(bits) => bits.signed().widen(),
        }
    }

    fn store(&self, place: Place<'k>, value: AnyVal<'k>) {
        let k = self.address.kernel();
        store_raw(k, self.at(place), &[value.encoded(k, self.dtype)]);
    }
}

/// An accepted problem.
#[derive(Clone, Debug)]
struct Accepted {
    problem: PoolProblem,
    arch: Arch,
}

impl Accepted {
    fn spec(&self) -> Spec {
        let p = &self.problem;
        let kind = match (&p.pass, p.mode) {
            (PoolPass::Forward { index, .. }, PoolMode::Max) => Kind::Max { index: index.is_some() },
            (PoolPass::Forward { .. }, PoolMode::Average { count_include_pad }) => Kind::Average { padded: count_include_pad },
            (PoolPass::Backward { index, .. }, PoolMode::Max) => Kind::MaxBackward { index: index.is_some() },
            (PoolPass::Backward { .. }, PoolMode::Average { count_include_pad }) => Kind::AverageBackward { padded: count_include_pad },
        };
        let (written, dims) = self.written();
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

    fn written(&self) -> (&View, [u64; 5]) {
        match &self.problem.pass {
            PoolPass::Forward { y, .. } => (y, self.problem.y_dims()),
            PoolPass::Backward { dx, .. } => (dx, self.problem.x_dims()),
        }
    }

    fn us(&self) -> f64 {
        let bytes: f64 = (self.problem.operands().into_iter())
            .map(|(_, view, dims, _)| dims.iter().map(|&dim| dim as f64).product::<f64>() * view.dtype.bytes() as f64)
            .sum();
        // Some ten instructions for each tap, of which an SM starts 128 lanes' a cycle.
        let taps_us = self.problem.flops() * 10.0 / (f64::from(self.arch.sm_count) * 128.0 * 1.7e3);
        3.0 + (1.3 * bytes / (self.arch.memory_gb_per_s * 1e3)).max(taps_us)
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
        Ok(Cost { us: self.us(), leaves_out: "windows that meet in caches, strided reads" })
    }

    fn program(&self, knobs: &Knobs) -> Result<Program, Refusal> {
        ID.require(*knobs == Knobs::default(), Reason::Knobs, format_args!("{knobs}, there are no knobs"))?;
        let p = &self.problem;
        let mut alignments = vec![1; p.slots().len()];
        for (_, view, ..) in p.operands() {
            alignments[view.slot.0 as usize] = view.dtype.bytes() as u64;
        }
        let mut program = Program { buffer_alignment_bytes: alignments, ..Program::default() };
        if p.is_empty() {
            return Ok(program);
        }
        let spec = self.spec();
        let kernel = spec.clone().kernel();
        let (_, dims) = self.written();
        let ordered: Vec<u64> = spec.order.iter().map(|&dim| dims[dim]).collect();
        for region in Region::all(&ordered, 1) {
            let mut first = [0; 5];
            spec.order.iter().zip(&region.first).for_each(|(&dim, &at)| first[dim] = at);
            let mut args = vec![Arg::Scalar(Ty::U32, region.points(1).into())];
            args.extend(region.extents[1..].iter().map(|&extent| Arg::Divisor(extent)));
            args.extend(first[2..].iter().map(|&at| Arg::Scalar(Ty::U32, at)));
            args.extend((0..3).flat_map(|i| Axis::args(p.extents[i], p.out[i], &p.windows[i])));
            for (_, view, ..) in p.operands() {
                args.extend(Operand::args(view, [first[0], first[1]]));
            }
            program.steps.push(Step::Launch(Launch {
                kernel: kernel.clone(),
                grid: [region.points(1).div_ceil(THREADS), 1, 1],
                residency: Residency::Any,
                overlap: false,
                args: args.into(),
            }));
        }
        Ok(program)
    }
}
