//! `gemm.simt`: matrix multiplication without tensor cores, for everything.
//!
//! It takes every valid GEMM problem: all operand types and precision policies, any strides, any extents from 0 on, any alignment that an
//! element needs. So the family always has an answer, and f32 and f64 have one that multiplies and adds as IEEE says.
//!
//! **Method.** A CTA of 256 threads computes a tile of D. K-tiles of A and B, 16 deep, go from global memory through registers, where they
//! become the type that is computed in, to shared memory with k outermost; the next K-tile is on its way while one is multiplied. Each
//! thread holds an outer product of 8×8 (4×4 in small tiles and f64) and reads its operands 16 bytes at a time. Which index runs fastest
//! over the threads of a load is an argument: both orders are coalesced, and strided operands are taken by the same code. Products of few
//! columns (or few rows, transposed) have a kernel of their own, which reads A without a detour.
//!
//! **When it wins.** f32 and f64 under `ieee`; everything that no other engine takes.
//!
//! **Numbers.** Products and sums are fused multiply-adds in order of k, so results repeat bit for bit. 16-bit and fp8 operands widen
//! exactly; policies that allow less (tf32, f16 sums, fp8 sums) get f32 sums, with operands or the finished sum rounded as the policy says.

mod thin;

use serde::{Deserialize, Serialize};
use verdigris_graph::{GemmProblem, Matrix, Precision, Problem, Scale};
use verdigris_kir::face::{Header, Kernel, Val, Var, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::Read;
use verdigris_kir::program::{KernelRef, Program};
use verdigris_tensor::DType;

use super::factors::{Factors, FactorsArgs};
use super::{MOST_PARTS, Tiles, TilesArgs, part_count, tiled};
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Loop, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::compute::{self, Compute};
use crate::fuse::element::{Arithmetic, Element, RawVar};
use crate::fuse::epilogue::{Epilogue, EpilogueArgs, EpilogueSpec, OperandSpec};
use crate::layout::batch::{BatchIndexArgs, BatchStridesBytes, Indices};
use crate::layout::transposed::transposed;

/// Threads of a CTA: 16 by 16.
const THREADS: u32 = 256;
/// Depth of a K-tile of the tiled kernel.
const DEPTH: u32 = 16;
/// The most columns for which the kernel for few of them is offered.
const THIN_COLUMNS: u64 = 16;

/// The engine: an accepted problem.
#[derive(Clone, Debug)]
pub(super) struct Simt {
    problem: GemmProblem,
    spec: Spec,
    arch: Arch,
}

/// Whether D is one part: the factors of blocks are found by rows and columns of D, which count from the beginning of a part.
fn is_one_launch(p: &GemmProblem, tile: Tile) -> bool {
    parts(p, tile) <= 1
}

/// How many parts of D there are, for each batch of launches.
fn parts(p: &GemmProblem, tile: Tile) -> u64 {
    part_count(p.m, p.n, [tile.rows(), tile.columns()])
}

impl Algorithm for Simt {
    const ID: EngineId = EngineId { name: "gemm.simt", number: 100 };
    const VERSION: u32 = 1;
    type Config = Tile;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let problem = super::product(Self::ID, problem)?;
        // Few rows are few columns of the transposed problem.
        let problem = match problem.m.min(problem.n) <= THIN_COLUMNS {
            true if problem.m < problem.n => transposed(problem),
            true => problem.clone(),
            false => super::along_rows_of_d(problem),
        };
        let blocks = [&problem.scale_a, &problem.scale_b].map(|scale| matches!(scale, Some(Scale::Block { .. })));
        Self::ID.require(problem.k < 1 << 35, Reason::Extent, format_args!("k = {}, taken below 2^35", problem.k))?;
        if blocks != [false; 2] {
            let largest = problem.m.max(problem.n).max(problem.k);
            Self::ID.require(largest < 1 << 31, Reason::Extent, format_args!("extent {largest} with block scales, taken below 2^31"))?;
            Self::ID.require(
                Tile::of(Arithmetic::of(problem.precision)).iter().any(|&tile| is_one_launch(&problem, tile)),
                Reason::Extent,
                format_args!("{} by {} with block scales: more tiles than one launch has", problem.m, problem.n),
            )?;
        }
        // What `configs` offers for every problem.
        let fewest =
            Tile::of(Arithmetic::of(problem.precision)).iter().filter(|&&tile| tile != Tile::Thin).map(|&tile| parts(&problem, tile)).min();
        Self::ID.require(
            fewest.is_some_and(|fewest| fewest <= MOST_PARTS),
            Reason::Extent,
            format_args!("{} by {}: {} launches, taken are {MOST_PARTS}", problem.m, problem.n, fewest.unwrap_or(0)),
        )?;
        let epilogue = EpilogueSpec { pairs: false, ..EpilogueSpec::of(&problem) };
        // The plain ones make a catalog, which one class of strides keeps short; a user's chain is compiled for its own.
        let epilogue = if epilogue.is_plain() { epilogue.strided() } else { epilogue };
        let spec = Spec {
            a: problem.a.dtype,
            b: problem.b.dtype,
            arithmetic: Arithmetic::of(problem.precision),
            tile: Tile::Small,
            block_scales: blocks,
            epilogue,
        };
        let target = spec.target();
        Self::ID.require(arch.runs(target), Reason::Target, format_args!("{} needs {}", problem.a.dtype, target.ptx()))?;
        Ok(Simt { problem, spec, arch: arch.clone() })
    }

    fn configs(&self) -> Vec<Tile> {
        let has_blocks = self.spec.block_scales != [false; 2];
        let is_offered = |tile: Tile| match tile {
            Tile::Thin => self.problem.n <= THIN_COLUMNS && !has_blocks,
            _ => !has_blocks || is_one_launch(&self.problem, tile),
        };
        let is_bounded = |tile: Tile| parts(&self.problem, tile) <= MOST_PARTS;
        Tile::of(self.spec.arithmetic).iter().copied().filter(|&tile| is_offered(tile) && is_bounded(tile)).collect()
    }

    fn knobs(tile: &Tile) -> Knobs {
        Knobs::new([("tile", tile.columns())])
    }

    fn notes(&self, _: &Tile) -> Notes {
        let accumulator = match self.spec.arithmetic {
            Arithmetic::F64 => DType::F64,
            Arithmetic::I32 => DType::I32,
            _ => DType::F32,
        };
        Notes { down_convert: (self.spec.arithmetic == Arithmetic::Tf32).then_some(DType::Tf32), ..Notes::of(accumulator) }
    }

    fn work(&self, &tile: &Tile) -> Work {
        let p = &self.problem;
        let (rows, columns, depth) = (f64::from(tile.rows()), f64::from(tile.columns()), f64::from(tile.depth()));
        let tiles = (p.m as f64 / rows).ceil() * (p.n as f64 / columns).ceil() * p.batch_count() as f64;
        let double = self.spec.arithmetic == Arithmetic::F64;
        // Threads of 256, and the registers that their sums take.
        let ctas = match (tile, double) {
            (Tile::Large, _) => 2,
            (Tile::Small, true) => 3,
            (Tile::Small, false) => 4,
            (Tile::Tiny | Tile::Thin, _) => 6,
        };
        let loads = (rows + columns) * depth;
        let contiguous = |matrix: &Matrix| matrix.row_stride.min(matrix.column_stride) == 1;
        let is_wide = contiguous(&p.a) && contiguous(&p.b);
        let main = Loop {
            tile: [rows, columns],
            fma_cycles: rows * columns * depth / if double { 64.0 } else { 128.0 },
            // Each thread reads what its own results need.
            shared_bytes: 4.0 * depth * rows * columns / if tile == Tile::Large { 4.0 } else { 2.0 },
            loaded_bytes: loads * p.a.dtype.bytes() as f64,
            // Addresses and guards of each element.
            issued: loads / 32.0 * if tile == Tile::Thin { 12.0 } else { 4.0 },
            exposed: if tile == Tile::Thin { 0.25 } else { 0.6 },
            copy_bytes: if is_wide { p.a.dtype.bytes() as f64 } else { 1.0 },
            threads: 256.0,
            stages: 2.0,
            ..Loop::of_gemm(if tile == Tile::Thin { "gemm.simt thin" } else { Self::ID.name }, p)
        };
        Work::of(main.in_waves(tiles, f64::from(self.arch.sm_count * ctas), (p.k as f64 / depth).ceil()))
    }

    fn lower(&self, &tile: &Tile) -> Result<Program, Refusal> {
        let spec = Spec { tile, ..self.spec.clone() };
        let p = &self.problem;
        // B is loaded as its transpose, n by k.
        let b = p.b.transposed();
        Ok(tiled(p, &spec.clone().kernel(), [tile.rows(), tile.columns()], tile.depth(), |tiles, chunk, part| {
            let operand = |matrix: &Matrix, first: u64, scale: &Option<Scale>| {
                let bytes = matrix.dtype.bytes() as u64;
                OperandArgs {
                    matrix: chunk.address(matrix, first, 0),
                    outer_stride: matrix.row_stride * bytes,
                    k_stride: matrix.column_stride * bytes,
                    // Threads run along the smaller stride.
                    along_k: u32::from(matrix.column_stride <= matrix.row_stride),
                    batch: chunk.strides_bytes(matrix),
                    factors: FactorsArgs::of(scale.as_ref(), chunk),
                }
            };
            let arguments = ParamsArgs {
                tiles,
                batch: chunk.index(),
                a: operand(&p.a, part.first_row, &p.scale_a),
                b: operand(&b, part.first_column, &p.scale_b),
                epilogue: spec.epilogue.arguments(p, chunk, part.first_row, part.first_column),
            };
            arguments.bound(&spec)
        }))
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let plain = [
            (DType::F32, Precision::Ieee, DType::F32),
            (DType::F32, Precision::Tf32, DType::F32),
            (DType::F64, Precision::F64, DType::F64),
            (DType::F16, Precision::Ieee, DType::F16),
            (DType::F16, Precision::F16, DType::F16),
            (DType::Bf16, Precision::Ieee, DType::Bf16),
            (DType::I8, Precision::I32, DType::I32),
            (DType::E4m3, Precision::Ieee, DType::Bf16),
        ];
        let mut kernels = Vec::new();
        for (operands, precision, d) in plain {
            let arithmetic = Arithmetic::of(precision);
            for &tile in Tile::of(arithmetic) {
                let epilogue = EpilogueSpec {
                    double: precision == Precision::F64,
                    exact: precision == Precision::I32,
                    ..EpilogueSpec::plain(OperandSpec::strided(d))
                };
                kernels.push(Spec { a: operands, b: operands, arithmetic, tile, block_scales: [false; 2], epilogue });
            }
        }
        kernels.into_iter().filter(|spec| spec.target() <= target).map(Spec::kernel).collect()
    }
}

