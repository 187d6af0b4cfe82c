//! Runs a candidate's program on the interpreter and compares it with the reference.

use verdigris_engines::arch::Arch;
use verdigris_engines::engine::{Engine, Knobs, Refusal};
use verdigris_graph::Slot;
use verdigris_kir::interp::{self, Kernels, Memory, Options};
use verdigris_kir::program::Program;
use verdigris_reference::cases::Case;
use verdigris_reference::{compare, data, run};

/// What became of one case on one engine.
pub(crate) enum Outcome {
    /// The engine does not take it.
    Refused(Refusal),
    /// It ran under every config, and was right.
    Passed,
}

/// Runs a case under every config of an engine's knobs.
pub(crate) fn verify(engine: &dyn Engine, case: &Case, arch: &Arch, kernels: &Kernels, schedule: u64) -> Result<Outcome, String> {
    verify_where(engine, case, arch, kernels, schedule, |_| true)
}

/// The same under those configs that are wanted.
pub(crate) fn verify_where(
    engine: &dyn Engine,
    case: &Case,
    arch: &Arch,
    kernels: &Kernels,
    schedule: u64,
    is_wanted: impl Fn(&Knobs) -> bool,
) -> Result<Outcome, String> {
    let candidate = match engine.accept(&case.problem, arch) {
        Ok(candidate) => candidate,
        Err(refusal) => return Ok(Outcome::Refused(refusal)),
    };
    let space = candidate.knobs();
    for knobs in space.configs().iter().filter(|knobs| is_wanted(knobs)) {
        let fail = |what: String| format!("{} on {} with {knobs}: {what}", case.id, engine.id());
        let program = candidate.program(knobs).map_err(|refusal| fail(refusal.to_string()))?;
        execute(case, &program, arch, kernels, schedule).map_err(fail)?;
    }
    Ok(Outcome::Passed)
}

fn execute(case: &Case, program: &Program, arch: &Arch, kernels: &Kernels, schedule: u64) -> Result<(), String> {
    execute_with(case, &data::inputs(&case.problem, case.distribution, case.seed), program, arch, kernels, schedule)
}

/// Runs a program on inputs other than the case's own.
pub(crate) fn execute_with(
    case: &Case,
    inputs: &run::Inputs,
    program: &Program,
    arch: &Arch,
    kernels: &Kernels,
    schedule: u64,
) -> Result<(), String> {
    let expected = run::run(&case.problem, inputs, run::Positions::All).map_err(|error| error.to_string())?;
    let mut memory = Memory::new();
    let slots = case.problem.slots().iter().map(|slot| slot.0 + 1).max().unwrap_or(0);
    let mut host_scalars = vec![0.0.into(); slots as usize];
    let mut before = Vec::new();
    for slot in (0..slots).map(Slot) {
        let bytes = match expected.iter().find(|output| output.id == slot) {
            Some(output) => data::output_buffer(output, inputs),
            None => inputs.buffers.get(&slot).cloned().unwrap_or_default(),
        };
        if let Some(&scalar) = inputs.scalars.get(&slot) {
            let is_integer = program.integer_scalars().any(|integer| integer == slot.0 as usize);
            host_scalars[slot.0 as usize] = if is_integer { (scalar as i64).into() } else { scalar.into() };
        }
        memory.add(&bytes);
        before.push(bytes);
    }
    let options = Options { sms: arch.sm_count, host_scalars, ..Options::schedule(schedule) };
    interp::run(program, kernels, &mut memory, &options).map_err(|findings| findings.to_string())?;
    for output in &expected {
        let slot = output.id.0 as usize;
        let after = memory.to_vec(slot);
        let report = compare::compare(output, &before[slot], &after);
        if !report.passes() {
            return Err(format!("{}: {report:?}", output.id));
        }
    }
    Ok(())
}
