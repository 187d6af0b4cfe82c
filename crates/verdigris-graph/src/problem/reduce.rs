//! A reduction with what stands before and behind it.
//!
//! ```text
//! for index in kept:
//!     for index' in reduced: run `before`                              it may store what it computes on the way
//!     r = f over all index' in reduced of value(index, index')         value: what step `value` of `before` gives
//!     run `after`, to which r is given
//! ```
//!
//! Sums, products and extrema are formed in `accumulator` (f32 or f64); [`ReductionOp`] has the formulas. The chain `before` runs over
//! the dims `[kept…, reduced…]`, each point once, `after` runs over `[kept…]`. Slots are numbered in the order of the steps.

use serde::{Deserialize, Serialize};
use verdigris_tensor::DType;

use super::chain::{Chain, ChainStep, canonical_dims};
use super::{Access, Operand, Slot};
use crate::error::Error;
use crate::ops::reduction::ReductionOp;

/// A reduction; the module's head has the formula.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReduceProblem {
    /// What is made of the values.
    pub f: ReductionOp,
    /// The type in which: f32 or f64.
    pub accumulator: DType,
    /// Extents of the dims that stay. Canonical: no 1, sorted by the last output's falling strides, merged where all strides allow.
    pub kept: Vec<u64>,
    /// Extents of the dims that are reduced. Canonical: likewise, sorted by the first input's falling strides.
    pub reduced: Vec<u64>,
    /// What is computed of each element before it is reduced.
    pub before: Chain,
    /// The step of `before` whose value is reduced.
    pub value: u32,
    /// What is done with each result.
    pub after: Chain,
}

impl ReduceProblem {
    /// Elements reduced for each result.
    pub fn depth(&self) -> u64 {
        self.reduced.iter().product()
    }

    /// Results.
    pub fn results(&self) -> u64 {
        self.kept.iter().product()
    }

    /// Whether nothing is written.
    pub fn is_empty(&self) -> bool {
        let stores_before = || !self.reduced.contains(&0) && self.before.stores().next().is_some();
        self.kept.contains(&0) || !(self.after.stores().next().is_some() || stores_before())
    }

    /// Arithmetic work: one operation for each function and element.
    pub fn flops(&self) -> f64 {
        let results = self.results() as f64;
        results * (self.depth() as f64 * (1 + self.before.functions()) as f64 + self.after.functions() as f64)
    }

    /// Every slot, in order, each once.
    pub fn slots(&self) -> Vec<Slot> {
        super::slots_of(|visit| self.clone().visit_slots(visit))
    }

    /// Numbers the slots from 0 in the order of the steps and returns the old slot of each new one.
    pub fn number_slots(&mut self) -> Vec<Slot> {
        let old = self.slots();
        self.visit_slots(&mut |slot| super::renumber(&old, slot));
        old
    }

    fn visit_slots(&mut self, visit: &mut dyn FnMut(&mut Slot)) {
        self.before.visit_slots(visit);
        self.after.visit_slots(visit);
    }

    fn space(&self) -> Vec<u64> {
        self.kept.iter().chain(&self.reduced).copied().collect()
    }

    /// What [`super::Problem::buffers`] says.
    pub(super) fn buffers(&self) -> Result<Vec<Operand>, Error> {
        let mut list = self.before.buffers(&self.space())?;
        // Only what is stored element by element may lie in the place of what is read so. Of nothing reduced, results are such elements too.
        let in_place = !self.reduced.is_empty() && list.iter().any(|operand| operand.access == Access::Written);
        list.iter_mut()
            .filter(|operand| !in_place && operand.access == Access::ReadInPlace)
            .for_each(|operand| operand.access = Access::Read);
        list.extend(self.after.buffers(&self.kept)?);
        Ok(list)
    }

    /// What [`super::Problem::scalars`] says.
    pub(super) fn scalars(&self) -> Vec<Slot> {
        self.before.scalars().chain(self.after.scalars()).collect()
    }

    /// The same problem in canonical form, or the rule that it breaks.
    ///
    /// # Errors
    /// As [`super::MapProblem::canonical`]; what is stored before the reduction and touched behind it, or an accumulator that is not f32 or f64.
    pub fn canonical(mut self) -> Result<ReduceProblem, Error> {
        let op = "reduce";
        let space = self.space();
        super::check_extents(op, &space)?;
        if !matches!(self.accumulator, DType::F32 | DType::F64) {
            let rule = "a reduction accumulates in f32 or f64";
            return Err(Error::DType { op: op.to_owned(), tensor: "accumulator".to_owned(), got: self.accumulator, rule });
        }
        self.before.check(op, &space, false)?;
        self.after.check(op, &self.kept, true)?;
        let structure = |rule| Err(Error::Structure { op: op.to_owned(), tensor: "chain".to_owned(), rule });
        let behind: Vec<Slot> = self.after.steps.iter().filter_map(|step| step.view().map(|view| view.slot)).collect();
        if self.before.stores().any(|written| behind.contains(&written.slot)) {
            return structure("what is stored before a reduction is not touched behind it");
        }
        match self.before.steps.get(self.value as usize) {
            None | Some(ChainStep::Scalar(_) | ChainStep::Store { .. }) => {
                return structure("the value reduced is that of a step, and neither a factor nor a store");
            }
            Some(_) => {}
        }
        for read in self.before.loads() {
            if self.after.stores().any(|written| written.slot == read.0.slot) {
                return structure("what is reduced is not written");
            }
        }
        self.value = self.before.simplify(DType::F32, Some(self.value)).unwrap_or(0);
        self.after.simplify(self.accumulator, None);
        let kept = self.kept.len();
        canonical_dims(&mut self.reduced, kept, &mut [&mut self.before], 0);
        canonical_dims(&mut self.kept, 0, &mut [&mut self.after, &mut self.before], 0);
        let space = self.space();
        self.before.normalize(&space);
        self.after.normalize(&self.kept);
        Ok(self)
    }
}
