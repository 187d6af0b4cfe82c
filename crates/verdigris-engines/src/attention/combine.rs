//! Keys in parts: where a part leaves what it has of a row, and the launch behind, which adds up the parts of each row by their log-sum-exp.

use std::f32::consts::{LN_2, LOG2_E};
use std::panic::Location;

use verdigris_kir::face::{Header, Kernel, SharedPiece, Val, build};
use verdigris_kir::inst::Cache;
use verdigris_kir::ir::Target;
use verdigris_kir::params::{Divide, Read, Write};
use verdigris_kir::program::{Address, KernelRef, Program};
use verdigris_kir::tile::reduce;

use super::half::Half;
use super::of_queries::OfQueriesArgs;
use super::ragged::{OfKeys, OffsetsArgs, OffsetsIfAnyArgs, Sequence};
use crate::cost::{Stream, Traffic};

/// Warps of a CTA, which share the parts of a row.
const WARPS: u32 = 4;
/// Parts that a warp has on their way at a time.
const UNROLL: u32 = 4;
/// Instructions that a row takes beside its bytes, the start of its CTA among them: 1.4 ns a row were measured on an H200 with 32,768 of them.
const ISSUED_PER_ROW: f64 = 700.0;
/// Columns of a warp: four a lane.
const COLUMNS: u32 = 128;

/// Whose parts they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Parts {
    /// Of `attention.decode`, of ragged tensors or others; the launch begins while the one in front ends.
    Decode { ragged: bool },
    /// Of `attention.mma`, for every chip from sm_80 on; the launch says whether tensors are ragged.
    Mma,
}

