//! fprop: how a problem is laid out for its kernel ([`kernel`]).

pub(super) mod kernel;

use std::cell::RefCell;

use verdigris_graph::{ConvProblem, Slot};
use verdigris_kir::inst::MatrixType;
use verdigris_kir::ir::Ty;
use verdigris_kir::program::{Address, Arg, Base, KernelRef, Launch, Program, Residency, Step};
use verdigris_tensor::DType;

use super::boxes::boxes;
use super::geometry::{Depth, Lines, Patch, Reads, STEP_ENTRIES};
use super::{Plan, TYPES, patch};
use crate::arch::Arch;
use crate::cost::{self, Loop, Work};
use crate::engine::Knobs;
use crate::fuse::epilogue::{EpilogueSpec, OperandSpec};
use kernel::{BOX_PIXELS, Size, Spec, Tile};

/// The most configs of a tile that are offered.
const CONFIGS_OF_TILE: usize = 8;

/// One way to lay a problem out, a config.
#[derive(Clone, Copy, Debug)]
struct Config {
    tile: Tile,
    patch: Patch,
    main: Loop,
}

/// A problem with its configs, the quickest first.
pub(super) struct Fprop {
    problem: ConvProblem,
    operands: MatrixType,
    lines: Lines,
    reads: Reads,
    epilogue: EpilogueSpec,
    configs: Vec<Config>,
    sms: u32,
}

/// The kernels of plain problems.
pub(super) fn catalog() -> Vec<KernelRef> {
    let mut specs = Vec::new();
    for (operands, dtype) in TYPES {
        let ways: &[(Reads, bool)] = match operands {
            MatrixType::Tf32 => &[(Reads::Words, true), (Reads::Words, false)],
            _ => &[(Reads::Pairs, true), (Reads::Singles, true), (Reads::Singles, false)],
        };
        for &(reads, copies) in ways {
            for tile in Tile::ALL.into_iter().filter(|tile| copies || tile.is_general()) {
                specs.push(Spec { operands, reads, copies, tile, epilogue: EpilogueSpec::plain(OperandSpec::strided(dtype)) });
            }
        }
    }
    specs.into_iter().map(Spec::kernel).collect()
}

impl Fprop {
    /// Lays a problem out; without configs there is no room for it.
    pub(super) fn new(p: &ConvProblem, operands: MatrixType, epilogue: EpilogueSpec, arch: &Arch) -> Fprop {
        let lines = Lines::of(&p.x, p.x_extents());
        let reads = match operands {
            MatrixType::Tf32 => Reads::Words,
            _ if lines.copy_bytes > 0 && (p.strides[2] * lines.channels).is_multiple_of(2) => Reads::Pairs,
            _ => Reads::Singles,
        };
        let configs = configs(p, lines, reads, arch);
        Fprop { problem: p.clone(), operands, lines, reads, epilogue, configs, sms: arch.sm_count }
    }

    /// Whether eight neighbouring channels of a pixel are 16 or 32 aligned bytes of the result.
    fn stores_eights(&self) -> bool {
        let d = self.problem.result();
        let mut others = d.strides.iter().enumerate().filter(|(dim, _)| *dim != 1).map(|(_, stride)| stride);
        let wide = matches!(d.dtype, DType::Bf16 | DType::F16 | DType::F32);
        wide && d.strides[1] == 1 && self.problem.k.is_multiple_of(8) && others.all(|stride| stride.is_multiple_of(8))
    }
}

impl Plan for Fprop {
    fn configs(&self) -> Vec<(Knobs, Work)> {
        let knobs = |config: &Config| {
            let tile = Tile::ALL.iter().position(|tile| *tile == config.tile).unwrap_or(0) as u32;
            let [rows, columns] = [config.patch.pixel_rows, config.patch.pixel_columns].map(|extent| extent as u32);
            (Knobs::new([("tile", tile), ("rows", rows), ("columns", columns)]), Work::of(config.main))
        };
        self.configs.iter().map(knobs).collect()
    }

    fn alignments(&self) -> Vec<(Slot, u64)> {
        let p = &self.problem;
        vec![(p.x.slot, self.lines.copy_bytes), (p.result().slot, if self.stores_eights() { 16 } else { 1 })]
    }

