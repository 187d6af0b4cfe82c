//! Scans along one axis, over the rows of a space.
//!
//! The formulas are those of [`crate::ops::scan`]. Both operands lie over the dims `[rows…, axis]`; their slots are numbered `x`, `y`.

use serde::{Deserialize, Serialize};
use verdigris_tensor::DType;

use super::chain::{Chain, ChainStep, View, canonical_dims};
use super::{Access, Operand, Slot, views};
use crate::error::Error;
use crate::ops::scan::ScanOp;

/// A scan of each row; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScanProblem {
    /// What is made of the elements so far.
    pub f: ScanOp,
    /// Whether an element is left out of its own result.
    pub exclusive: bool,
    /// Whether the scan goes from the last element of a row to the first.
    pub reverse: bool,
    /// Extents of the dims that number the rows. Canonical: no 1, sorted by the output's falling strides, merged where both strides allow.
    pub rows: Vec<u64>,
    /// Elements of a row.
    pub extent: u64,
    /// The type that is computed in: f64 if `x` is f64, else f32.
    pub compute: DType,
    /// Read.
    pub x: View,
    /// Written.
    pub y: View,
}

impl ScanProblem {
    /// Number of rows.
    pub fn row_count(&self) -> u64 {
        self.rows.iter().product()
    }

    /// Whether nothing is written.
    pub fn is_empty(&self) -> bool {
        self.row_count() == 0 || self.extent == 0
    }

    /// Arithmetic work: an operation an element.
    pub fn flops(&self) -> f64 {
        self.row_count() as f64 * self.extent as f64
    }

    /// Every slot, in order, each once.
    pub fn slots(&self) -> Vec<Slot> {
        let mut copy = self.clone();
        super::slots_of(|visit| [&mut copy.x, &mut copy.y].into_iter().for_each(|view| visit(&mut view.slot)))
    }

    /// Numbers the slots from 0 in the order of the fields and returns the old slot of each new one.
    pub fn number_slots(&mut self) -> Vec<Slot> {
        let old = self.slots();
        [&mut self.x, &mut self.y].into_iter().for_each(|view| super::renumber(&old, &mut view.slot));
        old
    }

    fn space(&self) -> Vec<u64> {
        self.rows.iter().copied().chain([self.extent]).collect()
    }

    /// What [`super::Problem::buffers`] says.
    pub(super) fn buffers(&self) -> Result<Vec<Operand>, Error> {
        let space = self.space();
        Ok(vec![views::operand("x", &self.x, &space, Access::Read)?, views::operand("y", &self.y, &space, Access::Written)?])
    }

    /// The same problem in canonical form, or the rule that it breaks.
    ///
    /// # Errors
    /// Views of another rank, an output that overlaps itself or shares its buffer, types that the op does not take.
    pub fn canonical(mut self) -> Result<ScanProblem, Error> {
        let space = self.space();
        super::check_extents("scan", &space)?;
        views::check_compute("scan", self.compute, "rows are computed in f32 or f64")?;
        for (name, view) in [("x", &self.x), ("y", &self.y)] {
            views::check_rank("scan", name, &view.strides, &space)?;
            views::check_dtype("scan", name, view.dtype, view.dtype.is_storage(), "a scan is of a stored type")?;
            let is_float = self.f != ScanOp::LogSumExp || view.dtype.is_float();
            views::check_dtype("scan", name, view.dtype, is_float, "a log-sum-exp is of floating-point data")?;
        }
        views::check_outputs("scan", &self.buffers()?)?;
        // The rows are sorted and merged as those of a chain that loads and stores the same views.
        let mut chain = Chain::default();
        chain.push(ChainStep::Load { from: self.x.clone(), window: None });
        chain.push(ChainStep::Store { x: 0, to: self.y.clone(), at: None });
        canonical_dims(&mut self.rows, 0, &mut [&mut chain], 0);
        chain.normalize(&self.space());
        for (view, step) in [&mut self.x, &mut self.y].into_iter().zip(&chain.steps) {
            if let Some(seen) = step.view() {
                view.strides.clone_from(&seen.strides);
            }
        }
        Ok(self)
    }
}
