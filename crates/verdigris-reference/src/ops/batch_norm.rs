//! Batch normalization, its gradient and the statistics of channels: what a channel's elements have in common is worked out once.
//!
//! **What statistics may be off by.** Let `s` be the greatest `|x − μ|` of a channel of `N` elements and `ε` the roundoff of the type computed in.
//! Sums are of differences from a value within `s` of the mean, in any order:
//!
//! ```text
//! mean    ε · (4 |μ| + (N + 8) · s)
//! M2      ε · ((N + 16) · M2 + 8 · N · s² + 2 · |μ| · √(N · M2)) + N · (what the mean is off by)²
//! ```
//!
//! so that a mean far from 0 costs a few roundings of the mean itself. The term with `|μ|` is of parts that are combined by their means, of which each is
//! rounded: `Σ nᵢ (μᵢ − μ)²` moves by `2 ε |μ| · Σ nᵢ |μᵢ − μ|`. `E[x²] − E[x]²` would lose `ε · N · μ²` and is outside of it.

use std::cell::RefCell;
use std::rc::Rc;

use verdigris_graph::{BatchNorm, BatchNormBackward, BatchNormStatistics, BinaryOp, Error, Graph, Pointwise, Real, Uid, UnaryOp};
use verdigris_tensor::DType;
use verdigris_tensor::num::power_of_two;

use crate::fuzz::{Draft, TYPES, Value};
use crate::operation::{Data, Evaluation, GraphError, Operation};
use crate::ops::reduction::SumInAnyOrder;
use crate::source::{Formula, Source, advance};
use crate::tolerance::{Bounded, roundoff};
use crate::tolerance_pointwise::tiny;

/// Something of which nothing is said.
const UNKNOWN: Bounded = Bounded { value: 0.0, error: f64::INFINITY };

/// Elements of a channel of a tensor of these dims.
fn count(dims: &[u64]) -> u64 {
    dims.iter().enumerate().filter(|&(i, _)| i != 1).map(|(_, &dim)| dim).product()
}

/// Runs `f` for the index of each element of a channel.
fn for_each(dims: &[u64], channel: u64, mut f: impl FnMut(&[u64])) {
    let mut rows = dims.to_vec();
    rows[1] = 1;
    let mut index = vec![0; dims.len()];
    for _ in 0..count(dims) {
        index[1] = channel;
        f(&index);
        index[1] = 0;
        advance(&mut index, &rows);
    }
}

/// What belongs to the channel of an index.
fn of_channel(source: &Source<'_>, index: &[u64], compute: DType) -> Bounded {
    let mut at = vec![0; index.len()];
    at[1] = index[1];
    source.read(source.offset(&at), compute)
}

/// Mean and `Σ (x − μ)²` of a channel.
#[derive(Clone, Copy, Debug)]
struct Statistics {
    mean: Bounded,
    m2: Bounded,
}

/// A tensor whose channels' statistics are worked out when they are first wanted.
struct Channels<'a> {
    x: Source<'a>,
    compute: DType,
    known: RefCell<Vec<Option<Statistics>>>,
}

