//! `bench workload FILE`: every problem that an application ran (what `VERDIGRIS_RECORD` wrote), as chosen at once and as measured, and what that comes to for the
//! application: each weighs as often as it was executed. A row of the record has every config that was timed, the fastest first, with its estimate (`ways`).
//!
//! The user's own measured choices are neither asked nor changed, so that what is chosen at once is what another machine of this kind would choose.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde::Serialize;
use verdigris::explain::PartExplanation;
use verdigris::observe::{Entry, read_workload};
use verdigris::{Config, Error, Handle, Limits, Tuning};
use verdigris_engines::engine::Knobs;
use verdigris_graph::Key;

use verdigris_cli::record::{Record, now};
use verdigris_cli::table::{self, Align};
use verdigris_cli::{Verdict, device, say};

/// Options of `bench workload`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// The file.
    file: PathBuf,
    /// Seconds a problem, compilation included; what would be chosen at once is compiled and measured however long it takes.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Candidates a problem: those with the least estimates; and the best of each engine, and what would be chosen at once.
    #[arg(long, default_value_t = 12)]
    candidates: usize,
    /// Seconds for the whole run; problems that no time is left for are counted.
    #[arg(long)]
    budget: Option<f64>,
    /// Where the record goes; default bench/record/DEVICE/DATE-workload.jsonl. `none` keeps no record.
    #[arg(long)]
    record: Option<PathBuf>,
    /// Print rows and the summary as JSON instead of tables.
    #[arg(long)]
    json: bool,
}

/// A problem that was timed.
#[derive(Clone, Debug, Serialize)]
struct Row {
    suite: &'static str,
    /// In words.
    problem: String,
    key: Key,
    /// As recorded; one that was planned and never run counts as one.
    executions: u64,
    /// The way that a plan at once takes.
    instant_engine: Option<&'static str>,
    instant_knobs: Option<Knobs>,
    instant_us: Option<f64>,
    /// The fastest by the clock.
    engine: &'static str,
    knobs: Knobs,
    us: Option<f64>,
    /// All that were timed, the fastest first.
    ways: Vec<Way>,
    machine: String,
    driver: String,
    versions: String,
    date: String,
}

/// A config that was timed.
#[derive(Clone, Debug, Serialize)]
struct Way {
    engine: &'static str,
    knobs: Knobs,
    estimate_us: f64,
    us: f64,
}

/// What all of it comes to.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct Summary {
    problems: usize,
    executions: u64,
    /// Milliseconds of device time of all executions, of the problems that have both times.
    instant_ms: f64,
    measured_ms: f64,
    /// `instant_ms / measured_ms`; none where nothing was timed.
    ratio: Option<f64>,
    /// Problems that could not be timed, and that no time was left for.
    not_timed: usize,
    not_reached: usize,
}

/// Carries out `bench workload`.
pub(super) fn run(arguments: &Arguments) -> Result<Verdict> {
    if !(arguments.seconds > 0.0 && arguments.seconds.is_finite()) {
        bail!("--seconds {}: more than 0", arguments.seconds);
    }
    if arguments.candidates == 0 {
        bail!("--candidates 0: at least 1");
    }
    let recorded = read_workload(&arguments.file)?;
    if let Some(remark) = recorded.remark() {
        eprintln!("{remark}");
    }
    if recorded.entries.is_empty() {
        bail!("{} names no problem", arguments.file.display());
    }
    let config = Config { plans: None, ..Config::from_environment()? };
    let Some(handle) = device::open("bench workload", &config, arguments.json)? else { return Ok(Verdict::Good) };
    let date = now();
    let mut record = match arguments.record.as_deref() {
        Some(path) if path.as_os_str() == "none" => None,
        path => Some(Record::open(path, &handle.arch().name, &date, "workload")?),
    };
    let (rows, summary) = measure(&handle, &recorded.entries, arguments, &date, &mut |row| {
        record.as_mut().map_or(Ok(()), |record| record.write(&serde_json::to_string(row)?))
    })?;
    if arguments.json {
        say!("{}", serde_json::to_string_pretty(&serde_json::json!({ "rows": rows, "summary": summary }))?);
    } else {
        print(&rows, &summary);
    }
    Ok(if summary.not_timed == 0 { Verdict::Good } else { Verdict::Bad })
}

