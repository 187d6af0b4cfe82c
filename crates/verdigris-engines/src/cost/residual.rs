//! The learned part of an estimate: measured over analytic time, by small networks over a config's features.

use super::analytic::Parts;
use super::features;
use super::h200::H200;
use super::h200_unseen::H200_UNSEEN;
use super::work::Work;
use crate::arch::Arch;

const FEATURES: usize = features::NAMES.len();
/// Neurons of the two hidden layers.
const FIRST: usize = 160;
const SECOND: usize = 96;

/// Networks of two hidden layers, `out = relu(relu(x · w1 + kernel) · w2 + b2) · w3 + b3` in f32, with x the features brought to their usual range. A result is a
/// natural logarithm; what counts is the mean of all, which has less of the chance of one. The numbers are statics of the program: a process that ranks once has
/// nothing to read.
pub(super) struct Model {
    /// Names of the features, which a test holds to be those of today.
    #[cfg(test)]
    pub(super) features: &'static [&'static str],
    /// Per feature: what is taken off, what it is divided by, and the range that the fit saw, beyond which nothing is concluded.
    pub(super) mean: [f32; FEATURES],
    pub(super) scale: [f32; FEATURES],
    pub(super) least: [f32; FEATURES],
    pub(super) most: [f32; FEATURES],
    /// The most that an estimate is changed by, as a logarithm.
    pub(super) limit: f32,
    pub(super) networks: &'static [Network],
}

/// One of them.
pub(super) struct Network {
    /// Biases of the first layer for each kernel, in order of names, and for one that the fit never saw.
    pub(super) kernels: &'static [(&'static str, [f32; FIRST])],
    pub(super) b1: [f32; FIRST],
    /// Rows are inputs, columns neurons.
    pub(super) w1: [[f32; FIRST]; FEATURES],
    pub(super) w2: [[f32; SECOND]; FIRST],
    pub(super) b2: [f32; SECOND],
    pub(super) w3: [f32; SECOND],
    pub(super) b3: f32,
}

/// What the analytic estimate is multiplied by; 1 on chips that nothing was fitted to.
pub(super) fn factor(work: &Work, parts: &Parts, arch: &Arch) -> f64 {
    if arch.capability != (9, 0) {
        return 1.0;
    }
    let (Some(main), Some(features)) = (&work.main, features::of(work, parts, arch)) else { return 1.0 };
    // Wider vectors of the processor give the same bits: each neuron's sum has one order.
    let model = if H200.knows(main.kernel) { &H200 } else { &H200_UNSEEN };
    f64::from(pulp::Arch::new().dispatch(|| model.apply(main.kernel, &features))).exp()
}

impl Model {
    /// Whether the fit has samples of a kernel.
    fn knows(&self, kernel: &str) -> bool {
        self.networks.iter().all(|network| network.kernels.binary_search_by(|(name, _)| (*name).cmp(kernel)).is_ok())
    }

    #[inline(always)]
    fn apply(&self, kernel: &str, features: &[f32; FEATURES]) -> f32 {
        let x: [f32; FEATURES] = std::array::from_fn(|i| (features[i].clamp(self.least[i], self.most[i]) - self.mean[i]) / self.scale[i]);
        let sum: f32 = self.networks.iter().map(|network| network.apply(kernel, &x).clamp(-self.limit, self.limit)).sum();
        sum / self.networks.len() as f32
    }
}

impl Network {
    #[inline(always)]
    fn apply(&self, kernel: &str, x: &[f32; FEATURES]) -> f32 {
        let known = self.kernels.binary_search_by(|(name, _)| (*name).cmp(kernel));
        let biases = known.map_or(&self.b1, |at| &self.kernels[at].1);
        let hidden = layer(&self.w2, &self.b2, &layer(&self.w1, biases, x));
        let out: f32 = self.w3.iter().zip(&hidden).map(|(w, h)| w * h).sum();
        out + self.b3
    }
}

/// Inputs that are 0, which are half of those behind a `relu`, cost nothing.
#[inline(always)]
fn layer<const IN: usize, const OUT: usize>(weights: &[[f32; OUT]; IN], biases: &[f32; OUT], x: &[f32; IN]) -> [f32; OUT] {
    let mut sums = *biases;
    for (x, row) in x.iter().zip(weights).filter(|(x, _)| **x != 0.0) {
        for (sum, weight) in sums.iter_mut().zip(row) {
            *sum += x * weight;
        }
    }
    sums.map(|sum| sum.max(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fit_is_of_the_features_of_today() {
        assert_eq!(H200.features, features::NAMES);
        assert_eq!(H200_UNSEEN.features, features::NAMES);
        assert!(H200.knows("conv.halo") && !H200.knows("attention.forward"));
        assert!([H200.mean, H200.scale, H200.least, H200.most].iter().flatten().all(|number| number.is_finite()));
        assert!(H200.scale.iter().all(|scale| *scale > 0.0));
        assert!(H200.networks.iter().all(|network| network.kernels.is_sorted_by(|(one, _), (next, _)| one < next)));
    }

    #[test]
    fn what_lies_outside_of_what_was_seen_counts_as_its_edge() {
        let far = H200.most.map(|most| most * 2.0 + 100.0);
        assert_eq!(H200.apply("gemm.wgmma", &far), H200.apply("gemm.wgmma", &H200.most));
        assert!(H200.apply("no such kernel", &H200.mean).abs() <= H200.limit);
        assert_ne!(H200.apply("gemm.wgmma", &H200.mean), H200.apply("conv.direct", &H200.mean), "each kernel has its own");
    }

    #[test]
    fn wide_vectors_give_the_bits_of_plain_ones() {
        for (kernel, _) in H200.networks[0].kernels {
            let features = std::array::from_fn(|i| H200.least[i] + (H200.most[i] - H200.least[i]) * (i % 7) as f32 / 6.0);
            let wide = pulp::Arch::new().dispatch(|| H200.apply(kernel, &features));
            assert_eq!(wide.to_bits(), H200.apply(kernel, &features).to_bits(), "{kernel}");
        }
    }
}
