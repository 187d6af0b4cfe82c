//! A graph, made inputs, somebody's answer: is it right?

use std::collections::BTreeMap;

use verdigris_graph::{Graph, Uid};

use crate::compare::compare;
use crate::data::{Distribution, graph_inputs, output_buffer};
use crate::graph::{GraphError, Selection, evaluate};
use crate::run::{Expected, Inputs};

/// What was looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Judged {
    /// Elements of all outputs that were compared.
    pub elements: u64,
    /// Those about which the rounding model says nothing.
    pub unjudged: u64,
}

/// A graph with made inputs and what its outputs must be: the same for all who run it.
#[derive(Clone, Debug)]
pub struct Trial {
    names: BTreeMap<Uid, String>,
    /// What is read.
    pub inputs: Inputs<Uid>,
    expected: Vec<Expected<Uid>>,
    /// Sentinels.
    before: BTreeMap<Uid, Vec<u8>>,
    /// The same, or what lies there.
    given: BTreeMap<Uid, Vec<u8>>,
}

impl Trial {
    /// Makes the inputs and evaluates the graph.
    ///
    /// # Errors
    /// A graph that cannot be evaluated.
    pub fn new(graph: &Graph, distribution: Distribution, seed: u64, selection: Selection) -> Result<Trial, GraphError> {
        let inputs = graph_inputs(graph, distribution, seed);
        let expected = evaluate(graph, &inputs, selection)?;
        let before: BTreeMap<Uid, Vec<u8>> = expected.iter().map(|output| (output.id, output_buffer(output, &inputs))).collect();
        let mut given = before.clone();
        for (output, input) in graph.in_place() {
            // What lies in the place of an input holds its elements.
            if let (Some(tensor), Some(bytes), Some(held)) = (graph.tensor(output), given.get_mut(&output), inputs.buffers.get(&input)) {
                let size = tensor.dtype.bytes();
                for place in (0..tensor.layout.elements()).filter_map(|position| tensor.layout.offset_of_position(position)) {
                    let element = place as usize * size..(place as usize + 1) * size;
                    if let (Some(to), Some(from)) = (bytes.get_mut(element.clone()), held.get(element)) {
                        to.copy_from_slice(from);
                    }
                }
            }
        }
        let names = graph.tensors.iter().map(|tensor| (tensor.uid, tensor.name.clone())).collect();
        Ok(Trial { names, inputs, expected, before, given })
    }

    /// For each stored output a buffer full of sentinels with a guard behind it ([`output_buffer`]), in which it is to be left; one that lies in the place of an
    /// input ([`Graph::in_place`]) holds that. Bytes that
    /// belong to no element must stay.
    pub fn outputs(&self) -> &BTreeMap<Uid, Vec<u8>> {
        &self.given
    }

    /// Holds every output against the reference.
    ///
    /// # Errors
    /// The first output that does not pass, in words.
    pub fn judge(&self, after: &BTreeMap<Uid, Vec<u8>>) -> Result<Judged, String> {
        let mut judged = Judged::default();
        for output in &self.expected {
            let (Some(before), Some(after)) = (self.before.get(&output.id), after.get(&output.id)) else {
                return Err(format!("output {} was taken away", output.id));
            };
            let report = compare(output, before, after);
            if !report.passes() {
                let name = self.names.get(&output.id).map_or("", String::as_str);
                return Err(format!("output `{name}` ({}, {}): {report}", output.id, output.dtype));
            }
            judged.elements += report.elements;
            judged.unjudged += report.unjudged;
        }
        Ok(judged)
    }
}

/// Makes a [`Trial`] of a graph, has it executed, and judges: `execute` is given the inputs and the buffers of the outputs.
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
    let trial = Trial::new(graph, distribution, seed, selection).map_err(|error| format!("the reference: {error}"))?;
    let mut after = trial.outputs().clone();
    execute(graph, &trial.inputs, &mut after)?;
    trial.judge(&after)
}
