//! Graphs cut into problems: which ops stand together, what lies in memory between them, and how each problem sees it.

use verdigris_graph::pattern::{Partition, partition};
use verdigris_graph::{
    Access, BinaryOp, ChainStep, EpilogueStep, Error, GraphBuilder, HostScalar, MapProblem, Movement, Op, PoolMode, PoolWindows, Precision,
    Problem, RandomState, Real, ReductionOp, ResponseNorm, ScanOp, TernaryOp, Uid, UnaryOp,
};
use verdigris_tensor::{DType, Layout};

type TestResult = Result<(), Box<dyn std::error::Error>>;

fn rows(dims: &[u64]) -> Layout {
    Layout::row_major(dims).expect("a small layout")
}

fn kinds(partition: &Partition) -> Vec<&'static str> {
    partition.parts.iter().map(|part| part.problem.kind()).collect()
}

fn map(partition: &Partition, part: usize) -> &MapProblem {
    match &partition.parts[part].problem {
        Problem::Map(map) => map,
        other => panic!("a map is expected, not {other:?}"),
    }
}

/// Every part reads only what the caller binds or an earlier part has written, and temporaries are what they should be.
fn check_order(partition: &Partition, inputs: &[Uid]) {
    let mut there: Vec<Uid> = inputs.to_vec();
    for part in &partition.parts {
        for operand in part.problem.buffers().expect("canonical") {
            let uid = part.bindings[operand.slot.0 as usize];
            if operand.access == Access::Written {
                there.push(uid);
            } else {
                assert!(there.contains(&uid), "{uid} is read before it is written");
            }
        }
    }
    for temporary in &partition.temporaries {
        assert!(temporary.is_virtual && there.contains(&temporary.uid) && !inputs.contains(&temporary.uid));
    }
}

#[test]
fn pointwise_ops_that_hang_together_are_one_map_of_one_dim() -> TestResult {
    let mut g = GraphBuilder::new("two outputs");
    // Channels last, in dims [n, c, h, w].
    let nhwc = || Layout::new(&[2, 8, 3, 5], &[120, 1, 40, 8]).expect("a layout");
    let x = g.tensor("x", DType::Bf16, nhwc());
    let z = g.tensor("z", DType::F32, nhwc());
    let a = g.unary("exp", UnaryOp::Exp, x)?;
    let b = g.binary("mul", BinaryOp::Mul, a, z)?;
    let c = g.binary("div", BinaryOp::Div, a, b)?;
    g.store_as(b, "b", DType::F16, nhwc())?;
    g.store_as(c, "c", DType::F32, nhwc())?;
    let partition = partition(&g.finish()?)?;
    assert_eq!(kinds(&partition), ["map"]);
    assert!(partition.temporaries.is_empty());
    assert_eq!(partition.parts[0].bindings, [x, z, b, c]);
    let map = map(&partition, 0);
    assert_eq!(map.dims, [240]);
    // What is stored as f16 is read by the division as f16.
    assert!(map.chain.steps.iter().any(|step| matches!(step, ChainStep::Round { dtype: DType::F16, .. })));
    check_order(&partition, &[x, z]);
    Ok(())
}

#[test]
fn a_value_read_elsewhere_becomes_a_temporary() -> TestResult {
    let mut g = GraphBuilder::new("square of a product");
    let x = g.tensor("x", DType::F32, rows(&[4, 4]));
    let p = g.matmul("mm", x, x, Precision::Ieee)?;
    let y = g.binary("square", BinaryOp::Mul, p, p)?;
    g.store(y, "y", DType::F32)?;
    let partition = partition(&g.finish()?)?;
    assert_eq!(kinds(&partition), ["gemm", "map"]);
    assert_eq!(partition.temporaries.iter().map(|tensor| tensor.uid).collect::<Vec<_>>(), [p]);
    check_order(&partition, &[x]);
    Ok(())
}

/// The functions that are hundreds of instructions long stay maps; all others stand in the epilogue.
#[test]
fn a_function_behind_a_product_is_a_step_of_its_epilogue_unless_it_is_long() -> TestResult {
    let behind = |f: &dyn Fn(&mut GraphBuilder, Uid, Uid) -> Result<Uid, Error>| -> Result<Vec<&'static str>, Error> {
        let mut g = GraphBuilder::new("behind");
        let x = g.tensor("x", DType::Bf16, rows(&[16, 16]));
        let p = g.matmul("p", x, x, Precision::Fp32)?;
        let y = f(&mut g, p, x)?;
        g.store(y, "y", DType::Bf16)?;
        Ok(kinds(&partition(&g.finish()?)?))
    };
    for f in [UnaryOp::Mish, UnaryOp::Erf, UnaryOp::Log, UnaryOp::Elu { alpha: Real(0.5) }, UnaryOp::IsNan] {
        assert_eq!(behind(&|g, p, _| g.unary("f", f, p))?, ["gemm"], "{}", f.name());
    }
    for f in [UnaryOp::Sin, UnaryOp::Cos, UnaryOp::Tan] {
        assert_eq!(behind(&|g, p, _| g.unary("f", f, p))?, ["gemm", "map"], "{}", f.name());
    }
    for f in [BinaryOp::Div, BinaryOp::Ge, BinaryOp::Backward(UnaryOp::Silu)] {
        assert_eq!(behind(&|g, p, z| g.binary("f", f, p, z))?, ["gemm"], "{}", f.name());
        assert_eq!(behind(&|g, p, z| g.binary("f", f, z, p))?, ["gemm"], "{}", f.name());
    }
    for f in [BinaryOp::Mod, BinaryOp::FloorMod, BinaryOp::Pow, BinaryOp::Atan2] {
        assert_eq!(behind(&|g, p, z| g.binary("f", f, p, z))?, ["gemm", "map"], "{}", f.name());
    }
    Ok(())
}

