//! Rows that lie side by side: a thread takes a vector of neighbouring rows and goes along their elements, a few at a time.
//!
//! Where warps share the elements of rows out, each takes a run of them in a turn, and what the runs come to goes through shared memory behind one barrier a
//! turn, for which two places take turns.

use verdigris_kir::face::{Kernel, Val, Var};
use verdigris_kir::inst::Special;

use crate::fuse::compute::Compute;
use crate::fuse::strided::Strided;
use crate::fuse::value::AnyVal;

use super::spec::{OfRows, Pass, Spec};
use super::teams::running;

/// Elements of each of its rows that a thread takes in a turn: all of them are on their way at a time.
pub(super) const fn held(vector: u32) -> u32 {
    if vector >= 8 { 4 } else { 8 }
}

pub(super) fn columns<'k, T: Compute>(spec: &Spec, k: Kernel<'k>, vector: u32, team: u32) {
    let OfRows { rows, extent, part, parts, extents, operands, carries, totals } = OfRows::declare(k, spec);
    let operands = Strided::all(&spec.types, operands);
    let held = held(vector);
    // The warps of a team follow each other; with one, all warps of the CTA take rows.
    let (member, point) =
        if team == 1 { (k.constant(0u32), k.cta() * spec.threads() + k.thread()) } else { (k.thread() >> 5, k.cta() * 32 + k.lane()) };
    let inside = point.lt(rows);
    let point = point.min(rows - 1);
    let outer = extents.index(point);
    let part_number = k.special(Special::CtaY);
    let first = part_number * part;
    let last = (first + part).min(extent);
    let turn = spec.turn();
    let nothing = spec.nothing::<T>(k);
    let combine = |x: Val<'k, T>, y: Val<'k, T>| spec.combine(x, y);
    // The index of the elements of a place, of the first of the neighbouring rows.
    let (inner, front) = outer.split_last().map_or((k.constant(0), &[][..]), |(&inner, front)| (inner, front));
    let index_of = |place: Val<'k, u32>| {
        let mut index = front.to_vec();
        index.push(if spec.is_reversed() { extent - 1 - place } else { place });
        index
    };
    let load = |place: Val<'k, u32>| -> Vec<Val<'k, T>> {
        let mut index = index_of(place);
        if vector == 1 {
            index.push(inner);
            return vec![operands[0].load(&index)];
        }
        operands[0].line(&index, vector).load(inner).values(k)
    };
    // The elements of a turn, of which those behind the part count for nothing; row by row.
    let elements_of = |at: Val<'k, u32>| {
        let places: Vec<Val<'k, u32>> = (0..held).map(|i| at + (member * held + i)).collect();
        let loaded: Vec<Vec<Val<'k, T>>> = places.iter().map(|&place| load(place.min(last - 1))).collect();
        let row = |lane: usize| -> Vec<Val<'k, T>> {
            places.iter().zip(&loaded).map(|(place, values)| k.select(place.lt(last), values[lane], nothing)).collect()
        };
        (places.clone(), (0..vector as usize).map(row).collect::<Vec<_>>())
    };
    let cell_bytes = u64::from(T::TY.bytes());
    let cell = |base: Val<'k, u64>, lane: u32| base + ((point * vector + lane).mul_wide(parts) + part_number.widen()) * cell_bytes;
    let Pass::Scan { exclusive, .. } = spec.pass else {
        let sums: Vec<Var<'k, T>> = (0..vector).map(|_| k.var(nothing)).collect();
        k.range_step(first, last, turn, |at| {
            let (_, rows) = elements_of(at);
            sums.iter().zip(rows).for_each(|(sum, row)| sum.set(row.into_iter().fold(sum.get(), combine)));
        });
        if let Some(totals) = totals {
            k.when(inside, || (0..).zip(&sums).for_each(|(lane, sum)| k.st_global(cell(totals.address(), lane), 0, sum.get())));
        }
        return;
    };
    let carried = |lane: u32| carries.map_or(nothing, |carries| k.ld_global::<T>(cell(carries.address(), lane), 0));
    let carry: Vec<Var<'k, T>> = (0..vector).map(|lane| k.var(carried(lane))).collect();
    // A line of 32 lanes for each row of a thread and each warp, twice.
    let line = 32 * T::TY.bytes();
    let set = team * vector * line;
    let shared = (team > 1).then(|| k.shared("runs", 2 * set, 16).address());
    let other = k.var(0u32);
    k.range_step(first, last, turn, |at| {
        let (places, elements) = elements_of(at);
        let own: Vec<Vec<Val<'k, T>>> = elements.iter().map(|row| running(row, combine)).collect();
        let starts: Vec<Val<'k, T>> = match shared {
            None => carry.iter().map(|carry| carry.get()).collect(),
            Some(shared) => {
                let base = shared + other.get() + k.lane() * T::TY.bytes();
                for (lane, own) in (0..).zip(&own) {
                    k.st_shared(base + member * (vector * line), lane * i64::from(line), own[own.len() - 1]);
                }
                k.bar_sync();
                other.set(other.get() ^ set);
                let start = |lane: u32| {
                    let (mut start, mut end) = (carry[lane as usize].get(), carry[lane as usize].get());
                    for warp in 0..team {
                        end = combine(end, k.ld_shared::<T>(base, i64::from((warp * vector + lane) * line)));
                        if warp + 1 < team {
                            start = k.select(member.gt(warp), end, start);
                        }
                    }
                    carry[lane as usize].set(end);
                    start
                };
                (0..vector).map(start).collect()
            }
        };
        let results: Vec<Vec<Val<'k, T>>> =
            (own.iter().zip(&starts)).map(|(own, &start)| own.iter().map(|&own| combine(start, own)).collect::<Vec<_>>()).collect();
        if shared.is_none() {
            carry.iter().zip(&results).for_each(|(carry, results)| carry.set(results[results.len() - 1]));
        }
        for (i, place) in places.iter().enumerate() {
            let value = |(results, &start): (&Vec<Val<'k, T>>, &Val<'k, T>)| match (exclusive, i) {
                (false, _) => results[i],
                (true, 0) => start,
                (true, _) => results[i - 1],
            };
            let values: Vec<Val<'k, T>> = results.iter().zip(&starts).map(value).collect();
            k.when(inside & place.lt(last), || {
                let mut index = index_of(*place);
                if vector == 1 {
                    index.push(inner);
                    values.iter().for_each(|&value| operands[1].store(&index, AnyVal::of(value)));
                } else {
                    operands[1].line(&index, vector).store(inner, &values);
                }
            });
        }
    });
}
