//! `pool.blocks`: gradients of average pooling ([`verdigris_graph::PoolProblem`] has the formulas), straight from global memory to global memory.
//!
//! It takes one and two spatial dims under windows of up to five taps, without dilation, each of which meets an element, and adaptive windows where they divide
//! the image; in f32, f16 and bf16. Images lie channels-last with channels of whole accesses, or channels-first with rows of whole accesses.
//!
//! **Method.** A thread takes a block of `dx`: as many rows as windows are apart, and along them as many columns of a vector of channels, or, channels-first,
//! the columns of an access. Which windows hold which element of a block is the same for all blocks, so that it is known when the kernel is built: nothing is
//! divided and nothing goes round. Of each window that holds one of them a thread reads what it shares out once, and each element of `dx` is written once, by
//! accesses of up to 16 bytes.
//!
//! **When it wins.** Under windows that do not meet, where each byte passes once and nothing waits for others: of 2×2, in 0.43 to 0.75 of the time of `pool.direct` and
//! `pool.planes` (one H200). What windows share is read again by the blocks around, from L1; such have been counted and not timed beside `pool.planes`.
//!
//! **Numbers.** Sums are in f32, windows in row-major order; results repeat bit for bit.

mod kernel;

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};
use verdigris_graph::{PoolMode, PoolPass, PoolProblem, Problem, View};
use verdigris_kir::face::{Header, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::program::{KernelRef, Launch, Program};
use verdigris_tensor::DType;

use super::axis::Axis;
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Stream, Traffic, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::compute;
use crate::fuse::strided::neighbours_of;
use crate::layout::space::element;

use super::tensor::TensorArgs;
use kernel::GradientArgs;

const THREADS: u32 = 256;
/// Bytes of the largest access, and of the smallest that is worth a thread.
const ACCESS_BYTES: [u32; 2] = [16, 8];

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct Blocks {
    problem: PoolProblem,
    spec: Spec,
    axes: [Axis; 2],
}

impl Algorithm for Blocks {
    const ID: EngineId = EngineId { name: "pool.blocks", number: 604 };
    const VERSION: u32 = 1;
    type Config = u32;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Pool(p) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is pool", problem.kind())));
        };
        let (PoolMode::Average { count_include_pad }, PoolPass::Backward { dy, dx, .. }) = (p.mode, &p.pass) else {
            return Err(match p.mode {
                PoolMode::Max => Self::ID.refusal(Reason::Problem, "maxima, taken are averages"),
                PoolMode::Average { .. } => Self::ID.refusal(Reason::Direction, "the forward direction, taken are gradients"),
            });
        };
        let dtype = dx.dtype;
        let is_taken = dy.dtype == dtype && [DType::F32, DType::F16, DType::Bf16].contains(&dtype);
        let reason = format_args!("{} and {dtype}, taken are two of f32, f16 and bf16 that are the same", dy.dtype);
        Self::ID.require(is_taken, Reason::DType, reason)?;
        let axes = Axis::require_both(Self::ID, p)?;
        let [_, width] = &axes;
        let Some((along, together)) = Along::of(p, [dy, dx], width) else {
            let reason = format_args!("dx with strides {:?}, taken are channels or rows that are whole accesses", dx.strides);
            return Err(Self::ID.refusal(Reason::Layout, reason));
        };
        // Padding that no window meets counts nowhere.
        let padded = count_include_pad || !axes.iter().any(Axis::is_padded);
        let [taps, stride, pad] = [axes.map(|axis| axis.taps), axes.map(|axis| axis.stride), axes.map(|axis| axis.pad)];
        let spec = Spec { padded, dtype, taps, stride, pad, along, together };
        let accepted = Blocks { problem: p.clone(), spec, axes };
        let blocks = accepted.blocks();
        Self::ID.require(blocks < 1 << 31, Reason::Extent, format_args!("{blocks} blocks, taken below 2^31"))?;
        for view in [dy, dx] {
            let far = view.strides[3..].iter().map(|stride| stride.saturating_mul(dtype.bytes() as u64)).max().unwrap_or(0);
            Self::ID.require(far < 1 << 32, Reason::Layout, format_args!("rows {far} bytes apart, taken below 2^32"))?;
        }
        Self::ID.require(
            arch.runs(accepted.spec.target()),
            Reason::Target,
            format_args!("{dtype}, which needs {}", accepted.spec.target().ptx()),
        )?;
        Ok(accepted)
    }

    fn configs(&self) -> Vec<u32> {
        vec![self.spec.along.vector()]
    }

    fn knobs(&vector: &u32) -> Knobs {
        Knobs::new([("vector", vector)])
    }

    fn notes(&self, _: &u32) -> Notes {
        Notes::of(self.problem.compute)
    }

    fn work(&self, _: &u32) -> Work {
        let elements = |dims: [u64; 5]| dims.iter().map(|&dim| dim as f64).product::<f64>();
        let (p, spec) = (&self.problem, &self.spec);
        let bytes = (elements(p.x_dims()) + elements(p.y_dims())) * spec.dtype.bytes() as f64;
        // Of a block: its place, each of its windows, and each of its elements once for each window that holds it.
        let blocks = self.blocks() as f64;
        let [high, wide] = [0, 1].map(|axis| spec.windows(axis).count() as f64);
        let held = elements(p.x_dims()) * f64::from(spec.taps[0].div_ceil(spec.stride[0]) * spec.taps[1].div_ceil(spec.stride[1]));
        let issued = (blocks * (50.0 + 12.0 * high * wide) + 3.0 * held) / 32.0;
        let ctas = (blocks / f64::from(THREADS)).ceil();
        Work::default().beside([Stream::new(Traffic::Lines, bytes).issuing(issued).of_ctas(ctas)])
    }

    fn lower(&self, _: &u32) -> Result<Program, Refusal> {
        let (p, spec) = (&self.problem, &self.spec);
        let mut program = Program { buffer_alignment_bytes: vec![1; p.slots().len()], ..Program::default() };
        if p.is_empty() {
            return Ok(program);
        }
        let bytes = spec.dtype.bytes() as u64;
        let tensor = |view: &View| {
            let [image, channel, row, column] = [0, 1, 3, 4].map(|dim| view.strides[dim] * bytes);
            let channel_bytes = channel * u64::from(spec.lanes());
            TensorArgs { memory: element(view, []), image_bytes: image, channel_bytes, row_bytes: row as u32, column_bytes: column as u32 }
        };
        let PoolPass::Backward { dy, dx, .. } = &p.pass else { return Ok(program) };
        let [height, width] = &self.axes;
        let [blocks_high, blocks_wide] = self.blocks_of_plane();
        let args = GradientArgs {
            blocks: self.blocks() as u32,
            channels: (p.c / u64::from(spec.lanes())) as u32,
            blocks_high,
            blocks_wide,
            extents: [height.extent, width.extent],
            out: [height.out, width.out],
            dy: tensor(dy),
            dx: tensor(dx),
        };
        program.launch(Launch::new(spec.clone().kernel(), [args.blocks.div_ceil(THREADS), 1, 1], args.bound(spec)));
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let mut specs = Vec::new();
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let [most, least] = ACCESS_BYTES.map(|bytes| bytes / dtype.bytes() as u32);
            // The usual windows: three taps and two steps, two taps and two steps, which have no padding.
            for (taps, pad, padded) in [(3, 1, true), (3, 1, false), (2, 0, true)] {
                let of = |along, together| Spec { padded, dtype, taps: [taps; 2], stride: [2; 2], pad: [pad; 2], along, together };
                specs.push(of(Along::Channels { vector: most }, 1));
                specs.extend([most, least].map(|vector| of(Along::Columns { vector }, vector / 2)));
            }
        }
        specs.into_iter().filter(|spec| spec.target() <= target).map(Spec::kernel).collect()
    }
}

