//! A graph planned on a device, run on memory that others own.
//!
//! A [`Plan`] is the same thing on a GPU and on the CPU: what [`Device::plan`](crate::Device::plan) makes of a graph. It takes memory,
//! workspace and stream from whoever has them. [`Tensor`](crate::Tensor)s are one user of it, the doors to other languages are others.
//!
//! ```
//! use verdigris::{Binding, DType, Device, GraphBuilder, HostScalar, HostSlice, Layout, Plan, UnaryOp, Workspace};
//!
//! let mut g = GraphBuilder::new("scaled relu");
//! let x = g.tensor("x", DType::F32, Layout::row_major(&[2])?);
//! let factor = g.host_scalar("factor", DType::F32);
//! let relu = g.unary("relu", UnaryOp::Relu, x)?;
//! let y = g.scale("scale", relu, HostScalar::Bound(factor))?;
//! g.store(y, "y", DType::F32)?;
//! let plan: Plan = Device::cpu().plan(&g.finish()?)?;
//!
//! // What is to be bound, and as what.
//! assert_eq!((plan.name(), plan.bound().len(), plan.tensors().len()), ("scaled relu", 3, 3));
//! assert_eq!(plan.inputs().next().map(|tensor| tensor.uid), Some(x));
//! assert_eq!(plan.outputs().next().map(|tensor| tensor.uid), Some(y));
//! assert_eq!(plan.scalars().next().map(|tensor| tensor.uid), Some(factor));
//! // Who computes it; the rest is a matter of GPUs.
//! assert_eq!(plan.engines()[0].engine, "cpu.pointwise");
//! assert!(plan.on_a_gpu().is_none() && plan.explain().is_none());
//! assert_eq!((plan.workspace_bytes(), plan.least_workspace_bytes()), (0, 0));
//!
//! // Memory of our own.
//! let input: Vec<u8> = [-1.0_f32, 2.0].iter().flat_map(|value| value.to_le_bytes()).collect();
//! let mut output = [0; 8];
//! let mut bindings = [(x, HostSlice::read(&input).into()), (factor, Binding::Scalar(1.5)), (y, HostSlice::write(&mut output).into())];
//! plan.run(&mut bindings, None, Workspace::Own)?;
//! let report = plan.run_timed(&mut bindings, None)?;
//! assert_eq!((report.parts[0].engine, report.is_downgraded), ("cpu.pointwise", false));
//! assert_eq!(output[4..], 3.0_f32.to_le_bytes());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use serde::Serialize;
use verdigris_cuda::host::{HostBytes, HostConflict, borrow};
use verdigris_cuda::{DeviceSlice, HostSlice, Pool, Stream};
use verdigris_graph::binding::BoundTensor;
use verdigris_graph::{Graph, TensorDesc, Uid};
use verdigris_tensor::{BindingError, BindingRule};

use crate::binding::{Binding, overlap_error};
use crate::error::Error;
use crate::explain::Explanation;
use crate::graph_plan::GraphPlan;
use crate::handle::Handle;
use crate::observe::{self, Check, Subject, Writer};
use crate::planning::Progress;
use crate::policy::Policy;
use crate::workspace::WorkspaceSource;

/// A graph planned on a GPU or on the CPU. It never changes: any number of threads may run it at once.
pub struct Plan {
    name: String,
    on: On,
    /// What each of the bound tensors is, in their order.
    tensors: Vec<TensorDesc>,
    /// The element type of the first of them, as labels have it.
    dtype: String,
    graph: Arc<Graph>,
    /// What guards know of it, once one has looked.
    subject: OnceLock<Arc<Subject>>,
    /// Runs while guards were on.
    turns: AtomicU64,
}

/// Where a plan runs.
enum On {
    Cpu(Box<verdigris_cpu::GraphPlan>),
    Gpu(Box<GraphPlan>, Pool),
}

