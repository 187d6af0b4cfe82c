//! What gradients read of what forward ops keep: nothing that was rounded further than the arithmetic rounds.
#![forbid(unsafe_code)]

use verdigris_graph::{
    Attention, AttentionSpec, CrossEntropySpec, Error, GraphBuilder, LossReduction, NormKind, NormSpec, Normalize, Op, Pointwise,
    Precision, Real, Uid, UnaryOp,
};
use verdigris_tensor::{DType, Layout};

fn rows(dims: &[u64]) -> Layout {
    Layout::row_major(dims).expect("small")
}

/// The ops behind the forward ones that make the gradient of `y` with respect to `x`.
fn backward(mut g: GraphBuilder, y: Uid, x: Uid) -> Vec<Op> {
    let forward = g.clone().finish().expect("valid").nodes.len();
    let dims = g.dims(y).expect("known");
    let dy = g.tensor("dy", DType::F32, rows(&dims));
    let gradient = g.gradient_from(&[(y, dy)], &[x]).expect("differentiable")[0];
    g.store(gradient, "dx", DType::F32).expect("stored");
    let graph = g.finish().expect("valid");
    graph.nodes[forward..].iter().map(|node| node.op.clone()).collect()
}

#[test]
fn statistics_of_a_norm_are_read_where_they_are_as_wide_as_the_arithmetic() -> Result<(), Error> {
    for dtype in [DType::Bf16, DType::F16, DType::F32] {
        for kept in [DType::Bf16, DType::F16, DType::F32, DType::F64] {
            let mut g = GraphBuilder::new("norm");
            let x = g.tensor("x", dtype, rows(&[4, 16]));
            let spec = NormSpec { kind: NormKind::Layer, axes: vec![1], groups: 1, eps: Real(1e-5), zero_centred: false };
            let made = g.normalize("norm", Normalize::new(spec, x))?;
            let mean = made.mean.expect("means of a layer");
            for (uid, name) in [(made.y, "y"), (mean, "mean"), (made.inv, "inv")] {
                g.store(uid, name, if uid == made.y { dtype } else { kept })?;
            }
            let read = backward(g, made.y, x).into_iter().find_map(|op| match op {
                Op::NormalizeBackward(back) => Some((back.mean, back.inv)),
                _ => None,
            });
            let wanted = if matches!(kept, DType::F32 | DType::F64) { (Some(mean), Some(made.inv)) } else { (None, None) };
            assert_eq!(read, Some(wanted), "{kept} beside {dtype}");
        }
    }
    Ok(())
}

#[test]
fn a_log_sum_exp_is_read_where_it_is_as_wide_as_the_arithmetic() -> Result<(), Error> {
    for (kept, is_wide) in [(DType::Bf16, false), (DType::F16, false), (DType::F32, true), (DType::F64, true)] {
        let draw = || -> Result<_, Error> {
            let mut g = GraphBuilder::new("loss");
            let (x, labels) = (g.tensor("x", DType::Bf16, rows(&[8, 32])), g.tensor("labels", DType::I64, rows(&[8, 1])));
            let (loss, lse) = g.cross_entropy_with_lse("loss", CrossEntropySpec::new(1, LossReduction::Mean), x, labels)?;
            g.store(loss, "loss", DType::F32)?;
            g.store(lse, "lse", kept)?;
            Ok((g, x, loss, lse))
        };
        let (g, x, loss, lse) = draw()?;
        let read = backward(g, loss, x).into_iter().find_map(|op| match op {
            Op::CrossEntropyBackward(back) => Some(back.lse),
            _ => None,
        });
        assert_eq!(read, Some(Some(lse).filter(|_| is_wide)), "{kept}");
        // Its own gradient is a softmax, of the logits where it is narrow.
        let (g, x, _, lse) = draw()?;
        let ops = backward(g, lse, x);
        assert_eq!(ops.iter().any(|op| op.inputs().contains(&lse)), is_wide, "{kept}");
    }
    Ok(())
}

#[test]
fn attention_in_f64_forms_a_log_sum_exp_of_f32_again() -> Result<(), Error> {
    for (dtype, kept, is_wide) in [(DType::F64, DType::F32, false), (DType::F64, DType::F64, true), (DType::Bf16, DType::F32, true)] {
        let mut g = GraphBuilder::new("attention");
        let [q, k, v] = ["q", "k", "v"].map(|name| g.tensor(name, dtype, rows(&[1, 2, 8, 16])));
        let made = g.attention("attention", Attention::new(AttentionSpec::new(0.25), q, k, v))?;
        g.store(made.o, "o", dtype)?;
        g.store(made.log_sum_exp, "log_sum_exp", kept)?;
        let ops = backward(g, made.o, q);
        let back = ops.iter().find_map(|op| if let Op::AttentionBackward(back) = op { Some(back.log_sum_exp) } else { None });
        assert_eq!(back.map(|uid| uid == made.log_sum_exp), Some(is_wide), "{kept} of {dtype}");
        let again = ops.iter().any(|op| matches!(op, Op::Attention(_)));
        assert!(is_wide || again || back.is_some_and(|uid| uid != made.log_sum_exp));
    }
    Ok(())
}

#[test]
fn a_result_tells_the_sign_of_its_argument_where_its_type_has_the_exponents() -> Result<(), Error> {
    for f in [UnaryOp::Relu, UnaryOp::LeakyRelu { slope: Real(0.1) }] {
        for (made, kept, serves) in [
            (DType::F32, DType::F32, true),
            (DType::F32, DType::Bf16, true),
            (DType::F32, DType::F16, false),
            (DType::F32, DType::E4m3, false),
            (DType::F32, DType::E5m2, false),
            (DType::F16, DType::F16, true),
            (DType::E4m3, DType::E4m3, true),
        ] {
            let mut g = GraphBuilder::new("activation");
            let (a, b) = (g.tensor("a", DType::F32, rows(&[8, 16])), g.tensor("b", DType::F32, rows(&[16, 8])));
            let x = g.matmul("product", a, b, Precision::Fp32)?;
            g.round_to(x, made)?;
            let y = g.unary("activation", f, x)?;
            g.store(y, "y", kept)?;
            let argument = backward(g, y, a).into_iter().find_map(|op| match op {
                Op::Pointwise(Pointwise::Binary { z, .. }) => Some(z),
                _ => None,
            });
            assert_eq!(argument, Some(if serves { y } else { x }), "{f:?} of {made}, kept as {kept}");
        }
    }
    Ok(())
}
