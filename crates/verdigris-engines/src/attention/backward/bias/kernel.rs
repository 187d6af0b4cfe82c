//! The kernel: dS of one tile of the bias, summed in registers over all that the bias was repeated over; or what the pairs of a tile give to what a function reads.
//!
//! A CTA has 64 queries and 64 keys for each consumer. A *turn* is a head of a batch (and, where the bias is one row, a block of queries): queries with keys
//! come into one slot of the ring, gradients of results with values into the next, and both products are over the elements of a head, so that queries stand
//! along the rows, as in the forward pass. Nothing else is multiplied: `P ∘ (dP − Δ)` is added to the sums as it is, in f32.

use std::f32::consts::LOG2_E;

use verdigris_kir::face::{Kernel, LoadOptions, Role, TensorMap, Val, Var, WgmmaA};
use verdigris_kir::inst::{Atomic, Order as MemoryOrder, Scope};
use verdigris_kir::ir::Access;
use verdigris_kir::params::{Divide, Map, Read, ReadWrite};
use verdigris_kir::tile::fragment::Fragment;
use verdigris_kir::tile::ring::{Ring, RingScope};

use super::super::super::band::Limits;
use super::super::super::function::{FunctionArgs, place_in_table};
use super::super::super::score_mod::{QueryRows, elements};
use super::super::super::tile::descriptor;
use super::super::kernel::{BandArgs, ModArgs};
use super::super::spec::QUERIES;
use super::{KEYS, PART, Shares, Spec};
use crate::fuse::epilogue::EpilogueArgs;
use crate::hopper::{FIRST_BARRIER, WARPGROUP, roles};
use crate::layout::batch::BatchIndexArgs;
use crate::split_k::reduction::{Parts, PartsArgs};

verdigris_kir::parameters! {
    /// Maps are `{elements, rows, heads, batch}`.
    pub(super) struct Params / ParamsArgs of Spec as spec {
        pub(super) q: Map = spec.query_tile().map(Access::Read),
        pub(super) k: Map = spec.key_tile().map(Access::Read),
        pub(super) v: Map = spec.key_tile().map(Access::Read),
        pub(super) d_o: Map = spec.query_tile().map(Access::Read),
        /// Two numbers of each query, f32, `[batch][head][block of queries]`.
        pub(super) lse_log2: Read = 4,
        pub(super) delta: Read = 4,
        pub(super) keys: u32,
        /// Of the problem.
        pub(super) query_blocks: u32,
        pub(super) heads: u32,
        /// Heads of queries that share one of keys.
        pub(super) group: Divide,
        /// Tiles of the bias: parts of each, along its keys, along its queries, and heads that it has.
        pub(super) parts: Divide,
        pub(super) key_tiles: Divide,
        pub(super) query_tiles: Divide,
        pub(super) own_heads: Divide,
        /// What a tile goes through: all turns and those of a part; blocks of queries and heads that it was repeated over, 1 where it was not.
        pub(super) turns: u32,
        pub(super) turns_of_part: u32,
        pub(super) repeated_blocks: Divide,
        pub(super) repeated_heads: Divide,
        /// Whether the bias is one row, into which all queries are summed.
        pub(super) is_row: u32,
        pub(super) band: BandArgs = (),
        pub(super) score_mod: ModArgs = (),
        /// Sums of parts, or the gradient itself.
        pub(super) kept: Option<PartsArgs> = (spec.out.is_none() && spec.shares().is_none()).then_some(()),
        pub(super) out: Option<OutArgs> = spec.out.map(|_| spec.clone()),
        pub(super) function: Option<FunctionArgs> = spec.by.as_ref().map(|by| by.steps.clone()),
        pub(super) shares: Option<SharesArgs> = spec.shares().map(|_| ()),
    }
}

verdigris_kir::parameters! {
    /// The gradient, as matrices of batches and heads.
    pub(super) struct Out / OutArgs of Spec as spec {
        pub(super) batch: BatchIndexArgs = (),
        pub(super) epilogue: EpilogueArgs = spec.epilogue().over_matrices(),
        pub(super) rows: u32,
        pub(super) columns: u32,
    }
}

verdigris_kir::parameters! {
    /// Where pairs add their shares, f32.
    pub(super) struct To / #[derive(Clone, Copy, Debug)] SharesArgs of () as _spec {
        pub(super) to: ReadWrite = 4,
        /// Bytes from one batch, head and query to the next; entries of a table are side by side.
        pub(super) strides: [u64; 3],
        pub(super) last_entry: f32,
    }
}

