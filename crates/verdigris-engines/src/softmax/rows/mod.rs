//! `softmax.rows`: softmax, cross-entropy and their gradients ([`verdigris_graph::SoftmaxProblem`] has the formulas).
//!
//! It takes all of them: any element types, any strides, any number of rows, rows of fewer than 2^31 elements.
//!
//! **Method.** Four ways, by how rows lie:
//!
//! | form | rows | threads |
//! |---|---|---|
//! | rows | elements lie side by side | a team of 8 to 1024 takes a row, 16 bytes to an access, and elements in front of and behind whole vectors one by one where rows begin anywhere; up to some 32,000 elements are read once and kept in registers, longer rows, and losses' of more than 16,000, are read once for maximum and sum, and once more, from L2 where they fit, for what is written |
//! | clusters | the same, from whole vectors on | up to eight CTAs of 256 or 512 threads take a row, of up to some 131,000 elements, keep it in registers, and tell each other their maxima and sums through distributed shared memory |
//! | columns | rows lie side by side | a thread takes neighbouring rows, 16 bytes to an access, and goes along their elements twice |
//! | elements | any strides | a thread, a warp or a CTA takes a row, element by element |
//!
//! Losses of all rows are added up by CTAs behind, always in the same order. What the gradient of a mean divides by where rows are ignored is counted by a
//! launch in front, or, of few rows, by every CTA for itself.
//!
//! **When it wins.** There is no other engine for these.
//!
//! **Numbers.** In f32 (f64 where an operand is f64); the maximum is taken off before exponentials, of which those below the normal numbers of f32
//! (2⁻¹²⁶) become 0; of those that are stored in f32, what the rounding of the argument loses is put back, of those in sums not. Where maximum and sum are carried along together, sums so far are multiplied by `e^(M − M′)` at each new maximum. Results repeat bit
//! for bit.

mod columns;
mod elements;
mod lines;
mod losses;
mod peak;
mod spec;

use verdigris_graph::{LossReduction, Problem, RowFunction, SoftmaxProblem, View};
use verdigris_kir::ir::Target;
use verdigris_kir::program::{Address, KernelRef, Launch, Program, Step};
use verdigris_tensor::DType;

use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Stream, Traffic, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::operand::OperandArgs;
use crate::fuse::strided;
use crate::layout::space::{Region, element};

use spec::{CountArgs, Form, JoinArgs, Kind, LossArgs, Number, OfRowsArgs, Spec, THREADS, across};

/// Losses that one CTA adds up where there are more.
const PART_ROWS: u64 = 1 << 13;
/// Vectors that a thread holds at most: loads of so many overlap.
const HELD: u32 = 4;
/// Threads that an SM holds, of 64 registers each.
const THREADS_OF_SM: u32 = 1024;

/// What a byte from L2 costs beside one of device memory.
const L2_BYTE: f64 = 0.4;

/// One way to do it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Config {
    form: Form,
    /// Every CTA counts the rows that are not ignored, in place of a launch in front.
    counting: bool,
}

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    problem: SoftmaxProblem,
    /// The way that takes any strides.
    elements: Form,
    /// The others, the best first.
    vectors: Vec<Form>,
}

