//! `verdigris canary`: whether this machine computes right, the same each time, and as fast as it did. About a minute.
//!
//! A few graphs of each family run on the device. Results are held against the reference, plain loops in f64, within what rounding allows; each graph
//! runs three times, and where its plan says that it repeats, every bit must be the same; its time stands beside the estimate, and is held against that of
//! the record of this chip, as it ships in the program, or of an earlier canary. The exit code is 0 where all is well and 1 where something is not, for init
//! containers and roll-outs. Where there is no record of a chip, times are held against nothing, which is said.
//!
//! A record is what `canary --json` prints on a quiet machine; `cases/canary/record-CHIP.jsonl` are those that ship. A row counts for the device whose name
//! it has, and for no other.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use verdigris::plan::RunReport;
use verdigris::{Config, Device, HostValue, Plan, Policy, Tensor};
use verdigris_graph::{Graph, GraphBuilder, Precision, Uid};
use verdigris_reference::compare::{Compared, compare};
use verdigris_reference::data::{self, Distribution};
use verdigris_reference::graph::{Selection, evaluate};
use verdigris_reference::graph_cases::{self, GraphCase};
use verdigris_reference::run::Inputs;
use verdigris_tensor::{DType, Layout};

use verdigris_cli::record::now;
use verdigris_cli::rows::{CanaryRow, canary_rows};
use verdigris_cli::table::{self, Align, alarm};
use verdigris_cli::{Verdict, say};

/// What runs, by family, in files of the format of all cases.
const CASES: &[(&str, &str)] = &[
    ("conv", include_str!("../../../cases/canary/conv.toml")),
    ("pointwise", include_str!("../../../cases/canary/pointwise.toml")),
    ("reduction", include_str!("../../../cases/canary/reduction.toml")),
    ("scan", include_str!("../../../cases/canary/scan.toml")),
    ("pool", include_str!("../../../cases/canary/pool.toml")),
    ("softmax", include_str!("../../../cases/canary/softmax.toml")),
    ("norm", include_str!("../../../cases/canary/norm.toml")),
    ("batch_norm", include_str!("../../../cases/canary/batch_norm.toml")),
    ("attention", include_str!("../../../cases/canary/attention.toml")),
    ("movement", include_str!("../../../cases/canary/movement.toml")),
    ("resample", include_str!("../../../cases/canary/resample.toml")),
];

/// The records that ship, one a chip.
const RECORDS: &[(&str, &str)] = &[
    ("cases/canary/record-h100.jsonl", include_str!("../../../cases/canary/record-h100.jsonl")),
    ("cases/canary/record-h200.jsonl", include_str!("../../../cases/canary/record-h200.jsonl")),
];

/// Runs of each graph whose bits are compared.
const REPEATS: usize = 3;
/// Timed runs of each graph, of which the median counts.
const TIMED: usize = 7;

/// Options of `canary`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// `cuda`, `cuda:N` or `cpu`.
    #[arg(long, default_value = "cuda")]
    device: String,
    /// Only graphs whose name contains this.
    #[arg(default_value = "")]
    filter: String,
    /// What times are held against: what an earlier canary printed with --json; `shipped`, the record of this chip in the program; `none`.
    #[arg(long, value_name = "FILE", default_value = "shipped")]
    baseline: PathBuf,
    /// A graph is slower than the baseline beyond so many times its time, and 10 µs.
    #[arg(long, default_value_t = 1.25)]
    slower: f64,
    /// Print a JSON object a graph, for --baseline and `gate`.
    #[arg(long)]
    json: bool,
    /// Plant a fault in every graph, to see that it is found and that whoever listens hears of it. It makes nothing good.
    #[arg(long, hide = true, value_name = "FAULT")]
    plant: Option<Fault>,
}

/// What can be planted.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    /// Every run has the same wrong element.
    Wrong,
    /// The last run that is compared has another bit than the first.
    Unrepeatable,
    /// Timed runs take a second longer: more than another process of the machine takes from one, so that a test of it does not depend on what else runs.
    Slow,
}

