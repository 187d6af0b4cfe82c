//! The start of a kernel, and what its warps do.

use std::panic::Location;

use verdigris_kir::face::{Kernel, Role};
use verdigris_kir::tile::ring::{Cursor, publish_barriers};
use verdigris_kir::tile::schedule::{Schedule, Work};

use super::spec::TileShape;

/// What stands in front of the roles: `init` initializes barriers and prefetches tensor maps, by one thread; `clear` clears what no load
/// writes, by all.
#[track_caller]
pub(crate) fn start(k: Kernel<'_>, init: impl Fn(), clear: impl FnOnce()) {
    k.scope_around(Location::caller(), |caller| {
        k.when(k.thread().eq(0), || caller.run(&init));
        caller.run(clear);
        publish_barriers(k);
        // What is in front of this launch may still run: nothing of it is touched above.
        k.griddep_wait();
        k.griddep_launch();
    });
}

/// The warp that loads: `load` is called by one thread, for each piece of work.
#[track_caller]
pub(crate) fn load_each<'k>(k: Kernel<'k>, tile: TileShape, schedule: Schedule<'k>, cursor: Cursor<'k>, load: impl Fn(Work<'k>)) {
    k.scope_around(Location::caller(), |caller| {
        k.when(k.elect(), || {
            schedule.for_each(|work| caller.run(|| load(work)));
            if tile.peers() > 1 {
                // A peer may still arrive on this CTA's barriers.
                cursor.drain();
            }
        });
    });
}

/// The role of the warp that loads.
pub(crate) fn load(body: &dyn Fn()) -> Role<'_> {
    Role { name: "load", warps: 1, registers: None, body }
}

/// Runs the roles: the warps of the producers' warpgroups, one or more, and the consumers; with the registers of a thread of each.
#[track_caller]
pub(crate) fn run(k: Kernel<'_>, tile: TileShape, [few, many]: [u32; 2], producers: &[Role<'_>], multiply: &dyn Fn()) {
    k.scope_around(Location::caller(), |caller| {
        let bodies: Vec<_> = producers.iter().map(|role| || caller.run(role.body)).collect();
        let producers: Vec<_> = producers.iter().zip(&bodies).map(|(role, body)| Role { body, ..*role }).collect();
        let warps = producers.iter().map(|role| role.warps).sum::<u32>().next_multiple_of(4);
        let produce = || k.warp_roles(&producers);
        let multiply = || caller.run(multiply);
        k.warp_roles(&[
            Role { name: "producer", warps, registers: Some(few), body: &produce },
            Role { name: "consumer", warps: 4 * tile.consumers, registers: Some(many), body: &multiply },
        ]);
    });
}
