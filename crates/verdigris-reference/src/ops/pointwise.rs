//! Pointwise functions in `f64`: values, derivatives, and where they turn or jump.

use verdigris_graph::{BinaryOp, Error, Graph, HostScalar, Pointwise, Real, TernaryOp, Uid, UnaryOp};
use verdigris_tensor::{DType, Layout};

use crate::fuzz::{Draft, TYPES};
use crate::operation::{Data, Evaluation, GraphError, Operation};
use crate::philox::{Numbers, State};
use crate::source::{Formula, Source};
use crate::tolerance::Bounded;

/// `f(x)`. NaN gives NaN, but for `Not`, `IsFinite` and `IsNan`. The gated functions (GELU, SiLU and their like) give NaN at −∞, as their
/// formulas do.
pub fn unary(f: UnaryOp, x: f64) -> f64 {
    match f {
        UnaryOp::Not => return truth(x == 0.0),
        UnaryOp::IsFinite => return truth(x.is_finite()),
        UnaryOp::IsNan => return truth(x.is_nan()),
        _ if x.is_nan() => return x,
        _ => {}
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
        UnaryOp::ClippedRelu { lower, upper, slope } => {
            if x <= lower.0 {
                slope.0 * (x - lower.0) + lower.0
            } else if x > upper.0 {
                upper.0
            } else {
                x
            }
        }
        UnaryOp::GeluErf => x * normal_below(x),
        UnaryOp::GeluTanh => x * sigmoid(2.0 * gelu_inner(x)),
        UnaryOp::Silu => x * sigmoid(x),
        UnaryOp::Swish { beta } => x * sigmoid(beta.0 * x),
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
        UnaryOp::HardSwish => x * hard_sigmoid(x),
        UnaryOp::HardSigmoid => hard_sigmoid(x),
        UnaryOp::Mish => x * softplus(x).tanh(),
        UnaryOp::Exp => x.exp(),
        UnaryOp::Log => x.ln(),
        UnaryOp::Sqrt => x.sqrt(),
        UnaryOp::Rsqrt => 1.0 / x.sqrt(),
        UnaryOp::Reciprocal => 1.0 / x,
        UnaryOp::Erf => {
            if x > 0.0 {
                1.0 - erfc(x)
            } else {
                erfc(-x) - 1.0
            }
        }
        UnaryOp::Sin => x.sin(),
        UnaryOp::Cos => x.cos(),
        UnaryOp::Tan => x.tan(),
        UnaryOp::Ceil => x.ceil(),
        UnaryOp::Floor => x.floor(),
        UnaryOp::Round => x.round_ties_even(),
        UnaryOp::Sign => truth(x > 0.0) - truth(x < 0.0),
        UnaryOp::Affine { scale, shift } => scale.0.mul_add(x, shift.0),
        UnaryOp::Not | UnaryOp::IsFinite | UnaryOp::IsNan => f64::NAN,
    }
}

