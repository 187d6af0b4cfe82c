//! Which tile of queries is next, and which blocks of keys it attends to.

use std::panic::Location;

use verdigris_kir::face::{Divisor, Kernel, Val};
use verdigris_kir::inst::Special;
use verdigris_kir::params::Divide;
use verdigris_kir::tile::dynamic::Handout;

use super::super::band::{Band, BatchBand, Limits};
use super::super::blocks::{List, Listed};
use super::super::order::{Order, Place};
use super::super::ragged::{Offsets, Sequence};
use super::spec::{Mask, Spec};

verdigris_kir::parameters! {
    /// What a kernel that masks a diagonal is told: query `i` attends to keys below `i + behind`.
    pub(super) struct Diagonal / #[derive(Clone, Copy, Debug)] DiagonalArgs of () as _spec {
        pub(super) behind: i32,
        /// Keys of a block.
        pub(super) block: Divide,
    }
}

/// A kernel's parameters on what is attended to.
pub(super) enum Bounds<'k> {
    End,
    Diagonal(Diagonal<'k>),
    Band(Band<'k>),
}

/// One tile: 64 queries for each consumer, of one head.
#[derive(Clone, Copy)]
pub(super) struct Tile<'k> {
    pub(super) first_query: Val<'k, u32>,
    pub(super) head: Val<'k, u32>,
    pub(super) kv_head: Val<'k, u32>,
    pub(super) batch: Val<'k, u32>,
    /// Blocks of keys, from `first_block` on and below `end_block`: at least one, though all of it may be masked.
    pub(super) first_block: Val<'k, u32>,
    pub(super) end_block: Val<'k, u32>,
    /// Blocks between which nothing is masked: from `first_whole` on and below `end_whole`, where that is more.
    pub(super) first_whole: Val<'k, u32>,
    pub(super) end_whole: Val<'k, u32>,
    /// Queries and keys of this batch.
    pub(super) queries: Val<'k, u32>,
    pub(super) keys: Val<'k, u32>,
    /// Query `i` attends to keys from `i + before` to below `i + behind`; zero where the kernel has no such bound.
    pub(super) before: Val<'k, i32>,
    pub(super) behind: Val<'k, i32>,
    /// Of ragged tensors, the rows of queries and of keys of this batch; of paged keys, all from 0 on.
    pub(super) own: Option<[Sequence<'k>; 2]>,
    /// The blocks that the tile goes through, where these are listed: then `first_block` and `end_block` count entries.
    pub(super) list: Option<List<'k>>,
}

impl<'k> Tile<'k> {
    /// The row of the tensors that has a query of this batch, and the one that has a key.
    pub(super) fn query_row(&self, query: Val<'k, u32>) -> Val<'k, u32> {
        self.own.map_or(query, |[queries, _]| queries.begin + query)
    }

    pub(super) fn key_row(&self, key: Val<'k, u32>) -> Val<'k, u32> {
        self.own.map_or(key, |[_, keys]| keys.begin + key)
    }

    /// The batch of the tensors.
    pub(super) fn map_batch(&self, k: Kernel<'k>) -> Val<'k, u32> {
        if self.own.is_some() { k.constant(0) } else { self.batch }
    }

    /// Block `turn` of those that the tile goes through.
    pub(super) fn block(&self, k: Kernel<'k>, turn: Val<'k, u32>) -> Val<'k, u32> {
        self.list.map_or(turn, |list| list.entry(k, turn).block)
    }

    /// Runs `body` where the batch has queries of this tile.
    #[track_caller]
    fn if_any(self, k: Kernel<'k>, body: impl Fn(Tile<'k>)) {
        match self.own {
            None => body(self),
            Some([queries, _]) => k.when(self.first_query.lt(queries.count), || body(self)),
        }
    }
}

/// The tiles of a launch.
pub(super) struct Tiles<'k> {
    pub(super) kernel: Kernel<'k>,
    pub(super) spec: Spec,
    pub(super) order: Order<'k>,
    /// Heads of queries that share one of keys.
    pub(super) group: Divisor<'k>,
    pub(super) bounds: Bounds<'k>,
    /// Where sequences lie, if tensors are ragged.
    pub(super) offsets: Option<Offsets<'k>>,
    /// Where blocks are listed.
    pub(super) listed: Option<Listed<'k>>,
    pub(super) queries: Val<'k, u32>,
    pub(super) keys: Val<'k, u32>,
    pub(super) key_blocks: Val<'k, u32>,
    /// Where tiles are handed out on demand.
    pub(super) handout: Option<Handout<'k>>,
}

impl<'k> Tiles<'k> {
    /// Runs `body` for each tile of this CTA, to bring it: by one thread, which also fetches tiles where they are handed out.
    #[track_caller]
    pub(super) fn bring_each(&self, body: impl Fn(Tile<'k>)) {
        self.kernel.scope_around(Location::caller(), |caller| {
            let run = |number| {
                let tile = self.tile(number);
                caller.run(|| tile.if_any(self.kernel, &body));
            };
            match &self.handout {
                None => self.every(run),
                Some(handout) => handout.fetch(run),
            }
        });
    }

    /// Runs `body` for each tile of this CTA, in the same order: by whole warps.
    #[track_caller]
    pub(super) fn for_each(&self, body: impl Fn(Tile<'k>)) {
        self.kernel.scope_around(Location::caller(), |caller| {
            let run = |number| {
                let tile = self.tile(number);
                caller.run(|| tile.if_any(self.kernel, &body));
            };
            match &self.handout {
                None => self.every(run),
                Some(handout) => handout.for_each(run),
            }
        });
    }

    /// Every so many, as many CTAs as there are.
    fn every(&self, body: impl Fn(Val<'k, u32>)) {
        let k = self.kernel;
        k.range_step(k.cta(), self.order.tiles, k.special(Special::GridX), body);
    }

    fn tile(&self, number: Val<'k, u32>) -> Tile<'k> {
        let k = self.kernel;
        let Place { row, head, batch } = self.order.place(k, number);
        let kv_head = self.group.quotient(head);
        // Where there is an order, row 0 is the last of it, as it is the last that is begun elsewhere.
        let row = self.listed.as_ref().map_or(row, |listed| listed.tile(k, [batch, head, self.order.rows - 1 - row]));
        let first_query = row * self.spec.queries();
        let (zero, none) = (k.constant(0u32), k.constant(0i32));
        let whole = Tile {
            first_query,
            head,
            kv_head,
            batch,
            first_block: zero,
            end_block: self.key_blocks,
            first_whole: zero,
            end_whole: zero,
            queries: self.queries,
            keys: self.keys,
            before: none,
            behind: none,
            own: None,
            list: None,
        };
        match &self.bounds {
            Bounds::End => whole,
            Bounds::Diagonal(diagonal) => self.below(Tile { behind: diagonal.behind, ..whole }, diagonal.block),
            Bounds::Band(band) => {
                let own = self.offsets.as_ref().map(|offsets| offsets.of_batch(k, batch, [self.queries, self.keys]));
                let extents = own.map_or([self.queries, self.keys], |own| own.map(|sequence| sequence.count));
                let BatchBand { queries, keys, before, behind } = band.of_batch(k, batch, extents);
                let tile = self.below(Tile { queries, keys, before, behind, own, ..whole }, band.block);
                let from = |query: Val<'k, u32>| (query.signed() + before).max(0).unsigned();
                let first_block = band.block.quotient(from(first_query));
                let first_whole = band.block.quotient(from(first_query + (self.spec.queries() - 1)) + (self.spec.block - 1));
                let first_whole = first_whole.max(first_block);
                match &self.listed {
                    None => Tile { first_block, first_whole, end_block: tile.end_block.max(first_block + 1), ..tile },
                    Some(listed) => {
                        let list = listed.of_tile(k, [batch, head, first_query]);
                        Tile { first_whole, end_block: list.count, list: Some(list), ..tile }
                    }
                }
            }
        }
    }

    /// The blocks that end at the diagonal.
    fn below(&self, tile: Tile<'k>, block: Divisor<'k>) -> Tile<'k> {
        let k = self.kernel;
        let until = |query: Val<'k, u32>| (query.signed() + tile.behind).max(0).min(tile.keys.signed()).unsigned();
        let last = (tile.first_query + (self.spec.queries() - 1)).min(self.queries - 1);
        let end_block = block.quotient(until(last) + (self.spec.block - 1)).max(k.constant(1u32));
        Tile { end_block, end_whole: block.quotient(until(tile.first_query)), ..tile }
    }
}

/// Which keys the rows `row` and `row + 8` of the head attend to; `column` is the thread's first.
#[track_caller]
pub(super) fn limits<'k>(k: Kernel<'k>, mask: Mask, tile: &Tile<'k>, row: Val<'k, u32>, column: Val<'k, u32>) -> Limits<'k> {
    k.scope(Location::caller(), || {
        let column = column.signed();
        let keys = tile.keys.signed();
        let behind = [0, 8].map(|below| match mask {
            Mask::End => keys - column,
            _ => ((row + below).signed() + tile.behind).min(keys) - column,
        });
        let before = [0, 8].map(|below| (row + below).signed() + tile.before - column);
        Limits { kernel: k, is_band: mask == Mask::Band, before, behind }
    })
}
