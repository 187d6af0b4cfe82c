//! The pointwise functions of epilogues in `f64`, and how much each can enlarge an error. Other functions do not come here:
//! `GemmProblem::canonical` refuses them.

use verdigris_graph::{BinaryOp, UnaryOp};

/// `f(x)`. NaN gives NaN. GELU and SiLU at −∞ give NaN, as their formulas do.
pub fn unary(f: UnaryOp, x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    match f {
        UnaryOp::Identity => x,
        UnaryOp::Neg => -x,
        UnaryOp::Abs => x.abs(),
        UnaryOp::Relu => {
            if x > 0.0 {
                x
            } else {
                0.0
            }
        }
        UnaryOp::LeakyRelu { slope } => {
            if x > 0.0 {
                x
            } else {
                slope.0 * x
            }
        }
        UnaryOp::Clamp { lower, upper } => {
            if x < lower.0 {
                lower.0
            } else if x > upper.0 {
                upper.0
            } else {
                x
            }
        }
        UnaryOp::GeluErf => x * 0.5 * erfc(-x / std::f64::consts::SQRT_2),
        UnaryOp::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            x * sigmoid(2.0 * inner)
        }
        UnaryOp::Silu => x * sigmoid(x),
        UnaryOp::Sigmoid => sigmoid(x),
        UnaryOp::Tanh => x.tanh(),
        other => unreachable!("`{}` is no epilogue step", other.name()),
    }
}

/// `f(x, z)`. NaN in either gives NaN.
pub fn binary(f: BinaryOp, x: f64, z: f64) -> f64 {
    if x.is_nan() || z.is_nan() {
        return f64::NAN;
    }
    match f {
        BinaryOp::Add => x + z,
        BinaryOp::Sub => x - z,
        BinaryOp::Mul => x * z,
        BinaryOp::Max => {
            if x > z {
                x
            } else {
                z
            }
        }
        BinaryOp::Min => {
            if x < z {
                x
            } else {
                z
            }
        }
        other => unreachable!("`{}` is no epilogue step", other.name()),
    }
}

/// A Lipschitz bound: `|f(x) − f(y)| ≤ lipschitz(f) · |x − y|` for all `x` and `y`. GELU's slope peaks at 1.1289 (erf) and 1.1290 (tanh),
/// SiLU's at 1.0998; each is rounded up.
pub fn lipschitz(f: UnaryOp) -> f64 {
    match f {
        UnaryOp::Identity | UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Relu | UnaryOp::Clamp { .. } | UnaryOp::Tanh => 1.0,
        UnaryOp::LeakyRelu { slope } => slope.0.abs().max(1.0),
        UnaryOp::GeluErf | UnaryOp::GeluTanh => 1.13,
        UnaryOp::Silu => 1.1,
        UnaryOp::Sigmoid => 0.25,
        other => unreachable!("`{}` is no epilogue step", other.name()),
    }
}

/// `1 / (1 + e^−x)`, without overflow on either side.
fn sigmoid(x: f64) -> f64 {
    if x >= 0.0 {
        1.0 / (1.0 + (-x).exp())
    } else {
        let e = x.exp();
        e / (1.0 + e)
    }
}

