//! One device, as those see it who operate it: samples on their way, memory, choices.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use metrics::{Histogram, counter, gauge, histogram};
use serde::Serialize;
use verdigris_cuda::{Context, LoadReport, Origin, Pool, PoolStatistics};
use verdigris_engines::engine::Knobs;
use verdigris_graph::{Key, Problem};

use super::{Meter, Samples, Workload, is_listening, limits, lock, watched};
use crate::choose::Choice;
use crate::error::Error;
use crate::select::Ranked;

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
    samples: Samples,
    /// As they were last known.
    reserved_bytes: AtomicU64,
    used_bytes: AtomicU64,
    reserved_high_bytes: AtomicU64,
    choices: Mutex<HashMap<Asked, Taken>>,
    workload: Option<Workload>,
    /// Of what executions ask for and have: to look a series up takes longer than all else that they are told of.
    workspace: OnceLock<[Histogram; 2]>,
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Watch({})", self.device)
    }
}

/// What the handles of one device have, together.
#[derive(Default)]
struct Sums {
    reserved_bytes: u64,
    used_bytes: u64,
    overdue: usize,
}

/// Devices whose gauges were set. One without a handle has them set to 0 once.
static TOLD: Mutex<BTreeSet<Arc<str>>> = Mutex::new(BTreeSet::new());

/// See [`super::collect`].
pub(crate) fn collect(watches: &[Arc<Watch>]) {
    let limits = limits();
    let mut sums: BTreeMap<Arc<str>, Sums> = lock(&TOLD).iter().map(|device| (Arc::clone(device), Sums::default())).collect();
    for watch in watches {
        let sum = sums.entry(Arc::clone(&watch.device)).or_default();
        sum.overdue += watch.samples.read(&limits, Instant::now());
        // A device that does not answer holds what it last held: a 0 would say that all is well.
        let held = watch.pool.statistics().ok();
        let last = |kept: &AtomicU64, of: fn(&PoolStatistics) -> u64| {
            held.as_ref().map_or_else(
                || kept.load(Ordering::Relaxed),
                |held| {
                    kept.store(of(held), Ordering::Relaxed);
                    of(held)
                },
            )
        };
        sum.reserved_bytes += last(&watch.reserved_bytes, |held| held.reserved_bytes);
        sum.used_bytes += last(&watch.used_bytes, |held| held.used_bytes);
        let high_bytes = held.as_ref().map_or(0, |held| held.reserved_high_bytes);
        if high_bytes > watch.reserved_high_bytes.fetch_max(high_bytes, Ordering::Relaxed) {
            counter!("verdigris_pool_grown_total", "device" => Arc::clone(&watch.device)).increment(1);
        }
    }
    for (device, sum) in &sums {
        gauge!("verdigris_pool_reserved_bytes", "device" => Arc::clone(device)).set(sum.reserved_bytes as f64);
        gauge!("verdigris_pool_used_bytes", "device" => Arc::clone(device)).set(sum.used_bytes as f64);
        gauge!("verdigris_overdue_executions", "device" => Arc::clone(device)).set(sum.overdue as f64);
    }
    *lock(&TOLD) = watches.iter().map(|watch| Arc::clone(&watch.device)).collect();
}

impl Watch {
    pub(crate) fn new(context: &Context, pool: &Pool, workload: Option<Workload>) -> Arc<Watch> {
        let device: Arc<str> = format!("cuda:{}", context.device().ordinal()).into();
        let watch = Arc::new(Watch {
            samples: Samples::new(Arc::clone(&device), context),
            device,
            context: context.clone(),
            pool: pool.clone(),
            reserved_bytes: AtomicU64::new(0),
            used_bytes: AtomicU64::new(0),
            reserved_high_bytes: AtomicU64::new(0),
            choices: Mutex::default(),
            workload,
            workspace: OnceLock::new(),
        });
        watched(&watch);
        watch
    }

    /// The device, as labels have it.
    pub(crate) fn device(&self) -> &str {
        &self.device
    }

    /// What of the device is on its way.
    pub(crate) fn samples(&self) -> &Samples {
        &self.samples
    }

    /// What is counted of a problem computed in this way.
    pub(crate) fn meter(&self, problem: &Problem, way: &Ranked) -> Arc<Meter> {
        let dtype = problem.buffers().ok().and_then(|operands| operands.first().map(|operand| operand.dtype));
        let dtype = dtype.map_or_else(String::new, |dtype| dtype.to_string());
        let runs = self.workload.as_ref().map(|workload| workload.counter(problem));
        let name = crate::explain::describe(problem);
        Arc::new(Meter::new(problem.kind(), way.engine.name, dtype, Arc::clone(&self.device), name, way.cost.us, runs))
    }

    /// Writes what was counted of the workload.
    pub(crate) fn write_workload(&self) {
        self.workload.iter().for_each(Workload::write);
    }

    /// What went wrong with recording the workload.
    pub(crate) fn workload_trouble(&self) -> Option<String> {
        self.workload.as_ref()?.trouble()
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
            let [asked, had] = self.workspace.get_or_init(|| {
                let device = || Arc::clone(&self.device);
                [
                    histogram!("verdigris_workspace_bytes", "device" => device()),
                    histogram!("verdigris_workspace_had_bytes", "device" => device()),
                ]
            });
            asked.record(asked_bytes as f64);
            had.record(had_bytes as f64);
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
