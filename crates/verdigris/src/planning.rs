//! From a graph to its plan: cut, choose a way for each problem, lay out the workspace, load the programs.
//!
//! What is chosen among ([`crate::select`]) and how ([`Mode`], [`crate::choose`]) are the caller's; this page puts the answers together.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use verdigris_cuda::SlotNeed;
use verdigris_engines::engine::{Knobs, Refusal};
use verdigris_graph::pattern::Subgraph;
use verdigris_graph::{Access, Determinism, Graph, Key, Problem, TensorDesc, Uid};

use crate::binding::Bound;
use crate::choose::{Choice, Chooser, Queue, Way, make_ready};
use crate::error::Error;
use crate::explain::{ChosenBy, Explanation};
use crate::graph_plan::{GraphPlan, Memory, Part, Rung, Source};
use crate::handle::Handle;
use crate::observe::{self, Writer};
use crate::policy::{Mode, Pin, Policy};
use crate::problem_plan::ProblemPlan;
use crate::select::{Limits, Ranked, Settings, Shortlist, Survey};

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

/// See [`Handle::plan_graph_watched`].
pub(crate) fn plan_graph(handle: &Handle, graph: &Graph, policy: &Policy, watch: &mut dyn FnMut(Progress)) -> Result<GraphPlan, Error> {
    let begun = Instant::now();
    let device = handle.watch().device();
    let planned =
        tracing::debug_span!(target: "verdigris", "plan", graph = graph.name, device).in_scope(|| plan(handle, graph, policy, watch));
    match &planned {
        Ok(_) => handle.watch().planned(begun.elapsed()),
        Err(error) => observe::failed(error, device),
    }
    planned
}

