//! The kernel: a tile of keys or of queries, its *own* rows, that goes through blocks of the others, its *partners*.
//!
//! Both ways are the same products. Own keys and values meet queries and gradients of results, own queries and gradients of results meet keys and values: the
//! first two make scores, the other two the gradients of probabilities, and what becomes of these is an operand in registers of the sums over the partners.
//! Nothing but copies of tensors is in shared memory, two blocks of partners deep. Keys go through the queries of all heads that share them, one head after the other,
//! so that their gradients are whole in registers; nothing is added in memory.

use std::f32::consts::LOG2_E;
use std::fmt;

use verdigris_kir::face::{Header, Kernel, Pointer, Val, Var, build};
use verdigris_kir::inst::MmaShape;
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::{AtExecution, Divide, Read, Write};
use verdigris_kir::program::KernelRef;
use verdigris_kir::tile::fragment::Fragment;

use super::super::super::band::{BandArgs, BatchBand, Limits};
use super::super::super::blocks::{Entry, MapIfAnyArgs};
use super::super::super::dropout::{DropoutIfAnyArgs, HeadDraws, KeptQueries};
use super::super::super::function::{self, FunctionArgs, Source};
use super::super::super::half::Half;
use super::super::super::order::{OrderArgs, Place};
use super::super::super::ragged::OffsetsIfAnyArgs;
use super::super::super::score_mod::{HeadMods, KeyRows, QueryRows, ScoreModArgs, elements};
use super::super::tiles::{CHUNK_BYTES, Matrices, ROWS, Rows, RowsArgs, SharedRows, THREADS, multiply_across, multiply_along, shape};
use crate::fuse::steps::{self, Step};

/// Blocks of partners in shared memory: one is multiplied while the next one is on its way.
const STAGES: u32 = 2;

/// What a launch sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Role {
    /// The gradient of the queries, by tiles of these.
    Queries,
    /// Those of keys and values, by tiles of these: of both, or where sums of both do not fit into registers, of one.
    KeysAndValues,
    Keys,
    Values,
}

impl Role {
    const fn owns_queries(self) -> bool {
        matches!(self, Role::Queries)
    }

    /// Whether it sums gradients of scores: that of queries or keys.
    pub(super) const fn sums_scores(self) -> bool {
        !matches!(self, Role::Values)
    }

    /// Whether it sums probabilities: the gradient of values.
    pub(super) const fn sums_values(self) -> bool {
        matches!(self, Role::KeysAndValues | Role::Values)
    }

    /// Products of a pair.
    pub(super) const fn products(self) -> [u32; 2] {
        match self {
            Role::Queries | Role::Keys => [2, 1],
            Role::KeysAndValues => [2, 2],
            Role::Values => [1, 1],
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Role::Queries => "queries",
            Role::KeysAndValues => "keys_values",
            Role::Keys => "keys",
            Role::Values => "values",
        }
    }
}

/// Everything that shapes the kernel; extents are arguments.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Spec {
    pub(super) ty: Half,
    pub(super) role: Role,
    /// Elements of a query and a key that are multiplied, and of a value.
    pub(super) head: u32,
    pub(super) value: u32,
    /// How often a warp has 16 own rows.
    pub(super) row_blocks: u32,
    /// Partners of a block.
    pub(super) block: u32,
    /// Something makes scores of products, or leaves pairs out.
    pub(super) score_mod: bool,
    /// The function of scores and behind it its slope, where there is one; with what makes scores of products.
    pub(super) function: Vec<Step<Source>>,
    /// The step of the function whose value is the score.
    pub(super) score: u32,
}

impl fmt::Display for Spec {
    /// `attention_mma_gradient_keys_values_bf16_d128_v128_m64_n32_scoremod`: the entry's name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Spec { head, value, block, role, .. } = self;
        write!(f, "attention_mma_gradient_{}_{}_d{head}_v{value}_m{}_n{block}", role.name(), self.ty.name(), self.rows())?;
        f.write_str(if self.score_mod { "_scoremod" } else { "" })?;
        if self.function.is_empty() {
            return Ok(());
        }
        function::write_name(f, &self.function)?;
        write!(f, "_score{}", self.score)
    }
}

