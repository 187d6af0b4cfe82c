//! The choice, on one page: every engine is asked, what the limits forbid is refused, the rest is ranked by estimated time.
//!
//! Nothing here compiles or touches a device: estimates come from [`verdigris_engines::engine::Candidate::cost`] alone. A [`Survey`] holds programs,
//! one for each way that it ranks; a `Shortlist` ranks all ways of all engines and lowers those that are taken from it, since most never are.

use std::cell::OnceCell;
use std::collections::HashSet;

use serde::Serialize;
use verdigris_engines::arch::Arch;
use verdigris_engines::engine::{Candidate, Cost, Engine, EngineId, Knobs, Notes, Reason, Refusal};
use verdigris_graph::{Determinism, Problem};
use verdigris_kir::program::Program;

/// What a caller will have.
#[derive(Clone, PartialEq, Debug)]
pub struct Limits {
    /// Most workspace.
    pub workspace_bytes: Option<u64>,
    /// This engine alone.
    pub engine: Option<String>,
    /// Which settings of each engine are ranked.
    pub settings: Settings,
    /// Whether operands may be rounded to a narrower type before they are multiplied.
    pub down_convert: bool,
    /// Whether operands may be split into parts of a narrower type.
    pub split_operands: bool,
    /// Whether sums may lose bits against their type along the way.
    pub reduced_sums: bool,
    /// Whether tensor cores may form the products.
    pub tensor_cores: bool,
    /// For each slot, what its address is a multiple of, in bytes; any, where nothing is said.
    pub alignments_bytes: Vec<Option<u64>>,
}

/// Which settings of an engine are ranked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Settings {
    /// The first that the limits allow: the engine's own choice, unless a limit forbids it.
    First,
    /// All that the limits allow.
    All,
    /// Of those allowed, all that have these values, whatever their other knobs. The whole name of a setting may be one that it had
    /// earlier.
    Matching(Knobs),
    /// The one of that name, which may be one that it had earlier.
    Named(Knobs),
}

impl Default for Limits {
    /// Everything that the problem itself allows, each engine by its own choice of knobs.
    fn default() -> Limits {
        Limits {
            workspace_bytes: None,
            engine: None,
            settings: Settings::First,
            down_convert: true,
            split_operands: true,
            reduced_sums: true,
            tensor_cores: true,
            alignments_bytes: Vec::new(),
        }
    }
}

impl Limits {
    /// Whether this engine is asked: the one that is named, by its name or an earlier one, or any where none is.
    fn name(&self, id: EngineId) -> bool {
        let is_earlier = |name| verdigris_engines::engine(name).is_some_and(|engine| engine.id() == id);
        self.engine.as_deref().is_none_or(|name| name == id.name || is_earlier(name))
    }
}

/// A way to compute a problem.
#[derive(Clone, Debug)]
pub struct Ranked {
    /// The engine.
    pub engine: EngineId,
    /// Its setting.
    pub knobs: Knobs,
    /// What the result is like.
    pub notes: Notes,
    /// Estimated time.
    pub cost: Cost,
    /// What it runs.
    pub program: Program,
}

impl Ranked {
    /// The workspace that one execution needs.
    pub fn workspace_bytes(&self) -> u64 {
        self.program.workspace().1
    }
}

/// All ways to compute a problem under some limits, the fastest by estimate first, and who refused.
#[derive(Clone, Debug)]
pub struct Survey {
    /// The ways, best first.
    pub ranked: Vec<Ranked>,
    /// One refusal for each engine of the problem's kind without a way, in the order of the engines. Engines of other kinds stand here only
    /// where nobody else was asked.
    pub refusals: Vec<Refusal>,
}

/// Asks every engine.
pub fn survey(problem: &Problem, arch: &Arch, limits: &Limits) -> Survey {
    survey_of(verdigris_engines::asked(limits.engine.as_deref()), problem, arch, limits)
}

