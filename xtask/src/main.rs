//! The commands of the repository: house rules, the offline assembly check, packs, replay, the kit.
//!
//! `cargo xtask help` lists the commands. Everything here looks at the repository from outside; nothing
//! of it is part of the library.

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "a program for the terminal; its tables are its result")]

mod canonical;
mod catalog;
mod count;
mod day;
mod kit;
mod mutants;
mod pack;
mod ptxas;
mod replay;
mod source;
mod source_copy;
mod tidy;
mod tree;
mod versions;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use verdigris_kir::ir::Target;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "The commands of the repository.")]
struct Arguments {
    #[command(subcommand)]
    command: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Check the house rules: floors, module arrows, unsafe, file lengths and the rest.
    Tidy,
    /// Assemble PTX with NVIDIA's assembler and fail on spills, serialization or budgets exceeded.
    Ptxas {
        /// Only kernels of the catalog whose names contain this.
        #[arg(default_value = "", conflicts_with = "dir")]
        filter: String,
        /// Assemble the `.ptx` files of this folder instead of the engines' catalog.
        #[arg(long, value_name = "FOLDER")]
        dir: Option<PathBuf>,
        /// Print the outcomes as JSON instead of a table.
        #[arg(long)]
        json: bool,
        /// Write the binaries there, for a disassembler.
        #[arg(long, value_name = "FOLDER")]
        keep: Option<PathBuf>,
        /// Assemblies at a time; as many as there are cores by default.
        #[arg(long)]
        jobs: Option<usize>,
        /// Assemble everything, also what passed before unchanged.
        #[arg(long)]
        afresh: bool,
        /// Of texts that the repository's record says have passed, assemble one of so many, another each day; of all others every one.
        #[arg(long, value_name = "N", conflicts_with_all = ["dir", "afresh", "record"], value_parser = clap::value_parser!(u64).range(1..))]
        every: Option<u64>,
        /// Write that record, if all of the catalog has passed.
        #[arg(long, conflicts_with_all = ["dir", "filter"])]
        record: bool,
        /// Only install the assembler, if it is absent.
        #[arg(long)]
        install: bool,
        /// Use this assembler instead of the pinned one.
        #[arg(long, value_name = "PATH")]
        ptxas: Option<PathBuf>,
    },
    /// Assemble a chip's whole catalog into one file, from which kernels load without the driver's compiler.
    Pack {
        /// Architecture, as the assembler names it.
        #[arg(long, default_value = "sm_90a")]
        target: String,
        /// Where to.
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
        /// Assemblies at a time; as many as there are cores by default.
        #[arg(long)]
        jobs: Option<usize>,
        /// Use the pinned assembler at this path.
        #[arg(long, value_name = "PATH")]
        ptxas: Option<PathBuf>,
    },
    /// Write the text of every kernel of the catalog.
    Ptx {
        /// Where to.
        #[arg(long, value_name = "FOLDER")]
        out: PathBuf,
    },
    /// Tell which kernels differ from those of another revision; like `diff`, fails if any does.
    Replay {
        /// A commit, branch or tag; or a folder that `ptx` wrote, which saves the building of the other revision.
        revision: String,
    },
    /// Tell which engines' kernels changed without a decision about the engine's version.
    Versions {
        /// Take down the versions and kernels of today instead.
        #[arg(long)]
        write: bool,
    },
    /// Add a toy engine and a toy op to a copy of the sources, build and test them there, and count the files that they touch.
    Count,
    /// Plant mistakes one by one into a copy of the sources, and tell which of them what is to find them does not find.
    Mutants(mutants::Arguments),
    /// Pack optimized programs and test runners for a machine without Rust.
    Kit {
        /// Where to; replaced if it is a kit already.
        #[arg(long, value_name = "FOLDER", default_value = "kit")]
        out: PathBuf,
        /// Leave out the test runners: faster to build, for measuring.
        #[arg(long)]
        programs_only: bool,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// The assembler that was named, or the pinned one.
fn toolchain(root: &Path, named: Option<PathBuf>) -> Result<ptxas::Toolchain> {
    match named {
        Some(path) => ptxas::Toolchain::at(&path),
        None => ptxas::Toolchain::ensure(root),
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from)
}

/// Runs one command; `false` means that it ran and found something wrong.
fn run(action: Action) -> Result<bool> {
    let root = tree::workspace_root()?;
    match action {
        Action::Versions { write: true } => versions::write(&root).map(|()| true),
        Action::Versions { write: false } => {
            let findings = versions::findings(&root)?;
            for finding in &findings {
                println!("{finding}");
            }
            println!("versions: {} findings", findings.len());
            Ok(findings.is_empty())
        }
        Action::Count => count::run(&root),
        Action::Mutants(arguments) => mutants::run(&root, &arguments),
        Action::Tidy => {
            let findings = tidy::findings(&tree::Tree::read(&root)?);
            for finding in &findings {
                println!("{finding}");
            }
            println!("tidy: {} findings", findings.len());
            Ok(findings.is_empty())
        }
        Action::Ptxas { filter, dir, json, keep, jobs, afresh, every, record, install, ptxas } => {
            let toolchain = toolchain(&root, ptxas)?;
            if install {
                println!("assembler: {}", toolchain.ptxas().display());
                return Ok(true);
            }
            let whole = filter.is_empty() && dir.is_none() && every.is_none();
            let (mut assemblies, faults) = match dir {
                Some(folder) => (ptxas::read_folder(&folder)?, Vec::new()),
                None => catalog::judged(&filter),
            };
            let all = assemblies.len();
            if let Some(days) = every {
                assemblies = ptxas::Record::read(&root)?.of_the_day(&toolchain, assemblies, days, day::today());
            }
            if all == 0 && faults.is_empty() {
                anyhow::bail!("no kernel of the catalog has `{filter}` in its name");
            }
            let memory = if afresh { None } else { Some(ptxas::Memory::of_workspace(&root)?) };
            let outcomes = ptxas::assemble_all(&toolchain, memory.as_ref(), &assemblies, jobs.unwrap_or_else(cores))?;
            if let Some(folder) = keep {
                ptxas::write_cubins(&outcomes, &folder)?;
            }
            let failed = outcomes.iter().filter(|outcome| !outcome.passed()).count();
            let remembered = outcomes.iter().filter(|outcome| outcome.remembered).count();
            for fault in &faults {
                eprintln!("REFUSED: {fault}");
            }
            if json {
                println!("{}", serde_json::to_string_pretty(&outcomes)?);
            } else {
                print!("{}", ptxas::table(&outcomes));
                let refused = faults.len();
                let others = all - outcomes.len();
                let of_record = if every.is_some() { format!(", {others} by the record on another day") } else { String::new() };
                println!(
                    "ptxas: {} kernels, {failed} failed, {refused} refused, {remembered} unchanged since they passed{of_record}",
                    outcomes.len()
                );
            }
            let mut fits = true;
            if whole {
                let bytes = pack::estimate(Target::Sm90a, &outcomes)?;
                eprintln!("the pack of {} will have about {:.1} MB", Target::Sm90a.ptx(), bytes as f64 / 1e6);
                if let Some(why) = pack::too_large(bytes) {
                    eprintln!("by estimate, {why}");
                    fits = false;
                }
            }
            let passed = failed == 0 && faults.is_empty() && fits;
            if record && passed {
                ptxas::Record::of(&toolchain, &assemblies).write(&root)?;
            }
            Ok(passed)
        }
        Action::Pack { target, out, jobs, ptxas } => {
            let chip = catalog::chip(&target)?;
            let place = pack::Place::prepare(&out)?;
            let memory = ptxas::Memory::of_workspace(&root)?;
            let written = pack::write(&toolchain(&root, ptxas)?, &memory, chip, jobs.unwrap_or_else(cores), place)?;
            let megabytes = |bytes: usize| bytes as f64 / 1e6;
            println!(
                "pack: {} kernels for {target}, {:.1} MB in {:.1} MB, {}",
                written.kernels,
                megabytes(written.unpacked_bytes),
                megabytes(written.bytes),
                out.display()
            );
            Ok(true)
        }
        Action::Ptx { out } => {
            let kernels = catalog::kernels()?;
            catalog::write_folder(&kernels, &out)?;
            println!("ptx: {} kernels in {}", kernels.len(), out.display());
            Ok(true)
        }
        Action::Replay { revision } => {
            let then = match Path::new(&revision) {
                folder if folder.is_dir() => ptxas::read_folder(folder)?,
                _ => replay::kernels_at(&root, &revision)?,
            };
            let now = catalog::kernels()?;
            let changes = replay::compare(&then, &now);
            for change in &changes {
                println!("{change}");
            }
            println!("replay: {} kernels at {revision}, {} now, {} changes", then.len(), now.len(), changes.len());
            Ok(changes.is_empty())
        }
        Action::Kit { out, programs_only } => {
            let out = if out.is_absolute() { out } else { root.join(out) };
            let (files, bytes) = kit::pack(&root, &out, programs_only)?;
            println!("kit: {files} files, {:.1} MB in {}", bytes as f64 / 1e6, out.display());
            Ok(true)
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Arguments::command().debug_assert();
    }
}
