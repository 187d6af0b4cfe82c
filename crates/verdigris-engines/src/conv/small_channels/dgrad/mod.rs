//! dgrad: how a problem is laid out for its kernel ([`kernel`]).
//!
//! Along each dimension dx is cut into blocks of as many pixels as the stride `s`. Block `i` meets the pixels `i + j` of dy for which
//! `s·i + ρ + pad = (i + j) · s + r · dilation` with `0 ≤ ρ < s` and a tap `r`: those with
//! `⌈(pad − (R − 1) · dilation) / s⌉ ≤ j ≤ ⌊(s − 1 + pad) / s⌋`, the block's window. Pixel `ρ` of a block meets `j` with tap
//! `(ρ + pad − j · s) / dilation`, where that is a tap, and with a zero elsewhere.

mod kernel;

use verdigris_graph::{ConvProblem, Slot};
use verdigris_kir::inst::MatrixType;
use verdigris_kir::ir::Ty;
use verdigris_kir::program::{Address, Arg, Base, KernelRef, Launch, Program, Residency, Step};

use super::geometry::NO_ELEMENT;
use super::{COUNT_LIMIT, Plan, TYPES, wgrad};
use crate::arch::Arch;
use crate::conv::geometry::filter_tap;
use crate::cost::{self, Loop, Work};
use crate::engine::Knobs;
use crate::fuse::epilogue::{EpilogueSpec, OperandSpec};
use kernel::{BOX_BLOCKS, PIXEL_BYTES, Spec, Tile, WINDOW_BYTES};

/// The most configs that are offered.
const CONFIGS: usize = 12;

/// The most columns: pixels of a block by channels.
const MOST_COLUMNS: u64 = 1 << 12;

/// One dimension of a block.
#[derive(Clone, Copy, Debug)]
struct Axis {
    /// Pixels of a block.
    block: u64,
    /// Blocks of dx.
    blocks: u64,
    /// The first pixel of dy that block 0 meets, and how many there are.
    first: i64,
    window: u64,
}

impl Axis {
    fn new(p: &ConvProblem, dim: usize) -> Axis {
        let block = p.strides[dim];
        let (stride, pad) = (p.strides[dim] as i64, p.pads_before[dim] as i64);
        let reach = ((p.filter[dim] - 1) * p.dilations[dim]) as i64;
        let first = -((reach - pad).div_euclid(stride));
        let last = (block as i64 - 1 + pad).div_euclid(stride);
        Axis { block, blocks: p.input[dim].div_ceil(block), first, window: (last - first + 1) as u64 }
    }

    /// The tap by which pixel `within` of a block meets pixel `j` of its window.
    fn tap(&self, p: &ConvProblem, dim: usize, within: u64, j: u64) -> Option<u64> {
        let distance = within as i64 + p.pads_before[dim] as i64 - (self.first + j as i64) * p.strides[dim] as i64;
        let distance = u64::try_from(distance).ok().filter(|distance| distance.is_multiple_of(p.dilations[dim]))?;
        Some(distance / p.dilations[dim]).filter(|tap| *tap < p.filter[dim])
    }
}

/// One way to lay a problem out, a config.
#[derive(Clone, Copy, Debug)]
struct Config {
    tile: Tile,
    axes: [Axis; 3],
    /// Blocks of a box.
    rows: u64,
    columns: u64,
}

impl Config {
    /// Columns of the product.
    fn width(&self, p: &ConvProblem) -> u64 {
        self.axes.iter().fold(p.c, |product, axis| product.saturating_mul(axis.block))
    }

    /// Taps of a window's K-tile.
    fn taps(&self) -> u64 {
        self.axes[1].window.saturating_mul(self.axes[2].window)
    }

    /// Rows and columns of a box's window.
    fn window(&self) -> [u64; 2] {
        let [_, down, across] = self.axes;
        [self.rows - 1 + down.window, self.columns - 1 + across.window]
    }

    fn k_tiles(&self, p: &ConvProblem) -> u64 {
        channel_k_tiles(p).saturating_mul(self.axes[0].window)
    }

    fn boxes(&self, p: &ConvProblem) -> u64 {
        let [depth, down, across] = self.axes;
        p.n * depth.blocks * down.blocks.div_ceil(self.rows) * across.blocks.div_ceil(self.columns)
    }

    /// Whether its tile has room for the filters and the window.
    fn fits(&self, p: &ConvProblem) -> bool {
        let row_bytes = self.k_tiles(p).saturating_mul(self.taps()).saturating_mul(u64::from(PIXEL_BYTES));
        let [rows, columns] = self.window();
        self.width(p) <= MOST_COLUMNS
            && row_bytes.saturating_add(16).saturating_mul(u64::from(self.tile.columns)) <= u64::from(self.tile.filter_bytes())
            && rows.saturating_mul(columns) * u64::from(PIXEL_BYTES) <= u64::from(WINDOW_BYTES)
            && self.boxes(p) < COUNT_LIMIT
    }

