//! wgrad: a CTA adds up one block of taps over its share of all pixels; the shares meet in [`crate::split_k::filter::depthwise`].
//!
//! A thread has the channels of one 32-bit word and all taps of the block, in f32. It reads a block of 4×7 (2×4) gradients and each line of
//! the tile that they meet once.

use verdigris_kir::face::{Kernel, Val, Var};
use verdigris_kir::params::Write;

use super::coordinates::{Present, ThreadCoordinates};
use super::pixels::{Product, ProductArguments};
use super::spec::Spec;
use super::tile::{ActivationsArguments, Channels, TileExtentsArguments, widen};

/// A thread's sums: rows and columns of taps, channels.
type Sums<'k> = Vec<Vec<Vec<Var<'k, f32>>>>;

verdigris_kir::parameters! {
    /// What the kernel reads and writes.
    pub(super) struct Filter / FilterArguments of Spec as spec {
        pub(super) product: ProductArguments = *spec,
        pub(super) gradient_extents: TileExtentsArguments = (),
        pub(super) gradients: ActivationsArguments = *spec,
        /// Rows and columns of the filter.
        pub(super) filter: [u32; 2],
        pub(super) parts: Write = 4,
    }
}

/// Builds the kernel.
pub(super) fn kernel<'k>(k: Kernel<'k>, spec: &Spec) {
    let Filter { product, gradient_extents, gradients: y, filter, parts } = Filter::declare(k, spec);
    let Product { channel_blocks, channels: all_channels, share, all_tap_blocks, tap_blocks, tiles, places, extents, activations: x } =
        product;
    let coordinates = ThreadCoordinates::new(k, spec, places);

    let (x_bytes, y_bytes) = (spec.tile_bytes(), spec.gradient_bytes());
    let stage_bytes = x_bytes + y_bytes;
    let whole_bytes = (spec.stages() * stage_bytes).max(spec.taps() * spec.channels() * spec.threads() * 4);
    let stages = k.shared("tiles", whole_bytes, 128).address();

    let (rest, channel_block) = channel_blocks.split(k.cta());
    let (part, number) = all_tap_blocks.split(rest);
    let tap_block = tap_blocks.split(number);
    let steps = share.count(part);
    let channels = Channels { first: channel_block * spec.cta_channels(), all: all_channels, addend: k.constant(0) };
    let stage = |step: Val<'k, u32>| stages + (step & 1u32) * stage_bytes;
    let fetch = |step: Val<'k, u32>| {
        let tile = tiles.at(share.item(part, step), &tap_block);
        x.fetch(k, spec, &extents, &tile.origin, channels, stage(step));
        let own = k.constant(true);
        let gradients = super::tile::Origin { plane: tile.plane, has_plane: own, first: tile.first, ..tile.origin };
        y.fetch(k, spec, &gradient_extents, &gradients, channels, stage(step) + x_bytes);
    };

    let [rows, columns] = spec.block;
    let new = || (0..spec.channels()).map(|_| k.var(0.0f32)).collect();
    let sums: Sums<'k> = (0..rows).map(|_| (0..columns).map(|_| new()).collect()).collect();
    let (outputs_ahead, lines_ahead) = coordinates.ahead(spec);
    let own = extents.offset(spec, coordinates.place[0], lines_ahead[0], lines_ahead[1]) + coordinates.lane * 4;
    let own_gradients =
        gradient_extents.offset(spec, coordinates.place[0], outputs_ahead[0], outputs_ahead[1]) + (coordinates.lane * 4 + x_bytes);

    let present = Present::new(spec, &tap_block, filter);
    if spec.overlaps() {
        // What is read and written may be the business of the launch in front of this one.
        k.griddep_wait();
        k.griddep_launch();
    }
    k.when(steps.gt(0), || fetch(k.constant(0)));
    k.cp_async_commit();
    k.range(steps, |step| {
        // All are done with the stage that is filled next.
        k.bar_sync();
        k.when((step + 1).lt(steps), || fetch(step + 1));
        k.cp_async_commit();
        k.cp_async_wait(1);
        k.bar_sync();
        k.when(coordinates.is_used, || {
            let stage = stage(step);
            let pitches_bytes = [extents.pitch_bytes, gradient_extents.pitch_bytes];
            add_products(k, spec, [stage + own, stage + own_gradients], pitches_bytes, &present, &sums);
        });
    });

    // Threads of the same channels add up, in the order of their places.
    k.bar_sync();
    let across = spec.cta_channels();
    let all: Vec<Var<'k, f32>> = sums.into_iter().flatten().flatten().collect();
    let mine = stages + k.thread() * 4;
    for (i, sum) in all.iter().enumerate() {
        k.st_shared(mine, i as i64 * i64::from(4 * spec.threads()), sum.get());
    }
    k.bar_sync();
    let base = parts.moved((part * all_tap_blocks.value() + number).widen() * (all_channels.widen() * u64::from(4 * spec.taps())));
    k.range_step(k.thread(), spec.taps() * across, spec.threads(), |element| {
        // Channels side by side, for neighbouring threads to write neighbouring words.
        let (tap, channel) = (element >> across.ilog2(), element & (across - 1));
        let (lane, word) = (channel >> spec.channels().ilog2(), channel & (spec.channels() - 1));
        let from = stages + (tap * spec.channels() + word) * (4 * spec.threads()) + lane * 4;
        let first = k.ld_shared::<f32>(from, 0);
        let sum = (1..spec.places()).fold(first, |sum, place| sum + k.ld_shared::<f32>(from, i64::from(place * spec.pixel_bytes())));
        let channel = channels.first + channel;
        k.when(channel.lt(all_channels), || k.st_global(base.moved((tap * all_channels).mul_wide(4)).at(channel, 4), 0, sum));
    });
}

/// Adds the products of a tile.
fn add_products<'k>(
    k: Kernel<'k>,
    spec: &Spec,
    own: [Val<'k, u32>; 2],
    pitches_bytes: [Val<'k, u32>; 2],
    present: &Present<'k>,
    sums: &Sums<'k>,
) {
    let columns = spec.block[1];
    let [output_rows, output_columns] = spec.outputs();
    let [lines, places] = spec.thread_lines();
    let read = |address: Val<'k, u32>, pixels: u32| -> Vec<Vec<Val<'k, f32>>> {
        (0..pixels).map(|pixel| widen(k, spec.dtype, k.ld_shared::<u32>(address, i64::from(spec.column_bytes(pixel))))).collect()
    };
    // A row of gradients is read when the first line needs it.
    let mut gradients: Vec<Option<Vec<Vec<Val<'k, f32>>>>> = vec![None; output_rows as usize];
    let mut line_address = own[0];
    for line in 0..lines {
        if line > 0 {
            line_address = line_address + pitches_bytes[0];
        }
        let pairs = spec.pairs(line);
        if pairs.is_empty() {
            continue;
        }
        let words = read(line_address, places);
        for (output_row, tap_row) in pairs {
            let address = || own[1] + pitches_bytes[1] * output_row as u32;
            let row: &[_] = gradients[output_row].get_or_insert_with(|| read(address(), output_columns));
            present.row(tap_row, || {
                for (tap, sum) in sums[tap_row].iter().enumerate() {
                    present.column(tap, || {
                        for (output, gradient) in row.iter().enumerate() {
                            let Some(place) = spec.stride.line(output as u32, tap as u32, columns) else { continue };
                            for ((sum, &gradient), &word) in sum.iter().zip(gradient).zip(&words[place as usize]) {
                                sum.set(k.fma(word, gradient, *sum));
                            }
                        }
                    });
                }
            });
        }
    }
}
