//! The Hopper convolution kernel: TMA gathers pixels in im2col order, warpgroups multiply out of the ring, results leave as those
//! of a product do.
//!
//! Top to bottom: parameters and shared memory, the producer, the consumers, the warps that clear, the roles. The main loop is that of
//! [`crate::hopper`], but for tiles that are transposed in shared memory ([`super::transposed_tiles`]). What the producer loads is in
//! [`super::producer`], the rest of the way in [`super::epilogue`] and [`crate::store`].
//!
//! Source: PTX ISA 9.0, "im2col mode".

use verdigris_kir::face::{AsVal, Kernel, Role};
use verdigris_kir::inst::Special;
use verdigris_kir::tile::ring::{Ring, RingScope};
use verdigris_kir::tile::schedule::{ScheduleArgs, Work};

use super::epilogue::TileEpilogue;
use super::producer::{ProducerArgs, Slots};
use super::spec::Spec;
use super::swap_ab::SwapAbArgs;
use crate::hopper::main_loop::MainLoop;
use crate::hopper::roles;
use crate::hopper::share::{Consumer, Share};
use crate::hopper::spec::Split;
use crate::hopper::stages::Stages;
use crate::layout::batch::BatchIndexArgs;
use crate::split_k::fixup::FixupArgs;
use crate::split_k::reduction::PartsArgs;
use crate::store::{StoreArgs, StoreSpec, Sum};

/// The named barrier at which the first consumer waits for its main loop under ping-pong; the second's follows.
const PING_PONG_BARRIER: u32 = 8;
/// Warps of a CTA that clear rows for which nothing is multiplied: those beside the one that loads.
const CLEARING: u32 = 3;
/// Tiles by which they may be behind.
pub(super) const PACES: u32 = 2;

verdigris_kir::parameters! {
    /// All parameters of the kernels.
    pub(super) struct Conv / ConvArgs of Spec as spec {
        pub(super) producer: ProducerArgs = *spec,
        pub(super) schedule: ScheduleArgs = spec.split != Split::No,
        pub(super) parts: Option<PartsArgs> = (spec.split == Split::Reduced).then_some(()),
        pub(super) swap_ab: Option<SwapAbArgs> = spec.shares_depth().then(|| spec.epilogue.clone()),
        pub(super) store: Option<TileStoreArgs> = (spec.split != Split::Reduced && !spec.shares_depth()).then(|| spec.store()),
        pub(super) fixup: Option<FixupArgs> = (spec.split == Split::Fixup).then_some(()),
    }
}

verdigris_kir::parameters! {
    /// The epilogue store of whole tiles.
    pub(super) struct TileStore / TileStoreArgs of StoreSpec as store {
        pub(super) batch: BatchIndexArgs = (),
        pub(super) store: StoreArgs = *store,
    }
}

/// The kernel's body. `T` is what sums are kept in.
pub(super) fn convolve<'k, T: Sum + AsVal<'k, T>>(k: Kernel<'k>, spec: &Spec) {
    let (main, tile) = (&spec.main, spec.main.tile);
    let Conv { producer, schedule, parts, swap_ab, store, fixup } = Conv::declare(k, spec);
    let epilogue = TileEpilogue::new(k, spec, parts, swap_ab, store, fixup);
    let stages = Stages::new(k, main);
    // Nothing is filled here: the ring lets those who clear rows neither fall far behind those who multiply nor run ahead and take their
    // bandwidth.
    let paces = spec.clears().then(|| Ring::new(k, PACES, CLEARING, RingScope::Cta));
    let init = || {
        stages.ring.init();
        paces.iter().for_each(|pace| pace.init());
        epilogue.init();
        producer.maps().for_each(|map| k.prefetch_tensormap(map));
    };
    roles::start(k, init, || producer.clear(k, spec, stages.slots.map(|slots| slots.address())));
    let share = Share::new(k, tile);

    let load = || {
        let slots = Slots::new(k, spec, &producer, &stages, share);
        let pace = paces.map(|paces| paces.cursor());
        roles::load_each(k, tile, schedule, slots.ring, |work| {
            if let Some(pace) = &pace {
                pace.acquire(0);
                pace.advance();
            }
            producer.load(k, spec, &share.own(work), &slots);
        });
    };

    let multiply = || {
        let own = Consumer::new(k, tile);
        let main_loop = MainLoop::<T>::new(k, main, &stages, schedule, PING_PONG_BARRIER, own);
        // Under ping-pong, the worker's place and how many there are: phases differ in the steps of their tiles.
        let specials = if tile.peers() > 1 { [Special::ClusterX, Special::ClustersX] } else { [Special::CtaX, Special::GridX] };
        let workers = tile.ping_pong.then(|| specials.map(|special| k.special(special)));
        let steps_behind = |work: Option<&Work<'k>>| match workers {
            Some([first, workers]) => producer.steps_of_tile(k, &schedule, work.map_or(first, |work| work.tile + workers)),
            None => schedule.steps(),
        };
        main_loop.for_each(steps_behind, |work| {
            let work = share.own(work);
            let target = producer.target(k, &work);
            main_loop.multiply(&work, target.steps, |_| None);
            k.wgmma_wait(0);
            // Rows without taps read nothing.
            if producer.may_be_empty() {
                main_loop.release_last_of(target.steps)
            } else {
                main_loop.release_last()
            }
            epilogue.take(main_loop.results(), &work, &target, share, own, || producer.tile_columns(k, spec));
        });
        epilogue.finish(own.thread);
    };

    // Rows that nothing is multiplied for, beside each tile.
    let clear = || {
        let Some(paces) = paces else { return };
        let cursor = paces.cursor();
        let warps = [k.warp() - 1, k.constant(CLEARING)];
        schedule.for_each(|work| {
            cursor.wait();
            let column = share.column(&work) * tile.n;
            producer.clear_beside(k, work.batch, share.row(&work) * tile.m, tile.m, warps, |group, place| {
                epilogue.clear_rows(column, group, place);
            });
            cursor.release(cursor.stage(), k.lane());
            cursor.advance();
        });
    };

    let producers = [roles::load(&load), Role { name: "clear", warps: CLEARING, registers: None, body: &clear }];
    let producers = if spec.clears() { &producers[..] } else { &producers[..1] };
    roles::run(k, tile, spec.registers(), producers, &multiply);
}
