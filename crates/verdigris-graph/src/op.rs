//! The closed set of operations, and the scalars that attributes are made of.

use std::fmt;
use std::hash::{Hash, Hasher};

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::gradient::Backward;
use crate::graph::Graph;
use crate::ops::conv::Conv;
use crate::ops::matmul::Matmul;
use crate::ops::movement::Movement;
use crate::ops::pointwise::Pointwise;
use crate::ops::pool::{Pool, PoolBackward};
use crate::ops::reduction::Reduction;
use crate::ops::softmax::{CrossEntropy, CrossEntropyBackward, Softmax, SoftmaxBackward};
use crate::tensor::Uid;

/// One operation with its attributes and the tensors it reads and writes.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// `D = alpha · A · B + beta · C`, batched.
    Matmul(Matmul),
    /// One function of up to three tensors, element by element.
    Pointwise(Pointwise),
    /// Convolution, forward or a gradient of it.
    Conv(Conv),
    /// A sum, product, extremum, mean or norm over axes.
    Reduction(Reduction),
    /// Max or average pooling.
    Pool(Pool),
    /// The gradient of pooling.
    PoolBackward(PoolBackward),
    /// Softmax or log-softmax.
    Softmax(Softmax),
    /// The gradient of softmax or log-softmax.
    SoftmaxBackward(SoftmaxBackward),
    /// Cross-entropy of logits and integer labels.
    CrossEntropy(CrossEntropy),
    /// The gradient of cross-entropy.
    CrossEntropyBackward(CrossEntropyBackward),
    /// The same values in other places.
    Movement(Movement),
}

/// Whether an op reads or writes a tensor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Role {
    /// Read.
    Input,
    /// Written.
    Output,
}

impl Op {
    /// Shows every uid to `visit`: inputs in the order of the op's fields, then outputs, the main result first.
    pub fn visit_uids(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        match self {
            Op::Matmul(op) => op.visit(visit),
            Op::Pointwise(op) => op.visit(visit),
            Op::Conv(op) => op.visit(visit),
            Op::Reduction(op) => op.visit(visit),
            Op::Pool(op) => op.visit(visit),
            Op::PoolBackward(op) => op.visit(visit),
            Op::Softmax(op) => op.visit(visit),
            Op::SoftmaxBackward(op) => op.visit(visit),
            Op::CrossEntropy(op) => op.visit(visit),
            Op::CrossEntropyBackward(op) => op.visit(visit),
            Op::Movement(op) => op.visit(visit),
        }
    }

    fn uids(&self, role: Role) -> Vec<Uid> {
        let mut uids = Vec::new();
        self.clone().visit_uids(&mut |this, uid| {
            if this == role {
                uids.push(*uid);
            }
        });
        uids
    }

    /// The tensors read, in the order of the op's fields; one that is read twice is listed twice.
    pub fn inputs(&self) -> Vec<Uid> {
        self.uids(Role::Input)
    }

    /// The tensors written, the main result first.
    pub fn outputs(&self) -> Vec<Uid> {
        self.uids(Role::Output)
    }

    /// The main result: the first of [`Op::outputs`].
    pub fn output(&self) -> Uid {
        self.outputs()[0]
    }

    pub(crate) fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        match self {
            Op::Matmul(matmul) => matmul.check(op, graph),
            Op::Pointwise(pointwise) => pointwise.check(op, graph),
            Op::Conv(conv) => conv.check(op, graph),
            Op::Reduction(reduction) => reduction.check(op, graph),
            Op::Pool(pool) => pool.check(op, graph),
            Op::PoolBackward(pool) => pool.check(op, graph),
            Op::Softmax(softmax) => softmax.check(op, graph),
            Op::SoftmaxBackward(softmax) => softmax.check(op, graph),
            Op::CrossEntropy(loss) => loss.check(op, graph),
            Op::CrossEntropyBackward(loss) => loss.check(op, graph),
            Op::Movement(movement) => movement.check(op, graph),
        }
    }

    /// The op's rule of differentiation: from the gradients of what it writes, those of what it reads.
    pub(crate) fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        match self {
            Op::Matmul(op) => op.differentiate(at),
            Op::Pointwise(op) => op.differentiate(at),
            Op::Conv(op) => op.differentiate(at),
            Op::Reduction(op) => op.differentiate(at),
            Op::Pool(op) => op.differentiate(at),
            Op::PoolBackward(op) => op.differentiate(at),
            Op::Softmax(op) => op.differentiate(at),
            Op::SoftmaxBackward(op) => op.differentiate(at),
            Op::CrossEntropy(op) => op.differentiate(at),
            Op::CrossEntropyBackward(op) => op.differentiate(at),
            Op::Movement(op) => op.differentiate(at),
        }
    }
}

/// A finite attribute value. Compared and hashed by its bits, so that it can be part of a fingerprint (−0 is not 0).
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Real(pub f64);

impl PartialEq for Real {
    fn eq(&self, other: &Real) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Eq for Real {}

impl Hash for Real {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}

impl fmt::Display for Real {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A factor that the host knows: fixed in the graph, or bound by value at each execution. `Id` is [`Uid`] in a graph and
/// [`crate::Slot`] in a problem.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HostScalar<Id> {
    /// The same at every execution.
    Fixed(Real),
    /// Passed at execution.
    Bound(Id),
}

impl<Id> HostScalar<Id> {
    /// The constant 1.
    pub const ONE: HostScalar<Id> = HostScalar::Fixed(Real(1.0));
    /// The constant 0.
    pub const ZERO: HostScalar<Id> = HostScalar::Fixed(Real(0.0));

    /// Whether this is fixed and equal to `value` (0 equals −0 here).
    pub fn is_fixed(&self, value: f64) -> bool {
        matches!(self, HostScalar::Fixed(real) if real.0 == value)
    }
}
