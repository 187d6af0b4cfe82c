//! Softmax, cross-entropy and their gradients: one element at a time, with the sums of each row kept.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use verdigris_graph::{
    BinaryOp, CrossEntropy, CrossEntropyBackward, CrossEntropySpec, Error, Graph, LossReduction, Pointwise, Real, Softmax, SoftmaxBackward,
    Uid, UnaryOp,
};
use verdigris_tensor::DType;
use verdigris_tensor::num::power_of_two;

use crate::fuzz::{Draft, TYPES};
use crate::operation::{Data, Evaluation, GraphError, Operation};
use crate::ops::reduction::SumInAnyOrder;
use crate::source::{Formula, Source, advance};
use crate::tolerance::{Bounded, roundoff};
use crate::tolerance_pointwise::unit_of;

/// What an exponential between 0 and 1 may lose beside its relative error: it comes of a difference of logits by the chip's instruction, which takes
/// results below the normal numbers of f32 for 0. To keep them would cost a scaled argument and a product for each element, and beside the
/// row's greatest, which is 1, they count for nothing.
fn vanishing(value: f64, compute: DType) -> f64 {
    if value == 0.0 || compute == DType::F64 { 0.0 } else { power_of_two(-126) }
}

/// `eˣ` as rows are computed with it.
fn exponential(x: Bounded, significant_bits: u32, compute: DType) -> Bounded {
    let whole = x.unary(UnaryOp::Exp, significant_bits, compute);
    Bounded { error: whole.error + vanishing(whole.value, compute), ..whole }
}

/// What the elements of one row have in common.
struct Row {
    elements: Vec<Bounded>,
    /// The greatest element.
    greatest: f64,
    /// `Σ e^(x − M)`.
    sum: f64,
    /// The same with every element as low as it may be.
    low_sum: f64,
    /// The same with every element as high as it may be.
    high_sum: f64,
    /// What the sum may be off by, relative to it.
    rounding: f64,
    /// Whether no element may be other than it is.
    is_exact: bool,
    /// Whether something is known of each element, and there is one.
    is_known: bool,
    /// Whether an element is NaN.
    has_nan: bool,
}

/// The rows of one tensor along an axis, computed once each.
struct Rows<'a> {
    x: Source<'a>,
    axis: usize,
    compute: DType,
    unit: f64,
    known: RefCell<HashMap<u64, Rc<Row>>>,
}

impl<'a> Rows<'a> {
    fn new(x: Source<'a>, axis: u32, significant_bits: u32, compute: DType) -> Rows<'a> {
        Rows { x, axis: axis as usize, compute, unit: unit_of(significant_bits, compute), known: RefCell::default() }
    }

    fn elements(&self, index: &[u64]) -> Vec<Bounded> {
        let (base, step) = self.start(index);
        (0..self.x.dims()[self.axis]).map(|i| self.x.read(base + i * step, self.compute)).collect()
    }

    /// The offset of the first element of the row of `index`, and the step to the next.
    fn start(&self, index: &[u64]) -> (u64, u64) {
        let mut first = index.to_vec();
        first[self.axis] = 0;
        (self.x.offset(&first), self.x.strides()[self.axis])
    }

    fn of(&self, index: &[u64]) -> Rc<Row> {
        let (base, _) = self.start(index);
        if let Some(row) = self.known.borrow().get(&base) {
            return Rc::clone(row);
        }
        let elements = self.elements(index);
        let greatest = elements.iter().map(|x| x.value).fold(f64::NEG_INFINITY, f64::max);
        let total = |side: f64| elements.iter().map(|x| (x.value + side * x.error - greatest).exp()).sum::<f64>();
        let (sum, low_sum, high_sum) = (total(0.0), total(-1.0), total(1.0));
        // Σ p · |x − M|: how far the arguments of the exponentials that count are from 0.
        let spread: f64 =
            elements.iter().map(|x| (x.value - greatest) * (x.value - greatest).exp() / sum).filter(|part| !part.is_nan()).sum();
        let rounding = (elements.len() as f64 + 2.0) * roundoff(self.compute) + self.unit * (1.0 - spread);
        let row = Rc::new(Row {
            is_exact: elements.iter().all(|x| x.error == 0.0),
            is_known: !elements.is_empty() && elements.iter().all(|x| x.error != f64::INFINITY),
            has_nan: elements.iter().any(|x| x.value.is_nan()),
            elements,
            greatest,
            sum,
            low_sum,
            high_sum,
            rounding,
        });
        self.known.borrow_mut().insert(base, Rc::clone(&row));
        row
    }

    /// `ln Σ e^x` of a row.
    fn log_sum_exp(&self, row: &Row) -> Bounded {
        let value = row.greatest + row.sum.ln();
        let carried = (row.high_sum / row.sum).ln().max((row.sum / row.low_sum).ln());
        let error = if row.is_exact { 0.0 } else { carried };
        let size = row.greatest.abs() + row.sum.ln().abs() + value.abs();
        row.unless_special(Bounded::new(
            value,
            error + row.rounding + self.unit * (1.0 + row.sum.ln().abs()) + 2.0 * roundoff(self.compute) * size,
            self.compute,
        ))
    }
}

impl Row {
    /// `Σ e^(x − M)` of all elements but one, each as low (side −1) or as high (side 1) as it may be; `own` is that one's part of the whole sum.
    fn others(&self, place: usize, side: f64, own: f64) -> f64 {
        let whole = if side < 0.0 { self.low_sum } else { self.high_sum };
        let rest = whole - own;
        if rest > 1e-6 * whole && rest.is_finite() {
            return rest;
        }
        // A part that is nearly the whole leaves nothing of the others in their difference.
        let others = self.elements.iter().enumerate().filter(|&(i, _)| i != place);
        others.map(|(_, x)| (x.value + side * x.error - self.greatest).exp()).sum()
    }

