//! The command line: demo, run, doctor, inspect, tune, canary, gate, matrix, serve-metrics, serve.
#![forbid(unsafe_code)]

mod canary;
mod demo;
mod doctor;
mod gate;
mod matrix;
mod run;
#[cfg(feature = "serve")]
mod serve;
mod serve_metrics;
mod tune;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use verdigris::Config;
use verdigris_cli::{Verdict, exit_code, inspect, telemetry};

/// Deep-learning primitives for NVIDIA GPUs.
#[derive(Parser)]
#[command(name = "verdigris", version, propagate_version = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
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
    exit_code("verdigris", run_command(Arguments::parse().command))
}

fn run_command(command: Command) -> anyhow::Result<Verdict> {
    // These run nothing, and a wrong variable is theirs to tell.
    let _telemetry = match &command {
        Command::Doctor(_) | Command::Inspect(_) | Command::Gate(_) | Command::Matrix(_) | Command::ServeMetrics(_) => None,
        // It shows its metrics itself.
        #[cfg(feature = "serve")]
        Command::Serve(_) => None,
        _ => telemetry::install(&Config::from_environment()?)?,
    };
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
