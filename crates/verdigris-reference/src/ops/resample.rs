//! Resampling, borders and their gradients: taps and weights as the formulas of `verdigris_graph::ops::resample` lay them, in plain f32 or f64.

use verdigris_graph::{Border, Error, Filter, Pointwise, Resample, ResampleBackward, Sampling};
use verdigris_tensor::DType;

use crate::fuzz::{Draft, MOST_ELEMENTS, TYPES};
use crate::operation::{Evaluation, GraphError, Operation};
use crate::ops::reduction::SumInAnyOrder;
use crate::source::{Formula, Source, advance};
use crate::tolerance::Bounded;

/// An element that is read, and its weight.
type Tap = (u64, f64);

/// The weights of the cubic convolution around a place that lies `t` behind the second of four elements.
macro_rules! cubic {
    ($t:expr, $float:ty) => {{
        let (a, t): ($float, $float) = (-0.75, $t);
        let outer = |s: $float| ((a * s - 5.0 * a) * s + 8.0 * a) * s - 4.0 * a;
        let inner = |s: $float| ((a + 2.0) * s - (a + 3.0)) * s * s + 1.0;
        let u = 1.0 - t;
        [outer(t + 1.0), inner(t), inner(u), outer(u + 1.0)]
    }};
}

/// The place of output `o` in `x`, in elements.
macro_rules! place {
    ($scale:expr, $o:expr, $aligned:expr) => {
        if $aligned { $scale * $o } else { $scale * ($o + 0.5) - 0.5 }
    };
}

fn filtered(filter: Filter, factor: Option<f64>, extent: u64, out: u64, o: u64, double: bool) -> Vec<Tap> {
    let aligned = matches!(filter, Filter::Linear { align_corners: true } | Filter::Cubic { align_corners: true });
    let narrow = match (aligned, factor) {
        (true, _) if out > 1 => (extent - 1) as f32 / (out - 1) as f32,
        (true, _) => 0.0,
        (false, Some(factor)) => (1.0 / factor) as f32,
        (false, None) => extent as f32 / out as f32,
    };
    let wide = match (aligned, factor) {
        (true, _) if out > 1 => (extent - 1) as f64 / (out - 1) as f64,
        (true, _) => 0.0,
        (false, Some(factor)) => 1.0 / factor,
        (false, None) => extent as f64 / out as f64,
    };
    let last = extent as i64 - 1;
    // Taps that meet are one.
    let mut taps: Vec<Tap> = Vec::new();
    let mut put = |i: i64, weight: f64| {
        let i = i.clamp(0, last) as u64;
        match taps.iter_mut().find(|tap| tap.0 == i) {
            Some(tap) if double => tap.1 += weight,
            Some(tap) => tap.1 = f64::from(tap.1 as f32 + weight as f32),
            None => taps.push((i, weight)),
        }
    };
    match filter {
        Filter::Nearest => put((o as f32 * narrow).floor() as i64, 1.0),
        Filter::NearestExact => put(((o as f32 + 0.5) * narrow).floor() as i64, 1.0),
        Filter::Linear { .. } if double => {
            let at: f64 = place!(wide, o as f64, aligned).max(0.0);
            let t = at - at.floor();
            put(at.floor() as i64, 1.0 - t);
            put(at.floor() as i64 + 1, t);
        }
        Filter::Linear { .. } => {
            let at: f32 = place!(narrow, o as f32, aligned).max(0.0);
            let t = at - at.floor();
            put(at.floor() as i64, f64::from(1.0 - t));
            put(at.floor() as i64 + 1, f64::from(t));
        }
        Filter::Cubic { .. } if double => {
            let at: f64 = place!(wide, o as f64, aligned);
            let weights = cubic!(at - at.floor(), f64);
            (0i64..).zip(weights).for_each(|(k, weight)| put(at.floor() as i64 - 1 + k, weight));
        }
        Filter::Cubic { .. } => {
            let at: f32 = place!(narrow, o as f32, aligned);
            let weights = cubic!(at - at.floor(), f32);
            (0i64..).zip(weights).for_each(|(k, weight)| put(at.floor() as i64 - 1 + k, f64::from(weight)));
        }
    }
    taps.retain(|tap| tap.1 != 0.0);
    taps
}

