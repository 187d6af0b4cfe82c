//! From a graph to its plan: cut, choose a way for each problem, lay out the workspace, make the kernels ready.
//!
//! What is chosen among ([`crate::select`]) and how ([`Mode`]) are the caller's; this page puts the answers together. A choice that was
//! measured before stands before an estimate, as long as the limits still allow it and its engine still has that setting.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

use verdigris_engines::engine::{Knobs, Refusal};
use verdigris_graph::pattern::Subgraph;
use verdigris_graph::{Determinism, Graph, Key, TensorDesc, Uid};
use verdigris_kir::program::KernelRef;

use crate::error::Error;
use crate::explain::{ChosenBy, Explanation, PartExplanation, RefusalSummary, WayExplanation, describe};
use crate::graph_plan::{Bound, GraphPlan, Memory, Part, Rung, Source};
use crate::handle::Handle;
use crate::plan::Plan;
use crate::plan_cache::{Answer, Found, Question};
use crate::policy::{Mode, Pin, Policy, Tuning};
use crate::select::{Limits, Ranked, RankedSummary, Settings, Survey};
use crate::tune::{Measured, measure};

/// An estimate this much above the best is taken rather than wait for a compiler.
const NEARLY: f64 = 1.3;

/// What planning is at, for those who show it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// The part that a way is chosen for, counted from 0.
    pub part: usize,
    /// How many parts there are.
    pub parts: usize,
    /// What is done.
    pub stage: Stage,
    /// How much of it is done.
    pub done: usize,
    /// How much there is.
    pub total: usize,
}

/// What planning does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// Kernels are loaded, or compiled where no compiled copy is found.
    Kernels,
    /// Candidates are run.
    Measuring,
}

/// All ways that were looked at for one problem, and the chosen one.
struct Choice {
    ways: Vec<Way>,
    chosen: usize,
    by: ChosenBy,
    refusals: Vec<Refusal>,
}

struct Way {
    ranked: Ranked,
    measured: Option<Measured>,
    trouble: Option<String>,
}

impl Way {
    fn of(ranked: Ranked) -> Way {
        Way { ranked, measured: None, trouble: None }
    }
}

impl Choice {
    fn way(&self) -> &Ranked {
        &self.ways[self.chosen].ranked
    }
}

/// See [`Handle::plan_graph_watched`].
pub(crate) fn plan_graph(handle: &Handle, graph: &Graph, policy: &Policy, watch: &mut dyn FnMut(Progress)) -> Result<GraphPlan, Error> {
    let graph = &under_policy(graph, policy);
    let (mut parts, temporaries) = cut(graph)?;
    let bound = Bound::new(graph, &parts, &temporaries)?;
    // What writes nothing needs no engine.
    parts.retain(|part| !part.problem.is_empty());
    let memory = Memory::of_temporaries(&parts, &temporaries)?;
    let limits = match policy.limits.workspace_bytes {
        None => policy.limits.clone(),
        Some(most) => {
            let left = most.checked_sub(memory.bytes()).ok_or(Error::NoWorkspace { needed_bytes: memory.bytes(), lent_bytes: most })?;
            Limits { workspace_bytes: Some(left), ..policy.limits.clone() }
        }
    };
    let planner = Planner { handle, graph, limits, policy, parts: parts.len() };
    let mut choices: Vec<Arc<Choice>> = Vec::new();
    let mut known: HashMap<(Key, Vec<Option<u64>>), usize> = HashMap::new();
    let mut pins = Pins::new(policy, parts.len())?;
    for (number, part) in parts.iter().enumerate() {
        let key = Key::of(&part.problem);
        // Equal problems are chosen for once; with pins each part is asked for itself.
        let alignments_bytes = planner.alignments_bytes(part);
        let same = known.get(&(key, alignments_bytes.clone())).copied().filter(|_| !matches!(policy.mode, Mode::Pinned(_)));
        let choice = match same {
            Some(same) => Arc::clone(&choices[same]),
            None => Arc::new(planner.choose(number, key, part, &mut pins, watch)?),
        };
        known.insert((key, alignments_bytes), number);
        choices.push(choice);
    }
    pins.all_used()?;

    let ladder = planner.ladder(&parts, &choices, &memory)?;
    let kernels = ladder.iter().flatten().flat_map(|way| way.program.launches().map(|launch| &launch.kernel));
    make_ready(handle, kernels, &mut |done, total| watch(Progress { part: 0, parts: parts.len(), stage: Stage::Kernels, done, total }));
    assemble(handle, graph, bound, &memory, &parts, &choices, &ladder)
}

