//! `gemm.wgmma`: matrix products on Hopper's tensor cores, fed by TMA.
//!
//! **What.** `D = alpha · A · B` for 16-bit, tf32, 8-bit float and 8-bit integer operands, batched, all transposes.
//! **When it wins.** On compute capability 9.0. Operands whose rows are not 16-byte aligned, or that the tensor cores do not take in their
//! order, are copied into scratch first.
//! **Numbers.** Products are exact; sums are kept in f32 by the tensor core, in an order fixed by the spec and the split, so repeats agree
//! bit for bit. fp8 sums keep about 14 bits unless promoted every 128 of depth.
//! **Source:** PTX ISA 9.0 (`wgmma`, `cp.async.bulk.tensor`); Osama et al., "Stream-K", PPoPP 2023, for the split of depth.

mod epilogue;
mod in_flight;
mod kernel;
mod operands;
mod ping_pong;
mod promote;
mod share;
mod spec;
mod sums;

use kernel::ParamsArgs;
use promote::Scaled;
use spec::{Axis, Out, Shared, Spec, Split};
use verdigris_graph::ops::matmul::Precision;
use verdigris_graph::problem::Order;
use verdigris_graph::{GemmProblem, Matrix, Problem, Scale};
use verdigris_kir::ir::{MapDecl, Target};
use verdigris_kir::program::{Address, KernelRef, L2Promotion, Launch, MapSpec, Program};
use verdigris_kir::tile::operand::ROW_BYTES;
use verdigris_kir::tile::schedule::{RasterArgs, ScheduleArgs};
use verdigris_tensor::DType;

use super::factors::FactorsArgs;
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Join, Loop, Work, wgmma_cycles};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::epilogue::{EpilogueSpec, OperandSpec, Walk};
use crate::layout::batch::Chunk;
use crate::layout::repack::{self, Repack};
use crate::layout::transposed::transposed;
use crate::split_k::fixup::FixupArgs;
use crate::split_k::reduction::{self, PartGrid, ReductionSpec};
use crate::store::{StoreArgs, is_mappable};

/// One row of the table of tiles: the part of a spec that is chosen, not given.
#[derive(Clone, Copy, Debug)]
struct Shape {
    tile_m: u32,
    tile_n: u32,
    consumers: u32,
    cluster: u32,
    shared: Shared,
    /// The results that it is offered for where D's lines run along the tile's rows, and where they run along its columns.
    along_rows: u32,
    along_columns: u32,
    /// Ping-pong: the two consumers alternate in whole tiles.
    ping_pong: bool,
    /// CTAs of a cluster that split the depth of each tile; 1 for none.
    cluster_split: u32,
    /// Its kernel can split the depth of tiles over the grid. One that can costs a whole product 1 to 3 % of a short run.
    splits: bool,
    /// There is a kernel for it whose parts are added up by a launch of their own.
    adds_later: bool,
}

/// Results of two bytes, written by TMA.
const HALVES: u32 = 1;
/// Results of four bytes, written by TMA.
const WORDS: u32 = 2;
/// Results of either width whose lines begin anywhere.
const LINES: u32 = 4;
/// Results of any width and strides, element by element.
const ELEMENTS: u32 = 8;

const fn shape(tile_m: u32, tile_n: u32, consumers: u32, cluster: u32, shared: Shared, along_rows: u32, along_columns: u32) -> Shape {
    Shape {
        tile_m,
        tile_n,
        consumers,
        cluster,
        shared,
        along_rows,
        along_columns,
        ping_pong: false,
        cluster_split: 1,
        splits: false,
        adds_later: false,
    }
}

const fn splitting(shape: Shape) -> Shape {
    Shape { splits: true, ..shape }
}

/// Also for few tiles of much depth.
const fn in_parts(shape: Shape) -> Shape {
    Shape { adds_later: true, ..shape }
}

/// Ping-pong of two consumers; CTAs of a cluster share B.
const fn ping_pong(tile_m: u32, tile_n: u32, cluster: u32, along_rows: u32, along_columns: u32) -> Shape {
    Shape { ping_pong: true, ..shape(tile_m, tile_n, 2, cluster, Shared::B, along_rows, along_columns) }
}

/// Clusters of `ctas` that split the depth of each tile; each CTA writes its share of the columns, 16 or more.
const fn deep(tile_m: u32, tile_n: u32, consumers: u32, ctas: u32, along_rows: u32, along_columns: u32) -> Shape {
    Shape { cluster_split: ctas, ..shape(tile_m, tile_n, consumers, 1, Shared::B, along_rows, along_columns) }
}

