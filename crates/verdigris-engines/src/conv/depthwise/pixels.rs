//! fprop and dgrad: a CTA works through tiles of outputs, 128 bytes of channels wide at most.
//!
//! A thread has the channels of one 32-bit word of a block of 4×7 (of strides 2×4 and 4×8) outputs, in f32. It reads each line of the tile
//! that the block meets once, widens it, and adds what it gives to all of its outputs: behind a word read from shared memory stand up to 28
//! multiplications by a tap.

use verdigris_kir::face::{Kernel, Val, Var};
use verdigris_kir::params::{Divide, Read};

use super::coordinates::{NextWork, Present, ShareArguments, ThreadCoordinates, Tile, Tiles, TilesArguments, Work};
use super::spec::Spec;
use super::tile::{ActivationsArguments, Channels, TileExtentsArguments, split_small, widen};
use crate::fuse::compute;
use crate::fuse::epilogue::{Epilogue, EpilogueArgs, EpilogueSpec};
use crate::split_k::filter::depthwise::{TapBlock, TapBlocksArguments};

verdigris_kir::parameters! {
    /// What both products begin with: channels, the share of a CTA, and the tiles that are multiplied by taps.
    pub(super) struct Product / ProductArguments of Spec as spec {
        pub(super) channel_blocks: Divide,
        pub(super) channels: u32,
        pub(super) share: ShareArguments = (),
        pub(super) all_tap_blocks: Divide,
        pub(super) tap_blocks: TapBlocksArguments = (),
        pub(super) tiles: TilesArguments = (),
        /// Places of threads: images, rows and columns.
        pub(super) places: [Divide; 3],
        pub(super) extents: TileExtentsArguments = (),
        pub(super) activations: ActivationsArguments = *spec,
    }
}

verdigris_kir::parameters! {
    /// The filter in memory.
    pub(super) struct Filter / FilterArguments of Spec as spec {
        pub(super) pointer: Read = spec.dtype.bytes() as u32,
        /// Over filters, depth, height and width; addresses count modulo 2⁶⁴, so that a walk may go backwards from the origin.
        pub(super) strides: [u64; 4],
        pub(super) origin: u64,
        pub(super) extents: [u32; 2],
        /// Filter of a channel of the result: channel · factor, and that of the block of taps.
        pub(super) factor: u32,
    }
}

verdigris_kir::parameters! {
    /// What the kernel reads and writes.
    pub(super) struct Pixels / PixelsArguments of Spec as spec {
        pub(super) product: ProductArguments = *spec,
        pub(super) filter: FilterArguments = *spec,
        pub(super) epilogue: Option<EpilogueArgs> = spec.epilogue.as_ref().map(EpilogueSpec::over_tensors),
    }
}

impl<'k> Filter<'k> {
    /// Brings a block of taps to the table: taps by channels, in f32, zeros where there is none.
    fn fetch(&self, k: Kernel<'k>, spec: &Spec, tap_block: &TapBlock<'k>, channels: Channels<'k>, table: Val<'k, u32>) {
        let [rows, columns] = spec.block;
        let across = spec.cta_channels();
        let (own, first) = (k.thread() & (across - 1), k.thread() >> across.ilog2());
        let channel = channels.first + own;
        let filter = channel * self.factor + tap_block.filter;
        let base = self.pointer.address() + self.origin + filter.widen() * self.strides[0] + tap_block.depth.widen() * self.strides[1];
        k.range_step(first, rows * columns, spec.threads() / across, |tap| {
            let (row, column) = split_small(tap, columns);
            let (row, column) = (tap_block.block[0] * rows + row, tap_block.block[1] * columns + column);
            let value = k.var(0.0f32);
            k.when(row.lt(self.extents[0]) & column.lt(self.extents[1]) & channel.lt(channels.all), || {
                let address = base + row.widen() * self.strides[2] + column.widen() * self.strides[3];
                value.set(compute::load::<f32>(k, spec.dtype, address, 0));
            });
            k.st_shared(table + (tap * across + own) * 4, 0, value.get());
        });
    }
}

/// A thread's sums: rows, columns, channels.
type Sums<'k> = Vec<Vec<Vec<Var<'k, f32>>>>;

