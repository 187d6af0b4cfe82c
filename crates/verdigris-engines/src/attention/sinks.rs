//! The gradient of sinks, `dsinks[h] = −Σ 2^((sink − L) · log₂ e) · delta` over the queries of all batches: a launch of its own behind the two numbers of
//! each query, which every engine of gradients has.
//!
//! A CTA has a head, whose queries its threads share out alike at every run: sums have one order, and nothing is added in memory.

use std::f32::consts::LOG2_E;

use verdigris_graph::{AttentionProblem, View};
use verdigris_kir::face::{Header, Kernel, Val, build};
use verdigris_kir::ir::Target;
use verdigris_kir::params::{Read, Write};
use verdigris_kir::program::{Address, KernelRef, Launch, Program};
use verdigris_tensor::DType;

use super::band::{self, BandArgs, SinkArgs};
use super::half::Half;
use super::ragged::OffsetsIfAnyArgs;
use crate::cost::{Stream, Traffic};
use crate::engine::{EngineId, Reason, Refusal};
use crate::fuse::lanes;
use crate::fuse::value::{AnyVal, store_values};
use crate::layout::space::element;

const THREADS: u32 = 1024;
/// Queries whose numbers a thread has on their way at a time.
const UNROLL: u32 = 4;

/// What shapes the kernel: the type of the queries, which sinks may have, and that of the gradient.
#[derive(Clone, Copy, Debug)]
struct Spec {
    ty: Half,
    result: DType,
}

/// The numbers of each query, f32, and how they lie.
#[derive(Clone, Copy, Debug)]
pub(super) struct Numbers {
    /// `L · log₂ e`, +∞ for queries that attend to nothing, and `Σ d_o · o`: `[batch][head][pitch]`.
    pub(super) lse_log2: Address,
    pub(super) delta: Address,
    pub(super) pitch: u64,
}

verdigris_kir::parameters! {
    struct Gradient / GradientArgs of Spec as _spec {
        sinks: SinkArgs = (),
        dsinks: Write = 4,
        dsinks_step_bytes: u32,
        lse_log2: Read = 4,
        delta: Read = 4,
        /// Of the numbers of a head.
        pitch: u32,
        heads: u32,
        queries: u32,
        batches: u32,
        offsets: OffsetsIfAnyArgs = (),
        /// For its lengths.
        band: BandArgs = (),
    }
}

/// What is asked of the sinks and their gradient.
///
/// # Errors
/// A refusal that names the first requirement not met.
pub(super) fn require(id: EngineId, p: &AttentionProblem, dsinks: Option<&View>) -> Result<(), Refusal> {
    let Some(dsinks) = dsinks else { return Ok(()) };
    band::require(id, p, &[])?;
    let is_taken = dsinks.dtype == DType::F32 || dsinks.dtype == p.q.dtype;
    id.require(is_taken, Reason::DType, format_args!("dsinks of {}, taken are f32 and {}", dsinks.dtype, p.q.dtype))?;
    let bytes = dsinks.dtype.bytes() as u64;
    let begins = dsinks.offset * bytes;
    id.require(begins.is_multiple_of(4), Reason::Alignment, format_args!("dsinks begin {begins} bytes into their buffer"))?;
    let step = dsinks.strides[1].saturating_mul(bytes);
    id.require(step < 1 << 31, Reason::Layout, format_args!("dsinks are {step} bytes apart, taken are less than 2^31"))
}

/// What the launch costs.
pub(super) fn work(p: &AttentionProblem) -> Stream {
    let rows = (p.b * p.h * p.s_q) as f64;
    Stream::new(Traffic::Lines, 8.0 * rows).of_ctas(p.h as f64)
}

/// Adds the launch to a program, behind the one that writes the numbers.
pub(super) fn launch(program: &mut Program, p: &AttentionProblem, ty: Half, dsinks: &View, numbers: Numbers) {
    let spec = Spec { ty, result: dsinks.dtype };
    let Numbers { lse_log2, delta, pitch } = numbers;
    let args = GradientArgs {
        sinks: SinkArgs::new(p),
        dsinks: element(dsinks, []),
        dsinks_step_bytes: (dsinks.strides[1] * dsinks.dtype.bytes() as u64) as u32,
        lse_log2,
        delta,
        pitch: pitch as u32,
        heads: p.h as u32,
        queries: p.s_q as u32,
        batches: p.b as u32,
        offsets: OffsetsIfAnyArgs::of(p),
        band: BandArgs::new(p, 1),
    };
    program.launch(Launch::new(spec.kernel(), [p.h as u32, 1, 1], args.bound(&spec)));
}

/// The kernels, which stand in the catalog of each engine that launches them.
pub(super) fn catalog() -> impl Iterator<Item = KernelRef> {
    Half::ALL.into_iter().flat_map(|ty| [DType::F32, ty.dtype()].map(|result| Spec { ty, result }.kernel()))
}

impl Spec {
    fn kernel(self) -> KernelRef {
        let name = format!("attention_sinks_gradient_{}_{}", self.ty.name(), self.result);
        let header = Header { name: name.clone(), target: Target::Sm80, threads: THREADS, min_ctas: 1, cluster: 1 };
        KernelRef::new(name, move || build(header.clone(), |k| gradient(k, self)))
    }
}

fn gradient<'k>(k: Kernel<'k>, spec: Spec) {
    let Gradient { sinks, dsinks, dsinks_step_bytes, lse_log2, delta, pitch, heads, queries, batches, offsets, band } =
        Gradient::declare(k, &spec);
    let head = k.cta();
    let sink = sinks.of_head(k, spec.ty, head) * LOG2_E;
    let sum = k.var(0.0f32);
    k.range(batches, |batch| {
        // What a workspace holds behind a sequence's queries nobody has written, and rows behind a length hold anything.
        let [own, _] = offsets.of_batch(k, batch, [queries, k.constant(0)]);
        let count = band.of_batch(k, batch, [own.count, k.constant(0)]).queries;
        let first = (batch * heads + head) * pitch;
        k.range_step(k.thread(), count, THREADS * UNROLL, |query| {
            let queries: Vec<Val<'k, u32>> = (0..UNROLL).map(|i| query + i * THREADS).collect();
            let load = |&query: &Val<'k, u32>| {
                let number = first + query.min(count - 1);
                [lse_log2, delta].map(|of| k.ld_global::<f32>(of.at(number, 4), 0))
            };
            let loaded: Vec<[Val<'k, f32>; 2]> = queries.iter().map(load).collect();
            for (query, [logarithm, delta]) in queries.into_iter().zip(loaded) {
                let counts = query.lt(count) & logarithm.ne(f32::INFINITY);
                let share = k.fma((sink - logarithm).exp2(), delta, sum.get());
                sum.set(k.select(counts, share, sum.get()));
            }
        });
    });
    let whole = lanes::over_team(k, THREADS, sum.get(), &|x, y| x + y);
    k.when(k.thread().eq(0), || {
        let to = dsinks.moved(head.mul_wide(dsinks_step_bytes)).address();
        store_values(k, spec.result, to, &[AnyVal::of(-whole)]);
    });
}
