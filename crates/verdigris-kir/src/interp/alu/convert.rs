//! Conversions.

use super::exact::{direction, integer_to_odd, pack_f64};
use super::float::{F32_NAN, clamp_f64, f32_in, f32_out, flush_code, half_format, half_out};
use super::{EvalError, Lanes, for_lanes, map1, map2, sign_extend, width_mask};
use crate::inst::{CvtRound, Op, Packed, Round};
use crate::ir::Ty;
use verdigris_tensor::num::{
    Format, Overflow, Rounding, bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16, f64_to_f32, round_to_integer, tf32_round,
};

/// The direction of a conversion to a float. The integer words name the direction too, for a conversion that also drops the fraction.
const fn float_direction(rounding: CvtRound) -> Round {
    match rounding {
        CvtRound::None | CvtRound::Nearest | CvtRound::NearestAway | CvtRound::IntNearest => Round::Nearest,
        CvtRound::Zero | CvtRound::IntZero => Round::Zero,
        CvtRound::Down | CvtRound::IntDown => Round::Down,
        CvtRound::Up | CvtRound::IntUp => Round::Up,
    }
}

/// The direction to an integer value, if the word asks for one.
const fn integer_direction(rounding: CvtRound) -> Option<Rounding> {
    match rounding {
        CvtRound::IntNearest => Some(Rounding::NearestEven),
        CvtRound::IntZero => Some(Rounding::TowardZero),
        CvtRound::IntDown => Some(Rounding::Down),
        CvtRound::IntUp => Some(Rounding::Up),
        _ => None,
    }
}

/// An integer of type `ty` from register bits.
#[inline(always)]
fn integer(ty: Ty, bits: u64) -> i128 {
    if ty.is_signed() { i128::from(sign_extend(bits, ty.bits())) } else { i128::from(bits & width_mask(ty.bits())) }
}

fn range(bits: u32, signed: bool) -> (i128, i128) {
    if signed { (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) } else { (0, (1 << bits) - 1) }
}

/// A float of type `ty` from register bits, as f64; `ftz` concerns f32.
#[inline(always)]
fn float(ty: Ty, bits: u64, ftz: bool) -> f64 {
    match ty {
        Ty::F32 => f64::from(f32_in(bits, ftz)),
        Ty::F64 => f64::from_bits(bits),
        _ => half_format(ty).decode(bits as u32 & 0xffff),
    }
}

/// A float rounded to an integer and clamped to the range of `bits` bits.
///
/// NaN gives 0, but `1 << (bits − 1)` where the source is f64 or the target has 64 bits.
#[inline(always)]
fn float_to_integer(value: f64, from: Ty, to_bits: u32, signed: bool, rounding: Rounding) -> u64 {
    if value.is_nan() {
        return if from == Ty::F64 || to_bits == 64 { 1 << (to_bits - 1) } else { 0 };
    }
    let rounded = round_to_integer(value, rounding);
    let (low, high) = range(to_bits, signed);
    // The cast saturates at i128, far outside every target.
    (rounded as i128).clamp(low, high) as u64
}

/// An f64 (exact, or rounded to odd) as a float of type `ty`.
#[inline(always)]
fn to_float(ty: Ty, value: f64, round: Round, ftz: bool, saturate: bool) -> u64 {
    match ty {
        Ty::F32 => f32_out(f64_to_f32(value, direction(round)), ftz, saturate),
        Ty::F64 => {
            if saturate {
                clamp_f64(value).to_bits()
            } else {
                value.to_bits()
            }
        }
        _ => {
            let format = half_format(ty);
            half_out(format, format.encode(value, direction(round), Overflow::Ieee), false, saturate, false)
        }
    }
}

fn scalar(ty: Ty) -> bool {
    !matches!(ty, Ty::Pred | Ty::F16x2 | Ty::Bf16x2)
}

const fn fp8(packed: Packed) -> Option<Format> {
    match packed {
        Packed::E4m3x2 => Some(Format::E4M3),
        Packed::E5m2x2 => Some(Format::E5M2),
        Packed::F16x2 | Packed::Bf16x2 => None,
    }
}