/// `f′(x)` of an activation; NaN for all other functions. At a kink it is the derivative of the side that the forward formula takes, and
/// 0 at both bounds of a clamp.
pub fn derivative(f: UnaryOp, x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    // Of `x · s(x)`: the second part vanishes at both ends faster than x grows.
    let gated = |s: f64, slope_of_s: f64| s + if slope_of_s == 0.0 { 0.0 } else { x * slope_of_s };
    match f {
        UnaryOp::Relu => truth(x > 0.0),
        UnaryOp::LeakyRelu { slope } => {
            if x > 0.0 {
                1.0
            } else {
                slope.0
            }
        }
        UnaryOp::Clamp { lower, upper } => truth(x > lower.0 && x < upper.0),
        UnaryOp::ClippedRelu { lower, upper, slope } => {
            if x <= lower.0 {
                slope.0
            } else {
                truth(x < upper.0)
            }
        }
        UnaryOp::GeluErf => {
            let density = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
            gated(normal_below(x), density)
        }
        UnaryOp::GeluTanh => {
            let s = sigmoid(2.0 * gelu_inner(x));
            let bend = s * sigmoid(-2.0 * gelu_inner(x));
            gated(s, if bend == 0.0 { 0.0 } else { bend * 2.0 * (2.0 / std::f64::consts::PI).sqrt() * (1.0 + 3.0 * 0.044715 * x * x) })
        }
        UnaryOp::Silu => gated(sigmoid(x), sigmoid(x) * sigmoid(-x)),
        UnaryOp::Swish { beta } => gated(sigmoid(beta.0 * x), beta.0 * sigmoid(beta.0 * x) * sigmoid(-beta.0 * x)),
        UnaryOp::Sigmoid => sigmoid(x) * sigmoid(-x),
        // 1 − tanh² without the cancellation.
        UnaryOp::Tanh => 4.0 * sigmoid(2.0 * x) * sigmoid(-2.0 * x),
        UnaryOp::Elu { alpha } => {
            if x > 0.0 {
                1.0
            } else {
                alpha.0 * x.exp()
            }
        }
        UnaryOp::Softplus { beta } => sigmoid(beta.0 * x),
        UnaryOp::HardSwish => gated(hard_sigmoid(x), truth(x > -3.0 && x < 3.0) / 6.0),
        UnaryOp::HardSigmoid => truth(x > -3.0 && x < 3.0) / 6.0,
        UnaryOp::Mish => {
            let inner = softplus(x);
            let bend = 4.0 * sigmoid(2.0 * inner) * sigmoid(-2.0 * inner) * sigmoid(x);
            gated(inner.tanh(), bend)
        }
        _ => f64::NAN,
    }
}

/// Whether an activation is constant about `x`, or on the side that its formula takes at a kink: what is passed back through it there is 0, whatever comes in. (A slope of 0 is a factor.)
pub fn is_flat(f: UnaryOp, x: f64) -> bool {
    match f {
        UnaryOp::Relu => x <= 0.0,
        UnaryOp::Clamp { lower, upper } => x <= lower.0 || upper.0 <= x,
        UnaryOp::ClippedRelu { lower, upper, .. } => lower.0 < x && upper.0 <= x,
        UnaryOp::HardSwish => x <= -3.0,
        UnaryOp::HardSigmoid => x.abs() >= 3.0,
        _ => false,
    }
}

/// `f(x, z)`, with NaN as the function's text has it.
pub fn binary(f: BinaryOp, x: f64, z: f64) -> f64 {
    match f {
        BinaryOp::Eq => return truth(x == z),
        BinaryOp::Ne => return truth(x != z),
        BinaryOp::Gt => return truth(x > z),
        BinaryOp::Ge => return truth(x >= z),
        BinaryOp::Lt => return truth(x < z),
        BinaryOp::Le => return truth(x <= z),
        BinaryOp::And => return truth(x != 0.0 && z != 0.0),
        BinaryOp::Or => return truth(x != 0.0 || z != 0.0),
        BinaryOp::Pow => return x.powf(z),
        // No product with 0: an x that is infinite or NaN is masked too.
        BinaryOp::Backward(activation) if is_flat(activation, z) => return 0.0,
        _ if x.is_nan() || z.is_nan() => return f64::NAN,
        _ => {}
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
        BinaryOp::Div => x / z,
        BinaryOp::Mod => x % z,
        BinaryOp::FloorMod => {
            let remainder = x % z;
            if remainder != 0.0 && (remainder < 0.0) != (z < 0.0) { remainder + z } else { remainder }
        }
        BinaryOp::Atan2 => x.atan2(z),
        BinaryOp::AddSquare => z.mul_add(z, x),
        BinaryOp::Prelu => {
            if x > 0.0 {
                x
            } else {
                z * x
            }
        }
        BinaryOp::Backward(activation) => x * derivative(activation, z),
        BinaryOp::Eq
        | BinaryOp::Ne
        | BinaryOp::Gt
        | BinaryOp::Ge
        | BinaryOp::Lt
        | BinaryOp::Le
        | BinaryOp::And
        | BinaryOp::Or
        | BinaryOp::Pow => f64::NAN,
    }
}