impl Algorithm for Rows {
    const ID: EngineId = EngineId { name: "softmax.rows", number: 500 };
    const VERSION: u32 = 3;
    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Softmax(problem) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is softmax", problem.kind())));
        };
        let extent = problem.extent;
        Self::ID.require(extent < 1 << 31, Reason::Extent, format_args!("rows of {extent} elements, taken below 2^31"))?;
        let rank = problem.rows.len();
        Self::ID.require(rank < verdigris_tensor::MAX_RANK, Reason::Extent, format_args!("{rank} dims of rows, taken are 7"))?;
        let elements = elements_of(problem);
        let target = Spec::of(problem, elements).target();
        Self::ID.require(arch.runs(target), Reason::Target, format_args!("element types that need {}", target.ptx()))?;
        Ok(Rows { problem: problem.clone(), elements, vectors: vectors_of(problem, arch) })
    }

    fn configs(&self) -> Vec<Config> {
        let forms = self.vectors.iter().copied().chain([self.elements]);
        let ways = |form: Form| [false, true].map(|counting| Config { form, counting });
        forms.flat_map(ways).filter(|config| !config.counting || self.may_count(config.form)).collect()
    }

    fn knobs(&Config { form, counting }: &Config) -> Knobs {
        let form = match form {
            Form::Elements { team, held } => vec![("team", team), ("elements", held)],
            Form::Rows { vector, team, held, edges: false } => vec![("vector", vector), ("team", team), ("held", held)],
            Form::Rows { vector, team, held, edges: true } => vec![("vector", vector), ("team", team), ("held", held), ("edges", 1)],
            Form::Cluster { vector, team, held, ctas } => vec![("vector", vector), ("team", team), ("held", held), ("cluster", ctas)],
            Form::Columns { vector, team } => vec![("rows", vector), ("team", team)],
        };
        Knobs::new(form.into_iter().chain(counting.then_some(("launches", 1))))
    }

    fn notes(&self, _: &Config) -> Notes {
        Notes::of(self.problem.compute)
    }

    fn work(&self, config: &Config) -> Work {
        let (form, spec) = (&config.form, self.spec(*config));
        let elements = self.problem.row_count() as f64 * self.problem.extent as f64;
        // What stands in registers is read once.
        let reads = match *form {
            Form::Elements { held, .. } | Form::Rows { held, .. } | Form::Cluster { held, .. } if held > 0 => 1.0,
            Form::Elements { .. } => 2.0,
            _ if is_read_once(spec.kind) => 1.0,
            _ => 2.0,
        };
        let bytes: f64 = (self.problem.operands().into_iter())
            .filter(|(_, view, _)| view.strides.last().is_some_and(|&stride| stride > 0))
            .map(|(_, view, written)| elements * view.dtype.bytes() as f64 * if written { 1.0 } else { reads })
            .sum();
        let joined = matches!(spec.kind, Kind::CrossEntropy { kept: true, .. } | Kind::CrossEntropyBackward { number: Number::Read, .. });
        let (traffic, issued) = match form {
            Form::Elements { .. } => (Traffic::Transposed, 40.0),
            _ => (Traffic::Lines, 12.0),
        };
        let points = self.problem.row_count() / u64::from(spec.rows_together());
        let ctas = f64::from(spec.ctas(u32::try_from(points).unwrap_or(u32::MAX / 8)));
        // What every CTA reads again comes from L2.
        let labels = match &self.problem.function {
            RowFunction::CrossEntropyBackward { labels, .. } if config.counting => {
                L2_BYTE * ctas * self.problem.row_count() as f64 * labels.dtype.bytes() as f64
            }
            _ => 0.0,
        };
        let stream = Stream::new(traffic, bytes + labels).issuing(elements / 32.0 * issued).of_ctas(ctas);
        Work::default().beside([stream.in_launches(if joined { 2.0 } else { 1.0 })])
    }

    fn lower(&self, config: &Config) -> Result<Program, Refusal> {
        let (p, spec) = (&self.problem, self.spec(*config));
        let mut program = Program { buffer_alignment_bytes: vec![1; p.slots().len()], ..Program::default() };
        if p.is_empty() {
            return Ok(program);
        }
        if let Form::Rows { vector, edges: true, .. } = spec.form {
            // Rows of all operands begin equally far from whole vectors only if buffers begin with one.
            for (_, (_, view)) in spec.operands_of(p).enumerate().filter(|(i, _)| spec.is_whole(*i)) {
                let asked = &mut program.buffer_alignment_bytes[view.slot.0 as usize];
                *asked = (*asked).max(u64::from(vector) * view.dtype.bytes() as u64);
            }
        }
        let bytes = p.compute.bytes() as u64;
        let kept = matches!(spec.kind, Kind::CrossEntropy { kept: true, .. });
        let loss = match &p.function {
            RowFunction::CrossEntropy { loss_spec, .. } | RowFunction::CrossEntropyBackward { loss_spec, .. } => Some(loss_spec),
            _ => None,
        };
        let ignore_index = loss.and_then(|loss| loss.ignore_index).unwrap_or(0);
        let mean = loss.is_some_and(|loss| loss.reduction == LossReduction::Mean);
        let sums = kept.then(|| ["losses", "weights"].map(|name| program.add_scratch(name, p.row_count() * bytes)));
        let count = (spec.number() == Some(Number::Read)).then(|| program.add_scratch("count", 8));
        let together = spec.rows_together();
        // At most 2^30 rows each, so that their numbers fit; the innermost dim is cut between vectors.
        let regions = Region::all(&p.rows, 1);
        if let (Some(count), RowFunction::CrossEntropyBackward { labels, .. }) = (count, &p.function) {
            let is_alone = matches!(regions[..], [ref one] if one.points(1) <= losses::COUNTED_ROWS);
            if !is_alone {
                program.steps.push(Step::Fill { at: count, bytes: 8, value: 0 });
            }
            let counting = spec.behind(Kind::Count, vec![labels.dtype]);
            for region in &regions {
                let rows = region.points(1);
                let labels = strided::argument(labels, &region.first);
                let args = CountArgs { rows, is_alone: u32::from(is_alone), ignore_index, extents: region.extents.clone(), labels, count };
                program.launch(Launch::new(counting.clone().kernel(), [rows.div_ceil(losses::COUNTED_ROWS), 1, 1], args.bound(&counting)));
            }
        }
        let mut done = 0u64;
        for region in &regions {
            let rows = region.points(together);
            let loss = loss.map(|loss| LossArgs {
                smoothing: loss.smoothing.0,
                classes: p.extent as f64,
                ignore_index,
                sums: sums.map(|sums| sums.map(|sum| Address { offset_bytes: done * bytes, ..sum })),
                counted: count,
                count: (spec.number() == Some(Number::Given)).then(|| if mean { p.row_count() as f64 } else { 1.0 }),
            });
            let mut extents = region.extents.clone();
            if let Some(inner) = extents.last_mut() {
                *inner /= together;
            }
            let operands = spec.operands_of(p).enumerate().map(|(i, (_, view))| spec.argument(i, view, &region.first)).collect();
            let args = OfRowsArgs { rows, extent: p.extent as u32, extents, operands, loss };
            program.launch(Launch::new(spec.clone().kernel(), [spec.ctas(rows), 1, 1], args.bound(&spec)));
            done += u64::from(region.points(1));
        }
        if let (Some(sums), RowFunction::CrossEntropy { loss, .. }) = (sums, &p.function) {
            join(&mut program, &spec, (p.row_count(), sums), mean, loss);
        }
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let mut specs = Vec::new();
        let softmax = [Kind::Softmax, Kind::LogSoftmax, Kind::SoftmaxBackward, Kind::LogSoftmaxBackward];
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let vector = 16 / dtype.bytes() as u32;
            for kind in softmax {
                let reads = if matches!(kind, Kind::Softmax | Kind::LogSoftmax) { 1 } else { 2 };
                let elements = [(32, 4), (32, 32), (THREADS, 16), (THREADS, 0), (1, 0)].map(|(team, held)| Form::Elements { team, held });
                let rows = TEAMS.iter().flat_map(|&team| HOLDS.map(|held| (team, held))).filter(|&(team, held)| is_row(team, held, reads));
                let rows = rows.flat_map(|(team, held)| [false, true].map(|edges| Form::Rows { vector, team, held, edges }));
                let columns = COLUMN_TEAMS.map(|team| Form::Columns { vector, team });
                // Those of logarithms, of f32 and of more than 65,536 elements are compiled when they are first asked for.
                let has_clusters = matches!(kind, Kind::Softmax | Kind::SoftmaxBackward) && vector == 8;
                let clusters = CLUSTERS.into_iter().filter(|&ctas| has_clusters && ctas < 8);
                let clusters = clusters.map(|ctas| Form::Cluster { vector, team: CLUSTER_TEAMS[0], held: HELD, ctas });
                let forms = elements.into_iter().chain(rows).chain(columns).chain(clusters);
                specs.extend(forms.map(|form| Spec { types: vec![dtype; reads as usize + 1], ..Spec::plain(kind, form) }));
            }
        }
        specs.into_iter().filter(|spec| spec.target() <= target).map(Spec::kernel).collect()
    }
}

