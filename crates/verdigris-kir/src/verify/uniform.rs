//! What all threads of a group do alike: `[divergent]` and `[uniform]`; and the uniformity of each register.
//!
//! Each register is *the same* over some group of threads, or surely *differs* between lanes, or it is not known. It is known from values
//! that follow from thread and lane index alone (then exactly), and else from how it is computed. What differs is kept apart from
//! what is not known, so that a fault is only reported where it is sure: a comparison of a lane-dependent index with a number
//! that is computed from the launch's parameters counts as differing, since some launch makes it so; one with a constant does not, unless
//! it is known for every thread. Loops whose lanes leave in different turns are left to the interpreter.

use super::Findings;
use super::sites::{Kind, Site, Sites};
use super::values::{Known, Values};
use crate::inst::{Convergence, Op, Shuffle, Special};
use crate::ir::{Block, KernelBody, Loc, Operand, Reg, RegKind, Stmt};

/// The widest group of threads over which a value is known to be the same at the same point of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Uniformity {
    /// Nothing is known: lanes may differ.
    Lane,
    /// The lanes of a warp.
    Warp,
    /// The four warps of a warpgroup.
    Warpgroup,
    /// The threads of a CTA.
    Cta,
    /// The CTAs of a cluster.
    Cluster,
    /// The whole grid.
    Grid,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lanes {
    /// No write has been seen.
    Nothing,
    Same(Uniformity),
    /// Differs between the lanes of a warp, at least for some launch.
    Differs,
    Unknown,
}

impl Lanes {
    /// The register holds one or the other.
    fn or(self, other: Lanes) -> Lanes {
        match (self, other) {
            (Lanes::Nothing, one) | (one, Lanes::Nothing) => one,
            (Lanes::Same(one), Lanes::Same(other)) => Lanes::Same(one.min(other)),
            (Lanes::Differs, Lanes::Differs) => Lanes::Differs,
            _ => Lanes::Unknown,
        }
    }

    /// The value was written where only some of the threads come by.
    fn under(self, condition: Lanes) -> Lanes {
        match (self, condition) {
            (Lanes::Same(level), Lanes::Same(around)) => Lanes::Same(level.min(around)),
            (Lanes::Same(_), Lanes::Differs | Lanes::Unknown) => Lanes::Unknown,
            (one, _) => one,
        }
    }
}

/// The uniformity of each register of a kernel, by register number.
///
/// The body must have passed the verifier, or at least its rules of form: registers and positions are taken as they are.
pub fn uniformity(body: &KernelBody) -> Vec<Uniformity> {
    let sites = Sites::new(body);
    levels(body, &sites, &Values::new(body, &sites))
}

pub(super) fn levels<'a>(body: &'a KernelBody, sites: &Sites<'a>, values: &Values<'a>) -> Vec<Uniformity> {
    Registers::new(body, sites, values)
        .lanes
        .iter()
        .map(|lanes| if let Lanes::Same(level) = lanes { *level } else { Uniformity::Lane })
        .collect()
}

struct Registers<'v, 'a> {
    values: &'v Values<'a>,
    lanes: Vec<Lanes>,
    /// Registers computed from the launch's parameters: numbers that the kernel was not built for.
    launch: Vec<bool>,
    threads: usize,
}

impl<'v, 'a> Registers<'v, 'a> {
    fn new(body: &'a KernelBody, sites: &Sites<'a>, values: &'v Values<'a>) -> Self {
        let count = body.registers.len();
        let mut registers =
            Registers { values, lanes: vec![Lanes::Nothing; count], launch: vec![false; count], threads: body.threads as usize };
        for site in &sites.sites {
            let launch = match &site.inst.op {
                Op::ParamLoad { .. } => true,
                op if op.is_pure() => {
                    let from = |operand: &Operand| operand.reg().is_some_and(|reg| registers.launch[reg.0 as usize]);
                    site.inst.ins.iter().any(from)
                        && site.inst.ins.iter().all(|operand| from(operand) || values.constant(*operand).is_some())
                }
                _ => false,
            };
            for out in site.inst.outs.iter().flatten().filter(|out| body.registers[out.0 as usize].kind == RegKind::Once) {
                registers.launch[out.0 as usize] = launch;
            }
        }
        // Each register changes at most a few times, always towards less knowledge.
        loop {
            let mut changed = false;
            for site in &sites.sites {
                let computed = registers.result(&site.inst.op, &site.inst.ins);
                let mut value = computed;
                if let Some(guard) = site.inst.guard {
                    value = value.under(registers.operand(Operand::Reg(guard.pred)));
                }
                for out in site.inst.outs.iter().flatten() {
                    let mutable = body.registers[out.0 as usize].kind == RegKind::Mutable;
                    let written = registers.at_site(site, sites, value, mutable);
                    let exact = registers.exact(*out);
                    let next = exact.unwrap_or_else(|| registers.lanes[out.0 as usize].or(written));
                    changed |= next != registers.lanes[out.0 as usize];
                    registers.lanes[out.0 as usize] = next;
                }
            }
            if !changed {
                return registers;
            }
        }
    }

