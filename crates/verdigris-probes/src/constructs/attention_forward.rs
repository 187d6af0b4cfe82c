//! Attention, forward: `O = softmax(scale · Q·Kᵀ)·V` and the logarithm of each row's sum, one block of queries a CTA.
//!
//! Two warpgroups of 64 queries each take turns at the tensor cores by named barriers: while one computes its softmax, the other's products
//! run. Within a warpgroup the scores of the next block of keys are under way while the values of the last are added, and the softmax runs
//! under the second. P never leaves registers: the accumulator of the first product, rounded and packed, is the A operand of the second.
//!
//! Source: Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision", 2024, section 3.

use super::{Allowances, Probe};
use std::f32::consts::LN_2;
use verdigris_kir::face::{Header, Kernel, LoadOptions, Pointer, Role, Val, Var, WgmmaA, build as build_kernel};
use verdigris_kir::inst::{MatrixType, Packed, WgmmaShape};
use verdigris_kir::ir::{KernelBody, MapType, Target};
use verdigris_kir::tile::deep::DeepTile;
use verdigris_kir::tile::fragment::{Fragment, wgmma_shape};
use verdigris_kir::tile::operand::{Major, OperandTile};
use verdigris_kir::tile::ring::{Ring, RingScope, publish_barriers};
use verdigris_kir::tile::staging::{Staging, store_map};

/// Warpgroups that multiply; each has 64 queries.
const CONSUMERS: u32 = 2;
/// Threads of a warpgroup.
const WARPGROUP: u32 = 128;
/// Queries of a CTA.
pub const QUERIES: u32 = 64 * CONSUMERS;
/// First of the named barriers by which warpgroups take turns; staging uses those behind.
const TURN: u32 = 1;

/// What shapes the kernel.
///
/// Parameters: maps `q`, `k`, `v` and `o` of rank 3, `{head_dim, rows, heads}`; `lse` f32 `[heads][queries]`, natural logarithms; `queries`
/// and `keys` (rows), `key_blocks = ⌈keys / block⌉`, `scale` and `scale_log2 = scale · log₂ e`. The grid is
/// `[⌈queries / 128⌉, heads, 1]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Elements of one query, key and value: a multiple of 64.
    pub head_dim: u32,
    /// Keys of one block: a multiple of 64.
    pub block: u32,
    /// Blocks of keys, and of values, that are in shared memory at a time.
    pub stages: u32,
}

impl Spec {
    /// The size at which the register budget is tight.
    pub const FULL: Spec = Spec { head_dim: 128, block: 128, stages: 2 };

    /// Rows of Q; depth is the head.
    pub fn q_tile(&self) -> DeepTile {
        DeepTile::new(OperandTile { rows: QUERIES, ty: MapType::Bf16, major: Major::Depth }, self.head_dim)
    }

    /// Rows of K are the columns of the scores; depth is the head.
    pub fn k_tile(&self) -> DeepTile {
        DeepTile::new(OperandTile { rows: self.block, ty: MapType::Bf16, major: Major::Depth }, self.head_dim)
    }

    /// Elements of a head are the columns of the output; depth is the block of keys.
    pub fn v_tile(&self) -> DeepTile {
        DeepTile::new(OperandTile { rows: self.head_dim, ty: MapType::Bf16, major: Major::Rows }, self.block)
    }

    fn score_shape(&self) -> WgmmaShape {
        wgmma_shape(self.block, MatrixType::Bf16, MatrixType::Bf16, MatrixType::F32)
    }

    fn value_shape(&self) -> WgmmaShape {
        let shape = wgmma_shape(self.head_dim, MatrixType::Bf16, MatrixType::Bf16, MatrixType::F32);
        WgmmaShape { a_in_registers: true, transpose_b: true, ..shape }
    }

    /// Builds the kernel.
    pub fn build(&self) -> KernelBody {
        let name = format!("probe_attention_forward_d{}_n{}_s{}", self.head_dim, self.block, self.stages);
        let threads = WARPGROUP * (1 + CONSUMERS);
        build_kernel(Header { name, target: Target::Sm90a, threads, min_ctas: 1, cluster: 1 }, |k| kernel(k, self))
    }
}

