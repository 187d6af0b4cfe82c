//! The Hopper GEMM kernel: TMA fills a ring of swizzled tiles, warpgroups multiply out of it, results leave through shared memory and TMA.
//!
//! Top to bottom: parameters and shared memory, the producer, the consumers' main loop, the roles. Which part of the work a CTA of a cluster takes
//! is in [`super::share`], tiles in turn in [`super::turns`], what follows the main loop in [`super::ending`] and [`crate::parts`].
//!
//! Source: the shape of the main loop is that of CUTLASS's warp-specialized cooperative kernels and of fast.cu.

use verdigris_kir::face::{AsVal, Kernel, Role};
use verdigris_kir::tile::clip::Clip;
use verdigris_kir::tile::operand::ROW_BYTES;
use verdigris_kir::tile::ring::{Ring, RingScope, publish_barriers};
use verdigris_kir::tile::schedule::{Schedule, Work};

use super::ending::{Ending, Place};
use super::promote::BlockFactors;
use super::share::Share;
use super::spec::{Shared, Spec, Split, WARPGROUP};
use super::sums::Sums;
use super::turns::Turns;
use crate::parts::batch::BatchIndex;
use crate::parts::way_out::Sum;

/// Instruction steps of 32 bytes in one 128-byte row of depth.
const STEPS: u32 = ROW_BYTES / 32;

