//! What the library tells those who operate it: metrics through the crate `metrics`, spans and events through `tracing`.
//!
//! Nothing is told until somebody listens: an exporter, or an application with a recorder of its own, holds a [`Listening`]. Without one,
//! an execution pays for a load and a branch. With one, it adds to counters whose handles its plan keeps, and now and then the time on the
//! device is taken ([`Sampling`]): by events that the stream passes, which nobody waits for. [`collect`] reads those that were passed, and
//! sets the gauges; exporters call it before they answer.
//!
//! The metrics are those of [`METRICS`] (`docs/metrics.md`). Events of `tracing` have the target `verdigris`: a span `plan`, a span `execute` around the
//! submission of each sampled execution, with its number as the field `execution`; `choice`, `switch`, `fallback`, `kernel`, `slow`, `overdue`, `memory`,
//! `nonfinite`, `drift` and `error`, with what they are about as fields. Under the target [`DEVICE_TARGET`] stands each sampled execution as a span of the
//! device's time.
//!
//! ```
//! use verdigris::observe::{self, Listen, Listening, Sampling};
//!
//! assert!(!observe::is_listening());
//! let listening: Listening = observe::listen(Listen { sampling: Sampling { every: 64, ..Sampling::default() }, ..Listen::default() });
//! assert!(observe::is_listening());
//! // … an application runs, an exporter asks:
//! observe::collect();
//! assert!(observe::epoch().elapsed().as_secs() < 3600);
//! drop(listening);
//! assert!(!observe::is_listening());
//! ```

mod guard;
mod meter;
mod samples;
pub mod table;
mod watch;
mod watchdog;
mod workload;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::error::Error;

pub use guard::Guards;
pub use table::{METRICS, Metric, MetricKind, Unit};
pub use watch::MemoryAccount;
pub use watchdog::Watchdog;
pub use workload::{Entry, Recorded, WorkloadError, read_workload};

pub(crate) use guard::{Check, Subject, Writer, wanted};
pub(crate) use meter::{Meter, cpu_op, cpu_run};
pub(crate) use samples::{Samples, Wants};
pub(crate) use watch::Watch;
pub(crate) use workload::Workload;

/// The target of events that are spans of a device's time: `device`, `stream` (a number that tells streams apart, and on the CPU the threads that run plans),
/// `name` (the problem; on the CPU the ops), `engine`, `start_us` (since [`epoch`]) and `duration_us`. On a GPU they are told once the device has passed them,
/// in no span, and their `execution` is that of the span `execute` in which the work was submitted; on the CPU they are told in the caller's span.
pub const DEVICE_TARGET: &str = "verdigris::device";

/// What is listened for.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Listen {
    /// Which executions have their time taken.
    pub sampling: Sampling,
    /// Which executions are told of.
    pub limits: Limits,
    /// Whose results are looked at.
    pub guards: Guards,
}

/// Which executions have their time taken on the device. A sampled execution has an event before it and one behind each of its parts: some
/// three microseconds of host time where it has one part, and its parts do not overlap. Between samples, and where none are taken, a stream gets an event behind an
/// execution, at most one in twenty milliseconds, by which a hang is seen ([`Limits`]).
///
/// The CPU's times cost nothing and are all in the metrics; of its executions so many a second as `per_second` says are told of as spans, the first of each
/// plan among them, unless `every` is 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sampling {
    /// Of each plan, the second execution and every one of that many; 0 takes none.
    pub every: u32,
    /// At most so many executions a second of one handle; a process has one for each device unless it opens more.
    pub per_second: u32,
}

impl Default for Sampling {
    /// One execution of 256, at most 50 a second: at some three microseconds each, 0.015 % of the time.
    fn default() -> Sampling {
        Sampling { every: 256, per_second: 50 }
    }
}

/// When an execution is told of: a sampled one by what it took; for one that hangs, others are watched too, at most one a millisecond and stream.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Limits {
    /// A part is slow beyond so many times its estimate, and [`Limits::slow_least`].
    pub slow_factor: f64,
    /// No part is slow that takes less than this.
    pub slow_least: Duration,
    /// An execution is overdue beyond so many times its estimate, from when the device began with it, and [`Limits::overdue_least`].
    pub overdue_factor: f64,
    /// No execution is overdue before this.
    pub overdue_least: Duration,
    /// An execution that the device is not seen to have begun with is overdue beyond the same factor of its estimate and this, from when it was submitted, or when
    /// anything was last seen to be passed on its stream.
    pub waiting_least: Duration,
}

impl Default for Limits {
    /// Slow: four times the estimate and 50 µs. Overdue: a thousand times and five seconds, or, where it has not begun, thirty.
    fn default() -> Limits {
        Limits {
            slow_factor: 4.0,
            slow_least: Duration::from_micros(50),
            overdue_factor: 1000.0,
            overdue_least: Duration::from_secs(5),
            waiting_least: Duration::from_secs(30),
        }
    }
}

/// Somebody listens as long as this lives.
#[derive(Debug)]
#[must_use = "nothing is told any more once this is dropped"]
pub struct Listening {
    process: u32,
}

