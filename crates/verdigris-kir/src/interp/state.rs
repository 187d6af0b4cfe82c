//! The machine's state: launches in flight, CTAs, warps, barriers.

use super::Options;
use super::agent::{Agent, Groups};
use super::alu::{Lanes, Noise};
use super::clock::{Clock, Of};
use super::decode::Decoded;
use super::finding::{Chain, Finding, FindingKind, Position};
use super::mbarrier::Mbarrier;
use super::memory::{Memory, Shared};
use super::report::Counters;
use super::shadow::{Access, Memo, Readers};
use super::wgmma::{Flights, WarpgroupState};
use crate::ir::Loc;
use crate::program::MapSpec;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

/// A finding that ends a run.
pub(crate) type Fault = Box<Finding>;

/// A small generator with its own state: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
#[derive(Debug)]
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        if bound <= 1 { 0 } else { (self.next() % bound as u64) as usize }
    }
}

/// A launch in flight.
pub(crate) struct Grid {
    pub(crate) decoded: Arc<Decoded>,
    /// Number of the launch in the program.
    pub(crate) launch: u32,
    pub(crate) dims: [u32; 3],
    /// The parameter block and where each parameter starts in it.
    pub(crate) params: Vec<u8>,
    pub(crate) offsets: Vec<u32>,
    /// Clusters in the order in which they start.
    pub(crate) order: Vec<u32>,
    pub(crate) next: usize,
    pub(crate) limit: usize,
    pub(crate) resident: usize,
    pub(crate) finished: usize,
    /// CTAs that let the next launch start, or ended.
    pub(crate) triggered: u32,
    /// Actors below this had ended for all of them when they did.
    pub(crate) known_at_trigger: u32,
    pub(crate) ctas: u32,
    pub(crate) first_actor: u32,
    pub(crate) horizon: u32,
    pub(crate) counters: Counters,
}

impl Grid {
    /// One more CTA lets the next launch start, knowing that actors below `known` have ended.
    pub(crate) fn trigger(&mut self, known: u32) {
        self.triggered += 1;
        self.known_at_trigger = self.known_at_trigger.min(known);
    }
}

/// How the actors of a CTA are numbered from its first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Actors {
    pub(crate) warps: u32,
    pub(crate) barriers: u32,
}

/// Kinds of async work with epochs of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    CpAsync,
    BulkRead,
    BulkWrite,
}

/// Barriers beyond the declared ones that a CTA may make.
const SPARE_BARRIERS: u32 = 16;

impl Actors {
    pub(crate) fn new(decoded: &Decoded) -> Self {
        Actors { warps: decoded.body.threads.div_ceil(32), barriers: decoded.barriers + SPARE_BARRIERS }
    }

    pub(crate) fn unit(&self, unit: Unit, warp: u32) -> u32 {
        let row = match unit {
            Unit::CpAsync => 1,
            Unit::BulkRead => 2,
            Unit::BulkWrite => 3,
        };
        row * self.warps + warp
    }

    pub(crate) fn wgmma(&self, group: u32) -> u32 {
        4 * self.warps + group
    }

    pub(crate) fn barrier(&self, index: u32) -> u32 {
        4 * self.warps + self.warps.div_ceil(4) + index
    }

    pub(crate) fn count(&self) -> u32 {
        self.barrier(self.barriers)
    }
}

/// A CTA or a named barrier.
#[derive(Debug, Default)]
pub(crate) struct CtaBarrier {
    pub(crate) generation: u32,
    pub(crate) expected: u32,
    pub(crate) arrived: u32,
    /// Warps of this generation with their lines.
    pub(crate) warps: Vec<(u32, u32)>,
    pub(crate) clock: Clock,
    pub(crate) done: Clock,
    pub(crate) count: u32,
    pub(crate) threads: u32,
    pub(crate) result: (u32, u32),
}

