//! The kernels: sums over the channels of a part, the parts joined, the result; and all three behind each other in one launch, with barriers of the grid
//! or by CTAs that have whole channels.
//!
//! **Thread coordinates.** A *point* is a row (an element of the channel) or, along planes, a vector of neighbouring rows. The threads of a CTA stand
//! `across` along channels, a vector of neighbours each, and the others along points; along planes a CTA has one channel. A CTA goes through a
//! *part* of the points, and the grid through channel blocks and parts. Along *images* the elements of an image's channels, one plane behind the other, stand
//! in the place of channels: each is summed over images, and the join adds up those of a plane.
//!
//! **Statistics** of a thread are [`Moments`]; its channels' first elements of the part serve as the shift that the CTA's threads share.

use verdigris_graph::{BinaryOp, UnaryOp};
use verdigris_kir::face::{AsVal, Header, Kernel, Pointer, Val, build};
use verdigris_kir::inst::{Cache, Special};
use verdigris_kir::ir::KernelBody;
use verdigris_kir::params::{Arguments, Divide, Parameter, Read, ReadWrite, Write};
use verdigris_kir::program::{Address, KernelRef};
use verdigris_kir::tile::grid_barrier::GridBarrier;

use super::kept::{EachTurn, Room};
use super::operands::{Name, Whole, WholeArgs};
use super::spec::{Form, Pass, Spec, Stage, THREADS, UNROLL, WARPS};
use crate::fuse::compute::Compute;
use crate::fuse::operand::OperandArgs;
use crate::fuse::steps::Number;
use crate::fuse::strided::Strided;
use crate::fuse::value::AnyVal;
use crate::fuse::{functions, lanes};
use crate::layout::space::{Extents, Space};
use crate::sums::moments::{Moments, pairwise};

impl Spec {
    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas: self.ctas_per_sm(), cluster: 1 };
        build(header, |k| if self.double { self.body::<f64>(k) } else { self.body::<f32>(k) })
    }

    fn body<'k, T: Compute>(&self, k: Kernel<'k>) {
        let values = Values::declare(k, self);
        if self.overlaps {
            k.griddep_wait();
            k.griddep_launch();
        }
        let run = Run::new(k, self, values);
        match self.stage {
            Stage::Sums => run.sums::<T>(&run.tile(k.cta())),
            Stage::Join => run.join::<T>(k.cta() * WARPS, run.values.channels, k.special(Special::GridX)),
            // The parts that were read last may still lie in L2: they come first.
            Stage::Apply => run.apply::<T>(&run.tile(k.special(Special::GridX) - 1 - k.cta())),
            Stage::Fused => {
                let tile = run.tile(k.cta());
                run.sums::<T>(&tile);
                run.wait_for_all(1);
                run.join::<T>(k.cta() * WARPS, run.values.channels, k.special(Special::GridX));
                if self.pass != Pass::Statistics {
                    run.wait_for_all(2);
                    run.apply::<T>(&tile);
                }
            }
            Stage::Alone => {
                let tile = run.tile(k.cta());
                run.sums::<T>(&tile);
                if self.pass != Pass::Statistics {
                    // What the threads that joined a channel have kept is read by all.
                    k.bar_sync();
                    run.apply::<T>(&tile);
                }
            }
            Stage::Kept => run.rounds::<T>(),
        }
    }
}

/// A barrier of the grid.
#[derive(Clone, Copy, Debug)]
pub(super) enum Arrivals {}

impl Parameter for Arrivals {
    type Spec = ();
    type Value<'k> = GridBarrier<'k>;
    type Argument = Address;

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, name: &'static str, (): &()) -> GridBarrier<'k> {
        GridBarrier::declare(k, name)
    }

    fn bind(counter: Address, name: &'static str, (): &(), to: &mut Arguments) {
        ReadWrite::bind(counter, name, &4, to);
    }
}

