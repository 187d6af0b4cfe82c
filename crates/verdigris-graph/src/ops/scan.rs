//! Scans: running sums, products, extrema and log-sum-exps along one axis.
//!
//! With `n` the extent of the axis, and `i` the place along it:
//!
//! ```text
//! inclusive   y[i] = f over x[0 ..= i]          reversed   y[i] = f over x[i .. n]
//! exclusive   y[i] = f over x[0 .. i]           reversed   y[i] = f over x[i + 1 .. n]
//! ```
//!
//! | | formula | of nothing |
//! |---|---|---|
//! | add | `Σ x` | 0 |
//! | mul | `Π x` | 1 |
//! | min, max | the least, the greatest | ∞, −∞ |
//! | log_sum_exp | `ln Σ e^x` | −∞ |
//!
//! Inputs and results are of any stored type, for `log_sum_exp` of floating-point ones; arithmetic is in f32, in f64 if `x` is f64, and each result is
//! rounded once. A NaN is in every result that it belongs to, for `min` and `max` too.
//!
//! **Order.** Each result combines its own elements and no others, so an ∞ or NaN behind it (before it, reversed) does not touch it. The order in
//! which they are combined is the engine's; it follows from the extents and strides alone, so that results repeat bit for bit.

use serde::{Deserialize, Serialize};
use verdigris_tensor::DType;

use crate::error::Error;
use crate::gradient::Backward;
use crate::graph::{Graph, GraphBuilder};
use crate::op::{Op, Operation, Real, Role};
use crate::ops::pointwise::{BinaryOp, UnaryOp};
use crate::spec::{AttributeSpec, Form, Method, OpSpec, OperandSpec};
use crate::tensor::Uid;
use crate::validate::{attribute, axis, data, of_type, same_dims};

/// What is made of the elements so far; the module's head has the formulas.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScanOp {
    /// The sum.
    Add,
    /// The product.
    Mul,
    /// The least.
    Min,
    /// The greatest.
    Max,
    /// The logarithm of the sum of exponentials.
    LogSumExp,
}

impl ScanOp {
    /// Every one.
    pub const ALL: [ScanOp; 5] = [ScanOp::Add, ScanOp::Mul, ScanOp::Min, ScanOp::Max, ScanOp::LogSumExp];

    /// The name used in serialized form.
    pub const fn name(self) -> &'static str {
        match self {
            ScanOp::Add => "add",
            ScanOp::Mul => "mul",
            ScanOp::Min => "min",
            ScanOp::Max => "max",
            ScanOp::LogSumExp => "log_sum_exp",
        }
    }

    /// The function of no elements, which changes nothing that it is combined with.
    pub const fn of_nothing(self) -> f64 {
        match self {
            ScanOp::Add => 0.0,
            ScanOp::Mul => 1.0,
            ScanOp::Min => f64::INFINITY,
            ScanOp::Max | ScanOp::LogSumExp => f64::NEG_INFINITY,
        }
    }
}

/// A scan; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scan {
    /// What is made of the elements so far.
    pub f: ScanOp,
    /// The axis along which the scan goes.
    pub axis: u32,
    /// Whether an element is left out of its own result.
    #[serde(default)]
    pub exclusive: bool,
    /// Whether the scan goes from the last element to the first.
    #[serde(default)]
    pub reverse: bool,
    /// Read.
    pub x: Uid,
    /// Written; the dims of `x`.
    pub y: Uid,
}

