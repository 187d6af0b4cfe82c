//! The choice of a way for one problem: as it was remembered, by estimate, or by the clock.
//!
//! A choice that was measured before stands before an estimate, as long as the limits still allow it and its engine still has that version and
//! that setting; where it does not, the explanation says so. Who asks for a choice by the clock gets one of this machine: what ships with the
//! library was measured elsewhere, and is asked in its place only where the caller wants that.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use verdigris_engines::engine::Refusal;
use verdigris_graph::{Key, Problem};
use verdigris_kir::program::KernelRef;

use crate::error::Error;
use crate::explain::{ChosenBy, PartExplanation, RefusalSummary, TuningSummary, WayExplanation, describe};
use crate::handle::Handle;
use crate::plan_cache::{Answer, Found, Question, Whose};
use crate::planning::Stage;
use crate::policy::Tuning;
use crate::select::{Limits, Ranked, RankedSummary, Settings, Shortlist, Survey};
use crate::tune::{Measured, measure};

/// An estimate this much above the best is taken rather than wait for a compiler.
const NEARLY: f64 = 1.3;

/// The part of a budget after which no further kernel is begun.
const KERNELS_PART: f64 = 0.6;

/// Hears of what is done: the stage, how much of it, of how much.
pub(crate) type Watch<'w> = &'w mut dyn FnMut(Stage, usize, usize);

/// All ways that were looked at for one problem, and the chosen one.
pub(crate) struct Choice {
    pub(crate) ways: Vec<Way>,
    pub(crate) chosen: usize,
    pub(crate) by: ChosenBy,
    pub(crate) refusals: Vec<Refusal>,
    /// What a reader should know beside: a remembered choice that was passed over, or that comes from elsewhere.
    pub(crate) remarks: Vec<String>,
    pub(crate) tuning: Option<TuningSummary>,
}

pub(crate) struct Way {
    pub(crate) ranked: Ranked,
    measured: Option<Measured>,
    trouble: Option<String>,
}

impl Way {
    pub(crate) fn of(ranked: Ranked) -> Way {
        Way { ranked, measured: None, trouble: None }
    }
}

impl Choice {
    pub(crate) fn new(ways: Vec<Way>, by: ChosenBy, refusals: Vec<Refusal>) -> Choice {
        Choice { ways, chosen: 0, by, refusals, remarks: Vec::new(), tuning: None }
    }

    pub(crate) fn way(&self) -> &Ranked {
        &self.ways[self.chosen].ranked
    }

    /// The measured time of the chosen way, where there is one.
    pub(crate) fn measured_us(&self) -> Option<f64> {
        self.ways[self.chosen].measured.map(|measured| measured.us)
    }

    /// The best of the other ways, by what the choice was made by: measured times where the clock chose, else estimates. `None` where there is no other, or
    /// none that was measured.
    pub(crate) fn alternative(&self) -> Option<(&Ranked, f64)> {
        let time = |way: &Way| if self.by == ChosenBy::Clock { way.measured.map(|measured| measured.us) } else { Some(way.ranked.cost.us) };
        let others = self.ways.iter().enumerate().filter(|(place, _)| *place != self.chosen);
        let timed = others.filter_map(|(_, way)| Some((&way.ranked, time(way)?)));
        timed.min_by(|(_, a), (_, b)| a.total_cmp(b))
    }

    pub(crate) fn explain(&self, problem: &Problem) -> PartExplanation {
        let ways = self.ways.iter().map(|way| WayExplanation {
            summary: RankedSummary::from(&way.ranked),
            measured: way.measured,
            trouble: way.trouble.clone(),
        });
        PartExplanation {
            problem: describe(problem),
            key: Key::of(problem),
            chosen_by: self.by,
            chosen: self.chosen,
            ways: ways.collect(),
            refusals: self.refusals.iter().map(RefusalSummary::from).collect(),
            remarks: self.remarks.clone(),
            tuning: self.tuning,
        }
    }
}

/// What is known of a choice that was measured before.
enum Recalled {
    /// It can still be had.
    Way(Box<Way>, ChosenBy),
    /// It cannot, and why.
    PassedOver(String),
    /// There is none.
    Nothing,
}

