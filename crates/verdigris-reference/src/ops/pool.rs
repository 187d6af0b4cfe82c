//! Pooling and its gradients: windows as the formulas of `verdigris_graph::ops::pool` lay them.

use verdigris_graph::{Error, Graph, Pointwise, Pool, PoolBackward, PoolMode, PoolWindows, TensorDesc, Uid};
use verdigris_tensor::{DType, Layout};

use crate::fuzz::{Draft, MOST_ELEMENTS, TYPES};
use crate::operation::{Data, Evaluation, GraphError, Operation};
use crate::ops::reduction::{SumInAnyOrder, greatest};
use crate::source::{Formula, Source, advance};
use crate::tolerance::Bounded;

/// The elements of `x` that one output sees along one dim, and the taps of its window with the padding.
pub(crate) struct Window {
    elements: Vec<u64>,
    taps: u64,
}

/// The windows along each spatial dim: `[dim][output]`.
pub(crate) struct Windows(Vec<Vec<Window>>);

impl Windows {
    pub(crate) fn new(windows: &PoolWindows, extents: &[u64], outs: &[u64]) -> Windows {
        let along = |d: usize| {
            (0..outs[d])
                .map(|o| match windows {
                    PoolWindows::Sliding { window, strides, dilations, pads_before, .. } => {
                        let places = (0..window[d]).map(|tap| (o * strides[d] + tap * dilations[d]).checked_sub(pads_before[d]));
                        Window { elements: places.flatten().filter(|&i| i < extents[d]).collect(), taps: window[d] }
                    }
                    PoolWindows::Adaptive { .. } => {
                        let begin = o * extents[d] / outs[d];
                        let end = ((o + 1) * extents[d]).div_ceil(outs[d]);
                        Window { elements: (begin..end).collect(), taps: end - begin }
                    }
                })
                .collect()
        };
        Windows((0..extents.len()).map(along).collect())
    }

    /// The indices in `x` of all elements that output `o` sees, in row-major order.
    pub(crate) fn elements(&self, o: &[u64]) -> Vec<Vec<u64>> {
        let lists: Vec<&[u64]> = self.0.iter().zip(o).map(|(along, &o)| along[o as usize].elements.as_slice()).collect();
        let counts: Vec<u64> = lists.iter().map(|list| list.len() as u64).collect();
        let mut which = vec![0; lists.len()];
        (0..counts.iter().product())
            .map(|_| {
                let element = lists.iter().zip(&which).map(|(list, &i)| list[i as usize]).collect();
                advance(&mut which, &counts);
                element
            })
            .collect()
    }

    /// What an average divides by.
    fn count(&self, o: &[u64], seen: usize, count_include_pad: bool) -> f64 {
        let taps: u64 = self.0.iter().zip(o).map(|(along, &o)| along[o as usize].taps).product();
        if count_include_pad { taps as f64 } else { seen as f64 }
    }
}

/// The row-major position of spatial indices.
pub(crate) fn position(place: &[u64], extents: &[u64]) -> u64 {
    place.iter().zip(extents).fold(0, |position, (i, dim)| position * dim + i)
}

/// Which of the elements wins: the first NaN, else the first of the greatest; −1 of none. The flag says that another one may win.
fn winner(elements: &[Bounded]) -> (Option<usize>, Vec<bool>) {
    if let Some(nan) = elements.iter().position(|x| x.value.is_nan()) {
        let unknown = elements.iter().any(|x| x.error == f64::INFINITY);
        return (Some(nan), elements.iter().enumerate().map(|(i, _)| i == nan || unknown).collect());
    }
    let mut best: Option<usize> = None;
    for (i, x) in elements.iter().enumerate() {
        if best.is_none_or(|best| x.value > elements[best].value) {
            best = Some(i);
        }
    }
    let sure = elements.iter().map(|x| x.value - x.error).fold(f64::NEG_INFINITY, f64::max);
    let may_win = |(i, x): (usize, &Bounded)| {
        // Exact values tie by their order alone.
        let best_is_exact = best.is_some_and(|best| elements[best].error == 0.0);
        Some(i) == best || (!(x.error == 0.0 && best_is_exact) && (x.value + x.error >= sure || x.error == f64::INFINITY))
    };
    (best, elements.iter().enumerate().map(may_win).collect())
}

