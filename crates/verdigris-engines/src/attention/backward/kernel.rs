//! The main kernel: the gradients of one block of keys and of its values a CTA, and its share of the gradient of the queries.
//!
//! The products stand transposed, keys as rows: `Sᵀ = K·Qᵀ` and `dPᵀ = V·dOᵀ`, so that `Pᵀ` and `dSᵀ` are A operands in registers for `dV += Pᵀ·dO` and
//! `dK += dSᵀ·Q`. dS alone goes through shared memory, transposed on the way, for `dQ = dS·K`, which a warp of its own adds to memory in f32. One copy of
//! K, Q and dO serves two products each, read once along the head and once across. All heads of queries that share the keys are gone through by one CTA, so
//! that `dK` and `dV` are whole in registers.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use verdigris_kir::face::{Kernel, Role, Val, Var, WgmmaA};
use verdigris_kir::inst::{Atomic, BulkReduce, Cache, Fence, Order as MemoryOrder, Scope};
use verdigris_kir::ir::{Access, Ty};
use verdigris_kir::params::{AtExecution, Map, Read, ReadWrite};
use verdigris_kir::tile::fragment::Fragment;
use verdigris_kir::tile::staging::{STAGE_BYTES, Staging};

use super::super::blocks::{Entry, ListedArgs};
use super::super::dropout::{DropoutArgs, HeadDraws, KeptQueries};
use super::super::function::FunctionArgs;
use super::super::order::{OrderArgs, Place};
use super::super::ragged::{RowsOut, RowsOutArgs};
use super::super::score_mod::{KeyRows, ScoreModArgs, elements};
use super::super::sequences::{Own, SequencesArgs};
use super::super::tile::{HeadTile, PANEL, descriptor};
use super::kept::{Kept, Operand};
use super::slots::Slots;
use super::spec::{
    BOTH, CONSUMERS, Mask, NUMBERS_BYTES, OWN_KEYS, QUERIES, ROOM, SENDER_BARRIERS, STAGING, Spec, WRITTEN, own_columns, piece_bytes,
    values_of,
};
use crate::hopper::WARPGROUP;

/// A consumer and the warp that sends its piece, or keeps its order.
pub(super) const SENDER_AND_CONSUMER: u32 = WARPGROUP + 32;
/// A number of a query from which no key is attended.
pub(super) const NEVER: i32 = 1 << 30;

verdigris_kir::parameters! {
    /// Maps are `{elements, rows, heads, batch}`.
    pub(super) struct Params / ParamsArgs of Spec as spec {
        pub(super) q: Map = spec.query_tile().map(Access::Read),
        pub(super) k: Map = spec.key_tile().map(Access::Read),
        pub(super) v: Map = spec.value_tile().map(Access::Read),
        pub(super) d_o: Map = spec.result_tile().map(Access::Read),
        pub(super) dk: Map = spec.gradient_map(),
        pub(super) dv: Map = spec.gradient_map(),
        /// Whether the two are written.
        pub(super) has_dk: u32,
        pub(super) has_dv: u32,
        /// Two numbers of each query, f32, `[batch][head][block of queries]`.
        pub(super) lse_log2: Read = 16,
        pub(super) delta: Read = 16,
        /// The gradient of the queries, f32, added to: two pieces for each block.
        pub(super) dq: ReadWrite = 16,
        pub(super) keys: u32,
        pub(super) query_blocks: u32,
        pub(super) scale: AtExecution<f32> = (),
        /// Where scores are products.
        pub(super) scale_log2: f32,
        /// Heads of keys, and blocks of them.
        pub(super) order: OrderArgs = (),
        /// Heads of queries that share one of keys.
        pub(super) group: u32,
        pub(super) heads: u32,
        pub(super) band: Option<BandArgs> = (spec.mask == Mask::Band && !spec.ragged).then_some(()),
        pub(super) turns: Option<TurnsArgs> = spec.in_order.then_some(()),
        pub(super) score_mod: Option<ModArgs> = spec.score_mod.then_some(()),
        pub(super) ragged: Option<RaggedArgs> = spec.ragged.then_some(()),
        pub(super) dropout: Option<DropoutArgs> = spec.dropout.then_some(()),
        pub(super) listed: Option<ListedArgs> = spec.listed.then_some(()),
        pub(super) function: Option<FunctionArgs> = (!spec.function.is_empty()).then(|| spec.function.clone()),
    }
}

verdigris_kir::parameters! {
    /// Batches with numbers of queries and keys of their own.
    pub(super) struct Ragged / RaggedArgs of () as _spec {
        pub(super) sequences: SequencesArgs = (),
        /// Gradients of keys and of values, where a sequence ends; and bytes from one batch of the tensors to the next.
        pub(super) dk: RowsOutArgs = (),
        pub(super) dv: RowsOutArgs = (),
        pub(super) batch_bytes: [u64; 2],
    }
}

verdigris_kir::parameters! {
    /// Query `i` attends to keys from `i + before` to below `i + behind`.
    pub(super) struct Band / #[derive(Clone, Copy, Debug)] BandArgs of () as _spec {
        pub(super) before: i32,
        pub(super) behind: i32,
        /// Those of the last block beyond these attend to nothing: the diagonal would lead them to keys that no query attends to, which may be no numbers.
        pub(super) queries: i32,
    }
}

verdigris_kir::parameters! {
    /// What stands between the products, with the numbers that it needs.
    pub(super) struct Mod / #[derive(Clone, Copy, Debug)] ModArgs of () as _spec {
        pub(super) of: ScoreModArgs = (),
        pub(super) last_query: u32,
        pub(super) last_key: u32,
        /// From a query to its diagonal's key.
        pub(super) shift: i32,
    }
}

