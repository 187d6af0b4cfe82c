//! The kernel: one warp brings keys and values, four attend to them with the rows of all heads that share them.
//!
//! A CTA has 64 rows of one head of keys, and one part of the keys to which they attend. What bounds it is how fast keys and values arrive: a ring of blocks
//! is on its way, and where results leave room for it two CTAs stand on an SM, of which one computes while the other waits. Scores and probabilities stay
//! in registers.

use std::fmt;

use verdigris_kir::face::{Header, Kernel, LoadOptions, Mbarrier, Role, TensorMap, Val, Var, WgmmaA, build};
use verdigris_kir::inst::{Cache, MatrixType, WgmmaShape};
use verdigris_kir::ir::{Access, KernelBody, MapDecl, Target};
use verdigris_kir::params::{Divide, Map, Read, Write};
use verdigris_kir::program::KernelRef;
use verdigris_kir::tile::fragment::{Fragment, wgmma_shape};
use verdigris_kir::tile::ring::{Ring, RingScope};

use super::super::band::{BandArgs, BatchBand, Limits, SinkArgs};
use super::super::half::Half;
use super::super::paged::PagesArgs;
use super::super::ragged::{OfKeys, OffsetsArgs};
use super::super::softmax::Softmax;
use super::super::tile::{HeadTile, descriptor};
use crate::hopper::{FIRST_BARRIER, WARPGROUP, roles};

/// Rows of a CTA: queries of all heads that share one of keys.
pub(super) const ROWS: u32 = 64;

/// Everything that shapes the kernel; extents are arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Spec {
    pub(super) ty: Half,
    /// Elements of a query and a key that are multiplied.
    pub(super) head: u32,
    /// Elements of a value.
    pub(super) value: u32,
    /// Keys of one block.
    pub(super) block: u32,
    /// Blocks of keys, and of values, in shared memory at a time.
    pub(super) stages: u32,
    /// Keys and values lie in pages.
    pub(super) paged: bool,
    /// Queries of sequences lie behind each other, and their keys unless these are paged.
    pub(super) ragged: bool,
}

impl fmt::Display for Spec {
    /// `attention_decode_bf16_d128_v128_n64_s3_ragged_paged`: the entry's name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Spec { head, value, block, stages, .. } = self;
        let mark = |has: bool, name: &'static str| if has { name } else { "" };
        let marks = [mark(self.ragged, "_ragged"), mark(self.paged, "_paged")].concat();
        write!(f, "attention_decode_{}_d{head}_v{value}_n{block}_s{stages}{marks}", self.ty.name())
    }
}

impl Spec {
    const fn q_tile(&self) -> HeadTile {
        HeadTile { rows: ROWS, elements: self.head, ty: self.ty.map() }
    }

    pub(super) const fn k_tile(&self) -> HeadTile {
        HeadTile { rows: self.block, elements: self.head, ty: self.ty.map() }
    }

    pub(super) const fn v_tile(&self) -> HeadTile {
        HeadTile { rows: self.block, elements: self.value, ty: self.ty.map() }
    }

    /// The maps through which keys and values are copied.
    pub(super) fn k_map(&self) -> MapDecl {
        if self.paged { self.k_tile().open_map(Access::Read) } else { self.k_tile().map(Access::Read) }
    }

    pub(super) fn v_map(&self) -> MapDecl {
        if self.paged { self.v_tile().open_map(Access::Read) } else { self.v_tile().map(Access::Read) }
    }

    fn score_shape(&self) -> WgmmaShape {
        wgmma_shape(self.block, self.ty.matrix(), self.ty.matrix(), MatrixType::F32)
    }

    fn value_shape(&self) -> WgmmaShape {
        let shape = wgmma_shape(self.value, self.ty.matrix(), self.ty.matrix(), MatrixType::F32);
        WgmmaShape { a_in_registers: true, transpose_b: true, ..shape }
    }

    /// CTAs that stand on an SM: as many as registers and shared memory have room for.
    pub(super) const fn ctas_of_sm(&self) -> u32 {
        if self.value > 128 { 1 } else { 2 }
    }

    fn build(&self) -> KernelBody {
        let header =
            Header { name: self.to_string(), target: Target::Sm90a, threads: WARPGROUP + 32, min_ctas: self.ctas_of_sm(), cluster: 1 };
        build(header, |k| decode(k, self))
    }

    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.to_string(), move || self.build())
    }
}

