//! A linear layer whose results are the logits of a cross-entropy: the loss of some rows and the gradients of all operands, computed together, so that logits
//! live only within one call.

use verdigris_graph::{
    BinaryOp, CrossEntropyBackward, CrossEntropySpec, HostScalar, LossReduction, Matmul, Precision, Real, ReductionOp, TernaryOp, Uid,
    UnaryOp,
};
use verdigris_tensor::DType;

use super::view::{View, in_format, like};
use super::{Drawing, Targets, unfit};
use crate::error::Error;

/// What [`Function::LinearLoss`](super::Function::LinearLoss) computes of each row `x` with label `t`:
///
/// ```text
/// y     = w · x + bias, with a cap  c · tanh(y / c)                 rounded to the type of x
/// loss  = s · (1 − ε) · (L − y[t]) + ε / C · Σ v · (L − y) + z · L²             L = ln Σ e^y, C classes
/// dy[c] = g · ((s · (1 − ε) + ε / C · Σ v + 2 · z · L) · e^(y[c] − L) − s · (1 − ε) · [c = t] − ε / C · v[c])
/// dx = dy · w      dw = Σ over rows of dy ⊗ x      dbias = Σ over rows of dy
/// ```
///
/// with `s` the share of the row and `v` the weight of each class (both 1 where they are not given) and `g` the gradient of the row's loss (1 likewise). Rows
/// whose label is ignored have loss and gradient 0. Where a row has a probability `t[c]` for each class instead:
///
/// ```text
/// q     = v · ((1 − ε) · t + ε / C)
/// loss  = Σ q · (L − y) + z · L²
/// dy    = g · ((Σ q + 2 · z · L) · e^(y − L) − q)
/// dt    = g · (1 − ε) · v · (L − y)
/// ```
///
/// The gradient of the logits lies in their place, so that a call's workspace is the logits' and little beside; with a cap, with `z`, with weights of classes
/// beside smoothing and with probabilities it may lie beside them.
///
/// ```
/// use verdigris::recipe::{Function, Input, LinearLoss, Targets, draw};
/// use verdigris::{CrossEntropySpec, DType, Layout, LossReduction, Precision, Real};
///
/// let tensor = |dtype, dims: &[u64]| Layout::row_major(dims).map(|layout| Some(Input { dtype, layout, alignment_bytes: None }));
/// let (x, w, labels) = (tensor(DType::Bf16, &[6, 8])?, tensor(DType::Bf16, &[32, 8])?, tensor(DType::I64, &[6])?);
/// // Where the losses, the gradient of x and that of w are to be written; the latter is a sum of wide numbers.
/// let (losses, dx, dw) = (tensor(DType::F32, &[6])?, x, tensor(DType::F32, &[32, 8])?);
/// let function = Function::LinearLoss(LinearLoss {
///     precision: Precision::Fp32,
///     targets: Targets::Labels,
///     loss: CrossEntropySpec::new(1, LossReduction::None),
///     z_loss: Real(0.0),
///     soft_cap: None,
///     wanted: [true, true, false, false],
///     accumulates: true,
/// });
/// let recipe = draw(&function, &[x, w, None, labels, None, None, None, losses, dx, dw, None, None])?;
/// let places: Vec<_> = recipe.results.iter().map(|result| result.in_place_of).collect();
/// assert_eq!(places, [Some(7), Some(8), Some(9)]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LinearLoss {
    /// How products are formed and summed.
    pub precision: Precision,
    /// A label for each row, or a probability for each of its classes.
    pub targets: Targets,
    /// Smoothing and the ignored label, which probabilities have not. The axis is 1, the reduction none.
    pub loss: CrossEntropySpec,
    /// z: the factor of the squared log-sum-exp; at least 0.
    pub z_loss: Real,
    /// c: logits are held between −c and c; above 0.
    pub soft_cap: Option<Real>,
    /// Whether the gradients of `x`, `w`, the bias and the probabilities are wanted, beside the losses.
    pub wanted: [bool; 4],
    /// Whether the gradients of `w` and the bias are added to what is there.
    pub accumulates: bool,
}

const ROWS: View = View::Matrix { is_turned: false };
const OF_COLUMNS: View = View::Channel { rank: 2, axis: 1 };
const OF_ROWS: View = View::Across { axis: 1 };

/// The places of a call's tensors behind `x` and `w`.
const BIAS: usize = 2;
const TARGETS: usize = 3;
const SHARE: usize = 4;
const WEIGHTS: usize = 5;
const DLOSS: usize = 6;
const LOSSES: usize = 7;
const DX: usize = 8;
const DW: usize = 9;
const DBIAS: usize = 10;
const DTARGETS: usize = 11;

