//! Barriers, mbarriers, fences.

use super::{AsVal, Kernel, Val};
use crate::inst::{Fence, Op, Scope, Space, TestWait};
use crate::ir::Operand;

/// A constant that is settled later than its first use, before the kernel is complete.
#[derive(Clone, Copy, Debug)]
pub struct Late<'k> {
    kernel: Kernel<'k>,
    index: u32,
}

impl<'k> Late<'k> {
    /// Settles it.
    pub fn set(self, value: u64) {
        self.kernel.with(|state| state.body.late[self.index as usize] = value);
    }

    /// Adds to what it is so far.
    pub fn add(self, value: u64) {
        self.kernel.with(|state| state.body.late[self.index as usize] += value);
    }

    pub(super) fn index(self) -> u32 {
        self.index
    }

    /// The constant as a value.
    pub fn value(self) -> Val<'k, u32> {
        Val::new(self.kernel, Operand::Late(self.index))
    }
}

/// An array of mbarriers in shared memory. The number of arrivals that completes a phase is settled by those who arrive.
#[derive(Clone, Copy, Debug)]
pub struct MbarrierArray<'k> {
    kernel: Kernel<'k>,
    shared: u32,
    count: u32,
    arrivals: Late<'k>,
}

impl<'k> MbarrierArray<'k> {
    /// The pending count of a phase.
    pub fn arrivals(self) -> Late<'k> {
        self.arrivals
    }

    /// How many barriers are in the array.
    pub fn count(self) -> u32 {
        self.count
    }

    /// The barrier at an index.
    #[track_caller]
    pub fn at(self, index: impl AsVal<'k, u32>) -> Mbarrier<'k> {
        let base: Val<'k, u32> = self.kernel.compute(Op::SharedAddress { index: self.shared }, &[]);
        match index.operand() {
            Operand::Imm(index) => Mbarrier { kernel: self.kernel, address: base, offset: 8 * index as i64 },
            _ => Mbarrier { kernel: self.kernel, address: self.kernel.fma(index, 8u32, base), offset: 0 },
        }
    }

    /// Initializes every barrier of the array; by one thread, before a fence and a barrier of all who use them.
    #[track_caller]
    pub fn init(self) {
        for index in 0..self.count {
            let Mbarrier { address, offset, .. } = self.at(index);
            self.kernel.instruction(
                Op::MbarrierInit {},
                &[],
                &[address.operand(), Operand::Imm(offset as u64), self.arrivals.value().operand()],
            );
        }
    }
}

/// One mbarrier of this CTA.
#[derive(Clone, Copy, Debug)]
pub struct Mbarrier<'k> {
    kernel: Kernel<'k>,
    address: Val<'k, u32>,
    offset: i64,
}

/// One mbarrier of a CTA of the cluster.
#[derive(Clone, Copy, Debug)]
pub struct RemoteMbarrier<'k> {
    kernel: Kernel<'k>,
    address: Val<'k, u32>,
}

impl<'k> Mbarrier<'k> {
    fn place(self) -> [Operand; 2] {
        [self.address.operand(), Operand::Imm(self.offset as u64)]
    }

    #[track_caller]
    fn act(self, op: Op, operand: Operand) {
        let [address, offset] = self.place();
        self.kernel.instruction(op, &[], &[address, offset, operand]);
    }

