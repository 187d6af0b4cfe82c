//! `norm.rows`: normalization and its gradients of rows whose elements lie side by side ([`verdigris_graph::NormProblem`] has the formulas).
//!
//! Layer norm, root-mean-square norm and adaptive layer norm over the last dims, group and instance norm of channels-first images: of any element types,
//! rows anywhere, vectors that broadcast in any way, a residual, statistics given or written, the gradients of scale and bias.
//!
//! **Method.** A team of 8 to 512 threads takes a row, by its length, and holds it in registers; several teams are a CTA. Of normalization a team of a warp
//! or more takes one row and ends: an SM holds many such CTAs, and one's loads run beside another's sums. Elsewhere CTAs stay and go through rows in
//! steps of their count; up to three rows are on their way to shared memory meanwhile, or the next one to registers. Long rows may also come to shared
//! memory whole, by bulk copies, and be worked on there by a few warps each. Accesses are of 16 bytes where rows
//! are aligned to them, of fewer elements where not. The mean is summed first, then the squares of the deviations, both out of registers; a gradient sums
//! those together with `g` and `g·h`. Rows too long for a CTA are read again for each step, from L2 where they fit.
//! The gradients of a scale and a bias that all rows share are summed in registers over the rows of a team, over the teams of a CTA in shared memory, and
//! over CTAs by a second launch for both, always in the same order. Of few rows a team takes one alone, with few registers, and the second launch starts
//! while the first one runs. Of rows of 16-bit elements from 8193 to 16384, shared memory holds the sums. Those of other vectors, and of longer rows, are
//! sums of their own over `x`, `dy` and the statistics.
//!
//! **When it wins.** Wherever it takes the rows.
//!
//! **Numbers.** In f32 (f64 where an operand is f64). Results repeat bit for bit on a device; the gradients of scale and bias depend on its count of SMs.
//!
//! **Source.** The classes of lengths are those of quack's row kernels (github.com/Dao-AILab/quack), with rows in registers instead of shared memory.

mod ahead;
mod bulk;
mod catalog;
mod kernel;
mod parts;
mod shared_sums;

use serde::{Deserialize, Serialize};
use verdigris_graph::{NormKind, NormPass, NormProblem, Problem, View};
use verdigris_kir::ir::Target;
use verdigris_kir::program::{Address, KernelRef, Launch, Program};
use verdigris_tensor::DType;

use super::walk::{self, LIMIT, Statistics, VectorSpec};
use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Stream, Traffic, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::compute;
use crate::fuse::strided;
use crate::layout::space::{Region, element};
use crate::sums::moments::require_eps;
use kernel::{OfRowsArgs, PartsArgs};
use parts::{JoinArgs, JoinSpec};

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    problem: NormProblem,
    /// The operands of the kernel of rows, with where each lies.
    operands: Vec<Operand>,
    /// Whether the gradients of scale and bias are summed while rows are at hand, with the strides of each along a row.
    summed: Summed,
    /// The same with sums in shared memory, where registers do not hold them.
    in_shared: Option<Box<Rows>>,
    sm_count: u32,
    /// Shared memory of a CTA, and of an SM.
    shared_bytes: [u32; 2],
    /// Whether launches may overlap.
    overlaps: bool,
}

/// How the gradients of scale and bias are formed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Summed {
    /// There are none.
    None,
    /// In the kernel of rows: every row adds to the same vector.
    Beside,
    /// The same, in shared memory.
    InShared,
    /// By launches of their own.
    Behind,
}

/// What an operand is to the kernel.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Role {
    X,
    Residual,
    Dy,
    Scale,
    Bias,
    Mean,
    Inv,
    Dsum,
    Y,
    Sum,
    Dx,
    /// Statistics that are computed and written.
    ToMean,
    ToInv,
}

impl Role {
    fn is_written(self) -> bool {
        matches!(self, Role::Y | Role::Sum | Role::Dx | Role::ToMean | Role::ToInv)
    }

    fn name(self) -> &'static str {
        match self {
            Role::X => "x",
            Role::Residual => "residual",
            Role::Dy => "dy",
            Role::Scale => "scale",
            Role::Bias => "bias",
            Role::Mean => "mean",
            Role::Inv => "inv",
            Role::Dsum => "dsum",
            Role::Y => "y",
            Role::Sum => "sum",
            Role::Dx => "dx",
            Role::ToMean => "tomean",
            Role::ToInv => "toinv",
        }
    }
}

/// How an operand runs along a row.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Along {
    /// Elements side by side.
    Line,
    /// Elements side by side, the same for all rows.
    Shared,
    /// One element a row.
    Row,
    /// One element for all along the last of the row's dims.
    Outer,
    /// Anyhow.
    Strided,
}

/// An operand of the kernel of rows, as far as it shapes code.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub(super) struct OperandSpec {
    role: Role,
    dtype: DType,
    along: Along,
}

/// An operand with where it lies.
#[derive(Clone, Debug)]
struct Operand {
    spec: OperandSpec,
    view: View,
}

