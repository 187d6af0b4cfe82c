//! Batch normalization, its gradient and the statistics of channels ([`verdigris_graph::BatchNormProblem`] has the formulas).

mod channels;

use crate::algorithm::Listed;
use crate::engine::Engine;

/// The engines of this family.
pub static ENGINES: &[&dyn Engine] = &[&Listed::<channels::Channels>::new()];
