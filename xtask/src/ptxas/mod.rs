//! The offline assembly check: every kernel through NVIDIA's own assembler, without a GPU.
//!
//! The driver assembles the same text at run time and tells nobody what it thought of it. Here the
//! assembler is asked to talk, and its words become failures:
//!
//! - text that it rejects;
//! - registers spilled, or local memory used, beyond what the kernel declares;
//! - messages of the families C75xx and C76xx: the matrix pipeline serialized, a wait or an arrival
//!   injected, `setmaxnreg` ignored;
//! - any other warning;
//! - more registers than the kernel declares;
//! - of the catalog's kernels, whatever else is not as the kernel says ([`Demands`]): registers at entry where roles trade them, static
//!   shared memory, barriers, parameters, threads.

mod binary;
mod memory;
mod record;
mod report;
mod toolchain;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

pub(crate) use binary::{BinaryReport, Slot};
pub(crate) use memory::Memory;
pub(crate) use record::Record;
pub(crate) use report::EntryReport;
pub(crate) use toolchain::Toolchain;

/// One module of PTX to assemble, with what it is allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Assembly {
    /// Unique, together with the target, among the assemblies of one run; they become a file name.
    pub(crate) name: String,
    /// Architecture to assemble for, such as `sm_90a`.
    pub(crate) target: String,
    /// The module's text.
    pub(crate) ptx: String,
    /// Bytes that an entry may spill (the larger of stores and loads), or hold in local memory.
    pub(crate) allow_spill_bytes: u32,
    /// Registers a thread that an entry may use; `None` leaves it to the text's own directives.
    pub(crate) max_registers: Option<u32>,
    /// What the kernel says of itself; `None` for a text without a kernel.
    pub(crate) demands: Option<Demands>,
}

/// What a kernel says of itself and the assembler has to find in its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Demands {
    /// Registers that each thread must have at entry, in steps of 8, where roles trade them: `setmaxnreg` counts on what all threads were
    /// given, and waits for ever for what was not.
    pub(crate) registers_at_entry: Option<u32>,
    /// Barriers of the CTA.
    pub(crate) barriers: Barriers,
    /// Size and alignment of each parameter, in bytes. Where each stands is the assembler's affair: it aligns them in the constant bank, and
    /// the driver copies one by one.
    pub(crate) params: Vec<(u32, u32)>,
    /// Threads of a CTA.
    pub(crate) threads: u32,
}

/// Which barriers of the CTA a kernel names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Barriers {
    /// As many as the highest number that is named, and one.
    Counted(u32),
    /// At least as many, for a number stands in a register: all of them, unless the assembler knows better.
    AtLeast(u32),
}

/// What came of one assembly.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Outcome {
    /// The assembly's name.
    pub(crate) name: String,
    /// The assembly's target.
    pub(crate) target: String,
    /// Wall time of the assembler, in milliseconds; of the earlier run, where it was remembered.
    pub(crate) assemble_ms: u64,
    /// Resources of each entry of the module.
    pub(crate) entries: Vec<EntryReport>,
    /// Whether this very text passed before and was not assembled again.
    pub(crate) remembered: bool,
    /// Why it fails; empty when it passes.
    pub(crate) failures: Vec<String>,
    /// The binary, where one came out.
    #[serde(skip)]
    pub(crate) cubin: Option<Vec<u8>>,
}

impl Outcome {
    /// Whether nothing speaks against this assembly.
    pub(crate) fn passed(&self) -> bool {
        self.failures.is_empty()
    }
}

/// Reads every `.ptx` file of a folder as an assembly.
///
/// The target is the first word of the text's `.target`, or that of a comment `// assemble-for: sm_90a`. What the file is allowed
/// stands in such comments too: `// allow-spill-bytes: 16` and `// max-registers: 168`.
pub(crate) fn read_folder(folder: &Path) -> Result<Vec<Assembly>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "ptx") {
            paths.push(path);
        }
    }
    paths.sort();
    if paths.is_empty() {
        bail!("no .ptx file in {}", folder.display());
    }
    paths.iter().map(|path| read_file(path)).collect()
}

