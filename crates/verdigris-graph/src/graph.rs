//! The graph and its builder.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};
use verdigris_tensor::{DType, Layout};

use crate::error::Error;
use crate::op::{HostScalar, Op, Operation, Real, Role};
use crate::ops::conv::{Conv, ConvDirection};
use crate::ops::matmul::{Matmul, Precision};
use crate::ops::movement::Movement;
use crate::ops::pointwise::{BinaryOp, Pointwise, TernaryOp, UnaryOp};
use crate::ops::pool::{Pool, PoolBackward, PoolMode, PoolWindows};
use crate::ops::reduction::{Reduction, ReductionOp};
use crate::ops::softmax::{CrossEntropy, CrossEntropyBackward, CrossEntropySpec, Softmax, SoftmaxBackward};
use crate::problem::Determinism;
use crate::tensor::{TensorDesc, Uid};

/// One op under a name.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// For people: error messages.
    pub name: String,
    /// What is done.
    pub op: Op,
}

/// Tensors and the ops between them, in an order in which each tensor is written before it is read.
///
/// The fields are open, since a graph may come from anywhere; [`crate::validate::validate`] is the gate, and every consumer goes
/// through it.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Graph {
    /// For people.
    pub name: String,
    /// Every tensor.
    pub tensors: Vec<TensorDesc>,
    /// Every op.
    pub nodes: Vec<Node>,
    /// Whether two executions must agree bit for bit.
    #[serde(default)]
    pub determinism: Determinism,
}

impl Graph {
    /// The tensor of this uid. Found at once where uids rise along the list, as a builder gives them and as [`Graph::canonical`] does; in any
    /// other order every tensor may be looked at.
    pub fn tensor(&self, uid: Uid) -> Option<&TensorDesc> {
        self.place(uid).map(|place| &self.tensors[place])
    }

    fn tensor_mut(&mut self, uid: Uid) -> Option<&mut TensorDesc> {
        self.place(uid).map(|place| &mut self.tensors[place])
    }

    fn place(&self, uid: Uid) -> Option<usize> {
        let found = self.tensors.binary_search_by_key(&uid, |tensor| tensor.uid).ok();
        found.or_else(|| self.tensors.iter().position(|tensor| tensor.uid == uid))
    }

