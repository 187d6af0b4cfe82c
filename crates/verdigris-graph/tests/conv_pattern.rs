//! Graphs with convolutions cut into problems: what goes into one, and what does not.

use verdigris_graph::ops::conv::{Conv, ConvDirection, ConvMode};
use verdigris_graph::pattern::{Partition, partition};
use verdigris_graph::{
    BinaryOp, ConvProblem, EpilogueStep, Graph, GraphBuilder, HostScalar, Precision, Problem, Real, ReductionOp, Uid, UnaryOp,
};
use verdigris_tensor::{DType, Layout};

type TestResult = Result<(), Box<dyn std::error::Error>>;

/// `[n, c, h, w]` with channels fastest.
fn nhwc(dims: &[u64]) -> Layout {
    Layout::with_order(dims, &[0, 2, 3, 1]).expect("a small layout")
}

fn vector(dims: &[u64]) -> Layout {
    Layout::row_major(dims).expect("a small layout")
}

fn kinds(partition: &Partition) -> Vec<&'static str> {
    partition.parts.iter().map(|part| part.problem.kind()).collect()
}

fn conv(partition: &Partition) -> &ConvProblem {
    let found = partition.parts.iter().find_map(|part| if let Problem::Conv(conv) = &part.problem { Some(conv) } else { None });
    found.expect("a convolution")
}

fn plane(x: Uid, w: Uid) -> Conv {
    Conv { pads_before: vec![1, 1], pads_after: vec![1, 1], ..Conv::new(ConvDirection::Fprop, x, w, Uid(-1), 2, Precision::Fp32) }
}

/// Which steps there are, in words.
fn words<P>(steps: &[EpilogueStep<P>]) -> Vec<&'static str> {
    (steps.iter())
        .map(|step| match step {
            EpilogueStep::Unary(f) => f.name(),
            EpilogueStep::Binary { f, .. } => f.name(),
            EpilogueStep::Random { .. } => "random",
            EpilogueStep::Scale { .. } => "scale",
            EpilogueStep::Round { .. } => "round",
            EpilogueStep::Store { .. } => "store",
        })
        .collect()
}

#[test]
fn bias_residual_and_activation_are_one_problem() -> TestResult {
    let mut g = GraphBuilder::new("block");
    let x = g.tensor("x", DType::Bf16, nhwc(&[2, 16, 9, 7]));
    let w = g.tensor("w", DType::Bf16, nhwc(&[24, 16, 3, 3]));
    let bias = g.tensor("bias", DType::F32, vector(&[24, 1, 1]));
    let residual = g.tensor("residual", DType::Bf16, nhwc(&[2, 24, 9, 7]));
    let y = g.conv_fprop("conv", plane(x, w))?;
    let y = g.binary("bias", BinaryOp::Add, y, bias)?;
    let y = g.binary("residual", BinaryOp::Add, residual, y)?;
    let y = g.unary("relu", UnaryOp::Relu, y)?;
    g.store_as(y, "y", DType::Bf16, nhwc(&[2, 24, 9, 7]))?;
    let partition = partition(&g.finish()?)?;
    assert_eq!(kinds(&partition), ["conv"]);
    assert_eq!(partition.parts[0].bindings, [x, w, bias, residual, y]);
    let problem = conv(&partition);
    assert_eq!(words(&problem.epilogue), ["add", "add", "relu"]);
    assert_eq!((problem.input, problem.filter, problem.output), ([1, 9, 7], [1, 3, 3], [1, 9, 7]));
    let EpilogueStep::Binary { operand, .. } = &problem.epilogue[0] else { panic!("a bias") };
    assert!(operand.is_per_channel(problem.y_extents()) && problem.x.is_channels_last() && problem.w.is_channels_last());
    Ok(())
}

/// `conv(relu(x · scale + shift))`; `second_reader` reads the activations too.
fn prepared(stored: DType, made: DType, second_reader: bool) -> Result<Graph, verdigris_graph::Error> {
    let mut g = GraphBuilder::new("prepared");
    let x = g.tensor("x", stored, nhwc(&[2, 16, 9, 7]));
    let w = g.tensor("w", made, nhwc(&[24, 16, 3, 3]));
    let scale = g.tensor("scale", DType::F32, vector(&[1, 16, 1, 1]));
    let shift = g.tensor("shift", DType::F32, vector(&[16, 1, 1]));
    let v = g.binary("mul", BinaryOp::Mul, scale, x)?;
    let v = g.binary("add", BinaryOp::Add, v, shift)?;
    let v = g.unary("relu", UnaryOp::Relu, v)?;
    let v = g.unary("cast", UnaryOp::Identity, v)?;
    g.round_to(v, made)?;
    let y = g.conv_fprop("conv", plane(v, w))?;
    g.store_as(y, "y", DType::F32, nhwc(&[2, 24, 9, 7]))?;
    if second_reader {
        let other = g.unary("neg", UnaryOp::Neg, v)?;
        g.store_as(other, "other", DType::F32, nhwc(&[2, 16, 9, 7]))?;
    }
    g.finish()
}