    fn add_steps(&self, number: usize, program: &mut Program) {
        let Some(&Config { tile, patch, .. }) = self.configs.get(number) else { return };
        let p = &self.problem;
        let copies = self.lines.copy_bytes > 0;
        let spec = Spec { operands: self.operands, reads: self.reads, copies, tile, epilogue: self.epilogue.clone() };
        let depth = Depth::new(p, &patch, self.reads);
        program.constants.push(depth.table);
        let table = |offset_bytes| Arg::Pointer(Address { base: Base::Constant(program.constants.len() - 1), offset_bytes });
        let word = |value: u64| Arg::Scalar(Ty::U32, value);
        let [down, across] = patch.boxes(p);
        let column_tiles = p.k.div_ceil(u64::from(tile.channels));
        let ctas = (down * across).min((u64::from(self.sms * tile.ctas()) / column_tiles).max(1));
        let mut args = patch.args(p);
        args.extend(patch::source_args(p, self.lines, copies));
        args.extend([Arg::Divisor(ctas as u32), word(p.k), word(depth.steps), word(depth.k_tiles)]);
        args.push(Arg::Divisor(p.filter[1].div_ceil(patch.k_tile.taps[1]) as u32));
        args.extend(patch.k_tile.taps.map(word));
        args.extend([table(0), table(depth.filter_start), Arg::Pointer(Address::buffer(p.w.slot.0 as usize))]);
        args.push(Arg::Scalar(Ty::U64, p.w.strides[0] * p.w.dtype.bytes() as u64));
        args.push(Arg::Divisor((depth.steps * depth.k_tiles) as u32 * STEP_ENTRIES as u32));
        args.push(word(u64::from(self.stores_eights())));
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

/// Every config that is offered, the quickest first.
fn configs(p: &ConvProblem, lines: Lines, reads: Reads, arch: &Arch) -> Vec<Config> {
    let element_bytes = p.x.dtype.bytes() as u32;
    // A K-tile has as many steps wherever its box lies.
    let known: RefCell<Vec<([u64; 2], u64)>> = RefCell::default();
    let steps_of = |patch: &Patch| {
        let mut known = known.borrow_mut();
        if let Some((_, steps)) = known.iter().find(|(taps, _)| *taps == patch.k_tile.taps) {
            return *steps;
        }
        let steps = patch.entries(p, reads, 0).len().div_ceil(STEP_ENTRIES) as u64 * patch.k_tiles(p);
        known.push((patch.k_tile.taps, steps));
        steps
    };
    let mut list: Vec<Config> = Vec::new();
    let offered =
        |tile: &Tile| tile.shared_bytes(element_bytes) <= arch.shared_bytes_per_cta && (lines.copy_bytes > 0 || tile.is_general());
    for tile in Tile::ALL.into_iter().filter(offered) {
        // One CTA an SM where it must be.
        if tile.size == Size::Large && list.iter().any(|other| other.tile.channels == tile.channels) {
            continue;
        }
        let (patch_bytes, most_steps) = (u64::from(tile.patch_bytes(element_bytes)), u64::from(tile.most_steps(element_bytes)));
        let fits = |patch: &Patch| patch.bytes() <= patch_bytes && steps_of(patch) <= most_steps;
        let found = boxes(p, lines, reads, u64::from(BOX_PIXELS), &fits);
        let mut of_tile: Vec<Config> =
            found.into_iter().map(|patch| Config { tile, patch, main: main_loop(p, tile, &patch, steps_of(&patch), arch) }).collect();
        of_tile.sort_by_cached_key(|config| cost::order(&config.main, arch));
        list.extend(of_tile.into_iter().take(CONFIGS_OF_TILE));
    }
    list.sort_by_cached_key(|setting| cost::order(&setting.main, arch));
    list
}

/// A step is one of the product's; around each box stand its patch and its results.
fn main_loop(p: &ConvProblem, tile: Tile, patch: &Patch, steps: u64, arch: &Arch) -> Loop {
    let [down, across] = patch.boxes(p);
    let column_tiles = p.k.div_ceil(u64::from(tile.channels));
    let walkers = (down * across).min((u64::from(arch.sm_count * tile.ctas()) / column_tiles).max(1));
    let boxes_of_cta = (down * across).div_ceil(walkers) as f64;
    let (blocks, channels, k_tiles) = (f64::from(BOX_PIXELS / 16), f64::from(tile.channels), patch.k_tiles(p) as f64);
    let grid = (walkers * column_tiles) as f64;
    let resident = f64::from(arch.sm_count * tile.ctas());
    let rounds = (grid / resident).ceil();
    let copies = patch.lines.copy_bytes > 0;
    let lines = k_tiles * (patch.line_count() as f64 * 6.0 + patch.bytes() as f64 / 16.0) * if copies { 1.0 } else { 12.0 };
    Loop {
        tile: [f64::from(BOX_PIXELS), channels],
        tiles: (down * across * column_tiles) as f64,
        grid,
        resident,
        steps: steps as f64,
        longest_steps: rounds * boxes_of_cta * steps as f64,
        longest_tiles: rounds * boxes_of_cta,
        // Half the rate of `wgmma`, and a quarter of what the fragments wait for.
        tensor_cycles: blocks * (channels / 8.0 * 2.0 + if tile.warps == 4 { 4.0 } else { 5.0 }),
        shared_bytes: blocks * if tile.warps == 4 { 4.0 } else { 5.0 } * 128.0,
        tile_issued: lines * 2.0 + k_tiles * 600.0 + f64::from(BOX_PIXELS) * channels / 16.0,
        tile_loaded_bytes: k_tiles * patch.bytes() as f64,
        threads: f64::from(tile.warps * 32),
        copy_bytes: patch.lines.copy_bytes as f64,
        ..Loop::of_conv("conv.small_channels fprop", p)
    }
}