fn read_file(path: &Path) -> Result<Assembly> {
    let ptx = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let after = |prefix: &str| ptx.lines().find_map(|line| line.trim().strip_prefix(prefix)).map(str::trim);
    let target = after("// assemble-for:")
        .or_else(|| after(".target ").and_then(|rest| rest.split([',', ' ']).next()))
        .with_context(|| format!("{}: no .target directive", path.display()))?
        .to_string();
    let name = name.strip_suffix(&format!(".{target}")).map_or(name.clone(), str::to_string);
    let number = |key: &str| -> Result<Option<u32>> {
        after(&format!("// {key}:"))
            .map(|value| value.parse().with_context(|| format!("{}: `{key}` is {value:?}, not a number", path.display())))
            .transpose()
    };
    let allow_spill_bytes = number("allow-spill-bytes")?.unwrap_or(0);
    let max_registers = number("max-registers")?;
    Ok(Assembly { name, target, ptx, allow_spill_bytes, max_registers, demands: None })
}

/// What the assembler is told beside target and files.
const FLAGS: [&str; 3] = ["-v", "-warn-spills", "-warn-lmem-usage"];

/// Assembles everything on `jobs` threads, with a progress line on the terminal, and returns the
/// outcomes in the order of `assemblies`. What passed before, by the memory, is not assembled again.
pub(crate) fn assemble_all(toolchain: &Toolchain, memory: Option<&Memory>, assemblies: &[Assembly], jobs: usize) -> Result<Vec<Outcome>> {
    let folder = tempfile::tempdir().context("making a temporary folder")?;
    let progress = ProgressBar::new(assemblies.len() as u64)
        .with_style(ProgressStyle::with_template("assembling {pos}/{len} [{elapsed}] {wide_msg}").context("the progress line's template")?);
    let next = AtomicUsize::new(0);
    let (send, receive) = mpsc::channel();
    let mut outcomes: Vec<Option<Result<Outcome>>> = assemblies.iter().map(|_| None).collect();
    std::thread::scope(|scope| {
        for _ in 0..jobs.clamp(1, assemblies.len().max(1)) {
            let send = send.clone();
            let (next, folder) = (&next, folder.path());
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(assembly) = assemblies.get(index) else {
                        break;
                    };
                    let stem = folder.join(index.to_string());
                    let recalled = memory.and_then(|memory| memory.recall(toolchain, assembly));
                    let outcome = recalled.map_or_else(|| assemble(toolchain, assembly, &stem), Ok);
                    if let (Some(memory), Ok(outcome)) = (memory, &outcome) {
                        memory.keep(toolchain, assembly, outcome);
                    }
                    if send.send((index, outcome)).is_err() {
                        break; // the receiver is gone, so nobody wants the rest
                    }
                }
            });
        }
        drop(send);
        for (index, outcome) in receive {
            progress.set_message(assemblies[index].name.clone());
            progress.inc(1);
            outcomes[index] = Some(outcome);
        }
    });
    progress.finish_and_clear();
    outcomes
        .into_iter()
        .zip(assemblies)
        .map(|(outcome, assembly)| outcome.with_context(|| format!("{} was not assembled", assembly.name))?)
        .collect()
}

fn assemble(toolchain: &Toolchain, assembly: &Assembly, stem: &Path) -> Result<Outcome> {
    let source: PathBuf = stem.with_extension("ptx");
    let cubin = stem.with_extension("cubin");
    fs::write(&source, &assembly.ptx).with_context(|| format!("writing {}", source.display()))?;
    let start = Instant::now();
    let output = Command::new(toolchain.ptxas())
        .arg(format!("-arch={}", assembly.target))
        .args(FLAGS)
        .arg("-o")
        .arg(&cubin)
        .arg(&source)
        .output()
        .with_context(|| format!("running {}", toolchain.ptxas().display()))?;
    let assemble_ms = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
    // The assembler speaks on either stream, by version.
    let mut words = String::from_utf8_lossy(&output.stdout).into_owned();
    words.push_str(&String::from_utf8_lossy(&output.stderr));
    let mut parsed = report::parse(&words);
    let binary = fs::read(&cubin).ok();
    let mut unread = Vec::new();
    if let Some(binary) = &binary {
        for entry in &mut parsed.entries {
            match binary::of_entry(binary, &entry.entry) {
                Ok(report) => entry.binary = Some(report),
                Err(error) => unread.push(format!("`{}`: {error:#}", entry.entry)),
            }
        }
    }
    let mut failures = report::judge(&parsed, assembly);
    failures.extend(unread);
    if !output.status.success() {
        failures.insert(0, format!("the assembler rejects it ({})", output.status));
    }
    Ok(Outcome {
        name: assembly.name.clone(),
        target: assembly.target.clone(),
        assemble_ms,
        entries: parsed.entries,
        remembered: false,
        failures,
        cubin: binary,
    })
}

