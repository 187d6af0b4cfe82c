//! `conv.halo_wgrad`: filter gradients of convolutions, of groups too, whose pixels are loaded once for all taps of a filter.
//!
//! **What.** `dw[k, t, c] = Σ dy[p, k] · x[p + t, c]` over the pixels `p` of y, in one to three spatial dims, bf16 and f16, channels last,
//! strides of 1, any dilations and padding, any groups whose channels come by whole chunks of 8, every epilogue.
//!
//! **Method.** A CTA goes over boxes of pixels. One tiled copy brings a box of dy, one the halo box of x that the box reads: the box with
//! its halo. Both lie in shared memory pixel by pixel, so the depth of a product is pixels, in runs of eight along the width, and a tap is
//! nothing but another first pixel of the halo box ([`verdigris_kir::tile::halo_box`]). Taps that lie side by side are columns of one
//! instruction. The sums of all the taps of a CTA stay in registers from its first box to its last; then they go to scratch, and a second
//! launch adds up what the CTAs formed. Or the CTAs that share a tile's pixels are a cluster and add up what they have themselves
//! ([`cluster_split_k`]); so are groups, side by side on the diagonal of a tile. What a box has outside of the image is zero in dy, what a
//! halo box has outside is the padding.
//!
//! | | |
//! |---|---|
//! | rows | 64 channels of y |
//! | columns | taps of a group, 32 or 64 channels of x each |
//! | depth | pixels of y, shared among CTAs |
//!
//! **When it wins.** On compute capability 9.0, where `conv.implicit_gemm`, which loads x once for every tap and dy once for every few,
//! waits for its loads: up to a few hundred channels and many pixels.
//!
//! **Numbers.** Products are exact; sums are kept in f32 by the tensor core, in an order fixed by the config, so repeats agree bit for bit.
//! Zeros around x and y are multiplied: an infinite or undefined element gives NaN also to taps of pixels at the edge that it should not
//! meet.
//!
//! **Source:** own; boxes of pixels that all taps share are those of direct convolutions on any cache.

mod cluster_split_k;
mod geometry;
mod kernel;

use std::rc::Rc;

use cluster_split_k::{Bundles, ClusterSplitKSpec};
use geometry::{AXES, Axis, Cover, PixelBox, boxes, orders};
use kernel::{CONSUMERS, HaloWgradArgs, ROWS, Spec, TaskArgs, tap_table};
use verdigris_graph::{ConvProblem, Direction, GemmProblem, Matrix, Precision, Problem, Tensor};
use verdigris_kir::ir::{MapDecl, Target};
use verdigris_kir::program::{Address, Base, KernelRef, L2Promotion, Launch, MapSpec, Program};
use verdigris_tensor::DType;

use super::empty_program;
use super::geometry::lines::{lies_in_lines, tap_stride};
use super::geometry::matrices::product;
use super::geometry::tap_count;
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{self, Join, Loop, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::epilogue::{EpilogueSpec, OperandSpec, Walk};
use crate::layout::batch::Chunk;
use crate::split_k::reduction::{PartGrid, ReductionSpec};

const ID: EngineId = EngineId { name: "conv.halo_wgrad", number: 209 };

/// The part of a spec that is chosen.
#[derive(Clone, Copy, Debug)]
struct Shape {
    channels: u32,
    taps: u32,
    units: u32,
    stages: u32,
    /// Whether the CTAs of a cluster share the pixels of a tile, and add up their sums themselves.
    cluster_split_k: bool,
}

const fn shape(channels: u32, taps: u32, units: u32, stages: u32) -> Shape {
    Shape { channels, taps, units, stages, cluster_split_k: false }
}

const fn cluster_split_k(channels: u32, taps: u32, units: u32, stages: u32) -> Shape {
    Shape { channels, taps, units, stages, cluster_split_k: true }
}

/// The tiles that the engine offers, by number; numbers are never reused, for plan caches hold them.
const SHAPES: &[Shape] = &[
    shape(64, 3, 1, 3),
    shape(64, 3, 1, 5),
    shape(64, 1, 3, 4),
    shape(64, 2, 1, 4),
    shape(64, 2, 2, 4),
    shape(32, 3, 1, 4),
    shape(32, 3, 2, 3),
    shape(32, 5, 1, 4),
    shape(32, 1, 3, 4),
    cluster_split_k(64, 3, 1, 3),
    cluster_split_k(32, 3, 1, 4),
    cluster_split_k(64, 1, 1, 4),
    cluster_split_k(32, 1, 1, 5),
];

/// CTAs of the clusters that add up sums.
const CLUSTERS: [u32; 4] = [1, 2, 4, 8];

/// Operands, and their usual results; others, and fused chains, are made when asked for.
const TYPES: [DType; 2] = [DType::Bf16, DType::F16];
/// Results that are stored.
const RESULTS: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];
/// Threads that share the parts of four elements, where parts are more than that.
const SLICES: u32 = 8;
/// Pixels of a box.
const BOX_PIXELS: [u32; 2] = [32, 320];
/// The most scratch for parts.
const MOST_PARTS_BYTES: u64 = 512 << 20;
/// Boxes of a shape and an order that are offered, and the most waves of CTAs that share them.
const BOXES_OF_ORDER: usize = 6;
const MOST_WAVES: u64 = 2;

