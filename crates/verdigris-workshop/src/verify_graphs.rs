//! The part of `verify` that interprets graphs: cases of the graph families, part by part, on the engines that take the parts.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use rayon::prelude::*;
use verdigris_cli::table::alarm;
use verdigris_engines::arch::Arch;
use verdigris_engines::engine::{Engine, Reason};
use verdigris_engines::interpret::{Parts, Variant};
use verdigris_graph::Uid;
use verdigris_kir::interp::Kernels;
use verdigris_kir::program::Program;
use verdigris_reference::data::Distribution;
use verdigris_reference::graph::Selection;
use verdigris_reference::graph_cases::GraphCase;
use verdigris_reference::judge::{Judged, Trial};
use verdigris_reference::kinds;

use crate::verify::{Choice, Fault, panic_text, schedule_of};

/// A case and the variants of it that are to run, on a virtual device of so many SMs.
#[derive(Clone)]
pub(crate) struct Job<'c> {
    pub(crate) case: Cow<'c, GraphCase>,
    pub(crate) variants: Vec<Variant>,
    /// The data of the first, the third… of them, and of those between.
    pub(crate) kinds: [Distribution; 2],
    pub(crate) sms: u32,
    pub(crate) seed: u64,
}

/// What came of all cases.
#[derive(Default)]
pub(crate) struct Outcome {
    /// Runs: a case by one way for each of its parts.
    pub(crate) runs: u64,
    /// Pairs of variants that ran one behind the other.
    pub(crate) pairs: u64,
    pub(crate) faults: Vec<Fault>,
    /// Parts refused, by engine and reason.
    pub(crate) refusals: BTreeMap<(&'static str, &'static str), u64>,
    /// Parts taken, by engine.
    pub(crate) taken: BTreeMap<&'static str, u64>,
    /// Kernels that ran, with the data that they ran on.
    pub(crate) kernels: HashSet<(String, Distribution)>,
    /// By kind of data: elements of outputs, and those of them about which the rounding model says nothing.
    pub(crate) judged: BTreeMap<Distribution, (u64, u64)>,
    /// The runs that took longest.
    pub(crate) slowest: Vec<(Duration, String)>,
}

impl Outcome {
    pub(crate) fn join(mut self, other: Outcome) -> Outcome {
        self.runs += other.runs;
        self.pairs += other.pairs;
        self.faults.extend(other.faults);
        other.refusals.into_iter().for_each(|(key, count)| *self.refusals.entry(key).or_default() += count);
        other.taken.into_iter().for_each(|(key, count)| *self.taken.entry(key).or_default() += count);
        self.kernels.extend(other.kernels);
        for (kind, (elements, unjudged)) in other.judged {
            let sum = self.judged.entry(kind).or_default();
            *sum = (sum.0 + elements, sum.1 + unjudged);
        }
        self.slowest.extend(other.slowest);
        self.slowest.sort_by_key(|(took, _)| std::cmp::Reverse(*took));
        self.slowest.truncate(5);
        self
    }
}

