//! What is counted of one part of a plan.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use metrics::{Counter, Histogram, counter, histogram};
use verdigris_cpu::StepReport;

use super::{Budget, DEVICE_TARGET, epoch, is_listening, sampling};

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

/// What an engine of the CPU computes: `cpu.conv.gemm` what is called conv elsewhere.
pub(crate) fn cpu_op(engine: &'static str) -> &'static str {
    let name = engine.strip_prefix("cpu.").unwrap_or(engine);
    name.split_once('.').map_or(name, |(op, _)| op)
}

/// Counts the steps of one run on the CPU, whose times are known, and tells of them as spans of that device. Times cost nothing here, so that the first run
/// is told of as well; the budget of [`Sampling`](super::Sampling) bounds what traces grow by.
pub(crate) fn cpu_run(dtype: &str, steps: &[StepReport]) {
    if !is_listening() {
        return;
    }
    for step in steps {
        let engine = step.engine.id();
        let labels =
            [("op", cpu_op(engine).to_owned()), ("engine", engine.to_owned()), ("dtype", dtype.to_owned()), ("device", "cpu".to_owned())];
        counter!("verdigris_executions_total", &labels).increment(1);
        histogram!("verdigris_device_seconds", &labels).record(step.time.as_secs_f64());
    }
    let sampling = sampling();
    if sampling.every == 0 || !tracing::enabled!(target: DEVICE_TARGET, tracing::Level::TRACE) || !CPU_BUDGET.takes(sampling.per_second) {
        return;
    }
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    let stream = CPU_THREAD.with(|number| *number);
    for step in steps {
        let start_us = us(step.begun.saturating_duration_since(epoch()));
        tracing::trace!(
            target: DEVICE_TARGET, device = "cpu", stream, name = step.name, engine = step.engine.id(), start_us, duration_us = us(step.time)
        );
    }
}

/// Runs on the CPU that were told of in this second.
static CPU_BUDGET: Budget = Budget::new();

thread_local! {
    /// What tells the callers' threads apart: each waits for its own runs, as a stream does.
    static CPU_THREAD: u64 = {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        NUMBER.fetch_add(1, Ordering::Relaxed)
    };
}

#[cfg(test)]
mod tests {
    use super::{Meter, cpu_op};
    use crate::observe::{Wants, Watch, is_listening, wanted};
    use std::hint::black_box;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;
    use std::time::Instant;
    use verdigris_cuda::{Pool, PoolOptions, Stream, fake};

    /// All that an execution of one part asks while nobody listens: whether it is sampled, whether guards look at it, and its count. The bound is that of
    /// the whole call; the least of many rounds is taken, for other programs share the processor.
    #[test]
    fn nobody_listening_costs_a_call_less_than_a_tenth_of_a_microsecond() {
        const CALLS: u32 = 10_000;
        let context = fake::context();
        let pool = Pool::new(&context, PoolOptions::default()).expect("a pool");
        let stream = Stream::new(&context).expect("a stream");
        let watch = Watch::new(&context, &pool, None);
        let meter = Meter::new("gemm", "gemm.simt", "f32".to_owned(), Arc::from("cuda:0"), "a product".to_owned(), 1.0, None);
        let turns = AtomicU64::new(0);
        assert!(!is_listening());
        let mut least_ns = f64::INFINITY;
        for _ in 0..200 {
            let begun = Instant::now();
            for _ in 0..CALLS {
                let (watch, meter) = (black_box(&watch), black_box(&meter));
                assert!(
                    matches!(watch.samples().wants(black_box(&turns), 1, &stream), Wants::Nothing) && wanted(black_box(&turns)).is_none()
                );
                meter.count();
            }
            least_ns = least_ns.min(begun.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS));
        }
        eprintln!("nobody listens: {least_ns:.2} ns a call");
        assert!(least_ns < 100.0, "{least_ns} ns");
    }

    #[test]
    fn ops_of_the_cpu_are_classes_and_no_engines() {
        assert_eq!(["cpu.gemm", "cpu.conv.gemm", "cpu.batch_norm", "other"].map(cpu_op), ["gemm", "conv", "batch_norm", "other"]);
    }
}
