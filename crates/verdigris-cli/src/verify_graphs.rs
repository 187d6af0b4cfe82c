//! The part of `verify` that interprets graphs: every case of the graph families, part by part, on every engine that takes the parts.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use rayon::prelude::*;
use verdigris_engines::arch::Arch;
use verdigris_engines::engine::{Engine, Reason};
use verdigris_engines::interpret::Parts;
use verdigris_kir::interp::{Kernels, Options};
use verdigris_reference::graph::Selection;
use verdigris_reference::graph_cases::GraphCase;
use verdigris_reference::judge::Trial;

use crate::verify::{Fault, panic_text};

/// What came of all cases.
#[derive(Default)]
pub(crate) struct Outcome {
    /// Runs: a case by one way for each of its parts.
    pub(crate) runs: u64,
    pub(crate) faults: Vec<Fault>,
    /// Parts refused, by engine and reason.
    pub(crate) refusals: BTreeMap<(&'static str, &'static str), u64>,
    /// Parts taken, by engine.
    pub(crate) taken: BTreeMap<&'static str, u64>,
    /// The runs that took longest.
    pub(crate) slowest: Vec<(Duration, String)>,
}

impl Outcome {
    fn join(mut self, other: Outcome) -> Outcome {
        self.runs += other.runs;
        self.faults.extend(other.faults);
        other.refusals.into_iter().for_each(|(key, count)| *self.refusals.entry(key).or_default() += count);
        other.taken.into_iter().for_each(|(key, count)| *self.taken.entry(key).or_default() += count);
        self.slowest.extend(other.slowest);
        self.slowest.sort_by_key(|(took, _)| std::cmp::Reverse(*took));
        self.slowest.truncate(5);
        self
    }
}

/// Runs every case that a CPU can hold: by two variants, or with `all` by as many as give each way its turn (the default and one other
/// setting of each engine, which the seed chooses).
pub(crate) fn run(cases: &[GraphCase], engines: &[&'static dyn Engine], all: bool, seed: u64) -> Outcome {
    let kernels = Kernels::new();
    let progress = ProgressBar::new(cases.len() as u64);
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} graphs {elapsed} eta {eta}");
    progress.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let one = |(number, case): (usize, &GraphCase)| {
        let mut outcome = Outcome::default();
        let seed = seed.wrapping_mul(1_000_003).wrapping_add(number as u64);
        // A panic anywhere in an engine or below it is a defect like any other, and must not hide the rest.
        let ran = catch_unwind(AssertUnwindSafe(|| interpret(case, engines, &kernels, all, seed, &mut outcome)));
        let fault = match ran {
            Ok(Ok(())) => None,
            Ok(Err((ways, message))) => Some((ways, message)),
            Err(panic) => Some((String::new(), panic_text(&*panic))),
        };
        outcome.faults.extend(fault.map(|(engine, message)| Fault { case: case.id.clone(), engine, knobs: String::new(), seed, message }));
        progress.inc(1);
        outcome
    };
    let outcome = cases.par_iter().enumerate().map(one).reduce(Outcome::default, Outcome::join);
    progress.finish_and_clear();
    outcome
}

/// Runs one case; the ways of the variant that is wrong, and what is.
fn interpret(
    case: &GraphCase,
    engines: &[&'static dyn Engine],
    kernels: &Kernels,
    all: bool,
    seed: u64,
    outcome: &mut Outcome,
) -> Result<(), (String, String)> {
    let fail = |message: String| (String::new(), message);
    let arch = Arch::virtual_device(2 + (seed % 5) as u32);
    let parts = Parts::new(&case.graph, &arch, engines, seed as usize).map_err(|error| fail(error.to_string()))?;
    for (_, refusal) in parts.refusals.iter().filter(|(_, refusal)| refusal.reason != Reason::Problem) {
        *outcome.refusals.entry((refusal.engine.name, refusal.reason.name())).or_default() += 1;
    }
    for ways in &parts.ways {
        let mut names: Vec<&'static str> = ways.iter().map(|way| way.engine.name).collect();
        names.dedup();
        names.into_iter().for_each(|name| *outcome.taken.entry(name).or_default() += 1);
    }
    let variants = parts.variants();
    if variants == 0 {
        let why: Vec<String> = parts.refusals.iter().map(|(_, refusal)| refusal.to_string()).collect();
        // With one engine asked for, it need not take every part.
        return if engines.len() == 1 { Ok(()) } else { Err(fail(format!("a part that nobody takes: {}", why.join("; ")))) };
    }
    let trial = Trial::new(&case.graph, case.distribution, case.seed, Selection::All).map_err(|error| fail(error.to_string()))?;
    let chosen: Vec<usize> = match variants {
        _ if all => (0..variants).collect(),
        1 => vec![0],
        _ => vec![0, 1 + seed as usize % (variants - 1)],
    };
    for variant in chosen {
        let begun = Instant::now();
        outcome.runs += 1;
        let ways = || parts.chosen(variant).map(|way| format!("{} {}", way.engine, way.knobs)).collect::<Vec<_>>().join(", ");
        let mut buffers = trial.inputs.buffers.clone();
        buffers.extend(trial.outputs().clone());
        let options = Options { sms: arch.sm_count, float_noise: true, ..Options::schedule(seed.wrapping_add(variant as u64)) };
        (parts.interpret(variant, &mut buffers, &trial.inputs.scalars, kernels, &options)).map_err(|what| (ways(), what))?;
        trial.judge(&buffers).map_err(|what| (ways(), what))?;
        outcome.slowest.push((begun.elapsed(), format!("{} {}", case.id, ways())));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_cases_pass_and_are_counted() {
        let engines: Vec<&'static dyn Engine> = verdigris_engines::engines().collect();
        let cases = crate::check_graphs::load("pointwise/scale/").expect("reads");
        let outcome = run(&cases, &engines, true, 3);
        assert!(outcome.faults.is_empty(), "{:?}", outcome.faults);
        assert!(outcome.runs as usize >= cases.len() && !cases.is_empty());
        assert!(outcome.taken.values().sum::<u64>() as usize >= cases.len());
    }
}
