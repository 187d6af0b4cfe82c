//! Values whose type the graph knows, and every pointwise function on them.
//!
//! A loaded element stays as the bits that it was stored as until a function wants its value, so that what is only moved keeps all of them.

use verdigris_graph::{BinaryOp, Real, TernaryOp, UnaryOp};
use verdigris_kir::face::{Bf16, F16, Kernel, Val};
use verdigris_kir::inst::{Cache, CvtRound, Packed};
use verdigris_tensor::DType;

use super::compute::{self, Compute};
use super::math::{self, Math};

/// A value of a chain.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AnyVal<'k> {
    /// As stored.
    Stored(DType, Raw<'k>),
    /// Computed.
    F32(Val<'k, f32>),
    /// Computed.
    F64(Val<'k, f64>),
    /// A coordinate.
    I64(Val<'k, i64>),
}

/// An element's bits.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Raw<'k> {
    /// In the low byte, the others 0.
    B8(Val<'k, u32>),
    /// Two bytes.
    B16(Val<'k, u16>),
    /// Four bytes.
    B32(Val<'k, u32>),
    /// Eight bytes.
    B64(Val<'k, u64>),
}

/// A type that chains compute in.
pub(crate) trait Chained: Math {
    /// As a value of a chain.
    fn wrap(value: Val<'_, Self>) -> AnyVal<'_>;

    /// The function that needs f64 to be exact, done there.
    fn pow<'k>(x: Val<'k, Self>, z: Val<'k, Self>) -> Val<'k, Self> {
        Self::from_f64(math::pow(Self::to_f64(x), Self::to_f64(z)))
    }

    /// Likewise.
    fn fmod<'k>(x: Val<'k, Self>, z: Val<'k, Self>) -> Val<'k, Self> {
        Self::from_f64(math::fmod(Self::to_f64(x), Self::to_f64(z)))
    }
}

impl Chained for f32 {
    fn wrap(value: Val<'_, f32>) -> AnyVal<'_> {
        AnyVal::F32(value)
    }
}

impl Chained for f64 {
    fn wrap(value: Val<'_, f64>) -> AnyVal<'_> {
        AnyVal::F64(value)
    }
}

impl<'k> AnyVal<'k> {
    /// Whether functions of it compute in f64.
    fn is_double(self) -> bool {
        matches!(self, AnyVal::F64(_) | AnyVal::Stored(DType::F64, _))
    }

    /// The value in the type computed in.
    pub(crate) fn get<T: Chained>(self, k: Kernel<'k>) -> Val<'k, T> {
        match self {
            AnyVal::F32(value) => T::from_f32(value),
            AnyVal::F64(value) => T::from_f64(value),
            AnyVal::I64(value) => value.convert(CvtRound::Nearest),
            AnyVal::Stored(dtype, raw) => decode(k, dtype, raw),
        }
    }

    /// The bits that it is stored as, rounded once.
    pub(crate) fn encoded(self, k: Kernel<'k>, dtype: DType) -> Raw<'k> {
        match self {
            AnyVal::Stored(own, raw) if own == dtype => raw,
            AnyVal::I64(value) if dtype == DType::I64 => Raw::B64(value.unsigned()),
            AnyVal::I64(value) if dtype == DType::I32 => Raw::B32(value.convert_saturating::<i32>(CvtRound::None).unsigned()),
            AnyVal::Stored(DType::I32, Raw::B32(bits)) if dtype == DType::I64 => Raw::B64(bits.signed().widen().unsigned()),
            value if value.is_double() || matches!(value, AnyVal::I64(_)) => encode(k, dtype, value.get::<f64>(k)),
            value => encode(k, dtype, value.get::<f32>(k)),
        }
    }

    /// The value, as if it had been stored and read again.
    pub(crate) fn rounded(self, k: Kernel<'k>, dtype: DType) -> AnyVal<'k> {
        match dtype {
            DType::F32 => AnyVal::F32(self.get(k)),
            DType::F64 => AnyVal::F64(self.get(k)),
            _ => AnyVal::Stored(dtype, self.encoded(k, dtype)),
        }
    }
}

/// Loads `many` neighbouring elements: 16 bytes at a time, or all at once if they are fewer.
pub(crate) fn load_raw<'k>(k: Kernel<'k>, dtype: DType, address: Val<'k, u64>, many: u32) -> Vec<Raw<'k>> {
    let bytes = dtype.bytes() as u32;
    if many == 1 {
        return vec![match bytes {
            1 => Raw::B8(k.ld_global_byte(address, 0, false)),
            2 => Raw::B16(k.ld_global::<u16>(address, 0)),
            4 => Raw::B32(k.ld_global::<u32>(address, 0)),
            _ => Raw::B64(k.ld_global::<u64>(address, 0)),
        }];
    }
    let total = many * bytes;
    let mut raws = Vec::new();
    for at in (0..total).step_by(16) {
        let offset = i64::from(at);
        let words: Vec<Val<'k, u32>> = match (total - at).min(16) {
            2 => vec![k.ld_global::<u16>(address, offset).convert(CvtRound::None)],
            4 => vec![k.ld_global::<u32>(address, offset)],
            size => k.ld_global_vector::<u32>(address, offset, (size / 4) as u8, Cache::Default),
        };
        let size = (total - at).min(16);
        for element in 0..size / bytes {
            let begin = element * bytes;
            let word = words[(begin / 4) as usize];
            raws.push(match bytes {
                1 => Raw::B8((word >> (8 * (begin % 4))) & 0xffu32),
                2 => Raw::B16((word >> (8 * (begin % 4))).low16()),
                4 => Raw::B32(word),
                _ => Raw::B64(k.join32(word, words[(begin / 4) as usize + 1])),
            });
        }
    }
    raws
}

/// Stores neighbouring elements: 16 bytes at a time, or all at once if they are fewer.
pub(crate) fn store_raw<'k>(k: Kernel<'k>, address: Val<'k, u64>, raws: &[Raw<'k>]) {
    if let [raw] = raws {
        match *raw {
            Raw::B8(bits) => k.st_global_byte(address, 0, bits),
            Raw::B16(bits) => k.st_global(address, 0, bits),
            Raw::B32(bits) => k.st_global(address, 0, bits),
            Raw::B64(bits) => k.st_global(address, 0, bits),
        }
        return;
    }
    let words: Vec<Val<'k, u32>> = match raws[0] {
        Raw::B8(_) => {
            let byte = |raw: &Raw<'k>| if let Raw::B8(bits) = *raw { bits } else { k.constant(0) };
            let quad = |four: &[Raw<'k>]| four.iter().enumerate().map(|(i, raw)| byte(raw) << (8 * i as u32)).reduce(|all, one| all | one);
            raws.chunks(4).filter_map(quad).collect()
        }
        Raw::B16(_) => {
            let half = |raw: &Raw<'k>| if let Raw::B16(bits) = *raw { bits } else { k.constant(0) };
            raws.chunks(2).map(|pair| k.join16(half(&pair[0]), half(&pair[1]))).collect()
        }
        Raw::B32(_) | Raw::B64(_) => raws
            .iter()
            .flat_map(|raw| match *raw {
                Raw::B64(bits) => {
                    let (low, high) = k.split32(bits);
                    vec![low, high]
                }
                Raw::B32(bits) => vec![bits],
                _ => Vec::new(),
            })
            .collect(),
    };
    if let (Raw::B8(_), 2, [word]) = (raws[0], raws.len(), words.as_slice()) {
        k.st_global(address, 0, word.low16());
        return;
    }
    for (i, group) in words.chunks(4).enumerate() {
        match group {
            [word] => k.st_global(address, 16 * i as i64, *word),
            _ => k.st_global_vector(address, 16 * i as i64, group, Cache::Default),
        }
    }
}

/// The value of stored bits.
fn decode<'k, T: Compute>(k: Kernel<'k>, dtype: DType, raw: Raw<'k>) -> Val<'k, T> {
    match (dtype, raw) {
        (DType::F16 | DType::Bf16, Raw::B16(bits)) => T::from_f32(compute::decode_half(dtype, bits)),
        (DType::F32 | DType::Tf32, Raw::B32(bits)) => T::from_f32(bits.bitcast()),
        (DType::I32, Raw::B32(bits)) => T::from_i32(bits.signed()),
        (DType::F64, Raw::B64(bits)) => T::from_f64(bits.bitcast()),
        (DType::I64, Raw::B64(bits)) => bits.bitcast::<i64>().convert(CvtRound::Nearest),
        (DType::I8, Raw::B8(bits)) => T::from_i32((bits << 24).signed() >> 24),
        (_, Raw::B8(bits)) if dtype.is_fp8() => T::from_f32(compute::decode_byte(k, dtype, bits)),
        (_, Raw::B8(bits)) => T::from_i32(bits.signed()),
        // Loads give each type the width that it has.
        (dtype, raw) => unreachable!("{dtype} in {raw:?}"),
    }
}

/// The bits of a value, rounded to nearest even, saturating in fp8 and integers.
fn encode<'k, T: Compute>(k: Kernel<'k>, dtype: DType, value: Val<'k, T>) -> Raw<'k> {
    match dtype {
        DType::F64 => Raw::B64(T::to_f64(value).bitcast()),
        DType::F32 | DType::Tf32 => Raw::B32(T::to_f32(value).bitcast()),
        DType::F16 => Raw::B16(value.convert::<F16>(CvtRound::Nearest).bitcast()),
        DType::Bf16 => Raw::B16(T::to_f32(value).convert::<Bf16>(CvtRound::Nearest).bitcast()),
        DType::E4m3 | DType::E5m2 => {
            let value = T::to_f32(value);
            let pair: Val<'k, u16> = k.pack(if dtype == DType::E4m3 { Packed::E4m3x2 } else { Packed::E5m2x2 }, value, value);
            Raw::B8(pair.convert::<u32>(CvtRound::None) & 0xffu32)
        }
        DType::I8 | DType::U8 | DType::Bool => {
            Raw::B8(k.round_to_byte::<T>(compute::without_nan(k, dtype, value), dtype == DType::I8) & 0xffu32)
        }
        DType::I32 => Raw::B32(compute::without_nan(k, dtype, value).convert::<i32>(CvtRound::IntNearest).unsigned()),
        DType::I64 => Raw::B64(compute::without_nan(k, dtype, value).convert::<i64>(CvtRound::IntNearest).unsigned()),
    }
}

/// The attributes of a function, in the order in which [`unary`] takes them.
pub(crate) fn attributes(f: UnaryOp) -> Vec<f64> {
    match f {
        UnaryOp::LeakyRelu { slope } => vec![slope.0],
        UnaryOp::Clamp { lower, upper } => vec![lower.0, upper.0],
        UnaryOp::ClippedRelu { lower, upper, slope } => vec![lower.0, upper.0, slope.0],
        UnaryOp::Elu { alpha } => vec![alpha.0],
        UnaryOp::Softplus { beta } | UnaryOp::Swish { beta } => vec![beta.0],
        UnaryOp::Affine { scale, shift } => vec![scale.0, shift.0],
        _ => Vec::new(),
    }
}

/// The attributes of a function of two values.
pub(crate) fn binary_attributes(f: BinaryOp) -> Vec<f64> {
    if let BinaryOp::Backward(f) = f { attributes(f) } else { Vec::new() }
}

/// The function as far as it shapes code.
pub(crate) fn without_attributes(f: UnaryOp) -> UnaryOp {
    const NONE: Real = Real(0.0);
    match f {
        UnaryOp::LeakyRelu { .. } => UnaryOp::LeakyRelu { slope: NONE },
        UnaryOp::Clamp { .. } => UnaryOp::Clamp { lower: NONE, upper: NONE },
        UnaryOp::ClippedRelu { .. } => UnaryOp::ClippedRelu { lower: NONE, upper: NONE, slope: NONE },
        UnaryOp::Elu { .. } => UnaryOp::Elu { alpha: NONE },
        UnaryOp::Softplus { .. } => UnaryOp::Softplus { beta: NONE },
        UnaryOp::Swish { .. } => UnaryOp::Swish { beta: NONE },
        UnaryOp::Affine { .. } => UnaryOp::Affine { scale: NONE, shift: NONE },
        other => other,
    }
}

/// `f(x)`.
pub(crate) fn unary<'k>(k: Kernel<'k>, f: UnaryOp, x: AnyVal<'k>, attributes: &[Val<'k, f64>]) -> AnyVal<'k> {
    if x.is_double() { unary_in::<f64>(k, f, x, attributes) } else { unary_in::<f32>(k, f, x, attributes) }
}

/// `f(x, z)`.
pub(crate) fn binary<'k>(k: Kernel<'k>, f: BinaryOp, x: AnyVal<'k>, z: AnyVal<'k>, attributes: &[Val<'k, f64>]) -> AnyVal<'k> {
    if x.is_double() || z.is_double() { binary_in::<f64>(k, f, x, z, attributes) } else { binary_in::<f32>(k, f, x, z, attributes) }
}

/// `f(x, z, t)`.
pub(crate) fn ternary<'k>(k: Kernel<'k>, f: TernaryOp, x: AnyVal<'k>, z: AnyVal<'k>, t: AnyVal<'k>) -> AnyVal<'k> {
    if x.is_double() || z.is_double() || t.is_double() { ternary_in::<f64>(k, f, [x, z, t]) } else { ternary_in::<f32>(k, f, [x, z, t]) }
}

fn truth<'k, T: Compute>(condition: Val<'k, bool>, k: Kernel<'k>) -> Val<'k, T> {
    k.select(condition, T::constant(k, 1.0), T::constant(k, 0.0))
}

fn unary_in<'k, T: Chained>(k: Kernel<'k>, f: UnaryOp, x: AnyVal<'k>, attributes: &[Val<'k, f64>]) -> AnyVal<'k> {
    let x: Val<'k, T> = x.get(k);
    let a: Vec<Val<'k, T>> = attributes.iter().map(|&attribute| T::from_f64(attribute)).collect();
    T::wrap(function(k, f, x, &a))
}

fn function<'k, T: Chained>(k: Kernel<'k>, f: UnaryOp, x: Val<'k, T>, a: &[Val<'k, T>]) -> Val<'k, T> {
    let number = |value| T::constant(k, value);
    let (zero, one) = (number(0.0), number(1.0));
    match f {
        UnaryOp::ClippedRelu { .. } => {
            let low = k.fma(a[2], x - a[0], a[0]);
            k.select(x.le(a[0]), low, T::min_nan(x, a[1]))
        }
        UnaryOp::Elu { .. } => k.select(x.gt(zero), x, a[0] * math::exp_m1(x)),
        UnaryOp::Softplus { .. } => T::quotient(math::softplus(x * a[0]), a[0]),
        UnaryOp::Swish { .. } => x * compute::sigmoid(x * a[0]),
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
        UnaryOp::Identity
        | UnaryOp::Neg
        | UnaryOp::Abs
        | UnaryOp::Relu
        | UnaryOp::LeakyRelu { .. }
        | UnaryOp::Clamp { .. }
        | UnaryOp::GeluErf
        | UnaryOp::GeluTanh
        | UnaryOp::Silu
        | UnaryOp::Sigmoid
        | UnaryOp::Tanh => compute::unary(f, x, a),
    }
}

fn hard_sigmoid<'k, T: Chained>(k: Kernel<'k>, x: Val<'k, T>) -> Val<'k, T> {
    let number = |value| T::constant(k, value);
    T::quotient(T::min_nan(T::max_nan(x + number(3.0), number(0.0)), number(6.0)), number(6.0))
}

/// `tanh(ln(1 + eˣ))` = `n / (n + 2)` with `n = e · (e + 2)`.
fn mish_gate<'k, T: Chained>(k: Kernel<'k>, x: Val<'k, T>) -> Val<'k, T> {
    let number = |value| T::constant(k, value);
    let e = T::exp(T::min_nan(x, number(20.0)));
    let n = e * (e + number(2.0));
    let gate = T::quotient(n, n + number(2.0));
    // Beyond, it is 1 to all digits of either type.
    k.select(x.gt(number(20.0)), number(1.0), gate)
}

/// `f′(x)` of an activation.
fn derivative<'k, T: Chained>(k: Kernel<'k>, f: UnaryOp, x: Val<'k, T>, a: &[Val<'k, T>]) -> Val<'k, T> {
    let number = |value| T::constant(k, value);
    let (zero, one, two) = (number(0.0), number(1.0), number(2.0));
    // Far out a gate's derivative is 0 or 1 to all digits; nearer, no intermediate overflows.
    let within = |limit: f64| T::min_nan(T::max_nan(x, number(-limit)), number(limit));
    let gated = |u: Val<'k, T>| {
        let s = compute::sigmoid(u);
        k.fma(u * s, one - s, s)
    };
    let inside = |lower: Val<'k, T>, upper: Val<'k, T>, value: Val<'k, T>| k.select(x.gt(lower) & x.lt(upper), value, zero);
    let result = match f {
        UnaryOp::Relu => truth(x.gt(zero), k),
        UnaryOp::LeakyRelu { .. } => k.select(x.gt(zero), one, a[0]),
        UnaryOp::Clamp { .. } => inside(a[0], a[1], one),
        UnaryOp::ClippedRelu { .. } => k.select(x.le(a[0]), a[2], truth(x.lt(a[1]), k)),
        UnaryOp::GeluErf => {
            let x = within(60.0);
            let tail = math::erfc_positive(x.abs() * number(std::f64::consts::FRAC_1_SQRT_2)) * number(0.5);
            let below = k.select(x.lt(zero), tail, one - tail);
            let density = T::exp(x * x * number(-0.5)) * number(1.0 / (2.0 * std::f64::consts::PI).sqrt());
            k.fma(x, density, below)
        }
        UnaryOp::GeluTanh => {
            let x = within(40.0);
            let root = 2.0 * (2.0 / std::f64::consts::PI).sqrt();
            let s = compute::sigmoid(k.fma(x * x, x * number(0.044715), x) * number(root));
            let inner = k.fma(x * x, number(3.0 * 0.044715 * root), number(root));
            k.fma(x * inner * s, one - s, s)
        }
        UnaryOp::Silu => gated(within(1e4)),
        UnaryOp::Swish { .. } => gated(T::min_nan(T::max_nan(x * a[0], number(-1e4)), number(1e4))),
        UnaryOp::Sigmoid => {
            let e = T::exp(-x.abs());
            T::quotient(e, (one + e) * (one + e))
        }
        UnaryOp::Tanh => {
            let e = T::exp(x.abs() * number(-2.0));
            T::quotient(e * number(4.0), (one + e) * (one + e))
        }
        UnaryOp::Elu { .. } => k.select(x.gt(zero), one, a[0] * T::exp(x)),
        UnaryOp::Softplus { .. } => compute::sigmoid(x * a[0]),
        UnaryOp::HardSwish => {
            let middle = T::quotient(k.fma(x, two, number(3.0)), number(6.0));
            k.select(x.ge(number(3.0)), one, inside(number(-3.0), number(3.0), middle))
        }
        UnaryOp::HardSigmoid => inside(number(-3.0), number(3.0), number(1.0 / 6.0)),
        UnaryOp::Mish => {
            let x = within(40.0);
            let e = T::exp(T::min_nan(x, number(20.0)));
            let n = e * (e + two);
            // 1 − gate² = 4 (n + 1) / (n + 2)².
            let bend = T::quotient(T::quotient(number(4.0) * (n + one), n + two), n + two);
            k.fma(x * compute::sigmoid(x), bend, mish_gate(k, x))
        }
        // `BinaryOp::check` is the gate.
        other => unreachable!("`{}` is no activation", other.name()),
    };
    k.select(x.ne(x), x, result)
}

