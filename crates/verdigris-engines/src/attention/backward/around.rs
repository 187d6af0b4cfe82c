//! What stands in front of the main launch and behind it: two numbers of each query, and the gradient of the queries out of its pieces.

use std::f32::consts::LOG2_E;

use verdigris_kir::face::{Kernel, Val, Var};
use verdigris_kir::inst::Cache;
use verdigris_kir::params::{AtExecution, Divide, Read, Write};
use verdigris_kir::tile::fragment::Fragment;

use super::super::half::Half;
use super::super::sequences::SequencesArgs;
use super::super::tile::PANEL;
use super::spec::{CONSUMERS, QUERIES, parts, piece_bytes};
use crate::hopper::WARPGROUP;

/// Threads of a CTA in front.
pub(super) const THREADS: u32 = 256;
/// Lanes of a row; each takes 8 elements at a time.
const TEAM: u32 = 8;
/// Times.
const PASSES: u32 = 4;
/// Teams of a CTA, and rows of each: a block of queries in all.
const TEAMS: u32 = THREADS / TEAM;
const ROWS: u32 = QUERIES / TEAMS;
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
    /// `delta = Σ d_o · o` and `L · log₂ e` of each query, f32, `[batch][head][padded]`; and zeros for the gradient of the queries.
    pub(super) struct Before / BeforeArgs of bool as ragged {
        pub(super) o: RowsArgs = 16,
        pub(super) d_o: RowsArgs = 16,
        pub(super) log_sum_exp: RowsArgs = 4,
        pub(super) delta: Write = 4,
        pub(super) lse_log2: Write = 4,
        /// Two pieces of each block, `[batch][head][block]`, and their bytes.
        pub(super) pieces: Write = 16,
        pub(super) block_bytes: u32,
        pub(super) queries: u32,
        /// Vectors of 8 elements in a row.
        pub(super) vectors: u32,
        pub(super) blocks: Divide,
        pub(super) heads: Divide,
        /// Of batches with numbers of queries of their own, which are those that count; and numbers are `[head][block in the workspace]`.
        pub(super) sequences: Option<SequencesArgs> = ragged.then_some(()),
    }
}

/// A block of queries a CTA. Queries beyond the last, and those that attend to nothing, get `+∞` for the second number: then `2^(s − L)` is 0 for each of their
/// scores.
pub(super) fn before<'k>(k: Kernel<'k>, ty: Half, ragged: bool) {
    let Before { o, d_o, log_sum_exp, delta, lse_log2, pieces, block_bytes, queries, vectors, blocks, heads, sequences } =
        Before::declare(k, &ragged);
    k.griddep_wait();
    k.griddep_launch();
    let (outer, block) = blocks.split(k.cta());
    let (batch, head) = heads.split(outer);
    let own = sequences.map(|sequences| (sequences.of_batch(k, batch), sequences));
    if let Some((own, _)) = &own {
        // A sequence without queries has one block of none.
        k.stop_when(block.ge(own.blocks.max(1)));
    }
    let queries = own.as_ref().map_or(queries, |(own, _)| own.queries.count);
    // Where a row of this head lies, and where its block stands in the workspace.
    let place = |row| match &own {
        None => [batch, head, row],
        Some((own, _)) => [own.batch, head, own.queries.begin + row],
    };
    let number = own.as_ref().map_or_else(|| k.cta(), |(own, sequences)| sequences.block_number(own, head, block));

    let zeros = [k.constant(0.0f32); 4];
    k.range_step(k.thread() << 4, block_bytes, THREADS * 16, |at| {
        k.st_global_vector(pieces.moved(number.widen() * block_bytes.widen() + at.widen()).address(), 0, &zeros, Cache::Default);
    });

    let lane = k.thread() & (TEAM - 1);
    let own_row = k.thread() >> TEAM.trailing_zeros();
    let rows: Vec<Val<'k, u32>> = (0..ROWS).map(|i| block * QUERIES + own_row + i * TEAMS).collect();
    let sums: Vec<_> = rows.iter().map(|_| k.var(0.0f32)).collect();
    let load = |row: Val<'k, u32>, vector: Val<'k, u32>| {
        [&o, &d_o].map(|of| k.ld_global_vector::<u32>(of.row(place(row)) + (vector << 4).widen(), 0, 4, Cache::Default))
    };
    let add = |sum: &Var<'k, f32>, [o, d_o]: [Vec<Val<'k, u32>>; 2], counts: Val<'k, bool>| {
        for (o, d_o) in o.into_iter().zip(d_o) {
            let ((o_low, o_high), (d_low, d_high)) = (k.split16(o), k.split16(d_o));
            for (o, d_o) in [(o_low, d_low), (o_high, d_high)] {
                // What is loaded in place of elements that are not there may be no number.
                sum.set(k.select(counts, k.fma(ty.widen(k, o), ty.widen(k, d_o), *sum), *sum));
            }
        }
    };
    for pass in 0..PASSES {
        let vector = lane + pass * TEAM;
        let counts = vector.lt(vectors);
        let vector = vector.min(vectors - 1);
        k.when(vectors.gt(pass * TEAM), || {
            let all = || {
                // All loads before the first sum.
                let loaded: Vec<_> = rows.iter().map(|&row| load(row, vector)).collect();
                sums.iter().zip(loaded).for_each(|(sum, loaded)| add(sum, loaded, counts));
            };
            let each = || {
                for (&row, sum) in rows.iter().zip(&sums) {
                    k.when(row.lt(queries), || add(sum, load(row, vector), counts));
                }
            };
            k.when_else(((block + 1) * QUERIES).le(queries), all, each);
        });
    }
    for distance in [4, 2, 1] {
        sums.iter().for_each(|sum| sum.set(*sum + k.shfl_bfly::<f32>(*sum, distance)));
    }
    k.when(lane.eq(0), || {
        for ((&row, sum), i) in rows.iter().zip(&sums).zip(0..) {
            let scaled = k.var(f32::INFINITY);
            k.when(row.lt(queries), || {
                let logarithm = k.ld_global::<f32>(log_sum_exp.row(place(row)), 0) * LOG2_E;
                // Finite logarithms next to −∞ may become it.
                scaled.set(k.select(logarithm.eq(f32::NEG_INFINITY), f32::INFINITY, logarithm));
            });
            let at = number * QUERIES + own_row + i * TEAMS;
            k.st_global(lse_log2.at(at, 4), 0, scaled.get());
            k.st_global(delta.at(at, 4), 0, sum.get());
        }
    });
}

