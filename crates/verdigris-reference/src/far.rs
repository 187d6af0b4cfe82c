//! Graphs whose tensors lie far apart in memory: what a kernel does with large tensors, seen on small ones.
//!
//! A dim of every tensor is stretched, so that one index lies more than 2³² bytes behind the one before and element offsets pass 2³¹. What such
//! a graph must compute is what the graph before it must: only where the elements lie is another thing.

use verdigris_graph::Graph;
use verdigris_tensor::{DType, Layout};

/// Beyond it no buffer of the interpreter reaches.
const MOST_BYTES: u128 = 1 << 39;

/// Elements from one index of a stretched dim to the next: 2³¹ and 2³² bytes at least, and some more, so that what wraps hits no other element.
pub fn step_elements(dtype: DType) -> u64 {
    (1u64 << 31).max((1 << 32) / dtype.bytes() as u64) + 4096
}

/// The graph with dim `dim` of every stored tensor stretched; `None` if no tensor has two indices there, or one would be beyond all memory. With `outward`
/// the dims whose indices lie farther apart are stretched alike, so that those that were one line of memory still are; `None` if there are none.
pub fn stretch(graph: &Graph, dim: usize, outward: bool) -> Option<Graph> {
    let mut far = graph.clone();
    let (mut is_stretched, mut has_outer) = (false, false);
    for tensor in far.tensors.iter_mut().filter(|tensor| !tensor.is_virtual && !tensor.by_value) {
        let layout = &tensor.layout;
        if layout.dims().get(dim).is_none_or(|&extent| extent < 2) || layout.strides()[dim] == 0 {
            continue;
        }
        let mut strides = layout.strides().to_vec();
        let own = strides[dim];
        for (stride, _) in strides.iter_mut().zip(layout.dims()).filter(|(stride, extent)| outward && **stride > own && **extent > 1) {
            *stride = *stride / own * step_elements(tensor.dtype);
            has_outer = true;
        }
        strides[dim] = step_elements(tensor.dtype);
        tensor.layout = Layout::new(layout.dims(), &strides).ok().filter(|layout| layout.span_bytes(tensor.dtype) <= MOST_BYTES)?;
        is_stretched = true;
    }
    (is_stretched && has_outer == outward).then_some(far)
}
