//! The network and its training as graphs: forward, backward, update, and (for fp16) the check of scaled gradients.
//!
//! Three convolutions of 3 × 3 with bias and ReLU, two max poolings, a linear layer, softmax cross-entropy; Adam. Every number that
//! training makes is made by a graph; the host only brings batches in and factors that depend on the step. The backward graph is the gradient
//! of the forward graph ([`verdigris_graph::gradient`]).

use verdigris::loss_scale::{UnscaleGraph, unscale_graph};
use verdigris_graph::{
    BinaryOp, Conv, ConvDirection, CrossEntropySpec, HostScalar, LossReduction, PoolMode, PoolWindows, Precision, Real, Uid, UnaryOp,
};
use verdigris_reference::data::Random;
use verdigris_tensor::{DType, Layout, num};

use super::data::{CLASSES, SIDE};
use super::runner::{Drawn, Runner, Slot, Task};
use verdigris::plan::PartReport;

pub(super) const CHANNELS: [u64; 3] = [16, 32, 64];
const BETA_1: f64 = 0.9;
const BETA_2: f64 = 0.999;
const EPSILON: f64 = 1e-8;

/// What a run computes in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum Numbers {
    /// f32 throughout.
    Fp32,
    /// f32 tensors, products of tf32.
    Tf32,
    /// bf16 tensors, f32 sums; weights are kept in f32 too.
    Bf16,
    /// f16 tensors, f32 sums, losses scaled; weights are kept in f32 too.
    Fp16,
}

impl Numbers {
    pub(super) fn storage(self) -> DType {
        match self {
            Numbers::Fp32 | Numbers::Tf32 => DType::F32,
            Numbers::Bf16 => DType::Bf16,
            Numbers::Fp16 => DType::F16,
        }
    }

    pub(super) fn precision(self) -> Precision {
        if self == Numbers::Tf32 { Precision::Tf32 } else { Precision::Fp32 }
    }
}

/// One trained tensor.
pub(super) struct Parameter {
    /// In f32.
    master: [Slot; 2],
    /// As the network reads it; the master itself where that is f32.
    used: Option<Slot>,
    gradient: Slot,
    /// The gradient before the loss scale is divided out.
    scaled: Option<Slot>,
    means: [Slot; 2],
    squares: [Slot; 2],
    update: Task,
    /// The factor of the step.
    step: Uid,
}

/// A trained tensor: its name, extents, and elements as f32 in row-major order.
#[cfg_attr(not(feature = "serve"), allow(dead_code, reason = "the service alone reads it"))]
pub(super) struct Trained {
    pub(super) name: String,
    pub(super) dims: Vec<u64>,
    pub(super) values: Vec<f32>,
}

/// Everything between a batch and a better network.
pub(super) struct Model {
    pub(super) x: Slot,
    pub(super) labels: Slot,
    pub(super) logits: Slot,
    pub(super) loss: Slot,
    dloss: Slot,
    forward: Task,
    backward: Task,
    parameters: Vec<Parameter>,
    unscale: Option<(Task, Uid, Slot)>,
    steps_done: i32,
}

struct Plans<'r> {
    runner: &'r mut Runner,
    numbers: Numbers,
    batch: u64,
    channels_last: bool,
    deterministic: bool,
}

impl Plans<'_> {
    fn slot(&mut self, name: &str, dtype: DType, dims: &[u64]) -> anyhow::Result<Slot> {
        let layout = if self.channels_last && dims.len() == 4 { Layout::with_order(dims, &[0, 2, 3, 1]) } else { Layout::row_major(dims) };
        Ok(Slot::new(self.runner, name, dtype, layout?))
    }

    fn draw(&self, name: &str) -> Drawn {
        Drawn::new(name, self.deterministic)
    }

    fn conv(&self, x: Uid, w: Uid, y: Uid) -> Conv {
        let mut conv = Conv::new(ConvDirection::Fprop, x, w, y, 2, self.numbers.precision());
        conv.pads_before = vec![1, 1];
        conv.pads_after = vec![1, 1];
        conv
    }
}

/// The tensors between the layers, kept from forward to backward.
struct Activations {
    /// After ReLU.
    convolved: [Slot; 3],
    /// The inputs of the third convolution and of the linear layer.
    pooled: [Slot; 2],
}