    /// A step is one of the product's: 32 bytes of a tap's channels.
    fn main_loop(&self, p: &ConvProblem, sms: u32) -> Loop {
        let column_tiles = self.width(p).div_ceil(u64::from(self.tile.columns));
        let steps = (self.k_tiles(p) * self.taps() * u64::from(PIXEL_BYTES / 32)) as f64;
        let columns = f64::from(self.tile.columns);
        let [rows, across] = self.window();
        let window_bytes = self.k_tiles(p) as f64 * (rows * across) as f64 * f64::from(PIXEL_BYTES);
        let walkers = self.boxes(p).min((u64::from(sms * self.tile.ctas()) / column_tiles).max(1));
        let boxes_of_cta = self.boxes(p).div_ceil(walkers) as f64;
        let (grid, resident) = ((walkers * column_tiles) as f64, f64::from(sms * self.tile.ctas()));
        let rounds = (grid / resident).ceil();
        Loop {
            tile: [f64::from(BOX_BLOCKS), columns],
            tiles: (self.boxes(p) * column_tiles) as f64,
            grid,
            resident,
            steps,
            longest_steps: rounds * boxes_of_cta * steps,
            longest_tiles: rounds * boxes_of_cta,
            tensor_cycles: columns * 2.0,
            // 8 reads for 16 blocks and one for each 4 columns, by four warps.
            shared_bytes: 4.0 * (8.0 + columns / 4.0) * 128.0,
            tile_issued: window_bytes / 6.0 + f64::from(BOX_BLOCKS) * columns / 8.0,
            tile_loaded_bytes: window_bytes,
            threads: 128.0,
            ..Loop::of_conv("conv.small_channels dgrad", p)
        }
    }
}

/// K-tiles of channels of y.
fn channel_k_tiles(p: &ConvProblem) -> u64 {
    (p.k * p.y.dtype.bytes() as u64).div_ceil(u64::from(PIXEL_BYTES))
}

/// A problem with its configs, the quickest first.
pub(super) struct Dgrad {
    problem: ConvProblem,
    operands: MatrixType,
    copy_bytes: u64,
    epilogue: EpilogueSpec,
    configs: Vec<Config>,
    sms: u32,
}

/// The kernels of plain problems.
pub(super) fn catalog() -> Vec<KernelRef> {
    let mut specs = Vec::new();
    for (operands, dtype) in TYPES {
        let epilogue = EpilogueSpec::plain(OperandSpec::strided(dtype));
        for (tile, copies) in Tile::ALL.into_iter().flat_map(|tile| [(tile, true), (tile, false)]) {
            if copies || is_general(tile) {
                specs.push(Spec { operands, copies, tile, epilogue: epilogue.clone() });
            }
        }
    }
    specs.into_iter().map(Spec::kernel).collect()
}

/// The tile that serves what is brought element by element.
fn is_general(tile: Tile) -> bool {
    tile == Tile::ALL[1]
}

impl Dgrad {
    /// Lays a problem out; without configs there is no room for it.
    pub(super) fn new(p: &ConvProblem, operands: MatrixType, epilogue: EpilogueSpec, arch: &Arch) -> Dgrad {
        let copy_bytes = wgrad::copy_bytes(&p.y, p.y_extents());
        let mut configs = Vec::new();
        for tile in Tile::ALL {
            if tile.shared_bytes() > arch.shared_bytes_per_cta || !(copy_bytes > 0 || is_general(tile)) {
                continue;
            }
            let axes = [0, 1, 2].map(|dim| Axis::new(p, dim));
            for power in 3..=BOX_BLOCKS.ilog2() {
                let columns = 1 << power;
                let mut rows = u64::from(BOX_BLOCKS) / columns;
                while rows > 0 {
                    let config = Config { tile, axes, rows, columns };
                    if config.fits(p) {
                        configs.push(config);
                        break;
                    }
                    rows /= 2;
                }
            }
        }
        configs.sort_by_cached_key(|config: &Config| cost::order(&config.main_loop(p, arch.sm_count), arch));
        configs.truncate(CONFIGS);
        Dgrad { problem: p.clone(), operands, copy_bytes, epilogue, configs, sms: arch.sm_count }
    }

