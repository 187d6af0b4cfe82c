//! Rows by teams of threads that stand along their elements.
//!
//! In a turn a warp takes a run of neighbouring vectors, lane by lane, so that its accesses are whole lines. Each thread combines the elements of a vector
//! one by one, lanes theirs in five steps for each vector, and warps theirs through shared memory behind one barrier a turn, for which two places take turns.
//! What the turns before came to is carried along.

use verdigris_kir::face::{Kernel, Scalar, Val};
use verdigris_kir::inst::Special;

use crate::fuse::compute::Compute;
use crate::fuse::lanes;
use crate::fuse::strided::{Line, Strided};
use crate::fuse::value::AnyVal;

use super::spec::{OfRows, Pass, Spec};

pub(super) fn rows<'k, T: Compute>(spec: &Spec, k: Kernel<'k>, vector: u32, team: u32, held: u32) {
    let OfRows { rows, extent, part, parts, extents, operands, carries, totals } = OfRows::declare(k, spec);
    let operands = Strided::all(&spec.types, operands);
    let width = team.min(32);
    let warps = team / width;
    let member = k.thread() & (team - 1);
    let (lane, warp) = (member & (width - 1), member >> width.ilog2());
    let row = k.cta() * spec.rows_of_cta() + (k.thread() >> team.ilog2());
    // All threads stay together; those without a row take the last one and write nothing.
    let inside = row.lt(rows);
    let row = row.min(rows - 1);
    let index = extents.index(row);
    let part_number = k.special(Special::CtaY);
    let first = part_number * part;
    let last = (first + part).min(extent);
    let turn = spec.turn();
    let place_in_memory = |place: Val<'k, u32>| if spec.is_reversed() { extent - 1 - place } else { place };
    let from = Access::new(&operands[0], &index, vector);
    let nothing = spec.nothing::<T>(k);
    let combine = |x: Val<'k, T>, y: Val<'k, T>| spec.combine(x, y);
    // The vectors of a turn, in the order of the scan: the place of each, and its elements, of which those behind the part count for nothing.
    let vectors_of = |at: Val<'k, u32>| {
        let places: Vec<Val<'k, u32>> = (0..held).map(|i| at + (warp * (width * held) + i * width) + lane).collect();
        let loaded = places.iter().map(|&place| from.load(k, place_in_memory(place.min(last - 1))));
        let loaded: Vec<Vec<Val<'k, T>>> = loaded.collect();
        let counted = places.iter().zip(loaded).map(|(&place, mut values)| {
            let is_there = place.lt(last);
            if spec.is_reversed() {
                values.reverse();
            }
            (place, values.into_iter().map(|value| k.select(is_there, value, nothing)).collect::<Vec<_>>())
        });
        counted.collect::<Vec<_>>()
    };
    let cell_bytes = u64::from(T::TY.bytes());
    let cell = |base: Val<'k, u64>| base + (row.mul_wide(parts) + part_number.widen()) * cell_bytes;
    let Pass::Scan { exclusive, .. } = spec.pass else {
        let total = k.var(nothing);
        k.range_step(first, last, turn, |at| {
            let own = vectors_of(at).into_iter().flat_map(|(_, values)| values).fold(total.get(), combine);
            total.set(own);
        });
        let whole = lanes::over_team(k, team, total.get(), &combine);
        if let Some(totals) = totals {
            k.when(inside & member.eq(0), || k.st_global(cell(totals.address()), 0, whole));
        }
        return;
    };
    let to = Access::new(&operands[1], &index, vector);
    let carry = k.var(carries.map_or(nothing, |carries| k.ld_global::<T>(cell(carries.address()), 0)));
    // Two places for what the warps of the CTA have, of which each turn takes the other one.
    let line = spec.threads() / 32 * T::TY.bytes();
    let shared = (warps > 1).then(|| k.shared("warps", 2 * line, 16).address());
    let other = k.var(0u32);
    k.range_step(first, last, turn, |at| {
        let vectors = vectors_of(at);
        let own: Vec<Vec<Val<'k, T>>> = vectors.iter().map(|(_, values)| running(values, combine)).collect();
        // Of each vector: what lanes in front of this one have, and all of them.
        let of_lanes: Vec<[Val<'k, T>; 2]> =
            own.iter().map(|own| over_lanes(k, width, lane, own[own.len() - 1], nothing, combine)).collect();
        let mut so_far: Option<Val<'k, T>> = None;
        let mut in_front = Vec::with_capacity(of_lanes.len());
        for [before, whole] in of_lanes {
            in_front.push(so_far.map_or(before, |so_far| combine(so_far, before)));
            so_far = Some(so_far.map_or(whole, |so_far| combine(so_far, whole)));
        }
        let of_warp = so_far.unwrap_or(nothing);
        let (start, end) = match shared {
            None => (carry.get(), combine(carry.get(), of_warp)),
            Some(shared) => {
                let base = shared + other.get();
                k.when(k.lane().eq(0), || k.st_shared(base + (k.thread() >> 5) * T::TY.bytes(), 0, of_warp));
                k.bar_sync();
                let of_team = base + ((k.thread() >> 5) - warp) * T::TY.bytes();
                let (mut start, mut end) = (carry.get(), carry.get());
                for i in 0..warps {
                    let of_warp = k.ld_shared::<T>(of_team, i64::from(i * T::TY.bytes()));
                    end = combine(end, of_warp);
                    if i + 1 < warps {
                        start = k.select(warp.gt(i), end, start);
                    }
                }
                other.set(other.get() ^ line);
                (start, end)
            }
        };
        for (((place, _), own), in_front) in vectors.iter().zip(&own).zip(&in_front) {
            let start = combine(start, *in_front);
            let mut results: Vec<Val<'k, T>> = own.iter().map(|&own| combine(start, own)).collect();
            if exclusive {
                results.rotate_right(1);
                results[0] = start;
            }
            if spec.is_reversed() {
                results.reverse();
            }
            k.when(inside & place.lt(last), || to.store(place_in_memory(*place), &results));
        }
        carry.set(end);
    });
}