verdigris_kir::parameters! {
    /// Maps are `{elements, rows, heads, batch}`, of pages `{elements, rows of a page, heads, pages}`. Row `r` of a head of keys is query `r / group` of its head of queries `r % group`.
    pub(super) struct Params / ParamsArgs of Spec as spec {
        pub(super) q: Read = 16,
        pub(super) k: Map = spec.k_map(),
        pub(super) v: Map = spec.v_map(),
        pub(super) o: Write = 16,
        /// f32, natural logarithms; and whether it is written at all.
        pub(super) log_sum_exp: Write = 4,
        pub(super) has_log_sum_exp: u32,
        /// Bytes from one batch, head and query to the next.
        pub(super) q_strides: [u64; 3],
        pub(super) o_strides: [u64; 3],
        pub(super) log_sum_exp_strides: [u64; 3],
        /// Where there are several parts, f32: results and log-sum-exp of each, `[batch][head][query][part]`.
        pub(super) partial: Write = 16,
        pub(super) partial_log_sum_exp: Write = 4,
        pub(super) queries: u32,
        pub(super) keys: u32,
        /// Vectors of 8 elements in a query.
        pub(super) q_vectors: u32,
        /// Elements of a value that there are.
        pub(super) elements: u32,
        pub(super) scale: f32,
        pub(super) band: BandArgs = (),
        pub(super) sinks: SinkArgs = (),
        /// Heads of queries that share one of keys.
        pub(super) group: Divide,
        pub(super) heads_of_keys: Divide,
        /// Parts of the keys.
        pub(super) parts: Divide,
        /// Tiles of the rows of one head of keys.
        pub(super) row_tiles: Divide,
        pub(super) pages: Option<PagesArgs> = spec.paged.then_some(()),
        pub(super) offsets: Option<OffsetsArgs> = spec.ragged.then_some(OfKeys::of(spec.paged)),
    }
}

