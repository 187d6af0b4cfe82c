//! Tensors of others, seen without a copy: DLPack (both protocols, and PyTorch's table of functions), `__cuda_array_interface__`, and
//! NumPy's `__array_interface__` for types that DLPack has no code for in NumPy.

use std::ffi::CStr;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use pyo3::{ffi, intern};
use verdigris::Binding;
use verdigris_cuda::{DeviceSlice, HostSlice};
use verdigris_tensor::{DType, Layout};

use crate::dlpack::{self, DLManagedTensor, DLManagedTensorVersioned, DLTensor, ExchangeApi};
use crate::errors::{Kind, raise};

/// Where memory is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Place {
    Cpu,
    Cuda(u32),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Place::Cpu => f.write_str("cpu"),
            Place::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

impl Place {
    pub(crate) fn of(device: dlpack::DLDevice) -> Option<Place> {
        match device.device_type {
            dlpack::CPU | dlpack::CUDA_HOST => Some(Place::Cpu),
            dlpack::CUDA => u32::try_from(device.device_id).ok().map(Place::Cuda),
            _ => None,
        }
    }
}

/// So many bytes from an address on, as a plan of that place takes them.
///
/// # Safety
/// The memory is there until the work is done that it is bound to; on the CPU nobody writes it meanwhile, and nobody reads what is
/// written, but through the bindings of one run.
#[inline]
pub(crate) unsafe fn binding<'a>(place: Place, address: u64, bytes: u64, is_written: bool) -> Binding<'a> {
    match place {
        // SAFETY: the caller's word.
        Place::Cpu => Binding::Host(unsafe { HostSlice::from_raw(address, bytes, is_written) }),
        // SAFETY: as above.
        Place::Cuda(_) => Binding::Buffer(unsafe { DeviceSlice::from_raw(address, bytes) }),
    }
}

/// Somebody's tensor, for as long as this lives (and the object that it was seen in).
pub(crate) struct Seen {
    pub(crate) address: u64,
    pub(crate) dtype: DType,
    pub(crate) layout: Layout,
    pub(crate) place: Place,
    pub(crate) read_only: bool,
    /// The stream whose work so far has to be done before the memory is read or written; `None` where nothing is to be waited for.
    pub(crate) behind: Option<u64>,
    /// Keeps the exported memory alive.
    _owner: Owner,
}

enum Owner {
    /// The object itself, which the caller holds.
    Object,
    Unversioned(*mut DLManagedTensor),
    Versioned(*mut DLManagedTensorVersioned),
}

// SAFETY: a managed tensor may be given back from any thread; nothing else is done with the pointer.
unsafe impl Send for Owner {}
// SAFETY: as above; shared references do not reach the pointer.
unsafe impl Sync for Owner {}

impl Drop for Owner {
    fn drop(&mut self) {
        // Deleters of Python's producers take the interpreter's lock.
        match *self {
            Owner::Object => {}
            Owner::Unversioned(tensor) => Python::attach(|_| {
                // SAFETY: the capsule was consumed, so that the tensor is ours to delete, once.
                if let Some(deleter) = unsafe { (*tensor).deleter } {
                    // SAFETY: as above.
                    unsafe { deleter(tensor) };
                }
            }),
            Owner::Versioned(tensor) => Python::attach(|_| {
                // SAFETY: as above.
                if let Some(deleter) = unsafe { (*tensor).deleter } {
                    // SAFETY: as above.
                    unsafe { deleter(tensor) };
                }
            }),
        }
    }
}

/// Why a tensor cannot be taken.
pub(crate) fn unfit(what: impl std::fmt::Display, rule: &str) -> PyErr {
    raise(Kind::Binding, format!("{what}; {rule}"))
}

/// The layout of these dims and strides.
pub(crate) fn layout_of(dims: &[i64], strides: Option<&[i64]>) -> PyResult<Layout> {
    let unsigned = |list: &[i64], rule| -> PyResult<Vec<u64>> {
        list.iter().map(|&value| u64::try_from(value).map_err(|_| unfit(format_args!("{list:?}"), rule))).collect()
    };
    let dims = unsigned(dims, "dims are not negative")?;
    let made = match strides {
        None => Layout::row_major(&dims),
        Some(strides) => {
            let mut strides = unsigned(strides, "strides are not negative; copy the tensor")?;
            if dims.contains(&0) {
                strides.fill(0);
            }
            Layout::new(&dims, &strides)
        }
    };
    made.map_err(|error| raise(Kind::Binding, error.to_string()))
}

