//! `pool.flat`: gradients of averages whose windows do not overlap ([`verdigris_graph::PoolProblem`] has the formulas), written without regard to where rows and
//! planes begin.
//!
//! It takes channels-first images, each without gaps and of a whole number of vectors of 16 bytes, in f32, f16 and bf16, whose rows (or planes, where the window is one) are no
//! whole number of vectors: of one window as large as the image, for which whole vectors are a map (`pool.map`), or of windows of up to five rows and columns without padding, for
//! which they are blocks (`pool.blocks`).
//!
//! **Method.** A thread stores a vector of `dx`: elements of one plane, or of two that follow each other; of one row, or of two. Of each it finds the window and reads its mean,
//! which its neighbours have brought to L1.
//!
//! **When it wins.** Where it takes a problem: a map stores such planes element by element, and `pool.planes` has them wait in shared memory. (Windows by count: they were not timed.)
//!
//! **Numbers.** `dy` times the rounded `1 / N`.

mod kernel;

use kernel::{FlatArgs, WindowsArgs};
use serde::{Deserialize, Serialize};
use verdigris_graph::{PoolMode, PoolPass, PoolProblem, Problem, View};
use verdigris_kir::face::{Header, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::program::{KernelRef, Launch, Program};
use verdigris_tensor::DType;

use super::axis::Axis;
use super::whole_windows::dims_of;
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Stream, Traffic, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::compute;
use crate::layout::space::{element, is_packed};

const THREADS: u32 = 256;
const VECTOR_BYTES: u32 = 16;

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct Flat {
    problem: PoolProblem,
    spec: Spec,
    /// Elements of a plane.
    area: u64,
    /// Rows and columns of windows, where there is not one over all.
    windows: Option<[Axis; 2]>,
}

impl Algorithm for Flat {
    const ID: EngineId = EngineId { name: "pool.flat", number: 605 };
    const VERSION: u32 = 1;
    /// Elements that a thread stores.
    type Config = u32;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Pool(p) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is pool", problem.kind())));
        };
        let (PoolMode::Average { .. }, PoolPass::Backward { dy, dx, .. }) = (p.mode, &p.pass) else {
            return Err(match p.mode {
                PoolMode::Max => Self::ID.refusal(Reason::Problem, "maxima, taken are averages"),
                PoolMode::Average { .. } => Self::ID.refusal(Reason::Direction, "the forward direction, taken are gradients"),
            });
        };
        let is_taken = dy.dtype == dx.dtype && [DType::F32, DType::F16, DType::Bf16].contains(&dx.dtype);
        let reason = format_args!("{} and {}, taken are two of f32, f16 and bf16 that are the same", dy.dtype, dx.dtype);
        Self::ID.require(is_taken, Reason::DType, reason)?;
        let dims = p.x_dims();
        let is_one = dims_of(p).is_ok_and(|(stays, _)| stays.iter().all(|&dim| dim < 2 || dims[dim] == 1));
        let windows = if is_one { None } else { Some(side_by_side(p, dy)?) };
        let spec = Spec { dtype: dx.dtype, has_windows: windows.is_some() };
        let vector = u64::from(spec.vector());
        let area = p.extents.iter().product::<u64>();
        // Of one window, the plane is its row. One row ends in a vector at most.
        let (row, least) = if is_one { (area, vector) } else { (p.extents[2], vector - 1) };
        let line = p.c.saturating_mul(area);
        let is_flat = row >= least && area >= vector && !row.is_multiple_of(vector) && line.is_multiple_of(vector);
        let reason = format_args!(
            "{} planes of {:?} elements, taken are rows of {least} and more and no whole number of vectors, which images have",
            p.c, p.extents
        );
        Self::ID.require(is_flat, Reason::Extent, reason)?;
        let all = p.n.saturating_mul(line);
        Self::ID.require(all < 1 << 31, Reason::Extent, format_args!("{all} elements, taken below 2^31"))?;
        let begins_whole = dx.offset.is_multiple_of(vector) && (p.n <= 1 || dx.strides[0].is_multiple_of(vector));
        let reason = format_args!("dx with strides {:?}, taken are images without gaps that begin at whole vectors", dx.strides);
        Self::ID.require(is_packed(&dx.strides[1..], &dims[1..]) && begins_whole, Reason::Layout, reason)?;
        Self::ID.require(arch.runs(spec.target()), Reason::Target, format_args!("{}, which needs {}", dx.dtype, spec.target().ptx()))?;
        Ok(Flat { problem: p.clone(), spec, area, windows })
    }

    fn configs(&self) -> Vec<u32> {
        vec![self.spec.vector()]
    }

    fn knobs(&vector: &u32) -> Knobs {
        Knobs::new([("vector", vector)])
    }

    fn notes(&self, _: &u32) -> Notes {
        Notes::of(self.problem.compute)
    }

    fn work(&self, &vector: &u32) -> Work {
        let planes = (self.problem.n * self.problem.c) as f64;
        let elements = planes * self.area as f64;
        let (threads, bytes) = (elements / f64::from(vector), self.spec.dtype.bytes() as f64);
        let [fixed, each] = if self.windows.is_some() { [80.0, 20.0] } else { [40.0, 3.0] };
        let issued = threads * (fixed + each * f64::from(vector)) / 32.0;
        let means = planes * self.problem.out.iter().product::<u64>() as f64;
        Work::default()
            .beside([Stream::new(Traffic::Lines, (elements + means) * bytes).issuing(issued).of_ctas(threads / f64::from(THREADS))])
    }

    fn lower(&self, &vector: &u32) -> Result<Program, Refusal> {
        let p = &self.problem;
        let mut program = Program { buffer_alignment_bytes: vec![1; p.slots().len()], ..Program::default() };
        let PoolPass::Backward { dy, dx, .. } = &p.pass else { return Ok(program) };
        if p.is_empty() {
            return Ok(program);
        }
        let bytes = self.spec.dtype.bytes() as u64;
        let vectors_of_image = (p.c * self.area) as u32 / vector;
        let windows = self.windows.map(|[height, width]| WindowsArgs {
            width: width.extent,
            strides: [height.stride, width.stride],
            taps: [height.taps, width.taps],
            out: [height.out, width.out],
            steps_bytes: [3, 4].map(|dim| (dy.strides[dim] * bytes) as u32),
        });
        let args = FlatArgs {
            vectors: p.n as u32 * vectors_of_image,
            vectors_of_image,
            channels: p.c as u32,
            area: self.area as u32,
            dy: element(dy, []),
            dy_strides_bytes: [0, 1].map(|dim| dy.strides[dim] * bytes),
            dx: element(dx, []),
            dx_image_bytes: dx.strides[0] * bytes,
            windows,
        };
        program.launch(Launch::new(self.spec.kernel(), [args.vectors.div_ceil(THREADS), 1, 1], args.bound(&self.spec)));
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let types = [DType::F32, DType::F16, DType::Bf16];
        let specs = types.into_iter().flat_map(|dtype| [false, true].map(|has_windows| Spec { dtype, has_windows }));
        specs.filter(|spec| spec.target() <= target).map(|spec| spec.kernel()).collect()
    }
}

