//! `reduce.simt`: reductions with what stands before and behind them ([`verdigris_graph::ReduceProblem`] has the formula).
//!
//! It takes every valid reduction: all functions, element types, axes, strides and extents.
//!
//! **Method.** Where the elements of one result lie side by side, a team of 4 to 256 threads takes a result and stands along its elements
//! (*rows*); where results lie side by side, 8 or 32 threads stand along the results and the rows of a CTA share the elements out (*columns*). Both
//! read up to 16 bytes at a time, and have four such accesses on their way before they compute with the first. Few long reductions are cut into
//! parts, whose sums a second kernel joins in order. What is computed before the reduction may be stored on the way; each element is visited once.
//!
//! **When it wins.** Wherever neither `reduce.rows` nor `reduce.short_rows` takes a reduction, and of long rows.
//!
//! **Numbers.** Sums are formed in f32 (f64) by fixed trees, so results repeat bit for bit on a device; many short sums lose less than one long
//! one would.

mod plain;
mod rows;
mod short_rows;

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use verdigris_graph::{Chain, Problem, ReduceProblem, ReductionOp};
use verdigris_kir::face::{Header, Kernel, Val, Var, build};
use verdigris_kir::inst::Special;
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::{Read, Write};
use verdigris_kir::program::{Address, KernelRef, Launch, Program};
use verdigris_tensor::DType;

use crate::algorithm::{Algorithm, Listed};
use crate::arch::Arch;
use crate::cost::{Stream, Traffic, Work};
use crate::engine::{Engine, EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::chain::{ChainArgs, ChainSpec, Fetched, ViewSpec, vectors_fit};
use crate::fuse::compute::Compute;
use crate::fuse::lanes;
use crate::fuse::steps::Step;
use crate::fuse::value::AnyVal;
use crate::layout::space::{Extents, Region, is_apart, traffic_bytes};

/// The engines of this family.
pub static ENGINES: &[&dyn Engine] = &[&Listed::<rows::Rows>::new(), &Listed::<short_rows::ShortRows>::new(), &Listed::<ReduceSimt>::new()];

/// The version of what is rewritten as reductions: it rises with that of any engine.
pub(crate) const VERSION: u32 =
    <ReduceSimt as Algorithm>::VERSION + <rows::Rows as Algorithm>::VERSION + <short_rows::ShortRows as Algorithm>::VERSION;

const THREADS: u32 = 256;
/// Threads that may take a row: the smallest team of which each has at most [`UNROLL`] accesses, or the largest. A warp waits for no other, so that it takes as
/// much as it may.
const TEAMS: [u32; 5] = [4, 16, 32, 128, THREADS];
/// Threads that may stand along results.
const LANES: [u32; 2] = [8, 32];
/// The fewest turns of a team in a part of a reduction, if the chip is to have four CTAs for each SM or sixteen, whose ends weigh less.
const PARTS: [(u64, u64); 2] = [(16, 16), (4, 4)];
/// The most parts that a reduction is cut into.
const MOST_PARTS: u64 = 512;
/// Threads that may take the parts of a result: a warp while all results have no more threads than the chip holds at a time.
const JOIN_TEAMS: [u32; 2] = [1, 32];
/// Threads that an SM holds.
const JOINING_OF_SM: u64 = 2048;
/// Accesses of a thread that are on their way at a time.
const UNROLL: u32 = 4;

/// An accepted problem.
#[derive(Clone, Debug)]
struct ReduceSimt {
    problem: ReduceProblem,
    /// Columns rather than rows.
    columns: bool,
    /// The chain before, over dims in the order that the form wants, and those dims.
    before: Chain,
    dims: Vec<u64>,
    after: ChainSpec,
    arch: Arch,
}

/// One way to do it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Config {
    /// Elements that one access takes.
    vector: u32,
    /// How threads stand.
    form: Form,
    /// Into how many each reduction is cut.
    parts: u64,
}

