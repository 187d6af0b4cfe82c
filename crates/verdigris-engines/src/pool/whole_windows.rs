//! Pooling whose windows are as large as the image.

use verdigris_graph::{PoolProblem, Windows};

/// The dims of which every element is a window of its own, and those that one window has as a whole; or what else the windows are.
pub(crate) fn dims_of(pool: &PoolProblem) -> Result<(Vec<usize>, Vec<usize>), String> {
    let dims = pool.x_dims();
    let is_whole = |axis: usize| pool.out[axis] == 1 && has_every_element(pool.extents[axis], &pool.windows[axis]);
    let is_each = |axis: usize| {
        let (extent, out) = (pool.extents[axis], pool.out[axis]);
        extent == out && (pool.windows[axis] == Windows::Adaptive || pool.windows[axis] == Windows::NONE)
    };
    let reduced: Vec<usize> = (0..3).filter(|&axis| is_whole(axis)).map(|axis| axis + 2).collect();
    let stays: Vec<usize> = (0..5).filter(|dim| !reduced.contains(dim)).collect();
    let elements: u64 = reduced.iter().map(|&dim| dims[dim]).product();
    if (0..3).all(|axis| is_whole(axis) || is_each(axis)) && elements > 0 {
        return Ok((stays, reduced));
    }
    Err(format!("windows {:?} over {:?}; takes one over all elements, or one for each", pool.windows, pool.extents))
}

/// Whether the first window along a dim has each of its elements once, and nothing else.
fn has_every_element(extent: u64, windows: &Windows) -> bool {
    match *windows {
        Windows::Adaptive => true,
        // The reductions read no samples, though windows as large as the image need none.
        Windows::Fractional { .. } => false,
        Windows::Sliding { taps, dilation, pad_before, .. } => taps == extent && (dilation == 1 || taps == 1) && pad_before == 0,
    }
}