/// Writes each binary as `NAME.TARGET.cubin` into a folder, which is made if it is absent.
pub(crate) fn write_cubins(outcomes: &[Outcome], folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    for outcome in outcomes {
        let Some(cubin) = &outcome.cubin else {
            continue; // rejected, and reported as such
        };
        let path = folder.join(format!("{}.{}.cubin", outcome.name, outcome.target));
        fs::write(&path, cubin).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// The outcomes as a table with aligned columns, one row an entry, followed by the failures in full.
pub(crate) fn table(outcomes: &[Outcome]) -> String {
    const HEAD: [&str; 8] = ["kernel", "target", "registers", "smem", "stack", "spill st", "spill ld", "ms"];
    let mut rows: Vec<[String; 8]> = vec![HEAD.map(str::to_string)];
    for outcome in outcomes {
        let name = |entry: Option<&EntryReport>| {
            let mark = if outcome.passed() { "" } else { "! " };
            match entry {
                Some(entry) if outcome.entries.len() > 1 => {
                    format!("{mark}{}:{}", outcome.name, entry.entry)
                }
                _ => format!("{mark}{}", outcome.name),
            }
        };
        let ms = outcome.assemble_ms.to_string();
        if outcome.entries.is_empty() {
            let dash = || "-".to_string();
            let target = outcome.target.clone();
            rows.push([name(None), target, dash(), dash(), dash(), dash(), dash(), ms.clone()]);
        }
        for entry in &outcome.entries {
            rows.push([
                name(Some(entry)),
                outcome.target.clone(),
                entry.registers.to_string(),
                entry.smem_bytes.to_string(),
                entry.stack_bytes.to_string(),
                entry.spill_store_bytes.to_string(),
                entry.spill_load_bytes.to_string(),
                ms.clone(),
            ]);
        }
    }
    let mut widths = [0; 8];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut out = String::new();
    for row in &rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
            if column < 2 {
                line.push_str(&format!("{cell:<width$}  "));
            } else {
                line.push_str(&format!("{cell:>width$}  "));
            }
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    for outcome in outcomes {
        for failure in &outcome.failures {
            out.push_str(&format!("FAILED {} ({}): {failure}\n", outcome.name, outcome.target));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixture(name: &str) -> Assembly {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(format!("{name}.ptx"));
        read_file(&path).expect("the fixture is there")
    }

    /// Runs the real assembler; `None`, said aloud, where none is installed.
    fn outcome(assembly: Assembly) -> Option<Outcome> {
        let root = crate::tree::workspace_root().expect("tests run inside the workspace");
        let Some(toolchain) = Toolchain::installed(&root) else {
            eprintln!("skipped: no assembler here; `cargo xtask ptxas --install` fetches it");
            return None;
        };
        let mut outcomes = assemble_all(&toolchain, None, &[assembly], 1).expect("ptxas can be run");
        outcomes.pop()
    }

    #[test]
    fn a_good_kernel_passes() {
        let Some(outcome) = outcome(fixture("double_it")) else {
            return;
        };
        assert_eq!(outcome.failures, [""; 0]);
        assert_eq!(outcome.entries.len(), 1);
        assert_eq!(outcome.entries[0].entry, "double_it");
        assert!(outcome.entries[0].registers > 0);
        assert!(outcome.cubin.is_some_and(|cubin| cubin.starts_with(b"\x7fELF")));
    }

    #[test]
    fn a_spilling_kernel_fails_until_it_declares_the_spill() {
        let crowded = fixture("crowded");
        let Some(first) = outcome(crowded.clone()) else {
            return;
        };
        assert_eq!(first.failures.len(), 1, "{:?}", first.failures);
        assert!(first.failures[0].contains("spills"), "{:?}", first.failures);
        let spilled = first.entries[0].spill_store_bytes.max(first.entries[0].spill_load_bytes);
        let declared = |allow_spill_bytes| Assembly { allow_spill_bytes, ..crowded.clone() };
        let exact = outcome(declared(spilled)).expect("the assembler was there");
        assert_eq!(exact.failures, [""; 0]);
        let short = outcome(declared(spilled - 1)).expect("the assembler was there");
        assert_eq!(short.failures.len(), 1);
    }

    #[test]
    fn a_serialized_matrix_pipeline_fails() {
        let Some(outcome) = outcome(fixture("serialized")) else {
            return;
        };
        let said = outcome.failures.join("\n");
        assert!(said.contains("C7517") && said.contains("C7519"), "{said}");
    }

    #[test]
    fn an_ignored_directive_fails() {
        let Some(outcome) = outcome(fixture("no_entry_count")) else {
            return;
        };
        assert!(outcome.failures[0].contains("C7508"), "{:?}", outcome.failures);
    }

    #[test]
    fn what_passed_is_remembered_and_what_failed_is_not() {
        let root = crate::tree::workspace_root().expect("tests run inside the workspace");
        let Some(toolchain) = Toolchain::installed(&root) else {
            eprintln!("skipped: no assembler here; `cargo xtask ptxas --install` fetches it");
            return;
        };
        let folder = tempfile::tempdir().expect("a temporary folder");
        let memory = Memory::open(folder.path()).expect("opens");
        let kernels = [fixture("double_it"), fixture("crowded")];
        let run = || assemble_all(&toolchain, Some(&memory), &kernels, 2).expect("ptxas can be run");
        let (first, second) = (run(), run());
        assert_eq!(first.iter().map(|outcome| outcome.remembered).collect::<Vec<_>>(), [false, false]);
        assert_eq!(second.iter().map(|outcome| outcome.remembered).collect::<Vec<_>>(), [true, false]);
        assert_eq!((&first[0].entries, &first[0].cubin), (&second[0].entries, &second[0].cubin));
        assert!(!second[1].passed());
    }

    #[test]
    fn a_register_budget_is_kept() {
        let mut kernel = fixture("double_it");
        kernel.max_registers = Some(1);
        let Some(outcome) = outcome(kernel) else {
            return;
        };
        assert!(outcome.failures[0].contains("registers"), "{:?}", outcome.failures);
    }

    #[test]
    fn rejected_text_fails_with_the_assemblers_words() {
        let mut kernel = fixture("double_it");
        kernel.ptx = kernel.ptx.replace("add.f32", "sum.f32");
        let Some(outcome) = outcome(kernel) else {
            return;
        };
        let said = outcome.failures.join("\n");
        assert!(said.contains("rejects") && said.contains("sum"), "{said}");
        assert!(outcome.cubin.is_none());
    }

    #[test]
    fn allowances_are_read_from_comments() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("a.ptx");
        fs::write(&path, "// allow-spill-bytes: 16\n// max-registers: 168\n.version 8.0\n.target sm_90a, debug\n").expect("writable");
        let read = read_folder(folder.path()).expect("readable");
        assert_eq!(read.len(), 1);
        assert_eq!((read[0].name.as_str(), read[0].target.as_str()), ("a", "sm_90a"));
        assert_eq!((read[0].allow_spill_bytes, read[0].max_registers), (16, Some(168)));
        fs::write(&path, "// max-registers: many\n.target sm_90a\n").expect("writable");
        assert!(read_folder(folder.path()).is_err());
        fs::remove_file(&path).expect("removable");
        assert!(read_folder(folder.path()).is_err(), "an empty folder checks nothing");
    }

    #[test]
    fn the_table_is_aligned_and_ends_with_the_failures() {
        let outcome = |name: &str, failures: Vec<String>| Outcome {
            name: name.to_string(),
            target: "sm_80".to_string(),
            assemble_ms: 7,
            remembered: false,
            entries: vec![EntryReport { entry: name.to_string(), registers: 128, ..EntryReport::default() }],
            failures,
            cubin: None,
        };
        let text = table(&[outcome("a", Vec::new()), outcome("long_name", vec!["it spills".to_string()])]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4);
        assert_eq!(lines[1].find("sm_80"), lines[2].find("sm_80"));
        assert_eq!(lines[1].find("128"), lines[2].find("128"));
        assert_eq!(lines[3], "FAILED long_name (sm_80): it spills");
    }
}
