//! The start of a kernel, and what its warps do.

use verdigris_kir::face::{Kernel, Role};
use verdigris_kir::tile::ring::{Cursor, publish_barriers};
use verdigris_kir::tile::schedule::{Schedule, Work};

use super::spec::TileShape;

/// What stands in front of the roles: `init` initializes barriers and prefetches tensor maps, by one thread; `clear` clears what no load
/// writes, by all.
pub(crate) fn start(k: Kernel<'_>, init: impl Fn(), clear: impl FnOnce()) {
    k.when(k.thread().eq(0), init);
    clear();
    publish_barriers(k);
    // What is in front of this launch may still run: nothing of it is touched above.
    k.griddep_wait();
    k.griddep_launch();
}

/// The warp that loads: `load` is called by one thread, for each piece of work.
pub(crate) fn load_each<'k>(k: Kernel<'k>, tile: TileShape, schedule: Schedule<'k>, cursor: Cursor<'k>, load: impl Fn(Work<'k>)) {
    k.when(k.elect(), || {
        schedule.for_each(&load);
        if tile.cluster > 1 {
            // A peer may still arrive on this CTA's barriers.
            cursor.drain();
        }
    });
}

/// The role of the warp that loads.
pub(crate) fn load(body: &dyn Fn()) -> Role<'_> {
    Role { name: "load", warps: 1, registers: None, body }
}

/// Runs the roles: the warps of the producer's warpgroup, and the consumers; with the registers of a thread of each.
pub(crate) fn run(k: Kernel<'_>, tile: TileShape, [few, many]: [u32; 2], producers: &[Role<'_>], multiply: &dyn Fn()) {
    let produce = || k.warp_roles(producers);
    k.warp_roles(&[
        Role { name: "producer", warps: 4, registers: Some(few), body: &produce },
        Role { name: "consumer", warps: 4 * tile.consumers, registers: Some(many), body: multiply },
    ]);
}