/// The tiles that the engine offers, by number; numbers are never reused, for plan caches hold them. What each is offered for was chosen by
/// a sweep over 87 problems (`bench/record/h200/2026-11-21-gemm-sweep.jsonl`): with the fourteen configs for halves, the best is 0.2 %
/// behind the best of all in the geometric mean, 6 % at worst. A row that serves nothing was tried and never won enough to be worth its
/// kernels: ping-pong wins by 1 to 2 % on products of short depth and many tiles (7000x2048x2048). Clusters that split the depth win on
/// few rows: they halve the work that the last wave is made of. Splits win where the depth is very long and tiles are few, whatever the
/// tile: two shapes have them. Where the parts of a tile become many, a launch of its own adds them up; of these kernels there is one for
/// all stores. Clusters that share B win there too (256×1024×50176: 44 µs against 49), if each reads one operand alone; clusters of four
/// lose (79 µs).
const SHAPES: &[Shape] = &[
    shape(128, 256, 2, 2, Shared::B, HALVES | WORDS, 0),
    shape(128, 256, 2, 2, Shared::A, 0, 0),
    in_parts(shape(128, 256, 2, 1, Shared::B, HALVES | WORDS | LINES, HALVES)),
    shape(256, 128, 2, 2, Shared::B, 0, 0),
    shape(256, 128, 2, 2, Shared::A, 0, 0),
    shape(256, 128, 2, 1, Shared::B, 0, 0),
    shape(128, 192, 2, 2, Shared::B, 0, 0),
    shape(128, 192, 2, 1, Shared::B, WORDS, HALVES),
    in_parts(shape(128, 128, 2, 2, Shared::B, 0, 0)),
    in_parts(splitting(shape(128, 128, 2, 1, Shared::B, HALVES | WORDS | LINES | ELEMENTS, 0))),
    shape(128, 64, 2, 1, Shared::B, WORDS | LINES, 0),
    in_parts(shape(64, 256, 1, 1, Shared::B, 0, 0)),
    shape(64, 128, 1, 1, Shared::B, WORDS, HALVES),
    in_parts(shape(64, 64, 1, 1, Shared::B, HALVES | WORDS | LINES, 0)),
    shape(64, 32, 1, 1, Shared::B, WORDS, HALVES | LINES),
    shape(64, 16, 1, 1, Shared::B, 0, HALVES | LINES),
    in_parts(splitting(shape(128, 32, 2, 1, Shared::B, WORDS, HALVES | LINES))),
    shape(128, 16, 2, 1, Shared::B, 0, 0),
    shape(128, 160, 2, 1, Shared::B, HALVES | WORDS, 0),
    shape(128, 96, 2, 1, Shared::B, WORDS, HALVES),
    shape(128, 224, 2, 1, Shared::B, 0, HALVES),
    shape(256, 96, 2, 1, Shared::B, 0, 0),
    shape(192, 128, 3, 1, Shared::B, 0, 0),
    ping_pong(64, 256, 2, 0, 0),
    ping_pong(128, 128, 1, HALVES, 0),
    ping_pong(128, 128, 2, 0, 0),
    deep(64, 32, 1, 2, 0, HALVES),
    deep(64, 64, 1, 2, 0, HALVES),
    deep(64, 64, 1, 4, 0, 0),
    // Leaves room for two stages only.
    deep(128, 64, 2, 4, 0, 0),
    deep(128, 32, 2, 2, 0, 0),
];

/// The problem as the kernel sees it: with A and B swapped (swap-AB) or not, with the extents that fit the kernel's arguments.
#[derive(Clone, Debug)]
struct View {
    problem: GemmProblem,
    m: u32,
    n: u32,
    k: u32,
    batch: u32,
    swap_ab: bool,
}

impl View {
    fn new(problem: GemmProblem, swap_ab: bool) -> Option<View> {
        let narrow = |extent: u64| u32::try_from(extent).ok().filter(|&extent| extent < 1 << 31);
        let (m, n) = (narrow(problem.m)?, narrow(problem.n)?);
        let (k, batch) = (narrow(problem.k)?, narrow(problem.batch_count())?);
        Some(View { problem, m, n, k, batch, swap_ab })
    }

    /// A as rows by depth, and B as columns by depth.
    fn operands(&self) -> [Matrix; 2] {
        [self.problem.a.clone(), self.problem.b.transposed()]
    }

    fn axis(matrix: &Matrix) -> Axis {
        if matrix.order() == Order::RowMajor { Axis::Depth } else { Axis::Rows }
    }

    /// Factors of the operands' blocks in tiles of `tile_n` columns; `None` where such a tile has columns of several blocks.
    fn scaled(&self, tile_n: u32) -> Option<[Scaled; 2]> {
        let a = if matches!(self.problem.scale_a, Some(Scale::Block { .. })) { Scaled::Lines } else { Scaled::No };
        let b = match &self.problem.scale_b {
            Some(Scale::Block { outer: 1, .. }) => Scaled::Lines,
            Some(Scale::Block { outer, .. }) => {
                (outer.is_multiple_of(u64::from(tile_n)) || *outer >= self.problem.n).then_some(Scaled::Tile)?
            }
            _ => Scaled::No,
        };
        Some([a, b])
    }

    /// How results reach D, and whether its contiguous lines are columns of the view: by TMA where they begin at multiples of 16
    /// bytes, through shared memory line by line where they begin elsewhere, by elements where there are none.
    fn out(&self) -> (Out, bool) {
        let d = &self.problem.d;
        let bytes = d.dtype.bytes() as u64;
        let transposed = d.order() == Order::ColumnMajor;
        let aligned = is_mappable(d, if transposed { self.problem.m } else { self.problem.n });
        let out = match (d.order(), bytes) {
            (Order::Strided, _) => Out::Direct,
            (_, 2) if aligned => Out::Tma,
            (Order::RowMajor, 4) if aligned => Out::Tma,
            (_, 2 | 4) => Out::Rows,
            _ => Out::Direct,
        };
        (out, transposed && out != Out::Direct)
    }
}

