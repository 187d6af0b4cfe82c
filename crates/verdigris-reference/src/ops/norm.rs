//! Normalization and its gradient: one element at a time, with the statistics and the sums of each row kept.
//!
//! How far statistics may be off: the mean by what a sum in any order loses. The variance by what the sum of squared deviations loses, by what rounding
//! does to the deviations, and by the square of the mean's error: deviations from a mean that is off by `δ` have the sum of squares `Σ (s − μ)² + K·δ²`.
//! A variance out of `Σ s² / K − μ²` is not that good, and fails.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use verdigris_graph::{BinaryOp, Error, Graph, NormGradients, NormKind, NormSpec, Normalize, NormalizeBackward, Pointwise, Real, Uid};
use verdigris_tensor::DType;
use verdigris_tensor::num::power_of_two;

use crate::fuzz::{Draft, TYPES, Value};
use crate::operation::{Data, Evaluation, GraphError, Operation};
use crate::ops::reduction::SumInAnyOrder;
use crate::source::{Formula, Source, advance};
use crate::tolerance::{Bounded, roundoff};
use crate::tolerance_pointwise::{pass, tiny};

/// Where the rows of a tensor lie.
#[derive(Clone)]
struct Rows {
    dims: Vec<u64>,
    axes: Vec<usize>,
    /// Elements along the first of the axes that belong to one group.
    inside: u64,
}

impl Rows {
    fn new(spec: &NormSpec, dims: &[u64]) -> Rows {
        let axes: Vec<usize> = spec.axes.iter().map(|&axis| axis as usize).collect();
        Rows { dims: dims.to_vec(), inside: dims[axes[0]] / spec.groups, axes }
    }

    /// The place of the statistics of the row of `index`.
    fn statistic(&self, index: &[u64]) -> Vec<u64> {
        let mut place = index.to_vec();
        self.axes.iter().for_each(|&axis| place[axis] = 0);
        place[self.axes[0]] = index[self.axes[0]] / self.inside.max(1);
        place
    }

    /// The indices of a row's elements, by the place of its statistics.
    fn elements(&self, statistic: &[u64]) -> Vec<Vec<u64>> {
        let first = self.axes[0];
        let extents: Vec<u64> = self.axes.iter().map(|&axis| if axis == first { self.inside } else { self.dims[axis] }).collect();
        let mut inner = vec![0; extents.len()];
        (0..extents.iter().product())
            .map(|_| {
                let mut index = statistic.to_vec();
                for (&axis, &i) in self.axes.iter().zip(&inner) {
                    index[axis] = if axis == first { statistic[axis] * self.inside + i } else { i };
                }
                advance(&mut inner, &extents);
                index
            })
            .collect()
    }
}

/// The statistics of a row.
#[derive(Clone, Copy, Debug)]
struct Statistics {
    mean: Bounded,
    inv: Bounded,
}

/// What both passes read: the values that are normalized, and their statistics.
struct Normed<'a> {
    spec: NormSpec,
    rows: Rows,
    x: Source<'a>,
    residual: Option<Source<'a>>,
    scale: Option<Source<'a>>,
    /// The statistics, where they are given.
    given: Option<(Option<Source<'a>>, Source<'a>)>,
    compute: DType,
    significant_bits: u32,
    known: RefCell<HashMap<Vec<u64>, Statistics>>,
}

