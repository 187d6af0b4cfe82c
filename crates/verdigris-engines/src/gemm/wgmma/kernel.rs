//! The Hopper GEMM kernel: TMA fills a ring of swizzled tiles, warpgroups multiply out of it, results leave through shared memory and TMA.
//!
//! One page, top to bottom: parameters and shared memory, the producer, the consumers' main loop, the roles. What follows the main loop, the
//! joining of parts of a split depth and the epilogue's way to memory, is in [`crate::parts`].
//!
//! Source: the shape of the main loop is that of CUTLASS's warp-specialized cooperative kernels and of fast.cu.

use std::fmt;

use serde::{Deserialize, Serialize};
use verdigris_kir::face::{AsVal, Header, Kernel, LoadOptions, Role, Val, build};
use verdigris_kir::inst::{MatrixType, WgmmaShape};
use verdigris_kir::ir::{KernelBody, MapType, Target};
use verdigris_kir::tile::fragment::{Fragment, wgmma_shape};
use verdigris_kir::tile::operand::{Major, OperandTile, ROW_BYTES};
use verdigris_kir::tile::ring::{Ring, RingScope, publish_barriers};
use verdigris_kir::tile::schedule::{Schedule, Work};
use verdigris_tensor::DType;

use super::promote::{BlockFactors, Scaled};
use super::sums::{Keep, Sums};
use crate::parts::batch::BatchIndex;
use crate::parts::cluster_join::{ClusterJoin, ClusterJoinSpec};
use crate::parts::epilogue::EpilogueSpec;
use crate::parts::join::{Join, Part};
pub(super) use crate::parts::way_out::Out;
use crate::parts::way_out::{Sum, Tile, WaySpec};

/// Instruction steps of 32 bytes in one 128-byte row of depth.
const STEPS: u32 = ROW_BYTES / 32;
/// Threads of a warpgroup.
const WARPGROUP: u32 = 128;
/// The named barrier of the first consumer; the others' follow.
const FIRST_BARRIER: u32 = 1;

/// Which operand the CTAs of a cluster share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) enum Shared {
    /// Tiles one below the other: they share B.
    B,
    /// Tiles side by side: they share A.
    A,
}

/// Everything that shapes the kernel; extents are arguments.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct Spec {
    pub(super) a: DType,
    pub(super) b: DType,
    pub(super) a_major: Axis,
    pub(super) b_major: Axis,
    /// Rows and columns of a CTA's tile.
    pub(super) tile_m: u32,
    pub(super) tile_n: u32,
    pub(super) stages: u32,
    /// Warpgroups that multiply; each takes an equal share of the tile's rows, or tiles in turn.
    pub(super) consumers: u32,
    /// CTAs of a cluster, and what they share.
    pub(super) cluster: u32,
    pub(super) shared: Shared,
    /// The depth of tiles may be split among CTAs.
    pub(super) split: bool,
    /// CTAs of a cluster among which the depth of each tile is split; 1 for none. Such a cluster shares no operand.
    pub(super) cluster_split: u32,
    /// The consumers take tiles in turn, a whole one each.
    pub(super) pingpong: bool,
    /// Sums are kept in f16.
    pub(super) half_sums: bool,
    /// fp8 sums are moved into f32 registers every 128 of depth.
    pub(super) promote: bool,
    /// Factors of A's and of B's blocks, by which promoted sums are multiplied.
    pub(super) scaled: [Scaled; 2],
    pub(super) out: Out,
    /// D is written transposed: its contiguous lines are columns of the tile, as where the problem was turned round.
    pub(super) turned: bool,
    /// What stands between sums and D, for the problem as turned.
    pub(super) epilogue: EpilogueSpec,
}

/// Serializable twin of [`Major`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) enum Axis {
    Depth,
    Rows,
}

impl From<Axis> for Major {
    fn from(axis: Axis) -> Major {
        match axis {
            Axis::Depth => Major::Depth,
            Axis::Rows => Major::Rows,
        }
    }
}