pub(super) fn probe() -> Probe {
    Probe {
        name: "attention_forward",
        build: || Spec::FULL.build(),
        allowances: Allowances { wgmma_stages: 4 },
        what_it_shows: "named-barrier ping-pong of two warpgroups; softmax in place on an accumulator; P packed in registers as the A \
                        operand of the next product; one product in flight under the softmax; B read with rows contiguous",
    }
}

fn kernel<'k>(k: Kernel<'k>, spec: &Spec) {
    let (q_tile, k_tile, v_tile) = (spec.q_tile(), spec.k_tile(), spec.v_tile());
    let q_map = k.tensor_map("q", q_tile.tile.map(QUERIES));
    let k_map = k.tensor_map("k", k_tile.tile.map(spec.block));
    let v_map = k.tensor_map("v", v_tile.tile.map(spec.head_dim));
    let o_map = k.tensor_map("o", store_map(MapType::Bf16, 64));
    let lse = k.output("lse", 4);
    let (queries, keys) = (k.scalar::<u32>("queries"), k.scalar::<u32>("keys"));
    let key_blocks = k.scalar::<u32>("key_blocks");
    let (scale, scale_log2) = (k.scalar::<f32>("scale"), k.scalar::<f32>("scale_log2"));

    let q_slot = k.shared("q", q_tile.bytes(), 1024);
    let k_slots = k.shared("keys", spec.stages * k_tile.bytes(), 1024);
    let v_slots = k.shared("values", spec.stages * v_tile.bytes(), 1024);
    let staging = Staging::new(k, CONSUMERS, 2, TURN + CONSUMERS);
    let q_full = k.mbarrier_array("q full", 1);
    q_full.arrivals().set(1);
    let k_ring = Ring::new(k, spec.stages, CONSUMERS, RingScope::Cta);
    let v_ring = Ring::new(k, spec.stages, CONSUMERS, RingScope::Cta);
    k.when(k.thread().eq(0), || {
        q_full.init();
        k_ring.init();
        v_ring.init();
    });
    publish_barriers(k);

    let first_query = k.cta() * QUERIES;
    let head = k.special(verdigris_kir::inst::Special::CtaY);
    let at = Place { first_query, head };

    // The last block of keys is first, since only it may reach past the end: the mask stands outside of the loop.
    let load = || {
        let (k_cursor, v_cursor) = (k_ring.cursor(), v_ring.cursor());
        let options = LoadOptions::default();
        k.when(k.elect(), || {
            let full = q_full.at(0u32);
            full.arrive_expect_tx(q_tile.bytes());
            q_tile.load(q_slot.address(), &q_map, at.first_query, 0u32, at.head, full, options);
            k.range(key_blocks, |turn| {
                let first_key = (key_blocks - 1 - turn) * spec.block;
                let full = k_cursor.acquire(k_tile.bytes());
                k_tile.load(k_slots.address() + k_cursor.stage() * k_tile.bytes(), &k_map, first_key, 0u32, at.head, full, options);
                k_cursor.advance();
                let full = v_cursor.acquire(v_tile.bytes());
                v_tile.load(v_slots.address() + v_cursor.stage() * v_tile.bytes(), &v_map, 0u32, first_key, at.head, full, options);
                v_cursor.advance();
            });
        });
    };

    let attend = || {
        let thread = k.thread() & (WARPGROUP - 1);
        let warpgroup = k.uniform(k.thread() >> 7) - 1;
        let other = warpgroup ^ 1;
        let scores = Fragment::<f32>::unset(k, spec.block);
        let sums = Fragment::<f32>::unset(k, spec.head_dim);
        let packed: Vec<Var<'k, u32>> = (0..spec.block / 4).map(|_| k.var_unset(Some("p"))).collect();
        let softmax = Softmax::new(k, scale_log2);
        let q_low = q_tile.tile.descriptor_base(q_slot.address(), warpgroup * 64);
        let k_low = k_tile.tile.descriptor_base(k_slots.address(), 0u32);
        let v_low = v_tile.tile.descriptor_base(v_slots.address(), 0u32);
        let (k_cursor, v_cursor) = (k_ring.cursor(), v_ring.cursor());

        let multiply_keys = |stage: Val<'k, u32>| {
            let k_stage = k_low + stage * (k_tile.bytes() >> 4);
            for step in 0..k_tile.steps() {
                let a = q_tile.tile.descriptor_from(q_low + q_tile.advance(0, step));
                let b = k_tile.tile.descriptor_from(k_stage + k_tile.advance(0, step));
                k.wgmma(spec.score_shape(), scores.registers(), WgmmaA::Shared(a), b, step > 0);
            }
            k.wgmma_commit();
        };
        let multiply_values = |stage: Val<'k, u32>, adds: Val<'k, bool>| {
            let v_stage = v_low + stage * (v_tile.bytes() >> 4);
            for step in 0..v_tile.steps() {
                let b = v_tile.tile.descriptor_from(v_stage + v_tile.advance(0, step));
                let a = &packed[4 * step as usize..4 * step as usize + 4];
                let adds = if step == 0 { adds } else { k.constant(true) };
                k.wgmma(spec.value_shape(), sums.registers(), WgmmaA::Fragment(a), b, adds);
            }
            k.wgmma_commit();
        };
        let pack = || {
            for (step, four) in packed.chunks(4).enumerate() {
                for (register, value) in four.iter().zip(scores.pack_a(step as u32, Packed::Bf16x2)) {
                    register.set(value);
                }
            }
        };

        // The first warpgroup's first turn.
        k.when(warpgroup.eq(1), || k.barrier_arrive(TURN, 2 * WARPGROUP));

        q_full.at(0u32).wait(0u32);
        k_cursor.wait();
        k.wgmma_fence();
        multiply_keys(k_cursor.stage());
        k.wgmma_wait(0);
        k_cursor.release(k_cursor.stage(), thread);
        k_cursor.advance();
        let first_key = (key_blocks - 1) * spec.block + Fragment::<f32>::column(thread);
        for block in 0..spec.block / 8 {
            for odd in 0..2 {
                let outside = (first_key + (8 * block + odd)).ge(keys);
                for half in 0..2 {
                    let score = scores.element(block, half, odd);
                    score.set(k.select(outside, f32::NEG_INFINITY, score));
                }
            }
        }
        softmax.first(&scores);
        pack();

        k.range(key_blocks - 1, |turn| {
            k_cursor.wait();
            let (k_stage, v_stage) = (k_cursor.stage(), v_cursor.stage());
            k.barrier_sync(warpgroup + TURN, 2 * WARPGROUP);
            k.wgmma_fence();
            multiply_keys(k_stage);
            v_cursor.wait();
            // The wait branched: registers written before it are handed over anew.
            k.wgmma_fence();
            multiply_values(v_stage, turn.gt(0));
            k.barrier_arrive(other + TURN, 2 * WARPGROUP);
            k.wgmma_wait(1);
            k_cursor.release(k_stage, thread);
            k_cursor.advance();
            let correction = softmax.next(&scores);
            k.wgmma_wait(0);
            v_cursor.release(v_stage, thread);
            v_cursor.advance();
            pack();
            sums.map_in_place(|value, half, _| value * correction[half as usize]);
        });

        v_cursor.wait();
        k.wgmma_fence();
        multiply_values(v_cursor.stage(), key_blocks.gt(1));
        k.wgmma_wait(0);
        v_cursor.release(v_cursor.stage(), thread);

        let totals = softmax.finish();
        let inverse = totals.map(|total| total.rcp());
        sums.map_in_place(|value, half, _| value * inverse[half as usize]);
        let row = at.first_query + warpgroup * 64;
        for part in 0..spec.head_dim / 64 {
            let stage = staging.stage(warpgroup, part % staging.stages());
            staging.acquire(warpgroup, thread, staging.stages() - 1);
            for pair in 0..4 {
                staging.write_halves(stage, thread, pair, &sums.pack_a(4 * part + pair, Packed::Bf16x2));
            }
            staging.store(stage, warpgroup, thread, &o_map, k.constant(64 * part), row, at.head);
        }
        softmax.write_logarithms(lse, &totals, scale, row + Fragment::<f32>::row(thread), at.head, queries, thread);
        // The turn that the second warpgroup handed back at its end.
        k.when(warpgroup.eq(0), || k.barrier_sync(TURN, 2 * WARPGROUP));
        staging.finish(thread);
    };

    let load_warp = || k.warp_roles(&[Role { name: "load", warps: 1, registers: None, body: &load }]);
    k.warp_roles(&[
        Role { name: "producer", warps: 4, registers: Some(24), body: &load_warp },
        Role { name: "consumer", warps: 4 * CONSUMERS, registers: Some(240), body: &attend },
    ]);
}