impl Normed<'_> {
    fn binary(&self, f: BinaryOp, x: Bounded, z: Bounded) -> Bounded {
        x.binary(f, z, false, self.significant_bits, self.compute)
    }

    /// What is normalized.
    fn value(&self, index: &[u64]) -> Bounded {
        let x = self.x.read(self.x.offset(index), self.compute);
        match &self.residual {
            Some(residual) => self.binary(BinaryOp::Add, x, residual.read(residual.offset(index), self.compute)),
            None => x,
        }
    }

    /// `γ`; `None` stands for 1.
    fn gamma(&self, index: &[u64]) -> Option<Bounded> {
        let scale = self.scale.as_ref()?;
        let scale = scale.read(scale.offset(index), self.compute);
        Some(if self.spec.zero_centred { self.binary(BinaryOp::Add, scale, Bounded::exact(1.0)) } else { scale })
    }

    fn statistics(&self, place: &[u64]) -> Statistics {
        if let Some((mean, inv)) = &self.given {
            let read = |source: &Source<'_>| source.read(source.offset(place), self.compute);
            return Statistics { mean: mean.as_ref().map_or(Bounded::exact(0.0), read), inv: read(inv) };
        }
        if let Some(&known) = self.known.borrow().get(place) {
            return known;
        }
        let values: Vec<Bounded> = self.rows.elements(place).iter().map(|index| self.value(index)).collect();
        let statistics = statistics(&self.spec, &values, self.compute);
        self.known.borrow_mut().insert(place.to_vec(), statistics);
        statistics
    }

    /// `h` at an index.
    fn normalized(&self, index: &[u64]) -> Bounded {
        let Statistics { mean, inv } = self.statistics(&self.rows.statistic(index));
        let value = self.value(index);
        let deviation = if self.spec.kind == NormKind::Rms { value } else { self.binary(BinaryOp::Sub, value, mean) };
        let h = self.binary(BinaryOp::Mul, deviation, inv);
        if !h.value.is_finite() || self.spec.kind == NormKind::Rms {
            return h;
        }
        // s · r − μ · r is as good a way to compute it.
        let slack = 2.0 * roundoff(self.compute) * (value.value.abs() + mean.value.abs()) * inv.value.abs();
        Bounded::new(h.value, h.error + slack, self.compute)
    }
}

/// What sums are within, of which anything is to be relied on.
fn range(compute: DType) -> f64 {
    if compute == DType::F64 { f64::MAX } else { power_of_two(127) }
}

/// The mean and `1 / √(v + eps)` of values.
fn statistics(spec: &NormSpec, values: &[Bounded], compute: DType) -> Statistics {
    let count = values.len() as f64;
    let mut sum = SumInAnyOrder::default();
    values.iter().for_each(|&value| sum.add(value));
    let mean = match spec.kind {
        NormKind::Layer if values.is_empty() => Bounded::exact(f64::NAN),
        NormKind::Layer => sum.finish(compute).shared_out(count, compute),
        NormKind::Rms => Bounded::exact(0.0),
    };
    let epsilon = roundoff(compute);
    let limit = range(compute);
    let least = if compute == DType::F64 { power_of_two(-1074) } else { power_of_two(-149) };
    let (mut squares, mut error) = (0.0f64, 0.0f64);
    for value in values {
        let deviation = value.value - mean.value;
        squares += deviation * deviation;
        // A deviation is rounded once. An element that is off by itself moves the sum of squares by twice the deviation.
        let own = if spec.kind == NormKind::Rms { 0.0 } else { 2.0 * epsilon * deviation.abs() };
        let moved = value.error + own;
        error += moved * (2.0 * deviation.abs() + moved) + if deviation == 0.0 { 0.0 } else { least };
    }
    let is_exact = error == 0.0 && mean.error == 0.0 && squares == 0.0;
    let rounding = (count + 4.0) * epsilon * (squares + error + count * mean.error * mean.error);
    let variance = squares / count;
    let mut error = if is_exact { 0.0 } else { (error + rounding) / count + mean.error * mean.error + 2.0 * epsilon * variance };
    if squares.is_finite() && squares > limit {
        // What arithmetic makes of squares beyond its range is nothing that one could rely on.
        error = f64::INFINITY;
    }
    let mut inv = inverse_root(variance, error, spec.eps.0, compute);
    // An element beyond the range of what computed it may be anything, and so may squares that no number holds.
    let are_finite = values.iter().all(|value| value.value.is_finite());
    if values.iter().any(|value| value.error == f64::INFINITY) || are_finite && !squares.is_finite() {
        inv.error = f64::INFINITY;
    }
    Statistics { mean, inv }
}

