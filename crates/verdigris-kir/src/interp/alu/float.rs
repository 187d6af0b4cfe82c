//! Floating-point arithmetic and comparison.

use super::exact::{self, F64_INVALID, add_f64, direction, first_nan, fma_f64, mul_f64};
use super::{EvalError, Lanes, Noise, approx, map1, map2, map3, wide};
use crate::inst::{Cmp, Division, Op, Round};
use crate::ir::Ty;
use std::cmp::Ordering;
use verdigris_tensor::num::{Format, Overflow, f64_to_f32};

/// The canonical f32 NaN.
pub(super) const F32_NAN: u32 = 0x7fff_ffff;

/// The format of a half type, packed or not.
pub(super) fn half_format(ty: Ty) -> Format {
    if matches!(ty, Ty::F16 | Ty::F16x2) { Format::F16 } else { Format::BF16 }
}

/// f32 from register bits, a subnormal as zero of the same sign with `ftz`.
#[inline(always)]
pub(super) fn f32_in(bits: u64, ftz: bool) -> f32 {
    let value = f32::from_bits(bits as u32);
    if ftz { flush(value) } else { value }
}

#[inline(always)]
pub(super) fn flush(value: f32) -> f32 {
    if value.to_bits() & 0x7f80_0000 == 0 { f32::from_bits(value.to_bits() & 0x8000_0000) } else { value }
}

/// Register bits of an f32 result: canonical NaN, flushed and clamped where asked.
#[inline(always)]
pub(super) fn f32_out(value: f32, ftz: bool, saturate: bool) -> u64 {
    let value = if ftz { flush(value) } else { value };
    if saturate {
        // NaN and −0 become +0.
        return u64::from(if value > 0.0 { value.min(1.0) } else { 0.0 }.to_bits());
    }
    u64::from(if value.is_nan() { F32_NAN } else { value.to_bits() })
}

/// What an f64 result becomes with `.sat`-like clamping, which f64 arithmetic does not offer; used by conversions.
#[inline(always)]
pub(super) fn clamp_f64(value: f64) -> f64 {
    if value > 0.0 { value.min(1.0) } else { 0.0 }
}

/// A code with its subnormals flushed.
#[inline(always)]
pub(super) fn flush_code(format: Format, code: u32, ftz: bool) -> u32 {
    let exponent = format.magnitude_mask() & !((1 << format.mantissa_bits) - 1);
    if ftz && code & exponent == 0 { code & format.sign_bit() } else { code }
}

/// Finishes a half result: flush, clamp to [0, 1], or clamp negatives to +0 (`relu`; NaN stays the canonical NaN).
#[inline(always)]
pub(super) fn half_out(format: Format, code: u32, ftz: bool, saturate: bool, relu: bool) -> u64 {
    let code = flush_code(format, code, ftz);
    let nan = format.is_nan(code);
    let negative = code & format.sign_bit() != 0;
    if saturate {
        let one = (format.bias() as u32) << format.mantissa_bits;
        return u64::from(if nan || negative { 0 } else { code.min(one) });
    }
    if nan {
        return u64::from(format.canonical_nan());
    }
    u64::from(if relu && negative { 0 } else { code })
}

/// Applies `f` to one half, or to both halves of a packed pair.
#[inline(always)]
pub(super) fn halves<const N: usize>(ty: Ty, words: [u64; N], f: impl Fn([u32; N]) -> u64) -> u64 {
    let low = f(words.map(|w| w as u32 & 0xffff)) & 0xffff;
    if matches!(ty, Ty::F16x2 | Ty::Bf16x2) { low | f(words.map(|w| (w >> 16) as u32 & 0xffff)) << 16 } else { low }
}

/// Runs `$body` with `$format` a constant of the half type's, so that the compiler folds it into encoder and decoder.
macro_rules! with_half_format {
    ($ty:expr, $format:ident => $body:expr) => {
        if matches!($ty, Ty::F16 | Ty::F16x2) {
            const $format: Format = Format::F16;
            $body
        } else {
            const $format: Format = Format::BF16;
            $body
        }
    };
}

