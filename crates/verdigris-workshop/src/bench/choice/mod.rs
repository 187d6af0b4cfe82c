//! `bench choice`: how near the choice at once comes to the measured choice, on problems drawn at random.
//!
//! The choice at once is what a plan takes by estimate alone: no plan cache, no shipped choices. The measured choice is the fastest of all
//! configs, or of a sample of them, by the clock. [`draw`] states the distributions.

mod draw;
pub(crate) mod features;
#[cfg(test)]
mod known_engine;
mod pick;
#[cfg(test)]
mod right_engine;
mod summary;
mod trial;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use rayon::prelude::*;
use serde::Serialize;
use serde_json::Value;
use verdigris::{Config, Handle, KernelCounts};
use verdigris_engines::arch::Arch;
use verdigris_engines::engine::{Knobs, Notes};
use verdigris_graph::{Key, Problem};
use verdigris_kir::program::{Program, Residency, Step};

use super::record;
use draw::{Drawn, Kind};
use pick::{EngineConfigs, Field, Picked, Why};
use summary::{Outcome, Summary};
use trial::{Arena, Trial, Trials};
use verdigris_cli::record::{Record, now};
use verdigris_cli::table::{self, Align};
use verdigris_cli::{Verdict, device, say};

/// Clocks of the chip are asked for every so many problems.
const CLOCKS_EVERY: usize = 50;

/// Options of `bench choice`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Matrix products that are drawn.
    #[arg(long, default_value_t = 200)]
    products: u64,
    /// Convolutions that are drawn.
    #[arg(long, default_value_t = 300)]
    convolutions: u64,
    /// What they are drawn from: the same problems for the same seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Of what is drawn, only problems that one of these engines takes: for engines that few problems lead to.
    #[arg(long, value_name = "ENGINE", value_delimiter = ',')]
    taken_by: Vec<String>,
    /// Most configs of a problem that are measured.
    #[arg(long, default_value_t = 40)]
    configs: usize,
    /// Seconds for the whole run; problems that no time is left for are counted.
    #[arg(long, default_value_t = 420.0)]
    seconds: f64,
    /// Seconds of a problem, loading of kernels apart.
    #[arg(long, default_value_t = 0.8)]
    problem_seconds: f64,
    /// Where the record goes; default bench/record/DEVICE/DATE-choice.jsonl. `none` keeps no record.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Draw the problems and choose for an H200, without a GPU.
    #[arg(long)]
    dry_run: bool,
    /// Print the summary as JSON instead of tables.
    #[arg(long)]
    json: bool,
}

/// A problem with what is measured of it; or why there is nothing.
struct Task {
    drawn: Drawn,
    field: Result<Field, String>,
}

/// A launch of a config, as a cost model may read it.
#[derive(Serialize)]
struct LaunchLine {
    kernel: String,
    grid: [u32; 3],
    cooperative: bool,
    overlap: bool,
}

/// A config of a problem.
#[derive(Serialize)]
struct ConfigLine {
    engine: &'static str,
    knobs: Knobs,
    why: Why,
    notes: Notes,
    estimate_us: f64,
    screen_us: Option<f64>,
    us: Option<f64>,
    spread: Option<f64>,
    trouble: Option<String>,
    workspace_bytes: u64,
    scratch: Vec<(&'static str, u64)>,
    launches: Vec<LaunchLine>,
    fill_bytes: u64,
    copy_bytes: u64,
}

/// A problem, as one line.
#[derive(Serialize)]
struct Line<'a> {
    suite: &'static str,
    seed: u64,
    kind: &'static str,
    number: u64,
    words: &'a str,
    dtype: &'static str,
    shape: &'a Value,
    flops: f64,
    bytes: u64,
    key: Key,
    problem: &'a Problem,
    /// All configs that the limits allow, by engine.
    engines: &'a BTreeMap<&'static str, EngineConfigs>,
    /// Those that were measured; the first is the choice at once.
    configs: Vec<ConfigLine>,
    /// The fastest, by place.
    best: Option<usize>,
    /// Time of the choice at once over that of the fastest.
    ratio: Option<f64>,
    written: Option<bool>,
    sets: u64,
    rounds: usize,
    remark: Option<String>,
    /// The last that `nvidia-smi` said.
    clocks: Option<String>,
    #[serde(flatten)]
    machine: &'a Machine,
}

/// What is the same for all lines of a run.
#[derive(Serialize)]
struct Machine {
    machine: String,
    driver: String,
    versions: String,
    source_hash: &'static str,
    date: String,
}

