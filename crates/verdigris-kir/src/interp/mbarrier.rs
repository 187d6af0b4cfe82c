//! Mbarriers: phases, arrivals and bytes.
//!
//! A phase ends when no arrival is pending and the count of bytes stands at zero; the count may be negative in between, since an async
//! unit may report bytes before a thread expects them. What arrivals released before a phase ended, waiters of that phase acquire: all of it those
//! that acquire from the cluster, those that acquire from their CTA what its own threads released. Bytes that a load brings are loaded for the
//! CTA in whose memory they land, whoever asked for it; bytes that another CTA sends out of its memory or registers are that CTA's.

use super::clock::{Clock, Of};
use super::decode::Instruction;
use super::finding::FindingKind;
use super::shadow::UNIT;
use super::state::{Culprit, Fault, Machine, Unit, Wait, Warp};
use super::threads::Place;
use super::warp::{Flow, culprit, each};
use crate::inst::{Op, Scope, Space};

/// Bits of the pending count in a phase token.
const TOKEN_BITS: u32 = 20;
const MAX_COUNT: u64 = (1 << TOKEN_BITS) - 1;

/// One live mbarrier.
#[derive(Debug)]
pub(crate) struct Mbarrier {
    pub(crate) count: u32,
    pub(crate) pending: u32,
    pub(crate) bytes: i64,
    pub(crate) phase: u64,
    /// The actor for copies that complete here, and the epoch of phase 0.
    pub(crate) actor: u32,
    pub(crate) first_epoch: u32,
    /// The last epoch in which a copy wrote.
    pub(crate) last_copy: Option<(u32, u32)>,
    init: (u32, u32, u8, u32),
    /// The init was fenced for other CTAs and async units.
    visible: bool,
    /// The turn of the cluster's barrier at which a fenced init was handed on without further order.
    handed_on: Option<u32>,
    /// What all who arrived released.
    released: Released,
    /// What threads of the barrier's own CTA released, where a cluster has others.
    released_by_own: Option<Released>,
    /// Another CTA sent some of this phase's bytes.
    has_bytes_of_peers: bool,
}

/// What arrivals hand on to those who wait.
#[derive(Debug)]
struct Released {
    /// So far.
    clock: Clock,
    /// Up to the end of the last phase.
    done: Clock,
}

impl Released {
    fn nothing(like: &Clock) -> Self {
        Released { clock: like.fresh(), done: like.fresh() }
    }
}

impl Mbarrier {
    /// What a wait for the last phase acquires from this scope.
    fn acquired(&self, scope: Scope) -> &Clock {
        match &self.released_by_own {
            Some(own) if scope == Scope::Cta => &own.done,
            _ => &self.released.done,
        }
    }

    pub(crate) fn epoch(&self) -> u32 {
        self.first_epoch + self.phase as u32 + 1
    }
}

/// Kinds of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// By the number of the operand.
    Count,
    /// Once, and the operand's bytes are expected.
    Expect,
    /// By the number of the operand, and never again.
    Drop,
}

