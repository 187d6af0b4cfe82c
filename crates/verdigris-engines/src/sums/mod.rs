//! Sums over the columns of a result: in the epilogue of the product that makes it (`column_sums`), or over the channels of a convolution's
//! stored result (`statistics`). And the mean and the squares of deviations of channels, as a thread gathers them (`moments`).

pub(crate) mod column_sums;
pub(crate) mod moments;
pub(crate) mod statistics;