/// `1 / √(v + eps)` of a variance that may be off.
fn inverse_root(variance: f64, error: f64, eps: f64, compute: DType) -> Bounded {
    let epsilon = roundoff(compute);
    let whole = variance + eps;
    let value = 1.0 / whole.sqrt();
    if error.is_nan() || error == f64::INFINITY {
        // An infinity or a NaN among the elements: the formula fixes what becomes of it.
        return Bounded { value, error: if whole.is_finite() { f64::INFINITY } else { 0.0 } };
    }
    // Of nothing there is no variance: NaN.
    if error == 0.0 && (whole == 0.0 || whole.is_nan()) {
        return Bounded::exact(value);
    }
    let reach = error + 2.0 * epsilon * whole;
    let (low, high) = (whole - reach, whole + reach);
    if low <= 0.0 {
        return Bounded { value, error: f64::INFINITY };
    }
    let carried = (1.0 / low.sqrt() - value).max(value - 1.0 / high.sqrt());
    // As good as the root of a sum of squares: ten bits below the last but one of f32.
    let own = if compute == DType::F64 { power_of_two(-48) } else { power_of_two(-21) } * value;
    Bounded::new(value, carried + own, compute)
}

/// Which result of a forward op.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Written {
    Y,
    Sum,
    Mean,
    Inv,
}

/// A forward op with what it reads.
struct Forward<'a> {
    normed: Rc<Normed<'a>>,
    bias: Option<Source<'a>>,
    result: Written,
}

impl Formula for Forward<'_> {
    fn at(&self, index: &[u64]) -> Bounded {
        let normed = &self.normed;
        match self.result {
            Written::Sum => normed.value(index),
            Written::Mean => normed.statistics(index).mean,
            Written::Inv => normed.statistics(index).inv,
            Written::Y => {
                let mut y = normed.normalized(index);
                if let Some(gamma) = normed.gamma(index) {
                    y = normed.binary(BinaryOp::Mul, y, gamma);
                }
                match &self.bias {
                    Some(bias) => normed.binary(BinaryOp::Add, y, bias.read(bias.offset(index), normed.compute)),
                    None => y,
                }
            }
        }
    }

    fn compute(&self) -> DType {
        self.normed.compute
    }
}

/// `Σ g / K` and `Σ g·h / K` of a row.
type Means = (Bounded, Bounded);

/// What the results of a backward op share.
struct Back<'a> {
    normed: Normed<'a>,
    dy: Source<'a>,
    dsum: Option<Source<'a>>,
    means: RefCell<HashMap<Vec<u64>, Means>>,
}

impl Back<'_> {
    /// What an element adds to the sums of `|dy|`, of `|dy · (s − μ)|`, and of both with the scale: sums of gradients may be formed before the scale or `r` come to
    /// them, and what arithmetic makes of sums beyond its range is nothing that one could rely on.
    fn reach(&self, index: &[u64]) -> [f64; 4] {
        let normed = &self.normed;
        let mean = normed.statistics(&normed.rows.statistic(index)).mean;
        let deviation = (normed.value(index).value - mean.value).abs();
        let [dy, g] = [self.dy(index), self.g(index)].map(|of| of.value.abs());
        [dy, dy * deviation, g, g * deviation]
    }

    fn dy(&self, index: &[u64]) -> Bounded {
        self.dy.read(self.dy.offset(index), self.normed.compute)
    }

    fn g(&self, index: &[u64]) -> Bounded {
        match self.normed.gamma(index) {
            Some(gamma) => self.normed.binary(BinaryOp::Mul, self.dy(index), gamma),
            None => self.dy(index),
        }
    }

    fn means(&self, place: &[u64]) -> Means {
        if let Some(&known) = self.means.borrow().get(place) {
            return known;
        }
        let normed = &self.normed;
        let (mut sum, mut product) = (SumInAnyOrder::default(), SumInAnyOrder::default());
        let inv = normed.statistics(place).inv.value.abs();
        let mut reach = [0.0; 4];
        // What `dy · (s − μ)` and `g · (s − μ)` lose below the normal numbers is multiplied by `r` where that comes to the sum alone, and by `γ`.
        let mut lost = 0.0;
        for index in normed.rows.elements(place) {
            let own = self.reach(&index);
            reach.iter_mut().zip(own).for_each(|(reach, own)| *reach += own);
            let g = self.g(&index);
            sum.add(g);
            product.add(normed.binary(BinaryOp::Mul, g, normed.normalized(&index)));
            let gamma = normed.gamma(&index).map_or(0.0, |gamma| gamma.value.abs());
            lost += pass(tiny(own[3], normed.compute), inv) + pass(tiny(own[1], normed.compute), gamma * inv);
        }
        let count = sum.count() as f64;
        let mut product = product.finish(normed.compute);
        if lost.is_finite() {
            product = Bounded::new(product.value, product.error + lost, normed.compute);
        }
        let mut means = (sum.finish(normed.compute).shared_out(count, normed.compute), product.shared_out(count, normed.compute));
        if reach.iter().any(|reach| reach.is_finite() && *reach > range(normed.compute)) {
            (means.0.error, means.1.error) = (f64::INFINITY, f64::INFINITY);
        }
        self.means.borrow_mut().insert(place.to_vec(), means);
        means
    }

    fn dx(&self, index: &[u64]) -> Bounded {
        let normed = &self.normed;
        let place = normed.rows.statistic(index);
        let (mean, product) = self.means(&place);
        let (g, h, inv) = (self.g(index), normed.normalized(index), normed.statistics(&place).inv);
        let mut rest = normed.binary(BinaryOp::Sub, g, normed.binary(BinaryOp::Mul, h, product));
        if normed.spec.kind == NormKind::Layer {
            rest = normed.binary(BinaryOp::Sub, rest, mean);
        }
        let mut dx = normed.binary(BinaryOp::Mul, rest, inv);
        if dx.value.is_finite() && dx.error.is_finite() {
            // The terms may be added in any order, and multiplied by r before that.
            let terms = g.value.abs() + mean.value.abs() + (h.value * product.value).abs();
            dx = Bounded::new(dx.value, dx.error + 4.0 * roundoff(normed.compute) * terms * inv.value.abs(), normed.compute);
        }
        match &self.dsum {
            Some(dsum) => normed.binary(BinaryOp::Add, dx, dsum.read(dsum.offset(index), normed.compute)),
            None => dx,
        }
    }
}

