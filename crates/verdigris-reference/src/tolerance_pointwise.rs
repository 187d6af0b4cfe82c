//! Errors through pointwise functions: what may have come in, and what the function may add.
//!
//! What came in is an interval, and the error passed on is the farthest that the function takes it from the nominal value: at the ends
//! of the interval and wherever the function turns between them ([`pointwise::turns`]). A jump inside the interval (a comparison, `sign`,
//! `floor`, a derivative at its kink, the condition of a select) makes both sides right. A pole, the edge of a domain or an overflow
//! inside it makes the error infinite: such an element is not judged.
//!
//! What is added, in terms of the *unit* u of functions (2⁻²¹; 2⁻¹¹ where what becomes of the result has at most 11 significant bits; 2⁻⁴⁸
//! in f64) and the unit roundoff ε of the type computed in (2⁻²⁴; 2⁻⁵³):
//!
//! | functions | may be off by |
//! |---|---|
//! | those that choose, compare or round to integers; `mod` | 0 |
//! | `+ − ·` and their like | a few ε of the largest term |
//! | `div`, `reciprocal`, `sqrt`, `rsqrt` | u of the result |
//! | `exp` | u · (1 + \|x\|) of the result |
//! | `log`, `softplus`, `atan2` | u, and u of the result |
//! | `pow` | u · (1 + \|z\| · (1 + \|ln x\|)) of the result |
//! | `sigmoid`, `tanh`, `erf`, `elu` (times alpha) | u |
//! | `sin`, `cos` | u · (1 + \|x\|) |
//! | `x · gate(x)` | u of x |
//! | `dy · f′(x)` | u · (1 + \|x\|) of dy where f is no polynomial |

use verdigris_graph::{BinaryOp, TernaryOp, UnaryOp};
use verdigris_tensor::DType;
use verdigris_tensor::num::power_of_two;

use crate::ops::pointwise;
use crate::tolerance::{Bounded, roundoff};

/// How well functions must be computed: the *unit* of the module's head.
pub(crate) fn unit_of(significant_bits: u32, compute: DType) -> f64 {
    match compute {
        DType::F64 => power_of_two(-48),
        _ if significant_bits <= 11 => power_of_two(-11),
        _ => power_of_two(-21),
    }
}

/// Functions of the form `x · gate(x)` whose formula gives NaN at an end where the limit is a number.
fn is_gated(f: UnaryOp) -> bool {
    matches!(f, UnaryOp::GeluErf | UnaryOp::GeluTanh | UnaryOp::Silu | UnaryOp::Swish { .. } | UnaryOp::HardSwish | UnaryOp::Mish)
}

/// Something that is not judged.
const fn anything(value: f64) -> Bounded {
    Bounded { value, error: f64::INFINITY }
}

impl Bounded {
    fn low(self) -> f64 {
        self.value - self.error
    }

    fn high(self) -> f64 {
        self.value + self.error
    }

    fn holds(self, point: f64) -> bool {
        self.low() <= point && point <= self.high()
    }

    /// Whether this may be 0 and may be something else.
    fn is_doubtful(self) -> bool {
        self.error > 0.0 && self.holds(0.0)
    }

    /// `f(v)`, computed in `compute`, where what becomes of it in the end has so many significant bits.
    pub fn unary(self, f: UnaryOp, significant_bits: u32, compute: DType) -> Bounded {
        if self.error == f64::INFINITY {
            return anything(pointwise::unary(f, self.value));
        }
        let value = pointwise::unary(f, self.value);
        if is_gated(f) && self.value.is_infinite() && value.is_nan() {
            // ∞ · 0: the formula gives NaN, the limit is 0. Either is right.
            return anything(0.0);
        }
        let error = through(self, f, value) + own(f, self, value, unit_of(significant_bits, compute), compute);
        Bounded::new(value, error, compute)
    }