    /// The graph, or where uids do not rise along the list of tensors, one that differs in this alone.
    pub(crate) fn with_tensors_in_order(&self) -> Cow<'_, Graph> {
        if self.tensors.is_sorted_by_key(|tensor| tensor.uid) {
            return Cow::Borrowed(self);
        }
        let mut graph = self.clone();
        graph.tensors.sort_by_key(|tensor| tensor.uid);
        Cow::Owned(graph)
    }

    /// The same graph under canonical names, and the uid that each tensor had: names are empty, uids count from 0 in the order in which
    /// the ops first name them, and tensors that no op names are gone. The order of the ops stays. Graphs that differ in names, uids or
    /// the order of their tensor list only are equal in this form.
    ///
    /// # Errors
    /// An op that names a tensor which the graph does not have.
    pub fn canonical(&self) -> Result<(Graph, Vec<Uid>), Error> {
        let mut position: HashMap<Uid, usize> = HashMap::new();
        let mut old = Vec::new();
        let mut nodes = self.nodes.clone();
        for node in &mut nodes {
            node.name.clear();
            node.op.visit_uids(&mut |_, uid| {
                let next = old.len();
                let place = *position.entry(*uid).or_insert(next);
                if place == next {
                    old.push(*uid);
                }
                *uid = Uid(place as i64);
            });
        }
        let by_uid: HashMap<Uid, &TensorDesc> = self.tensors.iter().map(|tensor| (tensor.uid, tensor)).collect();
        let mut tensors = Vec::with_capacity(old.len());
        for (place, uid) in old.iter().enumerate() {
            let tensor = by_uid.get(uid).ok_or_else(|| Error::UnknownTensor { op: self.name.clone(), uid: *uid })?;
            tensors.push(TensorDesc { uid: Uid(place as i64), name: String::new(), ..(*tensor).clone() });
        }
        Ok((Graph { name: String::new(), tensors, nodes, determinism: self.determinism }, old))
    }

    /// This graph and another as one, whose ops follow: the tensors of the other have new uids, which are told, the old ones first. Nothing is
    /// shared; where both read the same memory, it is bound to a tensor of each. Results are deterministic where either graph asks for it.
    ///
    /// ```
    /// use verdigris_graph::{GraphBuilder, UnaryOp};
    /// use verdigris_tensor::{DType, Layout};
    ///
    /// let draw = |f| -> Result<_, Box<dyn std::error::Error>> {
    ///     let mut g = GraphBuilder::new("activation");
    ///     let x = g.tensor("x", DType::F32, Layout::row_major(&[8])?);
    ///     let y = g.unary("y", f, x)?;
    ///     g.store(y, "y", DType::F32)?;
    ///     Ok(g.finish()?)
    /// };
    /// let (both, renamed) = draw(UnaryOp::Relu)?.beside(draw(UnaryOp::Exp)?);
    /// assert_eq!((both.tensors.len(), both.nodes.len(), renamed.len()), (4, 2, 2));
    /// verdigris_graph::validate::validate(&both)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn beside(mut self, mut other: Graph) -> (Graph, Vec<(Uid, Uid)>) {
        let taken: HashSet<i64> = self.tensors.iter().map(|tensor| tensor.uid.0).collect();
        // Behind the greatest, as long as there are numbers; then those that are free.
        let behind = taken.iter().max().map_or(Some(0), |greatest| greatest.checked_add(1));
        let free = behind.into_iter().flat_map(|first| first..=i64::MAX).chain(0..i64::MAX).filter(|number| !taken.contains(number));
        let mut used = HashSet::new();
        let unused = free.filter(|&number| used.insert(number));
        let renamed: Vec<(Uid, Uid)> = unused.zip(&other.tensors).map(|(new, tensor)| (tensor.uid, Uid(new))).collect();
        let new: HashMap<Uid, Uid> = renamed.iter().copied().collect();
        other.tensors.iter_mut().zip(&renamed).for_each(|(tensor, (_, new))| tensor.uid = *new);
        for node in &mut other.nodes {
            node.op.visit_uids(&mut |_, uid| {
                if let Some(new) = new.get(uid) {
                    *uid = *new;
                }
            });
        }
        self.tensors.extend(other.tensors);
        self.nodes.extend(other.nodes);
        self.determinism = self.determinism.max(other.determinism);
        (self, renamed)
    }

    /// The tensors written that lie where ones that are read do, each with that one: on a GPU the two are bound to the same memory.
    pub fn in_place(&self) -> Vec<(Uid, Uid)> {
        self.nodes.iter().filter_map(|node| node.op.in_place()).collect()
    }

    pub(crate) fn tensor_of(&self, op: &str, uid: Uid) -> Result<&TensorDesc, Error> {
        self.tensor(uid).ok_or_else(|| Error::UnknownTensor { op: op.to_owned(), uid })
    }
}

/// Builds a [`Graph`] op by op. Results are virtual until [`GraphBuilder::store`] makes them real.
///
/// ```
/// use verdigris_graph::{BinaryOp, GraphBuilder, Precision, UnaryOp};
/// use verdigris_tensor::{DType, Layout};
///
/// let mut g = GraphBuilder::new("linear");
/// let x = g.tensor("x", DType::Bf16, Layout::row_major(&[32, 64])?);
/// let w = g.tensor("w", DType::Bf16, Layout::row_major(&[64, 48])?);
/// let bias = g.tensor("bias", DType::F32, Layout::row_major(&[48])?);
/// let product = g.matmul("fc", x, w, Precision::Fp32)?;
/// let sum = g.binary("bias", BinaryOp::Add, product, bias)?;
/// let y = g.unary("relu", UnaryOp::Relu, sum)?;
/// g.store(y, "y", DType::Bf16)?;
/// let problems = verdigris_graph::pattern::problems(&g.finish()?)?;
/// assert_eq!(problems.len(), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct GraphBuilder {
    pub(crate) graph: Graph,
    /// The uid of the next tensor.
    next: i64,
}

/// A builder that goes on with a graph: its tensors keep their uids, what is stored stays stored.
impl From<Graph> for GraphBuilder {
    fn from(graph: Graph) -> GraphBuilder {
        let next = graph.tensors.iter().map(|tensor| tensor.uid.0).max().unwrap_or(0).saturating_add(1);
        GraphBuilder { graph, next }
    }
}

