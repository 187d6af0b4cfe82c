//! The command line: demo, run, doctor, verify, inspect, check, bench, tune.
//!
//! Exit codes: 0 all is well (also where a command that needs a GPU is skipped for want of one), 1 something was found wrong, 2 the
//! command could not be carried out.
#![forbid(unsafe_code)]

/// Prints a line to stdout; like `println!`, but a reader that has gone away (`| head`) ends the program instead of a panic.
macro_rules! say {
    () => { $crate::table::say_text("\n") };
    ($($words:tt)*) => { $crate::table::say_text(&(format!($($words)*) + "\n")) };
}

mod bench;
mod cases;
mod check;
mod check_graphs;
mod classes;
mod conformance;
mod demo;
mod device;
mod doctor;
mod inspect;
mod journal;
mod planted;
mod problem;
mod refusals;
mod run;
mod sanitizers;
mod selection;
mod table;
mod tensor_files;
mod tune;
mod verify;
mod verify_bounds;
mod verify_catalog;
mod verify_graphs;

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
    /// Say what is here, what works here, and why the rest does not.
    Doctor(doctor::Arguments),
    /// Train a network on real images, and show which engines did it.
    Demo(demo::Arguments),
    /// Show who takes a problem, what would run, and what it is made of.
    Inspect(inspect::Arguments),
    /// Run every case on the GPU, against the reference.
    Check(check::Arguments),
    /// Measure against peers on the GPU, correctness first.
    Bench(bench::Arguments),
    /// Measure the ways to compute problems on the GPU, and remember the fastest.
    Tune(tune::Arguments),
    /// Run any graph on tensors from files.
    Run(run::Arguments),
    /// Run every case on every engine in the interpreter, against the reference.
    Verify(verify::Arguments),
}

fn main() -> ExitCode {
    let done = match Arguments::parse().command {
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Inspect(arguments) => inspect::run(&arguments),
        Command::Check(arguments) => check::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Tune(arguments) => tune::run(&arguments),
        Command::Run(arguments) => run::run(&arguments),
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
