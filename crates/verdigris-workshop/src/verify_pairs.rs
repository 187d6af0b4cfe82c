//! The part of `verify` that runs two programs for one product one behind the other: of two engines, or of one.
//!
//! A stream executes one plan behind another in the same workspace: what the first program left there, and in the tensors, is what the second one
//! finds, and its first launch may begin while the last one of the first program still runs. So pairs of runs that have the same case and data are
//! drawn, and the second one's results are judged. A program that changes its inputs passes alone, and is found by the one behind it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::Result;
use rayon::prelude::*;
use verdigris_graph::{Access, Problem};
use verdigris_kir::interp::Kernels;
use verdigris_kir::program::Program;
use verdigris_reference::data::Random;

use crate::cases::Prepared;
use crate::verify::{Fault, Work, fault_of, interpret, panic_text, schedule_of, way};

/// Pairs that are drawn.
const PAIRS: usize = 64;
/// The most multiply-adds of a product that is run so.
const MOST_MULTIPLY_ADDS: u64 = 1 << 21;

/// What came of the pairs.
#[derive(Default)]
pub(crate) struct Outcome {
    pub(crate) runs: u64,
    pub(crate) faults: Vec<Fault>,
}

/// Draws pairs of works on one case and runs them: of different engines, of one engine by different configs, and a work behind itself, as a plan that is
/// executed again.
pub(crate) fn run(prepared: &[Prepared], works: &[Work], seed: u64, decoded: &Kernels) -> Outcome {
    let drawn = draw(prepared, works, seed);
    let outcomes: Vec<Option<Fault>> = (drawn.par_iter().enumerate())
        .filter_map(|(number, &[front, behind])| {
            let of_case = &prepared[behind.case];
            // A panic anywhere in an engine or below it is a defect like any other, and must not hide the rest.
            let ran = catch_unwind(AssertUnwindSafe(|| pair(of_case, front, behind, number as u64, decoded)));
            let what = match ran {
                Ok(Ok(None)) => return None,
                Ok(Ok(Some(found))) => found,
                Ok(Err(error)) => Some(format!("{error:#}")),
                Err(panic) => Some(panic_text(&*panic)),
            };
            Some(what.map(|what| fault_of(prepared, behind, format!("behind {} {}: {what}", front.engine.id(), front.knobs))))
        })
        .collect();
    Outcome { runs: outcomes.len() as u64, faults: outcomes.into_iter().flatten().collect() }
}

fn draw<'w>(prepared: &[Prepared], works: &'w [Work], seed: u64) -> Vec<[&'w Work; 2]> {
    let suits = |case: usize| is_small(&prepared[case]) && leaves_inputs(&prepared[case]);
    let mut pairs = Vec::new();
    for front in works.iter().filter(|work| suits(work.case)) {
        let of_case = |work: &&Work| work.case == front.case && work.sms == front.sms;
        pairs.extend(works.iter().filter(of_case).map(|behind| [front, behind]));
    }
    let mut random = Random::new(seed);
    for at in 0..pairs.len().min(PAIRS) {
        let other = at + random.below((pairs.len() - at) as u64) as usize;
        pairs.swap(at, other);
    }
    pairs.truncate(PAIRS);
    pairs
}

fn is_small(prepared: &Prepared) -> bool {
    match &prepared.case.problem {
        Problem::Gemm(problem) => {
            let extents = [problem.m, problem.n, problem.k].into_iter().chain(problem.batch.iter().copied());
            extents.fold(1u64, u64::saturating_mul) <= MOST_MULTIPLY_ADDS
        }
        _ => false,
    }
}

/// Whether nothing is read that is written: what two programs leave is what one leaves.
fn leaves_inputs(prepared: &Prepared) -> bool {
    let Ok(operands) = prepared.case.problem.buffers() else { return false };
    let reads = |slot| operands.iter().any(|operand| operand.slot == slot && operand.access != Access::Written);
    operands.iter().all(|operand| operand.access != Access::Written || !reads(operand.slot))
}

/// What is wrong with a pair; `None` where one of the programs goes behind no other.
fn pair(prepared: &Prepared, front: &Work, behind: &Work, number: u64, decoded: &Kernels) -> Result<Option<Option<String>>> {
    let (Ok(first), Ok(second)) = (way(prepared, front), way(prepared, behind)) else { return Ok(None) };
    let slots: Vec<usize> = (0..prepared.contents().len()).collect();
    let mut program = Program::default();
    for next in [&first.program, &second.program] {
        if program.append_in_workspace(next, &slots).is_err() {
            return Ok(None);
        }
    }
    let options = schedule_of(behind.seed, number, behind.sms);
    Ok(Some(interpret(prepared, &program, options, decoded)?.err()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases;
    use verdigris_engines::arch::Arch;
    use verdigris_engines::engine::Engine;

    #[test]
    fn engines_run_behind_each_other() {
        let case = cases::load(None, None, "gemm/bf16-edge-m/").expect("some").remove(0);
        let engines = || verdigris_engines::engines();
        let sms = 4;
        let work = |engine: &'static dyn Engine| {
            let candidate = engine.accept(&case.problem, &Arch::virtual_device(sms)).ok()?;
            let knobs = candidate.knobs().default_config().clone();
            Some(Work { case: 0, engine, knobs, seed: 1, sms, kind: case.distribution })
        };
        let works: Vec<Work> = engines().filter_map(work).collect();
        let prepared = [Prepared::new(case.clone()).expect("prepares")];
        let outcome = run(&prepared, &works, 1, &Kernels::new());
        assert!(outcome.faults.is_empty(), "{:?}", outcome.faults);
        // Each engine behind each, itself among them.
        assert!(works.len() > 2 && outcome.runs as usize == (works.len() * works.len()).min(PAIRS), "{} works", works.len());
        assert_eq!(run(&prepared, &works[..1], 1, &Kernels::new()).runs, 1);
    }

    #[test]
    fn what_is_read_and_written_is_left_out() {
        let all = cases::load(None, None, "").expect("reads");
        let in_place = all.iter().filter(|case| {
            let operands = case.problem.buffers().expect("valid");
            let is_read = |slot| operands.iter().any(|operand| operand.slot == slot && operand.access != Access::Written);
            operands.iter().any(|operand| operand.access == Access::Written && is_read(operand.slot))
        });
        let mut count = 0;
        for case in in_place.take(3) {
            count += 1;
            assert!(!leaves_inputs(&Prepared::new(case.clone()).expect("prepares")), "{}", case.id);
        }
        assert!(count > 0, "no case is computed in place");
    }
}