/// One f32 rounded to an element of a pair: fp8 saturates, halves overflow to infinity.
#[inline(always)]
fn packed_element(to: Packed, value: f64, relu: bool) -> u64 {
    let (format, overflow) = match to {
        Packed::F16x2 => (Format::F16, Overflow::Ieee),
        Packed::Bf16x2 => (Format::BF16, Overflow::Ieee),
        Packed::E4m3x2 => (Format::E4M3, Overflow::Saturate),
        Packed::E5m2x2 => (Format::E5M2, Overflow::Saturate),
    };
    half_out(format, format.encode(value, Rounding::NearestEven, overflow), false, false, relu)
}

/// NaN as tf32. The ISA leaves the bits open; an H200 gives the canonical NaN without its 13 lowest bits, but with `.rna` it clears
/// those of the operand: sign and payload stay, and a payload in those bits alone leaves an infinity, as in the two instructions
/// (an addition where the operand is finite, and a mask) that ptxas 13.0 makes of it.
const fn tf32_nan(bits: u32, keeps_payload: bool) -> u32 {
    const DROPPED: u32 = (1 << 13) - 1;
    (if keeps_payload { bits } else { F32_NAN }) & !DROPPED
}

pub(super) fn eval(op: &Op, ins: &[&Lanes], active: u32, outs: &mut [Lanes]) -> Result<(), EvalError> {
    let (out, a) = (&mut outs[0], ins[0]);
    match *op {
        Op::Cvt { to, from, rounding, ftz, saturate } => {
            if !scalar(to) || !scalar(from) {
                return Err(EvalError::NoSuchForm { op: "Cvt", ty: if scalar(to) { from } else { to } });
            }
            cvt(out, active, a, to, from, rounding, ftz, saturate);
        }
        Op::CvtByte { to, signed } => {
            let byte = move |bits: u64| if signed { sign_extend(bits, 8) } else { (bits & 0xff) as i64 };
            match to {
                Ty::F32 | Ty::F64 | Ty::F16 | Ty::Bf16 => {
                    map1(out, active, a, |bits| to_float(to, byte(bits) as f64, Round::Nearest, false, false));
                }
                Ty::Pred | Ty::F16x2 | Ty::Bf16x2 => return Err(EvalError::NoSuchForm { op: "CvtByte", ty: to }),
                _ => map1(out, active, a, |bits| byte(bits) as u64 & width_mask(to.bits())),
            }
        }
        Op::CvtToByte { from, signed } => {
            if !scalar(from) {
                return Err(EvalError::NoSuchForm { op: "CvtToByte", ty: from });
            }
            // A signed result is extended over the whole register.
            let widen = move |byte: u64| if signed { sign_extend(byte, 8) as u64 & 0xffff_ffff } else { byte & 0xff };
            if from.is_float() {
                map1(out, active, a, |bits| widen(float_to_integer(float(from, bits, false), from, 8, signed, Rounding::NearestEven)));
            } else {
                let (low, high) = range(8, signed);
                map1(out, active, a, |bits| widen(integer(from, bits).clamp(low, high) as u64));
            }
        }
        Op::CvtPack { to, relu } => {
            // One arm for each format, so that the compiler folds it into the encoder.
            let pack = |out: &mut Lanes, bits: u32, element: &dyn Fn(f32) -> u64| {
                map2(out, active, a, ins[1], |high, low| {
                    element(f32::from_bits(high as u32)) << bits | element(f32::from_bits(low as u32))
                });
            };
            match to {
                Packed::F16x2 if !relu => pack(out, 16, &|x| u64::from(f32_to_f16(x))),
                Packed::Bf16x2 if !relu => pack(out, 16, &|x| u64::from(f32_to_bf16(x))),
                Packed::F16x2 | Packed::Bf16x2 => pack(out, 16, &|x| packed_element(to, f64::from(x), relu)),
                Packed::E4m3x2 => pack(out, 8, &|x| packed_element(Packed::E4m3x2, f64::from(x), relu)),
                Packed::E5m2x2 => pack(out, 8, &|x| packed_element(Packed::E5m2x2, f64::from(x), relu)),
            }
        }
        Op::CvtHalfToFp8 { to, relu } => {
            if fp8(to).is_none() {
                return Err(EvalError::NoSuchForm { op: "CvtHalfToFp8", ty: to.ty() });
            }
            map1(out, active, a, |pair| {
                let element = |code: u64| packed_element(to, Format::F16.decode(code as u32 & 0xffff), relu);
                element(pair >> 16) << 8 | element(pair)
            });
        }
        Op::CvtFp8ToHalf { from, relu } => {
            let Some(format) = fp8(from) else { return Err(EvalError::NoSuchForm { op: "CvtFp8ToHalf", ty: from.ty() }) };
            map1(out, active, a, |pair| {
                let element = |code: u64| packed_element(Packed::F16x2, format.decode(code as u32 & 0xff), relu);
                element(pair >> 8) << 16 | element(pair)
            });
        }
        Op::CvtTf32 { rounding } => {
            let (rounding, keeps_payload) = match rounding {
                CvtRound::NearestAway => (Rounding::NearestAway, true),
                CvtRound::Nearest => (Rounding::NearestEven, false),
                CvtRound::Zero => (Rounding::TowardZero, false),
                _ => return Err(EvalError::NoSuchForm { op: "CvtTf32", ty: Ty::F32 }),
            };
            map1(out, active, a, |bits| {
                let value = f32::from_bits(bits as u32);
                u64::from(if value.is_nan() { tf32_nan(bits as u32, keeps_payload) } else { tf32_round(value, rounding).to_bits() })
            });
        }
        _ => return Err(EvalError::NeedsMachine { op: op.name() }),
    }
    Ok(())
}

