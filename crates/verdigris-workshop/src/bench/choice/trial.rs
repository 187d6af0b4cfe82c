//! Configs of one problem by the clock: a brief trial of each, then the best and the choice at once in turns.
//!
//! Memory is allocated and filled once for all problems: random numbers of each type that is read, room for what is written, room for the
//! workspace. A problem's operands are parts of these, in as many sets as are together larger than twice the L2, so that an execution does
//! not find its own there; of tiny ones there are at most [`MOST_SETS`].

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rayon::prelude::*;
use verdigris::{Binding, Handle, KernelCounts, ProblemPlan};
use verdigris_cuda::{DeviceBuffer, Event, GraphExecutable, Origin};
use verdigris_graph::{Access, Problem};
use verdigris_reference::data::{self, Distribution};
use verdigris_tensor::DType;

use super::super::measure::quantile;
use super::pick::Picked;

/// Most sets of operands.
const MOST_SETS: u64 = 256;
/// Bytes of random numbers that are made on the host for a type, and repeated.
const BLOCK_BYTES: u64 = 8 << 20;
/// Most workspace that is held; configs that need more are not measured.
const MOST_WORKSPACE_BYTES: u64 = 16 << 30;
/// Every byte of an output before the choice at once runs.
const SENTINEL: u8 = 0xa5;
/// Bytes of an output that are looked at in one place, and the places.
const PROBE_BYTES: u64 = 4096;
const PROBES: u64 = 16;
/// Where more elements than this part of those looked at are still the sentinel, the output was not written: a few may be so by chance.
const UNTOUCHED: f64 = 0.01;
/// Microseconds of a brief trial's blocks, and of the blocks in turns.
const BRIEF_US: f64 = 300.0;
const BLOCK_US: f64 = 500.0;
/// Blocks of a brief trial, of which the shortest counts; the first is not counted, since it brings the graph to the device.
const BRIEF_BLOCKS: usize = 3;
/// Of a config whose second run takes this many times the best's, and so many microseconds, that run is trial enough.
const OUT: (f64, f64) = (3.0, 100.0);
/// Of a config that takes longer, single runs are blocks.
const SLOW_US: f64 = 3000.0;
/// Launches of a block at most.
const MOST_LAUNCHES: u64 = 1024;
/// Configs that are measured in turns, beside the choice at once.
const FINALISTS: usize = 4;
/// Rounds in turns: at least, and at most.
const ROUNDS: (usize, usize) = (5, 25);
/// The part of a problem's time that brief trials may take.
const TRIALS_PART: f64 = 0.7;

/// Where the operand of a slot lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Place {
    dtype: DType,
    is_read: bool,
    /// From its area's start, of the first set.
    offset: u64,
    bytes: u64,
    /// From set to set.
    stride: u64,
}

/// Where all operands of a problem lie.
struct Placement {
    /// `None` for host scalars.
    slots: Vec<Option<Place>>,
    sets: u64,
}

impl Placement {
    fn of(problem: &Problem, l2_bytes: u64) -> Result<Placement> {
        let count = problem.slots().iter().map(|slot| slot.0 as usize + 1).max().unwrap_or(0);
        let mut slots: Vec<Option<Place>> = vec![None; count];
        for operand in problem.buffers()? {
            let fresh = Place { dtype: operand.dtype, is_read: false, offset: 0, bytes: 0, stride: 0 };
            let place = slots[operand.slot.0 as usize].get_or_insert(fresh);
            place.bytes = place.bytes.max(u64::try_from(operand.span_bytes())?);
            place.is_read |= operand.access != Access::Written;
        }
        let set_bytes: u64 = slots.iter().flatten().map(|place| place.bytes).sum();
        let sets = if set_bytes > 8 * l2_bytes { 1 } else { (2 * l2_bytes / set_bytes.max(1) + 1).min(MOST_SETS) };
        let mut ends: BTreeMap<Option<&str>, u64> = BTreeMap::new();
        for place in slots.iter_mut().flatten() {
            let end = ends.entry(place.is_read.then(|| place.dtype.name())).or_default();
            place.stride = place.bytes.next_multiple_of(256);
            place.offset = *end;
            *end += place.stride * sets;
        }
        Ok(Placement { slots, sets })
    }

    /// The end of the last operand that is read as this type, or written.
    fn end(&self, read: Option<DType>) -> u64 {
        let is_of = |place: &&Place| if place.is_read { read == Some(place.dtype) } else { read.is_none() };
        self.slots.iter().flatten().filter(is_of).map(|place| place.offset + place.stride * self.sets).max().unwrap_or(0)
    }
}

/// The memory of all problems.
pub(super) struct Arena {
    reads: Vec<(DType, DeviceBuffer)>,
    writes: DeviceBuffer,
    workspace: DeviceBuffer,
    l2_bytes: u64,
}

