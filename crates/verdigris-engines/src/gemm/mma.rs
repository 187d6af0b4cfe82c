//! `gemm.mma`: matrix multiplication by `mma.sync`, for every chip from sm_80 on.
//!
//! **Method.** A CTA computes a tile of D from K-tiles of A and B that are 64 bytes deep along k. A ring of K-tiles in shared memory is
//! filled by `cp.async`, several K-tiles ahead; each warp reads fragments of 16-byte chunks by `ldmatrix` and multiplies them by
//! `mma.sync`. An operand that runs along k lies in the K-tile as rows of k; one that runs along m or n lies as rows of m or n, and
//! `ldmatrix.trans` turns it. Chunks are permuted within rows so that the eight rows of one 8×8 matrix stand in different banks.
//!
//! **Alignment.** A chunk arrives in copies of 16, 8 or 4 bytes, as an argument says: what rows, matrices and buffers are multiples of.
//! 16-bit operands of odd leading dimension are loaded element by element into registers instead, one K-tile ahead. Ragged edges are filled
//! with zeros by the copy itself.
//!
//! **When it wins.** On chips without `wgmma`, and for operands that tensor maps cannot describe.
//!
//! **Numbers.** 16-bit operands: exact products, f32 sums by the tensor core. tf32: operands cut to 19 bits. int8: exact. The order of
//! additions depends on nothing but the spec, so results repeat bit for bit.

use serde::{Deserialize, Serialize};
use verdigris_graph::{GemmProblem, Matrix, Order, Precision, Problem};
use verdigris_kir::face::{Header, Kernel, Scalar, Val, Var, build};
use verdigris_kir::inst::{MatrixType, MmaShape};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::Read;
use verdigris_kir::program::{KernelRef, Program};
use verdigris_tensor::DType;

use super::{MOST_PARTS, Tiles, TilesArgs, part_count, tiled};
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Loop, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::compute;
use crate::fuse::epilogue::{Epilogue, EpilogueArgs, EpilogueDecl, EpilogueSpec, OperandSpec, Place, Walk};
use crate::layout::batch::{BatchIndexArgs, BatchStridesBytes, Indices};

/// Depth of a K-tile along k, in bytes.
const K_TILE_BYTES: u32 = 64;
/// What `cp.async` and `ldmatrix` move at once.
const CHUNK_BYTES: u32 = 16;
/// K-tiles in the ring.
const STAGES: u32 = 4;

/// The engine: an accepted problem.
#[derive(Clone, Debug)]
pub(super) struct Mma {
    problem: GemmProblem,
    spec: Spec,
    /// Bytes of a copy of A and of B.
    copy_bytes: [u32; 2],
    /// Two columns are stored at once.
    pairs: bool,
    arch: Arch,
}

