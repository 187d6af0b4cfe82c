//! What is asked of PyTorch: types, modes, memory, streams. Handed over once, by `verdigris.torch`.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList, PyTuple};
use pyo3::{ffi, intern};
use verdigris_tensor::DType;

use crate::call::autocast::Autocast;
use crate::dlpack::{self, DLTensor, ExchangeApi};
use crate::errors::{Kind, raise};
use crate::memory::{Place, exchange_api};
use verdigris::recipe::MAX_INPUTS;

/// PyTorch's objects that calls need.
pub(crate) struct Hooks {
    tensor: Py<PyAny>,
    parameter: Py<PyAny>,
    api: &'static ExchangeApi,
    /// `(size, stride, dtype)`: the allocations by which compiled PyTorch code makes its results.
    empty_cpu: Py<PyAny>,
    empty_cuda: Py<PyAny>,
    /// `torch.empty_strided`, for another device than the current one.
    empty: Py<PyAny>,
    /// Element types by their order in [`DType::ALL`].
    dtypes: Vec<Option<Py<PyAny>>>,
    /// Functions without arguments; anything but 0 and false says that the dispatcher must be asked.
    modes: Vec<Py<PyAny>>,
    /// The names of PyTorch's module of forward-mode differentiation, which tell at which level it is: below 0 where it is off.
    forward_mode: Py<PyDict>,
    /// Whether PyTorch's profiler records, and its ranges: `(name, tensors)`.
    is_profiled: Py<PyAny>,
    range: Py<PyAny>,
    /// Whether any device's autocast is on; whether that of a device type is, and the type that it lowers to.
    is_autocast: Py<PyAny>,
    is_autocast_of: Py<PyAny>,
    autocast_dtype: Py<PyAny>,
    is_grad: Py<PyAny>,
    /// The current CUDA device's number; `None` where there is one device.
    current_device: Option<Py<PyAny>>,
    is_capturing: Option<Py<PyAny>>,
}

static HOOKS: PyOnceLock<Hooks> = PyOnceLock::new();

pub(crate) fn hooks(py: Python<'_>) -> PyResult<&Hooks> {
    HOOKS.get(py).ok_or_else(|| PyRuntimeError::new_err("import verdigris.torch first"))
}

/// Hands PyTorch's objects over. Later calls change nothing.
#[pyfunction]
pub(crate) fn hook_torch(py: Python<'_>, objects: &Bound<'_, PyDict>) -> PyResult<()> {
    let get = |name: &str| -> PyResult<Py<PyAny>> {
        let found = objects.get_item(name)?;
        Ok(found.ok_or_else(|| PyRuntimeError::new_err(format!("`{name}` of PyTorch is missing")))?.unbind())
    };
    let some = |name: &str| -> PyResult<Option<Py<PyAny>>> { Ok(Some(get(name)?).filter(|object| !object.is_none(py))) };
    let example = get("example")?;
    let api = exchange_api(example.bind(py))?;
    // SAFETY: the table is PyTorch's, which is never unloaded.
    let api = api.map(|api| unsafe { &*std::ptr::from_ref(api) });
    let by_name = get("dtypes")?;
    let by_name = by_name.bind(py).cast::<PyDict>()?;
    let mut dtypes = Vec::new();
    for dtype in DType::ALL {
        dtypes.push(by_name.get_item(dtype.name())?.map(Bound::unbind));
    }
    let modes: Vec<Py<PyAny>> = get("modes")?.extract(py)?;
    let hooks = Hooks {
        tensor: get("tensor")?,
        parameter: get("parameter")?,
        api: api
            .filter(|api| api.tensor_from.is_some() && api.current_work_stream.is_some())
            .ok_or_else(|| raise(Kind::Unsupported, "this PyTorch does not export `__dlpack_c_exchange_api__`; 2.11 or later is needed"))?,
        empty_cpu: get("empty_cpu")?,
        empty_cuda: get("empty_cuda")?,
        empty: get("empty")?,
        dtypes,
        modes,
        forward_mode: get("forward_mode")?.bind(py).cast::<PyDict>()?.clone().unbind(),
        is_profiled: get("is_profiled")?,
        range: get("range")?,
        is_autocast: get("is_autocast")?,
        is_autocast_of: get("is_autocast_of")?,
        autocast_dtype: get("autocast_dtype")?,
        is_grad: get("is_grad")?,
        current_device: some("current_device")?,
        is_capturing: some("is_capturing")?,
    };
    // Whoever came first has handed over the same.
    let _ = HOOKS.set(py, hooks);
    Ok(())
}

/// A call without arguments whose result is asked whether it is something.
#[inline]
fn says(py: Python<'_>, function: &Py<PyAny>) -> PyResult<bool> {
    function.bind(py).call0()?.is_truthy()
}

#[cold]
fn is_named_home(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = object.py();
    let kind: String = object.getattr(intern!(py, "device"))?.getattr(intern!(py, "type"))?.extract()?;
    Ok(matches!(kind.as_str(), "cpu" | "cuda"))
}

