//! The case files of graphs and random graphs on every engine that takes their parts, interpreted and held against the reference.
//!
//! Each case runs by one variant: one way for each part, another one for each case. With `VERDIGRIS_VARIANTS=all` every way of every part
//! has its turn, as in `workshop verify`. Of a family every fourth case is run, another quarter each day (`VERDIGRIS_DAY`, counted from 1970, draws those of
//! a day again): the interpreter takes minutes for all of them, which `workshop verify` runs as well. `VERDIGRIS_CASE` is a part of the ids of cases, all of
//! which are run. `VERDIGRIS_FUZZ_GRAPHS` is the number of random graphs (default 300) and of drawn attention (200), `VERDIGRIS_FUZZ_SEED` the first of them.

mod by_day;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use rayon::prelude::*;
use verdigris_engines::arch::Arch;
use verdigris_engines::engine::{Engine, Reason};
use verdigris_engines::engines;
use verdigris_engines::interpret::Parts;
use verdigris_graph::{Graph, json};
use verdigris_kir::interp::{Kernels, Options};
use verdigris_reference::fuzz;
use verdigris_reference::graph::Selection;
use verdigris_reference::graph_cases::{GraphCase, load_file};
use verdigris_reference::judge::Trial;

/// What became of the cases.
#[derive(Default)]
struct Tally {
    runs: usize,
    /// Parts that each engine took, and refused by reason.
    taken: BTreeMap<&'static str, usize>,
    refused: BTreeMap<(&'static str, &'static str), usize>,
    wrong: Vec<String>,
    slow: Vec<(Duration, String)>,
}

impl Tally {
    /// Of both.
    fn and(mut self, other: Tally) -> Tally {
        self.runs += other.runs;
        other.taken.into_iter().for_each(|(engine, count)| *self.taken.entry(engine).or_default() += count);
        other.refused.into_iter().for_each(|(why, count)| *self.refused.entry(why).or_default() += count);
        self.wrong.extend(other.wrong);
        self.slow.extend(other.slow);
        self
    }

    /// Prints the counts; fails if something was wrong.
    fn conclude(mut self, what: &str) {
        self.slow.sort();
        self.slow.reverse();
        self.slow.truncate(5);
        eprintln!("{what}: {} runs", self.runs);
        for (engine, count) in &self.taken {
            let refused = self.refused.iter().filter(|((name, _), _)| name == engine).map(|((_, reason), count)| (*reason, *count));
            eprintln!("  {engine}: took {count}, refused {:?}", refused.collect::<BTreeMap<_, _>>());
        }
        eprintln!("  slowest {:?}", self.slow);
        assert!(self.wrong.is_empty(), "{what}: {} wrong:\n{}", self.wrong.len(), self.wrong.join("\n"));
    }
}

struct Harness {
    engines: Vec<&'static dyn Engine>,
    kernels: Kernels,
    all_variants: bool,
}

impl Harness {
    fn new() -> Harness {
        let all_variants = std::env::var("VERDIGRIS_VARIANTS").is_ok_and(|value| value == "all");
        Harness { engines: engines().collect(), kernels: Kernels::new(), all_variants }
    }

    /// What is wrong with a graph, a panic included.
    fn fault(&self, graph: &Graph, case: &GraphCase, number: usize, tally: Option<&mut Tally>) -> Option<String> {
        let run = || self.run(graph, case, number, tally);
        catch_unwind(AssertUnwindSafe(run))
            .unwrap_or_else(|panic| {
                let text = panic.downcast_ref::<String>().cloned().or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
                Err(format!("a panic: {}", text.unwrap_or_default()))
            })
            .err()
    }

