//! Rows that lie side by side, as the classes of a channels-first tensor do: a thread takes a vector of neighbouring rows and goes along their elements.
//!
//! Maximum and sum of each row are carried along together, a few elements at a time, so that a row is read once for them and once more for what is written.
//! Few long rows are shared out: the warps of a CTA take every eighth element each.

use verdigris_kir::face::{Kernel, SharedPiece, Val, Var};

use crate::fuse::compute::Compute;
use crate::fuse::math;
use crate::fuse::strided::{Packed, Strided};

use super::losses::{Label, Loss, Results};
use super::peak::{self, Peak};
use super::spec::{Kind, OfRows, Spec};

/// Elements of its rows that a thread has on their way at a time.
const UNROLL: u32 = 4;

pub(super) fn rows<'k, T: Compute>(spec: &Spec, k: Kernel<'k>, vector: u32, team: u32) {
    let OfRows { rows, extent, extents, operands, loss } = OfRows::declare(k, spec);
    let operands = Strided::all(&spec.types, operands);
    let number = |value: f64| T::constant(k, value);
    // The warps of a team follow each other; with one, all warps of the CTA take rows.
    let (member, point) =
        if team == 1 { (k.constant(0u32), k.cta() * spec.threads() + k.thread()) } else { (k.thread() >> 5, k.cta() * 32 + k.lane()) };
    let inside = point.lt(rows);
    let point = point.min(rows - 1);
    let outer = extents.index(point);
    let is_own_alone = matches!(spec.kind, Kind::CrossEntropyBackward { lse: true, .. });
    let share = Share { k, extent, member, team, vector, outer, is_own_alone };
    // Rows one by one, for what has one value for each.
    let row_of = |lane: u32| {
        let mut index = share.outer.clone();
        if let Some(last) = index.last_mut() {
            *last = *last * vector + lane;
        }
        (point * vector + lane, index)
    };
    let leads = if team == 1 { inside } else { inside & member.eq(0) };
    match (spec.kind, operands.as_slice()) {
        (Kind::Softmax | Kind::LogSoftmax, [x, y]) => {
            let peaks = share.peaks::<T>(x, false);
            let scales: Vec<Val<'k, T>> = peaks.iter().map(|peak| T::reciprocal(peak.sum)).collect();
            let below: Vec<Val<'k, T>> = peaks.iter().map(|peak| math::log(peak.sum)).collect();
            share.write(inside, y, &[x], |_, lane, values| {
                let shifted = values[0] - peaks[lane].peak;
                if spec.kind == Kind::LogSoftmax { shifted - below[lane] } else { spec.exponential(shifted) * scales[lane] }
            });
        }
        (Kind::SoftmaxBackward | Kind::LogSoftmaxBackward, [y, dy, dx]) => {
            let log = spec.kind == Kind::LogSoftmaxBackward;
            let sums: Vec<Var<'k, T>> = (0..vector).map(|_| k.var(number(0.0))).collect();
            share.groups(&[y, dy], |parts| {
                for (lane, sum) in sums.iter().enumerate() {
                    let term = |part: &Part<'k>| {
                        let [y, dy] = [0, 1].map(|i| part.loaded[i].values::<T>(k)[lane]);
                        k.select(part.inside, if log { dy } else { y * dy }, number(0.0))
                    };
                    sum.set(*sum + peak::total(parts.iter().map(term).collect()));
                }
            });
            let own: Vec<Val<'k, T>> = sums.iter().map(|sum| sum.get()).collect();
            let sums = match share.of_members(&own) {
                None => own,
                Some(members) => (0..own.len()).map(|i| peak::total(members.iter().map(|sums| sums[i]).collect())).collect(),
            };
            share.write(inside, dx, &[y, dy], |_, lane, values| {
                let [y, dy] = [values[0], values[1]];
                if log { k.fma(spec.exponential(y), -sums[lane], dy) } else { y * (dy - sums[lane]) }
            });
        }
        (Kind::CrossEntropy { .. }, [logits, labels, results @ ..]) => {
            let loss = Loss::new(k, spec, loss);
            let peaks = share.peaks::<T>(logits, loss.is_smooth());
            k.when(leads, || {
                for (lane, Peak { peak, sum, all }) in (0..).zip(&peaks) {
                    let (row, index) = row_of(lane);
                    let label = Label::load(labels, &index, extent);
                    let target = k.var(number(f64::NAN));
                    k.when(label.known, || target.set(share.line(logits, label.class).element(share.inner() * vector + lane)));
                    let whole = *peak + math::log(*sum);
                    loss.store(Results::of(spec.kind, results), (row, &index), &label, [target.get(), whole, *all]);
                }
            });
        }
        (Kind::CrossEntropyBackward { .. }, [logits, labels, dloss, lse @ .., dlogits]) => {
            let loss = Loss::new(k, spec, loss);
            let write = |whole: Vec<Val<'k, T>>| {
                let gradient = |lane| {
                    let (_, index) = row_of(lane);
                    loss.gradient(dloss.load::<T>(&index), Label::load(labels, &index, extent), None)
                };
                let gradients: Vec<_> = (0..vector).map(gradient).collect();
                share.write(inside, dlogits, &[logits], |class, lane, values| {
                    gradients[lane].of(spec.exponential(values[0] - whole[lane]), class.eq(gradients[lane].class))
                });
            };
            match lse.first() {
                // Results may lie in the place of the logits: a thread without rows reads no other's.
                Some(lse) => k.when(inside, || write((0..vector).map(|lane| lse.load(&row_of(lane).1)).collect())),
                None => write(share.peaks::<T>(logits, false).iter().map(|peak| peak.peak + math::log(peak.sum)).collect()),
            }
        }
        (kind, operands) => unreachable!("{kind:?} of {} operands", operands.len()),
    }
}

