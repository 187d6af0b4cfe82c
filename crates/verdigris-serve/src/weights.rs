//! Weights by name, from and to safetensors.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use verdigris::{DType, Layout};

use crate::error::LoadError;

/// One weight: packed row-major.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Weight {
    /// Its element type.
    pub dtype: DType,
    /// Its extents.
    pub dims: Vec<u64>,
    /// Its elements, little-endian.
    pub bytes: Vec<u8>,
}

const TYPES: [(Dtype, DType); 11] = [
    (Dtype::F64, DType::F64),
    (Dtype::F32, DType::F32),
    (Dtype::F16, DType::F16),
    (Dtype::BF16, DType::Bf16),
    (Dtype::F8_E4M3, DType::E4m3),
    (Dtype::F8_E5M2, DType::E5m2),
    (Dtype::I64, DType::I64),
    (Dtype::I32, DType::I32),
    (Dtype::I8, DType::I8),
    (Dtype::U8, DType::U8),
    (Dtype::BOOL, DType::Bool),
];

/// All tensors of a file. One whose type the library does not have is left out: it can be no weight of a graph.
///
/// # Errors
/// [`LoadError::Io`], [`LoadError::Weights`].
pub fn read(path: &Path) -> Result<BTreeMap<String, Weight>, LoadError> {
    let file = path.display().to_string();
    let bytes = std::fs::read(path).map_err(|source| LoadError::Io { file: file.clone(), source })?;
    let parsed = SafeTensors::deserialize(&bytes).map_err(|error| LoadError::Weights { file, message: error.to_string() })?;
    let mut weights = BTreeMap::new();
    for (name, view) in parsed.tensors() {
        if let Some((_, dtype)) = TYPES.iter().find(|(of_file, _)| *of_file == view.dtype()) {
            let dims = view.shape().iter().map(|&dim| dim as u64).collect();
            weights.insert(name, Weight { dtype: *dtype, dims, bytes: view.data().to_vec() });
        }
    }
    Ok(weights)
}

pub(crate) fn write(path: &Path, weights: &BTreeMap<String, Weight>) -> Result<(), LoadError> {
    let file = path.display().to_string();
    let wrong = |message: String| LoadError::Weights { file: file.clone(), message };
    let mut views = Vec::new();
    for (name, weight) in weights {
        let dims: Vec<usize> = weight.dims.iter().map(|&dim| dim as usize).collect();
        let dtype = TYPES.iter().find(|(_, dtype)| *dtype == weight.dtype).map(|(of_file, _)| *of_file);
        let dtype = dtype.ok_or_else(|| wrong(format!("tensor `{name}`: the format has no type {}", weight.dtype)))?;
        views.push((name, TensorView::new(dtype, dims, &weight.bytes).map_err(|error| wrong(format!("tensor `{name}`: {error}")))?));
    }
    let bytes = safetensors::serialize(views, None).map_err(|error| wrong(error.to_string()))?;
    crate::model::write(path, &bytes)
}

/// Packed elements at the places of a layout.
pub(crate) fn placed(layout: &Layout, dtype: DType, packed: &[u8]) -> Vec<u8> {
    if layout.is_row_major() {
        return packed.to_vec();
    }
    let size = dtype.bytes();
    let mut bytes = vec![0; layout.span_bytes(dtype) as usize];
    for (position, element) in packed.chunks_exact(size).enumerate() {
        if let Some(offset) = layout.offset_of_position(position as u64) {
            bytes[offset as usize * size..][..size].copy_from_slice(element);
        }
    }
    bytes
}
