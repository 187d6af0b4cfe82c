//! `verdigris demo`: the library's main job on real input.

mod data;
mod digits;
mod model;
mod net;
mod report;
mod runner;
#[cfg(feature = "serve")]
mod served;

use clap::Subcommand;

#[cfg(feature = "serve")]
pub(crate) use served::digits_model;
use verdigris_cli::Verdict;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Train a small convolutional network on handwritten digits and show what it learned.
    Digits(digits::Arguments),
    /// Run the layers of ResNet-50 forward and backward with random weights, and time each.
    Net(net::Arguments),
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<Verdict> {
    match &arguments.what {
        What::Digits(arguments) => digits::run(arguments),
        What::Net(arguments) => net::run(arguments),
    }
}
