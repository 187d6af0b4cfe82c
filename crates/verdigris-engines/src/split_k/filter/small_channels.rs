//! The second launch of a wgrad: adds the parts up, always in the same order, and applies the epilogue.
//!
//! A CTA has 32 elements, one a lane; each of its warps adds every eighth part, and the first one adds what the warps have.

use verdigris_graph::ConvProblem;
use verdigris_kir::face::{Header, Kernel, build};
use verdigris_kir::ir::Ty;
use verdigris_kir::program::{Address, Arg, KernelRef, Launch, Residency};

use crate::fuse::epilogue::EpilogueSpec;

/// Filters of a tile.
pub(crate) const CHANNELS: u32 = 64;
const WARPS: u32 = 8;
/// Parts that a thread has on their way at a time.
const ON_THEIR_WAY: u32 = 4;

/// Everything that shapes the kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Spec {
    pub(crate) epilogue: EpilogueSpec,
}

impl Spec {
    fn name(&self) -> String {
        format!("conv_small_wgrad_add_{}", self.epilogue.name())
    }

    pub(crate) fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || {
            let header = Header { name: self.name(), target: self.epilogue.target(), threads: 32 * WARPS, min_ctas: 1, cluster: 1 };
            build(header, |k| add(k, &self))
        })
    }
}

/// What was left where.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts {
    pub(crate) address: Address,
    pub(crate) count: u64,
    pub(crate) part_bytes: u64,
    pub(crate) k_tiles: u64,
    /// Columns of a tile, and the taps along depth and height of a K-tile.
    pub(crate) columns: u32,
    pub(crate) taps: [u64; 2],
}

/// The launch.
pub(crate) fn launch(p: &ConvProblem, spec: &Spec, left: Parts) -> Launch {
    let word = |value: u64| Arg::Scalar(Ty::U32, value);
    let divisor = |value: u64| Arg::Divisor(value.max(1) as u32);
    let elements = left.part_bytes / 4;
    let mut args = vec![Arg::Pointer(left.address), word(left.count), Arg::Scalar(Ty::U64, left.part_bytes), word(elements)];
    args.extend([divisor(u64::from(left.columns)), divisor(left.k_tiles)]);
    args.push(divisor(p.filter[1].div_ceil(left.taps[1])));
    args.extend(left.taps.map(word));
    args.extend([divisor(p.c), divisor(p.filter[2]), divisor(left.taps[1])]);
    args.extend([word(p.k)]);
    args.extend(p.filter.map(word));
    args.push(word(u64::from(p.flip)));
    args.extend(spec.epilogue.conv_args(p));
    let grid = [elements.div_ceil(32) as u32, 1, 1];
    Launch { kernel: spec.clone().kernel(), grid, residency: Residency::Any, overlap: false, args: args.into() }
}

fn add(k: Kernel<'_>, spec: &Spec) {
    let parts = k.input("parts", 16);
    let count = k.scalar::<u32>("parts_count");
    let part_bytes = k.scalar::<u64>("part_bytes");
    let elements = k.scalar::<u32>("elements");
    let columns = k.divisor("columns");
    let k_tiles = k.divisor("slabs");
    let k_tiles_across = k.divisor("slabs_across");
    let k_tile_taps = ["slab_depth", "slab_rows"].map(|name| k.scalar::<u32>(name));
    let [channels_in, widths, rows] = ["channels_in", "widths", "slab_rows"].map(|name| k.divisor(name));
    let channels = k.scalar::<u32>("channels");
    let filter = ["filter_depth", "filter_height", "filter_width"].map(|name| k.scalar::<u32>(name));
    let flip = k.scalar::<u32>("flip");
    let epilogue = spec.epilogue.declare_conv::<f32>(k);
    let meeting = k.shared("sums", 32 * WARPS * 4, 16).address();

    let (lane, warp) = (k.lane(), k.warp());
    let element = k.cta() * 32 + lane;
    let sum = k.var(0.0f32);
    k.when(element.lt(elements) & warp.lt(count), || {
        let first = parts.at(element, 4) + warp.widen() * part_bytes;
        let turns = ((count - 1 - warp) >> WARPS.ilog2()) + 1;
        k.range_unrolled(turns, ON_THEIR_WAY, |turn| {
            sum.set(sum.get() + k.ld_global::<f32>(first + (turn * WARPS).widen() * part_bytes, 0));
        });
    });
    let place = meeting + k.thread() * 4;
    k.st_shared(place, 0, sum.get());
    k.bar_sync();
    k.when(warp.eq(0) & element.lt(elements), || {
        let whole = (1..WARPS).fold(sum.get(), |whole, warp| whole + k.ld_shared::<f32>(place, i64::from(32 * 4 * warp)));
        let (rest, column) = columns.split(element);
        let (tile, row) = (rest >> CHANNELS.ilog2(), rest & (CHANNELS - 1));
        let (channel_tile, k_tile) = k_tiles.split(tile);
        let channel = channel_tile * CHANNELS + row;
        let (k_tile_depth, k_tile_row) = k_tiles_across.split(k_tile);
        let (rest, channel_in) = channels_in.split(column);
        let (rest, width) = widths.split(rest);
        let (depth, height) = rows.split(rest);
        let taps = [k_tile_depth * k_tile_taps[0] + depth, k_tile_row * k_tile_taps[1] + height, width];
        let exists = channel.lt(channels) & depth.lt(k_tile_taps[0]) & taps[0].lt(filter[0]) & taps[1].lt(filter[1]);
        k.when(exists, || {
            let [d, h, w] = std::array::from_fn(|dim| k.select(flip.ne(0), filter[dim] - 1 - taps[dim], taps[dim]));
            let place = epilogue.at_pixel([channel, d, h, w], channel_in);
            place.store(place.apply(whole, 0), 0);
        });
    });
}