impl Rows {
    fn spec(&self, Config { form, counting }: Config) -> Spec {
        let spec = Spec::of(&self.problem, form);
        if counting { spec.counting() } else { spec }
    }

    /// Whether CTAs may count the labels by themselves: as many as one CTA of the launch in front would, rows by their own numbers.
    fn may_count(&self, form: Form) -> bool {
        let is_counted = Spec::of(&self.problem, form).number() == Some(Number::Read);
        let by_row = !matches!(form, Form::Columns { .. });
        is_counted && by_row && (1..=u64::from(losses::COUNTED_ROWS)).contains(&self.problem.row_count())
    }
}

/// Threads that may take a row.
const TEAMS: [u32; 8] = [8, 16, 32, 64, 128, 256, 512, 1024];
/// Vectors that each may hold; 0 reads a row again.
const HOLDS: [u32; 3] = [1, HELD, 0];
/// Warps that may share rows out that lie side by side.
const COLUMN_TEAMS: [u32; 2] = [1, 8];
/// Threads that take a row which is too long to be held: few where rows are many, for their sums come together sooner.
const LONG_TEAMS: [u32; 2] = [256, 1024];

/// CTAs of a cluster that takes a row, and threads of each.
const CLUSTERS: [u32; 3] = [2, 4, 8];
const CLUSTER_TEAMS: [u32; 2] = [512, 256];