/// Where the CTA's queries stand.
#[derive(Clone, Copy)]
struct Place<'k> {
    first_query: Val<'k, u32>,
    head: Val<'k, u32>,
}

/// The running maximum and sum of a thread's two rows. Sums are of the thread's own columns until the end.
struct Softmax<'k> {
    kernel: Kernel<'k>,
    scale_log2: Val<'k, f32>,
    most: [Var<'k, f32>; 2],
    total: [Var<'k, f32>; 2],
}

impl<'k> Softmax<'k> {
    fn new(k: Kernel<'k>, scale_log2: Val<'k, f32>) -> Self {
        let pair = |name| [0, 1].map(|_| k.var_unset(Some(name)));
        Softmax { kernel: k, scale_log2, most: pair("row maximum"), total: pair("row sum") }
    }

    /// `2^(s·c − m·c)` in place.
    fn exponents(&self, scores: &Fragment<'k, f32>) {
        let k = self.kernel;
        let shift = self.most.map(|most| -(most * self.scale_log2));
        scores.map_in_place(|score, half, _| k.fma(score, self.scale_log2, shift[half as usize]).exp2());
    }

    fn first(&self, scores: &Fragment<'k, f32>) {
        let most = scores.reduce_rows(|a, b| a.max(b));
        for (register, most) in self.most.iter().zip(most) {
            register.set(most);
        }
        self.exponents(scores);
        for (half, total) in (0..).zip(&self.total) {
            total.set(scores.reduce_own(half, |a, b| a + b));
        }
    }

    /// Returns the factor by which sums so far shrink.
    fn next(&self, scores: &Fragment<'k, f32>) -> [Val<'k, f32>; 2] {
        let most = scores.reduce_rows(|a, b| a.max(b));
        let correction = [0, 1].map(|half| {
            let old = self.most[half].get();
            let new = old.max(most[half]);
            self.most[half].set(new);
            ((old - new) * self.scale_log2).exp2()
        });
        self.exponents(scores);
        for (half, (total, correction)) in (0..).zip(self.total.iter().zip(correction)) {
            let sum = scores.reduce_own(half, |a, b| a + b);
            total.set(self.kernel.fma(*total, correction, sum));
        }
        correction
    }

    /// The sums of whole rows.
    fn finish(&self) -> [Val<'k, f32>; 2] {
        let k = self.kernel;
        self.total.map(|total| {
            let pair = total + k.shfl_bfly::<f32>(total, 1);
            pair + k.shfl_bfly::<f32>(pair, 2)
        })
    }

    #[allow(clippy::too_many_arguments, reason = "values, and where they go")]
    fn write_logarithms(
        &self,
        lse: Pointer<'k>,
        totals: &[Val<'k, f32>; 2],
        scale: Val<'k, f32>,
        row: Val<'k, u32>,
        head: Val<'k, u32>,
        rows: Val<'k, u32>,
        thread: Val<'k, u32>,
    ) {
        let k = self.kernel;
        for (half, (most, total)) in (0..).zip(self.most.iter().zip(totals)) {
            let row = row + 8 * half;
            let logarithm = k.fma(*most, scale, total.log2() * LN_2);
            k.when((thread & 3).eq(0) & row.lt(rows), || {
                k.st_global(lse.at(head * rows + row, 4), 0, logarithm);
            });
        }
    }
}