/// Carries out `canary`.
pub(crate) fn run(arguments: &Arguments) -> Result<Verdict> {
    if arguments.slower.is_nan() || arguments.slower < 1.0 {
        bail!("--slower {}: at least 1", arguments.slower);
    }
    // What the cache of choices holds is what production runs.
    let device = Device::open(&arguments.device, &Config::from_environment()?, Policy::default())
        .context("the canary needs the device that it is asked about; without a GPU, `--device cpu`")?;
    let baseline = baseline(&arguments.baseline, device.name())?;
    let mut graphs =
        vec![product("bf16-256x256x512", DType::Bf16, Precision::Fp32)?, product("f32-256x256x512", DType::F32, Precision::Fp32)?];
    for (family, text) in CASES {
        let cases = graph_cases::load(family, text).with_context(|| format!("the canary's cases of {family}"))?;
        graphs.extend(cases.into_iter().map(|case| ((*family).to_owned(), case)));
    }
    graphs.retain(|(_, case)| case.id.contains(&arguments.filter));
    if graphs.is_empty() {
        bail!("no graph of the canary has `{}` in its name", arguments.filter);
    }
    let progress = ProgressBar::new(graphs.len() as u64);
    progress
        .set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {msg}").unwrap_or_else(|_| ProgressStyle::default_bar()));
    let mut rows = Vec::new();
    for (family, case) in &graphs {
        progress.set_message(case.id.clone());
        let mut row = examine(&device, family, case, arguments.plant);
        row.before_us = baseline.iter().find(|before| before.problem == row.problem && before.device == row.device).map(|before| before.us);
        if let Some(before_us) = row.before_us
            && row.us > arguments.slower * before_us
            && row.us > before_us + 10.0
        {
            let slower = format!("{:.1} µs, {before_us:.1} before", row.us);
            row.trouble = Some(row.trouble.map_or(slower.clone(), |trouble| format!("{trouble}; {slower}")));
        }
        if arguments.json {
            let line = serde_json::to_string(&row)?;
            progress.suspend(|| say!("{line}"));
        }
        rows.push(row);
        progress.inc(1);
    }
    progress.finish_and_clear();
    if !arguments.json {
        print(device.name(), &rows);
    }
    Ok(if rows.iter().all(|row| row.trouble.is_none()) { Verdict::Good } else { Verdict::Bad })
}

/// The rows that times are held against, of this device. Where there are none, that is said, and no fault.
fn baseline(named: &Path, device: &str) -> Result<Vec<CanaryRow>> {
    if named == Path::new("none") {
        return Ok(Vec::new());
    }
    let (rows, whose) = if named == Path::new("shipped") {
        (shipped(RECORDS, device)?, "the record of this chip that ships with the program".to_owned())
    } else {
        let text = std::fs::read_to_string(named).with_context(|| format!("reading {}", named.display()))?;
        (canary_rows(&named.display().to_string(), &text)?, named.display().to_string())
    };
    let rows: Vec<CanaryRow> = rows.into_iter().filter(|row| row.device == device).collect();
    match rows.first() {
        Some(row) => eprintln!("times are held against {whose}: {device}, {}, version {}", row.date, row.version),
        None => eprintln!(
            "times are held against nothing: {whose} has no rows of {device}; --baseline FILE takes what an earlier canary printed with --json"
        ),
    }
    Ok(rows)
}

/// What the records that ship have of a device.
fn shipped(records: &[(&str, &str)], device: &str) -> Result<Vec<CanaryRow>> {
    let mut found = Vec::new();
    for (name, text) in records {
        found.extend(canary_rows(name, text)?.into_iter().filter(|row| row.device == device));
    }
    Ok(found)
}

/// A product of two matrices, which no file of cases has as a graph.
fn product(name: &str, dtype: DType, precision: Precision) -> Result<(String, GraphCase)> {
    let mut g = GraphBuilder::new(&format!("gemm/{name}"));
    let (a, b) = (g.tensor("a", dtype, Layout::row_major(&[256, 512])?), g.tensor("b", dtype, Layout::row_major(&[512, 256])?));
    let d = g.matmul("product", a, b, precision)?;
    g.store(d, "d", dtype)?;
    let graph = g.finish()?;
    let case = GraphCase { id: graph.name.clone(), graph, distribution: Distribution::Normal, seed: 20, device_only: false };
    Ok(("gemm".to_owned(), case))
}

