//! From a graph to the problems that engines take.
//!
//! A small closed set of patterns, and no search: **a matmul and the chain of pointwise ops behind it** is one [`Problem::Gemm`].
//! The chain follows the value from op to op while it is read by exactly one pointwise op, and ends at a stored tensor that no
//! pointwise op of the chain reads. A stored tensor in the middle of the chain becomes an auxiliary output. Several matmuls in one
//! graph give several problems, in an order in which each can run, provided that stored tensors lie between them.
//!
//! The value of a tensor is what its type holds, so a tensor in the middle whose type is narrower than the epilogue's becomes a
//! rounding step: the fused result is that of the unfused graph.

use std::collections::{HashMap, HashSet};

use crate::error::Error;
use crate::graph::{Graph, Node};
use crate::op::{HostScalar, Op};
use crate::ops::matmul::{Matmul, OperandScale};
use crate::ops::pointwise::Pointwise;
use crate::problem::{EpilogueStep, GemmProblem, Matrix, Problem, Scale, Slot};
use crate::tensor::{TensorDesc, Uid};

/// A problem, and what the caller calls its slots.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Subgraph {
    /// The problem.
    pub problem: Problem,
    /// The uid of each slot: slot `i` is bound to what the caller binds to `bindings[i]`.
    pub bindings: Vec<Uid>,
}

/// Cuts a graph into problems.
///
/// # Errors
/// All that [`crate::validate::validate`] finds; [`Error::Unsupported`] for a valid graph that no pattern covers.
pub fn problems(graph: &Graph) -> Result<Vec<Subgraph>, Error> {
    crate::validate::validate(graph)?;
    let mut chains = Vec::new();
    let mut covered = HashSet::new();
    for (i, node) in graph.nodes.iter().enumerate() {
        if let Op::Matmul(matmul) = &node.op {
            let chain = Chain::follow(graph, i, matmul, &covered)?;
            covered.insert(i);
            covered.extend(chain.members.iter().copied());
            chains.push(chain);
        }
    }
    if let Some((_, node)) = graph.nodes.iter().enumerate().find(|(i, _)| !covered.contains(i)) {
        return unsupported(node, "a graph is of matmuls, and pointwise ops that epilogues take behind them");
    }
    in_order(graph, chains)?.iter().map(|chain| chain.subgraph(graph)).collect()
}

fn unsupported<T>(node: &Node, rule: &'static str) -> Result<T, Error> {
    Err(Error::Unsupported { op: node.name.clone(), rule })
}

/// A matmul and the pointwise ops behind it, as positions in the graph's list.
struct Chain<'g> {
    anchor: usize,
    matmul: &'g Matmul,
    members: Vec<usize>,
}