impl GraphBuilder {
    /// An empty graph.
    pub fn new(name: &str) -> GraphBuilder {
        GraphBuilder::from(Graph { name: name.to_owned(), tensors: Vec::new(), nodes: Vec::new(), determinism: Determinism::Any })
    }

    /// Asks that two executions agree bit for bit.
    pub fn deterministic(&mut self) {
        self.graph.determinism = Determinism::Repeatable;
    }

    /// What a tensor is so far: a result is virtual until it is stored.
    pub fn described(&self, uid: Uid) -> Option<&TensorDesc> {
        self.graph.tensor(uid)
    }

    /// Adds a stored tensor and gives it the next uid.
    pub fn tensor(&mut self, name: &str, dtype: DType, layout: Layout) -> Uid {
        let uid = self.next_uid();
        self.graph.tensors.push(TensorDesc::new(uid, name, dtype, layout));
        uid
    }

    /// Declares what the address of a stored tensor is a multiple of, in bytes. For tensors that are aligned to little more than their
    /// elements, such as a column of another: without a word, ways may be chosen that need 16 bytes or more.
    ///
    /// # Errors
    /// An unknown uid. The number is checked by [`GraphBuilder::finish`].
    pub fn align(&mut self, uid: Uid, alignment_bytes: u64) -> Result<(), Error> {
        let op = self.graph.name.clone();
        let tensor = self.graph.tensor_mut(uid).ok_or(Error::UnknownTensor { op, uid })?;
        tensor.alignment_bytes = Some(alignment_bytes);
        Ok(())
    }

    /// Adds a scalar that the host passes by value at execution.
    pub fn host_scalar(&mut self, name: &str, dtype: DType) -> Uid {
        let uid = self.next_uid();
        self.graph.tensors.push(TensorDesc::host_scalar(uid, name, dtype));
        uid
    }

    /// `A · B`, as a virtual tensor of the accumulator's type.
    ///
    /// # Errors
    /// Dims that do not fit.
    pub fn matmul(&mut self, name: &str, a: Uid, b: Uid, precision: Precision) -> Result<Uid, Error> {
        self.matmul_with(name, Matmul::new(a, b, Uid(0), precision))
    }

    /// A matmul with all its attributes; its `d` is replaced by a new virtual tensor, whose uid is returned.
    ///
    /// # Errors
    /// Dims that do not fit.
    pub fn matmul_with(&mut self, name: &str, matmul: Matmul) -> Result<Uid, Error> {
        let a = self.graph.tensor_of(name, matmul.a)?;
        let b = self.graph.tensor_of(name, matmul.b)?;
        let dims = Matmul::infer(name, a, b)?;
        let d = self.virtual_tensor(name, matmul.precision.accumulator(), &dims)?;
        self.push(name, Op::Matmul(Matmul { d, ..matmul }));
        Ok(d)
    }

    /// `f(x)`, as a virtual tensor.
    ///
    /// # Errors
    /// An unknown uid.
    pub fn unary(&mut self, name: &str, f: UnaryOp, x: Uid) -> Result<Uid, Error> {
        let (dtype, dims) = self.result_of(name, &[x])?;
        let y = self.virtual_tensor(name, dtype, &dims)?;
        self.push(name, Op::Pointwise(Pointwise::Unary { f, x, y }));
        Ok(y)
    }

    /// `f(x, z)`, as a virtual tensor.
    ///
    /// # Errors
    /// An unknown uid, or dims that do not broadcast.
    pub fn binary(&mut self, name: &str, f: BinaryOp, x: Uid, z: Uid) -> Result<Uid, Error> {
        let (dtype, dims) = self.result_of(name, &[x, z])?;
        let y = self.virtual_tensor(name, dtype, &dims)?;
        self.push(name, Op::Pointwise(Pointwise::Binary { f, x, z, y }));
        Ok(y)
    }

    /// `factor · x`, as a virtual tensor.
    ///
    /// # Errors
    /// An unknown uid.
    pub fn scale(&mut self, name: &str, x: Uid, factor: HostScalar<Uid>) -> Result<Uid, Error> {
        let (dtype, dims) = self.result_of(name, &[x])?;
        let y = self.virtual_tensor(name, dtype, &dims)?;
        self.push(name, Op::Pointwise(Pointwise::Scale { x, factor, y }));
        Ok(y)
    }

