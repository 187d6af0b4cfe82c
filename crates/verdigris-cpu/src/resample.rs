//! Resampling, borders and their gradients, a plane (one n, one c) at a time.

use rayon::prelude::*;
use verdigris_graph::{Node, Resample, ResampleBackward, Sampling, Uid};
use verdigris_tensor::{DType, Layout};

use crate::elements::{ViewMut, row_major};
use crate::engine::Engine;
use crate::graph_plan::Context;
use crate::operation::{Operation, results};
use crate::real::Real;

/// For each output along one dim, the elements that it reads and their weights.
type Line = Vec<Vec<(usize, f64)>>;

/// The taps of three spatial dims; missing ones lead and have one output of one element.
struct Grid {
    lines: [Line; 3],
    extents: [usize; 3],
}

impl Grid {
    fn new(sampling: &Sampling, x: &Layout, y: &Layout, double: bool) -> Grid {
        let own = |i: usize| (i + sampling.spatial()).checked_sub(3);
        let line = |i: usize| {
            let Some(own) = own(i) else { return vec![vec![(0, 1.0)]] };
            let (extent, out) = (x.dims()[own + 2], y.dims()[own + 2]);
            let taps = sampling.taps(own, extent, out, double);
            let row = |o| taps.of(o, extent, double).into_iter().map(|(i, weight)| (i as usize, weight)).collect();
            (0..out).map(row).collect()
        };
        Grid { lines: [0, 1, 2].map(line), extents: [0, 1, 2].map(|i| own(i).map_or(1, |own| x.dims()[own + 2] as usize)) }
    }

    fn x_len(&self) -> usize {
        self.extents.iter().product()
    }

    fn y_len(&self) -> usize {
        self.lines.iter().map(Vec::len).product()
    }

    /// Visits the outputs in row-major order: which it is, and its taps along each dim.
    fn for_each(&self, mut visit: impl FnMut(usize, [&[(usize, f64)]; 3])) {
        let mut which = 0;
        for depth in &self.lines[0] {
            for height in &self.lines[1] {
                for width in &self.lines[2] {
                    visit(which, [depth, height, width]);
                    which += 1;
                }
            }
        }
    }

    /// Visits the taps of an output: where it is, and the weight.
    #[inline(always)]
    fn taps<T: Real>(&self, [depth, height, width]: [&[(usize, f64)]; 3], mut visit: impl FnMut(usize, T)) {
        for &(d, of_depth) in depth {
            for &(h, of_height) in height {
                let (line, weight) = ((d * self.extents[1] + h) * self.extents[2], T::from_f64(of_depth * of_height));
                for &(w, of_width) in width {
                    visit(line + w, weight * T::from_f64(of_width));
                }
            }
        }
    }
}

fn forward<T: Real>(op: &Resample, context: &Context<'_>, y: ViewMut<'_>) {
    let x = context.view(op.x).load_row_major::<T>(context.scratch);
    let grid = Grid::new(&op.sampling, &x.layout, &y.layout, size_of::<T>() == 8);
    let (x_len, y_len) = (grid.x_len(), grid.y_len());
    let order = row_major(&y.layout);
    y.fill::<T>(context.scratch, order, |y| {
        y.par_chunks_mut(y_len.max(1)).enumerate().for_each(|(i, y)| {
            let x = &x.data()[i * x_len..(i + 1) * x_len];
            grid.for_each(|which, taps| {
                let mut sum = T::default();
                grid.taps::<T>(taps, |at, weight| sum += weight * x[at]);
                y[which] = sum;
            });
        });
    });
}

/// Elements as they are, byte by byte.
fn moved(op: &Resample, context: &Context<'_>, y: ViewMut<'_>) {
    let x = context.view(op.x);
    let order = row_major(&y.layout);
    // Of each dim what an index adds to the place in `x`, and how many of the positions behind it there are.
    let sampling = &op.sampling;
    let rank = y.layout.rank();
    let mut inner = 1;
    let mut lines: Vec<(usize, Vec<usize>)> = Vec::with_capacity(rank);
    for i in (0..rank).rev() {
        let (extent, out, stride) = (x.layout.dims()[i], y.layout.dims()[i], x.layout.strides()[i] as usize);
        let place = |o: u64| match i.checked_sub(2) {
            None => o as usize,
            // Weights are 1, and the type makes no difference.
            Some(own) => sampling.taps(own, extent, out, false).of(o, extent, false).first().map_or(0, |(i, _)| *i as usize),
        };
        lines.push((inner, (0..out).map(|o| place(o) * stride).collect()));
        inner *= (out as usize).max(1);
    }
    let size = y.dtype.bytes();
    y.scatter(order, |offset, stride, to| {
        for (i, to) in to.chunks_exact_mut(size).enumerate() {
            let position = offset + i * stride;
            let from: usize = lines.iter().map(|(inner, places)| places[position / inner % places.len()]).sum();
            to.copy_from_slice(&x.bytes[from * size..(from + 1) * size]);
        }
    });
}

fn backward<T: Real>(op: &ResampleBackward, context: &Context<'_>, dx: ViewMut<'_>) {
    let dy = context.view(op.dy).load_row_major::<T>(context.scratch);
    let grid = Grid::new(&op.sampling, &dx.layout, &dy.layout, size_of::<T>() == 8);
    let (x_len, y_len) = (grid.x_len(), grid.y_len());
    let order = row_major(&dx.layout);
    dx.fill::<T>(context.scratch, order, |dx| {
        dx.par_chunks_mut(x_len.max(1)).enumerate().for_each(|(i, dx)| {
            dx.fill(T::default());
            let dy = &dy.data()[i * y_len..(i + 1) * y_len];
            grid.for_each(|which, taps| grid.taps::<T>(taps, |at, weight| dx[at] += weight * dy[which]));
        });
    });
}

impl Operation for Resample {
    const ENGINE: Engine = Engine::Resample;

    fn run(&self, _: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        let Some((output, _)) = results(outputs) else { return };
        let dtype = context.tensor(self.x).dtype;
        if self.sampling.moves() && dtype == output.dtype {
            moved(self, context, output);
        } else if dtype == DType::F64 {
            forward::<f64>(self, context, output);
        } else {
            forward::<f32>(self, context, output);
        }
    }
}

impl Operation for ResampleBackward {
    const ENGINE: Engine = Engine::Resample;

    fn run(&self, _: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        let Some((output, _)) = results(outputs) else { return };
        if context.tensor(self.dy).dtype == DType::F64 {
            backward::<f64>(self, context, output);
        } else {
            backward::<f32>(self, context, output);
        }
    }
}
