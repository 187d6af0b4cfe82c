//! `check`: the cases on the device, against the reference; and its instructions, against the interpreter.
//!
//! What the interpreter runs, runs here too: outputs are full of a sentinel before, the workspace is full of ones (its contents are
//! undefined at entry), and a result that is noted as deterministic is computed again ten times and must come out the same to the bit.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use indicatif::{ProgressBar, ProgressStyle};
use rayon::prelude::*;
use verdigris::{Binding, Config, Handle, Limits, Ranked, Settings};
use verdigris_cuda::DeviceBuffer;
use verdigris_kir::program::KernelRef;

use crate::cases::{self, Content, Prepared};
use crate::{check_graphs, classes, conformance, planted, sanitizers};
use verdigris_cli::problem::check_engine;
use verdigris_cli::table::{self, Align, alarm};
use verdigris_cli::{Verdict, device, say};

/// Further executions of a deterministic way.
const REPEATS: usize = 10;

/// What to check.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    family: Family,
}

#[derive(Subcommand)]
enum Family {
    /// Matrix products.
    Gemm(GemmArguments),
    /// The graphs of all other case files.
    Graphs(check_graphs::GraphsArguments),
    /// Random graphs; what fails is shrunk.
    Fuzz(check_graphs::FuzzArguments),
    /// Every instruction, against the interpreter, on the same inputs.
    Conformance(conformance::Arguments),
    /// One case for each class of kernels that the engines have.
    Classes(classes::Arguments),
    /// The classes under the tools of compute-sanitizer, each of which must first find what is planted for it.
    Sanitizers(sanitizers::Arguments),
    /// A kernel with one fault, for the tool that must find it.
    Planted(planted::Arguments),
    /// Planted mistakes, each of which something must find: `cargo xtask mutants`, from a checkout.
    Mutants(MutantsArguments),
}

