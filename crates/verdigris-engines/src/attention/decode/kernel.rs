//! The kernel: one warp brings keys and values, four attend to them with the rows of all heads that share them.
//!
//! A CTA has 64 rows of one head of keys, and one part of the keys to which they attend. What bounds it is how fast keys and values arrive: a ring of blocks
//! is on its way, and where results leave room for it two CTAs stand on an SM, of which one computes while the other waits. Scores and probabilities stay
//! in registers. Of keys and values of 8 bits the ring has bytes, which the four widen ([`super::widen`]) into room that a block of each has: nobody writes there
//! before all four have come by a barrier behind the product that read it. While tensor cores multiply the one, the other becomes wide.

use std::fmt;

use verdigris_kir::face::{Header, Kernel, Role, Val, Var, WgmmaA, build};
use verdigris_kir::inst::{MatrixType, WgmmaShape};
use verdigris_kir::ir::{Access, KernelBody, MapDecl, Target};
use verdigris_kir::params::{Divide, Map, Read, Write};
use verdigris_kir::program::KernelRef;
use verdigris_kir::tile::fragment::{Fragment, wgmma_shape};
use verdigris_kir::tile::ring::{Ring, RingScope};

use super::super::band::{BandArgs, SinkArgs};
use super::super::descale::DescaleArgs;
use super::super::half::Half;
use super::super::of_queries::OfQueriesArgs;
use super::super::paged::PagesArgs;
use super::super::ragged::{OfKeys, OffsetsArgs};
use super::super::softmax::{Rows, Softmax};
use super::super::tile::{HeadTile, descriptor};
use super::latent::latent;
use super::part::{Part, Results};
use super::widen::{self, Byte, Widening};
use crate::hopper::{FIRST_BARRIER, WARPGROUP, roles};

/// Rows of a CTA: queries of all heads that share one of keys.
pub(super) const ROWS: u32 = 64;
/// Warpgroups of [`super::latent`].
pub(super) const CONSUMERS: u32 = 2;

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
    /// Values are the first elements of the keys ([`super::latent`]).
    pub(super) latent: bool,
    /// The type of keys and values, where it is of 8 bits and not that of the queries.
    pub(super) cache: Option<Byte>,
}

impl fmt::Display for Spec {
    /// `attention_decode_bf16_d576_v512_n64_s2_latent_ragged_paged`, `attention_decode_bf16_e4m3_d128_v128_n64_s3`: the entry's name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Spec { head, value, block, stages, .. } = self;
        let mark = |has: bool, name: &'static str| if has { name } else { "" };
        let marks = [mark(self.latent, "_latent"), mark(self.ragged, "_ragged"), mark(self.paged, "_paged")].concat();
        let cache = self.cache.map_or(String::new(), |cache| format!("_{}", cache.name()));
        write!(f, "attention_decode_{}{cache}_d{head}_v{value}_n{block}_s{stages}{marks}", self.ty.name())
    }
}

impl Spec {
    pub(super) const fn q_tile(&self) -> HeadTile {
        HeadTile { rows: ROWS, elements: self.head, ty: self.ty.map() }
    }

    /// As they are multiplied.
    pub(super) const fn k_tile(&self) -> HeadTile {
        HeadTile { rows: self.block, elements: self.head, ty: self.ty.map() }
    }

    pub(super) const fn v_tile(&self) -> HeadTile {
        HeadTile { rows: self.block, elements: self.value, ty: self.ty.map() }
    }

    /// As they arrive.
    pub(super) const fn stored_tiles(&self) -> [HeadTile; 2] {
        [widen::stored(self.k_tile(), self.cache), widen::stored(self.v_tile(), self.cache)]
    }

    /// The maps through which keys and values are copied.
    pub(super) fn k_map(&self) -> MapDecl {
        let [tile, _] = self.stored_tiles();
        if self.paged { tile.open_map(Access::Read) } else { tile.map(Access::Read) }
    }

    pub(super) fn v_map(&self) -> Option<MapDecl> {
        let [_, tile] = self.stored_tiles();
        (!self.latent).then(|| if self.paged { tile.open_map(Access::Read) } else { tile.map(Access::Read) })
    }

    /// Of a product of queries with so many keys.
    pub(super) fn score_shape(&self, keys: u32) -> WgmmaShape {
        wgmma_shape(keys, self.ty.matrix(), self.ty.matrix(), MatrixType::F32)
    }

    fn value_shape(&self) -> WgmmaShape {
        let shape = wgmma_shape(self.value, self.ty.matrix(), self.ty.matrix(), MatrixType::F32);
        WgmmaShape { a_in_registers: true, transpose_b: true, ..shape }
    }

    /// The same for a warpgroup of [`super::latent`], which reads probabilities from shared memory.
    pub(super) fn latent_value_shape(&self) -> WgmmaShape {
        let shape = wgmma_shape(self.value / CONSUMERS, self.ty.matrix(), self.ty.matrix(), MatrixType::F32);
        WgmmaShape { transpose_b: true, ..shape }
    }

