//! The command line: doctor, verify, inspect, check, bench.
//!
//! Exit codes: 0 all is well (also where a command that needs a GPU is skipped for want of one), 1 something was found wrong, 2 the
//! command could not be carried out.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "printing is what a command line is for")]

mod bench;
mod cases;
mod device;
mod problem;
mod table;
mod verify;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Deep-learning primitives for NVIDIA GPUs.
#[derive(Parser)]
#[command(name = "verdigris", version, propagate_version = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure against peers on the GPU, correctness first.
    Bench(bench::Arguments),
    /// Run every case on every engine in the interpreter, against the reference.
    Verify(verify::Arguments),
}

fn main() -> ExitCode {
    let done = match Arguments::parse().command {
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Verify(arguments) => verify::run(&arguments),
    };
    match done {
        Ok(Verdict::Good) => ExitCode::SUCCESS,
        Ok(Verdict::Bad) => ExitCode::from(1),
        Err(error) => {
            eprintln!("verdigris: {}", chain(&error));
            ExitCode::from(2)
        }
    }
}

/// An error and its causes on one line, without those that the one before has already said.
fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let words = cause.to_string();
        if !text.contains(&words) {
            text += if text.is_empty() { "" } else { ": " };
            text += &words;
        }
    }
    text
}

/// What a command found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// Nothing wrong, or nothing to do.
    Good,
    /// Something is wrong; it was printed.
    Bad,
}
