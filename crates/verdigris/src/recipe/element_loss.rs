//! Losses of elements against targets, composed of pointwise ops and a reduction.

use verdigris_graph::{BinaryOp, HostScalar, LossReduction, Real, ReductionOp, TernaryOp, Uid, UnaryOp};

use super::view::{View, in_format, like};
use super::{Drawing, unfit};
use crate::error::Error;

/// The loss of an element x against its target t.
///
/// ```
/// use verdigris::recipe::{ElementLoss, Function, Input, draw};
/// use verdigris::{DType, Layout, LossReduction, Real};
///
/// let x = Input { dtype: DType::F32, layout: Layout::row_major(&[8, 10])?, alignment_bytes: None };
/// let loss = ElementLoss::Huber { delta: Real(1.0) };
/// for (reduction, dims) in [(LossReduction::None, &[8, 10][..]), (LossReduction::Mean, &[])] {
///     let recipe = draw(&Function::ElementLoss(loss, reduction), &[Some(x), Some(x)])?;
///     assert_eq!(recipe.results[0].layout.dims(), dims);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum ElementLoss {
    /// `(x − t)²`.
    Squared,
    /// `|x − t|`.
    Absolute,
    /// `a² / 2` for `a = |x − t|` up to δ, `δ · (a − δ / 2)` beyond.
    Huber {
        /// δ, above 0.
        delta: Real,
    },
    /// `a² / (2 · β)` for `a = |x − t|` up to β, `a − β / 2` beyond; `|x − t|` for β of 0.
    SmoothL1 {
        /// β, at least 0.
        beta: Real,
    },
    /// `(1 − t) · ln(1 + eˣ) + v · t · ln(1 + e^−x)`: binary cross-entropy of a logit, where v is the weight of what is positive, or 1.
    BinaryCrossEntropy,
    /// `−t · l(x) − (1 − t) · l(1 − x)` with `l(p) = max(ln p, −100)`: binary cross-entropy of a probability. Where a probability is 0 nothing goes back through its
    /// logarithm.
    Likelihood,
    /// `ln(1 + e^(−t · x))`.
    SoftMargin,
    /// `t · (ln t − x)`, which is `−t · x` where t is 0; of targets that are logarithms `eᵗ · (t − x)`.
    Divergence {
        /// Whether targets are logarithms.
        log_target: bool,
    },
}

impl Drawing {
    pub(super) fn element_loss(&mut self, loss: ElementLoss, reduction: LossReduction) -> Result<(), Error> {
        let (given, target) = (self.given(0)?, self.given(1)?);
        if target.layout.dims() != given.layout.dims() {
            let what = format!("targets of dims {:?} for an input of dims {:?}", target.layout.dims(), given.layout.dims());
            return Err(unfit(what, "there is a target for each element"));
        }
        let rank = given.layout.rank().max(1);
        let view = if given.layout.rank() == 0 { View::One { rank } } else { View::Same };
        let (x, t) = (self.input_as(0, "x", view)?, self.input_as(1, "target", view)?);
        let mut each = self.loss_of(loss, x, t, view)?;
        if self.given[2].is_some() {
            let weight = self.input_as(2, "weight", view)?;
            each = self.g.binary("weighted", BinaryOp::Mul, each, weight)?;
        }
        if reduction == LossReduction::None {
            return self.store_as(each, "loss", given.dtype, like(&given.layout)?, view);
        }
        let all: Vec<u32> = (0..rank as u32).collect();
        let mut loss = self.g.reduction("sum", ReductionOp::Add, each, &all)?;
        if reduction == LossReduction::Mean {
            loss = match given.layout.elements() {
                // The mean of nothing is 0 / 0.
                0 => self.g.binary("mean", BinaryOp::Div, loss, loss)?,
                count => self.g.scale("mean", loss, HostScalar::Fixed(Real(1.0 / count as f64)))?,
            };
        }
        self.store_as(loss, "loss", given.dtype, in_format(&[], false)?, View::One { rank })
    }

