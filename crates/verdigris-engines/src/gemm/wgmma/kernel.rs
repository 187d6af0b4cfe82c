//! The Hopper GEMM kernel: TMA fills a ring of swizzled tiles, warpgroups multiply out of it, results leave through shared memory and TMA.
//!
//! One page, top to bottom: parameters and shared memory, the producer, the consumers' main loop, the roles. What follows the main loop —
//! joining parts of a split depth, the epilogue, the way out — stands below it, in that order.
//!
//! Source: the shape of the main loop is that of CUTLASS's warp-specialized cooperative kernels and of fast.cu; the joining of parts follows
//! Osama et al., "Stream-K", PPoPP 2023, with a fixed order of addition.

use std::fmt;

use serde::{Deserialize, Serialize};
use verdigris_kir::face::{AsVal, Header, Kernel, LoadOptions, Number, Pointer, Role, SharedPiece, TensorMap, Val, WgmmaA, build};
use verdigris_kir::inst::{Atomic, Cache, Fence, MatrixType, Order, Packed, Scope, WgmmaShape};
use verdigris_kir::ir::{KernelBody, MapDecl, MapType, Target};
use verdigris_kir::tile::fragment::{Fragment, wgmma_shape};
use verdigris_kir::tile::operand::{Major, OperandTile, ROW_BYTES};
use verdigris_kir::tile::ring::{Ring, RingScope, publish_barriers};
use verdigris_kir::tile::schedule::{Schedule, Work};
use verdigris_kir::tile::staging::{SLAB_ROWS, Staging, store_map_with_rows};
use verdigris_tensor::DType;

use crate::parts::batch::{BatchIndex, Indices};
use crate::parts::epilogue::{Epilogue, EpilogueSpec, Place};

/// Instruction steps of 32 bytes in one 128-byte row of depth.
const STEPS: u32 = ROW_BYTES / 32;
/// Threads of a warpgroup.
const WARPGROUP: u32 = 128;

/// Which operand the CTAs of a cluster share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) enum Shared {
    /// Tiles one below the other: they share B.
    B,
    /// Tiles side by side: they share A.
    A,
}

/// The way of a result to global memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) enum Out {
    /// Through shared memory and the copy engine: rows of D 16-byte aligned.
    Tma,
    /// From registers, element by element: any strides.
    Direct,
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
    /// Warpgroups that multiply; each takes an equal share of the tile's rows.
    pub(super) consumers: u32,
    /// CTAs of a cluster, and what they share.
    pub(super) cluster: u32,
    pub(super) shared: Shared,
    /// The depth of tiles may be split among CTAs.
    pub(super) split: bool,
    /// fp8 sums are moved into f32 registers every 128 of depth.
    pub(super) promote: bool,
    pub(super) out: Out,
    /// D is written transposed: the problem was turned round, so that its short side is the instruction's columns.
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
        for (on, word) in [(self.split, "_split"), (self.promote, "_promote"), (self.turned, "_turned")] {
            if on {
                f.write_str(word)?;
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
        self.tile_m / (64 * self.consumers)
    }

    fn is_integer(&self) -> bool {
        matches!(self.a, DType::I8 | DType::U8)
    }

    fn shape(&self) -> WgmmaShape {
        let d = if self.is_integer() { MatrixType::S32 } else { MatrixType::F32 };
        WgmmaShape {
            transpose_a: self.a_major == Axis::Rows,
            transpose_b: self.b_major == Axis::Rows,
            ..wgmma_shape(self.tile_n, matrix_type(self.a), matrix_type(self.b), d)
        }
    }

    /// Staging slabs of a warpgroup.
    fn slabs(&self) -> u32 {
        match (self.out, self.turned) {
            (Out::Direct, _) => 0,
            (Out::Tma, false) => 2,
            (Out::Tma, true) => 2,
        }
    }

    /// Rows of a slab of a turned tile: columns of the tile, as many as divide it.
    fn turned_rows(&self) -> u32 {
        [64, 32, 16].into_iter().find(|rows| self.tile_n.is_multiple_of(*rows)).unwrap_or(16)
    }

    /// Bytes of a slab's row: half a swizzle span where the tile's width is not whole ones.
    fn slab_row_bytes(&self) -> u32 {
        if !self.turned && !(self.tile_n * self.d().bytes() as u32).is_multiple_of(128) { 64 } else { 128 }
    }

    /// Shared memory, with room for barriers.
    pub(super) fn shared_bytes(&self) -> u32 {
        self.stages * (self.tile_m + self.tile_n) * ROW_BYTES
            + self.consumers * self.slabs() * SLAB_ROWS * self.slab_row_bytes()
            + 16 * self.stages
            + 64
    }

    /// The tensor map of D, for [`Out::Tma`].
    pub(super) fn d_map(&self) -> MapDecl {
        let ty = if self.d() == DType::F32 { MapType::F32 } else { map_type(self.d()) };
        store_map_with_rows(ty, if self.turned { self.turned_rows() } else { SLAB_ROWS }, self.slab_row_bytes())
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
        let header = Header { name: self.to_string(), target: Target::Sm90a, threads: self.threads(), min_ctas: 1, cluster: self.cluster };
        if self.is_integer() { build(header, |k| gemm::<i32>(k, self)) } else { build(header, |k| gemm::<f32>(k, self)) }
    }
}