impl Drawing {
    pub(super) fn linear_loss(&mut self, spec: &LinearLoss) -> Result<(), Error> {
        let LinearLoss { precision, targets, loss, z_loss, soft_cap, wanted: [of_x, of_w, of_bias, of_targets], accumulates } = *spec;
        let (x, w) = (self.given(0)?, self.given(1)?);
        let (&[rows, inputs], &[classes, of]) = (x.layout.dims(), w.layout.dims()) else {
            let what = format!("rows of dims {:?} and a weight of dims {:?}", x.layout.dims(), w.layout.dims());
            return Err(unfit(what, "rows are [rows, in], a weight is [classes, in]"));
        };
        if inputs != of {
            return Err(unfit(format_args!("a weight of dims {:?} for {inputs} values", w.layout.dims()), "a weight is [classes, in]"));
        }
        if loss.axis != 1 || loss.reduction != LossReduction::None {
            let what = format!("a loss along axis {} with the reduction {:?}", loss.axis, loss.reduction);
            return Err(unfit(what, "classes are axis 1, and each row has a loss"));
        }
        if !(z_loss.0.is_finite() && z_loss.0 >= 0.0) {
            return Err(unfit(format_args!("a factor {z_loss} of the squared log-sum-exp"), "it is finite and at least 0"));
        }
        for (place, name, want) in [
            (BIAS, "bias", classes),
            (SHARE, "share", rows),
            (WEIGHTS, "weights", classes),
            (DLOSS, "dloss", rows),
            (LOSSES, "losses", rows),
            (DBIAS, "dbias", classes),
        ] {
            if let Some(given) = self.given[place].filter(|given| given.layout.dims() != [want]) {
                let what = format!("`{name}` of dims {:?} for {rows} rows and {classes} classes", given.layout.dims());
                return Err(unfit(what, "what belongs to rows has one number a row, what belongs to classes one a class"));
            }
        }
        let is_probable = match targets {
            Targets::Labels => false,
            Targets::Probabilities => true,
            Targets::LabelsOfLogarithms => {
                return Err(unfit("a linear layer whose results are logarithms of probabilities", "its results are logits"));
            }
        };
        let (given, want) = (self.given(TARGETS)?, if is_probable { &[rows, classes][..] } else { &[rows][..] });
        if given.layout.dims() != want {
            let what = format!("targets of dims {:?} for {rows} rows and {classes} classes", given.layout.dims());
            return Err(unfit(what, "a row has one label, or a probability for each class"));
        }
        if is_probable && (loss.ignore_index.is_some() || self.given[SHARE].is_some()) {
            return Err(unfit(
                "an ignored label or shares of rows beside probabilities",
                "only rows with labels are ignored or have shares",
            ));
        }
        if of_targets && !is_probable {
            return Err(unfit("the gradient of labels", "only probabilities have one"));
        }
        let (dtype, x, w) = (x.dtype, self.input_as(0, "x", ROWS)?, self.input_as(1, "w", ROWS)?);
        let logits = self.logits(precision, soft_cap, dtype, [x, w])?;
        let beside = |d: &mut Drawing, place: usize, name: &str, view: View| match d.given[place] {
            Some(_) => d.input_as(place, name, view).map(Some),
            None => Ok(None),
        };
        let share = beside(self, SHARE, "share", OF_ROWS)?;
        let weights = beside(self, WEIGHTS, "weights", OF_COLUMNS)?;
        let dloss = beside(self, DLOSS, "dloss", OF_ROWS)?;
        let of_logits = of_x || of_w || of_bias;
        let dlogits = if is_probable {
            self.of_probabilities(spec, logits, (weights, dloss), [rows, classes])?
        } else {
            self.of_labels(spec, logits, (weights, share, dloss), [rows, classes])?
        };
        let Some(mut dlogits) = dlogits.filter(|_| of_logits) else { return Ok(()) };
        if let Some(cap) = soft_cap {
            // tanh′ = 1 − tanh², of the capped logits over the cap.
            let squared = self.g.binary("cap", BinaryOp::Mul, logits, logits)?;
            let slope = self.affine(squared, -1.0 / (cap.0 * cap.0), 1.0)?;
            dlogits = self.g.binary("dlogits", BinaryOp::Mul, dlogits, slope)?;
        }
        self.g.set_dtype(dlogits, dtype)?;
        if of_x {
            let dx = self.g.matmul_with("dx", Matmul::new(dlogits, w, Uid(0), precision))?;
            self.store_in_place_of(dx, DX, "dx", View::Same)?;
        }
        if of_w {
            let turned = self.g.transpose("turned", dlogits, &[1, 0])?;
            let mut product = Matmul::new(turned, x, Uid(0), precision);
            if accumulates {
                product.c = Some(self.input(DW, "dw so far")?);
                product.beta = HostScalar::ONE;
            }
            let dw = self.g.matmul_with("dw", product)?;
            self.store_in_place_of(dw, DW, "dw", View::Same)?;
        }
        if of_bias {
            let mut sums = self.g.reduction("dbias", ReductionOp::Add, dlogits, &[0])?;
            if accumulates {
                let before = self.input_as(DBIAS, "dbias so far", OF_COLUMNS)?;
                sums = self.g.binary("dbias", BinaryOp::Add, sums, before)?;
            }
            self.store_in_place_of(sums, DBIAS, "dbias", OF_COLUMNS)?;
        }
        Ok(())
    }

