//! Elements on their way to a sum that no tensor core forms: as stored, decoded, multiplied and added.

use serde::{Deserialize, Serialize};
use verdigris_graph::Precision;
use verdigris_kir::face::{Kernel, Number, Val, Var};
use verdigris_kir::inst::CvtRound;
use verdigris_tensor::DType;

use super::compute::{self, Compute};

/// What is multiplied and summed where no tensor core does it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Arithmetic {
    /// f32.
    F32,
    /// f32 with operands rounded to tf32.
    Tf32,
    /// f32 with the finished sum rounded to f16.
    F16,
    /// f64.
    F64,
    /// Wrapping 32-bit integers.
    I32,
}

impl Arithmetic {
    /// What a policy asks for.
    pub(crate) fn of(precision: Precision) -> Arithmetic {
        match precision {
            Precision::F64 => Arithmetic::F64,
            Precision::I32 => Arithmetic::I32,
            Precision::Tf32 => Arithmetic::Tf32,
            Precision::F16 => Arithmetic::F16,
            Precision::Ieee | Precision::Fp32 | Precision::Fp8Fast | Precision::Fp8Promoted => Arithmetic::F32,
        }
    }

    /// The word in kernel names.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Arithmetic::F32 => "f32",
            Arithmetic::Tf32 => "tf32",
            Arithmetic::F16 => "f16sum",
            Arithmetic::F64 => "f64",
            Arithmetic::I32 => "i32",
        }
    }
}

