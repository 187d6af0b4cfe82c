//! Tensors as lines along one of their dims.

use verdigris_graph::{Matrix, Tensor};

/// A tensor like `like`, packed: lines along dim `along`, each of whole 16 bytes (longer ones of whole sectors), the other dims in `order`,
/// outermost first.
pub(crate) fn packed_tensor(like: &Tensor, extents: [u64; 5], along: usize, order: [usize; 4]) -> Tensor {
    let bytes = like.dtype.bytes() as u64;
    let line_bytes = extents[along] * bytes;
    let mut stride = line_bytes.next_multiple_of(if line_bytes < 128 { 16 } else { 32 }) / bytes;
    let mut strides = [0; 5];
    strides[along] = 1;
    for dim in order.into_iter().rev() {
        strides[dim] = stride;
        stride = stride.saturating_mul(extents[dim]);
    }
    Tensor { strides, ..like.clone() }
}

/// The lines of two tensors of equal extents: dims that run on in both are one.
pub(crate) struct Lines {
    /// The dims outside of the lines, outermost first: at most three.
    pub(crate) batch: Vec<u64>,
    /// Lines of one index of the batch.
    pub(crate) count: u64,
    /// Strides of both tensors over the batch, and from line to line.
    batch_strides: [Vec<u64>; 2],
    strides: [u64; 2],
}

impl Lines {
    /// The lines over the dims of `order`, outermost first.
    pub(crate) fn of(one: &Tensor, other: &Tensor, extents: [u64; 5], order: [usize; 4]) -> Lines {
        let mut dims: Vec<(u64, [u64; 2])> = Vec::new();
        for dim in order.into_iter().filter(|&dim| extents[dim] != 1) {
            let (extent, strides) = (extents[dim], [one.strides[dim], other.strides[dim]]);
            match dims.last_mut() {
                Some((outer, outer_strides)) if *outer_strides == strides.map(|stride| stride.saturating_mul(extent)) => {
                    *outer = outer.saturating_mul(extent);
                    *outer_strides = strides;
                }
                _ => dims.push((extent, strides)),
            }
        }
        let innermost = [one, other].map(|tensor| tensor.strides[order[3]]);
        let (count, strides) = dims.pop().unwrap_or((1, innermost));
        Lines {
            batch: dims.iter().map(|(extent, _)| *extent).collect(),
            count,
            batch_strides: [0, 1].map(|side| dims.iter().map(|(_, strides)| strides[side]).collect()),
            strides,
        }
    }

    /// Both tensors as matrices of lines, with strides `along` from one element of a line to the next.
    pub(crate) fn matrices(&self, tensors: [&Tensor; 2], along: [u64; 2]) -> [Matrix; 2] {
        [0, 1].map(|side| Matrix {
            slot: tensors[side].slot,
            dtype: tensors[side].dtype,
            row_stride: self.strides[side],
            column_stride: along[side],
            batch_strides: self.batch_strides[side].clone(),
        })
    }
}
