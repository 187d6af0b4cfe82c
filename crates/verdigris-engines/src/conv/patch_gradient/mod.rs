//! `conv.patch_gradient`: filter gradients of f32 convolutions with few channels of x, out of patches in shared memory, without tensor cores.
//!
//! **What.** wgrad of any stride, dilation and padding, of one and two spatial dims and one group, f32 by f32 to f32, any strides of tensors, every epilogue. Nothing bounds the channels
//! but room for a pixel's patch, and the estimate, which is for few of them. Refused are steps in front of the convolution.
//!
//! **Method.** `dw[k, r, s, c] = Σ dy[n, p, q, k] · x[n, p · stride + r · dilation − pad, q · stride + s · dilation − pad, c]`: a product of few rows and columns and of a depth of all pixels. A CTA
//! walks over tiles of dy with its sums in registers, tile upon tile as far apart as there are CTAs. It stages a tile and the patch of x that it meets by `cp.async`, the next one while this one is
//! multiplied. Channels of a pixel of x lie side by side in *places* of one, two or four words (three channels leave one empty); a row has its columns by their residue modulo the
//! stride, so that whatever the stride the pixels of a row are neighbouring places.
//!
//! A *unit* is 8 or 9 neighbouring taps and channels of the filter by 8 channels of dy: a thread's sums. Of a pixel it reads the 8 channels in two loads, the same for most of a warp, and the
//! taps in as many as they have places (2 to 4, or 9 of one channel), for 64 or 72 multiplications. Threads that the units leave over form further *groups*, which take other runs of pixels; where units are more than
//! threads, other CTAs have other *slices* of them. Groups are added up in shared memory in their order, and what CTAs have is left as parts, which a
//! second launch adds up ([`crate::split_k::filter::im2col`]).
//!
//! **When it wins.** First layers: one to eight channels of x, filters from 3×3 on. `conv.direct` gathers each element with checks of its own for each tile, and fills tiles of 64 by 64, of which 27 taps by
//! 16 channels are a tenth. By count 80 to 90 % of the main loop's instructions multiply, and 60 to 75 % of all where taps are many. On an H200 it took nine of ten problems, 1.4 to 5.7 times as fast
//! as the next engine (`bench/record/h200/2026-11-29-patch-gradient-configs.jsonl`).
//!
//! **Numbers.** Products and sums are fused multiply-adds in f32 in a fixed order, results repeat bit for bit. Zeros take the place of what lies outside of x, which an infinite gradient
//! turns into NaN.

mod cut;
mod kernel;

use serde::{Deserialize, Serialize};
use verdigris_graph::ops::matmul::Precision;
use verdigris_graph::{ConvProblem, Direction, Problem, Tensor};
use verdigris_kir::face::{Header, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::program::{KernelRef, Launch, Program};
use verdigris_tensor::DType;

use super::geometry::read_pixels::over_read_pixels;
use super::in_patches::{Axis, Packing, THREADS};
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Join, Loop, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal, empty_program};
use crate::split_k::filter::im2col::{self as reduction, PartLayout, Sum};
use cut::Cut;
use kernel::GradientArgs;

const ID: EngineId = EngineId { name: "conv.patch_gradient", number: 214 };

/// Channels of dy that a thread has sums of.
const CHANNELS: u32 = 8;
/// CTAs that an SM has registers and shared memory for.
const CTAS_OF_SM: u32 = 2;
/// Shared memory for two tiles with their patches, and then for sums.
const ARENA_BYTES: u32 = 96 << 10;
/// What an instruction counts for where most are multiply-adds of registers: warps issue 3.5 of them in a cycle, where of loads and addresses they issue 2.5.
const ISSUE_SHARE: f64 = 2.5 / 3.5;
/// The most configs that are offered.
const CONFIGS: usize = 4;
/// What a launch counts in 32 bits stays below this.
const COUNT_LIMIT: u64 = 1 << 30;

/// An accepted problem, with the ways to cut it.
#[derive(Clone, Debug)]
pub(super) struct PatchGradient {
    problem: ConvProblem,
    spec: Spec,
    cuts: Vec<Cut>,
    arch: Arch,
}

