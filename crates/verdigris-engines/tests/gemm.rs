//! Every case of `cases/gemm.toml` on the portable GEMM engines, by the interpreter, against the reference.

mod harness;

use std::collections::BTreeMap;
use std::path::Path;

use harness::{Outcome, verify};
use verdigris_engines::arch::Arch;
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
    for (number, case) in cases().iter().enumerate() {
        match verify(engine, case, &arch, &kernels, number as u64) {
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

/// On a machine of more SMs than the cases see elsewhere, where parts are joined in groups.
#[test]
fn many_parts_are_joined_in_groups() {
    let engine = verdigris_engines::engine("gemm.wgmma").expect("the engine is registered");
    let case = cases().into_iter().find(|case| case.id.contains("bf16-many-parts")).expect("the case is there");
    let arch = Arch::virtual_device(20);
    let candidate = engine.accept(&case.problem, &arch).expect("it is taken");
    let split = candidate.knobs().settings().iter().filter(|knobs| knobs.value("split").is_some_and(|split| split != 0)).count();
    assert!(split > 0, "no setting splits depth");
    let kernels = Kernels::new();
    for schedule in 0..2 {
        let outcome = verify(engine, &case, &arch, &kernels, schedule);
        assert!(matches!(outcome, Ok(Outcome::Passed)), "schedule {schedule}: {:?}", outcome.err());
    }
}