/// Asks these engines.
pub fn survey_of<'e>(engines: impl IntoIterator<Item = &'e dyn Engine>, problem: &Problem, arch: &Arch, limits: &Limits) -> Survey {
    let mut survey = Survey { ranked: Vec::new(), refusals: Vec::new() };
    for engine in engines {
        let id = engine.id();
        if !limits.name(id) {
            continue;
        }
        let before = survey.ranked.len();
        let refused = match engine.accept(problem, arch) {
            Ok(candidate) => rank(id, &*candidate, problem, limits, &mut survey.ranked),
            Err(refusal) => Some(refusal),
        };
        if survey.ranked.len() == before {
            survey.refusals.extend(refused);
        }
    }
    survey.ranked.sort_by(|a, b| a.cost.us.total_cmp(&b.cost.us));
    let of_its_kind = |refusal: &Refusal| refusal.reason != Reason::Problem;
    if !survey.ranked.is_empty() || survey.refusals.iter().any(of_its_kind) {
        survey.refusals.retain(of_its_kind);
    }
    survey
}

/// Adds the settings that the limits allow; the first refusal of one that they do not.
fn rank(id: EngineId, candidate: &dyn Candidate, problem: &Problem, limits: &Limits, ranked: &mut Vec<Ranked>) -> Option<Refusal> {
    let mut refused = None;
    if limits.settings == Settings::First {
        match way(id, candidate, &candidate.best(), problem, limits) {
            Ok(best) => {
                ranked.push(best);
                return None;
            }
            Err(refusal) => refused = Some(refusal),
        }
    }
    let space = candidate.knobs();
    let asked = match &limits.settings {
        Settings::Matching(asked) | Settings::Named(asked) => Some(asked),
        Settings::First | Settings::All => None,
    };
    let today = asked.and_then(|asked| candidate.today(asked));
    let is_wanted = |knobs: &&Knobs| match &limits.settings {
        Settings::Matching(asked) => today.as_ref().unwrap_or(asked).iter().all(|(name, value)| knobs.value(name) == Some(value)),
        Settings::Named(_) => today.as_ref() == Some(*knobs),
        Settings::First | Settings::All => true,
    };
    let mut wanted = space.configs().iter().filter(is_wanted).peekable();
    if let (None, Some(none)) = (wanted.peek(), asked) {
        return Some(id.refusal(Reason::Knobs, format_args!("{none}; the default is {}", space.default_config())));
    }
    for knobs in wanted {
        match way(id, candidate, knobs, problem, limits) {
            Ok(way) => {
                ranked.push(way);
                if limits.settings == Settings::First {
                    break;
                }
            }
            Err(refusal) => {
                refused.get_or_insert(refusal);
            }
        }
    }
    refused
}

fn way(id: EngineId, candidate: &dyn Candidate, knobs: &Knobs, problem: &Problem, limits: &Limits) -> Result<Ranked, Refusal> {
    let notes = candidate.notes(knobs)?;
    allowed(id, &notes, problem, limits)?;
    let program = fits(id, candidate.program(knobs)?, limits)?;
    Ok(Ranked { engine: id, knobs: knobs.clone(), notes, cost: candidate.cost(knobs)?, program })
}

/// All ways to compute a problem that limits on numbers allow, the fastest by estimate first. Each is lowered when it is asked for, and held
/// against the limits on workspace and alignments then.
pub(crate) struct Shortlist {
    candidates: Vec<(EngineId, Box<dyn Candidate>)>,
    ways: Vec<Estimated>,
    limits: Limits,
}

/// A way that may not be lowered yet.
pub(crate) struct Estimated {
    candidate: usize,
    knobs: Knobs,
    notes: Notes,
    cost: Cost,
    /// `None` inside where the limits or the engine refuse it after all.
    lowered: OnceCell<Option<Ranked>>,
}

impl Shortlist {
    /// Asks every engine, or the one that `limits` name; of `limits`, `settings` are not asked.
    pub(crate) fn new(problem: &Problem, arch: &Arch, limits: &Limits) -> Shortlist {
        Shortlist::of(verdigris_engines::asked(limits.engine.as_deref()), problem, arch, limits)
    }

