//! The Hopper GEMM kernel: TMA fills a ring of swizzled tiles, warpgroups multiply out of it, results leave through shared memory and TMA.
//!
//! Top to bottom: parameters and shared memory, the producer, the consumers' main loop, the roles. How operands come to a stage and are
//! read from there is in [`super::operands`], which part of the work a CTA of a cluster takes in [`super::share`], ping-pong in
//! [`super::ping_pong`], when a stage goes back in [`super::in_flight`], the epilogue in [`super::epilogue`] and [`crate::fuse::epilogue`].
//!
//! Source: the shape of the main loop is that of CUTLASS's warp-specialized cooperative kernels and of fast.cu.

use verdigris_kir::face::{AsVal, Kernel, Role};
use verdigris_kir::params::Map;
use verdigris_kir::tile::clip::ClipArgs;
use verdigris_kir::tile::operand::ROW_BYTES;
use verdigris_kir::tile::ring::publish_barriers;
use verdigris_kir::tile::schedule::{ScheduleArgs, Work};

use super::super::factors::FactorsArgs;
use super::epilogue::TileEpilogue;
use super::in_flight::InFlight;
use super::operands::Operands;
use super::ping_pong::PingPong;
use super::promote::{BlockFactors, Scaled};
use super::share::{Consumer, Share};
use super::spec::{Shared, Spec, Split};
use super::sums::Sums;
use crate::layout::batch::BatchIndexArgs;
use crate::split_k::fixup::FixupArgs;
use crate::split_k::reduction::PartsArgs;
use crate::store::{StoreArgs, Sum};

/// Instruction steps of 32 bytes in one 128-byte row of depth.
const STEPS: u32 = ROW_BYTES / 32;

verdigris_kir::parameters! {
    pub(super) struct Params / ParamsArgs of Spec as spec {
        pub(super) a: Map = spec.clipped(Shared::A).map(),
        pub(super) b: Map = spec.clipped(Shared::B).map(),
        /// 1 for an operand with a matrix for each of the batch, 0 for one that all share.
        pub(super) a_batches: u32,
        pub(super) b_batches: u32,
        pub(super) a_clip: ClipArgs = (),
        pub(super) b_clip: ClipArgs = (),
        pub(super) schedule: ScheduleArgs = spec.split != Split::No,
        pub(super) batch: BatchIndexArgs = (),
        pub(super) a_factors: Option<FactorsArgs> = (spec.scaled[0] != Scaled::No).then_some(()),
        pub(super) b_factors: Option<FactorsArgs> = (spec.scaled[1] != Scaled::No).then_some(()),
        /// How results leave; they do not where parts are added up by a launch of their own.
        pub(super) store: Option<StoreArgs> = (spec.split != Split::Reduced).then(|| spec.store()),
        pub(super) fixup: Option<FixupArgs> = (spec.split == Split::Fixup).then_some(()),
        pub(super) parts: Option<PartsArgs> = (spec.split == Split::Reduced).then_some(()),
    }
}

/// The kernel's body. `T` is what sums are kept in.
pub(super) fn gemm<'k, T: Sum + AsVal<'k, T>>(k: Kernel<'k>, spec: &Spec) {
    let Params { a, b, a_batches, b_batches, a_clip, b_clip, schedule, batch, a_factors, b_factors, store, fixup, parts } =
        Params::declare(k, spec);
    let factors = BlockFactors::new(k, [a_factors, b_factors], spec.scaled);
    let epilogue = TileEpilogue::new(k, spec, batch, store, fixup, parts);
    let stages = Operands::new(k, spec, [a, b], [a_batches, b_batches], [a_clip, b_clip]).stages();
    k.when(k.thread().eq(0), || {
        stages.ring.init();
        epilogue.init();
        stages.prefetch_maps();
    });
    stages.clear();
    publish_barriers(k);
    // What is in front of this launch may still run: nothing of it is touched above.
    k.griddep_wait();
    k.griddep_launch();
    let share = Share::new(k, spec);

    let load = || {
        let cursor = stages.ring.cursor();
        let loader = stages.loader(share);
        k.when(k.elect(), || {
            schedule.for_each(|work| {
                let tile_load = loader.tile_load(&work);
                k.range(tile_load.steps, |step| {
                    let depth = loader.depth(&tile_load, step);
                    let full = cursor.acquire(tile_load.bytes);
                    loader.load(&tile_load, depth, &cursor, full);
                    cursor.advance();
                });
            });
            if spec.cluster > 1 {
                // A peer may still arrive on this CTA's barriers.
                cursor.drain();
            }
        });
    };

    let multiply = || {
        let own = Consumer::new(k, spec);
        let sums = Sums::<T>::new(k, spec.keep(), spec.blocks(), spec.tile_n);
        let kept = epilogue.begin::<T>();
        let ping_pong = PingPong::new(k, spec, schedule, own.warpgroup);
        let descriptors = stages.descriptors(own.first_row);
        let cursor = stages.ring.cursor();
        let in_flight = InFlight::new(k, spec.promote, cursor, own.thread);

        ping_pong.for_each(&cursor, |work: Work<'k>| {
            let (first_step, steps) = share.steps(&work);
            let place = || share.place(&work, own);
            let factors = factors.zip(epilogue.extents()).map(|(factors, extents)| {
                factors.tile(batch.split(work.batch), place().first, [spec.blocks(), spec.tile_n], extents, own.thread)
            });
            sums.begin();
            ping_pong.wait();
            k.range(steps, |step| {
                let factors = factors.as_ref().map(|factors| factors.load((first_step + step) * spec.depth()));
                cursor.wait();
                let stage = cursor.stage();
                let tiles = descriptors.of(stage);
                in_flight.begin(step);
                k.wgmma_fence();
                for part in 0..STEPS {
                    let b = tiles.b(part);
                    for block in 0..spec.blocks() {
                        let a = tiles.a(64 * block, part);
                        let adds = if part == 0 { in_flight.adds.get() } else { k.constant(true) };
                        sums.multiply(block as usize, spec.shape(), a, b, adds);
                    }
                }
                k.wgmma_commit();
                in_flight.end(step, stage, || sums.promote(factors.as_ref()));
                cursor.advance();
            });
            ping_pong.hand_on(&work);
            in_flight.wait_all();
            // The place not before the main loop, which has no register to spare for it.
            epilogue.take(&kept, sums.finish(), &work, place());
        });
        epilogue.finish(&kept, own.thread);
    };

    let (few, many) = spec.registers();
    let load_warp = || k.warp_roles(&[Role { name: "load", warps: 1, registers: None, body: &load }]);
    k.warp_roles(&[
        Role { name: "producer", warps: 4, registers: Some(few), body: &load_warp },
        Role { name: "consumer", warps: 4 * spec.consumers, registers: Some(many), body: &multiply },
    ]);
}
