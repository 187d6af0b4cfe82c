//! Loss scaling, which training in f16 needs: gradients are small, and what lies below 2⁻²⁴ is 0 in f16.
//!
//! The loss is multiplied by a scale before its gradient is taken, so all gradients are. Before the update they are divided by it again
//! and looked at: if one is not finite, the scale was too large, the step is left out and the scale made smaller; after a long row of
//! good steps it is made larger.
//!
//! ```
//! use verdigris::loss_scale::LossScale;
//!
//! let mut scale = LossScale::default();
//! assert_eq!(scale.value(), 65536.0);
//! assert!(!scale.update(false)); // overflow: leave the step out
//! assert_eq!((scale.value(), scale.inverse()), (32768.0, 1.0 / 32768.0));
//! assert!(scale.update(true));
//! assert!(LossScale::new(0.5, 2.0, 0.5, 2000).is_err(), "a scale is from 1 to 1e30");
//! ```
//!
//! The division and the check are ops of a graph:
//!
//! ```
//! use verdigris::loss_scale::{LossScale, UnscaleGraph, unscale_graph};
//! use verdigris::{DType, Device, GraphBuilder, Layout, Tensor};
//!
//! let mut g = GraphBuilder::new("unscale");
//! let gradient = g.tensor("gradient", DType::F16, Layout::row_major(&[2])?);
//! let UnscaleGraph { factor, unscaled, all_finite } = unscale_graph(&mut g, &[gradient])?;
//! g.store(unscaled[0], "unscaled", DType::F32)?;
//! g.store(all_finite, "all finite", DType::F32)?;
//! let (device, scale) = (Device::cpu(), LossScale::default());
//! let plan = device.plan(&g.finish()?)?;
//! let infinite = Tensor::from_values(&device, DType::F16, &[2], &[32768.0, f64::INFINITY])?;
//! let outputs = device.run(&plan, &[(gradient, &infinite)], &[(factor, scale.inverse().into())])?;
//! let place = plan.outputs().position(|tensor| tensor.uid == all_finite).ok_or("no such output")?;
//! assert_eq!(outputs[place].to_values()?, [0.0]);
//! assert_eq!(outputs[1 - place].to_values()?, [0.5, f64::INFINITY]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use verdigris_graph::{BinaryOp, Error, GraphBuilder, HostScalar, ReductionOp, Uid, UnaryOp};
use verdigris_tensor::DType;

/// The scale, and the rule by which it grows and backs off.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LossScale {
    value: f32,
    growth: f32,
    backoff: f32,
    interval: u32,
    good_steps: u32,
}

/// What a loss scale cannot be made of.
#[derive(Clone, Copy, PartialEq, Debug, thiserror::Error)]
#[error("loss scale: {what} = {value}; {rule}")]
pub struct LossScaleError {
    what: &'static str,
    value: f64,
    rule: &'static str,
}

/// The least scale: below it there is nothing left to gain.
const LEAST: f32 = 1.0;
/// The greatest: its inverse is a normal f32.
const GREATEST: f32 = 1.0e30;

impl Default for LossScale {
    /// Starts at 2¹⁶, doubles after 2000 good steps, halves on overflow.
    fn default() -> LossScale {
        LossScale { value: 65536.0, growth: 2.0, backoff: 0.5, interval: 2000, good_steps: 0 }
    }
}

impl LossScale {
    /// A scale that starts at `value`, is multiplied by `growth` after `interval` good steps in a row and by `backoff` on overflow.
    ///
    /// # Errors
    /// A value outside of 1 to 10³⁰, a growth below 1, a back-off that is not between 0 and 1, an interval of 0.
    pub fn new(value: f32, growth: f32, backoff: f32, interval: u32) -> Result<LossScale, LossScaleError> {
        let error = |what, value: f32, rule| Err(LossScaleError { what, value: f64::from(value), rule });
        if !(LEAST..=GREATEST).contains(&value) {
            return error("value", value, "a scale is from 1 to 1e30");
        }
        if !(growth >= 1.0 && growth.is_finite()) {
            return error("growth", growth, "the factor of growth is finite and at least 1");
        }
        if !(backoff > 0.0 && backoff < 1.0) {
            return error("backoff", backoff, "the factor of back-off lies between 0 and 1");
        }
        if interval == 0 {
            return error("interval", 0.0, "growth waits for at least one good step");
        }
        Ok(LossScale { value, growth, backoff, interval, good_steps: 0 })
    }

    /// What to multiply the gradient of the loss by.
    pub const fn value(&self) -> f32 {
        self.value
    }

    /// What to multiply gradients by before the update: one over the value, exact for powers of two.
    pub fn inverse(&self) -> f64 {
        1.0 / f64::from(self.value)
    }

    /// Takes note of a step whose gradients were all finite, or not. Tells whether the update may be made.
    pub fn update(&mut self, all_finite: bool) -> bool {
        if !all_finite {
            self.value = (self.value * self.backoff).max(LEAST);
            self.good_steps = 0;
            return false;
        }
        self.good_steps += 1;
        if self.good_steps == self.interval {
            self.value = (self.value * self.growth).min(GREATEST);
            self.good_steps = 0;
        }
        true
    }
}