/// The engine: an accepted problem.
pub(super) struct Wgmma {
    arch: Arch,
    promote: bool,
    /// The copies to be made of A and of B. Both views see the operands as they are behind them.
    repacks: [Option<Repack>; 2],
    unswapped: View,
    swap_ab: View,
}

/// A config: its knobs, and what follows from them.
#[derive(Clone)]
pub(super) struct Config {
    chosen: ConfigKnobs,
    spec: Spec,
    schedule: ScheduleArgs,
    /// CTAs, or clusters of them.
    grid: u32,
    /// The tiles and their parts, where these are added up later.
    parts: Option<PartGrid>,
}

impl Algorithm for Wgmma {
    const ID: EngineId = EngineId { name: "gemm.wgmma", number: 103 };
    const VERSION: u32 = 1;
    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let gemm = super::product(Self::ID, problem)?;
        Self::ID.require(
            arch.runs(Target::Sm90a),
            Reason::Target,
            format_args!("compute capability {:?}, needs (9, 0)", arch.capability),
        )?;
        Self::ID.require(
            !gemm.is_empty() && gemm.k > 0,
            Reason::Extent,
            format_args!("m, n, k = {}, {}, {}; none may be 0", gemm.m, gemm.n, gemm.k),
        )?;
        Self::ID.require(gemm.batch.len() <= 1, Reason::Batch, format_args!("{} batch dims, takes at most 1", gemm.batch.len()))?;
        let mut scaled = false;
        for (name, scale, extent) in [("A", &gemm.scale_a, gemm.m), ("B", &gemm.scale_b, gemm.n)] {
            let Some(Scale::Block { outer, k, .. }) = scale else { continue };
            scaled = true;
            // Along k a step of depth must not cross blocks; across, nor may the columns of a tile.
            let fits = k.is_multiple_of(128) || *k >= gemm.k;
            Self::ID.require(fits, Reason::Scale, format_args!("blocks of {name} of {k} along k, takes multiples of 128"))?;
            let fits = name == "A" || *outer == 1 || outer.is_multiple_of(128) || *outer >= extent;
            Self::ID.require(fits, Reason::Scale, format_args!("blocks of {name} of {outer} columns, takes 1 and multiples of 128"))?;
        }
        let (a, b) = (gemm.a.dtype, gemm.b.dtype);
        let takes = match gemm.precision {
            Precision::Fp32 => a == b && matches!(a, DType::Bf16 | DType::F16),
            Precision::Tf32 => true,
            Precision::Fp8Fast | Precision::Fp8Promoted => true,
            Precision::I32 => true,
            Precision::F16 => true,
            Precision::F64 | Precision::Ieee => false,
        };
        Self::ID.require(takes, Reason::Precision, format_args!("{:?} of {a} and {b}", gemm.precision))?;
        let copied = |rows: u64| {
            [rows.saturating_add(128), gemm.k.saturating_add(128), gemm.batch_count()]
                .iter()
                .map(|&n| u128::from(n))
                .fold(1, u128::saturating_mul)
        };
        Self::ID.require(
            copied(gemm.m.max(gemm.n)) < 1 << 56,
            Reason::Extent,
            format_args!(
                "m, n, k, batch = {}, {}, {}, {}; operands must be below 2^56 elements",
                gemm.m,
                gemm.n,
                gemm.k,
                gemm.batch_count()
            ),
        )?;
        // Operands that cannot be mapped, or whose type the tensor cores take along the depth alone, are copied first.
        let either = matches!(a, DType::Bf16 | DType::F16);
        let repacks = [(gemm.a.clone(), gemm.m), (gemm.b.transposed(), gemm.n)]
            .map(|(operand, rows)| Repack::needed(&operand, rows, gemm.k, &gemm.batch, either));
        let mut gemm = gemm.clone();
        if let Some(repack) = &repacks[0] {
            gemm.a = repack.packed.clone();
        }
        if let Some(repack) = &repacks[1] {
            gemm.b = repack.packed.transposed();
        }
        let views = (View::new(gemm.clone(), false), View::new(transposed(&gemm), true));
        let (Some(unswapped), Some(swap_ab)) = views else {
            let extents =
                format_args!("m, n, k, batch = {}, {}, {}, {}; each must be below 2^31", gemm.m, gemm.n, gemm.k, gemm.batch_count())
                    .to_string();
            return Err(Self::ID.refusal(Reason::Extent, extents));
        };
        let promote = scaled || gemm.precision == Precision::Fp8Promoted;
        Ok(Wgmma { arch: arch.clone(), promote, repacks, unswapped, swap_ab })
    }

    fn configs(&self) -> Vec<Config> {
        let mut configs = Vec::new();
        // Splits pay where tiles leave most of the chip idle; elsewhere, the fixup costs more than it saves.
        let few = self.arch.resident_clusters_of(1) / 5;
        for (shape, swap_ab) in (0..SHAPES.len() as u32).flat_map(|shape| [(shape, false), (shape, true)]) {
            let spec = self.spec(shape, swap_ab);
            let splits = |split: &u32| *split == 0 || spec.as_ref().is_some_and(|spec| spec.split == Split::Fixup);
            for split in [0, 1, 2, 3, 4, 5, 7].into_iter().filter(splits) {
                let along = [false, true].map(|along_columns| ConfigKnobs { shape, swap_ab, split, parts: 0, group: 8, along_columns });
                let along = along.into_iter().filter_map(|chosen| self.config(chosen, spec.clone()?));
                configs.extend(along.filter(|Config { schedule, .. }| split == 0 || schedule.split_tiles > 0 && schedule.tiles <= few));
            }
            configs.extend(self.in_parts(shape, swap_ab));
        }
        configs
    }

    fn knobs(config: &Config) -> Knobs {
        config.chosen.knobs()
    }

    fn notes(&self, _: &Config) -> Notes {
        let operand = self.unswapped.problem.a.dtype;
        Notes {
            tensor_core: true,
            down_convert: (operand == DType::F32).then_some(DType::Tf32),
            reduced_sums: operand.is_fp8() && !self.promote,
            ..Notes::of(self.unswapped.problem.precision.accumulator())
        }
    }

    fn work(&self, config: &Config) -> Work {
        let Config { chosen, spec, schedule, grid, parts } = config;
        let view = self.view(chosen.swap_ab);
        let (tile_m, tile_n) = (f64::from(spec.tile_m), f64::from(spec.tile_n));
        let workers = self.arch.resident_clusters_of(spec.ctas()).max(1);
        let steps = f64::from(schedule.steps.div_ceil(spec.cluster_split));
        // Whole tiles, then a share of those that are split.
        let whole = (schedule.tiles - schedule.split_tiles).div_ceil((*grid).max(1));
        let rounds = if parts.is_some() { grid.div_ceil(workers) } else { 1 };
        let has_parts = parts.is_some() || schedule.split_tiles > 0;
        let (longest_steps, longest_tiles) = match has_parts {
            true => (f64::from(whole) * steps + f64::from(rounds * schedule.share), f64::from(whole + rounds)),
            false => (f64::from(whole) * steps, f64::from(whole)),
        };
        let join = match (parts, spec.cluster_split > 1, schedule.split_tiles > 0) {
            (Some(_), ..) => Join::Launch,
            (None, true, _) => Join::Cluster,
            (None, false, true) => Join::Fixup,
            (None, false, false) => Join::None,
        };
        let loaded = f64::from(spec.loaded(Shared::A) + spec.loaded(Shared::B)) * f64::from(ROW_BYTES);
        let main = Loop {
            tile: [tile_m, tile_n],
            tiles: f64::from(schedule.tiles * spec.ctas()),
            grid: f64::from(grid * spec.ctas()),
            resident: f64::from(workers * spec.ctas()),
            steps,
            longest_steps,
            longest_tiles,
            parts: f64::from(if has_parts { schedule.most_parts() } else { 1 }),
            join,
            tensor_cycles: wgmma_cycles(tile_m, tile_n),
            shared_bytes: (tile_m + tile_n * tile_m / 64.0) * f64::from(ROW_BYTES) + loaded,
            loaded_bytes: loaded,
            issued: if spec.promote { tile_m * tile_n / 32.0 } else { 0.0 },
            threads: f64::from(spec.threads()),
            cluster: f64::from(spec.ctas()),
            stages: f64::from(spec.stages),
            along_columns: chosen.along_columns,
            swap_ab: chosen.swap_ab,
            ping_pong: spec.ping_pong,
            promoted: spec.promote,
            store_bytes: match spec.out {
                Out::Tma => 16.0,
                Out::Rows => 8.0,
                Out::Scattered | Out::Direct => view.problem.d.dtype.bytes() as f64 * if spec.epilogue.pairs { 2.0 } else { 1.0 },
            },
            ..Loop::of_gemm(Self::ID.name, &view.problem)
        };
        let repacks = self.repacks.iter().flatten().map(Repack::work);
        Work::of(main).beside(repacks.chain(parts.iter().map(PartGrid::work)))
    }

    fn lower(&self, config: &Config) -> Result<Program, Refusal> {
        let Config { chosen, spec, schedule, grid, parts } = config;
        let view = self.view(chosen.swap_ab);
        let slot = |matrix: &Matrix| Address::buffer(matrix.slot.0 as usize);
        let [a, b] = view.operands();
        let d = &view.problem.d;
        let chunk = Chunk::all(&view.problem.batch).into_iter().next();
        let chunk = chunk.ok_or_else(|| Self::ID.refusal(Reason::Batch, "an empty batch"))?;

        let mut program = super::program(&view.problem);
        let mut place = |matrix: &Matrix, repack: Option<&Repack>| match repack {
            None => slot(matrix),
            Some(repack) => {
                let copy = program.add_scratch("repacked operand", repack.scratch_bytes());
                repack.launches(slot(matrix), copy).into_iter().for_each(|launch| program.launch(launch));
                copy
            }
        };
        let [a_repack, b_repack] = self.repacks(view);
        let (a_place, b_place) = (place(&a, a_repack), place(&b, b_repack));
        let [a_clip, b_clip] = [(Shared::A, view.m), (Shared::B, view.n)].map(|(operand, extent)| {
            // Clusters are whole, also where there are fewer tiles.
            let clipped = spec.clipped(operand);
            let tiles = extent.div_ceil(clipped.tile.rows);
            clipped.args(extent, if spec.cluster > 1 && spec.shared != operand { tiles.next_multiple_of(spec.cluster) } else { tiles })
        });
        let batched = |matrix: &Matrix| u32::from(matrix.batch_strides.first().is_some_and(|&stride| stride != 0));

        let parts = parts.map(|parts| {
            let scratch = program.add_scratch("parts", parts.scratch_bytes());
            let epilogue = Wgmma::epilogue_of_parts(view);
            let arguments = epilogue.arguments(&view.problem, &chunk, 0, 0);
            let adds = ReductionSpec { integer: false, slices: parts.slices(), epilogue };
            (parts.arguments(scratch), parts.launch(adds, scratch, chunk.index(), arguments, [view.m, view.n]))
        });
        let (parts, adding) = parts.unzip();
        let store = adding.is_none().then(|| {
            let leading_bytes = d.leading_dimension().unwrap_or(1) * d.dtype.bytes() as u64;
            StoreArgs {
                epilogue: spec.epilogue.arguments(&view.problem, &chunk, 0, 0),
                place: spec.store().place(slot(d), [view.m, view.n, view.batch], leading_bytes, chunk.strides_bytes(d)),
                sums: None,
            }
        });
        let fixup = (spec.split == Split::Fixup).then(|| {
            if schedule.split_tiles == 0 {
                return FixupArgs::without_scratch(a_place);
            }
            let owners = u64::from(schedule.split_tiles) * u64::from(spec.cluster);
            let words = u64::from(spec.tile_m) * u64::from(spec.tile_n) / u64::from(spec.consumers);
            FixupArgs::with_scratch(&mut program, owners * u64::from(spec.consumers), schedule.most_parts(), words)
        });
        let arguments = ParamsArgs {
            a: (a_place, operand_map(a_clip.boxed(spec.clipped(Shared::A).map()), &a, view.m, view.k, view.batch)),
            b: (b_place, operand_map(b_clip.boxed(spec.clipped(Shared::B).map()), &b, view.n, view.k, view.batch)),
            a_batches: batched(&a),
            b_batches: batched(&b),
            a_clip,
            b_clip,
            schedule: *schedule,
            batch: chunk.index(),
            a_factors: FactorsArgs::of(view.problem.scale_a.as_ref(), &chunk),
            b_factors: FactorsArgs::of(view.problem.scale_b.as_ref(), &chunk),
            store,
            fixup,
            parts,
        };
        let arguments = arguments.bound(spec);
        program.launch(Launch::new(reference(spec.clone()), [grid * spec.ctas(), 1, 1], arguments).overlapping());
        adding.into_iter().for_each(|launch| program.launch(launch));
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        if target != Target::Sm90a {
            return Vec::new();
        }
        let adds = PART_TYPES.iter().flat_map(|&dtype| reduction::catalog(dtype, true));
        catalog_specs().into_iter().map(reference).chain(adds).chain(repack::catalog()).collect()
    }
}

