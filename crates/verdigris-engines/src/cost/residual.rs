//! The learned part of an estimate: measured over analytic time, by a small network over a config's features.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;

use super::analytic::Parts;
use super::features;
use super::work::Work;
use crate::arch::Arch;

/// The fit to H200s. `bench/model/fit.py` writes the file.
const HOPPER: &str = include_str!("h200.json");

/// A network of two hidden layers: `out = relu(relu([x, kernel] · w1 + b1) · w2 + b2) · w3 + b3`, in f32, with x the features brought to their
/// usual range. Its result is a natural logarithm.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Network {
    /// What it was fitted to, for people.
    #[serde(rename = "about")]
    _about: serde_json::Value,
    /// Names of the features, to be those of today.
    features: Vec<String>,
    /// Per feature: what is taken off, what it is divided by, and the range that the fit saw, beyond which nothing is concluded.
    mean: Vec<f32>,
    scale: Vec<f32>,
    least: Vec<f32>,
    most: Vec<f32>,
    /// What stands for each kernel; zeros for one that the fit never saw.
    kernels: BTreeMap<String, Vec<f32>>,
    /// Rows are inputs, columns neurons.
    w1: Vec<Vec<f32>>,
    b1: Vec<f32>,
    w2: Vec<Vec<f32>>,
    b2: Vec<f32>,
    w3: Vec<f32>,
    b3: f32,
    /// The most that an estimate is changed by, as a logarithm.
    limit: f32,
}

/// Nothing where the file is none, or speaks of other features than those of today; a test holds that it does not.
static NETWORK: LazyLock<Option<Network>> =
    LazyLock::new(|| serde_json::from_str(HOPPER).ok().filter(|network: &Network| network.features == features::NAMES));

/// What the analytic estimate is multiplied by; 1 on chips that nothing was fitted to.
pub(super) fn factor(work: &Work, parts: &Parts, arch: &Arch) -> f64 {
    if arch.capability != (9, 0) {
        return 1.0;
    }
    let (Some(network), Some(main), Some(features)) = (&*NETWORK, &work.main, features::of(work, parts, arch)) else { return 1.0 };
    f64::from(network.apply(main.kernel, &features)).exp()
}

impl Network {
    fn apply(&self, kernel: &str, features: &[f32]) -> f32 {
        let mut x: Vec<f32> = Vec::with_capacity(self.w1.len());
        for (i, &feature) in features.iter().enumerate() {
            x.push((feature.clamp(self.least[i], self.most[i]) - self.mean[i]) / self.scale[i]);
        }
        x.extend(self.kernels.get(kernel).into_iter().flatten());
        let hidden = layer(&self.w2, &self.b2, &layer(&self.w1, &self.b1, &x));
        let out: f32 = self.w3.iter().zip(&hidden).map(|(w, h)| w * h).sum();
        (out + self.b3).clamp(-self.limit, self.limit)
    }
}

/// Inputs that are 0, which are half of those behind a `relu`, cost nothing; missing ones at the end count as 0.
fn layer(weights: &[Vec<f32>], biases: &[f32], x: &[f32]) -> Vec<f32> {
    let mut sums = biases.to_vec();
    for (x, row) in x.iter().zip(weights).filter(|(x, _)| **x != 0.0) {
        for (sum, weight) in sums.iter_mut().zip(row) {
            *sum += x * weight;
        }
    }
    sums.iter_mut().for_each(|sum| *sum = sum.max(0.0));
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network() -> &'static Network {
        NETWORK.as_ref().expect("the fit reads the features of today")
    }

    #[test]
    fn the_fit_is_of_the_features_of_today_and_whole() {
        let network = network();
        let features = features::NAMES.len();
        for numbers in [&network.mean, &network.scale, &network.least, &network.most] {
            assert_eq!(numbers.len(), features);
            assert!(numbers.iter().all(|number| number.is_finite()));
        }
        assert!(network.scale.iter().all(|scale| *scale > 0.0));
        let width = features + network.kernels.values().next().map_or(0, Vec::len);
        assert!(network.kernels.values().all(|kernel| kernel.len() == width - features));
        assert!(network.w1.iter().all(|row| row.len() == network.b1.len()) && network.w1.len() == width);
        assert!(network.w2.iter().all(|row| row.len() == network.b2.len()) && network.w2.len() == network.b1.len());
        assert_eq!(network.w3.len(), network.b2.len());
    }

    #[test]
    fn what_lies_outside_of_what_was_seen_counts_as_its_edge() {
        let network = network();
        let far: Vec<f32> = network.most.iter().map(|most| most * 2.0 + 100.0).collect();
        assert_eq!(network.apply("gemm.wgmma", &far), network.apply("gemm.wgmma", &network.most));
        assert!(network.apply("no such kernel", &network.mean).abs() <= network.limit);
    }
}