    /// NaN for a row that holds NaN or ∞ or nothing but −∞; nothing is said of a row that is not known.
    fn unless_special(&self, value: Bounded) -> Bounded {
        // Of a row without elements nothing is said either.
        if !self.is_known {
            Bounded { value: value.value, error: f64::INFINITY }
        } else if self.greatest.is_infinite() || self.has_nan {
            Bounded::exact(f64::NAN)
        } else {
            value
        }
    }
}

/// Softmax or log-softmax with what it reads.
pub(crate) struct Softmaxed<'a> {
    rows: Rows<'a>,
    log: bool,
}

impl<'a> Softmaxed<'a> {
    pub(crate) fn new(x: Source<'a>, axis: u32, log: bool, significant_bits: u32) -> Softmaxed<'a> {
        let compute = Pointwise::compute_dtype([x.dtype()]);
        Softmaxed { rows: Rows::new(x, axis, significant_bits, compute), log }
    }
}

impl Formula for Softmaxed<'_> {
    fn at(&self, index: &[u64]) -> Bounded {
        let row = self.rows.of(index);
        let x = row.elements[index[self.rows.axis] as usize];
        let (unit, compute) = (self.rows.unit, self.rows.compute);
        let distance = x.value - row.greatest;
        if self.log {
            let lse = self.rows.log_sum_exp(&row);
            let value = distance - row.sum.ln();
            let size = x.value.abs() + value.abs();
            let size = if size.is_finite() { size } else { 0.0 };
            return row.unless_special(Bounded::new(value, x.error + lse.error + 4.0 * roundoff(compute) * size, compute));
        }
        let value = distance.exp() / row.sum;
        let (low, high) = ((distance - x.error).exp(), (distance + x.error).exp());
        let carried = if row.is_exact {
            0.0
        } else {
            let place = index[self.rows.axis] as usize;
            let least = low / (low + row.others(place, 1.0, high));
            let most = high / (high + row.others(place, -1.0, low));
            (most - value).max(value - least)
        };
        let relative = row.rounding + unit * (1.0 + if distance.is_finite() { -distance } else { 0.0 });
        row.unless_special(Bounded::new(value, carried + relative * value + vanishing(value, compute), compute))
    }

    fn compute(&self) -> DType {
        self.rows.compute
    }
}

/// The gradient of softmax or log-softmax with what it reads.
pub(crate) struct SoftmaxedBack<'a> {
    y: Rows<'a>,
    dy: Rows<'a>,
    log: bool,
    significant_bits: u32,
    /// `Σ dy · y`, or `Σ dy`, of the rows met, by the offset of the row in `dy` and in `y`.
    sums: RefCell<HashMap<(u64, u64), Bounded>>,
}

