//! The epilogue store of swap-AB tiles under cluster split-K: rows are channels of the filter, columns are pixels, each CTA of a cluster
//! has a part of the depth.
//!
//! **What.** `result[pixel, channel] = epilogue(Σ part_rank[channel, pixel])`, straight from registers, in any layout whose channels are
//! neighbours.
//! **When it wins.** Few pixels and great depth, as in deep layers at inference: tiles waste no rows, nothing goes to
//! scratch, no second launch reads it.
//! **Cost.** Each CTA sends all but its own slice of pixels: see [`crate::split_k::cluster`].

use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::tile::fragment::Fragment;

use super::spec::Spec;
use crate::fuse::epilogue::{EpilogueArgs, EpilogueSpec};
use crate::layout::batch::BatchIndexArgs;
use crate::split_k::cluster::ClusterSplitK;
use crate::store::Sum;

verdigris_kir::parameters! {
    /// The parameters of the store, as those of a store of elements.
    pub(super) struct SwapAbValues / SwapAbArgs of EpilogueSpec as epilogue {
        pub(super) batch: BatchIndexArgs = (),
        pub(super) epilogue: EpilogueArgs = epilogue.over_matrices(),
        /// Pixels, and channels of a group.
        pub(super) pixels: u32,
        pub(super) channels: u32,
    }
}

/// The store in the kernel.
pub(super) struct SwapAbStore<'k> {
    kernel: Kernel<'k>,
    exchange: ClusterSplitK<'k>,
    /// Accumulators of a consumer, and the pixels of each that are this CTA's when the parts have come together.
    blocks: u32,
    slice: u32,
    values: SwapAbValues<'k>,
}

/// Where a tile's results belong.
pub(super) struct Place<'k> {
    pub(super) channel: Val<'k, u32>,
    pub(super) pixel: Val<'k, u32>,
    /// Pixels of a tile.
    pub(super) pixels: Val<'k, u32>,
    pub(super) batch: Val<'k, u32>,
}

impl<'k> SwapAbStore<'k> {
    /// Of parameters that a group declares.
    pub(super) fn new(k: Kernel<'k>, values: SwapAbValues<'k>, spec: &Spec) -> Self {
        let exchange = spec.cluster_split_k();
        SwapAbStore { kernel: k, exchange: exchange.declare(k), blocks: spec.main.tile.blocks(), slice: exchange.slice_columns(), values }
    }

    /// Initializes barriers: by one thread, before they are published.
    pub(super) fn init(&self) {
        self.exchange.init();
    }

    /// Stores a tile's results, by all who multiply: `first_row` is a consumer's first row of the tile, `thread` the index among all of
    /// them.
    pub(super) fn write<T: Sum>(&self, parts: &[Fragment<'k, T>], at: &Place<'k>, [first_row, thread]: [Val<'k, u32>; 2]) {
        let k = self.kernel;
        let sums: Vec<Fragment<'k, T>> = (0..self.blocks).map(|_| Fragment::unset(k, self.slice)).collect();
        self.exchange.sum(parts, &sums, k.var_named("turn", 0u32), thread);
        let matrix = self.values.epilogue.begin(self.values.batch.split(at.batch));
        // Of two neighbouring rows and columns, one lane takes one column and its neighbour the other: pairs of channels of a pixel.
        let (row, column) = (Fragment::<T>::row(thread & 127), Fragment::<T>::column(thread & 127));
        let odd = (row & 1).ne(0u32);
        let first_pixel = self.exchange.rank() * self.slice + column + (row & 1);
        for (block, sum) in (0u32..).zip(&sums) {
            let channel = at.channel + first_row + row - (row & 1) + 64 * block;
            for (vector, whole) in (0u32..).zip(sum.registers().chunks(4)) {
                let whole: Vec<Val<'k, f32>> = whole.iter().map(|register| T::to_f32(register.get())).collect();
                let got = [0, 2].map(|half| k.shfl_bfly(k.select(odd, whole[half], whole[half + 1]), 4));
                let pixel_of_tile = first_pixel + 8 * vector;
                let pixel = at.pixel + pixel_of_tile;
                k.when(pixel_of_tile.lt(at.pixels) & pixel.lt(self.values.pixels), || {
                    let place = matrix.at(pixel, channel);
                    for half in [0, 1] {
                        let (below, own) = (8 * half as u32, [whole[2 * half], whole[2 * half + 1]]);
                        let pair = [k.select(odd, got[half], own[0]), k.select(odd, own[1], got[half])];
                        k.when((channel + (below + 1)).lt(self.values.channels), || {
                            place.store_pair(place.apply_pair(pair, below), below);
                        });
                    }
                });
            }
        }
    }
}
