//! Gradients of graphs: each op's rule of differentiation, applied from the results back.
//!
//! [`Graph::gradient`] appends to a graph the ops that compute `∂loss / ∂x` for the tensors asked for; [`GraphBuilder::gradient`] does so
//! while a graph is built, [`GraphBuilder::gradient_from`] from gradients that are given for any number of results, and
//! [`Graph::part`] cuts a backward graph of its own out of the whole, which reads what the forward graph stored.
//!
//! ```text
//! dx = Σ over the ops that read x of  dyᵀ · ∂y / ∂x          y being what the op writes, dy its gradient
//! ```
//!
//! The rule of an op stands in the op's file under [`crate::ops`]. What holds for all of them:
//!
//! - **Dims.** A gradient has the dims of its tensor: what an op repeats (by broadcasting) is summed.
//! - **Types.** The gradient of a tensor between ops is rounded to the type of that tensor, as the tensor was. An operand of a product is
//!   rounded to the type of the operand beside it (bf16 beside fp8).
//! - **Kinks.** At a kink the derivative is the one of the side that the forward formula takes. A greatest or least element that several
//!   share gives each an equal part. Where a formula gives `∞ · 0`, the result is NaN, as in [`crate::Pointwise`].
//! - **Steps.** Comparisons, logic, roundings, indices and whatever is stored as an integer are constant wherever they have a derivative:
//!   no gradient goes through them. A tensor that the loss depends on through such ops alone is told ([`Error::Constant`]), and so is one
//!   on which the loss does not depend.
//! - **What cannot be said** with the ops that there are is refused ([`Error::Gradient`]): gradients of dequantization factors and of
//!   fp8 operands that have them, of host scalars, and second derivatives of max pooling, of cross-entropy, of normalization, of attention
//!   and of curved activations; gradients of the slopes of attention, and through its log-sum-exp and greatest scores.

use std::collections::{HashMap, HashSet};

use verdigris_tensor::DType;

use crate::error::Error;
use crate::graph::{Graph, GraphBuilder};
use crate::op::{HostScalar, Op, Real};
use crate::ops::pointwise::{BinaryOp, UnaryOp};
use crate::ops::reduction::ReductionOp;
use crate::tensor::{TensorDesc, Uid};
use crate::validate::same_dims;

impl Graph {
    /// Appends the ops that compute the gradient of `loss`, a tensor of one element, with respect to each of the tensors named, and gives
    /// the uids of these gradients in the same order. They are stored tensors under the names `d_` and the tensor's, of the type, dims and
    /// strides of their tensors (packed row-major where the elements of a tensor overlap).
    ///
    /// A backward graph of its own, or gradients of another type, are made with [`GraphBuilder::gradient_from`].
    ///
    /// ```
    /// use verdigris_graph::{GraphBuilder, Precision, ReductionOp, UnaryOp};
    /// use verdigris_tensor::{DType, Layout};
    ///
    /// let mut g = GraphBuilder::new("linear");
    /// let x = g.tensor("x", DType::F32, Layout::row_major(&[32, 64])?);
    /// let w = g.tensor("w", DType::F32, Layout::row_major(&[64, 48])?);
    /// let product = g.matmul("fc", x, w, Precision::Fp32)?;
    /// let y = g.unary("relu", UnaryOp::Relu, product)?;
    /// let loss = g.reduction("mean", ReductionOp::Avg, y, &[0, 1])?;
    /// g.store(loss, "loss", DType::F32)?;
    /// let mut graph = g.finish()?;
    /// let [dw] = graph.gradient(loss, &[w])?[..] else { unreachable!() };
    /// assert_eq!(graph.tensor(dw).unwrap().layout.dims(), [64, 48]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// A graph that breaks a rule, a loss of more than one element, an unknown uid, or what has no gradient ([`Error::Gradient`],
    /// [`Error::Constant`]). The graph is then as it was.
    pub fn gradient(&mut self, loss: Uid, with_respect_to: &[Uid]) -> Result<Vec<Uid>, Error> {
        crate::validate::validate(self)?;
        let mut builder = GraphBuilder::from(self.clone());
        let gradients = builder.gradient(loss, with_respect_to)?;
        for (&gradient, &of) in gradients.iter().zip(with_respect_to) {
            let TensorDesc { name, dtype, layout, .. } = self.tensor_of(&self.name, of)?;
            let name = format!("d_{name}");
            if layout.may_overlap() {
                builder.store(gradient, &name, *dtype)?;
            } else {
                builder.store_as(gradient, &name, *dtype, *layout)?;
            }
        }
        *self = builder.finish()?;
        Ok(gradients)
    }