#[test]
fn what_prepares_activations_stands_before_them() -> TestResult {
    let all = partition(&prepared(DType::Bf16, DType::Bf16, false)?)?;
    assert_eq!(kinds(&all), ["conv"]);
    assert_eq!(words(&conv(&all).prologue), ["mul", "add", "relu"]);
    // Activations that somebody else reads too are made once.
    let shared = partition(&prepared(DType::Bf16, DType::Bf16, true)?)?;
    assert_eq!((kinds(&shared).len(), conv(&shared).prologue.len()), (2, 0));
    // What is stored as another type than is multiplied is not what the copy to the multiplier could be given.
    let cast = partition(&prepared(DType::F32, DType::Bf16, false)?)?;
    assert_eq!(kinds(&cast), ["map", "conv"]);
    assert_eq!(cast.temporaries.len(), 1);
    Ok(())
}

#[test]
fn gradients_of_any_rank_have_three_dims() -> TestResult {
    let mut g = GraphBuilder::new("gradients");
    let x = g.tensor("x", DType::F16, vector(&[2, 8, 20]));
    let w = g.tensor("w", DType::F16, vector(&[6, 4, 5]));
    let dy = g.tensor("dy", DType::F16, vector(&[2, 6, 8]));
    let base =
        Conv { strides: vec![2], groups: 2, mode: ConvMode::Convolution, ..Conv::new(ConvDirection::Wgrad, x, w, dy, 1, Precision::Fp32) };
    let dx = g.conv_dgrad("dgrad", base.clone(), &[2, 8, 20])?;
    g.store_as(dx, "dx", DType::F16, vector(&[2, 8, 20]))?;
    let dw = g.conv_wgrad("wgrad", base, &[6, 4, 5])?;
    g.store_as(dw, "dw", DType::F32, vector(&[6, 4, 5]))?;
    let partition = partition(&g.finish()?)?;
    assert_eq!(kinds(&partition), ["conv", "conv"]);
    assert_eq!(partition.parts[0].bindings, [dy, w, dx]);
    assert_eq!(partition.parts[1].bindings, [dy, x, dw]);
    let problem = conv(&partition);
    assert_eq!((problem.input, problem.filter, problem.strides), ([1, 1, 20], [1, 1, 5], [1, 1, 2]));
    assert!(problem.flip && problem.groups == 2 && problem.pads_after == [0; 3]);
    Ok(())
}

#[test]
fn a_filter_of_one_element_is_a_product_with_the_same_epilogue() -> TestResult {
    let mut g = GraphBuilder::new("pointwise");
    let x = g.tensor("x", DType::Bf16, nhwc(&[2, 16, 9, 7]));
    let w = g.tensor("w", DType::Bf16, nhwc(&[24, 16, 1, 1]));
    let bias = g.tensor("bias", DType::F32, vector(&[24, 1, 1]));
    let y = g.conv_fprop("conv", Conv { pads_before: vec![0, 0], pads_after: vec![0, 0], ..plane(x, w) })?;
    let y = g.binary("bias", BinaryOp::Add, y, bias)?;
    g.store_as(y, "y", DType::Bf16, nhwc(&[2, 24, 9, 7]))?;
    let partition = partition(&g.finish()?)?;
    let Problem::Gemm(gemm) = &partition.parts[0].problem else { panic!("a product") };
    assert_eq!((gemm.m, gemm.n, gemm.k, gemm.batch_count()), (126, 24, 16, 1));
    assert_eq!(partition.parts[0].bindings, [x, w, bias, y]);
    let EpilogueStep::Binary { operand, .. } = &gemm.epilogue[0] else { panic!("a bias") };
    assert!(operand.is_per_column());
    Ok(())
}

#[test]
fn a_virtual_transpose_is_a_way_to_see_activations() -> TestResult {
    let mut g = GraphBuilder::new("transposed");
    let x = g.tensor("x", DType::Bf16, vector(&[2, 9, 7, 16]));
    let w = g.tensor("w", DType::Bf16, nhwc(&[24, 16, 3, 3]));
    let seen = g.transpose("to nchw", x, &[0, 3, 1, 2])?;
    let y = g.conv_fprop("conv", plane(seen, w))?;
    g.store_as(y, "y", DType::Bf16, nhwc(&[2, 24, 9, 7]))?;
    let partition = partition(&g.finish()?)?;
    assert_eq!(kinds(&partition), ["conv"]);
    assert_eq!(partition.parts[0].bindings, [x, w, y]);
    assert!(conv(&partition).x.is_channels_last());
    Ok(())
}

/// What a batch norm in training asks of a convolution: the result, the sums of its values and of their squares, and what is made of these.
struct Normalized {
    graph: Graph,
    uids: [Uid; 6],
}

