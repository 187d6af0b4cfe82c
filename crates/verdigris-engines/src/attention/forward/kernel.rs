//! The kernel: a warp brings queries, keys and values; each consumer computes 64 rows of outputs.
//!
//! Within a consumer the scores of the next block of keys are multiplied while the values of the last are added, and the softmax runs under the second
//! product. P never leaves registers: the accumulator of the first product, rounded and packed, is the A operand of the second. Consumers take turns at
//! the tensor cores, so that one's softmax runs under the others' products. Blocks that need no mask have a loop of their own.

use std::ops::Range;

use verdigris_kir::face::{Kernel, LoadOptions, Mbarrier, Role, TensorMap, Val, Var, WgmmaA};
use verdigris_kir::inst::Packed;
use verdigris_kir::ir::Access;
use verdigris_kir::params::{Divide, Map, ReadWrite};
use verdigris_kir::tile::dynamic::Handout;
use verdigris_kir::tile::fragment::Fragment;
use verdigris_kir::tile::ring::{Ring, RingScope};
use verdigris_kir::tile::staging::{STAGE_BYTES, Staging};

use super::super::band::{BandArgs, SinkArgs};
use super::super::blocks::{Entry, ListedArgs};
use super::super::descale::DescaleArgs;
use super::super::dropout::{DropoutArgs, WordsOfKeys};
use super::super::function::FunctionArgs;
use super::super::of_queries::OfQueriesArgs;
use super::super::order::OrderArgs;
use super::super::paged::PagesArgs;
use super::super::ragged::{OfKeys, OffsetsArgs, RowsOutArgs};
use super::super::score_mod::{QueryRows, ScoreModArgs, elements};
use super::super::softmax::Softmax;
use super::super::tile::{HeadTile, PANEL, descriptor};
use super::fp8;
use super::spec::{Mask, OWN_QUERIES, Spec};
use super::tiles::{Bounds, DiagonalArgs, Tiles, limits};
use crate::hopper::{WARPGROUP, roles};

verdigris_kir::parameters! {
    /// Maps are `{elements, rows, heads, batch}`, of pages `{elements, rows of a page, heads, pages}`.
    pub(super) struct Params / ParamsArgs of Spec as spec {
        pub(super) q: Map = spec.q_tile().map(Access::Read),
        pub(super) k: Map = spec.k_map(),
        pub(super) v: Map = spec.v_map(),
        pub(super) o: Map = spec.o_map(),
        /// Natural logarithms.
        pub(super) log_sum_exp: OfQueriesArgs = (),
        pub(super) max_scores: OfQueriesArgs = (),
        pub(super) queries: u32,
        pub(super) keys: u32,
        /// Blocks of keys.
        pub(super) key_blocks: u32,
        pub(super) scale: f32,
        pub(super) order: OrderArgs = (),
        /// Heads of queries that share one of keys.
        pub(super) group: Divide,
        pub(super) diagonal: Option<DiagonalArgs> = (spec.mask == Mask::Causal).then_some(()),
        pub(super) band: Option<BandArgs> = (spec.mask == Mask::Band).then_some(()),
        pub(super) sinks: Option<SinkArgs> = (spec.mask == Mask::Band).then_some(()),
        pub(super) score_mod: Option<ScoreModArgs> = spec.score_mod.then_some(()),
        /// u32, zero before the launch.
        pub(super) offsets: Option<OffsetsArgs> = spec.ragged.then_some(OfKeys::of(spec.paged)),
        /// Outputs, where a sequence ends.
        pub(super) rows_out: Option<RowsOutArgs> = spec.ragged.then_some(()),
        pub(super) next_tile: Option<ReadWrite> = spec.dynamic.then_some(4),
        pub(super) pages: Option<PagesArgs> = spec.paged.then_some(()),
        pub(super) dropout: Option<DropoutArgs> = spec.dropout.then_some(()),
        pub(super) listed: Option<ListedArgs> = spec.listed.then_some(()),
        /// The factors of queries, keys and values of 8 bits.
        pub(super) descales: Option<DescaleArgs> = spec.fp8.then_some(()),
        pub(super) function: Option<FunctionArgs> = (!spec.function.is_empty()).then(|| spec.function.clone()),
    }
}

