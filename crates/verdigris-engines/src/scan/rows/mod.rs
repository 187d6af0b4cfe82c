//! `scan.rows`: running sums, products and extrema along an axis ([`verdigris_graph::ScanProblem`] has the formulas).
//!
//! It takes all of them: any element types, any strides, any number of rows, rows of fewer than 2^31 elements.
//!
//! **Method.** Two ways, by how rows lie:
//!
//! | form | rows | threads |
//! |---|---|---|
//! | rows | elements lie side by side, or anywhere | a team of 4 to 256 takes a row, up to four accesses of 16 bytes a thread in a turn; elements are combined within threads, lanes and warps, and what turns come to is carried along |
//! | columns | rows lie side by side | a thread takes neighbouring rows, 16 bytes to an access, and goes along their elements; where rows are few, eight warps share their elements out |
//!
//! Both read and write each element once. Where rows are too few for the chip, each is cut into parts: one launch finds what each part comes to, one scans
//! these, and one scans the parts, so that elements are read twice.
//!
//! **When it wins.** There is no other engine for these.
//!
//! **Numbers.** In f32 (f64 where `x` is f64). Of a row of `n` elements the path from an element to a result has at most
//! `n / turn + log₂(team) + elements of a thread` steps. The order follows from extents, strides and config; results repeat bit for bit. A log-sum-exp of two
//! values is the greater one and `ln(1 + e^−d)` of their distance `d`, so that nothing overflows.
//!
//! **Source.** Blelloch, "Prefix sums and their applications", 1990; the three launches are reduce-then-scan.

mod columns;
mod spec;
mod teams;

use verdigris_graph::{Problem, ScanOp, ScanProblem, Slot, View};
use verdigris_kir::ir::Target;
use verdigris_kir::program::{Address, KernelRef, Launch, Program};
use verdigris_tensor::DType;

use crate::algorithm::Algorithm;
use crate::arch::Arch;
use crate::cost::{Stream, Traffic, Work};
use crate::engine::{EngineId, Knobs, Notes, Reason, Refusal};
use crate::fuse::strided;
use crate::layout::space::Region;

use spec::{Form, OfRowsArgs, Pass, SHARERS, Spec, across};

/// Threads that may take a row, with the vectors of each in a turn.
const TEAMS: [(u32, u32); 7] = [(4, 1), (8, 1), (16, 1), (32, 1), (32, 4), (128, 4), (256, 4)];
/// Rows lie side by side where there are so many neighbours.
const LEAST_COLUMNS: u64 = 8;
/// CTAs for each SM that parts are to make, and the fewest turns of a part.
const PARTS: [(u64, u64); 2] = [(4, 4), (8, 1)];
/// The most parts of a row, and the most rows that are cut: what parts come to stays in L2.
const MOST_PARTS: u64 = 1024;
const MOST_CUT_ROWS: u64 = 1 << 14;

/// An accepted problem.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    problem: ScanProblem,
    arch: Arch,
}

/// One way to do it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Config {
    form: Form,
    /// Into how many each row is to be cut.
    parts: u64,
}

impl Algorithm for Rows {
    const ID: EngineId = EngineId { name: "scan.rows", number: 450 };
    const VERSION: u32 = 1;
    type Config = Config;

    fn accept(problem: &Problem, arch: &Arch) -> Result<Self, Refusal> {
        let Problem::Scan(problem) = problem else {
            return Err(Self::ID.refusal(Reason::Problem, format_args!("{}, taken is scan", problem.kind())));
        };
        let extent = problem.extent;
        Self::ID.require(extent < 1 << 31, Reason::Extent, format_args!("rows of {extent} elements, taken below 2^31"))?;
        let rank = problem.rows.len();
        Self::ID.require(rank < verdigris_tensor::MAX_RANK, Reason::Extent, format_args!("{rank} dims of rows, taken are 7"))?;
        let accepted = Rows { problem: problem.clone(), arch: arch.clone() };
        let target = accepted.spec(row_form(extent, 1), false).target();
        Self::ID.require(arch.runs(target), Reason::Target, format_args!("element types that need {}", target.ptx()))?;
        Ok(accepted)
    }

