//! Training: a network of two layers learns `sin(3a)·b`. The graph of the loss is drawn by hand; [`Graph::gradient`](verdigris::Graph::gradient)
//! adds its gradients, and the update is part of the same graph, so that one run is one step.
//!
//! ```sh
//! cargo run --release --example train
//! ```
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;

use verdigris::{BinaryOp, DType, Device, GraphBuilder, HostScalar, Layout, Precision, ReductionOp, Tensor, UnaryOp};

/// Examples, numbers of each, and width of the hidden layer.
const BATCH: usize = 64;
const INPUTS: usize = 2;
const HIDDEN: usize = 32;
const STEPS: usize = 400;
const RATE: f64 = 0.2;

fn main() -> Result<(), Box<dyn Error>> {
    let mut g = GraphBuilder::new("step");
    let tensor = |g: &mut GraphBuilder, name: &str, rows: usize, columns: usize| -> Result<_, Box<dyn Error>> {
        Ok(g.tensor(name, DType::F32, Layout::row_major(&[rows as u64, columns as u64])?))
    };
    let x = tensor(&mut g, "x", BATCH, INPUTS)?;
    let target = tensor(&mut g, "target", BATCH, 1)?;
    let w1 = tensor(&mut g, "w1", INPUTS, HIDDEN)?;
    let b1 = tensor(&mut g, "b1", 1, HIDDEN)?;
    let w2 = tensor(&mut g, "w2", HIDDEN, 1)?;
    let parameters = [w1, b1, w2];

    // loss = mean((tanh(x·w1 + b1)·w2 − target)²)
    let product = g.matmul("layer 1", x, w1, Precision::Fp32)?;
    let biased = g.binary("bias", BinaryOp::Add, product, b1)?;
    let hidden = g.unary("tanh", UnaryOp::Tanh, biased)?;
    let y = g.matmul("layer 2", hidden, w2, Precision::Fp32)?;
    let error = g.binary("error", BinaryOp::Sub, y, target)?;
    let square = g.binary("square", BinaryOp::Mul, error, error)?;
    let loss = g.reduction("loss", ReductionOp::Avg, square, &[0, 1])?;
    g.store(loss, "loss", DType::F32)?;
    let mut graph = g.finish()?;

    // The gradients are stored tensors of the graph; the update goes on from there.
    let gradients = graph.gradient(loss, &parameters)?;
    let mut g = GraphBuilder::from(graph);
    let rate = g.host_scalar("rate", DType::F32);
    let mut updated = Vec::new();
    for (&parameter, &gradient) in parameters.iter().zip(&gradients) {
        let step = g.scale("step", gradient, HostScalar::Bound(rate))?;
        let next = g.binary("update", BinaryOp::Sub, parameter, step)?;
        g.store(next, &format!("next of {parameter}"), DType::F32)?;
        updated.push(next);
    }
    let device = Device::cpu();
    let plan = device.plan(&g.finish()?)?;
    let place = |uid| plan.outputs().position(|tensor| tensor.uid == uid).ok_or("no such output");
    let (loss_at, gradient_at) = (place(loss)?, gradients.iter().map(|&uid| place(uid)).collect::<Result<Vec<_>, _>>()?);
    let updated_at = updated.iter().map(|&uid| place(uid)).collect::<Result<Vec<_>, _>>()?;

    let (inputs, targets) = data();
    let x_values = Tensor::from_values(&device, DType::F32, &[BATCH as u64, INPUTS as u64], &inputs)?;
    let t_values = Tensor::from_values(&device, DType::F32, &[BATCH as u64, 1], &targets)?;
    let first = [numbers(INPUTS * HIDDEN, 1), vec![0.0; HIDDEN], numbers(HIDDEN, 2)];
    let shapes = [[INPUTS, HIDDEN], [1, HIDDEN], [HIDDEN, 1]].map(|dims| dims.map(|extent| extent as u64));
    let mut weights = Vec::new();
    for (dims, values) in shapes.iter().zip(&first) {
        weights.push(Tensor::from_values(&device, DType::F32, dims, values)?);
    }

    let mut losses = Vec::new();
    for step in 0..STEPS {
        let mut bound = vec![(x, &x_values), (target, &t_values)];
        bound.extend(parameters.iter().copied().zip(&weights));
        let outputs = device.run(&plan, &bound, &[(rate, RATE.into())])?;
        let loss = outputs[loss_at].to_values()?[0];
        if step == 0 {
            let mut got = Vec::new();
            for &at in &gradient_at {
                got.push(outputs[at].to_values()?);
            }
            check_first_step(&inputs, &targets, &first, loss, &got);
        }
        if step % 50 == 0 {
            println!("step {step:>3}: loss {loss:.5}");
        }
        losses.push(loss);
        weights = updated_at.iter().map(|&at| outputs[at].clone()).collect();
    }

    let [first, .., last] = losses[..] else { return Err("no step was done".into()) };
    println!("step {:>3}: loss {last:.5}", STEPS - 1);
    // The loss falls, from one fifty of steps to the next, and ends far below where it began.
    assert!(losses.chunks(50).map(|fifty| fifty[0]).is_sorted_by(|before, after| before > after), "{losses:?}");
    assert!(last < first / 10.0, "the loss is {last} after {STEPS} steps, {first} before");
    Ok(())
}

/// Points of the square, and the function to be learned there.
fn data() -> (Vec<f64>, Vec<f64>) {
    let inputs = numbers(BATCH * INPUTS, 7);
    let targets = inputs.chunks(INPUTS).map(|point| (3.0 * point[0]).sin() * point[1]).collect();
    (inputs, targets)
}

/// Numbers from −1 to 1 that look random.
fn numbers(count: usize, seed: u64) -> Vec<f64> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / (1 << 23) as f64 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// The loss in plain loops, and its gradients by differences of it.
fn check_first_step(inputs: &[f64], targets: &[f64], weights: &[Vec<f64>; 3], loss: f64, gradients: &[Vec<f64>]) {
    let plain = |[w1, b1, w2]: &[Vec<f64>; 3]| -> f64 {
        let squares = inputs.chunks(INPUTS).zip(targets).map(|(point, target)| {
            let hidden = |j: usize| (b1[j] + (0..INPUTS).map(|i| point[i] * w1[i * HIDDEN + j]).sum::<f64>()).tanh();
            ((0..HIDDEN).map(|j| hidden(j) * w2[j]).sum::<f64>() - target).powi(2)
        });
        squares.sum::<f64>() / BATCH as f64
    };
    let want = plain(weights);
    assert!((loss - want).abs() <= 1e-5 * (1.0 + want), "the loss is {loss}, want {want}");
    for (which, gradient) in gradients.iter().enumerate() {
        for (at, got) in gradient.iter().enumerate() {
            let moved = |by: f64| {
                let mut weights = weights.clone();
                weights[which][at] += by;
                plain(&weights)
            };
            let want = (moved(1e-4) - moved(-1e-4)) / 2e-4;
            assert!((got - want).abs() <= 1e-4 * (1.0 + want.abs()), "parameter {which}, element {at}: {got}, want {want}");
        }
    }
}

#[test]
fn it_runs() -> Result<(), Box<dyn Error>> {
    main()
}