impl Arena {
    /// As large as the largest of the problems needs, each with the most workspace that its configs need.
    pub(super) fn new<'p>(handle: &Handle, needs: impl Iterator<Item = (&'p Problem, u64)>, seed: u64) -> Result<Arena> {
        let l2_bytes = handle.arch().l2_bytes;
        let (mut reads, mut writes_bytes, mut workspace_bytes): (Vec<(DType, u64)>, u64, u64) = (Vec::new(), 0, 0);
        for (problem, workspace) in needs {
            let placement = Placement::of(problem, l2_bytes)?;
            writes_bytes = writes_bytes.max(placement.end(None));
            workspace_bytes = workspace_bytes.max(workspace.min(MOST_WORKSPACE_BYTES));
            for place in placement.slots.iter().flatten().filter(|place| place.is_read) {
                let end = placement.end(Some(place.dtype));
                match reads.iter_mut().find(|(dtype, _)| *dtype == place.dtype) {
                    Some((_, bytes)) => *bytes = end.max(*bytes),
                    None => reads.push((place.dtype, end)),
                }
            }
        }
        let (pool, stream) = (handle.pool(), handle.stream());
        let filled = reads.into_iter().map(|(dtype, bytes)| -> Result<(DType, DeviceBuffer)> {
            let elements = bytes.min(BLOCK_BYTES) / dtype.bytes() as u64;
            let block = pool.alloc_from(stream, &data::fill(dtype, Distribution::Normal, true, seed, elements.max(1)))?;
            let mut buffer = pool.alloc(stream, bytes)?;
            let mut at = 0;
            while at < bytes {
                let length = (bytes - at).min(block.len_bytes());
                buffer.copy_from(stream, at, block.slice().part(0, length)?)?;
                at += length;
            }
            Ok((dtype, buffer))
        });
        let reads = filled.collect::<Result<_>>()?;
        let arena = Arena { reads, writes: pool.alloc(stream, writes_bytes)?, workspace: pool.alloc(stream, workspace_bytes)?, l2_bytes };
        stream.synchronize()?;
        Ok(arena)
    }

    fn bindings(&self, placement: &Placement) -> Result<Vec<Vec<Binding<'_>>>> {
        let bind = |set: u64, place: &Option<Place>| -> Result<Binding<'_>> {
            let Some(place) = place else { return Ok(Binding::Scalar(1.0)) };
            let area = self.reads.iter().find(|(dtype, _)| place.is_read && *dtype == place.dtype).map_or(&self.writes, |(_, area)| area);
            Ok(Binding::Buffer(area.slice().part(place.offset + set * place.stride, place.bytes)?))
        };
        (0..placement.sets).map(|set| placement.slots.iter().map(|place| bind(set, place)).collect()).collect()
    }

    /// Whether the output of the first set was written since it was filled with the sentinel.
    fn is_written(&self, handle: &Handle, placement: &Placement) -> Result<bool> {
        let (mut seen, mut untouched) = (0_u64, 0_u64);
        for place in placement.slots.iter().flatten().filter(|place| !place.is_read) {
            let size = place.dtype.bytes() as u64;
            let most = place.bytes.saturating_sub(PROBE_BYTES) / size;
            for probe in 0..PROBES {
                let begin = most * probe / (PROBES - 1) * size;
                let mut bytes = vec![0; PROBE_BYTES.min(place.bytes) as usize];
                self.writes.download(handle.stream(), place.offset + begin, &mut bytes)?;
                seen += bytes.len() as u64 / size;
                let is_sentinel = |element: &&[u8]| element.iter().all(|byte| *byte == SENTINEL);
                untouched += bytes.chunks_exact(size as usize).filter(is_sentinel).count() as u64;
                if most == 0 {
                    break;
                }
            }
        }
        Ok(untouched as f64 <= UNTOUCHED * seen as f64)
    }
}

/// What came of a config.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Trial {
    /// Microseconds by the brief trial.
    pub(super) screen_us: Option<f64>,
    /// The median of the blocks in turns.
    pub(super) us: Option<f64>,
    /// Their interquartile range as a part of the median.
    pub(super) spread: Option<f64>,
    /// Why something is missing.
    pub(super) trouble: Option<String>,
}

/// What came of a problem.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Trials {
    /// One for each picked config.
    pub(super) of: Vec<Trial>,
    /// Sets of operands.
    pub(super) sets: u64,
    /// Whether the choice at once wrote its output; `None` where it was not run.
    pub(super) written: Option<bool>,
    /// Rounds in turns.
    pub(super) rounds: usize,
}

impl Trials {
    /// The config with the least median, by place.
    pub(super) fn best(&self) -> Option<(usize, f64)> {
        let times = self.of.iter().enumerate().filter_map(|(place, trial)| Some((place, trial.us?)));
        times.min_by(|a, b| a.1.total_cmp(&b.1))
    }
}

