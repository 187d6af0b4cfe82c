//! The GPU, or the CPU where there is none: one face for both.
//!
//! A [`Device`] makes graphs ready ([`Device::prepare`]) and holds [`Tensor`]s; [`Ready::run`] computes. All work of a GPU device is
//! submitted to its handle's stream, in order; [`Tensor::to_bytes`] waits for it.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;
use verdigris_cuda::DeviceBuffer;
use verdigris_graph::{Graph, TensorDesc, Uid};
use verdigris_tensor::{DType, Layout, num};

use crate::config::Config;
use crate::error::Error;
use crate::explain::Explanation;
use crate::functional::Calls;
use crate::graph_plan::GraphPlan;
use crate::handle::Handle;
use crate::plan::Binding;
use crate::planning::Progress;
use crate::policy::Policy;

/// A GPU or the CPU; cheap to clone.
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

/// Fields go in this order: plans before what they run on.
struct Inner {
    calls: Calls,
    policy: Policy,
    kind: Kind,
}

enum Kind {
    Cpu,
    Gpu(Box<Handle>),
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Plans go with the device, and what they were executed on must be done with them.
        if let Kind::Gpu(handle) = &self.kind {
            let _ = handle.stream().synchronize();
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.name())
    }
}

/// The same device, not one like it.
impl PartialEq for Device {
    fn eq(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Eq for Device {}

impl Device {
    /// The CPU, over the threads of the rayon pool that calls are made in.
    pub fn cpu() -> Device {
        Device::new(Kind::Cpu, Policy::default())
    }

    /// A GPU.
    pub fn gpu(handle: Handle, policy: Policy) -> Device {
        Device::new(Kind::Gpu(Box::new(handle)), policy)
    }

    /// The device of that name: `cpu`, `cuda` (the configured one) or `cuda:N`.
    ///
    /// # Errors
    /// [`Error::DeviceName`], [`Error::Device`].
    pub fn open(name: &str, config: &Config, policy: Policy) -> Result<Device, Error> {
        let unknown = || Error::DeviceName { name: name.to_owned() };
        let number = match name.split_once(':') {
            None if name == "cpu" => return Ok(Device::new(Kind::Cpu, policy)),
            None if name == "cuda" => config.device,
            Some(("cuda", number)) => number.parse().map_err(|_| unknown())?,
            _ => return Err(unknown()),
        };
        Ok(Device::gpu(Handle::open(&Config { device: number, ..config.clone() })?, policy))
    }

    fn new(kind: Kind, policy: Policy) -> Device {
        Device { inner: Arc::new(Inner { kind, policy, calls: Calls::default() }) }
    }

    /// The GPU's name, or `cpu`.
    pub fn name(&self) -> &str {
        match &self.inner.kind {
            Kind::Cpu => "cpu",
            Kind::Gpu(handle) => &handle.arch().name,
        }
    }

    /// The GPU's handle.
    pub fn handle(&self) -> Option<&Handle> {
        match &self.inner.kind {
            Kind::Cpu => None,
            Kind::Gpu(handle) => Some(handle),
        }
    }

    /// What every graph on this device is planned under.
    pub fn policy(&self) -> &Policy {
        &self.inner.policy
    }

    pub(crate) fn calls(&self) -> &Calls {
        &self.inner.calls
    }

    /// Waits until all submitted work is done.
    ///
    /// # Errors
    /// [`Error::Device`], for a fault of any earlier kernel too.
    pub fn synchronize(&self) -> Result<(), Error> {
        match self.handle() {
            None => Ok(()),
            Some(handle) => Ok(handle.stream().synchronize()?),
        }
    }

    /// Makes a graph ready under the device's policy. The CPU has one way for each op, whose results are the same each time: no policy changes
    /// anything there.
    ///
    /// # Errors
    /// [`Error::Graph`], [`Error::Cpu`], and all of [`Handle::plan_graph`].
    pub fn prepare(&self, graph: &Graph) -> Result<Ready, Error> {
        self.prepare_watched(graph, &mut |_| {})
    }

    /// As [`Device::prepare`]; `watch` is called as it goes on.
    ///
    /// # Errors
    /// As [`Device::prepare`].
    pub fn prepare_watched(&self, graph: &Graph, watch: &mut dyn FnMut(Progress)) -> Result<Ready, Error> {
        Ok(Ready { made: self.make(graph, watch)?, device: self.clone() })
    }

    /// As [`Device::prepare_watched`]; what it gives does not hold the device, so that the device may keep it.
    pub(crate) fn make(&self, graph: &Graph, watch: &mut dyn FnMut(Progress)) -> Result<Made, Error> {
        let plan = match &self.inner.kind {
            // Sums on the CPU come out the same each time, so that no policy asks for more.
            Kind::Cpu => ReadyKind::Cpu(verdigris_cpu::Prepared::new(graph)?),
            Kind::Gpu(handle) => ReadyKind::Gpu(handle.plan_graph_watched(graph, &self.inner.policy, watch)?),
        };
        let written: Vec<Uid> = graph.nodes.iter().flat_map(|node| node.op.outputs()).collect();
        let read: Vec<Uid> = graph.nodes.iter().flat_map(|node| node.op.inputs()).collect();
        let (mut inputs, mut outputs, mut scalars) = (Vec::new(), Vec::new(), Vec::new());
        for tensor in graph.tensors.iter().filter(|tensor| !tensor.is_virtual) {
            if written.contains(&tensor.uid) {
                outputs.push(tensor.clone());
            } else if read.contains(&tensor.uid) {
                if tensor.by_value { scalars.push(tensor.clone()) } else { inputs.push(tensor.clone()) }
            }
        }
        Ok(Made { plan, inputs, outputs, scalars })
    }
}

/// Numbers on a device. Never changed once made, so that clones share their memory.
#[derive(Clone)]
pub struct Tensor {
    storage: Arc<Storage>,
    device: Device,
    dtype: DType,
    layout: Layout,
}

enum Storage {
    Host(Vec<u8>),
    Memory(DeviceBuffer),
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {} on {})", self.dtype, self.layout, self.device.name())
    }
}