    /// A value as it is seen after the blocks around the write: threads leave a loop in different turns where its condition differs, and
    /// a mutable register keeps its old value where a condition does not hold.
    fn at_site(&self, site: &Site<'_>, sites: &Sites<'_>, value: Lanes, mutable: bool) -> Lanes {
        sites.chain(site.block).fold(value, |value, (_, place)| match place.kind {
            Kind::Then(cond) | Kind::Otherwise(cond) if mutable => value.under(self.operand(Operand::Reg(cond))),
            // What a loop makes of a differing value may be the same for all in the end.
            Kind::Head(_) | Kind::Body(_) if mutable && value == Lanes::Differs => Lanes::Unknown,
            Kind::Head(cond) | Kind::Body(cond) => value.under(self.operand(Operand::Reg(cond))),
            _ => value,
        })
    }

    /// What the value for every thread says.
    fn exact(&self, reg: Reg) -> Option<Lanes> {
        match self.values.known(Operand::Reg(reg))? {
            // The address of shared memory is the same in every CTA of the launch.
            Known::All(_) => Some(Lanes::Same(Uniformity::Grid)),
            Known::Each(values) => {
                let alike = |threads: usize| values.chunks(threads).all(|group| group.iter().all(|value| *value == group[0]));
                Some(if !alike(32) {
                    Lanes::Differs
                } else if !alike(128) {
                    Lanes::Same(Uniformity::Warp)
                } else if !alike(self.threads.max(1)) {
                    Lanes::Same(Uniformity::Warpgroup)
                } else {
                    Lanes::Same(Uniformity::Grid)
                })
            }
        }
    }

    fn operand(&self, operand: Operand) -> Lanes {
        match operand {
            Operand::Reg(reg) => self.lanes[reg.0 as usize],
            _ => Lanes::Same(Uniformity::Grid),
        }
    }

    fn result(&self, op: &Op, ins: &[Operand]) -> Lanes {
        let known = |level| Lanes::Same(level);
        let all = || ins.iter().fold(Lanes::Nothing, |lanes, operand| self.mixed(lanes, self.operand(*operand)));
        match op {
            Op::SpecialRegister { register } => match register {
                Special::Tid | Special::Lane | Special::LaneMaskLt | Special::LaneMaskLe | Special::LaneMaskEq => Lanes::Differs,
                Special::LaneMaskGt | Special::LaneMaskGe => Lanes::Differs,
                Special::Clock | Special::Clock64 | Special::GlobalTimer => Lanes::Unknown,
                Special::Sm | Special::CtaX | Special::CtaY | Special::CtaZ | Special::ClusterCtaRank => known(Uniformity::Cta),
                Special::ClusterX => known(Uniformity::Cluster),
                _ => known(Uniformity::Grid),
            },
            Op::ParamLoad { .. } | Op::ParamAddress { .. } | Op::SharedAddress { .. } | Op::CreatePolicy { .. } => known(Uniformity::Grid),
            // One lane of each warp, whatever the mask.
            Op::Elect {} => Lanes::Differs,
            Op::Shfl { mode: Shuffle::Index | Shuffle::Uniform } => match (self.operand(ins[0]), self.operand(ins[1])) {
                (Lanes::Nothing, _) => Lanes::Nothing,
                (Lanes::Same(level), _) => Lanes::Same(level),
                (_, Lanes::Same(_)) if self.values.constant(ins[2]).is_some_and(|clamp| clamp & 0x1F1F == 0x1F) => known(Uniformity::Warp),
                _ => Lanes::Unknown,
            },
            Op::VoteAcross { .. } | Op::Ballot {} | Op::ReduxAcross { .. } | Op::MatchAll { .. } => known(Uniformity::Warp),
            Op::CtaCount {} | Op::CtaVote { .. } => known(Uniformity::Cta),
            // These carry a difference on; other operations may level it.
            Op::Mov { .. } | Op::Not { .. } | Op::IAdd { .. } | Op::ISub { .. } | Op::Xor { .. } | Op::INeg { .. } => {
                let differing = ins.iter().filter(|operand| self.operand(**operand) == Lanes::Differs).count();
                let same = ins.iter().filter(|operand| matches!(self.operand(**operand), Lanes::Same(_))).count();
                if differing == 1 && differing + same == ins.len() { Lanes::Differs } else { all() }
            }
            Op::Setp { .. } => {
                let launch = |operand: Operand| operand.reg().is_some_and(|reg| self.launch[reg.0 as usize]);
                match [self.operand(ins[0]), self.operand(ins[1])] {
                    [Lanes::Differs, Lanes::Same(_)] if launch(ins[1]) => Lanes::Differs,
                    [Lanes::Same(_), Lanes::Differs] if launch(ins[0]) => Lanes::Differs,
                    _ => all(),
                }
            }
            // A conjunction with something that may hold differs where it holds.
            Op::And { ty: crate::ir::Ty::Pred } | Op::Or { ty: crate::ir::Ty::Pred } => {
                let sides = [self.operand(ins[0]), self.operand(ins[1])];
                match sides {
                    [Lanes::Differs, Lanes::Same(_)] | [Lanes::Same(_), Lanes::Differs] => Lanes::Differs,
                    _ => all(),
                }
            }
            op if op.is_pure() => {
                if ins.is_empty() {
                    known(Uniformity::Grid)
                } else {
                    all()
                }
            }
            // Loads, atomics, waits: what memory holds is not followed.
            _ => Lanes::Unknown,
        }
    }