/// f32 arithmetic in a rounding direction other than nearest.
#[inline(never)]
fn fma_f32_directed(a: f32, b: f32, c: f32, round: Round) -> f32 {
    f32::from_bits(exact::sum(Format::F32, f64::from(a) * f64::from(b), f64::from(c), round))
}

fn mul_f32_directed(a: f32, b: f32, round: Round) -> f32 {
    f64_to_f32(f64::from(a) * f64::from(b), direction(round))
}

/// NaN-aware minimum or maximum of two values by their f64 equals: true picks `a`. `None`: the result is NaN.
#[inline(always)]
fn picks_first(a: f64, b: f64, larger: bool, nan_wins: bool) -> Option<bool> {
    match (a.is_nan(), b.is_nan()) {
        (true, true) => None,
        (true, false) | (false, true) if nan_wins => None,
        (true, false) => Some(false),
        (false, true) => Some(true),
        _ if a == b => Some(a.is_sign_negative() != larger),
        _ => Some((a < b) != larger),
    }
}

/// The smaller or larger of two numbers of type `ty` (no packed type), as bits; −0 is below +0.
pub(super) fn min_max(ty: Ty, a: u64, b: u64, larger: bool, nan_wins: bool) -> u64 {
    let value = |bits: u64| match ty {
        Ty::F32 => f64::from(f32::from_bits(bits as u32)),
        Ty::F64 => f64::from_bits(bits),
        _ => half_format(ty).decode(bits as u32),
    };
    match picks_first(value(a), value(b), larger, nan_wins) {
        Some(true) => a,
        Some(false) => b,
        None => match ty {
            Ty::F32 => u64::from(F32_NAN),
            Ty::F64 => first_nan(&[value(a), value(b)]).map_or(F64_INVALID, f64::to_bits),
            _ => u64::from(half_format(ty).canonical_nan()),
        },
    }
}

#[inline(always)]
fn div_f64(a: f64, b: f64) -> f64 {
    if let Some(nan) = first_nan(&[a, b]) {
        return nan;
    }
    let quotient = a / b;
    if quotient.is_nan() { f64::from_bits(F64_INVALID) } else { quotient }
}

