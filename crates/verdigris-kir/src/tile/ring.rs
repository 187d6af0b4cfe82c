//! The ring: stages of shared memory that one role fills and others drain.
//!
//! Each stage has a *full* mbarrier, on which the filler arrives once and the bytes complete, and an *empty* one, on which each drainer
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
}

/// A ring of stages.
#[derive(Clone, Copy, Debug)]
pub struct Ring<'k> {
    kernel: Kernel<'k>,
    full: MbarrierArray<'k>,
    empty: MbarrierArray<'k>,
    stages: u32,
    scope: RingScope,
}

impl<'k> Ring<'k> {
    /// A ring of `stages` stages that `drainers` parties of each CTA drain (each arrives once a turn).
    #[track_caller]
    pub fn new(k: Kernel<'k>, stages: u32, drainers: u32, scope: RingScope) -> Self {
        let full = k.mbarrier_array("full", stages);
        let empty = k.mbarrier_array("empty", stages);
        full.arrivals().set(1);
        let ctas = if scope == RingScope::Cluster { k.cluster_ctas() } else { 1 };
        empty.arrivals().set(u64::from(drainers * ctas));
        Ring { kernel: k, full, empty, stages, scope }
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

    /// A cursor at the first stage.
    #[track_caller]
    pub fn cursor(&self) -> Cursor<'k> {
        let k = self.kernel;
        Cursor { ring: *self, stage: k.var_named("stage", 0u32), phase: k.var_named("phase", 0u32) }
    }
}

/// Makes initialized mbarriers visible to everyone who uses them; every thread of the CTA (of the cluster) takes part.
#[track_caller]
pub fn publish_barriers(k: Kernel<'_>) {
    k.scope(Location::caller(), || {
        k.fence(Fence::MbarrierInit);
        if k.cluster_ctas() > 1 {
            k.cluster_sync();
        } else {
            k.bar_sync();
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
            // A fresh barrier counts as having completed the phase of parity 1: the first turn falls through.
            let empty = self.ring.empty.at(self.stage);
            match self.ring.scope {
                RingScope::Cta => empty.wait(self.phase ^ 1),
                RingScope::Cluster => empty.wait_cluster(self.phase ^ 1),
            }
            let full = self.ring.full.at(self.stage);
            full.arrive_expect_tx(bytes);
            full
        })
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

    /// Drainer: waits until the stage is full.
    #[track_caller]
    pub fn wait(&self) {
        let at = Location::caller();
        self.ring.kernel.scope(at, || self.ring.full.at(self.stage).wait(self.phase));
    }

    /// Drainer: gives stage `stage` back. Every thread of the drainer calls it; `thread` is its index in the drainer, and thread `r` tells the
    /// CTA of rank `r`.
    #[track_caller]
    pub fn release(&self, stage: impl AsVal<'k, u32>, thread: Val<'k, u32>) {
        let k = self.ring.kernel;
        let stage = stage.operand_val(k);
        k.scope(Location::caller(), || match self.ring.scope {
            RingScope::Cta => k.when(thread.eq(0), || self.ring.empty.at(stage).arrive()),
            RingScope::Cluster => k.when(thread.lt(k.cluster_ctas()), || self.ring.empty.at(stage).peer(thread).arrive_read()),
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
