//! Graphs, their validation, the problems cut from them, and keys.
#![forbid(unsafe_code)]

use verdigris_graph::pattern::{Subgraph, partition, problems};
use verdigris_graph::validate::validate;
use verdigris_graph::{
    BatchNorm, BinaryOp, Determinism, EpilogueStep, Error, GemmProblem, Graph, GraphBuilder, HostScalar, Key, Matmul, Matrix, Node, Op,
    OperandScale, Order, Pointwise, Precision, Problem, Real, Scale, Slot, TensorDesc, Uid, UnaryOp, json,
};
use verdigris_tensor::{DType, Layout};

type TestResult = Result<(), Box<dyn std::error::Error>>;

fn rows(dims: &[u64]) -> Layout {
    Layout::row_major(dims).unwrap()
}

fn gemm(subgraph: &Subgraph) -> &GemmProblem {
    let Problem::Gemm(gemm) = &subgraph.problem else { panic!("{} is no gemm", subgraph.problem.kind()) };
    gemm
}

/// `y = relu(x · wᵀ + bias) + residual`, with the pre-activation stored.
fn layer(uid_shift: i64, names: &str) -> Result<Graph, Error> {
    let mut g = GraphBuilder::new("layer");
    let x = g.tensor(&format!("{names}x"), DType::Bf16, rows(&[32, 64]));
    let w = g.tensor("w", DType::Bf16, Layout::with_order(&[64, 48], &[1, 0]).unwrap());
    let bias = g.tensor("bias", DType::F32, rows(&[48]));
    let residual = g.tensor("residual", DType::Bf16, rows(&[32, 48]));
    let product = g.matmul("fc", x, w, Precision::Fp32)?;
    let sum = g.binary("bias", BinaryOp::Add, bias, product)?;
    let active = g.unary("relu", UnaryOp::Relu, sum)?;
    let y = g.binary("residual", BinaryOp::Sub, residual, active)?;
    g.store(sum, "pre", DType::Bf16)?;
    g.store(y, "y", DType::Bf16)?;
    let text = json::graph_to_json(&g.finish()?);
    let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
    shift_uids(&mut value, uid_shift);
    json::graph_from_json(&value.to_string())
}

fn shift_uids(value: &mut serde_json::Value, by: i64) {
    match value {
        serde_json::Value::Object(map) => {
            for (key, entry) in map {
                match entry.as_i64() {
                    Some(uid) if ["uid", "a", "b", "c", "d", "x", "y", "z"].contains(&key.as_str()) => {
                        *entry = (uid + by).into();
                    }
                    _ => shift_uids(entry, by),
                }
            }
        }
        serde_json::Value::Array(list) => list.iter_mut().for_each(|entry| shift_uids(entry, by)),
        _ => {}
    }
}

#[test]
fn a_layer_becomes_one_problem() -> TestResult {
    let subgraphs = problems(&layer(0, "")?)?;
    assert_eq!(subgraphs.len(), 1);
    let gemm = gemm(&subgraphs[0]);
    assert_eq!((gemm.m, gemm.n, gemm.k, gemm.batch.len()), (32, 48, 64, 0));
    assert_eq!(gemm.layout_letters(), "nt");
    let [bias, round, store, relu, residual] = &gemm.epilogue[..] else { panic!("{:?}", gemm.epilogue) };
    assert!(matches!(bias, EpilogueStep::Binary { f: BinaryOp::Add, operand, v_is_right: false } if operand.is_per_column()));
    assert_eq!(*round, EpilogueStep::Round { dtype: DType::Bf16 });
    assert!(matches!(store, EpilogueStep::Store { target } if target.order() == Order::RowMajor));
    assert_eq!(*relu, EpilogueStep::Unary(UnaryOp::Relu));
    assert!(matches!(residual, EpilogueStep::Binary { f: BinaryOp::Sub, v_is_right: true, .. }));
    // Slots in order: x, w, bias, pre, residual, y.
    assert_eq!(subgraphs[0].bindings, [1, 2, 3, 6, 4, 8].map(Uid));
    assert_eq!(gemm.d.slot, Slot(5));
    assert_eq!(gemm.outputs().len(), 2);
    Ok(())
}