/// The problems of a graph in an order in which each can run, and the tensors between them that need memory.
fn cut(graph: &Graph) -> Result<(Vec<Subgraph>, Vec<TensorDesc>), Error> {
    let partition = verdigris_graph::pattern::partition(graph)?;
    Ok((partition.parts, partition.temporaries))
}

/// The graph as the policy wants it: bits that are the same each time, where it asks for that.
fn under_policy(graph: &Graph, policy: &Policy) -> Graph {
    let mut graph = graph.clone();
    if policy.deterministic {
        graph.determinism = Determinism::Repeatable;
    }
    graph
}

/// The pins that are left.
struct Pins<'p> {
    pins: &'p [Pin],
    is_used: Vec<bool>,
    refusals: Vec<Vec<Refusal>>,
}

impl<'p> Pins<'p> {
    fn new(policy: &'p Policy, parts: usize) -> Result<Pins<'p>, Error> {
        let pins: &[Pin] = if let Mode::Pinned(pins) = &policy.mode { pins } else { &[] };
        for pin in pins {
            if verdigris_engines::engine(&pin.engine).is_none() {
                return Err(Error::unknown_engine(&pin.engine));
            }
            if pin.part.is_some_and(|part| part >= parts) {
                return Err(pin_error(pin, Vec::new()));
            }
        }
        Ok(Pins { pins, is_used: vec![false; pins.len()], refusals: vec![Vec::new(); pins.len()] })
    }

    fn all_used(&mut self) -> Result<(), Error> {
        match self.is_used.iter().position(|used| !used) {
            None => Ok(()),
            Some(i) => Err(pin_error(&self.pins[i], std::mem::take(&mut self.refusals[i]))),
        }
    }
}

fn pin_error(pin: &Pin, refusals: Vec<Refusal>) -> Error {
    Error::Pin { engine: pin.engine.clone(), knobs: pin.knobs.clone(), refusals }
}

struct Planner<'a> {
    handle: &'a Handle,
    graph: &'a Graph,
    limits: Limits,
    policy: &'a Policy,
    parts: usize,
}

