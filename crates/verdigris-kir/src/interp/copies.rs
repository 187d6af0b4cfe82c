//! The instructions that give async units work, and those that wait for it.

use super::agent::{Move, PLAIN, PeerSource, Style, Work};
use super::alu::Lanes;
use super::clock::Of;
use super::decode::Instruction;
use super::finding::FindingKind;
use super::machine::MAP_MAGIC;
use super::memory::PARAM_BASE;
use super::shadow::{NO_ACTOR, Stamp, UNIT};
use super::state::{Culprit, Fault, Machine, MapAcquired, Unit, Wait, Warp};
use super::tensor;
use super::threads::Place;
use super::warp::{Flow, culprit, each};
use crate::inst::{Atomic, BulkReduce, MapField, Space};
use crate::ir::Ty;
use crate::program::MapSpec;

/// A tensor map that a copy uses.
struct UsedMap {
    base: u64,
    spec: MapSpec,
    /// Slot and offset of a map in global memory.
    place: Option<(usize, u64)>,
}

impl Machine<'_> {
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
            // Its own copies, and for the lanes that wait alone.
            let mut waited = warp.clock.fresh();
            waited.extend(cp, Of::Seen, exec, warp.full, least);
            warp.acquire(exec, &waited);
        }
        Ok(Flow::Next)
    }

    pub(crate) fn cp_async_arrive(&mut self, warp: &mut Warp, inst: &Instruction, exec: u32, no_increment: bool) -> Result<Flow, Fault> {
        let base = *self.need(warp, inst.ins[0], exec, inst.loc, "is the address of an mbarrier")?;
        let offset = *warp.lanes(inst.ins[1]);
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

    fn copy_operands(&self, warp: &Warp, inst: &Instruction, exec: u32) -> Result<Vec<Lanes>, Fault> {
        inst.ins.iter().map(|source| self.need(warp, *source, exec, inst.loc, "steers a copy").copied()).collect()
    }

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

    pub(crate) fn bulk_load(&mut self, warp: &mut Warp, inst: &Instruction, exec: u32, multicast: bool) -> Result<Flow, Fault> {
        let operands = self.copy_operands(warp, inst, exec)?;
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
        let operands = self.copy_operands(warp, inst, exec)?;
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
        let operands = self.copy_operands(warp, inst, exec)?;
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
        let to = *self.need(warp, inst.ins[0], exec, inst.loc, "is an address")?;
        let barrier = *self.need(warp, inst.ins[1], exec, inst.loc, "is the address of an mbarrier")?;
        let values: Result<Vec<_>, Fault> =
            inst.ins[2..].iter().map(|source| self.need(warp, *source, exec, inst.loc, "is stored").copied()).collect();
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
        // A unit's accesses have no lane: whoever waits knows of all up to its own group, and no lane that did not wait.
        let mut waited = warp.clock.fresh();
        let units = if read { &[Unit::BulkRead][..] } else { &[Unit::BulkRead, Unit::BulkWrite] };
        for &unit in units {
            let actor = self.unit(warp, unit);
            waited.raise(actor, Of::Seen, least);
        }
        warp.acquire(exec, &waited);
        Ok(Flow::Next)
    }

    // ---- tensor copies ---------------------------------------------------------------------------------------------

    /// The tensor map at a generic address, for a lane of a warp to use, and where in global memory it is, if it is there.
    fn map_at(&mut self, warp: &Warp, at: Culprit, address: u64) -> Result<UsedMap, Fault> {
        if !address.is_multiple_of(64) {
            return Err(self.finding(
                FindingKind::Misaligned,
                at,
                None,
                format!("a tensor map at address {address:#x}, which is not a multiple of 64"),
            ));
        }
        let mut bytes = [0u8; 16];
        let mut place = None;
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
            let lane = at.lane.unwrap_or(0) as usize;
            self.read_lane(warp, at.loc, lane, Place::Global { slot, offset }, &mut bytes, 0)?;
            self.map_taken_over(warp, at, address, (slot, offset))?;
            place = Some((slot, offset));
        }
        match self.decode_map(&bytes) {
            Some((base, spec)) => Ok(UsedMap { base, spec, place }),
            None => {
                let message = format!("there is no tensor map at address {address:#x}");
                Err(self.finding(FindingKind::IllegalOperand, at, None, message))
            }
        }
    }

    /// Who wrote the map at a place in global memory, and where, if that was while this program ran and is not over.
    fn map_writer(&mut self, warp: &Warp, (slot, offset): (usize, u64)) -> Option<Stamp> {
        let (piece, start) = self.memory.piece(slot, offset);
        let stamp = piece.cells[start / 4].write;
        (stamp.actor != NO_ACTOR && stamp.actor >= warp.clock.horizon).then_some(stamp)
    }

    /// TMA reads a map through a proxy of its own: the writer hands it over, and the user takes it over, each by a fence.
    fn map_taken_over(&mut self, warp: &Warp, at: Culprit, address: u64, place: (usize, u64)) -> Result<(), Fault> {
        let Some(stamp) = self.map_writer(warp, place) else { return Ok(()) };
        let (writer, _) = self.describe(stamp.actor);
        let line = self.line(writer.unwrap_or(at.cta), stamp.loc());
        let name = self.place_name(Place::Global { slot: place.0, offset: place.1 }, 0);
        if self.map_releases.get(&stamp.actor).is_none_or(|&epoch| epoch < stamp.epoch) {
            let message = format!(
                "the tensor map at {name} was written at {line}, and the writer ran no fence.proxy.tensormap release after it: TMA may see the old map"
            );
            return Err(self.finding(FindingKind::ProxyFence, at, Some(line), message));
        }
        let lane = at.lane.unwrap_or(0);
        let taken = self.ctas[warp.cta].maps_acquired.iter().any(|(&(of, by), acquired)| {
            let ordered = (by == warp.actor && acquired.lanes >> lane & 1 == 1)
                || each(acquired.lanes).any(|other| warp.knows(lane as u8, by, acquired.epoch, other as u8));
            of == address && acquired.written == (stamp.actor, stamp.epoch) && ordered
        });
        if taken {
            return Ok(());
        }
        let message = format!(
            "the tensor map at {name} was written at {line}, and no fence.proxy.tensormap acquire of it stands between that and this use: TMA may use the map that it holds in its cache"
        );
        Err(self.finding(FindingKind::ProxyFence, at, Some(line), message))
    }

    /// `fence.proxy.tensormap::generic.acquire`: what was written to these maps so far is taken over.
    pub(crate) fn acquire_maps(&mut self, warp: &Warp, loc: u32, exec: u32, address: &[u64; 32]) -> Result<(), Fault> {
        for lane in each(exec) {
            if address[lane] >= PARAM_BASE {
                continue;
            }
            let at = culprit(warp, loc, Some(lane as u32));
            let place = self.global_place(at, address[lane], 128, "taken over as a tensor map")?;
            let Some(stamp) = self.map_writer(warp, place) else { continue };
            let fresh = MapAcquired { written: (stamp.actor, stamp.epoch), epoch: warp.epoch, lanes: 0 };
            let entry = self.ctas[warp.cta].maps_acquired.entry((address[lane], warp.actor)).or_insert(fresh);
            if entry.written != fresh.written {
                *entry = fresh;
            }
            entry.epoch = warp.epoch;
            entry.lanes |= 1 << lane;
        }
        Ok(())
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
        let operands = self.copy_operands(warp, inst, exec)?;
        let rank = rank as usize;
        let offsets_at = 2 + rank;
        let barrier_at = offsets_at + if im2col { rank - 2 } else { 0 };
        for lane in each(exec) {
            let at = culprit(warp, inst.loc, Some(lane as u32));
            let value = |index: usize| operands[index][lane];
            let UsedMap { base, spec, place } = self.map_at(warp, at, value(1))?;
            self.check_map(at, base, &spec, rank, im2col)?;
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
            let style = Style { ty: Some(spec.decl.ty), fill: spec.fill };
            if let Some(place) = place {
                let (cta, barrier) = targets[0];
                let reader = self.copy_actor(at, cta, barrier)?;
                self.hold_map(at, &clock, reader, place)?;
            }
            self.issue(warp, inst.loc, clock, Work::Load { moves, targets, style });
        }
        Ok(Flow::Next)
    }

    fn check_map(&self, at: Culprit, base: u64, spec: &MapSpec, rank: usize, im2col: bool) -> Result<(), Fault> {
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
        // The map may have been changed in memory since the launch.
        tensor::check(spec)
            .and_then(|()| tensor::check_address(base))
            .map_err(|error| self.finding(FindingKind::IllegalOperand, at, None, error.to_string()))
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
        let operands = self.copy_operands(warp, inst, exec)?;
        let rank = rank as usize;
        for lane in each(exec) {
            let at = culprit(warp, inst.loc, Some(lane as u32));
            let value = |index: usize| operands[index][lane];
            let UsedMap { base, spec, place } = self.map_at(warp, at, value(0))?;
            self.check_map(at, base, &spec, rank, im2col)?;
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
            if let Some(place) = place {
                // The unit's, which has read the map when it has read its source.
                let reader = (self.unit(warp, Unit::BulkRead), warp.bulk.epoch());
                let cp = self.unit(warp, Unit::CpAsync);
                let clock = warp.release(1 << lane, cp);
                self.hold_map(at, &clock, reader, place)?;
            }
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
        for lane in 0..32u32 {
            let mut data = [0; 4];
            let from = Place::Shared { cta, offset: source + 4 * lane };
            if self.read_lane(warp, inst.loc, lane as usize, from, &mut data, 0)? & 0xF != 0xF {
                let message = format!("{} is published as part of a tensor map, and nothing wrote it", self.place_name(from, 0));
                return Err(self.finding(FindingKind::UnwrittenMemory, culprit(warp, inst.loc, Some(lane)), None, message));
            }
            let to = Place::Global { slot, offset: target + 4 * u64::from(lane) };
            self.write_lane(warp, inst.loc, lane as usize, to, &data, 0)?;
        }
        self.map_releases.insert(warp.actor, warp.epoch);
        let cp = self.unit(warp, Unit::CpAsync);
        // The lanes do this together, and so know of each other's part.
        warp.synchronize(cp);
        warp.fence_releases(exec);
        Ok(Flow::Next)
    }
}
