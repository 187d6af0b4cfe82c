//! Softmax, cross-entropy and their gradients, a row at a time. Exponentials and sums are in f64 throughout: a row is short, and its sum
//! is what all its results hang on.

use rayon::prelude::*;
use verdigris_graph::{CrossEntropy, CrossEntropyBackward, CrossEntropySpec, LossReduction, Node, Softmax, SoftmaxBackward, Uid};
use verdigris_tensor::{DType, Layout};

use crate::elements::{View, ViewMut, row_major};
use crate::engine::Engine;
use crate::graph_plan::Context;
use crate::operation::{Operation, results};
use crate::real::Real;
use crate::scratch::{Lent, Scratch};

/// Rows along one axis of a row-major tensor.
#[derive(Clone, Copy)]
struct Rows {
    len: usize,
    /// Elements from one entry of a row to the next.
    step: usize,
}

impl Rows {
    fn new(layout: &Layout, axis: u32) -> Rows {
        let dims = layout.dims();
        Rows { len: dims[axis as usize] as usize, step: dims[axis as usize + 1..].iter().product::<u64>() as usize }
    }

    /// Elements of a block that holds whole rows and lies together.
    fn block(&self) -> usize {
        (self.len * self.step).max(1)
    }

    /// Reads row `row` of a block.
    fn read<T: Real>(&self, block: &[T], row: usize, to: &mut [f64]) {
        // Rows without elements have no place in their block.
        let values = block.get(row..).unwrap_or_default().iter().step_by(self.step);
        to.iter_mut().zip(values).for_each(|(to, value)| *to = value.to_f64());
    }

    /// Room for one row; each thread takes its own.
    fn room<'s>(&self, scratch: &'s Scratch) -> Lent<'s, f64> {
        scratch.f64.lend(self.len)
    }

    fn write<T: Real>(&self, block: &mut [T], row: usize, from: &[f64]) {
        for (to, &value) in block.get_mut(row..).unwrap_or_default().iter_mut().step_by(self.step).zip(from) {
            *to = T::from_f64(value);
        }
    }
}

/// The greatest entry, NaN if one is.
fn greatest(row: &[f64]) -> f64 {
    row.iter().fold(f64::NEG_INFINITY, |a, &b| if b > a || b.is_nan() { b } else { a })
}

/// `ln Σ e^x`, NaN where softmax gives NaN.
fn log_sum_exp(row: &[f64]) -> f64 {
    let max = greatest(row);
    max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln()
}

fn is_f64(context: &Context<'_>, uids: &[Uid]) -> bool {
    uids.iter().any(|&uid| context.tensor(uid).dtype == DType::F64)
}

fn softmax(op: &Softmax, context: &Context<'_>, y: ViewMut<'_>) {
    if is_f64(context, &[op.x]) { softmax_in::<f64>(op, context, y) } else { softmax_in::<f32>(op, context, y) }
}

fn softmax_in<T: Real>(op: &Softmax, context: &Context<'_>, y: ViewMut<'_>) {
    let x = context.view(op.x).load_row_major::<T>(context.scratch);
    let rows = Rows::new(&x.layout, op.axis);
    let order = row_major(&y.layout);
    y.fill::<T>(context.scratch, order, |y| {
        let room = || rows.room(context.scratch);
        y.par_chunks_mut(rows.block()).zip(x.data().par_chunks(rows.block())).for_each_init(room, |row, (y, x)| {
            for i in 0..rows.step {
                rows.read(x, i, row);
                let max = greatest(row);
                if op.log {
                    let log = row.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
                    row.iter_mut().for_each(|x| *x = *x - max - log);
                } else {
                    row.iter_mut().for_each(|x| *x = (*x - max).exp());
                    let sum: f64 = row.iter().sum();
                    row.iter_mut().for_each(|x| *x /= sum);
                }
                rows.write(y, i, row);
            }
        });
    });
}

fn softmax_backward(op: &SoftmaxBackward, context: &Context<'_>, dx: ViewMut<'_>) {
    if is_f64(context, &[op.y, op.dy]) { backward_in::<f64>(op, context, dx) } else { backward_in::<f32>(op, context, dx) }
}

