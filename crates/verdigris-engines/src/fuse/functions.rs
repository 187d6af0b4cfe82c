//! The functions of the pointwise language, each once: all steps of maps, prologues, epilogues and reductions are computed here.

use verdigris_graph::{BinaryOp, Real, TernaryOp, UnaryOp};
use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::inst::CvtRound;

use super::compute::Compute;
use super::math::{self, sigmoid};

/// The attributes of a function, in the order in which [`unary`] takes them.
fn attributes_mut(f: &mut UnaryOp) -> Vec<&mut Real> {
    match f {
        UnaryOp::LeakyRelu { slope } => vec![slope],
        UnaryOp::Clamp { lower, upper } => vec![lower, upper],
        UnaryOp::ClippedRelu { lower, upper, slope } => vec![lower, upper, slope],
        UnaryOp::Elu { alpha } => vec![alpha],
        UnaryOp::Softplus { beta } | UnaryOp::Swish { beta } => vec![beta],
        UnaryOp::Affine { scale, shift } => vec![scale, shift],
        _ => Vec::new(),
    }
}

/// The function as far as it shapes code, and its attributes.
pub(crate) fn parted(mut f: UnaryOp) -> (UnaryOp, Vec<f64>) {
    let attributes = attributes_mut(&mut f).into_iter().map(|attribute| std::mem::replace(&mut attribute.0, 0.0)).collect();
    (f, attributes)
}

fn truth<'k, T: Compute>(condition: Val<'k, bool>, k: Kernel<'k>) -> Val<'k, T> {
    k.select(condition, T::constant(k, 1.0), T::constant(k, 0.0))
}