/// The tile of a CTA.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Tile {
    /// 128×128.
    Large,
    /// 64×64.
    Small,
    /// 32×32.
    Tiny,
    /// 32×4, for few columns.
    Thin,
}

impl Tile {
    /// The tiles that pay for an arithmetic; f64 has no registers for the largest.
    fn of(arithmetic: Arithmetic) -> &'static [Tile] {
        let all = &[Tile::Large, Tile::Small, Tile::Tiny, Tile::Thin];
        if arithmetic == Arithmetic::F64 { &all[1..] } else { all }
    }

    const fn rows(self) -> u32 {
        match self {
            Tile::Large => 128,
            Tile::Small => 64,
            Tile::Tiny | Tile::Thin => 32,
        }
    }

    /// Columns; also the value of the knob.
    const fn columns(self) -> u32 {
        match self {
            Tile::Thin => 4,
            square => square.rows(),
        }
    }

    /// Depth of a K-tile.
    const fn depth(self) -> u32 {
        match self {
            Tile::Thin => 32,
            Tile::Large | Tile::Small | Tile::Tiny => DEPTH,
        }
    }
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct Spec {
    a: DType,
    b: DType,
    arithmetic: Arithmetic,
    tile: Tile,
    /// A and B carry a factor for each block.
    block_scales: [bool; 2],
    epilogue: EpilogueSpec,
}

