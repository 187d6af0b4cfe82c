//! `reduce.short_rows`: sums, means and maxima of many rows of a few elements without gaps ([`verdigris_graph::ReduceProblem`] has the formula).
//!
//! It takes plain reductions in f32, f16 and bf16 of rows below 192 bytes that are no whole vectors of 16: nothing computed before or behind, results of the rows'
//! type or of f32.
//!
//! **Method.** The rows of a CTA lie behind each other, whole vectors of 16 bytes together wherever a single row begins. They are copied to shared memory at once, and each
//! thread goes through a row of its own.
//!
//! **When it wins.** Planes of a few pixels, as global pooling has them: accesses of an element each would be as many as there are elements.
//!
//! **Numbers.** Sums are in f32, four of each row's elements by turns; results repeat bit for bit.

use serde::{Deserialize, Serialize};
use verdigris_graph::{Problem, ReductionOp, View};
use verdigris_kir::face::{Header, Kernel, Var, build};
use verdigris_kir::inst::Cache;
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::program::{KernelRef, Launch, Program};
use verdigris_tensor::DType;

use super::plain::{LEAST_BYTES, Plain, VECTOR_BYTES, divisor, plain_rows};
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Stream, Traffic, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::compute::Compute;
use crate::fuse::value::{AnyVal, Raw, load_words, store_values};
use crate::layout::space::{Access, Memory, element};

/// Rows and threads of a CTA.
const THREADS: u32 = 128;
/// Sums of a row.
const SUMS: u32 = 4;
/// The longest rows that shared memory has room for, in bytes.
const CLASSES: [u32; 2] = [128, LEAST_BYTES as u32];

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct ShortRows {
    rows: u32,
    depth: u32,
    slots: usize,
    f: ReductionOp,
    from: View,
    to: View,
    /// Elements from one result to the next.
    apart: u64,
    accumulator: DType,
}

impl Algorithm for ShortRows {
    const ID: EngineId = EngineId { name: "reduce.short_rows", number: 402 };
    const VERSION: u32 = 1;
    type Config = ();

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let (p, from, to) = plain_rows(Self::ID, problem)?;
        let (rows, depth) = (p.results(), p.depth());
        let row_bytes = depth * from.dtype.bytes() as u64;
        let is_short = row_bytes > 0 && row_bytes < LEAST_BYTES && !row_bytes.is_multiple_of(u64::from(VECTOR_BYTES));
        Self::ID.require(
            is_short,
            Reason::Extent,
            format_args!("rows of {row_bytes} bytes, taken are those below {LEAST_BYTES} that are no whole vectors"),
        )?;
        Self::ID.require(rows > 0 && rows < 1 << 26, Reason::Extent, format_args!("{rows} rows, taken are some below 2^26"))?;
        let is_packed = p.kept.is_empty() || from.strides[0] == depth;
        let begins = from.offset * from.dtype.bytes() as u64 % u64::from(VECTOR_BYTES);
        let told = format_args!(
            "rows with strides {:?} from element {}, taken are rows without gaps from a whole vector on",
            from.strides, from.offset
        );
        Self::ID.require(is_packed && begins == 0, Reason::Layout, told)?;
        let accepted = ShortRows {
            rows: rows as u32,
            depth: depth as u32,
            slots: p.slots().len(),
            f: p.f,
            apart: if p.kept.is_empty() { 0 } else { to.strides[0] },
            from: from.clone(),
            to: to.clone(),
            accumulator: p.accumulator,
        };
        let target = accepted.spec().plain.target();
        Self::ID.require(arch.runs(target), Reason::Target, format_args!("element types that need {}", target.ptx()))?;
        Ok(accepted)
    }

    fn configs(&self) -> Vec<()> {
        vec![()]
    }

    fn knobs((): &()) -> Knobs {
        Knobs::new([("threads", THREADS)])
    }

    fn notes(&self, (): &()) -> Notes {
        Notes::of(self.accumulator)
    }

    fn work(&self, (): &()) -> Work {
        let (rows, row_bytes) = (f64::from(self.rows), f64::from(self.row_bytes()));
        // Of each element a load, what it is made of, and the sum; of each vector a copy.
        let issued = rows / 32.0 * (60.0 + 6.0 * f64::from(self.depth) + 4.0 * row_bytes / f64::from(VECTOR_BYTES));
        let bytes = rows * (row_bytes + self.to.dtype.bytes() as f64);
        Work::default().beside([Stream::new(Traffic::Lines, bytes).issuing(issued).of_ctas((rows / f64::from(THREADS)).ceil())])
    }

    fn lower(&self, (): &()) -> Result<Program, Refusal> {
        let spec = self.spec();
        let mut program = Program { buffer_alignment_bytes: vec![1; self.slots], ..Program::default() };
        let args = ShortRowsArgs {
            rows: self.rows,
            depth: self.depth,
            divisor: divisor(self.f, self.depth),
            from: element(&self.from, []),
            to: element(&self.to, []),
            to_row_bytes: self.apart * self.to.dtype.bytes() as u64,
        };
        program.launch(Launch::new(spec.clone().kernel(), [self.rows.div_ceil(THREADS), 1, 1], args.bound(&spec)));
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let specs = Plain::all().flat_map(|plain| CLASSES.map(|row_bytes| Spec { plain, row_bytes }));
        specs.filter(|spec| spec.plain.target() <= target).map(Spec::kernel).collect()
    }
}

