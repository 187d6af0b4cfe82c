//! Async units: copies and reductions that run beside the warps and are done in pieces at any time between issue and completion.

use super::AsyncPolicy;
use super::alu;
use super::clock::Clock;
use super::decode::Instruction;
use super::finding::FindingKind;
use super::machine::MAP_MAGIC;
use super::memory::{PAGE, PARAM_BASE};
use super::shadow::{Access, UNIT, flag};
use super::state::{Culprit, Fault, Machine, Unit, Wait, Warp};
use super::tensor;
use super::threads::Place;
use super::warp::{Flow, culprit, each};
use crate::inst::{Atomic, BulkReduce, MapField, Space};
use crate::ir::{MapType, Ty};
use crate::program::{Fill, MapSpec};

/// Groups of one warp's async work: `cp.async` or bulk copies.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    /// The number of the open group: the epoch of what is issued now.
    open: u32,
    /// Closed groups with the lanes that closed them.
    commits: Vec<(u32, u32)>,
    ops: Vec<Pending>,
    /// Groups that have work in them, for what must be waited for before the warp ends.
    last_work: Option<(u32, u32, u32)>,
}

#[derive(Debug)]
struct Pending {
    id: u64,
    lanes: u32,
    epoch: u32,
    read_done: bool,
}

impl Groups {
    fn epoch(&self) -> u32 {
        self.open + 1
    }

    fn issue(&mut self, id: u64, lanes: u32, loc: u32) {
        let epoch = self.epoch();
        self.ops.push(Pending { id, lanes, epoch, read_done: false });
        self.last_work = Some((epoch, lanes, loc));
    }

    fn commit(&mut self, lanes: u32) {
        self.commits.push((lanes, self.epoch()));
        self.open += 1;
    }

    /// The epoch up to which a lane's work is over once at most `pending` of its groups are left.
    fn target(&self, lane: u32, pending: u32) -> u32 {
        self.commits.iter().rev().filter(|(lanes, _)| lanes >> lane & 1 == 1).nth(pending as usize).map_or(0, |(_, epoch)| *epoch)
    }

    fn finish(&mut self, id: u64) {
        self.ops.retain(|op| op.id != id);
    }
}

/// A run of bytes to move.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Move {
    shared: u32,
    bytes: u32,
    /// Slot and offset; `None` is filled.
    global: Option<(usize, u64)>,
    /// Bytes beyond these are zero.
    valid: u32,
    lane: u8,
}

/// What a load brings in where the tensor ends, and how it rounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Style {
    ty: Option<MapType>,
    fill: Fill,
}

const PLAIN: Style = Style { ty: None, fill: Fill::Zero };

#[derive(Debug)]
pub(crate) enum Work {
    /// `cp.async` of one warp instruction.
    Threads {
        moves: Vec<Move>,
        epoch: u32,
    },
    /// Arrives when the named copies are over.
    Arrive {
        after: Vec<u64>,
        lanes: u32,
        target: (usize, u32),
        arrivals: u32,
        epoch: u32,
    },
    /// A copy into shared memory of one or several CTAs, from global memory.
    Load {
        moves: Vec<Move>,
        targets: Vec<(usize, u32)>,
        style: Style,
    },
    /// Bytes into shared memory of another CTA: from the own CTA, from registers, or added.
    Peer {
        to: (usize, u32),
        barrier: (usize, u32),
        from: PeerSource,
        bytes: u32,
        at: u32,
    },
    /// A copy or reduction out of shared memory.
    Store {
        moves: Vec<Move>,
        buffer: Vec<u8>,
        reduce: Option<(BulkReduce, Ty)>,
        epoch: u32,
        lane: u8,
        writing: bool,
    },
    Wgmma {
        group: usize,
    },
}

#[derive(Debug)]
pub(crate) enum PeerSource {
    Shared(u32),
    Values(Vec<u8>),
    Reduce(Atomic, Ty, u64),
}

/// What the copy engine changes on the way.
fn in_flight(ty: MapType, data: &mut [u8]) {
    if ty == MapType::Tf32 {
        for word in data.chunks_exact_mut(4) {
            let value = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            word.copy_from_slice(&tensor::tf32_in_flight(value).to_le_bytes());
        }
    }
}

/// What stands outside the tensor.
fn fill(ty: MapType, fill: Fill, data: &mut [u8]) {
    let element = tensor::fill_element(ty, fill).to_le_bytes();
    for place in data.chunks_mut(ty.bytes() as usize) {
        place.copy_from_slice(&element[..place.len()]);
    }
}

/// Work of an async unit.
#[derive(Debug)]
pub(crate) struct Agent {
    id: u64,
    cta: usize,
    warp: u32,
    loc: u32,
    clock: Clock,
    work: Work,
    /// Moves done.
    next: usize,
}

/// Under which name, and how, a unit touches memory.
#[derive(Clone, Copy)]
struct Name {
    actor: u32,
    epoch: u32,
    flags: u8,
    lane: u8,
}