impl Planner<'_> {
    /// What the graph declares of the tensors in a part's slots.
    fn alignments_bytes(&self, part: &Subgraph) -> Vec<Option<u64>> {
        part.bindings.iter().map(|&uid| self.graph.tensor(uid).and_then(|tensor| tensor.alignment_bytes)).collect()
    }

    fn survey(&self, part: &Subgraph, engine: Option<&str>, settings: Settings) -> Result<Survey, Error> {
        self.handle.survey(&part.problem, &Limits { engine: engine.map(str::to_owned), settings, ..self.limits_of(part) })
    }

    fn limits_of(&self, part: &Subgraph) -> Limits {
        Limits { alignments_bytes: self.alignments_bytes(part), ..self.limits.clone() }
    }

    fn choose(
        &self,
        number: usize,
        key: Key,
        part: &Subgraph,
        pins: &mut Pins<'_>,
        watch: &mut dyn FnMut(Progress),
    ) -> Result<Choice, Error> {
        for (i, pin) in pins.pins.iter().enumerate() {
            if pin.part.is_some_and(|wanted| wanted != number) {
                continue;
            }
            let settings = if pin.knobs == Knobs::default() { Settings::First } else { Settings::Matching(pin.knobs.clone()) };
            let survey = self.survey(part, Some(&pin.engine), settings)?;
            if survey.ranked.is_empty() {
                pins.refusals[i].extend(survey.refusals);
                continue;
            }
            pins.is_used[i] = true;
            let ways = survey.ranked.into_iter().map(Way::of).collect();
            return Ok(Choice { ways, chosen: 0, by: ChosenBy::Pin, refusals: survey.refusals });
        }
        let question = self.handle.question(key, &self.limits_of(part));
        let tuning = if let Mode::Measured(tuning) = &self.policy.mode { Some(tuning) } else { None };
        let again = tuning.is_some_and(|tuning| tuning.again);
        let survey = self.survey(part, None, Settings::First)?;
        if self.policy.remember
            && !again
            && let Some(choice) = self.remembered(part, &question, &survey)?
        {
            return Ok(choice);
        }
        if survey.ranked.is_empty() {
            return Err(Error::NoEngine(survey.refusals));
        }
        match tuning {
            None => {
                let (chosen, by) = match self.ready_instead(&survey.ranked) {
                    Some(ready) => (ready, ChosenBy::Ready),
                    None => (0, ChosenBy::Estimate),
                };
                let ways = survey.ranked.into_iter().map(Way::of).collect();
                Ok(Choice { ways, chosen, by, refusals: survey.refusals })
            }
            Some(tuning) => self.by_clock(number, part, &question, tuning, watch),
        }
    }

    /// A way whose kernels need no compiler, where the best one's do and this one's estimate is nearly as good. The best one's kernels are
    /// compiled behind, for the next plan.
    fn ready_instead(&self, ranked: &[Ranked]) -> Option<usize> {
        let is_ready = |way: &Ranked| way.program.launches().all(|launch| self.handle.loader().is_ready(&launch.kernel));
        let best = ranked.first().filter(|best| !is_ready(best))?;
        let ready = ranked.iter().position(|way| way.cost.us <= NEARLY * best.cost.us && is_ready(way))?;
        let kernels: Vec<KernelRef> = best.program.launches().map(|launch| launch.kernel.clone()).collect();
        let loader = self.handle.loader().clone();
        std::thread::spawn(move || {
            for kernel in kernels {
                // What fails is told to whoever asks for the kernel.
                let _ = loader.kernel(&kernel);
            }
        });
        Some(ready)
    }

    /// The choice that was measured before, ahead of what each engine would choose today.
    fn remembered(&self, part: &Subgraph, question: &Question, survey: &Survey) -> Result<Option<Choice>, Error> {
        // A cache that cannot be read has no answers; that it cannot is told by the handle.
        let Ok(Some((answer, found))) = self.handle.plan_cache().find(question) else { return Ok(None) };
        if verdigris_engines::engine(&answer.engine).is_none() {
            return Ok(None);
        }
        let asked = self.survey(part, Some(&answer.engine), Settings::Matching(answer.knobs.clone()))?;
        let Some(ranked) = asked.ranked.into_iter().find(|way| way.knobs == answer.knobs) else { return Ok(None) };
        let measured = Some(Measured { us: answer.us, least_us: answer.us, samples: 0 });
        let mut ways = vec![Way { measured, ..Way::of(ranked) }];
        let others = survey.ranked.iter().filter(|way| (way.engine.name, &way.knobs) != (&*answer.engine, &answer.knobs));
        ways.extend(others.cloned().map(Way::of));
        let by = if found == Found::User { ChosenBy::PlanCache } else { ChosenBy::Shipped };
        Ok(Some(Choice { ways, chosen: 0, by, refusals: survey.refusals.clone() }))
    }

    /// The fastest of the candidates, kept for later.
    fn by_clock(
        &self,
        number: usize,
        part: &Subgraph,
        question: &Question,
        tuning: &Tuning,
        watch: &mut dyn FnMut(Progress),
    ) -> Result<Choice, Error> {
        let survey = self.survey(part, None, Settings::All)?;
        let mut ways: Vec<Way> = candidates(survey.ranked, tuning.candidates).into_iter().map(Way::of).collect();
        let progress = |stage, done, total| Progress { part: number, parts: self.parts, stage, done, total };
        let kernels = ways.iter().flat_map(|way| way.ranked.program.launches().map(|launch| &launch.kernel));
        make_ready(self.handle, kernels, &mut |done, total| watch(progress(Stage::Kernels, done, total)));
        let mut plans = Vec::new();
        for way in &mut ways {
            plans.push(match self.handle.prepare(&part.problem, &way.ranked) {
                Ok(plan) => Some(plan),
                Err(error) => {
                    way.trouble = Some(error.to_string());
                    None
                }
            });
        }
        let mut note = |done, total| watch(progress(Stage::Measuring, done, total));
        match measure(self.handle, &part.problem, &plans, tuning.budget, &mut note) {
            Ok(times) => ways.iter_mut().zip(times).for_each(|(way, time)| way.measured = time),
            // No room for the operands is no reason to have no plan.
            Err(error) if error.is_lack_of_memory() => {
                ways.iter_mut().for_each(|way| way.trouble = Some(format!("not measured: {error}")));
                return Ok(Choice { ways, chosen: 0, by: ChosenBy::Estimate, refusals: survey.refusals });
            }
            Err(error) => return Err(error),
        }
        let time = |way: &Way| way.measured.map_or(f64::INFINITY, |measured| measured.us);
        let chosen = (0..ways.len()).min_by(|&a, &b| time(&ways[a]).total_cmp(&time(&ways[b]))).unwrap_or(0);
        if let Some(way) = ways.get(chosen)
            && let Some(measured) = way.measured
            && self.policy.remember
        {
            let answer = Answer { engine: way.ranked.engine.name.to_owned(), knobs: way.ranked.knobs.clone(), us: measured.us };
            self.handle.keep(question, &answer);
        }
        Ok(Choice { ways, chosen, by: ChosenBy::Clock, refusals: survey.refusals })
    }

    /// For each rung the way of each part, the chosen ones first; then, where those need scratch, ways with equal notes that need less.
    fn ladder(&self, parts: &[Subgraph], choices: &[Arc<Choice>], memory: &Memory) -> Result<Vec<Vec<Ranked>>, Error> {
        let best: Vec<Ranked> = choices.iter().map(|choice| choice.way().clone()).collect();
        let scratch = |ways: &[Ranked]| -> Vec<u64> { ways.iter().map(Ranked::workspace_bytes).collect() };
        let most = scratch(&best).into_iter().max().unwrap_or(0);
        let mut rungs = vec![best];
        if most == 0 || matches!(self.policy.mode, Mode::Pinned(_)) {
            return Ok(rungs);
        }
        let mut others: HashMap<(Key, Vec<Option<u64>>), Vec<Ranked>> = HashMap::new();
        for allowed_bytes in [most / 4, 0] {
            let last = &rungs[rungs.len() - 1];
            let mut ways = Vec::new();
            for (part, way) in parts.iter().zip(last) {
                if way.workspace_bytes() <= allowed_bytes {
                    ways.push(way.clone());
                    continue;
                }
                let others = match others.entry((Key::of(&part.problem), self.alignments_bytes(part))) {
                    Entry::Occupied(known) => known.into_mut(),
                    Entry::Vacant(unknown) => unknown.insert(self.survey(part, None, Settings::All)?.ranked),
                };
                let equal = || others.iter().filter(|other| other.notes == way.notes);
                // The fastest that fits; if none does, the smallest there is.
                let smaller = equal().find(|other| other.workspace_bytes() <= allowed_bytes).or_else(|| {
                    equal().min_by_key(|other| other.workspace_bytes()).filter(|o| o.workspace_bytes() < way.workspace_bytes())
                });
                ways.push(smaller.unwrap_or(way).clone());
            }
            if memory.with_scratch(&scratch(&ways))?.1 < memory.with_scratch(&scratch(last))?.1 {
                rungs.push(ways);
            }
        }
        Ok(rungs)
    }
}

