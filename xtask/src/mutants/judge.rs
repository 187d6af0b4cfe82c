//! One run of one mutant, in a process of its own, and what it says.
//!
//! A process of its own shares no kernels with another mutant, and may panic, stop or hang.

use std::io::{Read, Seek};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::build::Programs;
use super::list::Run;

/// A process that has had a processor for longer hangs. What others have the processors for does not count.
const LIMIT: Duration = Duration::from_secs(120);
/// A process that is not done by then hangs, though it had no processor: it waits, or the machine is too busy to tell.
const WAIT: Duration = Duration::from_secs(1_200);
/// The unit of the times that Linux tells of a process.
const TICKS_PER_SECOND: u64 = 100;
/// How often a process is looked after.
const LOOK: Duration = Duration::from_millis(10);
/// Exit codes of a program that found faults, and of a test program with a failed test.
const FOUND: [i32; 2] = [1, 101];

/// What a run says of a mutant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Said {
    /// What was found first; nothing if all passed.
    pub(super) found: Option<Found>,
    /// The mutant's text was reached.
    pub(super) reached: bool,
    /// Cases or tests that ran.
    pub(super) ran: u64,
    pub(super) seconds: f64,
}

/// Something that a run found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Found {
    /// The rule, or another word of [`super::list::Entry::expect`].
    pub(super) by: String,
    /// The message's first line; of a kernel that does not verify, with its first fault.
    pub(super) line: String,
    /// Whether that line names one of the kernel.
    pub(super) place: Place,
}

/// What a message has to say of where a mistake is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Place {
    /// A line of the crate that holds the kernel.
    Kernel,
    /// No line, where the rule has one.
    Nowhere,
    /// The evidence has no line: it is about results, a launch or a kernel as a whole, or a test's.
    NotAsked,
}

/// Rules about a kernel or a launch as a whole, which stand on no line of it.
const OF_THE_WHOLE: [&str; 8] = ["launch", "shared", "threads", "registers", "cluster", "params", "map", "timeout"];
/// Evidence that is no rule of the verifier or of the interpreter.
const NO_RULE: [&str; 8] = ["numbers", "determinism", "refusal", "bounds", "panic", "hang", "test", "error"];
/// Where the kernels are that `workshop verify` runs.
const KERNELS: &str = "crates/verdigris-engines/src/";

impl Found {
    /// Of what `workshop verify` says.
    fn of_message(message: &str) -> Found {
        let (by, line) = (kind_of(message), evidence_line(message));
        let place = match by.as_str() {
            by if NO_RULE.contains(&by) || OF_THE_WHOLE.contains(&by) => Place::NotAsked,
            _ if names_line(&line) => Place::Kernel,
            _ => Place::Nowhere,
        };
        Found { by, line, place }
    }

    fn without_line(by: &str, line: String) -> Found {
        Found { by: by.to_owned(), line, place: Place::NotAsked }
    }

    pub(super) fn is_placed(&self) -> bool {
        self.place != Place::Nowhere
    }
}

/// Whether a text names a line of a kernel's source, `FILE.rs:LINE`.
fn names_line(text: &str) -> bool {
    text.match_indices(KERNELS).any(|(at, _)| {
        let word = text[at..].split(|c: char| c.is_whitespace() || matches!(c, ',' | ')' | '(')).next().unwrap_or_default();
        word.split_once(".rs:").is_some_and(|(_, line)| line.starts_with(|c: char| c.is_ascii_digit()))
    })
}

/// The first line of a message; of one that only counts the faults of a kernel, the first of them behind it.
fn evidence_line(message: &str) -> String {
    let first = first_line(message);
    if !first.ends_with(" fault") && !first.ends_with(" faults") {
        return first;
    }
    let fault = message.lines().map(str::trim).skip_while(|line| *line != first).nth(1).unwrap_or_default();
    format!("{first} {fault}").trim_end().to_owned()
}