impl Seen {
    /// What the object exports, for work on `stream` (a `cudaStream_t`; told to producers that order their own work by it).
    pub(crate) fn of(object: &Bound<'_, PyAny>, stream: Option<u64>) -> PyResult<Seen> {
        let py = object.py();
        if let Some(api) = exchange_api(object)?
            && let Some(tensor_from) = api.tensor_from
        {
            let mut tensor = DLTensor::NONE;
            // SAFETY: the object is of the type whose table this is, and the interpreter's lock is held.
            if unsafe { tensor_from(object.as_ptr().cast(), &mut tensor) } != 0 {
                return Err(PyErr::take(py).unwrap_or_else(|| PyTypeError::new_err("the tensor has no memory to show")));
            }
            return Seen::from_tensor(&tensor, false, Owner::Object);
        }
        // First the protocol that is told our stream, so that the producer orders its work in front of ours.
        if object.hasattr(intern!(py, "__dlpack__"))? {
            let (device_type, _): (i32, i32) = object.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
            let exported = dlpack_capsule(object, (device_type == dlpack::CUDA).then_some(stream.unwrap_or(0)));
            return match exported {
                Ok(capsule) => Seen::from_capsule(&capsule),
                // Types that the producer's library has no code for.
                Err(error) if device_type == dlpack::CPU => Seen::from_array_interface(object).and_then(|seen| seen.ok_or(error)),
                Err(error) => Seen::from_cuda_interface(object).and_then(|seen| seen.ok_or(error)),
            };
        }
        if let Some(seen) = Seen::from_cuda_interface(object)? {
            return Ok(seen);
        }
        match Seen::from_array_interface(object)? {
            Some(seen) => Ok(seen),
            None => {
                let kind = object.get_type().name()?;
                Err(PyTypeError::new_err(format!(
                    "`{kind}` is no tensor: it has neither `__dlpack__` nor `__cuda_array_interface__` nor `__array_interface__`"
                )))
            }
        }
    }

    fn from_tensor(tensor: &DLTensor, read_only: bool, owner: Owner) -> PyResult<Seen> {
        let place = Place::of(tensor.device).ok_or_else(|| {
            unfit(
                format_args!("a tensor on DLPack device type {}", tensor.device.device_type),
                "tensors are on the CPU or on a CUDA device",
            )
        })?;
        let code = tensor.dtype;
        let dtype = code.dtype().ok_or_else(|| {
            let what = format!("a tensor of DLPack type code {} with {} bits and {} lanes", code.code, code.bits, code.lanes);
            unfit(what, "elements are f64, f32, f16, bf16, e4m3, e5m2, i8, u8, i32, i64 or bool")
        })?;
        // SAFETY: the producer keeps both lists alive with the tensor.
        let layout = unsafe { layout_of(tensor.dims(), tensor.strides()) }?;
        Ok(Seen { address: tensor.address(), dtype, layout, place, read_only, behind: None, _owner: owner })
    }

    fn from_capsule(capsule: &Bound<'_, PyAny>) -> PyResult<Seen> {
        const VERSIONED: &CStr = c"dltensor_versioned";
        const UNVERSIONED: &CStr = c"dltensor";
        let capsule = capsule.cast::<PyCapsule>()?;
        let take = |name: &CStr, used: &CStr| -> PyResult<*mut std::ffi::c_void> {
            // SAFETY: the object is a capsule of that name; renaming it says that its tensor has a new owner.
            unsafe {
                let pointer = ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr());
                if pointer.is_null() || ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) != 0 {
                    return Err(PyErr::fetch(capsule.py()));
                }
                Ok(pointer)
            }
        };
        // SAFETY: the object is a capsule, and the names are C strings.
        let is = |name: &CStr| unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) } == 1;
        if is(VERSIONED) {
            let tensor: *mut DLManagedTensorVersioned = take(VERSIONED, c"used_dltensor_versioned")?.cast();
            let owner = Owner::Versioned(tensor);
            // SAFETY: a capsule of this name holds such a tensor, which lives until `owner` is dropped.
            let (version, flags, inner) = unsafe { ((*tensor).version, (*tensor).flags, (*tensor).dl_tensor) };
            if version.major != 1 {
                return Err(unfit(format_args!("a tensor of DLPack {}.{}", version.major, version.minor), "DLPack 0 and 1 are known"));
            }
            Seen::from_tensor(&inner, flags & dlpack::READ_ONLY != 0, owner)
        } else if is(UNVERSIONED) {
            let tensor: *mut DLManagedTensor = take(UNVERSIONED, c"used_dltensor")?.cast();
            let owner = Owner::Unversioned(tensor);
            // SAFETY: as above.
            let inner = unsafe { (*tensor).dl_tensor };
            Seen::from_tensor(&inner, false, owner)
        } else {
            Err(PyTypeError::new_err("`__dlpack__` gave a capsule that holds no tensor, or one whose tensor was taken already"))
        }
    }

    fn from_cuda_interface(object: &Bound<'_, PyAny>) -> PyResult<Option<Seen>> {
        let Some(interface) = object.getattr_opt(intern!(object.py(), "__cuda_array_interface__"))? else { return Ok(None) };
        let interface = &interface;
        let (address, read_only) = interface_data(interface)?;
        let dtype = interface_dtype(interface)?;
        let layout = interface_layout(interface, dtype)?;
        let behind = interface_stream(interface)?;
        // The protocol has no word for the device; the address does, where it is asked for.
        let place = Place::Cuda(crate::device::ordinal_of(address)?);
        Ok(Some(Seen { address, dtype, layout, place, read_only, behind, _owner: Owner::Object }))
    }

    fn from_array_interface(object: &Bound<'_, PyAny>) -> PyResult<Option<Seen>> {
        let py = object.py();
        let Some(interface) = object.getattr_opt(intern!(py, "__array_interface__"))? else { return Ok(None) };
        let (address, read_only) = interface_data(&interface)?;
        let name = object.getattr_opt(intern!(py, "dtype"))?.and_then(|dtype| dtype.getattr("name").ok());
        let name: Option<String> = name.and_then(|name| name.extract().ok());
        let dtype = match name.as_deref() {
            Some("bfloat16") => DType::Bf16,
            Some("float8_e4m3fn") => DType::E4m3,
            Some("float8_e5m2") => DType::E5m2,
            _ => interface_dtype(&interface)?,
        };
        let layout = interface_layout(&interface, dtype)?;
        Ok(Some(Seen { address, dtype, layout, place: Place::Cpu, read_only, behind: None, _owner: Owner::Object }))
    }

    /// Bytes from the first element to the last.
    pub(crate) fn span_bytes(&self) -> u64 {
        u64::try_from(self.layout.span_bytes(self.dtype)).unwrap_or(u64::MAX)
    }
}

