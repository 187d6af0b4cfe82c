//! What is taken, with which copies, and which engine is preferred on chips with `wgmma` and without.

use verdigris_graph::Problem;

use super::super::ENGINES;
use super::Mma;
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::engine::Reason;

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

#[test]
fn where_wgmma_takes_a_problem_it_is_preferred() {
    let mut others = Vec::new();
    for heads in ["b=1 h=1", "b=1 h=8", "b=2 h=32 h_kv=8", "b=32 h=16"] {
        for rows in [
            "s_q=1 s_kv=40",
            "s_q=1 s_kv=8192",
            "s_q=17 s_kv=4000",
            "s_q=64 s_kv=64",
            "s_q=130 s_kv=300",
            "s_q=1000 s_kv=1000",
            "s_q=4096 s_kv=4096",
        ] {
            for of_head in
                ["d=64", "d=96", "d=128 right=0", "d=192 d_v=128", "d=256 left=100 right=0", "d=64 soft_cap=30", "d=128 soft_cap=30"]
            {
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
        Mma::accept(&parsed(words), &small).map(|engine| engine.configs().iter().map(|config| config.row_blocks).collect::<Vec<_>>())
    };
    assert_eq!(rows("attention forward bf16 b=1 h=4 s_q=200 s_kv=200 d=64").expect("taken"), [2, 1]);
    assert_eq!(rows("attention forward bf16 b=1 h=4 s_q=200 s_kv=200 d=256").expect_err("67,584 bytes").reason, Reason::SharedMemory);
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
