//! Normalization of the rows of a space by their own statistics, and its gradient.
//!
//! The formulas are those of [`crate::ops::norm`]. Every operand lies over the dims `[rows…, elements…]`: the first number the rows, along the others a
//! row's elements lie. Statistics have stride 0 along the elements; `scale` and `bias` have it wherever they are repeated, and `dscale` and `dbias`
//! wherever they are sums. Slots are numbered in the order of the fields.

use serde::{Deserialize, Serialize};
use verdigris_tensor::DType;

use super::chain::{Chain, ChainStep, View, canonical_dims};
use super::{Operand, Slot, views};
use crate::error::Error;
use crate::op::Real;
use crate::ops::norm::NormKind;

/// What is computed, and where its operands lie.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum NormPass {
    /// Rows normalized.
    Forward {
        /// Read.
        x: View,
        /// Read, and added to `x` first.
        residual: Option<View>,
        /// Read.
        scale: Option<View>,
        /// Read.
        bias: Option<View>,
        /// Written.
        y: View,
        /// Written where asked for: `x + residual`.
        sum: Option<View>,
        /// Written where asked for; one a row.
        mean: Option<View>,
        /// Written where asked for; one a row.
        inv: Option<View>,
    },
    /// The gradients.
    Backward {
        /// Read.
        x: View,
        /// Read.
        dy: View,
        /// Read.
        scale: Option<View>,
        /// Read where it is there; one a row.
        mean: Option<View>,
        /// Read where it is there; one a row.
        inv: Option<View>,
        /// Read, and added to `dx`.
        dsum: Option<View>,
        /// Written where asked for.
        dx: Option<View>,
        /// Written where asked for; summed where its stride is 0.
        dscale: Option<View>,
        /// Written where asked for; summed where its stride is 0.
        dbias: Option<View>,
    },
}

/// An operand of a pass: its name, where it lies, whether it is written.
type Named<V> = (&'static str, V, bool);

/// The operands of a pass that are there, in the order of slots, by references of either kind.
macro_rules! operands_of {
    ($pass:expr, $reference:ident) => {{
        let list = match $pass {
            NormPass::Forward { x, residual, scale, bias, y, sum, mean, inv } => vec![
                ("x", Some(x), false),
                ("residual", residual.$reference(), false),
                ("scale", scale.$reference(), false),
                ("bias", bias.$reference(), false),
                ("y", Some(y), true),
                ("sum", sum.$reference(), true),
                ("mean", mean.$reference(), true),
                ("inv", inv.$reference(), true),
            ],
            NormPass::Backward { x, dy, scale, mean, inv, dsum, dx, dscale, dbias } => vec![
                ("x", Some(x), false),
                ("dy", Some(dy), false),
                ("scale", scale.$reference(), false),
                ("mean", mean.$reference(), false),
                ("inv", inv.$reference(), false),
                ("dsum", dsum.$reference(), false),
                ("dx", dx.$reference(), true),
                ("dscale", dscale.$reference(), true),
                ("dbias", dbias.$reference(), true),
            ],
        };
        list.into_iter().filter_map(|(name, view, written)| Some((name, view?, written))).collect()
    }};
}

impl NormPass {
    fn views_mut(&mut self) -> Vec<Named<&mut View>> {
        operands_of!(self, as_mut)
    }
}

/// Normalization; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NormProblem {
    /// Which statistics.
    pub kind: NormKind,
    /// What is added to the variance or the mean square.
    pub eps: Real,
    /// Whether the scale is stored less 1.
    pub zero_centred: bool,
    /// Extents of the dims that number the rows. Canonical: no 1, sorted by the falling strides of what is written element by element, merged where
    /// all strides allow.
    pub rows: Vec<u64>,
    /// Extents of the dims that a row's elements lie along. Canonical as the rows.
    pub elements: Vec<u64>,
    /// The type that is computed in: f64 if an operand that is read is f64, else f32.
    pub compute: DType,
    /// What is computed.
    pub pass: NormPass,
}

impl NormProblem {
    /// Number of rows.
    pub fn row_count(&self) -> u64 {
        self.rows.iter().product()
    }

    /// Elements of a row.
    pub fn row_elements(&self) -> u64 {
        self.elements.iter().product()
    }

    /// Extents of all dims, those of the rows first.
    pub fn space(&self) -> Vec<u64> {
        self.rows.iter().chain(&self.elements).copied().collect()
    }

    /// The operands in the order of slots, with their names and whether they are written.
    pub fn operands(&self) -> Vec<(&'static str, &View, bool)> {
        operands_of!(&self.pass, as_ref)
    }

    /// The operand of this name, if it is there.
    pub fn operand(&self, name: &str) -> Option<&View> {
        self.operands().into_iter().find(|(known, ..)| *known == name).map(|(_, view, _)| view)
    }

