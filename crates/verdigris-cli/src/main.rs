//! The command line: demo, run, doctor, inspect, tune.
#![forbid(unsafe_code)]

mod demo;
mod doctor;
mod run;
mod tensor_files;
mod tune;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use verdigris_cli::{exit_code, inspect};

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
}

fn main() -> ExitCode {
    let done = match Arguments::parse().command {
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Tune(arguments) => tune::run(&arguments),
        Command::Run(arguments) => run::run(&arguments),
    };
    exit_code("verdigris", done)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Arguments::command().debug_assert();
    }
}
