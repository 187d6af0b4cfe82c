//! Attention against three loops.

use verdigris_kir::interp::{Kernels, Memory};
use verdigris_kir::program::Residency;
use verdigris_probes::constructs::{attention_backward, attention_forward};

use crate::harness::{
    Numbers, bf16_bytes, compare, dense_map, f32_bytes, float, launch, map_decl, number, pointer, read_bf16, read_f32, run, schedules,
    wanted,
};

/// Half a unit in the last place of bf16, relative.
const BF16: f64 = 1.0 / 256.0;

/// One head of attention in f64.
struct Head {
    p: Vec<Vec<f64>>,
    lse: Vec<f64>,
}

impl Head {
    fn new(q: &[f32], k: &[f32], head_dim: usize, scale: f64) -> Head {
        let mut head = Head { p: vec![], lse: vec![] };
        for q in q.chunks(head_dim) {
            let scores: Vec<f64> =
                k.chunks(head_dim).map(|k| q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() * scale).collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - most).exp()).sum();
            head.lse.push(most + sum.ln());
            head.p.push(scores.iter().map(|s| (s - most).exp() / sum).collect());
        }
        head
    }
}

/// The factor on scores that keeps them near 1, and one that spreads them over some hundreds: of a row's exponentials few are not 0, and each turns to
/// infinity if a greatest score other than its row's is taken off.
const NEAR_ONE: f32 = 0.25;
const HUNDREDS: f32 = 32.0;

fn forward(spec: attention_forward::Spec, heads: usize, queries: usize, keys: usize, scale: f32) {
    let head_dim = spec.head_dim as usize;
    let mut numbers = Numbers::new((queries * keys) as u64);
    let (q, k, v) =
        (numbers.take(heads * queries * head_dim), numbers.take(heads * keys * head_dim), numbers.take(heads * keys * head_dim));
    let kernels = Kernels::new();
    let reference: Vec<Head> =
        q.chunks(queries * head_dim).zip(k.chunks(keys * head_dim)).map(|(q, k)| Head::new(q, k, head_dim, f64::from(scale))).collect();
    // P and the result are rounded to bf16; sums and exponentials are in f32.
    let o_wanted = wanted(q.len(), |index| {
        let (row, column) = (index / head_dim, index % head_dim);
        let (head, row) = (row / queries, row % queries);
        let values = |key: usize| f64::from(v[(head * keys + key) * head_dim + column]);
        let terms = || reference[head].p[row].iter().enumerate().map(|(key, p)| p * values(key));
        (terms().sum(), terms().map(f64::abs).sum::<f64>() * (2.0 * BF16 + 1e-4))
    });
    let lse_error = 1e-4 * f64::from(scale / NEAR_ONE);
    let lse_wanted = wanted(heads * queries, |index| (reference[index / queries].lse[index % queries], lse_error));
    for options in schedules() {
        let mut memory = Memory::new();
        let [q_slot, k_slot, v_slot] = [&q, &k, &v].map(|values| memory.add(&bf16_bytes(values)));
        let o_slot = memory.add_filled((q.len() * 2) as u64, 0xff);
        let lse_slot = memory.add_filled((heads * queries * 4) as u64, 0xff);
        let dims = |rows: usize| [head_dim as u64, rows as u64, heads as u64];
        let body = spec.build();
        let decl = |index: usize| map_decl(&body, index);
        let args = vec![
            dense_map(q_slot, decl(0), &dims(queries)),
            dense_map(k_slot, decl(1), &dims(keys)),
            dense_map(v_slot, decl(2), &dims(keys)),
            dense_map(o_slot, decl(3), &dims(queries)),
            pointer(lse_slot),
            number(queries as u32),
            number(keys as u32),
            number((keys as u32).div_ceil(spec.block)),
            float(scale),
            float(scale * std::f32::consts::LOG2_E),
        ];
        let grid = [(queries as u32).div_ceil(attention_forward::QUERIES), heads as u32, 1];
        run(&[launch(body, grid, Residency::Any, args)], &kernels, &mut memory, &options);

        compare("o", &read_bf16(&mut memory, o_slot), &o_wanted);
        compare("lse", &read_f32(&mut memory, lse_slot), &lse_wanted);
    }
}

#[test]
fn forward_of_one_block() {
    forward(attention_forward::Spec { head_dim: 64, block: 64, stages: 1 }, 1, 5, 9, NEAR_ONE);
}

#[test]
fn forward_of_ragged_blocks_and_two_heads() {
    forward(attention_forward::Spec { head_dim: 64, block: 64, stages: 2 }, 2, 150, 170, NEAR_ONE);
}

#[test]
fn forward_of_scores_far_apart() {
    forward(attention_forward::Spec { head_dim: 64, block: 64, stages: 2 }, 1, 70, 250, HUNDREDS);
}

#[test]
fn forward_at_full_size() {
    forward(attention_forward::Spec::FULL, 1, 128, 384, NEAR_ONE);
}

