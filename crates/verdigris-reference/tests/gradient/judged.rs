//! Where a difference says little of a slope, and what the judge makes of it.

use super::*;

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