fn backward_in<T: Real>(op: &SoftmaxBackward, context: &Context<'_>, dx: ViewMut<'_>) {
    let y = context.view(op.y).load_row_major::<T>(context.scratch);
    let dy = context.view(op.dy).load_row_major::<T>(context.scratch);
    let rows = Rows::new(&y.layout, op.axis);
    let order = row_major(&dx.layout);
    dx.fill::<T>(context.scratch, order, |dx| {
        let inputs = y.data().par_chunks(rows.block()).zip(dy.data().par_chunks(rows.block()));
        let room = || [rows.room(context.scratch), rows.room(context.scratch)];
        dx.par_chunks_mut(rows.block()).zip(inputs).for_each_init(room, |[y_row, dy_row], (dx, (y, dy))| {
            for i in 0..rows.step {
                rows.read(y, i, y_row);
                rows.read(dy, i, dy_row);
                if op.log {
                    let sum: f64 = dy_row.iter().sum();
                    dy_row.iter_mut().zip(&**y_row).for_each(|(dy, y)| *dy -= y.exp() * sum);
                } else {
                    let sum: f64 = dy_row.iter().zip(&**y_row).map(|(dy, y)| dy * y).sum();
                    dy_row.iter_mut().zip(&**y_row).for_each(|(dy, y)| *dy = y * (*dy - sum));
                }
                rows.write(dx, i, dy_row);
            }
        });
    });
}

/// The labels of the rows in row-major order.
fn labels<'s>(view: &View<'_>, scratch: &'s Scratch) -> Lent<'s, i64> {
    let count = view.layout.elements();
    let values = (0..count).map(|row| view.integer(view.layout.offset_of_position(row).unwrap_or(0) as usize));
    scratch.integers.collected(count as usize, values)
}

/// Loss and log-sum-exp of one row.
fn row_loss(spec: &CrossEntropySpec, row: &[f64], label: i64) -> (f64, f64) {
    let lse = log_sum_exp(row);
    if spec.ignore_index == Some(label) {
        return (0.0, lse);
    }
    let smoothing = spec.label_smoothing.0;
    let Some(&chosen) = usize::try_from(label).ok().and_then(|label| row.get(label)) else { return (f64::NAN, lse) };
    let mut loss = lse - (1.0 - smoothing) * chosen;
    if smoothing != 0.0 {
        loss -= smoothing / row.len() as f64 * row.iter().sum::<f64>();
    }
    (loss, lse)
}

fn cross_entropy(op: &CrossEntropy, context: &Context<'_>, loss: ViewMut<'_>, lse: Option<ViewMut<'_>>) {
    if is_f64(context, &[op.logits]) {
        cross_entropy_in::<f64>(op, context, loss, lse);
    } else {
        cross_entropy_in::<f32>(op, context, loss, lse);
    }
}

fn cross_entropy_in<T: Real>(op: &CrossEntropy, context: &Context<'_>, loss: ViewMut<'_>, lse: Option<ViewMut<'_>>) {
    let x = context.view(op.logits).load_row_major::<T>(context.scratch);
    let labels = labels(&context.view(op.labels), context.scratch);
    let rows = Rows::new(&x.layout, op.spec.axis);
    // Of each row its loss, and its log-sum-exp.
    let mut results = context.scratch.f64.lend(2 * labels.len());
    let step = rows.step.max(1);
    (results.par_chunks_mut(2 * step).enumerate()).for_each_init(
        || rows.room(context.scratch),
        |row, (block, results)| {
            let x = &x.data()[block * rows.len * rows.step..][..rows.len * rows.step];
            for (i, result) in results.chunks_exact_mut(2).enumerate() {
                rows.read(x, i, row);
                let (loss, lse) = row_loss(&op.spec, row, labels[block * rows.step + i]);
                result.copy_from_slice(&[loss, lse]);
            }
        },
    );
    let losses = || results.iter().step_by(2).copied();
    let counted = labels.iter().filter(|&&label| op.spec.ignore_index != Some(label)).count();
    let order = row_major(&loss.layout);
    loss.fill::<T>(context.scratch, order, |loss| match op.spec.reduction {
        LossReduction::None => loss.iter_mut().zip(losses()).for_each(|(to, loss)| *to = T::from_f64(loss)),
        LossReduction::Sum => loss.fill(T::from_f64(losses().sum())),
        LossReduction::Mean => loss.fill(T::from_f64(losses().sum::<f64>() / counted as f64)),
    });
    if let Some(lse) = lse {
        let order = row_major(&lse.layout);
        lse.fill::<T>(context.scratch, order, |lse| {
            lse.iter_mut().zip(results.iter().skip(1).step_by(2)).for_each(|(to, &lse)| *to = T::from_f64(lse));
        });
    }
}

