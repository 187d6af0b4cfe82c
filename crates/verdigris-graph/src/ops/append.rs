//! Append: rows that are put behind those which a tensor has already, as new keys and values go into a cache.
//!
//! `x` has room for `S` rows along the axis, `rows` has `s` of them, and `lengths` says how many of the `S` count once they are there:
//!
//! ```text
//! y[…, j, …] = rows[…, j − (length − s), …]   for j from length − s to below length          y[…, j, …] = x[…, j, …]   elsewhere
//! ```
//!
//! A length stands for all that has its index: `lengths` broadcasts to the dims of `x` with 1 in the place of the axis. Lengths come with the data and are
//! not trusted: a row whose place is below 0, or from `S` on, is not stored.
//!
//! **In place.** On a GPU `y` lies where `x` does, and is bound to the same memory: the rows are stored there, and nothing else is read or written, so that the
//! cost is that of the rows. For that `x` and `y` are both stored and lie alike, no op writes `x`, and no other op reads it: whoever wants the tensor with its rows
//! reads `y`. On the CPU device, whose bindings share no memory, `x` is copied to `y` first. Elements keep all their bits.

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::gradient::Backward;
use crate::graph::{Graph, GraphBuilder};
use crate::op::{Op, Operation, Role};
use crate::spec::{AttributeSpec, Form, Method, OpSpec, OperandSpec};
use crate::tensor::{TensorDesc, Uid};
use crate::validate::{axis, broadcasts_to, data, of_type, same_dims};
use verdigris_tensor::DType;

/// Rows behind those that there are; the module's head has the formula.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Append {
    /// Along which rows stand behind each other.
    pub axis: u32,
    /// Read; stored, and what `y` lies in.
    pub x: Uid,
    /// Read; the dims of `x` but for the axis.
    pub rows: Uid,
    /// Read; i32, broadcasts to the dims of `x` with 1 in the place of the axis: rows that count, with the new ones.
    pub lengths: Uid,
    /// Written; stored, with the type, dims and strides of `x`.
    pub y: Uid,
}

impl Operation for Append {
    const SPEC: OpSpec = OpSpec {
        name: "append",
        summary: "Rows behind those that a tensor has already, in its place: new keys and values in a cache.",
        forms: &[Form {
            name: "",
            formula: "y[j] = rows[j − (length − s)] for j from length − s to below length, x[j] elsewhere, along the axis",
            operands: &[
                OperandSpec::read("x", "any stored type; stored, written by no op and read by no other one"),
                OperandSpec::read("rows", "the type of `x`; the dims of `x` but for the axis"),
                OperandSpec::read("lengths", "i32, broadcasts to the dims of `x` with 1 in the place of the axis; with the new rows"),
                OperandSpec::written("y", "stored, with the type and strides of `x`; on a GPU bound to its memory"),
            ],
            attributes: &[AttributeSpec::new("axis", "number", "below the number of dims", "9")],
            shape: "those of `x`; a row whose place is below 0 or behind the end is not stored",
            gradient: "refused, since no op gathers rows",
            methods: &[Method::new("append", r#"x: Uid, rows: Uid, lengths: Uid, axis: int, *, name: str = "append""#)],
        }],
    };

    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        visit(Role::Input, &mut self.x);
        visit(Role::Input, &mut self.rows);
        visit(Role::Input, &mut self.lengths);
        visit(Role::Output, &mut self.y);
    }

    fn in_place(&self) -> Option<(Uid, Uid)> {
        Some((self.y, self.x))
    }

    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        let (x, y) = (data(graph, op, self.x)?, data(graph, op, self.y)?);
        let (rows, lengths) = (data(graph, op, self.rows)?, data(graph, op, self.lengths)?);
        let along = axis(op, x, self.axis)?;
        let structure = |tensor: &TensorDesc, rule| Err(Error::Structure { op: op.to_owned(), tensor: tensor.name.clone(), rule });
        for tensor in [x, y] {
            if tensor.is_virtual {
                return structure(tensor, "what rows are appended to is stored, and so is the result, which lies in its place");
            }
        }
        for tensor in [rows, y] {
            of_type(op, tensor, |dtype| dtype == x.dtype, "rows and the result have the type of what they are appended to")?;
        }
        of_type(op, lengths, |dtype| dtype == DType::I32, "lengths are i32")?;
        same_dims(op, y, x.layout.dims(), "y has the dims of x")?;
        if y.layout != x.layout {
            return structure(y, "the result lies in the place of what rows are appended to, with the same strides");
        }
        let mut dims = x.layout.dims().to_vec();
        dims[along] = rows.layout.dims().get(along).copied().unwrap_or(0);
        same_dims(op, rows, &dims, "rows have the dims of what they are appended to, but for the axis")?;
        dims[along] = 1;
        broadcasts_to(op, lengths, &dims, "lengths broadcast to the dims of what rows are appended to, with 1 in the place of the axis")?;
        let reads = |op: &Op| op.inputs().into_iter().filter(|uid| *uid == self.x).count();
        if graph.nodes.iter().map(|node| reads(&node.op)).sum::<usize>() > 1 {
            return structure(x, "no other op reads what rows are appended to: what is in its place then is the result");
        }
        if graph.nodes.iter().any(|node| node.op.outputs().contains(&self.x)) {
            return structure(x, "no op writes what rows are appended to, which holds what earlier executions left");
        }
        Ok(())
    }

    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        let wanted = [self.x, self.rows].into_iter().find(|&uid| at.wants(uid));
        match (at.of(self.y), wanted) {
            (Some(_), Some(uid)) => {
                at.refuse(uid, "rows that are appended in place have no gradient: it would gather rows, which no op does")
            }
            _ => Ok(()),
        }
    }
}

impl GraphBuilder {
    /// `x` with rows behind those that it has, in its place: a stored tensor of the type and layout of `x`, to be bound to the memory of `x` on a GPU. `lengths`
    /// counts the new rows.
    ///
    /// ```
    /// use verdigris_graph::GraphBuilder;
    /// use verdigris_tensor::{DType, Layout};
    ///
    /// let mut g = GraphBuilder::new("cache");
    /// let cache = g.tensor("cache", DType::Bf16, Layout::row_major(&[2, 512, 8, 64])?);
    /// let new = g.tensor("new", DType::Bf16, Layout::row_major(&[2, 1, 8, 64])?);
    /// let lengths = g.tensor("lengths", DType::I32, Layout::row_major(&[2, 1, 1, 1])?);
    /// let kept = g.append("append", cache, new, lengths, 1)?;
    /// let graph = g.finish()?;
    /// assert_eq!(graph.in_place(), [(kept, cache)]);
    /// assert_eq!(verdigris_graph::pattern::problems(&graph)?.len(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// An unknown uid. Dims, types and who reads what are checked by [`GraphBuilder::finish`].
    pub fn append(&mut self, name: &str, x: Uid, rows: Uid, lengths: Uid, axis: u32) -> Result<Uid, Error> {
        let (TensorDesc { dtype, layout, alignment_bytes, .. }, of) = {
            let x = self.graph.tensor_of(name, x)?;
            (x.clone(), format!("{} with its rows", x.name))
        };
        let y = self.tensor(&of, dtype, layout);
        if let Some(bytes) = alignment_bytes {
            self.align(y, bytes)?;
        }
        self.push(name, Op::Append(Append { axis, x, rows, lengths, y }));
        Ok(y)
    }
}
