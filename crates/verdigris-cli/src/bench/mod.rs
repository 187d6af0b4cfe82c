//! Measuring on the GPU: correctness first, then ours and the peer in turns on the same buffers.

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

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::{Subcommand, ValueEnum};
use verdigris::Config;
use verdigris_engines::engine::Knobs;
use verdigris_reference::bench_list;

use crate::problem::{Named, ProblemArguments, knobs};
use crate::{Verdict, device};

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
    /// What the library itself costs: compiling, loading, choosing, submitting.
    Overhead(overhead::Arguments),
}

/// Options of `bench gemm`.
#[derive(clap::Args)]
pub(crate) struct GemmArguments {
    #[command(flatten)]
    problem: ProblemArguments,
    /// The problem list; default bench/lists/gemm.toml in the current folder, else the copy inside this program.
    #[arg(long)]
    list: Option<PathBuf>,
    /// Only these classes of the list (square, deepbench, …).
    #[arg(long, value_delimiter = ',')]
    class: Vec<String>,
    /// Only these types (bf16, f16, tf32, fp8, int8; with --m --n --k any element type, default bf16).
    #[arg(long, value_delimiter = ',')]
    dtype: Vec<String>,
    /// Only problems whose name contains this.
    #[arg(long)]
    filter: Option<String>,
    #[command(flatten)]
    run: RunArguments,
}

/// Options of every suite that measures problems.
#[derive(clap::Args)]
pub(crate) struct RunArguments {
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
        Ok(())
    }
}

/// Carries out `bench`.
pub(crate) fn run(arguments: &Arguments) -> Result<Verdict> {
    match &arguments.suite {
        Suite::Gemm(arguments) => gemm(arguments),
        Suite::Conv(arguments) => conv::run(arguments),
        Suite::Overhead(arguments) => overhead::run(arguments),
    }
}

fn gemm(arguments: &GemmArguments) -> Result<Verdict> {
    let problems = problems(arguments)?;
    arguments.run.check()?;
    let config = Config::from_environment()?;
    let Some(handle) = device::open("bench gemm", &config, arguments.run.json)? else {
        return Ok(Verdict::Good);
    };
    suite::run(&handle, &config, arguments, &problems)
}

/// The list that stands in the repository, for a program that was copied without it.
const EMBEDDED: &str = include_str!("../../../../bench/lists/gemm.toml");

fn problems(arguments: &GemmArguments) -> Result<Vec<Named>> {
    if arguments.problem.is_given() {
        let dtypes = if arguments.dtype.is_empty() { vec!["bf16".to_owned()] } else { arguments.dtype.clone() };
        return dtypes.iter().map(|dtype| arguments.problem.problem(dtype)).collect();
    }
    let beside = PathBuf::from("bench/lists/gemm.toml");
    let list = match &arguments.list {
        Some(path) => bench_list::load_file(path).with_context(|| format!("the problem list {}", path.display()))?,
        None if beside.is_file() => bench_list::load_file(&beside).with_context(|| format!("the problem list {}", beside.display()))?,
        None => bench_list::load(EMBEDDED)?,
    };
    for class in &arguments.class {
        if !list.iter().any(|row| row.class == *class) {
            let mut known: Vec<&str> = list.iter().map(|row| row.class.as_str()).collect();
            known.dedup();
            bail!("--class {class}: the list has {}", known.join(", "));
        }
    }
    for dtype in &arguments.dtype {
        if !list.iter().any(|row| row.dtype.name() == dtype) {
            bail!("--dtype {dtype}: the list has bf16, f16, tf32, fp8 and int8; other types need --m, --n and --k");
        }
    }
    let problems: Vec<Named> = list
        .into_iter()
        .filter(|row| arguments.class.is_empty() || arguments.class.contains(&row.class))
        .filter(|row| arguments.dtype.is_empty() || arguments.dtype.iter().any(|dtype| dtype == row.dtype.name()))
        .filter(|row| arguments.filter.as_ref().is_none_or(|text| row.name.contains(text.as_str())))
        .map(|row| Named { class: row.class, dtype: row.dtype.name().to_owned(), name: row.name, problem: row.problem })
        .collect();
    if problems.is_empty() {
        bail!("no problem of the list is left by --class, --dtype and --filter");
    }
    Ok(problems)
}