/// The plain results of the catalog are stored in pairs; what is fused is made when asked for.
fn has_kernels(epilogue: &EpilogueSpec) -> bool {
    epilogue.pairs || !epilogue.is_plain()
}

/// What this engine multiplies.
fn require_operands(conv: &ConvProblem) -> Result<(), Refusal> {
    ID.require(conv.direction == Direction::Wgrad, Reason::Problem, format_args!("{:?}; takes wgrad", conv.direction))?;
    let (x, dy, dw) = (conv.x.dtype, conv.y.dtype, conv.w.dtype);
    ID.require(x == dy && TYPES.contains(&x), Reason::DType, format_args!("{dy} and {x}; takes bf16 or f16"))?;
    ID.require(RESULTS.contains(&dw), Reason::DType, format_args!("a result of {dw}; takes bf16, f16 and f32"))?;
    ID.require(conv.precision == Precision::Fp32, Reason::Precision, format_args!("{:?} of {dy} and {x}; takes fp32", conv.precision))?;
    ID.require(
        conv.prologue.is_empty(),
        Reason::Epilogue,
        format_args!("{} steps on the activations; takes them as they are stored", conv.prologue.len()),
    )?;
    ID.require(conv.statistics.is_none(), Reason::Epilogue, "sums over the channels of a filter's gradient")
}

/// What TMA reads.
fn require_layout(conv: &ConvProblem) -> Result<(), Refusal> {
    for (name, tensor) in [("x", &conv.x), ("dy", &conv.y)] {
        ID.require(
            lies_in_lines(tensor),
            Reason::Layout,
            format_args!("{name} with strides {:?}; channels must be innermost and pixels begin at multiples of 16 bytes", tensor.strides),
        )?;
    }
    ID.require(
        conv.w.is_channels_last(),
        Reason::Layout,
        format_args!("a result with strides {:?}; its channels must be innermost", conv.w.strides),
    )?;
    for (name, channels) in [("x", conv.c), ("y", conv.k)] {
        ID.require(channels.is_multiple_of(8), Reason::Alignment, format_args!("{channels} channels of {name}; takes multiples of 8"))?;
    }
    Ok(())
}

fn require_extents(conv: &ConvProblem) -> Result<(), Refusal> {
    ID.require(
        conv.groups == 1 || conv.c > conv.groups || conv.k > conv.groups,
        Reason::Extent,
        format_args!("{} groups of one channel, which `conv.depthwise` takes", conv.groups),
    )?;
    ID.require(conv.strides == [1; 3], Reason::Extent, format_args!("strides {:?}; takes 1", conv.strides))?;
    let extents = conv.gemm_extents();
    ID.require(
        !conv.is_empty() && extents.k > 0,
        Reason::Extent,
        format_args!("{} channels of y, {} of x by taps, {} pixels; none may be 0", extents.m, extents.n, extents.k),
    )?;
    let taps = tap_count(conv);
    ID.require(
        (2..=MOST_TAPS).contains(&taps),
        Reason::Extent,
        format_args!("a filter of {taps} elements; takes 2 to {MOST_TAPS}, for a single one is a product"),
    )?;
    ID.require(
        extents.k < COUNT_LIMIT && conv.k < COUNT_LIMIT && extents.n < COUNT_LIMIT,
        Reason::Extent,
        format_args!("{} pixels, {} and {} rows and columns; takes below 2^30", extents.k, extents.m, extents.n),
    )
}

