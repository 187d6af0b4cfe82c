//! Cluster split-K of a filter's gradient: the CTAs that share a tile's pixels are a cluster, and read each other's sums.
//!
//! **What.** `dw[k, t, c] = epilogue(Σ part_rank[k, t, c])` over ranks 0, 1, …, so the result does not depend on who was first.
//! **When it wins.** Where a launch of its own for the parts would take as long as the products: few pixels, as many filters as fill the
//! chip.
//! **Cost.** Every sum that belongs to a filter crosses the cluster's network once. No scratch, no second launch.
//!
//! **Groups.** A tile of channels of y by channels of x is a *bundle* of whole groups, or a part of one group. Of a bundle's sums only the
//! blocks along the diagonal, channels of one group each, belong to filters; the others are formed, for that costs nothing, and never read.

use verdigris_graph::ConvProblem;
use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::params::Divide;
use verdigris_kir::tile::fragment::Fragment;

use super::super::WARPGROUP;
use super::kernel::{CONSUMERS, ROWS, Spec};
use crate::fuse::epilogue::{EpilogueArgs, EpilogueSpec};
use crate::split_k::cluster_reduction::Sharers;

/// The named barrier of all who multiply.
const BARRIER: u32 = 1;

/// What shapes this store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ClusterSplitKSpec {
    /// CTAs of a cluster: a power of two, up to the 8 that every chip places.
    pub(super) ctas: u32,
    /// What stands between sums and the result, which it stores.
    pub(super) epilogue: EpilogueSpec,
}

/// How the groups of a problem are taken together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Bundles {
    /// Bundles of the problem.
    pub(super) count: u64,
    /// Channels of y and of x of a bundle, and of one of its groups.
    pub(super) bundle: [u64; 2],
    pub(super) group: [u64; 2],
    /// Tiles of a bundle's channels of y and of x; more than one where a group is larger than a tile.
    pub(super) tiles: [u64; 2],
}

impl Bundles {
    /// The bundles for tiles of so many channels of x. Tiles begin at multiples of 16 bytes, as TMA wants them: nothing where none
    /// of these holds whole groups.
    pub(super) fn new(conv: &ConvProblem, channels: u32) -> Option<Bundles> {
        let group = [conv.k / conv.groups, conv.c / conv.groups];
        let tile = [u64::from(ROWS), u64::from(channels)];
        let fitting = (tile[0] / group[0]).min(tile[1] / group[1]);
        // Groups that make whole chunks of eight channels on both sides: a power of two.
        let chunk = group.map(|channels| 8 >> channels.trailing_zeros().min(3)).into_iter().max().unwrap_or(1);
        let fitting = match conv.groups {
            1 => 1,
            _ if chunk == 1 => fitting.max(1),
            _ => fitting / chunk * chunk,
        };
        if fitting == 0 {
            return None;
        }
        let fitting = fitting.min(conv.groups);
        let bundle = group.map(|channels| channels * fitting);
        let tiles = [0, 1].map(|side| bundle[side].div_ceil(tile[side]));
        Some(Bundles { count: conv.groups.div_ceil(fitting), bundle, group, tiles })
    }

    /// Rows of tiles over all bundles, and columns of one bundle.
    pub(super) fn grid(&self) -> [u64; 2] {
        [self.count * self.tiles[0], self.tiles[1]]
    }
}

verdigris_kir::parameters! {
    /// How channels of groups stand in a tile, and taps in the filter; and the epilogue.
    pub(super) struct ClusterSplitKValues / ClusterSplitKArgs of ClusterSplitKSpec as cluster_split_k {
        /// Rows of tiles of a bundle.
        tile_rows: Divide,
        /// Channels of y and of x of a bundle.
        bundle: [u32; 2],
        /// Channels of y.
        outputs: u32,
        group_rows: Divide,
        group_columns: u32,
        /// Blocks of eight columns of a unit.
        unit_blocks: Divide,
        /// Height and width.
        filter: [Divide; 2],
        epilogue: EpilogueArgs = cluster_split_k.epilogue.over_tensors(),
    }
}

impl ClusterSplitKSpec {
    pub(super) fn args(&self, conv: &ConvProblem, spec: &Spec, bundles: &Bundles) -> ClusterSplitKArgs {
        let [_, height, width] = conv.filter.map(|taps| taps as u32);
        let [group_rows, group_columns] = bundles.group.map(|channels| channels as u32);
        ClusterSplitKArgs {
            tile_rows: bundles.tiles[0] as u32,
            bundle: bundles.bundle.map(|channels| channels as u32),
            outputs: conv.k as u32,
            group_rows,
            group_columns,
            unit_blocks: spec.columns() / 8,
            filter: [height, width],
            epilogue: self.epilogue.conv_arguments(conv),
        }
    }
}