/// The gradient of what was normalized.
struct OfX<'a>(Rc<Back<'a>>);

impl Formula for OfX<'_> {
    fn at(&self, index: &[u64]) -> Bounded {
        self.0.dx(index)
    }

    fn compute(&self) -> DType {
        self.0.normed.compute
    }
}

/// The gradient of a vector that was broadcast: a sum over what it was repeated over.
struct OfVector<'a> {
    back: Rc<Back<'a>>,
    dims: Vec<u64>,
    /// Of the scale: `dy · h`, else `dy`.
    is_scale: bool,
}

impl Formula for OfVector<'_> {
    fn at(&self, index: &[u64]) -> Bounded {
        let whole = &self.back.normed.rows.dims;
        let lead = whole.len() - self.dims.len();
        let is_summed = |axis: usize| axis < lead || (self.dims[axis - lead] == 1 && whole[axis] != 1);
        let mut place: Vec<u64> = (0..whole.len()).map(|axis| if axis < lead { 0 } else { index[axis - lead] }).collect();
        let summed: Vec<usize> = (0..whole.len()).filter(|&axis| is_summed(axis)).collect();
        let extents: Vec<u64> = summed.iter().map(|&axis| whole[axis]).collect();
        let mut inner = vec![0; summed.len()];
        let mut sum = SumInAnyOrder::default();
        let mut reach = 0.0;
        for _ in 0..extents.iter().product() {
            summed.iter().zip(&inner).for_each(|(&axis, &i)| place[axis] = i);
            reach += if self.is_scale { self.back.reach(&place)[1] } else { 0.0 };
            let dy = self.back.dy(&place);
            sum.add(if self.is_scale { self.back.normed.binary(BinaryOp::Mul, dy, self.back.normed.normalized(&place)) } else { dy });
            advance(&mut inner, &extents);
        }
        let compute = self.back.normed.compute;
        let mut whole = sum.finish(compute);
        if reach.is_finite() && reach > range(compute) {
            whole.error = f64::INFINITY;
        }
        whole
    }

    fn compute(&self) -> DType {
        self.back.normed.compute
    }
}

