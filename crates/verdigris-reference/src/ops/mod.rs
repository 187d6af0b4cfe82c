//! The operations in `f64`, one file each, under the names of `verdigris_graph::ops`.

pub mod matmul;
pub mod pointwise;