impl Model {
    pub(super) fn new(runner: &mut Runner, numbers: Numbers, batch: usize, seed: u64, deterministic: bool) -> anyhow::Result<Model> {
        let channels_last = runner.prefers_channels_last();
        let mut plans = Plans { runner, numbers, batch: batch as u64, channels_last, deterministic };
        let (b, side, storage) = (batch as u64, SIDE as u64, numbers.storage());
        let [c1, c2, c3] = CHANNELS;
        let flat = c3 * (side / 4) * (side / 4);
        let x = plans.slot("x", storage, &[b, 1, side, side])?;
        let labels = plans.slot("labels", DType::I32, &[b, 1])?;
        let logits = plans.slot("logits", DType::F32, &[b, CLASSES as u64])?;
        let loss = plans.slot("loss", DType::F32, &[1, 1])?;
        let dloss = plans.slot("dloss", DType::F32, &[1, 1])?;
        let mut activation = |name: &str, c: u64, side: u64| plans.slot(name, storage, &[b, c, side, side]);
        let activations = Activations {
            convolved: [activation("relu1", c1, side)?, activation("relu2", c2, side)?, activation("relu3", c3, side / 2)?],
            pooled: [activation("pool2", c2, side / 2)?, activation("pool3", c3, side / 4)?],
        };

        let shapes: [(&str, Vec<u64>, u64); 8] = [
            ("w1", vec![c1, 1, 3, 3], 9),
            ("bias1", vec![1, c1, 1, 1], 0),
            ("w2", vec![c2, c1, 3, 3], 9 * c1),
            ("bias2", vec![1, c2, 1, 1], 0),
            ("w3", vec![c3, c2, 3, 3], 9 * c2),
            ("bias3", vec![1, c3, 1, 1], 0),
            ("w4", vec![flat, CLASSES as u64], flat),
            ("bias4", vec![1, CLASSES as u64], 0),
        ];
        let mut random = Random::new(seed);
        let mut parameters = Vec::new();
        for (name, dims, fan_in) in shapes {
            parameters.push(parameter(&mut plans, name, &dims, fan_in, &mut random)?);
        }

        let io = [&x, &labels, &logits, &loss, &dloss];
        let (forward, backward) = passes(&mut plans, io, &activations, &parameters)?;
        let unscale = if numbers == Numbers::Fp16 { Some(unscale(&mut plans, &parameters)?) } else { None };
        let mut model = Model { x, labels, logits, loss, dloss, forward, backward, parameters, unscale, steps_done: 0 };
        model.scale_loss(runner, 1.0)?;
        Ok(model)
    }

    /// Sets what the gradient of the loss is: the loss scale.
    pub(super) fn scale_loss(&mut self, runner: &mut Runner, scale: f32) -> anyhow::Result<()> {
        runner.write(&self.dloss, &scale.to_le_bytes())
    }

    /// Logits and loss of the batch in `x` and `labels`.
    pub(super) fn forward(&self, runner: &mut Runner, tally: &mut dyn FnMut(&str, Vec<PartReport>)) -> anyhow::Result<()> {
        tally(&self.forward.name, runner.run(&self.forward, &[])?);
        Ok(())
    }

    /// What was learned so far.
    pub(super) fn trained(&self, runner: &Runner) -> anyhow::Result<Vec<Trained>> {
        let one = |parameter: &Parameter| -> anyhow::Result<Trained> {
            let slot = &parameter.master[0];
            let bytes = runner.read(slot)?;
            let value = |position| {
                let offset = slot.layout.offset_of_position(position)? as usize * slot.dtype.bytes();
                num::read_element(slot.dtype, bytes.get(offset..)?).map(|value| value as f32)
            };
            let values = (0..slot.layout.elements()).map_while(value).collect();
            Ok(Trained { name: slot.name.clone(), dims: slot.dims().to_vec(), values })
        };
        self.parameters.iter().map(one).collect()
    }

