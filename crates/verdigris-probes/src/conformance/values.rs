//! Seeded inputs that look for trouble.

use verdigris_kir::inst::{MatrixType, Op};
use verdigris_kir::ir::Ty;
use verdigris_tensor::num::{Format, Overflow, Rounding};

/// Random numbers. (SplitMix64: Steele, Lea, Flood, OOPSLA 2014.)
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    /// A sequence of its own for each name.
    pub(super) fn new(name: &str) -> Random {
        // FNV-1a, so that a probe keeps its inputs when others come or go.
        Random(name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)))
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub(super) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub(super) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    /// In [0, 1).
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub(super) fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }
}

/// What an operand is for, where that narrows its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Domain {
    /// Anything.
    Any,
    /// Small shift amounts, and some beyond the width.
    Amount,
    /// A bit field's position and length: PTX defines 0 to 255.
    Field,
    /// An angle for which PTX bounds the error: up to 100π.
    Angle,
}

impl Domain {
    pub(super) fn of(op: &Op, operand: usize) -> Domain {
        match op {
            Op::Shl { .. } | Op::Shr { .. } if operand == 1 => Domain::Amount,
            Op::Funnel { .. } if operand == 2 => Domain::Amount,
            Op::Bfe { .. } if operand >= 1 => Domain::Field,
            Op::Bfi { .. } if operand >= 2 => Domain::Field,
            Op::Sin { .. } | Op::Cos { .. } => Domain::Angle,
            _ => Domain::Any,
        }
    }
}

/// Values on which roundings and conversions turn.
const TURNING: &[f64] = &[
    0.5,
    1.0,
    1.5,
    2.0,
    2.5,
    3.5,
    0.25,
    0.75,
    0.499_999_97,
    0.500_000_06,
    1.000_000_1,
    126.5,
    127.0,
    127.5,
    128.0,
    128.5,
    254.5,
    255.0,
    255.5,
    256.0,
    448.0,
    464.0,
    465.0,
    480.0,
    2047.5,
    2048.0,
    2049.0,
    4098.0,
    32767.5,
    32768.0,
    65504.0,
    65519.0,
    65520.0,
    65535.5,
    65536.0,
    57344.0,
    61440.0,
    16777215.0,
    16777216.0,
    16777217.0,
    2147483520.0,
    2147483647.0,
    2147483648.0,
    4294967040.0,
    4294967295.0,
    4294967296.0,
    9.223_371_487_098_962e18,
    9.223_372_036_854_775e18,
    9.223_372_036_854_776e18,
    1.844_674_407_370_955_2e19,
    3.4e38,
    3.402_823_5e38,
    1.175_494_4e-38,
    1.0e-40,
    1.4e-45,
    6.103_515_6e-5,
    6.0e-8,
    2.98e-8,
    3.0e-8,
    0.015_625,
    0.001_953_125,
    0.000_976_562_5,
    1.0e-5,
    7.6e-6,
    2.350_988_7e-38,
    0.125,
    3.0,
    10.0,
    149.0,
    126.0,
    150.0,
    1.7e38,
];

fn float(ty: Ty, random: &mut Random) -> u64 {
    let (format, bits) = match ty {
        Ty::F16 => (Format::F16, 16),
        Ty::Bf16 => (Format::BF16, 16),
        Ty::F32 => (Format::F32, 32),
        _ => return float64(random),
    };
    let sign = u64::from(format.sign_bit()) * random.below(2);
    let encode = |value: f64| u64::from(format.encode(value, Rounding::NearestEven, Overflow::Ieee));
    match random.below(16) {
        0 => sign,
        1 => {
            let mantissa = (1u64 << format.mantissa_bits) - 1;
            let infinity = u64::from(format.infinity());
            sign | random.pick(&[1, 2, mantissa, mantissa - 1, mantissa + 1, mantissa + 2, infinity - 1, infinity - 2])
        }
        2 => sign | u64::from(format.infinity()),
        3 => sign | u64::from(format.infinity()) | random.next() & ((1u64 << format.mantissa_bits) - 1),
        4 | 5 => sign ^ encode(random.pick(TURNING)),
        6 => (sign ^ encode(random.pick(TURNING))).wrapping_add(random.pick(&[1, u64::MAX])) & ((1u64 << bits) - 1),
        7 => sign | random.next() & ((1u64 << format.mantissa_bits) - 1),
        8 | 9 => sign ^ encode((random.below(600) as f64) / 2.0),
        10 | 11 => random.next() & ((1u64 << bits) - 1),
        _ => sign ^ encode(4.0 * random.unit()),
    }
}

