//! The kernel: four warps attend to keys and values that `cp.async` brings, one block of each at a time.
//!
//! A warp has 16 rows of each 64 of the tile, and all keys of a block. Rows are queries: of one head, or of all heads that share keys, query by query. Rows of shared memory are 16 bytes longer than the elements that they have, so that
//! the eight rows of an 8×8 matrix stand in different banks. While keys are multiplied the block's values are on their way, and while values are multiplied
//! the next block's keys. Scores, and what is made of them, never leave the registers: the accumulator of one product is the operand of the next.

use std::fmt;

use verdigris_kir::face::{Header, Kernel, Pointer, Val, build};
use verdigris_kir::inst::MmaShape;
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::{Divide, Write};
use verdigris_kir::program::KernelRef;
use verdigris_kir::tile::fragment::Fragment;

use super::super::band::{BandArgs, BatchBand, Limits, SinkArgs};
use super::super::combine;
use super::super::dropout::DropoutIfAnyArgs;
use super::super::function::{self, FunctionArgs, Source};
use super::super::half::Half;
use super::super::of_queries::OfQueriesArgs;
use super::super::order::{OrderArgs, Place};
use super::super::paged::{PagesIfAny, PagesIfAnyArgs};
use super::super::ragged::OffsetsIfAnyArgs;
use super::super::score_mod::{QueryRows, ScoreModArgs, elements};
use super::super::softmax::Softmax;
use super::tiles::{CHUNK_BYTES, Matrices, ROWS, Rows, RowsArgs, SharedRows, THREADS, multiply_across, multiply_along, shape};
use crate::fuse::steps::{self, Step};

/// Everything that shapes the kernel; extents are arguments.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Spec {
    pub(super) ty: Half,
    /// Elements of a query and a key that are multiplied, and of a value.
    pub(super) head: u32,
    pub(super) value: u32,
    /// How often a warp has 16 rows.
    pub(super) row_blocks: u32,
    /// Keys of a block.
    pub(super) block: u32,
    /// Something makes scores of products.
    pub(super) score_mod: bool,
    /// The caller's function, which does; empty where there is none.
    pub(super) function: Vec<Step<Source>>,
}

impl fmt::Display for Spec {
    /// `attention_mma_bf16_d128_v128_m64_n64_scoremod`: the entry's name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Spec { head, value, block, .. } = self;
        write!(f, "attention_mma_{}_d{head}_v{value}_m{}_n{block}", self.ty.name(), self.rows())?;
        f.write_str(if self.score_mod { "_scoremod" } else { "" })?;
        function::write_name(f, &self.function)
    }
}

impl Spec {
    /// Rows of a tile: queries of one head, or of all that share keys.
    pub(super) const fn rows(&self) -> u32 {
        ROWS * self.row_blocks
    }

    const fn q_rows(&self) -> SharedRows {
        SharedRows { rows: self.rows(), elements: self.head }
    }

    const fn k_rows(&self) -> SharedRows {
        SharedRows { rows: self.block, elements: self.head }
    }

    const fn v_rows(&self) -> SharedRows {
        SharedRows { rows: self.block, elements: self.value }
    }

    pub(super) const fn shared_bytes(&self) -> u32 {
        self.q_rows().bytes() + self.k_rows().bytes() + self.v_rows().bytes()
    }

    /// CTAs that stand on an SM of 64 Ki registers: those that hold sums of many elements have 255 a thread.
    pub(super) const fn ctas_of_sm(&self) -> u32 {
        if self.row_blocks > 1 || self.value >= 128 { 2 } else { 3 }
    }

    /// Whether there is such a kernel: a function beside the products of twice as many rows takes registers that sums do not leave.
    pub(super) fn is_offered(&self) -> bool {
        self.row_blocks == 1 || self.function.is_empty()
    }

    /// Whether it can drop pairs, for which there is no room either.
    pub(super) fn drops(&self) -> bool {
        self.row_blocks == 1 && self.score_mod && self.function.is_empty()
    }

    const fn shape(&self) -> MmaShape {
        shape(self.ty)
    }

