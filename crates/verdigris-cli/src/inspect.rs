//! `inspect`: who takes a problem and who does not, and what would run. The exit code is 1 where nobody takes it.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use verdigris::select::RankedSummary;
use verdigris::{Config, Handle, Limits, Settings, Survey, survey};
use verdigris_engines::arch::Arch;
use verdigris_engines::engine::Knobs;
use verdigris_graph::{Key, Problem, json};
use verdigris_kir::program::{Address, Arg, Base, Program, Residency, Step};

use crate::Verdict;
use crate::problem::{ProblemArguments, check_engine, knobs};
use crate::table::say_text;

/// The most SMs of a described chip: what counts with them stays far from the ends of its types.
const MOST_SMS: u32 = 1 << 16;

/// Options of `inspect`.
#[derive(clap::Args)]
pub struct InspectArguments {
    #[command(flatten)]
    problem: ProblemArguments,
    /// Type of A and B, or a class (tf32, fp8, int8).
    #[arg(long, default_value = "bf16")]
    dtype: String,
    /// A problem in a JSON file in place of a size.
    #[arg(long)]
    file: Option<PathBuf>,
    /// Only this engine.
    #[arg(long)]
    engine: Option<String>,
    /// Only settings with these values, as `name=value,name=value`.
    #[arg(long, value_parser = knobs)]
    knobs: Option<Knobs>,
    /// List every setting of every engine.
    #[arg(long)]
    all_knobs: bool,
    /// For a described chip in place of the device: `h200`, or `virtual:N` with N SMs.
    #[arg(long)]
    arch: Option<String>,
    /// Print as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Carries out `inspect`.
///
/// # Errors
/// Arguments that name no problem, engine, setting or chip.
pub fn run(arguments: &InspectArguments) -> Result<Verdict> {
    let inspected = arguments.inspect(arguments.problem()?)?;
    if arguments.json {
        say!("{}", serde_json::to_string_pretty(&inspected.report()?)?);
    } else {
        inspected.print();
    }
    Ok(inspected.verdict())
}

/// A problem, the chip that it was asked about, and the answers.
pub struct Inspected {
    /// The problem.
    pub problem: Problem,
    /// The device, or the chip that was described.
    pub arch: Arch,
    /// The device, unless a chip was described or there is none.
    pub handle: Option<Handle>,
    /// What the environment says.
    pub config: Config,
    /// Who takes the problem, and who refuses.
    pub survey: Survey,
}

impl InspectArguments {
    /// Whether a size or a file names a problem.
    pub fn names_a_problem(&self) -> bool {
        self.file.is_some() || self.problem.is_given()
    }

    /// The problem that a size or a file names.
    ///
    /// # Errors
    /// None of them is given, or both are; a file that cannot be read, or that holds no problem.
    pub fn problem(&self) -> Result<Problem> {
        match (&self.file, self.problem.is_given()) {
            (Some(path), false) => {
                let mut beside = self.problem.beside_the_size();
                if self.dtype != "bf16" {
                    beside.push("--dtype");
                }
                if !beside.is_empty() {
                    bail!("{} with --file, which says all of its problem", beside.join(", "));
                }
                let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
                json::problem_from_json(&text).with_context(|| format!("the problem in {}", path.display()))
            }
            (None, true) => Ok(Problem::Gemm(self.problem.problem(&self.dtype)?.problem)),
            (None, false) => bail!("which problem? --m, --n and --k, or --file"),
            (Some(_), true) => bail!("--file and a size each name a problem; give one of them"),
        }
    }

    /// Asks the engines about the problem.
    ///
    /// # Errors
    /// An engine or a chip that there is not; a variable of the environment without a meaning.
    pub fn inspect(&self, problem: Problem) -> Result<Inspected> {
        let config = Config::from_environment()?;
        let handle = if self.arch.is_some() { None } else { Handle::open(&config).ok() };
        let arch = match (&self.arch, &handle) {
            (Some(text), _) => described(text)?,
            (None, Some(handle)) => handle.arch().clone(),
            (None, None) => Arch::h200(),
        };
        check_engine(self.engine.as_deref())?;
        let settings = match (&self.knobs, self.all_knobs) {
            (Some(knobs), _) => Settings::Matching(knobs.clone()),
            (None, true) => Settings::All,
            (None, false) => Settings::First,
        };
        let survey = survey(&problem, &arch, &Limits { engine: self.engine.clone(), settings, ..Limits::default() });
        Ok(Inspected { problem, arch, handle, config, survey })
    }
}

impl Inspected {
    /// Bad where no engine takes the problem, or none in the settings that were asked for.
    pub fn verdict(&self) -> Verdict {
        if self.survey.ranked.is_empty() { Verdict::Bad } else { Verdict::Good }
    }

