//! `reduce.rows`: sums, means and maxima of many rows whose elements lie side by side ([`verdigris_graph::ReduceProblem`] has the formula).
//!
//! It takes plain reductions in f32, f16 and bf16 of rows of 192 bytes to 16 KB, wherever they begin: nothing computed before or behind, results of the rows' type or of f32.
//!
//! **Method.** A team of 8 or of 32 lanes takes a row, so that nothing waits at a barrier. A row's whole vectors of 16 bytes are read four to a lane at a time, all on
//! their way before the first is used; the elements in front of and behind them, fewer than a vector each, one to a lane.
//!
//! **When it wins.** Where rows of a few hundred bytes and more are no multiple of 16 bytes: `reduce.simt` reads such element by element.
//!
//! **Numbers.** Sums are in f32 by fixed trees, which follow from where a row begins; results repeat bit for bit.

use serde::{Deserialize, Serialize};
use verdigris_graph::{Problem, ReduceProblem, View};
use verdigris_kir::face::{Header, Kernel, Val, Var, build};
use verdigris_kir::inst::Cache;
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::program::{KernelRef, Launch, Program};

use super::plain::{LEAST_BYTES, Plain, VECTOR_BYTES, divisor, plain_rows};
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Stream, Traffic, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::compute::{self, Compute};
use crate::fuse::lanes;
use crate::fuse::strided::{Kept, Packed};
use crate::fuse::value::{AnyVal, store_values};
use crate::layout::space::{Access, Memory, element};

const THREADS: u32 = 256;
/// Lanes that may take a row.
const TEAMS: [u32; 2] = [8, 32];
/// Vectors of a lane that are on their way at a time.
const UNROLL: u32 = 4;
/// The longest rows, in vectors.
const MOST_VECTORS: u64 = 1024;
/// Threads that an SM holds.
const THREADS_OF_SM: u64 = 2048;

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    problem: ReduceProblem,
    from: View,
    to: View,
    team: u32,
}

impl Algorithm for Rows {
    const ID: EngineId = EngineId { name: "reduce.rows", number: 401 };
    const VERSION: u32 = 1;
    /// Lanes that take a row.
    type Config = u32;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let (p, from, to) = plain_rows(Self::ID, problem)?;
        let (rows, vectors) = (p.results(), (p.depth() * from.dtype.bytes() as u64).div_ceil(u64::from(VECTOR_BYTES)));
        Self::ID.require(vectors <= MOST_VECTORS, Reason::Extent, format_args!("rows of {vectors} vectors, taken are {MOST_VECTORS}"))?;
        let shortest = p.depth() * from.dtype.bytes() as u64;
        Self::ID.require(
            shortest >= LEAST_BYTES,
            Reason::Extent,
            format_args!("rows of {shortest} bytes, taken are {LEAST_BYTES} and more"),
        )?;
        // Of a few rows each wants more than a warp.
        let is_enough = vectors <= u64::from(TEAMS[1] * UNROLL) || rows >= 8 * u64::from(arch.sm_count);
        Self::ID.require(is_enough, Reason::Extent, format_args!("{rows} rows of {vectors} vectors, taken are more or shorter ones"))?;
        Self::ID.require(rows < 1 << 26, Reason::Extent, format_args!("{rows} rows, taken below 2^26"))?;
        // As few lanes as have all of a row on their way at once, or as fill the chip.
        let fits = |team: &u32| vectors <= u64::from(team * UNROLL) || rows * u64::from(*team) >= THREADS_OF_SM * u64::from(arch.sm_count);
        let team = TEAMS.into_iter().find(fits).unwrap_or(TEAMS[1]);
        let accepted = Rows { problem: p.clone(), from: from.clone(), to: to.clone(), team };
        let target = accepted.spec(team).plain.target();
        Self::ID.require(arch.runs(target), Reason::Target, format_args!("element types that need {}", target.ptx()))?;
        Ok(accepted)
    }

    fn configs(&self) -> Vec<u32> {
        let others = TEAMS.into_iter().filter(|&team| team != self.team);
        [self.team].into_iter().chain(others).collect()
    }

    fn knobs(&team: &u32) -> Knobs {
        Knobs::new([("team", team)])
    }

    fn notes(&self, _: &u32) -> Notes {
        Notes::of(self.problem.accumulator)
    }

    fn work(&self, &team: &u32) -> Work {
        let p = &self.problem;
        let (rows, bytes) = (p.results() as f64, p.depth() as f64 * self.from.dtype.bytes() as f64);
        let turns = (bytes / f64::from(VECTOR_BYTES * team * UNROLL)).ceil();
        // Of a row of each lane: where it begins and ends, the lanes' sum, and what turns take, whether there is a vector or not.
        let issued = rows * f64::from(team) / 32.0 * (80.0 + turns * f64::from(UNROLL) * 22.0);
        let ctas = (rows * f64::from(team) / f64::from(THREADS)).ceil();
        let written = rows * self.to.dtype.bytes() as f64;
        Work::default().beside([Stream::new(Traffic::Lines, rows * bytes + written).issuing(issued).of_ctas(ctas)])
    }

    fn lower(&self, &team: &u32) -> Result<Program, Refusal> {
        let (p, spec) = (&self.problem, self.spec(team));
        let mut program = Program { buffer_alignment_bytes: vec![1; p.slots().len()], ..Program::default() };
        if p.is_empty() {
            return Ok(program);
        }
        let row_bytes = |view: &View| if p.kept.is_empty() { 0 } else { view.strides[0] * view.dtype.bytes() as u64 };
        let args = RowSumsArgs {
            rows: p.results() as u32,
            depth: p.depth() as u32,
            divisor: divisor(p.f, p.depth() as u32),
            from: element(&self.from, []),
            from_row_bytes: row_bytes(&self.from),
            to: element(&self.to, []),
            to_row_bytes: row_bytes(&self.to),
        };
        let ctas = args.rows.div_ceil(THREADS / team);
        program.launch(Launch::new(spec.clone().kernel(), [ctas, 1, 1], args.bound(&spec)));
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let specs = Plain::all().flat_map(|plain| TEAMS.map(|team| Spec { plain, team }));
        specs.filter(|spec| spec.plain.target() <= target).map(Spec::kernel).collect()
    }
}