/// `f(x, z, t)`.
pub fn ternary(f: TernaryOp, x: f64, z: f64, t: f64) -> f64 {
    match f {
        TernaryOp::Select => {
            if t != 0.0 {
                x
            } else {
                z
            }
        }
        TernaryOp::PreluBackward => {
            if x.is_nan() || z.is_nan() || t.is_nan() {
                f64::NAN
            } else if z > 0.0 {
                x
            } else {
                t * x
            }
        }
    }
}

/// The points between which `f` is monotone: between two of them its extremes lie at the ends. `Sin`, `Cos` and `Tan` have no such list.
pub fn turns(f: UnaryOp) -> Vec<f64> {
    match f {
        UnaryOp::Abs | UnaryOp::Not | UnaryOp::Reciprocal | UnaryOp::Rsqrt => vec![0.0],
        UnaryOp::LeakyRelu { slope } if slope.0 < 0.0 => vec![0.0],
        UnaryOp::Elu { alpha } if alpha.0 < 0.0 => vec![0.0],
        UnaryOp::ClippedRelu { lower, slope, .. } if slope.0 < 0.0 => vec![lower.0],
        UnaryOp::GeluErf => vec![-0.751_791_524_693_564_5],
        UnaryOp::GeluTanh => vec![-0.752_461_425_396_173],
        UnaryOp::Silu => vec![SILU_TURN],
        UnaryOp::Swish { beta } if beta.0 != 0.0 => vec![SILU_TURN / beta.0],
        UnaryOp::HardSwish => vec![-3.0, -1.5],
        UnaryOp::Mish => vec![-1.192_431_236_542_053_2],
        _ => Vec::new(),
    }
}

/// Where SiLU is least.
const SILU_TURN: f64 = -1.278_464_542_761_074;

/// The points at which `f′` jumps.
pub fn derivative_jumps(f: UnaryOp) -> Vec<f64> {
    match f {
        UnaryOp::Relu | UnaryOp::LeakyRelu { .. } | UnaryOp::Elu { .. } => vec![0.0],
        UnaryOp::Clamp { lower, upper } | UnaryOp::ClippedRelu { lower, upper, .. } => vec![lower.0, upper.0],
        UnaryOp::HardSwish | UnaryOp::HardSigmoid => vec![-3.0, 3.0],
        _ => Vec::new(),
    }
}

/// A bound on `|f″|` where `f′` does not jump, rounded up.
pub fn derivative_lipschitz(f: UnaryOp) -> f64 {
    match f {
        UnaryOp::GeluErf => 0.798,
        UnaryOp::GeluTanh => 0.799,
        UnaryOp::Silu => 0.5,
        UnaryOp::Swish { beta } => 0.5 * beta.0.abs(),
        UnaryOp::Sigmoid => 0.0963,
        UnaryOp::Tanh => 0.77,
        UnaryOp::Elu { alpha } => alpha.0.abs(),
        UnaryOp::Softplus { beta } => 0.25 * beta.0,
        UnaryOp::HardSwish => 1.0 / 3.0,
        UnaryOp::Mish => 0.645,
        _ => 0.0,
    }
}

fn truth(condition: bool) -> f64 {
    f64::from(u8::from(condition))
}

/// The normal distribution's mass below `x`.
fn normal_below(x: f64) -> f64 {
    0.5 * erfc(-x / std::f64::consts::SQRT_2)
}

fn gelu_inner(x: f64) -> f64 {
    (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)
}

fn hard_sigmoid(x: f64) -> f64 {
    (x + 3.0).clamp(0.0, 6.0) / 6.0
}

/// `ln(1 + e^x)`, without overflow.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
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

/// A pointwise op with what it reads, broadcast to its result.
pub(crate) struct Mapped<'a> {
    op: Pointwise,
    inputs: Vec<Source<'a>>,
    factor: f64,
    significant_bits: u32,
    compute: DType,
}

