//! Ten thousand shapes, planned and run: shapes are no labels, so that the series stay those of the first.
#![forbid(unsafe_code)]

use verdigris::{DType, Device, GraphBuilder, Layout, Precision, Tensor, UnaryOp};
use verdigris_telemetry::observe::{self, Listen};
use verdigris_telemetry::{Bounds, Registry};

/// Plans a product, a function and a softmax of this shape, and runs them.
fn run(device: &Device, rows: u64, depth: u64) {
    let mut g = GraphBuilder::new(&format!("{rows} by {depth}"));
    let packed = |dims: &[u64]| Layout::row_major(dims).expect("small");
    let x = g.tensor("x", DType::F32, packed(&[rows, depth]));
    let w = g.tensor("w", DType::F32, packed(&[depth, 3]));
    let product = g.matmul("product", x, w, Precision::Fp32).expect("fits");
    let relu = g.unary("relu", UnaryOp::Relu, product).expect("fits");
    let soft = g.softmax("softmax", relu, 1, false).expect("fits");
    g.store(soft, "y", DType::F32).expect("stores");
    let plan = device.plan(&g.finish().expect("valid")).expect("plans");
    let tensor =
        |dims: &[u64]| Tensor::from_values(device, DType::F32, dims, &vec![0.5; dims.iter().product::<u64>() as usize]).expect("fits");
    let results = device.run(&plan, &[(x, &tensor(&[rows, depth])), (w, &tensor(&[depth, 3]))], &[]).expect("runs");
    assert_eq!(results.len(), 1);
}

#[test]
fn ten_thousand_shapes_make_no_more_series_than_one() {
    let registry = Registry::new(Bounds::default());
    metrics::with_local_recorder(&registry, || {
        let _listening = observe::listen(Listen::default());
        let device = Device::cpu();
        run(&device, 1, 1);
        let first = registry.series_count();
        assert!(first > 5, "{}", registry.text());
        for shape in 0..10_000 {
            run(&device, shape % 100 + 1, shape / 100 + 1);
        }
        assert_eq!((registry.series_count(), registry.refused_count()), (first, 0), "{}", registry.text());
    });
    let text = registry.text();
    let counted = |line: &&str| line.starts_with("verdigris_executions_total{") && line.contains("cpu.gemm") && line.ends_with(" 10001");
    assert!(text.lines().any(|line| counted(&line)), "{text}");
}