impl Algorithm for ReduceSimt {
    const ID: EngineId = EngineId { name: "reduce.simt", number: 400 };
    const VERSION: u32 = 3;
    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Reduce(problem) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is reduce", problem.kind())));
        };
        let accepted = ReduceSimt::new(problem.clone(), arch.clone());
        let rank = problem.kept.len() + problem.reduced.len();
        Self::ID.require(rank <= verdigris_tensor::MAX_RANK, Reason::Extent, format_args!("{rank} dims, taken are 8"))?;
        let target = accepted.spec(1, accepted.form(1)).target();
        Self::ID.require(arch.runs(target), Reason::Target, format_args!("element types that need {}", target.ptx()))?;
        Ok(accepted)
    }

    fn configs(&self) -> Vec<Config> {
        // Without a reduced dim, neighbours along the innermost one are results of their own.
        let most = if self.columns || !self.problem.reduced.is_empty() { vectors_fit(&self.before, &self.dims) } else { 1 };
        let mut configs = Vec::new();
        for vector in [most, 1] {
            let form = self.form(vector);
            let [turn, results] = form.reach(vector);
            let ctas = self.problem.results().div_ceil(results).max(1);
            // Short rows are not cut: there is nothing to gain from a second launch.
            let cuts = PARTS.map(|(ctas_of_sm, turns)| {
                let wanted = (ctas_of_sm * u64::from(self.arch.sm_count)).div_ceil(ctas);
                wanted.min(self.problem.depth() / (turn * turns)).clamp(1, MOST_PARTS)
            });
            // Of columns few parts come first: five of five problems on an H200 were 1 to 10 % faster so.
            let [more, fewer] = cuts;
            let cuts = if matches!(form, Form::Columns { .. }) { [fewer, more] } else { [more, fewer] };
            for parts in cuts.into_iter().filter(|_| form.takes_parts()).chain([1]) {
                let config = Config { vector, form, parts };
                if !configs.contains(&config) {
                    configs.push(config);
                }
            }
        }
        configs
    }

    fn knobs(config: &Config) -> Knobs {
        let stand = match config.form {
            Form::Row { team } => ("team", team),
            Form::Columns { lanes } => ("lanes", lanes),
            Form::Join { team } => ("team", team),
        };
        Knobs::new([("vector", config.vector), stand, ("parts", config.parts as u32)])
    }

    fn notes(&self, _: &Config) -> Notes {
        Notes::of(self.problem.accumulator)
    }

    fn work(&self, config: &Config) -> Work {
        let views = self.before.loads().map(|(view, _)| view).chain(self.before.stores());
        let views = views.map(|view| traffic_bytes(view, &self.dims, is_apart(view)));
        let bytes: f64 = views.sum::<f64>() + self.problem.results() as f64 * 4.0;
        let [turn, results] = config.form.reach(config.vector);
        let ctas = self.problem.results().div_ceil(results).max(1) * config.parts;
        // What a CTA of rows has on its way grows with its vectors: 64 rows of 4,096 took 1.6 us in 32 CTAs of such, 2.4 in 64 of single elements.
        let ctas = if matches!(config.form, Form::Row { .. }) { ctas * u64::from(config.vector) } else { ctas };
        let traffic = if config.vector == 1 { Traffic::Transposed } else { Traffic::Lines };
        let joins = if config.parts > 1 { 2.0 } else { 1.0 };
        // Columns of a few images are a long way for few threads: 425 pixels in 54 turns took 8.7 us, in 5 and a join 6.0, of 5.9 MB.
        let is_columns = matches!(config.form, Form::Columns { .. });
        let turns = if is_columns { self.problem.depth().div_ceil(config.parts).div_ceil(turn) } else { 0 };
        Work::default().beside([Stream::new(traffic, bytes).of_ctas(ctas as f64).in_launches(joins).in_turns(turns as f64)])
    }

    fn lower(&self, config: &Config) -> Result<Program, Refusal> {
        let p = &self.problem;
        let mut program = Program { buffer_alignment_bytes: vec![1; p.slots().len()], ..Program::default() };
        if p.is_empty() {
            return Ok(program);
        }
        // At most 2^30 elements each, so that their numbers fit; the innermost dim is cut between vectors.
        let kept_regions = Region::all(&p.kept, 1);
        let mut reduced_regions = Region::all(&p.reduced, 1);
        if reduced_regions.is_empty() {
            // Of nothing there is one result all the same.
            reduced_regions = vec![Region { first: vec![0; p.reduced.len()], extents: vec![0; p.reduced.len()] }];
        }
        let depth_of = |region: &Region| region.extents.iter().product::<u32>();
        let [turn, results_of_cta] = config.form.reach(config.vector);
        // Parts of each region, in elements, and how many there are in all.
        let cuts: Vec<(u32, u32)> = (reduced_regions.iter())
            .map(|region| {
                let depth = u64::from(depth_of(region));
                let each = depth.div_ceil(config.parts).next_multiple_of(turn).max(turn);
                (each as u32, depth.div_ceil(each).max(1) as u32)
            })
            .collect();
        let parts: u32 = cuts.iter().map(|(_, count)| count).sum();
        let bytes = p.accumulator.bytes() as u64;
        let most_results = kept_regions.iter().map(|region| u64::from(region.points(1))).max().unwrap_or(0);
        let scratch = (parts > 1).then(|| program.add_scratch("partial", u64::from(parts) * most_results * bytes));
        let mut spec = self.spec(config.vector, config.form);
        let join = Spec { form: Form::Join { team: 1 }, ..spec.clone() }.reduced_to_form();
        spec.after = spec.after.filter(|_| scratch.is_none());
        let kernel = spec.clone().kernel();
        let count = p.depth() as f64;
        for kept in &kept_regions {
            let results = kept.points(1);
            let join = join.clone().of_team(self.join_team(results));
            let mut part = 0u64;
            for (reduced, &(part_depth, count_of_parts)) in reduced_regions.iter().zip(&cuts) {
                let (outer, inner) = if self.columns { (reduced, kept) } else { (kept, reduced) };
                let both =
                    Region { first: [&outer.first[..], &inner.first].concat(), extents: [&outer.extents[..], &inner.extents].concat() };
                let args = ElementsArgs {
                    results,
                    count,
                    kept: kept.extents.clone(),
                    depth: depth_of(reduced),
                    part_depth,
                    reduced: reduced.extents.clone(),
                    before: spec.before.args(&self.before, &both),
                    partial: scratch.map(|scratch| Address { offset_bytes: part * u64::from(results) * bytes, ..scratch }),
                    after: spec.after.as_ref().map(|after| after.args(&p.after, kept)),
                };
                let ctas = u64::from(results).div_ceil(results_of_cta) as u32;
                program.launch(Launch::new(kernel.clone(), [ctas, count_of_parts, 1], args.bound(&spec)));
                part += u64::from(count_of_parts);
            }
            if let Some(partial) = scratch {
                let after = Some(self.after.args(&p.after, kept));
                let args = PartsArgs { results, count, kept: kept.extents.clone(), parts, partial, after }.bound(&join);
                let [_, results_of_cta] = join.form.reach(1);
                let ctas = u64::from(results).div_ceil(results_of_cta) as u32;
                program.launch(Launch::new(join.kernel(), [ctas, 1, 1], args));
            }
        }
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let mut kernels = Vec::new();
        for from in [DType::F32, DType::F16, DType::Bf16, DType::F64] {
            let accumulator = if from == DType::F64 { DType::F64 } else { DType::F32 };
            for f in [ReductionOp::Add, ReductionOp::Avg, ReductionOp::Max] {
                let mut outputs = vec![from];
                if from != accumulator {
                    outputs.push(accumulator);
                }
                for to in outputs {
                    let rows = TEAMS.map(|team| Form::Row { team });
                    for form in rows.into_iter().chain(LANES.map(|lanes| Form::Columns { lanes })) {
                        kernels.push(Spec::plain(f, from, to, form, false));
                        kernels.extend(form.takes_parts().then(|| Spec::plain(f, from, to, form, true)));
                    }
                    kernels.extend(JOIN_TEAMS.map(|team| Spec::plain(f, from, to, Form::Join { team }, true)));
                }
            }
        }
        let mut names = HashSet::new();
        let wanted = kernels.into_iter().filter(|spec| spec.target() <= target && names.insert(spec.name()));
        wanted.map(Spec::kernel).collect()
    }
}