    /// The losses of rows with labels, stored, and the gradient of the logits if one of its products is wanted.
    fn of_labels(
        &mut self,
        spec: &LinearLoss,
        logits: Uid,
        (weights, share, dloss): (Option<Uid>, Option<Uid>, Option<Uid>),
        [rows, classes]: [u64; 2],
    ) -> Result<Option<Uid>, Error> {
        let LinearLoss { loss, z_loss, soft_cap, wanted: [of_x, of_w, of_bias, _], .. } = *spec;
        let labels = self.input_as(TARGETS, "labels", OF_ROWS)?;
        // Where the op says it all, it is one pass over the logits for the loss and one for its gradient.
        let is_plain = z_loss.0 == 0.0 && weights.is_none() && (share.is_none() || loss.label_smoothing.0 == 0.0);
        let op = if is_plain { loss } else { CrossEntropySpec { label_smoothing: Real(0.0), ..loss } };
        let (own, lse) = self.g.cross_entropy_with_lse("cross entropy", op, logits, labels)?;
        // Behind the op another step would follow for a cap, and a tensor between them: of terms, all of the gradient is one part.
        let is_gradient_plain = is_plain && (soft_cap.is_none() || !(of_x || of_w || of_bias));
        let counts = if is_gradient_plain { None } else { Some(self.counts(loss, labels, lse)?) };
        let each = match counts.filter(|_| !is_plain) {
            None => match share {
                Some(share) => self.g.binary("loss", BinaryOp::Mul, own, share)?,
                None => own,
            },
            Some(counts) => self.loss_of_terms(spec, counts, (own, lse), logits, (weights, share, classes))?,
        };
        self.store_in_place_of(each, LOSSES, "losses", OF_ROWS)?;
        if !(of_x || of_w || of_bias) {
            return Ok(None);
        }
        let dlogits = match counts {
            None => {
                let dloss = match (dloss, share) {
                    (Some(dloss), Some(share)) => self.g.binary("dloss", BinaryOp::Mul, dloss, share)?,
                    (Some(one), None) | (None, Some(one)) => one,
                    (None, None) => {
                        let none = self.g.gen_index("dloss", &[rows, 1], 1)?;
                        self.affine(none, 0.0, 1.0)?
                    }
                };
                let back = CrossEntropyBackward { spec: op, logits, labels, dloss, lse: Some(lse), dlogits: logits };
                self.g.cross_entropy_backward("dlogits", back)?
            }
            Some(counts) => self.dlogits_of_terms(spec, counts, (logits, lse, labels), (dloss, share), (weights, classes))?,
        };
        Ok(Some(dlogits))
    }

    /// The losses of rows with a probability for each class and the gradient of these, stored, and the gradient of the logits if one of its products is wanted.
    fn of_probabilities(
        &mut self,
        spec: &LinearLoss,
        logits: Uid,
        (weights, dloss): (Option<Uid>, Option<Uid>),
        [rows, classes]: [u64; 2],
    ) -> Result<Option<Uid>, Error> {
        let (smoothing, z, [of_x, of_w, of_bias, of_targets]) = (spec.loss.label_smoothing.0, spec.z_loss.0, spec.wanted);
        let targets = self.input(TARGETS, "targets")?;
        // The op tells the log-sum-exp of rows in one pass. It asks for labels: all are 0 and ignored, so that its own loss is 0.
        let ignored = self.g.gen_index("label", &[rows, 1], 1)?;
        self.g.set_dtype(ignored, DType::I32)?;
        let op = CrossEntropySpec { label_smoothing: Real(0.0), ignore_index: Some(0), ..spec.loss };
        let (nothing, lse) = self.g.cross_entropy_with_lse("log-sum-exp", op, logits, ignored)?;
        // Made for each reader: each is then a step of it, where one for all would be stored, in wide numbers beside the logits.
        let chances = |d: &mut Drawing| -> Result<Uid, Error> {
            let mut chances = targets;
            if smoothing != 0.0 {
                chances = d.affine(chances, 1.0 - smoothing, smoothing / classes.max(1) as f64)?;
            }
            if let Some(weights) = weights {
                chances = d.g.binary("weighted", BinaryOp::Mul, chances, weights)?;
            }
            Ok(chances)
        };
        // Differences before products: no two large sums are subtracted from each other.
        let below = self.g.binary("below", BinaryOp::Sub, lse, logits)?;
        let of_loss = chances(self)?;
        let terms = self.g.binary("terms", BinaryOp::Mul, below, of_loss)?;
        let sum = self.g.reduction("loss", ReductionOp::Add, terms, &[1])?;
        let mut each = self.g.binary("loss", BinaryOp::Add, sum, nothing)?;
        if z != 0.0 {
            let squared = self.g.binary("z", BinaryOp::Mul, lse, lse)?;
            let squared = self.affine(squared, z, 0.0)?;
            each = self.g.binary("loss", BinaryOp::Add, each, squared)?;
        }
        self.store_in_place_of(each, LOSSES, "losses", OF_ROWS)?;
        let times = |d: &mut Drawing, x: Uid| match dloss {
            Some(dloss) => d.g.binary("dloss", BinaryOp::Mul, x, dloss),
            None => Ok(x),
        };
        if of_targets {
            let below = self.g.binary("below", BinaryOp::Sub, lse, logits)?;
            let mut dtargets = self.affine(below, 1.0 - smoothing, 0.0)?;
            if let Some(weights) = weights {
                dtargets = self.g.binary("dtargets", BinaryOp::Mul, dtargets, weights)?;
            }
            let dtargets = times(self, dtargets)?;
            self.store_in_place_of(dtargets, DTARGETS, "dtargets", View::Same)?;
        }
        if !(of_x || of_w || of_bias) {
            return Ok(None);
        }
        let of_sum = chances(self)?;
        let mut all = self.g.reduction("all", ReductionOp::Add, of_sum, &[1])?;
        if z != 0.0 {
            let twice = self.affine(lse, 2.0 * z, 0.0)?;
            all = self.g.binary("all", BinaryOp::Add, all, twice)?;
        }
        let above = self.g.binary("above", BinaryOp::Sub, logits, lse)?;
        let part = self.g.unary("part", UnaryOp::Exp, above)?;
        let part = self.g.binary("part", BinaryOp::Mul, part, all)?;
        let of_gradient = chances(self)?;
        let dlogits = self.g.binary("dlogits", BinaryOp::Sub, part, of_gradient)?;
        Ok(Some(times(self, dlogits)?))
    }