/// The last line of a record.
#[derive(Serialize)]
struct SummaryLine<'a> {
    suite: &'static str,
    seed: u64,
    seconds: f64,
    summary: &'a Summary,
    #[serde(flatten)]
    machine: &'a Machine,
}

impl Machine {
    fn new(machine: String, driver: String) -> Machine {
        let versions = format!("verdigris {} ({})", env!("CARGO_PKG_VERSION"), &verdigris_engines::SOURCE_HASH[..12]);
        Machine { machine, driver, versions, source_hash: verdigris_engines::SOURCE_HASH, date: now() }
    }

    fn of(handle: &Handle) -> Machine {
        let properties = handle.context().properties();
        let driver = format!("{}.{}", properties.driver_version / 1000, properties.driver_version % 1000 / 10);
        Machine::new(format!("{} {}", properties.name, properties.uuid), driver)
    }
}

impl Arguments {
    fn check(&self) -> Result<()> {
        for (name, seconds) in [("seconds", self.seconds), ("problem-seconds", self.problem_seconds)] {
            if !(seconds > 0.0 && seconds.is_finite()) {
                bail!("--{name} {seconds}: more than 0");
            }
        }
        if self.configs == 0 {
            bail!("--configs 0: at least 1");
        }
        if self.products == 0 && self.convolutions == 0 {
            bail!("--products 0 --convolutions 0: at least one problem");
        }
        if let Some(name) = self.taken_by.iter().find(|name| verdigris_engines::engine(name).is_none()) {
            bail!("--taken-by {name}: there is no such engine");
        }
        Ok(())
    }

    /// Draws the problems and picks the configs; products and convolutions mixed, so that a run that is cut off has both.
    fn tasks(&self, arch: &Arch) -> Result<Vec<Task>> {
        let (products, convolutions) = (self.products, self.convolutions);
        let place = |number: u64, of: u64| (number as f64 + 0.5) / of as f64;
        let mut numbers: Vec<(f64, Kind, u64)> = (0..products).map(|number| (place(number, products), Kind::Product, number)).collect();
        numbers.extend((0..convolutions).map(|number| (place(number, convolutions), Kind::Convolution, number)));
        numbers.sort_by(|a, b| a.0.total_cmp(&b.0));
        let is_taken = |drawn: &Drawn| {
            let mut engines = self.taken_by.iter().filter_map(|name| verdigris_engines::engine(name));
            self.taken_by.is_empty() || engines.any(|engine| engine.accept(&drawn.problem, arch).is_ok())
        };
        let task = |(_, kind, number): (f64, Kind, u64)| {
            let drawn = Some(draw::draw(self.seed, kind, number)).filter(is_taken)?;
            let mut random = draw::stream(self.seed, kind, number, "configs");
            let field = pick::pick(&drawn.problem, arch, self.configs, &mut random).map_err(|refusals| {
                let words: Vec<String> = refusals.iter().map(ToString::to_string).collect();
                format!("no engine takes it: {}", words.join("; "))
            });
            Some(Task { drawn, field })
        };
        let tasks: Vec<Task> = numbers.into_par_iter().filter_map(task).collect();
        if tasks.is_empty() {
            bail!("of {} problems drawn, none is taken by {}", products + convolutions, self.taken_by.join(", "));
        }
        Ok(tasks)
    }
}

/// Carries out `bench choice`.
pub(super) fn run(arguments: &Arguments) -> Result<Verdict> {
    arguments.check()?;
    if arguments.dry_run {
        return dry_run(arguments);
    }
    let config = Config::from_environment()?;
    let Some(handle) = device::open("bench choice", &config, arguments.json)? else { return Ok(Verdict::Good) };
    measure(&handle, arguments)
}

