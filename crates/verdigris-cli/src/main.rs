//! The command line: demo, run, doctor, inspect, tune, canary, gate, matrix, serve-metrics, serve.
#![forbid(unsafe_code)]

mod canary;
mod demo;
mod doctor;
mod ending;
mod gate;
mod matrix;
mod run;
#[cfg(feature = "serve")]
mod serve;
mod serve_metrics;
mod tune;

use std::process::ExitCode;

use anyhow::ensure;
use clap::{Parser, Subcommand};
use verdigris::Config;
use verdigris_cli::{Verdict, exit_code, inspect, telemetry};
use verdigris_telemetry::Guard;

use ending::Ending;

/// Deep-learning primitives for NVIDIA GPUs.
#[derive(Parser)]
#[command(name = "verdigris", version, propagate_version = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// Keep the page of metrics that VERDIGRIS_METRICS names when the work is done, until ctrl-c.
    #[arg(long, global = true)]
    hold: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Say what is here, what works here, and why the rest does not.
    Doctor(doctor::Arguments),
    /// Train a network on real images, and show which engines did it.
    Demo(demo::Arguments),
    /// Show which engines take a problem, and what would run.
    Inspect(inspect::InspectArguments),
    /// Measure the ways to compute problems on the GPU, and remember the fastest.
    Tune(tune::Arguments),
    /// Run any graph on tensors from files.
    Run(run::Arguments),
    /// See whether this machine computes right, repeats, and is as fast as it was.
    Canary(canary::Arguments),
    /// Say which machines, drivers and frameworks this build was tested with.
    Matrix(matrix::Arguments),
    /// Hold the times of one record against those of another.
    Gate(gate::Arguments),
    /// Serve what the GPUs say of themselves, for Prometheus to scrape.
    ServeMetrics(serve_metrics::Arguments),
    /// Serve models over HTTP, in dynamic batches.
    #[cfg(feature = "serve")]
    Serve(serve::Arguments),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    exit_code("verdigris", run_command(arguments.command, arguments.hold))
}

fn run_command(command: Command, hold: bool) -> anyhow::Result<Verdict> {
    // These run nothing, and a wrong variable is theirs to tell.
    let telemetry = match &command {
        Command::Doctor(_) | Command::Inspect(_) | Command::Gate(_) | Command::Matrix(_) | Command::ServeMetrics(_) => None,
        // It shows its metrics itself.
        #[cfg(feature = "serve")]
        Command::Serve(_) => None,
        _ => telemetry::install(&Config::from_environment()?)?,
    };
    let page = telemetry.as_ref().and_then(Guard::prometheus_address);
    // Before the work, which may be long.
    ensure!(
        !hold || page.is_some(),
        "--hold keeps the page of metrics, and this command has none: one that computes has it with VERDIGRIS_METRICS=9464, `serve` and `serve-metrics` stay by themselves"
    );
    let verdict = carry_out(command)?;
    if let (true, Some(page)) = (hold, page) {
        let ending = Ending::watch()?;
        eprintln!("done; the page stays at http://{page}/metrics until ctrl-c");
        eprintln!("ended by {}", ending.wait());
    }
    Ok(verdict)
}

fn carry_out(command: Command) -> anyhow::Result<Verdict> {
    match command {
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Tune(arguments) => tune::run(&arguments),
        Command::Run(arguments) => run::run(&arguments),
        Command::Canary(arguments) => canary::run(&arguments),
        Command::Gate(arguments) => gate::run(&arguments),
        Command::Matrix(arguments) => matrix::run(&arguments),
        Command::ServeMetrics(arguments) => serve_metrics::run(&arguments),
        #[cfg(feature = "serve")]
        Command::Serve(arguments) => serve::run(&arguments),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Arguments::command().debug_assert();
    }
}