pub(super) fn eval(op: &Op, ins: &[&Lanes], active: u32, outs: &mut [Lanes], noise: Option<Noise>) -> Result<(), EvalError> {
    let out = &mut outs[0];
    let unknown = |ty: Ty| Err(EvalError::NoSuchForm { op: op.name(), ty });
    match *op {
        Op::FAdd { ty, rounding, ftz, saturate } | Op::FSub { ty, rounding, ftz, saturate } => {
            let subtract = matches!(op, Op::FSub { .. });
            match ty {
                Ty::F32 => {
                    let sign = if subtract { 1 << 31 } else { 0 };
                    let nearest = rounding == Round::Nearest;
                    if nearest && !ftz && !saturate {
                        wide(|| {
                            map2(out, active, ins[0], ins[1], |a, b| f32_out(f32_in(a, false) + f32_in(b ^ sign, false), false, false))
                        });
                        return Ok(());
                    }
                    map2(out, active, ins[0], ins[1], |a, b| {
                        let (a, b) = (f32_in(a, ftz), f32_in(b ^ sign, ftz));
                        f32_out(if nearest { a + b } else { fma_f32_directed(a, 1.0, b, rounding) }, ftz, saturate)
                    });
                }
                Ty::F64 => map2(out, active, ins[0], ins[1], |a, b| {
                    let b = f64::from_bits(b);
                    add_f64(f64::from_bits(a), if subtract && !b.is_nan() { -b } else { b }, rounding).to_bits()
                }),
                Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2 => {
                    with_half_format!(ty, FORMAT => map2(out, active, ins[0], ins[1], |a, b| {
                        halves(ty, [a, b], |[a, b]| {
                            let (a, b) = (FORMAT.decode(flush_code(FORMAT, a, ftz)), FORMAT.decode(flush_code(FORMAT, b, ftz)));
                            half_out(FORMAT, exact::sum(FORMAT, a, if subtract { -b } else { b }, rounding), ftz, saturate, false)
                        })
                    }));
                }
                _ => return unknown(ty),
            }
        }
        Op::FMul { ty, rounding, ftz, saturate } => match ty {
            Ty::F32 => {
                let nearest = rounding == Round::Nearest;
                if nearest && !ftz && !saturate {
                    wide(|| map2(out, active, ins[0], ins[1], |a, b| f32_out(f32_in(a, false) * f32_in(b, false), false, false)));
                    return Ok(());
                }
                map2(out, active, ins[0], ins[1], |a, b| {
                    let (a, b) = (f32_in(a, ftz), f32_in(b, ftz));
                    f32_out(if nearest { a * b } else { mul_f32_directed(a, b, rounding) }, ftz, saturate)
                });
            }
            Ty::F64 => map2(out, active, ins[0], ins[1], |a, b| mul_f64(f64::from_bits(a), f64::from_bits(b), rounding).to_bits()),
            Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2 => {
                with_half_format!(ty, FORMAT => map2(out, active, ins[0], ins[1], |a, b| {
                    halves(ty, [a, b], |[a, b]| {
                        let (a, b) = (FORMAT.decode(flush_code(FORMAT, a, ftz)), FORMAT.decode(flush_code(FORMAT, b, ftz)));
                        half_out(FORMAT, FORMAT.encode(a * b, direction(rounding), Overflow::Ieee), ftz, saturate, false)
                    })
                }));
            }
            _ => return unknown(ty),
        },
        Op::Fma { ty, rounding, ftz, saturate, relu } => match ty {
            Ty::F32 => {
                let nearest = rounding == Round::Nearest;
                if nearest && !ftz && !saturate {
                    // The vectors' own multiply-add rounds once, as a call for each lane would.
                    let fma = |a, b, c| f32_out(f32_in(a, false).mul_add(f32_in(b, false), f32_in(c, false)), false, false);
                    wide(|| map3(out, active, ins[0], ins[1], ins[2], fma));
                    return Ok(());
                }
                map3(out, active, ins[0], ins[1], ins[2], |a, b, c| {
                    let (a, b, c) = (f32_in(a, ftz), f32_in(b, ftz), f32_in(c, ftz));
                    let result = if nearest { a.mul_add(b, c) } else { fma_f32_directed(a, b, c, rounding) };
                    f32_out(result, ftz, saturate)
                });
            }
            Ty::F64 => map3(out, active, ins[0], ins[1], ins[2], |a, b, c| {
                fma_f64(f64::from_bits(a), f64::from_bits(b), f64::from_bits(c), rounding).to_bits()
            }),
            Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2 => {
                with_half_format!(ty, FORMAT => map3(out, active, ins[0], ins[1], ins[2], |a, b, c| {
                    halves(ty, [a, b, c], |codes| {
                        let [a, b, c] = codes.map(|code| FORMAT.decode(flush_code(FORMAT, code, ftz)));
                        half_out(FORMAT, exact::sum(FORMAT, a * b, c, rounding), ftz, saturate, relu)
                    })
                }));
            }
            _ => return unknown(ty),
        },
        Op::FMin { ty, ftz, nan } | Op::FMax { ty, ftz, nan } => {
            let larger = matches!(op, Op::FMax { .. });
            match ty {
                Ty::F32 => map2(out, active, ins[0], ins[1], |a, b| {
                    let (a, b) = (f32_in(a, ftz), f32_in(b, ftz));
                    // The common case first: two numbers that differ.
                    if a < b {
                        return u64::from(if larger { b } else { a }.to_bits());
                    }
                    if b < a {
                        return u64::from(if larger { a } else { b }.to_bits());
                    }
                    min_max(Ty::F32, u64::from(a.to_bits()), u64::from(b.to_bits()), larger, nan)
                }),
                Ty::F64 => map2(out, active, ins[0], ins[1], |a, b| min_max(ty, a, b, larger, nan)),
                Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2 => {
                    let format = half_format(ty);
                    let single = if format == Format::F16 { Ty::F16 } else { Ty::Bf16 };
                    map2(out, active, ins[0], ins[1], |a, b| {
                        halves(ty, [a, b], |[a, b]| {
                            let (a, b) = (flush_code(format, a, ftz), flush_code(format, b, ftz));
                            min_max(single, u64::from(a), u64::from(b), larger, nan)
                        })
                    });
                }
                _ => return unknown(ty),
            }
        }
        // The sign of a NaN operand changes too: PTX leaves the payload open, the chip flips or clears the bit.
        Op::FNeg { ty, ftz } | Op::FAbs { ty, ftz } => {
            let absolute = matches!(op, Op::FAbs { .. });
            match ty {
                Ty::F32 => map1(out, active, ins[0], |a| {
                    let bits = f32_in(a, ftz).to_bits();
                    u64::from(if absolute { bits & 0x7fff_ffff } else { bits ^ 0x8000_0000 })
                }),
                Ty::F64 => map1(out, active, ins[0], |a| if absolute { a & !(1 << 63) } else { a ^ 1 << 63 }),
                Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2 => {
                    let format = half_format(ty);
                    map1(out, active, ins[0], |a| {
                        halves(ty, [a], |[code]| {
                            let code = flush_code(format, code, ftz);
                            u64::from(if absolute { code & 0x7fff } else { code ^ 0x8000 })
                        })
                    });
                }
                _ => return unknown(ty),
            }
        }
        Op::Copysign { ty } => match ty {
            Ty::F32 => map2(out, active, ins[0], ins[1], |a, b| (a & 0x8000_0000) | (b & 0x7fff_ffff)),
            Ty::F64 => map2(out, active, ins[0], ins[1], |a, b| (a & 1 << 63) | (b & !(1 << 63))),
            _ => return unknown(ty),
        },
        Op::FDiv { ty, kind, ftz } => match (ty, kind) {
            (Ty::F32, Division::Ieee) => {
                map2(out, active, ins[0], ins[1], |a, b| f32_out(f32_in(a, ftz) / f32_in(b, ftz), ftz, false));
            }
            (Ty::F32, _) => approx::divide(out, active, ins, kind, ftz, noise),
            (Ty::F64, Division::Ieee) => {
                map2(out, active, ins[0], ins[1], |a, b| div_f64(f64::from_bits(a), f64::from_bits(b)).to_bits());
            }
            _ => return unknown(ty),
        },
        _ => return Err(EvalError::NeedsMachine { op: op.name() }),
    }
    Ok(())
}