verdigris_kir::parameters! {
    /// The order in which CTAs add to a block of queries: the last keys first. Zeroed before the launch.
    pub(super) struct Turns / TurnsArgs of () as _spec {
        /// The next CTA's number. Those with smaller numbers have begun, and none waits for a larger one.
        pub(super) next: ReadWrite = 4,
        /// CTAs that have added, for each block of queries of each head.
        pub(super) added: ReadWrite = 4,
        /// Blocks of keys.
        pub(super) key_blocks: u32,
    }
}

/// The part of the work that all roles know.
pub(super) struct Tile<'k> {
    pub(super) place: Place<'k>,
    /// Heads of queries of the batches in front, and the first of those that share the keys.
    batch_heads: Val<'k, u32>,
    pub(super) first_head: Val<'k, u32>,
    query_blocks: Val<'k, u32>,
    pub(super) first_key: Val<'k, u32>,
    /// Keys of the batch.
    pub(super) keys: Val<'k, u32>,
    pub(super) reach: Option<Reach<'k>>,
    /// Of batches with numbers of their own, those.
    pub(super) own: Option<Own<'k>>,
    /// Blocks of queries, from `first` on and below `end`, at least one; between `first_whole` and `end_whole`, nothing is masked.
    pub(super) first: Val<'k, u32>,
    pub(super) end: Val<'k, u32>,
    pub(super) first_whole: Val<'k, u32>,
    pub(super) end_whole: Val<'k, u32>,
    /// Blocks below this one attend to none of the keys.
    pub(super) first_attending: Val<'k, u32>,
    pub(super) end_attending: Val<'k, u32>,
    is_listed: bool,
}

/// Query `i` of the batch attends to keys from `i + before` to below `i + behind`; those from `queries` on to none.
#[derive(Clone, Copy)]
pub(super) struct Reach<'k> {
    pub(super) before: Val<'k, i32>,
    pub(super) behind: Val<'k, i32>,
    pub(super) queries: Val<'k, i32>,
}

/// One of the heads of queries that share the keys, where something depends on which.
struct Member<'k> {
    head: Option<Val<'k, u32>>,
    draws: Option<HeadDraws<'k>>,
}

/// Pieces of a consumer in shared memory: one is written while memory reads the other.
const PIECES: u32 = 2;

/// Threads of a CTA.
pub(super) const THREADS: u32 = WARPGROUP * (1 + CONSUMERS);

/// The first thread that multiplies, and how many do.
pub(super) const CONSUMER_THREADS: [u32; 2] = [WARPGROUP, CONSUMERS * WARPGROUP];

/// What either consumer has written to shared memory is seen by the products of both.
pub(super) fn meet(k: Kernel<'_>) {
    k.fence_proxy_async();
    k.barrier_sync(BOTH, CONSUMERS * WARPGROUP);
}

impl<'k> Tile<'k> {
    /// This CTA's: all threads call it. It ends where none of a sequence's keys that count are of this block.
    pub(super) fn of_cta(k: Kernel<'k>, spec: &Spec, params: &Params<'k>, slots: &Slots<'k>) -> Self {
        let keys = spec.keys();
        let block_log2 = QUERIES.trailing_zeros();
        let number = match &params.turns {
            None => k.cta(),
            Some(turns) => {
                k.when(k.thread().eq(0), || {
                    let number = k.atom_global(Atomic::Add, turns.next.address(), 0, 1u32, MemoryOrder::Relaxed(Scope::Gpu));
                    k.st_shared(slots.tile.address(), 0, number);
                });
                k.bar_sync();
                k.uniform(k.ld_shared::<u32>(slots.tile.address(), 0))
            }
        };
        let place = params.order.place(k, number);
        // The first keys have the most queries where there is a diagonal, and are first; but in order, whoever is first has nobody to wait for.
        let place = if spec.in_order { place } else { Place { row: params.order.rows - 1 - place.row, ..place } };
        let place = match &params.listed {
            None => place,
            Some(listed) => Place { row: listed.tile(k, [place.batch, place.head, place.row]), ..place },
        };
        let first_key = place.row * keys;
        let own = params.ragged.as_ref().map(|ragged| ragged.sequences.of_batch(k, place.batch));
        if let Some((own, ragged)) = own.as_ref().zip(params.ragged.as_ref()) {
            let is_beyond = first_key.ge(own.keys.count);
            k.when(is_beyond, || ragged.clear(k, own, place.head, [params.has_dk, params.has_dv], [first_key, k.constant(keys)]));
            k.stop_when(is_beyond);
        }
        let (query_blocks, all_keys) = own.map_or((params.query_blocks, params.keys), |own| (own.blocks, own.keys.count));
        let reach = match (&own, &params.band) {
            (None, None) => None,
            (None, Some(band)) => Some(Reach { before: band.before, behind: band.behind, queries: band.queries }),
            (Some(own), _) => Some(Reach { before: own.before, behind: own.behind, queries: own.queries.count.signed() }),
        };
        // Blocks of queries by the first and the last key of this block.
        let batch_heads = place.batch * params.heads;
        let first_head = place.head * params.group;
        {
            let zero = k.constant(0u32);
            // Rows of keys beyond the last are masked in each block.
            let is_ragged = (first_key + keys).gt(all_keys);
            let (first, end, [first_whole, end_whole], [first_attending, end_attending]) = match &reach {
                None => {
                    let first_whole = k.select(is_ragged, query_blocks, 0u32);
                    (zero, query_blocks, [first_whole, query_blocks], [zero, query_blocks])
                }
                Some(reach_of_query) => {
                    // The first query that attends to a key, and the one behind the last.
                    let from = |key: Val<'k, u32>| (key.signed() - reach_of_query.behind + 1).max(0).unsigned();
                    let until = |key: Val<'k, u32>| (key.signed() - reach_of_query.before + 1).max(0).unsigned();
                    let (first, last) = (first_key, first_key + (keys - 1));
                    let up = |query: Val<'k, u32>| (query + (QUERIES - 1)) >> block_log2;
                    let first_attending = from(first) >> block_log2;
                    let end_attending = up(until(last)).min(query_blocks);
                    // A sequence without queries has one block of none: keys get the gradient 0 from it.
                    let last_turn = if own.is_some() { query_blocks.max(1) } else { query_blocks } - 1;
                    let first_turn = first_attending.min(last_turn);
                    let end = end_attending.max(first_turn + 1);
                    let first_whole = k.select(is_ragged, end, up(from(last)).max(first_turn).min(end));
                    let end_whole = (until(first) >> block_log2).min(end);
                    // What is behind a sequence's last query is the next one's, and masked turns alone clear it.
                    let end_whole = own.map_or(end_whole, |own| end_whole.min(own.queries.count >> block_log2));
                    (first_turn, end, [first_whole, end_whole], [first_attending, end_attending])
                }
            };
            Tile {
                place,
                batch_heads,
                first_head,
                query_blocks,
                first_key,
                keys: all_keys,
                reach,
                own,
                first,
                end,
                first_whole,
                end_whole,
                first_attending,
                end_attending,
                is_listed: params.listed.is_some(),
            }
        }
    }