impl<'g> Chain<'g> {
    /// The chain behind `anchor`, up to ops that an earlier chain has taken.
    fn follow(graph: &'g Graph, anchor: usize, matmul: &'g Matmul, taken: &HashSet<usize>) -> Result<Chain<'g>, Error> {
        let mut members = Vec::new();
        let mut current = matmul.d;
        let mut at = anchor;
        loop {
            let readers: Vec<usize> = (0..graph.nodes.len()).filter(|&i| graph.nodes[i].op.inputs().contains(&current)).collect();
            let is_virtual = graph.tensor_of(&graph.nodes[at].name, current)?.is_virtual;
            match readers[..] {
                [reader] if !taken.contains(&reader) && is_chain_link(graph, reader, current)? => {
                    members.push(reader);
                    current = graph.nodes[reader].op.output();
                    at = reader;
                }
                _ if !is_virtual => {
                    return Ok(Chain { anchor, matmul, members });
                }
                _ => {
                    return unsupported(
                        &graph.nodes[at],
                        "a virtual result is read once, by a pointwise op of the same dims; store it to use it otherwise",
                    );
                }
            }
        }
    }

    fn nodes(&self) -> impl Iterator<Item = usize> {
        std::iter::once(self.anchor).chain(self.members.iter().copied())
    }

    fn subgraph(&self, graph: &Graph) -> Result<Subgraph, Error> {
        let op = graph.nodes[self.anchor].name.as_str();
        let matmul = self.matmul;
        let d_desc = graph.tensor_of(op, matmul.d)?;
        let dims = d_desc.layout.dims();
        let (batch, matrix_dims) = dims.split_at(dims.len() - 2);
        let (m, n) = (matrix_dims[0], matrix_dims[1]);
        let a_desc = graph.tensor_of(op, matmul.a)?;
        let k = a_desc.layout.dims()[a_desc.layout.rank() - 1];

        let mut slots = Slots::default();
        let mut with_batch = |uid: Uid, rows: u64, columns: u64| {
            let dims: Vec<u64> = batch.iter().copied().chain([rows, columns]).collect();
            slots.matrix(graph.tensor_of(op, uid)?, &dims)
        };
        let a = with_batch(matmul.a, m, k)?;
        let b = with_batch(matmul.b, k, n)?;
        let c = matmul.c.map(|c| with_batch(c, m, n)).transpose()?;
        let mut scale = |scale: Option<OperandScale>, outer: u64| {
            scale
                .map(|scale| match scale.block {
                    None => Ok(Scale::Tensor { slot: slots.slot(scale.tensor) }),
                    Some([block, block_k]) => {
                        let blocks = [outer.div_ceil(block), k.div_ceil(block_k)];
                        let dims: Vec<u64> = batch.iter().copied().chain(blocks).collect();
                        let factors = slots.matrix(graph.tensor_of(op, scale.tensor)?, &dims)?;
                        Ok(Scale::Block { outer: block, k: block_k, factors })
                    }
                })
                .transpose()
        };
        let scale_a = scale(matmul.scale_a, m)?;
        let scale_b = scale(matmul.scale_b, n)?;
        let alpha = slots.scalar(matmul.alpha);
        let beta = slots.scalar(matmul.beta);

        let mut epilogue = Vec::new();
        let mut current = d_desc;
        // A plain sum of the accumulator's type is that type's value already.
        let mut is_rounded = current.dtype == matmul.precision.accumulator()
            && matmul.alpha.is_fixed(1.0)
            && (matmul.c.is_none() || matmul.beta.is_fixed(0.0));
        for &member in &self.members {
            if !is_rounded {
                epilogue.push(EpilogueStep::Round { dtype: current.dtype });
            }
            if !current.is_virtual {
                epilogue.push(EpilogueStep::Store { target: slots.matrix(current, dims)? });
            }
            let node = &graph.nodes[member];
            let Op::Pointwise(pointwise) = &node.op else {
                return unsupported(node, "a chain goes on through pointwise ops");
            };
            epilogue.push(match *pointwise {
                Pointwise::Unary { f, .. } => EpilogueStep::Unary(f),
                Pointwise::Scale { factor, .. } => EpilogueStep::Scale { factor: slots.scalar(factor) },
                Pointwise::Binary { f, x, z, .. } => {
                    let v_is_right = z == current.uid;
                    let other = graph.tensor_of(&node.name, if v_is_right { x } else { z })?;
                    EpilogueStep::Binary { f, operand: slots.matrix(other, dims)?, v_is_right }
                }
                Pointwise::Ternary { .. } | Pointwise::GenIndex { .. } => {
                    return unsupported(node, "an epilogue has steps of one or two operands");
                }
            });
            current = graph.tensor_of(&node.name, node.op.output())?;
            is_rounded = false;
        }
        let d = slots.matrix(current, dims)?;

        let mut gemm = GemmProblem {
            batch: batch.to_vec(),
            m,
            n,
            k,
            precision: matmul.precision,
            determinism: graph.determinism,
            a,
            b,
            c,
            scale_a,
            scale_b,
            alpha,
            beta,
            epilogue,
            d,
        }
        .canonical()?;
        let bindings = gemm.number_slots().into_iter().map(|slot| slots.uids[slot.0 as usize]).collect();
        Ok(Subgraph { problem: Problem::Gemm(gemm), bindings })
    }
}