/// Chooses what to run of each case: the first way of each part, and of all the others, from a place that the seed chooses on, the first that
/// leads to a kernel which nobody `reached` before. With `all`, as many variants as give each config of each engine its turn.
///
/// What is known of the cases without running them stands in the outcome.
pub(crate) fn plan<'c>(
    cases: &'c [GraphCase],
    engines: &[&'static dyn Engine],
    choice: Choice<'_>,
    reached: &mut HashSet<String>,
) -> (Vec<Job<'c>>, Outcome) {
    let Choice { all, seed, .. } = choice;
    let seed_of = |number: usize| seed.wrapping_mul(1_000_003).wrapping_add(number as u64);
    let cut = |(number, case): (usize, &GraphCase)| {
        let seed = seed_of(number);
        // A panic anywhere in an engine or below it is a defect like any other, and must not hide the rest.
        let made = catch_unwind(AssertUnwindSafe(|| Parts::all(&case.graph, &Arch::virtual_device(sms(seed)), engines)));
        match made {
            Ok(Ok(parts)) => Ok(parts),
            Ok(Err(error)) => Err(error.to_string()),
            Err(panic) => Err(panic_text(&*panic)),
        }
    };
    let cut: Vec<Result<Parts, String>> = cases.par_iter().enumerate().map(cut).collect();
    let (mut jobs, mut outcome) = (Vec::new(), Outcome::default());
    for (number, (case, parts)) in cases.iter().zip(cut).enumerate() {
        let seed = seed_of(number);
        let fault = |message: String| Fault {
            case: case.id.clone(),
            data: String::new(),
            engine: String::new(),
            knobs: String::new(),
            seed,
            message,
        };
        let parts = match parts {
            Ok(parts) => parts,
            Err(message) => {
                outcome.faults.push(fault(message));
                continue;
            }
        };
        for (_, refusal) in parts.refusals.iter().filter(|(_, refusal)| refusal.reason != Reason::Problem) {
            *outcome.refusals.entry((refusal.engine.name, refusal.reason.name())).or_default() += 1;
        }
        for ways in &parts.configs {
            let mut names: Vec<&'static str> = ways.iter().map(|way| way.engine.name).collect();
            names.dedup();
            names.into_iter().for_each(|name| *outcome.taken.entry(name).or_default() += 1);
        }
        let variants = parts.variants();
        if variants == 0 {
            // With one engine asked for, it need not take every part.
            if engines.len() > 1 {
                let why: Vec<String> = parts.refusals.iter().map(|(_, refusal)| refusal.to_string()).collect();
                outcome.faults.push(fault(format!("a part that nobody takes: {}", why.join("; "))));
            }
            continue;
        }
        let variants: Vec<Variant> = match (all, choice.kernel.is_empty()) {
            (true, true) => (0..variants).map(|number| parts.variant(number)).collect(),
            (false, true) => choose(&parts, seed, reached),
            (_, false) => launching(&parts, choice),
        };
        if variants.is_empty() {
            continue;
        }
        reached.extend(variants.iter().flat_map(Variant::kernels).map(str::to_owned));
        jobs.push(Job { case: Cow::Borrowed(case), variants, kinds: kinds_of(case, seed), sms: sms(seed), seed });
    }
    (jobs, outcome)
}

/// The first variant, and the other that leads furthest; the first once more where there is no other.
fn choose(parts: &Parts, seed: u64, reached: &HashSet<String>) -> Vec<Variant> {
    let first = parts.variant(0);
    let others: Vec<(usize, usize)> =
        parts.configs.iter().enumerate().flat_map(|(part, ways)| (1..ways.len()).map(move |way| (part, way))).collect();
    let from = (seed % others.len().max(1) as u64) as usize;
    let rotated = || others.iter().cycle().skip(from).take(others.len());
    let is_new = |&&(part, way): &&(usize, usize)| {
        let known = |kernel: &str| reached.contains(kernel) || first.kernels().any(|of_first| of_first == kernel);
        parts.configs[part][way].kernels().any(|kernel| !known(kernel))
    };
    let other = rotated().find(is_new).or_else(|| rotated().next()).map(|&(part, way)| parts.variant_with(part, way));
    // What can be computed one way alone runs that way again, on the other kind of data.
    let other = other.unwrap_or_else(|| first.clone());
    vec![first, other]
}

/// The two kinds of data on which a run of this seed interprets a case.
pub(crate) fn kinds_of(case: &GraphCase, seed: u64) -> [Distribution; 2] {
    let kinds = kinds::of_graph(&case.graph);
    [0, 1].map(|nth| kinds::draw(case.distribution, kinds, seed, nth))
}

/// The variants that launch a kernel of the wanted name: all of them, or the first and one other that the seed chooses; the first once more where there is no
/// other, on the other kind of data.
fn launching(parts: &Parts, choice: Choice<'_>) -> Vec<Variant> {
    let all = (parts.configs.iter().enumerate()).flat_map(|(part, ways)| {
        ways.iter().enumerate().filter(|(_, way)| choice.takes(way.kernels())).map(move |(way, _)| parts.variant_with(part, way))
    });
    let mut all: Vec<Variant> = all.collect();
    if !choice.all && all.len() > 2 {
        let turn = 1 + (choice.seed % (all.len() as u64 - 1)) as usize;
        all.swap(1, turn);
        all.truncate(2);
    }
    if !choice.all && all.len() == 1 {
        all.extend_from_within(..);
    }
    all
}

/// SMs of the virtual device of a seed.
pub(crate) fn sms(seed: u64) -> u32 {
    2 + (seed % 5) as u32
}

