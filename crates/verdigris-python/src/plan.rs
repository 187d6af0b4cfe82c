//! Plans: the library's, on tensors of others.

use std::sync::Arc;

use pyo3::exceptions::{PyKeyError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt};
use verdigris::error::{BindingError, BindingRule};
use verdigris::{Binding, Handle, Workspace};
use verdigris_cuda::{DeviceSlice, Event, Stream};
use verdigris_graph::Graph;
use verdigris_graph::binding::unknown_error;
use verdigris_tensor::{DType, Layout};

use crate::device::State;
use crate::errors::{Kind, cuda, library, raise};
use crate::memory::{Seen, binding, exchange_api, one_name, unfit};
use crate::operands::Uid;

type Dict<'py> = Bound<'py, PyDict>;
type Bindings = Vec<(verdigris_graph::Uid, Binding<'static>)>;

/// A graph planned on a device. It never changes; several threads may execute it at once.
///
/// Made by `Device.plan`.
#[pyclass(frozen, module = "verdigris")]
pub(crate) struct Plan {
    state: Arc<State>,
    plan: verdigris::Plan,
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
            state.device.plan_under(&graph, policy, &mut watch)
        });
        if let Some(error) = trouble {
            return Err(error);
        }
        Ok(Plan { state: Arc::clone(state), plan: made.map_err(library)? })
    }

    /// The caller's dict as bindings, and what keeps their memory.
    fn bind(&self, tensors: &Dict<'_>, stream: Option<u64>) -> PyResult<(Bindings, Vec<Seen>)> {
        let mut bindings = Vec::with_capacity(tensors.len());
        let mut seen_all = Vec::with_capacity(tensors.len());
        for (key, value) in tensors.iter() {
            let place = self.place_of(&key)?;
            let (desc, bound) = (&self.plan.tensors()[place], &self.plan.bound()[place]);
            let refused = |wanted: &dyn std::fmt::Display, given: &dyn std::fmt::Display, rule| {
                library(BindingError::new(&desc.name, wanted.to_string(), given.to_string(), rule).into())
            };
            // SAFETY: a tensor was seen as memory of its place, and lives as long as `seen_all` and the dict; an address is vouched for
            // by whoever wrote it down. That a GPU's memory lives until the work is done is the caller's part.
            let memory = |place, address, bytes| unsafe { binding(place, address, bytes, bound.is_written) };
            let given = if bound.is_scalar {
                let wanted = || format!("a host scalar of {}", desc.dtype);
                number(&value, desc.dtype).ok_or_else(|| refused(&wanted(), &"no number", BindingRule::Kind))?
            } else if value.is_instance_of::<PyInt>() {
                // Of Python's ints alone: a tensor of one integer converts to a number too, which is no address.
                let address: u64 = value.extract()?;
                memory(self.state.place, address, bound.bytes)
            } else {
                let seen = Seen::of(&value, stream)?;
                if (seen.dtype, normal(&seen.layout)) != (desc.dtype, normal(&desc.layout)) {
                    let words = |dtype, layout: &Layout| format!("{dtype} {layout}");
                    let (wanted, given) = (words(desc.dtype, &desc.layout), words(seen.dtype, &seen.layout));
                    return Err(refused(&wanted, &given, BindingRule::Layout));
                }
                if seen.place != self.state.place {
                    let words = |place| format!("a tensor on {place}");
                    return Err(refused(&words(self.state.place), &words(seen.place), BindingRule::Device));
                }
                if seen.read_only && bound.is_written {
                    return Err(refused(&"memory that is written", &"read-only memory", BindingRule::Access));
                }
                let memory = memory(seen.place, seen.address, seen.span_bytes());
                seen_all.push(seen);
                memory
            };
            bindings.push((desc.uid, given));
        }
        Ok((bindings, seen_all))
    }

    /// Lets what follows on the stream wait for the work that producers named with their tensors.
    fn wait<'a>(&self, stream: Option<(u64, &Stream)>, tensors: impl Iterator<Item = &'a Seen>) -> PyResult<()> {
        let (Some((raw, stream)), Some(handle)) = (stream, self.state.handle()) else { return Ok(()) };
        let mut done = vec![one_name(raw)];
        for behind in tensors.filter_map(|seen| seen.behind).map(one_name) {
            if done.contains(&behind) {
                continue;
            }
            done.push(behind);
            if let Some(other) = self.state.stream(behind) {
                let event = Event::ordering(handle.context()).map_err(cuda)?;
                event.record(&other).and_then(|()| stream.wait(&event)).map_err(cuda)?;
            }
        }
        Ok(())
    }

    fn place_of(&self, key: &Bound<'_, PyAny>) -> PyResult<usize> {
        let tensors = self.plan.tensors();
        if let Ok(name) = key.extract::<&str>() {
            let mut found = tensors.iter().enumerate().filter(|(_, desc)| desc.name == name);
            return match (found.next(), found.next()) {
                (Some((place, _)), None) => Ok(place),
                (None, _) => {
                    let known: Vec<&str> = tensors.iter().map(|desc| desc.name.as_str()).collect();
                    Err(PyKeyError::new_err(format!("the plan binds no tensor `{name}`; it binds {}", known.join(", "))))
                }
                _ => Err(PyKeyError::new_err(format!("several tensors are named `{name}`; bind them by their uids"))),
            };
        }
        let uid = match key.cast::<Uid>() {
            Ok(uid) => uid.get().0,
            Err(_) => verdigris_graph::Uid(key.extract().map_err(|_| PyTypeError::new_err("a tensor is named by its uid or its name"))?),
        };
        let place = tensors.iter().position(|desc| desc.uid == uid);
        place.ok_or_else(|| library(unknown_error(uid).into()))
    }

    /// The caller's stream; where there is none, that on which the first tensor's framework works, else the legacy default stream.
    fn stream(&self, handle: &Handle, given: Option<&Bound<'_, PyAny>>, tensors: &Dict<'_>) -> PyResult<u64> {
        if let Some(given) = given {
            return raw_stream(given);
        }
        let device = handle.context().device().ordinal() as i32;
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

/// An engine with its setting behind it, where it has one.
/// A number for a host scalar of that type: an integer stays one where an integer is wanted.
fn number(value: &Bound<'_, PyAny>, dtype: DType) -> Option<Binding<'static>> {
    let integer = || value.extract().map(Binding::Integer).or_else(|_| value.extract().map(Binding::Unsigned)).ok();
    let real = || value.extract().map(Binding::Scalar).ok();
    dtype.is_integer().then(integer).flatten().or_else(real)
}

fn with_setting(engine: &str, knobs: Option<String>) -> String {
    knobs.map_or_else(|| engine.to_owned(), |knobs| format!("{engine} {knobs}"))
}

/// Strides of dims of one element do not matter.
fn normal(layout: &Layout) -> (Vec<u64>, Vec<u64>) {
    let strides = layout.dims().iter().zip(layout.strides()).map(|(&dim, &stride)| if dim == 1 || layout.is_empty() { 0 } else { stride });
    (layout.dims().to_vec(), strides.collect())
}

/// A `CUstream` from what frameworks call a stream.
pub(crate) fn raw_stream(object: &Bound<'_, PyAny>) -> PyResult<u64> {
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
        stream: Option<&Bound<'_, PyAny>>,
        workspace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let raw = self.state.handle().map(|handle| self.stream(handle, stream, tensors)).transpose()?;
        let (mut bindings, mut seen_all) = self.bind(tensors, raw)?;
        let workspace = match workspace.filter(|_| raw.is_some()) {
            None => Workspace::Own,
            Some(given) => {
                let (address, bytes) = match given.extract::<(u64, u64)>() {
                    Ok(lent) => lent,
                    Err(_) => {
                        let seen = Seen::of(given, raw)?;
                        if seen.place != self.state.place || !seen.layout.is_packed() {
                            let what = format!("a workspace of {} {} on {}", seen.dtype, seen.layout, seen.place);
                            return Err(unfit(what, "the workspace is packed memory of the plan's device"));
                        }
                        let lent = (seen.address, seen.span_bytes());
                        seen_all.push(seen);
                        lent
                    }
                };
                // SAFETY: as in `bind`.
                Workspace::Lent(unsafe { DeviceSlice::from_raw(address, bytes) })
            }
        };
        let stream = raw.and_then(|raw| self.state.stream(raw));
        self.wait(raw.zip(stream.as_ref()), seen_all.iter())?;
        py.detach(|| self.plan.run(&mut bindings, stream.as_ref(), workspace)).map_err(library)
    }

    /// Computes, waits, and tells what each part took, in microseconds: a list of `(what, engine, us)`. On a GPU between events on the
    /// stream, kernels being launched one by one: short ones show their launch. With memory of the library's pool.
    #[pyo3(signature = (tensors, *, stream = None))]
    fn time(&self, py: Python<'_>, tensors: &Dict<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<(String, String, f64)>> {
        let raw = self.state.handle().map(|handle| self.stream(handle, stream, tensors)).transpose()?;
        let (mut bindings, seen_all) = self.bind(tensors, raw)?;
        let stream = raw.and_then(|raw| self.state.stream(raw));
        self.wait(raw.zip(stream.as_ref()), seen_all.iter())?;
        let report = py.detach(|| self.plan.run_timed(&mut bindings, stream.as_ref())).map_err(library)?;
        let told = |part: verdigris::plan::PartReport| (part.name, with_setting(part.engine, raw.map(|_| part.knobs)), part.us);
        Ok(report.parts.into_iter().map(told).collect())
    }

    /// The workspace of the chosen ways, in bytes; 0 on the CPU, which keeps its own memory.
    #[getter]
    fn workspace_bytes(&self) -> u64 {
        self.plan.workspace_bytes()
    }

    /// The least workspace that an execution can do with, in bytes.
    #[getter]
    fn least_workspace_bytes(&self) -> u64 {
        self.plan.least_workspace_bytes()
    }

    /// What is computed and by which engine, part by part: a list of `(what, engine)`. On a GPU an engine has its setting behind it.
    #[getter]
    fn engines(&self) -> Vec<(String, String)> {
        self.plan.engines().into_iter().map(|part| (part.name, with_setting(part.engine, part.knobs))).collect()
    }

    /// How the choice was made: for each part every way with its estimate and measured time, and every refusal with its reason.
    fn explain(&self) -> String {
        self.plan.to_string()
    }

    /// `explain` as JSON; on the CPU the list of engines.
    fn explain_json(&self) -> PyResult<String> {
        let text = match self.plan.explain() {
            Some(explanation) => serde_json::to_string(explanation),
            None => serde_json::to_string(&self.engines()),
        };
        text.map_err(|error| raise(Kind::Device, error.to_string()))
    }

    /// What is bound: a list of dicts with uid, name, dtype, dims, strides (in elements), is_written, is_scalar, bytes.
    #[getter]
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Vec<Dict<'py>>> {
        let describe = |(desc, bound): (&verdigris_graph::TensorDesc, &verdigris::BoundTensor)| {
            let dict = PyDict::new(py);
            dict.set_item("uid", Uid(desc.uid))?;
            dict.set_item("name", &desc.name)?;
            dict.set_item("dtype", desc.dtype.name())?;
            dict.set_item("dims", desc.layout.dims())?;
            dict.set_item("strides", desc.layout.strides())?;
            dict.set_item("is_written", bound.is_written)?;
            dict.set_item("is_scalar", bound.is_scalar)?;
            dict.set_item("bytes", bound.bytes)?;
            Ok(dict)
        };
        self.plan.tensors().iter().zip(self.plan.bound()).map(describe).collect()
    }

    /// The device that the plan is for.
    #[getter]
    fn device(&self) -> crate::device::Device {
        crate::device::Device { state: Arc::clone(&self.state) }
    }

    fn __repr__(&self) -> String {
        let parts = self.engines().into_iter().map(|(_, engine)| engine).collect::<Vec<_>>().join(", ");
        format!("Plan('{}' on {}: {parts})", self.plan.name(), self.state.place)
    }
}
