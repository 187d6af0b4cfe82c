//! Functions of one, two or three tensors, element by element.
//!
//! `y[i] = f(x[i])`, `y[i] = f(x[i], z[i])`, `y[i] = f(x[i], z[i], t[i])` or `y[i] = factor · x[i]`. Inputs broadcast to their common
//! dims from the right. Bias and residual addition are [`BinaryOp::Add`] with a `z` that is broadcast or full.
//!
//! **Types.** Inputs and results are of any stored type (truth values are 0 and 1 in any of them, `u8` by custom; there are no `bool`
//! tensors). Arithmetic is in f32, in f64 if an input is f64 ([`Pointwise::compute_dtype`]): an integer beyond 2²⁴ is rounded to f32
//! when it is read. The result is rounded once, to the type of `y`: to nearest even; saturating in integers and fp8.
//!
//! **NaN and edges.** NaN in gives NaN out, where the function's own text does not say otherwise. Comparisons with NaN are false (but
//! `Ne`); as a truth value NaN is true, as every value other than 0 is. Limits are those of the formula in IEEE arithmetic: where a
//! formula gives `∞ · 0`, the result is NaN.
//!
//! **Derivatives.** [`BinaryOp::Backward`] gives `dx = dy · f′(x)` for each activation. At a kink of `f` the derivative is the one of the
//! side that the forward formula takes there: ReLU has `f′(0) = 0`, a clamp has 0 at and beyond both bounds. Where `f` is constant (ReLU, a clamp, the hard
//! sigmoid and its swish, a clipped ReLU above) `dx` is 0 and no product: an infinite or NaN `dy` is masked, as that of `√(max(x, 0))` is below 0. Likewise
//! what a maximum, a minimum or a select did not take gets 0. A slope that is an attribute or a tensor, and `f′` of a curve that is 0 by rounding, are factors.

pub(super) mod gradient;
pub(super) mod random;

pub use random::{Drawn, RandomState};

use serde::{Deserialize, Serialize};
use verdigris_tensor::DType;

use crate::error::Error;
use crate::gradient::Backward;
use crate::graph::Graph;
use crate::op::{HostScalar, Operation, Real, Role};
use crate::spec::{AttributeSpec, Form, Method, OpSpec, OperandSpec};
use crate::tensor::{TensorDesc, Uid};
use crate::validate::{axis, data, factor, same_dims};

/// A function of one value. NaN gives NaN, but for `Not`, `IsFinite` and `IsNan`.
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
    /// `slope · (x − lower) + lower` if `x ≤ lower`, else `min(x, upper)`: cuDNN's ReLU with all its attributes.
    ClippedRelu {
        /// Where the lower part begins.
        lower: Real,
        /// The greatest result; not below `lower`.
        upper: Real,
        /// The slope of the lower part.
        slope: Real,
    },
    /// `x` if `x > 0`, else `alpha · (e^x − 1)`.
    Elu {
        /// The limit at −∞ is `−alpha`.
        alpha: Real,
    },
    /// `ln(1 + e^(beta · x)) / beta`.
    Softplus {
        /// How sharp the bend is; above 0.
        beta: Real,
    },
    /// `x · sigmoid(beta · x)`.
    Swish {
        /// 1 gives SiLU.
        beta: Real,
    },
    /// `x · min(max(x + 3, 0), 6) / 6`.
    HardSwish,
    /// `min(max(x + 3, 0), 6) / 6`.
    HardSigmoid,
    /// `x · tanh(ln(1 + e^x))`.
    Mish,
    /// `e^x`.
    Exp,
    /// The natural logarithm. 0 gives −∞, what is below gives NaN.
    Log,
    /// `√x`. Below 0: NaN; −0 gives −0.
    Sqrt,
    /// `1 / √x`. 0 gives ∞, −0 gives −∞, what is below gives NaN.
    Rsqrt,
    /// `1 / x`. ±0 gives ±∞.
    Reciprocal,
    /// The error function.
    Erf,
    /// Of an angle in radians; ±∞ gives NaN.
    Sin,
    /// Of an angle in radians; ±∞ gives NaN.
    Cos,
    /// Of an angle in radians; ±∞ gives NaN.
    Tan,
    /// The least integer not below `x`.
    Ceil,
    /// The greatest integer not above `x`.
    Floor,
    /// The nearest integer, the even one of two.
    Round,
    /// −1, 0 or 1. ±0 gives 0.
    Sign,
    /// 1 if `x = 0`, else 0; NaN gives 0.
    Not,
    /// 1, or 0 if `x` is ±∞ or NaN.
    IsFinite,
    /// 1 if `x` is NaN, else 0.
    IsNan,
    /// `scale · x + shift`, as one fused multiply-add.
    Affine {
        /// The factor.
        scale: Real,
        /// What is added.
        shift: Real,
    },
}

