//! The order of tiles: which rows of which head are next.

use std::panic::Location;

use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::params::Divide;

verdigris_kir::parameters! {
    /// Heads in sections, which are gone through one after the other; each engine says how many heads make one. Within a section the last rows of all heads are first: of queries they have the most keys where a
    /// diagonal ends them, and of keys the fewest queries.
    pub(super) struct Order / #[derive(Clone, Copy, Debug)] OrderArgs of () as _spec {
        pub(super) tiles: u32,
        /// Tiles of one head.
        pub(super) rows: u32,
        /// The number of the last section.
        last: u32,
        tiles_of_section: Divide,
        /// Heads of a section, and of the last one.
        heads_of_section: Divide,
        heads_of_last: Divide,
        /// Heads of a batch.
        heads: Divide,
    }
}

impl OrderArgs {
    /// Of `rows` tiles in each of `heads` heads in `batch` batches, at least one of each, `section` heads together.
    pub(super) fn new(rows: u32, heads: u32, batch: u32, section: u32) -> OrderArgs {
        let all = heads * batch;
        let section = section.clamp(1, all);
        let last = (all - 1) / section;
        OrderArgs {
            tiles: rows * all,
            rows,
            last,
            tiles_of_section: rows * section,
            heads_of_section: section,
            heads_of_last: all - last * section,
            heads,
        }
    }
}

/// A tile's place.
#[derive(Clone, Copy)]
pub(super) struct Place<'k> {
    pub(super) row: Val<'k, u32>,
    pub(super) head: Val<'k, u32>,
    pub(super) batch: Val<'k, u32>,
}

impl<'k> Order<'k> {
    /// Where tile `number` is.
    #[track_caller]
    pub(super) fn place(&self, k: Kernel<'k>, number: Val<'k, u32>) -> Place<'k> {
        k.scope(Location::caller(), || {
            let (section, within) = self.tiles_of_section.split(number);
            let (row, head) = self.heads_of_section.split(within);
            let (last_row, last_head) = self.heads_of_last.split(within);
            let is_last = section.eq(self.last);
            let row = self.rows - 1 - k.select(is_last, last_row, row);
            let head = section * self.heads_of_section.value() + k.select(is_last, last_head, head);
            let (batch, head) = self.heads.split(head);
            Place { row, head, batch }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_hold_all_heads_and_the_last_one_the_rest() {
        let OrderArgs { tiles, last, tiles_of_section, heads_of_section, heads_of_last, .. } = OrderArgs::new(5, 7, 3, 8);
        assert_eq!((tiles, last, tiles_of_section, heads_of_section, heads_of_last), (105, 2, 40, 8, 5));
        let whole = OrderArgs::new(5, 7, 3, u32::MAX);
        assert_eq!((whole.last, whole.heads_of_section, whole.heads_of_last), (0, 21, 21));
    }
}
