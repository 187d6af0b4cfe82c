//! The cases of convolution on one engine, interpreted and held against the reference.
//!
//! `VERDIGRIS_CASE` is a part of the ids of the cases that are run, in place of those that a test runs without it.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::path::Path;

use verdigris_engines::arch::Arch;
use verdigris_engines::engine::Engine;
use verdigris_engines::interpret::Parts;
use verdigris_kir::interp::{Kernels, Options};
use verdigris_reference::graph::Selection;
use verdigris_reference::graph_cases::{GraphCase, load_file};
use verdigris_reference::judge::Trial;

/// Which variants of a case run.
#[derive(Clone, Copy)]
pub(crate) enum Variants {
    /// Of each engine the default and one more by the case's number; of the variants of these, one.
    One,
    /// Of each engine the default and one more by the case's number.
    Two,
    /// All.
    All,
}

/// Every case of the corpus that a CPU can hold, with its number.
pub(crate) fn corpus() -> Vec<(usize, GraphCase)> {
    let cases = load_file(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../cases/conv.toml")).expect("the corpus loads");
    cases.into_iter().enumerate().filter(|(_, case)| !case.device_only).collect()
}

/// What `VERDIGRIS_CASE` says.
pub(crate) fn filter() -> Option<String> {
    std::env::var("VERDIGRIS_CASE").ok()
}

/// Runs the variants of a case; how many, 0 where the engine refuses, or what is wrong.
pub(crate) fn run(
    engine: &'static dyn Engine,
    case: &GraphCase,
    number: usize,
    arch: &Arch,
    kernels: &Kernels,
    variants: Variants,
) -> Result<usize, String> {
    let parts = match variants {
        Variants::All => Parts::all(&case.graph, arch, &[engine]),
        Variants::One | Variants::Two => Parts::new(&case.graph, arch, &[engine], number),
    };
    run_parts(case, &parts.map_err(|error| error.to_string())?, number, arch, kernels, variants)
}

/// As [`run`], of what the engine has for the case.
pub(crate) fn run_parts(
    case: &GraphCase,
    parts: &Parts,
    number: usize,
    arch: &Arch,
    kernels: &Kernels,
    variants: Variants,
) -> Result<usize, String> {
    if parts.configs.iter().any(Vec::is_empty) {
        return Ok(0);
    }
    let trial = Trial::new(&case.graph, case.distribution, case.seed, Selection::All)
        .map_err(|error| format!("{}: the reference: {error}", case.id))?;
    let count = parts.variants();
    let chosen = if matches!(variants, Variants::One) { number % count..number % count + 1 } else { 0..count };
    for variant in chosen.clone() {
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

/// Runs the cases of an engine, each under one config: those whose ids begin with one of the `beginnings`; or those that `VERDIGRIS_CASE` names, under all
/// that [`Variants::Two`] takes.
pub(crate) fn cases_of(engine: &str, beginnings: &[&str]) {
    let engine = verdigris_engines::engine(engine).expect("the engine is registered");
    let (filter, kernels) = (filter(), Kernels::new());
    let is_chosen = |case: &GraphCase| match &filter {
        Some(part) => case.id.contains(part.as_str()),
        None => beginnings.iter().any(|beginning| case.id.starts_with(beginning)),
    };
    let variants = if filter.is_some() { Variants::Two } else { Variants::One };
    let (mut taken, mut refused, mut wrong) = (0, 0, Vec::new());
    for (number, case) in corpus().iter().filter(|(_, case)| is_chosen(case)) {
        match run(engine, case, *number, &Arch::virtual_device(2 + *number as u32 % 3), &kernels, variants) {
            Ok(0) => refused += 1,
            Ok(_) => taken += 1,
            Err(what) => wrong.push(what),
        }
    }
    assert!(wrong.is_empty(), "{} of {} wrong:\n{}", wrong.len(), taken + wrong.len(), wrong.join("\n"));
    eprintln!("{taken} cases taken, {refused} refused");
    assert!(taken > 0, "no case was taken");
}