/// What [`unscale_graph`] adds to a graph.
#[derive(Clone, PartialEq, Debug)]
pub struct UnscaleGraph {
    /// A host scalar: [`LossScale::inverse`].
    pub factor: Uid,
    /// For each gradient `factor · gradient`, virtual.
    pub unscaled: Vec<Uid>,
    /// One element in as many dims as the last gradient has, at least one; virtual: 1 if every unscaled gradient is finite, else 0.
    pub all_finite: Uid,
}

/// Adds the division by the loss scale and the check for overflow to a graph. With no gradients the check is of nothing, and refused.
///
/// Where the unscaled gradient is stored, each gradient is one problem: it is read once, and its elements are looked at as they are stored.
///
/// # Errors
/// An unknown uid, or no gradients.
pub fn unscale_graph(g: &mut GraphBuilder, gradients: &[Uid]) -> Result<UnscaleGraph, Error> {
    let factor = g.host_scalar("unscale", DType::F32);
    let mut unscaled = Vec::new();
    let mut all: Option<Uid> = None;
    for &gradient in gradients {
        let value = g.scale("unscale", gradient, HostScalar::Bound(factor))?;
        unscaled.push(value);
        let finite = g.unary("is_finite", UnaryOp::IsFinite, value)?;
        let rank = g.described(finite).map_or(0, |tensor| tensor.layout.rank());
        let axes: Vec<u32> = (0..rank as u32).collect();
        // A scalar has nothing to reduce over.
        let least = match rank {
            0 => g.reshape("one", finite, &[1])?,
            _ => g.reduction("all_finite", ReductionOp::Min, finite, &axes)?,
        };
        all = Some(match all {
            // Of the dims that the reduction leaves, so that it is done behind it.
            Some(all) => {
                let all = g.reshape("so_far", all, &vec![1; rank.max(1)])?;
                g.binary("both_finite", BinaryOp::Min, least, all)?
            }
            None => least,
        });
    }
    let all_finite = all.ok_or(Error::Unsupported { op: "unscale".to_owned(), rule: "there is at least one gradient" })?;
    Ok(UnscaleGraph { factor, unscaled, all_finite })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_grows_after_good_steps_and_backs_off_at_once() {
        let mut scale = LossScale::new(8.0, 2.0, 0.5, 3).unwrap();
        assert!((0..3).all(|_| scale.update(true)));
        assert_eq!(scale.value(), 16.0);
        assert!(scale.update(true) && scale.update(true));
        assert!(!scale.update(false));
        assert_eq!(scale.value(), 8.0);
        // The row of good steps begins anew.
        assert!(scale.update(true) && scale.update(true));
        assert_eq!(scale.value(), 8.0);
        assert!(scale.update(true));
        assert_eq!((scale.value(), scale.inverse()), (16.0, 1.0 / 16.0));
    }

    #[test]
    fn it_stays_within_bounds() {
        let mut scale = LossScale::new(1.0, 2.0, 0.5, 1).unwrap();
        scale.update(false);
        assert_eq!(scale.value(), 1.0);
        let mut scale = LossScale::new(1.0e30, 2.0, 0.5, 1).unwrap();
        scale.update(true);
        assert_eq!(scale.value(), 1.0e30);
    }

    #[test]
    fn each_gradient_is_read_once() {
        let mut g = GraphBuilder::new("unscale");
        let gradients: Vec<Uid> = [&[5, 3, 4, 2][..], &[7], &[6, 8]]
            .map(|dims| g.tensor("gradient", DType::F16, verdigris_tensor::Layout::row_major(dims).unwrap()))
            .to_vec();
        let UnscaleGraph { unscaled, all_finite, .. } = unscale_graph(&mut g, &gradients).unwrap();
        unscaled.iter().for_each(|&unscaled| g.store(unscaled, "unscaled", DType::F32).unwrap());
        g.store(all_finite, "all_finite", DType::F32).unwrap();
        let partition = verdigris_graph::pattern::partition(&g.finish().unwrap()).unwrap();
        let kinds: Vec<&str> = partition.parts.iter().map(|part| part.problem.kind()).collect();
        assert_eq!(kinds, ["reduce"; 3]);
        for (part, (gradient, unscaled)) in partition.parts.iter().zip(gradients.iter().zip(&unscaled)) {
            assert!(part.bindings.contains(gradient) && part.bindings.contains(unscaled));
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let refused = |result: Result<LossScale, LossScaleError>| result.unwrap_err().to_string();
        assert_eq!(refused(LossScale::new(0.5, 2.0, 0.5, 1)), "loss scale: value = 0.5; a scale is from 1 to 1e30");
        assert_eq!(
            refused(LossScale::new(2.0, f32::NAN, 0.5, 1)),
            "loss scale: growth = NaN; the factor of growth is finite and at least 1"
        );
        assert_eq!(refused(LossScale::new(2.0, 2.0, 1.0, 1)), "loss scale: backoff = 1; the factor of back-off lies between 0 and 1");
        assert_eq!(refused(LossScale::new(2.0, 2.0, 0.5, 0)), "loss scale: interval = 0; growth waits for at least one good step");
        assert!(unscale_graph(&mut GraphBuilder::new("none"), &[]).is_err());
    }
}
