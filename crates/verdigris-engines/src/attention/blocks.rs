//! Attention by blocks of pairs ([`verdigris_graph::ops::attention`] says what a map of blocks means): the list of blocks that a tile goes through, and the bits of
//! those that are attended to in part.
//!
//! A launch in front makes of each row of the map a list of the kernel's own blocks of keys, in their order, each with its entry: so that a tile of queries goes
//! through those alone; and for gradients of each column one of blocks of queries. A row without any has one, all of which is left out. A second launch puts the
//! tiles of a head in an order, those of the longest lists first, for a long one that begins last is waited for by all.

use verdigris_graph::{AttentionProblem, View};
use verdigris_kir::face::{Header, Kernel, Pointer, Val, build};
use verdigris_kir::inst::Redux;
use verdigris_kir::ir::Target;
use verdigris_kir::params::{Divide, Read, Write};
use verdigris_kir::program::{KernelRef, Launch, Program};

use crate::engine::{EngineId, Reason, Refusal};
use crate::layout::space::element;

/// Warps of a CTA of the launch in front, each with a row.
const WARPS: u32 = 4;

/// Bytes of an entry of a list: the number of a block, and what the map has for it.
const ENTRY_BYTES: u64 = 8;

verdigris_kir::parameters! {
    /// Lists of blocks out of a map.
    struct Listing / ListingArgs of () as _spec {
        /// i32; elements from one batch, head, row and column to the next.
        map: Read = 4,
        strides: [u64; 4],
        lists: Write = 8,
        counts: Write = 4,
        /// Rows in all, of a head, and heads of a batch that have maps of their own.
        all: u32,
        rows: Divide,
        heads: Divide,
        /// Blocks of the kernel in a row, and in one of the map.
        columns: u32,
        of_block: Divide,
    }
}

verdigris_kir::parameters! {
    /// Tiles of a head by the lengths of their lists.
    struct Ranking / RankingArgs of () as _spec {
        counts: Read = 4,
        ranked: Write = 4,
        /// Rows in all that are put in an order, of one order, and orders of a batch.
        all: u32,
        rows: Divide,
        orders: Divide,
        /// Lists from one batch and order to the next, and heads whose lists a tile goes through, `rows` lists apart.
        strides: [u32; 2],
        heads: u32,
        /// Tiles of a head, and of a row.
        tiles: u32,
        of_row: u32,
    }
}

verdigris_kir::parameters! {
    /// Where a kernel finds the blocks of a tile of queries, and the bits of those that are attended to in part.
    pub(super) struct Listed / #[derive(Clone, Copy, Debug)] ListedArgs of () as _spec {
        lists: Read = 8,
        counts: Read = 4,
        pub(super) masks: MasksArgs = (),
        /// Of lists: rows of a head, from one batch and head to the next, and entries of a row.
        rows: u32,
        strides: [u32; 2],
        columns: u32,
        /// Tiles, the longest first; from one batch and head to the next.
        ranked: Read = 4,
        ranked_strides: [u32; 2],
    }
}

verdigris_kir::parameters! {
    /// The bits of blocks that are attended to in part.
    pub(super) struct Masks / #[derive(Clone, Copy, Debug)] MasksArgs of () as _spec {
        masks: Read = 4,
        /// The number of the last mask, and queries and keys of one.
        last_mask: u32,
        block_q: Divide,
        block_kv: Divide,
    }
}

verdigris_kir::parameters! {
    /// A map of blocks, for kernels that read it themselves and take problems without one: the launch says which.
    pub(super) struct MapIfAny / #[derive(Clone, Copy, Debug)] MapIfAnyArgs of () as _spec {
        pub(super) masks: MasksArgs = (),
        /// i32; elements from one batch, head, row and column to the next.
        map: Read = 4,
        strides: [u64; 4],
        is_any: u32,
    }
}

/// What engines ask that go through every block of keys.
///
/// # Errors
/// A refusal where there is a map of blocks.
pub(super) fn require_none(id: EngineId, p: &AttentionProblem) -> Result<(), Refusal> {
    id.require(p.block_map.is_none(), Reason::Epilogue, "a map of blocks, taken without")
}

