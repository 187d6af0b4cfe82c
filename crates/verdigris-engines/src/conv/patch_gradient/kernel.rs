//! The kernel: tiles of y with their patches of x staged one ahead, sums of taps by channels in registers, groups of pixels added up in shared memory.

use verdigris_kir::face::{Kernel, Val, Var};
use verdigris_kir::params::{Divide, Write};

use super::{CHANNELS, Spec};
use crate::conv::in_patches::{Packing, Source, SourceArgs, THREADS, over};

verdigris_kir::parameters! {
    /// What the kernel reads and writes.
    pub(super) struct Gradient / GradientArgs of Spec as spec {
        pub(super) tiles: TilesArgs = (),
        pub(super) units: UnitsArgs = (),
        pub(super) x: SourceArgs = 4,
        pub(super) y: SourceArgs = spec.y_words() * 4,
        pub(super) parts: Write = 4,
        pub(super) part_bytes: u64,
        /// From one channel of y to the next in a part.
        pub(super) channel_bytes: u32,
    }
}

verdigris_kir::parameters! {
    /// Which tiles of y a CTA walks over: tiles along the width fastest, then those along the height, then images, each as many on as there are parts.
    #[derive(Clone, Copy)]
    pub(super) struct Tiles / TilesArgs of () as _spec {
        pub(super) count: u32,
        pub(super) parts: u32,
        pub(super) across: Divide,
        pub(super) down: Divide,
        /// Rows and columns of a tile.
        pub(super) extents: [u32; 2],
        /// Runs of pixels that a row of a tile is cut into, and pixels of one.
        pub(super) runs: Divide,
        pub(super) run: u32,
        /// Where y begins in a stage.
        pub(super) y_start: u32,
        /// Bytes to fill with zeros at first: places of a patch that no channel is brought to.
        pub(super) zeroed_bytes: u32,
    }
}

verdigris_kir::parameters! {
    /// Which sums a thread has. A unit is some positions, each as far from the last one as there are units along the taps, by eight channels; a position is a place of the patch that a tap meets, taps one behind the other.
    #[derive(Clone, Copy)]
    pub(super) struct Units / UnitsArgs of () as _spec {
        /// Slices of the result, and those along its taps, fastest.
        pub(super) slices: Divide,
        pub(super) tap_slices: Divide,
        /// Units of a slice, and those along its taps.
        pub(super) units: Divide,
        pub(super) across: Divide,
        /// Channels of a slice, eight by eight.
        pub(super) down: u32,
        /// Groups of threads that have all units of a slice, for runs of their own.
        pub(super) groups: u32,
        /// Positions of a filter, and of a tap.
        pub(super) positions: u32,
        pub(super) planes: Divide,
        pub(super) taps: u32,
        pub(super) filter_columns: Divide,
        /// Pixels of x from tap to tap, down and right.
        pub(super) dilations: [u32; 2],
        /// Whether the filter's last tap is the first that an output meets.
        pub(super) flipped: u32,
        /// Columns of a slice's sums.
        pub(super) columns: Divide,
    }
}

