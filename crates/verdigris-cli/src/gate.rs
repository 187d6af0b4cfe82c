//! `verdigris gate OLD NEW`: whether one record is slower than another, row by row and in the mean.
//!
//! A record is a file of JSON lines, as `canary --json`, `tune --json` and `tune --record` write them: rows are matched by suite, class, problem and
//! element type, and of rows that stand in a file several times the last one counts. For a roll-out: the same list on the same machine with the build that
//! runs and with the one that shall run. The exit code is 1 where the gate is shut.
//!
//! OLD and NEW may also be programs: two builds of `verdigris` on one machine. Each then measures in turns (old, new; new, old; …, so that what drifts does
//! so for both), by `canary --json`, or by `tune workload FILE --json` where a workload is named, and a row's time is the median of its turns.
//!
//! `--workload FILE` judges what an application ran (`VERDIGRIS_RECORD`, measured by `tune workload FILE`): each problem of the list has to stand in both records,
//! and the mean is that of the application's own time, each problem as often as it ran.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::Serialize;

use verdigris::observe::read_workload;

use crate::tune::{WORKLOAD, dtype_of};
use verdigris_cli::rows::{Name, Timed, timed_rows};
use verdigris_cli::table::{self, Align, alarm};
use verdigris_cli::{Verdict, say};

/// Options of `gate`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The record that is held against, or a program that is measured.
    old: PathBuf,
    /// The record that is judged, or a program that is measured.
    new: PathBuf,
    /// How often each of two programs measures.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// The device that two programs measure: `cuda`, `cuda:N` or `cpu`.
    #[arg(long, default_value = "cuda")]
    device: String,
    /// The geometric mean of old time over new time must be at least this.
    #[arg(long, default_value_t = 0.98)]
    mean: f64,
    /// No row's old time over its new time may be less than this.
    #[arg(long, default_value_t = 0.9)]
    row: f64,
    /// Rows that differ by no more microseconds than this are as fast as before.
    #[arg(long, default_value_t = 1.0, value_name = "US")]
    noise_us: f64,
    /// Judge the problems that an application ran, as `VERDIGRIS_RECORD` wrote them and `tune workload` measured them, each as often as it ran.
    #[arg(long, value_name = "FILE")]
    workload: Option<PathBuf>,
    /// Print the rows and the verdict as JSON.
    #[arg(long)]
    json: bool,
}

/// A row of both records.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct Compared {
    #[serde(flatten)]
    name: Name,
    old_us: Option<f64>,
    new_us: Option<f64>,
    /// Old time over new: above 1 the new one is faster.
    ratio: Option<f64>,
    /// Whether others compute it now.
    is_other_engine: bool,
    /// Why the gate is shut, where it is for this row.
    trouble: Option<String>,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
struct Summary {
    rows: usize,
    /// `None` where no row has both times.
    mean: Option<f64>,
    shut_by: usize,
    other_engines: usize,
    /// Rows of the new record that the old one does not have.
    added: usize,
    is_open: bool,
}

/// Carries out `gate`.
pub(crate) fn run(arguments: &Arguments) -> Result<Verdict> {
    for (name, value) in [("--mean", arguments.mean), ("--row", arguments.row)] {
        if !(value > 0.0 && value.is_finite()) {
            bail!("{name} {value}: more than 0");
        }
    }
    if !(arguments.noise_us >= 0.0 && arguments.noise_us.is_finite()) {
        bail!("--noise-us {}: from 0 on", arguments.noise_us);
    }
    let (old, new) = match (is_program(&arguments.old)?, is_program(&arguments.new)?) {
        (false, false) => (record(&arguments.old)?, record(&arguments.new)?),
        (true, true) => in_turns(arguments)?,
        (is_old, _) => {
            let (program, file) = if is_old { (&arguments.old, &arguments.new) } else { (&arguments.new, &arguments.old) };
            bail!("{} is a program and {} is none: two records are compared, or two programs", program.display(), file.display());
        }
    };
    let ran = arguments.workload.as_deref().map(executions).transpose()?;
    let (rows, summary) = compare(&old, &new, arguments, ran.as_ref());
    if arguments.json {
        say!("{}", serde_json::to_string_pretty(&serde_json::json!({ "rows": rows, "summary": summary }))?);
    } else {
        print(&rows, &summary, arguments);
    }
    Ok(if summary.is_open { Verdict::Good } else { Verdict::Bad })
}

/// Whether the system may run the file.
fn is_program(path: &Path) -> Result<bool> {
    let about = std::fs::metadata(path).with_context(|| format!("reading {}", path.display()))?;
    #[cfg(unix)]
    let may_run = std::os::unix::fs::PermissionsExt::mode(&about.permissions()) & 0o111 != 0;
    #[cfg(not(unix))]
    let may_run = path.extension().is_some_and(|extension| extension == "exe");
    Ok(about.is_file() && may_run)
}

