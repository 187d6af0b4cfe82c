//! How far a right answer may lie from the reference: a rounding model, never a constant for a test.
//!
//! For a sum over K products with `S = Σ|a|·|b|` the bound is
//!
//! | precision | bound on the sum |
//! |---|---|
//! | `ieee` | (K+2) · 2⁻²⁴ · S: any order of f32 multiply-adds |
//! | `fp32`, 16- and 8-bit operands | twice that: tensor cores truncate where a multiply-add rounds |
//! | `fp32`, f32 operands | four times that: what the policy promises, with room for operands split into narrower parts |
//! | `tf32` | 2⁻⁹ · S for two operands cut to 11 significant bits, and twice the first line for the sum |
//! | `f16` | 2 · (K+2) · 2⁻¹¹ · S |
//! | `fp8_fast` | 4 · (⌈K/32⌉+2) · 2⁻¹³ · S: each tensor-core step over 32 of K keeps about 14 bits of the running sum |
//! | `fp8_promoted` | the line above for the 128 of K between promotions, and twice the first line for the promoted sums |
//! | `i32` | 0 |
//! | `f64` | (K+2) · 2⁻⁵² · S: ours and the reference's own |
//!
//! The factor 4 of the fp8 lines is an allowance for products that are aligned to the largest one within a step; the width of that
//! accumulator is not documented by the vendor. f32 operands that may be split into bf16 terms (`fp32`, `tf32`) lose up to 2⁻¹³⁴ each beside that, half
//! of the least bf16, which counts where they are below 2⁻¹⁰⁹. Operands that carry scale factors add 4 roundings. On top of the sum each epilogue step
//! adds its own rounding and passes the error through (a Lipschitz factor for functions, `|z|` for a product). Then comes half an ULP
//! of the output type.
//!
//! What pointwise functions may add is said in `tolerance_pointwise.rs`: about 2⁻²¹ for `exp` and its like, or 2⁻¹¹ where the output type
//! has at most 11 significant bits, which admits the chip's approximate instructions there. An exponential of softmax or cross-entropy in f32 may be
//! 0 where it lies below 2⁻¹²⁶ (`ops/softmax.rs` has the reason).

use verdigris_graph::Precision;
use verdigris_tensor::num::{Format, power_of_two};
use verdigris_tensor::{DType, num};

use crate::ops::matmul::Sum;
use crate::tolerance_pointwise::{pass, tiny};

/// A value of the reference and how far a right one may lie from it. The error is infinite where the model says nothing (overflow on
/// the way); such elements are not judged.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Bounded {
    /// The value in `f64`.
    pub value: f64,
    /// The greatest absolute error of a right answer before it is rounded to the output type.
    pub error: f64,
}

/// The unit roundoff of a type of sums and epilogues.
pub(crate) fn roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => power_of_two(-53),
        DType::F16 => power_of_two(-11),
        _ => power_of_two(-24),
    }
}

