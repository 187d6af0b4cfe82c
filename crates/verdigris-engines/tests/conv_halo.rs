//! `conv.halo` on the cases that are made for it, interpreted and held against the reference.
//!
//! `VERDIGRIS_CASE` is a part of the ids of the cases that are run, each under every config; without it, every case runs under one of its
//! own.

use std::path::Path;

use verdigris_engines::arch::Arch;
use verdigris_engines::engine::Engine;
use verdigris_engines::interpret::Parts;
use verdigris_kir::interp::{Kernels, Options};
use verdigris_reference::graph::Selection;
use verdigris_reference::graph_cases::{GraphCase, load_file};
use verdigris_reference::judge::Trial;

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

#[test]
fn its_cases_under_its_configs() {
    let engine = verdigris_engines::engine("conv.halo").expect("the engine is registered");
    let filter = std::env::var("VERDIGRIS_CASE");
    let cases = load_file(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../cases/conv.toml")).expect("the corpus loads");
    let kernels = Kernels::new();
    let chosen = |case: &GraphCase| match &filter {
        Ok(part) => case.id.contains(part.as_str()),
        Err(_) => case.id.starts_with("conv/halo"),
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
