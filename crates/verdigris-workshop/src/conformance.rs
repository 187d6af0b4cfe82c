//! `workshop check conformance`: every instruction of the table on this machine's GPU, against the interpreter.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use rayon::prelude::*;
use serde::Serialize;
use verdigris::{Config, Handle};
use verdigris_cuda::{Bindings, DeviceBuffer, DeviceSlice};
use verdigris_kir::inst::TABLE;
use verdigris_kir::interp::Options;
use verdigris_kir::ir::Target;
use verdigris_probes::conformance::{Check, Column, EXCEPTIONS, Mismatch, Outcome, Probe, probes};

use verdigris_cli::record::{Record, now};
use verdigris_cli::table::{self, Align, alarm};
use verdigris_cli::{Verdict, device, say};

/// Arguments of `check conformance`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Only probes whose name, or the name of one of whose instructions, contains this.
    filter: Option<String>,
    /// Where the record goes; default bench/record/DEVICE/DATE-conformance.jsonl. `none` keeps no record.
    #[arg(long)]
    record: Option<PathBuf>,
    /// Print JSON lines in place of the table.
    #[arg(long)]
    json: bool,
    /// Print each probe's name before it runs, so that one that hangs is known.
    #[arg(long)]
    names: bool,
    /// Print the names of the probes and run none.
    #[arg(long)]
    list: bool,
}

/// Carries out `check conformance`.
pub(crate) fn run(arguments: &Arguments) -> Result<Verdict> {
    let probes = selected(arguments.filter.as_deref())?;
    if arguments.list {
        probes.iter().for_each(|probe| say!("{}", probe.name));
        return Ok(Verdict::Good);
    }
    let config = Config::from_environment()?;
    let Some(handle) = device::open("check conformance", &config, arguments.json)? else {
        return Ok(Verdict::Good);
    };
    let table = run_on_device(&handle, &probes, arguments)?;
    report(&handle, &table, arguments)
}

fn selected(filter: Option<&str>) -> Result<Vec<Probe>> {
    let all = probes();
    let Some(filter) = filter else { return Ok(all) };
    let wanted = |probe: &Probe| {
        probe.name.contains(filter) || probe.checks.iter().any(|check| check.names.iter().any(|name| name.contains(filter)))
    };
    let some: Vec<Probe> = all.into_iter().filter(wanted).collect();
    if some.is_empty() {
        bail!("no probe and no instruction is named {filter}");
    }
    Ok(some)
}

/// What is known of one entry of the table.
#[derive(Default, Serialize)]
struct Entry {
    /// Combinations of attributes and results that were looked at.
    checks: usize,
    compared: usize,
    mismatches: usize,
    /// NaN on both sides with different bits.
    other_nan: usize,
    /// The largest difference as a part of the bound.
    worst: f64,
}

/// A check that failed, or a probe that did not run.
#[derive(Serialize)]
struct Failure {
    probe: String,
    check: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<String>,
    compared: usize,
    mismatches: usize,
    worst: f64,
    first: Vec<String>,
}

struct Table {
    entries: BTreeMap<&'static str, Entry>,
    failures: Vec<Failure>,
    ran: usize,
    /// Probes that need a later chip.
    skipped: usize,
}

/// A probe, what the interpreter made of it, and of its magnitudes.
struct Expected<'p> {
    probe: &'p Probe,
    after: Vec<Vec<u8>>,
    magnitudes: Option<Vec<Vec<u8>>>,
}

