//! `pool.windows`: averages and maxima of small windows of channels-first images ([`verdigris_graph::PoolProblem`] has the formulas).
//!
//! It takes one and two spatial dims under windows of up to five taps, without dilation, each of which meets an element, and adaptive windows where they divide
//! the image; in f32, f16 and bf16, with columns side by side, without indices of maxima.
//!
//! **Method.** A thread has a window: it loads all of its elements at once, in place of those that are not there some other, and stores one result. Neighbouring
//! threads have neighbouring windows, whose loads meet in the same lines.
//!
//! **When it wins.** Where planes are small or few. `pool.planes` reads each element once, by whole vectors, but waits for shared memory, and needs planes that
//! fill it; `pool.direct` takes any windows, and an index of five dims a thread.
//!
//! **Numbers.** Sums in f32, row by row, times the rounded `1 / N`.

mod kernel;

use kernel::WindowsArgs;
use serde::{Deserialize, Serialize};
use verdigris_graph::{PoolMode, PoolPass, PoolProblem, Problem, View};
use verdigris_kir::face::{Header, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::program::{KernelRef, Launch, Program};
use verdigris_tensor::DType;

use super::axis::Axis;
use super::tensor::TensorArgs;
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Stream, Traffic, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::compute;
use crate::layout::space::element;

const THREADS: u32 = 256;
/// Most taps along a dim that kernels are written out for.
const TAPS: [u32; 3] = [2, 3, 5];
const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct WindowsOfPlanes {
    problem: PoolProblem,
    spec: Spec,
    axes: [Axis; 2],
}

impl Algorithm for WindowsOfPlanes {
    const ID: EngineId = EngineId { name: "pool.windows", number: 606 };
    const VERSION: u32 = 1;
    /// Most taps along a dim of the kernel.
    type Config = u32;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Pool(p) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is pool", problem.kind())));
        };
        let PoolPass::Forward { x, y, index, .. } = &p.pass else {
            return Err(Self::ID.refusal(Reason::Direction, "a gradient, taken is the forward direction"));
        };
        Self::ID.require(index.is_none(), Reason::Problem, "indices of maxima, taken are maxima alone")?;
        let is_taken = x.dtype == y.dtype && TYPES.contains(&y.dtype);
        let reason = format_args!("{} and {}, taken are two of f32, f16 and bf16 that are the same", x.dtype, y.dtype);
        Self::ID.require(is_taken, Reason::DType, reason)?;
        let axes = Axis::require_both(Self::ID, p)?;
        let kind = match p.mode {
            PoolMode::Max => Kind::Max,
            // Padding that no window meets counts nowhere.
            PoolMode::Average { count_include_pad } => Kind::Average { padded: count_include_pad || !axes.iter().any(Axis::is_padded) },
        };
        let most = axes.iter().map(|axis| axis.taps).max().unwrap_or(1);
        let most_taps = TAPS.into_iter().find(|&taps| taps >= most).unwrap_or(TAPS[2]);
        for view in [x, y] {
            let is_line = view.strides[4] == 1 || p.out[2] == 1;
            let reason = format_args!("columns {} elements apart, taken are those side by side", view.strides[4]);
            Self::ID.require(is_line, Reason::Layout, reason)?;
            let far = view.strides[3..].iter().map(|stride| stride.saturating_mul(view.dtype.bytes() as u64)).max().unwrap_or(0);
            Self::ID.require(far < 1 << 32, Reason::Layout, format_args!("rows {far} bytes apart, taken below 2^32"))?;
        }
        let accepted = WindowsOfPlanes { problem: p.clone(), spec: Spec { dtype: y.dtype, kind, most_taps }, axes };
        let windows = accepted.windows();
        Self::ID.require(windows < 1 << 31, Reason::Extent, format_args!("{windows} windows, taken below 2^31"))?;
        let target = accepted.spec.target();
        Self::ID.require(arch.runs(target), Reason::Target, format_args!("{}, which needs {}", y.dtype, target.ptx()))?;
        Ok(accepted)
    }

    fn configs(&self) -> Vec<u32> {
        vec![self.spec.most_taps]
    }

    fn knobs(&most_taps: &u32) -> Knobs {
        Knobs::new([("taps", most_taps)])
    }

    fn notes(&self, _: &u32) -> Notes {
        Notes::of(self.problem.compute)
    }

    fn work(&self, &most_taps: &u32) -> Work {
        let elements = |dims: [u64; 5]| dims.iter().map(|&dim| dim as f64).product::<f64>();
        let bytes = (elements(self.problem.x_dims()) + elements(self.problem.y_dims())) * self.spec.dtype.bytes() as f64;
        let windows = self.windows() as f64;
        // Its place and its result, where elements are counted a division, and of each tap an address, a load, and what is made of it.
        let place = if self.spec.kind == (Kind::Average { padded: false }) { 150.0 } else { 60.0 };
        let issued = windows * (place + 8.0 * f64::from(most_taps * most_taps)) / 32.0;
        Work::default().beside([Stream::new(Traffic::Lines, bytes).issuing(issued).of_ctas((windows / f64::from(THREADS)).ceil())])
    }

    fn lower(&self, _: &u32) -> Result<Program, Refusal> {
        let p = &self.problem;
        let mut program = Program { buffer_alignment_bytes: vec![1; p.slots().len()], ..Program::default() };
        let PoolPass::Forward { x, y, .. } = &p.pass else { return Ok(program) };
        if p.is_empty() {
            return Ok(program);
        }
        let tensor = |view: &View| {
            let [image_bytes, channel_bytes, row, column] = [0, 1, 3, 4].map(|dim| view.strides[dim] * view.dtype.bytes() as u64);
            TensorArgs { memory: element(view, []), image_bytes, channel_bytes, row_bytes: row as u32, column_bytes: column as u32 }
        };
        let [height, width] = &self.axes;
        let of_both = |of: fn(&Axis) -> u32| [of(height), of(width)];
        let args = WindowsArgs {
            windows: self.windows() as u32,
            channels: p.c as u32,
            high: height.out,
            wide: width.out,
            extents: of_both(|axis| axis.extent),
            taps: of_both(|axis| axis.taps),
            strides: of_both(|axis| axis.stride),
            pads: of_both(|axis| axis.pad),
            share: (self.spec.kind == Kind::Average { padded: true }).then(|| 1.0 / (height.taps * width.taps) as f32),
            x: tensor(x),
            y: tensor(y),
        };
        program.launch(Launch::new(self.spec.kernel(), [args.windows.div_ceil(THREADS), 1, 1], args.bound(&self.spec)));
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let kinds = [Kind::Max, Kind::Average { padded: false }, Kind::Average { padded: true }];
        let of_type = |dtype| kinds.into_iter().flat_map(move |kind| TAPS.map(|most_taps| Spec { dtype, kind, most_taps }));
        TYPES.into_iter().flat_map(of_type).filter(|spec| spec.target() <= target).map(|spec| spec.kernel()).collect()
    }
}

impl WindowsOfPlanes {
    fn windows(&self) -> u64 {
        self.problem.y_dims().iter().fold(1, |product: u64, &dim| product.saturating_mul(dim))
    }
}

/// What is made of a window.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
enum Kind {
    Max,
    /// Of all taps, or of those that are elements.
    Average {
        padded: bool,
    },
}

/// Everything that shapes a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct Spec {
    dtype: DType,
    kind: Kind,
    most_taps: u32,
}

impl Spec {
    fn target(self) -> Target {
        compute::target_of_all([self.dtype])
    }

    fn name(self) -> String {
        let kind = match self.kind {
            Kind::Max => "max",
            Kind::Average { padded: false } => "average",
            Kind::Average { padded: true } => "average_padded",
        };
        format!("pool_windows_{kind}_{}_{}", self.most_taps, self.dtype)
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(self) -> KernelBody {
        let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas: 1, cluster: 1 };
        build(header, |k| kernel::build(&self, k))
    }
}
