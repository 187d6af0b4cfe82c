//! Which part of the work a CTA of a cluster takes: tiles beside its peers', of which it loads a part of what they share, or a part of one depth.

use verdigris_kir::face::{Kernel, LoadOptions, Val};
use verdigris_kir::tile::schedule::Work;

use super::spec::{Shared, Spec};

/// A CTA's place in its cluster.
#[derive(Clone, Copy)]
pub(super) struct Share<'k, 's> {
    spec: &'s Spec,
    kernel: Kernel<'k>,
    pub(super) rank: Val<'k, u32>,
    /// Among the CTAs that take tiles of their own.
    pub(super) peer: Val<'k, u32>,
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

    /// First step and number of steps. The CTAs that share a tile each take a part of its depth, in the order of their ranks.
    pub(super) fn steps(&self, work: &Work<'k>) -> (Val<'k, u32>, Val<'k, u32>) {
        let cut = |rank: Val<'k, u32>| (work.steps * rank) >> self.spec.cluster_split.ilog2();
        if self.spec.cluster_split > 1 { (cut(self.rank), cut(self.rank + 1) - cut(self.rank)) } else { (work.first_step, work.steps) }
    }
}