/// Pooling with what it reads.
pub(crate) struct Pooled<'a> {
    mode: PoolMode,
    windows: Windows,
    x: Source<'a>,
    /// Whether the index is the result, and not the maximum.
    index: bool,
    compute: DType,
}

impl<'a> Pooled<'a> {
    pub(crate) fn new(mode: PoolMode, windows: &PoolWindows, x: Source<'a>, out: &[u64], index: bool) -> Pooled<'a> {
        let windows = Windows::new(windows, &x.dims()[2..], &out[2..]);
        Pooled { mode, windows, compute: Pointwise::compute_dtype([x.dtype()]), x, index }
    }
}

impl Formula for Pooled<'_> {
    fn at(&self, index: &[u64]) -> Bounded {
        let places = self.windows.elements(&index[2..]);
        let elements: Vec<Bounded> = (places.iter())
            .map(|place| {
                let whole: Vec<u64> = index[..2].iter().chain(place).copied().collect();
                self.x.read(self.x.offset(&whole), self.compute)
            })
            .collect();
        match self.mode {
            PoolMode::Max if self.index => {
                let (best, may_win) = winner(&elements);
                let value = best.map_or(-1.0, |best| position(&places[best], &self.x.dims()[2..]) as f64);
                let is_settled = may_win.iter().filter(|&&may| may).count() <= 1;
                Bounded { value, error: if is_settled { 0.0 } else { f64::INFINITY } }
            }
            PoolMode::Max => greatest(elements.into_iter(), f64::NEG_INFINITY),
            PoolMode::Average { count_include_pad } => {
                let count = self.windows.count(&index[2..], elements.len(), count_include_pad);
                if elements.is_empty() {
                    return Bounded::exact(0.0);
                }
                let mut sum = SumInAnyOrder::default();
                elements.into_iter().for_each(|x| sum.add(x));
                sum.finish(self.compute).shared_out(count, self.compute)
            }
        }
    }

    fn compute(&self) -> DType {
        // An index is exact and of its own type.
        if self.index { DType::F64 } else { self.compute }
    }
}

/// The gradient of pooling: all of it, gathered when it is made.
pub(crate) struct PooledBack {
    gradients: Vec<SumInAnyOrder>,
    dims: Vec<u64>,
    compute: DType,
}

