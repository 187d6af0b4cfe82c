//! What a command tells those who operate it, where the environment asks for it.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use verdigris::Config;
use verdigris::observe::Listen;
use verdigris_telemetry::{Error, Guard, MetricsPush, Registry, Settings, Severity, Telemetry};

/// Starts the exporters that the environment names; `None` where it names none. They end with what is given.
///
/// # Errors
/// An address or file that cannot be had: who asks to be told is not left without.
pub fn install(config: &Config) -> Result<Option<Guard>> {
    let telemetry = named(config)?;
    if telemetry.is_nothing() { Ok(None) } else { begin(config, telemetry).map(Some) }
}

/// As [`install`], whatever the environment names, with what the GPUs say of themselves, and events of that severity on standard error: for a program that
/// shows its metrics itself, and whose log is read.
///
/// # Errors
/// As [`install`].
pub fn install_for_service(config: &Config, least: Severity) -> Result<Guard> {
    begin(config, named(config)?.nvml(Duration::from_secs(1)).stderr_lines(least))
}

/// Pushes the metrics of a registry to the collector that the environment names; `None` where it names none.
///
/// # Errors
/// Headers or an endpoint that are none, and a collector where this program was built without the feature `otlp`.
pub fn push(config: &Config, registry: &Arc<Registry>) -> Result<Option<MetricsPush>> {
    let collector = settings(config).collector().context("telemetry")?;
    collector.map(|collector| collector.push_metrics(registry)).transpose().map_err(explained)
}

/// Whether what the environment names can be understood, and this program has what it asks for. Nothing is started.
///
/// # Errors
/// As [`install`], but for what is found only by starting: an address that is taken, a file that cannot be written.
pub fn check(config: &Config) -> Result<()> {
    let is_pushed = settings(config).collector().context("telemetry")?.is_some();
    if is_pushed && !cfg!(feature = "otlp") {
        return Err(explained(Error::NotBuilt { exporter: "OTLP", feature: "otlp" }));
    }
    named(config).map(|_| ())
}

/// What the environment names.
fn named(config: &Config) -> Result<Telemetry> {
    Telemetry::from_settings(&settings(config)).context("telemetry")
}

fn settings(config: &Config) -> Settings {
    Settings {
        metrics: config.metrics.clone(),
        trace: config.trace.clone(),
        events: config.events.clone(),
        otlp: config.otlp.clone(),
        otlp_headers: config.otlp_headers.clone(),
        service: config.service.clone(),
        nvtx_injection: config.nvtx_injection.clone(),
    }
}

/// Which variable it was, where that is not said by the error.
fn explained(error: Error) -> anyhow::Error {
    let is_collector = matches!(error, Error::NotBuilt { .. } | Error::Endpoint { .. } | Error::Otlp { .. });
    anyhow::Error::new(error).context(if is_collector { "telemetry, by OTEL_EXPORTER_OTLP_ENDPOINT" } else { "telemetry" })
}

fn begin(config: &Config, telemetry: Telemetry) -> Result<Guard> {
    let listen = Listen { sampling: config.sampling, guards: config.guards, ..Listen::default() };
    let guard = telemetry.listen(listen).install().map_err(explained)?;
    if let Some(address) = guard.prometheus_address() {
        eprintln!("metrics on http://{address}/metrics");
    }
    for absent in guard.absent() {
        eprintln!("{absent}");
    }
    Ok(guard)
}