fn dry_run(arguments: &Arguments) -> Result<Verdict> {
    let arch = Arch::h200();
    let tasks = arguments.tasks(&arch)?;
    let machine = Machine::new(format!("{} (not asked)", arch.name), "none".to_owned());
    if let Some(path) = arguments.out.as_deref().filter(|path| path.as_os_str() != "none") {
        let mut record = Record::open(Some(path), &arch.name, &machine.date, "choice")?;
        for task in &tasks {
            record.write(&line(arguments.seed, task, &Trials::default(), None, None, &machine)?)?;
        }
    }
    let not_taken = tasks.iter().filter(|task| task.field.is_err()).count();
    if arguments.json {
        say!("{}", serde_json::json!({ "command": "bench choice", "problems": tasks.len(), "not_taken": not_taken }));
    } else {
        let head = [
            ("problem", Align::Left),
            ("engines", Align::Right),
            ("configs", Align::Right),
            ("µs", Align::Right),
            ("at once", Align::Left),
        ];
        let row = |task: &Task| {
            let mut cells = vec![task.drawn.words.clone()];
            match &task.field {
                Ok(field) => {
                    let way = field.at_once();
                    let numbers = [field.engines.len().to_string(), field.configs().to_string(), format!("{:.1}", way.cost.us)];
                    cells.extend(numbers.into_iter().chain([format!("{} {}", way.engine, way.knobs)]));
                }
                Err(why) => cells.extend(["0".to_owned(), "0".to_owned(), String::new(), why.clone()]),
            }
            cells
        };
        table::print(&head, &tasks.iter().map(row).collect::<Vec<_>>());
    }
    Ok(if not_taken == 0 { Verdict::Good } else { Verdict::Bad })
}

fn measure(handle: &Handle, arguments: &Arguments) -> Result<Verdict> {
    let begun = Instant::now();
    let tasks = arguments.tasks(handle.arch())?;
    let machine = Machine::of(handle);
    let mut record = match arguments.out.as_deref() {
        Some(path) if path.as_os_str() == "none" => None,
        path => Some(Record::open(path, &handle.arch().name, &machine.date, "choice")?),
    };
    let needs = tasks.iter().filter_map(|task| {
        let most = task.field.as_ref().ok()?.picked.iter().map(|picked| picked.way.workspace_bytes()).max();
        Some((&task.drawn.problem, most.unwrap_or(0)))
    });
    let mut arena = Arena::new(handle, needs, arguments.seed).context("memory for the operands")?;
    eprintln!("{} problems drawn, their configs picked and memory filled in {:.1} s", tasks.len(), begun.elapsed().as_secs_f64());
    let progress = ProgressBar::new(tasks.len() as u64);
    progress.set_style(
        ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} eta {eta} {msg}").unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    let uuid = &handle.context().properties().uuid;
    let (mut outcomes, mut counts) = (Vec::new(), Counts::default());
    let (mut clocks, mut broken, mut kernels) = (None, None, KernelCounts::default());
    for (place, task) in tasks.iter().enumerate() {
        if begun.elapsed().as_secs_f64() > arguments.seconds {
            counts.not_reached = tasks.len() - place;
            break;
        }
        progress.set_message(task.drawn.words.clone());
        let trials = match &task.field {
            Err(_) => {
                counts.not_taken += 1;
                Trials::default()
            }
            Ok(field) => {
                let loaded = trial::load(handle, &field.picked);
                kernels.compiled += loaded.compiled;
                kernels.from_pack += loaded.from_pack;
                kernels.from_disk += loaded.from_disk;
                let time = Duration::from_secs_f64(arguments.problem_seconds);
                match trial::measure(handle, &mut arena, &task.drawn.problem, &field.picked, time) {
                    Ok(trials) => trials,
                    Err(error) => {
                        // A fault of a kernel takes the context with it: what is measured so far is still told.
                        broken = Some(error.context(task.drawn.words.clone()));
                        counts.not_reached = tasks.len() - place;
                        break;
                    }
                }
            }
        };
        if place % CLOCKS_EVERY == 0 {
            // Right behind the last blocks, before the clocks fall.
            clocks = record::clocks(uuid).or(clocks);
        }
        match outcome(task, &trials) {
            Some(outcome) => outcomes.push(outcome),
            None => counts.not_measured += usize::from(task.field.is_ok()),
        }
        if trials.written == Some(false) {
            counts.unwritten += 1;
            progress.suspend(|| eprintln!("{}: the choice at once left its output as it was", task.drawn.words));
        }
        if let Some(record) = &mut record {
            record.write(&line(arguments.seed, task, &trials, ratio(&trials), clocks.clone(), &machine)?)?;
        }
        progress.inc(1);
    }
    progress.finish_and_clear();
    let summary = Summary {
        not_taken: counts.not_taken,
        not_measured: counts.not_measured,
        not_reached: counts.not_reached,
        unwritten: counts.unwritten,
        ..Summary::of(&outcomes)
    };
    let last = SummaryLine {
        suite: "choice-summary",
        seed: arguments.seed,
        seconds: begun.elapsed().as_secs_f64(),
        summary: &summary,
        machine: &machine,
    };
    let last = serde_json::to_string(&last)?;
    if let Some(record) = &mut record {
        record.write(&last)?;
    }
    if arguments.json {
        say!("{last}");
    } else {
        summary.print();
    }
    let done = tasks.len() - counts.not_reached;
    eprintln!("{done} of {} problems done in {:.1} s; kernels: {kernels}", tasks.len(), begun.elapsed().as_secs_f64());
    if counts.not_taken + counts.not_measured > 0 {
        eprintln!("{} problems are taken by no engine, {} have no measured choice", counts.not_taken, counts.not_measured);
    }
    if let Some(record) = &record {
        eprintln!("record: {}", record.path.display());
    }
    match broken {
        Some(error) => Err(error),
        None if counts.unwritten + counts.not_measured > 0 => Ok(Verdict::Bad),
        None => Ok(Verdict::Good),
    }
}