/// The element that a place in a border shows: a walk from element to element.
fn bordered(border: Border, extent: u64, before: i64, o: u64) -> Vec<Tap> {
    let (mut at, end) = (o as i64 - before, extent as i64);
    match border {
        Border::Reflect => {
            while at < 0 || at >= end {
                at = if at < 0 { -at } else { 2 * end - 2 - at };
            }
        }
        Border::Replicate => at = at.max(0).min(end - 1),
        Border::Circular => {
            while at < 0 {
                at += end;
            }
            while at >= end {
                at -= end;
            }
        }
    }
    vec![(at as u64, 1.0)]
}

/// The taps of each output along each spatial dim: `[dim][output]`.
struct Grid(Vec<Vec<Vec<Tap>>>);

impl Grid {
    fn new(sampling: &Sampling, extents: &[u64], outs: &[u64], double: bool) -> Grid {
        let along = |d: usize| {
            let taps = |o| match sampling {
                Sampling::Interpolate { filter, factors, .. } => {
                    filtered(*filter, factors.get(d).map(|factor| factor.0), extents[d], outs[d], o, double)
                }
                Sampling::Pad { border, before, .. } => bordered(*border, extents[d], before[d], o),
            };
            (0..outs[d]).map(taps).collect()
        };
        Grid((0..extents.len()).map(along).collect())
    }

    /// The taps of an output: places in `x` and weights.
    fn taps(&self, o: &[u64]) -> Vec<(Vec<u64>, f64)> {
        let mut all = vec![(Vec::new(), 1.0)];
        for (along, &o) in self.0.iter().zip(o) {
            let taps = &along[o as usize];
            let longer = |(place, weight): &(Vec<u64>, f64)| -> Vec<(Vec<u64>, f64)> {
                taps.iter().map(|&(i, own)| (place.iter().copied().chain([i]).collect(), weight * own)).collect()
            };
            all = all.iter().flat_map(longer).collect();
        }
        all
    }
}

/// A term of a sum: products with a weight for each dim are rounded once for each.
fn term(x: Bounded, weight: f64, compute: DType) -> Bounded {
    if weight == 1.0 {
        return x;
    }
    let scaled = x.scaled(weight, compute);
    // Weights of up to three dims, each a product more.
    Bounded::new(scaled.value, 3.0 * (scaled.error - x.error * weight.abs()).max(0.0) + x.error * weight.abs(), compute)
}

/// Resampling with what it reads.
pub(crate) struct Resampled<'a> {
    grid: Grid,
    x: Source<'a>,
    /// The result has the type of `x` and holds its elements.
    moves: bool,
    compute: DType,
}

impl Formula for Resampled<'_> {
    fn at(&self, index: &[u64]) -> Bounded {
        let mut sum = SumInAnyOrder::default();
        for (place, weight) in self.grid.taps(&index[2..]) {
            let whole: Vec<u64> = index[..2].iter().copied().chain(place).collect();
            if self.moves {
                return self.x.at(&whole);
            }
            sum.add(term(self.x.read(self.x.offset(&whole), self.compute), weight, self.compute));
        }
        sum.finish(self.compute)
    }

    fn compute(&self) -> DType {
        if self.moves { self.x.dtype() } else { self.compute }
    }
}

/// The gradient: all of it, scattered when it is made.
pub(crate) struct ResampledBack {
    gradients: Vec<SumInAnyOrder>,
    dims: Vec<u64>,
    compute: DType,
}

impl ResampledBack {
    fn new(sampling: &Sampling, dy: &Source<'_>, out: &[u64]) -> ResampledBack {
        let compute = Pointwise::compute_dtype([dy.dtype()]);
        let grid = Grid::new(sampling, &out[2..], &dy.dims()[2..], compute == DType::F64);
        let mut gradients = vec![SumInAnyOrder::default(); out.iter().product::<u64>() as usize];
        let mut o = vec![0; dy.dims().len()];
        for _ in 0..dy.dims().iter().product() {
            let gradient = dy.read(dy.offset(&o), compute);
            for (place, weight) in grid.taps(&o[2..]) {
                let at = o[..2].iter().chain(&place).zip(out).fold(0, |position, (i, dim)| position * dim + i);
                gradients[at as usize].add(term(gradient, weight, compute));
            }
            advance(&mut o, dy.dims());
        }
        ResampledBack { gradients, dims: out.to_vec(), compute }
    }
}

