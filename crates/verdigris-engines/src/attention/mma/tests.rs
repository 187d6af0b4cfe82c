//! What is taken, with which copies, and which engine is preferred on chips with `wgmma` and without.

use verdigris_graph::{AttentionPass, AttentionProblem, Problem, Slot, View};
use verdigris_kir::interp::{self, Kernels, Memory};
use verdigris_tensor::DType;

use super::super::ENGINES;
use super::super::half::Half;
use super::super::testing::{from_half, halves, schedules};
use super::Mma;
use crate::algorithm::{Algorithm, Listed};
use crate::arch::Arch;
use crate::engine::{Engine, Knobs, Reason};

fn parsed(words: &str) -> Problem {
    let problem: Problem = words.parse().unwrap_or_else(|error| panic!("{words}: {error}"));
    problem.canonical().unwrap_or_else(|error| panic!("{words}: {error}"))
}

/// Chips without `wgmma`: an A100, a GeForce of 2020, one of 2022, and a Blackwell of the same line. Other numbers are those of the model's chip.
fn without_wgmma() -> [Arch; 4] {
    [((8, 0), 166_912), ((8, 6), 101_376), ((8, 9), 101_376), ((12, 0), 101_376)].map(|(capability, shared_bytes_per_cta)| Arch {
        capability,
        shared_bytes_per_cta,
        ..Arch::h200()
    })
}

/// The engines that take a problem with their estimates, the least first.
fn estimated(words: &str, arch: &Arch) -> Vec<(f64, &'static str)> {
    let mut taking: Vec<(f64, &str)> = (ENGINES.iter())
        .filter_map(|engine| {
            let candidate = engine.accept(&parsed(words), arch).ok()?;
            Some((candidate.cost(&candidate.best()).expect("listed").us, engine.id().name))
        })
        .collect();
    taking.sort_by(|one, other| one.0.total_cmp(&other.0));
    taking
}

fn ranked(words: &str, arch: &Arch) -> Vec<&'static str> {
    estimated(words, arch).into_iter().map(|(_, name)| name).collect()
}

#[test]
fn chips_without_wgmma_have_tensor_cores_too() {
    for arch in without_wgmma() {
        for words in [
            "attention forward bf16 b=2 h=16 s_q=2048 s_kv=2048 d=64",
            "attention forward f16 b=2 h=32 h_kv=8 s_q=1024 s_kv=4096 d=128 right=0",
            "attention forward bf16 b=1 h=8 s_q=500 s_kv=700 d=192 d_v=128",
            "attention forward bf16 b=1 h=8 s_q=500 s_kv=700 d=256",
            "attention forward bf16 b=4 h=8 s_q=300 s_kv=300 d=80 soft_cap=30",
        ] {
            assert_eq!(ranked(words, &arch), ["attention.mma", "attention.simt"], "{words} on {:?}", arch.capability);
        }
    }
}

/// Not told of tiles of 128 queries that are mostly empty (17, 64 and 130 queries), nor of one query beside a soft cap, which `attention.decode` does not take: on an H200 this engine took
/// 0.57 to 1.15 times as long as the fastest other one in eleven of twelve such rows. Nor of one head alone, whose keys it cuts into parts, as `attention.forward` does not.
#[test]
fn where_wgmma_takes_a_problem_it_is_preferred() {
    let mut others = Vec::new();
    for heads in ["b=1 h=8", "b=2 h=32 h_kv=8", "b=32 h=16"] {
        for rows in ["s_q=1 s_kv=40", "s_q=1 s_kv=8192", "s_q=1000 s_kv=1000", "s_q=4096 s_kv=4096"] {
            for of_head in ["d=64", "d=96", "d=128 right=0", "d=192 d_v=128", "d=256 right=0", "d=64 soft_cap=30", "d=128 soft_cap=30"] {
                if rows.starts_with("s_q=1 ") && of_head.contains("soft_cap") {
                    continue;
                }
                let words = format!("attention forward bf16 {heads} {rows} {of_head}");
                let all = estimated(&words, &Arch::h200());
                if all[0].1 == "attention.mma" {
                    others.push(format!("{words}: {all:.1?}"));
                }
            }
        }
    }
    assert!(others.is_empty(), "{}", others.join("\n"));
}

