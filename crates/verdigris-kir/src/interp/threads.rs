//! Loads, stores and atomics by threads, and the fragment moves and products of one warp. What is usual about a weak access is done in
//! [`super::reach`]; here lane by lane, with every rule.

use super::alu::{self, Lanes};
use super::clock::{Clock, Of};
use super::decode::{Instruction, Source};
use super::finding::FindingKind;
use super::matrix;
use super::memory::{Memory, SHARED_BASE};
use super::reach::Reach;
use super::shadow::{Conflict, ConflictKind, flag};
use super::state::{Culprit, Fault, Machine, Unit, Warp};
use super::traffic::{sectors, wavefronts};
use super::warp::{Flow, culprit, each};
use crate::inst::{Atomic, Cache, Fence, MmaShape, Order, Scope, Space};
use crate::ir::Ty;

/// A place in memory that was checked against bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Global { slot: usize, offset: u64 },
    Shared { cta: usize, offset: u32 },
}

pub(crate) fn order_flags(order: Order) -> u8 {
    match order {
        Order::Weak => 0,
        Order::Volatile => flag::ATOMIC_GPU,
        Order::Relaxed(scope) | Order::Acquire(scope) | Order::Release(scope) | Order::AcqRel(scope) => match scope {
            Scope::Cta => flag::ATOMIC_CTA,
            Scope::Cluster => flag::ATOMIC_CLUSTER,
            Scope::Gpu | Scope::Sys => flag::ATOMIC_GPU,
        },
    }
}

/// The shared addresses of an access by lane, and the lanes.
fn shared_addresses(places: &[(usize, Place)]) -> ([u32; 32], u32) {
    let (mut addresses, mut lanes) = ([0; 32], 0);
    for &(lane, place) in places {
        if let Place::Shared { offset, .. } = place {
            addresses[lane] = offset;
            lanes |= 1 << lane;
        }
    }
    (addresses, lanes)
}