#[test]
fn two_products_added_need_one_temporary() -> TestResult {
    let mut g = GraphBuilder::new("sum of products");
    let x = g.tensor("x", DType::F16, rows(&[8, 16]));
    let w = g.tensor("w", DType::F16, rows(&[16, 16]));
    let p = g.matmul("p", x, w, Precision::Fp32)?;
    let q = g.matmul("q", x, w, Precision::Fp32)?;
    let y = g.binary("sum", BinaryOp::Add, p, q)?;
    g.store(y, "y", DType::F16)?;
    let partition = partition(&g.finish()?)?;
    assert_eq!(kinds(&partition), ["gemm", "gemm"]);
    assert_eq!(partition.temporaries.len(), 1);
    check_order(&partition, &[x, w]);
    Ok(())
}

#[test]
fn a_reduction_takes_what_is_computed_for_it_alone_and_the_chain_behind() -> TestResult {
    let mut g = GraphBuilder::new("root mean square");
    let x = g.tensor("x", DType::Bf16, rows(&[6, 3, 10]));
    let square = g.binary("square", BinaryOp::Mul, x, x)?;
    let mean = g.reduction("mean", ReductionOp::Avg, square, &[0, 2])?;
    let root = g.unary("root", UnaryOp::Sqrt, mean)?;
    g.store(root, "rms", DType::F32)?;
    let partition = partition(&g.finish()?)?;
    assert_eq!(kinds(&partition), ["reduce"]);
    let Problem::Reduce(reduce) = &partition.parts[0].problem else { panic!("a reduction") };
    assert_eq!((&reduce.kept[..], &reduce.reduced[..]), (&[3][..], &[6, 10][..]));
    assert_eq!((reduce.before.functions(), reduce.after.functions()), (1, 1));
    assert_eq!(partition.parts[0].bindings, [x, root]);
    check_order(&partition, &[x]);
    Ok(())
}

#[test]
fn a_normalization_is_cut_where_values_spread_again() -> TestResult {
    let mut g = GraphBuilder::new("softmax by hand");
    let x = g.tensor("x", DType::F32, rows(&[5, 7]));
    let peak = g.reduction("max", ReductionOp::Max, x, &[1])?;
    let shifted = g.binary("shift", BinaryOp::Sub, x, peak)?;
    let power = g.unary("exp", UnaryOp::Exp, shifted)?;
    let sum = g.reduction("sum", ReductionOp::Add, power, &[1])?;
    let y = g.binary("div", BinaryOp::Div, power, sum)?;
    g.store(y, "y", DType::F32)?;
    let partition = partition(&g.finish()?)?;
    assert_eq!(kinds(&partition), ["reduce", "reduce", "map"]);
    assert_eq!(partition.temporaries.iter().map(|tensor| tensor.uid).collect::<Vec<_>>(), [peak, power, sum]);
    check_order(&partition, &[x]);
    Ok(())
}

#[test]
fn parts_never_wait_for_each_other() -> TestResult {
    // a feeds a matmul whose result meets b = f(a): a and b may not be one map with what follows.
    let mut g = GraphBuilder::new("around a product");
    let x = g.tensor("x", DType::F32, rows(&[8, 8]));
    let a = g.unary("a", UnaryOp::Exp, x)?;
    let b = g.unary("b", UnaryOp::Sin, a)?;
    let p = g.matmul("p", a, x, Precision::Ieee)?;
    let c = g.binary("c", BinaryOp::Pow, p, b)?;
    let d = g.ternary("d", TernaryOp::Select, c, a, b)?;
    g.store(d, "d", DType::F32)?;
    let partition = partition(&g.finish()?)?;
    assert_eq!(kinds(&partition), ["map", "gemm", "map"]);
    check_order(&partition, &[x]);
    Ok(())
}

