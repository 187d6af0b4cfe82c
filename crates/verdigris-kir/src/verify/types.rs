//! Instructions against the table: `[count]`, `[type]`, `[constant]`, `[register]`, `[target]`, `[illegal]`.

use super::Findings;
use crate::inst::Op;
use crate::ir::{Block, Inst, Loc, Operand, Reg, Stmt, Ty};

pub(super) fn check(found: &mut Findings<'_>) {
    let body = found.body;
    body.for_each_inst(&mut |inst| instruction(found, inst));
    conditions(found, &body.body);
}

fn conditions(found: &mut Findings<'_>, block: &Block) {
    for stmt in &block.stmts {
        match stmt {
            Stmt::If { cond, then, otherwise, loc } => {
                predicate(found, *cond, *loc, "the condition of an if");
                conditions(found, then);
                conditions(found, otherwise);
            }
            Stmt::Loop { head, cond, body, loc, .. } => {
                predicate(found, *cond, *loc, "the condition of a loop");
                conditions(found, head);
                conditions(found, body);
            }
            Stmt::Roles { warp, roles, loc } => {
                operand(found, *warp, Ty::U32, *loc, "Roles", 0);
                roles.iter().for_each(|role| conditions(found, &role.body));
            }
            Stmt::StopWhen { cond, loc } => predicate(found, *cond, *loc, "the condition of stop_when"),
            Stmt::Inst(_) | Stmt::Comment(_) => {}
        }
    }
}

fn predicate(found: &mut Findings<'_>, reg: Reg, loc: Loc, what: &str) {
    let info = &found.body.registers[reg.0 as usize];
    if info.ty != Ty::Pred {
        let (name, ty, declared) = (found.register(reg), info.ty, info.loc);
        found.fault(
            "type",
            loc,
            Some(declared),
            format!("{what} is {name} of type {ty}, but a condition is a predicate: ptxas would refuse it"),
        );
    }
}

/// Whether a register of type `given` may stand in a slot of type `wanted`.
fn fits(given: Ty, wanted: Ty) -> bool {
    given == wanted
        || (given.bits() == wanted.bits()
            && (given == given.as_bits() || wanted == wanted.as_bits() || (given.is_integer() && wanted.is_integer())))
}

/// Whether a constant fits a slot: its high bits are all zero, or repeat the sign.
fn constant_fits(bits: u64, ty: Ty) -> bool {
    let width = ty.bits();
    if width >= 64 {
        return true;
    }
    let high = (bits as i64) >> (width - 1).max(1);
    bits >> width == 0 || (width > 1 && high == -1)
}

fn operand(found: &mut Findings<'_>, operand: Operand, wanted: Ty, loc: Loc, op: &str, slot: usize) {
    match operand {
        Operand::Reg(reg) => {
            let info = &found.body.registers[reg.0 as usize];
            if !fits(info.ty, wanted) {
                let (name, given, declared) = (found.register(reg), info.ty, info.loc);
                let at = found.at(declared);
                found.fault(
                    "type",
                    loc,
                    Some(declared),
                    format!(
                        "operand {slot} of {op} is {name} of type {given} (declared at {at}), but {wanted} is read: its bits would be taken for what they are not"
                    ),
                );
            }
        }
        Operand::Imm(_) | Operand::Late(_) => {
            let bits = found.body.constant(operand).unwrap_or(0);
            if !constant_fits(bits, wanted) {
                found.fault(
                    "type",
                    loc,
                    None,
                    format!("operand {slot} of {op} is the constant {bits:#x}, which does not fit {wanted}: its high bits would be lost"),
                );
            }
        }
    }
}

