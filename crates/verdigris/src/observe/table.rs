//! Every metric in one table: what exporters describe, dashboards draw and alerts ask for. `docs/metrics.md` is [`page`], held by a test.
//!
//! ```
//! use verdigris::observe::table::{METRICS, Metric, MetricKind, Unit, metric_of, page};
//!
//! let metric: &Metric = metric_of("verdigris_device_seconds").expect("in the table");
//! assert_eq!((metric.kind, metric.unit, metric.kind.word()), (MetricKind::Histogram, Unit::Seconds, "histogram"));
//! assert_eq!(metric.labels, ["op", "engine", "dtype", "device"]);
//! assert!(METRICS.iter().all(|metric| page().contains(metric.name)));
//! ```

use std::fmt::Write as _;

/// How a metric behaves.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MetricKind {
    /// Only grows, from 0 at the start of the process.
    Counter,
    /// Any value, the newest one counts.
    Gauge,
    /// How often values fell into which range.
    Histogram,
}

impl MetricKind {
    /// In one word, as Prometheus has it.
    pub const fn word(self) -> &'static str {
        match self {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
        }
    }
}

/// The unit of a metric, which its name ends in.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Unit {
    /// A number of events or things, or a yes or no.
    Count,
    /// Seconds.
    Seconds,
    /// Bytes.
    Bytes,
    /// A part of one.
    Ratio,
    /// Cycles a second.
    Hertz,
    /// Degrees.
    Celsius,
    /// Joules a second.
    Watts,
}

/// One metric.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Metric {
    /// Its name, as Prometheus has it.
    pub name: &'static str,
    /// How it behaves.
    pub kind: MetricKind,
    /// What it counts in.
    pub unit: Unit,
    /// The labels that it always has, in this order.
    pub labels: &'static [&'static str],
    /// What it says, in one sentence.
    pub help: &'static str,
}

