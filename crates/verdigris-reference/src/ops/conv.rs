//! Convolution and its gradients: one element at a time, by the formulas of `verdigris_graph::ops::conv` as they stand.

use verdigris_graph::{Conv, ConvDirection, ConvMode, Error, Graph, Precision, Uid};
use verdigris_tensor::{DType, Layout};

use crate::fuzz::{Draft, MOST_ELEMENTS, MOST_PRODUCTS, TYPES};
use crate::operation::{Data, Evaluation, GraphError, Operation};
use crate::ops::matmul::SumOfBounded;
use crate::source::{Formula, Source};
use crate::tolerance::Bounded;

/// A convolution with what it reads: `x` and `w`, `y` and `w`, or `x` and `y`. One and two spatial dims are three of which the first have
/// one element.
pub(crate) struct Convolved<'a> {
    conv: Conv,
    left: Source<'a>,
    right: Source<'a>,
    is_finite: bool,
    /// Extents of the tensor that an index runs over, `[d, h, w]` of each.
    x: [u64; 3],
    filter: [u64; 3],
    y: [u64; 3],
    /// Images, and channels and filters in one group.
    images: u64,
    channels: u64,
    filters: u64,
}

/// Whether an infinity or a NaN in an operand may reach elements that do not depend on it, beyond those whose windows meet padding: what
/// `verdigris_graph::ops::conv` leaves to the engine.
pub(crate) fn spreads(conv: &Conv) -> bool {
    match conv.direction {
        ConvDirection::Fprop => conv.groups > 1,
        ConvDirection::Dgrad => conv.groups > 1 || conv.strides.iter().chain(&conv.dilations).any(|&step| step > 1),
        // Over the taps that do not meet it, where y has few channels.
        ConvDirection::Wgrad => true,
    }
}

/// The step of the last spatial dim.
fn step_along_row(strides: &[u64]) -> u64 {
    strides.last().copied().unwrap_or(0)
}

/// Three numbers of which the last are given; the first ones are `fill`.
fn three(list: &[u64], fill: u64) -> [u64; 3] {
    let mut all = [fill; 3];
    all[3 - list.len()..].copy_from_slice(list);
    all
}