/// Whether there is such a form for rows of which so many operands are read: teams of parts of a warp hold one vector, the largest ones few enough for their
/// registers.
fn is_row(team: u32, held: u32, reads: u32) -> bool {
    match held {
        0 => LONG_TEAMS.contains(&team),
        1 => team <= 32,
        _ => team >= 32 && (team < 1024 || reads == 1),
    }
}

/// Any strides: a warp takes a row of up to 1024 elements, a CTA a longer one; or a thread, where rows lie side by side and not their elements.
fn elements_of(p: &SoftmaxProblem) -> Form {
    if rows_lie_side_by_side(p) {
        return Form::Elements { team: 1, held: 0 };
    }
    let (team, held) = match p.extent {
        0..=128 => (32, 4),
        // Two rows of f64 take four registers an element.
        129..=1024 if p.compute != DType::F64 => (32, 32),
        129..=4096 => (THREADS, 16),
        _ => (THREADS, 0),
    };
    Form::Elements { team, held }
}

/// Whether the rows of the operand that is read first are nearer to each other than their elements.
fn rows_lie_side_by_side(p: &SoftmaxProblem) -> bool {
    let rank = p.rows.len();
    let strides = match &p.function {
        RowFunction::Softmax { x: main, .. }
        | RowFunction::SoftmaxBackward { y: main, .. }
        | RowFunction::CrossEntropy { logits: main, .. }
        | RowFunction::CrossEntropyBackward { logits: main, .. } => &main.strides,
    };
    rank > 0 && strides[rank - 1] < strides[rank] && p.rows[rank - 1] >= 8
}