    /// The part of this graph that computes `results`, reading the tensors `given` instead of computing them: of a graph with its
    /// gradients and `given` the stored tensors of the forward part, the backward graph. What is neither given nor a result becomes virtual;
    /// virtual tensors of the forward part are computed again where gradients need them.
    ///
    /// # Errors
    /// An unknown uid, a virtual tensor among those given, or a result that no op of the graph writes.
    pub fn part(&self, results: &[Uid], given: &[Uid]) -> Result<Graph, Error> {
        let structure = |uid: Uid, rule| -> Error {
            let tensor = self.tensor(uid).map_or_else(|| uid.to_string(), |tensor| tensor.name.clone());
            Error::Structure { op: self.name.clone(), tensor, rule }
        };
        for &uid in given {
            if self.tensor_of(&self.name, uid)?.is_virtual {
                return Err(structure(uid, "a virtual tensor is stored nowhere and cannot be given; store it first"));
            }
        }
        let given: HashSet<Uid> = given.iter().copied().filter(|uid| !results.contains(uid)).collect();
        let mut wanted: HashSet<Uid> = results.iter().copied().collect();
        let mut written = HashSet::new();
        let mut kept = Vec::new();
        for node in self.nodes.iter().rev() {
            let outputs = node.op.outputs();
            if outputs.iter().any(|uid| wanted.contains(uid)) {
                wanted.extend(node.op.inputs().into_iter().filter(|uid| !given.contains(uid)));
                written.extend(outputs);
                kept.push(node.clone());
            }
        }
        kept.reverse();
        if let Some(&uid) = results.iter().find(|uid| !written.contains(uid)) {
            return Err(structure(uid, "a result is written by an op of the graph"));
        }
        let read: HashSet<Uid> = kept.iter().flat_map(|node| node.op.inputs()).collect();
        let mut tensors = Vec::new();
        for tensor in self.tensors.iter().filter(|tensor| read.contains(&tensor.uid) || written.contains(&tensor.uid)) {
            let is_between = written.contains(&tensor.uid) && !results.contains(&tensor.uid);
            // A second output that nothing reads stays as it is: one stored is written, one virtual is left out by the builder.
            let is_virtual = is_between && (tensor.is_virtual || read.contains(&tensor.uid));
            tensors.push(TensorDesc { is_virtual, ..tensor.clone() });
        }
        GraphBuilder::from(Graph { name: self.name.clone(), tensors, nodes: kept, determinism: self.determinism }).finish()
    }
}

