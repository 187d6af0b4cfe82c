//! What several families build their kernels from.

pub mod batch;
pub mod compute;
pub mod epilogue;
pub(crate) mod join;
mod row_staging;
pub(crate) mod way_out;
