//! Attention and its gradient ([`verdigris_graph::AttentionProblem`] and [`verdigris_graph::ops::attention`] have the formulas).

mod backward;
mod band;
mod blocks;
mod combine;
mod decode;
mod descale;
mod dropout;
mod forward;
mod function;
mod half;
mod mapped;
mod mma;
mod of_queries;
mod order;
mod paged;
mod ragged;
mod score_mod;
mod sequences;
mod simt;
mod sinks;
mod softmax;
#[cfg(test)]
mod testing;
mod tile;

use crate::algorithm::Listed;
use crate::engine::Engine;

/// The engines of this family.
pub static ENGINES: &[&dyn Engine] = &[
    &Listed::<forward::Forward>::new(),
    &Listed::<decode::Decode>::new(),
    &Listed::<mma::MmaOrGradient>::new(),
    &Listed::<backward::Backward>::new(),
    &Listed::<simt::Simt>::new(),
];
