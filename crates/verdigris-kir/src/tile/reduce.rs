//! Reductions over lanes, warps and the CTA.

use crate::face::{AsVal, Kernel, SharedPiece, Val};
use std::panic::Location;

/// Reduces over the 32 lanes of a warp; every lane gets the result. The order is a fixed tree, so the result is reproducible.
#[track_caller]
pub fn warp<'k>(k: Kernel<'k>, value: impl AsVal<'k, f32>, combine: impl Fn(Val<'k, f32>, Val<'k, f32>) -> Val<'k, f32>) -> Val<'k, f32> {
    let value = value.operand_val(k);
    k.scope(Location::caller(), || {
        [16, 8, 4, 2, 1].into_iter().fold(value, |so_far, distance| combine(so_far, k.shfl_bfly(so_far, distance)))
    })
}

/// Reduces over a CTA of `warps` warps through `scratch` (4 bytes a warp); every thread gets the result. All threads call it, and `scratch` must
/// not be in use by an earlier reduction that some warp may still be reading.
#[track_caller]
pub fn cta<'k>(
    k: Kernel<'k>,
    scratch: SharedPiece<'k>,
    warps: u32,
    value: impl AsVal<'k, f32>,
    identity: f32,
    combine: impl Fn(Val<'k, f32>, Val<'k, f32>) -> Val<'k, f32>,
) -> Val<'k, f32> {
    let at = Location::caller();
    let own = warp(k, value, &combine);
    k.scope(at, || {
        let lane = k.lane();
        let index = k.thread() >> 5;
        let base = scratch.address();
        k.when(lane.eq(0), || k.st_shared(base + (index << 2), 0, own));
        k.bar_sync();
        let part = k.var(identity);
        k.when(lane.lt(warps), || part.set(k.ld_shared::<f32>(base + (lane << 2), 0)));
        warp(k, part, &combine)
    })
}
