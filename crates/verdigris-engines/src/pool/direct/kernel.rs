//! The kernels: a thread for each element of what is written, or for a vector of neighbouring channels, of one window or of two side by side.

use verdigris_kir::face::{Kernel, Val, Var};
use verdigris_tensor::DType;

use crate::fuse::compute::Compute;
use crate::fuse::operand::{OperandArgs, OperandDecl};
use crate::fuse::strided::{self, Kept, Line, Packed, Strided};
use crate::fuse::value::AnyVal;
use crate::layout::space::Extents;

use super::windows::{Axis, AxisArgs, Form, Grid, Place};
use super::{Kind, PAIR, Pair, Spec, THREADS};

verdigris_kir::parameters! {
    /// Of every kernel here.
    pub(super) struct Pool / PoolArgs of Spec as spec {
        pub(super) points: u32,
        /// In the order that threads run through; the innermost counts in vectors, the width in pairs where windows are taken so.
        pub(super) extents: Extents = 5,
        /// The first window or element along each spatial dim.
        pub(super) first: [u32; 3],
        pub(super) axes: Vec<AxisArgs> = spec.forms.to_vec(),
        pub(super) operands: Vec<OperandArgs> = spec.operands(),
    }
}

/// An operand for the neighbours of one thread: its lines by their place.
#[derive(Clone, Debug)]
struct Tensor<'k> {
    tensor: Strided<'k>,
    vector: u32,
    /// The vector of channels.
    number: Val<'k, u32>,
}

impl<'k> Tensor<'k> {
    fn line(&self, place: &Place<'k>) -> Line<'k> {
        self.tensor.line(place, self.vector)
    }

    fn load(&self, place: &Place<'k>) -> Packed<'k> {
        self.line(place).load(self.number)
    }

    fn values<T: Compute>(&self, place: &Place<'k>) -> Vec<Val<'k, T>> {
        self.load(place).values(self.number.kernel())
    }

    fn store(&self, place: &Place<'k>, values: &[AnyVal<'k>]) {
        self.line(place).store_values(self.number, values);
    }
}

/// The kernel that a spec says.
pub(super) fn build<'k, T: Compute>(spec: &Spec, k: Kernel<'k>) {
    let Pool { points, extents, first, axes, operands } = Pool::declare(k, spec);
    let operands = Strided::all(&spec.types, operands);
    let point = k.cta() * THREADS + k.thread();
    // The position of this thread in the dims of what is written.
    let mut index = [k.constant(0u32); 5];
    for (&dim, at) in spec.order.iter().zip(extents.index(point)) {
        index[dim] = at;
    }
    let [depth, height, width] = [index[2], index[3], index[4] * if spec.pair.is_some() { PAIR } else { 1 }];
    let place = [depth + first[0], height + first[1], width + first[2]];
    let vector = spec.vector;
    // Channels are the innermost dim of what is taken by vectors, and a dim like any other elsewhere.
    let tensors: Vec<Tensor<'k>> = operands
        .iter()
        .map(|operand| match vector {
            1 => Tensor { tensor: operand.at(&index[..2]), vector, number: k.constant(0) },
            _ => Tensor { tensor: operand.at(&index[..1]), vector, number: index[1] },
        })
        .collect();
    let grid = Grid { k, axes: &axes, block: spec.block, firsts: [None; 3] };
    k.when(point.lt(points), || match tensors.as_slice() {
        [x, samples, written @ ..] if spec.reads_samples() => {
            let firsts = firsts::<T>(&axes, spec, samples, place);
            let tensors: Vec<Tensor<'k>> = [x].into_iter().chain(written).cloned().collect();
            pool::<T>(spec, Grid { firsts, ..grid }, &tensors, place);
        }
        tensors => pool::<T>(spec, grid, tensors, place),
    });
}

/// Where this thread's window begins along each dim of fractional windows, by the samples of its plane.
fn firsts<'k, T: Compute>(axes: &[Axis<'k>], spec: &Spec, samples: &Tensor<'k>, place: Place<'k>) -> [Option<Val<'k, u32>>; 3] {
    let k = samples.number.kernel();
    let mut number = 0;
    std::array::from_fn(|axis| {
        (spec.forms[axis] == Form::Fractional).then(|| {
            let sample = samples.values::<T>(&[k.constant(0), k.constant(0), k.constant(number)])[0];
            number += 1;
            axes[axis].first(place[axis], sample)
        })
    })
}