    /// `f(x, z, t)`, as a virtual tensor.
    ///
    /// # Errors
    /// An unknown uid, or dims that do not broadcast.
    pub fn ternary(&mut self, name: &str, f: TernaryOp, x: Uid, z: Uid, t: Uid) -> Result<Uid, Error> {
        let (dtype, dims) = self.result_of(name, &[x, z, t])?;
        let y = self.virtual_tensor(name, dtype, &dims)?;
        self.push(name, Op::Pointwise(Pointwise::Ternary { f, x, z, t, y }));
        Ok(y)
    }

    /// The coordinate of each element of a tensor of these dims along `axis`, as a virtual i64 tensor.
    ///
    /// # Errors
    /// Dims too large.
    pub fn gen_index(&mut self, name: &str, dims: &[u64], axis: u32) -> Result<Uid, Error> {
        let y = self.virtual_tensor(name, DType::I64, dims)?;
        self.push(name, Op::Pointwise(Pointwise::GenIndex { axis, y }));
        Ok(y)
    }

    /// Convolution, forward: `y` from `conv.x` and `conv.w`, as a virtual tensor of the accumulator's type. The direction and `y` of
    /// `conv` are replaced.
    ///
    /// # Errors
    /// An unknown uid, or dims and attributes that do not fit.
    pub fn conv_fprop(&mut self, name: &str, conv: Conv) -> Result<Uid, Error> {
        let x = self.graph.tensor_of(name, conv.x)?;
        let w = self.graph.tensor_of(name, conv.w)?;
        let dims = conv.infer(name, x, w)?;
        let y = self.virtual_tensor(name, conv.precision.accumulator(), &dims)?;
        self.push(name, Op::Conv(Conv { direction: ConvDirection::Fprop, y, ..conv }));
        Ok(y)
    }

    /// Convolution's gradient with respect to the input, or transposed convolution: `x` of these dims from `conv.y` and `conv.w`, as a
    /// virtual tensor of the accumulator's type. The direction and `x` of `conv` are replaced.
    ///
    /// # Errors
    /// Dims too large. That they fit is checked by [`GraphBuilder::finish`].
    pub fn conv_dgrad(&mut self, name: &str, conv: Conv, x_dims: &[u64]) -> Result<Uid, Error> {
        let x = self.virtual_tensor(name, conv.precision.accumulator(), x_dims)?;
        self.push(name, Op::Conv(Conv { direction: ConvDirection::Dgrad, x, ..conv }));
        Ok(x)
    }

    /// Convolution's gradient with respect to the filter: `w` of these dims from `conv.x` and `conv.y`, as a virtual tensor of the
    /// accumulator's type. The direction and `w` of `conv` are replaced.
    ///
    /// # Errors
    /// Dims too large. That they fit is checked by [`GraphBuilder::finish`].
    pub fn conv_wgrad(&mut self, name: &str, conv: Conv, w_dims: &[u64]) -> Result<Uid, Error> {
        let w = self.virtual_tensor(name, conv.precision.accumulator(), w_dims)?;
        self.push(name, Op::Conv(Conv { direction: ConvDirection::Wgrad, w, ..conv }));
        Ok(w)
    }

    /// A reduction of `x` over `axes`, as a virtual tensor.
    ///
    /// # Errors
    /// An unknown uid, or axes that `x` does not have.
    pub fn reduction(&mut self, name: &str, f: ReductionOp, x: Uid, axes: &[u32]) -> Result<Uid, Error> {
        let x_desc = self.graph.tensor_of(name, x)?;
        let dims = Reduction::infer(name, axes, x_desc)?;
        let y = self.virtual_tensor(name, Pointwise::compute_dtype([x_desc.dtype]), &dims)?;
        self.push(name, Op::Reduction(Reduction { f, axes: axes.to_vec(), x, y }));
        Ok(y)
    }

    /// Pooling of `x`, as a virtual tensor: of the type of `x` for a maximum, else of the type that means are computed in.
    ///
    /// # Errors
    /// An unknown uid, or windows that do not fit.
    pub fn pool(&mut self, name: &str, mode: PoolMode, windows: PoolWindows, x: Uid) -> Result<Uid, Error> {
        let (dtype, dims) = self.pool_result(name, mode, &windows, x)?;
        let y = self.virtual_tensor(name, dtype, &dims)?;
        self.push(name, Op::Pool(Pool { mode, windows, x, samples: None, y, index: None }));
        Ok(y)
    }

