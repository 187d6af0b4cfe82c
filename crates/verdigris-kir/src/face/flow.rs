//! Control flow: conditions, loops, roles.

use super::{AsVal, Kernel, Scalar, Val};
use crate::inst::Op;
use crate::ir::{Block, Inst, Loc, Operand, Reg, RegKind, Stmt};
use crate::ir::{Role as RoleBody, Ty};

/// A set of consecutive warps with one job.
pub struct Role<'a> {
    /// Its name in the text form, in faults and in the PTX.
    pub name: &'static str,
    /// How many warps belong to it.
    pub warps: u32,
    /// Registers per thread while it runs (`setmaxnreg`), for roles of whole warpgroups.
    pub registers: Option<u32>,
    /// What its warps run.
    pub body: &'a dyn Fn(),
}

impl std::fmt::Debug for Role<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Role({}, {} warps)", self.name, self.warps)
    }
}

impl<'k> Kernel<'k> {
    /// A condition as a predicate register.
    #[track_caller]
    fn condition(self, condition: Operand) -> Reg {
        match condition {
            Operand::Reg(reg) => reg,
            constant => {
                let reg = self.new_register(Ty::Pred, RegKind::Once, None, self.here());
                let value = matches!(constant, Operand::Imm(bits) if bits != 0);
                // Predicates have no constants in PTX: compare two numbers.
                let op = Op::Setp { cmp: crate::inst::Cmp::Eq, ty: Ty::U32, ftz: false };
                self.instruction(op, &[Some(reg)], &[Operand::Imm(0), Operand::Imm(u64::from(!value))]);
                reg
            }
        }
    }

    /// Runs `body` where the condition holds.
    #[track_caller]
    pub fn when(self, condition: impl AsVal<'k, bool>, body: impl Fn()) {
        self.when_operand(condition.operand(), &body, None);
    }

    /// Runs `then` where the condition holds and `otherwise` elsewhere.
    #[track_caller]
    pub fn when_else(self, condition: impl AsVal<'k, bool>, then: impl Fn(), otherwise: impl Fn()) {
        self.when_operand(condition.operand(), &then, Some(&otherwise));
    }

    // The verbs that run a closure are generic for their callers' sake. What they do stands in functions that are not, or it would be compiled anew for each of
    // some thousand closures: a sixth of all that the engines' crate had compiled.

    #[track_caller]
    fn when_operand(self, condition: Operand, then: &dyn Fn(), otherwise: Option<&dyn Fn()>) {
        let loc = self.here();
        let cond = self.condition(condition);
        let then = self.block(then);
        let otherwise = otherwise.map_or_else(Block::default, |otherwise| self.block(otherwise));
        self.push(Stmt::If { cond, then, otherwise, loc });
    }

    fn mov_at(self, loc: Loc, op: Op, out: Reg, ins: &[Operand]) {
        self.push(Stmt::Inst(Inst { op, outs: vec![Some(out)], ins: ins.to_vec(), guard: None, loc }));
    }