/// What a thread does with the window or the element at its place.
fn pool<'k, T: Compute>(spec: &Spec, grid: Grid<'_, 'k>, tensors: &[Tensor<'k>], place: Place<'k>) {
    let (k, vector) = (grid.k, spec.vector);
    match (spec.kind, tensors) {
        (Kind::Max { index: false }, [x, y]) if spec.is_packed() => match spec.pair {
            Some(pair) => greatest_of_pair(grid, pair, [x, y], place),
            None => {
                let peak = Kept::of(&Packed::least(k, x.tensor.dtype, vector));
                // An element that is seen twice changes nothing: no visit has to count.
                grid.elements(place, &|visits| {
                    let loaded: Vec<Packed<'k>> = visits.iter().map(|visit| x.load(&visit.place)).collect();
                    peak.set(&loaded.iter().fold(peak.get(), |peak, loaded| peak.greater(loaded)));
                });
                y.line(&place).store_packed(y.number, &peak.get());
            }
        },
        (Kind::Max { .. }, [x, y, places @ ..]) => {
            let winners = Winners::<T>::find(grid, x, place, places.is_empty());
            y.store(&place, &winners.values(k, y.tensor.dtype));
            if let [places] = places {
                let numbers: Vec<AnyVal<'k>> = winners.rows.iter().map(|winner| AnyVal::I64(winner.place.get().widen())).collect();
                places.store(&place, &numbers);
            }
        }
        (Kind::Average { padded }, [x, y]) if let Some(pair) = spec.pair => means_of_pair::<T>(grid, pair, padded, [x, y], place),
        (Kind::Average { padded }, [x, y]) => {
            let sums = variables::<T>(k, vector, 0.0);
            grid.elements(place, &|visits| {
                let loaded: Vec<Packed<'k>> = visits.iter().map(|visit| x.load(&visit.place)).collect();
                for (visit, loaded) in visits.iter().zip(&loaded) {
                    add(&sums, &loaded.only_where(k, visit.counts).values(k));
                }
            });
            y.store(&place, &means(k, grid.size(place, padded), &sums));
        }
        (Kind::MaxBackward { index }, [dy, known, dx]) => {
            // Where the maximum was, or what it is found in again.
            let mine = grid.number(place);
            let sums = variables(k, vector, 0.0);
            grid.windows(place, &|visits| {
                if index {
                    let loaded: Vec<[Packed<'k>; 2]> = visits.iter().map(|visit| [known, dy].map(|from| from.load(&visit.place))).collect();
                    for (visit, [known, dy]) in visits.iter().zip(&loaded) {
                        let won = known.are(k, mine);
                        for ((sum, won), dy) in sums.iter().zip(won).zip(dy.values::<T>(k)) {
                            sum.set(*sum + k.select(won & visit.counts, dy, T::constant(k, 0.0)));
                        }
                    }
                    return;
                }
                for visit in visits {
                    k.when(visit.counts, || {
                        let winners = Winners::<T>::find(grid, known, visit.place, false);
                        let dy = dy.values::<T>(&visit.place);
                        for ((sum, winner), dy) in sums.iter().zip(&winners.rows).zip(dy) {
                            k.when(winner.place.eq(mine.signed()), || sum.set(*sum + dy));
                        }
                    });
                }
            });
            dx.store(&place, &sums.iter().map(|sum| AnyVal::of(sum.get())).collect::<Vec<_>>());
        }
        (Kind::AverageBackward { padded }, [dy, dx]) => {
            let sums = variables(k, vector, 0.0);
            grid.windows(place, &|visits| {
                let loaded: Vec<Packed<'k>> = visits.iter().map(|visit| dy.load(&visit.place)).collect();
                for (visit, loaded) in visits.iter().zip(&loaded) {
                    let share = share_of::<T>(k, grid.size(visit.place, padded));
                    // What does not count may be a window that has no element, whose share is infinite.
                    let share_if = |dy| k.select(visit.counts, dy * share, T::constant(k, 0.0));
                    let shares: Vec<Val<'k, T>> = loaded.values::<T>(k).into_iter().map(share_if).collect();
                    add(&sums, &shares);
                }
            });
            dx.store(&place, &sums.iter().map(|sum| AnyVal::of(sum.get())).collect::<Vec<_>>());
        }
        (kind, operands) => unreachable!("{kind:?} of {} operands", operands.len()),
    }
}