impl Formula for ResampledBack {
    fn at(&self, index: &[u64]) -> Bounded {
        let at = index.iter().zip(&self.dims).fold(0, |position, (i, dim)| position * dim + i);
        let sum = self.gradients[at as usize];
        if sum.count() == 0 { Bounded::exact(0.0) } else { sum.finish(self.compute) }
    }

    fn compute(&self) -> DType {
        self.compute
    }
}

impl Operation for Resample {
    const DRAWS: u64 = 1;

    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
        let (x, y) = (at.source(self.x)?, at.described(self.y)?);
        let compute = Pointwise::compute_dtype([x.dtype()]);
        let grid = Grid::new(&self.sampling, &x.dims()[2..], &y.layout.dims()[2..], compute == DType::F64);
        let moves = self.sampling.moves() && x.dtype() == y.dtype;
        at.put(self.y, Resampled { grid, x, moves, compute })
    }

    fn draw(draft: &mut Draft, _: u64) -> Result<(), Error> {
        let x = draft.image(|_| true, &TYPES)?;
        let Some((sampling, out)) = draft.sampling(&x.dims) else { return Ok(()) };
        let name = draft.name("resample");
        let dtype = if sampling.moves() { x.dtype } else { Pointwise::compute_dtype([x.dtype]) };
        let y = draft.builder.resample(&name, sampling, x.uid)?;
        draft.note_read(&[x.uid]);
        draft.result(y, &out, dtype, &TYPES).map(drop)
    }
}

impl Operation for ResampleBackward {
    const DRAWS: u64 = 1;

    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
        let dy = at.source(self.dy)?;
        let formula = ResampledBack::new(&self.sampling, &dy, at.dims(self.dx)?);
        at.put(self.dx, formula)
    }

    fn draw(draft: &mut Draft, _: u64) -> Result<(), Error> {
        let x = draft.image(|_| true, &TYPES)?;
        let Some((sampling, out)) = draft.sampling(&x.dims) else { return Ok(()) };
        let dtype = draft.pick(&TYPES);
        let dy = draft.value(|value| value.dims == out, dtype, &out)?;
        let name = draft.name("resample back");
        let dx = draft.builder.resample_backward(&name, sampling, dy.uid, &x.dims)?;
        draft.note_read(&[dy.uid]);
        draft.pointwise_result(dx, &x.dims, &[dy.dtype])
    }
}

impl Draft {
    /// How to sample a tensor, and the dims that come of it; `None` where they would be too large.
    fn sampling(&mut self, dims: &[u64]) -> Option<(Sampling, Vec<u64>)> {
        let extents = &dims[2..];
        let (sampling, out): (Sampling, Vec<u64>) = if self.one_in(3) {
            let border = self.pick(&[Border::Reflect, Border::Replicate, Border::Circular]);
            let mut side = |extent: u64| {
                let most = if border == Border::Reflect { extent - 1 } else { extent };
                self.random.below(most + 1) as i64 - i64::from(border != Border::Circular && most > 1 && self.random.below(4) == 0)
            };
            let before: Vec<i64> = extents.iter().map(|&extent| side(extent)).collect();
            let after: Vec<i64> = extents.iter().map(|&extent| side(extent)).collect();
            let out = (0..extents.len()).map(|i| (extents[i] as i64 + before[i] + after[i]).max(0) as u64).collect();
            (Sampling::Pad { border, before, after }, out)
        } else {
            let align_corners = self.one_in(2);
            let filter =
                self.pick(&[Filter::Nearest, Filter::NearestExact, Filter::Linear { align_corners }, Filter::Cubic { align_corners }]);
            let out: Vec<u64> = extents.iter().map(|&extent| 1 + self.random.below(2 * extent + 1)).collect();
            let factors = if self.one_in(3) {
                let near = |(&out, &extent): (&u64, &u64)| verdigris_graph::Real((out as f64 + 0.4) / extent as f64);
                out.iter().zip(extents).map(near).collect()
            } else {
                Vec::new()
            };
            (Sampling::Interpolate { filter, out: out.clone(), factors }, out)
        };
        let whole = [&dims[..2], &out].concat();
        (whole.iter().product::<u64>() <= MOST_ELEMENTS && !whole.contains(&0)).then_some((sampling, whole))
    }
}