/// The ways by vectors, the best first.
fn vectors_of(p: &SoftmaxProblem, arch: &Arch) -> Vec<Form> {
    let spec = Spec::of(p, Form::Elements { team: 1, held: 0 });
    let whole: Vec<&View> = spec.operands_of(p).enumerate().filter(|(i, _)| spec.is_whole(*i)).map(|(_, (_, view))| view).collect();
    if p.extent == 0 || p.row_count() == 0 {
        return Vec::new();
    }
    if rows_lie_side_by_side(p) {
        let views: Vec<View> = whole.iter().map(|view| across(view)).collect();
        let mut dims = p.rows.clone();
        dims.insert(dims.len() - 1, p.extent);
        let vector = strided::vector_of(&views, &dims);
        if vector < 2 {
            return Vec::new();
        }
        // Warps share rows out where threads would be too few for the chip, and elements are enough for all.
        let threads = p.row_count() / u64::from(vector);
        let shared_out = threads < 512 * u64::from(arch.sm_count) && p.extent >= 32;
        let teams = if shared_out { [COLUMN_TEAMS[1], COLUMN_TEAMS[0]] } else { COLUMN_TEAMS };
        return teams.map(|team| Form::Columns { vector, team }).to_vec();
    }
    let dims: Vec<u64> = p.rows.iter().copied().chain([p.extent]).collect();
    if whole.iter().any(|view| view.strides.last() != Some(&1)) {
        return Vec::new();
    }
    let vector = strided::vector_of(whole.iter().copied(), &dims);
    let widest = whole.iter().map(|view| view.dtype.bytes() as u32).max().unwrap_or(16);
    let full = (16 / widest).max(1);
    // With at least one whole vector, wherever the row begins.
    let has_edges = vector < full && p.extent + 1 >= u64::from(2 * full) && strided::begin_alike(whole.iter().copied(), &dims, full);
    let edges = if has_edges { rows_of(p, arch, &spec, full, true) } else { Vec::new() };
    let plain = if vector >= 2 { rows_of(p, arch, &spec, vector, false) } else { Vec::new() };
    // Half a vector still is as many bytes as a warp's accesses are quick with.
    if 2 * vector < full { [edges, plain].concat() } else { [plain, edges].concat() }
}

/// The ways by vectors along rows, the best first.
fn rows_of(p: &SoftmaxProblem, arch: &Arch, spec: &Spec, vector: u32, edges: bool) -> Vec<Form> {
    let vectors = p.extent / u64::from(vector);
    let reads = match spec.kind {
        Kind::SoftmaxBackward | Kind::LogSoftmaxBackward => 2,
        _ => 1,
    };
    // Of each number of vectors that a thread holds, the smallest team that is large enough.
    let mut held_forms = Vec::new();
    for held in [1, HELD] {
        let fits = |team: &&u32| is_row(**team, held, reads) && u64::from(**team * held) >= vectors;
        if let Some(&team) = TEAMS.iter().find(fits) {
            // A team that is mostly idle is worth nothing.
            if u64::from(team) <= (2 * vectors).max(8) {
                held_forms.push(Form::Rows { vector, team, held, edges });
            }
        }
    }
    let [few, many] = LONG_TEAMS;
    if vectors < u64::from(many) {
        return held_forms;
    }
    // Where rows are read twice, those that are on their way at a time should stay in L2 until then.
    let sms = u64::from(arch.sm_count);
    let row_bytes: u64 = (spec.operands_of(p).enumerate().filter(|(i, _)| spec.is_whole(*i)).take(reads as usize))
        .map(|(_, (_, view))| p.extent * view.dtype.bytes() as u64)
        .sum();
    let on_their_way = p.row_count().min(sms * u64::from(THREADS_OF_SM / few)) * row_bytes;
    let leaves_l2 = !is_read_once(spec.kind) && on_their_way > arch.l2_bytes / 2;
    let teams = if p.row_count() < 2 * sms || leaves_l2 { [many, few] } else { [few, many] };
    let long = teams.map(|team| Form::Rows { vector, team, held: 0, edges });
    // Of one CTA an SM, no loads run beside its sums: rows that are read once need not be held by so many threads.
    let is_alone = held_forms.iter().all(|form| matches!(form, Form::Rows { team, .. } if *team == many));
    if is_read_once(spec.kind) && is_alone {
        return [long.to_vec(), held_forms].concat();
    }
    [held_forms, clusters_of(spec, arch, vector, vectors, edges), long.to_vec()].concat()
}

