//! Resampling, borders, and their gradients.
//!
//! The formulas are those of [`crate::ops::resample`], over three spatial dims; fewer are extents of 1 with [`Taps::Same`]. Slots are numbered in
//! the order of the fields.

use serde::{Deserialize, Serialize};
use verdigris_tensor::DType;

use super::{Operand, Slot, View, views};
use crate::error::Error;
use crate::ops::resample::{Border, Filter, Taps};
use crate::validate::STEP_LIMIT;

/// Resampling in one direction; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResampleProblem {
    /// Whether `from` is `dy` and `to` is `dx`, instead of `x` and `y`.
    pub backward: bool,
    /// Batch.
    pub n: u64,
    /// Channels.
    pub c: u64,
    /// Spatial extents of `x`: depth, height, width.
    pub extents: [u64; 3],
    /// Spatial extents of `y`.
    pub out: [u64; 3],
    /// Taps along each spatial dim.
    pub taps: [Taps; 3],
    /// The type that is computed in: f32 or f64.
    pub compute: DType,
    /// Read: `x`, or `dy`.
    pub from: View,
    /// Written: `y`, or `dx`.
    pub to: View,
}

impl ResampleProblem {
    /// `[n, c, extents…]`.
    pub fn x_dims(&self) -> [u64; 5] {
        [self.n, self.c, self.extents[0], self.extents[1], self.extents[2]]
    }

    /// `[n, c, out…]`.
    pub fn y_dims(&self) -> [u64; 5] {
        [self.n, self.c, self.out[0], self.out[1], self.out[2]]
    }

    /// The dims of what is read.
    pub fn from_dims(&self) -> [u64; 5] {
        if self.backward { self.y_dims() } else { self.x_dims() }
    }

    /// The dims of what is written.
    pub fn to_dims(&self) -> [u64; 5] {
        if self.backward { self.x_dims() } else { self.y_dims() }
    }

    /// The operands in the order of slots: name, view, dims, and whether it is written.
    pub fn operands(&self) -> [(&'static str, &View, [u64; 5], bool); 2] {
        let [from, to] = if self.backward { ["dy", "dx"] } else { ["x", "y"] };
        [(from, &self.from, self.from_dims(), false), (to, &self.to, self.to_dims(), true)]
    }

    /// Whether elements are moved: each output reads one with the weight 1, and has its type.
    pub fn moves(&self) -> bool {
        !self.backward && self.from.dtype == self.to.dtype && self.taps.iter().all(Taps::moves)
    }

    /// What each position along spatial dim `axis` of what is written reads of the other tensor, ascending, with weights: taps, or turned round for the
    /// gradient.
    pub fn rows(&self, axis: usize) -> Vec<Vec<(u64, f64)>> {
        let (extent, out, double) = (self.extents[axis], self.out[axis], self.compute == DType::F64);
        let taps = |o| self.taps[axis].of(o, extent, double);
        if !self.backward {
            return (0..out).map(taps).collect();
        }
        let mut rows = vec![Vec::new(); extent as usize];
        for o in 0..out {
            for (i, weight) in taps(o) {
                rows[i as usize].push((o, weight));
            }
        }
        rows
    }

    /// Whether nothing is written.
    pub fn is_empty(&self) -> bool {
        self.to_dims().contains(&0)
    }

    /// Arithmetic work: one operation for each tap of each output.
    pub fn flops(&self) -> f64 {
        self.taps.iter().map(|taps| taps.most() as f64).product::<f64>() * self.y_dims().iter().map(|&dim| dim as f64).product::<f64>()
    }

    /// Every slot, in order, each once.
    pub fn slots(&self) -> Vec<Slot> {
        let mut copy = self.clone();
        super::slots_of(|visit| [&mut copy.from, &mut copy.to].into_iter().for_each(|view| visit(&mut view.slot)))
    }

    /// Numbers the slots from 0 in the order of the fields and returns the old slot of each new one.
    pub fn number_slots(&mut self) -> Vec<Slot> {
        let old = self.slots();
        [&mut self.from, &mut self.to].into_iter().for_each(|view| super::renumber(&old, &mut view.slot));
        old
    }

    /// What [`super::Problem::buffers`] says.
    pub(super) fn buffers(&self) -> Result<Vec<Operand>, Error> {
        (self.operands().into_iter()).map(|(name, view, dims, written)| views::operand(name, view, &dims, views::access(written))).collect()
    }

    /// The same problem in canonical form, or the rule that it breaks.
    ///
    /// # Errors
    /// Views that have not five strides, spatial dims without elements, scales and borders that reach beyond the tensor, an output that overlaps itself or
    /// shares its buffer, types that the op does not take.
    pub fn canonical(mut self) -> Result<ResampleProblem, Error> {
        let op = || "resample".to_owned();
        super::check_extents("resample", &self.x_dims())?;
        super::check_extents("resample", &self.y_dims())?;
        let structure = |tensor: &str, rule| Err(Error::Structure { op: op(), tensor: tensor.to_owned(), rule });
        for (taps, (&extent, &out)) in self.taps.iter_mut().zip(self.extents.iter().zip(&self.out)) {
            let attribute = |attribute, value: String, rule| Err(Error::Attribute { op: op(), attribute, value, rule });
            if extent == 0 || out == 0 || extent.max(out) >= STEP_LIMIT {
                let value = format!("{extent} and {out}");
                return attribute("extents", value, "spatial dims have at least one element, and less than 2^31");
            }
            match *taps {
                Taps::Same if extent != out => return attribute("out", out.to_string(), "the same elements are as many"),
                Taps::Filter { scale, .. } if !(0.0..=1e31).contains(&scale.0) => {
                    return attribute("scale", scale.to_string(), "a scale is finite and not below 0");
                }
                Taps::Border { border, before } => {
                    let (extent, out) = (extent as i64, out as i64);
                    let Some(after) = out.checked_sub(extent).and_then(|more| more.checked_sub(before)) else {
                        return attribute("before", before.to_string(), "a border is below 2^31");
                    };
                    let most = match border {
                        Border::Reflect => extent - 1,
                        Border::Circular => extent,
                        Border::Replicate => STEP_LIMIT as i64,
                    };
                    let least = if border == Border::Circular { 0 } else { 1 - extent };
                    if before.max(after) > most || before.min(after) < least {
                        let value = format!("{before} and {after}");
                        return attribute(
                            "before",
                            value,
                            "a reflected border is smaller than the tensor, a circular one at most as large",
                        );
                    }
                }
                _ => {}
            }
            *taps = taps.simplest(extent, out);
        }
        for (name, view, _, _) in self.operands() {
            if view.strides.len() != 5 {
                return structure(name, "a view has five strides");
            }
            let is_number = view.dtype.is_storage() && view.dtype != DType::Bool;
            views::check_dtype("resample", name, view.dtype, is_number, "resampling takes numbers of a storage type")?;
        }
        views::check_compute("resample", self.compute, "resampling computes in f32 or f64")?;
        let operands = self.buffers()?;
        views::check_outputs("resample", &operands)?;
        let dims = [self.from_dims(), self.to_dims()];
        for (view, dims) in [&mut self.from, &mut self.to].into_iter().zip(dims) {
            view.strides.iter_mut().zip(dims).filter(|(_, dim)| *dim <= 1).for_each(|(stride, _)| *stride = 0);
        }
        Ok(self)
    }

    /// Whether some spatial dim has a filter of several taps.
    pub fn mixes(&self) -> bool {
        self.taps.iter().any(|taps| matches!(taps, Taps::Filter { filter: Filter::Linear { .. } | Filter::Cubic { .. }, .. }))
    }
}
