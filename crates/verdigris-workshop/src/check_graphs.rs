//! `check graphs` and `check fuzz`: whole graphs on a device, CPU or GPU, against the reference.
//!
//! Outputs are full of a sentinel before, with a guard behind them; the workspace is full of ones. What fails of random graphs is shrunk to
//! the smallest graph that still fails, and printed as JSON.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use verdigris::{Binding, Config, Handle, Mode, Policy};
use verdigris_cuda::DeviceBuffer;
use verdigris_graph::{Graph, Uid, json};
use verdigris_reference::fuzz;
use verdigris_reference::graph::Selection;
use verdigris_reference::graph_cases::{self, GraphCase};
use verdigris_reference::judge::{Judged, judge};
use verdigris_reference::run::Inputs;

use verdigris_cli::table::alarm;
use verdigris_cli::{Verdict, device, say};

/// Elements that are judged of each output of a case beyond the CPU's reach.
const SAMPLE_ELEMENTS: u64 = 500;

/// The case files of graphs, for a program that was copied without them.
pub(crate) const EMBEDDED: &[(&str, &str)] = &[
    ("conv", include_str!("../../../cases/conv.toml")),
    ("pointwise", include_str!("../../../cases/pointwise.toml")),
    ("reduction", include_str!("../../../cases/reduction.toml")),
    ("pool", include_str!("../../../cases/pool.toml")),
    ("scan", include_str!("../../../cases/scan.toml")),
    ("softmax", include_str!("../../../cases/softmax.toml")),
    ("norm", include_str!("../../../cases/norm.toml")),
    ("movement", include_str!("../../../cases/movement.toml")),
    ("batch_norm", include_str!("../../../cases/batch_norm.toml")),
    ("attention", include_str!("../../../cases/attention.toml")),
    ("resample", include_str!("../../../cases/resample.toml")),
    ("append", include_str!("../../../cases/append.toml")),
];

/// Options of `check graphs`.
#[derive(clap::Args)]
pub(crate) struct GraphsArguments {
    /// Only cases whose id contains this.
    #[arg(default_value = "")]
    filter: String,
    /// `cpu`, or `cuda:N`.
    #[arg(long, default_value = "cuda:0")]
    device: String,
    /// Cases of more than 2^31 elements too, judged at a sample of positions; on a GPU only.
    #[arg(long)]
    large: bool,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

/// Options of `check fuzz`.
#[derive(clap::Args)]
pub(crate) struct FuzzArguments {
    /// How many random graphs.
    #[arg(long, default_value_t = 5000)]
    graphs: u64,
    /// The seed of the first; the others follow.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Attention alone, with any of its options, of extents around the edges of tiles and in rows that tensor cores take.
    #[arg(long)]
    attention: bool,
    /// `cpu`, or `cuda:N`.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

/// The cases of all families and the crowded ones whose id contains the filter; families are read from cases/ in the current folder, else
/// from the copy inside this program.
pub(crate) fn load(filter: &str) -> Result<Vec<GraphCase>> {
    let mut list = Vec::new();
    for (family, text) in EMBEDDED {
        let beside = std::path::PathBuf::from("cases").join(format!("{family}.toml"));
        let cases = if beside.is_file() { graph_cases::load_file(&beside) } else { graph_cases::load(family, text) };
        list.extend(cases.with_context(|| format!("the cases of {}", beside.display()))?);
    }
    list.extend(verdigris_reference::crowded::cases()?);
    list.retain(|case| case.id.contains(filter));
    Ok(list)
}

/// Products of one drawn attention, at most: what the reference does in a fraction of a second.
const MOST_PRODUCTS: u64 = 4_000_000;

/// Parts by the name of the engine that ran them.
type Engines = BTreeMap<&'static str, u64>;

/// Who runs the graphs.
pub(crate) enum Executor {
    Cpu,
    Gpu(Box<Handle>),
}

impl Executor {
    /// The device of that name; `None` where the machine has no GPU, which was said.
    pub(crate) fn open(command: &str, name: &str, json: bool) -> Result<Option<Executor>> {
        let config = Config::from_environment()?;
        let number = match name.split_once(':') {
            None if name == "cpu" => return Ok(Some(Executor::Cpu)),
            None if name == "cuda" => config.device,
            Some(("cuda", number)) => number.parse().with_context(|| format!("`{name}` is no device; cpu, cuda or cuda:N"))?,
            _ => bail!("`{name}` is no device; cpu, cuda or cuda:N"),
        };
        Ok(device::open(command, &Config { device: number, ..config }, json)?.map(|handle| Executor::Gpu(Box::new(handle))))
    }