/// The operand and result types that the catalog holds, and whether sums are promoted. Other results and fused chains are made when asked
/// for.
const TYPES: &[(DType, DType, bool)] = &[
    (DType::Bf16, DType::Bf16, false),
    (DType::F16, DType::F16, false),
    (DType::F32, DType::F32, false),
    (DType::E4m3, DType::Bf16, false),
    (DType::E4m3, DType::Bf16, true),
    (DType::I8, DType::I32, false),
];

/// The operand types of the kernels whose parts are added up later; in the catalog, results have them too.
const PART_TYPES: &[DType] = &[DType::Bf16, DType::F16, DType::F32];

fn catalog_specs() -> Vec<Spec> {
    let mut specs = Vec::new();
    for &(operands, d, promote) in TYPES {
        let majors: &[(Axis, Axis)] = match operands {
            DType::Bf16 | DType::F16 => {
                &[(Axis::Depth, Axis::Depth), (Axis::Depth, Axis::Rows), (Axis::Rows, Axis::Depth), (Axis::Rows, Axis::Rows)]
            }
            _ => &[(Axis::Depth, Axis::Depth)],
        };
        let exact = d == DType::I32;
        let epilogue = EpilogueSpec { stores_d: false, exact, ..EpilogueSpec::plain(OperandSpec { dtype: d, walk: Walk::Row }) };
        for (shape, &(a_major, b_major)) in SHAPES.iter().flat_map(|shape| majors.iter().map(move |major| (shape, major))) {
            let ways = [(Out::Tma, false), (Out::Tma, true), (Out::Rows, false), (Out::Rows, true), (Out::Direct, false)];
            for (out, swap_ab) in ways {
                let given =
                    Given { a: operands, b: operands, a_major, b_major, promote, half_sums: false, scaled: [Scaled::No; 2], out, swap_ab };
                let elements = EpilogueSpec { stores_d: true, d: OperandSpec::strided(d), ..epilogue.clone() };
                specs.extend(given.spec(shape, if out == Out::Direct { elements } else { epilogue.clone() }));
                specs.extend(given.in_parts(shape).filter(|_| out == Out::Direct));
            }
        }
    }
    specs
}