/// The number of what a part has of a row among all that parts have, `[batch][head][query][part]`.
#[track_caller]
pub(super) fn place<'k>(
    [batch, head, query]: [Val<'k, u32>; 3],
    [heads, queries]: [Val<'k, u32>; 2],
    [part, parts]: [Val<'k, u32>; 2],
) -> Val<'k, u64> {
    part.kernel().scope(Location::caller(), || ((batch * heads + head) * queries + query).mul_wide(parts) + part.widen())
}

verdigris_kir::parameters! {
    /// `L = ln Σ e^L[part]` and `o = Σ e^(L[part] − L) · o[part]` of each row.
    pub(super) struct Combine / CombineArgs of Parts as of {
        /// f32, `[batch][head][query][part]`: rows of `elements` elements, and their log-sum-exp.
        pub(super) partial: Read = 16,
        pub(super) partial_log_sum_exp: Read = 4,
        /// Their greatest scores, where these are asked for.
        pub(super) partial_max_scores: Read = 4,
        pub(super) o: Write = 4,
        /// Bytes from one batch, head and query to the next.
        pub(super) o_strides: [u64; 3],
        pub(super) log_sum_exp: OfQueriesArgs = (),
        pub(super) max_scores: OfQueriesArgs = (),
        pub(super) parts: u32,
        /// A multiple of 4.
        pub(super) elements: u32,
        pub(super) queries: Divide,
        pub(super) heads: Divide,
        /// Where sequences have their queries.
        pub(super) offsets: Option<OffsetsArgs> = (*of == Parts::Decode { ragged: true }).then_some(OfKeys::Paged),
        pub(super) offsets_if_any: Option<OffsetsIfAnyArgs> = (*of == Parts::Mma).then_some(()),
    }
}

/// Scratch for what parts have of so many rows: results of so many elements, log-sum-exp and, where they are asked for, greatest scores. What there is none of lies at `o`.
pub(super) fn scratch_of_parts(
    program: &mut Program,
    o: Address,
    [parts, elements]: [u32; 2],
    rows: u64,
    has_max_scores: bool,
) -> [Address; 3] {
    let of_parts = rows * u64::from(parts);
    let all = [
        ("results of parts", u64::from(elements) * 4, true),
        ("log-sum-exp of parts", 4, true),
        ("greatest scores of parts", 4, has_max_scores),
    ];
    all.map(|(name, bytes, is_there)| if is_there && parts > 1 { program.add_scratch(name, of_parts * bytes) } else { o })
}

/// What the launch costs that adds up so many parts of each row: the bytes that parts leave and it reads, and what the CTA of a row does whatever it reads.
pub(super) fn work(rows: f64, elements: f64, parts: f64) -> Stream {
    let bytes = 2.0 * 4.0 * rows * parts * (elements + 1.0);
    Stream::new(Traffic::Reduced, bytes).of_ctas(rows).issuing(ISSUED_PER_ROW * rows)
}

/// The kernel for results of up to `value` elements; a CTA has one row.
pub(super) fn kernel(ty: Half, value: u32, of: Parts) -> KernelRef {
    let blocks = value.div_ceil(COLUMNS);
    let (engine, mark, target) = match of {
        Parts::Decode { ragged } => ("decode", if ragged { "_ragged" } else { "" }, Target::Sm90),
        Parts::Mma => ("mma", "", Target::Sm80),
    };
    let name = format!("attention_{engine}_combine_{}_v{}{mark}", ty.name(), blocks * COLUMNS);
    let header = Header { name: name.clone(), target, threads: 32 * WARPS, ..Header::default() };
    KernelRef::new(name, move || build(header.clone(), |k| combine(k, ty, blocks, of)))
}

fn combine<'k>(k: Kernel<'k>, ty: Half, blocks: u32, of: Parts) {
    let params = Combine::declare(k, &of);
    let shared = k.shared("sums of warps", 4 * WARPS * blocks * COLUMNS, 16);
    if let Parts::Decode { .. } = of {
        k.griddep_wait();
        k.griddep_launch();
    }

    let row = k.cta();
    let (outer, query) = params.queries.split(row);
    let (batch, head) = params.heads.split(outer);
    // Sequences may have fewer queries than the longest.
    let of_sequence = |batch: Val<'k, u32>, own: Sequence<'k>| {
        k.when(query.lt(own.count), || {
            combine_row(k, ty, blocks, &params, shared, [row, batch, head, own.begin + query]);
        });
    };
    let longest = || [params.queries.value(), k.constant(0)];
    match (&params.offsets, &params.offsets_if_any) {
        (Some(offsets), _) => {
            let [own, _] = offsets.of_batch(k, batch, longest());
            of_sequence(batch, own);
        }
        (_, Some(offsets)) => {
            let [own, _] = offsets.of_batch(k, batch, longest());
            let [batch, _] = offsets.tensor_batches(k, batch);
            of_sequence(batch, own);
        }
        _ => combine_row(k, ty, blocks, &params, shared, [row, batch, head, query]),
    }
}

