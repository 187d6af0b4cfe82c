//! Functions of one or two tensors, element by element.
//!
//! `y[i] = f(x[i])`, `y[i] = f(x[i], z[i])` or `y[i] = factor · x[i]`, with `z` broadcast to `x` from the right. They are computed in f32
//! (f64 if `x` is f64) and rounded once, to the type of `y`. Bias and residual addition are [`BinaryOp::Add`] with a `z` that is
//! broadcast or full.

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::op::{HostScalar, Real};
use crate::tensor::{TensorDesc, Uid};

/// A function of one value. NaN gives NaN throughout.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum UnaryOp {
    /// `x`: a cast, where the types differ.
    Identity,
    /// `−x`.
    Neg,
    /// `|x|`.
    Abs,
    /// `max(x, 0)`.
    Relu,
    /// `x` if `x > 0`, else `slope · x`.
    LeakyRelu {
        /// The factor below 0.
        slope: Real,
    },
    /// `min(max(x, lower), upper)`.
    Clamp {
        /// The least result.
        lower: Real,
        /// The greatest result; not below `lower`.
        upper: Real,
    },
    /// `x / 2 · (1 + erf(x / √2))`.
    GeluErf,
    /// `x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 · x³)))`.
    GeluTanh,
    /// `x · sigmoid(x)`.
    Silu,
    /// `1 / (1 + e^−x)`.
    Sigmoid,
    /// `tanh(x)`.
    Tanh,
}

impl UnaryOp {
    /// The name used in serialized form.
    pub const fn name(self) -> &'static str {
        match self {
            UnaryOp::Identity => "identity",
            UnaryOp::Neg => "neg",
            UnaryOp::Abs => "abs",
            UnaryOp::Relu => "relu",
            UnaryOp::LeakyRelu { .. } => "leaky_relu",
            UnaryOp::Clamp { .. } => "clamp",
            UnaryOp::GeluErf => "gelu_erf",
            UnaryOp::GeluTanh => "gelu_tanh",
            UnaryOp::Silu => "silu",
            UnaryOp::Sigmoid => "sigmoid",
            UnaryOp::Tanh => "tanh",
        }
    }

    /// Checks the attributes.
    ///
    /// # Errors
    /// A value that is not finite, or a clamp whose bounds are in the wrong order.
    pub fn check(self, op: &str) -> Result<(), Error> {
        let error = |attribute, value: f64, rule| Err(Error::Attribute { op: op.to_owned(), attribute, value: value.to_string(), rule });
        match self {
            UnaryOp::LeakyRelu { slope } if !slope.0.is_finite() => error("slope", slope.0, "a slope is finite"),
            UnaryOp::Clamp { lower, .. } if !lower.0.is_finite() => error("lower", lower.0, "a clamp bound is finite"),
            UnaryOp::Clamp { upper, .. } if !upper.0.is_finite() => error("upper", upper.0, "a clamp bound is finite"),
            UnaryOp::Clamp { lower, upper } if upper.0 < lower.0 => {
                error("upper", upper.0, "the upper clamp bound is not below the lower one")
            }
            _ => Ok(()),
        }
    }
}

/// A function of two values. NaN in either gives NaN, in `Max` and `Min` too.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BinaryOp {
    /// `x + z`.
    Add,
    /// `x − z`.
    Sub,
    /// `x · z`.
    Mul,
    /// The greater one.
    Max,
    /// The lesser one.
    Min,
}

impl BinaryOp {
    /// Every one.
    pub const ALL: [BinaryOp; 5] = [BinaryOp::Add, BinaryOp::Sub, BinaryOp::Mul, BinaryOp::Max, BinaryOp::Min];

    /// Whether the operands may be swapped.
    pub const fn is_commutative(self) -> bool {
        !matches!(self, BinaryOp::Sub)
    }

    /// The name used in serialized form.
    pub const fn name(self) -> &'static str {
        match self {
            BinaryOp::Add => "add",
            BinaryOp::Sub => "sub",
            BinaryOp::Mul => "mul",
            BinaryOp::Max => "max",
            BinaryOp::Min => "min",
        }
    }
}

/// One pointwise operation; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Pointwise {
    /// `y = f(x)`.
    Unary {
        /// The function.
        f: UnaryOp,
        /// Read.
        x: Uid,
        /// Written; the dims of `x`.
        y: Uid,
    },
    /// `y = f(x, z)`.
    Binary {
        /// The function.
        f: BinaryOp,
        /// Read, left.
        x: Uid,
        /// Read, right.
        z: Uid,
        /// Written; the common broadcast dims of `x` and `z`.
        y: Uid,
    },
    /// `y = factor · x`.
    Scale {
        /// Read.
        x: Uid,
        /// The factor, from the host.
        factor: HostScalar<Uid>,
        /// Written; the dims of `x`.
        y: Uid,
    },
}

impl Pointwise {
    pub(crate) fn inputs(&self) -> Vec<Uid> {
        match *self {
            Pointwise::Unary { x, .. } => vec![x],
            Pointwise::Binary { x, z, .. } => vec![x, z],
            Pointwise::Scale { x, factor: HostScalar::Bound(uid), .. } => vec![x, uid],
            Pointwise::Scale { x, factor: HostScalar::Fixed(_), .. } => vec![x],
        }
    }

    pub(crate) fn output(&self) -> Uid {
        match *self {
            Pointwise::Unary { y, .. } | Pointwise::Binary { y, .. } | Pointwise::Scale { y, .. } => y,
        }
    }

    /// The dims of `y`, from the inputs `x` and, for a binary function, `z`.
    ///
    /// # Errors
    /// Dims that do not broadcast.
    pub fn infer(op: &str, x: &TensorDesc, z: Option<&TensorDesc>) -> Result<Vec<u64>, Error> {
        match z {
            None => Ok(x.layout.dims().to_vec()),
            Some(z) => super::matmul::broadcast_dims(op, z, x.layout.dims(), z.layout.dims()),
        }
    }
}