impl Rows {
    fn spec(&self, team: u32) -> Spec {
        Spec { plain: Plain::of(self.problem.f, &self.from, &self.to), team }
    }
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct Spec {
    plain: Plain,
    team: u32,
}

verdigris_kir::parameters! {
    /// Of every kernel here.
    struct RowSums / RowSumsArgs of Spec as spec {
        rows: u32,
        /// Elements of a row, and what their sum is divided by.
        depth: u32,
        divisor: u32,
        from: Memory = Access { written: false, bytes: spec.plain.from.bytes() as u32 },
        from_row_bytes: u64,
        to: Memory = Access { written: true, bytes: spec.plain.to.bytes() as u32 },
        to_row_bytes: u64,
    }
}

impl Spec {
    fn name(&self) -> String {
        let Plain { from, to, .. } = self.plain;
        format!("reduce_rows_{}_team{}_{from}_{to}", self.plain.name(), self.team)
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.plain.target(), threads: THREADS, min_ctas: 1, cluster: 1 };
        build(header, |k| self.rows(k))
    }

    fn rows<'k>(&self, k: Kernel<'k>) {
        let RowSums { rows, depth, divisor, from, from_row_bytes, to, to_row_bytes } = RowSums::declare(k, self);
        let (bytes, team) = (self.plain.from.bytes() as u32, self.team);
        let of_vector = VECTOR_BYTES / bytes;
        let member = k.thread() & (team - 1);
        let row = k.cta() * (THREADS / team) + (k.thread() >> team.ilog2());
        // Lanes of a warp stay together; those without a row take the last one's elements and store nothing.
        let from = from.address() + row.min(rows - 1).widen() * from_row_bytes;
        let front = (((k.constant(0u32) - from.low32()) & (VECTOR_BYTES - 1)) >> bytes.ilog2()).min(depth);
        let vectors = (depth - front) >> of_vector.ilog2();
        let back = front + vectors * of_vector;
        let nothing = if self.plain.max { f32::NEG_INFINITY } else { 0.0 };

        // In front of whole vectors and behind them: fewer elements than a team has lanes.
        let edges: [Var<'k, f32>; 2] = [(member, front), (back + member, depth)].map(|(at, end)| {
            let edge = k.var(nothing);
            k.when(at.lt(end), || edge.set(compute::load(k, self.plain.from, from + at.mul_wide(bytes), 0)));
            edge
        });

        let sums: Vec<Var<'k, f32>> = (0..of_vector).map(|_| k.var(nothing)).collect();
        let first = from + front.mul_wide(bytes);
        k.range_step(member, vectors, team * UNROLL, |number| {
            let turn = |i: u32| {
                let kept = if self.plain.max {
                    Kept::of(&Packed::least(k, self.plain.from, of_vector))
                } else {
                    Kept::new(k, self.plain.from, of_vector)
                };
                let number = number + i * team;
                k.when(number.lt(vectors), || {
                    let address = first + number.mul_wide(VECTOR_BYTES);
                    kept.set(&Packed::load(self.plain.from, of_vector, address, Cache::Default));
                });
                kept.get()
            };
            let all: Vec<Packed<'k>> = (0..UNROLL).map(turn).collect();
            for (sum, value) in all.iter().flat_map(|packed| sums.iter().zip(packed.values::<f32>(k))) {
                sum.set(self.plain.combine(sum.get(), value));
            }
        });

        let mut own: Vec<Val<'k, f32>> = sums.iter().chain(&edges).map(|sum| sum.get()).collect();
        while own.len() > 1 {
            own = own.chunks(2).map(|pair| pair.iter().copied().reduce(|x, y| self.plain.combine(x, y)).unwrap_or(pair[0])).collect();
        }
        let whole = lanes::over_lanes(k, team, own[0], &|x, y| self.plain.combine(x, y));
        k.when(member.eq(0) & row.lt(rows), || {
            let whole =
                if self.plain.max { whole } else { <f32 as Compute>::quotient(whole, <f32 as Compute>::from_i32(divisor.signed())) };
            store_values(k, self.plain.to, to.address() + row.widen() * to_row_bytes, &[AnyVal::of(whole)]);
        });
    }
}
