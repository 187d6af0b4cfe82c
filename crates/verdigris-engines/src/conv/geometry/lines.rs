//! Tensors of convolutions whose elements lie in lines of channels, as TMA reads and writes them.

use verdigris_graph::{Matrix, Tensor};

/// Pixels that TMA can read: channels side by side, all else at multiples of 16 bytes, nothing that repeats.
pub(in crate::conv) fn lies_in_lines(tensor: &Tensor) -> bool {
    let bytes = tensor.dtype.bytes() as u64;
    let fits = |stride: u64| stride > 0 && (stride * bytes).is_multiple_of(16) && stride * bytes < 1 << 40;
    tensor.is_channels_last() && [0, 2, 3, 4].iter().all(|&dim| fits(tensor.strides[dim]))
}

/// One tap of a filter: columns of the product by its depth.
pub(in crate::conv) fn filter_matrix(w: &Tensor, forward: bool) -> Matrix {
    let (row_stride, column_stride) = if forward { (w.strides[0], w.strides[1]) } else { (w.strides[1], w.strides[0]) };
    Matrix { slot: w.slot, dtype: w.dtype, row_stride, column_stride, batch_strides: Vec::new() }
}

/// The stride of the taps of a filter, counted row-major, if there is a single one.
pub(in crate::conv) fn tap_stride(filter: &Tensor, [_, _, _, height, width]: [u64; 5]) -> Option<u64> {
    let [_, _, d, h, w] = filter.strides;
    (w.checked_mul(width) == Some(h) && h.checked_mul(height) == Some(d)).then_some(w)
}
