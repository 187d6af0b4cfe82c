//! The Hopper GEMM kernel: TMA fills a ring of swizzled tiles, warpgroups multiply out of it, results leave through shared memory and TMA.
//!
//! One page, top to bottom: parameters and shared memory, the producer, the consumers' main loop, the roles. What follows the main loop, the
//! joining of parts of a split depth and the epilogue's way to memory, is in [`crate::parts`].
//!
//! Source: the shape of the main loop is that of CUTLASS's warp-specialized cooperative kernels and of fast.cu.

use verdigris_kir::face::{AsVal, Kernel, LoadOptions, Role, Val};
use verdigris_kir::tile::fragment::Fragment;
use verdigris_kir::tile::operand::ROW_BYTES;
use verdigris_kir::tile::ring::{Ring, RingScope, publish_barriers};
use verdigris_kir::tile::schedule::{Schedule, Work};

use super::promote::BlockFactors;
use super::spec::{FIRST_BARRIER, Shared, Spec, WARPGROUP};
use super::sums::Sums;
use crate::parts::batch::BatchIndex;
use crate::parts::cluster_join::ClusterJoin;
use crate::parts::join::{Join, Part};
use crate::parts::way_out::{Sum, Tile};

/// Instruction steps of 32 bytes in one 128-byte row of depth.
const STEPS: u32 = ROW_BYTES / 32;
/// How the parts of a tile whose depth is split come together.
pub(super) enum Joining<'k> {
    No,
    Scratch(Join<'k>),
    Cluster(ClusterJoin<'k>),
}

impl Joining<'_> {
    fn init(&self) {
        if let Joining::Cluster(join) = self {
            join.init();
        }
    }
}

