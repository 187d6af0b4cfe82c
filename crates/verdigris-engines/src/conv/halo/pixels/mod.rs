//! fprop and dgrad: rows of the product are pixels.
//!
//! **What.** Besides what [`super`] asks: several groups have multiples of 16 channels.
//!
//! **Method.** A tile is a box of pixels by some columns. The box is brought with its halo, a block of 16, 32 or 64 channels at a time, so
//! that 32 channels take 64 bytes instead of 128. Filters of few channels stay in shared memory for as long as a CTA lives. Groups of 16
//! and of 32 channels share a tile of 64: each multiplies its own channels of the halo box's pixels, into its own columns, by filters as
//! they are stored.
//!
//! | direction | rows | columns | depth |
//! |---|---|---|---|
//! | fprop | pixels of y | channels of y | taps, channels of x |
//! | dgrad | pixels of x | channels of x | taps from the last to the first, channels of y |
//!
//! **When it wins.** Up to about 128 channels on either side, and wherever filters have many taps; with groups of 16 channels and more.
//! **Numbers.** Products are exact; sums are kept in f32 by the tensor core in an order that the spec fixes, so repeats agree bit for bit.
//! Zeros around the image are multiplied, so an infinite filter element gives NaN there.
//! **Source:** own design; the main loop is that of CUTLASS's warp-specialized kernels.

mod boxes;
mod kernel;

use std::rc::Rc;

use boxes::{Cut, PixelBox, cuts};
use kernel::{HaloArgs, Spec, WalkArgs};
use verdigris_graph::problem::Order;
use verdigris_graph::{ConvProblem, Direction, GemmProblem, Matrix, Problem, Tensor};
use verdigris_kir::ir::Target;
use verdigris_kir::program::{Address, KernelRef, Launch, MapSpec, Program};
use verdigris_kir::tile::halo::HaloTile;
use verdigris_kir::tile::operand::Major;
use verdigris_tensor::DType;

use super::geometry::{Axes, axes, halo, map, source_map};
use super::{ID, require};
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::conv::geometry::lines::{filter_matrix, tap_stride};
use crate::conv::geometry::matrices::product;
use crate::conv::geometry::tap_count;
use crate::cost::{self, Loop, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal, empty_program};
use crate::fuse::epilogue::{EpilogueSpec, OperandSpec, Walk};
use crate::layout::batch::Chunk;
use crate::store::{StoreArgs, is_mappable};
use crate::sums::statistics;

/// One row of the table of tiles.
#[derive(Clone, Copy, Debug)]
struct Shape {
    channels: u32,
    /// Blocks of 64 pixels of a consumer, and columns.
    blocks: u32,
    tile_n: u32,
    /// Stages of the filters' ring; none where they are kept.
    stages: u32,
    /// Groups of a tile.
    groups: u32,
}

const fn kept(channels: u32, blocks: u32, tile_n: u32) -> Shape {
    Shape { channels, blocks, tile_n, stages: 0, groups: 1 }
}

const fn streamed(channels: u32, blocks: u32, tile_n: u32, stages: u32) -> Shape {
    Shape { channels, blocks, tile_n, stages, groups: 1 }
}

const fn grouped(blocks: u32, groups: u32) -> Shape {
    Shape { channels: 64, blocks, tile_n: 64, stages: 0, groups }
}

/// The tiles that the engine offers, by number; numbers are never reused, for plan caches hold them.
const SHAPES: &[Shape] = &[
    kept(64, 4, 64),
    kept(32, 4, 64),
    kept(16, 4, 64),
    kept(64, 4, 32),
    kept(32, 4, 32),
    kept(16, 4, 32),
    kept(64, 2, 96),
    kept(64, 2, 128),
    kept(32, 2, 128),
    streamed(64, 2, 64, 4),
    streamed(64, 2, 96, 4),
    streamed(16, 2, 96, 8),
    streamed(64, 2, 128, 4),
    streamed(32, 2, 128, 6),
    streamed(64, 2, 160, 4),
    streamed(64, 1, 192, 3),
    kept(64, 2, 48),
    kept(64, 2, 80),
    kept(64, 2, 144),
    streamed(64, 2, 80, 4),
    streamed(64, 2, 144, 4),
    kept(64, 1, 64),
    grouped(4, 2),
    grouped(4, 4),
    grouped(2, 2),
    grouped(2, 4),
    streamed(64, 2, 32, 4),
    streamed(64, 2, 48, 4),
];

/// The most boxes that are offered of a tile.
const BOXES_OF_SHAPE: usize = 10;

