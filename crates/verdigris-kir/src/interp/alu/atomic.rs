//! What an atomic makes of a word in memory.

use super::exact;
use super::float::{f32_in, f32_out, half_format, half_out, halves, min_max};
use super::{EvalError, sign_extend, width_mask};
use crate::inst::{Atomic, BulkReduce, Round, Space};
use crate::ir::Ty;

/// The new value of a word that holds `old`, after `op` with `operand` (and, for a compare-and-swap, `swap`: the value stored where
/// `old` equals `operand`).
///
/// `atom.add.f32` on global memory flushes subnormal operands and results, on shared memory it keeps them: hence `space`.
pub fn apply(op: Atomic, ty: Ty, space: Space, old: u64, operand: u64, swap: u64) -> Result<u64, EvalError> {
    let mask = width_mask(ty.bits());
    let (a, b) = (old & mask, operand & mask);
    let unknown = Err(EvalError::NoSuchForm { op: "Atom", ty });
    let less = |a: u64, b: u64| {
        if ty.is_signed() { sign_extend(a, ty.bits()) < sign_extend(b, ty.bits()) } else { a < b }
    };
    Ok(match op {
        Atomic::Exch => b,
        Atomic::Cas => {
            if a == b {
                swap & mask
            } else {
                a
            }
        }
        Atomic::And | Atomic::Or | Atomic::Xor if ty.is_float() => return unknown,
        Atomic::And => a & b,
        Atomic::Or => a | b,
        Atomic::Xor => a ^ b,
        Atomic::Inc | Atomic::Dec if ty.bits() != 32 || ty.is_float() => return unknown,
        Atomic::Inc => {
            if a >= b {
                0
            } else {
                a + 1
            }
        }
        Atomic::Dec => {
            if a == 0 || a > b {
                b
            } else {
                a - 1
            }
        }
        Atomic::Add => match ty {
            Ty::F32 => {
                let ftz = matches!(space, Space::Global);
                f32_out(f32_in(a, ftz) + f32_in(b, ftz), ftz, false)
            }
            Ty::F64 => exact::add_f64(f64::from_bits(a), f64::from_bits(b), Round::Nearest).to_bits(),
            Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2 => {
                let format = half_format(ty);
                halves(ty, [a, b], |[a, b]| {
                    half_out(format, exact::sum(format, format.decode(a), format.decode(b), Round::Nearest), false, false, false)
                })
            }
            Ty::Pred => return unknown,
            _ => a.wrapping_add(b) & mask,
        },
        Atomic::Min | Atomic::Max => {
            let larger = op == Atomic::Max;
            match ty {
                Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2 => {
                    let single = if matches!(ty, Ty::F16 | Ty::F16x2) { Ty::F16 } else { Ty::Bf16 };
                    halves(ty, [a, b], |[a, b]| min_max(single, u64::from(a), u64::from(b), larger, false))
                }
                Ty::F32 | Ty::F64 | Ty::Pred => return unknown,
                _ => {
                    if less(a, b) != larger {
                        a
                    } else {
                        b
                    }
                }
            }
        }
    })
}

/// The same for a reduction by TMA, which always works on global memory. Unlike a thread's `red.add.f32` there it keeps
/// subnormals, as operands and as results: observed on an H200 for `cp.reduce.async.bulk`.
pub fn apply_bulk(op: BulkReduce, ty: Ty, old: u64, operand: u64) -> Result<u64, EvalError> {
    let op = match op {
        BulkReduce::Add => Atomic::Add,
        BulkReduce::Min => Atomic::Min,
        BulkReduce::Max => Atomic::Max,
        BulkReduce::And => Atomic::And,
        BulkReduce::Or => Atomic::Or,
        BulkReduce::Xor => Atomic::Xor,
        BulkReduce::Inc => Atomic::Inc,
        BulkReduce::Dec => Atomic::Dec,
    };
    // The space decides on subnormals alone, and shared memory keeps them.
    apply(op, ty, Space::Shared, old, operand, 0)
}
