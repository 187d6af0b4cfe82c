//! One device, as those see it who operate it: samples on their way, memory, choices.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use metrics::{counter, gauge, histogram};
use serde::Serialize;
use verdigris_cuda::{CaptureStatus, Context, Event, LoadReport, Origin, Pool, Stream};
use verdigris_engines::engine::Knobs;
use verdigris_graph::{Key, Problem};

use super::{Budget, DEVICE_TARGET, Limits, Meter, Workload, epoch, is_listening, limits, lock, sampling, watched};
use crate::choose::Choice;
use crate::error::Error;
use crate::select::Ranked;

/// Samples that may be on their way; beyond it the stream is far behind, and what comes is skipped.
const MOST_PENDING: usize = 256;
/// How old the event may be that device times are counted from: times between events lose digits as they grow.
const ANCHOR_AGE: Duration = Duration::from_secs(10);
/// Problems whose last choice is remembered.
const MOST_CHOICES: usize = 65_536;

/// Who holds the memory of a device, for those who ran out of it. Given by [`Handle::memory`](crate::Handle::memory).
///
/// ```
/// use verdigris::observe::MemoryAccount;
///
/// let account =
///     MemoryAccount { total_bytes: 100, free_bytes: 10, pool_reserved_bytes: 30, pool_used_bytes: 20, pool_used_high_bytes: 25 };
/// assert_eq!(account.others_bytes(), 60);
/// assert_eq!(account.to_string(), "100 bytes: 10 free, 30 held by this pool (20 in use, 25 at most), 60 held by others");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct MemoryAccount {
    /// The device's memory.
    pub total_bytes: u64,
    /// Free, to all processes.
    pub free_bytes: u64,
    /// Held by this handle's pool.
    pub pool_reserved_bytes: u64,
    /// In use by buffers of this handle's pool.
    pub pool_used_bytes: u64,
    /// Most ever in use by them.
    pub pool_used_high_bytes: u64,
}

impl MemoryAccount {
    /// Held by other pools, frameworks and processes, and by the driver.
    pub fn others_bytes(&self) -> u64 {
        self.total_bytes.saturating_sub(self.free_bytes).saturating_sub(self.pool_reserved_bytes)
    }
}

/// All of it on one line.
impl fmt::Display for MemoryAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} bytes: {} free, {} held by this pool ({} in use, {} at most), {} held by others",
            self.total_bytes,
            self.free_bytes,
            self.pool_reserved_bytes,
            self.pool_used_bytes,
            self.pool_used_high_bytes,
            self.others_bytes()
        )
    }
}

/// A problem, with the limits under which it was chosen for.
type Asked = (Key, String);
/// An engine and its config.
type Taken = (&'static str, Knobs);

/// What is kept of a handle's device for those who listen. Plans hold it, so that it outlives the handle with them.
pub(crate) struct Watch {
    device: Arc<str>,
    context: Context,
    pool: Pool,
    pending: Mutex<VecDeque<Sample>>,
    anchor: Mutex<Option<Anchor>>,
    /// Events that were used and may be again.
    events: Mutex<Vec<Event>>,
    budget: Budget,
    reserved_high_bytes: AtomicU64,
    choices: Mutex<HashMap<Asked, Taken>>,
    workload: Option<Workload>,
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Watch({})", self.device)
    }
}

/// An execution whose time is to be taken.
pub(crate) struct Sampled {
    /// Tells the sampled executions of the process apart: what the device's spans are joined with the host's by.
    execution: u64,
    /// One before the first part, and one behind each.
    events: Vec<Event>,
}

impl Sampled {
    /// One to be put before the first part, and one behind each.
    pub(crate) fn events(&self) -> &[Event] {
        &self.events
    }

    /// What the host does for it, beside the device's spans, which are told later and have the same number.
    pub(crate) fn span(&self, graph: &str, device: &str) -> tracing::Span {
        tracing::trace_span!(target: "verdigris", "execute", execution = self.execution, graph, device)
    }
}

/// The number of the next sampled execution.
static EXECUTIONS: AtomicU64 = AtomicU64::new(1);

/// An execution whose events were put on a stream.
struct Sample {
    execution: u64,
    /// One before the first part, and one behind each.
    events: Vec<Event>,
    parts: Vec<Arc<Meter>>,
    /// The stream, as a number.
    stream: u64,
    /// When the device was first seen to be at it.
    begun: Option<Instant>,
    is_overdue: bool,
}