/// Clusters that hold a row which a CTA does not hold with as many others beside it, most of whose threads have something of it.
fn clusters_of(spec: &Spec, arch: &Arch, vector: u32, vectors: u64, edges: bool) -> Vec<Form> {
    let is_softmax = matches!(spec.kind, Kind::Softmax | Kind::LogSoftmax | Kind::SoftmaxBackward | Kind::LogSoftmaxBackward);
    if !is_softmax || spec.double || edges || !arch.runs(Target::Sm90) {
        return Vec::new();
    }
    let of_team = |team: u32| {
        let held_by = |ctas: u32| u64::from(ctas * team * HELD);
        let ctas = CLUSTERS.into_iter().find(|&ctas| held_by(ctas) >= vectors && 2 * vectors > held_by(ctas));
        ctas.map(|ctas| Form::Cluster { vector, team, held: HELD, ctas })
    };
    CLUSTER_TEAMS.into_iter().filter_map(of_team).collect()
}

/// Whether a row that is not held is read once all the same: nothing of it is written, or its sums are known.
fn is_read_once(kind: Kind) -> bool {
    matches!(kind, Kind::CrossEntropy { .. } | Kind::CrossEntropyBackward { lse: true, .. })
}

impl Spec {
    /// What a launch from `first` on gives for operand `i`.
    fn argument(&self, i: usize, view: &View, first: &[u64]) -> OperandArgs {
        match self.form {
            Form::Rows { .. } | Form::Cluster { .. } if self.is_whole(i) => strided::lines_argument(view, first),
            Form::Columns { .. } if self.is_whole(i) => {
                let mut first = first.to_vec();
                first.insert(first.len() - 1, 0);
                strided::lines_argument(&across(view), &first)
            }
            _ => strided::argument(view, first),
        }
    }
}

