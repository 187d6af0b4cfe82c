//! Joins the parts of a sum that the CTAs of a cluster formed, through distributed shared memory.
//!
//! Each CTA holds accumulators of one tile over its own part of the depth. Each sends every peer a slice of columns, and adds up the slices that
//! it receives and its own in the order of ranks: so each ends with the whole sum of its own columns, and the result does not depend on
//! who was first. Neither scratch nor counters are needed.
//!
//! **What.** `sum[row, column] = Σ part_rank[row, column]` over ranks 0, 1, …, for columns `rank · columns / ctas ..` of the tile.
//! **Cost.** Every part crosses the cluster's network once; shared memory for two turns of what is sent and of what is received.

use verdigris_kir::face::{Kernel, SharedPiece, Val, Var};
use verdigris_kir::tile::cluster::ClusterExchange;
use verdigris_kir::tile::fragment::Fragment;

use super::way_out::Sum;

/// What shapes the exchange.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ClusterJoinSpec {
    /// CTAs of a cluster: a power of two.
    pub(crate) ctas: u32,
    /// Warpgroups of a CTA that take part.
    pub(crate) warpgroups: u32,
    /// Accumulators of 64 rows that each of them has.
    pub(crate) blocks: u32,
    /// Columns of an accumulator: a multiple of 8 · `ctas`.
    pub(crate) columns: u32,
    /// The named barrier of all who take part.
    pub(crate) barrier: u32,
}

impl ClusterJoinSpec {
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
        4 * self.ctas * self.slice_bytes() + 32
    }

    /// Declares the shared memory.
    pub(crate) fn declare<'k>(self, k: Kernel<'k>) -> ClusterJoin<'k> {
        let exchange = ClusterExchange::new(k, "slices of parts", self.slice_bytes());
        ClusterJoin { kernel: k, spec: self, exchange, outbox: k.shared("slices to send", 2 * self.ctas * self.slice_bytes(), 16) }
    }
}

/// The shared memory of a kernel that joins parts within clusters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClusterJoin<'k> {
    kernel: Kernel<'k>,
    spec: ClusterJoinSpec,
    exchange: ClusterExchange<'k>,
    outbox: SharedPiece<'k>,
}

impl<'k> ClusterJoin<'k> {
    /// Initializes the barriers: by one thread, before they are published.
    pub(crate) fn init(&self) {
        self.exchange.init();
    }

    /// The whole sums of this CTA's columns, in `sums`; `parts` are this CTA's accumulators over all columns. All threads that take part call
    /// it, once a tile; `thread` is the index among them, and `turn` a variable that each begins at 0.
    pub(crate) fn sum<T: Sum>(&self, parts: &[Fragment<'k, T>], sums: &[Fragment<'k, T>], turn: Var<'k, u32>, thread: Val<'k, u32>) {
        let ClusterJoinSpec { ctas, barrier, .. } = self.spec;
        let (k, threads, slice_bytes) = (self.kernel, self.spec.threads(), self.spec.slice_bytes());
        // A thread's own four words are one vector; those of all threads stand side by side.
        let place = |index: usize| index as i64 * 16 * i64::from(threads);
        let now = turn.get();
        let outbox = self.outbox.address() + (now & 1) * (ctas * slice_bytes);
        self.exchange.acquire(now);
        let rank = k.cluster_rank();
        let kept = self.exchange.own(now);
        let registers = (self.spec.slice_columns() / 2) as usize;
        for slice in 0..ctas as usize {
            let of_slice = parts.iter().flat_map(|part| part.registers()[slice * registers..(slice + 1) * registers].chunks(4));
            // What this CTA keeps goes straight to where it will be read.
            let to = k.select(rank.eq(slice as u32), kept, outbox + slice as u32 * slice_bytes) + thread * 16;
            for (index, vector) in of_slice.enumerate() {
                let values: Vec<Val<'k, T>> = vector.iter().map(|register| register.get()).collect();
                k.st_shared_vector(to, place(index), &values);
            }
        }
        k.fence_proxy_async();
        k.barrier_sync(barrier, threads);
        k.when(thread.eq(0), || self.exchange.expect(now));
        let to_peer = thread.lt(ctas) & thread.ne(rank);
        k.when(to_peer, || self.exchange.send_bytes(now, thread, outbox + thread * slice_bytes));
        let inbox = self.exchange.receive(now) + thread * 16;
        for sender in 0..i64::from(ctas) {
            for (index, vector) in sums.iter().flat_map(|sum| sum.registers().chunks(4)).enumerate() {
                let values = k.ld_shared_vector::<T>(inbox, sender * i64::from(slice_bytes) + place(index), 4);
                for (register, value) in vector.iter().zip(values) {
                    register.set(if sender == 0 { value } else { *register + value });
                }
            }
        }
        k.barrier_sync(barrier, threads);
        self.exchange.release(now, thread);
        turn.set(now + 1);
    }
}
