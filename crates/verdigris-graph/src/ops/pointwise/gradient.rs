//! The rule of differentiation of each function.

use super::{BinaryOp, Pointwise, TernaryOp, UnaryOp};
use crate::error::Error;
use crate::gradient::Backward;
use crate::op::Real;
use crate::tensor::Uid;

impl Pointwise {
    /// `dx = dy · ∂f / ∂x` for each operand.
    pub(super) fn pass_back(&self, at: &mut Backward<'_>) -> Result<(), Error> {
        let Some(u) = at.of(self.output()) else { return Ok(()) };
        match *self {
            Pointwise::Unary { f, x, y } if at.wants(x) => match unary(at, f, x, y, u)? {
                Some(dx) => at.give(x, dx),
                None => Ok(()),
            },
            Pointwise::Scale { x, factor, .. } if at.wants(x) => {
                let dx = at.graph.scale(&at.name, u, factor)?;
                at.give(x, dx)
            }
            Pointwise::Binary { f, x, z, y } => binary(at, f, [x, z], y, u),
            Pointwise::Ternary { f, x, z, t, .. } => ternary(at, f, [x, z, t], u),
            Pointwise::Unary { .. } | Pointwise::Scale { .. } | Pointwise::GenIndex { .. } | Pointwise::Random { .. } => Ok(()),
        }
    }
}

/// `u · f′(x)`; `None` for a function that is constant wherever it has a derivative.
fn unary(at: &mut Backward<'_>, f: UnaryOp, x: Uid, y: Uid, u: Uid) -> Result<Option<Uid>, Error> {
    // The result as the arithmetic had it, where what is stored is rounded further.
    let result = |at: &mut Backward<'_>| if at.is_exact(y, x)? { Ok(y) } else { at.unary(f, x) };
    let slope = match f {
        UnaryOp::Identity => return Ok(Some(u)),
        UnaryOp::Neg => return at.unary(UnaryOp::Neg, u).map(Some),
        UnaryOp::Affine { scale, .. } => return at.scale(u, scale.0).map(Some),
        f if f.is_activation() => {
            // What is positive before is positive after, so that a result that is stored serves in the place of an argument that is not, unless its
            // type has small numbers of the argument as 0.
            let keeps_sign = matches!(f, UnaryOp::Relu) || matches!(f, UnaryOp::LeakyRelu { slope } if slope.0 > 0.0);
            let serves = keeps_sign && at.tensor(x)?.is_virtual && !at.tensor(y)?.is_virtual && at.keeps_sign(y, x)?;
            let argument = if serves { y } else { x };
            return at.binary(BinaryOp::Backward(f), u, argument).map(Some);
        }
        UnaryOp::Log => return at.binary(BinaryOp::Div, u, x).map(Some),
        UnaryOp::Sqrt => {
            let y = result(at)?;
            let twice = at.scale(y, 2.0)?;
            return at.binary(BinaryOp::Div, u, twice).map(Some);
        }
        UnaryOp::Abs => at.unary(UnaryOp::Sign, x)?,
        UnaryOp::Exp => result(at)?,
        UnaryOp::Rsqrt => {
            let y = result(at)?;
            let square = at.mul(y, y)?;
            let cube = at.mul(square, y)?;
            at.scale(cube, -0.5)?
        }
        UnaryOp::Reciprocal => {
            let y = result(at)?;
            let square = at.mul(y, y)?;
            at.unary(UnaryOp::Neg, square)?
        }
        UnaryOp::Erf => {
            let square = at.mul(x, x)?;
            let exponent = at.unary(UnaryOp::Neg, square)?;
            let bell = at.unary(UnaryOp::Exp, exponent)?;
            at.scale(bell, std::f64::consts::FRAC_2_SQRT_PI)?
        }
        UnaryOp::Sin => at.unary(UnaryOp::Cos, x)?,
        UnaryOp::Cos => {
            let sin = at.unary(UnaryOp::Sin, x)?;
            at.unary(UnaryOp::Neg, sin)?
        }
        UnaryOp::Tan => {
            let y = result(at)?;
            let square = at.mul(y, y)?;
            at.unary(UnaryOp::Affine { scale: Real(1.0), shift: Real(1.0) }, square)?
        }
        // Ceil, floor, round, sign, not, is_finite, is_nan; the activations are above.
        _ => return Ok(None),
    };
    at.mul(u, slope).map(Some)
}

/// `u` where the mask is above 0, and 0 elsewhere whatever `u` is: no product with a truth value, which an infinite `u` makes NaN. NaN of a mask stays.
pub(in crate::ops) fn masked(at: &mut Backward<'_>, u: Uid, mask: Uid) -> Result<Uid, Error> {
    at.binary(BinaryOp::Backward(UnaryOp::Relu), u, mask)
}