impl Machine<'_> {
    fn issue(&mut self, warp: &Warp, loc: u32, clock: Clock, work: Work) -> u64 {
        let id = self.next_agent;
        self.next_agent += 1;
        self.issued = self.options.async_policy == AsyncPolicy::Earliest;
        self.agents.push(Agent { id, cta: warp.cta, warp: warp.index, loc, clock, work, next: 0 });
        id
    }

    pub(crate) fn issue_wgmma(&mut self, cta: usize, group: usize, warp: u32, loc: u32) {
        let id = self.next_agent;
        self.next_agent += 1;
        self.issued = self.options.async_policy == AsyncPolicy::Earliest;
        self.agents.push(Agent { id, cta, warp, loc, clock: Clock::default(), work: Work::Wgmma { group }, next: 0 });
    }

    fn unit(&self, warp: &Warp, unit: Unit) -> u32 {
        let cta = &self.ctas[warp.cta];
        cta.actor + cta.actors.unit(unit, warp.index)
    }

    // ---- carrying out ----------------------------------------------------------------------------------------------

    /// Lets one async unit do a piece of its work; false if none can.
    pub(crate) fn step_agent(&mut self) -> Result<bool, Fault> {
        let count = self.agents.len();
        let start = self.rng.below(count);
        for turn in 0..count {
            let index = (start + turn) % count;
            if !self.agent_ready(&self.agents[index]) {
                continue;
            }
            let mut agent = self.agents.swap_remove(index);
            let over = self.advance(&mut agent)?;
            if !over {
                self.agents.push(agent);
            }
            return Ok(true);
        }
        Ok(false)
    }

    fn agent_ready(&self, agent: &Agent) -> bool {
        match &agent.work {
            Work::Arrive { after, .. } => !self.agents.iter().any(|other| after.contains(&other.id)),
            _ => true,
        }
    }

    fn pieces(&mut self, total: usize) -> usize {
        match self.options.async_policy {
            AsyncPolicy::Earliest => total,
            AsyncPolicy::Latest | AsyncPolicy::Random => total.div_ceil(1 + self.rng.below(4)).max(1),
        }
    }

    fn advance(&mut self, agent: &mut Agent) -> Result<bool, Fault> {
        let at = Culprit { cta: agent.cta, warp: Some(agent.warp), lane: None, loc: agent.loc };
        let mut work = std::mem::replace(&mut agent.work, Work::Wgmma { group: 0 });
        let over = match &mut work {
            Work::Wgmma { group } => {
                self.do_wgmma(agent.cta, *group)?;
                true
            }
            Work::Threads { moves, epoch } => {
                let end = (agent.next + self.pieces(moves.len())).min(moves.len());
                let actor = self.ctas[agent.cta].actor + self.ctas[agent.cta].actors.unit(Unit::CpAsync, agent.warp);
                for copy in &moves[agent.next..end] {
                    let name = Name { actor, epoch: *epoch, flags: 0, lane: copy.lane };
                    let at = Culprit { lane: Some(u32::from(copy.lane)), ..at };
                    let (mut data, mut written) = ([0u8; 16], [true; 16]);
                    if let (Some((slot, offset)), true) = (copy.global, copy.valid > 0) {
                        let valid = copy.valid as usize;
                        self.unit_read(at, &agent.clock, name, Place::Global { slot, offset }, &mut data[..valid], &mut written[..valid])?;
                    }
                    let place = Place::Shared { cta: agent.cta, offset: copy.shared };
                    let bytes = copy.bytes as usize;
                    self.unit_write(at, &agent.clock, name, place, &data[..bytes], &written[..bytes])?;
                }
                agent.next = end;
                let over = end == moves.len();
                if over {
                    self.finish_group(agent, false);
                }
                over
            }
            Work::Arrive { lanes, target, arrivals, epoch, .. } => {
                let actor = self.ctas[agent.cta].actor + self.ctas[agent.cta].actors.unit(Unit::CpAsync, agent.warp);
                agent.clock.get_mut(actor).seen.extend(*lanes, u32::MAX, *epoch);
                self.arrive(at, target.0, target.1, *arrivals, 0, false, &agent.clock)?;
                true
            }
            Work::Load { moves, targets, style } => {
                let end = (agent.next + self.pieces(moves.len())).min(moves.len());
                let first = agent.next;
                agent.next = end;
                self.load_pieces(at, &agent.clock, &moves[first..end], targets, *style)?;
                end == moves.len()
            }
            Work::Peer { to, barrier, from, bytes, at: done } => {
                let (actor, epoch) = self.copy_actor(at, barrier.0, barrier.1)?;
                let name = Name { actor, epoch, flags: flag::ASYNC, lane: UNIT };
                let place = Place::Shared { cta: to.0, offset: to.1 + *done };
                let count = match from {
                    PeerSource::Shared(source) => {
                        let count = (*bytes - *done).min(512);
                        let (mut data, mut written) = (vec![0; count as usize], vec![true; count as usize]);
                        let source = Place::Shared { cta: agent.cta, offset: *source + *done };
                        self.unit_read(at, &agent.clock, name, source, &mut data, &mut written)?;
                        self.unit_write(at, &agent.clock, name, place, &data, &written)?;
                        count
                    }
                    PeerSource::Values(values) => {
                        self.unit_write(at, &agent.clock, name, place, values, &vec![true; values.len()])?;
                        *bytes
                    }
                    PeerSource::Reduce(op, ty, operand) => {
                        let name = Name { flags: flag::ATOMIC_CLUSTER | flag::ASYNC, ..name };
                        let mut data = [0; 8];
                        self.peek(place, &mut data[..*bytes as usize]);
                        let new = alu::atomic::apply(*op, *ty, Space::Cluster, u64::from_le_bytes(data), *operand, 0)
                            .map_err(|error| self.finding(FindingKind::IllegalOperand, at, None, error.to_string()))?;
                        let data = new.to_le_bytes();
                        self.unit_write(at, &agent.clock, name, place, &data[..*bytes as usize], &[true; 8][..*bytes as usize])?;
                        *bytes
                    }
                };
                *done += count;
                self.complete_bytes(at, barrier.0, barrier.1, i64::from(count))?;
                *done == *bytes
            }
            Work::Store { moves, buffer, reduce, epoch, lane, writing } => {
                let end = (agent.next + self.pieces(moves.len())).min(moves.len());
                let first = agent.next;
                agent.next = end;
                let at = Culprit { lane: Some(u32::from(*lane)), ..at };
                self.store_pieces(at, &agent.clock, agent.warp, &moves[first..end], buffer, *reduce, *epoch, *writing)?;
                if end == moves.len() && !*writing {
                    *writing = true;
                    agent.next = 0;
                    self.finish_group(agent, true);
                    moves.is_empty()
                } else {
                    end == moves.len()
                }
            }
        };
        if over && matches!(work, Work::Store { .. }) {
            self.finish_group(agent, false);
        }
        agent.work = work;
        Ok(over)
    }

    /// Notes in the warp's groups that a copy has read its source, or is over.
    fn finish_group(&mut self, agent: &Agent, read_only: bool) {
        let Some(Some(warp)) = self.ctas[agent.cta].warps.get_mut(agent.warp as usize) else { return };
        if read_only {
            for op in &mut warp.bulk.ops {
                op.read_done |= op.id == agent.id;
            }
        } else {
            warp.cp.finish(agent.id);
            warp.bulk.finish(agent.id);
        }
        self.wake(agent.cta);
    }

    fn unit_access<'a>(&self, cta: usize, clock: &'a Clock, name: Name, loc: u32, global: bool) -> Access<'a> {
        let owner = &self.ctas[cta];
        let stride = owner.actors.count();
        let first = owner.actor - owner.rank * stride;
        Access {
            actor: name.actor,
            epoch: name.epoch,
            loc,
            flags: name.flags,
            clock,
            extra: None,
            cp: (u32::MAX - 1, 0),
            cta: owner.actor..owner.actor + stride,
            cluster: first..first + stride * owner.peers.len() as u32,
            launch: self.grids[owner.grid].first_actor,
            global,
        }
    }

    fn unit_word(name: Name) -> &'static str {
        if name.flags & flag::ASYNC == 0 { "this cp.async" } else { "this copy" }
    }

    fn unit_read(
        &mut self,
        at: Culprit,
        clock: &Clock,
        name: Name,
        place: Place,
        out: &mut [u8],
        written: &mut [bool],
    ) -> Result<(), Fault> {
        let access = self.unit_access(at.cta, clock, name, at.loc, matches!(place, Place::Global { .. }));
        let mut done = 0;
        while done < out.len() {
            let (mut piece, start, part) = match place {
                Place::Global { slot, offset } => {
                    let offset = offset + done as u64;
                    let (piece, start) = self.memory.piece(slot, offset);
                    (piece, start, (out.len() - done).min(PAGE - start))
                }
                Place::Shared { cta, offset } => (self.ctas[cta].shared.piece(), offset as usize + done, out.len() - done),
            };
            let checked = piece.check_read(&mut self.readers, start, part, &access, name.lane);
            out[done..done + part].copy_from_slice(&piece.data[start..start + part]);
            match checked {
                Ok(true) => {}
                Ok(false) => piece.written_each(start, &mut written[done..done + part]),
                Err(conflict) => return Err(self.conflict(at, Self::unit_word(name), place, conflict, false)),
            }
            done += part;
        }
        if let Place::Global { slot, offset } = place {
            let cta = at.cta;
            let launch = self.grids[self.ctas[cta].grid].launch;
            let fresh = self.memory.touch(slot, offset, out.len(), false, launch);
            let counters = self.counters(cta);
            counters.global_load_bytes += out.len() as u64;
            counters.unique_load_bytes += fresh;
        }
        Ok(())
    }

    fn unit_write(&mut self, at: Culprit, clock: &Clock, name: Name, place: Place, data: &[u8], written: &[bool]) -> Result<(), Fault> {
        if let Place::Shared { cta, offset } = place {
            if self.ctas[cta].exited {
                let [x, y, z] = self.ctas[cta].index;
                let message = format!(
                    "{} writes shared memory of CTA {x},{y},{z}, which has exited: the bytes land in memory of another CTA",
                    Self::unit_word(name)
                );
                return Err(self.finding(FindingKind::RemoteAfterExit, at, None, message));
            }
            self.check_barrier_memory(at, cta, offset, data.len() as u32, "overwritten by an async copy")?;
        }
        let access = self.unit_access(at.cta, clock, name, at.loc, matches!(place, Place::Global { .. }));
        let mut done = 0;
        while done < data.len() {
            let (mut piece, start, part) = match place {
                Place::Global { slot, offset } => {
                    let offset = offset + done as u64;
                    let (piece, start) = self.memory.piece(slot, offset);
                    (piece, start, (data.len() - done).min(PAGE - start))
                }
                Place::Shared { cta, offset } => (self.ctas[cta].shared.piece(), offset as usize + done, data.len() - done),
            };
            let checked = piece.check_write(&mut self.readers, start, part, &access, name.lane);
            piece.data[start..start + part].copy_from_slice(&data[done..done + part]);
            if written[done..done + part].iter().all(|&on| on) {
                piece.mark(start, part);
            } else {
                piece.mark_each(start, &written[done..done + part]);
            }
            if let Err(conflict) = checked {
                return Err(self.conflict(at, Self::unit_word(name), place, conflict, true));
            }
            done += part;
        }
        if let Place::Global { slot, offset } = place {
            let launch = self.grids[self.ctas[at.cta].grid].launch;
            let fresh = self.memory.touch(slot, offset, data.len(), true, launch);
            let counters = self.counters(at.cta);
            counters.global_store_bytes += data.len() as u64;
            counters.unique_store_bytes += fresh;
        }
        Ok(())
    }

    fn load_pieces(&mut self, at: Culprit, clock: &Clock, moves: &[Move], targets: &[(usize, u32)], style: Style) -> Result<(), Fault> {
        let mut total = 0;
        let mut names = Vec::with_capacity(targets.len());
        for &(cta, barrier) in targets {
            let (actor, epoch) = self.copy_actor(at, cta, barrier)?;
            names.push(Name { actor, epoch, flags: flag::ASYNC, lane: UNIT });
        }
        let (mut data, mut written) = (Vec::new(), Vec::new());
        for copy in moves {
            let bytes = copy.bytes as usize;
            data.clear();
            data.resize(bytes, 0);
            written.clear();
            written.resize(bytes, true);
            match copy.global {
                Some((slot, offset)) => {
                    let place = Place::Global { slot, offset };
                    self.unit_read(at, clock, names[0], place, &mut data, &mut written)?;
                    if let Some(ty) = style.ty {
                        in_flight(ty, &mut data);
                    }
                }
                None => {
                    if let Some(ty) = style.ty {
                        fill(ty, style.fill, &mut data);
                    }
                }
            }
            for (&(cta, _), &name) in targets.iter().zip(&names) {
                self.unit_write(at, clock, name, Place::Shared { cta, offset: copy.shared }, &data, &written)?;
            }
            total += i64::from(copy.bytes);
        }
        for &(cta, barrier) in targets {
            self.complete_bytes(at, cta, barrier, total)?;
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments, reason = "one unit's state, taken apart so that pieces can be borrowed")]
    fn store_pieces(
        &mut self,
        at: Culprit,
        clock: &Clock,
        warp: u32,
        moves: &[Move],
        buffer: &mut Vec<u8>,
        reduce: Option<(BulkReduce, Ty)>,
        epoch: u32,
        writing: bool,
    ) -> Result<(), Fault> {
        let cta = &self.ctas[at.cta];
        let unit = if writing { Unit::BulkWrite } else { Unit::BulkRead };
        let actor = cta.actor + cta.actors.unit(unit, warp);
        let mut name = Name { actor, epoch, flags: flag::ASYNC, lane: UNIT };
        if !writing {
            for copy in moves {
                let mut data = vec![0; copy.bytes as usize];
                let mut written = vec![true; copy.bytes as usize];
                let place = Place::Shared { cta: at.cta, offset: copy.shared };
                self.unit_read(at, clock, name, place, &mut data, &mut written)?;
                if let Some(hole) = written.iter().position(|on| !on) {
                    let message = format!("{} is stored to global memory by this copy, and nothing wrote it", self.place_name(place, hole));
                    return Err(self.finding(FindingKind::UnwrittenMemory, at, None, message));
                }
                buffer.extend_from_slice(&data);
            }
            return Ok(());
        }
        // What was written before has been taken off the buffer.
        let mut from = 0;
        for copy in moves {
            let bytes = copy.bytes as usize;
            let Some((slot, offset)) = copy.global else { continue };
            let place = Place::Global { slot, offset };
            let mut data = buffer[from..from + bytes].to_vec();
            from += bytes;
            if let Some((op, ty)) = reduce {
                name.flags = flag::ASYNC | flag::ATOMIC_GPU;
                let size = ty.bytes() as usize;
                for (index, element) in data.chunks_exact_mut(size).enumerate() {
                    let at_element = Place::Global { slot, offset: offset + (index * size) as u64 };
                    let mut old = [0u8; 8];
                    if self.peek(at_element, &mut old[..size]) == 0 {
                        let message =
                            format!("{} is reduced into by this copy, and nothing wrote it before", self.place_name(at_element, 0));
                        return Err(self.finding(FindingKind::UnwrittenMemory, at, None, message));
                    }
                    let mut operand = [0u8; 8];
                    operand[..size].copy_from_slice(element);
                    let new = alu::atomic::apply_bulk(op, ty, u64::from_le_bytes(old), u64::from_le_bytes(operand))
                        .map_err(|error| self.finding(FindingKind::IllegalOperand, at, None, error.to_string()))?;
                    element.copy_from_slice(&new.to_le_bytes()[..size]);
                }
            }
            let written = vec![true; bytes];
            self.unit_write(at, clock, name, place, &data, &written)?;
        }
        buffer.drain(..from);
        Ok(())
    }

    /// Async work that a CTA leaves behind.
    pub(crate) fn check_agents_at_exit(&mut self, cta: usize) -> Result<(), Fault> {
        let owner = &self.ctas[cta];
        for (index, warp) in owner.warps.iter().enumerate() {
            let Some(warp) = warp else { continue };
            self.check_flights_at_exit(warp)?;
            if let Some((epoch, _, loc)) = warp.bulk.last_work {
                let actor = owner.actor + owner.actors.unit(Unit::BulkRead, index as u32);
                if !owner.exit_clock.knows(actor, epoch, UNIT) {
                    let message = "this bulk copy reads shared memory, and its CTA exits without having waited for that (cp.async.bulk.wait_group.read): the memory may belong to another CTA by then";
                    let at = Culprit { cta, warp: Some(index as u32), lane: None, loc };
                    return Err(self.finding(FindingKind::AsyncAfterExit, at, None, message));
                }
            }
        }
        let into = |work: &Work| match work {
            Work::Load { targets, .. } => targets.iter().any(|target| target.0 == cta),
            Work::Peer { to, .. } => to.0 == cta,
            _ => false,
        };
        if let Some(agent) = self.agents.iter().find(|agent| into(&agent.work)) {
            let [x, y, z] = self.ctas[cta].index;
            let message = format!(
                "this copy into shared memory of CTA {x},{y},{z} is still under way when that CTA exits: nobody there waited for it, and the bytes land in memory that may belong to another CTA"
            );
            let at = Culprit { cta: agent.cta, warp: Some(agent.warp), lane: None, loc: agent.loc };
            return Err(self.finding(FindingKind::AsyncAfterExit, at, None, message));
        }
        // What is left of cp.async ends before the memory is given away.
        while let Some(index) = self.agents.iter().position(|agent| agent.cta == cta && matches!(agent.work, Work::Threads { .. })) {
            let mut agent = self.agents.swap_remove(index);
            while !self.advance(&mut agent)? {}
        }
        Ok(())
    }

    // ---- cp.async --------------------------------------------------------------------------------------------------

    pub(crate) fn cp_async(&mut self, warp: &mut Warp, inst: &Instruction, exec: u32, bytes: u8) -> Result<Flow, Fault> {
        let to = self.need(warp, inst.ins[0], exec, inst.loc, "is an address")?;
        let to_offset = warp.lanes(inst.ins[1]);
        let from = self.need(warp, inst.ins[2], exec, inst.loc, "is an address")?;
        let from_offset = warp.lanes(inst.ins[3]);
        let size = self.need(warp, inst.ins[4], exec, inst.loc, "is a size")?;
        let mut moves = Vec::with_capacity(32);
        for lane in each(exec) {
            let at = culprit(warp, inst.loc, Some(lane as u32));
            let valid = (size[lane] as u32).min(u32::from(bytes));
            let shared = u64::from((to[lane] as u32).wrapping_add(to_offset[lane] as u32));
            let global = from[lane].wrapping_add(from_offset[lane]);
            if !shared.is_multiple_of(u64::from(bytes)) || (valid > 0 && !global.is_multiple_of(u64::from(bytes))) {
                let message =
                    format!("cp.async of {bytes} bytes from {global:#x} to shared {shared:#x}: both must be multiples of {bytes}");
                return Err(self.finding(FindingKind::Misaligned, at, None, message));
            }
            let (_, offset) = self.shared_place(at, shared, u32::from(bytes), false)?;
            self.check_barrier_memory(at, warp.cta, offset, u32::from(bytes), "overwritten")?;
            let global = if valid > 0 { Some(self.global_place(at, global, u64::from(valid), "copied")?) } else { None };
            moves.push(Move { shared: offset, bytes: u32::from(bytes), global, valid, lane: lane as u8 });
        }
        let cp = self.unit(warp, Unit::CpAsync);
        let clock = warp.release(exec, cp);
        let epoch = warp.cp.epoch();
        let id = self.issue(warp, inst.loc, clock, Work::Threads { moves, epoch });
        warp.cp.issue(id, exec, inst.loc);
        Ok(Flow::Next)
    }

    pub(crate) fn cp_async_commit(&mut self, warp: &mut Warp, exec: u32) -> Flow {
        warp.cp.commit(exec);
        Flow::Next
    }

    pub(crate) fn cp_async_wait(&mut self, warp: &mut Warp, exec: u32, pending: u32) -> Result<Flow, Fault> {
        let mut least = u32::MAX;
        for lane in each(exec) {
            let target = warp.cp.target(lane as u32, pending);
            least = least.min(target);
            if warp.cp.ops.iter().any(|op| op.lanes >> lane & 1 == 1 && op.epoch <= target) {
                warp.wait = Wait::CpAsync;
                return Ok(Flow::Block);
            }
        }
        warp.wait = Wait::Nothing;
        if exec == warp.full {
            warp.cp_waited = warp.cp_waited.max(least);
        } else {
            let cp = self.unit(warp, Unit::CpAsync);
            let full = warp.full;
            warp.clock.get_mut(cp).seen.extend(exec, full, least);
        }
        Ok(Flow::Next)
    }

    pub(crate) fn cp_async_arrive(&mut self, warp: &mut Warp, inst: &Instruction, exec: u32, no_increment: bool) -> Result<Flow, Fault> {
        let base = self.need(warp, inst.ins[0], exec, inst.loc, "is the address of an mbarrier")?;
        let offset = warp.lanes(inst.ins[1]);
        let after: Vec<u64> = warp.cp.ops.iter().filter(|op| op.lanes & exec != 0).map(|op| op.id).collect();
        let epoch = warp.cp.epoch();
        // What comes later in this group is not covered by the arrival.
        warp.cp.open += 1;
        let mut left = exec;
        while left != 0 {
            let lane = left.trailing_zeros() as usize;
            let address = (base[lane] as u32).wrapping_add(offset[lane] as u32);
            let same = each(left)
                .filter(|&other| (base[other] as u32).wrapping_add(offset[other] as u32) == address)
                .fold(0, |m, l| m | 1u32 << l);
            left &= !same;
            let at = culprit(warp, inst.loc, Some(lane as u32));
            let target = self.find_barrier(at, u64::from(address), false)?;
            let arrivals = same.count_ones();
            if !no_increment {
                self.raise_pending(target.0, target.1, arrivals);
            }
            // Only what the copies did is handed on, not what the threads did.
            let clock = warp.clock.clone();
            let lanes = if same == warp.full { u32::MAX } else { same };
            self.issue(warp, inst.loc, clock, Work::Arrive { after: after.clone(), lanes, target, arrivals, epoch });
        }
        Ok(Flow::Next)
    }

    // ---- bulk copies -----------------------------------------------------------------------------------------------

    fn multiple_of(&self, at: Culprit, what: &str, value: u64, of: u64) -> Result<(), Fault> {
        if value.is_multiple_of(of) {
            return Ok(());
        }
        Err(self.finding(
            FindingKind::Misaligned,
            at,
            None,
            format!("{what} {value:#x} of this copy is not a multiple of {of}: the launch fails"),
        ))
    }

    /// Cuts a plain copy into runs.
    fn runs(shared: u32, global: (usize, u64), bytes: u32) -> Vec<Move> {
        (0..bytes.div_ceil(512))
            .map(|index| {
                let at = index * 512;
                let count = (bytes - at).min(512);
                Move { shared: shared + at, bytes: count, global: Some((global.0, global.1 + u64::from(at))), valid: count, lane: UNIT }
            })
            .collect()
    }

    /// The CTAs that a copy into shared memory goes to, each with its barrier.
    fn load_targets(
        &self,
        warp: &Warp,
        at: Culprit,
        to: u64,
        barrier: u64,
        mask: Option<u64>,
        bytes: u32,
    ) -> Result<(u32, Vec<(usize, u32)>), Fault> {
        let (own, offset) = self.shared_place(at, to, bytes, true)?;
        let Some(mask) = mask else {
            let (cta, barrier) = self.copy_barrier(warp, at, barrier)?;
            if cta != own {
                let message = "the destination of this copy and the mbarrier that it completes on are in different CTAs";
                return Err(self.finding(FindingKind::IllegalOperand, at, None, message));
            }
            return Ok((offset, vec![(cta, barrier)]));
        };
        let peers = self.ctas[warp.cta].peers.clone();
        if mask == 0 || mask >> peers.len() != 0 {
            let message =
                format!("the CTA mask {mask:#x} of this copy names CTAs that a cluster of {} does not have, or none", peers.len());
            return Err(self.finding(FindingKind::IllegalOperand, at, None, message));
        }
        let mut targets = Vec::new();
        for (rank, _) in peers.iter().enumerate().filter(|(rank, _)| mask >> rank & 1 == 1) {
            let window = (rank as u64 + 1) << 24;
            self.shared_place(at, to & 0x00FF_FFFF | window, bytes, true)?;
            targets.push(self.copy_barrier(warp, at, barrier & 0x00FF_FFFF | window)?);
        }
        Ok((offset, targets))
    }

    fn visit_all(&mut self, warp: &Warp, lane: usize, loc: u32, targets: &[(usize, u32)]) {
        for &(cta, _) in targets {
            self.visit(warp, cta, 1 << lane, loc);
        }
    }

    pub(crate) fn bulk_load(&mut self, warp: &mut Warp, inst: &Instruction, exec: u32, multicast: bool) -> Result<Flow, Fault> {
        let operands: Result<Vec<_>, Fault> =
            inst.ins.iter().map(|source| self.need(warp, *source, exec, inst.loc, "steers a copy")).collect();
        let operands = operands?;
        for lane in each(exec) {
            let at = culprit(warp, inst.loc, Some(lane as u32));
            let value = |index: usize| operands[index][lane];
            let bytes = value(2) as u32;
            self.multiple_of(at, "the shared address", value(0), 16)?;
            self.multiple_of(at, "the global address", value(1), 16)?;
            self.multiple_of(at, "the size", u64::from(bytes), 16)?;
            let mask = multicast.then(|| value(4));
            let (shared, targets) = self.load_targets(warp, at, value(0), value(3), mask, bytes)?;
            let global = self.global_place(at, value(1), u64::from(bytes), "copied")?;
            let cp = self.unit(warp, Unit::CpAsync);
            let clock = warp.release(1 << lane, cp);
            self.visit_all(warp, lane, inst.loc, &targets);
            let moves = Self::runs(shared, global, bytes);
            self.issue(warp, inst.loc, clock, Work::Load { moves, targets, style: PLAIN });
        }
        Ok(Flow::Next)
    }

    pub(crate) fn bulk_store(
        &mut self,
        warp: &mut Warp,
        inst: &Instruction,
        exec: u32,
        reduce: Option<(BulkReduce, Ty)>,
    ) -> Result<Flow, Fault> {
        let operands: Result<Vec<_>, Fault> =
            inst.ins.iter().map(|source| self.need(warp, *source, exec, inst.loc, "steers a copy")).collect();
        let operands = operands?;
        for lane in each(exec) {
            let at = culprit(warp, inst.loc, Some(lane as u32));
            let (to, from, bytes) = (operands[0][lane], operands[1][lane], operands[2][lane] as u32);
            self.multiple_of(at, "the global address", to, 16)?;
            self.multiple_of(at, "the shared address", from, 16)?;
            self.multiple_of(at, "the size", u64::from(bytes), 16)?;
            let (_, shared) = self.shared_place(at, from, bytes, false)?;
            let global = self.global_place(at, to, u64::from(bytes), "stored")?;
            self.issue_store(warp, inst.loc, lane, Self::runs(shared, global, bytes), reduce);
        }
        Ok(Flow::Next)
    }

    fn issue_store(&mut self, warp: &mut Warp, loc: u32, lane: usize, moves: Vec<Move>, reduce: Option<(BulkReduce, Ty)>) {
        let cp = self.unit(warp, Unit::CpAsync);
        let clock = warp.release(1 << lane, cp);
        let epoch = warp.bulk.epoch();
        let work = Work::Store { moves, buffer: Vec::new(), reduce, epoch, lane: lane as u8, writing: false };
        let id = self.issue(warp, loc, clock, work);
        warp.bulk.issue(id, 1 << lane, loc);
    }

    pub(crate) fn bulk_to_peer(&mut self, warp: &mut Warp, inst: &Instruction, exec: u32) -> Result<Flow, Fault> {
        let operands: Result<Vec<_>, Fault> =
            inst.ins.iter().map(|source| self.need(warp, *source, exec, inst.loc, "steers a copy")).collect();
        let operands = operands?;
        for lane in each(exec) {
            let at = culprit(warp, inst.loc, Some(lane as u32));
            let (to, from, bytes, barrier) = (operands[0][lane], operands[1][lane], operands[2][lane] as u32, operands[3][lane]);
            self.multiple_of(at, "the remote address", to, 16)?;
            self.multiple_of(at, "the shared address", from, 16)?;
            self.multiple_of(at, "the size", u64::from(bytes), 16)?;
            let (_, source) = self.shared_place(at, from, bytes, false)?;
            self.issue_peer(warp, inst.loc, lane, to, barrier, PeerSource::Shared(source), bytes)?;
        }
        Ok(Flow::Next)
    }

    #[allow(clippy::too_many_arguments, reason = "the operands of one instruction")]
    fn issue_peer(
        &mut self,
        warp: &mut Warp,
        loc: u32,
        lane: usize,
        to: u64,
        barrier: u64,
        from: PeerSource,
        bytes: u32,
    ) -> Result<(), Fault> {
        let at = culprit(warp, loc, Some(lane as u32));
        let to = self.shared_place(at, to, bytes, true)?;
        let barrier = self.copy_barrier(warp, at, barrier)?;
        if barrier.0 != to.0 {
            let message = "the destination of this copy and the mbarrier that it completes on are in different CTAs";
            return Err(self.finding(FindingKind::IllegalOperand, at, None, message));
        }
        let cp = self.unit(warp, Unit::CpAsync);
        let clock = warp.release(1 << lane, cp);
        self.visit(warp, to.0, 1 << lane, loc);
        self.issue(warp, loc, clock, Work::Peer { to, barrier, from, bytes, at: 0 });
        Ok(())
    }

    pub(crate) fn st_async(
        &mut self,
        warp: &mut Warp,
        inst: &Instruction,
        exec: u32,
        bytes: u32,
        ty: Ty,
        reduce: Option<Atomic>,
    ) -> Result<Flow, Fault> {
        let to = self.need(warp, inst.ins[0], exec, inst.loc, "is an address")?;
        let barrier = self.need(warp, inst.ins[1], exec, inst.loc, "is the address of an mbarrier")?;
        let values: Result<Vec<_>, Fault> =
            inst.ins[2..].iter().map(|source| self.need(warp, *source, exec, inst.loc, "is stored")).collect();
        let values = values?;
        for lane in each(exec) {
            let at = culprit(warp, inst.loc, Some(lane as u32));
            self.multiple_of(at, "the remote address", to[lane], u64::from(bytes))?;
            let from = match reduce {
                Some(op) => PeerSource::Reduce(op, ty, values[0][lane]),
                None => {
                    let size = ty.bytes() as usize;
                    PeerSource::Values(values.iter().flat_map(|value| value[lane].to_le_bytes()[..size].to_vec()).collect())
                }
            };
            self.issue_peer(warp, inst.loc, lane, to[lane], barrier[lane], from, bytes)?;
        }
        Ok(Flow::Next)
    }

    pub(crate) fn bulk_commit(&mut self, warp: &mut Warp, exec: u32) -> Flow {
        warp.bulk.commit(exec);
        Flow::Next
    }

    pub(crate) fn bulk_wait(&mut self, warp: &mut Warp, exec: u32, pending: u32, read: bool) -> Result<Flow, Fault> {
        let mut least = u32::MAX;
        for lane in each(exec) {
            let target = warp.bulk.target(lane as u32, pending);
            if target > 0 {
                least = least.min(target);
            }
            if warp.bulk.ops.iter().any(|op| op.lanes >> lane & 1 == 1 && op.epoch <= target && !(read && op.read_done)) {
                warp.wait = Wait::Bulk;
                return Ok(Flow::Block);
            }
        }
        warp.wait = Wait::Nothing;
        if least == u32::MAX {
            return Ok(Flow::Next);
        }
        let full = warp.full;
        let units = if read { &[Unit::BulkRead][..] } else { &[Unit::BulkRead, Unit::BulkWrite] };
        for &unit in units {
            let actor = self.unit(warp, unit);
            // A unit's accesses have no lane: whoever waits knows of all up to its own group.
            warp.clock.get_mut(actor).seen.extend(exec, full, least);
            warp.clock.get_mut(actor).seen.all = warp.clock.get(actor).seen.all.max(least);
            if let Some((_, extra)) = &mut warp.extra {
                extra.get_mut(actor).seen.all = extra.get(actor).seen.all.max(least);
            }
        }
        Ok(Flow::Next)
    }

    // ---- tensor copies ---------------------------------------------------------------------------------------------

    /// The tensor map at a generic address.
    fn map_at(&mut self, at: Culprit, address: u64) -> Result<(u64, MapSpec), Fault> {
        if !address.is_multiple_of(64) {
            return Err(self.finding(
                FindingKind::Misaligned,
                at,
                None,
                format!("a tensor map at address {address:#x}, which is not a multiple of 64"),
            ));
        }
        let mut bytes = [0u8; 16];
        if address >= PARAM_BASE {
            let grid = ((address - PARAM_BASE) >> 32) as usize;
            let offset = (address & 0xFFFF_FFFF) as usize;
            match self.grids.get(grid).and_then(|grid| grid.params.get(offset..offset + 16)) {
                Some(found) => bytes.copy_from_slice(found),
                None => {
                    return Err(self.finding(
                        FindingKind::OutOfBounds,
                        at,
                        None,
                        format!("a tensor map at parameter address {address:#x}"),
                    ));
                }
            }
        } else {
            let (slot, offset) = self.global_place(at, address, 128, "read as a tensor map")?;
            self.peek(Place::Global { slot, offset }, &mut bytes);
        }
        self.decode_map(&bytes)
            .ok_or_else(|| self.finding(FindingKind::IllegalOperand, at, None, format!("there is no tensor map at address {address:#x}")))
    }

    fn decode_map(&self, bytes: &[u8; 16]) -> Option<(u64, MapSpec)> {
        let (magic, number) = bytes.split_at(8);
        let magic = u64::from_le_bytes(magic.try_into().ok()?);
        let number = u64::from_le_bytes(number.try_into().ok()?);
        if magic != MAP_MAGIC { None } else { self.maps.get(number as usize).cloned() }
    }

    #[allow(clippy::too_many_arguments, reason = "the attributes of one instruction")]
    pub(crate) fn tma_load(
        &mut self,
        warp: &mut Warp,
        inst: &Instruction,
        exec: u32,
        rank: u8,
        im2col: bool,
        multicast: bool,
    ) -> Result<Flow, Fault> {
        let operands: Result<Vec<_>, Fault> =
            inst.ins.iter().map(|source| self.need(warp, *source, exec, inst.loc, "steers a copy")).collect();
        let operands = operands?;
        let rank = rank as usize;
        let offsets_at = 2 + rank;
        let barrier_at = offsets_at + if im2col { rank - 2 } else { 0 };
        for lane in each(exec) {
            let at = culprit(warp, inst.loc, Some(lane as u32));
            let value = |index: usize| operands[index][lane];
            let (base, spec) = self.map_at(at, value(1))?;
            self.check_map(at, &spec, rank, im2col)?;
            let coordinates: Vec<i32> = (2..2 + rank).map(|index| value(index) as u32 as i32).collect();
            let offsets: Vec<u16> = (offsets_at..barrier_at).map(|index| value(index) as u16).collect();
            let mask = multicast.then(|| value(barrier_at + 1));
            let bytes = tensor::copy_bytes(&spec);
            self.multiple_of(at, "the shared address", value(0), u64::from(tensor::SHARED_ALIGNMENT_BYTES))?;
            let (shared, targets) = self.load_targets(warp, at, value(0), value(barrier_at), mask, bytes)?;
            let mut segments = Vec::new();
            tensor::load_segments(&spec, shared, &coordinates, &offsets, |segment| segments.push(segment))
                .map_err(|error| self.finding(FindingKind::IllegalOperand, at, None, error.to_string()))?;
            let moves = self.moves(at, base, &segments, "loaded")?;
            let cp = self.unit(warp, Unit::CpAsync);
            let clock = warp.release(1 << lane, cp);
            self.visit_all(warp, lane, inst.loc, &targets);
            let style = Style { ty: Some(spec.decl.ty), fill: spec.fill };
            self.issue(warp, inst.loc, clock, Work::Load { moves, targets, style });
        }
        Ok(Flow::Next)
    }

    fn check_map(&self, at: Culprit, spec: &MapSpec, rank: usize, im2col: bool) -> Result<(), Fault> {
        if spec.decl.rank as usize != rank || spec.decl.im2col != im2col {
            let word = |im2col: bool| if im2col { "im2col" } else { "tiled" };
            let message = format!(
                "the instruction is for a {} map of rank {rank}, the map is {} of rank {}",
                word(im2col),
                word(spec.decl.im2col),
                spec.decl.rank
            );
            return Err(self.finding(FindingKind::IllegalOperand, at, None, message));
        }
        Ok(())
    }

    fn moves(&self, at: Culprit, base: u64, segments: &[tensor::Segment], verb: &str) -> Result<Vec<Move>, Fault> {
        segments
            .iter()
            .map(|segment| {
                let global = match segment.global_offset {
                    Some(offset) => Some(self.global_place(at, base + offset, u64::from(segment.bytes), verb)?),
                    None => None,
                };
                Ok(Move { shared: segment.shared_address, bytes: segment.bytes, global, valid: segment.bytes, lane: UNIT })
            })
            .collect()
    }

    pub(crate) fn tma_store(
        &mut self,
        warp: &mut Warp,
        inst: &Instruction,
        exec: u32,
        rank: u8,
        im2col: bool,
        reduce: Option<BulkReduce>,
    ) -> Result<Flow, Fault> {
        let operands: Result<Vec<_>, Fault> =
            inst.ins.iter().map(|source| self.need(warp, *source, exec, inst.loc, "steers a copy")).collect();
        let operands = operands?;
        let rank = rank as usize;
        for lane in each(exec) {
            let at = culprit(warp, inst.loc, Some(lane as u32));
            let value = |index: usize| operands[index][lane];
            let (base, spec) = self.map_at(at, value(0))?;
            self.check_map(at, &spec, rank, im2col)?;
            let coordinates: Vec<i32> = (1..1 + rank).map(|index| value(index) as u32 as i32).collect();
            let from = value(1 + rank);
            self.multiple_of(at, "the shared address", from, u64::from(tensor::SHARED_ALIGNMENT_BYTES))?;
            let (_, shared) = self.shared_place(at, from, tensor::copy_bytes(&spec), false)?;
            let mut segments = Vec::new();
            tensor::store_segments(&spec, shared, &coordinates, |segment| segments.push(segment))
                .map_err(|error| self.finding(FindingKind::IllegalOperand, at, None, error.to_string()))?;
            let moves = self.moves(at, base, &segments, "stored")?;
            let reduce = match (reduce, tensor::reduction_type(spec.decl.ty)) {
                (None, _) => None,
                (Some(op), Some(ty)) => Some((op, ty)),
                (Some(_), None) => {
                    let message = format!("a tensor map of {:?} takes no reduction", spec.decl.ty);
                    return Err(self.finding(FindingKind::IllegalOperand, at, None, message));
                }
            };
            self.issue_store(warp, inst.loc, lane, moves, reduce);
        }
        Ok(Flow::Next)
    }

    // ---- tensor maps in memory -------------------------------------------------------------------------------------

    pub(crate) fn tensormap_replace(
        &mut self,
        warp: &mut Warp,
        inst: &Instruction,
        exec: u32,
        field: MapField,
        space: Space,
    ) -> Result<Flow, Fault> {
        let address = self.need(warp, inst.ins[0], exec, inst.loc, "is the address of a tensor map")?;
        let value = self.need(warp, inst.ins[1], exec, inst.loc, "goes into a tensor map")?;
        for lane in each(exec) {
            let at = culprit(warp, inst.loc, Some(lane as u32));
            self.multiple_of(at, "the tensor map's address", address[lane], 64)?;
            let place = match space {
                Space::Global => {
                    let (slot, offset) = self.global_place(at, address[lane], 128, "changed as a tensor map")?;
                    Place::Global { slot, offset }
                }
                _ => {
                    let (cta, offset) = self.shared_place(at, address[lane], 128, false)?;
                    Place::Shared { cta, offset }
                }
            };
            let mut bytes = [0; 16];
            self.peek(place, &mut bytes);
            let Some((mut base, mut spec)) = self.decode_map(&bytes) else {
                let message = format!("there is no tensor map at address {:#x}", address[lane]);
                return Err(self.finding(FindingKind::IllegalOperand, at, None, message));
            };
            let number = value[lane];
            let slot = |list: &mut Vec<u64>, index: u32, number: u64| match list.get_mut(index as usize) {
                Some(entry) => {
                    *entry = number;
                    true
                }
                None => false,
            };
            let fits = match field {
                MapField::GlobalAddress => {
                    base = number;
                    true
                }
                MapField::Rank => u64::from(spec.decl.rank) == number + 1,
                MapField::BoxDim(index) => spec.decl.box_dims.get_mut(index as usize).map(|entry| *entry = number as u32).is_some(),
                MapField::GlobalDim(index) => slot(&mut spec.dims, index, number),
                MapField::GlobalStride(index) => slot(&mut spec.strides_bytes, index, number),
                MapField::ElementStride(index) => {
                    spec.element_strides.get_mut(index as usize).map(|entry| *entry = number as u32).is_some()
                }
            };
            if !fits {
                let message = format!("{field:?} of a tensor map of rank {} cannot be set to {number}", spec.decl.rank);
                return Err(self.finding(FindingKind::IllegalOperand, at, None, message));
            }
            let mut image = MAP_MAGIC.to_le_bytes().to_vec();
            image.extend_from_slice(&(self.maps.len() as u64).to_le_bytes());
            self.maps.push((base, spec));
            self.write_lane(warp, inst.loc, lane, place, &image, 0)?;
        }
        Ok(Flow::Next)
    }

    pub(crate) fn tensormap_publish(&mut self, warp: &mut Warp, inst: &Instruction, exec: u32) -> Result<Flow, Fault> {
        self.converged(warp, inst, exec)?;
        let to = self.uniform(warp, inst.ins[0], exec, inst.loc, "the map's new address")?;
        let from = self.uniform(warp, inst.ins[1], exec, inst.loc, "the map's address")?;
        let at = culprit(warp, inst.loc, None);
        self.multiple_of(at, "the map's new address", to, 128)?;
        self.multiple_of(at, "the map's address", from, 128)?;
        let (slot, target) = self.global_place(at, to, 128, "written as a tensor map")?;
        let (cta, source) = self.shared_place(at, from, 128, false)?;
        for part in 0..8 {
            let mut data = [0; 16];
            self.peek(Place::Shared { cta, offset: source + 16 * part }, &mut data);
            self.write_lane(warp, inst.loc, 0, Place::Global { slot, offset: target + 16 * u64::from(part) }, &data, 0)?;
        }
        let cp = self.unit(warp, Unit::CpAsync);
        let view = warp.release(exec, cp);
        warp.fence_release = Some(view);
        Ok(Flow::Next)
    }
}