#[test]
fn movements_are_seen_through_where_strides_can_say_them() -> TestResult {
    let mut g = GraphBuilder::new("views");
    let x = g.tensor("x", DType::F32, rows(&[6, 8]));
    let t = g.transpose("turn", x, &[1, 0])?;
    let s = g.slice("part", t, &[1, 0], &[8, 6], &[3, 2])?;
    let r = g.reshape("flat", s, &[3, 3, 1])?;
    let wide = g.broadcast("wide", r, &[3, 3, 4])?;
    let y = g.unary("neg", UnaryOp::Neg, wide)?;
    g.store(y, "y", DType::F32)?;
    let partition = partition(&g.finish()?)?;
    assert_eq!(kinds(&partition), ["map"]);
    let map = map(&partition, 0);
    let (from, _) = map.chain.loads().next().expect("a load");
    assert_eq!((&map.dims[..], from.offset, &from.strides[..]), (&[3, 3, 4][..], 1, &[3, 16, 0][..]));
    assert_eq!(partition.parts[0].bindings, [x, y]);
    Ok(())
}

#[test]
fn copies_pads_and_concatenations_are_maps() -> TestResult {
    let mut g = GraphBuilder::new("copies");
    let x = g.tensor("x", DType::I64, rows(&[2, 3]));
    let z = g.tensor("z", DType::I64, rows(&[2, 5]));
    let both = g.concat("both", &[x, z], 1)?;
    let padded = g.pad("pad", both, &[1, 0], &[0, 2], 7.0)?;
    g.store(padded, "y", DType::I64)?;
    let partition = partition(&g.finish()?)?;
    assert_eq!(kinds(&partition), ["map", "map"]);
    assert_eq!(partition.temporaries.iter().map(|tensor| tensor.uid).collect::<Vec<_>>(), [both]);
    let (_, window) = map(&partition, 1).chain.loads().next().expect("a load");
    assert_eq!(window.map(|window| (&window.first[..], &window.end[..])), Some((&[1, 0][..], &[3, 8][..])));
    let joined = map(&partition, 0);
    let windows: Vec<_> = joined.chain.loads().filter_map(|(_, window)| window.map(|it| (it.first[1], it.end[1], it.over))).collect();
    assert_eq!((&joined.dims[..], &windows[..]), (&[2, 8][..], &[(0, 3, None), (3, 8, Some(0))][..]));
    let text = verdigris_graph::json::problem_to_json(&partition.parts[0].problem);
    assert_eq!(verdigris_graph::json::problem_from_json(&text)?, partition.parts[0].problem);
    check_order(&partition, &[x, z]);
    Ok(())
}

#[test]
fn a_concatenation_is_one_map_of_up_to_eight_inputs_that_lie_as_the_result_does() -> TestResult {
    let mut g = GraphBuilder::new("many");
    let inputs: Vec<Uid> = (0..10).map(|i| g.tensor("x", DType::F16, rows(&[4, 2 + i % 2, 5]))).collect();
    let y = g.concat("y", &inputs, 1)?;
    g.store(y, "y", DType::F16)?;
    let parts = partition(&g.finish()?)?;
    assert_eq!(kinds(&parts), ["map", "map"]);
    // Of the first eight: 20 lines of 5, of which the others begin behind.
    assert_eq!((&map(&parts, 0).dims[..], map(&parts, 0).chain.loads().count()), (&[4, 100][..], 8));
    assert_eq!(map(&parts, 1).chain.stores().next().map(|to| to.offset), Some(100));

    let mut g = GraphBuilder::new("across");
    let turned = || Layout::new(&[4, 3, 5], &[1, 20, 4]).expect("a layout");
    let inputs =
        [g.tensor("x", DType::F16, rows(&[4, 3, 5])), g.tensor("x", DType::F16, turned()), g.tensor("x", DType::F16, rows(&[4, 3, 5]))];
    let y = g.concat("y", &inputs, 1)?;
    g.store(y, "y", DType::F16)?;
    let parts = partition(&g.finish()?)?;
    assert_eq!(kinds(&parts), ["map", "map", "map"]);
    check_order(&parts, &inputs);
    Ok(())
}

#[test]
fn a_reshape_that_no_strides_can_say_goes_by_way_of_a_packed_copy() -> TestResult {
    let mut g = GraphBuilder::new("odd");
    let x = g.tensor("x", DType::F32, Layout::new(&[6, 4], &[10, 1])?);
    let y = g.reshape("fold", x, &[8, 3])?;
    g.store_as(y, "y", DType::F32, Layout::new(&[8, 3], &[1, 9])?)?;
    let partition = partition(&g.finish()?)?;
    assert_eq!(kinds(&partition), ["map", "map"]);
    assert_eq!(partition.temporaries.len(), 1);
    assert_eq!(partition.temporaries[0].layout.dims(), [6, 4]);
    check_order(&partition, &[x]);
    Ok(())
}

