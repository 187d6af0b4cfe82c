//! Async units: copies and reductions that run beside the warps and are done in pieces at any time between issue and completion.

use super::AsyncPolicy;
use super::alu;
use super::clock::{Clock, Of};
use super::finding::FindingKind;
use super::memory::PAGE;
use super::shadow::{Access, Conflict, Memo, UNIT, flag};
use super::state::{Culprit, Fault, Machine, Unit, Warp};
use super::tensor;
use super::threads::Place;
use crate::inst::{Atomic, BulkReduce, Space};
use crate::ir::{MapType, Ty};
use crate::program::Fill;

/// Groups of one warp's async work: `cp.async` or bulk copies.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    /// The number of the open group: the epoch of what is issued now.
    pub(crate) open: u32,
    /// Closed groups with the lanes that closed them.
    commits: Vec<(u32, u32)>,
    pub(crate) ops: Vec<Pending>,
    /// Groups that have work in them, for what must be waited for before the warp ends.
    last_work: Option<(u32, u32, u32)>,
}

/// Work of one group that is not over.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) id: u64,
    pub(crate) lanes: u32,
    pub(crate) epoch: u32,
    pub(crate) read_done: bool,
}

impl Groups {
    pub(crate) fn epoch(&self) -> u32 {
        self.open + 1
    }

    pub(crate) fn issue(&mut self, id: u64, lanes: u32, loc: u32) {
        let epoch = self.epoch();
        self.ops.push(Pending { id, lanes, epoch, read_done: false });
        self.last_work = Some((epoch, lanes, loc));
    }

    pub(crate) fn commit(&mut self, lanes: u32) {
        self.commits.push((lanes, self.epoch()));
        self.open += 1;
    }

    /// The epoch up to which a lane's work is over once at most `pending` of its groups are left.
    pub(crate) fn target(&self, lane: u32, pending: u32) -> u32 {
        self.commits.iter().rev().filter(|(lanes, _)| lanes >> lane & 1 == 1).nth(pending as usize).map_or(0, |(_, epoch)| *epoch)
    }

    fn finish(&mut self, id: u64) {
        self.ops.retain(|op| op.id != id);
    }
}

/// A run of bytes to move.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Move {
    pub(crate) shared: u32,
    pub(crate) bytes: u32,
    /// Slot and offset; `None` is filled.
    pub(crate) global: Option<(usize, u64)>,
    /// Bytes beyond these are zero.
    pub(crate) valid: u32,
    pub(crate) lane: u8,
}

/// What a load brings in where the tensor ends, and how it rounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Style {
    pub(crate) ty: Option<MapType>,
    pub(crate) fill: Fill,
}

/// Bytes as they are.
pub(crate) const PLAIN: Style = Style { ty: None, fill: Fill::Zero };

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

/// What TMA changes on the way.
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
    pub(crate) fn issue(&mut self, warp: &Warp, loc: u32, clock: Clock, work: Work) -> u64 {
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

    pub(crate) fn unit(&self, warp: &Warp, unit: Unit) -> u32 {
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
            // Arrivals of one warp come in their order: a later one covers what an earlier one does, and must not stand in for it.
            Work::Arrive { after, .. } => !self.agents.iter().any(|other| {
                let earlier = other.id < agent.id && (other.cta, other.warp) == (agent.cta, agent.warp);
                after.contains(&other.id) || (earlier && matches!(other.work, Work::Arrive { .. }))
            }),
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
                agent.clock.extend(actor, Of::Seen, *lanes, u32::MAX, *epoch);
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
                        let of_sum = self.flag_of_sum(*op == Atomic::Add, *ty, true);
                        let name = Name { flags: flag::ATOMIC_CLUSTER | flag::ASYNC | of_sum, ..name };
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
                self.complete_sent_bytes(at, barrier.0, barrier.1, i64::from(count))?;
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
            extra: &[],
            cp: (u32::MAX - 1, 0),
            cta: owner.actor..owner.actor + stride,
            cluster: first..first + stride * owner.peers.len() as u32,
            launch: self.grids[owner.grid].first_actor,
            global,
            in_order: false,
            memo: Memo::default(),
        }
    }

    fn unit_word(name: Name) -> &'static str {
        if name.flags & flag::ASYNC == 0 { "this cp.async" } else { "this copy" }
    }

    /// A copy reads its tensor map, at a place in global memory, until it has completed: as `reader`, an actor in one of its epochs.
    pub(crate) fn hold_map(&mut self, at: Culprit, clock: &Clock, reader: (u32, u32), (slot, offset): (usize, u64)) -> Result<(), Fault> {
        // The writer's fence is another one than the async proxy's, and asked for where the map is taken over.
        let name = Name { actor: reader.0, epoch: reader.1, flags: 0, lane: UNIT };
        let access = self.unit_access(at.cta, clock, name, at.loc, true);
        // In halves, for a map may begin at every 64 bytes, and a page ends within it.
        for offset in [offset, offset + 64] {
            let (mut piece, start) = self.memory.piece(slot, offset);
            let checked = piece.check_read(&mut self.readers, start, 64, &access, name.lane);
            if let Err(conflict) = checked {
                return Err(self.conflict(at, "this copy", Place::Global { slot, offset }, conflict, false));
            }
        }
        Ok(())
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
                Err(conflict) => {
                    let conflict = Conflict { at: conflict.at + done, ..conflict };
                    return Err(self.conflict(at, Self::unit_word(name), place, conflict, false));
                }
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
            // Whoever has waited for the barrier that counts these bytes knows that they are there; somebody must before the CTA exits.
            if cta != at.cta {
                self.ctas[cta].visitors.insert(name.actor, (name.epoch, at.loc, name.lane));
            }
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
                let conflict = Conflict { at: conflict.at + done, ..conflict };
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
                name.flags = flag::ASYNC | flag::ATOMIC_GPU | self.flag_of_sum(op == BulkReduce::Add, ty, self.is_scratch(place));
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
}
