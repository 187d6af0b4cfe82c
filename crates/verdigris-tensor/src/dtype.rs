//! Element types: their names, sizes and kinds.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::num::Format;

/// The type of one stored element, or (for [`DType::Tf32`]) of one multiplicand.
///
/// The names are the short lower-case ones of the field (`bf16`, `e4m3`, `i8`); they are what [`fmt::Display`] writes, what
/// [`FromStr`] reads and what serde stores, so they are part of every fingerprint and may not change.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE binary64.
    F64,
    /// IEEE binary32.
    F32,
    /// 1 + 8 + 10 bits, held in the upper 19 bits of a 32-bit word. A type of multiplicands only: no tensor is stored in it.
    Tf32,
    /// IEEE binary16.
    F16,
    /// 1 + 8 + 7 bits: the upper half of a binary32.
    Bf16,
    /// 1 + 4 + 3 bits, the `fn` variant: no infinity, one NaN a sign (`0x7f`, `0xff`), largest finite 448.
    E4m3,
    /// 1 + 5 + 2 bits with infinities and NaNs as IEEE has them, largest finite 57344.
    E5m2,
    /// Two's complement, 8 bits.
    I8,
    /// Unsigned, 8 bits.
    U8,
    /// Two's complement, 32 bits.
    I32,
    /// Two's complement, 64 bits.
    I64,
    /// A truth value in one byte: 0 or 1.
    Bool,
}

impl DType {
    /// Every type, in the order of their declaration.
    pub const ALL: [DType; 12] = [
        DType::F64,
        DType::F32,
        DType::Tf32,
        DType::F16,
        DType::Bf16,
        DType::E4m3,
        DType::E5m2,
        DType::I8,
        DType::U8,
        DType::I32,
        DType::I64,
        DType::Bool,
    ];

    /// The size of one element in memory. `Tf32` takes the 4 bytes of the word that holds it.
    #[inline]
    pub const fn bytes(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::Tf32 | DType::I32 => 4,
            DType::F16 | DType::Bf16 => 2,
            DType::E4m3 | DType::E5m2 | DType::I8 | DType::U8 | DType::Bool => 1,
        }
    }

    /// The size of one element in memory, in bits.
    #[inline]
    pub const fn bits(self) -> u32 {
        self.bytes() as u32 * 8
    }

    /// The short lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::Tf32 => "tf32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::E4m3 => "e4m3",
            DType::E5m2 => "e5m2",
            DType::I8 => "i8",
            DType::U8 => "u8",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::Bool => "bool",
        }
    }

    /// Whether values are floating-point.
    #[inline]
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F64 | DType::F32 | DType::Tf32 | DType::F16 | DType::Bf16 | DType::E4m3 | DType::E5m2)
    }

    /// Whether values are integers (a truth value is not).
    #[inline]
    pub const fn is_integer(self) -> bool {
        matches!(self, DType::I8 | DType::U8 | DType::I32 | DType::I64)
    }

    /// Whether this is one of the two 8-bit floating-point types.
    #[inline]
    pub const fn is_fp8(self) -> bool {
        matches!(self, DType::E4m3 | DType::E5m2)
    }

    /// Whether a tensor may be stored in this type: all but `Tf32`.
    #[inline]
    pub const fn is_storage(self) -> bool {
        !matches!(self, DType::Tf32)
    }

    /// The bit format of a floating-point type of at most 32 bits; `None` for `F64` (the host's own) and for integers.
    #[inline]
    pub const fn format(self) -> Option<Format> {
        match self {
            DType::F32 => Some(Format::F32),
            DType::Tf32 => Some(Format::TF32),
            DType::F16 => Some(Format::F16),
            DType::Bf16 => Some(Format::BF16),
            DType::E4m3 => Some(Format::E4M3),
            DType::E5m2 => Some(Format::E5M2),
            DType::F64 | DType::I8 | DType::U8 | DType::I32 | DType::I64 | DType::Bool => None,
        }
    }

    /// The smallest and the largest value of an integer type; `None` for all others.
    #[inline]
    pub const fn integer_range(self) -> Option<(i64, i64)> {
        match self {
            DType::I8 => Some((i8::MIN as i64, i8::MAX as i64)),
            DType::U8 => Some((0, u8::MAX as i64)),
            DType::I32 => Some((i32::MIN as i64, i32::MAX as i64)),
            DType::I64 => Some((i64::MIN, i64::MAX)),
            DType::F64 | DType::F32 | DType::Tf32 | DType::F16 | DType::Bf16 | DType::E4m3 | DType::E5m2 | DType::Bool => None,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no element type.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{0}` is no element type; the element types are f64, f32, tf32, f16, bf16, e4m3, e5m2, i8, u8, i32, i64, bool")]
pub struct UnknownDType(pub String);

impl FromStr for DType {
    type Err = UnknownDType;

    fn from_str(name: &str) -> Result<DType, UnknownDType> {
        DType::ALL.into_iter().find(|dtype| dtype.name() == name).ok_or_else(|| UnknownDType(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_through_text_and_serde() {
        for dtype in DType::ALL {
            assert_eq!(dtype.to_string().parse::<DType>(), Ok(dtype));
            let json = serde_json::to_string(&dtype).unwrap();
            assert_eq!(json, format!("\"{dtype}\""));
            assert_eq!(serde_json::from_str::<DType>(&json).unwrap(), dtype);
        }
        assert_eq!("F32".parse::<DType>(), Err(UnknownDType("F32".into())));
        assert_eq!(format!("{:>5}|", DType::I8), "   i8|");
    }

    #[test]
    fn sizes() {
        let bytes: Vec<usize> = DType::ALL.iter().map(|d| d.bytes()).collect();
        assert_eq!(bytes, [8, 4, 4, 2, 2, 1, 1, 1, 1, 4, 8, 1]);
        assert_eq!(DType::Bf16.bits(), 16);
        assert!(!DType::Tf32.is_storage());
    }
}
