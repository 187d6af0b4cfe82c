//! `verdigris tune`: measures the ways to compute a list of problems and remembers the fastest of each, in the plan cache and, if asked, in
//! the text of a set that ships with the library.
//!
//! The exit code is 1 where no engine takes one of the problems, or where there were problems and none was tuned.
//!
//! Beside each choice stands what a plan at once would have taken, timed in the same turns. What that costs is judged on a third of the
//! problems, held out by the hash of their keys: the cost models are fitted on the others alone.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use verdigris::explain::{ChosenBy, PartExplanation};
use verdigris::observe::{Entry, read_workload};
use verdigris::plan_cache::{Answer, TunedChoice, with_choices};
use verdigris::whole_files::write_whole;
use verdigris::{Config, Error, Handle, Limits, Stage, Tuning};
use verdigris_engines::engine::Knobs;
use verdigris_graph::{Key, Problem, json, pattern};

use verdigris_cli::record::{Record, now};
use verdigris_cli::selection::{self, ConvSelection, GemmSelection};
use verdigris_cli::table::{self, Align};
use verdigris_cli::{Verdict, say};

/// What to tune.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Matrix products: those of the list, or one from the command line.
    Gemm(Box<Gemm>),
    /// Convolutions: those of the list, or one from the command line.
    Conv(Box<Conv>),
    /// The problems that graphs are cut into.
    Graph(Graphs),
    /// The problems that an application ran, the most executed first: what VERDIGRIS_RECORD wrote.
    Workload(Workload),
}

#[derive(clap::Args)]
struct Gemm {
    #[command(flatten)]
    problems: GemmSelection,
    #[command(flatten)]
    how: How,
}

#[derive(clap::Args)]
struct Conv {
    #[command(flatten)]
    problems: ConvSelection,
    #[command(flatten)]
    how: How,
}

#[derive(clap::Args)]
struct Graphs {
    /// Graphs, as JSON.
    #[arg(required = true)]
    files: Vec<PathBuf>,
    #[command(flatten)]
    how: How,
}

#[derive(clap::Args)]
struct Workload {
    /// The file.
    file: PathBuf,
    #[command(flatten)]
    how: How,
}

#[derive(clap::Args, Clone, Debug)]
struct How {
    /// Seconds a problem, compilation included; what would be chosen at once is compiled and measured however long it takes.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Candidates a problem: those with the least estimates; and the best of each engine, and what would be chosen at once.
    #[arg(long, default_value_t = 12)]
    candidates: usize,
    /// Measure although a choice is remembered.
    #[arg(long)]
    again: bool,
    /// Seconds for the whole run; problems that no time is left for are counted.
    #[arg(long)]
    budget: Option<f64>,
    /// Also write the choices into this file, as the set that ships with the library: in the place of earlier ones for the same problems.
    #[arg(long, value_name = "FILE")]
    set: Option<PathBuf>,
    /// Where the record goes; default bench/record/DEVICE/DATE-tune.jsonl. `none` keeps no record.
    #[arg(long)]
    record: Option<PathBuf>,
    /// Print rows and the summary as JSON instead of tables.
    #[arg(long)]
    json: bool,
}

/// No run is as long: what a number of seconds may be, so that it is a time.
const MOST_SECONDS: f64 = 1e7;

/// A problem to tune.
struct Task {
    class: String,
    dtype: String,
    name: String,
    problem: Problem,
    limits: Limits,
}

/// What tuning a problem gave.
#[derive(Clone, Debug, Serialize)]
struct Row {
    suite: &'static str,
    class: String,
    problem: String,
    dtype: String,
    key: Key,
    /// Of the third that the cost models have not seen.
    held_out: bool,
    chosen_by: ChosenBy,
    engine: &'static str,
    knobs: Knobs,
    /// Median microseconds of the chosen way; none where nothing was measured.
    us: Option<f64>,
    estimate_us: f64,
    /// What a plan at once would take, measured in the same turns.
    instant_engine: Option<&'static str>,
    instant_knobs: Option<Knobs>,
    instant_us: Option<f64>,
    /// `instant_us / us`: at least 1.
    instant_ratio: Option<f64>,
    /// Ways that were measured, and that were looked at.
    measured: usize,
    ways: usize,
    /// Milliseconds until the kernels were loaded, and in all.
    kernels_ms: Option<f64>,
    total_ms: Option<f64>,
    remarks: Vec<String>,
    machine: String,
    driver: String,
    versions: String,
    date: String,
}