/// One way to do it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Config {
    /// Elements that one access takes.
    vector: u32,
    /// Threads of a row, and of a CTA whose teams take one row each; none where CTAs stay and go through rows.
    once: Option<[u32; 2]>,
    /// Threads of a row of CTAs that stay, where they are not those of its class.
    team: Option<u32>,
    /// Whether shared memory holds the sums that are the gradients of scale and bias.
    sums_in_shared: bool,
    /// Whether shared memory holds the rows that are on their way to CTAs that stay.
    ahead: bool,
    /// Rows that bulk copies bring to each team, which ends behind its only one, or stays; none where threads load. Knob `bulk`.
    bulk: u32,
    /// Whether rows are loaded, and whether they are stored, with a streaming hint (`.cs`): the caches evict them first. Knobs `loads` and `stores`.
    streams: [bool; 2],
}

/// A kernel whose teams take one row each.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct Once {
    /// Threads of a CTA.
    threads: u32,
}

/// Everything that shapes a kernel of rows.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct Spec {
    kind: NormKind,
    backward: bool,
    zero_centred: bool,
    double: bool,
    /// Threads of a row.
    team: u32,
    /// Accesses of a row that each thread holds; 0 reads the row again for each step.
    held: u32,
    /// Elements that one access takes.
    vector: u32,
    /// Dims of the rows, and dims that their elements lie along.
    ranks: [usize; 2],
    operands: Vec<OperandSpec>,
    /// Whether the gradients of a scale and of a bias are summed on the way.
    sums: [bool; 2],
    /// In shared memory, not in registers.
    sums_in_shared: bool,
    /// Where teams take one row each.
    once: Option<Once>,
    /// The launch behind it starts while this one runs: at once where teams take one row each, else where a CTA's rows are behind it.
    overlaps: bool,
    /// Rows that are on their way in shared memory to each team that stays; none where the next one is in registers.
    ahead: u32,
    /// Rows of each team that bulk copies bring to shared memory, where they are worked on: room for `held` accesses to a thread. None where threads load.
    bulk: u32,
    /// Whether rows are loaded, and whether they are stored, with a streaming hint (`.cs`): the caches evict them first. Knobs `loads` and `stores`.
    streams: [bool; 2],
}

/// The most elements that a thread holds of a row: of a result, and of a gradient, which holds `x`, `dy` and two sums.
const MOST_HELD: [u32; 2] = [64, 32];
/// Threads of the CTAs of narrow teams.
const NARROW_CTA: u32 = 128;
/// Threads of the widest team. Each has half of the registers that one of the next smaller team may have.
const WIDEST: u64 = 512;

/// Threads that take one row alone, with the accesses that each holds, of few rows.
const FEW: &[(u32, &[u32])] = &[(8, &[1]), (16, &[1]), (32, &[1, 2, 3, 4]), (64, &[2]), (128, &[1, 2, 4]), (256, &[1, 2]), (512, &[1, 2])];

/// Threads of the CTAs of such teams.
fn ctas_of_few(team: u32) -> impl Iterator<Item = u32> {
    let threads = match team {
        0..=16 => [NARROW_CTA, 0],
        17..=128 => [NARROW_CTA, 2 * NARROW_CTA],
        team => [team, 0],
    };
    threads.into_iter().filter(|&threads| threads > 0)
}

/// The most bytes of one vector's sums that the teams of such a CTA leave beside each other.
const MOST_LINES_BYTES: u32 = 1 << 15;

/// The accesses that each thread of such a team holds of a row of so many; none where there is no such team, or most of it would be idle.
fn held_of_few(accesses: u64, team: u32) -> Option<u32> {
    let (_, helds) = FEW.iter().find(|(known, _)| *known == team)?;
    let is_busy = 2 * accesses > u64::from(team) || team == FEW[0].0;
    helds.iter().copied().find(|&held| u64::from(team * held) >= accesses).filter(|_| is_busy)
}

/// What a thread holds of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Holds {
    /// What is normalized.
    Values,
    /// `x` and `dy`.
    Gradients,
    /// `x` and `dy`, and the sums that are the gradients of scale and bias.
    Sums,
}

/// Threads of a row and accesses that each holds, for rows of so many accesses; none where a CTA does not hold them.
fn class(accesses: u64, vector: u32, double: bool, holds: Holds) -> Option<(u32, u32)> {
    let most_elements = MOST_HELD[usize::from(holds != Holds::Values)] / if double { 2 } else { 1 };
    let most = u64::from((most_elements / vector).max(1));
    // Few accesses a thread as long as the team is part of a CTA: more rows are then on their way at a time.
    let easy = most.min(4);
    let of_widest = match holds {
        // Of values that are stored in 16 bits, as many as elsewhere.
        Holds::Values if vector >= 8 => most,
        Holds::Values => most * 3 / 4,
        Holds::Gradients => easy,
        Holds::Sums => 0,
    };
    let teams = [(8, 1), (16, 1), (32, easy), (64, easy), (128, easy), (256, most), (WIDEST, of_widest)];
    let (team, _) = teams.into_iter().find(|&(team, held)| accesses <= team * held)?;
    Some((team as u32, held_class(accesses, team)?))
}