/// Where the workspace of a run comes from. The CPU keeps its own, whatever is said.
#[derive(Clone, Copy)]
pub enum Workspace<'w> {
    /// From the pool of the plan's handle, in the order of the stream.
    Own,
    /// Somebody lends this memory, at a multiple of 256.
    Lent(DeviceSlice<'w>),
    /// Somebody lends memory when told how much: the best ways run that it is enough for.
    From(&'w (dyn WorkspaceSource + Sync)),
}

/// What one run did.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct RunReport {
    /// In the order of execution.
    pub parts: Vec<PartReport>,
    /// Memory that the run needed beside its tensors.
    pub workspace_bytes: u64,
    /// The whole, in microseconds: on a GPU from the first part's start to the last one's end.
    pub us: f64,
    /// Whether other ways ran than those chosen, for want of memory or of alignment.
    pub is_downgraded: bool,
}

/// What one part of a run did.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PartReport {
    /// What it computes: names of ops on the CPU, the problem on a GPU.
    pub name: String,
    /// The engine.
    pub engine: &'static str,
    /// Its setting.
    pub knobs: String,
    /// Its time, in microseconds.
    pub us: f64,
    /// Its scratch.
    pub workspace_bytes: u64,
}

/// The engine of one part of a plan.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PartEngine {
    /// What it computes: names of ops on the CPU, the problem on a GPU.
    pub name: String,
    /// The engine.
    pub engine: &'static str,
    /// Its setting; `None` on the CPU, which has one way for each op.
    pub knobs: Option<String>,
}

impl Plan {
    /// The CPU has one way for each op, whose results are the same each time.
    pub(crate) fn on_cpu(graph: &Graph) -> Result<Plan, Error> {
        let begun = Instant::now();
        let plan = tracing::debug_span!(target: "verdigris", "plan", graph = graph.name, device = "cpu")
            .in_scope(|| verdigris_cpu::GraphPlan::new(graph).map_err(Error::from).inspect_err(|error| observe::failed(error, "cpu")))?;
        observe::planned_on_cpu(plan.engines().map(|(engine, _)| engine.id()), begun.elapsed());
        Ok(Plan::of(graph, described(graph, plan.tensors()), On::Cpu(Box::new(plan))))
    }

    pub(crate) fn on_gpu(handle: &Handle, graph: &Graph, policy: &Policy, watch: &mut dyn FnMut(Progress)) -> Result<Plan, Error> {
        let plan = handle.plan_graph_watched(graph, policy, watch)?;
        let tensors = described(graph, plan.tensors());
        Ok(Plan::of(graph, tensors, On::Gpu(Box::new(plan), handle.pool().clone())))
    }

    fn of(graph: &Graph, tensors: Vec<TensorDesc>, on: On) -> Plan {
        let dtype = tensors.first().map_or_else(String::new, |tensor| tensor.dtype.to_string());
        let (graph, subject, turns) = (Arc::new(graph.clone()), OnceLock::new(), AtomicU64::new(0));
        Plan { name: graph.name.clone(), on, tensors, dtype, graph, subject, turns }
    }

    /// The graph's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the caller binds: every stored tensor that an op reads or writes, in the order of the graph's list, in which a run finds them
    /// fastest.
    pub fn bound(&self) -> &[BoundTensor] {
        match &self.on {
            On::Cpu(plan) => plan.tensors(),
            On::Gpu(plan, _) => plan.tensors(),
        }
    }

    /// What these tensors are, in the same order.
    pub fn tensors(&self) -> &[TensorDesc] {
        &self.tensors
    }

    /// The tensors that are read and not written.
    pub fn inputs(&self) -> impl Iterator<Item = &TensorDesc> {
        self.described_as(|bound| !bound.is_written && !bound.is_scalar)
    }

    /// The tensors that are written.
    pub fn outputs(&self) -> impl Iterator<Item = &TensorDesc> {
        self.described_as(|bound| bound.is_written)
    }

    /// The host scalars.
    pub fn scalars(&self) -> impl Iterator<Item = &TensorDesc> {
        self.described_as(|bound| bound.is_scalar)
    }

