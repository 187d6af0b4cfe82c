//! `conv.depthwise_planes`: convolutions in which each channel has filters of its own, of channels-first tensors.
//!
//! **What.** All three directions, one and two spatial dims, bf16, f16 and f32, one or more filters for a channel of x, any padding; strides 1 and 2. Filters of any size, but for a dgrad of
//! stride 2, which takes 3×3 and 5×5. Rows of what is read may be anywhere as long as their elements are neighbours; the planes of a result of pixels have no gaps.
//! Refused are dilations, and steps before the convolution.
//!
//! **Method.** [`stage`] brings the lines that a CTA's outputs meet to shared memory, element by element, for planes begin and rows end anywhere: in f32, with the zeros around them.
//! From there on nothing asks for edges.
//!
//! | direction | threads |
//! |---|---|
//! | fprop, dgrad ([`pixels`]) | each sums a block of outputs, 4×4 for stride 1: a word of shared memory is read once for all outputs of a row and the next rows that meet it, which for 3×3 is two words an output, for 7×7 six; results go out through shared memory, 16 bytes at a time |
//! | wgrad ([`filter`]) | each has a block of gradients in registers, and sums all taps over it: 4×4 of them, or 2×4 of stride 2 where taps are few |
//!
//! Filters of 3×3, 5×5 and 7×7 are unrolled; the taps of others are gone through four of a row at a time. Where there is one row, a thread has 8 outputs of it.
//! A CTA takes a band of a plane, or several whole planes; small ones of few channels are enough for a wgrad in one launch. Its parts are cut so that places for CTAs go through few shares
//! one behind the other (`parts`): one CTA a channel is often one more than there are places for, or waits for memory alone.
//!
//! **When it wins.** Where channels are not neighbours in memory. By count, a 3×3 of stride 1 has about 24 instructions an output, of which 9 multiply, and is bound by memory in f32; a 7×7 has
//! about 65, of which 49 multiply.
//!
//! **Numbers.** As those of `conv.depthwise`: products and sums are fused multiply-adds in f32 in a fixed order, results repeat bit for bit, and zeros take the place of what is
//! outside, of the pixels around x and of the gradients beyond y.

mod filter;
mod pixels;
mod share;
mod stage;

use serde::{Deserialize, Serialize};
use verdigris_graph::ops::matmul::Precision;
use verdigris_graph::{ConvProblem, Direction, Problem, Tensor};
use verdigris_kir::face::{Header, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::Arguments;
use verdigris_kir::program::{Address, KernelRef, Launch, Program};
use verdigris_tensor::DType;

use super::geometry::spacing::Stride;
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Stream, Traffic, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal, empty_program};
use crate::fuse::compute;
use crate::fuse::epilogue::{EpilogueSpec, OperandSpec};
use crate::layout::space::{divisor, is_packed};
use crate::split_k::filter::depthwise as reduction;
use crate::split_k::filter::depthwise::TapBlocksArguments;
use crate::store::span::VECTOR_BYTES as SPAN_BYTES;
use crate::sums::statistics;
use share::Shares;

const ID: EngineId = EngineId { name: "conv.depthwise_planes", number: 212 };

/// Threads of a CTA, each with a block of outputs.
const THREADS: u32 = 128;
/// What a launch counts in 32 bits stays below this.
const COUNT_LIMIT: u64 = 1 << 30;
/// CTAs of a wgrad for each SM, beyond which the images of a channel are not cut into more parts only to have more of them.
const CTAS_OF_SM: u64 = 4;
/// Turns of a stream that a trip to memory takes, and instructions of warps that a CTA issues in one if it has its SM to itself.
const TURNS_OF_TRIP: f64 = 3.0;
const ISSUED_IN_TURN: f64 = 400.0;
/// The most parts of a wgrad that are cut for even shares: what the second launch reads stays little.
const MOST_PARTS: u64 = 64;

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct DepthwisePlanes {
    problem: ConvProblem,
    spec: Spec,
    shares: Shares,
    arch: Arch,
}

/// Parts of a wgrad's images; with one, there is one launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts(u64);

