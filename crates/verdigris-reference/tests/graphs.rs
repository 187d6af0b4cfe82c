//! The reference of graphs against values worked out by hand, identities between ops, and answers computed in f32 or wrong on purpose.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use verdigris_graph::{
    BinaryOp, Border, Conv, ConvDirection, ConvMode, CrossEntropyBackward, CrossEntropySpec, Filter, Graph, GraphBuilder, HostScalar,
    LossReduction, PoolBackward, PoolMode, PoolWindows, Precision, Real, ReductionOp, Sampling, SoftmaxBackward, TernaryOp, Uid, UnaryOp,
};
use verdigris_reference::compare::compare;
use verdigris_reference::data::{self, Distribution, Random};
use verdigris_reference::graph::{GraphError, Selection, evaluate};
use verdigris_reference::run::{Expected, Inputs};
use verdigris_tensor::{DType, Layout, num};

fn layout(dims: &[u64]) -> Layout {
    Layout::row_major(dims).unwrap()
}

fn bytes(dtype: DType, values: &[f64]) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * dtype.bytes()];
    for (value, place) in values.iter().zip(bytes.chunks_exact_mut(dtype.bytes())) {
        num::write_element(dtype, *value, place).unwrap();
    }
    bytes
}

/// Evaluates with `values` bound to the tensors that are read.
fn run(graph: &Graph, values: &[(Uid, &[f64])]) -> Vec<Expected<Uid>> {
    let mut inputs = Inputs::default();
    for (uid, values) in values {
        inputs.buffers.insert(*uid, bytes(graph.tensor(*uid).unwrap().dtype, values));
    }
    evaluate(graph, &inputs, Selection::All).unwrap()
}

fn values(expected: &Expected<Uid>) -> Vec<f64> {
    expected.values.iter().map(|v| v.value).collect()
}

#[track_caller]
fn near(got: &[f64], want: &[f64], slack: f64) {
    assert_eq!(got.len(), want.len(), "{got:?}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= slack * (1.0 + want.abs()), "element {i}: {got}, want {want}");
    }
}

#[test]
fn a_small_convolution_by_hand() {
    // x = 1..9 in a square, w = [1 2; 3 4], padding 1 before and 0 after, stride 2.
    let build = |mode| {
        let mut g = GraphBuilder::new("conv");
        let x = g.tensor("x", DType::F32, layout(&[1, 1, 3, 3]));
        let w = g.tensor("w", DType::F32, layout(&[1, 1, 2, 2]));
        let conv = Conv {
            pads_before: vec![1, 1],
            strides: vec![2, 2],
            mode,
            ..Conv::new(ConvDirection::Fprop, x, w, Uid(0), 2, Precision::Fp32)
        };
        let y = g.conv_fprop("conv", conv).unwrap();
        g.store(y, "y", DType::F32).unwrap();
        let graph = g.finish().unwrap();
        let square: Vec<f64> = (1..=9).map(f64::from).collect();
        values(&run(&graph, &[(x, &square), (w, &[1.0, 2.0, 3.0, 4.0])])[0])
    };
    // Taps at rows and columns −1, 0 | 1, 2.
    assert_eq!(build(ConvMode::CrossCorrelation), [4.0, 18.0, 36.0, 77.0]);
    assert_eq!(build(ConvMode::Convolution), [1.0, 7.0, 19.0, 63.0]);
}

/// A convolution of random shape, in one of the directions, with the tensors it reads.
struct Shape {
    conv: Conv,
    x: Vec<u64>,
    w: Vec<u64>,
    y: Vec<u64>,
}

impl Shape {
    fn random(random: &mut Random) -> Shape {
        loop {
            let spatial = 1 + random.below(3) as usize;
            let groups = [1, 1, 2, 3][random.below(4) as usize];
            let (channels, filters) = (groups * (1 + random.below(3)), groups * (1 + random.below(3)));
            let mut list = |low: u64, count: u64| -> Vec<u64> { (0..spatial).map(|_| low + random.below(count)).collect() };
            let (extents, taps) = (list(1, 6), list(1, 3));
            let conv = Conv {
                pads_before: list(0, 4),
                pads_after: list(0, 4),
                strides: list(1, 3),
                dilations: list(1, 3),
                groups,
                mode: if random.below(2) == 0 { ConvMode::Convolution } else { ConvMode::CrossCorrelation },
                ..Conv::new(ConvDirection::Fprop, Uid(1), Uid(2), Uid(3), spatial, Precision::F64)
            };
            let outs: Option<Vec<u64>> = (0..spatial).map(|i| conv.out_extent(i, extents[i], taps[i])).collect();
            let Some(outs) = outs else { continue };
            let images = 1 + random.below(2);
            let dims = |first: u64, second: u64, rest: &[u64]| [&[first, second], rest].concat();
            return Shape {
                x: dims(images, channels, &extents),
                w: dims(filters, channels / groups, &taps),
                y: dims(images, filters, &outs),
                conv,
            };
        }
    }

