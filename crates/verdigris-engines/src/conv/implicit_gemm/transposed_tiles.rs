//! The filter's gradient of tf32 operands, whose tiles are transposed in shared memory: the tensor cores read 32-bit operands along their
//! depth, which is pixels here, while memory has channels side by side.
//!
//! **A** (channels of dy) goes through registers: a thread reads from the tile as TMA left it the elements that the instruction wants
//! of it. **B** (channels of x) is transposed in place by three warps beside the one that loads: a panel of 32 pixels by 32 channels, 4
//! KiB, is read whole, 16 bytes a lane at a time, and written back as 32 channels by 32 pixels.
//!
//! **The order of pixels** in the depth of a step is free, provided that A and B agree: place `4q + j` (`q < 8`, `j < 4`) holds pixel
//! `8j + (q xor 2j)`. Under the swizzle (16 bytes `c` of row `r` stand at `c xor r mod 8`) eight lanes of different `q` then read and write
//! B on different banks, and so do the four pixels and eight channels that a warp reads of A at a time.
//!
//! **Cost.** Shared memory is the limit: a step writes and reads each operand, B twice, and every 64 rows read B again.
//! **Source.** Own derivation; the fragment is that of PTX ISA 9.0, "Register fragments for wgmma.mma_async.m64nNk8".

use verdigris_kir::face::{Kernel, Role, Val, WgmmaA};
use verdigris_kir::ir::MapType;
use verdigris_kir::tile::fragment::Fragment;
use verdigris_kir::tile::operand::{Major, OperandTile};
use verdigris_kir::tile::schedule::Work;

use super::epilogue::TileEpilogue;
use super::kernel::Conv;
use super::producer::Slots;
use super::spec::Spec;
use crate::hopper::roles;
use crate::hopper::share::{Consumer, Share};
use crate::hopper::stages::Stages;

/// A panel: as many pixels as a step is deep, by the channels of 128 bytes.
pub(super) const PANEL_BYTES: u32 = 4096;
/// Instruction steps of 8 pixels.
const STEPS: u32 = 4;
/// Warps that transpose panels.
const TRANSPOSERS: u32 = 3;

/// Where 16 bytes `chunk` of a tile's row `row` stand in it.
fn swizzled<'k>(row: Val<'k, u32>, chunk: Val<'k, u32>) -> Val<'k, u32> {
    (row << 7) + (((row & 7) ^ chunk) << 4)
}

/// Transposes the panel at `panel`; all lanes of a warp call it.
fn transpose_panel<'k>(k: Kernel<'k>, panel: Val<'k, u32>) {
    // A lane takes four channels by four pixels, twice.
    let (place, first) = (k.lane() & 7, k.lane() >> 3);
    let blocks: Vec<Vec<Vec<Val<'k, u32>>>> = (0..2)
        .map(|half| {
            let pixel = |j: u32| (place ^ (2 * j)) + 8 * j;
            (0..4).map(|j| k.ld_shared_vector::<u32>(panel + swizzled(pixel(j), first + 4 * half), 0, 4)).collect()
        })
        .collect();
    k.warp_sync();
    for (half, pixels) in blocks.iter().enumerate() {
        for channel in 0..4 {
            let row = (first + 4 * half as u32) * 4 + channel;
            let words: Vec<Val<'k, u32>> = pixels.iter().map(|channels| channels[channel as usize]).collect();
            k.st_shared_vector(panel + swizzled(row, place), 0, &words);
        }
    }
}

