//! Functions of one and two values, in f32 and f64, good to a few units in the last place over the whole range of their arguments.
//!
//! What series need is computed from their definitions; nothing here is fitted. Angles are reduced with as many bits of 2/π as the
//! argument's exponent asks for.

use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::inst::CvtRound;

use super::compute::{Compute, polynomial};

/// A type in which all functions are there.
pub trait Math: Compute {
    /// `√x`, correctly rounded.
    fn sqrt(x: Val<'_, Self>) -> Val<'_, Self>;

    /// `1 / √x`.
    fn rsqrt(x: Val<'_, Self>) -> Val<'_, Self>;

    /// `x / y`, correctly rounded.
    fn quotient<'k>(x: Val<'k, Self>, y: Val<'k, Self>) -> Val<'k, Self>;

    /// `eˣ`, with results below the normal range, and infinity for infinity.
    fn exp_whole(x: Val<'_, Self>) -> Val<'_, Self>;

    /// `m` and `e` with `x = m · 2ᵉ` and `m` about 1 (2/3 to 4/3), of a positive finite `x`.
    fn split_exponent(x: Val<'_, Self>) -> (Val<'_, Self>, Val<'_, Self>);

    /// Whether the sign bit is set.
    fn is_negative(x: Val<'_, Self>) -> Val<'_, bool>;

    /// `x − n · π/2` and `n mod 4`, with `n` the nearest integer; of a finite `x`.
    fn reduce_angle(x: Val<'_, Self>) -> (Val<'_, Self>, Val<'_, u32>);

    /// ln 2 in two parts, the first with zeros at its end.
    const LN_2: [f64; 2];
    /// Terms of series in which each term is at most 1/25 of the one before.
    const TERMS: usize;
}

/// ln 2 with 32 zeros at its end.
const LN_2_HIGH: f64 = f64::from_bits(0x3FE6_2E42_FEE0_0000);
const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
/// π/2 in two parts.
const HALF_PI: [f64; 2] = [std::f64::consts::FRAC_PI_2, 6.123_233_995_736_766e-17];
/// 2/π behind 64 zeros: enough for the largest exponent of f64.
const TWO_OVER_PI: [u64; 20] = [
    0,
    0xA2F9_836E_4E44_1529,
    0xFC27_57D1_F534_DDC0,
    0xDB62_9599_3C43_9041,
    0xFE51_63AB_DEBB_C561,
    0xB724_6E3A_424D_D2E0,
    0x0649_2EEA_09D1_921C,
    0xFE1D_EB1C_B129_A73E,
    0xE882_35F5_2EBB_4484,
    0xE99C_7026_B45F_7E41,
    0x3991_D639_8353_39F4,
    0x9C84_5F8B_BDF9_283B,
    0x1FF8_97FF_DE05_980F,
    0xEF2F_118B_5A0A_6D1F,
    0x6D36_7ECF_27CB_09B7,
    0x4F46_3F66_9E5F_EA2D,
    0x7527_BAC7_EBE5_F17B,
    0x3D07_39F7_8A52_92EA,
    0x6BFB_5FB1_1F8D_5D08,
    0x5603_3046_FC7B_6BAB,
];

impl Math for f32 {
    fn sqrt(x: Val<'_, f32>) -> Val<'_, f32> {
        x.sqrt()
    }

    fn rsqrt(x: Val<'_, f32>) -> Val<'_, f32> {
        x.rsqrt()
    }

    fn quotient<'k>(x: Val<'k, f32>, y: Val<'k, f32>) -> Val<'k, f32> {
        x.div(y)
    }

    fn exp_whole(x: Val<'_, f32>) -> Val<'_, f32> {
        // log₂ e in two parts; 2ˣ as the square of its root, whose exponent leaves room on both sides.
        const LOW: f32 = (std::f64::consts::LOG2_E - std::f32::consts::LOG2_E as f64) as f32;
        let k = x.kernel();
        let x = x.max_nan(-200.0).min_nan(200.0);
        let scaled = x * std::f32::consts::LOG2_E;
        let lost = k.fma(x, LOW, k.fma(x, std::f32::consts::LOG2_E, -scaled));
        let root = (scaled * 0.5).exp2();
        k.fma(lost * std::f32::consts::LN_2, root, root) * root
    }

    fn split_exponent(x: Val<'_, f32>) -> (Val<'_, f32>, Val<'_, f32>) {
        let k = x.kernel();
        let small = x.lt(f32::MIN_POSITIVE);
        let bits = k.select(small, x * 16_777_216.0, x).bitcast::<u32>();
        let exponent = (bits - (2.0f32 / 3.0).to_bits()) & 0xff80_0000u32;
        let e = (exponent.signed() >> 23).to_f32();
        ((bits - exponent).bitcast(), k.select(small, e - 24.0, e))
    }

    fn is_negative(x: Val<'_, f32>) -> Val<'_, bool> {
        x.bitcast::<i32>().lt(0)
    }

    fn reduce_angle(x: Val<'_, f32>) -> (Val<'_, f32>, Val<'_, u32>) {
        let (rest, quadrant) = reduce(x.convert(CvtRound::None), f64::from(1u32 << 30), 2);
        (rest.convert(CvtRound::Nearest), quadrant)
    }

    const LN_2: [f64; 2] = [0.693_359_375, -2.121_944_400_547_137_7e-4];
    const TERMS: usize = 6;
}

impl Math for f64 {
    fn sqrt(x: Val<'_, f64>) -> Val<'_, f64> {
        x.sqrt()
    }

    fn rsqrt(x: Val<'_, f64>) -> Val<'_, f64> {
        let one = x.kernel().constant(1.0f64);
        one.div(x.sqrt())
    }

    fn quotient<'k>(x: Val<'k, f64>, y: Val<'k, f64>) -> Val<'k, f64> {
        x.div(y)
    }

    fn exp_whole(x: Val<'_, f64>) -> Val<'_, f64> {
        let k = x.kernel();
        let x = <f64 as Compute>::min_nan(<f64 as Compute>::max_nan(x, k.constant(-1400.0)), k.constant(1400.0));
        // The square of the root of eˣ.
        let root = <f64 as Compute>::exp(x * 0.5);
        root * root
    }

    fn split_exponent(x: Val<'_, f64>) -> (Val<'_, f64>, Val<'_, f64>) {
        let k = x.kernel();
        let small = x.lt(f64::MIN_POSITIVE);
        let (low, high) = k.split32(k.select(small, x * f64::from(1u32 << 30) * f64::from(1u32 << 30), x).bitcast::<u64>());
        let exponent = (high - ((2.0f64 / 3.0).to_bits() >> 32) as u32) & 0xfff0_0000u32;
        let e = (exponent.signed() >> 20).convert::<f64>(CvtRound::Nearest);
        (k.join32(low, high - exponent).bitcast(), k.select(small, e - 60.0, e))
    }

    fn is_negative(x: Val<'_, f64>) -> Val<'_, bool> {
        x.bitcast::<i64>().lt(0)
    }

    fn reduce_angle(x: Val<'_, f64>) -> (Val<'_, f64>, Val<'_, u32>) {
        // With 30 zeros at the end of its first part, n · π/2 is exact that far; beyond 2¹⁷ all bits are taken.
        reduce(x, f64::from(1u32 << 17), 16)
    }

    const LN_2: [f64; 2] = [LN_2_HIGH, LN_2_LOW];
    const TERMS: usize = 12;
}

/// `x − n · π/2` and `n mod 4`: by two multiplications where |x| is below `simple`, else by all the bits of 2/π that matter, of which
/// up to `words` of 64 bits do not.
fn reduce<'k>(x: Val<'k, f64>, simple: f64, words: usize) -> (Val<'k, f64>, Val<'k, u32>) {
    let k = x.kernel();
    let n = (x * std::f64::consts::FRAC_2_PI).convert::<f64>(CvtRound::IntNearest);
    let near = k.fma(n, -HALF_PI[1], k.fma(n, -HALF_PI[0], x));
    let rest = k.var(near);
    let quadrant = k.var(n.convert::<i32>(CvtRound::IntNearest).unsigned());
    k.when(x.abs().ge(simple), || {
        let bits = x.bitcast::<u64>();
        let exponent = (bits >> 52).low32() & 0x7ffu32;
        let mantissa = (bits & 0x000f_ffff_ffff_ffffu64) | 0x0010_0000_0000_0000u64;
        // The bits of 2/π · 2^(exponent − 1075) / 4 from the point on: the table's from position exponent − 1075 + 62 on.
        let position = exponent - (1075 - 62);
        let (word, shift) = (position >> 6, position & 63);
        let table = |i: u32| {
            (0..words as u32).fold(k.constant(TWO_OVER_PI[i as usize]), |value, skipped| {
                k.select(word.gt(skipped), k.constant(TWO_OVER_PI[(skipped + 1 + i) as usize]), value)
            })
        };
        let piece = |i: u32| table(i).shl(shift) | (table(i + 1) >> 1).shr(k.constant(63u32) - shift);
        let (first, second, third) = (piece(0), piece(1), piece(2));
        let middle = mantissa * second;
        let low = middle + mantissa.mul_hi(third);
        let carry = k.select(low.lt(middle), 1u64, 0u64);
        let high = mantissa * first + mantissa.mul_hi(second) + carry;
        // Two bits count quadrants; what is left is a signed fraction of one.
        let fraction = (high << 2) | (low >> 62);
        let signed = fraction.bitcast::<i64>();
        let whole = signed.convert::<f64>(CvtRound::Nearest);
        let lost = (signed - whole.convert::<i64>(CvtRound::IntNearest)).convert::<f64>(CvtRound::Nearest);
        let two_32 = f64::from(1u32 << 16) * f64::from(1u32 << 16);
        let far = (low << 2).convert::<f64>(CvtRound::Nearest) * (1.0 / two_32) * (1.0 / two_32);
        let angle = (whole + (lost + far)) * (1.0 / two_32) * (1.0 / two_32) * HALF_PI[0];
        let turns = ((high >> 62) + (fraction >> 63)).low32();
        let negative = x.lt(0.0);
        rest.set(k.select(negative, -angle, angle));
        quadrant.set(k.select(negative, k.constant(0u32) - turns, turns));
    });
    (rest.get(), quadrant.get() & 3)
}

fn number<'k, T: Compute>(k: Kernel<'k>, value: f64) -> Val<'k, T> {
    T::constant(k, value)
}

/// NaN where the condition holds.
fn nan_where<'k, T: Compute>(condition: Val<'k, bool>, value: Val<'k, T>) -> Val<'k, T> {
    let k = value.kernel();
    k.select(condition, number(k, f64::NAN), value)
}

/// `2 · (s + s³/3 + s⁵/5 + …) − 2s` over `s`: the rest of `ln((1 + s) / (1 − s))`, in `z = s²`.
fn log_rest<T: Math>(z: Val<'_, T>, terms: usize) -> Val<'_, T> {
    let coefficients: Vec<f64> = (1..=terms).rev().map(|i| 2.0 / (2 * i + 1) as f64).collect();
    z * polynomial(z, &coefficients)
}

/// The natural logarithm.
pub fn log<T: Math>(x: Val<'_, T>) -> Val<'_, T> {
    let k = x.kernel();
    let (m, e) = T::split_exponent(x);
    let f = m - number(k, 1.0);
    let s = T::quotient(f, f + number(k, 2.0));
    let half_square = f * f * number(k, 0.5);
    let low = s * (half_square + log_rest(s * s, T::TERMS)) + e * number(k, T::LN_2[1]);
    let result = k.fma(e, number(k, T::LN_2[0]), f - (half_square - low));
    let result = k.select(x.eq(number(k, 0.0)), number(k, f64::NEG_INFINITY), result);
    let result = k.select(x.eq(number(k, f64::INFINITY)), x, result);
    nan_where(!x.ge(number(k, 0.0)), result)
}

/// `ln(1 + e)` for `e` from 0 to 1.
fn log_1p_small<T: Math>(e: Val<'_, T>) -> Val<'_, T> {
    let k = e.kernel();
    // ln(1 + e) = 2 · artanh(e / (2 + e)); the argument is at most 1/3.
    let s = T::quotient(e, e + number(k, 2.0));
    s * (number::<T>(k, 2.0) + log_rest(s * s, 2 * T::TERMS - 4))
}

/// `ln(1 + eˣ)`.
pub fn softplus<T: Math>(x: Val<'_, T>) -> Val<'_, T> {
    let k = x.kernel();
    T::max_nan(x, number(k, 0.0)) + log_1p_small(T::exp(-x.abs()))
}

/// `eˣ − 1`.
pub fn exp_m1<T: Math>(x: Val<'_, T>) -> Val<'_, T> {
    let k = x.kernel();
    let coefficients: Vec<f64> = (1..=2 * T::TERMS - 4).rev().map(|i| 1.0 / factorial(i)).collect();
    let series = x * polynomial(x, &coefficients);
    k.select(x.abs().lt(number(k, 0.5)), series, T::exp_whole(x) - number(k, 1.0))
}

fn factorial(n: usize) -> f64 {
    (1..=n).map(|i| i as f64).product()
}

/// The sine and the cosine.
pub fn sin_cos<T: Math>(x: Val<'_, T>) -> [Val<'_, T>; 2] {
    let k = x.kernel();
    let finite = x.abs().lt(number(k, f64::INFINITY));
    let (r, quadrant) = T::reduce_angle(k.select(finite, x, number(k, 0.0)));
    let z = r * r;
    let signed = |i: usize, power: usize| if i.is_multiple_of(2) { 1.0 } else { -1.0 } / factorial(power);
    let odd: Vec<f64> = (1..T::TERMS.min(9)).rev().map(|i| signed(i, 2 * i + 1)).collect();
    let even: Vec<f64> = (1..=T::TERMS.min(9)).rev().map(|i| signed(i, 2 * i)).collect();
    let sine = k.fma(r * z, polynomial(z, &odd), r);
    let cosine = k.fma(z, polynomial(z, &even), number(k, 1.0));
    let swapped = (quadrant & 1).ne(0);
    let sin = k.select(swapped, cosine, sine);
    let cos = k.select(swapped, sine, cosine);
    let sin = k.select((quadrant & 2).ne(0), -sin, sin);
    let cos = k.select(((quadrant + 1) & 2).ne(0), -cos, cos);
    [sin, cos].map(|value| nan_where(!finite, value))
}

/// The tangent.
pub fn tan<T: Math>(x: Val<'_, T>) -> Val<'_, T> {
    let [sin, cos] = sin_cos(x);
    T::quotient(sin, cos)
}

/// `erfc(z)` for `z ≥ 0`.
pub fn erfc_positive<T: Compute>(z: Val<'_, T>) -> Val<'_, T> {
    let k = z.kernel();
    let t = T::divide(number(k, 1.0), k.fma(z, number(k, 0.3), number(k, 1.0)));
    polynomial(t, T::ERFC) * t * T::exp(-(z * z))
}

/// The error function.
pub fn erf<T: Math>(x: Val<'_, T>) -> Val<'_, T> {
    let k = x.kernel();
    let size = x.abs();
    let far = number::<T>(k, 1.0) - erfc_positive(size);
    let far = k.select(T::is_negative(x), -far, far);
    // 2/√π · Σ (−1)ⁿ x²ⁿ⁺¹ / (n! (2n + 1)).
    let scale = std::f64::consts::FRAC_2_SQRT_PI;
    let coefficients: Vec<f64> = (0..T::TERMS + 3)
        .rev()
        .map(|n| scale * if n.is_multiple_of(2) { 1.0 } else { -1.0 } / (factorial(n) * (2 * n + 1) as f64))
        .collect();
    let near = x * polynomial(x * x, &coefficients);
    let result = k.select(size.lt(number(k, 0.6)), near, far);
    k.select(size.eq(number(k, f64::INFINITY)), k.select(T::is_negative(x), number::<T>(k, -1.0), number(k, 1.0)), result)
}

/// The angle of the point (x, y).
pub fn atan2<'k, T: Math>(y: Val<'k, T>, x: Val<'k, T>) -> Val<'k, T> {
    let k = x.kernel();
    let one = number::<T>(k, 1.0);
    let (ax, ay) = (x.abs(), y.abs());
    let steep = ay.gt(ax);
    let (least, greatest) = (k.select(steep, ax, ay), k.select(steep, ay, ax));
    let t = T::quotient(least, greatest);
    let t = k.select(least.eq(number(k, 0.0)), number(k, 0.0), t);
    let t = k.select(least.eq(number(k, f64::INFINITY)), one, t);
    // Two halvings of the angle bring t below 1/5.
    let halved = |t: Val<'k, T>| T::quotient(t, one + T::sqrt(k.fma(t, t, one)));
    let quarter = halved(halved(t));
    let coefficients: Vec<f64> = (0..T::TERMS).rev().map(|i| if i.is_multiple_of(2) { 4.0 } else { -4.0 } / (2 * i + 1) as f64).collect();
    let angle = quarter * polynomial(quarter * quarter, &coefficients);
    let pi = std::f64::consts::PI;
    let angle = k.select(steep, number::<T>(k, pi / 2.0) - angle, angle);
    let angle = k.select(T::is_negative(x), number::<T>(k, pi) - angle, angle);
    let angle = k.select(T::is_negative(y), -angle, angle);
    nan_where(x.ne(x) | y.ne(y), angle)
}

/// `x^y`, in f64.
pub fn pow<'k>(x: Val<'k, f64>, y: Val<'k, f64>) -> Val<'k, f64> {
    let k = x.kernel();
    let size = x.abs();
    let logarithm = log(size);
    let product = y * logarithm;
    let finite = product.abs().lt(1000.0);
    let lost = k.fma(y, logarithm, -product);
    let power = <f64 as Math>::exp_whole(product);
    let power = k.select(finite & power.abs().lt(f64::INFINITY), k.fma(power, lost, power), power);
    // 1 to any power, also where the product is 0 · ∞.
    let power = k.select(size.eq(1.0) & y.abs().eq(f64::INFINITY), 1.0, power);
    let whole = y.convert::<f64>(CvtRound::IntZero).eq(y);
    let half = y * 0.5;
    let odd = whole & half.convert::<f64>(CvtRound::IntZero).ne(half);
    let negative = <f64 as Math>::is_negative(x);
    let signed = k.select(negative & odd, -power, power);
    let signed = nan_where(x.lt(0.0) & !whole & size.lt(f64::INFINITY), signed);
    let signed = nan_where(x.ne(x) | y.ne(y), signed);
    k.select(y.eq(0.0) | x.eq(1.0), 1.0, signed)
}

/// The remainder of the truncated quotient, exact: C's `fmod`.
pub fn fmod<'k>(x: Val<'k, f64>, z: Val<'k, f64>) -> Val<'k, f64> {
    let k = x.kernel();
    let (size, divisor) = (x.abs(), z.abs());
    let proper = size.lt(f64::INFINITY) & divisor.gt(0.0) & divisor.lt(f64::INFINITY);
    let rest = k.var(k.select(proper, size, 0.0));
    k.while_(
        || rest.ge(k.select(proper, divisor, 1.0)),
        || {
            // A multiple of the divisor by a power of two, so large that the quotient has at most 52 bits: n · multiple is then taken off
            // without an error, but for one multiple too many where the quotient was rounded up.
            // Where the quotient itself leaves the range, 960 and then 160 powers of two are taken first.
            let power = |exponent: u64| f64::from_bits((1023 + exponent) << 52);
            let stepped =
                |base: Val<'k, f64>, exponent: u64| k.select(rest.get().div(base).eq(f64::INFINITY), base * power(exponent), base);
            let base = stepped(stepped(divisor, 960), 160);
            let exponent = (rest.get().div(base).bitcast::<u64>() >> 52).low32();
            let excess = k.select(exponent.gt(1023 + 50), exponent - (1023 + 50), 0u32);
            let multiple = base * ((excess + 1023).widen() << 52).bitcast::<f64>();
            let n = rest.get().div(multiple).convert::<f64>(CvtRound::IntZero);
            let left = k.fma(-n, multiple, rest.get());
            rest.set(k.select(left.lt(0.0), left + multiple, left));
        },
    );
    let result = k.select(divisor.eq(f64::INFINITY) & size.lt(f64::INFINITY), size, rest.get());
    let result = k.select(<f64 as Math>::is_negative(x), -result, result);
    nan_where(!(size.lt(f64::INFINITY) & divisor.gt(0.0)), result)
}