    fn configs(&self) -> Vec<Config> {
        let p = &self.problem;
        let mut configs = Vec::new();
        for form in self.forms() {
            let spec = self.spec(form, false);
            let ctas = self.ctas(&spec).max(1);
            let length = p.extent / u64::from(spec.elements_together());
            let cuts = PARTS.map(|(ctas_of_sm, turns)| {
                let wanted = (ctas_of_sm * u64::from(self.arch.sm_count)) / ctas;
                wanted.min(length / (u64::from(spec.turn()) * turns)).clamp(1, MOST_PARTS)
            });
            let is_cut = p.row_count() <= MOST_CUT_ROWS && takes_parts(form);
            for parts in cuts.into_iter().filter(|_| is_cut).chain([1]) {
                let config = Config { form, parts };
                if !configs.contains(&config) {
                    configs.push(config);
                }
            }
        }
        configs
    }

    fn knobs(config: &Config) -> Knobs {
        let parts = ("parts", config.parts as u32);
        match config.form {
            Form::Rows { vector, team, held } => Knobs::new([("vector", vector), ("team", team), ("held", held), parts]),
            Form::Columns { vector, team } => Knobs::new([("rows", vector), ("team", team), parts]),
        }
    }

    fn notes(&self, _: &Config) -> Notes {
        Notes::of(self.problem.compute)
    }

    fn work(&self, config: &Config) -> Work {
        let p = &self.problem;
        let spec = self.spec(config.form, false);
        let elements = p.row_count() as f64 * p.extent as f64;
        let (reads, launches) = if config.parts > 1 { (2.0, 3.0) } else { (1.0, 1.0) };
        let of = |view: &View| view.dtype.bytes() as f64;
        let bytes = elements * (reads * of(&p.x) + of(&p.y));
        let (Form::Rows { vector, .. } | Form::Columns { vector, .. }) = config.form;
        // Combining a log-sum-exp takes some thirty instructions, anything else one or two.
        let combined = if p.f == ScanOp::LogSumExp { 30.0 } else { 2.0 };
        let steps = match config.form {
            // Five steps of the lanes for each vector, beside its own elements.
            Form::Rows { .. } => 2.0 + 7.0 / f64::from(vector),
            Form::Columns { team, .. } => {
                if team == 1 {
                    1.0
                } else {
                    3.0
                }
            }
        };
        let issued = elements / 32.0 * (steps * combined + 4.0 + 16.0 / f64::from(vector)) * (reads + 1.0) / 2.0;
        let traffic = if vector == 1 { Traffic::Transposed } else { Traffic::Lines };
        let ctas = self.ctas(&spec) as f64 * config.parts as f64;
        Work::default().beside([Stream::new(traffic, bytes).issuing(issued).of_ctas(ctas.max(1.0)).in_launches(launches)])
    }

    fn lower(&self, config: &Config) -> Result<Program, Refusal> {
        let p = &self.problem;
        let mut program = Program { buffer_alignment_bytes: vec![1; p.slots().len()], ..Program::default() };
        if p.is_empty() {
            return Ok(program);
        }
        let whole = self.spec(config.form, false);
        let length = p.extent / u64::from(whole.elements_together());
        let part = match config.parts {
            1 => length,
            parts => length.div_ceil(parts).next_multiple_of(u64::from(whole.turn())),
        };
        let parts = length.div_ceil(part);
        // At most 2^30 rows each, so that their numbers fit; the innermost dim is cut between vectors. Rows that are cut are few: one region.
        for region in Region::all(&p.rows, 1) {
            let rows = region.points(whole.rows_together());
            let mut extents = region.extents.clone();
            if let Some(inner) = extents.last_mut() {
                *inner /= whole.rows_together();
            }
            let pass = |spec: Spec, views: &[&View], carries: Option<Address>, totals: Option<Address>| {
                let args = OfRowsArgs {
                    rows,
                    extent: length as u32,
                    part: part as u32,
                    parts: parts as u32,
                    extents: extents.clone(),
                    operands: views.iter().map(|view| spec.argument(view, &region.first)).collect(),
                    carries,
                    totals,
                };
                Launch::new(spec.kernel(), [rows.div_ceil(spec.rows_of_cta()), parts as u32, 1], args.bound(&spec))
            };
            if parts == 1 {
                program.launch(pass(whole, &[&p.x, &p.y], None, None));
                continue;
            }
            let rows_in_all = region.points(1);
            let cells = u64::from(rows_in_all) * parts;
            let [totals, carries] = ["totals", "carries"].map(|name| program.add_scratch(name, cells * p.compute.bytes() as u64));
            program.launch(pass(Spec { pass: Pass::Totals { reverse: p.reverse }, ..whole }, &[&p.x], None, Some(totals)));
            program.launch(self.carries(rows_in_all, parts, [totals, carries]));
            program.launch(pass(self.spec(config.form, true), &[&p.x, &p.y], Some(carries), None));
        }
        Ok(program)
    }