    /// The logits of the rows, in the type of the operands.
    fn logits(&mut self, precision: Precision, soft_cap: Option<Real>, dtype: DType, [x, w]: [Uid; 2]) -> Result<Uid, Error> {
        let turned = self.g.transpose("turned", w, &[1, 0])?;
        let logits = self.g.matmul_with("logits", Matmul::new(x, turned, Uid(0), precision))?;
        let mut logits = self.biased(BIAS, logits, 1, UnaryOp::Identity)?;
        if let Some(cap) = soft_cap {
            if !(cap.0.is_finite() && cap.0 > 0.0) {
                return Err(unfit(format_args!("a cap of {cap} for logits"), "it is finite and above 0"));
            }
            let small = self.affine(logits, 1.0 / cap.0, 0.0)?;
            let bent = self.g.unary("cap", UnaryOp::Tanh, small)?;
            logits = self.affine(bent, cap.0, 0.0)?;
        }
        // The loss and its gradient read what is stored, so that they belong to the same numbers.
        self.g.set_dtype(logits, dtype)?;
        Ok(logits)
    }

    /// 1 for each row, and 0 where its label is ignored, in the type of the loss.
    fn counts(&mut self, loss: CrossEntropySpec, labels: Uid, lse: Uid) -> Result<Uid, Error> {
        let counts = match loss.ignore_index {
            Some(index) => {
                let beyond = self.affine(labels, 1.0, -(index as f64))?;
                let ignored = self.g.unary("ignored", UnaryOp::Not, beyond)?;
                self.g.unary("counts", UnaryOp::Not, ignored)?
            }
            None => self.affine(labels, 0.0, 1.0)?,
        };
        let wide = self.g.described(lse).map_or(DType::F32, |tensor| tensor.dtype);
        self.g.set_dtype(counts, wide)?;
        Ok(counts)
    }

    /// Σ v, a number or one that the graph computes, times a factor.
    fn times_weight_sum(&mut self, rows: Uid, weights: Option<Uid>, classes: u64, factor: f64) -> Result<Uid, Error> {
        let Some(weights) = weights else { return self.affine(rows, factor * classes as f64, 0.0) };
        let sum = self.g.reduction("weights", ReductionOp::Add, weights, &[1])?;
        let scaled = self.affine(sum, factor, 0.0)?;
        Ok(self.g.binary("weights", BinaryOp::Mul, rows, scaled)?)
    }

    fn loss_of_terms(
        &mut self,
        spec: &LinearLoss,
        counts: Uid,
        (own, lse): (Uid, Uid),
        logits: Uid,
        (weights, share, classes): (Option<Uid>, Option<Uid>, u64),
    ) -> Result<Uid, Error> {
        let smoothing = spec.loss.label_smoothing.0;
        let shared = match share {
            Some(share) => self.g.binary("loss", BinaryOp::Mul, own, share)?,
            None => own,
        };
        let mut each = self.affine(shared, 1.0 - smoothing, 0.0)?;
        if smoothing != 0.0 {
            let spread = smoothing / classes.max(1) as f64;
            let all = self.times_weight_sum(lse, weights, classes, spread)?;
            let weighted = match weights {
                Some(weights) => self.g.binary("weighted", BinaryOp::Mul, logits, weights)?,
                None => logits,
            };
            let sum = self.g.reduction("smoothed", ReductionOp::Add, weighted, &[1])?;
            let sum = self.affine(sum, spread, 0.0)?;
            let rest = self.g.binary("smoothed", BinaryOp::Sub, all, sum)?;
            let rest = self.kept(rest, counts)?;
            each = self.g.binary("loss", BinaryOp::Add, each, rest)?;
        }
        if spec.z_loss.0 != 0.0 {
            let squared = self.g.binary("z", BinaryOp::Mul, lse, lse)?;
            let squared = self.affine(squared, spec.z_loss.0, 0.0)?;
            let squared = self.kept(squared, counts)?;
            each = self.g.binary("loss", BinaryOp::Add, each, squared)?;
        }
        Ok(each)
    }

    /// A number a row, and 0 for rows that are ignored, whatever the number is.
    fn kept(&mut self, x: Uid, counts: Uid) -> Result<Uid, Error> {
        let zero = self.affine(counts, 0.0, 0.0)?;
        Ok(self.g.ternary("kept", TernaryOp::Select, x, zero, counts)?)
    }