/// The complementary error function, to about 1e-15 relative where it is above 1e-300.
///
/// Below 2 the series `erf x = 2/√π · e^(−x²) · Σ 2ⁿ x^(2n+1) / (2n+1)!!`, whose terms are all positive; above, Laplace's continued
/// fraction, evaluated from its tail. **Source:** Abramowitz and Stegun, 7.1.6 and 7.1.14.
pub fn erfc(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    let size = x.abs();
    let tail = if size < 2.0 {
        let mut term = size;
        let mut sum = size;
        let mut n = 0.0;
        while term > sum * 1e-18 {
            n += 1.0;
            term *= 2.0 * size * size / (2.0 * n + 1.0);
            sum += term;
        }
        1.0 - std::f64::consts::FRAC_2_SQRT_PI * (-size * size).exp() * sum
    } else if size > 28.0 {
        0.0
    } else {
        let fraction = (1..=120).rev().fold(size, |below, n| size + 0.5 * f64::from(n) / below);
        (-size * size).exp() * 0.5 * std::f64::consts::FRAC_2_SQRT_PI / fraction
    };
    if x < 0.0 { 2.0 - tail } else { tail }
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_graph::Real;

    #[test]
    fn erfc_at_tabulated_points() {
        // Abramowitz and Stegun, table 7.1, and tail values to as many digits as the format shows.
        let table = [
            (0.0, 1.0),
            (0.1, 0.887_537_083_981_715),
            (0.5, 0.479_500_122_186_953_5),
            (1.0, 0.157_299_207_050_285_13),
            (1.9, 0.007_209_570_764_742_53),
            (2.1, 0.002_979_466_656_333_4),
            (3.0, 2.209_049_699_858_544e-5),
            (5.0, 1.537_459_794_428_035e-12),
            (-1.0, 1.842_700_792_949_715),
        ];
        for (x, want) in table {
            let got = erfc(x);
            assert!((got - want).abs() <= 2e-12 * want, "erfc({x}) = {got:e}, want {want:e}");
        }
        // The two formulas meet.
        assert!((erfc(2.0f64.next_down()) / erfc(2.0) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn values() {
        let near = |f, x: f64, want: f64| {
            let got = unary(f, x);
            assert!((got - want).abs() < 1e-9, "{f:?}({x}) = {got}, want {want}");
        };
        near(UnaryOp::GeluErf, 1.0, 0.841_344_746_1);
        near(UnaryOp::GeluErf, -3.0, -0.004_049_694_1);
        near(UnaryOp::GeluTanh, 1.0, 0.841_191_990_6);
        near(UnaryOp::Silu, 2.0, 1.761_594_155_9);
        near(UnaryOp::Sigmoid, -800.0, 0.0);
        near(UnaryOp::LeakyRelu { slope: Real(0.1) }, -2.0, -0.2);
        near(UnaryOp::Clamp { lower: Real(-1.0), upper: Real(6.0) }, 9.0, 6.0);
        assert_eq!(unary(UnaryOp::Relu, -0.0).to_bits(), 0.0f64.to_bits());
        assert!(unary(UnaryOp::Relu, f64::NAN).is_nan());
        assert!(binary(BinaryOp::Max, f64::NAN, 1.0).is_nan() && binary(BinaryOp::Min, 1.0, f64::NAN).is_nan());
        assert_eq!(BinaryOp::IN_EPILOGUE.map(|f| binary(f, 5.0, 3.0)), [8.0, 2.0, 15.0, 5.0, 3.0]);
    }

    #[test]
    fn lipschitz_bounds_hold_on_a_fine_grid() {
        let all = [
            UnaryOp::Identity,
            UnaryOp::Neg,
            UnaryOp::Abs,
            UnaryOp::Relu,
            UnaryOp::LeakyRelu { slope: Real(-2.5) },
            UnaryOp::Clamp { lower: Real(-1.0), upper: Real(0.5) },
            UnaryOp::GeluErf,
            UnaryOp::GeluTanh,
            UnaryOp::Silu,
            UnaryOp::Sigmoid,
            UnaryOp::Tanh,
        ];
        for f in all {
            let mut steepest = 0.0f64;
            for i in -8000..8000 {
                let (x, y) = (f64::from(i) / 1000.0, f64::from(i + 1) / 1000.0);
                steepest = steepest.max((unary(f, y) - unary(f, x)).abs() * 1000.0);
            }
            assert!(steepest <= lipschitz(f) * (1.0 + 1e-9), "{f:?}: {steepest}");
            assert!(steepest >= lipschitz(f) * 0.98, "{f:?}: the bound {} is slack, {steepest}", lipschitz(f));
        }
    }
}
