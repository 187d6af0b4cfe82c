//! The ring: stages of shared memory that one role fills and others drain.
//!
//! Each stage has a *full* mbarrier, on which each filler arrives once a turn and the bytes complete, and an *empty* one, on which each drainer
//! arrives once a turn. Stage and phase live in a [`Cursor`], one for each role, that outlives loops and tiles. Counts are settled here, from
//! how the ring is made, so they cannot disagree with the protocol.

use crate::face::{AsVal, Kernel, Mbarrier, MbarrierArray, Val, Var};
use crate::inst::Fence;
use std::panic::Location;

/// Who shares a ring's stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingScope {
    /// One CTA.
    Cta,
    /// A cluster: a stage is free when the drainers of every CTA have left it, since the copies are multicast.
    Cluster,
    /// So many CTAs of neighbouring ranks, a power of two, from a multiple of it on: the same for those of a cluster that share copies.
    Peers(u32),
}

/// A ring of stages.
#[derive(Clone, Copy, Debug)]
pub struct Ring<'k> {
    kernel: Kernel<'k>,
    full: MbarrierArray<'k>,
    empty: MbarrierArray<'k>,
    stages: u32,
    scope: RingScope,
    /// The rank of the first CTA that shares the stages, where that is not 0.
    first_peer: Option<Val<'k, u32>>,
}

impl<'k> Ring<'k> {
    /// A ring of `stages` stages that `drainers` parties of each CTA drain (each arrives once a turn).
    #[track_caller]
    pub fn new(k: Kernel<'k>, stages: u32, drainers: u32, scope: RingScope) -> Self {
        Ring::filled_by(k, stages, 1, drainers, scope)
    }

    /// The same of stages that `fillers` parties fill together: [`Cursor::acquire`] is for one that loads, [`Cursor::claim`] and
    /// [`Cursor::fill`] for those that write.
    #[track_caller]
    pub fn filled_by(k: Kernel<'k>, stages: u32, fillers: u32, drainers: u32, scope: RingScope) -> Self {
        let full = k.mbarrier_array("full", stages);
        let empty = k.mbarrier_array("empty", stages);
        full.arrivals().set(u64::from(fillers));
        empty.arrivals().set(u64::from(drainers * sharers(k, scope)));
        let first_peer = match scope {
            RingScope::Peers(ctas) if ctas < k.cluster_ctas() => Some(k.cluster_rank() & !(ctas - 1)),
            _ => None,
        };
        Ring { kernel: k, full, empty, stages, scope, first_peer }
    }

    /// How many stages it has.
    pub fn stages(&self) -> u32 {
        self.stages
    }

    /// Initializes the barriers: by one thread, before [`publish_barriers`].
    #[track_caller]
    pub fn init(&self) {
        let at = Location::caller();
        self.kernel.scope(at, || {
            self.full.init();
            self.empty.init();
        });
    }

    /// CTAs that share its stages.
    fn sharers(&self) -> u32 {
        sharers(self.kernel, self.scope)
    }

    /// A cursor at the first stage.
    #[track_caller]
    pub fn cursor(&self) -> Cursor<'k> {
        let k = self.kernel;
        Cursor { ring: *self, stage: k.var_named("stage", 0u32), phase: k.var_named("phase", 0u32) }
    }
}

fn sharers(k: Kernel<'_>, scope: RingScope) -> u32 {
    match scope {
        RingScope::Cta => 1,
        RingScope::Cluster => k.cluster_ctas(),
        RingScope::Peers(ctas) => ctas,
    }
}

/// Makes initialized mbarriers visible to everyone who uses them; every thread of the CTA (of the cluster) takes part. What else a CTA has written
/// is seen in that CTA; peers see what was before a fence ([`crate::inst::Fence::AcqRel`]).
#[track_caller]
pub fn publish_barriers(k: Kernel<'_>) {
    k.scope(Location::caller(), || {
        k.fence(Fence::MbarrierInit);
        k.bar_sync();
        // The fence has handed the barriers on to peers: an arrival that releases everything would cost a fence over the device.
        if k.cluster_ctas() > 1 {
            k.cluster_arrive_relaxed();
            k.cluster_wait();
        }
    });
}

/// A role's place in a ring.
#[derive(Clone, Copy, Debug)]
pub struct Cursor<'k> {
    ring: Ring<'k>,
    stage: Var<'k, u32>,
    phase: Var<'k, u32>,
}