fn binary(at: &mut Backward<'_>, f: BinaryOp, [x, z]: [Uid; 2], y: Uid, u: Uid) -> Result<(), Error> {
    let (dx, dz) = (at.wants(x), at.wants(z));
    // The result as the arithmetic had it, where what is stored is rounded further.
    let result = |at: &mut Backward<'_>| if at.is_exact(y, x)? && at.is_exact(y, z)? { Ok(y) } else { at.binary(f, x, z) };
    match f {
        BinaryOp::Add => {
            at.give(x, u)?;
            at.give(z, u)?;
        }
        BinaryOp::Sub => {
            at.give(x, u)?;
            if dz {
                let given = at.unary(UnaryOp::Neg, u)?;
                at.give(z, given)?;
            }
        }
        BinaryOp::Mul => {
            for (of, other) in [(x, z), (z, x)] {
                if at.wants(of) {
                    let given = at.mul(u, other)?;
                    at.give(of, given)?;
                }
            }
        }
        BinaryOp::Max | BinaryOp::Min => {
            // Of two equal ones each gets half.
            let (of_x, of_z) = if f == BinaryOp::Max { (BinaryOp::Ge, BinaryOp::Le) } else { (BinaryOp::Le, BinaryOp::Ge) };
            for (of, is_it) in [(x, of_x), (z, of_z)] {
                if at.wants(of) {
                    let is_it = at.binary(is_it, x, z)?;
                    let is_equal = at.binary(BinaryOp::Eq, x, z)?;
                    let share = at.unary(UnaryOp::Affine { scale: Real(-0.5), shift: Real(1.0) }, is_equal)?;
                    let part = at.mul(u, share)?;
                    let given = masked(at, part, is_it)?;
                    at.give(of, given)?;
                }
            }
        }
        BinaryOp::Div => {
            let part = at.binary(BinaryOp::Div, u, z)?;
            at.give(x, part)?;
            if dz {
                let quotient = result(at)?;
                let product = at.mul(part, quotient)?;
                let given = at.unary(UnaryOp::Neg, product)?;
                at.give(z, given)?;
            }
        }
        BinaryOp::Mod | BinaryOp::FloorMod => {
            at.give(x, u)?;
            if dz {
                // The result is x − k · z, with k the whole number of times that z is taken away.
                let rest = result(at)?;
                let taken = at.binary(BinaryOp::Sub, x, rest)?;
                let quotient = at.binary(BinaryOp::Div, taken, z)?;
                let times = at.unary(UnaryOp::Round, quotient)?;
                let product = at.mul(u, times)?;
                let given = at.unary(UnaryOp::Neg, product)?;
                at.give(z, given)?;
            }
        }
        BinaryOp::Pow => {
            if dx {
                let less = at.unary(UnaryOp::Affine { scale: Real(1.0), shift: Real(-1.0) }, z)?;
                let power = at.binary(BinaryOp::Pow, x, less)?;
                let slope = at.mul(z, power)?;
                let given = at.mul(u, slope)?;
                at.give(x, given)?;
            }
            if dz {
                let (power, log) = (result(at)?, at.unary(UnaryOp::Log, x)?);
                let slope = at.mul(power, log)?;
                let given = at.mul(u, slope)?;
                at.give(z, given)?;
            }
        }
        BinaryOp::Atan2 => {
            let square = at.mul(x, x)?;
            let radius = at.binary(BinaryOp::AddSquare, square, z)?;
            let part = at.binary(BinaryOp::Div, u, radius)?;
            if dx {
                let given = at.mul(part, z)?;
                at.give(x, given)?;
            }
            if dz {
                let product = at.mul(part, x)?;
                let given = at.unary(UnaryOp::Neg, product)?;
                at.give(z, given)?;
            }
        }
        BinaryOp::AddSquare => {
            at.give(x, u)?;
            if dz {
                let product = at.mul(u, z)?;
                let given = at.scale(product, 2.0)?;
                at.give(z, given)?;
            }
        }
        BinaryOp::Prelu => {
            if dx {
                let given = at.graph.ternary(&at.name, TernaryOp::PreluBackward, u, x, z)?;
                at.give(x, given)?;
            }
            if dz {
                let below = at.unary(UnaryOp::Neg, x)?;
                let product = at.mul(u, x)?;
                let given = masked(at, product, below)?;
                at.give(z, given)?;
            }
        }
        BinaryOp::Backward(f) => {
            if dx {
                let given = at.binary(BinaryOp::Backward(f), u, z)?;
                at.give(x, given)?;
            }
            let is_straight = matches!(
                f,
                UnaryOp::Relu | UnaryOp::LeakyRelu { .. } | UnaryOp::ClippedRelu { .. } | UnaryOp::Clamp { .. } | UnaryOp::HardSigmoid
            );
            if dz && !is_straight {
                let rule = "the second derivative of a curved activation is no op; compose the activation from its formula";
                return at.refuse(z, rule);
            }
        }
        // Steps: comparisons and logic.
        BinaryOp::Eq | BinaryOp::Ne | BinaryOp::Gt | BinaryOp::Ge | BinaryOp::Lt | BinaryOp::Le | BinaryOp::And | BinaryOp::Or => {}
    }
    Ok(())
}

fn ternary(at: &mut Backward<'_>, f: TernaryOp, [x, z, t]: [Uid; 3], u: Uid) -> Result<(), Error> {
    match f {
        TernaryOp::Select => {
            let is_second = at.unary(UnaryOp::Not, t)?;
            if at.wants(x) {
                let is_first = at.unary(UnaryOp::Not, is_second)?;
                let given = masked(at, u, is_first)?;
                at.give(x, given)?;
            }
            if at.wants(z) {
                let given = masked(at, u, is_second)?;
                at.give(z, given)?;
            }
        }
        TernaryOp::PreluBackward => {
            if at.wants(x) {
                let given = at.graph.ternary(&at.name, TernaryOp::PreluBackward, u, z, t)?;
                at.give(x, given)?;
            }
            if at.wants(t) {
                let above = at.unary(UnaryOp::Relu, z)?;
                let is_below = at.unary(UnaryOp::Not, above)?;
                let product = at.mul(u, x)?;
                let given = masked(at, product, is_below)?;
                at.give(t, given)?;
            }
        }
    }
    Ok(())
}