impl<'a> Channels<'a> {
    fn new(x: Source<'a>, compute: DType) -> Channels<'a> {
        let known = RefCell::new(vec![None; x.dims()[1] as usize]);
        Channels { x, compute, known }
    }

    fn count(&self) -> f64 {
        count(self.x.dims()) as f64
    }

    fn of(&self, index: &[u64]) -> Statistics {
        let channel = index[1] as usize;
        if let Some(known) = self.known.borrow()[channel] {
            return known;
        }
        let statistics = self.work_out(index[1]);
        self.known.borrow_mut()[channel] = Some(statistics);
        statistics
    }

    fn work_out(&self, channel: u64) -> Statistics {
        let mut elements = Vec::new();
        for_each(self.x.dims(), channel, |index| elements.push(self.x.read(self.x.offset(index), self.compute)));
        let count = self.count();
        if elements.iter().any(|x| x.error == f64::INFINITY) {
            return Statistics { mean: UNKNOWN, m2: UNKNOWN };
        }
        let mean = elements.iter().map(|x| x.value).sum::<f64>() / count;
        if elements.iter().any(|x| !x.value.is_finite()) {
            // Where the order of summation meets ∞ − ∞ is not said; the deviations are NaN in any order.
            return Statistics { mean: Bounded { value: mean, error: f64::INFINITY }, m2: Bounded::exact(f64::NAN) };
        }
        // A second look takes off what the first sum lost.
        let mean = mean + elements.iter().map(|x| x.value - mean).sum::<f64>() / count;
        let m2: f64 = elements.iter().map(|x| (x.value - mean).powi(2)).sum();
        let spread = elements.iter().map(|x| (x.value - mean).abs() + x.error).fold(0.0, f64::max);
        let epsilon = roundoff(self.compute);
        let own = if count > 1.0 { epsilon * (4.0 * mean.abs() + (count + 8.0) * spread) + tiny(mean, self.compute) } else { 0.0 };
        let carried = elements.iter().map(|x| x.error).sum::<f64>() / count;
        let moved: f64 = elements.iter().map(|x| x.error * (2.0 * (x.value - mean).abs() + x.error)).sum();
        let of_parts = 2.0 * mean.abs() * (count * m2).sqrt();
        let rounding = epsilon * ((count + 16.0) * m2 + 8.0 * count * spread * spread + of_parts) + count * own * own;
        // Squares below the least number are lost.
        let lost = if spread == 0.0 { 0.0 } else { 4.0 * count * if self.compute == DType::F64 { 0.0 } else { power_of_two(-149) } };
        let limit = if self.compute == DType::F64 { f64::MAX } else { power_of_two(127) };
        // Differences, and their squares, that the type computed in may not hold.
        if 4.0 * count * spread * spread > limit || (count + 8.0) * (spread + mean.abs()) > limit {
            return Statistics { mean: Bounded { value: mean, error: f64::INFINITY }, m2: Bounded { value: m2, error: f64::INFINITY } };
        }
        let m2_error = if count > 1.0 { moved + rounding + lost } else { 0.0 };
        Statistics { mean: Bounded::new(mean, own + carried, self.compute), m2: Bounded::new(m2, m2_error, self.compute) }
    }

    /// `1 / √(M2 / N + eps)`.
    fn inv(&self, index: &[u64], eps: Real, significant_bits: u32) -> Bounded {
        let m2 = self.of(index).m2;
        if m2.value.is_nan() {
            return m2;
        }
        let variance = m2.shared_out(self.count(), self.compute);
        let eps = Bounded::new(eps.0, roundoff(self.compute) * eps.0, self.compute);
        let shifted = variance.binary(BinaryOp::Add, eps, false, significant_bits, self.compute);
        shifted.unary(UnaryOp::Rsqrt, significant_bits, self.compute)
    }
}

/// Which result of the forward op.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Wanted {
    Result,
    Mean,
    Inv,
    NextMean,
    NextVariance,
}

/// Batch normalization with what it reads.
struct Normalized<'a> {
    op: &'a BatchNorm,
    wanted: Wanted,
    channels: Rc<Channels<'a>>,
    scale: Option<Source<'a>>,
    bias: Option<Source<'a>>,
    add: Option<Source<'a>>,
    running: Option<Source<'a>>,
    significant_bits: u32,
}

