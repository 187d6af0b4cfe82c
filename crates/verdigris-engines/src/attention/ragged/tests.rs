//! Sequences behind each other against loops over each by itself: with neighbours that are no numbers, rows that belong to none, and offsets that nobody checked.

use std::ops::Range;

use verdigris_graph::Problem;
use verdigris_kir::interp::{self, Kernels, Memory};

use super::super::backward::Backward;
use super::super::decode::Decode;
use super::super::forward::Forward;
use super::super::half::Half;
use super::super::mma::Mma;
use super::super::simt::Simt;
use super::super::testing::{Numbers, from_half, halves, schedules};
use crate::algorithm::Algorithm;
use crate::arch::Arch;

const LONGEST: [usize; 2] = [70, 90];
/// As few queries as rows of all heads that share keys may have.
const FEW: [usize; 2] = [64, 90];
const ROWS: [usize; 2] = [140, 200];
const H: usize = 2;
const H_KV: usize = 1;
/// Elements of a short head, and of a long one.
const D: usize = 24;
const LONG_D: usize = 136;
const SCALE: f64 = 0.25;

/// Offsets of three sequences, and whether the last one's tensors are no numbers.
type Told = ([[i32; 4]; 2], bool);

const TOLD: &[Told] = &[
    // Rows of none in front and behind, a sequence without queries, one as long as may be.
    ([[2, 72, 72, 131], [3, 40, 110, 190]], false),
    // A sequence without keys; what is behind those in front is no number.
    ([[0, 65, 66, 130], [0, 64, 64, 140]], true),
    ([[0, 1, 66, 67], [0, 85, 110, 200]], true),
    // Ends at the edges of tiles and beside them, with a sequence without queries between no numbers.
    ([[0, 64, 64, 134], [0, 63, 128, 200]], true),
    ([[0, 63, 128, 140], [0, 65, 129, 193]], true),
    // Sequences of which the later ones lie in front.
    ([[70, 140, 0, 70], [110, 200, 20, 110]], true),
    // Below 0, falling, beyond the rows, and longer than may be.
    ([[-7, i32::MIN, 20, i32::MAX], [90, -5, 250, 10]], false),
    ([[i32::MAX, i32::MIN, 139, 140], [199, 200, 5, 6]], false),
];

/// The rows of a sequence, worked out for itself.
fn rows(which: usize, offsets: &[i32], n: usize, longest: [usize; 2]) -> Range<usize> {
    let within = |offset: i32| i64::from(offset).clamp(0, ROWS[which] as i64) as usize;
    let (begin, end) = (within(offsets[n]), within(offsets[n + 1]));
    begin..if end < begin { begin } else { end.min(begin + longest[which]) }
}

/// What is right; NaN where nothing is written.
struct Right {
    o: Vec<f64>,
    lse: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
}

struct Data {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    d_o: Vec<f32>,
}

fn data((offsets, spoiled): Told, d: usize, longest: [usize; 2]) -> Data {
    let mut numbers = Numbers::new(offsets[0][1].unsigned_abs().into());
    let (mut q, mut k, mut v) = (numbers.take(ROWS[0] * H * d), numbers.take(ROWS[1] * H_KV * d), numbers.take(ROWS[1] * H_KV * d));
    let mut d_o = numbers.take(ROWS[0] * H * d);
    // What is in no sequence is never multiplied, nor is what is in another one.
    for which in [0, 1] {
        for row in 0..ROWS[which] {
            let of = (0..3).find(|&n| rows(which, &offsets[which], n, longest).contains(&row));
            if of.is_none() || (spoiled && of == Some(2)) {
                let (width, tensors) = if which == 0 { (H * d, [&mut q, &mut d_o]) } else { (H_KV * d, [&mut k, &mut v]) };
                let [first, second] = tensors.map(|values| &mut values[row * width..][..width]);
                first.fill(f32::NAN);
                second.fill(f32::INFINITY);
            }
        }
    }
    Data { q, k, v, d_o }
}

