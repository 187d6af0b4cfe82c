//! Pooling and its gradient, a plane (one n, one c) at a time.

use rayon::prelude::*;
use verdigris_graph::{Node, Pool, PoolBackward, PoolMode, PoolWindows, Uid};
use verdigris_tensor::{DType, Layout};

use crate::elements::{ViewMut, row_major};
use crate::engine::Engine;
use crate::graph_plan::Context;
use crate::operation::{Operation, results};
use crate::real::Real;
use crate::scratch::{Lent, Scratch, made};

/// The elements of x that a window meets along one dim: so many, from the first on, each `step` behind the one before.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Run {
    first: usize,
    step: usize,
    count: usize,
}

impl Run {
    /// The one element of a dim that is not there.
    const ALONE: Run = Run { first: 0, step: 1, count: 1 };

    #[inline(always)]
    fn positions(self) -> impl Iterator<Item = usize> {
        (0..self.count).map(move |i| self.first + i * self.step)
    }
}

/// Where the windows of one dim lie.
struct Windows<'s> {
    /// Of each output.
    runs: Lent<'s, Run>,
    /// The taps of a window, those in padding included; where windows differ in them, each has its elements.
    taps: Option<u64>,
    extent: usize,
}

impl<'s> Windows<'s> {
    fn new(windows: &PoolWindows, i: usize, outs: u64, extent: u64, scratch: &'s Scratch) -> Windows<'s> {
        let runs = scratch.runs.collected(outs as usize, (0..outs).map(|o| met(windows, i, o, extent)));
        let taps = match windows {
            PoolWindows::Sliding { window, .. } | PoolWindows::Fractional { window, .. } => Some(window[i]),
            PoolWindows::Adaptive { .. } => None,
        };
        Windows { runs, taps, extent: extent as usize }
    }

    fn alone(scratch: &'s Scratch) -> Windows<'s> {
        Windows { runs: scratch.runs.collected(1, std::iter::once(Run::ALONE)), taps: Some(1), extent: 1 }
    }

    /// Of each output its elements and its number of taps.
    fn each(&self) -> impl Iterator<Item = (Run, f64)> {
        self.runs.iter().map(|&run| (run, self.taps.map_or(run.count as f64, |taps| taps as f64)))
    }
}

/// The elements of `x` that window `o` meets along spatial dim `i` of `extent` elements.
fn met(windows: &PoolWindows, i: usize, o: u64, extent: u64) -> Run {
    match windows {
        // Only the taps within: a window of much padding is walked no further than the tensor.
        PoolWindows::Sliding { window, strides, dilations, pads_before, .. } => {
            let (first, step) = (o * strides[i], dilations[i]);
            let before = pads_before[i].saturating_sub(first).div_ceil(step);
            let behind = (extent + pads_before[i]).saturating_sub(first).div_ceil(step).min(window[i]);
            match behind.checked_sub(before) {
                None | Some(0) => Run::default(),
                Some(count) => Run { first: (first + before * step - pads_before[i]) as usize, step: step as usize, count: count as usize },
            }
        }
        PoolWindows::Adaptive { .. } => {
            // One behind the other, and none in padding.
            let taps = windows.taps(i, o, extent);
            Run { first: taps.first().map_or(0, |&first| first as usize), step: 1, count: taps.len() }
        }
        // Each plane has its own (`Grid::of_plane`), and a gradient is told by the index.
        PoolWindows::Fractional { .. } => Run::default(),
    }
}

/// The first element of fractional window `o` of so many along a dim, which has `span` elements more than a window; in the arithmetic of `T`.
fn first_of<T: Real>(o: usize, outs: usize, span: usize, sample: T) -> usize {
    if o + 1 == outs {
        return span;
    }
    let number = |n: usize| T::from_f64(n as f64);
    let sample = sample.to_f64();
    let u = T::from_f64(if sample.is_nan() { 0.0 } else { sample.clamp(0.0, 1.0) });
    let step = T::from_f64(span as f64 / (outs - 1) as f64);
    // What is not negative is cut off to its whole part.
    let whole = |x: T| x.to_f64() as usize;
    whole((number(o) + u) * step) - whole(u * step)
}

/// The windows of three spatial dims; missing ones lead and have one position.
struct Grid<'s> {
    dims: [Windows<'s>; 3],
    scratch: &'s Scratch,
}

impl<'s> Grid<'s> {
    /// Of a `y` without elements there are no windows.
    fn new(windows: &PoolWindows, x: &Layout, y: &Layout, scratch: &'s Scratch) -> Grid<'s> {
        let spatial = windows.spatial();
        let dims = [0, 1, 2].map(|i| match (i + spatial).checked_sub(3) {
            None => Windows::alone(scratch),
            Some(i) => Windows::new(windows, i, if y.is_empty() { 0 } else { y.dims()[i + 2] }, x.dims()[i + 2], scratch),
        });
        Grid { dims, scratch }
    }

    /// The windows of one plane: those of all, or where the plane's samples say that they begin.
    fn of_plane<T: Real>(&self, windows: &PoolWindows, samples: Option<&[T]>) -> Option<Grid<'s>> {
        let (PoolWindows::Fractional { window, .. }, Some(samples)) = (windows, samples) else { return None };
        let missing = self.dims.len() - window.len();
        let dims = [0, 1, 2].map(|i| {
            let Windows { runs, taps, extent } = &self.dims[i];
            let Some(own) = i.checked_sub(missing) else { return Windows::alone(self.scratch) };
            let (outs, count) = (runs.len(), window[own] as usize);
            let run = |o: usize| Run { first: first_of(o, outs, extent - count, samples[own]), step: 1, count };
            Windows { runs: self.scratch.runs.collected(outs, (0..outs).map(run)), taps: *taps, extent: *extent }
        });
        Some(Grid { dims, scratch: self.scratch })
    }

    fn x_len(&self) -> usize {
        self.dims.iter().map(|dim| dim.extent).product()
    }

    fn y_len(&self) -> usize {
        self.dims.iter().map(|dim| dim.runs.len()).product()
    }

    /// Visits the windows in row-major order: (which, its number of taps, its elements along each dim). Taps in padding are more than memory
    /// holds elements, and may be more than an integer counts.
    fn for_each(&self, mut visit: impl FnMut(usize, f64, [Run; 3])) {
        let [d, h, w] = &self.dims;
        let mut which = 0;
        for (depth, d_taps) in d.each() {
            for (height, h_taps) in h.each() {
                for (width, w_taps) in w.each() {
                    visit(which, d_taps * h_taps * w_taps, [depth, height, width]);
                    which += 1;
                }
            }
        }
    }

    /// Visits the elements of a window in row-major order.
    #[inline(always)]
    fn elements(&self, [depth, height, width]: [Run; 3], mut visit: impl FnMut(usize)) {
        for d in depth.positions() {
            for h in height.positions() {
                let line = (d * self.dims[1].extent + h) * self.dims[2].extent;
                for w in width.positions() {
                    visit(line + w);
                }
            }
        }
    }

    /// The first greatest element of a window, or the first NaN: (position, value).
    fn greatest<T: Real>(&self, x: &[T], window: [Run; 3]) -> Option<(usize, T)> {
        let mut best: Option<(usize, T)> = None;
        self.elements(window, |at| {
            let value = x[at];
            let wins = match best {
                None => true,
                // What a NaN does not compare with: itself.
                Some((_, best)) => value > best || (is_nan(value) && !is_nan(best)),
            };
            if wins {
                best = Some((at, value));
            }
        });
        best
    }
}

#[expect(clippy::eq_op, reason = "only NaN differs from itself")]
fn is_nan<T: Real>(value: T) -> bool {
    value != value
}

fn forward(op: &Pool, context: &Context<'_>, y: ViewMut<'_>, index: Option<ViewMut<'_>>) {
    if context.tensor(op.x).dtype == DType::F64 {
        forward_in::<f64>(op, context, y, index)
    } else {
        forward_in::<f32>(op, context, y, index)
    }
}

fn forward_in<T: Real>(op: &Pool, context: &Context<'_>, y: ViewMut<'_>, index: Option<ViewMut<'_>>) {
    let x_dtype = context.tensor(op.x).dtype;
    let least = x_dtype.integer_range().map_or(f64::NEG_INFINITY, |(least, _)| least as f64);
    let x = context.view(op.x).load_row_major::<T>(context.scratch);
    let grid = Grid::new(&op.windows, &x.layout, &y.layout, context.scratch);
    let (x_len, y_len) = (grid.x_len(), grid.y_len());
    let planes = y.layout.elements() as usize / y_len;
    let plane = |i: usize| &x.data()[i * x_len..(i + 1) * x_len];
    let samples = op.samples.map(|samples| context.view(samples).load_row_major::<T>(context.scratch));
    let own = |i: usize| {
        let spatial = op.windows.spatial();
        grid.of_plane(&op.windows, samples.as_ref().map(|samples| &samples.data()[i * spatial..(i + 1) * spatial]))
    };
    let order = row_major(&y.layout);
    y.fill::<T>(context.scratch, order, |y| {
        y.par_chunks_mut(y_len.max(1)).enumerate().for_each(|(i, y)| {
            let (x, own) = (plane(i), own(i));
            let grid = own.as_ref().unwrap_or(&grid);
            match op.mode {
                PoolMode::Max => grid.for_each(|which, _, window| {
                    y[which] = grid.greatest(x, window).map_or(T::from_f64(least), |(_, value)| value);
                }),
                PoolMode::Average { count_include_pad } => grid.for_each(|which, taps, window| {
                    let (mut sum, mut count) = (T::default(), 0u64);
                    grid.elements(window, |at| {
                        sum += x[at];
                        count += 1;
                    });
                    let divisor = if count_include_pad { taps } else { count as f64 };
                    y[which] = if count == 0 { T::default() } else { T::from_f64(sum.to_f64() / divisor) };
                }),
            }
        });
    });
    let Some(index) = index else { return };
    let mut positions: Vec<i64> = made(planes * y_len);
    positions.par_chunks_mut(y_len.max(1)).enumerate().for_each(|(i, positions)| {
        let (x, own) = (plane(i), own(i));
        let grid = own.as_ref().unwrap_or(&grid);
        grid.for_each(|which, _, window| positions[which] = grid.greatest(x, window).map_or(-1, |(at, _)| at as i64));
    });
    let (from, dtype) = (row_major(&index.layout), index.dtype);
    index.scatter(from, |offset, stride, to| {
        for (i, to) in to.chunks_exact_mut(dtype.bytes()).enumerate() {
            let position = positions[offset + i * stride];
            match dtype {
                DType::I64 => to.copy_from_slice(&position.to_le_bytes()),
                _ => to.copy_from_slice(&(position as i32).to_le_bytes()),
            }
        }
    });
}

fn backward(op: &PoolBackward, context: &Context<'_>, dx: ViewMut<'_>) {
    let is_f64 = [Some(op.dy), op.x].into_iter().flatten().any(|uid| context.tensor(uid).dtype == DType::F64);
    if is_f64 { backward_in::<f64>(op, context, dx) } else { backward_in::<f32>(op, context, dx) }
}

fn backward_in<T: Real>(op: &PoolBackward, context: &Context<'_>, dx: ViewMut<'_>) {
    let dy = context.view(op.dy).load_row_major::<T>(context.scratch);
    let x = op.x.map(|x| context.view(x).load_row_major::<T>(context.scratch));
    let index = op.index.map(|index| context.view(index));
    let grid = Grid::new(&op.windows, &dx.layout, &dy.layout, context.scratch);
    let (x_len, y_len) = (grid.x_len(), grid.y_len());
    let order = row_major(&dx.layout);
    dx.fill::<T>(context.scratch, order, |dx| {
        dx.par_chunks_mut(x_len.max(1)).enumerate().for_each(|(i, dx)| {
            dx.fill(T::default());
            let dy = &dy.data()[i * y_len..(i + 1) * y_len];
            grid.for_each(|which, taps, window| match op.mode {
                PoolMode::Max => {
                    let winner = match (&x, &index) {
                        (Some(x), _) => grid.greatest(&x.data()[i * x_len..(i + 1) * x_len], window).map(|(at, _)| at),
                        (None, Some(index)) => {
                            let offset = index.layout.offset_of_position((i * y_len + which) as u64).unwrap_or(0);
                            usize::try_from(index.integer(offset as usize)).ok()
                        }
                        (None, None) => None,
                    };
                    if let Some(place) = winner.and_then(|at| dx.get_mut(at)) {
                        *place += dy[which];
                    }
                }
                PoolMode::Average { count_include_pad } => {
                    let count: usize = window.iter().map(|run| run.count).product();
                    let divisor = if count_include_pad { taps } else { count as f64 };
                    let share = T::from_f64(dy[which].to_f64() / divisor);
                    grid.elements(window, |at| dx[at] += share);
                }
            });
        });
    });
}

impl Operation for Pool {
    const ENGINE: Engine = Engine::Pool;

    fn run(&self, _: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        if let Some((output, second)) = results(outputs)
            && !output.layout.is_empty()
        {
            forward(self, context, output, second);
        }
    }
}

impl Operation for PoolBackward {
    const ENGINE: Engine = Engine::Pool;

    fn run(&self, _: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        if let Some((output, _)) = results(outputs)
            && !output.layout.is_empty()
        {
            backward(self, context, output);
        }
    }
}
