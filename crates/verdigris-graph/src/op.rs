//! The closed set of operations, and the scalars that attributes are made of.

use std::fmt;
use std::hash::{Hash, Hasher};

use serde::{Deserialize, Serialize};

use crate::ops::matmul::Matmul;
use crate::ops::pointwise::Pointwise;
use crate::tensor::Uid;

/// One operation with its attributes and the tensors it reads and writes.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// `D = alpha · A · B + beta · C`, batched.
    Matmul(Matmul),
    /// One function of one or two tensors, element by element.
    Pointwise(Pointwise),
}

impl Op {
    /// The tensors read, in the order of the op's fields; one that is read twice is listed twice.
    pub fn inputs(&self) -> Vec<Uid> {
        match self {
            Op::Matmul(op) => op.inputs(),
            Op::Pointwise(op) => op.inputs(),
        }
    }

    /// The tensor written.
    pub fn output(&self) -> Uid {
        match self {
            Op::Matmul(op) => op.d,
            Op::Pointwise(op) => op.output(),
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