    /// Warpgroups that attend.
    pub(super) const fn consumers(&self) -> u32 {
        if self.latent { CONSUMERS } else { 1 }
    }

    /// Threads of a CTA.
    pub(super) const fn threads(&self) -> u32 {
        self.consumers() * WARPGROUP + if self.latent { WARPGROUP } else { 32 }
    }

    /// CTAs that stand on an SM: as many as registers and shared memory have room for.
    pub(super) const fn ctas_of_sm(&self) -> u32 {
        if self.value > 128 { 1 } else { 2 }
    }

    fn build(&self) -> KernelBody {
        let (threads, min_ctas) = (self.threads(), self.ctas_of_sm());
        let header = Header { name: self.to_string(), target: Target::Sm90a, threads, min_ctas, cluster: 1 };
        build(header, |k| if self.latent { latent(k, self) } else { decode(k, self) })
    }

    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.to_string(), move || self.build())
    }
}

verdigris_kir::parameters! {
    /// Maps are `{elements, rows, heads, batch}`, of pages `{elements, rows of a page, heads, pages}`.
    pub(super) struct Params / ParamsArgs of Spec as spec {
        pub(super) q: Read = 16,
        pub(super) k: Map = spec.k_map(),
        pub(super) v: Option<Map> = spec.v_map(),
        pub(super) o: Write = 16,
        /// Natural logarithms.
        pub(super) log_sum_exp: OfQueriesArgs = (),
        pub(super) max_scores: OfQueriesArgs = (),
        /// Bytes from one batch, head and query to the next.
        pub(super) q_strides: [u64; 3],
        pub(super) o_strides: [u64; 3],
        /// Where there are several parts, f32: results, log-sum-exp and greatest score of each, `[batch][head][query][part]`.
        pub(super) partial: Write = 16,
        pub(super) partial_log_sum_exp: Write = 4,
        pub(super) partial_max_scores: Write = 4,
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
        /// The factors of keys and values of 8 bits.
        pub(super) descales: Option<DescaleArgs> = spec.cache.map(|_| ()),
    }
}