#[derive(clap::Args)]
struct MutantsArguments {
    /// What `cargo xtask mutants` takes: a filter, --sample, --day, --seeds, --json, --record.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

#[derive(clap::Args)]
struct GemmArguments {
    /// Only cases whose id contains this.
    #[arg(default_value = "")]
    filter: String,
    /// Every setting of every engine, not the default alone.
    #[arg(long)]
    all_knobs: bool,
    /// With --all-knobs: of each engine at most so many settings a case, other ones for each case.
    #[arg(long)]
    top: Option<usize>,
    /// Only this engine.
    #[arg(long)]
    engine: Option<String>,
    /// A case file in place of the repository's.
    #[arg(long)]
    cases: Option<PathBuf>,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

/// Carries out `check`.
pub(crate) fn run(arguments: &Arguments) -> Result<Verdict> {
    match &arguments.family {
        Family::Gemm(arguments) => gemm(arguments),
        Family::Graphs(arguments) => check_graphs::graphs(arguments),
        Family::Fuzz(arguments) => check_graphs::fuzz(arguments),
        Family::Conformance(arguments) => conformance::run(arguments),
        Family::Classes(arguments) => classes::run(arguments),
        Family::Sanitizers(arguments) => sanitizers::run(arguments),
        Family::Planted(arguments) => planted::run(arguments),
        Family::Mutants(arguments) => mutants(arguments),
    }
}

/// Mutants are built into a workshop of their own, which is the work of `xtask`.
fn mutants(arguments: &MutantsArguments) -> Result<Verdict> {
    let status = std::process::Command::new("cargo").args(["xtask", "mutants"]).args(&arguments.arguments).status();
    let status = status.context("starting `cargo xtask mutants`, which wants a checkout of the sources and cargo")?;
    Ok(if status.success() { Verdict::Good } else { Verdict::Bad })
}

fn gemm(arguments: &GemmArguments) -> Result<Verdict> {
    let cases = cases::load(Some("gemm"), arguments.cases.as_ref(), &arguments.filter)?;
    check_engine(arguments.engine.as_deref())?;
    let config = Config::from_environment()?;
    let Some(handle) = device::open("check gemm", &config, arguments.json)? else {
        return Ok(Verdict::Good);
    };
    let prepared: Vec<Prepared> = cases.into_par_iter().map(Prepared::new).collect::<Result<_>>()?;
    let settings = if arguments.all_knobs { Settings::All } else { Settings::First };
    let mut works: Vec<(usize, Ranked)> = Vec::new();
    let mut refusals: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    for (number, prepared) in prepared.iter().enumerate() {
        let limits = Limits { engine: arguments.engine.clone(), settings: settings.clone(), ..Limits::default() };
        let survey = handle.survey(&prepared.case.problem, &limits)?;
        for refusal in &survey.refusals {
            *refusals.entry((refusal.engine.name, refusal.reason.name())).or_default() += 1;
        }
        let mut by_engine: BTreeMap<&str, Vec<Ranked>> = BTreeMap::new();
        for way in survey.ranked {
            by_engine.entry(way.engine.name).or_default().push(way);
        }
        for ways in by_engine.into_values() {
            let (count, most) = (ways.len(), arguments.top.unwrap_or(usize::MAX));
            // A case takes up where the one before left off, so that all settings have their turn.
            let first = if most < count { number * most % count } else { 0 };
            works.extend(ways.into_iter().cycle().skip(first).take(most.min(count)).map(|way| (number, way)));
        }
    }
    let failures = compile(&handle, &works);

    let progress = ProgressBar::new(works.len() as u64);
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} eta {eta} {msg}");
    progress.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let mut faults: Vec<(String, String)> = Vec::new();
    let mut runs: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    let mut kernels = std::collections::BTreeSet::new();
    for (number, way) in &works {
        let prepared = &prepared[*number];
        let id = format!("{} {} {}", prepared.case.id, way.engine, way.knobs);
        progress.set_message(id.clone());
        kernels.extend(way.program.launches().map(|launch| launch.kernel.name().to_owned()));
        let failed = way.program.launches().find_map(|launch| failures.get(launch.kernel.name()));
        let fault = match failed {
            Some(error) => Some(error.clone()),
            None => match execute(&handle, prepared, way) {
                Ok(fault) => fault,
                Err(error) => {
                    // A fault of a kernel takes the context with it; what is left could only fail the same way.
                    if let Err(lost) = handle.context().synchronize() {
                        progress.finish_and_clear();
                        bail!(
                            "{id}: {error:#}; the context is lost ({lost}), {} of {} runs were not made",
                            works.len() - progress.position() as usize,
                            works.len()
                        );
                    }
                    Some(format!("{error:#}"))
                }
            },
        };
        let (count, repeated) = runs.entry(way.engine.name).or_default();
        *count += 1;
        *repeated += u64::from(way.notes.deterministic);
        faults.extend(fault.map(|fault| (id, fault)));
        progress.inc(1);
    }
    progress.finish_and_clear();

