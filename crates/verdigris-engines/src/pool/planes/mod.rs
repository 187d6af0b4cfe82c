//! `pool.planes`: max and average pooling of channels-first images and their gradients ([`verdigris_graph::PoolProblem`] has the formulas).
//!
//! It takes one and two spatial dims whose rows lie one behind the other without gaps, planes anywhere, in f32, f16 and bf16, under windows of up to five taps, without
//! dilation, each of which meets an element; adaptive windows where they divide the image. Images of any height and width, however their rows are aligned.
//!
//! **Method.** A CTA takes a band of rows of a plane, or several whole planes that follow each other: neighbouring memory, which it copies to shared memory 16 bytes at a time,
//! elements in front of and behind whole vectors one by one. What overlapping windows share is so read once, and rows may begin anywhere.
//!
//! | direction | threads |
//! |---|---|
//! | forward | each has windows below each other, of one column or of two, and what a row gives them is computed once: a maximum or a sum along it |
//! | backward | first find the winner of each window, as forward, or read it, or share out the gradient of a mean; then each has blocks of as many rows and columns as windows are apart, for which windows and taps are known when the kernel is built, adds up what its windows give, and leaves it in shared memory, from where it goes out 16 bytes at a time |
//!
//! **When it wins.** Where `x` comes from device memory: it moves each byte once, but for the rows that bands share.
//!
//! **Numbers.** Sums are in f32, along rows first, always in the same order; results repeat bit for bit. Of equal maxima the first wins, and the first NaN
//! before all.

mod kernel;

use serde::{Deserialize, Serialize};
use verdigris_graph::{PoolMode, PoolPass, PoolProblem, Problem, View, Windows};
use verdigris_kir::face::{Header, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::program::{KernelRef, Launch, Program};
use verdigris_tensor::DType;

use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Stream, Traffic, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::compute;
use crate::layout::space::{element, is_packed};

use super::axis::Axis;
use kernel::{BackwardArgs, PlanesArgs, StripsArgs, TensorArgs};

const THREADS: u32 = 256;
/// CTAs for each SM below which planes are not taken together.
const CTAS_OF_SM: u64 = 16;
/// CTAs of 256 threads that an SM runs at once.
const CTAS_AT_ONCE: u32 = 8;
/// Rows below which a plane is not cut for more CTAs: bands read the rows between them twice.
const FEW_ROWS: u32 = 8;

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct Planes {
    problem: PoolProblem,
    spec: Spec,
    axes: [Axis; 2],
    share: Share,
    sm_count: u32,
}

/// What a CTA takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Share {
    /// Whole planes, or one of which it takes a band.
    planes: u32,
    /// Rows of a band: of windows, or backward of blocks.
    rows: u32,
    /// Windows beside each other that a thread takes: 1 or 2.
    beside: u32,
}

/// Bytes of shared memory that a CTA's pieces take.
#[derive(Clone, Copy, Debug)]
struct Room {
    /// `x`, and `dx` in its place.
    wide: u32,
    /// `dy`.
    narrow: u32,
    /// What each window hands on.
    windows: u32,
}

impl Room {
    fn bytes(self) -> u32 {
        self.wide + self.narrow + self.windows
    }
}

