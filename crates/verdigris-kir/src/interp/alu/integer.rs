//! Integer and bit instructions.

use super::{EvalError, Lanes, for_lanes, map1, map2, map3, sign_extend, wide, width_mask};
use crate::inst::{Cmp, Op};
use crate::ir::Ty;

/// The wide result of `a · b` of `bits`-wide operands, as 128 bits.
#[inline(always)]
fn wide_product(a: u64, b: u64, bits: u32, signed: bool) -> u128 {
    if signed {
        (i128::from(sign_extend(a, bits)) * i128::from(sign_extend(b, bits))) as u128
    } else {
        u128::from(a & width_mask(bits)) * u128::from(b & width_mask(bits))
    }
}

/// An arithmetic result with its wrap mask: `exact` gives the mathematical value of a 32-bit operation, modulo 2⁶⁴. That is exact enough:
/// no such value differs from one of 32 bits by a multiple of 2⁶⁴.
#[inline(always)]
fn arithmetic(
    out: &mut Lanes,
    active: u32,
    ty: Ty,
    ins: &[&Lanes],
    fast: impl Fn(u64, u64, u64) -> u64,
    exact: impl Fn(i64, i64, i64) -> i64,
) -> u32 {
    let bits = ty.bits();
    let mask = width_mask(bits);
    let zero = [0; 32];
    let c = ins.get(2).copied().unwrap_or(&zero);
    let mut wrapped = 0;
    match (bits, ty.is_signed()) {
        (32, true) => for_lanes(active, |i| {
            let (a, b, c) = (ins[0][i], ins[1][i], c[i]);
            out[i] = fast(a, b, c) & mask;
            let value = exact(i64::from(a as i32), i64::from(b as i32), i64::from(c as i32));
            wrapped |= u32::from(value != i64::from(out[i] as i32)) << i;
        }),
        (32, false) => for_lanes(active, |i| {
            let (a, b, c) = (ins[0][i] & mask, ins[1][i] & mask, c[i] & mask);
            out[i] = fast(a, b, c) & mask;
            wrapped |= u32::from(exact(a as i64, b as i64, c as i64) != out[i] as i64) << i;
        }),
        _ => for_lanes(active, |i| out[i] = fast(ins[0][i], ins[1][i], c[i]) & mask),
    }
    wrapped
}

pub(super) fn eval(op: &Op, ins: &[&Lanes], active: u32, outs: &mut [Lanes]) -> Result<u32, EvalError> {
    wide(|| eval_lanes(op, ins, active, outs))
}