/// Whether a tensor may be one whose memory holds the negatives of its elements, a bit of PyTorch's that DLPack does not tell. PyTorch gives it to imaginary
/// parts of conjugated tensors, which are every other number of memory, and so are their views; to ask of each tensor would take as long as all else here.
///
/// # Safety
/// The tensor's lists of dims and strides are alive.
#[inline]
pub(crate) unsafe fn may_be_negated(tensor: &DLTensor) -> bool {
    // SAFETY: the caller's word.
    let (dims, strides) = unsafe { (tensor.dims(), tensor.strides()) };
    let strides = strides.unwrap_or_default();
    let is_real = tensor.dtype.dtype().is_some_and(DType::is_float);
    is_real && strides.len() == dims.len() && dims.iter().zip(strides).all(|(&dim, &stride)| dim <= 1 || stride % 2 == 0)
}

impl Hooks {
    /// What a tensor is; valid while the object lives and is not changed.
    #[inline]
    pub(crate) fn see(&self, object: &Bound<'_, PyAny>) -> PyResult<DLTensor> {
        let py = object.py();
        let kind = object.get_type_ptr().cast::<ffi::PyObject>();
        if kind != self.tensor.as_ptr() && kind != self.parameter.as_ptr() && !object.is_instance(self.tensor.bind(py))? {
            let name = object.get_type().name()?;
            return Err(pyo3::exceptions::PyTypeError::new_err(format!("`{name}` is no torch.Tensor")));
        }
        let mut tensor = DLTensor::NONE;
        let Some(tensor_from) = self.api.tensor_from else { return Ok(tensor) };
        // SAFETY: the object is a tensor of PyTorch, whose table this is, and the interpreter's lock is held.
        if unsafe { tensor_from(object.as_ptr().cast(), &mut tensor) } != 0 {
            return Err(PyErr::fetch(py));
        }
        Ok(tensor)
    }