impl Operation for Normalize {
    const DRAWS: u64 = 1;

    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
        let x = at.source(self.x)?;
        let [residual, scale, bias] = optional(at, [self.residual, self.scale, self.bias])?;
        let dtypes = [Some(&x), residual.as_ref(), scale.as_ref(), bias.as_ref()].into_iter().flatten().map(Source::dtype);
        let compute = Pointwise::compute_dtype(dtypes);
        let dims = x.dims().to_vec();
        let wide = |vector: Option<Source<'a>>| vector.map(|vector| vector.broadcast(&dims));
        let (scale, bias) = (wide(scale), wide(bias));
        let results = [(Some(self.y), Written::Y), (self.sum, Written::Sum), (self.mean, Written::Mean), (self.inv, Written::Inv)];
        for (uid, result) in results {
            let Some(uid) = uid else { continue };
            let normed = Normed {
                spec: self.spec.clone(),
                rows: Rows::new(&self.spec, &dims),
                x: x.clone(),
                residual: residual.clone(),
                scale: scale.clone(),
                given: None,
                compute,
                significant_bits: at.bits(uid),
                known: RefCell::default(),
            };
            at.put(uid, Forward { normed: Rc::new(normed), bias: bias.clone(), result })?;
        }
        Ok(())
    }

    fn draw(draft: &mut Draft, _: u64) -> Result<(), Error> {
        draft.normalize()
    }
}

impl Operation for NormalizeBackward {
    // The forward op's draws make every second one of these.
    const DRAWS: u64 = 0;

    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
        let (x, dy) = (at.source(self.x)?, at.source(self.dy)?);
        let [scale, mean, inv, dsum] = optional(at, [self.scale, self.mean, self.inv, self.dsum])?;
        let optional = [scale.as_ref(), mean.as_ref(), inv.as_ref(), dsum.as_ref()].into_iter().flatten();
        let compute = Pointwise::compute_dtype([&x, &dy].into_iter().chain(optional).map(Source::dtype));
        let dims = x.dims().to_vec();
        let back = |significant_bits: u32| {
            let normed = Normed {
                spec: self.spec.clone(),
                rows: Rows::new(&self.spec, &dims),
                x: x.clone(),
                residual: None,
                scale: scale.clone().map(|scale| scale.broadcast(&dims)),
                given: inv.clone().map(|inv| (mean.clone(), inv)),
                compute,
                significant_bits,
                known: RefCell::default(),
            };
            Rc::new(Back { normed, dy: dy.clone(), dsum: dsum.clone(), means: RefCell::default() })
        };
        if let Some(uid) = self.dx {
            at.put(uid, OfX(back(at.bits(uid))))?;
        }
        for (uid, is_scale) in [(self.dscale, true), (self.dbias, false)] {
            let Some(uid) = uid else { continue };
            let dims = at.dims(uid)?.to_vec();
            at.put(uid, OfVector { back: back(at.bits(uid)), dims, is_scale })?;
        }
        Ok(())
    }

    fn data_of(&self, _: &Graph, _: Uid) -> Data<'_> {
        Data::Any(true)
    }

    fn draw(draft: &mut Draft, _: u64) -> Result<(), Error> {
        draft.normalize()
    }
}

/// The tensors that are there.
fn optional<'a, const N: usize>(at: &mut Evaluation<'a>, uids: [Option<Uid>; N]) -> Result<[Option<Source<'a>>; N], GraphError> {
    let mut sources = [const { None }; N];
    for (source, uid) in sources.iter_mut().zip(uids) {
        *source = uid.map(|uid| at.source(uid)).transpose()?;
    }
    Ok(sources)
}