/// Which outcomes of a comparison a word accepts: bit 0 less, 1 equal, 2 greater, 3 unordered.
const fn accepted(cmp: Cmp) -> u32 {
    match cmp {
        Cmp::Lt => 0b0001,
        Cmp::Eq => 0b0010,
        Cmp::Le => 0b0011,
        Cmp::Gt => 0b0100,
        Cmp::Ne => 0b0101,
        Cmp::Ge => 0b0110,
        Cmp::Number => 0b0111,
        Cmp::Nan => 0b1000,
        Cmp::LtOrNan => 0b1001,
        Cmp::EqOrNan => 0b1010,
        Cmp::LeOrNan => 0b1011,
        Cmp::GtOrNan => 0b1100,
        Cmp::NeOrNan => 0b1101,
        Cmp::GeOrNan => 0b1110,
    }
}

pub(super) fn compare(cmp: Cmp, ty: Ty, ftz: bool, ins: &[&Lanes], active: u32, out: &mut Lanes) -> Result<(), EvalError> {
    let accepted = accepted(cmp);
    // Every type here is a subset of f64.
    let test = |a: f64, b: f64| {
        let outcome = match a.partial_cmp(&b) {
            Some(Ordering::Less) => 0,
            Some(Ordering::Equal) => 1,
            Some(Ordering::Greater) => 2,
            None => 3,
        };
        u64::from(accepted >> outcome & 1)
    };
    match ty {
        Ty::F32 => map2(out, active, ins[0], ins[1], |a, b| test(f64::from(f32_in(a, ftz)), f64::from(f32_in(b, ftz)))),
        Ty::F64 => map2(out, active, ins[0], ins[1], |a, b| test(f64::from_bits(a), f64::from_bits(b))),
        Ty::F16 | Ty::Bf16 => {
            let format = half_format(ty);
            let value = |code: u64| format.decode(flush_code(format, code as u32 & 0xffff, ftz));
            map2(out, active, ins[0], ins[1], |a, b| test(value(a), value(b)));
        }
        _ => return Err(EvalError::NoSuchForm { op: "Setp", ty }),
    }
    Ok(())
}