#[inline(always)]
fn eval_lanes(op: &Op, ins: &[&Lanes], active: u32, outs: &mut [Lanes]) -> Result<u32, EvalError> {
    let out = &mut outs[0];
    match op {
        Op::IAdd { ty } => {
            return Ok(arithmetic(out, active, *ty, ins, |a, b, _| a.wrapping_add(b), |a, b, _| a.wrapping_add(b)));
        }
        Op::ISub { ty } => {
            return Ok(arithmetic(out, active, *ty, ins, |a, b, _| a.wrapping_sub(b), |a, b, _| a.wrapping_sub(b)));
        }
        Op::IMulLo { ty } => {
            return Ok(arithmetic(out, active, *ty, ins, |a, b, _| a.wrapping_mul(b), |a, b, _| a.wrapping_mul(b)));
        }
        Op::IMadLo { ty } => {
            return Ok(arithmetic(
                out,
                active,
                *ty,
                ins,
                |a, b, c| a.wrapping_mul(b).wrapping_add(c),
                |a, b, c| a.wrapping_mul(b).wrapping_add(c),
            ));
        }
        Op::IMulHi { ty } => {
            let (bits, signed) = (ty.bits(), ty.is_signed());
            map2(out, active, ins[0], ins[1], |a, b| (wide_product(a, b, bits, signed) >> bits) as u64 & width_mask(bits));
        }
        Op::IMulWide { ty } => {
            let (bits, signed) = (ty.bits(), ty.is_signed());
            map2(out, active, ins[0], ins[1], |a, b| wide_product(a, b, bits, signed) as u64 & width_mask(2 * bits));
        }
        Op::IMadWide { ty } => {
            let (bits, signed) = (ty.bits(), ty.is_signed());
            map3(out, active, ins[0], ins[1], ins[2], |a, b, c| {
                (wide_product(a, b, bits, signed) as u64).wrapping_add(c) & width_mask(2 * bits)
            });
        }
        Op::IMin { ty } | Op::IMax { ty } => {
            let (bits, mask, larger) = (ty.bits(), width_mask(ty.bits()), matches!(op, Op::IMax { .. }));
            if ty.is_signed() {
                map2(out, active, ins[0], ins[1], |a, b| {
                    let a_less = sign_extend(a, bits) < sign_extend(b, bits);
                    (if a_less != larger { a } else { b }) & mask
                });
            } else {
                map2(out, active, ins[0], ins[1], |a, b| {
                    let (a, b) = (a & mask, b & mask);
                    if (a < b) != larger { a } else { b }
                });
            }
        }
        Op::INeg { ty } => {
            let mask = width_mask(ty.bits());
            map1(out, active, ins[0], |a| a.wrapping_neg() & mask);
        }
        Op::IAbs { ty } => {
            let bits = ty.bits();
            map1(out, active, ins[0], |a| sign_extend(a, bits).wrapping_abs() as u64 & width_mask(bits));
        }
        Op::And { ty } => {
            let mask = width_mask(ty.bits());
            map2(out, active, ins[0], ins[1], |a, b| a & b & mask);
        }
        Op::Or { ty } => {
            let mask = width_mask(ty.bits());
            map2(out, active, ins[0], ins[1], |a, b| (a | b) & mask);
        }
        Op::Xor { ty } => {
            let mask = width_mask(ty.bits());
            map2(out, active, ins[0], ins[1], |a, b| (a ^ b) & mask);
        }
        Op::Not { ty } => {
            let mask = width_mask(ty.bits());
            map1(out, active, ins[0], |a| !a & mask);
        }
        Op::Shl { ty } => {
            let bits = ty.bits();
            map2(out, active, ins[0], ins[1], |a, b| {
                let by = b as u32;
                if by >= bits { 0 } else { (a << by) & width_mask(bits) }
            });
        }
        Op::Shr { ty } => {
            let bits = ty.bits();
            if ty.is_signed() {
                map2(out, active, ins[0], ins[1], |a, b| (sign_extend(a, bits) >> (b as u32).min(bits - 1)) as u64 & width_mask(bits));
            } else {
                map2(out, active, ins[0], ins[1], |a, b| {
                    let by = b as u32;
                    if by >= bits { 0 } else { (a & width_mask(bits)) >> by }
                });
            }
        }
        Op::Popc { ty } => {
            let mask = width_mask(ty.bits());
            map1(out, active, ins[0], |a| u64::from((a & mask).count_ones()));
        }
        Op::Clz { ty } => {
            let bits = ty.bits();
            map1(out, active, ins[0], |a| u64::from((a & width_mask(bits)).leading_zeros() - (64 - bits)));
        }
        Op::Brev { ty } => {
            let bits = ty.bits();
            map1(out, active, ins[0], |a| a.reverse_bits() >> (64 - bits));
        }
        Op::Bfind { ty } => {
            let (bits, signed) = (ty.bits(), ty.is_signed());
            map1(out, active, ins[0], |a| {
                let value = sign_extend(a, bits);
                let seen = if signed { (if value < 0 { !value } else { value }) as u64 } else { a & width_mask(bits) };
                if seen == 0 { 0xffff_ffff } else { u64::from(63 - seen.leading_zeros()) }
            });
        }
        Op::Bfe { ty } => {
            let (bits, signed) = (ty.bits(), ty.is_signed());
            map3(out, active, ins[0], ins[1], ins[2], |a, position, length| {
                extract(a, position as u32 & 0xff, length as u32 & 0xff, bits, signed)
            });
        }
        Op::Bfi { ty } => {
            let bits = ty.bits();
            for_lanes(active, |i| {
                let (position, length) = (ins[2][i] as u32 & 0xff, ins[3][i] as u32 & 0xff);
                let field = if position >= bits { 0 } else { (width_mask(length.min(64)) << position) & width_mask(bits) };
                let moved = if position >= bits { 0 } else { ins[0][i] << position };
                out[i] = (moved & field) | (ins[1][i] & width_mask(bits) & !field);
            });
        }
        Op::Prmt {} => map3(out, active, ins[0], ins[1], ins[2], |a, b, selector| {
            let bytes = (a & 0xffff_ffff) | (b << 32);
            (0..4).fold(0, |word, i| {
                let nibble = (selector >> (4 * i)) & 15;
                let byte = (bytes >> (8 * (nibble & 7))) & 0xff;
                let byte = if nibble & 8 == 0 {
                    byte
                } else if byte & 0x80 == 0 {
                    0
                } else {
                    0xff
                };
                word | (byte << (8 * i))
            })
        }),
        Op::Funnel { left, wrap } => map3(out, active, ins[0], ins[1], ins[2], |a, b, c| {
            let by = if *wrap { c as u32 & 31 } else { (c as u32).min(32) };
            let both = (a & 0xffff_ffff) | (b << 32);
            if *left { ((both << by) >> 32) & 0xffff_ffff } else { (both >> by) & 0xffff_ffff }
        }),
        Op::Lop3 { table } => map3(out, active, ins[0], ins[1], ins[2], |a, b, c| {
            (0..8u64).filter(|row| table >> row & 1 == 1).fold(0, |word, row| {
                let pick = |value: u64, bit: u64| if row >> bit & 1 == 1 { value } else { !value };
                word | (pick(a, 2) & pick(b, 1) & pick(c, 0))
            }) & 0xffff_ffff
        }),
        Op::Dp4a { a_signed, b_signed } => map3(out, active, ins[0], ins[1], ins[2], |a, b, c| {
            let sum = (0..4).fold(c as i64, |sum, i| sum.wrapping_add(part(a, i, 8, *a_signed) * part(b, i, 8, *b_signed)));
            sum as u64 & 0xffff_ffff
        }),
        Op::Dp2a { a_signed, b_signed, high } => map3(out, active, ins[0], ins[1], ins[2], |a, b, c| {
            let from = if *high { 2 } else { 0 };
            let sum = (0..2).fold(c as i64, |sum, i| sum.wrapping_add(part(a, i, 16, *a_signed) * part(b, from + i, 8, *b_signed)));
            sum as u64 & 0xffff_ffff
        }),
        _ => return Err(EvalError::NeedsMachine { op: op.name() }),
    }
    Ok(0)
}