fn float64(random: &mut Random) -> u64 {
    let sign = (1u64 << 63) * random.below(2);
    match random.below(16) {
        0 => sign,
        1 => sign | random.pick(&[1, 2, (1 << 52) - 1, 1 << 52, (1 << 52) + 1, 0x7fef_ffff_ffff_ffff]),
        2 => sign | 0x7ff0_0000_0000_0000,
        3 => sign | 0x7ff0_0000_0000_0000 | random.next() & ((1 << 52) - 1),
        4 | 5 => sign ^ random.pick(TURNING).to_bits(),
        6 => (sign ^ random.pick(TURNING).to_bits()).wrapping_add(random.pick(&[1, u64::MAX])),
        // A tie of f32, or its neighbour.
        7 => f64::from(f32::from_bits(random.next() as u32)).to_bits().wrapping_add((1 << 28) + random.below(3) - 1),
        8 | 9 => sign ^ (random.below(600) as f64 / 2.0).to_bits(),
        10 => random.next(),
        11 => sign | random.next() & ((1 << 52) - 1),
        _ => sign ^ (4.0 * random.unit()).to_bits(),
    }
}

fn integer(bits: u32, random: &mut Random) -> u64 {
    let mask = u64::MAX >> (64 - bits);
    let top = 1u64 << (bits - 1);
    mask & match random.below(8) {
        0 => random.pick(&[0, 1, u64::MAX, top, top - 1, top + 1, 0x7f, 0x80, 0xff, 0x100, 0x7fff, 0x8000, 0xffff]),
        1 => 1 << random.below(bits.into()),
        2 => (1u64 << random.below(bits.into())).wrapping_neg(),
        3 => random.below(300),
        4 => random.below(300).wrapping_neg(),
        5 => random.next() >> random.below(64),
        _ => random.next(),
    }
}

/// One value of a type, as bits.
pub(super) fn value(ty: Ty, domain: Domain, random: &mut Random) -> u64 {
    match domain {
        Domain::Amount if random.one_in(8) => random.next() & 0xffff_ffff,
        Domain::Amount => random.below(70),
        Domain::Field if random.one_in(8) => random.below(256),
        Domain::Field => random.below(66),
        Domain::Angle => {
            let sign = 0x8000_0000 * random.below(2);
            match random.below(8) {
                0 => sign | random.pick(&[0, 1, 0x007f_ffff, 0x0080_0000, 0x7f80_0000, 0x7fff_ffff, 0x3fc9_0fdb, 0x4049_0fdb]),
                1 | 2 => sign | u64::from((300.0 * random.unit() as f32).to_bits()),
                3 => sign | u64::from((random.unit() as f32 * 1.0e-6).to_bits()),
                _ => sign | u64::from((3.2 * random.unit() as f32).to_bits()),
            }
        }
        Domain::Any => match ty {
            Ty::Pred => random.below(2),
            Ty::F16x2 => float(Ty::F16, random) | float(Ty::F16, random) << 16,
            Ty::Bf16x2 => float(Ty::Bf16, random) | float(Ty::Bf16, random) << 16,
            Ty::F16 | Ty::Bf16 | Ty::F32 | Ty::F64 => float(ty, random),
            other => integer(other.bits(), random),
        },
    }
}

/// The operands of one lane: some equal, some opposite, some that cancel to almost nothing.
pub(super) fn tuple(types: &[Ty], domains: &[Domain], random: &mut Random) -> Vec<u64> {
    let mut tuple: Vec<u64> = types.iter().zip(domains).map(|(&ty, &domain)| value(ty, domain, random)).collect();
    if types.len() >= 2 && types[0] == types[1] && domains[1] == Domain::Any && random.one_in(6) {
        let sign = if types[0].is_float() { sign_bits(types[0]) * random.below(2) } else { 0 };
        let width = u64::MAX >> (64 - types[0].bits().max(1));
        tuple[1] = (tuple[0] ^ sign).wrapping_add(random.pick(&[0, 0, 1, u64::MAX])) & width;
    }
    if types.len() == 3 && types[0] == types[2] && types[0].is_float() && random.one_in(3) {
        tuple[2] =
            opposite_product(types[0], tuple[0], tuple[1]).wrapping_add(random.pick(&[0, 0, 1])) & (u64::MAX >> (64 - types[0].bits()));
    }
    tuple
}