verdigris_kir::parameters! {
    /// Of every stage.
    pub(super) struct Values / KernelArgs of Spec as spec {
        /// Along images, the elements of all channels' planes; of a join the channels.
        pub channels: u32,
        /// Elements of a plane, by which the number of an element of an image becomes its channel's.
        pub plane: Option<Divide> = spec.is_image().then_some(()),
        /// Channel blocks, by which the number of a CTA becomes block and part; where teams take several, the CTAs of a team.
        pub blocks: Divide,
        /// Teams, and the blocks of all.
        pub teams: Option<[u32; 2]> = (spec.stage == Stage::Kept).then_some(()),
        /// All of a channel; of a join, whose points have one element each, the elements.
        pub points: u32,
        /// Of all parts but the last.
        pub points_of_part: u32,
        pub parts: u32,
        /// Elements of a channel.
        pub count: f64,
        pub eps: f64,
        /// The part of the new running statistics that is the old ones', and the batch's.
        pub kept: f64,
        pub taken: f64,
        /// Of the rows; the innermost counts in points.
        pub extents: Extents = spec.rank,
        pub wholes: Vec<WholeArgs> = spec.wholes(),
        pub vectors: Vec<OperandArgs> = spec.vectors(),
        /// Two arrays `[channels, parts]`.
        pub parts_to: Option<[Write; 2]> = spec.array(0),
        pub parts_from: Option<[Read; 2]> = spec.array(1),
        /// Two arrays `[channels]`.
        pub joined_to: Option<[Write; 2]> = spec.array(2),
        pub joined_from: Option<[Read; 2]> = spec.array(3),
        /// Which of the activations it is, and its attributes.
        pub activation: Option<u32> = (spec.activations.len() > 1).then_some(()),
        pub attributes: Vec<Number> = vec![spec.double; spec.attributes()],
        pub arrivals: Option<Arrivals> = matches!(spec.stage, Stage::Fused | Stage::Kept).then_some(()),
    }
}

/// The tile of a CTA, and the thread's place in it.
pub(super) struct Tile<'k> {
    pub block: Val<'k, u32>,
    pub part: Val<'k, u32>,
    /// The thread's first channel, and whether there is one; else the last ones that there are.
    pub channel: Val<'k, u32>,
    pub inside: Val<'k, bool>,
    /// The thread along channels, and along points.
    pub column: Val<'k, u32>,
    pub line: Val<'k, u32>,
    /// The points of the part.
    pub begin: Val<'k, u32>,
    pub end: Val<'k, u32>,
    /// What is kept of the part.
    pub room: Option<Room<'k>>,
}

/// What normalizes a channel.
struct Factors<'k, T> {
    mean: Val<'k, T>,
    /// `inv · scale`.
    factor: Val<'k, T>,
    bias: Option<Val<'k, T>>,
}

