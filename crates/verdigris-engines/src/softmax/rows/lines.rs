//! Rows whose elements lie side by side, by vectors of them.
//!
//! A team of threads has a row. Each thread loads all of its vectors before it computes with the first, keeps them as they are stored, and widens them
//! again for what is written; a thread for which no vector is left takes the last one again and does not count it, so that loads need no condition. Rows that are too long
//! for that are gone through in a loop, a few vectors at a time: once for maximum and sum, which are carried along together, and once for what is written.
//!
//! A row may be shared by the CTAs of a cluster, which all hold it: they tell each other what they have come to.
//!
//! Where rows begin anywhere, vectors are those that begin at whole vectors in memory, and each thread takes besides an element or two of the edges: of those
//! in front of the first vector and behind the last.
//!
//! The gradient of a loss may lie in the place of the logits, where the log-sum-exp is given: there a thread loads only what it writes itself.

use verdigris_kir::face::{Kernel, Val, Var};

use crate::fuse::compute::Compute;
use crate::fuse::peers::Peers;
use crate::fuse::strided::{Line, Packed, Strided};
use crate::fuse::{lanes, math};

use super::losses::{Gradient, Label, Loss, Results};
use super::peak::{self, Peak};
use super::spec::{Kind, Number, OfRows, Spec};

/// Vectors of a long row that a thread has on their way at a time.
const UNROLL: u32 = 4;
/// Bytes that the CTAs of a cluster tell each other: two numbers of f32.
const MESSAGE_BYTES: u32 = 8;

/// How threads stand along rows; [`super::spec::Form::Rows`] says what these are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stand {
    pub(super) vector: u32,
    pub(super) team: u32,
    pub(super) held: u32,
    pub(super) edges: bool,
    /// CTAs of a cluster that share a row.
    pub(super) ctas: u32,
}

impl Stand {
    /// Threads of a row.
    fn threads(self) -> u32 {
        self.ctas * self.team
    }
}

