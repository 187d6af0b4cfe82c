//! `verdigris demo net`: the layers of a real network, forward and backward, with random weights.

use std::path::PathBuf;

use anyhow::Context as _;
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};
use verdigris_graph::{Conv, ConvDirection, Uid};
use verdigris_reference::data::{Distribution, fill};
use verdigris_tensor::Layout;

use super::model::Numbers;
use super::runner::{Drawn, Runner, Slot};
use verdigris_cli::table::{self, Align};
use verdigris_cli::{Verdict, say};

/// ResNet-50.
const RESNET50: &str = include_str!("../../../../bench/lists/resnet50.toml");

#[derive(clap::Args, Clone, Debug)]
pub(super) struct Arguments {
    /// Images at once, where the list does not say.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=4096))]
    batch: u64,
    /// A list of layers in the form of bench/lists/resnet50.toml, which is what runs otherwise.
    #[arg(long, value_name = "FILE")]
    list: Option<PathBuf>,
    /// The layers whose names contain this.
    #[arg(long)]
    only: Option<String>,
    /// Where to run: cpu or cuda:N.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// What to compute in.
    #[arg(long, value_enum, default_value = "fp32")]
    precision: Numbers,
    /// How often each layer is timed; the median counts.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    samples: u32,
    /// Print one JSON object a line instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    layer: Vec<Layer>,
}

/// One convolution of a network.
#[derive(Deserialize, Clone, Debug)]
#[serde(deny_unknown_fields)]
struct Layer {
    name: String,
    n: Option<u64>,
    c: u64,
    k: u64,
    input: [u64; 2],
    filter: [u64; 2],
    #[serde(default = "one")]
    stride: u64,
    #[serde(default)]
    pad: u64,
    #[serde(default = "one")]
    dilation: u64,
    #[serde(default = "one")]
    groups: u64,
    #[serde(default = "one")]
    count: u64,
}

fn one() -> u64 {
    1
}

