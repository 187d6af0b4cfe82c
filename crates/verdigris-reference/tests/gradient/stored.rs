//! Gradients as they are stored.

use super::*;

/// Sixteen bits: operands beside gradients are of one type, gradients have the type of their tensors, and steps beside other ways leave
/// nothing behind.
#[test]
fn types_and_names_of_a_stored_gradient() {
    let mut g = GraphBuilder::new("network");
    let x = g.tensor("x", DType::Bf16, Layout::with_order(&[2, 3, 5, 5], &[0, 2, 3, 1]).unwrap());
    let w = g.tensor("w", DType::Bf16, rows(&[4, 3, 3, 3]));
    let bias = g.tensor("bias", DType::F32, rows(&[1, 4, 1, 1]));
    let repeated = g.tensor("repeated", DType::F32, Layout::new(&[4], &[0]).unwrap());
    let conv = g.conv_fprop("conv", Conv::new(ConvDirection::Fprop, x, w, Uid(0), 2, Precision::Fp32)).unwrap();
    let sum = g.binary("bias", BinaryOp::Add, conv, bias).unwrap();
    let kept = g.unary("relu", UnaryOp::Relu, sum).unwrap();
    g.store(kept, "relu", DType::Bf16).unwrap();
    let step = g.unary("floor", UnaryOp::Floor, kept).unwrap();
    let product = g.binary("product", BinaryOp::Mul, step, kept).unwrap();
    let last = g.reshape("last", repeated, &[1, 4, 1, 1]).unwrap();
    let last = g.binary("last", BinaryOp::Mul, product, last).unwrap();
    let loss = g.reduction("loss", ReductionOp::Add, last, &[0, 1, 2, 3]).unwrap();
    g.store(loss, "loss", DType::F32).unwrap();
    let mut graph = g.finish().unwrap();
    let forward = graph.clone();
    let gradients = graph.gradient(loss, &[x, w, bias, repeated]).unwrap();
    verdigris_graph::validate::validate(&graph).unwrap();
    let described: Vec<(&str, DType)> =
        gradients.iter().map(|&uid| graph.tensor(uid).unwrap()).map(|tensor| (tensor.name.as_str(), tensor.dtype)).collect();
    assert_eq!(described, [("d_x", DType::Bf16), ("d_w", DType::Bf16), ("d_bias", DType::F32), ("d_repeated", DType::F32)]);
    assert_eq!(graph.tensor(gradients[0]).unwrap().layout, forward.tensor(x).unwrap().layout);
    assert!(graph.tensor(gradients[3]).unwrap().layout.is_row_major());
    assert_eq!(graph.nodes[..forward.nodes.len()], forward.nodes);

    // The backward graph alone: ReLU's own result serves, so that the convolution is not computed again.
    let given = [x, w, bias, repeated, kept];
    let back = graph.part(&gradients, &given).unwrap();
    assert!(back.nodes.iter().all(|node| !matches!(&node.op, Op::Conv(conv) if conv.direction == ConvDirection::Fprop)), "{back:#?}");
    let inputs = graph_inputs(&graph, Distribution::Normal, 4);
    let all = evaluate(&graph, &inputs, Selection::All).unwrap();
    let mut alone = Inputs { buffers: inputs.buffers.clone(), scalars: inputs.scalars.clone() };
    let stored = all.iter().find(|expected| expected.id == kept).unwrap();
    alone.buffers.insert(kept, stored.rounded(&vec![0; stored.layout.span_bytes(stored.dtype) as usize]));
    for expected in evaluate(&back, &alone, Selection::All).unwrap() {
        let whole = all.iter().find(|other| other.id == expected.id).unwrap();
        assert!(gradients.contains(&expected.id));
        for (alone, whole) in expected.values.iter().zip(&whole.values) {
            assert!((alone.value - whole.value).abs() <= alone.error + whole.error, "{alone:?} {whole:?}");
        }
    }
    assert!(matches!(graph.part(&gradients, &[sum]), Err(Error::Structure { .. })));
    assert!(matches!(graph.part(&[x], &[]), Err(Error::Structure { .. })));
}