impl Operation for Scan {
    const SPEC: OpSpec = OpSpec {
        name: "scan",
        summary: "A running sum, product, extremum or log-sum-exp along an axis. Of integers it is computed in f32, or in f64 beside an operand of it: exact up to 2^24.",
        forms: &[Form {
            name: "",
            formula: "y[i] = f over x[0 ..= i]; exclusive: over x[0 .. i]; reversed: over x[i ..], x[i + 1 ..]",
            operands: &[OperandSpec::read("x", "any stored type; floating-point for `log_sum_exp`"), OperandSpec::written("y", "as `x`")],
            attributes: &[
                AttributeSpec::new("f", "`add mul min max log_sum_exp`", "", "\"median\""),
                AttributeSpec::new("axis", "number", "below the number of dims", "5"),
                AttributeSpec::new("exclusive", "true or false", "", "2").or("false"),
                AttributeSpec::new("reverse", "true or false", "", "2").or("false"),
            ],
            shape: "those of `x`",
            gradient: "a sum: the scan of `dy` the other way; a product, also where factors are 0, and a log-sum-exp: by scans of the \
                       other way; extrema refuse. That of a product divides the running products by `x`: from where one leaves the range of the \
                       arithmetic (of f32 below 1.2e-38 it loses digits, below 7e-46 it is 0, above 3.4e38 infinite), what is behind gives no true \
                       gradient, also where the product of the others is within; f64 reaches from 2.2e-308 to 1.8e308",
            methods: &[Method::new(
                "scan",
                "f: str, x: Uid, axis: int, *, exclusive: bool = False, reverse: bool = False, name: str = \"scan\"",
            )],
        }],
    };

    fn visit(&mut self, visit: &mut dyn FnMut(Role, &mut Uid)) {
        visit(Role::Input, &mut self.x);
        visit(Role::Output, &mut self.y);
    }

    fn check(&self, op: &str, graph: &Graph) -> Result<(), Error> {
        let (x, y) = (data(graph, op, self.x)?, data(graph, op, self.y)?);
        axis(op, x, self.axis)?;
        if self.f == ScanOp::LogSumExp {
            for tensor in [x, y] {
                of_type(op, tensor, DType::is_float, "a log-sum-exp is of floating-point data")?;
            }
        }
        same_dims(op, y, x.layout.dims(), "y has the dims of x")
    }

    /// With `scan'` the scan of the other direction, exclusive if this one is:
    ///
    /// - sum: `dx = scan'_add(dy)`.
    /// - product: before the first zero `dx = scan'_add(dy · y) / x`; at the first zero `dx = scan'_add(dy · w)`, with `w` the products in which that zero
    ///   is 1; behind it 0, since each of the products has the first zero. (First as the scan goes.)
    /// - log-sum-exp: `dx = Σ dy · e^(x − y)` over the results that have the element, its positive and its negative terms as
    ///   `e^(x + scan'_log_sum_exp(ln |dy| − y))` each, so that nothing overflows on the way.
    fn differentiate(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        let (x, Some(dy)) = (self.x, at.of(self.y)) else { return Ok(()) };
        if !at.wants(x) {
            return Ok(());
        }
        let back =
            |at: &mut Backward<'_>, f: ScanOp, values: Uid| at.graph.scan(&at.name, f, values, self.axis, self.exclusive, !self.reverse);
        // The result as the arithmetic had it, where what is stored is rounded further.
        let result = |at: &mut Backward<'_>| {
            if at.is_exact(self.y, x)? {
                return Ok(self.y);
            }
            at.graph.scan(&at.name, self.f, x, self.axis, self.exclusive, self.reverse)
        };
        let dx = match self.f {
            ScanOp::Add => back(at, ScanOp::Add, dy)?,
            ScanOp::Mul => {
                let y = result(at)?;
                let is_zero = at.unary(UnaryOp::Not, x)?;
                let zeros = at.graph.scan(&at.name, ScanOp::Add, is_zero, self.axis, false, self.reverse)?;
                let before = at.unary(UnaryOp::Not, zeros)?;
                let others = at.unary(UnaryOp::Affine { scale: Real(1.0), shift: Real(-1.0) }, zeros)?;
                let is_only = at.unary(UnaryOp::Not, others)?;
                let first = at.mul(is_only, is_zero)?;
                let without = at.binary(BinaryOp::Add, x, first)?;
                let others = at.graph.scan(&at.name, ScanOp::Mul, without, self.axis, self.exclusive, self.reverse)?;
                let terms = at.mul(dy, y)?;
                let sum = back(at, ScanOp::Add, terms)?;
                let divisor = at.binary(BinaryOp::Add, x, is_zero)?;
                let share = at.binary(BinaryOp::Div, sum, divisor)?;
                let share = at.mul(share, before)?;
                let terms = at.mul(dy, others)?;
                let sum = back(at, ScanOp::Add, terms)?;
                let at_first = at.mul(sum, first)?;
                at.binary(BinaryOp::Add, share, at_first)?
            }
            ScanOp::LogSumExp => {
                let y = result(at)?;
                let mut sides = Vec::new();
                let negative = at.unary(UnaryOp::Neg, dy)?;
                for side in [dy, negative] {
                    let side = at.unary(UnaryOp::Relu, side)?;
                    let side = at.unary(UnaryOp::Log, side)?;
                    let terms = at.binary(BinaryOp::Sub, side, y)?;
                    let sum = back(at, ScanOp::LogSumExp, terms)?;
                    let power = at.binary(BinaryOp::Add, x, sum)?;
                    sides.push(at.unary(UnaryOp::Exp, power)?);
                }
                at.binary(BinaryOp::Sub, sides[0], sides[1])?
            }
            ScanOp::Min | ScanOp::Max => {
                let rule = "the gradient of a running extremum goes to the element that it is, which a scan does not say";
                return at.refuse(x, rule);
            }
        };
        at.give(x, dx)
    }
}