/// Loads the kernels of all configs that are not loaded, several at a time. What fails is told where its config is measured.
pub(super) fn load(handle: &Handle, picked: &[Picked]) -> KernelCounts {
    let loader = handle.loader();
    let mut kernels: Vec<_> = picked.iter().flat_map(|picked| picked.way.program.launches().map(|launch| &launch.kernel)).collect();
    kernels.sort_by_key(|kernel| kernel.name());
    kernels.dedup_by_key(|kernel| kernel.name());
    let origins: Vec<Origin> =
        kernels.into_par_iter().filter_map(|kernel| loader.kernel(kernel).ok()).map(|(_, report)| report.origin).collect();
    let count = |wanted| origins.iter().filter(|origin| **origin == wanted).count() as u64;
    KernelCounts { compiled: count(Origin::Compiled), from_pack: count(Origin::Pack), from_disk: count(Origin::Disk) }
}

/// A config that ran.
struct Runner {
    place: usize,
    plan: ProblemPlan,
    us: f64,
}

/// Measures the picked configs, the first of which is the choice at once, for about so long.
///
/// # Errors
/// A fault that takes the context with it, memory that cannot be had. What fails for one config alone is told with it.
pub(super) fn measure(handle: &Handle, arena: &mut Arena, problem: &Problem, picked: &[Picked], time: Duration) -> Result<Trials> {
    let begun = Instant::now();
    let placement = Placement::of(problem, arena.l2_bytes)?;
    let mut trials = Trials { of: vec![Trial::default(); picked.len()], sets: placement.sets, ..Trials::default() };
    arena.writes.fill(handle.stream(), SENTINEL)?;
    let arena = &*arena;
    let clock = Clock {
        handle,
        start: Event::timing(handle.context())?,
        end: Event::timing(handle.context())?,
        bindings: arena.bindings(&placement)?,
        arena,
    };
    let mut runners: Vec<Runner> = Vec::new();
    let mut best = f64::INFINITY;
    for (place, picked) in picked.iter().enumerate() {
        let trial = &mut trials.of[place];
        if place > 0 && begun.elapsed() > time.mul_f64(TRIALS_PART) {
            trial.trouble = Some("no time was left to measure it".to_owned());
            continue;
        }
        let needed = picked.way.workspace_bytes();
        if needed > arena.workspace.len_bytes() {
            trial.trouble = Some(format!("needs {needed} bytes of workspace, more than the {MOST_WORKSPACE_BYTES} that are held"));
            continue;
        }
        let tried = handle.load(problem, &picked.way).map_err(anyhow::Error::from).and_then(|plan| {
            let us = clock.brief(&plan, best, || {
                if place == 0 {
                    trials.written = Some(arena.is_written(handle, &placement)?);
                }
                Ok(())
            })?;
            Ok((plan, us))
        });
        match tried {
            Ok((plan, us)) => {
                trials.of[place].screen_us = Some(us);
                best = best.min(us);
                runners.push(Runner { place, plan, us });
            }
            Err(error) => {
                let words = format!("{error:#}");
                handle.stream().synchronize().with_context(|| format!("after {} {}: {words}", picked.way.engine, picked.way.knobs))?;
                trials.of[place].trouble = Some(words);
            }
        }
    }
    runners.sort_by(|a, b| a.us.total_cmp(&b.us));
    let mut rank = 0;
    runners.retain(|runner| {
        rank += 1;
        rank <= FINALISTS || runner.place == 0
    });
    let until = begun + time;
    let samples = clock.in_turns(&runners, until)?;
    for (runner, samples) in runners.iter().zip(&samples) {
        let median = quantile(samples, 0.5);
        let trial = &mut trials.of[runner.place];
        trial.us = Some(median);
        trial.spread = Some((quantile(samples, 0.75) - quantile(samples, 0.25)) / median);
        trials.rounds = samples.len();
    }
    handle.stream().synchronize()?;
    Ok(trials)
}

/// Times plans on the sets of operands.
struct Clock<'a> {
    handle: &'a Handle,
    start: Event,
    end: Event,
    bindings: Vec<Vec<Binding<'a>>>,
    arena: &'a Arena,
}

/// Launches that are timed together.
struct Block<'p> {
    plan: &'p ProblemPlan,
    launches: u64,
    /// All of them; a driver that cannot capture lets the host submit each.
    graph: Option<GraphExecutable>,
}

