//! Which configs of a problem are measured.

use std::collections::{BTreeMap, HashSet};

use serde::Serialize;
use verdigris::{Limits, Ranked, Settings, survey};
use verdigris_engines::arch::Arch;
use verdigris_engines::engine::{Candidate, Knobs, Refusal};
use verdigris_graph::Problem;
use verdigris_reference::data::Random;

/// A config whose estimate is this many times the least is measured only where it is sampled.
const HOPELESS: f64 = 20.0;

/// Why a config is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Why {
    /// A plan at once would take it.
    AtOnce,
    /// The least estimate of its engine by one of its main loops.
    Engine,
    /// Among the least estimates.
    Estimate,
    /// By chance.
    Sample,
}

/// A config that is measured.
#[derive(Clone, Debug)]
pub(super) struct Picked {
    pub(super) why: Why,
    pub(super) way: Ranked,
}

/// All configs of an engine.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(super) struct EngineConfigs {
    pub(super) configs: usize,
    pub(super) least_estimate_us: f64,
}

/// What is measured of a problem: first the choice at once, then engine by engine, then by estimate, then what was sampled.
#[derive(Clone, Debug)]
pub(super) struct Field {
    pub(super) picked: Vec<Picked>,
    /// All configs that the limits allow, by engine.
    pub(super) engines: BTreeMap<&'static str, EngineConfigs>,
}

impl Field {
    /// All configs that the limits allow.
    pub(super) fn configs(&self) -> usize {
        self.engines.values().map(|engine| engine.configs).sum()
    }

    /// What a plan at once takes.
    pub(super) fn at_once(&self) -> &Ranked {
        &self.picked[0].way
    }
}

/// Asks every engine under the default limits and picks `most` configs: all, where there are no more; else the choice at once, the best of
/// each engine's main loops by estimate, and of the others half by estimate and half by chance. The refusals, where no engine takes the problem.
pub(super) fn pick(problem: &Problem, arch: &Arch, most: usize, random: &mut Random) -> Result<Field, Vec<Refusal>> {
    let at_once = survey(problem, arch, &Limits::default());
    let Some(first) = at_once.ranked.into_iter().next() else { return Err(at_once.refusals) };
    let all = survey(problem, arch, &Limits { settings: Settings::All, ..Limits::default() }).ranked;
    let candidates: BTreeMap<&str, Box<dyn Candidate>> =
        (verdigris_engines::engines()).filter_map(|engine| Some((engine.id().name, engine.accept(problem, arch).ok()?))).collect();
    let main_loop = |way: &Ranked| Some(candidates.get(way.engine.name)?.work(&way.knobs).ok()?.main?.kernel);
    Ok(of(first, all, main_loop, most, random))
}

