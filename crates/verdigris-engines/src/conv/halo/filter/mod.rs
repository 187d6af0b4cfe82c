//! wgrad, `dw[k, t, c] = Σ dy[p, k] · x[p + t, c]` over the pixels `p` of y: pixels are the depth of the product.
//!
//! **Method.** A CTA goes over boxes of pixels. One tiled copy brings a box of dy, one the halo box of x that the box reads. Both lie in
//! shared memory pixel by pixel, so the depth of a product comes in runs of eight pixels along the width. Taps that lie side by side are
//! columns of one instruction. The sums of all the taps of a CTA stay in registers from its first box to its last; then they go to scratch,
//! and a second launch adds up what the CTAs formed. Or the CTAs that share a tile's pixels are a cluster and add up what they have
//! themselves ([`cluster_split_k`]); so are groups, side by side on the diagonal of a tile. What a box has outside of the image is zero in
//! dy, what a halo box has outside is the padding.
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
mod cover;
mod kernel;

use std::collections::HashMap;
use std::rc::Rc;

use cluster_split_k::{Bundles, ClusterSplitKSpec};
use cover::{Cover, PixelBox, boxes, orders};
use kernel::{CONSUMERS, FilterArgs, ROWS, Spec, TaskArgs, tap_table};
use verdigris_graph::{ConvProblem, Direction, GemmProblem, Matrix, Problem, Tensor};
use verdigris_kir::ir::Target;
use verdigris_kir::program::{Address, Base, KernelRef, Launch, Program};
use verdigris_tensor::DType;

use super::geometry::{Axes, BOX_AXES, axes, pixel_map, source_map};
use super::{ID, require};
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::conv::geometry::lines::tap_stride;
use crate::conv::geometry::matrices::product;
use crate::conv::geometry::tap_count;
use crate::cost::{self, Join, Loop, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal, empty_program};
use crate::fuse::epilogue::{EpilogueSpec, OperandSpec, Walk};
use crate::layout::batch::Chunk;
use crate::split_k::MOST_PARTS_BYTES;
use crate::split_k::reduction::{PartGrid, ReductionSpec};

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
/// Boxes of a shape and an order that are offered, and the most waves of CTAs that share them.
const BOXES_OF_ORDER: usize = 6;
const MOST_WAVES: u64 = 2;

/// The plain results of the catalog are stored in pairs; what is fused is made when asked for.
fn has_kernels(epilogue: &EpilogueSpec) -> bool {
    epilogue.pairs || !epilogue.is_plain()
}

/// What is asked of the result, and of sizes.
fn require_result(conv: &ConvProblem) -> Result<(), Refusal> {
    let dw = conv.w.dtype;
    ID.require(RESULTS.contains(&dw), Reason::DType, format_args!("a result of {dw}; takes bf16, f16 and f32"))?;
    ID.require(conv.statistics.is_none(), Reason::Epilogue, "sums over the channels of a filter's gradient")?;
    ID.require(
        conv.w.is_channels_last(),
        Reason::Layout,
        format_args!("a result with strides {:?}; its channels must be innermost", conv.w.strides),
    )?;
    ID.require(
        conv.groups == 1 || conv.c > conv.groups || conv.k > conv.groups,
        Reason::Extent,
        format_args!("{} groups of one channel, which `conv.depthwise` takes", conv.groups),
    )?;
    let extents = conv.gemm_extents();
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
    let matrix = |tensor: &Tensor| {
        let tap = tap_stride(tensor, conv.w_extents())?;
        let [row_stride, column_stride, ..] = tensor.strides;
        Some(Matrix { slot: tensor.slot, dtype: tensor.dtype, row_stride, column_stride, batch_strides: vec![tap] })
    };
    product(ID, conv, [conv.k, conv.c, extents.k], vec![tap_count(conv)], matrix)
}

