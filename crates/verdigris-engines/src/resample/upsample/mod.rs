//! Resampling up by whole factors: several outputs of each element along a row, a column or both.
//!
//! It takes images, rows of them and volumes that keep their depth, of f16 and bf16, and of f32 where elements move, channels-first and, where outputs have several taps, channels-last: `nearest`,
//! `linear` and `cubic` up by two or four along height, width or both, `nearest` along the height by three too, where what an output reads follows from the element that it is one of, with the outermost elements
//! again and again beside the tensor.
//!
//! **Method.** The outputs of neighbouring elements read the same few neighbours, so a thread makes all outputs of a block: of four rows by as many columns as make 16 bytes
//! of outputs, channels-last of four rows of an element in several channels. It reads the block with its halo, all of it on its way before the first is used, filters
//! each row of elements along the row once, and then down the columns for each row of outputs. So an element is read, widened and filtered about once for four
//! and more outputs. Weights come from tables of the host's, one of rows and one of columns: coordinates are rounded as the op says. Nearest moves bits.
//!
//! **When it wins.** Wherever it takes the problem and there are blocks for the chip.
//!
//! **Numbers.** Sums in f32, along rows first, by multiply-adds in the order of the taps; where weights along rows are below 0, of a quarter of the values, so that no part of
//! a sum is beyond the range whose whole is not. Cubic along the height alone has no such room: values within a tenth of f32's greatest may become infinite. Results repeat bit for bit.

mod along;
mod kernel;

