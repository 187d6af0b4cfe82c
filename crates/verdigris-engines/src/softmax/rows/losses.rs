//! Cross-entropy beside the exponentials: the loss of a row, its gradient, and the launches that count rows and add up losses.

use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::inst::{Atomic, CvtRound, Order, Scope};

use crate::fuse::compute::Compute;
use crate::fuse::lanes;
use crate::fuse::strided::Strided;
use crate::fuse::value::{AnyVal, store_raw};
use crate::layout::space::Space;

use super::spec::{Count, Join, Kind, LOSS_THREADS, LossValues, Number, Spec};

/// Rows that a thread takes at a time behind the rows' own launch.
const UNROLL: u32 = 4;

/// What is known of the label of a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Label<'k> {
    label: Val<'k, i64>,
    /// It is a class.
    pub(super) known: Val<'k, bool>,
    /// The class, where it is one.
    pub(super) class: Val<'k, u32>,
}

impl<'k> Label<'k> {
    /// Of the row at an index; `extent` is the number of classes.
    pub(super) fn load(labels: &Strided<'k>, index: &[Val<'k, u32>], extent: Val<'k, u32>) -> Self {
        let label = labels.load_integer(index);
        let known = label.ge(0i64) & label.lt(extent.widen().bitcast::<i64>());
        Label { label, known, class: label.unsigned().low32() }
    }
}

/// A loss in a kernel.
#[derive(Clone, Copy)]
pub(super) struct Loss<'k> {
    k: Kernel<'k>,
    kind: Kind,
    values: LossValues<'k>,
}

/// The operands of a loss that have one value a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Results<'o, 'k> {
    pub(super) loss: Option<&'o Strided<'k>>,
    pub(super) lse: Option<&'o Strided<'k>>,
}

impl<'o, 'k> Results<'o, 'k> {
    /// Those of what stands behind logits and labels.
    pub(super) fn of(kind: Kind, results: &'o [Strided<'k>]) -> Self {
        let kept = matches!(kind, Kind::CrossEntropy { kept: true, .. });
        let (loss, lse) = if kept { (None, results.first()) } else { (results.first(), results.get(1)) };
        Results { loss, lse }
    }
}

impl<'k> Loss<'k> {
    pub(super) fn new(k: Kernel<'k>, spec: &Spec, values: Option<LossValues<'k>>) -> Self {
        Loss { k, kind: spec.kind, values: values.expect("a loss has its parameters") }
    }

    /// Whether the sum of all logits counts.
    pub(super) fn is_smooth(&self) -> bool {
        matches!(self.kind, Kind::CrossEntropy { smooth: true, .. })
    }

    /// Stores what a row gives: `target` is the logit of its class (NaN without one), `whole` the log-sum-exp, `all` the sum of logits. By one thread.
    #[allow(clippy::too_many_arguments, reason = "what a row gives")]
    pub(super) fn store<T: Compute>(
        &self,
        results: Results<'_, 'k>,
        (row, index): (Val<'k, u32>, &[Val<'k, u32>]),
        label: &Label<'k>,
        [target, whole, all]: [Val<'k, T>; 3],
    ) {
        let (k, LossValues { smoothing, classes, ignore_index, sums, .. }) = (self.k, self.values);
        let number = |value: f64| T::constant(k, value);
        let (spread, classes) = (T::from_f64(smoothing), T::from_f64(classes));
        let kept_part = number(1.0) - spread;
        let mut value = whole - kept_part * target;
        if self.is_smooth() {
            value = value - T::quotient(spread, classes) * all;
        }
        let mut weight = number(1.0);
        if matches!(self.kind, Kind::CrossEntropy { ignore: true, .. }) {
            let skipped = label.label.eq(ignore_index);
            value = k.select(skipped, number(0.0), value);
            weight = k.select(skipped, number(0.0), weight);
        }
        if let Some(loss) = results.loss {
            loss.store(index, AnyVal::of(value));
        }
        if let Some(lse) = results.lse {
            lse.store(index, AnyVal::of(whole));
        }
        if let Some([losses, weights]) = sums {
            k.st_global(losses.at(row, T::TY.bytes()), 0, value);
            k.st_global(weights.at(row, T::TY.bytes()), 0, weight);
        }
    }

