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
                    PoolWindows::Fractional { window, .. } => {
                        // Without its sample a window is one of two: it begins at the whole part of o · α or behind it, the last one at the end.
                        let span = extents[d] - window[d];
                        let first = if o + 1 == outs[d] { span } else { o * span / (outs[d] - 1) };
                        let end = span.min(first + 1) + window[d];
                        Window { elements: (first..end).collect(), taps: end - first }
                    }
                })
                .collect()
        };
        Windows((0..extents.len()).map(along).collect())
    }

    /// The indices in `x` of all elements that output `o` sees, in row-major order.
    pub(crate) fn elements(&self, o: &[u64]) -> Vec<Vec<u64>> {
        let lists: Vec<&[u64]> = self.0.iter().zip(o).map(|(along, &o)| along[o as usize].elements.as_slice()).collect();
        combined(&lists)
    }

    /// What an average divides by.
    fn count(&self, o: &[u64], seen: usize, count_include_pad: bool) -> f64 {
        let taps: u64 = self.0.iter().zip(o).map(|(along, &o)| along[o as usize].taps).product();
        if count_include_pad { taps as f64 } else { seen as f64 }
    }
}

/// All that take one of each list, the last list's fastest.
fn combined(lists: &[&[u64]]) -> Vec<Vec<u64>> {
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

/// The first element of fractional window `o` of so many, in the arithmetic of `compute`.
fn first_of(o: u64, outs: u64, span: u64, sample: f64, compute: DType) -> u64 {
    if o + 1 == outs {
        return span;
    }
    // A sum, product or quotient of two numbers of f32 that is rounded to f64 and then to f32 is rounded once.
    let rounded = |x: f64| if compute == DType::F64 { x } else { f64::from(x as f32) };
    let u = if sample.is_nan() { 0.0 } else { rounded(sample).clamp(0.0, 1.0) };
    let step = rounded(span as f64 / (outs - 1) as f64);
    (rounded(rounded(o as f64 + u) * step).floor() - rounded(u * step).floor()) as u64
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
    /// Where fractional windows of so many elements begin.
    samples: Option<(Source<'a>, Vec<u64>)>,
    outs: Vec<u64>,
    /// Whether the index is the result, and not the maximum.
    index: bool,
    compute: DType,
}

impl<'a> Pooled<'a> {
    pub(crate) fn new(op: &Pool, x: Source<'a>, samples: Option<Source<'a>>, out: &[u64], index: bool) -> Pooled<'a> {
        let windows = Windows::new(&op.windows, &x.dims()[2..], &out[2..]);
        let samples = match &op.windows {
            PoolWindows::Fractional { window, .. } => samples.map(|samples| (samples, window.clone())),
            PoolWindows::Sliding { .. } | PoolWindows::Adaptive { .. } => None,
        };
        Pooled { mode: op.mode, windows, compute: Pointwise::compute_dtype([x.dtype()]), x, samples, outs: out[2..].to_vec(), index }
    }

    /// The elements of the window of one output; `None` where a sample is not known exactly.
    fn places(&self, index: &[u64]) -> Option<Vec<Vec<u64>>> {
        let Some((samples, window)) = &self.samples else { return Some(self.windows.elements(&index[2..])) };
        let mut lists = Vec::new();
        for (d, &taps) in window.iter().enumerate() {
            let sample = samples.at(&[index[0], index[1], d as u64]);
            if sample.error > 0.0 {
                return None;
            }
            let first = first_of(index[d + 2], self.outs[d], self.x.dims()[d + 2] - taps, sample.value, self.compute);
            lists.push((first..first + taps).collect::<Vec<u64>>());
        }
        Some(combined(&lists.iter().map(Vec::as_slice).collect::<Vec<_>>()))
    }
}

impl Formula for Pooled<'_> {
    fn at(&self, index: &[u64]) -> Bounded {
        let Some(places) = self.places(index) else { return Bounded { value: 0.0, error: f64::INFINITY } };
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
        let samples = self.samples.map(|samples| at.source(samples)).transpose()?;
        at.put(self.y, Pooled::new(self, x.clone(), samples.clone(), out, false))?;
        match self.index {
            Some(index) => at.put(index, Pooled::new(self, x, samples, out, true)),
            None => Ok(()),
        }
    }

    fn data_of(&self, _: &Graph, uid: Uid) -> Data<'_> {
        if self.samples == Some(uid) && self.x != uid { Data::Samples } else { Data::Any(true) }
    }

    fn draw(draft: &mut Draft, _: u64) -> Result<(), Error> {
        // By what has been named so far, not by a draw of its own: graphs without windows are those of their seeds.
        if draft.named() % 4 == 3 { draft.fractional_pool() } else { draft.pool() }
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

    /// Max pooling by fractional windows, and half of the time its gradient.
    fn fractional_pool(&mut self) -> Result<(), Error> {
        let x = self.image(|_| true, &TYPES)?;
        let window: Vec<u64> = x.dims[2..].iter().map(|&extent| 1 + self.random.below(extent.min(3))).collect();
        let out: Vec<u64> = x.dims[2..].iter().zip(&window).map(|(&extent, &taps)| 1 + self.random.below(extent - taps + 1)).collect();
        let windows = PoolWindows::Fractional { window: window.clone(), out: out.clone() };
        let Some(dims) = window_outputs(&windows, &x.dims) else { return Ok(()) };
        let sample_type = self.pick(&[DType::F32, DType::F64, DType::F16, DType::Bf16]);
        let samples = self.input(sample_type, &[dims[0], dims[1], window.len() as u64])?;
        let (name, index_type) = (self.name("fractional"), self.pick(&[DType::I32, DType::I64]));
        let (y, index) = self.builder.fractional_max_pool(&name, x.uid, samples.uid, (&window, &out), index_type)?;
        self.note_read(&[x.uid, samples.uid]);
        self.result(y, &dims, x.dtype, &TYPES)?;
        let index = self.result(index, &dims, index_type, &[])?;
        if self.one_in(2) { self.back_through(index.uid, windows, &x.dims, &dims) } else { Ok(()) }
    }

    /// The gradient of a maximum through its index.
    fn back_through(&mut self, index: Uid, windows: PoolWindows, x_dims: &[u64], out: &[u64]) -> Result<(), Error> {
        let dtype = self.pick(&TYPES);
        let dy = self.value(|value| value.dims == out && value.uid != index, dtype, out)?;
        let back = PoolBackward { mode: PoolMode::Max, windows, dy: dy.uid, x: None, index: Some(index), dx: Uid(0) };
        let name = self.name("unpool");
        let dx = self.builder.pool_backward(&name, back, x_dims)?;
        self.note_read(&[dy.uid, index]);
        self.pointwise_result(dx, x_dims, &[dy.dtype])
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
                if self.one_in(2) { self.back_through(index.uid, windows, &x.dims, &out) } else { Ok(()) }
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
