//! The operations in `f64`, one file each, under the names of `verdigris_graph::ops`.

pub mod append;
pub mod attention;
pub mod batch_norm;
pub mod conv;
pub mod matmul;
pub mod movement;
pub mod norm;
pub mod pointwise;
pub mod pool;
pub mod reduction;
pub mod resample;
pub mod scan;
pub mod softmax;
