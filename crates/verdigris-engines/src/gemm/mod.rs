//! Matrix multiplication: `D = epilogue(alpha · A · B + beta · C)` ([`verdigris_graph::GemmProblem`] has the formula in full).

use crate::engine::Engine;

/// The engines of this family. The table is all there is to registering one.
mod wgmma;

pub static ENGINES: &[&dyn Engine] = &[&wgmma::Wgmma];