pub(super) fn rows<'k, T: Compute>(spec: &Spec, k: Kernel<'k>, stand: Stand) {
    let OfRows { rows, extent, extents, operands, loss } = OfRows::declare(k, spec);
    let operands = Strided::all(&spec.types, operands);
    let number = |value: f64| T::constant(k, value);
    let Stand { vector, team, edges, .. } = stand;
    let of_team = k.thread() & (team - 1);
    let peers = (stand.ctas > 1).then(|| Peers::new(k, MESSAGE_BYTES));
    let (member, row) = match peers {
        Some(_) => (k.cluster_rank() * team + of_team, k.cta() >> stand.ctas.ilog2()),
        None => (of_team, k.cta() * (spec.threads() / team) + (k.thread() >> team.ilog2())),
    };
    // All threads stay together; those without a row take the last one and write nothing.
    let inside = row.lt(rows);
    let row = row.min(rows - 1);
    let index = extents.index(row);
    // Rows are whole vectors, or shorter than 2³¹, which the assembler does not know.
    let zero = if edges { extent >> 31 } else { extent & (vector - 1) };
    // All operands begin equally far from a whole vector.
    let front = edges.then(|| operands[0].line(&index, 1).in_front_of(vector));
    let vectors = front.map_or(extent, |front| extent - front) >> vector.ilog2();
    let is_own_alone = matches!(spec.kind, Kind::CrossEntropyBackward { lse: true, .. });
    // A CTA that counts labels has its threads wait for each other between what they read and what they write.
    let counts = spec.number() == Some(Number::Counted);
    let row_is_own = (is_own_alone && counts).then_some(inside);
    let share = Share { k, extent, vectors, front, member, stand, zero, is_own_alone, row_is_own, peers };
    let line = |operand: &Strided<'k>| match front {
        None => Row { vectors: operand.line(&index, vector), elements: None },
        Some(front) => {
            let elements = operand.line(&index, 1);
            Row { vectors: elements.vectors_from(front, vector), elements: Some(elements) }
        }
    };
    match (spec.kind, operands.as_slice()) {
        (Kind::Softmax | Kind::LogSoftmax, [x, y]) => {
            let x = [share.read(line(x))];
            share.meet();
            let Peak { peak, sum, .. } = share.peak::<T>(&x, false);
            let scale = T::reciprocal(sum);
            let below = math::log(sum);
            share.write(inside, &line(y), &x, |_, values| {
                let shifted = values[0].iter().map(|&x| x - peak);
                if spec.kind == Kind::LogSoftmax {
                    shifted.map(|shifted| shifted - below).collect()
                } else {
                    shifted.map(|shifted| spec.exponential(shifted) * scale).collect()
                }
            });
        }
        (Kind::SoftmaxBackward | Kind::LogSoftmaxBackward, [y, dy, dx]) => {
            let both = [share.read(line(y)), share.read(line(dy))];
            share.meet();
            let log = spec.kind == Kind::LogSoftmaxBackward;
            let sum = k.var(number(0.0));
            share.each(&both, |part| {
                let [y, dy] = [part.values::<T>(k, 0), part.values::<T>(k, 1)];
                let pairs = y.into_iter().zip(dy);
                let terms: Vec<Val<'k, T>> = pairs.map(|(y, dy)| if log { dy } else { y * dy }).collect();
                sum.set(sum + part.counted(k, terms));
            });
            let sum = share.over_peers(lanes::over_team(k, team, sum.get(), &|x, y| x + y));
            share.write(inside, &line(dx), &both, |_, values| {
                let pairs = values[0].iter().zip(&values[1]);
                pairs.map(|(&y, &dy)| if log { k.fma(spec.exponential(y), -sum, dy) } else { y * (dy - sum) }).collect()
            });
        }
        (Kind::CrossEntropy { .. }, [logits, labels, results @ ..]) => {
            let loss = Loss::new(k, spec, loss);
            let logits = line(logits);
            let x = [share.read(logits)];
            // On its way while the row is added up.
            let label = Label::load(labels, &index, extent);
            let target = k.var(number(f64::NAN));
            k.when(label.known & member.eq(0), || target.set(logits.element(label.class)));
            let Peak { peak, sum, all } = share.peak::<T>(&x, loss.is_smooth());
            let whole = peak + math::log(sum);
            k.when(inside & member.eq(0), || {
                loss.store(Results::of(spec.kind, results), (row, &index), &label, [target.get(), whole, all]);
            });
        }
        (Kind::CrossEntropyBackward { .. }, [logits, labels, dloss, lse @ .., dlogits]) => {
            let loss = Loss::new(k, spec, loss);
            let of_row = || (dloss.load::<T>(&index), Label::load(labels, &index, extent));
            let write = |x: &[Reading<'k>], whole: Val<'k, T>, gradient: Gradient<'k, T>| {
                share.write(inside, &line(dlogits), x, |part, values| {
                    let from_first = gradient.class - share.first(&part.at);
                    let each = (0..).zip(&values[0]);
                    each.map(|(lane, &x)| gradient.of(spec.exponential(x - whole), from_first.eq(lane))).collect()
                });
            };
            match lse.first() {
                // All that is read is on its way while labels are counted.
                Some(lse) if counts => {
                    let (x, whole, (dloss, label)) = ([share.read(line(logits))], lse.load(&index), of_row());
                    let counted = loss.counted(labels, (rows, &extents));
                    k.when(inside, || write(&x, whole, loss.gradient(dloss, label, counted)));
                }
                // Nothing is shared in a team: threads without a row need not come along.
                Some(lse) => k.when(inside, || {
                    let (x, whole, (dloss, label)) = ([share.read(line(logits))], lse.load(&index), of_row());
                    write(&x, whole, loss.gradient(dloss, label, None));
                }),
                None => {
                    let x = [share.read(line(logits))];
                    let counted = loss.counted(labels, (rows, &extents));
                    let Peak { peak, sum, .. } = share.peak::<T>(&x, false);
                    let (whole, (dloss, label)) = (peak + math::log(sum), of_row());
                    write(&x, whole, loss.gradient(dloss, label, counted));
                }
            }
        }
        (kind, operands) => unreachable!("{kind:?} of {} operands", operands.len()),
    }
}

/// A row in memory: its vectors, and where it begins anywhere its elements one by one.
#[derive(Clone, Copy, Debug)]
struct Row<'k> {
    vectors: Line<'k>,
    elements: Option<Line<'k>>,
}

impl<'k> Row<'k> {
    /// By which a part is taken.
    fn of(&self, at: &At<'k>) -> Line<'k> {
        self.elements.filter(|_| at.is_edge).unwrap_or(self.vectors)
    }

    fn element<T: Compute>(&self, number: Val<'k, u32>) -> Val<'k, T> {
        self.elements.unwrap_or(self.vectors).element(number)
    }
}

/// Which vector of a thread's share, or which element of the edges.
#[derive(Clone, Copy, Debug)]
struct At<'k> {
    /// Its number among the row's vectors, or elements; or that of another, if it is not the thread's own.
    number: Val<'k, u32>,
    /// It is the thread's own; where nothing is said, it is.
    inside: Option<Val<'k, bool>>,
    is_edge: bool,
}

/// A row that is read, and its parts where they are held.
#[derive(Clone, Debug)]
struct Reading<'k> {
    row: Row<'k>,
    held: Vec<Packed<'k>>,
}

/// One vector of a thread's share, or one element of the edges.
#[derive(Clone, Debug)]
struct Part<'k> {
    at: At<'k>,
    /// Of each row that is read.
    loaded: Vec<Packed<'k>>,
}

