//! How tensor cores and tensor maps call element types.

use verdigris_kir::inst::MatrixType;
use verdigris_kir::ir::MapType;
use verdigris_tensor::DType;

/// What the tensor cores of `wgmma` multiply: f32 as tf32.
pub(crate) fn matrix_type(dtype: DType) -> MatrixType {
    match dtype {
        DType::Bf16 => MatrixType::Bf16,
        DType::F16 => MatrixType::F16,
        DType::E4m3 => MatrixType::E4m3,
        DType::E5m2 => MatrixType::E5m2,
        DType::I8 => MatrixType::S8,
        DType::U8 => MatrixType::U8,
        _ => MatrixType::Tf32,
    }
}

/// The element format of a tensor map over operands of a type: f32 as tf32.
pub(crate) fn map_type(dtype: DType) -> MapType {
    match dtype {
        DType::Bf16 => MapType::Bf16,
        DType::F16 => MapType::F16,
        DType::F32 => MapType::Tf32,
        DType::I32 => MapType::S32,
        _ => MapType::U8,
    }
}
