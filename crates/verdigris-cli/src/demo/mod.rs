//! `verdigris demo`: the library's main job on real input.

mod data;
mod digits;
mod model;
mod report;
pub(crate) mod runner;

use clap::Subcommand;

use crate::Verdict;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Train a small convolutional network on handwritten digits and show what it learned.
    Digits(digits::Arguments),
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<Verdict> {
    match &arguments.what {
        What::Digits(arguments) => digits::run(arguments),
    }
}