    /// Max pooling of `x` and the index of each maximum, of type `index_dtype`: two virtual tensors.
    ///
    /// # Errors
    /// An unknown uid, or windows that do not fit.
    pub fn max_pool_with_index(&mut self, name: &str, windows: PoolWindows, x: Uid, index_dtype: DType) -> Result<(Uid, Uid), Error> {
        let (dtype, dims) = self.pool_result(name, PoolMode::Max, &windows, x)?;
        let y = self.virtual_tensor(name, dtype, &dims)?;
        let index = self.virtual_tensor(&format!("{name}.index"), index_dtype, &dims)?;
        self.push(name, Op::Pool(Pool { mode: PoolMode::Max, windows, x, samples: None, y, index: Some(index) }));
        Ok((y, index))
    }

    /// Max pooling of `x` by windows that begin where `samples` say, and the index of each maximum, of type `index_dtype`: two virtual tensors.
    ///
    /// # Errors
    /// An unknown uid, or windows that do not fit. What samples are is checked by [`GraphBuilder::finish`].
    pub fn fractional_max_pool(
        &mut self,
        name: &str,
        x: Uid,
        samples: Uid,
        (window, out): (&[u64], &[u64]),
        index_dtype: DType,
    ) -> Result<(Uid, Uid), Error> {
        let windows = PoolWindows::Fractional { window: window.to_vec(), out: out.to_vec() };
        let (dtype, dims) = self.pool_result(name, PoolMode::Max, &windows, x)?;
        let y = self.virtual_tensor(name, dtype, &dims)?;
        let index = self.virtual_tensor(&format!("{name}.index"), index_dtype, &dims)?;
        self.push(name, Op::Pool(Pool { mode: PoolMode::Max, windows, x, samples: Some(samples), y, index: Some(index) }));
        Ok((y, index))
    }

    fn pool_result(&self, name: &str, mode: PoolMode, windows: &PoolWindows, x: Uid) -> Result<(DType, Vec<u64>), Error> {
        let x = self.graph.tensor_of(name, x)?;
        let dtype = if mode == PoolMode::Max { x.dtype } else { Pointwise::compute_dtype([x.dtype]) };
        Ok((dtype, windows.infer(name, x)?))
    }

    /// The gradient of pooling, of these dims, as a virtual tensor. The `dx` of `pool` is replaced.
    ///
    /// # Errors
    /// An unknown uid, or dims too large. That they fit is checked by [`GraphBuilder::finish`].
    pub fn pool_backward(&mut self, name: &str, pool: PoolBackward, x_dims: &[u64]) -> Result<Uid, Error> {
        let dtype = Pointwise::compute_dtype([self.graph.tensor_of(name, pool.dy)?.dtype]);
        let dx = self.virtual_tensor(name, dtype, x_dims)?;
        self.push(name, Op::PoolBackward(PoolBackward { dx, ..pool }));
        Ok(dx)
    }

    /// Softmax, or its logarithm, of `x` along `axis`, as a virtual tensor.
    ///
    /// # Errors
    /// An unknown uid.
    pub fn softmax(&mut self, name: &str, x: Uid, axis: u32, log: bool) -> Result<Uid, Error> {
        let (dtype, dims) = self.result_of(name, &[x])?;
        let y = self.virtual_tensor(name, dtype, &dims)?;
        self.push(name, Op::Softmax(Softmax { axis, log, x, y }));
        Ok(y)
    }

    /// The gradient of softmax, or of its logarithm, from the forward result and `dy`, as a virtual tensor.
    ///
    /// # Errors
    /// An unknown uid.
    pub fn softmax_backward(&mut self, name: &str, y: Uid, dy: Uid, axis: u32, log: bool) -> Result<Uid, Error> {
        let (dtype, dims) = self.result_of(name, &[y, dy])?;
        let dx = self.virtual_tensor(name, dtype, &dims)?;
        self.push(name, Op::SoftmaxBackward(SoftmaxBackward { axis, log, y, dy, dx }));
        Ok(dx)
    }

