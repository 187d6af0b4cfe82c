//! A graph whose four ops are one kernel on a GPU: `y = relu(x·w + bias) + residual`.
//!
//! ```sh
//! cargo run --release --example fused_graph
//! ```
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;

use verdigris::graph::pattern;
use verdigris::{BinaryOp, DType, Device, GraphBuilder, Layout, Precision, Tensor, UnaryOp};

const M: u64 = 33;
const K: u64 = 65;
const N: u64 = 47;

fn main() -> Result<(), Box<dyn Error>> {
    // Results are virtual until they are stored: what stands between the ops has no memory.
    let mut g = GraphBuilder::new("linear");
    let x = g.tensor("x", DType::F32, Layout::row_major(&[M, K])?);
    let w = g.tensor("w", DType::F32, Layout::row_major(&[K, N])?);
    let bias = g.tensor("bias", DType::F32, Layout::row_major(&[1, N])?);
    let residual = g.tensor("residual", DType::F32, Layout::row_major(&[M, N])?);
    let product = g.matmul("product", x, w, Precision::Fp32)?;
    let sum = g.binary("add bias", BinaryOp::Add, product, bias)?;
    let active = g.unary("relu", UnaryOp::Relu, sum)?;
    let y = g.binary("add residual", BinaryOp::Add, active, residual)?;
    g.store(y, "y", DType::F32)?;
    let graph = g.finish()?;

    // On a GPU each problem is given to one engine. All four ops are one: what follows the product is its epilogue.
    let problems = pattern::problems(&graph)?;
    println!("{} ops are {} problem for a GPU", graph.nodes.len(), problems.len());
    assert_eq!((graph.nodes.len(), problems.len()), (4, 1));

    // The same graph on the CPU; `Device::open("cuda:0", …)` is a GPU.
    let device = Device::cpu();
    let plan = device.plan(&graph)?;
    for part in plan.engines() {
        println!("  {} by {}", part.name, part.engine);
    }
    let numbers = |count: u64, step: u64| -> Vec<f64> { (0..count).map(|i| (i * step % 17) as f64 / 8.0 - 1.0).collect() };
    let values = [numbers(M * K, 3), numbers(K * N, 5), numbers(N, 7), numbers(M * N, 11)];
    let mut inputs = Vec::new();
    for (uid, dims, values) in
        [(x, [M, K], &values[0]), (w, [K, N], &values[1]), (bias, [1, N], &values[2]), (residual, [M, N], &values[3])]
    {
        inputs.push((uid, Tensor::from_values(&device, DType::F32, &dims, values)?));
    }
    let inputs: Vec<_> = inputs.iter().map(|(uid, tensor)| (*uid, tensor)).collect();
    let outputs = device.run(&plan, &inputs, &[])?;

    // The formula, in plain loops.
    let [x, w, bias, residual] = values;
    let (m, k, n) = (M as usize, K as usize, N as usize);
    for (at, got) in outputs[0].to_values()?.into_iter().enumerate() {
        let (row, column) = (at / n, at % n);
        let product: f64 = (0..k).map(|i| x[row * k + i] * w[i * n + column]).sum();
        let want = (product + bias[column]).max(0.0) + residual[at];
        assert!((got - want).abs() <= 1e-5 * (1.0 + want.abs()), "y[{row}, {column}] is {got}, want {want}");
    }
    println!("{} elements are those of the formula", m * n);
    Ok(())
}

#[test]
fn it_runs() -> Result<(), Box<dyn Error>> {
    main()
}