verdigris_kir::parameters! {
    /// Pieces of 64 queries by half a head, or of 32 queries, as [`super::kernel`] leaves them, into the gradient of the queries.
    pub(super) struct Behind / BehindArgs of bool as ragged {
        /// `[batch][head][block][2]`.
        pub(super) pieces: Read = 16,
        /// As [`Before`] left it.
        pub(super) lse_log2: Read = 4,
        pub(super) dq: Write = 16,
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
        /// Of batches with numbers of their own: pieces are `[head][block in the workspace][2]`, and queries, keys and the band are the batch's.
        pub(super) sequences: Option<SequencesArgs> = ragged.then_some(()),
    }
}

/// One piece a CTA.
pub(super) fn behind<'k>(k: Kernel<'k>, ty: Half, head: u32, by_rows: bool, ragged: bool) {
    let Behind { pieces, lse_log2, dq, strides_bytes, queries, keys, before, behind, elements, scale, pieces_of_head, heads, sequences } =
        Behind::declare(k, &ragged);
    k.griddep_wait();
    k.griddep_launch();
    let (outer, piece) = pieces_of_head.split(k.cta());
    let (batch, query_head) = heads.split(outer);
    let block = piece >> 1;
    let first_row = block * QUERIES;
    let own = sequences.map(|sequences| (sequences.of_batch(k, batch), sequences));
    // Rows of the tensors; those of a batch that do not count get 0.
    let (queries, keys, before, behind) = match &own {
        None => (queries, keys, before, behind),
        Some((own, _)) => (own.rows[0], own.keys.count, own.before, own.behind),
    };
    let [of_batch, of_head, of_query] = strides_bytes;
    // Pieces of a head are two for each block of queries.
    let number = match &own {
        None => outer * (pieces_of_head.value() >> 1) + block,
        Some((own, sequences)) => sequences.block_number(own, query_head, block),
    };
    let to = match &own {
        None => dq.moved(batch.widen() * of_batch + query_head.widen() * of_head),
        Some((own, _)) => {
            let first = own.batch.widen() * of_batch + own.queries.begin.widen() * of_query;
            dq.moved(first + query_head.widen() * of_head)
        }
    };
    if let Some((own, _)) = &own {
        let is_beyond = first_row.ge(own.queries.count);
        k.when(is_beyond, || {
            // A half of the block's rows.
            let (half, column) = (QUERIES / CONSUMERS, k.lane() << 3);
            k.range_step((piece & 1) * half + (k.thread() >> 5), ((piece & 1) + 1) * half, WARPGROUP / 32, |row_of_block| {
                let row = first_row + row_of_block;
                k.when(column.lt(elements) & row.lt(queries), || {
                    let at = to.moved(row.widen() * of_query + (column << 1).widen()).address();
                    k.st_global_vector(at, 0, &[k.constant(0u32); 4], Cache::Default);
                });
            });
        });
        k.stop_when(is_beyond);
    }
    // Queries without a key have no gradient, whatever the products gave.
    let attends = |row_of_block: Val<'k, u32>| {
        let query = (first_row + row_of_block).signed();
        let has_keys = (query + before).max(0).lt((query + behind).min(keys.signed()));
        k.ld_global::<f32>(lse_log2.at(number * QUERIES + row_of_block, 4), 0).ne(f32::INFINITY) & has_keys
    };
    let store = |row_of_block: Val<'k, u32>, column: Val<'k, u32>, attends: Val<'k, bool>, words: &[Val<'k, u32>]| {
        let line: Vec<Val<'k, u32>> = words.iter().map(|&word| k.select(attends, word, 0u32)).collect();
        let row = first_row + row_of_block;
        k.when(row.lt(queries) & column.lt(elements), || {
            k.st_global_vector(to.moved(row.widen() * of_query + (column << 1).widen()).address(), 0, &line, Cache::Default);
        });
    };
    let pack = |pair: &[Val<'k, f32>]| k.pack::<u32>(ty.packed(), pair[0] * scale, pair[1] * scale);
    let from = pieces.at(number * CONSUMERS + (piece & 1), piece_bytes(head));
    let thread = k.thread();
    if by_rows {
        // A half of the queries, rows of 64 elements whose eights the consumer has swapped. Whatever is loaded or stored at a time fills whole lines: 16 lanes have
        // a row, four elements each.
        let rows_at_a_time = WARPGROUP / (PANEL / 4);
        let (row_of_thread, four) = (thread >> 4, thread & 15);
        let loaded: Vec<_> = (0..QUERIES / CONSUMERS / rows_at_a_time)
            .map(|i| k.ld_global_vector::<f32>(from + (thread << 4).widen(), i64::from(i * WARPGROUP * 16), 4, Cache::Default))
            .collect();
        for (values, i) in loaded.iter().zip(0..) {
            let own_row = row_of_thread + i * rows_at_a_time;
            let row_of_block = (piece & 1) * (QUERIES / CONSUMERS) + own_row;
            let column = (((four >> 1) ^ ((own_row >> 1) & 3)) << 3) + ((four & 1) << 2);
            store(row_of_block, column, attends(row_of_block), &[0, 1].map(|pair: usize| pack(&values[2 * pair..2 * pair + 2])));
        }
        return;
    }
    // A consumer's thread left its registers four at a time: two neighbours in a row, and those 8 rows below. Four lanes have the elements of a row between them.
    let from = from + (thread << 4).widen();
    let lane_of_row = thread & 3;
    // Eights of columns, four of them together, or the last two; and where they begin.
    let together: Vec<(u32, Val<'k, u32>)> = parts(head)
        .iter()
        .flat_map(|part| {
            let first = (piece & 1) * part.of_consumer + part.first;
            let columns = part.columns;
            (0..columns.div_ceil(32)).map(move |i| ((columns - 32 * i).min(32) / 8, first + 32 * i))
        })
        .collect();
    let loaded: Vec<_> = (0..together.iter().map(|(eights, _)| eights).sum())
        .map(|eight: u32| k.ld_global_vector::<f32>(from, i64::from(eight * WARPGROUP * 16), 4, Cache::Default))
        .collect();
    let rows = [0, 8].map(|below| Fragment::<f32>::row(thread) + below);
    let attends = rows.map(attends);
    let mut of_eight = loaded.iter();
    for (eights, first) in together {
        let values: Vec<_> = of_eight.by_ref().take(eights as usize).collect();
        for (half, (row_of_block, attends)) in rows.into_iter().zip(attends).enumerate() {
            let word = |eight: usize| pack(&values[eight][2 * half..2 * half + 2]);
            match eights {
                4 => store(row_of_block, first + (lane_of_row << 3), attends, &of_one_eight(lane_of_row, [0, 1, 2, 3].map(word))),
                // A lane gets a half of an eight.
                _ => {
                    let column = first + ((lane_of_row & 1) << 3) + ((lane_of_row >> 1) << 2);
                    store(row_of_block, column, attends, &swapped(lane_of_row, [0, 1].map(word), 1));
                }
            }
        }
    }
}

/// Of two lanes that have a word of each of two eights, the one without the bit gets both words of the first, and the other those of the second.
fn swapped<'k>(lane: Val<'k, u32>, [low, high]: [Val<'k, u32>; 2], bit: u32) -> [Val<'k, u32>; 2] {
    let k = lane.kernel();
    let is_high = (lane & bit).ne(0);
    let other = k.shfl_bfly::<u32>(k.select(is_high, low, high), bit);
    [k.select(is_high, other, low), k.select(is_high, high, other)]
}

/// Of four lanes that have a word of each of four eights, lane `i` gets all words of eight `i`.
fn of_one_eight<'k>(lane: Val<'k, u32>, words: [Val<'k, u32>; 4]) -> [Val<'k, u32>; 4] {
    let [a, b, c, d] = words;
    let ([a, b], [c, d]) = (swapped(lane, [a, b], 1), swapped(lane, [c, d], 1));
    let ([a, c], [b, d]) = (swapped(lane, [a, c], 2), swapped(lane, [b, d], 2));
    [a, b, c, d]
}