fn reference(spec: Spec) -> KernelRef {
    KernelRef::new(spec.to_string(), move || spec.build())
}

impl Shape {
    fn spec(&self, dtype: DType, filter: Major, epilogue: EpilogueSpec) -> Spec {
        let Shape { channels, blocks, tile_n, stages, groups, .. } = *self;
        Spec { dtype, channels, filter, tile_n, groups, blocks, stages, epilogue }
    }
}

/// Which sizes are taken.
fn require_extents(conv: &ConvProblem) -> Result<(), Refusal> {
    let (c, k) = (conv.c / conv.groups, conv.k / conv.groups);
    ID.require(
        conv.groups == 1 || c.is_multiple_of(16) && k.is_multiple_of(16),
        Reason::Extent,
        format_args!("{} groups of {c} and {k} channels; takes several groups of multiples of 16", conv.groups),
    )?;
    for (dim, filter) in conv.filter.into_iter().enumerate() {
        let reach = (filter - 1).saturating_mul(conv.dilations[dim]);
        ID.require(reach < 256, Reason::Extent, format_args!("a filter that reaches over {reach} pixels; takes 255"))?;
    }
    let channels = conv.c.max(conv.k);
    ID.require(channels <= MOST_CHANNELS, Reason::Extent, format_args!("{channels} channels; takes up to {MOST_CHANNELS}"))?;
    let most = conv.input.into_iter().chain(conv.output).chain(conv.pads_before).chain([conv.n]).max().unwrap_or(0);
    let pixels = |extents: [u64; 3]| extents.iter().fold(conv.n, |all, &extent| all.saturating_mul(extent));
    ID.require(
        most < 1 << 24 && pixels(conv.input).max(pixels(conv.output)) < 1 << 31,
        Reason::Extent,
        format_args!("{} images of {:?} pixels; takes below 2^31 in all", conv.n, conv.input),
    )
}

/// The most taps: their filters are announced to a barrier at once.
const MOST_TAPS: u64 = 512;
/// The most channels on either side.
const MOST_CHANNELS: u64 = 4096;

/// The problem in the kernel's terms.
struct View {
    conv: ConvProblem,
    axes: Axes,
    /// Whether the first tap is the filter's last element.
    backwards: bool,
    filter: Matrix,
    major: Major,
    /// The epilogue and D, as those of a product whose rows are pixels.
    product: GemmProblem,
    /// Channels of a group that are read, and that are written.
    depth: u64,
    columns: u64,
}

/// How a tile stands to the groups of a problem.
#[derive(Clone, Copy, Debug)]
struct Columns {
    /// Tiles of a group (or of a tile's groups), and over all groups.
    group_tiles: u64,
    tiles: u64,
    /// Groups that a tile's columns are of.
    groups: u64,
}

impl View {
    fn new(conv: &ConvProblem) -> Result<View, Refusal> {
        let forward = conv.direction == Direction::Fprop;
        let tap = tap_stride(&conv.w, conv.w_extents());
        let filter = Matrix { batch_strides: tap.into_iter().collect(), ..filter_matrix(&conv.w, forward) };
        let whole = |stride: u64| stride > 0 && (stride * 2).is_multiple_of(16) && stride < 1 << 38;
        let lies = filter.order() != Order::Strided
            && filter.leading_dimension().is_none_or(whole)
            && filter.batch_strides.first().is_some_and(|&tap| whole(tap));
        ID.require(
            lies,
            Reason::Layout,
            format_args!(
                "a filter with strides {:?}; one of its channels must be innermost, all else at multiples of 16 bytes",
                conv.w.strides
            ),
        )?;
        let (depth, columns) = if forward { (conv.c, conv.k) } else { (conv.k, conv.c) };
        let extents = conv.gemm_extents();
        let product = product(ID, conv, [extents.m, columns, extents.k], vec![], |tensor| tensor.as_matrix(conv.result_extents()))?;
        let (groups, all_columns) = (conv.groups, columns);
        let (depth, columns) = (depth / groups, columns / groups);
        let d = &product.d;
        ID.require(
            matches!(d.dtype.bytes(), 2 | 4) && d.column_stride == 1 && d.row_stride > 0 && is_mappable(d, all_columns),
            Reason::Layout,
            format_args!(
                "a result of {} with strides {:?}; its pixels must be lines at multiples of 16 bytes",
                d.dtype,
                conv.result().strides
            ),
        )?;
        let major = if filter.order() == Order::RowMajor { Major::Depth } else { Major::Rows };
        Ok(View { axes: axes(conv), backwards: conv.flip == forward, filter, major, product, depth, columns, conv: conv.clone() })
    }