/// Two windows side by side, a row of elements at a time: `rows` gets what their columns hold there, all on its way before the first is used.
fn rows_of_pair<'k>(grid: Grid<'_, 'k>, pair: Pair, x: &Tensor<'k>, first: Place<'k>, rows: impl Fn(&[Packed<'k>], &[Val<'k, bool>])) {
    let (columns, inside): (Vec<_>, Vec<_>) = grid.columns(first, pair.columns()).into_iter().unzip();
    grid.rows(first, &|[depth, row]| {
        let loaded: Vec<Packed<'k>> = columns.iter().map(|&column| x.load(&[depth, row, column])).collect();
        rows(&loaded, &inside);
    });
}

/// Runs `body` for both windows, the second where there is one.
fn each_of_pair<'k>(grid: Grid<'_, 'k>, first: Place<'k>, body: &dyn Fn(usize, Place<'k>)) {
    let next = [first[0], first[1], first[2] + 1];
    body(0, first);
    grid.k.when(next[2].lt(grid.axes[2].out), || body(1, next));
}

/// The greatest elements of two windows side by side.
fn greatest_of_pair<'k>(grid: Grid<'_, 'k>, pair: Pair, [x, y]: [&Tensor<'k>; 2], first: Place<'k>) {
    let peaks = [0, 1].map(|_| Kept::of(&Packed::least(grid.k, x.tensor.dtype, x.vector)));
    // Beyond the image is its last column again, which the windows there have: none of them lies outside.
    rows_of_pair(grid, pair, x, first, |columns, _| {
        let greatest = |columns: &[Packed<'k>]| columns.iter().cloned().reduce(|a, b| a.greater(&b));
        let [own, last] = [&columns[..1], &columns[columns.len() - 1..]];
        let shared = greatest(&columns[1..columns.len() - 1]);
        for (peak, alone) in peaks.iter().zip([own, last]) {
            let of_row = shared.iter().fold(alone[0].clone(), |a, b| a.greater(b));
            peak.set(&peak.get().greater(&of_row));
        }
    });
    each_of_pair(grid, first, &|window, place| y.line(&place).store_packed(y.number, &peaks[window].get()));
}

/// The means of two windows side by side.
fn means_of_pair<'k, T: Compute>(grid: Grid<'_, 'k>, pair: Pair, padded: bool, [x, y]: [&Tensor<'k>; 2], first: Place<'k>) {
    let k = grid.k;
    let sums = [0, 1].map(|_| variables::<T>(k, x.vector, 0.0));
    rows_of_pair(grid, pair, x, first, |columns, inside| {
        let values: Vec<Vec<Val<'k, T>>> =
            columns.iter().zip(inside).map(|(column, &inside)| column.only_where(k, inside).values(k)).collect();
        for i in 0..x.vector as usize {
            let shared = values[1..values.len() - 1].iter().map(|column| column[i]).reduce(|a, b| a + b);
            for (sums, alone) in sums.iter().zip([&values[0], &values[values.len() - 1]]) {
                let of_row = shared.map_or(alone[i], |shared| shared + alone[i]);
                sums[i].set(sums[i] + of_row);
            }
        }
    });
    each_of_pair(grid, first, &|window, place| y.store(&place, &means(k, grid.size(place, padded), &sums[window])));
}