impl PooledBack {
    /// `told` is `x` or the index, for a maximum; `out` the dims of `dx`.
    pub(crate) fn new(
        mode: PoolMode,
        windows: &PoolWindows,
        dy: &Source<'_>,
        x: Option<&Source<'_>>,
        index: Option<&Source<'_>>,
        out: &[u64],
    ) -> PooledBack {
        let compute = Pointwise::compute_dtype([dy.dtype()].into_iter().chain(x.map(Source::dtype)));
        let windows = Windows::new(windows, &out[2..], &dy.dims()[2..]);
        let extents = &out[2..];
        let image: u64 = extents.iter().product();
        let mut gradients = vec![SumInAnyOrder::default(); out.iter().product::<u64>() as usize];
        let mut o = vec![0; dy.dims().len()];
        for _ in 0..dy.dims().iter().product() {
            let gradient = dy.read(dy.offset(&o), compute);
            let base = (o[0] * out[1] + o[1]) * image;
            let mut give = |position: u64, gradient: Bounded| gradients[(base + position) as usize].add(gradient);
            let places = windows.elements(&o[2..]);
            let doubtful = Bounded { value: 0.0, error: gradient.value.abs() + gradient.error };
            match (mode, x, index) {
                (PoolMode::Average { count_include_pad }, ..) => {
                    let count = windows.count(&o[2..], places.len(), count_include_pad);
                    let part = gradient.shared_out(count, compute);
                    places.iter().for_each(|place| give(position(place, extents), part));
                }
                (PoolMode::Max, Some(x), _) => {
                    let element = |place: &Vec<u64>| {
                        let whole: Vec<u64> = o[..2].iter().chain(place).copied().collect();
                        x.read(x.offset(&whole), compute)
                    };
                    let elements: Vec<Bounded> = places.iter().map(element).collect();
                    let (best, may_win) = winner(&elements);
                    let is_settled = may_win.iter().filter(|&&may| may).count() <= 1;
                    for (i, place) in places.iter().enumerate() {
                        match (Some(i) == best, is_settled) {
                            (true, true) => give(position(place, extents), gradient),
                            (true, false) => give(position(place, extents), Bounded { error: doubtful.error, ..gradient }),
                            (false, false) if may_win[i] => give(position(place, extents), doubtful),
                            _ => {}
                        }
                    }
                }
                (PoolMode::Max, None, Some(index)) => {
                    let told = index.at(&o);
                    if told.error > 0.0 {
                        // It may be any element of the window.
                        places.iter().for_each(|place| give(position(place, extents), doubtful));
                    } else if told.value >= 0.0 && told.value < image as f64 {
                        give(told.value as u64, gradient);
                    }
                }
                (PoolMode::Max, None, None) => {}
            }
            advance(&mut o, dy.dims());
        }
        PooledBack { gradients, dims: out.to_vec(), compute }
    }
}

impl Formula for PooledBack {
    fn at(&self, index: &[u64]) -> Bounded {
        let sum = self.gradients[position(index, &self.dims) as usize];
        if sum.count() == 0 { Bounded::exact(0.0) } else { sum.finish(self.compute) }
    }

    fn compute(&self) -> DType {
        self.compute
    }
}

impl Operation for Pool {
    const DRAWS: u64 = 1;

    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
        let (x, out) = (at.source(self.x)?, at.dims(self.y)?);
        at.put(self.y, Pooled::new(self.mode, &self.windows, x.clone(), out, false))?;
        match self.index {
            Some(index) => at.put(index, Pooled::new(self.mode, &self.windows, x, out, true)),
            None => Ok(()),
        }
    }

    fn draw(draft: &mut Draft, _: u64) -> Result<(), Error> {
        draft.pool()
    }
}

impl Operation for PoolBackward {
    const DRAWS: u64 = 1;

    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
        let dy = at.source(self.dy)?;
        let x = self.x.map(|x| at.source(x)).transpose()?;
        let index = self.index.map(|index| at.source(index)).transpose()?;
        let formula = PooledBack::new(self.mode, &self.windows, &dy, x.as_ref(), index.as_ref(), at.dims(self.dx)?);
        at.put(self.dx, formula)
    }

    fn data_of(&self, _: &Graph, uid: Uid) -> Data<'_> {
        if self.index == Some(uid) { Data::Positions(self) } else { Data::Any(true) }
    }

    fn draw(draft: &mut Draft, _: u64) -> Result<(), Error> {
        draft.pool_backward()
    }
}

impl Draft {
    fn windows(&mut self, extents: &[u64]) -> PoolWindows {
        if self.one_in(3) {
            return PoolWindows::Adaptive { out: extents.iter().map(|&extent| 1 + self.random.below(extent + 1)).collect() };
        }
        let window: Vec<u64> = extents.iter().map(|&extent| 1 + self.random.below(extent.min(3))).collect();
        let dilations: Vec<u64> =
            window.iter().zip(extents).map(|(&taps, &extent)| if (taps - 1) * 2 < extent { 1 + self.random.below(2) } else { 1 }).collect();
        let mut pads = || window.iter().zip(&dilations).map(|(taps, dilation)| self.random.below((taps - 1) * dilation + 1)).collect();
        let (pads_before, pads_after) = (pads(), pads());
        let strides = window.iter().map(|_| 1 + self.random.below(3)).collect();
        PoolWindows::Sliding { window, strides, dilations, pads_before, pads_after }
    }