impl Job<'_> {
    /// What tells this job from every other.
    pub(crate) fn id(&self) -> String {
        let variants: Vec<String> = self.variants.iter().map(Variant::to_string).collect();
        let [first, second] = self.kinds;
        format!("{} {first} {second} {} {} {}", self.case.id, self.sms, self.seed, variants.join("; "))
    }

    /// What is run.
    pub(crate) fn programs(&self) -> impl Iterator<Item = &Program> {
        self.variants.iter().flat_map(|variant| &variant.configs).map(|way| &way.program)
    }
}

/// Runs what was chosen, each variant under so many schedules, and hands on each job that passed. What failed is in the outcome, and on stderr at once if that is asked for.
pub(crate) fn run(jobs: &[Job<'_>], schedules: u64, passed: &(dyn Fn(&Job<'_>) + Sync), tells_at_once: bool) -> Outcome {
    let kernels = Kernels::new();
    let progress = ProgressBar::new(jobs.len() as u64);
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} graphs {elapsed} eta {eta}");
    progress.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let one = |job: &Job<'_>| {
        let mut outcome = Outcome::default();
        let ran = catch_unwind(AssertUnwindSafe(|| interpret(job, &kernels, schedules, &mut outcome)));
        let fault = match ran {
            Ok(Ok(())) => None,
            Ok(Err(fault)) => Some(*fault),
            Err(panic) => Some(Wrong { ways: String::new(), kind: job.kinds[0], message: panic_text(&*panic) }),
        };
        let named = |Wrong { ways, kind, message }| Fault {
            case: job.case.id.clone(),
            data: kind.to_string(),
            engine: ways,
            knobs: String::new(),
            seed: job.seed,
            message,
        };
        outcome.faults.extend(fault.map(named));
        if tells_at_once {
            let tell = |fault: &Fault| {
                eprintln!(
                    "{}",
                    alarm(&format!("{} {} seed {}, {} data\n  {}", fault.case, fault.engine, fault.seed, fault.data, fault.message))
                )
            };
            progress.suspend(|| outcome.faults.iter().for_each(tell));
        }
        if outcome.faults.is_empty() {
            passed(job);
        }
        progress.inc(1);
        outcome
    };
    let outcome = jobs.par_iter().map(one).reduce(Outcome::default, Outcome::join);
    progress.finish_and_clear();
    outcome
}

/// What is wrong with a variant: its ways, the data that it was run on, and what was found.
struct Wrong {
    ways: String,
    kind: Distribution,
    message: String,
}

/// Runs the variants of one case.
fn interpret(job: &Job<'_>, kernels: &Kernels, schedules: u64, outcome: &mut Outcome) -> Result<(), Box<Wrong>> {
    for (turn, &kind) in job.kinds.iter().enumerate() {
        let of_kind = || job.variants.iter().enumerate().skip(turn).step_by(job.kinds.len());
        if of_kind().next().is_none() {
            continue;
        }
        let fail = |ways: String, message: String| Box::new(Wrong { ways, kind, message });
        let trial = Trial::new(&job.case.graph, kind, job.case.seed, Selection::All);
        let trial = trial.map_err(|error| fail(String::new(), error.to_string()))?;
        for (number, variant) in of_kind() {
            let begun = Instant::now();
            outcome.runs += 1;
            let seed = job.seed.wrapping_add(number as u64);
            let judged = interpret_variant(&trial, variant, seed, job.sms, kernels, schedules);
            let judged = judged.map_err(|message| fail(variant.to_string(), message))?;
            let (elements, unjudged) = outcome.judged.entry(kind).or_default();
            *elements += judged.elements;
            *unjudged += judged.unjudged;
            outcome.kernels.extend(variant.kernels().map(|kernel| (kernel.to_owned(), kind)));
            outcome.slowest.push((begun.elapsed(), format!("{} {variant}", job.case.id)));
        }
    }
    let paired = interpret_pair(job, kernels);
    outcome.pairs += u64::from(paired.map_err(|(ways, message)| Box::new(Wrong { ways, kind: job.kinds[0], message }))?);
    Ok(())
}

/// Of so many cases with two variants of different engines one also runs them one behind the other.
const PAIRED: u64 = 8;