/// Carries out `tune`.
pub(crate) fn run(arguments: &Arguments) -> Result<Verdict> {
    let (tasks, how) = match &arguments.what {
        What::Gemm(gemm) => (gemm.tasks()?, &gemm.how),
        What::Conv(conv) => (conv.tasks()?, &conv.how),
        What::Graph(graphs) => (graphs.tasks()?, &graphs.how),
        What::Workload(workload) => (workload.tasks()?, &workload.how),
    };
    how.check()?;
    let config = Config::from_environment()?;
    // Without a GPU there is nothing to tune, which is what was asked for.
    let handle = Handle::open(&config).context("tuning needs a GPU")?;
    if let Some(Err(trouble)) = handle.pack() {
        eprintln!("{trouble}");
    }
    tune(&handle, &tasks, how)
}

impl How {
    fn check(&self) -> Result<()> {
        if !(self.seconds > 0.0 && self.seconds <= MOST_SECONDS) {
            bail!("--seconds {}: more than 0, and at most {MOST_SECONDS}", self.seconds);
        }
        if let Some(budget) = self.budget.filter(|budget| !(*budget > 0.0 && *budget <= MOST_SECONDS)) {
            bail!("--budget {budget}: more than 0, and at most {MOST_SECONDS}");
        }
        if self.candidates == 0 {
            bail!("--candidates 0: at least 1");
        }
        Ok(())
    }
}

impl Gemm {
    fn tasks(&self) -> Result<Vec<Task>> {
        let task = |named: verdigris_cli::problem::Named| {
            let (problem, limits) = (Problem::Gemm(named.problem), Limits::default());
            Task { class: named.class, dtype: named.dtype, name: named.name, problem, limits }
        };
        Ok(self.problems.problems()?.into_iter().map(task).collect())
    }
}

impl Conv {
    fn tasks(&self) -> Result<Vec<Task>> {
        let task = |row: verdigris_reference::conv_list::ConvBenchProblem| {
            let (problem, limits) = (selection::as_planned(&row.problem), Limits::default());
            Task { class: row.class, dtype: row.dtype.name().to_owned(), name: row.name, problem, limits }
        };
        Ok(self.problems.problems()?.into_iter().map(task).collect())
    }
}

impl Graphs {
    fn tasks(&self) -> Result<Vec<Task>> {
        let mut tasks = Vec::new();
        for file in &self.files {
            let path = file.display();
            let text = std::fs::read_to_string(file).with_context(|| format!("reading {path}"))?;
            let graph = json::graph_from_json(&text).with_context(|| path.to_string())?;
            let parts = pattern::partition(&graph).with_context(|| path.to_string())?.parts;
            for (number, part) in parts.into_iter().enumerate().filter(|(_, part)| !part.problem.is_empty()) {
                let declared = |uid: &verdigris_graph::Uid| graph.tensor(*uid).and_then(|tensor| tensor.alignment_bytes);
                let limits = Limits { alignments_bytes: part.bindings.iter().map(declared).collect(), ..Limits::default() };
                let operands = part.problem.buffers()?;
                tasks.push(Task {
                    class: "graph".to_owned(),
                    dtype: operands.first().map_or_else(|| "-".to_owned(), |operand| operand.dtype.to_string()),
                    name: format!("{}/{number}-{}", graph.name, part.problem.kind()),
                    problem: part.problem,
                    limits,
                });
            }
        }
        Ok(tasks)
    }
}

/// The class of rows that are problems of a workload.
pub(crate) const WORKLOAD: &str = "workload";

/// The element type that rows of a problem have: that of its first operand.
pub(crate) fn dtype_of(problem: &Problem) -> Result<String> {
    Ok(problem.buffers()?.first().map_or_else(|| "-".to_owned(), |operand| operand.dtype.to_string()))
}

impl Workload {
    fn tasks(&self) -> Result<Vec<Task>> {
        let task = |entry: Entry| {
            // In its own words: kind, types and dims are the same for other functions, paddings and masks.
            let (dtype, name) = (dtype_of(&entry.problem)?, entry.problem.to_string());
            Ok(Task { class: WORKLOAD.to_owned(), dtype, name, problem: entry.problem, limits: Limits::default() })
        };
        let recorded = read_workload(&self.file)?;
        if let Some(remark) = recorded.remark() {
            eprintln!("{remark}");
        }
        recorded.entries.into_iter().map(task).collect()
    }
}