impl<'k> Part<'k> {
    fn values<T: Compute>(&self, k: Kernel<'k>, operand: usize) -> Vec<Val<'k, T>> {
        self.loaded[operand].values(k)
    }

    /// The sum of what it gives, or 0 if it is not the thread's own.
    fn counted<T: Compute>(&self, k: Kernel<'k>, terms: Vec<Val<'k, T>>) -> Val<'k, T> {
        let total = peak::total(terms);
        self.at.inside.map_or(total, |inside| k.select(inside, total, T::constant(k, 0.0)))
    }
}

/// A thread's share of a row.
#[derive(Clone, Copy, Debug)]
struct Share<'k> {
    k: Kernel<'k>,
    /// Elements of the row.
    extent: Val<'k, u32>,
    /// Whole vectors of the row.
    vectors: Val<'k, u32>,
    /// Elements in front of the first vector, where a row begins anywhere.
    front: Option<Val<'k, u32>>,
    member: Val<'k, u32>,
    stand: Stand,
    /// 0, but nobody can know: see [`Packed::again`].
    zero: Val<'k, u32>,
    /// What is not the thread's own is not loaded: somebody may have written there.
    is_own_alone: bool,
    /// Whether the row is, where threads without one come along.
    row_is_own: Option<Val<'k, bool>>,
    /// The CTAs that share the row.
    peers: Option<Peers<'k>>,
}

impl<'k> Share<'k> {
    /// Whether a part that the row has is the thread's own.
    fn is_own(&self, inside: Val<'k, bool>) -> Val<'k, bool> {
        self.row_is_own.map_or(inside, |row| inside & row)
    }

    /// Vectors that are held, or the last one in the place of those that are not there.
    fn vectors(&self) -> Vec<At<'k>> {
        let of = |i: u32| {
            let number = self.member + i * self.stand.threads();
            At { number: number.min(self.vectors - 1), inside: Some(self.is_own(number.lt(self.vectors))), is_edge: false }
        };
        (0..self.stand.held).map(of).collect()
    }