#[test]
fn a_matmul_reads_through_a_transpose_and_has_a_slice_copied() -> TestResult {
    let mut g = GraphBuilder::new("views of a product");
    let x = g.tensor("x", DType::F16, rows(&[16, 8]));
    let w = g.tensor("w", DType::F16, rows(&[16, 40]));
    let xt = g.transpose("xt", x, &[1, 0])?;
    let part = g.slice("part", w, &[0, 8], &[16, 24], &[1, 1])?;
    let p = g.matmul("p", xt, part, Precision::Fp32)?;
    g.store(p, "p", DType::F32)?;
    let partition = partition(&g.finish()?)?;
    assert_eq!(kinds(&partition), ["map", "gemm"]);
    assert_eq!(partition.temporaries.iter().map(|tensor| tensor.uid).collect::<Vec<_>>(), [part]);
    assert_eq!(partition.parts[1].bindings, [x, part, p]);
    check_order(&partition, &[x, w]);
    Ok(())
}

#[test]
fn rows_and_windows_stand_alone() -> TestResult {
    let mut g = GraphBuilder::new("head");
    let x = g.tensor("x", DType::F32, Layout::new(&[2, 6, 8, 8], &[384, 1, 48, 6])?);
    let y = g.pool("pool", PoolMode::Max, PoolWindows::tiles(&[2, 2]), x)?;
    let soft = g.softmax("softmax", y, 1, false)?;
    g.store(soft, "y", DType::F32)?;
    let partition = partition(&g.finish()?)?;
    assert_eq!(kinds(&partition), ["pool", "softmax"]);
    assert_eq!(partition.temporaries.len(), 1);
    let Problem::Softmax(rows) = &partition.parts[1].problem else { panic!("softmax") };
    assert_eq!((&rows.rows[..], rows.extent), (&[2, 16][..], 6));
    check_order(&partition, &[x]);
    Ok(())
}

#[test]
fn problems_keep_their_meaning_in_json() -> TestResult {
    let mut g = GraphBuilder::new("all kinds");
    let x = g.tensor("x", DType::F32, rows(&[2, 6, 8, 8]));
    let y = g.pool("pool", PoolMode::Average { count_include_pad: true }, PoolWindows::tiles(&[2, 2]), x)?;
    let soft = g.softmax("softmax", y, 1, true)?;
    let sum = g.reduction("sum", ReductionOp::Norm2, soft, &[1])?;
    let padded = g.pad("pad", sum, &[0, 1, 0, 0], &[0; 4], 0.5)?;
    g.store(padded, "y", DType::F32)?;
    let graph = g.finish()?;
    assert!(graph.nodes.iter().any(|node| matches!(node.op, Op::Movement(Movement::Pad { .. }))));
    for part in partition(&graph)?.parts {
        let text = verdigris_graph::json::problem_to_json(&part.problem);
        assert_eq!(verdigris_graph::json::problem_from_json(&text)?, part.problem);
    }
    Ok(())
}

#[test]
fn unscaling_with_its_overflow_check_is_one_reduction_that_stores_on_the_way() -> TestResult {
    // What training in f16 does to a gradient: divide by the loss scale, and ask whether all of it is finite.
    let mut g = GraphBuilder::new("unscale");
    let gradient = g.tensor("gradient", DType::F16, rows(&[64, 33]));
    let factor = g.host_scalar("1 / scale", DType::F32);
    let unscaled = g.scale("unscale", gradient, verdigris_graph::HostScalar::Bound(factor))?;
    let finite = g.unary("finite", UnaryOp::IsFinite, unscaled)?;
    let all = g.reduction("all", ReductionOp::Min, finite, &[0, 1])?;
    g.store(unscaled, "unscaled", DType::F32)?;
    g.store(all, "all_finite", DType::F32)?;
    let partition = partition(&g.finish()?)?;
    assert_eq!(kinds(&partition), ["reduce"]);
    assert!(partition.temporaries.is_empty());
    assert_eq!(partition.parts[0].bindings, [gradient, factor, unscaled, all]);
    assert_eq!(partition.parts[0].problem.scalars(), [verdigris_graph::Slot(1)]);
    let access: Vec<Access> = partition.parts[0].problem.buffers()?.iter().map(|operand| operand.access).collect();
    assert_eq!(access, [Access::ReadInPlace, Access::Written, Access::Written]);
    let text = verdigris_graph::json::problem_to_json(&partition.parts[0].problem);
    assert_eq!(verdigris_graph::json::problem_from_json(&text)?, partition.parts[0].problem);
    check_order(&partition, &[gradient, factor]);
    Ok(())
}

#[test]
fn a_reduction_stores_nothing_for_those_who_would_compute_it_for_themselves() -> TestResult {
    // Both `a` and `b` come from one load of x; a reduction of `a` reads what that map stores.
    let mut g = GraphBuilder::new("a map of two");
    let x = g.tensor("x", DType::F32, rows(&[9, 40]));
    let a = g.unary("a", UnaryOp::Exp, x)?;
    let b = g.binary("b", BinaryOp::Mul, a, x)?;
    let sum = g.reduction("sum", ReductionOp::Add, a, &[1])?;
    g.store(a, "a", DType::F32)?;
    g.store(b, "b", DType::F32)?;
    g.store(sum, "sum", DType::F32)?;
    let parts = partition(&g.finish()?)?;
    assert_eq!(kinds(&parts), ["map", "reduce"]);

    // A store across the lines that are read would be slower than a map by tiles.
    let mut g = GraphBuilder::new("turned");
    let x = g.tensor("x", DType::F32, Layout::new(&[40, 64], &[1, 40])?);
    let a = g.unary("a", UnaryOp::Exp, x)?;
    let sum = g.reduction("sum", ReductionOp::Add, a, &[1])?;
    g.store_as(a, "a", DType::F32, rows(&[40, 64]))?;
    g.store(sum, "sum", DType::F32)?;
    let parts = partition(&g.finish()?)?;
    assert_eq!(kinds(&parts), ["map", "reduce"]);
    Ok(())
}

