//! How tensors lie: which matrix of a batch is whose (`batch`), points, extents and views of spaces (`space`), tensors of
//! images by five strides (`images`), a product read the other way round
//! (`transposed`), copies that make the other index of a matrix contiguous (`transposing`), and copies that bring tensors of any strides into lines that TMA maps, and back (`repack`).

pub mod batch;
pub(crate) mod images;
pub(crate) mod repack;
pub(crate) mod space;
pub(crate) mod transposed;
pub(crate) mod transposing;
