//! Values combined over lanes, warps and the CTA, in f32 and f64, always in the same order.

use verdigris_kir::face::{Kernel, Scalar, Val};

/// The value of the lane whose index differs by `mask`.
#[track_caller]
pub(crate) fn exchange<'k, T: Scalar>(k: Kernel<'k>, value: Val<'k, T>, mask: u32) -> Val<'k, T> {
    if T::TY.bits() == 32 {
        return k.shfl_bfly::<u32>(value.bitcast::<u32>(), mask).bitcast();
    }
    let (low, high) = k.split32(value.bitcast::<u64>());
    k.join32(k.shfl_bfly::<u32>(low, mask), k.shfl_bfly::<u32>(high, mask)).bitcast()
}

/// Over groups of `lanes` neighbouring lanes of a warp, a power of two; every lane gets the result of its group.
#[track_caller]
pub(crate) fn over_lanes<'k, T: Scalar>(
    k: Kernel<'k>,
    lanes: u32,
    value: Val<'k, T>,
    combine: &impl Fn(Val<'k, T>, Val<'k, T>) -> Val<'k, T>,
) -> Val<'k, T> {
    let masks = [16, 8, 4, 2, 1].into_iter().filter(|mask| *mask < lanes);
    masks.fold(value, |so_far, mask| combine(so_far, exchange(k, so_far, mask)))
}

/// Values that the warps of a team have, a set of `N` of them that is the same in all lanes of a warp, combined over the warps of each team of `team`
/// threads, a power of two of whole warps up to 32; every thread gets the result. All threads of the CTA call it, each call in shared memory of its
/// own, so that there is one barrier alone.
#[track_caller]
pub(crate) fn over_warps<'k, T: Scalar, const N: usize>(
    k: Kernel<'k>,
    team: u32,
    values: [Val<'k, T>; N],
    combine: &impl Fn([Val<'k, T>; N], [Val<'k, T>; N]) -> [Val<'k, T>; N],
) -> [Val<'k, T>; N] {
    let warps = team / 32;
    if warps <= 1 {
        return values;
    }
    let (bytes, set) = (T::TY.bytes(), N as u32 * T::TY.bytes());
    let base = k.shared("sets", k.threads() / 32 * set, 16).address();
    let warp = k.thread() >> 5;
    k.when(k.lane().eq(0), || {
        let place = base + warp * set;
        values.iter().enumerate().for_each(|(i, &value)| k.st_shared(place, i64::from(i as u32 * bytes), value));
    });
    k.bar_sync();
    // Each lane takes the set of one warp of its team, and lanes combine them.
    let place = base + ((warp & !(warps - 1)) + (k.lane() & (warps - 1))) * set;
    let mut sets: [Val<'k, T>; N] = std::array::from_fn(|i| k.ld_shared::<T>(place, i64::from(i as u32 * bytes)));
    for mask in [16, 8, 4, 2, 1].into_iter().filter(|mask| *mask < warps) {
        sets = combine(sets, sets.map(|value| exchange(k, value, mask)));
    }
    sets
}

/// Over the threads that have one row, a team of a power of two; every thread of the team gets the result. All threads of the CTA call it. Teams of more
/// than a warp use shared memory, each call its own.
#[track_caller]
pub(crate) fn over_team<'k, T: Scalar>(
    k: Kernel<'k>,
    team: u32,
    value: Val<'k, T>,
    combine: &impl Fn(Val<'k, T>, Val<'k, T>) -> Val<'k, T>,
) -> Val<'k, T> {
    let own = over_lanes(k, team.min(32), value, combine);
    let [whole] = over_warps(k, team, [own], &|[x], [y]| [combine(x, y)]);
    whole
}