/// Neighbouring shares of a thread's two rows that go to one element, which are added in memory as one.
struct Run<'k> {
    kernel: Kernel<'k>,
    /// The first element of each row.
    rows: [Val<'k, u64>; 2],
    sums: [Var<'k, f32>; 2],
    entries: [Var<'k, u32>; 2],
}

impl<'k> Run<'k> {
    fn new(k: Kernel<'k>, to: &To<'k>, turn: Turn<'k>, queries: [Val<'k, u32>; 2]) -> Self {
        let [of_batch, of_head, of_query] = to.strides;
        let of_matrix = to.to.moved(turn.batch.widen() * of_batch + turn.head.widen() * of_head);
        let rows = queries.map(|query| of_matrix.moved(query.widen() * of_query).address());
        Run { kernel: k, rows, sums: [0, 1].map(|_| k.var_named("share", 0.0f32)), entries: [0, 1].map(|_| k.var_named("entry", 0u32)) }
    }

    fn add(&self, half: usize) {
        let to = self.rows[half] + self.entries[half].mul_wide(4);
        self.kernel.red_global(Atomic::Add, to, 0, &[self.sums[half].get()], MemoryOrder::Relaxed(Scope::Gpu));
    }

    /// One more share; where it goes to another element, those before it are added.
    fn share(&self, half: usize, entry: Val<'k, u32>, share: Val<'k, f32>) {
        self.kernel.when(entry.ne(self.entries[half]), || {
            self.kernel.when(self.sums[half].ne(0.0), || self.add(half));
            self.sums[half].set(0.0);
            self.entries[half].set(entry);
        });
        self.sums[half].set(self.sums[half] + share);
    }

    /// The end. Where all four threads of a row have given to one element, they add it together.
    fn end(&self, thread: Val<'k, u32>, of_one: bool) {
        for half in 0..2 {
            let is_own = match of_one {
                false => self.sums[half].ne(0.0),
                true => {
                    let pair = self.sums[half].get() + self.kernel.shfl_bfly::<f32>(self.sums[half], 1);
                    self.sums[half].set(pair + self.kernel.shfl_bfly::<f32>(pair, 2));
                    (thread & 3).eq(0)
                }
            };
            self.kernel.when(is_own, || self.add(half));
        }
    }
}

/// What is multiplied in one turn.
#[derive(Clone, Copy)]
struct Turn<'k> {
    batch: Val<'k, u32>,
    head: Val<'k, u32>,
    /// The block of queries.
    block: Val<'k, u32>,
}

/// This CTA's tile of the bias and its part of the turns, the same for all threads.
struct Tile<'k> {
    kernel: Kernel<'k>,
    part: Val<'k, u32>,
    key_tile: Val<'k, u32>,
    query_tile: Val<'k, u32>,
    /// Among all batches and heads of the bias.
    matrix: Val<'k, u32>,
    own_batch: Val<'k, u32>,
    own_head: Val<'k, u32>,
    first_key: Val<'k, u32>,
    keys: u32,
}

impl<'k> Tile<'k> {
    fn of_cta(k: Kernel<'k>, spec: &Spec, params: &Params<'k>) -> Self {
        let (rest, part) = params.parts.split(k.cta());
        let (rest, key_tile) = params.key_tiles.split(rest);
        let (matrix, query_tile) = params.query_tiles.split(rest);
        let (own_batch, own_head) = params.own_heads.split(matrix);
        let keys = spec.keys();
        Tile { kernel: k, part, key_tile, query_tile, matrix, own_batch, own_head, first_key: key_tile * keys, keys }
    }

    /// Runs `body` for each turn of this part in which a query attends to a key of the tile.
    fn for_each(&self, params: &Params<'k>, body: impl Fn(Turn<'k>)) {
        let k = self.kernel;
        let begin = self.part * params.turns_of_part;
        let end = (begin + params.turns_of_part).min(params.turns);
        let band = &params.band;
        k.range_step(begin, end, 1, |number| {
            let (rest, block) = params.repeated_blocks.split(number);
            let (batch, head) = params.repeated_heads.split(rest);
            let turn = Turn { batch: self.own_batch + batch, head: self.own_head + head, block: self.query_tile + block };
            let (first, last) = ((turn.block * QUERIES).signed(), (turn.block * QUERIES + (QUERIES - 1)).signed().min(band.queries - 1));
            let end_key = (self.first_key + self.keys).min(params.keys).signed();
            let attends = (first + band.before).lt(end_key) & (last + band.behind).gt(self.first_key.signed());
            k.when(attends, || body(turn));
        });
    }
}

