//! Convolutions that are rewritten as products: the room stands above `gemm` and `conv`, and uses both.

mod im2col;
mod pointwise;

use crate::algorithm::Listed;
use crate::engine::Engine;

/// The engines of this room.
pub static ENGINES: &[&dyn Engine] = &[&pointwise::Pointwise, &Listed::<im2col::Im2colProduct>::new()];
