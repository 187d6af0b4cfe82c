//! Graphs on a device, with tensors that outlive them: what a graph writes, the next one reads.

use std::collections::BTreeMap;

use anyhow::Context as _;
use indicatif::ProgressBar;
use verdigris::plan::PartReport;
use verdigris::{Config, Device, HostValue, KernelCounts, Plan, Policy, Progress, Stage, Tensor};
use verdigris_graph::{Graph, GraphBuilder, Uid};
use verdigris_tensor::{DType, Layout};

/// On a GPU, timing a run means waiting for it: one run in this many is timed.
const TIMED_ONE_IN: u64 = 16;

/// A tensor of a [`Runner`], by its place.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct BufferId(usize);

/// A device with the tensors that a program keeps on it.
pub(super) struct Runner {
    device: Device,
    tensors: Vec<Option<Tensor>>,
    /// Shows which graph is planned, and how many of its kernels are loaded.
    shown: ProgressBar,
}

/// A planned graph, with the places of its tensors.
pub(super) struct Task {
    pub(super) name: String,
    plan: Plan,
    bound: BTreeMap<Uid, BufferId>,
    runs: std::cell::Cell<u64>,
}

impl Runner {
    /// Opens `cpu`, `cuda` or `cuda:N`.
    pub(super) fn open(name: &str) -> anyhow::Result<Runner> {
        let device = Device::open(name, &Config::from_environment()?, Policy::default())?;
        Ok(Runner { device, tensors: Vec::new(), shown: ProgressBar::hidden() })
    }

    /// Has a bar show what is planned.
    pub(super) fn show(&mut self, bar: ProgressBar) {
        self.shown = bar;
    }

    /// On a GPU, where the kernels came from.
    pub(super) fn kernel_counts(&self) -> Option<KernelCounts> {
        self.device.handle().map(|handle| handle.kernel_counts())
    }

    /// What the device is, in words.
    pub(super) fn describe(&self) -> String {
        match self.device.handle() {
            None => format!("cpu, {} threads", rayon::current_num_threads()),
            Some(_) => self.device.name().to_owned(),
        }
    }

    /// Whether convolutions run best with channels innermost.
    pub(super) fn prefers_channels_last(&self) -> bool {
        self.device.handle().is_some()
    }

    pub(super) fn write(&mut self, slot: &Slot, bytes: &[u8]) -> anyhow::Result<()> {
        self.tensors[slot.id.0] = Some(Tensor::from_bytes(&self.device, slot.dtype, slot.layout, bytes)?);
        Ok(())
    }

    pub(super) fn read(&self, slot: &Slot) -> anyhow::Result<Vec<u8>> {
        let tensor = self.tensors[slot.id.0].as_ref().with_context(|| format!("`{}` holds nothing yet", slot.name))?;
        Ok(tensor.to_bytes()?)
    }

    /// Exchanges what two slots hold, without copying.
    pub(super) fn swap(&mut self, a: &Slot, b: &Slot) {
        self.tensors.swap(a.id.0, b.id.0);
    }

    /// Plans a graph; on a GPU `watch` hears of kernels that are loaded or compiled.
    pub(super) fn plan(&mut self, drawn: Drawn) -> anyhow::Result<Task> {
        let graph = drawn.builder.finish()?;
        let (shown, counts) = (&self.shown, self.kernel_counts());
        shown.set_message(format!("graph `{}`", graph.name));
        let mut watch = |progress: Progress| {
            if progress.stage == Stage::Kernels {
                let before = counts.map_or(0, |counts| counts.compiled);
                shown.set_message(format!(
                    "graph `{}`: kernel {} of {}, {before} compiled before",
                    graph.name, progress.done, progress.total
                ));
                shown.tick();
            }
        };
        let plan = self.device.plan_under(&graph, self.device.policy(), &mut watch).with_context(|| format!("graph `{}`", graph.name))?;
        Ok(Task { name: graph.name, plan, bound: drawn.bound, runs: std::cell::Cell::new(0) })
    }

