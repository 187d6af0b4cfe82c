//! A graph and its inputs → what its stored outputs must be.
//!
//! The ops are evaluated one after the other in `f64`. Each element carries a bound on the error that a right answer may have there: what
//! came in, carried through the op, and what the op may add ([`crate::tolerance`]); then the rounding to the tensor's type, for a virtual
//! tensor too, since the value of a tensor is what its type holds. Where an op jumps within the bound (a comparison, the index of a
//! maximum) both sides are right; where nothing can be said, the bound is infinite, and [`crate::compare`] counts the element as not judged.
//!
//! A result of more than 2²³ elements is not held but computed anew wherever it is read, and so is one of which a selection alone is read,
//! so that a graph of any size can be judged at a few positions.

use std::collections::{HashMap, HashSet};

use verdigris_graph::{Graph, TensorDesc, Uid};

use crate::data::Random;
use crate::operation;
use crate::run::{Expected, Inputs};
use crate::source::{Formula, Source};
use crate::tolerance::significant_bits;

/// Which elements of the outputs are wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Selection {
    /// All of them.
    All,
    /// Of each output about so many, its corners among them; all of an output that has no more.
    Sample {
        /// How many.
        count: u64,
        /// Which ones.
        seed: u64,
    },
}

impl Selection {
    /// The row-major positions that are taken of an output, ascending.
    pub fn positions(self, dims: &[u64]) -> Vec<u64> {
        let all: u64 = dims.iter().product();
        let (count, seed) = match self {
            Selection::Sample { count, seed } if count < all => (count, seed),
            _ => return (0..all).collect(),
        };
        let mut random = Random::new(seed);
        let mut positions = Vec::new();
        // Corners: each dim at its first or its last index.
        for corner in 0..1u64 << dims.len().min(6) {
            let index = dims.iter().enumerate().map(|(i, dim)| if corner >> i & 1 == 1 { dim - 1 } else { 0 });
            positions.push(index.zip(dims).fold(0, |position, (i, dim)| position * dim + i));
        }
        while (positions.len() as u64) < count {
            positions.push(random.below(all));
        }
        positions.sort_unstable();
        positions.dedup();
        positions
    }

    /// Whether only some of so many elements are taken.
    fn is_part_of(self, elements: u64) -> bool {
        matches!(self, Selection::Sample { count, .. } if count < elements)
    }
}

/// A graph that cannot be evaluated.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum GraphError {
    /// The graph breaks a rule.
    #[error(transparent)]
    Graph(#[from] verdigris_graph::Error),
    /// A tensor that is read has no buffer.
    #[error("tensor `{tensor}` ({uid}) is read, but no buffer is bound to it")]
    NoBuffer {
        /// Its name.
        tensor: String,
        /// Its uid.
        uid: Uid,
    },
    /// A buffer ends before its tensor does.
    #[error("tensor `{tensor}` ({uid}) spans {need_bytes} bytes, but its buffer has {have_bytes}")]
    ShortBuffer {
        /// Its name.
        tensor: String,
        /// Its uid.
        uid: Uid,
        /// Bytes bound.
        have_bytes: u64,
        /// Bytes needed.
        need_bytes: u128,
    },
    /// A host scalar is not bound.
    #[error("{uid} is a host scalar, but no value is bound to it")]
    NoScalar {
        /// Its uid.
        uid: Uid,
    },
}

/// Computes what each stored tensor that the graph writes must hold, in the order of the graph's list of tensors.
///
/// # Errors
/// A graph that breaks a rule; a buffer or a scalar that is missing or too short.
pub fn evaluate(graph: &Graph, inputs: &Inputs<Uid>, selection: Selection) -> Result<Vec<Expected<Uid>>, GraphError> {
    verdigris_graph::validate::validate(graph)?;
    let read = graph.nodes.iter().flat_map(|node| node.op.inputs()).collect();
    let mut evaluation = Evaluation { graph, inputs, selection, read, sources: HashMap::new(), bits: demands(graph) };
    for node in &graph.nodes {
        operation::evaluate(&node.op, &mut evaluation)?;
    }
    let written: Vec<Uid> = graph.nodes.iter().flat_map(|node| node.op.outputs()).collect();
    let outputs = graph.tensors.iter().filter(|tensor| !tensor.is_virtual && written.contains(&tensor.uid));
    outputs
        .map(|tensor| {
            let source = evaluation.source(tensor.uid)?;
            let positions = selection.positions(tensor.layout.dims());
            let mut index = vec![0; tensor.layout.rank()];
            let values = positions.iter().map(|&position| {
                let mut rest = position;
                for (i, dim) in index.iter_mut().zip(tensor.layout.dims()).rev() {
                    *i = rest % dim;
                    rest /= dim;
                }
                source.at(&index)
            });
            let values = values.collect();
            Ok(Expected { id: tensor.uid, dtype: tensor.dtype, layout: tensor.layout, positions, values, magnitudes: Vec::new() })
        })
        .collect()
}

