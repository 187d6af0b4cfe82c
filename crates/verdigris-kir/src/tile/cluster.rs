//! Small messages among the CTAs of a cluster, through distributed shared memory.
//!
//! In each turn every CTA sends the same number of bytes to each of its peers, puts its own message beside what it receives, and so has those
//! of all, in the order of their ranks. Nobody meets at a barrier of the cluster: bytes complete on the receiver's mbarrier, and the receiver
//! tells all senders when its room is free again. That a message of the next turn arrived would not tell them: what completes bytes orders the
//! bytes, not the reads of whoever sent them. There is room for two turns.
//!
//! Where a cluster holds several sets of CTAs with messages of their own, neighbours in a set are as many ranks apart as there are sets.
//!
//! A CTA does not send to itself. The chip would carry it out, but compute-sanitizer (CUDA 13.0) takes a copy to the sender's own shared memory
//! under a cluster address for an invalid write, and plain stores are quicker.

use crate::face::{AsVal, Kernel, MbarrierArray, RemoteMbarrier, Scalar, SharedPiece, Val};
use std::panic::Location;

/// Turns that are under way at most.
const ROOM: u32 = 2;

/// An all-to-all of one small message a turn.
#[derive(Clone, Copy, Debug)]
pub struct ClusterExchange<'k> {
    kernel: Kernel<'k>,
    inbox: SharedPiece<'k>,
    arrived: MbarrierArray<'k>,
    /// None where there is one turn alone, whose room nobody waits for.
    taken: Option<MbarrierArray<'k>>,
    bytes: u32,
    ctas: u32,
    /// How far the ranks of those that exchange lie apart: a power of two.
    apart: u32,
}

impl<'k> ClusterExchange<'k> {
    /// Shared memory of an exchange of one turn in room of its own, with its barrier.
    pub const fn bytes_of_once(ctas: u32, bytes: u32) -> u32 {
        ctas * bytes + 8
    }

    /// Shared memory of an exchange of many turns, with its barriers.
    pub const fn bytes_of_turns(ctas: u32, bytes: u32) -> u32 {
        ROOM * ctas * bytes + 16 * ROOM
    }

    /// An exchange of messages of `bytes` bytes, a multiple of 16 for [`ClusterExchange::send_bytes`] and parts of [`ClusterExchange::peer`]s.
    #[track_caller]
    pub fn new(k: Kernel<'k>, name: &'static str, bytes: u32) -> Self {
        let ctas = k.cluster_ctas();
        let arrived = k.mbarrier_array(name, ROOM);
        arrived.arrivals().set(1);
        let taken = k.mbarrier_array(name, ROOM);
        taken.arrivals().set(u64::from(ctas));
        let inbox = k.shared(name, ROOM * ctas * bytes, 16);
        ClusterExchange { kernel: k, inbox, arrived, taken: Some(taken), bytes, ctas, apart: 1 }
    }

    /// An exchange of one turn, turn 0, with room for that alone, among each of `apart` sets of CTAs.
    #[track_caller]
    pub fn once(k: Kernel<'k>, name: &'static str, bytes: u32, apart: u32) -> Self {
        let ctas = k.cluster_ctas() / apart;
        let arrived = k.mbarrier_array(name, 1);
        arrived.arrivals().set(1);
        ClusterExchange { kernel: k, inbox: k.shared(name, ctas * bytes, 16), arrived, taken: None, bytes, ctas, apart }
    }

    /// Initializes the barriers: by one thread, before [`publish_barriers`](super::ring::publish_barriers).
    #[track_caller]
    pub fn init(&self) {
        self.kernel.scope(Location::caller(), || {
            self.arrived.init();
            self.taken.iter().for_each(|taken| taken.init());
        });
    }

