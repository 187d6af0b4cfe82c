//! Exchange between the lanes of a warp.

use super::{AsVal, Kernel, Scalar, Val};
use crate::inst::{Op, Redux, Shuffle, Vote};
use crate::ir::{Operand, Ty};

const ALL: Operand = Operand::Imm(0xffff_ffff);

impl<'k> Kernel<'k> {
    #[track_caller]
    fn shuffle<T: Scalar>(self, mode: Shuffle, value: Operand, lane: Operand, clamp: u64) -> Val<'k, T> {
        assert_eq!(T::TY.bits(), 32, "a shuffle moves 32 bits");
        self.compute(Op::Shfl { mode }, &[value, lane, Operand::Imm(clamp), ALL])
    }

    /// The value of the lane whose index differs by `mask` (exclusive or).
    #[track_caller]
    pub fn shfl_bfly<T: Scalar>(self, value: impl AsVal<'k, T>, mask: u32) -> Val<'k, T> {
        self.shuffle(Shuffle::Butterfly, value.operand(), Operand::Imm(mask.into()), 0x1f)
    }

    /// The value of lane `lane`.
    #[track_caller]
    pub fn shfl_idx<T: Scalar>(self, value: impl AsVal<'k, T>, lane: impl AsVal<'k, u32>) -> Val<'k, T> {
        self.shuffle(Shuffle::Index, value.operand(), lane.operand(), 0x1f)
    }

    /// The value of the lane `distance` above; the lane's own at the end of the warp.
    #[track_caller]
    pub fn shfl_down<T: Scalar>(self, value: impl AsVal<'k, T>, distance: u32) -> Val<'k, T> {
        self.shuffle(Shuffle::Down, value.operand(), Operand::Imm(distance.into()), 0x1f)
    }

    /// The value of the lane `distance` below; the lane's own at the start of the warp.
    #[track_caller]
    pub fn shfl_up<T: Scalar>(self, value: impl AsVal<'k, T>, distance: u32) -> Val<'k, T> {
        self.shuffle(Shuffle::Up, value.operand(), Operand::Imm(distance.into()), 0)
    }

    /// The lanes in which the predicate holds, as a mask.
    #[track_caller]
    pub fn ballot(self, predicate: Val<'k, bool>) -> Val<'k, u32> {
        self.compute(Op::Ballot {}, &[predicate.operand(), ALL])
    }

    /// Whether the predicate holds in all lanes, in any lane, or is the same in all.
    #[track_caller]
    pub fn vote(self, mode: Vote, predicate: Val<'k, bool>) -> Val<'k, bool> {
        self.compute(Op::VoteAcross { mode }, &[predicate.operand(), ALL])
    }

    /// A 32-bit integer reduced over the warp; the result stands in every lane.
    #[track_caller]
    pub fn redux<T: Scalar>(self, op: Redux, value: impl AsVal<'k, T>) -> Val<'k, T> {
        assert!(matches!(T::TY, Ty::U32 | Ty::S32), "redux is for 32-bit integers");
        self.compute(Op::ReduxAcross { op, ty: T::TY }, &[value.operand(), ALL])
    }

    /// The lanes that hold the same value, as a mask.
    #[track_caller]
    pub fn match_any<T: Scalar>(self, value: impl AsVal<'k, T>) -> Val<'k, u32> {
        self.compute(Op::MatchAny { ty: T::TY }, &[value.operand(), ALL])
    }

    /// True in exactly one lane of the warp.
    #[track_caller]
    pub fn elect(self) -> Val<'k, bool> {
        self.compute(Op::Elect {}, &[ALL])
    }
}
