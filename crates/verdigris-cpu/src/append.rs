//! Rows behind those that a tensor has already: a copy of it, and the rows where lengths say.

use verdigris_graph::{Append, Node, Uid};
use verdigris_tensor::Layout;

use crate::elements::{View, ViewMut};
use crate::engine::Engine;
use crate::graph_plan::Context;
use crate::movement::copy;
use crate::operation::{Operation, results};

/// The place of each element of these dims, in bytes from the first.
fn offset(layout: &Layout, index: &[u64], size: usize) -> usize {
    index.iter().zip(layout.strides()).map(|(i, stride)| i * stride).sum::<u64>() as usize * size
}

fn run(op: &Append, context: &Context<'_>, y: ViewMut<'_>) {
    let (x, rows, lengths) = (context.view(op.x), context.view(op.rows), context.view(op.lengths));
    let (layout, size, axis) = (y.layout, y.dtype.bytes(), op.axis as usize);
    let bytes = y.bytes;
    copy(ViewMut { dtype: y.dtype, layout, bytes: &mut *bytes }, x.layout, 0, x.bytes);
    if rows.layout.is_empty() || layout.is_empty() {
        return;
    }
    let mut outer = layout.dims().to_vec();
    outer[axis] = 1;
    let lengths = View { layout: lengths.layout.broadcast_to(&outer).unwrap_or(lengths.layout), ..lengths };
    let (dims, extent) = (rows.layout.dims(), layout.dims()[axis] as i64);
    let mut index = vec![0; dims.len()];
    loop {
        let row = std::mem::take(&mut index[axis]);
        let at = offset(&lengths.layout, &index, 4);
        let length = lengths.bytes.get(at..at + 4).and_then(|four| four.try_into().ok()).map_or(0, i32::from_le_bytes);
        let place = i64::from(length) - dims[axis] as i64 + row as i64;
        if (0..extent).contains(&place) {
            index[axis] = place as u64;
            let to = offset(&layout, &index, size);
            index[axis] = row;
            let from = offset(&rows.layout, &index, size);
            bytes[to..to + size].copy_from_slice(&rows.bytes[from..from + size]);
        }
        index[axis] = row;
        // The next index, the last dim first.
        let Some(dim) = (0..dims.len()).rev().find(|&dim| index[dim] + 1 < dims[dim]) else { return };
        index[dim] += 1;
        index[dim + 1..].fill(0);
    }
}

impl Operation for Append {
    const ENGINE: Engine = Engine::Movement;

    fn run(&self, _: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        if let Some((output, _)) = results(outputs) {
            run(self, context, output);
        }
    }
}