/// How threads stand.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Form {
    /// `team` threads along the elements of one result.
    Row { team: u32 },
    /// `lanes` threads along results, and as many rows of them along the elements as a CTA has room for.
    Columns { lanes: u32 },
    /// `team` threads a result, over the parts of it.
    Join { team: u32 },
}

impl Form {
    /// Elements that one turn of a CTA's threads takes along a reduction, and results that a CTA has.
    fn reach(self, vector: u32) -> [u64; 2] {
        match self {
            Form::Row { team } => [u64::from(team * vector), u64::from(THREADS / team)],
            Form::Columns { lanes } => [u64::from(THREADS / lanes), u64::from(lanes * vector)],
            Form::Join { team } => [1, u64::from(THREADS / team)],
        }
    }

    /// Whether reductions may be cut into parts: the elements of a result are enough for a CTA.
    fn takes_parts(self) -> bool {
        matches!(self, Form::Row { team: THREADS } | Form::Columns { .. })
    }

    fn is_join(self) -> bool {
        matches!(self, Form::Join { .. })
    }
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
struct Spec {
    f: ReductionOp,
    double: bool,
    form: Form,
    /// Dims that stay, and dims that are reduced.
    ranks: [usize; 2],
    /// Over `[kept…, reduced…]`, for columns `[reduced…, kept…]`; not in a join.
    before: ChainSpec,
    value: u32,
    /// What is done with results; parts of them go to scratch instead.
    after: Option<ChainSpec>,
}

impl Spec {
    /// A reduction of one kept and one reduced dim without anything around it.
    fn plain(f: ReductionOp, from: DType, to: DType, form: Form, joined: bool) -> Spec {
        let vector = (16 / from.bytes() as u32).min(8);
        let before = ChainSpec::plain(2, vector, vec![Step::Load(ViewSpec::plain(from))]);
        let after = ChainSpec::plain(1, 1, vec![Step::Given, Step::Store(ViewSpec::plain(to), 0)]);
        let after = (!joined || form.is_join()).then_some(after);
        Spec { f, double: from == DType::F64, form, ranks: [1, 1], before, value: 0, after }.reduced_to_form()
    }