fn run_on_device(handle: &Handle, probes: &[Probe], arguments: &Arguments) -> Result<Table> {
    let properties = handle.context().properties();
    let chip = properties.compute_capability;
    let runs_here = |probe: &&Probe| {
        probe.program.launches().all(|launch| match launch.kernel.build().target {
            Target::Sm80 => chip >= (8, 0),
            Target::Sm89 => chip >= (8, 9),
            Target::Sm90 => chip >= (9, 0),
            Target::Sm90a => chip == (9, 0),
        })
    };
    let here: Vec<&Probe> = probes.iter().filter(runs_here).collect();
    let options = Options { sms: properties.sm_count, ..Options::default() };
    let bar = ProgressBar::new(2 * here.len() as u64);
    bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}")?);
    bar.set_message("interpreting and compiling");
    let expected = here
        .par_iter()
        .map(|probe| {
            let interpret = |probe: &Probe| probe.interpret(&options).with_context(|| format!("{} in the interpreter", probe.name));
            let after = interpret(probe)?;
            let magnitudes = probe.magnitudes.as_deref().map(interpret).transpose()?;
            for launch in probe.program.launches() {
                handle.loader().kernel(&launch.kernel).with_context(|| format!("compiling {}", probe.name))?;
            }
            bar.inc(1);
            Ok(Expected { probe, after, magnitudes })
        })
        .collect::<Result<Vec<_>>>()?;
    let mut table = Table { entries: BTreeMap::new(), failures: Vec::new(), ran: 0, skipped: probes.len() - here.len() };
    for expected in &expected {
        let probe = expected.probe;
        bar.set_message(probe.name.clone());
        if arguments.names {
            eprintln!("{}", probe.name);
        }
        match execute(handle, probe) {
            Ok(after) => table.judge(expected, &after),
            Err(error) => {
                table.failures.push(Failure {
                    probe: probe.name.clone(),
                    check: format!("{error:#}"),
                    rule: None,
                    compared: 0,
                    mismatches: 1,
                    worst: 0.0,
                    first: vec!["the probes behind it were not run: an error of this kind ends the context".to_owned()],
                });
                break;
            }
        }
        table.ran += 1;
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(table)
}

/// Runs a probe on the device; gives what its buffers hold.
fn execute(handle: &Handle, probe: &Probe) -> Result<Vec<Vec<u8>>> {
    let (stream, pool) = (handle.stream(), handle.pool());
    let loaded = handle.loader().load(&probe.program, stream)?;
    let buffers =
        probe.buffers.iter().map(|contents| pool.alloc_from(stream, &contents.to_vec())).collect::<Result<Vec<DeviceBuffer>, _>>()?;
    let workspace = pool.alloc(stream, loaded.workspace_bytes().max(256))?;
    let slices: Vec<DeviceSlice<'_>> = buffers.iter().map(DeviceBuffer::slice).collect();
    loaded.execute(stream, &Bindings { buffers: &slices, workspace: workspace.slice(), host_scalars: &[], lists: &[] })?;
    stream.synchronize()?;
    Ok(buffers.iter().map(|buffer| buffer.download_all(stream)).collect::<Result<_, _>>()?)
}

impl Table {
    fn judge(&mut self, expected: &Expected<'_>, device: &[Vec<u8>]) {
        let probe = expected.probe;
        let outcomes = probe.judge(&expected.after, device, expected.magnitudes.as_deref());
        for (check, outcome) in probe.checks.iter().zip(outcomes) {
            for name in &check.names {
                let entry = self.entries.entry(name).or_default();
                entry.checks += 1;
                entry.compared += outcome.compared;
                entry.mismatches += outcome.mismatches;
                entry.other_nan += outcome.other_nan;
                entry.worst = entry.worst.max(outcome.worst);
            }
            if outcome.mismatches > 0 {
                self.failures.push(failure(probe, check, &outcome));
            }
        }
        if let Some((buffer, at)) = probe.stray_byte(device) {
            self.failures.push(Failure {
                probe: probe.name.clone(),
                check: format!("byte {at} of buffer {buffer} was changed, and no check names it"),
                rule: None,
                compared: 0,
                mismatches: 1,
                worst: 0.0,
                first: Vec::new(),
            });
        }
    }
}

fn failure(probe: &Probe, check: &Check, outcome: &Outcome) -> Failure {
    Failure {
        probe: probe.name.clone(),
        check: check.what.clone(),
        rule: Some(format!("{:?}", check.rule)),
        compared: outcome.compared,
        mismatches: outcome.mismatches,
        worst: outcome.worst,
        first: outcome.first.iter().map(|mismatch| words(mismatch, &check.result)).collect(),
    }
}

fn words(mismatch: &Mismatch, column: &Column) -> String {
    let digits = 2 * column.width_bytes;
    let operands: Vec<String> = mismatch.operands.iter().map(|bits| format!("{bits:#x}")).collect();
    let of = if operands.is_empty() { String::new() } else { format!(" of ({})", operands.join(", ")) };
    format!("result {}{of}: interpreter {:0digits$x}, device {:0digits$x}", mismatch.index, mismatch.interpreter, mismatch.device)
}

