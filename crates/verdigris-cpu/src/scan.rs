//! Scans, in f64 along each row, from one end to the other. Blocks of rows are shared out among threads, a row never is, so that the result does not
//! depend on the number of threads.

use rayon::prelude::*;
use verdigris_graph::{Node, Scan, ScanOp, Uid};
use verdigris_tensor::DType;

use crate::elements::{ViewMut, row_major};
use crate::engine::Engine;
use crate::graph_plan::Context;
use crate::operation::{Operation, results};
use crate::real::Real;

fn run_in<T: Real>(op: &Scan, context: &Context<'_>, y: ViewMut<'_>) {
    let x = context.view(op.x).load_row_major::<T>(context.scratch);
    let dims = x.layout.dims();
    let extent = dims[op.axis as usize] as usize;
    // Rows whose elements stand `step` apart and that lie beside each other are one block.
    let step = dims[op.axis as usize + 1..].iter().product::<u64>() as usize;
    let block = (extent * step).max(1);
    let order = row_major(&y.layout);
    y.fill::<T>(context.scratch, order, |y| {
        if y.is_empty() {
            return;
        }
        y.par_chunks_mut(block).zip(x.data().par_chunks(block)).for_each(|(y, x)| {
            let mut so_far = context.scratch.f64.lend(step);
            so_far.fill(op.f.of_nothing());
            for turn in 0..extent {
                let first = step * if op.reverse { extent - 1 - turn } else { turn };
                let lines = y[first..first + step].iter_mut().zip(&x[first..first + step]);
                for (so_far, (y, &x)) in so_far.iter_mut().zip(lines) {
                    let before = *so_far;
                    *so_far = join::<T>(op.f, before, x.to_f64());
                    *y = T::from_f64(if op.exclusive { before } else { *so_far });
                }
            }
        });
    });
}

/// One element more. Products are rounded to the type of the arithmetic, so that they leave its range where it ends.
#[inline(always)]
fn join<T: Real>(f: ScanOp, so_far: f64, x: f64) -> f64 {
    match f {
        ScanOp::Add => so_far + x,
        ScanOp::Mul => T::from_f64(so_far * x).to_f64(),
        ScanOp::Min => {
            if x < so_far || x.is_nan() {
                x
            } else {
                so_far
            }
        }
        ScanOp::Max => {
            if x > so_far || x.is_nan() {
                x
            } else {
                so_far
            }
        }
        ScanOp::LogSumExp => {
            let (most, least) = if x > so_far || x.is_nan() { (x, so_far) } else { (so_far, x) };
            // What is infinite or NaN has no difference to the rest.
            if most.is_finite() { most + (least - most).exp().ln_1p() } else { most }
        }
    }
}

impl Operation for Scan {
    const ENGINE: Engine = Engine::Scan;

    fn run(&self, _: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        let Some((y, _)) = results(outputs) else { return };
        if context.tensor(self.x).dtype == DType::F64 { run_in::<f64>(self, context, y) } else { run_in::<f32>(self, context, y) }
    }
}
