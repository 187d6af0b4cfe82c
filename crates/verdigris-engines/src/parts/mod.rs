//! What several families build their kernels from.

pub mod batch;
pub(crate) mod chain;
pub(crate) mod cluster_reduction;
pub(crate) mod cluster_split_k;
pub(crate) mod column_sums;
pub mod compute;
pub(crate) mod conv_epilogue;
pub(crate) mod element;
pub mod epilogue;
pub(crate) mod fixup;
pub(crate) mod formats;
pub(crate) mod lanes;
pub mod math;
pub(crate) mod operand;
pub(crate) mod prologue;
pub(crate) mod repack;
mod row_staging;
pub(crate) mod space;
pub(crate) mod split_k_reduction;
pub(crate) mod steps;
pub(crate) mod store;
pub(crate) mod transposed;
pub(crate) mod unpack;
