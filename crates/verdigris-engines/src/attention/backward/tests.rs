//! The launches on the interpreter against plain loops.

use verdigris_graph::{AttentionPass, AttentionProblem, Corner, Determinism, HostScalar, Problem, Real, Slot, View};
use verdigris_kir::execution::HostValue;
use verdigris_kir::interp::{self, Kernels, Memory};
use verdigris_tensor::DType;

use super::super::half::Half;
use super::super::testing::{Numbers, cut_off, from_half, halves, schedules};
use super::{Backward, Spec, keys_of};
use crate::algorithm::Algorithm;
use crate::arch::Arch;

/// A small problem; tensors lie as `[b, s, h, d]`.
#[derive(Clone, Copy)]
struct Case {
    ty: Half,
    batch: usize,
    heads: usize,
    kv_heads: usize,
    queries: usize,
    keys: usize,
    head: usize,
    value: usize,
    left: Option<u32>,
    right: Option<u32>,
    bottom_right: bool,
    score_mod: Mods,
    /// Shares are such that the bits of their sum show the order in which they were added ([`oppose`]).
    shows_order: bool,
}

/// What stands between the products.
#[derive(Clone, Copy)]
struct Mods {
    soft_cap: Option<f64>,
    /// A bias of each head, query and key, and its type.
    bias: Option<DType>,
    mask: bool,
    slopes: bool,
    /// The scale is given at execution.
    is_bound: bool,
}

const PLAIN: Mods = Mods { soft_cap: None, bias: None, mask: false, slopes: false, is_bound: false };

const SMALL: Case = Case {
    ty: Half::Bf16,
    batch: 1,
    heads: 1,
    kv_heads: 1,
    queries: 64,
    keys: 128,
    head: 64,
    value: 64,
    left: None,
    right: None,
    bottom_right: false,
    score_mod: PLAIN,
    shows_order: false,
};

const SCALE: f64 = 0.25;

/// What f64 says of a tensor, each number with its bound.
type Wanted = Vec<(f64, f64)>;

/// Sums of products and what they may be off: halves are rounded to on the way, and at the end.
#[derive(Default, Clone, Copy)]
struct Sum {
    sum: f64,
    size: f64,
}

impl Sum {
    fn add(&mut self, term: f64, size: f64) {
        self.sum += term;
        self.size += size;
    }
}

/// Makes the shares of the second of four blocks of keys and of the fourth opposites of each other, and in every other element so large that what is added
/// between them loses bits: those of the sum show which shares that were. Queries hold nothing in these elements, so that no score changes.
fn oppose(case: &Case, q: &mut [f32], k: &mut [f32], v: &mut [f32]) {
    /// Its 64ths are numbers of f16, and the last bit of sums of so much is about the last one that f16 has of the others' sum.
    const LARGE: f32 = 16_384.0;
    let Case { batch, keys, kv_heads, head, value, .. } = *case;
    let block = keys_of(head as u32) as usize;
    assert_eq!(keys, 4 * block, "four blocks of keys");
    q.chunks_mut(head).for_each(|row| row.iter_mut().skip(1).step_by(2).for_each(|x| *x = 0.0));
    for b in 0..batch {
        // Rows of all heads of these keys.
        let rows = block * kv_heads;
        let (second, fourth) = ((4 * b + 1) * rows, (4 * b + 3) * rows);
        v.copy_within(second * value..(second + rows) * value, fourth * value);
        k.copy_within(second * head..(second + rows) * head, fourth * head);
        for (first, factor) in [(second, LARGE), (fourth, -LARGE)] {
            for row in k[first * head..(first + rows) * head].chunks_mut(head) {
                row.iter_mut().skip(1).step_by(2).for_each(|x| *x *= factor);
            }
        }
    }
}

/// Runs the problem in order by every other schedule, and with orders left open by the others.
fn run(case: Case) {
    let gradients = run_under(case, schedules().into_iter().map(|options| (options.seed % 2 == 1, options)).collect());
    let in_order: Vec<&Vec<u8>> = gradients.iter().skip(1).step_by(2).collect();
    assert!(in_order.windows(2).all(|pair| pair[0] == pair[1]), "dq is of another order");
}