impl Machine<'_> {
    /// Words for a place, for findings.
    pub(crate) fn place_name(&self, place: Place, byte: usize) -> String {
        match place {
            Place::Global { slot, offset } => format!("byte {} of {}", offset + byte as u64, self.memory.buffers[slot].name),
            Place::Shared { cta, offset } => {
                let at = offset + byte as u32;
                let body = &self.decoded(cta).body;
                let relative = at.wrapping_sub(SHARED_BASE);
                for piece in &body.shared {
                    if relative >= piece.offset_bytes && relative < piece.offset_bytes + piece.bytes {
                        return format!("byte {} of shared {}", relative - piece.offset_bytes, piece.name);
                    }
                }
                format!("shared address {at:#x}")
            }
        }
    }

    pub(crate) fn conflict(&self, at: Culprit, who: &str, place: Place, conflict: Conflict, writes: bool) -> Fault {
        if self.memory.predecessor == Some(conflict.other.actor) {
            let (does, may) = if writes { ("writes", "read or write") } else { ("reads", "write") };
            let name = self.place_name(place, conflict.at);
            let message = format!(
                "{who} {does} {name} here, and the launch overlaps the one in front of the program, which may still {may} it: griddepcontrol.wait stands ahead of every global access"
            );
            return self.finding(FindingKind::Race, at, None, message);
        }
        let (other_cta, other) = self.describe(conflict.other.actor);
        let other_lane = conflict.other.lanes[conflict.byte];
        let other = if other_lane < 32 { format!("lane {other_lane} of {other}") } else { other };
        let line = self.line(other_cta.unwrap_or(at.cta), conflict.other.loc());
        let name = self.place_name(place, conflict.at);
        let did = if conflict.other_writes { "written" } else { "read" };
        let does = if writes { "writes" } else { "reads" };
        match conflict.kind {
            ConflictKind::Race => {
                let consequence = match (writes, conflict.other_writes) {
                    (true, true) => "either value may stay",
                    (true, false) => "the reader may get the new value",
                    (false, _) => "the reader may get the old value",
                };
                let message = format!("{who} {does} {name} here, {did} by {other} at {line}, and nothing orders the two: {consequence}");
                self.finding(FindingKind::Race, at, Some(line), message)
            }
            ConflictKind::UnorderedSums if !writes => {
                let message = format!(
                    "{who} reads {name} here, floats that were added up in no order, the last one by {other} at {line}: rounding depends on which came first, and the results are noted to have the same bits each time"
                );
                self.finding(FindingKind::UnorderedSums, at, Some(line), message)
            }
            ConflictKind::UnorderedSums => {
                let message = format!(
                    "{who} adds to {name} here, added to by {other} at {line}, and nothing orders the two: rounding depends on which comes first, and the results are noted to have the same bits each time"
                );
                self.finding(FindingKind::UnorderedSums, at, Some(line), message)
            }
            ConflictKind::ProxyFence => {
                let message = format!(
                    "{who} {does} {name} here through the async proxy, written by {other} at {line} without a fence.proxy.async by the writer after it: the async unit may see the old bytes"
                );
                self.finding(FindingKind::ProxyFence, at, Some(line), message)
            }
            ConflictKind::NonCoherent => {
                let message = format!(
                    "{who} {does} {name} here, {did} by {other} at {line} in the same launch, and one of the two is a non-coherent load: the read-only path may hold stale bytes"
                );
                self.finding(FindingKind::NonCoherent, at, Some(line), message)
            }
        }
    }

    /// Finds shared memory by an address of the CTA's or (with a rank in the top byte) of the cluster's window.
    pub(crate) fn shared_place(&self, at: Culprit, address: u64, bytes: u32, cluster: bool) -> Result<(usize, u32), Fault> {
        let owner = &self.ctas[at.cta];
        let rank = (address >> 24) as usize;
        let target = match (cluster, rank) {
            (_, 0) => at.cta,
            (true, rank) if rank <= owner.peers.len() => owner.peers[rank - 1],
            _ => {
                let message =
                    format!("shared address {address:#x} lies outside the window of the {}", if cluster { "cluster" } else { "CTA" });
                return Err(self.finding(FindingKind::OutOfBounds, at, None, message));
            }
        };
        let offset = (address & 0x00FF_FFFF) as u32;
        if self.ctas[target].exited {
            let [x, y, z] = self.ctas[target].index;
            let message =
                format!("shared memory of CTA {x},{y},{z} is accessed here, and that CTA has exited: its memory may belong to another CTA");
            return Err(self.finding(FindingKind::RemoteAfterExit, at, None, message));
        }
        let size = self.ctas[target].shared.len() as u32;
        if offset < SHARED_BASE || u64::from(offset) + u64::from(bytes) > u64::from(size) {
            let message = format!(
                "{bytes} bytes at offset {} of the CTA's shared memory, which has {} bytes",
                i64::from(offset) - i64::from(SHARED_BASE),
                size - SHARED_BASE
            );
            return Err(self.finding(FindingKind::OutOfBounds, at, None, message));
        }
        Ok((target, offset))
    }

    pub(crate) fn global_place(&self, at: Culprit, address: u64, bytes: u64, verb: &str) -> Result<(usize, u64), Fault> {
        self.memory.resolve(address, bytes).map_err(|near| {
            self.finding(
                FindingKind::OutOfBounds,
                at,
                None,
                format!("{bytes} bytes are {verb} {near}: the launch fails or other memory is hit"),
            )
        })
    }

    /// Address of each lane of a thread's access, with bounds and alignment checked; lowest lane first.
    fn places(
        &mut self,
        warp: &Warp,
        inst: &Instruction,
        exec: u32,
        space: Space,
        bytes: u32,
        verb: &str,
    ) -> Result<Vec<(usize, Place)>, Fault> {
        let base = self.need(warp, inst.ins[0], exec, inst.loc, "is an address")?;
        let offset = warp.lanes(inst.ins[1]);
        if let (Space::Global, Source::Reg(reg)) = (space, inst.ins[0]) {
            let wrapped = warp.wrapped[reg as usize] & exec;
            if wrapped != 0 {
                let at = culprit(warp, inst.loc, Some(wrapped.trailing_zeros()));
                let message = "this address comes from a 32-bit product that passed its range: a large tensor is accessed at the wrong place; multiply into 64 bits";
                return Err(self.finding(FindingKind::AddressWrap, at, None, message));
            }
        }
        let mut places = Vec::with_capacity(32);
        for lane in each(exec) {
            let at = culprit(warp, inst.loc, Some(lane as u32));
            let address = match space {
                Space::Global => base[lane].wrapping_add(offset[lane]),
                _ => u64::from((base[lane] as u32).wrapping_add(offset[lane] as u32)),
            };
            if !address.is_multiple_of(u64::from(bytes)) {
                let message =
                    format!("{bytes} bytes are {verb} at address {address:#x}, which is not a multiple of {bytes}: the launch fails");
                return Err(self.finding(FindingKind::Misaligned, at, None, message));
            }
            let place = match space {
                Space::Global => {
                    let (slot, offset) = self.global_place(at, address, u64::from(bytes), verb)?;
                    Place::Global { slot, offset }
                }
                _ => {
                    let (cta, offset) = self.shared_place(at, address, bytes, space == Space::Cluster)?;
                    self.check_barrier_memory(at, cta, offset, bytes, verb)?;
                    if cta != warp.cta {
                        let entry = (warp.epoch, inst.loc, lane as u8);
                        self.ctas[cta].visitors.insert(warp.actor, entry);
                    }
                    Place::Shared { cta, offset }
                }
            };
            places.push((lane, place));
        }
        Ok(places)
    }

    fn count_access(&mut self, warp: &Warp, places: &[(usize, Place)], bytes: u32, store: bool) {
        let launch = self.grids[self.ctas[warp.cta].grid].launch;
        if let Some((_, Place::Shared { .. })) = places.first() {
            let (addresses, lanes) = shared_addresses(places);
            self.count_shared(warp, &addresses, lanes, bytes);
            return;
        }
        let (mut addresses, mut lanes) = ([0; 32], 0);
        let mut fresh = 0;
        for &(lane, place) in places {
            if let Place::Global { slot, offset } = place {
                addresses[lane] = Memory::base(slot) + offset;
                lanes |= 1 << lane;
                fresh += self.memory.touch(slot, offset, bytes as usize, store, launch);
            }
        }
        self.count_global(warp, &addresses, lanes, bytes, fresh, store);
    }

    /// Counts an access of these lanes to shared memory, `bytes` each.
    pub(crate) fn count_shared(&mut self, warp: &Warp, addresses: &[u32; 32], lanes: u32, bytes: u32) {
        let (turns, least) = wavefronts(addresses, lanes, bytes);
        let counters = self.counters(warp.cta);
        counters.shared_requests += 1;
        counters.shared_wavefronts += turns;
        counters.bank_conflicts += turns - least;
    }

    /// Counts an access of these lanes to buffers, `bytes` each, of which `fresh` are touched for the first time.
    pub(crate) fn count_global(&mut self, warp: &Warp, addresses: &[u64; 32], lanes: u32, bytes: u32, fresh: u64, store: bool) {
        let total = u64::from(bytes) * u64::from(lanes.count_ones());
        let touched = sectors(addresses, lanes, u64::from(bytes));
        let counters = self.counters(warp.cta);
        if store {
            counters.global_store_bytes += total;
            counters.unique_store_bytes += fresh;
            counters.store_requests += 1;
            counters.store_sectors += touched;
        } else {
            counters.global_load_bytes += total;
            counters.unique_load_bytes += fresh;
            counters.load_requests += 1;
            counters.load_sectors += touched;
        }
    }

    pub(crate) fn launch_actor(&self, cta: usize) -> u32 {
        self.grids[self.ctas[cta].grid].first_actor
    }

    /// Reads up to 16 bytes of one lane; tells whether each was written.
    pub(crate) fn read_lane(&mut self, warp: &Warp, loc: u32, lane: usize, place: Place, out: &mut [u8], flags: u8) -> Result<u32, Fault> {
        let launch = self.launch_actor(warp.cta);
        let access = warp.access(&self.ctas[warp.cta], launch, loc, flags, matches!(place, Place::Global { .. }));
        let bytes = out.len();
        let (mut piece, start) = match place {
            Place::Global { slot, offset } => self.memory.piece(slot, offset),
            Place::Shared { cta, offset } => (self.ctas[cta].shared.piece(), offset as usize),
        };
        let checked = piece.check_read(&mut self.readers, start, bytes, &access, lane as u8);
        out.copy_from_slice(&piece.data[start..start + bytes]);
        match checked {
            Ok(true) => Ok(u32::MAX),
            Ok(false) => {
                let mut each = [false; 16];
                piece.written_each(start, &mut each[..bytes]);
                Ok(each.iter().enumerate().fold(0, |mask, (at, on)| mask | u32::from(*on) << at))
            }
            Err(conflict) => Err(self.conflict(culprit(warp, loc, Some(lane as u32)), "this thread", place, conflict, false)),
        }
    }

    pub(crate) fn write_lane(&mut self, warp: &Warp, loc: u32, lane: usize, place: Place, bytes: &[u8], flags: u8) -> Result<(), Fault> {
        let launch = self.launch_actor(warp.cta);
        let access = warp.access(&self.ctas[warp.cta], launch, loc, flags, matches!(place, Place::Global { .. }));
        let (mut piece, start) = match place {
            Place::Global { slot, offset } => self.memory.piece(slot, offset),
            Place::Shared { cta, offset } => (self.ctas[cta].shared.piece(), offset as usize),
        };
        let checked = piece.check_write(&mut self.readers, start, bytes.len(), &access, lane as u8);
        piece.data[start..start + bytes.len()].copy_from_slice(bytes);
        piece.mark(start, bytes.len());
        checked.map_err(|conflict| self.conflict(culprit(warp, loc, Some(lane as u32)), "this thread", place, conflict, true))
    }

    pub(crate) fn sync_key(place: Place) -> (u64, u32) {
        match place {
            Place::Global { slot, offset } => (Memory::base(slot) + offset, u32::MAX),
            Place::Shared { cta, offset } => (u64::from(offset), cta as u32),
        }
    }

    fn cp_actor(&self, warp: &Warp) -> u32 {
        let cta = &self.ctas[warp.cta];
        cta.actor + cta.actors.unit(Unit::CpAsync, warp.index)
    }

    /// What an ordered load takes over from the last release at the address.
    fn acquire_at(&mut self, warp: &mut Warp, key: (u64, u32), order: Order, lane: usize) {
        let Some(clock) = self.sync.get(&key) else { return };
        match order {
            Order::Weak | Order::Release(_) => {}
            Order::Acquire(_) | Order::AcqRel(_) => warp.acquire(1 << lane, clock),
            Order::Relaxed(_) | Order::Volatile => warp.found(lane, clock),
        }
    }

    /// The clock that an ordered store hands on.
    fn release_at(&mut self, warp: &mut Warp, order: Order, lane: usize) -> Option<Clock> {
        match order {
            Order::Weak | Order::Acquire(_) => None,
            Order::Release(_) | Order::AcqRel(_) => {
                let cp = self.cp_actor(warp);
                Some(warp.release(1 << lane, cp))
            }
            Order::Relaxed(_) | Order::Volatile => warp.fenced_view(1 << lane, self.cp_actor(warp)),
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the attributes of one instruction")]
    pub(crate) fn load(
        &mut self,
        warp: &mut Warp,
        inst: &Instruction,
        exec: u32,
        space: Space,
        element: u32,
        count: u8,
        order: Order,
        cache: Cache,
        byte: Option<bool>,
    ) -> Result<Flow, Fault> {
        let bytes = element * u32::from(count);
        let mut flags = order_flags(order);
        if matches!(cache, Cache::NonCoherent | Cache::NonCoherentNoAllocate) {
            flags |= flag::NON_COHERENT;
        }
        if order == Order::Weak
            && let Some(reach) = self.reach(warp, inst, exec, space, bytes)
        {
            return self.load_reach(warp, inst, &reach, element, flags, byte);
        }
        let places = self.places(warp, inst, exec, space, bytes, "loaded")?;
        self.count_access(warp, &places, bytes, false);
        let mut outs = [[0u64; 32]; 8];
        let mut poison = [0u32; 8];
        let mut seen = 0u64;
        for &(lane, place) in &places {
            let mut data = [0u8; 16];
            let written = self.read_lane(warp, inst.loc, lane, place, &mut data[..bytes as usize], flags)?;
            for at in 0..count as usize {
                let from = at * element as usize;
                let mut word = [0; 8];
                word[..element as usize].copy_from_slice(&data[from..from + element as usize]);
                let mut value = u64::from_le_bytes(word);
                if byte == Some(true) {
                    value = u64::from(value as u8 as i8 as i32 as u32);
                }
                outs[at][lane] = value;
                let mask = ((1u64 << element) - 1) as u32;
                if written >> from & mask != mask {
                    poison[at] |= 1 << lane;
                }
                seen = seen.wrapping_mul(31).wrapping_add(value);
            }
            if order != Order::Weak {
                self.acquire_at(warp, Self::sync_key(place), order, lane);
            }
        }
        if order != Order::Weak {
            let poll = (u64::from(warp.pc), seen);
            warp.polling = warp.last_poll == Some(poll);
            warp.last_poll = Some(poll);
        }
        for (at, reg) in inst.outs.iter().enumerate() {
            if let Some(reg) = reg {
                warp.set(*reg, exec, &outs[at], poison[at], inst.loc + 1);
            }
        }
        Ok(Flow::Next)
    }

    #[allow(clippy::too_many_arguments, reason = "the attributes of one instruction")]
    pub(crate) fn store(
        &mut self,
        warp: &mut Warp,
        inst: &Instruction,
        exec: u32,
        space: Space,
        element: u32,
        count: u8,
        order: Order,
    ) -> Result<Flow, Fault> {
        let bytes = element * u32::from(count);
        let is_written = inst.ins[2..].iter().all(|source| warp.poison_of(*source) & exec == 0);
        if order == Order::Weak
            && is_written
            && let Some(reach) = self.reach(warp, inst, exec, space, bytes)
        {
            self.count_reach(warp, &reach, true);
            return self.store_reach(warp, inst, &reach, element);
        }
        let places = self.places(warp, inst, exec, space, bytes, "stored")?;
        self.count_access(warp, &places, bytes, true);
        for source in &inst.ins[2..] {
            let bad = warp.poison_of(*source) & exec;
            if bad != 0 {
                return Err(self.unwritten(warp, *source, inst.loc, bad, "is stored"));
            }
        }
        let flags = order_flags(order);
        for &(lane, place) in &places {
            let mut data = [0u8; 16];
            for (at, source) in inst.ins[2..].iter().enumerate() {
                let value = warp.lanes(*source)[lane];
                let from = at * element as usize;
                data[from..from + element as usize].copy_from_slice(&value.to_le_bytes()[..element as usize]);
            }
            self.write_lane(warp, inst.loc, lane, place, &data[..bytes as usize], flags)?;
            if order == Order::Weak {
                if !self.sync.is_empty() {
                    self.sync.remove(&Self::sync_key(place));
                }
            } else {
                match self.release_at(warp, order, lane) {
                    Some(clock) => {
                        self.sync.insert(Self::sync_key(place), clock);
                    }
                    None => {
                        self.sync.remove(&Self::sync_key(place));
                    }
                }
            }
        }
        Ok(Flow::Next)
    }

    #[allow(clippy::too_many_arguments, reason = "the attributes of one instruction")]
    pub(crate) fn atomic(
        &mut self,
        warp: &mut Warp,
        inst: &Instruction,
        exec: u32,
        space: Space,
        op: Atomic,
        ty: Ty,
        count: u8,
        order: Order,
        returns: bool,
    ) -> Result<Flow, Fault> {
        let element = ty.bytes();
        let bytes = element * u32::from(count);
        let mut places = self.places(warp, inst, exec, space, bytes, "changed")?;
        self.count_access(warp, &places, bytes, true);
        for source in &inst.ins[2..] {
            let bad = warp.poison_of(*source) & exec;
            if bad != 0 {
                return Err(self.unwritten(warp, *source, inst.loc, bad, "goes into an atomic"));
            }
        }
        // An atomic is relaxed at least; the chip takes lanes in no order that anyone may rely on.
        let flags = order_flags(order).max(flag::ATOMIC_GPU * u8::from(order == Order::Weak));
        let turn = self.rng.below(places.len());
        places.rotate_left(turn);
        let operands: Vec<Lanes> = inst.ins[2..].iter().map(|source| *warp.lanes(*source)).collect();
        let mut old_values = [0u64; 32];
        let mut poison = 0;
        let mut seen = 0u64;
        for &(lane, place) in &places {
            let mut data = [0u8; 16];
            // Reading and writing is one access: the write's check covers the read's.
            let key = Self::sync_key(place);
            let written = self.peek(place, &mut data[..bytes as usize]);
            let swaps = op == Atomic::Exch;
            if written != u32::MAX && !swaps {
                let name = self.place_name(place, 0);
                let message = format!("an atomic changes {name}, which nothing wrote before: the result is whatever stood there");
                return Err(self.finding(FindingKind::UnwrittenMemory, culprit(warp, inst.loc, Some(lane as u32)), None, message));
            }
            for at in 0..count as usize {
                let from = at * element as usize;
                let mut word = [0; 8];
                word[..element as usize].copy_from_slice(&data[from..from + element as usize]);
                let old = u64::from_le_bytes(word);
                let swap = if op == Atomic::Cas { operands[1][lane] } else { 0 };
                let new = alu::atomic::apply(op, ty, space, old, operands[at][lane], swap)
                    .map_err(|error| self.finding(FindingKind::IllegalOperand, culprit(warp, inst.loc, None), None, error.to_string()))?;
                data[from..from + element as usize].copy_from_slice(&new.to_le_bytes()[..element as usize]);
                if at == 0 {
                    old_values[lane] = old;
                    poison |= u32::from(written != u32::MAX) << lane;
                }
                seen = seen.wrapping_mul(31).wrapping_add(old);
            }
            let of_sum = self.flag_of_sum(op == Atomic::Add, ty, self.is_scratch(place));
            self.write_lane(warp, inst.loc, lane, place, &data[..bytes as usize], flags | of_sum)?;
            let released = self.release_at(warp, order, lane);
            self.acquire_at(warp, key, order, lane);
            // A read-modify-write carries on the release that it found.
            if let Some(clock) = released {
                match self.sync.get_mut(&key) {
                    Some(chain) => chain.join(&clock),
                    None => {
                        self.sync.insert(key, clock);
                    }
                }
            }
        }
        if returns {
            // A compare-and-swap that keeps failing is a wait.
            let poll = (u64::from(warp.pc), seen);
            warp.polling = warp.last_poll == Some(poll);
            warp.last_poll = Some(poll);
            if let Some(Some(reg)) = inst.outs.first() {
                warp.set(*reg, exec, &old_values, poison, inst.loc + 1);
            }
        }
        Ok(Flow::Next)
    }

    /// What marks a sum whose place among others matters: of floats, where the same bits are asked for each time.
    pub(crate) fn flag_of_sum(&self, adds: bool, ty: Ty, is_scratch: bool) -> u8 {
        match adds && ty.is_float() && self.options.ordered_sums {
            false => 0,
            true => flag::ORDERED_SUM | if is_scratch { flag::SUM_OF_SCRATCH } else { 0 },
        }
    }

    /// Whether what stands there is seen by the run alone.
    pub(crate) fn is_scratch(&self, place: Place) -> bool {
        match place {
            Place::Global { slot, .. } => self.memory.buffers[slot].is_scratch,
            Place::Shared { .. } => true,
        }
    }

    /// Bytes without a check; all ones if every byte was written.
    pub(crate) fn peek(&mut self, place: Place, out: &mut [u8]) -> u32 {
        let bytes = out.len();
        let (piece, start) = match place {
            Place::Global { slot, offset } => self.memory.piece(slot, offset),
            Place::Shared { cta, offset } => (self.ctas[cta].shared.piece(), offset as usize),
        };
        out.copy_from_slice(&piece.data[start..start + bytes]);
        let mut each = [true; 16];
        piece.written_each(start, &mut each[..bytes]);
        if each.iter().all(|&on| on) { u32::MAX } else { 0 }
    }

    pub(crate) fn discard(&mut self, warp: &mut Warp, inst: &Instruction, exec: u32) -> Result<Flow, Fault> {
        let base = self.need(warp, inst.ins[0], exec, inst.loc, "is an address")?;
        let offset = warp.lanes(inst.ins[1]);
        for lane in each(exec) {
            let at = culprit(warp, inst.loc, Some(lane as u32));
            let address = base[lane].wrapping_add(offset[lane]);
            if !address.is_multiple_of(128) {
                let message = format!("discard of 128 bytes at address {address:#x}, which is not a multiple of 128");
                return Err(self.finding(FindingKind::Misaligned, at, None, message));
            }
            let (slot, offset) = self.global_place(at, address, 128, "discarded")?;
            for part in 0..8 {
                let place = Place::Global { slot, offset: offset + 16 * part };
                self.write_lane(warp, inst.loc, lane, place, &[0xA5; 16], 0)?;
            }
            let (mut piece, start) = self.memory.piece(slot, offset);
            piece.mark_each(start, &[false; 128]);
        }
        Ok(Flow::Next)
    }

    /// Rows of 16 bytes whose addresses the first `8 · count` lanes give.
    fn matrix_rows(&mut self, warp: &Warp, inst: &Instruction, exec: u32, count: u8, verb: &str) -> Result<Vec<Place>, Fault> {
        self.converged(warp, inst, exec)?;
        let lanes = ((1u64 << (8 * u32::from(count))) - 1) as u32;
        let places = self.places(warp, inst, lanes, Space::Shared, 16, verb)?;
        let (addresses, lanes) = shared_addresses(&places);
        let (turns, least) = wavefronts(&addresses, lanes, 16);
        let counters = self.counters(warp.cta);
        counters.shared_requests += 1;
        counters.shared_wavefronts += turns;
        counters.bank_conflicts += turns - least;
        Ok(places.into_iter().map(|(_, place)| place).collect())
    }

    /// Where the rows reach, if nothing about it is unusual.
    fn matrix_reach(&self, warp: &Warp, inst: &Instruction, exec: u32, count: u8) -> Option<Reach> {
        let lanes = ((1u64 << (8 * u32::from(count))) - 1) as u32;
        if exec == warp.full { self.reach(warp, inst, lanes, Space::Shared, 16) } else { None }
    }

    pub(crate) fn ldmatrix(&mut self, warp: &mut Warp, inst: &Instruction, exec: u32, count: u8, transpose: bool) -> Result<Flow, Fault> {
        if let Some(reach) = self.matrix_reach(warp, inst, exec, count) {
            self.count_reach(warp, &reach, false);
            let mut rows = [[0u8; 16]; 32];
            let holes = self.read_rows(warp, inst.loc, &reach, &mut rows)?;
            for (index, data) in rows.chunks_exact(8).enumerate().take(count as usize) {
                let holes = each(holes >> (8 * index) & 0xFF);
                let poison = holes.fold(0, |lanes, row| lanes | if transpose { u32::MAX } else { 0xF << (4 * row) });
                if let (Some(reg), Ok(data)) = (inst.outs[index], data.try_into()) {
                    warp.set(reg, exec, &matrix::ldmatrix(data, transpose), poison, inst.loc + 1);
                }
            }
            return Ok(Flow::Next);
        }
        let rows = self.matrix_rows(warp, inst, exec, count, "loaded")?;
        for index in 0..count as usize {
            let mut data = [[0u8; 16]; 8];
            let mut poison = 0;
            for row in 0..8 {
                let written = self.read_lane(warp, inst.loc, 8 * index + row, rows[8 * index + row], &mut data[row], 0)?;
                if written & 0xFFFF != 0xFFFF {
                    // Which lanes get the bytes depends on the form; a row with a hole spoils the lanes that hold any of it.
                    poison |= if transpose { u32::MAX } else { 0xF << (4 * row) };
                }
            }
            if let Some(reg) = inst.outs[index] {
                warp.set(reg, exec, &matrix::ldmatrix(&data, transpose), poison, inst.loc + 1);
            }
        }
        Ok(Flow::Next)
    }

    pub(crate) fn stmatrix(&mut self, warp: &mut Warp, inst: &Instruction, exec: u32, count: u8, transpose: bool) -> Result<Flow, Fault> {
        let is_written = inst.ins[2..].iter().all(|source| warp.poison_of(*source) & exec == 0);
        if is_written && let Some(reach) = self.matrix_reach(warp, inst, exec, count) {
            self.count_reach(warp, &reach, true);
            let mut rows = [[0u8; 16]; 32];
            for (index, data) in rows.chunks_exact_mut(8).enumerate().take(count as usize) {
                data.copy_from_slice(&matrix::stmatrix(warp.lanes(inst.ins[2 + index]), transpose));
            }
            self.write_rows(warp, inst.loc, &reach, &rows)?;
            return Ok(Flow::Next);
        }
        let rows = self.matrix_rows(warp, inst, exec, count, "stored")?;
        for index in 0..count as usize {
            let value = self.need(warp, inst.ins[2 + index], exec, inst.loc, "is stored")?;
            let data = matrix::stmatrix(value, transpose);
            for row in 0..8 {
                self.write_lane(warp, inst.loc, 8 * index + row, rows[8 * index + row], &data[row], 0)?;
            }
        }
        Ok(Flow::Next)
    }

    pub(crate) fn mma(&mut self, warp: &mut Warp, inst: &Instruction, exec: u32, shape: &MmaShape) -> Result<Flow, Fault> {
        self.converged(warp, inst, exec)?;
        let mut ins = Vec::with_capacity(inst.ins.len());
        for source in &inst.ins {
            ins.push(self.need(warp, *source, exec, inst.loc, "goes into a matrix product")?);
        }
        let mut outs = vec![[0u64; 32]; inst.outs.len()];
        matrix::mma(shape, &ins, &mut outs)
            .map_err(|error| self.finding(FindingKind::IllegalOperand, culprit(warp, inst.loc, None), None, error.to_string()))?;
        for (reg, out) in inst.outs.iter().zip(&outs) {
            if let Some(reg) = reg {
                warp.set(*reg, exec, out, 0, 0);
            }
        }
        self.counters(warp.cta).macs += u64::from(shape.m) * u64::from(shape.n) * u64::from(shape.k);
        Ok(Flow::Next)
    }

    pub(crate) fn fence(&mut self, warp: &mut Warp, inst: &Instruction, exec: u32, fence: Fence) -> Result<Flow, Fault> {
        let cp = self.cp_actor(warp);
        match fence {
            Fence::AcqRel(_) | Fence::Sc(_) => {
                warp.fence_acquires(exec);
                warp.fence_releases(exec);
            }
            Fence::MbarrierInit => self.mbarriers_visible(warp),
            Fence::ProxyAsyncShared | Fence::ProxyAsyncGlobal | Fence::ProxyAsync => {
                let (shared, global) = (!matches!(fence, Fence::ProxyAsyncGlobal), !matches!(fence, Fence::ProxyAsyncShared));
                let (actor, epoch, full, waited) = (warp.actor, warp.epoch, warp.full, warp.cp_waited);
                let cta = &self.ctas[warp.cta];
                let units = cta.actor + cta.actors.unit(Unit::CpAsync, 0)..cta.actor + cta.actors.unit(Unit::BulkRead, 0);
                let apply = |clock: &mut Clock| {
                    if global {
                        clock.extend(actor, Of::FencedGlobal, exec, full, epoch);
                    }
                    if shared {
                        clock.extend(actor, Of::FencedShared, exec, full, epoch);
                        // Whoever waited for a cp.async may fence what it wrote.
                        units.clone().for_each(|unit| clock.fence_shared(unit, exec, full, if unit == cp { waited } else { 0 }));
                    }
                };
                apply(&mut warp.clock);
                warp.extra.iter_mut().filter(|(lanes, _)| lanes & exec != 0).for_each(|(_, extra)| apply(extra));
                warp.epoch += 1;
                if shared {
                    self.mbarriers_visible(warp);
                }
            }
            Fence::TensormapRelease(_) => {
                self.map_releases.insert(warp.actor, warp.epoch);
                warp.fence_releases(exec);
            }
            Fence::TensormapAcquire(_) => {
                let address = self.need(warp, inst.ins[0], exec, inst.loc, "is the address of a tensor map")?;
                self.acquire_maps(warp, inst.loc, exec, address)?;
                warp.fence_acquires(exec);
            }
        }
        Ok(Flow::Next)
    }
}