/// A type that is multiplied and summed.
pub(crate) trait Element: Number {
    /// What is computed in before and behind the sum.
    type Computed: Compute;
    /// Elements of 16 bytes.
    const GROUP: u32;
    /// 0.
    const ZERO: Self;
    /// The element that stored bits stand for.
    #[track_caller]
    fn decode<'k>(k: Kernel<'k>, dtype: DType, raw: RawVar<'k>) -> Val<'k, Self>;
    /// Rounded to tf32; only asked of f32.
    fn rounded_to_tf32(value: Val<'_, Self>) -> Val<'_, Self>;
    /// Times a block's factor; only asked of f32.
    #[track_caller]
    fn scaled<'k>(value: Val<'k, Self>, factor: Var<'k, f32>) -> Val<'k, Self>;
    /// As a 32-bit integer; only asked of i32.
    fn to_i32(value: Val<'_, Self>) -> Val<'_, i32>;
    /// The value that is computed with.
    fn widen(value: Val<'_, Self>) -> Val<'_, Self::Computed>;
    /// A computed value that this type holds.
    fn narrow(value: Val<'_, Self::Computed>) -> Val<'_, Self>;
}

impl Element for f32 {
    type Computed = f32;
    const GROUP: u32 = 4;
    const ZERO: f32 = 0.0;
    #[track_caller]
    fn decode<'k>(k: Kernel<'k>, dtype: DType, raw: RawVar<'k>) -> Val<'k, f32> {
        match raw {
            RawVar::Byte(bits) => compute::decode_byte(k, dtype, bits.get()),
            RawVar::Half(bits) => compute::decode_half(dtype, bits.get()),
            RawVar::Word(bits) => bits.get().bitcast(),
            RawVar::Double(bits) => bits.get().bitcast::<f64>().convert(CvtRound::Nearest),
        }
    }
    fn rounded_to_tf32(value: Val<'_, f32>) -> Val<'_, f32> {
        value.to_tf32().bitcast()
    }
    #[track_caller]
    fn scaled<'k>(value: Val<'k, f32>, factor: Var<'k, f32>) -> Val<'k, f32> {
        value * factor
    }
    fn to_i32(value: Val<'_, f32>) -> Val<'_, i32> {
        value.convert(CvtRound::IntNearest)
    }
    fn widen(value: Val<'_, f32>) -> Val<'_, f32> {
        value
    }
    fn narrow(value: Val<'_, f32>) -> Val<'_, f32> {
        value
    }
}

impl Element for f64 {
    type Computed = f64;
    const GROUP: u32 = 2;
    const ZERO: f64 = 0.0;
    #[track_caller]
    fn decode<'k>(k: Kernel<'k>, dtype: DType, raw: RawVar<'k>) -> Val<'k, f64> {
        match raw {
            RawVar::Double(bits) => bits.get().bitcast(),
            narrow => <f32 as Element>::decode(k, dtype, narrow).convert(CvtRound::None),
        }
    }
    fn rounded_to_tf32(value: Val<'_, f64>) -> Val<'_, f64> {
        value
    }
    #[track_caller]
    fn scaled<'k>(value: Val<'k, f64>, factor: Var<'k, f32>) -> Val<'k, f64> {
        value * factor.get().convert::<f64>(CvtRound::None)
    }
    fn to_i32(value: Val<'_, f64>) -> Val<'_, i32> {
        value.convert(CvtRound::IntNearest)
    }
    fn widen(value: Val<'_, f64>) -> Val<'_, f64> {
        value
    }
    fn narrow(value: Val<'_, f64>) -> Val<'_, f64> {
        value
    }
}

impl Element for i32 {
    type Computed = f32;
    const GROUP: u32 = 4;
    const ZERO: i32 = 0;
    #[track_caller]
    fn decode<'k>(k: Kernel<'k>, dtype: DType, raw: RawVar<'k>) -> Val<'k, i32> {
        match raw {
            // The load has extended the byte as its type says.
            RawVar::Byte(bits) => bits.get().signed(),
            other => <f32 as Element>::decode(k, dtype, other).convert(CvtRound::IntNearest),
        }
    }
    fn rounded_to_tf32(value: Val<'_, i32>) -> Val<'_, i32> {
        value
    }
    #[track_caller]
    fn scaled<'k>(value: Val<'k, i32>, _: Var<'k, f32>) -> Val<'k, i32> {
        value
    }
    fn to_i32(value: Val<'_, i32>) -> Val<'_, i32> {
        value
    }
    fn widen(value: Val<'_, i32>) -> Val<'_, f32> {
        value.to_f32()
    }
    fn narrow(value: Val<'_, f32>) -> Val<'_, i32> {
        value.convert(CvtRound::IntNearest)
    }
}

/// An element on its way, as stored.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RawVar<'k> {
    /// 8 bits, extended to 32 as the type says.
    Byte(Var<'k, u32>),
    /// 16 bits.
    Half(Var<'k, u16>),
    /// 32 bits.
    Word(Var<'k, u32>),
    /// 64 bits.
    Double(Var<'k, u64>),
}

impl<'k> RawVar<'k> {
    /// Registers for one element.
    #[track_caller]
    pub(crate) fn new(k: Kernel<'k>, dtype: DType) -> Self {
        match dtype.bytes() {
            1 => RawVar::Byte(k.var(0u32)),
            2 => RawVar::Half(k.var(0u16)),
            4 => RawVar::Word(k.var(0u32)),
            _ => RawVar::Double(k.var(0u64)),
        }
    }

    /// Makes it 0.
    pub(crate) fn clear(self) {
        match self {
            RawVar::Byte(bits) | RawVar::Word(bits) => bits.set(0u32),
            RawVar::Half(bits) => bits.set(0u16),
            RawVar::Double(bits) => bits.set(0u64),
        }
    }

    /// Starts loading it.
    #[track_caller]
    pub(crate) fn load(self, k: Kernel<'k>, dtype: DType, address: Val<'k, u64>) {
        match self {
            RawVar::Byte(bits) => bits.set(k.ld_global_byte(address, 0, dtype == DType::I8)),
            RawVar::Half(bits) => bits.set(k.ld_global::<u16>(address, 0)),
            RawVar::Word(bits) => bits.set(k.ld_global::<u32>(address, 0)),
            RawVar::Double(bits) => bits.set(k.ld_global::<u64>(address, 0)),
        }
    }
}

/// The value that the epilogue begins with.
#[track_caller]
pub(crate) fn finish<'k, S: Element>(k: Kernel<'k>, arithmetic: Arithmetic, sum: Val<'k, S>) -> Val<'k, S::Computed> {
    let value = S::widen(sum);
    if arithmetic == Arithmetic::F16 { compute::round_to(k, DType::F16, value) } else { value }
}
