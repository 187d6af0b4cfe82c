//! Rows on their way to teams that stay: each thread has its part of several of them copied to places of its own in shared memory. No other thread reads
//! there, so that none waits for another, and rows that are not computed with yet take no registers.

use verdigris_kir::face::{Kernel, Val, Var};

use super::kernel::Share;
use crate::fuse::strided::{Kept, Line};

/// Rows that are on their way to a team, where shared memory has room.
const MOST: u32 = 3;
/// The most shared memory that they take: every chip from sm_80 on lets a kernel have so much, or `Arch` says less.
const MOST_BYTES: u32 = 1 << 17;
/// Shared memory that is left to the sums of a CTA's teams.
pub(super) const LEFT_BYTES: u32 = 1 << 15;

/// How many rows are on their way to each team of CTAs whose rows take so many bytes, on a chip whose CTAs may have so much shared memory.
pub(super) fn rows_of(row_bytes: u32, shared_bytes: u32) -> u32 {
    (shared_bytes.saturating_sub(LEFT_BYTES).min(MOST_BYTES) / row_bytes).min(MOST)
}

/// The places of a CTA's threads: for each row, operand and access of a thread those of all threads side by side, so that banks do not collide.
#[derive(Clone, Debug)]
pub(super) struct Ahead<'k> {
    k: Kernel<'k>,
    rows: u32,
    /// Bytes of one row of each team, and where those of each operand begin, with the bytes of an access.
    row_bytes: u32,
    operands: Vec<(u32, u32)>,
    address: Val<'k, u32>,
    /// The row that is next, in bytes.
    turn: Var<'k, u32>,
}

impl<'k> Ahead<'k> {
    /// Places for so many rows of operands with accesses of so many bytes.
    #[track_caller]
    pub(super) fn new(k: Kernel<'k>, rows: u32, held: u32, accesses: &[u32]) -> Ahead<'k> {
        let mut row_bytes = 0;
        let mut operands = Vec::new();
        for &bytes in accesses {
            operands.push((row_bytes, bytes));
            row_bytes += held * k.threads() * bytes;
        }
        let address = k.shared("rows", rows * row_bytes, 16).address();
        Ahead { k, rows, row_bytes, operands, address, turn: k.var(0u32) }
    }

    /// Each place of this thread in a row, with its offset, by operand and access.
    fn places(&self, held: u32) -> Vec<Vec<(Val<'k, u32>, i64)>> {
        let k = self.k;
        let of = |&(begin, bytes): &(u32, u32)| {
            let own = self.address + k.thread() * bytes;
            (0..held).map(|slot| (own, i64::from(begin + slot * k.threads() * bytes))).collect()
        };
        self.operands.iter().map(of).collect()
    }

    /// Starts the copies of a row to the place that is `turn` bytes from the first. A place from which there is nothing to copy has an empty group.
    #[track_caller]
    pub(super) fn start(&self, share: &Share<'k>, lines: &[Line<'k>], turn: Val<'k, u32>) {
        for (line, places) in lines.iter().zip(self.places(share.held)) {
            for (slot, (place, offset)) in (0..).zip(places) {
                line.start_copy(share.nearest(slot), place + turn, offset);
            }
        }
    }

    /// Starts the copies of the first rows, by `start` with the number of each.
    #[track_caller]
    pub(super) fn begin(&self, start: impl Fn(u32, Val<'k, u32>)) {
        for row in 0..self.rows {
            start(row, self.k.constant(row * self.row_bytes));
            self.k.cp_async_commit();
        }
    }

    /// Takes the row that is next, and starts the copies of the one that comes so many rows behind it, by `start`, to its place.
    #[track_caller]
    pub(super) fn take(&self, now: &[Vec<Kept<'k>>], start: impl Fn(u32, Val<'k, u32>)) {
        let k = self.k;
        k.cp_async_wait(self.rows - 1);
        let held = now.first().map_or(0, |operand| operand.len() as u32);
        for (operand, places) in now.iter().zip(self.places(held)) {
            operand.iter().zip(places).for_each(|(kept, (place, offset))| kept.set_copied(k, place + self.turn.get(), offset));
        }
        start(self.rows, self.turn.get());
        k.cp_async_commit();
        let next = self.turn + self.row_bytes;
        self.turn.set(k.select(next.eq(self.rows * self.row_bytes), 0u32, next));
    }

    /// Waits for what is still on its way.
    #[track_caller]
    pub(super) fn end(&self) {
        self.k.cp_async_wait(0);
    }
}