impl GraphBuilder {
    /// Adds the ops that compute the gradient of `loss`, a tensor of one element, with respect to each of the tensors named; gives virtual
    /// tensors in the same order, of the type that their arithmetic has, which [`GraphBuilder::store`] rounds to any other. The rules are
    /// those of [`crate::gradient`].
    ///
    /// # Errors
    /// An op that breaks a rule, a loss of more than one element, an unknown uid, or what has no gradient ([`Error::Gradient`],
    /// [`Error::Constant`]). The graph is then as it was.
    pub fn gradient(&mut self, loss: Uid, with_respect_to: &[Uid]) -> Result<Vec<Uid>, Error> {
        let mut next = self.clone();
        let tensor = next.graph.tensor_of(&next.graph.name, loss)?;
        if tensor.layout.elements() != 1 {
            return Err(Error::Mismatch {
                op: next.graph.name.clone(),
                tensor: tensor.name.clone(),
                quantity: "the number of elements".to_owned(),
                got: tensor.layout.elements(),
                want: 1,
                rule: "a loss is one number; gradients of more are taken from gradients that are given for them",
            });
        }
        let (name, rank) = (format!("d_{}", tensor.name), tensor.layout.rank());
        // The only coordinate of one element is 0.
        let zero = next.gen_index(&name, &vec![1; rank.max(1)], 0)?;
        let mut one = next.unary(&name, UnaryOp::Affine { scale: Real(1.0), shift: Real(1.0) }, zero)?;
        if rank == 0 {
            one = next.reshape(&name, one, &[])?;
        }
        let gradients = next.gradient_from(&[(loss, one)], with_respect_to)?;
        *self = next;
        Ok(gradients)
    }

    /// As [`GraphBuilder::gradient`], from gradients that are given: pairs of a result, of any dims, and the tensor that holds its
    /// gradient. What it computes is `Σ over the pairs of dyᵀ · ∂y / ∂x`.
    ///
    /// # Errors
    /// As [`GraphBuilder::gradient`], and a gradient whose dims are not those of its result.
    pub fn gradient_from(&mut self, results: &[(Uid, Uid)], with_respect_to: &[Uid]) -> Result<Vec<Uid>, Error> {
        let mut next = self.clone();
        let gradients = Backward::run(&mut next, results, with_respect_to)?;
        *self = next;
        Ok(gradients)
    }
}

/// A graph on its way back: what rules of differentiation see.
pub(crate) struct Backward<'b> {
    /// Where ops are added.
    pub(crate) graph: &'b mut GraphBuilder,
    /// The name of the ops that the present rule adds.
    pub(crate) name: String,
    /// Tensors that depend on one that is asked for, by more than steps.
    depends: HashSet<Uid>,
    /// Of each tensor, what was found so far, yet to be added up.
    parts: HashMap<Uid, Vec<Uid>>,
    /// How often a tensor is part of a gradient.
    given: HashMap<Uid, u32>,
    /// What nodes before `scanned` read, and gradients that the caller gets.
    read: HashSet<Uid>,
    scanned: usize,
    /// Tensors rounded to another type.
    rounded: HashMap<(Uid, DType), Uid>,
}