/// An event of a stream of its own, whose time on the host is known to some microseconds.
struct Anchor {
    stream: Stream,
    event: Event,
    host_us: f64,
    made: Instant,
}

/// What the handles of one device have, together.
#[derive(Default)]
struct Sums {
    reserved_bytes: u64,
    used_bytes: u64,
    overdue: usize,
}

/// See [`super::collect`].
pub(crate) fn collect(watches: &[Arc<Watch>]) {
    let limits = limits();
    let mut sums: HashMap<&str, Sums> = HashMap::new();
    for watch in watches {
        let sum = sums.entry(&watch.device).or_default();
        // Asking whether an event was passed would break another thread's capture.
        let Ok(_relaxed) = watch.context.relax_capture() else { continue };
        sum.overdue += watch.reap(&limits, Instant::now());
        if let Some(workload) = &watch.workload {
            workload.write();
        }
        let Ok(held) = watch.pool.statistics() else { continue };
        sum.reserved_bytes += held.reserved_bytes;
        sum.used_bytes += held.used_bytes;
        if held.reserved_high_bytes > watch.reserved_high_bytes.swap(held.reserved_high_bytes, Ordering::Relaxed) {
            counter!("verdigris_pool_grown_total", "device" => Arc::clone(&watch.device)).increment(1);
        }
    }
    for (device, sum) in sums {
        gauge!("verdigris_pool_reserved_bytes", "device" => device.to_owned()).set(sum.reserved_bytes as f64);
        gauge!("verdigris_pool_used_bytes", "device" => device.to_owned()).set(sum.used_bytes as f64);
        gauge!("verdigris_overdue_executions", "device" => device.to_owned()).set(sum.overdue as f64);
    }
}

impl Watch {
    pub(crate) fn new(context: &Context, pool: &Pool, workload: Option<Workload>) -> Arc<Watch> {
        let watch = Arc::new(Watch {
            device: format!("cuda:{}", context.device().ordinal()).into(),
            context: context.clone(),
            pool: pool.clone(),
            pending: Mutex::default(),
            anchor: Mutex::default(),
            events: Mutex::default(),
            budget: Budget::new(),
            reserved_high_bytes: AtomicU64::new(0),
            choices: Mutex::default(),
            workload,
        });
        watched(&watch);
        watch
    }

    /// The device, as labels have it.
    pub(crate) fn device(&self) -> &str {
        &self.device
    }

    /// What is counted of a problem computed in this way.
    pub(crate) fn meter(&self, problem: &Problem, way: &Ranked) -> Arc<Meter> {
        let dtype = problem.buffers().ok().and_then(|operands| operands.first().map(|operand| operand.dtype));
        let dtype = dtype.map_or_else(String::new, |dtype| dtype.to_string());
        let runs = self.workload.as_ref().map(|workload| workload.counter(problem));
        let name = crate::explain::describe(problem);
        Arc::new(Meter::new(problem.kind(), way.engine.name, dtype, Arc::clone(&self.device), name, way.cost.us, runs))
    }

    /// What went wrong with recording the workload.
    pub(crate) fn workload_trouble(&self) -> Option<String> {
        self.workload.as_ref()?.trouble()
    }

    /// Events for an execution of so many parts and its number, if this one is to have its time taken: `turns` counts those of its plan.
    #[inline]
    pub(crate) fn wants(&self, turns: &AtomicU64, parts: usize, stream: &Stream) -> Option<Sampled> {
        if !is_listening() { None } else { self.wants_now(turns, parts, stream) }
    }

    fn wants_now(&self, turns: &AtomicU64, parts: usize, stream: &Stream) -> Option<Sampled> {
        let sampling = sampling();
        let turn = turns.fetch_add(1, Ordering::Relaxed);
        // The first execution of a plan meets cold caches.
        let is_due = sampling.every > 0 && (turn == 1 || turn > 0 && turn.is_multiple_of(u64::from(sampling.every)));
        if !is_due || parts == 0 || stream.capture_status().ok()? != CaptureStatus::None {
            return None;
        }
        if !self.budget.takes(sampling.per_second) || lock(&self.pending).len() >= MOST_PENDING {
            self.sampled("skipped");
            return None;
        }
        let mut events = lock(&self.events);
        let kept = events.len().saturating_sub(parts + 1);
        let mut taken = events.split_off(kept);
        drop(events);
        while taken.len() < parts + 1 {
            taken.push(Event::timing(&self.context).ok()?);
        }
        Some(Sampled { execution: EXECUTIONS.fetch_add(1, Ordering::Relaxed), events: taken })
    }

