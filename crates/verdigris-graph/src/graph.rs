//! The graph and its builder.

use serde::{Deserialize, Serialize};
use verdigris_tensor::{DType, Layout};

use crate::error::Error;
use crate::op::{HostScalar, Op};
use crate::ops::matmul::{Matmul, Precision};
use crate::ops::pointwise::{BinaryOp, Pointwise, UnaryOp};
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
    /// The tensor of this uid.
    pub fn tensor(&self, uid: Uid) -> Option<&TensorDesc> {
        self.tensors.iter().find(|tensor| tensor.uid == uid)
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
    graph: Graph,
}

impl GraphBuilder {
    /// An empty graph.
    pub fn new(name: &str) -> GraphBuilder {
        GraphBuilder { graph: Graph { name: name.to_owned(), tensors: Vec::new(), nodes: Vec::new(), determinism: Determinism::Any } }
    }

    /// Asks that two executions agree bit for bit.
    pub fn deterministic(&mut self) {
        self.graph.determinism = Determinism::Repeatable;
    }

    /// Adds a stored tensor and gives it the next uid.
    pub fn tensor(&mut self, name: &str, dtype: DType, layout: Layout) -> Uid {
        let uid = self.next_uid();
        self.graph.tensors.push(TensorDesc::new(uid, name, dtype, layout));
        uid
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
        let d = self.next_uid();
        self.matmul_with(name, Matmul::new(a, b, d, precision))
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
        let (dtype, dims) = self.result_of(name, x, None)?;
        let y = self.virtual_tensor(name, dtype, &dims)?;
        self.push(name, Op::Pointwise(Pointwise::Unary { f, x, y }));
        Ok(y)
    }

    /// `f(x, z)`, as a virtual tensor.
    ///
    /// # Errors
    /// An unknown uid, or dims that do not broadcast.
    pub fn binary(&mut self, name: &str, f: BinaryOp, x: Uid, z: Uid) -> Result<Uid, Error> {
        let (dtype, dims) = self.result_of(name, x, Some(z))?;
        let y = self.virtual_tensor(name, dtype, &dims)?;
        self.push(name, Op::Pointwise(Pointwise::Binary { f, x, z, y }));
        Ok(y)
    }

    /// `factor · x`, as a virtual tensor.
    ///
    /// # Errors
    /// An unknown uid.
    pub fn scale(&mut self, name: &str, x: Uid, factor: HostScalar<Uid>) -> Result<Uid, Error> {
        let (dtype, dims) = self.result_of(name, x, None)?;
        let y = self.virtual_tensor(name, dtype, &dims)?;
        self.push(name, Op::Pointwise(Pointwise::Scale { x, factor, y }));
        Ok(y)
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
        let tensor = (self.graph.tensors.iter_mut())
            .find(|tensor| tensor.uid == uid)
            .ok_or_else(|| Error::UnknownTensor { op: name.to_owned(), uid })?;
        *tensor = TensorDesc::new(uid, name, dtype, layout);
        Ok(())
    }

    /// The graph, checked.
    ///
    /// # Errors
    /// All that [`crate::validate::validate`] finds.
    pub fn finish(self) -> Result<Graph, Error> {
        crate::validate::validate(&self.graph)?;
        Ok(self.graph)
    }

    fn next_uid(&self) -> Uid {
        Uid(self.graph.tensors.len() as i64 + 1)
    }

    fn push(&mut self, name: &str, op: Op) {
        self.graph.nodes.push(Node { name: name.to_owned(), op });
    }

    fn virtual_tensor(&mut self, name: &str, dtype: DType, dims: &[u64]) -> Result<Uid, Error> {
        let layout = Layout::row_major(dims).map_err(|source| Error::Layout { tensor: name.to_owned(), source })?;
        let uid = self.next_uid();
        let tensor = TensorDesc::new(uid, name, dtype, layout);
        self.graph.tensors.push(TensorDesc { is_virtual: true, ..tensor });
        Ok(uid)
    }

    /// Type and dims of a pointwise result. It is f64 for f64 and f32 for all else, so that nothing is rounded on the way.
    fn result_of(&self, op: &str, x: Uid, z: Option<Uid>) -> Result<(DType, Vec<u64>), Error> {
        let x = self.graph.tensor_of(op, x)?;
        let z = z.map(|z| self.graph.tensor_of(op, z)).transpose()?;
        let dtype = if x.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        Ok((dtype, Pointwise::infer(op, x, z)?))
    }
}