impl Algorithm for Planes {
    const ID: EngineId = EngineId { name: "pool.planes", number: 603 };
    const VERSION: u32 = 2;
    type Config = Share;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Pool(p) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is pool", problem.kind())));
        };
        let is_fractional = p.windows.iter().any(|windows| matches!(windows, Windows::Fractional { .. }));
        Self::ID.require(!is_fractional, Reason::Problem, "fractional windows, taken are those that begin where no sample says")?;
        let spec = Spec::of(p);
        for (name, view, ..) in p.operands() {
            let taken = if name == "index" { [DType::I32, DType::I64].contains(&view.dtype) } else { view.dtype == spec.dtype };
            Self::ID.require(taken, Reason::DType, format_args!("{name} of {}, taken is what all are of", view.dtype))?;
        }
        let is_float = [DType::F32, DType::F16, DType::Bf16].contains(&spec.dtype);
        Self::ID.require(is_float, Reason::DType, format_args!("{}, taken are f32, f16 and bf16", spec.dtype))?;
        for (name, view, dims, _) in p.operands() {
            let reason = format_args!("{name} with strides {:?}, taken are planes without gaps", view.strides);
            Self::ID.require(is_packed(&view.strides[2..], &dims[2..]), Reason::Layout, reason)?;
        }
        let axes @ [height, width] = Axis::require_both(Self::ID, p)?;
        let planes = p.n.saturating_mul(p.c);
        Self::ID.require(planes < 1 << 24, Reason::Extent, format_args!("{planes} planes, taken below 2^24"))?;
        Self::ID.require(arch.runs(spec.target()), Reason::Target, format_args!("copies that need {}", spec.target().ptx()))?;
        let spec = spec.with(&axes);
        // Planes with gaps between them are not copied together.
        let together = p.operands().iter().all(|(_, view, dims, _)| is_packed(&view.strides, dims));
        let Some(share) = spec.share(&axes, planes, together, arch) else {
            let (extent, room) = (width.extent, spec.room_bytes());
            let reason = format_args!("rows of {extent} elements that one window reads, taken are {room} bytes with what it gives");
            return Err(Self::ID.refusal(Reason::SharedMemory, reason));
        };
        let ctas = planes * u64::from(spec.rows(&height).div_ceil(share.rows));
        Self::ID.require(ctas < 1 << 31, Reason::Extent, format_args!("{ctas} bands of planes, taken below 2^31"))?;
        Ok(Planes { problem: p.clone(), spec, axes, share, sm_count: arch.sm_count })
    }

    fn configs(&self) -> Vec<Share> {
        // Results of two windows are one access where rows of them are whole ones, and where the problem says that these begin at such.
        let is_whole = |view: &View| view.strides[..4].iter().fold(view.offset, |bits, stride| bits | stride).is_multiple_of(2);
        let operands = self.problem.operands();
        let mut stored = operands.iter().filter(|(.., written)| *written && !self.spec.kind.is_backward());
        let is_paired = self.axes[1].out.is_multiple_of(2) && stored.all(|(_, view, ..)| is_whole(view));
        // Maxima of windows of 3x3 without their places were 13 to 17 % faster on an H200 by threads of one window each; with places they were not, nor were averages of 2x2.
        let has_places = operands.iter().filter(|(.., written)| *written).count() > 1;
        let is_one_first = self.problem.mode == PoolMode::Max && !has_places && self.spec.taps[1] > 2;
        let beside: &[u32] = match is_paired && !self.spec.reads_places() {
            true if is_one_first => &[1, 2],
            true => &[2, 1],
            false => &[1],
        };
        beside.iter().map(|&beside| Share { beside, ..self.share }).collect()
    }

    fn knobs(share: &Share) -> Knobs {
        Knobs::new([("planes", share.planes), ("rows", share.rows), ("beside", share.beside)])
    }

    fn notes(&self, _: &Share) -> Notes {
        Notes::of(self.problem.compute)
    }

    fn work(&self, &share: &Share) -> Work {
        let p = &self.problem;
        let elements = |dims: [u64; 5]| dims.iter().map(|&dim| dim as f64).product::<f64>();
        let bytes: f64 = p.operands().into_iter().map(|(_, view, dims, _)| elements(dims) * view.dtype.bytes() as f64).sum();
        let taps = f64::from(self.spec.taps[1]);
        let of_elements = if self.spec.kind.is_backward() { elements(p.x_dims()) * 16.0 } else { 0.0 };
        let issued = (elements(p.y_dims()) * (8.0 + 8.0 * taps) + of_elements) / 32.0;
        let ctas = f64::from(self.ctas(share));
        // Forward, CTAs wait for their planes, and then each strip of windows for the one before it (`bench/record/h200/2026-11-29-pool-configs.jsonl`).
        let strips = elements(p.y_dims()) / ctas.max(1.0) / f64::from(kernel::STRIP);
        let waves = (ctas / f64::from(CTAS_AT_ONCE * self.sm_count)).ceil();
        let turns = if self.spec.kind.is_backward() { 0.0 } else { waves * (12.0 + 5.0 * (strips / f64::from(THREADS)).ceil()) };
        Work::default().beside([Stream::new(Traffic::Lines, bytes).issuing(issued).of_ctas(ctas).in_turns(turns)])
    }

    fn lower(&self, &share: &Share) -> Result<Program, Refusal> {
        let (p, spec) = (&self.problem, &Spec { beside: share.beside, ..self.spec.clone() });
        let mut program = Program { buffer_alignment_bytes: vec![1; p.slots().len()], ..Program::default() };
        if p.is_empty() {
            return Ok(program);
        }
        let room = spec.room(&self.axes, share);
        let tensor = |view: &View| {
            let strides_bytes = [0, 1].map(|dim| view.strides[dim] * view.dtype.bytes() as u64);
            TensorArgs { memory: element(view, []), strides_bytes }
        };
        let [height, width] = &self.axes;
        let args = PlanesArgs {
            planes: self.planes(),
            planes_of_cta: share.planes,
            bands: spec.rows(height).div_ceil(share.rows),
            channels: p.c as u32,
            rows: share.rows,
            extents: [height.extent, width.extent],
            pads: [height.pad, width.pad],
            out_height: height.out,
            out_width: width.out,
            strips: (!spec.reads_places())
                .then(|| StripsArgs { below: spec.strip_rows(height, share).div_ceil(kernel::STRIP), beside: width.out / share.beside }),
            backward: spec.kind.is_backward().then(|| BackwardArgs {
                block_strips: share.rows.div_ceil(kernel::BLOCKS),
                blocks_wide: width.blocks(),
                narrow_at: room.wide,
                windows_at: room.wide + room.narrow,
            }),
            operands: p.operands().into_iter().map(|(_, view, ..)| tensor(view)).collect(),
        };
        program.launch(Launch::new(spec.clone().kernel(), [self.ctas(share), 1, 1], args.bound(spec)));
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let kinds = [
            Kind::Max { index: None },
            Kind::Max { index: Some(DType::I32) },
            Kind::Average { padded: false },
            Kind::Average { padded: true },
            Kind::MaxBackward { index: None },
            Kind::MaxBackward { index: Some(DType::I32) },
            Kind::AverageBackward { padded: false },
            Kind::AverageBackward { padded: true },
        ];
        // The usual windows: three taps and two steps, two taps and two steps.
        let windows = [([3, 3], [2, 2]), ([2, 2], [2, 2])];
        let specs = [DType::F32, DType::F16, DType::Bf16].into_iter().flat_map(|dtype| {
            let of = move |kind| windows.map(|(taps, stride)| Spec { kind, dtype, taps, stride, beside: 1 });
            kinds.into_iter().flat_map(of)
        });
        let specs = specs.flat_map(|spec| {
            let beside: &[u32] = if spec.reads_places() { &[1] } else { &[1, 2] };
            beside.iter().map(move |&beside| Spec { beside, ..spec.clone() })
        });
        specs.filter(|spec| spec.target() <= target).map(Spec::kernel).collect()
    }
}

