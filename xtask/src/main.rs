//! The workshop: house rules, the offline assembly check, replay, the kit.
//!
//! `cargo xtask help` lists the commands. Everything here looks at the repository from outside; nothing
//! of it is part of the library.

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "a program for the terminal; its tables are its result")]

mod catalog;
mod kit;
mod ptxas;
mod replay;
mod source;
mod tidy;
mod tree;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "The workshop of the repository.")]
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
        /// Assemble the `.ptx` files of this folder instead of the engines' catalog.
        #[arg(long, value_name = "FOLDER")]
        dir: Option<PathBuf>,
        /// Print the outcomes as JSON instead of a table.
        #[arg(long)]
        json: bool,
        /// Write the binaries there, for a disassembler.
        #[arg(long, value_name = "FOLDER")]
        keep: Option<PathBuf>,
        /// Assemblies at a time.
        #[arg(long, default_value_t = 2)]
        jobs: usize,
        /// Only install the assembler, if it is absent.
        #[arg(long)]
        install: bool,
        /// Use this assembler instead of the pinned one.
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
        /// A commit, branch or tag.
        revision: String,
    },
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

/// Runs one command; `false` means that it ran and found something wrong.
fn run(action: Action) -> Result<bool> {
    let root = tree::workspace_root()?;
    match action {
        Action::Tidy => {
            let findings = tidy::findings(&tree::Tree::read(&root)?);
            for finding in &findings {
                println!("{finding}");
            }
            println!("tidy: {} findings", findings.len());
            Ok(findings.is_empty())
        }
        Action::Ptxas { dir, json, keep, jobs, install, ptxas } => {
            let toolchain = match ptxas {
                Some(path) => ptxas::Toolchain::at(&path)?,
                None => ptxas::Toolchain::ensure(&root)?,
            };
            if install {
                println!("assembler: {}", toolchain.ptxas().display());
                return Ok(true);
            }
            let assemblies = match dir {
                Some(folder) => ptxas::read_folder(&folder)?,
                None => catalog::kernels()?,
            };
            if assemblies.is_empty() {
                eprintln!("no engine lists a kernel yet: nothing to assemble");
            }
            let outcomes = ptxas::assemble_all(&toolchain, &assemblies, jobs)?;
            if let Some(folder) = keep {
                ptxas::write_cubins(&outcomes, &folder)?;
            }
            let failed = outcomes.iter().filter(|outcome| !outcome.passed()).count();
            if json {
                println!("{}", serde_json::to_string_pretty(&outcomes)?);
            } else {
                print!("{}", ptxas::table(&outcomes));
                println!("ptxas: {} kernels, {failed} failed", outcomes.len());
            }
            Ok(failed == 0)
        }
        Action::Ptx { out } => {
            let kernels = catalog::kernels()?;
            catalog::write_folder(&kernels, &out)?;
            println!("ptx: {} kernels in {}", kernels.len(), out.display());
            Ok(true)
        }
        Action::Replay { revision } => {
            let then = replay::kernels_at(&root, &revision)?;
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
