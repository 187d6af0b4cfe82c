//! wgrad: a CTA has a channel, a block of taps and a part of the images; a thread sums all taps of the block over its blocks of gradients. The sums of threads are added up over lanes, then
//! over warps, and those of several parts by [`crate::split_k::filter::depthwise`]: in a fixed order.

use verdigris_kir::face::{Kernel, Val, Var};
use verdigris_kir::params::{Divide, Read, Write};

use super::stage::{CutArgs, Held, SourceArgs, words_of_line};
use super::{Spec, THREADS};
use crate::fuse::epilogue::{EpilogueArgs, EpilogueSpec};
use crate::split_k::filter::depthwise::{TapBlocks, TapBlocksArguments};

verdigris_kir::parameters! {
    /// What the kernel reads and writes.
    pub(super) struct Filter / FilterArgs of Spec as spec {
        /// Planes are images of a channel.
        pub(super) cut: CutArgs = (),
        pub(super) source: SourceArgs = spec.dtype,
        /// Over images and channels.
        pub(super) source_strides: [u64; 2],
        /// From image to image, where a CTA takes several.
        pub(super) plane_bytes: u32,
        /// A channel of the gradients reads this quotient of it.
        pub(super) quotient: Divide,
        pub(super) gradients: Read = spec.dtype.bytes() as u32,
        /// Over images, channels and rows.
        pub(super) gradient_strides: [u64; 3],
        pub(super) channels: Divide,
        pub(super) all_tap_blocks: Divide,
        pub(super) tap_blocks: TapBlocksArguments = (),
        /// Shares of all CTAs of a channel, and these.
        pub(super) shares: u32,
        pub(super) parts: u32,
        pub(super) to: ToArgs = *spec,
    }
}

verdigris_kir::parameters! {
    /// Where the sums go: to the parts `[part][block of taps, tap][channel]`, or by the epilogue to the result.
    pub(super) struct To / ToArgs of Spec as spec {
        pub(super) parts: Option<Write> = spec.epilogue.is_none().then_some(4),
        /// Of the filter: rows and columns.
        pub(super) extents: [u32; 2],
        /// Of a flipped filter the last element is the first tap.
        pub(super) flipped: u32,
        pub(super) epilogue: Option<EpilogueArgs> = spec.epilogue.as_ref().map(EpilogueSpec::over_tensors),
    }
}

/// Builds the kernel.
pub(super) fn kernel<'k>(k: Kernel<'k>, spec: &Spec) {
    let Filter {
        cut,
        source,
        source_strides,
        plane_bytes,
        quotient,
        gradients,
        gradient_strides,
        channels,
        all_tap_blocks,
        tap_blocks,
        shares,
        parts,
        to,
    } = Filter::declare(k, spec);
    let staged = k.shared("lines", spec.staged_bytes(), 16).address();
    let [tap_rows, tap_columns] = spec.block();

    let (rest, number) = all_tap_blocks.split(k.cta());
    let (part, channel) = channels.split(rest);
    let block = tap_blocks.split(number).block;
    let ahead = [block[0] * tap_rows, block[1] * tap_columns];
    let x = source.pointer.address() + quotient.quotient(channel).widen() * source_strides[1];
    let dy = gradients.address() + channel.widen() * gradient_strides[1];
    let sums: Vec<Vec<Var<'k, f32>>> = (0..tap_rows).map(|_| (0..tap_columns).map(|_| k.var(0.0f32)).collect()).collect();
    k.range_step(part, shares, parts, |number| {
        let share = cut.share(number);
        let place = cut.place(k.thread(), &share);
        // Each gradient is read once, by its thread, while lines are on their way.
        let bytes = spec.dtype.bytes() as u32;
        let [row, column] = cut.first_output(spec, &share, &place);
        let own = dy
            + (share.first_plane + place.plane).widen() * gradient_strides[0]
            + row.unsigned().widen() * gradient_strides[2]
            + column.unsigned().mul_wide(bytes);
        let [rows, columns] = spec.outputs();
        let block: Vec<Vec<Held<'k>>> = (0..rows)
            .map(|i| {
                let end = k.select(place.is_used & (row.unsigned() + i).lt(cut.extents[0]), cut.extents[1], 0u32);
                let line = own + gradient_strides[2] * u64::from(i);
                let load = |j: u32| {
                    let gradient = Held::new(k, spec.dtype);
                    k.when((column.unsigned() + j).lt(end), || gradient.load(k, line, j));
                    gradient
                };
                (0..columns).map(load).collect()
            })
            .collect();
        // All are done with the lines of the share before.
        k.bar_sync();
        let first = x + share.first_plane.widen() * source_strides[0];
        source.stage(k, spec, &share, ahead, |plane| first + plane.mul_wide(plane_bytes), staged);
        k.bar_sync();
        k.when(place.is_used, || {
            let block: Vec<Vec<Val<'k, f32>>> =
                block.iter().map(|row| row.iter().map(|gradient| gradient.value(spec.dtype)).collect()).collect();
            add_products(k, spec, source.own(spec, &place, staged), source.pitch_bytes(spec), &block, &sums);
        });
    });
    let sums = sums.iter().flatten().map(|sum| sum.get()).collect();
    to.store(k, spec, sums, [number, part, channel], [all_tap_blocks.value(), channels.value()], &tap_blocks);
}