/// What one direction of one layer took.
#[derive(Serialize)]
struct Row {
    problem: String,
    direction: &'static str,
    dtype: &'static str,
    engine: String,
    us: f64,
    spread: f64,
    gflops: f64,
    workspace_bytes: u64,
    count: u64,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<Verdict> {
    let text = match &arguments.list {
        Some(path) => std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?,
        None => RESNET50.to_owned(),
    };
    let list: List =
        toml::from_str(&text).with_context(|| arguments.list.as_ref().map_or(String::new(), |path| path.display().to_string()))?;
    let wanted = |layer: &&Layer| arguments.only.as_ref().is_none_or(|only| layer.name.contains(only.as_str()));
    let layers: Vec<&Layer> = list.layer.iter().filter(wanted).collect();
    anyhow::ensure!(!layers.is_empty(), "no layer of the list has `{}` in its name", arguments.only.as_deref().unwrap_or(""));
    let bar = if arguments.json { ProgressBar::hidden() } else { ProgressBar::new(layers.len() as u64 * 3) };
    bar.set_style(ProgressStyle::with_template("{bar:32} {pos}/{len} {msg}")?);
    let mut rows = Vec::new();
    let mut device = String::new();
    for (i, layer) in layers.iter().enumerate() {
        for direction in ConvDirection::ALL {
            // The first layer's input needs no gradient.
            if i == 0 && arguments.list.is_none() && arguments.only.is_none() && direction == ConvDirection::Dgrad {
                bar.inc(1);
                continue;
            }
            bar.set_message(format!("{} {}", layer.name, direction.name()));
            let mut runner = Runner::open(&arguments.device)?;
            device = runner.describe();
            let row = measure(&mut runner, layer, direction, arguments).with_context(|| format!("layer `{}`", layer.name))?;
            if arguments.json {
                say!("{}", serde_json::to_string(&row)?);
            }
            rows.push(row);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    if !arguments.json {
        print(&device, &rows);
    }
    Ok(Verdict::Good)
}

fn measure(runner: &mut Runner, layer: &Layer, direction: ConvDirection, arguments: &Arguments) -> anyhow::Result<Row> {
    let n = layer.n.unwrap_or(arguments.batch);
    let dtype = arguments.precision.storage();
    let mut conv = Conv::new(direction, Uid(0), Uid(0), Uid(0), 2, arguments.precision.precision());
    conv.strides = vec![layer.stride; 2];
    conv.pads_before = vec![layer.pad; 2];
    conv.pads_after = vec![layer.pad; 2];
    conv.dilations = vec![layer.dilation; 2];
    conv.groups = layer.groups;
    let mut y_dims = vec![n, layer.k];
    for i in 0..2 {
        y_dims.push(conv.out_extent(i, layer.input[i], layer.filter[i]).context("the filter does not fit into the padded input")?);
    }
    let x_dims = [n, layer.c, layer.input[0], layer.input[1]];
    let w_dims = [layer.k, layer.c / layer.groups.max(1), layer.filter[0], layer.filter[1]];
    let order: &[usize] = if runner.prefers_channels_last() { &[0, 2, 3, 1] } else { &[0, 1, 2, 3] };
    let mut slot = |name: &str, dims: &[u64], seed: u64| -> anyhow::Result<Slot> {
        let slot = Slot::new(runner, name, dtype, Layout::with_order(dims, order)?);
        runner.write(&slot, &fill(dtype, Distribution::Normal, true, seed, slot.layout.elements()))?;
        Ok(slot)
    };
    let (x, w, y) = (slot("x", &x_dims, 1)?, slot("w", &w_dims, 2)?, slot("y", &y_dims, 3)?);
    let mut g = Drawn::new(&layer.name, false);
    match direction {
        ConvDirection::Fprop => {
            (conv.x, conv.w) = (g.input(&x), g.input(&w));
            let result = g.builder.conv_fprop("fprop", conv)?;
            g.output(result, &y)?;
        }
        ConvDirection::Dgrad => {
            (conv.y, conv.w) = (g.input(&y), g.input(&w));
            let result = g.builder.conv_dgrad("dgrad", conv, &x_dims)?;
            g.output(result, &x)?;
        }
        ConvDirection::Wgrad => {
            (conv.x, conv.y) = (g.input(&x), g.input(&y));
            let result = g.builder.conv_wgrad("wgrad", conv, &w_dims)?;
            g.output(result, &w)?;
        }
    }
    let task = runner.plan(g)?;
    // Once to warm up.
    runner.run_timed(&task)?;
    let mut samples = Vec::new();
    let mut last = Vec::new();
    for _ in 0..arguments.samples {
        last = runner.run_timed(&task)?;
        samples.push(last.iter().map(|part| part.us).sum::<f64>());
    }
    samples.sort_by(f64::total_cmp);
    let us = samples[samples.len() / 2];
    let quartile = |part: usize| samples[(samples.len() - 1) * part / 4];
    let flops = 2 * y_dims.iter().chain(&w_dims[1..]).product::<u64>();
    Ok(Row {
        problem: layer.name.clone(),
        direction: direction.name(),
        dtype: dtype.name(),
        engine: last.iter().map(|part| part.engine).collect::<Vec<_>>().join(" + "),
        us,
        spread: (quartile(3) - quartile(1)) / us,
        gflops: flops as f64 / us / 1e3,
        workspace_bytes: last.iter().map(|part| part.workspace_bytes).max().unwrap_or(0),
        count: layer.count,
    })
}

fn print(device: &str, rows: &[Row]) {
    say!("device     {device}\n");
    let head = [
        ("layer", Align::Left),
        ("times", Align::Right),
        ("direction", Align::Left),
        ("engine", Align::Left),
        ("µs", Align::Right),
        ("GFLOP/s", Align::Right),
        ("workspace KiB", Align::Right),
    ];
    let cells = rows.iter().map(|row| {
        vec![
            row.problem.clone(),
            row.count.to_string(),
            row.direction.to_owned(),
            row.engine.clone(),
            format!("{:.0}", row.us),
            format!("{:.1}", row.gflops),
            format!("{:.0}", row.workspace_bytes as f64 / 1024.0),
        ]
    });
    table::print(&head, &cells.collect::<Vec<_>>());
    for direction in ConvDirection::ALL.map(ConvDirection::name) {
        let of = || rows.iter().filter(|row| row.direction == direction);
        let us: f64 = of().map(|row| row.us * row.count as f64).sum();
        let gflop: f64 = of().map(|row| row.gflops * row.us / 1e6 * row.count as f64).sum();
        say!("{direction}: all layers {:.1} ms, {:.1} GFLOP/s", us / 1e3, gflop / us * 1e6);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resnet_50_has_its_layers_and_its_work() {
        let list: List = toml::from_str(RESNET50).unwrap();
        assert_eq!(list.layer.iter().map(|layer| layer.count).sum::<u64>(), 54);
        let multiply_adds: u64 = (list.layer.iter())
            .map(|layer| {
                let out: u64 = layer.input.iter().map(|input| input.div_ceil(layer.stride)).product();
                layer.count * out * layer.c * layer.k * layer.filter[0] * layer.filter[1]
            })
            .sum();
        // 4.09 billion, as the network is known for.
        assert!((4.05e9..4.15e9).contains(&(multiply_adds as f64)), "{multiply_adds}");
    }

    #[test]
    fn a_layer_is_measured_in_every_direction() {
        let layer = Layer {
            name: "small".to_owned(),
            n: Some(2),
            c: 4,
            k: 6,
            input: [9, 7],
            filter: [3, 3],
            stride: 2,
            pad: 1,
            dilation: 1,
            groups: 2,
            count: 1,
        };
        let arguments =
            Arguments { batch: 1, list: None, only: None, device: "cpu".to_owned(), precision: Numbers::Fp32, samples: 1, json: false };
        for direction in ConvDirection::ALL {
            let row = measure(&mut Runner::open("cpu").unwrap(), &layer, direction, &arguments).unwrap();
            assert_eq!((row.engine.as_str(), row.direction), ("cpu.conv.gemm", direction.name()));
            assert!(row.us > 0.0 && row.gflops > 0.0);
        }
    }
}