/// The ways with the least estimates, and the best of each engine.
fn candidates(ranked: Vec<Ranked>, most: usize) -> Vec<Ranked> {
    let mut engines = HashSet::new();
    let is_first: Vec<bool> = ranked.iter().map(|way| engines.insert(way.engine.name)).collect();
    ranked
        .into_iter()
        .zip(is_first)
        .enumerate()
        .filter(|(place, (_, is_first))| *place < most || *is_first)
        .map(|(_, (way, _))| way)
        .collect()
}

/// Loads kernels, several at a time since a compilation takes a tenth of a second. What fails is told when its program is loaded.
fn make_ready<'k>(handle: &Handle, kernels: impl Iterator<Item = &'k KernelRef>, watch: &mut dyn FnMut(usize, usize)) {
    let mut names = HashSet::new();
    let kernels: Vec<&KernelRef> = kernels.filter(|kernel| names.insert(kernel.name())).collect();
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(kernels.len());
    let next = AtomicUsize::new(0);
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let (tell, next, kernels) = (tell.clone(), &next, &kernels);
            scope.spawn(move || {
                while let Some(kernel) = kernels.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let _ = handle.loader().kernel(kernel);
                    // Nobody listens any more only if the watcher panicked.
                    let _ = tell.send(());
                }
            });
        }
        drop(tell);
        for (done, ()) in told.iter().enumerate() {
            watch(done + 1, kernels.len());
        }
    });
}