    /// The CTA's rank among those that exchange.
    #[track_caller]
    pub fn rank(&self) -> Val<'k, u32> {
        let k = self.kernel;
        k.scope(Location::caller(), || if self.apart > 1 { k.cluster_rank() >> self.apart.ilog2() } else { k.cluster_rank() })
    }

    /// The rank in the cluster of the one that is number `peer` among those that exchange.
    fn rank_in_cluster(&self, peer: Val<'k, u32>) -> Val<'k, u32> {
        if self.apart > 1 { peer * self.apart + (self.kernel.cluster_rank() & (self.apart - 1)) } else { peer }
    }

    fn place(&self, turn: Val<'k, u32>) -> Val<'k, u32> {
        if self.taken.is_some() { turn & (ROOM - 1) } else { self.kernel.constant(0) }
    }

    fn room(&self, turn: Val<'k, u32>) -> Val<'k, u32> {
        let inbox = self.inbox.address();
        if self.taken.is_some() { inbox + self.place(turn) * (self.ctas * self.bytes) } else { inbox }
    }

    /// Opens turn `turn` (0, 1, 2, …) for what the peers send: by one thread, once a turn. What this thread has written before, such as the CTA's
    /// own message, is seen by those who receive.
    #[track_caller]
    pub fn expect(&self, turn: Val<'k, u32>) {
        self.kernel.scope(Location::caller(), || self.arrived.at(self.place(turn)).arrive_expect_tx((self.ctas - 1) * self.bytes));
    }

    /// Where this CTA's own message of turn `turn` goes, by ordinary stores behind [`ClusterExchange::acquire`]. Those who read it need an order
    /// with the writers: a barrier of the CTA, or [`ClusterExchange::expect`] by the one thread that wrote.
    #[track_caller]
    pub fn own(&self, turn: Val<'k, u32>) -> Val<'k, u32> {
        self.kernel.scope(Location::caller(), || self.room(turn) + self.rank() * self.bytes)
    }

    /// Waits until every CTA has taken this CTA's message of two turns ago: by every thread that writes or sends turn `turn`'s.
    #[track_caller]
    pub fn acquire(&self, turn: Val<'k, u32>) {
        // A fresh barrier counts as having completed the phase of parity 1: the first two turns fall through.
        let Some(taken) = &self.taken else { return };
        self.kernel.scope(Location::caller(), || taken.at(self.place(turn)).wait_cluster(((turn >> 1) & 1) ^ 1));
    }

    /// Behind the last turn, `turn` being the one that would follow: waits until every CTA has taken all of this CTA's messages, so that none of them
    /// tells it so any more and it may exit. (Of an exchange of one turn nothing is left to wait for.)
    #[track_caller]
    pub fn drain(&self, turn: Val<'k, u32>) {
        self.kernel.scope(Location::caller(), || (0..ROOM).for_each(|later| self.acquire(turn + later)));
    }

    /// Sends this CTA's message to the CTA of rank `peer`, another one, from registers: by one thread for each peer.
    #[track_caller]
    pub fn send_words<T: Scalar>(&self, turn: Val<'k, u32>, peer: Val<'k, u32>, values: &[Val<'k, T>]) {
        let k = self.kernel;
        assert_eq!(values.len() as u32 * T::TY.bytes(), self.bytes, "a message has the length of the exchange");
        k.scope(Location::caller(), || {
            let Outlet { to, arrived, .. } = self.peer(turn, peer);
            k.st_async(to, arrived, values);
        });
    }

    /// Where this CTA's message of turn `turn` to the CTA of rank `peer`, another one, goes: it may be sent in parts by many threads.
    #[track_caller]
    pub fn peer(&self, turn: Val<'k, u32>, peer: Val<'k, u32>) -> Outlet<'k> {
        let k = self.kernel;
        k.scope(Location::caller(), || {
            let rank = self.rank_in_cluster(peer);
            Outlet { kernel: k, to: k.mapa(self.own(turn), rank), arrived: self.arrived.at(self.place(turn)).peer(rank) }
        })
    }

    /// Sends this CTA's message to the CTA of rank `peer`, another one, from its shared memory at `from`: by one thread for each peer, behind a
    /// proxy fence of those who wrote it. The message may be written again two turns later, behind [`ClusterExchange::acquire`].
    #[track_caller]
    pub fn send_bytes(&self, turn: Val<'k, u32>, peer: Val<'k, u32>, from: impl AsVal<'k, u32>) {
        let k = self.kernel;
        let from = from.operand_val(k);
        k.scope(Location::caller(), || {
            let Outlet { to, arrived, .. } = self.peer(turn, peer);
            k.bulk_copy_to_peer(to, from, self.bytes, arrived);
        });
    }

    /// Waits for the messages of all CTAs and returns where the first one is; the others follow. By every thread that reads them.
    #[track_caller]
    pub fn receive(&self, turn: Val<'k, u32>) -> Val<'k, u32> {
        self.kernel.scope(Location::caller(), || {
            self.arrived.at(self.place(turn)).wait_cluster((turn >> 1) & 1);
            self.room(turn)
        })
    }

    /// Gives the room of turn `turn` back: by every thread of the CTA, behind a barrier that all readers have passed. Thread `r` tells the CTA of
    /// rank `r`.
    #[track_caller]
    pub fn release(&self, turn: Val<'k, u32>, thread: Val<'k, u32>) {
        let k = self.kernel;
        let Some(taken) = &self.taken else { return };
        k.scope(Location::caller(), || {
            k.when(thread.lt(self.ctas), || taken.at(self.place(turn)).peer(self.rank_in_cluster(thread)).arrive_read());
        });
    }
}

/// The way of a message to one peer.
#[derive(Clone, Copy, Debug)]
pub struct Outlet<'k> {
    kernel: Kernel<'k>,
    to: Val<'k, u32>,
    arrived: RemoteMbarrier<'k>,
}

impl<'k> Outlet<'k> {
    /// Sends words of the message that stand `offset_bytes` behind its begin: 4, 8 or 16 bytes, aligned to their length.
    #[track_caller]
    pub fn send<T: Scalar>(&self, offset_bytes: Val<'k, u32>, values: &[Val<'k, T>]) {
        self.kernel.scope(Location::caller(), || self.kernel.st_async(self.to + offset_bytes, self.arrived, values));
    }
}