    fn dlogits_of_terms(
        &mut self,
        spec: &LinearLoss,
        counts: Uid,
        (logits, lse, labels): (Uid, Uid, Uid),
        (dloss, share): (Option<Uid>, Option<Uid>),
        (weights, classes): (Option<Uid>, u64),
    ) -> Result<Uid, Error> {
        let smoothing = spec.loss.label_smoothing.0;
        let spread = smoothing / classes.max(1) as f64;
        let times = |d: &mut Drawing, x: Uid| match dloss {
            Some(dloss) => d.g.binary("dloss", BinaryOp::Mul, x, dloss),
            None => Ok(x),
        };
        let share = match share {
            Some(share) => self.g.binary("share", BinaryOp::Mul, share, counts)?,
            None => counts,
        };
        let chosen = self.affine(share, 1.0 - smoothing, 0.0)?;
        let mut all = chosen;
        if smoothing != 0.0 {
            let rest = self.times_weight_sum(counts, weights, classes, spread)?;
            all = self.g.binary("all", BinaryOp::Add, all, rest)?;
        }
        if spec.z_loss.0 != 0.0 {
            let twice = self.affine(lse, 2.0 * spec.z_loss.0, 0.0)?;
            let twice = self.kept(twice, counts)?;
            all = self.g.binary("all", BinaryOp::Add, all, twice)?;
        }
        let (chosen, all) = (times(self, chosen)?, times(self, all)?);
        let below = self.g.binary("below", BinaryOp::Sub, logits, lse)?;
        let part = self.g.unary("part", UnaryOp::Exp, below)?;
        let mut dlogits = self.g.binary("dlogits", BinaryOp::Mul, part, all)?;
        let class = self.g.gen_index("class", &[1, classes], 1)?;
        let is_class = self.g.binary("is_class", BinaryOp::Eq, class, labels)?;
        let own = self.g.binary("own", BinaryOp::Mul, is_class, chosen)?;
        dlogits = self.g.binary("dlogits", BinaryOp::Sub, dlogits, own)?;
        if smoothing != 0.0 {
            let each = self.affine(counts, spread, 0.0)?;
            let mut each = times(self, each)?;
            if let Some(weights) = weights {
                each = self.g.binary("spread", BinaryOp::Mul, weights, each)?;
            }
            dlogits = self.g.binary("dlogits", BinaryOp::Sub, dlogits, each)?;
        }
        // Rows that are ignored pass nothing on, whatever their logits are.
        self.kept(dlogits, counts)
    }

    /// `x, factor` → `x · factor`, rounded once.
    pub(super) fn scaled(&mut self, dtype: DType) -> Result<(), Error> {
        let given = self.given(0)?;
        let rank = given.layout.rank().max(1);
        let view = if given.layout.rank() == 0 { View::One { rank: 1 } } else { View::Same };
        let (x, factor) = (self.input_as(0, "x", view)?, self.input_as(1, "factor", View::One { rank })?);
        let y = self.g.binary("scaled", BinaryOp::Mul, x, factor)?;
        let layout = if given.layout.rank() == 0 { in_format(&[], false)? } else { like(&given.layout)? };
        self.store_as(y, "y", dtype, layout, view)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use verdigris_engines::arch::Arch;
    use verdigris_engines::interpret::Parts;
    use verdigris_graph::pattern::partition;
    use verdigris_kir::interp::{Kernels, Options};

    use super::super::{Function, Input, draw};
    use super::*;
    use crate::binding::Bound;
    use crate::graph_plan::Memory;

    fn tensor(dtype: DType, dims: &[u64]) -> Option<Input> {
        Some(Input { dtype, layout: in_format(dims, false).expect("a packed layout"), alignment_bytes: None })
    }

    fn spec() -> LinearLoss {
        LinearLoss {
            precision: Precision::Fp32,
            targets: Targets::Labels,
            loss: CrossEntropySpec { ignore_index: Some(-100), ..CrossEntropySpec::new(1, LossReduction::None) },
            z_loss: Real(0.0),
            soft_cap: None,
            wanted: [true, true, true, false],
            accumulates: true,
        }
    }

    /// The operands of a call with everything in it.
    fn call(dtype: DType, is_weighted: bool, is_smoothed: bool) -> Vec<Option<Input>> {
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let (rows, classes) = (tensor(wide, &[6]), tensor(wide, &[40]));
        let share = rows.filter(|_| is_weighted);
        let weights = classes.filter(|_| is_weighted && is_smoothed);
        let (x, w) = (tensor(dtype, &[6, 16]), tensor(dtype, &[40, 16]));
        vec![x, w, classes, tensor(DType::I64, &[6]), share, weights, None, rows, x, tensor(wide, &[40, 16]), classes]
    }

    /// The same with a probability for each class, and the gradient of these.
    fn probable(spec: LinearLoss, dtype: DType, is_weighted: bool) -> (LinearLoss, Vec<Option<Input>>) {
        let loss = CrossEntropySpec { ignore_index: None, ..spec.loss };
        let spec = LinearLoss { targets: Targets::Probabilities, loss, wanted: [true; 4], ..spec };
        let mut given = call(dtype, false, false);
        (given[TARGETS], given[WEIGHTS]) = (tensor(dtype, &[6, 40]), given[BIAS].filter(|_| is_weighted));
        given.push(given[TARGETS]);
        (spec, given)
    }

    /// The kinds of the problems that a call is cut into, each of which an engine takes; sums are added to where they lie.
    fn kinds(spec: LinearLoss, given: &[Option<Input>]) -> Vec<&'static str> {
        let recipe = draw(&Function::LinearLoss(spec), given).unwrap_or_else(|error| panic!("{spec:?}: {error}"));
        let parts = partition(&recipe.graph).expect("cut").parts;
        for part in &parts {
            let taken = verdigris_engines::engines().any(|engine| engine.accept(&part.problem, &Arch::h200()).is_ok());
            assert!(taken, "{spec:?}: {:?}", part.problem);
        }
        let mut kinds: Vec<_> = parts.iter().map(|part| part.problem.kind()).collect();
        kinds.sort_unstable();
        kinds
    }