fn cross_entropy_backward(op: &CrossEntropyBackward, context: &Context<'_>, dlogits: ViewMut<'_>) {
    if is_f64(context, &[op.logits, op.dloss]) || op.lse.is_some_and(|lse| is_f64(context, &[lse])) {
        cross_entropy_backward_in::<f64>(op, context, dlogits);
    } else {
        cross_entropy_backward_in::<f32>(op, context, dlogits);
    }
}

fn cross_entropy_backward_in<T: Real>(op: &CrossEntropyBackward, context: &Context<'_>, dlogits: ViewMut<'_>) {
    let spec = op.spec;
    let x = context.view(op.logits).load_row_major::<T>(context.scratch);
    let labels = labels(&context.view(op.labels), context.scratch);
    let dloss = context.view(op.dloss).load_row_major::<T>(context.scratch);
    let lse = op.lse.map(|lse| context.view(lse).load_row_major::<T>(context.scratch));
    let rows = Rows::new(&x.layout, spec.axis);
    let counted = labels.iter().filter(|&&label| spec.ignore_index != Some(label)).count();
    let order = row_major(&dlogits.layout);
    dlogits.fill::<T>(context.scratch, order, |dlogits| {
        let room = || rows.room(context.scratch);
        let blocks = dlogits.par_chunks_mut(rows.block()).zip(x.data().par_chunks(rows.block()));
        blocks.enumerate().for_each_init(room, |row, (block, (dlogits, x))| {
            for i in 0..rows.step {
                let which = block * rows.step + i;
                let label = labels[which];
                rows.read(x, i, row);
                let gradient = match spec.reduction {
                    LossReduction::None => dloss.data()[which].to_f64(),
                    LossReduction::Sum => dloss.data()[0].to_f64(),
                    LossReduction::Mean => dloss.data()[0].to_f64() / counted as f64,
                };
                if spec.ignore_index == Some(label) {
                    row.fill(0.0);
                } else if !usize::try_from(label).is_ok_and(|label| label < row.len()) {
                    row.fill(f64::NAN);
                } else {
                    let lse = lse.as_ref().map_or_else(|| log_sum_exp(row), |lse| lse.data()[which].to_f64());
                    let smoothing = spec.label_smoothing.0;
                    let spread = smoothing / row.len() as f64;
                    for (class, x) in row.iter_mut().enumerate() {
                        let target = if class as i64 == label { 1.0 - smoothing + spread } else { spread };
                        *x = gradient * ((*x - lse).exp() - target);
                    }
                }
                rows.write(dlogits, i, row);
            }
        });
    });
}

impl Operation for Softmax {
    const ENGINE: Engine = Engine::Softmax;

    fn run(&self, _: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        if let Some((output, _)) = results(outputs) {
            softmax(self, context, output);
        }
    }
}

impl Operation for SoftmaxBackward {
    const ENGINE: Engine = Engine::Softmax;

    fn run(&self, _: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        if let Some((output, _)) = results(outputs) {
            softmax_backward(self, context, output);
        }
    }
}

impl Operation for CrossEntropy {
    const ENGINE: Engine = Engine::Softmax;

    fn run(&self, _: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        if let Some((output, second)) = results(outputs) {
            cross_entropy(self, context, output, second);
        }
    }
}

impl Operation for CrossEntropyBackward {
    const ENGINE: Engine = Engine::Softmax;

    fn run(&self, _: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        if let Some((output, _)) = results(outputs) {
            cross_entropy_backward(self, context, output);
        }
    }
}
