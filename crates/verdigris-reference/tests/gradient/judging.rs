//! The judge of gradients by itself: what is wrong is seen, and what differences do not tell is not judged.

use verdigris_graph::{BinaryOp, GraphBuilder, HostScalar, Op, Pointwise, Precision, Real, ReductionOp, TernaryOp, UnaryOp};

use super::{F64, Judged, NEAR, input, with_gradients, write};

/// Each way in which a gradient may be wrong by one op is seen: planted into the gradient of a small network, op by op.
#[test]
fn a_wrong_rule_is_found() {
    let mut g = GraphBuilder::new("network");
    let (x, w, b) = (input(&mut g, "x", &[3, 4]), input(&mut g, "w", &[4, 5]), input(&mut g, "b", &[5]));
    let product = g.matmul("product", x, w, Precision::F64).unwrap();
    let sum = g.binary("sum", BinaryOp::Sub, product, b).unwrap();
    let bent = g.unary("bent", UnaryOp::Tanh, sum).unwrap();
    let scaled = g.scale("scaled", bent, HostScalar::Fixed(Real(3.0))).unwrap();
    let y = g.softmax("softmax", scaled, 1, false).unwrap();
    let mut built = with_gradients(g, &[y], &[x, w, b]).unwrap();
    let inputs = built.inputs(2);
    assert!(built.judge("right", &inputs, 3).worst < NEAR);
    let mut planted = 0;
    let right = built.with_gradient.clone();
    for at in built.forward.nodes.len()..right.nodes.len() {
        let mut wrong = right.clone();
        match &mut wrong.nodes[at].op {
            Op::Matmul(op) => op.alpha = HostScalar::Fixed(Real(1.01)),
            Op::Pointwise(Pointwise::Unary { f, .. }) => *f = if *f == UnaryOp::Neg { UnaryOp::Identity } else { UnaryOp::Neg },
            Op::Pointwise(Pointwise::Binary { f: f @ BinaryOp::Backward(_), .. }) => *f = BinaryOp::Backward(UnaryOp::Sigmoid),
            Op::Pointwise(Pointwise::Scale { factor, .. }) => *factor = HostScalar::Fixed(Real(2.99)),
            Op::SoftmaxBackward(op) => op.log = !op.log,
            Op::Reduction(op) => op.f = ReductionOp::Avg,
            _ => continue,
        }
        built.with_gradient = wrong;
        planted += 1;
        assert!(built.judge("wrong", &inputs, 3).worst > 10.0 * NEAR, "not seen: {:?}", right.nodes[at]);
    }
    assert!(planted >= 7, "{planted}");
}

/// Where a difference jumps, and the jump may be too small to see or too fine to tell from a slope, nothing is judged.
#[test]
fn what_decides_by_steps_is_not_judged_where_a_difference_takes_one() {
    // A condition that is zero is not zero beside: the gradient is that of the side which was taken, the difference that of the other.
    let mut g = GraphBuilder::new("select");
    let (x, z) = (input(&mut g, "x", &[3, 4]), input(&mut g, "z", &[3, 4]));
    let positive = g.unary("exp", UnaryOp::Exp, x).unwrap();
    let zero = g.unary("not", UnaryOp::Not, positive).unwrap();
    let y = g.ternary("select", TernaryOp::Select, zero, z, z).unwrap();
    let bent = g.unary("bent", UnaryOp::Tanh, x).unwrap();
    let built = with_gradients(g, &[y, bent], &[x, z]).unwrap();
    let judged = built.judge("select", &built.inputs(2), 3);
    assert!(judged.worst < NEAR && (judged.directions, judged.kinks) == (3, 3), "{judged:?}");
    // Numbers beyond what a difference moves by are rounded up many times, and look as smooth as what they are rounded from.
    let mut g = GraphBuilder::new("round");
    let x = input(&mut g, "x", &[3, 4]);
    let large = g.scale("large", x, HostScalar::Fixed(Real(1e9))).unwrap();
    let rounded = g.unary("round", UnaryOp::Round, large).unwrap();
    let built = with_gradients(g, &[large, rounded], &[x]).unwrap();
    let judged = built.judge("round", &built.inputs(2), 3);
    assert!(judged.worst < NEAR && (judged.directions, judged.kinks) == (0, 3), "{judged:?}");
}

/// Where the third derivative is large and the second none, a difference errs by more than is allowed, and two of them tell the slope.
#[test]
fn what_bends_much_is_judged_by_two_steps() {
    let mut g = GraphBuilder::new("bend");
    let x = input(&mut g, "x", &[1]);
    let steep = g.scale("steep", x, HostScalar::Fixed(Real(400.0))).unwrap();
    let y = g.unary("bend", UnaryOp::Tanh, steep).unwrap();
    let mut built = with_gradients(g, &[y], &[x]).unwrap();
    let mut inputs = built.inputs(2);
    inputs.buffers.insert(x, write(F64, &[0.0]));
    inputs.buffers.insert(built.dys[0], write(F64, &[1.0]));
    let judged: Vec<Judged> = (0..8).map(|seed| built.judge("bend", &inputs, seed)).collect();
    assert!(judged.iter().all(|judged| judged.worst < NEAR), "{judged:?}");
    let refined: u32 = judged.iter().map(|judged| judged.refined).sum();
    let directions: u32 = judged.iter().map(|judged| judged.directions).sum();
    assert!(refined > 4 && directions > 16, "{judged:?}");
    // One that is wrong by as much as the single difference errs is seen.
    let forward = built.forward.nodes.len();
    for node in &mut built.with_gradient.nodes[forward..] {
        if let Op::Pointwise(Pointwise::Scale { factor, .. }) = &mut node.op {
            *factor = HostScalar::Fixed(Real(400.0 * (1.0 - 3.0 * NEAR)));
        }
    }
    let judged: Vec<Judged> = (0..8).map(|seed| built.judge("wrong", &inputs, seed)).collect();
    assert!(judged.iter().any(|judged| judged.worst > NEAR), "{judged:?}");
}
