//! Whether the choice at once takes the right engine where it is known which one that is, and estimates what is possible: a broken estimate is told by the
//! engine's name.
//!
//! Products and convolutions are held to what a device measured (`right_engine.rs`). Of the other classes most have one engine, and where there are several it
//! follows from the problem which of them is made for it. Their problems (`cases/choice/`) are large enough for the chip's memory or its multiply-adds to bound the
//! time from below, and near enough to that bound for a factor of eight to show either way.

use std::collections::{BTreeMap, BTreeSet};

use rayon::prelude::*;
use verdigris::{Limits, survey};
use verdigris_engines::arch::Arch;
use verdigris_graph::pattern;
use verdigris_reference::graph_cases::{self, GraphCase};

const PROBLEMS: [(&str, &str); 10] = [
    ("attention", include_str!("../../../../../cases/choice/attention.toml")),
    ("norm", include_str!("../../../../../cases/choice/norm.toml")),
    ("batch_norm", include_str!("../../../../../cases/choice/batch_norm.toml")),
    ("pool", include_str!("../../../../../cases/choice/pool.toml")),
    ("softmax", include_str!("../../../../../cases/choice/softmax.toml")),
    ("reduction", include_str!("../../../../../cases/choice/reduction.toml")),
    ("scan", include_str!("../../../../../cases/choice/scan.toml")),
    ("resample", include_str!("../../../../../cases/choice/resample.toml")),
    ("pointwise", include_str!("../../../../../cases/choice/pointwise.toml")),
    ("movement", include_str!("../../../../../cases/choice/movement.toml")),
];
/// Bytes of an H200's memory in a microsecond, and floating-point operations of its tensor cores (16-bit, dense) and of its f32 units: NVIDIA's data sheet.
const BYTES_PER_US: f64 = 4.8e6;
const TENSOR_FLOPS_PER_US: f64 = 989e6;
const F32_FLOPS_PER_US: f64 = 67e6;
/// No estimate is below what the chip could do, but for rounding and for what stays in L2.
const LEAST: f64 = 0.9;
/// Estimates are broken by these factors, one engine at a time, and have to be told.
const BROKEN: [f64; 4] = [1000.0, 8.0, 1.0 / 8.0, 1.0 / 1000.0];

/// Problems of which it is known who is to take them.
struct Known {
    /// Family and group of the case file.
    group: &'static str,
    engines: &'static [&'static str],
    /// What multiplies in the engines that are right.
    flops_per_us: f64,
    /// Their estimates are at most so many times what the chip could do.
    most: f64,
}