impl Algorithm for DepthwisePlanes {
    const ID: EngineId = ID;
    const VERSION: u32 = 1;
    type Config = Parts;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Conv(p) = problem else {
            return Err(ID.refusal(Reason::Problem, format_args!("{}, takes conv", problem.kind())));
        };
        ID.require(
            p.groups == p.c && p.c > 0,
            Reason::Extent,
            format_args!("{} channels in {} groups, takes one channel of x a group", p.c, p.groups),
        )?;
        ID.require(!p.is_empty() && p.gemm_extents().k > 0, Reason::Extent, "a result or a sum of no elements")?;
        let prologue = p.prologue.len();
        ID.require(
            p.prologue.is_empty(),
            Reason::Epilogue,
            format_args!("{prologue} steps on the activations, takes them as they are stored"),
        )?;
        statistics::require(ID, p)?;
        let [(_, first, _), (_, second, _)] = p.operands();
        let (dtype, result) = (first.dtype, p.result().dtype);
        let is_float = |dtype: DType| matches!(dtype, DType::Bf16 | DType::F16 | DType::F32);
        ID.require(
            dtype == second.dtype && is_float(dtype) && is_float(result),
            Reason::DType,
            format_args!("{dtype} by {} to {result}, takes two of bf16, f16 or f32 to one of them", second.dtype),
        )?;
        ID.require(
            matches!(p.precision, Precision::Ieee | Precision::Fp32 | Precision::Tf32),
            Reason::Precision,
            format_args!("{:?}, sums in f32", p.precision),
        )?;
        let is_flat = p.input[0] == 1 && p.filter[0] == 1 && p.output[0] == 1 && p.pads_before[0] == 0;
        ID.require(is_flat, Reason::Extent, "three spatial dims, takes two")?;
        let is_dense = (1..3).all(|dim| p.filter[dim] == 1 || p.dilations[dim] == 1);
        ID.require(is_dense, Reason::Extent, format_args!("dilations {:?}, takes 1", p.dilations))?;
        let Some(stride) = Stride::of(p) else {
            let reason = format_args!("strides {:?}, takes 1 and 2, along height and width equal ones", p.strides);
            return Err(ID.refusal(Reason::Extent, reason));
        };
        let spec = Spec::of(p, stride);
        ID.require(
            stride != Stride::Half || spec.taps.is_some(),
            Reason::Extent,
            format_args!("filters of {:?} in a dgrad of stride 2, takes 3×3 and 5×5", p.filter),
        )?;
        require_rows(p)?;
        ID.require(arch.runs(spec.target()), Reason::Target, format_args!("needs {}", spec.target().ptx()))?;
        let Some(shares) = Shares::of(p, &spec, arch) else {
            return Err(ID.refusal(Reason::SharedMemory, format_args!("filters of {:?}, of which one leaves no room", p.filter)));
        };
        let counts = shares.all().saturating_mul(p.k.max(p.c)).saturating_mul(p.filter[1] * p.filter[2]);
        ID.require(counts < COUNT_LIMIT, Reason::Extent, format_args!("{counts} CTAs by channels and taps, taken below 2^30"))?;
        Ok(DepthwisePlanes { problem: p.clone(), spec, shares, arch: arch.clone() })
    }

    fn configs(&self) -> Vec<Parts> {
        match self.spec.kind {
            Kind::Pixels => vec![Parts(1)],
            Kind::Filter => {
                // A filter of blocks of taps has sums in parts only, so that there are fewer kernels.
                let alone = self.spec.taps.is_some().then_some(1);
                let mut all: Vec<u64> = alone.into_iter().collect();
                let apart = [CTAS_OF_SM * u64::from(self.arch.sm_count) / self.columns(), self.parts_of_least_turns()];
                for parts in apart.map(|parts| parts.clamp(1, self.shares.all())) {
                    if !all.contains(&parts) {
                        all.push(parts);
                    }
                }
                all.into_iter().map(Parts).collect()
            }
        }
    }

    fn knobs(&Parts(parts): &Parts) -> Knobs {
        Knobs::new([("parts", parts as u32)])
    }

    fn notes(&self, _: &Parts) -> Notes {
        Notes::of(DType::F32)
    }

    fn work(&self, &Parts(parts): &Parts) -> Work {
        let (p, spec, shares) = (&self.problem, &self.spec, &self.shares);
        let ctas = self.ctas(parts) as f64;
        let blocks = if spec.kind == Kind::Filter { (p.k * self.tap_blocks()) as f64 } else { 1.0 };
        let rounds = blocks * self.rounds() as f64;
        let [rows, columns] = spec.outputs().map(f64::from);
        let taps = match spec.taps {
            Some([rows, columns]) => f64::from(rows * columns),
            None if spec.kind == Kind::Filter => f64::from(Spec::BLOCK[0] * Spec::BLOCK[1]),
            None => (p.filter[1] * p.filter[2]) as f64 * 1.3,
        };
        let products = if spec.stride == Stride::Half { taps / 4.0 } else { taps } * rows * columns;
        // For each quad of words, its address and four loads at most; for each block, its words and what follows its sums.
        let quads = shares.quads() as f64 * rounds * 45.0;
        let of_block = products * 1.15 + rows * columns * 6.0 + 100.0;
        let threads = shares.threads() as f64 * rounds * of_block;
        let ends = if spec.kind == Kind::Filter { ctas * f64::from(THREADS) * (taps * 8.0 + 50.0) } else { 0.0 };
        let main = Stream::new(Traffic::Lines, p.traffic_bytes()).issuing((quads + threads + ends) / 32.0).of_ctas(ctas);
        let main = if spec.kind == Kind::Filter { self.in_turns(main, parts) } else { main };
        let joined = self.is_apart(parts).then(|| Stream::new(Traffic::Reduced, 2.0 * (parts * self.part_bytes()) as f64));
        Work::default().beside([main]).beside(joined).beside(statistics::work(p))
    }

    fn lower(&self, &Parts(parts): &Parts) -> Result<Program, Refusal> {
        let p = &self.problem;
        let mut program = empty_program(&p.slots());
        match self.spec.kind {
            Kind::Pixels => self.launch(&self.spec, 1, self.pixel_arguments().bound(&self.spec), &mut program),
            Kind::Filter => self.filter_steps(parts, &mut program),
        }
        if let Some(statistics) = &p.statistics {
            statistics::steps(p, statistics, &mut program);
        }
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let mut specs = Vec::new();
        for dtype in [DType::Bf16, DType::F16, DType::F32] {
            let plain = EpilogueSpec::plain(OperandSpec::strided(dtype));
            let mut add = |kind, stride, taps, flat, epilogue: Option<EpilogueSpec>| {
                specs.push(Spec { kind, stride, taps, flat, dtype, epilogue });
            };
            for stride in [Stride::One, Stride::Two, Stride::Half] {
                for &taps in Spec::unrolled(Kind::Pixels, stride) {
                    add(Kind::Pixels, stride, Some(taps), false, Some(EpilogueSpec { stores_d: false, ..plain.clone() }));
                }
                for flat in [false, true].into_iter().filter(|_| stride != Stride::Half) {
                    add(Kind::Pixels, stride, None, flat, Some(EpilogueSpec { stores_d: false, ..plain.clone() }));
                    add(Kind::Filter, stride, None, flat, None);
                }
                for &taps in Spec::unrolled(Kind::Filter, stride) {
                    [None, Some(plain.clone())].into_iter().for_each(|epilogue| add(Kind::Filter, stride, Some(taps), false, epilogue));
                }
            }
        }
        specs.into_iter().filter(|spec| spec.target() <= target).map(Spec::kernel).collect()
    }
}