impl Clock<'_> {
    fn submit(&self, plan: &ProblemPlan, launches: u64) -> Result<()> {
        for launch in 0..launches {
            let set = (launch % self.bindings.len() as u64) as usize;
            plan.execute(self.handle.stream(), &self.bindings[set], self.arena.workspace.slice())?;
        }
        Ok(())
    }

    /// Microseconds of what is submitted.
    fn time(&self, submit: impl FnOnce() -> Result<()>) -> Result<f64> {
        self.start.record(self.handle.stream())?;
        submit()?;
        self.end.record(self.handle.stream())?;
        self.end.synchronize()?;
        Ok(self.end.elapsed_us_since(&self.start)?)
    }

    /// About so many microseconds of launches: whole rounds over the sets of operands, where these are fewer.
    fn block<'p>(&self, plan: &'p ProblemPlan, us: f64, wanted_us: f64) -> Block<'p> {
        let sets = self.bindings.len() as u64;
        let wanted = ((wanted_us / us) as u64).clamp(1, MOST_LAUNCHES);
        let launches = if wanted >= sets { wanted / sets * sets } else { wanted };
        let is_slow = us > SLOW_US;
        let captured = (!is_slow).then(|| self.handle.stream().capture(|| self.submit(plan, launches)));
        let graph = captured.and_then(Result::ok).and_then(|graph| graph.instantiate().ok());
        Block { plan, launches, graph }
    }

    /// Microseconds of a launch, in one block.
    fn run(&self, block: &mut Block<'_>) -> Result<f64> {
        let Block { plan, launches, graph } = block;
        let us = match graph {
            Some(graph) => self.time(|| Ok(graph.launch(self.handle.stream())?))?,
            None => self.time(|| self.submit(plan, *launches))?,
        };
        Ok(us / *launches as f64)
    }

    /// The brief trial of a plan beside the best so far; `after_first` is called when it has run once.
    fn brief(&self, plan: &ProblemPlan, best_us: f64, after_first: impl FnOnce() -> Result<()>) -> Result<f64> {
        self.submit(plan, 1)?;
        self.handle.stream().synchronize()?;
        after_first()?;
        let second_us = self.time(|| self.submit(plan, 1))?.max(0.1);
        if second_us > OUT.0 * best_us && second_us > OUT.1 {
            return Ok(second_us);
        }
        let mut block = self.block(plan, second_us, BRIEF_US);
        let mut least = if block.graph.is_some() { f64::INFINITY } else { second_us };
        for number in 0..=BRIEF_BLOCKS {
            let us = self.run(&mut block)?;
            if number > 0 {
                least = least.min(us);
            }
            if number > 0 && second_us > SLOW_US {
                break;
            }
        }
        Ok(least.max(0.001))
    }

    /// Microseconds of a launch, in blocks of all runners in turns; who begins changes from round to round.
    fn in_turns(&self, runners: &[Runner], until: Instant) -> Result<Vec<Vec<f64>>> {
        let mut blocks: Vec<Block<'_>> = runners.iter().map(|runner| self.block(&runner.plan, runner.us, BLOCK_US)).collect();
        for block in &mut blocks {
            self.run(block)?;
        }
        let mut samples = vec![Vec::new(); blocks.len()];
        for round in 0..ROUNDS.1 {
            if round >= ROUNDS.0 && Instant::now() >= until {
                break;
            }
            for turn in 0..blocks.len() {
                let side = (round + turn) % blocks.len();
                samples[side].push(self.run(&mut blocks[side])?);
            }
        }
        Ok(samples)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::choice::draw::{Kind, draw};

    #[test]
    fn operands_of_a_set_and_of_its_neighbours_lie_apart() {
        let l2_bytes = 60 << 20;
        for (kind, number) in [Kind::Product, Kind::Convolution].into_iter().flat_map(|kind| (0..40).map(move |number| (kind, number))) {
            let drawn = draw(5, kind, number);
            let placement = Placement::of(&drawn.problem, l2_bytes).expect("fits");
            let area = |place: &Place| if place.is_read { Some(place.dtype) } else { None };
            let places: Vec<Place> = placement.slots.iter().flatten().copied().collect();
            assert!(placement.sets == MOST_SETS || drawn.bytes * placement.sets >= 2 * l2_bytes, "{}", drawn.words);
            for (one, place) in places.iter().enumerate() {
                assert!(place.stride >= place.bytes && place.offset % 256 == 0 && place.stride % 256 == 0);
                let end = place.offset + place.stride * placement.sets;
                assert!(end <= placement.end(area(place)), "{}", drawn.words);
                for other in &places[one + 1..] {
                    assert!(area(other) != area(place) || other.offset >= end, "{}", drawn.words);
                }
            }
        }
    }

    #[test]
    fn the_best_has_the_least_median() {
        let trial = |us| Trial { us, screen_us: Some(0.5), ..Trial::default() };
        let trials = Trials { of: vec![trial(Some(3.0)), trial(None), trial(Some(2.0))], ..Trials::default() };
        assert_eq!(trials.best(), Some((2, 2.0)));
        assert_eq!(Trials::default().best(), None);
    }
}