/// `main_loop` names the main loop that a config runs: an engine may have several, each with an estimate of its own.
fn of(at_once: Ranked, all: Vec<Ranked>, main_loop: impl Fn(&Ranked) -> Option<&'static str>, most: usize, random: &mut Random) -> Field {
    let mut engines: BTreeMap<&'static str, EngineConfigs> = BTreeMap::new();
    for way in &all {
        let fresh = EngineConfigs { configs: 0, least_estimate_us: way.cost.us };
        engines.entry(way.engine.name).or_insert(fresh).configs += 1;
    }
    let hopeless_us = HOPELESS * all.first().map_or(f64::INFINITY, |way| way.cost.us);
    let first: (&str, Knobs) = (at_once.engine.name, at_once.knobs.clone());
    let mut picked = vec![Picked { why: Why::AtOnce, way: at_once }];
    let others: Vec<Ranked> = all.into_iter().filter(|way| (way.engine.name, &way.knobs) != (first.0, &first.1)).collect();
    let (mut seen, mut bests, mut rest) = (HashSet::new(), Vec::new(), Vec::new());
    for way in others {
        let is_best = seen.insert((way.engine.name, main_loop(&way))) && way.cost.us <= hopeless_us;
        if is_best { bests.push(way) } else { rest.push(way) }
    }
    let takes = |why| move |way| Picked { why, way };
    picked.extend(bests.into_iter().map(takes(Why::Engine)));
    let room = most.saturating_sub(picked.len());
    if rest.len() <= room {
        picked.extend(rest.into_iter().map(takes(Why::Estimate)));
        return Field { picked, engines };
    }
    let by_estimate = rest.iter().take(room.div_ceil(2)).filter(|way| way.cost.us <= hopeless_us).count();
    let mut left = rest.split_off(by_estimate);
    picked.extend(rest.into_iter().map(takes(Why::Estimate)));
    while picked.len() < most && !left.is_empty() {
        let way = left.swap_remove(random.below(left.len() as u64) as usize);
        picked.push(Picked { why: Why::Sample, way });
    }
    Field { picked, engines }
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_graph::{ConvExtents, ConvProblem, Direction, GemmProblem};
    use verdigris_tensor::DType;

    fn names(field: &Field) -> Vec<(&'static str, String)> {
        field.picked.iter().map(|picked| (picked.way.engine.name, picked.way.knobs.to_string())).collect()
    }

    #[test]
    fn every_engine_is_measured_and_nothing_twice() {
        let problem = Problem::Gemm(GemmProblem::packed(512, 512, 512, DType::Bf16, DType::Bf16).expect("a plain product"));
        let arch = Arch::h200();
        let few = pick(&problem, &arch, 12, &mut Random::new(1)).expect("is taken");
        let unique: HashSet<_> = names(&few).into_iter().collect();
        assert_eq!((few.picked.len(), unique.len()), (12, 12), "{:?}", names(&few));
        assert_eq!(few.picked[0].why, Why::AtOnce);
        let least = few.engines.values().map(|engine| engine.least_estimate_us).fold(f64::INFINITY, f64::min);
        for (name, engine) in &few.engines {
            let is_hopeless = engine.least_estimate_us > HOPELESS * least;
            assert!(is_hopeless || few.picked.iter().any(|picked| picked.way.engine.name == *name), "{name}");
        }
        assert!(few.picked.iter().any(|picked| picked.why == Why::Sample));
        assert_eq!(names(&few), names(&pick(&problem, &arch, 12, &mut Random::new(1)).expect("is taken")));
        assert_ne!(names(&few), names(&pick(&problem, &arch, 12, &mut Random::new(2)).expect("is taken")));
        let all = pick(&problem, &arch, 10_000, &mut Random::new(1)).expect("is taken");
        assert_eq!(all.picked.len(), all.configs());
        assert!(all.picked.iter().all(|picked| picked.why != Why::Sample));
    }

    /// An engine may be several algorithms with a main loop each, as those of a grouped filter gradient are.
    #[test]
    fn every_main_loop_of_an_engine_is_measured() {
        let extents = ConvExtents {
            direction: Direction::Wgrad,
            n: 8,
            c: 32,
            k: 32,
            groups: 4,
            input: [1, 28, 28],
            filter: [1, 3, 3],
            pads: [0, 1, 1],
            strides: [1; 3],
            dilations: [1; 3],
        };
        let problem = Problem::Conv(ConvProblem::packed(extents, DType::Bf16, DType::Bf16).expect("a plain convolution"));
        let arch = Arch::h200();
        let all = survey(&problem, &arch, &Limits { settings: Settings::All, ..Limits::default() }).ranked;
        let least_us = all[0].cost.us;
        let main_loop = |way: &Ranked| {
            let engine = verdigris_engines::engine(way.engine.name).expect("is registered");
            let main = engine.accept(&problem, &arch).ok()?.work(&way.knobs).ok()?.main?;
            Some((way.engine.name, main.kernel))
        };
        let wanted: HashSet<_> = all.iter().filter(|way| way.cost.us <= HOPELESS * least_us).filter_map(main_loop).collect();
        let loops_of = |engine: &str| wanted.iter().filter(|(name, _)| *name == engine).count();
        assert!(wanted.iter().any(|(name, _)| loops_of(name) > 1), "no engine has two main loops here: {wanted:?}");
        let measured: HashSet<_> =
            pick(&problem, &arch, 12, &mut Random::new(1)).expect("is taken").picked.iter().filter_map(|one| main_loop(&one.way)).collect();
        assert!(measured.is_superset(&wanted), "{wanted:?}, of which only {measured:?} are measured");
    }
}