use serde::{Deserialize, Serialize};
use verdigris_graph::{Problem, ResampleProblem, View};
use verdigris_kir::face::{Header, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::program::{Address, Base, KernelRef, Launch, Program};
use verdigris_tensor::DType;

use super::{CHANNELS_FIRST, CHANNELS_LAST, channels_last, is_last};
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Stream, Traffic, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::compute;
use crate::fuse::strided;

use along::Along;
use kernel::UpsampleArgs;

const THREADS: u32 = 128;
/// Rows of elements below each other that a thread takes.
const ROWS: u32 = 4;
/// What values are divided by while they are mixed by weights below 0: the weights of an output along both dims come to less, whatever their signs.
const SCALE: f64 = 4.0;
/// Points of a launch.
const MOST_POINTS: u64 = 1 << 31;
/// Positions along a dim that a table of weights may have.
const POSITIONS: u64 = 1 << 23;

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct Upsample {
    problem: ResampleProblem,
    spec: Spec,
}

/// How many neighbours a thread takes: channels, or elements of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Vector(u32);

impl Algorithm for Upsample {
    const ID: EngineId = super::ID;
    const VERSION: u32 = 1;
    type Config = Vector;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Resample(p) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is resample", problem.kind())));
        };
        Self::ID.require(!p.backward, Reason::Direction, "a gradient, taken is resampling up")?;
        let types = [p.from.dtype, p.to.dtype];
        // Rows of elements that are rounded before they are mixed cost a rounding, which results of 16 bits do not show.
        let are_halves = types.iter().all(|dtype| matches!(dtype, DType::F16 | DType::Bf16)) && p.compute == DType::F32;
        let taken = are_halves || (p.moves() && types[0] == DType::F32);
        Self::ID.require(
            taken,
            Reason::DType,
            format_args!("{} and {}, taken are f16 and bf16, and f32 that moves", types[0], types[1]),
        )?;
        let positions = p.out[1].max(p.out[2]);
        Self::ID.require(positions <= POSITIONS, Reason::Extent, format_args!("{positions} positions along a dim, taken up to 2^23"))?;
        let axes = [0, 1, 2].map(|axis| Along::of(p, axis));
        let is_up = axes[1..].iter().flatten().any(|along| along.outputs() > 1);
        let [Some(depth), Some(height), Some(width)] = axes else {
            return Err(Self::ID.refusal(Reason::Extent, format_args!("{:?}, taken are whole factors up", p.taps)));
        };
        Self::ID.require(is_up && depth.outputs() == 1, Reason::Extent, "no dim of two that is up, or the depth")?;
        let last = is_last(p);
        let several = [&height, &width].iter().any(|along| !along.is_single());
        Self::ID.require(several || !last, Reason::Layout, "elements that move channels-last, which have no neighbours to share")?;
        Self::ID.require(arch.runs(compute::target_of_all(types)), Reason::Target, "element types of a later chip")?;
        let spec = Spec { types, moved: p.moves(), last, vector: 1, axes: [height, width] };
        let Some(vector) = spec.widest(p) else {
            return Err(Self::ID.refusal(Reason::Layout, "neighbours apart from each other"));
        };
        let spec = Spec { vector, ..spec };
        let points = spec.space(p).iter().fold(1, |all: u64, &dim| all.saturating_mul(dim));
        Self::ID.require(points < MOST_POINTS, Reason::Extent, format_args!("{points} blocks, taken below 2^31"))?;
        Ok(Upsample { problem: p.clone(), spec })
    }

    fn configs(&self) -> Vec<Vector> {
        vec![Vector(self.spec.vector)]
    }

    fn knobs(&Vector(vector): &Vector) -> Knobs {
        Knobs::new([("rows", ROWS), ("vector", vector)])
    }

    fn notes(&self, _: &Vector) -> Notes {
        Notes::of(self.problem.compute)
    }

    fn work(&self, _: &Vector) -> Work {
        let (p, spec) = (&self.problem, &self.spec);
        let elements = |dims: [u64; 5]| dims.iter().map(|&dim| dim as f64).product::<f64>();
        let bytes: f64 = p.operands().into_iter().map(|(_, view, dims, _)| elements(dims) * view.dtype.bytes() as f64).sum();
        let points: f64 = spec.space(p).iter().map(|&dim| dim as f64).product();
        let taps: f64 = spec.axes.iter().map(|along| if along.is_single() { 0.0 } else { f64::from(along.taps) }).sum();
        let issued = (elements(p.to_dims()) * (1.0 + 1.5 * taps) + points * 60.0) / 32.0;
        Work::default().beside([Stream::new(Traffic::Lines, bytes).issuing(issued).of_ctas((points / f64::from(THREADS)).ceil())])
    }

    fn lower(&self, _: &Vector) -> Result<Program, Refusal> {
        let (p, spec) = (&self.problem, &self.spec);
        let mut program = Program { buffer_alignment_bytes: vec![1; p.slots().len()], ..Program::default() };
        if p.is_empty() {
            return Ok(program);
        }
        let mut weights = Vec::new();
        for (along, axis) in spec.axes.iter().zip([1, 2]) {
            let scale = if axis == 2 && spec.is_scaled() { 1.0 / SCALE } else { 1.0 };
            weights.push((!along.is_single()).then(|| {
                program.constants.push(along.weights(p, axis, scale));
                Address { base: Base::Constant(program.constants.len() - 1), offset_bytes: 0 }
            }));
        }
        let argument = |view: &View| strided::lines_argument(&if spec.last { channels_last(view) } else { view.clone() }, &[0; 5]);
        let extents = spec.space(p).map(|dim| dim as u32).to_vec();
        let points = extents.iter().product::<u32>();
        let operands = [&p.from, &p.to].map(argument).into();
        let [_, height, width] = p.extents.map(|extent| extent as u32);
        let args = UpsampleArgs { points, extents, height, width, weights, operands };
        program.launch(Launch::new(spec.clone().kernel(), [points.div_ceil(THREADS), 1, 1], args.bound(spec)));
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let twice = |firsts: [i32; 2], taps| [0; 2].map(|_| Along { firsts: firsts.to_vec(), taps });
        let (nearest, linear, cubic) = (twice([0, 0], 1), twice([-1, 0], 2), twice([-2, -1], 4));
        let mut specs = Vec::new();
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let full = 16 / dtype.bytes() as u32;
            let mut put = |axes: &[Along; 2], last, vector| {
                let moved = axes.iter().all(Along::is_single);
                specs.push(Spec { types: [dtype; 2], moved, last, vector, axes: axes.clone() });
            };
            let mixes = dtype != DType::F32;
            if mixes {
                put(&linear, true, full / 2);
                put(&cubic, true, full / 2);
            }
            // Rows of outputs of any length.
            for vector in [1, 2, 4].into_iter().filter(|vector| 2 * vector <= full) {
                put(&nearest, false, vector);
                if mixes {
                    put(&linear, false, vector);
                }
            }
        }
        specs.into_iter().filter(|spec| spec.target() <= target).map(Spec::kernel).collect()
    }
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct Spec {
    /// Element types of what is read and what is written.
    types: [DType; 2],
    /// Each output is the bits of an element.
    moved: bool,
    /// A thread has neighbouring channels of an element, not neighbouring elements of a row.
    last: bool,
    /// How many.
    vector: u32,
    /// Of rows and of columns.
    axes: [Along; 2],
}

