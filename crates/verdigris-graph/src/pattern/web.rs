//! The ops of a graph and the tensors between them, by number.

use std::collections::HashMap;

use crate::error::Error;
use crate::graph::Graph;
use crate::op::Op;
use crate::tensor::{TensorDesc, Uid};

/// Short lists, one behind the other.
#[derive(Default)]
struct Lists {
    ends: Vec<usize>,
    items: Vec<usize>,
}

impl Lists {
    fn push(&mut self, list: impl IntoIterator<Item = usize>) {
        self.items.extend(list);
        self.ends.push(self.items.len());
    }

    fn of(&self, i: usize) -> &[usize] {
        let begin = i.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.items[begin..self.ends[i]]
    }
}

/// A graph by number: ops count as in its list of nodes, tensors as in its list of tensors.
pub(super) struct Web<'g> {
    pub(super) graph: &'g Graph,
    numbers: HashMap<Uid, usize>,
    inputs: Lists,
    outputs: Lists,
    producer: Vec<Option<usize>>,
    readers: Lists,
    tree: Tree,
}

impl<'g> Web<'g> {
    pub(super) fn new(graph: &'g Graph) -> Result<Web<'g>, Error> {
        let numbers: HashMap<Uid, usize> = graph.tensors.iter().enumerate().map(|(i, tensor)| (tensor.uid, i)).collect();
        let of = |op: &str, uid: Uid| numbers.get(&uid).copied().ok_or_else(|| Error::UnknownTensor { op: op.to_owned(), uid });
        let (mut inputs, mut outputs) = (Lists::default(), Lists::default());
        let mut producer = vec![None; graph.tensors.len()];
        let mut readers = vec![Vec::new(); graph.tensors.len()];
        for (i, node) in graph.nodes.iter().enumerate() {
            let numbered = |uids: Vec<Uid>| uids.into_iter().map(|uid| of(&node.name, uid)).collect::<Result<Vec<usize>, Error>>();
            let (read, written) = (numbered(node.op.inputs())?, numbered(node.op.outputs())?);
            for &tensor in &read {
                if readers[tensor].last() != Some(&i) {
                    readers[tensor].push(i);
                }
            }
            written.iter().for_each(|&tensor| producer[tensor] = Some(i));
            inputs.push(read);
            outputs.push(written);
        }
        let mut all = Lists::default();
        readers.into_iter().for_each(|list| all.push(list));
        let parent = |op: usize| inputs.of(op).iter().filter_map(|&tensor| producer[tensor]).max();
        let tree = Tree::new(&(0..graph.nodes.len()).map(parent).collect::<Vec<_>>());
        Ok(Web { graph, numbers, inputs, outputs, producer, readers: all, tree })
    }

    pub(super) fn op(&self, op: usize) -> &'g Op {
        &self.graph.nodes[op].op
    }

    /// How many ops there are.
    pub(super) fn len(&self) -> usize {
        self.graph.nodes.len()
    }

    /// The number of a tensor.
    pub(super) fn number(&self, uid: Uid) -> Option<usize> {
        self.numbers.get(&uid).copied()
    }

    pub(super) fn tensor(&self, tensor: usize) -> &'g TensorDesc {
        &self.graph.tensors[tensor]
    }

    /// The tensors that an op reads, in the order of its fields; one that is read twice is listed twice.
    pub(super) fn inputs(&self, op: usize) -> &[usize] {
        self.inputs.of(op)
    }

    /// The tensors that an op writes, its main result first.
    pub(super) fn outputs(&self, op: usize) -> &[usize] {
        self.outputs.of(op)
    }

    /// The op that writes a tensor.
    pub(super) fn producer(&self, tensor: usize) -> Option<usize> {
        self.producer[tensor]
    }

    /// The ops that read a tensor, in order, each once.
    pub(super) fn readers(&self, tensor: usize) -> &[usize] {
        self.readers.of(tensor)
    }

    /// The ops that read what an op writes.
    pub(super) fn after(&self, op: usize) -> impl Iterator<Item = usize> {
        self.outputs(op).iter().flat_map(|&tensor| self.readers(tensor)).copied()
    }

    /// The ops that write what an op reads.
    pub(super) fn before(&self, op: usize) -> impl Iterator<Item = usize> {
        self.inputs(op).iter().filter_map(|&tensor| self.producer(tensor))
    }

    /// Whether `late` certainly waits for `early`: the way that leads from it to its latest operand, to the latest operand of that, and so on
    /// comes past. Where this says no there may be another way.
    pub(super) fn surely_waits(&self, late: usize, early: usize) -> bool {
        self.tree.is_below(late, early)
    }
}

/// For each op one that it waits for, as a forest: an op and all that hang below it have consecutive numbers.
struct Tree {
    /// The number of each op, and the largest below it.
    spans: Vec<(usize, usize)>,
}

impl Tree {
    /// Every parent is before its child.
    fn new(parents: &[Option<usize>]) -> Tree {
        let mut below = vec![1_usize; parents.len()];
        for op in (0..parents.len()).rev() {
            if let Some(parent) = parents[op] {
                below[parent] += below[op];
            }
        }
        // The next free number below each op; parents come first.
        let mut free = vec![0; parents.len()];
        let mut roots = 0;
        let mut spans = Vec::with_capacity(parents.len());
        for op in 0..parents.len() {
            let next = parents[op].map_or(&mut roots, |parent| &mut free[parent]);
            let number = *next;
            *next += below[op];
            free[op] = number + 1;
            spans.push((number, number + below[op] - 1));
        }
        Tree { spans }
    }

    fn is_below(&self, low: usize, high: usize) -> bool {
        let (first, last) = self.spans[high];
        (first..=last).contains(&self.spans[low].0)
    }
}
