//! What each pure instruction computes, lane by lane, without any machine state.
//!
//! [`eval`] takes a warp's operands and writes its results. Where PTX fixes the result it is exact to the bit: one rounding in every
//! direction, flushing, clamping, shift limits, canonical NaN (`0x7fffffff` for f32, `0x7fff` for halves; f64 carries the payload of the
//! first NaN operand). Approximate instructions are computed in f64 and rounded, with [`Noise`] inside the ISA's bound on demand.
//!
//! Poison, guards and scheduling are the machine's. Lanes hold bits in the low part of a `u64`, predicates as 0 or 1; what stands above a
//! register's width is ignored in operands and zero in results.

mod approx;
pub mod atomic;
mod convert;
pub mod exact;
mod float;
mod integer;
pub mod warp;

pub use approx::{Bound, Noise, bound, flushes};

use crate::inst::Op;
use crate::ir::Ty;
use std::fmt;

/// One register of a warp: 32 lanes.
pub type Lanes = [u64; 32];

/// An operation that [`eval`] does not compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvalError {
    /// The operation reads or changes machine state: it belongs to the machine.
    NeedsMachine {
        /// The operation.
        op: &'static str,
    },
    /// PTX has no such form.
    NoSuchForm {
        /// The operation.
        op: &'static str,
        /// The type that it was asked for.
        ty: Ty,
    },
}

impl fmt::Display for EvalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EvalError::NeedsMachine { op } => write!(f, "{op} depends on machine state and has no pure meaning"),
            EvalError::NoSuchForm { op, ty } => write!(f, "{op} has no form for type {ty}"),
        }
    }
}

impl std::error::Error for EvalError {}

/// Computes `op` in the lanes of `active`; other lanes of `outs` keep what they hold. `ins` and `outs` follow the operation's signature.
///
/// Returns the lanes in which a 32-bit `IAdd`, `ISub`, `IMulLo` or `IMadLo` wrapped: beyond [0, 2³²) for unsigned types and bits, beyond
/// [−2³¹, 2³¹) for signed. Wrapping is defined; the machine reports it where such a value becomes an address.
pub fn eval(op: &Op, ins: &[&Lanes], active: u32, outs: &mut [Lanes], noise: Option<Noise>) -> Result<u32, EvalError> {
    use crate::inst::Class;
    match op {
        Op::Mov { ty } | Op::Selp { ty } => {
            let mask = width_mask(ty.bits());
            match op {
                Op::Mov { .. } => map1(&mut outs[0], active, ins[0], |a| a & mask),
                _ => map3(&mut outs[0], active, ins[0], ins[1], ins[2], |a, b, p| if p & 1 == 1 { a & mask } else { b & mask }),
            }
            Ok(0)
        }
        Op::Pack { half, .. } => {
            let bits = half.bits();
            let mask = width_mask(bits);
            map2(&mut outs[0], active, ins[0], ins[1], |a, b| (a & mask) | ((b & mask) << bits));
            Ok(0)
        }
        Op::Unpack { half, .. } => {
            let bits = half.bits();
            let mask = width_mask(bits);
            map1(&mut outs[0], active, ins[0], |a| a & mask);
            map1(&mut outs[1], active, ins[0], |a| (a >> bits) & mask);
            Ok(0)
        }
        Op::CreatePolicy { evict_first } => {
            // The encodings that the chip's own instruction yields for a fraction of 1.
            let policy = if *evict_first { 0x12f0_0000_0000_0000 } else { 0x14f0_0000_0000_0000 };
            for_lanes(active, |lane| outs[0][lane] = policy);
            Ok(0)
        }
        Op::Setp { cmp, ty, ftz } => {
            if ty.is_float() {
                float::compare(*cmp, *ty, *ftz, ins, active, &mut outs[0])?;
            } else {
                integer::compare(*cmp, *ty, ins, active, &mut outs[0])?;
            }
            Ok(0)
        }
        _ => match op.class() {
            Class::Integer => integer::eval(op, ins, active, outs),
            Class::Float => float::eval(op, ins, active, outs, noise).map(|()| 0),
            Class::Special => approx::eval(op, ins, active, outs, noise).map(|()| 0),
            Class::Convert => convert::eval(op, ins, active, outs).map(|()| 0),
            _ => Err(EvalError::NeedsMachine { op: op.name() }),
        },
    }
}

/// The low `bits` bits set.
#[inline(always)]
const fn width_mask(bits: u32) -> u64 {
    if bits >= 64 { u64::MAX } else { (1 << bits) - 1 }
}

/// Sign-extends the low `bits` bits.
#[inline(always)]
const fn sign_extend(value: u64, bits: u32) -> i64 {
    let up = 64 - bits;
    ((value << up) as i64) >> up
}

/// Runs a loop over lanes with the widest vectors that the machine has. They change no result: each lane's operations stay as they are.
#[inline(always)]
pub(crate) fn wide<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}

#[inline(always)]
fn for_lanes(active: u32, mut visit: impl FnMut(usize)) {
    if active == u32::MAX {
        for lane in 0..32 {
            visit(lane);
        }
    } else {
        let mut left = active;
        while left != 0 {
            visit(left.trailing_zeros() as usize);
            left &= left - 1;
        }
    }
}

#[inline(always)]
fn map1(out: &mut Lanes, active: u32, a: &Lanes, f: impl Fn(u64) -> u64) {
    for_lanes(active, |i| out[i] = f(a[i]));
}

#[inline(always)]
fn map2(out: &mut Lanes, active: u32, a: &Lanes, b: &Lanes, f: impl Fn(u64, u64) -> u64) {
    for_lanes(active, |i| out[i] = f(a[i], b[i]));
}

#[inline(always)]
fn map3(out: &mut Lanes, active: u32, a: &Lanes, b: &Lanes, c: &Lanes, f: impl Fn(u64, u64, u64) -> u64) {
    for_lanes(active, |i| out[i] = f(a[i], b[i], c[i]));
}
