//! Resampling, borders and their gradients, a plane (one n, one c) at a time.

use rayon::prelude::*;
use verdigris_graph::{Node, Resample, ResampleBackward, Sampling, Uid};
use verdigris_tensor::{DType, Layout};

use crate::elements::{ViewMut, row_major};
use crate::engine::Engine;
use crate::graph_plan::Context;
use crate::operation::{Operation, results};
use crate::real::Real;
use crate::scratch::{Lent, Scratch};

/// For each output along one dim, the elements that it reads and their weights.
struct Line<'s> {
    /// Of each output where its taps begin, and at last their number.
    starts: Lent<'s, usize>,
    places: Lent<'s, usize>,
    weights: Lent<'s, f64>,
}

/// Places and weights of an output along one dim.
type Reads<'l> = (&'l [usize], &'l [f64]);

impl<'s> Line<'s> {
    fn new(outs: u64, taps: impl Fn(u64) -> Vec<(u64, f64)>, scratch: &'s Scratch) -> Line<'s> {
        let mut starts = scratch.places.lend(outs as usize + 1);
        let mut count = 0;
        for (start, o) in starts.iter_mut().zip(0..) {
            *start = count;
            count += if o < outs { taps(o).len() } else { 0 };
        }
        let places = scratch.places.collected(count, (0..outs).flat_map(&taps).map(|(place, _)| place as usize));
        let weights = scratch.f64.collected(count, (0..outs).flat_map(&taps).map(|(_, weight)| weight));
        Line { starts, places, weights }
    }

    fn outs(&self) -> usize {
        self.starts.len() - 1
    }

    /// Of each output in its order.
    fn reads(&self) -> impl Iterator<Item = Reads<'_>> {
        self.starts.windows(2).map(|ends| (&self.places[ends[0]..ends[1]], &self.weights[ends[0]..ends[1]]))
    }
}

/// The taps of three spatial dims; missing ones lead and have one output of one element.
struct Grid<'s> {
    lines: [Line<'s>; 3],
    extents: [usize; 3],
}

impl<'s> Grid<'s> {
    fn new(sampling: &Sampling, x: &Layout, y: &Layout, double: bool, scratch: &'s Scratch) -> Grid<'s> {
        let own = |i: usize| (i + sampling.spatial()).checked_sub(3);
        let line = |i: usize| {
            let Some(own) = own(i) else { return Line::new(1, |_| vec![(0, 1.0)], scratch) };
            let (extent, out) = (x.dims()[own + 2], y.dims()[own + 2]);
            let taps = sampling.taps(own, extent, out, double);
            // A y without elements has no outputs.
            Line::new(if y.is_empty() { 0 } else { out }, |o| taps.of(o, extent, double), scratch)
        };
        Grid { lines: [0, 1, 2].map(line), extents: [0, 1, 2].map(|i| own(i).map_or(1, |own| x.dims()[own + 2] as usize)) }
    }

    fn x_len(&self) -> usize {
        self.extents.iter().product()
    }

    fn y_len(&self) -> usize {
        self.lines.iter().map(Line::outs).product()
    }

    /// Visits the outputs in row-major order: which it is, and its taps along each dim.
    fn for_each(&self, mut visit: impl FnMut(usize, [Reads<'_>; 3])) {
        let mut which = 0;
        for depth in self.lines[0].reads() {
            for height in self.lines[1].reads() {
                for width in self.lines[2].reads() {
                    visit(which, [depth, height, width]);
                    which += 1;
                }
            }
        }
    }

    /// Visits the taps of an output: where it is, and the weight.
    #[inline(always)]
    fn taps<T: Real>(&self, [depth, height, width]: [Reads<'_>; 3], mut visit: impl FnMut(usize, T)) {
        for (d, of_depth) in depth.0.iter().zip(depth.1) {
            for (h, of_height) in height.0.iter().zip(height.1) {
                let (line, weight) = ((d * self.extents[1] + h) * self.extents[2], T::from_f64(of_depth * of_height));
                for (w, &of_width) in width.0.iter().zip(width.1) {
                    visit(line + w, weight * T::from_f64(of_width));
                }
            }
        }
    }
}

fn forward<T: Real>(op: &Resample, context: &Context<'_>, y: ViewMut<'_>) {
    let x = context.view(op.x).load_row_major::<T>(context.scratch);
    let grid = Grid::new(&op.sampling, &x.layout, &y.layout, size_of::<T>() == 8, context.scratch);
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
    let mut lines: Vec<(usize, Lent<'_, usize>)> = Vec::with_capacity(rank);
    for i in (0..rank).rev() {
        let (extent, out, stride) = (x.layout.dims()[i], y.layout.dims()[i], x.layout.strides()[i] as usize);
        let place = |o: u64| match i.checked_sub(2) {
            None => o as usize,
            // Weights are 1, and the type makes no difference.
            Some(own) => sampling.taps(own, extent, out, false).of(o, extent, false).first().map_or(0, |(i, _)| *i as usize),
        };
        lines.push((inner, context.scratch.places.collected(out as usize, (0..out).map(|o| place(o) * stride))));
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
    let grid = Grid::new(&op.sampling, &dx.layout, &dy.layout, size_of::<T>() == 8, context.scratch);
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
        let Some((output, _)) = results(outputs).filter(|(output, _)| !output.layout.is_empty()) else { return };
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
        let Some((output, _)) = results(outputs).filter(|(output, _)| !output.layout.is_empty()) else { return };
        if context.tensor(self.dy).dtype == DType::F64 {
            backward::<f64>(self, context, output);
        } else {
            backward::<f32>(self, context, output);
        }
    }
}