impl Planes {
    fn planes(&self) -> u32 {
        (self.problem.n * self.problem.c) as u32
    }

    fn ctas(&self, share: Share) -> u32 {
        self.planes().div_ceil(share.planes) * self.spec.rows(&self.axes[0]).div_ceil(share.rows)
    }
}

impl Axis {
    /// How many windows in front of a block's own hold elements of it.
    fn back(&self) -> u32 {
        (self.taps - 1) / self.stride
    }

    /// Blocks of as many elements as windows are apart, the first of which begins with the first window.
    fn blocks(&self) -> u32 {
        (self.extent - 1 + self.pad) / self.stride + 1
    }
}

/// What is computed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    /// `index`: the type in which the places of maxima are stored.
    Max {
        index: Option<DType>,
    },
    /// `padded`: padding counts.
    Average {
        padded: bool,
    },
    /// `index`: the type in which the places of maxima are read; otherwise they are found again.
    MaxBackward {
        index: Option<DType>,
    },
    AverageBackward {
        padded: bool,
    },
}

impl Kind {
    fn is_backward(self) -> bool {
        matches!(self, Kind::MaxBackward { .. } | Kind::AverageBackward { .. })
    }
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct Spec {
    kind: Kind,
    /// Element type of all operands but the index.
    dtype: DType,
    /// Of windows along rows and columns.
    taps: [u32; 2],
    stride: [u32; 2],
    /// Windows beside each other that a thread takes; their results are one access.
    beside: u32,
}

impl Spec {
    /// Before windows are known.
    fn of(p: &PoolProblem) -> Spec {
        let (kind, main) = match (&p.pass, p.mode) {
            (PoolPass::Forward { x, index, .. }, PoolMode::Max) => (Kind::Max { index: index.as_ref().map(|index| index.dtype) }, x),
            (PoolPass::Forward { x, .. }, PoolMode::Average { count_include_pad }) => (Kind::Average { padded: count_include_pad }, x),
            (PoolPass::Backward { dx, index, .. }, PoolMode::Max) => {
                (Kind::MaxBackward { index: index.as_ref().map(|index| index.dtype) }, dx)
            }
            (PoolPass::Backward { dx, .. }, PoolMode::Average { count_include_pad }) => {
                (Kind::AverageBackward { padded: count_include_pad }, dx)
            }
        };
        Spec { kind, dtype: main.dtype, taps: [1; 2], stride: [1; 2], beside: 1 }
    }