/// Runs one variant behind the other, in an order that the seed chooses, where the case is one of those and the engines differ: what the first one
/// leaves, in tensors and in the workspace, is what the second one finds.
fn interpret_pair(job: &Job<'_>, kernels: &Kernels) -> Result<bool, (String, String)> {
    let turned = job.seed / PAIRED % 2;
    let (Some(front), Some(behind)) = (job.variants.get(turned as usize), job.variants.get(1 - turned as usize)) else { return Ok(false) };
    let engines = |variant: &Variant| variant.configs.iter().map(|config| config.engine).collect::<Vec<_>>();
    if job.seed % PAIRED != 1 || engines(front) == engines(behind) {
        return Ok(false);
    }
    let fail = |message: String| (format!("{front}, then {behind}"), message);
    let trial = Trial::new(&job.case.graph, job.kinds[0], job.case.seed, Selection::All).map_err(|error| fail(error.to_string()))?;
    let mut buffers = trial.inputs.buffers.clone();
    buffers.extend(trial.outputs().clone());
    let options = schedule_of(job.seed, turned, job.sms);
    let ran = behind.interpret_behind(front, &mut buffers, &trial.inputs.scalars, kernels, &options).map_err(fail)?;
    if ran.is_some() {
        trial.judge(&buffers).map_err(fail)?;
    }
    Ok(ran.is_some())
}

/// Runs one variant under so many schedules.
fn interpret_variant(trial: &Trial, variant: &Variant, seed: u64, sms: u32, kernels: &Kernels, schedules: u64) -> Result<Judged, String> {
    let mut first: Option<BTreeMap<Uid, Vec<u8>>> = None;
    let mut judged = Judged::default();
    for schedule in 0..schedules {
        let mut buffers = trial.inputs.buffers.clone();
        buffers.extend(trial.outputs().clone());
        variant.interpret(&mut buffers, &trial.inputs.scalars, kernels, &schedule_of(seed, schedule, sms))?;
        judged = trial.judge(&buffers)?;
        match &first {
            Some(first) if variant.is_deterministic() && *first != buffers => {
                return Err(format!("noted as deterministic, but schedules 0 and {schedule} give different bits"));
            }
            Some(_) => {}
            None => first = Some(buffers),
        }
    }
    Ok(judged)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_of_different_engines_run_one_behind_the_other() {
        let engines: Vec<&'static dyn Engine> = verdigris_engines::engines().collect();
        let cases = crate::check_graphs::load("conv/depthwise-edges/").expect("reads");
        // Two seeds of eight cases in a row: each has its turn with one of them.
        let pairs: u64 = (0..2)
            .map(|seed| {
                let (jobs, known) = plan(&cases, &engines, Choice { all: false, kernel: "", seed }, &mut HashSet::new());
                let outcome = run(&jobs, 1, &|_| {}, false).join(known);
                assert!(outcome.faults.is_empty(), "{:?}", outcome.faults);
                outcome.pairs
            })
            .sum();
        assert!(pairs > 0, "no pair among {} cases", cases.len());
    }

    #[test]
    fn a_few_cases_pass_and_are_counted() {
        let engines: Vec<&'static dyn Engine> = verdigris_engines::engines().collect();
        let cases = crate::check_graphs::load("pointwise/scale/").expect("reads");
        let (jobs, known) = plan(&cases, &engines, Choice { all: true, kernel: "", seed: 3 }, &mut HashSet::new());
        let outcome = run(&jobs, 1, &|_| {}, false).join(known);
        assert!(outcome.faults.is_empty(), "{:?}", outcome.faults);
        assert!(outcome.runs as usize >= cases.len() && !cases.is_empty());
        assert!(outcome.taken.values().sum::<u64>() as usize >= cases.len());
    }

    #[test]
    fn what_nobody_reached_is_preferred() {
        let engines: Vec<&'static dyn Engine> = verdigris_engines::engines().collect();
        let cases = crate::check_graphs::load("conv/bf16-usual/").expect("reads");
        let case = cases.iter().find(|case| case.id.contains("fprop") && case.id.contains("f3x3")).expect("a 3×3 case");
        let parts = Parts::all(&case.graph, &Arch::virtual_device(4), &engines).expect("is cut");
        let mut reached = HashSet::new();
        // Each choice leads to a kernel that none before it led to, as long as there is one.
        let all: HashSet<&str> = parts.configs[0].iter().flat_map(|way| way.kernels()).collect();
        for turn in 0.. {
            let before = reached.len();
            reached.extend(choose(&parts, turn, &reached).iter().flat_map(Variant::kernels).map(str::to_owned));
            if reached.len() == before {
                break;
            }
        }
        assert!(all.len() > 5 && reached.len() == all.len(), "{} of {}", reached.len(), all.len());
    }
}
