//! Convolution in its three directions ([`verdigris_graph::ConvProblem`] has the formula in full).

mod chain;
mod depthwise;
mod direct;
mod grouped;
mod implicit_gemm;
pub(crate) mod pointwise;
mod small_channels;

use crate::engine::Engine;

/// The engines of this family; `pointwise`, which stands on another family's, is registered with both.
pub static ENGINES: &[&dyn Engine] =
    &[&implicit_gemm::ImplicitGemm, &small_channels::SmallChannels, &grouped::Grouped, &depthwise::Depthwise, &direct::Direct];
