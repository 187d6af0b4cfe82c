//! Resampling, borders and their gradients ([`verdigris_graph::ResampleProblem`] has the formulas).

mod gather;

use crate::algorithm::Listed;
use crate::engine::Engine;

/// The engines of this family.
pub static ENGINES: &[&dyn Engine] = &[&Listed::<gather::Gather>::new()];
