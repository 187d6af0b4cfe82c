//! Deep-learning primitives for NVIDIA GPUs: choose, remember, run, explain.
//!
//! A [`Handle`] is a GPU with the kernels loaded on it. [`Handle::plan`] asks every engine about a problem, chooses one
//! ([`select`] is the whole of that choice, on one page; [`explain`] prints it) and loads its program; [`ProblemPlan::execute`] submits
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
//!
//! [`Handle::plan_graph`] does so for a whole [`Graph`](verdigris_graph::Graph) under a [`Policy`]: it is cut into problems, each gets its
//! way by estimate, by the clock or by name ([`Mode`]), tensors between them lie in one workspace, and [`GraphPlan::explain`] tells why.
//! Measured choices are remembered ([`plan_cache`]). [`Device`] is one face for the GPU and the CPU: the [`Plan`] that it makes of a graph
//! runs on memory, workspace and stream that others own, or on its own [`Tensor`]s. [`functional`] serves those who do not want to draw
//! graphs.
//!
//! ```no_run
//! use verdigris::{Binding, Config, Handle, Mode, Policy, Tuning};
//! use verdigris_graph::{BinaryOp, GraphBuilder, Precision};
//! use verdigris_tensor::{DType, Layout};
//!
//! let mut g = GraphBuilder::new("linear");
//! let x = g.tensor("x", DType::Bf16, Layout::row_major(&[512, 1024])?);
//! let w = g.tensor("w", DType::Bf16, Layout::row_major(&[1024, 256])?);
//! let bias = g.tensor("bias", DType::Bf16, Layout::row_major(&[256])?);
//! let y = g.matmul("product", x, w, Precision::Fp32)?;
//! let y = g.binary("bias", BinaryOp::Add, y, bias)?;
//! g.store(y, "y", DType::Bf16)?;
//! let graph = g.finish()?;
//!
//! let handle = Handle::open(&Config::from_environment()?)?;
//! let plan = handle.plan_graph(&graph, &Policy { mode: Mode::Measured(Tuning::default()), ..Policy::default() })?;
//! print!("{}", plan.explain());
//! let buffers: Vec<_> = plan.tensors().iter().map(|t| handle.pool().alloc(handle.stream(), t.bytes)).collect::<Result<_, _>>()?;
//! let bindings: Vec<_> = plan.tensors().iter().zip(&buffers).map(|(t, buffer)| (t.uid, Binding::Buffer(buffer.slice()))).collect();
//! plan.execute_from(handle.stream(), &bindings, handle.pool())?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod binding;
mod choose;
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
pub mod problem_plan;
pub mod recipe;
pub mod select;
pub mod tune;
pub mod workspace;

pub use binding::Binding;
pub use config::Config;
pub use device::{Device, Tensor};
pub use error::Error;
pub use explain::Explanation;
pub use graph_plan::{GraphPlan, Timed};
pub use handle::{Chosen, Handle, KernelCounts};
pub use plan::{Plan, Workspace};
pub use plan_cache::PlanCache;
pub use planning::{Progress, Stage};
pub use policy::{Mode, Pin, Policy, Tuning};
pub use problem_plan::ProblemPlan;
pub use select::{Limits, Ranked, Settings, Survey, survey};
pub use verdigris_graph::binding::BoundTensor;
pub use workspace::WorkspaceSource;