impl Normalized<'_> {
    fn result(&self, index: &[u64]) -> Bounded {
        let (bits, compute) = (self.significant_bits, self.compute());
        let inv = self.channels.inv(index, self.op.eps, bits);
        let x = self.channels.x.read(self.channels.x.offset(index), compute);
        if inv.value.is_nan() && inv.error < f64::INFINITY {
            return Bounded::exact(f64::NAN);
        }
        let mut value = x.binary(BinaryOp::Sub, self.channels.of(index).mean, false, bits, compute);
        value = value.binary(BinaryOp::Mul, inv, false, bits, compute);
        if let Some(scale) = &self.scale {
            value = value.binary(BinaryOp::Mul, of_channel(scale, index, compute), false, bits, compute);
        }
        if let Some(bias) = &self.bias {
            value = value.binary(BinaryOp::Add, of_channel(bias, index, compute), false, bits, compute);
        }
        if let Some(add) = &self.add {
            value = value.binary(BinaryOp::Add, add.read(add.offset(index), compute), false, bits, compute);
        }
        let activation = if self.op.relu { Some(UnaryOp::Relu) } else { self.op.activation };
        activation.map_or(value, |f| value.unary(f, bits, compute))
    }

    /// `(1 − momentum) · running + momentum · of the batch`.
    fn next(&self, index: &[u64], batch: Bounded) -> Bounded {
        let compute = self.compute();
        let Some(running) = &self.running else { return UNKNOWN };
        let (running, momentum) = (of_channel(running, index, compute), self.op.momentum.0);
        let (kept, taken) = (running.scaled(1.0 - momentum, compute), batch.scaled(momentum, compute));
        // `running + momentum · (batch − running)` is as good a way to compute it.
        let slack = 4.0 * roundoff(compute) * (running.value.abs() + (1.0 + momentum.abs()) * batch.value.abs());
        let next = kept.binary(BinaryOp::Add, taken, false, self.significant_bits, compute);
        if next.value.is_finite() { Bounded::new(next.value, next.error + slack, compute) } else { next }
    }
}

impl Formula for Normalized<'_> {
    fn at(&self, index: &[u64]) -> Bounded {
        match self.wanted {
            Wanted::Result => self.result(index),
            Wanted::Mean => self.channels.of(index).mean,
            Wanted::Inv => self.channels.inv(index, self.op.eps, self.significant_bits),
            Wanted::NextMean => self.next(index, self.channels.of(index).mean),
            Wanted::NextVariance => {
                let variance = self.channels.of(index).m2.shared_out(self.channels.count() - 1.0, self.compute());
                self.next(index, variance)
            }
        }
    }

    fn compute(&self) -> DType {
        self.channels.compute
    }
}

/// The statistics of channels with what they are of.
struct Moments<'a> {
    channels: Rc<Channels<'a>>,
    wants_m2: bool,
}

impl Formula for Moments<'_> {
    fn at(&self, index: &[u64]) -> Bounded {
        let Statistics { mean, m2 } = self.channels.of(index);
        if self.wants_m2 { m2 } else { mean }
    }

    fn compute(&self) -> DType {
        self.channels.compute
    }
}

/// What the gradients of batch normalization read, and their sums over channels.
struct Gradients<'a> {
    relu: bool,
    /// Another activation than ReLU.
    activation: Option<UnaryOp>,
    dy: Source<'a>,
    x: Source<'a>,
    y: Option<Source<'a>>,
    scale: Option<Source<'a>>,
    bias: Option<Source<'a>>,
    mean: Source<'a>,
    inv: Source<'a>,
    compute: DType,
    significant_bits: u32,
    /// `Σ g` and `Σ g · x̂` of each channel.
    known: RefCell<Vec<Option<[Bounded; 2]>>>,
}