/// Builds the kernel.
pub(super) fn kernel<'k>(k: Kernel<'k>, spec: &Spec) {
    let Gradient { tiles, units, x, y, parts, part_bytes, channel_bytes } = Gradient::declare(k, spec);
    let arena = k.shared("tiles", super::ARENA_BYTES, 128).address();

    let (part, slice) = units.slices.split(k.cta());
    let (channel_slice, tap_slice) = units.tap_slices.split(slice);
    let first_channel = channel_slice * units.down * CHANNELS;
    let (group, unit) = units.units.split(k.thread());
    let (own_channels, own_taps) = units.across.split(unit);
    let has_unit = group.lt(units.groups);

    // Neighbouring lanes have neighbouring positions. What is left over at the end of a filter has its last position once more.
    let first_position = tap_slice * units.across.value() * spec.positions();
    let places: Vec<Val<'k, u32>> = (0..spec.positions())
        .map(|i| place(spec, &units, &x, (first_position + own_taps + units.across.value() * i).min(units.positions - 1)))
        .collect();
    let sums: Vec<Vec<Var<'k, f32>>> = (0..spec.taps()).map(|_| (0..CHANNELS).map(|_| k.var(0.0f32)).collect()).collect();

    k.range_step(k.thread() * 16, tiles.zeroed_bytes, THREADS * 16, |at| {
        k.st_shared_vector(arena + at, 0, &[k.constant(0u32), k.constant(0), k.constant(0), k.constant(0)]);
    });
    // Zeros are there before anything else is.
    k.bar_sync();
    let corner = |tile: Val<'k, u32>| {
        let (rest, column) = tiles.across.split(tile);
        let (image, row) = tiles.down.split(rest);
        (image, [row * tiles.extents[0], column * tiles.extents[1]])
    };
    let fetch = |tile: Val<'k, u32>, stage: Val<'k, u32>| {
        let (image, corner) = corner(tile);
        x.stage(k, spec.packing(), image, corner, k.constant(0), stage);
        let first = first_channel >> spec.y_words().ilog2();
        y.stage(k, Packing::Pixels { copy_bytes: spec.y_copy_bytes() }, image, corner, first, stage + tiles.y_start);
    };
    let stage_of = |turn: Val<'k, u32>| arena + (turn & 1u32) * x.stage_bytes;
    fetch(part, stage_of(k.constant(0)));
    k.cp_async_commit();
    let turn = k.var(0u32);
    k.range_step(part, tiles.count, tiles.parts, |tile| {
        k.cp_async_wait(0);
        // The tile is there, and all are done with the one before.
        k.bar_sync();
        let (turned, next) = (turn.get(), tile + tiles.parts);
        k.when(next.lt(tiles.count), || fetch(next, stage_of(turned + 1)));
        k.cp_async_commit();
        let stage = stage_of(turned);
        let (_, corner) = corner(tile);
        let [rows, columns]: [Val<'k, u32>; 2] = std::array::from_fn(|i| (y.extents[i] - corner[i]).min(tiles.extents[i]));
        k.when(has_unit, || {
            k.range_step(group, rows * tiles.runs.value(), units.groups, |item| {
                let (row, run) = tiles.runs.split(item);
                let first = run * tiles.run;
                let count = (columns.max(first) - first).min(tiles.run);
                let own = stage + row * x.steps[0] * x.row_bytes + first * (4 * spec.words());
                let pixels = stage + tiles.y_start + row * y.row_bytes + first * y.plane_bytes + own_channels * (4 * CHANNELS);
                add_run(k, spec, &places, own, [pixels, y.plane_bytes, count], &sums);
            });
        });
        turn.set(turned + 1);
    });
    // All are done with the last tile.
    k.bar_sync();

    let kept_row = units.across.value() * (4 * spec.kept_words());
    let group_bytes = units.down * CHANNELS * kept_row;
    k.when(has_unit, || {
        let kept = arena + group * group_bytes + own_channels * CHANNELS * kept_row + own_taps * (4 * spec.kept_words());
        for channel in 0..CHANNELS {
            let row = kept + kept_row * channel;
            for (tap, channels) in (0..).zip(&sums) {
                k.st_shared(row, tap * 4, channels[channel as usize].get());
            }
        }
    });
    // All have left their sums.
    k.bar_sync();
    let part_start = parts.moved(part.widen() * part_bytes).address();
    let all = units.down * CHANNELS * units.columns.value();
    k.range_step(k.thread(), all, THREADS, |element| {
        let (row, column) = units.columns.split(element);
        let position = over(column, spec.channels());
        let in_place = column - position * spec.channels();
        let (i, unit) = units.across.split(position);
        let from = arena + row * kept_row + (unit * spec.kept_words() + i * spec.channels() + in_place) * 4;
        let sum = k.var(0.0f32);
        k.range(units.groups, |group| sum.set(sum + k.ld_shared::<f32>(from + group * group_bytes, 0)));
        let (tap, plane) = units.planes.split(first_position + position);
        let x_channel = plane * spec.channels() + in_place;
        let channel = first_channel + row;
        let is_sum = tap.lt(units.taps) & x_channel.lt(x.channels) & channel.lt(y.channels * spec.y_words());
        let to = part_start + channel.mul_wide(channel_bytes) + (tap * x.channels + x_channel).widen() * 4u64;
        k.when(is_sum, || k.st_global(to, 0, sum.get()));
    });
}

/// Where in a patch of x the first pixel of a tile meets a position.
fn place<'k>(spec: &Spec, units: &Units<'k>, x: &Source<'k>, position: Val<'k, u32>) -> Val<'k, u32> {
    let k = position.kernel();
    let (number, plane) = units.planes.split(position);
    let tap = k.select(units.flipped.ne(0), units.taps - 1 - number, number);
    let (row, column) = units.filter_columns.split(tap);
    let (quotient, residue) = x.by_column_step.split(column * units.dilations[1]);
    plane * x.plane_bytes + row * units.dilations[0] * x.row_bytes + residue * x.residue_bytes + quotient * (4 * spec.words())
}

/// Adds the products of a run of pixels: of each, the words of a thread's positions by its channels.
fn add_run<'k>(
    k: Kernel<'k>,
    spec: &Spec,
    places: &[Val<'k, u32>],
    own: Val<'k, u32>,
    [pixels, pixel_bytes, count]: [Val<'k, u32>; 3],
    sums: &[Vec<Var<'k, f32>>],
) {
    let words = spec.words();
    let from: Vec<Var<'k, u32>> = places.iter().map(|&place| k.var(own + place)).collect();
    let pixel = k.var(pixels);
    let add = |ahead: u32| {
        let factors: Vec<Val<'k, f32>> = [0, 16].into_iter().flat_map(|offset| k.ld_shared_vector::<f32>(pixel.get(), offset, 4)).collect();
        let taps = from.iter().flat_map(|from| {
            let at = i64::from(ahead * 4 * words);
            let read =
                if words == 1 { vec![k.ld_shared::<f32>(from.get(), at)] } else { k.ld_shared_vector::<f32>(from.get(), at, words as u8) };
            read.into_iter().take(spec.channels() as usize)
        });
        for (value, sums) in taps.zip(sums) {
            for (&factor, sum) in factors.iter().zip(sums) {
                sum.set(k.fma(value, factor, *sum));
            }
        }
        pixel.set(pixel + pixel_bytes);
    };
    let on = |pixels: u32| from.iter().for_each(|from| from.set(*from + 4 * words * pixels));
    let turns = count >> spec.unroll().ilog2();
    k.range(turns, |_| {
        (0..spec.unroll()).for_each(add);
        on(spec.unroll());
    });
    k.range(count & (spec.unroll() - 1), |_| {
        add(0);
        on(1);
    });
}
