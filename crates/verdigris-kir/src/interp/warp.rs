//! One warp, one step: control flow, pure instructions, and where each other instruction is carried out.

use super::alu::{self, Lanes};
use super::decode::{Decoded, Flat, Instruction, Source};
use super::finding::FindingKind;
use super::state::{Culprit, Fault, Frame, Machine, Unit, Wait, Warp};
use crate::inst::{Convergence, Op, Scope, Shuffle, Special};
use crate::ir::Ty;

/// Marks an origin of poison that is a register which nothing wrote; others are one more than the line of a load.
const FROM_REGISTER: u32 = 1 << 31;

/// What stands where an instruction has no operand.
static NO_LANES: Lanes = [0; 32];

/// What a step leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    Next,
    /// The instruction is tried again when something happens.
    Block,
    Exit,
}

impl Warp {
    #[inline]
    pub(crate) fn lanes(&self, source: Source) -> &Lanes {
        match source {
            Source::Reg(reg) => &self.registers[reg as usize],
            Source::Constant(index) => &self.decoded.constants[index as usize],
        }
    }

    pub(crate) fn poison_of(&self, source: Source) -> u32 {
        match source {
            Source::Reg(reg) => self.poison[reg as usize],
            Source::Constant(_) => 0,
        }
    }

    /// Where what poisons a register came from: the register itself if nothing wrote it.
    fn origin_of(&self, source: Source) -> u32 {
        match source {
            Source::Reg(reg) if self.origin[reg as usize] != 0 => self.origin[reg as usize],
            Source::Reg(reg) => FROM_REGISTER | reg,
            Source::Constant(_) => 0,
        }
    }

    /// Writes the lanes of `mask`.
    pub(crate) fn set(&mut self, reg: u32, mask: u32, value: &Lanes, poison: u32, origin: u32) {
        let reg = reg as usize;
        if mask == u32::MAX {
            self.registers[reg] = *value;
        } else {
            let old = &mut self.registers[reg];
            for lane in 0..32 {
                if mask >> lane & 1 == 1 {
                    old[lane] = value[lane];
                }
            }
        }
        self.poison[reg] = (self.poison[reg] & !mask) | (poison & mask);
        if poison & mask != 0 {
            self.origin[reg] = origin;
        }
        self.wrapped[reg] &= !mask;
        self.touched[reg] = self.wgmma_fences + 1;
    }
}

/// The lanes of a mask, lowest first.
pub(crate) fn each(mask: u32) -> impl Iterator<Item = usize> {
    let mut left = mask;
    std::iter::from_fn(move || {
        (left != 0).then(|| {
            let lane = left.trailing_zeros() as usize;
            left &= left - 1;
            lane
        })
    })
}

pub(crate) fn holds(lanes: &Lanes) -> u32 {
    let mut mask = 0;
    for (lane, value) in lanes.iter().enumerate() {
        mask |= (*value as u32 & 1) << lane;
    }
    mask
}

pub(crate) fn culprit(warp: &Warp, loc: u32, lane: Option<u32>) -> Culprit {
    Culprit { cta: warp.cta, warp: Some(warp.index), lane, loc }
}

