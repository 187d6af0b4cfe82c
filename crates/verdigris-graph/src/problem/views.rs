//! What problems ask of the views that they read and write. Each rule stands once.

use verdigris_tensor::{DType, Layout};

use super::chain::View;
use super::{Access, Operand};
use crate::error::Error;

/// What a problem does with a view, as an operand over the dims that it really has.
pub(super) fn operand(name: &'static str, view: &View, dims: &[u64], access: Access) -> Result<Operand, Error> {
    let layout = Layout::new(dims, &view.strides).map_err(|source| Error::Layout { tensor: name.to_owned(), source })?;
    Ok(Operand { name, slot: view.slot, dtype: view.dtype, offset: view.offset, layout, access })
}

/// Written, or read by an op whose outputs have buffers of their own.
pub(super) fn access(is_written: bool) -> Access {
    if is_written { Access::Written } else { Access::Read }
}

/// A view has one stride for each dim of the space.
pub(super) fn check_rank(op: &str, tensor: &str, strides: &[u64], space: &[u64]) -> Result<(), Error> {
    if strides.len() == space.len() {
        return Ok(());
    }
    Err(Error::Mismatch {
        op: op.to_owned(),
        tensor: tensor.to_owned(),
        quantity: "the number of strides".to_owned(),
        got: strides.len() as u64,
        want: space.len() as u64,
        rule: "a view has one stride for each dim of the space",
    })
}

/// A type that fits, or the rule that asks for another.
pub(super) fn check_dtype(op: &str, tensor: &str, dtype: DType, fits: bool, rule: &'static str) -> Result<(), Error> {
    if fits { Ok(()) } else { Err(Error::DType { op: op.to_owned(), tensor: tensor.to_owned(), got: dtype, rule }) }
}

/// A type that is computed in is f32 or f64, and `rule` says so of the op.
pub(super) fn check_compute(op: &str, compute: DType, rule: &'static str) -> Result<(), Error> {
    check_dtype(op, "compute", compute, matches!(compute, DType::F32 | DType::F64), rule)
}

/// Floating-point data as it stands in memory.
pub(super) fn is_stored_float(dtype: DType) -> bool {
    dtype.is_float() && dtype.is_storage()
}

/// What is written overlaps neither itself nor any other operand.
pub(super) fn check_outputs(op: &str, operands: &[Operand]) -> Result<(), Error> {
    for (i, output) in operands.iter().enumerate().filter(|(_, operand)| operand.access == Access::Written) {
        let structure = |rule| Err(Error::Structure { op: op.to_owned(), tensor: output.name.to_owned(), rule });
        if output.layout.may_overlap() {
            return structure("what is written has one place for each element");
        }
        if operands.iter().enumerate().any(|(j, other)| i != j && other.slot == output.slot) {
            return structure("an output has a buffer of its own");
        }
    }
    Ok(())
}
