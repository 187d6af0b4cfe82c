//! Rows element by element: any strides, any types.

use verdigris_kir::face::{Kernel, Val, Var};

use crate::fuse::compute::Compute;
use crate::fuse::strided::Strided;
use crate::fuse::value::AnyVal;
use crate::fuse::{lanes, math};

use super::losses::{Label, Loss, Results};
use super::spec::{Kind, OfRows, Spec, THREADS};

pub(super) fn rows<'k, T: Compute>(spec: &Spec, k: Kernel<'k>, team: u32, held: u32) {
    let OfRows { rows, extent, extents, operands, loss } = OfRows::declare(k, spec);
    let operands = Strided::all(&spec.types, operands);
    let number = |value: f64| T::constant(k, value);
    let (member, row) = match team {
        1 => (k.constant(0u32), k.cta() * THREADS + k.thread()),
        team => (k.thread() & (team - 1), k.cta() * (THREADS / team) + (k.thread() >> team.ilog2())),
    };
    // All threads stay together; those without a row take the last one and write nothing.
    let inside = row.lt(rows);
    let row = row.min(rows - 1);
    let index = extents.index(row);
    let share = Share { k, extent, member, team, held };
    match (spec.kind, operands.as_slice()) {
        (Kind::Softmax | Kind::LogSoftmax, [x, y]) => {
            let x = share.hold::<T>(x, &index);
            let (peak, sum) = share.peak_and_sum(&x);
            let to = y.at(&index);
            let scale = T::quotient(number(1.0), sum);
            let below = math::log(sum);
            share.each(|at, slot| {
                let shifted = x.value(at, slot) - peak;
                let value = if spec.kind == Kind::LogSoftmax { shifted - below } else { T::exp(shifted) * scale };
                k.when(inside, || to.store(&[at], AnyVal::of(value)));
            });
        }
        (Kind::SoftmaxBackward | Kind::LogSoftmaxBackward, [y, dy, dx]) => {
            let (y, dy) = (share.hold::<T>(y, &index), share.hold::<T>(dy, &index));
            let log = spec.kind == Kind::LogSoftmaxBackward;
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
        (Kind::CrossEntropy { .. }, [logits, labels, results @ ..]) => {
            let loss = Loss::new(k, spec, loss);
            let x = share.hold::<T>(logits, &index);
            let (peak, sum) = share.peak_and_sum(&x);
            let whole = peak + math::log(sum);
            let all = if loss.is_smooth() { share.sum(|at, slot| x.value(at, slot)) } else { number(0.0) };
            k.when(inside & member.eq(0), || {
                let label = Label::load(labels, &index, extent);
                let target = k.var(number(f64::NAN));
                k.when(label.known, || target.set(x.load(label.class)));
                loss.store(Results::of(spec.kind, results), (row, &index), &label, [target.get(), whole, all]);
            });
        }
        (Kind::CrossEntropyBackward { .. }, [logits, labels, dloss, lse @ .., dlogits]) => {
            let loss = Loss::new(k, spec, loss);
            let counted = loss.counted::<T>(labels, (rows, &extents));
            let write = |x: &Held<'k, T>, whole: Val<'k, T>| {
                let gradient = loss.gradient(dloss.load::<T>(&index), Label::load(labels, &index, extent), counted);
                let to = dlogits.at(&index);
                share.each(|at, slot| {
                    let value = gradient.of(T::exp(x.value(at, slot) - whole), at.eq(gradient.class));
                    k.when(inside, || to.store(&[at], AnyVal::of(value)));
                });
            };
            match lse.first() {
                // Results may lie in the place of the logits: a thread without a row reads no other's.
                Some(lse) => k.when(inside, || write(&share.hold(logits, &index), lse.load(&index))),
                None => {
                    let x = share.hold::<T>(logits, &index);
                    let (peak, sum) = share.peak_and_sum(&x);
                    write(&x, peak + math::log(sum));
                }
            }
        }
        (kind, operands) => unreachable!("{kind:?} of {} operands", operands.len()),
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
        lanes::over_team(self.k, self.team, sum.get(), &|x, y| x + y)
    }

    /// `M` and `S`. A row of −∞ alone has `M` = −∞ and NaN for `S`.
    fn peak_and_sum<T: Compute>(&self, x: &Held<'k, T>) -> (Val<'k, T>, Val<'k, T>) {
        let peak = self.k.var(T::constant(self.k, f64::NEG_INFINITY));
        self.each(|at, slot| peak.set(T::max_nan(peak.get(), x.value(at, slot))));
        let peak = lanes::over_team(self.k, self.team, peak.get(), &|x, y| T::max_nan(x, y));
        (peak, self.sum(|at, slot| T::exp(x.value(at, slot) - peak)))
    }
}