fn plan(handle: &Handle, graph: &Graph, policy: &Policy, watch: &mut dyn FnMut(Progress)) -> Result<GraphPlan, Error> {
    let graph = &under_policy(graph, policy);
    let (mut parts, temporaries) = cut(graph)?;
    let bound = Bound::new(graph, &parts, &temporaries)?;
    // What writes nothing needs no engine.
    parts.retain(|part| !part.problem.is_empty());
    let memory = Memory::of_temporaries(&parts, &temporaries)?;
    let limits = match policy.limits.workspace_bytes {
        None => policy.limits.clone(),
        Some(most) => {
            let lack =
                || Error::NoWorkspace { needed_bytes: memory.bytes(), lent_bytes: most, least_bytes: Some(memory.bytes()), account: None };
            let left = most.checked_sub(memory.bytes()).ok_or_else(lack)?;
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
            None => Arc::new(planner.choose(number, part, &mut pins, watch)?),
        };
        known.insert((key, alignments_bytes), number);
        choices.push(choice);
    }
    pins.all_used()?;

    let ladder = planner.ladder(&parts, &choices, &memory)?;
    let loose = planner.loose(&parts, &ladder[0], &memory, &bound)?;
    let kernels = ladder.iter().chain(&loose).flatten().flat_map(|way| way.program.launches().map(|launch| launch.kernel.clone()));
    let mut note = |done, total| watch(Progress { part: 0, parts: parts.len(), stage: Stage::Kernels, done, total });
    make_ready(handle, kernels, Queue::ALL, &mut note);
    assemble(handle, graph, bound, &memory, &parts, &choices, &ladder, loose.as_deref())
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

    fn shortlist(&self, part: &Subgraph) -> Shortlist {
        Shortlist::new(&part.problem, self.handle.arch(), &Limits { engine: None, ..self.limits_of(part) })
    }

    fn limits_of(&self, part: &Subgraph) -> Limits {
        Limits { alignments_bytes: self.alignments_bytes(part), ..self.limits.clone() }
    }

    fn choose(&self, number: usize, part: &Subgraph, pins: &mut Pins<'_>, watch: &mut dyn FnMut(Progress)) -> Result<Choice, Error> {
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
            let choice = Choice::new(ways, ChosenBy::Pin, survey.refusals);
            self.handle.watch().chose(&part.problem, || "pinned".to_owned(), &choice, None);
            return Ok(choice);
        }
        let tuning = if let Mode::Measured(tuning) = self.policy.mode { Some(tuning) } else { None };
        let (limits, is_repeatable) = (self.limits_of(part), self.is_repeatable());
        let chooser = Chooser { handle: self.handle, limits, tuning, remember: self.policy.remember, is_repeatable };
        let parts = self.parts;
        chooser.choose(&part.problem, &mut |stage, done, total| watch(Progress { part: number, parts, stage, done, total }))
    }

    /// Whether two executions must agree bit for bit. Then no other way may stand in for the chosen one: it would add in another order.
    fn is_repeatable(&self) -> bool {
        self.graph.determinism == Determinism::Repeatable
    }

    /// For each rung the way of each part, the chosen ones first; then, where those need scratch, ways with equal notes that need less.
    /// Of a repeatable graph, the chosen ones alone.
    fn ladder(&self, parts: &[Subgraph], choices: &[Arc<Choice>], memory: &Memory) -> Result<Vec<Vec<Ranked>>, Error> {
        let best: Vec<Ranked> = choices.iter().map(|choice| choice.way().clone()).collect();
        let scratch = |ways: &[Ranked]| -> Vec<u64> { ways.iter().map(Ranked::workspace_bytes).collect() };
        let most = scratch(&best).into_iter().max().unwrap_or(0);
        let mut rungs = vec![best];
        if most == 0 || self.is_repeatable() || matches!(self.policy.mode, Mode::Pinned(_)) {
            return Ok(rungs);
        }
        let mut others: HashMap<(Key, Vec<Option<u64>>), Shortlist> = HashMap::new();
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
                    Entry::Vacant(unknown) => unknown.insert(self.shortlist(part)),
                };
                let equal = || others.lowered(|other| *other.notes() == way.notes);
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

    /// The ways with other settings where the chosen ones rely on alignments that the graph does not declare: of the same engines, with equal
    /// notes, in no more workspace. For products and convolutions there are none: another kernel of theirs takes long to compile, and who
    /// has such addresses can declare them. Of a repeatable graph, other settings for maps alone, which give each element the same bits. `None`
    /// where nothing is different.
    fn loose(&self, parts: &[Subgraph], best: &[Ranked], memory: &Memory, bound: &Bound) -> Result<Option<Vec<Ranked>>, Error> {
        if matches!(self.policy.mode, Mode::Pinned(_)) {
            return Ok(None);
        }
        let mut ways = best.to_vec();
        let mut is_other = false;
        for (part, way) in parts.iter().zip(&mut ways) {
            let is_map = matches!(part.problem, Problem::Map(_));
            if matches!(part.problem, Problem::Gemm(_) | Problem::Conv(_)) || (self.is_repeatable() && !is_map) {
                continue;
            }
            // What an address is a multiple of in any case: its declared alignment, else the size of its elements. Temporaries lie well.
            let mut limits = Limits { engine: Some(way.engine.name.to_owned()), ..self.limits_of(part) };
            for operand in part.problem.buffers()? {
                let slot = operand.slot.0 as usize;
                if let (Some(known), Some(&uid)) = (limits.alignments_bytes.get_mut(slot), part.bindings.get(slot))
                    && memory.of(uid).is_none()
                    && bound.source_of(uid).is_some()
                {
                    *known = Some(known.unwrap_or(0).max(operand.dtype.bytes() as u64));
                }
            }
            let relies = |needed: &u64, known: &Option<u64>| known.is_some_and(|known| *needed > known);
            if !way.program.buffer_alignment_bytes.iter().zip(&limits.alignments_bytes).any(|(needed, known)| relies(needed, known)) {
                continue;
            }
            let others = Shortlist::new(&part.problem, self.handle.arch(), &limits);
            let other = others.lowered(|other| *other.notes() == way.notes).find(|other| other.workspace_bytes() <= way.workspace_bytes());
            if let Some(other) = other.cloned() {
                *way = other;
                is_other = true;
            }
        }
        Ok(is_other.then_some(ways))
    }
}

/// A rung of the ladder, its programs on the device.
struct Assembly<'a> {
    handle: &'a Handle,
    graph: &'a Graph,
    memory: &'a Memory,
    parts: &'a [Subgraph],
    /// Equal problems share their plans.
    plans: HashMap<(Key, &'static str, Knobs), Arc<ProblemPlan>>,
}