    fn of<'e>(engines: impl IntoIterator<Item = &'e dyn Engine>, problem: &Problem, arch: &Arch, limits: &Limits) -> Shortlist {
        let mut list = Shortlist { candidates: Vec::new(), ways: Vec::new(), limits: limits.clone() };
        for engine in engines.into_iter().filter(|engine| limits.name(engine.id())) {
            let Ok(candidate) = engine.accept(problem, arch) else { continue };
            for knobs in candidate.knobs().configs() {
                let (Ok(notes), Ok(cost)) = (candidate.notes(knobs), candidate.cost(knobs)) else { continue };
                if allowed(engine.id(), &notes, problem, limits).is_ok() {
                    let knobs = knobs.clone();
                    list.ways.push(Estimated { candidate: list.candidates.len(), knobs, notes, cost, lowered: OnceCell::new() });
                }
            }
            list.candidates.push((engine.id(), candidate));
        }
        list.ways.sort_by(|a, b| a.cost.us.total_cmp(&b.cost.us));
        list
    }

    /// The ways, best first, that `wanted` takes by what is known without a program. Each is lowered when it comes; those that the limits refuse
    /// are passed over.
    pub(crate) fn lowered<'s>(&'s self, wanted: impl Fn(&Estimated) -> bool + 's) -> impl Iterator<Item = &'s Ranked> {
        self.ways.iter().filter(move |way| wanted(way)).filter_map(|way| self.lower(way))
    }

    fn lower<'s>(&'s self, way: &'s Estimated) -> Option<&'s Ranked> {
        let lower = || {
            let (engine, candidate) = &self.candidates[way.candidate];
            let program = candidate.program(&way.knobs).and_then(|program| fits(*engine, program, &self.limits)).ok()?;
            Some(Ranked { engine: *engine, knobs: way.knobs.clone(), notes: way.notes, cost: way.cost, program })
        };
        way.lowered.get_or_init(lower).as_ref()
    }

    /// The ways with the least estimates, the best of each engine by each of its main loops, and `always`; in the order of their estimates.
    /// No other is lowered.
    pub(crate) fn candidates(&self, always: &Ranked, most: usize) -> Vec<Ranked> {
        let mut loops = HashSet::new();
        let mut taken: Vec<Ranked> = Vec::new();
        for way in &self.ways {
            let (engine, candidate) = &self.candidates[way.candidate];
            let is_always = engine.name == always.engine.name && way.knobs == always.knobs;
            let main = (way.candidate, candidate.work(&way.knobs).ok().and_then(|work| work.main).map(|main| main.kernel));
            let is_wanted = taken.len() < most || !loops.contains(&main) || is_always;
            let lowered = || if is_always { Some(always) } else { self.lower(way) };
            if let Some(lowered) = is_wanted.then(lowered).flatten() {
                loops.insert(main);
                taken.push(lowered.clone());
            }
        }
        taken
    }
}

impl Estimated {
    pub(crate) fn notes(&self) -> &Notes {
        &self.notes
    }

    pub(crate) fn us(&self) -> f64 {
        self.cost.us
    }
}

fn allowed(id: EngineId, notes: &Notes, problem: &Problem, limits: &Limits) -> Result<(), Refusal> {
    let repeatable = problem.determinism() == Determinism::Repeatable;
    id.require(!repeatable || notes.deterministic, Reason::Determinism, "sums in an order that changes from run to run")?;
    if let Some(dtype) = notes.down_convert {
        id.require(limits.down_convert, Reason::Precision, format_args!("rounds operands to {dtype}"))?;
    }
    id.require(limits.split_operands || !notes.split_operands, Reason::Precision, "splits operands into narrower parts")?;
    id.require(limits.reduced_sums || !notes.reduced_sums, Reason::Precision, "sums lose bits along the way")?;
    id.require(limits.tensor_cores || !notes.tensor_core, Reason::Precision, "multiplies on tensor cores")
}

