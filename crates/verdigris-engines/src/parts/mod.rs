//! What several families build their kernels from.

pub mod batch;
pub mod compute;
pub mod epilogue;
