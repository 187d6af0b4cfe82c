//! A map: at each point of an iteration space, load, compute, store.
//!
//! ```text
//! for index in dims: run the chain
//! ```
//!
//! Pointwise chains with any number of outputs, casts, transposes, slices, broadcasts, pads (a load with a window) and concatenations
//! (loads with windows over each other) are maps; so are rows that go to a place which a number in memory tells (stores with a
//! [`crate::RowPlace`]). Slots are numbered in the order of the steps.

use serde::{Deserialize, Serialize};

use super::chain::{Chain, canonical_dims};
use super::{Operand, Slot};
use crate::error::Error;

/// Straight-line computation over an iteration space; the module's head has the formula.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MapProblem {
    /// Extents of the iteration space. Canonical: no 1, sorted by the last output's falling strides, and merged where all strides allow.
    pub dims: Vec<u64>,
    /// What is done at each point.
    pub chain: Chain,
}

impl MapProblem {
    /// Points of the iteration space.
    pub fn points(&self) -> u64 {
        self.dims.iter().product()
    }

    /// Whether nothing is written.
    pub fn is_empty(&self) -> bool {
        self.dims.contains(&0) || self.chain.stores().next().is_none()
    }

    /// Arithmetic work: one operation for each function and point.
    pub fn flops(&self) -> f64 {
        self.points() as f64 * self.chain.functions() as f64
    }

    /// Every slot, in order, each once.
    pub fn slots(&self) -> Vec<Slot> {
        super::slots_of(|visit| self.chain.clone().visit_slots(visit))
    }

    /// Numbers the slots from 0 in the order of the steps and returns the old slot of each new one.
    pub fn number_slots(&mut self) -> Vec<Slot> {
        let old = self.slots();
        self.chain.visit_slots(&mut |slot| super::renumber(&old, slot));
        old
    }

    /// What [`super::Problem::buffers`] says.
    pub(super) fn buffers(&self) -> Result<Vec<Operand>, Error> {
        self.chain.buffers(&self.dims)
    }

    /// The same problem in canonical form, or the rule that it breaks.
    ///
    /// # Errors
    /// A step that names no earlier value, a view of another rank, an output that overlaps itself or shares its buffer with other elements,
    /// attributes out of range, more than 2^63 points.
    pub fn canonical(mut self) -> Result<MapProblem, Error> {
        super::check_extents("map", &self.dims)?;
        self.chain.check("map", &self.dims, false)?;
        self.chain.simplify(verdigris_tensor::DType::F32, None);
        canonical_dims(&mut self.dims, 0, &mut [&mut self.chain], 0);
        self.chain.normalize(&self.dims);
        Ok(self)
    }
}
