//! The device that is there when no GPU is.
//!
//! [`GraphPlan::new`] checks a graph and plans it; [`GraphPlan::run`] computes it from [`Bindings`], over all threads of the rayon pool
//! it is called in. Every graph that is valid runs. Results lie within the tolerance of the reference, and they are the same, bit for
//! bit, for any number of threads: how sums are cut and in which order they are joined depends on the problem alone.
//!
//! ```
//! use verdigris_cpu::{Bindings, GraphPlan};
//! use verdigris_graph::{GraphBuilder, UnaryOp};
//! use verdigris_tensor::{DType, Layout};
//!
//! let mut g = GraphBuilder::new("relu");
//! let x = g.tensor("x", DType::F32, Layout::row_major(&[2])?);
//! let y = g.unary("relu", UnaryOp::Relu, x)?;
//! g.store(y, "y", DType::F32)?;
//! let plan = GraphPlan::new(&g.finish()?)?;
//! let input: Vec<u8> = [-1.0f32, 2.0].iter().flat_map(|v| v.to_le_bytes()).collect();
//! let mut output = [0u8; 8];
//! let report = plan.run(Bindings::new().input(x, &input).output(y, &mut output))?;
//! assert_eq!(output[4..], 2.0f32.to_le_bytes());
//! assert_eq!(report.steps[0].engine.id(), "cpu.pointwise");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod append;
mod attention;
mod batch_norm;
mod bindings;
mod contraction;
mod conv;
mod elements;
mod engine;
mod error;
mod functions;
mod gemm;
mod graph_plan;
mod movement;
mod norm;
mod operation;
mod philox;
mod pointwise;
mod pool;
mod real;
mod reduction;
mod resample;
mod scan;
mod scratch;
mod softmax;

pub use bindings::Bindings;
pub use engine::Engine;
pub use error::Error;
pub use graph_plan::{GraphPlan, RunReport, StepReport};
