//! What the CTAs of a cluster that share a row or a group tell each other: once, a few numbers each.

use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::tile::cluster::ClusterExchange;
use verdigris_kir::tile::ring::publish_barriers;

use crate::fuse::compute::Compute;

/// The CTAs of a cluster.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peers<'k> {
    k: Kernel<'k>,
    exchange: ClusterExchange<'k>,
    message_bytes: u32,
}

impl<'k> Peers<'k> {
    /// With messages of 8 or 16 bytes.
    #[track_caller]
    pub(crate) fn new(k: Kernel<'k>, message_bytes: u32) -> Peers<'k> {
        Peers { k, exchange: ClusterExchange::once(k, "peers", message_bytes, 1), message_bytes }
    }

    /// Makes ready what they hear of each other by: all threads of the cluster, once.
    #[track_caller]
    pub(crate) fn meet(&self) {
        self.k.when(self.k.thread().eq(0), || self.exchange.init());
        publish_barriers(self.k);
    }

    /// What each CTA has, in the order of ranks: as many numbers as a message holds or fewer, the same in all of its threads. By all threads, once.
    #[track_caller]
    pub(crate) fn all<T: Compute, const N: usize>(&self, values: [Val<'k, T>; N]) -> Vec<[Val<'k, T>; N]> {
        let (k, thread) = (self.k, self.k.thread());
        let turn = k.constant(0u32);
        let mut message = values.to_vec();
        message.resize((self.message_bytes / T::TY.bytes()) as usize, values[0]);
        let rank = self.exchange.rank();
        k.when(thread.lt(k.cluster_ctas()) & thread.ne(rank), || self.exchange.send_words(turn, thread, &message));
        k.when(thread.eq(rank), || {
            k.st_shared_vector(self.exchange.own(turn), 0, &message);
            self.exchange.expect(turn);
        });
        let received = self.exchange.receive(turn);
        let of = |peer: u32| {
            let words = k.ld_shared_vector::<T>(received, i64::from(peer * self.message_bytes), message.len() as u8);
            std::array::from_fn(|i| words[i])
        };
        (0..k.cluster_ctas()).map(of).collect()
    }
}
