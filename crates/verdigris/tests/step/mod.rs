//! A whole step of training as one graph: every kind of part, temporaries between them, parameters updated.

use verdigris_graph::{
    BinaryOp, Conv, ConvDirection, CrossEntropyBackward, CrossEntropySpec, Graph, GraphBuilder, HostScalar, LossReduction, PoolBackward,
    PoolMode, PoolWindows, Precision, ReductionOp, Uid, UnaryOp,
};
use verdigris_tensor::{DType, Layout};

const BATCH: u64 = 4;

/// Convolution, bias, ReLU, max pooling, linear layer, cross-entropy; back through all of it; a step down the gradient.
pub(crate) fn step(dtype: DType) -> Result<Graph, verdigris_graph::Error> {
    let rows = |dims: &[u64]| Layout::row_major(dims).expect("small");
    let precision = Precision::usual(dtype, dtype).expect("a type of products");
    let mut g = GraphBuilder::new("training step");
    let x = g.tensor("x", dtype, Layout::with_order(&[BATCH, 3, 8, 8], &[0, 2, 3, 1]).expect("an order"));
    let labels = g.tensor("labels", DType::I32, rows(&[BATCH, 1]));
    let w1 = g.tensor("w1", dtype, Layout::with_order(&[8, 3, 3, 3], &[0, 2, 3, 1]).expect("an order"));
    let b1 = g.tensor("b1", dtype, rows(&[1, 8, 1, 1]));
    let w2 = g.tensor("w2", dtype, rows(&[128, 10]));
    let b2 = g.tensor("b2", dtype, rows(&[1, 10]));
    let rate = g.host_scalar("minus the learning rate", DType::F32);
    let dloss = g.tensor("dloss", DType::F32, rows(&[1, 1]));

    let mut conv = Conv::new(ConvDirection::Fprop, x, w1, Uid(0), 2, precision);
    conv.pads_before = vec![1, 1];
    conv.pads_after = vec![1, 1];
    let c = g.conv_fprop("conv", conv.clone())?;
    let pre = g.binary("conv bias", BinaryOp::Add, c, b1)?;
    // What is multiplied again is kept in the type that products take.
    let pre = narrow(&mut g, "pre", pre, dtype)?;
    let active = g.unary("relu", UnaryOp::Relu, pre)?;
    let active = narrow(&mut g, "active", active, dtype)?;
    let (pooled, index) = g.max_pool_with_index("pool", PoolWindows::tiles(&[2, 2]), active, DType::I32)?;
    let flat = g.reshape("flatten", pooled, &[BATCH, 128])?;
    let product = g.matmul("linear", flat, w2, precision)?;
    let logits = g.binary("linear bias", BinaryOp::Add, product, b2)?;
    let spec = CrossEntropySpec::new(1, LossReduction::Mean);
    let (loss, lse) = g.cross_entropy_with_lse("loss", spec, logits, labels)?;
    g.store(loss, "loss", DType::F32)?;

    let backward = CrossEntropyBackward { spec, logits, labels, dloss, lse: Some(lse), dlogits: Uid(0) };
    let dlogits = g.cross_entropy_backward("dlogits", backward)?;
    let dlogits = narrow(&mut g, "dlogits narrow", dlogits, dtype)?;
    // What reads a parameter stands before its gradient: the update goes with that, and may then take the parameter's place.
    let w2_t = g.transpose("w2 transposed", w2, &[1, 0])?;
    let dflat = g.matmul("dflat", dlogits, w2_t, precision)?;
    let flat_t = g.transpose("flat transposed", flat, &[1, 0])?;
    let dw2 = g.matmul("dw2", flat_t, dlogits, precision)?;
    let db2 = g.reduction("db2", ReductionOp::Add, dlogits, &[0])?;
    let dpooled = g.reshape("unflatten", dflat, &[BATCH, 8, 4, 4])?;
    let windows = PoolWindows::tiles(&[2, 2]);
    let backward = PoolBackward { mode: PoolMode::Max, windows, dy: dpooled, x: None, index: Some(index), dx: Uid(0) };
    let dactive = g.pool_backward("dactive", backward, &[BATCH, 8, 8, 8])?;
    let dpre = g.binary("dpre", BinaryOp::Backward(UnaryOp::Relu), dactive, pre)?;
    let dpre = narrow(&mut g, "dpre narrow", dpre, dtype)?;
    let dx = g.conv_dgrad("dx", Conv { y: dpre, ..conv.clone() }, &[BATCH, 3, 8, 8])?;
    g.store(dx, "dx", dtype)?;
    let dw1 = g.conv_wgrad("dw1", Conv { y: dpre, ..conv }, &[8, 3, 3, 3])?;
    let db1 = g.reduction("db1", ReductionOp::Add, dpre, &[0, 2, 3])?;

    for (name, parameter, gradient) in [("w1", w1, dw1), ("b1", b1, db1), ("w2", w2, dw2), ("b2", b2, db2)] {
        let down = g.scale(&format!("{name} step"), gradient, HostScalar::Bound(rate))?;
        let next = g.binary(&format!("{name} update"), BinaryOp::Add, parameter, down)?;
        let order: &[usize] = if name == "w1" { &[0, 2, 3, 1] } else { &[0, 1, 2, 3] };
        let dims = g.dims(next).expect("just made");
        let order = if dims.len() == 4 { order.to_vec() } else { (0..dims.len()).collect() };
        g.store_as(next, &format!("{name} next"), dtype, Layout::with_order(&dims, &order).expect("an order"))?;
    }
    g.finish()
}

/// A virtual tensor of that type.
fn narrow(g: &mut GraphBuilder, name: &str, x: Uid, dtype: DType) -> Result<Uid, verdigris_graph::Error> {
    let y = g.unary(name, UnaryOp::Identity, x)?;
    g.set_dtype(y, dtype)?;
    Ok(y)
}
