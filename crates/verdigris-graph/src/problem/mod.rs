//! What one engine may take: one canonical, device-free subgraph.
//!
//! One file a kind, with its formula. What a problem reads and writes is known by slots, numbered from 0 in the order that the kind's page
//! gives; an operand that is used twice has one slot. What a slot is bound to is said beside the problem ([`crate::pattern::Subgraph`]).

mod gemm;
mod matrix;

use std::fmt;

use serde::{Deserialize, Serialize};
use verdigris_tensor::DType;

use crate::error::Error;
use crate::op::HostScalar;
use crate::ops::pointwise::{BinaryOp, UnaryOp};

pub use gemm::{GemmProblem, Scale};
pub use matrix::{Matrix, Order};

/// A buffer or a host scalar of a problem.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Slot(pub u32);

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slot {}", self.0)
    }
}

/// One subgraph in canonical form. Engines match on it exhaustively.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Problem {
    /// Matrix multiplication with an epilogue.
    Gemm(GemmProblem),
}

/// Whether two executions must agree bit for bit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Determinism {
    /// They need not.
    #[default]
    Any,
    /// Same device, same inputs, same bits.
    Repeatable,
}

/// One step between a finished sum and the output. `v` is the value of one element, in the epilogue's type; `P` says where an operand's
/// elements lie, such as a [`Matrix`].
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EpilogueStep<P = Matrix> {
    /// `v = f(v)`.
    Unary(UnaryOp),
    /// `v = f(v, operand[m, n])`, or `f(operand[m, n], v)`: bias (an operand that is per column or per row), residual, gate, mask.
    Binary {
        /// The function.
        f: BinaryOp,
        /// Read; strides of 0 broadcast it.
        operand: P,
        /// Whether `v` is the right argument. `false` for commutative functions.
        v_is_right: bool,
    },
    /// `v = factor · v`.
    Scale {
        /// The factor, from the host.
        factor: HostScalar<Slot>,
    },
    /// `v` rounded to a type, as if it had been stored and read again.
    Round {
        /// The type.
        dtype: DType,
    },
    /// Stores `v`, rounded to the target's type, and goes on with the unrounded `v`.
    Store {
        /// Written.
        target: P,
    },
}

pub(crate) fn finite(op: &str, attribute: &'static str, scalar: &HostScalar<Slot>) -> Result<(), Error> {
    match scalar {
        HostScalar::Fixed(real) if !real.0.is_finite() => {
            Err(Error::Attribute { op: op.to_owned(), attribute, value: real.to_string(), rule: "a fixed factor is finite" })
        }
        _ => Ok(()),
    }
}
