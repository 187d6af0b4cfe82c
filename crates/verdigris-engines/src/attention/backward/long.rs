//! The main kernel for long heads: the gradients of 64 keys and of their values a CTA, and its share of the gradient of the queries.
//!
//! **Products.** Two consumers of a warpgroup each, 64 queries a turn. `Sᵀ = K·Qᵀ` and `dPᵀ = V·dOᵀ` are cut by queries: a consumer has 32 of them for all
//! 64 keys. P and dS go through shared memory, keys as rows, once each: there both consumers read them as the A operand of `dV += Pᵀ·dO` and
//! `dK += dSᵀ·Q`, and transposed of `dQ = dS·K`. These three are cut by elements ([`super::spec::parts`]): a consumer has a half of each gradient's columns.
//!
//! **Registers** of a consumer's thread, for heads of 256 (192 and 128) elements: dK 64 (48), dV 64 (32), dQ 64 (48), Sᵀ and dPᵀ 16 each, which are gone
//! before dQ is there: about 192 (128) of 240 hold numbers at a time. Whole rows of keys as in [`super::kernel`] would be 256 for dK and dV alone.
//!
//! **Shared memory**, in KiB: keys 32 (24), values 32 (16), two stages of queries and of gradients of results 128 (80), P and dS of two turns 32: 224 (152)
//! of 227. Nothing is left for a piece of dQ: each thread adds its registers to memory itself, four neighbours at a time, in the order in which
//! [`super::around::behind`] reads them. At the end dK and dV leave through the room of the keys and the values.
//!
//! **A turn.** Both consumers meet when P is written, and again when dS is; while dS is made, the product with P is under way, and while dQ is added, the one
//! of dK. In order, a warp for each consumer waits for its fellow in the CTA of the next keys, and tells the others when its consumer has added: pieces are
//! counted for each consumer, which neither waits in a loop nor for what it has added to land.

use std::f32::consts::LOG2_E;

use verdigris_kir::face::{Kernel, Role, Val, Var, WgmmaA};
use verdigris_kir::inst::{Atomic, Order as MemoryOrder, Scope};
use verdigris_kir::tile::fragment::Fragment;
use verdigris_kir::tile::staging::Staging;

use super::super::dropout::{HeadDraws, KeptQueries};
use super::super::score_mod::{KeyRows, elements};
use super::super::tile::{HeadTile, PANEL, descriptor};
use super::kernel::{Mod, NEVER, Params, SENDER_AND_CONSUMER, Tile, Turns, meet};
use super::slots::Slots;
use super::spec::{BOTH, CONSUMERS, Mask, NUMBERS_BYTES, Part, QUERIES, ROOM, STAGING, Spec, WRITTEN, own_columns, piece_bytes, values_of};
use crate::hopper::WARPGROUP;

/// Queries of a turn for which a consumer has the scores.
const OWN_QUERIES: u32 = QUERIES / CONSUMERS;
/// Turns whose P and dS are in shared memory.
const PARITIES: u32 = 2;