/// Rows of 12, 24 and 20 bytes, which no tensor map takes, and of 13 elements, a row of which begins within 4 bytes.
#[test]
fn what_tensor_maps_do_not_take_is_copied_in_4_and_8_bytes() {
    let taken = |words: &str| Mma::accept(&parsed(words), &Arch::h200());
    for (d, copy_bytes) in [(6, 4), (12, 8), (10, 4), (16, 16), (72, 16), (100, 8)] {
        let words = format!("attention forward bf16 b=1 h=4 s_q=200 s_kv=200 d={d}");
        assert_eq!(taken(&words).expect(&words).copy_bytes, copy_bytes, "{words}");
    }
    assert_eq!(ranked("attention forward bf16 b=2 h=8 s_q=512 s_kv=512 d=36", &Arch::h200())[0], "attention.mma");
    assert_eq!(taken("attention forward bf16 b=1 h=4 s_q=20 s_kv=20 d=13").expect_err("13 elements").reason, Reason::Alignment);
}

#[test]
fn tiles_that_do_not_fit_are_not_offered() {
    let small = Arch { capability: (8, 6), shared_bytes_per_cta: 50_000, ..Arch::h200() };
    let rows = |words: &str| {
        Mma::accept(&parsed(words), &small).map(|engine| {
            let mut rows: Vec<u32> = engine.configs().iter().map(|config| config.row_blocks).collect();
            rows.dedup();
            rows
        })
    };
    assert_eq!(rows("attention forward bf16 b=1 h=4 s_q=200 s_kv=200 d=64").expect("taken"), [2, 1]);
    assert_eq!(rows("attention forward bf16 b=1 h=4 s_q=200 s_kv=200 d=256").expect_err("67,584 bytes").reason, Reason::SharedMemory);
}

/// Tiles of 64 rows of a problem of two batches and four heads of keys, whole keys each.
fn tiles(words: &str) -> u32 {
    let engine = Mma::accept(&parsed(words), &without_wgmma()[0]).expect(words);
    let config = engine.configs().into_iter().find(|config| config.row_blocks == 1).expect("the small tile is offered always");
    let program = engine.lower(&config).expect(words);
    program.launches().next().expect("a launch").grid[0]
}

/// A query of each of eight heads is a tile's eight rows; 9 of each fill a tile and begin another, 57 take as many tiles as heads do by themselves.
#[test]
fn heads_that_share_keys_stand_in_one_tile_where_that_makes_fewer() {
    for (queries, of_keys) in [(1, 1), (8, 1), (9, 2), (56, 7), (57, 8), (64, 8), (65, 9), (128, 16)] {
        for more in ["", " right=0", " soft_cap=30"] {
            let words = format!("attention forward bf16 b=2 h=32 h_kv=4 s_q={queries} s_kv=4096 d=128{more}");
            assert_eq!(tiles(&words), 8 * of_keys, "{words}");
        }
    }
    assert_eq!(tiles("attention forward bf16 b=2 h=4 s_q=1 s_kv=4096 d=128"), 8);
}

/// One tile leaves a chip idle: its keys are cut into parts, of which each has a block at least.
#[test]
fn keys_are_cut_where_tiles_are_few() {
    let a100 = &without_wgmma()[0];
    let parts = |words: &str| {
        let engine = Mma::accept(&parsed(words), a100).expect(words);
        engine.configs().iter().filter(|config| config.row_blocks == 1).map(|config| config.parts).collect::<Vec<_>>()
    };
    let one = |keys: u32| format!("attention forward bf16 b=1 h=8 h_kv=1 s_q=1 s_kv={keys} d=128");
    let ctas = 2 * a100.sm_count;
    assert_eq!(parts(&one(64)), [1]);
    assert_eq!(parts(&one(256)), [1, 2, 4]);
    assert_eq!(parts(&one(65536)), [1, 2, 4, 8, 16, 32, 64, 128, ctas / 2]);
    // More parts than places twice over leave no more idle; six elements are not added up by fours.
    assert_eq!(parts("attention forward bf16 b=32 h=64 h_kv=8 s_q=1 s_kv=65536 d=128"), [1, 2]);
    assert_eq!(parts("attention forward bf16 b=1 h=1 s_q=1 s_kv=65536 d=8 d_v=6"), [1]);

    let problem = parsed(&one(65536));
    let candidate = Listed::<Mma>::new().accept(&problem, a100).expect("taken");
    let us = |knobs: &Knobs| candidate.cost(knobs).expect("listed").us;
    let whole = Knobs::new([("rows", 64), ("keys", 64), ("parts", 1)]);
    assert!(candidate.knobs().configs().contains(&whole));
    assert!(candidate.best().value("parts").is_some_and(|parts| parts >= 32), "{}", candidate.best());
    assert!(us(&candidate.best()) < us(&whole) / 4.0, "{} in place of {}", us(&candidate.best()), us(&whole));
    // A launch for the parts, which leave f32 of each row, and one that adds them up.
    let launches = |knobs: &Knobs| candidate.program(knobs).expect("lowered").launches().map(|launch| launch.grid[0]).collect::<Vec<_>>();
    assert_eq!(launches(&whole), [1]);
    assert_eq!(launches(&Knobs::new([("rows", 64), ("keys", 64), ("parts", 32)])), [32, 8]);
}

