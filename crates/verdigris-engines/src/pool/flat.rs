//! `pool.flat`: gradients of averages over whole planes ([`verdigris_graph::PoolProblem`] has the formulas), written without regard to where planes begin.
//!
//! It takes channels-first images, each without gaps, in f32, f16 and bf16 whose planes have more elements than a vector of 16 bytes, but no whole number of vectors;
//! those that have are a map (`pool.map`).
//!
//! **Method.** A thread stores a vector of `dx`: elements of one plane, or of two that follow each other, whose means it reads.
//!
//! **When it wins.** Where it takes a problem: a map stores such planes element by element.
//!
//! **Numbers.** `dy` times the rounded `1 / N`.

use serde::{Deserialize, Serialize};
use verdigris_graph::{PoolMode, PoolPass, PoolProblem, Problem};
use verdigris_kir::face::{Header, Kernel, Val, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::Divide;
use verdigris_kir::program::{KernelRef, Launch, Program};
use verdigris_tensor::DType;

use super::axis::share_of;
use super::whole_windows::dims_of;
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Stream, Traffic, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::compute;
use crate::fuse::value::{AnyVal, store_values};
use crate::layout::space::{Access, Memory, element, is_packed};

const THREADS: u32 = 256;
const VECTOR_BYTES: u32 = 16;

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct Flat {
    problem: PoolProblem,
    spec: Spec,
    /// Elements of a plane.
    area: u64,
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
        let spec = Spec { dtype: dx.dtype };
        let is_taken = dy.dtype == dx.dtype && [DType::F32, DType::F16, DType::Bf16].contains(&dx.dtype);
        let reason = format_args!("{} and {}, taken are two of f32, f16 and bf16 that are the same", dy.dtype, dx.dtype);
        Self::ID.require(is_taken, Reason::DType, reason)?;
        let (stays, _) = dims_of(p).map_err(|seen| Self::ID.refusal(Reason::Extent, seen))?;
        let (dims, vector) = (p.x_dims(), u64::from(spec.vector()));
        let area = p.extents.iter().product::<u64>();
        let is_whole = stays.iter().all(|&dim| dim < 2 || dims[dim] == 1);
        let line = p.c.saturating_mul(area);
        let is_flat = is_whole && area >= vector && !area.is_multiple_of(vector) && line.is_multiple_of(vector);
        let reason = format_args!(
            "{} planes of {:?} elements, taken are planes of no whole number of vectors, which they have in all",
            p.c, p.extents
        );
        Self::ID.require(is_flat, Reason::Extent, reason)?;
        let all = p.n.saturating_mul(line);
        Self::ID.require(all < 1 << 31, Reason::Extent, format_args!("{all} elements, taken below 2^31"))?;
        let begins_whole = dx.offset.is_multiple_of(vector) && (p.n <= 1 || dx.strides[0].is_multiple_of(vector));
        let reason = format_args!("dx with strides {:?}, taken are images without gaps that begin at whole vectors", dx.strides);
        Self::ID.require(is_packed(&dx.strides[1..], &dims[1..]) && begins_whole, Reason::Layout, reason)?;
        Self::ID.require(arch.runs(spec.target()), Reason::Target, format_args!("{}, which needs {}", dx.dtype, spec.target().ptx()))?;
        Ok(Flat { problem: p.clone(), spec, area })
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
        let issued = threads * (40.0 + 3.0 * f64::from(vector)) / 32.0;
        Work::default()
            .beside([Stream::new(Traffic::Lines, (elements + planes) * bytes).issuing(issued).of_ctas(threads / f64::from(THREADS))])
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
        let args = SpreadArgs {
            vectors: p.n as u32 * vectors_of_image,
            vectors_of_image,
            channels: p.c as u32,
            area: self.area as u32,
            dy: element(dy, []),
            dy_strides_bytes: [0, 1].map(|dim| dy.strides[dim] * bytes),
            dx: element(dx, []),
            dx_image_bytes: dx.strides[0] * bytes,
        };
        program.launch(Launch::new(self.spec.kernel(), [args.vectors.div_ceil(THREADS), 1, 1], args.bound(&self.spec)));
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let specs = [DType::F32, DType::F16, DType::Bf16].map(|dtype| Spec { dtype });
        specs.into_iter().filter(|spec| spec.target() <= target).map(|spec| spec.kernel()).collect()
    }
}

/// Everything that shapes a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct Spec {
    dtype: DType,
}

verdigris_kir::parameters! {
    /// Of every kernel here.
    struct Spread / SpreadArgs of Spec as spec {
        vectors: u32,
        vectors_of_image: Divide,
        channels: u32,
        /// Elements of a plane.
        area: Divide,
        dy: Memory = Access { written: false, bytes: spec.dtype.bytes() as u32 },
        /// From one image, and one channel, to the next.
        dy_strides_bytes: [u64; 2],
        dx: Memory = Access { written: true, bytes: VECTOR_BYTES },
        dx_image_bytes: u64,
    }
}

impl Spec {
    fn vector(self) -> u32 {
        VECTOR_BYTES / self.dtype.bytes() as u32
    }

    fn target(self) -> Target {
        compute::target_of_all([self.dtype])
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(format!("pool_flat_average_backward_{}", self.dtype), move || self.build())
    }

    fn build(self) -> KernelBody {
        let name = format!("pool_flat_average_backward_{}", self.dtype);
        let header = Header { name, target: self.target(), threads: THREADS, min_ctas: 1, cluster: 1 };
        build(header, |k| self.spread(k))
    }

    fn spread(self, k: Kernel<'_>) {
        let Spread { vectors, vectors_of_image, channels, area, dy, dy_strides_bytes, dx, dx_image_bytes } = Spread::declare(k, &self);
        let [dy_image_bytes, dy_channel_bytes] = dy_strides_bytes;
        let number = k.cta() * THREADS + k.thread();
        k.when(number.lt(vectors), || {
            let (image, number) = vectors_of_image.split(number);
            let dy = dy.address() + image.widen() * dy_image_bytes;
            // A plane has as many elements as a vector at least: one ends in it at most.
            let (channel, place) = area.split(number * self.vector());
            let share = share_of(k, area.value());
            let channels = [channel, (channel + 1).min(channels - 1)];
            let [own, next] =
                channels.map(|channel| compute::load::<f32>(k, self.dtype, dy + channel.widen() * dy_channel_bytes, 0) * share);
            let value = |i: u32| -> Val<'_, f32> { k.select((place + i).lt(area.value()), own, next) };
            let values: Vec<AnyVal<'_>> = (0..self.vector()).map(|i| AnyVal::of(value(i))).collect();
            store_values(k, self.dtype, dx.moved(image.widen() * dx_image_bytes).at(number, VECTOR_BYTES), &values);
        });
    }
}
