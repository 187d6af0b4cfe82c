//! `inspect`: who takes a problem and who does not, what would run, and what it is made of.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use verdigris::select::RankedSummary;
use verdigris::{Config, Handle, Limits, Ranked, Settings, survey};
use verdigris_engines::arch::Arch;
use verdigris_engines::engine::Knobs;
use verdigris_graph::{Key, Problem, json};
use verdigris_kir::ir::KernelBody;
use verdigris_kir::program::{Address, Arg, Base, Program, Step};
use verdigris_kir::ptx::{self, Isa};
use verdigris_kir::text;
use verdigris_kir::verify::{Verified, verify};

use crate::problem::{ProblemArguments, check_engine, knobs};
use crate::table::say_text;
use crate::{Verdict, cases};

/// Options of `inspect`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    problem: ProblemArguments,
    /// Type of A and B, or a class (tf32, fp8, int8).
    #[arg(long, default_value = "bf16")]
    dtype: String,
    /// A test case in place of a size, by its id.
    #[arg(long)]
    case: Option<String>,
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
    /// Print the kernels' text form.
    #[arg(long)]
    ir: bool,
    /// Print the kernels' PTX.
    #[arg(long)]
    ptx: bool,
    /// Report registers, shared memory and complaints: by ptxas where there is one, else by the driver.
    #[arg(long)]
    resources: bool,
    /// Print as JSON.
    #[arg(long)]
    json: bool,
}

/// Carries out `inspect`.
pub(crate) fn run(arguments: &Arguments) -> Result<Verdict> {
    let config = Config::from_environment()?;
    let problem = problem(arguments)?;
    let handle = if arguments.arch.is_some() { None } else { Handle::open(&config).ok() };
    let arch = match (&arguments.arch, &handle) {
        (Some(text), _) => described(text)?,
        (None, Some(handle)) => handle.arch().clone(),
        (None, None) => Arch::h200(),
    };
    check_engine(arguments.engine.as_deref())?;
    let settings = match (&arguments.knobs, arguments.all_knobs) {
        (Some(knobs), _) => Settings::Matching(knobs.clone()),
        (None, true) => Settings::All,
        (None, false) => Settings::First,
    };
    let survey = survey(&problem, &arch, &Limits { engine: arguments.engine.clone(), settings, ..Limits::default() });
    if arguments.json {
        let refusals = survey.refusals.iter().map(|refusal| {
            serde_json::json!({
                "engine": refusal.engine.name, "reason": refusal.reason.name(), "seen": refusal.seen,
                "file": refusal.file, "line": refusal.line,
            })
        });
        let kernels = match survey.ranked.first() {
            Some(best) => kernels(&best.program)?,
            None => Vec::new(),
        };
        let isa = Isa { major: arch.isa.0, minor: arch.isa.1 };
        let mut reports = Vec::new();
        for kernel in &kernels {
            let mut report = serde_json::json!({ "name": kernel.name, "shared_bytes": kernel.shared_bytes, "threads": kernel.threads });
            if arguments.ir {
                report["ir"] = text::print(kernel).into();
            }
            if arguments.ptx {
                report["ptx"] = ptx::print(kernel, isa).into();
            }
            if arguments.resources {
                report["resources"] = resources(kernel, isa, &config, handle.as_ref(), best(&survey.ranked)?)?.into();
            }
            reports.push(report);
        }
        let value = serde_json::json!({
            "problem": serde_json::from_str::<serde_json::Value>(&json::problem_to_json(&problem))?,
            "key": Key::of(&problem).to_string(),
            "arch": arch,
            "ranked": survey.ranked.iter().map(RankedSummary::from).collect::<Vec<_>>(),
            "refusals": refusals.collect::<Vec<_>>(),
            "kernels": reports,
        });
        say!("{}", serde_json::to_string_pretty(&value)?);
        return Ok(Verdict::Good);
    }
    say!("problem {} on {}", Key::of(&problem), arch.name);
    say!("{}\n", json::problem_to_json(&problem));
    say_text(&survey.to_string());
    let Some(best) = survey.ranked.first() else { return Ok(Verdict::Good) };
    say!("\nthe first of these runs");
    say_text(&program_text(&best.program)?);
    let isa = Isa { major: arch.isa.0, minor: arch.isa.1 };
    for kernel in kernels(&best.program)? {
        if arguments.resources {
            say!("\n{}\n{}", kernel.name, resources(&kernel, isa, &config, handle.as_ref(), best)?.trim_end());
        }
        if arguments.ir {
            say!("\n{}", text::print(&kernel));
        }
        if arguments.ptx {
            say!("\n{}", ptx::print(&kernel, isa));
        }
    }
    Ok(Verdict::Good)
}

fn best(ranked: &[Ranked]) -> Result<&Ranked> {
    ranked.first().context("no engine takes the problem")
}

