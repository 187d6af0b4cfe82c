//! Tensors of heads as TMA maps them.

use verdigris_graph::{AttentionProblem, View};
use verdigris_kir::ir::MapDecl;
use verdigris_kir::program::{Address, MapSpec};
use verdigris_tensor::DType;

use super::half::Half;
use super::tile::head_map;
use crate::engine::{EngineId, Reason, Refusal};
use crate::layout::space::element;

/// Extents that coordinates of 32 bits reach, with a band on either side.
pub(super) const MOST_ROWS: u64 = 1 << 28;
/// A bound of a band that leaves no key out, whatever the corner.
pub(super) const UNBOUNDED: i32 = 1 << 29;

/// The most elements of a key and of a value, for kernels that keep results in the registers of one warpgroup.
pub(super) const MOST_ELEMENTS: [u64; 2] = [256, 256];

/// What all engines of tensor cores ask of a problem: types, extents (`most` elements of a key and of a value), and that `mapped`, with their names, can be
/// mapped.
///
/// # Errors
/// A refusal that names the first requirement not met.
pub(super) fn require(id: EngineId, p: &AttentionProblem, most: [u64; 2], mapped: &[(&str, &View)]) -> Result<Half, Refusal> {
    let ty = half(id, p.q.dtype)?;
    for (name, view) in mapped {
        id.require(view.dtype == p.q.dtype, Reason::DType, format_args!("{name} of {}, queries of {}", view.dtype, p.q.dtype))?;
    }
    require_maps(id, p, most, mapped)?;
    Ok(ty)
}

/// The type of two bytes that this is.
///
/// # Errors
/// A refusal of others.
pub(super) fn half(id: EngineId, dtype: DType) -> Result<Half, Refusal> {
    let found = Half::ALL.into_iter().find(|half| half.dtype() == dtype);
    found.ok_or_else(|| id.refusal(Reason::DType, format_args!("{dtype}, taken are bf16 and f16")))
}

/// What [`require`] asks besides types.
///
/// # Errors
/// A refusal that names the first requirement not met.
pub(super) fn require_maps(id: EngineId, p: &AttentionProblem, most: [u64; 2], mapped: &[(&str, &View)]) -> Result<(), Refusal> {
    id.require(p.compute == DType::F32, Reason::DType, format_args!("arithmetic in {}, taken in f32", p.compute))?;
    let extents = [p.b, p.h, p.s_q, p.s_kv];
    id.require(!extents.contains(&0), Reason::Extent, format_args!("b, h, s_q, s_kv = {extents:?}; none may be 0"))?;
    id.require(
        extents.iter().all(|&extent| extent < MOST_ROWS),
        Reason::Extent,
        format_args!("b, h, s_q, s_kv = {extents:?}; each must be below 2^28"),
    )?;
    id.require(
        p.d <= most[0] && p.d_v <= most[1],
        Reason::Extent,
        format_args!("keys of {} elements and values of {}, taken up to {} and {}", p.d, p.d_v, most[0], most[1]),
    )?;
    for (name, view) in mapped {
        let dims = p.dims(name, view);
        id.require(
            dims[3] == 1 || view.strides[3] == 1,
            Reason::Layout,
            format_args!("elements of {name} are {} apart, taken side by side", view.strides[3]),
        )?;
        let bytes = |elements: u64| elements.saturating_mul(view.dtype.bytes() as u64);
        for (i, (&extent, &stride)) in dims.iter().zip(&view.strides).enumerate().take(3) {
            let stride = bytes(stride);
            let is_taken = extent == 1 || (stride > 0 && stride.is_multiple_of(16) && stride < 1 << 40);
            id.require(
                is_taken,
                Reason::Alignment,
                format_args!("dim {i} of {name} has a stride of {stride} bytes, taken are multiples of 16 above 0 and below 2^40"),
            )?;
        }
        id.require(
            bytes(view.offset).is_multiple_of(16),
            Reason::Alignment,
            format_args!("{name} begins {} bytes into its buffer, taken are multiples of 16", bytes(view.offset)),
        )?;
    }
    Ok(())
}

/// The map of a tensor that [`require`] found fit, as `{elements, rows, heads, batch}`.
pub(super) fn map(decl: MapDecl, view: &View, [b, h, s, d]: [u64; 4]) -> (Address, MapSpec) {
    // A dim of one element is never left: any stride does.
    let stride = |i: usize, extent: u64| if extent == 1 { 16 } else { view.strides[i] * view.dtype.bytes() as u64 };
    (element(view, []), head_map(decl, [d, s, h, b], [stride(2, s), stride(1, h), stride(0, b)]))
}