    fn of_team(self, team: u32) -> Spec {
        Spec { form: Form::Join { team }, ..self }
    }

    /// A join knows nothing of what was before the reduction.
    fn reduced_to_form(mut self) -> Spec {
        if self.form.is_join() {
            self.before = ChainSpec { rank: 0, vector: 1, narrow: true, paths: Vec::new(), in_blocks: false, steps: Vec::new() };
            self.value = 0;
            self.ranks[1] = 0;
        }
        self
    }

    fn name(&self) -> String {
        let form = match self.form {
            Form::Row { team } => format!("row{team}"),
            Form::Columns { lanes } => format!("columns{lanes}"),
            Form::Join { team: 1 } => "join".to_owned(),
            Form::Join { team } => format!("join{team}"),
        };
        let double = if self.double { "_f64" } else { "" };
        let [kept, reduced] = self.ranks;
        let after = self.after.as_ref().map_or("part".to_owned(), ChainSpec::name);
        format!("reduce_{}{double}_{form}_k{kept}r{reduced}_{}_of{}_{after}", self.f.name(), self.before.name(), self.value)
    }

    fn target(&self) -> Target {
        self.before.target().max(self.after.as_ref().map_or(Target::Sm80, ChainSpec::target))
    }

    /// Bytes of what is summed.
    fn bytes(&self) -> u32 {
        if self.double { 8 } else { 4 }
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas: 1, cluster: 1 };
        build(header, |k| match (self.form.is_join(), self.double) {
            (false, false) => self.elements::<f32>(k),
            (false, true) => self.elements::<f64>(k),
            (true, false) => self.join::<f32>(k),
            (true, true) => self.join::<f64>(k),
        })
    }