impl Spec {
    fn name(&self) -> String {
        let scales = match self.block_scales {
            [false, false] => "",
            [true, false] => "_blocka",
            [false, true] => "_blockb",
            [true, true] => "_blockab",
        };
        let (rows, columns, depth) = (self.tile.rows(), self.tile.columns(), self.tile.depth());
        let (a, b, arithmetic) = (self.a, self.b, self.arithmetic.name());
        format!("gemm_simt_{a}_{b}_{arithmetic}_{rows}x{columns}x{depth}{scales}_{}", self.epilogue.name())
    }

    fn target(&self) -> Target {
        compute::target_of(self.a).max(compute::target_of(self.b)).max(self.epilogue.target())
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let two = match self.tile {
            Tile::Large => true,
            Tile::Thin => self.arithmetic != Arithmetic::F64,
            Tile::Small | Tile::Tiny => false,
        };
        // A user's chain may need the registers of the second CTA.
        let min_ctas = if two && self.epilogue.is_plain() { 2 } else { 1 };
        let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas, cluster: 1 };
        build(header, |k| match self.arithmetic {
            Arithmetic::F32 | Arithmetic::Tf32 => self.body::<f32, f32>(k, |sum| sum),
            Arithmetic::F16 => self.body::<f32, f32>(k, |sum| compute::round_to(sum.kernel(), DType::F16, sum)),
            Arithmetic::F64 => self.body::<f64, f64>(k, |sum| sum),
            Arithmetic::I32 => self.body::<i32, f32>(k, |sum| sum.to_f32()),
        })
    }

    fn body<'k, S: Element, T: Compute>(&self, k: Kernel<'k>, finish: impl Fn(Val<'k, S>) -> Val<'k, T>) {
        if self.tile == Tile::Thin { thin::gemm::<S, T>(k, self, finish) } else { gemm::<S, T>(k, self, finish) }
    }
}