impl Shape {
    /// CTAs of the clusters that there are kernels for.
    fn clusters(&self) -> &'static [u32] {
        if self.cluster_split_k { &CLUSTERS } else { &CLUSTERS[..1] }
    }

    /// The spec for clusters of `ctas`, where it has any, with `epilogue` behind their sums.
    fn spec(&self, dtype: DType, ctas: u32, epilogue: &EpilogueSpec) -> Spec {
        let Shape { channels, taps, units, stages, cluster_split_k } = *self;
        let cluster_split_k = cluster_split_k.then(|| ClusterSplitKSpec { ctas, epilogue: epilogue.clone() });
        Spec { dtype, channels, taps, units, stages, cluster_split_k }
    }
}

/// A shape on a problem.
struct Tiled {
    /// The number of the tile.
    shape: u32,
    /// The kernel; where clusters add up their sums, one for each size of [`CLUSTERS`].
    specs: Vec<Spec>,
    /// Tiles of channels of y and of x.
    tiles: [u32; 2],
    /// The groups that make these tiles, where clusters add up their sums.
    bundles: Option<Bundles>,
}

/// How the taps are dealt in an order of the axes of pixels, and the boxes that are worth a try, each with how many the pixels are.
struct Deal {
    order: u32,
    cover: Cover,
    boxes: Vec<(PixelBox, u64)>,
}

/// A tile, a box and how many CTAs share the pixels.
#[derive(Clone)]
pub(in crate::conv) struct Config {
    tiled: Rc<Tiled>,
    deal: Rc<Deal>,
    /// Which of the boxes.
    place: usize,
    /// CTAs that share the pixels.
    parts: u32,
}

impl Config {
    /// Whether parts are added up by a launch of their own.
    pub(super) fn adds_later(&self) -> bool {
        self.tiled.bundles.is_none()
    }

    fn spec(&self) -> &Spec {
        let specs = &self.tiled.specs;
        CLUSTERS.iter().zip(specs).find(|(ctas, _)| **ctas == self.parts).map_or(&specs[0], |(_, spec)| spec)
    }

    fn pixels(&self) -> &PixelBox {
        &self.deal.boxes[self.place].0
    }

    fn boxes(&self) -> u64 {
        self.deal.boxes[self.place].1
    }

    fn ctas(&self) -> u64 {
        let [rows, columns] = self.tiled.tiles.map(u64::from);
        rows * columns * self.deal.cover.groups.len() as u64 * u64::from(self.parts)
    }

    /// Bytes of a box and of its halo box.
    fn loaded_bytes(&self) -> u32 {
        let (spec, pixels) = (self.spec(), self.pixels());
        pixels.pixels() * spec.dy().row_bytes() + pixels.halo_box_pixels() * spec.x().row_bytes()
    }
}

/// An accepted problem.
pub(in crate::conv) struct Filter {
    arch: Arch,
    conv: ConvProblem,
    orders: Vec<Axes>,
    /// The result of a single group, as the launch that adds parts up knows it; and the epilogue where clusters do.
    product: Option<GemmProblem>,
    cluster_split_k: EpilogueSpec,
    /// What the main loops of all configs have in common.
    common: Loop,
    configs: Vec<Config>,
}

impl Filter {
    /// Nothing where the shape does not suit the problem.
    fn tiled(&self, number: u32, shape: &Shape) -> Option<Tiled> {
        let serves = if shape.cluster_split_k { has_kernels(&self.cluster_split_k) } else { self.product.is_some() };
        let bundles = if shape.cluster_split_k { Some(Bundles::new(&self.conv, shape.channels)?) } else { None };
        let dense = [self.conv.k.div_ceil(u64::from(ROWS)), self.conv.c.div_ceil(u64::from(shape.channels))];
        let tiles = bundles.map_or(dense, |bundles| bundles.grid());
        let spec = |&ctas: &u32| shape.spec(self.conv.x.dtype, ctas, &self.cluster_split_k);
        (serves && tiles.iter().all(|&tiles| tiles < COUNT_LIMIT)).then(|| Tiled {
            shape: number,
            specs: shape.clusters().iter().map(spec).collect(),
            tiles: tiles.map(|tiles| tiles as u32),
            bundles,
        })
    }