pub(super) fn bias<'k>(k: Kernel<'k>, spec: &Spec) {
    let params = Params::declare(k, spec);
    let (query_tile, key_tile) = (spec.query_tile(), spec.key_tile());
    let slots = k.shared("rows", spec.stages() * spec.slot_bytes(), 1024);
    // Of each consumer, what its warps have summed over their queries.
    let row_sums = spec.shares().is_none().then(|| k.shared("sums of a row", spec.consumers * 4 * KEYS * 4, 16));
    let ring = Ring::new(k, spec.stages(), spec.consumers, RingScope::Cta);
    let init = || {
        ring.init();
        [&params.q, &params.k, &params.v, &params.d_o].into_iter().for_each(|map| k.prefetch_tensormap(map));
    };
    roles::start(k, init, || {});
    let tile = Tile::of_cta(k, spec, &params);

    let load = || {
        let cursor = ring.cursor();
        let options = LoadOptions::default();
        k.when(k.elect(), || {
            tile.for_each(&params, |turn| {
                let kv_head = params.group.quotient(turn.head);
                let bring = |rows: &TensorMap<'k>, columns: &TensorMap<'k>| {
                    let full = cursor.acquire(spec.slot_bytes());
                    let slot = slots.address() + cursor.stage() * spec.slot_bytes();
                    query_tile.load(slot, rows, [turn.block * QUERIES, turn.head, turn.batch], full, options);
                    key_tile.load(slot + query_tile.bytes(), columns, [tile.first_key, kv_head, turn.batch], full, options);
                    cursor.advance();
                };
                bring(&params.q, &params.k);
                bring(&params.d_o, &params.v);
            });
        });
    };

    let sum = || {
        let thread = k.thread() & (WARPGROUP - 1);
        let warpgroup = k.uniform(k.thread() >> 7) - 1;
        let (row, column) = (Fragment::<f32>::row(thread), Fragment::<f32>::column(thread));
        let (s, dp) = (Fragment::<f32>::unset(k, KEYS), Fragment::<f32>::unset(k, KEYS));
        // Of shares, which go to memory, none.
        let sums = Fragment::<f32>::filled(k, if spec.shares().is_none() { KEYS } else { 0 }, 0.0);
        let first_own_key = tile.first_key + warpgroup * KEYS;
        let cursor = ring.cursor();
        let a_low = query_tile.along(slots.address(), k.constant(0));
        let b_low = key_tile.along(slots.address() + query_tile.bytes(), warpgroup * KEYS);

        let multiply = |d: &Fragment<'k, f32>, stage: Val<'k, u32>| {
            let moved = stage * (spec.slot_bytes() >> 4);
            k.wgmma_fence();
            for step in 0..spec.head / 16 {
                let a = descriptor(a_low + moved + query_tile.along_steps(step));
                let b = descriptor(b_low + moved + key_tile.along_steps(step));
                k.wgmma(spec.shape(), d.registers(), WgmmaA::Shared(a), b, step > 0);
            }
            k.wgmma_commit();
        };

        tile.for_each(&params, |turn| {
            let query = turn.block * QUERIES + row;
            let numbers = ((turn.batch * params.heads + turn.head) * params.query_blocks + turn.block) * QUERIES + row;
            let of_rows = |at: Val<'k, u64>| [0, 32].map(|below| k.ld_global::<f32>(at, below));
            let (lse, delta) = (of_rows(params.lse_log2.at(numbers, 4)), of_rows(params.delta.at(numbers, 4)));
            cursor.wait();
            let s_stage = cursor.stage();
            multiply(&s, s_stage);
            cursor.advance();
            cursor.wait();
            let dp_stage = cursor.stage();
            multiply(&dp, dp_stage);
            cursor.advance();

            let mods = &params.score_mod;
            let places = QueryRows {
                queries: [0, 8].map(|below| (query + below).min(mods.last_query)),
                first_key: first_own_key + column,
                last_key: Some(mods.last_key),
                shift: mods.shift,
            };
            // Queries behind the last attend to nothing, whatever stands there.
            let limits = Limits {
                kernel: k,
                is_band: true,
                before: [0, 8].map(|below| (query + below).signed() + params.band.before - column.signed()),
                behind: [0, 8].map(|below| {
                    let query = (query + below).signed();
                    let behind = (query + params.band.behind).min(params.keys.signed());
                    k.select(query.lt(params.band.queries), behind, 0) - column.signed()
                }),
            };
            let is_outside = limits.of_block(first_own_key);
            k.wgmma_wait(1);
            cursor.release(s_stage, thread);
            let have_gradients = || {
                k.wgmma_wait(0);
                cursor.release(dp_stage, thread);
            };
            // What a pair gives, of which `p` was made in place of the score.
            let given = |half: u32, at: u32, slope: Option<Val<'k, f32>>| {
                let (part, odd) = (at / 8, at % 2);
                let p = s.element(part, half, odd);
                let ds = (dp.element(part, half, odd) - delta[half as usize]) * p;
                let ds = slope.map_or(ds, |slope| ds * slope);
                // Of a key that is not attended to, either product may be no number, and the slope where the score is −∞.
                k.select(is_outside(half, at) | p.eq(0.0), 0.0, ds)
            };
            let exponentiate = |score: Val<'k, f32>, half: u32| k.fma(score, LOG2_E, -lse[half as usize]).exp2();
            let (Some(function), Some(by)) = (&params.function, &spec.by) else {
                let of_head = mods.of.of_head(k, turn.batch, turn.head);
                // The slope of a cap stands behind the bias' gradient.
                mods.of.apply(k, spec.ty, &of_head, &elements(&s, 0..KEYS / 8), &places, &[]);
                s.map_in_place(|score, half, _| exponentiate(score, half));
                have_gradients();
                for (element, half, at) in elements(&sums, 0..KEYS / 8) {
                    element.set(element + given(half, at, None));
                }
                return;
            };
            have_gradients();
            let of_head = function.of_head(&by.steps, turn.batch, turn.head);
            let mask = mods.of.mask_of_head(turn.batch, turn.head);
            let run = params.shares.as_ref().map(|to| (to, Run::new(k, to, turn, places.queries)));
            for part in 0..KEYS / 8 {
                let own = elements(&s, part..part + 1);
                let slopes: Vec<Var<'k, f32>> = own.iter().map(|_| k.var_unset(Some("slope"))).collect();
                let entries: Vec<Var<'k, u32>> = own.iter().map(|_| k.var_named("entry", 0u32)).collect();
                of_head.for_each_score(k, mods.of.factor, &own, &places, |n, score, values| {
                    let of_step = |step: usize| values[step][0].get::<f32>(k);
                    slopes[n].set(of_step(values.len() - 1));
                    if let (Some((to, _)), Some(Shares::OfTable(place))) = (&run, by.shares) {
                        entries[n].set(place_in_table(of_step(place as usize), to.last_entry));
                    }
                    score.set(of_step(by.score as usize));
                });
                mods.of.hide(k, mask, &own, &places);
                for (n, &(score, half, at)) in own.iter().enumerate() {
                    score.set(exponentiate(score.get(), half));
                    let given = given(half, at, Some(slopes[n].get()));
                    match &run {
                        Some((_, run)) => run.share(half as usize, entries[n].get(), given),
                        None => {
                            let sum = sums.element(at / 8, half, at % 2);
                            sum.set(sum + given);
                        }
                    }
                }
            }
            if let Some((_, run)) = &run {
                run.end(thread, by.shares == Some(Shares::OfQuery));
            }
        });

        let Some(row_sums) = row_sums else { return };
        // Of one row, the sum over the queries stands in the first of them.
        k.when(params.is_row.ne(0), || {
            let own = row_sums.address() + warpgroup * (4 * KEYS * 4) + (column << 2);
            let (warp, lane) = (thread >> 5, thread & 31);
            for part in 0..KEYS / 8 {
                for odd in 0..2 {
                    let mut all = sums.element(part, 0, odd).get() + sums.element(part, 1, odd).get();
                    for distance in [4, 8, 16] {
                        all = all + k.shfl_bfly::<f32>(all, distance);
                    }
                    k.when(lane.lt(4), || k.st_shared(own + warp * (KEYS * 4), i64::from(4 * (8 * part + odd)), all));
                }
            }
            k.barrier_sync(warpgroup + FIRST_BARRIER, WARPGROUP);
            for part in 0..KEYS / 8 {
                for odd in 0..2 {
                    let of_warp = |warp: u32| k.ld_shared::<f32>(own, i64::from(4 * (KEYS * warp + 8 * part + odd)));
                    let all = (1..4).fold(of_warp(0), |all, warp| all + of_warp(warp));
                    sums.element(part, 0, odd).set(all);
                }
            }
        });

        if let Some(kept) = params.kept {
            let place = [tile.query_tile, tile.key_tile * spec.consumers + warpgroup, tile.matrix, tile.part];
            Parts::new(k, kept, PART).keep(sums.registers().iter().copied(), place, k.constant(0), thread);
        }
        if let Some(out) = &params.out {
            let matrix = out.epilogue.begin(out.batch.split(tile.matrix));
            for half in 0..2 {
                let row = tile.query_tile * QUERIES + row + 8 * half;
                let first = first_own_key + column;
                let place = matrix.at(row, first);
                k.when(row.lt(out.rows), || {
                    for (element, _, right) in elements(&sums, 0..KEYS / 8).into_iter().filter(|(_, of, _)| *of == half) {
                        k.when((first + right).lt(out.columns), || place.store(place.apply(element.get(), right), right));
                    }
                });
            }
        }
    };

    let [few, many] = spec.registers();
    k.warp_roles(&[
        Role {
            name: "producer",
            warps: 4,
            registers: Some(few),
            body: &|| k.warp_roles(&[Role { name: "load", warps: 1, registers: None, body: &load }]),
        },
        Role { name: "consumer", warps: 4 * spec.consumers, registers: Some(many), body: &sum },
    ]);
}