#[test]
fn keys_see_the_problem_and_not_its_names() -> TestResult {
    let key = |graph: &Graph| Key::of(&problems(graph).unwrap()[0].problem);
    let one = layer(0, "")?;
    let other = layer(1000, "other ")?;
    assert_ne!(one, other);
    assert_eq!(key(&one), key(&other));
    let mut changed = one.clone();
    changed.determinism = Determinism::Repeatable;
    assert_ne!(key(&one), key(&changed));
    let mut changed = one;
    changed.tensors[0].layout = Layout::new(&[32, 64], &[72, 1])?;
    assert_ne!(key(&changed), key(&other));
    // A stored key must keep its meaning: this one changes only together with the version tag.
    let plain = Problem::Gemm(GemmProblem::packed(3, 4, 5, DType::Bf16, DType::F32)?);
    assert_eq!(Key::of(&plain).to_string(), "209799a1dc5caaf957aad38f2c8da7c0");
    Ok(())
}

#[test]
fn json_round_trips() -> TestResult {
    let graph = layer(7, "")?;
    assert_eq!(json::graph_from_json(&json::graph_to_json(&graph))?, graph);
    let problem = problems(&graph)?.remove(0).problem;
    assert_eq!(json::problem_from_json(&json::problem_to_json(&problem))?, problem);
    assert!(matches!(json::graph_from_json("{\n  \"name\": 3}"), Err(Error::Json { line: 2, .. })));
    Ok(())
}

#[test]
fn batches_broadcast_and_merge() -> TestResult {
    let mut g = GraphBuilder::new("attention");
    let q = g.tensor("q", DType::F16, rows(&[2, 3, 1, 8, 16]));
    let k = g.tensor("k", DType::F16, rows(&[1, 16, 8]));
    let s = g.matmul("qk", q, k, Precision::Fp32)?;
    g.store(s, "s", DType::F16)?;
    let subgraphs = problems(&g.finish()?)?;
    let gemm = gemm(&subgraphs[0]);
    assert_eq!(gemm.batch, [6]);
    assert_eq!(gemm.a.batch_strides, [128]);
    assert_eq!(gemm.b.batch_strides, [0]);
    assert_eq!(gemm.d.batch_strides, [64]);
    assert_eq!(gemm.batch_count(), 6);

    // Grouped queries: K broadcast over the inner batch dim only, so nothing merges.
    let mut g = GraphBuilder::new("grouped");
    let q = g.tensor("q", DType::F16, rows(&[2, 3, 8, 16]));
    let k = g.tensor("k", DType::F16, rows(&[2, 1, 16, 8]));
    let s = g.matmul("qk", q, k, Precision::Fp32)?;
    g.store(s, "s", DType::F16)?;
    let subgraphs = problems(&g.finish()?)?;
    assert_eq!(self::gemm(&subgraphs[0]).batch, [2, 3]);
    assert_eq!(self::gemm(&subgraphs[0]).b.batch_strides, [128, 0]);
    Ok(())
}

#[test]
fn two_layers_become_two_problems_in_order() -> TestResult {
    let mut g = GraphBuilder::new("mlp");
    let x = g.tensor("x", DType::F16, rows(&[8, 16]));
    let w1 = g.tensor("w1", DType::F16, rows(&[16, 32]));
    let w2 = g.tensor("w2", DType::F16, rows(&[32, 16]));
    let h = g.matmul("up", x, w1, Precision::Fp32)?;
    let h = g.unary("gelu", UnaryOp::GeluErf, h)?;
    g.store(h, "h", DType::F16)?;
    let y = g.matmul("down", h, w2, Precision::Fp32)?;
    let y = g.binary("residual", BinaryOp::Add, y, x)?;
    g.store(y, "y", DType::F16)?;
    let subgraphs = problems(&g.finish()?)?;
    assert_eq!(subgraphs.len(), 2);
    assert_eq!(subgraphs[0].bindings.last(), Some(&h));
    assert_eq!(subgraphs[1].bindings.first(), Some(&h));
    Ok(())
}

#[test]
fn one_op_belongs_to_one_problem() -> TestResult {
    // Both products are stored and then added: the addition goes with the first, and reads the second.
    let mut g = GraphBuilder::new("sum of products");
    let x = g.tensor("x", DType::F16, rows(&[8, 16]));
    let w1 = g.tensor("w1", DType::F16, rows(&[16, 16]));
    let w2 = g.tensor("w2", DType::F16, rows(&[16, 16]));
    let p = g.matmul("p", x, w1, Precision::Fp32)?;
    let q = g.matmul("q", x, w2, Precision::Fp32)?;
    g.store(p, "p", DType::F16)?;
    g.store(q, "q", DType::F16)?;
    let y = g.binary("sum", BinaryOp::Add, p, q)?;
    g.store(y, "y", DType::F16)?;
    let subgraphs = problems(&g.finish()?)?;
    let last: Vec<Option<&Uid>> = subgraphs.iter().map(|s| s.bindings.last()).collect();
    assert_eq!(last, [Some(&q), Some(&y)]);
    Ok(())
}