impl GraphBuilder {
    /// The scan of `x` along `axis`, as a virtual tensor; `exclusive` leaves each element out of its own result, `reverse` goes from the last element to
    /// the first.
    ///
    /// # Errors
    /// An unknown uid. The axis and the types are checked by [`GraphBuilder::finish`].
    pub fn scan(&mut self, name: &str, f: ScanOp, x: Uid, axis: u32, exclusive: bool, reverse: bool) -> Result<Uid, Error> {
        let (dtype, dims) = self.result_of(name, &[x])?;
        let y = self.virtual_tensor(name, dtype, &dims)?;
        self.push(name, Op::Scan(Scan { f, axis, exclusive, reverse, x, y }));
        Ok(y)
    }

    /// The running extremum of `x` along `axis` and the place of each, as virtual tensors: `y[i]` is the least (greatest) of `x[0 ..= i]`, and the place is
    /// where along the axis the last element stands that is it. A NaN is the extremum from there on, and its place the last NaN so far.
    ///
    /// Two scans and a map between them: a place is the greatest so far of those whose element is the extremum up to itself. Places are counted in f32, along an
    /// axis of more than 2²⁴ elements in f64; no gradient goes through them, and that of `y` is refused.
    ///
    /// ```
    /// use verdigris_graph::{GraphBuilder, ScanOp};
    /// use verdigris_tensor::{DType, Layout};
    ///
    /// let mut g = GraphBuilder::new("running maximum");
    /// let x = g.tensor("x", DType::F32, Layout::row_major(&[4, 9])?);
    /// let (y, place) = g.scan_with_place("cummax", ScanOp::Max, x, 1)?;
    /// g.store(y, "y", DType::F32)?;
    /// g.store(place, "place", DType::I64)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// A scan that is no extremum, an axis that is none, an unknown uid.
    pub fn scan_with_place(&mut self, name: &str, f: ScanOp, x: Uid, axis: u32) -> Result<(Uid, Uid), Error> {
        if !matches!(f, ScanOp::Min | ScanOp::Max) {
            return attribute(name, "f", f.name(), "places are those of `min` and `max`");
        }
        let dims = self.result_of(name, &[x])?.1;
        let Some(&extent) = dims.get(axis as usize) else {
            return attribute(name, "axis", axis, "it is below the number of dims");
        };
        let y = self.scan(name, f, x, axis, false, false)?;
        let is_it = self.binary(name, BinaryOp::Eq, x, y)?;
        let is_nan = self.unary(name, UnaryOp::IsNan, x)?;
        let is_new = self.binary(name, BinaryOp::Or, is_it, is_nan)?;
        let place = self.gen_index(name, &dims, axis)?;
        let counted = if extent > 1 << 24 { DType::F64 } else { DType::F32 };
        self.set_dtype(place, counted)?;
        let last = self.binary(name, BinaryOp::Mul, is_new, place)?;
        let place = self.scan(name, ScanOp::Max, last, axis, false, false)?;
        Ok((y, place))
    }
}
