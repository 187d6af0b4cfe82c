//! What problems ask of the views that they read and write. Each rule stands once.

use verdigris_tensor::{DType, Layout};

use super::chain::View;
use super::{Access, Operand};
use crate::error::Error;

/// What a problem does with a view, as an operand over the dims that it really has.
pub(super) fn operand(name: &'static str, view: &View, dims: &[u64], access: Access) -> Result<Operand, Error> {
    let layout = Layout::new(dims, &view.strides).map_err(|source| Error::Layout { tensor: name.to_owned(), source })?;
    within_addresses(Operand { name, slot: view.slot, dtype: view.dtype, offset: view.offset, layout, access })
}

/// An operand of which each element, and each step from one to the next, can be counted in bytes by 63 bits, as engines count them. The steps of an empty one
/// lead nowhere, and are counted all the same.
pub(super) fn within_addresses(operand: Operand) -> Result<Operand, Error> {
    let Operand { name, dtype, offset, ref layout, .. } = operand;
    let steps = layout.dims().iter().zip(layout.strides()).filter(|(extent, _)| **extent > 1).map(|(_, &stride)| u128::from(stride));
    let reach = steps.chain([u128::from(offset) + u128::from(layout.span_elements())]).max().unwrap_or(0);
    if reach * dtype.bytes() as u128 >= 1 << 63 {
        return Err(Error::Reach { tensor: name.to_owned(), elements: u64::try_from(reach).unwrap_or(u64::MAX), dtype });
    }
    Ok(operand)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Slot;

    fn at(offset: u64, dims: &[u64], strides: &[u64], dtype: DType) -> Result<Operand, Error> {
        operand("x", &View { slot: Slot(0), dtype, offset, strides: strides.to_vec() }, dims, Access::Read)
    }

    /// The last byte that is counted is that before 2^63.
    #[test]
    fn what_lies_beyond_addresses_is_refused() {
        for dtype in [DType::U8, DType::F16, DType::F32, DType::F64] {
            let all = (1 << 63) / dtype.bytes() as u64;
            for (offset, dims, strides) in
                [(all - 8, [1, 7], [0, 1]), (3, [2, 2], [all - 6, 1]), (0, [2, 0], [all - 1, 1]), (all - 1, [2, 0], [1, 1])]
            {
                at(offset, &dims, &strides, dtype).unwrap_or_else(|error| panic!("{offset} {dims:?} {strides:?} {dtype}: {error}"));
            }
            for (offset, dims, strides) in [
                (all - 7, [1, 7], [0, 1]),
                (3, [2, 2], [all - 5, 1]),
                (0, [2, 0], [all, 1]),
                (all, [2, 0], [1, 1]),
                (u64::MAX, [2, 2], [2, 1]),
            ] {
                let refused = at(offset, &dims, &strides, dtype);
                assert!(
                    matches!(&refused, Err(Error::Reach { tensor, elements, .. }) if tensor == "x" && *elements >= all),
                    "{offset} {dims:?} {strides:?} {dtype}: {refused:?}"
                );
            }
        }
    }

    #[test]
    fn problems_of_every_family_refuse_what_lies_beyond_addresses() {
        use crate::problem::Problem;
        let views = [
            "attention forward f32 b=1 h=1 s_q=2 d=4",
            "norm forward bf16 rows=4 elements=64 x=packed y=packed",
            "resample forward f32 n=1 c=3 extents=1x6x7 out=1x6x9 width=reflect/3",
            "batch_norm statistics bf16 rows=3136 channels=63 mean=f32",
            "map f32 dims=4 + load(packed) + store(0,packed)",
        ];
        let far = [
            (&views[..], r#""offset":"#, "18446744073709551615"),
            (&["gemm f32 m=4 n=4 k=4"], r#""row_stride":"#, "2305843009213693952"),
            (
                &["conv fprop bf16 nhwc n=2 c=64 h=28 w=28 k=64 r=3 s=3 pad=1"],
                r#""x":{"slot":0,"dtype":"bf16","strides":["#,
                "4611686018427387904",
            ),
        ];
        for (words, field, value) in far.into_iter().flat_map(|(all, field, value)| all.iter().map(move |words| (words, field, value))) {
            let problem = words.parse::<Problem>().and_then(Problem::canonical).unwrap_or_else(|error| panic!("{words}: {error}"));
            let text = serde_json::to_string(&problem).expect("prints");
            let (before, rest) = text.split_once(field).unwrap_or_else(|| panic!("{text}"));
            let moved = format!("{before}{field}{value}{}", rest.trim_start_matches(|digit: char| digit.is_ascii_digit()));
            let refused = serde_json::from_str::<Problem>(&moved).expect("reads").canonical();
            assert!(matches!(refused, Err(Error::Reach { .. })), "{words}: {refused:?}");
        }
    }
}
