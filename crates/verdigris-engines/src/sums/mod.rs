//! Sums over the columns of a result: in the epilogue of the product that makes it (`column_sums`), or over the channels of a convolution's
//! stored result (`statistics`).

pub(crate) mod column_sums;
pub(crate) mod statistics;