    /// Counts the parts that each engine runs.
    fn execute(
        &self,
        graph: &Graph,
        mode: &Mode,
        inputs: &Inputs<Uid>,
        outputs: &mut BTreeMap<Uid, Vec<u8>>,
        engines: &mut Engines,
    ) -> Result<()> {
        match self {
            Executor::Cpu => {
                let plan = verdigris_cpu::GraphPlan::new(graph)?;
                let mut bindings = verdigris_cpu::Bindings::new();
                for (&uid, bytes) in &inputs.buffers {
                    bindings.input(uid, bytes);
                }
                for (&uid, &value) in &inputs.scalars {
                    bindings.scalar(uid, value);
                }
                for (&uid, bytes) in outputs {
                    bindings.output(uid, bytes);
                }
                plan.run(&mut bindings)?;
                Ok(())
            }
            Executor::Gpu(handle) => {
                let plan = handle.plan_graph(graph, &Policy { remember: false, mode: mode.clone(), ..Policy::default() })?;
                for part in plan.parts() {
                    *engines.entry(part.engine().name).or_default() += 1;
                }
                let (pool, stream) = (handle.pool(), handle.stream());
                let mut buffers: BTreeMap<Uid, DeviceBuffer> = BTreeMap::new();
                for (&uid, bytes) in inputs.buffers.iter().chain(outputs.iter()) {
                    buffers.insert(uid, pool.alloc_from(stream, bytes)?);
                }
                let mut workspace = pool.alloc(stream, plan.workspace_bytes())?;
                workspace.fill(stream, 0xff)?;
                let mut bindings = Vec::new();
                // What a problem's canonical form does not read is not bound.
                let in_place = graph.in_place();
                for tensor in plan.tensors() {
                    let lies_in = in_place.iter().find(|(_, input)| *input == tensor.uid).map_or(tensor.uid, |(output, _)| *output);
                    if let Some(buffer) = buffers.get(&lies_in) {
                        bindings.push((tensor.uid, Binding::Buffer(buffer.slice())));
                    } else if let Some(&value) = inputs.scalars.get(&tensor.uid) {
                        bindings.push((tensor.uid, Binding::Scalar(value)));
                    }
                }
                plan.execute(stream, &bindings, workspace.slice())?;
                stream.synchronize().context("after the launch")?;
                for (uid, bytes) in outputs {
                    if let Some(buffer) = buffers.get(uid) {
                        *bytes = buffer.download_all(stream)?;
                    }
                }
                Ok(())
            }
        }
    }

    /// What is wrong with a graph on this device, a panic included. The CPU has nothing to choose by the mode.
    pub(crate) fn judge(&self, graph: &Graph, case: &GraphCase, mode: &Mode) -> Result<Judged, String> {
        self.judge_counted(graph, case, mode, &mut Engines::new())
    }

    /// The same; counts the parts that each engine ran on a GPU.
    fn judge_counted(&self, graph: &Graph, case: &GraphCase, mode: &Mode, engines: &mut Engines) -> Result<Judged, String> {
        let selection = if case.device_only { Selection::Sample { count: SAMPLE_ELEMENTS, seed: case.seed } } else { Selection::All };
        let execute = |graph: &Graph, inputs: &Inputs<Uid>, outputs: &mut BTreeMap<Uid, Vec<u8>>| {
            self.execute(graph, mode, inputs, outputs, engines).map_err(|error| format!("{error:#}"))
        };
        catch_unwind(AssertUnwindSafe(|| judge(graph, case.distribution, case.seed, selection, execute)))
            .unwrap_or_else(|_| Err("a panic".to_owned()))
    }

    /// Whether nothing can run any more: a fault of a kernel takes the context with it.
    fn is_lost(&self) -> bool {
        matches!(self, Executor::Gpu(handle) if handle.context().synchronize().is_err())
    }