impl<'a> Convolved<'a> {
    /// `left` and `right` are what [`Conv::operands`] names, in its order; `out` the dims of what is written.
    pub(crate) fn new(conv: &Conv, left: Source<'a>, right: Source<'a>, out: &[u64]) -> Convolved<'a> {
        let (l, r) = (left.dims(), right.dims());
        let (x, w, y) = match conv.direction {
            ConvDirection::Fprop => (l, r, out),
            ConvDirection::Dgrad => (out, r, l),
            ConvDirection::Wgrad => (l, out, r),
        };
        let is_finite = left.is_finite() && right.is_finite();
        let mut conv = conv.clone();
        for list in [&mut conv.pads_before, &mut conv.pads_after] {
            *list = three(list, 0).to_vec();
        }
        for list in [&mut conv.strides, &mut conv.dilations] {
            *list = three(list, 1).to_vec();
        }
        Convolved {
            x: three(&x[2..], 1),
            filter: three(&w[2..], 1),
            y: three(&y[2..], 1),
            images: x[0],
            channels: w[1],
            filters: w[0] / conv.groups,
            is_finite,
            conv,
            left,
            right,
        }
    }

    /// The element of `x` that output `o` meets with tap `f` along dim `d`, or `None` in the padding.
    fn met(&self, d: usize, o: u64, f: u64) -> Option<u64> {
        let padded = o * self.conv.strides[d] + f * self.conv.dilations[d];
        padded.checked_sub(self.conv.pads_before[d]).filter(|&i| i < self.x[d])
    }

    /// The place in `w` of tap `f` along dim `d`.
    fn tap(&self, d: usize, f: u64) -> u64 {
        match self.conv.mode {
            ConvMode::CrossCorrelation => f,
            ConvMode::Convolution => self.filter[d] - 1 - f,
        }
    }

    /// The output that meets element `i` of `x` with tap `f` along dim `d`.
    fn meets(&self, d: usize, i: u64, f: u64) -> Option<u64> {
        let distance = (i + self.conv.pads_before[d]).checked_sub(f * self.conv.dilations[d])?;
        let o = distance / self.conv.strides[d];
        (distance.is_multiple_of(self.conv.strides[d]) && o < self.y[d]).then_some(o)
    }

    /// Whether element `i` of `x` meets tap `f` along dim `d` at a place between or beyond the outputs, and none of them.
    fn meets_beyond(&self, d: usize, i: u64, f: u64) -> bool {
        let distance = (i + self.conv.pads_before[d]) as i64 - (f * self.conv.dilations[d]) as i64;
        distance % self.conv.strides[d] as i64 == 0 && self.meets(d, i, f).is_none()
    }

    /// In a wgrad: an engine that goes on behind the ends of `y` with zeros makes NaN of an infinity in `x`.
    fn meet_zeros_beyond_y(&self, sum: &mut SumOfBounded, channel: u64, f: [u64; 3]) {
        each(self.x, |i| {
            let meets = |d: usize| self.meets(d, i[d], f[d]).is_some() || self.meets_beyond(d, i[d], f[d]);
            if (0..3).all(meets) && (0..3).any(|d| self.meets_beyond(d, i[d], f[d])) {
                (0..self.images).for_each(|image| sum.meet_padding(self.left.get(self.place(&self.left, image, channel, i))));
            }
        });
    }

    /// The outputs along the last dim, from the first on and before the end, that tap `f` lets meet elements of `x`.
    fn met_outputs(&self, f: u64) -> (u64, u64) {
        let (outputs, stride) = (self.y[2], self.conv.strides[2]);
        let reach = f * self.conv.dilations[2];
        let before = self.conv.pads_before[2];
        let first = before.saturating_sub(reach).div_ceil(stride).min(outputs);
        let end = (before + self.x[2]).saturating_sub(reach).div_ceil(stride).min(outputs);
        (first, end.max(first))
    }

    /// What stands behind the first two indices of a tensor of `dims`, of which only the last `spatial` are its own.
    fn place(&self, source: &Source<'_>, first: u64, second: u64, spatial: [u64; 3]) -> u64 {
        let strides = source.strides();
        let own = strides.len() - 2;
        let along: u64 = spatial[3 - own..].iter().zip(&strides[2..]).map(|(i, stride)| i * stride).sum();
        first * strides[0] + second * strides[1] + along
    }

    /// The length of the sum, padding and all: what a precision's bound is for.
    fn terms(&self) -> u64 {
        let taps: u64 = self.filter.iter().product();
        match self.conv.direction {
            ConvDirection::Fprop => self.channels * taps,
            ConvDirection::Dgrad => self.filters * taps,
            ConvDirection::Wgrad => self.images * self.y.iter().product::<u64>(),
        }
    }

    /// Adds `count` products; each offset is that of the first and the step to the next. `None` stands for padding.
    fn add(&self, sum: &mut SumOfBounded, count: u64, left: Option<(u64, u64)>, right: Option<(u64, u64)>) {
        match (left, right) {
            (Some((left, left_step)), Some((right, right_step))) => {
                if let (Some(l), Some(r)) = (self.left.exact(), self.right.exact()) {
                    let factors = (0..count).map(|i| (l[(left + i * left_step) as usize], r[(right + i * right_step) as usize]));
                    return sum.add_exact(factors);
                }
                for i in 0..count {
                    sum.add(self.left.get(left + i * left_step), self.right.get(right + i * right_step));
                }
            }
            // An engine that multiplies padding by what it meets makes NaN of an infinity.
            (None, Some((place, step))) if !self.is_finite => {
                (0..count).for_each(|i| sum.meet_padding(self.right.get(place + i * step)));
            }
            (Some((place, step)), None) if !self.is_finite => {
                (0..count).for_each(|i| sum.meet_padding(self.left.get(place + i * step)));
            }
            _ => {}
        }
    }
}

/// An operand of which every element is a finite number that is known by its offset, without being held.
#[derive(Clone, Copy)]
pub struct Known<'a> {
    /// The element type.
    pub dtype: DType,
    /// Where the elements lie.
    pub layout: Layout,
    /// The element that lies so many elements behind the first.
    pub at: &'a (dyn Fn(u64) -> f64 + Sync),
}

