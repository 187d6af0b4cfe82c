//! Functions of PyTorch's tensors: one native call each, with everything that the call needs found in it.
//!
//! A call is a function's number, its attributes as a short text, and up to eight tensors. Tensors are read through the table of functions that
//! PyTorch exports for DLPack ([`crate::dlpack::ExchangeApi`]), which tells address, type, dims, strides and the current stream in some
//! nanoseconds. All of it but the addresses is packed into a list of integers; the plan of equal integers is in a hash map, and beside it in a
//! short list of each thread's own ([`recent`]), which takes no lock. There are at most so many plans ([`plans::LIMIT`]). Only where there is none, the library draws the function's
//! graph ([`verdigris::recipe`], told by [`function`] what the attributes say) and plans it. Results and workspace come from PyTorch's
//! own allocator, on its current stream.

mod activation;
mod autocast;
mod function;
mod fused;
mod key;
mod labels;
mod plans;
mod recent;
mod torch;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString, PyTuple};

use verdigris::recipe::{Input, MAX_INPUTS, Recipe, Saved, draw_together};
use verdigris::{Binding, Workspace};
use verdigris_cuda::DeviceSlice;
use verdigris_graph::Uid;

use crate::device::{self, State};
use crate::dlpack::{self, DLTensor};
use crate::errors::{Kind, library, raise};
use crate::memory::{Place, binding, layout_of, unfit};
use crate::policy::{self, Policy};
use autocast::Autocast;
use function::Function;
use key::Key;
use labels::Labels;
use torch::{Hooks, hooks};

/// Most integers beside the attributes.
const MAX_EXTRA: usize = 8;
/// Most gradients that are computed together: those of a layer's input, filter and bias.
const MAX_GRADIENTS: usize = 3;
/// Most tensors that a call writes: those of a convolution with normalization, which are two results, two statistics, and two running ones.
const MAX_OUTPUTS: usize = 6;
/// Most tensors that are bound: where several gradients are computed together, each reads tensors of its own, some of them in the same memory.
const MAX_BINDINGS: usize = MAX_GRADIENTS * (MAX_INPUTS + 1);

/// Where a plan's tensor comes from.
#[derive(Clone, Copy, Debug)]
struct Source {
    uid: Uid,
    bytes: u64,
    is_written: bool,
    /// Its number among the tensors that are written, or that are read.
    place: usize,
}

/// A result of a call.
struct Output {
    /// The arguments of PyTorch's allocation.
    allocation: Py<PyTuple>,
    /// The tensor that is read whose place it takes: it is written there, and on the CPU, whose plans share no memory, copied there.
    in_place_of: Option<usize>,
}

/// A call's plan.
struct Entry {
    state: Arc<State>,
    plan: verdigris::Plan,
    /// For each of the plan's tensors, in its order.
    sources: Vec<Source>,
    outputs: Vec<Output>,
    /// The arguments of PyTorch's allocation of the workspace.
    workspace: Option<Py<PyTuple>>,
    /// Labels to be looked at, on the CPU.
    labels: Option<Labels>,
    /// When it was used last, as the map of plans counts.
    used: plans::Stamp,
}

/// The number of the policy of threads that have none of their own.
static DEFAULT_POLICY: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// This thread's own policy.
    static THREAD_POLICY: Cell<Option<u32>> = const { Cell::new(None) };
}

fn current() -> u32 {
    THREAD_POLICY.get().unwrap_or_else(|| DEFAULT_POLICY.load(Ordering::Relaxed))
}

type Inputs<'py> = [Option<Bound<'py, PyAny>>; MAX_INPUTS];

/// A call as it comes from Python: the tensors, the attributes, and the dims where the function has them.
struct Call<'a, 'py> {
    function: Function,
    attributes: &'a str,
    inputs: Inputs<'py>,
    /// How many of them the call has room for.
    places: usize,
    extra: [i64; MAX_EXTRA],
    extra_count: usize,
    policy: u32,
}

/// The attributes of a call, which it borrows.
fn attributes<'py>(number: u8, arguments: &Bound<'py, PyTuple>) -> PyResult<(Function, Bound<'py, PyString>)> {
    let function =
        Function::numbered(number).ok_or_else(|| raise(Kind::Unsupported, format!("there is no function of number {number}")))?;
    let (tensors, has_dims) = function.signature();
    let (given, needed) = (arguments.len(), tensors + 1 + usize::from(has_dims));
    // A gradient is called without the tensors that it has no use for.
    if given != needed && !(function == Function::Gradient && (3..needed).contains(&given)) {
        return Err(PyTypeError::new_err(format!("{} takes {needed} arguments, {given} are given", function.name())));
    }
    Ok((function, arguments.get_item(given - 1 - usize::from(has_dims))?.cast_into()?))
}