impl Algorithm for PatchGradient {
    const ID: EngineId = ID;
    const VERSION: u32 = 1;
    type Config = Cut;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Conv(p) = problem else {
            return Err(ID.refusal(Reason::Problem, format_args!("{}, takes conv", problem.kind())));
        };
        ID.require(p.direction == Direction::Wgrad, Reason::Direction, "fprop or dgrad, takes wgrad")?;
        ID.require(p.groups == 1, Reason::Extent, format_args!("{} groups, takes 1", p.groups))?;
        super::geometry::require_elements(ID, p)?;
        let prologue = p.prologue.len();
        ID.require(
            p.prologue.is_empty(),
            Reason::Epilogue,
            format_args!("{prologue} steps on the activations, takes them as they are stored"),
        )?;
        let p = &over_read_pixels(p);
        let [(_, first, _), (_, second, _)] = p.operands();
        let types = [first.dtype, second.dtype, p.result().dtype];
        ID.require(types == [DType::F32; 3], Reason::DType, format_args!("{} by {} to {}, takes f32 alone", types[0], types[1], types[2]))?;
        ID.require(
            matches!(p.precision, Precision::Ieee | Precision::Fp32),
            Reason::Precision,
            format_args!("{:?}, multiplies and adds in f32", p.precision),
        )?;
        let is_flat = p.input[0] == 1 && p.filter[0] == 1 && p.output[0] == 1 && p.pads_before[0] == 0;
        ID.require(is_flat, Reason::Extent, "three spatial dims, takes two")?;
        let reach = [1, 2].map(|dim| Axis::of(p, dim).reach()).into_iter().fold(p.c.max(p.k), u64::max);
        ID.require(reach < COUNT_LIMIT, Reason::Extent, format_args!("{reach} positions or channels, taken below 2^30"))?;
        let elements = Cut::pitch(p).saturating_mul(p.k);
        ID.require(elements < COUNT_LIMIT, Reason::Extent, format_args!("{elements} elements of a filter, taken below 2^30"))?;
        let spec = Spec::of(p);
        let mut cuts = Cut::all(p, &spec, arch.sm_count);
        cuts.truncate(CONFIGS);
        ID.require(
            !cuts.is_empty(),
            Reason::SharedMemory,
            format_args!(
                "filters of {:?} with dilations {:?} by {} channels, of which a pixel's patch leaves no room",
                p.filter, p.dilations, p.c
            ),
        )?;
        let most = cuts.iter().map(|cut| cut.count.max(cut.grid())).max().unwrap_or(0);
        ID.require(most < COUNT_LIMIT, Reason::Extent, format_args!("{most} tiles or CTAs, taken below 2^30"))?;
        let target = spec.target();
        ID.require(arch.runs(target), Reason::Target, format_args!("needs {}", target.ptx()))?;
        ID.require(
            ARENA_BYTES <= arch.shared_bytes_per_cta,
            Reason::SharedMemory,
            format_args!("{ARENA_BYTES} bytes of shared memory, the chip has {}", arch.shared_bytes_per_cta),
        )?;
        Ok(PatchGradient { problem: p.clone(), spec, cuts, arch: arch.clone() })
    }

    fn configs(&self) -> Vec<Cut> {
        self.cuts.clone()
    }

    fn knobs(cut: &Cut) -> Knobs {
        Knobs::new([("channels", cut.down as u32 * CHANNELS), ("units", cut.across as u32)])
    }

    fn notes(&self, _: &Cut) -> Notes {
        Notes::of(DType::F32)
    }

    fn work(&self, cut: &Cut) -> Work {
        let (p, spec) = (&self.problem, &self.spec);
        let resident = f64::from(self.arch.sm_count * CTAS_OF_SM);
        let products = cut.products(spec);
        let main = Loop {
            tile: [cut.down as f64 * f64::from(CHANNELS), cut.across as f64 * f64::from(spec.taps())],
            fma_cycles: products / 4.0,
            shared_bytes: cut.read_bytes(spec) + cut.staged_bytes(p),
            loaded_bytes: cut.staged_bytes(p),
            // Multiply-adds are issued as all else is.
            issued: (cut.issued(spec) + products) * ISSUE_SHARE,
            tile_issued: cut.end_issued(spec) * ISSUE_SHARE,
            copy_bytes: 4.0,
            threads: f64::from(THREADS),
            exposed: 0.3,
            stages: 2.0,
            ..Loop::of_conv("conv.patch_gradient", p)
        };
        let in_parts = main.in_waves(cut.ctas(), resident, cut.tiles_of_cta());
        let tiles = cut.slices.iter().product::<u64>() as f64;
        let main = Loop { tiles, steps: cut.count as f64, parts: cut.parts as f64, join: Join::Launch, ..in_parts };
        let sum = self.sum(cut);
        let written = crate::cost::Stream { launches: 0.0, ..sum.work() };
        // It does not begin before the first has ended: on an H200 the gradient of 242 pixels took 9.5 to 11.9 us where the estimate, without that, was 5.8.
        Work::of(main).beside([written, sum.work().in_launches(1.5)])
    }

    fn lower(&self, cut: &Cut) -> Result<Program, Refusal> {
        let (p, spec) = (&self.problem, self.spec);
        let mut program = empty_program(&p.slots());
        let sum = self.sum(cut);
        let parts = program.add_scratch("parts of the filter's gradient", sum.scratch_bytes());
        let args = GradientArgs {
            tiles: cut.tiles_arguments(p, &spec),
            units: cut.units_arguments(p, &spec),
            x: cut.x_arguments(p, &spec),
            y: cut.y_arguments(p, &spec),
            parts,
            part_bytes: 4 * sum.part_elements(),
            channel_bytes: 4 * Cut::pitch(p) as u32,
        };
        let args = args.bound(&spec);
        program.launch(Launch::new(spec.kernel(), [cut.grid() as u32, 1, 1], args));
        program.launch(sum.launch(parts));
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let copies = |places| [false, true].map(|y_copies| Spec { places, y_copies });
        let specs = Places::ALL.into_iter().flat_map(copies);
        let kernels = specs.filter(|spec| spec.target() <= target).map(Spec::kernel);
        kernels.chain(reduction::catalog().filter(|kernel| kernel.name().contains("f32"))).collect()
    }
}

