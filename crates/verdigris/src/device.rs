//! The GPU, or the CPU where there is none: one face for both.
//!
//! A [`Device`] plans graphs ([`Device::plan`]) and holds [`Tensor`]s; [`Device::run`] computes a [`Plan`] on them. All work of a GPU
//! device on its own tensors is submitted to its handle's stream, in order; [`Tensor::to_bytes`] waits for it.
//!
//! ```
//! use verdigris::{Config, DType, Device, GraphBuilder, Layout, Policy, Tensor, UnaryOp};
//!
//! let device = Device::open("cpu", &Config::default(), Policy::default())?;
//! assert!(device.handle().is_none() && device.name() == "cpu" && device.policy() == Device::cpu().policy());
//! let x = Tensor::from_values(&device, DType::F16, &[2, 3], &[1.0, 4.0, 9.0, 16.0, 25.0, 36.0])?;
//! assert_eq!((x.device(), x.dtype(), x.dims(), x.layout().strides()), (&device, DType::F16, &[2, 3][..], &[3, 1][..]));
//! let same = Tensor::from_bytes(&device, x.dtype(), *x.layout(), &x.to_bytes()?)?;
//! assert_eq!(same.permuted(&[1, 0])?.to_values()?, [1.0, 16.0, 4.0, 25.0, 9.0, 36.0]);
//!
//! let mut g = GraphBuilder::new("roots");
//! let input = g.tensor("x", DType::F16, Layout::row_major(&[2, 3])?);
//! let roots = g.unary("root", UnaryOp::Sqrt, input)?;
//! g.store(roots, "y", DType::F16)?;
//! let graph = g.finish()?;
//! let plan = device.plan(&graph)?;
//! let outputs = device.run(&plan, &[(input, &x)], &[])?;
//! assert_eq!(outputs[0].to_values()?, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
//!
//! // Under a policy of its own, and with the time that each part took.
//! let plan = device.plan_under(&graph, &Policy { deterministic: true, ..Policy::default() }, &mut |_progress| {})?;
//! let (again, report) = device.run_timed(&plan, &[(input, &x)], &[])?;
//! assert_eq!((again[0].to_bytes()?, report.parts.len()), (outputs[0].to_bytes()?, 1));
//! device.synchronize()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::fmt;
use std::sync::Arc;

use verdigris_cuda::{DeviceBuffer, HostSlice, Stream};
use verdigris_graph::{Graph, TensorDesc, Uid};
use verdigris_kir::execution::HostValue;
use verdigris_tensor::{BindingError, BindingRule, DType, Layout, num};

