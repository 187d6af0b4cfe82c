//! `check sanitizers`: one case of each class of kernels under the tools of NVIDIA's `compute-sanitizer`.
//!
//! First every tool must find the fault that is planted for it. Then each class runs under each tool, in a process of its own, several side by
//! side. memcheck, initcheck and synccheck must find nothing. racecheck must find nothing where threads alone touch shared memory; it does not
//! follow TMA, mbarriers or `wgmma`, so hazards that it reports of kernels with such units are recorded and explained, not judged: of
//! those the interpreter, which follows all of them, is the witness. A run that comes to no end, or to wrong results, is a fault under any tool.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};
use rayon::prelude::*;
use serde::Serialize;
use verdigris::Config;
use verdigris_engines::engine::Engine;

use crate::classes::{self, Representative};
use crate::planted::{self, Tool};
use verdigris_cli::record::{Record, now};
use verdigris_cli::table::{self, Align, alarm};
use verdigris_cli::{Verdict, device, say};

/// Lines of a tool's report that a finding keeps.
const KEPT_LINES: usize = 6;

/// Options of `check sanitizers`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Only these classes of kernels (`check classes --list`); all, if none is named.
    classes: Vec<String>,
    /// Only these tools.
    #[arg(long = "tool")]
    tools: Vec<Tool>,
    /// The program `compute-sanitizer`; default: on the path, else where CUDA is usually installed.
    #[arg(long)]
    sanitizer: Option<PathBuf>,
    /// Runs side by side.
    #[arg(long, default_value_t = 8)]
    processes: usize,
    /// The longest that a run may take, in seconds.
    #[arg(long, default_value_t = 120)]
    seconds: u64,
    /// Where the record goes; default bench/record/DEVICE/DATE-sanitizers.jsonl. `none` keeps no record.
    #[arg(long)]
    record: Option<PathBuf>,
    /// Print JSON lines in place of the table.
    #[arg(long)]
    json: bool,
}

/// What a tool said of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Said {
    /// Nothing.
    Clean,
    /// So many errors or hazards, and the first lines of them.
    Found(u64, String),
    /// The tool or the program came to no end of its own.
    Failed(String),
}

/// A run in the record.
#[derive(Serialize)]
struct Row<'a> {
    suite: &'static str,
    class: String,
    tool: &'static str,
    problem: &'a str,
    engine: &'a str,
    knobs: &'a str,
    /// Whether units beside the threads copy or multiply.
    asynchronous: bool,
    /// `clean`, `found`, `failed`; of what is planted, `found` is right.
    outcome: &'static str,
    count: u64,
    report: &'a str,
    explanation: Option<&'static str>,
    machine: &'a str,
    driver: &'a str,
    versions: &'a str,
    date: &'a str,
}

/// Carries out `check sanitizers`.
pub(crate) fn run(arguments: &Arguments) -> Result<Verdict> {
    let config = Config::from_environment()?;
    let Some(handle) = device::open("check sanitizers", &config, arguments.json)? else {
        return Ok(Verdict::Good);
    };
    let Some(sanitizer) = arguments.sanitizer.clone().or_else(installed) else {
        say!("check sanitizers: skipped: there is no compute-sanitizer here; it comes with the CUDA toolkit, or name it with --sanitizer");
        return Ok(Verdict::Good);
    };
    let tools = if arguments.tools.is_empty() { Tool::value_variants().to_vec() } else { arguments.tools.clone() };
    let engines: Vec<&'static dyn Engine> = verdigris_engines::engines().collect();
    let (chosen, missing) = classes::representatives(&engines, std::slice::from_ref(handle.arch()), &arguments.classes)?;

    let works: Vec<(Tool, Option<&Representative>)> = (tools.iter().map(|&tool| (tool, None)))
        .chain(tools.iter().flat_map(|&tool| chosen.iter().map(move |one| (tool, Some(one)))))
        .collect();
    let progress = ProgressBar::new(works.len() as u64);
    progress.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} eta {eta} {msg}")?);
    let program = std::env::current_exe().context("the path of this program")?;
    let watch = |(tool, one): &(Tool, Option<&Representative>)| {
        let mut command = Command::new(&sanitizer);
        command.args(["--tool", tool.name(), "--report-api-errors", "no", "--print-limit", "4"]).arg(&program).arg("check");
        match one {
            None => command.args(["planted", tool.name()]),
            Some(one) => command.arg("classes").args(&one.classes),
        };
        let said = attempt(&mut command, *tool, Duration::from_secs(arguments.seconds));
        progress.inc(1);
        said
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(arguments.processes.max(1)).build()?;
    let said: Vec<Result<Said>> = pool.install(|| works.par_iter().map(watch).collect());
    progress.finish_and_clear();

    let properties = handle.context().properties();
    let machine = format!("{} {}", properties.name, properties.uuid);
    let driver = format!("{}.{}", properties.driver_version / 1000, properties.driver_version % 1000 / 10);
    let versions =
        format!("verdigris {} ({}), {}", env!("CARGO_PKG_VERSION"), &verdigris_engines::SOURCE_HASH[..12], version_of(&sanitizer));
    let date = now();
    let (mut lines, mut faults, mut counts) = (Vec::new(), Vec::new(), BTreeMap::<Tool, [u64; 4]>::new());
    for ((tool, one), said) in works.iter().zip(said) {
        let said = said?;
        let words = one.map_or_else(Default::default, |one| one.words());
        let asynchronous = one.is_some_and(Representative::is_asynchronous);
        let (outcome, count, report) = match &said {
            Said::Clean => ("clean", 0, ""),
            Said::Found(count, report) => ("found", *count, report.as_str()),
            Said::Failed(report) => ("failed", 0, report.as_str()),
        };
        let judged = judge(*tool, one.is_none(), asynchronous, &said);
        let class = one.map_or_else(|| "planted".to_owned(), |one| one.classes.join(", "));
        let [clean, explained, bad, planted] = counts.entry(*tool).or_default();
        match &judged {
            _ if one.is_none() && judged.is_ok() => *planted += 1,
            Ok(None) => *clean += 1,
            Ok(Some(_)) => *explained += 1,
            Err(what) => {
                *bad += 1;
                faults.push(format!("{} {class}: {what}\n{report}", tool.name()));
            }
        }
        let explanation = judged.unwrap_or_default();
        let [problem, engine, knobs] = &words;
        let suite = "sanitizers";
        let (tool, machine, driver) = (tool.name(), machine.as_str(), driver.as_str());
        let (versions, date) = (versions.as_str(), date.as_str());
        let row = Row {
            suite,
            class,
            tool,
            problem,
            engine,
            knobs,
            asynchronous,
            outcome,
            count,
            report,
            explanation,
            machine,
            driver,
            versions,
            date,
        };
        lines.push(serde_json::to_string(&row)?);
    }
    if arguments.record.as_deref().is_none_or(|path| path.as_os_str() != "none") {
        let mut record = Record::open(arguments.record.as_deref(), &properties.name, &date, "sanitizers")?;
        for line in &lines {
            record.write(line)?;
        }
        eprintln!("record: {}", record.path.display());
    }
    if arguments.json {
        lines.iter().for_each(|line| say!("{line}"));
    } else {
        print(&counts, &missing.into_iter().collect::<Vec<_>>(), &faults);
    }
    Ok(if faults.is_empty() { Verdict::Good } else { Verdict::Bad })
}

