//! Tensor cores and fragment moves.

use super::{AsVal, Kernel, Scalar, Val, Var};
use crate::inst::{MmaShape, Op, WgmmaShape};
use crate::ir::{Operand, Reg};

/// Where `wgmma` takes A from.
#[derive(Clone, Copy, Debug)]
pub enum WgmmaA<'a, 'k> {
    /// Shared memory, by descriptor.
    Shared(Val<'k, u64>),
    /// Four registers of 32 bits a thread.
    Registers(&'a [Val<'k, u32>]),
    /// Four registers that stay put while the instruction is in flight: the elements of a fragment.
    Fragment(&'a [Var<'k, u32>]),
}

impl<'k> Kernel<'k> {
    /// `d = a·b (+ d where scale_d)` by one warpgroup, asynchronous; `accumulators` in the order of the instruction.
    #[track_caller]
    pub fn wgmma<T: Scalar>(
        self,
        shape: WgmmaShape,
        accumulators: &[Var<'k, T>],
        a: WgmmaA<'_, 'k>,
        b: Val<'k, u64>,
        scale_d: impl AsVal<'k, bool>,
    ) {
        let scale_d = match scale_d.operand() {
            Operand::Reg(reg) => reg,
            constant => self.predicate(matches!(constant, Operand::Imm(bits) if bits != 0)),
        };
        let mut ins: Vec<Operand> = match a {
            WgmmaA::Shared(descriptor) => vec![descriptor.operand()],
            WgmmaA::Registers(registers) => registers.iter().map(|r| r.operand()).collect(),
            WgmmaA::Fragment(registers) => registers.iter().map(|r| r.operand()).collect(),
        };
        ins.push(b.operand());
        ins.push(scale_d.into());
        let outs: Vec<Option<Reg>> = accumulators.iter().map(|var| Some(var.reg())).collect();
        self.instruction(Op::Wgmma { shape }, &outs, &ins);
    }

    /// A predicate register with a constant value.
    #[track_caller]
    pub fn predicate(self, value: bool) -> Reg {
        let op = Op::Setp { cmp: crate::inst::Cmp::Eq, ty: crate::ir::Ty::U32, ftz: false };
        let holds: Val<'k, bool> = self.compute(op, &[Operand::Imm(0), Operand::Imm(u64::from(!value))]);
        match holds.operand() {
            Operand::Reg(reg) => reg,
            // `compute` always makes a register.
            _ => Reg(0),
        }
    }

    /// Orders register and shared-memory accesses before the `wgmma` that follow.
    #[track_caller]
    pub fn wgmma_fence(self) {
        self.instruction(Op::WgmmaFence {}, &[], &[]);
    }

    /// Closes the group of `wgmma` issued so far.
    #[track_caller]
    pub fn wgmma_commit(self) {
        self.instruction(Op::WgmmaCommit {}, &[], &[]);
    }

    /// Waits until at most `pending` groups are in flight.
    #[track_caller]
    pub fn wgmma_wait(self, pending: u32) {
        self.instruction(Op::WgmmaWait { pending }, &[], &[]);
    }

    /// `d = a·b + c` by one warp; the results are new values.
    #[track_caller]
    pub fn mma<A: Scalar, D: Scalar>(self, shape: MmaShape, a: &[Val<'k, A>], b: &[Val<'k, A>], c: &[Var<'k, D>]) {
        let mut ins: Vec<Operand> = a.iter().map(|r| r.operand()).collect();
        ins.extend(b.iter().map(|r| r.operand()));
        ins.extend(c.iter().map(|r| r.operand()));
        let outs: Vec<Option<Reg>> = c.iter().map(|var| Some(var.reg())).collect();
        self.instruction(Op::Mma { shape }, &outs, &ins);
    }

    /// Loads `count` 8×8 matrices of 16-bit elements; lane `8·i + r` gives the address of row r of matrix i.
    #[track_caller]
    pub fn ldmatrix(self, count: u8, transpose: bool, row: impl AsVal<'k, u32>, offset_bytes: i64) -> Vec<Val<'k, u32>> {
        let op = Op::Ldmatrix { count, transpose };
        self.compute_many(op, count as usize, &[row.operand(), Operand::Imm(offset_bytes as u64)])
    }

    /// Stores 8×8 matrices of 16-bit elements; lane `8·i + r` gives the address of row r of matrix i.
    #[track_caller]
    pub fn stmatrix(self, transpose: bool, row: impl AsVal<'k, u32>, offset_bytes: i64, values: &[Val<'k, u32>]) {
        let mut ins = vec![row.operand(), Operand::Imm(offset_bytes as u64)];
        ins.extend(values.iter().map(|value| value.operand()));
        self.instruction(Op::Stmatrix { count: values.len() as u8, transpose }, &[], &ins);
    }

    /// Transposes an 8×8 matrix of 16-bit elements held by the warp.
    #[track_caller]
    pub fn movmatrix(self, value: impl AsVal<'k, u32>) -> Val<'k, u32> {
        self.compute(Op::Movmatrix {}, &[value.operand()])
    }
}
