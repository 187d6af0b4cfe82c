//! Cross-entropy: the op where it serves, and a composition where classes have weights or targets are probabilities.

use verdigris_graph::{BinaryOp, CrossEntropySpec, HostScalar, LossReduction, Real, ReductionOp, TernaryOp, Uid, UnaryOp};
use verdigris_tensor::DType;

use super::view::{View, in_format};
use super::{Drawing, LossForm, Targets, unfit};
use crate::error::Error;

/// The weight of each row in a mean, and which rows are ignored.
type Share = (Uid, Option<Uid>);

impl Drawing {
    /// How a tensor of one number a row of the logits is seen: without the class axis, with it, of extent 1.
    fn row_view(&self, place: usize, axis: u32) -> Result<View, Error> {
        let is_without = self.given(place)?.layout.rank() + 1 == self.given(0)?.layout.rank();
        Ok(if is_without { View::Across { axis: axis as usize } } else { View::Same })
    }

    pub(super) fn loss(&mut self, spec: CrossEntropySpec, form: LossForm) -> Result<(), Error> {
        let logits_given = self.given(0)?;
        let rows = self.row_view(1, spec.axis)?;
        let (logits, labels) = (self.input(0, "logits")?, self.input_as(1, "labels", rows)?);
        let wide = if logits_given.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        if form == LossForm::Wide {
            let loss = self.g.cross_entropy("loss", spec, logits, labels)?;
            return self.store_like(loss, "loss", wide, &logits_given.layout);
        }
        let (loss, lse) = self.g.cross_entropy_with_lse("cross entropy", spec, logits, labels)?;
        self.store_loss(loss, spec, rows)?;
        let row_dims = in_format(self.given(1)?.layout.dims(), false)?;
        self.store_as(lse, "lse", wide, row_dims, rows)
    }

    /// A loss without the class axis, in the type of the logits.
    fn store_loss(&mut self, loss: Uid, spec: CrossEntropySpec, rows: View) -> Result<(), Error> {
        let logits = self.given(0)?;
        let mut dims = logits.layout.dims().to_vec();
        let (dims, view) = match spec.reduction {
            LossReduction::None if rows == View::Same => {
                dims[spec.axis as usize] = 1;
                (dims, rows)
            }
            LossReduction::None => {
                dims.remove(spec.axis as usize);
                (dims, rows)
            }
            LossReduction::Sum | LossReduction::Mean => (Vec::new(), View::One { rank: dims.len() }),
        };
        self.store_as(loss, "loss", logits.dtype, in_format(&dims, false)?, view)
    }