/// Times the problems in their order, the most executed first; `keep` gets each row.
fn measure(
    handle: &Handle,
    entries: &[Entry],
    arguments: &Arguments,
    date: &str,
    keep: &mut dyn FnMut(&Row) -> Result<()>,
) -> Result<(Vec<Row>, Summary)> {
    let begun = Instant::now();
    let tuning =
        Tuning { candidates: arguments.candidates, budget: Duration::from_secs_f64(arguments.seconds), again: true, shipped: false };
    let (mut rows, mut not_timed, mut not_reached) = (Vec::new(), 0, 0);
    for Entry { problem, executions } in entries.iter().filter(|entry| !entry.problem.is_empty()) {
        if arguments.budget.is_some_and(|budget| begun.elapsed().as_secs_f64() > budget) {
            not_reached += 1;
            continue;
        }
        let chosen = match handle.tune(problem, &Limits::default(), &tuning, &mut |_, _, _| {}) {
            Ok(chosen) => chosen,
            Err(error @ Error::NoEngine(_)) => {
                eprintln!("{problem}: {error}");
                not_timed += 1;
                continue;
            }
            // A fault of a kernel takes the context with it.
            Err(error) => return Err(anyhow::Error::from(error).context(problem.to_string())),
        };
        let row = Row::of(handle, problem.to_string(), (*executions).max(1), &chosen.explanation, date);
        not_timed += usize::from(row.both().is_none());
        keep(&row)?;
        rows.push(row);
    }
    let summary = Summary::of(&rows, not_timed, not_reached);
    Ok((rows, summary))
}

impl Row {
    fn of(handle: &Handle, problem: String, executions: u64, explanation: &PartExplanation, date: &str) -> Row {
        let chosen = &explanation.ways[explanation.chosen];
        let instant = explanation.tuning.map(|tuning| &explanation.ways[tuning.instant]);
        let properties = handle.context().properties();
        let mut ways: Vec<Way> = (explanation.ways.iter())
            .filter_map(|way| {
                let (summary, us) = (&way.summary, way.measured?.us);
                Some(Way { engine: summary.engine, knobs: summary.knobs.clone(), estimate_us: summary.estimate_us, us })
            })
            .collect();
        ways.sort_by(|a, b| a.us.total_cmp(&b.us));
        Row {
            suite: "workload",
            problem,
            key: explanation.key,
            executions,
            instant_engine: instant.map(|way| way.summary.engine),
            instant_knobs: instant.map(|way| way.summary.knobs.clone()),
            instant_us: instant.and_then(|way| way.measured).map(|measured| measured.us),
            engine: chosen.summary.engine,
            knobs: chosen.summary.knobs.clone(),
            us: chosen.measured.map(|measured| measured.us),
            ways,
            machine: format!("{} {}", properties.name, properties.uuid),
            driver: format!("{}.{}", properties.driver_version / 1000, properties.driver_version % 1000 / 10),
            versions: format!("verdigris {} ({})", env!("CARGO_PKG_VERSION"), &verdigris_engines::SOURCE_HASH[..12]),
            date: date.to_owned(),
        }
    }

    /// Microseconds of all its executions, as chosen at once and as measured.
    fn both(&self) -> Option<(f64, f64)> {
        let times = self.executions as f64;
        Some((times * self.instant_us?, times * self.us?))
    }
}

impl Summary {
    fn of(rows: &[Row], not_timed: usize, not_reached: usize) -> Summary {
        let sum = |(instant, measured): (f64, f64), row: &Row| {
            let (instant_us, us) = row.both().unwrap_or_default();
            (instant + instant_us * 1e-3, measured + us * 1e-3)
        };
        let (instant_ms, measured_ms) = rows.iter().fold((0.0, 0.0), sum);
        Summary {
            problems: rows.len(),
            executions: rows.iter().fold(0, |sum, row| row.executions.saturating_add(sum)),
            instant_ms,
            measured_ms,
            ratio: (measured_ms > 0.0).then(|| instant_ms / measured_ms),
            not_timed,
            not_reached,
        }
    }
}

