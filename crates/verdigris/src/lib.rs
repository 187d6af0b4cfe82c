//! Deep-learning primitives for NVIDIA GPUs: choose, remember, run, explain.
//!
//! A [`Handle`] is a device with the kernels loaded on it. [`Handle::plan`] asks every engine about a problem, chooses one
//! ([`select`] is the whole of that choice, on one page; [`explain`] prints it) and makes its program ready; [`Plan::execute`] submits
//! it to a stream, from any thread, as often as one likes.
//!
//! ```no_run
//! use verdigris::{Binding, Config, Handle, Limits};
//! use verdigris_graph::{GemmProblem, Problem};
//! use verdigris_tensor::DType;
//!
//! let handle = Handle::open(&Config::from_environment()?)?;
//! let problem = Problem::Gemm(GemmProblem::packed(1024, 1024, 1024, DType::Bf16, DType::Bf16)?);
//! let plan = handle.plan(&problem, &Limits::default())?;
//! let buffer = || handle.pool().alloc(handle.stream(), 1024 * 1024 * 2);
//! let (a, b, d) = (buffer()?, buffer()?, buffer()?);
//! let workspace = handle.pool().alloc(handle.stream(), plan.workspace_bytes())?;
//! plan.execute(handle.stream(), &[&a, &b, &d].map(|buffer| Binding::Buffer(buffer.slice())), workspace.slice())?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

pub mod config;
pub mod device;
pub mod error;
pub mod explain;
pub mod functional;
pub mod graph_plan;
pub mod handle;
pub mod loss_scale;
pub mod plan;
pub mod plan_cache;
mod planning;
pub mod policy;
pub mod select;
pub mod tune;
pub mod workspace;

pub use config::Config;
pub use device::{Device, Ready, Tensor};
pub use error::Error;
pub use explain::Explanation;
pub use graph_plan::{BoundTensor, GraphPlan};
pub use handle::Handle;
pub use plan::{Binding, Plan};
pub use plan_cache::PlanCache;
pub use planning::{Progress, Stage};
pub use policy::{Mode, Pin, Policy, Tuning};
pub use select::{Limits, Ranked, Settings, Survey, survey};
pub use workspace::WorkspaceSource;
