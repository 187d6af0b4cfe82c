//! Geometry of convolutions: which pixels meet which taps, for all engines of the family.
//!
//! `axis`: one spatial dim, and the phases of a strided dgrad along it. `phases`: pixels, taps and filters as parameters of kernels that work
//! out each activation's address. `gather`: the walk of TMA's im2col mode, with its taps. `boxes`: pixels cut into launches. `lines` and
//! `matrices`: tensors whose pixels, or whose taps, are rows of a matrix. `spacing`: lines that the outputs of depthwise convolutions meet.
//! `read_pixels`: problems without the pixels that a strided filter steps over.

pub(super) mod axis;
pub(super) mod boxes;
pub(super) mod gather;
pub(super) mod lines;
pub(crate) mod matrices;
pub(super) mod phases;
pub(super) mod read_pixels;
pub(super) mod spacing;

use verdigris_graph::ConvProblem;

use crate::engine::{EngineId, Reason, Refusal};

/// What an engine asks that copies whole tensors: a map of an empty one cannot be made, and there is nothing in it to read in place of padding.
pub(crate) fn require_elements(id: EngineId, p: &ConvProblem) -> Result<(), Refusal> {
    let extents = [p.x_extents(), p.w_extents(), p.y_extents()];
    id.require(
        p.has_elements(),
        Reason::Extent,
        format_args!("x, w, y of {:?}, {:?}, {:?}; none may be empty", extents[0], extents[1], extents[2]),
    )
}

/// The filter's index of a tap over x.
pub(crate) fn filter_tap(p: &ConvProblem, tap: [u64; 3]) -> [u64; 3] {
    std::array::from_fn(|dim| if p.flip { p.filter[dim] - 1 - tap[dim] } else { tap[dim] })
}

/// Taps of a filter, as many as 64 bits count.
pub(super) fn tap_count(p: &ConvProblem) -> u64 {
    p.filter.iter().fold(1, |all, &extent| all.saturating_mul(extent))
}