impl Blocks {
    /// Blocks below and beside each other.
    fn blocks_of_plane(&self) -> [u32; 2] {
        [0, 1].map(|axis| self.axes[axis].extent.div_ceil(self.spec.block()[axis]))
    }

    /// Blocks in all.
    fn blocks(&self) -> u64 {
        let of_plane: u64 = self.blocks_of_plane().iter().map(|&blocks| u64::from(blocks)).product();
        [self.problem.n, self.problem.c / u64::from(self.spec.lanes())].into_iter().fold(of_plane, u64::saturating_mul)
    }
}

/// Along what an access has neighbours, and how many.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Along {
    Channels { vector: u32 },
    Columns { vector: u32 },
}

impl Along {
    /// For `dy` and `dx`, and how many windows beside each other an access of `dy` has.
    fn of(p: &PoolProblem, [dy, dx]: [&View; 2], width: &Axis) -> Option<(Along, u32)> {
        let bytes = dx.dtype.bytes() as u32;
        let [most, least] = ACCESS_BYTES.map(|size| size / bytes);
        let channels = |view: &View, dims: [u64; 5]| {
            const LAST: [usize; 5] = [0, 2, 3, 4, 1];
            neighbours_of(&View { strides: LAST.map(|dim| view.strides[dim]).to_vec(), ..view.clone() }, &LAST.map(|dim| dims[dim]))
        };
        let vector = most.min(channels(dy, p.y_dims())).min(channels(dx, p.x_dims()));
        if vector >= least {
            return Some((Along::Channels { vector }, 1));
        }
        let vector = most.min(neighbours_of(dx, &p.x_dims()));
        if vector < least || !vector.is_multiple_of(width.stride) {
            return None;
        }
        let windows = vector / width.stride;
        let together = if neighbours_of(dy, &p.y_dims()) >= windows { windows } else { 1 };
        Some((Along::Columns { vector }, together))
    }

