//! Softmax, cross-entropy and their gradients, over the rows of a space.
//!
//! The formulas are those of [`crate::ops::softmax`]. Every operand lies over the dims `[rows…, axis]`; operands with one value a row (labels,
//! row losses, log-sum-exp) have stride 0 along the axis, a single value has stride 0 throughout. Slots are numbered in the order of the
//! fields.

use serde::{Deserialize, Serialize};
use verdigris_tensor::DType;

use super::chain::{Chain, ChainStep, View, canonical_dims};
use super::{Access, Operand, Slot, views};
use crate::error::Error;
use crate::op::Real;
use crate::ops::softmax::LossReduction;

/// What is computed of each row.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum RowFunction {
    /// Softmax or log-softmax.
    Softmax {
        /// Whether the logarithm is wanted.
        log: bool,
        /// Read.
        x: View,
        /// Written.
        y: View,
    },
    /// Its gradient.
    SoftmaxBackward {
        /// Whether `y` is the logarithm.
        log: bool,
        /// Read.
        y: View,
        /// Read.
        dy: View,
        /// Written.
        dx: View,
    },
    /// Cross-entropy.
    CrossEntropy {
        /// Smoothing, ignored label, reduction.
        loss_spec: Loss,
        /// Read.
        logits: View,
        /// Read; one a row.
        labels: View,
        /// Written; one a row, or one.
        loss: View,
        /// Written where asked for; one a row.
        lse: Option<View>,
    },
    /// Its gradient.
    CrossEntropyBackward {
        /// Smoothing, ignored label, reduction.
        loss_spec: Loss,
        /// Read.
        logits: View,
        /// Read; one a row.
        labels: View,
        /// Read; one a row, or one.
        dloss: View,
        /// Read where it is there; one a row.
        lse: Option<View>,
        /// Written.
        dlogits: View,
    },
}

/// What a loss makes of labels and rows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Loss {
    /// The part of the target that is spread over all classes.
    pub smoothing: Real,
    /// The label of rows that play no part.
    pub ignore_index: Option<i64>,
    /// What is made of the row losses.
    pub reduction: LossReduction,
}

/// A function of rows; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SoftmaxProblem {
    /// Extents of the dims that number the rows. Canonical: no 1, sorted by the widest output's falling strides, merged where all strides allow.
    pub rows: Vec<u64>,
    /// Elements of a row.
    pub extent: u64,
    /// The type that is computed in: f64 if a floating-point operand that is read is f64, else f32.
    pub compute: DType,
    /// What is computed.
    pub function: RowFunction,
}

impl SoftmaxProblem {
    /// Number of rows.
    pub fn row_count(&self) -> u64 {
        self.rows.iter().product()
    }

    /// The operands in the order of slots, with their names and whether they are written.
    pub fn operands(&self) -> Vec<(&'static str, &View, bool)> {
        match &self.function {
            RowFunction::Softmax { x, y, .. } => vec![("x", x, false), ("y", y, true)],
            RowFunction::SoftmaxBackward { y, dy, dx, .. } => vec![("y", y, false), ("dy", dy, false), ("dx", dx, true)],
            RowFunction::CrossEntropy { logits, labels, loss, lse, .. } => {
                let mut list = vec![("logits", logits, false), ("labels", labels, false), ("loss", loss, true)];
                list.extend(lse.iter().map(|lse| ("lse", lse, true)));
                list
            }
            RowFunction::CrossEntropyBackward { logits, labels, dloss, lse, dlogits, .. } => {
                let mut list = vec![("logits", logits, false), ("labels", labels, false), ("dloss", dloss, false)];
                list.extend(lse.iter().map(|lse| ("lse", lse, false)));
                list.push(("dlogits", dlogits, true));
                list
            }
        }
    }

    fn views_mut(&mut self) -> Vec<&mut View> {
        match &mut self.function {
            RowFunction::Softmax { x, y, .. } => vec![x, y],
            RowFunction::SoftmaxBackward { y, dy, dx, .. } => vec![y, dy, dx],
            RowFunction::CrossEntropy { logits, labels, loss, lse, .. } => {
                let mut list = vec![logits, labels, loss];
                list.extend(lse.iter_mut());
                list
            }
            RowFunction::CrossEntropyBackward { logits, labels, dloss, lse, dlogits, .. } => {
                let mut list = vec![logits, labels, dloss];
                list.extend(lse.iter_mut());
                list.push(dlogits);
                list
            }
        }
    }