impl Assembly<'_> {
    fn rung(&mut self, bound: &Bound, ways: &[Ranked]) -> Result<Rung, Error> {
        let scratch: Vec<u64> = ways.iter().map(Ranked::workspace_bytes).collect();
        let (offsets, workspace_bytes) = self.memory.with_scratch(&scratch)?;
        let mut planned = Vec::new();
        for ((part, way), scratch) in self.parts.iter().zip(ways).zip(offsets.into_iter().zip(scratch)) {
            let identity = (Key::of(&part.problem), way.engine.name, way.knobs.clone());
            let plan = match self.plans.get(&identity) {
                Some(plan) => Arc::clone(plan),
                None => {
                    let plan = Arc::new(self.handle.load(&part.problem, way)?);
                    self.plans.insert(identity, Arc::clone(&plan));
                    plan
                }
            };
            let of = |&uid: &Uid| self.memory.of(uid).or(bound.source_of(uid));
            let slots: Vec<Source> = part.bindings.iter().map(of).collect::<Option<_>>().ok_or_else(|| {
                // Every binding is a temporary or was listed.
                verdigris_graph::Error::UnknownTensor { op: self.graph.name.clone(), uid: Uid(0) }
            })?;
            planned.push(Part { plan, slots, scratch });
        }
        Ok(Rung { parts: planned, workspace_bytes })
    }
}

/// What the programs of a rung rely on, by the place of each tensor that the caller binds.
fn reliances(rung: &Rung) -> impl Iterator<Item = (usize, SlotNeed)> {
    rung.parts.iter().flat_map(|part| {
        let slots = part.slots.iter().zip(part.plan.program().slots());
        slots.filter_map(|(source, need)| if let Source::Bound(place) = source { Some((*place, *need)) } else { None })
    })
}

#[allow(clippy::too_many_arguments, reason = "all that planning found, put together once")]
fn assemble(
    handle: &Handle,
    graph: &Graph,
    mut bound: Bound,
    memory: &Memory,
    parts: &[Subgraph],
    choices: &[Arc<Choice>],
    ladder: &[Vec<Ranked>],
    loose: Option<&[Ranked]>,
) -> Result<GraphPlan, Error> {
    let mut assembly = Assembly { handle, graph, memory, parts, plans: HashMap::new() };
    let rungs: Vec<Rung> = ladder.iter().map(|ways| assembly.rung(&bound, ways)).collect::<Result<_, _>>()?;
    for (place, need) in rungs.iter().flat_map(reliances) {
        bound.align(place, need.alignment_bytes);
        bound.reach(place, need.bytes);
    }
    let loose_rung = loose.map(|ways| assembly.rung(&bound, ways)).transpose()?;
    for (place, need) in loose_rung.iter().flat_map(reliances) {
        bound.align_least(place, need.alignment_bytes);
        bound.reach(place, need.bytes);
    }
    // Who declares an alignment is held to it, as far as it is relied on.
    let is_declared = |uid| graph.tensor(uid).is_some_and(|tensor| tensor.alignment_bytes.is_some());
    bound.align_strictly(|uid| loose_rung.is_none() || is_declared(uid));
    let other_settings = loose.into_iter().flatten().zip(&ladder[0]).filter(|(other, best)| other.knobs != best.knobs);
    let explanation = Explanation {
        graph: graph.name.clone(),
        device: handle.arch().name.clone(),
        workspace_bytes: rungs[0].workspace_bytes,
        temporaries_bytes: memory.bytes(),
        ladder_bytes: rungs.iter().map(|rung| rung.workspace_bytes).collect(),
        parts: parts.iter().zip(choices).map(|(part, choice)| choice.explain(&part.problem)).collect(),
        less_aligned: other_settings.map(|(other, _)| format!("{} {}", other.engine, other.knobs)).collect(),
    };
    let mut writers = HashMap::new();
    for (part, way) in parts.iter().zip(&ladder[0]) {
        let written = part.problem.buffers()?.into_iter().filter(|operand| operand.access == Access::Written);
        let uids = written.filter_map(|operand| part.bindings.get(operand.slot.0 as usize));
        let writer = Writer { op: part.problem.kind(), engine: way.engine.name };
        writers.extend(uids.map(|uid| (*uid, writer)));
    }
    Ok(GraphPlan {
        bound,
        rungs,
        loose: loose_rung,
        downgrades: AtomicU64::new(0),
        explanation,
        nothing: handle.nothing(),
        watch: Arc::clone(handle.watch()),
        turns: AtomicU64::new(0),
        writers,
        flops: parts.iter().map(|part| part.problem.flops()).sum(),
    })
}