// ---- the kernel --------------------------------------------------------------------------------------------------------

verdigris_kir::parameters! {
    /// Parameters of both kernels.
    struct Params / ParamsArgs of Spec as spec {
        tiles: TilesArgs = (),
        batch: BatchIndexArgs = (),
        a: OperandArgs = OperandDecl { dtype: spec.a, scaled: spec.block_scales[0] },
        b: OperandArgs = OperandDecl { dtype: spec.b, scaled: spec.block_scales[1] },
        epilogue: EpilogueArgs = spec.epilogue.over_matrices(),
    }
}

/// An operand's elements, and whether its blocks have factors.
#[derive(Clone, Copy)]
struct OperandDecl {
    dtype: DType,
    scaled: bool,
}

verdigris_kir::parameters! {
    /// Parameters of A, or of B read as its transpose: an outer index (m or n) and k; strides in bytes.
    struct Operand / OperandArgs of OperandDecl as decl {
        matrix: Read = decl.dtype.bytes() as u32,
        outer_stride: u64,
        k_stride: u64,
        /// Threads run along k.
        along_k: u32,
        batch: BatchStridesBytes = (),
        factors: Option<FactorsArgs> = decl.scaled.then_some(()),
    }
}

/// `S` is what is multiplied and summed, `T` what the epilogue computes in.
fn gemm<'k, S: Element, T: Compute>(k: Kernel<'k>, spec: &Spec, finish: impl Fn(Val<'k, S>) -> Val<'k, T>) {
    let Params { tiles, batch, a, b, epilogue } = Params::declare(k, spec);
    let Tiles { rows, columns, column_tiles, k_tiles, last_depth } = tiles;
    let epilogue = epilogue.of::<T>();

    let extent = spec.tile.rows();
    let (row_tile, column_tile) = column_tiles.split(k.cta());
    let indices = batch.of_cta();
    let a = KTile::<S>::new("a_slabs", (a, spec.a), spec, indices, row_tile * extent, rows);
    let b = KTile::<S>::new("b_slabs", (b, spec.b), spec, indices, column_tile * extent, columns);

    // Thread (x, y) holds groups of `width` neighbouring rows and columns, 16 · width apart: 16 bytes each, so that the lanes of a warp
    // read neighbouring 16 bytes of shared memory.
    let thread = k.thread();
    let (x, y) = (thread & 15u32, thread >> 4);
    let width = S::GROUP.min(extent / 16);
    let groups = extent / (16 * width);
    let mine = |i: u32| i / width * (16 * width) + i % width;
    let per_thread = width * groups;
    let sums: Vec<Vec<Var<'k, S>>> = (0..per_thread).map(|_| (0..per_thread).map(|_| k.var(k.constant(S::ZERO))).collect()).collect();
    let a_reads = a.shared + y * (width * S::TY.bytes());
    let b_reads = b.shared + x * (width * S::TY.bytes());

    let depth_of = |k_tile: Val<'k, u32>| k.select((k_tile + 1).eq(k_tiles), last_depth, DEPTH);
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
        let turn = k_tile & 1u32;
        let a_k_tile = a_reads + turn * a.bytes;
        let b_k_tile = b_reads + turn * b.bytes;
        for step in 0..DEPTH {
            let column: Vec<Val<'k, S>> = read::<S>(k, a_k_tile, step * a.pitch_bytes, width, groups);
            let row: Vec<Val<'k, S>> = read::<S>(k, b_k_tile, step * b.pitch_bytes, width, groups);
            for (line, &x) in sums.iter().zip(&column) {
                for (sum, &y) in line.iter().zip(&row) {
                    sum.set(k.fma(x, y, *sum));
                }
            }
        }
        k.when(next.lt(k_tiles), || {
            a.keep(next & 1u32);
            b.keep(next & 1u32);
        });
        k.bar_sync();
    });

    store(
        k,
        spec,
        &epilogue,
        indices,
        &sums,
        Corner { row: row_tile * extent + y * width, column: column_tile * extent + x * width, rows, columns },
        mine,
        finish,
    );
}