    fn name(&self) -> &str {
        match self {
            Executor::Cpu => "cpu",
            Executor::Gpu(handle) => &handle.arch().name,
        }
    }
}

/// Runs graphs one after the other; prints what was found.
fn check(
    command: &str,
    executor: &Executor,
    cases: impl ExactSizeIterator<Item = GraphCase>,
    shrinks: bool,
    json: bool,
) -> Result<Verdict> {
    let progress = ProgressBar::new(cases.len() as u64);
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} eta {eta} {msg}");
    progress.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let (mut runs, mut elements, mut unjudged) = (0, 0, 0);
    let mut engines = Engines::new();
    let mut faults: Vec<(String, String)> = Vec::new();
    for case in cases {
        progress.set_message(case.id.clone());
        runs += 1;
        match executor.judge_counted(&case.graph, &case, &Mode::Instant, &mut engines) {
            Ok(judged) => {
                elements += judged.elements;
                unjudged += judged.unjudged;
            }
            Err(what) if executor.is_lost() => {
                progress.finish_and_clear();
                bail!("{}: {what}; the context is lost, {} more were not run", case.id, progress.length().unwrap_or(0) - runs);
            }
            Err(what) if shrinks => {
                let smallest = fuzz::shrink(&case.graph, |graph| executor.judge(graph, &case, &Mode::Instant).is_err());
                let what = executor.judge(&smallest, &case, &Mode::Instant).err().unwrap_or(what);
                faults.push((format!("{} ({:?})", case.id, case.distribution), format!("{what}\n{}", json::graph_to_json(&smallest))));
            }
            Err(what) => faults.push((case.id.clone(), what)),
        }
        progress.inc(1);
    }
    progress.finish_and_clear();
    if json {
        let list: Vec<_> = faults.iter().map(|(id, message)| serde_json::json!({ "id": id, "message": message })).collect();
        say!(
            "{}",
            serde_json::json!({
                "command": command, "machine": executor.name(), "graphs": runs, "elements": elements, "unjudged": unjudged, "faults": list,
                "engines": engines,
                "source": verdigris_engines::SOURCE_HASH,
            })
        );
    } else {
        for (id, message) in &faults {
            say!("{}\n  {message}", alarm(id));
        }
        let engines: Vec<String> = engines.iter().map(|(engine, parts)| format!("{engine} {parts}")).collect();
        if !engines.is_empty() {
            say!("parts by engine: {}", engines.join(", "));
        }
        say!("{}: {runs} graphs, {elements} elements, {unjudged} not judged, {} faults", executor.name(), faults.len());
    }
    Ok(if faults.is_empty() { Verdict::Good } else { Verdict::Bad })
}

/// Carries out `check graphs`.
pub(crate) fn graphs(arguments: &GraphsArguments) -> Result<Verdict> {
    let mut cases = load(&arguments.filter)?;
    let Some(executor) = Executor::open("check graphs", &arguments.device, arguments.json)? else {
        return Ok(Verdict::Good);
    };
    cases.retain(|case| !case.device_only || (arguments.large && matches!(executor, Executor::Gpu(_))));
    if cases.is_empty() {
        bail!("no case has `{}` in its id", arguments.filter);
    }
    check("check graphs", &executor, cases.into_iter(), false, arguments.json)
}

/// Carries out `check fuzz`.
pub(crate) fn fuzz(arguments: &FuzzArguments) -> Result<Verdict> {
    let Some(executor) = Executor::open("check fuzz", &arguments.device, arguments.json)? else {
        return Ok(Verdict::Good);
    };
    let seeds = (0..arguments.graphs as usize).map(|number| arguments.seed.wrapping_add(number as u64));
    let case = |seed| if arguments.attention { fuzz::attention(seed, MOST_PRODUCTS) } else { fuzz::graph(seed) };
    check("check fuzz", &executor, seeds.map(case), true, arguments.json)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_passes_cases_and_random_graphs() {
        let cases = load("conv/groups/").expect("reads");
        assert!(cases.len() > 10);
        assert_eq!(check("check graphs", &Executor::Cpu, cases.into_iter(), false, true).expect("runs"), Verdict::Good);
        let arguments = FuzzArguments { graphs: 50, seed: 7, attention: false, device: "cpu".to_owned(), json: true };
        assert_eq!(fuzz(&arguments).expect("runs"), Verdict::Good);
    }

    #[test]
    fn devices_that_are_none_are_named() {
        let arguments = FuzzArguments { graphs: 1, seed: 0, attention: false, device: "tpu".to_owned(), json: true };
        assert!(fuzz(&arguments).expect_err("no such device").to_string().contains("`tpu`"));
    }
}
