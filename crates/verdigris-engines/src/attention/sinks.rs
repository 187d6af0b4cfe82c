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
use super::sequences::{self, SequencesArgs};
use crate::cost::{Stream, Traffic};
use crate::engine::{EngineId, Reason, Refusal};
use crate::fuse::lanes;
use crate::fuse::value::{AnyVal, store_values};
use crate::layout::space::element;

const THREADS: u32 = 1024;
/// Queries whose numbers a thread has on their way at a time.
const UNROLL: u32 = 4;

/// What shapes the kernel: the type of the queries, which sinks may have, that of the gradient, and how numbers lie.
#[derive(Clone, Copy, Debug)]
struct Spec {
    ty: Half,
    result: DType,
    /// Numbers lie in blocks of sequences ([`sequences`]).
    in_blocks: bool,
}

/// The numbers of each query, f32, and how they lie.
#[derive(Clone, Copy, Debug)]
pub(super) struct Numbers {
    /// `L · log₂ e`, +∞ for queries that attend to nothing, and `Σ d_o · o`: `[batch][head][pitch]`, or `[head][block in the workspace]` of sequences that
    /// are given.
    pub(super) lse_log2: Address,
    pub(super) delta: Address,
    pub(super) pitch: u64,
    pub(super) sequences: Option<SequencesArgs>,
}

verdigris_kir::parameters! {
    struct Gradient / GradientArgs of Spec as spec {
        sinks: SinkArgs = (),
        dsinks: Write = 4,
        dsinks_step_bytes: u32,
        lse_log2: Read = 4,
        delta: Read = 4,
        batches: u32,
        in_rows: Option<InRowsArgs> = (!spec.in_blocks).then_some(()),
        in_blocks: Option<SequencesArgs> = spec.in_blocks.then_some(()),
    }
}

verdigris_kir::parameters! {
    /// Numbers `[batch][head][pitch]`, and which of them there are.
    struct InRows / InRowsArgs of () as _spec {
        pitch: u32,
        heads: u32,
        queries: u32,
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
    let Numbers { lse_log2, delta, pitch, sequences } = numbers;
    let spec = Spec { ty, result: dsinks.dtype, in_blocks: sequences.is_some() };
    let args = GradientArgs {
        sinks: SinkArgs::new(p),
        dsinks: element(dsinks, []),
        dsinks_step_bytes: (dsinks.strides[1] * dsinks.dtype.bytes() as u64) as u32,
        lse_log2,
        delta,
        batches: p.b as u32,
        in_rows: sequences.is_none().then(|| InRowsArgs {
            pitch: pitch as u32,
            heads: p.h as u32,
            queries: p.s_q as u32,
            offsets: OffsetsIfAnyArgs::of(p),
            band: BandArgs::new(p, 1),
        }),
        in_blocks: sequences,
    };
    program.launch(Launch::new(spec.kernel(), [p.h as u32, 1, 1], args.bound(&spec)));
}

/// The kernels, which stand in the catalog of each engine that launches them: those of numbers in blocks where it has such.
pub(super) fn catalog(has_blocks: bool) -> impl Iterator<Item = KernelRef> {
    let of_type = |ty: Half| [DType::F32, ty.dtype()].into_iter().map(move |result| (ty, result));
    let each = Half::ALL.into_iter().flat_map(of_type);
    let lies: &[bool] = if has_blocks { &[false, true] } else { &[false] };
    each.flat_map(move |(ty, result)| lies.iter().map(move |&in_blocks| Spec { ty, result, in_blocks }.kernel()))
}

impl Spec {
    fn kernel(self) -> KernelRef {
        let of_blocks = if self.in_blocks { "_blocks" } else { "" };
        let name = format!("attention_sinks_gradient_{}_{}{of_blocks}", self.ty.name(), self.result);
        let header = Header { name: name.clone(), target: Target::Sm80, threads: THREADS, min_ctas: 1, cluster: 1 };
        KernelRef::new(name, move || build(header.clone(), |k| gradient(k, self)))
    }
}

/// Where the number of a query stands.
type NumberOf<'f, 'k> = Box<dyn Fn(Val<'k, u32>) -> Val<'k, u32> + 'f>;

fn gradient<'k>(k: Kernel<'k>, spec: Spec) {
    let Gradient { sinks, dsinks, dsinks_step_bytes, lse_log2, delta, batches, in_rows, in_blocks } = Gradient::declare(k, &spec);
    let head = k.cta();
    let sink = sinks.of_head(k, spec.ty, head) * LOG2_E;
    let sum = k.var(0.0f32);
    k.range(batches, |batch| {
        // What a workspace holds behind a sequence's queries nobody has written, and rows behind a length hold anything.
        let (count, number): (_, NumberOf<'_, 'k>) = match &in_blocks {
            None => {
                let rows = in_rows.as_ref().expect("what is not in blocks is in rows");
                let [own, _] = rows.offsets.of_batch(k, batch, [rows.queries, k.constant(0)]);
                let count = rows.band.of_batch(k, batch, [own.count, k.constant(0)]).queries;
                let first = (batch * rows.heads + head) * rows.pitch;
                (count, Box::new(move |query| first + query))
            }
            Some(sequences) => {
                let own = sequences.of_batch(k, batch);
                let (log2, last) = (sequences::QUERIES.trailing_zeros(), sequences::QUERIES - 1);
                let number = move |query: Val<'k, u32>| (sequences.block_number(&own, head, query >> log2) << log2) + (query & last);
                (own.queries.count, Box::new(number))
            }
        };
        k.range_step(k.thread(), count, THREADS * UNROLL, |query| {
            let queries: Vec<Val<'k, u32>> = (0..UNROLL).map(|i| query + i * THREADS).collect();
            let load = |&query: &Val<'k, u32>| {
                let number = number(query.min(count - 1));
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
