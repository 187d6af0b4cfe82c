//! Pooling and its gradients ([`verdigris_graph::PoolProblem`] has the formulas).

mod axis;
mod blocks;
mod direct;
mod flat;
mod planes;
mod tensor;
pub(crate) mod whole_windows;
mod windows;

use crate::algorithm::Listed;
use crate::engine::Engine;

/// The engines of this family.
pub static ENGINES: &[&dyn Engine] = &[
    &Listed::<flat::Flat>::new(),
    &Listed::<blocks::Blocks>::new(),
    &Listed::<windows::WindowsOfPlanes>::new(),
    &Listed::<planes::Planes>::new(),
    &Listed::<direct::Direct>::new(),
];