    fn run(&self, graph: &Graph, case: &GraphCase, number: usize, tally: Option<&mut Tally>) -> Result<(), String> {
        let arch = Arch::virtual_device(2 + number as u32 % 5);
        let parts = Parts::new(graph, &arch, &self.engines, number).map_err(|error| error.to_string())?;
        let mut unnamed = Tally::default();
        let tally = tally.unwrap_or(&mut unnamed);
        for (_, refusal) in parts.refusals.iter().filter(|(_, refusal)| refusal.reason != Reason::Problem) {
            *tally.refused.entry((refusal.engine.name, refusal.reason.name())).or_default() += 1;
        }
        for (number, (part, configs)) in parts.partition.parts.iter().zip(&parts.configs).enumerate() {
            let mut names: Vec<_> = configs.iter().map(|config| config.engine.name).collect();
            names.dedup();
            names.into_iter().for_each(|name| *tally.taken.entry(name).or_default() += 1);
            // Every family ends in an engine that takes everything.
            if configs.is_empty() {
                let refusals = parts.refusals.iter().filter(|(of, refusal)| *of == number && refusal.reason != Reason::Problem);
                let why: Vec<String> = refusals.map(|(_, refusal)| refusal.to_string()).collect();
                return Err(format!("nobody takes a part of kind {}: {}", part.problem.kind(), why.join("; ")));
            }
        }
        let trial = Trial::new(graph, case.distribution, case.seed, Selection::All).map_err(|error| format!("the reference: {error}"))?;
        let variants = parts.variants();
        let chosen: Vec<usize> = if self.all_variants { (0..variants).collect() } else { vec![number % variants.max(1)] };
        for variant in chosen {
            let begun = Instant::now();
            tally.runs += 1;
            let mut buffers = trial.inputs.buffers.clone();
            buffers.extend(trial.outputs().clone());
            let options = Options { sms: arch.sm_count, ..Options::schedule((number + variant) as u64) };
            let configs: Vec<String> = parts.chosen(variant).map(|config| format!("{} {}", config.engine, config.knobs)).collect();
            let fail = |what: String| {
                format!("{} with seed {}: {}", configs.join(" then "), case.seed, what.chars().take(700).collect::<String>())
            };
            parts.interpret(variant, &mut buffers, &trial.inputs.scalars, &self.kernels, &options).map_err(fail)?;
            trial.judge(&buffers).map_err(fail)?;
            tally.slow.push((begun.elapsed(), format!("{} {}", case.id, configs.join(" then "))));
        }
        Ok(())
    }
}

/// Of so many cases one is run in a day.
const EVERY: u64 = 4;

fn family(name: &str) {
    let harness = Harness::new();
    let filter = std::env::var("VERDIGRIS_CASE").unwrap_or_default();
    let has_turn = |number: usize| !filter.is_empty() || by_day::has_its_turn(number as u64, EVERY);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../cases/{name}.toml"));
    let cases = load_file(&path).expect("the corpus loads");
    let cases: Vec<_> =
        cases.iter().enumerate().filter(|(number, case)| !case.device_only && has_turn(*number) && case.id.contains(&filter)).collect();
    let tallies = cases.into_par_iter().map(|(number, case)| {
        let mut tally = Tally::default();
        if let Some(fault) = harness.fault(&case.graph, case, number, Some(&mut tally)) {
            tally.wrong.push(format!("{}: {fault}", case.id));
        }
        tally
    });
    tallies.reduce(Tally::default, Tally::and).conclude(name);
}

#[test]
fn convolutions() {
    family("conv");
}

#[test]
fn pointwise() {
    family("pointwise");
}

#[test]
fn reductions() {
    family("reduction");
}

#[test]
fn pooling() {
    family("pool");
}

#[test]
fn resampling() {
    family("resample");
}

#[test]
fn batch_norm() {
    family("batch_norm");
}

#[test]
fn attention() {
    family("attention");
}

#[test]
fn scan() {
    family("scan");
}

#[test]
fn softmax() {
    family("softmax");
}

#[test]
fn normalizations() {
    family("norm");
}

#[test]
fn movements() {
    family("movement");
}

/// Products of one drawn attention, at most: what the interpreter does in a second or two.
const MOST_PRODUCTS: u64 = 1_000_000;

/// Two hundred, a quarter of which each day.
#[test]
fn drawn_attention() {
    let (first, count) = drawn_seeds(200);
    let seeds = (first..first + count).filter(|&seed| by_day::has_its_turn(seed, EVERY)).collect();
    drawn("drawn attention", seeds, |seed| fuzz::attention(seed, MOST_PRODUCTS), &Harness::new());
}

#[test]
fn random_graphs() {
    let (first, count) = drawn_seeds(300);
    drawn("random graphs", (first..first + count).collect(), fuzz::graph, &Harness::new());
}

/// The first seed and how many, unless the environment says others.
fn drawn_seeds(count: u64) -> (u64, u64) {
    let number = |name: &str| -> Option<u64> { std::env::var(name).ok()?.parse().ok() };
    (number("VERDIGRIS_FUZZ_SEED").unwrap_or(0), number("VERDIGRIS_FUZZ_GRAPHS").unwrap_or(count))
}

/// Graphs of these seeds, each by the ways that the harness takes; what fails is shrunk.
fn drawn(what: &str, seeds: Vec<u64>, graph: fn(u64) -> GraphCase, harness: &Harness) {
    let tallies = seeds.into_par_iter().map(|seed| {
        let mut tally = Tally::default();
        let case = graph(seed);
        if let Some(first) = harness.fault(&case.graph, &case, seed as usize, Some(&mut tally)) {
            let smallest = fuzz::shrink(&case.graph, |graph| harness.fault(graph, &case, seed as usize, None).is_some());
            let fault = harness.fault(&smallest, &case, seed as usize, None).unwrap_or(first);
            tally.wrong.push(format!("seed {seed}, {:?}: {fault}\n{}", case.distribution, json::graph_to_json(&smallest)));
        }
        tally
    });
    tallies.reduce(Tally::default, Tally::and).conclude(what);
}