    /// With `l = log-softmax x`, or x where that is a logarithm already, and the classes' weights `w`:
    ///
    /// ```text
    /// probabilities   −Σ w · ((1 − ε) · t + ε / C) · l            mean: Σ / rows
    /// labels          −(1 − ε) · w[t] · l[t] − ε / C · Σ w · l    mean: Σ / Σ w[t], both of the rows that are not ignored
    /// ```
    pub(super) fn class_loss(&mut self, spec: CrossEntropySpec, targets: Targets) -> Result<(), Error> {
        let given = self.given(0)?;
        let (rank, axis) = (given.layout.rank(), spec.axis as usize);
        let Some(&classes) = given.layout.dims().get(axis) else {
            return Err(unfit(format_args!("class axis {axis} of logits of {rank} dims"), "the axis is one of their dims"));
        };
        if !(0.0..=1.0).contains(&spec.label_smoothing.0) {
            return Err(unfit(format_args!("label smoothing {}", spec.label_smoothing), "label smoothing is from 0 to 1"));
        }
        let logits = self.input(0, "logits")?;
        let mut log = match targets {
            Targets::LabelsOfLogarithms => logits,
            Targets::Labels | Targets::Probabilities => self.g.softmax("log softmax", logits, spec.axis, true)?,
        };
        let weights = match self.given[2] {
            Some(given) if given.layout.dims() != [classes] => {
                let what = format!("weights of dims {:?} for {classes} classes", given.layout.dims());
                return Err(unfit(what, "there is one weight a class"));
            }
            Some(_) => Some(self.input_as(2, "weights", View::Channel { rank, axis })?),
            None => None,
        };
        if let Some(weights) = weights {
            log = self.g.binary("weighted", BinaryOp::Mul, log, weights)?;
        }
        let smoothing = spec.label_smoothing.0;
        let spread = if classes == 0 { 0.0 } else { smoothing / classes as f64 };
        let (row, share, rows) = match targets {
            Targets::Probabilities => {
                let mut targets = self.input(1, "targets")?;
                if self.given(1)?.layout.dims() != given.layout.dims() {
                    let what =
                        format!("probabilities of dims {:?} for logits of dims {:?}", self.given(1)?.layout.dims(), given.layout.dims());
                    return Err(unfit(what, "there is a probability for each logit"));
                }
                if smoothing != 0.0 {
                    targets = self.affine(targets, 1.0 - smoothing, spread)?;
                }
                let product = self.g.binary("loss", BinaryOp::Mul, log, targets)?;
                (self.class_sum(product, spec.axis)?, None, View::Across { axis })
            }
            Targets::Labels | Targets::LabelsOfLogarithms => {
                let rows = self.row_view(1, spec.axis)?;
                let labels = self.input_as(1, "labels", rows)?;
                let (row, share) = self.labeled(spec, labels, log, weights, classes, spread)?;
                (row, share, rows)
            }
        };
        let negative = self.affine(row, -1.0, 0.0)?;
        let all: Vec<u32> = (0..rank as u32).collect();
        let loss = match spec.reduction {
            LossReduction::None => negative,
            LossReduction::Sum => self.g.reduction("sum", ReductionOp::Add, negative, &all)?,
            LossReduction::Mean => {
                let sum = self.g.reduction("sum", ReductionOp::Add, negative, &all)?;
                let count = given.layout.dims().iter().enumerate().filter(|&(i, _)| i != axis).map(|(_, &dim)| dim as f64).product::<f64>();
                match share {
                    Some((share, ignored)) => self.mean_of_shares(sum, share, ignored, &all)?,
                    // The mean of no rows is 0 / 0.
                    None if count == 0.0 => self.g.binary("mean", BinaryOp::Div, sum, sum)?,
                    None => self.g.scale("mean", sum, HostScalar::Fixed(Real(1.0 / count)))?,
                }
            }
        };
        self.store_loss(loss, spec, rows)
    }

    /// Of labels, the negative loss of each row and, for a mean, the weight with which the row counts. A label that is neither a class nor
    /// ignored gives NaN.
    fn labeled(
        &mut self,
        spec: CrossEntropySpec,
        labels: Uid,
        log: Uid,
        weights: Option<Uid>,
        classes: u64,
        spread: f64,
    ) -> Result<(Uid, Option<Share>), Error> {
        let mut line = vec![1; self.dims_of(log).len()];
        line[spec.axis as usize] = classes;
        let class = self.g.gen_index("class", &line, spec.axis)?;
        let is_class = self.g.binary("is_class", BinaryOp::Eq, class, labels)?;
        // A select, since a product with the mask would be 0 · −∞ for classes whose logit is −∞.
        let chosen = self.class_sum_where(is_class, log, spec.axis)?;
        let mut row = self.affine(chosen, 1.0 - spec.label_smoothing.0, 0.0)?;
        if spread != 0.0 {
            let all = self.class_sum(log, spec.axis)?;
            let all = self.affine(all, spread, 0.0)?;
            row = self.g.binary("smoothed", BinaryOp::Add, row, all)?;
        }
        let mut known = self.class_sum(is_class, spec.axis)?;
        let mut share = match weights {
            _ if spec.reduction != LossReduction::Mean => None,
            Some(weights) => Some(self.class_sum_where(is_class, weights, spec.axis)?),
            None => Some(known),
        };
        let ignored = match spec.ignore_index {
            Some(index) => {
                let beyond = self.affine(labels, 1.0, -(index as f64))?;
                Some(self.g.unary("is_ignored", UnaryOp::Not, beyond)?)
            }
            None => None,
        };
        if let Some(ignored) = ignored {
            known = self.g.binary("known", BinaryOp::Or, known, ignored)?;
        }
        // `row · known / known` is the row, and 0 / 0 where the label is no class and not ignored.
        row = self.g.binary("known", BinaryOp::Mul, row, known)?;
        row = self.g.binary("known", BinaryOp::Div, row, known)?;
        if let Some(ignored) = ignored {
            let zero = self.affine(ignored, 0.0, 0.0)?;
            row = self.g.ternary("kept", TernaryOp::Select, zero, row, ignored)?;
            if let Some(share) = &mut share {
                *share = self.g.ternary("kept", TernaryOp::Select, zero, *share, ignored)?;
            }
        }
        Ok((row, share.map(|share| (share, ignored))))
    }