#[allow(clippy::too_many_arguments, reason = "the attributes of one instruction")]
fn cvt(out: &mut Lanes, active: u32, a: &Lanes, to: Ty, from: Ty, rounding: CvtRound, ftz: bool, saturate: bool) {
    let round = float_direction(rounding);
    let plain = matches!(rounding, CvtRound::None | CvtRound::Nearest) && !saturate && !ftz;
    // The conversions of every kernel's loads and stores, without the detour over f64.
    match (from, to) {
        (Ty::Bf16, Ty::F32) if plain => return map1(out, active, a, |word| u64::from(bf16_to_f32(word as u16).to_bits())),
        (Ty::F16, Ty::F32) if plain => return map1(out, active, a, |word| u64::from(f16_to_f32(word as u16).to_bits())),
        (Ty::F32, Ty::Bf16) if plain => return map1(out, active, a, |word| u64::from(f32_to_bf16(f32::from_bits(word as u32)))),
        (Ty::F32, Ty::F16) if plain => return map1(out, active, a, |word| u64::from(f32_to_f16(f32::from_bits(word as u32)))),
        _ => {}
    }
    match (from.is_float(), to.is_float()) {
        (false, false) => {
            let (low, high) = range(to.bits(), to.is_signed());
            for_lanes(active, |i| {
                let value = integer(from, a[i]);
                out[i] = if saturate { value.clamp(low, high) } else { value } as u64 & width_mask(to.bits());
            });
        }
        (false, true) => map1(out, active, a, |bits| {
            let value = integer(from, bits);
            let magnitude = value.unsigned_abs() as u64;
            if to == Ty::F64 {
                let result = if magnitude == 0 { 0.0 } else { pack_f64(value < 0, u128::from(magnitude), 0, round) };
                return if saturate { clamp_f64(result) } else { result }.to_bits();
            }
            let odd = integer_to_odd(magnitude);
            to_float(to, if value < 0 { -odd } else { odd }, round, ftz, saturate)
        }),
        (true, false) => {
            let direction = integer_direction(rounding).unwrap_or(Rounding::TowardZero);
            let (bits, signed) = (to.bits(), to.is_signed());
            map1(out, active, a, |word| float_to_integer(float(from, word, ftz), from, bits, signed, direction) & width_mask(bits));
        }
        (true, true) => {
            let whole = integer_direction(rounding);
            // The ISA has `.ftz` flush an f32 source here too. An H200 does not when it converts to f16: with `.rp`, the least f32 subnormal
            // becomes the least f16 subnormal and not 0.
            let ftz = ftz && to != Ty::F16;
            // An f32 → f32 conversion in nearest even that changes nothing is the common way to flush or clamp.
            map1(out, active, a, |word| {
                let value = float(from, word, ftz);
                if value.is_nan() && !saturate {
                    return match to {
                        Ty::F32 => u64::from(F32_NAN),
                        Ty::F64 if from == Ty::F64 => value.to_bits() | 1 << 51,
                        Ty::F64 => 0x7fff_ffff_e000_0000,
                        _ => u64::from(half_format(to).canonical_nan()),
                    };
                }
                let value = whole.map_or(value, |direction| round_to_integer(value, direction));
                let bits = to_float(to, value, round, ftz, saturate);
                if to == Ty::F32 || to == Ty::F64 { bits } else { u64::from(flush_code(half_format(to), bits as u32, false)) }
            });
        }
    }
}