impl Draft {
    fn normalize(&mut self) -> Result<(), Error> {
        let x = self.with_axis(true)?;
        let rank = x.dims.len();
        let mut axes: Vec<u32> = (0..rank as u32).filter(|_| self.random.below(2) == 0).collect();
        if axes.is_empty() {
            axes = vec![rank as u32 - 1];
        }
        let kind = self.pick(&[NormKind::Layer, NormKind::Rms]);
        let extent = x.dims[axes[0] as usize];
        let groups = [1, 1, 2, 3].into_iter().filter(|groups| extent.is_multiple_of(*groups)).nth(self.below(2) as usize).unwrap_or(1);
        let eps = Real([1e-5, 1e-3, 0.5][self.below(3) as usize]);
        let zero_centred = self.one_in(3);
        let spec = NormSpec { kind, axes, groups, eps, zero_centred };
        let name = self.name("norm");
        let vector = |draft: &mut Draft| -> Result<Option<Value>, Error> {
            if draft.one_in(3) {
                return Ok(None);
            }
            let (dtype, dims) = (draft.pick(&TYPES[..10]), draft.narrower(&x.dims));
            draft.input(dtype, &dims).map(Some)
        };
        let beside = |draft: &mut Draft| -> Result<Value, Error> {
            let dtype = draft.pick(&TYPES[..10]);
            draft.value(|value| value.dims == x.dims && value.dtype.is_float(), dtype, &x.dims)
        };
        let scale = vector(self)?;
        if self.one_in(2) {
            let bias = vector(self)?;
            let residual = if self.one_in(3) { Some(beside(self)?) } else { None };
            let uid = |value: &Option<Value>| value.as_ref().map(|value| value.uid);
            let norm = Normalize { residual: uid(&residual), scale: uid(&scale), bias: uid(&bias), ..Normalize::new(spec.clone(), x.uid) };
            let made = self.builder.normalize(&name, norm)?;
            let read: Vec<Value> = [Some(x.clone()), residual, scale, bias].into_iter().flatten().collect();
            self.note_read(&read.iter().map(|value| value.uid).collect::<Vec<_>>());
            let compute = Pointwise::compute_dtype(read.iter().map(|value| value.dtype));
            let narrow = self.builder.dims(made.inv).unwrap_or_default();
            for (statistic, dims) in [(made.mean, &narrow), (Some(made.inv), &narrow), (made.sum, &x.dims)] {
                if let Some(statistic) = statistic
                    && self.one_in(3)
                {
                    self.result(statistic, dims, compute, &TYPES[..10])?;
                }
            }
            return self.result(made.y, &x.dims, compute, &TYPES[..10]).map(drop);
        }
        let dy = beside(self)?;
        let dsum = if self.one_in(4) { Some(beside(self)?) } else { None };
        let mut back = NormalizeBackward {
            scale: scale.as_ref().map(|scale| scale.uid),
            dsum: dsum.as_ref().map(|dsum| dsum.uid),
            ..NormalizeBackward::new(spec.clone(), x.uid, dy.uid)
        };
        let mut read: Vec<Value> = [Some(x.clone()), Some(dy), scale.clone(), dsum].into_iter().flatten().collect();
        if self.one_in(2) {
            let mut dims = x.dims.clone();
            spec.axes.iter().for_each(|&axis| dims[axis as usize] = 1);
            dims[spec.axes[0] as usize] = spec.groups;
            let inv = self.input(DType::F32, &dims)?;
            back.inv = Some(inv.uid);
            read.push(inv);
            if kind == NormKind::Layer {
                let mean = self.input(DType::F32, &dims)?;
                back.mean = Some(mean.uid);
                read.push(mean);
            }
        }
        let bias_dims = self.narrower(&x.dims);
        let dbias = (!self.one_in(3)).then_some(bias_dims);
        let wanted = NormGradients { dx: true, dscale: scale.is_some() && self.one_in(2), dbias: dbias.as_deref() };
        let made = self.builder.normalize_backward(&name, back, wanted)?;
        self.note_read(&read.iter().map(|value| value.uid).collect::<Vec<_>>());
        let compute = Pointwise::compute_dtype(read.iter().map(|value| value.dtype));
        let of_scale = scale.map(|scale| scale.dims).unwrap_or_default();
        let results = [(made.dscale, of_scale), (made.dbias, dbias.unwrap_or_default()), (made.dx, x.dims.clone())];
        for (uid, dims) in results {
            if let Some(uid) = uid {
                self.result(uid, &dims, compute, &TYPES[..10])?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variance_by_the_difference_of_large_numbers_is_not_good_enough() {
        // Eight elements about 3000, one apart.
        let values: Vec<f32> = (0..8).map(|i| 3000.3 + (i % 2) as f32).collect();
        let spec = NormSpec::new(NormKind::Layer, &[0], 0.0);
        let exact: Vec<Bounded> = values.iter().map(|&value| Bounded::exact(f64::from(value))).collect();
        let Statistics { mean, inv } = statistics(&spec, &exact, DType::F32);
        assert!((mean.value - 3000.8).abs() < 1e-3 && (inv.value - 2.0).abs() < 1e-3, "{mean:?}, {inv:?}");
        let (sum, squares) = values.iter().fold((0.0f32, 0.0f32), |(sum, squares), value| (sum + value, squares + value * value));
        let by_difference = f64::from(1.0 / (squares / 8.0 - (sum / 8.0) * (sum / 8.0)).sqrt());
        // Of a negative difference there is no root.
        assert!(by_difference.is_nan() || (by_difference - inv.value).abs() > 4.0 * inv.error, "{by_difference} and {inv:?}");
        assert!(inv.error < 1e-3 && inv.error > 0.0, "{inv:?}");
    }

    /// Scales below the normal numbers: `Σ g·x`, to which `r` comes behind the sum, loses more than `Σ g·(x·r)` does. A sum without the first term is wrong all the same.
    #[test]
    fn products_of_a_gradient_may_be_lost_before_the_inverse_comes_to_them() {
        let text = r#"
            [[group]]
            id = "tiny"
            types = ["e4m3"]
            out = "f32"
            vector = "f32"
            passes = ["backward"]
            kinds = ["rms"]
            axes = [[1]]
            dims = [[3, 50]]
        "#;
        let cases = crate::graph_cases::load("norm", text).expect("reads");
        let graph = &cases[0].graph;
        let read = |inputs: &crate::run::Inputs<Uid>, name: &str| -> Vec<f32> {
            let tensor = graph.tensors.iter().find(|tensor| tensor.name.starts_with(name)).expect("is there");
            let elements = inputs.buffers[&tensor.uid].chunks_exact(tensor.dtype.bytes());
            elements.map(|bytes| verdigris_tensor::num::read_element(tensor.dtype, bytes).expect("an element") as f32).collect()
        };
        let dx = graph.nodes.iter().find_map(|node| match &node.op {
            verdigris_graph::Op::NormalizeBackward(back) => back.dx,
            _ => None,
        });
        let dx = dx.expect("is asked for");
        let eps = graph.nodes.iter().find_map(|node| match &node.op {
            verdigris_graph::Op::NormalizeBackward(back) => Some(back.spec.eps.0 as f32),
            _ => None,
        });
        let (mut worst, mut rows, mut passed) = (0.0f64, 0, 0);
        for seed in 0..40 {
            let inputs = crate::data::graph_inputs(graph, crate::data::Distribution::Denormals, seed);
            let expected = crate::graph::evaluate(graph, &inputs, crate::graph::Selection::All).expect("evaluates");
            let expected = expected.iter().find(|output| output.id == dx).expect("is an output");
            let [x, dy, scale] = ["x", "dy", "scale"].map(|name| read(&inputs, name));
            for (row, values) in expected.values.chunks_exact(50).enumerate() {
                let own = row * 50..(row + 1) * 50;
                let (x, dy) = (&x[own.clone()], &dy[own]);
                let inv = 1.0 / (x.iter().map(|x| x * x).sum::<f32>() / 50.0 + eps.unwrap_or(0.0)).sqrt();
                let product = |skip: usize| (skip..50).map(|i| dy[i] * scale[i] * x[i]).sum::<f32>() * inv / 50.0;
                let off = |product: f32| {
                    let got = (0..50).map(|i| f64::from((dy[i] * scale[i] - x[i] * inv * product) * inv));
                    got.zip(values).map(|(got, value)| (got - value.value).abs() / value.error).fold(0.0, f64::max)
                };
                worst = worst.max(off(product(0)));
                rows += 1;
                passed += usize::from(off(product(10)) <= 1.0);
            }
        }
        assert!(worst <= 1.0, "a right gradient is off by {worst} times what it may be");
        assert!(passed * 20 < rows, "a sum without ten of fifty elements passes in {passed} of {rows} rows");
    }

    #[test]
    fn rows_that_have_no_deviation() {
        let of = |eps: f64, value: f64| {
            let values = vec![Bounded::exact(value); 4];
            statistics(&NormSpec::new(NormKind::Layer, &[0], eps), &values, DType::F32)
        };
        // What a mean may be off by is then all that there is to divide by.
        assert_eq!(of(0.0, 3.0).inv.error, f64::INFINITY);
        assert_eq!(of(0.0, 0.0).inv.value, f64::INFINITY);
        let known = of(1e-2, 3.0).inv;
        assert!((known.value - 10.0).abs() < 1e-9 && known.error < 1e-3, "{known:?}");
        let none = statistics(&NormSpec::new(NormKind::Layer, &[0], 1.0), &[], DType::F32);
        assert!(none.mean.value.is_nan() && none.inv.value.is_nan());
    }
}
