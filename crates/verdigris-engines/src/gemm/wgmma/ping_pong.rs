//! Ping-pong: two warpgroups alternate in whole tiles, so that one's epilogue overlaps the other's main loop.
//!
//! A main loop begins when the other's has read all of its stages: a stage's phases are told apart by parity, so neither may wait for the
//! one after the next.

use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::tile::ring::Cursor;
use verdigris_kir::tile::schedule::{Schedule, Work};

use super::spec::{FIRST_BARRIER, Spec, WARPGROUP};

/// Which warpgroup runs its main loop; nothing to order where all consumers share each tile.
#[derive(Clone, Copy)]
pub(super) struct PingPong<'k> {
    kernel: Kernel<'k>,
    schedule: Schedule<'k>,
    warpgroup: Val<'k, u32>,
    /// The warpgroups, and the named barrier at which the first waits for its main loop; the others' follow. Absent without ping-pong.
    of: Option<(u32, u32)>,
}

impl<'k> PingPong<'k> {
    pub(super) fn new(k: Kernel<'k>, spec: &Spec, schedule: Schedule<'k>, warpgroup: Val<'k, u32>) -> Self {
        let of = spec.ping_pong.then_some((spec.consumers, FIRST_BARRIER + spec.consumers));
        PingPong { kernel: k, schedule, warpgroup, of }
    }

    /// Before the main loop of a tile.
    pub(super) fn wait(&self) {
        if let Some((_, barrier)) = self.of {
            self.kernel.barrier_sync(self.warpgroup + barrier, WARPGROUP * 2);
        }
    }

    /// Behind it: the other's main loop may begin.
    pub(super) fn hand_on(&self, work: &Work<'k>) {
        if let Some((_, barrier)) = self.of {
            let on = self.schedule.goes_on_behind(work);
            self.kernel.when(on, || self.kernel.barrier_arrive((self.warpgroup ^ 1) + barrier, WARPGROUP * 2));
        }
    }

    /// Runs `body` for each piece of work of this warpgroup. Stages of the other's tiles are skipped.
    pub(super) fn for_each(&self, cursor: &Cursor<'k>, body: impl Fn(Work<'k>)) {
        let Some((consumers, barrier)) = self.of else { return self.schedule.for_each(body) };
        self.kernel.when(self.warpgroup.eq(1), || {
            self.kernel.barrier_arrive(barrier, WARPGROUP * 2);
            cursor.skip(self.schedule.steps());
        });
        self.schedule.for_each_ping_pong(self.warpgroup, consumers, |work| {
            body(work);
            cursor.skip(self.schedule.steps());
        });
    }
}