/// `f(x)`; `a` are the attributes of the function.
pub(crate) fn unary<'k, T: Compute>(f: UnaryOp, x: Val<'k, T>, a: &[Val<'k, T>]) -> Val<'k, T> {
    let k = x.kernel();
    let number = |value| T::constant(k, value);
    let (zero, one) = (number(0.0), number(1.0));
    match f {
        UnaryOp::Identity => x,
        UnaryOp::Neg => -x,
        UnaryOp::Abs => x.abs(),
        UnaryOp::Relu => T::max_nan(x, zero),
        UnaryOp::LeakyRelu { .. } => k.select(x.gt(zero), x, x * a[0]),
        UnaryOp::Clamp { .. } => T::min_nan(T::max_nan(x, a[0]), a[1]),
        UnaryOp::GeluErf => {
            // Both halves of the bell from erfc of a positive number, so that the thin one loses nothing to 1 − erf: what x has above 0, less |x| of the tail.
            // Where the tail is 0 to all digits, |x| ends, so that infinity does not multiply it.
            let size = x.abs().min(number(1e18));
            let tail = math::erfc_positive(size * number(std::f64::consts::FRAC_1_SQRT_2)) * number(0.5);
            k.fma(-size, tail, T::max_nan(x, zero))
        }
        UnaryOp::GeluTanh => {
            // (1 + tanh u) / 2 = sigmoid(2u).
            let cubic = k.fma(x * x, x * number(0.044715), x);
            x * sigmoid(cubic * number(2.0 * (2.0 / std::f64::consts::PI).sqrt()))
        }
        UnaryOp::Silu => x * sigmoid(x),
        UnaryOp::Sigmoid => sigmoid(x),
        UnaryOp::Tanh => {
            let e = T::fast_exp(x.abs() * number(-2.0));
            let size = (one - e) * T::reciprocal(one + e);
            k.select(x.lt(zero), -size, size)
        }
        UnaryOp::ClippedRelu { .. } => {
            let low = k.fma(a[2], x - a[0], a[0]);
            k.select(x.le(a[0]), low, T::min_nan(x, a[1]))
        }
        UnaryOp::Elu { .. } => k.select(x.gt(zero), x, a[0] * math::exp_m1(x)),
        UnaryOp::Softplus { .. } => T::quotient(math::softplus(x * a[0]), a[0]),
        UnaryOp::Swish { .. } => x * sigmoid(x * a[0]),
        UnaryOp::HardSwish => x * hard_sigmoid(k, x),
        UnaryOp::HardSigmoid => hard_sigmoid(k, x),
        UnaryOp::Mish => x * mish_gate(k, x),
        UnaryOp::Exp => T::exp_whole(x),
        UnaryOp::Log => math::log(x),
        UnaryOp::Sqrt => T::sqrt(x),
        UnaryOp::Rsqrt => T::rsqrt(x),
        UnaryOp::Reciprocal => T::quotient(one, x),
        UnaryOp::Erf => math::erf(x),
        UnaryOp::Sin => math::sin_cos(x)[0],
        UnaryOp::Cos => math::sin_cos(x)[1],
        UnaryOp::Tan => math::tan(x),
        UnaryOp::Ceil => x.convert(CvtRound::IntUp),
        UnaryOp::Floor => x.convert(CvtRound::IntDown),
        UnaryOp::Round => x.convert(CvtRound::IntNearest),
        UnaryOp::Sign => {
            let sign = k.select(x.gt(zero), one, k.select(x.lt(zero), number(-1.0), zero));
            k.select(x.ne(x), x, sign)
        }
        UnaryOp::Not => truth(x.eq(zero), k),
        UnaryOp::IsFinite => truth(x.abs().lt(number(f64::INFINITY)), k),
        UnaryOp::IsNan => truth(x.ne(x), k),
        UnaryOp::Affine { .. } => k.fma(a[0], x, a[1]),
    }
}

fn hard_sigmoid<'k, T: Compute>(k: Kernel<'k>, x: Val<'k, T>) -> Val<'k, T> {
    let number = |value| T::constant(k, value);
    // Six times the rounded sixth is 1 in both types.
    T::min_nan(T::max_nan(x + number(3.0), number(0.0)), number(6.0)) * number(1.0 / 6.0)
}

/// `tanh(ln(1 + eˣ))` = `n / (n + 2)` with `n = e · (e + 2)`.
fn mish_gate<'k, T: Compute>(k: Kernel<'k>, x: Val<'k, T>) -> Val<'k, T> {
    let number = |value| T::constant(k, value);
    let e = T::exp(T::min_nan(x, number(20.0)));
    let n = e * (e + number(2.0));
    let gate = T::quotient(n, n + number(2.0));
    // Beyond, it is 1 to all digits of either type.
    k.select(x.gt(number(20.0)), number(1.0), gate)
}

/// `dy · f′(x)` of an activation. Where `f` is constant it is 0 whatever `dy` is, so that an infinite one is not multiplied by 0.
fn passed_back<'k, T: Compute>(k: Kernel<'k>, f: UnaryOp, dy: Val<'k, T>, x: Val<'k, T>, a: &[Val<'k, T>]) -> Val<'k, T> {
    let number = |value| T::constant(k, value);
    let inside = |lower: f64, upper: f64| x.gt(number(lower)) & x.lt(number(upper));
    // Where it is not constant, and the product there; NaN is on neither side.
    let (passes, product) = match f {
        UnaryOp::Relu => (x.gt(number(0.0)), dy),
        UnaryOp::Clamp { .. } => (x.gt(a[0]) & x.lt(a[1]), dy),
        UnaryOp::ClippedRelu { .. } => (x.le(a[0]) | x.lt(a[1]), k.select(x.le(a[0]), dy * a[2], dy)),
        UnaryOp::HardSigmoid => (inside(-3.0, 3.0), dy * number(1.0 / 6.0)),
        UnaryOp::HardSwish => {
            let middle = k.fma(x, number(2.0), number(3.0)) * number(1.0 / 6.0);
            (x.gt(number(-3.0)), k.select(x.ge(number(3.0)), dy, dy * middle))
        }
        f => return dy * derivative(k, f, x, a),
    };
    k.select(passes, product, k.select(x.ne(x), x, number(0.0)))
}

/// `f′(x)` of an activation that is nowhere constant.
fn derivative<'k, T: Compute>(k: Kernel<'k>, f: UnaryOp, x: Val<'k, T>, a: &[Val<'k, T>]) -> Val<'k, T> {
    let number = |value| T::constant(k, value);
    let (zero, one, two) = (number(0.0), number(1.0), number(2.0));
    // Far out a gate's derivative is 0 or 1 to all digits; nearer, no intermediate overflows.
    let within = |limit: f64| T::min_nan(T::max_nan(x, number(-limit)), number(limit));
    let gated = |u: Val<'k, T>| {
        let s = sigmoid(u);
        k.fma(u * s, one - s, s)
    };
    let result = match f {
        UnaryOp::LeakyRelu { .. } => k.select(x.gt(zero), one, a[0]),
        UnaryOp::GeluErf => {
            let x = within(60.0);
            // The density and the tail have one exponential.
            let bell = T::fast_exp(x * x * number(-0.5));
            let tail = math::scaled_erfc(x.abs() * number(std::f64::consts::FRAC_1_SQRT_2)) * (bell * number(0.5));
            let below = k.select(x.lt(zero), tail, one - tail);
            k.fma(x, bell * number(1.0 / (2.0 * std::f64::consts::PI).sqrt()), below)
        }
        UnaryOp::GeluTanh => {
            let x = within(8.0);
            let root = 2.0 * (2.0 / std::f64::consts::PI).sqrt();
            let e = T::fast_exp(k.fma(x * x, x * number(0.044715), x) * number(-root));
            let s = T::reciprocal(one + e);
            let inner = k.fma(x * x, number(3.0 * 0.044715 * root), number(root));
            // 1 − s as e · s: a difference would keep the quotient's error, by which x³ is multiplied.
            k.fma(x * inner * s, e * s, s)
        }
        // NaN passes the bounds and the gate.
        UnaryOp::Silu => return gated(within(1e4)),
        UnaryOp::Swish { .. } => return gated(T::min_nan(T::max_nan(x * a[0], number(-1e4)), number(1e4))),
        UnaryOp::Sigmoid => {
            let e = T::fast_exp(-x.abs());
            let share = T::reciprocal(one + e);
            e * share * share
        }
        UnaryOp::Tanh => {
            let e = T::fast_exp(x.abs() * number(-2.0));
            let share = T::reciprocal(one + e);
            e * number(4.0) * share * share
        }
        UnaryOp::Elu { .. } => k.select(x.gt(zero), one, a[0] * T::exp(x)),
        UnaryOp::Softplus { .. } => sigmoid(x * a[0]),
        UnaryOp::Mish => {
            let x = within(40.0);
            let e = T::exp(T::min_nan(x, number(20.0)));
            let n = e * (e + two);
            // 1 − gate² = 4 (n + 1) / (n + 2)².
            let bend = T::quotient(T::quotient(number(4.0) * (n + one), n + two), n + two);
            k.fma(x * sigmoid(x), bend, mish_gate(k, x))
        }
        // `BinaryOp::check` is the gate, and the others are above.
        other => unreachable!("`{}` is no activation", other.name()),
    };
    k.select(x.ne(x), x, result)
}