impl Tensor {
    /// From bytes, from the first element on.
    ///
    /// # Errors
    /// [`Error::TensorBytes`] for fewer bytes than the layout spans, [`Error::Device`].
    pub fn from_bytes(device: &Device, dtype: DType, layout: Layout, bytes: &[u8]) -> Result<Tensor, Error> {
        let needed_bytes = layout.span_bytes(dtype);
        let span = usize::try_from(needed_bytes).ok().and_then(|span| bytes.get(..span));
        let Some(bytes) = span else {
            return Err(Error::TensorBytes { given_bytes: bytes.len() as u64, needed_bytes });
        };
        let storage = match device.handle() {
            None => Storage::Host(bytes.to_vec()),
            Some(handle) => Storage::Memory(handle.pool().alloc_from(handle.stream(), bytes)?),
        };
        Ok(Tensor { storage: Arc::new(storage), device: device.clone(), dtype, layout })
    }

    /// From numbers in row-major order, each rounded to the type; packed row-major.
    ///
    /// # Errors
    /// [`Error::Graph`] for dims too large, [`Error::TensorBytes`] where there are not as many numbers as elements, [`Error::Device`].
    pub fn from_values(device: &Device, dtype: DType, dims: &[u64], values: &[f64]) -> Result<Tensor, Error> {
        let layout = row_major(dims)?;
        let size = dtype.bytes();
        let needed_bytes = layout.span_bytes(dtype);
        if (values.len() * size) as u128 != needed_bytes {
            return Err(Error::TensorBytes { given_bytes: (values.len() * size) as u64, needed_bytes });
        }
        let mut bytes = vec![0; values.len() * size];
        for (element, value) in bytes.chunks_exact_mut(size).zip(values) {
            // A chunk is as long as an element.
            let _ = num::write_element(dtype, *value, element);
        }
        Tensor::from_bytes(device, dtype, layout, &bytes)
    }

    /// Memory for a result; its contents are undefined on a GPU.
    fn empty(device: &Device, dtype: DType, layout: Layout) -> Result<Tensor, Error> {
        let needed_bytes = layout.span_bytes(dtype);
        let storage = match device.handle() {
            None => Storage::Host(host_bytes(needed_bytes)?),
            Some(handle) => Storage::Memory(handle.pool().alloc(handle.stream(), u64::try_from(needed_bytes).unwrap_or(u64::MAX))?),
        };
        Ok(Tensor { storage: Arc::new(storage), device: device.clone(), dtype, layout })
    }

