//! Scans: running sums, products and extrema ([`verdigris_graph::ScanProblem`] has the formulas).

mod rows;

use crate::algorithm::Listed;
use crate::engine::Engine;

/// The engines of this family.
pub static ENGINES: &[&dyn Engine] = &[&Listed::<rows::Rows>::new()];
