//! `conv.patch`: convolutions of f32 with few channels on one side, out of patches in shared memory, without tensor cores.
//!
//! **What.** fprop of any stride and dgrad of stride 1, of one and two spatial dims, groups of more than one channel, f32 by f32 to f32, filters, dilations and padding of any size that leaves room for
//! two channels' patches, any strides of tensors, every epilogue. Nothing bounds the channels but the estimate, which is for few of them. Refused are steps before the convolution.
//! Under the policy `tf32` it takes groups, whose few channels fill no tile of a tensor core; others' choices were measured without it.
//!
//! **Method.** A dgrad of stride 1 is an fprop with its taps reversed, so there is one [`kernel`]. A CTA of eight warps has a tile of pixels by a slice of the result's channels. It stages
//! the patch of activations that the tile meets, with the zeros around it, and the slice's taps by `cp.async`, as many channels at a time as there is room for, the next ones while
//! these are worked on; from there on nothing asks for edges. A row of the patch lies in columns of each residue modulo the stride, so that any stride is read as stride 1 is; taps of a row come in *windows* of
//! four neighbouring columns of one residue, of which a table in shared memory says where they are and which of their taps there are (of dilated filters few). A thread has sums of
//! 4 columns by 2 rows by 8 channels, or 4 or 2 rows by 4 channels: it reads the eight columns that its outputs meet in a window once, 16 bytes at a time without conflicts, and
//! the taps of its channels, which are the same for a whole warp. For 3×3 these are 22 words of shared memory for 192 multiplications.
//!
//! Warps have channels of their own (knob `groups`), rows of their own, or parts of the depth (knob `parts`), which are added up in shared memory in their order where tiles would not fill
//! the chip. Results go through shared memory too, so that lanes have neighbours in either order.
//!
//! **When it wins.** One to eight channels on one side. `conv.direct` gathers each element with checks of its own for each product's tile; here an element is checked once a tile, for all
//! taps. By count, 3×3 over 4 channels issues 90 % multiplications in its inner loop, and about 70 % in all.
//!
//! **Numbers.** Products and sums are fused multiply-adds in f32 in a fixed order, results repeat bit for bit. Zeros take the place of what is outside, which an infinite tap turns into NaN.

mod cut;
mod kernel;

use serde::{Deserialize, Serialize};
use verdigris_graph::ops::matmul::Precision;
use verdigris_graph::{ConvProblem, Direction, Problem};
use verdigris_kir::face::{Header, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::program::{KernelRef, Launch, Program};
use verdigris_tensor::DType;

use super::geometry::read_pixels::over_read_pixels;
use super::in_patches::{Axis, THREADS};
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Loop, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal, empty_program};
use crate::fuse::epilogue::{EpilogueSpec, OperandSpec};
use crate::sums::statistics;
use cut::Cut;
use kernel::{PatchArgs, WARP_PIXELS};

const ID: EngineId = EngineId { name: "conv.patch", number: 213 };

/// Warps of a CTA.
const WARPS: u32 = THREADS / 32;
/// What an instruction counts for where most are multiply-adds of registers: warps issue 3.5 of them in a cycle, where of loads and addresses they issue 2.5.
const ISSUE_SHARE: f64 = 2.5 / 3.5;
/// What a launch counts in 32 bits stays below this.
const COUNT_LIMIT: u64 = 1 << 30;

/// An accepted problem, with each way to cut it.
#[derive(Clone, Debug)]
pub(super) struct Patch {
    problem: ConvProblem,
    configs: Vec<Config>,
    epilogue: EpilogueSpec,
    order: Order,
    arch: Arch,
}

/// A kernel's block of sums, and a cut for it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Config {
    block: Block,
    cut: Cut,
}

