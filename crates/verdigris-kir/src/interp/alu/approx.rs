//! The approximate instructions: computed in f64, disturbed inside the ISA's bound on demand, rounded to nearest.

use super::exact::{F64_INVALID, first_nan};
use super::float::{f32_in, f32_out, flush_code, half_format, half_out, halves};
use super::{EvalError, Lanes, for_lanes, map1};
use crate::inst::{Division, Op};
use crate::ir::Ty;
use verdigris_tensor::num::{Format, Overflow, Rounding};

/// Seeded error for approximate instructions: the chip may return anything within the ISA's bound, so a kernel must live with all of it. As on
/// a chip, the same operands give the same result wherever and whenever an instruction runs.
#[derive(Clone, Copy, Debug)]
pub struct Noise {
    seed: u64,
}

impl Noise {
    /// Errors that depend on the seed and on what is computed, and on nothing else.
    pub const fn new(seed: u64) -> Self {
        Noise { seed }
    }

    /// The error at an exact result, in [−1, 1] of what is allowed. (The mixing of SplitMix64: Steele, Lea, Flood, OOPSLA 2014.)
    fn at(self, exact: f64) -> f64 {
        let mut z = self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ exact.to_bits();
        for _ in 0..2 {
            z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^= z >> 31;
        }
        (z as i64) as f64 / (i64::MAX as f64)
    }
}

/// The error that the ISA allows for a rounded result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// In units of the result's last place.
    Ulps(f64),
    /// As a part of the exact result.
    Relative(f64),
    /// As a number.
    Absolute(f64),
}

impl Bound {
    /// The error allowed at an exact result whose last place is worth `ulp`.
    pub fn at(self, exact: f64, ulp: f64) -> f64 {
        match self {
            Bound::Ulps(ulps) => ulps * ulp,
            Bound::Relative(relative) => exact.abs() * relative,
            Bound::Absolute(absolute) => absolute,
        }
    }
}

/// How far the ISA lets an instruction err at an operand; `None` where its result is fixed. (PTX ISA, the table of each instruction. It gives
/// no bound for `rsqrt.approx.f64`: the 2 here is what two correctly rounded steps may err.)
pub fn bound(op: &Op, operand: f64) -> Option<Bound> {
    Some(match *op {
        Op::Rcp { ty: Ty::F32, approx: true, .. } => Bound::Ulps(1.0),
        Op::Sqrt { ty: Ty::F32, approx: true, .. } => Bound::Relative(2f64.powi(-23)),
        Op::Rsqrt { ty: Ty::F32, .. } => Bound::Relative(2f64.powf(-22.9)),
        Op::Rsqrt { .. } => Bound::Ulps(2.0),
        Op::Ex2 { ty, .. } => match ty {
            Ty::F32 => Bound::Ulps(2.0),
            Ty::F16 | Ty::F16x2 => Bound::Relative(2f64.powf(-9.9)),
            _ => Bound::Relative(2f64.powi(-7)),
        },
        Op::Lg2 { .. } if operand > 0.5 && operand < 2.0 => Bound::Absolute(2f64.powi(-22)),
        Op::Lg2 { .. } => Bound::Relative(2f64.powi(-22)),
        // In [−π, π], and more loosely up to 100π; nothing is promised beyond.
        Op::Sin { .. } | Op::Cos { .. } if operand.abs() <= std::f64::consts::PI => Bound::Absolute(2f64.powf(-20.5)),
        Op::Sin { .. } | Op::Cos { .. } => Bound::Absolute(2f64.powf(-14.7)),
        Op::Tanh { ty } => match ty {
            Ty::F32 => Bound::Relative(2f64.powi(-11)),
            Ty::F16 | Ty::F16x2 => Bound::Absolute(2f64.powf(-10.987)),
            _ => Bound::Absolute(2f64.powi(-8)),
        },
        Op::FDiv { kind: Division::Full | Division::Approx, .. } => Bound::Ulps(2.0),
        _ => return None,
    })
}

/// Whether an approximate instruction takes subnormals as zero and gives zero in their place.
pub fn flushes(op: &Op) -> bool {
    match *op {
        Op::Ex2 { ty: Ty::Bf16 | Ty::Bf16x2, .. } => true,
        Op::Rcp { ftz, .. }
        | Op::Sqrt { ftz, .. }
        | Op::Rsqrt { ftz, .. }
        | Op::Ex2 { ftz, .. }
        | Op::Lg2 { ftz }
        | Op::Sin { ftz }
        | Op::Cos { ftz }
        | Op::FDiv { ftz, .. } => ftz,
        _ => false,
    }
}

