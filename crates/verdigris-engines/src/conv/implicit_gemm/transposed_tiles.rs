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
use verdigris_kir::tile::ring::{Ring, RingScope, publish_barriers};
use verdigris_kir::tile::schedule::Work;

use super::kernel::{Conv, FIRST_BARRIER, Spec, TileStore, WARPGROUP};
use super::producer::Slots;
use crate::split_k::fixup::{Fixup, Part};
use crate::split_k::reduction::Parts;
use crate::store::{Store, Tile};

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
    let (a_tile, b_tile) = (spec.a_tile(), spec.b_tile());
    // B as it is multiplied: rows of channels, 32 pixels each.
    let transposed_tiles = OperandTile { rows: spec.tile_n, ty: MapType::Tf32, major: Major::Depth };
    let Conv { producer, schedule, parts, store, fixup, .. } = Conv::declare(k, spec);
    let parts = parts.map(|parts| Parts::new(k, parts, spec.part_tile()));
    let store = store.map(|TileStore { batch, store }| (batch, Store::new(k, store, spec.store())));
    let fixup = fixup.map(|fixup| Fixup::new(k, fixup, spec.consumers, FIRST_BARRIER));

    let a_slots = k.shared("a tiles", spec.stages * a_tile.bytes(), 1024);
    let b_slots = k.shared("b tiles", spec.stages * b_tile.bytes(), 1024);
    // Each warp of a consumer gives a stage back: all of them have read A.
    let ring = Ring::new(k, spec.stages, 4 * spec.consumers, RingScope::Cta);
    // B of a stage is transposed.
    let ready = k.mbarrier_array("turned", spec.stages);
    ready.arrivals().set(u64::from(TRANSPOSERS));
    k.when(k.thread().eq(0), || {
        ring.init();
        ready.init();
        producer.maps().for_each(|map| k.prefetch_tensormap(map));
    });
    publish_barriers(k);
    // What is in front of this launch may still run: nothing of it is touched above.
    k.griddep_wait();
    k.griddep_launch();

    let load = || {
        let slots = Slots {
            ring: ring.cursor(),
            a: a_slots.address(),
            b: b_slots.address(),
            a_part: k.constant(0),
            b_part: k.constant(0),
            a_options: Default::default(),
            b_options: Default::default(),
        };
        k.when(k.elect(), || {
            schedule.for_each(|work| producer.load(k, spec, &work, work.row * spec.tile_m, work.column * spec.tile_n, &slots));
        });
    };

    let transpose_panels = || {
        let cursor = ring.cursor();
        let own = k.uniform(k.warp()) - 1;
        schedule.for_each(|work| {
            k.range(work.steps, |_| {
                cursor.wait();
                let tile = b_slots.address() + cursor.stage() * b_tile.bytes();
                k.range_step(own, spec.tile_n / 32, TRANSPOSERS, |panel| transpose_panel(k, tile + panel * PANEL_BYTES));
                // The tensor cores read what ordinary stores wrote.
                k.fence_proxy_async();
                k.warp_sync();
                k.when(k.lane().eq(0), || ready.at(cursor.stage()).arrive());
                cursor.advance();
            });
        });
    };

    let multiply = || {
        let thread = k.thread() & (WARPGROUP - 1);
        let warpgroup = k.uniform(k.thread() >> 7) - 1;
        let first_row = warpgroup * (64 * spec.blocks());
        let sums: Vec<Fragment<'k, f32>> = (0..spec.blocks()).map(|_| Fragment::unset(k, spec.tile_n)).collect();
        let b_low = transposed_tiles.descriptor_base(b_slots.address(), 0u32);
        let cursor = ring.cursor();
        let phase = k.var_named("turned phase", 0u32);

        // This thread's row of a block, and the pixels that it holds of a step: `8j + (q xor 2j)`.
        let row = Fragment::<f32>::row(thread);
        let j = thread & 3;
        let (panel, chunk, word) = (row >> 5, (row & 31) >> 2, row & 3);
        let own = |q: u32| swizzled((j << 3) + ((j << 1) ^ q), chunk) + word * 4 + panel * PANEL_BYTES;
        // Row 8 below is two chunks on.
        let places: Vec<[Val<'k, u32>; 2]> = (0..2 * STEPS).map(|q| [own(q), own(q) ^ 32]).collect();
        let a_first = a_slots.address() + (first_row >> 5) * PANEL_BYTES;

        schedule.for_each(|work: Work<'k>| {
            k.range(work.steps, |step| {
                cursor.wait();
                let stage = cursor.stage();
                let a_stage = a_first + stage * a_tile.bytes();
                let fragments: Vec<Vec<Val<'k, u32>>> = (0..STEPS)
                    .flat_map(|part| (0..spec.blocks()).map(move |block| (part, block)))
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
                        let a = WgmmaA::Registers(&fragments[(part * spec.blocks()) as usize + block]);
                        let adds = if part == 0 { add } else { k.constant(true) };
                        k.wgmma(spec.shape(), sum.registers(), a, b_descriptor, adds);
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

            if let Some(parts) = &parts {
                let place = [work.row, work.column, work.batch, work.part];
                parts.keep(sums.iter().flat_map(|sum| sum.registers()).copied(), place, warpgroup, thread);
            }
            let Some((batch, store)) = &store else { return };
            let tile = Tile {
                row: work.row * spec.tile_m + first_row,
                column: work.column * spec.tile_n,
                batch: work.batch,
                indices: batch.split(work.batch),
                warpgroup,
                thread,
            };
            match &fixup {
                None => store.write(&sums, &tile),
                Some(fixup) => {
                    let owner = work.tile * spec.consumers + warpgroup;
                    let last = fixup.is_last(&sums, Part { owner, part: work.part, parts: work.parts, warpgroup, thread });
                    k.when(last, || store.write(&sums, &tile));
                }
            }
        });
        if let Some((_, store)) = &store {
            store.finish(thread);
        }
    };

    let (few, many) = spec.registers();
    let produce = || {
        k.warp_roles(&[
            Role { name: "load", warps: 1, registers: None, body: &load },
            Role { name: "turn", warps: TRANSPOSERS, registers: None, body: &transpose_panels },
        ]);
    };
    k.warp_roles(&[
        Role { name: "producer", warps: 4, registers: Some(few), body: &produce },
        Role { name: "consumer", warps: 4 * spec.consumers, registers: Some(many), body: &multiply },
    ]);
}
