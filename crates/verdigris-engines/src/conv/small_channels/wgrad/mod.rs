//! wgrad: how a problem is laid out for its two launches ([`kernel`], [`crate::split_k::filter::small_channels`]).

mod kernel;

use verdigris_graph::{ConvProblem, Slot};
use verdigris_kir::inst::MatrixType;
use verdigris_kir::ir::Ty;
use verdigris_kir::program::{Address, Arg, Base, KernelRef, Launch, Program, Residency, Step};

use super::boxes::boxes;
use super::geometry::{Lines, Patch, Reads};
use super::{Plan, TYPES, patch};
use crate::arch::Arch;
use crate::cost::{self, Join, Loop, Stream, Traffic, Work};
use crate::engine::Knobs;
use crate::fuse::epilogue::{EpilogueSpec, OperandSpec};
use crate::split_k::filter::small_channels::{self as reduction, CHANNELS};
pub(super) use kernel::copy_bytes;
use kernel::{CTAS, Spec, box_pixels, patch_bytes, shared_bytes, step_pixels};

/// The most configs of a width of tiles that are offered.
const CONFIGS_OF_TILE: usize = 10;

/// One way to lay a problem out, a config.
#[derive(Clone, Copy, Debug)]
struct Config {
    spec: Spec,
    patch: Patch,
    /// CTAs that share an SM.
    ctas: u32,
    main: Loop,
}

/// A problem with its configs, the quickest first.
pub(super) struct Wgrad {
    problem: ConvProblem,
    lines: Lines,
    /// Bytes of a copy of dy.
    copy_bytes: u64,
    epilogue: EpilogueSpec,
    configs: Vec<Config>,
    sms: u32,
}

/// The kernels of plain problems.
pub(super) fn catalog() -> Vec<KernelRef> {
    let mut kernels = Vec::new();
    for (operands, dtype) in TYPES {
        for blocks in Spec::BLOCKS {
            kernels.extend([true, false].map(|copies| Spec { operands, copies, blocks }.kernel()));
        }
        kernels.push(reduction::Spec { epilogue: EpilogueSpec::plain(OperandSpec::strided(dtype)) }.kernel());
    }
    kernels
}

impl Wgrad {
    /// Lays a problem out; without configs there is no room for it.
    pub(super) fn new(p: &ConvProblem, operands: MatrixType, epilogue: EpilogueSpec, arch: &Arch) -> Wgrad {
        let lines = Lines::of(&p.x, p.x_extents());
        let copy_bytes = copy_bytes(&p.y, p.y_extents());
        let copies = lines.copy_bytes > 0 && copy_bytes > 0;
        let element_bytes = operands.bits() / 8;
        let reads = if element_bytes == 2 { Reads::Singles } else { Reads::Words };
        let mut configs = Vec::new();
        for blocks in Spec::BLOCKS.into_iter().filter(|_| shared_bytes(element_bytes) <= arch.shared_bytes_per_cta) {
            let spec = Spec { operands, copies, blocks };
            let fits =
                |patch: &Patch| columns(p, patch) <= u64::from(spec.columns()) && patch.bytes() <= u64::from(patch_bytes(element_bytes));
            let found = boxes(p, lines, reads, u64::from(box_pixels(element_bytes)), &fits);
            let ways = found.into_iter().flat_map(|patch| sharing(element_bytes, arch).map(move |ctas| (patch, ctas)));
            let mut of_tile: Vec<Config> =
                ways.map(|(patch, ctas)| Config { spec, patch, ctas, main: main_loop(p, spec, &patch, ctas, arch) }).collect();
            of_tile.sort_by_cached_key(|config| cost::order(&config.main, arch));
            configs.extend(of_tile.into_iter().take(CONFIGS_OF_TILE));
        }
        configs.sort_by_cached_key(|config: &Config| cost::order(&config.main, arch));
        Wgrad { problem: p.clone(), lines, copy_bytes, epilogue, configs, sms: arch.sm_count }
    }
}

/// CTAs that may share an SM: as many as registers allow for sure, and one more where shared memory has room.
fn sharing(element_bytes: u32, arch: &Arch) -> impl Iterator<Item = u32> + use<> {
    let room = arch.shared_bytes_per_sm / (shared_bytes(element_bytes) + 1024);
    [CTAS, CTAS + 1].into_iter().filter(move |&ctas| ctas == CTAS || ctas <= room)
}

/// Columns of a K-tile.
fn columns(p: &ConvProblem, patch: &Patch) -> u64 {
    patch.k_tile.taps[0] * patch.k_tile.taps[1] * p.filter[2] * p.c
}

/// CTAs that walk over boxes, each of which leaves a part.
fn walkers(p: &ConvProblem, patch: &Patch, slots: u32) -> u64 {
    let [down, across] = patch.boxes(p);
    let tiles = patch.k_tiles(p) * p.k.div_ceil(u64::from(CHANNELS));
    (down * across).min((u64::from(slots) / tiles).max(1))
}

