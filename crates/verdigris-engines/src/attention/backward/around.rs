//! What stands in front of the main launch and behind it: two numbers of each query, and the gradient of the queries out of its pieces.

use std::f32::consts::LOG2_E;

use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::inst::Cache;
use verdigris_kir::params::{AtExecution, Divide, Read, Write};
use verdigris_kir::tile::fragment::Fragment;

use super::super::half::Half;
use super::sequences::SequencesArgs;
use super::spec::{CONSUMERS, QUERIES, parts, piece_bytes};
use crate::hopper::WARPGROUP;

/// Threads of a CTA in front.
pub(super) const THREADS: u32 = 256;
/// Lanes of a row; each takes 8 elements at a time.
const TEAM: u32 = 16;
/// Times.
const PASSES: u32 = 2;
/// Rows of a CTA.
pub(super) const ROWS: u32 = THREADS / TEAM;
/// The most elements of a row.
pub(super) const MOST_ELEMENTS: u32 = 8 * TEAM * PASSES;

verdigris_kir::parameters! {
    /// Bytes from one batch, head and position to the next.
    pub(super) struct Rows / RowsArgs of u32 as alignment {
        pub(super) at: Read = *alignment,
        pub(super) strides_bytes: [u64; 3],
    }
}

impl<'k> Rows<'k> {
    fn row(&self, [batch, head, row]: [Val<'k, u32>; 3]) -> Val<'k, u64> {
        let [of_batch, of_head, of_row] = self.strides_bytes;
        self.at.moved(batch.widen() * of_batch + head.widen() * of_head + row.widen() * of_row).address()
    }
}

verdigris_kir::parameters! {
    /// `delta = Σ d_o · o` and `L · log₂ e` of each query, f32, `[batch][head][padded]`.
    pub(super) struct Before / BeforeArgs of bool as ragged {
        pub(super) o: RowsArgs = 16,
        pub(super) d_o: RowsArgs = 16,
        pub(super) log_sum_exp: RowsArgs = 4,
        pub(super) delta: Write = 4,
        pub(super) lse_log2: Write = 4,
        pub(super) queries: u32,
        /// Vectors of 8 elements in a row.
        pub(super) vectors: u32,
        /// Queries rounded up to whole blocks, as CTAs.
        pub(super) ctas: Divide,
        pub(super) heads: Divide,
        /// Of ragged tensors: queries and batches are those of sequences, and numbers are `[head][block in the workspace]`.
        pub(super) sequences: Option<SequencesArgs> = ragged.then_some(()),
    }
}

/// Queries beyond the last, and those that attend to nothing, get `+∞` for the second number: then `2^(s − L)` is 0 for each of their scores.
pub(super) fn before(k: Kernel<'_>, ty: Half, ragged: bool) {
    let Before { o, d_o, log_sum_exp, delta, lse_log2, queries, vectors, ctas, heads, sequences } = Before::declare(k, &ragged);
    k.griddep_wait();
    k.griddep_launch();
    let (outer, cta) = ctas.split(k.cta());
    let (batch, head) = heads.split(outer);
    let own = sequences.map(|sequences| (sequences.of_batch(k, batch), sequences));
    if let Some((own, _)) = &own {
        // A sequence without queries has one block of none.
        k.stop_when((cta * ROWS).ge(own.blocks.max(1) * QUERIES));
    }
    let queries = own.as_ref().map_or(queries, |(own, _)| own.queries.count);
    // Where a row of this head lies.
    let place = |row| match &own {
        None => [batch, head, row],
        Some((own, _)) => [k.constant(0), head, own.queries.begin + row],
    };
    let row = cta * ROWS + (k.thread() >> 4);
    let lane = k.thread() & (TEAM - 1);
    let sum = k.var(0.0f32);
    for vector in (0..PASSES).map(|pass| lane + pass * TEAM) {
        k.when(row.lt(queries) & vector.lt(vectors), || {
            let at = place(row);
            let [o, d_o] = [o.row(at), d_o.row(at)].map(|row| k.ld_global_vector::<u32>(row + (vector << 4).widen(), 0, 4, Cache::Default));
            for (o, d_o) in o.into_iter().zip(d_o) {
                let ((o_low, o_high), (d_low, d_high)) = (k.split16(o), k.split16(d_o));
                for (o, d_o) in [(o_low, d_low), (o_high, d_high)] {
                    sum.set(k.fma(ty.widen(k, o), ty.widen(k, d_o), sum));
                }
            }
        });
    }
    for distance in [8, 4, 2, 1] {
        sum.set(sum + k.shfl_bfly::<f32>(sum, distance));
    }
    k.when(lane.eq(0), || {
        let number = k.var(f32::INFINITY);
        k.when(row.lt(queries), || {
            let logarithm = k.ld_global::<f32>(log_sum_exp.row(place(row)), 0);
            // Finite logarithms next to −∞ may become it.
            let scaled = logarithm * LOG2_E;
            number.set(k.select(scaled.eq(f32::NEG_INFINITY), f32::INFINITY, scaled));
        });
        let at = match &own {
            None => k.cta() * ROWS + (k.thread() >> 4),
            Some((own, sequences)) => sequences.block_number(own, head, row >> QUERIES.trailing_zeros()) * QUERIES + (row & (QUERIES - 1)),
        };
        k.st_global(lse_log2.at(at, 4), 0, number.get());
        k.st_global(delta.at(at, 4), 0, sum.get());
    });
}

verdigris_kir::parameters! {
    /// Pieces of 64 queries by half a head, as [`super::kernel`] leaves them, into the gradient of the queries.
    pub(super) struct Behind / BehindArgs of bool as ragged {
        /// `[batch][head][block][2]`.
        pub(super) pieces: Read = 16,
        /// As [`Before`] left it.
        pub(super) lse_log2: Read = 4,
        pub(super) dq: Write = 4,
        /// Bytes from one batch, head and query to the next.
        pub(super) strides_bytes: [u64; 3],
        pub(super) queries: u32,
        pub(super) keys: u32,
        /// Query `i` attends to keys from `i + before` to below `i + behind`.
        pub(super) before: i32,
        pub(super) behind: i32,
        pub(super) elements: u32,
        pub(super) scale: AtExecution<f32> = (),
        /// Pieces of a head, and heads.
        pub(super) pieces_of_head: Divide,
        pub(super) heads: Divide,
        /// Of ragged tensors: the band is that of a sequence whose corner is 0, and pieces are `[head][block in the workspace][2]`.
        pub(super) sequences: Option<SequencesArgs> = ragged.then_some(()),
    }
}

/// One piece a CTA. A consumer's thread left its registers four at a time: two neighbours in a row, and those 8 rows below.
pub(super) fn behind(k: Kernel<'_>, ty: Half, head: u32, ragged: bool) {
    let Behind { pieces, lse_log2, dq, strides_bytes, queries, keys, before, behind, elements, scale, pieces_of_head, heads, sequences } =
        Behind::declare(k, &ragged);
    k.griddep_wait();
    k.griddep_launch();
    let (outer, piece) = pieces_of_head.split(k.cta());
    let (batch, query_head) = heads.split(outer);
    let block = piece >> 1;
    let row = block * QUERIES;
    let own = sequences.map(|sequences| (sequences.of_batch(k, batch), sequences));
    if let Some((own, _)) = &own {
        k.stop_when(row.ge(own.queries.count));
    }
    let (queries, keys, before, behind) = match &own {
        None => (queries, keys, before, behind),
        Some((own, _)) => (own.queries.count, own.keys.count, own.corner + before, own.corner + behind),
    };
    let thread = k.thread();
    let row_of_block = Fragment::<f32>::row(thread);
    let row = row + row_of_block;
    // Where the piece's parts of 8 columns stand, of a few parts together.
    let columns: Vec<Val<'_, u32>> = parts(head)
        .iter()
        .flat_map(|part| {
            let first = (piece & 1) * part.of_consumer + part.first + Fragment::<f32>::column(thread);
            (0..part.columns / 8).map(move |eight| first + 8 * eight)
        })
        .collect();
    let [of_batch, of_head, of_query] = strides_bytes;
    // Queries without a key have no gradient, whatever the products gave. Pieces of a head are two for each block of queries.
    let block_number = own.as_ref().map(|(own, sequences)| sequences.block_number(own, query_head, block));
    let numbers = match block_number {
        None => outer * (pieces_of_head.value() >> 1) * QUERIES + row,
        Some(number) => number * QUERIES + row_of_block,
    };
    let numbers = lse_log2.at(numbers, 4);
    let attends = [0u32, 8].map(|below| {
        let query = (row + below).signed();
        let has_keys = (query + before).max(0).lt((query + behind).min(keys.signed()));
        k.ld_global::<f32>(numbers, i64::from(4 * below)).ne(f32::INFINITY) & has_keys
    });
    let number = block_number.map_or_else(|| k.cta(), |number| number * CONSUMERS + (piece & 1));
    let from = pieces.at(number, piece_bytes(head)) + (thread << 4).widen();
    let to = match &own {
        None => dq.moved(batch.widen() * of_batch + query_head.widen() * of_head),
        Some((own, _)) => dq.moved(own.queries.begin.widen() * of_query + query_head.widen() * of_head),
    };
    for (part, column) in (0..).zip(columns) {
        let values = k.ld_global_vector::<f32>(from, i64::from(part * WARPGROUP * 16), 4, Cache::Default);
        for ((pair, below), attends) in values.chunks(2).zip([0, 8]).zip(attends) {
            let row = row + below;
            let packed = k.select(attends, k.pack::<u32>(ty.packed(), pair[0] * scale, pair[1] * scale), 0u32);
            k.when(row.lt(queries) & column.lt(elements), || {
                k.st_global(to.moved(row.widen() * of_query + (column << 1).widen()).address(), 0, packed);
            });
        }
    }
}