    if arguments.json {
        let faults: Vec<_> = faults.iter().map(|(id, message)| serde_json::json!({ "id": id, "message": message })).collect();
        let refusals: Vec<_> = refusals
            .iter()
            .map(|((engine, reason), count)| serde_json::json!({ "engine": engine, "reason": reason, "count": count }))
            .collect();
        let properties = handle.context().properties();
        say!(
            "{}",
            serde_json::json!({
                "machine": format!("{} {}", properties.name, properties.uuid), "kernels": kernels.len(), "cases": works.len(),
                "faults": faults, "refusals": refusals, "source": verdigris_engines::SOURCE_HASH,
            })
        );
    } else {
        let rows: Vec<Vec<String>> =
            runs.iter().map(|(engine, (count, repeated))| vec![(*engine).to_owned(), count.to_string(), repeated.to_string()]).collect();
        table::print(&[("engine", Align::Left), ("runs", Align::Right), ("repeated", Align::Right)], &rows);
        say!();
        let rows: Vec<Vec<String>> =
            refusals.iter().map(|((engine, reason), count)| vec![(*engine).to_owned(), (*reason).to_owned(), count.to_string()]).collect();
        table::print(&[("engine", Align::Left), ("refused for", Align::Left), ("cases", Align::Right)], &rows);
        say!();
        for (id, message) in &faults {
            say!("{}\n  {message}", alarm(id));
        }
        say!("{} kernels, {} cases, {} faults", kernels.len(), works.len(), faults.len());
    }
    Ok(if faults.is_empty() { Verdict::Good } else { Verdict::Bad })
}

/// Loads all kernels, side by side. Gives what went wrong, by kernel.
fn compile(handle: &Handle, works: &[(usize, Ranked)]) -> HashMap<String, String> {
    let mut kernels: HashMap<&str, &KernelRef> = HashMap::new();
    for (_, way) in works {
        kernels.extend(way.program.launches().map(|launch| (launch.kernel.name(), &launch.kernel)));
    }
    let kernels: Vec<&KernelRef> = kernels.into_values().collect();
    let progress = ProgressBar::new(kernels.len() as u64);
    progress
        .set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} kernels {elapsed}").unwrap_or_else(|_| ProgressStyle::default_bar()));
    let load = |kernel: &&KernelRef| {
        let failed = handle.loader().kernel(kernel).err().map(|error| (kernel.name().to_owned(), error.to_string()));
        progress.inc(1);
        failed
    };
    let failures = kernels.par_iter().filter_map(load).collect();
    progress.finish_and_clear();
    failures
}

/// Runs a way on the device; what is wrong with its results.
pub(crate) fn execute(handle: &Handle, prepared: &Prepared, way: &Ranked) -> Result<Option<String>> {
    let (pool, stream) = (handle.pool(), handle.stream());
    let plan = handle.load(&prepared.case.problem, way)?;
    let contents = prepared.contents();
    let mut buffers: Vec<DeviceBuffer> = Vec::new();
    for content in &contents {
        let bytes = match content {
            Content::Bytes(bytes) => *bytes,
            Content::Scalar(_) | Content::Integer(_) => &[],
        };
        buffers.push(pool.alloc_from(stream, bytes)?);
    }
    let mut workspace = pool.alloc(stream, plan.workspace_bytes())?;
    let mut first: Option<Vec<Vec<u8>>> = None;
    let times = if way.notes.deterministic { 1 + REPEATS } else { 1 };
    for time in 0..times {
        workspace.fill(stream, 0xff)?;
        if time > 0 {
            for slot in prepared.outputs() {
                if let Content::Bytes(bytes) = contents[slot] {
                    buffers[slot].upload(stream, 0, bytes)?;
                }
            }
        }
        let bindings: Vec<Binding<'_>> = contents
            .iter()
            .zip(&buffers)
            .map(|(content, buffer)| match content {
                Content::Bytes(_) => Binding::Buffer(buffer.slice()),
                Content::Scalar(value) => Binding::Scalar(*value),
                Content::Integer(value) => Binding::Integer(*value),
            })
            .collect();
        plan.execute(stream, &bindings, workspace.slice())?;
        stream.synchronize().context("after the launch")?;
        let outputs: Vec<Vec<u8>> = prepared.outputs().map(|slot| buffers[slot].download_all(stream)).collect::<Result<_, _>>()?;
        match &first {
            None => {
                let by_slot: HashMap<usize, &Vec<u8>> = prepared.outputs().zip(&outputs).collect();
                if let Some(fault) = prepared.judge(|slot| Ok(by_slot[&slot].clone()))? {
                    return Ok(Some(fault));
                }
                first = Some(outputs);
            }
            Some(first) if *first != outputs => {
                return Ok(Some(format!("noted as deterministic, but execution {} gives other bits than the first", time + 1)));
            }
            Some(_) => {}
        }
    }
    Ok(None)
}