    /// `sum / Σ share`. If all rows are ignored, the mean is NaN and its gradient is 0, as PyTorch's is: the sum is divided by 1, and 0 / 0 is
    /// added.
    fn mean_of_shares(&mut self, sum: Uid, share: Uid, ignored: Option<Uid>, all: &[u32]) -> Result<Uid, Error> {
        let shares = self.g.reduction("shares", ReductionOp::Add, share, all)?;
        let Some(ignored) = ignored else { return Ok(self.g.binary("mean", BinaryOp::Div, sum, shares)?) };
        let are_ignored = self.g.reduction("ignored", ReductionOp::Min, ignored, all)?;
        let divisor = self.g.binary("shares", BinaryOp::Add, shares, are_ignored)?;
        let mean = self.g.binary("mean", BinaryOp::Div, sum, divisor)?;
        let is_one = self.g.unary("ignored", UnaryOp::Not, are_ignored)?;
        let one = self.g.binary("ignored", BinaryOp::Div, is_one, is_one)?;
        let nothing = self.affine(one, 1.0, -1.0)?;
        Ok(self.g.binary("mean", BinaryOp::Add, mean, nothing)?)
    }

    pub(super) fn affine(&mut self, x: Uid, scale: f64, shift: f64) -> Result<Uid, Error> {
        Ok(self.g.unary("affine", UnaryOp::Affine { scale: Real(scale), shift: Real(shift) }, x)?)
    }

    fn class_sum(&mut self, x: Uid, axis: u32) -> Result<Uid, Error> {
        Ok(self.g.reduction("class_sum", ReductionOp::Add, x, &[axis])?)
    }

    fn class_sum_where(&mut self, condition: Uid, x: Uid, axis: u32) -> Result<Uid, Error> {
        let zero = self.affine(condition, 0.0, 0.0)?;
        let kept = self.g.ternary("chosen", TernaryOp::Select, x, zero, condition)?;
        self.class_sum(kept, axis)
    }
}

#[cfg(test)]
mod tests {
    use verdigris_engines::arch::Arch;
    use verdigris_graph::PoolWindows;
    use verdigris_tensor::Layout;

    use super::super::{ComposedActivation, Convolution, Divisor, Dropout, ElementLoss, Extents, Function, Gradient, Input, Saved, draw};
    use super::*;

    fn input(dtype: DType, dims: &[u64]) -> Option<Input> {
        Some(Input { dtype, layout: Layout::row_major(dims).unwrap(), alignment_bytes: None })
    }

    /// Every part of a function's graph has an engine on a GPU.
    fn is_taken(function: &Function, given: &[Option<Input>]) {
        let graph = draw(function, given).unwrap_or_else(|error| panic!("{function:?}: {error}")).graph;
        for part in verdigris_graph::pattern::partition(&graph).unwrap().parts {
            let taken = verdigris_engines::engines().any(|engine| engine.accept(&part.problem, &Arch::h200()).is_ok());
            assert!(taken, "{function:?}: {:?}", part.problem);
        }
    }

