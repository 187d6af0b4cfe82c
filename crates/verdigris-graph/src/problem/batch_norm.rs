//! Batch normalization in training, its gradient, and the statistics of channels.
//!
//! The formulas are those of [`crate::ops::batch_norm`]. Every operand lies over the dims `[rows…, channels]`, the rows being the elements of a channel;
//! operands with one value a channel have stride 0 along the rows. Slots are numbered in the order of the fields.

use serde::{Deserialize, Serialize};
use verdigris_tensor::DType;

use super::chain::{Chain, ChainStep, View, canonical_dims};
use super::{Access, Operand, Slot, views};
use crate::error::Error;
use crate::op::Real;
use crate::ops::batch_norm::broken_by;
use crate::ops::pointwise::UnaryOp;

/// What is computed of each channel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ChannelFunction {
    /// Normalization with the batch's own statistics.
    Forward {
        /// Added to the variance.
        eps: Real,
        /// The part of the new running statistics that is this batch's.
        momentum: Real,
        /// Whether the result is at least 0.
        relu: bool,
        /// The activation of the result: any but ReLU.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        activation: Option<UnaryOp>,
        /// Read.
        x: View,
        /// Read; one a channel.
        scale: Option<View>,
        /// Read; one a channel.
        bias: Option<View>,
        /// Read.
        add: Option<View>,
        /// Read; one a channel.
        running_mean: Option<View>,
        /// Read; one a channel.
        running_var: Option<View>,
        /// Written.
        y: View,
        /// Written; one a channel.
        mean: Option<View>,
        /// Written; one a channel.
        inv: Option<View>,
        /// Written; one a channel.
        next_mean: Option<View>,
        /// Written; one a channel.
        next_var: Option<View>,
    },
    /// Its gradient.
    Backward {
        /// Whether the result was at least 0.
        relu: bool,
        /// The activation of the result: any but ReLU.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        activation: Option<UnaryOp>,
        /// Read.
        dy: View,
        /// Read.
        x: View,
        /// The result, read.
        y: Option<View>,
        /// Read; one a channel.
        scale: Option<View>,
        /// Read; one a channel.
        bias: Option<View>,
        /// Read; one a channel.
        mean: View,
        /// Read; one a channel.
        inv: View,
        /// Written.
        dx: Option<View>,
        /// Written; one a channel.
        dscale: Option<View>,
        /// Written; one a channel.
        dbias: Option<View>,
        /// Written.
        dadd: Option<View>,
    },
    /// Mean and squared deviations.
    Statistics {
        /// Read.
        x: View,
        /// Written; one a channel.
        mean: View,
        /// Written; one a channel.
        m2: Option<View>,
    },
}

/// A function of channels; the module's head has the formulas.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchNormProblem {
    /// Extents of the dims that number the elements of a channel. Canonical: no 1, sorted by the widest output's falling strides, merged where all
    /// strides allow.
    pub rows: Vec<u64>,
    /// Channels.
    pub channels: u64,
    /// The type that is computed in: f64 if an operand that is read is f64, else f32.
    pub compute: DType,
    /// What is computed.
    pub function: ChannelFunction,
}

/// Names of the operands that have an element for each of `x`.
const WHOLE: [&str; 6] = ["x", "add", "y", "dy", "dx", "dadd"];

impl BatchNormProblem {
    /// Elements of a channel.
    pub fn count(&self) -> u64 {
        self.rows.iter().product()
    }