    fn filter_map(&self, spec: &Spec) -> MapSpec {
        let leading = self.filter.leading_dimension().unwrap_or(1);
        let tap = self.filter.batch_strides.first().copied().unwrap_or(leading);
        // Filters of all groups follow each other along the channels of y.
        let [depth, columns] = match self.conv.direction {
            Direction::Fprop => [self.depth, self.columns * self.conv.groups],
            _ => [self.depth * self.conv.groups, self.columns],
        };
        let (inner, outer) = if self.major == Major::Depth { (depth, columns) } else { (columns, depth) };
        map(spec.filter_map(), vec![inner, outer, tap_count(&self.conv)], [leading, tap])
    }
}

/// A tile and a box for it.
#[derive(Clone, Debug)]
pub(in crate::conv) struct Config {
    /// The number of the tile.
    shape: u32,
    spec: Rc<Spec>,
    columns: Columns,
    cut: Cut,
    main: Loop,
}

/// An accepted problem.
pub(in crate::conv) struct Pixels {
    arch: Arch,
    view: View,
    epilogue: EpilogueSpec,
    configs: Vec<Config>,
}

impl Pixels {
    /// How tiles of a spec stand to the groups; nothing where they do not fit them.
    fn columns(&self, spec: &Spec) -> Option<Columns> {
        let View { conv, depth, columns, .. } = &self.view;
        let groups = u64::from(spec.groups);
        let fits = match (conv.groups, groups) {
            (1, 1) => true,
            // A tile writes whole columns: what lies beyond a group's is another one's.
            (_, 1) => columns.is_multiple_of(u64::from(spec.tile_n)),
            (all, _) => all > 1 && *depth == u64::from(spec.group_channels()) && *columns == u64::from(spec.group_columns()),
        };
        let group_tiles = if groups > 1 { 1 } else { columns.div_ceil(u64::from(spec.tile_n)) };
        fits.then(|| Columns { group_tiles, tiles: group_tiles * conv.groups.div_ceil(groups), groups })
    }

    fn channel_blocks(&self, spec: &Spec) -> u64 {
        (self.view.depth * u64::from(spec.groups)).div_ceil(u64::from(spec.channels))
    }

    /// Instruction steps of the last block of channels.
    fn last_steps(&self, spec: &Spec) -> u64 {
        (self.view.depth * u64::from(spec.groups) - (self.channel_blocks(spec) - 1) * u64::from(spec.channels)).div_ceil(16)
    }

    /// Taps' filters that are kept.
    fn kept(&self, spec: &Spec) -> Option<u32> {
        let tiles = tap_count(&self.view.conv) * self.channel_blocks(spec);
        // A barrier counts up to a mebibyte.
        u32::try_from(tiles).ok().filter(|&tiles| !spec.is_kept() || u64::from(tiles) * u64::from(spec.filter_bytes()) < 1 << 20)
    }

    fn halo_box_bytes(spec: &Spec, cut: &Cut) -> u64 {
        cut.halo_box_pixels() * u64::from(spec.pixels().row_bytes())
    }

    fn fits(&self, spec: &Spec, cut: &Cut) -> bool {
        self.kept(spec).is_some_and(|kept| Self::halo_box_bytes(spec, cut) <= u64::from(spec.halo_box_room_bytes(kept)))
    }

    /// CTAs for each tile of columns, and boxes.
    fn layout(&self, columns: Columns, cut: &Cut) -> [u64; 2] {
        let boxes = cut.counts(&self.view.axes).iter().product::<u64>();
        [(u64::from(self.arch.sm_count) / columns.tiles).clamp(1, boxes), boxes]
    }

