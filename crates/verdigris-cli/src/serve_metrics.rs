//! `verdigris serve-metrics`: what the GPUs of this machine say of themselves, for Prometheus to scrape.
//!
//! It is a process of its own beside those that compute: it makes no context on any device and takes none of its memory. What a process counts of
//! its own work is told by that process (`VERDIGRIS_METRICS`).

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use metrics::{Key, Label, Level, Metadata, Recorder};
use verdigris::Config;
use verdigris_telemetry::nvml::{Collector, DeviceNames};
use verdigris_telemetry::{Bounds, Exporter, ListenAddress, Registry, Severity, log_to_stderr};

use crate::ending::Ending;
use verdigris_cli::{Verdict, mention, say, telemetry};

/// Options of `serve-metrics`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Where to listen: a port, or an address with one. Only this machine can connect unless another address is written out.
    #[arg(long, value_name = "ADDRESS", default_value_t)]
    listen: ListenAddress,
    /// Seconds between two readings of the devices.
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    interval: f64,
    /// What is written to standard error as lines of JSON: off, error, warning (and errors) or information (and both).
    #[arg(long, default_value_t, value_name = "SEVERITY")]
    log: Severity,
    /// Print one reading as JSON, and end.
    #[arg(long)]
    json: bool,
}

/// Carries out `serve-metrics`.
pub(crate) fn run(arguments: &Arguments) -> Result<Verdict> {
    let seconds = arguments.interval;
    if !(0.1..=3600.0).contains(&seconds) {
        bail!("--interval {seconds}: between 0.1 and 3600 seconds");
    }
    let config = Config::from_environment()?;
    log_to_stderr(arguments.log)?;
    let registry = Arc::new(Registry::new(Bounds::default()));
    let labels = vec![Label::new("version", env!("CARGO_PKG_VERSION")), Label::new("source", &verdigris_engines::SOURCE_HASH[..12])];
    let here = Metadata::new(module_path!(), Level::INFO, None);
    registry.register_gauge(&Key::from_parts("verdigris_build_info", labels), &here).set(1.0);
    let collector = Collector::of_library(Arc::clone(&registry), Duration::from_secs_f64(seconds), DeviceNames::ByNumber)?;
    let missing = collector.missing().map(ToString::to_string);
    if arguments.json {
        let mut report = registry.json();
        report["nvml"] = missing.map_or_else(|| serde_json::json!({ "state": "there" }), |reason| serde_json::json!({ "missing": reason }));
        say!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(Verdict::Good);
    }
    let _pushed = telemetry::push(&config, &registry)?;
    // Signals are taken before anybody is told that we are here.
    let ending = Ending::watch()?;
    let exporter = Exporter::start(registry, arguments.listen)?;
    mention!("metrics on http://{}/metrics", exporter.address());
    if !arguments.listen.is_loopback() {
        mention!("  every machine that reaches this address can read them");
    }
    if let Some(reason) = missing {
        mention!("  without devices: {reason}; looked for again every ten seconds");
    }
    let signal = ending.wait();
    drop(exporter);
    drop(collector);
    mention!("ended by {signal}");
    Ok(Verdict::Good)
}