    /// What the direction writes, from the two others.
    fn run(&self, direction: ConvDirection, x: &[f64], w: &[f64], y: &[f64]) -> Vec<f64> {
        let mut g = GraphBuilder::new("conv");
        let mut tensor = |name: &str, dims: &[u64]| g.tensor(name, DType::F64, layout(dims));
        let (graph, bound): (GraphBuilder, [(Uid, &[f64]); 2]) = match direction {
            ConvDirection::Fprop => {
                let (a, b) = (tensor("x", &self.x), tensor("w", &self.w));
                let out = g.conv_fprop("conv", Conv { x: a, w: b, ..self.conv.clone() }).unwrap();
                g.store(out, "y", DType::F64).unwrap();
                (g, [(a, x), (b, w)])
            }
            ConvDirection::Dgrad => {
                let (a, b) = (tensor("y", &self.y), tensor("w", &self.w));
                let out = g.conv_dgrad("conv", Conv { y: a, w: b, ..self.conv.clone() }, &self.x).unwrap();
                g.store(out, "x", DType::F64).unwrap();
                (g, [(a, y), (b, w)])
            }
            ConvDirection::Wgrad => {
                let (a, b) = (tensor("x", &self.x), tensor("y", &self.y));
                let out = g.conv_wgrad("conv", Conv { x: a, y: b, ..self.conv.clone() }, &self.w).unwrap();
                g.store(out, "w", DType::F64).unwrap();
                (g, [(a, x), (b, y)])
            }
        };
        values(&run(&graph.finish().unwrap(), &bound)[0])
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn normal(random: &mut Random, dims: &[u64]) -> Vec<f64> {
    (0..dims.iter().product()).map(|_| random.normal()).collect()
}

#[test]
fn the_gradients_of_convolution_are_its_adjoints() {
    let mut random = Random::new(3);
    for _ in 0..300 {
        let shape = Shape::random(&mut random);
        let (x, w, y) = (normal(&mut random, &shape.x), normal(&mut random, &shape.w), normal(&mut random, &shape.y));
        let along_y = dot(&shape.run(ConvDirection::Fprop, &x, &w, &y), &y);
        let along_x = dot(&x, &shape.run(ConvDirection::Dgrad, &x, &w, &y));
        let along_w = dot(&w, &shape.run(ConvDirection::Wgrad, &x, &w, &y));
        near(&[along_x, along_w], &[along_y; 2], 1e-10);
    }
}

#[test]
fn a_pointwise_convolution_is_a_matmul() {
    let (n, c, k) = (35, 7, 5);
    let mut g = GraphBuilder::new("both");
    let x = g.tensor("x", DType::F32, Layout::new(&[1, c, n], &[c * n, 1, c]).unwrap());
    let w = g.tensor("w", DType::F32, layout(&[k, c, 1]));
    let y = g.conv_fprop("conv", Conv::new(ConvDirection::Fprop, x, w, Uid(0), 1, Precision::Fp32)).unwrap();
    g.store_as(y, "y", DType::F32, Layout::new(&[1, k, n], &[k * n, 1, k]).unwrap()).unwrap();
    let (rows, columns) = (g.reshape("rows", x, &[c, n]).unwrap(), g.reshape("columns", w, &[k, c]).unwrap());
    let d = g.matmul("matmul", columns, rows, Precision::Fp32).unwrap();
    g.store(d, "d", DType::F32).unwrap();
    let graph = g.finish().unwrap();
    let outputs = evaluate(&graph, &data::graph_inputs(&graph, Distribution::Normal, 5), Selection::All).unwrap();
    assert_eq!(outputs[0].values, outputs[1].values);
    assert!(outputs[0].values.iter().all(|v| v.error > 0.0 && v.error < 1e-4));
}

#[test]
fn padding_that_meets_an_infinite_weight_is_not_judged() {
    let mut g = GraphBuilder::new("conv");
    let x = g.tensor("x", DType::F32, layout(&[1, 1, 3]));
    let w = g.tensor("w", DType::F32, layout(&[1, 1, 2]));
    let y =
        g.conv_fprop("conv", Conv { pads_before: vec![1], ..Conv::new(ConvDirection::Fprop, x, w, Uid(0), 1, Precision::Fp32) }).unwrap();
    g.store(y, "y", DType::F32).unwrap();
    let expected = run(&g.finish().unwrap(), &[(x, &[1.0, 2.0, 3.0]), (w, &[f64::INFINITY, 1.0])]);
    assert_eq!(expected[0].values[0].error, f64::INFINITY);
    assert_eq!(expected[0].values[1].value, f64::INFINITY);
    assert_eq!(expected[0].values[1].error, 0.0);
}

#[test]
fn filter_gradients_beside_an_infinity_are_not_judged() {
    let expected = |first: f64| {
        let mut g = GraphBuilder::new("conv");
        let x = g.tensor("x", DType::F32, layout(&[1, 1, 3]));
        let y = g.tensor("y", DType::F32, layout(&[1, 1, 2]));
        let wgrad = Conv { pads_after: vec![1], ..Conv::new(ConvDirection::Wgrad, x, Uid(0), y, 1, Precision::Fp32) };
        let w = g.conv_wgrad("conv", wgrad, &[1, 1, 3]).unwrap();
        g.store(w, "w", DType::F32).unwrap();
        run(&g.finish().unwrap(), &[(x, &[first, 2.0, 3.0]), (y, &[1.0, 1.0])])
    };
    // The last tap would meet the first pixel at an output that there is not: an engine may multiply it by a zero all the same.
    let [first, second, last] = expected(f64::INFINITY)[0].values[..] else { panic!("three taps") };
    assert_eq!((first.value, first.error), (f64::INFINITY, 0.0));
    assert_eq!((second.error, last.error), (f64::INFINITY, f64::INFINITY));
    assert_eq!(values(&expected(1.0)[0]), [3.0, 5.0, 3.0]);
}

#[test]
fn reductions_by_hand() {
    let x = [1.0, -2.0, 0.0, 4.0, 0.5, -0.25];
    let over = |f| {
        let mut g = GraphBuilder::new("reduction");
        let tensor = g.tensor("x", DType::F32, layout(&[2, 3]));
        let y = g.reduction("f", f, tensor, &[1]).unwrap();
        g.store(y, "y", DType::F32).unwrap();
        values(&run(&g.finish().unwrap(), &[(tensor, &x)])[0])
    };
    near(&over(ReductionOp::Add), &[-1.0, 4.25], 0.0);
    near(&over(ReductionOp::Mul), &[0.0, -0.5], 0.0);
    near(&over(ReductionOp::MulNoZeros), &[-2.0, -0.5], 0.0);
    near(&over(ReductionOp::Min), &[-2.0, -0.25], 0.0);
    near(&over(ReductionOp::Max), &[1.0, 4.0], 0.0);
    near(&over(ReductionOp::Amax), &[2.0, 4.0], 0.0);
    near(&over(ReductionOp::Avg), &[-1.0 / 3.0, 4.25 / 3.0], 1e-15);
    near(&over(ReductionOp::Norm1), &[3.0, 4.75], 0.0);
    near(&over(ReductionOp::Norm2), &[5f64.sqrt(), 16.3125f64.sqrt()], 1e-15);
}

#[test]
fn a_norm_of_what_may_be_zero_may_be_more() {
    let mut g = GraphBuilder::new("norm");
    let x = g.tensor("x", DType::F32, layout(&[1]));
    let near_x = g.unary("exp", UnaryOp::Exp, x).unwrap();
    let zero = g.binary("sub", BinaryOp::Sub, near_x, near_x).unwrap();
    let norm = g.reduction("norm", ReductionOp::Norm2, zero, &[0]).unwrap();
    g.store(zero, "zero", DType::F32).unwrap();
    g.store(norm, "norm", DType::F32).unwrap();
    let expected = run(&g.finish().unwrap(), &[(x, &[1.5])]);
    let (zero, norm) = (expected[0].values[0], expected[1].values[0]);
    assert!(zero.value == 0.0 && zero.error > 0.0, "{zero:?}");
    assert!(norm.value == 0.0 && norm.error >= 0.99 * zero.error, "{norm:?} of {zero:?}");
}

#[test]
fn of_nothing() {
    for (f, want) in [
        (ReductionOp::Add, 0.0),
        (ReductionOp::Mul, 1.0),
        (ReductionOp::Min, f64::INFINITY),
        (ReductionOp::Max, f64::NEG_INFINITY),
        (ReductionOp::Amax, 0.0),
        (ReductionOp::Avg, f64::NAN),
        (ReductionOp::Norm1, 0.0),
        (ReductionOp::Norm2, 0.0),
        (ReductionOp::MulNoZeros, 1.0),
    ] {
        let mut g = GraphBuilder::new("nothing");
        let x = g.tensor("x", DType::F32, layout(&[2, 0]));
        let y = g.reduction("f", f, x, &[1]).unwrap();
        g.store(y, "y", DType::F32).unwrap();
        let got = values(&run(&g.finish().unwrap(), &[])[0]);
        assert!(got.iter().all(|got| *got == want || (got.is_nan() && want.is_nan())), "{f:?}: {got:?}");
    }
}

#[test]
fn pooling_by_hand_and_its_gradients() {
    let x = [1.0, 5.0, 5.0, -2.0, f64::NAN, 0.0, 7.0];
    let windows = PoolWindows::Sliding { window: vec![3], strides: vec![2], dilations: vec![1], pads_before: vec![1], pads_after: vec![0] };
    let mut g = GraphBuilder::new("pool");
    let input = g.tensor("x", DType::F32, layout(&[1, 1, 7]));
    let (y, index) = g.max_pool_with_index("max", windows.clone(), input, DType::I64).unwrap();
    let average = g.pool("avg", PoolMode::Average { count_include_pad: false }, windows.clone(), input).unwrap();
    let padded = g.pool("pad", PoolMode::Average { count_include_pad: true }, windows.clone(), input).unwrap();
    let dy = g.tensor("dy", DType::F32, layout(&[1, 1, 3]));
    let back = |mode, x, index| PoolBackward { mode, windows: windows.clone(), dy, x, index, dx: Uid(0) };
    let by_x = g.pool_backward("by x", back(PoolMode::Max, Some(input), None), &[1, 1, 7]).unwrap();
    let by_index = g.pool_backward("by index", back(PoolMode::Max, None, Some(index)), &[1, 1, 7]).unwrap();
    let of_average = g.pool_backward("avg back", back(PoolMode::Average { count_include_pad: false }, None, None), &[1, 1, 7]).unwrap();
    for (uid, name, dtype) in [
        (y, "y", DType::F32),
        (index, "index", DType::I64),
        (average, "average", DType::F32),
        (padded, "padded", DType::F32),
        (by_x, "by_x", DType::F32),
        (by_index, "by_index", DType::F32),
        (of_average, "of_average", DType::F32),
    ] {
        g.store(uid, name, dtype).unwrap();
    }
    let graph = g.finish().unwrap();
    let outputs = run(&graph, &[(input, &x), (dy, &[1.0, 10.0, 100.0])]);
    let by_uid: BTreeMap<Uid, Vec<f64>> = outputs.iter().map(|expected| (expected.id, values(expected))).collect();
    // Windows {0, 1}, {1, 2, 3}, {3, 4, 5}; the first of two 5 wins, NaN over all.
    assert_eq!(by_uid[&index], [1.0, 1.0, 4.0]);
    assert_eq!(by_uid[&y][..2], [5.0, 5.0]);
    assert!(by_uid[&y][2].is_nan());
    near(&by_uid[&average][..2], &[3.0, 8.0 / 3.0], 1e-15);
    near(&by_uid[&padded][..2], &[2.0, 8.0 / 3.0], 1e-15);
    assert_eq!(by_uid[&by_x], [0.0, 11.0, 0.0, 0.0, 100.0, 0.0, 0.0]);
    assert_eq!(by_uid[&by_index], by_uid[&by_x]);
    let third = 10.0 / 3.0;
    near(&by_uid[&of_average], &[0.5, 0.5 + third, third, third + 100.0 / 3.0, 100.0 / 3.0, 100.0 / 3.0, 0.0], 1e-15);
}

/// The numbers are PyTorch's, of its functions `interpolate` and `pad` on a CPU in f32.
#[test]
fn resampling_by_hand() {
    let x = [1.0, 5.0, -2.0, 0.5];
    let sized = |filter| Sampling::Interpolate { filter, out: vec![7], factors: vec![] };
    let scaled = |filter| Sampling::Interpolate { filter, out: vec![6], factors: vec![Real(1.55)] };
    let padded = |border| Sampling::Pad { border, before: vec![3], after: vec![2] };
    let linear = |align_corners| Filter::Linear { align_corners };
    let cubic = |align_corners| Filter::Cubic { align_corners };
    let cases: [(Sampling, &[f64]); 13] = [
        (sized(Filter::Nearest), &[1.0, 1.0, 5.0, 5.0, -2.0, -2.0, 0.5]),
        (sized(Filter::NearestExact), &[1.0, 1.0, 5.0, -2.0, -2.0, 0.5, 0.5]),
        (scaled(Filter::Nearest), &[1.0, 1.0, 5.0, 5.0, -2.0, 0.5]),
        (scaled(Filter::NearestExact), &[1.0, 1.0, 5.0, -2.0, -2.0, 0.5]),
        (sized(linear(false)), &[1.0, 2.428_571_7, 4.714_285_9, 1.499_999_2, -1.821_428_1, -0.392_856_7, 0.5]),
        (sized(linear(true)), &[1.0, 3.0, 5.0, 1.5, -2.0, -0.75, 0.5]),
        (scaled(linear(false)), &[1.0, 2.870_967_6, 4.209_678_2, -0.306_451_6, -0.991_935_8, 0.5]),
        (sized(cubic(false)), &[0.603_134_6, 2.793_459_9, 5.094_479_6, 1.640_624_3, -2.180_303_3, -0.782_342_3, 0.748_041_2]),
        (sized(cubic(true)), &[1.0, 3.656_25, 5.0, 1.640_625, -2.0, -1.406_25, 0.5]),
        (padded(Border::Reflect), &[0.5, -2.0, 5.0, 1.0, 5.0, -2.0, 0.5, -2.0, 5.0]),
        (padded(Border::Replicate), &[1.0, 1.0, 1.0, 1.0, 5.0, -2.0, 0.5, 0.5, 0.5]),
        (padded(Border::Circular), &[5.0, -2.0, 0.5, 1.0, 5.0, -2.0, 0.5, 1.0, 5.0]),
        (Sampling::Pad { border: Border::Reflect, before: vec![-1], after: vec![2] }, &[5.0, -2.0, 0.5, -2.0, 5.0]),
    ];
    for (sampling, want) in cases {
        let mut g = GraphBuilder::new("resample");
        let input = g.tensor("x", DType::F32, layout(&[1, 1, 4]));
        let y = g.resample("resample", sampling.clone(), input).unwrap();
        g.store(y, "y", DType::F32).unwrap();
        let got = values(&run(&g.finish().unwrap(), &[(input, &x)])[0]);
        assert_eq!(got.len(), want.len(), "{sampling:?}");
        assert!(got.iter().zip(want).all(|(got, want)| (got - want).abs() < 2e-6), "{sampling:?}: {got:?}");
    }
    let mut g = GraphBuilder::new("resample");
    let dy = g.tensor("dy", DType::F32, layout(&[1, 1, 7]));
    let dx = g.resample_backward("back", sized(linear(false)), dy, &[1, 1, 4]).unwrap();
    g.store(dx, "dx", DType::F32).unwrap();
    let got = values(&run(&g.finish().unwrap(), &[(dy, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])])[0]);
    near(&got, &[2.5, 5.5, 8.785_714, 11.214_286], 2e-6);
    // A tap of weight 0 brings no NaN, and a border no other element.
    let mut g = GraphBuilder::new("resample");
    let input = g.tensor("x", DType::F32, layout(&[1, 1, 3]));
    let sampling = Sampling::Interpolate { filter: linear(true), out: vec![5], factors: vec![] };
    let y = g.resample("resample", sampling, input).unwrap();
    g.store(y, "y", DType::F32).unwrap();
    let got = values(&run(&g.finish().unwrap(), &[(input, &[1.0, 2.0, f64::INFINITY])])[0]);
    assert_eq!(got, [1.0, 1.5, 2.0, f64::INFINITY, f64::INFINITY]);
}

#[test]
fn adaptive_windows_and_windows_in_the_padding() {
    let mut g = GraphBuilder::new("pool");
    let x = g.tensor("x", DType::F32, layout(&[1, 1, 5]));
    let y = g.pool("adaptive", PoolMode::Average { count_include_pad: false }, PoolWindows::Adaptive { out: vec![3] }, x).unwrap();
    g.store(y, "y", DType::F32).unwrap();
    // The taps of the second dilated window pass by the only element.
    let one = g.tensor("one", DType::F32, layout(&[1, 1, 1]));
    let windows = PoolWindows::Sliding { window: vec![2], strides: vec![1], dilations: vec![4], pads_before: vec![4], pads_after: vec![1] };
    let (lost, index) = g.max_pool_with_index("lost", windows.clone(), one, DType::I32).unwrap();
    let average = g.pool("average", PoolMode::Average { count_include_pad: false }, windows, one).unwrap();
    g.store(lost, "lost", DType::F32).unwrap();
    g.store(index, "index", DType::I32).unwrap();
    g.store(average, "average", DType::F32).unwrap();
    let outputs = run(&g.finish().unwrap(), &[(x, &[1.0, 2.0, 3.0, 4.0, 5.0]), (one, &[6.0])]);
    near(&values(&outputs[0]), &[1.5, 3.0, 4.5], 0.0);
    assert_eq!(values(&outputs[1]), [6.0, f64::NEG_INFINITY]);
    assert_eq!(values(&outputs[2]), [0.0, -1.0]);
    assert_eq!(values(&outputs[3]), [6.0, 0.0]);
}

#[test]
fn softmax_sums_to_one_and_its_gradient_is_that_of_finite_differences() {
    let mut random = Random::new(9);
    let dims = [2, 5, 3];
    let (x, dy) = (normal(&mut random, &dims), normal(&mut random, &dims));
    for log in [false, true] {
        let forward = |x: &[f64]| {
            let mut g = GraphBuilder::new("softmax");
            let tensor = g.tensor("x", DType::F64, layout(&dims));
            let y = g.softmax("softmax", tensor, 1, log).unwrap();
            g.store(y, "y", DType::F64).unwrap();
            values(&run(&g.finish().unwrap(), &[(tensor, x)])[0])
        };
        let y = forward(&x);
        for row in 0..6 {
            let (image, column) = (row / 3, row % 3);
            let sum: f64 = (0..5).map(|i| y[image * 15 + i * 3 + column]).map(|y| if log { y.exp() } else { y }).sum();
            near(&[sum], &[1.0], 1e-14);
        }
        let mut g = GraphBuilder::new("softmax");
        let (y_in, dy_in) = (g.tensor("y", DType::F64, layout(&dims)), g.tensor("dy", DType::F64, layout(&dims)));
        let dx = g.softmax_backward("softmax", y_in, dy_in, 1, log).unwrap();
        g.store(dx, "dx", DType::F64).unwrap();
        let graph = g.finish().unwrap();
        assert!(graph.nodes.iter().all(|node| matches!(node.op, verdigris_graph::Op::SoftmaxBackward(SoftmaxBackward { .. }))));
        let dx = values(&run(&graph, &[(y_in, &y), (dy_in, &dy)])[0]);
        for i in 0..x.len() {
            let step = |side: f64| {
                let mut moved = x.clone();
                moved[i] += side * 1e-6;
                dot(&forward(&moved), &dy)
            };
            near(&[dx[i]], &[(step(1.0) - step(-1.0)) / 2e-6], 1e-7);
        }
    }
}

#[test]
fn a_row_of_infinities_gives_nan_and_the_others_do_not() {
    let mut g = GraphBuilder::new("softmax");
    let x = g.tensor("x", DType::F32, layout(&[4, 2]));
    let y = g.softmax("softmax", x, 1, false).unwrap();
    let l = g.softmax("log", x, 1, true).unwrap();
    g.store(y, "y", DType::F32).unwrap();
    g.store(l, "l", DType::F32).unwrap();
    let inf = f64::INFINITY;
    let outputs = run(&g.finish().unwrap(), &[(x, &[-inf, -inf, inf, 1.0, -inf, 3.0, f64::NAN, 0.0])]);
    for (output, rest) in outputs.iter().zip([[0.0, 1.0], [-inf, 0.0]]) {
        let got = values(output);
        assert!([0, 1, 2, 3, 6, 7].iter().all(|&i| got[i].is_nan()), "{got:?}");
        assert_eq!(got[4..6], rest);
    }
}

#[test]
fn cross_entropy_and_its_gradient() {
    let mut random = Random::new(11);
    let (rows, classes) = (4, 5);
    let x = normal(&mut random, &[rows, classes]);
    // One ignored, one out of range.
    let labels = [2.0, -1.0, 0.0, 4.0];
    for reduction in [LossReduction::None, LossReduction::Sum, LossReduction::Mean] {
        for smoothing in [0.0, 0.25] {
            let spec = CrossEntropySpec { label_smoothing: Real(smoothing), ignore_index: Some(-1), ..CrossEntropySpec::new(1, reduction) };
            let loss_of = |x: &[f64]| {
                let mut g = GraphBuilder::new("loss");
                let (logits, targets) =
                    (g.tensor("x", DType::F64, layout(&[rows, classes])), g.tensor("t", DType::I32, layout(&[rows, 1])));
                let (loss, lse) = g.cross_entropy_with_lse("loss", spec, logits, targets).unwrap();
                g.store(loss, "loss", DType::F64).unwrap();
                g.store(lse, "lse", DType::F64).unwrap();
                let outputs = run(&g.finish().unwrap(), &[(logits, x), (targets, &labels)]);
                (values(&outputs[0]), values(&outputs[1]))
            };
            let (loss, lse) = loss_of(&x);
            let row = |r: usize| {
                let row = &x[r * 5..r * 5 + 5];
                let lse = row.iter().map(|x| x.exp()).sum::<f64>().ln();
                if labels[r] < 0.0 {
                    0.0
                } else {
                    lse - (1.0 - smoothing) * row[labels[r] as usize] - smoothing * row.iter().sum::<f64>() / 5.0
                }
            };
            let all: Vec<f64> = (0..4).map(row).collect();
            match reduction {
                LossReduction::None => near(&loss, &all, 1e-13),
                LossReduction::Sum => near(&loss, &[all.iter().sum()], 1e-13),
                LossReduction::Mean => near(&loss, &[all.iter().sum::<f64>() / 3.0], 1e-13),
            }
            for with_lse in [false, true] {
                let mut g = GraphBuilder::new("back");
                let (logits, targets) =
                    (g.tensor("x", DType::F64, layout(&[rows, classes])), g.tensor("t", DType::I32, layout(&[rows, 1])));
                let dims: &[u64] = if reduction == LossReduction::None { &[rows, 1] } else { &[1, 1] };
                let dloss = g.tensor("dloss", DType::F64, layout(dims));
                let given = with_lse.then(|| g.tensor("lse", DType::F64, layout(&[rows, 1])));
                let back = CrossEntropyBackward { spec, logits, labels: targets, dloss, lse: given, dlogits: Uid(0) };
                let dx = g.cross_entropy_backward("back", back).unwrap();
                g.store(dx, "dx", DType::F64).unwrap();
                let ones = vec![1.0; loss.len()];
                let mut bound: Vec<(Uid, &[f64])> = vec![(logits, &x), (targets, &labels), (dloss, &ones)];
                bound.extend(given.map(|given| (given, lse.as_slice())));
                let dx = values(&run(&g.finish().unwrap(), &bound)[0]);
                for i in 0..x.len() {
                    let step = |side: f64| {
                        let mut moved = x.clone();
                        moved[i] += side * 1e-6;
                        loss_of(&moved).0.iter().sum::<f64>()
                    };
                    near(&[dx[i]], &[(step(1.0) - step(-1.0)) / 2e-6], 1e-7);
                }
            }
        }
    }
    // A label out of range.
    let mut g = GraphBuilder::new("bad");
    let (logits, targets) = (g.tensor("x", DType::F32, layout(&[1, 3])), g.tensor("t", DType::I64, layout(&[1, 1])));
    let loss = g.cross_entropy("loss", CrossEntropySpec::new(1, LossReduction::Mean), logits, targets).unwrap();
    g.store(loss, "loss", DType::F32).unwrap();
    assert!(values(&run(&g.finish().unwrap(), &[(logits, &[1.0, 2.0, 3.0]), (targets, &[3.0])])[0])[0].is_nan());
}

#[test]
fn movements_by_hand() {
    let x: Vec<f64> = (0..6).map(f64::from).collect();
    let mut g = GraphBuilder::new("movement");
    let tensor = g.tensor("x", DType::I32, Layout::with_order(&[2, 3], &[1, 0]).unwrap());
    // Bound column by column: x = [0 2 4; 1 3 5].
    let results = [
        g.reshape("reshape", tensor, &[3, 2]).unwrap(),
        g.transpose("transpose", tensor, &[1, 0]).unwrap(),
        g.slice("slice", tensor, &[0, 0], &[2, 3], &[1, 2]).unwrap(),
        g.pad("pad", tensor, &[1, 0], &[0, 1], 9.0).unwrap(),
        g.concat("concat", &[tensor, tensor], 1).unwrap(),
        g.broadcast("broadcast", tensor, &[2, 2, 3]).unwrap(),
    ];
    for (i, uid) in results.iter().enumerate() {
        g.store(*uid, &format!("y{i}"), DType::I32).unwrap();
    }
    let outputs = run(&g.finish().unwrap(), &[(tensor, &x)]);
    assert_eq!(values(&outputs[0]), [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]);
    assert_eq!(values(&outputs[1]), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    assert_eq!(values(&outputs[2]), [0.0, 4.0, 1.0, 5.0]);
    assert_eq!(values(&outputs[3]), [9.0, 9.0, 9.0, 9.0, 0.0, 2.0, 4.0, 9.0, 1.0, 3.0, 5.0, 9.0]);
    assert_eq!(values(&outputs[4]), [0.0, 2.0, 4.0, 0.0, 2.0, 4.0, 1.0, 3.0, 5.0, 1.0, 3.0, 5.0]);
    assert_eq!(values(&outputs[5]), [0.0, 2.0, 4.0, 1.0, 3.0, 5.0, 0.0, 2.0, 4.0, 1.0, 3.0, 5.0]);
}

/// A chain over one row, with each tensor between of type `middle`.
fn chain(middle: DType, ops: &[UnaryOp], x: &[f64]) -> Expected<Uid> {
    let mut g = GraphBuilder::new("chain");
    let input = g.tensor("x", DType::F32, layout(&[x.len() as u64]));
    let mut v = input;
    for (i, op) in ops.iter().enumerate() {
        v = g.unary(&format!("op{i}"), *op, v).unwrap();
        if i + 1 < ops.len() && middle != DType::F32 {
            g.store(v, &format!("middle{i}"), middle).unwrap();
        }
    }
    g.store(v, "y", DType::F32).unwrap();
    run(&g.finish().unwrap(), &[(input, x)]).pop().unwrap()
}

#[test]
fn a_jump_within_the_bound_takes_either_side() {
    // exp(log x) is x but for an error; floor then jumps at whole numbers and nowhere else.
    let got = chain(DType::F32, &[UnaryOp::Log, UnaryOp::Exp, UnaryOp::Floor], &[2.5, 3.0, 7.0]);
    assert_eq!(got.values[0], verdigris_reference::tolerance::Bounded::exact(2.0));
    assert!(got.values[1].error >= 1.0 && got.values[2].error >= 1.0);
    // An exact 3 has one answer.
    assert_eq!(chain(DType::F32, &[UnaryOp::Floor], &[3.0]).values[0].error, 0.0);
    // Nothing can be said near a pole.
    let got = chain(DType::F32, &[UnaryOp::Sin, UnaryOp::Reciprocal], &[std::f64::consts::PI * 4.0, 1.0]);
    assert_eq!(got.values[0].error, f64::INFINITY);
    assert!(got.values[1].error < 1e-5);
}

#[test]
fn the_value_of_a_tensor_is_what_its_type_holds() {
    let got = chain(DType::Bf16, &[UnaryOp::Identity, UnaryOp::Identity], &[1.001, -0.3333]);
    assert_eq!(values(&got), [1.001, -0.3333].map(|x| num::round_to(DType::Bf16, x)));
    assert_eq!(got.values[0].error, 0.0);
}

/// What an honest f32 engine answers to a chain, op by op.
fn honest(f: UnaryOp, x: f32) -> f32 {
    let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
    match f {
        UnaryOp::Exp => x.exp(),
        UnaryOp::Tanh => x.tanh(),
        UnaryOp::Silu => x * sigmoid(x),
        UnaryOp::Sigmoid => sigmoid(x),
        UnaryOp::Softplus { beta } => (1.0 + (x * beta.0 as f32).exp()).ln() / beta.0 as f32,
        UnaryOp::Mish => x * (1.0 + x.exp()).ln().tanh(),
        UnaryOp::Sin => x.sin(),
        UnaryOp::HardSwish => x * (x + 3.0).clamp(0.0, 6.0) / 6.0,
        UnaryOp::Elu { alpha } => {
            if x > 0.0 {
                x
            } else {
                alpha.0 as f32 * (x.exp() - 1.0)
            }
        }
        UnaryOp::Affine { scale, shift } => (scale.0 as f32).mul_add(x, shift.0 as f32),
        _ => panic!("not in the list"),
    }
}

#[test]
fn chains_of_functions_in_f32_pass_and_a_slip_does_not() {
    let all = [
        UnaryOp::Exp,
        UnaryOp::Tanh,
        UnaryOp::Silu,
        UnaryOp::Sigmoid,
        UnaryOp::Softplus { beta: Real(1.5) },
        UnaryOp::Mish,
        UnaryOp::Sin,
        UnaryOp::HardSwish,
        UnaryOp::Elu { alpha: Real(0.7) },
        UnaryOp::Affine { scale: Real(-1.3), shift: Real(0.1) },
    ];
    let mut random = Random::new(21);
    for _ in 0..200 {
        let ops: Vec<UnaryOp> = (0..1 + random.below(3)).map(|_| all[random.below(10) as usize]).collect();
        let x: Vec<f64> = (0..50).map(|_| f64::from(random.normal() as f32)).collect();
        let expected = chain(DType::F32, &ops, &x);
        let answers: Vec<f64> = x.iter().map(|&x| f64::from(ops.iter().fold(x as f32, |v, f| honest(*f, v)))).collect();
        let before = data::output_buffer(&expected, &Inputs::default());
        let mut after = before.clone();
        after[..200].copy_from_slice(&bytes(DType::F32, &answers));
        let report = compare(&expected, &before, &after);
        assert!(report.passes(), "{ops:?}: {report}");
        let slipped: Vec<f64> = answers.iter().map(|y| y * 1.01 + 0.01).collect();
        after[..200].copy_from_slice(&bytes(DType::F32, &slipped));
        assert!(!compare(&expected, &before, &after).passes(), "{ops:?}");
    }
}

#[test]
fn a_select_on_a_doubtful_condition_takes_either() {
    let mut g = GraphBuilder::new("select");
    let x = g.tensor("x", DType::F32, layout(&[3]));
    let one = g.tensor("one", DType::F32, layout(&[1]));
    let log = g.unary("log", UnaryOp::Log, x).unwrap();
    let near_x = g.unary("exp", UnaryOp::Exp, log).unwrap();
    let above = g.binary("above", BinaryOp::Gt, near_x, one).unwrap();
    let y = g.ternary("select", TernaryOp::Select, one, x, above).unwrap();
    g.store(y, "y", DType::F32).unwrap();
    let got = run(&g.finish().unwrap(), &[(x, &[0.5, 1.0, 8.0]), (one, &[1.0])]).remove(0);
    assert_eq!(values(&got), [0.5, 1.0, 1.0]);
    assert_eq!([got.values[0].error, got.values[2].error], [0.0, 0.0]);
    assert!(got.values[1].error.is_finite());
}

#[test]
fn a_sample_is_what_the_whole_holds_there() {
    let mut g = GraphBuilder::new("sample");
    let x = g.tensor("x", DType::Bf16, layout(&[2, 3, 9, 9]));
    let w = g.tensor("w", DType::Bf16, layout(&[4, 3, 3, 3]));
    let y = g.conv_fprop("conv", Conv::new(ConvDirection::Fprop, x, w, Uid(0), 2, Precision::Fp32)).unwrap();
    let factor = g.host_scalar("factor", DType::F32);
    let y = g.scale("scale", y, HostScalar::Bound(factor)).unwrap();
    g.store(y, "y", DType::Bf16).unwrap();
    let graph = g.finish().unwrap();
    let mut inputs = data::graph_inputs(&graph, Distribution::Normal, 5);
    let all = evaluate(&graph, &inputs, Selection::All).unwrap().remove(0);
    let some = evaluate(&graph, &inputs, Selection::Sample { count: 40, seed: 1 }).unwrap().remove(0);
    assert!(some.positions.len() <= 40 && some.positions.contains(&(2 * 4 * 49 - 1)) && some.positions.contains(&0));
    assert!(some.positions.iter().zip(&some.values).all(|(&position, value)| all.values[position as usize] == *value));
    inputs.scalars.clear();
    assert_eq!(evaluate(&graph, &inputs, Selection::All), Err(GraphError::NoScalar { uid: factor }));
    inputs.buffers.insert(x, vec![0; 10]);
    assert!(matches!(evaluate(&graph, &inputs, Selection::All), Err(GraphError::ShortBuffer { have_bytes: 10, need_bytes: 972, .. })));
    inputs.buffers.remove(&x);
    assert!(matches!(evaluate(&graph, &inputs, Selection::All), Err(GraphError::NoBuffer { .. })));
}