    /// One step of training after [`Model::forward`]. `false` if gradients overflowed and nothing was changed.
    pub(super) fn learn(
        &mut self,
        runner: &mut Runner,
        rate: f64,
        loss_scale: f64,
        tally: &mut dyn FnMut(&str, Vec<PartReport>),
    ) -> anyhow::Result<bool> {
        tally(&self.backward.name, runner.run(&self.backward, &[])?);
        if let Some((task, factor, finite)) = &self.unscale {
            tally(&task.name, runner.run(task, &[(*factor, (1.0 / loss_scale).into())])?);
            let finite = runner.read(finite)?;
            if num::read_element(DType::F32, &finite) != Some(1.0) {
                return Ok(false);
            }
        }
        self.steps_done += 1;
        // Adam's corrections for its start, folded into the length of the step.
        let step = rate * (1.0 - BETA_2.powi(self.steps_done)).sqrt() / (1.0 - BETA_1.powi(self.steps_done));
        for parameter in &self.parameters {
            tally(&parameter.update.name, runner.run(&parameter.update, &[(parameter.step, (-step).into())])?);
            for [now, next] in [&parameter.master, &parameter.means, &parameter.squares] {
                runner.swap(now, next);
            }
        }
        Ok(true)
    }
}

/// Makes a parameter with its optimizer: random for weights, 0 for biases.
fn parameter(plans: &mut Plans<'_>, name: &str, dims: &[u64], fan_in: u64, random: &mut Random) -> anyhow::Result<Parameter> {
    let is_16_bit = plans.numbers.storage() != DType::F32;
    // Biases are added in f32 and stay in it.
    let is_weight = fan_in > 0;
    let mut two = |what: &str| -> anyhow::Result<[Slot; 2]> {
        Ok([plans.slot(&format!("{name}{what}"), DType::F32, dims)?, plans.slot(&format!("{name}{what}"), DType::F32, dims)?])
    };
    let (master, means, squares) = (two("")?, two(".mean")?, two(".square")?);
    let used = if is_16_bit && is_weight { Some(plans.slot(&format!("{name}.used"), plans.numbers.storage(), dims)?) } else { None };
    let gradient = plans.slot(&format!("d_{name}"), DType::F32, dims)?;
    let scaled = if plans.numbers == Numbers::Fp16 { Some(plans.slot(&format!("d_{name}.scaled"), DType::F32, dims)?) } else { None };

    let deviation = if is_weight { (2.0 / fan_in as f64).sqrt() } else { 0.0 };
    let count = master[0].layout.elements() as usize;
    let values: Vec<f64> = (0..count).map(|_| deviation * random.normal()).collect();
    write_numbers(plans.runner, &master[0], &values)?;
    for zeros in [&means[0], &squares[0]] {
        write_numbers(plans.runner, zeros, &vec![0.0; count])?;
    }
    if let Some(used) = &used {
        write_numbers(plans.runner, used, &values)?;
    }

    let mut g = plans.draw("update");
    let (w, d) = (g.input(&master[0]), g.input(&gradient));
    let (mean, square) = (g.input(&means[0]), g.input(&squares[0]));
    let step = g.builder.host_scalar("step", DType::F32);
    let fixed = |value: f64| HostScalar::Fixed(Real(value));
    let b = &mut g.builder;
    let kept = b.scale("keep_mean", mean, fixed(BETA_1))?;
    let added = b.scale("add_mean", d, fixed(1.0 - BETA_1))?;
    let mean = b.binary("mean", BinaryOp::Add, kept, added)?;
    let kept = b.scale("keep_square", square, fixed(BETA_2))?;
    let squared = b.binary("squared", BinaryOp::Mul, d, d)?;
    let added = b.scale("add_square", squared, fixed(1.0 - BETA_2))?;
    let square = b.binary("square", BinaryOp::Add, kept, added)?;
    let root = b.unary("root", UnaryOp::Sqrt, square)?;
    let divisor = b.unary("divisor", UnaryOp::Affine { scale: Real(1.0), shift: Real(EPSILON) }, root)?;
    let direction = b.binary("direction", BinaryOp::Div, mean, divisor)?;
    let change = b.scale("change", direction, HostScalar::Bound(step))?;
    let changed = b.binary("changed", BinaryOp::Add, w, change)?;
    if let Some(used) = &used {
        let cast = g.builder.unary("cast", UnaryOp::Identity, changed)?;
        g.output(cast, used)?;
    }
    g.output(mean, &means[1])?;
    g.output(square, &squares[1])?;
    g.output(changed, &master[1])?;
    let update = plans.runner.plan(g)?;
    Ok(Parameter { master, used, gradient, scaled, means, squares, update, step })
}