/// Holds the gradients against f64 under each schedule, by the config that adds in order or by the other one; returns those of queries.
fn run_under(case: Case, schedules: Vec<(bool, interp::Options)>) -> Vec<Vec<u8>> {
    let Case { ty, batch, heads, kv_heads, queries, keys, head, value, .. } = case;
    let mut numbers = Numbers::new((queries * 1000 + keys + head) as u64);
    let (mut q, d_o) = (numbers.take(batch * queries * heads * head), numbers.take(batch * queries * heads * value));
    let (mut k, mut v) = (numbers.take(batch * keys * kv_heads * head), numbers.take(batch * keys * kv_heads * value));
    if case.shows_order {
        oppose(&case, &mut q, &mut k, &mut v);
    }
    let mods = case.score_mod;
    let bias = numbers.take(heads * queries * keys);
    // A query in five attends to nothing.
    let may_attend = |i: usize, j: usize| !i.is_multiple_of(5) && !(i + j).is_multiple_of(3);
    let slope = |n: usize| 0.25 / (n + 1) as f32;
    let shift = keys as i64 - queries as i64;
    let corner = if case.bottom_right { keys as i64 - queries as i64 } else { 0 };
    let row = |matrix: &[f32], row: usize, elements: usize| -> Vec<f64> {
        matrix[row * elements..][..elements].iter().map(|x| f64::from(*x)).collect()
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();

    let (mut o, mut lse) = (vec![0.0f32; d_o.len()], vec![f32::NEG_INFINITY; batch * heads * queries]);
    let mut sums = [q.len(), k.len(), v.len(), bias.len()].map(|elements| vec![Sum::default(); elements]);
    for b in 0..batch {
        for n in 0..heads {
            let own = n / (heads / kv_heads);
            for i in 0..queries {
                let q_row = (b * queries + i) * heads + n;
                let kv_row = |j: usize| (b * keys + j) * kv_heads + own;
                let at = i as i64 + corner;
                let is_attended = |j: i64| {
                    case.left.is_none_or(|left| j >= at - i64::from(left)) && case.right.is_none_or(|right| j <= at + i64::from(right))
                };
                let attended: Vec<usize> = (0..keys).filter(|&j| is_attended(j as i64) && (!mods.mask || may_attend(i, j))).collect();
                let query = row(&q, q_row, head);
                // Each score, and the slope of its cap.
                let score = |j: usize| {
                    let product = dot(&query, &row(&k, kv_row(j), head)) * SCALE;
                    let tanh = mods.soft_cap.map_or(0.0, |cap| (product / cap).tanh());
                    let bias = if mods.bias.is_some() { f64::from(bias[(n * queries + i) * keys + j]) } else { 0.0 };
                    let distance = (i as i64 + shift - j as i64).abs() as f64;
                    let beside = bias - if mods.slopes { f64::from(slope(n)) * distance } else { 0.0 };
                    (mods.soft_cap.map_or(product, |cap| cap * tanh) + beside, 1.0 - tanh * tanh)
                };
                let (scores, bends): (Vec<f64>, Vec<f64>) = attended.iter().map(|&j| score(j)).unzip();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                if attended.is_empty() {
                    continue;
                }
                let logarithm = most + scores.iter().map(|s| (s - most).exp()).sum::<f64>().ln();
                lse[(b * heads + n) * queries + i] = logarithm as f32;
                let p: Vec<f64> = scores.iter().map(|s| (s - logarithm).exp()).collect();
                for e in 0..value {
                    let sum: f64 = attended.iter().zip(&p).map(|(&j, p)| p * f64::from(v[kv_row(j) * value + e])).sum();
                    // As the forward kernel leaves it: rounded.
                    o[q_row * value + e] = cut_off(ty, sum);
                }
                let gradient = row(&d_o, q_row, value);
                let delta: f64 = dot(&gradient, &row(&o, q_row, value));
                for ((&j, p), bend) in attended.iter().zip(&p).zip(bends) {
                    let dp = dot(&gradient, &row(&v, kv_row(j), value));
                    // The slope of the cap stands behind the bias.
                    let (of_bias, of_row) = (p * (dp - delta), p * (dp.abs() + delta.abs()) * 0.02);
                    sums[3][(n * queries + i) * keys + j].add(of_bias, of_bias.abs() + of_row);
                    let ds = p * bend * (dp - delta);
                    // What the difference may be off beside its rounding: sums of f32, and exponentials of it.
                    let ds_size = ds.abs() + p * (dp.abs() + delta.abs()) * 0.02;
                    for e in 0..head {
                        let (x, y) = (f64::from(k[kv_row(j) * head + e]), query[e]);
                        sums[0][q_row * head + e].add(ds * x * SCALE, ds_size * x.abs() * SCALE);
                        sums[1][kv_row(j) * head + e].add(ds * y * SCALE, ds_size * y.abs() * SCALE);
                    }
                    for e in 0..value {
                        sums[2][kv_row(j) * value + e].add(p * gradient[e], (p * gradient[e]).abs());
                    }
                }
            }
        }
    }
    let unit = if ty == Half::Bf16 { 1.0 / 256.0 } else { 1.0 / 2048.0 };
    let wanted: [Wanted; 4] = sums.map(|sums| sums.into_iter().map(|Sum { sum, size }| (sum, size * 2.0 * unit + 1e-5)).collect());

    let mut found = Vec::new();
    for (in_order, options) in schedules {
        let mut memory = Memory::new();
        let [q_slot, k_slot, v_slot, o_slot, d_o_slot] = [&q, &k, &v, &o, &d_o].map(|values| memory.add(&halves(ty, values)));
        let lse_slot = memory.add(&lse.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
        let wide = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let bias_slot = memory.add(&if mods.bias == Some(DType::F32) { wide(&bias) } else { halves(ty, &bias) });
        let mask: Vec<u8> = (0..queries).flat_map(|i| (0..keys).map(move |j| u8::from(may_attend(i, j)))).collect();
        let (mask_slot, slope_slot) = (memory.add(&mask), memory.add(&wide(&(0..heads).map(slope).collect::<Vec<f32>>())));
        let options = interp::Options { host_scalars: vec![HostValue::Real(SCALE)], ordered_sums: in_order, ..options };
        let line = |slot: usize, dtype: DType, strides: [usize; 4]| View {
            slot: Slot(slot as u32),
            dtype,
            offset: 0,
            strides: strides.map(|n| n as u64).to_vec(),
        };
        let of_bias = mods.bias.unwrap_or(DType::F32);
        let types = [ty.dtype(), ty.dtype(), ty.dtype(), of_bias];
        let outputs: [usize; 4] = std::array::from_fn(|i| memory.add_filled((wanted[i].len() * types[i].bytes()) as u64, 0xff));
        let view = |slot: usize, elements: usize, rows: usize, heads: usize| View {
            slot: Slot(slot as u32),
            dtype: ty.dtype(),
            offset: 0,
            strides: [rows * heads * elements, elements, heads * elements, 1].map(|n| n as u64).to_vec(),
        };
        let problem = AttentionProblem {
            b: batch as u64,
            h: heads as u64,
            h_kv: kv_heads as u64,
            s_q: queries as u64,
            s_kv: keys as u64,
            q_rows: queries as u64,
            pages: 0,
            page_size: 0,
            blocks: 0,
            block_q: 0,
            block_kv: 0,
            kv_rows: keys as u64,
            d: head as u64,
            d_v: value as u64,
            compute: DType::F32,
            determinism: Determinism::Any,
            corner: if case.bottom_right { Corner::BottomRight } else { Corner::TopLeft },
            left: case.left,
            right: case.right,
            soft_cap: mods.soft_cap.map(Real),
            q: view(q_slot, head, queries, heads),
            k: view(k_slot, head, keys, kv_heads),
            v: view(v_slot, value, keys, kv_heads),
            bias: mods.bias.map(|dtype| line(bias_slot, dtype, [0, queries * keys, keys, 1])),
            mask: mods.mask.then(|| line(mask_slot, DType::U8, [0, 0, keys, 1])),
            slopes: mods.slopes.then(|| line(slope_slot, DType::F32, [0, 1, 0, 0])),
            sinks: None,
            q_lengths: None,
            kv_lengths: None,
            q_offsets: None,
            kv_offsets: None,
            page_table: None,
            block_map: None,
            mask_blocks: None,
            score: None,
            dropout: None,
            dropout_state: None,
            dropout_seed: None,
            q_descale: None,
            k_descale: None,
            v_descale: None,
            scale: if mods.is_bound { HostScalar::Bound(Slot(0)) } else { HostScalar::Fixed(Real(SCALE)) },
            pass: AttentionPass::Backward {
                o: view(o_slot, value, queries, heads),
                log_sum_exp: line(lse_slot, DType::F32, [heads * queries, queries, 1, 0]),
                d_o: view(d_o_slot, value, queries, heads),
                dq: Some(view(outputs[0], head, queries, heads)),
                dk: Some(view(outputs[1], head, keys, kv_heads)),
                dv: Some(view(outputs[2], value, keys, kv_heads)),
                dbias: mods.bias.map(|dtype| line(outputs[3], dtype, [0, queries * keys, keys, 1])),
                dsinks: None,
                d_score: Vec::new(),
            },
        };
        let accepted = Backward::accept(&Problem::Attention(problem), &Arch::virtual_device(2)).expect("accepted");
        let spec: Spec = accepted.configs().into_iter().find(|spec| spec.in_order == in_order).expect("both orders");
        let program = accepted.lower(&spec).expect("lowered");
        if let Err(findings) = interp::run(&program, &Kernels::new(), &mut memory, &options) {
            panic!("{spec} seed {}: {findings}", options.seed);
        }
        let names = ["dq", "dk", "dv", "dbias"].into_iter().zip(types);
        for (((name, dtype), slot), wanted) in names.zip(outputs).zip(&wanted).take(if mods.bias.is_some() { 4 } else { 3 }) {
            for (i, (bytes, &(wanted, bound))) in memory.to_vec(slot).chunks_exact(dtype.bytes()).zip(wanted).enumerate() {
                let got = match *bytes {
                    [a, b, c, d] => f64::from(f32::from_le_bytes([a, b, c, d])),
                    _ => from_half(ty, u16::from_le_bytes([bytes[0], bytes[1]])),
                };
                assert!((got - wanted).abs() <= bound, "{spec} seed {}: {name}[{i}] is {got}, wanted {wanted} ± {bound}", options.seed);
            }
        }
        found.push(memory.to_vec(outputs[0]));
    }
    found
}

/// Four blocks of keys share a gradient. Without an order its bits follow the schedule, so that a lost wait would be seen.
fn adds_in_the_order_of_keys(case: Case) {
    let case = Case { ty: Half::F16, heads: 2, queries: 64, shows_order: true, ..case };
    let of = |in_order: bool| {
        let mut all = schedules();
        all.iter_mut().for_each(|options| options.resident_ctas = 4);
        run_under(case, all.into_iter().map(|options| (in_order, options)).collect())
    };
    let is_one = |gradients: Vec<Vec<u8>>| gradients.windows(2).all(|pair| pair[0] == pair[1]);
    assert!(is_one(of(true)), "dq is of another order");
    assert!(!is_one(of(false)), "no schedule changes the order: the case shows nothing");
}

#[test]
fn shares_are_added_in_the_order_of_keys() {
    adds_in_the_order_of_keys(Case { keys: 512, ..SMALL });
    adds_in_the_order_of_keys(Case { keys: 512, head: 96, value: 96, ..SMALL });
}

#[test]
fn whole_blocks_of_both_sizes() {
    run(SMALL);
    run(Case { head: 128, value: 128, ..SMALL });
    run(Case { heads: 2, queries: 192, keys: 256, ..SMALL });
    run(Case { head: 96, value: 96, queries: 128, keys: 256, ..SMALL });
    run(Case { head: 128, value: 128, queries: 128, keys: 384, ..SMALL });
}

#[test]
fn ragged_blocks_and_heads_that_fill_no_tile() {
    run(Case { queries: 1, keys: 1, ..SMALL });
    run(Case { queries: 65, keys: 129, ..SMALL });
    run(Case { head: 40, value: 64, queries: 130, keys: 64, ..SMALL });
    run(Case { head: 72, value: 104, queries: 63, keys: 192, ..SMALL });
    run(Case { head: 72, value: 80, queries: 65, keys: 129, ..SMALL });
    run(Case { head: 88, value: 96, ty: Half::F16, queries: 130, keys: 64, ..SMALL });
    run(Case { queries: 70, keys: 150, ..SMALL });
}

#[test]
fn grouped_heads_are_summed_in_one_cta() {
    run(Case { batch: 2, heads: 4, kv_heads: 2, queries: 100, keys: 140, ..SMALL });
    run(Case { heads: 3, kv_heads: 1, queries: 100, keys: 140, right: Some(0), ..SMALL });
    run(Case { head: 80, value: 80, heads: 3, kv_heads: 1, queries: 100, keys: 140, right: Some(0), ..SMALL });
}

#[test]
fn windows_around_either_diagonal() {
    for (queries, keys) in [(1, 200), (200, 100), (130, 260), (257, 257)] {
        for bottom_right in [false, true] {
            for (left, right) in [(None, Some(0)), (Some(3), Some(0)), (Some(70), Some(20)), (Some(0), None)] {
                run(Case { queries, keys, left, right, bottom_right, ..SMALL });
            }
        }
    }
}

#[test]
fn what_stands_between_the_products() {
    let with = |score_mod: Mods| Case { heads: 2, queries: 70, keys: 150, score_mod, ..SMALL };
    run(with(Mods { soft_cap: Some(1.5), ..PLAIN }));
    run(Case { head: 128, value: 128, ..with(Mods { soft_cap: Some(3.0), bias: Some(DType::F32), ..PLAIN }) });
    run(Case { queries: 49, keys: 49, batch: 2, right: Some(0), ..with(Mods { bias: Some(DType::Bf16), mask: true, ..PLAIN }) });
    run(Case { ty: Half::F16, kv_heads: 1, ..with(Mods { bias: Some(DType::F16), is_bound: true, ..PLAIN }) });
    run(Case { bottom_right: true, left: Some(40), ..with(Mods { slopes: true, mask: true, ..PLAIN }) });
    run(Case { head: 96, value: 72, bottom_right: true, left: Some(40), ..with(Mods { soft_cap: Some(1.5), mask: true, ..PLAIN }) });
    let all = Mods { soft_cap: Some(2.0), bias: Some(DType::F32), mask: true, slopes: true, is_bound: true };
    run(Case { head: 72, value: 104, heads: 4, kv_heads: 2, right: Some(5), left: Some(90), ..with(all) });
}

#[test]
fn the_gradient_of_a_bias_over_batches_in_parts_and_whole() {
    let of = |dtype| Mods { bias: Some(dtype), ..PLAIN };
    // Five batches in parts of two and one; as many tiles as the chip holds, each with all of its batches; and windows that leave tiles out.
    run(Case { batch: 5, queries: 49, keys: 49, head: 32, value: 32, score_mod: of(DType::F32), ..SMALL });
    run(Case { batch: 3, heads: 4, kv_heads: 2, queries: 65, keys: 66, score_mod: of(DType::Bf16), ..SMALL });
    run(Case { batch: 2, queries: 130, keys: 129, right: Some(0), score_mod: of(DType::F32), ..SMALL });
    run(Case { ty: Half::F16, batch: 2, queries: 127, keys: 257, left: Some(3), right: Some(2), score_mod: of(DType::F16), ..SMALL });
    run(Case { batch: 2, queries: 65, keys: 65, head: 200, value: 136, score_mod: of(DType::F32), ..SMALL });
}

const LONG: Case = Case { head: 256, value: 256, keys: 64, ..SMALL };

#[test]
fn shares_of_long_heads_are_added_in_the_order_of_keys() {
    adds_in_the_order_of_keys(Case { head: 192, value: 128, keys: 256, ..LONG });
}

#[test]
fn long_heads_in_whole_blocks() {
    run(LONG);
    run(Case { ty: Half::F16, queries: 128, keys: 192, ..LONG });
    run(Case { head: 192, value: 128, queries: 192, keys: 128, ..LONG });
    run(Case { head: 192, value: 192, queries: 128, ..LONG });
}

#[test]
fn long_heads_in_ragged_blocks_and_those_that_fill_no_tile() {
    run(Case { queries: 1, keys: 1, ..LONG });
    run(Case { queries: 65, keys: 65, ..LONG });
    run(Case { head: 136, value: 72, queries: 63, keys: 63, ..LONG });
    run(Case { head: 40, value: 136, queries: 33, keys: 70, ..LONG });
    run(Case { head: 200, value: 248, queries: 95, keys: 129, ..LONG });
    run(Case { head: 184, value: 120, queries: 129, keys: 127, ..LONG });
}

#[test]
fn long_heads_in_groups_and_windows() {
    run(Case { batch: 2, heads: 4, kv_heads: 2, queries: 70, keys: 100, right: Some(0), ..LONG });
    run(Case { head: 192, value: 128, heads: 3, kv_heads: 1, queries: 100, keys: 140, right: Some(0), ..LONG });
    for (queries, keys) in [(1, 130), (130, 65)] {
        for bottom_right in [false, true] {
            for (left, right) in [(Some(3), Some(0)), (Some(70), Some(20)), (Some(0), None)] {
                run(Case { head: 192, value: 128, queries, keys, left, right, bottom_right, ..LONG });
            }
        }
    }
}

#[test]
fn long_heads_with_what_stands_between_the_products() {
    let all = Mods { soft_cap: Some(2.0), bias: Some(DType::F32), mask: true, slopes: true, is_bound: true };
    run(Case { queries: 70, keys: 70, heads: 2, kv_heads: 1, right: Some(5), left: Some(60), score_mod: all, ..LONG });
    let few = Mods { soft_cap: Some(1.5), bias: Some(DType::Bf16), ..PLAIN };
    run(Case { head: 192, value: 128, queries: 65, keys: 100, score_mod: few, ..LONG });
}