use crate::binding::Binding;
use crate::config::Config;
use crate::error::Error;
use crate::functional::Calls;
use crate::handle::Handle;
use crate::plan::{Plan, RunReport, Workspace};
use crate::planning::Progress;
use crate::policy::Policy;
use crate::recipe::layout_error;

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
        let handle = Handle::open(&Config { device: number, ..config.clone() });
        Ok(Device::gpu(handle.inspect_err(|error| crate::observe::failed(error, &format!("cuda:{number}")))?, policy))
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

    /// Plans a graph under the device's policy.
    ///
    /// # Errors
    /// As [`Device::plan_under`].
    pub fn plan(&self, graph: &Graph) -> Result<Plan, Error> {
        self.plan_under(graph, &self.inner.policy, &mut |_| {})
    }

    /// Plans a graph under a policy of its own; `watch` is called as it goes on. The CPU has one way for each op, whose results are the
    /// same each time: no policy changes anything there.
    ///
    /// # Errors
    /// [`Error::Graph`], [`Error::Cpu`], and all of [`Handle::plan_graph`].
    pub fn plan_under(&self, graph: &Graph, policy: &Policy, watch: &mut dyn FnMut(Progress)) -> Result<Plan, Error> {
        match &self.inner.kind {
            Kind::Cpu => Plan::on_cpu(graph),
            Kind::Gpu(handle) => Plan::on_gpu(handle, graph, policy, watch),
        }
    }

    /// Computes a plan's outputs from tensors, in memory of their own and in the order of [`Plan::outputs`]. On a GPU the work is
    /// submitted, not waited for.
    ///
    /// # Errors
    /// [`Error::Binding`] for a tensor that is missing or unknown, lies on another device, or is not what the graph describes; as
    /// [`Plan::run`].
    pub fn run(&self, plan: &Plan, inputs: &[(Uid, &Tensor)], scalars: &[(Uid, HostValue)]) -> Result<Vec<Tensor>, Error> {
        self.bind(plan, inputs, scalars, |bindings, stream| plan.run(bindings, stream, Workspace::Own)).map(|(outputs, ())| outputs)
    }

    /// As [`Device::run`], and tells what each part took; waits until it is done.
    ///
    /// # Errors
    /// As [`Device::run`].
    pub fn run_timed(
        &self,
        plan: &Plan,
        inputs: &[(Uid, &Tensor)],
        scalars: &[(Uid, HostValue)],
    ) -> Result<(Vec<Tensor>, RunReport), Error> {
        self.bind(plan, inputs, scalars, |bindings, stream| plan.run_timed(bindings, stream))
    }

    fn bind<R>(
        &self,
        plan: &Plan,
        inputs: &[(Uid, &Tensor)],
        scalars: &[(Uid, HostValue)],
        run: impl FnOnce(&mut [(Uid, Binding<'_>)], Option<&Stream>) -> Result<R, Error>,
    ) -> Result<(Vec<Tensor>, R), Error> {
        for (uid, tensor) in inputs {
            if let Some(wanted) = plan.tensors().iter().find(|wanted| wanted.uid == *uid) {
                tensor.matches(wanted, self)?;
            }
        }
        let wanted = plan.outputs().map(|tensor| (tensor.uid, tensor.dtype, tensor.layout));
        self.compute(inputs.iter().copied(), scalars, wanted, run)
    }

    /// Has `run` submit with tensors that are as the plan describes them, and new ones for what is wanted: these.
    pub(crate) fn compute<'t, R>(
        &self,
        inputs: impl Iterator<Item = (Uid, &'t Tensor)>,
        scalars: &[(Uid, HostValue)],
        wanted: impl Iterator<Item = (Uid, DType, Layout)>,
        run: impl FnOnce(&mut [(Uid, Binding<'_>)], Option<&Stream>) -> Result<R, Error>,
    ) -> Result<(Vec<Tensor>, R), Error> {
        let mut bindings: Vec<(Uid, Binding<'_>)> = Vec::with_capacity(8);
        bindings.extend(inputs.map(|(uid, tensor)| (uid, tensor.storage.read())));
        bindings.extend(scalars.iter().map(|&(uid, value)| (uid, value.into())));
        let mut outputs = Vec::new();
        for (uid, dtype, layout) in wanted {
            outputs.push((uid, dtype, layout, Storage::new(self, dtype, &layout)?));
        }
        bindings.extend(outputs.iter_mut().map(|(uid, _, _, storage)| (*uid, storage.write())));
        let done = run(&mut bindings, self.handle().map(Handle::stream))?;
        drop(bindings);
        let tensor = |(_, dtype, layout, storage): (Uid, DType, Layout, Storage)| Tensor {
            storage: Arc::new(storage),
            device: self.clone(),
            dtype,
            layout,
        };
        Ok((outputs.into_iter().map(tensor).collect(), done))
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

impl Storage {
    /// Memory for a result; its contents are undefined on a GPU.
    fn new(device: &Device, dtype: DType, layout: &Layout) -> Result<Storage, Error> {
        let needed_bytes = layout.span_bytes(dtype);
        Ok(match device.handle() {
            None => Storage::Host(host_bytes(needed_bytes)?),
            Some(handle) => Storage::Memory(handle.pool().alloc(handle.stream(), u64::try_from(needed_bytes).unwrap_or(u64::MAX))?),
        })
    }

    fn read(&self) -> Binding<'_> {
        match self {
            Storage::Host(bytes) => Binding::Host(HostSlice::read(bytes)),
            Storage::Memory(buffer) => Binding::Buffer(buffer.slice()),
        }
    }

    fn write(&mut self) -> Binding<'_> {
        match self {
            Storage::Host(bytes) => Binding::Host(HostSlice::write(bytes)),
            Storage::Memory(buffer) => Binding::Buffer(buffer.slice()),
        }
    }
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

    fn matches(&self, wanted: &TensorDesc, device: &Device) -> Result<(), BindingError> {
        self.is_on(device, &wanted.name)?;
        let words = |dtype: DType, layout: &Layout| format!("{dtype} {layout}");
        if (self.dtype, self.layout) == (wanted.dtype, wanted.layout) {
            return Ok(());
        }
        let (given, wanted_words) = (words(self.dtype, &self.layout), words(wanted.dtype, &wanted.layout));
        Err(BindingError::new(&wanted.name, wanted_words, given, BindingRule::Layout))
    }

    /// Whether it lies on that device.
    pub(crate) fn is_on(&self, device: &Device, name: &str) -> Result<(), BindingError> {
        if self.device == *device {
            return Ok(());
        }
        let words = |device: &Device| format!("a tensor on {}", device.name());
        Err(BindingError::new(name, words(device), words(&self.device), BindingRule::Device))
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