    /// The operands in the order of slots, with their names and whether they are written.
    pub fn operands(&self) -> Vec<(&'static str, &View, bool)> {
        match &self.function {
            ChannelFunction::Forward { x, scale, bias, add, running_mean, running_var, y, mean, inv, next_mean, next_var, .. } => [
                ("x", Some(x), false),
                ("scale", scale.as_ref(), false),
                ("bias", bias.as_ref(), false),
                ("add", add.as_ref(), false),
                ("running_mean", running_mean.as_ref(), false),
                ("running_var", running_var.as_ref(), false),
                ("y", Some(y), true),
                ("mean", mean.as_ref(), true),
                ("inv", inv.as_ref(), true),
                ("next_mean", next_mean.as_ref(), true),
                ("next_var", next_var.as_ref(), true),
            ]
            .into_iter()
            .filter_map(|(name, view, written)| Some((name, view?, written)))
            .collect(),
            ChannelFunction::Backward { dy, x, y, scale, bias, mean, inv, dx, dscale, dbias, dadd, .. } => [
                ("dy", Some(dy), false),
                ("x", Some(x), false),
                ("y", y.as_ref(), false),
                ("scale", scale.as_ref(), false),
                ("bias", bias.as_ref(), false),
                ("mean", Some(mean), false),
                ("inv", Some(inv), false),
                ("dx", dx.as_ref(), true),
                ("dscale", dscale.as_ref(), true),
                ("dbias", dbias.as_ref(), true),
                ("dadd", dadd.as_ref(), true),
            ]
            .into_iter()
            .filter_map(|(name, view, written)| Some((name, view?, written)))
            .collect(),
            ChannelFunction::Statistics { x, mean, m2 } => {
                let mut list = vec![("x", x, false), ("mean", mean, true)];
                list.extend(m2.iter().map(|m2| ("m2", m2, true)));
                list
            }
        }
    }

    /// The operand of a name, if it is there.
    pub fn operand(&self, name: &str) -> Option<&View> {
        self.operands().into_iter().find(|(known, ..)| *known == name).map(|(_, view, _)| view)
    }

    /// Whether the operand of this name has an element for each of `x`, and not one a channel.
    pub fn is_whole(name: &str) -> bool {
        WHOLE.contains(&name)
    }

    fn views_mut(&mut self) -> Vec<&mut View> {
        match &mut self.function {
            ChannelFunction::Forward { x, scale, bias, add, running_mean, running_var, y, mean, inv, next_mean, next_var, .. } => {
                let read = [scale, bias, add, running_mean, running_var].into_iter().flatten();
                let written = [mean, inv, next_mean, next_var].into_iter().flatten();
                [x].into_iter().chain(read).chain([y]).chain(written).collect()
            }
            ChannelFunction::Backward { dy, x, y, scale, bias, mean, inv, dx, dscale, dbias, dadd, .. } => {
                let read = [y, scale, bias].into_iter().flatten();
                let written = [dx, dscale, dbias, dadd].into_iter().flatten();
                [dy, x].into_iter().chain(read).chain([mean, inv]).chain(written).collect()
            }
            ChannelFunction::Statistics { x, mean, m2 } => [x, mean].into_iter().chain(m2.iter_mut()).collect(),
        }
    }

    /// The activation behind the normalization, ReLU among them.
    pub fn activation(&self) -> Option<UnaryOp> {
        match self.function {
            ChannelFunction::Forward { relu, activation, .. } | ChannelFunction::Backward { relu, activation, .. } => {
                if relu {
                    Some(UnaryOp::Relu)
                } else {
                    activation
                }
            }
            ChannelFunction::Statistics { .. } => None,
        }
    }

    /// Whether nothing is written.
    pub fn is_empty(&self) -> bool {
        self.channels == 0
    }

    /// Arithmetic work: some eight operations an element.
    pub fn flops(&self) -> f64 {
        8.0 * self.count() as f64 * self.channels as f64
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
        self.rows.iter().copied().chain([self.channels]).collect()
    }

    /// What [`super::Problem::buffers`] says.
    pub(super) fn buffers(&self) -> Result<Vec<Operand>, Error> {
        (self.operands().into_iter())
            .map(|(name, view, written)| {
                let mut dims = self.space();
                if !Self::is_whole(name) {
                    let rows = dims.len() - 1;
                    dims[..rows].fill(1);
                }
                let access = match name {
                    // Each is read by whoever writes its next value.
                    "running_mean" | "running_var" if !written => Access::ReadInPlace,
                    _ => views::access(written),
                };
                views::operand(name, view, &dims, access)
            })
            .collect()
    }