/// The elements of a convolution's result at `positions`, counted row-major over its dims `out`, each by the formula on its own: for
/// results too large to compute whole from operands too large to hold. `operands` are what [`Conv::operands`] names; the result's type is
/// `dtype`. Dims and attributes are those of a graph that was validated.
pub fn elements_at(conv: &Conv, operands: [Known<'_>; 2], dtype: DType, out: &[u64], positions: &[u64]) -> Vec<Bounded> {
    let [left, right] = operands.map(|operand| Source::known(operand.dtype, &operand.layout, operand.at));
    let result = Source::computed_when_read(dtype, out, Convolved::new(conv, left, right, out));
    positions.iter().map(|&position| result.get(position)).collect()
}

/// All triples below `extents`.
fn each(extents: [u64; 3], mut visit: impl FnMut([u64; 3])) {
    for a in 0..extents[0] {
        for b in 0..extents[1] {
            for c in 0..extents[2] {
                visit([a, b, c]);
            }
        }
    }
}

/// The three numbers that `f` gives for dims 0, 1 and 2, if it gives all.
fn all(f: impl Fn(usize) -> Option<u64>) -> Option<[u64; 3]> {
    Some([f(0)?, f(1)?, f(2)?])
}

impl Formula for Convolved<'_> {
    fn at(&self, index: &[u64]) -> Bounded {
        let mut sum = SumOfBounded::default();
        let (first, second, at) = (index[0], index[1], three(&index[2..], 0));
        let (left, right) = (self.left.strides(), self.right.strides());
        match self.conv.direction {
            ConvDirection::Fprop => {
                let first_channel = second / self.filters * self.channels;
                each(self.filter, |f| {
                    let met = all(|d| self.met(d, at[d], f[d]));
                    let tap = [self.tap(0, f[0]), self.tap(1, f[1]), self.tap(2, f[2])];
                    let x = met.map(|i| (self.place(&self.left, first, first_channel, i), left[1]));
                    self.add(&mut sum, self.channels, x, Some((self.place(&self.right, second, 0, tap), right[1])));
                });
            }
            ConvDirection::Dgrad => {
                let (first_filter, c) = (second / self.channels * self.filters, second % self.channels);
                each(self.filter, |f| {
                    let met = all(|d| self.meets(d, at[d], f[d]));
                    let tap = [self.tap(0, f[0]), self.tap(1, f[1]), self.tap(2, f[2])];
                    let y = met.map(|o| (self.place(&self.left, first, first_filter, o), left[1]));
                    self.add(&mut sum, self.filters, y, Some((self.place(&self.right, first_filter, c, tap), right[0])));
                });
            }
            ConvDirection::Wgrad => {
                let channel = first / self.filters * self.channels + second;
                // `tap` is its own inverse.
                let f = [self.tap(0, at[0]), self.tap(1, at[1]), self.tap(2, at[2])];
                // Rows of outputs that meet the image; those before and behind them meet padding. Neighbours in memory are read one after
                // the other, of which a long sum takes many millions.
                let (first_met, end_met) = self.met_outputs(f[2]);
                let (x_step, y_step) = (self.conv.strides[2] * step_along_row(left), step_along_row(right));
                each([self.images, self.y[0], self.y[1]], |[image, d, h]| {
                    let row_met = self.met(0, d, f[0]).zip(self.met(1, h, f[1]));
                    let y = |w| Some((self.place(&self.right, image, first, [d, h, w]), y_step));
                    let (first_met, end_met) = if row_met.is_some() { (first_met, end_met) } else { (self.y[2], self.y[2]) };
                    let x = row_met.zip(self.met(2, first_met, f[2]));
                    let x = x.map(|((id, ih), iw)| (self.place(&self.left, image, channel, [id, ih, iw]), x_step));
                    self.add(&mut sum, first_met, None, y(0));
                    self.add(&mut sum, end_met - first_met, x, y(first_met));
                    self.add(&mut sum, self.y[2] - end_met, None, y(end_met));
                });
                if !self.is_finite {
                    self.meet_zeros_beyond_y(&mut sum, channel, f);
                }
            }
        }
        sum.finish(self.conv.precision, self.left.dtype(), self.terms(), false)
    }

    fn compute(&self) -> DType {
        self.conv.precision.accumulator()
    }
}

