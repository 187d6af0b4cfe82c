//! Memory that threads read and write: global, shared, shared of another CTA; atomics.

use super::{AsVal, Kernel, Scalar, Val};
use crate::inst::{Atomic, Cache, Op, Order, Space};
use crate::ir::{Operand, Ty};

/// A pointer parameter.
#[derive(Clone, Copy, Debug)]
pub struct Pointer<'k> {
    base: Val<'k, u64>,
}

impl<'k> Pointer<'k> {
    pub(super) fn new(base: Val<'k, u64>) -> Self {
        Pointer { base }
    }

    /// Global memory at an address that the kernel read from a table.
    pub fn at_address(address: Val<'k, u64>) -> Self {
        Pointer { base: address }
    }

    /// The address itself.
    pub fn address(self) -> Val<'k, u64> {
        self.base
    }

    /// The address of element `index`, elements being `bytes` wide; 64-bit arithmetic on a 32-bit index.
    #[track_caller]
    pub fn at(self, index: impl AsVal<'k, u32>, bytes: u32) -> Val<'k, u64> {
        let k = self.base.kernel();
        k.compute(Op::IMadWide { ty: Ty::U32 }, &[index.operand(), Operand::Imm(bytes.into()), self.base.operand()])
    }

    /// The pointer moved by a 64-bit number of bytes.
    #[track_caller]
    pub fn moved(self, bytes: impl AsVal<'k, u64>) -> Pointer<'k> {
        Pointer { base: self.base + bytes.operand_val(self.base.kernel()) }
    }
}

/// A named piece of the CTA's shared memory.
#[derive(Clone, Copy, Debug)]
pub struct SharedPiece<'k> {
    kernel: Kernel<'k>,
    index: u32,
    bytes: u32,
}

impl<'k> SharedPiece<'k> {
    /// Its address.
    #[track_caller]
    pub fn address(self) -> Val<'k, u32> {
        self.kernel.compute(Op::SharedAddress { index: self.index }, &[])
    }

    /// Its size.
    pub fn bytes(self) -> u32 {
        self.bytes
    }
}

fn offset(bytes: i64) -> Operand {
    Operand::Imm(bytes as u64)
}