    /// Runs `body` for 0, 1, … `count − 1`.
    #[track_caller]
    pub fn range(self, count: impl AsVal<'k, u32>, body: impl Fn(Val<'k, u32>)) {
        self.range_step(0, count, 1, body);
    }

    /// Runs `body` for `first`, `first + step`, … as long as it is below `end`.
    #[track_caller]
    pub fn range_step(self, first: impl AsVal<'k, u32>, end: impl AsVal<'k, u32>, step: impl AsVal<'k, u32>, body: impl Fn(Val<'k, u32>)) {
        // The bound is read once, also where it is a variable that the body sets.
        let end = end.operand_val(self).operand();
        self.range_operands((first.operand(), end, step.operand()), &|i| body(Val::new(self, i.into())));
    }

    /// `(first, end, step)`.
    #[track_caller]
    fn range_operands(self, (first, end, step): (Operand, Operand, Operand), body: &dyn Fn(Reg)) {
        let loc = self.here();
        let i = self.new_register(Ty::U32, RegKind::Mutable, None, loc);
        let cond = self.new_register(Ty::Pred, RegKind::Mutable, None, loc);
        self.mov_at(loc, Op::Mov { ty: Ty::U32 }, i, &[first]);
        let head = self.block(&|| {
            self.mov_at(loc, Op::Setp { cmp: crate::inst::Cmp::Lt, ty: Ty::U32, ftz: false }, cond, &[i.into(), end]);
        });
        let body = self.block(&|| {
            body(i);
            self.mov_at(loc, Op::IAdd { ty: Ty::U32 }, i, &[i.into(), step]);
        });
        self.push(Stmt::Loop { head, cond, body, name: "range", loc });
    }

    /// Runs `body` for 0, 1, … `count − 1`, `unroll` turns to a loop turn; what is left over runs in a loop behind it.
    #[track_caller]
    pub fn range_unrolled(self, count: impl AsVal<'k, u32>, unroll: u32, body: impl Fn(Val<'k, u32>)) {
        let at = std::panic::Location::caller();
        self.scope_around(at, |caller| {
            let count = count.operand_val(self);
            let whole = if unroll.is_power_of_two() { count & !(unroll - 1) } else { count - self.remainder_by(count, unroll) };
            self.range_step(0, whole, unroll, |i| {
                for turn in 0..unroll {
                    let i = i + turn;
                    caller.run(|| body(i));
                }
            });
            self.range_step(whole, count, 1, |i| caller.run(|| body(i)));
        });
    }

    /// `n % d` for a constant `d`, by a multiplication.
    fn remainder_by(self, n: Val<'k, u32>, d: u32) -> Val<'k, u32> {
        match crate::program::Divisor::new(d) {
            Some(divisor) => {
                let t = n.mul_hi(divisor.multiplier);
                let quotient = (((n - t) >> divisor.shift1) + t) >> divisor.shift2;
                n - quotient * d
            }
            None => n,
        }
    }

    /// Runs `body` as long as `condition`, evaluated before each turn, holds.
    #[track_caller]
    pub fn while_<C: AsVal<'k, bool>>(self, condition: impl Fn() -> C, body: impl Fn()) {
        self.while_operand(&|| condition().operand(), &body);
    }

    #[track_caller]
    fn while_operand(self, condition: &dyn Fn() -> Operand, body: &dyn Fn()) {
        let loc = self.here();
        let cond = self.new_register(Ty::Pred, RegKind::Mutable, None, loc);
        let head = self.block(&|| {
            let holds = condition();
            self.mov_at(loc, Op::Mov { ty: Ty::Pred }, cond, &[holds]);
        });
        let body = self.block(body);
        self.push(Stmt::Loop { head, cond, body, name: "while", loc });
    }

    /// Runs `body` until the condition that it returns holds.
    #[track_caller]
    pub fn repeat_until<C: AsVal<'k, bool>>(self, body: impl Fn() -> C) {
        self.repeat_operand(&|| body().operand());
    }

    #[track_caller]
    fn repeat_operand(self, body: &dyn Fn() -> Operand) {
        let loc = self.here();
        let cond = self.new_register(Ty::Pred, RegKind::Mutable, None, loc);
        let head = self.block(&|| {
            let done = self.condition(body());
            self.mov_at(loc, Op::Not { ty: Ty::Pred }, cond, &[done.into()]);
        });
        self.push(Stmt::Loop { head, cond, body: Block::default(), name: "repeat", loc });
    }

    /// Ends the kernel for the whole cluster where the condition, uniform over the cluster, holds. At the kernel's top level only.
    #[track_caller]
    pub fn stop_when(self, condition: impl AsVal<'k, bool>) {
        let loc = self.here();
        let cond = self.condition(condition.operand());
        self.push(Stmt::StopWhen { cond, loc });
    }

    /// Divides the warps of the CTA (or of the role around) into consecutive roles. A role with a register budget gives or takes
    /// registers first; budgets are for whole warpgroups.
    #[track_caller]
    pub fn warp_roles(self, roles: &[Role<'_>]) {
        let loc = self.here();
        let warp = self.warp().operand();
        let (outer_first, outer_warps) = self.role_warps();
        let entry = self.with(|state| state.body.entry_registers());
        let mut first_warp = outer_first;
        let mut built = Vec::new();
        for role in roles {
            self.with(|state| state.role = (first_warp, role.warps));
            let body = self.block(&|| {
                if let Some(registers) = role.registers {
                    let op = Op::Setmaxnreg { increase: registers > entry, registers };
                    self.push(Stmt::Inst(Inst { op, outs: vec![], ins: vec![], guard: None, loc }));
                }
                (role.body)();
            });
            built.push(RoleBody { name: role.name, first_warp, warps: role.warps, registers: role.registers, body, loc });
            first_warp += role.warps;
        }
        self.with(|state| state.role = (outer_first, outer_warps));
        self.push(Stmt::Roles { warp, roles: built, loc });
    }

    /// A value that is the same in all lanes of the warp, in a form that the chip knows to be so. The interpreter checks that the lanes
    /// agree; to hand one lane's value to the others there is [`Kernel::shfl_idx`].
    #[track_caller]
    pub fn uniform<T: Scalar>(self, value: Val<'k, T>) -> Val<'k, T> {
        if T::TY.bits() != 32 || matches!(value.operand(), Operand::Imm(_)) {
            return value;
        }
        let op = Op::Shfl { mode: crate::inst::Shuffle::Uniform };
        self.compute(op, &[value.operand(), Operand::Imm(0), Operand::Imm(0x1f), Operand::Imm(0xffff_ffff)])
    }
}