/// The table of functions of the object's type, where it has one that we know.
pub(crate) fn exchange_api<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<&'py ExchangeApi>> {
    let py = object.py();
    let Some(capsule) = object.get_type().getattr_opt(intern!(py, "__dlpack_c_exchange_api__"))? else { return Ok(None) };
    // SAFETY: a capsule of that name holds such a table, which lives as long as the process; versions of one major share its head.
    let api = unsafe {
        let api: *const ExchangeApi = ffi::PyCapsule_GetPointer(capsule.as_ptr(), c"dlpack_exchange_api".as_ptr()).cast();
        if api.is_null() {
            ffi::PyErr_Clear();
            return Ok(None);
        }
        &*api
    };
    Ok((api.version.major == 1).then_some(api))
}

/// The capsule of `__dlpack__`, of the newest protocol that the producer has.
fn dlpack_capsule<'py>(object: &Bound<'py, PyAny>, stream: Option<u64>) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    let arguments = PyDict::new(py);
    if let Some(stream) = stream {
        // The protocol says 1 for the legacy default stream, which is null elsewhere.
        arguments.set_item("stream", stream.max(1))?;
    }
    let plain = arguments.copy()?;
    arguments.set_item("max_version", (1, 0))?;
    let method = object.getattr(intern!(py, "__dlpack__"))?;
    match method.call((), Some(&arguments)) {
        // Producers of the first protocol do not know the word.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => method.call((), Some(&plain)),
        capsule => capsule,
    }
}

fn interface_data(interface: &Bound<'_, PyAny>) -> PyResult<(u64, bool)> {
    let data = interface.get_item("data")?;
    if data.is_none() {
        return Err(unfit("an array interface without data", "the tensor's memory is what is needed"));
    }
    data.extract()
}

/// The stream of `__cuda_array_interface__` from version 3 on: `None` where the consumer need not wait.
fn interface_stream(interface: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    let stream = interface.cast::<PyDict>()?.get_item("stream")?.filter(|stream| !stream.is_none());
    let raw: Option<u64> = stream.map(|stream| stream.extract()).transpose()?;
    if raw == Some(0) {
        return Err(unfit("an array interface with the stream 0", "1 is the legacy default stream, 2 that of a thread, None no stream"));
    }
    Ok(raw)
}

/// A `CUstream` by one number: the legacy default stream is null, and has the name 1 besides.
pub(crate) fn one_name(raw: u64) -> u64 {
    if raw == 1 { 0 } else { raw }
}

fn interface_dtype(interface: &Bound<'_, PyAny>) -> PyResult<DType> {
    let text: String = interface.get_item("typestr")?.extract()?;
    Ok(match text.trim_start_matches(['<', '|', '=']) {
        "f4" => DType::F32,
        "f8" => DType::F64,
        "f2" => DType::F16,
        "i1" => DType::I8,
        "u1" => DType::U8,
        "i4" => DType::I32,
        "i8" => DType::I64,
        "b1" => DType::Bool,
        _ => {
            let rule = "elements are f8, f4, f2, i1, u1, i4, i8 or b1 here; bf16 and fp8 come by DLPack";
            return Err(unfit(format_args!("an array of type `{text}`"), rule));
        }
    })
}

fn interface_layout(interface: &Bound<'_, PyAny>, dtype: DType) -> PyResult<Layout> {
    let dims: Vec<i64> = interface.get_item("shape")?.extract()?;
    let strides = interface.cast::<PyDict>()?.get_item("strides")?.filter(|strides| !strides.is_none());
    let Some(strides) = strides else { return layout_of(&dims, None) };
    let bytes: Vec<i64> = strides.extract()?;
    let size = dtype.bytes() as i64;
    if bytes.iter().any(|stride| stride % size != 0) {
        return Err(unfit(format_args!("strides of {bytes:?} bytes"), "a stride is a multiple of the element's size"));
    }
    let strides: Vec<i64> = bytes.iter().map(|stride| stride / size).collect();
    layout_of(&dims, Some(&strides))
}