impl<'a> Mapped<'a> {
    /// `inputs` as [`Pointwise::operands`] names them; `factor` is that of a scale; `out` the dims of the result.
    pub(crate) fn new(op: &Pointwise, inputs: Vec<Source<'a>>, factor: f64, out: &[u64], significant_bits: u32) -> Mapped<'a> {
        let compute = match op {
            // An exact integer, of whatever size.
            Pointwise::GenIndex { .. } => DType::F64,
            _ => Pointwise::compute_dtype(inputs.iter().map(Source::dtype)),
        };
        let inputs = inputs.into_iter().map(|input| input.broadcast(out)).collect();
        Mapped { op: op.clone(), inputs, factor, significant_bits, compute }
    }
}

impl Formula for Mapped<'_> {
    fn at(&self, index: &[u64]) -> Bounded {
        let (bits, compute) = (self.significant_bits, self.compute);
        let read = |which: usize| {
            let input = &self.inputs[which];
            input.read(input.offset(index), compute)
        };
        match self.op {
            Pointwise::Unary { f, .. } => read(0).unary(f, bits, compute),
            Pointwise::Binary { f, .. } => read(0).binary(f, read(1), false, bits, compute),
            Pointwise::Ternary { f, .. } => read(0).ternary(f, read(1), read(2), compute),
            Pointwise::GenIndex { axis, .. } => Bounded::exact(index[axis as usize] as f64),
            // Evaluated as `Numbers`, which has the state.
            Pointwise::Random { .. } => Bounded::exact(f64::NAN),
            Pointwise::Scale { .. } => read(0).scaled(self.factor, compute),
        }
    }

    fn compute(&self) -> DType {
        self.compute
    }
}

impl Operation for Pointwise {
    const DRAWS: u64 = 10;

    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
        if let Pointwise::Random { distribution, state, offset, y } = *self {
            let state = match offset {
                Some(offset) => State::by_value([at.scalar(state)?, at.scalar(offset)?]),
                None => State::in_memory(&at.source(state)?),
            };
            return at.put(y, Numbers::new(distribution, state, at.dims(y)?));
        }
        let inputs = self.operands().into_iter().map(|uid| at.source(uid)).collect::<Result<_, _>>()?;
        let factor = match self {
            Pointwise::Scale { factor: HostScalar::Fixed(real), .. } => real.0,
            Pointwise::Scale { factor: HostScalar::Bound(uid), .. } => at.scalar(*uid)?,
            _ => 1.0,
        };
        let y = self.output();
        at.put(y, Mapped::new(self, inputs, factor, at.dims(y)?, at.bits(y)))
    }

    fn data_of(&self, _: &Graph, uid: Uid) -> Data<'_> {
        match self {
            Pointwise::Unary { f: UnaryOp::Log | UnaryOp::Sqrt | UnaryOp::Rsqrt | UnaryOp::Reciprocal, .. } => Data::Positive,
            Pointwise::Unary { f: UnaryOp::Not, .. } => Data::Truth,
            Pointwise::Binary { f: BinaryOp::Div | BinaryOp::Mod | BinaryOp::FloorMod, z, .. } if *z == uid => Data::Positive,
            Pointwise::Binary { f: BinaryOp::Pow, x, .. } if *x == uid => Data::Positive,
            Pointwise::Binary { f: BinaryOp::And | BinaryOp::Or, .. } => Data::Truth,
            Pointwise::Ternary { f: TernaryOp::Select, t, .. } if *t == uid => Data::Truth,
            _ => Data::Any(true),
        }
    }

    fn draw(draft: &mut Draft, nth: u64) -> Result<(), Error> {
        match nth {
            0..=3 => draft.unary(),
            4..=7 => draft.binary(),
            8 => draft.ternary(),
            _ => draft.scale_or_index(),
        }
    }
}

/// What stands behind products most often.
const ARITHMETIC: [BinaryOp; 5] = [BinaryOp::Add, BinaryOp::Sub, BinaryOp::Mul, BinaryOp::Max, BinaryOp::Min];