    fn deals(&self, taps: u32, units: u32) -> Vec<Rc<Deal>> {
        let deal = |(order, axes): (u32, &Axes)| {
            let cover = self.cover(axes, taps, units)?;
            let count = |pixels: &PixelBox| pixels.counts(axes).iter().fold(1u64, |all, &count| all.saturating_mul(count));
            let boxes = boxes(axes, cover.halo, BOX_PIXELS).into_iter().map(|pixels| (pixels, count(&pixels))).collect();
            Some(Rc::new(Deal { order, boxes, cover }))
        };
        (0..).zip(&self.orders).filter_map(deal).collect()
    }

    /// Along the axis that leaves the fewest taps idle, or the least halo.
    fn cover(&self, axes: &Axes, taps: u32, units: u32) -> Option<Cover> {
        let covers = (0..BOX_AXES).filter_map(|axis| Cover::new(axes, axis, u64::from(taps), units as usize));
        covers.min_by_key(|cover| (cover.groups.len(), cover.halo.iter().sum::<u64>()))
    }

    /// Tiles and parts, where a second launch adds these up.
    fn part_grid(&self, config: &Config) -> PartGrid {
        let [tile_rows, tile_columns] = config.tiled.tiles;
        let matrices = tap_count(&self.conv) as u32;
        PartGrid { tile: config.spec().part_tile(), tile_rows, tile_columns, matrices, parts: config.parts }
    }

    /// Whether there are as many boxes as parts, and no more of anything than a launch counts or scratch holds.
    fn fits(&self, config: &Config) -> bool {
        let grid = self.part_grid(config);
        let room = config.tiled.bundles.is_some() || grid.fits() && grid.scratch_bytes() <= MOST_PARTS_BYTES;
        u64::from(config.parts) <= config.boxes() && config.boxes() < COUNT_LIMIT && config.ctas() < COUNT_LIMIT && room
    }

