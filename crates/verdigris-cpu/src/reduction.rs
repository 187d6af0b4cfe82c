//! Reductions. Sums are formed in f64; pieces have a size that depends on the problem alone and are joined in ascending order, so that
//! the result does not depend on the number of threads.

use rayon::prelude::*;
use verdigris_graph::{Node, Reduction, ReductionOp, Uid};
use verdigris_tensor::{DType, Layout};

use crate::elements::{ViewMut, for_runs, row_major};
use crate::engine::Engine;
use crate::graph_plan::Context;
use crate::operation::{Operation, results};
use crate::real::Real;

/// Elements that are folded into one number before numbers are joined.
const PIECE: usize = 1 << 15;
/// Results that are formed side by side where their elements lie side by side.
const LANES: usize = 64;

fn run(op: &Reduction, context: &Context<'_>, y: ViewMut<'_>) {
    if context.tensor(op.x).dtype == DType::F64 { run_in::<f64>(op, context, y) } else { run_in::<f32>(op, context, y) }
}

fn run_in<T: Real>(op: &Reduction, context: &Context<'_>, y: ViewMut<'_>) {
    let x = context.view(op.x).load::<T>(context.scratch);
    let (dims, strides) = (x.layout.dims(), x.layout.strides());
    let is_reduced = |i: usize| op.axes.contains(&(i as u32));
    // Reduced dims in the order of memory: what lies together is read together.
    let mut reduced: Vec<usize> = (0..dims.len()).filter(|&i| is_reduced(i)).collect();
    reduced.sort_by_key(|&i| (std::cmp::Reverse(strides[i]), i));
    let layout = |which: &[usize]| {
        let pick = |list: &[u64]| which.iter().map(|&i| list[i]).collect::<Vec<_>>();
        Layout::new(&pick(dims), &pick(strides)).unwrap_or(Layout::scalar())
    };
    let kept: Vec<usize> = (0..dims.len()).filter(|&i| !is_reduced(i)).collect();
    let (reduced, kept) = (layout(&reduced), layout(&kept));
    let count = reduced.elements() as usize;
    let pieces = count.div_ceil(PIECE).max(1);
    let order = row_major(&y.layout);
    let data = x.data();
    let by_lanes = kept.rank() > 0
        && kept.strides()[kept.rank() - 1] == 1
        && (reduced.rank() == 0 || reduced.strides()[reduced.rank() - 1] != 1 || reduced.dims()[reduced.rank() - 1] == 1);
    y.fill::<T>(context.scratch, order, |y| {
        if y.is_empty() {
            return;
        }
        let lanes = if by_lanes { LANES } else { 1 };
        let blocks = y.len().div_ceil(lanes);
        // What the pieces of each block come to, a number for each lane.
        let mut partial = context.scratch.f64.lend(blocks * pieces * lanes);
        let fold = |task: usize, sums: &mut [f64]| {
            let (block, piece) = (task / pieces, task % pieces);
            let (first, count) = (piece * PIECE, PIECE.min(count - piece * PIECE));
            if by_lanes {
                let start = block * lanes;
                let mut offsets = [0; LANES];
                let width = lanes.min(y.len() - start);
                for_runs(&kept, start, width, |place, offset, stride, len| {
                    (0..len).for_each(|i| offsets[place + i] = offset + i * stride);
                });
                sums.copy_from_slice(&fold_lanes(op.f, data, &offsets[..width], &reduced, first, count));
            } else {
                let base = kept.offset_of_position(block as u64).unwrap_or(0) as usize;
                sums[0] = fold_one::<T>(op.f, data, base, &reduced, first, count);
            }
        };
        let at_once = if by_lanes { 1 } else { 16 };
        partial.par_chunks_mut(lanes).enumerate().with_min_len(at_once).for_each(|(task, sums)| fold(task, sums));
        for (block, y) in y.chunks_mut(lanes).enumerate() {
            for (lane, y) in y.iter_mut().enumerate() {
                let parts = partial[block * pieces * lanes..(block + 1) * pieces * lanes].iter().skip(lane).step_by(lanes).copied();
                *y = finish(op.f, parts.reduce(|a, b| join::<T>(op.f, a, b)).unwrap_or(start(op.f)), count);
            }
        }
    });
}

