//! From a graph to the problems that engines take.
//!
//! [`partition`] cuts any valid graph into [`Subgraph`]s, in an order in which each can run. A small closed set of patterns, and no search; the
//! table of them, with all conditions, is in `rules.rs`, and [`fusions`] gives it in words. In short:
//!
//! - **A matmul or a convolution** takes the chain of pointwise ops behind it, as long as its epilogue has them. The chain follows the value
//!   from op to op while it is read by exactly one pointwise op whose other operands lie in memory; a stored tensor in the middle of the
//!   chain becomes an auxiliary output. A convolution also takes the ops that prepare its activations, if nobody else reads what they make:
//!   functions of one operand, or of one beside a vector over channels. Where its result lies in lines of channels, it takes the sums of the result
//!   and of its square over all but the channels, which a batch norm asks for. One with a filter of one element is a product where strides allow.
//! - **A reduction** takes the pointwise ops whose results nobody else reads before it, and a chain behind it. Of those whose results lie in memory
//!   as well it takes such as lie there as what they are made of does: they are stored on the way.
//! - **Scans, softmax, cross-entropy, pooling, normalization and attention** stand alone.
//! - **All other pointwise ops** over equal dims that hang together are one map, with as many outputs as are stored or read elsewhere.
//! - **Movements** whose result is virtual are only another way to see memory, where strides can say it: those who read them read what they
//!   move. The others are maps that copy.
//! - **Appended rows** are stored by a map, with what computes them and with rows that go to other tensors by the same length. Who reads the tensor with its
//!   rows reads memory.
//!
//! A virtual tensor that one problem writes and another reads needs memory after all: it is a *temporary*, with the layout that it was
//! declared with. The value of a tensor is what its type holds, so a value that stays in registers is rounded to the type of its tensor: the
//! fused result is that of the unfused graph. Some lie where another did ([`in_place`]).
//!
//! Two parts become one only if no third has to run between them. That is looked for around the two (`parts.rs`), with a bound on what one
//! join and one op may cost, so that cutting takes time by the number of ops.

mod account;
mod conv;
mod cut;
mod gemm;
mod in_place;
mod map;
mod order;
mod parts;
mod rows;
mod rules;
mod strided_view;
mod web;

use crate::error::Error;
use crate::graph::Graph;
use crate::op::Op;
use crate::problem::Problem;
use crate::tensor::{TensorDesc, Uid};

pub use account::{Account, Decision, FusionText, fusions};
use cut::Cut;
pub use in_place::in_place;

/// A problem, and what the caller calls its slots.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Subgraph {
    /// The problem.
    pub problem: Problem,
    /// The uid of each slot: slot `i` is bound to what the caller binds to `bindings[i]`, or to a temporary.
    pub bindings: Vec<Uid>,
}

/// A graph as problems, and the memory between them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Partition {
    /// The problems, in an order in which each can run.
    pub parts: Vec<Subgraph>,
    /// Tensors that one part writes and another reads, and that the caller does not bind. Most are virtual tensors of the graph; a uid that
    /// the graph does not have was made here.
    pub temporaries: Vec<TensorDesc>,
}

/// Cuts a graph into problems. No valid graph is refused.
///
/// # Errors
/// All that [`crate::validate::validate`] finds; strides that memory cannot hold.
pub fn partition(graph: &Graph) -> Result<Partition, Error> {
    partition_with_account(graph).map(|(partition, _)| partition)
}

/// As [`partition`], and how it came to it: every fusion of the table that was looked at, and why some were not made.
///
/// # Errors
/// As [`partition`].
pub fn partition_with_account(graph: &Graph) -> Result<(Partition, Account), Error> {
    crate::validate::validate(graph)?;
    let mut cut = Cut::new(graph)?;
    cut.gather()?;
    let gathered = cut.in_order();
    let mut parts = Vec::new();
    for members in &gathered {
        let anchor = members.iter().copied().find(|&node| cut::is_anchor(&graph.nodes[node].op));
        match anchor.map(|anchor| (anchor, &graph.nodes[anchor].op)) {
            None => parts.extend(map::lower(&mut cut, members)?),
            Some((anchor, Op::Matmul(matmul))) => parts.push(gemm::lower(&cut, anchor, matmul, members)?),
            Some((anchor, Op::Conv(conv))) => parts.push(conv::lower(&cut, anchor, conv, members)?),
            Some((anchor, Op::Reduction(reduction))) => parts.push(map::lower_reduction(&cut, anchor, reduction, members)?),
            Some((anchor, _)) => parts.push(rows::lower(&cut, anchor)?),
        }
    }
    let (temporaries, account) = cut.finish(gathered);
    Ok((Partition { parts, temporaries }, account))
}

/// Cuts a graph that needs no memory of its own into problems.
///
/// # Errors
/// As [`partition`]; [`Error::Unsupported`] where the partition has temporaries, for which the problems alone have no place.
pub fn problems(graph: &Graph) -> Result<Vec<Subgraph>, Error> {
    let partition = partition(graph)?;
    match partition.temporaries.first() {
        None => Ok(partition.parts),
        Some(temporary) => {
            let writes = |node: &&crate::graph::Node| node.op.outputs().contains(&temporary.uid);
            Err(Error::Unsupported {
                op: graph.nodes.iter().find(writes).map_or(&graph.name, |node| &node.name).clone(),
                rule: "its result is virtual and lies between two problems: store it, or cut the graph with `partition`",
            })
        }
    }
}