/// The kernel's body.
pub(super) fn convolve<'k>(k: Kernel<'k>, spec: &Spec) {
    let (main, tile) = (&spec.main, spec.main.tile);
    // B as it is multiplied: rows of channels, 32 pixels each.
    let transposed_tiles = OperandTile { rows: tile.n, ty: MapType::Tf32, major: Major::Depth };
    let Conv { producer, schedule, parts, swap_ab, store, fixup } = Conv::declare(k, spec);
    let epilogue = TileEpilogue::new(k, spec, parts, swap_ab, store, fixup);
    // Each warp of a consumer gives a stage back: all of them have read A.
    let stages = Stages::read_by(k, main, 4 * tile.consumers);
    let (ring, [a_slots, b_slots], [a_tile, b_tile]) = (stages.ring, stages.slots, stages.tiles);
    // B of a stage is transposed.
    let ready = k.mbarrier_array("turned", main.stages);
    ready.arrivals().set(u64::from(TRANSPOSERS));
    let init = || {
        ring.init();
        ready.init();
        producer.maps().for_each(|map| k.prefetch_tensormap(map));
    };
    roles::start(k, init, || {});
    let share = Share::new(k, tile);

    let load = || {
        let slots = Slots::new(k, spec, &producer, &stages, share);
        roles::load_each(k, tile, schedule, slots.ring, |work| producer.load(k, spec, &work, &slots));
    };

    let transpose_panels = || {
        let cursor = ring.cursor();
        let own = k.uniform(k.warp()) - 1;
        schedule.for_each(|work| {
            k.range(work.steps, |_| {
                cursor.wait();
                let panels = b_slots.address() + cursor.stage() * b_tile.bytes();
                k.range_step(own, tile.n / 32, TRANSPOSERS, |panel| transpose_panel(k, panels + panel * PANEL_BYTES));
                // The tensor cores read what ordinary stores wrote.
                k.fence_proxy_async();
                k.warp_sync();
                k.when(k.lane().eq(0), || ready.at(cursor.stage()).arrive());
                cursor.advance();
            });
        });
    };

    let multiply = || {
        let consumer = Consumer::new(k, tile);
        let sums: Vec<Fragment<'k, f32>> = (0..tile.blocks()).map(|_| Fragment::unset(k, tile.n)).collect();
        let b_low = transposed_tiles.descriptor_base(b_slots.address(), 0u32);
        let cursor = ring.cursor();
        let phase = k.var_named("turned phase", 0u32);

        // This thread's row of a block, and the pixels that it holds of a step: `8j + (q xor 2j)`.
        let row = Fragment::<f32>::row(consumer.thread);
        let j = consumer.thread & 3;
        let (panel, chunk, word) = (row >> 5, (row & 31) >> 2, row & 3);
        let own = |q: u32| swizzled((j << 3) + ((j << 1) ^ q), chunk) + word * 4 + panel * PANEL_BYTES;
        // Row 8 below is two chunks on.
        let places: Vec<[Val<'k, u32>; 2]> = (0..2 * STEPS).map(|q| [own(q), own(q) ^ 32]).collect();
        let a_first = a_slots.address() + (consumer.first_row >> 5) * PANEL_BYTES;

        schedule.for_each(|work: Work<'k>| {
            k.range(work.steps, |step| {
                cursor.wait();
                let stage = cursor.stage();
                let a_stage = a_first + stage * a_tile.bytes();
                let fragments: Vec<Vec<Val<'k, u32>>> = (0..STEPS)
                    .flat_map(|part| (0..tile.blocks()).map(move |block| (part, block)))
                    .map(|(part, block)| {
                        let element = |q: u32, lower: usize| {
                            k.ld_shared::<u32>(a_stage + places[q as usize][lower], i64::from(2 * block * PANEL_BYTES))
                        };
                        vec![element(2 * part, 0), element(2 * part, 1), element(2 * part + 1, 0), element(2 * part + 1, 1)]
                    })
                    .collect();
                ready.at(stage).wait(phase);
                let b_stage = b_low + stage * (b_tile.bytes() >> 4);
                let add = step.gt(0);
                k.wgmma_fence();
                for part in 0..STEPS {
                    let b_descriptor = transposed_tiles.descriptor_from(b_stage + transposed_tiles.advance(0, part));
                    for (block, sum) in sums.iter().enumerate() {
                        let a = WgmmaA::Registers(&fragments[(part * tile.blocks()) as usize + block]);
                        let adds = if part == 0 { add } else { k.constant(true) };
                        k.wgmma(spec.transposed_shape(), sum.registers(), a, b_descriptor, adds);
                    }
                }
                k.wgmma_commit();
                // The fragments' registers are filled again in the next step; meanwhile the other warpgroup multiplies.
                k.wgmma_wait(0);
                k.warp_sync();
                cursor.release(stage, k.lane());
                cursor.advance();
                phase.set(k.select(cursor.stage().eq(0), phase ^ 1, phase));
            });

            let target = producer.target(k, &work);
            epilogue.take(&sums, &work, &target, share, consumer, || producer.tile_columns(k, spec));
        });
        epilogue.finish(consumer.thread);
    };

    let transpose = Role { name: "turn", warps: TRANSPOSERS, registers: None, body: &transpose_panels };
    roles::run(k, tile, spec.registers(), &[roles::load(&load), transpose], &multiply);
}