impl Drop for Listening {
    fn drop(&mut self) {
        // A child that the process forked has neither a device nor the threads that may hold locks.
        if LISTENERS.fetch_sub(1, Ordering::SeqCst) == 1 && std::process::id() == self.process {
            guard::clear();
        }
    }
}

static LISTENERS: AtomicU32 = AtomicU32::new(0);
/// Sampling as one number: `every` above, `per_second` below.
static SAMPLING: AtomicU64 = AtomicU64::new(0);
static LIMITS: Mutex<Option<Limits>> = Mutex::new(None);
static WATCHES: Mutex<Vec<Weak<Watch>>> = Mutex::new(Vec::new());

/// Begins to tell. Who listens last says how it is sampled.
pub fn listen(what: Listen) -> Listening {
    epoch();
    let Sampling { every, per_second } = what.sampling;
    SAMPLING.store(u64::from(every) << 32 | u64::from(per_second), Ordering::Relaxed);
    *lock(&LIMITS) = Some(what.limits);
    guard::set(what.guards);
    LISTENERS.fetch_add(1, Ordering::SeqCst);
    metrics::gauge!("verdigris_build_info", "version" => env!("CARGO_PKG_VERSION"), "source" => &verdigris_engines::SOURCE_HASH[..12])
        .set(1.0);
    Listening { process: std::process::id() }
}

/// Whether anybody listens.
#[inline]
pub fn is_listening() -> bool {
    LISTENERS.load(Ordering::Relaxed) > 0
}

/// Reads the samples that the devices have passed, looks for executions that are overdue, and sets the gauges. It waits for no device: some
/// microseconds for each handle and each sample. Exporters call it before they answer and at an interval of about a second.
///
/// Where guards are on ([`Guards`]) it then looks at results of executions, for a quarter of a second at most and one at the least: some milliseconds for numbers, up
/// to some seconds for a shadow execution. Who must not be kept waiting for so long calls [`collect_metrics`].
pub fn collect() {
    collect_metrics();
    guard::collect();
}

/// As [`collect`], without the look at results: for the thread that answers scrapers, beside another one that collects.
///
/// ```
/// use verdigris::observe;
///
/// // A scraper asks: samples are read and gauges set, and no shadow execution is waited for.
/// observe::collect_metrics();
/// ```
pub fn collect_metrics() {
    watch::collect(&watches());
}

/// Writes the counts of every handle that records its workload ([`Config::record`](crate::Config::record)): for the end of a process whose handles are never dropped.
/// Each handle does so every minute, and when it is dropped. In a child of the process that counted it does nothing.
///
/// ```
/// verdigris::observe::write_workloads();
/// ```
pub fn write_workloads() {
    watches().iter().for_each(|watch| watch.write_workload());
}

fn watches() -> Vec<Arc<Watch>> {
    let mut watches = lock(&WATCHES);
    watches.retain(|watch| watch.strong_count() > 0);
    watches.iter().filter_map(Weak::upgrade).collect()
}

/// The moment that times of [`DEVICE_TARGET`] count from: the first time that anybody listened, or asked.
pub fn epoch() -> Instant {
    static EPOCH: OnceLock<Instant> = OnceLock::new();
    *EPOCH.get_or_init(Instant::now)
}

/// So many of something in a second.
struct Budget {
    /// The second since the epoch, above; how many were taken in it, below.
    window: AtomicU64,
}

impl Budget {
    const fn new() -> Budget {
        Budget { window: AtomicU64::new(0) }
    }

    /// Whether another one fits into this second; then it is taken.
    fn takes(&self, per_second: u32) -> bool {
        let now = epoch().elapsed().as_secs();
        let next = |window: u64| {
            let taken = if window >> 32 == now { window as u32 } else { 0 };
            (taken < per_second).then_some(now << 32 | u64::from(taken + 1))
        };
        self.window.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
    }
}

fn sampling() -> Sampling {
    let both = SAMPLING.load(Ordering::Relaxed);
    Sampling { every: (both >> 32) as u32, per_second: both as u32 }
}

fn limits() -> Limits {
    lock(&LIMITS).unwrap_or_default()
}

fn watched(watch: &Arc<Watch>) {
    lock(&WATCHES).push(Arc::downgrade(watch));
}

/// Tells of a plan on the CPU, which has one way for each op.
pub(crate) fn planned_on_cpu(engines: impl Iterator<Item = &'static str>, time: Duration) {
    if !is_listening() {
        return;
    }
    metrics::counter!("verdigris_plans_total", "device" => "cpu").increment(1);
    metrics::histogram!("verdigris_plan_seconds", "device" => "cpu").record(time.as_secs_f64());
    for engine in engines {
        metrics::counter!("verdigris_choices_total", "op" => meter::cpu_op(engine), "engine" => engine, "chosen_by" => "cpu", "device" => "cpu").increment(1);
    }
}

/// Tells of an error that goes to a caller.
pub(crate) fn failed(error: &Error, device: &str) {
    if !is_listening() {
        return;
    }
    metrics::counter!("verdigris_errors_total", "kind" => error.kind(), "device" => device.to_owned()).increment(1);
    tracing::error!(target: "verdigris", event = "error", kind = error.kind(), device, message = %error);
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // What stands behind these locks is whole between any two statements.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
