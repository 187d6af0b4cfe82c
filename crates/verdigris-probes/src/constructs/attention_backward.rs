//! Attention, backward: `dK`, `dV` of one block of keys a CTA, and its share of `dQ`.
//!
//! The products stand transposed, keys as rows: `Sᵀ = K·Qᵀ` and `dPᵀ = V·dOᵀ`, so that `Pᵀ` and `dSᵀ` are A operands in registers for
//! `dV += Pᵀ·dO` and `dK += dSᵀ·Q`. Only dS goes through shared memory, transposed on the way, for `dQ = dS·K`, which leaves by bulk
//! reductions into an f32 accumulator. One copy of K, Q and dO serves two products each, read once along its depth and once across.
//!
//! Source: Shah et al., "FlashAttention-3", 2024, appendix B; Dao, "FlashAttention-2", 2023, algorithm 2.

use super::{Allowances, Probe};
use verdigris_kir::face::{Header, Kernel, LoadOptions, Role, Val, WgmmaA, build as build_kernel};
use verdigris_kir::inst::{BulkReduce, MatrixType, Packed, Special, WgmmaShape};
use verdigris_kir::ir::{KernelBody, MapType, Target, Ty};
use verdigris_kir::tile::deep::DeepTile;
use verdigris_kir::tile::fragment::{Fragment, wgmma_shape};
use verdigris_kir::tile::operand::{Major, OperandTile};
use verdigris_kir::tile::ring::{Ring, RingScope, publish_barriers};
use verdigris_kir::tile::staging::{STAGE_BYTES, Staging, store_map};

/// Warpgroups that multiply; each has 64 keys.
const CONSUMERS: u32 = 2;
/// Threads of a warpgroup.
const WARPGROUP: u32 = 128;
/// Keys of a CTA.
pub const KEYS: u32 = 64 * CONSUMERS;
/// Queries of one turn.
pub const QUERIES: u32 = 64;
/// Named barriers: both consumers; then for each of them staging, dQ's room free, dQ written.
const BOTH: u32 = 1;
const STAGING: u32 = 2;
const ROOM: u32 = STAGING + CONSUMERS;
const WRITTEN: u32 = ROOM + CONSUMERS;
/// A consumer and the warp that sends its dQ.
const SENDER_AND_CONSUMER: u32 = WARPGROUP + 32;
/// Bytes of one number for each query of a turn.
const ROW_BYTES: u32 = QUERIES * 4;

/// What shapes the kernel.
///
/// Parameters: maps `q`, `k`, `v`, `dout` read and `dk`, `dv` written, rank 3, `{head_dim, rows, heads}`; `lse_log2` and `delta` f32
/// `[heads][query_blocks · 64]`: the scaled scores' log₂ sum, and `rowsum(dO ∘ O)`; `dq` f32, added to: `[heads][query_blocks][2]` pieces
/// of 64 queries by half a head in the order of [`dq_position`]; `query_blocks`, `scale`, `scale_log2 = scale · log₂ e`. Queries and keys
/// are whole blocks. The grid is `[keys / 128, heads, 1]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Elements of one query, key and value: 128, so that the half of a head whose dQ one warpgroup computes is one swizzled row.
    pub head_dim: u32,
    /// Blocks of queries that are in shared memory at a time.
    pub stages: u32,
}

/// Where the element of query `row` (of 64) and column `column` (of half a head) stands in its piece of `dq`: the order in which a thread's
/// registers leave it, four at a time.
pub fn dq_position(row: u32, column: u32) -> u32 {
    let lane = (row % 8) * 4 + column % 8 / 2;
    let thread = row / 16 * 32 + lane;
    let register = column / 8 * 4 + row / 8 % 2 * 2 + column % 2;
    (register / 4 * WARPGROUP + thread) * 4 + register % 4
}

impl Spec {
    /// The size at which the register budget is tight.
    pub const FULL: Spec = Spec { head_dim: 128, stages: 2 };

    /// K and V, as rows of the transposed products; depth is the head.
    pub fn key_tile(&self) -> DeepTile {
        DeepTile::new(OperandTile { rows: KEYS, ty: MapType::Bf16, major: Major::Depth }, self.head_dim)
    }

    /// Q and dO, as columns of the transposed products; depth is the head.
    pub fn query_tile(&self) -> DeepTile {
        DeepTile::new(OperandTile { rows: QUERIES, ty: MapType::Bf16, major: Major::Depth }, self.head_dim)
    }

    /// The same bytes of Q and dO across: the head is the columns, queries are the depth.
    fn query_across(&self) -> OperandTile {
        OperandTile { rows: self.head_dim, ty: MapType::Bf16, major: Major::Rows }
    }

    /// Columns of the head whose dQ one warpgroup computes.
    fn half(&self) -> u32 {
        self.head_dim / CONSUMERS
    }