    /// A value computed from two: the same where both are.
    fn mixed(&self, one: Lanes, other: Lanes) -> Lanes {
        match (one, other) {
            (Lanes::Nothing, lanes) | (lanes, Lanes::Nothing) => lanes,
            (Lanes::Same(one), Lanes::Same(other)) => Lanes::Same(one.min(other)),
            _ => Lanes::Unknown,
        }
    }
}

pub(super) fn check<'a>(found: &mut Findings<'a>, sites: &Sites<'a>, values: &Values<'a>) {
    let registers = Registers::new(found.body, sites, values);
    for site in &sites.sites {
        convergent(found, site, sites, &registers);
        operands(found, site, &registers);
    }
    statements(found, &found.body.body, None, &registers);
}

/// The words for the group that must come together.
fn group(convergence: Convergence) -> &'static str {
    match convergence {
        Convergence::Thread => "each thread",
        Convergence::Warp => "the whole warp",
        Convergence::Warpgroup => "the whole warpgroup",
        Convergence::Cta => "the whole CTA",
        Convergence::Cluster => "the whole cluster",
    }
}

/// The member mask of an instruction that has one.
fn member_mask(op: &Op) -> Option<usize> {
    match op {
        Op::Shfl { .. } => Some(3),
        Op::VoteAcross { .. } | Op::Ballot {} | Op::MatchAny { .. } | Op::MatchAll { .. } | Op::ReduxAcross { .. } => Some(1),
        Op::Elect {} | Op::WarpSync {} => Some(0),
        _ => None,
    }
}

fn convergent(found: &mut Findings<'_>, site: &Site<'_>, sites: &Sites<'_>, registers: &Registers<'_, '_>) {
    let inst = site.inst;
    let convergence = inst.op.convergence();
    if convergence == Convergence::Thread {
        return;
    }
    if let Some(slot) = member_mask(&inst.op)
        && registers.values.constant(inst.ins[slot]) != Some(0xFFFF_FFFF)
    {
        return;
    }
    let name = inst.op.name();
    if let Some(guard) = inst.guard
        && registers.operand(Operand::Reg(guard.pred)) == Lanes::Differs
    {
        let pred = found.register(guard.pred);
        found.fault(
            "divergent",
            inst.loc,
            None,
            format!(
                "{name} must be reached by {} together, but its guard {pred} differs between lanes: the others never arrive",
                group(convergence)
            ),
        );
        return;
    }
    for (at, place) in sites.chain(site.block) {
        let (cond, then) = match place.kind {
            Kind::Then(cond) => (cond, true),
            Kind::Otherwise(cond) => (cond, false),
            Kind::Body(_) | Kind::Head(_) | Kind::Top => continue,
            Kind::Role(role) => {
                if convergence == Convergence::Warpgroup && (!role.first_warp.is_multiple_of(4) || !role.warps.is_multiple_of(4)) {
                    found.fault(
                        "divergent",
                        inst.loc,
                        Some(place.loc),
                        format!(
                            "{name} must be reached by the whole warpgroup together, but role {} has warps {}..{}, which splits one",
                            role.name,
                            role.first_warp,
                            role.first_warp + role.warps
                        ),
                    );
                    return;
                }
                continue;
            }
        };
        let line = found.at(place.loc);
        if registers.operand(Operand::Reg(cond)) == Lanes::Differs {
            let what = format!(
                "{name} must be reached by {} together, but stands under the condition at {line}, which differs between lanes: the others never arrive",
                group(convergence)
            );
            found.fault("divergent", inst.loc, Some(place.loc), what);
            return;
        }
        // Between warps: known for every thread, and only where the other side does not do the same.
        let wide = match convergence {
            Convergence::Warpgroup => 128,
            Convergence::Cta => found.body.threads as usize,
            _ => continue,
        };
        if other_side_does(sites, at, &inst.op) {
            continue;
        }
        let Some(Known::Each(holds)) = registers.values.known(Operand::Reg(cond)) else { continue };
        let Some(active) = place.parent.and_then(|parent| registers.values.active(sites, parent)) else { continue };
        let split = (0..holds.len()).step_by(wide).any(|first| {
            let group = (first..(first + wide).min(holds.len())).filter(|&thread| active[thread]);
            let taken = group.clone().filter(|&thread| (holds[thread] != 0) == then).count();
            taken != 0 && taken != group.count()
        });
        if split {
            let what = format!(
                "{name} must be reached by {} together, but stands under the condition at {line}, which differs between its warps: the others never arrive",
                group(convergence)
            );
            found.fault("divergent", inst.loc, Some(place.loc), what);
            return;
        }
    }
}

