//! The second launch of a wgrad: adds up the parts of a filter's gradient in their order, and applies the epilogue.

use verdigris_kir::face::{Header, Kernel, build};
use verdigris_kir::params::{Divide, Read};
use verdigris_kir::program::KernelRef;

use super::coordinates::TapBlocksArguments;
use crate::fuse::epilogue::{EpilogueArgs, EpilogueSpec};

/// Channels of a CTA.
pub(super) const CHANNELS: u32 = 32;
/// Warps of a CTA: each adds up parts in strides of the warps.
const WARPS: u32 = 8;

/// The kernel for an epilogue.
pub(super) fn kernel(epilogue: EpilogueSpec) -> KernelRef {
    let name = format!("conv_depthwise_join_{}", epilogue.name());
    KernelRef::new(name.clone(), move || {
        let header = Header { name: name.clone(), target: epilogue.target(), threads: 32 * WARPS, ..Header::default() };
        build(header, |k| split_k(k, &epilogue))
    })
}

verdigris_kir::parameters! {
    /// Parts are `[part][tap_block, row and column of its taps][channel]`.
    pub(super) struct SplitKReduction / SplitKReductionArguments of EpilogueSpec as epilogue {
        pub(super) parts: Read = 4,
        pub(super) count: u32,
        pub(super) part_bytes: u64,
        pub(super) channel_blocks: Divide,
        pub(super) channels: u32,
        pub(super) tap_blocks: TapBlocksArguments = (),
        /// Columns and rows of a block of taps.
        pub(super) block_columns: Divide,
        pub(super) block_rows: Divide,
        /// Depth, height and width of the filter.
        pub(super) filter: [u32; 3],
        /// Of a flipped filter the last element is the first tap.
        pub(super) flipped: u32,
        pub(super) epilogue: EpilogueArgs = epilogue.over_tensors(),
    }
}

/// A CTA has one tap of 32 channels.
fn split_k<'k>(k: Kernel<'k>, epilogue: &EpilogueSpec) {
    let split_k = SplitKReduction::declare(k, epilogue);
    let SplitKReduction {
        parts,
        count,
        part_bytes,
        channel_blocks,
        channels,
        tap_blocks,
        block_columns,
        block_rows,
        filter: extents,
        flipped,
        epilogue,
    } = split_k;
    let is_flipped = flipped.ne(0);

    let (tap, block) = channel_blocks.split(k.cta());
    let channel = block * CHANNELS + k.lane();
    let warp = k.thread() >> 5;
    let sum = k.var(0.0f32);
    k.when(channel.lt(channels), || {
        let first = parts.moved((tap.widen() * channels.widen() + channel.widen()) * 4u64);
        k.range_step(warp, count, WARPS, |part| {
            sum.set(sum.get() + k.ld_global::<f32>(first.moved(part.widen() * part_bytes).address(), 0));
        });
    });
    let shared = k.shared("sums", 32 * WARPS * 4, 16).address();
    k.st_shared(shared + k.thread() * 4, 0, sum.get());
    k.bar_sync();
    let (rest, column) = block_columns.split(tap);
    let (number, row) = block_rows.split(rest);
    let tap_block = tap_blocks.split(number);
    let at = [tap_block.depth, tap_block.block[0] * block_rows.value() + row, tap_block.block[1] * block_columns.value() + column];
    let is_tap = at[1].lt(extents[1]) & at[2].lt(extents[2]);
    k.when(k.thread().lt(32) & channel.lt(channels) & is_tap, || {
        let from = shared + k.lane() * 4;
        let first = k.ld_shared::<f32>(from, 0);
        let sum = (1..WARPS).fold(first, |sum, warp| sum + k.ld_shared::<f32>(from, i64::from(warp * 128)));
        let [depth, height, width] = std::array::from_fn(|dim| k.select(is_flipped, extents[dim] - 1 - at[dim], at[dim]));
        let place = epilogue.at_pixel([channel, depth, height, width], k.constant(0));
        place.store(place.apply(sum, 0), 0);
    });
}