/// Field `index` of `bits` bits.
#[inline(always)]
fn part(word: u64, index: u32, bits: u32, signed: bool) -> i64 {
    let field = (word >> (index * bits)) & width_mask(bits);
    if signed { sign_extend(field, bits) } else { field as i64 }
}

/// PTX `bfe`: the sign bit of a field that reaches past the top is the top bit.
#[inline(always)]
fn extract(a: u64, position: u32, length: u32, bits: u32, signed: bool) -> u64 {
    let a = a & width_mask(bits);
    let negative = signed && length > 0 && a >> (position + length - 1).min(bits - 1) & 1 == 1;
    let fill = if negative { width_mask(bits) } else { 0 };
    if length == 0 {
        return 0;
    }
    let taken = bits.saturating_sub(position).min(length);
    let field = width_mask(taken);
    let value = if position >= bits { 0 } else { a >> position };
    ((value & field) | (fill & !field)) & width_mask(bits)
}

pub(super) fn compare(cmp: Cmp, ty: Ty, ins: &[&Lanes], active: u32, out: &mut Lanes) -> Result<(), EvalError> {
    let (bits, signed) = (ty.bits(), ty.is_signed());
    // An unsigned order is the signed one with the top bit flipped.
    let key = |a: u64| {
        if signed { sign_extend(a, bits) } else { ((a & width_mask(bits)) ^ (1 << 63)) as i64 }
    };
    let (a, b) = (ins[0], ins[1]);
    match cmp {
        Cmp::Eq => map2(out, active, a, b, |a, b| u64::from(key(a) == key(b))),
        Cmp::Ne => map2(out, active, a, b, |a, b| u64::from(key(a) != key(b))),
        Cmp::Lt => map2(out, active, a, b, |a, b| u64::from(key(a) < key(b))),
        Cmp::Le => map2(out, active, a, b, |a, b| u64::from(key(a) <= key(b))),
        Cmp::Gt => map2(out, active, a, b, |a, b| u64::from(key(a) > key(b))),
        Cmp::Ge => map2(out, active, a, b, |a, b| u64::from(key(a) >= key(b))),
        _ => return Err(EvalError::NoSuchForm { op: "Setp", ty }),
    }
    Ok(())
}