    /// The cross-entropy of logits and integer labels, as a virtual tensor.
    ///
    /// # Errors
    /// An unknown uid, or an axis that the logits do not have.
    pub fn cross_entropy(&mut self, name: &str, spec: CrossEntropySpec, logits: Uid, labels: Uid) -> Result<Uid, Error> {
        let x = self.graph.tensor_of(name, logits)?;
        let (dtype, dims) = (Pointwise::compute_dtype([x.dtype]), spec.loss_dims(name, x)?);
        let loss = self.virtual_tensor(name, dtype, &dims)?;
        self.push(name, Op::CrossEntropy(CrossEntropy { spec, logits, labels, loss, lse: None }));
        Ok(loss)
    }

    /// The cross-entropy and the log-sum-exp of each row: two virtual tensors.
    ///
    /// # Errors
    /// As [`GraphBuilder::cross_entropy`].
    pub fn cross_entropy_with_lse(&mut self, name: &str, spec: CrossEntropySpec, logits: Uid, labels: Uid) -> Result<(Uid, Uid), Error> {
        let x = self.graph.tensor_of(name, logits)?;
        let (dtype, dims, rows) = (Pointwise::compute_dtype([x.dtype]), spec.loss_dims(name, x)?, spec.row_dims(name, x)?);
        let loss = self.virtual_tensor(name, dtype, &dims)?;
        let lse = self.virtual_tensor(&format!("{name}.lse"), dtype, &rows)?;
        self.push(name, Op::CrossEntropy(CrossEntropy { spec, logits, labels, loss, lse: Some(lse) }));
        Ok((loss, lse))
    }

    /// The gradient of cross-entropy, as a virtual tensor. The `dlogits` of `loss` is replaced.
    ///
    /// # Errors
    /// An unknown uid.
    pub fn cross_entropy_backward(&mut self, name: &str, loss: CrossEntropyBackward) -> Result<Uid, Error> {
        let (dtype, dims) = self.result_of(name, &[loss.logits])?;
        let dlogits = self.virtual_tensor(name, dtype, &dims)?;
        self.push(name, Op::CrossEntropyBackward(CrossEntropyBackward { dlogits, ..loss }));
        Ok(dlogits)
    }

    /// The elements of `x` under other dims, as a virtual tensor.
    ///
    /// # Errors
    /// An unknown uid, or dims too large. That their product is right is checked by [`GraphBuilder::finish`].
    pub fn reshape(&mut self, name: &str, x: Uid, dims: &[u64]) -> Result<Uid, Error> {
        let y = self.virtual_tensor(name, self.graph.tensor_of(name, x)?.dtype, dims)?;
        self.push(name, Op::Movement(Movement::Reshape { x, y }));
        Ok(y)
    }

    /// `x` repeated to these dims, as a virtual tensor.
    ///
    /// # Errors
    /// An unknown uid, or dims too large. That `x` broadcasts is checked by [`GraphBuilder::finish`].
    pub fn broadcast(&mut self, name: &str, x: Uid, dims: &[u64]) -> Result<Uid, Error> {
        let y = self.virtual_tensor(name, self.graph.tensor_of(name, x)?.dtype, dims)?;
        self.push(name, Op::Movement(Movement::Broadcast { x, y }));
        Ok(y)
    }

    /// `x` with its dims in another order, as a virtual tensor.
    ///
    /// # Errors
    /// An unknown uid, or what is no permutation of its dims.
    pub fn transpose(&mut self, name: &str, x: Uid, permutation: &[u32]) -> Result<Uid, Error> {
        self.movement(name, Movement::Transpose { permutation: permutation.to_vec(), x, y: Uid(0) }, &[x])
    }

    /// Part of `x`, as a virtual tensor. Each list has one entry for each dim.
    ///
    /// # Errors
    /// An unknown uid, or a part that `x` does not have.
    pub fn slice(&mut self, name: &str, x: Uid, starts: &[u64], stops: &[u64], steps: &[u64]) -> Result<Uid, Error> {
        let [starts, stops, steps] = [starts, stops, steps].map(<[u64]>::to_vec);
        self.movement(name, Movement::Slice { starts, stops, steps, x, y: Uid(0) }, &[x])
    }