impl<'a, 'py> Call<'a, 'py> {
    fn new(function: Function, attributes: &'a str, arguments: &Bound<'py, PyTuple>, policy: Option<u32>) -> PyResult<Call<'a, 'py>> {
        let (_, has_dims) = function.signature();
        let places = arguments.len() - 1 - usize::from(has_dims);
        let mut inputs = [const { None }; MAX_INPUTS];
        for (place, input) in inputs.iter_mut().enumerate().take(places) {
            *input = Some(arguments.get_item(place)?).filter(|object| !object.is_none());
        }
        let mut extra = [0; MAX_EXTRA];
        let mut extra_count = 0;
        if has_dims {
            let given = arguments.get_item(places + 1)?;
            let is_empty = given.cast::<PyTuple>().is_ok_and(|given| given.is_empty());
            let values: Vec<i64> = if is_empty { Vec::new() } else { given.extract()? };
            let Some(room) = extra.get_mut(..values.len()) else {
                return Err(unfit(format_args!("{} dims behind the attributes", values.len()), "a function has at most 8"));
            };
            room.copy_from_slice(&values);
            extra_count = values.len();
        }
        Ok(Call { function, attributes, inputs, places, extra, extra_count, policy: policy.unwrap_or_else(current) })
    }

    fn extra(&self) -> &[i64] {
        &self.extra[..self.extra_count]
    }