    /// The least chip that has the function's conversions.
    pub(super) fn target(&self) -> Target {
        steps::target(&self.function).max(Target::Sm80)
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.to_string(), target: self.target(), threads: THREADS, min_ctas: self.ctas_of_sm(), cluster: 1 };
        build(header, |k| attend(k, self))
    }

    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.to_string(), move || self.build())
    }
}

/// A kernel, and what a launch of it relies on beyond the kernel itself: its arguments say so.
pub(super) struct Given {
    pub(super) spec: Spec,
    pub(super) copy_bytes: u32,
}

verdigris_kir::parameters! {
    pub(super) struct Params / ParamsArgs of Given as given {
        pub(super) q: RowsArgs = given.copy_bytes,
        pub(super) k: RowsArgs = given.copy_bytes,
        pub(super) v: RowsArgs = given.copy_bytes,
        /// Bytes of a copy: 16, 8 or 4.
        pub(super) copy_bytes: u32,
        pub(super) o: Write = 4,
        pub(super) o_strides: [u64; 3],
        /// Elements of a result: an even number.
        pub(super) o_elements: u32,
        /// Natural logarithms.
        pub(super) log_sum_exp: OfQueriesArgs = (),
        pub(super) max_scores: OfQueriesArgs = (),
        /// Where there are several parts, f32: results, log-sum-exp and greatest score of each, `[batch][head][query][part]`.
        pub(super) partial: Write = 4,
        pub(super) partial_log_sum_exp: Write = 4,
        pub(super) partial_max_scores: Write = 4,
        pub(super) queries: u32,
        pub(super) keys: u32,
        pub(super) heads: u32,
        pub(super) scale: f32,
        /// Of groups of heads whose rows stand in one tile.
        pub(super) order: OrderArgs = (),
        /// Heads of such a group.
        pub(super) members: Divide,
        /// Such groups that share one head of keys.
        pub(super) group: Divide,
        /// Parts of the keys.
        pub(super) parts: Divide,
        pub(super) band: BandArgs = (),
        pub(super) sinks: SinkArgs = (),
        pub(super) score_mod: Option<ScoreModArgs> = given.spec.score_mod.then_some(()),
        pub(super) function: Option<FunctionArgs> = (!given.spec.function.is_empty()).then(|| given.spec.function.clone()),
        pub(super) offsets: OffsetsIfAnyArgs = (),
        pub(super) pages: PagesIfAnyArgs = (),
        pub(super) dropout: Option<DropoutIfAnyArgs> = given.spec.drops().then_some(()),
    }
}