#[test]
fn host_scalars_are_real_numbers_or_integers() -> TestResult {
    let build = |dtype| {
        let mut g = GraphBuilder::new("scaled");
        let x = g.tensor("x", DType::F16, rows(&[8]));
        let factor = g.host_scalar("factor", dtype);
        let y = g.scale("scale", x, HostScalar::Bound(factor))?;
        g.store(y, "y", DType::F16)?;
        g.finish()
    };
    let real = build(DType::F32)?;
    for dtype in DType::ALL {
        let made = build(dtype);
        if !dtype.is_integer() && !matches!(dtype, DType::F32 | DType::F64) {
            let words =
                if dtype.is_float() && dtype.is_storage() { "a host scalar is f32, f64 or an integer" } else { "of a storage type" };
            assert!(rule(made).contains(words), "{dtype}");
            continue;
        }
        let graph = made?;
        assert_eq!(json::graph_from_json(&json::graph_to_json(&graph))?, graph);
        assert_eq!(Key::of_graph(&graph)? == Key::of_graph(&real)?, dtype == DType::F32, "{dtype}");
        // A factor is one to the kernels, whatever its type.
        assert_eq!(problems(&graph)?[0].problem, problems(&real)?[0].problem);
    }
    Ok(())
}

#[test]
fn scales_and_scalars() -> TestResult {
    let mut g = GraphBuilder::new("fp8");
    let a = g.tensor("a", DType::E4m3, rows(&[100, 300]));
    let b = g.tensor("b", DType::E5m2, Layout::with_order(&[300, 200], &[1, 0])?);
    let c = g.tensor("c", DType::Bf16, rows(&[100, 200]));
    let sa = g.tensor("sa", DType::F32, rows(&[100, 3]));
    let sb = g.tensor("sb", DType::F32, rows(&[2, 3]));
    let beta = g.host_scalar("beta", DType::F32);
    let d = g.matmul_with(
        "mm",
        Matmul {
            c: Some(c),
            alpha: HostScalar::Fixed(Real(0.5)),
            beta: HostScalar::Bound(beta),
            scale_a: Some(OperandScale { tensor: sa, block: Some([1, 128]) }),
            scale_b: Some(OperandScale { tensor: sb, block: Some([128, 128]) }),
            ..Matmul::new(a, b, Uid(0), Precision::Fp8Promoted)
        },
    )?;
    g.store(d, "d", DType::Bf16)?;
    let subgraphs = problems(&g.finish()?)?;
    let gemm = gemm(&subgraphs[0]);
    assert!(matches!(&gemm.scale_b, Some(Scale::Block { outer: 128, k: 128, factors }) if factors.row_stride == 3));
    assert_eq!(gemm.beta, HostScalar::Bound(Slot(5)));
    assert_eq!(subgraphs[0].bindings[5], beta);
    Ok(())
}

#[test]
fn canonical_form_drops_what_does_nothing() -> TestResult {
    let plain = GemmProblem::packed(4, 6, 8, DType::F16, DType::F16)?;
    let mut noisy = plain.clone();
    noisy.c = Some(Matrix::row_major(Slot(9), DType::F16, 6));
    noisy.epilogue = vec![
        EpilogueStep::Unary(UnaryOp::Identity),
        EpilogueStep::Scale { factor: HostScalar::ONE },
        EpilogueStep::Round { dtype: DType::F32 },
        EpilogueStep::Round { dtype: DType::F16 },
    ];
    noisy.batch = vec![1, 1];
    for matrix in [&mut noisy.a, &mut noisy.b, &mut noisy.d] {
        matrix.batch_strides = vec![77, 3];
    }
    noisy.c.as_mut().unwrap().batch_strides = vec![0, 0];
    assert_eq!(noisy.canonical()?, plain);
    // One row: its stride decides nothing.
    let mut row = GemmProblem::packed(1, 6, 8, DType::F16, DType::F16)?;
    let want = row.clone();
    row.a.row_stride = 999;
    assert_eq!(row.canonical()?, want);
    Ok(())
}