/// What two programs measure in turns.
fn in_turns(arguments: &Arguments) -> Result<(BTreeMap<Name, Timed>, BTreeMap<Name, Timed>)> {
    if arguments.rounds == 0 {
        bail!("--rounds 0: at least 1");
    }
    let programs = [&arguments.old, &arguments.new];
    let mut turns: [Vec<BTreeMap<Name, Timed>>; 2] = [Vec::new(), Vec::new()];
    for round in 0..arguments.rounds {
        for which in if round % 2 == 0 { [0, 1] } else { [1, 0] } {
            turns[which].push(measured_by(programs[which], arguments)?);
        }
    }
    let [old, new] = turns.map(|turns| medians(&turns));
    Ok((old, new))
}

/// The rows that one turn of a program prints. A canary ends with 1 where something is wrong, which its rows say.
fn measured_by(program: &Path, arguments: &Arguments) -> Result<BTreeMap<Name, Timed>> {
    // A name without a folder would be looked for elsewhere.
    let path = std::fs::canonicalize(program).with_context(|| format!("reading {}", program.display()))?;
    let mut command = std::process::Command::new(path);
    match &arguments.workload {
        None => command.args(["canary", "--json", "--device", &arguments.device]),
        Some(file) => {
            let number = match arguments.device.as_str() {
                "cuda" => None,
                name => Some(
                    name.strip_prefix("cuda:").with_context(|| format!("--device {name}: a workload is measured on `cuda` or `cuda:N`"))?,
                ),
            };
            if let Some(number) = number {
                command.env("VERDIGRIS_DEVICE", number);
            }
            command.args(["tune", "workload"]).arg(file).args(["--json", "--again", "--record", "none"]).env("VERDIGRIS_PLANS", "off")
        }
    };
    let named = || program.display().to_string();
    let output = command.stdin(std::process::Stdio::null()).output().with_context(|| format!("starting {}", named()))?;
    if !matches!(output.status.code(), Some(0 | 1)) {
        let told = String::from_utf8_lossy(&output.stderr);
        bail!("{} ended with {}: {}", named(), output.status, told.trim());
    }
    timed_rows(&format!("what {} printed", named()), &String::from_utf8_lossy(&output.stdout))
}

/// Of each row the median time of its turns, and the first trouble that one of them had. A row that a turn does not have has no time.
fn medians(turns: &[BTreeMap<Name, Timed>]) -> BTreeMap<Name, Timed> {
    let mut names: Vec<&Name> = turns.iter().flat_map(BTreeMap::keys).collect();
    names.sort();
    names.dedup();
    let median = |name: &Name| {
        let seen: Vec<&Timed> = turns.iter().filter_map(|turn| turn.get(name)).collect();
        let mut times: Vec<f64> = seen.iter().filter_map(|timed| timed.us).collect();
        times.sort_by(f64::total_cmp);
        let us = (times.len() == turns.len()).then(|| (times[(times.len() - 1) / 2] + times[times.len() / 2]) / 2.0);
        let engines = seen.last().map_or_else(String::new, |timed| timed.engines.clone());
        Timed { us, engines, trouble: seen.iter().find_map(|timed| timed.trouble.clone()) }
    };
    names.into_iter().map(|name| (name.clone(), median(name))).collect()
}

/// The rows of a record.
fn record(path: &Path) -> Result<BTreeMap<Name, Timed>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    timed_rows(&path.display().to_string(), &text)
}

/// How often an application ran each problem, by what `tune workload` calls it (the problem in words) and by its element type. A problem that was planned and not run yet counts
/// as run once.
type Ran = BTreeMap<(String, String), u64>;

fn executions(path: &Path) -> Result<Ran> {
    let mut ran = Ran::new();
    let recorded = read_workload(path)?;
    if let Some(remark) = recorded.remark() {
        eprintln!("{remark}");
    }
    for entry in recorded.entries {
        let name = entry.problem.to_string();
        *ran.entry((name, dtype_of(&entry.problem)?)).or_default() += entry.executions.max(1);
    }
    if ran.is_empty() {
        bail!("{} names no problem", path.display());
    }
    Ok(ran)
}