impl Algorithm for Mma {
    const ID: EngineId = EngineId { name: "gemm.mma", number: 101 };
    const VERSION: u32 = 1;
    type Config = Tile;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let problem = super::along_rows_of_d(super::product(Self::ID, problem)?);
        let (a, b) = (problem.a.dtype, problem.b.dtype);
        let arithmetic = Arithmetic::of(&problem)
            .ok_or_else(|| Self::ID.refusal(Reason::Precision, format_args!("{a} by {b} in {:?}", problem.precision)))?;
        Self::ID.require(
            arch.runs(Target::Sm80),
            Reason::Target,
            format_args!("compute capability {:?}, taken from 8.0 on", arch.capability),
        )?;
        Self::ID.require(problem.k < 1 << 34, Reason::Extent, format_args!("k = {}, taken below 2^34", problem.k))?;
        // The small tile is offered always, and has the most of them.
        let parts = part_count(problem.m, problem.n, [Tile::Small.extent(); 2]);
        Self::ID.require(
            parts <= MOST_PARTS,
            Reason::Extent,
            format_args!("{} by {}: {parts} launches, taken are {MOST_PARTS}", problem.m, problem.n),
        )?;
        Self::ID.require(problem.d.order() == Order::RowMajor, Reason::Layout, "D with no stride of 1")?;
        let a_lie = Lie::of(&problem.a, problem.m, problem.k);
        let a_lie = a_lie.ok_or_else(|| Self::ID.refusal(Reason::Layout, "A with no stride of 1"))?;
        let b_lie = Lie::of(&problem.b.transposed(), problem.n, problem.k);
        let b_lie = b_lie.ok_or_else(|| Self::ID.refusal(Reason::Layout, "B with no stride of 1"))?;
        let direct = a_lie.alignment_bytes < 4 || b_lie.alignment_bytes < 4;
        if !arithmetic.is_16_bit() {
            Self::ID.require(a_lie.along_k && b_lie.along_k, Reason::Layout, format_args!("{a} operands that do not run along k"))?;
            Self::ID.require(!direct, Reason::Alignment, format_args!("{a} rows that are no multiple of 4 bytes"))?;
        }
        let mut epilogue = EpilogueSpec::of(&problem);
        // With an even number of columns a pair is inside or outside as a whole.
        let pairs = epilogue.pairs && problem.n.is_multiple_of(2) && !epilogue.exact;
        // A plain epilogue has both ways in one kernel; a user's chain is compiled for its own.
        epilogue.pairs = pairs && !epilogue.is_plain();
        let target = epilogue.target();
        Self::ID.require(arch.runs(target), Reason::Target, format_args!("the epilogue's types need {}", target.ptx()))?;
        let spec = Spec { arithmetic, tile: Tile::Large, along_k: [a_lie.along_k, b_lie.along_k], direct, epilogue };
        let shared_bytes = spec.shared_bytes();
        let limit = arch.shared_bytes_per_cta;
        Self::ID.require(shared_bytes <= limit, Reason::SharedMemory, format_args!("{shared_bytes} bytes of {limit}"))?;
        let copy_bytes = [a_lie.alignment_bytes, b_lie.alignment_bytes];
        Ok(Mma { problem, spec, copy_bytes, pairs, arch: arch.clone() })
    }

    fn configs(&self) -> Vec<Tile> {
        // Elements on their way take the registers of a large tile's sums.
        if self.spec.direct { vec![Tile::Small] } else { vec![Tile::Large, Tile::Small] }
    }

    fn knobs(tile: &Tile) -> Knobs {
        Knobs::new([("tile", tile.extent())])
    }

    fn notes(&self, _: &Tile) -> Notes {
        let arithmetic = self.spec.arithmetic;
        Notes {
            tensor_core: true,
            down_convert: (arithmetic.a == MatrixType::Tf32).then_some(DType::Tf32),
            ..Notes::of(if arithmetic.is_integer() { DType::I32 } else { DType::F32 })
        }
    }

    fn work(&self, &tile: &Tile) -> Work {
        let p = &self.problem;
        let extent = f64::from(tile.extent());
        let tiles = (p.m as f64 / extent).ceil() * (p.n as f64 / extent).ceil() * p.batch_count() as f64;
        let resident = f64::from(self.arch.sm_count * if tile == Tile::Large { 2 } else { 4 });
        let k_tile_bytes = 2.0 * extent * f64::from(K_TILE_BYTES);
        let [warp_rows, warp_columns] = tile.warps().map(f64::from);
        let copy_bytes = self.copy_bytes.into_iter().min().map_or(1.0, f64::from);
        let chunk_bytes = if self.spec.direct { f64::from(self.spec.arithmetic.element_bytes()) } else { copy_bytes };
        let main = Loop {
            tile: [extent; 2],
            // 16×8 by 32 bytes in 16 cycles of an SM's four cores together.
            tensor_cycles: 2.0 * (extent / 16.0) * (extent / 8.0) * 4.0,
            shared_bytes: k_tile_bytes + (warp_rows + warp_columns) * extent * f64::from(K_TILE_BYTES),
            loaded_bytes: k_tile_bytes,
            issued: k_tile_bytes / chunk_bytes / 32.0 * if self.spec.direct { 4.0 } else { 1.5 },
            copy_bytes: chunk_bytes,
            store_bytes: p.d.dtype.bytes() as f64 * if self.pairs { 2.0 } else { 1.0 },
            threads: f64::from(tile.threads()),
            stages: f64::from(self.spec.stages()),
            exposed: if self.spec.direct { 0.8 } else { 0.3 },
            across_depth: self.spec.along_k.map(|along| !along),
            ..Loop::of_gemm(Self::ID.name, p)
        };
        let steps = (p.k as f64 / f64::from(self.spec.arithmetic.depth())).ceil();
        Work::of(main.in_waves(tiles, resident, steps))
    }

    fn lower(&self, &tile: &Tile) -> Result<Program, Refusal> {
        let given = Given { spec: Spec { tile, ..self.spec.clone() }, copy_bytes: self.copy_bytes, pairs: self.pairs };
        let (p, spec) = (&self.problem, &given.spec);
        // B is loaded as its transpose, n by k.
        let b = p.b.transposed();
        Ok(tiled(p, &spec.clone().kernel(), [tile.extent(); 2], spec.arithmetic.depth(), |tiles, chunk, part| {
            let operand = |matrix: &Matrix, first: u64, i: usize| OperandArgs {
                matrix: chunk.address(matrix, first, 0),
                line_bytes: (if spec.along_k[i] { matrix.row_stride } else { matrix.column_stride }) * matrix.dtype.bytes() as u64,
                batch: chunk.strides_bytes(matrix),
                copy_bytes: (!spec.direct).then_some(self.copy_bytes[i]),
            };
            let arguments = ParamsArgs {
                tiles,
                in_pairs: spec.either_way().then_some(self.pairs.into()),
                batch: chunk.index(),
                a: operand(&p.a, part.first_row, 0),
                b: operand(&b, part.first_column, 1),
                epilogue: spec.epilogue.arguments(p, chunk, part.first_row, part.first_column),
            };
            arguments.bound(&given)
        }))
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let epilogue = |d: DType| EpilogueSpec { exact: d == DType::I32, ..EpilogueSpec::plain(OperandSpec { dtype: d, walk: Walk::Row }) };
        let arithmetic = |ty: MatrixType| Arithmetic { a: ty, b: ty, half_sum: false };
        let mut specs = Vec::new();
        for (ty, d) in [(MatrixType::Bf16, DType::Bf16), (MatrixType::F16, DType::F16)] {
            for along_k in [[true, true], [true, false], [false, true], [false, false]] {
                for (tile, direct) in [(Tile::Large, false), (Tile::Small, false), (Tile::Small, true)] {
                    specs.push(Spec { arithmetic: arithmetic(ty), tile, along_k, direct, epilogue: epilogue(d) });
                }
            }
        }
        for (ty, d) in [(MatrixType::Tf32, DType::F32), (MatrixType::S8, DType::I32)] {
            for tile in [Tile::Large, Tile::Small] {
                specs.push(Spec { arithmetic: arithmetic(ty), tile, along_k: [true; 2], direct: false, epilogue: epilogue(d) });
            }
        }
        specs.into_iter().filter(|spec| spec.epilogue.target() <= target).map(Spec::kernel).collect()
    }
}

