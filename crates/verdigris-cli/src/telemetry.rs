//! What a command tells those who operate it, where the environment asks for it.

use std::time::Duration;

use anyhow::{Context, Result};
use verdigris::Config;
use verdigris::observe::Listen;
use verdigris_telemetry::{Guard, Settings, Telemetry};

/// Starts the exporters that the environment names; `None` where it names none. They end with what is given.
///
/// # Errors
/// An address or file that cannot be had: who asks to be told is not left without.
pub fn install(config: &Config) -> Result<Option<Guard>> {
    let telemetry = named(config)?;
    if telemetry.is_nothing() { Ok(None) } else { begin(config, telemetry).map(Some) }
}

/// As [`install`], whatever the environment names, with what the GPUs say of themselves: for a program that shows its metrics itself.
///
/// # Errors
/// As [`install`].
pub fn install_for_service(config: &Config) -> Result<Guard> {
    begin(config, named(config)?.nvml(Duration::from_secs(1)))
}

/// What the environment names.
fn named(config: &Config) -> Result<Telemetry> {
    let settings = Settings {
        metrics: config.metrics.clone(),
        trace: config.trace.clone(),
        events: config.events.clone(),
        otlp: None,
        nvtx_injection: config.nvtx_injection.clone(),
    };
    Telemetry::from_settings(&settings).context("telemetry")
}

fn begin(config: &Config, telemetry: Telemetry) -> Result<Guard> {
    let listen = Listen { sampling: config.sampling, guards: config.guards, ..Listen::default() };
    let guard = telemetry.listen(listen).install().context("telemetry")?;
    if let Some(address) = guard.prometheus_address() {
        eprintln!("metrics on http://{address}/metrics");
    }
    for absent in guard.absent() {
        eprintln!("{absent}");
    }
    Ok(guard)
}