    fn transposed_shape(&self) -> WgmmaShape {
        wgmma_shape(QUERIES, MatrixType::Bf16, MatrixType::Bf16, MatrixType::F32)
    }

    fn key_shape(&self) -> WgmmaShape {
        let shape = wgmma_shape(self.head_dim, MatrixType::Bf16, MatrixType::Bf16, MatrixType::F32);
        WgmmaShape { a_in_registers: true, transpose_b: true, ..shape }
    }

    fn query_shape(&self) -> WgmmaShape {
        WgmmaShape { transpose_b: true, ..wgmma_shape(self.half(), MatrixType::Bf16, MatrixType::Bf16, MatrixType::F32) }
    }

    /// Builds the kernel.
    pub fn build(&self) -> KernelBody {
        let name = format!("probe_attention_backward_d{}_s{}", self.head_dim, self.stages);
        let threads = WARPGROUP * (1 + CONSUMERS);
        build_kernel(Header { name, target: Target::Sm90a, threads, min_ctas: 1, cluster: 1 }, |k| kernel(k, self))
    }
}

pub(super) fn probe() -> Probe {
    Probe {
        name: "attention_backward",
        build: || Spec::FULL.build(),
        allowances: Allowances { wgmma_stages: 5 },
        what_it_shows: "five products a turn, two with A packed in registers; one shared tile read along and across; stmatrix.trans, proxy \
                        fence and descriptor over written tiles; bulk f32 reductions sent by a warp of their own; roles within a role",
    }
}

