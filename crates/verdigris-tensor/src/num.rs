//! Exact conversions between the small floating-point formats, the host's `f32` and `f64`, and 8-bit integers.
//!
//! One encoder and one decoder serve all formats ([`Format::encode`], [`Format::decode`]). The encoder starts from `f64` bits and
//! rounds once; since every `f32` is an `f64`, there is no double rounding from either. The named functions ([`f16_to_f32`],
//! [`f32_to_bf16`], …) are these two with the format fixed, so that the compiler folds the format away: they are meant for hot loops.
//!
//! NaN follows PTX: a conversion of any NaN gives the format's canonical NaN, positive with every exponent and mantissa bit set
//! (`0x7fff` for f16 and bf16, `0x7f` for both fp8 types, `0x7fffffff` for f32 and tf32).
//!
//! **Source:** IEEE 754-2019; OCP 8-bit Floating Point Specification 1.0; PTX ISA, `cvt`.

use crate::dtype::DType;

/// How a value between two representable ones is rounded.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Rounding {
    /// To the nearest, a tie to the even code (PTX `.rn`).
    NearestEven,
    /// To the nearest, a tie away from zero (PTX `.rna`, which `cvt.rna.tf32.f32` uses).
    NearestAway,
    /// Toward zero (PTX `.rz`).
    TowardZero,
    /// Toward −∞ (PTX `.rm`).
    Down,
    /// Toward +∞ (PTX `.rp`).
    Up,
}

/// What becomes of a value beyond the largest finite one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Overflow {
    /// As IEEE 754: infinity where the rounding direction leads there, else the largest finite value. A format without infinity
    /// (e4m3) gives its NaN in infinity's place, with the sign kept.
    Ieee,
    /// The largest finite value with the sign kept, for infinities too (PTX `.satfinite`). NaN stays NaN.
    Saturate,
}

/// A binary floating-point format of at most 32 bits: sign, exponent with the usual bias 2^(e−1) − 1, mantissa; subnormals.
///
/// Codes are right-aligned in a `u32`. A tf32 code therefore has 19 bits; [`tf32_round`] gives the 32-bit word that holds it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Format {
    /// Width of the exponent field.
    pub exponent_bits: u32,
    /// Width of the mantissa field, the implicit bit not counted.
    pub mantissa_bits: u32,
    /// Whether the top exponent holds infinity and NaNs as IEEE 754 has it. If not, only the all-ones magnitude is special: NaN.
    pub has_infinity: bool,
}

impl Format {
    /// IEEE binary32.
    pub const F32: Format = Format { exponent_bits: 8, mantissa_bits: 23, has_infinity: true };
    /// 1 + 8 + 10 bits.
    pub const TF32: Format = Format { exponent_bits: 8, mantissa_bits: 10, has_infinity: true };
    /// IEEE binary16.
    pub const F16: Format = Format { exponent_bits: 5, mantissa_bits: 10, has_infinity: true };
    /// 1 + 8 + 7 bits.
    pub const BF16: Format = Format { exponent_bits: 8, mantissa_bits: 7, has_infinity: true };
    /// The fp8 format with the longer mantissa, without infinity.
    pub const E4M3: Format = Format { exponent_bits: 4, mantissa_bits: 3, has_infinity: false };
    /// The fp8 format with the wider range.
    pub const E5M2: Format = Format { exponent_bits: 5, mantissa_bits: 2, has_infinity: true };

    /// Bits of a code, the sign included.
    #[inline(always)]
    pub const fn bits(self) -> u32 {
        1 + self.exponent_bits + self.mantissa_bits
    }

    /// The exponent bias, 2^(e−1) − 1.
    #[inline(always)]
    pub const fn bias(self) -> i32 {
        (1 << (self.exponent_bits - 1)) - 1
    }

    /// The exponent of the smallest normal number, 1 − bias; subnormals share it.
    #[inline(always)]
    pub const fn min_exponent(self) -> i32 {
        1 - self.bias()
    }