impl<'k> Kernel<'k> {
    /// A named piece of shared memory. Swizzled tiles need 1024-byte alignment.
    #[track_caller]
    pub fn shared(self, name: &'static str, bytes: u32, alignment_bytes: u32) -> SharedPiece<'k> {
        let index = self.declare_shared(name, bytes, alignment_bytes, self.here());
        SharedPiece { kernel: self, index, bytes }
    }

    /// Loads one value from global memory.
    #[track_caller]
    pub fn ld_global<T: Scalar>(self, address: impl AsVal<'k, u64>, offset_bytes: i64) -> Val<'k, T> {
        self.ld_global_with(address, offset_bytes, Order::Weak, Cache::Default)
    }

    /// Loads one value from global memory with an ordering and a caching choice.
    #[track_caller]
    pub fn ld_global_with<T: Scalar>(self, address: impl AsVal<'k, u64>, offset_bytes: i64, order: Order, cache: Cache) -> Val<'k, T> {
        let op = Op::Ld { space: Space::Global, ty: T::TY, count: 1, order, cache };
        self.compute(op, &[address.operand(), offset(offset_bytes)])
    }

    /// Loads `count` neighbouring values (2 or 4; at most 16 bytes) from global memory.
    #[track_caller]
    pub fn ld_global_vector<T: Scalar>(self, address: impl AsVal<'k, u64>, offset_bytes: i64, count: u8, cache: Cache) -> Vec<Val<'k, T>> {
        let op = Op::Ld { space: Space::Global, ty: T::TY, count, order: Order::Weak, cache };
        self.compute_many(op, count as usize, &[address.operand(), offset(offset_bytes)])
    }

    /// Loads one byte from global memory, extended to 32 bits.
    #[track_caller]
    pub fn ld_global_byte(self, address: impl AsVal<'k, u64>, offset_bytes: i64, signed: bool) -> Val<'k, u32> {
        self.compute(Op::LdByte { space: Space::Global, signed, cache: Cache::Default }, &[address.operand(), offset(offset_bytes)])
    }

    /// Stores one value to global memory.
    #[track_caller]
    pub fn st_global<T: Scalar>(self, address: impl AsVal<'k, u64>, offset_bytes: i64, value: Val<'k, T>) {
        self.st_global_with(address, offset_bytes, value, Order::Weak, Cache::Default);
    }

    /// Stores one value to global memory with an ordering and a caching choice.
    #[track_caller]
    pub fn st_global_with<T: Scalar>(self, address: impl AsVal<'k, u64>, offset_bytes: i64, value: Val<'k, T>, order: Order, cache: Cache) {
        let op = Op::St { space: Space::Global, ty: T::TY, count: 1, order, cache };
        self.instruction(op, &[], &[address.operand(), offset(offset_bytes), value.operand()]);
    }

    /// Stores neighbouring values (2 or 4; at most 16 bytes) to global memory.
    #[track_caller]
    pub fn st_global_vector<T: Scalar>(self, address: impl AsVal<'k, u64>, offset_bytes: i64, values: &[Val<'k, T>], cache: Cache) {
        let op = Op::St { space: Space::Global, ty: T::TY, count: values.len() as u8, order: Order::Weak, cache };
        self.instruction(op, &[], &with_values(address.operand(), offset_bytes, values));
    }

    /// Stores the low byte of a value to global memory.
    #[track_caller]
    pub fn st_global_byte(self, address: impl AsVal<'k, u64>, offset_bytes: i64, value: impl AsVal<'k, u32>) {
        let op = Op::StByte { space: Space::Global, cache: Cache::Default };
        self.instruction(op, &[], &[address.operand(), offset(offset_bytes), value.operand()]);
    }

    /// Loads one value from the CTA's shared memory.
    #[track_caller]
    pub fn ld_shared<T: Scalar>(self, address: impl AsVal<'k, u32>, offset_bytes: i64) -> Val<'k, T> {
        let op = Op::Ld { space: Space::Shared, ty: T::TY, count: 1, order: Order::Weak, cache: Cache::Default };
        self.compute(op, &[address.operand(), offset(offset_bytes)])
    }

    /// Loads neighbouring values (2 or 4; at most 16 bytes) from the CTA's shared memory.
    #[track_caller]
    pub fn ld_shared_vector<T: Scalar>(self, address: impl AsVal<'k, u32>, offset_bytes: i64, count: u8) -> Vec<Val<'k, T>> {
        let op = Op::Ld { space: Space::Shared, ty: T::TY, count, order: Order::Weak, cache: Cache::Default };
        self.compute_many(op, count as usize, &[address.operand(), offset(offset_bytes)])
    }

    /// Stores one value to the CTA's shared memory.
    #[track_caller]
    pub fn st_shared<T: Scalar>(self, address: impl AsVal<'k, u32>, offset_bytes: i64, value: Val<'k, T>) {
        let op = Op::St { space: Space::Shared, ty: T::TY, count: 1, order: Order::Weak, cache: Cache::Default };
        self.instruction(op, &[], &[address.operand(), offset(offset_bytes), value.operand()]);
    }

    /// Stores neighbouring values (2 or 4; at most 16 bytes) to the CTA's shared memory.
    #[track_caller]
    pub fn st_shared_vector<T: Scalar>(self, address: impl AsVal<'k, u32>, offset_bytes: i64, values: &[Val<'k, T>]) {
        let op = Op::St { space: Space::Shared, ty: T::TY, count: values.len() as u8, order: Order::Weak, cache: Cache::Default };
        self.instruction(op, &[], &with_values(address.operand(), offset_bytes, values));
    }

    /// Loads neighbouring values from the shared memory of a CTA of the cluster; the address comes from [`Kernel::mapa`].
    #[track_caller]
    pub fn ld_cluster_vector<T: Scalar>(self, address: impl AsVal<'k, u32>, offset_bytes: i64, count: u8) -> Vec<Val<'k, T>> {
        let op = Op::Ld { space: Space::Cluster, ty: T::TY, count, order: Order::Weak, cache: Cache::Default };
        self.compute_many(op, count as usize, &[address.operand(), offset(offset_bytes)])
    }

    /// Stores neighbouring values to the shared memory of a CTA of the cluster.
    #[track_caller]
    pub fn st_cluster_vector<T: Scalar>(self, address: impl AsVal<'k, u32>, offset_bytes: i64, values: &[Val<'k, T>]) {
        let op = Op::St { space: Space::Cluster, ty: T::TY, count: values.len() as u8, order: Order::Weak, cache: Cache::Default };
        self.instruction(op, &[], &with_values(address.operand(), offset_bytes, values));
    }

    /// The address that a place in this CTA's shared memory has in the CTA of rank `rank`.
    #[track_caller]
    pub fn mapa(self, address: impl AsVal<'k, u32>, rank: impl AsVal<'k, u32>) -> Val<'k, u32> {
        self.compute(Op::MapShared {}, &[address.operand(), rank.operand()])
    }

    /// Changes a word of global memory and returns what it was.
    #[track_caller]
    pub fn atom_global<T: Scalar>(
        self,
        op: Atomic,
        address: impl AsVal<'k, u64>,
        offset_bytes: i64,
        value: impl AsVal<'k, T>,
        order: Order,
    ) -> Val<'k, T> {
        let op = Op::Atom { space: Space::Global, op, ty: T::TY, order };
        self.compute(op, &[address.operand(), offset(offset_bytes), value.operand()])
    }

    /// Changes a word of shared memory and returns what it was.
    #[track_caller]
    pub fn atom_shared<T: Scalar>(
        self,
        op: Atomic,
        address: impl AsVal<'k, u32>,
        offset_bytes: i64,
        value: impl AsVal<'k, T>,
        order: Order,
    ) -> Val<'k, T> {
        let op = Op::Atom { space: Space::Shared, op, ty: T::TY, order };
        self.compute(op, &[address.operand(), offset(offset_bytes), value.operand()])
    }

    /// Changes neighbouring words of global memory and returns nothing.
    #[track_caller]
    pub fn red_global<T: Scalar>(self, op: Atomic, address: impl AsVal<'k, u64>, offset_bytes: i64, values: &[Val<'k, T>], order: Order) {
        let op = Op::Red { space: Space::Global, op, ty: T::TY, count: values.len() as u8, order };
        self.instruction(op, &[], &with_values(address.operand(), offset_bytes, values));
    }

    /// Brings the line at a global address into L2.
    #[track_caller]
    pub fn prefetch_l2(self, address: impl AsVal<'k, u64>, offset_bytes: i64) {
        self.instruction(Op::Prefetch { l1: false }, &[], &[address.operand(), offset(offset_bytes)]);
    }
}

fn with_values<T: Scalar>(address: Operand, offset_bytes: i64, values: &[Val<'_, T>]) -> Vec<Operand> {
    let mut ins = vec![address, offset(offset_bytes)];
    ins.extend(values.iter().map(|value| value.operand()));
    ins
}