impl<'a> SoftmaxedBack<'a> {
    pub(crate) fn new(y: Source<'a>, dy: Source<'a>, axis: u32, log: bool, significant_bits: u32) -> SoftmaxedBack<'a> {
        let compute = Pointwise::compute_dtype([y.dtype(), dy.dtype()]);
        SoftmaxedBack {
            y: Rows::new(y, axis, significant_bits, compute),
            dy: Rows::new(dy, axis, significant_bits, compute),
            log,
            significant_bits,
            sums: RefCell::default(),
        }
    }

    fn sum(&self, index: &[u64]) -> Bounded {
        let key = (self.dy.start(index).0, self.y.start(index).0);
        if let Some(&sum) = self.sums.borrow().get(&key) {
            return sum;
        }
        let mut sum = SumInAnyOrder::default();
        for (dy, y) in self.dy.elements(index).into_iter().zip(self.y.elements(index)) {
            sum.add(if self.log { dy } else { dy.binary(BinaryOp::Mul, y, false, self.significant_bits, self.y.compute) });
        }
        let sum = sum.finish(self.y.compute);
        self.sums.borrow_mut().insert(key, sum);
        sum
    }
}

impl Formula for SoftmaxedBack<'_> {
    fn at(&self, index: &[u64]) -> Bounded {
        let (bits, compute) = (self.significant_bits, self.y.compute);
        let (y, dy) = (self.y.x.read(self.y.x.offset(index), compute), self.dy.x.read(self.dy.x.offset(index), compute));
        let sum = self.sum(index);
        if self.log {
            let part = exponential(y, bits, compute).binary(BinaryOp::Mul, sum, false, bits, compute);
            dy.binary(BinaryOp::Sub, part, false, bits, compute)
        } else {
            let rest = dy.binary(BinaryOp::Sub, sum, false, bits, compute);
            // y · dy − y · Σ is as good a way to compute it.
            let slack = 4.0 * roundoff(compute) * y.value.abs() * (dy.value.abs() + sum.value.abs());
            let product = y.binary(BinaryOp::Mul, rest, false, bits, compute);
            if product.value.is_finite() { Bounded::new(product.value, product.error + slack, compute) } else { product }
        }
    }

    fn compute(&self) -> DType {
        self.y.compute
    }
}

/// The label of a row: an index of a class, something else, or ignored; `None` where it is not known.
enum Label {
    Class(usize),
    Invalid,
    Ignored,
}

/// What the forward and the backward op of cross-entropy share.
struct Losses<'a> {
    spec: CrossEntropySpec,
    logits: Rows<'a>,
    labels: Source<'a>,
    lse: Option<Source<'a>>,
    significant_bits: u32,
}

impl Losses<'_> {
    /// The index of the row that `index` lies in.
    fn row_index(&self, index: &[u64]) -> Vec<u64> {
        let mut row = index.to_vec();
        row[self.logits.axis] = 0;
        row
    }

    fn label(&self, index: &[u64]) -> Option<Label> {
        let label = self.labels.at(&self.row_index(index));
        if label.error > 0.0 {
            return None;
        }
        let classes = self.logits.x.dims()[self.logits.axis];
        Some(if self.spec.ignore_index.is_some_and(|ignored| ignored as f64 == label.value) {
            Label::Ignored
        } else if label.value >= 0.0 && label.value < classes as f64 {
            Label::Class(label.value as usize)
        } else {
            Label::Invalid
        })
    }

    fn log_sum_exp(&self, index: &[u64]) -> Bounded {
        match &self.lse {
            Some(lse) => lse.read(lse.offset(&self.row_index(index)), self.logits.compute),
            None => self.logits.log_sum_exp(&self.logits.of(index)),
        }
    }

    /// Every row, and how many of them count; `None` if a label is not known.
    fn counted(&self) -> Option<(Vec<Vec<u64>>, u64)> {
        let mut dims = self.logits.x.dims().to_vec();
        dims[self.logits.axis] = 1;
        let mut index = vec![0; dims.len()];
        let (mut rows, mut count) = (Vec::new(), 0);
        for _ in 0..dims.iter().product() {
            count += u64::from(!matches!(self.label(&index)?, Label::Ignored));
            rows.push(index.clone());
            advance(&mut index, &dims);
        }
        Some((rows, count))
    }

    fn row_loss(&self, index: &[u64]) -> Bounded {
        let (bits, compute) = (self.significant_bits, self.logits.compute);
        let class = match self.label(index) {
            None => return Bounded { value: 0.0, error: f64::INFINITY },
            Some(Label::Ignored) => return Bounded::exact(0.0),
            Some(Label::Invalid) => return Bounded::exact(f64::NAN),
            Some(Label::Class(class)) => class,
        };
        let row = self.logits.of(index);
        let smoothing = self.spec.label_smoothing.0;
        let mut loss = self.logits.log_sum_exp(&row);
        if smoothing < 1.0 {
            loss = loss.binary(BinaryOp::Sub, row.elements[class].scaled(1.0 - smoothing, compute), false, bits, compute);
        }
        if smoothing > 0.0 {
            let mut sum = SumInAnyOrder::default();
            row.elements.iter().for_each(|&x| sum.add(x));
            let spread = sum.finish(compute).scaled(smoothing / row.elements.len() as f64, compute);
            loss = loss.binary(BinaryOp::Sub, spread, false, bits, compute);
        }
        loss
    }
}