impl Parameter {
    /// The slot that the network reads. What is now in the first of two is exchanged with the second after each step.
    fn read(&self) -> &Slot {
        self.used.as_ref().unwrap_or(&self.master[0])
    }

    fn written_gradient(&self) -> &Slot {
        self.scaled.as_ref().unwrap_or(&self.gradient)
    }
}

/// Writes numbers, rounded, in the row-major order of a slot.
pub(super) fn write_numbers(runner: &mut Runner, slot: &Slot, values: &[f64]) -> anyhow::Result<()> {
    let size = slot.dtype.bytes();
    let mut bytes = vec![0; slot.layout.span_elements() as usize * size];
    for (position, &value) in values.iter().enumerate() {
        if let Some(offset) = slot.layout.offset_of_position(position as u64) {
            // The buffer spans the layout, so the write cannot be refused.
            let _ = num::write_element(slot.dtype, value, &mut bytes[offset as usize * size..]);
        }
    }
    runner.write(slot, &bytes)
}

/// The forward graph, and the backward graph that follows from it: it reads what the forward graph stored.
fn passes(plans: &mut Plans<'_>, io: [&Slot; 5], kept: &Activations, parameters: &[Parameter]) -> anyhow::Result<(Task, Task)> {
    let [x, labels, logits_slot, loss_slot, dloss] = io;
    let mut g = plans.draw("forward");
    let (mut value, labels) = (g.input(x), g.input(labels));
    let read: Vec<Uid> = parameters.iter().map(|parameter| g.input(parameter.read())).collect();
    for layer in 0..3 {
        let conv = plans.conv(value, read[2 * layer], Uid(0));
        let convolved = g.builder.conv_fprop(&format!("conv{}", layer + 1), conv)?;
        let sum = g.builder.binary("bias", BinaryOp::Add, convolved, read[2 * layer + 1])?;
        let relu = g.builder.unary("relu", UnaryOp::Relu, sum)?;
        value = g.output(relu, &kept.convolved[layer])?;
        if layer > 0 {
            let pooled = g.builder.pool(&format!("pool{}", layer + 1), PoolMode::Max, PoolWindows::tiles(&[2, 2]), value)?;
            value = g.output(pooled, &kept.pooled[layer - 1])?;
        }
    }
    let flat = g.builder.reshape("flatten", value, &[plans.batch, parameters[6].gradient.dims()[0]])?;
    let product = g.builder.matmul("linear", flat, read[6], plans.numbers.precision())?;
    let logits = g.builder.binary("bias", BinaryOp::Add, product, read[7])?;
    g.output(logits, logits_slot)?;
    let loss = g.builder.cross_entropy("loss", CrossEntropySpec::new(1, LossReduction::Mean), logits, labels)?;
    g.output(loss, loss_slot)?;

    let stored = g.stored();
    let mut with_gradients = g.clone();
    let dloss = with_gradients.input(dloss);
    let gradients = with_gradients.builder.gradient_from(&[(loss, dloss)], &read)?;
    for (&gradient, parameter) in gradients.iter().zip(parameters) {
        with_gradients.output(gradient, parameter.written_gradient())?;
    }
    let backward = with_gradients.part("backward", &gradients, &stored)?;
    Ok((plans.runner.plan(g)?, plans.runner.plan(backward)?))
}

fn unscale(plans: &mut Plans<'_>, parameters: &[Parameter]) -> anyhow::Result<(Task, Uid, Slot)> {
    // Of the dims of the last bias.
    let finite = plans.slot("finite", DType::F32, &[1, 1])?;
    let mut g = plans.draw("unscale");
    let mut gradients = Vec::new();
    for parameter in parameters {
        gradients.push(g.input(parameter.written_gradient()));
    }
    let UnscaleGraph { factor, unscaled, all_finite } = unscale_graph(&mut g.builder, &gradients)?;
    for (parameter, unscaled) in parameters.iter().zip(unscaled) {
        g.output(unscaled, &parameter.gradient)?;
    }
    g.output(all_finite, &finite)?;
    Ok((plans.runner.plan(g)?, factor, finite))
}
