//! The graphs that Python's `flex_attention` draws for score functions of which attention has no options: every part of them has an engine on a chip, and what the engines'
//! kernels compute is what the reference does. The graphs are those of a call, which a test of the Python package holds them against.

use verdigris_engines::arch::Arch;
use verdigris_engines::engines;
use verdigris_engines::interpret::Parts;
use verdigris_graph::json;
use verdigris_kir::interp::{Kernels, Options};
use verdigris_reference::data::Distribution;
use verdigris_reference::graph::Selection;
use verdigris_reference::judge::Trial;

fn run(text: &str, variants: usize) {
    let graph = json::graph_from_json(text).expect("a graph");
    let engines: Vec<_> = engines().collect();
    let kernels = Kernels::new();
    let trial = Trial::new(&graph, Distribution::Normal, 20, Selection::All).expect("the reference takes it");
    let arch = Arch::virtual_device(3);
    let parts = Parts::all(&graph, &arch, &engines).expect("is cut");
    for (part, configs) in parts.partition.parts.iter().zip(&parts.configs) {
        assert!(!configs.is_empty(), "nobody takes a part of kind {}", part.problem.kind());
    }
    for variant in 0..variants.min(parts.variants()) {
        let mut buffers = trial.inputs.buffers.clone();
        buffers.extend(trial.outputs().clone());
        let options = Options { sms: arch.sm_count, ..Options::schedule(variant as u64) };
        let ways: Vec<String> = parts.chosen(variant).map(|config| format!("{} {}", config.engine, config.knobs)).collect();
        parts
            .interpret(variant, &mut buffers, &trial.inputs.scalars, &kernels, &options)
            .unwrap_or_else(|fault| panic!("{}: {fault}", ways.join(" then ")));
        trial.judge(&buffers).unwrap_or_else(|wrong| panic!("{}: {wrong}", ways.join(" then ")));
    }
}

#[test]
fn forward_of_f32() {
    run(include_str!("flex_graphs/forward_f32.json"), 4);
}

#[test]
fn forward_of_bf16() {
    run(include_str!("flex_graphs/forward_bf16.json"), 4);
}

#[test]
fn backward_of_f32() {
    run(include_str!("flex_graphs/backward_f32.json"), 4);
}

#[test]
fn backward_of_bf16() {
    run(include_str!("flex_graphs/backward_bf16.json"), 4);
}