    fn described_as(&self, which: impl Fn(&BoundTensor) -> bool) -> impl Iterator<Item = &TensorDesc> {
        self.tensors.iter().zip(self.bound()).filter(move |(_, bound)| which(bound)).map(|(tensor, _)| tensor)
    }

    /// As a plan of a GPU; `None` on the CPU.
    pub fn on_a_gpu(&self) -> Option<&GraphPlan> {
        match &self.on {
            On::Cpu(_) => None,
            On::Gpu(plan, _) => Some(plan),
        }
    }

    /// The workspace of the chosen ways, at a multiple of 256 bytes; 0 on the CPU, which keeps its own memory.
    pub fn workspace_bytes(&self) -> u64 {
        self.on_a_gpu().map_or(0, GraphPlan::workspace_bytes)
    }

    /// The least workspace that a run can do with.
    pub fn least_workspace_bytes(&self) -> u64 {
        self.on_a_gpu().map_or(0, GraphPlan::least_workspace_bytes)
    }

    /// How a GPU's plan was chosen; the CPU has one way for each op.
    pub fn explain(&self) -> Option<&Explanation> {
        self.on_a_gpu().map(GraphPlan::explain)
    }

    /// The engine of each part, with what it computes.
    pub fn engines(&self) -> Vec<PartEngine> {
        match &self.on {
            On::Cpu(plan) => plan.engines().map(|(engine, name)| PartEngine { name, engine: engine.id(), knobs: None }).collect(),
            On::Gpu(plan, _) => {
                let of = |(part, name): (&crate::ProblemPlan, &String)| PartEngine {
                    name: name.clone(),
                    engine: part.engine().name,
                    knobs: Some(part.knobs().to_string()),
                };
                plan.parts().zip(plan.explain().parts.iter().map(|why| &why.problem)).map(of).collect()
            }
        }
    }