pub(crate) struct Cta {
    pub(crate) grid: usize,
    pub(crate) index: [u32; 3],
    pub(crate) rank: u32,
    /// The CTAs of its cluster, by rank.
    pub(crate) peers: Vec<usize>,
    pub(crate) sm: u32,
    pub(crate) actors: Actors,
    pub(crate) actor: u32,
    pub(crate) shared: Shared,
    pub(crate) warps: Vec<Option<Box<Warp>>>,
    pub(crate) running: u32,
    pub(crate) barriers: Vec<CtaBarrier>,
    pub(crate) mbarriers: BTreeMap<u32, Mbarrier>,
    pub(crate) barrier_actors: HashMap<u32, (u32, u32)>,
    pub(crate) warpgroups: Vec<WarpgroupState>,
    pub(crate) register_pool: u32,
    pub(crate) triggered: bool,
    pub(crate) exited: bool,
    /// What all its warps knew when they ended.
    pub(crate) exit_clock: Clock,
    /// Tensor maps in global memory that its warps took over, by address and warp.
    pub(crate) maps_acquired: HashMap<(u64, u32), MapAcquired>,
    /// Latest access by each actor of another CTA: epoch and line.
    pub(crate) visitors: HashMap<u32, (u32, u32, u8)>,
}

/// A tensor map in global memory, taken over by `fence.proxy.tensormap::generic.acquire`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MapAcquired {
    /// Who wrote it last: actor and epoch.
    pub(crate) written: (u32, u32),
    /// When the fence ran, and for which lanes.
    pub(crate) epoch: u32,
    pub(crate) lanes: u32,
}

/// The barrier of a cluster; lives with the CTA of rank 0.
#[derive(Debug, Default)]
pub(crate) struct ClusterBarrier {
    pub(crate) generation: u32,
    pub(crate) arrived: u32,
    pub(crate) clock: Clock,
    pub(crate) done: Clock,
}

/// Where lanes that parted meet again.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) full: u32,
    pub(crate) end: u32,
    /// The side that has not run yet.
    pub(crate) pending: Option<(u32, u32)>,
}

/// What a warp waits for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Wait {
    Nothing,
    Barrier { id: u32, generation: u32 },
    Mbarrier { cta: usize, address: u32, phase: u64, parity: u32 },
    Cluster { generation: u32 },
    CpAsync,
    Bulk,
    Wgmma,
    Warpgroup { serial: u32 },
    Registers { wanted: u32 },
    Grid,
}

/// What some lanes knew at their last fence, without their own work.
pub(crate) struct Fenced {
    lanes: u32,
    clock: Clock,
    epoch: u32,
    cp_waited: u32,
}

pub(crate) struct Warp {
    pub(crate) decoded: Arc<Decoded>,
    pub(crate) index: u32,
    pub(crate) cta: usize,
    pub(crate) actor: u32,
    pub(crate) pc: u32,
    pub(crate) active: u32,
    pub(crate) full: u32,
    pub(crate) frames: Vec<Frame>,
    pub(crate) registers: Vec<Lanes>,
    pub(crate) poison: Vec<u32>,
    /// Where poison came from: one more than the line of the load of unwritten memory, a register that nothing wrote with the highest bit
    /// set, or 0 for this register itself.
    pub(crate) origin: Vec<u32>,
    /// Lanes whose value comes from a 32-bit computation that wrapped.
    pub(crate) wrapped: Vec<u32>,
    /// The wgmma fence count when each register was last written.
    pub(crate) touched: Vec<u32>,
    /// In flight: bit 0 as an accumulator, bit 1 as A; the line of the wgmma.
    pub(crate) flight: Vec<(u8, u32)>,
    pub(crate) flights: u32,
    pub(crate) wgmma_fences: u32,
    pub(crate) clock: Clock,
    /// What some lanes know beyond the whole warp: sets of lanes that have none in common.
    pub(crate) extra: Vec<(u32, Clock)>,
    pub(crate) epoch: u32,
    /// What the last fence of each lane hands on through a relaxed write behind it.
    pub(crate) fence_release: Vec<Fenced>,
    /// What relaxed reads have found, for the next fence of the lanes that read.
    pub(crate) fence_acquire: Vec<(u32, Clock)>,
    pub(crate) wait: Wait,
    pub(crate) exited: bool,
    pub(crate) polling: bool,
    pub(crate) steps: u64,
    pub(crate) cp: Groups,
    pub(crate) cp_waited: u32,
    pub(crate) bulk: Groups,
    pub(crate) cluster_arrived: Option<u32>,
    /// Turns of the cluster's barrier that the warp has waited for.
    pub(crate) cluster_turns: u32,
    pub(crate) register_count: u32,
    /// The last value that each polled address showed, so that spinning is told from working.
    pub(crate) last_poll: Option<(u64, u64)>,
    /// wgmma issued by this warp and not yet waited for.
    pub(crate) wgmma: Flights,
}