    #[test]
    fn compositions_and_their_gradients_run_on_a_gpu() {
        let precision = verdigris_graph::Precision::Fp32;
        for dtype in [DType::F16, DType::F64] {
            for reduction in [LossReduction::None, LossReduction::Sum, LossReduction::Mean] {
                let spec = CrossEntropySpec { label_smoothing: Real(0.1), ignore_index: Some(-100), ..CrossEntropySpec::new(1, reduction) };
                let (logits, weights) = (input(dtype, &[4, 6, 3]), input(dtype, &[6]));
                let dy = if reduction == LossReduction::None { input(dtype, &[4, 3]) } else { input(dtype, &[]) };
                for (targets, given) in [
                    (Targets::Labels, input(DType::I64, &[4, 3])),
                    (Targets::LabelsOfLogarithms, input(DType::I64, &[4, 3])),
                    (Targets::Probabilities, logits),
                ] {
                    let of = Function::ClassLoss(spec, targets);
                    is_taken(&of, &[logits, given, weights]);
                    let saved = vec![Saved::Tensor(0), Saved::Tensor(1), Saved::Tensor(2)];
                    let gradient = Gradient { of, with_respect_to: 0, saved, dims: None, dtype: None };
                    is_taken(&Function::Gradient(Box::new(gradient)), &[dy, logits, given, weights]);
                }
            }
            let x = input(dtype, &[2, 3, 7, 6]);
            let windows = PoolWindows::Sliding {
                window: vec![3, 2],
                strides: vec![3, 3],
                dilations: vec![1, 1],
                pads_before: vec![1, 0],
                pads_after: vec![2, 1],
            };
            for divisor in [Divisor::Within(vec![1, 0]), Divisor::Fixed(-5)] {
                let of = Function::AveragePool(windows.clone(), divisor);
                is_taken(&of, &[x]);
                let gradient = Gradient { of, with_respect_to: 0, saved: Vec::new(), dims: Some(vec![2, 3, 7, 6]), dtype: None };
                is_taken(&Function::Gradient(Box::new(gradient)), &[input(dtype, &[2, 3, 3, 2])]);
            }
            let state = input(DType::I32, &[4]);
            for (of_channels, keeps_moments) in [(false, false), (true, false), (false, true), (true, true)] {
                is_taken(&Function::Dropout(Dropout { of_channels, keeps_moments, ..Dropout::new(Real(0.25)) }), &[x, state]);
            }
            let softplus = Function::Softplus { beta: Real(-1.5), threshold: Real(2.0) };
            for of in ComposedActivation::EACH.map(Function::Composed).into_iter().chain([softplus]) {
                is_taken(&of, &[x]);
                let gradient = Gradient { of, with_respect_to: 0, saved: vec![Saved::Tensor(0)], dims: None, dtype: None };
                is_taken(&Function::Gradient(Box::new(gradient)), &[x, x]);
            }
            is_taken(&Function::Softmin(1), &[x]);
            let (even, half) = (input(dtype, &[2, 4, 7, 6]), input(dtype, &[2, 2, 7, 6]));
            is_taken(&Function::Glu(1), &[even]);
            is_taken(&Function::GluBackward(1), &[half, even]);
            let random = Function::RandomPrelu { lower: Real(0.1), upper: Real(0.4) };
            for (of, beside) in [(Function::Prelu, input(dtype, &[3])), (Function::Prelu, input(dtype, &[1])), (random, state)] {
                is_taken(&of, &[x, beside]);
                for with_respect_to in 0..1 + usize::from(of == Function::Prelu) {
                    let saved = vec![Saved::Tensor(0), Saved::Tensor(1)];
                    let gradient = Gradient { of: of.clone(), with_respect_to, saved, dims: None, dtype: None };
                    is_taken(&Function::Gradient(Box::new(gradient)), &[x, x, beside]);
                }
            }
        }
        let conv = Convolution { strides: vec![1], pads_before: vec![1], pads_after: vec![1], dilations: vec![5], groups: 1, precision };
        let (y, w, bias) = (input(DType::F16, &[2, 4, 6]), input(DType::F16, &[4, 3, 2]), input(DType::F16, &[3]));
        let of = Function::ConvDgrad(conv.clone(), Extents::Spatial(vec![13]));
        for bias in [bias, None] {
            is_taken(&of, &[y, w, bias]);
        }
        for with_respect_to in 0..3 {
            let saved = vec![Saved::Tensor(0), Saved::Tensor(1), Saved::Tensor(2)];
            let gradient = Gradient { of: of.clone(), with_respect_to, saved, dims: None, dtype: None };
            is_taken(&Function::Gradient(Box::new(gradient)), &[input(DType::F16, &[2, 3, 13]), y, w, bias]);
        }
        // A result that no output reaches, and whose input has no pixels.
        let of = Function::ConvDgrad(Convolution { pads_before: vec![4], pads_after: vec![4], ..conv }, Extents::Spatial(vec![1]));
        let (y, w) = (input(DType::F16, &[2, 4, 1]), input(DType::F16, &[4, 3, 1]));
        is_taken(&of, &[y, w, bias]);
        for with_respect_to in 0..3 {
            let saved = vec![Saved::Tensor(0), Saved::Tensor(1), Saved::Tensor(2)];
            let gradient = Gradient { of: of.clone(), with_respect_to, saved, dims: None, dtype: None };
            is_taken(&Function::Gradient(Box::new(gradient)), &[input(DType::F16, &[2, 3, 1]), y, w, bias]);
        }
    }