impl PatchGradient {
    /// How the parts of a cut are added up.
    fn sum(&self, cut: &Cut) -> Sum {
        let p = &self.problem;
        let pitch = Cut::pitch(p);
        let layout = PartLayout { rows: p.k, pitch, strides: [pitch, 0, p.filter[2] * p.c, p.c, 1] };
        let pixels = p.gemm_extents().k.div_ceil(cut.parts);
        Sum::new(p, layout, cut.parts, pixels)
    }
}

/// Channels of a place.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Places {
    /// One, in a word.
    One,
    /// Two, in two words.
    Two,
    /// Three, in four words.
    Three,
    /// Four, in four words.
    Four,
}

impl Places {
    const ALL: [Places; 4] = [Places::One, Places::Two, Places::Three, Places::Four];

    /// Those that so many channels of x fill best, of the wider ones where there are many.
    fn of(channels: u64) -> Places {
        match channels {
            1 => Places::One,
            2 => Places::Two,
            _ if channels.div_ceil(3) * 3 < channels.div_ceil(4) * 4 => Places::Three,
            _ => Places::Four,
        }
    }
}

/// Everything that shapes a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct Spec {
    places: Places,
    /// Channels of dy are copied four by four.
    y_copies: bool,
}

impl Spec {
    fn of(p: &ConvProblem) -> Spec {
        Spec { places: Places::of(p.c), y_copies: has_quads(&p.y, p.k) }
    }

    /// Channels of a place, and its words.
    const fn channels(&self) -> u32 {
        match self.places {
            Places::One => 1,
            Places::Two => 2,
            Places::Three => 3,
            Places::Four => 4,
        }
    }

    const fn words(&self) -> u32 {
        if self.channels() == 3 { 4 } else { self.channels() }
    }

    /// Positions of a unit.
    const fn positions(&self) -> u32 {
        match self.places {
            Places::One => 9,
            Places::Two => 4,
            Places::Three => 3,
            Places::Four => 2,
        }
    }

    /// Taps and channels of a unit.
    const fn taps(&self) -> u32 {
        self.positions() * self.channels()
    }

    /// Pixels that a turn of the loop multiplies, as many as registers can be read ahead for.
    const fn unroll(&self) -> u32 {
        if self.taps() > 8 { 2 } else { 4 }
    }

    /// Words from one unit's sums of a channel to the next's in shared memory: an odd number, so that lanes of neighbouring units meet no bank twice.
    const fn kept_words(&self) -> u32 {
        self.taps() | 1
    }

    /// Bytes of a copy of dy.
    const fn y_copy_bytes(&self) -> u8 {
        4 * self.y_words() as u8
    }

    /// Words of it.
    const fn y_words(&self) -> u32 {
        if self.y_copies { 4 } else { 1 }
    }

    const fn packing(&self) -> Packing {
        Packing::Places { channels: self.channels(), words: self.words() }
    }

    fn name(&self) -> String {
        let copies = if self.y_copies { "quads" } else { "words" };
        format!("conv_wgrad_patch_{}x{}_{copies}", self.positions(), self.channels())
    }

    fn target(&self) -> Target {
        Target::Sm80
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas: CTAS_OF_SM, cluster: 1 };
        build(header, |k| kernel::kernel(k, self))
    }
}

/// Whether a tensor's channels lie in whole groups of four, each 16 bytes from a multiple of 16 on if the first is.
fn has_quads(tensor: &Tensor, channels: u64) -> bool {
    let [image, channel, _, row, column] = tensor.strides;
    channel == 1 && [channels, image, row, column].into_iter().all(|stride| stride.is_multiple_of(4))
}
