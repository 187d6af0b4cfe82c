//! Where registers live: `[form]`, `[scope]`, `[unwritten]`, `[once]`, `[stop]`; and the notes `[unused]`.

use super::{Fault, Findings};
use crate::inst::Op;
use crate::ir::{Block, Inst, KernelBody, Loc, Operand, Reg, RegKind, Stmt};

/// Every index exists and every chain of positions ends.
pub(super) fn form(found: &mut Findings<'_>) {
    let body = found.body;
    let mut say = |loc: Loc, what: String| found.faults.push(Fault { rule: "form", loc, second: None, message: what });
    if body.locations.is_empty() {
        say(Loc(0), format!("kernel {} has no source positions: number 0 is the kernel itself", body.name));
        return;
    }
    for (index, info) in body.locations.iter().enumerate() {
        // A chain leads to positions that were there before: so it ends.
        if info.inlined_at.is_some_and(|outer| outer.0 as usize >= body.locations.len()) || !ends(body, index) {
            say(Loc(index as u32), format!("{info}: the chain of positions from number {index} does not end"));
            return;
        }
    }
    let positions = body.locations.len();
    let bad_loc = |loc: Loc| loc.0 as usize >= positions;
    let mut form = Form { body, say: &mut say };
    for (name, loc) in body
        .params
        .iter()
        .map(|param| (param.name, param.loc))
        .chain(body.shared.iter().map(|piece| (piece.name, piece.loc)))
        .chain(body.barriers.iter().map(|barrier| (barrier.name, barrier.loc)))
        .chain(body.registers.iter().map(|register| (register.name.unwrap_or("a register"), register.loc)))
    {
        if bad_loc(loc) {
            (form.say)(Loc(0), format!("{name} is declared at position {}, of {positions}", loc.0));
        }
    }
    for barrier in &body.barriers {
        if barrier.shared as usize >= body.shared.len() {
            (form.say)(Loc(0), format!("barrier {} lies in shared piece {}, of {}", barrier.name, barrier.shared, body.shared.len()));
        }
        form.late(barrier.arrivals, Loc(0));
    }
    form.block(&body.body);
}

fn ends(body: &KernelBody, index: usize) -> bool {
    let mut at = index;
    for _ in 0..=body.locations.len() {
        match body.locations[at].inlined_at {
            None => return true,
            Some(outer) if (outer.0 as usize) < body.locations.len() => at = outer.0 as usize,
            Some(_) => return false,
        }
    }
    false
}

struct Form<'a, 's> {
    body: &'a KernelBody,
    say: &'s mut dyn FnMut(Loc, String),
}

impl Form<'_, '_> {
    fn loc(&mut self, loc: Loc) -> Loc {
        if (loc.0 as usize) < self.body.locations.len() {
            return loc;
        }
        (self.say)(Loc(0), format!("a statement stands at position {}, of {}", loc.0, self.body.locations.len()));
        Loc(0)
    }

    fn wrong(&mut self, loc: Loc, what: String) {
        let line = self.body.kernel_line(loc).to_string();
        (self.say)(loc, format!("{line}: {what}"));
    }

    fn reg(&mut self, reg: Reg, loc: Loc) {
        if reg.0 as usize >= self.body.registers.len() {
            self.wrong(loc, format!("register {reg} is named, but there are {}", self.body.registers.len()));
        }
    }

    fn late(&mut self, index: u32, loc: Loc) {
        if index as usize >= self.body.late.len() {
            self.wrong(loc, format!("late constant {index} is named, but there are {}", self.body.late.len()));
        }
    }

    fn operand(&mut self, operand: Operand, loc: Loc) {
        match operand {
            Operand::Reg(reg) => self.reg(reg, loc),
            Operand::Late(index) => self.late(index, loc),
            Operand::Imm(_) => {}
        }
    }

    fn inst(&mut self, inst: &Inst) {
        let loc = self.loc(inst.loc);
        for out in inst.outs.iter().flatten() {
            self.reg(*out, loc);
        }
        for operand in &inst.ins {
            self.operand(*operand, loc);
        }
        if let Some(guard) = inst.guard {
            self.reg(guard.pred, loc);
        }
        let (what, index, count) = match inst.op {
            Op::ParamLoad { index, .. } | Op::ParamAddress { index } => ("parameter", index, self.body.params.len()),
            Op::SharedAddress { index } => ("shared piece", index, self.body.shared.len()),
            _ => return,
        };
        if index as usize >= count {
            self.wrong(loc, format!("{what} {index} is named, but there are {count}"));
        }
    }