    /// All of it as one JSON object.
    ///
    /// # Errors
    /// Never of a valid problem; the text of a problem is read back.
    pub fn report(&self) -> Result<serde_json::Value> {
        let refusals = self.survey.refusals.iter().map(|refusal| {
            serde_json::json!({
                "engine": refusal.engine.name, "reason": refusal.reason.name(), "seen": refusal.seen,
                "file": refusal.file, "line": refusal.line,
            })
        });
        Ok(serde_json::json!({
            "problem": serde_json::from_str::<serde_json::Value>(&json::problem_to_json(&self.problem))?,
            "key": Key::of(&self.problem).to_string(),
            "arch": self.arch,
            "ranked": self.survey.ranked.iter().map(RankedSummary::from).collect::<Vec<_>>(),
            "refusals": refusals.collect::<Vec<_>>(),
        }))
    }

    /// Prints the problem, the answers, and the program that would run.
    pub fn print(&self) {
        say!("problem {} on {}", Key::of(&self.problem), self.arch.name);
        say!("{}\n", json::problem_to_json(&self.problem));
        say_text(&self.survey.to_string());
        if let Some(best) = self.survey.ranked.first() {
            say!("\nthe first of these runs");
            say_text(&program_text(&best.program));
        }
    }
}

fn described(text: &str) -> Result<Arch> {
    match text.split_once(':') {
        None if text == "h200" => Ok(Arch::h200()),
        Some(("virtual", sms)) => match sms.parse() {
            Ok(sms) if (1..=MOST_SMS).contains(&sms) => Ok(Arch::virtual_device(sms)),
            _ => bail!("--arch {text}: `virtual:N` with N from 1 to {MOST_SMS}"),
        },
        _ => bail!("--arch {text}: `h200` or `virtual:N`"),
    }
}

fn program_text(program: &Program) -> String {
    let mut lines = String::new();
    let address = |address: &Address| {
        let base = match address.base {
            Base::Buffer(slot) => format!("slot {slot}"),
            Base::Scratch(index) => {
                program.scratch.get(index).map_or_else(|| format!("scratch {index}"), |piece| format!("scratch `{}`", piece.name))
            }
            Base::Constant(index) => format!("constant {index}"),
        };
        if address.offset_bytes == 0 { base } else { format!("{base} + {}", address.offset_bytes) }
    };
    for step in &program.steps {
        match step {
            Step::Launch(launch) | Step::SizedLaunch(launch, _) => {
                let body = launch.kernel.build();
                let [x, y, z] = launch.grid;
                lines += &format!(
                    "  launch {}: grid {x}x{y}x{z}, cluster {}, {} threads, {} bytes of shared memory{}{}\n",
                    launch.kernel.name(),
                    body.cluster,
                    body.threads,
                    body.shared_bytes,
                    if launch.overlap { ", overlaps the launch before" } else { "" },
                    if launch.residency == Residency::All { ", all resident" } else { "" },
                );
                for (param, arg) in body.params.iter().zip(launch.args.iter()) {
                    let value = match arg {
                        Arg::Scalar(ty, bits) => format!("{bits:#x} as {ty:?}"),
                        Arg::Divisor(divisor) => format!("division by {divisor}"),
                        Arg::Pointer(to) => address(to),
                        Arg::HostScalar(ty, slot) => format!("host scalar of slot {slot} as {ty:?}"),
                        Arg::ListAddress { list, entry } => format!("address of entry {entry} of list {list}"),
                        Arg::ListExtent { list, entry } => format!("extent of entry {entry} of list {list}"),
                        Arg::ListCount { list, first, most } => format!("entries of list {list} from {first} on, at most {most}"),
                        Arg::TensorMap(to, spec) => {
                            format!(
                                "map of {} {:?}, strides {:?} bytes, box {:?}",
                                address(to),
                                spec.dims,
                                spec.strides_bytes,
                                spec.decl.box_dims
                            )
                        }
                    };
                    lines += &format!("    {} = {value}\n", param.name);
                }
            }
            Step::Fill { at, bytes, value } => lines += &format!("  fill {} with {bytes} bytes of {value:#04x}\n", address(at)),
            Step::Copy { to, from, bytes } => lines += &format!("  copy {bytes} bytes from {} to {}\n", address(from), address(to)),
        }
    }
    for piece in &program.scratch {
        lines += &format!("  scratch `{}`: {} bytes\n", piece.name, piece.bytes);
    }
    lines
}