    /// All bits but the sign.
    #[inline(always)]
    pub const fn magnitude_mask(self) -> u32 {
        (1 << (self.exponent_bits + self.mantissa_bits)) - 1
    }

    /// The sign bit.
    #[inline(always)]
    pub const fn sign_bit(self) -> u32 {
        1 << (self.exponent_bits + self.mantissa_bits)
    }

    /// The code of the canonical NaN: positive, all magnitude bits set.
    #[inline(always)]
    pub const fn canonical_nan(self) -> u32 {
        self.magnitude_mask()
    }

    /// The code of +∞, or of the positive NaN where the format has no infinity.
    #[inline(always)]
    pub const fn infinity(self) -> u32 {
        if self.has_infinity { self.magnitude_mask() >> self.mantissa_bits << self.mantissa_bits } else { self.magnitude_mask() }
    }

    /// The code of the largest finite value.
    #[inline(always)]
    pub const fn max_finite(self) -> u32 {
        self.infinity() - 1
    }

    /// Whether `code` is a NaN.
    #[inline(always)]
    pub const fn is_nan(self, code: u32) -> bool {
        let magnitude = code & self.magnitude_mask();
        if self.has_infinity { magnitude > self.infinity() } else { magnitude == self.magnitude_mask() }
    }

    /// Whether `code` is an infinity.
    #[inline(always)]
    pub const fn is_infinite(self, code: u32) -> bool {
        self.has_infinity && code & self.magnitude_mask() == self.infinity()
    }

    /// The largest finite value.
    #[inline]
    pub fn max_value(self) -> f64 {
        self.decode(self.max_finite())
    }

    /// The distance between neighbours at `value`: one unit in the last place. At and below the smallest normal number it is the
    /// spacing of the subnormals; a power of two takes the spacing above it; infinities and NaN give NaN.
    #[inline]
    pub fn ulp(self, value: f64) -> f64 {
        if !value.is_finite() {
            return f64::NAN;
        }
        let biased = ((value.to_bits() >> 52) & 0x7ff) as i32;
        let exponent = if biased == 0 { i32::MIN / 2 } else { biased - 1023 };
        let exponent = if exponent < self.min_exponent() { self.min_exponent() } else { exponent };
        power_of_two(exponent - self.mantissa_bits as i32)
    }

    /// The code nearest to `value` in the sense of `rounding`, with one rounding.
    #[inline(always)]
    pub const fn encode(self, value: f64, rounding: Rounding, overflow: Overflow) -> u32 {
        let bits = value.to_bits();
        let negative = bits >> 63 == 1;
        let sign = if negative { self.sign_bit() } else { 0 };
        let biased = ((bits >> 52) & 0x7ff) as i32;
        let fraction = bits & ((1 << 52) - 1);

        if biased == 0x7ff {
            if fraction != 0 {
                return self.canonical_nan();
            }
            return sign
                | match overflow {
                    Overflow::Ieee => self.infinity(),
                    Overflow::Saturate => self.max_finite(),
                };
        }

        // value = significand · 2^(exponent − 52)
        let (significand, exponent) = if biased == 0 { (fraction, -1022) } else { (fraction | 1 << 52, biased - 1023) };
        // The last kept bit weighs 2^(max(exponent, min_exponent) − mantissa_bits). Beyond a shift of 60 all bits are below half of
        // it, so a longer shift decides nothing else.
        let below = self.min_exponent() - exponent;
        let shift = 52 - self.mantissa_bits as i32 + if below > 0 { below } else { 0 };
        let shift = if shift > 60 { 60 } else { shift } as u32;
        let kept = significand >> shift;
        let rest = significand & ((1 << shift) - 1);
        let half = 1u64 << (shift - 1);
        let away = match rounding {
            Rounding::NearestEven => rest > half || (rest == half && kept & 1 == 1),
            Rounding::NearestAway => rest >= half,
            Rounding::TowardZero => false,
            Rounding::Down => negative && rest != 0,
            Rounding::Up => !negative && rest != 0,
        };
        // `kept` holds the implicit bit of a normal number, so the exponent field is one less than its value; a carry out of the
        // mantissa then moves into the exponent by itself.
        let exponent_field = if below > 0 { 0 } else { (-below) as u64 };
        let magnitude = (exponent_field << self.mantissa_bits) + kept + away as u64;

        if magnitude > self.max_finite() as u64 {
            let to_infinity = match rounding {
                Rounding::NearestEven | Rounding::NearestAway => true,
                Rounding::TowardZero => false,
                Rounding::Down => negative,
                Rounding::Up => !negative,
            };
            return sign
                | match overflow {
                    Overflow::Ieee if to_infinity => self.infinity(),
                    Overflow::Ieee | Overflow::Saturate => self.max_finite(),
                };
        }
        sign | magnitude as u32
    }