impl Algorithm for Patch {
    const ID: EngineId = ID;
    const VERSION: u32 = 1;
    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Conv(p) = problem else {
            return Err(ID.refusal(Reason::Problem, format_args!("{}, takes conv", problem.kind())));
        };
        let p = &over_read_pixels(p);
        ID.require(p.direction != Direction::Wgrad, Reason::Direction, "wgrad, takes fprop and dgrad")?;
        super::geometry::require_elements(ID, p)?;
        let is_depthwise = p.groups > 1 && p.c == p.groups;
        ID.require(!is_depthwise, Reason::Extent, "groups of one channel, takes those of more")?;
        let prologue = p.prologue.len();
        ID.require(
            p.prologue.is_empty(),
            Reason::Epilogue,
            format_args!("{prologue} steps on the activations, takes them as they are stored"),
        )?;
        statistics::require(ID, p)?;
        let [(_, first, _), (_, second, _)] = p.operands();
        let types = [first.dtype, second.dtype, p.result().dtype];
        ID.require(types == [DType::F32; 3], Reason::DType, format_args!("{} by {} to {}, takes f32 alone", types[0], types[1], types[2]))?;
        ID.require(
            matches!(p.precision, Precision::Ieee | Precision::Fp32) || p.precision == Precision::Tf32 && p.groups > 1,
            Reason::Precision,
            format_args!(
                "{:?} of {} groups, multiplies and adds in f32: takes ieee and fp32, and tf32 of more than one group",
                p.precision, p.groups
            ),
        )?;
        let is_flat = p.input[0] == 1 && p.filter[0] == 1 && p.output[0] == 1 && p.pads_before[0] == 0;
        ID.require(is_flat, Reason::Extent, "three spatial dims, takes two")?;
        let is_dense = p.direction == Direction::Fprop || p.strides[1..] == [1, 1];
        ID.require(is_dense, Reason::Extent, format_args!("a dgrad of strides {:?}, takes 1", p.strides))?;
        let reach = [1, 2].map(|dim| Axis::of(p, dim).reach()).into_iter().fold(p.c.max(p.k), u64::max);
        ID.require(reach < COUNT_LIMIT, Reason::Extent, format_args!("{reach} positions or channels, taken below 2^30"))?;
        let epilogue = EpilogueSpec { pairs: false, ..EpilogueSpec::of_conv(p) };
        // The plain ones make a catalog, which one class of strides keeps short; a user's chain is compiled for its own.
        let epilogue = if epilogue.is_plain() { epilogue.strided() } else { epilogue };
        let order = Order::of(p);
        let configs = configs(p, order);
        ID.require(
            !configs.is_empty(),
            Reason::SharedMemory,
            format_args!("filters of {:?} with dilations {:?}, of which two channels leave no room", p.filter, p.dilations),
        )?;
        let most = configs.iter().map(|config| config.cut.grid()).max().unwrap_or(0);
        ID.require(most < COUNT_LIMIT, Reason::Extent, format_args!("{most} CTAs, taken below 2^30"))?;
        let patch = Patch { problem: p.clone(), configs, epilogue, order, arch: arch.clone() };
        let target = patch.spec(Block::Channels).target();
        ID.require(arch.runs(target), Reason::Target, format_args!("needs {}", target.ptx()))?;
        let arena = patch.configs.iter().map(|config| patch.spec(config.block).arena_bytes()).max().unwrap_or(0);
        ID.require(
            arena <= arch.shared_bytes_per_cta,
            Reason::SharedMemory,
            format_args!("{arena} bytes of shared memory, the chip has {}", arch.shared_bytes_per_cta),
        )?;
        Ok(patch)
    }

    fn configs(&self) -> Vec<Config> {
        self.configs.clone()
    }

    fn knobs(Config { block, cut }: &Config) -> Knobs {
        Knobs::new([("block", block.number()), ("groups", cut.groups), ("parts", cut.parts)])
    }

    fn notes(&self, _: &Config) -> Notes {
        Notes::of(DType::F32)
    }

    fn work(&self, &Config { block, cut }: &Config) -> Work {
        let (p, spec) = (&self.problem, self.spec(block));
        let resident = f64::from(self.arch.sm_count * spec.ctas_of_sm());
        let products = cut.chunk_products(&spec);
        let warps = f64::from(WARPS);
        let rows = f64::from(spec.rows());
        // Of a window, eight columns of each row; of a tap, its channels, which all lanes read together.
        let read =
            warps / f64::from(cut.parts) * 32.0 * (cut.chunk_windows() * rows * 32.0 + cut.taps() * f64::from(spec.channels()) * 4.0 / 2.0);
        let main = Loop {
            tile: [f64::from(WARPS * WARP_PIXELS * spec.rows() / (cut.groups * cut.parts)), f64::from(cut.groups * spec.channels())],
            fma_cycles: products / 4.0,
            shared_bytes: read + cut.staged_bytes(&spec),
            loaded_bytes: cut.staged_bytes(&spec),
            // Multiply-adds are issued as all else is.
            issued: (cut.chunk_issued(&spec) + products) * ISSUE_SHARE,
            tile_issued: cut.tile_issued(&spec) * ISSUE_SHARE,
            copy_bytes: 4.0,
            threads: f64::from(THREADS),
            exposed: if cut.chunks > 1 { 0.3 } else { 1.0 },
            stages: 2.0,
            ..Loop::of_conv("conv.patch", p)
        };
        Work::of(main.in_waves(cut.ctas(), resident, cut.chunks as f64)).beside(statistics::work(p))
    }

    fn lower(&self, &Config { block, cut }: &Config) -> Result<Program, Refusal> {
        let (p, spec) = (&self.problem, self.spec(block));
        let mut program = empty_program(&p.slots());
        let args = PatchArgs {
            tiles: cut.tiles_arguments(p, &spec),
            source: cut.source_arguments(p, &spec),
            taps: cut.taps_arguments(p, &spec),
            epilogue: spec.epilogue.conv_arguments(p),
        };
        let args = args.bound(&spec);
        program.launch(Launch::new(spec.kernel(), [cut.grid() as u32, 1, 1], args));
        if let Some(statistics) = &p.statistics {
            statistics::steps(p, statistics, &mut program);
        }
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let epilogue = EpilogueSpec::plain(OperandSpec::strided(DType::F32));
        let specs = Block::ALL
            .into_iter()
            .flat_map(|block| [Order::ChannelsLast, Order::ChannelsFirst].map(|order| Spec { block, order, epilogue: epilogue.clone() }));
        specs.filter(|spec| spec.target() <= target).map(Spec::kernel).collect()
    }
}