/// The kernel's body. `T` is what sums are kept in.
pub(super) fn gemm<'k, T: Sum + AsVal<'k, T>>(k: Kernel<'k>, spec: &Spec) {
    let (a_tile, b_tile) = (spec.a_tile(), spec.b_tile());
    let (a_loaded, b_loaded) = (spec.loaded(Shared::A), spec.loaded(Shared::B));
    let a = k.tensor_map("a", a_tile.map(a_loaded));
    let b = k.tensor_map("b", b_tile.map(b_loaded));
    let (a_batches, b_batches) = (k.scalar::<u32>("a_batches"), k.scalar::<u32>("b_batches"));
    let schedule = Schedule::declare(k, spec.split);
    let batch = BatchIndex::declare(k);
    let factors = BlockFactors::declare(k, spec.scaled);
    let way = spec.way().declare(k);
    let join = spec.joining(k);

    let a_slots = k.shared("a tiles", spec.stages * a_tile.bytes(), 1024);
    let b_slots = k.shared("b tiles", spec.stages * b_tile.bytes(), 1024);
    let scope = if spec.cluster > 1 { RingScope::Cluster } else { RingScope::Cta };
    let ring = Ring::new(k, spec.stages, if spec.pingpong { 1 } else { spec.consumers }, scope);
    k.when(k.thread().eq(0), || {
        ring.init();
        join.init();
        k.prefetch_tensormap(&a);
        k.prefetch_tensormap(&b);
    });
    publish_barriers(k);
    // What is in front of this launch may still run: nothing of it is touched above.
    k.griddep_wait();
    k.griddep_launch();

    let rank = if spec.ctas() > 1 { k.cluster_rank() } else { k.constant(0) };
    let peer = if spec.cluster > 1 { rank } else { k.constant(0) };
    let everyone = k.constant(((1u32 << spec.cluster) - 1) as u16);
    let options = |operand| LoadOptions { multicast: (spec.cluster > 1 && spec.shared == operand).then_some(everyone), policy: None };
    // A cluster takes neighbouring tiles, along the side whose operand they do not share.
    let tile_row = |work: &Work<'k>| if spec.shared == Shared::B { work.row * spec.cluster + peer } else { work.row };
    let tile_column = |work: &Work<'k>| if spec.shared == Shared::A { work.column * spec.cluster + peer } else { work.column };

    // The CTAs that share a tile each take a part of its depth, in the order of their ranks.
    let own_steps = |work: &Work<'k>| {
        let cut = |rank: Val<'k, u32>| (work.steps * rank) >> spec.cluster_split.ilog2();
        if spec.cluster_split > 1 { (cut(rank), cut(rank + 1) - cut(rank)) } else { (work.first_step, work.steps) }
    };

    let load = || {
        let cursor = ring.cursor();
        let a_part = if a_loaded < spec.tile_m { rank * a_loaded } else { k.constant(0) };
        let b_part = if b_loaded < spec.tile_n { rank * b_loaded } else { k.constant(0) };
        k.when(k.elect(), || {
            schedule.for_each(|work| {
                let row = tile_row(&work) * spec.tile_m + a_part;
                let column = tile_column(&work) * spec.tile_n + b_part;
                let (a_batch, b_batch) = (work.batch * a_batches, work.batch * b_batches);
                let (first_step, steps) = own_steps(&work);
                k.range(steps, |step| {
                    let depth = (first_step + step) * spec.depth();
                    let full = cursor.acquire(a_tile.bytes() + b_tile.bytes());
                    let stage = cursor.stage();
                    let a_slot = a_slots.address() + stage * a_tile.bytes();
                    let b_slot = b_slots.address() + stage * b_tile.bytes();
                    a_tile.load(a_slot, a_part, a_loaded, &a, row, depth, a_batch, full, options(Shared::A));
                    b_tile.load(b_slot, b_part, b_loaded, &b, column, depth, b_batch, full, options(Shared::B));
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
        let slices = if spec.cluster_split > 1 { spec.blocks() } else { 0 };
        let joined: Vec<Fragment<'k, T>> = (0..slices).map(|_| Fragment::unset(k, spec.way().tile_columns)).collect();
        let a_low = a_tile.descriptor_base(a_slots.address(), first_row);
        let b_low = b_tile.descriptor_base(b_slots.address(), 0u32);
        let cursor = ring.cursor();
        let previous = k.var_named("previous", 0u32);
        let add = k.var_named("add", k.thread().ge(0u32));
        let turn = k.var_named("turn", 0u32);
        // The named barrier at which a warpgroup waits for its turn; the other's follows.
        let turns = FIRST_BARRIER + spec.consumers;

        let one_tile = |work: Work<'k>| {
            let (first_step, steps) = own_steps(&work);
            let place = || (tile_row(&work) * spec.tile_m + first_row, tile_column(&work) * spec.tile_n);
            let factors = factors.map(|factors| {
                let (row, column) = place();
                factors.tile(batch.split(work.batch), [row, column], [spec.blocks(), spec.tile_n], way.extents(), thread)
            });
            sums.begin();
            if spec.pingpong {
                k.barrier_sync(warpgroup + turns, WARPGROUP * 2);
            }
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
            if spec.pingpong {
                k.when(schedule.goes_on_behind(&work), || k.barrier_arrive((warpgroup ^ 1) + turns, WARPGROUP * 2));
            }
            if !spec.promote {
                k.wgmma_wait(0);
                cursor.release(previous, thread);
            }

            let results = sums.finish();
            // Not before the main loop, which has no register to spare for it.
            let (row, column) = place();
            let tile = Tile { row, column, batch: work.batch, indices: batch.split(work.batch), warpgroup, thread };
            match &join {
                Joining::No => way.write(results, &tile),
                Joining::Scratch(join) => {
                    let owner = (work.tile * spec.cluster + peer) * spec.consumers + warpgroup;
                    let last = join.is_last(results, Part { owner, part: work.part, parts: work.parts, warpgroup, thread });
                    k.when(last, || way.write(results, &tile));
                }
                Joining::Cluster(join) => {
                    join.sum(results, &joined, turn, k.thread() - WARPGROUP);
                    way.write(&joined, &Tile { column: column + rank * spec.way().tile_columns, ..tile });
                }
            }
        };
        if spec.pingpong {
            // The warpgroups take tiles in turn, so that one's way out lies under the other's main loop. A main loop begins when the other's
            // has seen all of its stages: a stage's phases are told apart by parity, so nobody may wait for the one after the next.
            k.when(warpgroup.eq(1), || {
                k.barrier_arrive(turns, WARPGROUP * 2);
                cursor.skip(schedule.steps());
            });
            schedule.for_each_in_turn(warpgroup, spec.consumers, |work| {
                one_tile(work);
                cursor.skip(schedule.steps());
            });
        } else {
            schedule.for_each(one_tile);
        }
        way.finish(thread);
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