/// Where a thread's first element lies in D, and where D ends.
#[derive(Clone, Copy)]
struct Corner<'k> {
    row: Val<'k, u32>,
    column: Val<'k, u32>,
    rows: Val<'k, u32>,
    columns: Val<'k, u32>,
}

#[allow(clippy::too_many_arguments, reason = "the tail of one kernel, apart for its length alone")]
fn store<'k, S: Element, T: Compute>(
    k: Kernel<'k>,
    spec: &Spec,
    epilogue: &Epilogue<'k, T>,
    indices: Indices<'k>,
    sums: &[Vec<Var<'k, S>>],
    corner: Corner<'k>,
    mine: impl Fn(u32) -> u32,
    finish: impl Fn(Val<'k, S>) -> Val<'k, T>,
) {
    let matrix = epilogue.begin(indices);
    for (i, line) in sums.iter().enumerate() {
        let row = corner.row + mine(i as u32);
        k.when(row.lt(corner.rows), || {
            let place = matrix.at(row, corner.column);
            for (j, &sum) in line.iter().enumerate() {
                let right = mine(j as u32);
                k.when((corner.column + right).lt(corner.columns), || {
                    if spec.epilogue.exact {
                        place.store_exact(S::to_i32(sum.get()), right);
                    } else {
                        place.store(place.apply(finish(sum.get()), right), right);
                    }
                });
            }
        });
    }
}

/// A thread's elements of one k, group by group.
fn read<'k, S: Element>(k: Kernel<'k>, k_tile: Val<'k, u32>, offset_bytes: u32, width: u32, groups: u32) -> Vec<Val<'k, S>> {
    (0..groups)
        .flat_map(|group| {
            let offset = i64::from(offset_bytes + group * 16 * width * S::TY.bytes());
            if width == 1 { vec![k.ld_shared(k_tile, offset)] } else { k.ld_shared_vector(k_tile, offset, width as u8) }
        })
        .collect()
}

/// K-tiles of an operand: a thread's share in global memory, in registers, and in shared memory.
struct KTile<'k, S> {
    k: Kernel<'k>,
    dtype: DType,
    round_tf32: bool,
    /// The thread's first element: its place in the K-tile.
    outer: Val<'k, u32>,
    depth: Val<'k, u32>,
    /// From one element of the thread to the next, in the K-tile.
    outer_step: Val<'k, u32>,
    depth_step: Val<'k, u32>,
    /// Outer extent of the tile that lies inside of the matrix.
    outer_end: Val<'k, u32>,
    /// The thread's first element in the next K-tile to be fetched, and the way from one to the next.
    address: Var<'k, u64>,
    step_bytes: Val<'k, u64>,
    k_tile_bytes: Val<'k, u64>,
    raw: Vec<RawVar<'k>>,
    factors: Option<FactorKTile<'k>>,
    /// Two K-tiles, k outermost.
    shared: Val<'k, u32>,
    bytes: u32,
    pitch_bytes: u32,
    write: Val<'k, u32>,
    write_step: Val<'k, u32>,
    element: std::marker::PhantomData<S>,
}

/// Factors of the elements on their way.
struct FactorKTile<'k> {
    factors: Factors<'k>,
    matrix: Val<'k, u64>,
    first_outer: Val<'k, u32>,
    first_k: Var<'k, u32>,
    values: Vec<Var<'k, f32>>,
}

