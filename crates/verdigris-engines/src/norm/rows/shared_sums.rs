//! The sums that are the gradients of scale and bias, where shared memory holds them: of rows so long that registers do not.

use verdigris_kir::face::Val;

use super::kernel::Share;
use crate::fuse::compute::Compute;
use crate::fuse::value::{self, AnyVal};

/// Sums of a team that is a CTA, in shared memory: each thread adds to those of its own share alone. The parts of a vector that one access takes lie apart,
/// so that neighbouring threads touch neighbouring words.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharedSums<'k> {
    share: Share<'k>,
    address: Val<'k, u32>,
    /// Elements that one access takes, and their bytes.
    many: u32,
    bytes: u32,
}

impl<'k> SharedSums<'k> {
    pub(super) fn new(share: &Share<'k>, bytes: u32) -> SharedSums<'k> {
        let address = share.k.shared("sums", share.team * share.held * share.vector * bytes, 16).address();
        SharedSums { share: *share, address, many: share.vector.min(16 / bytes), bytes }
    }

    /// Where the sums of a vector of the share begin, and how far its parts lie apart.
    fn place(&self, slot: u32) -> (Val<'k, u32>, u32) {
        let part_bytes = self.many * self.bytes;
        (self.address + self.share.number(slot) * part_bytes, self.share.team * self.share.held * part_bytes)
    }

    pub(super) fn load<T: Compute>(&self, slot: u32) -> Vec<Val<'k, T>> {
        let (place, apart) = self.place(slot);
        let parts = 0..self.share.vector / self.many;
        parts.flat_map(|part| self.share.k.ld_shared_vector::<T>(place, i64::from(part * apart), self.many as u8)).collect()
    }

    pub(super) fn store<T: Compute>(&self, slot: u32, values: &[Val<'k, T>]) {
        let (place, apart) = self.place(slot);
        for (part, values) in (0..).zip(values.chunks(self.many as usize)) {
            self.share.k.st_shared_vector(place, i64::from(part * apart), values);
        }
    }

    pub(super) fn clear<T: Compute>(&self) {
        let zeros = vec![T::constant(self.share.k, 0.0); self.share.vector as usize];
        (0..self.share.held).for_each(|slot| self.store(slot, &zeros));
    }

    /// Stores them as the CTA's line.
    pub(super) fn deliver<T: Compute>(&self, line: Val<'k, u64>) {
        let k = self.share.k;
        self.share.each(|part| {
            let sums = self.load::<T>(part.slot.unwrap_or(0));
            let values: Vec<AnyVal<'k>> = sums.into_iter().map(AnyVal::of).collect();
            value::store_values(k, T::DTYPE, line + part.number.mul_wide(self.share.vector * self.bytes), &values);
        });
    }
}
