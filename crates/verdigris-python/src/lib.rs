//! The Python package's native half: `verdigris._native`.
//!
//! It translates and does not think. Graphs are built by [`graph`], planned on a [`device`] under a [`policy`], and run as [`plan`]s on
//! memory that others own ([`memory`]: DLPack, `__cuda_array_interface__`). [`call`] is the way of PyTorch's operators: a function of tensors
//! whose plan is found by the integers that describe them. [`telemetry`] starts exporters. The Python half, `python/verdigris`, is thin and holds what Python says better.

mod call;
mod device;
mod dlpack;
mod errors;
mod graph;
mod memory;
mod operands;
mod plan;
mod policy;
mod spatial;
mod telemetry;

use pyo3::prelude::*;

/// The native half of the package `verdigris`; use the package.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("SOURCE_HASH", verdigris_engines::SOURCE_HASH)?;
    module.add("BUILD_HASH", env!("VERDIGRIS_BUILD_HASH"))?;
    module.add_class::<device::Device>()?;
    module.add_class::<graph::Graph>()?;
    module.add_class::<operands::Uid>()?;
    module.add_class::<plan::Plan>()?;
    module.add_class::<policy::Policy>()?;
    module.add_function(wrap_pyfunction!(device::device_count, module)?)?;
    module.add_function(wrap_pyfunction!(device::set_pack_folder, module)?)?;
    telemetry::register(module)?;
    call::register(module)
}