    /// Where it is.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Its element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Its dims and strides.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Its extents.
    pub fn dims(&self) -> &[u64] {
        self.layout.dims()
    }

    /// The same memory with its dims in another order.
    ///
    /// # Errors
    /// [`Error::Graph`] for what is no permutation.
    pub fn permuted(&self, order: &[usize]) -> Result<Tensor, Error> {
        let layout = self.layout.permuted(order).map_err(layout_error)?;
        Ok(Tensor { layout, ..self.clone() })
    }

    /// The same memory under other dims of as many elements, where it is packed row-major; `None` where it is not.
    pub(crate) fn viewed(&self, dims: &[u64]) -> Option<Tensor> {
        let layout = Layout::row_major(dims).ok()?;
        (self.layout.is_row_major() && layout.elements() == self.layout.elements()).then(|| Tensor { layout, ..self.clone() })
    }

    /// A copy of its bytes, from the first element to the last; waits for the work that makes them.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn to_bytes(&self) -> Result<Vec<u8>, Error> {
        match &*self.storage {
            Storage::Host(bytes) => Ok(bytes.clone()),
            Storage::Memory(buffer) => match self.device.handle() {
                Some(handle) => Ok(buffer.download_all(handle.stream())?),
                None => Ok(Vec::new()),
            },
        }
    }

    /// Its numbers in row-major order.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn to_values(&self) -> Result<Vec<f64>, Error> {
        let bytes = self.to_bytes()?;
        let element = |position| {
            let start = usize::try_from(self.layout.offset_of_position(position)?).ok()? * self.dtype.bytes();
            num::read_element(self.dtype, bytes.get(start..)?)
        };
        Ok((0..self.layout.elements()).map_while(element).collect())
    }

    fn matches(&self, wanted: &TensorDesc, device: &Device) -> Result<(), Error> {
        if self.device != *device {
            return Err(Error::ForeignDevice {
                tensor: wanted.name.clone(),
                on: self.device.name().to_owned(),
                needed: device.name().to_owned(),
            });
        }
        if (self.dtype, self.layout) != (wanted.dtype, wanted.layout) {
            return Err(Error::TensorMismatch {
                tensor: wanted.name.clone(),
                given: format!("{} {}", self.dtype, self.layout),
                needed: format!("{} {}", wanted.dtype, wanted.layout),
            });
        }
        Ok(())
    }
}

/// So many zeros in the memory of the host.
fn host_bytes(needed_bytes: u128) -> Result<Vec<u8>, Error> {
    let need_bytes = u64::try_from(needed_bytes).unwrap_or(u64::MAX);
    let span = usize::try_from(need_bytes).unwrap_or(usize::MAX);
    // Asked for twice, for zeros that the system gives need no writing.
    Vec::<u8>::new().try_reserve_exact(span).map_err(|_| verdigris_cpu::Error::OutOfMemory { need_bytes })?;
    Ok(vec![0; span])
}

pub(crate) fn row_major(dims: &[u64]) -> Result<Layout, Error> {
    Layout::row_major(dims).map_err(layout_error)
}

pub(crate) fn layout_error(source: verdigris_tensor::LayoutError) -> Error {
    verdigris_graph::Error::Layout { tensor: "result".to_owned(), source }.into()
}

/// A graph made ready on a device.
pub struct Ready {
    made: Made,
    device: Device,
}

/// A graph made ready, apart from the device that it is for.
pub(crate) struct Made {
    plan: ReadyKind,
    inputs: Vec<TensorDesc>,
    outputs: Vec<TensorDesc>,
    scalars: Vec<TensorDesc>,
}

enum ReadyKind {
    Cpu(verdigris_cpu::Prepared),
    Gpu(GraphPlan),
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

impl Ready {
    /// The tensors read, in the order of the graph's list.
    pub fn inputs(&self) -> &[TensorDesc] {
        &self.made.inputs
    }

    /// The tensors written, in the order of the graph's list: what [`Ready::run`] gives.
    pub fn outputs(&self) -> &[TensorDesc] {
        &self.made.outputs
    }

