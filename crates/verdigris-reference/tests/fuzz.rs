//! The generator of random graphs and the shrinker.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};

use verdigris_graph::spec::SPECS;
use verdigris_graph::{Graph, Op, Pointwise, UnaryOp, json};
use verdigris_reference::fuzz::{graph, shrink};
use verdigris_reference::graph::{Selection, evaluate};
use verdigris_reference::judge::judge;

/// The word for an op in counts.
fn kind(op: &Op) -> &'static str {
    match op {
        Op::Conv(conv) => conv.direction.name(),
        Op::Movement(movement) => movement.name(),
        op => op.spec().name,
    }
}

#[test]
fn graphs_are_valid_varied_and_have_a_truth() {
    let mut kinds: BTreeMap<&str, u64> = BTreeMap::new();
    let mut lengths: BTreeMap<usize, u64> = BTreeMap::new();
    let (mut several, mut shared, mut elements, mut unjudged) = (0, 0, 0, 0);
    for seed in 0..1500 {
        let case = graph(seed);
        assert_eq!(graph(seed), case);
        let text = json::graph_to_json(&case.graph);
        assert_eq!(json::graph_from_json(&text).as_ref(), Ok(&case.graph), "{seed}");
        for node in &case.graph.nodes {
            *kinds.entry(kind(&node.op)).or_default() += 1;
        }
        *lengths.entry(case.graph.nodes.len()).or_default() += 1;
        let mut inputs: Vec<_> = case.graph.nodes.iter().flat_map(|node| node.op.inputs()).collect();
        let all = inputs.len();
        inputs.sort();
        inputs.dedup();
        shared += usize::from(inputs.len() < all);
        // The right answer, rounded, passes.
        let judged = judge(&case.graph, case.distribution, seed, Selection::All, |graph, inputs, outputs| {
            let expected = evaluate(graph, inputs, Selection::All).map_err(|error| error.to_string())?;
            several += usize::from(expected.len() > 1);
            for output in expected {
                let right = output.rounded(&outputs[&output.id]);
                outputs.insert(output.id, right);
            }
            Ok(())
        });
        let judged = judged.unwrap_or_else(|what| panic!("{seed}: {what}\n{text}"));
        elements += judged.elements;
        unjudged += judged.unjudged;
    }
    eprintln!("{kinds:?} {lengths:?}, {several} of several outputs, {shared} with shared inputs, {unjudged} of {elements} not judged");
    // Convolution has three directions, movement six forms.
    assert!(kinds.len() == SPECS.len() + 2 + 5 && kinds.values().all(|&count| count > 20), "{kinds:?}");
    assert!((1..=8).all(|length| lengths[&length] > 20), "{lengths:?}");
    assert!(several > 300 && shared > 200);
    assert!(unjudged * 10 < elements, "{unjudged} of {elements} are not judged");
}

#[test]
fn a_planted_fault_is_shrunk_to_its_op() {
    let has_exp = |graph: &Graph| graph.nodes.iter().any(|node| matches!(node.op, Op::Pointwise(Pointwise::Unary { f: UnaryOp::Exp, .. })));
    let mut sizes = BTreeSet::new();
    for seed in 0..600 {
        let case = graph(seed);
        if has_exp(&case.graph) {
            let smallest = shrink(&case.graph, has_exp);
            assert_eq!(smallest.nodes.len(), 1, "{}", json::graph_to_json(&smallest));
            assert_eq!(smallest.tensors.len(), 2);
            sizes.extend(smallest.tensors.iter().map(|tensor| tensor.layout.elements()));
        }
    }
    assert!(!sizes.is_empty() && sizes.iter().all(|&elements| elements <= 1), "{sizes:?}");
}

#[test]
fn a_wrong_answer_a_refusal_and_a_stray_byte_are_told() {
    let case =
        (0..).map(graph).find(|case| case.graph.nodes.len() == 1 && case.graph.tensors.iter().all(|t| t.layout.elements() > 3)).unwrap();
    let judge = |execute: &dyn Fn(&mut Vec<u8>) -> Result<(), String>| {
        judge(&case.graph, case.distribution, 1, Selection::All, |graph, inputs, outputs| {
            for output in evaluate(graph, inputs, Selection::All).map_err(|error| error.to_string())? {
                let mut right = output.rounded(&outputs[&output.id]);
                execute(&mut right)?;
                outputs.insert(output.id, right);
            }
            Ok(())
        })
    };
    assert!(judge(&|_| Ok(())).is_ok());
    assert_eq!(judge(&|_| Err("no engine".to_owned())), Err("no engine".to_owned()));
    let stray = judge(&|bytes| {
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        Ok(())
    });
    assert!(stray.unwrap_err().contains("belong to no element"));
}