#[test]
fn what_a_reduction_stores_is_not_read_by_the_same_launch() -> TestResult {
    // Of extents of 1 nothing is reduced, so that what is stored before could meet the result behind.
    let mut g = GraphBuilder::new("one of each");
    let x = g.tensor("x", DType::F32, rows(&[300, 1]));
    let a = g.unary("a", UnaryOp::Exp, x)?;
    let sum = g.reduction("sum", ReductionOp::Add, a, &[1])?;
    let both = g.binary("both", BinaryOp::Add, sum, a)?;
    g.store(a, "a", DType::F32)?;
    g.store(both, "both", DType::F32)?;
    let parts = partition(&g.finish()?)?;
    assert_eq!(kinds(&parts), ["reduce", "map"]);
    check_order(&parts, &[x]);

    // Nor is it seen turned by what stands before.
    let mut g = GraphBuilder::new("with its transpose");
    let x = g.tensor("x", DType::F32, rows(&[20, 20]));
    let a = g.unary("a", UnaryOp::Exp, x)?;
    let turned = g.transpose("turned", a, &[1, 0])?;
    let product = g.binary("product", BinaryOp::Mul, a, turned)?;
    let sum = g.reduction("sum", ReductionOp::Add, product, &[1])?;
    g.store(a, "a", DType::F32)?;
    g.store(sum, "sum", DType::F32)?;
    let parts = partition(&g.finish()?)?;
    assert_eq!(kinds(&parts), ["map", "reduce"]);
    check_order(&parts, &[x]);
    Ok(())
}

#[test]
fn uids_and_their_order_are_the_callers_and_nothing_is_cut_by_them() -> TestResult {
    let mut g = GraphBuilder::new("layers");
    let mut x = g.tensor("x", DType::F16, rows(&[8, 16]));
    for _ in 0..3 {
        let w = g.tensor("w", DType::F16, rows(&[16, 16]));
        let product = g.matmul("product", x, w, Precision::Fp32)?;
        x = g.unary("relu", UnaryOp::Relu, product)?;
        g.round_to(x, DType::F16)?;
    }
    g.store(x, "y", DType::F16)?;
    let graph = g.finish()?;
    let mut other = graph.clone();
    let renamed = |uid: Uid| Uid(uid.0 * 7919 % 101 - 50);
    other.tensors.iter_mut().for_each(|tensor| tensor.uid = renamed(tensor.uid));
    other.nodes.iter_mut().for_each(|node| node.op.visit_uids(&mut |_, uid| *uid = renamed(*uid)));
    other.tensors.reverse();
    assert!(!other.tensors.is_sorted_by_key(|tensor| tensor.uid));
    for tensor in &other.tensors {
        assert_eq!(other.tensor(tensor.uid), Some(tensor));
    }
    assert_eq!((other.tensor(Uid(1000)), graph.tensor(Uid(1000))), (None, None));
    let (these, those) = (partition(&graph)?, partition(&other)?);
    assert_eq!(kinds(&these), ["gemm", "gemm", "gemm"]);
    for (this, that) in these.parts.iter().zip(&those.parts) {
        assert_eq!(this.problem, that.problem);
        assert!(this.bindings.iter().map(|&uid| renamed(uid)).eq(that.bindings.iter().copied()));
    }
    Ok(())
}

#[test]
fn what_was_fused_and_what_was_not_is_told_with_the_reason() -> TestResult {
    let mut g = GraphBuilder::new("two readers");
    let x = g.tensor("x", DType::F32, rows(&[4, 4]));
    let p = g.matmul("product", x, x, Precision::Ieee)?;
    let r = g.unary("relu", UnaryOp::Relu, p)?;
    let s = g.unary("sin", UnaryOp::Sin, r)?;
    let y = g.binary("sum", BinaryOp::Add, r, s)?;
    g.store(y, "y", DType::F32)?;
    let graph = g.finish()?;
    let (partition, account) = verdigris_graph::pattern::partition_with_account(&graph)?;
    assert_eq!((kinds(&partition), &account.parts[..]), (vec!["gemm", "map"], &[vec![0, 1], vec![2, 3]][..]));
    let text = account.describe(&graph);
    assert!(text.contains("gemm.epilogue: 1 `relu` stands with 0 `product`"), "{text}");
    assert!(text.contains("gemm.epilogue: 2 `sin` and 0 `product` stand together only if one op alone reads the value"), "{text}");
    assert!(text.contains("map.chain: 3 `sum` stands with 2 `sin`"), "{text}");
    Ok(())
}

