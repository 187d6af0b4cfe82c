//! Gradients of tensors with lengths: what stands behind a length changes no bit of what counts, and rows there get 0, whatever they hold.

use verdigris_graph::Problem;
use verdigris_kir::interp::{self, Kernels, Memory, Options};

use super::super::backward::Backward;
use super::super::half::Half;
use super::super::mma::MmaOrGradient;
use super::super::testing::{Numbers, halves, schedules};
use crate::algorithm::Algorithm;
use crate::arch::Arch;

const H: usize = 2;
const LONGEST: [usize; 2] = [130, 150];
/// Of each batch queries and keys that count: nothing, one, all, and around the edges of blocks and tiles.
const LENGTHS: [[usize; 2]; 8] = [[0, 40], [40, 0], [1, 1], [130, 150], [63, 127], [64, 128], [65, 129], [128, 64]];

/// `[batch][matrix][row][width]`, where rows behind the lengths are `beyond`.
fn rows(mut values: Vec<f32>, which: usize, [matrices, width]: [usize; 2], beyond: f32) -> Vec<f32> {
    for (row, values) in values.chunks_exact_mut(width).enumerate() {
        let (batch, row) = (row / LONGEST[which] / matrices, row % LONGEST[which]);
        if row >= LENGTHS[batch][which] {
            values.fill(beyond);
        }
    }
    values
}

/// Gradients of queries, keys and values, and of the sinks, of a config of an engine.
fn gradients<A: Algorithm>(ty: Half, words: &str, d: usize, config: usize, beyond: [f32; 2], options: &Options) -> Vec<Vec<u8>> {
    let b = LENGTHS.len();
    let problem: Problem = words.parse().unwrap_or_else(|error| panic!("{words}: {error}"));
    let problem = problem.canonical().unwrap_or_else(|error| panic!("{words}: {error}"));
    let accepted = A::accept(&problem, &Arch::virtual_device(3)).unwrap_or_else(|refusal| panic!("{words}: {refusal}"));
    let mut numbers = Numbers::new(7);
    let mut memory = Memory::new();
    let mut add = |which: usize, heads: usize, beyond: f32| {
        memory.add(&halves(ty, &rows(numbers.take(b * LONGEST[which] * heads * d), which, [1, heads * d], beyond)));
    };
    let [other, own] = beyond;
    add(0, H, own);
    add(1, 1, other);
    add(1, 1, own);
    memory.add(&[0.5f32, -0.25].iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
    for which in [0, 1] {
        memory.add(&LENGTHS.iter().flat_map(|lengths| (lengths[which] as i32).to_le_bytes()).collect::<Vec<u8>>());
    }
    let mut numbers = Numbers::new(8);
    let o = rows(numbers.take(b * LONGEST[0] * H * d), 0, [1, H * d], other);
    memory.add(&halves(ty, &o));
    // Of each query and head, as if its scores were about 1.
    let lse = rows(vec![4.0; b * LONGEST[0] * H], 0, [H, 1], own);
    memory.add(&lse.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
    let d_o = rows(numbers.take(b * LONGEST[0] * H * d), 0, [1, H * d], own);
    memory.add(&halves(ty, &d_o));
    let sizes = [b * LONGEST[0] * H * d * 2, b * LONGEST[1] * d * 2, b * LONGEST[1] * d * 2, H * 4];
    let outputs = sizes.map(|size| memory.add_filled(size as u64, 0xff));
    let configs = accepted.configs();
    let program = accepted.lower(&configs[config % configs.len()]).expect("lowered");
    if let Err(findings) = interp::run(&program, &Kernels::new(), &mut memory, options) {
        panic!("{words}: {findings}");
    }
    outputs.map(|output| memory.to_vec(output)).into()
}

fn padding_is_not_seen<A: Algorithm>(ty: Half, dtype: &str, d: usize, more: &str) {
    let [s_q, s_kv] = LONGEST;
    let words = format!(
        "attention backward {dtype} b={} h={H} h_kv=1 s_q={s_q} s_kv={s_kv} d={d} corner=bottom_right {more} q=bshd k=bshd v=bshd sinks=f32 q_lengths=i32 \
         kv_lengths=i32 scale=0.25 o=bshd log_sum_exp=f32 d_o=bshd dq=bshd dk=bshd dv=bshd dsinks=f32",
        LENGTHS.len()
    );
    for (config, options) in schedules().into_iter().enumerate() {
        let of = |beyond| gradients::<A>(ty, &words, d, config, beyond, &options);
        let (plain, spoiled) = (of([0.0; 2]), of([f32::NAN, f32::INFINITY]));
        assert!(plain == spoiled, "{words}: what is behind a length is seen");
        for (what, bytes, which, width) in [("dq", &plain[0], 0, H * d), ("dk", &plain[1], 1, d), ("dv", &plain[2], 1, d)] {
            for (row, bytes) in bytes.chunks_exact(width * 2).enumerate() {
                let (batch, row) = (row / LONGEST[which], row % LONGEST[which]);
                let is_zero = bytes.chunks_exact(2).all(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]) & 0x7fff == 0);
                let counts = row < LENGTHS[batch][which];
                assert!(counts || is_zero, "{words}: {what} of row {row} of batch {batch}, which does not count, is not 0");
                let has_pairs = LENGTHS[batch][1 - which] > 0 && more.is_empty();
                assert!(!(counts && has_pairs && is_zero), "{words}: {what} of row {row} of batch {batch} is 0");
            }
        }
    }
}

#[test]
fn padding_is_not_seen_by_short_heads() {
    padding_is_not_seen::<Backward>(Half::Bf16, "bf16", 64, "right=0");
    padding_is_not_seen::<Backward>(Half::F16, "f16", 72, "");
}

#[test]
fn padding_is_not_seen_by_long_heads() {
    padding_is_not_seen::<Backward>(Half::F16, "f16", 136, "left=90 right=0");
}

#[test]
fn padding_is_not_seen_beside_a_cap() {
    padding_is_not_seen::<Backward>(Half::Bf16, "bf16", 128, "right=0 soft_cap=2");
}

#[test]
fn padding_is_not_seen_without_wgmma() {
    padding_is_not_seen::<MmaOrGradient>(Half::Bf16, "bf16", 64, "right=0");
}