    /// The value of `code`, exactly. NaN codes give the canonical quiet NaN of [`Format::F32`], widened.
    #[inline(always)]
    pub const fn decode(self, code: u32) -> f64 {
        let single = self.decode_f32(code);
        if single.is_nan() { f64::from_bits(CANONICAL_NAN_F64) } else { single as f64 }
    }

    /// The value of `code` as `f32`, exactly: every format here is a subset of binary32. NaN codes give `0x7fffffff`.
    #[inline(always)]
    pub const fn decode_f32(self, code: u32) -> f32 {
        let magnitude = code & self.magnitude_mask();
        let sign = (code & self.sign_bit()) << (32 - self.bits());
        if self.is_nan(code) {
            return f32::from_bits(Format::F32.canonical_nan());
        }
        if self.is_infinite(code) {
            return f32::from_bits(sign | Format::F32.infinity());
        }
        let widen = 23 - self.mantissa_bits;
        if self.exponent_bits == 8 {
            // Same exponent range as binary32, subnormals included.
            return f32::from_bits(sign | magnitude << widen);
        }
        if magnitude >> self.mantissa_bits == 0 {
            // Subnormal: magnitude · 2^(min_exponent − mantissa_bits), a normal f32 with an exact product.
            let scale = f32::from_bits(((self.min_exponent() - self.mantissa_bits as i32 + 127) as u32) << 23);
            return f32::from_bits(sign | (magnitude as f32 * scale).to_bits());
        }
        f32::from_bits(sign | ((magnitude << widen) + (((127 - self.bias()) as u32) << 23)))
    }
}

/// The bits of the NaN that decoding gives in `f64`: the canonical f32 NaN `0x7fffffff`, widened.
const CANONICAL_NAN_F64: u64 = 0x7fff_ffff_e000_0000;

/// 2^`exponent`, also where the result is a subnormal `f64`; 0 below 2^−1074, +∞ above 2^1023.
#[inline]
pub const fn power_of_two(exponent: i32) -> f64 {
    if exponent > 1023 {
        f64::INFINITY
    } else if exponent >= -1022 {
        f64::from_bits(((exponent + 1023) as u64) << 52)
    } else if exponent >= -1074 {
        f64::from_bits(1 << (exponent + 1074))
    } else {
        0.0
    }
}

/// f16 → f32, exactly.
#[inline(always)]
pub const fn f16_to_f32(code: u16) -> f32 {
    Format::F16.decode_f32(code as u32)
}

/// f32 → f16, to the nearest, ties to even; overflow to infinity.
#[inline(always)]
pub const fn f32_to_f16(value: f32) -> u16 {
    Format::F16.encode(value as f64, Rounding::NearestEven, Overflow::Ieee) as u16
}

/// f64 → f16 with one rounding, to the nearest, ties to even; overflow to infinity.
#[inline(always)]
pub const fn f64_to_f16(value: f64) -> u16 {
    Format::F16.encode(value, Rounding::NearestEven, Overflow::Ieee) as u16
}

/// bf16 → f32, exactly.
#[inline(always)]
pub const fn bf16_to_f32(code: u16) -> f32 {
    Format::BF16.decode_f32(code as u32)
}