const fn memory(group: &'static str, engines: &'static [&'static str]) -> Known {
    Known { group, engines, flops_per_us: F32_FLOPS_PER_US, most: 4.0 }
}

const fn tensor(group: &'static str, engines: &'static [&'static str]) -> Known {
    Known { group, engines, flops_per_us: TENSOR_FLOPS_PER_US, most: 4.0 }
}

const KNOWN: &[Known] = &[
    tensor("attention/forward", &["attention.forward"]),
    tensor("attention/forward-marks", &["attention.forward"]),
    tensor("attention/backward", &["attention.backward"]),
    tensor("attention/decode", &["attention.decode"]),
    tensor("attention/latent", &["attention.decode"]),
    // By `mma.sync`, with copies of 4 bytes.
    Known { most: 10.0, ..tensor("attention/copies", &["attention.mma"]) },
    Known { most: 7.0, ..memory("attention/f32", &["attention.simt"]) },
    Known { most: 7.0, ..memory("attention/odd", &["attention.simt"]) },
    memory("norm/rows", &["norm.rows"]),
    memory("norm/images-last", &["norm.groups"]),
    // Planes of an image fill a CTA's registers as well.
    memory("norm/instances", &["norm.groups", "norm.rows"]),
    memory("norm/columns", &["norm.strided"]),
    memory("batch_norm/images", &["batch_norm.channels"]),
    memory("pool/first", &["pool.planes", "pool.blocks"]),
    memory("pool/last", &["pool.direct", "pool.blocks"]),
    // The elements of a window are read once by either.
    memory("pool/global", &["pool.reduction", "pool.direct"]),
    memory("pool/global-gradient", &["pool.map"]),
    memory("pool/global-gradient-lines", &["pool.flat"]),
    memory("pool/windows", &["pool.windows"]),
    memory("softmax/rows", &["softmax.rows"]),
    memory("softmax/columns", &["softmax.rows"]),
    memory("softmax/losses", &["softmax.rows"]),
    memory("reduction/sums", &["reduce.rows", "reduce.simt"]),
    memory("scan/rows", &["scan.rows"]),
    memory("scan/columns", &["scan.rows"]),
    memory("resample/images", &["resample.gather"]),
    // Sixteen elements for each result, of which the caches hold some.
    Known { most: 48.0, ..memory("resample/cubic", &["resample.gather"]) },
    memory("pointwise/functions", &["map.simt"]),
    memory("movement/transposed", &["map.simt"]),
];

/// A problem, and the least estimate of each engine that takes it, as a multiple of what the chip could do.
struct Judged {
    id: String,
    known: &'static Known,
    estimates: BTreeMap<&'static str, f64>,
}

impl Judged {
    fn new(case: &GraphCase) -> Judged {
        let known = KNOWN.iter().find(|known| case.id.strip_prefix(known.group).is_some_and(|rest| rest.starts_with('/')));
        let known = known.unwrap_or_else(|| panic!("nobody is known to be right for {}", case.id));
        let partition = pattern::partition(&case.graph).unwrap_or_else(|error| panic!("{}: {error}", case.id));
        let [part] = &partition.parts[..] else { panic!("{} is cut into {} parts", case.id, partition.parts.len()) };
        let tensors = part.bindings.iter().filter_map(|uid| case.graph.tensor(*uid));
        let bytes: f64 = tensors.map(|tensor| tensor.layout.span_bytes(tensor.dtype) as f64).sum();
        let possible_us = (bytes / BYTES_PER_US).max(part.problem.flops() / known.flops_per_us);
        let mut estimates: BTreeMap<&'static str, f64> = BTreeMap::new();
        for way in survey(&part.problem, &Arch::h200(), &Limits::default()).ranked {
            let least = estimates.entry(way.engine.name).or_insert(f64::INFINITY);
            *least = least.min(way.cost.us / possible_us);
        }
        Judged { id: case.id.clone(), known, estimates }
    }

    /// The engines whose estimates are wrong, where all those of `broken` are multiplied by `factor`, each with what is wrong.
    fn wrong(&self, broken: &str, factor: f64) -> Vec<(&'static str, String)> {
        let estimates = self.estimates.iter().map(|(name, estimate)| (*name, if *name == broken { estimate * factor } else { *estimate }));
        let estimates: BTreeMap<&'static str, f64> = estimates.collect();
        let is_right = |name: &str| self.known.engines.contains(&name);
        let mut wrong = Vec::new();
        for (&name, &estimate) in &estimates {
            let is_possible = estimate >= LEAST && (!is_right(name) || estimate <= self.known.most);
            wrong.extend((!is_possible).then(|| (name, format!("{estimate:.3} times what the chip could do, of {}", self.id))));
        }
        let chosen = estimates.iter().min_by(|one, other| one.1.total_cmp(other.1)).map(|(name, _)| *name);
        match chosen {
            Some(name) if is_right(name) => {}
            Some(name) => wrong.push((name, format!("taken for {}", self.id))),
            None => panic!("nobody takes {}", self.id),
        }
        wrong
    }
}

/// What is wrong with the estimates of each engine.
fn suspects(judged: &[Judged], broken: &str, factor: f64) -> BTreeMap<&'static str, Vec<String>> {
    let mut by_engine: BTreeMap<&'static str, Vec<String>> = BTreeMap::new();
    for (name, what) in judged.iter().flat_map(|one| one.wrong(broken, factor)) {
        by_engine.entry(name).or_default().push(what);
    }
    by_engine
}

#[test]
fn the_engine_that_is_known_to_be_right_is_taken_and_estimates_are_possible() {
    let load = |(family, text): &(&str, &str)| graph_cases::load(family, text).unwrap_or_else(|error| panic!("{family}: {error:#}"));
    let cases: Vec<GraphCase> = PROBLEMS.iter().flat_map(load).collect();
    let judged: Vec<Judged> = cases.par_iter().map(Judged::new).collect();
    assert!(judged.len() > 300, "{} problems", judged.len());
    assert_eq!(suspects(&judged, "", 1.0), BTreeMap::new());
    for known in KNOWN {
        let count = judged.iter().filter(|one| one.known.group == known.group).count();
        assert!(count > 0, "{} has no problem", known.group);
        let taken = |name: &str| judged.iter().any(|one| one.known.group == known.group && one.estimates.contains_key(name));
        assert!(known.engines.iter().all(|name| taken(name)), "not all of {:?} take a problem of {}", known.engines, known.group);
    }
    let all: BTreeSet<&str> = judged.iter().flat_map(|one| one.estimates.keys().copied()).collect();
    let right: BTreeSet<&str> = KNOWN.iter().flat_map(|known| known.engines.iter().copied()).collect();
    assert_eq!(all, right, "each engine is right for something");
    for name in all {
        for factor in BROKEN {
            let told = suspects(&judged, name, factor);
            assert!(told.contains_key(name), "{name} × {factor} goes unseen");
        }
    }
}
