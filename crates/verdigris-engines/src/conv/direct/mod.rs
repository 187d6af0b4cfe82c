//! `conv.direct`: convolution without tensor cores, for everything.
//!
//! It takes every valid convolution: all three directions, all operand types and precision policies, any strides, dilations, paddings,
//! groups and layouts, any alignment that an element needs, every prologue and epilogue, on sm_80 and later. So the family always has an
//! answer, and f32 and f64 have one that multiplies and adds as IEEE says.
//!
//! **Method.** An implicit matrix product: a CTA of 256 threads computes a tile of the result; K-tiles of both operands, 16 deep, go from
//! global memory through registers, where they become the type that is computed in, to shared memory; the next K-tile is on its way while
//! one is multiplied. Where activations lie is worked out as they are read ([`kernel`]).
//!
//! *fprop and dgrad* are one kernel. Of a dgrad with stride `s`, the phase `ρ` (pixels `ρ` modulo `s`) meets the taps `r` for which `s`
//! divides `ρ + pad − r · dilation`: every `s / g`-th, with `g = gcd(dilation, s)`, or none. Each phase is a dense correlation of stride 1
//! with its own taps; all phases stand in one grid, and no product with a zero is formed.
//!
//! *wgrad* sums over all pixels of the output. Where its tiles leave the chip idle, the sum is cut into parts of equal length, which a
//! second launch adds up in their order. Nothing is atomic.
//!
//! **When it wins.** f32 and f64 under `ieee`; filter gradients of 8-bit integers, whose operands both are strided along the depth, where
//! tensor cores read 16-bit types alone; everything that no other engine takes.
//!
//! **Numbers.** Products and sums are fused multiply-adds in a fixed order, so results repeat bit for bit. 16-bit and fp8 operands widen
//! exactly; policies that allow less (tf32, f16 sums, fp8 sums) get f32 sums, with operands or the finished sum rounded as the policy says.

mod kernel;

use serde::{Deserialize, Serialize};
use verdigris_graph::{ConvProblem, Direction, Precision, Problem};
use verdigris_kir::face::{Header, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::program::{Address, Base, KernelRef, Launch, Program};
use verdigris_tensor::DType;

use super::geometry::boxes::Boxes;
use super::geometry::phases::{PixelGeometry, gradient_steps};
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Join, Loop, Stream, Traffic, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal, empty_program};
use crate::fuse::compute;
use crate::fuse::element::Arithmetic;
use crate::fuse::epilogue::{EpilogueSpec, OperandSpec};
use crate::fuse::prologue::PrologueSpec;
use crate::layout::batch::Chunk;
use crate::layout::images::StridedArguments;
use crate::layout::space::divisor;
use crate::split_k::filter::direct as reduction;
use crate::split_k::filter::direct::{FilterColumnsArguments, Order};
use crate::sums::statistics;
use kernel::{DEPTH, PartsArguments};

const ID: EngineId = EngineId { name: "conv.direct", number: 200 };

/// Threads of a CTA.
const THREADS: u32 = 256;
/// What counts in 32 bits inside of one launch stays below this.
const COUNT_LIMIT: u64 = 1 << 31;
/// CTAs of one launch, groups apart.
const TILE_LIMIT: u64 = 1 << 30;

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct Direct {
    problem: ConvProblem,
    spec: Spec,
    arch: Arch,
}

/// A tile, and how the sum is cut.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Config {
    tile: Tile,
    /// Parts of the sum of one launch; 0 for none, with the epilogue in the same kernel.
    parts: u64,
}

