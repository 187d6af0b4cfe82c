//! The pointwise functions on slices. What needs a transcendental function is computed in f64 and rounded once to the arithmetic's type;
//! the rest is in that type.

use num_traits::Float;
use verdigris_graph::{BinaryOp, TernaryOp, UnaryOp};

use crate::real::Real;

/// √(2/π).
const GELU_SCALE: f64 = 0.797_884_560_802_865_4;
const GELU_CUBE: f64 = 0.044715;

pub(crate) fn unary<T: Real + Float>(f: UnaryOp, x: &[T], y: &mut [T]) {
    let zero = T::default();
    let one = T::from_f64(1.0);
    let truth = |truth: bool| if truth { one } else { zero };
    // Comparisons are so turned that NaN falls through to `x`.
    match f {
        UnaryOp::Identity => y.copy_from_slice(x),
        UnaryOp::Neg => map(x, y, |x| -x),
        UnaryOp::Abs => map(x, y, |x| x.abs()),
        UnaryOp::Relu => map(x, y, |x| if x <= zero { zero } else { x }),
        UnaryOp::LeakyRelu { slope } => {
            let slope = T::from_f64(slope.0);
            map(x, y, |x| if x > zero { x } else { slope * x });
        }
        UnaryOp::Clamp { lower, upper } => {
            let (lower, upper) = (T::from_f64(lower.0), T::from_f64(upper.0));
            map(x, y, |x| {
                if x < lower {
                    lower
                } else if x > upper {
                    upper
                } else {
                    x
                }
            });
        }
        UnaryOp::ClippedRelu { lower, upper, slope } => {
            let (lower, upper, slope) = (T::from_f64(lower.0), T::from_f64(upper.0), T::from_f64(slope.0));
            map(x, y, |x| {
                if x <= lower {
                    slope * (x - lower) + lower
                } else if x > upper {
                    upper
                } else {
                    x
                }
            });
        }
        UnaryOp::Sqrt => map(x, y, |x| x.sqrt()),
        UnaryOp::Reciprocal => map(x, y, |x| one / x),
        UnaryOp::Ceil => map(x, y, |x| x.ceil()),
        UnaryOp::Floor => map(x, y, |x| x.floor()),
        UnaryOp::Round => in_f64(x, y, f64::round_ties_even),
        UnaryOp::Sign => map(x, y, |x| {
            if x > zero {
                one
            } else if x < zero {
                -one
            } else if x == zero {
                zero
            } else {
                x
            }
        }),
        UnaryOp::Not => map(x, y, |x| truth(x == zero)),
        UnaryOp::IsFinite => map(x, y, |x| truth(x.is_finite())),
        UnaryOp::IsNan => map(x, y, |x| truth(x.is_nan())),
        UnaryOp::Affine { scale, shift } => {
            // In f64 a product of two f32 is exact; only f64 needs the fused instruction.
            if size_of::<T>() == 8 {
                in_f64(x, y, |x| x.mul_add(scale.0, shift.0));
            } else {
                let (scale, shift) = (T::from_f64(scale.0).to_f64(), T::from_f64(shift.0).to_f64());
                in_f64(x, y, |x| x * scale + shift);
            }
        }
        UnaryOp::GeluErf
        | UnaryOp::GeluTanh
        | UnaryOp::Silu
        | UnaryOp::Sigmoid
        | UnaryOp::Tanh
        | UnaryOp::Elu { .. }
        | UnaryOp::Softplus { .. }
        | UnaryOp::Swish { .. }
        | UnaryOp::HardSwish
        | UnaryOp::HardSigmoid
        | UnaryOp::Mish
        | UnaryOp::Exp
        | UnaryOp::Log
        | UnaryOp::Rsqrt
        | UnaryOp::Erf
        | UnaryOp::Sin
        | UnaryOp::Cos
        | UnaryOp::Tan => in_f64(x, y, |x| transcendental(f, x)),
    }
}

