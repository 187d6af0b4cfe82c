//! Deep-learning primitives for NVIDIA GPUs: choose, remember, run, explain.
//!
//! This is the one crate to depend on. A [`Graph`] of ops is built with [`GraphBuilder`]; a [`Device`] (a GPU, or the CPU) makes a [`Plan`] of
//! it, in which ops are fused and each part has an engine; the plan runs on [`Tensor`]s, or on memory, workspace and stream that others own.
//!
//! ```
//! use verdigris::{BinaryOp, DType, Device, GraphBuilder, Layout, Precision, Tensor, UnaryOp};
//!
//! let mut g = GraphBuilder::new("linear");
//! let x = g.tensor("x", DType::F32, Layout::row_major(&[2, 3])?);
//! let w = g.tensor("w", DType::F32, Layout::row_major(&[3, 2])?);
//! let bias = g.tensor("bias", DType::F32, Layout::row_major(&[1, 2])?);
//! let product = g.matmul("product", x, w, Precision::Fp32)?;
//! let sum = g.binary("add bias", BinaryOp::Add, product, bias)?;
//! let y = g.unary("relu", UnaryOp::Relu, sum)?;
//! g.store(y, "y", DType::F32)?;
//!
//! let device = Device::cpu(); // or Device::open("cuda:0", …)
//! let plan = device.plan(&g.finish()?)?;
//! let x_values = Tensor::from_values(&device, DType::F32, &[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])?;
//! let w_values = Tensor::from_values(&device, DType::F32, &[3, 2], &[1.0, 0.0, 0.0, 1.0, 1.0, -1.0])?;
//! let b_values = Tensor::from_values(&device, DType::F32, &[1, 2], &[0.5, 0.5])?;
//! let outputs = device.run(&plan, &[(x, &x_values), (w, &w_values), (bias, &b_values)], &[])?;
//! assert_eq!(outputs[0].to_values()?, [4.5, 0.0, 10.5, 0.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Without any device, engines tell which of them take a problem on a chip that is described, and how ([`survey`]):
//!
//! ```
//! use verdigris::select::{RankedSummary, survey_of};
//! use verdigris::{Arch, DType, GemmProblem, Limits, Problem, Ranked, Settings, Survey, engines, survey};
//!
//! let problem = Problem::Gemm(GemmProblem::packed(512, 512, 512, DType::Bf16, DType::Bf16)?);
//! let limits = Limits { settings: Settings::All, workspace_bytes: Some(0), ..Limits::default() };
//! let Survey { ranked, .. } = survey(&problem, &Arch::h200(), &limits);
//! let best: &Ranked = &ranked[0];
//! assert!(best.notes.tensor_core && best.workspace_bytes() == 0);
//! assert!(ranked.iter().all(|way| way.cost.us >= best.cost.us));
//! assert_eq!(RankedSummary::from(best).engine, best.engine.name);
//! // One engine alone.
//! let simt = survey_of(engines::engine("gemm.simt"), &problem, &Arch::h200(), &Limits::default());
//! assert!(simt.ranked.len() == 1 && simt.ranked[0].cost.us > best.cost.us);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Deeper
//!
//! A [`Handle`] is a GPU with the kernels loaded on it. [`Handle::plan`] asks every engine about one [`Problem`], chooses one ([`select`] is
//! the whole of that choice, on one page; [`explain`] prints it) and loads its program; [`ProblemPlan::execute`] submits it to a stream, from
//! any thread, as often as one likes.
//!
//! ```no_run
//! use verdigris::{Binding, Config, DType, GemmProblem, Handle, Limits, Problem};
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
//! [`Handle::plan_graph`] does so for a whole graph under a [`Policy`]: it is cut into problems, each gets its way by estimate, by the clock
//! or by name ([`Mode`]), tensors between them lie in one workspace, and [`GraphPlan::explain`] tells why. Measured choices are remembered
//! ([`plan_cache`]). [`functional`] serves those who do not want to draw graphs.
//!
//! # Where names come from
//!
//! What users of the library touch is re-exported here. [`graph`] (ops, JSON, gradients, the cutting into problems), [`tensor`] (element
//! types, layouts, conversions), [`engines`] (who answers) and [`cuda`] (devices, streams, memory) are the crates below, whole.
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
pub mod observe;
pub mod plan;
pub mod plan_cache;
mod planning;
pub mod policy;
pub mod problem_plan;
pub mod recipe;
pub mod select;
pub mod tune;
pub mod whole_files;
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
pub use workspace::WorkspaceSource;

#[doc(no_inline)]
pub use verdigris_cuda as cuda;
#[doc(no_inline)]
pub use verdigris_engines as engines;
#[doc(no_inline)]
pub use verdigris_graph as graph;
#[doc(no_inline)]
pub use verdigris_tensor as tensor;

pub use verdigris_cuda::{Context, DeviceBuffer, DeviceSlice, Driver, Event, HostSlice, Pool, Stream};
pub use verdigris_engines::arch::Arch;
pub use verdigris_engines::engine::{EngineId, Knobs, Notes, Reason, Refusal};
pub use verdigris_graph::binding::BoundTensor;
pub use verdigris_graph::{
    Attended, Attention, AttentionBackward, AttentionGradients, AttentionSpec, BatchNorm, BatchNormBackward, BatchNormed, BinaryOp, Border,
    Causal, Conv, ConvDirection, ConvMode, ConvProblem, CrossEntropyBackward, CrossEntropySpec, Determinism, Direction,
    Error as GraphError, Filter, GemmProblem, Graph, GraphBuilder, HostScalar, Key, LossReduction, Matmul, Moments, Node, NormGradients,
    NormKind, NormSpec, Normalize, NormalizeBackward, Op, OperandScale, PoolBackward, PoolMode, PoolWindows, Precision, Problem, Real,
    ReductionOp, Sampling, TensorDesc, TernaryOp, Uid, UnaryOp,
};
pub use verdigris_kir::execution::HostValue;
pub use verdigris_tensor::{BindingError, BindingRule, DType, Layout, LayoutError};

/// The lines of Rust in the README, as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
pub struct Readme;
