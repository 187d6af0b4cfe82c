//! `inspect`: what `verdigris inspect` shows, for test cases too, and what the kernels are made of.

use std::io::Write;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use verdigris::{Config, Handle, Ranked};
use verdigris_cli::{Verdict, inspect, say};
use verdigris_graph::Problem;
use verdigris_kir::ir::KernelBody;
use verdigris_kir::program::Program;
use verdigris_kir::ptx::{self, Isa};
use verdigris_kir::text;
use verdigris_kir::verify::{Verified, verify};

use crate::cases;

/// Options of `inspect`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    asked: inspect::InspectArguments,
    /// A test case in place of a size, by its id.
    #[arg(long)]
    case: Option<String>,
    /// Print the kernels' text form.
    #[arg(long)]
    ir: bool,
    /// Print the kernels' PTX.
    #[arg(long)]
    ptx: bool,
    /// Report registers, shared memory and complaints: by ptxas where there is one, else by the driver.
    #[arg(long)]
    resources: bool,
}

/// Carries out `inspect`.
pub(crate) fn run(arguments: &Arguments) -> Result<Verdict> {
    let inspected = arguments.asked.inspect(problem(arguments)?)?;
    let best = inspected.survey.ranked.first();
    let kernels = best.map_or_else(|| Ok(Vec::new()), |best| kernels(&best.program))?;
    let isa = Isa { major: inspected.arch.isa.0, minor: inspected.arch.isa.1 };
    let resources = |kernel| match best {
        Some(best) => resources(kernel, isa, &inspected.config, inspected.handle.as_ref(), best),
        None => bail!("no engine takes the problem"),
    };
    if arguments.asked.json {
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
                report["resources"] = resources(kernel)?.into();
            }
            reports.push(report);
        }
        let mut report = inspected.report()?;
        report["kernels"] = reports.into();
        say!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(inspected.verdict());
    }
    inspected.print();
    for kernel in &kernels {
        if arguments.resources {
            say!("\n{}\n{}", kernel.name, resources(kernel)?.trim_end());
        }
        if arguments.ir {
            say!("\n{}", text::print(kernel));
        }
        if arguments.ptx {
            say!("\n{}", ptx::print(kernel, isa));
        }
    }
    Ok(inspected.verdict())
}

fn problem(arguments: &Arguments) -> Result<Problem> {
    let Some(id) = &arguments.case else {
        if !arguments.asked.names_a_problem() {
            bail!("which problem? --m, --n and --k, or --case, or --file");
        }
        return arguments.asked.problem();
    };
    if arguments.asked.names_a_problem() {
        bail!("--case, --file and a size each name a problem; give one of them");
    }
    let mut found = cases::load(None, None, id)?;
    let place = found.iter().position(|case| case.id == *id);
    if place.is_none() && found.len() > 1 {
        let ids: Vec<&str> = found.iter().take(10).map(|case| case.id.as_str()).collect();
        bail!("`{id}` is in the ids of {} cases, such as {}; name one", found.len(), ids.join(", "));
    }
    Ok(found.swap_remove(place.unwrap_or(0)).problem)
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