fn compare(old: &BTreeMap<Name, Timed>, new: &BTreeMap<Name, Timed>, limits: &Arguments, ran: Option<&Ran>) -> (Vec<Compared>, Summary) {
    let mut rows = Vec::new();
    let times_run = |name: &Name| match ran {
        None => Some(1),
        Some(ran) if name.class == WORKLOAD => ran.get(&(name.problem.clone(), name.dtype.clone())).copied(),
        Some(_) => None,
    };
    for (name, before) in old.iter().filter(|(name, _)| times_run(name).is_some()) {
        let now = new.get(name);
        let (old_us, new_us) = (before.us, now.and_then(|now| now.us));
        let ratio = old_us.zip(new_us).map(|(old, new)| old / new);
        let trouble = match (now, old_us, new_us) {
            (None, ..) => Some("it is not in the new record".to_owned()),
            (Some(Timed { trouble: Some(trouble), .. }), ..) => Some(trouble.clone()),
            (_, Some(_), None) => Some("it has no time in the new record".to_owned()),
            (_, Some(old_us), Some(new_us)) if !(old_us / new_us).is_normal() => {
                Some(format!("{old_us} over {new_us} is no number that could be compared"))
            }
            (_, Some(old_us), Some(new_us)) if new_us - old_us > limits.noise_us && old_us / new_us < limits.row => {
                Some(format!("{:.3} of its speed, {} asked", old_us / new_us, limits.row))
            }
            _ => None,
        };
        let is_other_engine = now.is_some_and(|now| now.engines != before.engines);
        rows.push(Compared { name: name.clone(), old_us, new_us, ratio, is_other_engine, trouble });
    }
    // What is wrong shuts the gate, whether or not there was anything to be compared with.
    for (name, after) in new.iter().filter(|(name, _)| !old.contains_key(name) && times_run(name).is_some()) {
        if let Timed { trouble: Some(trouble), us, .. } = after {
            let trouble = Some(format!("it is not in the old record; {trouble}"));
            rows.push(Compared { name: name.clone(), old_us: None, new_us: *us, ratio: None, is_other_engine: false, trouble });
        }
    }
    for (problem, dtype) in ran.into_iter().flat_map(BTreeMap::keys) {
        if !rows.iter().any(|row: &Compared| (&row.name.problem, &row.name.dtype) == (problem, dtype)) {
            let name = Name { suite: "tune".to_owned(), class: WORKLOAD.to_owned(), problem: problem.clone(), dtype: dtype.clone() };
            let trouble = Some("it is not in the old record".to_owned());
            rows.push(Compared { name, old_us: None, new_us: None, ratio: None, is_other_engine: false, trouble });
        }
    }
    let mean = if ran.is_some() { mean_of_time(&rows, &times_run) } else { mean_of_rows(&rows) };
    let shut_by = rows.iter().filter(|row| row.trouble.is_some()).count();
    let summary = Summary {
        rows: rows.len(),
        mean,
        shut_by,
        other_engines: rows.iter().filter(|row| row.is_other_engine).count(),
        added: new.keys().filter(|name| !old.contains_key(name)).count(),
        is_open: shut_by == 0 && mean.is_some_and(|mean| mean.is_finite() && mean >= limits.mean),
    };
    (rows, summary)
}

/// The geometric mean of the rows' ratios.
fn mean_of_rows(rows: &[Compared]) -> Option<f64> {
    let logs: Vec<f64> = rows.iter().filter_map(|row| row.ratio).map(f64::ln).collect();
    (!logs.is_empty()).then(|| (logs.iter().sum::<f64>() / logs.len() as f64).exp())
}

/// Old time over new time of all that was run.
fn mean_of_time(rows: &[Compared], times_run: &impl Fn(&Name) -> Option<u64>) -> Option<f64> {
    let timed = rows.iter().filter_map(|row| Some((times_run(&row.name)? as f64, row.old_us?, row.new_us?)));
    let (old_us, new_us) = timed.fold((0.0, 0.0), |(old, new), (times, old_us, new_us)| (old + times * old_us, new + times * new_us));
    (new_us > 0.0).then(|| old_us / new_us)
}

fn print(rows: &[Compared], summary: &Summary, limits: &Arguments) {
    let mut shown: Vec<&Compared> = rows.iter().collect();
    shown.sort_by(|a, b| a.ratio.unwrap_or(0.0).total_cmp(&b.ratio.unwrap_or(0.0)));
    let us = |time: Option<f64>| time.map_or_else(|| "-".to_owned(), |us| format!("{us:.1}"));
    let cells: Vec<Vec<String>> = (shown.iter())
        .map(|row| {
            vec![
                row.name.class.clone(),
                row.name.dtype.clone(),
                row.name.problem.clone(),
                us(row.old_us),
                us(row.new_us),
                row.ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}")),
                if row.is_other_engine { "another".to_owned() } else { "same".to_owned() },
                row.trouble.clone().unwrap_or_default(),
            ]
        })
        .collect();
    let head = [
        ("class", Align::Left),
        ("type", Align::Left),
        ("problem", Align::Left),
        ("old µs", Align::Right),
        ("new µs", Align::Right),
        ("old / new", Align::Right),
        ("engine", Align::Left),
        ("", Align::Left),
    ];
    table::print(&head, &cells);
    let mean = summary.mean.map_or_else(|| "none".to_owned(), |mean| format!("{mean:.4}"));
    let state = if summary.is_open { "open" } else { "shut" };
    let text = format!(
        "gate {state}: mean {mean} ({} asked), {} of {} rows shut it, {} by other engines, {} added",
        limits.mean, summary.shut_by, summary.rows, summary.other_engines, summary.added
    );
    say!("{}", if summary.is_open { text } else { alarm(&text) });
}
