//! Normalization of rows by their own statistics: layer, root-mean-square, group and instance norm, and their gradients.

mod groups;
mod rows;
mod strided;
mod walk;

use crate::algorithm::Listed;
use crate::engine::Engine;

/// The engines of this family.
pub static ENGINES: &[&dyn Engine] = &[&Listed::<rows::Rows>::new(), &Listed::<groups::Groups>::new(), &Listed::<strided::Any>::new()];