/// A sum of integers beyond 2^24 is no f32: what an epilogue stores on its way to a factor would be rounded. One that is not stored is read as an f32 anyway.
#[test]
fn no_step_stands_behind_an_integer_sum_that_is_stored() -> TestResult {
    for (is_stored, wanted) in [(true, vec!["gemm", "map"]), (false, vec!["gemm"])] {
        let mut g = GraphBuilder::new("dequantize");
        let [a, b] = ["a", "b"].map(|name| g.tensor(name, DType::I8, rows(&[4, 4])));
        let sum = g.matmul("product", a, b, Precision::I32)?;
        if is_stored {
            g.store(sum, "sum", DType::I32)?;
        }
        let y = g.scale("scaled", sum, HostScalar::Fixed(Real(0.01)))?;
        g.store(y, "y", DType::F32)?;
        let graph = g.finish()?;
        let (partition, account) = verdigris_graph::pattern::partition_with_account(&graph)?;
        assert_eq!(kinds(&partition), wanted);
        assert_eq!(account.describe(&graph).contains("a sum of integers is stored exactly"), is_stored);
    }
    Ok(())
}

/// Dropout between its neighbours is no launch of its own, and counts elements of the result row-major however that lies.
#[test]
fn dropout_stands_in_the_map_of_its_neighbours() -> TestResult {
    let mut g = GraphBuilder::new("bias, gelu, dropout, add");
    let nhwc = || Layout::new(&[2, 8, 3, 5], &[120, 1, 40, 8]).expect("a layout");
    let (x, residual) = (g.tensor("x", DType::Bf16, nhwc()), g.tensor("residual", DType::Bf16, nhwc()));
    let bias = g.tensor("bias", DType::Bf16, rows(&[1, 8, 1, 1]));
    let state = g.tensor("state", DType::I32, rows(&[4]));
    let biased = g.binary("bias", BinaryOp::Add, x, bias)?;
    let active = g.unary("gelu", UnaryOp::GeluErf, biased)?;
    let dropped = g.dropout("dropout", active, state, 0.1)?;
    let y = g.binary("add", BinaryOp::Add, dropped, residual)?;
    g.store_as(y, "y", DType::Bf16, nhwc())?;
    let partition = partition(&g.finish()?)?;
    assert_eq!(kinds(&partition), ["map"]);
    check_order(&partition, &[x, residual, bias, state]);
    let map = map(&partition, 0);
    let strides = map.chain.steps.iter().find_map(|step| if let ChainStep::Random { strides, .. } = step { Some(strides) } else { None });
    assert_eq!((&map.dims[..], &strides.expect("random")[..]), (&[2, 15, 8][..], &[120, 1, 15][..]));
    let problem = &partition.parts[0].problem;
    assert_eq!(problem.to_string().parse::<Problem>()?, *problem, "{problem}");
    Ok(())
}