impl Machine<'_> {
    pub(crate) fn step(&mut self, warp: &mut Warp, decoded: &Decoded) -> Result<Flow, Fault> {
        warp.steps += 1;
        if warp.steps > self.options.step_budget {
            let loc = self.current_loc(warp.cta, warp.pc);
            let message = format!(
                "the warp took {} steps and has not ended: a loop that does not end, or a wait for something that never comes",
                self.options.step_budget
            );
            return Err(self.finding(FindingKind::Timeout, culprit(warp, loc, None), None, message));
        }
        match &decoded.steps[warp.pc as usize] {
            Flat::Inst(inst) => {
                let mut exec = warp.active;
                if let Some((pred, negate)) = inst.guard {
                    let bad = warp.poison[pred as usize] & exec;
                    if bad != 0 {
                        return Err(self.unwritten(
                            warp,
                            Source::Reg(pred),
                            inst.loc,
                            bad,
                            "decides whether this instruction takes effect",
                        ));
                    }
                    let on = holds(&warp.registers[pred as usize]);
                    exec &= if negate { !on } else { on };
                }
                if exec == 0 {
                    warp.pc += 1;
                    return Ok(Flow::Next);
                }
                if warp.flights > 0 && !matches!(inst.op, Op::Wgmma { .. }) {
                    self.check_flight(warp, inst)?;
                }
                let flow = if inst.pure { self.pure(warp, inst, exec)? } else { self.effect(warp, inst, exec)? };
                if flow == Flow::Next {
                    warp.pc += 1;
                    self.counters(warp.cta).instructions[inst.class] += 1;
                }
                Ok(flow)
            }
            Flat::If { cond, otherwise, end, loc } => {
                let holds = self.condition(warp, *cond, *loc)?;
                let (yes, no) = (warp.active & holds, warp.active & !holds);
                let first_side = warp.pc + 1;
                let full = warp.active;
                let (pc, active, pending) = match (yes, no) {
                    (_, 0) => (first_side, yes, None),
                    (0, _) => (*otherwise, no, None),
                    _ if self.rng.below(2) == 0 => (first_side, yes, Some((*otherwise, no))),
                    _ => (*otherwise, no, Some((first_side, yes))),
                };
                warp.frames.push(Frame { full, end: *end, pending });
                warp.pc = pc;
                warp.active = active;
                Ok(Flow::Next)
            }
            Flat::Join => {
                let frame = warp.frames.last_mut().expect("a join closes what a parting opened");
                match frame.pending.take() {
                    Some((pc, mask)) => {
                        warp.pc = pc;
                        warp.active = mask;
                    }
                    None => {
                        warp.pc = frame.end;
                        warp.active = frame.full;
                        warp.frames.pop();
                    }
                }
                Ok(Flow::Next)
            }
            Flat::Loop { exit } => {
                warp.frames.push(Frame { full: warp.active, end: *exit, pending: None });
                warp.pc += 1;
                Ok(Flow::Next)
            }
            Flat::LoopTest { cond, loc } => {
                let holds = self.condition(warp, *cond, *loc)?;
                warp.active &= holds;
                if warp.active == 0 {
                    let frame = warp.frames.pop().expect("a loop test stands in a loop");
                    warp.active = frame.full;
                    warp.pc = frame.end;
                } else {
                    warp.pc += 1;
                }
                Ok(Flow::Next)
            }
            Flat::LoopBack { head } => {
                warp.pc = *head;
                Ok(Flow::Next)
            }
            Flat::Roles { warp: index, roles, end, loc } => {
                let index = self.uniform(warp, *index, warp.active, *loc, "the warp index that divides the roles")? as u32;
                let role = roles.iter().find(|role| index >= role.first_warp && index < role.first_warp + role.warps);
                warp.pc = match role {
                    Some(role) => {
                        warp.frames.push(Frame { full: warp.active, end: *end, pending: None });
                        role.start
                    }
                    None => *end,
                };
                Ok(Flow::Next)
            }
            Flat::StopWhen { cond, loc } => {
                let holds = self.condition(warp, *cond, *loc)?;
                let stop = holds & warp.full;
                if stop != 0 && stop != warp.full {
                    let lane = Some((warp.full & !stop).trailing_zeros());
                    let message = "some lanes stop here and others do not: the condition must be the same in the whole cluster";
                    return Err(self.finding(FindingKind::Divergence, culprit(warp, *loc, lane), None, message));
                }
                let key = (self.ctas[warp.cta].peers[0], warp.pc);
                let decided = *self.stops.entry(key).or_insert(stop != 0);
                if decided != (stop != 0) {
                    let message = "this warp and another of its cluster disagree on whether to stop here: the condition must be the same in the whole cluster, or some wait for others that have left";
                    return Err(self.finding(FindingKind::Divergence, culprit(warp, *loc, None), None, message));
                }
                warp.pc += 1;
                Ok(if stop != 0 { Flow::Exit } else { Flow::Next })
            }
            Flat::Exit => Ok(Flow::Exit),
        }
    }

    fn condition(&mut self, warp: &Warp, cond: u32, loc: u32) -> Result<u32, Fault> {
        if warp.flights > 0 && warp.flight[cond as usize].0 != 0 {
            return Err(self.in_flight(warp, cond, loc, "read"));
        }
        let bad = warp.poison[cond as usize] & warp.active;
        if bad != 0 {
            return Err(self.unwritten(warp, Source::Reg(cond), loc, bad, "decides where lanes go"));
        }
        Ok(holds(&warp.registers[cond as usize]))
    }

    /// A value that nothing wrote reaches a place where it matters.
    pub(crate) fn unwritten(&self, warp: &Warp, source: Source, loc: u32, lanes: u32, matters: &str) -> Fault {
        let lane = Some(lanes.trailing_zeros());
        let origin = warp.origin_of(source);
        let name = |reg: u32| {
            let info = &self.decoded(warp.cta).body.registers[reg as usize];
            info.name.map_or(format!("r{reg}"), |name| format!("{name} (r{reg})"))
        };
        let Source::Reg(used) = source else {
            return self.finding(FindingKind::UnwrittenRegister, culprit(warp, loc, lane), None, "a constant that nothing wrote");
        };
        if origin & FROM_REGISTER == 0 {
            let name = name(used);
            let line = self.line(warp.cta, origin - 1);
            let message = format!(
                "{name} comes from memory that nothing wrote, loaded at {line}, and {matters}: the outcome is whatever stood there"
            );
            return self.finding(FindingKind::UnwrittenMemory, culprit(warp, loc, lane), Some(line), message);
        }
        let empty = origin & !FROM_REGISTER;
        let second = self.line(warp.cta, self.decoded(warp.cta).body.registers[empty as usize].loc.0);
        let what = if empty == used { String::new() } else { format!("{} comes from it and ", name(used)) };
        let message = format!("{} holds nothing in this lane, and {what}{matters}: the outcome is whatever the register held", name(empty));
        self.finding(FindingKind::UnwrittenRegister, culprit(warp, loc, lane), Some(second), message)
    }

    /// An operand that must be written in all lanes that use it.
    pub(crate) fn need<'w>(&self, warp: &'w Warp, source: Source, exec: u32, loc: u32, matters: &str) -> Result<&'w Lanes, Fault> {
        let bad = warp.poison_of(source) & exec;
        if bad != 0 {
            return Err(self.unwritten(warp, source, loc, bad, matters));
        }
        Ok(warp.lanes(source))
    }

    /// An operand that must be the same in all lanes that use it.
    pub(crate) fn uniform(&self, warp: &Warp, source: Source, exec: u32, loc: u32, what: &str) -> Result<u64, Fault> {
        let value = self.need(warp, source, exec, loc, "must be the same in the whole warp")?;
        let first = exec.trailing_zeros() as usize;
        match each(exec).find(|&lane| value[lane] != value[first]) {
            None => Ok(value[first]),
            Some(lane) => {
                let message = format!(
                    "{what} is {:#x} in lane {first} and {:#x} in lane {lane}: it must be the same in the whole warp",
                    value[first], value[lane]
                );
                Err(self.finding(FindingKind::Uniform, culprit(warp, loc, Some(lane as u32)), None, message))
            }
        }
    }

    fn in_flight(&self, warp: &Warp, reg: u32, loc: u32, verb: &str) -> Fault {
        let (kind, line) = warp.flight[reg as usize];
        let line = self.line(warp.cta, line);
        let what = if kind & 1 != 0 { "accumulator" } else { "A register" };
        let message = format!(
            "{what} r{reg} is {verb} here while the wgmma issued at {line} is still in flight: wait for its group first, or the result is undefined"
        );
        self.finding(FindingKind::AccumulatorInFlight, culprit(warp, loc, None), Some(line), message)
    }

    fn check_flight(&self, warp: &Warp, inst: &Instruction) -> Result<(), Fault> {
        for source in &inst.ins {
            if let Source::Reg(reg) = *source
                && warp.flight[reg as usize].0 & 1 != 0
            {
                return Err(self.in_flight(warp, reg, inst.loc, "read"));
            }
        }
        for reg in inst.outs.iter().flatten() {
            if warp.flight[*reg as usize].0 != 0 {
                return Err(self.in_flight(warp, *reg, inst.loc, "written"));
            }
        }
        Ok(())
    }

    /// All lanes of the warp (or of the instruction's member mask) must be here.
    pub(crate) fn converged(&self, warp: &Warp, inst: &Instruction, exec: u32) -> Result<(), Fault> {
        if exec == warp.full {
            return Ok(());
        }
        let missing = warp.full & !exec;
        let message = format!(
            "{} must be reached by the whole warp together; lanes {missing:#010x} are elsewhere: the warp hangs or the result is undefined",
            inst.op.name()
        );
        Err(self.finding(FindingKind::Divergence, culprit(warp, inst.loc, Some(missing.trailing_zeros())), None, message))
    }

    /// The member mask of a warp instruction: its lanes must all be here, and the lanes here must be in it.
    fn members(&self, warp: &Warp, inst: &Instruction, exec: u32, source: Source) -> Result<u32, Fault> {
        let members = self.uniform(warp, source, exec, inst.loc, "the member mask")? as u32;
        let missing = members & warp.full & !exec;
        let uninvited = exec & !members;
        if missing | uninvited == 0 {
            return Ok(members & warp.full);
        }
        let lane = if missing != 0 { missing } else { uninvited }.trailing_zeros();
        let message = if missing != 0 {
            format!("{} names lanes {missing:#010x} as members, and they are not here: the warp hangs or reads garbage", inst.op.name())
        } else {
            format!("{} is reached by lanes {uninvited:#010x}, which are not in its member mask {members:#010x}", inst.op.name())
        };
        Err(self.finding(FindingKind::Divergence, culprit(warp, inst.loc, Some(lane)), None, message))
    }

    fn pure(&mut self, warp: &mut Warp, inst: &Instruction, exec: u32) -> Result<Flow, Fault> {
        match &inst.op {
            Op::SpecialRegister { register } => {
                let mut value = [0u64; 32];
                for (lane, slot) in value.iter_mut().enumerate() {
                    *slot = self.special(warp, *register, lane as u32);
                }
                return Ok(self.put(warp, inst, exec, &value));
            }
            Op::ParamLoad { index, offset_bytes, ty } => {
                let grid = &self.grids[self.ctas[warp.cta].grid];
                let at = (grid.offsets[*index as usize] + offset_bytes) as usize;
                let bytes = ty.bytes() as usize;
                let mut bits = [0; 8];
                bits[..bytes].copy_from_slice(&grid.params[at..at + bytes]);
                let mut word = u64::from_le_bytes(bits);
                if matches!(ty, Ty::Pred) {
                    word &= 1;
                }
                return Ok(self.put(warp, inst, exec, &[word; 32]));
            }
            Op::ParamAddress { index } => return Ok(self.put(warp, inst, exec, &[self.param_address(warp.cta, *index); 32])),
            Op::SharedAddress { index } => {
                let offset = self.decoded(warp.cta).body.shared[*index as usize].offset_bytes;
                return Ok(self.put(warp, inst, exec, &[u64::from(super::memory::SHARED_BASE + offset); 32]));
            }
            Op::MapShared {} => {
                let address = self.need(warp, inst.ins[0], exec, inst.loc, "is mapped to another CTA")?;
                let rank = self.need(warp, inst.ins[1], exec, inst.loc, "is the rank of another CTA")?;
                let ctas = self.ctas[warp.cta].peers.len() as u64;
                let mut value = [0u64; 32];
                for lane in each(exec) {
                    if rank[lane] >= ctas {
                        let message = format!("mapa to rank {} in a cluster of {ctas} CTAs: the address is undefined", rank[lane]);
                        return Err(self.finding(FindingKind::IllegalOperand, culprit(warp, inst.loc, Some(lane as u32)), None, message));
                    }
                    value[lane] = address[lane] & 0x00FF_FFFF | (rank[lane] + 1) << 24;
                }
                return Ok(self.put(warp, inst, exec, &value));
            }
            _ => {}
        }
        let mut poison = 0;
        let mut origin = 0;
        let mut wrapped = 0;
        // At most five operands.
        let mut ins: [&Lanes; 5] = [&NO_LANES; 5];
        for (slot, source) in ins.iter_mut().zip(&inst.ins) {
            *slot = warp.lanes(*source);
            if let Source::Reg(reg) = source {
                let reg = *reg as usize;
                if warp.poison[reg] != 0 {
                    poison |= warp.poison[reg];
                    origin = warp.origin_of(*source);
                }
                wrapped |= warp.wrapped[reg];
            }
        }
        if poison & exec != 0 && matches!(inst.op, Op::Selp { .. }) {
            let [a, b, p] = [0, 1, 2].map(|at| warp.poison_of(inst.ins[at]));
            let on = holds(ins[2]);
            poison = p | (a & on) | (b & !on);
        }
        let count = inst.outs.len().min(2);
        let wraps = match alu::eval(&inst.op, &ins[..inst.ins.len().min(5)], exec, &mut self.results[..count], self.noise) {
            Ok(wraps) => wraps,
            Err(error) => {
                return Err(self.finding(FindingKind::IllegalOperand, culprit(warp, inst.loc, None), None, error.to_string()));
            }
        };
        // A product that lost its high half is the one wrap that makes a wrong address within bounds; sums wrap there and back.
        let tainted = match inst.op {
            Op::IMulLo { .. } | Op::IMadLo { .. } => wraps,
            Op::Mov { .. } | Op::Cvt { .. } | Op::IMulWide { .. } | Op::IMadWide { .. } | Op::IAdd { ty: Ty::U64 | Ty::S64 } => wrapped,
            _ => 0,
        };
        for (reg, out) in inst.outs.iter().zip(&self.results[..count]) {
            if let Some(reg) = reg {
                warp.set(*reg, exec, out, poison, origin);
                warp.wrapped[*reg as usize] |= tainted & exec;
            }
        }
        Ok(Flow::Next)
    }

    /// Writes the only result of an instruction.
    pub(crate) fn put(&self, warp: &mut Warp, inst: &Instruction, exec: u32, value: &Lanes) -> Flow {
        if let Some(Some(reg)) = inst.outs.first() {
            warp.set(*reg, exec, value, 0, 0);
        }
        Flow::Next
    }

    fn special(&self, warp: &Warp, register: Special, lane: u32) -> u64 {
        let cta = &self.ctas[warp.cta];
        let grid = &self.grids[cta.grid];
        let body = &grid.decoded.body;
        u64::from(match register {
            Special::Tid => warp.index * 32 + lane,
            Special::Ntid => body.threads,
            Special::CtaX => cta.index[0],
            Special::CtaY => cta.index[1],
            Special::CtaZ => cta.index[2],
            Special::GridX => grid.dims[0],
            Special::GridY => grid.dims[1],
            Special::GridZ => grid.dims[2],
            Special::Lane => lane,
            Special::ClusterX => cta.index[0] / body.cluster,
            Special::ClustersX => grid.dims[0] / body.cluster,
            Special::ClusterCtaRank => cta.rank,
            Special::ClusterCtas => body.cluster,
            Special::LaneMaskLt => (1u32 << lane) - 1,
            Special::LaneMaskLe => u32::MAX >> (31 - lane),
            Special::LaneMaskEq => 1 << lane,
            Special::LaneMaskGt => !(u32::MAX >> (31 - lane)),
            Special::LaneMaskGe => !((1u32 << lane) - 1),
            Special::Sm => cta.sm,
            Special::Sms => self.options.sms,
            Special::Clock => self.ticks as u32,
            Special::Clock64 | Special::GlobalTimer => return self.ticks,
            Special::DynamicSharedBytes => body.shared_bytes,
        })
    }

    /// Instructions that do more than compute.
    fn effect(&mut self, warp: &mut Warp, inst: &Instruction, exec: u32) -> Result<Flow, Fault> {
        match inst.op.convergence() {
            Convergence::Warpgroup | Convergence::Cta | Convergence::Cluster => self.converged(warp, inst, exec)?,
            Convergence::Thread | Convergence::Warp => {}
        }
        match &inst.op {
            Op::Ld { space, ty, count, order, cache } => self.load(warp, inst, exec, *space, ty.bytes(), *count, *order, *cache, None),
            Op::LdByte { space, signed, cache } => {
                self.load(warp, inst, exec, *space, 1, 1, crate::inst::Order::Weak, *cache, Some(*signed))
            }
            Op::St { space, ty, count, order, .. } => self.store(warp, inst, exec, *space, ty.bytes(), *count, *order),
            Op::StByte { space, .. } => self.store(warp, inst, exec, *space, 1, 1, crate::inst::Order::Weak),
            Op::Atom { space, op, ty, order } => self.atomic(warp, inst, exec, *space, *op, *ty, 1, *order, true),
            Op::Red { space, op, ty, count, order } => self.atomic(warp, inst, exec, *space, *op, *ty, *count, *order, false),
            Op::Prefetch { .. } | Op::BulkPrefetch {} | Op::TmaPrefetch { .. } | Op::TensormapPrefetch {} => Ok(Flow::Next),
            Op::DiscardL2 {} => self.discard(warp, inst, exec),
            Op::CpAsync { bytes, .. } => self.cp_async(warp, inst, exec, *bytes),
            Op::CpAsyncCommit {} => Ok(self.cp_async_commit(warp, exec)),
            Op::CpAsyncWait { pending } => self.cp_async_wait(warp, exec, *pending),
            Op::CpAsyncArrive { no_increment } => self.cp_async_arrive(warp, inst, exec, *no_increment),
            Op::BulkLoad { multicast, .. } => self.bulk_load(warp, inst, exec, *multicast),
            Op::BulkStore { .. } => self.bulk_store(warp, inst, exec, None),
            Op::BulkReduceStore { op, ty } => self.bulk_store(warp, inst, exec, Some((*op, *ty))),
            Op::BulkCopyToPeer {} => self.bulk_to_peer(warp, inst, exec),
            Op::BulkCommit {} => Ok(self.bulk_commit(warp, exec)),
            Op::BulkWait { pending, read } => self.bulk_wait(warp, exec, *pending, *read),
            Op::TmaLoad { rank, im2col, multicast, .. } => self.tma_load(warp, inst, exec, *rank, *im2col, *multicast),
            Op::TmaStore { rank, im2col, .. } => self.tma_store(warp, inst, exec, *rank, *im2col, None),
            Op::TmaReduce { rank, op, im2col } => self.tma_store(warp, inst, exec, *rank, *im2col, Some(*op)),
            Op::TensormapReplace { field, space } => self.tensormap_replace(warp, inst, exec, *field, *space),
            Op::TensormapPublish { .. } => self.tensormap_publish(warp, inst, exec),
            Op::StAsync { ty, count } => self.st_async(warp, inst, exec, ty.bytes() * u32::from(*count), *ty, None),
            Op::RedAsync { op, ty } => self.st_async(warp, inst, exec, ty.bytes(), *ty, Some(*op)),
            Op::Ldmatrix { count, transpose } => self.ldmatrix(warp, inst, exec, *count, *transpose),
            Op::Stmatrix { count, transpose } => self.stmatrix(warp, inst, exec, *count, *transpose),
            Op::Movmatrix {} => {
                self.converged(warp, inst, exec)?;
                let value = self.need(warp, inst.ins[0], exec, inst.loc, "is moved across the warp")?;
                Ok(self.put(warp, inst, exec, &super::matrix::movmatrix(value)))
            }
            Op::Mma { shape } => self.mma(warp, inst, exec, shape),
            Op::Wgmma { shape } => self.wgmma(warp, inst, shape),
            Op::WgmmaFence {} => {
                warp.wgmma_fences += 1;
                Ok(Flow::Next)
            }
            Op::WgmmaCommit {} => Ok(self.wgmma_commit(warp)),
            Op::WgmmaWait { pending } => self.wgmma_wait(warp, *pending),
            Op::BarSync {} => {
                self.converged(warp, inst, exec)?;
                let (id, threads) = self.barrier_operands(warp, inst)?;
                self.barrier_sync(warp, inst.loc, id, threads, None).map(|done| if done.is_some() { Flow::Next } else { Flow::Block })
            }
            Op::BarArrive {} => {
                self.converged(warp, inst, exec)?;
                let (id, threads) = self.barrier_operands(warp, inst)?;
                self.barrier_arrive(warp, inst.loc, id, threads, None)?;
                Ok(Flow::Next)
            }
            Op::CtaSync {} => Ok(match self.barrier_sync(warp, inst.loc, 0, 0, None)? {
                Some(_) => Flow::Next,
                None => Flow::Block,
            }),
            Op::CtaCount {} | Op::CtaVote { .. } => {
                let votes = holds(self.need(warp, inst.ins[0], exec, inst.loc, "is counted over the CTA")?) & warp.full;
                let Some((count, threads)) = self.barrier_sync(warp, inst.loc, 0, 0, Some(votes.count_ones()))? else {
                    return Ok(Flow::Block);
                };
                let value = match inst.op {
                    Op::CtaVote { all: true } => u32::from(count == threads),
                    Op::CtaVote { all: false } => u32::from(count > 0),
                    _ => count,
                };
                Ok(self.put(warp, inst, exec, &[u64::from(value); 32]))
            }
            Op::WarpSync {} => {
                let members = self.members(warp, inst, exec, inst.ins[0])?;
                let cp = self.ctas[warp.cta].actor + self.ctas[warp.cta].actors.unit(Unit::CpAsync, warp.index);
                if members == warp.full {
                    warp.synchronize(cp);
                } else {
                    let view = warp.release(members, cp);
                    warp.acquire(members, &view);
                }
                Ok(Flow::Next)
            }
            Op::ClusterArrive { relaxed } => self.cluster_arrive(warp, inst.loc, *relaxed),
            Op::ClusterWait {} => self.cluster_wait(warp, inst.loc),
            Op::MbarrierInit {} => self.mbarrier_init(warp, inst, exec),
            Op::MbarrierInvalidate {} => self.mbarrier_invalidate(warp, inst, exec),
            Op::MbarrierArriveToken {} => self.mbarrier_arrive_token(warp, inst, exec),
            Op::MbarrierArrive { .. } => self.mbarrier_arrive(warp, inst, exec, super::mbarrier::Arrival::Count),
            Op::MbarrierArriveExpect { .. } => self.mbarrier_arrive(warp, inst, exec, super::mbarrier::Arrival::Expect),
            Op::MbarrierArriveDrop {} => self.mbarrier_arrive(warp, inst, exec, super::mbarrier::Arrival::Drop),
            Op::MbarrierExpect { .. } => self.mbarrier_bytes(warp, inst, exec, 1),
            Op::MbarrierComplete { .. } => self.mbarrier_bytes(warp, inst, exec, -1),
            Op::MbarrierWait { scope } => self.mbarrier_wait(warp, inst, exec, *scope),
            Op::MbarrierTest { scope, .. } => self.mbarrier_test(warp, inst, exec, *scope, false),
            Op::MbarrierTestToken { .. } => self.mbarrier_test(warp, inst, exec, Scope::Cta, true),
            Op::MbarrierPending {} => {
                let token = self.need(warp, inst.ins[0], exec, inst.loc, "is a phase token")?;
                Ok(self.put(warp, inst, exec, &token.map(|token| token & 0xF_FFFF)))
            }
            Op::MemoryFence { fence } => self.fence(warp, inst, exec, *fence),
            Op::Shfl { mode } => {
                let members = self.members(warp, inst, exec, inst.ins[3])?;
                if *mode == Shuffle::Uniform {
                    self.uniform(warp, inst.ins[0], exec, inst.loc, "a value that is called uniform")?;
                }
                let value = warp.lanes(inst.ins[0]);
                let amount = self.need(warp, inst.ins[1], exec, inst.loc, "chooses the lane of a shuffle")?;
                let clamp = self.need(warp, inst.ins[2], exec, inst.loc, "bounds a shuffle")?;
                let poison = warp.poison_of(inst.ins[0]) | !members;
                let origin = if warp.poison_of(inst.ins[0]) == 0 { 0 } else { warp.origin_of(inst.ins[0]) };
                let mut out = [0; 32];
                let mut bad = 0;
                for lane in each(exec) {
                    let (from, _) = alu::warp::shuffle_source(*mode, lane as u32, amount[lane] as u32, clamp[lane] as u32);
                    out[lane] = value[from as usize];
                    bad |= (poison >> from & 1) << lane;
                }
                if let Some(Some(reg)) = inst.outs.first() {
                    warp.set(*reg, exec, &out, bad, origin);
                }
                Ok(Flow::Next)
            }
            Op::VoteAcross { .. } | Op::Ballot {} | Op::MatchAny { .. } | Op::MatchAll { .. } | Op::ReduxAcross { .. } => {
                let members = self.members(warp, inst, exec, inst.ins[1])?;
                let value = self.need(warp, inst.ins[0], exec, inst.loc, "is combined over the warp")?;
                let out = match &inst.op {
                    Op::VoteAcross { mode } => [u64::from(alu::warp::vote(*mode, value, members)); 32],
                    Op::Ballot {} => [u64::from(alu::warp::ballot(value, members)); 32],
                    Op::MatchAny { ty } => alu::warp::match_any(value, *ty, members),
                    Op::MatchAll { ty } => [u64::from(alu::warp::match_all(value, *ty, members)); 32],
                    Op::ReduxAcross { op, ty } => [u64::from(alu::warp::redux(*op, *ty, value, members).unwrap_or(0)); 32],
                    _ => [0; 32],
                };
                Ok(self.put(warp, inst, exec, &out))
            }
            Op::Elect {} => {
                let members = self.members(warp, inst, exec, inst.ins[0])?;
                // The chip takes the same lane each time; which one is not said.
                let leader = members.trailing_zeros() as usize;
                Ok(self.put(warp, inst, exec, &std::array::from_fn(|lane| u64::from(lane == leader))))
            }
            Op::ActiveMask {} => Ok(self.put(warp, inst, exec, &[u64::from(exec); 32])),
            Op::Setmaxnreg { increase, registers } => self.setmaxnreg(warp, inst, *increase, *registers),
            Op::GridDependencyWait {} => Ok(self.grid_wait(warp)),
            Op::GridDependencyLaunch {} => {
                let cta = &mut self.ctas[warp.cta];
                let grid = cta.grid;
                if !std::mem::replace(&mut cta.triggered, true) {
                    self.grids[grid].trigger(warp.clock.horizon);
                }
                Ok(Flow::Next)
            }
            Op::Nanosleep {} => {
                warp.polling = true;
                Ok(Flow::Next)
            }
            Op::Trap {} => Err(self.finding(
                FindingKind::Trap,
                culprit(warp, inst.loc, Some(exec.trailing_zeros())),
                None,
                "the kernel stops itself here",
            )),
            Op::Mov { .. }
            | Op::SpecialRegister { .. }
            | Op::ParamLoad { .. }
            | Op::ParamAddress { .. }
            | Op::SharedAddress { .. }
            | Op::Pack { .. }
            | Op::Unpack { .. }
            | Op::IAdd { .. }
            | Op::ISub { .. }
            | Op::IMulLo { .. }
            | Op::IMulHi { .. }
            | Op::IMulWide { .. }
            | Op::IMadLo { .. }
            | Op::IMadWide { .. }
            | Op::IMin { .. }
            | Op::IMax { .. }
            | Op::INeg { .. }
            | Op::IAbs { .. }
            | Op::And { .. }
            | Op::Or { .. }
            | Op::Xor { .. }
            | Op::Not { .. }
            | Op::Shl { .. }
            | Op::Shr { .. }
            | Op::Popc { .. }
            | Op::Clz { .. }
            | Op::Brev { .. }
            | Op::Bfind { .. }
            | Op::Bfe { .. }
            | Op::Bfi { .. }
            | Op::Prmt {}
            | Op::Funnel { .. }
            | Op::Lop3 { .. }
            | Op::Dp4a { .. }
            | Op::Dp2a { .. }
            | Op::FAdd { .. }
            | Op::FSub { .. }
            | Op::FMul { .. }
            | Op::Fma { .. }
            | Op::FMin { .. }
            | Op::FMax { .. }
            | Op::FNeg { .. }
            | Op::FAbs { .. }
            | Op::Copysign { .. }
            | Op::FDiv { .. }
            | Op::Rcp { .. }
            | Op::Sqrt { .. }
            | Op::Rsqrt { .. }
            | Op::Ex2 { .. }
            | Op::Lg2 { .. }
            | Op::Sin { .. }
            | Op::Cos { .. }
            | Op::Tanh { .. }
            | Op::Setp { .. }
            | Op::Selp { .. }
            | Op::Cvt { .. }
            | Op::CvtByte { .. }
            | Op::CvtToByte { .. }
            | Op::CvtPack { .. }
            | Op::CvtHalfToFp8 { .. }
            | Op::CvtFp8ToHalf { .. }
            | Op::CvtTf32 { .. }
            | Op::CreatePolicy { .. }
            | Op::MapShared {} => self.pure(warp, inst, exec),
        }
    }

    fn setmaxnreg(&mut self, warp: &mut Warp, inst: &Instruction, increase: bool, registers: u32) -> Result<Flow, Fault> {
        let have = warp.register_count;
        let wrong = if increase { registers < have } else { registers > have };
        if wrong || !(24..=256).contains(&registers) || !registers.is_multiple_of(8) {
            let message = format!(
                "setmaxnreg to {registers} where each thread has {have}: {} takes a multiple of 8 from 24 to 256 that is not {} what a thread has",
                if increase { "inc" } else { "dec" },
                if increase { "below" } else { "above" },
            );
            return Err(self.finding(FindingKind::RegisterBudget, culprit(warp, inst.loc, None), None, message));
        }
        let cta = &mut self.ctas[warp.cta];
        if increase {
            let more = (registers - have) * 32;
            if cta.register_pool < more {
                warp.wait = Wait::Registers { wanted: registers };
                return Ok(Flow::Block);
            }
            cta.register_pool -= more;
        } else {
            cta.register_pool += (have - registers) * 32;
        }
        warp.register_count = registers;
        warp.wait = Wait::Nothing;
        self.wake(warp.cta);
        Ok(Flow::Next)
    }

    fn grid_wait(&mut self, warp: &mut Warp) -> Flow {
        let index = self.ctas[warp.cta].grid;
        if self.grids[..index].iter().any(|grid| grid.finished < grid.ctas as usize) {
            warp.wait = Wait::Grid;
            return Flow::Block;
        }
        warp.wait = Wait::Nothing;
        warp.clock.horizon = warp.clock.horizon.max(self.grids[index].first_actor);
        Flow::Next
    }
}
