//! Copies by asynchronous units: `cp.async`, bulk copies, tensor copies.

use super::{AsVal, Kernel, Mbarrier, Scalar, SharedPiece, TensorMap, TensorMapTemplate, Val};
use crate::inst::{BulkReduce, Fence, MapField, Op, Scope, Space};
use crate::ir::{Operand, Ty};

fn offset(bytes: i64) -> Operand {
    Operand::Imm(bytes as u64)
}

/// What a tensor load may carry besides its coordinates.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadOptions<'k> {
    /// The CTAs of the cluster that receive the box, as a bit mask: at the same offset, on the same barrier of each.
    pub multicast: Option<Val<'k, u16>>,
    /// An L2 eviction policy.
    pub policy: Option<Val<'k, u64>>,
}

impl<'k> Kernel<'k> {
    /// Copies `bytes` (4, 8, 16) from global to shared; only `source_bytes` of them are read and the rest is zero.
    #[track_caller]
    pub fn cp_async(
        self,
        shared: impl AsVal<'k, u32>,
        shared_offset: i64,
        global: impl AsVal<'k, u64>,
        global_offset: i64,
        bytes: u8,
        source_bytes: impl AsVal<'k, u32>,
    ) {
        let op = Op::CpAsync { bytes, bypass_l1: bytes == 16 };
        self.instruction(
            op,
            &[],
            &[shared.operand(), offset(shared_offset), global.operand(), offset(global_offset), source_bytes.operand()],
        );
    }

    /// Closes the group of this thread's `cp.async`.
    #[track_caller]
    pub fn cp_async_commit(self) {
        self.instruction(Op::CpAsyncCommit {}, &[], &[]);
    }

    /// Waits until at most `pending` of this thread's `cp.async` groups are unfinished.
    #[track_caller]
    pub fn cp_async_wait(self, pending: u32) {
        self.instruction(Op::CpAsyncWait { pending }, &[], &[]);
    }