impl Plan for Wgrad {
    fn configs(&self) -> Vec<(Knobs, Work)> {
        let knobs = |config: &Config| {
            let [rows, columns] = [config.patch.pixel_rows, config.patch.pixel_columns].map(|extent| extent as u32);
            (Knobs::new([("tile", config.spec.blocks), ("rows", rows), ("columns", columns), ("ctas", config.ctas)]), config.work())
        };
        self.configs.iter().map(knobs).collect()
    }

    fn alignments(&self) -> Vec<(Slot, u64)> {
        vec![(self.problem.x.slot, self.lines.copy_bytes), (self.problem.y.slot, self.copy_bytes)]
    }

    fn add_steps(&self, number: usize, program: &mut Program) {
        let Some(&Config { spec, patch, ctas: share, .. }) = self.configs.get(number) else { return };
        let p = &self.problem;
        let word = |value: u64| Arg::Scalar(Ty::U32, value);
        let k_tiles = patch.k_tiles(p);
        let channel_tiles = p.k.div_ceil(u64::from(CHANNELS));
        let ctas = walkers(p, &patch, self.sms * share);
        let part_bytes = channel_tiles * k_tiles * u64::from(CHANNELS * spec.columns() * 4);
        let address = program.add_scratch("parts of the filter's gradient", part_bytes * ctas);
        let mut places = patch.columns(p);
        // What fills the tile is summed up like the first column, and left out.
        places.resize(spec.columns() as usize, 0);
        program.constants.push(places.into_iter().flat_map(u32::to_le_bytes).collect());
        let columns = Address { base: Base::Constant(program.constants.len() - 1), offset_bytes: 0 };
        let mut args = patch.args(p);
        args.extend(patch::source_args(p, self.lines, spec.copies));
        args.extend(kernel::gradient_args(p, spec.copies.then_some(self.copy_bytes)));
        let pixels = (patch.pixel_rows * patch.pixel_columns).next_multiple_of(u64::from(step_pixels(p.x.dtype.bytes() as u32)));
        args.extend([Arg::Divisor(ctas as u32), word(pixels)]);
        args.push(Arg::Divisor(p.filter[1].div_ceil(patch.k_tile.taps[1]) as u32));
        args.extend(patch.k_tile.taps.map(word));
        args.extend([Arg::Pointer(columns), Arg::Pointer(address), Arg::Scalar(Ty::U64, part_bytes)]);
        program.steps.push(Step::Launch(Launch {
            kernel: spec.kernel(),
            grid: [ctas as u32, k_tiles as u32, channel_tiles as u32],
            residency: Residency::Any,
            overlap: false,
            args: args.into(),
        }));
        let adds = reduction::Spec { epilogue: self.epilogue.clone() };
        let parts = reduction::Parts { address, count: ctas, part_bytes, k_tiles, columns: spec.columns(), taps: patch.k_tile.taps };
        program.steps.push(Step::Launch(reduction::launch(p, &adds, parts)));
    }
}

impl Config {
    fn work(&self) -> Work {
        let part_bytes = self.main.tiles * self.main.parts * f64::from(CHANNELS * self.spec.columns() * 4);
        Work::of(self.main).beside([Stream::new(Traffic::Reduced, 2.0 * part_bytes)])
    }
}

/// A step is one of four warps over a box.
fn main_loop(p: &ConvProblem, spec: Spec, patch: &Patch, share: u32, arch: &Arch) -> Loop {
    let element_bytes = p.x.dtype.bytes() as u32;
    let [down, across] = patch.boxes(p);
    let tiles = (patch.k_tiles(p) * p.k.div_ceil(u64::from(CHANNELS))) as f64;
    let walkers = walkers(p, patch, arch.sm_count * share) as f64;
    let boxes = (down * across) as f64;
    let steps_of_box = ((patch.pixel_rows * patch.pixel_columns) as f64 / f64::from(step_pixels(element_bytes))).ceil();
    let blocks = f64::from(spec.blocks);
    let boxes_of_cta = (boxes / walkers).ceil();
    let resident = f64::from(arch.sm_count * share);
    let rounds = (walkers * tiles / resident).ceil();
    let bring = patch.line_count() as f64 * 6.0 + patch.bytes() as f64 / 16.0;
    let box_bytes = patch.bytes() as f64 + (patch.pixel_rows * patch.pixel_columns) as f64 * f64::from(CHANNELS * element_bytes);
    Loop {
        tile: [f64::from(CHANNELS), f64::from(spec.columns())],
        tiles,
        grid: walkers * tiles,
        resident,
        steps: boxes * steps_of_box,
        longest_steps: rounds * boxes_of_cta * steps_of_box,
        longest_tiles: rounds,
        parts: walkers,
        join: Join::Launch,
        tensor_cycles: 32.0 * blocks,
        shared_bytes: 4.0 * (4.0 * blocks + 16.0) * 128.0,
        loaded_bytes: box_bytes / steps_of_box,
        issued: if spec.copies { 2.0 * bring } else { 14.0 * bring } / steps_of_box,
        threads: 128.0,
        copy_bytes: patch.lines.copy_bytes as f64,
        ..Loop::of_conv("conv.small_channels wgrad", p)
    }
}
