//! Movements: bytes to other places, whatever they mean.

use verdigris_graph::{Movement, Node, Uid};
use verdigris_tensor::{Layout, num};

use crate::elements::{View, ViewMut, row_major};
use crate::engine::Engine;
use crate::graph_plan::Context;
use crate::operation::{Operation, results};
use crate::scratch::made;

fn run(op: &Movement, context: &Context<'_>, y: ViewMut<'_>) {
    match op {
        Movement::Reshape { x, .. } => {
            let x = context.view(*x);
            let from = row_major(&y.layout);
            if x.layout.is_row_major() {
                copy(y, from, 0, x.bytes);
            } else {
                let mut packed: Vec<u8> = made(x.layout.elements() as usize * x.dtype.bytes());
                let order = row_major(&x.layout);
                copy(ViewMut { dtype: x.dtype, layout: order, bytes: &mut packed }, x.layout, 0, x.bytes);
                copy(y, from, 0, &packed);
            }
        }
        Movement::Transpose { permutation, x, .. } => {
            let x = context.view(*x);
            let order: Vec<usize> = permutation.iter().map(|&dim| dim as usize).collect();
            let from = x.layout.permuted(&order).unwrap_or(x.layout);
            copy(y, from, 0, x.bytes);
        }
        Movement::Slice { starts, steps, x, .. } => {
            let x = context.view(*x);
            let strides: Vec<u64> = x.layout.strides().iter().zip(steps).map(|(stride, step)| stride.saturating_mul(*step)).collect();
            let start: u64 = x.layout.strides().iter().zip(starts).map(|(stride, start)| stride * start).sum();
            let from = strides_of(y.layout.dims(), &strides, &y.layout);
            copy(y, from, start as usize, x.bytes);
        }
        Movement::Broadcast { x, .. } => {
            let x = context.view(*x);
            let from = x.layout.broadcast_to(y.layout.dims()).unwrap_or(x.layout);
            copy(y, from, 0, x.bytes);
        }
        Movement::Concat { axis, xs, .. } => {
            let axis = *axis as usize;
            let mut first = 0;
            for &x in xs {
                let x = context.view(x);
                let start = first * y.layout.strides()[axis];
                part(&y.layout, x.layout.dims(), start, y.dtype, &mut *y.bytes, &x);
                first += x.layout.dims()[axis];
            }
        }
        Movement::Pad { before, value, x, .. } => {
            let x = context.view(*x);
            let mut element = [0u8; 8];
            let _ = num::write_element(y.dtype, value.0, &mut element);
            let element = &element[..y.dtype.bytes()];
            let (layout, dtype) = (y.layout, y.dtype);
            ViewMut { dtype, layout, bytes: &mut *y.bytes }.scatter(layout, |_, _, to| {
                to.chunks_exact_mut(element.len()).for_each(|to| to.copy_from_slice(element));
            });
            let start: u64 = layout.strides().iter().zip(before).map(|(stride, before)| stride * before).sum();
            part(&layout, x.layout.dims(), start, dtype, &mut *y.bytes, &x);
        }
    }
}

/// Copies `x` to the part of a tensor of layout `whole` that has the dims of `x` and begins at offset `start`.
fn part(whole: &Layout, dims: &[u64], start: u64, dtype: verdigris_tensor::DType, bytes: &mut [u8], x: &View<'_>) {
    if x.layout.is_empty() {
        return;
    }
    let layout = strides_of(dims, whole.strides(), &x.layout);
    copy(ViewMut { dtype, layout, bytes: &mut bytes[start as usize * dtype.bytes()..] }, x.layout, 0, x.bytes);
}

/// A layout of these dims and strides; `otherwise` where an empty tensor makes the strides meaningless.
fn strides_of(dims: &[u64], strides: &[u64], otherwise: &Layout) -> Layout {
    // A dim of 1 is never stepped along.
    let strides: Vec<u64> = dims.iter().zip(strides).map(|(&dim, &stride)| if dim > 1 { stride } else { 0 }).collect();
    Layout::new(dims, &strides).unwrap_or(*otherwise)
}

/// Writes each element of `y` from the element of `x` that `from` names, `start` elements on.
pub(crate) fn copy(y: ViewMut<'_>, from: Layout, start: usize, x: &[u8]) {
    let size = y.dtype.bytes();
    y.scatter(from, |offset, stride, to| {
        let offset = (start + offset) * size;
        if stride == 1 {
            to.copy_from_slice(&x[offset..offset + to.len()]);
        } else {
            for (i, to) in to.chunks_exact_mut(size).enumerate() {
                let offset = offset + i * stride * size;
                to.copy_from_slice(&x[offset..offset + size]);
            }
        }
    });
}

impl Operation for Movement {
    const ENGINE: Engine = Engine::Movement;

    fn run(&self, _: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        if let Some((output, _)) = results(outputs) {
            run(self, context, output);
        }
    }
}
