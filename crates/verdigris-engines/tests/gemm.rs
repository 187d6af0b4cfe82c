//! Every case of `cases/gemm.toml` on the portable GEMM engines, by the interpreter, against the reference.

mod harness;

use std::collections::BTreeMap;
use std::path::Path;

use harness::{Outcome, verify, verify_where};
use rayon::prelude::*;
use verdigris_engines::arch::Arch;
use verdigris_engines::engine::Knobs;
use verdigris_kir::interp::Kernels;
use verdigris_reference::cases::{Case, load_file};

fn cases() -> Vec<Case> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../cases/gemm.toml");
    load_file(&path).expect("the case file is valid")
}

/// Runs all cases on an engine, and returns how many it refused, by reason.
fn all_cases_on(name: &str) -> BTreeMap<&'static str, usize> {
    let engine = verdigris_engines::engine(name).expect("the engine is registered");
    let arch = Arch::virtual_device(4);
    let kernels = Kernels::new();
    let mut refused = BTreeMap::new();
    let mut failures = Vec::new();
    let mut taken = 0;
    let cases = cases();
    let outcomes = cases.par_iter().enumerate().map(|(number, case)| verify(engine, case, &arch, &kernels, number as u64));
    for outcome in outcomes.collect::<Vec<_>>() {
        match outcome {
            Ok(Outcome::Refused(refusal)) => *refused.entry(refusal.reason.name()).or_insert(0) += 1,
            Ok(Outcome::Passed) => taken += 1,
            Err(failure) => failures.push(failure),
        }
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    assert!(taken > 0, "{name} takes nothing: {refused:?}");
    refused
}

#[test]
fn simt_takes_every_case_and_is_right() {
    assert_eq!(all_cases_on("gemm.simt"), BTreeMap::new());
}

#[test]
fn mma_is_right_where_it_takes_a_case() {
    let refused = all_cases_on("gemm.mma");
    // Strides in both directions, f32 and fp8 without loss, rows of bytes that no copy can take: what `gemm.simt` is there for.
    assert!(refused.keys().all(|reason| ["alignment", "layout", "precision"].contains(reason)), "{refused:?}");
}

/// On a machine of more SMs than the cases see elsewhere, where tiles are few enough to be split so.
#[test]
fn parts_are_added_up_by_a_launch_of_their_own() {
    let engine = verdigris_engines::engine("gemm.wgmma").expect("the engine is registered");
    let kernels = Kernels::new();
    for (id, sms) in [("bf16-deep-batch", 36), ("bf16-deep-anywhere", 12), ("bf16-deepest", 20)] {
        let of_group: Vec<Case> = cases().into_iter().filter(|case| case.id.contains(id)).collect();
        assert!(!of_group.is_empty(), "{id}");
        of_group.par_iter().enumerate().for_each(|(number, case)| {
            let arch = Arch::virtual_device(sms);
            let candidate = engine.accept(&case.problem, &arch).expect("it is taken");
            let in_parts = |knobs: &Knobs| knobs.value("parts").is_some();
            let configs = candidate.knobs().configs().iter().filter(|knobs| in_parts(knobs)).count();
            assert!(configs >= 4, "{}: {configs} configs have a split-K reduction", case.id);
            let outcome = verify_where(engine, case, &arch, &kernels, number as u64, in_parts);
            assert!(matches!(outcome, Ok(Outcome::Passed)), "{:?}", outcome.err());
        });
    }
}