/// The tiles that engines for other problems may name for 16-bit products whose row-major sums stay in f32.
const SUM_SHAPES: [usize; 6] = [2, 9, 10, 13, 14, 16];

/// Whether a config leads to a kernel of [`sums`].
pub(crate) fn forms_sums(config: &Knobs) -> bool {
    let plain = ["turned", "along", "parts"].iter().all(|&knob| config.value(knob).unwrap_or(0) == 0);
    plain && config.value("shape").is_some_and(|shape| SUM_SHAPES.contains(&(shape as usize)))
}

/// The kernels of 16-bit operands, both along their rows or A along the depth, whose sums stay in f32, row-major. They are in the catalogs
/// of those that name them.
pub(crate) fn sums() -> Vec<KernelRef> {
    let mut specs = Vec::new();
    let d = OperandSpec { dtype: DType::F32, walk: Walk::Row };
    let epilogue = EpilogueSpec { stores_d: false, pairs: false, ..EpilogueSpec::plain(d) };
    for operands in [DType::Bf16, DType::F16] {
        let majors = [[Axis::Depth, Axis::Depth], [Axis::Depth, Axis::Rows], [Axis::Rows, Axis::Rows]];
        for (shape, [a_major, b_major]) in SUM_SHAPES.iter().flat_map(|&shape| majors.map(|majors| (&SHAPES[shape], majors))) {
            for out in [Out::Tma, Out::Rows] {
                let scaled = [Scaled::No; 2];
                let (promote, half_sums, swap_ab) = (false, false, false);
                let given = Given { a: operands, b: operands, a_major, b_major, promote, half_sums, scaled, out, swap_ab };
                specs.extend(given.spec(shape, epilogue.clone()));
            }
        }
    }
    specs.into_iter().map(reference).collect()
}

