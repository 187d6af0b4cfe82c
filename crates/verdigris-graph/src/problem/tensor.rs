//! Activations, filters and vectors over channels: operands of convolutions, by strides.

use serde::{Deserialize, Serialize};
use verdigris_tensor::{DType, Layout, LayoutError};

use super::{Matrix, Slot};

/// A tensor of five dims: `[n, channel, depth, height, width]` for activations, `[k, c, depth, height, width]` for filters. What the dims
/// are is the order of the strides; how the elements lie (channels last, channels first, anything) is in their values.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tensor {
    /// The buffer.
    pub slot: Slot,
    /// Its element type.
    pub dtype: DType,
    /// Elements from one index to the next, for each dim; 0 repeats what is there.
    pub strides: [u64; 5],
}

impl Tensor {
    /// A packed tensor with its second dim (channels) fastest: NDHWC activations, KTRSC filters.
    pub fn channels_last(slot: Slot, dtype: DType, extents: [u64; 5]) -> Tensor {
        Tensor::ordered(slot, dtype, extents, [0, 2, 3, 4, 1])
    }

    /// A packed tensor with its last dim fastest: NCDHW activations, KCTRS filters.
    pub fn channels_first(slot: Slot, dtype: DType, extents: [u64; 5]) -> Tensor {
        Tensor::ordered(slot, dtype, extents, [0, 1, 2, 3, 4])
    }

    fn ordered(slot: Slot, dtype: DType, extents: [u64; 5], order: [usize; 5]) -> Tensor {
        let mut strides = [0; 5];
        let mut stride = 1u64;
        for dim in order.into_iter().rev() {
            strides[dim] = stride;
            // An empty dim keeps the strides of an extent of 1. What exceeds 64 bits is refused where the problem is checked.
            stride = stride.saturating_mul(extents[dim].max(1));
        }
        Tensor { slot, dtype, strides }
    }

    /// The layout, for given extents.
    ///
    /// # Errors
    /// As [`Layout::new`].
    pub fn layout(&self, extents: [u64; 5]) -> Result<Layout, LayoutError> {
        Layout::new(&extents, &self.strides)
    }

    /// Whether neighbouring channels are neighbouring elements.
    pub fn is_channels_last(&self) -> bool {
        self.strides[1] == 1
    }

    /// Whether one value serves all elements of a channel, as that of a bias does.
    pub fn is_per_channel(&self, extents: [u64; 5]) -> bool {
        (0..5).all(|dim| dim == 1 || extents[dim] <= 1 || self.strides[dim] == 0)
    }

    /// Whether one value serves all elements.
    pub fn is_scalar(&self, extents: [u64; 5]) -> bool {
        (0..5).all(|dim| extents[dim] <= 1 || self.strides[dim] == 0)
    }

    /// The stride with which `[n, depth, height, width]`, counted row-major, run through the tensor; `None` where no single one does.
    /// The strides of a canonical problem are assumed.
    pub fn pixel_stride(&self, extents: [u64; 5]) -> Option<u64> {
        let [n, _, d, h, w] = self.strides;
        let merges = |outer: u64, inner: u64, extent: u64| inner.checked_mul(extent) == Some(outer);
        (merges(h, w, extents[4]) && merges(d, h, extents[3]) && merges(n, d, extents[2])).then_some(w)
    }

    /// The tensor as a matrix whose rows are `[n, depth, height, width]` and whose columns are channels: what a convolution with a filter
    /// of one element multiplies. `None` where the rows have no single stride. The strides of a canonical problem are assumed.
    pub fn as_matrix(&self, extents: [u64; 5]) -> Option<Matrix> {
        let row_stride = self.pixel_stride(extents)?;
        Some(Matrix { slot: self.slot, dtype: self.dtype, row_stride, column_stride: self.strides[1], batch_strides: Vec::new() })
    }

    /// The stride of an index that takes one value decides nothing. Fixing it makes equal problems equal: a channel dim gets 1, the others
    /// what lets them merge with the dim inside of them.
    pub(crate) fn normalize_strides(&mut self, extents: [u64; 5]) {
        if extents[1] <= 1 {
            self.strides[1] = 1;
        }
        let mut inner = None;
        for dim in [4, 3, 2, 0] {
            if extents[dim] <= 1 {
                let merged = inner.map_or(extents[1].max(1).checked_mul(self.strides[1]), |inner: usize| {
                    self.strides[inner].checked_mul(extents[inner].max(1))
                });
                self.strides[dim] = merged.unwrap_or(1);
            }
            inner = Some(dim);
        }
    }
}

/// A vector with one element for each channel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Channels {
    /// The buffer.
    pub slot: Slot,
    /// Its element type.
    pub dtype: DType,
    /// Elements from one channel to the next; 0 repeats one value.
    pub stride: u64,
}

impl Channels {
    /// The layout, for a number of channels.
    ///
    /// # Errors
    /// As [`Layout::new`].
    pub fn layout(&self, channels: u64) -> Result<Layout, LayoutError> {
        Layout::new(&[channels], &[self.stride])
    }
}