/// What a sum is kept in.
trait Sum: Number {
    fn to_f32<'k>(value: Val<'k, Self>) -> Val<'k, f32>;
    const ZERO: Self;
}

impl Sum for f32 {
    fn to_f32<'k>(value: Val<'k, f32>) -> Val<'k, f32> {
        value
    }
    const ZERO: f32 = 0.0;
}

impl Sum for i32 {
    fn to_f32<'k>(value: Val<'k, i32>) -> Val<'k, f32> {
        value.to_f32()
    }
    const ZERO: i32 = 0;
}

fn gemm<'k, T: Sum + AsVal<'k, T>>(k: Kernel<'k>, spec: &Spec) {
    let (a_tile, b_tile) = (spec.a_tile(), spec.b_tile());
    let (a_loaded, b_loaded) = (spec.loaded(Shared::A), spec.loaded(Shared::B));
    let a = k.tensor_map("a", a_tile.map(a_loaded));
    let b = k.tensor_map("b", b_tile.map(b_loaded));
    let (a_batches, b_batches) = (k.scalar::<u32>("a_batches"), k.scalar::<u32>("b_batches"));
    let schedule = Schedule::declare(k, spec.split);
    let batch = BatchIndex::declare(k);
    let result = Way::declare(k, spec);
    let join = spec.split.then(|| Join::declare(k, spec));

    let a_slots = k.shared("a tiles", spec.stages * a_tile.bytes(), 1024);
    let b_slots = k.shared("b tiles", spec.stages * b_tile.bytes(), 1024);
    let scope = if spec.cluster > 1 { RingScope::Cluster } else { RingScope::Cta };
    let ring = Ring::new(k, spec.stages, spec.consumers, scope);
    k.when(k.thread().eq(0), || {
        ring.init();
        k.prefetch_tensormap(&a);
        k.prefetch_tensormap(&b);
    });
    publish_barriers(k);
    // What is in front of this launch may still run: nothing of it is touched above.
    k.griddep_wait();
    k.griddep_launch();

    let rank = if spec.cluster > 1 { k.cluster_rank() } else { k.constant(0) };
    let everyone = k.constant(((1u32 << spec.cluster) - 1) as u16);
    let options = |operand| LoadOptions { multicast: (spec.cluster > 1 && spec.shared == operand).then_some(everyone), policy: None };
    // A cluster takes neighbouring tiles, along the side whose operand they do not share.
    let tile_row = |work: &Work<'k>| if spec.shared == Shared::B { work.row * spec.cluster + rank } else { work.row };
    let tile_column = |work: &Work<'k>| if spec.shared == Shared::A { work.column * spec.cluster + rank } else { work.column };

    let load = || {
        let cursor = ring.cursor();
        let a_part = if a_loaded < spec.tile_m { rank * a_loaded } else { k.constant(0) };
        let b_part = if b_loaded < spec.tile_n { rank * b_loaded } else { k.constant(0) };
        k.when(k.elect(), || {
            schedule.for_each(|work| {
                let row = tile_row(&work) * spec.tile_m + a_part;
                let column = tile_column(&work) * spec.tile_n + b_part;
                let (a_batch, b_batch) = (work.batch * a_batches, work.batch * b_batches);
                k.range(work.steps, |step| {
                    let depth = (work.first_step + step) * spec.depth();
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
        let first_row = warpgroup * (64 * spec.blocks());
        let sums: Vec<Fragment<'k, T>> = (0..spec.blocks()).map(|_| Fragment::unset(k, spec.tile_n)).collect();
        let totals: Vec<Fragment<'k, T>> =
            if spec.promote { (0..spec.blocks()).map(|_| Fragment::unset(k, spec.tile_n)).collect() } else { vec![] };
        let a_low = a_tile.descriptor_base(a_slots.address(), first_row);
        let b_low = b_tile.descriptor_base(b_slots.address(), 0u32);
        let cursor = ring.cursor();
        let previous = k.var_named("previous", 0u32);
        let add = k.var_named("add", k.thread().ge(0u32));

        schedule.for_each(|work| {
            for total in &totals {
                total.registers().iter().for_each(|register| register.set(T::ZERO));
            }
            k.range(work.steps, |step| {
                cursor.wait();
                let stage = cursor.stage();
                let (a_stage, b_stage) = (a_low + stage * (a_tile.bytes() >> 4), b_low + stage * (b_tile.bytes() >> 4));
                add.set(if spec.promote { k.thread().gt(u32::MAX - 1) } else { step.gt(0) });
                k.wgmma_fence();
                for part in 0..STEPS {
                    let b_descriptor = b_tile.descriptor_from(b_stage + b_tile.advance(0, part));
                    for (block, sum) in sums.iter().enumerate() {
                        let a_descriptor = a_tile.descriptor_from(a_stage + a_tile.advance(64 * block as u32, part));
                        let adds = if part == 0 { add.get() } else { k.constant(true) };
                        k.wgmma(spec.shape(), sum.registers(), WgmmaA::Shared(a_descriptor), b_descriptor, adds);
                    }
                }
                k.wgmma_commit();
                if spec.promote {
                    k.wgmma_wait(0);
                    cursor.release(stage, thread);
                    for (total, sum) in totals.iter().zip(&sums) {
                        for (total, sum) in total.registers().iter().zip(sum.registers()) {
                            total.set(*total + *sum);
                        }
                    }
                } else {
                    // One group stays in flight while the stage before it goes back.
                    k.wgmma_wait(1);
                    k.when(step.gt(0), || cursor.release(previous, thread));
                    previous.set(stage);
                }
                cursor.advance();
            });
            if !spec.promote {
                k.wgmma_wait(0);
                cursor.release(previous, thread);
            }

            let results = if spec.promote { &totals } else { &sums };
            let tile = Tile {
                row: tile_row(&work) * spec.tile_m + first_row,
                column: tile_column(&work) * spec.tile_n,
                batch: work.batch,
                indices: batch.split(work.batch),
            };
            match &join {
                None => result.write(k, spec, results, &tile, warpgroup, thread),
                Some(join) => {
                    let last = join.is_last(k, spec, results, &work, rank, warpgroup, thread);
                    k.when(last, || result.write(k, spec, results, &tile, warpgroup, thread));
                }
            }
        });
        result.finish(thread);
    };

    let (few, many) = spec.registers();
    let load_warp = || k.warp_roles(&[Role { name: "load", warps: 1, registers: None, body: &load }]);
    k.warp_roles(&[
        Role { name: "producer", warps: 4, registers: Some(few), body: &load_warp },
        Role { name: "consumer", warps: 4 * spec.consumers, registers: Some(many), body: &multiply },
    ]);
    if spec.cluster > 1 {
        // A peer may still arrive on this CTA's barriers.
        k.cluster_sync();
    }
}

/// Where a consumer's results belong: its first row and the tile's first column.
struct Tile<'k> {
    row: Val<'k, u32>,
    column: Val<'k, u32>,
    batch: Val<'k, u32>,
    indices: Indices<'k>,
}

/// Joins the parts of a tile whose depth is split: each part goes to scratch, and whoever comes last adds them up in order, so that the
/// sum does not depend on who that is.
struct Join<'k> {
    parts: Pointer<'k>,
    counters: Pointer<'k>,
    most_parts: Val<'k, u32>,
    told: SharedPiece<'k>,
}

impl<'k> Join<'k> {
    fn declare(k: Kernel<'k>, spec: &Spec) -> Self {
        Join {
            parts: k.in_out("parts", 16),
            counters: k.in_out("counters", 4),
            most_parts: k.scalar("most_parts"),
            told: k.shared("arrivals seen", 4 * spec.consumers, 4),
        }
    }

    /// Whether this warpgroup goes on to write the tile; its registers then hold the whole sum.
    #[allow(clippy::too_many_arguments, reason = "who asks, and about what")]
    fn is_last<T: Sum>(
        &self,
        k: Kernel<'k>,
        spec: &Spec,
        sums: &[Fragment<'k, T>],
        work: &Work<'k>,
        rank: Val<'k, u32>,
        warpgroup: Val<'k, u32>,
        thread: Val<'k, u32>,
    ) -> Val<'k, bool> {
        // Parts of one tile, CTA and warpgroup stand side by side; a thread's own four words are one vector.
        let owner = (work.tile * spec.cluster + rank) * spec.consumers + warpgroup;
        let words = spec.tile_m / spec.consumers * spec.tile_n;
        let place = |part: Val<'k, u32>| {
            let bytes = (owner * self.most_parts + part).mul_wide(words * 4);
            self.parts.moved(bytes).at(thread, 16)
        };
        let vectors = sums.iter().flat_map(|sum| sum.registers().chunks(4)).enumerate();
        let offset = |i: usize| i as i64 * 16 * i64::from(WARPGROUP);
        let keep = |part: Val<'k, u32>| {
            let own = place(part);
            for (i, registers) in vectors.clone() {
                let values: Vec<Val<'k, T>> = registers.iter().map(|r| r.get()).collect();
                k.st_global_vector(own, offset(i), &values, Cache::Default);
            }
            k.fence(Fence::AcqRel(Scope::Gpu));
        };
        let add = |part: Val<'k, u32>| {
            let from = place(part);
            for (i, registers) in vectors.clone() {
                let values = k.ld_global_vector::<T>(from, offset(i), 4, Cache::Default);
                registers.iter().zip(values).for_each(|(register, value)| register.set(*register + value));
            }
        };
        let barrier = warpgroup + 1;
        let told = self.told.address() + warpgroup * 4;
        let counter = self.counters.at(owner, 4);
        // Adds to the counter once the whole warpgroup is here; everyone learns what it was.
        let count = |amount: u32| {
            k.barrier_sync(barrier, WARPGROUP);
            k.when(thread.eq(0), || {
                let seen = k.atom_global(Atomic::Add, counter, 0, amount, Order::AcqRel(Scope::Gpu));
                k.st_shared(told, 0, seen);
            });
            k.barrier_sync(barrier, WARPGROUP);
            k.ld_shared::<u32>(told, 0)
        };

        let last = k.var_named("last", work.parts.eq(1));
        k.when(work.parts.eq(2), || {
            // Two parts add up to the same in either order: the later one keeps its own in registers and waits for the other's.
            k.when_else(
                count(1).eq(0),
                || {
                    keep(k.constant(0));
                    count(2);
                },
                || {
                    k.when(thread.eq(0), || {
                        k.repeat_until(|| k.ld_global_with::<u32>(counter, 0, Order::Acquire(Scope::Gpu), Cache::Default).ge(4));
                    });
                    k.barrier_sync(barrier, WARPGROUP);
                    k.fence(Fence::AcqRel(Scope::Gpu));
                    add(k.constant(0));
                    last.set(k.thread().ge(0u32));
                },
            );
        });
        k.when(work.parts.gt(2), || {
            keep(work.part);
            last.set((count(1) + 1).eq(work.parts));
            k.when(last, || {
                k.fence(Fence::AcqRel(Scope::Gpu));
                for sum in sums {
                    sum.registers().iter().for_each(|register| register.set(k.constant(T::ZERO)));
                }
                k.range(work.parts, add);
            });
        });
        // The word is used again by the next split tile.
        k.when(work.parts.gt(1), || k.barrier_sync(barrier, WARPGROUP));
        last.get()
    }
}

/// The way of results to D: the epilogue, then shared memory and the copy engine, or elements straight from registers.
struct Way<'k> {
    epilogue: Epilogue<'k, f32>,
    rows: Val<'k, u32>,
    columns: Val<'k, u32>,
    tma: Option<(TensorMap<'k>, Staging<'k>)>,
}