    /// The number of rows that are not ignored, where each CTA counts them by itself: all its threads call it.
    pub(super) fn counted<T: Compute>(&self, labels: &Strided<'k>, (rows, extents): (Val<'k, u32>, &Space<'k>)) -> Option<Val<'k, T>> {
        if !matches!(self.kind, Kind::CrossEntropyBackward { number: Number::Counted, .. }) {
            return None;
        }
        let k = self.k;
        let threads = k.threads();
        let sum = k.var(0u32);
        let turns = (rows + (threads - 1) - k.thread()) >> threads.ilog2();
        k.range_unrolled(turns, UNROLL, |turn| {
            let row = k.thread() + turn * threads;
            sum.set(sum + counts(labels, &extents.index(row), self.values.ignore_index));
        });
        let whole = lanes::over_team(k, threads, sum.get(), &|x, y| x + y);
        Some(T::from_i32(whole.signed()))
    }

    /// What the gradients of a row's logits have in common; `counted`: what [`Loss::counted`] gave.
    pub(super) fn gradient<T: Compute>(&self, dloss: Val<'k, T>, label: Label<'k>, counted: Option<Val<'k, T>>) -> Gradient<'k, T> {
        let (k, LossValues { smoothing, classes, ignore_index, counted: from, count, .. }) = (self.k, self.values);
        let (spread, classes) = (T::from_f64(smoothing), T::from_f64(classes));
        let count = counted.unwrap_or_else(|| {
            T::from_f64(match from {
                Some(from) => k.ld_global::<u64>(from.address(), 0).convert::<f64>(CvtRound::Nearest),
                None => count.expect("a number that is not counted is given"),
            })
        });
        let share = T::quotient(dloss, count);
        let share = k.select(label.known, share, T::constant(k, f64::NAN));
        let ignores = matches!(self.kind, Kind::CrossEntropyBackward { ignore: true, .. });
        Gradient {
            share,
            hit: T::constant(k, 1.0) - spread,
            each_class: T::quotient(spread, classes),
            class: label.class,
            ignored: ignores.then(|| label.label.eq(ignore_index)),
        }
    }
}

/// What the gradients of a row's logits have in common.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gradient<'k, T> {
    share: Val<'k, T>,
    hit: Val<'k, T>,
    each_class: Val<'k, T>,
    /// The class that the label names, where it names one.
    pub(super) class: Val<'k, u32>,
    ignored: Option<Val<'k, bool>>,
}

impl<'k, T: Compute> Gradient<'k, T> {
    /// Of a logit whose class has the probability `p`; `is_class`: whether it is the label's.
    pub(super) fn of(&self, p: Val<'k, T>, is_class: Val<'k, bool>) -> Val<'k, T> {
        let k = p.kernel();
        let hit = k.select(is_class, self.hit, T::constant(k, 0.0));
        let value = self.share * (p - hit - self.each_class);
        self.ignored.map_or(value, |ignored| k.select(ignored, T::constant(k, 0.0), value))
    }
}

/// 1 for a row that is not ignored, else 0.
fn counts<'k>(labels: &Strided<'k>, index: &[Val<'k, u32>], ignore_index: Val<'k, i64>) -> Val<'k, u32> {
    let label = labels.load_integer(index);
    label.kernel().select(label.eq(ignore_index), 0u32, 1u32)
}

/// CTAs go through all labels, and add how many of them are not ignored: whole numbers, so that any order gives the same.
pub(super) fn count(spec: &Spec, k: Kernel<'_>) {
    let Count { rows, is_alone, ignore_index, extents, labels, count } = Count::declare(k, spec);
    let labels = Strided::new(spec.types[0], labels);
    let sum = k.var(0u32);
    let first = k.cta() * (LOSS_THREADS * UNROLL) + k.thread();
    for turn in 0..UNROLL {
        let row = first + turn * LOSS_THREADS;
        k.when(row.lt(rows), || sum.set(sum + counts(&labels, &extents.index(row), ignore_index)));
    }
    let whole = lanes::over_team(k, LOSS_THREADS, sum.get(), &|x, y| x + y);
    k.when(k.thread().eq(0), || {
        let whole = whole.widen();
        let add = || k.red_global(Atomic::Add, count.address(), 0, &[whole], Order::Relaxed(Scope::Gpu));
        k.when_else(is_alone.ne(0), || k.st_global(count.address(), 0, whole), add);
    });
}

/// Labels that a CTA of [`count`] goes through.
pub(super) const COUNTED_ROWS: u32 = LOSS_THREADS * UNROLL;

/// A CTA adds up a part of the row losses.
pub(super) fn join<'k, T: Compute>(spec: &Spec, k: Kernel<'k>) {
    let Join { rows, part_rows, losses, weights, loss, weight: weight_sum } = Join::declare(k, spec);
    let bytes = T::TY.bytes();
    let zero = T::constant(k, 0.0);
    let (sum, weight) = (k.var(zero), k.var(zero));
    let first = k.cta().widen() * part_rows;
    let end = (first + part_rows).min(rows);
    let row = k.var(first + k.thread().widen());
    let take = |row: Val<'k, u64>| {
        let at = row * u64::from(bytes);
        sum.set(sum + k.ld_global::<T>(losses.address() + at, 0));
        if let Some(weights) = weights {
            weight.set(weight + k.ld_global::<T>(weights.address() + at, 0));
        }
    };
    // Several at a time as long as there are so many, so that their loads overlap.
    k.while_(
        || (row.get() + u64::from((UNROLL - 1) * LOSS_THREADS)).lt(end),
        || {
            let from = row.get();
            (0..UNROLL).for_each(|turn| take(from + u64::from(turn * LOSS_THREADS)));
            row.set(from + u64::from(UNROLL * LOSS_THREADS));
        },
    );
    k.while_(
        || row.lt(end),
        || {
            take(row.get());
            row.set(row + u64::from(LOSS_THREADS));
        },
    );
    let add = |x: Val<'k, T>, y: Val<'k, T>| x + y;
    let total = lanes::over_team(k, LOSS_THREADS, sum.get(), &add);
    let of_weights = weights.map(|_| lanes::over_team(k, LOSS_THREADS, weight.get(), &add));
    k.when(k.thread().eq(0), || {
        if let Kind::Part { .. } = spec.kind {
            k.st_global(loss.at(k.cta(), bytes), 0, total);
            if let Some((to, weight)) = weight_sum.zip(of_weights) {
                k.st_global(to.at(k.cta(), bytes), 0, weight);
            }
            return;
        }
        let total = of_weights.map_or(total, |weight| T::quotient(total, weight));
        store_raw(k, loss.address(), &[AnyVal::of(total).encoded(k, spec.types[0])]);
    });
}