    fn identity<'k, T: Compute>(&self, k: Kernel<'k>) -> Val<'k, T> {
        T::constant(
            k,
            match self.f {
                ReductionOp::Add | ReductionOp::Avg | ReductionOp::Norm1 | ReductionOp::Norm2 | ReductionOp::Amax => 0.0,
                ReductionOp::Mul | ReductionOp::MulNoZeros => 1.0,
                ReductionOp::Min => f64::INFINITY,
                ReductionOp::Max => f64::NEG_INFINITY,
            },
        )
    }

    /// An element taken in.
    fn take<'k, T: Compute>(&self, so_far: Val<'k, T>, value: Val<'k, T>) -> Val<'k, T> {
        let k = value.kernel();
        match self.f {
            ReductionOp::Norm1 | ReductionOp::Amax => self.combine(so_far, value.abs()),
            ReductionOp::Norm2 => k.fma(value, value, so_far),
            ReductionOp::MulNoZeros => so_far * k.select(value.eq(T::constant(k, 0.0)), T::constant(k, 1.0), value),
            _ => self.combine(so_far, value),
        }
    }

    /// Two parts made one.
    fn combine<'k, T: Compute>(&self, x: Val<'k, T>, y: Val<'k, T>) -> Val<'k, T> {
        match self.f {
            ReductionOp::Add | ReductionOp::Avg | ReductionOp::Norm1 | ReductionOp::Norm2 => x + y,
            ReductionOp::Mul | ReductionOp::MulNoZeros => x * y,
            ReductionOp::Min => T::min_nan(x, y),
            ReductionOp::Max | ReductionOp::Amax => T::max_nan(x, y),
        }
    }

    fn finish<'k, T: Compute>(&self, whole: Val<'k, T>, count: Val<'k, f64>) -> Val<'k, T> {
        match self.f {
            ReductionOp::Avg => T::quotient(whole, T::from_f64(count)),
            ReductionOp::Norm2 => T::sqrt(whole),
            _ => whole,
        }
    }

    /// The loops over the elements. Threads without a result take another's elements along, unless something is stored on the way.
    fn walk<'k>(&self, k: Kernel<'k>, has_result: Option<Val<'k, bool>>, loops: impl Fn()) {
        let stores = self.before.steps.iter().any(|step| matches!(step, Step::Store(..)));
        match has_result.filter(|_| stores) {
            Some(has_result) => k.when(has_result, loops),
            None => loops(),
        }
    }

    /// Goes through the elements from `first` on in steps of `stride`, a power of two, up to `last`: fetches several, then takes them.
    fn turns<'k, F>(
        &self,
        k: Kernel<'k>,
        [first, last]: [Val<'k, u32>; 2],
        stride: u32,
        fetch: impl Fn(Val<'k, u32>) -> F,
        take: impl Fn(&F),
    ) {
        let count = k.select(first.lt(last), (last - first + (stride - 1)) >> stride.ilog2(), 0u32);
        let whole = count & !(UNROLL - 1);
        k.range_step(0, whole, UNROLL, |turn| {
            let all: Vec<F> = (0..UNROLL).map(|i| fetch(first + (turn + i) * stride)).collect();
            all.iter().for_each(&take);
        });
        k.when(whole.lt(count), || {
            // In the place of those that are not there, the last one is fetched and not taken.
            let turns: Vec<Val<'k, u32>> = (0..UNROLL - 1).map(|i| whole + i).collect();
            let all: Vec<F> = turns.iter().map(|turn| fetch(first + turn.min(count - 1) * stride)).collect();
            for (turn, fetched) in turns.iter().zip(&all) {
                k.when(turn.lt(count), || take(fetched));
            }
        });
    }

    /// A team adds up the parts of a result: each thread every so many, then all together.
    fn join<'k, T: Compute>(&self, k: Kernel<'k>) {
        let Parts { results, count, kept, parts, partial, after } = Parts::declare(k, self);
        let (Some(after), Form::Join { team }) = (after, self.form) else { return };
        let bytes = T::TY.bytes();
        let (member, result) = (k.thread() & (team - 1), k.cta() * (THREADS / team) + (k.thread() >> team.ilog2()));
        let has_result = result.lt(results);
        let whole = k.var(self.identity::<T>(k));
        // Threads of a team stay together, so those without a result add up another's.
        let mine = if team == 1 { result } else { result.min(results - 1) };
        let add_up = || {
            let place = k.var(partial.at(mine, bytes) + member.mul_wide(results) * u64::from(bytes));
            let turns = (parts - member + (team - 1)) >> team.ilog2();
            let turns = if team == 1 { parts } else { k.select(member.lt(parts), turns, 0u32) };
            k.range_unrolled(turns, UNROLL, |_| {
                whole.set(self.combine(whole.get(), k.ld_global::<T>(place, 0)));
                place.set(place + results.mul_wide(team * bytes));
            });
        };
        let deliver = |whole: Val<'k, T>| {
            let value = AnyVal::of(self.finish(whole, count));
            let index = kept.index(result);
            let fetched = after.fetch(&index);
            after.run(&index, &fetched, &[value]);
        };
        if team == 1 {
            k.when(has_result, || {
                add_up();
                deliver(whole.get());
            });
            return;
        }
        add_up();
        let whole = lanes::over_team(k, team, whole.get(), &|x, y| self.combine(x, y));
        k.when(member.eq(0) & has_result, || deliver(whole));
    }

    fn elements<'k, T: Compute>(&self, k: Kernel<'k>) {
        let Elements { results, count, kept: kept_extents, depth, part_depth, reduced, before, partial, after } =
            Elements::declare(k, self);
        let bytes = T::TY.bytes();
        let vector = self.before.vector;
        let part = k.special(Special::CtaY);
        let first = part * part_depth;
        let last = (first + part_depth).min(depth);
        let deliver = |result: Val<'k, u32>, whole: Val<'k, T>| {
            if let Some(to) = partial {
                let row = to.address() + part.mul_wide(results) * u64::from(bytes);
                k.st_global(row + result.mul_wide(bytes), 0, whole);
            }
            if let Some(after) = &after {
                let index = kept_extents.index(result);
                let fetched = after.fetch(&index);
                after.run(&index, &fetched, &[AnyVal::of(self.finish(whole, count))]);
            }
        };
        let sums: Vec<Var<'k, T>> = (0..vector).map(|_| k.var(self.identity::<T>(k))).collect();
        let take = |(index, fetched): &(Vec<Val<'k, u32>>, Fetched<'k>)| {
            let values = before.run(index, fetched, &[]).swap_remove(self.value as usize);
            for (lane, sum) in sums.iter().enumerate() {
                sum.set(self.take(sum.get(), values[lane.min(values.len() - 1)].get(k)));
            }
        };
        match self.form {
            Form::Row { team } => {
                let (thread, teams) = (k.thread(), THREADS / team);
                let member = thread & (team - 1);
                let result = k.cta() * teams + (thread >> team.ilog2());
                // All threads of the CTA stay together; those without a result take the last one's elements and deliver nothing.
                let mine = result.min(results - 1);
                let kept = kept_extents.index(mine);
                let fetch = |point: Val<'k, u32>| {
                    let mut index = kept.clone();
                    index.extend(reduced.index(point));
                    let fetched = before.fetch(&index);
                    (index, fetched)
                };
                self.walk(k, (team < THREADS).then(|| result.lt(results)), || {
                    self.turns(k, [first + member * vector, last], team * vector, fetch, take);
                });
                let mut own = sums.iter().map(|sum| sum.get()).collect::<Vec<_>>();
                while own.len() > 1 {
                    own = own.chunks(2).map(|pair| self.combine(pair[0], pair[1])).collect();
                }
                let combine = |x, y| self.combine(x, y);
                let whole = lanes::over_team(k, team, own[0], &combine);
                k.when(member.eq(0) & result.lt(results), || deliver(result, whole));
            }
            Form::Columns { lanes } => {
                let rows = THREADS / lanes;
                let (lane, row) = (k.thread() & (lanes - 1), k.thread() >> lanes.ilog2());
                let result = (k.cta() * lanes + lane) * vector;
                let inside = result.lt(results);
                let mine = k.select(inside, result, 0u32);
                let kept = kept_extents.index(mine);
                let fetch = |point: Val<'k, u32>| {
                    let mut index = reduced.index(point);
                    index.extend(kept.iter().copied());
                    let fetched = before.fetch(&index);
                    (index, fetched)
                };
                self.walk(k, Some(inside), || self.turns(k, [first + row, last], rows, fetch, take));
                // One line of results for each row; the first threads add them up, a thread for each result.
                let line = lanes * vector * bytes;
                let scratch = k.shared("rows", rows * line, 16).address();
                for (i, sum) in sums.iter().enumerate() {
                    k.st_shared(scratch + row * line + (lane * vector + i as u32) * bytes, 0, sum.get());
                }
                k.bar_sync();
                let place = k.thread();
                let result = k.cta() * (lanes * vector) + place;
                k.when(place.lt(lanes * vector) & result.lt(results), || {
                    let from = scratch + place * bytes;
                    let first = k.ld_shared::<T>(from, 0);
                    let whole = (1..rows).fold(first, |sum, row| self.combine(sum, k.ld_shared::<T>(from, i64::from(row * line))));
                    deliver(result, whole);
                });
            }
            Form::Join { .. } => {}
        }
    }
}