    #[test]
    fn every_part_of_each_form_has_an_engine() {
        for dtype in [DType::Bf16, DType::F32, DType::F64] {
            let precision = Precision::usual(dtype, dtype).expect("a precision");
            for (smoothing, z, cap, is_weighted) in [
                (0.0, 0.0, None, false),
                (0.1, 0.0, None, false),
                (0.0, 0.0, Some(30.0), true),
                (0.1, 0.0, None, true),
                (0.1, 1e-4, Some(5.0), false),
            ] {
                for wanted in [[false; 4], [true, true, true, false], [false, true, false, false], [true, false, false, false]] {
                    for accumulates in [false, true] {
                        let mut spec = LinearLoss { precision, z_loss: Real(z), soft_cap: cap.map(Real), wanted, accumulates, ..spec() };
                        spec.loss.label_smoothing = Real(smoothing);
                        kinds(spec, &call(dtype, is_weighted, smoothing != 0.0));
                        let (spec, given) = probable(spec, dtype, is_weighted);
                        kinds(spec, &given);
                        kinds(LinearLoss { wanted, ..spec }, &given);
                    }
                }
            }
        }
    }

    #[test]
    fn the_plain_loss_is_three_products_and_two_passes_over_the_logits() {
        let mut given = call(DType::Bf16, false, false);
        given[BIAS] = None;
        let without_bias = LinearLoss { wanted: [true, true, false, false], ..spec() };
        let kinds_of = kinds(without_bias, &given);
        assert_eq!(kinds_of.iter().filter(|kind| **kind == "gemm").count(), 3, "{kinds_of:?}");
        assert!(kinds_of.len() <= 6, "{kinds_of:?}");
        assert_eq!(kinds(LinearLoss { wanted: [false; 4], ..spec() }, &given).len(), 2);
    }

    /// What the tensors between the parts of a call take, in bytes of the logits.
    #[test]
    fn the_gradient_of_the_logits_lies_in_their_place() {
        let (rows, classes, inputs) = (64, 4096, 16);
        let mut found = Vec::new();
        for dtype in [DType::Bf16, DType::F32] {
            let precision = Precision::usual(dtype, dtype).expect("a precision");
            let logits = rows * classes * dtype.bytes() as u64;
            let (of_rows, of_classes) = (tensor(DType::F32, &[rows]), tensor(DType::F32, &[classes]));
            let (x, w) = (tensor(dtype, &[rows, inputs]), tensor(dtype, &[classes, inputs]));
            let labels = tensor(DType::I64, &[rows]);
            for (smoothing, z, cap, is_weighted, most) in [
                (0.0, 0.0, None, false, 1.25),
                (0.1, 0.0, None, false, 1.25),
                (0.0, 0.0, None, true, 1.25),
                (0.0, 0.0, Some(30.0), false, 2.25),
                (0.1, 1e-4, Some(5.0), false, 2.25),
                (0.1, 0.0, None, true, 2.25),
            ] {
                let mut spec = LinearLoss { precision, z_loss: Real(z), soft_cap: cap.map(Real), ..spec() };
                spec.loss.label_smoothing = Real(smoothing);
                let share = of_rows.filter(|_| is_weighted);
                let weights = of_classes.filter(|_| is_weighted && smoothing != 0.0);
                let dw = tensor(DType::F32, &[classes, inputs]);
                let given = [x, w, of_classes, labels, share, weights, of_rows, of_rows, x, dw, of_classes];
                let recipe = draw(&Function::LinearLoss(spec), &given).expect("drawn");
                let cut = partition(&recipe.graph).expect("cut");
                let bytes = Memory::of_temporaries(&cut.parts, &cut.temporaries).expect("placed").bytes();
                let times = bytes as f64 / logits as f64;
                found.push((dtype, smoothing, z, cap, is_weighted, times, most));
                // With a probability for each class, whose gradient is no temporary.
                let loss = CrossEntropySpec { ignore_index: None, ..spec.loss };
                let spec = LinearLoss { targets: Targets::Probabilities, loss, wanted: [true; 4], ..spec };
                let of_both = tensor(dtype, &[rows, classes]);
                let given =
                    [x, w, of_classes, of_both, None, of_classes.filter(|_| is_weighted), of_rows, of_rows, x, dw, of_classes, of_both];
                let recipe = draw(&Function::LinearLoss(spec), &given).expect("drawn");
                let cut = partition(&recipe.graph).expect("cut");
                let bytes = Memory::of_temporaries(&cut.parts, &cut.temporaries).expect("placed").bytes();
                found.push((dtype, smoothing, z, cap, is_weighted, bytes as f64 / logits as f64, 2.25));
            }
        }
        assert!(found.iter().all(|&(.., times, most)| (1.0..most).contains(&times)), "{found:#?}");
    }