/// What the elements up to each one come to.
pub(super) fn running<'k, T: Compute>(values: &[Val<'k, T>], combine: impl Fn(Val<'k, T>, Val<'k, T>) -> Val<'k, T>) -> Vec<Val<'k, T>> {
    let mut results: Vec<Val<'k, T>> = Vec::with_capacity(values.len());
    for &value in values {
        results.push(results.last().map_or(value, |&so_far| combine(so_far, value)));
    }
    results
}

/// Over groups of `width` neighbouring lanes, a power of two: what the lanes in front of this one come to, and all of them.
fn over_lanes<'k, T: Compute>(
    k: Kernel<'k>,
    width: u32,
    lane: Val<'k, u32>,
    own: Val<'k, T>,
    nothing: Val<'k, T>,
    combine: impl Fn(Val<'k, T>, Val<'k, T>) -> Val<'k, T>,
) -> [Val<'k, T>; 2] {
    let distances = [1, 2, 4, 8, 16].into_iter().filter(|distance| *distance < width);
    let so_far = distances.fold(own, |so_far, distance| {
        let below = from_lane(k, so_far, |k, word| k.shfl_up(word, distance));
        k.select(lane.ge(distance), combine(below, so_far), so_far)
    });
    let before = from_lane(k, so_far, |k, word| k.shfl_up(word, 1));
    let last_lane = k.lane() | (width - 1);
    [k.select(lane.gt(0), before, nothing), from_lane(k, so_far, |k, word| k.shfl_idx(word, last_lane))]
}

/// A value by a shuffle of its words.
fn from_lane<'k, T: Scalar>(k: Kernel<'k>, value: Val<'k, T>, shuffle: impl Fn(Kernel<'k>, Val<'k, u32>) -> Val<'k, u32>) -> Val<'k, T> {
    if T::TY.bits() == 32 {
        return shuffle(k, value.bitcast::<u32>()).bitcast();
    }
    let (low, high) = k.split32(value.bitcast::<u64>());
    k.join32(shuffle(k, low), shuffle(k, high)).bitcast()
}

/// The elements of a row: vectors of neighbours, or one by one where they may lie apart.
#[derive(Clone, Debug)]
enum Access<'k> {
    Vectors(Line<'k>),
    Elements(Strided<'k>),
}

impl<'k> Access<'k> {
    fn new(operand: &Strided<'k>, index: &[Val<'k, u32>], vector: u32) -> Access<'k> {
        if vector == 1 { Access::Elements(operand.at(index)) } else { Access::Vectors(operand.line(index, vector)) }
    }

    fn load<T: Compute>(&self, k: Kernel<'k>, number: Val<'k, u32>) -> Vec<Val<'k, T>> {
        match self {
            Access::Vectors(line) => line.load(number).values(k),
            Access::Elements(row) => vec![row.load(&[number])],
        }
    }

    fn store<T: Compute>(&self, number: Val<'k, u32>, values: &[Val<'k, T>]) {
        match self {
            Access::Vectors(line) => line.store(number, values),
            Access::Elements(row) => values.iter().for_each(|&value| row.store(&[number], AnyVal::of(value))),
        }
    }
}