/// Builds the kernel.
pub(super) fn kernel<'k>(k: Kernel<'k>, spec: &Spec) {
    let Pixels { product, filter, epilogue } = Pixels::declare(k, spec);
    let Product { channel_blocks, channels: all_channels, share, all_tap_blocks, tap_blocks, tiles, places, extents, activations } =
        product;
    let coordinates = ThreadCoordinates::new(k, spec, places);
    let epilogue = epilogue.expect("a product of pixels has an epilogue");

    let stage_bytes = spec.tile_bytes();
    let stages = k.shared("tiles", spec.stages() * stage_bytes, 128).address();
    let table_bytes = spec.taps() * spec.cta_channels() * 4;
    let table = k.shared("taps", spec.table_blocks() * table_bytes, 16).address();

    let (part, channel_block) = channel_blocks.split(k.cta());
    let steps = share.count(part) * all_tap_blocks.value();
    let first_channel = channel_block * spec.cta_channels();
    let channels = |tap_block: &TapBlock<'k>| Channels { first: first_channel, all: all_channels, addend: tap_block.filter };
    let stage_of = |step: Val<'k, u32>| if spec.stages() == 1 { stages } else { stages + (step & 1u32) * stage_bytes };
    // Where a step works is worked out once, where its tile is sent for.
    let next = NextWork::new(k);
    let at = |step: Val<'k, u32>| {
        let (item, number) = all_tap_blocks.split(step);
        let tap_block = tap_blocks.split(number);
        (tiles.at(share.item(part, item), &tap_block), tap_block, number)
    };
    let fetch = |step: Val<'k, u32>, (tile, tap_block, number): (Tile<'k>, TapBlock<'k>, Val<'k, u32>)| {
        activations.fetch(k, spec, &extents, &tile.origin, channels(&tap_block), stage_of(step));
        next.set(&Work { image: tile.origin.image, plane: tile.plane, first: tile.first, tap_block, number });
    };

    let [rows, columns] = spec.outputs();
    let new = || (0..spec.channels()).map(|_| k.var(0.0f32)).collect();
    let sums: Sums<'k> = (0..rows).map(|_| (0..columns).map(|_| new()).collect()).collect();
    let (outputs_ahead, lines_ahead) = coordinates.ahead(spec);
    let own = extents.offset(spec, coordinates.place[0], lines_ahead[0], lines_ahead[1]) + coordinates.lane * 4;
    let taps = coordinates.lane * (4 * spec.channels());
    // Where there is room for all blocks of taps, they stay.
    let is_scarce = all_tap_blocks.value().gt(spec.table_blocks());
    let table_of =
        |number: Val<'k, u32>| if spec.table_blocks() == 1 { table } else { table + k.select(is_scarce, 0u32, number) * table_bytes };

    let zero = k.constant(0u32);
    let first = (spec.stages() == 2).then(|| at(zero));
    if spec.overlaps() {
        // What is read and written may be the business of the launch in front of this one.
        k.griddep_wait();
        k.griddep_launch();
    }
    if let Some(first) = first {
        k.when(steps.gt(0), || fetch(zero, first));
        k.cp_async_commit();
    }
    k.range(steps, |step| {
        // All are done with the stage that is filled next, and with the taps.
        k.bar_sync();
        if spec.stages() == 1 {
            fetch(step, at(step));
        }
        let work = next.get();
        if spec.stages() == 2 {
            k.when((step + 1).lt(steps), || fetch(step + 1, at(step + 1)));
        }
        k.cp_async_commit();
        k.when(step.eq(0) | is_scarce, || {
            let first = k.select(is_scarce, work.number, 0u32);
            k.range_step(first, k.select(is_scarce, first + 1, all_tap_blocks.value()), 1, |number| {
                let tap_block = tap_blocks.split(number);
                filter.fetch(k, spec, &tap_block, channels(&tap_block), table_of(number));
            });
        });
        k.cp_async_wait(spec.stages() - 1);
        k.bar_sync();
        let present = Present::new(spec, &work.tap_block, filter.extents);
        add_products(k, spec, stage_of(step) + own, extents.pitch_bytes, table_of(work.number) + taps, &present, &sums);
        k.when((work.number + 1).eq(all_tap_blocks.value()), || {
            keep(k, spec, &epilogue, &tiles, &work, &coordinates, outputs_ahead, first_channel, all_channels, &sums);
            sums.iter().flatten().flatten().for_each(|sum| sum.set(0.0f32));
        });
    });
}