/// Whether the other side of an `if` holds the same operation, so that its threads may arrive there.
fn other_side_does(sites: &Sites<'_>, block: usize, op: &Op) -> bool {
    let place = &sites.blocks[block];
    sites.sites.iter().any(|site| {
        site.inst.op == *op
            && sites.chain(site.block).any(|(at, other)| {
                at != block
                    && other.parent == place.parent
                    && match (place.kind, other.kind) {
                        (Kind::Then(one), Kind::Otherwise(two)) | (Kind::Otherwise(one), Kind::Then(two)) => one == two,
                        _ => false,
                    }
            })
    })
}

fn operands(found: &mut Findings<'_>, site: &Site<'_>, registers: &Registers<'_, '_>) {
    let inst = site.inst;
    let slots: Vec<(usize, &str)> = match &inst.op {
        Op::Wgmma { shape } => {
            let mut slots = vec![(shape.b_operand(), "descriptor of B")];
            if !shape.a_in_registers {
                slots.push((0, "descriptor of A"));
            }
            slots.push((shape.scale_d_operand(), "scale-d predicate"));
            slots
        }
        Op::BarSync {} | Op::BarArrive {} => vec![(0, "barrier number"), (1, "thread count")],
        _ => return,
    };
    for (slot, what) in slots {
        if registers.operand(inst.ins[slot]) == Lanes::Differs {
            let name = inst.ins[slot].reg().map_or_else(String::new, |reg| found.register(reg));
            found.fault(
                "uniform",
                inst.loc,
                None,
                format!("the {what} of {}, {name}, differs between the lanes of a warp, but the instruction takes one for all: take lane 0's with `uniform`", inst.op.name()),
            );
        }
    }
}

fn statements(found: &mut Findings<'_>, block: &Block, around: Option<Loc>, registers: &Registers<'_, '_>) {
    let differs = |reg: Reg| registers.lanes[reg.0 as usize] == Lanes::Differs;
    for stmt in &block.stmts {
        match stmt {
            Stmt::If { cond, then, otherwise, loc } => {
                let inside = around.or(differs(*cond).then_some(*loc));
                statements(found, then, inside, registers);
                statements(found, otherwise, inside, registers);
            }
            Stmt::Loop { head, body, .. } => {
                statements(found, head, around, registers);
                statements(found, body, around, registers);
            }
            Stmt::Roles { warp, roles, loc } => {
                if let Some(condition) = around {
                    let line = found.at(condition);
                    found.fault(
                        "divergent",
                        *loc,
                        Some(condition),
                        format!("roles are for whole warps, but stand under the condition at {line}, which differs between lanes"),
                    );
                }
                if registers.operand(*warp) == Lanes::Differs {
                    found.fault(
                        "uniform",
                        *loc,
                        None,
                        "the warp index that selects the roles differs between the lanes of a warp: the warp would run several roles",
                    );
                }
                roles.iter().for_each(|role| statements(found, &role.body, around, registers));
            }
            Stmt::StopWhen { cond, loc } => {
                let known = registers.values.known(Operand::Reg(*cond));
                if differs(*cond) || matches!(known, Some(Known::Each(_))) {
                    found.fault(
                        "uniform",
                        *loc,
                        None,
                        "the condition of stop_when differs between threads of the CTA: those that go on would wait for those that stopped",
                    );
                }
            }
            Stmt::Inst(_) | Stmt::Comment(_) => {}
        }
    }
}