    /// Loads a box of a tensor into shared memory; its bytes complete on `barrier`. By one thread.
    #[track_caller]
    pub fn tma_load(
        self,
        to: impl AsVal<'k, u32>,
        map: &TensorMap<'k>,
        coordinates: &[Val<'k, i32>],
        barrier: Mbarrier<'k>,
        options: LoadOptions<'k>,
    ) {
        self.tma_load_at(to, map, coordinates, &[], barrier, options);
    }

    /// Loads pixels of a tensor in im2col order: `offsets` are the filter's position, innermost spatial dimension first.
    #[track_caller]
    pub fn tma_load_im2col(
        self,
        to: impl AsVal<'k, u32>,
        map: &TensorMap<'k>,
        coordinates: &[Val<'k, i32>],
        offsets: &[Val<'k, u16>],
        barrier: Mbarrier<'k>,
        options: LoadOptions<'k>,
    ) {
        self.tma_load_at(to, map, coordinates, offsets, barrier, options);
    }

    #[track_caller]
    fn tma_load_at(
        self,
        to: impl AsVal<'k, u32>,
        map: &TensorMap<'k>,
        coordinates: &[Val<'k, i32>],
        offsets: &[Val<'k, u16>],
        barrier: Mbarrier<'k>,
        options: LoadOptions<'k>,
    ) {
        let op = Op::TmaLoad {
            rank: coordinates.len() as u8,
            im2col: map.decl.im2col,
            multicast: options.multicast.is_some(),
            hint: options.policy.is_some(),
        };
        let barrier = barrier.address();
        let mut ins = vec![to.operand(), map.address.operand()];
        ins.extend(coordinates.iter().map(|c| c.operand()));
        ins.extend(offsets.iter().map(|o| o.operand()));
        ins.push(barrier.operand());
        ins.extend(options.multicast.map(|mask| mask.operand()));
        ins.extend(options.policy.map(|policy| policy.operand()));
        self.instruction(op, &[], &ins);
    }

    /// Stores a box of shared memory into a tensor, clipped at its edges; completes in this thread's bulk group.
    #[track_caller]
    pub fn tma_store(self, map: &TensorMap<'k>, coordinates: &[Val<'k, i32>], from: impl AsVal<'k, u32>) {
        let op = Op::TmaStore { rank: coordinates.len() as u8, im2col: map.decl.im2col, hint: false };
        self.instruction(op, &[], &map_operands(map, coordinates, from.operand()));
    }

    /// Reduces a box of shared memory into a tensor; completes in this thread's bulk group.
    #[track_caller]
    pub fn tma_reduce(self, op: BulkReduce, map: &TensorMap<'k>, coordinates: &[Val<'k, i32>], from: impl AsVal<'k, u32>) {
        let op = Op::TmaReduce { rank: coordinates.len() as u8, op, im2col: map.decl.im2col };
        self.instruction(op, &[], &map_operands(map, coordinates, from.operand()));
    }

    /// Brings a tensor map into TMA's cache.
    #[track_caller]
    pub fn prefetch_tensormap(self, map: &TensorMap<'k>) {
        self.instruction(Op::TensormapPrefetch {}, &[], &[map.address.operand()]);
    }

    /// Copies a template of a tensor map into a piece of shared memory, to be changed there by [`Kernel::tensormap_replace`]. By one thread; the
    /// piece is aligned to 128 bytes.
    #[track_caller]
    pub fn tensormap_copy(self, to: SharedPiece<'k>, template: &TensorMapTemplate<'k>) {
        self.scope(std::panic::Location::caller(), || {
            let address = to.address();
            for offset_bytes in (0..128).step_by(8) {
                self.st_shared(address, i64::from(offset_bytes), template.word(offset_bytes));
            }
        });
    }

    /// Writes one field of a tensor map in shared memory. By one thread.
    #[track_caller]
    pub fn tensormap_replace<T: Scalar>(self, map: SharedPiece<'k>, field: MapField, value: impl AsVal<'k, T>) {
        let address = map.address();
        self.instruction(Op::TensormapReplace { field, space: Space::Shared }, &[], &[address.operand(), value.operand()]);
    }

    /// Copies a changed tensor map from shared to global memory and hands it to TMA, for whoever in `scope` then takes it over by
    /// [`Kernel::tensormap_acquire`]. By a whole warp, behind a warp barrier.
    #[track_caller]
    pub fn tensormap_publish(self, to: impl AsVal<'k, u64>, from: SharedPiece<'k>, scope: Scope) {
        let from = from.address();
        self.instruction(Op::TensormapPublish { scope }, &[], &[to.operand(), from.operand()]);
    }

    /// Takes over a tensor map in global memory that was published, before it is used: by the thread that uses it.
    #[track_caller]
    pub fn tensormap_acquire(self, map: &TensorMap<'k>, scope: Scope) {
        self.instruction(Op::MemoryFence { fence: Fence::TensormapAcquire(scope) }, &[], &[map.address.operand()]);
    }

    /// Copies `bytes` (a multiple of 16) from global to shared; completes on `barrier`.
    #[track_caller]
    pub fn bulk_load(self, to: impl AsVal<'k, u32>, from: impl AsVal<'k, u64>, bytes: impl AsVal<'k, u32>, barrier: Mbarrier<'k>) {
        let op = Op::BulkLoad { multicast: false, hint: false };
        let barrier = barrier.address();
        self.instruction(op, &[], &[to.operand(), from.operand(), bytes.operand(), barrier.operand()]);
    }

    /// Copies `bytes` (a multiple of 16) from shared to global; completes in this thread's bulk group.
    #[track_caller]
    pub fn bulk_store(self, to: impl AsVal<'k, u64>, from: impl AsVal<'k, u32>, bytes: impl AsVal<'k, u32>) {
        self.instruction(Op::BulkStore { hint: false }, &[], &[to.operand(), from.operand(), bytes.operand()]);
    }

    /// Reduces `bytes` of shared memory into global memory, element by element; completes in this thread's bulk group.
    #[track_caller]
    pub fn bulk_reduce(self, op: BulkReduce, ty: Ty, to: impl AsVal<'k, u64>, from: impl AsVal<'k, u32>, bytes: impl AsVal<'k, u32>) {
        self.instruction(Op::BulkReduceStore { op, ty }, &[], &[to.operand(), from.operand(), bytes.operand()]);
    }

    /// Copies `bytes` of own shared memory to another CTA of the cluster; completes on its barrier.
    #[track_caller]
    pub fn bulk_copy_to_peer(
        self,
        to: impl AsVal<'k, u32>,
        from: impl AsVal<'k, u32>,
        bytes: impl AsVal<'k, u32>,
        barrier: super::RemoteMbarrier<'k>,
    ) {
        let ins = [to.operand(), from.operand(), bytes.operand(), barrier.address().operand()];
        self.instruction(Op::BulkCopyToPeer {}, &[], &ins);
    }

    /// Stores to another CTA of the cluster; completes on its barrier by bytes.
    #[track_caller]
    pub fn st_async<T: Scalar>(self, to: impl AsVal<'k, u32>, barrier: super::RemoteMbarrier<'k>, values: &[Val<'k, T>]) {
        let mut ins = vec![to.operand(), barrier.address().operand()];
        ins.extend(values.iter().map(|value| value.operand()));
        self.instruction(Op::StAsync { ty: T::TY, count: values.len() as u8 }, &[], &ins);
    }

    /// Closes this thread's group of bulk and tensor stores.
    #[track_caller]
    pub fn bulk_commit(self) {
        self.instruction(Op::BulkCommit {}, &[], &[]);
    }

    /// Waits until at most `pending` groups of stores are unfinished.
    #[track_caller]
    pub fn bulk_wait(self, pending: u32) {
        self.instruction(Op::BulkWait { pending, read: false }, &[], &[]);
    }

    /// Waits until at most `pending` groups of stores have yet to read their source.
    #[track_caller]
    pub fn bulk_wait_read(self, pending: u32) {
        self.instruction(Op::BulkWait { pending, read: true }, &[], &[]);
    }

    /// An L2 policy that marks everything as first or last to be evicted.
    #[track_caller]
    pub fn create_policy(self, evict_first: bool) -> Val<'k, u64> {
        self.compute(Op::CreatePolicy { evict_first }, &[])
    }
}

fn map_operands(map: &TensorMap<'_>, coordinates: &[Val<'_, i32>], from: Operand) -> Vec<Operand> {
    let mut ins = vec![map.address.operand()];
    ins.extend(coordinates.iter().map(|c| c.operand()));
    ins.push(from);
    ins
}
