//! The second launch of a wgrad: adds up the parts of a filter's gradient in their order, and applies the epilogue.

use verdigris_kir::face::{Header, Kernel, build};
use verdigris_kir::program::KernelRef;

use super::place::Slabs;
use crate::parts::epilogue::EpilogueSpec;

/// Channels of a CTA.
pub(super) const CHANNELS: u32 = 32;
/// Warps of a CTA: each adds up every so-many-th part.
const WARPS: u32 = 8;

/// The kernel for an epilogue.
pub(super) fn kernel(epilogue: EpilogueSpec) -> KernelRef {
    let name = format!("conv_depthwise_join_{}", epilogue.name());
    KernelRef::new(name.clone(), move || {
        let header = Header { name: name.clone(), target: epilogue.target(), threads: 32 * WARPS, ..Header::default() };
        build(header, |k| join(k, &epilogue))
    })
}

/// Parts are `[part][slab, row and column of its taps][channel]`; a CTA has one tap of 32 channels.
fn join<'k>(k: Kernel<'k>, epilogue: &EpilogueSpec) {
    let parts = k.input("parts", 4);
    let count = k.scalar::<u32>("parts_count");
    let part_bytes = k.scalar::<u64>("part_bytes");
    let channel_blocks = k.divisor("channel_blocks");
    let channels = k.scalar::<u32>("channels");
    let slabs = Slabs::declare(k);
    let [block_columns, block_rows] = ["block_columns", "block_rows"].map(|name| k.divisor(name));
    let extents = ["filter_depth", "filter_height", "filter_width"].map(|name| k.scalar::<u32>(name));
    // Of a flipped filter the last element is the first tap.
    let is_flipped = k.scalar::<u32>("flipped").ne(0);
    let epilogue = epilogue.declare_conv::<f32>(k);

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
    let slab = slabs.split(number);
    let at = [slab.depth, slab.block[0] * block_rows.value() + row, slab.block[1] * block_columns.value() + column];
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