verdigris_kir::parameters! {
    /// Of the kernel that reads elements. Results go on, or parts of them to scratch.
    struct Elements / ElementsArgs of Spec as spec {
        results: u32,
        /// Elements of a result in all.
        count: f64,
        kept: Extents = spec.ranks[0],
        /// Elements of a result in this launch, and in a part.
        depth: u32,
        part_depth: u32,
        reduced: Extents = spec.ranks[1],
        before: ChainArgs = spec.before,
        partial: Option<Write> = spec.after.is_none().then(|| spec.bytes()),
        after: Option<ChainArgs> = spec.after,
    }
}

verdigris_kir::parameters! {
    /// Of the kernel that joins parts.
    struct Parts / PartsArgs of Spec as spec {
        results: u32,
        count: f64,
        kept: Extents = spec.ranks[0],
        parts: u32,
        partial: Read = spec.bytes(),
        after: Option<ChainArgs> = spec.after,
    }
}

impl ReduceSimt {
    fn new(problem: ReduceProblem, arch: Arch) -> Self {
        let (kept, reduced) = (problem.kept.len(), problem.reduced.len());
        // Columns where results lie side by side in what is read, or nearer to each other than the elements of one do.
        let stride = |axis: Option<usize>| {
            let strides = problem.before.loads().filter_map(|(view, _)| axis.map(|axis| view.strides[axis]));
            strides.filter(|&stride| stride > 0).min().unwrap_or(u64::MAX)
        };
        let (along_results, along_elements) =
            (stride(kept.checked_sub(1)), stride((kept + reduced).checked_sub(1).filter(|_| reduced > 0)));
        let columns = along_results < along_elements && problem.kept.last().is_some_and(|&extent| extent >= 4);
        let mut order: Vec<usize> = (0..kept + reduced).collect();
        if columns {
            order.rotate_left(kept);
        }
        let dims: Vec<u64> = problem.kept.iter().chain(&problem.reduced).copied().collect();
        let (before, dims) = (problem.before.permuted(&order), order.iter().map(|&axis| dims[axis]).collect());
        let after = ChainSpec::of(&problem.after, &problem.kept, 1);
        ReduceSimt { problem, columns, before, dims, after, arch }
    }