    /// `f(v, z)`, or `f(z, v)` if `v_is_right`. Both may carry an error.
    pub fn binary(self, f: BinaryOp, z: Bounded, v_is_right: bool, significant_bits: u32, compute: DType) -> Bounded {
        let (x, z) = if v_is_right { (z, self) } else { (self, z) };
        let value = pointwise::binary(f, x.value, z.value);
        let is_flat = match f {
            BinaryOp::Backward(activation) if z.error < f64::INFINITY => flatness(activation, z, compute),
            _ => Some(false),
        };
        if is_flat == Some(true) {
            // Whatever x is, judged or not.
            return Bounded::exact(value);
        }
        if x.error == f64::INFINITY || z.error == f64::INFINITY {
            return anything(value);
        }
        let (epsilon, unit) = (roundoff(compute), unit_of(significant_bits, compute));
        let sum = |a: f64, b: f64| pass(a, 1.0) + pass(b, 1.0);
        let product = |a: Bounded, b: Bounded| pass(a.error, b.value.abs()) + pass(b.error, a.value.abs() + a.error);
        let flip = |is_close: bool| if is_close && sum(x.error, z.error) > 0.0 { 1.0 } else { 0.0 };
        let error = match f {
            // An infinity or NaN among the operands is not rounded.
            BinaryOp::Add | BinaryOp::Sub if !value.is_finite() => sum(x.error, z.error),
            BinaryOp::Add | BinaryOp::Sub => sum(x.error, z.error) + epsilon * value.abs(),
            BinaryOp::Mul => product(x, z) + epsilon * value.abs() + tiny(value, compute),
            BinaryOp::Max | BinaryOp::Min => x.error.max(z.error),
            BinaryOp::AddSquare => x.error + product(z, z) + epsilon * (value.abs() + z.value * z.value),
            BinaryOp::Div => {
                if z.error > 0.0 && z.holds(0.0) {
                    return anything(value);
                }
                corners(x, z, |x, z| x / z, value) + unit * value.abs() + tiny(value, compute)
            }
            BinaryOp::Mod | BinaryOp::FloorMod => {
                if z.is_doubtful() {
                    // By 0 it is NaN.
                    return anything(value);
                }
                let own = if f == BinaryOp::FloorMod { 2.0 * epsilon * z.value.abs() } else { 0.0 };
                let quotient = |x: f64, z: f64| if f == BinaryOp::Mod { (x / z).trunc() } else { (x / z).floor() };
                let whole = quotient(x.value, z.value);
                let is_settled = [(x.low(), z.low()), (x.low(), z.high()), (x.high(), z.low()), (x.high(), z.high())]
                    .into_iter()
                    .all(|(x, z)| quotient(x, z) == whole);
                if sum(x.error, z.error) == 0.0 {
                    own
                } else if is_settled {
                    x.error + pass(z.error, whole.abs()) + own
                } else {
                    // On the other side of the jump the remainder is anywhere within the divisor.
                    2.0 * z.value.abs() + z.error + x.error
                }
            }
            BinaryOp::Pow => {
                if sum(x.error, z.error) > 0.0 && x.low() <= 0.0 {
                    return anything(value);
                }
                let size = 1.0 + z.value.abs() * (1.0 + x.value.abs().ln().abs());
                let own = if z.value == 0.0 || x.value == 1.0 || value == 0.0 { 0.0 } else { unit * size * value.abs() };
                corners(x, z, f64::powf, value) + own + tiny(value, compute)
            }
            BinaryOp::Atan2 => {
                let is_near_cut = x.error + z.error > 0.0 && x.holds(0.0) && z.low() <= 0.0;
                if is_near_cut {
                    return Bounded::new(value, 2.0 * std::f64::consts::PI, compute);
                }
                corners(x, z, f64::atan2, value) + unit * (1.0 + value.abs()) * f64::from(u8::from(x.value != 0.0 || z.value < 0.0))
            }
            BinaryOp::Prelu => {
                if z.value.is_nan() && x.value > 0.0 {
                    // The formula does not reach the slope, the rule of NaN does.
                    return anything(value);
                }
                let below = product(x, z) + epsilon * (x.value * z.value).abs();
                match (x.low() > 0.0, x.high() <= 0.0) {
                    (true, _) => x.error,
                    (_, true) => below,
                    _ => below.max(x.error) + x.error * (1.0 + z.value.abs() + z.error),
                }
            }
            BinaryOp::Eq | BinaryOp::Ne | BinaryOp::Gt | BinaryOp::Ge | BinaryOp::Lt | BinaryOp::Le => {
                flip((x.value - z.value).abs() <= sum(x.error, z.error))
            }
            BinaryOp::And | BinaryOp::Or => flip(x.is_doubtful() || z.is_doubtful()),
            BinaryOp::Backward(activation) => {
                let slope = slope(activation, z, unit, epsilon, compute);
                let slope = match slope {
                    Some(slope) if !slope.value.is_nan() || z.value.is_nan() => slope,
                    // At ±∞ the formula may give ∞ · 0 where the limit is a number.
                    _ => return anything(value),
                };
                if x.value.is_infinite() && slope.holds(0.0) || !x.value.is_finite() && is_flat.is_none() {
                    return anything(value);
                }
                product(x, slope) + 2.0 * epsilon * value.abs() + tiny(value, compute)
            }
        };
        Bounded::new(value, error, compute)
    }

