//! Devices: one of each for the whole process, so that kernels and plans are shared by all who ask.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use verdigris::{Config, Handle};
use verdigris_cuda::{Context, Driver, Stream};

use crate::errors::{Kind, cuda, library, raise};
use crate::memory::Place;
use crate::policy::Policy;

/// A GPU with its kernels, or the CPU; and the streams of others that were seen on it.
pub(crate) struct State {
    pub(crate) place: Place,
    pub(crate) device: verdigris::Device,
    streams: Mutex<Vec<(u64, Stream)>>,
}

impl State {
    fn new(place: Place, device: verdigris::Device) -> Arc<State> {
        Arc::new(State { place, device, streams: Mutex::default() })
    }

    fn of_gpu(ordinal: u32, handle: Handle) -> Arc<State> {
        State::new(Place::Cuda(ordinal), verdigris::Device::gpu(handle, verdigris::Policy::default()))
    }

    /// The GPU's handle; `None` on the CPU.
    #[inline]
    pub(crate) fn handle(&self) -> Option<&Handle> {
        self.device.handle()
    }

    /// The stream behind a `CUstream`, where 0 is the legacy default stream; `None` on the CPU.
    pub(crate) fn stream(&self, raw: u64) -> Option<Stream> {
        let handle = self.handle()?;
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, stream)) = streams.iter().find(|(known, _)| *known == raw) {
            return Some(stream.clone());
        }
        // SAFETY: a stream that a caller passes is alive during the call, and only a call with that number uses it. Whoever passes the
        // number of a stream that is gone is told by the driver.
        let stream = unsafe { Stream::borrow(handle.context(), raw as *mut std::ffi::c_void) };
        streams.push((raw, stream.clone()));
        Some(stream)
    }
}

fn cpu() -> Arc<State> {
    static CPU: OnceLock<Arc<State>> = OnceLock::new();
    Arc::clone(CPU.get_or_init(|| State::new(Place::Cpu, verdigris::Device::cpu())))
}

static DRIVER: OnceLock<Driver> = OnceLock::new();
static GPUS: Mutex<Option<HashMap<u64, Arc<State>>>> = Mutex::new(None);
static PACKS: Mutex<Option<PathBuf>> = Mutex::new(None);

fn driver() -> Result<&'static Driver, verdigris_cuda::Error> {
    match DRIVER.get() {
        Some(driver) => Ok(driver),
        None => {
            let driver = Driver::load()?;
            Ok(DRIVER.get_or_init(|| driver))
        }
    }
}

/// The number of the device that an address belongs to.
pub(crate) fn ordinal_of(address: u64) -> PyResult<u32> {
    let gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let context = gpus.iter().flat_map(|gpus| gpus.values()).find_map(|state| state.handle()).map(|handle| handle.context().clone());
    drop(gpus);
    let context = match context {
        Some(context) => context,
        None => driver().and_then(|driver| driver.device(0)?.primary_context()).map_err(cuda)?,
    };
    let found = context.device_of(address).map_err(cuda)?;
    found.ok_or_else(|| {
        raise(Kind::Binding, format!("{address:#x} is no memory of a device; `__cuda_array_interface__` speaks of device memory"))
    })
}

/// The configuration, with the package's own kernel pack where the configured file is not there.
fn config((major, minor): (u32, u32)) -> Result<Config, verdigris::Error> {
    let mut config = Config::from_environment()?;
    let folder = PACKS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let shipped = folder.map(|folder| folder.join(format!("verdigris-sm_{major}{minor}a.pack")));
    if let (Some(configured), Some(shipped)) = (&config.pack, shipped)
        && !configured.exists()
    {
        config.pack = Some(shipped);
    }
    Ok(config)
}

/// Takes hold of a GPU by its number, through the primary context that frameworks share.
pub(crate) fn gpu(ordinal: u32) -> Result<Arc<State>, verdigris::Error> {
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let gpus = gpus.get_or_insert_default();
    let key = u64::from(ordinal);
    if let Some(state) = gpus.get(&key) {
        return Ok(Arc::clone(state));
    }
    let device = driver()?.device(ordinal)?;
    let config = Config { device: ordinal, ..config(device.properties().compute_capability)? };
    let state = State::of_gpu(ordinal, Handle::on(&device.primary_context()?, &config)?);
    gpus.insert(key, Arc::clone(&state));
    Ok(state)
}

/// The GPU of the context that is current on this thread.
fn current() -> Result<Option<Arc<State>>, verdigris::Error> {
    // SAFETY: a caller that works in a context of its own keeps it alive as long as it uses the device; the package's text says so.
    let Some(context) = (unsafe { Context::adopt_current(driver()?) })? else { return Ok(None) };
    let ordinal = context.device().ordinal();
    {
        let gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
        let known = gpus.iter().flat_map(|gpus| gpus.values());
        for state in known {
            if state.handle().is_some_and(|handle| *handle.context() == context) {
                return Ok(Some(Arc::clone(state)));
            }
        }
    }
    if context.device().primary_context()? == context {
        return gpu(ordinal).map(Some);
    }
    let config = Config { device: ordinal, ..config(context.properties().compute_capability)? };
    let key = context.raw() as u64;
    let state = State::of_gpu(ordinal, Handle::on(&context, &config)?);
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(Some(Arc::clone(gpus.get_or_insert_default().entry(key).or_insert(state))))
}