/// Rows are as the kernels go over them: elements side by side, those of a result of pixels without gaps.
fn require_rows(p: &ConvProblem) -> Result<(), Refusal> {
    let is_filter = p.direction == Direction::Wgrad;
    let all = [("x", &p.x, p.x_extents(), p.direction == Direction::Dgrad), ("y", &p.y, p.y_extents(), p.direction == Direction::Fprop)];
    for (name, tensor, extents, written) in all {
        let lies = if written && !is_filter {
            is_packed(&tensor.strides[2..], &extents[2..])
        } else {
            (extents[4] <= 1 || tensor.strides[4] == 1) && tensor.strides[3] < COUNT_LIMIT / 4
        };
        let what = if written { "planes without gaps" } else { "rows of neighbours" };
        ID.require(lies, Reason::Layout, format_args!("{name} with strides {:?}, taken are {what}", tensor.strides))?;
    }
    Ok(())
}

/// What is computed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    /// fprop and dgrad.
    Pixels,
    /// wgrad.
    Filter,
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct Spec {
    kind: Kind,
    stride: Stride,
    /// Rows and columns of a filter that is unrolled; of others a few taps at a time.
    taps: Option<[u32; 2]>,
    /// Outputs and taps have one row.
    flat: bool,
    /// Of both operands.
    dtype: DType,
    /// What follows the sums; none where a wgrad leaves parts of them.
    epilogue: Option<EpilogueSpec>,
}

