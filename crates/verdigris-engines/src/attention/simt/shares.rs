//! The gradient of a table that the function of scores reads at places: shares of parts of the queries, and the launch that sums them.
//!
//! A warp has a row of the table and a part of the queries that read it, and goes through the keys of each, 32 at a time. Lanes whose pairs read one entry give it one
//! share, summed in their order, so that an entry is changed by one lane at a time. Each part has a table of its own, and these are summed in their order: all of
//! it repeats bit for bit.

use verdigris_kir::face::Val;
use verdigris_kir::params::{Divide, ReadWrite};

use super::kernel::{Place, Run, WARPS, of_lane};
use super::name::Name;
use crate::fuse::compute::Compute;
use crate::fuse::value::AnyVal;

verdigris_kir::parameters! {
    /// Tables of shares, `[row of the table][part][entry]`, whose elements have so many bytes.
    pub(super) struct Shares / #[derive(Clone, Copy, Debug)] SharesArgs of u32 as bytes {
        pub at: ReadWrite = *bytes,
        pub entries: Divide,
        pub parts: Divide,
        /// Queries of a part, those of all batches and heads that read the row.
        pub queries_of_part: u32,
        /// Rows with their parts; of the sums, elements of the table.
        pub count: u32,
    }
}

/// What a lane that gives nothing has for an entry.
const NOWHERE: u32 = u32::MAX;

/// The shares of a table.
pub(super) fn shares<'k, T: Compute>(run: &Run<'_, 'k, T>) {
    let (k, values) = (run.k, &run.values);
    let table = values.shares.as_ref().expect("the pass has shares");
    let own = k.cta() * WARPS + k.warp();
    k.when(own.lt(table.count), || {
        let (row, part) = table.parts.split(own);
        let own_place = values.own.index(row);
        let to = table.at.address() + own.mul_wide(table.entries.value()) * u64::from(run.spec.bytes());
        let of_entry = |entry: Val<'k, u32>| to + entry.mul_wide(run.spec.bytes());
        k.range_step(k.lane(), table.entries.value(), 32, |entry| k.st_global(of_entry(entry), 0, run.number(0.0)));
        k.warp_sync();
        let first = part * table.queries_of_part;
        k.range_step(first, (first + table.queries_of_part).min(values.repeated), 1, |number| {
            let repeat = values.repeats.index(number);
            let [b, head, i] = [0, 1, 2].map(|dim| own_place[dim] + repeat[dim]);
            let lengths = run.lengths(b);
            let [begin, end] = run.keys_of(lengths, [i, i]);
            k.when(begin.lt(end), || {
                let query = Place { b, head, s: lengths.query(i) };
                let (q, d_o) = (run.line(Name::Q, query), run.line(Name::Do, query));
                let total = run.must(Name::LogSumExp).load::<T>(&[b, head, query.s]);
                let rest = run.row_sum(b, head, query.s);
                k.range_step(begin, end, 32, |base| {
                    let place = base + k.lane();
                    let (inside, j) = (place.lt(end), place.min(end - 1));
                    let key = run.key(b, run.key_head(head), lengths, j);
                    let product = run.dots(values.d, std::slice::from_ref(&q), &run.line(Name::K, key))[0];
                    let score = run.score([b, head, i, j], lengths, inside, product);
                    let product = run.dots(values.d_v, std::slice::from_ref(&d_o), &run.line(Name::V, key))[0];
                    let product = run.drop_some([b, head, i, j], product);
                    let share = run.through(&score, run.gradient(run.probability(&score, total), product, rest));
                    let entry = k.select(inside, score.entry.expect("the function reads the table"), NOWHERE);
                    // The first lane of those with one entry gives what all of them have.
                    let (sum, gives) = (k.var(share), k.var_named("gives", k.select(entry.ne(NOWHERE), 1u32, 0u32)));
                    k.range(32, |lane| {
                        let is_same = k.shfl_idx::<u32>(entry, lane).eq(entry);
                        let theirs = of_lane(k, share, lane);
                        sum.set(k.select(is_same & lane.gt(k.lane()), sum.get() + theirs, sum.get()));
                        gives.set(k.select(is_same & lane.lt(k.lane()), 0u32, gives.get()));
                    });
                    k.when(gives.ne(0), || {
                        let at = of_entry(entry);
                        k.st_global(at, 0, k.ld_global::<T>(at, 0) + sum.get());
                    });
                    // The next keys may give to the same entries, by other lanes.
                    k.warp_sync();
                });
            });
        });
    });
}

/// The sums of the shares of the table of this number.
pub(super) fn sum<'k, T: Compute>(run: &Run<'_, 'k, T>, number: u32) {
    let (k, values) = (run.k, &run.values);
    let table = values.shares.as_ref().expect("the pass has shares");
    let element = k.cta() * (32 * WARPS) + k.thread();
    k.when(element.lt(table.count), || {
        let (row, entry) = table.entries.split(element);
        let own = values.own.index(row);
        let sum = k.var(run.number(0.0));
        k.range(table.parts.value(), |part| {
            let place = (row * table.parts.value() + part).mul_wide(table.entries.value()) + entry.widen();
            sum.set(sum.get() + k.ld_global::<T>(table.at.address() + place * u64::from(run.spec.bytes()), 0));
        });
        run.must(Name::D_SCORE[number as usize]).store(&[own[0], own[1], own[2], entry], AnyVal::of(sum.get()));
    });
}