    /// The dims of an operand: the space's, 1 where a statistic is one a row and where a gradient is a sum.
    pub fn dims_of(&self, name: &str, view: &View) -> Vec<u64> {
        let mut dims = self.space();
        let rows = self.rows.len();
        match name {
            "mean" | "inv" => dims[rows..].fill(1),
            "dscale" | "dbias" => dims.iter_mut().zip(&view.strides).filter(|(_, stride)| **stride == 0).for_each(|(dim, _)| *dim = 1),
            _ => {}
        }
        dims
    }

    /// Whether nothing is written.
    pub fn is_empty(&self) -> bool {
        let written = self.operands().into_iter().filter(|(.., written)| *written);
        written.into_iter().all(|(name, view, _)| self.dims_of(name, view).contains(&0))
    }

    /// Arithmetic work: some eight operations an element, sixteen of a gradient.
    pub fn flops(&self) -> f64 {
        let each = if matches!(self.pass, NormPass::Forward { .. }) { 8.0 } else { 16.0 };
        each * self.row_count() as f64 * self.row_elements() as f64
    }

    /// Every slot, in order, each once.
    pub fn slots(&self) -> Vec<Slot> {
        super::slots_of(|visit| self.pass.clone().views_mut().into_iter().for_each(|(_, view, _)| visit(&mut view.slot)))
    }

    /// Numbers the slots from 0 in the order of the fields and returns the old slot of each new one.
    pub fn number_slots(&mut self) -> Vec<Slot> {
        let old = self.slots();
        self.pass.views_mut().into_iter().for_each(|(_, view, _)| super::renumber(&old, &mut view.slot));
        old
    }

    /// What [`super::Problem::buffers`] says.
    pub(super) fn buffers(&self) -> Result<Vec<Operand>, Error> {
        (self.operands().into_iter())
            .map(|(name, view, written)| views::operand(name, view, &self.dims_of(name, view), views::access(written)))
            .collect()
    }

    /// The same problem in canonical form, or the rule that it breaks.
    ///
    /// # Errors
    /// Views of another rank, an output that overlaps itself or shares its buffer, types or combinations of operands that the op does not take.
    pub fn canonical(mut self) -> Result<NormProblem, Error> {
        let op = || "norm".to_owned();
        let space = self.space();
        super::check_extents("norm", &space)?;
        views::check_compute("norm", self.compute, "rows are computed in f32 or f64")?;
        if !(self.eps.0.is_finite() && self.eps.0 >= 0.0) {
            let rule = "eps is finite and not negative";
            return Err(Error::Attribute { op: op(), attribute: "eps", value: self.eps.to_string(), rule });
        }
        for (name, view, _) in self.operands() {
            views::check_rank("norm", name, &view.strides, &space)?;
            views::check_dtype("norm", name, view.dtype, views::is_stored_float(view.dtype), "normalization is of floating-point data")?;
        }
        self.check_combination()?;
        let operands = self.buffers()?;
        views::check_outputs("norm", &operands)?;
        // The dims are sorted and merged as those of a chain that loads and stores the same views; what is written element by element leads.
        let leader = self.operands().iter().position(|(name, ..)| matches!(*name, "y" | "dx")).unwrap_or(0);
        let mut chain = Chain::default();
        let mut views = self.pass.views_mut();
        let mut order: Vec<usize> = (0..views.len()).filter(|&i| i != leader).collect();
        order.push(leader);
        for &i in &order {
            let view = views[i].1.clone();
            chain.push(if i == leader {
                ChainStep::Store { x: 0, to: view, at: None }
            } else {
                ChainStep::Load { from: view, window: None }
            });
        }
        let rows = self.rows.len();
        canonical_dims(&mut self.elements, rows, &mut [&mut chain], 0);
        canonical_dims(&mut self.rows, 0, &mut [&mut chain], 0);
        // Strides along a dim of nothing stay: they tell whether a gradient is a sum over it.
        for (&i, step) in order.iter().zip(&chain.steps) {
            if let Some(view) = step.view() {
                views[i].1.strides.clone_from(&view.strides);
            }
        }
        Ok(self)
    }

    /// Which operands there may be beside which.
    fn check_combination(&self) -> Result<(), Error> {
        let structure = |tensor: &str, rule| Err(Error::Structure { op: "norm".to_owned(), tensor: tensor.to_owned(), rule });
        let rms = self.kind == NormKind::Rms;
        match &self.pass {
            NormPass::Forward { mean: Some(_), .. } | NormPass::Backward { mean: Some(_), .. } if rms => {
                structure("mean", "root-mean-square norm has no mean")
            }
            NormPass::Forward { residual: None, sum: Some(_), .. } => structure("sum", "there is a sum where there is a residual"),
            NormPass::Backward { mean: Some(_), inv: None, .. } => structure("mean", "the statistics are given all or not at all"),
            NormPass::Backward { mean: None, inv: Some(_), .. } if !rms => structure("inv", "the statistics are given all or not at all"),
            NormPass::Backward { dx: None, dsum: Some(_), .. } => structure("dsum", "the gradient of the sum is added to dx"),
            NormPass::Backward { dx: None, dscale: None, dbias: None, .. } => {
                structure("dx", "at least one of dx, dscale and dbias is written")
            }
            _ => Ok(()),
        }
    }
}