    /// What the op's own check says of attributes and of operands that belong together.
    fn check(&self) -> Result<(), Error> {
        let op = || "batch_norm".to_owned();
        let structure = |tensor: &str, rule| Err(Error::Structure { op: op(), tensor: tensor.to_owned(), rule });
        let check_activation = |activation: Option<UnaryOp>, relu: bool, alone: bool| {
            broken_by(activation, relu, alone).map_or(Ok(()), |rule| structure("x", rule))?;
            activation.map_or(Ok(()), |f| f.check("batch_norm"))
        };
        match &self.function {
            ChannelFunction::Forward { relu, activation, eps, momentum, add, running_mean, running_var, next_mean, next_var, .. } => {
                check_activation(*activation, *relu, add.is_none())?;
                let attribute =
                    |attribute, value: Real, rule| Err(Error::Attribute { op: op(), attribute, value: value.to_string(), rule });
                if !(eps.0.is_finite() && eps.0 >= 0.0) {
                    return attribute("eps", *eps, "eps is finite and not negative");
                }
                if !momentum.0.is_finite() {
                    return attribute("momentum", *momentum, "momentum is finite");
                }
                if running_mean.is_some() != next_mean.is_some() || running_var.is_some() != next_var.is_some() {
                    return structure("next_mean", "a running statistic is read and its next value written, or neither");
                }
                if running_var.is_some() && self.count() < 2 {
                    return structure("running_var", "a running variance is over N − 1: a channel has more than one element");
                }
                Ok(())
            }
            ChannelFunction::Backward { relu, activation, y, bias, dx, dscale, dbias, dadd, .. } => {
                check_activation(*activation, *relu, y.is_none() && dadd.is_none())?;
                if !relu && activation.is_none() && (y.is_some() || bias.is_some() || dadd.is_some()) {
                    return structure(
                        "y",
                        "without an activation, there is neither the result nor the bias nor a gradient of what was added",
                    );
                }
                if y.is_some() && bias.is_some() {
                    return structure("bias", "where the result is read, the bias is not");
                }
                if [dx, dscale, dbias, dadd].into_iter().all(Option::is_none) {
                    return structure("dx", "at least one gradient is written");
                }
                Ok(())
            }
            ChannelFunction::Statistics { .. } => Ok(()),
        }
    }

    /// The same problem in canonical form, or the rule that it breaks.
    ///
    /// # Errors
    /// Views of another rank, channels without elements, operands that do not belong together, an output that overlaps itself or shares its
    /// buffer, types that the op does not take.
    pub fn canonical(mut self) -> Result<BatchNormProblem, Error> {
        let op = || "batch_norm".to_owned();
        let space = self.space();
        super::check_extents("batch_norm", &space)?;
        views::check_compute("batch_norm", self.compute, "channels are computed in f32 or f64")?;
        if self.count() == 0 {
            let rule = "a channel has at least one element to take a mean of";
            return Err(Error::Structure { op: op(), tensor: "x".to_owned(), rule });
        }
        self.check()?;
        for (name, view, _) in self.operands() {
            views::check_rank("batch_norm", name, &view.strides, &space)?;
            views::check_dtype(
                "batch_norm",
                name,
                view.dtype,
                views::is_stored_float(view.dtype),
                "batch normalization is of floating-point data",
            )?;
        }
        let operands = self.buffers()?;
        views::check_outputs("batch_norm", &operands)?;
        // The rows are sorted and merged as those of a chain that loads and stores the same views; the widest output leads.
        let mut chain = Chain::default();
        let mut order: Vec<usize> = (0..self.operands().len()).collect();
        let widths: Vec<(bool, bool)> = self.operands().iter().map(|(name, _, written)| (*written, Self::is_whole(name))).collect();
        order.sort_by_key(|&i| widths[i]);
        {
            let mut views = self.views_mut();
            for &i in &order {
                let mut view = views[i].clone();
                if !widths[i].1 {
                    let rows = space.len() - 1;
                    view.strides[..rows].fill(0);
                }
                chain.push(if widths[i].0 {
                    ChainStep::Store { x: 0, to: view, at: None }
                } else {
                    ChainStep::Load { from: view, window: None }
                });
                views[i].strides.clear();
            }
        }
        let mut rows = std::mem::take(&mut self.rows);
        canonical_dims(&mut rows, 0, &mut [&mut chain], 0);
        let space: Vec<u64> = rows.iter().copied().chain([self.channels]).collect();
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