/// The accesses that each thread of a team holds of a row of so many, or a few more, so that there are not too many kernels.
fn held_class(accesses: u64, team: u64) -> Option<u32> {
    let held = accesses.div_ceil(team).max(1);
    [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64].into_iter().find(|&class| u64::from(class) >= held)
}

/// The same of other teams, of at most so many threads: each thread holds few accesses, and most of them have as many as the others.
fn teams(accesses: u64, vector: u32, holds: Holds, most_threads: u32) -> impl Iterator<Item = u32> {
    let most = (MOST_HELD[usize::from(holds != Holds::Values)] / vector).min(5);
    let teams = [8, 16, 32, 64, 128, 256, 512, 1024].into_iter().filter(move |&team| team <= most_threads);
    teams.filter(move |&team| {
        held_class(accesses, u64::from(team)).is_some_and(|held| held <= most && 4 * accesses >= u64::from(3 * team * held))
    })
}

/// Whether rows of so many accesses of 16 bytes are loaded, and whether they are stored, with a streaming hint. On an H200 in bf16, forward: stores of up to 1,024 columns were 2 to 7 % faster so, and of
/// 4,096 and more 1 to 4 % slower; loads of these were up to 4 % faster.
fn streams_of(accesses: u64) -> [bool; 2] {
    [accesses > 128, accesses <= 128]
}

/// A team all of whose threads hold as many accesses of a row: about as many as are wished, at least 2 and at most 5.
fn even_team(accesses: u64, wished: u64) -> Option<u32> {
    let teams =
        [8, 16, 32, 64, 128, 256, WIDEST].into_iter().filter(|team| accesses.is_multiple_of(*team) && (2..=5).contains(&(accesses / team)));
    teams.min_by_key(|team| (accesses / team).abs_diff(wished)).map(|team| team as u32)
}