fn right((offsets, _): Told, data: &Data, d: usize, longest: [usize; 2]) -> Right {
    let nan = |n: usize| vec![f64::NAN; n];
    let mut right = Right {
        o: nan(ROWS[0] * H * d),
        lse: nan(H * ROWS[0]),
        dq: nan(ROWS[0] * H * d),
        dk: nan(ROWS[1] * H_KV * d),
        dv: nan(ROWS[1] * H_KV * d),
    };
    for n in 0..3 {
        let (queries, keys) = (rows(0, &offsets[0], n, longest), rows(1, &offsets[1], n, longest));
        let shift = keys.len() as i64 - queries.len() as i64;
        keys.clone().for_each(|key| {
            right.dk[key * d..][..d].fill(0.0);
            right.dv[key * d..][..d].fill(0.0);
        });
        for h in 0..H {
            for (i, query) in queries.clone().enumerate() {
                let at = |values: &[f32], row: usize| -> Vec<f64> { values[row * d..][..d].iter().map(|&x| f64::from(x)).collect() };
                let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                let own = query * H + h;
                let (q, d_o) = (at(&data.q, own), at(&data.d_o, own));
                let attended: Vec<usize> = keys.clone().take((i as i64 + shift + 1).max(0) as usize).collect();
                let scores: Vec<f64> = attended.iter().map(|&key| SCALE * dot(&q, &at(&data.k, key))).collect();
                let sum: f64 = scores.iter().map(|s| s.exp()).sum();
                let lse = sum.ln();
                let p: Vec<f64> = scores.iter().map(|s| (s - lse).exp()).collect();
                let mut o = vec![0.0; d];
                for (p, &key) in p.iter().zip(&attended) {
                    o.iter_mut().zip(at(&data.v, key)).for_each(|(o, v)| *o += p * v);
                }
                right.lse[h * ROWS[0] + query] = lse;
                right.o[own * d..][..d].copy_from_slice(&o);
                let rest = dot(&d_o, &o);
                let mut dq = vec![0.0; d];
                for (p, &key) in p.iter().zip(&attended) {
                    let ds = SCALE * p * (dot(&d_o, &at(&data.v, key)) - rest);
                    dq.iter_mut().zip(at(&data.k, key)).for_each(|(dq, k)| *dq += ds * k);
                    right.dk[key * d..][..d].iter_mut().zip(&q).for_each(|(dk, q)| *dk += ds * q);
                    right.dv[key * d..][..d].iter_mut().zip(&d_o).for_each(|(dv, d_o)| *dv += p * d_o);
                }
                right.dq[own * d..][..d].copy_from_slice(&dq);
            }
        }
    }
    right
}

/// A problem of these sequences.
fn problem(dtype: &str, pass: &str, outputs: &str, d: usize, longest: [usize; 2]) -> Problem {
    let [[s_q, s_kv], [q_rows, kv_rows]] = [longest, ROWS];
    let words = format!(
        "attention {pass} {dtype} b=3 h={H} h_kv={H_KV} s_q={s_q} s_kv={s_kv} q_rows={q_rows} kv_rows={kv_rows} ragged d={d} corner=bottom_right \
         right=0 q=bshd k=bshd v=bshd q_offsets=i32 kv_offsets=i32 scale={SCALE} o=bshd {outputs}"
    );
    let problem: Problem = words.parse().unwrap_or_else(|error| panic!("{words}: {error}"));
    problem.canonical().unwrap_or_else(|error| panic!("{words}: {error}"))
}

/// Bytes as numbers, and whether they are those that were there before.
fn numbers(ty: Option<Half>, bytes: &[u8]) -> Vec<(f64, bool)> {
    let of = |chunk: &[u8]| match ty {
        Some(ty) => from_half(ty, u16::from_le_bytes([chunk[0], chunk[1]])),
        None => f64::from(f32::from_le_bytes([chunk[0], chunk[1], chunk[2], chunk[3]])),
    };
    bytes.chunks_exact(if ty.is_some() { 2 } else { 4 }).map(|chunk| (of(chunk), chunk.iter().all(|&byte| byte == 0xff))).collect()
}

/// `told` as the kernels left it against what is right: what belongs to no sequence is as it was.
fn judge(what: &str, told: &Told, got: &[(f64, bool)], right: &[f64], own: &[bool], slack: f64) {
    assert_eq!(got.len(), right.len());
    for (i, ((&(got, untouched), &right), &own)) in got.iter().zip(right).zip(own).enumerate() {
        let row = own.then_some(());
        match row {
            None => assert!(untouched, "{what} of {told:?}: element {i} of no sequence is {got}"),
            Some(()) => {
                assert!(!untouched, "{what} of {told:?}: element {i} is not written");
                let is_near = right.is_nan() || got == right || (got - right).abs() <= slack * (1.0 + right.abs());
                assert!(is_near, "{what} of {told:?}: element {i} is {got}, right is {right}");
            }
        }
    }
}

/// Which elements belong to a sequence: `width` a row, rows outside of heads, or inside of them.
fn owned(which: usize, offsets: &[i32; 4], [heads, width]: [usize; 2], is_inside: bool, longest: [usize; 2]) -> Vec<bool> {
    let is_own = |row: usize| (0..3).any(|n| rows(which, offsets, n, longest).contains(&row));
    let all = ROWS[which] * heads * width;
    (0..all).map(|i| is_own(if is_inside { i / width % ROWS[which] } else { i / (heads * width) })).collect()
}