    fn main_loop(&self, spec: &Spec, columns: Columns, cut: &Cut) -> Loop {
        let [workers, boxes] = self.layout(columns, cut);
        let (taps, channel_blocks) = (tap_count(&self.view.conv) as f64, self.channel_blocks(spec) as f64);
        let blocks = f64::from(spec.tile_blocks());
        let of_group = f64::from(spec.group_columns());
        // A step is a tap of a block of channels; of the last block, there may be fewer instructions.
        let instructions = (self.channel_blocks(spec) - 1) * u64::from(spec.steps()) + self.last_steps(spec);
        let instructions_of_step = instructions as f64 / channel_blocks;
        let steps = taps * channel_blocks;
        let filter_bytes = f64::from(spec.filter_bytes());
        let halo_bytes = Self::halo_box_bytes(spec, cut) as f64;
        let streamed = if spec.is_kept() { 0.0 } else { filter_bytes };
        // More tiles of columns than SMs are waves of CTAs.
        let sms = f64::from(self.arch.sm_count);
        let ctas = (columns.tiles * workers) as f64;
        let rounds = (ctas / sms).ceil();
        let tiles_of_cta = boxes.div_ceil(workers) as f64;
        let kernel = if columns.groups > 1 { "conv.halo groups" } else { "conv.halo" };
        Loop {
            tile: [blocks * 64.0, f64::from(spec.tile_n)],
            tiles: columns.tiles as f64 * boxes as f64,
            grid: ctas,
            resident: sms,
            steps,
            longest_steps: rounds * tiles_of_cta * steps,
            longest_tiles: rounds * tiles_of_cta,
            tensor_cycles: blocks * instructions_of_step * (of_group / 2.0),
            shared_bytes: blocks * instructions_of_step * (64.0 + of_group) * 32.0 + halo_bytes / taps + streamed,
            loaded_bytes: halo_bytes / taps + streamed,
            // Kept filters are loaded once by each CTA.
            tile_loaded_bytes: if spec.is_kept() { steps * filter_bytes / tiles_of_cta } else { 0.0 },
            threads: 384.0,
            stages: f64::from(spec.stages),
            ping_pong: spec.is_kept(),
            store_bytes: 16.0,
            ..Loop::of_conv(kernel, &self.view.conv)
        }
    }

    /// The boxes that fit a tile, the quickest first.
    fn boxes(&self, shape: u32) -> Vec<Config> {
        let dtype = self.view.conv.activations().dtype;
        let spec = SHAPES.get(shape as usize).map(|shape| shape.spec(dtype, self.view.major, self.epilogue.clone()));
        let Some((spec, columns)) = spec.and_then(|spec| self.columns(&spec).map(|columns| (spec, columns))) else { return Vec::new() };
        let spec = Rc::new(spec);
        let cuts = cuts(&self.view.axes, u64::from(spec.tile_blocks())).into_iter().filter(|cut| self.fits(&spec, cut));
        let config = |cut: Cut| Config { shape, columns, main: self.main_loop(&spec, columns, &cut), cut, spec: spec.clone() };
        let mut boxes: Vec<Config> = cuts.map(config).collect();
        boxes.sort_by_cached_key(|config| cost::order(&config.main, &self.arch));
        boxes
    }

    /// The arguments of the kernel's walk.
    fn walk(&self, config: &Config) -> WalkArgs {
        let View { axes, conv, .. } = &self.view;
        let Config { spec, columns, cut, .. } = config;
        let [workers, boxes] = self.layout(*columns, cut);
        let [channels, result] = [self.view.depth, self.view.columns].map(|of_group| (of_group * columns.groups) as u32);
        let [depth_step, column_step] = if conv.direction == Direction::Fprop { [0, result] } else { [channels, 0] };
        let advance = i64::from(spec.pixels().pixel_advance());
        let halo_box_bytes = Self::halo_box_bytes(spec, cut);
        let alignment = u64::from(HaloTile::ALIGNMENT_BYTES);
        let filters = if spec.is_kept() { self.kept(spec).unwrap_or(0) } else { spec.stages };
        let filters_bytes = u64::from(filters) * u64::from(spec.filter_bytes());
        let slot = |tensor: &Tensor| Address::buffer(tensor.slot.0 as usize);
        let number = |n: u64| n as u32;
        let but_images = |[width, height, depth, _]: [u64; 4]| [width, height, depth].map(number);
        let taps = number(tap_count(conv));
        let (first_position, position_step) = if self.view.backwards { (taps - 1, u32::MAX) } else { (0, 1) };
        WalkArgs {
            pixels: (
                slot(conv.activations()),
                source_map(spec.pixels().boxed(&cut.halo_box.map(number)), self.view.depth * conv.groups, axes),
            ),
            filter: (slot(&conv.w), self.view.filter_map(spec)),
            column_tiles: number(columns.tiles),
            group_tiles: number(columns.group_tiles),
            group_steps: [channels, result, depth_step, column_step],
            workers: number(workers),
            boxes: number(boxes),
            counts: but_images(cut.counts(axes)),
            extents: axes.map(|axis| number(axis.pixels)),
            box_extents: cut.pixels.extents.map(number),
            origin: [0, 1, 2].map(|i: usize| axes[i].origin as i32),
            halo_box: but_images(cut.halo_box),
            halo_box_bytes: number(halo_box_bytes),
            halo_box_pitch_bytes: number(halo_box_bytes.next_multiple_of(alignment)),
            halo_boxes_at_bytes: number(filters_bytes.next_multiple_of(alignment)),
            run_pitch: number(cut.run_pitch),
            blocks: cut.blocks.iter().map(|&block| number(block)).collect(),
            channel_blocks: number(self.channel_blocks(spec)),
            last_steps: number(self.last_steps(spec)),
            taps,
            filter_width: number(axes[0].filter),
            filter_height: number(axes[1].filter),
            tap_steps: cut.tap_steps(axes).map(|step| (step * advance) as u32),
            first_position,
            position_step,
        }
    }
}