impl Algorithm for Direct {
    const ID: EngineId = ID;
    const VERSION: u32 = 1;
    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Conv(problem) = problem else {
            return Err(ID.refusal(Reason::Problem, format_args!("{}, taken is conv", problem.kind())));
        };
        let extents = problem.gemm_extents();
        let kind = Kind::of(problem.direction);
        let (counted, what) = match kind {
            Kind::Pixels => (extents.k, "taps and channels that are summed over"),
            Kind::Filter => (extents.n, "taps and channels of a filter"),
        };
        ID.require(counted < COUNT_LIMIT, Reason::Extent, format_args!("{counted} {what}, taken below 2^31"))?;
        if problem.statistics.is_some() {
            let pixels = extents.m;
            ID.require(pixels < COUNT_LIMIT, Reason::Extent, format_args!("statistics over {pixels} pixels, taken below 2^31"))?;
        }
        let epilogue = EpilogueSpec { pairs: false, ..EpilogueSpec::of_conv(problem) };
        // The plain ones make a catalog, which one class of strides keeps short; a user's chain is compiled for its own.
        let epilogue = if epilogue.is_plain() { epilogue.strided() } else { epilogue };
        let [(_, first, _), (_, second, _)] = problem.operands();
        let (gathered, plain) = if kind == Kind::Filter { (second, first) } else { (first, second) };
        let spec = Spec {
            kind,
            gathered: gathered.dtype,
            plain: plain.dtype,
            arithmetic: Arithmetic::of(problem.precision),
            tile: Tile::Small,
            order: Order::of(problem),
            split: false,
            prologue: PrologueSpec::of(problem),
            epilogue,
        };
        let target = spec.target();
        ID.require(arch.runs(target), Reason::Target, format_args!("{} needs {}", gathered.dtype, target.ptx()))?;
        if kind == Kind::Pixels {
            let phases = PixelGeometry::of(problem).phase_count();
            let across = extents.n.div_ceil(u64::from(Tile::Small.columns())).max(1);
            let tiles = phases.saturating_mul(across);
            ID.require(tiles < TILE_LIMIT, Reason::Extent, format_args!("{tiles} phases by column tiles, taken below 2^30"))?;
        }
        Ok(Direct { problem: problem.clone(), spec, arch: arch.clone() })
    }

    fn configs(&self) -> Vec<Config> {
        let columns = self.problem.gemm_extents().n;
        let few = columns <= 16;
        let tiles = Tile::of(self.spec.kind, self.spec.gathered, self.spec.arithmetic);
        let mut configs = Vec::new();
        for &tile in tiles.iter().filter(|&&tile| few || tile != Tile::Thin) {
            if self.spec.kind == Kind::Pixels {
                configs.push(Config { tile, parts: 0 });
                continue;
            }
            // Sums over more pixels than a launch counts meet in workspace.
            if self.boxes(tile).len() <= 1 {
                configs.push(Config { tile, parts: 0 });
            }
            let parts = self.wanted_parts(tile);
            let elements = self.problem.gemm_extents().m.saturating_mul(columns);
            if elements < COUNT_LIMIT && (parts > 1 || self.boxes(tile).len() > 1) {
                configs.push(Config { tile, parts });
            }
        }
        configs
    }

    fn knobs(config: &Config) -> Knobs {
        Knobs::new([("tile", config.tile.rows()), ("split", config.parts as u32)])
    }

    fn notes(&self, _: &Config) -> Notes {
        let accumulator = match self.spec.arithmetic {
            Arithmetic::F64 => DType::F64,
            Arithmetic::I32 => DType::I32,
            _ => DType::F32,
        };
        Notes { down_convert: (self.spec.arithmetic == Arithmetic::Tf32).then_some(DType::Tf32), ..Notes::of(accumulator) }
    }

    fn work(&self, config: &Config) -> Work {
        let (p, tile) = (&self.problem, config.tile);
        let extents = p.gemm_extents();
        let parts = config.parts.max(1) as f64;
        let (rows, columns, depth) = (f64::from(tile.rows()), f64::from(tile.columns()), f64::from(DEPTH));
        let tiles = self.tiles(tile) as f64;
        let double = self.spec.arithmetic == Arithmetic::F64;
        // Of a strided dgrad each phase forms its own taps' products only. Taps that meet padding are walked all the same: of 5x5 pixels whose results are one by one
        // and two apart, 25 of 26 products are none, and what counted them so took 224 us for an estimate of 17.
        let phases = if p.direction == Direction::Dgrad { p.strides.iter().product::<u64>().max(1) } else { 1 };
        let share = 1.0 / phases as f64;
        let steps = (extents.k as f64 * share / depth).ceil().max(1.0);
        let kernel = match (self.spec.kind, tile) {
            (_, Tile::Thin) => "conv.direct thin",
            (Kind::Pixels, _) => "conv.direct",
            (Kind::Filter, _) => "conv.direct wgrad",
        };
        let elements = (rows + columns) * depth;
        let resident = f64::from(self.arch.sm_count) * if tile == Tile::Large || double { 1.0 } else { 2.0 };
        let main = Loop {
            tile: [rows, columns],
            fma_cycles: rows * columns * depth / if double { 64.0 } else { 128.0 },
            shared_bytes: 4.0 * depth * rows * columns / if tile == Tile::Large { 4.0 } else { 2.0 },
            loaded_bytes: elements * self.spec.gathered.bytes() as f64,
            // Elements are gathered one by one, each with its place.
            issued: elements / 32.0 * 12.0,
            copy_bytes: self.spec.gathered.bytes() as f64,
            threads: 256.0,
            exposed: 0.8,
            stages: 2.0,
            ..Loop::of_conv(kernel, p)
        };
        let in_parts = main.in_waves(tiles * parts, resident, (steps / parts).ceil());
        let join = if config.parts > 0 { Join::Launch } else { Join::None };
        let main = Loop { tiles, steps, parts, join, ..in_parts };
        let sum_bytes = 2.0 * parts * extents.m as f64 * extents.n as f64 * extents.groups as f64 * self.spec.sum_bytes() as f64;
        let sums = (config.parts > 0).then(|| Stream::new(Traffic::Reduced, sum_bytes));
        Work::of(main).beside(sums).beside(statistics::work(p))
    }

    fn lower(&self, config: &Config) -> Result<Program, Refusal> {
        let p = &self.problem;
        let mut program = empty_program(&p.slots());
        if !p.is_empty() {
            match self.spec.kind {
                Kind::Pixels => self.pixel_steps(*config, &mut program),
                Kind::Filter => self.filter_steps(*config, &mut program),
            }
        }
        if let Some(statistics) = &p.statistics {
            statistics::steps(p, statistics, &mut program);
        }
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let mut kernels = Vec::new();
        for Types { gathered, plain, arithmetic, result } in Types::all() {
            let epilogue = EpilogueSpec {
                double: arithmetic == Arithmetic::F64,
                exact: arithmetic == Arithmetic::I32 && result == DType::I32,
                ..EpilogueSpec::plain(OperandSpec::strided(result))
            };
            for kind in [Kind::Pixels, Kind::Filter] {
                for order in [Order::ChannelsLast, Order::ChannelsFirst] {
                    for &tile in Tile::of(kind, gathered, arithmetic) {
                        let spec = Spec {
                            kind,
                            gathered,
                            plain,
                            arithmetic,
                            tile,
                            order,
                            split: false,
                            prologue: PrologueSpec::none(gathered),
                            epilogue: epilogue.clone(),
                        };
                        // Parts do not depend on the result's type; the first one of each pair of operands stands for all.
                        let parts = Spec { split: true, ..spec.clone() };
                        if kind == Kind::Filter && !kernels.iter().any(|(name, _, _): &(String, _, _)| *name == parts.name()) {
                            kernels.push((parts.name(), parts.target(), parts.kernel()));
                        }
                        kernels.push((spec.name(), spec.target(), spec.kernel()));
                    }
                    if kind == Kind::Filter {
                        let split_k = reduction::Spec { arithmetic, order, epilogue: epilogue.clone() };
                        kernels.push((split_k.name(), split_k.target(), split_k.kernel()));
                    }
                }
            }
        }
        kernels.sort_by(|a, b| a.0.cmp(&b.0));
        kernels.dedup_by(|a, b| a.0 == b.0);
        kernels.into_iter().filter(|(_, needs, _)| *needs <= target).map(|(_, _, kernel)| kernel).collect()
    }
}