/// Who chooses for one problem, and within what.
pub(crate) struct Chooser<'a> {
    pub(crate) handle: &'a Handle,
    pub(crate) limits: Limits,
    /// How to measure; `None` chooses at once.
    pub(crate) tuning: Option<Tuning>,
    /// Whether earlier choices are taken and new ones kept.
    pub(crate) remember: bool,
    /// Whether a later plan must give the same bits: what is ready decides nothing then.
    pub(crate) is_repeatable: bool,
}

impl Chooser<'_> {
    pub(crate) fn survey(&self, problem: &Problem, engine: Option<&str>, settings: Settings) -> Result<Survey, Error> {
        self.handle.survey(problem, &Limits { engine: engine.map(str::to_owned), settings, ..self.limits.clone() })
    }

    fn shortlist(&self, problem: &Problem) -> Shortlist {
        Shortlist::new(problem, self.handle.arch(), &Limits { engine: None, ..self.limits.clone() })
    }

    pub(crate) fn choose(&self, problem: &Problem, watch: Watch<'_>) -> Result<Choice, Error> {
        let question = self.handle.question(problem, &self.limits);
        let survey = self.survey(problem, None, Settings::First)?;
        let mut remarks = Vec::new();
        let again = self.tuning.is_some_and(|tuning| tuning.again);
        let whose = if self.tuning.is_none_or(|tuning| tuning.shipped) { Whose::UsersThenShipped } else { Whose::Users };
        let recalled = if self.remember && !again { self.recalled(problem, &question, whose, &mut remarks)? } else { Recalled::Nothing };
        let (remembered, passed_over) = match recalled {
            Recalled::Way(way, by) => (Some((*way, by)), None),
            Recalled::PassedOver(why) => {
                remarks.push(why.clone());
                (None, Some(why))
            }
            Recalled::Nothing => (None, None),
        };
        let choice = match (remembered, &self.tuning) {
            (Some((known, by)), _) => {
                let others = survey.ranked.into_iter().filter(|way| !is_same(way, &known.ranked)).map(Way::of).collect::<Vec<_>>();
                Choice::new(std::iter::once(known).chain(others).collect(), by, survey.refusals)
            }
            (None, _) if survey.ranked.is_empty() => return Err(Error::NoEngine(survey.refusals)),
            (None, None) => Choice::new(survey.ranked.into_iter().map(Way::of).collect(), ChosenBy::Estimate, survey.refusals),
            (None, Some(tuning)) => self.by_clock(problem, &question, &survey, tuning, watch)?,
        };
        let mut choice = Choice { remarks, ..choice };
        if self.tuning.is_none() && !self.is_repeatable {
            self.rather_what_is_ready(problem, &mut choice)?;
        }
        self.handle.watch().chose(problem, || question.policy.clone(), &choice, passed_over.as_deref());
        Ok(choice)
    }

    /// Takes a way whose kernels need no compiler, where the chosen one's do and this one's estimate is nearly as good: as the time that was measured
    /// of the chosen one, where it was, else as its estimate. The chosen one's kernels are compiled behind, for the next plan.
    fn rather_what_is_ready(&self, problem: &Problem, choice: &mut Choice) -> Result<(), Error> {
        let loader = self.handle.loader();
        let is_ready = |way: &Ranked| way.program.launches().all(|launch| loader.is_ready(&launch.kernel));
        let wanted = choice.way().clone();
        if is_ready(&wanted) {
            return Ok(());
        }
        let most_us = NEARLY * choice.measured_us().unwrap_or(wanted.cost.us);
        let place = match choice.ways.iter().position(|way| way.ranked.cost.us <= most_us && is_ready(&way.ranked)) {
            Some(place) => place,
            // Other settings of the engines, as a plan by the clock may have left them.
            None => match self.shortlist(problem).lowered(|way| way.us() <= most_us).find(|way| is_ready(way)) {
                Some(way) => {
                    choice.ways.push(Way::of(way.clone()));
                    choice.ways.len() - 1
                }
                None => return Ok(()),
            },
        };
        choice.remarks.push(format!("{} {} is being compiled for the next plan", wanted.engine, wanted.knobs));
        (choice.chosen, choice.by) = (place, ChosenBy::Ready);
        let kernels: Vec<KernelRef> = wanted.program.launches().map(|launch| launch.kernel.clone()).collect();
        let loader = loader.clone();
        // Without a thread, the next plan finds them no more than this one did.
        self.handle.behind(move || {
            for kernel in kernels {
                // What fails is told to whoever asks for the kernel.
                let _ = loader.kernel(&kernel);
            }
        });
        Ok(())
    }

    /// The choice that was measured before, if there is one and it can still be had.
    fn recalled(&self, problem: &Problem, question: &Question, whose: Whose, remarks: &mut Vec<String>) -> Result<Recalled, Error> {
        // A cache that cannot be read has no answers; that it cannot is told by the handle.
        let Ok(Some((answer, found))) = self.handle.plan_cache().find_of(question, whose) else {
            remarks.extend(self.handle.plan_cache().remark());
            return Ok(Recalled::Nothing);
        };
        let named = format!("{} names {} {}", found.words(), answer.engine, answer.knobs);
        let Some(engine) = verdigris_engines::engine(&answer.engine) else {
            return Ok(Recalled::PassedOver(format!("{named}, an engine that this build does not have; passed over")));
        };
        if engine.version() != answer.version {
            let (then, now) = (answer.version, engine.version());
            return Ok(Recalled::PassedOver(format!(
                "{named}, which was measured with version {then} of the engine, and this build has version {now}; passed over"
            )));
        }
        let asked = self.survey(problem, Some(&answer.engine), Settings::Named(answer.knobs.clone()))?;
        let Some(ranked) = asked.ranked.into_iter().next() else {
            let why = asked.refusals.first().map_or_else(|| "the engine no longer has this setting".to_owned(), ToString::to_string);
            return Ok(Recalled::PassedOver(format!("{named}; passed over: {why}")));
        };
        let by = match &found {
            Found::User => ChosenBy::PlanCache,
            Found::Shipped { with_another_driver } => {
                if *with_another_driver {
                    remarks.push(format!("{named}, which was measured with another driver"));
                }
                ChosenBy::Shipped
            }
        };
        let measured = Some(Measured { us: answer.us, least_us: answer.us, samples: 0 });
        Ok(Recalled::Way(Box::new(Way { measured, ..Way::of(ranked) }), by))
    }

    /// The fastest of the candidates, kept for later. The way that would be chosen at once is one of them.
    fn by_clock(
        &self,
        problem: &Problem,
        question: &Question,
        at_once: &Survey,
        tuning: &Tuning,
        watch: Watch<'_>,
    ) -> Result<Choice, Error> {
        let begun = Instant::now();
        let shortlist = self.shortlist(problem);
        let mut ways: Vec<Way> = shortlist.candidates(&at_once.ranked[0], tuning.candidates).into_iter().map(Way::of).collect();
        let instant = ways.iter().position(|way| is_same(&way.ranked, &at_once.ranked[0])).unwrap_or(0);

        // What would be chosen at once is waited for; of the rest, the promising ones come first.
        let kernels_of = |way: &'_ Way| way.ranked.program.launches().map(|launch| launch.kernel.clone()).collect::<Vec<_>>();
        let first = kernels_of(&ways[instant]);
        let order = ways.iter().flat_map(kernels_of);
        let queue = Queue { must: first.len(), until: Some(begun + tuning.budget.mul_f64(KERNELS_PART)) };
        let made =
            make_ready(self.handle, first.iter().cloned().chain(order), queue, &mut |done, total| watch(Stage::Kernels, done, total));
        let mut plans = Vec::new();
        for way in &mut ways {
            let missing = way.ranked.program.launches().find_map(|launch| match made.get(launch.kernel.name()) {
                Some(Ok(())) => None,
                Some(Err(error)) => Some(error.clone()),
                None => Some("its kernels were not compiled within the budget".to_owned()),
            });
            let plan = match missing {
                Some(trouble) => Err(trouble),
                None => self.handle.load(problem, &way.ranked).map_err(|error| error.to_string()),
            };
            match plan {
                Ok(plan) => plans.push(Some(plan)),
                Err(trouble) => {
                    way.trouble = Some(trouble);
                    plans.push(None);
                }
            }
        }
        let kernels_ms = milliseconds(begun.elapsed());

        let until = (begun + tuning.budget).max(Instant::now() + LEAST_MEASURING);
        let mut note = |done, total| watch(Stage::Measuring, done, total);
        match measure(self.handle, problem, &plans, instant, until, &mut note) {
            Ok(outcomes) => {
                for (way, outcome) in ways.iter_mut().zip(outcomes) {
                    way.measured = outcome.measured;
                    way.trouble = way.trouble.take().or(outcome.left_out.map(str::to_owned));
                }
            }
            // No room for the operands is no reason to have no plan.
            Err(error) if error.is_lack_of_memory() => {
                ways.iter_mut().for_each(|way| way.trouble = Some(format!("not measured: {error}")));
                return Ok(Choice { chosen: instant, ..Choice::new(ways, ChosenBy::Estimate, at_once.refusals.clone()) });
            }
            Err(error) => return Err(error),
        }
        let time = |way: &Way| way.measured.map_or(f64::INFINITY, |measured| measured.us);
        let chosen = (0..ways.len()).min_by(|&a, &b| time(&ways[a]).total_cmp(&time(&ways[b]))).unwrap_or(instant);
        let Some(measured) = ways[chosen].measured else {
            return Ok(Choice { chosen: instant, ..Choice::new(ways, ChosenBy::Estimate, at_once.refusals.clone()) });
        };
        if self.remember {
            let way = &ways[chosen].ranked;
            self.handle.keep(question, &Answer::of(way, measured.us));
        }
        let tuning = Some(TuningSummary { instant, kernels_ms, total_ms: milliseconds(begun.elapsed()) });
        Ok(Choice { chosen, tuning, ..Choice::new(ways, ChosenBy::Clock, at_once.refusals.clone()) })
    }
}

