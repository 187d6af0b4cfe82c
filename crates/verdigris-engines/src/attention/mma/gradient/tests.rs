//! What is taken, and what is chosen.

use verdigris_graph::Problem;

use super::super::super::ENGINES;
use super::Gradient;
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::engine::Reason;

fn parsed(words: &str) -> Problem {
    words.parse().unwrap_or_else(|error| panic!("{words}: {error}"))
}

/// The engines that take a problem, the least estimate first.
fn ranked(words: &str, arch: &Arch) -> Vec<&'static str> {
    let mut taking: Vec<(f64, &str)> = (ENGINES.iter())
        .filter_map(|engine| {
            let candidate = engine.accept(&parsed(words), arch).ok()?;
            Some((candidate.cost(&candidate.best()).expect("listed").us, engine.id().name))
        })
        .collect();
    taking.sort_by(|one, other| one.0.total_cmp(&other.0));
    taking.into_iter().map(|(_, name)| name).collect()
}

/// Problems of few and many rows, of each of these heads.
fn problems(shapes: &[&str], of: &[&str]) -> Vec<String> {
    let words = |(shape, head): (&str, &str)| format!("attention backward bf16 {shape} {head} log_sum_exp=f32 dq=bhsd dk=bhsd dv=bhsd");
    shapes.iter().flat_map(|&shape| of.iter().map(move |&head| (shape, head))).map(words).collect()
}

const TINY: &str = "b=1 h=1 s_q=16 s_kv=16";
const SMALL: &str = "b=1 h=8 s_q=100 s_kv=130";
const MANY: &str = "b=2 h=32 h_kv=8 s_q=1024 s_kv=1024";
const LONG: &str = "b=8 h=16 s_q=4096 s_kv=4096";

#[test]
fn it_is_preferred_to_no_tensor_cores() {
    let chips = [((8, 0), 108, 166_912), ((8, 6), 84, 101_376), ((8, 9), 128, 101_376), ((12, 0), 170, 101_376)];
    for (capability, sm_count, shared_bytes_per_cta) in chips {
        let arch = Arch { capability, sm_count, shared_bytes_per_cta, ..Arch::h200() };
        for words in problems(&[TINY, SMALL, MANY, LONG], &["d=64", "d=128 right=0", "d=192 d_v=128", "d=256", "d=80 soft_cap=30"]) {
            assert_eq!(ranked(&words, &arch), ["attention.mma", "attention.simt"], "{words} on {capability:?}");
        }
    }
    // With the margin of chips that have wgmma, estimates of the smallest are alike.
    for words in problems(&[MANY, LONG], &["d=36", "d=100 right=0", "d=130 d_v=66"]) {
        assert_eq!(ranked(&words, &Arch::h200()), ["attention.mma", "attention.simt"], "{words}");
    }
}

#[test]
fn where_wgmma_takes_a_problem_it_is_preferred() {
    for words in problems(&[SMALL, MANY, LONG], &["d=64", "d=96", "d=128 right=0", "d=192 d_v=128", "d=256", "d=64 soft_cap=30"]) {
        assert_eq!(ranked(&words, &Arch::h200())[0], "attention.backward", "{words}");
    }
}

#[test]
fn what_it_does_not_take_is_refused_by_name() {
    let refused = |words: &str| {
        let words = format!("attention backward {words} log_sum_exp=f32 dq=bhsd dk=bhsd dv=bhsd");
        Gradient::accept(&parsed(&words), &Arch::h200()).expect_err(&words).reason
    };
    assert_eq!(refused("bf16 b=1 h=1 s_q=65 s_kv=100 d=264"), Reason::Extent);
    assert_eq!(refused("bf16 b=1 h=1 s_q=65 s_kv=100 d=13"), Reason::Alignment);
    assert_eq!(refused("f32 b=1 h=1 s_q=1 s_kv=100 d=64"), Reason::DType);
    let forward = parsed("attention forward bf16 b=1 h=1 s_q=1 s_kv=100 d=64");
    assert_eq!(Gradient::accept(&forward, &Arch::h200()).expect_err("forward").reason, Reason::Direction);
    let small = Arch { capability: (8, 6), shared_bytes_per_cta: 50_000, ..Arch::h200() };
    let words = "attention backward bf16 b=1 h=1 s_q=65 s_kv=100 d=256 log_sum_exp=f32 dq=bhsd";
    assert_eq!(Gradient::accept(&parsed(words), &small).expect_err("101,376 bytes").reason, Reason::SharedMemory);
}

/// Sums of keys and of values stand in one launch where registers hold both; what nobody asked for is not launched.
#[test]
fn launches_are_those_that_are_asked_for() {
    let launches = |d: u32, asked: &str| {
        let words = format!("attention backward bf16 b=1 h=2 s_q=65 s_kv=130 d={d} log_sum_exp=f32 {asked}");
        let engine = Gradient::accept(&parsed(&words), &Arch::h200()).expect(&words);
        let config = *engine.configs().last().expect("a config");
        engine.lower(&config).expect(&words).launches().map(|launch| launch.grid[0]).collect::<Vec<_>>()
    };
    assert_eq!(launches(64, "dq=bhsd dk=bhsd dv=bhsd"), [6, 6, 4]);
    assert_eq!(launches(64, "dq=bhsd"), [6, 4]);
    assert_eq!(launches(64, "dv=bhsd"), [6, 6]);
    assert_eq!(launches(256, "dq=bhsd dk=bhsd dv=bhsd"), [6, 6, 6, 4]);
    assert_eq!(launches(256, "dv=bhsd"), [6, 6]);
}