impl Spec {
    /// Taps of any filter that a wgrad sums at a time.
    const BLOCK: [u32; 2] = [1, 8];

    /// Filters that are unrolled.
    fn unrolled(kind: Kind, stride: Stride) -> &'static [[u32; 2]] {
        match (kind, stride) {
            (_, Stride::One) => &[[3, 3], [5, 5], [7, 7]],
            (Kind::Pixels, Stride::Two) => &[[3, 3]],
            (Kind::Filter, Stride::Two) => &[[3, 3], [5, 5], [7, 7]],
            (Kind::Pixels, Stride::Half) => &[[3, 3], [5, 5]],
            (Kind::Filter, Stride::Half) => &[],
        }
    }

    fn of(p: &ConvProblem, stride: Stride) -> Spec {
        let kind = if p.direction == Direction::Wgrad { Kind::Filter } else { Kind::Pixels };
        let epilogue = EpilogueSpec { pairs: false, ..EpilogueSpec::of_conv(p) };
        let epilogue = if epilogue.is_plain() { epilogue.strided() } else { epilogue };
        // Pixels go out through shared memory.
        let epilogue = EpilogueSpec { stores_d: kind == Kind::Filter, ..epilogue };
        let taps = Spec::unrolled(kind, stride).iter().find(|taps| taps.map(u64::from) == p.filter[1..]).copied();
        let rows = if p.direction == Direction::Dgrad { p.input[1] } else { p.output[1] };
        let flat = taps.is_none() && rows == 1 && p.filter[1] == 1;
        Spec { kind, stride, taps, flat, dtype: p.operands()[0].1.dtype, epilogue: Some(epilogue) }
    }

    /// Rows and columns of a thread's outputs; of a wgrad, of its gradients. Words of neighbouring threads begin at whole quads.
    fn outputs(&self) -> [u32; 2] {
        match (self.flat, self.stride) {
            (true, _) => [1, 8],
            (_, Stride::One) => [4, 4],
            // Of many taps, words of shared memory that meet few rows of gradients would take longer than the products.
            (_, Stride::Two) if self.kind == Kind::Filter && self.has_many_taps() => [4, 4],
            (_, Stride::Two) => [2, 4],
            (_, Stride::Half) => [4, 8],
        }
    }

    /// More taps than 3×3, in a kernel that is written out for them.
    fn has_many_taps(&self) -> bool {
        matches!(self.taps, Some([5, 5] | [7, 7]))
    }

    /// Quads whose loads a thread has on their way together: of a wgrad of stride 2 and many taps, a CTA stages four times as many words as its threads have gradients.
    fn quads_ahead(&self) -> u32 {
        if self.is_split() && self.has_many_taps() { 8 } else { 4 }
    }

    /// Even and odd words of staged lines lie apart: a block of a wgrad of stride 2 begins eight words behind its neighbour's.
    fn is_split(&self) -> bool {
        self.kind == Kind::Filter && self.stride == Stride::Two
    }

    /// Bytes that four words of a staged line take at one place.
    fn quad_bytes(&self) -> u32 {
        if self.is_split() { 8 } else { 16 }
    }

    /// Of split lines, the bytes from an even word to the odd one behind it.
    fn odd_words(&self) -> i64 {
        i64::from(self.staged_bytes() / 2)
    }

    /// Rows and columns of the taps that a wgrad sums at a time.
    fn block(&self) -> [u32; 2] {
        self.taps.unwrap_or(Spec::BLOCK)
    }

    fn result_type(&self) -> DType {
        self.epilogue.as_ref().map_or(DType::F32, |epilogue| epilogue.d.dtype)
    }

    fn result_bytes(&self) -> u32 {
        self.result_type().bytes() as u32
    }

    /// Shared memory for lines: of blocks beside and below each other, with what is around them.
    fn staged_bytes(&self) -> u32 {
        match (self.flat, self.stride, self.taps) {
            (false, Stride::One, Some([3, 3])) => 14 << 10,
            (false, Stride::One, Some([5, 5])) => 18 << 10,
            (_, Stride::Half, _) | (true, Stride::One, _) => 12 << 10,
            (_, Stride::Two, _) if self.kind == Kind::Filter && self.has_many_taps() => 40 << 10,
            _ => 24 << 10,
        }
    }

    /// Shared memory for taps.
    fn table_bytes(&self) -> u32 {
        match self.taps {
            Some([3, 3]) => 4 << 10,
            Some(_) => 6 << 10,
            None => 8 << 10,
        }
    }

    /// Shared memory for results: of a plane after the other, rows as they lie in global memory.
    fn kept_bytes(&self) -> u32 {
        let [rows, columns] = self.outputs();
        THREADS * rows * columns * self.result_bytes() + 512
    }

    /// CTAs that an SM has registers and shared memory for.
    fn ctas_of_sm(&self) -> u32 {
        match (self.kind, self.taps) {
            (Kind::Pixels, Some([3, 3])) if self.stride != Stride::Half => 7,
            (Kind::Filter, Some([3, 3])) => 7,
            (Kind::Filter, Some([7, 7])) => 4,
            _ => 5,
        }
    }

    fn name(&self) -> String {
        let kind = if self.kind == Kind::Pixels { "pixels" } else { "wgrad" };
        let stride = match self.stride {
            Stride::One => "s1",
            Stride::Two => "s2",
            Stride::Half => "half",
        };
        let taps =
            self.taps.map_or_else(|| if self.flat { "row" } else { "any" }.to_owned(), |[rows, columns]| format!("{rows}x{columns}"));
        let epilogue = self.epilogue.as_ref().map_or_else(|| "parts".to_owned(), EpilogueSpec::name);
        format!("conv_depthwise_planes_{kind}_{}_{stride}_{taps}_{epilogue}", self.dtype)
    }

    fn target(&self) -> Target {
        let own = compute::target_of_all([self.dtype]).max(Target::Sm80);
        self.epilogue.as_ref().map_or(own, |epilogue| epilogue.target().max(own))
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas: self.ctas_of_sm(), cluster: 1 };
        build(header, |k| match self.kind {
            Kind::Pixels => pixels::kernel(k, self),
            Kind::Filter => filter::kernel(k, self),
        })
    }
}