/// Runs mutant `number` (0 for none) on what is to find it.
///
/// # Errors
/// A program that cannot be started.
pub(super) fn run(programs: &Programs, run: &Run, seed: u64, number: u64) -> Result<Said> {
    let mut command = match (&run.package, &run.test) {
        (Some(package), Some(test)) => {
            let path = programs.tests.get(&(package.clone(), test.clone())).with_context(|| format!("{package} {test} was not built"))?;
            let mut command = Command::new(path);
            command.args(run.name.iter()).arg("--test-threads=1");
            command
        }
        _ => {
            let mut command = Command::new(&programs.workshop);
            command.args(["verify", "--json", "--seed", &seed.to_string()]);
            command.args(run.verify.iter());
            if let Some(engine) = &run.catalog {
                command.args(["--catalog", "--engine", engine]);
            }
            command.args(run.engine.iter().flat_map(|engine| ["--engine", engine]));
            command.args(run.kernel.iter().flat_map(|kernel| ["--kernel", kernel]));
            command.args(run.all.then_some("--all"));
            command
        }
    };
    // Several of them run beside each other.
    command.current_dir(&programs.folder).env("VERDIGRIS_MUTANT", number.to_string()).env("RAYON_NUM_THREADS", "1");
    let begun = Instant::now();
    let (status, out, err) = finish(&mut command)?;
    let seconds = begun.elapsed().as_secs_f64();
    let reached = err.lines().any(|line| line == "mutant reached");
    let err: String = err.lines().filter(|line| *line != "mutant reached").map(|line| format!("{line}\n")).collect();
    let (found, ran) = match status {
        None => (Some(Found::without_line("hang", format!("still running after {seconds:.0} s"))), 0),
        Some(status) if run.has_seed() => of_verify(status, &out, &err),
        Some(status) => of_tests(status, &out, &err, run.shows.as_deref().unwrap_or("test")),
    };
    Ok(Said { found, reached, ran, seconds })
}

/// Runs a process to its end, or ends it at the limit; its status, and what it wrote.
fn finish(command: &mut Command) -> Result<(Option<ExitStatus>, String, String)> {
    let (mut out, mut err) = (tempfile::tempfile()?, tempfile::tempfile()?);
    let mut child = (command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(err.try_clone()?).spawn())
        .with_context(|| format!("starting {}", command.get_program().to_string_lossy()))?;
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if begun.elapsed() > LIMIT && (begun.elapsed() > WAIT || processor_time(child.id()).is_none_or(|time| time > LIMIT)) {
            child.kill()?;
            child.wait()?;
            break None;
        }
        std::thread::sleep(LOOK);
    };
    let text = |file: &mut std::fs::File| -> Result<String> {
        let mut bytes = Vec::new();
        file.rewind()?;
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    Ok((status, text(&mut out)?, text(&mut err)?))
}

/// How long a process has had a processor, all its threads together; nothing where the system does not tell in the way of Linux.
fn processor_time(id: u32) -> Option<Duration> {
    of_stat(&std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?)
}

/// The times of user and of system in a line of `/proc/ID/stat`. The program's name, in brackets, may hold anything.
fn of_stat(line: &str) -> Option<Duration> {
    let mut fields = line.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    Some(Duration::from_millis((ticks()? + ticks()?) * 1000 / TICKS_PER_SECOND))
}

/// What `workshop verify --json` says.
fn of_verify(status: ExitStatus, out: &str, err: &str) -> (Option<Found>, u64) {
    let value: Value = out.lines().rev().find_map(|line| serde_json::from_str(line).ok()).unwrap_or_default();
    let ran = runs_of(&value);
    if let Some(message) = value["faults"].as_array().and_then(|faults| faults.first()?["message"].as_str()) {
        return (Some(Found::of_message(message)), ran);
    }
    if status.success() && value.is_object() {
        return (None, ran);
    }
    let by = if status.code().is_some_and(|code| !FOUND.contains(&code)) { "error" } else { "panic" };
    (Some(Found::without_line(by, first_line(err))), ran)
}

/// Everything that a `verify` ran: products, graphs, and problems with far strides.
fn runs_of(value: &Value) -> u64 {
    ["cases", "graph_runs", "far_runs"].iter().filter_map(|count| value[count].as_u64()).sum()
}

/// What a test program says.
fn of_tests(status: ExitStatus, out: &str, err: &str, shows: &str) -> (Option<Found>, u64) {
    let count = |what: &str| -> u64 {
        let result = out.lines().find_map(|line| line.strip_prefix("test result: "));
        let before = result.and_then(|line| line.split(what).next());
        before.and_then(|before| before.trim_end().rsplit(' ').next()).and_then(|word| word.parse().ok()).unwrap_or(0)
    };
    let ran = count("passed") + count("failed");
    if status.success() {
        return (None, ran);
    }
    // A failed test tells why in the line behind the one that says where.
    let said = [out, err].into_iter().find_map(|text| text.split_once("panicked at ").map(|(_, behind)| behind));
    let line = said.map_or_else(|| first_line(err), |behind| behind.lines().take(2).collect::<Vec<_>>().join(" "));
    let by = if status.code() == Some(101) && ran > 0 { shows } else { "panic" };
    (Some(Found::without_line(by, line)), ran)
}

