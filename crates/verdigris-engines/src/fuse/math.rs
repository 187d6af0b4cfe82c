//! Series and other functions that take more than an expression, in f32 and f64: good to a few units in the last place over the whole range of
//! their arguments.
//!
//! What series need is computed from their definitions; nothing here is fitted.

use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::inst::CvtRound;

use super::compute::{Compute, factorial, polynomial};

/// `1 / (1 + e^−x)`: absolute error of a few units in the last place of 1.
#[track_caller]
pub(super) fn sigmoid<'k, T: Compute>(x: Val<'k, T>) -> Val<'k, T> {
    let one = T::constant(x.kernel(), 1.0);
    T::reciprocal(one + T::fast_exp(-x))
}

#[track_caller]
fn number<'k, T: Compute>(k: Kernel<'k>, value: f64) -> Val<'k, T> {
    T::constant(k, value)
}

/// NaN where the condition holds.
#[track_caller]
fn nan_where<'k, T: Compute>(condition: Val<'k, bool>, value: Val<'k, T>) -> Val<'k, T> {
    let k = value.kernel();
    k.select(condition, number(k, f64::NAN), value)
}

/// `2 · (s + s³/3 + s⁵/5 + …) − 2s` over `s`: the rest of `ln((1 + s) / (1 − s))`, in `z = s²`.
fn log_rest<T: Compute>(z: Val<'_, T>, terms: usize) -> Val<'_, T> {
    let coefficients: Vec<f64> = (1..=terms).rev().map(|i| 2.0 / (2 * i + 1) as f64).collect();
    z * polynomial(z, &coefficients)
}

/// The natural logarithm.
pub(crate) fn log<T: Compute>(x: Val<'_, T>) -> Val<'_, T> {
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
fn log_1p_small<T: Compute>(e: Val<'_, T>) -> Val<'_, T> {
    let k = e.kernel();
    // ln(1 + e) = 2 · artanh(e / (2 + e)); the argument is at most 1/3.
    let s = T::quotient(e, e + number(k, 2.0));
    s * (number::<T>(k, 2.0) + log_rest(s * s, 2 * T::TERMS - 4))
}

/// `ln(1 + eˣ)`.
pub(crate) fn softplus<T: Compute>(x: Val<'_, T>) -> Val<'_, T> {
    let k = x.kernel();
    T::max_nan(x, number(k, 0.0)) + log_1p_small(T::exp(-x.abs()))
}

/// `eˣ − 1`.
pub(crate) fn exp_m1<T: Compute>(x: Val<'_, T>) -> Val<'_, T> {
    let k = x.kernel();
    let coefficients: Vec<f64> = (1..=2 * T::TERMS - 4).rev().map(|i| 1.0 / factorial(i)).collect();
    let series = x * polynomial(x, &coefficients);
    k.select(x.abs().lt(number(k, 0.5)), series, T::exp_whole(x) - number(k, 1.0))
}

/// The sine and the cosine.
pub(crate) fn sin_cos<T: Compute>(x: Val<'_, T>) -> [Val<'_, T>; 2] {
    let k = x.kernel();
    let finite = x.abs().lt(number(k, f64::INFINITY));
    let (r, quadrant) = T::reduce_angle(k.select(finite, x, number(k, 0.0)));
    sin_cos_of_quadrant(r, quadrant).map(|value| nan_where(!finite, value))
}

/// Sine and cosine of `r + quadrant · π/2`, for `r` from −π/4 to π/4.
pub(crate) fn sin_cos_of_quadrant<'k, T: Compute>(r: Val<'k, T>, quadrant: Val<'k, u32>) -> [Val<'k, T>; 2] {
    let k = r.kernel();
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
    [sin, cos]
}

/// The tangent.
pub(crate) fn tan<T: Compute>(x: Val<'_, T>) -> Val<'_, T> {
    let [sin, cos] = sin_cos(x);
    T::quotient(sin, cos)
}

/// `erfc(z)` for `z ≥ 0`: absolute error of a few units in the last place of 1.
pub(crate) fn erfc_positive<T: Compute>(z: Val<'_, T>) -> Val<'_, T> {
    scaled_erfc(z) * T::fast_exp(-(z * z))
}

/// `erfc(z) · exp(z²)` for `z ≥ 0`.
pub(crate) fn scaled_erfc<T: Compute>(z: Val<'_, T>) -> Val<'_, T> {
    let k = z.kernel();
    let t = T::reciprocal(k.fma(z, number(k, 0.3), number(k, 1.0)));
    polynomial(t, T::ERFC) * t
}

/// The error function.
pub(crate) fn erf<T: Compute>(x: Val<'_, T>) -> Val<'_, T> {
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
#[track_caller]
pub(crate) fn atan2<'k, T: Compute>(y: Val<'k, T>, x: Val<'k, T>) -> Val<'k, T> {
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
#[track_caller]
pub(crate) fn pow<'k>(x: Val<'k, f64>, y: Val<'k, f64>) -> Val<'k, f64> {
    let k = x.kernel();
    let size = x.abs();
    let logarithm = log(size);
    let product = y * logarithm;
    let finite = product.abs().lt(1000.0);
    let lost = k.fma(y, logarithm, -product);
    let power = <f64 as Compute>::exp_whole(product);
    let power = k.select(finite & power.abs().lt(f64::INFINITY), k.fma(power, lost, power), power);
    // 1 to any power, also where the product is 0 · ∞.
    let power = k.select(size.eq(1.0) & y.abs().eq(f64::INFINITY), 1.0, power);
    let whole = y.convert::<f64>(CvtRound::IntZero).eq(y);
    let half = y * 0.5;
    let odd = whole & half.convert::<f64>(CvtRound::IntZero).ne(half);
    let negative = <f64 as Compute>::is_negative(x);
    let signed = k.select(negative & odd, -power, power);
    let signed = nan_where(x.lt(0.0) & !whole & size.lt(f64::INFINITY), signed);
    let signed = nan_where(x.ne(x) | y.ne(y), signed);
    k.select(y.eq(0.0) | x.eq(1.0), 1.0, signed)
}

/// The remainder of the truncated quotient, exact: C's `fmod`.
#[track_caller]
pub(crate) fn fmod<'k>(x: Val<'k, f64>, z: Val<'k, f64>) -> Val<'k, f64> {
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
    let result = k.select(<f64 as Compute>::is_negative(x), -result, result);
    nan_where(!(size.lt(f64::INFINITY) & divisor.gt(0.0)), result)
}
