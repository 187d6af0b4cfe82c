//! The learned part of an estimate: measured over analytic time, by small networks over a config's features.

use std::sync::LazyLock;

use super::analytic::Parts;
use super::features;
use super::work::Work;
use crate::arch::Arch;

const FEATURES: usize = features::NAMES.len();
/// Neurons of the two hidden layers.
const FIRST: usize = 160;
const SECOND: usize = 96;

/// What was fitted to times of an H200, and the fit before it for kernels that the newer one has no samples of.
static H200: LazyLock<Model> = LazyLock::new(|| Model::shipped(include_bytes!("h200.fit")));
static H200_UNSEEN: LazyLock<Model> = LazyLock::new(|| Model::shipped(include_bytes!("h200_unseen.fit")));

/// Networks of two hidden layers, `out = relu(relu(x · w1 + kernel) · w2 + b2) · w3 + b3` in f32, with x the features brought to their usual range. A result is a
/// natural logarithm; what counts is the mean of all, which has less of the chance of one.
struct Model {
    /// Per feature: what is taken off, what it is divided by, and the range that the fit saw, beyond which nothing is concluded.
    mean: [f32; FEATURES],
    scale: [f32; FEATURES],
    least: [f32; FEATURES],
    most: [f32; FEATURES],
    /// The most that an estimate is changed by, as a logarithm.
    limit: f32,
    /// Kernels that the fit has samples of, in order of names.
    kernels: Vec<&'static str>,
    networks: Vec<Network>,
}

/// One of them.
struct Network {
    /// Biases of the first layer for each kernel, and for one that the fit never saw.
    kernels: Vec<[f32; FIRST]>,
    b1: [f32; FIRST],
    /// Rows are inputs, columns neurons.
    w1: Vec<[f32; FIRST]>,
    w2: Vec<[f32; SECOND]>,
    b2: [f32; SECOND],
    w3: [f32; SECOND],
    b3: f32,
}

/// What the analytic estimate is multiplied by; 1 on chips that nothing was fitted to.
pub(super) fn factor(work: &Work, parts: &Parts, arch: &Arch) -> f64 {
    if arch.capability != (9, 0) {
        return 1.0;
    }
    let (Some(main), Some(features)) = (&work.main, features::of(work, parts, arch)) else { return 1.0 };
    // Wider vectors of the processor give the same bits: each neuron's sum has one order.
    let model: &Model = if H200.knows(main.kernel) { &H200 } else { &H200_UNSEEN };
    f64::from(pulp::Arch::new().dispatch(|| model.apply(main.kernel, &features))).exp()
}

impl Model {
    /// A fit that is part of the program, read once a process (0.1 ms).
    fn shipped(file: &'static [u8]) -> Model {
        Model::read(file).expect("what the tool of `bench/model` wrote, which the tests read")
    }

    /// What `bench/model/fit.py` writes: lines of text that say what was fitted to what, an empty one, and f32 numbers, the low byte first: per feature
    /// mean, scale, least and most; then per network b1, the kernels' biases, w1, w2, b2, w3 and b3. Features of other names than today's, or a number
    /// too few or too many, are an error.
    fn read(file: &'static [u8]) -> Result<Model, String> {
        let end = file.windows(2).position(|two| two == b"\n\n").ok_or("no empty line behind the text")?;
        let text = std::str::from_utf8(&file[..end]).map_err(|error| error.to_string())?;
        let line = |name: &str| {
            let mut lines = text.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
            lines.next().ok_or_else(|| format!("no line `{name}`"))
        };
        let names = |name| line(name).map(|line| line.split(", ").filter(|one| !one.is_empty()).collect::<Vec<_>>());
        if names("features")? != features::NAMES {
            return Err("the features are not those of today".to_owned());
        }
        let kernels = names("kernels")?;
        let limit = line("limit")?.parse().map_err(|_| "the limit is no number".to_owned())?;
        let count: usize = line("networks")?.parse().map_err(|_| "the count of networks is no number".to_owned())?;
        let mut numbers = Numbers(file[end + 2..].chunks_exact(4));
        let [mean, scale, least, most] = [numbers.row()?, numbers.row()?, numbers.row()?, numbers.row()?];
        let networks: Vec<Network> = (0..count).map(|_| Network::read(&mut numbers, kernels.len())).collect::<Result<_, _>>()?;
        match numbers.0.len() {
            0 if numbers.0.remainder().is_empty() => {}
            left => return Err(format!("{left} numbers and {} bytes behind the last network", numbers.0.remainder().len())),
        }
        if networks.is_empty()
            || !kernels.is_sorted_by(|one, next| one < next)
            || (0..FEATURES).any(|i| !(least[i] <= most[i] && scale[i] > 0.0))
        {
            return Err("no network, kernels that are not in order, or a feature without a range".to_owned());
        }
        Ok(Model { mean, scale, least, most, limit, kernels, networks })
    }

    /// Whether the fit has samples of a kernel.
    fn knows(&self, kernel: &str) -> bool {
        self.kernels.binary_search(&kernel).is_ok()
    }