    /// Whether all are tensors or parameters themselves, and nothing but autocast stands between a call and its kernel.
    #[inline]
    pub(crate) fn is_plain(&self, py: Python<'_>, inputs: &[Option<Bound<'_, PyAny>>; MAX_INPUTS]) -> PyResult<bool> {
        for input in inputs.iter().flatten() {
            let kind = input.get_type_ptr().cast::<ffi::PyObject>();
            if kind != self.tensor.as_ptr() && kind != self.parameter.as_ptr() {
                return Ok(false);
            }
        }
        for mode in &self.modes {
            if says(py, mode)? {
                return Ok(false);
            }
        }
        // Tangents are seen by the dispatcher's half alone, which refuses them.
        let level = self.forward_mode.bind(py).get_item(intern!(py, "_current_level"))?;
        Ok(level.is_none_or(|level| level.extract::<i64>().is_ok_and(|level| level < 0)))
    }

    /// Whether a tensor is on a device that plans are made for. Of one that is there but cannot be seen, the call says why.
    #[inline]
    pub(crate) fn is_at_home(&self, object: &Bound<'_, PyAny>) -> PyResult<bool> {
        match self.see(object) {
            Ok(tensor) if Place::of(tensor.device).is_some() => Ok(true),
            _ => is_named_home(object),
        }
    }

    /// Puts tensors of their own in place of those whose memory holds the negatives of their elements, as that of `x.conj().imag` does; whether there was one.
    #[cold]
    pub(crate) fn resolve_negated(&self, inputs: &mut [Option<Bound<'_, PyAny>>; MAX_INPUTS]) -> PyResult<bool> {
        let mut found = false;
        for object in inputs.iter_mut().flatten() {
            let py = object.py();
            if object.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
                *object = object.call_method0(intern!(py, "detach"))?.call_method0(intern!(py, "resolve_neg"))?;
                found = true;
            }
        }
        Ok(found)
    }

    /// Runs a call in a range of PyTorch's profiler where that records. The call itself is the same either way, so that a profile shows what happens
    /// without one.
    #[inline]
    pub(crate) fn in_range<'py, T>(
        &self,
        py: Python<'py>,
        name: &str,
        inputs: &[Option<Bound<'py, PyAny>>; MAX_INPUTS],
        run: impl FnOnce() -> PyResult<T>,
    ) -> PyResult<T> {
        if !says(py, &self.is_profiled)? {
            return run();
        }
        let tensors = PyList::new(py, inputs.iter().flatten())?;
        let range = self.range.bind(py).call1((format!("verdigris::{name}"), tensors))?;
        range.call_method0(intern!(py, "__enter__"))?;
        let result = run();
        range.call_method1(intern!(py, "__exit__"), (py.None(), py.None(), py.None()))?;
        result
    }

    /// Casts the floating-point tensors of the first one's device as PyTorch's autocast does: f64 stays, and so does what has the type. Gives the places
    /// of those that were cast, as bits. The casts are PyTorch's, with gradients of their own where gradients are recorded. With `leaves_stay`, tensors
    /// that no op wrote are left alone.
    #[inline]
    pub(crate) fn cast<'py>(
        &self,
        py: Python<'py>,
        inputs: &mut [Option<Bound<'py, PyAny>>; MAX_INPUTS],
        kind: Autocast,
        leaves_stay: bool,
    ) -> PyResult<u8> {
        if !says(py, &self.is_autocast)? {
            return Ok(0);
        }
        let Some(first) = inputs.iter().flatten().next() else { return Ok(0) };
        let home = Place::of(self.see(first)?.device);
        let of = match home {
            Some(Place::Cpu) => intern!(py, "cpu"),
            Some(Place::Cuda(_)) => intern!(py, "cuda"),
            None => return Ok(0),
        };
        if !self.is_autocast_of.bind(py).call1((of,))?.is_truthy()? {
            return Ok(0);
        }
        let wanted = match kind {
            Autocast::F32 => self.dtype(DType::F32)?.clone_ref(py).into_bound(py),
            Autocast::LowerOperands | Autocast::LowerLayers | Autocast::LowerAttended => self.autocast_dtype.bind(py).call1((of,))?,
        };
        let mut cast = 0;
        for (place, input) in inputs.iter_mut().enumerate() {
            let Some(input) = input.as_mut().filter(|_| kind.casts(place)) else { continue };
            let seen = self.see(input)?;
            let is_narrow = seen.dtype.dtype().is_some_and(|dtype| dtype.is_float() && dtype != DType::F64);
            let is_there = matches!(
                (Place::of(seen.device), home),
                (Some(Place::Cpu), Some(Place::Cpu)) | (Some(Place::Cuda(_)), Some(Place::Cuda(_)))
            );
            if !(is_narrow && is_there) || input.getattr(intern!(py, "dtype"))?.is(&wanted) {
                continue;
            }
            if leaves_stay && input.getattr(intern!(py, "is_leaf"))?.is_truthy()? {
                continue;
            }
            *input = input.call_method1(intern!(py, "to"), (&wanted,))?;
            cast |= 1 << place;
        }
        Ok(cast)
    }

    /// PyTorch's word for an element type.
    fn dtype(&self, dtype: DType) -> PyResult<&Py<PyAny>> {
        let place = DType::ALL.iter().position(|known| *known == dtype);
        let object = place.and_then(|place| self.dtypes.get(place)).and_then(Option::as_ref);
        object.ok_or_else(|| raise(Kind::Unsupported, format!("PyTorch has no tensors of {dtype}")))
    }

    /// Whether gradients are recorded and one of the tensors wants its own.
    #[inline]
    pub(crate) fn wants_gradient(&self, py: Python<'_>, inputs: &[Option<Bound<'_, PyAny>>; MAX_INPUTS]) -> PyResult<bool> {
        if !says(py, &self.is_grad)? {
            return Ok(false);
        }
        for input in inputs.iter().flatten() {
            if input.getattr(intern!(py, "requires_grad"))?.is_truthy()? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The arguments of an allocation, made once and used at each call.
    pub(crate) fn allocation(&self, py: Python<'_>, dims: &[u64], strides: &[u64], dtype: DType) -> PyResult<Py<PyTuple>> {
        let object = self.dtype(dtype)?;
        Ok((PyTuple::new(py, dims)?, PyTuple::new(py, strides)?, object).into_pyobject(py)?.unbind())
    }

    /// Memory from PyTorch's allocator, as a new tensor.
    #[inline]
    pub(crate) fn allocate<'py>(&self, py: Python<'py>, place: Place, arguments: &Py<PyTuple>) -> PyResult<Bound<'py, PyAny>> {
        match place {
            Place::Cpu => self.empty_cpu.bind(py).call1(arguments.bind(py)),
            Place::Cuda(device) => {
                let is_elsewhere = match &self.current_device {
                    None => false,
                    Some(current) => current.bind(py).call0()?.extract::<u32>()? != device,
                };
                if !is_elsewhere {
                    return self.empty_cuda.bind(py).call1(arguments.bind(py));
                }
                let arguments = arguments.bind(py);
                let keywords = PyDict::new(py);
                keywords.set_item("dtype", arguments.get_item(2)?)?;
                keywords.set_item("device", format!("cuda:{device}"))?;
                self.empty.bind(py).call((arguments.get_item(0)?, arguments.get_item(1)?), Some(&keywords))
            }
        }
    }

    /// The stream that PyTorch's work of this thread goes to.
    #[inline]
    pub(crate) fn current_stream(&self, py: Python<'_>, place: Place) -> PyResult<u64> {
        let (Place::Cuda(device), Some(current)) = (place, self.api.current_work_stream) else { return Ok(0) };
        let mut raw = std::ptr::null_mut();
        // SAFETY: PyTorch fills in `raw`, which outlives the call.
        if unsafe { current(dlpack::CUDA, device as i32, &mut raw) } != 0 {
            return Err(PyErr::fetch(py));
        }
        Ok(raw as u64)
    }

    /// Whether PyTorch's current stream is being captured.
    pub(crate) fn is_capturing(&self, py: Python<'_>, place: Place) -> PyResult<bool> {
        match (place, &self.is_capturing) {
            (Place::Cuda(_), Some(asked)) => says(py, asked),
            _ => Ok(false),
        }
    }
}