/// What the tensor core multiplies and sums.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Arithmetic {
    a: MatrixType,
    b: MatrixType,
    /// The finished sum is rounded to f16.
    half_sum: bool,
}

impl Arithmetic {
    fn of(problem: &GemmProblem) -> Option<Arithmetic> {
        let ty = |dtype| match (problem.precision, dtype) {
            (Precision::Fp32 | Precision::F16, DType::F16) => Some(MatrixType::F16),
            (Precision::Fp32, DType::Bf16) => Some(MatrixType::Bf16),
            (Precision::Tf32, DType::F32) => Some(MatrixType::Tf32),
            (Precision::I32, DType::I8) => Some(MatrixType::S8),
            (Precision::I32, DType::U8) => Some(MatrixType::U8),
            _ => None,
        };
        Some(Arithmetic { a: ty(problem.a.dtype)?, b: ty(problem.b.dtype)?, half_sum: problem.precision == Precision::F16 })
    }

    fn is_integer(self) -> bool {
        matches!(self.a, MatrixType::S8 | MatrixType::U8)
    }

    fn is_16_bit(self) -> bool {
        matches!(self.a, MatrixType::Bf16 | MatrixType::F16)
    }

    fn element_bytes(self) -> u32 {
        self.a.bits() / 8
    }

    /// Elements of a K-tile along k.
    fn depth(self) -> u32 {
        K_TILE_BYTES / self.element_bytes()
    }

    fn shape(self) -> MmaShape {
        let d = if self.is_integer() { MatrixType::S32 } else { MatrixType::F32 };
        // 32 bytes of k a turn, whatever the type.
        let k = 32 / self.element_bytes();
        MmaShape { m: 16, n: 8, k, a: self.a, b: self.b, d, saturate: false, sparse: false }
    }

    fn name(self) -> String {
        let sum = if self.is_integer() {
            "i32"
        } else if self.half_sum {
            "f16sum"
        } else {
            "f32"
        };
        format!("{}_{}_{sum}", self.a.ptx(), self.b.ptx())
    }
}

/// The tile of a CTA, divided among warps.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Tile {
    /// 128×128 by 2×4 warps of 64×32.
    Large,
    /// 64×64 by 2×2 warps of 32×32.
    Small,
}

impl Tile {
    const fn extent(self) -> u32 {
        match self {
            Tile::Large => 128,
            Tile::Small => 64,
        }
    }

    /// Warps along rows and along columns.
    const fn warps(self) -> [u32; 2] {
        match self {
            Tile::Large => [2, 4],
            Tile::Small => [2, 2],
        }
    }

    const fn threads(self) -> u32 {
        let [rows, columns] = self.warps();
        rows * columns * 32
    }
}