fn instruction(found: &mut Findings<'_>, inst: &Inst) {
    let (op, loc) = (inst.op.name(), inst.loc);
    if let Err(rule) = inst.op.legal() {
        found.fault(
            "illegal",
            loc,
            None,
            format!("{op} does not exist with these attributes ({:?}): {rule}; ptxas would refuse it", inst.op),
        );
        // The signature of what does not exist says nothing.
        return;
    }
    let target = inst.op.target();
    if target > found.body.target {
        let has = found.body.target.ptx();
        found.fault("target", loc, None, format!("{op} needs {}, but the kernel is built for {has}: ptxas would refuse it", target.ptx()));
    }
    if let Some(guard) = inst.guard {
        predicate(found, guard.pred, loc, &format!("the guard of {op}"));
    }
    let signature = inst.op.signature();
    for (what, given, wanted) in [("results", inst.outs.len(), signature.outs.len()), ("operands", inst.ins.len(), signature.ins.len())] {
        if given != wanted {
            found.fault("count", loc, None, format!("{op} has {given} {what}, but its signature has {wanted}"));
            return;
        }
    }
    for (slot, (out, &wanted)) in inst.outs.iter().zip(&signature.outs).enumerate() {
        let Some(reg) = out else { continue };
        let info = &found.body.registers[reg.0 as usize];
        if !fits(info.ty, wanted) {
            let (name, given, declared) = (found.register(*reg), info.ty, info.loc);
            let at = found.at(declared);
            found.fault(
                "type",
                loc,
                Some(declared),
                format!("result {slot} of {op} is {wanted}, but {name} that takes it is {given} (declared at {at}): its bits would be taken for what they are not"),
            );
        }
    }
    for (slot, (given, &wanted)) in inst.ins.iter().zip(&signature.ins).enumerate() {
        operand(found, *given, wanted, loc, op, slot);
    }
    for &slot in offset_slots(&inst.op) {
        match found.body.constant(inst.ins[slot]) {
            None => found.fault(
                "constant",
                loc,
                None,
                format!("operand {slot} of {op} is an address offset, which PTX takes as a constant only: add the register to the base"),
            ),
            Some(bits) if i32::try_from(bits as i64).is_err() => {
                found.fault("constant", loc, None, format!("the address offset of {op} is {}, but PTX holds 32 signed bits", bits as i64));
            }
            Some(_) => {}
        }
    }
    if let Some(slot) = selector_slot(&inst.op)
        && found.body.constant(inst.ins[slot]).is_none()
    {
        found.fault(
            "constant",
            loc,
            None,
            format!("operand {slot} of {op} selects the lanes of sparse metadata, which PTX takes as a constant only"),
        );
    }
    if let Op::Wgmma { shape } = &inst.op {
        accumulators(found, inst, if shape.a_in_registers { crate::inst::WgmmaShape::A_REGISTERS } else { 0 });
    }
}

fn accumulators(found: &mut Findings<'_>, inst: &Inst, a_registers: usize) {
    if let Some(slot) = inst.outs.iter().position(Option::is_none) {
        found.fault(
            "register",
            inst.loc,
            None,
            format!("accumulator {slot} of Wgmma is left out, but the product is added to all of them"),
        );
    }
    let mut seen: Vec<Reg> = inst.outs.iter().flatten().copied().collect();
    seen.sort_unstable();
    if let Some(pair) = seen.windows(2).find(|pair| pair[0] == pair[1]) {
        let name = found.register(pair[0]);
        found.fault("register", inst.loc, None, format!("{name} is two accumulators of one Wgmma: one product would be lost"));
    }
    if let Some(slot) = inst.ins[..a_registers].iter().position(|operand| operand.reg().is_none()) {
        found.fault("register", inst.loc, None, format!("operand {slot} of Wgmma is a constant, but A fragments are registers"));
    }
}

/// The operands that are byte offsets beside an address: constants in PTX.
pub(super) fn offset_slots(op: &Op) -> &'static [usize] {
    match op {
        Op::Ld { .. }
        | Op::LdByte { .. }
        | Op::St { .. }
        | Op::StByte { .. }
        | Op::Atom { .. }
        | Op::Red { .. }
        | Op::Prefetch { .. }
        | Op::DiscardL2 {}
        | Op::CpAsyncArrive { .. }
        | Op::Ldmatrix { .. }
        | Op::Stmatrix { .. }
        | Op::MbarrierInit {}
        | Op::MbarrierInvalidate {}
        | Op::MbarrierArriveToken {}
        | Op::MbarrierArrive { .. }
        | Op::MbarrierArriveExpect { .. }
        | Op::MbarrierArriveDrop {}
        | Op::MbarrierExpect { .. }
        | Op::MbarrierComplete { .. }
        | Op::MbarrierWait { .. }
        | Op::MbarrierTest { .. }
        | Op::MbarrierTestToken { .. } => &[1],
        Op::CpAsync { .. } => &[1, 3],
        _ => &[],
    }
}

fn selector_slot(op: &Op) -> Option<usize> {
    match op {
        Op::Wgmma { shape } if shape.sparse => Some(shape.b_operand() + 2),
        Op::Mma { shape } if shape.sparse => Some(shape.a_registers() + shape.b_registers() + shape.d_registers() + 1),
        _ => None,
    }
}