/// What the kernels ask that go through lists, in tiles of `rows` queries and blocks whose keys divide `keys`.
///
/// # Errors
/// A refusal that names the first requirement not met.
pub(super) fn require(id: EngineId, p: &AttentionProblem, rows: u32, keys: u32) -> Result<(), Refusal> {
    let (Some(map), Some(masks)) = (&p.block_map, &p.mask_blocks) else { return Ok(()) };
    let is_whole = p.block_q.is_multiple_of(rows.into()) && p.block_kv.is_multiple_of(keys.into());
    let given = format_args!("blocks of {} queries and {} keys, taken are multiples of {rows} and {keys}", p.block_q, p.block_kv);
    id.require(is_whole, Reason::Extent, given)?;
    let has_lengths = p.q_lengths.is_some() || p.kv_lengths.is_some();
    id.require(!has_lengths, Reason::Epilogue, "lengths beside a map of blocks, taken without")?;
    id.require(p.dropout.is_none(), Reason::Epilogue, "dropout beside a map of blocks, taken without")?;
    let packed = [p.block_q * p.block_kv / 8, 0, p.block_kv / 8, 1];
    let lies_packed =
        (masks.strides.iter().zip(packed).zip(p.dims("mask_blocks", masks))).all(|((&own, packed), extent)| extent <= 1 || own == packed);
    id.require(lies_packed, Reason::Layout, format_args!("masks of blocks with strides {:?}, taken packed", masks.strides))?;
    id.require(
        masks.offset.is_multiple_of(4),
        Reason::Alignment,
        format_args!("masks of blocks begin {} bytes into their buffer", masks.offset),
    )?;
    let lists = u128::from(maps(p, map).iter().product::<u64>()) * u128::from(p.s_q.div_ceil(p.block_q)) * u128::from(p.s_kv.div_ceil(16));
    id.require(lists < 1 << 30, Reason::Extent, format_args!("lists of {lists} blocks, taken are fewer than 2^30"))?;
    let pairs = u128::from(p.blocks) * u128::from(p.block_q) * u128::from(p.block_kv);
    id.require(pairs < 1 << 40, Reason::Extent, format_args!("masks of {pairs} pairs, taken are fewer than 2^40"))
}

/// Batches and heads that have maps of their own.
fn maps(p: &AttentionProblem, map: &View) -> [u64; 2] {
    [(0, p.b), (1, p.h)].map(|(dim, extent)| if map.strides[dim] == 0 { 1 } else { extent })
}

/// What lists are of, with the positions of a block of the kernel and those of a tile that goes through them.
#[derive(Clone, Copy)]
pub(super) enum ListOf {
    /// Of a row of the map, blocks of keys for tiles of a head of queries.
    Keys { block: u32, tile: u32 },
    /// Of a column of the map, blocks of queries for tiles of a head of keys, which go through the lists of all its heads of queries.
    Queries { block: u32, tile: u32 },
}