/// The error of a sum before alpha.
pub fn of_sum(precision: Precision, operands: DType, k: u64, scaled: bool, sum: Sum) -> Bounded {
    if !sum.value.is_finite() {
        // An infinity or a NaN among the operands: IEEE fixes the result in whatever order it is summed.
        return Bounded { value: sum.value, error: 0.0 };
    }
    let terms = k as f64 + 2.0;
    let unit = power_of_two(-24);
    let fp8_steps = |k: u64| 4.0 * (k.div_ceil(32) as f64 + 2.0) * power_of_two(-13);
    let relative = match precision {
        Precision::F64 => terms * power_of_two(-52),
        Precision::Ieee => terms * unit,
        Precision::Fp32 if operands == DType::F32 => 4.0 * terms * unit,
        Precision::Fp32 => 2.0 * terms * unit,
        Precision::Tf32 => power_of_two(-9) + 2.0 * terms * unit,
        Precision::F16 => 2.0 * terms * power_of_two(-11),
        Precision::Fp8Fast => fp8_steps(k),
        Precision::Fp8Promoted => fp8_steps(k.min(128)) + 2.0 * (k.div_ceil(128) as f64 + 2.0) * unit,
        Precision::I32 => 0.0,
    };
    let (largest, smallest) = match precision {
        Precision::F64 => (f64::MAX / 2.0, power_of_two(-1074)),
        Precision::F16 => (Format::F16.max_value(), power_of_two(-24)),
        Precision::I32 => (f64::INFINITY, 0.0),
        _ => (power_of_two(127), power_of_two(-149)),
    };
    let is_split = operands == DType::F32 && matches!(precision, Precision::Fp32 | Precision::Tf32);
    let lost = if is_split { sum.sizes * power_of_two(-134) } else { 0.0 };
    if sum.magnitude > largest {
        return Bounded { value: sum.value, error: f64::INFINITY };
    }
    let scales = if scaled { 4.0 * unit } else { 0.0 };
    Bounded { value: sum.value, error: (relative + scales) * sum.magnitude + terms * smallest + lost }
}

impl Bounded {
    /// An exact value.
    pub const fn exact(value: f64) -> Bounded {
        Bounded { value, error: 0.0 }
    }

    /// A value with an error, neither judged where the type computed in may have overflowed.
    pub(crate) fn new(value: f64, error: f64, epilogue: DType) -> Bounded {
        let limit = if epilogue == DType::F64 { f64::MAX } else { power_of_two(127) };
        if !value.is_finite() {
            // Exact infinities and NaNs stay exact, unless an unjudged value went in; ∞ − ∞ and 0 · ∞ come of such a one.
            return Bounded { value, error: if error < f64::INFINITY { 0.0 } else { f64::INFINITY } };
        }
        let judged = error.is_finite() && value.abs() + error <= limit;
        Bounded { value, error: if judged { error } else { f64::INFINITY } }
    }

    /// `factor · v`; `factor` may itself have been rounded once.
    pub fn scaled(self, factor: f64, epilogue: DType) -> Bounded {
        let value = factor * self.value;
        let own = if factor == 1.0 { 0.0 } else { tiny(value, epilogue) };
        let error = pass(self.error, factor.abs()) + 2.0 * roundoff(epilogue) * value.abs() + own;
        Bounded::new(value, error, epilogue)
    }

    /// `v / count`, or `v` times the rounded reciprocal of it.
    pub(crate) fn shared_out(self, count: f64, compute: DType) -> Bounded {
        let value = self.value / count;
        let own = if count == 1.0 { 0.0 } else { tiny(value, compute) };
        Bounded::new(value, self.error / count + 2.0 * roundoff(compute) * value.abs() + own, compute)
    }

    /// `|v|`.
    pub(crate) fn magnitude(self) -> Bounded {
        Bounded { value: self.value.abs(), error: self.error }
    }

    /// `−v`.
    pub(crate) fn negated(self) -> Bounded {
        Bounded { value: -self.value, error: self.error }
    }

    /// What a tensor of type `dtype` holds of a value that was computed in `compute`: nothing is lost where the two are one type.
    pub(crate) fn held_as(self, dtype: DType, compute: DType) -> Bounded {
        if dtype == compute && self.error > 0.0 {
            return self;
        }
        let mut value = self;
        if compute == DType::I32 && dtype.is_float() && value.value.abs() > power_of_two(24) {
            // An engine may go through f32.
            value.error += half_ulp(DType::F32, value.value);
        }
        value.rounded(dtype, compute)
    }

