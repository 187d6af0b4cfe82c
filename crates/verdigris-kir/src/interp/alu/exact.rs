//! Correctly rounded arithmetic in every direction.
//!
//! The formats up to f32 go through f64: a product of two is exact there, and a sum is taken *rounded to odd*, which keeps enough of what
//! was lost for any later rounding to a format at least two bits narrower to be the rounding of the exact sum (Boldo and Melquiond,
//! "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd", IEEE Trans. Computers 57, 2008). f64 itself
//! goes through 128-bit integers.

use crate::inst::Round;
use verdigris_tensor::num::{Format, Overflow, Rounding};

/// The bits of the f64 NaN that an invalid operation gives on the chip.
pub const F64_INVALID: u64 = 0xfff8_0000_0000_0000;

/// The same direction in the vocabulary of the conversions.
pub const fn direction(round: Round) -> Rounding {
    match round {
        Round::Nearest => Rounding::NearestEven,
        Round::Zero => Rounding::TowardZero,
        Round::Down => Rounding::Down,
        Round::Up => Rounding::Up,
    }
}

/// `a + b` rounded to odd: where inexact, the neighbour with an odd last bit.
#[inline(always)]
pub fn sum_to_odd(a: f64, b: f64) -> f64 {
    let sum = a + b;
    if !sum.is_finite() {
        return sum;
    }
    let b_seen = sum - a;
    let error = (a - (sum - b_seen)) + (b - b_seen);
    if error == 0.0 || sum.to_bits() & 1 == 1 {
        return sum;
    }
    let outward = (error > 0.0) == (sum > 0.0);
    f64::from_bits(if outward { sum.to_bits() + 1 } else { sum.to_bits() - 1 })
}

/// An integer as f64, rounded to odd beyond 2⁵³.
#[inline(always)]
pub fn integer_to_odd(magnitude: u64) -> f64 {
    if magnitude >> 53 == 0 {
        return magnitude as f64;
    }
    let lost = magnitude & 0x7ff;
    ((magnitude & !0x7ff) | (u64::from(lost != 0) << 11)) as f64
}

/// `p + c` rounded once to `format`, for a `p` and a `c` that f64 holds exactly and whose sum does not leave its range.
#[inline(always)]
pub fn sum(format: Format, p: f64, c: f64, round: Round) -> u32 {
    let exact = sum_to_odd(p, c);
    if exact == 0.0 && round == Round::Down && !(is_positive_zero(p) && is_positive_zero(c)) {
        return format.sign_bit();
    }
    format.encode(exact, direction(round), Overflow::Ieee)
}

#[inline(always)]
fn is_positive_zero(value: f64) -> bool {
    value.to_bits() == 0
}

/// `magnitude · 2^exponent` rounded to f64. `magnitude` is not 0; its last bit may stand for everything below it.
pub fn pack_f64(negative: bool, magnitude: u128, exponent: i32, round: Round) -> f64 {
    let sign = u64::from(negative) << 63;
    let top = 127 - magnitude.leading_zeros() as i32 + exponent;
    let shift = top.max(-1022) - 52 - exponent;
    let (kept, above_half, half, inexact) = if shift <= 0 {
        ((magnitude << -shift) as u64, false, false, false)
    } else if shift > 127 {
        (0, false, false, true)
    } else {
        let rest = magnitude & ((1u128 << shift) - 1);
        let middle = 1u128 << (shift - 1);
        ((magnitude >> shift) as u64, rest > middle, rest == middle, rest != 0)
    };
    let away = match round {
        Round::Nearest => above_half || (half && kept & 1 == 1),
        Round::Zero => false,
        Round::Down => negative && inexact,
        Round::Up => !negative && inexact,
    };
    let field = if top < -1022 { 0 } else { (top + 1022) as u64 };
    const INFINITY: u64 = 0x7ff0_0000_0000_0000;
    if field >= 0x7fe || (field << 52) + kept + u64::from(away) >= INFINITY {
        let to_infinity = match round {
            Round::Nearest => true,
            Round::Zero => false,
            Round::Down => negative,
            Round::Up => !negative,
        };
        return f64::from_bits(sign | if to_infinity { INFINITY } else { INFINITY - 1 });
    }
    f64::from_bits(sign | ((field << 52) + kept + u64::from(away)))
}

/// A finite value as significand and exponent.
fn parts(value: f64) -> (u64, i32) {
    let bits = value.to_bits();
    let biased = ((bits >> 52) & 0x7ff) as i32;
    let fraction = bits & ((1 << 52) - 1);
    if biased == 0 { (fraction, -1074) } else { (fraction | 1 << 52, biased - 1075) }
}

/// The NaN that an f64 operation passes on: the first NaN among its operands, made quiet.
#[inline(always)]
pub fn first_nan(operands: &[f64]) -> Option<f64> {
    operands.iter().find(|x| x.is_nan()).map(|x| f64::from_bits(x.to_bits() | 1 << 51))
}

/// `a · b + c` in f64 with one rounding.
pub fn fma_f64(a: f64, b: f64, c: f64, round: Round) -> f64 {
    if let Some(nan) = first_nan(&[a, b, c]) {
        return nan;
    }
    let nearest = a.mul_add(b, c);
    if nearest.is_nan() {
        return f64::from_bits(F64_INVALID);
    }
    if round == Round::Nearest || !(a.is_finite() && b.is_finite() && c.is_finite()) {
        return nearest;
    }
    let product_negative = a.is_sign_negative() != b.is_sign_negative();
    let ((ma, ea), (mb, eb), (mc, ec)) = (parts(a), parts(b), parts(c));
    let product = u128::from(ma) * u128::from(mb);
    if product == 0 && mc == 0 {
        let both = product_negative == c.is_sign_negative();
        return if if both { product_negative } else { round == Round::Down } { -0.0 } else { 0.0 };
    }
    if product == 0 {
        return c;
    }
    // Both with their leading bit at 125, so that a sum cannot carry out of 128 bits.
    let normal = |magnitude: u128, exponent: i32| {
        let up = magnitude.leading_zeros() as i32 - 2;
        (magnitude << up, exponent - up)
    };
    let p = normal(product, ea + eb);
    if mc == 0 {
        return pack_f64(product_negative, p.0, p.1, round);
    }
    let c_parts = normal(u128::from(mc), ec);
    let (mut large, mut small) = ((p, product_negative), (c_parts, c.is_sign_negative()));
    if (large.0.1, large.0.0) < (small.0.1, small.0.0) {
        std::mem::swap(&mut large, &mut small);
    }
    let ((ml, el), large_negative) = large;
    let ((ms, es), small_negative) = small;
    let gap = el - es;
    let aligned = if gap > 127 { 1 } else { (ms >> gap) | u128::from(ms & ((1u128 << gap) - 1) != 0) };
    let magnitude = if large_negative == small_negative { ml + aligned } else { ml - aligned };
    if magnitude == 0 {
        return if round == Round::Down { -0.0 } else { 0.0 };
    }
    pack_f64(large_negative, magnitude, el, round)
}

/// `a + b` in f64.
pub fn add_f64(a: f64, b: f64, round: Round) -> f64 {
    fma_f64(a, 1.0, b, round)
}

/// `a · b` in f64.
pub fn mul_f64(a: f64, b: f64, round: Round) -> f64 {
    let zero = if a.is_sign_negative() != b.is_sign_negative() { -0.0 } else { 0.0 };
    fma_f64(a, b, zero, round)
}
