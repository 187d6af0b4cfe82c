//! Sums over the columns of a result: in the epilogue of the product that makes it, or behind it.

pub(crate) mod column_sums;