/// What belongs to a head is read for the first of those that stand together: where it is another for each, they do not.
#[test]
fn heads_that_make_scores_in_their_own_way_do_not_stand_together() {
    let plain = "attention forward bf16 b=2 h=32 h_kv=4 s_q=1 s_kv=4096 d=128";
    let Problem::Attention(plain) = parsed(plain) else { panic!("{plain}: attention") };
    let f32_at = |slot: u32, strides: [u64; 4]| Some(View { slot: Slot(slot), dtype: DType::F32, offset: 0, strides: strides.to_vec() });
    let slot = plain.slots().len() as u32;
    let rows = |problem: AttentionProblem| {
        let engine = Mma::accept(&Problem::Attention(problem), &without_wgmma()[0]).expect("taken");
        engine.specs().map(|spec| engine.members(&spec)).collect::<Vec<_>>()
    };
    assert_eq!(rows(plain.clone()), [8, 8]);
    assert_eq!(rows(AttentionProblem { slopes: f32_at(slot, [0, 0, 0, 0]), ..plain.clone() }), [8, 8]);
    assert_eq!(rows(AttentionProblem { slopes: f32_at(slot, [0, 1, 0, 0]), ..plain.clone() }), [1, 1]);
    assert_eq!(rows(AttentionProblem { bias: f32_at(slot, [4096, 0, 4096, 1]), ..plain.clone() }), [8, 8]);
    assert_eq!(rows(AttentionProblem { bias: f32_at(slot, [0, 4096, 4096, 1]), ..plain }), [1, 1]);
}

#[test]
fn what_others_take_is_refused_by_name() {
    let refused = |words: &str| Mma::accept(&parsed(words), &Arch::h200()).expect_err(words).reason;
    assert_eq!(refused("attention forward bf16 b=1 h=1 s_q=65 s_kv=100 d=264"), Reason::Extent);
    assert_eq!(refused("attention forward f32 b=1 h=1 s_q=1 s_kv=100 d=64"), Reason::DType);
    assert_eq!(refused("attention forward e4m3 b=1 h=1 s_q=1 s_kv=100 d=64 o=bf16"), Reason::DType);
    assert_eq!(refused("attention backward bf16 b=1 h=1 s_q=1 s_kv=100 d=64 log_sum_exp=f32 dq=bhsd"), Reason::Direction);
    assert_eq!(refused("gemm bf16 m=4 n=4 k=4"), Reason::Problem);
    let old = Arch { capability: (7, 5), ..Arch::h200() };
    assert_eq!(Mma::accept(&parsed("attention forward f16 b=1 h=1 s_q=9 s_kv=9 d=64"), &old).expect_err("7.5").reason, Reason::Target);
}

/// Keys and values as they lie in memory, of heads of 5 and of 8 elements: rows, and elements from one row to the next.
struct Kept {
    rows: usize,
    pitch: usize,
}

const QUERIES: usize = 70;
/// Configs that a problem of these has at most.
const MOST_CONFIGS: usize = 8;
const ELEMENTS: [usize; 2] = [5, 8];