fn kernel<'k>(k: Kernel<'k>, spec: &Spec) {
    let (key_tile, query_tile) = (spec.key_tile(), spec.query_tile());
    let q_map = k.tensor_map("q", query_tile.tile.map(QUERIES));
    let k_map = k.tensor_map("k", key_tile.tile.map(KEYS));
    let v_map = k.tensor_map("v", key_tile.tile.map(KEYS));
    let dout_map = k.tensor_map("dout", query_tile.tile.map(QUERIES));
    let dk_map = k.tensor_map("dk", store_map(MapType::Bf16, 64));
    let dv_map = k.tensor_map("dv", store_map(MapType::Bf16, 64));
    let (lse_log2, delta) = (k.input("lse_log2", 16), k.input("delta", 16));
    let dq = k.in_out("dq", 16);
    let query_blocks = k.scalar::<u32>("query_blocks");
    let (scale, scale_log2) = (k.scalar::<f32>("scale"), k.scalar::<f32>("scale_log2"));

    let k_slot = k.shared("keys", key_tile.bytes(), 1024);
    let v_slot = k.shared("values", key_tile.bytes(), 1024);
    let q_slots = k.shared("queries", spec.stages * query_tile.bytes(), 1024);
    let dout_slots = k.shared("output gradients", spec.stages * query_tile.bytes(), 1024);
    // dS, two turns deep: a warpgroup's 64 keys are one stage of 64 queries by 64 keys. At the end the same stages carry dK and dV out.
    let ds = Staging::new(k, CONSUMERS, 2, STAGING);
    let dq_bytes = QUERIES * spec.half() * 4;
    let dq_slots = k.shared("query gradients", CONSUMERS * dq_bytes, 128);
    let lse_slots = k.shared("lse", spec.stages * ROW_BYTES, 128);
    let delta_slots = k.shared("delta", spec.stages * ROW_BYTES, 128);
    let keys_full = k.mbarrier_array("keys full", 1);
    keys_full.arrivals().set(1);
    let q_ring = Ring::new(k, spec.stages, CONSUMERS, RingScope::Cta);
    let dout_ring = Ring::new(k, spec.stages, CONSUMERS, RingScope::Cta);
    k.when(k.thread().eq(0), || {
        keys_full.init();
        q_ring.init();
        dout_ring.init();
    });
    publish_barriers(k);

    let first_key = k.cta() * KEYS;
    let head = k.special(Special::CtaY);

    let load = || {
        let (q_cursor, dout_cursor) = (q_ring.cursor(), dout_ring.cursor());
        let options = LoadOptions::default();
        k.when(k.elect(), || {
            let full = keys_full.at(0u32);
            full.arrive_expect_tx(2 * key_tile.bytes());
            key_tile.load(k_slot.address(), &k_map, first_key, 0u32, head, full, options);
            key_tile.load(v_slot.address(), &v_map, first_key, 0u32, head, full, options);
            k.range(query_blocks, |block| {
                let numbers = (head * query_blocks + block) * QUERIES;
                let full = q_cursor.acquire(query_tile.bytes() + ROW_BYTES);
                let stage = q_cursor.stage();
                query_tile.load(q_slots.address() + stage * query_tile.bytes(), &q_map, block * QUERIES, 0u32, head, full, options);
                k.bulk_load(lse_slots.address() + stage * ROW_BYTES, lse_log2.at(numbers, 4), ROW_BYTES, full);
                q_cursor.advance();
                let full = dout_cursor.acquire(query_tile.bytes() + ROW_BYTES);
                let stage = dout_cursor.stage();
                query_tile.load(dout_slots.address() + stage * query_tile.bytes(), &dout_map, block * QUERIES, 0u32, head, full, options);
                k.bulk_load(delta_slots.address() + stage * ROW_BYTES, delta.at(numbers, 4), ROW_BYTES, full);
                dout_cursor.advance();
            });
        });
    };

    let send = || {
        let leader = k.lane().eq(0);
        k.range(query_blocks, |block| {
            for warpgroup in 0..CONSUMERS {
                // Of the reductions under way, the other warpgroup's may go on reading.
                k.when(leader, || k.bulk_wait_read(CONSUMERS - 1 - warpgroup));
                k.warp_sync();
                k.barrier_arrive(ROOM + warpgroup, SENDER_AND_CONSUMER);
            }
            for warpgroup in 0..CONSUMERS {
                k.barrier_sync(WRITTEN + warpgroup, SENDER_AND_CONSUMER);
                k.when(leader, || {
                    let piece = (head * query_blocks + block) * CONSUMERS + warpgroup;
                    let to = dq.at(piece, dq_bytes);
                    k.bulk_reduce(BulkReduce::Add, Ty::F32, to, dq_slots.address() + warpgroup * dq_bytes, dq_bytes);
                    k.bulk_commit();
                });
            }
        });
        k.when(leader, || k.bulk_wait(0));
    };

    let differentiate = || {
        let thread = k.thread() & (WARPGROUP - 1);
        let warpgroup = k.uniform(k.thread() >> 7) - 1;
        let s = Fragment::<f32>::unset(k, QUERIES);
        let dp = Fragment::<f32>::unset(k, QUERIES);
        let dk = Fragment::<f32>::unset(k, spec.head_dim);
        let dv = Fragment::<f32>::unset(k, spec.head_dim);
        let dq = Fragment::<f32>::unset(k, spec.half());
        let across = spec.query_across();
        // K across, for dQ: keys are the depth, this warpgroup's half of the head the rows.
        let k_across = OperandTile { rows: spec.half(), ty: MapType::Bf16, major: Major::Rows };
        let k_across_start = k_slot.address() + warpgroup * key_tile.tile.bytes();
        let ds_tile = OperandTile { rows: QUERIES, ty: MapType::Bf16, major: Major::Depth };
        let k_low = key_tile.tile.descriptor_base(k_slot.address(), warpgroup * 64);
        let v_low = key_tile.tile.descriptor_base(v_slot.address(), warpgroup * 64);
        let k_across_low = k_across.descriptor_base(k_across_start, 0u32);
        let q_low = query_tile.tile.descriptor_base(q_slots.address(), 0u32);
        let dout_low = query_tile.tile.descriptor_base(dout_slots.address(), 0u32);
        let q_across_low = across.descriptor_base(q_slots.address(), 0u32);
        let dout_across_low = across.descriptor_base(dout_slots.address(), 0u32);
        let ds_low = ds_tile.descriptor_base(ds.stage(k.constant(0), 0), 0u32);
        let (q_cursor, dout_cursor) = (q_ring.cursor(), dout_ring.cursor());
        let column = Fragment::<f32>::column(thread);

        // Keys by queries, both along their depth.
        let multiply_transposed = |d: &Fragment<'k, f32>, keys: Val<'k, u32>, queries: Val<'k, u32>| {
            k.wgmma_fence();
            for step in 0..key_tile.steps() {
                let a = key_tile.tile.descriptor_from(keys + key_tile.advance(0, step));
                let b = query_tile.tile.descriptor_from(queries + query_tile.advance(0, step));
                k.wgmma(spec.transposed_shape(), d.registers(), WgmmaA::Shared(a), b, step > 0);
            }
            k.wgmma_commit();
        };
        // Registers by queries across.
        let add_keys = |d: &Fragment<'k, f32>, a: &[[Val<'k, u32>; 4]], queries: Val<'k, u32>, adds: Val<'k, bool>| {
            k.wgmma_fence();
            for (step, a) in a.iter().enumerate() {
                let b = across.descriptor_from(queries + across.advance(0, step as u32));
                let adds = if step == 0 { adds } else { k.constant(true) };
                k.wgmma(spec.key_shape(), d.registers(), WgmmaA::Registers(a), b, adds);
            }
            k.wgmma_commit();
        };
        let packed = |fragment: &Fragment<'k, f32>| -> Vec<[Val<'k, u32>; 4]> {
            (0..QUERIES / 16).map(|step| fragment.pack_a(step, Packed::Bf16x2)).collect()
        };
        // One number for each query: a column of the transposed products.
        let queries_numbers = |slot: Val<'k, u32>, block: u32| k.ld_shared_vector::<f32>(slot + (column << 2), i64::from(32 * block), 2);

        keys_full.at(0u32).wait(0u32);
        k.range(query_blocks, |block| {
            q_cursor.wait();
            let q_stage = q_cursor.stage();
            multiply_transposed(&s, k_low, q_low + q_stage * (query_tile.bytes() >> 4));
            dout_cursor.wait();
            let dout_stage = dout_cursor.stage();
            multiply_transposed(&dp, v_low, dout_low + dout_stage * (query_tile.bytes() >> 4));

            k.wgmma_wait(1);
            for part in 0..QUERIES / 8 {
                let lse = queries_numbers(lse_slots.address() + q_stage * ROW_BYTES, part);
                for (half, odd) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                    let element = s.element(part, half, odd);
                    element.set(k.fma(element, scale_log2, -lse[odd as usize]).exp2());
                }
            }
            let p = packed(&s);
            k.wgmma_wait(0);
            for part in 0..QUERIES / 8 {
                let delta = queries_numbers(delta_slots.address() + dout_stage * ROW_BYTES, part);
                for (half, odd) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                    let element = dp.element(part, half, odd);
                    element.set((element - delta[odd as usize]) * s.element(part, half, odd));
                }
            }
            add_keys(&dv, &p, dout_across_low + dout_stage * (query_tile.bytes() >> 4), block.gt(0));

            let ds_values = packed(&dp);
            let turn = block & 1;
            let stage = ds.stage(warpgroup, 0) + turn * STAGE_BYTES;
            for (pair, values) in ds_values.iter().enumerate() {
                ds.write_halves_transposed(stage, thread, pair as u32, values);
            }
            k.fence_proxy_async();
            k.barrier_sync(BOTH, CONSUMERS * WARPGROUP);
            k.wgmma_fence();
            for step in 0..KEYS / 16 {
                let panel = (step / 4 * ds.stages() * STAGE_BYTES) >> 4;
                let a = ds_tile.descriptor_from(ds_low + turn * (STAGE_BYTES >> 4) + panel + ds_tile.advance(0, step % 4));
                let b = k_across.descriptor_from(k_across_low + k_across.advance(0, step));
                k.wgmma(spec.query_shape(), dq.registers(), WgmmaA::Shared(a), b, step > 0);
            }
            k.wgmma_commit();

            k.wgmma_wait(1);
            dout_cursor.release(dout_stage, thread);
            dout_cursor.advance();
            add_keys(&dk, &ds_values, q_across_low + q_stage * (query_tile.bytes() >> 4), block.gt(0));
            k.wgmma_wait(1);
            k.barrier_sync(warpgroup + ROOM, SENDER_AND_CONSUMER);
            let room = dq_slots.address() + warpgroup * dq_bytes + (thread << 4);
            for (i, four) in dq.registers().chunks(4).enumerate() {
                let values: Vec<Val<'k, f32>> = four.iter().map(|register| *register * scale).collect();
                k.st_shared_vector(room, i as i64 * i64::from(WARPGROUP) * 16, &values);
            }
            k.fence_proxy_async();
            k.barrier_arrive(warpgroup + WRITTEN, SENDER_AND_CONSUMER);
            k.wgmma_wait(0);
            q_cursor.release(q_stage, thread);
            q_cursor.advance();
        });

        // The other warpgroup's last dQ may still read this one's stages.
        k.barrier_sync(BOTH, CONSUMERS * WARPGROUP);
        let row = first_key + warpgroup * 64;
        dk.map_in_place(|value, _, _| value * scale);
        for (result, map) in [(&dv, &dv_map), (&dk, &dk_map)] {
            for part in 0..spec.head_dim / 64 {
                let stage = ds.stage(warpgroup, part % ds.stages());
                ds.acquire(warpgroup, thread, ds.stages() - 1);
                for pair in 0..4 {
                    ds.write_halves(stage, thread, pair, &result.pack_a(4 * part + pair, Packed::Bf16x2));
                }
                ds.store(stage, warpgroup, thread, map, k.constant(64 * part), row, head);
            }
        }
        ds.finish(thread);
    };

    let serve = || {
        k.warp_roles(&[
            Role { name: "load", warps: 1, registers: None, body: &load },
            Role { name: "send", warps: 1, registers: None, body: &send },
        ]);
    };
    k.warp_roles(&[
        Role { name: "producer", warps: 4, registers: Some(24), body: &serve },
        Role { name: "consumer", warps: 4 * CONSUMERS, registers: Some(240), body: &differentiate },
    ]);
}
