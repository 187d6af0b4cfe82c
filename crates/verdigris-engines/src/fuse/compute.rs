//! The types that kernels compute in, and stored elements as their values.
//!
//! Storage is data ([`DType`]); what a kernel computes in is one of the few [`Compute`] types, chosen where an element is loaded.
//! Loads are exact but for integers wider than the compute type's significand; stores round to nearest even, saturating in fp8 and integers.

use verdigris_kir::face::{Bf16, Comparable, F16, F16x2, FloatScalar, Kernel, Val};
use verdigris_kir::inst::{Cache, CvtRound, Packed};
use verdigris_kir::ir::Target;
use verdigris_tensor::DType;

use super::angle;

/// A type that functions are computed in: `f32` or `f64`.
pub trait Compute: FloatScalar + Comparable {
    /// Its element type.
    const DTYPE: DType;

    /// A constant, rounded to this type.
    #[track_caller]
    fn constant<'k>(k: Kernel<'k>, value: f64) -> Val<'k, Self>;

    /// From f32, exactly.
    fn from_f32(value: Val<'_, f32>) -> Val<'_, Self>;

    /// From f64, rounded.
    fn from_f64(value: Val<'_, f64>) -> Val<'_, Self>;

    /// To f32, rounded.
    fn to_f32(value: Val<'_, Self>) -> Val<'_, f32>;

    /// To f64, exactly.
    fn to_f64(value: Val<'_, Self>) -> Val<'_, f64>;

    /// A 32-bit integer in this type, rounded.
    fn from_i32(value: Val<'_, i32>) -> Val<'_, Self>;

    /// `x / y`, to a few units in the last place.
    #[track_caller]
    fn divide<'k>(x: Val<'k, Self>, y: Val<'k, Self>) -> Val<'k, Self>;

    /// `eˣ`: absolute error within a few units in the last place of the larger of the result and 1. Far below the type's range it gives 0.
    fn exp(x: Val<'_, Self>) -> Val<'_, Self>;

    /// `eˣ` in as few instructions as there are: relative error of a few units in the last place for each unit of `|x|`, and one. What exponentials of
    /// negative numbers are added up for, or multiplied with an argument of the same size, loses nothing to it. Below the normal range it gives 0.
    fn fast_exp(x: Val<'_, Self>) -> Val<'_, Self>;

    /// `1 / x` of a positive number, to a unit in the last place. Below the normal range it gives 0.
    fn reciprocal(x: Val<'_, Self>) -> Val<'_, Self>;

    /// Coefficients of `P` in `erfc(z) = t · P(t) · e^(−z²)`, `t = 1 / (1 + 0.3·z)`, `z ≥ 0`, highest power first.
    const ERFC: &'static [f64];

    /// `√x`, correctly rounded.
    fn sqrt(x: Val<'_, Self>) -> Val<'_, Self>;

    /// `1 / √x`.
    fn rsqrt(x: Val<'_, Self>) -> Val<'_, Self>;

    /// `x / y`, correctly rounded.
    #[track_caller]
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

    /// The larger, NaN if either is.
    #[track_caller]
    fn max_nan<'k>(x: Val<'k, Self>, y: Val<'k, Self>) -> Val<'k, Self> {
        let k = x.kernel();
        let larger = k.select(x.gt(y), x, y);
        k.select(x.ne(x), x, larger)
    }

    /// The smaller, NaN if either is.
    #[track_caller]
    fn min_nan<'k>(x: Val<'k, Self>, y: Val<'k, Self>) -> Val<'k, Self> {
        let k = x.kernel();
        let smaller = k.select(x.lt(y), x, y);
        k.select(x.ne(x), x, smaller)
    }
}

impl Compute for f32 {
    const DTYPE: DType = DType::F32;

    #[track_caller]
    fn constant<'k>(k: Kernel<'k>, value: f64) -> Val<'k, f32> {
        k.constant(value as f32)
    }

    fn from_f32(value: Val<'_, f32>) -> Val<'_, f32> {
        value
    }

    fn from_f64(value: Val<'_, f64>) -> Val<'_, f32> {
        value.convert(CvtRound::Nearest)
    }

    fn to_f32(value: Val<'_, f32>) -> Val<'_, f32> {
        value
    }

    fn to_f64(value: Val<'_, f32>) -> Val<'_, f64> {
        value.convert(CvtRound::None)
    }

    fn from_i32(value: Val<'_, i32>) -> Val<'_, f32> {
        value.to_f32()
    }

    #[track_caller]
    fn divide<'k>(x: Val<'k, f32>, y: Val<'k, f32>) -> Val<'k, f32> {
        x.div_full(y)
    }

    fn exp(x: Val<'_, f32>) -> Val<'_, f32> {
        // The product loses up to half a unit of its own size, which 2ˣ turns into relative error: what was lost is put back.
        let k = x.kernel();
        let scaled = x * std::f32::consts::LOG2_E;
        let lost = k.fma(x, std::f32::consts::LOG2_E, -scaled);
        let power = scaled.exp2();
        let correction = k.fma(lost * std::f32::consts::LN_2, power, power);
        // Where the power is 0 or infinite, what was lost may be NaN or of the other sign.
        k.select(scaled.abs().lt(126.0), correction, power)
    }

    fn fast_exp(x: Val<'_, f32>) -> Val<'_, f32> {
        (x * std::f32::consts::LOG2_E).exp2()
    }

    fn reciprocal(x: Val<'_, f32>) -> Val<'_, f32> {
        x.rcp_flushed()
    }

    // Chebyshev fit over z ≤ 10, error 5·10⁻⁸.
    const ERFC: &'static [f64] = &[
        -1.307_708_77e-1,
        4.919_342_7e-1,
        -5.261_516_57e-1,
        5.645_142_2e-1,
        -1.069_833_64e-1,
        2.205_391_68e-1,
        1.467_960_18e-1,
        1.709_491_16e-1,
        1.691_730_62e-1,
    ];

    #[track_caller]
    fn max_nan<'k>(x: Val<'k, f32>, y: Val<'k, f32>) -> Val<'k, f32> {
        x.max_nan(y)
    }

    #[track_caller]
    fn min_nan<'k>(x: Val<'k, f32>, y: Val<'k, f32>) -> Val<'k, f32> {
        x.min_nan(y)
    }

    fn sqrt(x: Val<'_, f32>) -> Val<'_, f32> {
        x.sqrt()
    }

    fn rsqrt(x: Val<'_, f32>) -> Val<'_, f32> {
        x.rsqrt()
    }

    #[track_caller]
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
        let (rest, quadrant) = angle::reduce(x.convert(CvtRound::None), f64::from(1u32 << 30), 2);
        (rest.convert(CvtRound::Nearest), quadrant)
    }

    const LN_2: [f64; 2] = [0.693_359_375, -2.121_944_400_547_137_7e-4];
    const TERMS: usize = 6;
}

impl Compute for f64 {
    const DTYPE: DType = DType::F64;

    #[track_caller]
    fn constant<'k>(k: Kernel<'k>, value: f64) -> Val<'k, f64> {
        k.constant(value)
    }

    fn from_f32(value: Val<'_, f32>) -> Val<'_, f64> {
        value.convert(CvtRound::None)
    }

    fn from_f64(value: Val<'_, f64>) -> Val<'_, f64> {
        value
    }

    fn to_f32(value: Val<'_, f64>) -> Val<'_, f32> {
        value.convert(CvtRound::Nearest)
    }

    fn to_f64(value: Val<'_, f64>) -> Val<'_, f64> {
        value
    }

    fn from_i32(value: Val<'_, i32>) -> Val<'_, f64> {
        value.convert(CvtRound::Nearest)
    }

    #[track_caller]
    fn divide<'k>(x: Val<'k, f64>, y: Val<'k, f64>) -> Val<'k, f64> {
        x.div(y)
    }

    fn exp(x: Val<'_, f64>) -> Val<'_, f64> {
        // eˣ = 2ⁿ · eʳ with |r| ≤ ln 2 / 2; ln 2 in two parts, the first with zeros at its end, so that n·high is exact.
        let [high, low] = Self::LN_2;
        let k = x.kernel();
        let n = (x * std::f64::consts::LOG2_E).convert::<f64>(CvtRound::IntNearest);
        let r = k.fma(n, -low, k.fma(n, -high, x));
        let coefficients: Vec<f64> = (0..=13).rev().map(|i| 1.0 / factorial(i)).collect();
        let power = polynomial(r, &coefficients);
        let exponent = n.convert::<i32>(CvtRound::IntNearest) + 1023;
        let scale: Val<'_, f64> = k.join32(0u32, exponent.unsigned() << 20).bitcast();
        let result = power * scale;
        let result = k.select(x.gt(709.0), k.constant(f64::INFINITY), result);
        k.select(x.lt(-708.0), k.constant(0.0), result)
    }

    fn fast_exp(x: Val<'_, f64>) -> Val<'_, f64> {
        <f64 as Compute>::exp(x)
    }

    fn reciprocal(x: Val<'_, f64>) -> Val<'_, f64> {
        x.kernel().constant(1.0f64).div(x)
    }

    // Chebyshev fit over z ≤ 6.5, error 10⁻¹⁷; beyond, the exponential is all that counts.
    const ERFC: &'static [f64] = &[
        0.0020047378577999777,
        -0.020469458425365718,
        0.0889535575421,
        -0.2020120706507274,
        0.20350782851149243,
        0.13604046256802016,
        -0.7734095228601513,
        1.3190199998802998,
        -1.46057649719059,
        1.1702468440951588,
        -0.6855546792731944,
        0.37631440084261886,
        -0.05152586101182858,
        0.13265840847082414,
        0.11719330654693567,
        0.1475737542494816,
        0.16151265440310092,
        0.1692655336010273,
        0.16925660084299754,
    ];

    fn sqrt(x: Val<'_, f64>) -> Val<'_, f64> {
        x.sqrt()
    }

    fn rsqrt(x: Val<'_, f64>) -> Val<'_, f64> {
        let one = x.kernel().constant(1.0f64);
        one.div(x.sqrt())
    }

    #[track_caller]
    fn quotient<'k>(x: Val<'k, f64>, y: Val<'k, f64>) -> Val<'k, f64> {
        x.div(y)
    }

    fn exp_whole(x: Val<'_, f64>) -> Val<'_, f64> {
        let k = x.kernel();
        let x = Self::min_nan(Self::max_nan(x, k.constant(-1400.0)), k.constant(1400.0));
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
        angle::reduce(x, f64::from(1u32 << 17), 16)
    }

    const LN_2: [f64; 2] = [f64::from_bits(0x3FE6_2E42_FEE0_0000), 1.908_214_929_270_587_7e-10];
    const TERMS: usize = 12;
}

/// Horner's rule, highest power first.
#[track_caller]
pub(super) fn polynomial<'k, T: Compute>(x: Val<'k, T>, coefficients: &[f64]) -> Val<'k, T> {
    let k = x.kernel();
    let mut sum = T::constant(k, coefficients[0]);
    for &coefficient in &coefficients[1..] {
        sum = k.fma(sum, x, T::constant(k, coefficient));
    }
    sum
}

pub(super) fn factorial(n: usize) -> f64 {
    (1..=n).map(|i| i as f64).product()
}

/// The least chip that can convert a stored type: fp8 needs the conversions of sm_89.
pub fn target_of(dtype: DType) -> Target {
    if dtype.is_fp8() { Target::Sm89 } else { Target::Sm80 }
}

/// The same of all of these types.
pub(crate) fn target_of_all(dtypes: impl IntoIterator<Item = DType>) -> Target {
    dtypes.into_iter().map(target_of).max().unwrap_or(Target::Sm80)
}

pub(super) fn fp8(dtype: DType) -> Packed {
    if dtype == DType::E4m3 { Packed::E4m3x2 } else { Packed::E5m2x2 }
}

/// The two f32 of a 32-bit register of two 16-bit floats.
#[track_caller]
pub(crate) fn widen_pair<'k>(k: Kernel<'k>, dtype: DType, pair: Val<'k, u32>) -> [Val<'k, f32>; 2] {
    if dtype == DType::Bf16 {
        [(pair << 16).bitcast(), (pair & 0xffff_0000u32).bitcast()]
    } else {
        let (low, high) = k.split16(pair);
        [low, high].map(|half| half.bitcast::<F16>().convert(CvtRound::None))
    }
}

/// The value of a 16-bit float's bits.
#[track_caller]
pub fn decode_half<'k>(dtype: DType, bits: Val<'k, u16>) -> Val<'k, f32> {
    if dtype == DType::Bf16 { (u32_of(bits) << 16).bitcast() } else { bits.bitcast::<F16>().convert(CvtRound::None) }
}

/// The value of an 8-bit number's bits, which stand in the low byte, extended by the load as their type says.
#[track_caller]
pub fn decode_byte<'k>(k: Kernel<'k>, dtype: DType, byte: Val<'k, u32>) -> Val<'k, f32> {
    if dtype.is_fp8() { widen_byte(k, dtype, byte) } else { byte.signed().to_f32() }
}

/// Loads one stored element.
#[track_caller]
pub fn load<'k, T: Compute>(k: Kernel<'k>, dtype: DType, address: Val<'k, u64>, offset_bytes: i64) -> Val<'k, T> {
    match dtype {
        DType::F64 => T::from_f64(k.ld_global::<f64>(address, offset_bytes)),
        DType::F32 | DType::Tf32 => T::from_f32(k.ld_global::<f32>(address, offset_bytes)),
        DType::F16 => T::from_f32(k.ld_global::<F16>(address, offset_bytes).convert(CvtRound::None)),
        DType::Bf16 => T::from_f32((u32_of(k.ld_global::<u16>(address, offset_bytes)) << 16).bitcast()),
        DType::E4m3 | DType::E5m2 => T::from_f32(widen_byte(k, dtype, k.ld_global_byte(address, offset_bytes, false))),
        DType::I8 | DType::U8 | DType::Bool => T::from_i32(k.ld_global_byte(address, offset_bytes, dtype == DType::I8).signed()),
        DType::I32 => T::from_i32(k.ld_global::<i32>(address, offset_bytes)),
        DType::I64 => k.ld_global::<i64>(address, offset_bytes).convert(CvtRound::Nearest),
    }
}

fn u32_of(half: Val<'_, u16>) -> Val<'_, u32> {
    half.convert(CvtRound::None)
}

#[track_caller]
fn widen_byte<'k>(k: Kernel<'k>, dtype: DType, byte: Val<'k, u32>) -> Val<'k, f32> {
    widen_pair(k, DType::F16, k.widen_fp8(fp8(dtype), byte.low16()).bitcast())[0]
}

/// Loads two neighbouring elements from an address that is aligned to both.
#[track_caller]
pub fn load_pair<'k, T: Compute>(k: Kernel<'k>, dtype: DType, address: Val<'k, u64>, offset_bytes: i64) -> [Val<'k, T>; 2] {
    #[track_caller]
    fn both<'k, S: verdigris_kir::face::Scalar>(k: Kernel<'k>, address: Val<'k, u64>, offset_bytes: i64) -> [Val<'k, S>; 2] {
        let pair = k.ld_global_vector::<S>(address, offset_bytes, 2, Cache::Default);
        [pair[0], pair[1]]
    }
    match dtype {
        DType::F64 => both::<f64>(k, address, offset_bytes).map(T::from_f64),
        DType::F32 | DType::Tf32 => both::<f32>(k, address, offset_bytes).map(T::from_f32),
        DType::F16 | DType::Bf16 => widen_pair(k, dtype, k.ld_global::<u32>(address, offset_bytes)).map(T::from_f32),
        DType::E4m3 | DType::E5m2 => {
            let halves = k.widen_fp8(fp8(dtype), k.ld_global::<u16>(address, offset_bytes));
            widen_pair(k, DType::F16, halves.bitcast()).map(T::from_f32)
        }
        DType::I8 => {
            let pair = u32_of(k.ld_global::<u16>(address, offset_bytes));
            // Each byte to the top of a register, and down again with its sign.
            [pair << 24, (pair >> 8) << 24].map(|top| T::from_i32(top.signed() >> 24))
        }
        DType::U8 | DType::Bool => {
            let pair = u32_of(k.ld_global::<u16>(address, offset_bytes));
            [pair & 0xffu32, pair >> 8].map(|byte| T::from_i32(byte.signed()))
        }
        DType::I32 => both::<i32>(k, address, offset_bytes).map(T::from_i32),
        DType::I64 => both::<i64>(k, address, offset_bytes).map(|value| value.convert(CvtRound::Nearest)),
    }
}

/// A value on its way to an integer type, in which NaN is 0: of a NaN in f64, or for 64 bits, the chip's conversion makes the least integer.
#[track_caller]
pub fn without_nan<'k, T: Compute>(k: Kernel<'k>, dtype: DType, value: Val<'k, T>) -> Val<'k, T> {
    if T::DTYPE == DType::F64 || dtype == DType::I64 { k.select(value.eq(value), value, T::constant(k, 0.0)) } else { value }
}

/// Rounds and stores one element.
#[track_caller]
pub fn store<'k, T: Compute>(k: Kernel<'k>, dtype: DType, address: Val<'k, u64>, offset_bytes: i64, value: Val<'k, T>) {
    match dtype {
        DType::F64 => k.st_global(address, offset_bytes, T::to_f64(value)),
        DType::F32 | DType::Tf32 => k.st_global(address, offset_bytes, T::to_f32(value)),
        DType::F16 => k.st_global(address, offset_bytes, to_f16(value)),
        DType::Bf16 => k.st_global(address, offset_bytes, to_bf16(value)),
        DType::E4m3 | DType::E5m2 => {
            let value = T::to_f32(value);
            let pair: Val<'k, u16> = k.pack(fp8(dtype), value, value);
            k.st_global_byte(address, offset_bytes, u32_of(pair));
        }
        DType::I8 | DType::U8 | DType::Bool => {
            k.st_global_byte(address, offset_bytes, k.round_to_byte::<T>(without_nan(k, dtype, value), dtype == DType::I8))
        }
        DType::I32 => k.st_global(address, offset_bytes, without_nan(k, dtype, value).convert::<i32>(CvtRound::IntNearest)),
        DType::I64 => k.st_global(address, offset_bytes, without_nan(k, dtype, value).convert::<i64>(CvtRound::IntNearest)),
    }
}

fn to_f16<T: Compute>(value: Val<'_, T>) -> Val<'_, F16> {
    value.convert(CvtRound::Nearest)
}

fn to_bf16<T: Compute>(value: Val<'_, T>) -> Val<'_, Bf16> {
    // PTX has no conversion from f64. Twice rounded is rounded once but for ties that f32 makes, and those are within the model's
    // half unit of bf16 by 2⁻¹⁶ of itself.
    T::to_f32(value).convert(CvtRound::Nearest)
}

/// Two values rounded to a 16-bit float and put side by side, the first in the low half.
#[track_caller]
pub fn pack_16<'k>(k: Kernel<'k>, dtype: DType, values: [Val<'k, f32>; 2]) -> Val<'k, u32> {
    if dtype == DType::Bf16 { k.pack_bf16x2(values[0], values[1]) } else { k.pack::<F16x2>(Packed::F16x2, values[0], values[1]).bitcast() }
}

/// Rounds and stores two neighbouring elements to an address that is aligned to both.
#[track_caller]
pub fn store_pair<'k, T: Compute>(k: Kernel<'k>, dtype: DType, address: Val<'k, u64>, offset_bytes: i64, values: [Val<'k, T>; 2]) {
    match dtype {
        DType::F64 => k.st_global_vector(address, offset_bytes, &values.map(T::to_f64), Cache::Default),
        DType::F32 | DType::Tf32 => k.st_global_vector(address, offset_bytes, &values.map(T::to_f32), Cache::Default),
        DType::F16 | DType::Bf16 if T::DTYPE == DType::F32 => {
            k.st_global(address, offset_bytes, pack_16(k, dtype, values.map(T::to_f32)));
        }
        DType::E4m3 | DType::E5m2 => {
            let [low, high] = values.map(T::to_f32);
            k.st_global(address, offset_bytes, k.pack::<u16>(fp8(dtype), low, high));
        }
        DType::I8 | DType::U8 | DType::Bool => {
            let [low, high] = values.map(|value| k.round_to_byte::<T>(without_nan(k, dtype, value), dtype == DType::I8) & 0xffu32);
            k.st_global(address, offset_bytes, (low | (high << 8)).low16());
        }
        DType::I32 => {
            k.st_global_vector(
                address,
                offset_bytes,
                &values.map(|value| without_nan(k, dtype, value).convert::<i32>(CvtRound::IntNearest)),
                Cache::Default,
            );
        }
        DType::F16 | DType::Bf16 | DType::I64 => {
            for (i, value) in values.into_iter().enumerate() {
                store(k, dtype, address, offset_bytes + (i * dtype.bytes()) as i64, value);
            }
        }
    }
}

/// Rounds and stores eight neighbouring elements of a 16-bit float or of f32, by 16 bytes at an address that is aligned to them.
#[track_caller]
pub fn store_eight<'k, T: Compute>(k: Kernel<'k>, dtype: DType, address: Val<'k, u64>, offset_bytes: i64, values: [Val<'k, T>; 8]) {
    let values = values.map(T::to_f32);
    if dtype.bytes() == 2 {
        let words: Vec<Val<'k, u32>> = values.chunks(2).map(|pair| pack_16(k, dtype, [pair[0], pair[1]])).collect();
        k.st_global_vector(address, offset_bytes, &words, Cache::Default);
        return;
    }
    k.st_global_vector(address, offset_bytes, &values[..4], Cache::Default);
    k.st_global_vector(address, offset_bytes + 16, &values[4..], Cache::Default);
}

/// The value that would be read back had `value` been stored as `dtype`.
#[track_caller]
pub fn round_to<'k, T: Compute>(k: Kernel<'k>, dtype: DType, value: Val<'k, T>) -> Val<'k, T> {
    match dtype {
        DType::F64 => T::from_f64(T::to_f64(value)),
        DType::F32 => T::from_f32(T::to_f32(value)),
        DType::Tf32 => T::from_f32(T::to_f32(value).to_tf32().bitcast()),
        DType::F16 => T::from_f32(to_f16(value).convert(CvtRound::None)),
        DType::Bf16 => T::from_f32((u32_of(to_bf16(value).bitcast::<u16>()) << 16).bitcast()),
        DType::E4m3 | DType::E5m2 => {
            let value = T::to_f32(value);
            let pair: Val<'k, u16> = k.pack(fp8(dtype), value, value);
            T::from_f32(widen_byte(k, dtype, u32_of(pair)))
        }
        DType::I8 => T::from_i32((k.round_to_byte::<T>(without_nan(k, dtype, value), true) << 24).signed() >> 24),
        DType::U8 | DType::Bool => T::from_i32((k.round_to_byte::<T>(without_nan(k, dtype, value), false) & 0xffu32).signed()),
        DType::I32 => T::from_i32(without_nan(k, dtype, value).convert::<i32>(CvtRound::IntNearest)),
        DType::I64 => without_nan(k, dtype, value).convert::<i64>(CvtRound::IntNearest).convert(CvtRound::Nearest),
    }
}