    /// The arguments of the call, with its tensors in the places of those that came.
    fn with_inputs(&self, arguments: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyList>> {
        let list = arguments.to_list();
        for (place, input) in self.inputs.iter().enumerate().take(self.places) {
            if let Some(input) = input {
                list.set_item(place, input)?;
            }
        }
        Ok(list)
    }

    /// Whether the native half computes the call: tensors are plain ones outside of modes and transforms, and on a device that plans are made for. Of all
    /// others, those without data among them, the dispatcher knows what to do.
    fn is_native(&self, py: Python<'py>, hooks: &Hooks) -> PyResult<bool> {
        Ok(hooks.is_plain(py, &self.inputs)? && self.inputs.iter().flatten().next().map_or(Ok(true), |first| hooks.is_at_home(first))?)
    }

    /// What the tensors are.
    fn see(&self, hooks: &Hooks) -> PyResult<[DLTensor; MAX_INPUTS]> {
        let mut seen = [DLTensor::NONE; MAX_INPUTS];
        for (tensor, object) in seen.iter_mut().zip(&self.inputs).take(self.places) {
            if let Some(object) = object {
                *tensor = hooks.see(object)?;
            }
        }
        Ok(seen)
    }

    fn key(&self, seen: &[DLTensor; MAX_INPUTS]) -> PyResult<Key> {
        let mut key = Key::new(self.function as u8, self.policy, self.attributes, self.extra());
        for (object, tensor) in self.inputs.iter().zip(seen).take(self.places) {
            // SAFETY: the objects live as long as the call, and their lists with them; nobody changes them while the interpreter's lock is held.
            unsafe { key.tensor(object.is_some(), tensor) };
        }
        key.finish().ok_or_else(|| unfit("a call with very long attributes", "attributes are at most some hundred characters"))
    }

    /// The plan of this call, made now if there is none.
    fn entry(&self, py: Python<'py>, hooks: &Hooks, seen: &[DLTensor; MAX_INPUTS]) -> PyResult<Arc<Entry>> {
        let key = self.key(seen)?;
        let found = recent::find(&key).or_else(|| {
            let entry = plans::find(&key)?;
            recent::keep(&key, &entry);
            Some(entry)
        });
        match found {
            Some(entry) => {
                entry.used.now();
                Ok(entry)
            }
            None => self.make(py, hooks, seen, &key),
        }
    }

    #[cold]
    fn make(&self, py: Python<'py>, hooks: &Hooks, seen: &[DLTensor; MAX_INPUTS], key: &Key) -> PyResult<Arc<Entry>> {
        let mut inputs: [Option<Input>; MAX_INPUTS] = [None; MAX_INPUTS];
        let mut place: Option<Place> = None;
        for ((input, object), tensor) in inputs.iter_mut().zip(&self.inputs).zip(seen) {
            if object.is_none() {
                continue;
            }
            let here = Place::of(tensor.device)
                .ok_or_else(|| unfit("a tensor of another kind of device", "tensors are on the CPU or on a CUDA device"))?;
            if let Some(other) = place.filter(|other| *other != here) {
                return Err(unfit(format_args!("tensors on {other} and on {here}"), "all tensors of a call are on one device"));
            }
            place = Some(here);
            let dtype = tensor.dtype.dtype().ok_or_else(|| {
                let what = format!("a tensor of DLPack type code {} with {} bits", tensor.dtype.code, tensor.dtype.bits);
                unfit(what, "elements are f64, f32, f16, bf16, e4m3, e5m2, i8, u8, i32, i64 or bool")
            })?;
            // SAFETY: as in `key`.
            let layout = unsafe { layout_of(tensor.dims(), tensor.strides()) }?;
            let alignment_bytes = match here {
                Place::Cpu => None,
                Place::Cuda(_) => key::declared_alignment_bytes(tensor.address()),
            };
            *input = Some(Input { dtype, layout, alignment_bytes });
        }
        let place = place.ok_or_else(|| unfit("a call without tensors", "a function reads at least one"))?;
        let policy = policy::numbered(self.policy);
        let functions = self.function.told(self.attributes, &inputs, self.extra(), &policy)?;
        let Recipe { graph, inputs: uids, results } = draw_together(&functions, &inputs).map_err(library)?;
        let capturing = hooks.is_capturing(py, place)?;
        // Measuring runs candidates and waits for them, which a capture does not allow.
        let policy = if capturing { policy.unmeasured().unwrap_or(policy) } else { policy };
        let library_policy = policy.library();
        let (state, plan) = py
            .detach(|| {
                let state = device::at(place)?;
                // Loading kernels and their constants goes over a stream of the library's own; a capture elsewhere need not mind.
                let relaxed = state.handle().map(|handle| handle.context().relax_capture()).transpose()?;
                let plan = state.device.plan_under(&graph, &library_policy, &mut |_| {});
                drop(relaxed);
                plan.map(|plan| (state, plan))
            })
            .map_err(library)?;
        let labels = functions.first().filter(|_| place == Place::Cpu).and_then(|function| Labels::of(function, &inputs));
        let mut sources = Vec::with_capacity(plan.bound().len());
        for (tensor, desc) in plan.bound().iter().zip(plan.tensors()) {
            let input = uids.iter().find(|(known, _)| *known == tensor.uid).map(|&(_, place)| place);
            let Some(place) = input.or_else(|| results.iter().position(|result| result.uid == tensor.uid)) else {
                return Err(raise(Kind::Graph, format!("tensor `{}` of the call's graph is nobody's", tensor.name)));
            };
            // What the tensors have, whatever the plan needs.
            let bytes = u64::try_from(desc.layout.span_bytes(desc.dtype)).unwrap_or(u64::MAX);
            sources.push(Source { uid: tensor.uid, bytes, is_written: input.is_none(), place });
        }
        if sources.len() > MAX_BINDINGS || results.len() > MAX_OUTPUTS {
            let what = format!("a call of {} tensors, {} of them results", sources.len(), results.len());
            return Err(unfit(what, "a call binds at most 27 tensors and has at most 5 results"));
        }
        let workspace_bytes = plan.workspace_bytes();
        let entry = Arc::new(Entry {
            outputs: results
                .iter()
                .map(|result| {
                    let allocation = hooks.allocation(py, result.layout.dims(), result.layout.strides(), result.dtype)?;
                    Ok(Output { allocation, in_place_of: result.in_place_of })
                })
                .collect::<PyResult<_>>()?,
            workspace: (workspace_bytes > 0)
                .then(|| hooks.allocation(py, &[workspace_bytes], &[1], verdigris_tensor::DType::U8))
                .transpose()?,
            state,
            plan,
            sources,
            labels,
            used: plans::Stamp::default(),
        });
        if !(capturing && policy::numbered(self.policy).unmeasured().is_some()) {
            plans::keep(key, &entry);
        }
        Ok(entry)
    }

    /// As `run`, seen by PyTorch's profiler: the way of those that the dispatcher, which tells it of its own calls, was not asked for.
    #[inline]
    fn run_in_range(&self, py: Python<'py>, hooks: &Hooks) -> PyResult<Py<PyAny>> {
        hooks.in_range(py, self.function.name(), &self.inputs, || self.run(py, hooks))
    }

    /// Computes.
    fn run(&self, py: Python<'py>, hooks: &Hooks) -> PyResult<Py<PyAny>> {
        let seen = self.see(hooks)?;
        // SAFETY: the objects live as long as the call, and their lists with them; nobody changes them while the interpreter's lock is held.
        if seen.iter().any(|tensor| unsafe { torch::may_be_negated(tensor) }) {
            let mut inputs = self.inputs.clone();
            if hooks.resolve_negated(&mut inputs)? {
                let own = Call { inputs, ..*self };
                return own.run_seen(py, hooks, &own.see(hooks)?);
            }
        }
        self.run_seen(py, hooks, &seen)
    }

    /// Computes, of tensors that were looked at.
    fn run_seen(&self, py: Python<'py>, hooks: &Hooks, seen: &[DLTensor; MAX_INPUTS]) -> PyResult<Py<PyAny>> {
        let entry = self.entry(py, hooks, seen)?;
        let place = entry.state.place;
        if let Some(labels) = &entry.labels {
            // SAFETY: the plan is that of a call on the CPU with such tensors, which the caller holds.
            unsafe { labels.check(seen) }?;
        }
        let mut results: [Option<Bound<'py, PyAny>>; MAX_OUTPUTS] = [const { None }; MAX_OUTPUTS];
        let mut addresses = [0_u64; MAX_OUTPUTS];
        for ((result, address), output) in results.iter_mut().zip(&mut addresses).zip(&entry.outputs) {
            if let (Some(input), Place::Cuda(_)) = (output.in_place_of, place) {
                *address = seen[input].address();
                continue;
            }
            let tensor = hooks.allocate(py, place, &output.allocation)?;
            *address = hooks.see(&tensor)?.address();
            *result = Some(tensor);
        }
        let mut bindings = [const { (Uid(0), Binding::Scalar(0.0)) }; MAX_BINDINGS];
        for (slot, &Source { uid, bytes, is_written, place: number }) in bindings.iter_mut().zip(&entry.sources) {
            let address = if is_written { addresses[number] } else { seen[number].address() };
            // SAFETY: the tensors are PyTorch's, of the types, dims and strides that the plan was made for, and held by the caller and
            // `results`; the results are new, so that nobody shares them, or of a GPU and in the place of a tensor of the same elements, which the plan
            // allows or refuses. PyTorch's allocator hands memory out in the order of its current stream, so that what is freed here is used
            // again after this work.
            *slot = (uid, unsafe { binding(place, address, bytes, is_written) });
        }
        let bindings = &mut bindings[..entry.sources.len()];
        let (stream, lent) = match place {
            Place::Cpu => (None, None),
            Place::Cuda(_) => {
                let stream = entry.state.stream(hooks.current_stream(py, place)?);
                (stream, entry.workspace.as_ref().map(|arguments| hooks.allocate(py, place, arguments)).transpose()?)
            }
        };
        let address = lent.as_ref().map_or(Ok(0), |tensor| Ok::<u64, PyErr>(hooks.see(tensor)?.address()))?;
        // SAFETY: as above.
        let workspace = unsafe { DeviceSlice::from_raw(address, entry.plan.workspace_bytes()) };
        py.detach(|| entry.plan.run(bindings, stream.as_ref(), Workspace::Lent(workspace))).map_err(library)?;
        for (result, output) in results.iter_mut().zip(&entry.outputs) {
            let Some(input) = output.in_place_of else { continue };
            if let (Some(next), Some(held)) = (result.take(), &self.inputs[input]) {
                held.call_method1("copy_", (next,))?;
            }
        }
        let [first, second, others @ ..] = results;
        match (first, second) {
            (Some(only), None) => Ok(only.unbind()),
            (Some(first), Some(second)) => {
                let all: Vec<_> = [first, second].into_iter().chain(others.into_iter().flatten()).collect();
                Ok(PyTuple::new(py, all)?.into_any().unbind())
            }
            (None, _) => Ok(py.None()),
        }
    }
}

/// The function's result where all tensors are plain ones and no mode or transform is on: else `NotImplemented`, and the dispatcher has to be
/// asked. The arguments are the operator's. Where a gradient is wanted, `None`; a list of them where autocast has cast some: what the differentiable
/// call takes, which casts parameters itself where the function says so ([`differentiated`]).
#[pyfunction]
#[pyo3(signature = (function, *arguments))]
fn eager<'py>(py: Python<'py>, function: u8, arguments: &Bound<'py, PyTuple>) -> PyResult<Py<PyAny>> {
    let hooks = hooks(py)?;
    let (function, text) = attributes(function, arguments)?;
    let mut call = Call::new(function, text.to_str()?, arguments, None)?;
    if !call.is_native(py, hooks)? {
        return Ok(py.NotImplemented());
    }
    let wants_gradient = hooks.wants_gradient(py, &call.inputs)?;
    let cast = match function.autocast() {
        Some(kind) => hooks.cast(py, &mut call.inputs, kind, wants_gradient && function.casts_parameters())?,
        None => 0,
    };
    if !wants_gradient {
        return call.run_in_range(py, hooks);
    }
    if cast == 0 {
        return Ok(py.None());
    }
    Ok(call.with_inputs(arguments)?.into_any().unbind())
}

/// A differentiable call's forward half, where gradients are not recorded: the result, the arguments that it was computed from, and of those that autocast
/// has cast, which are parameters, the types that they had, as attributes of their gradients (` as1=f32`; empty where nothing was cast).
#[pyfunction]
#[pyo3(signature = (function, *arguments))]
fn differentiated<'py>(py: Python<'py>, function: u8, arguments: &Bound<'py, PyTuple>) -> PyResult<Py<PyAny>> {
    let hooks = hooks(py)?;
    let (function, text) = attributes(function, arguments)?;
    let mut call = Call::new(function, text.to_str()?, arguments, None)?;
    let cast = match function.autocast() {
        Some(kind) if function.casts_parameters() => hooks.cast(py, &mut call.inputs, kind, false)?,
        _ => 0,
    };
    let output = call.run_in_range(py, hooks)?;
    if cast == 0 {
        return Ok((output, arguments, intern!(py, "")).into_pyobject(py)?.into_any().unbind());
    }
    let mut types = String::new();
    for place in (0..call.places).filter(|place| cast & (1 << place) != 0) {
        let given = hooks.see(&arguments.get_item(place)?)?.dtype.dtype();
        // What is cast is a floating-point tensor of PyTorch.
        types += &given.map(|given| format!(" as{place}={given}")).unwrap_or_default();
    }
    Ok((output, call.with_inputs(arguments)?, types).into_pyobject(py)?.into_any().unbind())
}