    /// `v` rounded to a type, as if it had been stored and read again.
    pub fn rounded(self, dtype: DType, epilogue: DType) -> Bounded {
        if self.error == 0.0 {
            return Bounded::exact(num::round_to(dtype, self.value));
        }
        if self.error == f64::INFINITY {
            return self;
        }
        let range = Range::of(dtype);
        let value = if range.saturates { self.value.clamp(-range.below, range.largest) } else { self.value };
        // Beyond this size a value rounds to infinity.
        let overflow = range.largest + half_ulp(dtype, range.largest);
        if !range.saturates && value.abs() - self.error >= overflow {
            return Bounded::exact(f64::INFINITY.copysign(value));
        }
        if !range.saturates && value.abs() + self.error > range.largest {
            return Bounded { value, error: f64::INFINITY };
        }
        let half_ulp = half_ulp(dtype, value.abs() + self.error);
        Bounded::new(value, self.error + half_ulp, epilogue)
    }
}

/// The range of a type's finite values, `[−below, largest]`.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    /// The largest value.
    pub largest: f64,
    /// The smallest value, negated.
    pub below: f64,
    /// Whether conversions clamp to the range; else they go to infinity.
    pub saturates: bool,
}

impl Range {
    /// The range of a type.
    pub fn of(dtype: DType) -> Range {
        if let Some((low, high)) = dtype.integer_range() {
            return Range { largest: high as f64, below: -(low as f64), saturates: true };
        }
        let largest = match dtype.format() {
            Some(format) => format.max_value(),
            None if dtype == DType::Bool => 1.0,
            None => f64::MAX,
        };
        Range { largest, below: largest, saturates: dtype.is_fp8() || dtype == DType::Bool }
    }
}

/// The significant bits of a type: 53 for f64 and the integers.
pub(crate) fn significant_bits(dtype: DType) -> u32 {
    dtype.format().map_or(53, |format| format.mantissa_bits + 1)
}

/// Half the spacing of a type's values at `size`: the greatest error of one rounding.
pub fn half_ulp(dtype: DType, size: f64) -> f64 {
    match dtype.format() {
        Some(format) => 0.5 * format.ulp(size.min(format.max_value())),
        // Half of the least number is none of f64, in which this is computed.
        None if dtype == DType::F64 && size > 0.0 => (size * power_of_two(-53)).max(power_of_two(-1074)),
        None if dtype == DType::F64 => 0.0,
        None => 0.5,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_surely_overflows_is_infinite_and_what_may_is_not_judged() {
        let rounded = |value: f64, error: f64| Bounded { value, error }.rounded(DType::F16, DType::F32);
        assert_eq!(rounded(7e4, 10.0), Bounded::exact(f64::INFINITY));
        assert_eq!(rounded(-7e4, 10.0), Bounded::exact(f64::NEG_INFINITY));
        assert_eq!(rounded(65_515.0, 10.0).error, f64::INFINITY, "on both sides of 65520");
        assert!(rounded(65_000.0, 10.0).error < 50.0);
        assert_eq!(Bounded { value: 1e3, error: 1.0 }.rounded(DType::E4m3, DType::F32).value, 448.0, "what saturates does not");
    }

    #[test]
    fn subnormals_are_as_far_apart_as_they_are() {
        assert_eq!(half_ulp(DType::F64, 1e-310), power_of_two(-1074));
        assert_eq!(half_ulp(DType::F64, 0.0), 0.0);
        let third = Bounded::exact(power_of_two(-140)).shared_out(3.0, DType::F32);
        assert!(third.error >= power_of_two(-150) && third.error < power_of_two(-147), "{third:?}");
        assert_eq!(Bounded::exact(power_of_two(-140)).shared_out(1.0, DType::F32).error, 2.0 * power_of_two(-24) * power_of_two(-140));
    }

    #[test]
    fn terms_of_bf16_lose_what_is_below_them() {
        let sum = |size: f64| Sum { value: size, magnitude: size, sizes: size + 1.0 };
        let relative = |size: f64, precision| of_sum(precision, DType::F32, 1, false, sum(size)).error / size;
        assert!(relative(1e-38, Precision::Fp32) > 1e-3, "a normal number near the least keeps eight bits");
        assert!(relative(1e-30, Precision::Fp32) < 1e-5 && relative(1e-38, Precision::Ieee) < 1e-5);
    }
}