impl Algorithm for Rows {
    const ID: EngineId = EngineId { name: "norm.rows", number: 700 };
    const VERSION: u32 = 3;
    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Norm(problem) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is norm", problem.kind())));
        };
        let extent = problem.row_elements();
        Self::ID.require(extent < LIMIT, Reason::Extent, format_args!("rows of {extent} elements, taken below 2^31"))?;
        let rows = problem.row_count();
        Self::ID.require(extent > 0 && rows > 0, Reason::Extent, format_args!("{rows} rows of {extent} elements, taken are some"))?;
        let summed_elements = walk::most_summed(problem);
        let told = format_args!("gradients that are sums of {summed_elements} elements, taken below 2^31");
        Self::ID.require(summed_elements < LIMIT, Reason::Extent, told)?;
        for (name, view, _) in problem.operands() {
            let is_whole = matches!(name, "x" | "residual" | "dy" | "dsum" | "y" | "sum" | "dx");
            let is_line = !is_whole || along(problem, view) == Along::Line;
            Self::ID.require(is_line, Reason::Layout, format_args!("elements of {name} that do not lie side by side"))?;
        }
        require_eps(Self::ID, problem.eps.0, problem.compute)?;
        let target = compute::target_of_all(problem.operands().iter().map(|(_, view, _)| view.dtype));
        Self::ID.require(arch.runs(target), Reason::Target, format_args!("element types that need {}", target.ptx()))?;
        Ok(Rows::new(problem.clone(), arch))
    }

    fn configs(&self) -> Vec<Config> {
        let most = self.widest();
        let stay =
            |vector: u32| Config { vector, once: None, team: None, sums_in_shared: false, ahead: false, bulk: 0, streams: [false; 2] };
        let once = self.once(most).into_iter().map(|once| Config { once: Some(once), ..stay(most) });
        let in_shared = self.in_shared.as_ref().map(|rows| Config { sums_in_shared: true, ..stay(rows.widest()) });
        let others = self.teams(most).into_iter().map(Some);
        let ahead = [None].into_iter().chain(others).map(|team| Config { team, ahead: true, ..stay(most) });
        let ahead = ahead.filter(|&config| self.spec(config).ahead > 0);
        let bulk = self.bulk(most).into_iter().map(|config| Config { vector: most, ..config });
        let all = once.chain(in_shared).chain(ahead).chain(bulk).chain([8, 4, 2, 1].into_iter().filter(|&vector| vector <= most).map(stay));
        // Where the whole row is held, and nothing but rows is large; copies to shared memory pass L1 by whatever they are told.
        let [loads, stores] = self.streams(most);
        let streams = |config: Config| {
            let past = [loads && !config.ahead, stores];
            let is_tried = (config.once.is_some() || config.ahead) && config.bulk == 0 && past != [false; 2];
            [[false; 2], past].into_iter().take(1 + usize::from(is_tried)).map(move |streams| Config { streams, ..config })
        };
        let mut all: Vec<Config> = all.flat_map(streams).collect();
        if let Some(first) = self.first(most) {
            all.sort_by_key(|config| *config != first);
        }
        all
    }

    fn knobs(config: &Config) -> Knobs {
        let once = config.once.map(|[team, threads]| [("team", team), ("threads", threads)]);
        let in_shared = config.sums_in_shared.then_some(("shared", 1));
        let team = config.team.map(|team| ("team", team));
        let ahead = config.ahead.then_some(("ahead", 1));
        let bulk = (config.bulk > 0).then_some(("bulk", config.bulk));
        let [loads, stores] = config.streams;
        let streams = [loads.then_some(("loads", 1)), stores.then_some(("stores", 1))];
        let rest = [team, in_shared, ahead, bulk].into_iter().chain(streams).flatten();
        Knobs::new([("vector", config.vector)].into_iter().chain(once.into_iter().flatten()).chain(rest))
    }

    fn notes(&self, _: &Config) -> Notes {
        Notes::of(self.problem.compute)
    }

    fn work(&self, config: &Config) -> Work {
        if let Some(rows) = self.in_shared.as_ref().filter(|_| config.sums_in_shared) {
            return rows.work(config);
        }
        let spec = self.spec(*config);
        let reads = if spec.held == 0 { 2.0 } else { 1.0 };
        let elements = self.problem.row_count() as f64 * self.problem.row_elements() as f64;
        let of = |operand: &Operand| match operand.spec.along {
            Along::Line if operand.spec.role.is_written() => operand.spec.dtype.bytes() as f64,
            Along::Line if !matches!(operand.spec.role, Role::Scale | Role::Bias) => reads * operand.spec.dtype.bytes() as f64,
            _ => 0.0,
        };
        // Sums behind the rows read `x` and `dy` again.
        let summed = match &self.problem.pass {
            NormPass::Backward { x, dy, .. } if self.summed == Summed::Behind => (x.dtype.bytes() + dy.dtype.bytes()) as f64,
            _ => 0.0,
        };
        let bytes = elements * (self.operands.iter().map(of).sum::<f64>() + summed);
        let issued = elements / 32.0 * (10.0 + 20.0 / f64::from(config.vector));
        let launches = match self.summed {
            Summed::None => 1.0,
            // A launch that begins while the one in front runs hides a part of what it costs.
            Summed::Beside if spec.once.is_some() && spec.overlaps => 1.5,
            Summed::Beside | Summed::InShared => 2.0,
            Summed::Behind => 1.0 + walk::launches(&self.problem),
        };
        // A CTA goes through a long row by itself, however few there are.
        let ctas = if spec.held == 0 { self.problem.row_count() as f64 } else { f64::INFINITY };
        Work::default().beside([Stream::new(Traffic::Lines, bytes).of_ctas(ctas).issuing(issued).in_launches(launches)])
    }

    fn lower(&self, config: &Config) -> Result<Program, Refusal> {
        if let Some(rows) = self.in_shared.as_ref().filter(|_| config.sums_in_shared) {
            return rows.lower(config);
        }
        let (p, spec) = (&self.problem, self.spec(*config));
        let mut program = Program { buffer_alignment_bytes: vec![1; p.slots().len()], ..Program::default() };
        // What a gradient keeps of the statistics has its place in scratch.
        let is_kept = |role: Role| spec.backward && matches!(role, Role::ToMean | Role::ToInv);
        let mut operands: Vec<(View, Address)> = (self.operands.iter())
            .filter(|operand| !is_kept(operand.spec.role))
            .map(|operand| (operand.view.clone(), element(&operand.view, [])))
            .collect();
        let mut statistics = None;
        if self.summed == Summed::Behind {
            statistics = Statistics::of(p, &mut program);
            if let (Some(kept), NormPass::Backward { inv: None, dscale: Some(_), .. }) = (&statistics, &p.pass) {
                operands.extend(kept.mean.clone());
                operands.push(kept.inv.clone());
            }
        }
        let extent = p.row_elements();
        let regions = Region::all(&p.rows, 1);
        let stay = if spec.once.is_some() { u32::MAX } else { self.sm_count * spec.ctas_of_sm(self.shared_bytes[1]) };
        let ctas_of = |rows: u32| rows.div_ceil(spec.rows_of_cta()).min(stay);
        // A line of sums for each CTA of each launch.
        let lines: u32 = regions.iter().map(|region| ctas_of(region.points(1))).sum();
        let line_bytes = extent * p.compute.bytes() as u64;
        let mut line = 0u64;
        let vectors = spec.sums.iter().filter(|&&summed| summed).count() as u64;
        let all = (vectors > 0).then(|| program.add_scratch("parts", vectors * u64::from(lines) * line_bytes));
        let behind = |vector: u64| all.map(|at| Address { offset_bytes: at.offset_bytes + vector * u64::from(lines) * line_bytes, ..at });
        let parts = [behind(0).filter(|_| spec.sums[0]), behind(u64::from(spec.sums[0])).filter(|_| spec.sums[1])];
        for region in regions.iter().filter(|_| spec.has_rows()) {
            let rows = region.points(1);
            let ctas = ctas_of(rows);
            let argument = |(view, address): &(View, Address), along: Along| {
                let elements: u64 = view.strides.iter().zip(&region.first).map(|(stride, first)| stride * first).sum();
                let view = View { strides: view.strides[..spec.strides_of(along)].to_vec(), ..view.clone() };
                strided::argument_at(
                    &view,
                    Address { offset_bytes: address.offset_bytes + elements * view.dtype.bytes() as u64, ..*address },
                )
            };
            let args = OfRowsArgs {
                rows,
                step: ctas * spec.rows_of_cta(),
                extent: extent as u32,
                count: extent as f64,
                per_element: 1.0 / extent as f64,
                eps: p.eps.0,
                space: region.extents.clone(),
                elements: p.elements.iter().take(spec.ranks[1]).map(|&extent| extent as u32).collect(),
                operands: operands.iter().zip(&spec.operands).map(|(operand, spec)| argument(operand, spec.along)).collect(),
                parts: PartsArgs {
                    scale: parts[0].map(|at| Address { offset_bytes: at.offset_bytes + line * line_bytes, ..at }),
                    bias: parts[1].map(|at| Address { offset_bytes: at.offset_bytes + line * line_bytes, ..at }),
                },
            };
            program.launch(Launch::new(spec.clone().kernel(), [ctas, 1, 1], args.bound(&spec)));
            line += u64::from(ctas);
        }
        if let (Some(all), NormPass::Backward { dscale, dbias, .. }) = (all, &p.pass) {
            let vectors = [dscale, dbias].into_iter().zip(spec.sums).filter(|&(_, summed)| summed);
            let to: Vec<&View> = vectors.filter_map(|(view, _)| view.as_ref()).collect();
            let join = JoinSpec::new(to.iter().map(|view| view.dtype).collect(), p.compute, p.elements.len(), self.overlaps);
            let along = |view: &View| View { strides: view.strides[p.rows.len()..].to_vec(), ..view.clone() };
            let grid = [(extent as u32).div_ceil(parts::COLUMNS), to.len() as u32, 1];
            let join = match spec.once {
                Some(_) => join.at_once(lines),
                None if grid[0] * grid[1] <= self.sm_count => join.of_few_ctas(),
                None => join,
            };
            let args = JoinArgs {
                columns: extent as u32,
                lines,
                space: p.elements.iter().map(|&extent| extent as u32).collect(),
                parts: all,
                to: to.iter().map(|view| strided::argument(&along(view), &[])).collect(),
            };
            let launch = Launch::new(join.clone().kernel(), grid, args.bound(&join));
            program.launch(if join.overlaps { launch.overlapping() } else { launch });
        }
        if let Some(statistics) = statistics {
            walk::sum_vectors(p, &statistics, &mut program);
        }
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let mut kernels = catalog::kernels(target);
        // Chips that launch kernels one after the other have the join without the overlap, compiled when it is first asked for.
        let joins = [DType::F32, DType::F16, DType::Bf16]
            .into_iter()
            .flat_map(|dtype| [1, 2].map(|vectors| JoinSpec::new(vec![dtype; vectors], DType::F32, 1, true)))
            .flat_map(|join| [join.clone(), join.clone().of_few_ctas(), join.clone().at_once(1), join.at_once(parts::MOST_AT_ONCE)]);
        kernels.extend(joins.filter(|join| join.target() <= target).map(JoinSpec::kernel));
        kernels.extend(VectorSpec::catalog().into_iter().filter(|spec| spec.target() <= target).map(VectorSpec::kernel));
        kernels
    }
}