/// A consumer's 64 rows of results on their way: which warpgroup, which slab is next, where they belong.
struct Block<'w, 'k> {
    way: &'w Way<'k>,
    spec: &'w Spec,
    /// The epilogue at this thread's first element of each row half.
    places: [Place<'w, 'k, f32>; 2],
    /// Whether each row half lies in D.
    rows_inside: [Val<'k, bool>; 2],
    /// This thread's first column.
    column: Val<'k, u32>,
}

impl<'k> Way<'k> {
    fn declare(k: Kernel<'k>, spec: &Spec) -> Self {
        let epilogue = spec.epilogue.declare::<f32>(k);
        let (rows, columns) = (k.scalar("rows"), k.scalar("columns"));
        let tma = (spec.out == Out::Tma)
            .then(|| (k.tensor_map("d", spec.d_map()), Staging::with_rows(k, spec.consumers, spec.slabs(), 1, spec.slab_row_bytes())));
        Way { epilogue, rows, columns, tma }
    }

    fn write<T: Sum>(
        &self,
        k: Kernel<'k>,
        spec: &Spec,
        sums: &[Fragment<'k, T>],
        tile: &Tile<'k>,
        warpgroup: Val<'k, u32>,
        thread: Val<'k, u32>,
    ) {
        let matrix = self.epilogue.begin(tile.indices);
        for (i, sum) in sums.iter().enumerate() {
            let first_row = tile.row + 64 * i as u32;
            let row = first_row + Fragment::<T>::row(thread);
            let column = tile.column + Fragment::<T>::column(thread);
            let block = Block {
                way: self,
                spec,
                places: [matrix.at(row, column), matrix.at(row + 8, column)],
                rows_inside: [row.lt(self.rows), (row + 8).lt(self.rows)],
                column,
            };
            match &self.tma {
                None => block.write_direct(k, sum),
                Some((map, staging)) => {
                    // A slab is 128 bytes of D's contiguous side by up to 64 of the other.
                    let per_slab = if spec.turned { spec.turned_rows() } else { spec.slab_row_bytes() / spec.d().bytes() as u32 };
                    let slabs = spec.tile_n.div_ceil(per_slab);
                    for index in 0..slabs {
                        let first = index * per_slab;
                        let turn = i as u32 * slabs + index;
                        let slab = staging.slab(warpgroup, turn % staging.slabs());
                        staging.acquire_turn(warpgroup, thread, turn, sums.len() as u32 * slabs);
                        for pair in 0..per_slab.min(spec.tile_n - first) / 16 {
                            block.write_columns(k, sum, staging, slab, thread, first / 8 + 2 * pair, pair);
                        }
                        let (x, y) = if spec.turned { (first_row, tile.column + first) } else { (tile.column + first, first_row) };
                        staging.store(slab, warpgroup, thread, map, x, y, tile.batch);
                    }
                }
            }
        }
    }

    fn finish(&self, thread: Val<'k, u32>) {
        if let Some((_, staging)) = &self.tma {
            staging.finish(thread);
        }
    }
}

impl<'k> Block<'_, 'k> {
    /// Two neighbouring results: the epilogue applied to the elements of a fragment's column block and row half.
    fn pair<T: Sum>(&self, k: Kernel<'k>, sum: &Fragment<'k, T>, block: u32, half: u32) -> [Val<'k, f32>; 2] {
        let place = &self.places[half as usize];
        let raw = [0, 1].map(|odd| T::to_f32(sum.element(block, half, odd).get()));
        if !self.spec.epilogue.reads_memory() {
            return [0, 1].map(|odd| place.apply(raw[odd as usize], 8 * block + odd));
        }
        // Operands exist only inside of D; what stands outside is clipped by the copy engine.
        let results = raw.map(|value| k.var(value));
        let inside = |odd: u32| self.rows_inside[half as usize] & (self.column + (8 * block + odd)).lt(self.way.columns);
        if self.spec.epilogue.pairs {
            k.when(inside(1), || {
                let values = place.apply_pair(raw, 8 * block);
                results.iter().zip(values).for_each(|(result, value)| result.set(value));
            });
        } else {
            for odd in 0..2 {
                k.when(inside(odd), || results[odd as usize].set(place.apply(raw[odd as usize], 8 * block + odd)));
            }
        }
        results.map(|result| result.get())
    }