/// The device where memory is.
pub(crate) fn at(place: Place) -> Result<Arc<State>, verdigris::Error> {
    match place {
        Place::Cpu => Ok(cpu()),
        Place::Cuda(ordinal) => gpu(ordinal),
    }
}

/// A GPU, or the CPU: where graphs are planned and run.
///
/// `Device("cuda:0")` works in the primary context, which PyTorch, CuPy and JAX share; opening it costs what the driver takes
/// (some 0.2 s) unless one of them has done so. Devices are shared: two of one name are equal.
#[pyclass(frozen, module = "verdigris")]
pub(crate) struct Device {
    pub(crate) state: Arc<State>,
}

#[pymethods]
impl Device {
    #[new]
    #[pyo3(signature = (name = "cuda"))]
    fn new(py: Python<'_>, name: &str) -> PyResult<Device> {
        let unknown = || library(verdigris::Error::DeviceName { name: name.to_owned() });
        let state = match name.split_once(':') {
            None if name == "cpu" => cpu(),
            None if name == "cuda" => {
                let number = Config::from_environment().map_err(library)?.device;
                py.detach(|| gpu(number)).map_err(library)?
            }
            Some(("cuda", number)) => {
                let number = number.parse().map_err(|_| unknown())?;
                py.detach(|| gpu(number)).map_err(library)?
            }
            _ => return Err(unknown()),
        };
        Ok(Device { state })
    }

    /// The device of the CUDA context that is current on the calling thread, whoever made it. That context must outlive the device, its
    /// plans and all that they run. Raises `DeviceError` where no context is current.
    #[staticmethod]
    fn current(py: Python<'_>) -> PyResult<Device> {
        let state = py.detach(current).map_err(library)?;
        let state = state.ok_or_else(|| raise(Kind::Device, "no CUDA context is current on this thread; make one, or name a device"))?;
        Ok(Device { state })
    }

    /// `cpu` or `cuda:N`.
    #[getter]
    fn name(&self) -> String {
        self.state.place.to_string()
    }

    /// What the device is: a dict. On a GPU the chip's name, compute capability, SMs, sizes in bytes, clocks, the driver's versions, and
    /// where kernels come from.
    #[getter]
    fn properties<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        let Some(handle) = self.state.handle() else {
            dict.set_item("name", "cpu")?;
            dict.set_item("threads", std::thread::available_parallelism().map_or(1, usize::from))?;
            return Ok(dict);
        };
        let p = handle.context().properties();
        dict.set_item("name", &p.name)?;
        dict.set_item("uuid", &p.uuid)?;
        dict.set_item("compute_capability", p.compute_capability)?;
        dict.set_item("sm_count", p.sm_count)?;
        dict.set_item("shared_memory_per_cta_bytes", p.shared_memory_per_cta_bytes)?;
        dict.set_item("registers_per_sm", p.registers_per_sm)?;
        dict.set_item("l2_bytes", p.l2_bytes)?;
        dict.set_item("memory_bytes", p.memory_bytes)?;
        dict.set_item("memory_bus_bits", p.memory_bus_bits)?;
        let clocks = handle.context().device().clocks().map_err(cuda)?;
        dict.set_item("sm_clock_khz", clocks.sm_khz)?;
        dict.set_item("memory_clock_khz", clocks.memory_khz)?;
        dict.set_item("driver_version", p.driver_version)?;
        dict.set_item("ptx_isa", p.ptx_isa.to_string())?;
        dict.set_item("kernel_cache", handle.cache_trouble().map_or("usable".to_owned(), ToString::to_string))?;
        let pack = match handle.pack() {
            None => "none".to_owned(),
            Some(Ok(pack)) => pack.path().display().to_string(),
            Some(Err(error)) => error.to_string(),
        };
        dict.set_item("pack", pack)?;
        dict.set_item("plan_cache", handle.plan_cache_trouble().unwrap_or_else(|| "usable".to_owned()))?;
        Ok(dict)
    }

    /// Waits until all work of the device's context is done. Errors of earlier kernels come up here.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        match self.state.handle() {
            None => Ok(()),
            Some(handle) => py.detach(|| handle.context().synchronize()).map_err(cuda),
        }
    }

    /// Plans a graph to run here.
    ///
    /// `progress`, if given, is called with `(part, parts, stage, done, total)` while kernels are compiled or candidates measured.
    /// The interpreter's lock is released meanwhile. Raises `GraphError`, `NoEngineError` with every refusal, `EngineError`,
    /// `OutOfMemoryError`, `DeviceError`.
    #[pyo3(signature = (graph, policy = None, progress = None))]
    fn plan(
        &self,
        py: Python<'_>,
        graph: &crate::graph::Graph,
        policy: Option<&Policy>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<crate::plan::Plan> {
        let graph = graph.finished()?;
        let policy = policy.map_or_else(verdigris::Policy::default, Policy::library);
        crate::plan::Plan::make(py, &self.state, graph, &policy, progress)
    }

    fn __repr__(&self) -> String {
        format!("Device('{}')", self.state.place)
    }

    fn __eq__(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
    }

    fn __hash__(&self) -> u64 {
        Arc::as_ptr(&self.state) as u64
    }
}

/// How many GPUs the driver shows; 0 without a driver.
#[pyfunction]
pub(crate) fn device_count() -> u32 {
    driver().and_then(Driver::device_count).unwrap_or(0)
}

/// Where the package has kernels made beforehand.
#[pyfunction]
pub(crate) fn set_pack_folder(folder: PathBuf) {
    *PACKS.lock().unwrap_or_else(PoisonError::into_inner) = Some(folder);
}