/// Whether a problem is of the third that instant choices are judged on.
fn is_held_out(key: Key) -> bool {
    key.to_string().get(..8).and_then(|digits| u32::from_str_radix(digits, 16).ok()).is_some_and(|start| start % 3 == 0)
}

fn tune(handle: &Handle, tasks: &[Task], how: &How) -> Result<Verdict> {
    let begun = Instant::now();
    let date = now();
    let mut record = match how.record.as_deref() {
        Some(path) if path.as_os_str() == "none" => None,
        path => Some(Record::open(path, &handle.arch().name, &date, "tune")?),
    };
    let progress = ProgressBar::new(tasks.len() as u64);
    progress.set_style(
        ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} eta {eta} {msg}").unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    let tuning = Tuning { candidates: how.candidates, budget: Duration::from_secs_f64(how.seconds), again: how.again, shipped: false };
    let (mut rows, mut choices, mut seen, mut left, mut refused) = (Vec::new(), Vec::new(), HashSet::new(), 0, 0);
    let mut broken = None;
    for task in tasks {
        let key = Key::of(&task.problem);
        // Lists name some problems twice, and graphs often have equal parts.
        if !seen.insert((key, task.limits.alignments_bytes.clone())) || task.problem.is_empty() {
            progress.inc(1);
            continue;
        }
        if how.budget.is_some_and(|budget| begun.elapsed().as_secs_f64() > budget) {
            left += 1;
            continue;
        }
        progress.set_message(format!("{} {}", task.dtype, task.name));
        let mut watch = |stage: Stage, done: usize, total: usize| {
            let stage = if stage == Stage::Kernels { "kernels" } else { "measuring" };
            progress.set_message(format!("{} {}: {stage} {done}/{total}", task.dtype, task.name));
        };
        let chosen = match handle.tune(&task.problem, &task.limits, &tuning, &mut watch) {
            Ok(chosen) => chosen,
            Err(error @ Error::NoEngine(_)) => {
                progress.suspend(|| eprintln!("{} {}: {error}", task.dtype, task.name));
                refused += 1;
                progress.inc(1);
                continue;
            }
            Err(error) => {
                // A fault of a kernel takes the context with it: what is measured so far is still told.
                broken = Some(anyhow::Error::from(error).context(task.name.clone()));
                break;
            }
        };
        let row = Row::of(handle, task, &chosen.explanation, &date);
        let line = serde_json::to_string(&row)?;
        if let Some(record) = &mut record {
            record.write(&line)?;
        }
        if how.json {
            progress.suspend(|| say!("{line}"));
        }
        // What is best among aligned ways alone is not for the set, which is asked under any limits.
        let is_for_all = task.limits.alignments_bytes.iter().all(Option::is_none);
        if let Some(us) = row.us.filter(|_| is_for_all && matches!(row.chosen_by, ChosenBy::Clock | ChosenBy::PlanCache)) {
            choices.push(TunedChoice {
                question: handle.question(&task.problem, &task.limits),
                answer: Answer::of(&chosen.way, us),
                remark: remark(&row),
            });
        }
        rows.push(row);
        progress.inc(1);
    }
    progress.finish_and_clear();
    let summary = Summary::of(&rows, left, refused);
    if how.json {
        say!("{}", serde_json::to_string(&summary)?);
    } else {
        print(&rows, &summary);
    }
    if left > 0 {
        eprintln!("{left} of {} problems were not tuned: --budget was spent", tasks.len());
    }
    if refused > 0 {
        eprintln!("{refused} of {} problems were not tuned: no engine takes them", tasks.len());
    }
    if rows.is_empty() && left == 0 && refused == 0 {
        eprintln!("there was nothing to tune");
    }
    if let Some(path) = &how.set {
        write_set(path, &choices)?;
        eprintln!("set: {}, {} choices", path.display(), choices.len());
    }
    if let Some(record) = &record {
        eprintln!("record: {}", record.path.display());
    }
    match (broken, handle.plan_cache_trouble(), handle.plan_cache().path()) {
        (Some(error), ..) => Err(error),
        (None, Some(trouble), _) => bail!("the choices could not be kept: {trouble}"),
        (None, None, Some(path)) => {
            eprintln!("plan cache: {}", path.display());
            Ok(judged(rows.len(), left, refused))
        }
        (None, None, None) => {
            eprintln!("no plan cache: VERDIGRIS_PLANS is off, and the choices end with this program");
            Ok(judged(rows.len(), left, refused))
        }
    }
}

