//! Plans: graphs made ready, run on tensors of others.

use std::sync::Arc;

use pyo3::exceptions::{PyKeyError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use verdigris::error::BindingError;
use verdigris_graph::Graph;
use verdigris_tensor::Layout;

use crate::device::{Gpu, State};
use crate::errors::{Kind, library, raise};
use crate::graph::Uid;
use crate::memory::{Seen, exchange_api, unfit};
use crate::ready::{Bound, Ready, Way, Workspace};

type Dict<'py> = pyo3::Bound<'py, PyDict>;

/// A graph made ready on a device. It never changes; several threads may execute it at once.
///
/// Made by `Device.plan`.
#[pyclass(frozen, module = "verdigris")]
pub(crate) struct Plan {
    state: Arc<State>,
    ready: Ready,
    name: String,
}

impl Plan {
    pub(crate) fn make(
        py: Python<'_>,
        state: &Arc<State>,
        graph: Graph,
        policy: &verdigris::Policy,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Plan> {
        let mut trouble = None;
        let made = py.detach(|| {
            let mut watch = |at: verdigris::Progress| {
                let Some(progress) = progress.as_ref().filter(|_| trouble.is_none()) else { return };
                let stage = match at.stage {
                    verdigris::Stage::Kernels => "kernels",
                    verdigris::Stage::Measuring => "measuring",
                };
                trouble = Python::attach(|py| progress.call1(py, (at.part, at.parts, stage, at.done, at.total))).err();
            };
            Ready::make(state, &graph, policy, &mut watch)
        });
        if let Some(error) = trouble {
            return Err(error);
        }
        Ok(Plan { state: Arc::clone(state), ready: made.map_err(library)?, name: graph.name })
    }

    /// The caller's dict as one binding for each tensor, and the stream that the first tensor's framework works on.
    fn bind(&self, tensors: &Dict<'_>, stream: Option<u64>) -> PyResult<(Vec<Bound>, Vec<Seen>)> {
        let mut bound = vec![None; self.ready.tensors.len()];
        let mut seen_all = Vec::with_capacity(bound.len());
        for (key, value) in tensors.iter() {
            let place = self.place_of(&key)?;
            let fact = &self.ready.tensors[place];
            let desc = &fact.desc;
            if bound[place].is_some() {
                return Err(library(BindingError::Twice { uid: desc.uid }.into()));
            }
            let span = u64::try_from(desc.layout.span_bytes(desc.dtype)).unwrap_or(u64::MAX);
            bound[place] = Some(if desc.by_value {
                Bound::Scalar(value.extract().map_err(|_| {
                    library(BindingError::TensorKind { tensor: desc.name.clone(), needed: "a host scalar", given: "a buffer" }.into())
                })?)
            } else if let Ok(address) = value.extract::<u64>() {
                Bound::Memory { address, bytes: span }
            } else {
                let seen = Seen::of(&value, stream)?;
                if (seen.dtype, normal(&seen.layout)) != (desc.dtype, normal(&desc.layout)) {
                    return Err(library(verdigris::Error::TensorMismatch {
                        tensor: desc.name.clone(),
                        given: format!("{} {}", seen.dtype, seen.layout),
                        needed: format!("{} {}", desc.dtype, desc.layout),
                    }));
                }
                if seen.place != self.state.place {
                    let (on, needed) = (seen.place.to_string(), self.state.place.to_string());
                    return Err(library(verdigris::Error::ForeignDevice { tensor: desc.name.clone(), on, needed }));
                }
                if seen.read_only && fact.is_written {
                    return Err(unfit(format_args!("tensor `{}` is read-only", desc.name), "an output is written"));
                }
                let memory = Bound::Memory { address: seen.address, bytes: seen.span_bytes() };
                seen_all.push(seen);
                memory
            });
        }
        let missing = |place: usize| {
            let desc = &self.ready.tensors[place].desc;
            library(BindingError::Missing { tensor: desc.name.clone(), uid: desc.uid }.into())
        };
        let bound = bound.into_iter().enumerate().map(|(place, bound)| bound.ok_or_else(|| missing(place)));
        Ok((bound.collect::<PyResult<_>>()?, seen_all))
    }

    fn place_of(&self, key: &pyo3::Bound<'_, PyAny>) -> PyResult<usize> {
        let tensors = &self.ready.tensors;
        if let Ok(name) = key.extract::<&str>() {
            let mut found = tensors.iter().enumerate().filter(|(_, fact)| fact.desc.name == name);
            return match (found.next(), found.next()) {
                (Some((place, _)), None) => Ok(place),
                (None, _) => {
                    let known: Vec<&str> = tensors.iter().map(|fact| fact.desc.name.as_str()).collect();
                    Err(PyKeyError::new_err(format!("the plan binds no tensor `{name}`; it binds {}", known.join(", "))))
                }
                _ => Err(PyKeyError::new_err(format!("several tensors are named `{name}`; bind them by their uids"))),
            };
        }
        let uid = match key.cast::<Uid>() {
            Ok(uid) => uid.get().0,
            Err(_) => verdigris_graph::Uid(key.extract().map_err(|_| PyTypeError::new_err("a tensor is named by its uid or its name"))?),
        };
        let place = tensors.iter().position(|fact| fact.desc.uid == uid);
        place.ok_or_else(|| library(BindingError::Unknown { uid }.into()))
    }

    /// The caller's stream; where there is none, that on which the first tensor's framework works, else the legacy default stream.
    fn stream(&self, gpu: &Gpu, given: Option<&pyo3::Bound<'_, PyAny>>, tensors: &Dict<'_>) -> PyResult<u64> {
        if let Some(given) = given {
            return raw_stream(given);
        }
        let device = gpu.handle.context().device().ordinal() as i32;
        for value in tensors.values() {
            if let Some(api) = exchange_api(&value)?
                && let Some(current) = api.current_work_stream
            {
                let mut raw = std::ptr::null_mut();
                // SAFETY: the table's owner fills in `raw`, which outlives the call.
                if unsafe { current(crate::dlpack::CUDA, device, &mut raw) } == 0 {
                    return Ok(raw as u64);
                }
                return Err(PyErr::fetch(value.py()));
            }
        }
        Ok(0)
    }
}

/// Strides of dims of one element do not matter.
fn normal(layout: &Layout) -> (Vec<u64>, Vec<u64>) {
    let strides = layout.dims().iter().zip(layout.strides()).map(|(&dim, &stride)| if dim == 1 || layout.is_empty() { 0 } else { stride });
    (layout.dims().to_vec(), strides.collect())
}

/// A `CUstream` from what frameworks call a stream.
pub(crate) fn raw_stream(object: &pyo3::Bound<'_, PyAny>) -> PyResult<u64> {
    let py = object.py();
    if let Ok(raw) = object.extract::<u64>() {
        return Ok(raw);
    }
    if let Some(method) = object.getattr_opt(intern!(py, "__cuda_stream__"))? {
        let (_, raw): (u64, u64) = method.call0()?.extract()?;
        return Ok(raw);
    }
    for name in [intern!(py, "cuda_stream"), intern!(py, "ptr"), intern!(py, "handle")] {
        if let Some(raw) = object.getattr_opt(name)? {
            return raw.extract();
        }
    }
    Err(PyTypeError::new_err("a stream is an integer (a CUstream), has `__cuda_stream__`, or is a stream of PyTorch or CuPy"))
}

#[pymethods]
impl Plan {
    /// Computes. `tensors` binds every tensor of `Plan.tensors`, by uid or name: to any tensor on the device that speaks DLPack or
    /// `__cuda_array_interface__`, of exactly the graph's type, dims and strides (dims of 1 may have any stride); to an address as an int,
    /// for which nobody vouches; a host scalar to a number.
    ///
    /// On a GPU the work is submitted to `stream` and not waited for; memory must live until it is done. `stream` is a `CUstream` as an int, or
    /// a stream of PyTorch or CuPy, or has `__cuda_stream__`; `None` is PyTorch's current stream where its tensors are bound, else the legacy
    /// default stream. `workspace` is a tensor of at least `workspace_bytes` bytes at a multiple of 256, or `(address, bytes)`; `None` takes
    /// memory of the library's own pool in the order of the stream, which allocates. On the CPU it returns when the work is done.
    ///
    /// Checked before anything is submitted: that each tensor is bound once, types, dims, strides, devices, alignments, the workspace,
    /// and that no output shares memory with another tensor where it may not. Raises `BindingError`, `DeviceError`.
    #[pyo3(signature = (tensors, *, stream = None, workspace = None))]
    fn execute(
        &self,
        py: Python<'_>,
        tensors: &Dict<'_>,
        stream: Option<&pyo3::Bound<'_, PyAny>>,
        workspace: Option<&pyo3::Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let Some(gpu) = &self.state.gpu else {
            let (bound, _seen) = self.bind(tensors, None)?;
            // SAFETY: the tensors were seen as host memory, and live as long as `_seen` and the dict; an address is vouched for by whoever
            // wrote it down.
            py.detach(|| unsafe { self.ready.run_on_cpu(&bound) }).map_err(library)?;
            return Ok(());
        };
        let raw = self.stream(gpu, stream, tensors)?;
        let (bound, _seen) = self.bind(tensors, Some(raw))?;
        let workspace = match workspace {
            None => Workspace::Pool,
            Some(given) => match given.extract::<(u64, u64)>() {
                Ok((address, bytes)) => Workspace::Lent { address, bytes },
                Err(_) => {
                    let seen = Seen::of(given, Some(raw))?;
                    if seen.place != self.state.place || !seen.layout.is_packed() {
                        let what = format!("a workspace of {} {} on {}", seen.dtype, seen.layout, seen.place);
                        return Err(unfit(what, "the workspace is packed memory of the plan's device"));
                    }
                    Workspace::Lent { address: seen.address, bytes: seen.span_bytes() }
                }
            },
        };
        let stream = gpu.stream(raw);
        // SAFETY: the tensors were seen as memory of the device; that it lives until the work is done is the caller's part.
        py.detach(|| unsafe { self.ready.submit(gpu, &stream, &bound, workspace) }).map_err(library)
    }

    /// Computes, waits, and tells what each part took, in microseconds: a list of `(what, engine, us)`. On a GPU between events on the
    /// stream, kernels being launched one by one: short ones show their launch. With memory of the library's pool.
    #[pyo3(signature = (tensors, *, stream = None))]
    fn time(&self, py: Python<'_>, tensors: &Dict<'_>, stream: Option<&pyo3::Bound<'_, PyAny>>) -> PyResult<Vec<(String, String, f64)>> {
        let Some(gpu) = &self.state.gpu else {
            let (bound, _seen) = self.bind(tensors, None)?;
            // SAFETY: as in `execute`.
            let report = py.detach(|| unsafe { self.ready.run_on_cpu(&bound) }).map_err(library)?;
            let steps = report.map(|report| report.steps).unwrap_or_default();
            return Ok(steps.into_iter().map(|step| (step.name, step.engine.id().to_owned(), step.time.as_secs_f64() * 1e6)).collect());
        };
        let raw = self.stream(gpu, stream, tensors)?;
        let (bound, _seen) = self.bind(tensors, Some(raw))?;
        let stream = gpu.stream(raw);
        // SAFETY: as in `execute`.
        let times = py.detach(|| unsafe { self.ready.time(gpu, &stream, &bound) }).map_err(library)?;
        Ok(self.engines().into_iter().zip(times).map(|((what, engine), us)| (what, engine, us)).collect())
    }

    /// The workspace of the chosen ways, in bytes; 0 on the CPU, which keeps its own memory.
    #[getter]
    fn workspace_bytes(&self) -> u64 {
        self.ready.workspace_bytes()
    }

    /// The least workspace that an execution can do with, in bytes.
    #[getter]
    fn least_workspace_bytes(&self) -> u64 {
        match self.ready.way() {
            Way::Cpu(_) => 0,
            Way::Gpu(plan) => plan.least_workspace_bytes(),
        }
    }

    /// What is computed and by which engine, part by part: a list of `(what, engine)`. On a GPU an engine has its setting behind it.
    #[getter]
    fn engines(&self) -> Vec<(String, String)> {
        match self.ready.way() {
            Way::Cpu(prepared) => prepared.engines().map(|(engine, name)| (name, engine.id().to_owned())).collect(),
            Way::Gpu(plan) => {
                let parts = plan.parts().zip(&plan.explain().parts);
                parts.map(|(part, why)| (why.problem.clone(), format!("{} {}", part.engine().name, part.knobs()))).collect()
            }
        }
    }

    /// How the choice was made: for each part every way with its estimate and measured time, and every refusal with its reason.
    fn explain(&self) -> String {
        match self.ready.way() {
            Way::Gpu(plan) => plan.explain().to_string(),
            Way::Cpu(prepared) => {
                let mut text = format!("{} on the CPU, which has one way for each op\n", self.name);
                for (engine, name) in prepared.engines() {
                    text.push_str(&format!("  {}  {name}\n", engine.id()));
                }
                text
            }
        }
    }

    /// `explain` as JSON; on the CPU the list of engines.
    fn explain_json(&self) -> PyResult<String> {
        let text = match self.ready.way() {
            Way::Gpu(plan) => serde_json::to_string(plan.explain()),
            Way::Cpu(_) => serde_json::to_string(&self.engines()),
        };
        text.map_err(|error| raise(Kind::Device, error.to_string()))
    }

    /// What is bound: a list of dicts with uid, name, dtype, dims, strides (in elements), is_written, is_scalar, bytes.
    #[getter]
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Vec<Dict<'py>>> {
        let describe = |fact: &crate::ready::Fact| {
            let (dict, desc) = (PyDict::new(py), &fact.desc);
            dict.set_item("uid", Uid(desc.uid))?;
            dict.set_item("name", &desc.name)?;
            dict.set_item("dtype", desc.dtype.name())?;
            dict.set_item("dims", desc.layout.dims())?;
            dict.set_item("strides", desc.layout.strides())?;
            dict.set_item("is_written", fact.is_written)?;
            dict.set_item("is_scalar", desc.by_value)?;
            dict.set_item("bytes", if desc.by_value { 0 } else { desc.layout.span_bytes(desc.dtype) })?;
            Ok(dict)
        };
        self.ready.tensors.iter().map(describe).collect()
    }

    /// The device that the plan is for.
    #[getter]
    fn device(&self) -> crate::device::Device {
        crate::device::Device { state: Arc::clone(&self.state) }
    }

    fn __repr__(&self) -> String {
        let parts = self.engines().into_iter().map(|(_, engine)| engine).collect::<Vec<_>>().join(", ");
        format!("Plan('{}' on {}: {parts})", self.name, self.state.place)
    }
}