pub(super) fn backward<'k>(k: Kernel<'k>, spec: &Spec) {
    let params = Params::declare(k, spec);
    let (key_tile, value_tile, query_tile, result_tile) = (spec.key_tile(), spec.value_tile(), spec.query_tile(), spec.result_tile());
    // P, or dS: keys by queries.
    let scores_tile = HeadTile { rows: spec.keys(), elements: QUERIES, ty: spec.ty.map() };

    let slots = Slots::new(k, spec);
    let p_slots = k.shared("probabilities", PARITIES * scores_tile.bytes(), 1024);
    let ds_slots = k.shared("gradients of scores", PARITIES * scores_tile.bytes(), 1024);
    slots.start(k, &params);
    let tile = Tile::of_cta(k, spec, &params, &slots);
    let load = || slots.load(k, spec, &params, &tile);

    // A consumer's turn to add, and that it has.
    let keep_order = |turns: &Turns<'k>, warpgroup: u32| {
        let leader = k.lane().eq(0);
        k.range(params.group, |member| {
            let head = tile.first_head + member;
            k.range_step(tile.first_attending, tile.end_attending, 1, |block| {
                let at = turns.added.at(tile.block_number(&params, head, block) * CONSUMERS + warpgroup, 4);
                k.when(leader, || turns.wait(k, spec, &tile, block, at));
                k.warp_sync();
                k.barrier_arrive(ROOM + warpgroup, SENDER_AND_CONSUMER);
                k.barrier_sync(WRITTEN + warpgroup, SENDER_AND_CONSUMER);
                k.when(leader, || k.red_global(Atomic::Add, at, 0, &[k.constant(1u32)], MemoryOrder::Release(Scope::Gpu)));
            });
        });
    };

    let differentiate = || {
        let thread = k.thread() & (WARPGROUP - 1);
        let warpgroup = k.uniform(k.thread() >> 7) - 1;
        let s = Fragment::<f32>::unset(k, OWN_QUERIES);
        let dp = Fragment::<f32>::unset(k, OWN_QUERIES);
        let [dk, dv, dq] = [spec.head, spec.value, spec.head].map(|head| own_columns(k, head));
        let zero = k.constant(0u32);
        let first_own_query = warpgroup * OWN_QUERIES;
        let (k_low, v_low) = (key_tile.along(slots.keys.address(), zero), value_tile.along(slots.values.address(), zero));
        let k_across_low = key_tile.across(slots.keys.address());
        let q_low = query_tile.along(slots.queries.address(), first_own_query);
        let d_o_low = result_tile.along(slots.d_o.address(), first_own_query);
        let (q_across_low, d_o_across_low) = (query_tile.across(slots.queries.address()), result_tile.across(slots.d_o.address()));
        let (p_low, ds_low) = (scores_tile.along(p_slots.address(), zero), scores_tile.along(ds_slots.address(), zero));
        let ds_across_low = scores_tile.across(ds_slots.address());
        let (q_cursor, d_o_cursor) = (slots.q_ring.cursor(), slots.d_o_ring.cursor());
        let column = first_own_query + Fragment::<f32>::column(thread);
        // Whether dK and dV have been begun.
        let begun = k.var_named("begun", 0u32);
        let turn_parity = k.var_named("turn parity", 0u32);

        // Of a row's key: the first query that attends to it, and the one behind the last.
        let own_key = tile.first_key + Fragment::<f32>::row(thread);
        let limits = [0, 8].map(|below| {
            let key = own_key + below;
            let (from, until) = match &tile.reach {
                None => (k.constant(0i32), k.constant(NEVER)),
                Some(reach) => (key.signed() - reach.behind + 1, (key.signed() - reach.before + 1).min(reach.queries)),
            };
            (k.select(key.lt(tile.keys), from, NEVER) - column.signed(), until - column.signed())
        });

        // Keys by this consumer's queries, both along the head.
        let multiply_transposed = |d: &Fragment<'k, f32>, [a_tile, b_tile]: [HeadTile; 2], [a_low, b_low]: [Val<'k, u32>; 2]| {
            k.wgmma_fence();
            for step in 0..a_tile.elements / 16 {
                let a = descriptor(a_low + a_tile.along_steps(step));
                let b = descriptor(b_low + b_tile.along_steps(step));
                k.wgmma(spec.transposed_shape(OWN_QUERIES), d.registers(), WgmmaA::Shared(a), b, step > 0);
            }
            k.wgmma_commit();
        };
        // Scores along the queries by queries across: this consumer's columns.
        let add_keys = |d: &[(Part, Fragment<'k, f32>)], scores: Val<'k, u32>, b_tile: HeadTile, b_low: Val<'k, u32>| {
            k.wgmma_fence();
            let adds = begun.ne(0);
            for (part, d) in d {
                let b_low = b_low + warpgroup * b_tile.across_elements(part.of_consumer);
                for step in 0..QUERIES / 16 {
                    let a = descriptor(scores + scores_tile.along_steps(step));
                    let b = descriptor(b_low + (b_tile.across_elements(part.first) + b_tile.across_steps(step)));
                    let adds = if step == 0 { adds } else { k.constant(true) };
                    k.wgmma(spec.part_shape(*part), d.registers(), WgmmaA::Shared(a), b, adds);
                }
            }
            k.wgmma_commit();
        };
        // This consumer's queries, for all keys: 16 of them.
        let write = |slot: Val<'k, u32>, step: u32, values: &[Val<'k, u32>; 4]| {
            let lane = thread & 31;
            let row = ((thread >> 5) << 4) + (lane & 15);
            let chunk = (lane >> 4) + warpgroup * (OWN_QUERIES / 8);
            k.stmatrix(false, scores_tile.chunk(slot, row, chunk, step), 0, values);
        };
        // One number for each query: a column of the transposed products.
        let queries_numbers = |slot: Val<'k, u32>, part: u32| k.ld_shared_vector::<f32>(slot + (column << 2), i64::from(32 * part), 2);

        let bends: Vec<Var<'k, f32>> = if spec.score_mod { (0..4).map(|_| k.var_unset(Some("bend"))).collect() } else { vec![] };

        let dropping = params.dropout.as_ref().map(|dropout| (dropout.single_factor(), KeptQueries::new(k)));
        let state = params.dropout.as_ref().map(|dropout| dropout.state(k));
        // Which pairs of a block are kept: a turn draws those of the next one while its gradients are multiplied.
        let draw = |draws: Option<&HeadDraws<'k>>, block: Val<'k, u32>| {
            if let Some((draws, (_, kept))) = draws.zip(dropping.as_ref()) {
                let first_query = (block << QUERIES.trailing_zeros()) + first_own_query;
                draws.draw(kept, own_key, [first_query, column - first_own_query], OWN_QUERIES);
            }
        };
        let turn = |head: Val<'k, u32>, draws: Option<&HeadDraws<'k>>, block: Val<'k, u32>, masked: bool, mods: Option<&Mod<'k>>| {
            q_cursor.wait();
            if masked {
                slots.clear_queries(k, spec, &tile, block, [&q_cursor, &d_o_cursor]);
            }
            let q_stage = q_cursor.stage();
            multiply_transposed(&s, [key_tile, query_tile], [k_low, q_low + query_tile.slots(q_stage)]);
            d_o_cursor.wait();
            let d_o_stage = d_o_cursor.stage();
            multiply_transposed(&dp, [value_tile, result_tile], [v_low, d_o_low + result_tile.slots(d_o_stage)]);

            let first_query = (block << QUERIES.trailing_zeros()).signed();
            let own = limits.map(|(from, until)| (from - first_query, until - first_query));
            let is_outside = |part: u32, half: u32, odd: u32| {
                let (from, until) = own[half as usize];
                let query = (8 * part + odd) as i32;
                let outside = from.gt(query);
                if spec.mask == Mask::Band { outside | until.le(query) } else { outside }
            };
            let parity_bytes = turn_parity * scores_tile.bytes();
            let parity_low = scores_tile.slots(turn_parity.get());
            let p_slot = p_slots.address() + parity_bytes;
            k.wgmma_wait(1);
            // Probabilities of one block of 8 queries, of scores with this factor.
            let exponentiate = |part: u32, factor: Val<'k, f32>| {
                let lse = queries_numbers(slots.lse.address() + q_stage * NUMBERS_BYTES, part);
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
            match mods {
                None => {
                    (0..OWN_QUERIES / 8).for_each(|part| exponentiate(part, params.scale_log2));
                    for step in 0..OWN_QUERIES / 16 {
                        let ([a, b], [c, d]) = (packed_part(2 * step), packed_part(2 * step + 1));
                        write(p_slot, step, &[a, b, c, d]);
                    }
                }
                Some(score_mod) => {
                    // Anew in each turn: registers are short, and what these hold is made with a few instructions.
                    let of_head = &score_mod.of.of_head(k, tile.place.batch, head);
                    let places = KeyRows {
                        keys: [0, 8].map(|below| (own_key + below).min(score_mod.last_key)),
                        first_query: first_query.unsigned() + column,
                        last_query: score_mod.last_query,
                        shift: tile.own.map_or(score_mod.shift, |own| own.shift),
                    };
                    // The probabilities of a part are packed before they get the slope of the cap.
                    let of_part = |part: u32| {
                        let own = elements(&s, part..part + 1);
                        score_mod.of.apply(k, spec.ty, of_head, &own, &places, &bends);
                        exponentiate(part, k.constant(LOG2_E));
                        let packed = packed_part(part);
                        for ((element, ..), bend) in own.iter().zip(&bends) {
                            element.set(*element * *bend);
                        }
                        packed
                    };
                    for step in 0..OWN_QUERIES / 16 {
                        let ([a, b], [c, d]) = (of_part(2 * step), of_part(2 * step + 1));
                        write(p_slot, step, &[a, b, c, d]);
                    }
                }
            }
            meet(k);
            add_keys(&dv, p_low + parity_low, result_tile, d_o_across_low + result_tile.slots(d_o_stage));

            k.wgmma_wait(1);
            for part in 0..OWN_QUERIES / 8 {
                let delta = queries_numbers(slots.delta.address() + d_o_stage * NUMBERS_BYTES, part);
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
                    let ds = if mods.is_some() { k.select(weight.eq(0.0), 0.0, ds) } else { ds };
                    // What is not attended to may be no number.
                    element.set(if masked { k.select(is_outside(part, half, odd), 0.0, ds) } else { ds });
                }
            }
            let ds_slot = ds_slots.address() + parity_bytes;
            (0..OWN_QUERIES / 16).for_each(|step| write(ds_slot, step, &dp.pack_a(step, spec.ty.packed())));
            meet(k);
            k.wgmma_fence();
            for (part, d) in &dq {
                let b_low = k_across_low + warpgroup * key_tile.across_elements(part.of_consumer);
                for step in 0..key_tile.rows / 16 {
                    let a = descriptor(ds_across_low + parity_low + scores_tile.across_steps(step));
                    let b = descriptor(b_low + (key_tile.across_elements(part.first) + key_tile.across_steps(step)));
                    k.wgmma(spec.query_part_shape(*part), d.registers(), WgmmaA::Shared(a), b, step > 0);
                }
            }
            k.wgmma_commit();

            k.wgmma_wait(1);
            d_o_cursor.release(d_o_stage, thread);
            d_o_cursor.advance();
            add_keys(&dk, ds_low + parity_low, query_tile, q_across_low + query_tile.slots(q_stage));
            draw(draws, block + 1);
            k.wgmma_wait(1);
            k.when(tile.adds(block), || {
                if spec.in_order {
                    k.barrier_sync(warpgroup + ROOM, SENDER_AND_CONSUMER);
                }
                let piece = tile.block_number(&params, head, block) * CONSUMERS + warpgroup;
                let to = params.dq.at(piece, piece_bytes(spec.head)) + (thread << 4).widen();
                for (i, four) in values_of(&dq).chunks(4).enumerate() {
                    k.red_global(Atomic::Add, to, i as i64 * i64::from(WARPGROUP) * 16, four, MemoryOrder::Relaxed(Scope::Gpu));
                }
                if spec.in_order {
                    k.barrier_arrive(warpgroup + WRITTEN, SENDER_AND_CONSUMER);
                }
            });
            k.wgmma_wait(0);
            q_cursor.release(q_stage, thread);
            q_cursor.advance();
            begun.set(1u32);
            turn_parity.set(turn_parity ^ 1);
        };

        // The first queries bring the keys, and the first gradients of results the values.
        [&q_cursor, &d_o_cursor].into_iter().for_each(|cursor| cursor.wait());
        slots.clear_keys(k, spec, &tile);
        k.range(params.group, |member| {
            let head = tile.first_head + member;
            let draws = state.map(|state| state.of_head(k, tile.place.batch, head));
            let draws = draws.as_ref();
            draw(draws, tile.first);
            if spec.score_mod {
                // Beside what makes the scores, a mask costs little, and a second loop much room for instructions.
                k.range_step(tile.first, tile.end, 1, |block| turn(head, draws, block, true, params.score_mod.as_ref()));
                return;
            }
            k.range_step(tile.first, tile.first_whole, 1, |block| turn(head, draws, block, true, None));
            k.range_step(tile.first_whole, tile.end_whole, 1, |block| turn(head, draws, block, false, None));
            if spec.mask == Mask::Band {
                k.range_step(tile.end_whole.max(tile.first_whole), tile.end, 1, |block| turn(head, draws, block, true, None));
            }
        });

        // The other consumer's last products may still read the keys, where the gradients go now.
        k.barrier_sync(BOTH, CONSUMERS * WARPGROUP);
        dk.iter().for_each(|(_, d)| d.map_in_place(|value, _, _| value * params.scale));
        if let Some((factor, _)) = &dropping {
            dv.iter().for_each(|(_, d)| d.map_in_place(|value, _, _| value * *factor));
        }
        let results = [(&dv, value_tile, &slots.values), (&dk, key_tile, &slots.keys)];
        let (lane, row_of_warp) = (thread & 31, (thread >> 5) << 4);
        for (result, to, slot) in results {
            for (part, d) in result {
                // Chunks of 8 elements: a consumer begins whole panels behind the other, or in the middle of one.
                let (panels, chunks) = (part.of_consumer / PANEL, part.of_consumer % PANEL / 8);
                let slot = slot.address() + warpgroup * (panels * to.rows * 128);
                let chunk = (lane >> 4) + warpgroup * chunks;
                for step in 0..part.columns / 16 {
                    let at = to.chunk(slot, row_of_warp + (lane & 15), chunk, part.first / 16 + step);
                    k.stmatrix(false, at, 0, &d.pack_a(step, spec.ty.packed()));
                }
            }
        }
        meet(k);
        // One of the two for each consumer.
        let sends = [(&params.dv, params.has_dv, value_tile, slots.values), (&params.dk, params.has_dk, key_tile, slots.keys)];
        let store_all = || {
            k.when(thread.eq(0), || {
                for (consumer, (map, is_written, from, slot)) in (0..).zip(&sends) {
                    k.when(warpgroup.eq(consumer) & is_written.ne(0), || {
                        for panel in 0..from.panels() {
                            let row = tile.key_row(tile.first_key);
                            let at = [k.constant(panel * PANEL), row, tile.place.head, tile.map_batch()].map(|at| at.signed());
                            k.tma_store(map, &at, slot.address() + panel * (from.bytes() / from.panels()));
                        }
                    });
                }
                k.bulk_commit();
                k.bulk_wait(0);
            });
        };
        let (Some(ragged), Some(own)) = (&params.ragged, &tile.own) else { return store_all() };
        // What is behind the last key belongs to the next sequence, or does not count.
        let is_whole = (tile.first_key + spec.keys()).le(own.keys.count);
        let store_rows = || {
            let rows = [tile.place.head, tile.key_row(tile.first_key), own.rows[1] - tile.first_key];
            let counting = own.keys.count - tile.first_key;
            let [of_keys, of_values] = &ragged.of_batch(own);
            for (consumer, (rows_out, (_, is_written, from, slot))) in (0..).zip([of_values, of_keys].into_iter().zip(&sends)) {
                let staging = Staging::within(k, *slot, from.panels(), STAGING);
                k.when(warpgroup.eq(consumer) & is_written.ne(0), || {
                    for panel in 0..from.panels() {
                        rows_out.store(k, &staging, [staging.stage(k.constant(0), panel), thread], panel, rows, Some(counting));
                    }
                });
            }
        };
        k.when_else(is_whole, store_all, store_rows);
    };

    let serve = || {
        let keep = |warpgroup: u32| params.turns.as_ref().map(|turns| move || keep_order(turns, warpgroup));
        let (low, high) = (keep(0), keep(1));
        let own = |name, body| Role { name, warps: 1, registers: None, body };
        let mut roles = vec![own("load", &load as &dyn Fn())];
        roles.extend(low.as_ref().map(|low| own("keep the order of the low half", low)));
        roles.extend(high.as_ref().map(|high| own("keep the order of the high half", high)));
        k.warp_roles(&roles);
    };
    k.warp_roles(&[
        Role { name: "producer", warps: 4, registers: Some(24), body: &serve },
        Role { name: "consumer", warps: 4 * CONSUMERS, registers: Some(240), body: &differentiate },
    ]);
}