    fn block(&mut self, block: &Block) {
        for stmt in &block.stmts {
            match stmt {
                Stmt::Inst(inst) => self.inst(inst),
                Stmt::If { cond, then, otherwise, loc } => {
                    let loc = self.loc(*loc);
                    self.reg(*cond, loc);
                    self.block(then);
                    self.block(otherwise);
                }
                Stmt::Loop { head, cond, body, loc, .. } => {
                    let loc = self.loc(*loc);
                    self.block(head);
                    self.reg(*cond, loc);
                    self.block(body);
                }
                Stmt::Roles { warp, roles, loc } => {
                    let loc = self.loc(*loc);
                    self.operand(*warp, loc);
                    for role in roles {
                        self.loc(role.loc);
                        self.block(&role.body);
                    }
                }
                Stmt::StopWhen { cond, loc } => {
                    let loc = self.loc(*loc);
                    self.reg(*cond, loc);
                }
                Stmt::Comment(_) => {}
            }
        }
    }
}

/// `[scope]`, `[unwritten]`, `[once]` and `[stop]`.
pub(super) fn check(found: &mut Findings<'_>) {
    let body = found.body;
    let mut writer = vec![None; body.registers.len()];
    body.for_each_inst(&mut |inst| {
        for out in inst.outs.iter().flatten() {
            let first = &mut writer[out.0 as usize];
            match *first {
                None => *first = Some(inst.loc),
                Some(second) if body.registers[out.0 as usize].kind == RegKind::Once => {
                    let what = format!(
                        "{} is written a second time, first at {}: it holds one value and has one writer, so readers of the first see the second",
                        found.register(*out),
                        found.at(second)
                    );
                    found.fault("once", inst.loc, Some(second), what);
                }
                Some(_) => {}
            }
        }
    });
    let mut walk = Walk { found, writer, visible: vec![false; body.registers.len()], undo: Vec::new() };
    walk.block(&body.body, true);
}

struct Walk<'f, 'a> {
    found: &'f mut Findings<'a>,
    /// The first writing instruction of each register.
    writer: Vec<Option<Loc>>,
    /// Written-once registers: whether the write has surely run. Mutable ones: whether a write may have run.
    visible: Vec<bool>,
    /// Written-once registers that became visible, to be hidden again at the end of a block.
    undo: Vec<Reg>,
}

impl Walk<'_, '_> {
    fn read(&mut self, reg: Reg, loc: Loc) {
        if self.visible[reg.0 as usize] {
            return;
        }
        let name = self.found.register(reg);
        match (self.writer[reg.0 as usize], self.found.body.registers[reg.0 as usize].kind) {
            (None, _) => {
                let declared = self.found.body.registers[reg.0 as usize].loc;
                let what = format!("{name} is read here, but nothing writes it: its value is whatever the register held before");
                self.found.fault("unwritten", loc, Some(declared), what);
            }
            (Some(writer), RegKind::Once) => {
                let at = self.found.at(writer);
                let what = format!(
                    "{name} is used outside the block that defines it, at {at}: threads that did not run that line have no value here"
                );
                self.found.fault("scope", loc, Some(writer), what);
            }
            (Some(writer), RegKind::Mutable) => {
                let at = self.found.at(writer);
                let what = format!(
                    "{name} is read here before anything has written it (first at {at}): its value is whatever the register held before"
                );
                self.found.fault("unwritten", loc, Some(writer), what);
            }
        }
        // One word a register is enough.
        self.visible[reg.0 as usize] = true;
    }

    fn inst(&mut self, inst: &Inst) {
        for reg in inst.ins.iter().filter_map(|operand| operand.reg()) {
            self.read(reg, inst.loc);
        }
        if let Some(guard) = inst.guard {
            self.read(guard.pred, inst.loc);
        }
        if let Op::Wgmma { shape } = &inst.op
            && let Some(scale) = inst.ins.get(shape.scale_d_operand())
            && self.found.body.constant(*scale).is_some_and(|bits| bits != 0)
        {
            for reg in inst.outs.iter().flatten() {
                self.read(*reg, inst.loc);
            }
        }
        for out in inst.outs.iter().flatten() {
            if !self.visible[out.0 as usize] {
                self.visible[out.0 as usize] = true;
                if self.found.body.registers[out.0 as usize].kind == RegKind::Once {
                    self.undo.push(*out);
                }
            }
        }
    }

    /// Hides what became visible since `mark`: the block that wrote it has ended.
    fn leave(&mut self, mark: usize) {
        for reg in self.undo.split_off(mark) {
            self.visible[reg.0 as usize] = false;
        }
    }

    fn scoped(&mut self, block: &Block) {
        let mark = self.undo.len();
        self.block(block, false);
        self.leave(mark);
    }

    /// Mutable registers written anywhere in a loop may have been written by an earlier turn.
    fn loop_writes(&mut self, block: &Block) {
        for stmt in &block.stmts {
            match stmt {
                Stmt::Inst(inst) => {
                    for out in inst.outs.iter().flatten() {
                        if self.found.body.registers[out.0 as usize].kind == RegKind::Mutable {
                            self.visible[out.0 as usize] = true;
                        }
                    }
                }
                Stmt::If { then, otherwise, .. } => {
                    self.loop_writes(then);
                    self.loop_writes(otherwise);
                }
                Stmt::Loop { head, body, .. } => {
                    self.loop_writes(head);
                    self.loop_writes(body);
                }
                Stmt::Roles { roles, .. } => roles.iter().for_each(|role| self.loop_writes(&role.body)),
                Stmt::StopWhen { .. } | Stmt::Comment(_) => {}
            }
        }
    }