impl Spec {
    /// The dims `[n, c, depth, height, width]` from the slowest to the fastest that threads run through.
    fn order(&self) -> [usize; 5] {
        if self.last { CHANNELS_LAST } else { CHANNELS_FIRST }
    }

    /// The space of blocks, in that order.
    fn space(&self, p: &ResampleProblem) -> [u64; 5] {
        let mut dims = p.x_dims();
        dims[3] = dims[3].div_ceil(u64::from(ROWS));
        let mut space = self.order().map(|dim| dims[dim]);
        space[4] /= u64::from(self.vector);
        space
    }

    /// Whether values are mixed by weights below 0 along a row, as by filters of more than two taps.
    fn is_scaled(&self) -> bool {
        self.axes[1].taps > 2
    }

    /// The most neighbours of a thread that the tensors allow, if they lie side by side.
    fn widest(&self, p: &ResampleProblem) -> Option<u32> {
        let [(_, from, from_dims, _), (_, to, to_dims, _)] = p.operands();
        let [from_bytes, to_bytes] = self.types.map(|dtype| dtype.bytes() as u32);
        if self.last {
            let fit = |view, dims: [u64; 5]| strided::neighbours_of(&channels_last(view), &CHANNELS_LAST.map(|dim| dims[dim]));
            // A block keeps many elements: 16 bytes of channels would leave registers for few threads.
            let most = 8 / from_bytes.max(to_bytes);
            let vector = fit(from, from_dims).min(fit(to, to_dims)).min(most);
            return (vector > 1).then_some(vector);
        }
        let outputs = self.axes[1].outputs() as u32;
        let side_by_side = |view: &View, extent| extent == 1 || view.strides[4] == 1;
        // Of a row of outputs a thread has whole vectors, each of which is aligned.
        let (read, written) = (strided::neighbours_of(from, &from_dims), strided::neighbours_of(to, &to_dims));
        let fits = |vector: &u32| vector * outputs * to_bytes <= 16 && *vector <= read && (vector * outputs).next_power_of_two() <= written;
        let is_whole = outputs.is_power_of_two() && side_by_side(from, p.extents[2]) && side_by_side(to, p.out[2]);
        [8, 4, 2, 1].into_iter().find(fits).filter(|_| is_whole)
    }

    fn name(&self) -> String {
        let [from, to] = self.types.map(|dtype| dtype.name());
        let [rows, columns] = self.axes.each_ref().map(Along::word);
        let walk = if self.last { "last" } else { "first" };
        let moved = if self.moved { "_moved" } else { "" };
        format!("resample_up_{walk}{moved}_{rows}_{columns}_v{}_{from}_{to}", self.vector)
    }

    fn target(&self) -> Target {
        compute::target_of_all(self.types)
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas: 1, cluster: 1 };
        build(header, |k| kernel::build(self, k))
    }
}