/// How a view runs along the elements of a row.
fn along(problem: &NormProblem, view: &View) -> Along {
    let strides = &view.strides[problem.rows.len()..];
    let mut packed = 1;
    let is_line = strides.iter().zip(&problem.elements).rev().all(|(&stride, &extent)| {
        let fits = stride == packed || extent == 1;
        packed *= extent;
        fits
    });
    if strides.iter().all(|&stride| stride == 0) {
        // Of a row of one element either is right; it is read as a line.
        return if is_line { Along::Line } else { Along::Row };
    }
    match strides {
        _ if is_line => Along::Line,
        [.., 0] => Along::Outer,
        _ => Along::Strided,
    }
}

/// Whether every row adds to the same gradients of scale and bias, an element of them for each of a row's.
fn adds_to_one_vector(problem: &NormProblem) -> bool {
    let NormPass::Backward { dscale, dbias, .. } = &problem.pass else { return false };
    let rows = problem.rows.len();
    let is_one = |to: &View| to.strides[..rows].iter().all(|&stride| stride == 0) && to.strides[rows..].iter().all(|&stride| stride > 0);
    dscale.iter().chain(dbias).all(is_one)
}

/// How the gradients of scale and bias are formed where registers hold what they hold.
fn summed(problem: &NormProblem) -> Summed {
    let NormPass::Backward { dscale, dbias, .. } = &problem.pass else { return Summed::None };
    let is_held = class(problem.row_elements(), 1, problem.compute == DType::F64, Holds::Sums).is_some();
    match dscale.is_none() && dbias.is_none() {
        true => Summed::None,
        false if is_held && adds_to_one_vector(problem) => Summed::Beside,
        false => Summed::Behind,
    }
}

