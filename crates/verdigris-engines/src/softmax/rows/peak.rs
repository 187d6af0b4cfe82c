//! The maximum `M` of numbers and the sum `S` of `e^(x − M)`, carried together.

use verdigris_kir::face::{Kernel, Val};

use crate::fuse::compute::Compute;
use crate::fuse::lanes;

/// Of some of a row's elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peak<'k, T> {
    /// The maximum; −∞ of none.
    pub(super) peak: Val<'k, T>,
    /// The sum of exponentials, from which the maximum is taken off.
    pub(super) sum: Val<'k, T>,
    /// The sum of the elements, where it is wanted.
    pub(super) all: Val<'k, T>,
}

/// What is taken off in front of exponentials: the maximum, or 0 where it is −∞, of which exponentials are then 0 rather than NaN.
pub(super) fn shift_of<T: Compute>(peak: Val<'_, T>) -> Val<'_, T> {
    let k = peak.kernel();
    k.select(peak.eq(T::constant(k, f64::NEG_INFINITY)), T::constant(k, 0.0), peak)
}

impl<'k, T: Compute> Peak<'k, T> {
    /// The same under another, greater maximum.
    pub(super) fn shifted(self, peak: Val<'k, T>) -> Self {
        Peak { peak, sum: self.sum * T::fast_exp(self.peak - shift_of(peak)), ..self }
    }

    /// Of the elements of both.
    pub(super) fn with(self, other: Self) -> Self {
        let peak = T::max_nan(self.peak, other.peak);
        let [one, two] = [self.shifted(peak), other.shifted(peak)];
        // A product and a sum each, so that both sides of an exchange find the same bits.
        Peak { peak, sum: one.sum + two.sum, all: self.all + other.all }
    }

    /// Of the elements of all. Under their common maximum at once: each exponential loses a little, and one behind the other would lose it as often.
    pub(super) fn of_all(parts: Vec<Self>) -> Self {
        let peak = greatest(parts.iter().map(|part| part.peak).collect());
        let sums = parts.iter().map(|part| part.shifted(peak).sum).collect();
        Peak { peak, sum: total(sums), all: total(parts.iter().map(|part| part.all).collect()) }
    }

    /// Of the warps of a team, each of which has the same in all lanes.
    pub(super) fn over_warps(self, k: Kernel<'k>, team: u32, wants_all: bool) -> Self {
        let Peak { peak, sum, all } = self;
        if wants_all {
            let combine = |[peak, sum, all]: [Val<'k, T>; 3], [peak2, sum2, all2]: [Val<'k, T>; 3]| {
                let both = Peak { peak, sum, all }.with(Peak { peak: peak2, sum: sum2, all: all2 });
                [both.peak, both.sum, both.all]
            };
            let [peak, sum, all] = lanes::over_warps(k, team, [peak, sum, all], &combine);
            return Peak { peak, sum, all };
        }
        let combine = |[peak, sum]: [Val<'k, T>; 2], [peak2, sum2]: [Val<'k, T>; 2]| {
            let both = Peak { peak, sum, all }.with(Peak { peak: peak2, sum: sum2, all });
            [both.peak, both.sum]
        };
        let [peak, sum] = lanes::over_warps(k, team, [peak, sum], &combine);
        Peak { peak, sum, all }
    }

    /// Of a whole row: one of nothing but −∞ has no softmax, and NaN for a sum.
    pub(super) fn checked(self) -> Self {
        let k = self.peak.kernel();
        let number = |value: f64| T::constant(k, value);
        Peak { sum: k.select(self.peak.eq(number(f64::NEG_INFINITY)), number(f64::NAN), self.sum), ..self }
    }
}

/// The greatest of some numbers, by halves.
pub(super) fn greatest<T: Compute>(values: Vec<Val<'_, T>>) -> Val<'_, T> {
    halved(values, |x, y| T::max_nan(x, y))
}

/// The sum of some numbers, by halves.
pub(super) fn total<T: Compute>(values: Vec<Val<'_, T>>) -> Val<'_, T> {
    halved(values, |x, y| x + y)
}

fn halved<'k, T: Compute>(mut values: Vec<Val<'k, T>>, combine: impl Fn(Val<'k, T>, Val<'k, T>) -> Val<'k, T>) -> Val<'k, T> {
    while values.len() > 1 {
        values = values.chunks(2).map(|pair| if let [x, y] = *pair { combine(x, y) } else { pair[0] }).collect();
    }
    values[0]
}