impl Gradients<'_> {
    fn scale(&self, index: &[u64]) -> Bounded {
        self.scale.as_ref().map_or(Bounded::exact(1.0), |scale| of_channel(scale, index, self.compute))
    }

    fn binary(&self, f: BinaryOp, x: Bounded, z: Bounded) -> Bounded {
        x.binary(f, z, false, self.significant_bits, self.compute)
    }

    /// `x − mean`.
    fn deviation(&self, index: &[u64]) -> Bounded {
        let x = self.x.read(self.x.offset(index), self.compute);
        self.binary(BinaryOp::Sub, x, of_channel(&self.mean, index, self.compute))
    }

    /// `x̂`.
    fn normalized(&self, index: &[u64]) -> Bounded {
        self.binary(BinaryOp::Mul, self.deviation(index), of_channel(&self.inv, index, self.compute))
    }

    /// `dy`, as far as it passes ReLU; with another activation, times its slope.
    fn gradient(&self, index: &[u64]) -> Bounded {
        let dy = self.dy.read(self.dy.offset(index), self.compute);
        if !self.relu && self.activation.is_none() {
            return dy;
        }
        let result = match &self.y {
            Some(y) => y.read(y.offset(index), self.compute),
            None => {
                let scaled = self.binary(BinaryOp::Mul, self.normalized(index), self.scale(index));
                match &self.bias {
                    Some(bias) => {
                        let bias = of_channel(bias, index, self.compute);
                        // `(x − mean) · (inv · scale) + bias`, rounded elsewhere, may be on the other side of 0.
                        let slack = 4.0 * roundoff(self.compute) * (scaled.value.abs() + bias.value.abs());
                        let sum = self.binary(BinaryOp::Add, scaled, bias);
                        if sum.value.is_finite() { Bounded::new(sum.value, sum.error + slack, self.compute) } else { sum }
                    }
                    None => scaled,
                }
            }
        };
        if let Some(f) = self.activation {
            return self.binary(BinaryOp::Backward(f), dy, result);
        }
        // What does not pass is 0, and not −0, whatever the sign of dy.
        let value = if result.value > 0.0 { dy.value } else { 0.0 };
        Bounded { value, ..self.binary(BinaryOp::Backward(UnaryOp::Relu), dy, result) }
    }

    fn sums(&self, index: &[u64]) -> [Bounded; 2] {
        let channel = index[1] as usize;
        if let Some(known) = self.known.borrow()[channel] {
            return known;
        }
        let mut sums = [SumInAnyOrder::default(); 2];
        for_each(self.x.dims(), index[1], |index| {
            let g = self.gradient(index);
            sums[0].add(g);
            // Twice, since the factor inv may stand in front of the sum or within it.
            sums[1].add(self.binary(BinaryOp::Mul, g, self.normalized(index)));
        });
        let [plain, weighted] = sums.map(|sum| sum.finish(self.compute));
        let slack = 2.0 * roundoff(self.compute) * weighted.value.abs();
        let weighted =
            if weighted.value.is_finite() { Bounded::new(weighted.value, weighted.error + slack, self.compute) } else { weighted };
        self.known.borrow_mut()[channel] = Some([plain, weighted]);
        [plain, weighted]
    }

    fn dx(&self, index: &[u64]) -> Bounded {
        let (compute, count) = (self.compute, count(self.x.dims()) as f64);
        let [dbias, dscale] = self.sums(index).map(|sum| sum.shared_out(count, compute));
        let factor = self.binary(BinaryOp::Mul, self.scale(index), of_channel(&self.inv, index, compute));
        let g = self.binary(BinaryOp::Mul, self.gradient(index), factor);
        let mean = self.binary(BinaryOp::Mul, dbias, factor);
        let slope = self.binary(BinaryOp::Mul, dscale, factor);
        let along = self.binary(BinaryOp::Mul, self.normalized(index), slope);
        let dx = self.binary(BinaryOp::Sub, self.binary(BinaryOp::Sub, g, mean), along);
        // The three parts may be added in another order, and their factors multiplied in another.
        let slack = 8.0 * roundoff(compute) * (g.value.abs() + mean.value.abs() + along.value.abs());
        if dx.value.is_finite() { Bounded::new(dx.value, dx.error + slack, compute) } else { dx }
    }
}

/// Which gradient.
#[derive(Clone, Copy, Debug)]
enum Part {
    Input,
    Scale,
    Bias,
    Addend,
}

/// One gradient of batch normalization.
struct Backed<'a> {
    of: Rc<Gradients<'a>>,
    part: Part,
}