    fn sampled(&self, outcome: &'static str) {
        counter!("verdigris_samples_total", "outcome" => outcome, "device" => Arc::clone(&self.device)).increment(1);
    }

    /// Keeps an execution whose events are on their way, and reads those that were passed.
    pub(crate) fn keep(&self, Sampled { execution, events }: Sampled, parts: Vec<Arc<Meter>>, stream: &Stream) {
        self.sampled("taken");
        let sample = Sample { execution, events, parts, stream: stream.raw() as u64, begun: None, is_overdue: false };
        lock(&self.pending).push_back(sample);
        self.reap(&limits(), Instant::now());
    }

    /// Reads the samples that were passed: how many are overdue `now`.
    ///
    /// What it tells is of earlier executions, so that it stands in no span of the caller's: the number of the execution leads to the span that it is of.
    fn reap(&self, limits: &Limits, now: Instant) -> usize {
        // One thread reads; whoever comes meanwhile need not.
        let Ok(mut pending) = self.pending.try_lock() else { return 0 };
        let mut left = VecDeque::with_capacity(pending.len());
        let mut overdue = 0;
        for mut sample in std::mem::take(&mut *pending) {
            let Some(last) = sample.events.last() else { continue };
            match last.is_reached() {
                Ok(true) => {
                    if self.read(&sample, limits).is_err() {
                        self.sampled("lost");
                    } else {
                        let mut events = lock(&self.events);
                        events.append(&mut sample.events);
                        events.truncate(MOST_PENDING);
                    }
                }
                Ok(false) => {
                    overdue += usize::from(self.is_overdue(&mut sample, limits, now));
                    left.push_back(sample);
                }
                // The device has failed, and with it all that was on its way.
                Err(_) => self.sampled("lost"),
            }
        }
        *pending = left;
        overdue
    }

    fn read(&self, sample: &Sample, limits: &Limits) -> Result<(), verdigris_cuda::Error> {
        let is_traced = tracing::enabled!(target: DEVICE_TARGET, tracing::Level::TRACE);
        for (part, pair) in sample.parts.iter().zip(sample.events.windows(2)) {
            let us = pair[1].elapsed_us_since(&pair[0])?;
            part.took(us);
            if us > limits.slow_factor * part.estimate_us && us > limits.slow_least.as_secs_f64() * 1e6 {
                part.was_slow();
                tracing::warn!(
                    target: "verdigris", parent: None, event = "slow", execution = sample.execution, device = &*self.device, problem = part.name, engine = part.engine,
                    us, estimate_us = part.estimate_us
                );
            }
            if is_traced && let Some(start_us) = self.host_us(&pair[0]) {
                tracing::trace!(
                    target: DEVICE_TARGET, parent: None, execution = sample.execution, device = &*self.device, stream = sample.stream, name = part.name,
                    engine = part.engine, start_us, duration_us = us
                );
            }
        }
        Ok(())
    }

    /// When the device passed an event, in microseconds since the epoch.
    fn host_us(&self, event: &Event) -> Option<f64> {
        let mut anchor = lock(&self.anchor);
        if anchor.as_ref().is_none_or(|anchor| anchor.made.elapsed() > ANCHOR_AGE) {
            let stream = match anchor.take() {
                Some(old) => old.stream,
                None => Stream::new(&self.context).ok()?,
            };
            let mark = Event::timing(&self.context).ok()?;
            mark.record(&stream).ok()?;
            // A stream without work passes its event within microseconds; where it does not, the next sample tries again.
            let until = Instant::now() + Duration::from_micros(200);
            while !mark.is_reached().ok()? {
                if Instant::now() > until {
                    return None;
                }
            }
            *anchor = Some(Anchor { stream, event: mark, host_us: epoch().elapsed().as_secs_f64() * 1e6, made: Instant::now() });
        }
        let anchor = anchor.as_ref()?;
        Some(anchor.host_us + event.elapsed_us_since(&anchor.event).ok()?)
    }