fn attend<'k>(k: Kernel<'k>, spec: &Spec) {
    let params = Params::declare(k, &Given { spec: spec.clone(), copy_bytes: 4 });
    let (thread, copy_bytes) = (k.thread(), params.copy_bytes);
    let [q_slot, k_slot, v_slot] = [("queries", spec.q_rows()), ("keys", spec.k_rows()), ("values", spec.v_rows())]
        .map(|(name, rows)| k.shared(name, rows.bytes(), CHUNK_BYTES).address());

    // The tile, and which part of the keys.
    let (tile, part) = params.parts.split(k.cta());
    let Place { row: row_tile, head: heads, batch } = params.order.place(k, tile);
    let kv_head = params.group.quotient(heads);
    let (members, first_row) = (params.members, row_tile * spec.rows());
    // Row `r` is query `r / members` of head `r % members` of those that stand together: of the first of them, where what follows is alike for all.
    let head = heads * members.value();
    let place = |row: Val<'k, u32>| {
        let (query, member) = members.split(row);
        (query, head + member)
    };
    let own = params.offsets.of_batch(k, batch, [params.queries, params.keys]);
    let extents = own.map(|sequence| sequence.count);
    let rows = extents[0] * members.value();
    let BatchBand { queries, keys, before, behind } = params.band.of_batch(k, batch, extents);
    let query_row = |query: Val<'k, u32>| own[0].begin + query;
    let [query_batch, key_batch] = params.offsets.tensor_batches(k, batch);
    let head_of = |rows: &Rows<'k>, batch: Val<'k, u32>, head: Val<'k, u32>| {
        let [of_batch, of_head, _] = rows.strides;
        rows.at.moved(batch.widen() * of_batch + head.widen() * of_head)
    };

    // Sequences may have fewer queries than the longest.
    k.when(first_row.lt(rows), || {
        let [first_query, last_query] = [first_row, (first_row + (spec.rows() - 1)).min(rows - 1)].map(|row| members.quotient(row));
        let [from, whole_from] = [first_query, last_query].map(|query| (query.signed() + before).max(0).unsigned());
        let until = |query: Val<'k, u32>| (query.signed() + behind).max(0).min(keys.signed()).unsigned();
        let block_of = |key: Val<'k, u32>| params.band.block.quotient(key);
        // Blocks of keys of the tile: at least one, though all of it may be masked. They are cut into equal parts, of which some may be empty.
        let first_of_tile = block_of(from);
        let blocks = block_of(until(last_query) + (spec.block - 1)).max(first_of_tile + 1) - first_of_tile;
        let [first_block, end_block] = [part, part + 1].map(|part| first_of_tile + params.parts.quotient(part * blocks));
        let first_whole = block_of(whole_from + (spec.block - 1));
        let end_whole = block_of(until(first_query));

        let copy_queries = || {
            let query_at = |row: Val<'k, u32>| {
                let (query, head) = place(row);
                let at = head_of(&params.q, query_batch, head).moved(query_row(query).widen() * params.q.strides[2]);
                (at.address(), row.lt(rows))
            };
            let of_rows = |of_tile: Vec<Val<'k, u32>>| of_tile.into_iter().map(|row| query_at(first_row + row)).collect();
            spec.q_rows().copy(k, q_slot, [params.q.bytes, copy_bytes], of_rows);
        };
        let PagesIfAny { pages, is_paged } = &params.pages;
        let entries = pages.entries(batch);
        // Rows behind the last key that counts are zeros: there anything may stand, and 0 · NaN is NaN.
        let copy_keys = |rows: &Rows<'k>, to: SharedRows, slot: Val<'k, u32>, of_head: Pointer<'k>, block: Val<'k, u32>| {
            to.copy(k, slot, [rows.bytes, copy_bytes], |of_block| {
                let keys_of_block: Vec<_> = of_block.into_iter().map(|row| block * spec.block + row).collect();
                let places: Vec<_> = keys_of_block.iter().map(|_| k.var_unset::<u64>(Some("row"))).collect();
                let in_pages = || {
                    for (place, &key) in places.iter().zip(&keys_of_block) {
                        let [within, page] = pages.place(k, entries, key.min(keys.max(1) - 1));
                        place.set(head_of(rows, page, kv_head).moved(within.widen() * rows.strides[2]).address());
                    }
                };
                let in_a_row = || {
                    for (place, &key) in places.iter().zip(&keys_of_block) {
                        place.set(of_head.moved((own[1].begin + key).widen() * rows.strides[2]).address());
                    }
                };
                k.when_else(is_paged.ne(0), in_pages, in_a_row);
                places.iter().zip(&keys_of_block).map(|(place, key)| (place.get(), key.lt(keys))).collect()
            });
        };
        let [k_head, v_head] = [&params.k, &params.v].map(|rows| head_of(rows, key_batch, kv_head));
        let bring_keys = |block| copy_keys(&params.k, spec.k_rows(), k_slot, k_head, block);
        let bring_values = |block| copy_keys(&params.v, spec.v_rows(), v_slot, v_head, block);

        let (row, column) = (Fragment::<f32>::row(thread), Fragment::<f32>::column(thread));
        let warp_row = (thread >> 5) * 16 * spec.q_rows().pitch_bytes();
        let q_reader = Matrices::by_rows(k, spec.q_rows(), q_slot + warp_row, false);
        let k_reader = Matrices::by_elements(k, spec.k_rows(), k_slot);
        let v_reader = Matrices::by_rows(k, spec.v_rows(), v_slot, true);

        /// The 16 rows that a warp has of 64: a thread's first one, and the queries of its two.
        struct RowBlock<'k> {
            row: Val<'k, u32>,
            queries: [Val<'k, u32>; 2],
            scores: Fragment<'k, f32>,
            sums: Fragment<'k, f32>,
            softmax: Softmax<'k>,
            limits: Limits<'k>,
        }
        let row_blocks: Vec<RowBlock<'k>> = (0..spec.row_blocks)
            .map(|i| {
                let row = first_row + ROWS * i + row;
                let queries = [0, 8].map(|below| members.quotient(row + below));
                let softmax = Softmax::new(k, params.scale);
                softmax.begin();
                let key_of_column = column.signed();
                let limits = Limits {
                    kernel: k,
                    is_band: true,
                    before: queries.map(|query| query.signed() + before - key_of_column),
                    behind: queries.map(|query| (query.signed() + behind).min(keys.signed()) - key_of_column),
                };
                let (scores, sums) = (Fragment::unset(k, spec.block), Fragment::filled(k, spec.value, 0.0));
                RowBlock { row, queries, scores, sums, softmax, limits }
            })
            .collect();

        // What makes scores of products.
        let mods = params.score_mod.as_ref().filter(|_| spec.function.is_empty()).map(|mods| (mods, mods.of_head(k, batch, head)));
        let function = params
            .score_mod
            .as_ref()
            .zip(params.function.as_ref())
            .map(|(mods, function)| (mods, function.of_head(&spec.function, batch, head), mods.mask_of_head(batch, head)));
        let make_scores = |rows: &RowBlock<'k>, block: Val<'k, u32>, is_last: bool| {
            if mods.is_none() && function.is_none() {
                return;
            }
            let places = QueryRows {
                queries: rows.queries.map(|query| query.min(params.queries - 1)),
                first_key: block * spec.block + column,
                last_key: is_last.then(|| params.keys - 1),
                shift: (keys - queries).signed(),
            };
            let elements = elements(&rows.scores, 0..spec.block / 8);
            if let Some((mods, of_head)) = &mods {
                mods.apply(k, spec.ty, of_head, &elements, &places, &[]);
            }
            if let Some((mods, of_head, mask)) = &function {
                of_head.apply(k, mods.factor, &elements, &places);
                mods.hide(k, *mask, &elements, &places);
            }
        };
        let mask = |rows: &RowBlock<'k>, block: Val<'k, u32>| {
            let is_outside = rows.limits.of_block(block * spec.block);
            for (score, half, column) in elements(&rows.scores, 0..spec.block / 8) {
                score.set(k.select(is_outside(half, column), f32::NEG_INFINITY, score));
            }
        };
        let draws = params.dropout.as_ref().map(|dropout| (dropout.is_any, dropout.dropout.state(k).of_head(k, batch, head)));
        let has_arrived = || {
            k.cp_async_wait(0);
            k.bar_sync();
        };

        let turn = |block: Val<'k, u32>, is_last: bool| {
            // These keys are there for all, and all have done with the values in front.
            has_arrived();
            bring_values(block);
            k.cp_async_commit();
            row_blocks.iter().flat_map(|rows| rows.scores.registers()).for_each(|score| score.set(0.0));
            let scores: Vec<_> = row_blocks.iter().map(|rows| &rows.scores).collect();
            multiply_along(spec.shape(), &q_reader, &k_reader, spec.head, &scores);
            let is_cut = block.lt(first_whole) | block.ge(end_whole);
            for rows in &row_blocks {
                make_scores(rows, block, is_last);
                k.when(is_cut, || mask(rows, block));
                let correction = rows.softmax.next(&rows.scores);
                if let Some((is_any, draws)) = &draws {
                    // Behind the sums of rows, which are those without dropout. Where pairs are dropped, rows are queries of one head.
                    k.when(is_any.ne(0), || {
                        let words = draws.words_of_keys(rows.row, block * spec.block, column, 0..spec.block / 16);
                        draws.drop_keys(k, &rows.scores, &words);
                    });
                }
                rows.sums.map_in_place(|value, half, _| value * correction[half as usize]);
            }
            // The values are there for all, and all have done with the keys.
            has_arrived();
            k.when(block.gt(first_block), || bring_keys(block - 1));
            k.cp_async_commit();
            let sums: Vec<_> = row_blocks.iter().map(|rows| &rows.sums).collect();
            let weights = |row_block: usize, step: u32| row_blocks[row_block].scores.pack_a(step, spec.ty.packed());
            multiply_across(spec.shape(), weights, &v_reader, spec.block, &sums);
        };
        k.when(first_block.lt(end_block), || {
            copy_queries();
            bring_keys(end_block - 1);
            k.cp_async_commit();
            // The last block may reach beyond the last key, where there is nothing to make scores of.
            let block = k.var_named("block", end_block);
            if spec.score_mod {
                block.set(end_block - 1);
                turn(block.get(), true);
            }
            k.while_(
                || block.gt(first_block),
                || {
                    block.set(block - 1);
                    turn(block.get(), false);
                },
            );
        });

        let dropped = params.dropout.as_ref().map(|dropout| dropout.dropout.single_factor());
        for RowBlock { row, sums, softmax, .. } in &row_blocks {
            let places = [0, 8].map(|below| place(*row + below));
            // A sink counts once: in the first part.
            let sinks = places.map(|(_, head)| k.select(part.eq(0), params.sinks.of_head(k, spec.ty, head), f32::NEG_INFINITY));
            let result = softmax.finish(Some(sinks));
            for (half, (query, head)) in places.into_iter().enumerate() {
                // Rows beyond a length give nothing, nor do those without a key.
                let counts = query.lt(queries);
                let gives = counts & result.has_keys[half];
                let factor = dropped.map_or(result.factor[half], |dropped| result.factor[half] * dropped);
                let value = |block: u32, odd: u32| k.select(gives, sums.element(block, half as u32, odd) * factor, 0.0);
                let [log_sum_exp, greatest] =
                    [result.log_sum_exp, result.greatest].map(|of_rows| k.select(counts, of_rows[half], f32::NEG_INFINITY));
                let for_each_pair = |store: &dyn Fn(u32, [Val<'k, f32>; 2])| {
                    for block in 0..spec.value / 8 {
                        k.when((column + 8 * block).lt(params.o_elements), || store(block, [value(block, 0), value(block, 1)]));
                    }
                };
                let whole = || {
                    let at = [query_batch, head, query_row(query)];
                    let of_row = at.iter().zip(params.o_strides).map(|(at, stride)| at.widen() * stride);
                    let to = params.o.moved(of_row.fold((column << 1).widen(), |sum, part| sum + part)).address();
                    for_each_pair(&|block, [low, high]| k.st_global(to, i64::from(16 * block), k.pack::<u32>(spec.ty.packed(), low, high)));
                    params.log_sum_exp.store(k, (thread & 3).eq(0), at, log_sum_exp);
                    params.max_scores.store(k, (thread & 3).eq(0), at, greatest);
                };
                let a_part = || {
                    let number = combine::place([batch, head, query], [params.heads, params.queries], [part, params.parts.value()]);
                    let to = params.partial.moved(number * (params.o_elements << 2).widen() + (column << 2).widen()).address();
                    for_each_pair(&|block, [low, high]| {
                        k.st_global(to, i64::from(32 * block), low);
                        k.st_global(to, i64::from(32 * block + 4), high);
                    });
                    k.when((thread & 3).eq(0), || {
                        k.st_global(params.partial_log_sum_exp.moved(number * 4u64).address(), 0, log_sum_exp);
                        let of_parts = params.partial_max_scores.moved(number * 4u64);
                        k.when(params.max_scores.is_asked.ne(0), || k.st_global(of_parts.address(), 0, greatest));
                    });
                };
                k.when((*row + 8 * half as u32).lt(rows), || k.when_else(params.parts.value().eq(1), whole, a_part));
            }
        }
    });
}