impl Draft {
    fn activation(&mut self) -> UnaryOp {
        let (a, b) = (self.real(), self.real());
        let (low, high) = if a.0 <= b.0 { (a, b) } else { (b, a) };
        let beta = Real(0.25 * (1 + self.below(8)) as f64);
        self.pick(&[
            UnaryOp::Relu,
            UnaryOp::LeakyRelu { slope: a },
            UnaryOp::ClippedRelu { lower: low, upper: high, slope: b },
            UnaryOp::Clamp { lower: low, upper: high },
            UnaryOp::GeluErf,
            UnaryOp::GeluTanh,
            UnaryOp::Silu,
            UnaryOp::Swish { beta },
            UnaryOp::Sigmoid,
            UnaryOp::Tanh,
            UnaryOp::Elu { alpha: a },
            UnaryOp::Softplus { beta },
            UnaryOp::HardSwish,
            UnaryOp::HardSigmoid,
            UnaryOp::Mish,
        ])
    }

    fn unary(&mut self) -> Result<(), Error> {
        let x = self.any()?;
        let (scale, shift) = (self.real(), self.real());
        let others = [
            UnaryOp::Identity,
            UnaryOp::Neg,
            UnaryOp::Abs,
            UnaryOp::Exp,
            UnaryOp::Log,
            UnaryOp::Sqrt,
            UnaryOp::Rsqrt,
            UnaryOp::Reciprocal,
            UnaryOp::Erf,
            UnaryOp::Sin,
            UnaryOp::Cos,
            UnaryOp::Tan,
            UnaryOp::Ceil,
            UnaryOp::Floor,
            UnaryOp::Round,
            UnaryOp::Sign,
            UnaryOp::Not,
            UnaryOp::IsFinite,
            UnaryOp::IsNan,
            UnaryOp::Affine { scale, shift },
        ];
        let f = if self.one_in(2) { self.activation() } else { self.pick(&others) };
        let name = self.name(f.name());
        let y = self.builder.unary(&name, f, x.uid)?;
        self.note_read(&[x.uid]);
        self.pointwise_result(y, &x.dims, &[x.dtype])
    }

    fn binary(&mut self) -> Result<(), Error> {
        let x = self.any()?;
        let z = self.second(&x.dims)?;
        let f = match self.below(4) {
            0 => BinaryOp::Backward(self.activation()),
            1 => self.pick(&BinaryOp::ALL),
            _ => self.pick(&ARITHMETIC),
        };
        let (left, right) = if self.one_in(3) { (&z, &x) } else { (&x, &z) };
        let name = self.name(f.name());
        let y = self.builder.binary(&name, f, left.uid, right.uid)?;
        self.note_read(&[x.uid, z.uid]);
        self.pointwise_result(y, &x.dims, &[x.dtype, z.dtype])
    }

    fn ternary(&mut self) -> Result<(), Error> {
        let x = self.any()?;
        let (z, t) = (self.second(&x.dims)?, self.second(&x.dims)?);
        let f = self.pick(&TernaryOp::ALL);
        let name = self.name(f.name());
        let y = self.builder.ternary(&name, f, x.uid, z.uid, t.uid)?;
        self.note_read(&[x.uid, z.uid, t.uid]);
        self.pointwise_result(y, &x.dims, &[x.dtype, z.dtype, t.dtype])
    }

    fn random(&mut self) -> Result<(), Error> {
        let state = self.state()?;
        if self.one_in(3) {
            let dims = self.dims();
            let name = self.name("random");
            let y = match self.below(2) {
                0 => self.builder.random_uniform(&name, &dims, state)?,
                _ => self.builder.random_normal(&name, &dims, state)?,
            };
            return self.result(y, &dims, DType::F32, &TYPES).map(drop);
        }
        let x = self.with_axis(true)?;
        let (p, name) = (0.125 * self.below(9) as f64, self.name("dropout"));
        let y = self.builder.dropout(&name, x.uid, state, p)?;
        self.note_read(&[x.uid]);
        self.pointwise_result(y, &x.dims, &[x.dtype, DType::F32])
    }