/// The part of a spec that the problem gives.
#[derive(Clone, Copy, Debug)]
struct Given {
    a: DType,
    b: DType,
    a_major: Axis,
    b_major: Axis,
    promote: bool,
    half_sums: bool,
    scaled: [Scaled; 2],
    out: Out,
    swap_ab: bool,
}

impl Given {
    /// The spec of a shape for this problem, or nothing where they do not suit each other.
    fn spec(self, shape: &Shape, epilogue: EpilogueSpec) -> Option<Spec> {
        let Given { promote, half_sums, scaled, out, swap_ab, .. } = self;
        let spec = self.shaped(shape, if shape.splits { Split::Fixup } else { Split::No }, epilogue);
        let result = match (out, spec.d().bytes()) {
            (Out::Tma, 2) => HALVES,
            (Out::Tma, _) => WORDS,
            (Out::Rows, _) => LINES,
            (Out::Direct | Out::Scattered, _) => ELEMENTS,
        };
        let offered = if swap_ab { shape.along_columns } else { shape.along_rows } & result != 0;
        // A few columns are most often those of activations, whose depth is contiguous.
        let offered = offered && (shape.cluster_split == 1 || spec.b_major == Axis::Depth);
        // What a warpgroup holds of a tile.
        let share = spec.tile_m * spec.tile_n / if spec.ping_pong { 1 } else { spec.consumers };
        // Two sets of accumulators, and the factors of a thread's columns; sums in f16 stand beside their widened ones for a while.
        let registers_fit = share <= if half_sums { 64 * 160 } else { 64 * 256 }
            && (!promote || share <= 64 * 128 && (scaled[1] != Scaled::Lines || spec.consumers <= 2));
        // TMA writes whole panels of D.
        let d_bytes = spec.d().bytes() as u32;
        let whole_rows =
            out != Out::Tma || swap_ab || (spec.tile_n / spec.cluster_split * d_bytes).is_multiple_of(if d_bytes == 2 { 64 } else { 128 });
        (offered && registers_fit && whole_rows).then(|| fitted(spec)).flatten()
    }

    /// The same where the parts of all tiles are added up later: nothing of the result shapes this kernel.
    fn in_parts(self, shape: &Shape) -> Option<Spec> {
        let Given { a, b, promote, half_sums, scaled, .. } = self;
        let plain = a == b && PART_TYPES.contains(&a) && !promote && !half_sums && scaled == [Scaled::No; 2];
        let kept = EpilogueSpec::plain(OperandSpec::strided(DType::F32));
        let given = Given { out: Out::Direct, swap_ab: false, ..self };
        (shape.adds_later && plain).then(|| fitted(given.shaped(shape, Split::Reduced, kept))).flatten()
    }

    fn shaped(self, shape: &Shape, split: Split, epilogue: EpilogueSpec) -> Spec {
        let Shape { tile_m, tile_n, consumers, cluster, shared, ping_pong, cluster_split, .. } = *shape;
        let Given { a, b, a_major, b_major, promote, half_sums, scaled, out, swap_ab } = self;
        Spec {
            a,
            b,
            a_major,
            b_major,
            tile_m,
            tile_n,
            stages: 2,
            consumers,
            cluster,
            shared,
            split,
            cluster_split,
            ping_pong,
            promote,
            half_sums,
            scaled,
            out,
            swap_ab,
            epilogue,
        }
    }
}

/// The spec with as many stages as shared memory holds; nothing where its operands do not suit its tile.
fn fitted(mut spec: Spec) -> Option<Spec> {
    // Tiles whose rows are contiguous are made of panels of 128 bytes.
    let panel = 128 / spec.a.bytes() as u32;
    let whole_panels = |axis: Axis, rows: u32| axis == Axis::Depth || rows.is_multiple_of(panel);
    let panels_fit = whole_panels(spec.a_major, spec.loaded(Shared::A)) && whole_panels(spec.b_major, spec.loaded(Shared::B));
    if !panels_fit || spec.shared_bytes() > SHARED_BYTES {
        return None;
    }
    while spec.stages < 12 && (Spec { stages: spec.stages + 1, ..spec.clone() }).shared_bytes() <= SHARED_BYTES {
        spec.stages += 1;
    }
    Some(spec)
}

