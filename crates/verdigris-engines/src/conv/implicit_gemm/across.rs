//! The way out of tiles that lie across: rows are channels of the filter, columns are pixels, and the CTAs of a cluster took a part of the depth each.
//!
//! **What.** `result[pixel, channel] = epilogue(Σ part_rank[channel, pixel])`, straight from registers, in any layout whose channels are neighbours.
//! **When it wins.** Few pixels, of which a tile has no row to waste, and great depth, as deep layers have at inference: nothing goes to scratch, no
//! second launch reads it.
//! **Cost.** Each CTA reads its share of the tile's elements from all of the cluster: see [`crate::parts::cluster_sums`].

use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::tile::fragment::Fragment;

use super::kernel::{FIRST_BARRIER, Spec, WARPGROUP};
use crate::parts::batch::BatchIndex;
use crate::parts::cluster_sums::Sharers;
use crate::parts::epilogue::Epilogue;
use crate::parts::way_out::Sum;

/// Vectors that a thread has on their way at a time, of all CTAs together.
const ON_THEIR_WAY: u32 = 16;

/// The parameters of the way out.
pub(super) struct Across<'k> {
    kernel: Kernel<'k>,
    sharers: Sharers,
    /// 64-row blocks and 8-column blocks of a tile.
    row_blocks: u32,
    column_blocks: u32,
    batch: BatchIndex<'k>,
    epilogue: Epilogue<'k, f32>,
    /// Pixels, and channels of a group.
    pixels: Val<'k, u32>,
    channels: Val<'k, u32>,
}

/// Where a tile's results belong.
pub(super) struct Place<'k> {
    pub(super) channel: Val<'k, u32>,
    pub(super) pixel: Val<'k, u32>,
    /// Pixels of a tile.
    pub(super) pixels: Val<'k, u32>,
    pub(super) batch: Val<'k, u32>,
}

impl<'k> Across<'k> {
    /// Declares the parameters, in the order of those of a way out of elements.
    pub(super) fn declare(k: Kernel<'k>, spec: &Spec) -> Self {
        Across {
            kernel: k,
            sharers: Sharers { ctas: spec.depth_parts(), warpgroups: spec.consumers, barrier: FIRST_BARRIER },
            row_blocks: spec.tile_m / 64,
            column_blocks: spec.tile_n / 8,
            batch: BatchIndex::declare(k),
            epilogue: spec.epilogue.declare(k),
            pixels: k.scalar("rows"),
            channels: k.scalar("columns"),
        }
    }

    /// Stores a tile's results, by all who multiply; `sums` may take the place of what they multiplied, from shared address `slots` on.
    pub(super) fn write<T: Sum>(
        &self,
        sums: &[Fragment<'k, T>],
        slots: Val<'k, u32>,
        at: &Place<'k>,
        [warpgroup, thread]: [Val<'k, u32>; 2],
    ) {
        let (k, sharers) = (self.kernel, self.sharers);
        let shared = sharers.share(k, slots, sums, [warpgroup, thread]);
        let matrix = self.epilogue.begin(self.batch.split(at.batch));
        // Blocks of columns that hold pixels, each of all rows. Warps go through whole ones.
        let wanted = ((at.pixels + 7) >> 3) * (self.row_blocks * WARPGROUP);
        let first = sharers.rank(k) * sharers.threads() + warpgroup * WARPGROUP + thread;
        let (stride, ahead) = (sharers.ctas * sharers.threads(), ON_THEIR_WAY / sharers.ctas);
        k.range_step(first, wanted, stride * ahead, |index| {
            let wholes = (0..ahead).map(|turn| {
                let index = index + turn * stride;
                // Where fewer are left, the thread's first stands for them.
                let there = index.lt(wanted);
                let index = k.select(there, index, first);
                let block = index >> WARPGROUP.ilog2();
                let [row_block, column_block] = [block & (self.row_blocks - 1), block >> self.row_blocks.ilog2()];
                let holder = index & (WARPGROUP - 1);
                let whole: [Val<'k, T>; 4] = shared.whole((row_block * self.column_blocks + column_block) * WARPGROUP + holder);
                (
                    there,
                    [row_block * 64 + Fragment::<T>::row(holder), column_block * 8 + Fragment::<T>::column(holder)],
                    whole.map(T::to_f32),
                )
            });
            for (there, [row, column], whole) in wholes.collect::<Vec<_>>() {
                // Of two neighbouring rows and columns, one lane takes one column and its neighbour the other: pairs of channels of a pixel.
                let odd = (row & 1).ne(0u32);
                let got = [0, 2].map(|half| k.shfl_bfly(k.select(odd, whole[half], whole[half + 1]), 4));
                let pixel_of_tile = column + (row & 1);
                let (channel, pixel) = (at.channel + row - (row & 1), at.pixel + pixel_of_tile);
                k.when(there & pixel_of_tile.lt(at.pixels) & pixel.lt(self.pixels), || {
                    let place = matrix.at(pixel, channel);
                    for half in [0, 1] {
                        let (below, own) = (8 * half as u32, [whole[2 * half], whole[2 * half + 1]]);
                        let pair = [k.select(odd, got[half], own[0]), k.select(odd, own[1], got[half])];
                        k.when((channel + (below + 1)).lt(self.channels), || {
                            place.store_pair(place.apply_pair(pair, below), below);
                        });
                    }
                });
            }
        });
        sharers.part(k);
    }
}