impl DepthwisePlanes {
    /// Filters of a channel of x.
    fn multiplier(&self) -> u64 {
        self.problem.k / self.problem.c
    }

    /// Planes that one plane of the result sums over.
    fn rounds(&self) -> u64 {
        if self.problem.direction == Direction::Dgrad { self.multiplier() } else { 1 }
    }

    fn tap_blocks(&self) -> u64 {
        self.block_counts().iter().product()
    }

    fn block_counts(&self) -> [u64; 2] {
        std::array::from_fn(|i| self.problem.filter[i + 1].div_ceil(u64::from(self.spec.block()[i])))
    }

    /// Whether a wgrad leaves its sums to a second launch.
    fn is_apart(&self, parts: u64) -> bool {
        self.spec.kind == Kind::Filter && (parts > 1 || self.spec.taps.is_none())
    }

    fn part_bytes(&self) -> u64 {
        let [rows, columns] = self.spec.block();
        self.problem.k * self.tap_blocks() * u64::from(rows * columns) * 4
    }

    fn ctas(&self, parts: u64) -> u64 {
        if self.spec.kind == Kind::Filter { self.columns() * parts } else { self.shares.all() }
    }

    /// Sums of a wgrad, each of the CTAs of all its parts.
    fn columns(&self) -> u64 {
        self.problem.k * self.tap_blocks()
    }

