//! Temporaries that take the place of others.

use verdigris_graph::pattern::{in_place, partition};
use verdigris_graph::{CrossEntropyBackward, CrossEntropySpec, GraphBuilder, LossReduction, Precision, Uid};
use verdigris_tensor::{DType, Layout};

/// Logits in the plan's own memory, the loss of each row, and what comes of the logits' gradient. Which tensors lie in the place of which, by name.
fn placed(has_lse: bool, is_read_later: bool) -> Vec<[String; 2]> {
    let rows = |dims: &[u64]| Layout::row_major(dims).expect("a small layout");
    let mut g = GraphBuilder::new("loss");
    let (x, w) = (g.tensor("x", DType::Bf16, rows(&[6, 8])), g.tensor("w", DType::Bf16, rows(&[8, 40])));
    let (labels, dloss) = (g.tensor("labels", DType::I64, rows(&[6, 1])), g.tensor("dloss", DType::F32, rows(&[6, 1])));
    let logits = g.matmul("logits", x, w, Precision::Fp32).expect("fits");
    g.set_dtype(logits, DType::Bf16).expect("a known tensor");
    let spec = CrossEntropySpec::new(1, LossReduction::None);
    let (loss, lse) = g.cross_entropy_with_lse("loss", spec, logits, labels).expect("fits");
    g.store(loss, "losses", DType::F32).expect("a known tensor");
    let back = CrossEntropyBackward { spec, logits, labels, dloss, lse: has_lse.then_some(lse), dlogits: logits };
    let dlogits = g.cross_entropy_backward("dlogits", back).expect("fits");
    g.set_dtype(dlogits, DType::Bf16).expect("a known tensor");
    let v = g.tensor("v", DType::Bf16, rows(&[40, 8]));
    let dx = g.matmul("dx", dlogits, v, Precision::Fp32).expect("fits");
    g.store(dx, "dx", DType::Bf16).expect("a known tensor");
    if is_read_later {
        // Its other operand is made of the gradient, so that it comes behind.
        let turned = g.transpose("turned", logits, &[1, 0]).expect("two dims");
        let last = g.matmul("last", turned, dx, Precision::Fp32).expect("fits");
        g.store(last, "last", DType::F32).expect("a known tensor");
    }
    let graph = g.finish().expect("valid");
    let cut = partition(&graph).expect("cut");
    let name = |uid: Uid| graph.tensor(uid).map_or_else(String::new, |tensor| tensor.name.clone());
    in_place(&cut.parts, &cut.temporaries).expect("said").into_iter().map(|(uid, first)| [name(uid), name(first)]).collect()
}

#[test]
fn the_gradient_of_a_loss_takes_the_place_of_the_logits() {
    assert_eq!(placed(true, false), [["dlogits".to_owned(), "logits".to_owned()]]);
}

#[test]
fn only_what_nobody_reads_later_gives_way() {
    assert!(placed(true, true).is_empty());
}

#[test]
fn what_is_read_at_any_time_does_not_give_way() {
    assert!(placed(false, false).is_empty());
}