impl UnaryOp {
    /// Whether this is an activation: whether [`BinaryOp::Backward`] takes it.
    pub const fn is_activation(self) -> bool {
        matches!(
            self,
            UnaryOp::Relu
                | UnaryOp::LeakyRelu { .. }
                | UnaryOp::ClippedRelu { .. }
                | UnaryOp::Clamp { .. }
                | UnaryOp::GeluErf
                | UnaryOp::GeluTanh
                | UnaryOp::Silu
                | UnaryOp::Swish { .. }
                | UnaryOp::Sigmoid
                | UnaryOp::Tanh
                | UnaryOp::Elu { .. }
                | UnaryOp::Softplus { .. }
                | UnaryOp::HardSwish
                | UnaryOp::HardSigmoid
                | UnaryOp::Mish
        )
    }

    /// Whether epilogues and prologues take this function: all but those that are hundreds of instructions for each element, which a tile of results
    /// would hold once for each element of a thread. These are a map of their own.
    pub const fn in_epilogue(self) -> bool {
        !matches!(self, UnaryOp::Sin | UnaryOp::Cos | UnaryOp::Tan)
    }

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
            UnaryOp::ClippedRelu { .. } => "clipped_relu",
            UnaryOp::Elu { .. } => "elu",
            UnaryOp::Softplus { .. } => "softplus",
            UnaryOp::Swish { .. } => "swish",
            UnaryOp::HardSwish => "hard_swish",
            UnaryOp::HardSigmoid => "hard_sigmoid",
            UnaryOp::Mish => "mish",
            UnaryOp::Exp => "exp",
            UnaryOp::Log => "log",
            UnaryOp::Sqrt => "sqrt",
            UnaryOp::Rsqrt => "rsqrt",
            UnaryOp::Reciprocal => "reciprocal",
            UnaryOp::Erf => "erf",
            UnaryOp::Sin => "sin",
            UnaryOp::Cos => "cos",
            UnaryOp::Tan => "tan",
            UnaryOp::Ceil => "ceil",
            UnaryOp::Floor => "floor",
            UnaryOp::Round => "round",
            UnaryOp::Sign => "sign",
            UnaryOp::Not => "not",
            UnaryOp::IsFinite => "is_finite",
            UnaryOp::IsNan => "is_nan",
            UnaryOp::Affine { .. } => "affine",
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
            UnaryOp::ClippedRelu { lower, .. } if !lower.0.is_finite() => error("lower", lower.0, "a clipping bound is finite"),
            UnaryOp::ClippedRelu { upper, .. } if !upper.0.is_finite() => error("upper", upper.0, "a clipping bound is finite"),
            UnaryOp::ClippedRelu { slope, .. } if !slope.0.is_finite() => error("slope", slope.0, "a slope is finite"),
            UnaryOp::ClippedRelu { lower, upper, .. } if upper.0 < lower.0 => {
                error("upper", upper.0, "the upper clipping bound is not below the lower one")
            }
            UnaryOp::Elu { alpha } if !alpha.0.is_finite() => error("alpha", alpha.0, "an attribute is finite"),
            UnaryOp::Softplus { beta } if !(beta.0.is_finite() && beta.0 > 0.0) => {
                error("beta", beta.0, "the beta of softplus is finite and above 0")
            }
            UnaryOp::Swish { beta } if !beta.0.is_finite() => error("beta", beta.0, "an attribute is finite"),
            UnaryOp::Affine { scale, .. } if !scale.0.is_finite() => error("scale", scale.0, "an attribute is finite"),
            UnaryOp::Affine { shift, .. } if !shift.0.is_finite() => error("shift", shift.0, "an attribute is finite"),
            _ => Ok(()),
        }
    }
}