/// Runs two sequences of one head whose queries are 0, so that results are the mean of the values that count: `counting` are the rows of these for each of the sequences. Whatever else there is, in
/// other rows and behind the elements of a row, is no number.
fn run(
    words: &str,
    kept: &Kept,
    counting: [std::ops::Range<usize>; 2],
    [lengths, q_offsets, kv_offsets]: [Option<&[i32]>; 3],
    strides_of_batches: [u64; 4],
) {
    let Kept { rows, pitch } = *kept;
    let [d, d_v] = ELEMENTS;
    let value = |row: usize, column: usize| ((7 * row + 3 * column) % 64) as f32 / 8.0;
    let counts = |row: usize| counting.iter().any(|counting| counting.contains(&row));
    let filled = |rows: usize, elements: usize, of: &dyn Fn(usize, usize) -> f32| -> Vec<f32> {
        (0..rows * pitch).map(|i| if i % pitch < elements { of(i / pitch, i % pitch) } else { f32::NAN }).collect()
    };
    let q = filled(2 * QUERIES, d, &|_, _| 0.0);
    let k = filled(rows, d, &|row, _| if counts(row) { 1.0 } else { f32::NAN });
    let v = filled(rows, d_v, &|row, column| if counts(row) { value(row, column) } else { f32::NAN });
    // Whatever the config, the problem is the same: how many there are is asked of the first one.
    let mut configs = 1;
    for (options, place) in schedules().into_iter().flat_map(|options| (0..MOST_CONFIGS).map(move |place| (options.clone(), place))) {
        if place >= configs {
            continue;
        }
        let mut memory = Memory::new();
        let slots = [&q, &k, &v].map(|values| memory.add(&halves(Half::Bf16, values)));
        let o = memory.add_filled((2 * QUERIES * pitch * 2) as u64, 0xff);
        let view = |slot: usize, of_batch: u64| View {
            slot: Slot(slot as u32),
            dtype: DType::Bf16,
            offset: 0,
            strides: vec![of_batch, 0, pitch as u64, 1],
        };
        let Problem::Attention(parsed) = words.parse().unwrap_or_else(|error| panic!("{words}: {error}")) else {
            panic!("{words}: attention");
        };
        let mut problem = AttentionProblem {
            q: view(slots[0], strides_of_batches[0]),
            k: view(slots[1], strides_of_batches[1]),
            v: view(slots[2], strides_of_batches[2]),
            pass: AttentionPass::Forward { o: view(o, strides_of_batches[3]), log_sum_exp: None, max_scores: None },
            ..parsed
        };
        let mut numbers = |numbers: &[i32]| {
            let slot = memory.add(&numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>());
            View { slot: Slot(slot as u32), dtype: DType::I32, offset: 0, strides: vec![1, 0, 0, 0] }
        };
        [problem.kv_lengths, problem.q_offsets, problem.kv_offsets] = [lengths, q_offsets, kv_offsets].map(|of| of.map(&mut numbers));
        if problem.is_ragged() {
            (problem.q_rows, problem.kv_rows) = (2 * QUERIES as u64, rows as u64);
        }
        let engine = Mma::accept(&Problem::Attention(problem), &Arch::virtual_device(2)).expect("taken");
        let all = engine.configs();
        configs = all.len();
        assert!(all.iter().any(|config| config.parts > 1) && configs <= MOST_CONFIGS, "{all:?}");
        let config = all[place];
        let what = format!("{words}, {}, seed {}", Mma::knobs(&config), options.seed);
        if let Err(findings) = interp::run(&engine.lower(&config).expect("lowered"), &Kernels::new(), &mut memory, &options) {
            panic!("{what}: {findings}");
        }
        let made = memory.to_vec(o);
        for (sequence, counting) in counting.iter().enumerate() {
            for column in 0..d_v {
                let all: Vec<f64> = counting.clone().map(|row| f64::from(value(row, column))).collect();
                let wanted = if all.is_empty() { 0.0 } else { all.iter().sum::<f64>() / all.len() as f64 };
                for query in 0..QUERIES {
                    let at = 2 * ((sequence * QUERIES + query) * pitch + column);
                    let got = from_half(Half::Bf16, u16::from_le_bytes([made[at], made[at + 1]]));
                    // Probabilities and results are rounded, each by half a unit.
                    let bound = wanted.abs() * 3.0 / 256.0 + 1e-6;
                    assert!((got - wanted).abs() <= bound, "{what}: query {query} of {sequence}, element {column}: {got}, wanted {wanted}");
                }
            }
        }
    }
}

#[test]
fn lengths_behind_which_anything_stands() {
    let words = "attention forward bf16 b=2 h=1 s_q=70 s_kv=150 d=5 d_v=8";
    let own = [70 * 16, 150 * 16, 150 * 16, 70 * 16];
    for (lengths, counting) in [([100, 1], [0..100, 150..151]), ([64, 65], [0..64, 150..215]), ([0, 150], [0..0, 150..300])] {
        run(words, &Kept { rows: 300, pitch: 16 }, counting, [Some(&lengths), None, None], own);
    }
}

#[test]
fn tensors_that_are_repeated() {
    let words = "attention forward bf16 b=2 h=1 s_q=70 s_kv=150 d=5 d_v=8";
    run(words, &Kept { rows: 150, pitch: 16 }, [0..150, 0..150], [None; 3], [70 * 16, 0, 0, 70 * 16]);
}

/// Ragged tensors have one batch: its stride leads nowhere.
#[test]
fn strides_of_the_one_batch_of_ragged_tensors() {
    let words = "attention forward bf16 b=2 h=1 s_q=70 s_kv=150 d=5 d_v=8";
    let offsets = [None, Some(&[0, 70, 140][..]), Some(&[3, 68, 218][..])];
    run(words, &Kept { rows: 300, pitch: 16 }, [3..68, 68..218], offsets, [1 << 20; 4]);
}
