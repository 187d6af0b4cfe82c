//! The network of `demo digits` as a model that is served: trained at the start, for a few seconds.

use std::collections::BTreeMap;

use indicatif::ProgressBar;
use verdigris_graph::{
    BinaryOp, Conv, ConvDirection, Graph, GraphBuilder, HostScalar, PoolMode, PoolWindows, Precision, Real, Uid, UnaryOp,
};
use verdigris_serve::{Model, Spec, Weight};
use verdigris_tensor::{DType, Layout};

use super::data::{SIDE, split};
use super::digits::{self, Arguments};
use super::model::{CHANNELS, Numbers, Trained};

/// Enough to read nine digits of ten; `demo digits` takes its time and reads 99 of 100.
const EPOCHS: u32 = 4;

/// The model, how well it reads, and an image to try it with.
pub(crate) struct ServedDigits {
    pub(crate) model: Model,
    /// The part of the images never seen that it reads right.
    pub(crate) accuracy: f64,
    /// Pixels from 0 to 16 of an image never seen.
    pub(crate) image: &'static [u8],
    /// What it shows.
    pub(crate) label: usize,
}

/// Trains on the device, and draws the graph that reads digits for each batch size.
pub(crate) fn digits_model(device: &str, batch_sizes: &[u64]) -> anyhow::Result<ServedDigits> {
    let arguments =
        Arguments { device: device.to_owned(), precision: Numbers::Fp32, seed: 1, deterministic: false, epochs: EPOCHS, report: None };
    let outcome = digits::train(&arguments, &ProgressBar::hidden(), &mut |_, _| {})?;
    let graphs = batch_sizes.iter().map(|&batch| Ok((batch, reading(batch, &outcome.weights)?))).collect::<anyhow::Result<_>>()?;
    let weight = |trained: &Trained| {
        let bytes = trained.values.iter().flat_map(|value| value.to_le_bytes()).collect();
        (trained.name.clone(), Weight { dtype: DType::F32, dims: trained.dims.clone(), bytes })
    };
    let weights: BTreeMap<String, Weight> = outcome.weights.iter().map(weight).collect();
    let model = Model::new(Spec::new("digits", &["x"], &["probabilities"], batch_sizes), graphs, weights)?;
    let digit = split().held_out[0];
    Ok(ServedDigits { model, accuracy: outcome.accuracy(), image: digit.pixels, label: digit.label })
}

/// The forward pass alone: pixels from 0 to 16 in, the probability of each digit out.
fn reading(batch: u64, weights: &[Trained]) -> anyhow::Result<Graph> {
    let side = SIDE as u64;
    let mut g = GraphBuilder::new("read digits");
    let x = g.tensor("x", DType::F32, Layout::row_major(&[batch, 1, side, side])?);
    let mut read = Vec::new();
    for trained in weights {
        read.push(g.tensor(&trained.name, DType::F32, Layout::row_major(&trained.dims)?));
    }
    let mut value = g.scale("to one", x, HostScalar::Fixed(Real(1.0 / 16.0)))?;
    for layer in 0..CHANNELS.len() {
        let mut conv = Conv::new(ConvDirection::Fprop, value, read[2 * layer], Uid(0), 2, Precision::Fp32);
        conv.pads_before = vec![1, 1];
        conv.pads_after = vec![1, 1];
        let convolved = g.conv_fprop(&format!("conv{}", layer + 1), conv)?;
        let sum = g.binary("bias", BinaryOp::Add, convolved, read[2 * layer + 1])?;
        value = g.unary("relu", UnaryOp::Relu, sum)?;
        if layer > 0 {
            value = g.pool(&format!("pool{}", layer + 1), PoolMode::Max, PoolWindows::tiles(&[2, 2]), value)?;
        }
    }
    let flat = g.reshape("flatten", value, &[batch, CHANNELS[2] * (side / 4) * (side / 4)])?;
    let product = g.matmul("linear", flat, read[6], Precision::Fp32)?;
    let logits = g.binary("bias", BinaryOp::Add, product, read[7])?;
    let probabilities = g.softmax("softmax", logits, 1, false)?;
    g.store(probabilities, "probabilities", DType::F32)?;
    Ok(g.finish()?)
}

#[cfg(test)]
mod tests {
    use verdigris::Device;

    use super::super::data::CLASSES;

    use super::*;

    #[test]
    fn the_served_network_reads_as_the_trained_one_did() {
        let served = digits_model("cpu", &[1, 8]).unwrap();
        assert!(served.accuracy > 0.9, "{}", served.accuracy);
        let mut executor = served.model.warm(&Device::cpu()).unwrap().executor;
        let held_out = split().held_out;
        let mut right = 0;
        for batch in held_out.chunks_exact(8) {
            let pixels: Vec<u8> =
                batch.iter().flat_map(|digit| digit.pixels.iter().flat_map(|&pixel| f32::from(pixel).to_le_bytes())).collect();
            let probabilities = executor.execute(8, &[pixels]).unwrap().remove(0);
            for (digit, row) in batch.iter().zip(probabilities.chunks_exact(4 * CLASSES)) {
                let values: Vec<f32> = row.chunks_exact(4).map(|value| f32::from_le_bytes(value.try_into().unwrap())).collect();
                assert!((values.iter().sum::<f32>() - 1.0).abs() < 1e-4);
                right += usize::from((0..CLASSES).all(|class| values[class] <= values[digit.label]));
            }
        }
        let accuracy = right as f64 / (held_out.len() / 8 * 8) as f64;
        // The same network on the same images, but for those that fill no batch.
        assert!((accuracy - served.accuracy).abs() < 0.02, "{accuracy} and {}", served.accuracy);
    }
}