    #[test]
    fn sums_of_gradients_may_lie_where_they_were_read() {
        let recipe = draw(&Function::LinearLoss(spec()), &call(DType::Bf16, false, false)).expect("drawn");
        let parts = partition(&recipe.graph).expect("cut");
        let bound = Bound::new(&recipe.graph, &parts.parts, &parts.temporaries).expect("bound");
        for place in [DW, DBIAS] {
            let read = recipe.inputs.iter().find(|(_, of)| *of == place).expect("what was added up so far is read").0;
            let written = recipe.results.iter().find(|result| result.in_place_of == Some(place)).expect("it is written").uid;
            let (output, other) = (bound.place_of(written).expect("bound"), bound.place_of(read).expect("bound"));
            let pair = bound.pairs.iter().find(|pair| (pair.output, pair.other) == (output, other)).expect("a pair");
            assert!(pair.may_share, "the sums at place {place} may not");
        }
    }

    /// Runs what a call draws on the interpreter, every part by each engine's ways in turn under an order of events; the numbers of the results, in their order.
    fn interpreted(spec: LinearLoss, given: &[Option<Input>], values: &[Vec<f64>], variant: usize) -> Vec<Vec<f64>> {
        let recipe = draw(&Function::LinearLoss(spec), given).expect("drawn");
        let bytes = |dtype: DType, values: &[f64]| -> Vec<u8> {
            match dtype {
                DType::I64 => values.iter().flat_map(|value| (*value as i64).to_le_bytes()).collect(),
                _ => values.iter().flat_map(|value| (*value as f32).to_le_bytes()).collect(),
            }
        };
        let mut buffers = BTreeMap::new();
        for (uid, place) in &recipe.inputs {
            buffers.insert(*uid, bytes(given[*place].expect("given").dtype, &values[*place]));
        }
        for result in &recipe.results {
            // What is not written shows.
            buffers.insert(result.uid, bytes(result.dtype, &vec![f64::NAN; result.layout.elements() as usize]));
        }
        let engines: Vec<_> = verdigris_engines::engines().collect();
        let parts = Parts::all(&recipe.graph, &Arch::virtual_device(2), &engines).expect("is cut");
        let number = variant % parts.variants();
        let ran = parts.interpret(number, &mut buffers, &BTreeMap::new(), &Kernels::new(), &Options::schedule(variant as u64));
        ran.unwrap_or_else(|findings| panic!("{spec:?}: {findings}"));
        let numbers =
            |uid: Uid| buffers[&uid].chunks_exact(4).map(|word| f64::from(f32::from_le_bytes(word.try_into().expect("four bytes"))));
        recipe.results.iter().map(|result| numbers(result.uid).collect()).collect()
    }

    /// The formulas of [`LinearLoss`], row by row.
    fn by_formula(
        spec: &LinearLoss,
        has: impl Fn(usize) -> bool,
        values: &[Vec<f64>],
        [rows, classes, inputs]: [usize; 3],
    ) -> Vec<Vec<f64>> {
        let (x, w, smoothing, z) = (&values[0], &values[1], spec.loss.label_smoothing.0, spec.z_loss.0);
        let or_one = |place: usize, i: usize| if has(place) { values[place][i] } else { 1.0 };
        let start = |place: usize, count: usize| if spec.accumulates { values[place].clone() } else { vec![0.0; count] };
        let (mut losses, mut dx) = (vec![0.0; rows], vec![0.0; rows * inputs]);
        let (mut dw, mut dbias) = (start(DW, classes * inputs), start(DBIAS, classes));
        let mut dtargets = vec![0.0; rows * classes];
        for row in 0..rows {
            let label = values[TARGETS][row] as i64;
            if spec.loss.ignore_index == Some(label) {
                continue;
            }
            let own = &x[row * inputs..][..inputs];
            let chance = |c: usize| match spec.targets {
                Targets::Probabilities => values[TARGETS][row * classes + c] * or_one(WEIGHTS, c),
                _ => or_one(SHARE, row) * f64::from(u8::from(c as i64 == label)),
            };
            let dot = |c: usize| own.iter().zip(&w[c * inputs..]).map(|(a, b)| a * b).sum::<f64>() + values[BIAS][c];
            let y: Vec<f64> = (0..classes).map(dot).map(|y| spec.soft_cap.map_or(y, |cap| cap.0 * (y / cap.0).tanh())).collect();
            let total = y.iter().map(|y| y.exp()).sum::<f64>().ln();
            let q: Vec<f64> =
                (0..classes).map(|c| (1.0 - smoothing) * chance(c) + smoothing / classes as f64 * or_one(WEIGHTS, c)).collect();
            losses[row] = (0..classes).map(|c| q[c] * (total - y[c])).sum::<f64>() + z * total * total;
            for c in 0..classes {
                let part = (q.iter().sum::<f64>() + 2.0 * z * total) * (y[c] - total).exp();
                let slope = spec.soft_cap.map_or(1.0, |cap| 1.0 - (y[c] / cap.0).powi(2));
                let dy = or_one(DLOSS, row) * (part - q[c]) * slope;
                dtargets[row * classes + c] = or_one(DLOSS, row) * (1.0 - smoothing) * or_one(WEIGHTS, c) * (total - y[c]);
                dbias[c] += dy;
                for i in 0..inputs {
                    dx[row * inputs + i] += dy * w[c * inputs + i];
                    dw[c * inputs + i] += dy * own[i];
                }
            }
        }
        // In the order in which they are stored.
        match spec.targets {
            Targets::Probabilities => vec![losses, dtargets, dx, dw, dbias],
            _ => vec![losses, dx, dw, dbias],
        }
    }

