//! The softmax of rows that arrive block by block, over accumulators of 64 rows.

use std::f32::consts::{LN_2, LOG2_E};

use verdigris_kir::face::{Kernel, Val, Var};
use verdigris_kir::tile::fragment::Fragment;

/// The running maximum and sum of a thread's two rows. Sums are of the thread's own columns until the end.
#[derive(Clone, Copy)]
pub(super) struct Softmax<'k> {
    kernel: Kernel<'k>,
    scale: Val<'k, f32>,
    scale_log2: Val<'k, f32>,
    /// Exponentials, and their sums, are `2^lift` times the size.
    lift: f32,
    most: [Var<'k, f32>; 2],
    total: [Var<'k, f32>; 2],
}

/// What is left of two rows at their end.
pub(super) struct Rows<'k> {
    /// By which the sums of values are multiplied.
    pub(super) factor: [Val<'k, f32>; 2],
    /// Whether any key counts; else the sums are of nothing, whatever the values.
    pub(super) has_keys: [Val<'k, bool>; 2],
    /// In natural units.
    pub(super) log_sum_exp: [Val<'k, f32>; 2],
    /// The greatest score, without sinks: −∞ where no key counts. Of rows whose blocks were taken up with some slack it is not known.
    pub(super) greatest: [Val<'k, f32>; 2],
}

impl<'k> Softmax<'k> {
    #[track_caller]
    pub(super) fn new(k: Kernel<'k>, scale: Val<'k, f32>) -> Self {
        let pair = |name| [0, 1].map(|_| k.var_unset(Some(name)));
        Softmax { kernel: k, scale, scale_log2: scale * LOG2_E, lift: 0.0, most: pair("row maximum"), total: pair("row sum") }
    }

    /// The same rows under another scale, with exponentials that are `2^lift` times the size: rounded to a type of few bits, they reach further down.
    #[track_caller]
    pub(super) fn lifted(&self, scale: Val<'k, f32>, lift: f32) -> Self {
        Softmax { scale, scale_log2: scale * LOG2_E, lift, ..*self }
    }

    /// What is taken off exponents whose greatest is `most`.
    fn taken_off(&self, most: Val<'k, f32>) -> Val<'k, f32> {
        if self.lift == 0.0 { most } else { most - self.lift }
    }

    /// Nothing so far, for those who go on with [`Softmax::next`] from the first block on.
    #[track_caller]
    pub(super) fn begin(&self) {
        for (most, total) in self.most.iter().zip(&self.total) {
            most.set(f32::NEG_INFINITY);
            total.set(0.0);
        }
    }

    /// A maximum that may be taken off: not that of a row without keys, whose scores stay −∞.
    fn finite(&self, most: Val<'k, f32>) -> Val<'k, f32> {
        self.kernel.select(most.eq(f32::NEG_INFINITY), 0.0, most)
    }

    /// `2^(s·c − m·c)`, lifted, in place.
    fn exponents(&self, scores: &Fragment<'k, f32>, most: [Val<'k, f32>; 2]) {
        let k = self.kernel;
        let shift = most.map(|most| -self.taken_off(most * self.scale_log2));
        scores.map_in_place(|score, half, _| k.fma(score, self.scale_log2, shift[half as usize]).exp2());
    }

    /// The first block: scores become exponentials.
    #[track_caller]
    pub(super) fn first(&self, scores: &Fragment<'k, f32>) {
        let most = scores.reduce_rows(|a, b| a.max(b));
        for (register, most) in self.most.iter().zip(most) {
            register.set(most);
        }
        self.exponents(scores, most.map(|most| self.finite(most)));
        for (half, total) in (0..).zip(&self.total) {
            total.set(scores.reduce_own(half, |a, b| a + b));
        }
    }

    /// A block behind it; returns the factors by which sums so far shrink.
    #[track_caller]
    pub(super) fn next(&self, scores: &Fragment<'k, f32>) -> [Val<'k, f32>; 2] {
        self.next_of_all(scores, 0.0, |most| most)
    }

    /// The same where others have further scores of the rows: `of_all` makes of the maxima of these those of all, alike for each of them. What is taken off
    /// rises where scores are more than `slack` above it, in powers of 2: with some, exponentials are up to `2^slack`, and most factors are 1.
    #[track_caller]
    pub(super) fn next_of_all(
        &self,
        scores: &Fragment<'k, f32>,
        slack: f32,
        of_all: impl FnOnce([Val<'k, f32>; 2]) -> [Val<'k, f32>; 2],
    ) -> [Val<'k, f32>; 2] {
        let most = of_all(scores.reduce_rows(|a, b| a.max(b)));
        let (mut correction, mut taken_off) = (Vec::new(), Vec::new());
        for (register, most) in self.most.iter().zip(most) {
            let old = register.get();
            let new = old.max(most);
            let new = if slack > 0.0 { self.kernel.select(((new - old) * self.scale_log2).gt(slack), new, old) } else { new };
            register.set(new);
            let new = self.finite(new);
            correction.push(((old - new) * self.scale_log2).exp2());
            taken_off.push(new);
        }
        let correction = [correction[0], correction[1]];
        self.exponents(scores, [taken_off[0], taken_off[1]]);
        for (half, (total, correction)) in (0..).zip(self.total.iter().zip(correction)) {
            let sum = scores.reduce_own(half, |a, b| a + b);
            total.set(self.kernel.fma(*total, correction, sum));
        }
        correction
    }

    /// Before the end, where others have further scores: `of_all` makes of the sums of a thread's own columns those that the lanes of all share.
    #[track_caller]
    pub(super) fn total_of_all(&self, of_all: impl FnOnce([Val<'k, f32>; 2]) -> [Val<'k, f32>; 2]) {
        for (register, total) in self.total.iter().zip(of_all([self.total[0].get(), self.total[1].get()])) {
            register.set(total);
        }
    }

    /// The end; `sinks` are one more logarithm in each sum.
    #[track_caller]
    pub(super) fn finish(&self, sinks: Option<[Val<'k, f32>; 2]>) -> Rows<'k> {
        let k = self.kernel;
        let (mut factor, mut has_keys, mut log_sum_exp, mut greatest) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (half, (most, total)) in self.most.iter().zip(&self.total).enumerate() {
            let pair = total.get() + k.shfl_bfly::<f32>(*total, 1);
            let total = pair + k.shfl_bfly::<f32>(pair, 2);
            let attends = most.ne(f32::NEG_INFINITY);
            greatest.push(*most * self.scale);
            let most = self.taken_off(*most * self.scale_log2);
            let (most, total, shrink) = match sinks.map(|sinks| sinks[half]) {
                None => (most, total, None),
                Some(sink) => {
                    let sink = sink * LOG2_E;
                    let larger = self.finite(most.max(sink));
                    let shrink = (most - larger).exp2();
                    (larger, k.fma(total, shrink, (sink - larger).exp2()), Some(shrink))
                }
            };
            // A maximum passes by what is no number, the sum does not.
            has_keys.push(attends | !total.eq(total));
            let inverse = total.rcp();
            factor.push(shrink.map_or(inverse, |shrink| inverse * shrink));
            log_sum_exp.push((most + total.log2()) * LN_2);
        }
        Rows {
            factor: [factor[0], factor[1]],
            has_keys: [has_keys[0], has_keys[1]],
            log_sum_exp: [log_sum_exp[0], log_sum_exp[1]],
            greatest: [greatest[0], greatest[1]],
        }
    }
}