/// Means of so many elements; 0 of a window that meets none.
fn means<'k, T: Compute>(k: Kernel<'k>, count: Val<'k, u32>, sums: &[Var<'k, T>]) -> Vec<AnyVal<'k>> {
    let share = share_of::<T>(k, count);
    sums.iter().map(|sum| AnyVal::of(k.select(count.eq(0), T::constant(k, 0.0), sum.get() * share))).collect()
}

fn variables<'k, T: Compute>(k: Kernel<'k>, vector: u32, first: f64) -> Vec<Var<'k, T>> {
    (0..vector).map(|_| k.var(T::constant(k, first))).collect()
}

fn add<'k, T: Compute>(sums: &[Var<'k, T>], values: &[Val<'k, T>]) {
    sums.iter().zip(values).for_each(|(sum, &value)| sum.set(*sum + value));
}

/// The reciprocal of a number of elements.
fn share_of<'k, T: Compute>(k: Kernel<'k>, count: Val<'k, u32>) -> Val<'k, T> {
    T::quotient(T::constant(k, 1.0), T::from_i32(count.signed()))
}

/// The greatest element of a window: the first of equals, the first NaN before all.
#[derive(Clone, Copy, Debug)]
struct Winner<'k, T> {
    peak: Var<'k, T>,
    place: Var<'k, i32>,
}

/// Those of neighbouring channels.
#[derive(Clone, Debug)]
struct Winners<'k, T> {
    rows: Vec<Winner<'k, T>>,
    /// The window has no element.
    is_empty: Val<'k, bool>,
}

impl<'k, T: Compute> Winners<'k, T> {
    /// Of the window at `out`; where nobody asks for their places, the values alone.
    fn find(grid: Grid<'_, 'k>, x: &Tensor<'k>, out: Place<'k>, values_alone: bool) -> Self {
        let k = grid.k;
        let (first, is_empty) = grid.first(out);
        // Of a window of nothing but −∞ the first wins.
        let place = k.select(is_empty, -1i32, grid.number(first).signed());
        let winner = |_| Winner { peak: k.var(T::constant(k, f64::NEG_INFINITY)), place: k.var(place) };
        let rows: Vec<Winner<'k, T>> = (0..x.vector).map(winner).collect();
        grid.elements(out, &|visits| {
            // An element that is seen twice changes nothing: no visit has to count.
            let loaded: Vec<Packed<'k>> = visits.iter().map(|visit| x.load(&visit.place)).collect();
            for (visit, loaded) in visits.iter().zip(&loaded) {
                let number = (!values_alone).then(|| grid.number(visit.place).signed());
                for (winner, value) in rows.iter().zip(loaded.values::<T>(k)) {
                    let peak = winner.peak.get();
                    let Some(number) = number else {
                        winner.peak.set(T::max_nan(peak, value));
                        continue;
                    };
                    // A greater one or a NaN, unless there is a NaN already.
                    let wins = !value.le(peak) & peak.eq(peak);
                    winner.peak.set(k.select(wins, value, peak));
                    winner.place.set(k.select(wins, number, winner.place));
                }
            }
        });
        Winners { rows, is_empty }
    }

    /// The maxima, to be stored as `dtype`: of an empty window the least value of an integer type.
    fn values(&self, k: Kernel<'k>, dtype: DType) -> Vec<AnyVal<'k>> {
        let value = |winner: &Winner<'k, T>| match dtype.integer_range() {
            Some((least, _)) => AnyVal::of(k.select(self.is_empty, T::constant(k, least as f64), winner.peak.get())),
            None => AnyVal::of(winner.peak.get()),
        };
        self.rows.iter().map(value).collect()
    }
}

impl Spec {
    fn operands(&self) -> Vec<OperandDecl> {
        let outputs = if self.kind == (Kind::Max { index: true }) { 2 } else { 1 };
        if self.vector == 1 {
            return strided::declarations(&self.types, 5, outputs);
        }
        let written = |i: usize| i + outputs >= self.types.len();
        self.types.iter().enumerate().map(|(i, &dtype)| strided::lines_declaration(dtype, 4, self.vector, written(i))).collect()
    }
}
