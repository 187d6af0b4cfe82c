//! Whether the choice at once takes the right engine, held to what a device measured: a broken estimate is told by the engine's name.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use rayon::prelude::*;
use serde_json::Value;
use verdigris::{Limits, survey};
use verdigris_engines::arch::Arch;

use super::draw::{Kind, draw};

/// A record of problems that no fit saw, each with the times of the best configs of every engine.
const RECORD: &str = "../../bench/record/h200/2026-11-23-choice-90210.jsonl";
/// An engine is acceptable whose fastest config takes at most this many times the fastest of all.
const ACCEPTABLE: f64 = 1.25;

/// A problem of the record: the engines that are acceptable, and the least estimate of each engine.
struct Judged {
    words: String,
    acceptable: Vec<&'static str>,
    estimates_us: BTreeMap<&'static str, f64>,
}

impl Judged {
    fn new(line: &Value) -> Judged {
        let kind = if line["kind"] == "product" { Kind::Product } else { Kind::Convolution };
        let (seed, number) = (line["seed"].as_u64().expect("a seed"), line["number"].as_u64().expect("a number"));
        let drawn = draw(seed, kind, number);
        assert_eq!(line["words"], drawn.words, "the record's problem is drawn again");
        let mut measured_us: BTreeMap<&'static str, f64> = BTreeMap::new();
        for row in line["configs"].as_array().into_iter().flatten() {
            // An engine that has become another's algorithm is found by its old name.
            let engine = row[0].as_str().and_then(verdigris_engines::engine).expect("an engine");
            let Some(us) = row[4].as_f64().or_else(|| row[3].as_f64()) else { continue };
            let least = measured_us.entry(engine.id().name).or_insert(us);
            *least = least.min(us);
        }
        let fastest = measured_us.values().copied().fold(f64::INFINITY, f64::min);
        let acceptable = measured_us.iter().filter(|(_, us)| **us <= ACCEPTABLE * fastest).map(|(name, _)| *name).collect();
        let ranked = survey(&drawn.problem, &Arch::h200(), &Limits::default()).ranked;
        // An engine that takes a problem only since the record was made has no time there: nothing says whether it would be right.
        let timed = ranked.iter().filter(|way| measured_us.contains_key(way.engine.name));
        let estimates_us = timed.map(|way| (way.engine.name, way.cost.us)).collect();
        Judged { words: drawn.words, acceptable, estimates_us }
    }

    /// The engine with the least estimate, where all estimates of `broken` are multiplied by `factor`.
    fn chosen(&self, broken: &str, factor: f64) -> &'static str {
        let us = |name: &str, us: f64| if name == broken { us * factor } else { us };
        let mut engines = self.estimates_us.iter().map(|(name, estimate)| (*name, us(name, *estimate)));
        let first = engines.next().expect("somebody takes it");
        engines.fold(first, |best, next| if next.1 < best.1 { next } else { best }).0
    }

    fn is_right(&self, broken: &str, factor: f64) -> bool {
        self.acceptable.contains(&self.chosen(broken, factor))
    }
}

/// By engine, the problems for which it was taken and is not acceptable, or was passed over and is the only one that is.
fn mistakes<'j>(judged: &'j [Judged], broken: &str, factor: f64) -> BTreeMap<&'static str, Vec<&'j str>> {
    let mut by_engine: BTreeMap<&'static str, Vec<&str>> = BTreeMap::new();
    for one in judged.iter().filter(|one| !one.is_right(broken, factor)) {
        let only = if let [only] = one.acceptable[..] { Some(only) } else { None };
        for name in [Some(one.chosen(broken, factor)), only].into_iter().flatten() {
            by_engine.entry(name).or_default().push(&one.words);
        }
    }
    by_engine
}

/// The engines whose estimates are off: more mistakes than one in eight of the problems that they are acceptable for, and more than six.
fn suspects(judged: &[Judged], broken: &str, factor: f64) -> Vec<String> {
    let acceptable = |name: &str| judged.iter().filter(|one| one.acceptable.contains(&name)).count();
    (mistakes(judged, broken, factor).into_iter())
        .filter(|(name, words)| words.len() > 6.max(acceptable(name) / 8))
        .map(|(name, words)| format!("{name}: {} mistakes, first {}", words.len(), words[0]))
        .collect()
}

#[test]
fn the_choice_at_once_takes_an_acceptable_engine_and_a_broken_estimate_is_told_by_name() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(RECORD);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let problems: Vec<&Value> = lines.iter().filter(|line| line["configs"].as_array().is_some_and(|configs| !configs.is_empty())).collect();
    // Depthwise convolutions of one element were products when the record was made, and are convolutions now: no engine that takes them has a time there.
    let judged: Vec<Judged> = problems.into_par_iter().map(Judged::new).filter(|one| !one.estimates_us.is_empty()).collect();
    assert!(judged.len() > 400, "{} problems", judged.len());

    assert_eq!(suspects(&judged, "", 1.0), Vec::<String>::new());
    let wrong: Vec<&str> = judged.iter().filter(|one| !one.is_right("", 1.0)).map(|one| one.words.as_str()).collect();
    assert!(wrong.len() <= judged.len() / 40, "{} of {}: {}", wrong.len(), judged.len(), wrong.join("; "));

    // Estimates of one engine alone are broken, upwards and downwards: the engine is named, where it matters to enough problems.
    let all: Vec<&'static str> = {
        let mut names: Vec<_> = judged.iter().flat_map(|one| one.estimates_us.keys().copied()).collect();
        names.sort_unstable();
        names.dedup();
        names
    };
    for name in all {
        let taken = judged.iter().filter(|one| one.acceptable[..] == [name]).count();
        let told = |factor| suspects(&judged, name, factor).iter().any(|suspect| suspect.starts_with(&format!("{name}:")));
        assert!(taken <= 12 || told(1000.0), "{name} × 1000 goes unseen, though {taken} problems want it alone");
        let refused = judged.iter().filter(|one| one.estimates_us.contains_key(name) && !one.acceptable.contains(&name)).count();
        assert!(refused <= 12 || told(0.001), "{name} / 1000 goes unseen, though {refused} problems do not want it");
    }
}