fn sign_bits(ty: Ty) -> u64 {
    match ty {
        Ty::F16x2 | Ty::Bf16x2 => 0x8000_8000,
        other => 1 << (other.bits() - 1),
    }
}

/// `−a·b`, rounded.
fn opposite_product(ty: Ty, a: u64, b: u64) -> u64 {
    let half = |format: Format, shift: u32| {
        let code = |word: u64| (word >> shift) as u32 & 0xffff;
        u64::from(format.encode(-(format.decode(code(a)) * format.decode(code(b))), Rounding::NearestEven, Overflow::Ieee)) << shift
    };
    match ty {
        Ty::F32 => u64::from((-(f32::from_bits(a as u32) * f32::from_bits(b as u32))).to_bits()),
        Ty::F64 => (-(f64::from_bits(a) * f64::from_bits(b))).to_bits(),
        Ty::F16 => half(Format::F16, 0),
        Ty::Bf16 => half(Format::BF16, 0),
        Ty::F16x2 => half(Format::F16, 0) | half(Format::F16, 16),
        _ => half(Format::BF16, 0) | half(Format::BF16, 16),
    }
}

/// Bits of one element of a matrix: ordinary numbers, whose products and sums stay in range; or, if `special`, now and then a zero,
/// a subnormal, an infinity or a NaN.
pub(super) fn element(ty: MatrixType, special: bool, random: &mut Random) -> u64 {
    let format = match ty {
        MatrixType::F16 => Format::F16,
        MatrixType::Bf16 => Format::BF16,
        MatrixType::Tf32 | MatrixType::F32 => Format::F32,
        MatrixType::E4m3 => Format::E4M3,
        MatrixType::E5m2 => Format::E5M2,
        MatrixType::F64 => {
            let sign = (1u64 << 63) * random.below(2);
            let odd = special && random.one_in(24);
            return sign | if odd { random.pick(&[0, 1, 0x7ff0_0000_0000_0000]) } else { (random.unit() * 4.0).to_bits() };
        }
        integers => return random.next() & (u64::MAX >> (64 - integers.bits())),
    };
    let sign = u64::from(format.sign_bit()) * random.below(2);
    if special && random.one_in(24) {
        let mantissa = (1u64 << format.mantissa_bits) - 1;
        return sign | random.pick(&[0, 0, 0, 1, mantissa, u64::from(format.infinity()), u64::from(format.canonical_nan())]);
    }
    // Magnitudes from 1/32 to 2, all mantissa bits in use.
    let exponent = i64::from(format.bias()) - 5 + random.below(6) as i64;
    sign | (exponent as u64) << format.mantissa_bits | random.next() & ((1u64 << format.mantissa_bits) - 1)
}

/// `bytes` bytes full of elements.
pub(super) fn elements(ty: MatrixType, bytes: usize, special: bool, random: &mut Random) -> Vec<u8> {
    let bits = ty.bits();
    let mut out = Vec::with_capacity(bytes);
    while out.len() < bytes {
        let word = if bits == 64 {
            element(ty, special, random)
        } else {
            (0..64 / bits).fold(0, |word, index| word | element(ty, special, random) << (index * bits))
        };
        out.extend_from_slice(&word.to_le_bytes());
    }
    out.truncate(bytes);
    out
}

/// Clears the sign of every element, so that no two cancel.
pub(super) fn magnitudes(ty: MatrixType, bytes: &[u8]) -> Vec<u8> {
    let keep: u64 = match ty {
        MatrixType::F16 | MatrixType::Bf16 => 0x7fff_7fff_7fff_7fff,
        MatrixType::Tf32 | MatrixType::F32 => 0x7fff_ffff_7fff_ffff,
        MatrixType::F64 => u64::MAX >> 1,
        MatrixType::E4m3 | MatrixType::E5m2 => 0x7f7f_7f7f_7f7f_7f7f,
        _ => u64::MAX,
    };
    bytes.iter().enumerate().map(|(at, &byte)| byte & keep.to_le_bytes()[at % 8]).collect()
}

/// A word of sparsity metadata: four bits for each group, two places in ascending order (tf32: one of two).
pub(super) fn metadata(ty: MatrixType, random: &mut Random) -> u32 {
    let choices: &[u32] = if ty == MatrixType::Tf32 { &[0b0100, 0b1110] } else { &[0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110] };
    (0..8).fold(0, |word, nibble| word | random.pick(choices) << (4 * nibble))
}