impl fmt::Display for Spec {
    /// `gemm_wgmma_bf16_bf16_kk_128x256_s4_c2_x2b_split_bf16_map` and so on: the entry's name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = |axis| if axis == Axis::Depth { 'k' } else { 'r' };
        write!(f, "gemm_wgmma_{}_{}_{}{}", self.a, self.b, letter(self.a_major), letter(self.b_major))?;
        write!(f, "_{}x{}_s{}_c{}", self.tile_m, self.tile_n, self.stages, self.consumers)?;
        if self.cluster > 1 {
            write!(f, "_x{}{}", self.cluster, if self.shared == Shared::B { 'b' } else { 'a' })?;
        }
        if self.cluster_split > 1 {
            write!(f, "_k{}", self.cluster_split)?;
        }
        for (on, word) in [
            (self.pingpong, "_pingpong"),
            (self.half_sums, "_f16sum"),
            (self.split, "_split"),
            (self.promote, "_promote"),
            (self.turned, "_turned"),
            (self.out == Out::Rows, "_rows"),
        ] {
            if on {
                f.write_str(word)?;
            }
        }
        for (scaled, letter) in self.scaled.into_iter().zip(['a', 'b']) {
            match scaled {
                Scaled::No => {}
                Scaled::Lines => write!(f, "_lines{letter}")?,
                Scaled::Tile => write!(f, "_block{letter}")?,
            }
        }
        write!(f, "_{}", self.epilogue.name())
    }
}

fn matrix_type(dtype: DType) -> MatrixType {
    match dtype {
        DType::Bf16 => MatrixType::Bf16,
        DType::F16 => MatrixType::F16,
        DType::E4m3 => MatrixType::E4m3,
        DType::E5m2 => MatrixType::E5m2,
        DType::I8 => MatrixType::S8,
        DType::U8 => MatrixType::U8,
        _ => MatrixType::Tf32,
    }
}

/// The element format of a tensor map over elements of this type.
pub(super) fn map_type(dtype: DType) -> MapType {
    match dtype {
        DType::Bf16 => MapType::Bf16,
        DType::F16 => MapType::F16,
        DType::F32 => MapType::Tf32,
        DType::I32 => MapType::S32,
        _ => MapType::U8,
    }
}

impl Spec {
    pub(super) fn a_tile(&self) -> OperandTile {
        OperandTile { rows: self.tile_m, ty: map_type(self.a), major: self.a_major.into() }
    }

    pub(super) fn b_tile(&self) -> OperandTile {
        OperandTile { rows: self.tile_n, ty: map_type(self.b), major: self.b_major.into() }
    }

    /// Rows of A (columns of B) that one CTA loads of a tile; the rest comes from its peers.
    pub(super) fn loaded(&self, operand: Shared) -> u32 {
        let rows = if operand == Shared::A { self.tile_m } else { self.tile_n };
        if self.cluster > 1 && self.shared == operand { rows / self.cluster } else { rows }
    }

    /// The type of D.
    pub(super) fn d(&self) -> DType {
        self.epilogue.d.dtype
    }

    /// Elements of depth in one stage.
    pub(super) fn depth(&self) -> u32 {
        self.a_tile().depth()
    }

    pub(super) fn threads(&self) -> u32 {
        WARPGROUP * (1 + self.consumers)
    }

    /// 64-row blocks of one consumer.
    fn blocks(&self) -> u32 {
        if self.pingpong { self.tile_m / 64 } else { self.tile_m / (64 * self.consumers) }
    }

    /// CTAs of a cluster.
    pub(super) fn ctas(&self) -> u32 {
        self.cluster * self.cluster_split
    }

    fn keep(&self) -> Keep {
        match (self.promote, self.half_sums) {
            (true, _) => Keep::Promoted,
            (false, true) => Keep::Halves,
            (false, false) => Keep::InPlace,
        }
    }

