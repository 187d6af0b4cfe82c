//! A kernel in flat form: one row of steps with the places where lanes part and meet again. Made once for each kernel.

use super::alu::Lanes;
use crate::inst::Op;
use crate::ir::{Block, KernelBody, Operand, Role, Stmt};
use crate::verify::Verified;
use std::collections::HashMap;
use std::sync::Arc;

/// An operand.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source {
    Reg(u32),
    /// Which of [`Decoded::constants`].
    Constant(u32),
}

/// One instruction.
#[derive(Debug)]
pub(crate) struct Instruction {
    pub(crate) op: Op,
    pub(crate) outs: Vec<Option<u32>>,
    pub(crate) ins: Vec<Source>,
    pub(crate) guard: Option<(u32, bool)>,
    pub(crate) loc: u32,
    pub(crate) class: usize,
    pub(crate) pure: bool,
}

/// Where a role starts.
#[derive(Debug)]
pub(crate) struct RoleEntry {
    pub(crate) first_warp: u32,
    pub(crate) warps: u32,
    pub(crate) start: u32,
}

/// One step.
#[derive(Debug)]
pub(crate) enum Flat {
    Inst(Instruction),
    /// Lanes part: the side that holds is behind this step, the other at `otherwise`; both meet at `end`.
    If {
        cond: u32,
        otherwise: u32,
        end: u32,
        loc: u32,
    },
    /// The end of a side or of a role.
    Join,
    /// The start of a loop, whose lanes meet again at `exit`.
    Loop {
        exit: u32,
    },
    LoopTest {
        cond: u32,
        loc: u32,
    },
    LoopBack {
        head: u32,
    },
    Roles {
        warp: Source,
        roles: Vec<RoleEntry>,
        end: u32,
        loc: u32,
    },
    StopWhen {
        cond: u32,
        loc: u32,
    },
    Exit,
}

/// A kernel ready to run.
#[derive(Debug)]
pub(crate) struct Decoded {
    pub(crate) body: Arc<Verified<KernelBody>>,
    pub(crate) steps: Vec<Flat>,
    /// The constants that stand in its instructions, each spread over the lanes: an instruction reads them as it reads registers.
    pub(crate) constants: Vec<Lanes>,
    /// Mbarriers that it declares.
    pub(crate) barriers: u32,
}

impl Decoded {
    pub(crate) fn new(body: Arc<Verified<KernelBody>>) -> Self {
        let mut flat = Flattener { body: &body, steps: Vec::new(), constants: Vec::new(), places: HashMap::new() };
        flat.block(&body.body);
        flat.steps.push(Flat::Exit);
        let (steps, constants) = (flat.steps, flat.constants);
        let barriers = body.barriers.iter().map(|decl| decl.count).sum();
        Decoded { body, steps, constants, barriers }
    }
}

struct Flattener<'a> {
    body: &'a KernelBody,
    steps: Vec<Flat>,
    constants: Vec<Lanes>,
    /// Where each constant stands.
    places: HashMap<u64, u32>,
}

impl Flattener<'_> {
    fn here(&self) -> u32 {
        self.steps.len() as u32
    }

    fn source(&mut self, operand: Operand) -> Source {
        match operand {
            Operand::Reg(reg) => Source::Reg(reg.0),
            Operand::Imm(bits) => self.constant(bits),
            // The verifier has checked the index.
            Operand::Late(index) => self.constant(self.body.late.get(index as usize).copied().unwrap_or(0)),
        }
    }

    fn constant(&mut self, bits: u64) -> Source {
        let constants = &mut self.constants;
        Source::Constant(*self.places.entry(bits).or_insert_with(|| {
            constants.push([bits; 32]);
            constants.len() as u32 - 1
        }))
    }

    fn block(&mut self, block: &Block) {
        for stmt in &block.stmts {
            self.stmt(stmt);
        }
    }

    fn stmt(&mut self, stmt: &Stmt) {
        match stmt {
            Stmt::Inst(inst) => {
                let instruction = Instruction {
                    class: inst.op.class() as usize,
                    pure: inst.op.is_pure(),
                    op: inst.op.clone(),
                    outs: inst.outs.iter().map(|out| out.map(|reg| reg.0)).collect(),
                    ins: inst.ins.iter().map(|&operand| self.source(operand)).collect(),
                    guard: inst.guard.map(|guard| (guard.pred.0, guard.negate)),
                    loc: inst.loc.0,
                };
                self.steps.push(Flat::Inst(instruction));
            }
            Stmt::If { cond, then, otherwise, loc } => {
                let at = self.steps.len();
                self.steps.push(Flat::Exit);
                self.block(then);
                self.steps.push(Flat::Join);
                let second = self.here();
                self.block(otherwise);
                self.steps.push(Flat::Join);
                self.steps[at] = Flat::If { cond: cond.0, otherwise: second, end: self.here(), loc: loc.0 };
            }
            Stmt::Loop { head, cond, body, loc, .. } => {
                let at = self.steps.len();
                self.steps.push(Flat::Exit);
                let start = self.here();
                self.block(head);
                self.steps.push(Flat::LoopTest { cond: cond.0, loc: loc.0 });
                self.block(body);
                self.steps.push(Flat::LoopBack { head: start });
                self.steps[at] = Flat::Loop { exit: self.here() };
            }
            Stmt::Roles { warp, roles, loc } => {
                let at = self.steps.len();
                self.steps.push(Flat::Exit);
                let entries = roles.iter().map(|role| self.role(role)).collect();
                self.steps[at] = Flat::Roles { warp: self.source(*warp), roles: entries, end: self.here(), loc: loc.0 };
            }
            Stmt::StopWhen { cond, loc } => self.steps.push(Flat::StopWhen { cond: cond.0, loc: loc.0 }),
            Stmt::Comment(_) => {}
        }
    }

    fn role(&mut self, role: &Role) -> RoleEntry {
        let start = self.here();
        self.block(&role.body);
        self.steps.push(Flat::Join);
        RoleEntry { first_warp: role.first_warp, warps: role.warps, start }
    }
}