/// Adds the products of a block of gradients: each line is read once for all rows of gradients that meet it.
fn add_products<'k>(
    k: Kernel<'k>,
    spec: &Spec,
    own: Val<'k, u32>,
    pitch_bytes: Val<'k, u32>,
    gradients: &[Vec<Val<'k, f32>>],
    sums: &[Vec<Var<'k, f32>>],
) {
    let ([rows, columns], [tap_rows, tap_columns]) = (spec.outputs(), spec.block());
    let mut address = own;
    for line in 0..spec.stride.lines(rows, tap_rows) {
        if line > 0 {
            address = address + pitch_bytes;
        }
        let values = words_of_line(k, spec, address, spec.stride.lines(columns, tap_columns));
        for (row, tap_row) in spec.stride.pairs(rows, tap_rows, line) {
            for (tap, sum) in (0u32..).zip(&sums[tap_row]) {
                for (column, &gradient) in (0u32..).zip(&gradients[row]) {
                    if let Some(at) = spec.stride.line(column, tap, tap_columns) {
                        sum.set(k.fma(values[at as usize], gradient, *sum));
                    }
                }
            }
        }
    }
}

/// Sums over the lanes of a warp, of as many values as `values` padded to a power of two of at least 32: lane `l` has those of numbers `l · count ..`. At each step, lanes send the half of the
/// values that they do not keep.
fn over_lanes<'k>(k: Kernel<'k>, values: Vec<Val<'k, f32>>) -> Vec<Option<Val<'k, f32>>> {
    let mut half = values.len().next_power_of_two().max(32);
    let mut values: Vec<Option<Val<'k, f32>>> = values.into_iter().map(Some).collect();
    values.resize(half, None);
    for mask in [16u32, 8, 4, 2, 1] {
        half /= 2;
        let is_upper = (k.lane() & mask).ne(0);
        let together = |i: usize| match (values[i], values[i + half]) {
            (Some(low), Some(high)) => Some(k.select(is_upper, high, low) + k.shfl_bfly::<f32>(k.select(is_upper, low, high), mask)),
            (low, _) => low.map(|low| low + k.shfl_bfly::<f32>(low, mask)),
        };
        values = (0..half).map(together).collect();
    }
    values
}

impl<'k> To<'k> {
    fn store(
        &self,
        k: Kernel<'k>,
        spec: &Spec,
        sums: Vec<Val<'k, f32>>,
        [number, part, channel]: [Val<'k, u32>; 3],
        [all_tap_blocks, channels]: [Val<'k, u32>; 2],
        tap_blocks: &TapBlocks<'k>,
    ) {
        let taps = sums.len() as u32;
        let [block_rows, block_columns] = spec.block();
        let of_lanes = over_lanes(k, sums);
        let of_lane = of_lanes.len() as u32;
        let room = taps.next_power_of_two().max(32);
        let shared = k.shared("sums of warps", THREADS / 32 * room * 4, 16).address();
        let own = shared + (k.thread() >> 5) * (room * 4) + k.lane() * (of_lane * 4);
        for (i, sum) in (0i64..).zip(of_lanes) {
            if let Some(sum) = sum {
                k.st_shared(own, 4 * i, sum);
            }
        }
        k.bar_sync();
        k.when(k.thread().lt(taps), || {
            let tap = k.thread();
            let of_warp = |warp: u32| k.ld_shared::<f32>(shared + tap * 4, i64::from(warp * room * 4));
            let sum = (1..THREADS / 32).fold(of_warp(0), |sum, warp| sum + of_warp(warp));
            if let Some(parts) = self.parts {
                let place = ((part * all_tap_blocks + number) * taps + tap).widen() * channels.widen() + channel.widen();
                k.st_global(parts.moved(place * 4u64).address(), 0, sum);
                return;
            }
            let Some(epilogue) = &self.epilogue else { unreachable!("sums go to parts or to the result") };
            let block = tap_blocks.split(number).block;
            // A quotient of numbers below 2⁶.
            let tap_row = (tap * (1u32 << 16).div_ceil(block_columns)) >> 16;
            let (row, column) = (block[0] * block_rows + tap_row, block[1] * block_columns + (tap - tap_row * block_columns));
            let [height, width] = self.extents;
            k.when(row.lt(height) & column.lt(width), || {
                let is_flipped = self.flipped.ne(0);
                let [row, column] = [(row, height), (column, width)].map(|(at, extent)| k.select(is_flipped, extent - 1 - at, at));
                let place = epilogue.at_pixel([channel, k.constant(0), row, column], k.constant(0));
                place.store(place.apply(sum, 0), 0);
            });
        });
    }
}