impl Algorithm for Pixels {
    const ID: EngineId = ID;
    const VERSION: u32 = 1;

    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let conv = require(problem, arch, &[Direction::Fprop, Direction::Dgrad], MOST_TAPS)?;
        require_extents(conv)?;
        let view = View::new(conv)?;
        let whole = EpilogueSpec::of(&view.product);
        // Without operands there is nothing for a pair to save.
        let pairs = whole.pairs && whole.reads_memory();
        let epilogue = EpilogueSpec { stores_d: false, pairs, ..whole };
        let mut accepted = Pixels { arch: arch.clone(), view, epilogue, configs: Vec::new() };
        accepted.configs = (0..SHAPES.len() as u32).flat_map(|shape| accepted.boxes(shape).into_iter().take(BOXES_OF_SHAPE)).collect();
        let halo = halo(&accepted.view.axes);
        ID.require(
            !accepted.configs.is_empty(),
            Reason::SharedMemory,
            format_args!("a halo of {halo:?} pixels (width first) around boxes of 128 and more"),
        )?;
        Ok(accepted)
    }

    fn configs(&self) -> Vec<Config> {
        self.configs.clone()
    }

    fn knobs(config: &Config) -> Knobs {
        let PixelBox { extents: [width, height, depth, images], flat } = config.cut.pixels;
        let number = |n: u64| n as u32;
        Knobs::new([
            ("shape", config.shape),
            ("width", number(width)),
            ("height", number(height)),
            ("depth", number(depth)),
            ("images", number(images)),
            ("flat", u32::from(flat)),
        ])
    }

    fn notes(&self, _: &Config) -> Notes {
        Notes { tensor_core: true, ..Notes::of(DType::F32) }
    }

    fn work(&self, config: &Config) -> Work {
        Work::of(config.main).beside(statistics::work(&self.view.conv))
    }

    fn lower(&self, config: &Config) -> Result<Program, Refusal> {
        let Config { spec, columns, cut, .. } = config;
        let View { product, conv, .. } = &self.view;
        // A product without batch dims is one launch.
        let chunk = Chunk { first: vec![], extents: [1; 3] };
        let d = &product.d;
        let leading_bytes = d.row_stride * d.dtype.bytes() as u64;
        let extents = [product.m as u32, product.n as u32, 1];
        let args = HaloArgs {
            walk: self.walk(config),
            batch: chunk.index(),
            store: StoreArgs {
                epilogue: spec.epilogue.arguments(product, &chunk, 0, 0),
                place: spec.store().place(Address::buffer(d.slot.0 as usize), extents, leading_bytes, chunk.strides_bytes(d)),
                sums: None,
            },
        };
        let mut program = empty_program(&conv.slots());
        let [workers, _] = self.layout(*columns, cut);
        program.launch(Launch::new(reference(Spec::clone(spec)), [(columns.tiles * workers) as u32, 1, 1], args.bound(spec)).overlapping());
        if let Some(statistics) = &conv.statistics {
            statistics::steps(conv, statistics, &mut program);
        }
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        if target != Target::Sm90a {
            return Vec::new();
        }
        let types = [DType::Bf16, DType::F16];
        let with_shapes = types.into_iter().flat_map(|dtype| SHAPES.iter().map(move |shape| (dtype, shape)));
        with_shapes
            .flat_map(|(dtype, shape)| {
                let epilogue = EpilogueSpec::plain(OperandSpec { dtype, walk: Walk::Row });
                let epilogue = EpilogueSpec { stores_d: false, ..epilogue };
                [Major::Depth, Major::Rows].map(|filter| reference(shape.spec(dtype, filter, epilogue.clone())))
            })
            .collect()
    }
}