    fn with(self, axes: &[Axis; 2]) -> Spec {
        Spec { taps: axes.map(|axis| axis.taps), stride: axes.map(|axis| axis.stride), ..self }
    }

    /// Element types of the operands, in the order of slots.
    fn types(&self) -> Vec<DType> {
        let own = self.dtype;
        match self.kind {
            Kind::Max { index } => [own; 2].into_iter().chain(index).collect(),
            Kind::MaxBackward { index } => vec![own, index.unwrap_or(own), own],
            Kind::Average { .. } | Kind::AverageBackward { .. } => vec![own; 2],
        }
    }

    /// Shared memory of a CTA: of as many as hide each other's copies.
    fn room_bytes(&self) -> u32 {
        if self.kind.is_backward() { 44 << 10 } else { 31 << 10 }
    }

    /// Rows that bands are made of: of windows, or of blocks.
    fn rows(&self, height: &Axis) -> u32 {
        if self.kind.is_backward() { height.blocks() } else { height.out }
    }

    /// Rows of windows that a CTA goes through in each plane.
    fn strip_rows(&self, height: &Axis, share: Share) -> u32 {
        let back = if self.kind.is_backward() { height.back() } else { 0 };
        (share.rows + back).min(height.out)
    }

    /// What a share takes in shared memory.
    fn room(&self, [height, width]: &[Axis; 2], share: Share) -> Room {
        let piece = |rows: u32, columns: u32, bytes: u32| share.planes * rows * columns * bytes + 16;
        let bytes = self.dtype.bytes() as u32;
        let windows = self.strip_rows(height, share);
        let read = if share.planes > 1 { height.extent } else { ((windows - 1) * height.stride + height.taps).min(height.extent) };
        let written = (share.rows * height.stride).min(height.extent);
        let rows = match self.kind {
            Kind::Max { .. } | Kind::Average { .. } => read,
            Kind::MaxBackward { index: None } => read.max(written),
            Kind::MaxBackward { .. } | Kind::AverageBackward { .. } => written,
        };
        let narrow = if self.kind.is_backward() { piece(windows, width.out, bytes) } else { 0 };
        let handed_on = if self.kind.is_backward() { piece(windows, width.out, 4) } else { 0 };
        let [wide, narrow, windows] = [piece(rows, width.extent, bytes), narrow, handed_on].map(|bytes| bytes.next_multiple_of(16));
        Room { wide, narrow, windows }
    }

