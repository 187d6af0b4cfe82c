//! The operations: one file each, with attributes, shape inference, checks and the formula.

pub mod matmul;
pub mod pointwise;