/// As `eager` where autocast has had its word: nothing is cast, and `None` wherever a gradient is wanted.
#[pyfunction]
#[pyo3(signature = (function, *arguments))]
fn eager_past_autocast<'py>(py: Python<'py>, function: u8, arguments: &Bound<'py, PyTuple>) -> PyResult<Py<PyAny>> {
    let hooks = hooks(py)?;
    let (function, text) = attributes(function, arguments)?;
    let call = Call::new(function, text.to_str()?, arguments, None)?;
    if !call.is_native(py, hooks)? {
        return Ok(py.NotImplemented());
    }
    if hooks.wants_gradient(py, &call.inputs)? {
        return Ok(py.None());
    }
    call.run_in_range(py, hooks)
}

/// As `eager`, whether a gradient is wanted or not, and under autocast too: what the halves of a gradient call. `policy` is the number of one;
/// `None` is the thread's.
#[pyfunction]
#[pyo3(signature = (function, policy, *arguments))]
fn plain<'py>(py: Python<'py>, function: u8, policy: Option<u32>, arguments: &Bound<'py, PyTuple>) -> PyResult<Py<PyAny>> {
    let hooks = hooks(py)?;
    let (function, text) = attributes(function, arguments)?;
    let call = Call::new(function, text.to_str()?, arguments, policy)?;
    if !call.is_native(py, hooks)? {
        return Ok(py.NotImplemented());
    }
    call.run_in_range(py, hooks)
}

