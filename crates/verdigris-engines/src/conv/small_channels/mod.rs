//! `conv.small_channels`: convolutions of images, whose pixels have one to eight channels.
//!
//! **What.** First layers and patch embeddings in one to three spatial dims, 16-bit operands and f32 under tf32, any strides, dilations and
//! padding, channels innermost or outermost or any other strides, one group, every epilogue.
//!
//! **Method.** A pixel of few channels is too small for TMA and too thin for a matrix instruction, so taps and channels are folded
//! into one depth. The input of a box of pixels, a *patch*, is brought to shared memory as it lies in memory, and the matrix operand is
//! read from there, four bytes of depth of a pixel at a time, at the places that a table of the depth names ([`geometry`]). Each element of
//! x comes from L2 about once, no matter how many taps meet it.
//!
//! | direction | rows | columns | depth |
//! |---|---|---|---|
//! | fprop | pixels of y | channels of y | taps, channels of x |
//! | dgrad | blocks of pixels of x | pixels of a block, channels of x | windows of y, channels of y |
//! | wgrad | channels of y | taps, channels of x | pixels of y |
//!
//! wgrad sums over shares of the pixels; a second launch adds these parts up in their order.
//!
//! **When it wins.** Wherever it is taken, tensor cores are: other engines of this family on them want channels in multiples of 16 bytes.
//!
//! **Numbers.** 16-bit operands: exact products, f32 sums by the tensor core in an order that the spec and the problem fix, so repeats
//! agree bit for bit. tf32: operands cut to 19 bits. Zeros around x are multiplied, so an infinite filter element gives NaN there. dgrad
//! multiplies by zeros what a pixel of a block does not meet, so an infinite or undefined dy spreads over the blocks that it reaches.
//!
//! **Source:** Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014, for the implicit product; the patch and its table are
//! our own.

mod boxes;
mod dgrad;
mod fprop;
mod geometry;
mod patch;
mod wgrad;

use verdigris_graph::{ConvProblem, Direction, Precision, Problem, Slot};
use verdigris_kir::inst::MatrixType;
use verdigris_kir::ir::Target;
use verdigris_kir::program::{KernelRef, Program};
use verdigris_tensor::DType;

use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::conv::geometry::require_elements;
use crate::cost::Work;
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal, empty_program};
use crate::fuse::epilogue::EpilogueSpec;
use crate::sums::statistics;

const ID: EngineId = EngineId { name: "conv.small_channels", number: 206 };

/// The most channels of x.
const MOST_CHANNELS: u64 = 8;
/// What counts in 32 bits inside of a launch stays below this.
const COUNT_LIMIT: u64 = 1 << 30;

/// Taps by channels, reaches and strides.
const TAP_LIMIT: u64 = 1 << 14;

/// What is multiplied, with the type of plain results.
const TYPES: [(MatrixType, DType); 3] = [(MatrixType::Bf16, DType::Bf16), (MatrixType::F16, DType::F16), (MatrixType::Tf32, DType::F32)];

/// A problem of one direction, laid out in one or more ways.
trait Plan {
    /// Every config with its work; none where there is no room.
    fn configs(&self) -> Vec<(Knobs, Work)>;

    /// Adds the launches of a config, by its number.
    fn add_steps(&self, number: usize, program: &mut Program);

    /// What buffers are aligned to beyond their elements, in bytes.
    fn alignments(&self) -> Vec<(Slot, u64)>;
}

/// An accepted problem.
pub(super) struct SmallChannels {
    problem: ConvProblem,
    operands: MatrixType,
    epilogue: EpilogueSpec,
    plan: Box<dyn Plan>,
    configs: Vec<Config>,
}

/// A config of the plan.
#[derive(Clone, Debug)]
pub(super) struct Config {
    /// Among those of the plan.
    number: usize,
    knobs: Knobs,
    work: Work,
}