/// Cross-entropy with what it reads: the loss, or the log-sum-exp of each row.
pub(crate) struct CrossEntropied<'a> {
    losses: Losses<'a>,
    wants_lse: bool,
}

impl<'a> CrossEntropied<'a> {
    pub(crate) fn new(
        spec: CrossEntropySpec,
        logits: Source<'a>,
        labels: Source<'a>,
        wants_lse: bool,
        significant_bits: u32,
    ) -> CrossEntropied<'a> {
        let compute = Pointwise::compute_dtype([logits.dtype()]);
        let logits = Rows::new(logits, spec.axis, significant_bits, compute);
        CrossEntropied { losses: Losses { spec, logits, labels, lse: None, significant_bits }, wants_lse }
    }
}

impl Formula for CrossEntropied<'_> {
    fn at(&self, index: &[u64]) -> Bounded {
        let losses = &self.losses;
        if self.wants_lse {
            return losses.log_sum_exp(index);
        }
        if losses.spec.reduction == LossReduction::None {
            return losses.row_loss(index);
        }
        let Some((rows, count)) = losses.counted() else {
            return Bounded { value: 0.0, error: f64::INFINITY };
        };
        let mut sum = SumInAnyOrder::default();
        rows.iter().for_each(|row| sum.add(losses.row_loss(row)));
        let sum = sum.finish(self.compute());
        match losses.spec.reduction {
            LossReduction::Mean if count == 0 => Bounded::exact(f64::NAN),
            LossReduction::Mean => sum.shared_out(count as f64, self.compute()),
            LossReduction::Sum | LossReduction::None => sum,
        }
    }

    fn compute(&self) -> DType {
        self.losses.logits.compute
    }
}

/// The gradient of cross-entropy with what it reads.
pub(crate) struct CrossEntropiedBack<'a> {
    losses: Losses<'a>,
    dloss: Source<'a>,
    /// The rows that count, for a mean; `None` if that is not known.
    count: Option<u64>,
}

impl<'a> CrossEntropiedBack<'a> {
    pub(crate) fn new(
        spec: CrossEntropySpec,
        logits: Source<'a>,
        labels: Source<'a>,
        dloss: Source<'a>,
        lse: Option<Source<'a>>,
        significant_bits: u32,
    ) -> CrossEntropiedBack<'a> {
        let compute = Pointwise::compute_dtype([logits.dtype(), dloss.dtype()].into_iter().chain(lse.as_ref().map(Source::dtype)));
        let logits = Rows::new(logits, spec.axis, significant_bits, compute);
        let losses = Losses { spec, logits, labels, lse, significant_bits };
        let count = losses.counted().map(|(_, count)| count);
        CrossEntropiedBack { losses, dloss, count }
    }
}