const fn metric(name: &'static str, kind: MetricKind, unit: Unit, labels: &'static [&'static str], help: &'static str) -> Metric {
    Metric { name, kind, unit, labels, help }
}

use MetricKind::{Counter, Gauge, Histogram};

/// Device and part of a plan: what is computed, by whom, in which type.
const PART: &[&str] = &["op", "engine", "dtype", "device"];

/// Every metric of the library, its exporters and its service.
pub const METRICS: &[Metric] = &[
    metric(
        "verdigris_build_info",
        Gauge,
        Unit::Count,
        &["version", "source"],
        "1, for the version of the library and the hash of its kernels' sources",
    ),
    metric("verdigris_plans_total", Counter, Unit::Count, &["device"], "graphs planned"),
    metric("verdigris_plan_seconds", Histogram, Unit::Seconds, &["device"], "time of planning a graph, kernels included"),
    metric(
        "verdigris_choices_total",
        Counter,
        Unit::Count,
        &["op", "engine", "chosen_by", "device"],
        "choices of an engine for a problem; chosen_by: estimate, ready, clock, plan_cache, shipped, pin, cpu",
    ),
    metric(
        "verdigris_choice_switches_total",
        Counter,
        Unit::Count,
        &["op", "device"],
        "problems that got another engine or config than before in this process, or for which a remembered choice was passed over",
    ),
    metric("verdigris_kernels_total", Counter, Unit::Count, &["origin", "device"], "kernels made ready; origin: pack, disk, compiled"),
    metric("verdigris_kernel_compile_seconds", Histogram, Unit::Seconds, &["device"], "time of the driver's compiler for one kernel"),
    metric("verdigris_executions_total", Counter, Unit::Count, PART, "parts of plans executed"),
    metric("verdigris_device_seconds", Histogram, Unit::Seconds, PART, "time on the device of the parts of sampled executions"),
    metric(
        "verdigris_samples_total",
        Counter,
        Unit::Count,
        &["outcome", "device"],
        "executions whose time was to be taken; outcome: taken, skipped (over the budget), lost (taken, and then the device failed)",
    ),
    metric(
        "verdigris_slow_executions_total",
        Counter,
        Unit::Count,
        &["op", "engine", "device"],
        "parts of sampled executions that took longer than their estimate allows",
    ),
    metric(
        "verdigris_overdue_executions",
        Gauge,
        Unit::Count,
        &["device"],
        "executions that should have ended long ago, of each stream the first",
    ),
    metric(
        "verdigris_fallbacks_total",
        Counter,
        Unit::Count,
        &["reason", "device"],
        "executions by other ways than the chosen ones; reason: workspace, alignment",
    ),
    metric(
        "verdigris_workspace_bytes",
        Histogram,
        Unit::Bytes,
        &["device"],
        "workspace that an execution asks for: that of the chosen ways",
    ),
    metric(
        "verdigris_workspace_had_bytes",
        Histogram,
        Unit::Bytes,
        &["device"],
        "workspace that an execution ran in: less than it asks for where it fell back, 0 where it did not run",
    ),
    metric("verdigris_workspace_failures_total", Counter, Unit::Count, &["device"], "workspace that could not be had"),
    metric("verdigris_pool_reserved_bytes", Gauge, Unit::Bytes, &["device"], "device memory that the library's pools hold in this process"),
    metric("verdigris_pool_used_bytes", Gauge, Unit::Bytes, &["device"], "device memory of the library's pools that is in use"),
    metric(
        "verdigris_pool_grown_total",
        Counter,
        Unit::Count,
        &["device"],
        "times that the library's pools were seen to hold more memory than ever before",
    ),
    metric(
        "verdigris_errors_total",
        Counter,
        Unit::Count,
        &["kind", "device"],
        "errors given to callers; kind: graph, no_engine, pin, binding, out_of_memory, driver_missing, driver_old, device_lost, device, cpu, config, request",
    ),
    metric("verdigris_number_checks_total", Counter, Unit::Count, &["op", "device"], "results that a numeric guard looked at"),
    metric(
        "verdigris_nonfinite_total",
        Counter,
        Unit::Count,
        &["op", "device"],
        "results that were looked at and had a NaN or an infinity",
    ),
    metric(
        "verdigris_amax_ratio",
        Histogram,
        Unit::Ratio,
        &["op", "device"],
        "largest finite magnitude of a result that was looked at, over the largest that its type holds",
    ),
    metric(
        "verdigris_drift_checks_total",
        Counter,
        Unit::Count,
        &["op", "outcome", "device"],
        "results compared with a shadow execution; outcome: within, beyond",
    ),
    metric(
        "verdigris_drift_ratio",
        Histogram,
        Unit::Ratio,
        &["op", "device"],
        "difference from the shadow execution over what rounding allows",
    ),
    metric(
        "verdigris_guard_skips_total",
        Counter,
        Unit::Count,
        &["guard", "reason", "device"],
        "looks that were due and left out; guard: numbers, drift; reason: size (beyond the bound on bytes), work (too much for a shadow execution), capture, memory, unread (nobody reads them), failed",
    ),
    metric("verdigris_gpu_up", Gauge, Unit::Count, &["device"], "1 if NVML answers for the device, else 0"),
    metric("verdigris_gpu_utilization_ratio", Gauge, Unit::Ratio, &["device"], "part of the last sampling period in which a kernel ran"),
    metric(
        "verdigris_gpu_memory_utilization_ratio",
        Gauge,
        Unit::Ratio,
        &["device"],
        "part of the last sampling period in which memory was read or written",
    ),
    metric("verdigris_gpu_memory_used_bytes", Gauge, Unit::Bytes, &["device"], "device memory in use by all processes"),
    metric("verdigris_gpu_memory_total_bytes", Gauge, Unit::Bytes, &["device"], "device memory"),
    metric("verdigris_gpu_process_memory_bytes", Gauge, Unit::Bytes, &["device", "process"], "device memory in use; process: self, others"),
    metric("verdigris_gpu_sm_clock_hertz", Gauge, Unit::Hertz, &["device"], "clock of the multiprocessors"),
    metric("verdigris_gpu_memory_clock_hertz", Gauge, Unit::Hertz, &["device"], "clock of the memory"),
    metric(
        "verdigris_gpu_throttled",
        Gauge,
        Unit::Count,
        &["device", "reason"],
        "1 while clocks are held down; reason: power, thermal, hw_slowdown, sync_boost, other",
    ),
    metric("verdigris_gpu_temperature_celsius", Gauge, Unit::Celsius, &["device"], "temperature of the chip"),
    metric("verdigris_gpu_power_watts", Gauge, Unit::Watts, &["device"], "power drawn"),
    metric(
        "verdigris_gpu_ecc_errors_total",
        Counter,
        Unit::Count,
        &["device", "kind"],
        "memory errors since the driver was loaded or, where the device was reset while the exporter ran, in all; kind: corrected, uncorrected",
    ),
    metric(
        "verdigris_gpu_xid_events_total",
        Counter,
        Unit::Count,
        &["device", "xid"],
        "critical events that the driver reported while the exporter ran, by NVIDIA's number",
    ),
    metric(
        "verdigris_gpu_xid_watched",
        Gauge,
        Unit::Count,
        &["device"],
        "1 while critical events of the device are counted, 0 while the driver refuses to tell them",
    ),
    metric("verdigris_gpu_mig_enabled", Gauge, Unit::Count, &["device"], "1 if the device is partitioned"),
    metric(
        "verdigris_serve_requests_total",
        Counter,
        Unit::Count,
        &["model", "outcome"],
        "requests answered; outcome: ok, bad_request, too_large, queue_full, deadline, cancelled, shutting_down, failed",
    ),
    metric(
        "verdigris_serve_request_seconds",
        Histogram,
        Unit::Seconds,
        &["model"],
        "from the last byte of a request to the first of its answer, of those that got a result; what was refused or cancelled is in verdigris_serve_requests_total alone",
    ),
    metric("verdigris_serve_queue_seconds", Histogram, Unit::Seconds, &["model"], "time that a request waited for its batch"),
    metric("verdigris_serve_batch_rows", Histogram, Unit::Count, &["model"], "rows of requests in a batch, padding not counted"),
    metric("verdigris_serve_rows_total", Counter, Unit::Count, &["model"], "rows answered"),
    metric("verdigris_serve_queue_rows", Gauge, Unit::Count, &["model"], "rows that wait for a batch"),
    metric(
        "verdigris_telemetry_lost_total",
        Counter,
        Unit::Count,
        &["file"],
        "lines and events that a file of telemetry did not take, since it was full or could not be written; file: events, trace",
    ),
    metric(
        "verdigris_series_refused_total",
        Counter,
        Unit::Count,
        &[],
        "values given under labels beyond the bound on series, and not kept",
    ),
];

/// The metric of that name.
pub fn metric_of(name: &str) -> Option<&'static Metric> {
    METRICS.iter().find(|metric| metric.name == name)
}