    /// Whether an execution that the device has not ended should have been. Told of once.
    fn is_overdue(&self, sample: &mut Sample, limits: &Limits, now: Instant) -> bool {
        if sample.begun.is_none() && sample.events[0].is_reached().unwrap_or(false) {
            sample.begun = Some(now);
        }
        let Some(begun) = sample.begun else { return false };
        let estimate_us: f64 = sample.parts.iter().map(|part| part.estimate_us).sum();
        let allowed = Duration::from_secs_f64((estimate_us * limits.overdue_factor * 1e-6).min(1e9)).max(limits.overdue_least);
        if now.saturating_duration_since(begun) < allowed {
            return false;
        }
        if !std::mem::replace(&mut sample.is_overdue, true) {
            // The part whose end was not reached.
            let at = sample.parts.iter().zip(&sample.events[1..]).find(|(_, event)| !event.is_reached().unwrap_or(false));
            let (problem, engine) = at.map_or(("", ""), |(part, _)| (part.name.as_str(), part.engine));
            tracing::error!(
                target: "verdigris", parent: None, event = "overdue", execution = sample.execution, device = &*self.device, problem, engine, stream = sample.stream,
                estimate_us, allowed_us = allowed.as_secs_f64() * 1e6
            );
        }
        true
    }

    /// Tells of a choice with its second-best way, and whether it is another than the last one for this problem. `passed_over` is why a remembered one was not
    /// taken.
    pub(crate) fn chose(&self, problem: &Problem, asked: impl FnOnce() -> String, choice: &Choice, passed_over: Option<&str>) {
        if !is_listening() {
            return;
        }
        let (way, by) = (choice.way(), choice.by);
        let (op, engine) = (problem.kind(), way.engine.name);
        let (measured_us, alternative) = (choice.measured_us(), choice.alternative());
        let device = || Arc::clone(&self.device);
        counter!("verdigris_choices_total", "op" => op, "engine" => engine, "chosen_by" => by.name(), "device" => device()).increment(1);
        tracing::debug!(
            target: "verdigris", event = "choice", device = &*self.device, problem = %problem, engine, knobs = %way.knobs, chosen_by = by.name(),
            estimate_us = way.cost.us, measured_us, workspace_bytes = way.workspace_bytes(),
            alternative = alternative.map(|(other, _)| format!("{} {}", other.engine.name, other.knobs)), alternative_us = alternative.map(|(_, us)| us)
        );
        let before = {
            let mut choices = lock(&self.choices);
            if choices.len() >= MOST_CHOICES {
                choices.clear();
            }
            choices.insert((Key::of(problem), asked()), (engine, way.knobs.clone()))
        };
        let other = before.filter(|(before, knobs)| (*before, knobs) != (engine, &way.knobs));
        if other.is_none() && passed_over.is_none() {
            return;
        }
        counter!("verdigris_choice_switches_total", "op" => op, "device" => device()).increment(1);
        let before = other.map_or_else(String::new, |(engine, knobs)| format!("{engine} {knobs}"));
        tracing::warn!(
            target: "verdigris", event = "switch", device = &*self.device, problem = %problem, engine, knobs = %way.knobs, before, passed_over
        );
    }

    /// Tells of a kernel that was made ready.
    pub(crate) fn loaded(&self, kernel: &str, report: &LoadReport) {
        if !is_listening() {
            return;
        }
        let origin = match report.origin {
            Origin::Memory => return,
            Origin::Pack => "pack",
            Origin::Disk => "disk",
            Origin::Compiled => "compiled",
        };
        counter!("verdigris_kernels_total", "origin" => origin, "device" => Arc::clone(&self.device)).increment(1);
        let compile = report.jit.as_ref().filter(|_| report.origin == Origin::Compiled).map(|jit| jit.duration);
        if let Some(time) = compile {
            histogram!("verdigris_kernel_compile_seconds", "device" => Arc::clone(&self.device)).record(time.as_secs_f64());
        }
        tracing::debug!(target: "verdigris", event = "kernel", device = &*self.device, kernel, origin, compile_ms = compile.map(|time| time.as_secs_f64() * 1e3));
    }

    /// Tells of a plan that was made.
    pub(crate) fn planned(&self, time: Duration) {
        if is_listening() {
            counter!("verdigris_plans_total", "device" => Arc::clone(&self.device)).increment(1);
            histogram!("verdigris_plan_seconds", "device" => Arc::clone(&self.device)).record(time.as_secs_f64());
        }
    }

    /// Tells of an execution by other ways than the chosen ones.
    pub(crate) fn fell_back(&self, graph: &str, reason: &'static str) {
        if is_listening() {
            counter!("verdigris_fallbacks_total", "reason" => reason, "device" => Arc::clone(&self.device)).increment(1);
            tracing::warn!(target: "verdigris", event = "fallback", device = &*self.device, graph, reason);
        }
    }