    /// `f(v, z, t)`.
    pub fn ternary(self, f: TernaryOp, z: Bounded, t: Bounded, compute: DType) -> Bounded {
        let x = self;
        let value = pointwise::ternary(f, x.value, z.value, t.value);
        let either = |a: Bounded, b: Bounded| match (a.value - b.value).abs() {
            apart if apart.is_nan() => anything(value),
            apart => Bounded::new(value, apart + a.error.max(b.error), compute),
        };
        match f {
            TernaryOp::Select if t.error == f64::INFINITY || t.is_doubtful() => either(x, z),
            TernaryOp::Select if t.value != 0.0 => x,
            TernaryOp::Select => z,
            TernaryOp::PreluBackward => {
                if [x, z, t].iter().any(|part| part.error == f64::INFINITY) || (t.value.is_nan() && z.value > 0.0) {
                    return anything(value);
                }
                let below = x.binary(BinaryOp::Mul, t, false, 53, compute);
                match (z.low() > 0.0, z.high() <= 0.0) {
                    (true, _) => Bounded::new(value, x.error, compute),
                    (_, true) => Bounded::new(value, below.error, compute),
                    // NaN: both comparisons fail.
                    _ if z.value.is_nan() => Bounded::new(value, 0.0, compute),
                    _ => either(x, below),
                }
            }
        }
    }
}

/// The error that comes in, carried through `f`.
fn through(v: Bounded, f: UnaryOp, value: f64) -> f64 {
    if v.error == 0.0 {
        return 0.0;
    }
    match f {
        // Too many turns to list.
        UnaryOp::Sin | UnaryOp::Cos => return v.error.min(2.0),
        UnaryOp::Tan => {
            let branch = |x: f64| (x / std::f64::consts::PI + 0.5).floor();
            if branch(v.low()) != branch(v.high()) {
                return f64::INFINITY;
            }
        }
        UnaryOp::Reciprocal | UnaryOp::Rsqrt if v.holds(0.0) => return f64::INFINITY,
        _ => {}
    }
    let turns = pointwise::turns(f).into_iter().filter(|&turn| v.holds(turn)).flat_map(|turn| [turn.next_down(), turn, turn.next_up()]);
    [v.low(), v.high()].into_iter().chain(turns).map(|x| distance(pointwise::unary(f, x), value)).fold(0.0, f64::max)
}

/// How far two values are apart: infinitely if one of them alone is a NaN.
fn distance(a: f64, b: f64) -> f64 {
    if a == b || (a.is_nan() && b.is_nan()) {
        0.0
    } else {
        let apart = (a - b).abs();
        if apart.is_nan() { f64::INFINITY } else { apart }
    }
}

/// The farthest that `f` gets from `value` on the corners of a rectangle: its extremes, where it is monotone in each argument.
fn corners(x: Bounded, z: Bounded, f: impl Fn(f64, f64) -> f64, value: f64) -> f64 {
    if x.error == 0.0 && z.error == 0.0 {
        return 0.0;
    }
    [(x.low(), z.low()), (x.low(), z.high()), (x.high(), z.low()), (x.high(), z.high())]
        .into_iter()
        .map(|(x, z)| distance(f(x, z), value))
        .fold(0.0, f64::max)
}

/// What `f` itself may be off by.
fn own(f: UnaryOp, v: Bounded, value: f64, unit: f64, compute: DType) -> f64 {
    let epsilon = roundoff(compute);
    let x = v.value.abs() + v.error;
    let size = value.abs();
    if !value.is_finite() {
        return 0.0;
    }
    if !v.value.is_finite() {
        // A limit at infinity; where it is not 0, a quotient of what is left may be off by the unit.
        let saturates = matches!(f, UnaryOp::Sigmoid | UnaryOp::Tanh | UnaryOp::Erf | UnaryOp::Elu { .. });
        return if saturates { unit * size } else { 0.0 };
    }
    match f {
        UnaryOp::Identity
        | UnaryOp::Neg
        | UnaryOp::Abs
        | UnaryOp::Relu
        | UnaryOp::Ceil
        | UnaryOp::Floor
        | UnaryOp::Round
        | UnaryOp::Sign
        | UnaryOp::Not
        | UnaryOp::IsFinite
        | UnaryOp::IsNan => 0.0,
        // The bounds are rounded to the type computed in.
        UnaryOp::Clamp { .. } => epsilon * size,
        UnaryOp::LeakyRelu { .. } if v.low() > 0.0 => 0.0,
        UnaryOp::LeakyRelu { .. } => 2.0 * epsilon * size + tiny(value, compute),
        UnaryOp::ClippedRelu { lower, slope, .. } => {
            epsilon * size + 4.0 * epsilon * (slope.0.abs() * (x + lower.0.abs()) + lower.0.abs()) * f64::from(u8::from(v.low() <= lower.0))
        }
        UnaryOp::HardSigmoid => 4.0 * epsilon * size,
        UnaryOp::HardSwish => 4.0 * epsilon * x,
        UnaryOp::Affine { scale, shift } => 2.0 * epsilon * (scale.0.abs() * x + shift.0.abs() + size),
        UnaryOp::GeluErf | UnaryOp::GeluTanh | UnaryOp::Silu | UnaryOp::Mish => unit * x + tiny(value, compute),
        // The factor is rounded before it meets x, and moves the gate.
        UnaryOp::Swish { .. } => 2.0 * unit * x + tiny(value, compute),
        UnaryOp::Sigmoid | UnaryOp::Tanh | UnaryOp::Erf => unit,
        UnaryOp::Elu { .. } if v.low() > 0.0 => 0.0,
        UnaryOp::Elu { alpha } => unit * alpha.0.abs(),
        UnaryOp::Softplus { beta } => unit * (1.0 / beta.0 + size),
        UnaryOp::Exp => unit * (1.0 + x) * size + tiny(value, compute),
        UnaryOp::Log => unit * (1.0 + size),
        UnaryOp::Sqrt | UnaryOp::Rsqrt | UnaryOp::Reciprocal => unit * size + tiny(value, compute),
        UnaryOp::Sin | UnaryOp::Cos => unit * (1.0 + x),
        UnaryOp::Tan => unit * (1.0 + x) * (1.0 + size * size),
    }
}

