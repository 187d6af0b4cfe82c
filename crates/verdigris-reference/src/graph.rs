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

use verdigris_graph::{Graph, HostScalar, Op, Pointwise, TensorDesc, Uid};

use crate::data::Random;
use crate::ops::conv::Convolved;
use crate::ops::matmul::Multiplied;
use crate::ops::movement::Moved;
use crate::ops::pointwise::Mapped;
use crate::ops::pool::{Pooled, PooledBack};
use crate::ops::reduction::Reduced;
use crate::ops::softmax::{CrossEntropied, CrossEntropiedBack, Softmaxed, SoftmaxedBack};
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
        evaluation.step(&node.op)?;
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

struct Evaluation<'a> {
    graph: &'a Graph,
    inputs: &'a Inputs<Uid>,
    selection: Selection,
    /// Tensors that some op reads.
    read: HashSet<Uid>,
    sources: HashMap<Uid, Source<'a>>,
    bits: HashMap<Uid, u32>,
}

impl<'a> Evaluation<'a> {
    fn described(&self, uid: Uid) -> Result<&'a TensorDesc, GraphError> {
        let unknown = || verdigris_graph::Error::UnknownTensor { op: self.graph.name.clone(), uid };
        Ok(self.graph.tensor(uid).ok_or_else(unknown)?)
    }

    fn source(&mut self, uid: Uid) -> Result<Source<'a>, GraphError> {
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

    fn scalar(&self, uid: Uid) -> Result<f64, GraphError> {
        self.inputs.scalars.get(&uid).copied().ok_or(GraphError::NoScalar { uid })
    }

    fn dims(&self, uid: Uid) -> Result<&'a [u64], GraphError> {
        Ok(self.described(uid)?.layout.dims())
    }

    /// Takes in the result of an op.
    fn put(&mut self, uid: Uid, formula: impl Formula + 'a) -> Result<(), GraphError> {
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

    fn step(&mut self, op: &'a Op) -> Result<(), GraphError> {
        let bits = |this: &Self, uid: Uid| this.bits.get(&uid).copied().unwrap_or(53);
        match op {
            Op::Matmul(matmul) => {
                let out = self.dims(matmul.d)?;
                let (scalars, missing) = (&self.inputs.scalars, |uid| GraphError::NoScalar { uid });
                let scalar = |uid: Uid| scalars.get(&uid).copied().ok_or_else(|| missing(uid));
                let formula = Multiplied::new(matmul, out, |uid| self.source(uid), scalar)?;
                self.put(matmul.d, formula)
            }
            Op::Pointwise(op) => {
                let inputs = op.operands().into_iter().map(|uid| self.source(uid)).collect::<Result<_, _>>()?;
                let factor = match op {
                    Pointwise::Scale { factor: HostScalar::Fixed(real), .. } => real.0,
                    Pointwise::Scale { factor: HostScalar::Bound(uid), .. } => self.scalar(*uid)?,
                    _ => 1.0,
                };
                let y = op.output();
                self.put(y, Mapped::new(op, inputs, factor, self.dims(y)?, bits(self, y)))
            }
            Op::Conv(conv) => {
                let [left, right] = conv.operands();
                let (left, right) = (self.source(left)?, self.source(right)?);
                self.put(conv.output(), Convolved::new(conv, left, right, self.dims(conv.output())?))
            }
            Op::Reduction(reduction) => {
                let x = self.source(reduction.x)?;
                self.put(reduction.y, Reduced::new(reduction, x))
            }
            Op::Pool(pool) => {
                let (x, out) = (self.source(pool.x)?, self.dims(pool.y)?);
                self.put(pool.y, Pooled::new(pool.mode, &pool.windows, x.clone(), out, false))?;
                match pool.index {
                    Some(index) => self.put(index, Pooled::new(pool.mode, &pool.windows, x, out, true)),
                    None => Ok(()),
                }
            }
            Op::PoolBackward(pool) => {
                let dy = self.source(pool.dy)?;
                let x = pool.x.map(|x| self.source(x)).transpose()?;
                let index = pool.index.map(|index| self.source(index)).transpose()?;
                let formula = PooledBack::new(pool.mode, &pool.windows, &dy, x.as_ref(), index.as_ref(), self.dims(pool.dx)?);
                self.put(pool.dx, formula)
            }
            Op::Softmax(op) => {
                let x = self.source(op.x)?;
                self.put(op.y, Softmaxed::new(x, op.axis, op.log, bits(self, op.y)))
            }
            Op::SoftmaxBackward(op) => {
                let (y, dy) = (self.source(op.y)?, self.source(op.dy)?);
                self.put(op.dx, SoftmaxedBack::new(y, dy, op.axis, op.log, bits(self, op.dx)))
            }
            Op::CrossEntropy(op) => {
                let (logits, labels) = (self.source(op.logits)?, self.source(op.labels)?);
                let formula = CrossEntropied::new(op.spec, logits.clone(), labels.clone(), false, bits(self, op.loss));
                self.put(op.loss, formula)?;
                match op.lse {
                    Some(lse) => self.put(lse, CrossEntropied::new(op.spec, logits, labels, true, bits(self, lse))),
                    None => Ok(()),
                }
            }
            Op::CrossEntropyBackward(op) => {
                let (logits, labels, dloss) = (self.source(op.logits)?, self.source(op.labels)?, self.source(op.dloss)?);
                let lse = op.lse.map(|lse| self.source(lse)).transpose()?;
                self.put(op.dlogits, CrossEntropiedBack::new(op.spec, logits, labels, dloss, lse, bits(self, op.dlogits)))
            }
            Op::Movement(movement) => {
                let inputs = op.inputs().into_iter().map(|uid| self.source(uid)).collect::<Result<_, _>>()?;
                let y = self.described(movement.output())?;
                self.put(y.uid, Moved::new(movement, y.dtype, inputs, y.layout.dims()))
            }
        }
    }
}
