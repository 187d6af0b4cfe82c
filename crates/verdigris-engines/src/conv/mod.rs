//! Convolution in its three directions ([`verdigris_graph::ConvProblem`] has the formula in full).

mod depthwise;
mod depthwise_planes;
mod direct;
pub(crate) mod geometry;
mod grouped;
mod halo;
mod implicit_gemm;
mod in_lines;
mod in_patches;
mod patch;
mod patch_gradient;
mod small_channels;

use crate::algorithm::Listed;
use crate::engine::{Engine, EngineId};

/// The engines of this family; [`crate::rewrite`] has those that stand on products.
pub static ENGINES: &[&dyn Engine] = &[
    &Listed::<implicit_gemm::ImplicitGemm>::new(),
    &Listed::<halo::Halo>::new(),
    &Listed::<small_channels::SmallChannels>::new(),
    &Listed::<grouped::Grouped>::new(),
    &Listed::<depthwise::Depthwise>::new(),
    &Listed::<depthwise_planes::DepthwisePlanes>::new(),
    &Listed::<patch::Patch>::new(),
    &Listed::<patch_gradient::PatchGradient>::new(),
    &Listed::<direct::Direct>::new(),
];

/// Engines of earlier versions that are an algorithm of one of today's.
pub(crate) static ALIASES: &[(EngineId, &dyn Engine)] = &[
    (EngineId { name: "conv.halo_wgrad", number: 209 }, &Listed::<halo::Filter>::new()),
    (EngineId { name: "conv.diagonal", number: 211 }, &Listed::<grouped::BlockDiagonal>::new()),
];