/// The function's result, without a question: the dispatcher's kernel, and what follows a question.
#[pyfunction]
#[pyo3(signature = (function, *arguments))]
fn run<'py>(py: Python<'py>, function: u8, arguments: &Bound<'py, PyTuple>) -> PyResult<Py<PyAny>> {
    let (function, text) = attributes(function, arguments)?;
    Call::new(function, text.to_str()?, arguments, None)?.run(py, hooks(py)?)
}

/// The same, seen by PyTorch's profiler: for generated code, which calls kernels without the dispatcher.
#[pyfunction]
#[pyo3(signature = (function, *arguments))]
fn run_in_range<'py>(py: Python<'py>, function: u8, arguments: &Bound<'py, PyTuple>) -> PyResult<Py<PyAny>> {
    let (function, text) = attributes(function, arguments)?;
    Call::new(function, text.to_str()?, arguments, None)?.run_in_range(py, hooks(py)?)
}

/// How the plan of such a call was chosen, as text; the plan is made if there is none.
#[pyfunction]
#[pyo3(signature = (function, *arguments))]
fn explain_call<'py>(py: Python<'py>, function: u8, arguments: &Bound<'py, PyTuple>) -> PyResult<String> {
    let hooks = hooks(py)?;
    let (function, text) = attributes(function, arguments)?;
    let call = Call::new(function, text.to_str()?, arguments, None)?;
    let entry = call.entry(py, hooks, &call.see(hooks)?)?;
    Ok(entry.plan.to_string())
}

