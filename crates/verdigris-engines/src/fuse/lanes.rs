//! Values combined over lanes, warps and the CTA, in f32 and f64, always in the same order.

use verdigris_kir::face::{Kernel, Scalar, SharedPiece, Val};

/// The value of the lane whose index differs by `mask`.
#[track_caller]
pub(crate) fn exchange<'k, T: Scalar>(k: Kernel<'k>, value: Val<'k, T>, mask: u32) -> Val<'k, T> {
    if T::TY.bits() == 32 {
        return k.shfl_bfly::<u32>(value.bitcast::<u32>(), mask).bitcast();
    }
    let (low, high) = k.split32(value.bitcast::<u64>());
    k.join32(k.shfl_bfly::<u32>(low, mask), k.shfl_bfly::<u32>(high, mask)).bitcast()
}

/// Over the 32 lanes of a warp; every lane gets the result.
#[track_caller]
pub(crate) fn over_warp<'k, T: Scalar>(
    k: Kernel<'k>,
    value: Val<'k, T>,
    combine: &impl Fn(Val<'k, T>, Val<'k, T>) -> Val<'k, T>,
) -> Val<'k, T> {
    [16, 8, 4, 2, 1].into_iter().fold(value, |so_far, mask| combine(so_far, exchange(k, so_far, mask)))
}

/// Over a CTA of `warps` warps through `scratch` ([`scratch_bytes`]); every thread gets the result. All threads call it; it may be called again
/// with the same scratch.
#[track_caller]
pub(crate) fn over_cta<'k, T: Scalar>(
    k: Kernel<'k>,
    scratch: SharedPiece<'k>,
    warps: u32,
    value: Val<'k, T>,
    combine: &impl Fn(Val<'k, T>, Val<'k, T>) -> Val<'k, T>,
) -> Val<'k, T> {
    let own = over_warp(k, value, combine);
    let base = scratch.address();
    let bytes = T::TY.bytes();
    k.when(k.lane().eq(0), || k.st_shared(base + (k.thread() >> 5) * bytes, 0, own));
    k.bar_sync();
    let first = k.ld_shared::<T>(base, 0);
    let whole = (1..warps).fold(first, |so_far, warp| combine(so_far, k.ld_shared::<T>(base, i64::from(warp * bytes))));
    // What follows may write the scratch again.
    k.bar_sync();
    whole
}

/// Over the threads that have one row: one thread, a warp, or with `scratch` the CTA; every thread of the team gets the result.
#[track_caller]
pub(crate) fn over_team<'k, T: Scalar>(
    k: Kernel<'k>,
    team: u32,
    scratch: Option<SharedPiece<'k>>,
    value: Val<'k, T>,
    combine: &impl Fn(Val<'k, T>, Val<'k, T>) -> Val<'k, T>,
) -> Val<'k, T> {
    match (team, scratch) {
        (1, _) => value,
        (_, Some(scratch)) => over_cta(k, scratch, team / 32, value, combine),
        (_, None) => over_warp(k, value, combine),
    }
}

/// The shared memory that [`over_cta`] needs, if the team is more than a warp.
#[track_caller]
pub(crate) fn team_scratch<'k, T: Scalar>(k: Kernel<'k>, team: u32) -> Option<SharedPiece<'k>> {
    (team > 32).then(|| k.shared("warps", scratch_bytes(team / 32, T::TY.bytes()), 16))
}

/// The shared memory that [`over_cta`] needs.
pub(crate) const fn scratch_bytes(warps: u32, bytes: u32) -> u32 {
    warps * bytes
}