    fn block(&mut self, block: &Block, top: bool) {
        for stmt in &block.stmts {
            match stmt {
                Stmt::Inst(inst) => self.inst(inst),
                Stmt::If { cond, then, otherwise, loc } => {
                    self.read(*cond, *loc);
                    let before = self.visible.clone();
                    self.scoped(then);
                    let after_then = std::mem::replace(&mut self.visible, before);
                    self.scoped(otherwise);
                    self.merge(&after_then);
                }
                Stmt::Loop { head, cond, body, loc, .. } => {
                    // An earlier turn may have written what a later one reads. That the first turn reads it unwritten is left to
                    // the interpreter: the kernel may know that the value does not matter there.
                    self.loop_writes(head);
                    self.loop_writes(body);
                    self.block(head, false);
                    self.read(*cond, *loc);
                    self.scoped(body);
                }
                Stmt::Roles { warp, roles, loc } => {
                    if let Some(reg) = warp.reg() {
                        self.read(reg, *loc);
                    }
                    let before = self.visible.clone();
                    let mut all = before.clone();
                    for role in roles {
                        self.visible.clone_from(&before);
                        self.scoped(&role.body);
                        all.iter_mut().zip(&self.visible).for_each(|(all, one)| *all |= one);
                    }
                    self.visible = all;
                }
                Stmt::StopWhen { cond, loc } => {
                    self.read(*cond, *loc);
                    if !top {
                        self.found.fault(
                            "stop",
                            *loc,
                            None,
                            "stop_when stands inside a block: only at the kernel's top level do all threads of the cluster reach it, so others would wait for those that stopped",
                        );
                    }
                }
                Stmt::Comment(_) => {}
            }
        }
    }

    fn merge(&mut self, other: &[bool]) {
        self.visible.iter_mut().zip(other).for_each(|(one, other)| *one |= other);
    }
}

/// What nothing uses.
pub(super) fn unused(found: &mut Findings<'_>) {
    let body = found.body;
    let mut read = vec![false; body.registers.len()];
    let mut params = vec![false; body.params.len()];
    let mut shared = vec![false; body.shared.len()];
    conditions(&body.body, &mut |reg| read[reg.0 as usize] = true);
    body.for_each_inst(&mut |inst| {
        inst.ins.iter().filter_map(|operand| operand.reg()).for_each(|reg| read[reg.0 as usize] = true);
        inst.guard.iter().for_each(|guard| read[guard.pred.0 as usize] = true);
        match inst.op {
            Op::ParamLoad { index, .. } | Op::ParamAddress { index } => params[index as usize] = true,
            Op::SharedAddress { index } => shared[index as usize] = true,
            _ => {}
        }
    });
    body.for_each_inst(&mut |inst| {
        let mut outs = inst.outs.iter().flatten().peekable();
        if inst.op.is_pure() && outs.peek().is_some() && outs.all(|out| !read[out.0 as usize]) {
            found.fault("unused", inst.loc, None, format!("the result of {} is never read", inst.op.name()));
        }
    });
    for (param, _) in body.params.iter().zip(&params).filter(|(_, used)| !**used) {
        found.fault("unused", param.loc, None, format!("parameter {} is never read", param.name));
    }
    for (index, piece) in body.shared.iter().enumerate().filter(|(index, _)| !shared[*index]) {
        match body.barriers.iter().find(|barrier| barrier.shared as usize == index) {
            Some(barrier) => found.fault("unused", barrier.loc, None, format!("barrier {} is never named", barrier.name)),
            None => found.fault("unused", piece.loc, None, format!("shared piece {} ({} bytes) is never named", piece.name, piece.bytes)),
        }
    }
}

fn conditions(block: &Block, visit: &mut dyn FnMut(Reg)) {
    for stmt in &block.stmts {
        match stmt {
            Stmt::If { cond, then, otherwise, .. } => {
                visit(*cond);
                conditions(then, visit);
                conditions(otherwise, visit);
            }
            Stmt::Loop { head, cond, body, .. } => {
                visit(*cond);
                conditions(head, visit);
                conditions(body, visit);
            }
            Stmt::Roles { warp, roles, .. } => {
                warp.reg().into_iter().for_each(&mut *visit);
                roles.iter().for_each(|role| conditions(&role.body, visit));
            }
            Stmt::StopWhen { cond, .. } => visit(*cond),
            Stmt::Inst(_) | Stmt::Comment(_) => {}
        }
    }
}