/// The types of a catalog's kernels: usual pairs; operands of two types and other results are what a user's graph makes.
#[derive(Clone, Copy)]
struct Types {
    gathered: DType,
    plain: DType,
    arithmetic: Arithmetic,
    result: DType,
}

impl Types {
    fn all() -> Vec<Types> {
        let same = |dtype, precision, results: &'static [DType]| (dtype, dtype, precision, results);
        let lists = [
            same(DType::F64, Precision::F64, &[DType::F64]),
            same(DType::F32, Precision::Ieee, &[DType::F32]),
            same(DType::F32, Precision::Tf32, &[DType::F32]),
            same(DType::F16, Precision::Ieee, &[DType::F16, DType::F32]),
            same(DType::F16, Precision::F16, &[DType::F16]),
            same(DType::Bf16, Precision::Ieee, &[DType::Bf16, DType::F32]),
            same(DType::I8, Precision::I32, &[DType::I32]),
            same(DType::E4m3, Precision::Ieee, &[DType::Bf16]),
        ];
        let with = |(gathered, plain, precision, results): (DType, DType, Precision, &'static [DType])| {
            results.iter().map(move |&result| Types { gathered, plain, arithmetic: Arithmetic::of(precision), result })
        };
        lists.into_iter().flat_map(with).collect()
    }
}