/// What a run comes to that tuned so many problems, left so many for want of time, and found no engine for so many: a budget that is spent is what was asked for, unless it was
/// spent on nothing.
const fn judged(tuned: usize, left: usize, refused: usize) -> Verdict {
    if refused > 0 || tuned == 0 && left > 0 { Verdict::Bad } else { Verdict::Good }
}

/// A line for readers of a set.
fn remark(row: &Row) -> String {
    let gain = row.instant_ratio.map(|ratio| format!(", {ratio:.2} times as fast as the choice at once")).unwrap_or_default();
    format!("{} {} {}{gain}", row.class, row.dtype, row.problem)
}

/// Writes the set with these choices in it.
fn write_set(path: &Path, choices: &[TunedChoice]) -> Result<()> {
    let existing = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(error).with_context(|| format!("reading {}", path.display())),
    };
    Ok(write_whole(&[(path, with_choices(&existing, choices).as_bytes())])?)
}

impl Row {
    fn of(handle: &Handle, task: &Task, explanation: &PartExplanation, date: &str) -> Row {
        let chosen = &explanation.ways[explanation.chosen];
        let instant = explanation.tuning.map(|tuning| &explanation.ways[tuning.instant]);
        let us = chosen.measured.map(|measured| measured.us);
        let instant_us = instant.and_then(|way| way.measured).map(|measured| measured.us);
        let properties = handle.context().properties();
        Row {
            suite: "tune",
            class: task.class.clone(),
            problem: task.name.clone(),
            dtype: task.dtype.clone(),
            key: explanation.key,
            held_out: is_held_out(explanation.key),
            chosen_by: explanation.chosen_by,
            engine: chosen.summary.engine,
            knobs: chosen.summary.knobs.clone(),
            us,
            estimate_us: chosen.summary.estimate_us,
            instant_engine: instant.map(|way| way.summary.engine),
            instant_knobs: instant.map(|way| way.summary.knobs.clone()),
            instant_us,
            instant_ratio: instant_us.zip(us).map(|(instant, us)| instant / us),
            measured: explanation.ways.iter().filter(|way| way.measured.is_some()).count(),
            ways: explanation.ways.len(),
            kernels_ms: explanation.tuning.map(|tuning| tuning.kernels_ms),
            total_ms: explanation.tuning.map(|tuning| tuning.total_ms),
            remarks: explanation.remarks.clone(),
            machine: format!("{} {}", properties.name, properties.uuid),
            driver: format!("{}.{}", properties.driver_version / 1000, properties.driver_version % 1000 / 10),
            versions: format!("verdigris {} ({})", env!("CARGO_PKG_VERSION"), &verdigris_engines::SOURCE_HASH[..12]),
            date: date.to_owned(),
        }
    }
}

/// How near the choice at once comes to the best.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
struct Nearness {
    problems: usize,
    /// Geometric mean of the time at once over the best.
    geometric_mean: Option<f64>,
    /// Problems in which it is at most a tenth above the best.
    within_a_tenth: usize,
    worst: Option<f64>,
}

impl Nearness {
    fn of<'r>(rows: impl Iterator<Item = &'r Row>) -> Nearness {
        let ratios: Vec<f64> = rows.filter_map(|row| row.instant_ratio).collect();
        let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
        Nearness {
            problems: ratios.len(),
            geometric_mean: (!ratios.is_empty()).then_some(mean),
            within_a_tenth: ratios.iter().filter(|&&ratio| ratio <= 1.1).count(),
            worst: ratios.iter().copied().reduce(f64::max),
        }
    }
}

/// What a run comes to.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct Summary {
    /// The choice at once on the third that is held out: the bar is a geometric mean of 1.1.
    held_out: Nearness,
    others: Nearness,
    /// Milliseconds of tuning a problem: the bar is 1000 with a kernel pack.
    median_ms: Option<f64>,
    most_ms: Option<f64>,
    remembered: usize,
    /// For want of time.
    not_tuned: usize,
    /// No engine takes them.
    refused: usize,
}