impl<'k> Cursor<'k> {
    /// The stage's index.
    #[track_caller]
    pub fn stage(&self) -> Val<'k, u32> {
        self.stage.get()
    }

    /// Filler: waits until the stage is free, and expects `bytes` on its full barrier, which it returns.
    #[track_caller]
    pub fn acquire(&self, bytes: impl AsVal<'k, u32>) -> Mbarrier<'k> {
        let at = Location::caller();
        self.ring.kernel.scope(at, || {
            self.claim();
            let full = self.ring.full.at(self.stage);
            full.arrive_expect_tx(bytes);
            full
        })
    }

    /// Filler: waits until the stage is free.
    #[track_caller]
    pub fn claim(&self) {
        self.ring.kernel.scope(Location::caller(), || {
            // A fresh barrier counts as having completed the phase of parity 1: the first turn falls through.
            let empty = self.ring.empty.at(self.stage);
            match self.ring.scope {
                RingScope::Cta => empty.wait(self.phase ^ 1),
                RingScope::Cluster | RingScope::Peers(_) => empty.wait_cluster(self.phase ^ 1),
            }
        });
    }

    /// Filler of a stage that it has written itself: hands its part on. Every thread of the filler calls it behind what orders their writes before
    /// it (for `wgmma`, a fence of the async proxy and then a barrier among them); `thread` is its index in the filler.
    #[track_caller]
    pub fn fill(&self, thread: Val<'k, u32>) {
        let k = self.ring.kernel;
        k.scope(Location::caller(), || k.when(thread.eq(0), || self.ring.full.at(self.stage).arrive()));
    }

    /// Filler: waits until everything that it has loaded so far is in shared memory, so that what the loads used, a tensor map in memory, may be
    /// changed.
    #[track_caller]
    pub fn settle(&self) {
        let k = self.ring.kernel;
        k.scope(Location::caller(), || {
            for stage in 0..self.ring.stages {
                // Stages in front of the cursor were last filled in this phase, the others in the one before; fresh ones count as filled.
                let parity = k.select(self.stage.gt(stage), self.phase, self.phase ^ 1);
                self.ring.full.at(stage).wait(parity);
            }
        });
    }

    /// Filler: waits until all who share the stages have left everything that was loaded, so that none of them arrives here any more and the CTA may
    /// exit. (A barrier of the cluster at the kernel's end would wait for every store of the CTA as well.)
    #[track_caller]
    pub fn drain(&self) {
        let k = self.ring.kernel;
        k.scope(Location::caller(), || {
            for stage in 0..self.ring.stages {
                // As the next turn of each stage would wait.
                let parity = k.select(self.stage.gt(stage), self.phase, self.phase ^ 1);
                self.ring.empty.at(stage).wait_cluster(parity);
            }
        });
    }

    /// Drainer: waits until the stage is full.
    #[track_caller]
    pub fn wait(&self) {
        let at = Location::caller();
        self.ring.kernel.scope(at, || self.ring.full.at(self.stage).wait(self.phase));
    }

    /// Drainer: gives stage `stage` back. Every thread of the drainer calls it; `thread` is its index in the drainer, and thread `r` tells the
    /// CTA of rank `r` among those that share the stages.
    #[track_caller]
    pub fn release(&self, stage: impl AsVal<'k, u32>, thread: Val<'k, u32>) {
        let k = self.ring.kernel;
        let stage = stage.operand_val(k);
        k.scope(Location::caller(), || match self.ring.scope {
            RingScope::Cta => k.when(thread.eq(0), || self.ring.empty.at(stage).arrive()),
            RingScope::Cluster | RingScope::Peers(_) => k.when(thread.lt(self.ring.sharers()), || {
                let peer = self.ring.first_peer.map_or(thread, |first| first + thread);
                self.ring.empty.at(stage).peer(peer).arrive_read();
            }),
        });
    }

    /// Goes on to the next stage.
    #[track_caller]
    pub fn advance(&self) {
        let k = self.ring.kernel;
        k.scope(Location::caller(), || {
            let next = self.stage + 1;
            let wrap = next.eq(self.ring.stages);
            self.stage.set(k.select(wrap, 0u32, next));
            self.phase.set(k.select(wrap, self.phase ^ 1, self.phase));
        });
    }

    /// Goes on by `turns` stages at once.
    #[track_caller]
    pub fn skip(&self, turns: Val<'k, u32>) {
        let k = self.ring.kernel;
        k.scope(Location::caller(), || k.range(turns, |_| self.advance()));
    }
}
