//! The kernel where values are the first elements of the keys (DeepSeek's latent attention, absorbed): keys come from memory once, and stand for both.
//!
//! A CTA has 64 rows, as in [`super::kernel`]. **Shared memory** of 227 KiB: queries 72, two stages of 64 keys 144, probabilities 8. **Registers**: results
//! of 512 elements are too many for a warpgroup, so that there are two, each with the half of them: 128 of a thread's 240. The warpgroup of the warp that
//! loads gives its own away.
//!
//! **A turn.** Each warpgroup has the scores of one half of the block's keys. The two exchange what their rows have at most through shared memory, write
//! their probabilities there, and meet; then each multiplies all of them with its half of the values, which are the keys' columns read across. So each
//! product is formed once. What is taken off scores rises only where some are far above it, so that few blocks scale the results.
//!
//! **Source.** The shape (64 rows, results cut between two warpgroups, one copy of keys and values) is that of DeepSeek's FlashMLA, 2025.

use verdigris_kir::face::{Kernel, Role, Val, WgmmaA};
use verdigris_kir::inst::Vote;
use verdigris_kir::tile::fragment::Fragment;
use verdigris_kir::tile::ring::{Ring, RingScope};

use super::super::softmax::Softmax;
use super::super::tile::{HeadTile, descriptor};
use super::kernel::{CONSUMERS, Params, ROWS, Spec};
use super::part::{Part, Results};
use crate::hopper::{FIRST_BARRIER, WARPGROUP, roles};

/// Powers of 2 that exponentials may have: results are scaled once in many blocks, which takes as many cycles as a tenth of its products.
const SLACK: f32 = 8.0;
/// Bytes that a thread hands to the other warpgroup: a number of each of its two rows.
const HANDED_BYTES: u32 = 8;