    #[test]
    fn losses_of_elements_and_their_gradients_run_on_a_gpu() {
        let bend = Real(0.5);
        let losses = [
            ElementLoss::Squared,
            ElementLoss::Absolute,
            ElementLoss::Huber { delta: bend },
            ElementLoss::SmoothL1 { beta: bend },
            ElementLoss::BinaryCrossEntropy,
            ElementLoss::Likelihood,
            ElementLoss::SoftMargin,
            ElementLoss::Divergence { log_target: true },
            ElementLoss::Divergence { log_target: false },
        ];
        for dtype in [DType::Bf16, DType::F64] {
            let (x, scalar) = (input(dtype, &[4, 6, 3]), input(dtype, &[]));
            for loss in losses {
                for reduction in [LossReduction::None, LossReduction::Sum, LossReduction::Mean] {
                    let positive = (loss == ElementLoss::BinaryCrossEntropy).then(|| input(dtype, &[1, 1, 3])).flatten();
                    let tensors = [x, x, input(dtype, &[1, 6, 1]), positive];
                    let of = Function::ElementLoss(loss, reduction);
                    is_taken(&of, &tensors);
                    let dy = if reduction == LossReduction::None { x } else { scalar };
                    for with_respect_to in [0, 1] {
                        let saved = (0..4).map(Saved::Tensor).collect();
                        let gradient = Gradient { of: of.clone(), with_respect_to, saved, dims: None, dtype: None };
                        is_taken(&Function::Gradient(Box::new(gradient)), &[dy, x, x, tensors[2], positive]);
                    }
                }
            }
        }
    }

    #[test]
    fn losses_of_elements_that_do_not_fit_are_refused() {
        let refused = |loss, given: &[Option<Input>], text: &str| {
            let error = draw(&Function::ElementLoss(loss, LossReduction::Mean), given).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        };
        let x = input(DType::F32, &[4, 6]);
        refused(ElementLoss::Squared, &[x, input(DType::F32, &[4, 1])], "[4, 1] for an input of dims [4, 6]");
        for delta in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            refused(ElementLoss::Huber { delta: Real(delta) }, &[x, x], "delta is finite and above 0");
        }
        refused(ElementLoss::SmoothL1 { beta: Real(-1.0) }, &[x, x], "beta is finite and at least 0");
        refused(ElementLoss::Absolute, &[x, x, None, x], "binary cross-entropy alone has it");
    }

    #[test]
    fn losses_that_do_not_fit_are_refused() {
        let refused = |spec: CrossEntropySpec, targets, given: &[Option<Input>]| {
            draw(&Function::ClassLoss(spec, targets), given).unwrap_err().to_string()
        };
        let spec = CrossEntropySpec::new(1, LossReduction::Mean);
        let (logits, weights) = (input(DType::F32, &[4, 6]), input(DType::F32, &[6]));
        let error = refused(spec, Targets::Labels, &[logits, input(DType::I64, &[4]), input(DType::F32, &[5])]);
        assert!(error.contains("[5] for 6 classes"), "{error}");
        let error = refused(spec, Targets::Probabilities, &[logits, input(DType::F32, &[4, 1]), weights]);
        assert!(error.contains("[4, 1] for logits of dims [4, 6]"), "{error}");
        let error = refused(CrossEntropySpec::new(2, LossReduction::Mean), Targets::Labels, &[logits, input(DType::I64, &[4]), weights]);
        assert!(error.contains("class axis 2 of logits of 2 dims"), "{error}");
        let smooth = CrossEntropySpec { label_smoothing: Real(1.5), ..spec };
        let error = refused(smooth, Targets::Labels, &[logits, input(DType::I64, &[4]), weights]);
        assert!(error.contains("label smoothing 1.5"), "{error}");
    }
}
