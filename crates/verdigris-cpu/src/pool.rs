//! Pooling and its gradient, a plane (one n, one c) at a time.

use rayon::prelude::*;
use verdigris_graph::{Node, Pool, PoolBackward, PoolMode, PoolWindows, Uid};
use verdigris_tensor::{DType, Layout};

use crate::elements::{ViewMut, row_major};
use crate::engine::Engine;
use crate::graph_plan::Context;
use crate::operation::{Operation, results};
use crate::real::Real;
use crate::scratch::made;

/// Where the windows of one dim lie.
struct Windows {
    /// For each output, the positions in x that its taps meet.
    positions: Vec<Vec<usize>>,
    /// For each output, its taps, those in padding included.
    taps: Vec<usize>,
    extent: usize,
}

/// The elements of `x` that window `o` meets along spatial dim `i` of `extent` elements, and how many taps it has, in padding or not.
fn met(windows: &PoolWindows, i: usize, o: u64, extent: u64) -> (Vec<usize>, usize) {
    match windows {
        // Only the taps within: a window of much padding is walked no further than the tensor.
        PoolWindows::Sliding { window, strides, dilations, pads_before, .. } => {
            let (first, step) = (o * strides[i], dilations[i]);
            let before = pads_before[i].saturating_sub(first).div_ceil(step);
            let behind = (extent + pads_before[i]).saturating_sub(first).div_ceil(step).min(window[i]);
            ((before..behind).map(|tap| (first + tap * step - pads_before[i]) as usize).collect(), window[i] as usize)
        }
        PoolWindows::Adaptive { .. } => {
            let taps = windows.taps(i, o, extent);
            (taps.iter().map(|&tap| tap as usize).collect(), taps.len())
        }
        // Each plane has its own (`Grid::of_plane`), and a gradient is told by the index.
        PoolWindows::Fractional { window, .. } => (Vec::new(), window[i] as usize),
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
struct Grid {
    dims: [Windows; 3],
}

impl Grid {
    fn new(windows: &PoolWindows, x: &Layout, y: &Layout) -> Grid {
        let spatial = windows.spatial();
        let dims = [0, 1, 2].map(|i| {
            let Some(i) = (i + spatial).checked_sub(3) else {
                return Windows { positions: vec![vec![0]], taps: vec![1], extent: 1 };
            };
            let extent = x.dims()[i + 2];
            let (positions, taps) = (0..y.dims()[i + 2]).map(|o| met(windows, i, o, extent)).unzip();
            Windows { positions, taps, extent: extent as usize }
        });
        Grid { dims }
    }

    /// The windows of one plane: those of all, or where the plane's samples say that they begin.
    fn of_plane<T: Real>(&self, windows: &PoolWindows, samples: Option<&[T]>) -> Option<Grid> {
        let (PoolWindows::Fractional { window, .. }, Some(samples)) = (windows, samples) else { return None };
        let missing = self.dims.len() - window.len();
        let dims = [0, 1, 2].map(|i| {
            let Windows { taps, extent, .. } = &self.dims[i];
            let positions = match i.checked_sub(missing) {
                None => vec![vec![0]],
                Some(own) => {
                    let many = window[own] as usize;
                    let first = |o: usize| first_of(o, taps.len(), extent - many, samples[own]);
                    (0..taps.len()).map(|o| (first(o)..first(o) + many).collect()).collect()
                }
            };
            Windows { positions, taps: taps.clone(), extent: *extent }
        });
        Some(Grid { dims })
    }

    fn x_len(&self) -> usize {
        self.dims.iter().map(|dim| dim.extent).product()
    }

    fn y_len(&self) -> usize {
        self.dims.iter().map(|dim| dim.taps.len()).product()
    }

    /// Visits the windows in row-major order: (which, its number of taps, the three lists of positions). Taps in padding are more than memory
    /// holds elements, and may be more than an integer counts.
    fn for_each(&self, mut visit: impl FnMut(usize, f64, [&[usize]; 3])) {
        let [d, h, w] = &self.dims;
        let mut which = 0;
        for (d_positions, d_taps) in d.positions.iter().zip(&d.taps) {
            for (h_positions, h_taps) in h.positions.iter().zip(&h.taps) {
                for (w_positions, w_taps) in w.positions.iter().zip(&w.taps) {
                    visit(which, *d_taps as f64 * *h_taps as f64 * *w_taps as f64, [d_positions, h_positions, w_positions]);
                    which += 1;
                }
            }
        }
    }

    /// Visits the elements of a window in row-major order.
    #[inline(always)]
    fn elements(&self, [d, h, w]: [&[usize]; 3], mut visit: impl FnMut(usize)) {
        for &d in d {
            for &h in h {
                let line = (d * self.dims[1].extent + h) * self.dims[2].extent;
                for &w in w {
                    visit(line + w);
                }
            }
        }
    }

    /// The first greatest element of a window, or the first NaN: (position, value).
    fn greatest<T: Real>(&self, x: &[T], window: [&[usize]; 3]) -> Option<(usize, T)> {
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
    let grid = Grid::new(&op.windows, &x.layout, &y.layout);
    let (x_len, y_len) = (grid.x_len(), grid.y_len());
    let planes = if y.layout.is_empty() { 0 } else { y.layout.elements() as usize / y_len };
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
    let grid = Grid::new(&op.windows, &dx.layout, &dy.layout);
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
                    let count: usize = window.iter().map(|positions| positions.len()).product();
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
        if let Some((output, second)) = results(outputs) {
            forward(self, context, output, second);
        }
    }
}

impl Operation for PoolBackward {
    const ENGINE: Engine = Engine::Pool;

    fn run(&self, _: &[Node], context: &Context<'_>, outputs: Vec<(Uid, ViewMut<'_>)>) {
        if let Some((output, _)) = results(outputs) {
            backward(self, context, output);
        }
    }
}