/// A function of two values. NaN in either gives NaN, in `Max` and `Min` too; the comparisons, `And`, `Or` and `Pow` say otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
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
    /// `x / z`, as IEEE has it: `x / 0` is ±∞, `0 / 0` is NaN.
    Div,
    /// The remainder of the truncated quotient, exact: the sign of `x`. By 0, or of ±∞: NaN; a finite `x` by ±∞ is `x`. C's `fmod`.
    Mod,
    /// The remainder of the floored quotient: the sign of `z`. With `m = Mod(x, z)` it is `m + z` where `m ≠ 0` and the signs of `m` and
    /// `z` differ, else `m`. Python's `%`.
    FloorMod,
    /// `x^z`, as C's `pow`: `pow(x, 0) = 1` and `pow(1, z) = 1` for NaN too; a negative `x` to a fractional power is NaN.
    Pow,
    /// The angle of the point (z, x), in radians from −π to π: C's `atan2(x, z)`.
    Atan2,
    /// `x + z²`.
    AddSquare,
    /// `x` if `x > 0`, else `z · x`: a leaky ReLU whose slope is a tensor.
    Prelu,
    /// 1 if `x = z`, else 0. NaN equals nothing.
    Eq,
    /// 1 if `x ≠ z`, else 0. NaN differs from everything.
    Ne,
    /// 1 if `x > z`, else 0.
    Gt,
    /// 1 if `x ≥ z`, else 0.
    Ge,
    /// 1 if `x < z`, else 0.
    Lt,
    /// 1 if `x ≤ z`, else 0.
    Le,
    /// 1 if neither is 0, else 0.
    And,
    /// 1 if one is not 0, else 0.
    Or,
    /// `x · f′(z)` for an activation `f` with its attributes, 0 where `f` is constant: `x` is dy, `z` is the forward input.
    Backward(UnaryOp),
}

impl BinaryOp {
    /// Every one but [`BinaryOp::Backward`], of which there is one for each activation.
    pub const ALL: [BinaryOp; 20] = [
        BinaryOp::Add,
        BinaryOp::Sub,
        BinaryOp::Mul,
        BinaryOp::Max,
        BinaryOp::Min,
        BinaryOp::Div,
        BinaryOp::Mod,
        BinaryOp::FloorMod,
        BinaryOp::Pow,
        BinaryOp::Atan2,
        BinaryOp::AddSquare,
        BinaryOp::Prelu,
        BinaryOp::Eq,
        BinaryOp::Ne,
        BinaryOp::Gt,
        BinaryOp::Ge,
        BinaryOp::Lt,
        BinaryOp::Le,
        BinaryOp::And,
        BinaryOp::Or,
    ];

    /// Whether the operands may be swapped.
    pub const fn is_commutative(self) -> bool {
        matches!(
            self,
            BinaryOp::Add | BinaryOp::Mul | BinaryOp::Max | BinaryOp::Min | BinaryOp::Eq | BinaryOp::Ne | BinaryOp::And | BinaryOp::Or
        )
    }

    /// Whether epilogues and prologues take this function, as [`UnaryOp::in_epilogue`] has it.
    pub const fn in_epilogue(self) -> bool {
        !matches!(self, BinaryOp::Mod | BinaryOp::FloorMod | BinaryOp::Pow | BinaryOp::Atan2)
    }