impl<'k, S: Element> KTile<'k, S> {
    fn new(
        name: &'static str,
        (operand, dtype): (Operand<'k>, DType),
        spec: &Spec,
        indices: Indices<'k>,
        first: Val<'k, u32>,
        end: Val<'k, u32>,
    ) -> Self {
        let (k, extent) = (first.kernel(), spec.tile.rows());
        let thread = k.thread();
        let along_k = operand.along_k.ne(0);
        let pick = |along_k_value: Val<'k, u32>, other: Val<'k, u32>| k.select(along_k, along_k_value, other);
        let outer = pick(thread >> DEPTH.ilog2(), thread & (extent - 1));
        let depth = pick(thread & (DEPTH - 1), thread >> extent.ilog2());
        let outer_step = pick(k.constant(THREADS / DEPTH), k.constant(0));
        let depth_step = pick(k.constant(0), k.constant(THREADS / extent));
        let matrix = operand.batch.matrix(operand.matrix, indices);
        let start = matrix + (first + outer).widen() * operand.outer_stride + depth.widen() * operand.k_stride;
        let count = extent * DEPTH / THREADS;
        // 16 bytes beyond a row of the K-tile keep the two orders of writing off each other's banks.
        let pitch_bytes = extent * S::TY.bytes() + 16;
        let shared = k.shared(name, 2 * DEPTH * pitch_bytes, 16).address();
        KTile {
            k,
            dtype,
            round_tf32: spec.arithmetic == Arithmetic::Tf32,
            outer,
            depth,
            outer_step,
            depth_step,
            outer_end: end - first,
            address: k.var(start),
            step_bytes: outer_step.widen() * operand.outer_stride + depth_step.widen() * operand.k_stride,
            k_tile_bytes: operand.k_stride * u64::from(DEPTH),
            raw: (0..count).map(|_| RawVar::new(k, dtype)).collect(),
            factors: operand.factors.map(|factors| FactorKTile {
                matrix: factors.matrix(indices),
                first_outer: first,
                first_k: k.var(0u32),
                values: (0..count).map(|_| k.var(0.0f32)).collect(),
                factors,
            }),
            shared,
            bytes: DEPTH * pitch_bytes,
            pitch_bytes,
            write: shared + depth * pitch_bytes + outer * S::TY.bytes(),
            write_step: depth_step * pitch_bytes + outer_step * S::TY.bytes(),
            element: std::marker::PhantomData,
        }
    }

    /// Starts loading the thread's elements of the next K-tile, `depth` deep; what lies outside of the matrix is 0.
    fn fetch(&self, depth: Val<'k, u32>) {
        let k = self.k;
        let mut address = self.address.get();
        for (i, raw) in (0u32..).zip(&self.raw) {
            let outer = self.outer + self.outer_step * i;
            let along_k = self.depth + self.depth_step * i;
            raw.clear();
            k.when(outer.lt(self.outer_end) & along_k.lt(depth), || {
                raw.load(k, self.dtype, address);
                if let Some(k_tile) = &self.factors {
                    let outer = k_tile.factors.outer_bytes(k_tile.first_outer + outer);
                    let factor = k_tile.matrix + outer + k_tile.factors.k_bytes(k_tile.first_k + along_k);
                    k_tile.values[i as usize].set(k.ld_global::<f32>(factor, 0));
                }
            });
            address = address + self.step_bytes;
        }
        self.address.set(self.address + self.k_tile_bytes);
        if let Some(k_tile) = &self.factors {
            k_tile.first_k.set(k_tile.first_k + DEPTH);
        }
    }

    /// Writes the elements that have arrived to half `turn` of shared memory.
    fn keep(&self, turn: Val<'k, u32>) {
        let k = self.k;
        let base = self.write + turn * self.bytes;
        for (i, &raw) in (0u32..).zip(&self.raw) {
            let mut value = S::decode(k, self.dtype, raw);
            if self.round_tf32 {
                value = S::rounded_to_tf32(value);
            }
            if let Some(k_tile) = &self.factors {
                value = S::scaled(value, k_tile.values[i as usize]);
            }
            k.st_shared(base + self.write_step * i, 0, value);
        }
    }
}