fn print(counts: &BTreeMap<Tool, [u64; 4]>, missing: &[String], faults: &[String]) {
    let head = [
        ("tool", Align::Left),
        ("found what is planted", Align::Left),
        ("clean", Align::Right),
        ("explained", Align::Right),
        ("faults", Align::Right),
    ];
    let rows: Vec<Vec<String>> = (counts.iter())
        .map(|(tool, [clean, explained, bad, planted])| {
            let found = if *planted > 0 { "yes" } else { "no" };
            vec![tool.name().to_owned(), found.to_owned(), clean.to_string(), explained.to_string(), bad.to_string()]
        })
        .collect();
    table::print(&head, &rows);
    if !missing.is_empty() {
        say!("no case leads here to {}", missing.join(", "));
    }
    faults.iter().for_each(|fault| say!("{}", alarm(fault)));
    let runs: u64 = counts.values().flatten().sum();
    say!("{runs} runs, {} faults", faults.len());
}

/// Whether what a tool said is as it must be: with what explains it, or what is wrong. A run that came to no end proves nothing of any kernel.
fn judge(tool: Tool, planted: bool, asynchronous: bool, said: &Said) -> Result<Option<&'static str>, String> {
    let unfollowed = "racecheck follows what threads do; this kernel's shared memory is also used by TMA, mbarriers or wgmma";
    match said {
        Said::Failed(why) => Err(why.clone()),
        Said::Found(_, report) if planted && report.contains(&planted::kernel_name(tool)) => Ok(None),
        Said::Found(..) | Said::Clean if planted => Err("the planted fault was not found".to_owned()),
        Said::Clean => Ok(None),
        Said::Found(..) if tool == Tool::Racecheck && asynchronous => Ok(Some(unfollowed)),
        Said::Found(count, _) => Err(format!("{count} reports")),
    }
}