    /// As much as has room, as long as there are CTAs for the chip: bands of about equal height, or whole planes, several of them if they lie `together`.
    fn share(&self, axes: &[Axis; 2], planes: u64, together: bool, arch: &Arch) -> Option<Share> {
        let all = self.rows(&axes[0]);
        let sms = u64::from(arch.sm_count);
        let fits = |share: Share| self.room(axes, share).bytes() <= self.room_bytes();
        let whole = Share { planes: 1, rows: all, beside: 1 };
        let most_rows = (1..=all).rev().find(|&rows| fits(Share { rows, ..whole }))?;
        let wanted = (2 * sms).div_ceil(planes.max(1)).min(u64::from(all.div_ceil(FEW_ROWS))) as u32;
        let bands = all.div_ceil(most_rows).max(wanted);
        if bands > 1 {
            return Some(Share { rows: all.div_ceil(bands), ..whole });
        }
        let most = if together { (planes / (CTAS_OF_SM * sms)).clamp(1, 64) as u32 } else { 1 };
        (1..=most).rev().map(|planes| Share { planes, ..whole }).find(|&share| fits(share))
    }

    fn name(&self) -> String {
        let index = |index: Option<DType>| index.map_or(String::new(), |dtype| format!("_index_{dtype}"));
        let padded = |padded: bool| if padded { "_padded" } else { "" };
        let kind = match self.kind {
            Kind::Max { index: of } => format!("max{}", index(of)),
            Kind::Average { padded: all } => format!("average{}", padded(all)),
            Kind::MaxBackward { index: of } => format!("max{}_backward", index(of)),
            Kind::AverageBackward { padded: all } => format!("average{}_backward", padded(all)),
        };
        let ([high, wide], [down, right]) = (self.taps, self.stride);
        format!("pool_planes_{kind}_w{high}x{wide}_s{down}x{right}_v{}_{}", self.beside, self.dtype)
    }

    /// The least chip that has the conversions and copies.
    fn target(&self) -> Target {
        compute::target_of_all([self.dtype]).max(Target::Sm80)
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        // As many as an SM has memory for; threads that take two windows of a row have too much in registers for as many.
        let min_ctas = if self.kind.is_backward() || self.beside > 1 { 4 } else { 6 };
        let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas, cluster: 1 };
        build(header, |k| kernel::build(self, k))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bands cover all rows, and what a CTA takes has room, whatever the image.
    #[test]
    fn shares_cover_planes_and_have_room() {
        let arch = Arch::h200();
        let sliding = |taps, stride, pad_before| Windows::Sliding { taps, stride, dilation: 1, pad_before };
        let mut taken = 0;
        for extent in [1u64, 2, 7, 14, 56, 112, 224, 1000, 5000, 16_000] {
            for (taps, stride, pad) in [(3u64, 2u64, 1u64), (2, 2, 0), (3, 1, 1), (5, 1, 2), (2, 4, 0), (5, 3, 0)] {
                let Some(out) = (extent + 2 * pad).checked_sub(taps).map(|free| free / stride + 1) else { continue };
                let Some(axis) = Axis::of(extent, out, &sliding(taps, stride, pad)) else { continue };
                for kind in [Kind::Max { index: None }, Kind::MaxBackward { index: None }, Kind::AverageBackward { padded: true }] {
                    let spec = Spec { kind, dtype: DType::Bf16, taps: [1; 2], stride: [1; 2], beside: 1 }.with(&[axis; 2]);
                    for planes in [1, 300, 1 << 20] {
                        let Some(share) = spec.share(&[axis; 2], planes, true, &arch) else { continue };
                        taken += 1;
                        let rows = spec.rows(&axis);
                        assert!(
                            share.rows >= 1 && share.rows <= rows && (share.planes == 1 || share.rows == rows),
                            "{share:?} of {axis:?}"
                        );
                        assert!(spec.room(&[axis; 2], share).bytes() <= spec.room_bytes(), "{share:?} of {axis:?}");
                        // The last band has a row.
                        assert!((rows.div_ceil(share.rows) - 1) * share.rows < rows, "{share:?} of {axis:?}");
                    }
                }
            }
        }
        assert!(taken > 300, "{taken}");
    }
}
