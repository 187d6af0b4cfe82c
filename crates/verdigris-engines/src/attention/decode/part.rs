//! What a CTA of either kernel has: 64 rows of a head of keys, and one part of the keys to which they attend.
//!
//! Row `r` of a head of keys is query `r / group` of its head of queries `r % group`.

use verdigris_kir::face::{Kernel, LoadOptions, Mbarrier, TensorMap, Val};
use verdigris_kir::inst::Cache;
use verdigris_kir::tile::fragment::Fragment;

use super::super::band::{BatchBand, Limits};
use super::super::combine;
use super::super::descale::HeadDescales;
use super::super::ragged::Sequence;
use super::super::softmax::Rows;
use super::super::tile::HeadTile;
use super::kernel::{Params, ROWS, Spec};

/// A CTA's rows, and its part of the keys.
pub(super) struct Part<'p, 'k> {
    kernel: Kernel<'k>,
    spec: Spec,
    params: &'p Params<'k>,
    number: Val<'k, u32>,
    batch: Val<'k, u32>,
    kv_head: Val<'k, u32>,
    first_row: Val<'k, u32>,
    /// Rows that the head of keys has.
    rows: Val<'k, u32>,
    /// Queries and keys of the sequence, where tensors are ragged.
    own: Option<[Sequence<'k>; 2]>,
    band: BatchBand<'k>,
    /// The first key to which all rows attend, and the first behind those.
    whole: [Val<'k, i32>; 2],
    /// The first block of keys, and the first behind the last.
    pub(super) blocks: [Val<'k, u32>; 2],
}

/// What a warpgroup has at its end: results of the CTA's rows, or neighbouring elements of them.
pub(super) struct Results<'s, 'k> {
    pub(super) sums: &'s Fragment<'k, f32>,
    pub(super) rows: Rows<'k>,
    /// The element of the thread's first column, and how many elements there are from the first one of the sums on.
    pub(super) column: Val<'k, u32>,
    pub(super) elements: Val<'k, u32>,
    /// Whether the log-sum-exp and the greatest score of the thread's rows are for it to write.
    pub(super) writes_numbers: Val<'k, bool>,
}

impl<'p, 'k> Part<'p, 'k> {
    /// That of this CTA.
    pub(super) fn of_cta(k: Kernel<'k>, spec: &Spec, params: &'p Params<'k>) -> Self {
        let (queries, keys, group, parts) = (params.queries, params.keys, params.group, params.parts);
        // Tiles of rows that read the same keys are neighbours.
        let (outer, row_tile) = params.row_tiles.split(k.cta());
        let (outer, number) = parts.split(outer);
        let (batch, kv_head) = params.heads_of_keys.split(outer);
        let first_row = row_tile * ROWS;
        let own = params.offsets.as_ref().map(|offsets| offsets.of_batch(k, batch, [queries, keys]));
        let extents = own.map_or([queries, keys], |own| own.map(|sequence| sequence.count));
        let rows = extents[0] * group.value();
        let band = params.band.of_batch(k, batch, extents);
        // Keys to which any row of the tile attends, and to which each does.
        let edge = [first_row, (first_row + (ROWS - 1)).min(rows - 1)].map(|row| group.quotient(row).signed());
        let [from, whole_from] = edge.map(|query| (query + band.before).max(0));
        let [whole_until, until] = edge.map(|query| (query + band.behind).max(0).min(band.keys.signed()));
        let all_attend = [whole_from, whole_until];
        let block_of = |key: Val<'k, i32>| params.band.block.quotient(key.unsigned());
        // Blocks of the tile in equal parts, of which some may be empty.
        let first_of_tile = block_of(from);
        let blocks = (block_of(until + (spec.block as i32 - 1)).signed() - first_of_tile.signed()).max(0).unsigned();
        let blocks = [number, number + 1].map(|part| first_of_tile + parts.quotient(part * blocks));
        Part { kernel: k, spec: *spec, params, number, batch, kv_head, first_row, rows, own, band, whole: all_attend, blocks }
    }

    /// Runs `body` where there is a row: sequences may have fewer queries than the longest.
    pub(super) fn when_it_has_rows(&self, body: impl Fn()) {
        match self.own {
            None => body(),
            Some(_) => self.kernel.when(self.first_row.lt(self.rows), body),
        }
    }

    /// The row of the tensors that has a query; ragged ones have no strides from batch to batch.
    fn row_of(&self, query: Val<'k, u32>) -> Val<'k, u32> {
        self.own.map_or(query, |[queries, _]| queries.begin + query)
    }

    /// Of a row: its query, and its head.
    fn place(&self, row: Val<'k, u32>) -> (Val<'k, u32>, Val<'k, u32>) {
        let (query, member) = self.params.group.split(row);
        (query, self.kv_head * self.params.group.value() + member)
    }

    /// The query and the head of each of a thread's two rows in a fragment.
    fn places(&self, row: Val<'k, u32>) -> [(Val<'k, u32>, Val<'k, u32>); 2] {
        [0, 8].map(|below| self.place(self.first_row + row + below))
    }

    /// Loads a block of keys or of values: by one thread.
    pub(super) fn bring(&self, tile: &HeadTile, slot: Val<'k, u32>, map: &TensorMap<'k>, block: Val<'k, u32>, full: Mbarrier<'k>) {
        let key = block * self.spec.block;
        // Of paged keys the table is read at the sequence.
        let at = match self.own {
            Some([_, keys]) if !self.spec.paged => [keys.begin + key, self.kv_head, self.kernel.constant(0)],
            _ => [key, self.kv_head, self.batch],
        };
        match &self.params.pages {
            None => tile.load(slot, map, at, full, LoadOptions::default()),
            Some(pages) => pages.load(tile, slot, map, at, self.band.keys, full),
        }
    }

    /// Copies the rows of queries into shared memory: `threads_of_row` threads have a row each, a power of two up to 4.
    pub(super) fn copy_queries(&self, tile: &HeadTile, slot: Val<'k, u32>, thread: Val<'k, u32>, threads_of_row: u32) {
        let (k, params) = (self.kernel, self.params);
        // All loads are on their way before the first is stored; rows beyond the last repeat it.
        let own_row = thread >> threads_of_row.trailing_zeros();
        let (query, head) = self.place((self.first_row + own_row).min(self.rows - 1));
        let [of_batch, of_head, of_query] = params.q_strides;
        let query = self.row_of(query);
        let queries_of_row = params.q.moved(self.batch.widen() * of_batch + head.widen() * of_head + query.widen() * of_query);
        let chunk = thread & (threads_of_row - 1);
        // A pair is of two neighbouring vectors of 8 elements.
        let pairs = (0..self.spec.head / 16).step_by(threads_of_row as usize / 2);
        let loads: Vec<_> = pairs
            .clone()
            .map(|pair| {
                let vector = chunk + 2 * pair;
                let at = queries_of_row.at(vector.min(params.q_vectors - 1), 16);
                (vector.lt(params.q_vectors), k.ld_global_vector::<u32>(at, 0, 4, Cache::Default))
            })
            .collect();
        for (pair, (is_there, words)) in pairs.zip(loads) {
            let words: Vec<_> = words.into_iter().map(|word| k.select(is_there, word, 0u32)).collect();
            k.st_shared_vector(tile.chunk(slot, own_row, chunk, pair), 0, &words);
        }
    }

    /// The keys to which a thread's two rows attend, from its first column on.
    pub(super) fn limits(&self, row: Val<'k, u32>, column: Val<'k, u32>) -> Limits<'k> {
        let BatchBand { keys: length, before, behind, .. } = self.band;
        let of_rows = self.places(row);
        Limits {
            kernel: self.kernel,
            is_band: true,
            before: of_rows.map(|(query, _)| query.signed() + before - column.signed()),
            behind: of_rows.map(|(query, _)| (query.signed() + behind).min(length.signed()) - column.signed()),
        }
    }

    /// Masks the scores of a block, where it has keys to which some row does not attend.
    pub(super) fn mask(&self, scores: &Fragment<'k, f32>, limits: &Limits<'k>, first_key: Val<'k, u32>) {
        let k = self.kernel;
        let [whole_from, whole_until] = self.whole;
        let end_key = (first_key + self.spec.block).signed();
        k.when(first_key.signed().lt(whole_from) | end_key.gt(whole_until), || {
            let is_outside = limits.of_block(first_key);
            for part in 0..scores.columns() / 8 {
                for (half, odd) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                    let score = scores.element(part, half, odd);
                    score.set(k.select(is_outside(half, 8 * part + odd), f32::NEG_INFINITY, score));
                }
            }
        });
    }

    /// Runs `body` for a block that ends beyond the length, given the first row beyond it: there anything may stand, and 0 · NaN is NaN. What is beyond a
    /// tensor of all keys of a batch arrives as zeros.
    pub(super) fn when_beyond(&self, first_key: Val<'k, u32>, body: impl Fn(Val<'k, u32>)) {
        let length = self.band.keys;
        let is_beyond = (first_key + self.spec.block).signed().gt(length.signed());
        let is_beyond = if self.spec.paged || self.spec.ragged { is_beyond } else { is_beyond & length.lt(self.params.keys) };
        self.kernel.when(is_beyond, || {
            body((length - first_key).min(self.spec.block));
        });
    }

    /// How many keys there are from one on.
    pub(super) fn keys_from(&self, first_key: Val<'k, u32>) -> Val<'k, i32> {
        self.band.keys.signed() - first_key.signed()
    }

    /// The factors of keys and values of 8 bits.
    pub(super) fn descales(&self) -> Option<HeadDescales<'k>> {
        self.params.descales.as_ref().map(|descales| descales.of_head(self.kernel, self.batch, self.kv_head))
    }

    /// The sinks of a thread's two rows. One counts once: in the first part.
    pub(super) fn sinks(&self, row: Val<'k, u32>) -> [Val<'k, f32>; 2] {
        let (k, params) = (self.kernel, self.params);
        // Rows beyond the last have no head.
        let last_head = params.heads_of_keys.value() * params.group.value() - 1;
        self.places(row)
            .map(|(_, head)| k.select(self.number.eq(0), params.sinks.of_head(k, self.spec.ty, head.min(last_head)), f32::NEG_INFINITY))
    }

    /// Writes results, or what this part has of them.
    pub(super) fn store(&self, row: Val<'k, u32>, Results { sums, rows: result, column, elements, writes_numbers }: Results<'_, 'k>) {
        let (k, params, parts) = (self.kernel, self.params, self.params.parts);
        for (half, (query, head)) in self.places(row).into_iter().enumerate() {
            // Rows beyond a length give nothing, nor do those without a key.
            let counts = query.lt(self.band.queries);
            let gives = counts & result.has_keys[half];
            let factor = result.factor[half];
            let value = |block: u32, odd: u32| k.select(gives, sums.element(block, half as u32, odd) * factor, 0.0);
            let [log_sum_exp, greatest] =
                [result.log_sum_exp, result.greatest].map(|of_rows| k.select(counts, of_rows[half], f32::NEG_INFINITY));
            let for_each_pair = |store: &dyn Fn(u32, [Val<'k, f32>; 2])| {
                for block in 0..sums.columns() / 8 {
                    k.when(elements.gt(8 * block), || store(block, [value(block, 0), value(block, 1)]));
                }
            };
            let whole = || {
                let at = [self.batch, head, self.row_of(query)];
                let of_row = at.iter().zip(params.o_strides).map(|(at, stride)| at.widen() * stride);
                let to = params.o.moved(of_row.fold((column << 1).widen(), |sum, part| sum + part)).address();
                for_each_pair(&|block, [low, high]| {
                    k.st_global(to, i64::from(16 * block), k.pack::<u32>(self.spec.ty.packed(), low, high));
                });
                params.log_sum_exp.store(k, writes_numbers, at, log_sum_exp);
                params.max_scores.store(k, writes_numbers, at, greatest);
            };
            let a_part = || {
                let heads = params.heads_of_keys.value() * params.group.value();
                let number = combine::place([self.batch, head, query], [heads, params.queries], [self.number, parts.value()]);
                let to = params.partial.moved(number * (params.elements << 2).widen() + (column << 2).widen()).address();
                for_each_pair(&|block, pair| k.st_global_vector(to, i64::from(32 * block), &pair, Cache::Default));
                k.when(writes_numbers, || {
                    k.st_global(params.partial_log_sum_exp.moved(number * 4u64).address(), 0, log_sum_exp);
                    let of_parts = params.partial_max_scores.moved(number * 4u64);
                    k.when(params.max_scores.is_asked.ne(0), || k.st_global(of_parts.address(), 0, greatest));
                });
            };
            let is_there = (self.first_row + row + 8 * half as u32).lt(self.rows);
            k.when(is_there, || k.when_else(parts.value().eq(1), whole, a_part));
        }
    }
}