    /// Tells of the workspace that an execution's chosen ways need, and of what it ran in: less where it fell back, 0 where it did not run.
    pub(crate) fn asked_workspace(&self, asked_bytes: u64, had_bytes: u64) {
        if asked_bytes > 0 && is_listening() {
            histogram!("verdigris_workspace_bytes", "device" => Arc::clone(&self.device)).record(asked_bytes as f64);
            histogram!("verdigris_workspace_had_bytes", "device" => Arc::clone(&self.device)).record(had_bytes as f64);
        }
    }

    /// Tells of workspace that could not be had, with who holds the memory, and what would do.
    pub(crate) fn lacked_workspace(&self, graph: &str, asked_bytes: u64, least_bytes: u64, account: &Result<MemoryAccount, Error>) {
        if !is_listening() {
            return;
        }
        counter!("verdigris_workspace_failures_total", "device" => Arc::clone(&self.device)).increment(1);
        let known = account.as_ref().ok();
        let words = account.as_ref().map_or_else(ToString::to_string, ToString::to_string);
        tracing::error!(
            target: "verdigris", event = "memory", device = &*self.device, graph, asked_bytes, least_bytes,
            total_bytes = known.map(|account| account.total_bytes), free_bytes = known.map(|account| account.free_bytes),
            pool_reserved_bytes = known.map(|account| account.pool_reserved_bytes), pool_used_bytes = known.map(|account| account.pool_used_bytes),
            others_bytes = known.map(MemoryAccount::others_bytes), account = words
        );
    }

    /// Who holds the device's memory now.
    pub(crate) fn memory(&self) -> Result<MemoryAccount, Error> {
        let (free_bytes, total_bytes) = self.context.memory_info()?;
        let held = self.pool.statistics()?;
        Ok(MemoryAccount {
            total_bytes,
            free_bytes,
            pool_reserved_bytes: held.reserved_bytes,
            pool_used_bytes: held.used_bytes,
            pool_used_high_bytes: held.used_high_bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_cuda::{PoolOptions, fake};

    /// F4: the factor of the limits is the bound, not a part of it, and neither is anything told before the least time. The clock is ours.
    #[test]
    fn an_execution_is_overdue_from_so_many_times_its_estimate_on() {
        let context = fake::context();
        let pool = Pool::new(&context, PoolOptions::default()).expect("a pool");
        let stream = Stream::new(&context).expect("a stream");
        let watch = Watch::new(&context, &pool, None);
        // Two parts of 250 µs and 500 µs; the device begins with the first and does not come back.
        let meter = |us| Arc::new(Meter::new("gemm", "gemm.simt", "f32".to_owned(), Arc::from("cuda:0"), "a product".to_owned(), us, None));
        fake::hang_behind(Some(1));
        let events: Vec<Event> = (0..3).map(|_| Event::timing(&context).expect("an event")).collect();
        events.iter().for_each(|event| event.record(&stream).expect("recorded"));
        let parts = vec![meter(250.0), meter(500.0)];
        lock(&watch.pending).push_back(Sample { execution: 1, events, parts, stream: 0, begun: None, is_overdue: false });
        let begun = Instant::now();
        let after = |limits: &Limits, us: u64| watch.reap(limits, begun + Duration::from_micros(us));
        let limits =
            |overdue_factor, least_us| Limits { overdue_factor, overdue_least: Duration::from_micros(least_us), ..Limits::default() };
        // From when it was first seen to have begun: 750 µs times the factor.
        assert_eq!(after(&limits(4.0, 0), 0), 0);
        for (factor, bound_us) in [(4.0, 3000), (2.0, 1500), (100.0, 75_000)] {
            assert_eq!(after(&limits(factor, 0), bound_us - 1), 0, "{factor} times");
            assert_eq!(after(&limits(factor, 0), bound_us), 1, "{factor} times");
        }
        // The least time is the bound where it is longer.
        assert_eq!(after(&limits(4.0, 5000), 4999), 0);
        assert_eq!(after(&limits(4.0, 5000), 5000), 1);
        fake::hang_behind(None);
        assert_eq!(after(&limits(4.0, 0), 1_000_000), 0, "it has ended after all");
        assert!(lock(&watch.pending).is_empty());
    }
}
