//! The kernel: patches and taps staged chunk by chunk, one ahead, sums in registers, results out through shared memory.

use verdigris_kir::face::{Kernel, Val, Var};
use verdigris_kir::params::Divide;

use super::{Order, Spec, WARPS};
use crate::conv::geometry::phases::FilterWalkArguments;
use crate::conv::in_patches::{Packing, Source, SourceArgs, THREADS};
use crate::fuse::epilogue::{Epilogue, EpilogueArgs};

/// Pixels of one row of a warp's threads, 4 a thread.
pub(super) const WARP_PIXELS: u32 = 128;
/// Taps of a window: so many follow each other in one quad of columns.
pub(super) const WINDOW: u32 = 4;
/// Rows of the result that a lane stores one behind the other: each warp has a multiple of them, whatever the width.
const TALL: u32 = 8;
/// Bytes that the table has of a window: where it lies in the patch, and which of its taps there are.
pub(super) const ENTRY_BYTES: u32 = 8;

verdigris_kir::parameters! {
    /// What the kernel reads and writes.
    pub(super) struct Patch / PatchArgs of Spec as spec {
        pub(super) tiles: TilesArgs = (),
        pub(super) source: SourceArgs = 4,
        pub(super) taps: TapsArgs = (),
        pub(super) epilogue: EpilogueArgs = spec.epilogue.over_tensors(),
    }
}

verdigris_kir::parameters! {
    /// Which outputs a CTA has: slices of a group's channels fastest, then tiles along the width and the height, then groups, then images.
    #[derive(Clone, Copy)]
    pub(super) struct Tiles / TilesArgs of () as _spec {
        pub(super) slices: Divide,
        pub(super) across: Divide,
        pub(super) down: Divide,
        /// Groups of the convolution.
        pub(super) conv_groups: Divide,
        /// Height and width of the result.
        pub(super) extents: [u32; 2],
        /// Of a group of the result.
        pub(super) channels: u32,
        /// Columns of a tile, as a logarithm to base 2.
        pub(super) width_log2: u32,
        /// Rows of a tile.
        pub(super) height: u32,
        /// Of the warps, those with channels of their own, and those that share the depth; the others lie below each other.
        pub(super) groups_log2: u32,
        pub(super) parts_log2: u32,
    }
}

verdigris_kir::parameters! {
    /// The taps, in windows of four columns of one residue: channel by channel of a chunk, row by row.
    #[derive(Clone, Copy)]
    pub(super) struct Taps / TapsArgs of () as _spec {
        /// Taps from the one on that reads the first pixel.
        pub(super) filter: FilterWalkArguments = 4,
        pub(super) rows: Divide,
        pub(super) columns: u32,
        /// Pixels from tap to tap, down and right.
        pub(super) down: u32,
        pub(super) right: Divide,
        /// Windows of a row, and of one residue.
        pub(super) windows: Divide,
        pub(super) residue_windows: Divide,
        /// Where the taps of a chunk and the table begin in shared memory.
        pub(super) start: u32,
        pub(super) table_start: u32,
    }
}

/// Where in a filter and in a patch a window is.
struct Window<'k> {
    channel: Val<'k, u32>,
    row: Val<'k, u32>,
    residue: Val<'k, u32>,
    quad: Val<'k, u32>,
}

