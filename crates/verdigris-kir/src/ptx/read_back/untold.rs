//! What PTX does not tell of an instruction: types that no word of it depends on.

use crate::inst::{Atomic, Op, Redux, Shuffle};
use crate::ir::Ty;

/// The instruction with those types left out that its text does not tell, as [`super::op::read`] gives it. Two instructions that are equal
/// here are one instruction to the chip.
pub(super) fn told(op: &Op) -> Op {
    let mut op = op.clone();
    match &mut op {
        // Halves move and are chosen as bits.
        Op::Mov { ty } if is_half(*ty) => *ty = ty.as_bits(),
        Op::Selp { ty } if !matches!(ty, Ty::F32 | Ty::F64) => *ty = ty.as_bits(),
        Op::Pack { half, whole } | Op::Unpack { half, whole } => (*half, *whole) = (half.as_bits(), whole.as_bits()),
        // Bits are bits, in registers and in memory.
        Op::ParamLoad { ty, .. }
        | Op::And { ty }
        | Op::Or { ty }
        | Op::Xor { ty }
        | Op::Not { ty }
        | Op::Shl { ty }
        | Op::Popc { ty }
        | Op::Clz { ty }
        | Op::Brev { ty }
        | Op::Bfi { ty }
        | Op::Ld { ty, .. }
        | Op::St { ty, .. }
        | Op::StAsync { ty, .. }
        | Op::MatchAny { ty }
        | Op::MatchAll { ty } => *ty = ty.as_bits(),
        Op::Atom { op, ty, .. } | Op::Red { op, ty, .. } | Op::RedAsync { op, ty } => match op {
            Atomic::And | Atomic::Or | Atomic::Xor | Atomic::Exch | Atomic::Cas => *ty = ty.as_bits(),
            // A sum of 64 bits wraps alike with and without a sign, and is said without.
            Atomic::Add if *ty == Ty::S64 => *ty = Ty::U64,
            _ => {}
        },
        Op::ReduxAcross { op: Redux::And | Redux::Or | Redux::Xor, ty } => *ty = ty.as_bits(),
        // That all lanes hold the same is a promise to the interpreter.
        Op::Shfl { mode } if *mode == Shuffle::Uniform => *mode = Shuffle::Index,
        _ => {}
    }
    op
}

const fn is_half(ty: Ty) -> bool {
    matches!(ty, Ty::F16 | Ty::Bf16 | Ty::F16x2 | Ty::Bf16x2)
}