impl ShortRows {
    fn row_bytes(&self) -> u32 {
        self.depth * self.from.dtype.bytes() as u32
    }

    fn spec(&self) -> Spec {
        let fits = |&class: &u32| self.row_bytes() <= class;
        let row_bytes = CLASSES.into_iter().find(fits).unwrap_or(CLASSES[1]);
        Spec { plain: Plain::of(self.f, &self.from, &self.to), row_bytes }
    }
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct Spec {
    plain: Plain,
    /// The most bytes of a row.
    row_bytes: u32,
}

verdigris_kir::parameters! {
    /// Of every kernel here.
    struct OfShortRows / ShortRowsArgs of Spec as spec {
        rows: u32,
        /// Elements of a row, and what their sum is divided by.
        depth: u32,
        divisor: u32,
        from: Memory = Access { written: false, bytes: VECTOR_BYTES },
        to: Memory = Access { written: true, bytes: spec.plain.to.bytes() as u32 },
        to_row_bytes: u64,
    }
}

impl Spec {
    fn name(&self) -> String {
        let Plain { from, to, .. } = self.plain;
        format!("reduce_short_rows_{}_to{}_{from}_{to}", self.plain.name(), self.row_bytes)
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.plain.target(), threads: THREADS, min_ctas: 1, cluster: 1 };
        build(header, |k| self.rows(k))
    }

    fn rows<'k>(&self, k: Kernel<'k>) {
        let OfShortRows { rows, depth, divisor, from, to, to_row_bytes } = OfShortRows::declare(k, self);
        let (bytes, thread) = (self.plain.from.bytes() as u32, k.thread());
        let row_bytes = depth * bytes;
        let first = k.cta() * THREADS;
        let own_bytes = (rows - first).min(THREADS) * row_bytes;
        let from = from.address() + first.mul_wide(row_bytes);
        let room = k.shared("rows", THREADS * self.row_bytes, VECTOR_BYTES).address();

        // Rows of a whole CTA are whole vectors; behind those of the last one, fewer elements than a vector has.
        let vectors_bytes = own_bytes & !(VECTOR_BYTES - 1);
        k.range_step(thread * VECTOR_BYTES, vectors_bytes, THREADS * VECTOR_BYTES, |at| {
            k.cp_async(room + at, 0, from + at.widen(), 0, VECTOR_BYTES as u8, VECTOR_BYTES);
        });
        k.cp_async_commit();
        let at = vectors_bytes + thread * bytes;
        k.when(at.lt(own_bytes), || {
            let word = load_words(k, from + at.widen(), bytes, Cache::Default)[0];
            if bytes == 2 { k.st_shared(room + at, 0, word.low16()) } else { k.st_shared(room + at, 0, word) }
        });
        k.cp_async_wait(0);
        k.bar_sync();

        k.when((first + thread).lt(rows), || {
            let nothing = if self.plain.max { f32::NEG_INFINITY } else { 0.0 };
            let own = room + thread * row_bytes;
            let sums: Vec<Var<'k, f32>> = (0..SUMS).map(|_| k.var(nothing)).collect();
            k.range_step(k.constant(0u32), depth, SUMS, |number| {
                for (i, sum) in (0u32..).zip(&sums) {
                    let at = own + (number + i).min(depth - 1) * bytes;
                    let raw = if bytes == 2 { Raw::B16(k.ld_shared::<u16>(at, 0)) } else { Raw::B32(k.ld_shared::<u32>(at, 0)) };
                    let value = k.select((number + i).lt(depth), AnyVal::Stored(self.plain.from, raw).get::<f32>(k), nothing);
                    sum.set(self.plain.combine(sum.get(), value));
                }
            });
            let whole = sums.iter().map(|sum| sum.get()).reduce(|x, y| self.plain.combine(x, y)).unwrap_or_else(|| k.constant(nothing));
            let whole =
                if self.plain.max { whole } else { <f32 as Compute>::quotient(whole, <f32 as Compute>::from_i32(divisor.signed())) };
            store_values(k, self.plain.to, to.address() + (first + thread).widen() * to_row_bytes, &[AnyVal::of(whole)]);
        });
    }
}
