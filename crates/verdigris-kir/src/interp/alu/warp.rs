//! Exchange between the lanes of a warp.

use super::{Lanes, sign_extend, width_mask};
use crate::inst::{Redux, Shuffle, Vote};
use crate::ir::Ty;

/// The lane that `lane` reads in a shuffle, and whether it lies in range; out of range a lane reads itself.
///
/// `amount` is the lane or distance (its low 5 bits count); `clamp` holds the bound in bits 0–4 and the segment mask in bits 8–12.
pub const fn shuffle_source(mode: Shuffle, lane: u32, amount: u32, clamp: u32) -> (u32, bool) {
    let amount = amount & 31;
    let bound = clamp & 31;
    let segment = (clamp >> 8) & 31;
    let last = (lane & segment) | (bound & !segment);
    let first = lane & segment;
    let (source, in_range) = match mode {
        // The bound of an upward shuffle is the lowest lane of the segment.
        Shuffle::Up => (lane as i32 - amount as i32, lane as i32 - amount as i32 >= last as i32),
        Shuffle::Down => ((lane + amount) as i32, lane + amount <= last),
        Shuffle::Butterfly => ((lane ^ amount) as i32, lane ^ amount <= last),
        Shuffle::Index | Shuffle::Uniform => {
            let source = first | (amount & !segment);
            (source as i32, source <= last)
        }
    };
    if in_range { (source as u32, true) } else { (lane, false) }
}

/// The lanes of `members` whose predicate holds.
pub fn ballot(predicate: &Lanes, members: u32) -> u32 {
    (0..32).fold(0, |mask, lane| mask | ((predicate[lane] as u32 & 1) << lane)) & members
}

/// A vote over the lanes of `members`.
pub fn vote(mode: Vote, predicate: &Lanes, members: u32) -> bool {
    let holding = ballot(predicate, members);
    match mode {
        Vote::All => holding == members,
        Vote::Any => holding != 0,
        Vote::Uniform => holding == members || holding == 0,
    }
}

/// For each lane of `members`, the members that hold the same value of type `ty`; 0 in other lanes.
pub fn match_any(value: &Lanes, ty: Ty, members: u32) -> Lanes {
    let mask = width_mask(ty.bits());
    std::array::from_fn(|lane| {
        if members >> lane & 1 == 0 {
            return 0;
        }
        (0..32).filter(|&other| members >> other & 1 == 1 && (value[other] ^ value[lane]) & mask == 0).fold(0, |m, other| m | 1 << other)
    })
}

/// `members` if they all hold the same value, else 0.
pub fn match_all(value: &Lanes, ty: Ty, members: u32) -> u32 {
    let first = members.trailing_zeros() as usize;
    if first < 32 && match_any(value, ty, members)[first] == u64::from(members) { members } else { 0 }
}

/// A 32-bit integer reduced over the lanes of `members`; a sum wraps. `None` without members.
pub fn redux(op: Redux, ty: Ty, value: &Lanes, members: u32) -> Option<u32> {
    let signed = ty.is_signed();
    let less = |a: u32, b: u32| if signed { (a as i32) < (b as i32) } else { a < b };
    (0..32).filter(|lane| members >> lane & 1 == 1).map(|lane| value[lane] as u32).reduce(|a, b| match op {
        Redux::Add => a.wrapping_add(b),
        Redux::Min => {
            if less(b, a) {
                b
            } else {
                a
            }
        }
        Redux::Max => {
            if less(a, b) {
                b
            } else {
                a
            }
        }
        Redux::And => a & b,
        Redux::Or => a | b,
        Redux::Xor => a ^ b,
    })
}

/// The lane that an election picks: PTX leaves it open, the lowest is what the chip does. `None` without members.
pub const fn elect(members: u32) -> Option<u32> {
    if members == 0 { None } else { Some(members.trailing_zeros()) }
}

/// Sign- or zero-extends the low byte of a loaded word, as `ld.s8` and `ld.u8` do.
pub const fn extend_byte(byte: u8, signed: bool) -> u64 {
    if signed { sign_extend(byte as u64, 8) as u64 & 0xffff_ffff } else { byte as u64 }
}