/// Which of the two kernels: what the rows of the product are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    /// fprop and dgrad.
    Pixels,
    /// wgrad.
    Filter,
}

impl Kind {
    fn of(direction: Direction) -> Kind {
        if direction == Direction::Wgrad { Kind::Filter } else { Kind::Pixels }
    }
}

/// The tile of a CTA.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Tile {
    /// 128×128.
    Large,
    /// 64×64.
    Small,
    /// 256×4, for few channels of the result.
    Thin,
}

impl Tile {
    /// The tiles that pay: the large one where nothing faster than multiply-adds is allowed.
    fn of(kind: Kind, gathered: DType, arithmetic: Arithmetic) -> &'static [Tile] {
        match (kind, gathered, arithmetic) {
            (Kind::Pixels, DType::F32, Arithmetic::F32) => &[Tile::Large, Tile::Small, Tile::Thin],
            (Kind::Filter, DType::F32, Arithmetic::F32) => &[Tile::Large, Tile::Small],
            (Kind::Pixels, ..) => &[Tile::Small, Tile::Thin],
            (Kind::Filter, ..) => &[Tile::Small],
        }
    }

    /// Rows; also the value of the knob.
    const fn rows(self) -> u32 {
        match self {
            Tile::Large => 128,
            Tile::Small => 64,
            Tile::Thin => 256,
        }
    }

    const fn columns(self) -> u32 {
        match self {
            Tile::Large => 128,
            Tile::Small => 64,
            Tile::Thin => 4,
        }
    }

    /// Threads side by side along a row of the tile.
    const fn threads_across(self) -> u32 {
        match self {
            Tile::Large | Tile::Small => 16,
            Tile::Thin => 4,
        }
    }
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct Spec {
    kind: Kind,
    /// The type of the activations that are gathered.
    gathered: DType,
    /// The type of the other operand.
    plain: DType,
    arithmetic: Arithmetic,
    tile: Tile,
    order: Order,
    /// Sums go to workspace, for the split-K reduction.
    split: bool,
    prologue: PrologueSpec,
    epilogue: EpilogueSpec,
}