    /// Whether nothing is written.
    pub fn is_empty(&self) -> bool {
        match &self.function {
            RowFunction::Softmax { .. } | RowFunction::SoftmaxBackward { .. } | RowFunction::CrossEntropyBackward { .. } => {
                self.row_count() == 0 || self.extent == 0
            }
            RowFunction::CrossEntropy { loss_spec, .. } => loss_spec.reduction == LossReduction::None && self.row_count() == 0,
        }
    }

    /// Arithmetic work: some five operations an element.
    pub fn flops(&self) -> f64 {
        5.0 * self.row_count() as f64 * self.extent as f64
    }

    /// Every slot, in order, each once.
    pub fn slots(&self) -> Vec<Slot> {
        super::slots_of(|visit| self.clone().views_mut().into_iter().for_each(|view| visit(&mut view.slot)))
    }

    /// Numbers the slots from 0 in the order of the fields and returns the old slot of each new one.
    pub fn number_slots(&mut self) -> Vec<Slot> {
        let old = self.slots();
        self.views_mut().into_iter().for_each(|view| super::renumber(&old, &mut view.slot));
        old
    }

    fn space(&self) -> Vec<u64> {
        self.rows.iter().copied().chain([self.extent]).collect()
    }

    /// The dims that an operand really has: those in which its stride is not 0, and all others 1.
    fn dims_of(&self, name: &'static str, view: &View) -> Vec<u64> {
        let mut dims = self.space();
        let rank = dims.len();
        if matches!(name, "labels" | "lse" | "loss" | "dloss") {
            dims[rank - 1] = 1;
        }
        let reduced = match &self.function {
            RowFunction::CrossEntropy { loss_spec, .. } | RowFunction::CrossEntropyBackward { loss_spec, .. } => {
                loss_spec.reduction != LossReduction::None
            }
            _ => false,
        };
        if reduced && matches!(name, "loss" | "dloss") {
            return vec![1; view.strides.len()];
        }
        dims
    }

    /// What [`super::Problem::buffers`] says. Beside a log-sum-exp the gradient of a logit is made from that logit alone, and may lie in its place.
    pub(super) fn buffers(&self) -> Result<Vec<Operand>, Error> {
        let is_element_by_element = matches!(self.function, RowFunction::CrossEntropyBackward { lse: Some(_), .. });
        let access = |name, written| match name {
            "logits" if is_element_by_element => Access::ReadInPlace,
            _ => views::access(written),
        };
        (self.operands().into_iter())
            .map(|(name, view, written)| views::operand(name, view, &self.dims_of(name, view), access(name, written)))
            .collect()
    }

    /// The same problem in canonical form, or the rule that it breaks.
    ///
    /// # Errors
    /// Views of another rank, an output that overlaps itself or shares its buffer, types that the op does not take.
    pub fn canonical(mut self) -> Result<SoftmaxProblem, Error> {
        let space = self.space();
        super::check_extents("softmax", &space)?;
        views::check_compute("softmax", self.compute, "rows are computed in f32 or f64")?;
        for (name, view, _) in self.operands() {
            views::check_rank("softmax", name, &view.strides, &space)?;
            let (fits, rule) = if name == "labels" {
                (view.dtype.is_integer(), "labels are integers")
            } else {
                (views::is_stored_float(view.dtype), "softmax and cross-entropy are of floating-point data")
            };
            views::check_dtype("softmax", name, view.dtype, fits, rule)?;
        }
        let operands = self.buffers()?;
        views::check_outputs("softmax", &operands)?;
        // The rows are sorted and merged as those of a chain that loads and stores the same views; the widest output leads.
        let mut chain = Chain::default();
        let mut order: Vec<usize> = (0..self.operands().len()).collect();
        let widths: Vec<(bool, u64)> =
            self.operands().iter().map(|(_, view, written)| (*written, u64::from(view.strides[space.len() - 1] != 0))).collect();
        order.sort_by_key(|&i| widths[i]);
        {
            let mut views = self.views_mut();
            for &i in &order {
                let view = views[i].clone();
                chain.push(if widths[i].0 {
                    ChainStep::Store { x: 0, to: view, at: None }
                } else {
                    ChainStep::Load { from: view, window: None }
                });
                views[i].strides.clear();
            }
        }
        let mut rows = std::mem::take(&mut self.rows);
        let extent = self.extent;
        canonical_dims(&mut rows, 0, &mut [&mut chain], 0);
        let space: Vec<u64> = rows.iter().copied().chain([extent]).collect();
        chain.normalize(&space);
        self.rows = rows;
        let mut views = self.views_mut();
        for (&i, step) in order.iter().zip(&chain.steps) {
            if let Some(view) = step.view() {
                views[i].strides.clone_from(&view.strides);
            }
        }
        Ok(self)
    }
}
