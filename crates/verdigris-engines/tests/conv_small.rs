//! `conv.small_channels` and `conv.unfolded` on the cases that are made for few channels, interpreted and held against the reference.
//!
//! `VERDIGRIS_CASE` is a part of the ids of the cases that are run, each under every config; without it, every case runs under one of its
//! own.

use std::path::Path;

use verdigris_engines::arch::Arch;
use verdigris_engines::engine::Engine;
use verdigris_engines::interpret::Parts;
use verdigris_graph::{ConvExtents, ConvProblem, Direction, Problem};
use verdigris_kir::interp::{Kernels, Options};
use verdigris_reference::graph::Selection;
use verdigris_reference::graph_cases::{GraphCase, load_file};
use verdigris_reference::judge::Trial;
use verdigris_tensor::DType;

/// Runs the variants of a case that `pick` chooses; how many there were, or what is wrong.
fn check(engine: &'static dyn Engine, case: &GraphCase, kernels: &Kernels, number: usize, all: bool) -> Result<usize, String> {
    let arch = Arch::virtual_device(2 + number as u32 % 3);
    let parts = Parts::new(&case.graph, &arch, &[engine], number).map_err(|error| error.to_string())?;
    if parts.configs.iter().any(Vec::is_empty) {
        return Ok(0);
    }
    let trial = Trial::new(&case.graph, case.distribution, case.seed, Selection::All).map_err(|error| error.to_string())?;
    let variants = parts.variants();
    let chosen: Vec<usize> = if all { (0..variants).collect() } else { vec![number % variants] };
    for &variant in &chosen {
        let mut buffers = trial.inputs.buffers.clone();
        buffers.extend(trial.outputs().clone());
        let options = Options { sms: arch.sm_count, ..Options::schedule((number + variant) as u64) };
        let knobs: Vec<String> = parts.chosen(variant).map(|way| way.knobs.to_string()).collect();
        let fail = |what: String| format!("{} with {}: {}", case.id, knobs.join(" "), what.chars().take(900).collect::<String>());
        parts.interpret(variant, &mut buffers, &trial.inputs.scalars, kernels, &options).map_err(fail)?;
        trial.judge(&buffers).map_err(fail)?;
    }
    Ok(chosen.len())
}

/// Runs the cases of an engine: those whose id has `VERDIGRIS_CASE` in it, or begins with one of the `beginnings`.
fn cases_of(engine: &str, beginnings: &[&str]) {
    let engine = verdigris_engines::engine(engine).expect("the engine is registered");
    let filter = std::env::var("VERDIGRIS_CASE");
    let cases = load_file(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../cases/conv.toml")).expect("the corpus loads");
    let kernels = Kernels::new();
    let chosen = |case: &GraphCase| match &filter {
        Ok(part) => case.id.contains(part.as_str()),
        Err(_) => beginnings.iter().any(|beginning| case.id.starts_with(beginning)),
    };
    let (mut taken, mut refused, mut wrong) = (0, 0, Vec::new());
    for (number, case) in cases.iter().enumerate().filter(|(_, case)| !case.device_only && chosen(case)) {
        match check(engine, case, &kernels, number, filter.is_ok()) {
            Ok(0) => refused += 1,
            Ok(_) => taken += 1,
            Err(what) => wrong.push(what),
        }
    }
    assert!(wrong.is_empty(), "{} of {} wrong:\n{}", wrong.len(), taken + wrong.len(), wrong.join("\n"));
    eprintln!("{taken} cases taken, {refused} refused");
    assert!(taken > 0, "no case was taken");
}

#[test]
fn small_channels_under_its_configs() {
    cases_of("conv.small_channels", &["conv/small-channels"]);
}

#[test]
fn im2col_under_its_configs() {
    cases_of("conv.unfolded", &["conv/small-channels", "conv/few-outputs", "conv/patches"]);
}

/// What is copied beside a product begins while the launch in front of it ends where no element is read twice, as those of patches, and
/// waits elsewhere, where beginning early was measured to take longer.
#[test]
fn copies_begin_early_where_nothing_is_read_twice() {
    let engine = verdigris_engines::engine("conv.unfolded").expect("the engine is registered");
    let begins = |direction, filter: u64, stride: u64, beside: &str| {
        let extents = ConvExtents {
            direction,
            n: 8,
            c: 3,
            k: 64,
            groups: 1,
            input: [1, 32, 32],
            filter: [1, filter, filter],
            pads: [0; 3],
            strides: [1, stride, stride],
            dilations: [1; 3],
        };
        let problem = ConvProblem::packed(extents, DType::Bf16, DType::Bf16).expect("a valid problem");
        let candidate = engine.accept(&Problem::Conv(problem), &Arch::h200()).unwrap_or_else(|refusal| panic!("{refusal}"));
        let mut found = Vec::new();
        for knobs in candidate.knobs().configs() {
            let program = candidate.program(knobs).expect("a listed config has a program");
            found.extend(program.launches().filter(|launch| launch.kernel.name().contains(beside)).map(|launch| launch.overlap));
        }
        found.dedup();
        assert_eq!(found.len(), 1, "{direction:?} of {filter} by {stride}: launches of {beside} that do and do not");
        found[0]
    };
    for (direction, beside) in [(Direction::Fprop, "conv_unfold_b"), (Direction::Wgrad, "conv_unfold_b"), (Direction::Dgrad, "conv_fold_")]
    {
        assert!(begins(direction, 4, 4, beside), "{direction:?} of patches");
        assert!(!begins(direction, 5, 1, beside), "{direction:?} of taps that overlap");
        assert!(!begins(direction, 3, 2, beside), "{direction:?} of taps that overlap");
    }
}