    /// A random state in memory, which no op writes.
    pub(crate) fn state(&mut self) -> Result<Uid, Error> {
        let layout = Layout::row_major(&[4]).map_err(|source| Error::Layout { tensor: "state".to_owned(), source })?;
        let name = self.name("state");
        Ok(self.builder.tensor(&name, DType::I32, layout))
    }

    fn scale_or_index(&mut self) -> Result<(), Error> {
        if self.one_in(3) {
            return self.random();
        }
        if self.one_in(3) {
            let dims = self.dims();
            let axis = self.below(dims.len() as u64) as u32;
            let name = self.name("index");
            let y = self.builder.gen_index(&name, &dims, axis)?;
            return self.result(y, &dims, DType::I64, &TYPES).map(drop);
        }
        let x = self.any()?;
        let factor = if self.one_in(2) {
            let name = self.name("factor");
            HostScalar::Bound(self.builder.host_scalar(&name, DType::F32))
        } else {
            HostScalar::Fixed(self.real())
        };
        let name = self.name("scale");
        let y = self.builder.scale(&name, x.uid, factor)?;
        self.note_read(&[x.uid]);
        self.pointwise_result(y, &x.dims, &[x.dtype])
    }
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
        assert_eq!(ARITHMETIC.map(|f| binary(f, 5.0, 3.0)), [8.0, 2.0, 15.0, 5.0, 3.0]);
    }

    const ACTIVATIONS: [UnaryOp; 17] = [
        UnaryOp::Relu,
        UnaryOp::LeakyRelu { slope: Real(-2.5) },
        UnaryOp::ClippedRelu { lower: Real(-1.0), upper: Real(2.0), slope: Real(0.25) },
        UnaryOp::ClippedRelu { lower: Real(0.5), upper: Real(2.0), slope: Real(-0.5) },
        UnaryOp::Clamp { lower: Real(-1.0), upper: Real(0.5) },
        UnaryOp::GeluErf,
        UnaryOp::GeluTanh,
        UnaryOp::Silu,
        UnaryOp::Swish { beta: Real(1.7) },
        UnaryOp::Swish { beta: Real(-0.6) },
        UnaryOp::Sigmoid,
        UnaryOp::Tanh,
        UnaryOp::Elu { alpha: Real(1.3) },
        UnaryOp::Softplus { beta: Real(2.0) },
        UnaryOp::HardSwish,
        UnaryOp::HardSigmoid,
        UnaryOp::Mish,
    ];

    #[test]
    fn derivatives_are_those_of_finite_differences() {
        for f in ACTIVATIONS {
            assert!(f.is_activation());
            for i in -8000..8000 {
                // Between the grid points of every kink.
                let x = f64::from(i) / 1000.0 + 0.000_437;
                let step = 1e-5;
                let difference = (unary(f, x + step) - unary(f, x - step)) / (2.0 * step);
                assert!((derivative(f, x) - difference).abs() < 1e-8, "{f:?} at {x}: {} against {difference}", derivative(f, x));
            }
            assert!(derivative(f, 40.0).is_finite() && derivative(f, -40.0).is_finite(), "{f:?}");
            assert!(derivative(f, f64::NAN).is_nan());
        }
        assert_eq!(derivative(UnaryOp::Relu, 0.0), 0.0);
        // Where it is 0 on an interval, nothing is passed back, whatever comes in; else what comes in is multiplied.
        for f in ACTIVATIONS {
            for i in -8000..8000 {
                let x = f64::from(i) / 1000.0;
                let straight = [x, x + 1e-3, x - 1e-3].map(|x| derivative(f, x));
                assert!(straight != [0.0; 3] || is_flat(f, x), "{f:?} at {x}");
                for dy in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
                    let dx = binary(BinaryOp::Backward(f), dy, x);
                    if is_flat(f, x) {
                        assert_eq!((dx.to_bits(), derivative(f, x)), (0, 0.0), "{f:?} at {x}");
                    } else {
                        assert!(!dx.is_finite(), "{f:?} at {x}: {dx}");
                    }
                }
            }
            assert!(binary(BinaryOp::Backward(f), 1.0, f64::NAN).is_nan());
        }
        assert_eq!([-1.0, 0.5].map(|x| derivative(UnaryOp::Clamp { lower: Real(-1.0), upper: Real(0.5) }, x)), [0.0; 2]);
    }

    #[test]
    fn bounds_of_second_derivatives_hold_and_are_not_slack() {
        for f in ACTIVATIONS {
            let mut steepest = 0.0f64;
            for i in -8000..8000 {
                let (x, y) = (f64::from(i) / 1000.0, f64::from(i + 1) / 1000.0);
                if derivative_jumps(f).iter().any(|jump| (x..=y).contains(jump)) {
                    continue;
                }
                steepest = steepest.max((derivative(f, y) - derivative(f, x)).abs() * 1000.0);
            }
            let bound = derivative_lipschitz(f);
            assert!(steepest <= bound * (1.0 + 1e-6) + 1e-9, "{f:?}: {steepest} above {bound}");
            assert!(steepest >= bound * 0.98, "{f:?}: the bound {bound} is slack, {steepest}");
        }
    }

    #[test]
    fn functions_are_monotone_between_their_turns() {
        let others = [UnaryOp::Abs, UnaryOp::Not, UnaryOp::Sign, UnaryOp::Exp, UnaryOp::Floor, UnaryOp::Erf];
        for f in ACTIVATIONS.into_iter().chain(others) {
            let turns = turns(f);
            let mut ends = vec![-9.0];
            ends.extend(turns.iter().flat_map(|turn| [turn.next_down(), turn.next_up()]));
            ends.push(9.0);
            ends.sort_by(f64::total_cmp);
            for pair in ends.chunks(2) {
                let points: Vec<f64> = (0..=2000).map(|i| unary(f, pair[0] + (pair[1] - pair[0]) * f64::from(i) / 2000.0)).collect();
                let slack = 1e-15;
                let rises = points.is_sorted_by(|a, b| *a <= b + slack);
                let falls = points.is_sorted_by(|a, b| *a >= b - slack);
                assert!(rises || falls, "{f:?} turns between {pair:?}");
            }
        }
    }

    #[test]
    fn two_and_three_arguments() {
        assert_eq!(binary(BinaryOp::Mod, -7.0, 3.0), -1.0);
        assert_eq!(binary(BinaryOp::FloorMod, -7.0, 3.0), 2.0);
        assert_eq!(binary(BinaryOp::FloorMod, 7.0, -3.0), -2.0);
        assert_eq!(binary(BinaryOp::FloorMod, -6.0, 3.0), 0.0);
        assert_eq!(binary(BinaryOp::Pow, f64::NAN, 0.0), 1.0);
        assert_eq!(binary(BinaryOp::Pow, 1.0, f64::NAN), 1.0);
        assert_eq!(binary(BinaryOp::AddSquare, 1.0, -3.0), 10.0);
        assert_eq!(binary(BinaryOp::Atan2, 0.0, -1.0), std::f64::consts::PI);
        assert_eq!(binary(BinaryOp::Prelu, -2.0, 0.5), -1.0);
        assert_eq!([BinaryOp::Eq, BinaryOp::Ne, BinaryOp::Le].map(|f| binary(f, f64::NAN, f64::NAN)), [0.0, 1.0, 0.0]);
        assert_eq!([BinaryOp::And, BinaryOp::Or].map(|f| binary(f, f64::NAN, 0.0)), [0.0, 1.0]);
        assert_eq!(ternary(TernaryOp::Select, 1.0, f64::NAN, f64::NAN), 1.0);
        assert_eq!(ternary(TernaryOp::Select, f64::NAN, 2.0, -0.0), 2.0);
        assert_eq!(ternary(TernaryOp::PreluBackward, 3.0, -1.0, 0.5), 1.5);
        assert_eq!(unary(UnaryOp::Sign, -0.0), 0.0);
        assert_eq!(unary(UnaryOp::Round, 2.5), 2.0);
        assert_eq!([0.0, f64::NAN].map(|x| unary(UnaryOp::Not, x)), [1.0, 0.0]);
    }
}