/// `f(x, z)`; `a` are the attributes of an activation whose gradient `f` is.
pub(crate) fn binary<'k, T: Compute>(f: BinaryOp, x: Val<'k, T>, z: Val<'k, T>, a: &[Val<'k, T>]) -> Val<'k, T> {
    let k = x.kernel();
    let zero = T::constant(k, 0.0);
    match f {
        BinaryOp::Add => x + z,
        BinaryOp::Sub => x - z,
        BinaryOp::Mul => x * z,
        BinaryOp::Max => T::max_nan(x, z),
        BinaryOp::Min => T::min_nan(x, z),
        BinaryOp::Div => T::quotient(x, z),
        // Exact in f64 alone.
        BinaryOp::Mod => T::from_f64(math::fmod(T::to_f64(x), T::to_f64(z))),
        BinaryOp::FloorMod => {
            let rest = T::from_f64(math::fmod(T::to_f64(x), T::to_f64(z)));
            let differ = rest.lt(zero) ^ z.lt(zero);
            k.select(rest.ne(zero) & differ, rest + z, rest)
        }
        BinaryOp::Pow => T::from_f64(math::pow(T::to_f64(x), T::to_f64(z))),
        BinaryOp::Atan2 => math::atan2(x, z),
        BinaryOp::AddSquare => k.fma(z, z, x),
        BinaryOp::Prelu => k.select(x.gt(zero), x, z * x),
        BinaryOp::Eq => truth(x.eq(z), k),
        BinaryOp::Ne => truth(x.ne(z), k),
        BinaryOp::Gt => truth(x.gt(z), k),
        BinaryOp::Ge => truth(x.ge(z), k),
        BinaryOp::Lt => truth(x.lt(z), k),
        BinaryOp::Le => truth(x.le(z), k),
        BinaryOp::And => truth(x.ne(zero) & z.ne(zero), k),
        BinaryOp::Or => truth(x.ne(zero) | z.ne(zero), k),
        BinaryOp::Backward(f) => passed_back(k, f, x, z, a),
    }
}

/// `f(x, z, t)`.
pub(super) fn ternary<'k, T: Compute>(f: TernaryOp, [x, z, t]: [Val<'k, T>; 3]) -> Val<'k, T> {
    let k = x.kernel();
    let zero = T::constant(k, 0.0);
    match f {
        TernaryOp::Select => k.select(t.ne(zero), x, z),
        TernaryOp::PreluBackward => k.select(z.gt(zero), x, k.select(z.ne(z), z, t * x)),
    }
}