/// The store in the kernel.
pub(super) struct ClusterSplitK<'a, 'k> {
    pub(super) kernel: Kernel<'k>,
    pub(super) spec: &'a Spec,
    pub(super) cluster_split_k: &'a ClusterSplitKSpec,
    pub(super) values: ClusterSplitKValues<'k>,
}

/// Which channels a CTA multiplies.
#[derive(Clone, Copy)]
pub(super) struct Channels<'k> {
    /// The first of y and of x.
    pub(super) first: [Val<'k, u32>; 2],
    /// The same within the bundle.
    of_bundle: [Val<'k, u32>; 2],
}

/// The taps of a CTA: its units in the table of taps, and the step from one tap of a unit to the next.
#[derive(Clone, Copy)]
pub(super) struct Taps<'k> {
    pub(super) units: Val<'k, u64>,
    pub(super) unit_bytes: u32,
    pub(super) step: Val<'k, u32>,
}

impl<'k> ClusterSplitK<'_, 'k> {
    /// The channels of a tile.
    pub(super) fn channels(&self, [row, column]: [Val<'k, u32>; 2]) -> Channels<'k> {
        let (bundle, tile_row) = self.values.tile_rows.split(row);
        let of_bundle = [tile_row * ROWS, column * self.spec.channels];
        Channels { first: [0, 1].map(|side| bundle * self.values.bundle[side] + of_bundle[side]), of_bundle }
    }

    /// Adds up what the cluster's CTAs have and stores it, by all who multiply; `sums` may take the place of what they multiplied.
    pub(super) fn write(
        &self,
        sums: &[Fragment<'k, f32>],
        slots: Val<'k, u32>,
        channels: Channels<'k>,
        taps: Taps<'k>,
        [warpgroup, thread]: [Val<'k, u32>; 2],
    ) {
        let (k, spec) = (self.kernel, self.spec);
        let sharers = Sharers { ctas: self.cluster_split_k.ctas, warpgroups: CONSUMERS, barrier: BARRIER };
        let shared = sharers.share(k, slots, sums, [warpgroup, thread]);

        // Every thread of the cluster adds up vectors as they lie there.
        let threads = sharers.threads();
        let first = sharers.rank(k) * threads + warpgroup * WARPGROUP + thread;
        let vectors = spec.units_of_cta() * (spec.columns() / 8) * WARPGROUP;
        k.range_step(first, vectors, sharers.ctas * threads, |vector| {
            let holder = vector & (WARPGROUP - 1);
            let (unit, block) = self.values.unit_blocks.split(vector >> WARPGROUP.ilog2());
            let blocks_of_tap = (spec.channels / 8).ilog2();
            let (tap, block) = (block >> blocks_of_tap, block & (spec.channels / 8 - 1));
            let column = channels.of_bundle[1] + block * 8 + Fragment::<f32>::column(holder);
            let rows = [0u32, 8].map(|half| {
                let row = Fragment::<f32>::row(holder) + half;
                let of_bundle = channels.of_bundle[0] + row;
                let (group, _) = self.values.group_rows.split(of_bundle);
                let output = channels.first[0] + row;
                // Channels of x counted in the row's group; those before it wrap around.
                (output, of_bundle.lt(self.values.bundle[0]) & output.lt(self.values.outputs), column - group * self.values.group_columns)
            });
            let entry = taps.units + (unit * taps.unit_bytes).widen();
            let is_kept = k.ld_global::<u32>(entry, 8).le(tap);
            let belongs = |half: usize, odd: u32| rows[half].1 & (rows[half].2 + odd).lt(self.values.group_columns);
            // Where pairs may be stored, groups begin and end at even channels.
            let any = belongs(0, 0) | belongs(1, 0);
            let any = if self.cluster_split_k.epilogue.pairs { any } else { any | belongs(0, 1) | belongs(1, 1) };
            k.when(is_kept & any, || {
                let whole: [Val<'k, f32>; 4] = shared.whole(vector);
                let position = k.ld_global::<u32>(entry, 4) + taps.step * tap;
                let (rest, w) = self.values.filter[1].split(position);
                let (d, h) = self.values.filter[0].split(rest);
                for half in 0..2 {
                    let (output, _, channel) = rows[half];
                    let values = [whole[2 * half], whole[2 * half + 1]];
                    if self.cluster_split_k.epilogue.pairs {
                        k.when(belongs(half, 0), || {
                            let at = self.values.epilogue.at_pixel([output, d, h, w], channel);
                            at.store_pair(at.apply_pair(values, 0), 0);
                        });
                        continue;
                    }
                    for (odd, value) in (0u32..).zip(values) {
                        k.when(belongs(half, odd), || {
                            let at = self.values.epilogue.at_pixel([output, d, h, w], channel + odd);
                            at.store(at.apply(value, 0), 0);
                        });
                    }
                }
            });
        });
        sharers.part(k);
    }
}
