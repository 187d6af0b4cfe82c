//! `verdigris canary`: whether this machine computes right, the same each time, and as fast as it did. About a minute.
//!
//! A few graphs of each family run on the device. Results are held against the reference, plain loops in f64, within what rounding allows; each graph
//! runs three times, and where its plan says that it repeats, every bit must be the same; its time stands beside the estimate, and beside an earlier
//! canary of the same machine if one is given. The exit code is 0 where all is well and 1 where something is not, for init containers and roll-outs.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};
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
use verdigris_cli::table::{self, Align, alarm};
use verdigris_cli::{Verdict, say};

/// What runs, by family, in files of the format of all cases.
const CASES: &[(&str, &str)] = &[
    ("conv", include_str!("../../../cases/canary/conv.toml")),
    ("pointwise", include_str!("../../../cases/canary/pointwise.toml")),
    ("reduction", include_str!("../../../cases/canary/reduction.toml")),
    ("pool", include_str!("../../../cases/canary/pool.toml")),
    ("softmax", include_str!("../../../cases/canary/softmax.toml")),
    ("norm", include_str!("../../../cases/canary/norm.toml")),
    ("batch_norm", include_str!("../../../cases/canary/batch_norm.toml")),
    ("attention", include_str!("../../../cases/canary/attention.toml")),
    ("movement", include_str!("../../../cases/canary/movement.toml")),
    ("resample", include_str!("../../../cases/canary/resample.toml")),
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
    /// What an earlier canary of this machine printed with --json: times are held against it.
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,
    /// A graph is slower than the baseline beyond so many times its time, and 10 µs.
    #[arg(long, default_value_t = 1.25)]
    slower: f64,
    /// Print a JSON object a graph, for --baseline and `gate`.
    #[arg(long)]
    json: bool,
}

/// What came of one graph.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    suite: String,
    /// The family.
    class: String,
    problem: String,
    device: String,
    date: String,
    version: String,
    /// The engines of its parts.
    engines: Vec<String>,
    /// Elements beyond what rounding allows, of so many.
    wrong: u64,
    elements: u64,
    /// The greatest distance from the reference over what rounding allows.
    worst: f64,
    /// Whether all runs gave the same bits; `None` where the plan does not promise it.
    repeats: Option<bool>,
    /// The median time on the device.
    us: f64,
    /// What the engines' estimates add up to; `None` on the CPU.
    estimate_us: Option<f64>,
    /// Of the baseline.
    before_us: Option<f64>,
    /// What is wrong, in words.
    trouble: Option<String>,
}

/// Carries out `canary`.
pub(crate) fn run(arguments: &Arguments) -> Result<Verdict> {
    if arguments.slower.is_nan() || arguments.slower < 1.0 {
        bail!("--slower {}: at least 1", arguments.slower);
    }
    let baseline = arguments.baseline.as_ref().map(|path| rows_of(path)).transpose()?.unwrap_or_default();
    // What the cache of choices holds is what production runs.
    let device = Device::open(&arguments.device, &Config::from_environment()?, Policy::default())
        .context("the canary needs the device that it is asked about; without a GPU, `--device cpu`")?;
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
        let mut row = examine(&device, family, case);
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

/// The rows of an earlier canary.
pub(crate) fn rows_of(path: &std::path::Path) -> Result<Vec<Row>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines.map(|(number, line)| serde_json::from_str(line).with_context(|| format!("{}, line {}", path.display(), number + 1))).collect()
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
fn examine(device: &Device, family: &str, case: &GraphCase) -> Row {
    let mut row = Row {
        suite: "canary".to_owned(),
        class: family.to_owned(),
        problem: case.id.clone(),
        device: device.name().to_owned(),
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
    if let Err(error) = measure(device, case, &mut row) {
        row.trouble = Some(format!("{error:#}"));
    } else if row.wrong > 0 {
        row.trouble =
            Some(format!("{} of {} elements wrong, the worst {:.1} times beyond what rounding allows", row.wrong, row.elements, row.worst));
    } else if row.repeats == Some(false) {
        row.trouble = Some("bits differ from run to run, though its plan promises the same".to_owned());
    }
    row
}

fn measure(device: &Device, case: &GraphCase, row: &mut Row) -> Result<()> {
    let inputs = data::graph_inputs(&case.graph, case.distribution, case.seed);
    let plan = device.plan(&case.graph)?;
    row.engines = plan.engines().into_iter().map(|part| part.engine.to_owned()).collect();
    let parts = || plan.on_a_gpu().into_iter().flat_map(|plan| plan.parts());
    row.estimate_us = plan.on_a_gpu().map(|_| parts().map(|part| part.cost().us).sum());
    let promises = parts().all(|part| part.notes().deterministic);
    let bound = Bound::new(device, &plan, &case.graph, &inputs)?;
    let (first, _) = bound.run(device, &plan)?;
    let mut same = true;
    for _ in 1..REPEATS {
        same &= bound.run(device, &plan)?.0 == first;
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
    Ok(())
}

/// How far an element lies from the reference, in what rounding allows.
fn distance(worst: &Compared) -> f64 {
    let off = (worst.got - worst.want).abs();
    if off == 0.0 { 0.0 } else { off / worst.tolerance }
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

fn print(device: &str, rows: &[Row]) {
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
