//! Convolutions that are rewritten as products, and pooling as reductions and maps: the room stands above `gemm`, `conv`, `reduce` and `map`, and uses them.

mod global_pool;
mod global_pool_gradient;
mod im2col;
mod pointwise;

use crate::algorithm::Listed;
use crate::engine::Engine;

/// The engines of this room.
pub static ENGINES: &[&dyn Engine] = &[
    &pointwise::Pointwise,
    &Listed::<im2col::Im2colProduct>::new(),
    &Listed::<global_pool::GlobalPool>::new(),
    &Listed::<global_pool_gradient::GlobalPoolGradient>::new(),
];