    fn cluster_join(&self) -> Option<ClusterJoinSpec> {
        (self.cluster_split > 1).then(|| ClusterJoinSpec {
            ctas: self.cluster_split,
            warpgroups: self.consumers,
            blocks: self.blocks(),
            columns: self.tile_n,
            barrier: FIRST_BARRIER + self.consumers,
        })
    }

    fn joining<'k>(&self, k: Kernel<'k>) -> Joining<'k> {
        match self.cluster_join() {
            Some(join) => Joining::Cluster(join.declare(k)),
            None if self.split => Joining::Scratch(Join::declare(k, self.consumers, FIRST_BARRIER)),
            None => Joining::No,
        }
    }

    fn is_integer(&self) -> bool {
        matches!(self.a, DType::I8 | DType::U8)
    }

    fn shape(&self) -> WgmmaShape {
        let d = match (self.is_integer(), self.half_sums) {
            (true, _) => MatrixType::S32,
            (false, true) => MatrixType::F16,
            (false, false) => MatrixType::F32,
        };
        WgmmaShape {
            transpose_a: self.a_major == Axis::Rows,
            transpose_b: self.b_major == Axis::Rows,
            ..wgmma_shape(self.tile_n, matrix_type(self.a), matrix_type(self.b), d)
        }
    }

    /// Shared memory, with room for barriers.
    pub(super) fn shared_bytes(&self) -> u32 {
        self.stages * (self.tile_m + self.tile_n) * ROW_BYTES
            + self.way().shared_bytes()
            + self.cluster_join().map_or(0, |join| join.shared_bytes())
            + 16 * self.stages
            + 64
    }

    /// The way of results to D.
    pub(super) fn way(&self) -> WaySpec {
        WaySpec {
            out: self.out,
            transposed: self.turned,
            tile_columns: self.tile_n / self.cluster_split,
            warpgroups: self.consumers,
            barrier: FIRST_BARRIER,
            epilogue: self.epilogue.clone(),
        }
    }

    /// Registers of a producer's and of a consumer's thread.
    fn registers(&self) -> (u32, u32) {
        match self.consumers {
            1 | 2 => (40, 232),
            _ => (32, 160),
        }
    }

    /// f32 (or s32) words that one CTA hands on for one part of a split tile.
    pub(super) fn part_words(&self) -> u64 {
        u64::from(self.tile_m) * u64::from(self.tile_n)
    }

    /// Builds the kernel.
    pub(super) fn build(&self) -> KernelBody {
        let header = Header { name: self.to_string(), target: Target::Sm90a, threads: self.threads(), min_ctas: 1, cluster: self.ctas() };
        if self.is_integer() { build(header, |k| gemm::<i32>(k, self)) } else { build(header, |k| gemm::<f32>(k, self)) }
    }
}

/// How the parts of a tile whose depth is split come together.
enum Joining<'k> {
    No,
    Scratch(Join<'k>),
    Cluster(ClusterJoin<'k>),
}

impl Joining<'_> {
    fn init(&self) {
        if let Joining::Cluster(join) = self {
            join.init();
        }
    }
}