fn binary_in<'k, T: Chained>(k: Kernel<'k>, f: BinaryOp, x: AnyVal<'k>, z: AnyVal<'k>, attributes: &[Val<'k, f64>]) -> AnyVal<'k> {
    let (x, z): (Val<'k, T>, Val<'k, T>) = (x.get(k), z.get(k));
    let a: Vec<Val<'k, T>> = attributes.iter().map(|&attribute| T::from_f64(attribute)).collect();
    let zero = T::constant(k, 0.0);
    T::wrap(match f {
        BinaryOp::Add => x + z,
        BinaryOp::Sub => x - z,
        BinaryOp::Mul => x * z,
        BinaryOp::Max => T::max_nan(x, z),
        BinaryOp::Min => T::min_nan(x, z),
        BinaryOp::Div => T::quotient(x, z),
        BinaryOp::Mod => T::fmod(x, z),
        BinaryOp::FloorMod => {
            let rest = T::fmod(x, z);
            let differ = rest.lt(zero) ^ z.lt(zero);
            k.select(rest.ne(zero) & differ, rest + z, rest)
        }
        BinaryOp::Pow => T::pow(x, z),
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
        BinaryOp::Backward(f) => x * derivative(k, f, z, &a),
    })
}

fn ternary_in<'k, T: Chained>(k: Kernel<'k>, f: TernaryOp, [x, z, t]: [AnyVal<'k>; 3]) -> AnyVal<'k> {
    let [x, z, t]: [Val<'k, T>; 3] = [x.get(k), z.get(k), t.get(k)];
    let zero = T::constant(k, 0.0);
    T::wrap(match f {
        TernaryOp::Select => k.select(t.ne(zero), x, z),
        TernaryOp::PreluBackward => k.select(z.gt(zero), x, k.select(z.ne(z), z, t * x)),
    })
}