/// `docs/metrics.md`.
pub fn page() -> String {
    let mut text = String::from(
        "# Metrics\n\n\
         Written from `crates/verdigris/src/observe/table.rs` by `cargo run -p verdigris --example metrics`; a test holds it. How to have them: [telemetry.md](telemetry.md); what to do \
         about them: [runbook.md](runbook.md).\n\n\
         Labels have few values by construction: `op` is the kind of a problem (gemm, conv, map, reduce, scan, softmax, pool, norm, batch_norm, attention, resample; on the CPU that of the engine), \
         `engine` an engine's name, `dtype` the element type of the first operand, `device` `cpu` or `cuda:N`. A shape is never a label.\n\n\
         | name | kind | labels | meaning |\n|---|---|---|---|\n",
    );
    for metric in METRICS {
        let labels = if metric.labels.is_empty() { "–".to_owned() } else { metric.labels.join(", ") };
        // Writing to a string does not fail.
        let _ = writeln!(text, "| {} | {} | {labels} | {} |", metric.name, metric.kind.word(), metric.help);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_keep_the_rules_of_prometheus() {
        let mut seen = HashSet::new();
        for Metric { name, kind, unit, labels, help } in METRICS {
            assert!(seen.insert(name), "{name} stands twice");
            assert!(name.starts_with("verdigris_") && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{name}");
            assert_eq!(name.ends_with("_total"), *kind == Counter, "{name} is a {}", kind.word());
            let suffix = match unit {
                Unit::Count => "",
                Unit::Seconds => "_seconds",
                Unit::Bytes => "_bytes",
                Unit::Ratio => "_ratio",
                Unit::Hertz => "_hertz",
                Unit::Celsius => "_celsius",
                Unit::Watts => "_watts",
            };
            assert!(name.ends_with(suffix), "{name} is in {unit:?}");
            assert!(labels.iter().all(|label| !label.is_empty() && *label != "le" && *label != "quantile"), "{name}");
            assert!(!help.is_empty() && !help.ends_with('.') && !help.contains('|'), "{name}: {help}");
        }
    }

    #[test]
    fn the_page_is_the_table() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md");
        let text = std::fs::read_to_string(path).expect("docs/metrics.md can be read");
        assert_eq!(text, page(), "write it again with `cargo run -p verdigris --example metrics`");
    }
}