/// Runs a program under a tool.
fn attempt(command: &mut Command, tool: Tool, longest: Duration) -> Result<Said> {
    let output = tempfile::tempfile().context("a file for what the tool says")?;
    let copy = |file: &std::fs::File| file.try_clone().context("a file for what the tool says");
    command.stdin(Stdio::null()).stdout(copy(&output)?).stderr(copy(&output)?);
    let mut child = command.spawn().with_context(|| format!("starting {}", command.get_program().display()))?;
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if begun.elapsed() > longest {
            child.kill()?;
            child.wait()?;
            break None;
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let text = read(output)?;
    Ok(match status {
        None => Said::Failed(format!("not done after {} s", longest.as_secs())),
        Some(status) => match parse(tool, &text) {
            // Results that are wrong under the tool are a fault even where the tool is content.
            Some(Said::Clean) if !status.success() => Said::Failed(format!("{status}: {}", tail(&text))),
            Some(said) => said,
            None => Said::Failed(format!("{status}: {}", tail(&text))),
        },
    })
}

fn read(mut file: std::fs::File) -> Result<String> {
    use std::io::{Read, Seek, SeekFrom};
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0))?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// What a tool's report says at its end; none if it has no end.
fn parse(tool: Tool, text: &str) -> Option<Said> {
    let said = |line: &&str| line.contains(if tool == Tool::Racecheck { "RACECHECK SUMMARY:" } else { "ERROR SUMMARY:" });
    // An error inside the tool may be followed by a summary all the same.
    if let Some(line) = text.lines().find(|line| line.contains("Internal Sanitizer Error")) {
        return Some(Said::Failed(line.trim_start_matches(['=', ' ']).to_owned()));
    }
    let summary = text.lines().find(said)?;
    let count: u64 = summary.split("SUMMARY:").nth(1)?.split_whitespace().next()?.parse().ok()?;
    let body = |line: &&str| line.starts_with("=========") && !said(line) && !line.contains("COMPUTE-SANITIZER");
    let first: Vec<&str> = text.lines().filter(body).map(|line| line.trim_start_matches('=').trim_end()).take(KEPT_LINES).collect();
    Some(if count == 0 { Said::Clean } else { Said::Found(count, first.join("\n")) })
}

fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(KEPT_LINES)..].join("\n")
}

/// The tool on the path, else in the newest of the usual folders.
fn installed() -> Option<PathBuf> {
    let by_name = PathBuf::from("compute-sanitizer");
    let on_path = Command::new(&by_name).arg("--version").output().is_ok().then_some(by_name);
    let usual = || {
        let mut folders: Vec<PathBuf> = std::fs::read_dir("/usr/local").ok()?.flatten().map(|entry| entry.path()).collect();
        folders.sort();
        folders.into_iter().rev().map(|folder| folder.join("bin/compute-sanitizer")).find(|path| path.is_file())
    };
    on_path.or_else(usual)
}

fn version_of(sanitizer: &PathBuf) -> String {
    let output = Command::new(sanitizer).arg("--version").output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let line = text.lines().find(|line| line.to_lowercase().contains("version")).unwrap_or("compute-sanitizer");
    line.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLEAN: &str = "========= COMPUTE-SANITIZER\n1 classes, 1 cases run, 0 faults\n========= ERROR SUMMARY: 0 errors\n";
    const RACE: &str = "========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at planted_racecheck+0x90 in planted.rs:108
=========     and Read access at planted_racecheck+0xd0 in planted.rs:117 [64 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
";

    #[test]
    fn reports_are_read() {
        assert_eq!(parse(Tool::Memcheck, CLEAN), Some(Said::Clean));
        let Some(Said::Found(1, lines)) = parse(Tool::Racecheck, RACE) else { panic!("{:?}", parse(Tool::Racecheck, RACE)) };
        assert!(lines.contains("planted.rs:108") && lines.contains("planted.rs:117"), "{lines}");
        assert_eq!(parse(Tool::Racecheck, CLEAN), None, "another tool's summary");
        assert_eq!(parse(Tool::Memcheck, "========= COMPUTE-SANITIZER\n"), None, "cut off");
        let broken = format!("========= Internal Sanitizer Error: failed\n{CLEAN}");
        assert!(matches!(parse(Tool::Memcheck, &broken), Some(Said::Failed(why)) if why.contains("failed")));
    }

    #[test]
    fn only_races_of_asynchronous_units_are_explained() {
        let (found, failed) = (Said::Found(3, "at conv_halo+0x90".to_owned()), Said::Failed("dead".to_owned()));
        for &tool in Tool::value_variants() {
            for asynchronous in [true, false] {
                let explained = tool == Tool::Racecheck && asynchronous;
                assert_eq!(judge(tool, false, asynchronous, &found).is_ok(), explained, "{tool:?} {asynchronous}");
                assert!(judge(tool, false, asynchronous, &failed).is_err(), "no run, no proof");
            }
            assert_eq!(judge(tool, false, false, &Said::Clean), Ok(None));
            let own = Said::Found(1, format!("at {}+0x90 in planted.rs:103", planted::kernel_name(tool)));
            assert_eq!(judge(tool, true, false, &own), Ok(None));
            for said in [&found, &failed, &Said::Clean] {
                assert!(judge(tool, true, false, said).is_err(), "what is planted must be found, and by name: {said:?}");
            }
        }
    }

    #[test]
    fn programs_that_fail_or_hang_are_faults() {
        let run = |script: &str, longest| attempt(Command::new("sh").args(["-c", script]), Tool::Memcheck, longest).expect("runs");
        let long = Duration::from_secs(20);
        assert_eq!(run("echo '========= ERROR SUMMARY: 0 errors'", long), Said::Clean);
        assert!(matches!(run("echo '========= ERROR SUMMARY: 0 errors'; exit 1", long), Said::Failed(_)), "wrong results");
        assert!(matches!(run("echo bye; exit 3", long), Said::Failed(why) if why.contains("bye")));
        assert!(matches!(run("sleep 20", Duration::from_millis(100)), Said::Failed(why) if why.contains("not done")));
    }
}