    /// Tensors one behind the other along `axis`, as a virtual tensor.
    ///
    /// # Errors
    /// An unknown uid, no tensors, or dims that disagree.
    pub fn concat(&mut self, name: &str, xs: &[Uid], axis: u32) -> Result<Uid, Error> {
        self.movement(name, Movement::Concat { axis, xs: xs.to_vec(), y: Uid(0) }, xs)
    }

    /// `x` with a border, as a virtual tensor. Each list has one entry for each dim.
    ///
    /// # Errors
    /// An unknown uid, or lists that do not fit.
    pub fn pad(&mut self, name: &str, x: Uid, before: &[u64], after: &[u64], value: f64) -> Result<Uid, Error> {
        let pad = Movement::Pad { before: before.to_vec(), after: after.to_vec(), value: Real(value), x, y: Uid(0) };
        self.movement(name, pad, &[x])
    }

    fn movement(&mut self, name: &str, mut movement: Movement, inputs: &[Uid]) -> Result<Uid, Error> {
        let inputs = inputs.iter().map(|&uid| self.graph.tensor_of(name, uid)).collect::<Result<Vec<_>, Error>>()?;
        // Movements whose dims are the caller's do not come here.
        let dims = movement.infer(name, &inputs)?.unwrap_or_default();
        let dtype = inputs.first().map_or(DType::F32, |tensor| tensor.dtype);
        let result = self.virtual_tensor(name, dtype, &dims)?;
        movement.visit(&mut |role, uid| {
            if role == Role::Output {
                *uid = result;
            }
        });
        self.push(name, Op::Movement(movement));
        Ok(result)
    }

    /// The dims of a tensor; `None` for an unknown uid.
    pub fn dims(&self, uid: Uid) -> Option<Vec<u64>> {
        self.graph.tensor(uid).map(|tensor| tensor.layout.dims().to_vec())
    }

    /// Gives a virtual tensor another element type: its value is what that type holds, as if it had been stored and read again.
    ///
    /// # Errors
    /// An unknown uid. That the op which writes it can is checked by [`GraphBuilder::finish`].
    pub fn set_dtype(&mut self, uid: Uid, dtype: DType) -> Result<(), Error> {
        let op = self.graph.name.clone();
        let tensor = self.graph.tensor_mut(uid).ok_or(Error::UnknownTensor { op, uid })?;
        tensor.dtype = dtype;
        Ok(())
    }

    /// Gives a virtual tensor another layout, which it has in the workspace where one launch writes and another reads it.
    ///
    /// # Errors
    /// An unknown uid. That the dims fit is checked by [`GraphBuilder::finish`].
    pub fn set_layout(&mut self, uid: Uid, layout: Layout) -> Result<(), Error> {
        let op = self.graph.name.clone();
        let tensor = self.graph.tensor_mut(uid).ok_or(Error::UnknownTensor { op, uid })?;
        tensor.layout = layout;
        Ok(())
    }

    /// Makes a virtual tensor real: named, of type `dtype`, packed row-major.
    ///
    /// # Errors
    /// An unknown uid, or a tensor too large.
    pub fn store(&mut self, uid: Uid, name: &str, dtype: DType) -> Result<(), Error> {
        let dims = self.graph.tensor_of(name, uid)?.layout.dims().to_vec();
        let layout = Layout::row_major(&dims).map_err(|source| Error::Layout { tensor: name.to_owned(), source })?;
        self.store_as(uid, name, dtype, layout)
    }

    /// Makes a virtual tensor real, with a layout of one's own.
    ///
    /// # Errors
    /// An unknown uid. That the dims fit is checked by [`GraphBuilder::finish`].
    pub fn store_as(&mut self, uid: Uid, name: &str, dtype: DType, layout: Layout) -> Result<(), Error> {
        let tensor = self.graph.tensor_mut(uid).ok_or_else(|| Error::UnknownTensor { op: name.to_owned(), uid })?;
        *tensor = TensorDesc { alignment_bytes: tensor.alignment_bytes, ..TensorDesc::new(uid, name, dtype, layout) };
        Ok(())
    }

    /// Gives a virtual tensor another type, to which its value is then rounded: as the operand of a product after a chain on f32, say.
    ///
    /// # Errors
    /// An unknown uid.
    pub fn round_to(&mut self, uid: Uid, dtype: DType) -> Result<(), Error> {
        let op = self.graph.name.clone();
        let tensor = self.graph.tensor_mut(uid).ok_or(Error::UnknownTensor { op, uid })?;
        tensor.dtype = dtype;
        Ok(())
    }