/// The kernel's body. `T` is what sums are kept in.
pub(super) fn gemm<'k, T: Sum + AsVal<'k, T>>(k: Kernel<'k>, spec: &Spec) {
    let (a_tile, b_tile) = (spec.a_tile(), spec.b_tile());
    let (a, b) = (k.tensor_map("a", spec.clipped(Shared::A).map()), k.tensor_map("b", spec.clipped(Shared::B).map()));
    let (a_batches, b_batches) = (k.scalar::<u32>("a_batches"), k.scalar::<u32>("b_batches"));
    let (a_clip, b_clip) = (Clip::declare(k, spec.clipped(Shared::A)), Clip::declare(k, spec.clipped(Shared::B)));
    let schedule = Schedule::declare(k, spec.split != Split::No);
    let batch = BatchIndex::declare(k);
    let factors = BlockFactors::declare(k, spec.scaled);
    let ending = Ending::declare(k, spec, batch);

    let a_slots = k.shared("a tiles", spec.stages * a_tile.bytes(), 1024);
    let b_slots = k.shared("b tiles", spec.stages * b_tile.bytes(), 1024);
    let scope = if spec.cluster > 1 { RingScope::Cluster } else { RingScope::Cta };
    let ring = Ring::new(k, spec.stages, if spec.pingpong { 1 } else { spec.consumers }, scope);
    k.when(k.thread().eq(0), || {
        ring.init();
        ending.init();
        k.prefetch_tensormap(&a);
        k.prefetch_tensormap(&b);
    });
    a_clip.clear(a_slots.address(), spec.stages, k.thread(), spec.threads());
    b_clip.clear(b_slots.address(), spec.stages, k.thread(), spec.threads());
    publish_barriers(k);
    // What is in front of this launch may still run: nothing of it is touched above.
    k.griddep_wait();
    k.griddep_launch();
    let share = Share::new(k, spec);

    let load = || {
        let cursor = ring.cursor();
        let (a_part, b_part) = (share.loads_from(Shared::A), share.loads_from(Shared::B));
        k.when(k.elect(), || {
            schedule.for_each(|work| {
                let [tile_row, tile_column] = share.tile(&work);
                let (row, column) = (tile_row * spec.tile_m + a_part, tile_column * spec.tile_n + b_part);
                let (a_batch, b_batch) = (work.batch * a_batches, work.batch * b_batches);
                let (first_step, steps) = share.steps(&work);
                let (rows, columns) = (a_clip.rows(tile_row * spec.tile_m), b_clip.rows(tile_column * spec.tile_n));
                let bytes = a_clip.bytes(rows) + b_clip.bytes(columns);
                k.range(steps, |step| {
                    let depth = (first_step + step) * spec.depth();
                    let full = cursor.acquire(bytes);
                    let a_slot = a_slots.address() + cursor.stage() * a_tile.bytes();
                    let b_slot = b_slots.address() + cursor.stage() * b_tile.bytes();
                    a_clip.load(a_slot, a_part, rows, &a, row, depth, a_batch, full, share.options(Shared::A));
                    b_clip.load(b_slot, b_part, columns, &b, column, depth, b_batch, full, share.options(Shared::B));
                    cursor.advance();
                });
            });
        });
    };

    let multiply = || {
        let thread = k.thread() & (WARPGROUP - 1);
        let warpgroup = k.uniform(k.thread() >> 7) - 1;
        let first_row = if spec.pingpong { k.constant(0) } else { warpgroup * (64 * spec.blocks()) };
        let sums = Sums::<T>::new(k, spec.keep(), spec.blocks(), spec.tile_n);
        let kept = ending.begin::<T>();
        let turns = Turns::new(k, spec, schedule, warpgroup);
        let a_low = a_tile.descriptor_base(a_slots.address(), first_row);
        let b_low = b_tile.descriptor_base(b_slots.address(), 0u32);
        let cursor = ring.cursor();
        let previous = k.var_named("previous", 0u32);
        let add = k.var_named("add", k.thread().ge(0u32));

        turns.for_each(&cursor, |work: Work<'k>| {
            let (first_step, steps) = share.steps(&work);
            let place = || {
                let tile = share.tile(&work);
                let first = [tile[0] * spec.tile_m + first_row, tile[1] * spec.tile_n];
                Place { tile, first, rank: share.rank, peer: share.peer, warpgroup, thread }
            };
            let factors = factors.zip(ending.extents()).map(|(factors, extents)| {
                factors.tile(batch.split(work.batch), place().first, [spec.blocks(), spec.tile_n], extents, thread)
            });
            sums.begin();
            turns.wait();
            k.range(steps, |step| {
                let factors = factors.as_ref().map(|factors| factors.load((first_step + step) * spec.depth()));
                cursor.wait();
                let stage = cursor.stage();
                let (a_stage, b_stage) = (a_low + stage * (a_tile.bytes() >> 4), b_low + stage * (b_tile.bytes() >> 4));
                add.set(if spec.promote { k.thread().gt(u32::MAX - 1) } else { step.gt(0) });
                k.wgmma_fence();
                for part in 0..STEPS {
                    let b_descriptor = b_tile.descriptor_from(b_stage + b_tile.advance(0, part));
                    for block in 0..spec.blocks() {
                        let a_descriptor = a_tile.descriptor_from(a_stage + a_tile.advance(64 * block, part));
                        let adds = if part == 0 { add.get() } else { k.constant(true) };
                        sums.multiply(block as usize, spec.shape(), a_descriptor, b_descriptor, adds);
                    }
                }
                k.wgmma_commit();
                if spec.promote {
                    k.wgmma_wait(0);
                    cursor.release(stage, thread);
                    sums.promote(factors.as_ref());
                } else {
                    // One group stays in flight while the stage before it goes back.
                    k.wgmma_wait(1);
                    k.when(step.gt(0), || cursor.release(previous, thread));
                    previous.set(stage);
                }
                cursor.advance();
            });
            turns.hand_on(&work);
            if !spec.promote {
                k.wgmma_wait(0);
                cursor.release(previous, thread);
            }
            // The place not before the main loop, which has no register to spare for it.
            ending.take(&kept, sums.finish(), &work, place());
        });
        ending.finish(thread);
    };

    let (few, many) = spec.registers();
    let load_warp = || k.warp_roles(&[Role { name: "load", warps: 1, registers: None, body: &load }]);
    k.warp_roles(&[
        Role { name: "producer", warps: 4, registers: Some(few), body: &load_warp },
        Role { name: "consumer", warps: 4 * spec.consumers, registers: Some(many), body: &multiply },
    ]);
    if spec.ctas() > 1 {
        // A peer may still arrive on this CTA's barriers.
        k.cluster_sync();
    }
}