/// Memory of CTAs that have ended, for those that come: it is large, and a run makes and loses many.
#[derive(Default)]
pub(crate) struct Spare {
    pub(crate) shared: Vec<Shared>,
    pub(crate) registers: Vec<Vec<Lanes>>,
}

impl Spare {
    pub(crate) fn shared(&mut self, bytes: u32) -> Shared {
        let mut shared = self.shared.pop().unwrap_or_default();
        shared.renew(bytes);
        shared
    }

    pub(crate) fn registers(&mut self, count: usize) -> Vec<Lanes> {
        let mut registers = self.registers.pop().unwrap_or_default();
        registers.clear();
        registers.resize(count, [0; 32]);
        registers
    }
}

/// A run.
pub(crate) struct Machine<'m> {
    pub(crate) memory: &'m mut Memory,
    pub(crate) options: Options,
    pub(crate) rng: Rng,
    pub(crate) noise: Option<Noise>,
    pub(crate) readers: Readers,
    /// The results of the instruction that runs, on their way into registers: up to eight, of which only the lanes that take part count.
    pub(crate) results: Box<[Lanes; 8]>,
    pub(crate) spare: Spare,
    pub(crate) grids: Vec<Grid>,
    pub(crate) ctas: Vec<Cta>,
    pub(crate) cluster_barriers: HashMap<usize, ClusterBarrier>,
    pub(crate) agents: Vec<Agent>,
    pub(crate) next_agent: u64,
    /// Clocks released at addresses: global address, or CTA and shared address.
    pub(crate) sync: HashMap<(u64, u32), Clock>,
    pub(crate) maps: Vec<(u64, MapSpec)>,
    /// The epoch of each warp's last `fence.proxy.tensormap::generic.release`.
    pub(crate) map_releases: HashMap<u32, u32>,
    pub(crate) ready: VecDeque<(usize, u32)>,
    pub(crate) blocked: Vec<(usize, u32)>,
    pub(crate) polling: Vec<(usize, u32)>,
    pub(crate) next_actor: u32,
    pub(crate) ticks: u64,
    /// An async unit got work: the turn ends, so that it may be done at once.
    pub(crate) issued: bool,
    /// What the first warp of each cluster decided at each stop.
    pub(crate) stops: HashMap<(usize, u32), bool>,
}

/// Who is at fault, for a finding.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Culprit {
    pub(crate) cta: usize,
    pub(crate) warp: Option<u32>,
    pub(crate) lane: Option<u32>,
    pub(crate) loc: u32,
}

impl Cta {
    /// Whether a live mbarrier stands in the bytes `from..end` of its shared memory.
    pub(crate) fn has_barrier(&self, from: u32, end: u32) -> bool {
        !self.mbarriers.is_empty() && self.mbarriers.range(from.saturating_sub(7)..end).next().is_some()
    }
}