impl Spec {
    fn name(&self) -> String {
        let kind = if self.kind == Kind::Filter { "wgrad" } else { "pixels" };
        let (rows, columns) = (self.tile.rows(), self.tile.columns());
        let (gathered, plain, arithmetic, order) = (self.gathered, self.plain, self.arithmetic.name(), self.order.name());
        let (prologue, out) = (self.prologue.name(), if self.split { "parts".to_owned() } else { self.epilogue.name() });
        format!("conv_direct_{kind}_{gathered}_{plain}_{arithmetic}_{rows}x{columns}x{DEPTH}_{order}{prologue}_{out}")
    }

    fn target(&self) -> Target {
        let operands = compute::target_of(self.gathered).max(compute::target_of(self.plain)).max(self.prologue.target());
        if self.split { operands } else { operands.max(self.epilogue.target()) }
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas: 1, cluster: 1 };
        build(header, |k| match self.arithmetic {
            Arithmetic::F32 | Arithmetic::Tf32 | Arithmetic::F16 => kernel::product::<f32>(k, self),
            Arithmetic::F64 => kernel::product::<f64>(k, self),
            Arithmetic::I32 => kernel::product::<i32>(k, self),
        })
    }

    /// Bytes of a sum.
    fn sum_bytes(&self) -> u64 {
        if self.arithmetic == Arithmetic::F64 { 8 } else { 4 }
    }
}

impl Direct {
    /// The boxes of pixels that launches cover: of the result, or of what a wgrad sums over.
    fn boxes(&self, tile: Tile) -> Vec<Boxes> {
        let p = &self.problem;
        match self.spec.kind {
            Kind::Filter => Boxes::all([p.n, p.output[0], p.output[1], p.output[2]], COUNT_LIMIT - u64::from(2 * DEPTH)),
            Kind::Pixels => {
                let geometry = PixelGeometry::of(p);
                let across = p.gemm_extents().n.div_ceil(u64::from(tile.columns())).max(1);
                let row_tiles = (TILE_LIMIT / geometry.phase_count().saturating_mul(across).max(1)).max(1);
                Boxes::all(geometry.pixels(p.n), (row_tiles * u64::from(tile.rows())).min(COUNT_LIMIT - 256))
            }
        }
    }

    /// Parts of a wgrad's sum that fill the chip twice, but with at least 8 K-tiles each.
    fn wanted_parts(&self, tile: Tile) -> u64 {
        let extents = self.problem.gemm_extents();
        let tiles = self.tiles(tile).max(1);
        let most = extents.k.div_ceil(u64::from(8 * DEPTH)).max(1);
        (u64::from(self.arch.sm_count) * 4 / tiles).clamp(1, most.min(1024))
    }

    /// Tiles of the result, over all groups and phases, parts apart.
    fn tiles(&self, tile: Tile) -> u64 {
        let extents = self.problem.gemm_extents();
        let rows = extents.m.div_ceil(u64::from(tile.rows()));
        rows.saturating_mul(extents.n.div_ceil(u64::from(tile.columns()))).saturating_mul(extents.groups)
    }
}

impl Direct {
    fn pixel_steps(&self, config: Config, program: &mut Program) {
        let p = &self.problem;
        let spec = Spec { tile: config.tile, ..self.spec.clone() };
        let kernel = spec.clone().kernel();
        let geometry = PixelGeometry::of(p);
        let (tables, table_starts) = geometry.tables();
        program.constants.push(tables);
        let phases = Address { base: Base::Constant(program.constants.len() - 1), offset_bytes: 0 };
        let columns = p.gemm_extents().n;
        let column_tiles = columns.div_ceil(u64::from(config.tile.columns()));
        let group_channels = p.activation_channels() / p.groups;
        for pixel_box in self.boxes(config.tile) {
            let rows = pixel_box.count();
            let row_tiles = rows.div_ceil(u64::from(config.tile.rows()));
            for chunk in Chunk::all(&[p.groups]) {
                let [_, phases_h, phases_w] = geometry.phase_counts();
                let args = kernel::PixelsArguments {
                    rows: rows as u32,
                    columns: columns as u32,
                    column_tiles: divisor(column_tiles),
                    row_tiles: divisor(row_tiles),
                    height_phases: divisor(phases_h),
                    width_phases: divisor(phases_w),
                    phases,
                    table_starts,
                    pixel_box: pixel_box.arguments(),
                    batch: chunk.index(),
                    first_group: chunk.first[0] as u32,
                    steps: geometry.steps(),
                    channels: divisor(group_channels),
                    group_channels: group_channels as u32,
                    activations: StridedArguments::of(p.activations()),
                    filter: geometry.filter(p),
                    prologue: spec.prologue.arguments(p),
                    epilogue: spec.epilogue.conv_arguments(p),
                };
                let [y, z] = chunk.grid();
                let tiles = row_tiles * column_tiles * geometry.phase_count();
                program.launch(Launch::new(kernel.clone(), [tiles as u32, y, z], args.bound(&spec)));
            }
        }
    }

