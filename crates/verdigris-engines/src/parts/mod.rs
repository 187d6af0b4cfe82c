//! What several families build their kernels from.

pub mod batch;
pub mod compute;
pub mod epilogue;
pub(crate) mod join;
pub(crate) mod way_out;
