//! Small messages among the CTAs of a cluster, through distributed shared memory.
//!
//! In each turn every CTA sends the same number of bytes to each of its peers, puts its own message beside what it receives, and so has those
//! of all, in the order of their ranks. Nobody meets at a barrier of the cluster: bytes complete on the receiver's mbarrier, and the receiver
//! tells all senders when its room is free again. That a message of the next turn arrived would not tell them: what completes bytes orders the
//! bytes, not the reads of whoever sent them. There is room for two turns.
//!
//! A CTA does not send to itself. The chip would carry it out, but compute-sanitizer (CUDA 13.0) takes a copy to the sender's own shared memory
//! under a cluster address for an invalid write, and plain stores are quicker.

use crate::face::{AsVal, Kernel, MbarrierArray, Scalar, SharedPiece, Val};
use std::panic::Location;

/// Turns that are under way at most.
const ROOM: u32 = 2;

/// An all-to-all of one small message a turn.
#[derive(Clone, Copy, Debug)]
pub struct ClusterExchange<'k> {
    kernel: Kernel<'k>,
    inbox: SharedPiece<'k>,
    arrived: MbarrierArray<'k>,
    taken: MbarrierArray<'k>,
    bytes: u32,
    ctas: u32,
}

impl<'k> ClusterExchange<'k> {
    /// An exchange of messages of `bytes` bytes: 4 or 8 for [`ClusterExchange::send_words`], a multiple of 16 for
    /// [`ClusterExchange::send_bytes`].
    #[track_caller]
    pub fn new(k: Kernel<'k>, name: &'static str, bytes: u32) -> Self {
        let ctas = k.cluster_ctas();
        let arrived = k.mbarrier_array(name, ROOM);
        arrived.arrivals().set(1);
        let taken = k.mbarrier_array(name, ROOM);
        taken.arrivals().set(u64::from(ctas));
        ClusterExchange { kernel: k, inbox: k.shared(name, ROOM * ctas * bytes, 16), arrived, taken, bytes, ctas }
    }

    /// Initializes the barriers: by one thread, before [`publish_barriers`](super::ring::publish_barriers).
    #[track_caller]
    pub fn init(&self) {
        self.kernel.scope(Location::caller(), || {
            self.arrived.init();
            self.taken.init();
        });
    }

    fn room(&self, turn: Val<'k, u32>) -> Val<'k, u32> {
        self.inbox.address() + (turn & (ROOM - 1)) * (self.ctas * self.bytes)
    }

    /// Opens turn `turn` (0, 1, 2, …) for what the peers send: by one thread, once a turn. What this thread has written before, such as the CTA's
    /// own message, is seen by those who receive.
    #[track_caller]
    pub fn expect(&self, turn: Val<'k, u32>) {
        self.kernel.scope(Location::caller(), || self.arrived.at(turn & (ROOM - 1)).arrive_expect_tx((self.ctas - 1) * self.bytes));
    }

    /// Where this CTA's own message of turn `turn` goes, by ordinary stores behind [`ClusterExchange::acquire`]. Those who read it need an order
    /// with the writers: a barrier of the CTA, or [`ClusterExchange::expect`] by the one thread that wrote.
    #[track_caller]
    pub fn own(&self, turn: Val<'k, u32>) -> Val<'k, u32> {
        self.kernel.scope(Location::caller(), || self.room(turn) + self.kernel.cluster_rank() * self.bytes)
    }

    /// Waits until every CTA has taken this CTA's message of two turns ago: by every thread that writes or sends turn `turn`'s.
    #[track_caller]
    pub fn acquire(&self, turn: Val<'k, u32>) {
        // A fresh barrier counts as having completed the phase of parity 1: the first two turns fall through.
        self.kernel.scope(Location::caller(), || self.taken.at(turn & (ROOM - 1)).wait_cluster(((turn >> 1) & 1) ^ 1));
    }

    /// Sends this CTA's message to the CTA of rank `peer`, another one, from registers: by one thread for each peer.
    #[track_caller]
    pub fn send_words<T: Scalar>(&self, turn: Val<'k, u32>, peer: Val<'k, u32>, values: &[Val<'k, T>]) {
        let k = self.kernel;
        assert_eq!(values.len() as u32 * T::TY.bytes(), self.bytes, "a message has the length of the exchange");
        k.scope(Location::caller(), || {
            let to = k.mapa(self.own(turn), peer);
            k.st_async(to, self.arrived.at(turn & (ROOM - 1)).peer(peer), values);
        });
    }

    /// Sends this CTA's message to the CTA of rank `peer`, another one, from its shared memory at `from`: by one thread for each peer, behind a
    /// proxy fence of those who wrote it. The message may be written again two turns later, behind [`ClusterExchange::acquire`].
    #[track_caller]
    pub fn send_bytes(&self, turn: Val<'k, u32>, peer: Val<'k, u32>, from: impl AsVal<'k, u32>) {
        let k = self.kernel;
        let from = from.operand_val(k);
        k.scope(Location::caller(), || {
            let to = k.mapa(self.own(turn), peer);
            k.bulk_copy_to_peer(to, from, self.bytes, self.arrived.at(turn & (ROOM - 1)).peer(peer));
        });
    }

    /// Waits for the messages of all CTAs and returns where the first one is; the others follow. By every thread that reads them.
    #[track_caller]
    pub fn receive(&self, turn: Val<'k, u32>) -> Val<'k, u32> {
        self.kernel.scope(Location::caller(), || {
            self.arrived.at(turn & (ROOM - 1)).wait_cluster((turn >> 1) & 1);
            self.room(turn)
        })
    }

    /// Gives the room of turn `turn` back: by every thread of the CTA, behind a barrier that all readers have passed. Thread `r` tells the CTA of
    /// rank `r`.
    #[track_caller]
    pub fn release(&self, turn: Val<'k, u32>, thread: Val<'k, u32>) {
        let k = self.kernel;
        k.scope(Location::caller(), || {
            k.when(thread.lt(self.ctas), || self.taken.at(turn & (ROOM - 1)).peer(thread).arrive_read());
        });
    }
}