fn rule(result: Result<impl std::fmt::Debug, Error>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn faults_name_the_op_the_tensor_and_the_numbers() -> TestResult {
    let mut g = GraphBuilder::new("g");
    let a = g.tensor("a", DType::F16, rows(&[8, 16]));
    let b = g.tensor("b", DType::F16, rows(&[17, 16]));
    let text = rule(g.matmul("mm", a, b, Precision::Fp32));
    assert_eq!(
        text,
        "op `mm`, tensor `b`: k (its last dim but one) is 17, expected 16; the last dim of A and the last but one of B are the same k"
    );

    let mut g = GraphBuilder::new("g");
    let a = g.tensor("a", DType::F16, rows(&[2, 8, 16]));
    let b = g.tensor("b", DType::F16, rows(&[3, 16, 16]));
    assert!(rule(g.matmul("mm", a, b, Precision::Fp32)).contains("dim 0 is 3, expected 2"));

    let build = |change: &dyn Fn(&mut Graph)| -> Result<Vec<Subgraph>, Error> {
        let mut graph = layer(0, "")?;
        change(&mut graph);
        problems(&graph)
    };
    assert!(build(&|_| {}).is_ok());
    assert!(rule(build(&|g| g.tensors[0].dtype = DType::F32)).contains("A and B share one type"));
    assert!(rule(build(&|g| g.tensors[0].dtype = DType::Tf32)).contains("tensor `x`: element type tf32"));
    assert!(rule(build(&|g| g.tensors[1].uid = Uid(1))).contains("a uid names one tensor"));
    assert!(rule(build(&|g| g.nodes.swap(0, 1))).contains("written before it is read"));
    assert!(rule(build(&|g| g.tensors[0].by_value = true)).contains("one element"));
    assert!(
        rule(build(&|g| {
            g.tensors.pop();
        }))
        .contains("tensor #8")
    );
    assert!(rule(build(&|g| g.tensors[7].layout = Layout::new(&[32, 48], &[0, 1]).unwrap())).contains("one place"));
    assert!(rule(build(&|g| g.tensors[7].layout = rows(&[32, 49]))).contains("dim 1 is 49, expected 48"));
    assert!(rule(build(&|g| g.tensors[7].is_virtual = true)).contains("virtual tensor is written by one op and read"));
    assert!(
        rule(build(&|g| g.tensors.push(TensorDesc { is_virtual: true, ..TensorDesc::new(Uid(99), "lost", DType::F32, rows(&[1])) })))
            .contains("`lost`")
    );
    Ok(())
}

#[test]
fn problems_without_a_place_for_temporaries_are_refused() -> TestResult {
    let mut g = GraphBuilder::new("read twice");
    let x = g.tensor("x", DType::F32, rows(&[4, 4]));
    let p = g.matmul("mm", x, x, Precision::Ieee)?;
    let y = g.binary("square", BinaryOp::Mul, p, p)?;
    g.store(y, "y", DType::F32)?;
    assert!(matches!(problems(&g.finish()?), Err(Error::Unsupported { op, .. }) if op == "mm"));
    Ok(())
}

#[test]
fn problems_built_by_hand_are_checked() -> TestResult {
    let plain = GemmProblem::packed(4, 6, 8, DType::F16, DType::F16)?;
    let check = |change: &dyn Fn(&mut GemmProblem)| {
        let mut problem = plain.clone();
        change(&mut problem);
        problem.canonical()
    };
    assert!(rule(check(&|p| p.precision = Precision::I32)).contains("i8 and u8"));
    assert!(rule(check(&|p| p.d.row_stride = 5)).contains("one place"));
    assert!(rule(check(&|p| p.d.slot = Slot(0))).contains("share its buffer only with C"));
    assert!(rule(check(&|p| p.batch = vec![3])).contains("is 0, expected 1"));
    assert!(rule(check(&|p| p.alpha = HostScalar::Fixed(Real(f64::NAN)))).contains("finite"));
    assert!(rule(check(&|p| p.scale_a = Some(Scale::Tensor { slot: Slot(5) }))).contains("fp8 operands"));
    assert!(rule(check(&|p| p.a.row_stride = u64::MAX)).contains("2^63"));
    assert!(
        rule(check(&|p| p.epilogue.push(EpilogueStep::Unary(UnaryOp::Clamp { lower: Real(1.0), upper: Real(0.0) }))))
            .contains("not below the lower")
    );
    // In place: D is C.
    let in_place = check(&|p| {
        p.c = Some(p.d.clone());
        p.beta = HostScalar::ONE;
    })?;
    assert_eq!(in_place.c.as_ref(), Some(&in_place.d));
    assert!(GemmProblem::packed(4, 6, 8, DType::Bool, DType::F16).is_err());
    Ok(())
}

#[test]
fn graphs_stand_beside_each_other_whatever_their_uids_are() {
    let graph = |uids: [i64; 2]| {
        let tensor = |uid, name: &str| TensorDesc::new(Uid(uid), name, DType::F32, rows(&[8]));
        let [x, y] = uids.map(Uid);
        let op = Op::Pointwise(Pointwise::Unary { f: UnaryOp::Exp, x, y });
        let nodes = vec![Node { name: "exp".to_owned(), op }];
        let tensors = vec![tensor(uids[0], "x"), tensor(uids[1], "y")];
        Graph { name: "exp".to_owned(), tensors, nodes, determinism: Determinism::default() }
    };
    for uids in [[0, 1], [1, i64::MAX], [i64::MAX, 0], [i64::MAX - 1, 5], [i64::MIN, -1]] {
        let (both, renamed) = graph(uids).beside(graph([0, i64::MAX]));
        validate(&both).expect("each tensor has a uid of its own");
        assert_eq!((both.nodes.len(), renamed.len()), (2, 2), "{uids:?}");
        let Op::Pointwise(Pointwise::Unary { x, y, .. }) = both.nodes[1].op else { panic!("an op of one operand") };
        assert_eq!([(Uid(0), x), (Uid(i64::MAX), y)], renamed[..], "{uids:?}");
    }
}

#[test]
fn blocks_of_fp8_factors_are_refused_where_sums_are_not_promoted() {
    let product = |precision, block| {
        let mut g = GraphBuilder::new("scaled");
        let (a, b) = (g.tensor("a", DType::E4m3, rows(&[4, 8])), g.tensor("b", DType::E4m3, rows(&[8, 4])));
        let factors = g.tensor("factors", DType::F32, rows(&[1, 1]));
        let scale_b = Some(OperandScale { tensor: factors, block });
        let y = g.matmul_with("product", Matmul { scale_b, ..Matmul::new(a, b, Uid(0), precision) }).expect("fits");
        g.store(y, "y", DType::F32).expect("stored");
        g.finish().map(drop)
    };
    let refused = product(Precision::Fp8Fast, Some([4, 8])).expect_err("no kernel would apply them");
    assert!(matches!(&refused, Error::Attribute { op, attribute: "precision", .. } if op == "product"), "{refused}");
    product(Precision::Fp8Fast, None).expect("one factor for the whole operand");
    product(Precision::Fp8Promoted, Some([4, 8])).expect("applied where sums are promoted");
}

#[test]
fn a_step_of_f32_is_no_step_of_an_epilogue_of_f64() -> TestResult {
    for (rounded, kinds) in [(DType::F64, vec!["gemm"]), (DType::F32, vec!["gemm", "map"])] {
        let mut g = GraphBuilder::new("wide");
        let (a, b) = (g.tensor("a", DType::F64, rows(&[4, 8])), g.tensor("b", DType::F64, rows(&[8, 4])));
        let product = g.matmul("product", a, b, Precision::F64)?;
        g.round_to(product, rounded)?;
        let y = g.unary("exp", UnaryOp::Exp, product)?;
        g.store(y, "y", DType::F32)?;
        let parts = partition(&g.finish()?)?.parts;
        assert_eq!(parts.iter().map(|part| part.problem.kind()).collect::<Vec<_>>(), kinds, "{rounded}");
    }
    Ok(())
}

#[test]
fn activations_that_a_norm_has_no_gradient_for_are_refused() {
    let told = |activation: UnaryOp, relu: bool, adds: bool| {
        let mut g = GraphBuilder::new("norm");
        let x = g.tensor("x", DType::F32, rows(&[2, 3, 4]));
        let norm = BatchNorm { relu, activation: Some(activation), add: adds.then_some(x), ..BatchNorm::new(x, 1e-5) };
        let y = g.batch_norm("norm", norm).expect("drawn").y;
        g.store(y, "y", DType::F32).expect("stored");
        g.finish().map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(told(UnaryOp::Silu, false, false), Ok(()));
    for (activation, relu, adds, rule) in [
        (UnaryOp::Silu, true, false, "not both"),
        (UnaryOp::Silu, false, true, "behind a sum"),
        (UnaryOp::Relu, false, false, "said by `relu`"),
        (UnaryOp::Exp, false, false, "has a gradient"),
        (UnaryOp::Clamp { lower: Real(1.0), upper: Real(0.0) }, false, false, "upper clamp bound"),
    ] {
        let error = told(activation, relu, adds).expect_err("refused");
        assert!(error.contains(rule), "{activation:?}: {error}");
    }
}