    /// Puts 16 columns of results into a slab: blocks `block` and `block + 1`, the slab's pair of chunks `pair`.
    #[allow(clippy::too_many_arguments, reason = "where from, and where to")]
    fn write_columns<T: Sum>(
        &self,
        k: Kernel<'k>,
        sum: &Fragment<'k, T>,
        staging: &Staging<'k>,
        slab: Val<'k, u32>,
        thread: Val<'k, u32>,
        block: u32,
        pair: u32,
    ) {
        const ORDER: [(u32, u32); 4] = [(0, 0), (0, 1), (1, 0), (1, 1)];
        match half_format(self.spec.d()) {
            Some(format) => {
                let packed = ORDER.map(|(b, half)| {
                    let [low, high] = self.pair(k, sum, block + b, half);
                    k.pack(format, low, high)
                });
                if self.spec.turned {
                    staging.write_halves_transposed(slab, thread, pair, &packed);
                } else {
                    staging.write_halves(slab, thread, pair, &packed);
                }
            }
            None => {
                for (b, half) in ORDER {
                    let words = match self.spec.epilogue.exact {
                        true => [0, 1].map(|odd| sum.element(block + b, half, odd).get().bitcast::<u32>()),
                        false => self.pair(k, sum, block + b, half).map(|value| value.bitcast::<u32>()),
                    };
                    let row = Fragment::<T>::row(thread) + 8 * half;
                    let column = Fragment::<T>::column(thread) + (16 * pair + 8 * b);
                    staging.write_pair(slab, row, column, &words);
                }
            }
        }
    }

    /// Stores each element that lies in D.
    fn write_direct<T: Sum>(&self, k: Kernel<'k>, sum: &Fragment<'k, T>) {
        for half in 0..2 {
            let place = &self.places[half as usize];
            k.when(self.rows_inside[half as usize], || {
                for block in 0..self.spec.tile_n / 8 {
                    let value = |odd: u32| T::to_f32(sum.element(block, half, odd).get());
                    if self.spec.epilogue.pairs {
                        k.when((self.column + (8 * block + 1)).lt(self.way.columns), || {
                            place.store_pair(place.apply_pair([value(0), value(1)], 8 * block), 8 * block);
                        });
                        continue;
                    }
                    for odd in 0..2 {
                        let right = 8 * block + odd;
                        k.when((self.column + right).lt(self.way.columns), || {
                            if self.spec.epilogue.exact {
                                place.store_exact(sum.element(block, half, odd).get().bitcast(), right);
                            } else {
                                place.store(place.apply(value(odd), right), right);
                            }
                        });
                    }
                }
            });
        }
    }
}

fn half_format(d: DType) -> Option<Packed> {
    match d {
        DType::Bf16 => Some(Packed::Bf16x2),
        DType::F16 => Some(Packed::F16x2),
        _ => None,
    }
}