/// Behind a product dropout is a step of its epilogue, forward and backward; where others read the mask it is cut off, and the account says why.
#[test]
fn dropout_behind_a_product_is_drawn_in_its_epilogue() -> TestResult {
    for by_value in [false, true] {
        let mut g = GraphBuilder::new("product, bias, gelu, dropout, add");
        let (a, b) = (g.tensor("a", DType::Bf16, rows(&[2, 64, 32])), g.tensor("b", DType::Bf16, rows(&[2, 32, 48])));
        let (bias, residual) = (g.tensor("bias", DType::Bf16, rows(&[48])), g.tensor("residual", DType::Bf16, rows(&[2, 64, 48])));
        let state = match by_value {
            true => RandomState::by_value(g.host_scalar("seed", DType::I64), g.host_scalar("offset", DType::I64)),
            false => g.tensor("state", DType::I32, rows(&[4])).into(),
        };
        let product = g.matmul("product", a, b, Precision::Fp32)?;
        let biased = g.binary("bias", BinaryOp::Add, product, bias)?;
        let active = g.unary("gelu", UnaryOp::GeluErf, biased)?;
        let dropped = g.dropout("dropout", active, state, 0.1)?;
        let y = g.binary("add", BinaryOp::Add, dropped, residual)?;
        g.store(y, "y", DType::Bf16)?;
        let partition = partition(&g.finish()?)?;
        assert_eq!(kinds(&partition), ["gemm"]);
        let Problem::Gemm(gemm) = &partition.parts[0].problem else { unreachable!("a product") };
        let number = gemm.epilogue.iter().find_map(|step| match step {
            EpilogueStep::Random { number, through, .. } => Some((number, through.len())),
            _ => None,
        });
        let (number, through) = number.expect("drawn");
        assert_eq!((number.row_stride, number.column_stride, &number.batch_strides[..], through), (48, 1, &[64 * 48][..], 3));
        let problem = &partition.parts[0].problem;
        assert_eq!(problem.to_string().parse::<Problem>()?, *problem, "{problem}");
    }

    // The gradient of an activation in front of dropout, behind the product that gives dropout's gradient.
    let mut g = GraphBuilder::new("backward");
    let (dy, w) = (g.tensor("dy", DType::Bf16, rows(&[64, 32])), g.tensor("w", DType::Bf16, rows(&[32, 48])));
    let (hidden, state) = (g.tensor("hidden", DType::Bf16, rows(&[64, 48])), g.tensor("state", DType::I32, rows(&[4])));
    let product = g.matmul("product", dy, w, Precision::Fp32)?;
    let dropped = g.dropout("dropout", product, state, 0.1)?;
    let dx = g.binary("gelu", BinaryOp::Backward(UnaryOp::GeluErf), dropped, hidden)?;
    g.store(dx, "dx", DType::Bf16)?;
    assert_eq!(kinds(&partition(&g.finish()?)?), ["gemm"]);

    // Of many elements, by a launch of its own.
    for (extent, parts) in [(512, &["gemm"][..]), (513, &["gemm", "map"])] {
        let mut g = GraphBuilder::new("many");
        let (a, b) = (g.tensor("a", DType::Bf16, rows(&[extent, 32])), g.tensor("b", DType::Bf16, rows(&[32, 512])));
        let state = g.tensor("state", DType::I32, rows(&[4]));
        let product = g.matmul("product", a, b, Precision::Fp32)?;
        let y = g.dropout("dropout", product, state, 0.1)?;
        g.store(y, "y", DType::Bf16)?;
        let (partition, account) = verdigris_graph::pattern::partition_with_account(&g.finish()?)?;
        assert_eq!(kinds(&partition), parts, "{extent}");
        let is_told = account.decisions.iter().any(|decision| decision.refused.is_some_and(|rule| rule.contains("262,144 random numbers")));
        assert_eq!(is_told, parts.len() > 1, "{extent}");
    }

    let mut g = GraphBuilder::new("mask of two");
    let (a, b) = (g.tensor("a", DType::Bf16, rows(&[64, 32])), g.tensor("b", DType::Bf16, rows(&[32, 48])));
    let state = g.tensor("state", DType::I32, rows(&[4]));
    let product = g.matmul("product", a, b, Precision::Fp32)?;
    let keep = g.bernoulli("keep", &[64, 48], state, 0.5)?;
    let y = g.binary("kept", BinaryOp::Mul, product, keep)?;
    g.store(y, "y", DType::Bf16)?;
    g.store(keep, "mask", DType::Bf16)?;
    let (partition, account) = verdigris_graph::pattern::partition_with_account(&g.finish()?)?;
    assert_eq!(kinds(&partition), ["gemm", "map"]);
    assert!(account.decisions.iter().any(|decision| decision.refused.is_some_and(|rule| rule.contains("drawn in f32 for it alone"))));
    Ok(())
}

#[test]
fn a_random_state_is_four_words_that_no_op_writes() -> TestResult {
    let refused = |dtype, dims: &[u64], rule: &str| {
        let mut g = GraphBuilder::new("random");
        let state = g.tensor("state", dtype, rows(dims));
        let y = g.random_uniform("random", &[8], state).expect("small");
        g.store(y, "y", DType::F32).expect("stores");
        let error = g.finish().expect_err(rule).to_string();
        assert!(error.contains(rule), "{error}");
    };
    refused(DType::I64, &[4], "i32");
    refused(DType::I32, &[2], "four numbers");
    let mut g = GraphBuilder::new("random");
    let first = g.tensor("first", DType::I32, rows(&[4]));
    let state = g.unary("state", UnaryOp::Identity, first)?;
    g.store(state, "state", DType::I32)?;
    let y = g.random_uniform("random", &[8], state)?;
    g.store(y, "y", DType::F32)?;
    assert!(g.finish().expect_err("made").to_string().contains("not written by an op"));
    // By value: two host scalars of i64, and no other.
    for (dtype, is_memory) in [(DType::I32, false), (DType::F64, false), (DType::I64, true)] {
        let mut g = GraphBuilder::new("by value");
        let seed = g.host_scalar("seed", DType::I64);
        let offset = if is_memory { g.tensor("offset", dtype, rows(&[1])) } else { g.host_scalar("offset", dtype) };
        let y = g.random_normal("normal", &[8], RandomState::by_value(seed, offset))?;
        g.store(y, "y", DType::F32)?;
        let error = g.finish().expect_err("no such state").to_string();
        assert!(error.contains(if is_memory { "two host scalars" } else { "of i64" }), "{error}");
    }
    let mut g = GraphBuilder::new("by value");
    let [seed, offset] = ["seed", "offset"].map(|name| g.host_scalar(name, DType::I64));
    let y = g.random_normal("normal", &[8], RandomState::by_value(seed, offset))?;
    g.store(y, "y", DType::F32)?;
    let graph = g.finish()?;
    let partition = partition(&graph)?;
    let problem = &partition.parts[0].problem;
    assert_eq!(problem.to_string().parse::<Problem>()?, *problem, "{problem}");
    let scalars: Vec<Uid> = problem.scalars().into_iter().map(|slot| partition.parts[0].bindings[slot.0 as usize]).collect();
    assert_eq!(scalars, [seed, seed, offset, offset]);
    let mut g = GraphBuilder::new("dropout");
    let (x, state) = (g.tensor("x", DType::F32, rows(&[8])), g.tensor("state", DType::I32, rows(&[4])));
    for p in [-0.1, 1.5, f64::NAN] {
        assert!(matches!(g.dropout("dropout", x, state, p), Err(Error::Attribute { attribute: "p", .. })), "{p}");
    }
    Ok(())
}

