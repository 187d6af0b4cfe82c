//! The second launch of a wgrad: adds up the parts of a filter's gradient in their order, and applies the epilogue.

use verdigris_kir::face::{Header, Kernel, Val, build};
use verdigris_kir::params::{Divide, Read};
use verdigris_kir::program::KernelRef;

use crate::fuse::epilogue::{EpilogueArgs, EpilogueSpec};

/// Channels of a CTA.
pub(crate) const CHANNELS: u32 = 32;
/// Warps of a CTA: each adds up parts in strides of the warps.
const WARPS: u32 = 8;

/// Which taps, and which of the filters that a channel of x has.
#[derive(Clone, Copy)]
pub(crate) struct TapBlock<'k> {
    /// The filter.
    pub(crate) filter: Val<'k, u32>,
    /// The tap along the depth.
    pub(crate) depth: Val<'k, u32>,
    /// The block of taps along height and width.
    pub(crate) block: [Val<'k, u32>; 2],
}

verdigris_kir::parameters! {
    /// How blocks of taps are numbered: the columns of blocks first, then rows, depth and filters.
    #[derive(Clone, Copy)]
    pub(crate) struct TapBlocks / TapBlocksArguments of () as _spec {
        pub(crate) columns: Divide,
        pub(crate) rows: Divide,
        pub(crate) depths: Divide,
    }
}

impl<'k> TapBlocks<'k> {
    pub(crate) fn split(&self, tap_block: Val<'k, u32>) -> TapBlock<'k> {
        let (rest, column) = self.columns.split(tap_block);
        let (rest, row) = self.rows.split(rest);
        let (filter, depth) = self.depths.split(rest);
        TapBlock { filter, depth, block: [row, column] }
    }
}

/// The kernel for an epilogue.
pub(crate) fn kernel(epilogue: EpilogueSpec) -> KernelRef {
    let name = format!("conv_depthwise_join_{}", epilogue.name());
    KernelRef::new(name.clone(), move || {
        let header = Header { name: name.clone(), target: epilogue.target(), threads: 32 * WARPS, ..Header::default() };
        build(header, |k| split_k(k, &epilogue))
    })
}

verdigris_kir::parameters! {
    /// Parts are `[part][tap_block, row and column of its taps][channel]`.
    pub(crate) struct SplitKReduction / SplitKReductionArguments of EpilogueSpec as epilogue {
        pub(crate) parts: Read = 4,
        pub(crate) count: u32,
        pub(crate) part_bytes: u64,
        pub(crate) channel_blocks: Divide,
        pub(crate) channels: u32,
        pub(crate) tap_blocks: TapBlocksArguments = (),
        /// Columns and rows of a block of taps.
        pub(crate) block_columns: Divide,
        pub(crate) block_rows: Divide,
        /// Depth, height and width of the filter.
        pub(crate) filter: [u32; 3],
        /// Of a flipped filter the last element is the first tap.
        pub(crate) flipped: u32,
        pub(crate) epilogue: EpilogueArgs = epilogue.over_tensors(),
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