    fn filter_steps(&self, config: Config, program: &mut Program) {
        let p = &self.problem;
        let extents = p.gemm_extents();
        let tile = config.tile;
        let spec = Spec { tile, split: config.parts > 0, ..self.spec.clone() };
        let kernel = spec.clone().kernel();
        let (row_tiles, column_tiles) = (extents.m.div_ceil(u64::from(tile.rows())), extents.n.div_ceil(u64::from(tile.columns())));
        // Nothing to sum up is one sum over nothing.
        let mut boxes = self.boxes(tile);
        if boxes.is_empty() {
            boxes.push(Boxes { first: [0; 4], lengths: [0; 4] });
        }
        // Parts end at whole K-tiles.
        let part_depths: Vec<u64> = (boxes.iter())
            .map(|pixel_box| pixel_box.count().div_ceil(config.parts.max(1)).next_multiple_of(u64::from(DEPTH)).max(u64::from(DEPTH)))
            .collect();
        let counts: Vec<u64> = boxes.iter().zip(&part_depths).map(|(pixel_box, depth)| pixel_box.count().div_ceil(*depth).max(1)).collect();
        let group_bytes = extents.m * extents.n * spec.sum_bytes();
        let part_bytes = group_bytes * extents.groups;
        let all_parts: u64 = counts.iter().sum();
        let parts = spec.split.then(|| program.add_scratch("parts of sums", part_bytes * all_parts));
        let mut first_part = 0;
        for ((pixel_box, part_depth), count) in boxes.iter().zip(&part_depths).zip(&counts) {
            for chunk in Chunk::all(&[p.groups]) {
                let args = kernel::FilterArguments {
                    rows: extents.m as u32,
                    columns: extents.n as u32,
                    column_tiles: divisor(column_tiles),
                    row_tiles: divisor(row_tiles),
                    depth: pixel_box.count() as u32,
                    part_depth: *part_depth as u32,
                    pixel_box: pixel_box.arguments(),
                    batch: chunk.index(),
                    first_group: chunk.first[0] as u32,
                    steps: gradient_steps(p),
                    columns_of: FilterColumnsArguments::of(p),
                    group_channels: (p.c / p.groups) as u32,
                    x: StridedArguments::of(&p.x),
                    y: StridedArguments::of(&p.y),
                    prologue: spec.prologue.arguments(p),
                    parts: parts.map(|parts| PartsArguments { parts, part_bytes, group_bytes, first_part: first_part as u32 }),
                    epilogue: (!spec.split).then(|| spec.epilogue.conv_arguments(p)),
                };
                let [y, z] = chunk.grid();
                let grid = [(row_tiles * column_tiles * count) as u32, y, z];
                program.launch(Launch::new(kernel.clone(), grid, args.bound(&spec)));
            }
            first_part += count;
        }
        if let Some(parts) = parts {
            let split_k = reduction::Spec { arithmetic: spec.arithmetic, order: spec.order, epilogue: spec.epilogue.clone() };
            reduction::steps(p, &split_k, parts, [part_bytes, group_bytes], all_parts, program);
        }
    }
}