/// One element of each row of a thread.
#[derive(Clone, Debug)]
struct Part<'k> {
    /// Its number, or that of the last.
    number: Val<'k, u32>,
    /// It is the thread's own.
    inside: Val<'k, bool>,
    /// Of each operand that is read.
    loaded: Vec<Packed<'k>>,
}

/// The rows of a thread, and its share of their elements.
#[derive(Clone, Debug)]
struct Share<'k> {
    k: Kernel<'k>,
    extent: Val<'k, u32>,
    member: Val<'k, u32>,
    team: u32,
    vector: u32,
    /// The index of the vector of rows.
    outer: Vec<Val<'k, u32>>,
    /// What is not the thread's own is not loaded: somebody may have written there.
    is_own_alone: bool,
}

impl<'k> Share<'k> {
    /// The innermost index, in vectors.
    fn inner(&self) -> Val<'k, u32> {
        self.outer.last().copied().unwrap_or(self.k.constant(0))
    }

    /// The line of elements `number` of neighbouring rows.
    fn line(&self, operand: &Strided<'k>, number: Val<'k, u32>) -> crate::fuse::strided::Line<'k> {
        let mut index = self.outer[..self.outer.len().saturating_sub(1)].to_vec();
        index.push(number);
        operand.line(&index, self.vector)
    }

    /// Runs `f` for each group of elements whose loads overlap.
    fn groups(&self, from: &[&Strided<'k>], f: impl Fn(&[Part<'k>])) {
        self.k.range_step(self.member, self.extent, self.team * UNROLL, |first| {
            let part = |i: u32| {
                let number = first + i * self.team;
                let inside = number.lt(self.extent);
                let number = number.min(self.extent - 1);
                let load = |from: &&Strided<'k>| match self.is_own_alone {
                    true => self.line(from, number).load_where(inside, self.inner()),
                    false => self.line(from, number).load(self.inner()),
                };
                let loaded = from.iter().map(load).collect();
                Part { number, inside, loaded }
            };
            f(&(0..UNROLL).map(part).collect::<Vec<_>>());
        });
    }

    /// Writes what `f` makes of each element and row of what is read.
    fn write<T: Compute>(
        &self,
        inside: Val<'k, bool>,
        to: &Strided<'k>,
        from: &[&Strided<'k>],
        f: impl Fn(Val<'k, u32>, usize, &[Val<'k, T>]) -> Val<'k, T>,
    ) {
        self.groups(from, |parts| {
            for part in parts {
                self.k.when(part.inside & inside, || {
                    let read: Vec<Vec<Val<'k, T>>> = part.loaded.iter().map(|loaded| loaded.values(self.k)).collect();
                    let of_lane = |lane: usize| {
                        let values: Vec<Val<'k, T>> = read.iter().map(|values| values[lane]).collect();
                        f(part.number, lane, &values)
                    };
                    let values: Vec<Val<'k, T>> = (0..self.vector as usize).map(of_lane).collect();
                    self.line(to, part.number).store(self.inner(), &values);
                });
            }
        });
    }

    /// Of each row, the maximum and the sum of exponentials, and the sum of its elements if it is wanted.
    fn peaks<T: Compute>(&self, x: &Strided<'k>, wants_all: bool) -> Vec<Peak<'k, T>> {
        let k = self.k;
        let number = |value: f64| T::constant(k, value);
        let rows: Vec<[Var<'k, T>; 3]> =
            (0..self.vector).map(|_| [f64::NEG_INFINITY, 0.0, 0.0].map(|first| k.var(number(first)))).collect();
        self.groups(&[x], |parts| {
            let read: Vec<Vec<Val<'k, T>>> = parts.iter().map(|part| part.loaded[0].values(k)).collect();
            for (lane, [peak, sum, all]) in rows.iter().enumerate() {
                let values: Vec<Val<'k, T>> = read.iter().map(|values| values[lane]).collect();
                // What is read again in the place of what is not there changes no maximum.
                let next = T::max_nan(peak.get(), peak::greatest(values.clone()));
                let shift = peak::shift_of(next);
                let counted = |term: &dyn Fn(Val<'k, T>) -> Val<'k, T>| {
                    let terms = parts.iter().zip(&values).map(|(part, &x)| k.select(part.inside, term(x), number(0.0)));
                    peak::total(terms.collect())
                };
                sum.set(sum.get() * T::fast_exp(peak.get() - shift) + counted(&|x| T::fast_exp(x - shift)));
                if wants_all {
                    all.set(all.get() + counted(&|x| x));
                }
                peak.set(next);
            }
        });
        let own: Vec<Val<'k, T>> = rows.iter().flatten().map(|value| value.get()).collect();
        let peak_of = |values: &[Val<'k, T>]| Peak { peak: values[0], sum: values[1], all: values[2] };
        let peaks_of = |values: &[Val<'k, T>]| -> Vec<Peak<'k, T>> { values.chunks(3).map(peak_of).collect() };
        let whole = match self.of_members(&own) {
            None => peaks_of(&own),
            Some(members) => {
                let members: Vec<Vec<Peak<'k, T>>> = members.iter().map(|values| peaks_of(values)).collect();
                (0..rows.len()).map(|row| Peak::of_all(members.iter().map(|peaks| peaks[row]).collect())).collect()
            }
        };
        whole.into_iter().map(Peak::checked).collect()
    }

    /// Values of the thread's lane in each warp of its team, in their order; nothing where a row is one thread's. By all threads of the CTA, each call
    /// in shared memory of its own.
    fn of_members<T: Compute>(&self, values: &[Val<'k, T>]) -> Option<Vec<Vec<Val<'k, T>>>> {
        let k = self.k;
        if self.team == 1 {
            return None;
        }
        let bytes = T::TY.bytes();
        let line = 32 * bytes;
        let count = values.len() as u32;
        let piece: SharedPiece<'k> = k.shared("columns", self.team * count * line, 16);
        // Neighbouring lanes lie side by side.
        let place = piece.address() + k.lane() * bytes;
        for (i, &value) in (0..).zip(values) {
            k.st_shared(place + self.member * (count * line), i64::from(i * line), value);
        }
        k.bar_sync();
        let of = |warp: u32| (0..count).map(|i| k.ld_shared::<T>(place, i64::from((warp * count + i) * line))).collect();
        Some((0..self.team).map(of).collect())
    }
}