    /// Shares that one place for a CTA goes through, one behind the other, and the ends of its CTAs.
    fn turns(&self, parts: u64) -> [u64; 2] {
        let places = u64::from(self.arch.sm_count * self.spec.ctas_of_sm());
        let rounds = self.ctas(parts).div_ceil(places);
        [rounds * self.shares.all().div_ceil(parts), rounds]
    }

    /// A wgrad's product, if places for CTAs idle while others go through more shares; and as one place goes through its shares alone: it waits for the gradients of a share and for its
    /// lines, a few quads of each thread at a time, and then works on them.
    fn in_turns(&self, main: Stream, parts: u64) -> Stream {
        let (spec, shares) = (&self.spec, &self.shares);
        let [longest, rounds] = self.turns(parts);
        let places = (self.ctas(parts) as f64).min(f64::from(self.arch.sm_count * spec.ctas_of_sm()));
        let mean = (shares.all() * self.columns()) as f64 / places;
        // What is left of a last round runs faster.
        let turns = 0.5 * (longest as f64 + mean);
        let trips = 1 + shares.quads_of_share().div_ceil(u64::from(spec.quads_ahead() * THREADS));
        let of_share = TURNS_OF_TRIP * trips as f64 + main.issued / (shares.all() * self.columns()) as f64 / ISSUED_IN_TURN;
        main.issuing(main.issued * turns / mean).in_turns(turns * of_share + TURNS_OF_TRIP * rounds as f64)
    }

    /// The fewest parts with which the chip is through first, if the end of a CTA takes as long as a share.
    fn parts_of_least_turns(&self) -> u64 {
        (1..=self.shares.all().min(MOST_PARTS)).min_by_key(|&parts| self.turns(parts).iter().sum::<u64>()).unwrap_or(1)
    }

    fn launch(&self, spec: &Spec, parts: u64, args: Arguments, program: &mut Program) {
        program.launch(Launch::new(spec.clone().kernel(), [self.ctas(parts) as u32, 1, 1], args));
    }

    /// From image to image and from channel to channel.
    fn strides(tensor: &Tensor) -> [u64; 2] {
        [0, 1].map(|dim| tensor.strides[dim] * tensor.dtype.bytes() as u64)
    }

    /// The tensor whose lines are staged, with its rows and columns.
    fn source_arguments(&self) -> stage::SourceArgs {
        let (p, spec) = (&self.problem, &self.spec);
        let (tensor, extents) = if p.direction == Direction::Dgrad { (&p.y, p.output) } else { (&p.x, p.input) };
        let first = |dim: usize| {
            let (pad, taps) = (p.pads_before[dim] as i64, p.filter[dim] as i64);
            match spec.stride {
                Stride::One if p.direction == Direction::Dgrad => pad - (taps - 1),
                Stride::One | Stride::Two => -pad,
                Stride::Half => (pad - spec.stride.before(p, dim) as i64) / 2 - i64::from(Stride::lead(taps as u32)),
            }
        };
        stage::SourceArgs {
            pointer: Address::buffer(tensor.slot.0 as usize),
            extents: [extents[1] as u32, extents[2] as u32],
            row_bytes: (tensor.strides[3] * tensor.dtype.bytes() as u64) as u32,
            first: [1, 2].map(|dim| first(dim) as i32),
            lines: divisor(self.shares.lines),
            quads: divisor(self.shares.quads_of_line),
        }
    }