/// The most taps of a filter.
const MOST_TAPS: u64 = 1 << 10;
/// Pixels, rows and columns stay below this.
const COUNT_LIMIT: u64 = 1 << 30;

/// The result and its epilogue as a stack of matrices, one a tap.
fn as_product(conv: &ConvProblem) -> Result<GemmProblem, Refusal> {
    let extents = conv.gemm_extents();
    let taps = conv.filter.iter().product();
    let matrix = |tensor: &Tensor| {
        let tap = tap_stride(tensor, conv.w_extents())?;
        let [row_stride, column_stride, ..] = tensor.strides;
        Some(Matrix { slot: tensor.slot, dtype: tensor.dtype, row_stride, column_stride, batch_strides: vec![tap] })
    };
    product(ID, conv, [conv.k, conv.c, extents.k], vec![taps], matrix)
}

impl Shape {
    /// The spec for clusters of `ctas`, where it has any, with `epilogue` behind their sums.
    fn spec(&self, dtype: DType, ctas: u32, epilogue: &EpilogueSpec) -> Spec {
        let Shape { channels, taps, units, stages, cluster_split_k } = *self;
        let cluster_split_k = cluster_split_k.then(|| ClusterSplitKSpec { ctas, epilogue: epilogue.clone() });
        Spec { dtype, channels, taps, units, stages, cluster_split_k }
    }
}

/// A tile, a box and how many CTAs share the pixels, worked out.
#[derive(Clone)]
pub(super) struct Config {
    /// The number of the tile.
    shape: u32,
    spec: Spec,
    /// The order of the axes of pixels.
    order: u32,
    cover: Rc<Cover>,
    pixels: PixelBox,
    boxes: u64,
    /// Tiles of channels of y and of x.
    tiles: [u32; 2],
    /// The groups that make these tiles, where clusters add up their sums.
    bundles: Option<Bundles>,
    /// CTAs that share the pixels.
    parts: u32,
    main: Loop,
}

impl Config {
    fn ctas(&self) -> u64 {
        u64::from(self.tiles[0]) * u64::from(self.tiles[1]) * self.cover.groups.len() as u64 * u64::from(self.parts)
    }
}

/// An accepted problem.
pub(super) struct HaloWgrad {
    arch: Arch,
    conv: ConvProblem,
    orders: Vec<[Axis; AXES]>,
    /// The result of a single group, as the launch that adds parts up knows it; and the epilogue where clusters do.
    product: Option<GemmProblem>,
    cluster_split_k: EpilogueSpec,
}

impl HaloWgrad {
    /// The spec of a shape for so many CTAs that share the pixels.
    fn spec(&self, shape: &Shape, parts: u32) -> Option<Spec> {
        let serves =
            if shape.cluster_split_k { has_kernels(&self.cluster_split_k) && CLUSTERS.contains(&parts) } else { self.product.is_some() };
        serves.then(|| shape.spec(self.conv.x.dtype, parts, &self.cluster_split_k))
    }

    /// Along the axis that leaves the fewest taps idle, or the least halo.
    fn cover(&self, spec: &Spec, axes: &[Axis; AXES]) -> Option<Rc<Cover>> {
        let units = spec.units_of_cta() as usize;
        let covers = (0..geometry::BOX_AXES).filter_map(|axis| Cover::new(axes, axis, u64::from(spec.taps), units));
        covers.min_by_key(|cover| (cover.groups.len(), cover.halo.iter().sum::<u64>())).map(Rc::new)
    }

    /// Tiles and parts, where a second launch adds these up.
    fn part_grid(&self, config: &Config) -> PartGrid {
        let [tile_rows, tile_columns] = config.tiles;
        let matrices = self.conv.filter.iter().product::<u64>() as u32;
        PartGrid { tile: config.spec.part_tile(), tile_rows, tile_columns, matrices, parts: config.parts }
    }