    fn pool(&mut self) -> Result<(), Error> {
        let x = self.image(|_| true, &TYPES)?;
        let windows = self.windows(&x.dims[2..]);
        let Some(out) = window_outputs(&windows, &x.dims) else { return Ok(()) };
        let name = self.name("pool");
        let compute = if x.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        match self.below(3) {
            0 => {
                let mode = PoolMode::Average { count_include_pad: self.one_in(2) };
                let y = self.builder.pool(&name, mode, windows, x.uid)?;
                self.note_read(&[x.uid]);
                self.result(y, &out, compute, &TYPES).map(drop)
            }
            1 => {
                let y = self.builder.pool(&name, PoolMode::Max, windows, x.uid)?;
                self.note_read(&[x.uid]);
                self.result(y, &out, x.dtype, &TYPES).map(drop)
            }
            _ => {
                let index_type = self.pick(&[DType::I32, DType::I64]);
                let (y, index) = self.builder.max_pool_with_index(&name, windows.clone(), x.uid, index_type)?;
                self.note_read(&[x.uid]);
                self.result(y, &out, x.dtype, &TYPES)?;
                let index = self.result(index, &out, index_type, &[])?;
                if self.one_in(2) {
                    let dtype = self.pick(&TYPES);
                    let dy = self.value(|value| value.dims == out && value.uid != index.uid, dtype, &out)?;
                    let back = PoolBackward { mode: PoolMode::Max, windows, dy: dy.uid, x: None, index: Some(index.uid), dx: Uid(0) };
                    let name = self.name("unpool");
                    let dx = self.builder.pool_backward(&name, back, &x.dims)?;
                    self.note_read(&[dy.uid, index.uid]);
                    self.pointwise_result(dx, &x.dims, &[dy.dtype])?;
                }
                Ok(())
            }
        }
    }

    fn pool_backward(&mut self) -> Result<(), Error> {
        let x = self.image(|_| true, &TYPES)?;
        let windows = self.windows(&x.dims[2..]);
        let Some(out) = window_outputs(&windows, &x.dims) else { return Ok(()) };
        let dtype = self.pick(&TYPES);
        let dy = self.value(|value| value.dims == out, dtype, &out)?;
        let mut back = PoolBackward { mode: PoolMode::Max, windows, dy: dy.uid, x: None, index: None, dx: Uid(0) };
        let mut read = vec![dy.uid];
        let mut types = vec![dy.dtype];
        match self.below(3) {
            0 => back.mode = PoolMode::Average { count_include_pad: self.one_in(2) },
            1 => {
                back.x = Some(x.uid);
                read.push(x.uid);
                types.push(x.dtype);
            }
            _ => {
                let index_type = self.pick(&[DType::I32, DType::I64]);
                let index = self.input(index_type, &out)?;
                // Each place holds one index, which a repeated one would not be for every window.
                back.index = Some(index.uid);
                let layout = self.layout(&out, false)?;
                self.builder.store_as(index.uid, "index", index_type, layout)?;
            }
        }
        let name = self.name("unpool");
        let dx = self.builder.pool_backward(&name, back, &x.dims)?;
        self.note_read(&read);
        self.pointwise_result(dx, &x.dims, &types)
    }
}

/// The dims of `y` under windows that fit; `None` if they do not.
fn window_outputs(windows: &PoolWindows, x_dims: &[u64]) -> Option<Vec<u64>> {
    let described = TensorDesc::new(Uid(0), "x", DType::F32, Layout::row_major(x_dims).ok()?);
    let dims = windows.infer("pool", &described).ok()?;
    (dims.iter().product::<u64>() <= MOST_ELEMENTS).then_some(dims)
}
