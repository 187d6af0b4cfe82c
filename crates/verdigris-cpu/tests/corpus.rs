//! The case files and random graphs on the CPU device, against the reference.
//!
//! `VERDIGRIS_FUZZ_GRAPHS` sets how many random graphs (default 5,000), `VERDIGRIS_FUZZ_SEED` the first of them, `VERDIGRIS_CASE` a part of
//! the ids of the cases that are run.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use verdigris_cpu::{Bindings, GraphPlan};
use verdigris_graph::{Graph, Uid, json};
use verdigris_reference::fuzz;
use verdigris_reference::graph::Selection;
use verdigris_reference::graph_cases::{FAMILIES, GraphCase, load_file};
use verdigris_reference::judge::judge;
use verdigris_reference::run::Inputs;

fn execute(graph: &Graph, inputs: &Inputs<Uid>, outputs: &mut BTreeMap<Uid, Vec<u8>>) -> Result<(), String> {
    let plan = GraphPlan::new(graph).map_err(|error| error.to_string())?;
    let mut bindings = Bindings::new();
    for (&uid, bytes) in &inputs.buffers {
        bindings.input(uid, bytes);
    }
    for (&uid, &value) in &inputs.scalars {
        bindings.scalar(uid, value);
    }
    for (&uid, bytes) in outputs {
        bindings.output(uid, bytes);
    }
    plan.run(&mut bindings).map(drop).map_err(|error| error.to_string())
}

/// What is wrong with a graph, a panic included.
fn fault(case: &GraphCase, graph: &Graph) -> Option<String> {
    let run = || judge(graph, case.distribution, case.seed, Selection::All, execute).err();
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Some("a panic".to_owned()))
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn every_case_is_right() {
    let filter = std::env::var("VERDIGRIS_CASE").unwrap_or_default();
    let mut wrong = Vec::new();
    for family in FAMILIES {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../cases/{family}.toml"));
        for case in load_file(&path).unwrap().iter().filter(|case| !case.device_only && case.id.contains(&filter)) {
            wrong.extend(fault(case, &case.graph).map(|fault| format!("{}: {fault}", case.id)));
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn random_graphs_are_right() {
    let first = number("VERDIGRIS_FUZZ_SEED").unwrap_or(0);
    let mut wrong = Vec::new();
    for seed in first..first + number("VERDIGRIS_FUZZ_GRAPHS").unwrap_or(5_000) {
        let case = fuzz::graph(seed);
        if fault(&case, &case.graph).is_some() {
            let smallest = fuzz::shrink(&case.graph, |graph| fault(&case, graph).is_some());
            let what = fault(&case, &smallest).unwrap_or_default();
            wrong.push(format!("seed {seed}, {:?}: {what}\n{}", case.distribution, json::graph_to_json(&smallest)));
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}
