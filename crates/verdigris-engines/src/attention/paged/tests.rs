//! Paged keys against loops over each sequence by itself: what no sequence reads is no number, and entries are what nobody checked.

use std::ops::Range;

use verdigris_graph::Problem;
use verdigris_kir::interp::{self, Kernels, Memory};

use super::super::decode::Decode;
use super::super::forward::Forward;
use super::super::half::Half;
use super::super::mma::Mma;
use super::super::simt::Simt;
use super::super::testing::{Numbers, from_half, halves, schedules};
use super::box_rows;
use crate::algorithm::Algorithm;
use crate::arch::Arch;

const B: usize = 3;
const H: usize = 4;
const H_KV: usize = 2;
const SCALE: f64 = 0.25;

/// Sequences in pages.
#[derive(Clone, Debug)]
struct Told {
    page_size: usize,
    pages: usize,
    lengths: [i32; B],
    table: [Vec<i32>; B],
}

impl Told {
    /// Sequences of these lengths: no two neighbours lie beside each other, and entries that no key needs are `spare`.
    fn new(page_size: usize, lengths: [i32; B], spare: i32) -> Told {
        let count = |length: i32| (length.max(0) as usize).div_ceil(page_size);
        let entries = lengths.into_iter().map(count).max().unwrap_or(0) + 1;
        // More than there are entries, and no multiple of 5, so that the numbers below are a permutation.
        let pages = B * entries + 1 + usize::from((B * entries + 1).is_multiple_of(5));
        let page = |b: usize, e: usize| if e < count(lengths[b]) { ((b * entries + e) * 5 + 3) as i32 % pages as i32 } else { spare };
        Told { page_size, pages, lengths, table: std::array::from_fn(|b| (0..entries).map(|e| page(b, e)).collect()) }
    }

    /// Two sequences begin with the same pages.
    fn sharing(mut self, pages: usize) -> Told {
        for e in 0..pages {
            self.table[2][e] = self.table[1][e];
        }
        self
    }

    /// Entries of sequence 2 that are no pages' numbers.
    fn spoiled(mut self) -> Told {
        for (e, entry) in [-7, i32::MIN, i32::MAX, self.pages as i32].into_iter().enumerate() {
            self.table[2][e] = entry;
        }
        self
    }

    fn capacity(&self) -> usize {
        self.table[0].len() * self.page_size
    }

    fn keys(&self, b: usize) -> usize {
        (self.lengths[b].max(0) as usize).min(self.capacity())
    }

    /// Where key `j` of a sequence is: its row among those of all pages.
    fn row(&self, b: usize, j: usize) -> usize {
        let page = i64::from(self.table[b][j / self.page_size]).clamp(0, self.pages as i64 - 1) as usize;
        page * self.page_size + j % self.page_size
    }

    fn problem(&self, dtype: &str, queries: Queries, d: usize, options: &str) -> Problem {
        let (s_kv, pages, page_size) = (self.capacity(), self.pages, self.page_size);
        let (s_q, ragged, offsets) = match queries {
            Queries::Each(count) => (count, String::new(), ""),
            Queries::Ragged { longest, rows, .. } => (longest, format!("q_rows={rows} ragged"), "q_offsets=i32"),
        };
        let words = format!(
            "attention forward {dtype} b={B} h={H} h_kv={H_KV} s_q={s_q} s_kv={s_kv} {ragged} pages={pages} page_size={page_size} d={d} \
             corner=bottom_right {options} right=0 q=bshd k=bshd v=bshd kv_lengths=i32 {offsets} page_table=i32 scale={SCALE} o=bshd \
             log_sum_exp=f32"
        );
        let problem: Problem = words.parse().unwrap_or_else(|error| panic!("{words}: {error}"));
        problem.canonical().unwrap_or_else(|error| panic!("{words}: {error}"))
    }
}

/// Queries of the sequences.
#[derive(Clone, Copy, Debug)]
enum Queries {
    /// So many of each.
    Each(usize),
    /// Behind each other in so many rows, where nobody checked the offsets; none has more than `longest`.
    Ragged { offsets: [i32; B + 1], rows: usize, longest: usize },
}