impl<'k> Taps<'k> {
    fn window(&self, number: Val<'k, u32>) -> Window<'k> {
        let (rest, window) = self.windows.split(number);
        let (channel, row) = self.rows.split(rest);
        let (residue, quad) = self.residue_windows.split(window);
        Window { channel, row, residue, quad }
    }

    /// The column of the tap that stands at a place of a window, and whether there is one.
    fn column(&self, source: &Source<'k>, window: &Window<'k>, place: Val<'k, u32>) -> (Val<'k, u32>, Val<'k, bool>) {
        let pixels = (window.quad * WINDOW + place) * source.steps[1] + window.residue;
        let (column, rest) = self.right.split(pixels);
        (column, rest.eq(0) & column.lt(self.columns))
    }

    /// Writes the table of a chunk's windows.
    fn tabulate(&self, k: Kernel<'k>, source: &Source<'k>, arena: Val<'k, u32>) {
        let all = source.chunk * self.rows.value() * self.windows.value();
        k.range_step(k.thread(), all, THREADS, |number| {
            let window = self.window(number);
            let place = window.channel * source.plane_bytes
                + window.row * self.down * source.row_bytes
                + window.residue * source.residue_bytes
                + window.quad * (4 * WINDOW);
            let mask = (0..WINDOW).fold(k.constant(0u32), |mask, i| {
                let (_, is_tap) = self.column(source, &window, k.constant(i));
                mask | k.select(is_tap, 1u32 << i, 0u32)
            });
            k.st_shared_vector(arena + self.table_start + number * ENTRY_BYTES, 0, &[place, mask]);
        });
    }

    /// Starts bringing the taps of a chunk to shared memory: windows by groups of channels, in each the taps one behind the other. A warp takes a window.
    #[allow(clippy::too_many_arguments, reason = "each says one thing about which taps go where")]
    fn stage(
        &self,
        k: Kernel<'k>,
        spec: &Spec,
        tiles: &Tiles<'k>,
        source: &Source<'k>,
        [conv_group, first_channel, first_depth]: [Val<'k, u32>; 3],
        windows: Val<'k, u32>,
        arena: Val<'k, u32>,
    ) {
        let channels = spec.channels();
        let own = k.lane() & (channels - 1);
        let place = (k.lane() >> channels.ilog2()) & (WINDOW - 1);
        let group_taps = WINDOW * channels;
        let groups = k.constant(1u32).shl(tiles.groups_log2);
        let base = self.filter.pointer.address() + self.filter.origin + conv_group.widen() * self.filter.group;
        k.range_step(k.thread() >> 5, windows, WARPS, |number| {
            let window = self.window(number);
            let (column, is_tap) = self.column(source, &window, place);
            let from = base
                + (first_depth + window.channel).widen() * self.filter.channel
                + window.row.widen() * self.filter.taps[1]
                + column.widen() * self.filter.taps[2];
            let to = arena + self.start + (number.shl(tiles.groups_log2) * group_taps + place * channels + own) * 4;
            k.when(is_tap, || {
                k.range_step(k.lane() >> group_taps.ilog2(), groups, 32 / group_taps, |group| {
                    let channel = first_channel + group * channels + own;
                    let bytes = k.select(channel.lt(tiles.channels), 4u32, 0u32);
                    k.cp_async(to + group * (group_taps * 4), 0, from + channel.widen() * self.filter.outer, 0, 4, bytes);
                });
            });
        });
    }
}

/// A thread's sums: rows, four columns, channels.
type Sums<'k> = Vec<Vec<Vec<Var<'k, f32>>>>;

/// What a warp has of a tile.
struct Share<'k> {
    group: Val<'k, u32>,
    /// Of the depth.
    part: Val<'k, u32>,
    /// The first row.
    first_row: Val<'k, u32>,
    /// The first of the warps that have parts of the same outputs.
    first_warp: Val<'k, u32>,
}

/// Builds the kernel.
pub(super) fn kernel<'k>(k: Kernel<'k>, spec: &Spec) {
    let Patch { tiles, source, taps, epilogue } = Patch::declare(k, spec);
    let epilogue: Epilogue<'k> = epilogue.of();
    let arena = k.shared("patches", spec.arena_bytes(), 128).address();

    let (rest, slice) = tiles.slices.split(k.cta());
    let (rest, tile_column) = tiles.across.split(rest);
    let (rest, tile_row) = tiles.down.split(rest);
    let (image, conv_group) = tiles.conv_groups.split(rest);
    let source = source.of_channels_behind(conv_group * source.channels);
    let corner = [tile_row * tiles.height, tile_column.shl(tiles.width_log2)];
    let one = k.constant(1u32);
    let (groups, parts) = (one.shl(tiles.groups_log2), one.shl(tiles.parts_log2));
    let warp = k.thread() >> 5;
    let group = warp & (groups - 1);
    let part = warp.shr(tiles.groups_log2) & (parts - 1);
    let block = warp.shr(tiles.groups_log2 + tiles.parts_log2);
    let block_rows = k.constant(WARP_PIXELS * spec.rows()).shr(tiles.width_log2);
    let share = Share { group, part, first_row: block * block_rows, first_warp: block.shl(tiles.groups_log2 + tiles.parts_log2) + group };
    let first_channel = slice.shl(tiles.groups_log2) * spec.channels();

    // A thread's rows are as far apart as its warp has rows of threads, four columns wide: quads of eight lanes lie side by side.
    let thread_rows = k.constant(WARP_PIXELS).shr(tiles.width_log2);
    let quads_log2 = tiles.width_log2 - 2;
    let (quad, lane_row) = (k.lane() & (one.shl(quads_log2) - 1), k.lane().shr(quads_log2));
    let own: Vec<_> = (0..spec.rows())
        .map(|row| (share.first_row + lane_row + thread_rows * row) * source.steps[0] * source.row_bytes + quad * 16)
        .collect();
    let sums: Sums<'k> =
        (0..spec.rows()).map(|_| (0..4).map(|_| (0..spec.channels()).map(|_| k.var(0.0f32)).collect()).collect()).collect();

    taps.tabulate(k, &source, arena);
    let stage_of = |chunk: Val<'k, u32>| arena + (chunk & 1u32) * source.stage_bytes;
    let windows_of = |chunk: Val<'k, u32>| {
        let depth = (source.channels - chunk * source.chunk).min(source.chunk);
        depth * taps.rows.value() * taps.windows.value()
    };
    let fetch = |chunk: Val<'k, u32>| {
        let (first_depth, stage) = (chunk * source.chunk, stage_of(chunk));
        source.stage(k, Packing::Planes, image, corner, first_depth, stage);
        taps.stage(k, spec, &tiles, &source, [conv_group, first_channel, first_depth], windows_of(chunk), stage);
    };
    fetch(k.constant(0));
    k.cp_async_commit();
    k.range(source.chunks, |chunk| {
        k.cp_async_wait(0);
        // Patch, taps and table are there, and all are done with the chunk before.
        k.bar_sync();
        k.when((chunk + 1).lt(source.chunks), || fetch(chunk + 1));
        k.cp_async_commit();
        let stage = stage_of(chunk);
        k.range_step(part, windows_of(chunk), parts, |number| {
            let entry = k.ld_shared_vector::<u32>(arena + taps.table_start + number * ENTRY_BYTES, 0, 2);
            let factors = stage + taps.start + (number.shl(tiles.groups_log2) + group) * (4 * WINDOW * spec.channels());
            add_window(k, spec, &own, [stage + entry[0], entry[1]], factors, &sums);
        });
    });
    // All are done with the last chunk.
    k.bar_sync();
    store(k, spec, &tiles, &share, &epilogue, [image, corner[0], corner[1]], [conv_group, first_channel], arena, &sums);
}