/// Adds the launches that make lists and the order of tiles, and gives what a kernel is told of them; `None` without a map of blocks.
pub(super) fn list(p: &AttentionProblem, program: &mut Program, of: ListOf) -> Option<ListedArgs> {
    let (map, masks) = (p.block_map.as_ref()?, p.mask_blocks.as_ref()?);
    let [batches, heads] = maps(p, map);
    let [of_batch, of_head, of_row, of_column] = std::array::from_fn(|dim| map.strides[dim]);
    let along_queries = (p.s_q, p.block_q);
    let along_keys = (p.s_kv, p.block_kv);
    let (tiled, listed, [of_row, of_column], [block, tile], group) = match of {
        ListOf::Keys { block, tile } => (along_queries, along_keys, [of_row, of_column], [block, tile].map(u64::from), 1),
        ListOf::Queries { block, tile } => (along_keys, along_queries, [of_column, of_row], [block, tile].map(u64::from), p.group()),
    };
    let (rows, columns, of_block) = (tiled.0.div_ceil(tiled.1), listed.0.div_ceil(block), listed.1 / block);
    let all = batches * heads * rows;
    let lists = program.add_scratch("lists of blocks", all * columns * ENTRY_BYTES);
    let counts = program.add_scratch("lengths of lists", all * 4);
    let args = ListingArgs {
        map: element(map, []),
        strides: [of_batch, of_head, of_row, of_column],
        lists,
        counts,
        all: all as u32,
        rows: rows as u32,
        heads: heads as u32,
        columns: columns as u32,
        of_block: of_block as u32,
    };
    program.launch(Launch::new(listing(), [all.div_ceil(WARPS.into()) as u32, 1, 1], args.bound(&())).overlapping());
    let far = |own: u64, stride: u64| if own > 1 { stride as u32 } else { 0 };

    let (tiles, members) = (tiled.0.div_ceil(tile), if heads > 1 { group } else { 1 });
    let orders = heads / members;
    let ranked = program.add_scratch("order of tiles", batches * orders * tiles * 4);
    let args = RankingArgs {
        counts,
        ranked,
        all: (batches * orders * rows) as u32,
        rows: rows as u32,
        orders: orders as u32,
        strides: [heads * rows, members * rows].map(|lists| lists as u32),
        heads: members as u32,
        tiles: tiles as u32,
        of_row: (tiled.1 / tile) as u32,
    };
    program.launch(Launch::new(ranking(), [args.all.div_ceil(WARPS), 1, 1], args.bound(&())).overlapping());
    Some(ListedArgs {
        lists,
        counts,
        masks: MasksArgs::of(p, masks),
        rows: rows as u32,
        strides: [far(batches, heads * rows), far(heads, rows)],
        columns: columns as u32,
        ranked,
        ranked_strides: [far(batches, orders * tiles), far(orders, tiles)],
    })
}

/// The kernels in front.
pub(super) fn catalog() -> [KernelRef; 2] {
    [listing(), ranking()]
}

fn in_front(name: &str) -> Header {
    Header { name: name.to_owned(), target: Target::Sm90, threads: 32 * WARPS, ..Header::default() }
}

fn listing() -> KernelRef {
    KernelRef::new("attention_blocks", || build(in_front("attention_blocks"), list_rows))
}

fn ranking() -> KernelRef {
    KernelRef::new("attention_blocks_order", || build(in_front("attention_blocks_order"), rank_tiles))
}

fn list_rows(k: Kernel<'_>) {
    let params = Listing::declare(k, &());
    k.griddep_wait();
    k.griddep_launch();
    let number = k.cta() * WARPS + k.warp();
    k.when(number.lt(params.all), || {
        let (head, row) = params.rows.split(number);
        let (batch, head) = params.heads.split(head);
        let [of_batch, of_head, of_row, of_column] = params.strides;
        let of_row = batch.widen() * of_batch + head.widen() * of_head + row.widen() * of_row;
        let list = params.lists.moved(number.mul_wide(params.columns) * ENTRY_BYTES);
        let count = k.var_named("count", 0u32);
        let (lane, last) = (k.lane(), params.columns - 1);
        k.range_step(0, params.columns, 32, |first| {
            let block = first + lane;
            let column = params.of_block.quotient(block.min(last));
            let entry = k.ld_global::<u32>(params.map.moved((of_row + column.widen() * of_column) * 4u64).address(), 0);
            let is_there = block.le(last) & entry.ne(0);
            let all = k.ballot(is_there);
            let in_front = (all & (k.constant(1u32).shl(lane) - 1)).popc();
            k.when(is_there, || k.st_global(list.at(count + in_front, ENTRY_BYTES as u32), 0, k.join32(block, entry)));
            count.set(count + all.popc());
        });
        k.when(lane.eq(0), || {
            k.when(count.eq(0), || k.st_global(list.address(), 0, k.join32(k.constant(0), k.constant(0))));
            k.st_global(params.counts.at(number, 4), 0, count.max(1));
        });
    });
}