/// Adds the products of a block of taps.
fn add_products<'k>(
    k: Kernel<'k>,
    spec: &Spec,
    own: Val<'k, u32>,
    pitch_bytes: Val<'k, u32>,
    taps: Val<'k, u32>,
    present: &Present<'k>,
    sums: &Sums<'k>,
) {
    let [rows, columns] = spec.block;
    let [lines, places] = spec.thread_lines();
    let tap_bytes = i64::from(spec.cta_channels() * 4);
    let read = |row: usize| -> Vec<Vec<Val<'k, f32>>> {
        let offset = |column| (row as i64 * i64::from(columns) + column) * tap_bytes;
        let read = |column| match spec.channels() {
            1 => vec![k.ld_shared(taps, offset(column))],
            channels => k.ld_shared_vector(taps, offset(column), channels as u8),
        };
        (0..i64::from(columns)).map(read).collect()
    };
    // A row of taps is read when the first line needs it.
    let mut filter: Vec<Option<Vec<Vec<Val<'k, f32>>>>> = vec![None; rows as usize];
    let mut line_address = own;
    for line in 0..lines {
        if line > 0 {
            line_address = line_address + pitch_bytes;
        }
        let pairs = spec.pairs(line);
        if pairs.is_empty() {
            continue;
        }
        let words: Vec<Vec<Val<'k, f32>>> = (0..places)
            .map(|place| widen(k, spec.dtype, k.ld_shared::<u32>(line_address, i64::from(place * spec.pixel_bytes()))))
            .collect();
        for (output_row, tap_row) in pairs {
            let row: &[_] = filter[tap_row].get_or_insert_with(|| read(tap_row));
            present.row(tap_row, || {
                for (tap, factors) in row.iter().enumerate() {
                    present.column(tap, || {
                        for (output, sum) in sums[output_row].iter().enumerate() {
                            let Some(place) = spec.stride.line(output as u32, tap as u32, columns) else { continue };
                            for ((sum, &factor), &word) in sum.iter().zip(factors).zip(&words[place as usize]) {
                                sum.set(k.fma(word, factor, *sum));
                            }
                        }
                    });
                }
            });
        }
    }
}

/// What follows the sums.
#[allow(clippy::too_many_arguments, reason = "each says one thing about where the sums belong")]
fn keep<'k>(
    k: Kernel<'k>,
    spec: &Spec,
    epilogue: &Epilogue<'k, f32>,
    tiles: &Tiles<'k>,
    work: &Work<'k>,
    coordinates: &ThreadCoordinates<'k>,
    ahead: [Val<'k, u32>; 2],
    first_channel: Val<'k, u32>,
    all_channels: Val<'k, u32>,
    sums: &Sums<'k>,
) {
    let [step_h, step_w] = tiles.steps();
    let [height, width] = tiles.extents();
    let image = work.image + coordinates.place[0];
    let channel = first_channel + coordinates.lane * spec.channels();
    let first_row = work.first[0].unsigned() + ahead[0] * step_h;
    let first_column = work.first[1].unsigned() + ahead[1] * step_w;
    let is_inside = coordinates.is_used & image.lt(tiles.images) & channel.lt(all_channels);
    // The first pixel may lie before the tensor, so the way there is signed.
    let there = [epilogue.height_step(first_row.signed()), epilogue.width_step(first_column.signed())];
    let [down, step] = [epilogue.height_step(step_h.signed()), epilogue.width_step(step_w.signed())];
    let zero = k.constant(0u32);
    let mut first = there.iter().fold(epilogue.at_pixel([image, work.plane, zero, zero], channel), |place, step| place.along(step));
    for (i, row) in sums.iter().enumerate() {
        let output_row = first_row + step_h * i as u32;
        if i > 0 {
            first = first.along(&down);
        }
        k.when(is_inside & output_row.lt(height), || {
            let mut place = first.clone();
            for (j, pixel) in row.iter().enumerate() {
                if j > 0 {
                    place = place.along(&step);
                }
                k.when((first_column + step_w * j as u32).lt(width), || match pixel.as_slice() {
                    [low, high] if epilogue.has_pairs() => {
                        place.store_pair(place.apply_pair([low.get(), high.get()], 0), 0);
                    }
                    channels => {
                        for (right, sum) in channels.iter().enumerate() {
                            let right = right as u32;
                            let one = || place.store(place.apply(sum.get(), right), right);
                            if right == 0 { one() } else { k.when((channel + right).lt(all_channels), one) }
                        }
                    }
                });
            }
        });
    }
}