    fn vector(self) -> u32 {
        let (Along::Channels { vector } | Along::Columns { vector }) = self;
        vector
    }
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct Spec {
    /// Padding counts, or there is none.
    padded: bool,
    dtype: DType,
    /// Of windows along rows and columns.
    taps: [u32; 2],
    stride: [u32; 2],
    pad: [u32; 2],
    along: Along,
    /// Windows beside each other that one access of `dy` has.
    together: u32,
}

impl Spec {
    /// Rows and columns of a block: a multiple of the distance of windows. Where each element begins a window, neighbours share most of theirs.
    fn block(&self) -> [u32; 2] {
        let of = |axis: usize| if self.stride[axis] == 1 && self.taps[axis] > 1 { 2 } else { self.stride[axis] };
        match self.along {
            Along::Channels { .. } => [of(0), of(1)],
            Along::Columns { vector } => [of(0), vector],
        }
    }

    /// Neighbouring channels of a thread.
    fn lanes(&self) -> u32 {
        match self.along {
            Along::Channels { vector } => vector,
            Along::Columns { .. } => 1,
        }
    }

    /// The windows that hold elements of a block, counted from the one that begins as many elements behind the padding as the block behind the image.
    fn windows(&self, axis: usize) -> RangeInclusive<i32> {
        let [taps, stride, pad, block] = [self.taps, self.stride, self.pad, self.block()].map(|of| of[axis] as i32);
        -((taps - 1 - pad) / stride)..=(block - 1 + pad) / stride
    }

    /// Whether such a window holds an element of the block.
    fn holds(&self, axis: usize, window: i32, element: u32) -> bool {
        let tap = element as i32 + self.pad[axis] as i32 - window * self.stride[axis] as i32;
        (0..self.taps[axis] as i32).contains(&tap)
    }

    fn name(&self) -> String {
        let ([high, wide], [down, right], [above, before]) = (self.taps, self.stride, self.pad);
        let padded = if self.padded { "_padded" } else { "" };
        let along = match self.along {
            Along::Channels { vector } => format!("channels{vector}"),
            Along::Columns { vector } => format!("columns{vector}of{}", self.together),
        };
        format!("pool_blocks_average{padded}_backward_w{high}x{wide}_s{down}x{right}_p{above}x{before}_{along}_{}", self.dtype)
    }

    /// The least chip that has the conversions.
    fn target(&self) -> Target {
        compute::target_of_all([self.dtype])
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas: 1, cluster: 1 };
        build(header, |k| kernel::build(self, k))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each element finds the windows that hold it, and no others, among those of its block.
    #[test]
    fn blocks_have_the_windows_of_their_elements() {
        for (taps, stride) in (1..=5).flat_map(|taps| (1..=5).map(move |stride| (taps, stride))) {
            for pad in 0..taps {
                let [taps, stride, pad] = [taps, stride, pad].map(|of| [of; 2]);
                let along = Along::Channels { vector: 8 };
                let spec = Spec { padded: true, dtype: DType::Bf16, taps, stride, pad, along, together: 1 };
                let block = spec.block()[0];
                for element in 0..100u32 {
                    let (number, place) = (element / block, element % block);
                    let first = (number * block / stride[0]) as i32;
                    let windows = spec.windows(0).filter(|&window| spec.holds(0, window, place)).map(|window| first + window);
                    let taps_at =
                        |window: i32| window * stride[0] as i32 - pad[0] as i32..window * stride[0] as i32 - pad[0] as i32 + taps[0] as i32;
                    let all: Vec<i32> = (-10..120).filter(|&window| taps_at(window).contains(&(element as i32))).collect();
                    assert_eq!(windows.collect::<Vec<_>>(), all, "{element} of {spec:?}");
                }
            }
        }
    }
}
