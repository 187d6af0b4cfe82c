//! A plan on a CUDA stream, memory and workspace of one's own: what an application does that has all three already. Without a GPU it says
//! so and ends.
//!
//! ```sh
//! cargo run --release --example own_stream
//! ```
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;

use verdigris::{Binding, Config, DType, Device, Event, GraphBuilder, Layout, Policy, Precision, Stream, UnaryOp, Workspace, cuda};

const EXTENT: u64 = 192;

fn main() -> Result<(), Box<dyn Error>> {
    let device = match Device::open("cuda", &Config::from_environment()?, Policy::default()) {
        Ok(device) => device,
        Err(verdigris::Error::Device(error @ (cuda::Error::NoDriver { .. } | cuda::Error::NoDevice))) => {
            println!("skipped: {error}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let handle = device.handle().ok_or("`cuda` names a GPU")?;

    // y = relu(a·b), planned once.
    let mut g = GraphBuilder::new("product");
    let a = g.tensor("a", DType::F32, Layout::row_major(&[EXTENT, EXTENT])?);
    let b = g.tensor("b", DType::F32, Layout::row_major(&[EXTENT, EXTENT])?);
    let product = g.matmul("product", a, b, Precision::Fp32)?;
    let y = g.unary("relu", UnaryOp::Relu, product)?;
    g.store(y, "y", DType::F32)?;
    let plan = device.plan(&g.finish()?)?;

    // The stream, the memory and the workspace are the caller's. The workspace is lent to every run on this stream.
    let stream = Stream::new(handle.context())?;
    let numbers = |step: u64| -> Vec<f32> { (0..EXTENT * EXTENT).map(|i| (i * step % 17) as f32 / 8.0 - 1.0).collect() };
    let bytes = |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|value| value.to_le_bytes()).collect() };
    let (a_values, b_values) = (numbers(3), numbers(5));
    let pool = handle.pool();
    let a_memory = pool.alloc_from(&stream, &bytes(&a_values))?;
    let b_memory = pool.alloc_from(&stream, &bytes(&b_values))?;
    let y_memory = pool.alloc_zeroed(&stream, EXTENT * EXTENT * 4)?;
    let workspace = pool.alloc(&stream, plan.workspace_bytes())?;

    let (start, end) = (Event::timing(handle.context())?, Event::timing(handle.context())?);
    start.record(&stream)?;
    for _ in 0..10 {
        let mut bindings = [(a, &a_memory), (b, &b_memory), (y, &y_memory)].map(|(uid, memory)| (uid, Binding::Buffer(memory.slice())));
        // Submits and does not wait.
        plan.run(&mut bindings, Some(&stream), Workspace::Lent(workspace.slice()))?;
    }
    end.record(&stream)?;
    let result = y_memory.download_all(&stream)?;
    println!("ten runs on {} took {:.1} µs", device.name(), end.elapsed_us_since(&start)?);

    let extent = EXTENT as usize;
    for (at, got) in result.chunks_exact(4).map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).enumerate() {
        let (row, column) = (at / extent, at % extent);
        let sum: f32 = (0..extent).map(|i| a_values[row * extent + i] * b_values[i * extent + column]).sum();
        assert!((got - sum.max(0.0)).abs() <= 1e-2 * (1.0 + sum.abs()), "y[{row}, {column}] is {got}, want {}", sum.max(0.0));
    }
    println!("{} elements are those of the formula", extent * extent);
    Ok(())
}

#[test]
fn it_runs() -> Result<(), Box<dyn Error>> {
    main()
}