/// How an operand, read as `outer × k`, lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Lie {
    /// Neighbours along k are neighbouring elements; otherwise neighbours along m or n are.
    along_k: bool,
    /// The largest of 16, 8, 4, … that divides the steps between lines and between matrices.
    alignment_bytes: u32,
}

impl Lie {
    fn of(matrix: &Matrix, outer: u64, k: u64) -> Option<Lie> {
        let bytes = matrix.dtype.bytes() as u64;
        let alignment = |stride: u64, extent: u64| {
            let steps = matrix.batch_strides.iter().copied().chain((extent > 1).then_some(stride));
            steps.map(|step| step * bytes).fold(16, |alignment, step| alignment.min(1 << step.trailing_zeros().min(4)))
        };
        let along_k = (matrix.column_stride == 1 || k <= 1).then(|| alignment(matrix.row_stride, outer));
        let along_outer = (matrix.row_stride == 1 || outer <= 1).then(|| alignment(matrix.column_stride, k));
        match (along_k, along_outer) {
            (Some(one), other) if other.is_none_or(|other| one >= other) => Some(Lie { along_k: true, alignment_bytes: one as u32 }),
            (_, Some(other)) => Some(Lie { along_k: false, alignment_bytes: other as u32 }),
            _ => None,
        }
    }
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Spec {
    arithmetic: Arithmetic,
    tile: Tile,
    /// A and B run along k.
    along_k: [bool; 2],
    /// Loaded element by element, through registers.
    direct: bool,
    epilogue: EpilogueSpec,
}

impl Spec {
    fn stages(&self) -> u32 {
        if self.direct { 2 } else { STAGES }
    }

    /// An argument says whether two columns are stored at once.
    fn either_way(&self) -> bool {
        self.epilogue.is_plain() && !self.epilogue.exact
    }

    fn shared_bytes(&self) -> u32 {
        2 * self.tile.extent() * K_TILE_BYTES * self.stages()
    }

    fn name(&self) -> String {
        let (tile, depth) = (self.tile.extent(), self.arithmetic.depth());
        let letters = format!("{}{}", if self.along_k[0] { 'n' } else { 't' }, if self.along_k[1] { 't' } else { 'n' });
        let loads = if self.direct { "direct" } else { "async" };
        let (arithmetic, stages, epilogue) = (self.arithmetic.name(), self.stages(), self.epilogue.name());
        format!("gemm_mma_{arithmetic}_{tile}x{tile}x{depth}_s{stages}_{letters}_{loads}_{epilogue}")
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let min_ctas = if self.epilogue.is_plain() && !self.direct { 2 } else { 1 };
        let header = Header { name: self.name(), target: self.epilogue.target(), threads: self.tile.threads(), min_ctas, cluster: 1 };
        build(header, |k| {
            if self.arithmetic.is_integer() {
                gemm::<i32>(k, self);
            } else {
                gemm::<f32>(k, self);
            }
        })
    }
}

// ---- the kernel --------------------------------------------------------------------------------------------------------

/// A type of sums.
trait Sum: Scalar {
    const ZERO: Self;
    fn finish<'k>(sum: Val<'k, Self>, arithmetic: Arithmetic) -> Val<'k, f32>;
    fn exact(sum: Val<'_, Self>) -> Option<Val<'_, i32>>;
}

impl Sum for f32 {
    const ZERO: f32 = 0.0;
    fn finish<'k>(sum: Val<'k, f32>, arithmetic: Arithmetic) -> Val<'k, f32> {
        if arithmetic.half_sum { compute::round_to(sum.kernel(), DType::F16, sum) } else { sum }
    }
    fn exact(_: Val<'_, f32>) -> Option<Val<'_, i32>> {
        None
    }
}

impl Sum for i32 {
    const ZERO: i32 = 0;
    fn finish<'k>(sum: Val<'k, i32>, _: Arithmetic) -> Val<'k, f32> {
        sum.to_f32()
    }
    fn exact(sum: Val<'_, i32>) -> Option<Val<'_, i32>> {
        Some(sum)
    }
}

/// A kernel, and what a launch of it relies on beyond the kernel itself: its arguments say so.
struct Given {
    spec: Spec,
    copy_bytes: [u32; 2],
    pairs: bool,
}

impl Given {
    /// What the kernel relies on, whatever its arguments.
    fn least(spec: &Spec) -> Given {
        Given { spec: spec.clone(), copy_bytes: [4; 2], pairs: spec.epilogue.pairs }
    }

    fn operand(&self, index: usize) -> OperandDecl {
        let (element_bytes, copies) = (self.spec.arithmetic.element_bytes(), !self.spec.direct);
        OperandDecl { alignment_bytes: if copies { self.copy_bytes[index] } else { element_bytes }, copies }
    }

