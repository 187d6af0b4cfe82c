//! Ping-pong: two warpgroups alternate in whole tiles, so that one's epilogue overlaps the other's main loop.
//!
//! A main loop begins when the other's has read all of its stages: a stage's phases are told apart by parity, so neither may wait for the
//! one after the next.

use std::panic::Location;

use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::tile::ring::Cursor;
use verdigris_kir::tile::schedule::{Schedule, Work};

use super::WARPGROUP;
use super::spec::TileShape;

/// Which warpgroup runs its main loop; nothing to order where all consumers share each tile.
#[derive(Clone, Copy)]
pub(crate) struct PingPong<'k> {
    kernel: Kernel<'k>,
    schedule: Schedule<'k>,
    warpgroup: Val<'k, u32>,
    /// The warpgroups, and the named barrier at which the first waits for its main loop; the others' follow. Absent without ping-pong.
    of: Option<(u32, u32)>,
}

impl<'k> PingPong<'k> {
    pub(crate) fn new(k: Kernel<'k>, tile: TileShape, barrier: u32, schedule: Schedule<'k>, warpgroup: Val<'k, u32>) -> Self {
        PingPong { kernel: k, schedule, warpgroup, of: tile.ping_pong.then_some((tile.consumers, barrier)) }
    }

    /// Before the main loop of a tile.
    #[track_caller]
    pub(crate) fn wait(&self) {
        if let Some((_, barrier)) = self.of {
            self.kernel.barrier_sync(self.warpgroup + barrier, WARPGROUP * 2);
        }
    }

    /// Behind it: the other's main loop may begin.
    #[track_caller]
    pub(crate) fn hand_on(&self, work: &Work<'k>) {
        if let Some((_, barrier)) = self.of {
            let on = self.schedule.goes_on_behind(work);
            self.kernel.when(on, || self.kernel.barrier_arrive((self.warpgroup ^ 1) + barrier, WARPGROUP * 2));
        }
    }

    /// Runs `body` for each piece of work of this warpgroup. Stages of the other's tiles are skipped: `steps` says how many the tile behind a
    /// piece of work has, and the first tile of all.
    #[track_caller]
    pub(crate) fn for_each(&self, cursor: &Cursor<'k>, steps: impl Fn(Option<&Work<'k>>) -> Val<'k, u32>, body: impl Fn(Work<'k>)) {
        self.kernel.scope_around(Location::caller(), |caller| {
            let body = |work| caller.run(|| body(work));
            let steps = |work: Option<&Work<'k>>| caller.run(|| steps(work));
            let Some((consumers, barrier)) = self.of else { return self.schedule.for_each(body) };
            self.kernel.when(self.warpgroup.eq(1), || {
                self.kernel.barrier_arrive(barrier, WARPGROUP * 2);
                cursor.skip(steps(None));
            });
            self.schedule.for_each_ping_pong(self.warpgroup, consumers, |work| {
                body(work);
                cursor.skip(steps(Some(&work)));
            });
        });
    }
}
