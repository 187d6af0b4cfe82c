//! Measuring on the GPU: correctness first, then ours and the peer in turns on the same buffers.

mod choice;
mod conv;
mod conv_sample;
mod correctness;
mod data;
mod measure;
mod overhead;
mod peers;
pub(crate) mod record;
mod report;
mod run;
mod suite;
mod workload;

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::{Subcommand, ValueEnum};
use verdigris::Config;
use verdigris_engines::engine::Knobs;

use verdigris_cli::problem::{check_engine, knobs};
use verdigris_cli::selection::GemmSelection;
use verdigris_cli::{Verdict, device};

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    suite: Suite,
}

#[derive(Subcommand)]
enum Suite {
    /// Matrix products, against cuBLASLt.
    Gemm(Box<GemmArguments>),
    /// Convolutions, against the matrix product of the same extents.
    Conv(Box<conv::Arguments>),
    /// The choice at once against the measured one, on problems drawn at random.
    Choice(choice::Arguments),
    /// What the cost model reads of the configs in records of `bench choice`, for its fit.
    Features(choice::features::Arguments),
    /// What the library itself costs: compiling, loading, choosing, submitting.
    Overhead(overhead::Arguments),
    /// The problems that an application ran (what VERDIGRIS_RECORD wrote), as chosen at once and as measured, weighted by how often each was executed.
    Workload(workload::Arguments),
}

/// Options of `bench gemm`.
#[derive(clap::Args)]
pub(crate) struct GemmArguments {
    #[command(flatten)]
    problems: GemmSelection,
    #[command(flatten)]
    run: RunArguments,
}

/// Options of every suite that measures problems.
#[derive(clap::Args)]
pub(crate) struct RunArguments {
    /// Only the way that a plan at once would take, remembered choices included.
    #[arg(long, conflicts_with_all = ["engine", "knobs", "all_knobs"])]
    pub(super) instant: bool,
    /// Only this engine.
    #[arg(long)]
    pub(super) engine: Option<String>,
    /// Only settings with these values, as `name=value,name=value`.
    #[arg(long, value_parser = knobs)]
    pub(super) knobs: Option<Knobs>,
    /// Time every setting of every engine that accepts, and compare the fastest with the peer.
    #[arg(long)]
    pub(super) all_knobs: bool,
    /// With --all-knobs: only the N settings of each engine that are fastest by estimate.
    #[arg(long)]
    pub(super) top: Option<usize>,
    /// Whom to compare with.
    #[arg(long, value_enum, default_value_t = Peer::Cublaslt)]
    pub(super) peer: Peer,
    /// Seconds of measurement a problem.
    #[arg(long, default_value_t = 0.3)]
    pub(super) seconds: f64,
    /// Seconds for the whole run; problems that no time is left for are counted.
    #[arg(long)]
    pub(super) budget: Option<f64>,
    /// Where the record goes; default bench/record/DEVICE/DATE-SUITE.jsonl. `none` keeps no record.
    #[arg(long)]
    pub(super) record: Option<PathBuf>,
    /// Print rows as JSON instead of a table.
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Peer {
    /// Nobody.
    None,
    /// cuBLASLt: the fastest of its heuristic's first eight answers.
    Cublaslt,
}

impl RunArguments {
    /// Checks what the parser cannot.
    fn check(&self) -> Result<()> {
        if !(self.seconds > 0.0 && self.seconds.is_finite()) {
            bail!("--seconds {}: more than 0", self.seconds);
        }
        check_engine(self.engine.as_deref())
    }
}

/// Carries out `bench`.
pub(crate) fn run(arguments: &Arguments) -> Result<Verdict> {
    match &arguments.suite {
        Suite::Gemm(arguments) => gemm(arguments),
        Suite::Conv(arguments) => conv::run(arguments),
        Suite::Choice(arguments) => choice::run(arguments),
        Suite::Features(arguments) => choice::features::run(arguments),
        Suite::Overhead(arguments) => overhead::run(arguments),
        Suite::Workload(arguments) => workload::run(arguments),
    }
}

fn gemm(arguments: &GemmArguments) -> Result<Verdict> {
    let problems = arguments.problems.problems()?;
    arguments.run.check()?;
    let config = Config::from_environment()?;
    let Some(handle) = device::open("bench gemm", &config, arguments.run.json)? else {
        return Ok(Verdict::Good);
    };
    suite::run(&handle, &config, arguments, &problems)
}