/// Each warp counts the tiles in front of those of its row: of rows with longer lists, and of as long ones those behind it, since under a diagonal the last begin first.
fn rank_tiles<'k>(k: Kernel<'k>) {
    let params = Ranking::declare(k, &());
    k.griddep_wait();
    k.griddep_launch();
    let number = k.cta() * WARPS + k.warp();
    k.when(number.lt(params.all), || {
        let (order, own) = params.rows.split(number);
        let (batch, of_batch) = params.orders.split(order);
        let rows = params.rows.value();
        let first_list = batch * params.strides[0] + of_batch * params.strides[1];
        let length = |row: Val<'k, u32>| {
            let length = k.var_named("length", 0u32);
            k.range(params.heads, |head| length.set(length + k.ld_global::<u32>(params.counts.at(first_list + head * rows + row, 4), 0)));
            length.get()
        };
        let tiles_of = |row: Val<'k, u32>| (params.tiles - row * params.of_row).min(params.of_row);
        let own_length = length(own);
        let (lane, last) = (k.lane(), rows - 1);
        let in_front = k.var_named("in_front", 0u32);
        k.range_step(0, rows, 32, |first| {
            let row = first + lane;
            let other = row.min(last);
            let other_length = length(other);
            let is_in_front = other_length.gt(own_length) | (other_length.eq(own_length) & row.gt(own));
            in_front.set(in_front + k.select(is_in_front & row.le(last), tiles_of(other), 0u32));
        });
        let place = order * params.tiles + k.redux(Redux::Add, in_front);
        let (first, count) = (own * params.of_row, tiles_of(own));
        k.range_step(0, count, 32, |done| {
            let tile = done + lane;
            k.when(tile.lt(count), || k.st_global(params.ranked.at(place + tile, 4), 0, first + (count - 1 - tile)));
        });
    });
}

/// The list of a tile of queries.
#[derive(Clone, Copy)]
pub(super) struct List<'k> {
    /// The first entry, and how many there are: at least one.
    entries: Val<'k, u64>,
    pub(super) count: Val<'k, u32>,
}

/// An entry: a block of the kernel, and what the map has for it.
#[derive(Clone, Copy)]
pub(super) struct Entry<'k> {
    pub(super) block: Val<'k, u32>,
    /// 0 for a block that is left out, below 0 for one that is attended to as a whole, else the number of its mask and 1.
    pub(super) of_map: Val<'k, u32>,
}

impl MasksArgs {
    fn of(p: &AttentionProblem, masks: &View) -> MasksArgs {
        MasksArgs {
            masks: element(masks, []),
            last_mask: (p.blocks as u32).max(1) - 1,
            block_q: (p.block_q as u32).max(1),
            block_kv: (p.block_kv as u32).max(1),
        }
    }
}

impl MapIfAnyArgs {
    /// That of `p`; some address of the problem stands for what it does not have.
    pub(super) fn of(p: &AttentionProblem) -> MapIfAnyArgs {
        let (map, masks) = (p.block_map.as_ref(), p.mask_blocks.as_ref().unwrap_or(&p.q));
        MapIfAnyArgs {
            masks: MasksArgs::of(p, masks),
            map: element(map.unwrap_or(&p.q), []),
            strides: map.map_or([0; 4], |map| std::array::from_fn(|dim| map.strides[dim])),
            is_any: u32::from(map.is_some()),
        }
    }
}