impl Formula for Backed<'_> {
    fn at(&self, index: &[u64]) -> Bounded {
        match self.part {
            Part::Input => self.of.dx(index),
            Part::Scale => self.of.sums(index)[1],
            Part::Bias => self.of.sums(index)[0],
            Part::Addend => self.of.gradient(index),
        }
    }

    fn compute(&self) -> DType {
        self.of.compute
    }
}

/// The type of arithmetic on these tensors.
fn compute_of(at: &Evaluation<'_>, read: impl Iterator<Item = Uid>) -> Result<DType, GraphError> {
    Ok(Pointwise::compute_dtype(read.map(|uid| Ok(at.described(uid)?.dtype)).collect::<Result<Vec<_>, GraphError>>()?))
}

impl Operation for BatchNorm {
    const DRAWS: u64 = 1;

    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
        let read = [Some(self.x), self.scale, self.bias, self.add, self.running_mean, self.running_var].into_iter().flatten();
        let compute = compute_of(at, read)?;
        let mut source = |uid: Option<Uid>| uid.map(|uid| at.source(uid)).transpose();
        let (scale, bias, add) = (source(self.scale)?, source(self.bias)?, source(self.add)?);
        let running = [source(self.running_mean)?, source(self.running_var)?];
        let channels = Rc::new(Channels::new(at.source(self.x)?, compute));
        let results = [
            (Wanted::Result, Some(self.y), None),
            (Wanted::Mean, self.mean, None),
            (Wanted::Inv, self.inv, None),
            (Wanted::NextMean, self.next_mean, running[0].clone()),
            (Wanted::NextVariance, self.next_var, running[1].clone()),
        ];
        for (wanted, uid, running) in results {
            let Some(uid) = uid else { continue };
            let (scale, bias, add, channels) = (scale.clone(), bias.clone(), add.clone(), Rc::clone(&channels));
            let significant_bits = at.bits(uid);
            at.put(uid, Normalized { op: self, wanted, channels, scale, bias, add, running, significant_bits })?;
        }
        Ok(())
    }

    fn data_of(&self, _: &Graph, uid: Uid) -> Data<'_> {
        if self.running_var == Some(uid) { Data::Positive } else { Data::Any(true) }
    }

    fn draw(draft: &mut Draft, _: u64) -> Result<(), Error> {
        draft.batch_norm()
    }
}

impl Operation for BatchNormBackward {
    // The forward op's draws make some of these.
    const DRAWS: u64 = 0;

    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
        let read = [Some(self.dy), Some(self.x), self.y, self.scale, self.bias, Some(self.mean), Some(self.inv)].into_iter().flatten();
        let compute = compute_of(at, read)?;
        let results = [(Part::Input, self.dx), (Part::Scale, self.dscale), (Part::Bias, self.dbias), (Part::Addend, self.dadd)];
        let significant_bits = results.iter().filter_map(|(_, uid)| *uid).map(|uid| at.bits(uid)).max().unwrap_or(53);
        let mut source = |uid: Option<Uid>| uid.map(|uid| at.source(uid)).transpose();
        let (y, scale, bias) = (source(self.y)?, source(self.scale)?, source(self.bias)?);
        let (dy, x, mean, inv) = (at.source(self.dy)?, at.source(self.x)?, at.source(self.mean)?, at.source(self.inv)?);
        let known = RefCell::new(vec![None; x.dims()[1] as usize]);
        let of = Rc::new(Gradients {
            relu: self.relu,
            activation: self.activation,
            dy,
            x,
            y,
            scale,
            bias,
            mean,
            inv,
            compute,
            significant_bits,
            known,
        });
        for (part, uid) in results {
            if let Some(uid) = uid {
                at.put(uid, Backed { of: Rc::clone(&of), part })?;
            }
        }
        Ok(())
    }

    fn data_of(&self, _: &Graph, uid: Uid) -> Data<'_> {
        if self.inv == uid { Data::Positive } else { Data::Any(true) }
    }

    fn draw(draft: &mut Draft, _: u64) -> Result<(), Error> {
        draft.batch_norm()
    }
}