fn start(f: ReductionOp) -> f64 {
    match f {
        ReductionOp::Mul | ReductionOp::MulNoZeros => 1.0,
        ReductionOp::Min => f64::INFINITY,
        ReductionOp::Max => f64::NEG_INFINITY,
        ReductionOp::Add | ReductionOp::Amax | ReductionOp::Avg | ReductionOp::Norm1 | ReductionOp::Norm2 => 0.0,
    }
}

/// One element more. Products and squares are rounded to the type of the arithmetic, so that they leave its range where it ends.
#[inline(always)]
fn fold<T: Real>(f: ReductionOp, sum: f64, x: T) -> f64 {
    let value = x.to_f64();
    match f {
        ReductionOp::Add | ReductionOp::Avg => sum + value,
        ReductionOp::Norm1 => sum + value.abs(),
        ReductionOp::Norm2 => sum + (x * x).to_f64(),
        ReductionOp::Amax => join::<T>(f, sum, value.abs()),
        ReductionOp::MulNoZeros if value == 0.0 => sum,
        ReductionOp::Mul | ReductionOp::MulNoZeros | ReductionOp::Min | ReductionOp::Max => join::<T>(f, sum, value),
    }
}

/// Two partial results, the earlier one first.
#[inline(always)]
fn join<T: Real>(f: ReductionOp, a: f64, b: f64) -> f64 {
    match f {
        ReductionOp::Add | ReductionOp::Avg | ReductionOp::Norm1 | ReductionOp::Norm2 => a + b,
        ReductionOp::Mul | ReductionOp::MulNoZeros => T::from_f64(a * b).to_f64(),
        ReductionOp::Min => {
            if b < a || b.is_nan() {
                b
            } else {
                a
            }
        }
        ReductionOp::Max | ReductionOp::Amax => {
            if b > a || b.is_nan() {
                b
            } else {
                a
            }
        }
    }
}

fn finish<T: Real>(f: ReductionOp, sum: f64, count: usize) -> T {
    match f {
        ReductionOp::Avg => T::from_f64(sum / count as f64),
        ReductionOp::Norm2 => T::from_f64(T::from_f64(sum).to_f64().sqrt()),
        _ => T::from_f64(sum),
    }
}

fn fold_one<T: Real>(f: ReductionOp, data: &[T], base: usize, reduced: &Layout, first: usize, count: usize) -> f64 {
    // Sums have eight chains, so that an addition need not wait for the one before it.
    let mut chains = [start(f); 8];
    for_runs(reduced, first, count, |_, offset, stride, len| {
        let line = base + offset;
        if stride == 1 {
            let (whole, rest) = data[line..line + len].as_chunks::<8>();
            for eight in whole {
                for (chain, &x) in chains.iter_mut().zip(eight) {
                    *chain = fold(f, *chain, x);
                }
            }
            for (chain, &x) in chains.iter_mut().zip(rest) {
                *chain = fold(f, *chain, x);
            }
        } else {
            for i in 0..len {
                chains[0] = fold(f, chains[0], data[line + i * stride]);
            }
        }
    });
    chains[1..].iter().fold(chains[0], |a, &b| join::<T>(f, a, b))
}

fn fold_lanes<T: Real>(f: ReductionOp, data: &[T], offsets: &[usize], reduced: &Layout, first: usize, count: usize) -> [f64; LANES] {
    let mut sums = [start(f); LANES];
    let run = offsets.windows(2).all(|pair| pair[1] == pair[0] + 1);
    for_runs(reduced, first, count, |_, offset, stride, len| {
        for i in 0..len {
            let at = offset + i * stride;
            if run {
                for (sum, &x) in sums.iter_mut().zip(&data[offsets[0] + at..offsets[0] + at + offsets.len()]) {
                    *sum = fold(f, *sum, x);
                }
            } else {
                for (sum, &from) in sums.iter_mut().zip(offsets) {
                    *sum = fold(f, *sum, data[from + at]);
                }
            }
        }
    });
    sums
}

impl Operation for Reduction {
    const ENGINE: Engine = Engine::Reduction;

    fn run(&self, _: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        if let Some((output, _)) = results(outputs) {
            run(self, context, output);
        }
    }
}
