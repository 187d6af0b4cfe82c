//! Every case of `cases/gemm.toml` on the portable GEMM engines, by the interpreter, against the reference.

mod harness;

use std::collections::BTreeMap;
use std::path::Path;

use harness::{Outcome, verify, verify_where};
use rayon::prelude::*;
use verdigris_engines::arch::Arch;
use verdigris_engines::engine::Knobs;
use verdigris_graph::{Problem, Slot};
use verdigris_kir::interp::{self, Kernels, Memory, Options};
use verdigris_reference::cases::{Case, load_file};
use verdigris_reference::data;
use verdigris_reference::run::{Inputs, Positions, run};

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

/// Of two CTAs that share a tile, the later one waits for what the earlier one keeps, at whatever moment of that it comes.
#[test]
fn two_parts_of_a_tile_wait_for_each_other() {
    let engine = verdigris_engines::engine("gemm.wgmma").expect("the engine is registered");
    let (arch, kernels) = (Arch::virtual_device(5), Kernels::new());
    let case = cases().into_iter().find(|case| case.id.contains("bf16-one-tile-deep") && case.id.contains("65x128x640")).expect("a case");
    let in_two = |knobs: &Knobs| knobs.value("split") == Some(3) && knobs.value("along") == Some(0);
    let candidate = engine.accept(&case.problem, &arch).expect("it is taken");
    assert!(candidate.knobs().configs().iter().any(in_two), "no config has two parts of a tile");
    (0..24u64).into_par_iter().for_each(|schedule| {
        let outcome = verify_where(engine, &case, &arch, &kernels, schedule, in_two);
        assert!(matches!(outcome, Ok(Outcome::Passed)), "{:?}", outcome.err());
    });
}

/// The rounding model does not see whether an operand is rounded to tf32 or more exact than that; the bits do.
#[test]
fn operands_are_rounded_to_tf32_without_tensor_cores() {
    let engine = verdigris_engines::engine("gemm.simt").expect("the engine is registered");
    let (arch, kernels) = (Arch::virtual_device(2), Kernels::new());
    let case = cases().into_iter().find(|case| case.id == "gemm/tf32/nt/64x40x64").expect("a case");
    let Problem::Gemm(problem) = &case.problem else { panic!("a product") };
    let inputs = data::inputs(&case.problem, data::Distribution::Normal, case.seed);
    // To nearest, ties away from zero: 13 bits of the fraction are dropped.
    let round = |word: [u8; 4]| ((u32::from_le_bytes(word).wrapping_add(0x1000)) & !0x1fff).to_le_bytes();
    let mut rounded = inputs.clone();
    for slot in [problem.a.slot, problem.b.slot] {
        let buffer = rounded.buffers.get_mut(&slot).expect("an operand");
        let words = buffer.chunks_exact(4).flat_map(|word| round(word.try_into().expect("four bytes"))).collect();
        assert_ne!(*buffer, words, "some operand needs more bits than tf32 has");
        *buffer = words;
    }
    let candidate = engine.accept(&case.problem, &arch).expect("it is taken");
    for knobs in candidate.knobs().configs() {
        let program = candidate.program(knobs).expect("a config of its own");
        let result = |given: &Inputs| -> Vec<u8> {
            let expected = run(&case.problem, given, Positions::All).expect("a reference").remove(0);
            let mut memory = Memory::new();
            for slot in (0..3).map(Slot) {
                memory.add(&if slot == problem.d.slot { data::output_buffer(&expected, given) } else { given.buffers[&slot].clone() });
            }
            let options = Options { sms: arch.sm_count, ..Options::schedule(1) };
            interp::run(&program, &kernels, &mut memory, &options).unwrap_or_else(|findings| panic!("{findings}"));
            memory.to_vec(problem.d.slot.0 as usize)
        };
        assert!(result(&inputs) == result(&rounded), "{knobs}");
    }
}