/// Reshapes around a transpose are one copy, whichever way channels lie in what is read and in what is written.
#[test]
fn shuffles_are_one_copy_in_either_format() -> TestResult {
    let last = |dims: &[u64]| Layout::with_order(dims, &[0, 2, 3, 1]).expect("a small layout");
    for channels_last in [false, true] {
        let lay = |dims: &[u64]| if channels_last { last(dims) } else { rows(dims) };
        for which in 0..3 {
            let mut g = GraphBuilder::new("shuffle");
            let x = g.tensor("x", DType::Bf16, lay(&[2, 12, 6, 4]));
            let y = match which {
                0 => g.pixel_shuffle("shuffle", x, 2)?,
                1 => g.pixel_unshuffle("shuffle", x, 2)?,
                _ => g.channel_shuffle("shuffle", x, 3)?,
            };
            let dims = g.dims(y).expect("known");
            g.store_as(y, "y", DType::Bf16, lay(&dims))?;
            let partition = partition(&g.finish()?)?;
            assert_eq!(kinds(&partition), ["map"]);
            assert_eq!(map(&partition, 0).chain.steps.len(), 2, "a load and a store");
        }
    }
    let mut g = GraphBuilder::new("shuffle");
    let x = g.tensor("x", DType::Bf16, rows(&[2, 12, 6, 5]));
    for refused in [g.pixel_shuffle("s", x, 5), g.pixel_shuffle("s", x, 0), g.pixel_unshuffle("s", x, 2), g.channel_shuffle("s", x, 5)] {
        assert!(matches!(refused, Err(Error::Attribute { .. })), "{refused:?}");
    }
    Ok(())
}

/// A window of channels is so many loads of one map.
#[test]
fn a_response_norm_is_one_map() -> TestResult {
    let norm = ResponseNorm { size: 5, alpha: Real(1e-4), beta: Real(0.75), k: Real(1.0) };
    let mut g = GraphBuilder::new("lrn");
    let x = g.tensor("x", DType::Bf16, rows(&[2, 8, 6, 4]));
    let y = g.local_response_norm("lrn", x, norm)?;
    g.store(y, "y", DType::Bf16)?;
    let partition = partition(&g.finish()?)?;
    assert_eq!(kinds(&partition), ["map"]);
    let loads = map(&partition, 0).chain.steps.iter().filter(|step| matches!(step, ChainStep::Load { .. })).count();
    assert_eq!(loads, 5);
    let mut g = GraphBuilder::new("lrn");
    let x = g.tensor("x", DType::Bf16, rows(&[2, 8, 6, 4]));
    for wrong in [ResponseNorm { size: 0, ..norm }, ResponseNorm { size: 65, ..norm }, ResponseNorm { beta: Real(f64::NAN), ..norm }] {
        assert!(matches!(g.local_response_norm("lrn", x, wrong), Err(Error::Attribute { .. })), "{wrong:?}");
    }
    Ok(())
}

/// Two scans with a map between them; places of long axes are counted in f64.
#[test]
fn running_extrema_with_places_are_two_scans() -> TestResult {
    for (extent, counted) in [(9, DType::F32), ((1 << 24) + 1, DType::F64)] {
        let mut g = GraphBuilder::new("cummax");
        let x = g.tensor("x", DType::Bf16, rows(&[1, extent]));
        let (y, place) = g.scan_with_place("cummax", ScanOp::Max, x, 1)?;
        assert_eq!(g.described(place).map(|tensor| tensor.dtype), Some(counted));
        g.store(y, "y", DType::Bf16)?;
        g.store(place, "place", DType::I64)?;
        assert_eq!(kinds(&partition(&g.finish()?)?), ["scan", "map", "scan"]);
    }
    let mut g = GraphBuilder::new("cummax");
    let x = g.tensor("x", DType::Bf16, rows(&[4, 9]));
    assert!(matches!(g.scan_with_place("sum", ScanOp::Add, x, 1), Err(Error::Attribute { attribute: "f", .. })));
    assert!(matches!(g.scan_with_place("max", ScanOp::Max, x, 2), Err(Error::Attribute { attribute: "axis", .. })));
    Ok(())
}