/// Adds the products of a window: the eight columns that four outputs meet with four taps are read once for all taps that there are.
fn add_window<'k>(
    k: Kernel<'k>,
    spec: &Spec,
    own: &[Val<'k, u32>],
    [place, mask]: [Val<'k, u32>; 2],
    factors: Val<'k, u32>,
    sums: &Sums<'k>,
) {
    let lines: Vec<Vec<Val<'k, f32>>> = (own.iter())
        .map(|&own| [0, 16].into_iter().flat_map(|offset| k.ld_shared_vector::<f32>(own + place, offset, 4)).collect())
        .collect();
    for tap in 0..WINDOW {
        // A tap that there is not is no zero, which an infinity would turn into NaN.
        k.when((mask & (1u32 << tap)).ne(0), || {
            let quads = (0..spec.channels() / 4).map(|quad| i64::from((tap * spec.channels() + quad * 4) * 4));
            let factors: Vec<Val<'k, f32>> = quads.flat_map(|offset| k.ld_shared_vector::<f32>(factors, offset, 4)).collect();
            for (line, sums) in lines.iter().zip(sums) {
                for (&value, sums) in line[tap as usize..].iter().zip(sums) {
                    for (&factor, sum) in factors.iter().zip(sums) {
                        sum.set(k.fma(value, factor, *sum));
                    }
                }
            }
        });
    }
}

/// What follows the sums. They go through shared memory, so that lanes have neighbours of the result in whichever order it lies: each warp's as planes of
/// channels, its pixels row-major. Those that have parts of the same outputs share these.
#[allow(clippy::too_many_arguments, reason = "each says one thing about where the sums belong")]
fn store<'k>(
    k: Kernel<'k>,
    spec: &Spec,
    tiles: &Tiles<'k>,
    share: &Share<'k>,
    epilogue: &Epilogue<'k>,
    [image, corner_row, corner_column]: [Val<'k, u32>; 3],
    [conv_group, first_channel]: [Val<'k, u32>; 2],
    arena: Val<'k, u32>,
    sums: &Sums<'k>,
) {
    let plane_bytes = spec.kept_plane_bytes();
    let warp_bytes = plane_bytes * spec.channels();
    let to = arena + (k.thread() >> 5) * warp_bytes + k.lane() * 16;
    for (row, columns) in (0..).zip(sums) {
        for channel in 0..spec.channels() {
            let values: Vec<Val<'k, f32>> = columns.iter().map(|channels| channels[channel as usize].get()).collect();
            k.st_shared_vector(to, i64::from(channel * plane_bytes + row * WARP_PIXELS * 4), &values);
        }
    }
    // All have left their sums.
    k.bar_sync();
    let one = k.constant(1u32);
    let parts = one.shl(tiles.parts_log2);
    let width = one.shl(tiles.width_log2);
    let zero = k.constant(0u32);
    let kept = arena + share.first_warp * warp_bytes;
    let first_channel = first_channel + share.group * spec.channels();
    let channels_before = conv_group * tiles.channels;
    let place_of =
        |pixel: Val<'k, u32>| [corner_row + share.first_row + pixel.shr(tiles.width_log2), corner_column + (pixel & (width - 1))];
    // The values at addresses, all parts added up in their order.
    let added = |addresses: &[Val<'k, u32>]| -> Vec<Var<'k, f32>> {
        let values: Vec<Var<'k, f32>> = addresses.iter().map(|&address| k.var(k.ld_shared::<f32>(address, 0))).collect();
        k.range_step(1u32, parts, 1, |part| {
            let further = part.shl(tiles.groups_log2) * warp_bytes;
            for (value, &address) in values.iter().zip(addresses) {
                value.set(*value + k.ld_shared::<f32>(address + further, 0));
            }
        });
        values
    };
    let blocks = spec.rows() * WARP_PIXELS * spec.channels() / 32;
    match spec.order {
        // A lane has all channels of a pixel.
        Order::ChannelsFirst => k.range_step(share.part, blocks / spec.channels(), parts, |block| {
            let pixel = block * 32 + k.lane();
            let [row, column] = place_of(pixel);
            let addresses: Vec<_> = (0..spec.channels()).map(|channel| kept + pixel * 4 + channel * plane_bytes).collect();
            let values = added(&addresses);
            let is_inside = row.lt(tiles.extents[0]) & column.lt(tiles.extents[1]);
            let channels = k.select(is_inside, tiles.channels.max(first_channel) - first_channel, 0u32);
            let place = epilogue.at_pixel([image, zero, row, column], channels_before + first_channel);
            for (right, value) in (0..).zip(&values) {
                k.when(channels.gt(right), || place.store(place.apply(value.get(), right), right));
            }
        }),
        // A lane has one channel of eight rows; others beside it have the other channels, and the pixels beside its own.
        Order::ChannelsLast => {
            let own = k.lane() & (spec.channels() - 1);
            let channel = first_channel + own;
            let beside = 32 / spec.channels();
            let strips_log2 = tiles.width_log2 - beside.ilog2();
            let down = epilogue.height_step(k.constant(1));
            k.range_step(share.part, blocks / TALL, parts, |block| {
                let strip = block & (one.shl(strips_log2) - 1);
                let pixel = (block.shr(strips_log2) * TALL).shl(tiles.width_log2) + strip * beside + (k.lane() >> spec.channels().ilog2());
                let [row, column] = place_of(pixel);
                let addresses: Vec<_> = (0..TALL).map(|step| kept + own * plane_bytes + (pixel + width * step) * 4).collect();
                let values = added(&addresses);
                let is_inside = column.lt(tiles.extents[1]) & channel.lt(tiles.channels);
                let rows = k.select(is_inside, tiles.extents[0].max(row) - row, 0u32);
                let mut place = epilogue.at_pixel([image, zero, row, column], channels_before + channel);
                for (step, value) in (0..).zip(&values) {
                    if step > 0 {
                        place = place.along(&down);
                    }
                    k.when(rows.gt(step), || place.store(place.apply(value.get(), 0), 0));
                }
            });
        }
    }
}