    /// Makes a stored tensor virtual again, of that type: what follows reads it unrounded, and nobody binds it.
    ///
    /// # Errors
    /// An unknown uid.
    pub fn make_virtual(&mut self, uid: Uid, dtype: DType) -> Result<(), Error> {
        let op = self.graph.name.clone();
        let tensor = self.graph.tensor_mut(uid).ok_or(Error::UnknownTensor { op, uid })?;
        *tensor = TensorDesc { is_virtual: true, ..TensorDesc::new(uid, &tensor.name, dtype, tensor.layout) };
        Ok(())
    }

    /// The graph, checked. A log-sum-exp, an index, a statistic or whatever else an op may leave out is left out if it was neither stored nor read.
    ///
    /// # Errors
    /// All that [`crate::validate::validate`] finds.
    pub fn finish(mut self) -> Result<Graph, Error> {
        self.leave_out_unused();
        crate::validate::validate(&self.graph)?;
        Ok(self.graph)
    }

    fn leave_out_unused(&mut self) {
        let Graph { tensors, nodes, .. } = &mut self.graph;
        let read: HashSet<Uid> = nodes.iter().flat_map(|node| node.op.inputs()).collect();
        for node in nodes {
            let optional = match &mut node.op {
                Op::CrossEntropy(loss) => vec![&mut loss.lse],
                Op::Pool(pool) => vec![&mut pool.index],
                Op::Normalize(norm) => vec![&mut norm.sum, &mut norm.mean, &mut norm.inv],
                Op::NormalizeBackward(back) => vec![&mut back.dx, &mut back.dscale, &mut back.dbias],
                Op::BatchNorm(norm) => vec![&mut norm.mean, &mut norm.inv],
                Op::BatchNormBackward(back) => vec![&mut back.dx, &mut back.dscale, &mut back.dbias, &mut back.dadd],
                Op::BatchNormStatistics(statistics) => vec![&mut statistics.m2],
                Op::Attention(attention) => vec![&mut attention.log_sum_exp, &mut attention.max_scores],
                Op::AttentionBackward(back) => {
                    let of_op = [&mut back.dq, &mut back.dk, &mut back.dv, &mut back.dbias, &mut back.dsinks];
                    of_op.into_iter().chain(&mut back.d_score_operands).collect()
                }
                _ => continue,
            };
            for output in optional {
                if let Some(uid) = *output
                    && !read.contains(&uid)
                    && let Some(place) = tensors.iter().position(|tensor| tensor.uid == uid && tensor.is_virtual)
                {
                    tensors.remove(place);
                    *output = None;
                }
            }
            if let Op::AttentionBackward(back) = &mut node.op
                && back.d_score_operands.iter().all(Option::is_none)
            {
                back.d_score_operands.clear();
            }
        }
    }

    fn next_uid(&mut self) -> Uid {
        let uid = Uid(self.next);
        // At the end of the range the next uid is one that is taken, which `finish` refuses.
        self.next = self.next.saturating_add(1);
        uid
    }

    pub(crate) fn push(&mut self, name: &str, op: Op) {
        self.graph.nodes.push(Node { name: name.to_owned(), op });
    }

    pub(crate) fn virtual_tensor(&mut self, name: &str, dtype: DType, dims: &[u64]) -> Result<Uid, Error> {
        let layout = Layout::row_major(dims).map_err(|source| Error::Layout { tensor: name.to_owned(), source })?;
        let uid = self.next_uid();
        let tensor = TensorDesc::new(uid, name, dtype, layout);
        self.graph.tensors.push(TensorDesc { is_virtual: true, ..tensor });
        Ok(uid)
    }

    /// Type and dims of a pointwise result. It is f64 if an operand is, and f32 for all else, so that nothing is rounded on the way.
    pub(crate) fn result_of(&self, op: &str, operands: &[Uid]) -> Result<(DType, Vec<u64>), Error> {
        let operands = operands.iter().map(|&uid| self.graph.tensor_of(op, uid)).collect::<Result<Vec<_>, Error>>()?;
        Ok((Pointwise::compute_dtype(operands.iter().map(|tensor| tensor.dtype)), Pointwise::infer(op, &operands)?))
    }
}