    /// Runs `body` for each block of queries of a head that the tile goes through, and its entry, where they are listed.
    #[track_caller]
    pub(super) fn each_block(
        &self,
        k: Kernel<'k>,
        params: &Params<'k>,
        head: Val<'k, u32>,
        body: impl Fn(Val<'k, u32>, Option<Entry<'k>>),
    ) {
        let Some(listed) = &params.listed else { return k.range_step(self.first, self.end, 1, |block| body(block, None)) };
        let list = listed.of_keys(k, [self.place.batch, head, self.first_key]);
        k.range(list.count, |at| {
            let entry = list.entry(k, at);
            body(entry.block, Some(entry));
        });
    }

    /// Of all blocks of queries of all heads.
    pub(super) fn block_number(&self, params: &Params<'k>, head: Val<'k, u32>, block: Val<'k, u32>) -> Val<'k, u32> {
        match (&self.own, &params.ragged) {
            (Some(own), Some(ragged)) => ragged.sequences.block_number(own, head, block),
            _ => (self.batch_heads + head) * self.query_blocks + block,
        }
    }

    /// The row of the tensors that has a query of this batch, and the one that has a key.
    pub(super) fn query_row(&self, query: Val<'k, u32>) -> Val<'k, u32> {
        self.own.map_or(query, |own| own.queries.begin + query)
    }

    pub(super) fn key_row(&self, key: Val<'k, u32>) -> Val<'k, u32> {
        self.own.map_or(key, |own| own.keys.begin + key)
    }

    /// The batch of the tensors.
    pub(super) fn map_batch(&self) -> Val<'k, u32> {
        self.own.map_or(self.place.batch, |own| own.batch)
    }

    /// Whether the keys have a share in the gradient of a block of queries. Of listed blocks each counts as one, be it 0: senders count on a reduction in each turn
    /// but the first.
    pub(super) fn adds(&self, block: Val<'k, u32>) -> Val<'k, bool> {
        if self.is_listed {
            return block.kernel().constant(true);
        }
        block.ge(self.first_attending) & block.lt(self.end_attending)
    }
}

impl<'k> Ragged<'k> {
    /// Gradients of keys and of values of a batch.
    pub(super) fn of_batch(&self, own: &Own<'k>) -> [RowsOut<'k>; 2] {
        let [of_keys, of_values] = self.batch_bytes.map(|bytes| own.batch.widen() * bytes);
        [self.dk.moved(of_keys), self.dv.moved(of_values)]
    }

    /// The gradient 0 of those of `count` keys from `first` on that the batch has, of which none counts. All threads call it.
    #[track_caller]
    fn clear(&self, k: Kernel<'k>, own: &Own<'k>, head: Val<'k, u32>, has: [Val<'k, u32>; 2], [first, count]: [Val<'k, u32>; 2]) {
        let count = (own.rows[1].max(first) - first).min(count);
        for (rows_out, has) in self.of_batch(own).iter().zip(has) {
            k.when(has.ne(0), || rows_out.clear(k, [head, own.keys.begin + first, count], THREADS));
        }
    }
}

impl<'k> Turns<'k> {
    /// Waits, by one thread, until those with later keys have added to a block of queries, of which so many have counted at `at`.
    pub(super) fn wait(&self, k: Kernel<'k>, spec: &Spec, tile: &Tile<'k>, block: Val<'k, u32>, at: Val<'k, u64>) {
        let last = match &tile.reach {
            None => self.key_blocks - 1,
            Some(reach) => {
                let last_query = (block * QUERIES + (QUERIES - 1)).signed();
                let until = (last_query + reach.behind).max(1).min(tile.keys.signed());
                ((until - 1).unsigned() >> spec.keys().trailing_zeros()).min(self.key_blocks - 1)
            }
        };
        let before = last - tile.place.row;
        k.repeat_until(|| {
            let added = k.ld_global_with::<u32>(at, 0, MemoryOrder::Acquire(Scope::Gpu), Cache::Default);
            added.ge(before)
        });
    }
}

pub(super) fn backward<'k>(k: Kernel<'k>, spec: &Spec) {
    if spec.score_mod && spec.head == 128 {
        // Both gradients fill 128 registers of each thread; what a turn holds across its products goes to local memory, once a turn.
        k.allow_spills(64);
    }
    let params = Params::declare(k, spec);
    let (scale, scale_log2) = (params.scale, params.scale_log2);
    let (key_tile, query_tile) = (spec.key_tile(), spec.query_tile());
    let block_log2 = QUERIES.trailing_zeros();
    let piece_bytes = piece_bytes(spec.head);

    let slots = Slots::new(k, spec);
    // dS, two turns deep; at the end the same stages carry dK and dV out.
    let ds = Staging::new(k, CONSUMERS, 2, STAGING);
    let dq_slots = k.shared("gradients of queries", CONSUMERS * PIECES * piece_bytes, 128);
    slots.start(k, &params);
    let tile = Tile::of_cta(k, spec, &params, &slots);
    let Slots { keys: k_slot, values: v_slot, queries: q_slots, d_o: d_o_slots, lse: lse_slots, delta: delta_slots, .. } = slots;
    let (q_ring, d_o_ring) = (slots.q_ring, slots.d_o_ring);
    let (place, first_head) = (tile.place, tile.first_head);

    let load = || slots.load(k, spec, &params, &tile);

    let send = |sender: u32| {
        let leader = k.lane().eq(0);
        let turn_parity = k.var_named("turn parity", 0u32);
        let barriers = sender * SENDER_BARRIERS;
        let send_turn = |head: Val<'k, u32>, block: Val<'k, u32>| {
            for warpgroup in 0..CONSUMERS {
                // Of the reductions on their way, those of the turn before and the other consumer's may go on reading.
                k.when(leader, || k.bulk_wait_read(if spec.in_order { 0 } else { PIECES * CONSUMERS - 1 - warpgroup }));
                k.warp_sync();
                k.barrier_arrive(ROOM + barriers + warpgroup, SENDER_AND_CONSUMER);
            }
            let adds = tile.adds(block);
            if let Some(turns) = &params.turns {
                // Those with later keys have added before.
                k.when(leader & adds, || {
                    turns.wait(k, spec, &tile, block, turns.added.at(tile.block_number(&params, head, block), 4));
                    k.fence(Fence::ProxyAsync);
                });
            }
            for warpgroup in 0..CONSUMERS {
                k.warp_sync();
                k.barrier_sync(WRITTEN + barriers + warpgroup, SENDER_AND_CONSUMER);
                k.when(leader & adds, || {
                    let to = params.dq.at(tile.block_number(&params, head, block) * CONSUMERS + warpgroup, piece_bytes);
                    k.bulk_reduce(
                        BulkReduce::Add,
                        Ty::F32,
                        to,
                        dq_slots.address() + (turn_parity + warpgroup * PIECES) * piece_bytes,
                        piece_bytes,
                    );
                    k.bulk_commit();
                });
            }
            if let Some(turns) = &params.turns {
                k.when(leader & adds, || {
                    k.bulk_wait(0);
                    k.fence(Fence::ProxyAsync);
                    let at = turns.added.at(tile.block_number(&params, head, block), 4);
                    k.red_global(Atomic::Add, at, 0, &[k.constant(1u32)], MemoryOrder::Release(Scope::Gpu));
                });
            }
        };
        k.range(params.group, |member| {
            let head = first_head + member;
            tile.each_block(k, &params, head, |block, _| {
                if spec.in_order {
                    k.when(turn_parity.eq(sender), || send_turn(head, block));
                } else {
                    send_turn(head, block);
                }
                turn_parity.set(turn_parity ^ 1);
            });
        });
        k.when(leader, || k.bulk_wait(0));
    };

    let differentiate = || {
        let thread = k.thread() & (WARPGROUP - 1);
        let warpgroup = k.uniform(k.thread() >> 7) - 1;
        let s = Fragment::<f32>::unset(k, QUERIES);
        let dp = Fragment::<f32>::unset(k, QUERIES);
        let dk = Fragment::<f32>::unset(k, spec.head);
        let dv = Fragment::<f32>::unset(k, spec.head);
        let dq = own_columns(k, spec.head);
        // dS of one consumer's keys: 64 queries, whose depth is the keys.
        let ds_tile = HeadTile { rows: QUERIES, elements: PANEL, ty: spec.ty.map() };
        let zero = k.constant(0u32);
        let k_low = key_tile.along(k_slot.address(), warpgroup * OWN_KEYS);
        let v_low = key_tile.along(v_slot.address(), warpgroup * OWN_KEYS);
        // This consumer's elements, a part of them at a time.
        let k_across = key_tile.across(k_slot.address());
        let k_across_low: Vec<_> = dq.iter().map(|(part, _)| k_across + warpgroup * key_tile.across_elements(part.of_consumer)).collect();
        let (q_low, d_o_low) = (query_tile.along(q_slots.address(), zero), query_tile.along(d_o_slots.address(), zero));
        let (q_across_low, d_o_across_low) = (query_tile.across(q_slots.address()), query_tile.across(d_o_slots.address()));
        // All queries of a turn; where the keys are in registers, this consumer's half of them.
        let first_query = if spec.keeps_keys() { warpgroup * (QUERIES / CONSUMERS) } else { zero };
        let ds_low = ds_tile.along(ds.stage(zero, 0), first_query);
        let (q_cursor, d_o_cursor) = (q_ring.cursor(), d_o_ring.cursor());
        let column = Fragment::<f32>::column(thread);
        // Whether dK and dV have been begun.
        let begun = k.var_named("begun", 0u32);
        let turn_parity = k.var_named("turn parity", 0u32);
        // This consumer's barrier with whoever sends a turn's piece.
        let of_sender = |first: u32| {
            let own = warpgroup + first;
            if spec.in_order { own + turn_parity * SENDER_BARRIERS } else { own }
        };

        // Of a row's key: the first query that attends to it, and the one behind the last.
        let limits = [0, 8].map(|below| {
            let key = tile.first_key + warpgroup * OWN_KEYS + Fragment::<f32>::row(thread) + below;
            let (from, until) = match &tile.reach {
                None => (k.constant(0i32), k.constant(NEVER)),
                Some(reach) => (key.signed() - reach.behind + 1, (key.signed() - reach.before + 1).min(reach.queries)),
            };
            (k.select(key.lt(tile.keys), from, NEVER) - column.signed(), until - column.signed())
        });

        // The first queries bring the keys, and the first gradients of results the values.
        q_cursor.wait();
        slots.clear_keys(k, spec, &tile);
        let kept = spec.keeps_keys().then(|| {
            d_o_cursor.wait();
            Kept::load(k, spec, [k_slot.address(), v_slot.address()], warpgroup, thread)
        });
        // Keys by queries, both along the head.
        let multiply_transposed = |operand: Operand, d: &Fragment<'k, f32>, keys: Val<'k, u32>, queries: Val<'k, u32>| {
            k.wgmma_fence();
            for step in 0..spec.head / 16 {
                let b = descriptor(queries + query_tile.along_steps(step));
                match &kept {
                    Some(kept) => {
                        k.wgmma(spec.kept_shape(QUERIES), d.registers(), WgmmaA::Registers(&kept.of(operand)[step as usize]), b, step > 0)
                    }
                    None => {
                        let a = descriptor(keys + key_tile.along_steps(step));
                        k.wgmma(spec.transposed_shape(QUERIES), d.registers(), WgmmaA::Shared(a), b, step > 0);
                    }
                }
            }
            k.wgmma_commit();
        };
        // Registers by queries across.
        let add_keys = |d: &Fragment<'k, f32>, a: &[[Val<'k, u32>; 4]], queries: Val<'k, u32>| {
            k.wgmma_fence();
            let adds = begun.ne(0);
            for (step, a) in (0..).zip(a) {
                let b = descriptor(queries + query_tile.across_steps(step));
                let adds = if step == 0 { adds } else { k.constant(true) };
                k.wgmma(spec.key_shape(), d.registers(), WgmmaA::Registers(a), b, adds);
            }
            k.wgmma_commit();
        };
        let packed = |fragment: &Fragment<'k, f32>| -> Vec<[Val<'k, u32>; 4]> {
            (0..QUERIES / 16).map(|step| fragment.pack_a(step, spec.ty.packed())).collect()
        };
        // One number for each query: a column of the transposed products.
        let queries_numbers = |slot: Val<'k, u32>, part: u32| k.ld_shared_vector::<f32>(slot + (column << 2), i64::from(32 * part), 2);

        let bends: Vec<Var<'k, f32>> = if spec.score_mod { (0..4).map(|_| k.var_unset(Some("bend"))).collect() } else { vec![] };

        // Of scores that are made of products, the probabilities of a turn as they meet the gradients of results.
        let packed_registers = if spec.score_mod { QUERIES / 4 } else { 0 };
        let probabilities: Vec<Var<'k, u32>> = (0..packed_registers).map(|_| k.var_unset(Some("p"))).collect();

        let own_key = || tile.first_key + warpgroup * OWN_KEYS + Fragment::<f32>::row(thread);
        let dropping = params.dropout.as_ref().map(|dropout| (dropout.single_factor(), KeptQueries::new(k)));
        let state = params.dropout.as_ref().map(|dropout| dropout.state(k));
        // Which pairs of a block are kept. A turn draws those of the next one while its gradients are multiplied: registers of scores are free then, and nothing
        // waits for it.
        let draw = |draws: Option<&HeadDraws<'k>>, block: Val<'k, u32>| {
            if let Some((draws, (_, kept))) = draws.zip(dropping.as_ref()) {
                draws.draw(kept, own_key(), [block << block_log2, column], QUERIES);
            }
        };

        // The head is that of the queries, where something between the products depends on it.
        let turn = |of: &Member<'k>, block: Val<'k, u32>, entry: Option<Entry<'k>>, masked: bool, mods: Option<&Mod<'k>>| {
            q_cursor.wait();
            if masked {
                slots.clear_queries(k, spec, &tile, block, [&q_cursor, &d_o_cursor]);
            }
            let q_stage = q_cursor.stage();
            // The numbers of all queries at once, where registers are left for them: those of the scores are there before the scores are.
            let all_numbers = |slot: Val<'k, u32>| -> Vec<Vec<Val<'k, f32>>> {
                let parts = if mods.is_none() { QUERIES / 8 } else { 0 };
                (0..parts).map(|part| queries_numbers(slot, part)).collect()
            };
            let of_queries = |numbers: &[Vec<Val<'k, f32>>], slot: Val<'k, u32>, part: u32| {
                numbers.get(part as usize).cloned().unwrap_or_else(|| queries_numbers(slot, part))
            };
            let lse_slot = lse_slots.address() + q_stage * NUMBERS_BYTES;
            let all_lse = all_numbers(lse_slot);
            multiply_transposed(Operand::Keys, &s, k_low, q_low + query_tile.slots(q_stage));
            d_o_cursor.wait();
            let d_o_stage = d_o_cursor.stage();
            let delta_slot = delta_slots.address() + d_o_stage * NUMBERS_BYTES;
            multiply_transposed(Operand::Values, &dp, v_low, d_o_low + query_tile.slots(d_o_stage));

            let first_query = (block << block_log2).signed();
            let own = limits.map(|(from, until)| (from - first_query, until - first_query));
            let is_outside = |part: u32, half: u32, odd: u32| {
                let (from, until) = own[half as usize];
                let query = (8 * part + odd) as i32;
                let outside = from.gt(query);
                if spec.mask == Mask::Band { outside | until.le(query) } else { outside }
            };
            k.wgmma_wait(1);
            // Whether a block has a cap alone between its products and its probabilities, and no mask.
            let is_capped = |score_mod: &Mod<'k>| {
                let is_whole = block.ge(tile.first_whole) & block.lt(tile.end_whole);
                let is_listed_whole = entry.map(|entry| !entry.is_in_part());
                score_mod.of.is_cap_alone() & is_listed_whole.map_or(is_whole, |listed| is_whole & listed)
            };
            // Of some blocks of 8 queries, what becomes of the pairs that the bits of a block leave out.
            let hide = |parts: Range<u32>, hidden: &dyn Fn(u32, u32, u32, Val<'k, bool>)| {
                let (Some(listed), Some(entry)) = (&params.listed, entry) else { return };
                k.when(entry.is_in_part(), || {
                    let columns = listed.masks.columns(entry, first_query.unsigned() + column, own_key());
                    for (part, odd) in parts.clone().flat_map(|part| [(part, 0), (part, 1)]) {
                        (0..).zip(columns.are_hidden(k, 8 * part + odd)).for_each(|(half, is_hidden)| hidden(part, half, odd, is_hidden));
                    }
                });
            };
            // Probabilities of one block of 8 queries, of scores with this factor.
            let exponentiate = |part: u32, factor: Val<'k, f32>, masked: bool| {
                let lse = of_queries(&all_lse, lse_slot, part);
                for (half, odd) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                    let element = s.element(part, half, odd);
                    let p = k.fma(element, factor, -lse[odd as usize]).exp2();
                    element.set(if masked { k.select(is_outside(part, half, odd), 0.0, p) } else { p });
                }
            };
            // What is left of a value: that of a pair that is dropped is 0.
            let left = |part: u32, half: u32, odd: u32, value: Val<'k, f32>| match &dropping {
                None => value,
                Some((_, kept)) => kept.of(part, half, odd, value),
            };
            // The probabilities of a block of 8 queries, as they meet the gradients of results.
            let packed_part = |part: u32| {
                [0, 1].map(|half| {
                    let [low, high] = [0, 1].map(|odd| left(part, half, odd, s.element(part, half, odd).get()));
                    k.pack::<u32>(spec.ty.packed(), low, high)
                })
            };
            let p: Vec<[Val<'k, u32>; 4]> = match mods.zip(of.head) {
                None => {
                    (0..QUERIES / 8).for_each(|part| exponentiate(part, scale_log2, masked));
                    hide(0..QUERIES / 8, &|part, half, odd, is_hidden| {
                        let element = s.element(part, half, odd);
                        element.set(k.select(is_hidden, 0.0, element));
                    });
                    let of_step = |step: u32| {
                        let ([a, b], [c, d]) = (packed_part(2 * step), packed_part(2 * step + 1));
                        [a, b, c, d]
                    };
                    (0..QUERIES / 16).map(of_step).collect()
                }
                Some((score_mod, head)) => {
                    // Anew in each turn: registers are short, and what these hold is made with a few instructions.
                    let of_head = &score_mod.of.of_head(k, place.batch, head);
                    let own_key = own_key();
                    let places = KeyRows {
                        keys: [0, 8].map(|below| (own_key + below).min(score_mod.last_key)),
                        first_query: first_query.unsigned() + column,
                        last_query: score_mod.last_query,
                        shift: tile.own.map_or(score_mod.shift, |own| own.shift),
                    };
                    // A few at a time, for registers are short: the probabilities of a part are packed before they get the slope of the cap.
                    let of_part = |part: u32| {
                        let own = elements(&s, part..part + 1);
                        score_mod.of.apply(k, spec.ty, of_head, &own, &places, &bends);
                        hide(part..part + 1, &|_, half, odd, is_hidden| {
                            let (element, bend) = (&own[(2 * half + odd) as usize].0, &bends[(2 * half + odd) as usize]);
                            element.set(k.select(is_hidden, f32::NEG_INFINITY, *element));
                            bend.set(k.select(is_hidden, 0.0, *bend));
                        });
                        exponentiate(part, k.constant(LOG2_E), true);
                        let packed = packed_part(part);
                        for ((element, ..), bend) in own.iter().zip(&bends) {
                            element.set(*element * *bend);
                        }
                        packed
                    };
                    // Under a cap alone, without branches between one part and the next.
                    let of_capped_part = |part: u32| {
                        let cap = score_mod.of.soft_cap();
                        let own = elements(&s, part..part + 1);
                        let slopes: Vec<_> = own
                            .iter()
                            .map(|(element, ..)| {
                                let capped = cap.of(k, element.get());
                                element.set(capped.score);
                                capped.slope(k)
                            })
                            .collect();
                        exponentiate(part, k.constant(LOG2_E), false);
                        let packed = packed_part(part);
                        for ((element, ..), slope) in own.iter().zip(slopes) {
                            element.set(*element * slope);
                        }
                        packed
                    };
                    // The caller's function, and its slope, which of a score of −∞ may be anything.
                    let of_function_part = |part: u32| {
                        let function = params.function.as_ref().expect("a kernel with a function has its numbers");
                        let of_function = function.of_head(&spec.function, place.batch, head);
                        let mask = score_mod.of.mask_of_head(place.batch, head);
                        let own = elements(&s, part..part + 1);
                        of_function.apply_sloped(k, score_mod.of.factor, &own, &places, (spec.score, &bends));
                        score_mod.of.hide(k, mask, &own, &places);
                        hide(part..part + 1, &|_, half, odd, is_hidden| {
                            let element = &own[(2 * half + odd) as usize].0;
                            element.set(k.select(is_hidden, f32::NEG_INFINITY, *element));
                        });
                        for ((element, ..), slope) in own.iter().zip(&bends) {
                            slope.set(k.select(element.eq(f32::NEG_INFINITY), 0.0, *slope));
                        }
                        exponentiate(part, k.constant(LOG2_E), true);
                        let of_values = packed_part(part);
                        for ((element, ..), slope) in own.iter().zip(&bends) {
                            element.set(*element * *slope);
                        }
                        of_values
                    };
                    let each = |of_part: &dyn Fn(u32) -> [Val<'k, u32>; 2]| {
                        (0..)
                            .zip(probabilities.chunks(2))
                            .for_each(|(part, two)| two.iter().zip(of_part(part)).for_each(|(to, value)| to.set(value)));
                    };
                    match params.function {
                        None => k.when_else(is_capped(score_mod), || each(&of_capped_part), || each(&of_part)),
                        Some(_) => each(&of_function_part),
                    }
                    probabilities.chunks(4).map(|four| [0, 1, 2, 3].map(|i: usize| four[i].get())).collect()
                }
            };
            let all_delta = all_numbers(delta_slot);
            if spec.adds_values_first() {
                add_keys(&dv, &p, d_o_across_low + query_tile.slots(d_o_stage));
                k.wgmma_wait(1);
            } else {
                k.wgmma_wait(0);
            }
            let differentiate_scores = |masked: bool, hidden: bool| {
                for part in 0..QUERIES / 8 {
                    let delta = of_queries(&all_delta, delta_slot, part);
                    for (half, odd) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                        let element = dp.element(part, half, odd);
                        let weight = s.element(part, half, odd);
                        let delta = delta[odd as usize];
                        let through = match &dropping {
                            None => element - delta,
                            Some((factor, _)) => k.fma(left(part, half, odd, element.get()), *factor, -delta),
                        };
                        let ds = through * weight;
                        // Of a key that the mask leaves out, the product may be no number.
                        let ds = if hidden { k.select(weight.eq(0.0), 0.0, ds) } else { ds };
                        // What is not attended to may be no number.
                        element.set(if masked { k.select(is_outside(part, half, odd), 0.0, ds) } else { ds });
                    }
                }
            };
            match mods {
                None => differentiate_scores(masked, spec.listed),
                Some(_) if params.function.is_some() => differentiate_scores(true, true),
                Some(score_mod) => {
                    k.when_else(is_capped(score_mod), || differentiate_scores(false, false), || differentiate_scores(true, true));
                }
            }
            if !spec.adds_values_first() {
                add_keys(&dv, &p, d_o_across_low + query_tile.slots(d_o_stage));
            }

            let ds_values = packed(&dp);
            let stage = ds.stage(warpgroup, 0) + turn_parity * STAGE_BYTES;
            for (step, values) in (0..).zip(&ds_values) {
                ds.write_halves_transposed(stage, thread, step, values);
            }
            meet(k);
            k.wgmma_fence();
            for step in 0..spec.keys() / 16 {
                let consumer = (step / 4 * ds.stages() * STAGE_BYTES) >> 4;
                let of_scores = descriptor(ds_low + turn_parity * (STAGE_BYTES >> 4) + (consumer + ds_tile.along_steps(step % 4)));
                match &kept {
                    // Elements by this consumer's queries.
                    Some(kept) => {
                        let shape = spec.kept_shape(QUERIES / CONSUMERS);
                        k.wgmma(shape, dq[0].1.registers(), WgmmaA::Registers(&kept.keys_across[step as usize]), of_scores, step > 0);
                    }
                    None => {
                        for ((part, d), &low) in dq.iter().zip(&k_across_low) {
                            let b = descriptor(low + (key_tile.across_elements(part.first) + key_tile.across_steps(step)));
                            k.wgmma(spec.part_shape(*part), d.registers(), WgmmaA::Shared(of_scores), b, step > 0);
                        }
                    }
                }
            }
            k.wgmma_commit();

            k.wgmma_wait(1);
            d_o_cursor.release(d_o_stage, thread);
            d_o_cursor.advance();
            add_keys(&dk, &ds_values, q_across_low + query_tile.slots(q_stage));
            draw(of.draws.as_ref(), block + 1);
            k.wgmma_wait(1);
            k.barrier_sync(of_sender(ROOM), SENDER_AND_CONSUMER);
            let room = dq_slots.address() + (turn_parity + warpgroup * PIECES) * piece_bytes;
            if spec.keeps_keys() {
                // Queries by elements, whose eights are swapped so that a warp's stores go to all banks.
                let room = room + column * (PANEL * 4);
                for half in 0..2 {
                    let element = (Fragment::<f32>::row(thread) + 8 * half) ^ ((thread & 3) << 3);
                    for (part, odd) in (0..QUERIES / CONSUMERS / 8).flat_map(|part| [(part, 0), (part, 1)]) {
                        let at = i64::from((8 * part + odd) * PANEL * 4);
                        k.st_shared(room + (element << 2), at, dq[0].1.element(part, half, odd).get());
                    }
                }
            } else {
                let room = room + (thread << 4);
                for (i, four) in values_of(&dq).chunks(4).enumerate() {
                    k.st_shared_vector(room, i as i64 * i64::from(WARPGROUP) * 16, four);
                }
            }
            let leave = || {
                k.fence_proxy_async();
                k.barrier_arrive(of_sender(WRITTEN), SENDER_AND_CONSUMER);
            };
            // Others wait for what is added in order; elsewhere the stores land while the last product runs.
            if spec.in_order {
                leave();
            }
            k.wgmma_wait(0);
            q_cursor.release(q_stage, thread);
            q_cursor.advance();
            if !spec.in_order {
                leave();
            }
            begun.set(1u32);
            turn_parity.set(turn_parity ^ 1);
        };

        k.range(params.group, |member| {
            let head = (spec.score_mod || spec.dropout).then(|| first_head + member);
            let draws = state.zip(head).map(|(state, head)| state.of_head(k, place.batch, head));
            draw(draws.as_ref(), tile.first);
            let of = Member { head, draws };
            if spec.score_mod {
                // Beside what makes the scores, a mask costs little, and a second loop much room for instructions.
                let head = first_head + member;
                tile.each_block(k, &params, head, |block, entry| turn(&of, block, entry, true, params.score_mod.as_ref()));
                return;
            }
            if spec.listed {
                tile.each_block(k, &params, first_head + member, |block, entry| turn(&of, block, entry, true, None));
                return;
            }
            k.range_step(tile.first, tile.first_whole, 1, |block| turn(&of, block, None, true, None));
            k.range_step(tile.first_whole, tile.end_whole, 1, |block| turn(&of, block, None, false, None));
            if spec.mask == Mask::Band {
                k.range_step(tile.end_whole.max(tile.first_whole), tile.end, 1, |block| turn(&of, block, None, true, None));
            }
        });

        // The other consumer's last product may still read this one's stages.
        k.barrier_sync(BOTH, CONSUMERS * WARPGROUP);
        let row = tile.first_key + warpgroup * OWN_KEYS;
        // What is behind the last key of a sequence belongs to the next one, and of those that do not count to itself.
        let ragged = params.ragged.as_ref().zip(tile.own.as_ref()).map(|(ragged, own)| {
            let [all, counting] = [own.rows[1], own.keys.count].map(|end| (end.signed() - row.signed()).max(0).unsigned());
            (ragged.of_batch(own), [all, counting], counting.ge(OWN_KEYS))
        });
        dk.map_in_place(|value, _, _| value * scale);
        if let Some((factor, _)) = &dropping {
            dv.map_in_place(|value, _, _| value * *factor);
        }
        let results = [(&dv, &params.dv, params.has_dv), (&dk, &params.dk, params.has_dk)];
        let panels = results.into_iter().flat_map(|result| (0..key_tile.panels()).map(move |panel| (result, panel)));
        for (turn, ((result, map, is_written), panel)) in (0..).zip(panels) {
            let stage = ds.stage(warpgroup, turn % ds.stages());
            ds.acquire(warpgroup, thread, ds.stages() - 1);
            // The last panel may be half empty: nothing of the rest is written to memory.
            for pair in 0..(spec.head / 16 - 4 * panel).min(4) {
                ds.write_halves(stage, thread, pair, &result.pack_a(4 * panel + pair, spec.ty.packed()));
            }
            k.fence_proxy_async();
            k.barrier_sync(warpgroup + STAGING, WARPGROUP);
            let store_all = || {
                k.when(thread.eq(0), || {
                    k.when(is_written.ne(0), || {
                        let at = [k.constant(panel * PANEL), tile.key_row(row), place.head, tile.map_batch()].map(|at| at.signed());
                        k.tma_store(map, &at, stage);
                    });
                    k.bulk_commit();
                });
            };
            let Some(([of_keys, of_values], [all, counting], is_whole)) = &ragged else {
                store_all();
                continue;
            };
            let rows_out = if turn < key_tile.panels() { of_values } else { of_keys };
            let store_rows = || {
                k.when(is_written.ne(0), || {
                    rows_out.store(k, &ds, [stage, thread], panel, [place.head, tile.key_row(row), *all], Some(*counting));
                });
            };
            k.when_else(*is_whole, store_all, store_rows);
        }
        ds.finish(thread);
    };

    let serve = || {
        k.warp_roles(
            &[
                Role { name: "load", warps: 1, registers: None, body: &load },
                Role { name: "send", warps: 1, registers: None, body: &|| send(0) },
                // In order, a piece is on its way until it has landed, and the next one's turn comes sooner: every other turn has its own sender.
                Role { name: "send others", warps: 1, registers: None, body: &|| send(1) },
            ][..if spec.in_order { 3 } else { 2 }],
        );
    };
    k.warp_roles(&[
        Role { name: "producer", warps: 4, registers: Some(24), body: &serve },
        Role { name: "consumer", warps: 4 * CONSUMERS, registers: Some(240), body: &differentiate },
    ]);
}
