//! Convolution in its three directions ([`verdigris_graph::ConvProblem`] has the formula in full).

mod chain;
mod direct;
mod implicit_gemm;
mod pointwise;

use crate::engine::Engine;

/// The engines of this family. The table is all there is to registering one.
pub static ENGINES: &[&dyn Engine] = &[&pointwise::Pointwise, &implicit_gemm::ImplicitGemm, &direct::Direct];