/// Whether `reader` continues a chain whose value is `current`: pointwise, `current` read once, and the dims kept.
fn is_chain_link(graph: &Graph, reader: usize, current: Uid) -> Result<bool, Error> {
    let node = &graph.nodes[reader];
    let fuses = match &node.op {
        Op::Pointwise(Pointwise::Unary { f, .. }) => f.in_epilogue(),
        Op::Pointwise(Pointwise::Binary { f, .. }) => f.in_epilogue(),
        Op::Pointwise(Pointwise::Scale { .. }) => true,
        _ => false,
    };
    let once = node.op.inputs().iter().filter(|&&uid| uid == current).count() == 1;
    let result = graph.tensor_of(&node.name, node.op.output())?;
    let value = graph.tensor_of(&node.name, current)?;
    let others_stored = (node.op.inputs().iter()).filter(|&&uid| uid != current).all(|&uid| {
        // A virtual second operand would be computed by another chain, which would then have nowhere to put it.
        graph.tensor(uid).is_some_and(|tensor| !tensor.is_virtual)
    });
    Ok(fuses && once && others_stored && result.layout.dims() == value.layout.dims())
}

/// The chains in an order in which each reads only what earlier ones have written.
fn in_order<'g>(graph: &Graph, mut waiting: Vec<Chain<'g>>) -> Result<Vec<Chain<'g>>, Error> {
    let mut ordered: Vec<Chain<'g>> = Vec::new();
    while !waiting.is_empty() {
        let unwritten: HashMap<Uid, usize> =
            (waiting.iter()).flat_map(|chain| chain.nodes().map(|i| (graph.nodes[i].op.output(), chain.anchor))).collect();
        let ready = waiting.iter().position(|chain| {
            chain
                .nodes()
                .flat_map(|i| graph.nodes[i].op.inputs())
                .all(|uid| unwritten.get(&uid).is_none_or(|&writer| writer == chain.anchor))
        });
        match ready {
            Some(position) => ordered.push(waiting.remove(position)),
            None => {
                return unsupported(&graph.nodes[waiting[0].anchor], "two fused chains may not each read what the other one writes");
            }
        }
    }
    Ok(ordered)
}

/// Uids in the order of their first use; the position is the slot.
#[derive(Default)]
struct Slots {
    uids: Vec<Uid>,
}

impl Slots {
    fn slot(&mut self, uid: Uid) -> Slot {
        let position = self.uids.iter().position(|&known| known == uid).unwrap_or_else(|| {
            self.uids.push(uid);
            self.uids.len() - 1
        });
        Slot(position as u32)
    }

    fn scalar(&mut self, scalar: HostScalar<Uid>) -> HostScalar<Slot> {
        match scalar {
            HostScalar::Fixed(real) => HostScalar::Fixed(real),
            HostScalar::Bound(uid) => HostScalar::Bound(self.slot(uid)),
        }
    }

    /// A tensor broadcast to `[batch…, rows, columns]`, as a matrix.
    fn matrix(&mut self, tensor: &TensorDesc, dims: &[u64]) -> Result<Matrix, Error> {
        let layout = (tensor.layout.broadcast_to(dims)).map_err(|source| Error::Layout { tensor: tensor.name.clone(), source })?;
        let (batch_strides, matrix_strides) = layout.strides().split_at(dims.len() - 2);
        Ok(Matrix {
            slot: self.slot(tensor.uid),
            dtype: tensor.dtype,
            row_stride: matrix_strides[0],
            column_stride: matrix_strides[1],
            batch_strides: batch_strides.to_vec(),
        })
    }
}