    /// The host scalars.
    pub fn scalars(&self) -> &[TensorDesc] {
        &self.made.scalars
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// How a GPU's plan was chosen; the CPU has one way for each op.
    pub fn explain(&self) -> Option<&Explanation> {
        match &self.made.plan {
            ReadyKind::Cpu(_) => None,
            ReadyKind::Gpu(plan) => Some(plan.explain()),
        }
    }

    /// The engine of each part, with what it computes.
    pub fn engines(&self) -> Vec<(&'static str, String)> {
        match &self.made.plan {
            ReadyKind::Cpu(prepared) => prepared.engines().map(|(engine, name)| (engine.id(), name)).collect(),
            ReadyKind::Gpu(plan) => {
                plan.parts().zip(&plan.explain().parts).map(|(part, why)| (part.engine().name, why.problem.clone())).collect()
            }
        }
    }

    /// Computes the outputs, in memory of their own. On a GPU the work is submitted, not waited for.
    ///
    /// # Errors
    /// [`Error::Binding`] for a tensor that is missing or unknown, [`Error::TensorMismatch`], [`Error::ForeignDevice`], [`Error::Cpu`],
    /// [`Error::Device`].
    pub fn run(&self, inputs: &[(Uid, &Tensor)], scalars: &[(Uid, f64)]) -> Result<Vec<Tensor>, Error> {
        self.made.compute(&self.device, inputs, scalars, false).map(|(outputs, _)| outputs)
    }

    /// As [`Ready::run`], and tells what each part took; waits until it is done.
    ///
    /// # Errors
    /// As [`Ready::run`].
    pub fn run_reported(&self, inputs: &[(Uid, &Tensor)], scalars: &[(Uid, f64)]) -> Result<(Vec<Tensor>, RunReport), Error> {
        self.made.compute(&self.device, inputs, scalars, true)
    }
}

impl Made {
    /// The tensors written, in the order of the graph's list.
    pub(crate) fn outputs(&self) -> &[TensorDesc] {
        &self.outputs
    }

    /// Computes the outputs on the device that the graph was made ready for.
    pub(crate) fn compute(
        &self,
        device: &Device,
        inputs: &[(Uid, &Tensor)],
        scalars: &[(Uid, f64)],
        timed: bool,
    ) -> Result<(Vec<Tensor>, RunReport), Error> {
        use crate::error::BindingError;
        let find = |wanted: &TensorDesc| -> Result<&Tensor, Error> {
            let missing = || BindingError::Missing { tensor: wanted.name.clone(), uid: wanted.uid };
            let (_, tensor) = inputs.iter().find(|(uid, _)| *uid == wanted.uid).ok_or_else(missing)?;
            tensor.matches(wanted, device)?;
            Ok(tensor)
        };
        let read = self.inputs.iter().map(find).collect::<Result<Vec<&Tensor>, Error>>()?;
        for wanted in &self.scalars {
            if !scalars.iter().any(|(uid, _)| *uid == wanted.uid) {
                return Err(BindingError::Missing { tensor: wanted.name.clone(), uid: wanted.uid }.into());
            }
        }
        let is_known = |list: &[TensorDesc], uid: Uid| list.iter().any(|tensor| tensor.uid == uid);
        let stray = (inputs.iter().map(|(uid, _)| *uid).find(|&uid| !is_known(&self.inputs, uid)))
            .or_else(|| scalars.iter().map(|(uid, _)| *uid).find(|&uid| !is_known(&self.scalars, uid)));
        if let Some(uid) = stray {
            return Err(BindingError::Unknown { uid }.into());
        }
        match &self.plan {
            ReadyKind::Cpu(prepared) => self.compute_on_cpu(device, prepared, &read, scalars),
            ReadyKind::Gpu(plan) => self.compute_on_gpu(device, plan, &read, scalars, timed),
        }
    }

