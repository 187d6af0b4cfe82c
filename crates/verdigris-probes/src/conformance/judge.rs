//! Whether two results agree.

use super::{Check, Column, Contents, Probe, Rule};
use verdigris_kir::interp::alu;
use verdigris_kir::ir::Ty;
use verdigris_tensor::num::Format;

/// Two results that do not agree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Which of the column's results.
    pub index: usize,
    /// The operands' bits, as far as they are known.
    pub operands: Vec<u128>,
    /// The interpreter's bits.
    pub interpreter: u128,
    /// The device's bits.
    pub device: u128,
}

/// What the comparison of one check came to.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Results compared.
    pub compared: usize,
    /// Results that do not agree.
    pub mismatches: usize,
    /// Results that agree as NaN, with different bits.
    pub other_nan: usize,
    /// The largest difference as a part of the bound, where there is one.
    pub worst: f64,
    /// The first that do not agree, at most three.
    pub first: Vec<Mismatch>,
}

fn bits(bytes: &[u8], column: &Column, index: usize) -> u128 {
    let at = column.offset_bytes + index * column.stride_bytes;
    let mut word = [0u8; 16];
    word[..column.width_bytes].copy_from_slice(&bytes[at..at + column.width_bytes]);
    u128::from_le_bytes(word)
}

enum Agreement {
    Same,
    OtherNan,
    Within(f64),
    No(f64),
}

pub(super) fn judge(
    check: &Check,
    initial: &[Contents],
    interpreter: &[Vec<u8>],
    device: &[Vec<u8>],
    magnitudes: Option<&[Vec<u8>]>,
) -> Outcome {
    let mut outcome = Outcome { compared: check.result.count, ..Outcome::default() };
    let column = &check.result;
    let operand = |index: usize, operand: usize| -> Option<u128> {
        let column = check.operands.get(operand)?;
        match initial.get(column.buffer)? {
            Contents::Bytes(bytes) => Some(bits(bytes, column, index)),
            Contents::Filled { .. } => None,
        }
    };
    for index in 0..column.count {
        let (ours, theirs) = (bits(&interpreter[column.buffer], column, index), bits(&device[column.buffer], column, index));
        let size = magnitudes.map(|run| bits(&run[column.buffer], column, index));
        match agree(&check.rule, ours, theirs, operand(index, 0), size) {
            Agreement::Same => {}
            Agreement::OtherNan => outcome.other_nan += 1,
            Agreement::Within(part) => outcome.worst = outcome.worst.max(part),
            Agreement::No(part) => {
                outcome.worst = outcome.worst.max(part);
                outcome.mismatches += 1;
                if outcome.first.len() < 3 {
                    let operands = (0..check.operands.len()).filter_map(|at| operand(index, at)).collect();
                    outcome.first.push(Mismatch { index, operands, interpreter: ours, device: theirs });
                }
            }
        }
    }
    outcome
}

fn agree(rule: &Rule, ours: u128, theirs: u128, operand: Option<u128>, size: Option<u128>) -> Agreement {
    if ours == theirs {
        return Agreement::Same;
    }
    let ty = match rule {
        Rule::Bits => return Agreement::No(0.0),
        Rule::Number(ty) | Rule::Approximate(_, ty) | Rule::Product { ty, .. } => *ty,
    };
    let width = element_bits(ty);
    let halves = if matches!(ty, Ty::F16x2 | Ty::Bf16x2) { 2 } else { 1 };
    let (mut worst, mut other_nan, mut bad) = (0.0f64, false, false);
    for half in 0..halves {
        let part = |word: u128| (word >> (half * width)) as u64 & (u64::MAX >> (64 - width));
        let (a, b) = (part(ours), part(theirs));
        if a == b {
            continue;
        }
        let (x, y) = (number(ty, a), number(ty, b));
        if x.is_nan() && y.is_nan() {
            other_nan = true;
            continue;
        }
        let Some(bound) = bound(rule, ty, x, operand.map(|word| number(ty, part(word))), size.map(|word| number(ty, part(word)))) else {
            bad = true;
            continue;
        };
        let difference = (x - y).abs();
        if difference.is_finite() && difference <= bound {
            worst = worst.max(difference / bound);
        } else {
            bad = true;
            worst = worst.max(if difference.is_finite() && bound > 0.0 { difference / bound } else { 0.0 });
        }
    }
    match (bad, other_nan) {
        (true, _) => Agreement::No(worst),
        (false, true) => Agreement::OtherNan,
        (false, false) => Agreement::Within(worst),
    }
}

/// How far the device's number may be from the interpreter's `x`; `None` where the bits must be the same.
fn bound(rule: &Rule, ty: Ty, x: f64, operand: Option<f64>, size: Option<f64>) -> Option<f64> {
    let ulp = ulp(ty, x);
    match rule {
        Rule::Bits | Rule::Number(_) => None,
        // The interpreter's own rounding is half an ulp.
        Rule::Approximate(op, _) => {
            let bound = alu::bound(op, operand.unwrap_or(0.0))?;
            let flushed = if alu::flushes(op) { smallest_normal(ty) } else { 0.0 };
            // Below the normal range a relative bound falls under the spacing of the format: the device rounds its result to that too
            // (an H200 gives 2^-20.75 as f16 9.51 → 9 units in the last place).
            let spacing = if x.abs() < smallest_normal(ty) { 0.5 * ulp } else { 0.0 };
            Some(bound.at(x, ulp) + 0.5 * ulp + spacing + if x.abs() <= flushed { flushed } else { 0.0 })
        }
        Rule::Product { relative, .. } => Some(relative * size? + ulp),
    }
}

fn element_bits(ty: Ty) -> u32 {
    match ty {
        Ty::F16x2 | Ty::Bf16x2 => 16,
        other => other.bits().max(8),
    }
}

fn format(ty: Ty) -> Option<Format> {
    match ty {
        Ty::F16 | Ty::F16x2 => Some(Format::F16),
        Ty::Bf16 | Ty::Bf16x2 => Some(Format::BF16),
        Ty::F32 => Some(Format::F32),
        _ => None,
    }
}

fn number(ty: Ty, bits: u64) -> f64 {
    match format(ty) {
        Some(format) => format.decode(bits as u32),
        None if ty == Ty::F64 => f64::from_bits(bits),
        None => bits as f64,
    }
}

fn ulp(ty: Ty, x: f64) -> f64 {
    match format(ty) {
        Some(format) if x.is_finite() => format.ulp(x),
        None if x.is_finite() => (x.abs() * f64::EPSILON).max(f64::MIN_POSITIVE),
        _ => 0.0,
    }
}

fn smallest_normal(ty: Ty) -> f64 {
    match ty {
        Ty::F16 | Ty::F16x2 => 2f64.powi(-14),
        _ => 2f64.powi(-126),
    }
}

pub(super) fn stray_byte(probe: &Probe, after: &[Vec<u8>]) -> Option<(usize, usize)> {
    for (slot, contents) in probe.buffers.iter().enumerate() {
        let mut named = vec![false; contents.len()];
        for check in probe.checks.iter().filter(|check| check.result.buffer == slot) {
            let Column { offset_bytes, stride_bytes, width_bytes, count, .. } = check.result;
            for index in 0..count {
                let at = offset_bytes + index * stride_bytes;
                named[at..at + width_bytes].fill(true);
            }
        }
        let before = contents.to_vec();
        let stray = (0..before.len()).find(|&at| !named[at] && before[at] != after[slot][at]);
        if let Some(at) = stray {
            return Some((slot, at));
        }
    }
    None
}