/// How an approximate instruction treats subnormals and how far it may err.
#[derive(Clone, Copy)]
struct Form {
    ftz: bool,
    bound: Bound,
}

/// `exact` rounded to `format`, after an error that leaves the rounded result inside the bound. Zeros, infinities and NaN stay as they are.
fn round(format: Format, exact: f64, bound: Bound, noise: Option<Noise>) -> u32 {
    let encode = |value| format.encode(value, Rounding::NearestEven, Overflow::Ieee);
    let clean = encode(exact);
    let Some(noise) = noise else { return clean };
    if exact == 0.0 || !exact.is_finite() || format.is_infinite(clean) {
        return clean;
    }
    let allowed = bound.at(exact, format.ulp(exact));
    // Rounding itself costs half an ulp of the bound: of the largest value that the error can reach.
    let room = allowed - 0.5 * format.ulp(exact.abs() + allowed);
    let noisy = encode(exact + noise.at(exact) * room.max(0.0));
    if format.is_infinite(noisy) { clean } else { noisy }
}

fn f32_map(out: &mut Lanes, active: u32, a: &Lanes, Form { ftz, bound }: Form, noise: Option<Noise>, f: impl Fn(f64) -> f64) {
    for_lanes(active, |i| {
        let exact = f(f64::from(f32_in(a[i], ftz)));
        out[i] = f32_out(f32::from_bits(round(Format::F32, exact, bound, noise)), ftz, false);
    });
}

fn half_map(out: &mut Lanes, active: u32, ty: Ty, a: &Lanes, form: Form, noise: Option<Noise>, f: impl Fn(f64) -> f64) {
    let (format, Form { ftz, bound }) = (half_format(ty), form);
    map1(out, active, a, |word| {
        halves(ty, [word], |[code]| {
            let exact = f(format.decode(flush_code(format, code, ftz)));
            half_out(format, round(format, exact, bound, noise), ftz, false, false)
        })
    });
}

/// An f64 instruction whose result has only its upper 32 bits: 20 mantissa bits.
fn f64_upper(exact: f64, operand: f64) -> u64 {
    if operand.is_nan() {
        return 0x7fff_ffff_0000_0000;
    }
    if exact.is_nan() {
        return F64_INVALID;
    }
    if exact.is_subnormal() {
        return exact.to_bits() & 1 << 63;
    }
    exact.to_bits() & 0xffff_ffff_0000_0000
}

fn flush_f64(value: f64) -> f64 {
    if value.is_subnormal() { f64::from_bits(value.to_bits() & 1 << 63) } else { value }
}

/// f64 results that PTX rounds correctly, or (rsqrt without ftz) bounds so tightly that the nearest is as good a choice as any.
fn f64_map(out: &mut Lanes, active: u32, a: &Lanes, f: impl Fn(f64) -> f64) {
    map1(out, active, a, |bits| {
        let value = f64::from_bits(bits);
        if let Some(nan) = first_nan(&[value]) {
            return nan.to_bits();
        }
        let result = f(value);
        if result.is_nan() { F64_INVALID } else { result.to_bits() }
    });
}