impl<'k, T: Compute> Factors<'k, T> {
    /// `(x − mean) · factor + bias`: the same instructions forward and backward, so that both see the same sign.
    fn normalized(&self, x: Val<'k, T>) -> Val<'k, T> {
        let k = x.kernel();
        let centred = x - self.mean;
        match self.bias {
            Some(bias) => k.fma(centred, self.factor, bias),
            None => centred * self.factor,
        }
    }
}

/// A kernel being built.
pub(super) struct Run<'s, 'k> {
    pub k: Kernel<'k>,
    pub spec: &'s Spec,
    pub values: Values<'k>,
    space: Space<'k>,
    wholes: Vec<(Name, Whole<'k>)>,
    vectors: Vec<(Name, Strided<'k>)>,
}

/// A point's elements of one operand.
pub(super) type Elements<'k> = Vec<AnyVal<'k>>;

impl<'s, 'k> Run<'s, 'k> {
    fn new(k: Kernel<'k>, spec: &'s Spec, mut values: Values<'k>) -> Self {
        let of = |whole: bool| spec.operands.iter().filter(move |(name, _)| name.is_whole() == whole);
        let declared = std::mem::take(&mut values.wholes);
        let wholes = of(true).zip(declared).map(|(&(name, dtype), value)| (name, Whole::new(dtype, spec.vector, value))).collect();
        let declared = std::mem::take(&mut values.vectors);
        let vectors = of(false).zip(declared).map(|(&(name, dtype), value)| (name, Strided::new(dtype, value))).collect();
        let space = values.extents.clone();
        Run { k, spec, values, space, wholes, vectors }
    }

    fn vector(&self, name: Name) -> Option<&Strided<'k>> {
        self.vectors.iter().find(|(known, _)| *known == name).map(|(_, vector)| vector)
    }

    /// An operand from the thread's channels on.
    fn whole(&self, name: Name, tile: &Tile<'k>) -> Option<Whole<'k>> {
        self.wholes.iter().find(|(known, _)| *known == name).map(|(_, whole)| whole.at_channel(tile.channel))
    }

    /// As [`Run::whole`], of what every such kernel has.
    fn must(&self, name: Name, tile: &Tile<'k>) -> Whole<'k> {
        self.whole(name, tile).expect("an operand that the pass always has")
    }

    /// How results are stored: what is kept until it is read again stays in L2 before them.
    fn stored(&self) -> Cache {
        if self.spec.stage == Stage::Kept { Cache::Streaming } else { Cache::Default }
    }

    fn number<T: Compute>(&self, value: f64) -> Val<'k, T> {
        T::constant(self.k, value)
    }

    fn tile(&self, cta: Val<'k, u32>) -> Tile<'k> {
        let (part, block) = self.values.blocks.split(cta);
        self.tile_of(block, part)
    }

    pub(super) fn tile_of(&self, block: Val<'k, u32>, part: Val<'k, u32>) -> Tile<'k> {
        let (k, spec, values) = (self.k, self.spec, &self.values);
        let shift = spec.across().ilog2();
        let (column, line) = (k.thread() & (spec.across() - 1), k.thread() >> shift);
        let many = spec.channels_of_thread();
        let channel = block * spec.width() + column * many;
        let begin = part * values.points_of_part;
        let end = (begin + values.points_of_part).min(values.points);
        let inside = channel.lt(values.channels);
        Tile { block, part, channel: channel.min(values.channels - many), inside, column, line, begin, end, room: None }
    }

    /// The index of a point.
    pub(super) fn index(&self, point: Val<'k, u32>) -> Vec<Val<'k, u32>> {
        let mut index = self.space.index(point);
        if let (Some(inner), Form::Planes) = (index.last_mut(), self.spec.form) {
            *inner = *inner * self.spec.vector;
        }
        index
    }

    /// Runs `f` for the thread's points, several at a time, with what operands have there: the first time, or once more for the result.
    fn walk(&self, tile: &Tile<'k>, again: bool, from: &[&Whole<'k>], f: EachTurn<'_, 'k>) {
        match &tile.room {
            Some(room) => self.walk_kept(tile, room, again, from, f),
            None => self.turns(tile, again, |points| {
                let load = |from: &&Whole<'k>| points.iter().map(|index| from.load(index)).collect();
                f(points, &from.iter().map(load).collect::<Vec<_>>());
            }),
        }
    }

    /// Runs `f` for the indices of the thread's points, several at a time; in reverse, the last turns come first.
    fn turns(&self, tile: &Tile<'k>, reverse: bool, f: impl Fn(&[Vec<Val<'k, u32>>])) {
        let (k, spec) = (self.k, self.spec);
        let lines = spec.lines();
        let span = lines * UNROLL;
        let whole = (tile.end - tile.begin) & !(span - 1);
        let first = tile.begin + tile.line;
        let turn = |at: Val<'k, u32>| {
            let points: Vec<_> = (0..UNROLL).map(|i| self.index(first + at + i * lines)).collect();
            f(&points);
        };
        let rest = || k.range_step(first + whole, tile.end, lines, |point| f(&[self.index(point)]));
        if reverse {
            rest();
            k.range_step(0, whole, span, |at| turn(whole - span - at));
        } else {
            k.range_step(0, whole, span, turn);
            rest();
        }
    }