    /// Nothing where the box does not fit the problem or the chip.
    fn config(&self, shape: u32, parts: u32, order: u32, cover: &Rc<Cover>, pixels: PixelBox) -> Option<Config> {
        let spec = self.spec(SHAPES.get(shape as usize)?, parts)?;
        let (_, bytes) = spec.places(&pixels);
        if bytes > spec.stage_bytes() || parts == 0 {
            return None;
        }
        let boxes = pixels.counts(self.orders.get(order as usize)?).iter().fold(1u64, |all, &count| all.saturating_mul(count));
        let bundles = match spec.cluster_split_k {
            Some(_) => Some(Bundles::new(&self.conv, spec.channels)?),
            None => None,
        };
        let dense = [self.conv.k.div_ceil(u64::from(ROWS)), self.conv.c.div_ceil(u64::from(spec.channels))];
        let tiles = bundles.map_or(dense, |bundles| bundles.grid());
        if tiles.iter().any(|&tiles| tiles >= COUNT_LIMIT) {
            return None;
        }
        let tiles = tiles.map(|tiles| tiles as u32);
        let config = Config { shape, spec, order, cover: cover.clone(), pixels, boxes, tiles, bundles, parts, main: Loop::default() };
        let grid = self.part_grid(&config);
        let room = bundles.is_some() || grid.fits() && grid.scratch_bytes() <= MOST_PARTS_BYTES;
        let fits = u64::from(parts) <= boxes && boxes < COUNT_LIMIT && config.ctas() < COUNT_LIMIT && room;
        fits.then(|| Config { main: self.main_loop(&config), ..config })
    }

    fn main_loop(&self, config: &Config) -> Loop {
        let spec = &config.spec;
        let ctas = config.ctas() as f64;
        // A step is a box; it has instructions of sixteen pixels.
        let instructions = f64::from(config.pixels.pixels()) / 16.0 * f64::from(CONSUMERS * spec.units);
        let columns = f64::from(spec.columns());
        let loaded =
            f64::from(config.pixels.pixels() * spec.dy().row_bytes()) + f64::from(config.pixels.halo_box_pixels() * spec.x().row_bytes());
        let resident = match config.bundles {
            Some(_) if config.parts > 1 => {
                // Measured, a few clusters less are resident than an empty chip has room for.
                let room = self.arch.resident_clusters_of(config.parts);
                f64::from((room - room / 16).max(1) * config.parts)
            }
            _ => f64::from(self.arch.sm_count),
        };
        let waves = (ctas / resident).ceil();
        let parts = f64::from(config.parts);
        let steps_of_part = config.boxes.div_ceil(u64::from(config.parts)) as f64;
        let cluster = if config.bundles.is_some() { parts } else { 1.0 };
        Loop {
            tile: [f64::from(ROWS), columns * f64::from(spec.units_of_cta())],
            tiles: ctas / parts,
            grid: ctas,
            resident,
            steps: config.boxes as f64,
            longest_steps: waves * steps_of_part,
            longest_tiles: waves,
            parts,
            join: match (config.bundles.is_some(), config.parts > 1) {
                (true, true) => Join::Cluster,
                (true, false) => Join::None,
                (false, _) => Join::Launch,
            },
            tensor_cycles: instructions * columns / 2.0,
            shared_bytes: instructions * (64.0 + columns) * 32.0 + loaded,
            loaded_bytes: loaded,
            threads: 384.0,
            cluster,
            stages: f64::from(spec.stages),
            ..Loop::of_conv("conv.halo_wgrad", &self.conv)
        }
    }

    /// The configs of a shape that are offered: several shares of a box, and several boxes.
    fn of_shape(&self, shape: u32) -> Vec<Config> {
        let Some(spec) = SHAPES.get(shape as usize).and_then(|shape| self.spec(shape, 1)) else { return Vec::new() };
        let mut configs: Vec<Config> = Vec::new();
        for (order, axes) in (0..).zip(&self.orders) {
            let Some(cover) = self.cover(&spec, axes) else { continue };
            for pixels in boxes(axes, cover.halo, BOX_PIXELS) {
                let config = |parts: u32| self.config(shape, parts, order, &cover, pixels);
                // Into how many shares the boxes of a tile are worth cutting: any cluster's, or those of whole waves.
                let mut shares = CLUSTERS.to_vec();
                if spec.cluster_split_k.is_none() {
                    let Some(whole) = config(1) else { continue };
                    let wave = |waves: u64| (u64::from(self.arch.sm_count) * waves / whole.ctas()).clamp(1, whole.boxes) as u32;
                    shares = (1..=MOST_WAVES).map(wave).collect();
                    shares.dedup();
                }
                configs.extend(shares.into_iter().filter_map(config));
            }
        }
        configs.sort_by_cached_key(|config| cost::order(&config.main, &self.arch));
        let mut seen: Vec<(u32, [u32; 3])> = Vec::new();
        configs.retain(|config| {
            let chosen = (config.order, config.pixels.extents);
            let of_order = seen.iter().filter(|(order, _)| *order == config.order).count();
            if !seen.contains(&chosen) && of_order < BOXES_OF_ORDER {
                seen.push(chosen);
            }
            seen.contains(&chosen)
        });
        configs
    }