/// Problems without an outcome.
#[derive(Default)]
struct Counts {
    not_taken: usize,
    not_measured: usize,
    not_reached: usize,
    unwritten: usize,
}

/// Time of the choice at once over the least.
fn ratio(trials: &Trials) -> Option<f64> {
    Some(trials.of.first()?.us? / trials.best()?.1)
}

fn outcome(task: &Task, trials: &Trials) -> Option<Outcome> {
    let field = task.field.as_ref().ok()?;
    let (best, _) = trials.best()?;
    Some(Outcome {
        kind: task.drawn.kind.name(),
        dtype: task.drawn.dtype.name(),
        words: task.drawn.words.clone(),
        engine: field.at_once().engine.name,
        best_engine: field.picked[best].way.engine.name,
        ratio: ratio(trials)?,
    })
}

/// One problem as a line of the record.
fn line(seed: u64, task: &Task, trials: &Trials, ratio: Option<f64>, clocks: Option<String>, machine: &Machine) -> Result<String> {
    let Task { drawn, field } = task;
    let nothing = BTreeMap::new();
    let none = Trial::default();
    let (engines, configs) = match field {
        Ok(field) => {
            let configs = field.picked.iter().enumerate();
            let configs = configs.map(|(place, picked)| config_line(picked, trials.of.get(place).unwrap_or(&none))).collect();
            (&field.engines, configs)
        }
        Err(_) => (&nothing, Vec::new()),
    };
    let line = Line {
        suite: "choice",
        seed,
        kind: drawn.kind.name(),
        number: drawn.number,
        words: &drawn.words,
        dtype: drawn.dtype.name(),
        shape: &drawn.shape,
        flops: drawn.flops,
        bytes: drawn.bytes,
        key: Key::of(&drawn.problem),
        problem: &drawn.problem,
        engines,
        configs,
        best: trials.best().map(|(place, _)| place),
        ratio,
        written: trials.written,
        sets: trials.sets,
        rounds: trials.rounds,
        remark: field.as_ref().err().cloned(),
        clocks,
        machine,
    };
    Ok(serde_json::to_string(&line)?)
}