impl Operation for Conv {
    const DRAWS: u64 = 3;

    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
        let [left, right] = self.operands();
        let (left, right) = (at.source(left)?, at.source(right)?);
        at.put(self.output(), Convolved::new(self, left, right, at.dims(self.output())?))
    }

    fn data_of(&self, _: &Graph, uid: Uid) -> Data<'_> {
        Data::Any(self.operands()[0] == uid)
    }

    fn draw(draft: &mut Draft, _: u64) -> Result<(), Error> {
        draft.conv()
    }
}

impl Draft {
    fn conv(&mut self) -> Result<(), Error> {
        let direction = self.pick(&ConvDirection::ALL);
        let left = self.image(|value| Precision::usual(value.dtype, value.dtype).is_some(), &TYPES[..12])?;
        let spatial = left.dims.len() - 2;
        let mut conv = Conv::new(direction, left.uid, left.uid, left.uid, spatial, Precision::F64);
        for i in 0..spatial {
            conv.pads_before[i] = self.below(4);
            conv.pads_after[i] = self.below(4);
            conv.strides[i] = 1 + self.below(3);
            conv.dilations[i] = 1 + self.below(3);
        }
        if self.one_in(3) {
            conv.mode = ConvMode::Convolution;
        }
        let taps: Vec<u64> = (0..spatial).map(|_| 1 + self.random.below(3)).collect();
        let divisors: Vec<u64> = (1..=left.dims[1]).filter(|groups| left.dims[1].is_multiple_of(*groups)).collect();
        conv.groups = if self.one_in(2) { 1 } else { self.pick(&divisors) };
        let other = conv.groups * (1 + self.below(4));
        let dims = |first: u64, second: u64, rest: &[u64]| [&[first, second], rest].concat();
        let (right, out) = match direction {
            ConvDirection::Fprop | ConvDirection::Wgrad => {
                let outs: Option<Vec<u64>> = (0..spatial).map(|i| conv.out_extent(i, left.dims[i + 2], taps[i])).collect();
                let Some(outs) = outs else { return Ok(()) };
                let (w, y) = (dims(other, left.dims[1] / conv.groups, &taps), dims(left.dims[0], other, &outs));
                if direction == ConvDirection::Fprop { (w, y) } else { (y, w) }
            }
            ConvDirection::Dgrad => {
                let least: Option<Vec<u64>> = (0..spatial).map(|i| conv.least_extent(i, left.dims[i + 2], taps[i])).collect();
                let Some(mut extents) = least else { return Ok(()) };
                for (extent, stride) in extents.iter_mut().zip(&conv.strides) {
                    *extent += self.random.below(*stride);
                }
                (dims(left.dims[1], other / conv.groups, &taps), dims(left.dims[0], other, &extents))
            }
        };
        let products = out.iter().product::<u64>() * right.iter().product::<u64>() / right[0].max(1);
        if out.iter().product::<u64>() > MOST_ELEMENTS || right.iter().product::<u64>() > MOST_ELEMENTS || products > MOST_PRODUCTS {
            return Ok(());
        }
        let operand = self.value(|value| value.dims == right && value.dtype == left.dtype, left.dtype, &right)?;
        let Some(precision) = self.precision(left.dtype, operand.dtype) else { return Ok(()) };
        conv.precision = precision;
        let name = self.name(direction.name());
        let result = match direction {
            ConvDirection::Fprop => self.builder.conv_fprop(&name, Conv { w: operand.uid, ..conv })?,
            ConvDirection::Dgrad => self.builder.conv_dgrad(&name, Conv { w: operand.uid, ..conv }, &out)?,
            ConvDirection::Wgrad => self.builder.conv_wgrad(&name, Conv { y: operand.uid, ..conv }, &out)?,
        };
        self.note_read(&[left.uid, operand.uid]);
        self.result(result, &out, precision.accumulator(), &TYPES).map(drop)
    }
}