    fn epilogue(&self) -> EpilogueDecl {
        EpilogueSpec { pairs: self.pairs, ..self.spec.epilogue.clone() }.over_matrices()
    }
}

verdigris_kir::parameters! {
    struct Params / ParamsArgs of Given as given {
        tiles: TilesArgs = (),
        /// Whether two columns are stored at once.
        in_pairs: Option<u32> = given.spec.either_way().then_some(()),
        batch: BatchIndexArgs = (),
        a: OperandArgs = given.operand(0),
        b: OperandArgs = given.operand(1),
        epilogue: EpilogueArgs = given.epilogue(),
    }
}

fn gemm<'k, S: Sum>(k: Kernel<'k>, spec: &Spec) {
    let Params { tiles, in_pairs, batch, a, b, epilogue } = Params::declare(k, &Given::least(spec));
    let Tiles { rows, columns, column_tiles, k_tiles, last_depth } = tiles;

    let extent = spec.tile.extent();
    let (row_tile, column_tile) = column_tiles.split(k.cta());
    let indices = batch.of_cta();
    let a = KTiles::new("a_slabs", (a, spec.along_k[0]), spec, indices, row_tile * extent, rows);
    let b = KTiles::new("b_slabs", (b, spec.along_k[1]), spec, indices, column_tile * extent, columns);

    let [warp_rows, warp_columns] = spec.tile.warps();
    let warp = k.warp();
    let first_row = (warp >> warp_columns.ilog2()) * (extent / warp_rows);
    let first_column = (warp & (warp_columns - 1)) * (extent / warp_columns);
    let a_reader = Reader::new(&a, first_row, Side::A, extent / warp_rows / 16);
    let b_reader = Reader::new(&b, first_column, Side::B, extent / warp_columns / 16);
    let (blocks_m, blocks_n) = (extent / warp_rows / 16, extent / warp_columns / 8);
    let zero = k.constant(S::ZERO);
    let sums: Vec<Vec<[Var<'k, S>; 4]>> = (0..blocks_m).map(|_| (0..blocks_n).map(|_| [(); 4].map(|()| k.var(zero))).collect()).collect();

    let stage_bytes = extent * K_TILE_BYTES;
    let multiply = |turn: Val<'k, u32>| {
        for step in 0..K_TILE_BYTES / 32 {
            let column: Vec<Vec<Val<'k, u32>>> = (0..blocks_m).map(|i| a_reader.load(turn, step, i)).collect();
            // One load brings two blocks of 8 columns.
            let row: Vec<Vec<Val<'k, u32>>> = (0..blocks_n / 2).map(|j| b_reader.load(turn, step, j)).collect();
            for (line, x) in sums.iter().zip(&column) {
                for (j, sum) in line.iter().enumerate() {
                    k.mma(spec.arithmetic.shape(), x, &row[j / 2][j % 2 * 2..][..2], sum);
                }
            }
        }
    };
    let depth_of = |k_tile: Val<'k, u32>| k.select((k_tile + 1).eq(k_tiles), last_depth, spec.arithmetic.depth());

    if spec.direct {
        k.when(k_tiles.gt(0), || {
            let depth = depth_of(k.constant(0));
            a.fetch(depth);
            b.fetch(depth);
            a.keep(k.constant(0));
            b.keep(k.constant(0));
        });
        k.bar_sync();
        k.range(k_tiles, |k_tile| {
            let next = k_tile + 1;
            k.when(next.lt(k_tiles), || {
                let depth = depth_of(next);
                a.fetch(depth);
                b.fetch(depth);
            });
            multiply((k_tile & 1u32) * stage_bytes);
            k.when(next.lt(k_tiles), || {
                a.keep((next & 1u32) * stage_bytes);
                b.keep((next & 1u32) * stage_bytes);
            });
            k.bar_sync();
        });
    } else {
        for stage in 0..STAGES - 1 {
            k.when(k_tiles.gt(stage), || {
                let depth = depth_of(k.constant(stage));
                a.copy(depth, k.constant(stage * stage_bytes));
                b.copy(depth, k.constant(stage * stage_bytes));
            });
            k.cp_async_commit();
        }
        let reading = k.var_named("reading", 0u32);
        let writing = k.var_named("writing", (STAGES - 1) * stage_bytes);
        let advance = |turn: Var<'k, u32>| {
            let next = turn + stage_bytes;
            turn.set(k.select(next.eq(STAGES * stage_bytes), 0u32, next));
        };
        k.range(k_tiles, |k_tile| {
            // This K-tile has arrived, for all threads; and all have done with the one that was multiplied before.
            k.cp_async_wait(STAGES - 2);
            k.bar_sync();
            let next = k_tile + (STAGES - 1);
            k.when(next.lt(k_tiles), || {
                let depth = depth_of(next);
                a.copy(depth, writing.get());
                b.copy(depth, writing.get());
            });
            k.cp_async_commit();
            multiply(reading.get());
            advance(reading);
            advance(writing);
        });
        k.cp_async_wait(0);
    }

    let lane = k.lane();
    let first = [row_tile * extent + first_row + (lane >> 2), column_tile * extent + first_column + ((lane & 3u32) << 1)];
    let end = [rows, columns];
    let pairs = || store_pairs(k, spec, &epilogue.paired(), indices, &sums, first, end);
    let singles = || store(k, spec, &epilogue, indices, &sums, first, end);
    match in_pairs {
        Some(in_pairs) => k.when_else(in_pairs.ne(0), pairs, singles),
        None if spec.epilogue.pairs => pairs(),
        None => singles(),
    }
}