impl Machine<'_> {
    pub(crate) fn decoded(&self, cta: usize) -> &Arc<Decoded> {
        &self.grids[self.ctas[cta].grid].decoded
    }

    pub(crate) fn counters(&mut self, cta: usize) -> &mut Counters {
        let grid = self.ctas[cta].grid;
        &mut self.grids[grid].counters
    }

    /// A location in a CTA's kernel: the kernel's own line, and those it went through.
    pub(crate) fn line(&self, cta: usize, loc: u32) -> Chain {
        let chain = self.decoded(cta).body.location_chain(Loc(loc));
        Chain(chain.iter().rev().map(|info| Position { file: info.file, line: info.line, column: info.column }).collect())
    }

    pub(crate) fn finding(&self, kind: FindingKind, at: Culprit, second: Option<Chain>, message: impl Into<String>) -> Fault {
        let cta = &self.ctas[at.cta];
        let body = &self.grids[cta.grid].decoded.body;
        Box::new(Finding {
            kind,
            kernel: body.name.clone(),
            at: self.line(at.cta, at.loc).0,
            cta: cta.index,
            warp: at.warp,
            lane: at.lane,
            second: second.map_or_else(Vec::new, |chain| chain.0),
            message: message.into(),
        })
    }

    /// The CTA that an actor belongs to, and words for the actor.
    pub(crate) fn describe(&self, actor: u32) -> (Option<usize>, String) {
        for (index, cta) in self.ctas.iter().enumerate().rev() {
            let local = actor.wrapping_sub(cta.actor);
            if local >= cta.actors.count() {
                continue;
            }
            let warps = cta.actors.warps;
            let [x, y, z] = cta.index;
            let who = match local.checked_div(warps) {
                Some(0) => format!("warp {local}"),
                Some(1) => format!("the cp.async of warp {}", local % warps),
                Some(2 | 3) => format!("the bulk copy of warp {}", local % warps),
                _ if local < cta.actors.barrier(0) => format!("the wgmma of warpgroup {}", local - cta.actors.wgmma(0)),
                _ => "TMA".to_string(),
            };
            return (Some(index), format!("{who} of CTA {x},{y},{z}"));
        }
        let is_in_front = self.memory.predecessor == Some(actor);
        (None, if is_in_front { "the launch in front of the program" } else { "an earlier launch" }.into())
    }
}

/// The lanes of `mask` learn what `from` knows. A set of which some lanes are meant is taken apart; lanes that know the same are one set again.
fn learn(sets: &mut Vec<(u32, Clock)>, mask: u32, from: &Clock) {
    let mut learned = Vec::new();
    let mut left = mask;
    for (lanes, clock) in sets.iter_mut() {
        let both = *lanes & left;
        if both != 0 {
            let mut clock = clock.clone();
            clock.join(from);
            learned.push((both, clock));
            *lanes &= !both;
            left &= !both;
        }
    }
    if left != 0 {
        learned.push((left, from.clone()));
    }
    sets.retain(|(lanes, _)| *lanes != 0);
    for (lanes, clock) in learned {
        match sets.iter_mut().find(|(_, known)| *known == clock) {
            Some((same, _)) => *same |= lanes,
            None => sets.push((lanes, clock)),
        }
    }
}

impl Warp {
    /// The view of memory that the lanes of `mask` hand on, and a new epoch for what comes after.
    pub(crate) fn release(&mut self, mask: u32, cp_actor: u32) -> Clock {
        let mut view = self.clock.clone();
        for (lanes, extra) in &self.extra {
            if lanes & mask != 0 {
                view.join(extra);
            }
        }
        let full = self.full;
        view.extend(self.actor, Of::Seen, mask, full, self.epoch);
        if self.cp_waited > 0 {
            view.extend(cp_actor, Of::Seen, mask, full, self.cp_waited);
        }
        self.epoch += 1;
        view
    }

    /// The lanes of `mask` learn what `from` knows.
    pub(crate) fn acquire(&mut self, mask: u32, from: &Clock) {
        if mask & self.full == self.full {
            self.clock.join(from);
            return;
        }
        learn(&mut self.extra, mask, from);
        let full = self.full;
        if let [(lanes, _)] = self.extra[..]
            && lanes & full == full
        {
            self.learn_extra();
        }
    }