    /// The thread's elements of the edges, or the row's first in the place of those that are not there.
    fn edges(&self) -> Vec<At<'k>> {
        let Some(front) = self.front else { return Vec::new() };
        let Stand { vector, team, .. } = self.stand;
        let whole = self.vectors << vector.ilog2();
        let of = |i: u32| {
            let edge = self.member + i * team;
            let inside = edge.lt(self.extent - whole);
            let number = edge + self.k.select(edge.lt(front), 0u32, whole);
            At { number: self.k.select(inside, number, 0u32), inside: Some(self.is_own(inside)), is_edge: true }
        };
        // At most one short of a vector on either side.
        (0..(2 * (vector - 1)).div_ceil(team)).map(of).collect()
    }

    /// The number of a part's first element in the row.
    fn first(&self, at: &At<'k>) -> Val<'k, u32> {
        if at.is_edge {
            return at.number;
        }
        let of_vector = at.number * self.stand.vector;
        self.front.map_or(of_vector, |front| front + of_vector)
    }

    fn load(&self, from: &[Reading<'k>], at: At<'k>) -> Part<'k> {
        Part { at, loaded: from.iter().map(|from| self.load_of(&from.row, &at)).collect() }
    }

    fn load_of(&self, row: &Row<'k>, at: &At<'k>) -> Packed<'k> {
        match at.inside.filter(|_| self.is_own_alone) {
            Some(inside) => row.of(at).load_where(inside, at.number),
            None => row.of(at).load(at.number),
        }
    }

    fn read(&self, row: Row<'k>) -> Reading<'k> {
        let edges = if self.stand.held > 0 { self.edges() } else { Vec::new() };
        let held = self.vectors().into_iter().chain(edges).map(|at| self.load_of(&row, &at)).collect();
        Reading { row, held }
    }

    /// Where CTAs share the row: what they need to tell each other, behind loads that are on their way meanwhile.
    fn meet(&self) {
        if let Some(peers) = &self.peers {
            peers.meet();
        }
    }

    /// The sum of what the CTAs of a row have.
    fn over_peers<T: Compute>(&self, sum: Val<'k, T>) -> Val<'k, T> {
        match &self.peers {
            Some(peers) => peak::total(peers.all([sum]).into_iter().map(|[sum]| sum).collect()),
            None => sum,
        }
    }

    /// Runs `f` for each group of parts whose loads overlap: all that are held, or a few of a long row.
    fn groups(&self, from: &[Reading<'k>], f: impl Fn(&[Part<'k>])) {
        let Stand { team, held, .. } = self.stand;
        if held > 0 {
            let part = |(i, at): (usize, At<'k>)| Part { at, loaded: from.iter().map(|from| from.held[i].clone()).collect() };
            return f(&self.vectors().into_iter().chain(self.edges()).enumerate().map(part).collect::<Vec<_>>());
        }
        let k = self.k;
        let load = |number: Val<'k, u32>| self.load(from, At { number, inside: None, is_edge: false });
        // The vectors of this thread; fewer than there are threads leave some without one.
        let own = k.select(self.member.lt(self.vectors), (self.vectors - self.member + (team - 1)) >> team.ilog2(), 0u32);
        let whole = own & !(UNROLL - 1);
        k.range_step(0, whole, UNROLL, |turn| {
            f(&(0..UNROLL).map(|i| load(self.member + (turn + i) * team)).collect::<Vec<_>>());
        });
        k.when(whole.lt(own), || {
            let turns: Vec<Val<'k, u32>> = (0..UNROLL - 1).map(|i| whole + i).collect();
            let parts: Vec<Part<'k>> = turns.iter().map(|turn| load(self.member + turn.min(own - 1) * team)).collect();
            for (turn, part) in turns.iter().zip(&parts) {
                k.when(turn.lt(own), || f(std::slice::from_ref(part)));
            }
        });
        for at in self.edges() {
            f(&[self.load(from, at)]);
        }
    }

    fn each(&self, from: &[Reading<'k>], f: impl Fn(&Part<'k>)) {
        self.groups(from, |parts| parts.iter().for_each(&f));
    }

    /// The same rows, for another step: what is held is widened again.
    fn again(&self, from: &[Reading<'k>]) -> Vec<Reading<'k>> {
        let held = |from: &Reading<'k>| from.held.iter().map(|packed| packed.again(self.zero)).collect();
        from.iter().map(|from| Reading { row: from.row, held: held(from) }).collect()
    }

    /// Writes what `f` makes of each vector of the rows that are read.
    fn write<T: Compute>(
        &self,
        inside: Val<'k, bool>,
        to: &Row<'k>,
        from: &[Reading<'k>],
        f: impl Fn(&Part<'k>, &[Vec<Val<'k, T>>]) -> Vec<Val<'k, T>>,
    ) {
        self.each(&self.again(from), |part| {
            self.k.when(part.at.inside.map_or(inside, |own| own & inside), || {
                let values: Vec<Vec<Val<'k, T>>> = (0..from.len()).map(|i| part.values(self.k, i)).collect();
                to.of(&part.at).store(part.at.number, &f(part, &values));
            });
        });
    }

    /// Maximum and sum of exponentials of a row, and the sum of its elements if it is wanted.
    fn peak<T: Compute>(&self, x: &[Reading<'k>; 1], wants_all: bool) -> Peak<'k, T> {
        let k = self.k;
        let number = |value: f64| T::constant(k, value);
        let (peak, sum, all) = (k.var(number(f64::NEG_INFINITY)), k.var(number(0.0)), k.var(number(0.0)));
        let Stand { team, held, .. } = self.stand;
        let lanes = team.min(32);
        let greatest = |peak: Val<'k, T>| lanes::over_lanes(k, lanes, peak, &|x, y| T::max_nan(x, y));
        self.groups(x, |parts| {
            let own = peak::greatest(parts.iter().map(|part| part.loaded[0].greatest(k)).collect());
            // What is held is shifted by the maximum of the whole warp, so that sums of its lanes need no factor.
            let next = if held > 0 { greatest(own) } else { T::max_nan(peak.get(), own) };
            let shift = peak::shift_of(next);
            if held == 0 {
                sum.set(sum * T::fast_exp(peak.get() - shift));
            }
            for part in parts {
                let values = part.values::<T>(k, 0);
                let count = |so_far: &Var<'k, T>, terms: Vec<Val<'k, T>>| so_far.set(*so_far + part.counted(k, terms));
                if wants_all {
                    count(&all, values.clone());
                }
                count(&sum, values.into_iter().map(|x| T::fast_exp(x - shift)).collect());
            }
            peak.set(next);
        });
        let own = Peak { peak: peak.get(), sum: sum.get(), all: all.get() };
        let of_lane = if held > 0 { own } else { own.shifted(greatest(own.peak)) };
        let add = |x: Val<'k, T>| lanes::over_lanes(k, lanes, x, &|x, y| x + y);
        let of_warp = Peak { sum: add(of_lane.sum), all: if wants_all { add(of_lane.all) } else { of_lane.all }, ..of_lane };
        let of_team = of_warp.over_warps(k, team, wants_all);
        let whole = match &self.peers {
            Some(peers) => {
                let of_peers = peers.all([of_team.peak, of_team.sum]);
                Peak::of_all(of_peers.into_iter().map(|[peak, sum]| Peak { peak, sum, ..of_team }).collect())
            }
            None => of_team,
        };
        whole.checked()
    }
}