impl Queries {
    fn rows(&self) -> usize {
        match *self {
            Queries::Each(count) => B * count,
            Queries::Ragged { rows, .. } => rows,
        }
    }

    /// The rows of a sequence, worked out for itself.
    fn of(&self, b: usize) -> Range<usize> {
        match *self {
            Queries::Each(count) => b * count..(b + 1) * count,
            Queries::Ragged { offsets, rows, longest } => {
                let within = |offset: i32| i64::from(offset).clamp(0, rows as i64) as usize;
                let (begin, end) = (within(offsets[b]), within(offsets[b + 1]));
                begin..if end < begin { begin } else { end.min(begin + longest) }
            }
        }
    }

    /// Where the log-sum-exp of a row of a sequence's head is.
    fn total(&self, [b, h, row]: [usize; 3]) -> usize {
        match *self {
            Queries::Each(count) => (b * H + h) * count + row - b * count,
            Queries::Ragged { rows, .. } => h * rows + row,
        }
    }
}

fn wide(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn integers(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Every config of the engine in turn, one a schedule; `left` keys in front of the diagonal are attended, all without it.
fn run<A: Algorithm>(ty: Option<Half>, told: &Told, (queries, d): (Queries, usize), left: Option<usize>, slack: f64) {
    let dtype = ty.map_or("f32", Half::name);
    let options = left.map_or(String::new(), |left| format!("left={left}"));
    let problem = told.problem(dtype, queries, d, &options);
    let accepted = A::accept(&problem, &Arch::virtual_device(3)).unwrap_or_else(|refusal| panic!("{told:?}: {refusal}"));
    let mut numbers = Numbers::new((told.page_size * 1000) as u64 + u64::from(told.lengths[1].unsigned_abs()));
    let (rows, q_rows) = (told.pages * told.page_size, queries.rows());
    let (mut q, mut k, mut v) = (numbers.take(q_rows * H * d), numbers.take(rows * H_KV * d), numbers.take(rows * H_KV * d));
    let mut is_read = vec![false; rows];
    (0..B).for_each(|b| (0..told.keys(b)).for_each(|j| is_read[told.row(b, j)] = true));
    for row in (0..rows).filter(|&row| !is_read[row]) {
        k[row * H_KV * d..][..H_KV * d].fill(f32::NAN);
        v[row * H_KV * d..][..H_KV * d].fill(f32::INFINITY);
    }
    for row in (0..q_rows).filter(|row| !(0..B).any(|b| queries.of(b).contains(row))) {
        q[row * H * d..][..H * d].fill(f32::NAN);
    }

    // Of rows that are in no sequence nothing is written.
    let (mut o_right, mut lse_right) = (vec![None; q_rows * H * d], vec![None; q_rows * H]);
    for b in 0..B {
        let (keys, own_rows) = (told.keys(b), queries.of(b));
        let count = own_rows.len();
        for h in 0..H {
            for (i, row) in own_rows.clone().enumerate() {
                let own = (row * H + h) * d;
                let of_key = |values: &[f32], j: usize| -> Vec<f64> {
                    values[(told.row(b, j) * H_KV + h / (H / H_KV)) * d..][..d].iter().map(|&x| f64::from(x)).collect()
                };
                let end = (i + 1 + keys).saturating_sub(count).min(keys);
                let begin = left.map_or(0, |left| (i + keys).saturating_sub(count + left));
                let dot = |j: usize| of_key(&k, j).iter().zip(&q[own..][..d]).map(|(k, &q)| k * f64::from(q)).sum::<f64>();
                let scores: Vec<f64> = (begin..end).map(|j| SCALE * dot(j)).collect();
                let lse = scores.iter().map(|s| s.exp()).sum::<f64>().ln();
                lse_right[queries.total([b, h, row])] = Some(lse);
                let mut o = vec![0.0; d];
                for (j, score) in (begin..end).zip(scores) {
                    o.iter_mut().zip(of_key(&v, j)).for_each(|(o, v)| *o += (score - lse).exp() * v);
                }
                o_right[own..][..d].iter_mut().zip(o).for_each(|(right, o)| *right = Some(o));
            }
        }
    }

    let bytes = |values: &[f32]| ty.map_or_else(|| wide(values), |ty| halves(ty, values));
    for (number, options) in schedules().into_iter().enumerate() {
        let mut memory = Memory::new();
        [&q, &k, &v].into_iter().for_each(|values| {
            memory.add(&bytes(values));
        });
        memory.add(&integers(&told.lengths));
        if let Queries::Ragged { offsets, .. } = queries {
            memory.add(&integers(&offsets));
        }
        memory.add(&integers(&told.table.concat()));
        let element_bytes = if ty.is_some() { 2 } else { 4 };
        let o = memory.add_filled((o_right.len() * element_bytes) as u64, 0xff);
        let lse = memory.add_filled((lse_right.len() * 4) as u64, 0xff);
        let configs = accepted.configs();
        let program = accepted.lower(&configs[number % configs.len()]).expect("lowered");
        if let Err(findings) = interp::run(&program, &Kernels::new(), &mut memory, &options) {
            panic!("{told:?}: {queries:?}: {findings}");
        }
        let single = |chunk: &[u8]| f64::from(f32::from_le_bytes([chunk[0], chunk[1], chunk[2], chunk[3]]));
        let element = |chunk: &[u8]| ty.map_or_else(|| single(chunk), |ty| from_half(ty, u16::from_le_bytes([chunk[0], chunk[1]])));
        for (i, (chunk, right)) in memory.to_vec(o).chunks_exact(element_bytes).zip(&o_right).enumerate() {
            let got = element(chunk);
            let is_near =
                right.map_or_else(|| chunk.iter().all(|&byte| byte == 0xff), |right| (got - right).abs() <= slack * (1.0 + right.abs()));
            assert!(is_near, "{told:?}: {queries:?}: o[{i}] is {got}, right is {right:?}");
        }
        for (i, (chunk, right)) in memory.to_vec(lse).chunks_exact(4).zip(&lse_right).enumerate() {
            let got = single(chunk);
            let near = |right: f64| got == right || (got - right).abs() <= 2e-4 * (1.0 + right.abs());
            let is_near = right.map_or_else(|| chunk.iter().all(|&byte| byte == 0xff), near);
            assert!(is_near, "{told:?}: {queries:?}: log_sum_exp[{i}] is {got}, right is {right:?}");
        }
    }
}

/// Lengths of nothing, one, and around pages; a long sequence among short ones; pages of two sequences; entries that are no pages' numbers.
fn all() -> Vec<Told> {
    vec![
        Told::new(8, [0, 1, 150], -1),
        Told::new(16, [15, 17, 140], i32::MAX).sharing(1),
        Told::new(16, [130, 16, 70], -1).spoiled(),
        Told::new(24, [23, 25, 100], i32::MIN),
        Told::new(64, [63, 65, 129], -1).sharing(1),
        Told::new(128, [127, 128, 129], i32::MAX).sharing(1),
        Told::new(256, [255, 257, 1], -1),
        // Longer than there are entries, and below nothing.
        Told { lengths: [1000, -5, 32], ..Told::new(16, [33, -5, 32], 0) },
    ]
}

#[test]
fn pages_of_all_sizes_without_tensor_cores() {
    let small = [Told::new(1, [0, 1, 40], -1).sharing(1), Told::new(3, [2, 4, 50], i32::MAX).spoiled()];
    for told in small.iter().chain(&all()) {
        run::<Simt>(None, told, (Queries::Each(3), 8), None, 1e-5);
    }
}

#[test]
fn few_queries_read_pages() {
    for told in all() {
        run::<Decode>(Some(Half::Bf16), &told, (Queries::Each(3), 24), None, 2e-2);
    }
    let told = Told::new(32, [31, 100, 65], -1).sharing(2);
    // Shorter blocks, a window, and more rows than a tile has.
    run::<Decode>(Some(Half::F16), &told, (Queries::Each(1), 72), Some(40), 4e-3);
    run::<Decode>(Some(Half::Bf16), &told, (Queries::Each(40), 136), None, 2e-2);
}

#[test]
fn many_queries_read_pages() {
    for told in all() {
        run::<Forward>(Some(Half::Bf16), &told, (Queries::Each(5), 24), None, 2e-2);
        run::<Mma>(Some(Half::Bf16), &told, (Queries::Each(5), 24), None, 2e-2);
    }
    let told = Told::new(32, [31, 200, 65], -1).sharing(2);
    run::<Forward>(Some(Half::F16), &told, (Queries::Each(130), 72), Some(40), 4e-3);
    run::<Forward>(Some(Half::Bf16), &told, (Queries::Each(20), 200), None, 2e-2);
}

/// Rows of none in front and behind with a sequence without queries; none of none; later sequences in front; offsets below 0, falling, and beyond the rows.
const FEW: [[i32; B + 1]; 4] = [[1, 4, 4, 9], [0, 5, 6, 11], [6, 11, 0, 6], [-7, i32::MIN, 3, i32::MAX]];

fn few(offsets: [i32; B + 1]) -> Queries {
    Queries::Ragged { offsets, rows: 11, longest: 5 }
}

#[test]
fn ragged_queries_read_pages_without_tensor_cores() {
    let small = [Told::new(1, [0, 1, 40], -1).sharing(1), Told::new(3, [2, 4, 50], i32::MAX).spoiled()];
    for (number, told) in small.iter().chain(&all()).enumerate() {
        run::<Simt>(None, told, (few(FEW[number % FEW.len()]), 8), None, 1e-5);
    }
}

#[test]
fn few_ragged_queries_read_pages() {
    for (number, told) in all().iter().enumerate() {
        run::<Decode>(Some(Half::Bf16), told, (few(FEW[number % FEW.len()]), 24), None, 2e-2);
    }
    let told = Told::new(32, [31, 100, 65], -1).sharing(2);
    // More rows than a tile has: some tiles of a sequence have queries, others none.
    let tiles = Queries::Ragged { offsets: [2, 42, 43, 62], rows: 64, longest: 40 };
    run::<Decode>(Some(Half::F16), &told, (tiles, 72), Some(40), 4e-3);
    run::<Decode>(Some(Half::Bf16), &told, (tiles, 136), None, 2e-2);
}

#[test]
fn many_ragged_queries_read_pages() {
    for (number, told) in all().iter().enumerate() {
        run::<Forward>(Some(Half::Bf16), told, (few(FEW[number % FEW.len()]), 24), None, 2e-2);
        run::<Mma>(Some(Half::Bf16), told, (few(FEW[number % FEW.len()]), 24), None, 2e-2);
    }
    let told = Told::new(32, [31, 200, 65], -1).sharing(2);
    // Ends within tiles and at their edges, and a sequence cut to the longest.
    for offsets in [[3, 133, 134, 199], [64, 192, 0, 63], [0, 0, 150, 200]] {
        let queries = Queries::Ragged { offsets, rows: 200, longest: 130 };
        run::<Forward>(Some(Half::F16), &told, (queries, 72), Some(40), 4e-3);
    }
    run::<Forward>(Some(Half::Bf16), &told, (Queries::Ragged { offsets: [0, 1, 65, 70], rows: 70, longest: 64 }, 200), None, 2e-2);
}

#[test]
fn boxes_divide_pages_and_blocks() {
    let of = |page_size| [128, 112, 80, 64].map(|block| box_rows(page_size, block));
    assert_eq!(of(256), [128, 16, 16, 64]);
    assert_eq!(of(48), [16; 4]);
    assert_eq!(of(8), [8; 4]);
    assert_eq!(of(7), [1; 4]);
}

#[test]
fn who_takes_pages() {
    let arch = Arch::h200();
    let refused = |told: &Told| {
        let problem = told.problem("bf16", Queries::Each(3), 24, "");
        let refusals = [Decode::accept(&problem, &arch).err(), Forward::accept(&problem, &arch).err()];
        refusals.map(|refusal| refusal.map(|refusal| refusal.to_string()))
    };
    for page_size in [1, 3, 4, 12, 100] {
        for refusal in refused(&Told::new(page_size, [5; B], 0)) {
            let refusal = refusal.expect("pages that boxes do not divide");
            assert!(refusal.contains(&format!("pages of {page_size} keys")), "{refusal}");
        }
    }
    for page_size in [8, 16, 32, 40, 64, 128, 256, 1024] {
        assert_eq!(refused(&Told::new(page_size, [5; B], 0)), [None, None], "{page_size}");
    }
}