/// Calls `visit` for each row of a thread's sums that lies inside of D, with its epilogue and the row's pairs of neighbouring columns,
/// which stand 8 columns apart from `first` on.
fn for_each_row<'k, S: Sum>(
    k: Kernel<'k>,
    epilogue: &Epilogue<'k, f32>,
    indices: Indices<'k>,
    sums: &[Vec<[Var<'k, S>; 4]>],
    first: [Val<'k, u32>; 2],
    rows: Val<'k, u32>,
    visit: impl Fn(&Place<'_, 'k, f32>, &[[Var<'k, S>; 2]]),
) {
    let matrix = epilogue.begin(indices);
    for (i, line) in (0u32..).zip(sums) {
        // A block holds two columns of a row, and of the row 8 below.
        for half in 0..2 {
            let row = first[0] + (16 * i + 8 * half);
            let pairs: Vec<[Var<'k, S>; 2]> = line.iter().map(|block| [0, 1].map(|odd| block[2 * half as usize + odd])).collect();
            k.when(row.lt(rows), || visit(&matrix.at(row, first[1]), &pairs));
        }
    }
}

/// Runs the epilogue on a thread's sums and stores them, one by one.
fn store<'k, S: Sum>(
    k: Kernel<'k>,
    spec: &Spec,
    epilogue: &Epilogue<'k, f32>,
    indices: Indices<'k>,
    sums: &[Vec<[Var<'k, S>; 4]>],
    first: [Val<'k, u32>; 2],
    end: [Val<'k, u32>; 2],
) {
    for_each_row(k, epilogue, indices, sums, first, end[0], |place, pairs| {
        for (j, pair) in (0u32..).zip(pairs) {
            for (right, sum) in (8 * j..).zip(pair) {
                k.when((first[1] + right).lt(end[1]), || match S::exact(sum.get()) {
                    Some(exact) if spec.epilogue.exact => place.store_exact(exact, right),
                    _ => place.store(place.apply(S::finish(sum.get(), spec.arithmetic), right), right),
                });
            }
        }
    });
}

/// The same two by two, where pairs are inside or outside of D as a whole.
fn store_pairs<'k, S: Sum>(
    k: Kernel<'k>,
    spec: &Spec,
    epilogue: &Epilogue<'k, f32>,
    indices: Indices<'k>,
    sums: &[Vec<[Var<'k, S>; 4]>],
    first: [Val<'k, u32>; 2],
    end: [Val<'k, u32>; 2],
) {
    for_each_row(k, epilogue, indices, sums, first, end[0], |place, pairs| {
        for (j, pair) in (0u32..).zip(pairs) {
            k.when((first[1] + 8 * j).lt(end[1]), || {
                let values = place.apply_pair(pair.map(|sum| S::finish(sum.get(), spec.arithmetic)), 8 * j);
                place.store_pair(values, 8 * j);
            });
        }
    });
}

/// What an operand relies on, and whether copies bring it.
#[derive(Clone, Copy)]
struct OperandDecl {
    alignment_bytes: u32,
    copies: bool,
}

verdigris_kir::parameters! {
    /// Parameters of A, or of B read as its transpose.
    struct Operand / OperandArgs of OperandDecl as decl {
        matrix: Read = decl.alignment_bytes,
        line_bytes: u64,
        batch: BatchStridesBytes = (),
        copy_bytes: Option<u32> = decl.copies.then_some(()),
    }
}

/// An operand's K-tiles: a thread's share of chunks, in global and in shared memory.
///
/// A K-tile is made of lines: `extent` lines of 64 bytes where the operand runs along k, one line of `extent` elements for each k
/// otherwise. Chunk `c` of line `l` stands at `c ^ (l / 2 % 4)` of its line in the first form, at `c ^ (l % 8)` in the second.
struct KTiles<'k> {
    k: Kernel<'k>,
    along_k: bool,
    element_bytes: u32,
    /// Line and chunk of the thread's first chunk; the next ones are `line_step` lines further on.
    line: Val<'k, u32>,
    chunk: Val<'k, u32>,
    line_step: u32,
    /// Lines of the K-tile (`along_k`) or bytes of a line (otherwise) that lie inside of the matrix, from the tile's start on.
    inside: Val<'k, u32>,
    /// The thread's first chunk of the next K-tile.
    address: Var<'k, u64>,
    step_bytes: Val<'k, u64>,
    k_tile_bytes: Val<'k, u64>,
    copy_bytes: Option<Val<'k, u32>>,
    /// Elements on their way, chunk by chunk, where they go through registers.
    raw: Vec<Vec<Var<'k, u16>>>,
    shared: Val<'k, u32>,
    pitch_bytes: u32,
    write: Val<'k, u32>,
    chunks: u32,
}

impl<'k> KTiles<'k> {
    fn new(
        name: &'static str,
        (operand, along_k): (Operand<'k>, bool),
        spec: &Spec,
        indices: Indices<'k>,
        first: Val<'k, u32>,
        end: Val<'k, u32>,
    ) -> Self {
        let k = first.kernel();
        let (extent, threads) = (spec.tile.extent(), spec.tile.threads());
        let element_bytes = spec.arithmetic.element_bytes();
        let pitch_bytes = if along_k { K_TILE_BYTES } else { extent * element_bytes };
        let line_chunks = pitch_bytes / CHUNK_BYTES;
        let thread = k.thread();
        let (line, chunk) = (thread >> line_chunks.ilog2(), thread & (line_chunks - 1));
        let line_step = threads / line_chunks;
        let chunks = extent * K_TILE_BYTES / CHUNK_BYTES / threads;
        let matrix = operand.batch.matrix(operand.matrix, indices);
        let chunk_bytes = chunk * CHUNK_BYTES;
        let (start, k_tile_bytes) = if along_k {
            (matrix + (first + line).widen() * operand.line_bytes + chunk_bytes.widen(), k.constant(u64::from(K_TILE_BYTES)))
        } else {
            let along = first.mul_wide(element_bytes) + chunk_bytes.widen();
            (matrix + line.widen() * operand.line_bytes + along, operand.line_bytes * u64::from(spec.arithmetic.depth()))
        };
        let shared = k.shared(name, spec.stages() * extent * K_TILE_BYTES, 128).address();
        let per_chunk = CHUNK_BYTES / element_bytes;
        let raw = if spec.direct { chunks } else { 0 };
        KTiles {
            k,
            along_k,
            element_bytes,
            line,
            chunk,
            line_step,
            inside: if along_k { end - first } else { (end - first) * element_bytes },
            address: k.var(start),
            step_bytes: operand.line_bytes * u64::from(line_step),
            k_tile_bytes,
            copy_bytes: operand.copy_bytes,
            raw: (0..raw).map(|_| (0..per_chunk).map(|_| k.var(0u16)).collect()).collect(),
            shared,
            pitch_bytes,
            write: shared + line * pitch_bytes + ((chunk ^ swizzle(line, along_k)) << 4),
            chunks,
        }
    }

    /// How many bytes of the thread's chunk `i` lie inside of the matrix, in a K-tile that is `depth` elements deep.
    fn source_bytes(&self, i: u32, depth: Val<'k, u32>) -> Val<'k, u32> {
        let k = self.k;
        let line = self.line + self.line_step * i;
        let (lines, bytes) = if self.along_k { (self.inside, depth * self.element_bytes) } else { (depth, self.inside) };
        // The tile may end in this chunk or before it.
        let begin = self.chunk * CHUNK_BYTES;
        let left = k.select(bytes.gt(begin), bytes - begin, 0u32);
        k.select(line.lt(lines), left.min(CHUNK_BYTES), 0u32)
    }

    fn advance(&self) {
        self.address.set(self.address + self.k_tile_bytes);
    }

    /// Starts copying the next K-tile, `depth` elements deep, to the stage at `stage` bytes.
    fn copy(&self, depth: Val<'k, u32>, stage: Val<'k, u32>) {
        let (k, Some(copy_bytes)) = (self.k, self.copy_bytes) else { return };
        let to = self.write + stage;
        let from = self.address.get();
        let with = |bytes: u32| {
            let mut address = from;
            for i in 0..self.chunks {
                let source = self.source_bytes(i, depth);
                for piece in (0..CHUNK_BYTES).step_by(bytes as usize) {
                    let left = if piece == 0 { source } else { k.select(source.gt(piece), source - piece, 0u32) };
                    let offset = i64::from(i * self.line_step * self.pitch_bytes + piece);
                    k.cp_async(to, offset, address, i64::from(piece), bytes as u8, left.min(bytes));
                }
                address = address + self.step_bytes;
            }
        };
        k.when_else(copy_bytes.eq(16), || with(16), || k.when_else(copy_bytes.eq(8), || with(8), || with(4)));
        self.advance();
    }

    /// Starts loading the next K-tile into registers, element by element.
    fn fetch(&self, depth: Val<'k, u32>) {
        let k = self.k;
        let mut address = self.address.get();
        for (i, chunk) in (0u32..).zip(&self.raw) {
            let source = self.source_bytes(i, depth);
            for (element, raw) in (0u32..).zip(chunk) {
                let at = element * self.element_bytes;
                raw.set(0u16);
                k.when(source.gt(at), || raw.set(k.ld_global::<u16>(address, i64::from(at))));
            }
            address = address + self.step_bytes;
        }
        self.advance();
    }

    /// Writes the elements that have arrived to the stage at `stage` bytes.
    fn keep(&self, stage: Val<'k, u32>) {
        let k = self.k;
        let to = self.write + stage;
        for (i, chunk) in (0u32..).zip(&self.raw) {
            let words: Vec<Val<'k, u32>> = chunk.chunks(2).map(|pair| k.join16(pair[0], pair[1])).collect();
            k.st_shared_vector(to, i64::from(i * self.line_step * self.pitch_bytes), &words);
        }
    }
}

/// What a chunk's index is combined with in line `line`.
fn swizzle(line: Val<'_, u32>, along_k: bool) -> Val<'_, u32> {
    if along_k { (line >> 1) & 3u32 } else { line & 7u32 }
}

/// Which operand's fragments are read: 16 rows by 32 bytes of k for A, 16 columns by 32 bytes of k for B, four 8×8 matrices each.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    A,
    B,
}

/// A lane's places in a K-tile: where its row of an 8×8 matrix begins, for `ldmatrix`.
struct Reader<'k> {
    k: Kernel<'k>,
    along_k: bool,
    pitch_bytes: u32,
    /// `along_k`: for each 32 bytes of k. Otherwise: for each block of 16 rows or columns.
    places: Vec<Val<'k, u32>>,
}

impl<'k> Reader<'k> {
    /// For a warp whose part of the tile begins at `first` and has `blocks` blocks.
    fn new(k_tiles: &KTiles<'k>, first: Val<'k, u32>, side: Side, blocks: u32) -> Self {
        let k = k_tiles.k;
        let lane = k.lane();
        let (within, matrix) = (lane & 7u32, lane >> 3);
        // The registers of A hold (rows 0–7, k low), (rows 8–15, k low), (rows 0–7, k high), (rows 8–15, k high); those of B hold both
        // halves of k of columns 0–7, then of columns 8–15.
        let (outer_half, k_half) = match side {
            Side::A => (matrix & 1u32, matrix >> 1),
            Side::B => (matrix >> 1, matrix & 1u32),
        };
        let places = if k_tiles.along_k {
            let line = first + outer_half * 8 + within;
            let place = |step: u32| {
                let chunk = (k_half + 2 * step) ^ swizzle(within, true);
                k_tiles.shared + line * k_tiles.pitch_bytes + (chunk << 4)
            };
            (0..K_TILE_BYTES / 32).map(place).collect()
        } else {
            let line = k_half * 8 + within;
            let place = |block: u32| {
                let chunk = ((first >> 3) + outer_half + 2 * block) ^ swizzle(within, false);
                k_tiles.shared + line * k_tiles.pitch_bytes + (chunk << 4)
            };
            (0..blocks).map(place).collect()
        };
        Reader { k, along_k: k_tiles.along_k, pitch_bytes: k_tiles.pitch_bytes, places }
    }

    /// The four registers of block `block` at 32 bytes `step` of k, from the stage at `stage` bytes.
    fn load(&self, stage: Val<'k, u32>, step: u32, block: u32) -> Vec<Val<'k, u32>> {
        let (place, offset) = if self.along_k {
            (self.places[step as usize], block * 16 * self.pitch_bytes)
        } else {
            // 32 bytes of k are 16 lines of 16-bit elements.
            (self.places[block as usize], step * 16 * self.pitch_bytes)
        };
        self.k.ldmatrix(4, !self.along_k, place + stage, i64::from(offset))
    }
}