fn decode<'k>(k: Kernel<'k>, spec: &Spec) {
    let params = Params::declare(k, spec);
    let (Some(v_map), k_map) = (&params.v, &params.k) else {
        unreachable!("values have a map of their own where they are no part of the keys")
    };
    let (q_tile, k_tile, v_tile) = (spec.q_tile(), spec.k_tile(), spec.v_tile());
    let [k_stored, v_stored] = spec.stored_tiles();
    let q_slot = k.shared("queries", q_tile.bytes(), 1024);
    let k_slots = k.shared("keys", spec.stages * k_stored.bytes(), 1024);
    let v_slots = k.shared("values", spec.stages * v_stored.bytes(), 1024);
    // Room for a block of each, as it is multiplied.
    let wide = spec.cache.map(|_| [("wide keys", k_tile), ("wide values", v_tile)].map(|(name, tile)| k.shared(name, tile.bytes(), 1024)));
    let (k_ring, v_ring) = (Ring::new(k, spec.stages, 1, RingScope::Cta), Ring::new(k, spec.stages, 1, RingScope::Cta));
    let init = || {
        [k_ring, v_ring].iter().for_each(|ring| ring.init());
        [k_map, v_map].into_iter().for_each(|map| k.prefetch_tensormap(map));
    };
    roles::start(k, init, || {});
    let part = Part::of_cta(k, spec, &params);
    let [first_block, end_block] = part.blocks;

    let load = || {
        let (k_cursor, v_cursor) = (k_ring.cursor(), v_ring.cursor());
        k.when(k.elect(), || {
            k.range_step(first_block, end_block, 1, |block| {
                let full = k_cursor.acquire(k_stored.bytes());
                part.bring(&k_stored, k_slots.address() + k_cursor.stage() * k_stored.bytes(), k_map, block, full);
                k_cursor.advance();
                let full = v_cursor.acquire(v_stored.bytes());
                part.bring(&v_stored, v_slots.address() + v_cursor.stage() * v_stored.bytes(), v_map, block, full);
                v_cursor.advance();
            });
        });
    };

    let attend = || {
        let thread = k.thread();
        let (row, column) = (Fragment::<f32>::row(thread), Fragment::<f32>::column(thread));
        let scores = Fragment::<f32>::unset(k, spec.block);
        let packed: Vec<Var<'k, u32>> = (0..spec.block / 4).map(|_| k.var_unset(Some("p"))).collect();
        let sums = Fragment::<f32>::filled(k, spec.value, 0.0);
        let descales = part.descales();
        let softmax = Softmax::new(k, descales.map_or(params.scale, |descales| descales.of_score(params.scale)));
        softmax.begin();
        let (k_cursor, v_cursor) = (k_ring.cursor(), v_ring.cursor());

        part.copy_queries(&q_tile, q_slot.address(), thread, WARPGROUP / ROWS);
        k.fence_proxy_async();
        k.barrier_sync(FIRST_BARRIER, WARPGROUP);

        let limits = part.limits(row, column);
        let sinks = part.sinks(row);
        let q_low = q_tile.along(q_slot.address(), k.constant(0));
        let [k_multiplied, v_multiplied] = wide.unwrap_or([k_slots, v_slots]).map(|room| room.address());
        let (k_low, v_low) = (k_tile.along(k_multiplied, k.constant(0)), v_tile.across(v_multiplied));
        let release_keys = || {
            k_cursor.release(k_cursor.stage(), thread);
            k_cursor.advance();
        };
        let release_values = || {
            v_cursor.release(v_cursor.stage(), thread);
            v_cursor.advance();
        };
        let multiply_keys = |k_stage: Val<'k, u32>| {
            k.wgmma_fence();
            for step in 0..spec.head / 16 {
                let a = descriptor(q_low + q_tile.along_steps(step));
                let b = descriptor(k_stage + k_tile.along_steps(step));
                k.wgmma(spec.score_shape(spec.block), scores.registers(), WgmmaA::Shared(a), b, step > 0);
            }
            k.wgmma_commit();
        };
        // Makes probabilities of scores, and shrinks the sums so far.
        let attend_to = |first_key: Val<'k, u32>| {
            part.mask(&scores, &limits, first_key);
            let correction = softmax.next(&scores);
            for (step, four) in (0..).zip(packed.chunks(4)) {
                for (register, value) in four.iter().zip(scores.pack_a(step, spec.ty.packed())) {
                    register.set(value);
                }
            }
            sums.map_in_place(|value, half, _| value * correction[half as usize]);
        };
        let multiply_values = |v_stage: Val<'k, u32>| {
            k.wgmma_fence();
            for (step, a) in (0..).zip(packed.chunks(4)) {
                let b = descriptor(v_stage + v_tile.across_steps(step));
                k.wgmma(spec.value_shape(), sums.registers(), WgmmaA::Fragment(a), b, true);
            }
            k.wgmma_commit();
        };
        let is_written = || {
            k.fence_proxy_async();
            k.barrier_sync(FIRST_BARRIER, WARPGROUP);
        };
        let as_they_are = || {
            k.range_step(first_block, end_block, 1, |block| {
                let first_key = block * spec.block;
                k_cursor.wait();
                multiply_keys(k_low + k_tile.slots(k_cursor.stage()));
                k.wgmma_wait(0);
                release_keys();
                attend_to(first_key);
                v_cursor.wait();
                part.when_beyond(first_key, |first| {
                    v_tile.clear(v_slots.address() + v_cursor.stage() * v_tile.bytes(), first, [0, WARPGROUP]);
                    is_written();
                });
                multiply_values(v_low + v_tile.slots(v_cursor.stage()));
                k.wgmma_wait(0);
                release_values();
            });
        };
        // Values become wide under the product of the keys, and the next keys under that of the values.
        let widened = |from: Byte| {
            let widening = Widening { kernel: k, from, to: spec.ty, thread };
            let widen_keys = || {
                k_cursor.wait();
                widening.run(&k_tile, [k_slots.address() + k_cursor.stage() * k_stored.bytes(), k_multiplied], None);
            };
            k.when(first_block.lt(end_block), || {
                widen_keys();
                is_written();
                release_keys();
            });
            k.range_step(first_block, end_block, 1, |block| {
                let first_key = block * spec.block;
                multiply_keys(k_low);
                v_cursor.wait();
                let slots = [v_slots.address() + v_cursor.stage() * v_stored.bytes(), v_multiplied];
                widening.run(&v_tile, slots, Some(part.keys_from(first_key)));
                k.wgmma_wait(0);
                attend_to(first_key);
                // All four have read the bytes and written what they became, and the product of the keys is done: there the next ones become wide.
                is_written();
                release_values();
                multiply_values(v_low);
                let has_next = (block + 1).lt(end_block);
                k.when(has_next, widen_keys);
                k.wgmma_wait(0);
                is_written();
                k.when(has_next, release_keys);
            });
        };
        match spec.cache {
            None => as_they_are(),
            Some(from) => widened(from),
        }

        let (rows, writes_numbers) = (softmax.finish(Some(sinks)), (thread & 3).eq(0));
        let rows = match descales {
            None => rows,
            Some(descales) => Rows { factor: rows.factor.map(|factor| factor * descales.v), ..rows },
        };
        part.store(row, Results { sums: &sums, rows, column, elements: params.elements, writes_numbers });
    };

    part.when_it_has_rows(|| {
        k.warp_roles(&[
            Role { name: "attend", warps: 4, registers: None, body: &attend },
            Role { name: "load", warps: 1, registers: None, body: &load },
        ]);
    });
}