fn gemm<'k, T: Sum + AsVal<'k, T>>(k: Kernel<'k>, spec: &Spec) {
    let (a_tile, b_tile) = (spec.a_tile(), spec.b_tile());
    let (a_loaded, b_loaded) = (spec.loaded(Shared::A), spec.loaded(Shared::B));
    let a = k.tensor_map("a", a_tile.map(a_loaded));
    let b = k.tensor_map("b", b_tile.map(b_loaded));
    let (a_batches, b_batches) = (k.scalar::<u32>("a_batches"), k.scalar::<u32>("b_batches"));
    let schedule = Schedule::declare(k, spec.split);
    let batch = BatchIndex::declare(k);
    let factors = BlockFactors::declare(k, spec.scaled);
    let way = spec.way().declare(k);
    let join = spec.joining(k);

    let a_slots = k.shared("a tiles", spec.stages * a_tile.bytes(), 1024);
    let b_slots = k.shared("b tiles", spec.stages * b_tile.bytes(), 1024);
    let scope = if spec.cluster > 1 { RingScope::Cluster } else { RingScope::Cta };
    let ring = Ring::new(k, spec.stages, if spec.pingpong { 1 } else { spec.consumers }, scope);
    k.when(k.thread().eq(0), || {
        ring.init();
        join.init();
        k.prefetch_tensormap(&a);
        k.prefetch_tensormap(&b);
    });
    publish_barriers(k);
    // What is in front of this launch may still run: nothing of it is touched above.
    k.griddep_wait();
    k.griddep_launch();

    let rank = if spec.ctas() > 1 { k.cluster_rank() } else { k.constant(0) };
    let peer = if spec.cluster > 1 { rank } else { k.constant(0) };
    let everyone = k.constant(((1u32 << spec.cluster) - 1) as u16);
    let options = |operand| LoadOptions { multicast: (spec.cluster > 1 && spec.shared == operand).then_some(everyone), policy: None };
    // A cluster takes neighbouring tiles, along the side whose operand they do not share.
    let tile_row = |work: &Work<'k>| if spec.shared == Shared::B { work.row * spec.cluster + peer } else { work.row };
    let tile_column = |work: &Work<'k>| if spec.shared == Shared::A { work.column * spec.cluster + peer } else { work.column };

    // The CTAs that share a tile each take a part of its depth, in the order of their ranks.
    let own_steps = |work: &Work<'k>| {
        let cut = |rank: Val<'k, u32>| (work.steps * rank) >> spec.cluster_split.ilog2();
        if spec.cluster_split > 1 { (cut(rank), cut(rank + 1) - cut(rank)) } else { (work.first_step, work.steps) }
    };

    let load = || {
        let cursor = ring.cursor();
        let a_part = if a_loaded < spec.tile_m { rank * a_loaded } else { k.constant(0) };
        let b_part = if b_loaded < spec.tile_n { rank * b_loaded } else { k.constant(0) };
        k.when(k.elect(), || {
            schedule.for_each(|work| {
                let row = tile_row(&work) * spec.tile_m + a_part;
                let column = tile_column(&work) * spec.tile_n + b_part;
                let (a_batch, b_batch) = (work.batch * a_batches, work.batch * b_batches);
                let (first_step, steps) = own_steps(&work);
                k.range(steps, |step| {
                    let depth = (first_step + step) * spec.depth();
                    let full = cursor.acquire(a_tile.bytes() + b_tile.bytes());
                    let stage = cursor.stage();
                    let a_slot = a_slots.address() + stage * a_tile.bytes();
                    let b_slot = b_slots.address() + stage * b_tile.bytes();
                    a_tile.load(a_slot, a_part, a_loaded, &a, row, depth, a_batch, full, options(Shared::A));
                    b_tile.load(b_slot, b_part, b_loaded, &b, column, depth, b_batch, full, options(Shared::B));
                    cursor.advance();
                });
            });
        });
    };

    let multiply = || {
        let thread = k.thread() & (WARPGROUP - 1);
        let warpgroup = k.uniform(k.thread() >> 7) - 1;
        let first_row = if spec.pingpong { k.constant(0) } else { warpgroup * (64 * spec.blocks()) };
        let sums = Sums::<T>::new(k, spec.keep(), spec.blocks(), spec.tile_n);
        let slices = if spec.cluster_split > 1 { spec.blocks() } else { 0 };
        let joined: Vec<Fragment<'k, T>> = (0..slices).map(|_| Fragment::unset(k, spec.way().tile_columns)).collect();
        let a_low = a_tile.descriptor_base(a_slots.address(), first_row);
        let b_low = b_tile.descriptor_base(b_slots.address(), 0u32);
        let cursor = ring.cursor();
        let previous = k.var_named("previous", 0u32);
        let add = k.var_named("add", k.thread().ge(0u32));
        let turn = k.var_named("turn", 0u32);
        // The named barrier at which a warpgroup waits for its turn; the other's follows.
        let turns = FIRST_BARRIER + spec.consumers;

        let one_tile = |work: Work<'k>| {
            let (first_step, steps) = own_steps(&work);
            let (row, column) = (tile_row(&work) * spec.tile_m + first_row, tile_column(&work) * spec.tile_n);
            let factors = factors
                .map(|factors| factors.tile(batch.split(work.batch), [row, column], [spec.blocks(), spec.tile_n], way.extents(), thread));
            sums.begin();
            if spec.pingpong {
                k.barrier_sync(warpgroup + turns, WARPGROUP * 2);
            }
            k.range(steps, |step| {
                let factors = factors.as_ref().map(|factors| factors.load((first_step + step) * spec.depth()));
                cursor.wait();
                let stage = cursor.stage();
                let (a_stage, b_stage) = (a_low + stage * (a_tile.bytes() >> 4), b_low + stage * (b_tile.bytes() >> 4));
                add.set(if spec.promote { k.thread().gt(u32::MAX - 1) } else { step.gt(0) });
                k.wgmma_fence();
                for part in 0..STEPS {
                    let b_descriptor = b_tile.descriptor_from(b_stage + b_tile.advance(0, part));
                    for block in 0..spec.blocks() {
                        let a_descriptor = a_tile.descriptor_from(a_stage + a_tile.advance(64 * block, part));
                        let adds = if part == 0 { add.get() } else { k.constant(true) };
                        sums.multiply(block as usize, spec.shape(), a_descriptor, b_descriptor, adds);
                    }
                }
                k.wgmma_commit();
                if spec.promote {
                    k.wgmma_wait(0);
                    cursor.release(stage, thread);
                    sums.promote(factors.as_ref());
                } else {
                    // One group stays in flight while the stage before it goes back.
                    k.wgmma_wait(1);
                    k.when(step.gt(0), || cursor.release(previous, thread));
                    previous.set(stage);
                }
                cursor.advance();
            });
            if spec.pingpong {
                k.when(schedule.goes_on_behind(&work), || k.barrier_arrive((warpgroup ^ 1) + turns, WARPGROUP * 2));
            }
            if !spec.promote {
                k.wgmma_wait(0);
                cursor.release(previous, thread);
            }

            let results = sums.finish();
            let tile = Tile { row, column, batch: work.batch, indices: batch.split(work.batch), warpgroup, thread };
            match &join {
                Joining::No => way.write(results, &tile),
                Joining::Scratch(join) => {
                    let owner = (work.tile * spec.cluster + peer) * spec.consumers + warpgroup;
                    let last = join.is_last(results, Part { owner, part: work.part, parts: work.parts, warpgroup, thread });
                    k.when(last, || way.write(results, &tile));
                }
                Joining::Cluster(join) => {
                    join.sum(results, &joined, turn, k.thread() - WARPGROUP);
                    way.write(&joined, &Tile { column: column + rank * spec.way().tile_columns, ..tile });
                }
            }
        };
        if spec.pingpong {
            // The warpgroups take tiles in turn, so that one's way out lies under the other's main loop. A main loop begins when the other's
            // has seen all of its stages: a stage's phases are told apart by parity, so nobody may wait for the one after the next.
            k.when(warpgroup.eq(1), || {
                k.barrier_arrive(turns, WARPGROUP * 2);
                cursor.skip(schedule.steps());
            });
            schedule.for_each_in_turn(warpgroup, spec.consumers, |work| {
                one_tile(work);
                cursor.skip(schedule.steps());
            });
        } else {
            schedule.for_each(one_tile);
        }
        way.finish(thread);
    };

    let (few, many) = spec.registers();
    let load_warp = || k.warp_roles(&[Role { name: "load", warps: 1, registers: None, body: &load }]);
    k.warp_roles(&[
        Role { name: "producer", warps: 4, registers: Some(few), body: &load_warp },
        Role { name: "consumer", warps: 4 * spec.consumers, registers: Some(many), body: &multiply },
    ]);
    if spec.ctas() > 1 {
        // A peer may still arrive on this CTA's barriers.
        k.cluster_sync();
    }
}
