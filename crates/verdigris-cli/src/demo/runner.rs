//! Graphs on a device: named buffers, prepared graphs, and what each engine call took.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context as _;
use verdigris_cpu::{Bindings, Prepared};
use verdigris_graph::{Graph, GraphBuilder, Uid};
use verdigris_tensor::{DType, Layout};

/// `cpu` or `cuda:N`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum DeviceName {
    Cpu,
    Cuda(u32),
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceName, String> {
        let cuda = || match text {
            "cuda" => Some(0),
            _ => text.strip_prefix("cuda:")?.parse().ok(),
        };
        match text {
            "cpu" => Ok(DeviceName::Cpu),
            _ => cuda().map(DeviceName::Cuda).ok_or_else(|| format!("`{text}` is no device; devices are cpu and cuda:N")),
        }
    }
}

/// A buffer of a [`Runner`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct BufferId(usize);

/// What one engine call of a run was.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Step {
    pub(crate) name: String,
    pub(crate) engine: String,
    pub(crate) time: Duration,
    pub(crate) workspace_bytes: u64,
    pub(crate) flops: u64,
}

/// Where graphs run.
pub(crate) enum Runner {
    Cpu(Cpu),
}

/// The CPU: buffers are plain memory.
#[derive(Default)]
pub(crate) struct Cpu {
    buffers: Vec<Vec<u8>>,
}

/// A graph made ready, with the buffers of its tensors.
pub(crate) struct Task {
    pub(crate) name: String,
    prepared: Prepared,
    bound: BTreeMap<Uid, BufferId>,
    written: Vec<Uid>,
}

impl Runner {
    pub(crate) fn open(name: DeviceName) -> anyhow::Result<Runner> {
        match name {
            DeviceName::Cpu => Ok(Runner::Cpu(Cpu::default())),
            DeviceName::Cuda(_) => {
                anyhow::bail!("graphs of several problems do not run on a GPU yet; --device cpu runs this one")
            }
        }
    }

    /// What the device is, in words.
    pub(crate) fn describe(&self) -> String {
        match self {
            Runner::Cpu(_) => format!("cpu, {} threads", rayon::current_num_threads()),
        }
    }

    /// Whether convolutions run best with channels innermost.
    pub(crate) fn prefers_channels_last(&self) -> bool {
        match self {
            Runner::Cpu(_) => false,
        }
    }

    /// A buffer of zeros.
    pub(crate) fn buffer(&mut self, bytes: usize) -> BufferId {
        let Runner::Cpu(cpu) = self;
        cpu.buffers.push(vec![0; bytes]);
        BufferId(cpu.buffers.len() - 1)
    }

    pub(crate) fn write(&mut self, id: BufferId, bytes: &[u8]) {
        let Runner::Cpu(cpu) = self;
        cpu.buffers[id.0].copy_from_slice(bytes);
    }

    pub(crate) fn read(&self, id: BufferId) -> Vec<u8> {
        let Runner::Cpu(cpu) = self;
        cpu.buffers[id.0].clone()
    }

    /// Exchanges what two buffers of one size hold, without copying.
    pub(crate) fn swap(&mut self, a: BufferId, b: BufferId) {
        let Runner::Cpu(cpu) = self;
        cpu.buffers.swap(a.0, b.0);
    }

    pub(crate) fn prepare(&mut self, plan: Drawn) -> anyhow::Result<Task> {
        let graph: Graph = plan.builder.finish()?;
        let written = graph.nodes.iter().flat_map(|node| node.op.outputs()).collect();
        let prepared = Prepared::new(&graph).with_context(|| format!("graph `{}`", graph.name))?;
        Ok(Task { name: graph.name, prepared, bound: plan.bound, written })
    }

    /// Runs a task to its end.
    pub(crate) fn run(&mut self, task: &Task, scalars: &[(Uid, f64)]) -> anyhow::Result<Vec<Step>> {
        let Runner::Cpu(cpu) = self;
        let mut outputs: Vec<(Uid, BufferId, Vec<u8>)> = (task.bound.iter())
            .filter(|(uid, _)| task.written.contains(uid))
            .map(|(&uid, &id)| (uid, id, std::mem::take(&mut cpu.buffers[id.0])))
            .collect();
        let mut bindings = Bindings::new();
        for (uid, id) in task.bound.iter().filter(|(uid, _)| !task.written.contains(uid)) {
            bindings.input(*uid, &cpu.buffers[id.0]);
        }
        for (uid, _, bytes) in &mut outputs {
            bindings.output(*uid, bytes);
        }
        for &(uid, value) in scalars {
            bindings.scalar(uid, value);
        }
        let report = task.prepared.run(&mut bindings);
        drop(bindings);
        for (_, id, bytes) in outputs {
            cpu.buffers[id.0] = bytes;
        }
        let report = report.with_context(|| format!("graph `{}`", task.name))?;
        let steps = report.steps.into_iter().map(|step| Step {
            name: step.name,
            engine: step.engine.to_string(),
            time: step.time,
            workspace_bytes: step.workspace_bytes,
            flops: step.flops,
        });
        Ok(steps.collect())
    }
}

/// A graph being drawn, whose stored tensors have buffers.
pub(crate) struct Drawn {
    pub(crate) builder: GraphBuilder,
    bound: BTreeMap<Uid, BufferId>,
}

impl Drawn {
    pub(crate) fn new(name: &str, deterministic: bool) -> Drawn {
        let mut builder = GraphBuilder::new(name);
        if deterministic {
            builder.deterministic();
        }
        Drawn { builder, bound: BTreeMap::new() }
    }

    /// A tensor that the graph reads.
    pub(crate) fn input(&mut self, slot: &Slot) -> Uid {
        let uid = self.builder.tensor(&slot.name, slot.dtype, slot.layout);
        self.bound.insert(uid, slot.id);
        uid
    }

    /// Has a result written to a buffer.
    pub(crate) fn output(&mut self, uid: Uid, slot: &Slot) -> anyhow::Result<Uid> {
        self.builder.store_as(uid, &slot.name, slot.dtype, slot.layout)?;
        self.bound.insert(uid, slot.id);
        Ok(uid)
    }
}

/// A tensor that outlives a graph: what it is and where it lies.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) layout: Layout,
    pub(crate) id: BufferId,
}

impl Slot {
    pub(crate) fn new(runner: &mut Runner, name: &str, dtype: DType, layout: Layout) -> Slot {
        let bytes = layout.span_elements() as usize * dtype.bytes();
        Slot { name: name.to_owned(), dtype, layout, id: runner.buffer(bytes) }
    }

    pub(crate) fn dims(&self) -> &[u64] {
        self.layout.dims()
    }
}