fn wide(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn forward<A: Algorithm>(ty: Option<Half>, dtype: &str, slack: f64, longest: [usize; 2]) {
    let problem = problem(dtype, "forward", "log_sum_exp=f32", D, longest);
    let accepted = A::accept(&problem, &Arch::virtual_device(3)).expect("taken");
    for told in TOLD {
        let (data, bytes) = (data(*told, D, longest), |values: &[f32]| ty.map_or_else(|| wide(values), |ty| halves(ty, values)));
        let right = right(*told, &data, D, longest);
        for (number, options) in schedules().into_iter().enumerate() {
            let mut memory = Memory::new();
            for values in [&data.q, &data.k, &data.v] {
                memory.add(&bytes(values));
            }
            for offsets in told.0 {
                memory.add(&offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect::<Vec<u8>>());
            }
            let o = memory.add_filled((right.o.len() * if ty.is_some() { 2 } else { 4 }) as u64, 0xff);
            let lse = memory.add_filled((right.lse.len() * 4) as u64, 0xff);
            let configs = accepted.configs();
            let program = accepted.lower(&configs[number % configs.len()]).expect("lowered");
            if let Err(findings) = interp::run(&program, &Kernels::new(), &mut memory, &options) {
                panic!("{told:?}: {findings}");
            }
            judge("o", told, &numbers(ty, &memory.to_vec(o)), &right.o, &owned(0, &told.0[0], [H, D], false, longest), slack);
            judge("lse", told, &numbers(None, &memory.to_vec(lse)), &right.lse, &owned(0, &told.0[0], [H, 1], true, longest), 2e-4);
        }
    }
}

#[test]
fn sequences_stay_by_themselves() {
    forward::<Simt>(None, "f32", 1e-5, LONGEST);
    forward::<Forward>(Some(Half::Bf16), "bf16", 2e-2, LONGEST);
    forward::<Mma>(Some(Half::Bf16), "bf16", 2e-2, LONGEST);
}

#[test]
fn sequences_of_few_queries_stay_by_themselves() {
    forward::<Decode>(Some(Half::Bf16), "bf16", 2e-2, FEW);
}

fn backward<A: Algorithm>(ty: Option<Half>, dtype: &str, d: usize, slack: f64) {
    let problem = problem(dtype, "backward", "log_sum_exp=f32 d_o=bshd dq=bshd dk=bshd dv=bshd", d, LONGEST);
    let accepted = A::accept(&problem, &Arch::virtual_device(3)).expect("taken");
    for told in TOLD {
        let (data, bytes) = (data(*told, d, LONGEST), |values: &[f32]| ty.map_or_else(|| wide(values), |ty| halves(ty, values)));
        let right = right(*told, &data, d, LONGEST);
        let narrow = |values: &[f64]| values.iter().map(|&value| value as f32).collect::<Vec<f32>>();
        for (number, options) in schedules().into_iter().enumerate() {
            let mut memory = Memory::new();
            for values in [&data.q, &data.k, &data.v] {
                memory.add(&bytes(values));
            }
            for offsets in told.0 {
                memory.add(&offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect::<Vec<u8>>());
            }
            memory.add(&bytes(&narrow(&right.o)));
            memory.add(&wide(&narrow(&right.lse)));
            memory.add(&bytes(&data.d_o));
            let size = if ty.is_some() { 2 } else { 4 };
            let [dq, dk, dv] = [&right.dq, &right.dk, &right.dv].map(|of| memory.add_filled((of.len() * size) as u64, 0xff));
            let configs = accepted.configs();
            let program = accepted.lower(&configs[number % configs.len()]).expect("lowered");
            if let Err(findings) = interp::run(&program, &Kernels::new(), &mut memory, &options) {
                panic!("{told:?}: {findings}");
            }
            for (what, slot, right, which, heads) in
                [("dq", dq, &right.dq, 0, H), ("dk", dk, &right.dk, 1, H_KV), ("dv", dv, &right.dv, 1, H_KV)]
            {
                judge(
                    what,
                    told,
                    &numbers(ty, &memory.to_vec(slot)),
                    right,
                    &owned(which, &told.0[which], [heads, d], false, LONGEST),
                    slack,
                );
            }
        }
    }
}

#[test]
fn gradients_of_sequences_stay_by_themselves() {
    backward::<Simt>(None, "f32", D, 1e-4);
    backward::<Backward>(Some(Half::Bf16), "bf16", D, 4e-2);
}

#[test]
fn gradients_of_sequences_with_long_heads_stay_by_themselves() {
    backward::<Backward>(Some(Half::Bf16), "bf16", LONG_D, 8e-2);
}

#[test]
fn who_takes_ragged_tensors() {
    let of = |pass, outputs| problem("bf16", pass, outputs, D, LONGEST);
    let refusal = Decode::accept(&of("forward", "log_sum_exp=f32"), &Arch::h200()).expect_err("more than a few queries");
    assert!(refusal.to_string().contains("70 queries, taken up to 64"), "{refusal}");
    let few = problem("bf16", "forward", "log_sum_exp=f32", D, FEW);
    assert!(Decode::accept(&few, &Arch::h200()).is_ok() && Forward::accept(&few, &Arch::h200()).is_ok());
    let told = of("backward", "log_sum_exp=f32 d_o=bshd dq=bshd").to_string().replace(" q_offsets=", " q_lengths=i32 q_offsets=");
    let with_lengths = Backward::accept(&told.parse().expect(&told), &Arch::h200());
    assert!(with_lengths.is_ok(), "{with_lengths:?}");
}