/// The configs for a problem: blocks by how many channels there are, and each way to give warps channels, rows and parts of the depth.
fn configs(p: &ConvProblem, order: Order) -> Vec<Config> {
    let (_, channels) = cut::channels(p);
    let blocks: &[Block] = if channels <= 4 { &[Block::Tall, Block::Short] } else { &Block::ALL };
    let mut configs = Vec::new();
    for &block in blocks {
        let spec = Spec { block, order, epilogue: EpilogueSpec::plain(OperandSpec::strided(DType::F32)) };
        let groups = channels.div_ceil(u64::from(spec.channels())).next_power_of_two().min(u64::from(WARPS)) as u32;
        for groups in (0..=groups.ilog2()).map(|log2| 1 << log2) {
            for parts in (0..=(WARPS / groups).ilog2()).map(|log2| 1 << log2) {
                configs.extend(Cut::best(p, &spec, groups, parts).map(|cut| Config { block, cut }));
            }
        }
    }
    configs
}

/// The sums of a thread.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Block {
    /// 8 channels, 2 rows.
    Channels,
    /// 4 channels, 4 rows.
    Tall,
    /// 4 channels, 2 rows: more tiles, where there are few.
    Short,
}

impl Block {
    const ALL: [Block; 3] = [Block::Channels, Block::Tall, Block::Short];

    /// The value of the knob.
    fn number(self) -> u32 {
        self as u32
    }
}

/// How the result lies: along which dim lanes store neighbours.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Order {
    ChannelsLast,
    ChannelsFirst,
}

impl Order {
    fn of(p: &ConvProblem) -> Order {
        let strides = p.result().strides;
        if strides[4] < strides[1] || cut::channels(p).1 == 1 { Order::ChannelsFirst } else { Order::ChannelsLast }
    }
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct Spec {
    block: Block,
    order: Order,
    epilogue: EpilogueSpec,
}

impl Spec {
    /// Channels of a thread.
    const fn channels(&self) -> u32 {
        match self.block {
            Block::Channels => 8,
            Block::Tall | Block::Short => 4,
        }
    }

    /// Rows of a thread.
    const fn rows(&self) -> u32 {
        match self.block {
            Block::Channels | Block::Short => 2,
            Block::Tall => 4,
        }
    }

    /// Sums of a thread.
    const fn sums(&self) -> u32 {
        4 * self.rows() * self.channels()
    }

    /// CTAs that an SM has registers and shared memory for.
    const fn ctas_of_sm(&self) -> u32 {
        if self.sums() > 32 { 2 } else { 3 }
    }

    /// Shared memory for patches, taps and their table, and then for sums.
    const fn arena_bytes(&self) -> u32 {
        if self.sums() > 32 { 96 << 10 } else { 72 << 10 }
    }

    /// Bytes of a channel of a warp's sums in shared memory: so far apart, lanes that read as many pixels of all channels as they are meet no bank twice.
    const fn kept_plane_bytes(&self) -> u32 {
        4 * (WARP_PIXELS * self.rows() + 32 / self.channels())
    }

    fn name(&self) -> String {
        let order = if self.order == Order::ChannelsLast { "last" } else { "first" };
        format!("conv_patch_{}x{}_{order}_{}", self.rows(), self.channels(), self.epilogue.name())
    }

    fn target(&self) -> Target {
        self.epilogue.target().max(Target::Sm80)
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas: self.ctas_of_sm(), cluster: 1 };
        build(header, |k| kernel::kernel(k, self))
    }
}

impl Patch {
    fn spec(&self, block: Block) -> Spec {
        Spec { block, order: self.order, epilogue: self.epilogue.clone() }
    }
}