    fn compute_on_cpu(
        &self,
        device: &Device,
        prepared: &verdigris_cpu::Prepared,
        read: &[&Tensor],
        scalars: &[(Uid, f64)],
    ) -> Result<(Vec<Tensor>, RunReport), Error> {
        let start = Instant::now();
        let mut results: Vec<Vec<u8>> = Vec::new();
        for wanted in &self.outputs {
            results.push(host_bytes(wanted.layout.span_bytes(wanted.dtype))?);
        }
        let mut bindings = verdigris_cpu::Bindings::new();
        for (wanted, tensor) in self.inputs.iter().zip(read) {
            if let Storage::Host(bytes) = &*tensor.storage {
                bindings.input(wanted.uid, bytes);
            }
        }
        for (wanted, bytes) in self.outputs.iter().zip(&mut results) {
            bindings.output(wanted.uid, bytes);
        }
        for &(uid, value) in scalars {
            bindings.scalar(uid, value);
        }
        let done = prepared.run(&mut bindings)?;
        drop(bindings);
        let workspace_bytes = done.workspace_bytes();
        let us = |time: std::time::Duration| time.as_secs_f64() * 1e6;
        let parts = done.steps.into_iter().map(|step| PartReport {
            name: step.name,
            engine: step.engine.id(),
            knobs: "default".to_owned(),
            us: us(step.time),
            workspace_bytes: step.workspace_bytes,
        });
        let report = RunReport { parts: parts.collect(), workspace_bytes, us: us(start.elapsed()), is_downgraded: false };
        let tensors = self.outputs.iter().zip(results).map(|(wanted, bytes)| Tensor {
            storage: Arc::new(Storage::Host(bytes)),
            device: device.clone(),
            dtype: wanted.dtype,
            layout: wanted.layout,
        });
        Ok((tensors.collect(), report))
    }

    fn compute_on_gpu(
        &self,
        device: &Device,
        plan: &GraphPlan,
        read: &[&Tensor],
        scalars: &[(Uid, f64)],
        timed: bool,
    ) -> Result<(Vec<Tensor>, RunReport), Error> {
        let mut report = RunReport { parts: Vec::new(), workspace_bytes: plan.workspace_bytes(), us: 0.0, is_downgraded: false };
        // A GPU's plan is never without its device.
        let Some(handle) = device.handle() else { return Ok((Vec::new(), report)) };
        let outputs =
            self.outputs.iter().map(|wanted| Tensor::empty(device, wanted.dtype, wanted.layout)).collect::<Result<Vec<_>, _>>()?;
        let tensors = self.inputs.iter().zip(read.iter().copied()).chain(self.outputs.iter().zip(&outputs));
        let mut bindings: Vec<(Uid, Binding<'_>)> = Vec::with_capacity(plan.tensors().len());
        for (wanted, tensor) in tensors {
            if let Storage::Memory(buffer) = &*tensor.storage
                // What a problem's canonical form does not read is not bound.
                && plan.tensors().iter().any(|bound| bound.uid == wanted.uid)
            {
                bindings.push((wanted.uid, Binding::Buffer(buffer.slice())));
            }
        }
        for &(uid, value) in scalars {
            if plan.tensors().iter().any(|bound| bound.uid == uid) {
                bindings.push((uid, Binding::Scalar(value)));
            }
        }
        if timed {
            let timed = plan.execute_timed_from(handle.stream(), &bindings, handle.pool())?;
            report.us = timed.parts.iter().map(|(_, us)| us).sum();
            (report.workspace_bytes, report.is_downgraded) = (timed.workspace_bytes, timed.is_downgraded);
            let parts = timed.parts.into_iter().zip(&plan.explain().parts);
            report.parts = parts
                .map(|((part, us), why)| PartReport {
                    name: why.problem.clone(),
                    engine: part.engine().name,
                    knobs: part.knobs().to_string(),
                    us,
                    workspace_bytes: part.workspace_bytes(),
                })
                .collect();
        } else {
            plan.execute_from(handle.stream(), &bindings, handle.pool())?;
        }
        Ok((outputs, report))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::functional;

    #[test]
    fn a_device_goes_when_nobody_holds_it_any_more() {
        for device in [
            Device::cpu(),
            Device::gpu(crate::Handle::on(&verdigris_cuda::fake::context(), &Config::default()).unwrap(), Policy::default()),
        ] {
            let watched = Arc::downgrade(&device.inner);
            let x = Tensor::from_values(&device, DType::F32, &[2], &[-1.0, 1.0]).unwrap();
            let y = functional::relu(&x).unwrap();
            drop((device, x));
            assert!(watched.upgrade().is_some(), "a tensor holds its device");
            drop(y);
            assert!(watched.upgrade().is_none(), "graphs that a device keeps for functions do not keep the device");
        }
    }
}