    fn main_loop(&self, config: &Config) -> Loop {
        let (spec, bundles) = (config.spec(), config.tiled.bundles);
        let ctas = config.ctas() as f64;
        // A step is a box; it has instructions of sixteen pixels.
        let instructions = f64::from(config.pixels().pixels()) / 16.0 * f64::from(CONSUMERS * spec.units);
        let columns = f64::from(spec.columns());
        let loaded = f64::from(config.loaded_bytes());
        let resident = match bundles {
            Some(_) if config.parts > 1 => {
                // Measured, a few clusters less are resident than an empty chip has room for.
                let room = self.arch.resident_clusters_of(config.parts);
                f64::from((room - room / 16).max(1) * config.parts)
            }
            _ => f64::from(self.arch.sm_count),
        };
        let waves = (ctas / resident).ceil();
        let parts = f64::from(config.parts);
        let steps_of_part = config.boxes().div_ceil(u64::from(config.parts)) as f64;
        let cluster = if bundles.is_some() { parts } else { 1.0 };
        Loop {
            tile: [f64::from(ROWS), columns * f64::from(spec.units_of_cta())],
            tiles: ctas / parts,
            grid: ctas,
            resident,
            steps: config.boxes() as f64,
            longest_steps: waves * steps_of_part,
            longest_tiles: waves,
            parts,
            join: match (bundles.is_some(), config.parts > 1) {
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
            ..self.common
        }
    }

    /// The configs that are offered.
    fn listed(&self) -> Vec<Config> {
        // Shapes of as many taps and units have the same boxes.
        let mut deals: HashMap<[u32; 2], Vec<Rc<Deal>>> = HashMap::new();
        let mut configs = Vec::new();
        for (number, shape) in (0..).zip(SHAPES) {
            let Some(tiled) = self.tiled(number, shape) else { continue };
            let deals = deals.entry([shape.taps, shape.units]).or_insert_with(|| self.deals(shape.taps, CONSUMERS * shape.units));
            configs.extend(self.of_shape(&Rc::new(tiled), deals));
        }
        configs
    }

    /// The configs of a shape that are offered: several shares of a box, and several boxes.
    fn of_shape(&self, tiled: &Rc<Tiled>, deals: &[Rc<Deal>]) -> Vec<Config> {
        let spec = &tiled.specs[0];
        let mut configs: Vec<(u64, Config)> = Vec::new();
        for deal in deals {
            let fitting = deal.boxes.iter().enumerate().filter(|(_, (pixels, _))| spec.places(pixels).1 <= spec.stage_bytes());
            for (place, &(_, boxes)) in fitting {
                let config = |parts: u32| Config { tiled: tiled.clone(), deal: deal.clone(), place, parts };
                let whole = config(1);
                if !self.fits(&whole) {
                    continue;
                }
                // Into how many shares the boxes of a tile are worth cutting: any cluster's, or those of whole waves.
                let mut shares = CLUSTERS.to_vec();
                if tiled.bundles.is_none() {
                    let wave = |waves: u64| (u64::from(self.arch.sm_count) * waves / whole.ctas()).clamp(1, boxes) as u32;
                    shares = (1..=MOST_WAVES).map(wave).collect();
                    shares.dedup();
                }
                let fitting = shares.into_iter().map(config).filter(|config| self.fits(config));
                configs.extend(fitting.map(|config| (cost::order(&self.main_loop(&config), &self.arch), config)));
            }
        }
        configs.sort_by_key(|(order, _)| *order);
        let mut seen: Vec<(u32, usize)> = Vec::new();
        configs.retain(|(_, Config { deal, place, .. })| {
            let of_order = seen.iter().filter(|(order, _)| *order == deal.order).count();
            if !seen.contains(&(deal.order, *place)) && of_order < BOXES_OF_ORDER {
                seen.push((deal.order, *place));
            }
            seen.contains(&(deal.order, *place))
        });
        configs.into_iter().map(|(_, config)| config).collect()
    }

    /// The arguments of the kernel, whose table of taps stands at `taps`.
    fn task(&self, config: &Config, axes: &Axes, taps: Address) -> TaskArgs {
        let (spec, pixels, cover, parts, conv) = (config.spec(), config.pixels(), &config.deal.cover, config.parts, &self.conv);
        let boxed = |[width, height, depth]: [u32; 3]| [width, height, depth, 1];
        let dy = pixel_map(spec.dy().boxed(&boxed(pixels.extents)), conv.k, axes);
        let x = source_map(spec.x().boxed(&boxed(pixels.halo_box)), conv.c, axes);
        let in_place = |tensor: &Tensor| Address::buffer(tensor.slot.0 as usize);
        let [across, down, deep, _] = pixels.counts(axes).map(|count| count as u32);
        let (halo_box_at_bytes, _) = spec.places(pixels);
        let mut along = [0; BOX_AXES];
        along[cover.axis] = 1;
        let tap_step = cover.tap_step(axes) as u32;
        TaskArgs {
            dy: (in_place(&conv.y), dy),
            x: (in_place(&conv.x), x),
            ctas_of_part: (config.ctas() / u64::from(parts)) as u32,
            groups: cover.groups.len() as u32,
            tile_columns: config.tiled.tiles[1],
            least_boxes: config.boxes() as u32 / parts,
            parts_of_one_more: config.boxes() as u32 % parts,
            counts: [across, down, deep],
            extents: pixels.extents,
            halo_box_at_bytes,
            loaded_bytes: config.loaded_bytes(),
            steps: pixels.steps,
            of_box: pixels.of_box,
            of_halo_box: pixels.of_halo_box,
            tap_pixels: pixels.tap_pixels(axes, along) as u32,
            tap_step: if conv.flip { tap_step.wrapping_neg() } else { tap_step },
            taps,
        }
    }
}

impl Algorithm for Filter {
    const ID: EngineId = ID;
    const VERSION: u32 = 1;

    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let conv = require(problem, arch, &[Direction::Wgrad], MOST_TAPS)?;
        require_result(conv)?;
        // Several groups are no product.
        let product = if conv.groups == 1 { Some(as_product(conv)?) } else { None };
        let cluster_split_k = EpilogueSpec::of_conv(conv);
        let epilogue = product.as_ref().map_or_else(|| cluster_split_k.clone(), EpilogueSpec::of);
        ID.require(
            has_kernels(&epilogue),
            Reason::Layout,
            format_args!("a result with strides {:?}; its rows must begin at even elements", conv.w.strides),
        )?;
        // A pair is of one group, wherever rows begin.
        let of_group = conv.c / conv.groups;
        ID.require(
            !epilogue.pairs || of_group.is_multiple_of(2),
            Reason::Alignment,
            format_args!("{of_group} channels of x a group, which leave in pairs; takes even numbers"),
        )?;
        let mut accepted = Filter {
            arch: arch.clone(),
            product,
            cluster_split_k,
            orders: orders(axes(conv)),
            common: Loop::of_conv("conv.halo_wgrad", conv),
            conv: conv.clone(),
            configs: Vec::new(),
        };
        accepted.configs = accepted.listed();
        ID.require(
            !accepted.configs.is_empty(),
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
        self.configs.clone()
    }