impl Operation for BatchNormStatistics {
    // The forward op's draws make some of these.
    const DRAWS: u64 = 0;

    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
        let compute = compute_of(at, [self.x].into_iter())?;
        let channels = Rc::new(Channels::new(at.source(self.x)?, compute));
        at.put(self.mean, Moments { channels: Rc::clone(&channels), wants_m2: false })?;
        match self.m2 {
            Some(m2) => at.put(m2, Moments { channels, wants_m2: true }),
            None => Ok(()),
        }
    }

    fn draw(draft: &mut Draft, _: u64) -> Result<(), Error> {
        draft.batch_norm()
    }
}

impl Draft {
    fn batch_norm(&mut self) -> Result<(), Error> {
        let (dtype, dims) = (self.pick(&TYPES[..10]), self.dims());
        let dims = if dims.len() < 2 || dims.contains(&0) { vec![1 + self.below(7), 1 + self.below(9), 1 + self.below(9)] } else { dims };
        let fits = |value: &Value| value.dims.len() >= 2 && !value.dims.contains(&0) && value.dtype.is_float();
        let x = self.value(fits, dtype, &dims)?;
        let vector: Vec<u64> = x.dims.iter().enumerate().map(|(i, &dim)| if i == 1 { dim } else { 1 }).collect();
        let mut read = vec![x.clone()];
        let name = self.name("norm");
        match self.below(5) {
            0 => {
                let (mean, m2) = self.builder.batch_norm_statistics(&name, x.uid)?;
                self.read_by_norm(&read);
                let compute = computed(&read);
                self.result(mean, &vector, compute, &TYPES[..10])?;
                return self.result(m2, &vector, compute, &TYPES[..10]).map(drop);
            }
            1 | 2 => {
                let dtype = self.pick(&TYPES[..10]);
                let dy = self.value(|value| value.dims == x.dims && value.dtype.is_float(), dtype, &x.dims)?;
                // Inputs of their own: the inverse of a deviation is above 0.
                let (mean, inv) = (self.input(DType::F32, &vector)?, self.input(DType::F32, &vector)?);
                let mut back = BatchNormBackward { relu: self.one_in(2), ..BatchNormBackward::new(dy.uid, x.uid, mean.uid, inv.uid) };
                if !back.relu && self.one_in(2) {
                    back.activation = Some(self.behind_norm());
                }
                read.extend([dy, mean, inv]);
                back.scale = self.of_channels(&vector, &mut read)?;
                if back.relu && self.one_in(2) {
                    let dtype = self.pick(&TYPES[..10]);
                    let y = self.input(dtype, &x.dims)?;
                    back.y = Some(y.uid);
                    read.push(y);
                } else if back.relu || back.activation.is_some() {
                    back.bias = self.of_channels(&vector, &mut read)?;
                }
                let (dx, dscale, dbias, dadd) = self.builder.batch_norm_backward(&name, back)?;
                self.read_by_norm(&read);
                let compute = computed(&read);
                for (uid, dims) in [(Some(dx), &x.dims), (Some(dscale), &vector), (Some(dbias), &vector), (dadd, &x.dims)] {
                    if let Some(uid) = uid {
                        self.result(uid, dims, compute, &TYPES[..10])?;
                    }
                }
                return Ok(());
            }
            _ => {}
        }
        let mut norm =
            BatchNorm { relu: self.one_in(2), momentum: self.real(), ..BatchNorm::new(x.uid, [1e-5, 0.125, 1e-3][self.below(3) as usize]) };
        norm.scale = self.of_channels(&vector, &mut read)?;
        norm.bias = self.of_channels(&vector, &mut read)?;
        if !norm.relu && self.one_in(2) {
            norm.activation = Some(self.behind_norm());
        } else if self.one_in(3) {
            let dtype = self.pick(&TYPES[..10]);
            let add = self.value(|value| value.dims == x.dims && value.dtype.is_float(), dtype, &x.dims)?;
            norm.add = Some(add.uid);
            read.push(add);
        }
        if count(&x.dims) > 1 && self.one_in(2) {
            norm.running_mean = self.of_channels(&vector, &mut read)?;
            norm.running_var = self.of_channels(&vector, &mut read)?;
        }
        let normed = self.builder.batch_norm(&name, norm)?;
        self.read_by_norm(&read);
        let compute = computed(&read);
        for uid in [Some(normed.mean), Some(normed.inv), normed.next_mean, normed.next_var].into_iter().flatten() {
            self.result(uid, &vector, compute, &TYPES[..10])?;
        }
        self.result(normed.y, &x.dims, compute, &TYPES[..10]).map(drop)
    }