/// The windows of a problem's rows and columns, which do not overlap.
fn side_by_side(p: &PoolProblem, dy: &View) -> Result<[Axis; 2], Refusal> {
    let axes = Axis::require_both(Flat::ID, p)?;
    let is_apart = axes.iter().all(|axis| axis.taps <= axis.stride && !axis.is_padded());
    let reason = format_args!("windows {:?}, taken are windows without padding that do not overlap", p.windows);
    Flat::ID.require(is_apart, Reason::Extent, reason)?;
    let steps = [3, 4].map(|dim| dy.strides[dim].saturating_mul(dy.dtype.bytes() as u64));
    let reason = format_args!("dy with strides {:?}, taken are rows and columns less than 2^31 bytes apart", dy.strides);
    Flat::ID.require(steps.iter().all(|&step| step < 1 << 31), Reason::Layout, reason)?;
    Ok(axes)
}

/// Everything that shapes a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct Spec {
    dtype: DType,
    /// Planes have windows side by side, in place of one over all.
    has_windows: bool,
}

impl Spec {
    fn vector(self) -> u32 {
        VECTOR_BYTES / self.dtype.bytes() as u32
    }

    fn target(self) -> Target {
        compute::target_of_all([self.dtype])
    }

    fn name(self) -> String {
        format!("pool_flat_average_backward_{}{}", self.dtype, if self.has_windows { "_windows" } else { "" })
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(self) -> KernelBody {
        let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas: 1, cluster: 1 };
        build(header, |k| kernel::spread(k, self))
    }
}