    /// The lanes of `mask` run a fence, which releases what is before it through what they write, relaxed, behind it.
    pub(crate) fn fence_releases(&mut self, mask: u32) {
        let mut left = mask;
        self.fence_release.retain_mut(|fenced| {
            fenced.lanes &= !mask;
            fenced.lanes != 0
        });
        let fenced = |lanes, clock| Fenced { lanes, clock, epoch: self.epoch, cp_waited: self.cp_waited };
        for (lanes, extra) in &self.extra {
            if lanes & mask != 0 {
                let mut clock = self.clock.clone();
                clock.join(extra);
                self.fence_release.push(fenced(lanes & mask, clock));
                left &= !lanes;
            }
        }
        if left != 0 {
            self.fence_release.push(fenced(left, self.clock.clone()));
        }
        self.epoch += 1;
    }

    /// What the last fences of the lanes of `mask` hand on, where they ran any.
    pub(crate) fn fenced_view(&self, mask: u32, cp_actor: u32) -> Option<Clock> {
        let mut view: Option<Clock> = None;
        for Fenced { lanes, clock, epoch, cp_waited } in self.fence_release.iter().filter(|fenced| fenced.lanes & mask != 0) {
            let mut own = clock.clone();
            own.extend(self.actor, Of::Seen, lanes & mask, self.full, *epoch);
            if *cp_waited > 0 {
                own.extend(cp_actor, Of::Seen, lanes & mask, self.full, *cp_waited);
            }
            match &mut view {
                Some(view) => view.join(&own),
                None => view = Some(own),
            }
        }
        view
    }

    /// A lane has read what may release something, relaxed: its next fence acquires that.
    pub(crate) fn found(&mut self, lane: usize, clock: &Clock) {
        learn(&mut self.fence_acquire, 1 << lane, clock);
    }

    /// The lanes of `mask` run a fence, which acquires what their relaxed reads found.
    pub(crate) fn fence_acquires(&mut self, mask: u32) {
        for (lanes, pending) in std::mem::take(&mut self.fence_acquire) {
            if lanes & mask != 0 {
                self.acquire(lanes & mask, &pending);
            }
            if lanes & !mask != 0 {
                self.fence_acquire.push((lanes & !mask, pending));
            }
        }
    }

    /// The whole warp learns what some of its lanes know.
    pub(crate) fn learn_extra(&mut self) {
        for (_, extra) in self.extra.drain(..) {
            self.clock.join(&extra);
        }
    }

    /// Whether a lane knows of an access, by itself or with the warp.
    pub(crate) fn knows(&self, lane: u8, actor: u32, epoch: u32, other_lane: u8) -> bool {
        let beyond = || self.extra.iter().any(|(lanes, clock)| lanes >> lane & 1 == 1 && clock.knows(actor, epoch, other_lane));
        self.clock.knows(actor, epoch, other_lane) || beyond()
    }

    /// All lanes of the warp know each other's accesses so far.
    pub(crate) fn synchronize(&mut self, cp_actor: u32) {
        self.learn_extra();
        self.clock.raise(self.actor, Of::Seen, self.epoch);
        if self.cp_waited > 0 {
            self.clock.raise(cp_actor, Of::Seen, self.cp_waited);
        }
        self.epoch += 1;
    }

    pub(crate) fn access(&self, cta: &Cta, launch: u32, loc: u32, flags: u8, global: bool) -> Access<'_> {
        let stride = cta.actors.count();
        let first = cta.actor - cta.rank * stride;
        Access {
            actor: self.actor,
            epoch: self.epoch,
            loc,
            flags,
            clock: &self.clock,
            extra: &self.extra,
            cp: (cta.actor + cta.actors.unit(Unit::CpAsync, self.index), self.cp_waited),
            cta: cta.actor..cta.actor + stride,
            cluster: first..first + stride * cta.peers.len() as u32,
            launch,
            global,
            in_order: true,
            memo: Memo::default(),
        }
    }
}
