//! The two types that are multiplied.

use verdigris_kir::face::{F16, Kernel, Val};
use verdigris_kir::inst::{CvtRound, MatrixType, Packed};
use verdigris_kir::ir::MapType;

/// A type of two bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Half {
    Bf16,
    F16,
}

impl Half {
    /// Both.
    pub(super) const ALL: [Half; 2] = [Half::Bf16, Half::F16];

    pub(super) const fn dtype(self) -> verdigris_tensor::DType {
        match self {
            Half::Bf16 => verdigris_tensor::DType::Bf16,
            Half::F16 => verdigris_tensor::DType::F16,
        }
    }

    pub(super) const fn map(self) -> MapType {
        match self {
            Half::Bf16 => MapType::Bf16,
            Half::F16 => MapType::F16,
        }
    }

    pub(super) const fn matrix(self) -> MatrixType {
        match self {
            Half::Bf16 => MatrixType::Bf16,
            Half::F16 => MatrixType::F16,
        }
    }

    pub(super) const fn packed(self) -> Packed {
        match self {
            Half::Bf16 => Packed::Bf16x2,
            Half::F16 => Packed::F16x2,
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Half::Bf16 => "bf16",
            Half::F16 => "f16",
        }
    }

    /// A number of this type, exactly.
    #[track_caller]
    pub(super) fn widen<'k>(self, k: Kernel<'k>, half: Val<'k, u16>) -> Val<'k, f32> {
        match self {
            Half::Bf16 => k.join16(0u16, half).bitcast::<f32>(),
            Half::F16 => half.bitcast::<F16>().convert::<f32>(CvtRound::None),
        }
    }
}