    /// An activation other than ReLU: mostly one of those that one kernel has.
    fn behind_norm(&mut self) -> UnaryOp {
        self.pick(&[
            UnaryOp::Silu,
            UnaryOp::HardSwish,
            UnaryOp::Clamp { lower: Real(0.0), upper: Real(6.0) },
            UnaryOp::Clamp { lower: Real(-0.5), upper: Real(1.0) },
            UnaryOp::LeakyRelu { slope: Real(0.1) },
            UnaryOp::Mish,
        ])
    }

    /// An input with one value a channel, or none.
    fn of_channels(&mut self, vector: &[u64], read: &mut Vec<Value>) -> Result<Option<Uid>, Error> {
        if self.one_in(3) {
            return Ok(None);
        }
        let dtype = self.pick(&TYPES[..10]);
        let value = self.input(dtype, vector)?;
        read.push(value.clone());
        Ok(Some(value.uid))
    }

    fn read_by_norm(&mut self, read: &[Value]) {
        let uids: Vec<Uid> = read.iter().map(|value| value.uid).collect();
        self.note_read(&uids);
    }
}

fn computed(read: &[Value]) -> DType {
    Pointwise::compute_dtype(read.iter().map(|value| value.dtype))
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_tensor::Layout;

    fn statistics(values: &[f32]) -> Statistics {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let layout = Layout::row_major(&[values.len() as u64, 1]).unwrap();
        let source = Source::stored(DType::F32, &layout, &bytes).unwrap();
        Channels::new(source, DType::F32).of(&[0, 0])
    }

    #[test]
    fn a_difference_of_sums_of_squares_is_no_variance() {
        let values: Vec<f32> = (0..512).map(|i| 4096.0 + (i % 7) as f32 * 0.25).collect();
        let Statistics { mean, m2 } = statistics(&values);
        let (sum, squares) = values.iter().fold((0.0f32, 0.0f32), |(sum, squares), x| (sum + x, squares + x * x));
        let naive = f64::from(squares - sum * sum / 512.0);
        assert!((naive - m2.value).abs() > 4.0 * m2.error, "{naive} beside {m2:?}");
        // The sum of differences from the first element is.
        let (sum, squares) = values.iter().map(|x| x - values[0]).fold((0.0f32, 0.0f32), |(sum, squares), x| (sum + x, squares + x * x));
        assert!((f64::from(squares - sum * sum / 512.0) - m2.value).abs() <= m2.error);
        assert!((f64::from(values[0] + sum / 512.0) - mean.value).abs() <= mean.error);
    }

    #[test]
    fn a_channel_of_one_element_is_its_own_mean() {
        let Statistics { mean, m2 } = statistics(&[3.5]);
        assert_eq!((mean, m2), (Bounded::exact(3.5), Bounded::exact(0.0)));
    }

    #[test]
    fn what_is_not_finite_has_no_deviation() {
        let Statistics { mean, m2 } = statistics(&[1.0, f32::INFINITY]);
        assert!(mean.error == f64::INFINITY && m2.value.is_nan() && m2.error == 0.0);
    }
}