    /// The map of x or dy.
    fn map(&self, decl: MapDecl, channels: u64, extents: [u64; AXES], strides: [u64; AXES]) -> MapSpec {
        let bytes = decl.ty.bytes() as u64;
        MapSpec {
            decl,
            dims: [channels].into_iter().chain(extents).collect(),
            strides_bytes: strides.map(|stride| stride * bytes).to_vec(),
            element_strides: vec![1; AXES + 1],
            lower_corner: vec![],
            upper_corner: vec![],
            fill: Default::default(),
            l2: L2Promotion::B256,
        }
    }

    /// The arguments of the kernel, whose table of taps stands at `taps`.
    fn task(&self, config: &Config, axes: &[Axis; AXES], taps: Address) -> TaskArgs {
        let Config { spec, cover, pixels, tiles, parts, .. } = config;
        let conv = &self.conv;
        let boxed = |[width, height, depth]: [u32; 3]| [width, height, depth, 1];
        let dy = self.map(spec.dy().boxed(&boxed(pixels.extents)), conv.k, axes.map(|axis| axis.output), axes.map(|axis| axis.y_stride));
        let x = self.map(spec.x().boxed(&boxed(pixels.halo_box)), conv.c, axes.map(|axis| axis.input), axes.map(|axis| axis.x_stride));
        let in_place = |tensor: &Tensor| Address::buffer(tensor.slot.0 as usize);
        let [across, down, deep, _] = pixels.counts(axes).map(|count| count as u32);
        let (halo_box_at_bytes, _) = spec.places(pixels);
        let mut along = [0; geometry::BOX_AXES];
        along[cover.axis] = 1;
        let tap_step = cover.tap_step(axes) as u32;
        TaskArgs {
            dy: (in_place(&conv.y), dy),
            x: (in_place(&conv.x), x),
            ctas_of_part: (config.ctas() / u64::from(*parts)) as u32,
            groups: cover.groups.len() as u32,
            tile_columns: tiles[1],
            least_boxes: config.boxes as u32 / parts,
            parts_of_one_more: config.boxes as u32 % parts,
            counts: [across, down, deep],
            extents: pixels.extents,
            halo_box_at_bytes,
            loaded_bytes: pixels.pixels() * spec.dy().row_bytes() + pixels.halo_box_pixels() * spec.x().row_bytes(),
            steps: pixels.steps,
            of_box: pixels.of_box,
            of_halo_box: pixels.of_halo_box,
            tap_pixels: pixels.tap_pixels(axes, along) as u32,
            tap_step: if conv.flip { tap_step.wrapping_neg() } else { tap_step },
            taps,
        }
    }
}

