//! The developers' tools: verify, check, bench, fuzz, inspect.
//!
//! They judge and measure what the library does; nothing of them is part of it. Exit codes are those of `verdigris` ([`verdigris_cli`]).
#![forbid(unsafe_code)]

mod bench;
mod cases;
mod check;
mod check_graphs;
mod classes;
mod conformance;
mod fuzz;
mod inspect;
mod journal;
mod planted;
mod refusals;
mod sanitizers;
mod verify;
mod verify_bounds;
mod verify_catalog;
mod verify_extents;
mod verify_graphs;
mod verify_kinds;
mod verify_pairs;
mod verify_turns;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use verdigris_cli::exit_code;

/// The tools that judge and measure Verdigris.
#[derive(Parser)]
#[command(name = "workshop", version, propagate_version = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run every case on every engine in the interpreter, against the reference.
    Verify(verify::Arguments),
    /// Run every case on the GPU, against the reference.
    Check(check::Arguments),
    /// Measure against peers on the GPU, correctness first.
    Bench(bench::Arguments),
    /// Have the readers of files and requests read what nobody would write.
    Fuzz(fuzz::Arguments),
    /// Show what `verdigris inspect` shows, and what the kernels are made of.
    Inspect(inspect::Arguments),
}

fn main() -> ExitCode {
    let done = match Arguments::parse().command {
        Command::Verify(arguments) => verify::run(&arguments),
        Command::Check(arguments) => check::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Fuzz(arguments) => fuzz::run(&arguments),
        Command::Inspect(arguments) => inspect::run(&arguments),
    };
    exit_code("workshop", done)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Arguments::command().debug_assert();
    }
}