    #[inline(always)]
    fn apply(&self, kernel: &str, features: &[f32; FEATURES]) -> f32 {
        let x: [f32; FEATURES] = std::array::from_fn(|i| (features[i].clamp(self.least[i], self.most[i]) - self.mean[i]) / self.scale[i]);
        let known = self.kernels.binary_search(&kernel).ok();
        let sum: f32 = self.networks.iter().map(|network| network.apply(known, &x).clamp(-self.limit, self.limit)).sum();
        sum / self.networks.len() as f32
    }
}

impl Network {
    fn read(numbers: &mut Numbers, kernels: usize) -> Result<Network, String> {
        let b1 = numbers.row()?;
        let kernels = (0..kernels).map(|_| numbers.row()).collect::<Result<_, _>>()?;
        let w1 = (0..FEATURES).map(|_| numbers.row()).collect::<Result<_, _>>()?;
        let w2 = (0..FIRST).map(|_| numbers.row()).collect::<Result<_, _>>()?;
        let [b2, w3] = [numbers.row()?, numbers.row()?];
        let [b3] = numbers.row()?;
        Ok(Network { kernels, b1, w1, w2, b2, w3, b3 })
    }

    /// `known` is the place of the kernel among those of the fit.
    #[inline(always)]
    fn apply(&self, known: Option<usize>, x: &[f32; FEATURES]) -> f32 {
        let biases = known.map_or(&self.b1, |at| &self.kernels[at]);
        let hidden = layer(&self.w2, &self.b2, &layer(&self.w1, biases, x));
        let out: f32 = self.w3.iter().zip(&hidden).map(|(w, h)| w * h).sum();
        out + self.b3
    }
}

/// The numbers of a fit's file, in their order.
struct Numbers(std::slice::ChunksExact<'static, u8>);

impl Numbers {
    fn row<const N: usize>(&mut self) -> Result<[f32; N], String> {
        let mut row = [0.0; N];
        for number in &mut row {
            let bytes = self.0.next().and_then(|bytes| bytes.try_into().ok()).ok_or("too few numbers")?;
            *number = f32::from_le_bytes(bytes);
        }
        Ok(row)
    }
}

/// Inputs that are 0, which are half of those behind a `relu`, cost nothing.
#[inline(always)]
fn layer<const OUT: usize>(weights: &[[f32; OUT]], biases: &[f32; OUT], x: &[f32]) -> [f32; OUT] {
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
    fn both_fits_are_of_the_features_of_today() {
        assert!(H200.knows("conv.halo") && !H200.knows("attention.forward") && !H200_UNSEEN.knows("conv.halo"));
        for model in [&*H200, &*H200_UNSEEN] {
            assert!([model.mean, model.scale, model.least, model.most].iter().flatten().all(|number| number.is_finite()));
            assert!(model.scale.iter().all(|scale| *scale > 0.0));
            assert!(model.kernels.is_sorted_by(|one, next| one < next));
            assert!(!model.networks.is_empty());
        }
    }

    #[test]
    fn a_file_that_is_no_fit_of_today_is_an_error() {
        let file = include_bytes!("h200.fit");
        let end = file.windows(2).position(|two| two == b"\n\n").expect("text, and numbers behind it");
        let changed = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = file.to_vec();
            change(&mut bytes);
            Model::read(bytes.leak()).err()
        };
        let text = |from: &str, to: &str| {
            let head = std::str::from_utf8(&file[..end]).expect("text").replace(from, to);
            changed(&|bytes| *bytes = [head.as_bytes(), &file[end..]].concat())
        };
        assert_eq!(changed(&|_| {}), None);
        assert_eq!(changed(&|bytes| bytes.truncate(bytes.len() - 4)).as_deref(), Some("too few numbers"));
        assert_eq!(changed(&|bytes| bytes.extend([0; 8])).as_deref(), Some("2 numbers and 0 bytes behind the last network"));
        assert_eq!(changed(&|bytes| bytes.push(0)).as_deref(), Some("0 numbers and 1 bytes behind the last network"));
        assert_eq!(changed(&|bytes| bytes.truncate(end)).as_deref(), Some("no empty line behind the text"));
        assert_eq!(text("log us", "log ms").as_deref(), Some("the features are not those of today"));
        assert_eq!(text("\nlimit", "\nleast").as_deref(), Some("no line `limit`"));
        assert_eq!(
            text("conv.depthwise,", "conv.zzz,").as_deref(),
            Some("no network, kernels that are not in order, or a feature without a range")
        );
        assert_eq!(text("networks: 4", "networks: 5").as_deref(), Some("too few numbers"));
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
        for kernel in &H200.kernels {
            let features = std::array::from_fn(|i| H200.least[i] + (H200.most[i] - H200.least[i]) * (i % 7) as f32 / 6.0);
            let wide = pulp::Arch::new().dispatch(|| H200.apply(kernel, &features));
            assert_eq!(wide.to_bits(), H200.apply(kernel, &features).to_bits(), "{kernel}");
        }
    }
}