impl<'k> MapIfAny<'k> {
    /// What the map has for a block of the kernel, whose pairs are of one block of the map, that of a query and a key of a head: all of it is attended to where
    /// there is no map. The same for all threads that call it.
    pub(super) fn entry(
        &self,
        k: Kernel<'k>,
        [batch, head]: [Val<'k, u32>; 2],
        [query, key]: [Val<'k, u32>; 2],
        block: Val<'k, u32>,
    ) -> Entry<'k> {
        let of_map = k.var_named("entry", u32::MAX);
        k.when(self.is_any.ne(0), || {
            let places = [batch, head, self.masks.block_q.quotient(query), self.masks.block_kv.quotient(key)];
            let at = places.into_iter().zip(self.strides).map(|(place, stride)| place.widen() * stride).reduce(|sum, next| sum + next);
            let at = at.expect("four dims") * 4u64;
            of_map.set(k.ld_global::<u32>(self.map.moved(at).address(), 0));
        });
        Entry { block, of_map: k.uniform(of_map.get()) }
    }
}

impl<'k> Listed<'k> {
    /// The tile of a head that stands in the order at `rank`.
    pub(super) fn tile(&self, k: Kernel<'k>, [batch, head, rank]: [Val<'k, u32>; 3]) -> Val<'k, u32> {
        let [of_batch, of_head] = self.ranked_strides;
        k.ld_global::<u32>(self.ranked.at(batch * of_batch + head * of_head + rank, 4), 0)
    }

    /// The list of the tile that begins with a query.
    pub(super) fn of_tile(&self, k: Kernel<'k>, [batch, head, query]: [Val<'k, u32>; 3]) -> List<'k> {
        self.numbered(k, batch, head, self.masks.block_q.quotient(query))
    }

    /// The list of the tile that begins with a key.
    pub(super) fn of_keys(&self, k: Kernel<'k>, [batch, head, key]: [Val<'k, u32>; 3]) -> List<'k> {
        self.numbered(k, batch, head, self.masks.block_kv.quotient(key))
    }

    fn numbered(&self, k: Kernel<'k>, batch: Val<'k, u32>, head: Val<'k, u32>, row: Val<'k, u32>) -> List<'k> {
        let [of_batch, of_head] = self.strides;
        let number = batch * of_batch + head * of_head + row;
        let entries = self.lists.moved(number.mul_wide(self.columns) * ENTRY_BYTES).address();
        List { entries, count: k.ld_global::<u32>(self.counts.at(number, 4), 0) }
    }
}

impl<'k> Masks<'k> {
    /// Where the bits stand that say from which queries the keys `key` and `key + 8`, of one 16, are attended to; `query` is the first. All pairs are of one
    /// block of the map, in part or not at all.
    pub(super) fn columns(&self, entry: Entry<'k>, query: Val<'k, u32>, key: Val<'k, u32>) -> Columns<'k> {
        let row = self.row(entry, query).moved(((self.block_kv.split(key).1 >> 5) << 2).widen());
        Columns { row, bytes_of_row: self.block_kv.value() >> 3, key: key & 31, is_out: entry.of_map.eq(0) }
    }

    /// The bits of a query in the mask of an entry.
    fn row(&self, entry: Entry<'k>, query: Val<'k, u32>) -> Pointer<'k> {
        let mask = (entry.of_map.max(1) - 1).min(self.last_mask);
        let of_mask = mask.mul_wide(self.block_q.value()) + self.block_q.split(query).1.widen();
        self.masks.moved(of_mask * (self.block_kv.value() >> 3).widen())
    }

    /// Of the rows `query` and `query + 8`, the words whose bits say which keys of a block are attended to, of `keys` keys from `first_key` on. All of them
    /// are of one block of the map, in part or not at all.
    pub(super) fn words(
        &self,
        k: Kernel<'k>,
        entry: Entry<'k>,
        query: Val<'k, u32>,
        first_key: Val<'k, u32>,
        keys: u32,
    ) -> [Vec<Val<'k, u32>>; 2] {
        let bytes_of_row = self.block_kv.value() >> 3;
        let row = self.row(entry, query);
        let first = self.block_kv.split(first_key).1;
        // Of fewer keys than a word has, the word that has them.
        let (in_word, first) = if keys < 32 { (first & 31, (first >> 5) << 2) } else { (k.constant(0), first >> 3) };
        let row = row.moved(first.widen());
        [0, 8].map(|below| {
            let row = row.moved((bytes_of_row * below).widen());
            let word = |i: u32| {
                let word = k.select(entry.of_map.eq(0), 0u32, k.ld_global::<u32>(row.address(), i64::from(4 * i)));
                if keys < 32 { word.shr(in_word) } else { word }
            };
            (0..keys.div_ceil(32)).map(word).collect()
        })
    }
}

