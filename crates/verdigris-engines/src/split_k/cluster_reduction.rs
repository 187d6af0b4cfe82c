//! The cluster split-K reduction: the CTAs of a cluster lay out their parts of the same sums in shared memory for all of them to read.
//!
//! **What.** `whole[v] = Σ part_rank[v]` over ranks 0, 1, …, for whichever vectors a thread asks, so the result does not depend on who was
//! first. Four registers of a thread, two columns of two rows eight below each other, are one vector; those of a warpgroup's threads stand
//! side by side.
//! **When.** Once a launch, behind its last product: the sums may take the place of what was multiplied. (Where a CTA wants
//! a slice of whole columns, or goes on to another tile, see [`super::cluster`].)
//! **Cost.** Every sum that is asked for crosses the cluster's network once, and the cluster meets twice.

use verdigris_kir::face::{Kernel, Number, Val};
use verdigris_kir::tile::fragment::Fragment;

use crate::store::Sum;

/// Threads of a warpgroup.
const WARPGROUP: u32 = 128;

/// The sums of a cluster's CTAs, or of one CTA alone.
pub(crate) struct ClusterReduction<'k> {
    kernel: Kernel<'k>,
    peers: Vec<Val<'k, u32>>,
}

/// Who takes part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Sharers {
    /// CTAs of the cluster; 1 for none.
    pub(crate) ctas: u32,
    /// Warpgroups of each, and the named barrier at which they meet.
    pub(crate) warpgroups: u32,
    pub(crate) barrier: u32,
}

impl Sharers {
    fn meet(self, k: Kernel<'_>) {
        if self.ctas > 1 { k.cluster_sync() } else { self.meet_in_cta(k) }
    }

    fn meet_in_cta(self, k: Kernel<'_>) {
        k.barrier_sync(self.barrier, self.warpgroups * WARPGROUP);
    }

    /// Threads of a CTA.
    pub(crate) fn threads(self) -> u32 {
        self.warpgroups * WARPGROUP
    }

    /// The CTA's rank in its cluster.
    pub(crate) fn rank(self, k: Kernel<'_>) -> Val<'_, u32> {
        if self.ctas > 1 { k.cluster_rank() } else { k.constant(0) }
    }

    /// Lays a warpgroup's `sums` out from shared address `slots` on, as those of `vectors` vectors of each of its threads: fragment behind
    /// fragment, warpgroup behind warpgroup. By all threads that take part.
    pub(crate) fn share<'k, T: Sum>(
        self,
        k: Kernel<'k>,
        slots: Val<'k, u32>,
        sums: &[Fragment<'k, T>],
        [warpgroup, thread]: [Val<'k, u32>; 2],
    ) -> ClusterReduction<'k> {
        let vectors_bytes = 16 * WARPGROUP;
        let vectors: u32 = sums.iter().map(|sum| sum.columns() / 8).sum();
        // All reads of what lay there are done.
        self.meet_in_cta(k);
        let own = slots + warpgroup * (vectors * vectors_bytes) + thread * 16;
        for (i, vector) in (0u32..).zip(sums.iter().flat_map(|sum| sum.registers().chunks(4))) {
            let values: Vec<Val<'k, T>> = vector.iter().map(|register| register.get()).collect();
            k.st_shared_vector(own, i64::from(i * vectors_bytes), &values);
        }
        self.meet(k);
        let peers = (0..self.ctas).map(|peer| if self.ctas > 1 { k.mapa(slots, peer) } else { slots }).collect();
        ClusterReduction { kernel: k, peers }
    }

    /// Before the kernel ends: a peer may still read what this CTA has.
    pub(crate) fn part(self, k: Kernel<'_>) {
        if self.ctas > 1 {
            k.cluster_sync();
        }
    }
}

impl<'k> ClusterReduction<'k> {
    /// The four whole sums of vector `vector`, of any thread.
    pub(crate) fn whole<T: Number>(&self, vector: Val<'k, u32>) -> [Val<'k, T>; 4] {
        let parts = self.parts(vector);
        std::array::from_fn(|i| parts[1..].iter().fold(parts[0][i], |sum, part| sum + part[i]))
    }

    fn parts<T: Number>(&self, vector: Val<'k, u32>) -> Vec<Vec<Val<'k, T>>> {
        let load = |peer: &Val<'k, u32>| match self.peers.len() {
            1 => self.kernel.ld_shared_vector::<T>(*peer + vector * 16, 0, 4),
            _ => self.kernel.ld_cluster_vector::<T>(*peer + vector * 16, 0, 4),
        };
        self.peers.iter().map(load).collect()
    }
}
