//! Which part of the work a CTA of a cluster takes: tiles beside its peers', of which it loads a part of what they share, or a part of one
//! depth.

use verdigris_kir::face::{Kernel, LoadOptions, Val};
use verdigris_kir::tile::schedule::Work;

use super::spec::{Shared, Spec, WARPGROUP};

/// A thread of a consumer.
#[derive(Clone, Copy)]
pub(super) struct Consumer<'k> {
    /// Its index in the warpgroup, and the warpgroup's among the consumers.
    pub(super) thread: Val<'k, u32>,
    pub(super) warpgroup: Val<'k, u32>,
    /// The first row of a tile that the warpgroup has.
    pub(super) first_row: Val<'k, u32>,
}

impl<'k> Consumer<'k> {
    pub(super) fn new(k: Kernel<'k>, spec: &Spec) -> Self {
        let thread = k.thread() & (WARPGROUP - 1);
        let warpgroup = k.uniform(k.thread() >> 7) - 1;
        let first_row = if spec.ping_pong { k.constant(0) } else { warpgroup * (64 * spec.blocks()) };
        Consumer { thread, warpgroup, first_row }
    }
}

/// Where the results of a piece of work belong, and who has them.
#[derive(Clone, Copy)]
pub(super) struct Place<'k> {
    /// Row and column of tiles.
    pub(super) tile: [Val<'k, u32>; 2],
    /// First row and column of the warpgroup's results.
    pub(super) first: [Val<'k, u32>; 2],
    /// The CTA's place in its cluster, and among those that take tiles of their own.
    pub(super) rank: Val<'k, u32>,
    pub(super) peer: Val<'k, u32>,
    pub(super) by: Consumer<'k>,
}

/// A CTA's place in its cluster.
#[derive(Clone, Copy)]
pub(super) struct Share<'k, 's> {
    spec: &'s Spec,
    kernel: Kernel<'k>,
    rank: Val<'k, u32>,
    /// Among the CTAs that take tiles of their own.
    peer: Val<'k, u32>,
    everyone: Val<'k, u16>,
}

impl<'k, 's> Share<'k, 's> {
    pub(super) fn new(k: Kernel<'k>, spec: &'s Spec) -> Self {
        let rank = if spec.ctas() > 1 { k.cluster_rank() } else { k.constant(0) };
        let peer = if spec.cluster > 1 { rank } else { k.constant(0) };
        Share { spec, kernel: k, rank, peer, everyone: k.constant(((1u32 << spec.cluster) - 1) as u16) }
    }

    /// How an operand is loaded: for all CTAs that share it.
    pub(super) fn options(&self, operand: Shared) -> LoadOptions<'k> {
        LoadOptions { multicast: (self.spec.cluster > 1 && self.spec.shared == operand).then_some(self.everyone), policy: None }
    }

    /// First row (or column) of a tile that this CTA loads.
    pub(super) fn loads_from(&self, operand: Shared) -> Val<'k, u32> {
        let (loaded, whole) = (self.spec.loaded(operand), if operand == Shared::A { self.spec.tile_m } else { self.spec.tile_n });
        if loaded < whole { self.rank * loaded } else { self.kernel.constant(0) }
    }

    /// Row and column of the tile. A cluster takes neighbouring ones, along the side whose operand they do not share.
    pub(super) fn tile(&self, work: &Work<'k>) -> [Val<'k, u32>; 2] {
        let beside = |index: Val<'k, u32>| index * self.spec.cluster + self.peer;
        if self.spec.shared == Shared::B { [beside(work.row), work.column] } else { [work.row, beside(work.column)] }
    }

    /// Where the results of `by` belong.
    pub(super) fn place(&self, work: &Work<'k>, by: Consumer<'k>) -> Place<'k> {
        let tile = self.tile(work);
        let first = [tile[0] * self.spec.tile_m + by.first_row, tile[1] * self.spec.tile_n];
        Place { tile, first, rank: self.rank, peer: self.peer, by }
    }

    /// First step and number of steps. The CTAs that share a tile each take a part of its depth, in the order of their ranks.
    pub(super) fn steps(&self, work: &Work<'k>) -> (Val<'k, u32>, Val<'k, u32>) {
        let cut = |rank: Val<'k, u32>| (work.steps * rank) >> self.spec.cluster_split.ilog2();
        if self.spec.cluster_split > 1 { (cut(self.rank), cut(self.rank + 1) - cut(self.rank)) } else { (work.first_step, work.steps) }
    }
}
