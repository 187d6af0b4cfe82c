//! Every case of the corpus on every engine that takes it, interpreted and held against the reference.

use std::path::Path;

use verdigris_engines::arch::Arch;
use verdigris_engines::engine::Knobs;
use verdigris_engines::engines;
use verdigris_kir::interp::{self, Kernels, Memory, Options};
use verdigris_reference::cases::{Case, load_file};
use verdigris_reference::compare::compare;
use verdigris_reference::data;
use verdigris_reference::run::{Positions, run};

fn cases() -> Vec<Case> {
    load_file(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../cases/gemm.toml")).expect("the corpus loads")
}

/// What went wrong, or nothing.
fn check(case: &Case, engine: &str, knobs: &Knobs, arch: &Arch, kernels: &Kernels, seed: u64) -> Result<(), String> {
    let problem = &case.problem;
    let candidate =
        verdigris_engines::engine(engine).ok_or("no such engine")?.accept(problem, arch).map_err(|refusal| refusal.to_string())?;
    let program = candidate.program(knobs).map_err(|refusal| refusal.to_string())?;
    let inputs = data::inputs(problem, case.distribution, seed);
    let expected = run(problem, &inputs, Positions::All).map_err(|error| error.to_string())?;

    let outputs: Vec<_> = expected.iter().map(|e| (e.id, data::output_buffer(e, &inputs))).collect();
    let mut memory = Memory::new();
    for slot in problem.slots() {
        let before = outputs.iter().find(|(output, _)| *output == slot).map(|(_, bytes)| bytes);
        let bytes = before.or_else(|| inputs.buffers.get(&slot));
        assert_eq!(memory.add(bytes.map_or(&[][..], |bytes| bytes)), slot.0 as usize);
    }
    let scalar = |slot: &verdigris_graph::Slot| {
        let scalar = inputs.scalars.get(slot).copied().unwrap_or(0.0);
        let is_integer = program.integer_scalars().any(|integer| integer == slot.0 as usize);
        if is_integer { (scalar as i64).into() } else { scalar.into() }
    };
    let scalars = problem.slots().iter().map(scalar).collect();
    let options = Options { host_scalars: scalars, sms: arch.sm_count, ..Options::schedule(seed) };
    interp::run(&program, kernels, &mut memory, &options).map_err(|findings| findings.to_string())?;
    for (expected, (slot, before)) in expected.iter().zip(&outputs) {
        let report = compare(expected, before, &memory.to_vec(slot.0 as usize));
        if !report.passes() {
            return Err(report.to_string());
        }
    }
    Ok(())
}

#[test]
fn wgmma_on_every_case_it_takes() {
    let arch = Arch::virtual_device(4);
    let kernels = Kernels::new();
    let filter = std::env::var("VERDIGRIS_CASE").unwrap_or_default();
    let mut taken = 0;
    let mut wrong = Vec::new();
    for (i, case) in cases().iter().enumerate().filter(|(_, case)| case.id.contains(&filter)) {
        for engine in engines().filter(|engine| engine.id().name == "gemm.wgmma") {
            let Ok(candidate) = engine.accept(&case.problem, &arch) else { continue };
            let space = candidate.knobs();
            let configs = space.configs();
            for (n, knobs) in [&configs[0], &configs[(i * 7 + 1) % configs.len()]].into_iter().enumerate() {
                taken += 1;
                let start = std::time::Instant::now();
                if let Err(what) = check(case, engine.id().name, knobs, &arch, &kernels, (i + n) as u64) {
                    wrong.push(format!("{} {} {knobs}: {what}", case.id, engine.id()));
                }
                if start.elapsed().as_millis() > 2000 {
                    eprintln!("slow: {} {knobs} {:?}", case.id, start.elapsed());
                }
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {taken} wrong:\n{}",
        wrong.len(),
        wrong.iter().map(|w| w.chars().take(600).collect::<String>()).collect::<Vec<_>>().join("\n")
    );
    eprintln!("{taken} runs");
    assert!(taken > 0, "no case was taken");
}

/// One ragged problem under every shape, turn and split that the engine offers: configs that few cases reach by rotation.
#[test]
fn wgmma_under_every_config() {
    let arch = Arch::virtual_device(6);
    let kernels = Kernels::new();
    let cases = cases();
    let mut wrong = Vec::new();
    let mut taken = 0;
    for id in [
        "gemm/bf16-edge-m/nt/129x64x64",
        "gemm/bf16-edge-m/nt/65x64x64",
        "gemm/bf16-edge-panels/tn/136x161x72",
        "gemm/f16-odd/nn/65x67x69",
        "gemm/e4m3-block-scales/nt/67x40x200",
        "gemm/f32-terms/tn/136x72x200",
        "gemm/f32-terms/nn/65x67x69",
    ] {
        let case = cases.iter().find(|case| case.id == id).expect("the case is in the corpus");
        let candidate =
            verdigris_engines::engine("gemm.wgmma").expect("the engine").accept(&case.problem, &arch).expect("it takes the case");
        for (i, knobs) in candidate.knobs().configs().iter().filter(|knobs| knobs.value("along") == Some(0)).enumerate() {
            taken += 1;
            if let Err(what) = check(case, "gemm.wgmma", knobs, &arch, &kernels, i as u64) {
                wrong.push(format!("{id} {knobs}: {}", what.chars().take(500).collect::<String>()));
            }
        }
    }
    assert!(wrong.is_empty() && taken >= 40, "{} of {taken} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// Shapes whose warpgroups take tiles in turn, or whose clusters split depth: many tiles for each, under several schedules.
#[test]
fn wgmma_shapes_that_share_work() {
    let arch = Arch::virtual_device(4);
    let kernels = Kernels::new();
    let cases = cases();
    let case = cases.iter().find(|case| case.id == "gemm/bf16-many-tiles/nt/150x304x328").expect("the case is in the corpus");
    let candidate = verdigris_engines::engine("gemm.wgmma").expect("the engine").accept(&case.problem, &arch).expect("it takes the case");
    let space = candidate.knobs();
    let shares = |knobs: &&Knobs| knobs.value("shape").is_some_and(|shape| shape >= 23) && knobs.value("along") == Some(0);
    let mut wrong = Vec::new();
    let mut taken = 0;
    for knobs in space.configs().iter().filter(shares) {
        for seed in 0..2 {
            taken += 1;
            if let Err(what) = check(case, "gemm.wgmma", knobs, &arch, &kernels, seed) {
                wrong.push(format!("{knobs}: {}", what.chars().take(500).collect::<String>()));
            }
        }
    }
    assert!(wrong.is_empty() && taken >= 4, "{} of {taken} wrong:\n{}", wrong.len(), wrong.join("\n"));
}