impl Spec {
    /// Own rows of a tile.
    pub(super) const fn rows(&self) -> u32 {
        ROWS * self.row_blocks
    }

    /// Rows that make scores, and those that make gradients of probabilities.
    const fn own_rows(&self) -> [SharedRows; 2] {
        self.rows_of(self.rows())
    }

    const fn partner_rows(&self) -> [SharedRows; 2] {
        self.rows_of(self.block)
    }

    const fn rows_of(&self, rows: u32) -> [SharedRows; 2] {
        [SharedRows { rows, elements: self.head }, SharedRows { rows, elements: self.value }]
    }

    pub(super) const fn shared_bytes(&self) -> u32 {
        let ([own, own_too], [partner, partner_too]) = (self.own_rows(), self.partner_rows());
        own.bytes() + if self.role.sums_scores() { own_too.bytes() } else { 0 } + STAGES * (partner.bytes() + partner_too.bytes())
    }

    /// CTAs for whose registers an SM has room.
    pub(super) const fn ctas_of_registers(&self) -> u32 {
        2
    }

    const fn shape(&self) -> MmaShape {
        shape(self.ty)
    }

    pub(super) fn target(&self) -> Target {
        steps::target(&self.function).max(Target::Sm80)
    }

    fn build(&self) -> KernelBody {
        let header =
            Header { name: self.to_string(), target: self.target(), threads: THREADS, min_ctas: self.ctas_of_registers(), cluster: 1 };
        build(header, |k| differentiate(k, self))
    }

    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.to_string(), move || self.build())
    }
}

/// A kernel, and what a launch of it relies on beyond the kernel itself.
pub(super) struct Given {
    pub(super) spec: Spec,
    pub(super) copy_bytes: u32,
}

verdigris_kir::parameters! {
    /// A gradient, if it is written.
    pub(super) struct Gradient / #[derive(Clone, Copy, Debug)] GradientArgs of () as _spec {
        at: Write = 4,
        strides: [u64; 3],
        /// Elements of a row: an even number, and 0 of a gradient that nobody asked for.
        elements: u32,
    }
}

impl GradientArgs {
    pub(super) fn new(at: verdigris_kir::program::Address, strides: [u64; 3], elements: u32) -> GradientArgs {
        GradientArgs { at, strides, elements }
    }
}

verdigris_kir::parameters! {
    pub(super) struct Params / ParamsArgs of Given as given {
        pub(super) q: RowsArgs = given.copy_bytes,
        pub(super) k: RowsArgs = given.copy_bytes,
        pub(super) v: RowsArgs = given.copy_bytes,
        pub(super) d_o: RowsArgs = given.copy_bytes,
        /// Bytes of a copy: 16, 8 or 4.
        pub(super) copy_bytes: u32,
        /// Two numbers of each query, f32, `[batch][head][query]`.
        pub(super) lse_log2: Read = 4,
        pub(super) delta: Read = 4,
        /// Of the queries or the keys, and of the values.
        pub(super) of_scores: Option<GradientArgs> = given.spec.role.sums_scores().then_some(()),
        pub(super) of_values: Option<GradientArgs> = given.spec.role.sums_values().then_some(()),
        pub(super) queries: u32,
        pub(super) keys: u32,
        pub(super) heads: u32,
        pub(super) scale: AtExecution<f32> = (),
        /// Where scores are products.
        pub(super) scale_log2: f32,
        /// Of own rows.
        pub(super) order: OrderArgs = (),
        /// Heads of queries that share one of keys.
        pub(super) group: Divide,
        /// Its blocks are those of partners.
        pub(super) band: BandArgs = (),
        pub(super) score_mod: Option<ScoreModArgs> = given.spec.score_mod.then_some(()),
        pub(super) dropout: Option<DropoutIfAnyArgs> = given.spec.score_mod.then_some(()),
        pub(super) map: Option<MapIfAnyArgs> = given.spec.score_mod.then_some(()),
        pub(super) function: Option<FunctionArgs> = (!given.spec.function.is_empty()).then(|| given.spec.function.clone()),
        pub(super) offsets: OffsetsIfAnyArgs = (),
    }
}

