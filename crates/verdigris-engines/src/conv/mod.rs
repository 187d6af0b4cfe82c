//! Convolution in its three directions ([`verdigris_graph::ConvProblem`] has the formula in full).

mod direct;
mod implicit_gemm;

use crate::engine::Engine;

/// The engines of this family. The table is all there is to registering one.
pub static ENGINES: &[&dyn Engine] = &[&implicit_gemm::ImplicitGemm, &direct::Direct];
