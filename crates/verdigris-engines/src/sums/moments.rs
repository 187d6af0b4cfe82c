//! Mean and squares of deviations of elements that come a few at a time, of several channels at once.
//!
//! With `m` the mean so far of `n` elements, less a shift, and `d = x − shift − m` of the next few elements,
//!
//! ```text
//! s = Σ d     q = Σ d²     n' = n + their number     m' = m + s / n'     M2' = M2 + q − s² / n'
//! ```
//!
//! so that no sum is of values far from the mean, and the shift keeps what a mean far from 0 would round away. What threads and parts have is joined by
//! `Σ n (m − μ)²` with the whole's mean.
//!
//! Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.

use verdigris_kir::face::{Kernel, Val, Var};
use verdigris_tensor::DType;

use crate::engine::{EngineId, Reason, Refusal};
use crate::fuse::compute::Compute;

/// What is added to a variance is there in the type that is computed in: an `eps` above 0 that is rounded to 0 gives `0 · ∞` for channels and rows of equal elements.
#[track_caller]
pub(crate) fn require_eps(engine: EngineId, eps: f64, compute: DType) -> Result<(), Refusal> {
    let is_held = compute == DType::F64 || eps == 0.0 || eps as f32 > 0.0;
    engine.require(
        is_held,
        Reason::Scale,
        format_args!("an eps of {eps:e}, which is 0 in f32; taken is 0, or what f32 holds above it (2^-149 and more)"),
    )
}

/// What a thread knows of its channels while it goes through them.
pub(crate) struct Moments<'k, T> {
    pub(crate) shift: Vec<Val<'k, T>>,
    /// Less the shift.
    pub(crate) mean: Vec<Var<'k, T>>,
    pub(crate) m2: Vec<Var<'k, T>>,
    count: Var<'k, T>,
}

impl<'k, T: Compute> Moments<'k, T> {
    /// Of no elements yet, of a channel for each shift.
    #[track_caller]
    pub(crate) fn new(k: Kernel<'k>, shift: Vec<Val<'k, T>>) -> Self {
        let zeros = || (0..shift.len()).map(|_| k.var(T::constant(k, 0.0))).collect::<Vec<_>>();
        let (mean, m2) = (zeros(), zeros());
        Moments { shift, mean, m2, count: k.var(T::constant(k, 0.0)) }
    }

    /// Takes the next elements of each channel in, as many of each.
    pub(crate) fn take(&self, values: &[Vec<Val<'k, T>>]) {
        let k = self.count.get().kernel();
        let count = self.count.get() + T::constant(k, values[0].len() as f64);
        let share = T::divide(T::constant(k, 1.0), count);
        for (channel, values) in values.iter().enumerate() {
            let (shift, mean, m2) = (self.shift[channel], &self.mean[channel], &self.m2[channel]);
            let before = mean.get();
            let apart: Vec<Val<'k, T>> = values.iter().map(|&value| (value - shift) - before).collect();
            let sum = pairwise(&apart);
            let squares = apart[1..].iter().fold(apart[0] * apart[0], |squares, &apart| k.fma(apart, apart, squares));
            let step = sum * share;
            mean.set(before + step);
            m2.set(m2.get() + k.fma(-sum, step, squares));
        }
        self.count.set(count);
    }
}

/// A sum by halves.
pub(crate) fn pairwise<'k, T: Compute>(values: &[Val<'k, T>]) -> Val<'k, T> {
    match values {
        [value] => *value,
        values => {
            let (low, high) = values.split_at(values.len() / 2);
            pairwise(low) + pairwise(high)
        }
    }
}