fn transcendental(f: UnaryOp, x: f64) -> f64 {
    match f {
        // 1 + erf(x) as erfc(−x), which does not cancel.
        UnaryOp::GeluErf => x / 2.0 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2),
        UnaryOp::GeluTanh => x / 2.0 * (1.0 + (GELU_SCALE * (x + GELU_CUBE * x * x * x)).tanh()),
        UnaryOp::Silu => x * sigmoid(x),
        UnaryOp::Sigmoid => sigmoid(x),
        UnaryOp::Tanh => x.tanh(),
        UnaryOp::Elu { alpha } => {
            if x > 0.0 {
                x
            } else {
                alpha.0 * x.exp_m1()
            }
        }
        UnaryOp::Softplus { beta } => softplus(beta.0 * x) / beta.0,
        UnaryOp::Swish { beta } => x * sigmoid(beta.0 * x),
        UnaryOp::HardSwish => x * hard_sigmoid(x),
        UnaryOp::HardSigmoid => hard_sigmoid(x),
        UnaryOp::Mish => x * softplus(x).tanh(),
        UnaryOp::Exp => x.exp(),
        UnaryOp::Log => x.ln(),
        UnaryOp::Rsqrt => 1.0 / x.sqrt(),
        UnaryOp::Erf => libm::erf(x),
        UnaryOp::Sin => x.sin(),
        UnaryOp::Cos => x.cos(),
        UnaryOp::Tan => x.tan(),
        _ => x,
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `ln(1 + e^x)` without overflow.
fn softplus(x: f64) -> f64 {
    if x > 0.0 { x + (-x).exp().ln_1p() } else { x.exp().ln_1p() }
}

fn hard_sigmoid(x: f64) -> f64 {
    (x + 3.0).clamp(0.0, 6.0) / 6.0
}

/// Whether an activation is constant there: its gradient is 0, whatever comes in.
fn is_flat(f: UnaryOp, x: f64) -> bool {
    match f {
        UnaryOp::Relu => x <= 0.0,
        UnaryOp::Clamp { lower, upper } => x <= lower.0 || x >= upper.0,
        UnaryOp::ClippedRelu { lower, upper, .. } => x > lower.0 && x >= upper.0,
        UnaryOp::HardSwish => x <= -3.0,
        UnaryOp::HardSigmoid => x <= -3.0 || x >= 3.0,
        _ => false,
    }
}

/// The derivative of an activation.
fn derivative(f: UnaryOp, x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    let step = |above: bool, low: f64| if above { 1.0 } else { low };
    match f {
        UnaryOp::Relu => step(x > 0.0, 0.0),
        UnaryOp::LeakyRelu { slope } => step(x > 0.0, slope.0),
        UnaryOp::ClippedRelu { lower, upper, slope } => {
            if x <= lower.0 {
                slope.0
            } else {
                step(x < upper.0, 0.0)
            }
        }
        UnaryOp::Clamp { lower, upper } => step(x > lower.0 && x < upper.0, 0.0),
        UnaryOp::GeluErf => {
            let density = (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
            libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2) / 2.0 + fading(x, density)
        }
        UnaryOp::GeluTanh => {
            let tanh = (GELU_SCALE * (x + GELU_CUBE * x * x * x)).tanh();
            let slope = GELU_SCALE * (1.0 + 3.0 * GELU_CUBE * x * x);
            (1.0 + tanh) / 2.0 + fading(x / 2.0 * slope, 1.0 - tanh * tanh)
        }
        UnaryOp::Silu => swish_derivative(1.0, x),
        UnaryOp::Swish { beta } => swish_derivative(beta.0, x),
        UnaryOp::Sigmoid => sigmoid(x) * sigmoid(-x),
        UnaryOp::Tanh => 1.0 - x.tanh() * x.tanh(),
        UnaryOp::Elu { alpha } => {
            if x > 0.0 {
                1.0
            } else {
                alpha.0 * x.exp()
            }
        }
        UnaryOp::Softplus { beta } => sigmoid(beta.0 * x),
        UnaryOp::HardSwish => {
            if x <= -3.0 {
                0.0
            } else {
                step(x >= 3.0, (2.0 * x + 3.0) / 6.0)
            }
        }
        UnaryOp::HardSigmoid => {
            if x > -3.0 && x < 3.0 {
                1.0 / 6.0
            } else {
                0.0
            }
        }
        UnaryOp::Mish => {
            let tanh = softplus(x).tanh();
            tanh + fading(x * sigmoid(x), 1.0 - tanh * tanh)
        }
        _ => f64::NAN,
    }
}

/// The function whose bounds are as its own results have them: what is cut off at a rounded bound has no slope there.
fn with_bounds_of<T: Real>(f: UnaryOp) -> UnaryOp {
    let round = |bound: verdigris_graph::Real| verdigris_graph::Real(T::from_f64(bound.0).to_f64());
    match f {
        UnaryOp::Clamp { lower, upper } => UnaryOp::Clamp { lower: round(lower), upper: round(upper) },
        UnaryOp::ClippedRelu { lower, upper, slope } => UnaryOp::ClippedRelu { lower: round(lower), upper: round(upper), slope },
        f => f,
    }
}

/// `x · fade` where the second factor vanishes faster than the first one grows.
fn fading(x: f64, fade: f64) -> f64 {
    if fade == 0.0 { 0.0 } else { x * fade }
}

fn swish_derivative(beta: f64, x: f64) -> f64 {
    let s = sigmoid(beta * x);
    s + fading(beta * x, s * sigmoid(-beta * x))
}

pub(crate) fn binary<T: Real + Float>(f: BinaryOp, x: &[T], z: &[T], y: &mut [T]) {
    let zero = T::default();
    let one = T::from_f64(1.0);
    let truth = |truth: bool| if truth { one } else { zero };
    match f {
        BinaryOp::Add => map2(x, z, y, |x, z| x + z),
        BinaryOp::Sub => map2(x, z, y, |x, z| x - z),
        BinaryOp::Mul => map2(x, z, y, |x, z| x * z),
        BinaryOp::Max => map2(x, z, y, |x, z| if x > z || x.is_nan() { x } else { z }),
        BinaryOp::Min => map2(x, z, y, |x, z| if x < z || x.is_nan() { x } else { z }),
        BinaryOp::Div => map2(x, z, y, |x, z| x / z),
        BinaryOp::Mod => map2(x, z, y, |x, z| x % z),
        BinaryOp::FloorMod => map2(x, z, y, |x, z| {
            let m = x % z;
            if m != zero && (m < zero) != (z < zero) { m + z } else { m }
        }),
        BinaryOp::Pow => map2(x, z, y, |x, z| T::from_f64(libm::pow(x.to_f64(), z.to_f64()))),
        BinaryOp::Atan2 => map2(x, z, y, |x, z| T::from_f64(x.to_f64().atan2(z.to_f64()))),
        BinaryOp::AddSquare => map2(x, z, y, |x, z| x + z * z),
        // A NaN slope gives NaN on the other side of 0 too.
        BinaryOp::Prelu => map2(x, z, y, |x, z| if x > zero && !z.is_nan() { x } else { z * x }),
        BinaryOp::Eq => map2(x, z, y, |x, z| truth(x == z)),
        BinaryOp::Ne => map2(x, z, y, |x, z| truth(x != z)),
        BinaryOp::Gt => map2(x, z, y, |x, z| truth(x > z)),
        BinaryOp::Ge => map2(x, z, y, |x, z| truth(x >= z)),
        BinaryOp::Lt => map2(x, z, y, |x, z| truth(x < z)),
        BinaryOp::Le => map2(x, z, y, |x, z| truth(x <= z)),
        BinaryOp::And => map2(x, z, y, |x, z| truth(x != zero && z != zero)),
        BinaryOp::Or => map2(x, z, y, |x, z| truth(x != zero || z != zero)),
        // NaN falls through to `z`.
        BinaryOp::Backward(UnaryOp::Relu) => map2(x, z, y, |x, z| {
            if z > zero {
                x
            } else if z <= zero {
                zero
            } else {
                z
            }
        }),
        BinaryOp::Backward(f) => {
            let f = with_bounds_of::<T>(f);
            map2(x, z, y, |x, z| {
                let z = z.to_f64();
                T::from_f64(if is_flat(f, z) { 0.0 } else { x.to_f64() * derivative(f, z) })
            });
        }
    }
}

pub(crate) fn ternary<T: Real + Float>(f: TernaryOp, x: &[T], z: &[T], t: &[T], y: &mut [T]) {
    let zero = T::default();
    for (((y, &x), &z), &t) in y.iter_mut().zip(x).zip(z).zip(t) {
        *y = match f {
            TernaryOp::Select => {
                if t != zero {
                    x
                } else {
                    z
                }
            }
            TernaryOp::PreluBackward => {
                if z > zero {
                    x
                } else if z.is_nan() {
                    z
                } else {
                    t * x
                }
            }
        };
    }
}

fn map<T: Real>(x: &[T], y: &mut [T], f: impl Fn(T) -> T) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = f(x);
    }
}

fn map2<T: Real>(x: &[T], z: &[T], y: &mut [T], f: impl Fn(T, T) -> T) {
    for ((y, &x), &z) in y.iter_mut().zip(x).zip(z) {
        *y = f(x, z);
    }
}

fn in_f64<T: Real>(x: &[T], y: &mut [T], f: impl Fn(f64) -> f64) {
    map(x, y, |x| T::from_f64(f(x.to_f64())));
}