pub(super) fn latent<'k>(k: Kernel<'k>, spec: &Spec) {
    let params = Params::declare(k, spec);
    let (own_keys, own_elements) = (spec.block / CONSUMERS, spec.value / CONSUMERS);
    // Values are the first panels of the keys.
    let (q_tile, k_tile, v_tile) = (spec.q_tile(), spec.k_tile(), spec.v_tile());
    let p_tile = HeadTile { rows: ROWS, elements: spec.block, ty: spec.ty.map() };
    let q_slot = k.shared("queries", q_tile.bytes(), 1024);
    let k_slots = k.shared("keys", spec.stages * k_tile.bytes(), 1024);
    let p_slot = k.shared("probabilities", p_tile.bytes(), 1024);
    let handed = k.shared("numbers of rows", CONSUMERS * WARPGROUP * HANDED_BYTES, 16);
    let ring = Ring::new(k, spec.stages, CONSUMERS, RingScope::Cta);
    let init = || {
        ring.init();
        k.prefetch_tensormap(&params.k);
    };
    roles::start(k, init, || {});
    let part = Part::of_cta(k, spec, &params);
    let [first_block, end_block] = part.blocks;

    let load = || {
        let cursor = ring.cursor();
        k.when(k.elect(), || {
            k.range_step(first_block, end_block, 1, |block| {
                let full = cursor.acquire(k_tile.bytes());
                part.bring(&k_tile, k_slots.address() + cursor.stage() * k_tile.bytes(), &params.k, block, full);
                cursor.advance();
            });
        });
    };

    let attend = || {
        let thread = k.thread() & (WARPGROUP - 1);
        let warpgroup = k.uniform(k.thread() >> 7);
        let (row, column) = (Fragment::<f32>::row(thread), Fragment::<f32>::column(thread));
        let first_own_key = warpgroup * own_keys;
        let scores = Fragment::<f32>::unset(k, own_keys);
        let sums = Fragment::<f32>::filled(k, own_elements, 0.0);
        let softmax = Softmax::new(k, params.scale);
        softmax.begin();
        let cursor = ring.cursor();
        let all_meet = || k.barrier_sync(FIRST_BARRIER, CONSUMERS * WARPGROUP);
        // Of numbers that both warpgroups have of the same rows: what this thread and its fellow make of theirs.
        let of_both = |own: [Val<'k, f32>; 2], combine: &dyn Fn(Val<'k, f32>, Val<'k, f32>) -> Val<'k, f32>| {
            let place = |warpgroup: Val<'k, u32>| handed.address() + ((warpgroup << 7) + thread) * HANDED_BYTES;
            k.st_shared_vector(place(warpgroup), 0, &own);
            all_meet();
            let other = k.ld_shared_vector::<f32>(place(warpgroup ^ 1), 0, 2);
            [combine(own[0], other[0]), combine(own[1], other[1])]
        };

        part.copy_queries(&q_tile, q_slot.address(), k.thread(), CONSUMERS * WARPGROUP / ROWS);
        k.fence_proxy_async();
        all_meet();

        let limits = part.limits(row, first_own_key + column);
        let sinks = part.sinks(row);
        let zero = k.constant(0u32);
        let (q_low, p_low) = (q_tile.along(q_slot.address(), zero), p_tile.along(p_slot.address(), zero));
        let k_low = k_tile.along(k_slots.address(), first_own_key);
        let v_low = v_tile.across(k_slots.address()) + warpgroup * v_tile.across_elements(own_elements);
        k.range_step(first_block, end_block, 1, |block| {
            let first_key = block * spec.block;
            cursor.wait();
            let stage = k_tile.slots(cursor.stage());
            k.wgmma_fence();
            let k_stage = k_low + stage;
            for step in 0..spec.head / 16 {
                let a = descriptor(q_low + q_tile.along_steps(step));
                let b = descriptor(k_stage + k_tile.along_steps(step));
                k.wgmma(spec.score_shape(own_keys), scores.registers(), WgmmaA::Shared(a), b, step > 0);
            }
            k.wgmma_commit();
            k.wgmma_wait(0);
            part.mask(&scores, &limits, first_key);
            // Behind this both have left the probabilities of the block before.
            let correction = softmax.next_of_all(&scores, SLACK, |most| of_both(most, &|a, b| a.max(b)));
            for step in 0..own_keys / 16 {
                let lane = thread & 31;
                let to = ((thread >> 5) << 4) + (lane & 15);
                let chunk = (lane >> 4) + warpgroup * (own_keys / 8);
                k.stmatrix(false, p_tile.chunk(p_slot.address(), to, chunk, step), 0, &scores.pack_a(step, spec.ty.packed()));
            }
            part.when_beyond(first_key, |first| {
                let slot = k_slots.address() + cursor.stage() * k_tile.bytes();
                v_tile.clear(slot, first, [0, CONSUMERS * WARPGROUP]);
            });
            let is_one = correction[0].eq(1.0) & correction[1].eq(1.0);
            k.when(k.vote(Vote::Any, !is_one), || sums.map_in_place(|value, half, _| value * correction[half as usize]));
            k.fence_proxy_async();
            all_meet();
            k.wgmma_fence();
            let v_stage = v_low + stage;
            for step in 0..spec.block / 16 {
                let a = descriptor(p_low + p_tile.along_steps(step));
                let b = descriptor(v_stage + v_tile.across_steps(step));
                k.wgmma(spec.latent_value_shape(), sums.registers(), WgmmaA::Shared(a), b, true);
            }
            k.wgmma_commit();
            k.wgmma_wait(0);
            cursor.release(cursor.stage(), thread);
            cursor.advance();
        });

        // Each has summed the probabilities of its own keys.
        softmax.total_of_all(|total| of_both(total, &|a, b| a + b));
        let first_element = warpgroup * own_elements;
        part.store(
            row,
            Results {
                sums: &sums,
                rows: softmax.finish(Some(sinks)),
                column: first_element + column,
                elements: params.elements.max(first_element) - first_element,
                writes_numbers: k.thread().lt(WARPGROUP) & (thread & 3).eq(0),
            },
        );
    };

    let load_warp = || k.warp_roles(&[Role { name: "load", warps: 1, registers: None, body: &load }]);
    part.when_it_has_rows(|| {
        k.warp_roles(&[
            Role { name: "consumer", warps: 4 * CONSUMERS, registers: Some(240), body: &attend },
            Role { name: "producer", warps: 4, registers: Some(24), body: &load_warp },
        ]);
    });
}