    fn loss_of(&mut self, loss: ElementLoss, x: Uid, t: Uid, view: View) -> Result<Uid, Error> {
        if self.given[3].is_some() && loss != ElementLoss::BinaryCrossEntropy {
            return Err(unfit(format_args!("a weight of positives beside {loss:?}"), "binary cross-entropy alone has it"));
        }
        Ok(match loss {
            ElementLoss::Squared => {
                let d = self.g.binary("difference", BinaryOp::Sub, x, t)?;
                self.g.binary("squared", BinaryOp::Mul, d, d)?
            }
            ElementLoss::Absolute => self.distance(x, t)?,
            ElementLoss::Huber { delta } => {
                if !(delta.0 > 0.0 && delta.0.is_finite()) {
                    return Err(unfit(format_args!("a Huber loss of delta {delta}"), "delta is finite and above 0"));
                }
                self.bent(x, t, delta)?
            }
            ElementLoss::SmoothL1 { beta } if beta.0 == 0.0 => self.distance(x, t)?,
            ElementLoss::SmoothL1 { beta } => {
                if !(beta.0 > 0.0 && beta.0.is_finite()) {
                    return Err(unfit(format_args!("a smooth L1 loss of beta {beta}"), "beta is finite and at least 0"));
                }
                let bent = self.bent(x, t, beta)?;
                self.affine(bent, 1.0 / beta.0, 0.0)?
            }
            ElementLoss::BinaryCrossEntropy => {
                // (1 − t) · s(x) + v · t · s(−x) for s(x) = ln(1 + eˣ): two terms of one sign, so that the small loss of a confident logit is not the difference of two
                // large numbers.
                let below = self.g.unary("below", UnaryOp::Neg, x)?;
                let softplus = UnaryOp::Softplus { beta: Real(1.0) };
                let (of_other, of_chosen) = (self.g.unary("softplus", softplus, x)?, self.g.unary("softplus", softplus, below)?);
                let mut positive = t;
                if self.given[3].is_some() {
                    let v = self.input_as(3, "positive weight", view)?;
                    positive = self.g.binary("positive", BinaryOp::Mul, v, t)?;
                }
                let rest = self.affine(t, -1.0, 1.0)?;
                let other = self.g.binary("other", BinaryOp::Mul, rest, of_other)?;
                let chosen = self.g.binary("chosen", BinaryOp::Mul, positive, of_chosen)?;
                self.g.binary("loss", BinaryOp::Add, other, chosen)?
            }
            ElementLoss::Likelihood => {
                let (of_x, of_other) = (self.logarithm(x)?, self.logarithm_of_other(x)?);
                // Two terms of one sign, as above.
                let rest = self.affine(t, -1.0, 1.0)?;
                let chosen = self.g.binary("chosen", BinaryOp::Mul, t, of_x)?;
                let other = self.g.binary("other", BinaryOp::Mul, rest, of_other)?;
                let both = self.g.binary("both", BinaryOp::Add, chosen, other)?;
                self.g.unary("loss", UnaryOp::Neg, both)?
            }
            ElementLoss::SoftMargin => {
                let margin = self.g.binary("margin", BinaryOp::Mul, x, t)?;
                let below = self.g.unary("margin", UnaryOp::Neg, margin)?;
                self.g.unary("softplus", UnaryOp::Softplus { beta: Real(1.0) }, below)?
            }
            ElementLoss::Divergence { log_target: true } => {
                let p = self.g.unary("target", UnaryOp::Exp, t)?;
                let d = self.g.binary("difference", BinaryOp::Sub, t, x)?;
                self.g.binary("loss", BinaryOp::Mul, p, d)?
            }
            ElementLoss::Divergence { log_target: false } => {
                let log = self.g.unary("log", UnaryOp::Log, t)?;
                let zero = self.affine(t, 0.0, 0.0)?;
                // 0 · ln 0 is 0.
                let log = self.g.ternary("log", TernaryOp::Select, log, zero, t)?;
                let d = self.g.binary("difference", BinaryOp::Sub, log, x)?;
                self.g.binary("loss", BinaryOp::Mul, t, d)?
            }
        })
    }

    /// `max(ln p, −100)`, without a derivative where p is 0.
    fn logarithm(&mut self, p: Uid) -> Result<Uid, Error> {
        let one = self.affine(p, 0.0, 1.0)?;
        let some = self.g.ternary("some", TernaryOp::Select, p, one, p)?;
        let log = self.g.unary("log", UnaryOp::Log, some)?;
        let least = self.affine(one, 0.0, -100.0)?;
        let log = self.g.ternary("log", TernaryOp::Select, log, least, p)?;
        Ok(self.g.unary("least", UnaryOp::Clamp { lower: Real(-100.0), upper: Real(1.0) }, log)?)
    }

    /// `max(ln(1 − p), −100)`, without a derivative where p is 1. What `1 − p` lost by rounding is made good: with `u = 1 − p` it is `ln(u) · p / (1 − u)`, and `−p` where
    /// u is 1 (Kahan; HP-15C Advanced Functions Handbook, 1982).
    fn logarithm_of_other(&mut self, p: Uid) -> Result<Uid, Error> {
        let other = self.affine(p, -1.0, 1.0)?;
        let log = self.logarithm(other)?;
        let one = self.affine(p, 0.0, 1.0)?;
        let lost = self.g.binary("lost", BinaryOp::Sub, one, other)?;
        let divisor = self.g.ternary("divisor", TernaryOp::Select, lost, one, lost)?;
        let ratio = self.g.binary("ratio", BinaryOp::Div, p, divisor)?;
        let log = self.g.binary("log", BinaryOp::Mul, log, ratio)?;
        let below = self.g.unary("below", UnaryOp::Neg, p)?;
        Ok(self.g.ternary("log", TernaryOp::Select, log, below, lost)?)
    }

    fn distance(&mut self, x: Uid, t: Uid) -> Result<Uid, Error> {
        let d = self.g.binary("difference", BinaryOp::Sub, x, t)?;
        Ok(self.g.unary("distance", UnaryOp::Abs, d)?)
    }

    /// `q · (a − q / 2)` with `q = min(a, bend)`: one formula on both sides, whose gradient is `q · sign(x − t)`.
    fn bent(&mut self, x: Uid, t: Uid, bend: Real) -> Result<Uid, Error> {
        let a = self.distance(x, t)?;
        let q = self.g.unary("bent", UnaryOp::Clamp { lower: Real(0.0), upper: bend }, a)?;
        let half = self.affine(q, -0.5, 0.0)?;
        let rest = self.g.binary("rest", BinaryOp::Add, a, half)?;
        Ok(self.g.binary("loss", BinaryOp::Mul, q, rest)?)
    }
}