impl Rows {
    fn new(problem: NormProblem, arch: &Arch) -> Rows {
        let summed = summed(&problem);
        let rows = Rows::summing(problem, arch, summed);
        let in_shared = (summed == Summed::Behind && adds_to_one_vector(&rows.problem)).then(|| {
            let rows = Rows::summing(rows.problem.clone(), arch, Summed::InShared);
            let (vector, double) = (rows.widest(), rows.problem.compute == DType::F64);
            let is_held = class(rows.problem.row_elements().div_ceil(u64::from(vector)), vector, double, Holds::Gradients).is_some();
            (is_held && vector >= 2).then(|| Box::new(rows))
        });
        Rows { in_shared: in_shared.flatten(), ..rows }
    }

    fn summing(problem: NormProblem, arch: &Arch, summed: Summed) -> Rows {
        let mut list: Vec<(Role, View)> = Vec::new();
        let mut push = |role: Role, view: &Option<View>| list.extend(view.iter().map(|view| (role, view.clone())));
        match &problem.pass {
            NormPass::Forward { x, residual, scale, bias, y, sum, mean, inv } => {
                push(Role::X, &Some(x.clone()));
                push(Role::Residual, residual);
                push(Role::Scale, scale);
                push(Role::Bias, bias);
                push(Role::Y, &Some(y.clone()));
                push(Role::Sum, sum);
                push(Role::ToMean, mean);
                push(Role::ToInv, inv);
            }
            NormPass::Backward { x, dy, scale, mean, inv, dsum, dx, dscale, .. } => {
                let behind = summed == Summed::Behind;
                let beside = matches!(summed, Summed::Beside | Summed::InShared);
                push(Role::X, &Some(x.clone()));
                push(Role::Dy, &Some(dy.clone()).filter(|_| dx.is_some() || beside));
                push(Role::Scale, &scale.clone().filter(|_| dx.is_some()));
                push(Role::Mean, mean);
                push(Role::Inv, inv);
                push(Role::Dsum, dsum);
                push(Role::Dx, dx);
                if behind && inv.is_none() && dscale.is_some() {
                    let row = View { strides: vec![0; problem.space().len()], dtype: problem.compute, ..x.clone() };
                    push(Role::ToMean, &Some(row.clone()).filter(|_| problem.kind == NormKind::Layer));
                    push(Role::ToInv, &Some(row));
                }
            }
        }
        let operand = |(role, view): (Role, View)| {
            let lies = match role {
                Role::Mean | Role::Inv | Role::ToMean | Role::ToInv => Along::Row,
                Role::Scale | Role::Bias => match along(&problem, &view) {
                    Along::Line if view.strides[..problem.rows.len()].iter().all(|&stride| stride == 0) => Along::Shared,
                    lies => lies,
                },
                _ => Along::Line,
            };
            Operand { spec: OperandSpec { role, dtype: view.dtype, along: lies }, view }
        };
        let operands = list.into_iter().map(operand).collect();
        let (sm_count, overlaps) = (arch.sm_count, arch.runs(Target::Sm90));
        let shared_bytes = [arch.shared_bytes_per_cta, arch.shared_bytes_per_sm];
        Rows { problem, operands, summed, in_shared: None, sm_count, shared_bytes, overlaps }
    }

    /// The widest access that strides and offsets allow: the largest of 8, 4, 2 and 1, at most 16 bytes of the narrowest element.
    fn widest(&self) -> u32 {
        let p = &self.problem;
        let mut bits = p.row_elements() | 8;
        let mut narrowest = 8;
        for Operand { spec, view } in &self.operands {
            match spec.along {
                Along::Line | Along::Shared => {
                    narrowest = narrowest.min(view.dtype.bytes());
                    bits |= view.offset;
                    bits = view.strides[..p.rows.len()]
                        .iter()
                        .zip(&p.rows)
                        .filter(|(_, rows)| **rows > 1)
                        .fold(bits, |bits, (stride, _)| bits | stride);
                }
                // An access lies within what one element serves.
                Along::Outer => bits |= p.elements.last().copied().unwrap_or(1),
                Along::Row | Along::Strided => {}
            }
        }
        (1 << bits.trailing_zeros()).min(16 / narrowest as u32)
    }

    /// Teams and CTAs that take one row each, the best first. Of gradients they do for few rows: as many sums of CTAs as the second launch has on its way at
    /// a time. Of normalization, whose CTAs end without a sum, for any number.
    fn once(&self, vector: u32) -> Vec<[u32; 2]> {
        let p = &self.problem;
        let accesses = p.row_elements().div_ceil(u64::from(vector));
        if !self.is_backward() {
            let class = class(accesses, vector, p.compute == DType::F64, Holds::Values);
            // Of shorter rows a thread has one access, and CTAs that stay have two on their way.
            let usual = class.filter(|&(team, _)| team >= 32).map(|(team, _)| team);
            return usual.into_iter().chain(self.teams(vector)).map(|team| [team, team.max(NARROW_CTA)]).collect();
        }
        if self.summed != Summed::Beside || vector < 2 {
            return Vec::new();
        }
        let fits = |team: u32, threads: u32| {
            let lines = p.row_count().div_ceil(u64::from(threads / team));
            let held = held_of_few(accesses, team);
            held.is_some_and(|held| held * threads * vector * p.compute.bytes() as u32 <= MOST_LINES_BYTES)
                && lines <= u64::from(parts::MOST_AT_ONCE)
        };
        let mut few: Vec<[u32; 2]> = (FEW.iter())
            .flat_map(|&(team, _)| ctas_of_few(team).map(move |threads| [team, threads]))
            .filter(|&[team, threads]| fits(team, threads))
            .collect();
        // Two accesses a thread hide each other's latency; and as many CTAs as there are SMs share the issue.
        let rank = |&[team, threads]: &[u32; 2]| {
            let held = held_of_few(accesses, team).unwrap_or(0);
            let lines = p.row_count().div_ceil(u64::from(threads / team));
            (held > 2, lines > u64::from(self.sm_count), team, threads)
        };
        few.sort_by_key(rank);
        few
    }