fn print(rows: &[Row], summary: &Summary) {
    let us = |time: Option<f64>| time.map_or_else(|| "-".to_owned(), |us| format!("{us:.1}"));
    let mut shown: Vec<&Row> = rows.iter().collect();
    let weight = |row: &Row| row.both().map_or(0.0, |(instant_us, _)| instant_us);
    shown.sort_by(|a, b| weight(b).total_cmp(&weight(a)));
    let cells: Vec<Vec<String>> = (shown.iter())
        .map(|row| {
            vec![
                row.problem.clone(),
                row.executions.to_string(),
                us(row.instant_us),
                us(row.us),
                row.instant_us.zip(row.us).map_or_else(|| "-".to_owned(), |(instant, us)| format!("{:.2}", instant / us)),
                if summary.instant_ms > 0.0 { format!("{:.1} %", weight(row) / summary.instant_ms * 0.1) } else { "-".to_owned() },
                row.instant_engine.map_or_else(|| "-".to_owned(), str::to_owned),
                row.engine.to_owned(),
            ]
        })
        .collect();
    let head = [
        ("problem", Align::Left),
        ("executions", Align::Right),
        ("at once µs", Align::Right),
        ("measured µs", Align::Right),
        ("ratio", Align::Right),
        ("of the time", Align::Right),
        ("at once", Align::Left),
        ("measured", Align::Left),
    ];
    table::print(&head, &cells);
    let Summary { problems, executions, instant_ms, measured_ms, ratio, not_timed, not_reached } = summary;
    let ratio = ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}"));
    say!(
        "\n{problems} problems, {executions} executions: {instant_ms:.1} ms as chosen at once, {measured_ms:.1} ms as measured, ratio {ratio}"
    );
    if not_timed + not_reached > 0 {
        say!("{not_timed} could not be timed, for {not_reached} no time was left");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_cuda::fake;
    use verdigris_graph::{GemmProblem, Problem};
    use verdigris_tensor::DType;

    #[test]
    fn problems_weigh_as_often_as_they_ran() {
        let handle = Handle::on(&fake::context(), &Config { plans: None, ..Config::default() }).expect("the fake is always there");
        let problem = |m| Problem::Gemm(GemmProblem::packed(m, 64, 64, DType::F32, DType::F32).expect("a plain product"));
        let entries = [Entry { problem: problem(96), executions: 1000 }, Entry { problem: problem(64), executions: 0 }];
        let arguments = Arguments { file: PathBuf::new(), seconds: 0.2, candidates: 3, budget: None, record: None, json: false };
        let mut kept = Vec::new();
        let (rows, summary) = measure(&handle, &entries, &arguments, "2026-01-01", &mut |row| {
            kept.push(serde_json::to_value(row)?);
            Ok(())
        })
        .expect("measures");
        assert_eq!(
            rows.iter().map(|row| (row.problem.clone(), row.executions)).collect::<Vec<_>>(),
            [(entries[0].problem.to_string(), 1000), (entries[1].problem.to_string(), 1)]
        );
        assert_eq!((summary.problems, summary.executions, summary.not_timed, summary.not_reached), (2, 1001, 0, 0));
        let of = |row: &serde_json::Value, field: &str| row[field].as_f64().expect("a time");
        let instant_ms = (1000.0 * of(&kept[0], "instant_us") + of(&kept[1], "instant_us")) * 1e-3;
        let ways = kept[0]["ways"].as_array().expect("a list");
        assert!(ways.len() > 1 && ways.windows(2).all(|pair| of(&pair[0], "us") <= of(&pair[1], "us")), "{ways:?}");
        assert_eq!(of(&ways[0], "us"), of(&kept[0], "us"), "the fastest is what is measured");
        assert!(instant_ms > 0.0 && (summary.instant_ms / instant_ms - 1.0).abs() < 1e-9, "{summary:?}");
        assert!(summary.ratio.is_some_and(|ratio| ratio >= 1.0 - 1e-9), "what is measured is no slower: {summary:?}");
        print(&rows, &summary);
        // No time at all is left.
        let none = Arguments { budget: Some(0.0), ..arguments };
        let (rows, summary) = measure(&handle, &entries, &none, "2026-01-01", &mut |_| Ok(())).expect("measures nothing");
        assert_eq!((rows.len(), summary.not_reached, summary.ratio), (0, 2, None));
    }
}
