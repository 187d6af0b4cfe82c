//! Barriers of the CTA and of the cluster.

use super::decode::Instruction;
use super::finding::FindingKind;
use super::state::{Fault, Machine, Unit, Wait, Warp};
use super::warp::{Flow, culprit};

impl Machine<'_> {
    pub(crate) fn barrier_operands(&self, warp: &Warp, inst: &Instruction) -> Result<(u32, u32), Fault> {
        let id = self.uniform(warp, inst.ins[0], warp.full, inst.loc, "the barrier's number")? as u32;
        let threads = self.uniform(warp, inst.ins[1], warp.full, inst.loc, "the barrier's thread count")? as u32;
        let all = self.decoded(warp.cta).body.threads.next_multiple_of(32);
        if id > 15 || !threads.is_multiple_of(32) || threads > all {
            let message =
                format!("barrier {id} for {threads} threads: numbers are 0 to 15, thread counts multiples of 32 up to the CTA's {all}");
            return Err(self.finding(FindingKind::IllegalOperand, culprit(warp, inst.loc, None), None, message));
        }
        Ok((id, threads))
    }

    /// Arrives with the whole warp; tells whether that completed the barrier.
    pub(crate) fn barrier_arrive(&mut self, warp: &mut Warp, loc: u32, id: u32, threads: u32, vote: Option<u32>) -> Result<bool, Fault> {
        let all = self.decoded(warp.cta).body.threads.next_multiple_of(32);
        let expected = if threads == 0 { all } else { threads };
        let barrier = &self.ctas[warp.cta].barriers[id as usize];
        if barrier.arrived > 0 && barrier.expected != expected {
            let line = self.line(warp.cta, barrier.warps.first().map_or(loc, |first| first.1));
            let message = format!(
                "barrier {id} is used for {expected} threads here and for {} at {line} at the same time: it opens at the wrong moment or never",
                barrier.expected
            );
            return Err(self.finding(FindingKind::BarrierMisuse, culprit(warp, loc, None), Some(line), message));
        }
        if let Some(&(_, earlier)) = barrier.warps.iter().find(|(other, _)| *other == warp.index) {
            let line = self.line(warp.cta, earlier);
            let message = format!(
                "this warp arrives at barrier {id} here and did at {line}, before the barrier opened: it takes the place of another warp, and the barrier opens too early"
            );
            return Err(self.finding(FindingKind::BarrierMisuse, culprit(warp, loc, None), Some(line), message));
        }
        let cp = self.ctas[warp.cta].actor + self.ctas[warp.cta].actors.unit(Unit::CpAsync, warp.index);
        let view = warp.release(warp.full, cp);
        let barrier = &mut self.ctas[warp.cta].barriers[id as usize];
        barrier.expected = expected;
        barrier.arrived += 32;
        barrier.warps.push((warp.index, loc));
        barrier.clock.join(&view);
        barrier.count += vote.unwrap_or(0);
        barrier.threads += warp.full.count_ones();
        if barrier.arrived < expected {
            return Ok(false);
        }
        let fresh = barrier.clock.fresh();
        barrier.done = std::mem::replace(&mut barrier.clock, fresh);
        barrier.result = (barrier.count, barrier.threads);
        barrier.count = 0;
        barrier.threads = 0;
        barrier.arrived = 0;
        barrier.warps.clear();
        barrier.generation += 1;
        self.wake(warp.cta);
        Ok(true)
    }

    /// Arrives and waits; the votes and threads once the barrier has opened.
    pub(crate) fn barrier_sync(
        &mut self,
        warp: &mut Warp,
        loc: u32,
        id: u32,
        threads: u32,
        vote: Option<u32>,
    ) -> Result<Option<(u32, u32)>, Fault> {
        let open = match warp.wait {
            Wait::Barrier { generation, .. } => self.ctas[warp.cta].barriers[id as usize].generation != generation,
            _ => {
                let generation = self.ctas[warp.cta].barriers[id as usize].generation;
                let open = self.barrier_arrive(warp, loc, id, threads, vote)?;
                warp.wait = Wait::Barrier { id, generation };
                open
            }
        };
        if !open {
            return Ok(None);
        }
        warp.wait = Wait::Nothing;
        let barrier = &self.ctas[warp.cta].barriers[id as usize];
        warp.learn_extra();
        warp.clock.join(&barrier.done);
        Ok(Some(barrier.result))
    }

    pub(crate) fn cluster_arrive(&mut self, warp: &mut Warp, loc: u32, relaxed: bool) -> Result<Flow, Fault> {
        if warp.cluster_arrived.is_some() {
            let message = "this warp arrives at the cluster's barrier again without having waited for the last arrival";
            return Err(self.finding(FindingKind::BarrierMisuse, culprit(warp, loc, None), None, message));
        }
        let cp = self.ctas[warp.cta].actor + self.ctas[warp.cta].actors.unit(Unit::CpAsync, warp.index);
        let key = self.ctas[warp.cta].peers[0];
        // Of what is before a relaxed arrival, a fence alone hands on what was before it.
        let view = match relaxed {
            false => warp.release(warp.full, cp),
            true => warp.fenced_view(warp.full, cp).unwrap_or_else(|| warp.clock.fresh()),
        };
        let barrier = self.cluster_barriers.entry(key).or_default();
        if barrier.arrived == 0 {
            barrier.clock = warp.clock.fresh();
        }
        barrier.arrived += 1;
        barrier.clock.join(&view);
        let turn = barrier.generation;
        warp.cluster_arrived = Some(turn);
        self.hand_on_mbarriers(warp, turn);
        self.cluster_settle(key);
        Ok(Flow::Next)
    }

    /// Opens the cluster's barrier if every warp that still runs has arrived.
    pub(crate) fn cluster_settle(&mut self, key: usize) {
        let running: u32 = self.ctas[key].peers.iter().map(|&peer| self.ctas[peer].running).sum();
        let Some(barrier) = self.cluster_barriers.get_mut(&key) else { return };
        if barrier.arrived == 0 || barrier.arrived < running {
            return;
        }
        barrier.arrived = 0;
        barrier.generation += 1;
        barrier.done = barrier.clock.clone();
        self.wake(key);
    }

    pub(crate) fn cluster_wait(&mut self, warp: &mut Warp, loc: u32) -> Result<Flow, Fault> {
        let Some(generation) = warp.cluster_arrived else {
            let message = "this warp waits for the cluster's barrier without having arrived: it passes too early or hangs";
            return Err(self.finding(FindingKind::BarrierMisuse, culprit(warp, loc, None), None, message));
        };
        let key = self.ctas[warp.cta].peers[0];
        let Some(barrier) = self.cluster_barriers.get(&key).filter(|barrier| barrier.generation != generation) else {
            warp.wait = Wait::Cluster { generation };
            return Ok(Flow::Block);
        };
        warp.learn_extra();
        warp.clock.join(&barrier.done);
        warp.cluster_turns = generation + 1;
        warp.cluster_arrived = None;
        warp.wait = Wait::Nothing;
        Ok(Flow::Next)
    }
}
