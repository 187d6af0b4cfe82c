//! A whole step of training as one graph: every kind of part, temporaries between them, parameters updated in place. On the fake driver it
//! is planned and launched; on the CPU device its numbers are checked.
#![forbid(unsafe_code)]

use verdigris::error::{BindingError, BindingRule};
use verdigris::{Binding, Config, Device, Error, Handle, Policy, Tensor};
use verdigris_cuda::fake;
use verdigris_graph::{
    BinaryOp, Conv, ConvDirection, CrossEntropyBackward, CrossEntropySpec, Graph, GraphBuilder, HostScalar, LossReduction, Op,
    PoolBackward, PoolMode, PoolWindows, Precision, ReductionOp, Uid, UnaryOp,
};
use verdigris_tensor::{DType, Layout};

const BATCH: u64 = 4;

/// Convolution, bias, ReLU, max pooling, linear layer, cross-entropy; back through all of it; a step down the gradient.
fn step(dtype: DType) -> Result<Graph, verdigris_graph::Error> {
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

fn uid(graph: &Graph, name: &str) -> Uid {
    graph.tensors.iter().find(|tensor| tensor.name == name).unwrap_or_else(|| panic!("no {name}")).uid
}

#[test]
fn every_part_of_a_training_step_has_an_engine_and_runs_in_place() {
    for (dtype, deterministic) in [(DType::F32, false), (DType::F16, false), (DType::Bf16, true), (DType::F64, false)] {
        let handle = Handle::on(&fake::context(), &Config::default()).expect("the fake is always there");
        let graph = step(dtype).expect("fits");
        let policy = Policy { deterministic, ..Policy::default() };
        let plan = handle.plan_graph(&graph, &policy).unwrap_or_else(|error| panic!("{dtype}: {error}"));
        assert!(plan.parts().count() >= 8, "{}", plan.explain());
        assert!(!deterministic || plan.parts().all(|part| part.notes().deterministic), "{}", plan.explain());
        assert!(plan.explain().temporaries_bytes > 0);
        let stream = handle.stream();
        let buffers: Vec<_> =
            (plan.tensors().iter()).map(|tensor| (tensor, handle.pool().alloc(stream, tensor.bytes).expect("allocates"))).collect();
        let bind = || -> Vec<(Uid, Binding<'_>)> {
            let bind = |is_scalar: bool, slice| if is_scalar { Binding::Scalar(-0.1) } else { Binding::Buffer(slice) };
            buffers.iter().map(|(tensor, buffer)| (tensor.uid, bind(tensor.is_scalar, buffer.slice()))).collect()
        };
        fake::launch_count();
        plan.execute_from(stream, &bind(), handle.pool()).unwrap_or_else(|error| panic!("{dtype}: {error}"));
        assert!(fake::launch_count() >= plan.parts().count());

        // Parameters in place: the new ones lie where the old ones are.
        let slice = |name: &str| {
            let wanted = uid(&graph, name);
            buffers.iter().find(|(tensor, _)| tensor.uid == wanted).map(|(_, buffer)| Binding::Buffer(buffer.slice())).expect("bound")
        };
        let with = |pairs: &[(&str, &str)]| -> Vec<(Uid, Binding<'_>)> {
            let mut bound = bind();
            for (output, input) in pairs {
                let place = bound.iter().position(|(known, _)| *known == uid(&graph, output)).expect("bound");
                bound[place].1 = slice(input);
            }
            bound
        };
        let in_place = with(&[("w1 next", "w1"), ("b1 next", "b1"), ("w2 next", "w2"), ("b2 next", "b2")]);
        plan.execute_from(stream, &in_place, handle.pool()).unwrap_or_else(|error| panic!("{dtype}: {error}\n{}", plan.explain()));
        // But not just anywhere.
        let refused = plan.execute_from(stream, &with(&[("dx", "x")]), handle.pool());
        assert!(matches!(refused, Err(Error::Binding(BindingError { rule: BindingRule::Overlap, .. }))), "{refused:?}");
    }
}

#[test]
fn a_step_goes_down_the_gradient_on_the_cpu() {
    let device = Device::cpu();
    let graph = step(DType::F32).expect("fits");
    let plan = device.plan(&graph).expect("the CPU takes every graph");
    let mut state = 1_u64;
    let mut tensors: Vec<(Uid, Tensor)> = Vec::new();
    for input in plan.inputs() {
        let values: Vec<f64> = (0..input.layout.elements())
            .map(|i| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let unit = (state >> 33) as f64 / (1_u64 << 31) as f64 - 0.5;
                match input.name.as_str() {
                    "labels" => i as f64,
                    "dloss" => 1.0,
                    _ => unit,
                }
            })
            .collect();
        // Every input is packed, in whatever order: values in the order of memory will do.
        let packed = Tensor::from_values(&device, input.dtype, &[values.len() as u64], &values).expect("fits");
        let bytes = packed.to_bytes().expect("reads");
        tensors.push((input.uid, Tensor::from_bytes(&device, input.dtype, input.layout, &bytes).expect("fits")));
    }
    let rate = [(uid(&graph, "minus the learning rate"), (-0.05).into())];
    let mut losses = Vec::new();
    for _ in 0..20 {
        let inputs: Vec<(Uid, &Tensor)> = tensors.iter().map(|(uid, tensor)| (*uid, tensor)).collect();
        let results = device.run(&plan, &inputs, &rate).expect("runs");
        for (wanted, result) in plan.outputs().zip(results) {
            if wanted.name == "loss" {
                losses.push(result.to_values().expect("reads")[0]);
            }
            if let Some(name) = wanted.name.strip_suffix(" next") {
                let place = tensors.iter().position(|(known, _)| *known == uid(&graph, name)).expect("a parameter");
                tensors[place].1 = result;
            }
        }
    }
    assert!(losses.windows(2).all(|pair| pair[1] < pair[0]), "{losses:?}");
    assert!(losses[19] < 0.5 * losses[0], "{losses:?}");
    assert!(graph.nodes.iter().any(|node| matches!(node.op, Op::Conv(_))));
}