/// Measuring takes no less than this, however long compiling took.
const LEAST_MEASURING: Duration = Duration::from_millis(50);

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn is_same(a: &Ranked, b: &Ranked) -> bool {
    (a.engine.name, &a.knobs) == (b.engine.name, &b.knobs)
}

/// How far kernels are made ready.
#[derive(Clone, Copy)]
pub(crate) struct Queue {
    /// So many of the first are waited for.
    pub(crate) must: usize,
    /// After this no other is begun, and none waited for; `None` waits for all.
    pub(crate) until: Option<Instant>,
}

impl Queue {
    /// Waits for all.
    pub(crate) const ALL: Queue = Queue { must: 0, until: None };
}

/// Loads kernels, the first ones first, several at a time since a compilation takes a tenth of a second. Gives by name what came of each that
/// was waited for; what fails is also told when its program is loaded.
pub(crate) fn make_ready(
    handle: &Handle,
    kernels: impl Iterator<Item = KernelRef>,
    queue: Queue,
    watch: &mut dyn FnMut(usize, usize),
) -> HashMap<String, Result<(), String>> {
    let (mut seen, mut must) = (HashSet::new(), HashSet::new());
    let mut list: Vec<KernelRef> = Vec::new();
    for (place, kernel) in kernels.enumerate() {
        if place < queue.must {
            must.insert(kernel.name().to_owned());
        }
        if seen.insert(kernel.name().to_owned()) {
            list.push(kernel);
        }
    }
    if list.is_empty() {
        return HashMap::new();
    }
    let is_late = |until: Option<Instant>| until.is_some_and(|until| Instant::now() >= until);
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(list.len());
    let (list, next, must_count) = (Arc::new(list), Arc::new(AtomicUsize::new(0)), must.len());
    let (tell, told) = mpsc::channel();
    let worker = || {
        let (tell, next, list, loader, until) = (tell.clone(), Arc::clone(&next), Arc::clone(&list), handle.loader().clone(), queue.until);
        move || loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(kernel) = list.get(place).filter(|_| place < must_count || !is_late(until)) else { break };
            let made = loader.kernel(kernel).map(|(_, report)| report).map_err(|error| error.to_string());
            // Nobody listens any more once the time is up.
            let _ = tell.send((kernel.name().to_owned(), made));
        }
    };
    // Not waited for: a compilation cannot be broken off, and its kernel serves later plans.
    let started = (0..threads).take_while(|_| handle.behind(worker())).count();
    if started == 0 {
        handle.relaxed(worker());
    }
    drop(tell);
    let mut made = HashMap::new();
    loop {
        let waits = match queue.until {
            Some(until) if must.iter().all(|name| made.contains_key(name)) => Some(until.saturating_duration_since(Instant::now())),
            _ => None,
        };
        let heard = match waits {
            None => told.recv().ok(),
            Some(wait) => told.recv_timeout(wait).ok(),
        };
        let Some((name, outcome)) = heard else { break };
        if let Ok(report) = &outcome {
            handle.count(&name, report);
        }
        made.insert(name, outcome.map(|_| ()));
        watch(made.len(), list.len());
    }
    watch(list.len(), list.len());
    made
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::plan_cache::{PlanCache, line_of};
    use verdigris_cuda::fake;
    use verdigris_engines::engine::Knobs;
    use verdigris_graph::{Determinism, GemmProblem};
    use verdigris_tensor::DType;

    fn handle() -> Handle {
        Handle::on(&fake::context(), &Config::default()).expect("the fake is always there")
    }

    fn problem() -> Problem {
        Problem::Gemm(GemmProblem::packed(96, 96, 64, DType::F32, DType::F32).expect("a plain product"))
    }

    fn load(handle: &Handle, problem: &Problem, way: &Ranked) {
        handle.load(problem, way).expect("the fake compiles everything");
    }

    #[test]
    fn a_remembered_setting_that_is_gone_is_passed_over_and_told() {
        let handle = handle();
        let limits = Limits::default();
        let at_once = handle.choose(&problem(), &limits).expect("chooses");
        assert_eq!((at_once.explanation.chosen_by, at_once.explanation.remarks.len()), (ChosenBy::Estimate, 0));
        let question = handle.question(&problem(), &limits);
        let version = Answer::of(&at_once.way, 1.0).version;
        let remembered_of = |version: u32, engine: &str, knobs: Knobs| {
            handle.plan_cache().keep(&question, &Answer { engine: engine.to_owned(), version, knobs, us: 1.0 }).expect("in memory");
            let chosen = handle.choose(&problem(), &limits).expect("chooses").explanation;
            (chosen.chosen_by, chosen.remarks.join("; "))
        };
        let remembered = |engine: &str, knobs: Knobs| remembered_of(version, engine, knobs);
        let (by, remark) = remembered_of(version + 1, at_once.way.engine.name, at_once.way.knobs.clone());
        assert_eq!(by, ChosenBy::Estimate);
        let told = format!("measured with version {} of the engine, and this build has version {version}", version + 1);
        assert!(remark.contains(&told), "{remark}");
        let gone = Knobs::new([("tile", 4321)]);
        let (by, remark) = remembered(at_once.way.engine.name, gone);
        assert_eq!(by, ChosenBy::Estimate);
        assert!(remark.contains("the plan cache names") && remark.contains("tile=4321") && remark.contains("passed over"), "{remark}");
        let (by, remark) = remembered("gemm.magic", Knobs::default());
        assert_eq!(by, ChosenBy::Estimate);
        assert!(remark.contains("gemm.magic") && remark.contains("an engine that this build does not have"), "{remark}");
        let (by, remark) = remembered(at_once.way.engine.name, at_once.way.knobs.clone());
        assert_eq!((by, remark.as_str()), (ChosenBy::PlanCache, ""));
    }

    #[test]
    fn a_choice_under_earlier_names_of_engine_and_setting_is_taken() {
        let handle = handle();
        let problem: Problem = "conv fprop bf16 nhwc n=64 c=256 h=28 w=28 k=256 r=3 s=3 groups=32 pad=1".parse().expect("reads");
        let (question, old) = (handle.question(&problem, &Limits::default()), Knobs::new([("tile", 1)]));
        let answer = Answer { engine: "conv.diagonal".to_owned(), version: 1, knobs: old, us: 1.0 };
        handle.plan_cache().keep(&question, &answer).expect("in memory");
        let chosen = handle.choose(&problem, &Limits::default()).expect("chooses");
        assert_eq!((chosen.way.engine.name, chosen.way.knobs.to_string().as_str()), ("conv.grouped", "box=1"));
        assert_eq!((chosen.explanation.chosen_by, chosen.explanation.remarks.len()), (ChosenBy::PlanCache, 0), "{}", chosen.explanation);
    }

    #[test]
    fn the_users_choice_stands_before_what_ships_and_that_before_the_estimate() {
        let mut handle = handle();
        let limits = Limits::default();
        let survey = handle.survey(&problem(), &Limits { settings: Settings::All, ..Limits::default() }).expect("asks");
        let (users, ships) = (&survey.ranked[1], &survey.ranked[2]);
        let of = |way: &Ranked| Answer::of(way, 1.0);
        let question = handle.question(&problem(), &limits);
        let mut fields = question.fields();
        (fields[2], fields[3]) = ("another".to_owned(), "*".to_owned());
        handle.plans = PlanCache::with_shipped(None, line_of(&fields, &of(ships))).expect("opens");
        // All are loaded, so that what is ready does not decide.
        [users, ships, &survey.ranked[0]].into_iter().for_each(|way| load(&handle, &problem(), way));
        let chosen = handle.choose(&problem(), &limits).expect("chooses");
        assert!(is_same(&chosen.way, ships) && chosen.explanation.chosen_by == ChosenBy::Shipped, "{}", chosen.explanation);
        let remark = chosen.explanation.remarks.join("");
        assert!(remark.contains("the set that ships") && remark.contains("another driver"), "{remark}");
        // Limits that the way does not keep.
        let strict = Limits { workspace_bytes: Some(0), alignments_bytes: vec![Some(4); 3], tensor_cores: false, ..Limits::default() };
        let other = handle.choose(&problem(), &strict).expect("chooses");
        assert!(other.way.workspace_bytes() == 0 && !other.way.notes.tensor_core, "{}", other.explanation);
        // By the clock is by this machine's clock, unless the caller takes what ships.
        let tuned = |tuning: Tuning| handle.tune(&problem(), &limits, &tuning, &mut |_, _, _| {}).expect("chooses");
        let lenient = tuned(Tuning { shipped: true, ..Tuning::default() });
        assert!(is_same(&lenient.way, ships) && lenient.explanation.chosen_by == ChosenBy::Shipped, "{}", lenient.explanation);
        let measured = tuned(Tuning { budget: Duration::ZERO, ..Tuning::default() });
        assert_eq!(measured.explanation.chosen_by, ChosenBy::Clock, "{}", measured.explanation);
        handle.keep(&question, &of(users));
        let chosen = handle.choose(&problem(), &limits).expect("chooses");
        assert!(is_same(&chosen.way, users) && chosen.explanation.chosen_by == ChosenBy::PlanCache, "{}", chosen.explanation);
        // The set may be left out altogether.
        handle.plans = PlanCache::without_shipped(None).expect("opens");
        let chosen = handle.choose(&problem(), &limits).expect("chooses");
        assert!(matches!(chosen.explanation.chosen_by, ChosenBy::Estimate | ChosenBy::Ready), "{}", chosen.explanation);
    }

    #[test]
    fn another_setting_of_the_same_engine_may_be_the_one_that_is_ready() {
        let all =
            |problem: &Problem| handle().survey(problem, &Limits { settings: Settings::All, ..Limits::default() }).expect("asks").ranked;
        // Estimates move, so that the first of several products with such settings is taken.
        let sizes = [512, 1024, 2048, 4096].map(|size| (size, size, size));
        let (problem, best, other) = (sizes.into_iter())
            .find_map(|(m, n, k)| {
                let problem = Problem::Gemm(GemmProblem::packed(m, n, k, DType::Bf16, DType::Bf16).expect("a plain product"));
                let best = handle().choose(&problem, &Limits::default()).expect("chooses").way;
                let near = |way: &Ranked| {
                    way.cost.us <= NEARLY * best.cost.us && way.engine.name == best.engine.name && kernels(way) != kernels(&best)
                };
                let other = all(&problem).into_iter().find(near)?;
                Some((problem, best, other))
            })
            .expect("a product with two settings of nearly the same estimate");
        let cold = handle();
        load(&cold, &problem, &other);
        let chosen = cold.choose(&problem, &Limits::default()).expect("chooses");
        assert_eq!(chosen.explanation.chosen_by, ChosenBy::Ready, "{}", chosen.explanation);
        assert!(chosen.way.cost.us <= NEARLY * best.cost.us && kernels(&chosen.way) == kernels(&other), "{}", chosen.explanation);
        assert!(chosen.explanation.remarks[0].contains("is being compiled for the next plan"));
        // The remembered one waits for no compiler either, where what was measured of it is no better than the other one's estimate.
        let remembered = |us: f64| {
            let warm = handle();
            warm.keep(&warm.question(&problem, &Limits::default()), &Answer::of(&best, us));
            load(&warm, &problem, &other);
            warm.choose(&problem, &Limits::default()).expect("chooses")
        };
        assert_eq!(remembered(best.cost.us).explanation.chosen_by, ChosenBy::Ready);
        let faster = remembered(best.cost.us / 4.0);
        assert_eq!(faster.explanation.chosen_by, ChosenBy::PlanCache, "{}", faster.explanation);
        assert!(is_same(&faster.way, &best));
        // Who wants the same bits each time gets the same way, whatever is ready.
        let Problem::Gemm(product) = &problem else { panic!("a product") };
        let repeatable = Problem::Gemm(GemmProblem { determinism: Determinism::Repeatable, ..product.clone() });
        let best = handle().choose(&repeatable, &Limits::default()).expect("chooses").way;
        let others = handle().survey(&repeatable, &Limits { settings: Settings::All, ..Limits::default() }).expect("asks").ranked;
        let cold = handle();
        others.iter().filter(|way| kernels(way) != kernels(&best)).take(8).for_each(|way| load(&cold, &repeatable, way));
        let chosen = cold.choose(&repeatable, &Limits::default()).expect("chooses");
        assert!(is_same(&chosen.way, &best) && chosen.explanation.chosen_by == ChosenBy::Estimate, "{}", chosen.explanation);
    }

    #[test]
    fn a_system_out_of_threads_compiles_on_this_one() {
        let mut handle = handle();
        // No such stack can be had.
        handle.stack_bytes = Some(1 << 60);
        assert!(!handle.behind(|| panic!("there is no thread")));
        let way = handle.choose(&problem(), &Limits::default()).expect("chooses").way;
        let launches: Vec<KernelRef> = way.program.launches().map(|launch| launch.kernel.clone()).collect();
        let mut heard = (0, 0);
        let made = make_ready(&handle, launches.iter().cloned(), Queue::ALL, &mut |done, total| heard = (done, total));
        assert!(launches.iter().all(|kernel| made.get(kernel.name()) == Some(&Ok(())) && handle.loader().is_ready(kernel)), "{made:?}");
        assert_eq!(heard, (made.len(), made.len()));
    }

    fn kernels(way: &Ranked) -> Vec<String> {
        way.program.launches().map(|launch| launch.kernel.name().to_owned()).collect()
    }

    #[test]
    fn what_is_measured_holds_what_would_be_chosen_at_once_and_keeps_to_its_budget() {
        let handle = handle();
        let at_once = handle.choose(&problem(), &Limits::default()).expect("chooses").way;
        // No time at all: the choice at once is compiled and measured all the same, and nothing else is.
        let tuning = Tuning { candidates: 8, budget: Duration::ZERO, ..Tuning::default() };
        let hurried = handle.tune(&problem(), &Limits::default(), &tuning, &mut |_, _, _| {}).expect("chooses");
        let summary = hurried.explanation.tuning.expect("was measured");
        // One of the same kernels with another argument needs no compiler, and may be the quicker one.
        assert!(kernels(&hurried.way).iter().all(|kernel| kernels(&at_once).contains(kernel)), "{}", hurried.explanation);
        assert!(hurried.explanation.ways[summary.instant].measured.is_some(), "{}", hurried.explanation);
        let measured = hurried.explanation.ways.iter().filter(|way| way.measured.is_some()).count();
        let told =
            hurried.explanation.ways.iter().filter(|way| way.trouble.as_ref().is_some_and(|text| text.contains("within the budget")));
        assert!(measured >= 1 && told.count() > 0, "{}", hurried.explanation);
        // What was found is taken from now on, unless it is asked for again, with time.
        let again = handle.tune(&problem(), &Limits::default(), &tuning, &mut |_, _, _| {}).expect("chooses");
        assert_eq!(again.explanation.chosen_by, ChosenBy::PlanCache);
        let tuning = Tuning { candidates: 8, budget: Duration::from_secs(20), again: true, ..Tuning::default() };
        let mut heard = Vec::new();
        let full = handle.tune(&problem(), &Limits::default(), &tuning, &mut |stage, done, total| heard.push((stage, done, total)));
        let full = full.expect("chooses").explanation;
        assert_eq!(full.chosen_by, ChosenBy::Clock);
        assert!(full.ways.len() >= 2 && full.ways.iter().all(|way| way.measured.is_some() != way.trouble.is_some()), "{full}");
        let us = |place: usize| full.ways[place].measured.map_or(f64::INFINITY, |measured| measured.us);
        assert!(us(full.chosen) <= us(full.tuning.expect("was measured").instant));
        for stage in [Stage::Kernels, Stage::Measuring] {
            assert!(heard.iter().rfind(|(known, ..)| *known == stage).is_some_and(|(_, done, total)| done == total && *total > 0));
        }
    }
}