    fn agree(spec: &LinearLoss, found: &[Vec<f64>], want: &[Vec<f64>]) {
        assert_eq!(found.len(), want.len());
        for (found, want) in found.iter().zip(want) {
            let most = want.iter().fold(0.0_f64, |most, value| most.max(value.abs()));
            let off = found.iter().zip(want).fold(0.0_f64, |most, (a, b)| most.max((a - b).abs()));
            assert!(off <= 1e-5 * most, "{spec:?}: {off} of {most}");
        }
    }

    #[test]
    fn each_form_is_its_formula_on_the_interpreter() {
        let sizes @ [rows, classes, inputs] = [6, 40, 16];
        let lengths = [rows * inputs, classes * inputs, classes, rows, rows, classes, rows, rows, rows * inputs, classes * inputs, classes];
        let mut state = 7_u64;
        let mut draw_one = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f64 / (1 << 23) as f64 - 1.0
        };
        let mut values: Vec<Vec<f64>> = lengths.iter().map(|&count| (0..count).map(|_| f64::from(draw_one() as f32)).collect()).collect();
        values[TARGETS] = [3.0, 0.0, -100.0, 39.0, 17.0, 17.0].to_vec();
        for place in [SHARE, WEIGHTS] {
            values[place].iter_mut().for_each(|value| *value = value.abs() + 0.25);
        }
        let forms = [
            (0.0, 0.0, None, false),
            (0.1, 0.0, None, false),
            (0.0, 0.0, Some(2.0), true),
            (0.2, 0.0, None, true),
            (0.1, 0.05, Some(3.0), false),
        ];
        for (number, (smoothing, z, cap, is_weighted)) in forms.into_iter().enumerate() {
            for (accumulates, has_dloss) in [(false, true), (true, false)] {
                let mut spec = LinearLoss { z_loss: Real(z), soft_cap: cap.map(Real), accumulates, ..spec() };
                spec.loss.label_smoothing = Real(smoothing);
                let mut given = call(DType::F32, is_weighted, smoothing != 0.0);
                given[DLOSS] = given[LOSSES].filter(|_| has_dloss);
                let want = by_formula(&spec, |place| given[place].is_some(), &values, sizes);
                agree(&spec, &interpreted(spec, &given, &values, 2 * number + usize::from(accumulates)), &want);
                let (spec, mut given) = probable(spec, DType::F32, is_weighted);
                given[DLOSS] = given[LOSSES].filter(|_| has_dloss);
                let mut values = values.clone();
                // What is no distribution: a sum of 1 would hide what multiplies it.
                values[TARGETS] = (0..rows * classes).map(|i| ((i * 7 % 11) as f64 - 2.0) / 64.0).collect();
                values.push(vec![0.0; rows * classes]);
                let want = by_formula(&spec, |place| given[place].is_some(), &values, sizes);
                agree(&spec, &interpreted(spec, &given, &values, 2 * number + usize::from(has_dloss)), &want);
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_told() {
        let told = |spec: LinearLoss, given: &[Option<Input>]| draw(&Function::LinearLoss(spec), given).unwrap_err().to_string();
        let with = |place: usize, input: Option<Input>| {
            let mut given = call(DType::F32, false, false);
            given[place] = input;
            given
        };
        assert!(told(spec(), &with(1, tensor(DType::F32, &[40, 15]))).contains("[40, 15] for 16 values"));
        assert!(told(spec(), &with(0, tensor(DType::F32, &[2, 3, 16]))).contains("rows are [rows, in]"));
        assert!(told(spec(), &with(TARGETS, tensor(DType::I64, &[5]))).contains("targets of dims [5] for 6 rows and 40 classes"));
        assert!(told(spec(), &with(TARGETS, None)).contains("tensor 3 of the call is missing"));
        let given = call(DType::F32, false, false);
        assert!(told(LinearLoss { z_loss: Real(-1.0), ..spec() }, &given).contains("at least 0"));
        assert!(told(LinearLoss { soft_cap: Some(Real(0.0)), ..spec() }, &given).contains("above 0"));
        assert!(told(LinearLoss { wanted: [true; 4], ..spec() }, &given).contains("the gradient of labels"));
        assert!(told(LinearLoss { targets: Targets::LabelsOfLogarithms, ..spec() }, &given).contains("results are logits"));
        let (mut chances, mut given_chances) = probable(spec(), DType::F32, false);
        chances.loss.ignore_index = Some(3);
        assert!(told(chances, &given_chances).contains("beside probabilities"));
        chances.loss.ignore_index = None;
        given_chances[TARGETS] = tensor(DType::F32, &[6, 39]);
        assert!(told(chances, &given_chances).contains("targets of dims [6, 39]"));
        let mut mean = spec();
        mean.loss.reduction = LossReduction::Mean;
        assert!(told(mean, &given).contains("each row has a loss"));
    }

    #[test]
    fn a_scaled_tensor_is_rounded_once() {
        let recipe = draw(&Function::Scaled(DType::Bf16), &[tensor(DType::F32, &[3, 5]), tensor(DType::F32, &[])]).expect("drawn");
        assert_eq!((recipe.results[0].dtype, recipe.results[0].layout.dims()), (DType::Bf16, &[3, 5][..]));
        assert_eq!(recipe.graph.nodes.len(), 1);
        assert!(draw(&Function::Scaled(DType::F32), &[tensor(DType::F32, &[3]), tensor(DType::F32, &[2])]).is_err());
    }
}