impl<'k> List<'k> {
    pub(super) fn entry(&self, k: Kernel<'k>, at: Val<'k, u32>) -> Entry<'k> {
        let (block, of_map) = k.split32(k.ld_global::<u64>(self.entries + at.widen() * ENTRY_BYTES, 0));
        Entry { block, of_map }
    }
}

impl<'k> Entry<'k> {
    /// Whether any pair of the block may be attended to.
    pub(super) fn is_attended(&self) -> Val<'k, bool> {
        self.of_map.ne(0)
    }

    /// Whether some pairs of the block may not be attended to.
    pub(super) fn is_in_part(&self) -> Val<'k, bool> {
        self.of_map.signed().ge(0)
    }
}

/// Bits of two keys, by query.
#[derive(Clone, Copy)]
pub(super) struct Columns<'k> {
    row: Pointer<'k>,
    bytes_of_row: Val<'k, u32>,
    /// The place of the first key's bit in a word.
    key: Val<'k, u32>,
    /// Whether the block is left out.
    is_out: Val<'k, bool>,
}

impl<'k> Columns<'k> {
    /// Whether the keys are not attended to from the query so many behind the first.
    pub(super) fn are_hidden(&self, k: Kernel<'k>, query: u32) -> [Val<'k, bool>; 2] {
        let word = k.ld_global::<u32>(self.row.moved((self.bytes_of_row * query).widen()).address(), 0);
        let word = k.select(self.is_out, 0u32, word).shr(self.key);
        [0, 8].map(|bit| (word & (1 << bit)).eq(0))
    }
}

#[cfg(test)]
mod tests {
    use verdigris_kir::interp::{self, Kernels, Memory, Options};
    use verdigris_kir::program::Address;

    use super::*;

    /// Two batches of four heads, two and two of which share an order: 37 rows of three tiles, the last of which has one; lists of 1 to 9 blocks, many of one length.
    #[test]
    fn tiles_of_long_lists_are_first_and_each_stands_once() {
        let [batches, orders, members, rows, tiles, of_row] = [2usize, 2, 2, 37, 109, 3];
        let counts: Vec<u32> = (0..batches * orders * members * rows).map(|list| (list * 7919 % 97 % 9 + 1) as u32).collect();
        let mut wanted = Vec::new();
        for order in 0..batches * orders {
            let length = |row: usize| (0..members).map(|head| counts[(order * members + head) * rows + row]).sum::<u32>();
            let mut own: Vec<usize> = (0..tiles).rev().collect();
            own.sort_by_key(|tile| std::cmp::Reverse(length(tile / of_row)));
            assert!(length(own[0] / of_row) > length(own[tiles - 1] / of_row), "lists of one length show no order");
            wanted.extend(own.into_iter().map(|tile| tile as u32));
        }
        let bytes = |numbers: &[u32]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
        let mut memory = Memory::new();
        memory.add(&bytes(&counts));
        memory.add(&vec![0xA5; 4 * wanted.len()]);
        let args = RankingArgs {
            counts: Address::buffer(0),
            ranked: Address::buffer(1),
            all: (batches * orders * rows) as u32,
            rows: rows as u32,
            orders: orders as u32,
            strides: [orders * members * rows, members * rows].map(|lists| lists as u32),
            heads: members as u32,
            tiles: tiles as u32,
            of_row: of_row as u32,
        };
        let mut program = Program { buffer_alignment_bytes: vec![4; 2], ..Program::default() };
        program.launch(Launch::new(ranking(), [args.all.div_ceil(WARPS), 1, 1], args.bound(&())));
        if let Err(findings) = interp::run(&program, &Kernels::new(), &mut memory, &Options::schedule(3)) {
            panic!("{findings}");
        }
        assert_eq!(memory.to_vec(1), bytes(&wanted));
    }
}
