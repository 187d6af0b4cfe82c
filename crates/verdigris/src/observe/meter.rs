//! What is counted of one part of a plan.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use metrics::{Counter, Histogram, counter, histogram};

use super::is_listening;

/// A part of a plan, as metrics have it, with the handles of its series.
#[derive(Debug)]
pub(crate) struct Meter {
    pub(crate) op: &'static str,
    pub(crate) engine: &'static str,
    dtype: String,
    device: Arc<str>,
    /// What is computed, in words.
    pub(crate) name: String,
    pub(crate) estimate_us: f64,
    /// Executions since the workload was last written, where one is recorded.
    runs: Option<Arc<AtomicU64>>,
    series: OnceLock<Series>,
}

struct Series {
    executions: Counter,
    device_seconds: Histogram,
}

impl std::fmt::Debug for Series {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Series")
    }
}

impl Meter {
    pub(crate) fn new(
        op: &'static str,
        engine: &'static str,
        dtype: String,
        device: Arc<str>,
        name: String,
        estimate_us: f64,
        runs: Option<Arc<AtomicU64>>,
    ) -> Meter {
        Meter { op, engine, dtype, device, name, estimate_us, runs, series: OnceLock::new() }
    }

    /// Counts one execution.
    #[inline]
    pub(crate) fn count(&self) {
        if let Some(runs) = &self.runs {
            runs.fetch_add(1, Ordering::Relaxed);
        }
        if is_listening() {
            self.series().executions.increment(1);
        }
    }

    /// Takes down how long one execution took.
    pub(crate) fn took(&self, us: f64) {
        self.series().device_seconds.record(us * 1e-6);
    }

    /// Counts one execution that took too long.
    pub(crate) fn was_slow(&self) {
        counter!("verdigris_slow_executions_total", "op" => self.op, "engine" => self.engine, "device" => Arc::clone(&self.device))
            .increment(1);
    }

    fn series(&self) -> &Series {
        self.series.get_or_init(|| {
            let (op, engine) = (self.op, self.engine);
            let (dtype, device) = (self.dtype.clone(), &self.device);
            Series {
                executions: counter!("verdigris_executions_total", "op" => op, "engine" => engine, "dtype" => dtype.clone(), "device" => Arc::clone(device)),
                device_seconds: histogram!("verdigris_device_seconds", "op" => op, "engine" => engine, "dtype" => dtype, "device" => Arc::clone(device)),
            }
        })
    }
}

/// What an engine of the CPU computes: `cpu.conv` what is called conv elsewhere.
pub(crate) fn cpu_op(engine: &'static str) -> &'static str {
    engine.strip_prefix("cpu.").unwrap_or(engine)
}

/// Counts one step of the CPU, whose time is known.
pub(crate) fn cpu_step(engine: &'static str, dtype: &str, time: Duration) {
    if !is_listening() {
        return;
    }
    let labels =
        [("op", cpu_op(engine).to_owned()), ("engine", engine.to_owned()), ("dtype", dtype.to_owned()), ("device", "cpu".to_owned())];
    counter!("verdigris_executions_total", &labels).increment(1);
    histogram!("verdigris_device_seconds", &labels).record(time.as_secs_f64());
}