impl Summary {
    fn of(rows: &[Row], not_tuned: usize, refused: usize) -> Summary {
        let mut times: Vec<f64> = rows.iter().filter_map(|row| row.total_ms).collect();
        times.sort_by(f64::total_cmp);
        Summary {
            held_out: Nearness::of(rows.iter().filter(|row| row.held_out)),
            others: Nearness::of(rows.iter().filter(|row| !row.held_out)),
            median_ms: times.get(times.len() / 2).copied(),
            most_ms: times.last().copied(),
            remembered: rows.iter().filter(|row| row.chosen_by != ChosenBy::Clock).count(),
            not_tuned,
            refused,
        }
    }
}

/// Rows that are shown as the worst.
const WORST: usize = 10;

fn print(rows: &[Row], summary: &Summary) {
    print_rows(rows);
    let mut worst: Vec<&Row> = rows.iter().filter(|row| row.instant_ratio.is_some()).collect();
    if worst.len() > WORST {
        worst.sort_by(|a, b| b.instant_ratio.unwrap_or(0.0).total_cmp(&a.instant_ratio.unwrap_or(0.0)));
        say!("\nthe {WORST} in which the choice at once is worst");
        print_rows(&worst.into_iter().take(WORST).cloned().collect::<Vec<_>>());
    }
    for row in rows {
        for remark in &row.remarks {
            say!("{} {}: {remark}", row.dtype, row.problem);
        }
    }
    say!("\nthe choice at once over the best: 1 is as good");
    use Align::{Left, Right};
    let number = |value: Option<f64>, digits: usize| value.map_or("-".to_owned(), |value| format!("{value:.digits$}"));
    let line = |name: &str, nearness: &Nearness| {
        let Nearness { problems, geometric_mean, within_a_tenth, worst } = *nearness;
        vec![name.to_owned(), problems.to_string(), number(geometric_mean, 3), within_a_tenth.to_string(), number(worst, 2)]
    };
    let head = [("problems", Left), ("count", Right), ("geomean", Right), ("within a tenth", Right), ("worst", Right)];
    table::print(&head, &[line("held out", &summary.held_out), line("the others", &summary.others)]);
    say!("\ntuning a problem took {} ms in the median, {} ms at most", number(summary.median_ms, 0), number(summary.most_ms, 0));
    if summary.remembered > 0 {
        say!("{} were not measured now, but remembered; --again measures them", summary.remembered);
    }
}