fn problem(arguments: &Arguments) -> Result<Problem> {
    match (&arguments.case, &arguments.file, arguments.problem.is_given()) {
        (Some(id), None, false) => {
            let mut found = cases::load(None, None, id)?;
            let place = found.iter().position(|case| case.id == *id);
            if place.is_none() && found.len() > 1 {
                let ids: Vec<&str> = found.iter().take(10).map(|case| case.id.as_str()).collect();
                bail!("`{id}` is in the ids of {} cases, such as {}; name one", found.len(), ids.join(", "));
            }
            Ok(found.swap_remove(place.unwrap_or(0)).problem)
        }
        (None, Some(path), false) => {
            let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
            json::problem_from_json(&text).with_context(|| format!("the problem in {}", path.display()))
        }
        (None, None, true) => Ok(Problem::Gemm(arguments.problem.problem(&arguments.dtype)?.problem)),
        (None, None, false) => bail!("which problem? --m, --n and --k, or --case, or --file"),
        _ => bail!("--case, --file and a size each name a problem; give one of them"),
    }
}

fn described(text: &str) -> Result<Arch> {
    match text.split_once(':') {
        None if text == "h200" => Ok(Arch::h200()),
        Some(("virtual", sms)) => match sms.parse() {
            Ok(sms) if sms > 0 => Ok(Arch::virtual_device(sms)),
            _ => bail!("--arch {text}: `virtual:N` with N from 1 on"),
        },
        _ => bail!("--arch {text}: `h200` or `virtual:N`"),
    }
}

/// The program's kernels, each once, built and verified.
fn kernels(program: &Program) -> Result<Vec<Verified<KernelBody>>> {
    let mut list: Vec<Verified<KernelBody>> = Vec::new();
    for launch in program.launches() {
        if list.iter().all(|kernel| kernel.name != launch.kernel.name()) {
            list.push(verify(launch.kernel.build())?);
        }
    }
    Ok(list)
}

fn program_text(program: &Program) -> Result<String> {
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
            Step::Launch(launch) => {
                let body = launch.kernel.build();
                let [x, y, z] = launch.grid;
                lines += &format!(
                    "  launch {}: grid {x}x{y}x{z}, cluster {}, {} threads, {} bytes of shared memory{}{}\n",
                    launch.kernel.name(),
                    body.cluster,
                    body.threads,
                    body.shared_bytes,
                    if launch.overlap { ", overlaps the launch before" } else { "" },
                    if launch.residency == verdigris_kir::program::Residency::All { ", all resident" } else { "" },
                );
                for (param, arg) in body.params.iter().zip(launch.args.iter()) {
                    let value = match arg {
                        Arg::Scalar(ty, bits) => format!("{bits:#x} as {ty:?}"),
                        Arg::Divisor(divisor) => format!("division by {divisor}"),
                        Arg::Pointer(to) => address(to),
                        Arg::HostScalar(slot) => format!("host scalar of slot {slot}"),
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
    Ok(lines)
}

/// What the assembler, or the driver where there is no assembler, makes of a kernel.
fn resources(kernel: &Verified<KernelBody>, isa: Isa, config: &Config, handle: Option<&Handle>, way: &Ranked) -> Result<String> {
    if let Some(ptxas) = &config.ptxas {
        return assemble(ptxas, kernel, isa);
    }
    let Some(handle) = handle else {
        bail!("a resource report needs ptxas (in PATH, or named by VERDIGRIS_PTXAS) or a GPU; there is neither");
    };
    let launch = way.program.launches().find(|launch| launch.kernel.name() == kernel.name).context("the kernel is not launched")?;
    let (loaded, report) = handle.loader().kernel(&launch.kernel)?;
    let found = loaded.function.attributes();
    let mut text = format!(
        "{} registers, {} bytes of local memory, {} bytes of static shared memory, at most {} threads a CTA ({:?})\n",
        found.registers, found.local_bytes, found.static_smem_bytes, found.max_threads_per_cta, report.origin
    );
    for finding in report.jit.iter().flat_map(|jit| &jit.findings) {
        text += &format!("{finding:?}\n");
    }
    Ok(text)
}

/// Runs `ptxas -v` on the kernel, for its own target; text and exit code both tell of failure.
fn assemble(ptxas: &Path, kernel: &Verified<KernelBody>, isa: Isa) -> Result<String> {
    let folder = std::env::temp_dir();
    let input = folder.join(format!("verdigris-inspect-{}.ptx", std::process::id()));
    let output = input.with_extension("cubin");
    std::fs::File::create(&input)
        .and_then(|mut file| file.write_all(ptx::print(kernel, isa).as_bytes()))
        .with_context(|| format!("writing {}", input.display()))?;
    let arch = format!("-arch={}", kernel.target.ptx());
    let ran = Command::new(ptxas).args(["-v", &arch, "-o"]).arg(&output).arg(&input).output();
    for file in [&input, &output] {
        // Only the report is wanted; a file that was not made cannot be removed.
        let _ = std::fs::remove_file(file);
    }
    let ran = ran.with_context(|| format!("running {}", ptxas.display()))?;
    let words = format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    if !ran.status.success() {
        bail!("{} refuses {}: {}", ptxas.display(), kernel.name, words.trim());
    }
    Ok(words)
}