    /// How many threads add up the parts of each of so many results.
    fn join_team(&self, results: u32) -> u32 {
        let most = JOINING_OF_SM * u64::from(self.arch.sm_count);
        JOIN_TEAMS.into_iter().rev().find(|&team| u64::from(results) * u64::from(team) <= most).unwrap_or(1)
    }

    /// How threads stand for accesses of `vector` elements.
    fn form(&self, vector: u32) -> Form {
        let vector = u64::from(vector);
        if self.columns {
            // As few idle threads as can be; of equals the wider, which has longer lines.
            let idle = |lanes: u32| {
                let vectors = self.problem.results().div_ceil(vector);
                vectors.next_multiple_of(u64::from(lanes)) - vectors
            };
            let [narrow, wide] = LANES;
            return Form::Columns {
                lanes: if idle(wide) > idle(narrow) && idle(wide) * 8 > self.problem.results() / vector { narrow } else { wide },
            };
        }
        let accesses = self.problem.depth().div_ceil(vector);
        let team = TEAMS.into_iter().find(|team| accesses <= u64::from(team * UNROLL)).unwrap_or(THREADS);
        Form::Row { team }
    }

    fn spec(&self, vector: u32, form: Form) -> Spec {
        Spec {
            f: self.problem.f,
            double: self.problem.accumulator == DType::F64,
            form,
            ranks: [self.problem.kept.len(), self.problem.reduced.len()],
            before: ChainSpec::of(&self.before, &self.dims, vector),
            value: self.problem.value,
            after: Some(self.after.clone()),
        }
    }
}