    /// Teams that are not those of the class of a row's length, of few accesses to a thread, where registers hold them.
    fn teams(&self, vector: u32) -> Vec<u32> {
        let p = &self.problem;
        let (accesses, holds) = (p.row_elements().div_ceil(u64::from(vector)), self.holds());
        if p.compute == DType::F64 || vector < 4 {
            return Vec::new();
        }
        let usual = class(accesses, vector, false, holds).map(|(team, _)| team);
        let most_threads = if holds == Holds::Values { 1024 } else { 512 };
        teams(accesses, vector, holds, most_threads).filter(|&team| Some(team) != usual).collect()
    }

    /// [`streams_of`] of rows of 16-bit elements that registers hold, forward; none of others, which were not timed.
    fn streams(&self, vector: u32) -> [bool; 2] {
        let accesses = self.problem.row_elements().div_ceil(u64::from(vector));
        if self.is_backward() || vector < 8 || self.problem.compute == DType::F64 { [false; 2] } else { streams_of(accesses) }
    }

    /// Rows by bulk copies, forward, where accesses are whole: teams that take one row each and end, and such that stay.
    fn bulk(&self, vector: u32) -> Vec<Config> {
        let accesses = self.problem.row_elements().div_ceil(u64::from(vector));
        let mut streamed = self.operands.iter().map(|operand| operand.spec).filter(|spec| kernel::is_streamed(spec.role));
        let is_whole = streamed.all(|spec| vector * spec.dtype.bytes() as u32 == bulk::ACCESS_BYTES);
        if self.is_backward() || !self.overlaps || !is_whole || accesses < 4 * 32 {
            return Vec::new();
        }
        let ways = bulk::teams(accesses).flat_map(|team| [1, 2, 3].map(|rows| (team, rows)));
        let config = |(team, bulk): (u32, u32)| Config {
            vector,
            once: (bulk == 1).then(|| [team, bulk::threads_of(team)]),
            team: (bulk > 1).then_some(team),
            sums_in_shared: false,
            ahead: false,
            bulk,
            streams: [false; 2],
        };
        let fits = |config: &Config| {
            config.bulk * self.spec(*config).streamed_bytes() <= self.shared_bytes[0].saturating_sub(ahead::LEFT_BYTES / 8)
        };
        ways.map(config).filter(fits).collect()
    }

    /// The config that was fastest, or within 2 % of that, of rows of 128 to 16,384 columns of bf16 in 67 to 268 MB on an H200 (`2026-11-29-configs.jsonl`, rows of the bench's own list); of lengths between
    /// these by the same rules.
    fn first(&self, vector: u32) -> Option<Config> {
        let accesses = self.problem.row_elements().div_ceil(u64::from(vector));
        if vector < 8 || self.problem.compute == DType::F64 {
            return None;
        }
        let (usual, _) = class(accesses, vector, false, self.holds())?;
        let any = Config { vector, once: None, team: None, sums_in_shared: false, ahead: false, bulk: 0, streams: [false; 2] };
        let stay = |team: u32| Config { team: (team != usual).then_some(team), ahead: true, ..any };
        if self.is_backward() {
            return (self.summed == Summed::Beside && accesses == 16).then(|| stay(8));
        }
        if let Some(whole) = self.first_bulk(vector, accesses) {
            return Some(whole);
        }
        // Rows whose mean is taken off first are held wide, and registers leave too few CTAs.
        if self.problem.kind == NormKind::Layer && (513..=1536).contains(&accesses) {
            return Some(stay(even_team(accesses, 4).unwrap_or(usual)));
        }
        let is_long = self.problem.kind == NormKind::Layer && accesses > 512;
        let team = even_team(accesses, 2).filter(|_| !is_long).or(Some(usual).filter(|&usual| usual >= 32))?;
        Some(Config { once: Some([team, team.max(NARROW_CTA)]), streams: self.streams(vector), ..any })
    }