pub(super) fn eval(op: &Op, ins: &[&Lanes], active: u32, outs: &mut [Lanes], noise: Option<Noise>) -> Result<(), EvalError> {
    let (out, a) = (&mut outs[0], ins[0]);
    let unknown = |ty: Ty| Err(EvalError::NoSuchForm { op: op.name(), ty });
    let rsqrt = |x: f64| 1.0 / x.sqrt();
    // Where the result is fixed, half an ulp leaves no room.
    let limit = |x: f64| bound(op, x).unwrap_or(Bound::Ulps(0.5));
    match *op {
        Op::Rcp { ty: Ty::F32, approx, ftz } => {
            if approx {
                f32_map(out, active, a, Form { ftz, bound: limit(0.0) }, noise, |x| 1.0 / x);
            } else {
                map1(out, active, a, |x| f32_out(1.0 / f32_in(x, ftz), ftz, false));
            }
        }
        Op::Rcp { ty: Ty::F64, approx, ftz: _ } => {
            if approx {
                map1(out, active, a, |x| f64_upper(1.0 / flush_f64(f64::from_bits(x)), f64::from_bits(x)));
            } else {
                f64_map(out, active, a, |x| 1.0 / x);
            }
        }
        Op::Sqrt { ty: Ty::F32, approx, ftz } => {
            if approx {
                f32_map(out, active, a, Form { ftz, bound: limit(0.0) }, noise, f64::sqrt);
            } else {
                map1(out, active, a, |x| f32_out(f32_in(x, ftz).sqrt(), ftz, false));
            }
        }
        Op::Sqrt { ty: Ty::F64, approx: false, .. } => f64_map(out, active, a, f64::sqrt),
        Op::Rsqrt { ty: Ty::F32, ftz } => f32_map(out, active, a, Form { ftz, bound: limit(0.0) }, noise, rsqrt),
        Op::Rsqrt { ty: Ty::F64, ftz } => {
            // 1/√−0 is −∞, which f64 division gives too.
            if ftz {
                map1(out, active, a, |x| f64_upper(rsqrt(flush_f64(f64::from_bits(x))), f64::from_bits(x)));
            } else {
                f64_map(out, active, a, rsqrt);
            }
        }
        Op::Ex2 { ty, ftz } => match ty {
            Ty::F32 => f32_map(out, active, a, Form { ftz, bound: limit(0.0) }, noise, f64::exp2),
            Ty::F16 | Ty::F16x2 => half_map(out, active, ty, a, Form { ftz, bound: limit(0.0) }, noise, f64::exp2),
            // bf16 exists with flushing only.
            Ty::Bf16 | Ty::Bf16x2 => half_map(out, active, ty, a, Form { ftz: true, bound: limit(0.0) }, noise, f64::exp2),
            _ => return unknown(ty),
        },
        Op::Lg2 { ftz } => {
            for_lanes(active, |i| {
                let x = f64::from(f32_in(a[i], ftz));
                out[i] = f32_out(f32::from_bits(round(Format::F32, x.log2(), limit(x), noise)), ftz, false);
            });
        }
        Op::Sin { ftz } | Op::Cos { ftz } => {
            let cosine = matches!(op, Op::Cos { .. });
            for_lanes(active, |i| {
                let x = f64::from(f32_in(a[i], ftz));
                let exact = if cosine { x.cos() } else { x.sin() };
                out[i] = f32_out(f32::from_bits(round(Format::F32, exact, limit(x), noise)), ftz, false);
            });
        }
        Op::Tanh { ty } => match ty {
            Ty::F32 => {
                for_lanes(active, |i| {
                    let x = f64::from(f32_in(a[i], false));
                    let code = round(Format::F32, x.tanh(), limit(x), noise);
                    // No value above 1 in magnitude: the table of special values ends at ±1.
                    out[i] = f32_out(f32::from_bits(code).clamp(-1.0, 1.0), false, false);
                });
            }
            Ty::F16 | Ty::F16x2 => half_map(out, active, ty, a, Form { ftz: false, bound: limit(0.0) }, noise, f64::tanh),
            Ty::Bf16 | Ty::Bf16x2 => half_map(out, active, ty, a, Form { ftz: false, bound: limit(0.0) }, noise, f64::tanh),
            _ => return unknown(ty),
        },
        Op::Rcp { ty, .. } | Op::Sqrt { ty, .. } | Op::Rsqrt { ty, .. } => return unknown(ty),
        _ => return Err(EvalError::NeedsMachine { op: op.name() }),
    }
    Ok(())
}

/// `div.full.f32` and `div.approx.f32`.
pub(super) fn divide(out: &mut Lanes, active: u32, ins: &[&Lanes], kind: Division, ftz: bool, noise: Option<Noise>) {
    for_lanes(active, |i| {
        let (a, b) = (f64::from(f32_in(ins[0][i], ftz)), f64::from(f32_in(ins[1][i], ftz)));
        // `div.approx` multiplies by a reciprocal that has been flushed to zero beyond 2¹²⁶.
        let huge = matches!(kind, Division::Approx) && b.is_finite() && b.abs() > 2f64.powi(126);
        let exact = if huge { a * 0f64.copysign(b) } else { a / b };
        out[i] = f32_out(f32::from_bits(round(Format::F32, exact, Bound::Ulps(2.0), noise)), ftz, false);
    });
}