    /// The name used in serialized form.
    pub const fn name(self) -> &'static str {
        match self {
            BinaryOp::Add => "add",
            BinaryOp::Sub => "sub",
            BinaryOp::Mul => "mul",
            BinaryOp::Max => "max",
            BinaryOp::Min => "min",
            BinaryOp::Div => "div",
            BinaryOp::Mod => "mod",
            BinaryOp::FloorMod => "floor_mod",
            BinaryOp::Pow => "pow",
            BinaryOp::Atan2 => "atan2",
            BinaryOp::AddSquare => "add_square",
            BinaryOp::Prelu => "prelu",
            BinaryOp::Eq => "eq",
            BinaryOp::Ne => "ne",
            BinaryOp::Gt => "gt",
            BinaryOp::Ge => "ge",
            BinaryOp::Lt => "lt",
            BinaryOp::Le => "le",
            BinaryOp::And => "and",
            BinaryOp::Or => "or",
            BinaryOp::Backward(_) => "backward",
        }
    }

    /// Checks the attributes.
    ///
    /// # Errors
    /// [`BinaryOp::Backward`] of what is no activation, or of one whose attributes are out of range.
    pub fn check(self, op: &str) -> Result<(), Error> {
        match self {
            BinaryOp::Backward(f) if !f.is_activation() => Err(Error::Attribute {
                op: op.to_owned(),
                attribute: "backward",
                value: f.name().to_owned(),
                rule: "activations have a backward; compose the others from their formulas",
            }),
            BinaryOp::Backward(f) => f.check(op),
            _ => Ok(()),
        }
    }
}

/// A function of three values.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TernaryOp {
    /// `x` if `t ≠ 0` (NaN included), else `z`. A NaN in the one not chosen plays no part.
    Select,
    /// `x` if `z > 0`, else `t · x`: the gradient of [`BinaryOp::Prelu`], `x` being dy, `z` the forward input, `t` the slope. The slope's
    /// own gradient is the sum of `dy · min(z, 0)`.
    PreluBackward,
}

impl TernaryOp {
    /// Every one.
    pub const ALL: [TernaryOp; 2] = [TernaryOp::Select, TernaryOp::PreluBackward];

