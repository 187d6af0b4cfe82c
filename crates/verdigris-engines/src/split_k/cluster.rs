//! Cluster split-K: adds up the parts of a sum that the CTAs of a cluster formed, through distributed shared memory.
//!
//! Each CTA holds accumulators of one tile over its own part of the depth. Each sends every peer a slice of columns, straight from
//! registers, and adds up the slices that it receives and its own in the order of ranks: so each ends with the whole sum of its own
//! columns, and the result does not depend on who was first. Neither scratch nor counters are needed, and there is no barrier of the
//! cluster, which would cost a fence over the device: a thread receives what the same thread of each peer has sent.
//!
//! **What.** `sum[row, column] = Σ part_rank[row, column]` over ranks 0, 1, …, for columns `rank · columns / ctas ..` of the tile.
//! **Cost.** Every part crosses the cluster's network once; shared memory for what is received, of two turns where a CTA has many tiles.

use std::panic::Location;

use verdigris_kir::face::{Kernel, Val, Var};
use verdigris_kir::tile::cluster::ClusterExchange;
use verdigris_kir::tile::fragment::Fragment;

use crate::store::Sum;

/// What shapes the exchange.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ClusterSplitKSpec {
    /// CTAs that have parts of the same tile: a power of two.
    pub(crate) ctas: u32,
    /// How far their ranks lie apart: so many tiles a cluster has.
    pub(crate) apart: u32,
    /// A CTA has one tile, and no more.
    pub(crate) once: bool,
    /// Warpgroups of a CTA that take part.
    pub(crate) warpgroups: u32,
    /// Accumulators of 64 rows that each of them has.
    pub(crate) blocks: u32,
    /// Columns of an accumulator: a multiple of 8 · `ctas`.
    pub(crate) columns: u32,
    /// The named barrier of all who take part.
    pub(crate) barrier: u32,
}

impl ClusterSplitKSpec {
    fn threads(&self) -> u32 {
        128 * self.warpgroups
    }

    /// Columns of a slice.
    pub(crate) fn slice_columns(&self) -> u32 {
        self.columns / self.ctas
    }

    /// What a CTA sends to each peer.
    fn slice_bytes(&self) -> u32 {
        4 * 64 * self.warpgroups * self.blocks * self.slice_columns()
    }

    /// Shared memory, with its barriers.
    pub(crate) fn shared_bytes(&self) -> u32 {
        let (ctas, bytes) = (self.ctas, self.slice_bytes());
        if self.once { ClusterExchange::bytes_of_once(ctas, bytes) } else { ClusterExchange::bytes_of_turns(ctas, bytes) }
    }

    /// Declares the shared memory.
    #[track_caller]
    pub(crate) fn declare<'k>(self, k: Kernel<'k>) -> ClusterSplitK<'k> {
        let (name, bytes) = ("slices of parts", self.slice_bytes());
        let exchange = if self.once { ClusterExchange::once(k, name, bytes, self.apart) } else { ClusterExchange::new(k, name, bytes) };
        ClusterSplitK { kernel: k, spec: self, exchange }
    }
}

/// The shared memory of a kernel with cluster split-K.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClusterSplitK<'k> {
    kernel: Kernel<'k>,
    spec: ClusterSplitKSpec,
    exchange: ClusterExchange<'k>,
}

impl<'k> ClusterSplitK<'k> {
    /// Initializes the barriers: by one thread, before they are published.
    #[track_caller]
    pub(crate) fn init(&self) {
        self.exchange.init();
    }

    /// The CTA's rank among those that have parts of the same tile.
    #[track_caller]
    pub(crate) fn rank(&self) -> Val<'k, u32> {
        self.exchange.rank()
    }

    /// Behind the last tile, before the CTA exits: by one thread at least. A single turn leaves nothing to wait for.
    #[track_caller]
    pub(crate) fn drain(&self, turn: Var<'k, u32>) {
        self.exchange.drain(turn.get());
    }

    /// The whole sums of this CTA's columns, in `sums`; `parts` are this CTA's accumulators over all columns. All threads that take part
    /// call it, once a tile; `thread` is the index among them, and `turn` a variable that each begins at 0.
    #[track_caller]
    pub(crate) fn sum<T: Sum>(&self, parts: &[Fragment<'k, T>], sums: &[Fragment<'k, T>], turn: Var<'k, u32>, thread: Val<'k, u32>) {
        self.kernel.scope(Location::caller(), || {
            let ClusterSplitKSpec { ctas, barrier, once, .. } = self.spec;
            let (k, threads, slice_bytes) = (self.kernel, self.spec.threads(), self.spec.slice_bytes());
            // A thread's own four words are one vector; those of all threads stand side by side.
            let place = |index: usize| index as u32 * 16 * threads;
            let now = turn.get();
            self.exchange.acquire(now);
            k.when(thread.eq(0), || self.exchange.expect(now));
            let rank = self.rank();
            let own = self.exchange.own(now) + thread * 16;
            let registers = (self.spec.slice_columns() / 2) as usize;
            for slice in 0..ctas {
                let begins = slice as usize * registers;
                let vectors = || {
                    let of_slice = parts.iter().flat_map(|part| part.registers()[begins..begins + registers].chunks(4));
                    of_slice.map(|vector| vector.iter().map(|register| register.get()).collect::<Vec<Val<'k, T>>>()).enumerate()
                };
                // What this CTA keeps goes straight to where it will be read.
                k.when_else(
                    rank.eq(slice),
                    || vectors().for_each(|(index, values)| k.st_shared_vector(own, i64::from(place(index)), &values)),
                    || {
                        let peer = self.exchange.peer(now, k.constant(slice));
                        vectors().for_each(|(index, values)| peer.send(thread * 16 + place(index), &values));
                    },
                );
            }
            let received = self.exchange.receive(now) + thread * 16;
            for sender in 0..ctas {
                for (index, vector) in sums.iter().flat_map(|sum| sum.registers().chunks(4)).enumerate() {
                    let values = k.ld_shared_vector::<T>(received, i64::from(sender * slice_bytes + place(index)), 4);
                    for (register, value) in vector.iter().zip(values) {
                        register.set(if sender == 0 { value } else { *register + value });
                    }
                }
            }
            if !once {
                k.barrier_sync(barrier, threads);
                self.exchange.release(now, thread);
            }
            turn.set(now + 1);
        });
    }
}