/// One line of the record: an entry of the table.
#[derive(Serialize)]
struct Row<'a> {
    suite: &'static str,
    class: &'static str,
    problem: &'a str,
    #[serde(flatten)]
    entry: Option<&'a Entry>,
    #[serde(flatten)]
    failure: Option<&'a Failure>,
    remark: Option<&'a str>,
    machine: &'a str,
    /// The version of CUDA that the driver supports.
    driver: &'a str,
    /// The driver's release, where it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    release: Option<&'a str>,
    versions: &'a str,
    date: &'a str,
}

fn report(handle: &Handle, table: &Table, arguments: &Arguments) -> Result<Verdict> {
    let properties = handle.context().properties();
    let date = now();
    let machine = format!("{} {}", properties.name, properties.uuid);
    let cuda = format!("{}.{}", properties.driver_version / 1000, properties.driver_version % 1000 / 10);
    let release = verdigris_cuda::release();
    let versions = format!("verdigris {} ({})", env!("CARGO_PKG_VERSION"), &verdigris_engines::SOURCE_HASH[..12]);
    let row = |class, problem, entry, failure, remark| Row {
        suite: "conformance",
        class,
        problem,
        entry,
        failure,
        remark,
        machine: &machine,
        driver: &cuda,
        release: release.as_deref(),
        versions: &versions,
        date: &date,
    };
    let mut lines = Vec::new();
    for (name, _) in TABLE {
        let reason = EXCEPTIONS.iter().find(|(entry, _)| entry == name).map(|(_, reason)| *reason);
        let entry = table.entries.get(name);
        if entry.is_some() || (reason.is_some() && arguments.filter.is_none()) {
            lines.push(serde_json::to_string(&row("instruction", name, entry, None, reason))?);
        }
    }
    for failure in &table.failures {
        lines.push(serde_json::to_string(&row("failure", &failure.check, None, Some(failure), None))?);
    }
    let keep = arguments.record.as_deref().is_none_or(|path| path.as_os_str() != "none");
    if keep {
        let mut record = Record::open(arguments.record.as_deref(), &properties.name, &date, "conformance")?;
        for line in &lines {
            record.write(line)?;
        }
        eprintln!("record: {}", record.path.display());
    }
    if arguments.json {
        for line in &lines {
            say!("{line}");
        }
    } else {
        print_table(table);
    }
    Ok(if table.failures.is_empty() { Verdict::Good } else { Verdict::Bad })
}

fn print_table(found: &Table) {
    let head = [
        ("instruction", Align::Left),
        ("checks", Align::Right),
        ("compared", Align::Right),
        ("mismatches", Align::Right),
        ("other NaN", Align::Right),
        ("of the bound", Align::Right),
    ];
    let rows: Vec<Vec<String>> = TABLE
        .iter()
        .filter_map(|(name, _)| found.entries.get(name).map(|entry| (name, entry)))
        .map(|(name, entry)| {
            let worst = if entry.worst > 0.0 { format!("{:.3}", entry.worst) } else { String::new() };
            let other = if entry.other_nan > 0 { entry.other_nan.to_string() } else { String::new() };
            vec![(*name).to_owned(), entry.checks.to_string(), entry.compared.to_string(), entry.mismatches.to_string(), other, worst]
        })
        .collect();
    table::print(&head, &rows);
    for failure in &found.failures {
        say!("{}", alarm(&format!("{}: {}", failure.probe, failure.check)));
        say!("    {} of {} by {}", failure.mismatches, failure.compared, failure.rule.as_deref().unwrap_or("what must hold"));
        for line in &failure.first {
            say!("    {line}");
        }
    }
    for (name, reason) in EXCEPTIONS {
        say!("{name} is not probed: {reason}");
    }
    let compared: usize = found.entries.values().map(|entry| entry.compared).sum();
    say!(
        "{} probes, {} instructions, {compared} results compared, {} failures{}",
        found.ran,
        found.entries.len(),
        found.failures.len(),
        if found.skipped > 0 { format!("; {} probes need another chip", found.skipped) } else { String::new() }
    );
}