fn config_line(picked: &Picked, trial: &Trial) -> ConfigLine {
    let Picked { why, way } = picked;
    let program: &Program = &way.program;
    let launches = program.launches().map(|launch| LaunchLine {
        kernel: launch.kernel.name().to_owned(),
        grid: launch.grid,
        cooperative: launch.residency == Residency::All,
        overlap: launch.overlap,
    });
    let bytes_of = |pick: fn(&Step) -> u64| program.steps.iter().map(pick).sum();
    ConfigLine {
        engine: way.engine.name,
        knobs: way.knobs.clone(),
        why: *why,
        notes: way.notes,
        estimate_us: way.cost.us,
        screen_us: trial.screen_us,
        us: trial.us,
        spread: trial.spread,
        trouble: trial.trouble.clone(),
        workspace_bytes: way.workspace_bytes(),
        scratch: program.scratch.iter().map(|scratch| (scratch.name, scratch.bytes)).collect(),
        launches: launches.collect(),
        fill_bytes: bytes_of(|step| if let Step::Fill { bytes, .. } = step { *bytes } else { 0 }),
        copy_bytes: bytes_of(|step| if let Step::Copy { bytes, .. } = step { *bytes } else { 0 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use verdigris_cuda::fake;

    #[derive(Parser)]
    struct Words {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn asked(words: &str) -> Arguments {
        Words::parse_from(std::iter::once("x").chain(words.split_whitespace())).arguments
    }

    #[test]
    fn every_problem_has_an_engine_and_the_same_choice_again() {
        let arguments = asked("--products 40 --convolutions 40 --seed 9 --configs 4");
        let tasks = arguments.tasks(&Arch::h200()).expect("draws");
        assert_eq!(tasks.len(), 80);
        for (task, again) in tasks.iter().zip(arguments.tasks(&Arch::h200()).expect("draws")) {
            let field = task.field.as_ref().unwrap_or_else(|why| panic!("{}: {why}", task.drawn.words));
            let other = again.field.expect("as before");
            assert_eq!(task.drawn.words, again.drawn.words);
            let names = |field: &Field| field.picked.iter().map(|one| format!("{} {}", one.way.engine, one.way.knobs)).collect::<Vec<_>>();
            assert_eq!(names(field), names(&other));
        }
    }

    #[test]
    fn problems_of_an_engine_are_those_that_it_takes() {
        let arch = Arch::h200();
        let all = asked("--products 1 --convolutions 60 --seed 9 --configs 1").tasks(&arch).expect("draws");
        let some = asked("--products 1 --convolutions 60 --seed 9 --configs 1 --taken-by conv.depthwise,conv.small_channels");
        let takes = |task: &&Task| {
            let mut engines = ["conv.depthwise", "conv.small_channels"].into_iter().filter_map(verdigris_engines::engine);
            engines.any(|engine| engine.accept(&task.drawn.problem, &arch).is_ok())
        };
        let words = |tasks: &mut dyn Iterator<Item = &Task>| tasks.map(|task| task.drawn.words.clone()).collect::<Vec<_>>();
        let taken = some.tasks(&arch).expect("draws");
        assert!(!taken.is_empty() && taken.len() < all.len() / 2, "{}", taken.len());
        assert_eq!(words(&mut taken.iter()), words(&mut all.iter().filter(takes)));
        let none = asked("--products 3 --convolutions 0 --seed 9 --taken-by conv.depthwise")
            .tasks(&arch)
            .map(|_| ())
            .expect_err("no product is one");
        assert_eq!(none.to_string(), "of 3 problems drawn, none is taken by conv.depthwise");
        let unknown = asked("--taken-by conv.deepwise").check().expect_err("no such engine");
        assert_eq!(unknown.to_string(), "--taken-by conv.deepwise: there is no such engine");
    }

    #[test]
    fn a_run_leaves_a_line_for_each_problem_and_the_figures() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("choice.jsonl");
        let arguments = asked(&format!("--products 2 --convolutions 2 --seed 3 --configs 6 --seconds 60 --out {}", path.display()));
        let handle = Handle::on(&fake::context(), &Config::default()).expect("the fake is always there");
        // The fake writes nothing, which is told of each.
        assert_eq!(measure(&handle, &arguments).expect("runs"), Verdict::Bad);
        let text = std::fs::read_to_string(&path).expect("a record");
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert_eq!(lines.len(), 5);
        for line in &lines[..4] {
            assert_eq!((&line["suite"], &line["written"]), (&Value::from("choice"), &Value::from(false)), "{line}");
            let problem: Problem = serde_json::from_value(line["problem"].clone()).expect("reads back");
            assert_eq!(Key::of(&problem).to_string(), serde_json::from_value::<Key>(line["key"].clone()).expect("a key").to_string());
            assert!(line["ratio"].as_f64().is_some_and(|ratio| ratio >= 1.0), "{line}");
            assert_eq!(line["configs"][0]["why"], "at_once");
            assert!(line["configs"][0]["launches"][0]["grid"][0].as_u64().is_some_and(|ctas| ctas > 0));
        }
        assert_eq!(lines[4]["summary"]["all"]["problems"], 4);
        assert_eq!(lines[4]["summary"]["unwritten"], 4);
    }

    #[test]
    fn a_run_without_time_says_what_it_did_not_reach() {
        let arguments = asked("--products 2 --convolutions 1 --configs 2 --seconds 1e-9 --out none");
        let handle = Handle::on(&fake::context(), &Config::default()).expect("the fake is always there");
        assert_eq!(measure(&handle, &arguments).expect("runs"), Verdict::Good);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for words in ["--seconds 0", "--configs 0", "--products 0 --convolutions 0", "--problem-seconds inf"] {
            assert!(asked(words).check().is_err(), "{words}");
        }
    }
}