impl Formula for CrossEntropiedBack<'_> {
    fn at(&self, index: &[u64]) -> Bounded {
        let losses = &self.losses;
        let (bits, compute) = (losses.significant_bits, losses.logits.compute);
        let unknown = Bounded { value: 0.0, error: f64::INFINITY };
        let class = match losses.label(index) {
            None => return unknown,
            Some(Label::Ignored) => return Bounded::exact(0.0),
            Some(Label::Invalid) => return Bounded::exact(f64::NAN),
            Some(Label::Class(class)) => class,
        };
        let mut g = match losses.spec.reduction {
            LossReduction::None => self.dloss.read(self.dloss.offset(&losses.row_index(index)), compute),
            LossReduction::Sum | LossReduction::Mean => self.dloss.read(0, compute),
        };
        if losses.spec.reduction == LossReduction::Mean {
            let Some(count) = self.count else { return unknown };
            g = g.scaled(1.0 / count as f64, compute);
        }
        let at = index[losses.logits.axis] as usize;
        let x = losses.logits.x.read(losses.logits.x.offset(index), compute);
        let smoothing = losses.spec.label_smoothing.0;
        let target = if at == class { 1.0 - smoothing } else { 0.0 } + smoothing / losses.logits.x.dims()[losses.logits.axis] as f64;
        let target = Bounded::new(target, if target.fract() == 0.0 { 0.0 } else { 2.0 * roundoff(compute) * target }, compute);
        let lse = losses.log_sum_exp(index);
        let p = exponential(x.binary(BinaryOp::Sub, lse, false, bits, compute), bits, compute);
        p.binary(BinaryOp::Sub, target, false, bits, compute).binary(BinaryOp::Mul, g, false, bits, compute)
    }

    fn compute(&self) -> DType {
        self.losses.logits.compute
    }
}

impl Operation for Softmax {
    const DRAWS: u64 = 1;

    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
        let x = at.source(self.x)?;
        at.put(self.y, Softmaxed::new(x, self.axis, self.log, at.bits(self.y)))
    }

    fn draw(draft: &mut Draft, _: u64) -> Result<(), Error> {
        draft.softmax()
    }
}

impl Operation for SoftmaxBackward {
    // The forward op's draws make every second one of these.
    const DRAWS: u64 = 0;

    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
        let (y, dy) = (at.source(self.y)?, at.source(self.dy)?);
        at.put(self.dx, SoftmaxedBack::new(y, dy, self.axis, self.log, at.bits(self.dx)))
    }

    fn data_of(&self, _: &Graph, uid: Uid) -> Data<'_> {
        if self.y == uid { Data::Probabilities(self.log) } else { Data::Any(true) }
    }

    fn draw(draft: &mut Draft, _: u64) -> Result<(), Error> {
        draft.softmax()
    }
}

/// What labels hold: classes of the logits.
fn labels(graph: &Graph, logits: Uid, spec: &CrossEntropySpec) -> Data<'static> {
    let classes = graph.tensor(logits).map_or(1, |logits| logits.layout.dims()[spec.axis as usize]);
    Data::Labels(classes, spec.ignore_index)
}

impl Operation for CrossEntropy {
    const DRAWS: u64 = 1;

    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
        let (logits, labels) = (at.source(self.logits)?, at.source(self.labels)?);
        let formula = CrossEntropied::new(self.spec, logits.clone(), labels.clone(), false, at.bits(self.loss));
        at.put(self.loss, formula)?;
        match self.lse {
            Some(lse) => at.put(lse, CrossEntropied::new(self.spec, logits, labels, true, at.bits(lse))),
            None => Ok(()),
        }
    }

    fn data_of(&self, graph: &Graph, uid: Uid) -> Data<'_> {
        if self.labels == uid { labels(graph, self.logits, &self.spec) } else { Data::Any(true) }
    }

    fn draw(draft: &mut Draft, _: u64) -> Result<(), Error> {
        draft.cross_entropy()
    }
}

impl Operation for CrossEntropyBackward {
    // The forward op's draws make every second one of these.
    const DRAWS: u64 = 0;

    fn evaluate<'a>(&'a self, at: &mut Evaluation<'a>) -> Result<(), GraphError> {
        let (logits, labels, dloss) = (at.source(self.logits)?, at.source(self.labels)?, at.source(self.dloss)?);
        let lse = self.lse.map(|lse| at.source(lse)).transpose()?;
        at.put(self.dlogits, CrossEntropiedBack::new(self.spec, logits, labels, dloss, lse, at.bits(self.dlogits)))
    }

    fn data_of(&self, graph: &Graph, uid: Uid) -> Data<'_> {
        if self.labels == uid { labels(graph, self.logits, &self.spec) } else { Data::Any(true) }
    }

    fn draw(draft: &mut Draft, _: u64) -> Result<(), Error> {
        draft.cross_entropy()
    }
}