/// How many significant bits of each tensor matter in the end: of a stored one those of its type, of a virtual one no more than of what
/// is made of it. It decides how well a function must be computed.
fn demands(graph: &Graph) -> HashMap<Uid, u32> {
    let mut bits: HashMap<Uid, u32> =
        graph.tensors.iter().map(|tensor| (tensor.uid, if tensor.is_virtual { 0 } else { significant_bits(tensor.dtype) })).collect();
    let described: HashMap<Uid, &TensorDesc> = graph.tensors.iter().map(|tensor| (tensor.uid, tensor)).collect();
    for node in graph.nodes.iter().rev() {
        let most = node.op.outputs().iter().filter_map(|uid| bits.get(uid)).copied().max().unwrap_or(0);
        for uid in node.op.inputs() {
            if let Some(tensor) = described.get(&uid).filter(|tensor| tensor.is_virtual) {
                let entry = bits.entry(uid).or_default();
                *entry = (*entry).max(most.min(significant_bits(tensor.dtype)));
            }
        }
    }
    bits
}

/// A graph being evaluated, op by op.
pub(crate) struct Evaluation<'a> {
    graph: &'a Graph,
    pub(crate) inputs: &'a Inputs<Uid>,
    selection: Selection,
    /// Tensors that some op reads.
    read: HashSet<Uid>,
    sources: HashMap<Uid, Source<'a>>,
    bits: HashMap<Uid, u32>,
}

impl<'a> Evaluation<'a> {
    pub(crate) fn described(&self, uid: Uid) -> Result<&'a TensorDesc, GraphError> {
        let unknown = || verdigris_graph::Error::UnknownTensor { op: self.graph.name.clone(), uid };
        Ok(self.graph.tensor(uid).ok_or_else(unknown)?)
    }

    pub(crate) fn source(&mut self, uid: Uid) -> Result<Source<'a>, GraphError> {
        if let Some(source) = self.sources.get(&uid) {
            return Ok(source.clone());
        }
        let TensorDesc { name, dtype, layout, .. } = self.described(uid)?;
        let bytes = match self.inputs.buffers.get(&uid) {
            Some(bytes) => bytes.as_slice(),
            None if layout.is_empty() => &[],
            None => return Err(GraphError::NoBuffer { tensor: name.clone(), uid }),
        };
        let short =
            || GraphError::ShortBuffer { tensor: name.clone(), uid, have_bytes: bytes.len() as u64, need_bytes: layout.span_bytes(*dtype) };
        let source = Source::stored(*dtype, layout, bytes).ok_or_else(short)?;
        self.sources.insert(uid, source.clone());
        Ok(source)
    }

    pub(crate) fn scalar(&self, uid: Uid) -> Result<f64, GraphError> {
        self.inputs.scalars.get(&uid).copied().ok_or(GraphError::NoScalar { uid })
    }

    pub(crate) fn dims(&self, uid: Uid) -> Result<&'a [u64], GraphError> {
        Ok(self.described(uid)?.layout.dims())
    }

    /// Takes in the result of an op.
    pub(crate) fn put(&mut self, uid: Uid, formula: impl Formula + 'a) -> Result<(), GraphError> {
        let tensor = self.described(uid)?;
        let dims = tensor.layout.dims();
        // Of a result that nothing else reads, only the selection is wanted.
        let source = if self.selection.is_part_of(tensor.layout.elements()) && !self.read.contains(&uid) {
            Source::computed_when_read(tensor.dtype, dims, formula)
        } else {
            Source::computed(tensor.dtype, dims, formula)
        };
        self.sources.insert(uid, source);
        Ok(())
    }

    /// The significant bits of a tensor that matter in the end.
    pub(crate) fn bits(&self, uid: Uid) -> u32 {
        self.bits.get(&uid).copied().unwrap_or(53)
    }
}