fn assemble(
    handle: &Handle,
    graph: &Graph,
    mut bound: Bound,
    memory: &Memory,
    parts: &[Subgraph],
    choices: &[Arc<Choice>],
    ladder: &[Vec<Ranked>],
) -> Result<GraphPlan, Error> {
    let mut plans: HashMap<(Key, &'static str, Knobs), Arc<Plan>> = HashMap::new();
    let mut rungs = Vec::new();
    for ways in ladder {
        let scratch: Vec<u64> = ways.iter().map(Ranked::workspace_bytes).collect();
        let (offsets, workspace_bytes) = memory.with_scratch(&scratch)?;
        let mut planned = Vec::new();
        for ((part, way), scratch) in parts.iter().zip(ways).zip(offsets.into_iter().zip(scratch)) {
            let identity = (Key::of(&part.problem), way.engine.name, way.knobs.clone());
            let plan = match plans.get(&identity) {
                Some(plan) => Arc::clone(plan),
                None => {
                    let plan = Arc::new(handle.prepare(&part.problem, way)?);
                    plans.insert(identity, Arc::clone(&plan));
                    plan
                }
            };
            let slots: Vec<Source> =
                part.bindings.iter().map(|&uid| memory.of(uid).or(bound.source_of(uid))).collect::<Option<_>>().ok_or_else(|| {
                    // Every binding is a temporary or was listed.
                    verdigris_graph::Error::UnknownTensor { op: graph.name.clone(), uid: Uid(0) }
                })?;
            for (source, alignment_bytes) in slots.iter().zip(plan.executable().alignments_bytes()) {
                if let Source::Bound(place) = source {
                    bound.align(*place, alignment_bytes);
                }
            }
            planned.push(Part { plan, slots, scratch });
        }
        rungs.push(Rung { parts: planned, workspace_bytes });
    }
    let explanation = Explanation {
        graph: graph.name.clone(),
        device: handle.arch().name.clone(),
        workspace_bytes: rungs[0].workspace_bytes,
        temporaries_bytes: memory.bytes(),
        ladder_bytes: rungs.iter().map(|rung| rung.workspace_bytes).collect(),
        parts: parts.iter().zip(choices).map(|(part, choice)| explain(part, choice)).collect(),
    };
    Ok(GraphPlan { bound, rungs, downgrades: AtomicU64::new(0), explanation, nothing: handle.nothing() })
}

fn explain(part: &Subgraph, choice: &Choice) -> PartExplanation {
    let ways = choice.ways.iter().map(|way| WayExplanation {
        summary: RankedSummary::from(&way.ranked),
        measured: way.measured,
        trouble: way.trouble.clone(),
    });
    PartExplanation {
        problem: describe(&part.problem),
        key: Key::of(&part.problem),
        chosen_by: choice.by,
        chosen: choice.chosen,
        ways: ways.collect(),
        refusals: choice.refusals.iter().map(RefusalSummary::from).collect(),
    }
}