    /// Computes, on memory of others: one binding for each of [`Plan::bound`], in any order.
    ///
    /// On a GPU the work is submitted to `stream` and not waited for; without one it is refused. A run with a workspace allocates
    /// nothing. On the CPU it returns when the work is done, and `stream` and `workspace` are not asked.
    ///
    /// Checked before anything runs: that each tensor is bound once, to memory of the plan's device or a number; lengths, alignments,
    /// null pointers, the workspace, and that no output shares bytes with another tensor where it may not.
    ///
    /// # Errors
    /// [`Error::Binding`], [`Error::Cpu`], [`Error::Device`]; as [`GraphPlan::execute`] and [`GraphPlan::execute_from`].
    pub fn run(&self, bindings: &mut [(Uid, Binding<'_>)], stream: Option<&Stream>, workspace: Workspace<'_>) -> Result<(), Error> {
        let mut run = || match &self.on {
            On::Cpu(plan) => self.on_host(plan, bindings).map(drop),
            On::Gpu(plan, pool) => {
                let stream = stream.ok_or_else(no_stream)?;
                let check = self.check_on_device(stream, pool, bindings);
                match workspace {
                    Workspace::Own => plan.execute_from(stream, bindings, pool),
                    Workspace::Lent(slice) => plan.execute(stream, bindings, slice),
                    Workspace::From(source) => plan.execute_from(stream, bindings, source),
                }?;
                if let Some(check) = check {
                    check.done_on_device(stream, |uid| slice_of(bindings, uid));
                }
                Ok(())
            }
        };
        run().inspect_err(|error| observe::failed(error, self.device()))
    }

    /// Copies aside what is read, where this run is looked at ([`observe::Guards`]).
    #[inline]
    fn check_on_device(&self, stream: &Stream, pool: &Pool, bindings: &[(Uid, Binding<'_>)]) -> Option<Check> {
        let wanted = observe::wanted(&self.turns)?;
        Check::on_device(self.subject(), wanted, scalars_of(bindings), (pool, stream), |uid| slice_of(bindings, uid))
    }

    fn subject(&self) -> &Arc<Subject> {
        self.subject.get_or_init(|| {
            let writer_of = |uid: Uid| match &self.on {
                On::Cpu(plan) => plan.writer_of(uid).map(|engine| Writer { op: observe::cpu_op(engine.id()), engine: engine.id() }),
                On::Gpu(plan, _) => plan.writers.get(&uid).copied(),
            };
            let flops = match &self.on {
                On::Cpu(plan) => plan.flops() as f64,
                On::Gpu(plan, _) => plan.flops,
            };
            let of = |(tensor, bound): (&TensorDesc, &BoundTensor)| {
                let writer = bound.is_written.then(|| writer_of(tensor.uid).unwrap_or(Writer { op: "none", engine: "none" }));
                (!bound.is_scalar).then(|| (tensor.clone(), writer))
            };
            let tensors: Vec<_> = self.tensors.iter().zip(self.bound()).filter_map(of).collect();
            Subject::new(Arc::clone(&self.graph), self.device(), &tensors, flops)
        })
    }

    /// The device, as labels have it.
    fn device(&self) -> &str {
        match &self.on {
            On::Cpu(_) => "cpu",
            On::Gpu(plan, _) => plan.watch.device(),
        }
    }

    /// As [`Plan::run`] with a workspace of the plan's own, and waits; tells what each part took, and by which way it ran.
    ///
    /// # Errors
    /// As [`Plan::run`].
    pub fn run_timed(&self, bindings: &mut [(Uid, Binding<'_>)], stream: Option<&Stream>) -> Result<RunReport, Error> {
        match &self.on {
            On::Cpu(plan) => self.on_host(plan, bindings),
            On::Gpu(plan, pool) => {
                let timed = plan.execute_timed_from(stream.ok_or_else(no_stream)?, bindings, pool)?;
                let us = timed.parts.iter().map(|(_, us)| us).sum();
                let parts = timed.parts.into_iter().zip(&plan.explain().parts).map(|((part, us), why)| PartReport {
                    name: why.problem.clone(),
                    engine: part.engine().name,
                    knobs: part.knobs().to_string(),
                    us,
                    workspace_bytes: part.workspace_bytes(),
                });
                Ok(RunReport { parts: parts.collect(), workspace_bytes: timed.workspace_bytes, us, is_downgraded: timed.is_downgraded })
            }
        }
    }

    fn on_host(&self, plan: &verdigris_cpu::GraphPlan, bindings: &mut [(Uid, Binding<'_>)]) -> Result<RunReport, Error> {
        let start = Instant::now();
        let mut bound = verdigris_cpu::Bindings::new();
        for (uid, binding) in &*bindings {
            match binding {
                Binding::Host(_) => {}
                Binding::Scalar(value) => {
                    bound.scalar(*uid, *value);
                }
                Binding::Integer(value) => {
                    bound.integer(*uid, *value);
                }
                Binding::Unsigned(value) => {
                    bound.integer(*uid, *value);
                }
                Binding::Buffer(_) => {
                    let name = self.name_of(*uid);
                    return Err(BindingError::new(name, "memory of the host", "memory of a GPU", BindingRule::Device).into());
                }
            }
        }
        let wanted = observe::wanted(&self.turns);
        let scalars = wanted.map_or_else(Vec::new, |_| scalars_of(bindings));
        let borrowed = borrow(slices_of(bindings)).map_err(|conflict| self.conflict(conflict))?;
        let check = wanted.and_then(|wanted| Check::on_host(self.subject(), wanted, scalars, |uid| bytes_of(&borrowed, uid)));
        for (uid, bytes) in borrowed {
            match bytes {
                HostBytes::Read(bytes) => bound.input(uid, bytes),
                HostBytes::Write(bytes) => bound.output(uid, bytes),
            };
        }
        let done = plan.run(&mut bound)?;
        drop(bound);
        // They lay apart before.
        if let (Some(check), Ok(borrowed)) = (check, borrow(slices_of(bindings))) {
            check.done_on_host(|uid| bytes_of(&borrowed, uid));
        }
        observe::cpu_run(&self.dtype, &done.steps);
        let workspace_bytes = done.workspace_bytes();
        let us = |time: std::time::Duration| time.as_secs_f64() * 1e6;
        let parts = done.steps.into_iter().map(|step| PartReport {
            name: step.name,
            engine: step.engine.id(),
            knobs: "default".to_owned(),
            us: us(step.time),
            workspace_bytes: step.workspace_bytes,
        });
        Ok(RunReport { parts: parts.collect(), workspace_bytes, us: us(start.elapsed()), is_downgraded: false })
    }

    /// Why memory of the host cannot be borrowed together, with the names of the tensors.
    fn conflict(&self, conflict: HostConflict<Uid>) -> BindingError {
        match conflict {
            HostConflict::Null { slice } => BindingError::new(self.name_of(slice), "memory", "a null pointer", BindingRule::Null),
            HostConflict::Length { slice } => {
                BindingError::new(self.name_of(slice), "memory that can be addressed", "more bytes than that", BindingRule::Length)
            }
            HostConflict::Shared { written, other } if written == other => {
                BindingError::new(self.name_of(written), "one binding", "two", BindingRule::Twice)
            }
            HostConflict::Shared { written, other } => overlap_error(&self.name_of(written), &self.name_of(other)),
        }
    }

    fn name_of(&self, uid: Uid) -> String {
        self.bound().iter().find(|tensor| tensor.uid == uid).map_or_else(|| uid.to_string(), |tensor| tensor.name.clone())
    }
}

/// The memory of the host among what is bound.
fn slices_of<'s, 'b>(bindings: &'s mut [(Uid, Binding<'b>)]) -> impl Iterator<Item = (Uid, &'s mut HostSlice<'b>)> {
    bindings.iter_mut().filter_map(|(uid, binding)| match binding {
        Binding::Host(slice) => Some((*uid, slice)),
        Binding::Buffer(_) | Binding::Scalar(_) | Binding::Integer(_) | Binding::Unsigned(_) => None,
    })
}

/// The bytes of one tensor.
fn bytes_of<'s>(borrowed: &'s [(Uid, HostBytes<'_>)], uid: Uid) -> Option<&'s [u8]> {
    borrowed.iter().find(|(known, _)| *known == uid).map(|(_, bytes)| match bytes {
        HostBytes::Read(bytes) => *bytes,
        HostBytes::Write(bytes) => &**bytes,
    })
}

/// Where one tensor lies on a GPU.
fn slice_of<'b>(bindings: &[(Uid, Binding<'b>)], uid: Uid) -> Option<DeviceSlice<'b>> {
    bindings.iter().find(|(known, _)| *known == uid).and_then(|(_, binding)| match binding {
        Binding::Buffer(slice) => Some(*slice),
        Binding::Host(_) | Binding::Scalar(_) | Binding::Integer(_) | Binding::Unsigned(_) => None,
    })
}

/// The host scalars, as arithmetic takes them.
fn scalars_of(bindings: &[(Uid, Binding<'_>)]) -> Vec<(Uid, f64)> {
    let of = |(uid, binding): &(Uid, Binding<'_>)| match binding {
        Binding::Scalar(value) => Some((*uid, *value)),
        Binding::Integer(value) => Some((*uid, *value as f64)),
        Binding::Unsigned(value) => Some((*uid, *value as f64)),
        Binding::Buffer(_) | Binding::Host(_) => None,
    };
    bindings.iter().filter_map(of).collect()
}

/// What is bound, as the graph describes it.
fn described(graph: &Graph, bound: &[BoundTensor]) -> Vec<TensorDesc> {
    bound.iter().filter_map(|tensor| graph.tensor(tensor.uid).cloned()).collect()
}

fn no_stream() -> BindingError {
    BindingError::new("stream", "a stream of the plan's GPU", "nothing", BindingRule::Missing)
}

/// How the plan was chosen; on the CPU, which engine computes what.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.on {
            On::Gpu(plan, _) => plan.explain().fmt(f),
            On::Cpu(plan) => {
                writeln!(f, "{} on the CPU, which has one way for each op", self.name)?;
                plan.engines().try_for_each(|(engine, name)| writeln!(f, "  {}  {name}", engine.id()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, Device};
    use verdigris_cuda::HostSlice;
    use verdigris_graph::{GraphBuilder, HostScalar, UnaryOp};
    use verdigris_kir::execution::HostValue;
    use verdigris_tensor::{DType, Layout};

    /// `y = factor · relu(x)`, and its plan on a device.
    fn planned(device: &Device) -> (Plan, [Uid; 3]) {
        planned_with(device, DType::F32)
    }

    fn planned_with(device: &Device, of_factor: DType) -> (Plan, [Uid; 3]) {
        let mut g = GraphBuilder::new("scaled");
        let x = g.tensor("x", DType::F32, Layout::row_major(&[3]).expect("small"));
        let factor = g.host_scalar("factor", of_factor);
        let y = g.unary("relu", UnaryOp::Relu, x).expect("fits");
        let y = g.scale("scale", y, HostScalar::Bound(factor)).expect("fits");
        g.store(y, "y", DType::F32).expect("stores");
        (device.plan(&g.finish().expect("valid")).expect("plans"), [x, factor, y])
    }

    fn says(outcome: Result<(), Error>, name: &str, rule: BindingRule) {
        let Err(Error::Binding(error)) = outcome else { panic!("{outcome:?}") };
        assert_eq!((error.name.as_str(), error.rule), (name, rule), "{error}");
    }

    fn gpu() -> Device {
        Device::gpu(Handle::on(&verdigris_cuda::fake::context(), &Config::default()).expect("the fake is always there"), Policy::default())
    }

    #[test]
    fn the_cpu_runs_on_memory_of_others() {
        let (plan, [x, factor, y]) = planned(&Device::cpu());
        let names: Vec<&str> = plan.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!((names, plan.workspace_bytes(), plan.explain().is_none()), (vec!["x", "factor", "y"], 0, true));
        let input: Vec<u8> = [-1.0_f32, 2.0, 4.0].iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut output = [0xa5; 16];
        {
            // Memory may be longer than its tensor, and bindings in any order.
            let output = HostSlice::write(&mut output);
            let mut bindings = [(y, output.into()), (x, HostSlice::read(&input).into()), (factor, Binding::Scalar(0.5))];
            let report = plan.run_timed(&mut bindings, None).expect("runs");
            assert_eq!((report.parts.len(), report.parts[0].engine), (1, "cpu.pointwise"));
            plan.run(&mut bindings, None, Workspace::Own).expect("as often as one likes");
        }
        assert_eq!(output[..12], [0.0_f32, 1.0, 2.0].map(f32::to_le_bytes).concat()[..]);
        assert_eq!(output[12..], [0xa5; 4]);

        let read = || HostSlice::read(&input).into();
        let run = |bindings: &mut [(Uid, Binding<'_>)]| plan.run(bindings, None, Workspace::Own);
        let scalar = || (factor, Binding::Scalar(0.5));
        says(run(&mut [(x, read()), scalar()]), "y", BindingRule::Missing);
        says(run(&mut [(x, read()), scalar(), (y, read())]), "y", BindingRule::Access);
        let mut other = [0; 16];
        says(run(&mut [(x, read()), scalar(), (y, HostSlice::write(&mut other).into()), (x, read())]), "x", BindingRule::Twice);
        let device = gpu();
        let handle = device.handle().expect("a GPU");
        let buffer = handle.pool().alloc(handle.stream(), 12).expect("allocates");
        says(run(&mut [(x, buffer.slice().into()), scalar(), (y, HostSlice::write(&mut other).into())]), "x", BindingRule::Device);
        let integer = (factor, Binding::from(1_u64));
        says(run(&mut [(x, read()), integer, (y, HostSlice::write(&mut other).into())]), "factor", BindingRule::Number);
    }

    #[test]
    fn a_gpu_runs_on_memory_workspace_and_stream_of_others() {
        use verdigris_cuda::fake;
        let device = gpu();
        let (plan, [x, factor, y]) = planned(&device);
        let handle = device.handle().expect("a GPU");
        let theirs = verdigris_cuda::Stream::new(handle.context()).expect("a stream");
        let alloc = |bytes| handle.pool().alloc(&theirs, bytes).expect("allocates");
        let (from, to, workspace) = (alloc(12), alloc(12), alloc(plan.workspace_bytes()));
        let bind = || [(x, from.slice().into()), (factor, Binding::Scalar(0.5)), (y, to.slice().into())];
        let parts = plan.on_a_gpu().expect("a GPU's plan").parts().count();
        fake::launch_count();
        for lent in [Workspace::Own, Workspace::Lent(workspace.slice()), Workspace::From(handle.pool())] {
            plan.run(&mut bind(), Some(&theirs), lent).expect("submits");
            assert!(fake::launch_count() >= parts);
        }
        assert_eq!(plan.run_timed(&mut bind(), Some(&theirs)).expect("submits").parts.len(), parts);
        assert_eq!(plan.engines().len(), parts);
        fake::launch_count();
        says(plan.run(&mut bind(), None, Workspace::Own), "stream", BindingRule::Missing);
        let mut integer = bind();
        integer[1].1 = Binding::from(-1_i64);
        says(plan.run(&mut integer, Some(&theirs), Workspace::Own), "factor", BindingRule::Number);
        let bytes = [0; 12];
        let mut of_the_host = bind();
        of_the_host[0].1 = HostSlice::read(&bytes).into();
        let outcome = plan.run(&mut of_the_host, Some(&theirs), Workspace::Own);
        assert!(matches!(outcome, Err(Error::Binding(_))), "{outcome:?}");
        assert_eq!(fake::launch_count(), 0);
    }

    #[test]
    fn an_integer_factor_is_an_integer_of_its_type_on_either_device() {
        let numbers = [HostValue::Signed(-3), HostValue::Unsigned(7)];
        let refused = [HostValue::Signed(1 << 31), HostValue::Unsigned(u64::MAX), HostValue::Real(2.0)];
        let given = ["the integer 2147483648", "the integer 18446744073709551615", "a real number"];
        let says = |outcome: Result<(), Error>, given: &str| {
            let Err(Error::Binding(error)) = outcome else { panic!("{outcome:?}") };
            assert_eq!(error, BindingError::new("factor", "a host scalar of i32", given, BindingRule::Number));
        };

        let (plan, [x, factor, y]) = planned_with(&Device::cpu(), DType::I32);
        let input: Vec<u8> = [-1.0_f32, 2.0, 4.0].iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut output = [0; 12];
        let mut run = |number: HostValue| {
            let bindings = &mut [(x, HostSlice::read(&input).into()), (factor, number.into()), (y, HostSlice::write(&mut output).into())];
            plan.run(bindings, None, Workspace::Own).map(|()| output)
        };
        for (number, wanted) in numbers.into_iter().zip([[-6.0_f32, -12.0], [14.0, 28.0]]) {
            assert_eq!(run(number).expect("an i32")[4..], wanted.map(f32::to_le_bytes).concat()[..]);
        }
        refused.into_iter().zip(given).for_each(|(number, given)| says(run(number).map(drop), given));

        let device = gpu();
        let (plan, [x, factor, y]) = planned_with(&device, DType::I32);
        let handle = device.handle().expect("a GPU");
        let alloc = || handle.pool().alloc(handle.stream(), 12).expect("allocates");
        let (from, to) = (alloc(), alloc());
        let run = |number: HostValue| {
            let bindings = &mut [(x, from.slice().into()), (factor, number.into()), (y, to.slice().into())];
            plan.run(bindings, Some(handle.stream()), Workspace::Own)
        };
        numbers.into_iter().for_each(|number| run(number).expect("the kernel takes it as a real number"));
        refused.into_iter().zip(given).for_each(|(number, given)| says(run(number), given));
    }
}