    fn catalog(target: Target) -> Vec<KernelRef> {
        let ways = [(false, false), (false, true), (true, false), (true, true)];
        let scan = |(exclusive, reverse): (bool, bool)| Pass::Scan { exclusive, reverse, carried: false };
        let cut = [Pass::Totals { reverse: false }, Pass::Scan { exclusive: false, reverse: false, carried: true }];
        let kinds = [DType::F32, DType::F16, DType::Bf16].map(|dtype| (ScanOp::Add, dtype)).into_iter();
        let kinds = kinds.chain([(ScanOp::Mul, DType::F32), (ScanOp::LogSumExp, DType::F32)]);
        let mut specs = Vec::new();
        for (f, dtype) in kinds {
            let of = |rank: usize, form: Form, pass: Pass| Spec { f, double: false, types: [dtype; 2], form, pass, rank };
            let vector = 16 / dtype.bytes() as u32;
            let rows = |vector: u32| TEAMS.map(|(team, held)| Form::Rows { vector, team, held });
            let whole = if f == ScanOp::Add { &ways[..] } else { &ways[..1] };
            for form in rows(vector).into_iter().chain([1, SHARERS].map(|team| Form::Columns { vector, team })) {
                specs.extend(whole.iter().map(|&way| of(1, form, scan(way))));
                specs.extend(cut.into_iter().filter(|_| takes_parts(form)).map(|pass| of(1, form, pass)));
                // A row alone has no dim of rows.
                let alone = takes_parts(form) && matches!(form, Form::Rows { .. });
                specs.extend(cut.into_iter().filter(|_| alone).map(|pass| of(0, form, pass)));
            }
            specs.extend(rows(1).into_iter().filter(|_| f == ScanOp::Add).map(|form| of(1, form, scan(ways[0]))));
            // What the parts of rows come to.
            specs.extend(rows(1).into_iter().filter(|_| dtype == DType::F32).map(|form| of(1, form, scan(ways[2]))));
        }
        specs.into_iter().filter(|spec| spec.target() <= target).map(Spec::kernel).collect()
    }
}

/// The smallest team that takes a row of so many vectors in one turn, or the largest.
fn row_form(vectors: u64, vector: u32) -> Form {
    let fits = TEAMS.into_iter().find(|&(team, held)| u64::from(team * held) >= vectors);
    let (team, held) = fits.unwrap_or(TEAMS[TEAMS.len() - 1]);
    Form::Rows { vector, team, held }
}

/// Whether rows are long enough for such threads to be cut.
fn takes_parts(form: Form) -> bool {
    matches!(form, Form::Rows { team: 128.., .. } | Form::Columns { team: 1, .. })
}

/// Whether the rows of what is read are nearer to each other than their elements.
fn rows_lie_side_by_side(p: &ScanProblem) -> bool {
    let rank = p.rows.len();
    rank > 0 && p.x.strides[rank - 1] < p.x.strides[rank] && p.rows[rank - 1] >= LEAST_COLUMNS
}

impl Rows {
    fn spec(&self, form: Form, carried: bool) -> Spec {
        let p = &self.problem;
        let pass = Pass::Scan { exclusive: p.exclusive, reverse: p.reverse, carried };
        Spec { f: p.f, double: p.compute == DType::F64, types: [p.x.dtype, p.y.dtype], form, pass, rank: p.rows.len() }
    }

    /// CTAs of a launch over whole rows.
    fn ctas(&self, spec: &Spec) -> u64 {
        let rows = self.problem.row_count() / u64::from(spec.rows_together());
        rows.div_ceil(u64::from(spec.rows_of_cta())).max(1)
    }

    /// The ways that threads may stand, the best first.
    fn forms(&self) -> Vec<Form> {
        let p = &self.problem;
        let mut forms = Vec::new();
        if rows_lie_side_by_side(p) {
            let views = [&p.x, &p.y].map(across);
            let mut dims = p.rows.clone();
            dims.insert(dims.len() - 1, p.extent);
            let most = strided::vector_of(&views, &dims).min(8);
            for vector in [most, 1] {
                // Warps share elements out where threads would be too few for the chip, and elements are enough for all.
                let threads = p.row_count() / u64::from(vector);
                let shared_out = threads < 512 * u64::from(self.arch.sm_count) && p.extent >= u64::from(SHARERS * columns::held(vector));
                let teams = if shared_out { [SHARERS, 1] } else { [1, SHARERS] };
                forms.extend(teams.map(|team| Form::Columns { vector, team }));
            }
        } else {
            let dims: Vec<u64> = p.rows.iter().copied().chain([p.extent]).collect();
            let most = strided::vector_of([&p.x, &p.y], &dims).min(8);
            for vector in [most, 1] {
                let vectors = p.extent.div_ceil(u64::from(vector));
                let best = row_form(vectors, vector);
                forms.push(best);
                // Half as many threads a row are more rows at a time.
                if let Form::Rows { team: 256, held, .. } = best {
                    forms.push(Form::Rows { vector, team: 128, held });
                }
            }
        }
        forms.dedup();
        forms
    }