/// Dynamic shared memory of a CTA on compute capability 9.0.
const SHARED_BYTES: u32 = 232_448;

fn reference(spec: Spec) -> KernelRef {
    KernelRef::new(spec.to_string(), move || spec.build())
}

/// The knobs of a config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ConfigKnobs {
    shape: u32,
    swap_ab: bool,
    /// How depth is split: 0 not, 1 that of the tiles of the last wave, 2 of the last two waves, 3 and more every tile into 2 and more
    /// parts.
    split: u32,
    /// Parts of every tile, to be added up by a launch of their own; 0, and no knob, where there is none.
    parts: u32,
    group: u32,
    along_columns: bool,
}

impl ConfigKnobs {
    fn knobs(&self) -> Knobs {
        let knobs = [
            ("shape", self.shape),
            ("turned", u32::from(self.swap_ab)),
            ("split", self.split),
            ("group", self.group),
            ("along", u32::from(self.along_columns)),
        ];
        Knobs::new(knobs.into_iter().chain((self.parts > 0).then_some(("parts", self.parts))))
    }
}

/// The most scratch for parts that are added up later.
const MOST_PARTS_BYTES: u64 = 512 << 20;
/// The most such parts, in waves of CTAs.
const MOST_WAVES: u32 = 2;
/// The least of them a tile; fewer are reduced well by the fixup, or the tiles fill the chip.
const LEAST_PARTS: u32 = 5;
/// The least steps of depth of such a part, so that its ring fills.
const LEAST_STEPS: u32 = 4;

impl Wgmma {
    fn view(&self, swap_ab: bool) -> &View {
        if swap_ab { &self.swap_ab } else { &self.unswapped }
    }

    /// The copies to be made of the operands of a view.
    fn repacks(&self, view: &View) -> [Option<&Repack>; 2] {
        let [a, b] = self.repacks.each_ref().map(Option::as_ref);
        if view.swap_ab { [b, a] } else { [a, b] }
    }

    /// What the problem gives to a spec of a shape; nothing where they do not suit each other.
    fn given(&self, shape: &Shape, swap_ab: bool) -> Option<Given> {
        let view = self.view(swap_ab);
        let [a, b] = view.operands();
        let (out, transposed) = view.out();
        Some(Given {
            scaled: view.scaled(shape.tile_n)?,
            half_sums: view.problem.precision == Precision::F16,
            a: a.dtype,
            b: b.dtype,
            a_major: View::axis(&a),
            b_major: View::axis(&b),
            promote: self.promote,
            out,
            swap_ab: transposed,
        })
    }

    /// The spec of a shape whose kernel writes the result itself.
    fn spec(&self, shape: u32, swap_ab: bool) -> Option<Spec> {
        let (view, shape) = (self.view(swap_ab), SHAPES.get(shape as usize)?);
        let given = self.given(shape, swap_ab)?;
        let out = given.out;
        let whole = EpilogueSpec::of(&view.problem);
        // Pairs of columns are guarded by their second one.
        let epilogue = EpilogueSpec { stores_d: out == Out::Direct, pairs: whole.pairs && view.n.is_multiple_of(2), ..whole };
        // Without operands there is nothing for a pair to save, and one kernel serves both.
        let pairs = epilogue.pairs && (epilogue.reads_memory() || epilogue.stores_d);
        // Nor does it matter how D lies where others store it.
        let d = if out == Out::Direct { epilogue.d } else { OperandSpec { walk: Walk::Row, ..epilogue.d } };
        let spec = given.spec(shape, EpilogueSpec { pairs, d, ..epilogue })?;
        // No CTA is without a step of its own.
        (view.k.div_ceil(spec.depth()) >= spec.cluster_split).then_some(spec)
    }

    /// The config with its work and workers, or nothing where tiles are too many to count, or too few.
    fn config(&self, chosen: ConfigKnobs, spec: Spec) -> Option<Config> {
        let parts = self.part_grid(chosen, &spec);
        let (schedule, grid) = self.schedule(chosen, &spec, parts.as_ref())?;
        Some(Config { chosen, spec, schedule, grid, parts })
    }

    /// What stands between sums and D in the launch that adds parts up.
    fn epilogue_of_parts(view: &View) -> EpilogueSpec {
        let whole = EpilogueSpec::of(&view.problem);
        let walk = if whole.d.walk == Walk::Row { Walk::Row } else { Walk::Strided };
        let pairs = whole.pairs && walk == Walk::Row && view.n.is_multiple_of(2);
        EpilogueSpec { d: OperandSpec { walk, ..whole.d }, pairs, ..whole }
    }

    /// Rows and columns of tiles, as clusters take them.
    fn tiles(&self, swap_ab: bool, spec: &Spec) -> [u32; 2] {
        let view = self.view(swap_ab);
        let across = |operand: Shared| if spec.shared == operand { 1 } else { spec.cluster };
        [(view.m, spec.tile_m, Shared::A), (view.n, spec.tile_n, Shared::B)]
            .map(|(extent, tile, operand)| extent.div_ceil(tile).div_ceil(across(operand)))
    }

