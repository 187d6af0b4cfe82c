//! The operations: one file each, with attributes, shape inference, checks and the formula.

pub mod conv;
pub mod matmul;
pub mod movement;
pub mod pointwise;
pub mod pool;
pub mod reduction;
pub mod softmax;