/// Queries or keys, with the tensors that have a row for each.
struct Side<'a, 'k> {
    rows: [&'a Rows<'k>; 2],
    batch: Val<'k, u32>,
    /// Their first row in the tensors, how many rows there are, and how many of those count.
    begin: Val<'k, u32>,
    all: Val<'k, u32>,
    counting: Val<'k, u32>,
}

/// The 16 rows that a warp has of 64 own ones.
struct RowBlock<'k> {
    /// The thread's first one; the other is 8 below.
    row: Val<'k, u32>,
    limits: Limits<'k>,
    /// Scores, then probabilities, then what gradients of scores are of those of probabilities.
    scores: Fragment<'k, f32>,
    gradients: Fragment<'k, f32>,
    /// Rounded probabilities, where scores need room for something else before these are multiplied.
    probabilities: Vec<Var<'k, u32>>,
    sums_of_scores: Option<Fragment<'k, f32>>,
    sums_of_values: Option<Fragment<'k, f32>>,
    /// Both numbers of both rows, where they are queries.
    numbers: Option<[[Val<'k, f32>; 2]; 2]>,
    kept: Option<KeptQueries<'k>>,
}

/// One of the heads of queries, where something depends on which, and what a map has for a block of it.
struct Member<'k> {
    head: Val<'k, u32>,
    entry: Option<Entry<'k>>,
    mods: Option<HeadMods<'k>>,
    draws: Option<HeadDraws<'k>>,
}

