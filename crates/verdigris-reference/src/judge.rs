//! A graph, made inputs, somebody's answer: is it right?

use std::collections::BTreeMap;

use verdigris_graph::{Graph, Uid};

use crate::compare::compare;
use crate::data::{Distribution, graph_inputs, output_buffer};
use crate::graph::{Selection, evaluate};
use crate::run::Inputs;

/// What was looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Judged {
    /// Elements of all outputs that were compared.
    pub elements: u64,
    /// Those about which the rounding model says nothing.
    pub unjudged: u64,
}

/// Makes inputs for a graph, has it executed, and holds every stored output against the reference.
///
/// `execute` is given the inputs and, for each stored output, a buffer full of sentinels with a guard behind it ([`output_buffer`]), in
/// which it is to leave the output; bytes that belong to no element must stay.
///
/// # Errors
/// What is wrong, in words: a graph that cannot be evaluated, what `execute` says, or the first output that does not pass.
pub fn judge(
    graph: &Graph,
    distribution: Distribution,
    seed: u64,
    selection: Selection,
    execute: impl FnOnce(&Graph, &Inputs<Uid>, &mut BTreeMap<Uid, Vec<u8>>) -> Result<(), String>,
) -> Result<Judged, String> {
    let inputs = graph_inputs(graph, distribution, seed);
    let expected = evaluate(graph, &inputs, selection).map_err(|error| format!("the reference: {error}"))?;
    let before: BTreeMap<Uid, Vec<u8>> = expected.iter().map(|output| (output.id, output_buffer(output, &inputs))).collect();
    let mut after = before.clone();
    execute(graph, &inputs, &mut after)?;
    let mut judged = Judged::default();
    for output in &expected {
        let (Some(before), Some(after)) = (before.get(&output.id), after.get(&output.id)) else {
            return Err(format!("output {} was taken away", output.id));
        };
        let report = compare(output, before, after);
        if !report.passes() {
            let name = graph.tensor(output.id).map_or("", |tensor| tensor.name.as_str());
            return Err(format!("output `{name}` ({}, {}): {report}", output.id, output.dtype));
        }
        judged.elements += report.elements;
        judged.unjudged += report.unjudged;
    }
    Ok(judged)
}