/// Runs one graph; what goes wrong is its trouble.
fn examine(device: &Device, family: &str, case: &GraphCase, fault: Option<Fault>) -> CanaryRow {
    let mut row = CanaryRow {
        suite: "canary".to_owned(),
        class: family.to_owned(),
        problem: case.id.clone(),
        device: device.name().to_owned(),
        driver: device.handle().and_then(|_| verdigris_cuda::release()),
        date: now(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        engines: Vec::new(),
        wrong: 0,
        elements: 0,
        worst: 0.0,
        repeats: None,
        us: 0.0,
        estimate_us: None,
        before_us: None,
        trouble: None,
    };
    if let Err(error) = measure(device, case, fault, &mut row) {
        row.trouble = Some(format!("{error:#}"));
    } else if row.wrong > 0 {
        row.trouble = Some(format!("{} of {} elements wrong, the worst {}", row.wrong, row.elements, far(row.worst)));
    } else if row.repeats == Some(false) {
        row.trouble = Some("bits differ from run to run, though its plan promises the same".to_owned());
    }
    row
}

fn measure(device: &Device, case: &GraphCase, fault: Option<Fault>, row: &mut CanaryRow) -> Result<()> {
    let inputs = data::graph_inputs(&case.graph, case.distribution, case.seed);
    let plan = device.plan(&case.graph)?;
    row.engines = plan.engines().into_iter().map(|part| part.engine.to_owned()).collect();
    let parts = || plan.on_a_gpu().into_iter().flat_map(|plan| plan.parts());
    row.estimate_us = plan.on_a_gpu().map(|_| parts().map(|part| part.cost().us).sum());
    let promises = parts().all(|part| part.notes().deterministic);
    let bound = Bound::new(device, &plan, &case.graph, &inputs)?;
    let run = |number: usize| -> Result<BTreeMap<Uid, Vec<u8>>> {
        let (mut results, _) = bound.run(device, &plan)?;
        let is_planted = fault == Some(Fault::Wrong) || fault == Some(Fault::Unrepeatable) && number + 1 == REPEATS;
        if is_planted && let Some(result) = results.values_mut().next() {
            plant(result, fault == Some(Fault::Wrong));
        }
        Ok(results)
    };
    let first = run(0)?;
    let mut same = true;
    for number in 1..REPEATS {
        same &= run(number)? == first;
    }
    row.repeats = promises.then_some(same);
    for expected in evaluate(&case.graph, &inputs, Selection::All)? {
        let Some(bytes) = first.get(&expected.id) else { bail!("{} was not computed", expected.id) };
        let before = data::output_buffer(&expected, &inputs);
        let mut after = before.clone();
        let length = bytes.len().min(after.len());
        after[..length].copy_from_slice(&bytes[..length]);
        let report = compare(&expected, &before, &after);
        row.wrong += if report.passes() { 0 } else { report.failures.max(1) };
        row.elements += report.elements;
        row.worst = row.worst.max(report.worst.as_ref().map_or(0.0, distance));
    }
    let mut times = Vec::with_capacity(TIMED);
    for _ in 0..TIMED {
        times.push(bound.run(device, &plan)?.1.us);
    }
    times.sort_by(f64::total_cmp);
    row.us = times[TIMED / 2];
    if fault == Some(Fault::Slow) {
        row.us += 1e6;
    }
    Ok(())
}

/// Another bit in the first bytes of a result, or many.
fn plant(result: &mut [u8], is_wrong: bool) {
    if is_wrong {
        result.iter_mut().take(8).for_each(|byte| *byte ^= 0x5a);
    } else if let Some(byte) = result.first_mut() {
        *byte ^= 1;
    }
}

/// How far an element lies from the reference, in what rounding allows: infinitely, where one of the two is NaN or infinite and the other is not the same.
fn distance(worst: &Compared) -> f64 {
    let Compared { got, want, tolerance, .. } = *worst;
    if got == want || got.is_nan() && want.is_nan() {
        return 0.0;
    }
    let ratio = (got - want).abs() / tolerance;
    if got.is_finite() && want.is_finite() && !ratio.is_nan() { ratio } else { f64::INFINITY }
}

/// A distance in words.
fn far(distance: f64) -> String {
    if distance.is_finite() {
        format!("{distance:.1} times beyond what rounding allows")
    } else {
        "NaN or infinite where it should not be, or the other way round".to_owned()
    }
}

/// A graph's inputs on the device.
struct Bound {
    tensors: Vec<(Uid, Tensor)>,
    scalars: Vec<(Uid, HostValue)>,
}

impl Bound {
    fn new(device: &Device, plan: &Plan, graph: &Graph, inputs: &Inputs<Uid>) -> Result<Bound> {
        let mut tensors = Vec::new();
        for input in plan.inputs() {
            let bytes = inputs.buffers.get(&input.uid).with_context(|| format!("{}: no numbers for {}", graph.name, input.name))?;
            tensors.push((input.uid, Tensor::from_bytes(device, input.dtype, input.layout, bytes)?));
        }
        let scalars = plan.scalars().filter_map(|scalar| Some((scalar.uid, HostValue::Real(*inputs.scalars.get(&scalar.uid)?)))).collect();
        Ok(Bound { tensors, scalars })
    }

    /// The bytes of each output, and what the run took.
    fn run(&self, device: &Device, plan: &Plan) -> Result<(BTreeMap<Uid, Vec<u8>>, RunReport)> {
        let tensors: Vec<(Uid, &Tensor)> = self.tensors.iter().map(|(uid, tensor)| (*uid, tensor)).collect();
        let (outputs, report) = device.run_timed(plan, &tensors, &self.scalars)?;
        let bytes = plan.outputs().zip(&outputs).map(|(output, tensor)| Ok((output.uid, tensor.to_bytes()?)));
        Ok((bytes.collect::<Result<_>>()?, report))
    }
}

fn print(device: &str, rows: &[CanaryRow]) {
    let us = |time: Option<f64>| time.map_or_else(|| "-".to_owned(), |us| format!("{us:.1}"));
    let cells: Vec<Vec<String>> = (rows.iter())
        .map(|row| {
            let repeats = match row.repeats {
                None => "not promised",
                Some(true) => "yes",
                Some(false) => "NO",
            };
            vec![
                row.problem.clone(),
                row.engines.join(" + "),
                format!("{:.2}", row.worst),
                repeats.to_owned(),
                us(Some(row.us)),
                us(row.estimate_us),
                us(row.before_us),
                row.trouble.clone().unwrap_or_else(|| "good".to_owned()),
            ]
        })
        .collect();
    let head = [
        ("graph", Align::Left),
        ("engines", Align::Left),
        ("error / allowed", Align::Right),
        ("repeats", Align::Left),
        ("µs", Align::Right),
        ("estimate", Align::Right),
        ("before", Align::Right),
        ("verdict", Align::Left),
    ];
    table::print(&head, &cells);
    let bad = rows.iter().filter(|row| row.trouble.is_some()).count();
    let summary = format!("{device}: {} graphs, {bad} with trouble", rows.len());
    say!("{}", if bad > 0 { alarm(&summary) } else { summary });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(device: &str, us: f64) -> String {
        let row = CanaryRow {
            suite: "canary".to_owned(),
            class: "gemm".to_owned(),
            problem: "gemm/one".to_owned(),
            device: device.to_owned(),
            driver: None,
            date: "2026-01-02T03:04:05Z".to_owned(),
            version: "1.0.0".to_owned(),
            engines: Vec::new(),
            wrong: 0,
            elements: 1,
            worst: 0.0,
            repeats: Some(true),
            us,
            estimate_us: None,
            before_us: None,
            trouble: None,
        };
        serde_json::to_string(&row).expect("JSON")
    }

    #[test]
    fn a_record_counts_for_the_device_of_its_name_alone() {
        let h100 = format!("# measured on a quiet machine\n{}\n\n{}\n", row("NVIDIA H100 80GB HBM3", 3.0), row("NVIDIA H100 PCIe", 4.0));
        let h200 = row("NVIDIA H200", 2.0);
        let records = [("h100", h100.as_str()), ("h200", h200.as_str())];
        let times = |device: &str| shipped(&records, device).expect("rows").iter().map(|row| row.us).collect::<Vec<_>>();
        assert_eq!(times("NVIDIA H100 80GB HBM3"), [3.0]);
        assert_eq!(times("NVIDIA H200"), [2.0]);
        assert!(times("NVIDIA A100-SXM4-80GB").is_empty());
        let error = format!("{:#}", shipped(&[("h100", "# fine\n{\n")], "cpu").expect_err("no row"));
        assert!(error.starts_with("h100, line 2"), "{error}");
    }

    /// What is NaN or infinite lies infinitely far off, is told as that, and stands in a record that is read again.
    #[test]
    fn what_is_no_number_is_the_worst() {
        let of = |got: f64, want: f64| distance(&Compared { index: Vec::new(), got, want, tolerance: 0.5 });
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        assert_eq!([of(nan, 1.0), of(1.0, nan), of(inf, 1.0), of(1.0, inf), of(inf, -inf), of(nan, inf)], [inf; 6]);
        assert_eq!([of(nan, nan), of(inf, inf), of(2.0, 2.0), of(2.0, 1.0)], [0.0, 0.0, 0.0, 2.0]);
        assert!(far(of(nan, 1.0)).starts_with("NaN or infinite"));
        let mut read = canary_rows("record", &row("cpu", 1.0)).expect("a row");
        read[0].worst = inf;
        let line = serde_json::to_string(&read[0]).expect("JSON");
        assert!(line.contains("\"worst\":null"), "{line}");
        assert_eq!(canary_rows("record", &line).expect("a row")[0].worst, inf);
    }

    /// What ships is read whole, names the chip of its file, and holds nothing that was wrong when it was measured.
    #[test]
    fn the_records_that_ship_are_whole() {
        for (name, text) in RECORDS {
            let chip = name.trim_start_matches("cases/canary/record-").trim_end_matches(".jsonl").to_uppercase();
            for row in canary_rows(name, text).expect("rows") {
                assert!(row.device.contains(&chip), "{name}: {}", row.device);
                assert!(row.wrong == 0 && row.repeats != Some(false) && row.us > 0.0 && row.trouble.is_none(), "{name}: {}", row.problem);
            }
        }
    }
}