impl Machine<'_> {
    /// Threads and copies must leave the words of a live mbarrier alone.
    pub(crate) fn check_barrier_memory(&self, at: Culprit, cta: usize, offset: u32, bytes: u32, verb: &str) -> Result<(), Fault> {
        let hit = self.ctas[cta].mbarriers.range(offset.saturating_sub(7)..offset + bytes).next();
        let Some((&address, barrier)) = hit else { return Ok(()) };
        let line = self.line(cta, barrier.init.3);
        let message = format!(
            "memory of {} is {verb} here as plain bytes; it was initialized at {line} and is alive: invalidate it first",
            self.barrier_name(cta, address)
        );
        Err(self.finding(FindingKind::MbarrierMisuse, at, Some(line), message))
    }

    /// Finds a live mbarrier and checks that its initialization is ordered before `knows`.
    pub(crate) fn find_barrier(&self, at: Culprit, address: u64, cluster: bool) -> Result<(usize, u32), Fault> {
        if !address.is_multiple_of(8) {
            let message = format!("an mbarrier at shared address {address:#x}, which is not a multiple of 8");
            return Err(self.finding(FindingKind::Misaligned, at, None, message));
        }
        let (cta, offset) = self.shared_place(at, address, 8, cluster)?;
        if !self.ctas[cta].mbarriers.contains_key(&offset) {
            let message =
                format!("{} is used here, and nothing has initialized it: the outcome is undefined", self.barrier_name(cta, offset));
            return Err(self.finding(FindingKind::MbarrierMisuse, at, None, message));
        }
        Ok((cta, offset))
    }

    fn ordered_after_init(&self, warp: &Warp, at: Culprit, cta: usize, offset: u32) -> Result<(), Fault> {
        let barrier = &self.ctas[cta].mbarriers[&offset];
        let (actor, epoch, lane, loc) = barrier.init;
        let mine = at.lane.unwrap_or(0) as u8;
        let known = (actor == warp.actor && lane == mine)
            || warp.knows(mine, actor, epoch, lane)
            || barrier.handed_on.is_some_and(|turn| warp.cluster_turns > turn);
        if !known {
            let line = self.line(cta, loc);
            let message = format!(
                "{} is used here, and nothing orders that behind its initialization at {line}: it may not exist yet",
                self.barrier_name(cta, offset)
            );
            return Err(self.finding(FindingKind::Race, at, Some(line), message));
        }
        if cta != warp.cta {
            self.visible(at, cta, offset, "another CTA")?;
        }
        Ok(())
    }

    /// Other CTAs and async units see an mbarrier after a fence by the thread that made it.
    fn visible(&self, at: Culprit, cta: usize, offset: u32, who: &str) -> Result<(), Fault> {
        let barrier = &self.ctas[cta].mbarriers[&offset];
        if barrier.visible {
            return Ok(());
        }
        let line = self.line(cta, barrier.init.3);
        let message = format!(
            "{} is used by {who} here, and the thread that initialized it at {line} ran no fence.mbarrier_init (or fence.proxy.async) after it: it may not be visible there",
            self.barrier_name(cta, offset)
        );
        Err(self.finding(FindingKind::ProxyFence, at, Some(line), message))
    }

    /// The mbarrier that a copy is to complete on.
    pub(crate) fn copy_barrier(&self, warp: &Warp, at: Culprit, address: u64) -> Result<(usize, u32), Fault> {
        let (cta, offset) = self.find_barrier(at, address, true)?;
        self.ordered_after_init(warp, at, cta, offset)?;
        self.visible(at, cta, offset, "an async unit")?;
        Ok((cta, offset))
    }

    pub(crate) fn mbarriers_visible(&mut self, warp: &Warp) {
        for barrier in self.ctas[warp.cta].mbarriers.values_mut() {
            if barrier.init.0 == warp.actor {
                barrier.visible = true;
            }
        }
    }

    /// `fence.mbarrier_init` releases the inits before it, and nothing else, at the warp's next arrival at the cluster's barrier, the one of turn `turn`.
    pub(crate) fn hand_on_mbarriers(&mut self, warp: &Warp, turn: u32) {
        for barrier in self.ctas[warp.cta].mbarriers.values_mut() {
            if barrier.init.0 == warp.actor && barrier.visible {
                barrier.handed_on.get_or_insert(turn);
            }
        }
    }

    fn address(&self, warp: &Warp, inst: &Instruction, exec: u32) -> Result<[u64; 32], Fault> {
        let base = self.need(warp, inst.ins[0], exec, inst.loc, "is the address of an mbarrier")?;
        let offset = warp.lanes(inst.ins[1]);
        Ok(std::array::from_fn(|lane| u64::from((base[lane] as u32).wrapping_add(offset[lane] as u32))))
    }

    fn cp_unit(&self, warp: &Warp) -> u32 {
        self.ctas[warp.cta].actor + self.ctas[warp.cta].actors.unit(Unit::CpAsync, warp.index)
    }

    pub(crate) fn mbarrier_init(&mut self, warp: &mut Warp, inst: &Instruction, exec: u32) -> Result<Flow, Fault> {
        let address = self.address(warp, inst, exec)?;
        let count = self.need(warp, inst.ins[2], exec, inst.loc, "is the count of an mbarrier")?;
        for lane in each(exec) {
            let at = culprit(warp, inst.loc, Some(lane as u32));
            if !address[lane].is_multiple_of(8) {
                let message = format!("an mbarrier at shared address {:#x}, which is not a multiple of 8", address[lane]);
                return Err(self.finding(FindingKind::Misaligned, at, None, message));
            }
            let (cta, offset) = self.shared_place(at, address[lane], 8, false)?;
            if let Some(old) = self.ctas[cta].mbarriers.get(&offset) {
                let line = self.line(cta, old.init.3);
                let message = format!(
                    "{} is initialized here and was at {line} already; it is alive: invalidate it first",
                    self.barrier_name(cta, offset)
                );
                return Err(self.finding(FindingKind::MbarrierMisuse, at, Some(line), message));
            }
            self.check_barrier_memory(at, cta, offset, 8, "initialized")?;
            if count[lane] == 0 || count[lane] > MAX_COUNT {
                let message = format!("an mbarrier with {} arrivals a phase: 1 to {MAX_COUNT} are possible", count[lane] as u32);
                return Err(self.finding(FindingKind::MbarrierMisuse, at, None, message));
            }
            self.write_lane(warp, inst.loc, lane, Place::Shared { cta, offset }, &[0; 8], 0)?;
            let owner = &mut self.ctas[cta];
            let next = owner.barrier_actors.len() as u32;
            let entry = owner.barrier_actors.entry(offset).or_insert((next.min(owner.actors.barriers - 1), 0));
            let (index, first_epoch) = *entry;
            let barrier = Mbarrier {
                count: count[lane] as u32,
                pending: count[lane] as u32,
                bytes: 0,
                phase: 0,
                actor: owner.actor + owner.actors.barrier(index),
                first_epoch,
                last_copy: None,
                init: (warp.actor, warp.epoch, lane as u8, inst.loc),
                visible: false,
                handed_on: None,
                released: Released::nothing(&warp.clock),
                released_by_own: (owner.peers.len() > 1).then(|| Released::nothing(&warp.clock)),
                has_bytes_of_peers: false,
            };
            owner.mbarriers.insert(offset, barrier);
        }
        Ok(Flow::Next)
    }

    pub(crate) fn mbarrier_invalidate(&mut self, warp: &mut Warp, inst: &Instruction, exec: u32) -> Result<Flow, Fault> {
        let address = self.address(warp, inst, exec)?;
        for lane in each(exec) {
            let at = culprit(warp, inst.loc, Some(lane as u32));
            let (cta, offset) = self.find_barrier(at, address[lane], false)?;
            self.ordered_after_init(warp, at, cta, offset)?;
            if let Some(barrier) = self.ctas[cta].mbarriers.remove(&offset)
                && let Some(entry) = self.ctas[cta].barrier_actors.get_mut(&offset)
            {
                entry.1 = barrier.epoch();
            }
            self.write_lane(warp, inst.loc, lane, Place::Shared { cta, offset }, &[0; 8], 0)?;
        }
        Ok(Flow::Next)
    }

    /// Ends the phase if it is complete.
    fn settle(&mut self, cta: usize, offset: u32) {
        let Some(barrier) = self.ctas[cta].mbarriers.get_mut(&offset) else { return };
        if barrier.pending != 0 || barrier.bytes != 0 {
            return;
        }
        let epoch = barrier.epoch();
        let actor = barrier.actor;
        barrier.released.clock.raise(actor, Of::Seen, epoch);
        barrier.released.done = barrier.released.clock.clone();
        if let Some(own) = &mut barrier.released_by_own {
            // The bytes of a phase count together.
            if !std::mem::take(&mut barrier.has_bytes_of_peers) {
                own.clock.raise(actor, Of::Seen, epoch);
            }
            own.done = own.clock.clone();
        }
        barrier.phase += 1;
        barrier.pending = barrier.count;
        self.wake(cta);
    }

    /// Counts arrivals, with what the arriving lanes hand on.
    #[allow(clippy::too_many_arguments, reason = "one arrival in all its forms")]
    pub(crate) fn arrive(
        &mut self,
        at: Culprit,
        cta: usize,
        offset: u32,
        arrivals: u32,
        bytes: i64,
        drop: bool,
        view: &Clock,
    ) -> Result<(), Fault> {
        let barrier = self.ctas[cta].mbarriers.get_mut(&offset).expect("found before");
        if arrivals > barrier.pending {
            let (pending, count, phase) = (barrier.pending, barrier.count, barrier.phase);
            let message = format!(
                "{arrivals} arrivals at {} where {pending} of {count} are pending in phase {phase}: more threads arrive than it was made for, and the phases run out of step",
                self.barrier_name(cta, offset)
            );
            return Err(self.finding(FindingKind::MbarrierMisuse, at, None, message));
        }
        barrier.released.clock.join(view);
        if let Some(own) = barrier.released_by_own.as_mut().filter(|_| at.cta == cta) {
            own.clock.join(view);
        }
        barrier.bytes += bytes;
        barrier.pending -= arrivals;
        if drop {
            barrier.count -= arrivals;
        }
        self.check_bytes(at, cta, offset)?;
        self.settle(cta, offset);
        Ok(())
    }

    fn check_bytes(&self, at: Culprit, cta: usize, offset: u32) -> Result<(), Fault> {
        let bytes = self.ctas[cta].mbarriers[&offset].bytes;
        if bytes.unsigned_abs() > MAX_COUNT {
            let message = format!("{} stands at {bytes} bytes: ±{MAX_COUNT} are possible", self.barrier_name(cta, offset));
            return Err(self.finding(FindingKind::MbarrierMisuse, at, None, message));
        }
        Ok(())
    }

    /// Reports bytes as arrived that another CTA may have sent.
    pub(crate) fn complete_sent_bytes(&mut self, at: Culprit, cta: usize, offset: u32, bytes: i64) -> Result<(), Fault> {
        if let Some(barrier) = self.ctas[cta].mbarriers.get_mut(&offset) {
            barrier.has_bytes_of_peers |= at.cta != cta;
        }
        self.complete_bytes(at, cta, offset, bytes)
    }

    /// Reports bytes as arrived.
    pub(crate) fn complete_bytes(&mut self, at: Culprit, cta: usize, offset: u32, bytes: i64) -> Result<(), Fault> {
        match self.ctas[cta].mbarriers.get_mut(&offset) {
            Some(barrier) => barrier.bytes -= bytes,
            None => {
                let message = format!(
                    "a copy completes on {}, which was invalidated while the copy was under way: the bytes are counted nowhere",
                    self.barrier_name(cta, offset)
                );
                return Err(self.finding(FindingKind::MbarrierMisuse, at, None, message));
            }
        }
        self.check_bytes(at, cta, offset)?;
        self.settle(cta, offset);
        Ok(())
    }

    pub(crate) fn raise_pending(&mut self, cta: usize, offset: u32, arrivals: u32) {
        if let Some(barrier) = self.ctas[cta].mbarriers.get_mut(&offset) {
            barrier.pending += arrivals;
        }
    }

    /// Lanes of `exec` by the mbarrier that they name.
    fn by_barrier(&self, warp: &Warp, inst: &Instruction, exec: u32, cluster: bool) -> Result<Vec<(usize, u32, u32)>, Fault> {
        let address = self.address(warp, inst, exec)?;
        let mut groups: Vec<(usize, u32, u32)> = Vec::new();
        let mut seen: Vec<(u64, usize)> = Vec::new();
        for lane in each(exec) {
            if let Some(&(_, group)) = seen.iter().find(|(known, _)| *known == address[lane]) {
                groups[group].2 |= 1 << lane;
                continue;
            }
            let at = culprit(warp, inst.loc, Some(lane as u32));
            let (cta, offset) = self.find_barrier(at, address[lane], cluster)?;
            self.ordered_after_init(warp, at, cta, offset)?;
            seen.push((address[lane], groups.len()));
            groups.push((cta, offset, 1 << lane));
        }
        Ok(groups)
    }

    pub(crate) fn mbarrier_arrive(&mut self, warp: &mut Warp, inst: &Instruction, exec: u32, kind: Arrival) -> Result<Flow, Fault> {
        let cluster =
            matches!(inst.op, Op::MbarrierArrive { space: Space::Cluster, .. } | Op::MbarrierArriveExpect { space: Space::Cluster, .. });
        let operand = *self.need(warp, inst.ins[2], exec, inst.loc, "is counted by an mbarrier")?;
        let cp = self.cp_unit(warp);
        for (cta, offset, lanes) in self.by_barrier(warp, inst, exec, cluster)? {
            let view = warp.release(lanes, cp);
            self.visit(warp, cta, lanes, inst.loc);
            for lane in each(lanes) {
                let at = culprit(warp, inst.loc, Some(lane as u32));
                let value = operand[lane] as u32;
                let (arrivals, bytes) = match kind {
                    Arrival::Count | Arrival::Drop => (value, 0),
                    Arrival::Expect => (1, i64::from(value)),
                };
                self.arrive(at, cta, offset, arrivals, bytes, kind == Arrival::Drop, &view)?;
            }
        }
        Ok(Flow::Next)
    }

    /// Remembers an access to another CTA's shared memory, to be ordered before that CTA's exit.
    pub(crate) fn visit(&mut self, warp: &Warp, cta: usize, lanes: u32, loc: u32) {
        if cta != warp.cta {
            // A release has just opened a new epoch; the access was in the one before.
            let entry = (warp.epoch - 1, loc, lanes.trailing_zeros() as u8);
            self.ctas[cta].visitors.insert(warp.actor, entry);
        }
    }

    pub(crate) fn mbarrier_arrive_token(&mut self, warp: &mut Warp, inst: &Instruction, exec: u32) -> Result<Flow, Fault> {
        let operand = *self.need(warp, inst.ins[2], exec, inst.loc, "is counted by an mbarrier")?;
        let cp = self.cp_unit(warp);
        let mut tokens = [0; 32];
        for (cta, offset, lanes) in self.by_barrier(warp, inst, exec, false)? {
            let view = warp.release(lanes, cp);
            for lane in each(lanes) {
                let barrier = &self.ctas[cta].mbarriers[&offset];
                tokens[lane] = barrier.phase << TOKEN_BITS | u64::from(barrier.pending);
                let at = culprit(warp, inst.loc, Some(lane as u32));
                self.arrive(at, cta, offset, operand[lane] as u32, 0, false, &view)?;
            }
        }
        Ok(self.put(warp, inst, exec, &tokens))
    }

    /// `expect_tx` (sign 1) or `complete_tx` (sign −1) by threads.
    pub(crate) fn mbarrier_bytes(&mut self, warp: &mut Warp, inst: &Instruction, exec: u32, sign: i64) -> Result<Flow, Fault> {
        let cluster = matches!(inst.op, Op::MbarrierExpect { space: Space::Cluster } | Op::MbarrierComplete { space: Space::Cluster });
        let operand = *self.need(warp, inst.ins[2], exec, inst.loc, "is counted by an mbarrier")?;
        for (cta, offset, lanes) in self.by_barrier(warp, inst, exec, cluster)? {
            for lane in each(lanes) {
                let at = culprit(warp, inst.loc, Some(lane as u32));
                self.complete_bytes(at, cta, offset, -sign * (operand[lane] as u32 as i64))?;
            }
        }
        Ok(Flow::Next)
    }

    pub(crate) fn mbarrier_wait(&mut self, warp: &mut Warp, inst: &Instruction, exec: u32, scope: Scope) -> Result<Flow, Fault> {
        let parity = self.need(warp, inst.ins[2], exec, inst.loc, "is the parity that is waited for")?;
        let groups = self.by_barrier(warp, inst, exec, false)?;
        for &(cta, offset, lanes) in &groups {
            let wanted = parity[lanes.trailing_zeros() as usize] as u32;
            let at = culprit(warp, inst.loc, Some(lanes.trailing_zeros()));
            if let Some(lane) = each(lanes).find(|&lane| parity[lane] as u32 != wanted) {
                let message = format!(
                    "lanes of one warp wait for both parities of {}: one of them never comes in time",
                    self.barrier_name(cta, offset)
                );
                return Err(self.finding(FindingKind::Uniform, culprit(warp, inst.loc, Some(lane as u32)), None, message));
            }
            if wanted > 1 {
                let message = format!("parity {wanted} is waited for at {}: it is 0 or 1", self.barrier_name(cta, offset));
                return Err(self.finding(FindingKind::IllegalOperand, at, None, message));
            }
            let phase = self.ctas[cta].mbarriers[&offset].phase;
            if let Wait::Mbarrier { cta: c, address, phase: seen, .. } = warp.wait
                && c == cta
                && address == offset
                && phase >= seen + 2
            {
                let message = format!(
                    "the wait for phase {seen} of {} began, and phase {phase} is under way before the waiter could see it: others ran two phases ahead without waiting for it, and a waiter on the chip hangs or takes the wrong phase",
                    self.barrier_name(cta, offset)
                );
                return Err(self.finding(FindingKind::MbarrierLapped, at, None, message));
            }
            if phase & 1 == u64::from(wanted) {
                if !matches!(warp.wait, Wait::Mbarrier { cta: c, address, .. } if c == cta && address == offset) {
                    warp.wait = Wait::Mbarrier { cta, address: offset, phase, parity: wanted };
                }
                return Ok(Flow::Block);
            }
        }
        for (cta, offset, lanes) in groups {
            let acquired = self.ctas[cta].mbarriers[&offset].acquired(scope).clone();
            warp.acquire(lanes, &acquired);
        }
        warp.wait = Wait::Nothing;
        Ok(Flow::Next)
    }

    pub(crate) fn mbarrier_test(
        &mut self,
        warp: &mut Warp,
        inst: &Instruction,
        exec: u32,
        scope: Scope,
        token: bool,
    ) -> Result<Flow, Fault> {
        let operand = *self.need(warp, inst.ins[2], exec, inst.loc, "is the phase that is asked for")?;
        let mut out = [0; 32];
        for (cta, offset, lanes) in self.by_barrier(warp, inst, exec, false)? {
            let barrier = &self.ctas[cta].mbarriers[&offset];
            let mut yes = 0;
            for lane in each(lanes) {
                let complete = if token { barrier.phase > operand[lane] >> TOKEN_BITS } else { barrier.phase & 1 != operand[lane] };
                if complete {
                    yes |= 1 << lane;
                    out[lane] = 1;
                }
            }
            if yes != 0 {
                let acquired = barrier.acquired(scope).clone();
                warp.acquire(yes, &acquired);
            }
            warp.polling |= yes != lanes;
        }
        Ok(self.put(warp, inst, exec, &out))
    }

    /// A copy that completes on an mbarrier writes: the actor and epoch that it does so under.
    pub(crate) fn copy_actor(&mut self, at: Culprit, cta: usize, offset: u32) -> Result<(u32, u32), Fault> {
        match self.ctas[cta].mbarriers.get_mut(&offset) {
            Some(barrier) => {
                let epoch = barrier.epoch();
                barrier.last_copy = Some((epoch, at.loc));
                Ok((barrier.actor, epoch))
            }
            None => {
                let message = format!("a copy that completes on {} is under way, and the barrier is gone", self.barrier_name(cta, offset));
                Err(self.finding(FindingKind::MbarrierMisuse, at, None, message))
            }
        }
    }

    /// Copies into the CTA's memory that none of its warps waited for.
    pub(crate) fn check_copies_at_exit(&self, cta: usize) -> Result<(), Fault> {
        let owner = &self.ctas[cta];
        for (&offset, barrier) in &owner.mbarriers {
            let Some((epoch, loc)) = barrier.last_copy else { continue };
            if !owner.exit_clock.knows(barrier.actor, epoch, UNIT) {
                let message = format!(
                    "a copy into this CTA's shared memory completes on {}, and the CTA exits without having waited for it: the bytes land in memory that may belong to another CTA",
                    self.barrier_name(cta, offset)
                );
                return Err(self.finding(FindingKind::AsyncAfterExit, Culprit { cta, warp: None, lane: None, loc }, None, message));
            }
        }
        Ok(())
    }
}