impl Backward<'_> {
    fn run(graph: &mut GraphBuilder, results: &[(Uid, Uid)], with_respect_to: &[Uid]) -> Result<Vec<Uid>, Error> {
        let name = graph.graph.name.clone();
        let forward = graph.graph.nodes.clone();
        for &uid in with_respect_to {
            let tensor = graph.graph.tensor_of(&name, uid)?;
            if tensor.by_value {
                return Err(Error::Gradient { op: name, tensor: tensor.name.clone(), rule: "a host scalar has no gradient" });
            }
            differentiable(&name, tensor)?;
        }
        let mut depends: HashSet<Uid> = with_respect_to.iter().copied().collect();
        for node in &forward {
            if node.op.inputs().iter().any(|uid| depends.contains(uid)) {
                node.op.check(&node.name, &graph.graph)?;
                let floats = |uid: &Uid| graph.graph.tensor(*uid).is_some_and(|tensor| tensor.dtype.is_float());
                depends.extend(node.op.outputs().into_iter().filter(floats));
            }
        }
        let mut this = Backward {
            graph,
            name: name.clone(),
            depends,
            parts: HashMap::new(),
            given: HashMap::new(),
            read: HashSet::new(),
            scanned: 0,
            rounded: HashMap::new(),
        };
        for &(result, gradient) in results {
            let tensor = this.graph.graph.tensor_of(&name, result)?;
            differentiable(&name, tensor)?;
            let dy = crate::validate::data(&this.graph.graph, &name, gradient)?;
            same_dims(&name, dy, tensor.layout.dims(), "the gradient of a result has its dims")?;
            differentiable(&name, dy)?;
            this.parts.entry(result).or_default().push(gradient);
            this.read.insert(gradient);
        }
        for node in forward.iter().rev() {
            let outputs = node.op.outputs();
            let is_on_the_way =
                node.op.inputs().iter().any(|&uid| this.wants(uid)) && outputs.iter().any(|uid| this.parts.contains_key(uid));
            if is_on_the_way {
                this.name = format!("d_{}", node.name);
                for uid in outputs {
                    this.complete(uid)?;
                    if with_respect_to.contains(&uid) {
                        this.read.extend(this.of(uid));
                    }
                }
                node.op.differentiate(&mut this)?;
            }
        }
        let mut gradients = Vec::new();
        for &uid in with_respect_to {
            this.name = format!("d_{}", this.graph.graph.tensor_of(&name, uid)?.name);
            let Some(sum) = this.sum(uid)? else {
                return Err(this.without_gradient(uid, results, forward.len()));
            };
            // Each result is a virtual tensor of its own, which the caller may store.
            let is_own = this.is_fresh(sum) && !gradients.contains(&sum);
            gradients.push(if is_own { sum } else { this.unary(UnaryOp::Identity, sum)? });
        }
        this.drop_unread(forward.len(), &gradients);
        Ok(gradients)
    }

    /// Takes out the ops behind `first` that compute what nothing reads: gradients that ended at a step.
    fn drop_unread(&mut self, first: usize, gradients: &[Uid]) {
        let Graph { tensors, nodes, .. } = &mut self.graph.graph;
        let mut read: HashSet<Uid> = nodes[..first].iter().flat_map(|node| node.op.inputs()).chain(gradients.iter().copied()).collect();
        let mut dropped = HashSet::new();
        let mut kept = Vec::new();
        for node in nodes.drain(first..).rev() {
            if node.op.outputs().iter().any(|uid| read.contains(uid)) {
                read.extend(node.op.inputs());
                kept.push(node);
            } else {
                dropped.extend(node.op.outputs());
            }
        }
        nodes.extend(kept.into_iter().rev());
        tensors.retain(|tensor| !dropped.contains(&tensor.uid));
    }

    /// Why a tensor has no gradient: where the last op stands that depends on it, or that none does.
    fn without_gradient(&self, uid: Uid, results: &[(Uid, Uid)], forward: usize) -> Error {
        let graph = &self.graph.graph;
        let tensor = graph.tensor(uid).map_or_else(|| uid.to_string(), |tensor| tensor.name.clone());
        let is_integer = |uid: &Uid| graph.tensor(*uid).is_some_and(|tensor| !tensor.dtype.is_float());
        let mut reached: HashSet<Uid> = [uid].into();
        for node in &graph.nodes[..forward] {
            let read: Vec<Uid> = node.op.inputs().into_iter().filter(|uid| reached.contains(uid)).collect();
            if read.is_empty() {
                continue;
            }
            let outputs = node.op.outputs();
            // It has a gradient where it writes and passes none to what it reads.
            let ends = outputs.iter().any(|uid| self.parts.contains_key(uid));
            let rule = if outputs.iter().any(is_integer) {
                "what this op writes is stored as integers, and nothing else leads from the tensor to the loss"
            } else if ends && !read.iter().all(is_integer) {
                "this op is constant wherever it has a derivative, and nothing else leads from the tensor to the loss"
            } else {
                reached.extend(outputs);
                continue;
            };
            return Error::Constant { op: node.name.clone(), tensor, rule };
        }
        let is_reached = results.iter().any(|(result, _)| reached.contains(result));
        let rule = if is_reached { "no derivative leads from the tensor to the loss" } else { "the loss does not depend on the tensor" };
        Error::Constant { op: graph.name.clone(), tensor, rule }
    }

    /// Whether the gradient of a tensor is of use to anyone.
    pub(crate) fn wants(&self, uid: Uid) -> bool {
        self.depends.contains(&uid)
    }

    /// The gradient of what the op writes; `None` if nothing that matters reads it.
    pub(crate) fn of(&self, uid: Uid) -> Option<Uid> {
        self.parts.get(&uid).and_then(|parts| parts.first()).copied()
    }

    /// What is known of a tensor.
    pub(crate) fn tensor(&self, uid: Uid) -> Result<&TensorDesc, Error> {
        self.graph.graph.tensor_of(&self.name, uid)
    }

    pub(crate) fn dims(&self, uid: Uid) -> Result<Vec<u64>, Error> {
        Ok(self.tensor(uid)?.layout.dims().to_vec())
    }

    /// A refusal, at this op.
    pub(crate) fn refuse<T>(&self, uid: Uid, rule: &'static str) -> Result<T, Error> {
        let tensor = self.tensor(uid)?.name.clone();
        // The ops added are named after the one whose gradient they are part of.
        let op = self.name.strip_prefix("d_").unwrap_or(&self.name).to_owned();
        Err(Error::Gradient { op, tensor, rule })
    }

    /// The name of an op that computes the gradient of one operand.
    pub(crate) fn named(&self, operand: &str) -> String {
        format!("{}.{operand}", self.name)
    }

    /// Adds `gradient` to what is known of the gradient of `uid`: summed where the op repeated `uid`, repeated where it summed.
    pub(crate) fn give(&mut self, uid: Uid, gradient: Uid) -> Result<(), Error> {
        if !self.wants(uid) {
            return Ok(());
        }
        let (want, have) = (self.dims(uid)?, self.dims(gradient)?);
        let mut gradient = gradient;
        if have != want {
            let lead = have.len().saturating_sub(want.len());
            let is_repeated = |i: usize| i < lead || (want[i - lead] == 1 && have[i] != 1);
            let axes: Vec<u32> = (0..have.len()).filter(|&i| have.len() >= want.len() && is_repeated(i)).map(|i| i as u32).collect();
            if !axes.is_empty() {
                gradient = self.graph.reduction(&self.name, ReductionOp::Add, gradient, &axes)?;
            }
            let have = self.dims(gradient)?;
            if have != want {
                let is_same_number = have.iter().product::<u64>() == want.iter().product::<u64>();
                gradient = if is_same_number {
                    self.graph.reshape(&self.name, gradient, &want)?
                } else {
                    self.graph.broadcast(&self.name, gradient, &want)?
                };
            }
        }
        *self.given.entry(gradient).or_default() += 1;
        self.parts.entry(uid).or_default().push(gradient);
        Ok(())
    }

    /// Adds up what is known of the gradient of a tensor.
    fn sum(&mut self, uid: Uid) -> Result<Option<Uid>, Error> {
        let Some(parts) = self.parts.get(&uid).cloned() else { return Ok(None) };
        let mut sum = parts[0];
        for &part in &parts[1..] {
            sum = self.binary(BinaryOp::Add, sum, part)?;
        }
        if parts.len() > 1 {
            self.given.insert(sum, 1);
        }
        self.parts.insert(uid, vec![sum]);
        Ok(Some(sum))
    }

    /// Adds up the gradient of a tensor and rounds it to the tensor's type.
    fn complete(&mut self, uid: Uid) -> Result<(), Error> {
        if let Some(sum) = self.sum(uid)? {
            let dtype = self.tensor(uid)?.dtype;
            let rounded = self.round(sum, dtype)?;
            if rounded != sum {
                self.given.insert(rounded, 1);
            }
            self.parts.insert(uid, vec![rounded]);
        }
        Ok(())
    }

    /// Whether a tensor is virtual, read by nothing and part of at most one gradient.
    fn is_fresh(&mut self, uid: Uid) -> bool {
        let Graph { tensors, nodes, .. } = &self.graph.graph;
        self.read.extend(nodes[self.scanned..].iter().flat_map(|node| node.op.inputs()));
        self.scanned = nodes.len();
        let is_virtual = tensors.iter().any(|tensor| tensor.uid == uid && tensor.is_virtual);
        is_virtual && !self.read.contains(&uid) && self.given.get(&uid).is_none_or(|&count| count <= 1)
    }

    /// The value of a tensor in another type.
    pub(crate) fn round(&mut self, uid: Uid, dtype: DType) -> Result<Uid, Error> {
        if self.tensor(uid)?.dtype == dtype {
            return Ok(uid);
        }
        if let Some(&rounded) = self.rounded.get(&(uid, dtype)) {
            return Ok(rounded);
        }
        let writer = self.graph.graph.nodes.iter().rev().find(|node| node.op.outputs().contains(&uid));
        let is_moved = writer.is_some_and(|node| matches!(node.op, Op::Movement(_)));
        if !is_moved && self.is_fresh(uid) {
            self.graph.round_to(uid, dtype)?;
            return Ok(uid);
        }
        let rounded = self.unary(UnaryOp::Identity, uid)?;
        self.graph.round_to(rounded, dtype)?;
        self.rounded.insert((uid, dtype), rounded);
        Ok(rounded)
    }

    /// Whether `y` holds a result of `x` as well as arithmetic on `x` does, or as `x` holds itself.
    pub(crate) fn is_exact(&self, y: Uid, x: Uid) -> Result<bool, Error> {
        let (y, x) = (self.tensor(y)?.dtype, self.tensor(x)?.dtype);
        Ok(y == x || y == DType::F64 || (y == DType::F32 && x != DType::F64))
    }

    /// Whether a tensor keeps what arithmetic in `compute` made, none of it rounded away.
    pub(crate) fn keeps(&self, uid: Uid, compute: DType) -> Result<bool, Error> {
        let dtype = self.tensor(uid)?.dtype;
        Ok(dtype == compute || dtype == DType::F64)
    }

    /// Whether `y` tells positive numbers of `x` from 0: it is as exact, or has as many exponents.
    pub(crate) fn keeps_sign(&self, y: Uid, x: Uid) -> Result<bool, Error> {
        let has_f32s_range = self.tensor(y)?.dtype == DType::Bf16 && self.tensor(x)?.dtype != DType::F64;
        Ok(has_f32s_range || self.is_exact(y, x)?)
    }

    /// The type in which a tensor of this type is an operand of a product beside a gradient.
    pub(crate) fn operand_dtype(dtype: DType) -> DType {
        // A gradient in fp8 would need a factor of its own; bf16 holds every fp8 number.
        if dtype.is_fp8() { DType::Bf16 } else { dtype }
    }

    pub(crate) fn unary(&mut self, f: UnaryOp, x: Uid) -> Result<Uid, Error> {
        self.graph.unary(&self.name, f, x)
    }

    pub(crate) fn binary(&mut self, f: BinaryOp, x: Uid, z: Uid) -> Result<Uid, Error> {
        self.graph.binary(&self.name, f, x, z)
    }

    pub(crate) fn mul(&mut self, x: Uid, z: Uid) -> Result<Uid, Error> {
        self.binary(BinaryOp::Mul, x, z)
    }

    pub(crate) fn scale(&mut self, x: Uid, factor: f64) -> Result<Uid, Error> {
        self.graph.scale(&self.name, x, HostScalar::Fixed(Real(factor)))
    }
}

fn differentiable(op: &str, tensor: &TensorDesc) -> Result<(), Error> {
    if tensor.dtype.is_float() {
        return Ok(());
    }
    Err(Error::Gradient { op: op.to_owned(), tensor: tensor.name.clone(), rule: "a tensor of integers has no gradient" })
}