    /// The values of each of the thread's channels, of several points.
    fn by_channel<T: Compute>(&self, points: &[Elements<'k>]) -> Vec<Vec<Val<'k, T>>> {
        let k = self.k;
        match self.spec.form {
            Form::Planes => vec![points.iter().flatten().map(|value| value.get(k)).collect()],
            Form::Lines { .. } | Form::Images { .. } => {
                (0..self.spec.vector as usize).map(|channel| points.iter().map(|point| point[channel].get(k)).collect()).collect()
            }
        }
    }

    /// The channel that stands in a place along channels.
    fn channel_at(&self, place: Val<'k, u32>) -> Val<'k, u32> {
        self.values.plane.as_ref().map_or(place, |plane| plane.split(place).0)
    }

    /// The channel of an element of a point, among the thread's.
    fn channel_of(&self, element: usize) -> usize {
        if self.spec.form == Form::Planes { 0 } else { element }
    }

    // ---- sums -----------------------------------------------------------------------------------------------------------

    pub(super) fn sums<T: Compute>(&self, tile: &Tile<'k>) {
        if self.spec.pass == Pass::Backward { self.gradient_sums::<T>(tile) } else { self.moments::<T>(tile) }
    }

    fn moments<T: Compute>(&self, tile: &Tile<'k>) {
        let (k, spec) = (self.k, self.spec);
        let x = self.must(Name::X, tile);
        let many = spec.channels_of_thread();
        // The elements of the part's first row serve as the shift of all its threads.
        let shift = x.load_many(&self.index(tile.begin), many).into_iter().map(|value| value.get::<T>(k)).collect();
        let moments = Moments::new(k, shift);
        self.walk(tile, false, &[&x], &|_, loaded| moments.take(&self.by_channel(&loaded[0])));
        let zero = self.number::<T>(0.0);
        let means: Vec<Val<'k, T>> = moments.mean.iter().map(|mean| mean.get()).collect();
        let m2s: Vec<Val<'k, T>> = moments.m2.iter().map(|m2| m2.get()).collect();
        let elements = |points: Val<'k, u32>| T::from_i32((points * spec.elements_of_point()).signed());
        let length = tile.end - tile.begin;
        // Points of the thread that stands `line` along them.
        let of_line = |line: Val<'k, u32>| elements((length + (spec.lines() - 1) - line) >> spec.lines().ilog2());
        let whole = elements(length);
        match spec.form {
            Form::Planes => {
                let add = |x: Val<'k, T>, y: Val<'k, T>| x + y;
                let own = of_line(tile.line);
                let mean = T::quotient(lanes::over_team(k, THREADS, own * means[0], &add), whole);
                let apart = means[0] - mean;
                let m2 = lanes::over_team(k, THREADS, k.fma(own * apart, apart, m2s[0]), &add);
                k.when(k.thread().eq(0), || self.store_part(tile, tile.block, [moments.shift[0] + mean, m2]));
            }
            Form::Lines { .. } | Form::Images { .. } => self.over_lines(tile, [&means, &m2s], |columns, each| {
                let sum = k.var(zero);
                each(&|line, [mean, _]| sum.set(k.fma(of_line(line), mean, sum.get())));
                let mean = T::quotient(sum.get(), whole);
                let m2 = k.var(zero);
                each(&|line, [own, own_m2]| {
                    let apart = own - mean;
                    m2.set(m2.get() + k.fma(of_line(line) * apart, apart, own_m2));
                });
                // The shift is read again by whoever has the channel here.
                let shift = self.whole_at(Name::X, columns).load_many(&self.space.index(tile.begin), 1)[0].get::<T>(k);
                self.store_part(tile, columns, [shift + mean, m2.get()]);
            }),
        }
    }

    fn gradient_sums<T: Compute>(&self, tile: &Tile<'k>) {
        let (k, spec) = (self.k, self.spec);
        let (dy, x, y, dadd) =
            (self.must(Name::Dy, tile), self.must(Name::X, tile), self.whole(Name::Y, tile), self.whole(Name::Dadd, tile));
        let factors = self.factors::<T>(tile);
        let zeros = || (0..spec.channels_of_thread()).map(|_| k.var(self.number::<T>(0.0))).collect::<Vec<_>>();
        let (plain, weighted) = (zeros(), zeros());
        let from: Vec<&Whole<'k>> = [&dy, &x].into_iter().chain(&y).collect();
        self.walk(tile, false, &from, &|points, loaded| {
            let (dy, x, y) = (&loaded[0], &loaded[1], loaded.get(2));
            let passed = |point: usize| self.passed::<T>(&factors, &dy[point], &x[point], y.map(|y| &y[point]));
            let g: Vec<Elements<'k>> = (0..points.len()).map(passed).collect();
            if let Some(dadd) = &dadd {
                for (index, g) in points.iter().zip(&g) {
                    k.when(tile.inside, || dadd.store(index, g, self.stored()));
                }
            }
            let (g, x) = (self.by_channel::<T>(&g), self.by_channel::<T>(x));
            for channel in 0..plain.len() {
                plain[channel].set(plain[channel].get() + pairwise(&g[channel]));
                let mean = factors[channel].mean;
                let products = g[channel].iter().zip(&x[channel]);
                weighted[channel].set(products.fold(weighted[channel].get(), |sum, (&g, &x)| k.fma(g, x - mean, sum)));
            }
        });
        let zero = self.number::<T>(0.0);
        let plain: Vec<Val<'k, T>> = plain.iter().map(|sum| sum.get()).collect();
        let weighted: Vec<Val<'k, T>> = weighted.iter().map(|sum| sum.get()).collect();
        match spec.form {
            Form::Planes => {
                let add = |x: Val<'k, T>, y: Val<'k, T>| x + y;
                let of_warps = [plain[0], weighted[0]].map(|sum| lanes::over_lanes(k, 32, sum, &add));
                let sums = lanes::over_warps(k, THREADS, of_warps, &|[a, b], [c, d]| [a + c, b + d]);
                k.when(k.thread().eq(0), || self.store_part(tile, tile.block, sums));
            }
            Form::Lines { .. } | Form::Images { .. } => self.over_lines(tile, [&plain, &weighted], |columns, each| {
                let sums = [k.var(zero), k.var(zero)];
                each(&|_, parts| sums.iter().zip(parts).for_each(|(sum, part)| sum.set(sum.get() + part)));
                self.store_part(tile, columns, [sums[0].get(), sums[1].get()]);
            }),
        }
    }

    /// Has a thread join what the lines of threads know of each channel of the CTA: `f` gets the channel, and a function that runs another for each
    /// line with its two values.
    fn over_lines<T: Compute>(
        &self,
        tile: &Tile<'k>,
        values: [&[Val<'k, T>]; 2],
        f: impl Fn(Val<'k, u32>, &dyn Fn(&dyn Fn(Val<'k, u32>, [Val<'k, T>; 2]))),
    ) {
        let (k, spec) = (self.k, self.spec);
        let (lines, width, bytes) = (spec.lines(), spec.width(), spec.bytes());
        let array = lines * width * bytes;
        let shared = k.shared("lines", 2 * array, 16).address();
        let place = shared + (tile.line * width + tile.column * spec.channels_of_thread()) * bytes;
        let at_once = ((16 / bytes) as usize).min(values[0].len());
        for (number, values) in values.iter().enumerate() {
            for (chunk, values) in values.chunks(at_once).enumerate() {
                let offset = i64::from(number as u32 * array + (chunk * at_once) as u32 * bytes);
                match values {
                    [value] => k.st_shared(place, offset, *value),
                    values => k.st_shared_vector(place, offset, values),
                }
            }
        }
        k.bar_sync();
        let own = tile.block * width + k.thread();
        k.when(k.thread().lt(width) & own.lt(self.values.channels), || {
            let column = shared + k.thread() * bytes;
            f(own, &|each| {
                k.range_unrolled(lines, lines.min(8), |line| {
                    let at = column + line * (width * bytes);
                    each(line, [k.ld_shared(at, 0), k.ld_shared(at, i64::from(array))]);
                });
            });
        });
    }

    /// An operand from a channel on.
    fn whole_at(&self, name: Name, channel: Val<'k, u32>) -> Whole<'k> {
        let whole = self.wholes.iter().find(|(known, _)| *known == name);
        whole.map(|(_, whole)| whole.at_channel(channel)).expect("an operand that the pass always has")
    }

    /// Leaves the sums of a part; those of a CTA that has whole channels are the channel's.
    fn store_part<T: Compute>(&self, tile: &Tile<'k>, channel: Val<'k, u32>, values: [Val<'k, T>; 2]) {
        let k = self.k;
        if self.spec.stage == Stage::Alone {
            return match (self.spec.pass, values) {
                (Pass::Backward, sums) => self.finish_gradients(channel, sums),
                (_, [mean, m2]) => self.finish_statistics(channel, mean, m2),
            };
        }
        let Some(to) = self.values.parts_to else { return };
        let at = (channel.mul_wide(self.values.parts) + tile.part.widen()) * u64::from(T::TY.bytes());
        for (to, value) in to.into_iter().zip(values) {
            k.st_global(to.address() + at, 0, value);
        }
    }

    // ---- the parts joined -------------------------------------------------------------------------------------------------

    /// Waits until all CTAs have come here for the `times`-th time.
    fn wait_for_all(&self, times: u32) {
        if let Some(arrivals) = self.values.arrivals {
            self.wait_at(arrivals, times);
        }
    }

    /// Waits until all CTAs of a barrier have come here for the `times`-th time.
    pub(super) fn wait_at(&self, arrivals: GridBarrier<'k>, times: impl AsVal<'k, u32>) {
        let (k, times) = (self.k, times.operand_val(self.k));
        k.bar_sync();
        k.when(k.thread().eq(0), || {
            arrivals.arrive();
            arrivals.wait(times);
        });
        k.bar_sync();
    }

    /// A warp a channel, from the CTA's first one up to `end`, of which so many CTAs take their turns.
    pub(super) fn join<T: Compute>(&self, first: Val<'k, u32>, end: Val<'k, u32>, ctas: Val<'k, u32>) {
        let (k, spec, values) = (self.k, self.spec, &self.values);
        let Some(from) = values.parts_from else { return };
        let bytes = u64::from(spec.bytes());
        let warp = k.uniform(k.thread() >> 5);
        let add = |x: Val<'k, T>, y: Val<'k, T>| x + y;
        k.range_step(first + warp, end, ctas * WARPS, |channel| {
            let base = channel.mul_wide(values.parts);
            let load = |which: usize, part: Val<'k, u32>| k.ld_global::<T>(from[which].address() + (base + part.widen()) * bytes, 0);
            let over = |f: &dyn Fn(Val<'k, u32>) -> Val<'k, T>| {
                let sum = k.var(self.number::<T>(0.0));
                k.range_unrolled((values.parts + 31 - k.lane()) >> 5, 4, |turn| sum.set(sum.get() + f(k.lane() + turn * 32)));
                lanes::over_lanes(k, 32, sum.get(), &add)
            };
            if spec.pass == Pass::Backward {
                let sums = [over(&|part| load(0, part)), over(&|part| load(1, part))];
                k.when(k.lane().eq(0), || self.finish_gradients(channel, sums));
                return;
            }
            let elements = |part: Val<'k, u32>| {
                let points = (values.points - part * values.points_of_part).min(values.points_of_part);
                T::from_i32((points * spec.elements_of_point()).signed())
            };
            let count = T::from_f64(values.count);
            // Differences from one of them, so that means far from 0 lose nothing.
            let first = load(0, k.constant(0));
            let mean = first + T::quotient(over(&|part| elements(part) * (load(0, part) - first)), count);
            let m2 = over(&|part| {
                let apart = load(0, part) - mean;
                k.fma(elements(part) * apart, apart, load(1, part))
            });
            let m2 = T::max_nan(m2, self.number(0.0));
            k.when(k.lane().eq(0), || self.finish_statistics(channel, mean, m2));
        });
    }

    fn store<T: Compute>(&self, name: Name, channel: Val<'k, u32>, value: Val<'k, T>) {
        if let Some(to) = self.vector(name) {
            to.store(&[channel], AnyVal::of(value));
        }
    }

    fn keep<T: Compute>(&self, channel: Val<'k, u32>, kept: [Val<'k, T>; 2]) {
        let Some(to) = self.values.joined_to else { return };
        for (to, value) in to.into_iter().zip(kept) {
            self.k.st_global(to.at(channel, T::TY.bytes()), 0, value);
        }
    }

    fn finish_statistics<T: Compute>(&self, channel: Val<'k, u32>, mean: Val<'k, T>, m2: Val<'k, T>) {
        let (k, values) = (self.k, &self.values);
        self.store(Name::Mean, channel, mean);
        self.store(Name::M2, channel, m2);
        if self.spec.pass == Pass::Statistics {
            return;
        }
        let count = T::from_f64(values.count);
        let inv = T::quotient(self.number(1.0), T::sqrt(T::quotient(m2, count) + T::from_f64(values.eps)));
        self.store(Name::Inv, channel, inv);
        self.keep(channel, [mean, inv]);
        let next = |running: Name, next: Name, batch: Val<'k, T>| {
            let Some(running) = self.vector(running) else { return };
            let kept = running.load::<T>(&[channel]) * T::from_f64(values.kept);
            self.store(next, channel, k.fma(batch, T::from_f64(values.taken), kept));
        };
        next(Name::RunningMean, Name::NextMean, mean);
        next(Name::RunningVar, Name::NextVar, T::quotient(m2, count - self.number(1.0)));
    }

    fn finish_gradients<T: Compute>(&self, channel: Val<'k, u32>, [plain, weighted]: [Val<'k, T>; 2]) {
        let inv = self.vector(Name::Inv).map_or(self.number(1.0), |inv| inv.load::<T>(&[channel]));
        let weighted = weighted * inv;
        self.store(Name::Dbias, channel, plain);
        self.store(Name::Dscale, channel, weighted);
        self.keep(channel, [plain, weighted]);
    }

    // ---- the result -------------------------------------------------------------------------------------------------------

    pub(super) fn apply<T: Compute>(&self, tile: &Tile<'k>) {
        if self.spec.pass == Pass::Backward { self.input_gradient::<T>(tile) } else { self.normalize::<T>(tile) }
    }

    /// What was joined of the thread's channels.
    fn joined<T: Compute>(&self, tile: &Tile<'k>) -> [Vec<Val<'k, T>>; 2] {
        let (k, many) = (self.k, self.spec.channels_of_thread());
        let from = self.values.joined_from.expect("a stage behind the join reads it");
        let at_once = (16 / T::TY.bytes()).min(many);
        if self.spec.is_image() {
            let load = |from: Pointer<'k>, i: u32| k.ld_global::<T>(from.at(self.channel_at(tile.channel + i), T::TY.bytes()), 0);
            return from.map(|from| (0..many).map(|i| load(from, i)).collect());
        }
        from.map(|from| {
            let address = from.at(tile.channel, T::TY.bytes());
            (0..many)
                .step_by(at_once as usize)
                .flat_map(|first| {
                    let offset = i64::from(first * T::TY.bytes());
                    if at_once == 1 {
                        return vec![k.ld_global::<T>(address, offset)];
                    }
                    k.ld_global_vector::<T>(address, offset, at_once as u8, Cache::Default)
                })
                .collect()
        })
    }

    /// What normalizes the thread's channels, of mean and `inv` that are given.
    fn factors_of<T: Compute>(&self, tile: &Tile<'k>, mean: &[Val<'k, T>], inv: Option<&[Val<'k, T>]>) -> Vec<Factors<'k, T>> {
        let many = self.spec.channels_of_thread();
        let load = |name: Name, i: u32| self.vector(name).map(|vector| vector.load::<T>(&[self.channel_at(tile.channel + i)]));
        let one = self.number::<T>(1.0);
        (0..many)
            .map(|i| {
                let inv = inv.map_or(one, |inv| inv[i as usize]);
                let factor = load(Name::Scale, i).map_or(inv, |scale| inv * scale);
                Factors { mean: mean[i as usize], factor, bias: load(Name::Bias, i) }
            })
            .collect()
    }

    /// Those of a gradient, whose mean and `inv` are operands; without `inv` where nobody needs it.
    fn factors<T: Compute>(&self, tile: &Tile<'k>) -> Vec<Factors<'k, T>> {
        let many = self.spec.channels_of_thread();
        let load = |name: Name| {
            let vector = self.vector(name)?;
            Some((0..many).map(|i| vector.load::<T>(&[self.channel_at(tile.channel + i)])).collect::<Vec<_>>())
        };
        let mean = load(Name::Mean).expect("a gradient reads the mean");
        self.factors_of(tile, &mean, load(Name::Inv).as_deref())
    }

    fn normalize<T: Compute>(&self, tile: &Tile<'k>) {
        let (k, spec) = (self.k, self.spec);
        let (x, add, y) = (self.must(Name::X, tile), self.whole(Name::Add, tile), self.must(Name::Y, tile));
        let [mean, inv] = self.joined::<T>(tile);
        let factors = self.factors_of(tile, &mean, Some(&inv));
        let from: Vec<&Whole<'k>> = [&x].into_iter().chain(&add).collect();
        let attributes = self.attributes::<T>();
        self.walk(tile, true, &from, &|points, loaded| {
            let (x, added) = (&loaded[0], loaded.get(1));
            for (point, index) in points.iter().enumerate() {
                let values: Vec<Val<'k, T>> = (x[point].iter().enumerate())
                    .map(|(i, x)| {
                        let value = factors[self.channel_of(i)].normalized(x.get::<T>(k));
                        added.map_or(value, |added| value + added[point][i].get::<T>(k))
                    })
                    .collect();
                let values = match spec.relu {
                    true => values.into_iter().map(|value| T::max_nan(value, self.number(0.0))).collect(),
                    false => self.by_activation(&values, &|f, i| functions::unary(f, values[i], &attributes)),
                };
                let results: Elements<'k> = values.into_iter().map(AnyVal::of).collect();
                k.when(tile.inside, || y.store(index, &results, self.stored()));
            }
        });
    }

    /// The attributes of the activation.
    fn attributes<T: Compute>(&self) -> Vec<Val<'k, T>> {
        self.values.attributes.iter().map(|&attribute| AnyVal::Number(attribute).get(self.k)).collect()
    }

    /// What a function of the activation and of an element's place gives for each element; where there is no activation, the elements as they are.
    fn by_activation<T: Compute>(&self, elements: &[Val<'k, T>], each: &dyn Fn(UnaryOp, usize) -> Val<'k, T>) -> Vec<Val<'k, T>> {
        let k = self.k;
        match (self.values.activation, self.spec.activations.as_slice()) {
            (_, []) => elements.to_vec(),
            (Some(which), all) => {
                let results: Vec<_> = elements.iter().map(|_| k.var(self.number::<T>(0.0))).collect();
                self.branch(which, 0, all, &|f| results.iter().enumerate().for_each(|(i, result)| result.set(each(f, i))));
                results.iter().map(|result| result.get()).collect()
            }
            (None, [f, ..]) => (0..elements.len()).map(|i| each(*f, i)).collect(),
        }
    }

    /// Runs `f` for one of the activations, the first of which has this number. All threads of the grid take the same branch.
    fn branch(&self, which: Val<'k, u32>, number: u32, activations: &[UnaryOp], f: &dyn Fn(UnaryOp)) {
        match activations {
            [] => {}
            [last] => f(*last),
            [first, others @ ..] => {
                self.k.when_else(which.eq(number), || f(*first), || self.branch(which, number + 1, others, f));
            }
        }
    }

    /// `g` of a point: `dy` where the result was above 0, else 0; with another activation, `dy` times its slope.
    fn passed<T: Compute>(
        &self,
        factors: &[Factors<'k, T>],
        dy: &Elements<'k>,
        x: &Elements<'k>,
        y: Option<&Elements<'k>>,
    ) -> Elements<'k> {
        let (k, spec) = (self.k, self.spec);
        if !spec.activations.is_empty() {
            let attributes = self.attributes::<T>();
            let values: Vec<Val<'k, T>> = dy.iter().map(|dy| dy.get(k)).collect();
            let results: Vec<Val<'k, T>> =
                x.iter().enumerate().map(|(i, x)| factors[self.channel_of(i)].normalized(x.get::<T>(k))).collect();
            let passed = self.by_activation(&values, &|f, i| functions::binary(BinaryOp::Backward(f), values[i], results[i], &attributes));
            return passed.into_iter().map(AnyVal::of).collect();
        }
        if !spec.relu {
            return dy.clone();
        }
        let zero = self.number::<T>(0.0);
        let each = dy.iter().zip(x).enumerate().map(|(i, (dy, x))| {
            let result = match y {
                Some(y) => y[i].get::<T>(k),
                None => factors[self.channel_of(i)].normalized(x.get::<T>(k)),
            };
            AnyVal::of(k.select(result.gt(zero), dy.get::<T>(k), zero))
        });
        each.collect()
    }

    fn input_gradient<T: Compute>(&self, tile: &Tile<'k>) {
        let k = self.k;
        let (x, y, Some(dx)) = (self.must(Name::X, tile), self.whole(Name::Y, tile), self.whole(Name::Dx, tile)) else { return };
        // What the sums left of dy behind ReLU, where they stored it; dy itself otherwise.
        let left = self.whole(Name::Dadd, tile).filter(|_| self.spec.stage == Stage::Apply);
        let is_left = left.is_some();
        let dy = left.unwrap_or_else(|| self.must(Name::Dy, tile));
        let factors = self.factors::<T>(tile);
        let [dbias, dscale] = self.joined::<T>(tile);
        let share = T::quotient(self.number(-1.0), T::from_f64(self.values.count));
        let inv = self.vector(Name::Inv).expect("a gradient reads inv");
        // dx = factor · g + offset + (x − mean) · inv · slope. The slope of x − mean itself leaves f32's range with inv's square, where dx is far from its ends.
        let lines: Vec<[Val<'k, T>; 3]> = (0..factors.len())
            .map(|i| {
                let of_channel = factors[i].factor * share;
                let inv = inv.load::<T>(&[self.channel_at(tile.channel + i as u32)]);
                [of_channel * dbias[i], inv, of_channel * dscale[i]]
            })
            .collect();
        let from: Vec<&Whole<'k>> = [&dy, &x].into_iter().chain(&y).collect();
        self.walk(tile, true, &from, &|points, loaded| {
            for (point, index) in points.iter().enumerate() {
                let (dy, x) = (&loaded[0][point], &loaded[1][point]);
                let g = if is_left { dy.clone() } else { self.passed::<T>(&factors, dy, x, loaded.get(2).map(|y| &y[point])) };
                let results: Elements<'k> = (g.iter().zip(x).enumerate())
                    .map(|(i, (g, x))| {
                        let channel = self.channel_of(i);
                        let ([offset, inv, slope], Factors { mean, factor, .. }) = (lines[channel], &factors[channel]);
                        let along = k.fma(g.get::<T>(k), *factor, offset);
                        AnyVal::of(k.fma((x.get::<T>(k) - *mean) * inv, slope, along))
                    })
                    .collect();
                k.when(tile.inside, || dx.store(index, &results, self.stored()));
            }
        });
    }
}