/// Adds up the parts of row `row`, which is `query` of a batch and head of the tensors.
fn combine_row<'k>(
    k: Kernel<'k>,
    ty: Half,
    blocks: u32,
    params: &Combine<'k>,
    shared: SharedPiece<'k>,
    [row, batch, head, query]: [Val<'k, u32>; 4],
) {
    let (parts, elements) = (params.parts, params.elements);
    let first = row.mul_wide(parts);
    let logarithms = params.partial_log_sum_exp.moved(first * 4u64);
    let (warp, lane) = (k.thread() >> 5, k.lane());

    // Each warp works out the whole row's log-sum-exp, 32 parts at a time; the last part stands in for those that are not there.
    let last = parts - 1;
    let for_each_logarithm = |body: &dyn Fn(Val<'k, bool>, Val<'k, f32>)| {
        k.range_step(0, parts, 32, |from| {
            let part = from + lane;
            body(part.le(last), k.ld_global::<f32>(logarithms.at(part.min(last), 4), 0));
        });
    };
    let most = k.var_named("maximum", f32::NEG_INFINITY);
    for_each_logarithm(&|_, logarithm| most.set(most.max(logarithm)));
    let most = reduce::warp(k, most, |a, b| a.max(b));
    let has_keys = most.ne(f32::NEG_INFINITY);
    let shift = k.select(has_keys, most, 0.0);
    let weight = |logarithm: Val<'k, f32>| ((logarithm - shift) * LOG2_E).exp2();
    let total = k.var_named("total", 0.0f32);
    for_each_logarithm(&|is_there, logarithm| total.set(total + k.select(is_there, weight(logarithm), 0.0)));
    let total = reduce::warp(k, total, |a, b| a + b);
    // A maximum passes by what is no number, the sum does not.
    let gives = has_keys | !total.eq(total);

    // Warps take parts in turn, each in the same order whatever the schedule.
    let sums: Vec<_> = (0..4 * blocks).map(|_| k.var(0.0f32)).collect();
    let row_bytes = (elements << 2).widen();
    let column = |block: u32| (lane << 2) + block * COLUMNS;
    k.range_step(warp, parts, WARPS * UNROLL, |from| {
        // All on their way before the first is added.
        let loads: Vec<_> = (0..UNROLL)
            .map(|ahead| {
                let part = from + ahead * WARPS;
                let near = part.min(last);
                let logarithm = k.ld_global::<f32>(logarithms.at(near, 4), 0);
                let values = params.partial.moved((first + near.widen()) * row_bytes);
                let vectors: Vec<_> = (0..blocks)
                    .map(|block| k.ld_global_vector::<f32>(values.at(column(block).min(elements - 4), 4), 0, 4, Cache::Default))
                    .collect();
                (part.le(last), logarithm, vectors.concat())
            })
            .collect();
        for (is_there, logarithm, values) in loads {
            let weight = k.select(is_there, weight(logarithm), 0.0);
            sums.iter().zip(values).for_each(|(sum, value)| sum.set(k.fma(weight, value, *sum)));
        }
    });
    let own = shared.address() + warp * (4 * blocks * COLUMNS);
    for block in 0..blocks {
        let four: Vec<_> = sums[4 * block as usize..][..4].iter().map(|sum| sum.get()).collect();
        k.st_shared_vector(own + (column(block) << 2), 0, &four);
    }
    k.bar_sync();

    let [of_batch, of_head, of_query] = params.o_strides;
    let o = params.o.moved(batch.widen() * of_batch + head.widen() * of_head + query.widen() * of_query);
    let inverse = total.rcp();
    // A thread has a pair of columns at a time.
    for first in (0..blocks * COLUMNS).step_by(2 * 32 * WARPS as usize) {
        let pair = (k.thread() << 1) + first;
        k.when(pair.lt(elements), || {
            let of_warps =
                (0..WARPS).map(|warp| k.ld_shared_vector::<f32>(shared.address() + (pair << 2), i64::from(4 * warp * blocks * COLUMNS), 2));
            let whole =
                of_warps.reduce(|so_far, of_warp| so_far.into_iter().zip(of_warp).map(|(a, b)| a + b).collect()).unwrap_or_default();
            let [low, high] = [0, 1].map(|i: usize| k.select(gives, whole[i] * inverse, 0.0));
            k.st_global(o.at(pair, 2), 0, k.pack::<u32>(ty.packed(), low, high));
        });
    }
    let place = [batch, head, query];
    params.log_sum_exp.store(k, k.thread().eq(0), place, shift + total.log2() * LN_2);
    k.when(warp.eq(0) & params.max_scores.is_asked.ne(0), || {
        let of_parts = params.partial_max_scores.moved(first * 4u64);
        let greatest = k.var_named("greatest score", f32::NEG_INFINITY);
        k.range_step(lane, parts, 32, |part| greatest.set(greatest.max(k.ld_global::<f32>(of_parts.at(part, 4), 0))));
        let greatest = reduce::warp(k, greatest, |a, b| a.max(b));
        params.max_scores.store(k, lane.eq(0), place, greatest);
    });
}