    fn pixel_arguments(&self) -> pixels::PixelsArgs {
        let (p, spec) = (&self.problem, &self.spec);
        let is_dgrad = p.direction == Direction::Dgrad;
        let multiplier = self.multiplier();
        let (read, read_channels, written, channels) = if is_dgrad { (&p.y, p.k, &p.x, p.c) } else { (&p.x, p.c, &p.y, p.k) };
        let bytes = p.w.dtype.bytes() as u64;
        let [of_filter, _, _, down, right] = p.w.strides.map(|stride| stride * bytes);
        let is_reversed = spec.stride.is_reversed(p);
        let walk = |stride: u64| if is_reversed { stride.wrapping_neg() } else { stride };
        let last = (p.filter[1] - 1) * down + (p.filter[2] - 1) * right;
        let columns = p.filter[2];
        let width = if is_dgrad { p.input[2] } else { p.output[2] };
        let row_bytes = width * u64::from(spec.result_bytes());
        let tile_bytes = self.shares.tile_columns(spec) * u64::from(spec.result_bytes());
        let is_whole = self.shares.tiles == 1;
        pixels::PixelsArgs {
            cut: self.shares.arguments(),
            source: self.source_arguments(),
            planes: pixels::PlanesArgs {
                quotient: divisor(if is_dgrad { 1 } else { multiplier }),
                factor: if is_dgrad { multiplier as u32 } else { 1 },
                rounds: self.rounds() as u32,
                channels: divisor(read_channels),
                strides: Self::strides(read),
                plane_bytes: Self::strides(read)[usize::from(read_channels > 1)] as u32,
            },
            filter: pixels::FilterArgs {
                pointer: Address::buffer(p.w.slot.0 as usize),
                origin: if is_reversed { last } else { 0 },
                strides: [of_filter, walk(down), walk(right)],
                factor: if is_dgrad { multiplier as u32 } else { 1 },
                rows: divisor(p.filter[1]),
                columns: columns as u32,
                pitch: divisor(columns.next_multiple_of(4)),
            },
            result: pixels::ResultArgs {
                pointer: Address::buffer(written.slot.0 as usize),
                channels: divisor(channels),
                strides: Self::strides(written),
                row_bytes: row_bytes as u32,
                pitch_bytes: if is_whole { row_bytes } else { tile_bytes.next_multiple_of(u64::from(SPAN_BYTES)) + u64::from(SPAN_BYTES) }
                    as u32,
                apart_bytes: if is_whole { 0 } else { row_bytes as u32 },
            },
            epilogue: spec.epilogue.as_ref().map(|epilogue| epilogue.conv_arguments(p)),
        }
    }

    fn filter_steps(&self, parts: u64, program: &mut Program) {
        let p = &self.problem;
        let is_apart = self.is_apart(parts);
        let spec = Spec { epilogue: self.spec.epilogue.clone().filter(|_| !is_apart), ..self.spec.clone() };
        let address = is_apart.then(|| program.add_scratch("parts of a filter's gradient", self.part_bytes() * parts));
        let [rows, columns] = self.block_counts();
        let tap_blocks = || TapBlocksArguments { columns: divisor(columns), rows: divisor(rows), depths: 1 };
        let [image, channel] = Self::strides(&p.y);
        let args = filter::FilterArgs {
            cut: self.shares.arguments(),
            source: self.source_arguments(),
            source_strides: Self::strides(&p.x),
            plane_bytes: Self::strides(&p.x)[0] as u32,
            quotient: divisor(self.multiplier()),
            gradients: Address::buffer(p.y.slot.0 as usize),
            gradient_strides: [image, channel, p.y.strides[3] * p.y.dtype.bytes() as u64],
            channels: divisor(p.k),
            all_tap_blocks: divisor(self.tap_blocks()),
            tap_blocks: tap_blocks(),
            shares: self.shares.all() as u32,
            parts: parts as u32,
            to: filter::ToArgs {
                parts: address,
                extents: [p.filter[1] as u32, p.filter[2] as u32],
                flipped: u32::from(p.flip),
                epilogue: spec.epilogue.as_ref().map(|epilogue| epilogue.conv_arguments(p)),
            },
        };
        self.launch(&spec, parts, args.bound(&spec), program);
        if let (Some(address), Some(epilogue)) = (address, &self.spec.epilogue) {
            let blocks = p.k.div_ceil(u64::from(reduction::CHANNELS));
            let [block_rows, block_columns] = self.spec.block();
            let args = reduction::SplitKReductionArguments {
                parts: address,
                count: parts as u32,
                part_bytes: self.part_bytes(),
                channel_blocks: divisor(blocks),
                channels: p.k as u32,
                tap_blocks: tap_blocks(),
                block_columns,
                block_rows,
                filter: p.filter.map(|extent| extent as u32),
                flipped: u32::from(p.flip),
                epilogue: epilogue.conv_arguments(p),
            };
            let taps = self.tap_blocks() * u64::from(block_rows * block_columns);
            let args = args.bound(epilogue);
            program.launch(Launch::new(reduction::kernel(epilogue.clone()), [(taps * blocks) as u32, 1, 1], args));
        }
    }
}