/// A bound that the type computed in does not hold is rounded there, and moves the jump: by so much.
fn moved(jump: f64, compute: DType) -> f64 {
    if compute != DType::F64 && f64::from(jump as f32) != jump { 2.0 * roundoff(compute) * jump.abs() } else { 0.0 }
}

/// Whether an activation is constant about `z`; `None` where it may be or not.
fn flatness(f: UnaryOp, z: Bounded, compute: DType) -> Option<bool> {
    let is_flat = pointwise::is_flat(f, z.value);
    let is_settled = pointwise::derivative_jumps(f).into_iter().all(|jump| {
        let reach = z.error + moved(jump, compute);
        let is_near = reach > 0.0 && (z.value - jump).abs() <= reach;
        !is_near || [jump.next_down(), jump, jump.next_up()].into_iter().all(|side| pointwise::is_flat(f, side) == is_flat)
    });
    is_settled.then_some(is_flat)
}

/// `f′(z)` with its error; `None` where nothing can be said.
fn slope(f: UnaryOp, z: Bounded, unit: f64, epsilon: f64, compute: DType) -> Option<Bounded> {
    let value = pointwise::derivative(f, z.value);
    let mut error = pass(z.error, pointwise::derivative_lipschitz(f));
    for jump in pointwise::derivative_jumps(f) {
        let moved = moved(jump, compute);
        if (z.value - jump).abs() <= z.error + moved && z.error + moved > 0.0 {
            let sides = [jump.next_down(), jump, jump.next_up()].map(|side| pointwise::derivative(f, side));
            error += sides.into_iter().map(|side| distance(side, value)).fold(0.0, f64::max);
        }
    }
    let own = match f {
        UnaryOp::Relu | UnaryOp::Clamp { .. } => 0.0,
        UnaryOp::LeakyRelu { .. } | UnaryOp::ClippedRelu { .. } | UnaryOp::HardSigmoid => epsilon * value.abs(),
        UnaryOp::HardSwish => 4.0 * epsilon,
        UnaryOp::Elu { alpha } => {
            if z.low() > 0.0 {
                0.0
            } else {
                unit * (1.0 + z.value.abs()) * alpha.0.abs()
            }
        }
        UnaryOp::Swish { beta } | UnaryOp::Softplus { beta } => unit * (2.0 + 2.0 * beta.0.abs() * z.value.abs()),
        _ => unit * (1.0 + z.value.abs()),
    };
    if z.value.is_infinite() {
        // Of `x · gate(x)` the formula may give ∞ · 0 where the limit is a number.
        if is_gated(f) {
            return None;
        }
        return (!value.is_nan()).then_some(Bounded::exact(value));
    }
    (error.is_finite()).then_some(Bounded { value, error: error + own })
}

/// The spacing of the type computed in near 0, for a result that may have been rounded there; 0 for an exact 0.
pub(crate) fn tiny(value: f64, compute: DType) -> f64 {
    match compute {
        _ if value == 0.0 => 0.0,
        DType::F64 => power_of_two(-1074),
        _ => power_of_two(-149),
    }
}

/// An error that is multiplied on its way. 0 stays 0, whatever the factor.
pub(crate) fn pass(error: f64, factor: f64) -> f64 {
    if error == 0.0 { 0.0 } else { error * factor }
}