fn differentiate<'k>(k: Kernel<'k>, spec: &Spec) {
    if spec.role == Role::KeysAndValues && spec.row_blocks * (spec.head + spec.value) >= 256 {
        // Both sums fill 128 registers of each thread, or more; what a turn holds across its products goes to local memory, once a turn.
        k.allow_spills(64);
    }
    let params = Params::declare(k, &Given { spec: spec.clone(), copy_bytes: 4 });
    let (role, thread) = (spec.role, k.thread());
    let ([own_rows, partner_rows], block_log2) = ([spec.own_rows(), spec.partner_rows()], spec.block.ilog2());
    let own_slots: Vec<_> = (["own rows of scores", "own rows of gradients"].iter().zip(own_rows))
        .take(if role.sums_scores() { 2 } else { 1 })
        .map(|(name, rows)| k.shared(name, rows.bytes(), CHUNK_BYTES).address())
        .collect();
    let partner_slots = [("partners of scores", partner_rows[0]), ("partners of gradients", partner_rows[1])]
        .map(|(name, rows)| k.shared(name, STAGES * rows.bytes(), CHUNK_BYTES).address());

    // The tile. The first keys have the most queries where there is a diagonal, the last queries the most keys: these are first.
    let Place { row: tile, head, batch } = params.order.place(k, k.cta());
    let tile = if role.owns_queries() { tile } else { params.order.rows - 1 - tile };
    let first_row = tile * spec.rows();
    let sequences = params.offsets.of_batch(k, batch, [params.queries, params.keys]);
    let band = params.band.of_batch(k, batch, sequences.map(|sequence| sequence.count));
    let [query_batch, key_batch] = params.offsets.tensor_batches(k, batch);
    let of_queries = Side {
        rows: [&params.q, &params.d_o],
        batch: query_batch,
        begin: sequences[0].begin,
        all: sequences[0].count,
        counting: band.queries,
    };
    let of_keys =
        Side { rows: [&params.k, &params.v], batch: key_batch, begin: sequences[1].begin, all: sequences[1].count, counting: band.keys };
    // Own row `r` meets partners from `r + before` to below `r + behind`.
    let BatchBand { before, behind, .. } = band;
    let (own, partner, [before, behind]) = match role.owns_queries() {
        true => (of_queries, of_keys, [before, behind]),
        false => (of_keys, of_queries, [k.constant(1i32) - behind, k.constant(1i32) - before]),
    };
    let members = if role.owns_queries() { k.constant(1) } else { params.group.value() };
    let partner_head = |member: Val<'k, u32>| if role.owns_queries() { params.group.quotient(head) } else { head * members + member };
    let query_head = |member: Val<'k, u32>| if role.owns_queries() { head } else { head * members + member };
    let number_of = |query_head: Val<'k, u32>, query: Val<'k, u32>| (batch * params.heads + query_head) * params.queries + query;
    let row_of = |side: &Side<'_, 'k>, which: usize, head: Val<'k, u32>, row: Val<'k, u32>| {
        let (rows, [of_batch, of_head, of_row]) = (side.rows[which], side.rows[which].strides);
        rows.at.moved(side.batch.widen() * of_batch + head.widen() * of_head + (side.begin + row).widen() * of_row).address()
    };

    // Sequences may have fewer rows than the longest.
    k.when(first_row.lt(own.all), || {
        let last_row = (first_row + (spec.rows() - 1)).min(own.counting.max(1) - 1);
        let from = |row: Val<'k, u32>| (row.signed() + before).max(0).unsigned();
        let until = |row: Val<'k, u32>| (row.signed() + behind).max(0).min(partner.counting.signed()).unsigned();
        let up = |partner: Val<'k, u32>| (partner + (spec.block - 1)) >> block_log2;
        let first_block = from(first_row) >> block_log2;
        let end_block = up(until(last_row)).max(first_block);
        let blocks = k.select(first_row.lt(own.counting), end_block - first_block, 0u32);
        // Between these, all pairs of own rows that count and of partners meet.
        let (first_whole, end_whole) = (up(from(last_row)), until(first_row) >> block_log2);

        // Rows behind the last one that counts are zeros: there anything may stand, and 0 · NaN is NaN.
        let copy_own = || {
            for (which, (rows, &slot)) in own_rows.iter().zip(&own_slots).enumerate() {
                rows.copy(k, slot, [own.rows[which].bytes, params.copy_bytes], |of_tile| {
                    let rows = of_tile.into_iter().map(|row| first_row + row);
                    rows.map(|row| (row_of(&own, which, head, row), row.lt(own.counting))).collect()
                });
            }
        };
        // Behind the elements of a query and of the gradient of its result stands a number of the query's.
        let bring = |member: Val<'k, u32>, block: Val<'k, u32>, stage: Val<'k, u32>| {
            let first = block << block_log2;
            let to = |which: usize| partner_slots[which] + stage * partner_rows[which].bytes();
            for (which, rows) in partner_rows.iter().enumerate() {
                rows.copy(k, to(which), [partner.rows[which].bytes, params.copy_bytes], |of_block| {
                    let rows = of_block.into_iter().map(|row| first + row);
                    rows.map(|row| (row_of(&partner, which, partner_head(member), row), row.lt(partner.counting))).collect()
                });
            }
            if !role.owns_queries() {
                k.when(thread.lt(spec.block), || {
                    let query = first + thread;
                    let bytes = k.select(query.lt(partner.counting), 4u32, 0u32);
                    for (which, numbers) in [params.lse_log2, params.delta].into_iter().enumerate() {
                        let rows = partner_rows[which];
                        let behind = i64::from(2 * rows.elements);
                        let from = numbers.at(number_of(query_head(member), query), 4);
                        k.cp_async(to(which) + thread * rows.pitch_bytes(), behind, from, 0, 4, bytes);
                    }
                });
            }
            k.cp_async_commit();
        };

        let (row, column) = (Fragment::<f32>::row(thread), Fragment::<f32>::column(thread));
        let warp = thread >> 5;
        let own_readers: Vec<_> = (own_slots.iter().zip(own_rows))
            .map(|(&slot, rows)| Matrices::by_rows(k, rows, slot + warp * (16 * rows.pitch_bytes()), false))
            .collect();
        let row_blocks: Vec<RowBlock<'k>> = (0..spec.row_blocks)
            .map(|i| {
                let row = first_row + ROWS * i + row;
                let rows = [row, row + 8];
                let limits = Limits {
                    kernel: k,
                    is_band: true,
                    before: rows.map(|row| row.signed() + before - column.signed()),
                    behind: rows.map(|row| (row.signed() + behind).min(partner.counting.signed()) - column.signed()),
                };
                let of_query =
                    |numbers: Pointer<'k>| rows.map(|row| k.ld_global::<f32>(numbers.at(number_of(head, row.min(own.all - 1)), 4), 0));
                let packed = if spec.score_mod && role.sums_values() { spec.block / 4 } else { 0 };
                RowBlock {
                    row,
                    limits,
                    scores: Fragment::unset(k, spec.block),
                    gradients: Fragment::unset(k, spec.block),
                    probabilities: (0..packed).map(|_| k.var_unset(Some("p"))).collect(),
                    sums_of_scores: role.sums_scores().then(|| Fragment::filled(k, spec.head, 0.0)),
                    sums_of_values: role.sums_values().then(|| Fragment::filled(k, spec.value, 0.0)),
                    numbers: role.owns_queries().then(|| [params.lse_log2, params.delta].map(of_query)),
                    kept: (spec.score_mod && !role.owns_queries()).then(|| KeptQueries::all(k)),
                }
            })
            .collect();
        let bends: Vec<Var<'k, f32>> = if spec.score_mod { (0..4).map(|_| k.var_unset(Some("bend"))).collect() } else { vec![] };
        let state = params.dropout.as_ref().map(|dropout| (dropout, dropout.dropout.state(k)));
        let dropped = params.dropout.as_ref().map(|dropout| dropout.dropout.single_factor());
        let each = || (0..2).flat_map(|half| [(half, 0), (half, 1)]);

        // Of the scores of 8 partners: with what stands between the products, probabilities, and then these times the slope of what stands there.
        let weigh = |of: &Member<'k>, rows: &RowBlock<'k>, block: Val<'k, u32>, part: u32, lse: &dyn Fn(u32, u32) -> Val<'k, f32>| {
            let Some(mods) = &params.score_mod else {
                for (half, odd) in each() {
                    let score = rows.scores.element(part, half, odd);
                    score.set(k.fma(score, params.scale_log2, -lse(half, odd)).exp2());
                }
                return;
            };
            let (first, shift) = (block << block_log2, (band.keys - band.queries).signed());
            let (last_query, last_key) = (params.queries - 1, params.keys - 1);
            let own_elements = elements(&rows.scores, part..part + 1);
            let own_rows = [rows.row, rows.row + 8];
            let head = of.mods.as_ref().expect("a head of scores that are made");
            let of_function = params.function.as_ref().map(|function| {
                (function.of_head(&spec.function, batch, of.head), mods.mask_of_head(batch, of.head), (spec.score, &bends[..]))
            });
            if role.owns_queries() {
                let queries = own_rows.map(|row| row.min(last_query));
                let places = QueryRows { queries, first_key: first + column, last_key: Some(last_key), shift };
                match of_function {
                    None => mods.apply(k, spec.ty, head, &own_elements, &places, &bends),
                    Some((function, mask, sloped)) => {
                        function.apply_sloped_by_queries(k, mods.factor, &own_elements, &places, sloped);
                        mods.hide(k, mask, &own_elements, &places);
                    }
                }
            } else {
                let keys = own_rows.map(|row| row.min(last_key));
                let places = KeyRows { keys, first_query: first + column, last_query, shift };
                match of_function {
                    None => mods.apply(k, spec.ty, head, &own_elements, &places, &bends),
                    Some((function, mask, sloped)) => {
                        function.apply_sloped(k, mods.factor, &own_elements, &places, sloped);
                        mods.hide(k, mask, &own_elements, &places);
                    }
                }
            }
            if let Some((map, entry)) = params.map.as_ref().zip(of.entry) {
                k.when(entry.is_in_part(), || {
                    let leave_out = |n: usize, is_hidden: Val<'k, bool>| {
                        let (score, bend) = (&own_elements[n].0, &bends[n]);
                        score.set(k.select(is_hidden, f32::NEG_INFINITY, *score));
                        bend.set(k.select(is_hidden, 0.0, *bend));
                    };
                    if role.owns_queries() {
                        let first_of_part = first + 8 * (part & !1);
                        for (half, words) in (0..).zip(map.masks.words(k, entry, rows.row, first_of_part, 16)) {
                            let word = words[0].shr(column + 8 * (part & 1));
                            (0..2).for_each(|odd| leave_out(2 * half + odd, (word & (1 << odd)).eq(0)));
                        }
                    } else {
                        let columns = map.masks.columns(entry, first + 8 * part + column, rows.row);
                        for odd in 0..2 {
                            let hidden = columns.are_hidden(k, odd as u32);
                            hidden.into_iter().enumerate().for_each(|(half, is_hidden)| leave_out(2 * half + odd, is_hidden));
                        }
                    }
                });
            }
            if params.function.is_some() {
                // Of a score of −∞ the slope may be anything.
                for ((score, ..), bend) in own_elements.iter().zip(&bends) {
                    bend.set(k.select(score.eq(f32::NEG_INFINITY), 0.0, *bend));
                }
            }
            let is_outside = rows.limits.of_block(first);
            for ((score, half, column), bend) in own_elements.iter().zip(&bends) {
                let lse = lse(*half, column % 2);
                let outside = is_outside(*half, *column);
                let p = k.select(outside, 0.0, k.fma(*score, LOG2_E, -lse).exp2());
                score.set(p);
                // Of a score that is no number, neither is the slope.
                bend.set(k.select(outside, 0.0, *bend));
            }
            for (half, to) in (0..2).zip(rows.probabilities.iter().skip(2 * part as usize)) {
                let [low, high] = [0, 1].map(|odd| {
                    let p = rows.scores.element(part, half, odd).get();
                    rows.kept.as_ref().map_or(p, |kept| kept.of(part, half, odd, p))
                });
                to.set(k.pack::<u32>(spec.ty.packed(), low, high));
            }
            for ((score, ..), bend) in own_elements.iter().zip(&bends) {
                score.set(*score * *bend);
            }
        };

        let turn = |member: Val<'k, u32>, block: Val<'k, u32>, stage: Val<'k, u32>, entry: Option<Entry<'k>>| {
            let slots = [0, 1].map(|which: usize| partner_slots[which] + stage * partner_rows[which].bytes());
            let along = [0, 1].map(|which: usize| Matrices::by_elements(k, partner_rows[which], slots[which]));
            let across = [0, 1].map(|which: usize| Matrices::by_rows(k, partner_rows[which], slots[which], true));
            // A number of the queries of 8 columns, where partners are queries.
            let columns_numbers = |which: usize, part: u32| {
                let (rows, slot) = (partner_rows[which], slots[which] + column * partner_rows[which].pitch_bytes());
                [0, 1].map(|odd| k.ld_shared::<f32>(slot, i64::from((8 * part + odd) * rows.pitch_bytes() + 2 * rows.elements)))
            };
            let numbers = |which: usize| -> Vec<[Val<'k, f32>; 2]> {
                let parts = if role.owns_queries() { 0 } else { spec.block / 8 };
                (0..parts).map(|part| columns_numbers(which, part)).collect()
            };
            let number =
                |rows: &RowBlock<'k>, of_columns: &[[Val<'k, f32>; 2]], which: usize, [part, half, odd]: [u32; 3]| match rows.numbers {
                    Some(of_rows) => of_rows[which][half as usize],
                    None => of_columns[part as usize][odd as usize],
                };
            let head = query_head(member);
            let of = Member {
                head,
                entry,
                mods: params.score_mod.as_ref().map(|mods| mods.of_head(k, batch, head)),
                draws: state.as_ref().map(|(_, state)| state.of_head(k, batch, head)),
            };
            let is_any_dropped = params.dropout.as_ref().map(|dropout| dropout.is_any.ne(0));
            if let Some((is_any, draws)) = is_any_dropped.zip(of.draws.as_ref()) {
                for rows in &row_blocks {
                    let Some(kept) = &rows.kept else { continue };
                    k.when(is_any, || draws.draw(kept, rows.row, [block << block_log2, column], spec.block));
                }
            }

            let scores: Vec<_> = row_blocks.iter().map(|rows| &rows.scores).collect();
            scores.iter().flat_map(|scores| scores.registers()).for_each(|score| score.set(0.0));
            multiply_along(spec.shape(), &own_readers[0], &along[0], spec.head, &scores);
            let is_cut = block.lt(first_whole) | block.ge(end_whole);
            let lse = numbers(0);
            for rows in &row_blocks {
                if !spec.score_mod {
                    k.when(is_cut, || {
                        let is_outside = rows.limits.of_block(block << block_log2);
                        for (score, half, column) in elements(&rows.scores, 0..spec.block / 8) {
                            score.set(k.select(is_outside(half, column), f32::NEG_INFINITY, score));
                        }
                    });
                }
                for part in 0..spec.block / 8 {
                    weigh(&of, rows, block, part, &|half, odd| number(rows, &lse, 0, [part, half, odd]));
                }
            }
            if role.sums_values() {
                let sums: Vec<_> = row_blocks.iter().filter_map(|rows| rows.sums_of_values.as_ref()).collect();
                let weights = |row_block: usize, step: u32| match &row_blocks[row_block].probabilities[..] {
                    [] => row_blocks[row_block].scores.pack_a(step, spec.ty.packed()),
                    packed => [0, 1, 2, 3].map(|i| packed[4 * step as usize + i].get()),
                };
                multiply_across(spec.shape(), weights, &across[1], spec.block, &sums);
            }
            if !role.sums_scores() {
                return;
            }

            let gradients: Vec<_> = row_blocks.iter().map(|rows| &rows.gradients).collect();
            gradients.iter().flat_map(|gradients| gradients.registers()).for_each(|gradient| gradient.set(0.0));
            multiply_along(spec.shape(), &own_readers[1], &along[1], spec.value, &gradients);
            let delta = numbers(1);
            for rows in &row_blocks {
                if let Some((is_any, draws)) = is_any_dropped.zip(of.draws.as_ref()).filter(|_| role.owns_queries()) {
                    k.when(is_any, || {
                        let words = draws.words_of_keys(rows.row, block << block_log2, column, 0..spec.block / 16);
                        draws.drop_keys(k, &rows.gradients, &words);
                    });
                }
                let through = |hides: bool| {
                    for (part, (half, odd)) in (0..spec.block / 8).flat_map(|part| each().map(move |place| (part, place))) {
                        let (gradient, weight) = (rows.gradients.element(part, half, odd), rows.scores.element(part, half, odd));
                        let delta = number(rows, &delta, 1, [part, half, odd]);
                        let of_probability = match dropped {
                            None => gradient - delta,
                            Some(factor) => {
                                let left = rows.kept.as_ref().map_or(gradient.get(), |kept| kept.of(part, half, odd, gradient.get()));
                                k.fma(left, factor, -delta)
                            }
                        };
                        let of_score = of_probability * weight;
                        // Of a pair that is left out, the product may be no number.
                        gradient.set(if hides { k.select(weight.eq(0.0), 0.0, of_score) } else { of_score });
                    }
                };
                if spec.score_mod {
                    through(true);
                } else {
                    k.when_else(is_cut, || through(true), || through(false));
                }
            }
            let sums: Vec<_> = row_blocks.iter().filter_map(|rows| rows.sums_of_scores.as_ref()).collect();
            let weights = |row_block: usize, step: u32| row_blocks[row_block].gradients.pack_a(step, spec.ty.packed());
            multiply_across(spec.shape(), weights, &across[0], spec.block, &sums);
        };

        k.when(blocks.gt(0), || {
            let [member, block, stage] = [0, 1, 2].map(|_: u32| k.var(0u32));
            block.set(first_block);
            copy_own();
            // What a map has for the next block; nothing is brought of one that is left out.
            let entry_of = |member: Val<'k, u32>, block: Val<'k, u32>| {
                let partner = block << block_log2;
                let pair = if role.owns_queries() { [first_row, partner] } else { [partner, first_row] };
                params.map.as_ref().map(|map| map.entry(k, [batch, query_head(member)], pair, block))
            };
            let next_entry = k.var_named("entry", 0u32);
            let bring_next = || match entry_of(member.get(), block.get()) {
                None => bring(member.get(), block.get(), stage.get()),
                Some(entry) => {
                    next_entry.set(entry.of_map);
                    k.when(entry.is_attended(), || bring(member.get(), block.get(), stage.get()));
                }
            };
            bring_next();
            let last_member = members - 1;
            k.range(blocks * members, |_| {
                let [now_member, now_block, now_stage] = [&member, &block, &stage].map(|next| k.var(next.get()).get());
                let is_last_block = (now_block + 1).eq(end_block);
                let is_last = is_last_block & now_member.eq(last_member);
                block.set(k.select(is_last_block, first_block, now_block + 1));
                member.set(k.select(is_last_block, now_member + 1, now_member));
                stage.set(now_stage ^ 1);
                // This block is there for all, and all have done with the one in front, to whose place the next one goes.
                k.cp_async_wait(0);
                k.bar_sync();
                let now_entry = params.map.is_some().then(|| Entry { block: now_block, of_map: k.var(next_entry.get()).get() });
                k.when(!is_last, bring_next);
                match now_entry {
                    None => turn(now_member, now_block, now_stage, None),
                    Some(entry) => k.when(entry.is_attended(), || turn(now_member, now_block, now_stage, Some(entry))),
                }
            });
        });

        let factor_of_values = dropped.unwrap_or_else(|| k.constant(1.0));
        for rows in &row_blocks {
            let results = [
                (&params.of_scores, &rows.sums_of_scores, params.scale, spec.head),
                (&params.of_values, &rows.sums_of_values, factor_of_values, spec.value),
            ];
            for (half, row) in (0..2).zip([rows.row, rows.row + 8]) {
                // Rows beyond a length have no gradient, nor have those without partners.
                let meets = row.lt(own.counting) & from(row).lt(until(row));
                let meets = rows.numbers.map_or(meets, |[lse, _]| meets & lse[half as usize].ne(f32::INFINITY));
                for (gradient, sums, factor, elements) in &results {
                    let Some((gradient, sums)) = gradient.as_ref().zip(sums.as_ref()) else { continue };
                    let [of_batch, of_head, of_row] = gradient.strides;
                    let to = own.batch.widen() * of_batch + head.widen() * of_head + (own.begin + row).widen() * of_row;
                    let to = gradient.at.moved(to + (column << 1).widen()).address();
                    let value = |part: u32, odd: u32| k.select(meets, sums.element(part, half, odd) * *factor, 0.0);
                    for part in 0..elements / 8 {
                        k.when(row.lt(own.all) & (column + 8 * part).lt(gradient.elements), || {
                            k.st_global(to, i64::from(16 * part), k.pack::<u32>(spec.ty.packed(), value(part, 0), value(part, 1)));
                        });
                    }
                }
            }
        }
    });
}