fn normalized(result: Layout, filter: u64, axes: &[u32], more: bool) -> Result<Normalized, verdigris_graph::Error> {
    let mut g = GraphBuilder::new("conv and batch norm");
    let x = g.tensor("x", DType::Bf16, nhwc(&[2, 16, 9, 7]));
    let w = g.tensor("w", DType::Bf16, nhwc(&[24, 16, filter, filter]));
    let bias = g.tensor("bias", DType::F32, vector(&[24, 1, 1]));
    let pads = vec![filter / 2; 2];
    let conv = Conv { pads_before: pads.clone(), pads_after: pads, ..Conv::new(ConvDirection::Fprop, x, w, Uid(-1), 2, Precision::Fp32) };
    let y = g.conv_fprop("conv", conv)?;
    let y = g.binary("bias", BinaryOp::Add, y, bias)?;
    if more {
        g.store_as(y, "y", DType::Bf16, result)?;
    } else {
        g.round_to(y, DType::Bf16)?;
    }
    let sum = g.reduction("sum", ReductionOp::Add, y, axes)?;
    let square = g.binary("square", BinaryOp::Mul, y, y)?;
    let squares = g.reduction("squares", ReductionOp::Add, square, axes)?;
    let mean = g.scale("mean", sum, HostScalar::Fixed(Real(1.0 / 126.0)))?;
    g.store(mean, "mean", DType::F32)?;
    g.store(squares, "squares", DType::F32)?;
    if more {
        let centred = g.binary("centre", BinaryOp::Sub, y, mean)?;
        g.store_as(centred, "centred", DType::Bf16, nhwc(&[2, 24, 9, 7]))?;
    }
    let mut graph = g.finish()?;
    graph.tensors.iter_mut().filter(|tensor| tensor.uid == y).for_each(|tensor| tensor.layout = result);
    Ok(Normalized { graph, uids: [x, w, bias, y, sum, squares] })
}

#[test]
fn sums_for_a_batch_norm_belong_to_the_convolution() -> TestResult {
    let last = nhwc(&[2, 24, 9, 7]);
    let Normalized { graph, uids } = normalized(last, 3, &[0, 2, 3], true)?;
    let all = partition(&graph)?;
    assert_eq!(kinds(&all)[0], "conv");
    assert!(!kinds(&all).contains(&"reduce"), "{:?}", kinds(&all));
    assert_eq!(all.parts[0].bindings, uids);
    let problem = conv(&all);
    assert_eq!(words(&problem.epilogue), ["add"]);
    let statistics = problem.statistics.expect("sums over channels");
    assert_eq!(
        [statistics.sum, statistics.sum_of_squares].map(|sum| (sum.slot.0, sum.dtype, sum.stride)),
        [(4, DType::F32, 1), (5, DType::F32, 1)]
    );
    // The sum is nobody's output: what is made of it reads it from memory.
    assert_eq!(all.temporaries.iter().map(|tensor| tensor.uid).collect::<Vec<_>>(), [uids[4]]);
    // A filter of one element stays a convolution, which its sums are part of.
    assert_eq!(kinds(&partition(&normalized(last, 1, &[0, 2, 3], true)?.graph)?)[0], "conv");

    let apart = |layout: Layout, axes: &[u32], more: bool| -> Result<bool, Box<dyn std::error::Error>> {
        let all = partition(&normalized(layout, 3, axes, more)?.graph)?;
        Ok(conv(&all).statistics.is_none() && kinds(&all).iter().filter(|kind| **kind == "reduce").count() == 2)
    };
    assert!(apart(last, &[0, 2], true)?, "sums over some dims are not those over channels");
    assert!(apart(vector(&[2, 24, 9, 7]), &[0, 2, 3], true)?, "a result whose channels lie apart is summed up by a reduction");
    assert!(apart(last, &[0, 2, 3], false)?, "sums are of what is stored");
    Ok(())
}

/// Numbers of images count channel by channel, which no row of pixels has by one stride: a map draws them, and stores no mask.
#[test]
fn dropout_behind_a_convolution_is_a_map() -> TestResult {
    let mut g = GraphBuilder::new("convolution, dropout");
    let (x, w) = (g.tensor("x", DType::Bf16, vector(&[2, 8, 6, 6])), g.tensor("w", DType::Bf16, vector(&[16, 8, 3, 3])));
    let state = g.tensor("state", DType::I32, vector(&[4]));
    let y = g.conv_fprop("conv", plane(x, w))?;
    let y = g.dropout("dropout", y, state, 0.5)?;
    g.store(y, "y", DType::Bf16)?;
    let (partition, account) = verdigris_graph::pattern::partition_with_account(&g.finish()?)?;
    assert_eq!(kinds(&partition), ["conv", "map"]);
    assert!(account.decisions.iter().any(|decision| decision.refused.is_some_and(|rule| rule.contains("reads no random numbers"))));
    Ok(())
}