fn decode<'k>(k: Kernel<'k>, spec: &Spec) {
    let params = Params::declare(k, spec);
    let (queries, keys, group, parts) = (params.queries, params.keys, params.group, params.parts);
    let (k_map, v_map) = (&params.k, &params.v);
    let (q_tile, k_tile, v_tile) = (spec.q_tile(), spec.k_tile(), spec.v_tile());
    let q_slot = k.shared("queries", q_tile.bytes(), 1024);
    let k_slots = k.shared("keys", spec.stages * k_tile.bytes(), 1024);
    let v_slots = k.shared("values", spec.stages * v_tile.bytes(), 1024);
    let (k_ring, v_ring) = (Ring::new(k, spec.stages, 1, RingScope::Cta), Ring::new(k, spec.stages, 1, RingScope::Cta));
    let init = || {
        [k_ring, v_ring].iter().for_each(|ring| ring.init());
        [k_map, v_map].into_iter().for_each(|map| k.prefetch_tensormap(map));
    };
    roles::start(k, init, || {});

    // Tiles of rows that read the same keys are neighbours.
    let (outer, row_tile) = params.row_tiles.split(k.cta());
    let (outer, part) = parts.split(outer);
    let (batch, kv_head) = params.heads_of_keys.split(outer);
    let first_row = row_tile * ROWS;
    let own = params.offsets.as_ref().map(|offsets| offsets.of_batch(k, batch, [queries, keys]));
    let extents = own.map_or([queries, keys], |own| own.map(|sequence| sequence.count));
    let rows = extents[0] * group.value();
    let of_batch = params.band.of_batch(k, batch, extents);
    let BatchBand { keys: length, before, behind, .. } = of_batch;
    // Keys to which any row of the tile attends, and to which each does.
    let edge = [first_row, (first_row + (ROWS - 1)).min(rows - 1)].map(|row| group.quotient(row).signed());
    let [from, whole_from] = edge.map(|query| (query + before).max(0));
    let [whole_until, until] = edge.map(|query| (query + behind).max(0).min(length.signed()));
    let block_of = |key: Val<'k, i32>| params.band.block.quotient(key.unsigned());
    // Blocks of the tile in equal parts, of which some may be empty.
    let first_of_tile = block_of(from);
    let blocks = (block_of(until + (spec.block as i32 - 1)).signed() - first_of_tile.signed()).max(0).unsigned();
    let [first_block, end_block] = [part, part + 1].map(|part| first_of_tile + parts.quotient(part * blocks));

    // The row of the tensors that has a query; ragged ones have no strides from batch to batch.
    let row_of = |query: Val<'k, u32>| own.map_or(query, |[queries, _]| queries.begin + query);

    let load = || {
        let (k_cursor, v_cursor) = (k_ring.cursor(), v_ring.cursor());
        let bring =
            |tile: &HeadTile, slot: Val<'k, u32>, map: &TensorMap<'k>, at: [Val<'k, u32>; 3], full: Mbarrier<'k>| match &params.pages {
                None => tile.load(slot, map, at, full, LoadOptions::default()),
                Some(pages) => pages.load(tile, slot, map, at, length, full),
            };
        k.when(k.elect(), || {
            k.range_step(first_block, end_block, 1, |block| {
                let key = block * spec.block;
                // Of paged keys the table is read at the sequence.
                let at = match own {
                    Some([_, keys]) if !spec.paged => [keys.begin + key, kv_head, k.constant(0)],
                    _ => [key, kv_head, batch],
                };
                let full = k_cursor.acquire(k_tile.bytes());
                bring(&k_tile, k_slots.address() + k_cursor.stage() * k_tile.bytes(), k_map, at, full);
                k_cursor.advance();
                let full = v_cursor.acquire(v_tile.bytes());
                bring(&v_tile, v_slots.address() + v_cursor.stage() * v_tile.bytes(), v_map, at, full);
                v_cursor.advance();
            });
        });
    };

    let attend = || {
        let thread = k.thread();
        let (row, column) = (first_row + Fragment::<f32>::row(thread), Fragment::<f32>::column(thread));
        let scores = Fragment::<f32>::unset(k, spec.block);
        let packed: Vec<Var<'k, u32>> = (0..spec.block / 4).map(|_| k.var_unset(Some("p"))).collect();
        let sums = Fragment::<f32>::filled(k, spec.value, 0.0);
        let softmax = Softmax::new(k, params.scale);
        softmax.begin();
        let (k_cursor, v_cursor) = (k_ring.cursor(), v_ring.cursor());
        // Of row `row`: its query, and its head.
        let place = |row: Val<'k, u32>| {
            let (query, member) = group.split(row);
            (query, kv_head * group.value() + member)
        };

        // Two threads have a row of queries. All loads are on their way before the first is stored; rows beyond the last repeat it.
        let own_row = thread >> 1;
        let (query, head) = place((first_row + own_row).min(rows - 1));
        let [of_batch_bytes, of_head, of_query] = params.q_strides;
        let query = row_of(query);
        let queries_of_row = params.q.moved(batch.widen() * of_batch_bytes + head.widen() * of_head + query.widen() * of_query);
        let chunk = thread & 1;
        let loads: Vec<_> = (0..spec.head / 16)
            .map(|pair| {
                let vector = chunk + 2 * pair;
                let at = queries_of_row.at(vector.min(params.q_vectors - 1), 16);
                (vector.lt(params.q_vectors), k.ld_global_vector::<u32>(at, 0, 4, Cache::Default))
            })
            .collect();
        for (pair, (is_there, words)) in (0..).zip(loads) {
            let words: Vec<_> = words.into_iter().map(|word| k.select(is_there, word, 0u32)).collect();
            k.st_shared_vector(q_tile.chunk(q_slot.address(), own_row, chunk, pair), 0, &words);
        }
        k.fence_proxy_async();
        k.barrier_sync(FIRST_BARRIER, WARPGROUP);

        let of_rows = [0, 8].map(|below| place(row + below));
        let limits = Limits {
            kernel: k,
            is_band: true,
            before: of_rows.map(|(query, _)| query.signed() + before - column.signed()),
            behind: of_rows.map(|(query, _)| (query.signed() + behind).min(length.signed()) - column.signed()),
        };
        // A sink counts once: in the first part. Rows beyond the last have no head.
        let last_head = params.heads_of_keys.value() * group.value() - 1;
        let sinks = of_rows.map(|(_, head)| k.select(part.eq(0), params.sinks.of_head(k, spec.ty, head.min(last_head)), f32::NEG_INFINITY));
        let q_low = q_tile.along(q_slot.address(), k.constant(0));
        let (k_low, v_low) = (k_tile.along(k_slots.address(), k.constant(0)), v_tile.across(v_slots.address()));
        k.range_step(first_block, end_block, 1, |block| {
            let first_key = block * spec.block;
            let end_key = (first_key + spec.block).signed();
            k_cursor.wait();
            k.wgmma_fence();
            let k_stage = k_low + k_tile.slots(k_cursor.stage());
            for step in 0..spec.head / 16 {
                let a = descriptor(q_low + q_tile.along_steps(step));
                let b = descriptor(k_stage + k_tile.along_steps(step));
                k.wgmma(spec.score_shape(), scores.registers(), WgmmaA::Shared(a), b, step > 0);
            }
            k.wgmma_commit();
            k.wgmma_wait(0);
            k_cursor.release(k_cursor.stage(), thread);
            k_cursor.advance();
            k.when(first_key.signed().lt(whole_from) | end_key.gt(whole_until), || {
                let is_outside = limits.of_block(first_key);
                for part in 0..spec.block / 8 {
                    for (half, odd) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                        let score = scores.element(part, half, odd);
                        score.set(k.select(is_outside(half, 8 * part + odd), f32::NEG_INFINITY, score));
                    }
                }
            });
            let correction = softmax.next(&scores);
            for (step, four) in (0..).zip(packed.chunks(4)) {
                for (register, value) in four.iter().zip(scores.pack_a(step, spec.ty.packed())) {
                    register.set(value);
                }
            }
            sums.map_in_place(|value, half, _| value * correction[half as usize]);
            v_cursor.wait();
            // Beyond a length anything may stand, and 0 · NaN is NaN; what is beyond a tensor of all keys of a batch arrives as zeros.
            let is_beyond = end_key.gt(length.signed());
            k.when(if spec.paged || spec.ragged { is_beyond } else { is_beyond & length.lt(keys) }, || {
                let first = (length - first_key).min(spec.block);
                let slot = v_slots.address() + v_cursor.stage() * v_tile.bytes();
                let zeros = [k.constant(0u32); 4];
                for panel in 0..v_tile.panels() {
                    k.range_step((first << 3) + thread, spec.block * 8, WARPGROUP, |chunk| {
                        k.st_shared_vector(slot + (chunk << 4), i64::from(panel * spec.block * 128), &zeros);
                    });
                }
                k.fence_proxy_async();
                k.barrier_sync(FIRST_BARRIER, WARPGROUP);
            });
            k.wgmma_fence();
            let v_stage = v_low + v_tile.slots(v_cursor.stage());
            for (step, a) in (0..).zip(packed.chunks(4)) {
                let b = descriptor(v_stage + v_tile.across_steps(step));
                k.wgmma(spec.value_shape(), sums.registers(), WgmmaA::Fragment(a), b, true);
            }
            k.wgmma_commit();
            k.wgmma_wait(0);
            v_cursor.release(v_cursor.stage(), thread);
            v_cursor.advance();
        });

        let result = softmax.finish(Some(sinks));
        for (half, (query, head)) in of_rows.into_iter().enumerate() {
            // Rows beyond a length give nothing, nor do those without a key.
            let counts = query.lt(of_batch.queries);
            let gives = counts & result.has_keys[half];
            let factor = result.factor[half];
            let value = |block: u32, odd: u32| k.select(gives, sums.element(block, half as u32, odd) * factor, 0.0);
            let log_sum_exp = k.select(counts, result.log_sum_exp[half], f32::NEG_INFINITY);
            let at = |[of_batch, of_head, of_query]: [Val<'k, u64>; 3]| {
                batch.widen() * of_batch + head.widen() * of_head + row_of(query).widen() * of_query
            };
            let for_each_pair = |store: &dyn Fn(u32, [Val<'k, f32>; 2])| {
                for block in 0..spec.value / 8 {
                    k.when(params.elements.gt(8 * block), || store(block, [value(block, 0), value(block, 1)]));
                }
            };
            let is_first = (thread & 3).eq(0);
            let whole = || {
                let to = params.o.moved(at(params.o_strides) + (column << 1).widen()).address();
                for_each_pair(&|block, [low, high]| {
                    k.st_global(to, i64::from(16 * block), k.pack::<u32>(spec.ty.packed(), low, high));
                });
                k.when(is_first & params.has_log_sum_exp.ne(0), || {
                    k.st_global(params.log_sum_exp.moved(at(params.log_sum_exp_strides)).address(), 0, log_sum_exp);
                });
            };
            let a_part = || {
                let heads = params.heads_of_keys.value() * group.value();
                let number = ((batch * heads + head) * queries + query).mul_wide(parts.value()) + part.widen();
                let to = params.partial.moved(number * (params.elements << 2).widen() + (column << 2).widen()).address();
                for_each_pair(&|block, pair| k.st_global_vector(to, i64::from(32 * block), &pair, Cache::Default));
                k.when(is_first, || k.st_global(params.partial_log_sum_exp.moved(number * 4u64).address(), 0, log_sum_exp));
            };
            k.when((row + 8 * half as u32).lt(rows), || k.when_else(parts.value().eq(1), whole, a_part));
        }
    };

    let run = || {
        k.warp_roles(&[
            Role { name: "attend", warps: 4, registers: None, body: &attend },
            Role { name: "load", warps: 1, registers: None, body: &load },
        ]);
    };
    match own {
        None => run(),
        // Sequences may have fewer queries than the longest.
        Some(_) => k.when(first_row.lt(rows), run),
    }
}