impl Algorithm for HaloWgrad {
    const ID: EngineId = ID;
    const VERSION: u32 = 1;

    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Conv(conv) = problem else {
            return Err(ID.refusal(Reason::Problem, "takes convolutions"));
        };
        ID.require(arch.runs(Target::Sm90a), Reason::Target, format_args!("compute capability {:?}, needs (9, 0)", arch.capability))?;
        require_operands(conv)?;
        require_layout(conv)?;
        require_extents(conv)?;
        // Several groups are no product.
        let product = if conv.groups == 1 { Some(as_product(conv)?) } else { None };
        let cluster_split_k = EpilogueSpec::of_conv(conv);
        let epilogue = product.as_ref().map_or_else(|| cluster_split_k.clone(), EpilogueSpec::of);
        ID.require(
            has_kernels(&epilogue),
            Reason::Layout,
            format_args!("a result with strides {:?}; its rows must begin at even elements", conv.w.strides),
        )?;
        let accepted = HaloWgrad { arch: arch.clone(), product, cluster_split_k, orders: orders(conv), conv: conv.clone() };
        ID.require(
            (0..SHAPES.len() as u32).any(|shape| !accepted.of_shape(shape).is_empty()),
            Reason::SharedMemory,
            format_args!(
                "no halo box of a filter of {:?} with dilations {:?} has room, for {} groups of {} and {} channels",
                conv.filter,
                conv.dilations,
                conv.groups,
                conv.c / conv.groups,
                conv.k / conv.groups
            ),
        )?;
        Ok(accepted)
    }

    fn configs(&self) -> Vec<Config> {
        (0..SHAPES.len() as u32).flat_map(|shape| self.of_shape(shape)).collect()
    }

    fn knobs(config: &Config) -> Knobs {
        let [wide, high, deep] = config.pixels.extents;
        let Config { shape, order, parts, .. } = *config;
        let axis = config.cover.axis as u32;
        Knobs::new([("shape", shape), ("order", order), ("axis", axis), ("wide", wide), ("high", high), ("deep", deep), ("parts", parts)])
    }

    fn notes(&self, _: &Config) -> Notes {
        Notes { tensor_core: true, ..Notes::of(DType::F32) }
    }

    fn work(&self, config: &Config) -> Work {
        let parts = config.bundles.is_none().then(|| self.part_grid(config).work());
        Work::of(config.main).beside(parts)
    }

    fn lower(&self, config: &Config) -> Result<Program, Refusal> {
        let Config { spec, cover, pixels, .. } = config;
        let conv = &self.conv;
        let axes = &self.orders[config.order as usize];

        let mut program = empty_program(conv);
        program.constants.push(tap_table(axes, cover, pixels, conv.flip));
        let taps = Address { base: Base::Constant(0), offset_bytes: 0 };
        let task = self.task(config, axes, taps);
        let launch = |args: HaloWgradArgs| Launch::new(spec.clone().kernel(), [config.ctas() as u32, 1, 1], args.bound(spec)).overlapping();
        if let Some((cluster_split_k, bundles)) = spec.cluster_split_k.as_ref().zip(config.bundles) {
            program.launch(launch(HaloWgradArgs { task, parts: None, cluster_split_k: Some(cluster_split_k.args(conv, spec, &bundles)) }));
            return Ok(program);
        }
        let Some(product) = &self.product else { unreachable!("several groups are reduced within clusters") };
        // Taps are few enough for one launch.
        let Some(chunk) = Chunk::all(&product.batch).into_iter().next() else { unreachable!("a filter has taps") };
        let epilogue = EpilogueSpec::of(product);
        let grid = self.part_grid(config);
        let scratch = program.add_scratch("parts of the filter's gradient", grid.scratch_bytes());
        program.launch(launch(HaloWgradArgs { task, parts: Some(grid.arguments(scratch)), cluster_split_k: None }));
        let epilogue_args = epilogue.arguments(product, &chunk, 0, 0);
        let slices = if config.parts >= SLICES { SLICES } else { 1 };
        let adds = ReductionSpec { integer: false, slices, epilogue };
        program.launch(grid.launch(adds, scratch, chunk.index(), epilogue_args, [conv.k as u32, conv.c as u32]));
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        if target != Target::Sm90a {
            return Vec::new();
        }
        let in_pairs = |dtype| EpilogueSpec { pairs: true, ..EpilogueSpec::plain(OperandSpec { dtype, walk: Walk::Row }) };
        let clusters = |shape: &Shape| if shape.cluster_split_k { &CLUSTERS[..] } else { &CLUSTERS[..1] };
        let kernels = TYPES.into_iter().flat_map(|dtype| {
            SHAPES.iter().flat_map(move |shape| clusters(shape).iter().map(move |&ctas| shape.spec(dtype, ctas, &in_pairs(dtype)).kernel()))
        });
        let adds = TYPES
            .into_iter()
            .flat_map(|dtype| [1, SLICES].map(|slices| ReductionSpec { integer: false, slices, epilogue: in_pairs(dtype) }.kernel()));
        kernels.chain(adds).collect()
    }
}