    /// The tiles and their parts; nothing where they are not added up later.
    fn part_grid(&self, chosen: ConfigKnobs, spec: &Spec) -> Option<PartGrid> {
        let [rows, columns] = self.tiles(chosen.swap_ab, spec);
        let [tile_rows, tile_columns] =
            if spec.shared == Shared::B { [rows * spec.cluster, columns] } else { [rows, columns * spec.cluster] };
        (spec.split == Split::Reduced).then(|| PartGrid {
            tile: spec.part_tile(),
            tile_rows,
            tile_columns,
            matrices: self.view(chosen.swap_ab).batch,
            parts: chosen.parts,
        })
    }

    /// Work and workers.
    fn schedule(&self, chosen: ConfigKnobs, spec: &Spec, parts: Option<&PartGrid>) -> Option<(ScheduleArgs, u32)> {
        let view = self.view(chosen.swap_ab);
        let [rows, columns] = self.tiles(chosen.swap_ab, spec);
        let raster = RasterArgs::new(rows, columns, chosen.group, chosen.along_columns);
        let tiles = rows.checked_mul(columns)?.checked_mul(view.batch).filter(|&tiles| tiles < 1 << 31)?;
        let steps = view.k.div_ceil(spec.depth());
        let workers = (self.arch.resident_clusters_of(spec.ctas())).max(1);
        if let Some(parts) = parts {
            let every = tiles.checked_mul(parts.parts).filter(|&every| every <= MOST_WAVES * workers)?;
            let fits = parts.fits() && parts.scratch_bytes() <= MOST_PARTS_BYTES;
            return fits.then(|| ScheduleArgs::split_evenly(raster, tiles, steps, parts.parts)).flatten().map(|args| (args, every));
        }
        if chosen.split == 0 {
            return Some((ScheduleArgs::whole(raster, tiles, steps), workers.min(tiles)));
        }
        if chosen.split > 2 {
            let parts = chosen.split - 1;
            let every = tiles.checked_mul(parts).filter(|&every| every <= workers);
            let even = every.and_then(|every| Some((ScheduleArgs::split_evenly(raster, tiles, steps, parts)?, every)));
            return Some(even.unwrap_or((ScheduleArgs::whole(raster, tiles, steps), workers.min(tiles))));
        }
        let tail = tiles % workers;
        let split_tiles = (tail + (chosen.split - 1) * workers).min(tiles);
        let args = ScheduleArgs::split(raster, tiles, steps, split_tiles, workers, 4);
        let busy = (u64::from(split_tiles) * u64::from(steps)).div_ceil(u64::from(args.share)) as u32;
        Some((args, workers.min(busy.max(tiles - split_tiles)).max(1)))
    }

    /// The configs of a shape whose parts are added up later: whole waves of parts.
    fn in_parts(&self, shape: u32, swap_ab: bool) -> Vec<Config> {
        let spec = SHAPES.get(shape as usize).and_then(|shape| self.given(shape, swap_ab)?.in_parts(shape));
        let Some(spec) = spec else { return Vec::new() };
        let view = self.view(swap_ab);
        let tiles = self.tiles(swap_ab, &spec).into_iter().chain([view.batch]).map(u64::from).product::<u64>();
        let (steps, workers) = (view.k.div_ceil(spec.depth()), u64::from(self.arch.resident_clusters_of(spec.ctas())));
        let mut parts: Vec<u32> = (1..=u64::from(MOST_WAVES))
            .map(|waves| (workers * waves / tiles).min(u64::from(steps / LEAST_STEPS)) as u32)
            .filter(|&parts| parts >= LEAST_PARTS)
            // As many as come out of whole shares.
            .map(|parts| steps.div_ceil(steps.div_ceil(parts)))
            .collect();
        parts.dedup();
        let all_chosen = parts.into_iter().map(|parts| ConfigKnobs { shape, swap_ab, split: 0, parts, group: 8, along_columns: false });
        all_chosen.filter_map(|chosen| self.config(chosen, spec.clone())).collect()
    }
}

fn operand_map(decl: MapDecl, matrix: &Matrix, rows: u32, depth: u32, batch: u32) -> MapSpec {
    let bytes = u64::from(decl.ty.bytes());
    let leading = matrix.leading_dimension().unwrap_or(1) * bytes;
    let contiguous_depth = View::axis(matrix) == Axis::Depth;
    let dims = if contiguous_depth { [u64::from(depth), u64::from(rows)] } else { [u64::from(rows), u64::from(depth)] };
    let stride = matrix.batch_strides.first().copied().unwrap_or(0) * bytes;
    let (batches, batch_stride) = if stride == 0 { (1, leading.max(16)) } else { (u64::from(batch), stride) };
    map(decl, vec![dims[0], dims[1], batches], vec![leading, batch_stride])
}

fn map(decl: MapDecl, dims: Vec<u64>, strides_bytes: Vec<u64>) -> MapSpec {
    MapSpec {
        decl,
        dims,
        strides_bytes,
        element_strides: vec![1; 3],
        lower_corner: vec![],
        upper_corner: vec![],
        fill: Default::default(),
        l2: L2Promotion::B256,
    }
}