impl Algorithm for SmallChannels {
    const ID: EngineId = ID;
    const VERSION: u32 = 1;
    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Conv(p) = problem else {
            return Err(ID.refusal(Reason::Problem, format_args!("{}, taken is conv", problem.kind())));
        };
        let operands = require_operands(p)?;
        require_extents(p)?;
        let epilogue = EpilogueSpec::of_conv(p);
        // The plain ones make a catalog, which one class of strides keeps short; a user's chain is compiled for its own.
        let mut epilogue = if epilogue.is_plain() { epilogue.strided() } else { epilogue };
        epilogue.pairs &= p.direction == Direction::Fprop;
        let target = epilogue.target();
        ID.require(arch.runs(target), Reason::Target, format_args!("the epilogue's types need {}", target.ptx()))?;
        let plan: Box<dyn Plan> = match p.direction {
            Direction::Fprop => Box::new(fprop::Fprop::new(p, operands, epilogue.clone(), arch)),
            Direction::Wgrad => Box::new(wgrad::Wgrad::new(p, operands, epilogue.clone(), arch)),
            Direction::Dgrad => Box::new(dgrad::Dgrad::new(p, operands, epilogue.clone(), arch)),
        };
        let config = |(number, (knobs, work)): (usize, (Knobs, Work))| Config { number, knobs, work: work.beside(statistics::work(p)) };
        let configs: Vec<Config> = plan.configs().into_iter().enumerate().map(config).collect();
        ID.require(!configs.is_empty(), Reason::SharedMemory, format_args!("a filter of {:?} over {} channels", p.filter, p.c))?;
        Ok(SmallChannels { problem: p.clone(), operands, epilogue, plan, configs })
    }

    fn configs(&self) -> Vec<Config> {
        self.configs.clone()
    }

    fn knobs(config: &Config) -> Knobs {
        config.knobs.clone()
    }

    fn notes(&self, _: &Config) -> Notes {
        let down_convert = (self.operands == MatrixType::Tf32).then_some(DType::Tf32);
        Notes { tensor_core: true, down_convert, ..Notes::of(DType::F32) }
    }

    fn work(&self, config: &Config) -> Work {
        config.work.clone()
    }

    fn lower(&self, config: &Config) -> Result<Program, Refusal> {
        let p = &self.problem;
        let mut program = empty_program(&p.slots());
        let elements = p.tensors().into_iter().map(|(_, tensor, _)| (tensor.slot, tensor.dtype.bytes() as u64));
        for (slot, bytes) in elements.chain(self.plan.alignments()).chain(self.epilogue.conv_alignments(p)) {
            let alignment = &mut program.buffer_alignment_bytes[slot.0 as usize];
            *alignment = bytes.max(*alignment);
        }
        self.plan.add_steps(config.number, &mut program);
        if let Some(statistics) = &p.statistics {
            statistics::steps(p, statistics, &mut program);
        }
        Ok(program)
    }

    fn catalog(_: Target) -> Vec<KernelRef> {
        fprop::catalog().into_iter().chain(dgrad::catalog()).chain(wgrad::catalog()).collect()
    }
}

/// What the tensor core multiplies, or what stands against it.
fn require_operands(p: &ConvProblem) -> Result<MatrixType, Refusal> {
    let [(_, a, _), (_, b, _)] = p.operands();
    let operands = match (p.precision, a.dtype, b.dtype) {
        (Precision::Fp32, DType::Bf16, DType::Bf16) => Some(MatrixType::Bf16),
        (Precision::Fp32, DType::F16, DType::F16) => Some(MatrixType::F16),
        (Precision::Tf32, DType::F32, DType::F32) => Some(MatrixType::Tf32),
        _ => None,
    };
    let operands = operands.ok_or_else(|| {
        ID.refusal(
            Reason::Precision,
            format_args!("{:?} of {} and {}, taken are bf16 and f16 under fp32, f32 under tf32", p.precision, a.dtype, b.dtype),
        )
    })?;
    ID.require(
        p.prologue.is_empty(),
        Reason::Epilogue,
        format_args!("{} steps on the activations; takes them as they are stored", p.prologue.len()),
    )?;
    Ok(operands)
}

/// What may not be too many, or none.
fn require_extents(p: &ConvProblem) -> Result<(), Refusal> {
    ID.require(p.groups == 1, Reason::Extent, format_args!("{} groups, taken is one", p.groups))?;
    ID.require((1..=MOST_CHANNELS).contains(&p.c), Reason::Extent, format_args!("{} channels of x, taken are 1 to {MOST_CHANNELS}", p.c))?;
    require_elements(ID, p)?;
    let rows = p.output.iter().try_fold(p.n, |product, extent| product.checked_mul(*extent));
    ID.require(
        rows.is_some_and(|rows| rows < COUNT_LIMIT) && p.k < COUNT_LIMIT,
        Reason::Extent,
        format_args!("{rows:?} pixels, {} channels of y; taken below 2^30", p.k),
    )?;
    // What shared memory has room for is far below; this keeps sizes in range.
    let taps = p.filter.iter().try_fold(p.c, |product, extent| product.checked_mul(*extent));
    ID.require(
        taps.is_some_and(|taps| taps <= TAP_LIMIT),
        Reason::Extent,
        format_args!("{taps:?} taps by channels, taken up to {TAP_LIMIT}"),
    )?;
    for (dim, filter) in p.filter.into_iter().enumerate() {
        let reach = (filter - 1) * p.dilations[dim];
        ID.require(
            reach <= TAP_LIMIT,
            Reason::Extent,
            format_args!("a filter that reaches over {reach} elements, taken up to {TAP_LIMIT}"),
        )?;
        ID.require(p.strides[dim] <= TAP_LIMIT, Reason::Extent, format_args!("a stride of {}, taken up to {TAP_LIMIT}", p.strides[dim]))?;
    }
    let line = (p.input[2] + p.pads_before[2] + p.pads_after[2]) * p.c * p.x.dtype.bytes() as u64;
    ID.require(line < COUNT_LIMIT, Reason::Extent, format_args!("{line} bytes of a row of x, taken below 2^30"))?;
    let reach = geometry::filter_reach(p);
    ID.require(reach.is_some(), Reason::Extent, "a filter whose elements lie 2^32 bytes apart")
}
