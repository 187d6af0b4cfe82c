//! The interpreter: runs verified kernels on the CPU with every rule of the programming model checked.

pub mod alu;
pub mod matrix;
pub mod tensor;