impl Draft {
    fn softmax(&mut self) -> Result<(), Error> {
        let x = self.with_axis(true)?;
        let axis = self.below(x.dims.len() as u64) as u32;
        let log = self.one_in(2);
        let name = self.name("softmax");
        let (y, types) = if self.one_in(2) {
            let y = self.builder.softmax(&name, x.uid, axis, log)?;
            (y, vec![x.dtype])
        } else {
            let dtype = self.pick(&TYPES[..10]);
            let dy = self.value(|value| value.dims == x.dims && value.dtype.is_float(), dtype, &x.dims)?;
            let dx = self.builder.softmax_backward(&name, x.uid, dy.uid, axis, log)?;
            self.note_read(&[dy.uid]);
            (dx, vec![x.dtype, dy.dtype])
        };
        self.note_read(&[x.uid]);
        let compute = if types.contains(&DType::F64) { DType::F64 } else { DType::F32 };
        self.result(y, &x.dims, compute, &TYPES[..10]).map(drop)
    }

    fn cross_entropy(&mut self) -> Result<(), Error> {
        let x = self.with_axis(true)?;
        let axis = self.below(x.dims.len() as u64) as u32;
        let spec = CrossEntropySpec {
            label_smoothing: Real([0.0, 0.0, 0.125, 0.5][self.below(4) as usize]),
            ignore_index: if self.one_in(2) { Some([0, -100, 2][self.below(3) as usize]) } else { None },
            ..CrossEntropySpec::new(axis, self.pick(&[LossReduction::None, LossReduction::Sum, LossReduction::Mean]))
        };
        let mut rows = x.dims.clone();
        rows[axis as usize] = 1;
        let loss_dims = if spec.reduction == LossReduction::None { rows.clone() } else { vec![1; rows.len()] };
        let label_type = self.pick(&[DType::I32, DType::I64]);
        let labels = self.input(label_type, &rows)?;
        let compute = if x.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let name = self.name("loss");
        if self.one_in(2) {
            let (loss, lse) = if self.one_in(2) {
                let (loss, lse) = self.builder.cross_entropy_with_lse(&name, spec, x.uid, labels.uid)?;
                (loss, Some(lse))
            } else {
                (self.builder.cross_entropy(&name, spec, x.uid, labels.uid)?, None)
            };
            self.note_read(&[x.uid]);
            if let Some(lse) = lse {
                self.result(lse, &rows, compute, &TYPES[..10])?;
            }
            return self.result(loss, &loss_dims, compute, &TYPES[..10]).map(drop);
        }
        let dtype = self.pick(&TYPES[..10]);
        let dloss = self.value(|value| value.dims == loss_dims && value.dtype.is_float(), dtype, &loss_dims)?;
        let lse = if self.one_in(3) { Some(self.input(DType::F32, &rows)?) } else { None };
        let back = CrossEntropyBackward {
            spec,
            logits: x.uid,
            labels: labels.uid,
            dloss: dloss.uid,
            lse: lse.map(|lse| lse.uid),
            dlogits: Uid(0),
        };
        let dx = self.builder.cross_entropy_backward(&name, back)?;
        self.note_read(&[x.uid, dloss.uid]);
        self.result(dx, &x.dims, compute, &TYPES[..10]).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exponential_may_be_taken_for_0_below_the_normal_numbers_alone() {
        let least = power_of_two(-126);
        let of = |x: f64, compute| exponential(Bounded::exact(x), 24, compute);
        let subnormal = of(-96.0, DType::F32);
        assert!(subnormal.value > 0.0 && subnormal.value < least && subnormal.error >= subnormal.value);
        // Of a normal number, and of f64, 0 is no answer.
        for (x, compute) in [(-86.0, DType::F32), (-1.0, DType::F32), (-96.0, DType::F64)] {
            let kept = of(x, compute);
            assert!(kept.error < 0.7 * kept.value, "{x}: {kept:?}");
        }
        // Nothing is added to what is exactly 0, or not finite.
        assert_eq!(of(f64::NEG_INFINITY, DType::F32), Bounded::exact(0.0));
        assert_eq!(of(f64::INFINITY, DType::F32).value, f64::INFINITY);
    }
}