    /// The launch that scans what the parts of each row come to: each part has what stands in front of it.
    fn carries(&self, rows: u32, parts: u64, [totals, carries]: [Address; 2]) -> Launch {
        let compute = self.problem.compute;
        let spec = Spec {
            types: [compute; 2],
            form: row_form(parts, 1),
            pass: Pass::Scan { exclusive: true, reverse: false, carried: false },
            rank: 1,
            ..self.spec(row_form(parts, 1), false)
        };
        let view = View { slot: Slot(0), dtype: compute, offset: 0, strides: vec![parts, 1] };
        let args = OfRowsArgs {
            rows,
            extent: parts as u32,
            part: parts as u32,
            parts: 1,
            extents: vec![rows],
            operands: [totals, carries].map(|cells| strided::argument_at(&view, cells)).to_vec(),
            carries: None,
            totals: None,
        };
        Launch::new(spec.kernel(), [rows.div_ceil(spec.rows_of_cta()), 1, 1], args.bound(&spec))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(rows: &[u64], extent: u64, dtype: DType) -> ScanProblem {
        let dims: Vec<u64> = rows.iter().copied().chain([extent]).collect();
        let mut strides = vec![1; dims.len()];
        (0..dims.len() - 1).rev().for_each(|i| strides[i] = strides[i + 1] * dims[i + 1]);
        let view = |slot| View { slot: Slot(slot), dtype, offset: 0, strides: strides.clone() };
        let (x, y) = (view(0), view(1));
        let (exclusive, reverse, rows) = (false, false, rows.to_vec());
        ScanProblem { f: ScanOp::Add, exclusive, reverse, rows, extent, compute: DType::F32, x, y }
    }

    fn accepted(problem: ScanProblem) -> Rows {
        Rows::accept(&Problem::Scan(problem.canonical().expect("legal")), &Arch::h200()).expect("takes all")
    }

    /// A row stands in one turn of the smallest team that has room for it, and longer ones go through turns.
    #[test]
    fn teams_are_as_small_as_rows_allow() {
        for vectors in 1..3000 {
            let Form::Rows { team, held, .. } = row_form(vectors, 4) else { panic!("rows") };
            let room = u64::from(team * held);
            assert!(room >= vectors || room == 1024, "{vectors}: {team} x {held}");
            assert!(TEAMS.iter().all(|&(team, held)| u64::from(team * held) < vectors || u64::from(team * held) >= room));
        }
    }

    /// Long rows that are few fill the chip by parts, which cover each row; many rows are not cut.
    #[test]
    fn few_long_rows_are_cut_into_parts() {
        let long = accepted(scan(&[], 10_000_000, DType::F32));
        let parts = long.configs().iter().map(|config| config.parts).max();
        assert!(parts.is_some_and(|parts| (500..=MOST_PARTS).contains(&parts)), "{parts:?}");
        for config in long.configs() {
            let program = long.lower(&config).expect("lowers");
            assert_eq!(program.steps.len(), if config.parts > 1 { 3 } else { 1 }, "{config:?}");
            assert_eq!(program.scratch.len(), if config.parts > 1 { 2 } else { 0 }, "{config:?}");
        }
        let many = accepted(scan(&[1 << 20], 4096, DType::F32));
        assert!(many.configs().iter().all(|config| config.parts == 1));
    }

    /// Few columns are shared out among warps, or cut; elements that lie apart go one by one.
    #[test]
    fn columns_go_side_by_side() {
        let columns = |rows: u64| {
            let mut problem = scan(&[rows], 4096, DType::F32);
            problem.x.strides = vec![1, rows];
            problem.y.strides = vec![1, rows];
            accepted(problem).forms()
        };
        assert_eq!(columns(4096)[0], Form::Columns { vector: 4, team: SHARERS });
        assert_eq!(columns(1 << 20)[0], Form::Columns { vector: 4, team: 1 });
        assert!(matches!(columns(4)[0], Form::Rows { vector: 1, .. }));
        assert!(matches!(accepted(scan(&[9], 1001, DType::Bf16)).forms()[..], [Form::Rows { vector: 1, .. }, ..]));
    }
}