/// f32 → bf16, to the nearest, ties to even; overflow to infinity.
#[inline(always)]
pub const fn f32_to_bf16(value: f32) -> u16 {
    // Being the upper half of an f32, bf16 needs no more than an addition that carries where rounding goes up.
    let bits = value.to_bits();
    if value.is_nan() {
        return Format::BF16.canonical_nan() as u16;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// f64 → bf16 with one rounding, to the nearest, ties to even; overflow to infinity.
#[inline(always)]
pub const fn f64_to_bf16(value: f64) -> u16 {
    Format::BF16.encode(value, Rounding::NearestEven, Overflow::Ieee) as u16
}

/// e4m3 → f32, exactly.
#[inline(always)]
pub const fn e4m3_to_f32(code: u8) -> f32 {
    Format::E4M3.decode_f32(code as u32)
}

/// f32 → e4m3, to the nearest, ties to even, saturating at ±448 (PTX knows no other form).
#[inline(always)]
pub const fn f32_to_e4m3(value: f32) -> u8 {
    Format::E4M3.encode(value as f64, Rounding::NearestEven, Overflow::Saturate) as u8
}

/// e5m2 → f32, exactly.
#[inline(always)]
pub const fn e5m2_to_f32(code: u8) -> f32 {
    Format::E5M2.decode_f32(code as u32)
}

/// f32 → e5m2, to the nearest, ties to even, saturating at ±57344 (PTX knows no other form).
#[inline(always)]
pub const fn f32_to_e5m2(value: f32) -> u8 {
    Format::E5M2.encode(value as f64, Rounding::NearestEven, Overflow::Saturate) as u8
}

/// f64 → f32 in any rounding direction. `NearestEven` is Rust's `as`, but for the payload of a NaN.
#[inline(always)]
pub const fn f64_to_f32(value: f64, rounding: Rounding) -> f32 {
    f32::from_bits(Format::F32.encode(value, rounding, Overflow::Ieee))
}

/// f32 rounded to tf32, as the 32-bit word that holds it (13 zero bits at the end). A NaN gives `0x7fffffff`, as in PTX.
#[inline(always)]
pub const fn tf32_round(value: f32, rounding: Rounding) -> f32 {
    if value.is_nan() {
        return f32::from_bits(Format::F32.canonical_nan());
    }
    f32::from_bits(Format::TF32.encode(value as f64, rounding, Overflow::Ieee) << 13)
}

/// What the tensor core does to an f32 word given as tf32: the 13 low bits are dropped.
///
/// A NaN stays one: a NaN whose payload lies in the dropped bits alone becomes `0x7fffffff` and not an infinity.
#[inline(always)]
pub const fn tf32_truncate(value: f32) -> f32 {
    if value.is_nan() {
        return f32::from_bits(Format::F32.canonical_nan());
    }
    f32::from_bits(value.to_bits() & !0x1fff)
}

/// `value` rounded to an integer, still as `f64`. Exact for every finite value; infinities and NaN come back as they are.
#[inline]
pub fn round_to_integer(value: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::NearestEven => value.round_ties_even(),
        Rounding::NearestAway => value.round(),
        Rounding::TowardZero => value.trunc(),
        Rounding::Down => value.floor(),
        Rounding::Up => value.ceil(),
    }
}

/// `value` rounded to an integer and clamped to i8. NaN gives 0.
#[inline]
pub fn f64_to_i8(value: f64, rounding: Rounding) -> i8 {
    round_to_integer(value, rounding) as i8
}

/// `value` rounded to an integer and clamped to u8. NaN gives 0.
#[inline]
pub fn f64_to_u8(value: f64, rounding: Rounding) -> u8 {
    round_to_integer(value, rounding) as u8
}

/// `value` rounded to an integer and clamped to i32. NaN gives 0.
#[inline]
pub fn f64_to_i32(value: f64, rounding: Rounding) -> i32 {
    round_to_integer(value, rounding) as i32
}

/// An integer clamped to i8.
#[inline(always)]
pub const fn saturate_i8(value: i64) -> i8 {
    if value < i8::MIN as i64 {
        i8::MIN
    } else if value > i8::MAX as i64 {
        i8::MAX
    } else {
        value as i8
    }
}

/// An integer clamped to u8.
#[inline(always)]
pub const fn saturate_u8(value: i64) -> u8 {
    if value < 0 {
        0
    } else if value > u8::MAX as i64 {
        u8::MAX
    } else {
        value as u8
    }
}

/// The element of type `dtype` that starts `bytes` (little-endian), as `f64`. `None` if there are too few bytes.
///
/// Exact for every type but `I64`, which is rounded to nearest beyond ±2^53. Any byte but 0 is the truth value 1.
#[inline]
pub fn read_element(dtype: DType, bytes: &[u8]) -> Option<f64> {
    Some(match dtype {
        DType::F64 => f64::from_le_bytes(*bytes.first_chunk()?),
        DType::F32 => f64::from(f32::from_le_bytes(*bytes.first_chunk()?)),
        DType::Tf32 => f64::from(tf32_truncate(f32::from_le_bytes(*bytes.first_chunk()?))),
        DType::F16 => f64::from(f16_to_f32(u16::from_le_bytes(*bytes.first_chunk()?))),
        DType::Bf16 => f64::from(bf16_to_f32(u16::from_le_bytes(*bytes.first_chunk()?))),
        DType::E4m3 => f64::from(e4m3_to_f32(*bytes.first()?)),
        DType::E5m2 => f64::from(e5m2_to_f32(*bytes.first()?)),
        DType::I8 => f64::from(*bytes.first()? as i8),
        DType::U8 => f64::from(*bytes.first()?),
        DType::I32 => f64::from(i32::from_le_bytes(*bytes.first_chunk()?)),
        DType::I64 => i64::from_le_bytes(*bytes.first_chunk()?) as f64,
        DType::Bool => f64::from(u8::from(*bytes.first()? != 0)),
    })
}

/// Writes `value` as an element of type `dtype` to the start of `bytes` (little-endian), to nearest even and with one rounding.
/// `None`, with nothing written, if there are too few bytes.
///
/// Overflow goes to infinity, but saturates in fp8 and in the integers, as the conversions of the chip do. NaN becomes 0 in the
/// integers; a truth value is `value != 0`.
#[inline]
pub fn write_element(dtype: DType, value: f64, bytes: &mut [u8]) -> Option<()> {
    let nearest = Rounding::NearestEven;
    match dtype {
        DType::F64 => *bytes.first_chunk_mut()? = value.to_le_bytes(),
        DType::F32 => *bytes.first_chunk_mut()? = f64_to_f32(value, nearest).to_le_bytes(),
        DType::Tf32 => {
            let code = Format::TF32.encode(value, nearest, Overflow::Ieee);
            *bytes.first_chunk_mut()? = (code << 13).to_le_bytes();
        }
        DType::F16 => *bytes.first_chunk_mut()? = f64_to_f16(value).to_le_bytes(),
        DType::Bf16 => *bytes.first_chunk_mut()? = f64_to_bf16(value).to_le_bytes(),
        DType::E4m3 => *bytes.first_mut()? = Format::E4M3.encode(value, nearest, Overflow::Saturate) as u8,
        DType::E5m2 => *bytes.first_mut()? = Format::E5M2.encode(value, nearest, Overflow::Saturate) as u8,
        DType::I8 => *bytes.first_mut()? = f64_to_i8(value, nearest) as u8,
        DType::U8 => *bytes.first_mut()? = f64_to_u8(value, nearest),
        DType::I32 => *bytes.first_chunk_mut()? = f64_to_i32(value, nearest).to_le_bytes(),
        DType::I64 => *bytes.first_chunk_mut()? = (round_to_integer(value, nearest) as i64).to_le_bytes(),
        DType::Bool => *bytes.first_mut()? = u8::from(value != 0.0),
    }
    Some(())
}

/// `value` as `dtype` would hold it: [`write_element`], then [`read_element`].
#[inline]
pub fn round_to(dtype: DType, value: f64) -> f64 {
    let mut bytes = [0u8; 8];
    let _ = write_element(dtype, value, &mut bytes);
    read_element(dtype, &bytes).unwrap_or(f64::NAN)
}