    fn knobs(config: &Config) -> Knobs {
        let [wide, high, deep] = config.pixels().extents;
        let (shape, order, axis) = (config.tiled.shape, config.deal.order, config.deal.cover.axis as u32);
        let parts = config.parts;
        Knobs::new([("shape", shape), ("order", order), ("axis", axis), ("wide", wide), ("high", high), ("deep", deep), ("parts", parts)])
    }

    fn notes(&self, _: &Config) -> Notes {
        Notes { tensor_core: true, ..Notes::of(DType::F32) }
    }

    fn work(&self, config: &Config) -> Work {
        let parts = config.tiled.bundles.is_none().then(|| self.part_grid(config).work());
        Work::of(self.main_loop(config)).beside(parts)
    }

    fn lower(&self, config: &Config) -> Result<Program, Refusal> {
        let (spec, pixels, conv) = (config.spec(), config.pixels(), &self.conv);
        let axes = &self.orders[config.deal.order as usize];

        let mut program = empty_program(&conv.slots());
        program.constants.push(tap_table(axes, &config.deal.cover, pixels, conv.flip));
        let taps = Address { base: Base::Constant(0), offset_bytes: 0 };
        let task = self.task(config, axes, taps);
        let launch = |args: FilterArgs| Launch::new(spec.clone().kernel(), [config.ctas() as u32, 1, 1], args.bound(spec)).overlapping();
        if let Some((cluster_split_k, bundles)) = spec.cluster_split_k.as_ref().zip(config.tiled.bundles) {
            program.launch(launch(FilterArgs { task, parts: None, cluster_split_k: Some(cluster_split_k.args(conv, spec, &bundles)) }));
            return Ok(program);
        }
        let Some(product) = &self.product else { unreachable!("several groups are reduced within clusters") };
        // Taps are few enough for one launch.
        let Some(chunk) = Chunk::all(&product.batch).into_iter().next() else { unreachable!("a filter has taps") };
        let epilogue = EpilogueSpec::of(product);
        let grid = self.part_grid(config);
        let scratch = program.add_scratch("parts of the filter's gradient", grid.scratch_bytes());
        program.launch(launch(FilterArgs { task, parts: Some(grid.arguments(scratch)), cluster_split_k: None }));
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
        let kernels = TYPES.into_iter().flat_map(|dtype| {
            SHAPES
                .iter()
                .flat_map(move |shape| shape.clusters().iter().map(move |&ctas| shape.spec(dtype, ctas, &in_pairs(dtype)).kernel()))
        });
        let adds = TYPES
            .into_iter()
            .flat_map(|dtype| [1, SLICES].map(|slices| ReductionSpec { integer: false, slices, epilogue: in_pairs(dtype) }.kernel()));
        kernels.chain(adds).collect()
    }
}