fn print_rows(rows: &[Row]) {
    use Align::{Left, Right};
    let head = [
        ("problem", Left),
        ("dtype", Left),
        ("best µs", Right),
        ("at once µs", Right),
        ("ratio", Right),
        ("held out", Left),
        ("measured", Right),
        ("ms", Right),
        ("engine and knobs", Left),
        ("at once", Left),
    ];
    let number = |value: Option<f64>, digits: usize| value.map_or("-".to_owned(), |value| format!("{value:.digits$}"));
    let cells = |row: &Row| {
        let is_same = row.instant_engine == Some(row.engine) && row.instant_knobs.as_ref() == Some(&row.knobs);
        let at_once = match (row.instant_engine, &row.instant_knobs) {
            _ if is_same => "the same".to_owned(),
            (Some(engine), Some(knobs)) => format!("{engine} {knobs}"),
            _ => row.chosen_by.words().to_owned(),
        };
        vec![
            row.problem.clone(),
            row.dtype.clone(),
            number(row.us, 2),
            number(row.instant_us, 2),
            number(row.instant_ratio, 3),
            if row.held_out { "yes".to_owned() } else { String::new() },
            format!("{}/{}", row.measured, row.ways),
            number(row.total_ms, 0),
            format!("{} {}", row.engine, row.knobs),
            at_once,
        ]
    };
    table::print(&head, &rows.iter().map(cells).collect::<Vec<_>>());
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use verdigris_cuda::fake;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn asked(words: &str) -> (Vec<Task>, How) {
        match Line::parse_from(std::iter::once("x").chain(words.split_whitespace())).arguments.what {
            What::Gemm(gemm) => (gemm.tasks().expect("problems"), gemm.how),
            What::Conv(conv) => (conv.tasks().expect("problems"), conv.how),
            What::Graph(graphs) => (graphs.tasks().expect("problems"), graphs.how),
            What::Workload(workload) => (workload.tasks().expect("problems"), workload.how),
        }
    }

    #[test]
    fn what_an_application_ran_is_tuned() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("workload.txt");
        let problem: Problem = "conv fprop bf16 nhwc n=2 c=32 h=9 w=9 k=32 r=3 s=3 pad=1".parse().expect("reads");
        let recording = Config { record: Some(path.clone()), ..Config::default() };
        handle(&recording).plan(&problem, &Limits::default()).expect("plans");
        let (tasks, how) = asked(&format!("workload {} --seconds 20 --candidates 2 --record none", path.display()));
        assert_eq!(tasks.iter().map(|task| (task.class.as_str(), task.dtype.as_str())).collect::<Vec<_>>(), [("workload", "bf16")]);
        let config = Config { plans: Some(folder.path().join("plans.txt")), ..Config::default() };
        assert_eq!(tune(&handle(&config), &tasks, &how).expect("tunes"), Verdict::Good);
        let chosen = handle(&config).choose(&problem, &Limits::default()).expect("chooses");
        assert_eq!(chosen.explanation.chosen_by, ChosenBy::PlanCache, "{}", chosen.explanation);
    }

    fn handle(config: &Config) -> Handle {
        Handle::on(&fake::context(), config).expect("the fake is always there")
    }

    #[test]
    fn choices_go_into_the_plan_cache_the_set_and_the_record() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        let config = Config { plans: Some(at("plans.txt")), ..Config::default() };
        let (tasks, how) = asked("conv -n 1 -c 8 -k 8 --input 6x6 --filter-size 3x3 --pad 1 --dtype tf32 --seconds 20 --candidates 2");
        let how = How { set: Some(at("set.txt")), record: Some(at("record.jsonl")), ..how };
        assert_eq!(tune(&handle(&config), &tasks, &how).expect("tunes"), Verdict::Good);
        let lines: Vec<serde_json::Value> = std::fs::read_to_string(at("record.jsonl"))
            .expect("a record")
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"))
            .collect();
        assert_eq!(lines.len(), tasks.len());
        for line in &lines {
            assert_eq!(line["chosen_by"], "clock");
            assert!(line["instant_ratio"].as_f64().is_some_and(|ratio| ratio >= 1.0), "{line}");
            assert!(line["total_ms"].as_f64() >= line["kernels_ms"].as_f64(), "{line}");
        }
        // The next process finds each choice, and so does a graph of the same convolution.
        let next = handle(&config);
        for (task, line) in tasks.iter().zip(&lines) {
            let chosen = next.choose(&task.problem, &task.limits).expect("chooses");
            assert_eq!(chosen.explanation.chosen_by, ChosenBy::PlanCache, "{}", chosen.explanation);
            assert_eq!(chosen.way.engine.name, line["engine"]);
        }
        let set = std::fs::read_to_string(at("set.txt")).expect("a set");
        assert_eq!(set.lines().filter(|line| line.starts_with("plan2\t")).count(), tasks.len(), "{set}");
        assert!(set.contains("# command-line tf32 1x8@6x6-8k3x3s1p1d1g1-fprop"), "{set}");
        // Once more: all are remembered, and the set is as it was.
        let how = How { record: Some("none".into()), ..how };
        assert_eq!(tune(&next, &tasks, &how).expect("tunes"), Verdict::Good);
        let plans = |text: &str| text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(plans(&std::fs::read_to_string(at("set.txt")).expect("a set")), plans(&set));
        // A plan cache that cannot be written is an error, not silence.
        let blocked = Config { plans: Some(at("set.txt").join("below")), ..Config::default() };
        let told = tune(&handle(&blocked), &tasks[..1], &How { again: true, ..how }).expect_err("nothing is kept").to_string();
        assert!(told.contains("could not be kept"), "{told}");
    }

    #[test]
    fn the_parts_of_graphs_are_tuned_as_they_are_planned() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("graph.json");
        let mut g = verdigris_graph::GraphBuilder::new("two");
        let layout = |dims: &[u64]| verdigris_tensor::Layout::row_major(dims).expect("small");
        let x = g.tensor("x", verdigris_tensor::DType::F32, layout(&[16, 32]));
        let w = g.tensor("w", verdigris_tensor::DType::F32, layout(&[32, 32]));
        g.align(x, 4).expect("known");
        let build = |g: &mut verdigris_graph::GraphBuilder| -> Result<(), verdigris_graph::Error> {
            let h = g.matmul("up", x, w, verdigris_graph::Precision::Ieee)?;
            let y = g.matmul("down", h, w, verdigris_graph::Precision::Ieee)?;
            g.store(y, "y", verdigris_tensor::DType::F32)
        };
        build(&mut g).expect("fits");
        let graph = g.finish().expect("valid");
        std::fs::write(&path, json::graph_to_json(&graph)).expect("writes");
        let (tasks, how) = asked(&format!("graph {} --record none --seconds 20 --candidates 1", path.display()));
        assert_eq!(tasks.iter().map(|task| task.name.as_str()).collect::<Vec<_>>(), ["two/0-gemm", "two/1-gemm"]);
        let handle = handle(&Config::default());
        tune(&handle, &tasks, &how).expect("tunes");
        let plan = handle.plan_graph(&graph, &verdigris::Policy::default()).expect("plans");
        assert!(plan.explain().parts.iter().all(|part| part.chosen_by == ChosenBy::PlanCache), "{}", plan.explain());
    }

    /// Who reads the exit code alone learns that something was not tuned.
    #[test]
    fn what_no_engine_takes_is_a_verdict() {
        let handle = handle(&Config::default());
        // More launches than any engine takes beside a problem that all take.
        let (far, near) = (asked("gemm -m 35184372088832 -n 1 -k 1").0, asked("gemm -m 16 -n 16 -k 16").0);
        let how = asked("gemm -m 16 -n 16 -k 16 --seconds 20 --candidates 1 --record none").1;
        let both = || {
            far.iter().chain(&near).map(|task| Task {
                class: String::new(),
                dtype: task.dtype.clone(),
                name: task.name.clone(),
                problem: task.problem.clone(),
                limits: task.limits.clone(),
            })
        };
        assert_eq!(tune(&handle, &far, &how).expect("told"), Verdict::Bad);
        assert_eq!(tune(&handle, &both().collect::<Vec<_>>(), &how).expect("told"), Verdict::Bad);
        assert_eq!(tune(&handle, &near, &how).expect("tunes"), Verdict::Good);
        assert_eq!(tune(&handle, &[], &how).expect("nothing to do"), Verdict::Good);
        // A budget that is spent on some is what was asked for.
        assert_eq!([judged(0, 3, 0), judged(1, 3, 0), judged(0, 0, 0)], [Verdict::Bad, Verdict::Good, Verdict::Good]);
        let spent = How { budget: Some(1e-9), ..how };
        assert_eq!(tune(&handle, &near, &spent).expect("told"), Verdict::Bad);
    }

    #[test]
    fn a_third_is_held_out_and_means_are_geometric() {
        let held: Vec<bool> = asked("conv --dtype bf16").0.iter().map(|task| is_held_out(Key::of(&task.problem))).collect();
        let part = held.iter().filter(|held| **held).count() as f64 / held.len() as f64;
        assert!((0.2..0.47).contains(&part), "{part}");
        let handle = handle(&Config::default());
        let (tasks, _) = asked("gemm -m 16 -n 16 -k 16");
        let chosen = handle.choose(&tasks[0].problem, &tasks[0].limits).expect("chooses");
        let row = Row::of(&handle, &tasks[0], &chosen.explanation, "today");
        let rows: Vec<Row> =
            [2.0, 0.5, 1.0].map(|ratio| Row { instant_ratio: Some(ratio), held_out: true, total_ms: Some(ratio), ..row.clone() }).to_vec();
        let summary = Summary::of(&rows, 1, 2);
        assert_eq!((summary.held_out.problems, summary.others.problems), (3, 0));
        assert!(summary.held_out.geometric_mean.is_some_and(|mean| (mean - 1.0).abs() < 1e-12));
        assert_eq!((summary.held_out.within_a_tenth, summary.held_out.worst), (2, Some(2.0)));
        assert_eq!((summary.median_ms, summary.most_ms, summary.not_tuned, summary.refused), (Some(1.0), Some(2.0), 1, 2));
    }
}