fn fits(id: EngineId, program: Program, limits: &Limits) -> Result<Program, Refusal> {
    let needed = program.workspace().1;
    let most = limits.workspace_bytes.unwrap_or(u64::MAX);
    id.require(needed <= most, Reason::Workspace, format_args!("{needed} bytes of workspace, at most {most} are allowed"))?;
    for (slot, (needed, declared)) in program.buffer_alignment_bytes.iter().zip(&limits.alignments_bytes).enumerate() {
        let most = declared.unwrap_or(u64::MAX);
        id.require(*needed <= most, Reason::Alignment, format_args!("slot {slot} at multiples of {needed} bytes, {most} are declared"))?;
    }
    Ok(program)
}

/// A way in words and numbers, for records.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct RankedSummary {
    /// The engine.
    pub engine: &'static str,
    /// Its setting.
    pub knobs: Knobs,
    /// What the result is like.
    pub notes: Notes,
    /// Estimated microseconds.
    pub estimate_us: f64,
    /// What limits it by estimate: a pipe, a memory, latency.
    pub bound: &'static str,
    /// Workspace.
    pub workspace_bytes: u64,
    /// Kernels in the order of their launches.
    pub kernels: Vec<String>,
}

impl From<&Ranked> for RankedSummary {
    fn from(ranked: &Ranked) -> RankedSummary {
        RankedSummary {
            engine: ranked.engine.name,
            knobs: ranked.knobs.clone(),
            notes: ranked.notes,
            estimate_us: ranked.cost.us,
            bound: ranked.cost.bound.name(),
            workspace_bytes: ranked.workspace_bytes(),
            kernels: ranked.program.launches().map(|launch| launch.kernel.name().to_owned()).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_engines::cost::{Bound, Work};
    use verdigris_engines::engine::KnobSpace;
    use verdigris_graph::GemmProblem;
    use verdigris_tensor::DType;

    /// An engine whose settings 0, 1 and 2 take 3, 1 and 2 µs; setting 1 is not repeatable, setting 2 needs 1000 bytes.
    struct Three;
    struct Taken(KnobSpace);

    const ID: EngineId = EngineId { name: "test.three", number: 1 };

    impl Engine for Three {
        fn id(&self) -> EngineId {
            ID
        }
        fn version(&self) -> u32 {
            1
        }
        fn accept(&self, problem: &Problem, _: &Arch) -> Result<Box<dyn Candidate>, Refusal> {
            let Problem::Gemm(gemm) = problem else {
                return Err(ID.refusal(Reason::Problem, problem.kind()));
            };
            ID.require(gemm.k > 1, Reason::Extent, format_args!("k = {}", gemm.k))?;
            Ok(Box::new(Taken(KnobSpace::new(Knobs::new([("way", 0)]), [1, 2].map(|way| Knobs::new([("way", way)]))))))
        }
        fn catalog(&self, _: verdigris_kir::ir::Target) -> Vec<verdigris_kir::program::KernelRef> {
            Vec::new()
        }
    }

    impl Candidate for Taken {
        fn knobs(&self) -> &KnobSpace {
            &self.0
        }
        fn today(&self, knobs: &Knobs) -> Option<Knobs> {
            // Setting 2 was called 9.
            let way = knobs.value("way").map(|way| if way == 9 { 2 } else { way }).filter(|way| *way < 3)?;
            Some(Knobs::new([("way", way)]))
        }
        fn notes(&self, knobs: &Knobs) -> Result<Notes, Refusal> {
            Ok(Notes {
                tensor_core: false,
                deterministic: knobs.value("way") != Some(1),
                down_convert: None,
                accumulator: DType::F32,
                reduced_sums: false,
                split_operands: false,
            })
        }
        fn cost(&self, knobs: &Knobs) -> Result<Cost, Refusal> {
            Ok(Cost { us: [3.0, 1.0, 2.0][knobs.value("way").unwrap_or(0) as usize], bound: Bound::Latency })
        }
        fn work(&self, _: &Knobs) -> Result<Work, Refusal> {
            Ok(Work::default())
        }
        fn program(&self, knobs: &Knobs) -> Result<Program, Refusal> {
            let mut program =
                Program { buffer_alignment_bytes: vec![[16, 4, 16][knobs.value("way").unwrap_or(0) as usize]; 3], ..Program::default() };
            if knobs.value("way") == Some(2) {
                program.add_scratch("sums", 1000);
            }
            Ok(program)
        }
    }

    fn asked(change: impl FnOnce(&mut GemmProblem, &mut Limits)) -> (Vec<u32>, Vec<Reason>) {
        let mut gemm = GemmProblem::packed(8, 8, 8, DType::F32, DType::F32).expect("a plain product");
        let mut limits = Limits::default();
        change(&mut gemm, &mut limits);
        let survey = survey_of([&Three as &dyn Engine], &Problem::Gemm(gemm), &Arch::virtual_device(2), &limits);
        let ways = survey.ranked.iter().filter_map(|way| way.knobs.value("way")).collect();
        (ways, survey.refusals.iter().map(|refusal| refusal.reason).collect())
    }

    #[test]
    fn each_engine_has_its_own_choice_unless_all_are_asked_for() {
        assert_eq!(asked(|_, _| {}), (vec![0], vec![]));
        assert_eq!(asked(|_, limits| limits.settings = Settings::All), (vec![1, 2, 0], vec![]), "the fastest first");
        for of in [Settings::Matching, Settings::Named] {
            let way = |way| asked(|_, limits| limits.settings = of(Knobs::new([("way", way)])));
            assert_eq!([2, 9, 7].map(way), [(vec![2], vec![]), (vec![2], vec![]), (vec![], vec![Reason::Knobs])], "9 is an earlier name");
        }
        assert_eq!(asked(|_, limits| limits.settings = Settings::Matching(Knobs::default())).0, [1, 2, 0], "any knobs");
        assert_eq!(asked(|_, limits| limits.settings = Settings::Named(Knobs::default())), (vec![], vec![Reason::Knobs]));
    }

    #[test]
    fn engines_of_other_kinds_refuse_only_where_they_alone_are_asked() {
        let gemm = GemmProblem::packed(8, 8, 8, DType::F32, DType::F32).expect("a plain product");
        let (problem, arch) = (Problem::Gemm(gemm), Arch::h200());
        let all = survey(&problem, &arch, &Limits::default());
        assert!(!all.ranked.is_empty() && all.refusals.iter().all(|refusal| refusal.engine.name.starts_with("gemm.")), "{all}");
        let alone = survey(&problem, &arch, &Limits { engine: Some("conv.direct".to_owned()), ..Limits::default() });
        assert_eq!(alone.refusals.iter().map(|refusal| refusal.reason).collect::<Vec<_>>(), [Reason::Problem], "{alone}");
    }

    /// A problem that both of two joined algorithms take.
    fn joined() -> Problem {
        "conv fprop bf16 nhwc n=32 c=256 h=56 w=56 k=256 r=3 s=3 groups=32 pad=1".parse().expect("reads")
    }

    #[test]
    fn an_earlier_name_of_an_engine_gives_what_it_was_under_names_of_today() {
        let ways = |engine: &str, settings: Settings| {
            let limits = Limits { engine: Some(engine.to_owned()), settings, ..Limits::default() };
            let survey = survey(&joined(), &Arch::h200(), &limits);
            survey.ranked.into_iter().map(|way| (way.engine.name, way.knobs.to_string())).collect::<Vec<_>>()
        };
        let whole = ways("conv.grouped", Settings::All);
        let boxes = |way: &&(&str, String)| way.1.starts_with("box=");
        assert!(whole.iter().any(|way| boxes(&way)) && whole.iter().any(|way| !boxes(&way)), "{whole:?}");
        assert!(whole.iter().all(|(engine, _)| *engine == "conv.grouped"), "{whole:?}");
        assert_eq!(ways("conv.diagonal", Settings::All), whole.iter().filter(boxes).cloned().collect::<Vec<_>>());
        let old = Knobs::new([("tile", 0)]);
        for settings in [Settings::Matching(old.clone()), Settings::Named(old)] {
            assert_eq!(ways("conv.diagonal", settings), [("conv.grouped", "box=0".to_owned())]);
        }
        assert_eq!(ways("conv.diagonal", Settings::First).len(), 1);
        assert_eq!(ways("conv.cubic", Settings::All), []);
    }

    #[test]
    fn the_best_of_each_main_loop_is_among_the_candidates() {
        let (problem, limits) = (joined(), Limits { engine: Some("conv.grouped".to_owned()), ..Limits::default() });
        let survey = survey(&problem, &Arch::h200(), &limits);
        let taken = Shortlist::new(&problem, &Arch::h200(), &limits).candidates(&survey.ranked[0], 1);
        let names: Vec<bool> = taken.iter().map(|way| way.knobs.value("box").is_some()).collect();
        assert!(names.contains(&true) && names.contains(&false), "{names:?}");
    }

    #[test]
    fn a_shortlist_lowers_what_is_taken_from_it() {
        let gemm = GemmProblem::packed(8, 8, 8, DType::F32, DType::F32).expect("a plain product");
        let list = |limits: &Limits| Shortlist::of([&Three as &dyn Engine], &Problem::Gemm(gemm.clone()), &Arch::virtual_device(2), limits);
        let number = |ranked: &Ranked| ranked.knobs.value("way").unwrap_or(9);
        let lowered = |list: &Shortlist| list.ways.iter().filter(|way| way.lowered.get().is_some()).count();
        let all = list(&Limits::default());
        assert_eq!((all.ways.len(), lowered(&all)), (3, 0));
        assert_eq!(all.lowered(|_| true).map(number).next(), Some(1), "the fastest first");
        assert_eq!((all.lowered(|way| way.us() > 2.5).map(number).collect::<Vec<_>>(), lowered(&all)), (vec![0], 2));
        // As a survey has them, the slowest for being asked for.
        let survey = survey_of([&Three as &dyn Engine], &Problem::Gemm(gemm.clone()), &Arch::virtual_device(2), &Limits::default());
        let all = list(&Limits::default());
        assert_eq!(all.candidates(&survey.ranked[0], 1).iter().map(number).collect::<Vec<_>>(), [1, 0]);
        assert_eq!(lowered(&all), 1, "what is given is lowered already");
        assert_eq!(all.candidates(&survey.ranked[0], 3).iter().map(number).collect::<Vec<_>>(), [1, 2, 0]);
        // The way that needs workspace is found out when it is lowered, and another takes its place.
        let small = list(&Limits { workspace_bytes: Some(0), reduced_sums: false, ..Limits::default() });
        assert_eq!(small.lowered(|_| true).map(number).collect::<Vec<_>>(), [1, 0]);
    }

    #[test]
    fn limits_are_held_and_named() {
        let all = |change: fn(&mut GemmProblem, &mut Limits)| {
            asked(|gemm, limits| {
                limits.settings = Settings::All;
                change(gemm, limits);
            })
        };
        assert_eq!(all(|gemm, _| gemm.determinism = Determinism::Repeatable).0, [2, 0]);
        assert_eq!(all(|_, limits| limits.workspace_bytes = Some(1023)).0, [1, 0], "scratch is counted in whole pieces of 256 bytes");
        assert_eq!(all(|_, limits| limits.workspace_bytes = Some(1024)).0, [1, 2, 0]);
        let way_two = |limits: &mut Limits| limits.settings = Settings::Matching(Knobs::new([("way", 2)]));
        let lent_nothing = asked(|_, limits| {
            way_two(limits);
            limits.workspace_bytes = Some(0);
        });
        assert_eq!(lent_nothing, (vec![], vec![Reason::Workspace]));
        assert_eq!(all(|_, limits| limits.alignments_bytes = vec![None, Some(8)]).0, [1], "only one way can do with 8 bytes");
        assert_eq!(all(|_, limits| limits.alignments_bytes = vec![None, Some(16), Some(256)]).0, [1, 2, 0]);
        assert_eq!(asked(|_, limits| limits.alignments_bytes = vec![Some(4)]), (vec![1], vec![]), "the first setting that fits");
        assert_eq!(asked(|gemm, _| gemm.k = 1), (vec![], vec![Reason::Extent]));
        assert_eq!(asked(|_, limits| limits.engine = Some("test.other".to_owned())), (vec![], vec![]));
    }
}