    /// Which element of the filter each column meets at each tap of a window, as byte offsets.
    fn table(&self, config: &Config) -> Vec<u8> {
        let p = &self.problem;
        let [depth, down, across] = config.axes;
        let columns = config.width(p).next_multiple_of(u64::from(config.tile.columns));
        let [_, channel_stride, strides @ ..] = p.w.strides;
        let mut table = Vec::new();
        for column in 0..columns {
            let (rest, c) = (column / p.c, column % p.c);
            let (rest, w) = (rest / across.block, rest % across.block);
            let (d, h) = (rest / down.block, rest % down.block);
            for jd in 0..depth.window {
                for jh in 0..down.window {
                    for jw in 0..across.window {
                        let tap =
                            (d < depth.block).then(|| Some([depth.tap(p, 0, d, jd)?, down.tap(p, 1, h, jh)?, across.tap(p, 2, w, jw)?]));
                        let offset = tap.flatten().map_or(NO_ELEMENT, |tap| {
                            let tap = filter_tap(p, tap);
                            let elements = c * channel_stride + tap.iter().zip(strides).map(|(tap, stride)| tap * stride).sum::<u64>();
                            (elements * p.w.dtype.bytes() as u64) as u32
                        });
                        table.extend(offset.to_le_bytes());
                    }
                }
            }
        }
        table
    }
}

impl Plan for Dgrad {
    fn configs(&self) -> Vec<(Knobs, Work)> {
        let knobs = |config: &Config| {
            let tile = Tile::ALL.iter().position(|tile| *tile == config.tile).unwrap_or(0) as u32;
            (
                Knobs::new([("tile", tile), ("rows", config.rows as u32), ("columns", config.columns as u32)]),
                Work::of(config.main_loop(&self.problem, self.sms)),
            )
        };
        self.configs.iter().map(knobs).collect()
    }

    fn alignments(&self) -> Vec<(Slot, u64)> {
        vec![(self.problem.y.slot, self.copy_bytes)]
    }

    fn add_steps(&self, number: usize, program: &mut Program) {
        let Some(config) = self.configs.get(number) else { return };
        let p = &self.problem;
        let spec = Spec { operands: self.operands, copies: self.copy_bytes > 0, tile: config.tile, epilogue: self.epilogue.clone() };
        program.constants.push(self.table(config));
        let table = Address { base: Base::Constant(program.constants.len() - 1), offset_bytes: 0 };
        let word = |value: u64| Arg::Scalar(Ty::U32, value);
        let signed = |value: i64| Arg::Scalar(Ty::S32, u64::from(value as i32 as u32));
        let divisor = |value: u64| Arg::Divisor(value.max(1) as u32);
        let double_word = |value: u64| Arg::Scalar(Ty::U64, value);
        let [depth, down, across] = config.axes;
        let [window_rows, window_columns] = config.window();
        let mut args =
            vec![word(config.boxes(p)), divisor(across.blocks.div_ceil(config.columns)), divisor(down.blocks.div_ceil(config.rows))];
        args.extend([divisor(depth.blocks), word(config.rows), divisor(config.columns)]);
        args.extend(config.axes.map(|axis| signed(axis.first)));
        args.extend(p.output.map(word));
        args.extend([divisor(window_columns), word(window_rows * window_columns), divisor(depth.window)]);
        let [image, channel, strides @ ..] = p.y.strides.map(|stride| stride * p.y.dtype.bytes() as u64);
        args.push(Arg::Pointer(Address::buffer(p.y.slot.0 as usize)));
        args.push(double_word(image));
        args.extend(strides.map(double_word));
        args.push(word(p.k));
        args.push(if spec.copies { word(self.copy_bytes) } else { double_word(channel) });
        let column_tiles = config.width(p).div_ceil(u64::from(config.tile.columns));
        let ctas = config.boxes(p).min((u64::from(self.sms * config.tile.ctas()) / column_tiles).max(1));
        args.extend([divisor(ctas), word(config.k_tiles(p)), word(down.window), word(across.window), word(config.width(p))]);
        args.extend([word(depth.block), divisor(down.block), divisor(across.block), divisor(p.c)]);
        args.extend(p.input.map(word));
        args.extend([Arg::Pointer(table), Arg::Pointer(Address::buffer(p.w.slot.0 as usize))]);
        args.push(double_word(p.w.strides[0] * p.w.dtype.bytes() as u64));
        args.extend([divisor(config.k_tiles(p) * config.taps() * u64::from(PIXEL_BYTES / 4)), divisor(config.taps())]);
        args.extend(spec.epilogue.conv_args(p));
        program.steps.push(Step::Launch(Launch {
            kernel: spec.kernel(),
            grid: [ctas as u32, column_tiles as u32, 1],
            residency: Residency::Any,
            overlap: false,
            args: args.into(),
        }));
    }
}