/// The launches that add up the losses of rows: of many in parts, and then the parts.
fn join(program: &mut Program, spec: &Spec, (rows, [losses, weights]): (u64, [Address; 2]), mean: bool, loss: &View) {
    let bytes = u64::from(spec.bytes());
    let (mut rows, mut losses, mut weights) = (rows, losses, weights);
    if rows > PART_ROWS {
        let parts = rows.div_ceil(PART_ROWS).min(1 << 10);
        let part_rows = rows.div_ceil(parts);
        let parts = rows.div_ceil(part_rows);
        let sums = ["loss parts", "weight parts"].map(|name| program.add_scratch(name, parts * bytes));
        let part = spec.behind(Kind::Part { mean }, Vec::new());
        let args = JoinArgs { rows, part_rows, losses, weights: mean.then_some(weights), loss: sums[0], weight: mean.then_some(sums[1]) };
        program.launch(Launch::new(part.clone().kernel(), [parts as u32, 1, 1], args.bound(&part)));
        (rows, [losses, weights]) = (parts, sums);
    }
    let join = spec.behind(Kind::Join { mean }, vec![loss.dtype]);
    let args = JoinArgs { rows, part_rows: rows, losses, weights: mean.then_some(weights), loss: element(loss, []), weight: None };
    program.launch(Launch::new(join.clone().kernel(), [1; 3], args.bound(&join)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_graph::Slot;

    fn softmax(rows: u64, extent: u64, backward: bool) -> SoftmaxProblem {
        let view = |slot| View { slot: Slot(slot), dtype: DType::Bf16, offset: 0, strides: vec![extent, 1] };
        let function = match backward {
            false => RowFunction::Softmax { log: false, x: view(0), y: view(1) },
            true => RowFunction::SoftmaxBackward { log: false, y: view(0), dy: view(1), dx: view(2) },
        };
        SoftmaxProblem { rows: vec![rows], extent, compute: DType::F32, function }
    }

    /// Whatever the length, the threads of a row hold all of it, or go through it in a loop; and there is another way than one.
    #[test]
    fn teams_cover_their_rows() {
        let arch = Arch::h200();
        for (backward, most) in [(false, 32_768), (true, 16_384)] {
            for vectors in (1..=600).chain((600..20_000).step_by(97)) {
                let extent = 8 * vectors;
                let forms = vectors_of(&softmax(4096, extent, backward), &arch);
                for form in &forms {
                    if let Form::Cluster { vector: 8, team, held, ctas } = *form {
                        assert!(u64::from(ctas * team * held * 8) >= extent, "{form:?} for {extent}");
                        continue;
                    }
                    let Form::Rows { vector: 8, team, held, edges: false } = *form else { panic!("{form:?} for {extent}") };
                    assert!(held == 0 || u64::from(team * held * 8) >= extent, "{form:?} for {extent}");
                    assert!(is_row(team, held, if backward { 2 } else { 1 }), "{form:?} is in no catalog");
                }
                let is_held = matches!(forms[0], Form::Rows { held: 1.., .. });
                assert_eq!(is_held, extent <= most, "{extent}: {forms:?}");
                let has_cluster = forms.iter().any(|form| matches!(form, Form::Cluster { .. }));
                assert_eq!(has_cluster, (1025..=16_384).contains(&vectors), "{extent}: {forms:?}");
            }
        }
    }

    /// Rows of any length go by whole vectors and the elements beside them; those too short to have a vector wherever they begin do not, nor do operands
    /// that begin differently.
    #[test]
    fn rows_that_fill_no_vector_have_edges() {
        let arch = Arch::h200();
        let first = |p: &SoftmaxProblem| vectors_of(p, &arch).first().copied();
        assert_eq!(first(&softmax(16, 257, false)), Some(Form::Rows { vector: 8, team: 32, held: 1, edges: true }));
        assert_eq!(first(&softmax(16, 1002, false)), Some(Form::Rows { vector: 8, team: 32, held: 4, edges: true }));
        assert!(matches!(first(&softmax(16, 1004, false)), Some(Form::Rows { vector: 4, edges: false, .. })));
        assert!(matches!(first(&softmax(16, 15, false)), Some(Form::Rows { edges: true, .. })));
        assert_eq!(first(&softmax(16, 13, false)), None);
        let mut beside = softmax(16, 257, false);
        if let RowFunction::Softmax { x, .. } = &mut beside.function {
            x.offset = 1;
        }
        assert_eq!(first(&beside), None);
        let mut shifted = softmax(16, 1024, false);
        if let RowFunction::Softmax { x, .. } = &mut shifted.function {
            x.offset = 4;
        }
        assert!(matches!(vectors_of(&shifted, &arch)[0], Form::Rows { vector: 4, .. }));
    }

    /// Few rows of many elements are shared out among warps, many are not.
    #[test]
    fn columns_are_shared_out_where_threads_are_few() {
        let arch = Arch::h200();
        let columns = |rows: u64| {
            let view = |slot| View { slot: Slot(slot), dtype: DType::F32, offset: 0, strides: vec![1, rows] };
            let function = RowFunction::Softmax { log: false, x: view(0), y: view(1) };
            vectors_of(&SoftmaxProblem { rows: vec![rows], extent: 64, compute: DType::F32, function }, &arch)[0]
        };
        assert_eq!(columns(4096), Form::Columns { vector: 4, team: 8 });
        assert_eq!(columns(1 << 22), Form::Columns { vector: 4, team: 1 });
    }
}