    /// The name used in serialized form.
    pub const fn name(self) -> &'static str {
        match self {
            TernaryOp::Select => "select",
            TernaryOp::PreluBackward => "prelu_backward",
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
    /// `y = f(x, z, t)`.
    Ternary {
        /// The function.
        f: TernaryOp,
        /// Read, first.
        x: Uid,
        /// Read, second.
        z: Uid,
        /// Read, third.
        t: Uid,
        /// Written; the common broadcast dims of `x`, `z` and `t`.
        y: Uid,
    },
    /// `y[i₀, …, iᵣ₋₁] = i_axis`: each element is its own coordinate. Reads nothing; the exact integer is rounded to the type of `y`.
    GenIndex {
        /// Which coordinate.
        axis: u32,
        /// Written.
        y: Uid,
    },
    /// Random numbers by Philox4x32-10. The value at an index depends on the state and on the index alone; the head of `ops/pointwise/random.rs` has the
    /// counter scheme and the distributions.
    Random {
        /// How the numbers are distributed; uniform where it is not said.
        #[serde(default)]
        distribution: Drawn,
        /// Read: seed and offset as four i32, low halves first; bound by whoever executes. With an `offset`, a host scalar of i64: the seed.
        state: Uid,
        /// A host scalar of i64, where the state is given by value.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        offset: Option<Uid>,
        /// Written.
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
    /// The tensors read element by element: the inputs but for a host scalar and a random state.
    pub fn operands(&self) -> Vec<Uid> {
        match *self {
            Pointwise::Unary { x, .. } | Pointwise::Scale { x, .. } => vec![x],
            Pointwise::Binary { x, z, .. } => vec![x, z],
            Pointwise::Ternary { x, z, t, .. } => vec![x, z, t],
            Pointwise::GenIndex { .. } | Pointwise::Random { .. } => Vec::new(),
        }
    }

    /// The tensor written.
    pub fn output(&self) -> Uid {
        match *self {
            Pointwise::Unary { y, .. }
            | Pointwise::Binary { y, .. }
            | Pointwise::Ternary { y, .. }
            | Pointwise::GenIndex { y, .. }
            | Pointwise::Random { y, .. }
            | Pointwise::Scale { y, .. } => y,
        }
    }

    /// The type in which operands of these types are computed with: f64 if one is f64, else f32.
    pub fn compute_dtype(operands: impl IntoIterator<Item = DType>) -> DType {
        if operands.into_iter().any(|dtype| dtype == DType::F64) { DType::F64 } else { DType::F32 }
    }

    /// The dims of `y`, from one or more operands: their common broadcast dims.
    ///
    /// # Errors
    /// Dims that do not broadcast.
    pub fn infer(op: &str, operands: &[&TensorDesc]) -> Result<Vec<u64>, Error> {
        let mut dims = Vec::new();
        for operand in operands {
            dims = super::matmul::broadcast_dims(op, operand, &dims, operand.layout.dims())?;
        }
        Ok(dims)
    }
}

impl Operation for Pointwise {
    const SPEC: OpSpec = OpSpec {
        name: "pointwise",
        summary: "A function of up to three tensors, element by element. The functions and their formulas stand in `ops/pointwise.rs`. Of integers it is computed in f32, or in f64 beside an operand of it: exact up to 2^24.",
        forms: &[
            Form {
                name: "unary",
                formula: "y = f(x)",
                operands: &[OperandSpec::read("x", "any stored type"), OperandSpec::written("y", "any stored type")],
                attributes: &[AttributeSpec::new(
                    "f",
                    "a name of `UnaryOp`, or `{name: {attribute: number}}`",
                    "attributes are finite and in order",
                    r#""cube""#,
                )],
                shape: "those of `x`",
                gradient: "`dy · f′(x)`; nothing through ceil, floor, round, sign, not, is_finite, is_nan",
                methods: &[Method::new("unary", r#"f: str, x: Uid, *, name: str = "unary", **attributes: float"#)],
            },
            Form {
                name: "binary",
                formula: "y = f(x, z)",
                operands: &[
                    OperandSpec::read("x", "any stored type"),
                    OperandSpec::read("z", "any stored type"),
                    OperandSpec::written("y", "any stored type"),
                ],
                attributes: &[AttributeSpec::new(
                    "f",
                    "a name of `BinaryOp`, or `{backward: activation}`",
                    "only activations have a `backward`",
                    r#"{"backward":"exp"}"#,
                )],
                shape: "the common dims, broadcast from the right",
                gradient: "`dy · ∂f/∂x` and `dy · ∂f/∂z`, summed where an operand was repeated; nothing through comparisons and logic; of `backward` with respect to `dy`, and to `x` for activations of straight parts",
                methods: &[
                    Method::new("binary", r#"f: str, x: Uid, z: Uid, *, name: str = "binary""#),
                    Method::new("activation_backward", r#"f: str, dy: Uid, x: Uid, *, name: str = "backward", **attributes: float"#),
                ],
            },
            Form {
                name: "ternary",
                formula: "y = f(x, z, t)",
                operands: &[
                    OperandSpec::read("x", "any stored type"),
                    OperandSpec::read("z", "any stored type"),
                    OperandSpec::read("t", "any stored type"),
                    OperandSpec::written("y", "any stored type"),
                ],
                attributes: &[AttributeSpec::new("f", "`select prelu_backward`", "", r#""mux""#)],
                shape: "the common dims, broadcast from the right",
                gradient: "of `select`, to the one chosen; of `prelu_backward`, to `x` and `t`",
                methods: &[Method::new("ternary", r#"f: str, x: Uid, z: Uid, t: Uid, *, name: str = "ternary""#)],
            },
            Form {
                name: "gen_index",
                formula: "y[i₀, …] = i_axis",
                operands: &[OperandSpec::written("y", "any stored type")],
                attributes: &[AttributeSpec::new("axis", "number", "below the number of dims", r#"7"#)],
                shape: "those of `y`, which the caller gives",
                gradient: "none: it reads nothing",
                methods: &[Method::new("gen_index", r#"dims: Sequence[int], axis: int, *, name: str = "index""#)],
            },
            Form {
                name: "random",
                formula: "uniform: y[i] = ⌊w / 2⁸⌋ / 2²⁴, with w the word `n mod 4` of Philox4x32-10 at counter `offset + n / 4` under key `seed`, n the row-major number of i; \
                          normal: y[i] = √(−2 ln u) · cos 2πv, of odd n sin, with u = w / 2³² + 2⁻³³ of the even word and v = ⌊w / 2⁸⌋ / 2²⁴ of the odd word of n's pair",
                operands: &[
                    OperandSpec::read(
                        "state",
                        "i32, four: seed low, seed high, offset low, offset high; written by no op; with an `offset` a host scalar of i64, the seed",
                    ),
                    OperandSpec::read("offset", "a host scalar of i64").optional(),
                    OperandSpec::written("y", "any stored type"),
                ],
                attributes: &[AttributeSpec::new("distribution", "`uniform normal`", "", r#""cauchy""#).or("\"uniform\"")],
                shape: "those of `y`, which the caller gives",
                gradient: "none: it reads no numbers",
                methods: &[
                    Method::new("random_uniform", r#"dims: Sequence[int], state: Uid, *, offset: Uid | None = None, name: str = "random""#),
                    Method::new("random_normal", r#"dims: Sequence[int], state: Uid, *, offset: Uid | None = None, name: str = "normal""#),
                    Method::new(
                        "bernoulli",
                        r#"dims: Sequence[int], state: Uid, p: float, *, offset: Uid | None = None, name: str = "bernoulli""#,
                    ),
                    Method::new("dropout", r#"x: Uid, state: Uid, p: float, *, offset: Uid | None = None, name: str = "dropout""#),
                ],
            },
            Form {
                name: "scale",
                formula: "y = factor · x",
                operands: &[OperandSpec::read("x", "any stored type"), OperandSpec::written("y", "any stored type")],
                attributes: &[AttributeSpec::new(
                    "factor",
                    "`{fixed: number}` or `{bound: uid}` of a host scalar",
                    "finite",
                    r#"{"bound":0}"#,
                )],
                shape: "those of `x`",
                gradient: "`factor · dy`",
                methods: &[Method::new("scale", r#"x: Uid, factor: float | Uid, *, name: str = "scale""#)],
            },
        ],
    };

    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        let (inputs, y): (Vec<&mut Uid>, &mut Uid) = match self {
            Pointwise::Unary { x, y, .. } | Pointwise::Scale { x, factor: HostScalar::Fixed(_), y } => (vec![x], y),
            Pointwise::Binary { x, z, y, .. } => (vec![x, z], y),
            Pointwise::Ternary { x, z, t, y, .. } => (vec![x, z, t], y),
            Pointwise::GenIndex { y, .. } => (vec![], y),
            Pointwise::Random { state, offset, y, .. } => ([state].into_iter().chain(offset).collect(), y),
            Pointwise::Scale { x, factor: HostScalar::Bound(uid), y } => (vec![x, uid], y),
        };
        inputs.into_iter().for_each(|uid| visit(Role::Input, uid));
        visit(Role::Output, y);
    }

    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        self.pass_back(at)
    }

    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        let y = data(graph, op, self.output())?;
        match *self {
            Pointwise::Unary { f, .. } => f.check(op)?,
            Pointwise::Binary { f, .. } => f.check(op)?,
            Pointwise::Ternary { .. } => {}
            Pointwise::Scale { factor: value, .. } => factor(graph, op, "factor", value)?,
            Pointwise::GenIndex { axis: which, .. } => return axis(op, y, which).map(drop),
            Pointwise::Random { state, offset, .. } => return random::check(op, graph, RandomState { state, offset }),
        }
        let operands = self.operands().into_iter().map(|uid| data(graph, op, uid)).collect::<Result<Vec<_>, Error>>()?;
        let dims = Pointwise::infer(op, &operands)?;
        same_dims(op, y, &dims, "a pointwise result has the common dims of its inputs")
    }
}