    /// Rows that a CTA takes whole by a bulk copy, eight accesses to a thread: of 4,096, 8,192 and 16,384 elements in 268 MB 2 to 5 % faster than registers for layer norm on an H200, of
    /// 4,096 for RMS norm as well (`2026-11-29-rows-configs.jsonl`). Of 5,120 elements they were not; with rows that are read beside `x` they were not timed.
    fn first_bulk(&self, vector: u32, accesses: u64) -> Option<Config> {
        let lengths: &[u64] = if self.problem.kind == NormKind::Layer { &[512, 1024, 2048] } else { &[512] };
        let read = self.operands.iter().filter(|operand| kernel::is_streamed(operand.spec.role)).count();
        let team = (accesses / 8) as u32;
        let is_first = |config: &Config| config.bulk == 1 && config.once == Some([team, bulk::threads_of(team)]);
        self.bulk(vector).into_iter().find(is_first).filter(|_| read == 1 && lengths.contains(&accesses))
    }

    /// What a thread holds.
    fn holds(&self) -> Holds {
        match (self.is_backward(), self.summed) {
            (false, _) => Holds::Values,
            (true, Summed::Beside) => Holds::Sums,
            (true, _) => Holds::Gradients,
        }
    }

    fn is_backward(&self) -> bool {
        matches!(self.problem.pass, NormPass::Backward { .. })
    }

    fn spec(&self, config: Config) -> Spec {
        let p = &self.problem;
        let backward = self.is_backward();
        let double = p.compute == DType::F64;
        let accesses = p.row_elements().div_ceil(u64::from(config.vector));
        let usual = class(accesses, config.vector, double, self.holds()).unwrap_or((256, 0));
        let (team, held) = match (config.once, config.team) {
            (Some([team, _]), _) | (None, Some(team)) if config.bulk > 0 => (team, held_class(accesses, u64::from(team)).unwrap_or(0)),
            (Some([team, _]), _) if backward => (team, held_of_few(accesses, team).unwrap_or(0)),
            (Some([team, _]), _) | (None, Some(team)) if team != usual.0 => (team, held_class(accesses, u64::from(team)).unwrap_or(0)),
            _ => usual,
        };
        let has = |role: Role| self.operands.iter().any(|operand| operand.spec.role == role);
        let beside = |to: &Option<View>| matches!(self.summed, Summed::Beside | Summed::InShared) && to.is_some();
        let sums = match &p.pass {
            NormPass::Backward { dscale, dbias, .. } => [beside(dscale), beside(dbias)],
            NormPass::Forward { .. } => [false; 2],
        };
        let mut spec = Spec {
            kind: p.kind,
            backward,
            zero_centred: p.zero_centred && has(Role::Scale),
            double,
            team,
            held,
            vector: config.vector,
            ranks: [p.rows.len(), p.elements.len()],
            operands: self.operands.iter().map(|operand| operand.spec).collect(),
            sums,
            sums_in_shared: self.summed == Summed::InShared,
            once: config.once.map(|[_, threads]| Once { threads }),
            overlaps: self.overlaps && sums.contains(&true),
            ahead: 0,
            bulk: config.bulk,
            streams: config.streams,
        }
        .plain_where_it_may_be();
        if config.ahead {
            spec.ahead = self.rows_ahead(&spec);
        }
        spec
    }

    /// How many rows shared memory has room for on their way to each team that stays; none where accesses are none that are copied.
    fn rows_ahead(&self, spec: &Spec) -> u32 {
        let streamed = || spec.operands.iter().filter(|operand| kernel::is_streamed(operand.role));
        let is_copied = streamed().all(|operand| matches!(spec.vector as usize * operand.dtype.bytes(), 4 | 8 | 16));
        if spec.held == 0 || !is_copied {
            return 0;
        }
        ahead::rows_of(spec.streamed_bytes(), self.shared_bytes[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_hold_their_rows() {
        for holds in [Holds::Values, Holds::Gradients, Holds::Sums] {
            for double in [false, true] {
                for vector in [1, 2, 4, 8] {
                    for accesses in (1..3000).chain([4096, 6144, 6145, 8192, 8193, 16384, 16385, 40000]) {
                        let Some((team, held)) = class(accesses, vector, double, holds) else {
                            assert!(accesses * u64::from(vector) > 8192 / if double { 2 } else { 1 }, "{accesses} of {vector}");
                            continue;
                        };
                        assert!(u64::from(team * held) >= accesses, "{accesses}: {team} x {held}");
                        assert!(held * vector <= MOST_HELD[usize::from(holds != Holds::Values)], "{accesses}: {held} x {vector}");
                    }
                }
            }
        }
        assert_eq!(class(16, 8, false, Holds::Values), Some((16, 1)));
        assert_eq!(class(512, 8, false, Holds::Values), Some((128, 4)));
        assert_eq!(class(1536, 8, false, Holds::Values), Some((256, 6)));
        assert_eq!(class(4096, 8, false, Holds::Values), Some((512, 8)));
        assert_eq!(class(6144, 4, false, Holds::Values), Some((512, 12)));
        assert_eq!(class(6145, 4, false, Holds::Values), None);
        assert_eq!(class(1024, 8, false, Holds::Sums), Some((256, 4)));
        assert_eq!(class(1025, 8, false, Holds::Sums), None);
        assert_eq!(class(2048, 8, false, Holds::Gradients), Some((512, 4)));
    }
}