fn backward(spec: attention_backward::Spec, heads: usize, queries: usize, keys: usize) {
    let head_dim = spec.head_dim as usize;
    let mut numbers = Numbers::new((queries * keys) as u64);
    let [q, dout] = [0; 2].map(|_| numbers.take(heads * queries * head_dim));
    let [k, v] = [0; 2].map(|_| numbers.take(heads * keys * head_dim));
    let scale = 0.25f32;
    let row = |matrix: &'_ [f32], row: usize| -> Vec<f64> { matrix[row * head_dim..][..head_dim].iter().map(|x| f64::from(*x)).collect() };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();

    let (mut p, mut ds, mut lse_log2, mut delta) = (vec![], vec![], vec![], vec![]);
    for head in 0..heads {
        let (first_query, first_key) = (head * queries, head * keys);
        let part = Head::new(
            &q[first_query * head_dim..][..queries * head_dim],
            &k[first_key * head_dim..][..keys * head_dim],
            head_dim,
            f64::from(scale),
        );
        lse_log2.extend(part.lse.iter().map(|lse| (lse * std::f64::consts::LOG2_E) as f32));
        for query in 0..queries {
            let dp: Vec<f64> = (0..keys).map(|key| dot(&row(&dout, first_query + query), &row(&v, first_key + key))).collect();
            let mean = dot(&part.p[query], &dp);
            delta.push(mean as f32);
            ds.push(dp.iter().zip(&part.p[query]).map(|(dp, p)| p * (dp - mean)).collect::<Vec<f64>>());
        }
        p.extend(part.p);
    }
    // Each result is a sum of products with P or dS, which are rounded to bf16 on their way; so is the result unless it is dQ.
    let over_queries = |weights: &[Vec<f64>], matrix: &[f32], factor: f64, index: usize| {
        let (key, column) = (index / head_dim, index % head_dim);
        let (head, key) = (key / keys, key % keys);
        let terms = || {
            (head * queries..(head + 1) * queries).map(|query| weights[query][key] * f64::from(matrix[query * head_dim + column]) * factor)
        };
        (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>() * (2.0 * BF16) + 1e-4)
    };

    let dv_wanted = wanted(k.len(), |index| over_queries(&p, &dout, 1.0, index));
    let dk_wanted = wanted(k.len(), |index| over_queries(&ds, &q, f64::from(scale), index));
    let dq_wanted = wanted(q.len(), |index| {
        let (query, column) = (index / head_dim, index % head_dim);
        let head = query / queries;
        let terms = || (0..keys).map(|key| ds[query][key] * f64::from(k[(head * keys + key) * head_dim + column]) * f64::from(scale));
        (0.5 + terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>() * BF16 + 1e-4)
    });

    let kernels = Kernels::new();
    for options in schedules() {
        let mut memory = Memory::new();
        let [q_slot, k_slot, v_slot, dout_slot] = [&q, &k, &v, &dout].map(|values| memory.add(&bf16_bytes(values)));
        let [dk_slot, dv_slot] = [0; 2].map(|_| memory.add_filled((k.len() * 2) as u64, 0xff));
        let [lse_slot, delta_slot] = [&lse_log2, &delta].map(|values| memory.add(&f32_bytes(values)));
        let dq_slot = memory.add(&f32_bytes(&vec![0.5; q.len()]));
        let dims = |rows: usize| [head_dim as u64, rows as u64, heads as u64];
        let body = spec.build();
        let map = |index: usize, slot: usize, rows: usize| dense_map(slot, map_decl(&body, index), &dims(rows));
        let args = vec![
            map(0, q_slot, queries),
            map(1, k_slot, keys),
            map(2, v_slot, keys),
            map(3, dout_slot, queries),
            map(4, dk_slot, keys),
            map(5, dv_slot, keys),
            pointer(lse_slot),
            pointer(delta_slot),
            pointer(dq_slot),
            number(queries as u32 / attention_backward::QUERIES),
            float(scale),
            float(scale * std::f32::consts::LOG2_E),
        ];
        let grid = [keys as u32 / attention_backward::KEYS, heads as u32, 1];
        run(&[launch(body, grid, Residency::Any, args)], &kernels, &mut memory, &options);

        compare("dv", &read_bf16(&mut memory, dv_slot), &dv_wanted);
        compare("dk", &read_bf16(&mut memory, dk_slot), &dk_wanted);
        let dq = read_f32(&mut memory, dq_slot);
        let half = head_dim / 2;
        let in_rows: Vec<f32> = (0..q.len())
            .map(|index| {
                let (query, column) = (index / head_dim, index % head_dim);
                let piece = query / 64 * 2 + column / half;
                dq[piece * 64 * half + attention_backward::dq_position(query as u32 % 64, (column % half) as u32) as usize]
            })
            .collect();
        compare("dq", &in_rows, &dq_wanted);
    }
}

#[test]
fn backward_of_one_block() {
    backward(attention_backward::Spec { head_dim: 128, stages: 1 }, 1, 64, 128);
}

#[test]
fn backward_of_several_blocks_and_two_heads() {
    backward(attention_backward::Spec::FULL, 2, 192, 256);
}
