//! What a plan on the CPU says of wrong bindings, and of memory that is not there.

use verdigris_cpu::{Bindings, GraphPlan};
use verdigris_graph::{Conv, ConvDirection, GraphBuilder, HostScalar, Precision, ReductionOp, Uid, UnaryOp};
use verdigris_tensor::{DType, Layout};

#[test]
fn wrong_bindings_are_told() {
    let mut g = GraphBuilder::new("relu");
    let x = g.tensor("x", DType::F32, Layout::row_major(&[4]).unwrap());
    let hidden = g.unary("neg", UnaryOp::Neg, x).unwrap();
    let factor = g.host_scalar("factor", DType::F32);
    let y = g.scale("scale", hidden, HostScalar::Bound(factor)).unwrap();
    g.store(y, "y", DType::F32).unwrap();
    let plan = GraphPlan::new(&g.finish().unwrap()).unwrap();
    let input = [0u8; 16];
    let mut output = [0xa5u8; 16];
    let told = |build: &dyn Fn(&mut Bindings<'_>)| {
        let mut bindings = Bindings::new();
        build(&mut bindings);
        plan.run(&mut bindings).unwrap_err().to_string()
    };
    let missing = "each tensor that is read or written is bound";
    assert_eq!(told(&|_| {}), format!("`x` is bound to nothing, it needs memory of 16 bytes: {missing}"));
    assert_eq!(
        told(&|b| {
            b.input(x, &[0; 12]);
        }),
        "`x` is bound to 12 bytes, it needs memory of 16 bytes: memory reaches from the first element to the last"
    );
    assert_eq!(
        told(&|b| {
            b.input(x, &[0; 16]);
        }),
        format!("`factor` is bound to nothing, it needs a host scalar of f32: {missing}")
    );
    assert_eq!(
        told(&|b| {
            b.input(x, &[0; 16]).scalar(factor, 1.0).input(y, &[0; 16]);
        }),
        "`y` is bound to memory that is only read, it needs memory that is written: an output is written, an input is only read"
    );
    // What the graph does not have, and what it does not store.
    for stray in [Uid(77), hidden] {
        let mut output = [0; 16];
        let mut bindings = Bindings::new();
        bindings.input(x, &[0; 16]).scalar(factor, 1.0).output(y, &mut output).input(stray, &[]);
        let error = plan.run(&mut bindings).unwrap_err().to_string();
        assert_eq!(error, format!("`{stray}` is bound to something, it needs nothing: the plan has no such tensor to bind"));
    }
    plan.run(Bindings::new().input(x, &input).output(y, &mut output).scalar(factor, 2.0)).unwrap();
    assert_eq!(output, [[0, 0, 0, 0x80u8]; 4].concat()[..]);
}

#[test]
fn memory_that_is_not_there_is_an_error() {
    let lacking = |build: &dyn Fn(&mut GraphBuilder, Uid) -> Result<Uid, verdigris_graph::Error>| {
        let mut g = GraphBuilder::new("large");
        let x = g.tensor("x", DType::F32, Layout::row_major(&[1, 1, 1]).expect("small"));
        let y = build(&mut g, x).expect("fits");
        g.store(y, "y", DType::F32).expect("stores");
        let graph = g.finish().expect("valid");
        let plan = GraphPlan::new(&graph).expect("prepares");
        let (x_bytes, mut y_bytes) = (1.0f32.to_le_bytes(), vec![0; 64]);
        for _ in 0..2 {
            let uid = |name: &str| graph.tensors.iter().find(|tensor| tensor.name == name).expect("named").uid;
            let run = plan.run(Bindings::new().input(uid("x"), &x_bytes).output(uid("y"), &mut y_bytes));
            let Err(verdigris_cpu::Error::OutOfMemory { need_bytes }) = run else { panic!("{run:?}") };
            assert!(need_bytes > 1 << 40, "{need_bytes}");
        }
    };
    // A temporary.
    lacking(&|g, x| {
        let wide = g.broadcast("broadcast", x, &[1, 1, 1 << 46])?;
        g.reduction("sum", ReductionOp::Add, wide, &[2])
    });
    // Images with their padding, within the loops of a convolution.
    for (pad, dims) in [((1 << 31) - 1, 1), (1 << 30, 3)] {
        lacking(&|g, x| {
            let shape: Vec<u64> = std::iter::repeat_n(1, dims + 2).collect();
            let x = g.reshape("image", x, &shape)?;
            let mut channels = shape.clone();
            channels[1] = 1 << 16;
            let wide = g.broadcast("channels", x, &channels)?;
            let mut conv = Conv::new(ConvDirection::Fprop, wide, wide, Uid(0), dims, Precision::Ieee);
            (conv.pads_before, conv.pads_after, conv.strides) = (vec![pad; dims], vec![pad; dims], vec![pad; dims]);
            let y = g.conv_fprop("convolution", conv)?;
            let axes: Vec<u32> = (0..dims as u32 + 2).collect();
            let sum = g.reduction("sum", ReductionOp::Add, y, &axes)?;
            g.reshape("flat", sum, &[1, 1, 1])
        });
    }
}