/// The functions by the numbers that call them: name, most tensors read, what their gradients are computed from (tensors read by their
/// places, results by the places behind those), and what autocast makes of them (`lower`, `float32` or nothing).
#[pyfunction]
fn functions(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    let functions = Function::ALL.iter().map(|function| {
        let (tensors, _) = function.signature();
        let place = |saved: &Saved| match *saved {
            Saved::Tensor(place) => place,
            Saved::Result(number) => tensors + number,
        };
        let saves = function.saves().iter().map(place).collect::<Vec<usize>>();
        (function.name(), tensors, saves, function.autocast().map(Autocast::name))
    });
    PyList::new(py, functions)
}

/// How many plans of calls there are.
#[pyfunction]
fn plan_count() -> usize {
    plans::count()
}

/// Forgets all plans of calls. Calls that run keep theirs.
#[pyfunction]
fn clear_plans() {
    plans::clear();
}

/// The number under which calls name a policy.
#[pyfunction]
fn policy_number(policy: &Policy) -> u32 {
    policy::number(policy)
}

/// The policy of a number.
#[pyfunction]
fn numbered_policy(number: u32) -> Policy {
    policy::numbered(number)
}

/// The number of this thread's policy.
#[pyfunction]
fn current_policy() -> u32 {
    current()
}

/// Sets the policy of threads that have none of their own.
#[pyfunction]
fn set_default_policy(number: u32) {
    DEFAULT_POLICY.store(number, Ordering::Relaxed);
}

/// Sets this thread's own policy, or takes it away; gives back the one before.
#[pyfunction]
#[pyo3(signature = (number))]
fn exchange_thread_policy(number: Option<u32>) -> Option<u32> {
    THREAD_POLICY.replace(number)
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // Number 0 is the default.
    policy::number(&Policy::default());
    module.add("CUDA_DEVICE_TYPE", dlpack::CUDA)?;
    module.add("CALL_PLANS", plans::LIMIT)?;
    module.add_function(wrap_pyfunction!(eager, module)?)?;
    module.add_function(wrap_pyfunction!(eager_past_autocast, module)?)?;
    module.add_function(wrap_pyfunction!(differentiated, module)?)?;
    module.add_function(wrap_pyfunction!(plain, module)?)?;
    module.add_function(wrap_pyfunction!(run, module)?)?;
    module.add_function(wrap_pyfunction!(run_in_range, module)?)?;
    module.add_function(wrap_pyfunction!(explain_call, module)?)?;
    module.add_function(wrap_pyfunction!(functions, module)?)?;
    module.add_function(wrap_pyfunction!(fused::parts_of_call, module)?)?;
    module.add_function(wrap_pyfunction!(plan_count, module)?)?;
    module.add_function(wrap_pyfunction!(clear_plans, module)?)?;
    module.add_function(wrap_pyfunction!(policy_number, module)?)?;
    module.add_function(wrap_pyfunction!(numbered_policy, module)?)?;
    module.add_function(wrap_pyfunction!(current_policy, module)?)?;
    module.add_function(wrap_pyfunction!(set_default_policy, module)?)?;
    module.add_function(wrap_pyfunction!(exchange_thread_policy, module)?)?;
    module.add_function(wrap_pyfunction!(torch::hook_torch, module)?)
}