    /// Runs a task. Gives what its parts took where this run was timed: every run on the CPU, some on a GPU.
    pub(super) fn run(&mut self, task: &Task, scalars: &[(Uid, HostValue)]) -> anyhow::Result<Vec<PartReport>> {
        let run = task.runs.replace(task.runs.get() + 1);
        // The first run of all is not like the others.
        let timed = self.device.handle().is_none() || run % TIMED_ONE_IN == TIMED_ONE_IN - 1;
        self.run_as(task, scalars, timed)
    }

    /// As [`Runner::run`], timed.
    pub(super) fn run_timed(&mut self, task: &Task) -> anyhow::Result<Vec<PartReport>> {
        self.run_as(task, &[], true)
    }

    fn run_as(&mut self, task: &Task, scalars: &[(Uid, HostValue)], timed: bool) -> anyhow::Result<Vec<PartReport>> {
        let mut inputs = Vec::new();
        for wanted in task.plan.inputs() {
            let id = task.bound[&wanted.uid];
            let tensor = self.tensors[id.0].as_ref().with_context(|| format!("`{}` holds nothing yet", wanted.name))?;
            inputs.push((wanted.uid, tensor));
        }
        let context = || format!("graph `{}`", task.name);
        let (outputs, parts) = if timed {
            let (outputs, report) = self.device.run_timed(&task.plan, &inputs, scalars).with_context(context)?;
            (outputs, report.parts)
        } else {
            (self.device.run(&task.plan, &inputs, scalars).with_context(context)?, Vec::new())
        };
        for (wanted, output) in task.plan.outputs().zip(outputs) {
            self.tensors[task.bound[&wanted.uid].0] = Some(output);
        }
        Ok(parts)
    }
}

/// A graph being drawn, whose stored tensors have places.
#[derive(Clone)]
pub(super) struct Drawn {
    pub(super) builder: GraphBuilder,
    bound: BTreeMap<Uid, BufferId>,
}

impl Drawn {
    pub(super) fn new(name: &str, deterministic: bool) -> Drawn {
        let mut builder = GraphBuilder::new(name);
        if deterministic {
            builder.deterministic();
        }
        Drawn { builder, bound: BTreeMap::new() }
    }

    /// A tensor that the graph reads.
    pub(super) fn input(&mut self, slot: &Slot) -> Uid {
        let uid = self.builder.tensor(&slot.name, slot.dtype, slot.layout);
        self.bound.insert(uid, slot.id);
        uid
    }

    /// The tensors that have places.
    pub(super) fn stored(&self) -> Vec<Uid> {
        self.bound.keys().copied().collect()
    }

    /// The part that computes `results` from tensors that are there.
    pub(super) fn part(self, name: &str, results: &[Uid], given: &[Uid]) -> anyhow::Result<Drawn> {
        let part = self.builder.finish()?.part(results, given)?;
        Ok(Drawn { builder: GraphBuilder::from(Graph { name: name.to_owned(), ..part }), bound: self.bound })
    }

    /// Has a result written to a slot.
    pub(super) fn output(&mut self, uid: Uid, slot: &Slot) -> anyhow::Result<Uid> {
        self.builder.store_as(uid, &slot.name, slot.dtype, slot.layout)?;
        self.bound.insert(uid, slot.id);
        Ok(uid)
    }
}

/// A tensor that outlives a graph: what it is and where it is kept.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    pub(super) name: String,
    pub(super) dtype: DType,
    pub(super) layout: Layout,
    id: BufferId,
}

impl Slot {
    pub(super) fn new(runner: &mut Runner, name: &str, dtype: DType, layout: Layout) -> Slot {
        runner.tensors.push(None);
        Slot { name: name.to_owned(), dtype, layout, id: BufferId(runner.tensors.len() - 1) }
    }

    pub(super) fn dims(&self) -> &[u64] {
        self.layout.dims()
    }
}
