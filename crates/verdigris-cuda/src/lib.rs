//! Programs onto the GPU: the only room that knows the driver.
//!
//! Start with [`Driver::load`], which fails with a typed error where there is no NVIDIA driver; everything else is made from
//! it. Nothing here keeps global state, writes to the outside, or reads the environment. It builds and starts on any machine.
//!
//! Features `cuda-12060` to `cuda-13040` choose the version of the driver's declarations that is compiled against (default
//! `cuda-13000`); the driver that is found may be older or newer. Exactly one may be on in a build, so an application that already
//! depends on `cudarc` with another one turns the default off.
//!
//! - [`Driver`] → [`Device`] → [`Context`] (its own or the caller's) → [`Stream`] (likewise), [`Event`], [`Graph`]
//! - [`Pool`] → [`DeviceBuffer`] → [`DeviceSlice`]; memory of the host that others own: [`HostSlice`]
//! - PTX → [`Module`] → [`Function`], remembered by a [`ModuleCache`] in memory and on disk, or made beforehand in a [`Pack`]
//! - [`Loader`]: a [`Program`](verdigris_kir::program::Program) → [`LoadedProgram`]
//! - [`tensor_map::encode`] → [`TensorMap`]
//! - [`peers`]: the vendor's matrix library, loaded at run time, for comparison only

pub mod cache;
mod clusters;
mod device;
mod driver;
mod entry;
mod error;
pub mod exec;
mod facts;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
pub mod host;
mod jit;
mod kernels;
pub mod launch;
mod memory;
mod module;
pub mod nvtx;
mod pack;
pub mod peers;
mod release;
mod stream;
pub mod tensor_map;
#[cfg(test)]
mod tests;
pub mod trust;

pub use cache::{CacheError, CacheKey, DamagedEntry, DiskCache, Lookup};
pub use device::{Clocks, Context, ContextGuard, Device, DeviceProperties};
pub use driver::{DRIVER_LIBRARIES, Driver};
pub use entry::{Code, Entry};
pub use error::{Error, MINIMUM_DRIVER_VERSION};
pub use exec::{Bindings, LoadedProgram, Loader, SlotNeed};
pub use facts::{KernelFacts, Parameter, ParameterFact};
pub use host::HostSlice;
pub use jit::{CompileOptions, Cubin, JitFinding, JitReport, compile, has_register_budgets};
pub use kernels::{KernelSource, LoadReport, LoadedKernel, ModuleCache, Origin};
pub use launch::{LaunchConfig, LaunchError, Parameters};
pub use memory::{DeviceBuffer, DeviceSlice, HostBuffer, Pool, PoolOptions, PoolStatistics};
pub use module::{Function, FunctionAttributes, FunctionOptions, Module};
pub use pack::{Pack, PackError, PackHead};
pub use release::release;
pub use stream::{CaptureStatus, Event, Graph, GraphExecutable, RelaxedCapture, Stream};
pub use tensor_map::{MapError, TensorMap};