    /// Its address as one number, as copies want it.
    #[track_caller]
    pub fn address(self) -> Val<'k, u32> {
        if self.offset == 0 { self.address } else { self.address + self.offset as u32 }
    }

    /// Arrives once; releases this thread's memory accesses to the CTA.
    #[track_caller]
    pub fn arrive(self) {
        self.act(Op::MbarrierArrive { space: Space::Shared, scope: Scope::Cta }, Operand::Imm(1));
    }

    /// Arrives once and expects `bytes` more bytes in this phase.
    #[track_caller]
    pub fn arrive_expect_tx(self, bytes: impl AsVal<'k, u32>) {
        self.act(Op::MbarrierArriveExpect { space: Space::Shared }, bytes.operand());
    }

    /// Expects `bytes` more bytes in this phase without arriving.
    #[track_caller]
    pub fn expect_tx(self, bytes: impl AsVal<'k, u32>) {
        self.act(Op::MbarrierExpect { space: Space::Shared }, bytes.operand());
    }

    /// Waits until the phase of this parity is complete, acquiring for the CTA.
    #[track_caller]
    pub fn wait(self, parity: impl AsVal<'k, u32>) {
        self.act(Op::MbarrierWait { scope: Scope::Cta }, parity.operand());
    }

    /// Waits until the phase of this parity is complete, acquiring for the cluster: where other CTAs arrive.
    #[track_caller]
    pub fn wait_cluster(self, parity: impl AsVal<'k, u32>) {
        self.act(Op::MbarrierWait { scope: Scope::Cluster }, parity.operand());
    }

    /// Whether the phase of this parity is complete.
    #[track_caller]
    pub fn test(self, kind: TestWait, parity: impl AsVal<'k, u32>) -> Val<'k, bool> {
        let [address, offset] = self.place();
        self.kernel.compute(Op::MbarrierTest { kind, scope: Scope::Cta }, &[address, offset, parity.operand()])
    }

    /// Arrives when this thread's `cp.async` so far are complete; counts as one arrival of the phase.
    #[track_caller]
    pub fn cp_async_arrive(self) {
        let [address, offset] = self.place();
        self.kernel.instruction(Op::CpAsyncArrive { no_increment: true }, &[], &[address, offset]);
    }

    /// The same barrier in the CTA of rank `rank`.
    #[track_caller]
    pub fn peer(self, rank: impl AsVal<'k, u32>) -> RemoteMbarrier<'k> {
        let own = self.address();
        RemoteMbarrier { kernel: self.kernel, address: self.kernel.mapa(own, rank) }
    }
}

impl<'k> RemoteMbarrier<'k> {
    /// Its address in the cluster.
    pub fn address(self) -> Val<'k, u32> {
        self.address
    }

    /// Arrives once; releases this thread's memory accesses to the cluster. Costs a fence over the device.
    #[track_caller]
    pub fn arrive(self) {
        let op = Op::MbarrierArrive { space: Space::Cluster, scope: Scope::Cluster };
        self.kernel.instruction(op, &[], &[self.address.operand(), Operand::Imm(0), Operand::Imm(1)]);
    }

    /// Arrives once to say that this thread is done *reading*: what it wrote is not released beyond the CTA, so it costs no fence.
    #[track_caller]
    pub fn arrive_read(self) {
        let op = Op::MbarrierArrive { space: Space::Cluster, scope: Scope::Cta };
        self.kernel.instruction(op, &[], &[self.address.operand(), Operand::Imm(0), Operand::Imm(1)]);
    }
}

impl<'k> Kernel<'k> {
    /// A constant that is settled later; `first` until then.
    pub fn late(self, first: u64) -> Late<'k> {
        let index = self.with(|state| {
            state.body.late.push(first);
            state.body.late.len() as u32 - 1
        });
        Late { kernel: self, index }
    }

    /// An array of mbarriers whose arrival count is settled by [`MbarrierArray::arrivals`].
    #[track_caller]
    pub fn mbarrier_array(self, name: &'static str, count: u32) -> MbarrierArray<'k> {
        let (shared, arrivals) = self.declare_barriers(name, count, self.here());
        MbarrierArray { kernel: self, shared, count, arrivals }
    }

    /// Waits for every thread of the CTA (`bar.sync 0`).
    #[track_caller]
    pub fn bar_sync(self) {
        self.instruction(Op::CtaSync {}, &[], &[]);
    }

    /// Waits at named barrier `id` until `threads` threads have arrived or wait there.
    #[track_caller]
    pub fn barrier_sync(self, id: impl AsVal<'k, u32>, threads: u32) {
        self.instruction(Op::BarSync {}, &[], &[id.operand(), Operand::Imm(threads.into())]);
    }

    /// Arrives at named barrier `id`, at which `threads` threads arrive or wait, without waiting.
    #[track_caller]
    pub fn barrier_arrive(self, id: impl AsVal<'k, u32>, threads: u32) {
        self.instruction(Op::BarArrive {}, &[], &[id.operand(), Operand::Imm(threads.into())]);
    }

    /// Waits for the lanes of the warp and orders their memory accesses.
    #[track_caller]
    pub fn warp_sync(self) {
        self.instruction(Op::WarpSync {}, &[], &[Operand::Imm(0xffff_ffff)]);
    }

    /// Arrives at the cluster's barrier, releasing.
    #[track_caller]
    pub fn cluster_arrive(self) {
        self.instruction(Op::ClusterArrive { relaxed: false }, &[], &[]);
    }

    /// Arrives at the cluster's barrier without ordering memory.
    #[track_caller]
    pub fn cluster_arrive_relaxed(self) {
        self.instruction(Op::ClusterArrive { relaxed: true }, &[], &[]);
    }

    /// Waits for the cluster's barrier, acquiring.
    #[track_caller]
    pub fn cluster_wait(self) {
        self.instruction(Op::ClusterWait {}, &[], &[]);
    }

    /// Waits for every thread of the cluster.
    #[track_caller]
    pub fn cluster_sync(self) {
        self.cluster_arrive();
        self.cluster_wait();
    }

    /// A memory fence.
    #[track_caller]
    pub fn fence(self, fence: Fence) {
        self.instruction(Op::MemoryFence { fence }, &[], &[]);
    }

    /// Makes this thread's ordinary writes to shared memory visible to the async proxy: TMA stores, bulk copies, `wgmma`.
    #[track_caller]
    pub fn fence_proxy_async(self) {
        self.fence(Fence::ProxyAsyncShared);
    }
}