/// Numbers of tiles that wait for consumers at a time.
const TILES_AHEAD: u32 = 2;

pub(super) fn forward<'k>(k: Kernel<'k>, spec: &Spec) {
    let params = Params::declare(k, spec);
    let (queries, keys, key_blocks, scale) = (params.queries, params.keys, params.key_blocks, params.scale);
    let (q_map, k_map, v_map, o_map) = (params.q, params.k, params.v, params.o);
    let bounds = match (params.diagonal, params.band) {
        (Some(diagonal), _) => Bounds::Diagonal(diagonal),
        (_, Some(band)) => Bounds::Band(band),
        _ => Bounds::End,
    };
    let (q_tile, k_tile, v_tile, o_tile) = (spec.q_tile(), spec.k_tile(), spec.v_tile(), spec.o_tile());
    let [turn_barrier, own_barrier, all_barrier] = spec.barriers();

    let q_slots = k.shared("queries", spec.consumers * q_tile.bytes(), 1024);
    let k_slots = k.shared("keys", spec.stages * k_tile.bytes(), 1024);
    let v_slots = k.shared("values", spec.stages * v_tile.bytes(), 1024);
    // Outputs leave through room of their own, or that of the queries that they belong to.
    let staging = match spec.output_bytes() {
        0 => Staging::within(k, q_slots, q_tile.panels(), own_barrier),
        bytes => Staging::within(k, k.shared("outputs", bytes, 1024), o_tile.panels(), own_barrier),
    };
    // Each consumer has its own stage of queries, and does not wait until others have ended the tile in front.
    let q_ring = Ring::new(k, spec.consumers, 1, RingScope::Cta);
    let k_ring = Ring::new(k, spec.stages, spec.consumers, RingScope::Cta);
    let v_ring = Ring::new(k, spec.stages, spec.consumers, RingScope::Cta);
    let handout = params.next_tile.map(|next| Handout::new(k, params.order.tiles, next, TILES_AHEAD, 4 * spec.consumers));
    let (order, group, offsets, listed) = (params.order, params.group, params.offsets, params.listed);
    let tiles = Tiles { kernel: k, spec: spec.clone(), order, group, bounds, offsets, listed, queries, keys, key_blocks, handout };
    let init = || {
        [q_ring, k_ring, v_ring].iter().for_each(|ring| ring.init());
        tiles.handout.iter().for_each(|handout| handout.init());
        [&q_map, &k_map, &v_map, &o_map].into_iter().for_each(|map| k.prefetch_tensormap(map));
    };
    roles::start(k, init, || {});

    let load = || {
        let (q_cursor, k_cursor, v_cursor) = (q_ring.cursor(), k_ring.cursor(), v_ring.cursor());
        let options = LoadOptions::default();
        k.when(k.elect(), || {
            tiles.bring_each(|tile| {
                let bring_queries = || {
                    for consumer in 0..spec.consumers {
                        let full = q_cursor.acquire(q_tile.bytes());
                        let at = [tile.query_row(tile.first_query + consumer * OWN_QUERIES), tile.head, tile.map_batch(k)];
                        q_tile.load(q_slots.address() + consumer * q_tile.bytes(), &q_map, at, full, options);
                        q_cursor.advance();
                    }
                };
                let bring_block = |turn: Val<'k, u32>| {
                    // Of paged keys the table is read at the sequence.
                    let batch = if spec.paged { tile.batch } else { tile.map_batch(k) };
                    let at = [tile.key_row(tile.block(k, tile.end_block - 1 - turn) * spec.block), tile.kv_head, batch];
                    let bring = |of: &HeadTile, slot: Val<'k, u32>, map: &TensorMap<'k>, full: Mbarrier<'k>| match &params.pages {
                        None => of.load(slot, map, at, full, options),
                        Some(pages) => pages.load(of, slot, map, at, tile.keys, full),
                    };
                    let full = k_cursor.acquire(k_tile.bytes());
                    bring(&k_tile, k_slots.address() + k_cursor.stage() * k_tile.bytes(), &k_map, full);
                    k_cursor.advance();
                    let full = v_cursor.acquire(v_tile.bytes());
                    let slot = v_slots.address() + v_cursor.stage() * v_tile.bytes();
                    match (spec.fp8, at) {
                        (true, [key, head, batch]) => v_tile.load_from(slot, &v_map, key, [head, batch], full),
                        _ => bring(&v_tile, slot, &v_map, full),
                    }
                    v_cursor.advance();
                };
                // Keys and values have free slots before those of the queries are free.
                bring_block(k.constant(0));
                bring_queries();
                k.range(tile.end_block - tile.first_block - 1, |turn| bring_block(turn + 1));
            });
        });
    };

    let attend = || {
        let thread = k.thread() & (WARPGROUP - 1);
        let warpgroup = k.uniform(k.thread() >> 7) - 1;
        let (row, column) = (Fragment::<f32>::row(thread), Fragment::<f32>::column(thread));
        let next = warpgroup + 1;
        let next = k.select(next.eq(spec.consumers), 0u32, next);
        let scores = Fragment::<f32>::unset(k, spec.block);
        let sums = Fragment::<f32>::unset(k, spec.value);
        let packed: Vec<Var<'k, u32>> = (0..spec.block / spec.step() * 4).map(|_| k.var_unset(Some("p"))).collect();
        // Scores that are made of the products have their factor.
        let softmax = Softmax::new(k, if spec.score_mod { k.constant(1.0) } else { scale });
        let q_low = q_tile.along(q_slots.address() + warpgroup * q_tile.bytes(), k.constant(0));
        let k_low = k_tile.along(k_slots.address(), k.constant(0));
        let v_low = if spec.fp8 { v_tile.along(v_slots.address(), k.constant(0)) } else { v_tile.across(v_slots.address()) };
        let (q_cursor, k_cursor, v_cursor) = (q_ring.cursor(), k_ring.cursor(), v_ring.cursor());

        q_cursor.skip(warpgroup);
        let release_queries = || {
            q_cursor.release(q_cursor.stage(), thread);
            // To the same stage of the next tile.
            (0..spec.consumers).for_each(|_| q_cursor.advance());
        };

        let multiply_keys = |stage: Val<'k, u32>| {
            let k_stage = k_low + k_tile.slots(stage);
            for step in 0..spec.head / spec.step() {
                let a = descriptor(q_low + q_tile.along_steps(step));
                let b = descriptor(k_stage + k_tile.along_steps(step));
                k.wgmma(spec.score_shape(), scores.registers(), WgmmaA::Shared(a), b, step > 0);
            }
            k.wgmma_commit();
        };
        let multiply_values = |stage: Val<'k, u32>, adds: Val<'k, bool>| {
            let v_stage = v_low + v_tile.slots(stage);
            for (step, a) in (0..).zip(packed.chunks(4)) {
                let b = descriptor(v_stage + spec.value_steps(step));
                let adds = if step == 0 { adds } else { k.constant(true) };
                k.wgmma(spec.value_shape(), sums.registers(), WgmmaA::Fragment(a), b, adds);
            }
            k.wgmma_commit();
        };
        let pack = || {
            for (step, four) in (0..).zip(packed.chunks(4)) {
                let rounded = if spec.fp8 { scores.pack_a_bytes(step, Packed::E4m3x2) } else { scores.pack_a(step, spec.ty.packed()) };
                four.iter().zip(rounded).for_each(|(register, value)| register.set(value));
            }
        };
        let begin_turn = || {
            if spec.ping_pong {
                k.barrier_sync(warpgroup + turn_barrier, 2 * WARPGROUP);
            }
        };
        let hand_on = || {
            if spec.ping_pong {
                k.barrier_arrive(next + turn_barrier, 2 * WARPGROUP);
            }
        };

        if spec.ping_pong {
            // The first consumer's first turn.
            k.when(warpgroup.eq(spec.consumers - 1), || k.barrier_arrive(turn_barrier, 2 * WARPGROUP));
        }
        let state = params.dropout.as_ref().map(|dropout| dropout.state(k));
        tiles.for_each(|tile| {
            let own_row = tile.first_query + warpgroup * OWN_QUERIES;
            let descales = params.descales.as_ref().map(|descales| descales.of_head(k, tile.batch, tile.kv_head));
            let softmax = descales.map_or(softmax, |descales| softmax.lifted(descales.of_score(scale), fp8::LIFT));
            let limits = limits(k, spec.mask, &tile, own_row + row, column);
            let mask = |block: Val<'k, u32>| {
                let is_outside = limits.of_block(block * spec.block);
                for part in 0..spec.block / 8 {
                    for (half, odd) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                        let score = scores.element(part, half, odd);
                        score.set(k.select(is_outside(half, 8 * part + odd), f32::NEG_INFINITY, score));
                    }
                }
            };
            // Of a block that is attended to in part, what its bits leave out.
            let hide = |entry: Option<Entry<'k>>| {
                let (Some(listed), Some(entry)) = (&tiles.listed, entry) else { return };
                k.when(entry.is_in_part(), || {
                    let words = listed.masks.words(k, entry, own_row + row, entry.block * spec.block, spec.block);
                    for (half, words) in (0..).zip(words) {
                        let of_column = words.into_iter().map(|word| word.shr(column)).collect::<Vec<_>>();
                        for part in 0..spec.block / 8 {
                            for odd in [0, 1] {
                                let is_hidden = (of_column[part as usize / 4] & (1 << (8 * (part % 4) + odd))).eq(0);
                                let score = scores.element(part, half, odd);
                                score.set(k.select(is_hidden, f32::NEG_INFINITY, score));
                            }
                        }
                    }
                });
            };
            // What makes scores of products is code that all such kernels have in common, or the function that this one is for.
            let (mods, function) = match (&params.score_mod, &params.function) {
                (None, _) => (None, None),
                (Some(score_mod), None) => (Some((score_mod, score_mod.of_head(k, tile.batch, tile.head))), None),
                (Some(score_mod), Some(function)) => {
                    let of_head = function.of_head(&spec.function, tile.batch, tile.head);
                    (None, Some((score_mod, of_head, score_mod.mask_of_head(tile.batch, tile.head))))
                }
            };
            // Makes scores of the products of a block, of which the last may reach beyond the last key.
            let make_scores = |block: Val<'k, u32>, is_last: bool| {
                let places = || QueryRows {
                    queries: [0, 8].map(|below| (own_row + row + below).min(queries - 1)),
                    first_key: block * spec.block + column,
                    last_key: is_last.then(|| keys - 1),
                    shift: (tile.keys - tile.queries).signed(),
                };
                if let Some((score_mod, of_head)) = &mods {
                    score_mod.apply(k, spec.ty, of_head, &elements(&scores, 0..spec.block / 8), &places(), &[]);
                }
                if let Some((score_mod, of_head, mask)) = &function {
                    let (elements, places) = (elements(&scores, 0..spec.block / 8), places());
                    of_head.apply(k, score_mod.factor, &elements, &places);
                    score_mod.hide(k, *mask, &elements, &places);
                }
            };
            let draws = state.map(|state| state.of_head(k, tile.batch, tile.head));
            let block = k.var_named("block", tile.end_block - 1);
            // The block of keys whose turn it is; where blocks are listed, `block` counts entries.
            let current = || match tile.list {
                None => (block.get(), None),
                Some(list) => {
                    let entry = list.entry(k, block.get());
                    (entry.block, Some(entry))
                }
            };
            let words = |blocks: Range<u32>| match &draws {
                None => vec![],
                Some(draws) => draws.words_of_keys(own_row + row, block * spec.block, column, blocks),
            };
            // Behind the sums of rows, which are those without dropout. The first words may have been drawn.
            let drop_some = |mut drawn: Vec<WordsOfKeys<'k>>| {
                if let Some(draws) = &draws {
                    drawn.extend(words(drawn.len() as u32..spec.block / 16));
                    draws.drop_keys(k, &scores, &drawn);
                }
            };
            // Whether the sums have been begun.
            let adds = k.var_named("adds", 0u32);

            q_cursor.wait();
            k_cursor.wait();
            k.wgmma_fence();
            multiply_keys(k_cursor.stage());
            k.wgmma_wait(0);
            k_cursor.release(k_cursor.stage(), thread);
            k_cursor.advance();
            let (last, entry) = current();
            make_scores(last, true);
            mask(last);
            hide(entry);
            softmax.first(&scores);
            drop_some(vec![]);
            pack();
            if let (Bounds::Band(band), false) = (&tiles.bounds, spec.fp8) {
                // Beyond a length anything may stand, and beyond a sequence the next one: 0 · NaN is NaN. Boxes of pages behind it are of keys in front of it.
                let has_end = if spec.ragged || spec.paged { k.constant(true) } else { band.has_lengths[1].ne(0) };
                k.when(has_end, || {
                    v_cursor.wait();
                    let first = (tile.keys.signed() - (block * spec.block).signed()).max(0).unsigned().min(spec.block);
                    let slot = v_slots.address() + v_cursor.stage() * v_tile.bytes();
                    v_tile.clear(slot, first, [WARPGROUP, spec.consumers * WARPGROUP]);
                    k.fence_proxy_async();
                    k.barrier_sync(all_barrier, spec.consumers * WARPGROUP);
                });
            }

            let turn = |masked: bool| {
                block.set(block - 1);
                let (at, entry) = current();
                k_cursor.wait();
                let (k_stage, v_stage) = (k_cursor.stage(), v_cursor.stage());
                begin_turn();
                k.wgmma_fence();
                multiply_keys(k_stage);
                v_cursor.wait();
                // The wait branched: registers written before it are handed over anew.
                k.wgmma_fence();
                multiply_values(v_stage, adds.ne(0));
                hand_on();
                // Scores are not there yet.
                let drawn = words(0..spec.drawn_ahead());
                k.wgmma_wait(1);
                k_cursor.release(k_stage, thread);
                k_cursor.advance();
                make_scores(at, false);
                if masked && spec.branches_to_mask() {
                    k.when(at.lt(tile.first_whole) | at.ge(tile.end_whole), || mask(at));
                } else if masked {
                    mask(at);
                }
                hide(entry);
                let correction = softmax.next(&scores);
                drop_some(drawn);
                k.wgmma_wait(0);
                v_cursor.release(v_stage, thread);
                v_cursor.advance();
                pack();
                sums.map_in_place(|value, half, _| value * correction[half as usize]);
                adds.set(1u32);
            };
            if spec.mask != Mask::End && !spec.has_one_loop() {
                let end = tile.end_whole.max(tile.first_block);
                k.while_(|| block.gt(end), || turn(true));
            }
            if !spec.has_one_loop() {
                let first = tile.first_whole.max(tile.first_block);
                k.while_(|| block.gt(first), || turn(false));
            }
            if spec.mask == Mask::Band {
                k.while_(|| block.gt(tile.first_block), || turn(true));
            }

            // All products of queries are through, so that those of the next tile may come while this one ends.
            if spec.output_bytes() > 0 {
                release_queries();
            }
            v_cursor.wait();
            k.wgmma_fence();
            multiply_values(v_cursor.stage(), adds.ne(0));
            let sink = params.sinks.as_ref().map(|sinks| sinks.of_head(k, spec.ty, tile.head));
            let rows = softmax.finish(sink.map(|sink| [sink; 2]));
            k.wgmma_wait(0);
            v_cursor.release(v_cursor.stage(), thread);
            v_cursor.advance();

            // Rows beyond a length give nothing, nor do those without a key.
            let counts = [0, 8].map(|below| (own_row + row + below).lt(tile.queries));
            let bounded = spec.mask == Mask::Band;
            let gives: Vec<_> = (rows.has_keys.into_iter().zip(counts))
                .map(|(has_keys, counts)| if bounded { has_keys & counts } else { has_keys })
                .collect();
            let factors = match (&params.dropout, descales) {
                (Some(dropout), _) => rows.factor.map(|factor| factor * dropout.single_factor()),
                (_, Some(descales)) => rows.factor.map(|factor| factor * descales.v),
                _ => rows.factor,
            };
            sums.map_in_place(|value, half, _| k.select(gives[half as usize], value * factors[half as usize], 0.0));
            match spec.output_bytes() {
                // All of this warpgroup have read their queries.
                0 => k.barrier_sync(warpgroup + own_barrier, WARPGROUP),
                // The outputs in front have left.
                _ => staging.acquire(warpgroup, thread, 0),
            }
            for panel in 0..o_tile.panels() {
                let stage = staging.stage(warpgroup, panel);
                for pair in 0..(spec.value - panel * PANEL).min(PANEL) / 16 {
                    staging.write_halves(stage, thread, pair, &sums.pack_a(4 * panel + pair, spec.ty.packed()));
                }
            }
            k.fence_proxy_async();
            k.barrier_sync(warpgroup + own_barrier, WARPGROUP);
            let store_all = || {
                k.when(thread.eq(0), || {
                    for panel in 0..o_tile.panels() {
                        let row = tile.query_row(own_row);
                        let at = [k.constant(panel * PANEL), row, tile.head, tile.map_batch(k)].map(|at| at.signed());
                        k.tma_store(&o_map, &at, staging.stage(warpgroup, panel));
                    }
                    k.bulk_commit();
                });
            };
            match (&params.rows_out, tile.own) {
                (Some(rows_out), Some([own, _])) => {
                    // What is behind the last query belongs to the next sequence.
                    let is_whole = (own_row + OWN_QUERIES).le(own.count);
                    k.when(is_whole, store_all);
                    k.when(!is_whole, || {
                        let count = (own.count.signed() - own_row.signed()).max(0).unsigned();
                        for panel in 0..o_tile.panels() {
                            let rows = [tile.head, tile.query_row(own_row), count];
                            rows_out.store(k, &staging, [staging.stage(warpgroup, panel), thread], panel, rows, None);
                        }
                        if spec.output_bytes() == 0 {
                            // Queries of the next tile come to where these rows were read.
                            k.barrier_sync(warpgroup + own_barrier, WARPGROUP);
                        }
                    });
                }
                _ => store_all(),
            }
            for (of_queries, values) in [(&params.log_sum_exp, rows.log_sum_exp), (&params.max_scores, rows.greatest)] {
                for (half, value) in (0..).zip(values) {
                    let query = own_row + row + 8 * half;
                    let value = if bounded { k.select(counts[half as usize], value, f32::NEG_INFINITY) } else { value };
                    let end = tile.own.map_or(queries, |[own, _]| own.count);
                    let at = [tile.map_batch(k), tile.head, tile.query_row(query)];
                    of_queries.store(k, (thread & 3).eq(0) & query.lt(end), at, value);
                }
            }
            if spec.output_bytes() == 0 {
                k.when(thread.eq(0), || k.bulk_wait_read(0));
                release_queries();
            }
        });
        if spec.ping_pong {
            // The turn that the last consumer handed back at its end.
            k.when(warpgroup.eq(0), || k.barrier_sync(turn_barrier, 2 * WARPGROUP));
        }
        k.when(thread.eq(0), || k.bulk_wait(0));
    };

    let load_warp = || k.warp_roles(&[Role { name: "load", warps: 1, registers: None, body: &load }]);
    let [few, many] = spec.registers();
    k.warp_roles(&[
        Role { name: "producer", warps: 4, registers: Some(few), body: &load_warp },
        Role { name: "consumer", warps: 4 * spec.consumers, registers: Some(many), body: &attend },
    ]);
}

const _: () = assert!(STAGE_BYTES == OWN_QUERIES * 2 * PANEL, "a panel of a consumer's queries is a stage");