/// What kind of evidence a message of `verify` is: the rule in brackets, or a word for what has none.
fn kind_of(message: &str) -> String {
    let said = |text: &str| message.contains(text);
    let is_rule = |rule: &&str| !rule.is_empty() && rule.chars().all(|c| c.is_ascii_lowercase() || c == '-');
    let mut rules = (message.split('[').skip(1)).filter_map(|behind| behind.split_once(']')).map(|(rule, _)| rule).filter(is_rule);
    match rules.next() {
        // What was not launched for a fault of its kernel was found by that fault's rule.
        Some("launch") if said("does not verify: ") => rules.next().unwrap_or("launch"),
        Some(rule) => rule,
        None if said("panicked: ") => "panic",
        None if said("noted as deterministic") => "determinism",
        None if said("there is no such way") || said("a part that nobody takes") => "refusal",
        None if said(", bounded by ") || said(" is more than ") => "bounds",
        None => "numbers",
    }
    .to_owned()
}

fn first_line(message: &str) -> String {
    message.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_tells_its_processor_time() {
        let line = "7 (a) b) S 1 2 3 4 5 6 7 8 9 10 150 25 0 0 20 0 1 0 9 8 7";
        assert_eq!(of_stat(line), Some(Duration::from_millis(1_750)));
        assert_eq!(of_stat("7 (a"), None);
        assert_eq!(of_stat("7 (a) S 1 2"), None);
    }

    #[test]
    fn runs_with_far_strides_count() {
        let with = |text: &str| runs_of(&serde_json::from_str(text).expect("JSON"));
        assert_eq!(with(r#"{"cases": 0, "graph_runs": 0, "far_runs": 3, "pairs": 9}"#), 3);
        assert_eq!(with(r#"{"cases": 2, "graph_runs": 5, "far_runs": 3}"#), 10);
        assert_eq!(with("{}"), 0);
    }

    #[test]
    fn messages_are_told_apart() {
        assert_eq!(kind_of("kernel x, kernel.rs:3:5: [race] this thread reads"), "race");
        assert_eq!(kind_of("output in slot 2: 3 of 8 elements are wrong, first [0, 1]"), "numbers");
        assert_eq!(kind_of("launch: [launch] does not verify: kernel x: 2 faults\n  [commit] kernel.rs:3:5: this waits"), "commit");
        assert_eq!(kind_of("panicked: index out of bounds"), "panic");
        assert_eq!(kind_of("noted as deterministic, but schedules 0 and 1 give different bits"), "determinism");
        assert_eq!(kind_of("there is no such way: without a word"), "refusal");
    }

    #[test]
    fn rules_name_a_line_of_the_kernel() {
        let place = |message: &str| Found::of_message(message).place;
        assert_eq!(place("crates/verdigris-engines/src/a/b.rs:7:3: [race] this thread reads"), Place::Kernel);
        assert_eq!(place("[race] this thread reads"), Place::Nowhere);
        assert_eq!(place("crates/verdigris-kir/src/tile/ring.rs:9:1: [race] this thread reads"), Place::Nowhere);
        assert_eq!(place("crates/verdigris-engines/src/a/b.rs: [race] this thread reads"), Place::Nowhere);
        assert_eq!(place("launch: [launch] grid x 3 is not a multiple of the cluster size 2"), Place::NotAsked);
        assert_eq!(place("output in slot 2: 3 of 8 elements are wrong"), Place::NotAsked);
    }

    #[test]
    fn a_kernel_that_does_not_verify_is_told_with_its_first_fault() {
        let faults = "a=1: launch: [launch] does not verify: kernel x: 2 faults\n  [commit] crates/verdigris-engines/src/x.rs:3:5: no\n  [race] y.rs:1:1: z";
        let found = Found::of_message(faults);
        assert_eq!((found.by.as_str(), found.place), ("commit", Place::Kernel));
        assert!(found.line.ends_with("kernel x: 2 faults [commit] crates/verdigris-engines/src/x.rs:3:5: no"), "{}", found.line);
        assert_eq!(evidence_line("all is one line\nof two"), "all is one line");
    }
}
