//! Every operation: every rule broken once, JSON, and the fingerprint of graphs.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;

use verdigris_graph::spec::{Presence, SPECS};
use verdigris_graph::{
    Attention, AttentionBackward, AttentionSpec, BatchNorm, BatchNormBackward, BinaryOp, Causal, Conv, ConvDirection, ConvMode,
    CrossEntropyBackward, CrossEntropySpec, Error, Filter, Graph, GraphBuilder, HostScalar, Key, LossReduction, Matmul, Movement,
    NormGradients, NormKind, NormSpec, Normalize, NormalizeBackward, Op, PoolBackward, PoolMode, PoolWindows, Precision, RandomState, Real,
    ReductionOp, Role, Sampling, ScanOp, ScoreFunction, ScorePlace, ScoreStep, TensorDesc, TernaryOp, Uid, UnaryOp, json,
};
use verdigris_tensor::{DType, Layout};

type TestResult = Result<(), Box<dyn std::error::Error>>;

fn rows(dims: &[u64]) -> Layout {
    Layout::row_major(dims).unwrap()
}

fn desc(name: &str, dims: &[u64]) -> TensorDesc {
    TensorDesc::new(Uid(0), name, DType::F32, rows(dims))
}

const UNARY: [UnaryOp; 35] = [
    UnaryOp::Identity,
    UnaryOp::Neg,
    UnaryOp::Abs,
    UnaryOp::Relu,
    UnaryOp::LeakyRelu { slope: Real(0.1) },
    UnaryOp::Clamp { lower: Real(-1.0), upper: Real(2.0) },
    UnaryOp::GeluErf,
    UnaryOp::GeluTanh,
    UnaryOp::Silu,
    UnaryOp::Sigmoid,
    UnaryOp::Tanh,
    UnaryOp::ClippedRelu { lower: Real(0.0), upper: Real(6.0), slope: Real(0.2) },
    UnaryOp::Elu { alpha: Real(1.0) },
    UnaryOp::Softplus { beta: Real(1.0) },
    UnaryOp::Swish { beta: Real(1.5) },
    UnaryOp::HardSwish,
    UnaryOp::HardSigmoid,
    UnaryOp::Mish,
    UnaryOp::Exp,
    UnaryOp::Log,
    UnaryOp::Sqrt,
    UnaryOp::Rsqrt,
    UnaryOp::Reciprocal,
    UnaryOp::Erf,
    UnaryOp::Sin,
    UnaryOp::Cos,
    UnaryOp::Tan,
    UnaryOp::Ceil,
    UnaryOp::Floor,
    UnaryOp::Round,
    UnaryOp::Sign,
    UnaryOp::Not,
    UnaryOp::IsFinite,
    UnaryOp::IsNan,
    UnaryOp::Affine { scale: Real(2.0), shift: Real(-1.0) },
];

/// A graph in which every kind of op occurs, every optional tensor included.
fn everything() -> Result<Graph, Error> {
    let mut g = GraphBuilder::new("everything");
    let x = g.tensor("x", DType::F16, rows(&[2, 4, 9, 8]));
    let w = g.tensor("w", DType::F16, rows(&[6, 2, 3, 3]));
    let mut conv = Conv::new(ConvDirection::Fprop, x, w, Uid(0), 2, Precision::Fp32);
    conv.pads_before = vec![1, 0];
    conv.pads_after = vec![2, 1];
    conv.strides = vec![2, 1];
    conv.dilations = vec![1, 2];
    conv.groups = 2;
    conv.mode = ConvMode::Convolution;
    let y = g.conv_fprop("fprop", conv.clone())?;
    g.store(y, "y", DType::F16)?;
    let dx = g.conv_dgrad("dgrad", Conv { y, ..conv.clone() }, &[2, 4, 9, 8])?;
    g.store(dx, "dx", DType::F16)?;
    let dw = g.conv_wgrad("wgrad", Conv { y, ..conv }, &[6, 2, 3, 3])?;
    g.store(dw, "dw", DType::F32)?;
    let mut value = y;
    for (i, f) in UNARY.into_iter().enumerate() {
        value = g.unary(&format!("unary{i}"), f, value)?;
    }
    for (i, f) in BinaryOp::ALL.into_iter().enumerate() {
        value = g.binary(&format!("binary{i}"), f, value, y)?;
    }
    for (i, f) in UNARY.into_iter().filter(|f| f.is_activation()).enumerate() {
        value = g.binary(&format!("backward{i}"), BinaryOp::Backward(f), value, y)?;
    }
    for (i, f) in TernaryOp::ALL.into_iter().enumerate() {
        value = g.ternary(&format!("ternary{i}"), f, value, y, y)?;
    }
    let factor = g.host_scalar("factor", DType::F32);
    value = g.scale("scale", value, HostScalar::Bound(factor))?;
    let times = g.host_scalar("times", DType::I64);
    value = g.scale("times", value, HostScalar::Bound(times))?;
    let index = g.gen_index("column", &[6, 1, 5], 2)?;
    value = g.binary("shift", BinaryOp::Add, value, index)?;
    let state = g.tensor("state", DType::I32, rows(&[4]));
    value = g.dropout("dropout", value, state, 0.25)?;
    let normal = g.random_normal("normal", &[4, 8], state)?;
    g.store(normal, "drawn normal", DType::F32)?;
    let [seed, offset] = ["seed", "offset"].map(|name| g.host_scalar(name, DType::I64));
    let drawn = g.bernoulli("by value", &[4, 8], RandomState::by_value(seed, offset), 0.5)?;
    g.store(drawn, "drawn by value", DType::F32)?;
    g.store(value, "value", DType::F32)?;
    for (i, f) in ReductionOp::ALL.into_iter().enumerate() {
        let reduced = g.reduction(&format!("reduce{i}"), f, value, &[0, 2, 3])?;
        g.store(reduced, &format!("reduced{i}"), DType::F32)?;
    }
    let windows = PoolWindows::Sliding {
        window: vec![3, 2],
        strides: vec![2, 2],
        dilations: vec![1, 2],
        pads_before: vec![1, 0],
        pads_after: vec![0, 1],
    };
    let (pooled, at) = g.max_pool_with_index("max", windows.clone(), x, DType::I32)?;
    g.store(pooled, "pooled", DType::F16)?;
    g.store(at, "at", DType::I32)?;
    for (i, (x, index)) in [(Some(x), None), (None, Some(at))].into_iter().enumerate() {
        let back = PoolBackward { mode: PoolMode::Max, windows: windows.clone(), dy: pooled, x, index, dx: Uid(0) };
        let back = g.pool_backward(&format!("max back {i}"), back, &[2, 4, 9, 8])?;
        g.store(back, &format!("max dx {i}"), DType::F16)?;
    }
    let samples = g.tensor("samples", DType::F16, rows(&[2, 4, 2]));
    let (fractional, at) = g.fractional_max_pool("fractional", x, samples, (&[2, 3], &[5, 6]), DType::I64)?;
    g.store(fractional, "fractional of x", DType::F16)?;
    g.store(at, "fractional at", DType::I64)?;
    let back = PoolWindows::Fractional { window: vec![2, 3], out: vec![5, 6] };
    let back = PoolBackward { mode: PoolMode::Max, windows: back, dy: fractional, x: None, index: Some(at), dx: Uid(0) };
    let back = g.pool_backward("fractional back", back, &[2, 4, 9, 8])?;
    g.store(back, "fractional dx", DType::F16)?;
    for (i, windows) in [windows, PoolWindows::Adaptive { out: vec![4, 3] }].into_iter().enumerate() {
        let mode = PoolMode::Average { count_include_pad: i == 0 };
        let mean = g.pool(&format!("mean{i}"), mode, windows.clone(), x)?;
        g.store(mean, &format!("mean of {i}"), DType::F16)?;
        let back = PoolBackward { mode, windows, dy: mean, x: None, index: None, dx: Uid(0) };
        let back = g.pool_backward(&format!("mean back {i}"), back, &[2, 4, 9, 8])?;
        g.store(back, &format!("mean dx {i}"), DType::F16)?;
    }
    let sampling =
        Sampling::Interpolate { filter: Filter::Linear { align_corners: true }, out: vec![13, 3], factors: vec![Real(1.5), Real(0.3)] };
    let sampled = g.resample("resample", sampling.clone(), x)?;
    g.store(sampled, "resampled", DType::F16)?;
    let back = g.resample_backward("resample back", sampling, sampled, &[2, 4, 9, 8])?;
    g.store(back, "resample dx", DType::F16)?;
    let logits = g.tensor("logits", DType::F32, rows(&[5, 10]));
    for (i, f) in ScanOp::ALL.into_iter().enumerate() {
        let y = g.scan(f.name(), f, logits, 1, i % 2 == 1, i % 3 == 1)?;
        g.store(y, &format!("running {}", f.name()), DType::F32)?;
    }
    let cache = g.tensor("cache", DType::F32, rows(&[5, 32]));
    let lengths = g.tensor("row lengths", DType::I32, rows(&[5, 1]));
    g.append("append", cache, logits, lengths, 1)?;
    let labels = g.tensor("labels", DType::I64, rows(&[5, 1]));
    for log in [false, true] {
        let p = g.softmax(&format!("softmax {log}"), logits, 1, log)?;
        g.store(p, &format!("p {log}"), DType::F32)?;
        let back = g.softmax_backward(&format!("softmax back {log}"), p, logits, 1, log)?;
        g.store(back, &format!("dp {log}"), DType::F32)?;
    }
    for reduction in [LossReduction::None, LossReduction::Sum, LossReduction::Mean] {
        let spec = CrossEntropySpec { label_smoothing: Real(0.1), ignore_index: Some(-100), ..CrossEntropySpec::new(1, reduction) };
        let (loss, lse) = g.cross_entropy_with_lse(&format!("loss {reduction:?}"), spec, logits, labels)?;
        g.store(loss, &format!("l {reduction:?}"), DType::F32)?;
        g.store(lse, &format!("lse {reduction:?}"), DType::F32)?;
        let back = CrossEntropyBackward { spec, logits, labels, dloss: loss, lse: Some(lse), dlogits: Uid(0) };
        let back = g.cross_entropy_backward(&format!("loss back {reduction:?}"), back)?;
        g.store(back, &format!("dl {reduction:?}"), DType::F32)?;
    }
    let (wide, vector) = (g.tensor("wide x", DType::F32, rows(&[2, 6, 5])), g.tensor("vector", DType::F32, rows(&[6, 1])));
    for kind in [NormKind::Layer, NormKind::Rms] {
        let spec = NormSpec { groups: 3, zero_centred: true, ..NormSpec::new(kind, &[1, 2], 1e-5) };
        let norm = Normalize { residual: Some(wide), scale: Some(vector), bias: Some(vector), ..Normalize::new(spec.clone(), wide) };
        let made = g.normalize(&format!("norm {kind:?}"), norm)?;
        let sum = made.sum.ok_or(Error::UnknownTensor { op: "norm".to_owned(), uid: wide })?;
        for (uid, name) in [(Some(made.y), "normed"), (made.mean, "mean"), (Some(made.inv), "inv"), (Some(sum), "summed")] {
            if let Some(uid) = uid {
                g.store(uid, &format!("{name} {kind:?}"), DType::F32)?;
            }
        }
        let back = NormalizeBackward {
            scale: Some(vector),
            mean: made.mean,
            inv: Some(made.inv),
            dsum: Some(wide),
            ..NormalizeBackward::new(spec, sum, made.y)
        };
        let wanted = NormGradients { dx: true, dscale: true, dbias: Some(&[6, 1]) };
        let back = g.normalize_backward(&format!("norm back {kind:?}"), back, wanted)?;
        for (uid, name) in [(back.dx, "dx"), (back.dscale, "dscale"), (back.dbias, "dbias")] {
            if let Some(uid) = uid {
                g.store(uid, &format!("{name} {kind:?}"), DType::F32)?;
            }
        }
    }
    let vector = |g: &mut GraphBuilder, name: &str| g.tensor(name, DType::F32, rows(&[1, 4, 1, 1]));
    let [scale, bias, running_mean, running_var] = ["scale", "bias", "running mean", "running var"].map(|name| vector(&mut g, name));
    let norm = BatchNorm { relu: true, scale: Some(scale), bias: Some(bias), add: Some(x), ..BatchNorm::new(x, 1e-5) };
    let norm = BatchNorm { running_mean: Some(running_mean), running_var: Some(running_var), ..norm };
    let normed = g.batch_norm("norm", norm)?;
    g.store(normed.y, "normed", DType::F16)?;
    for (i, uid) in [Some(normed.mean), Some(normed.inv), normed.next_mean, normed.next_var].into_iter().flatten().enumerate() {
        g.store(uid, &format!("statistic {i}"), DType::F32)?;
    }
    for (i, (y, bias)) in [(Some(normed.y), None), (None, Some(bias))].into_iter().enumerate() {
        let back = BatchNormBackward { relu: true, scale: Some(scale), y, bias, ..BatchNormBackward::new(x, x, normed.mean, normed.inv) };
        let (dx, dscale, dbias, dadd) = g.batch_norm_backward(&format!("norm back {i}"), back)?;
        for (what, uid) in [("dx", Some(dx)), ("dscale", Some(dscale)), ("dbias", Some(dbias)), ("dadd", dadd)] {
            if let Some(uid) = uid {
                g.store(uid, &format!("{what} of norm {i}"), DType::F32)?;
            }
        }
    }
    let activation = Some(UnaryOp::Clamp { lower: Real(0.0), upper: Real(6.0) });
    let norm = BatchNorm { activation, scale: Some(scale), bias: Some(bias), ..BatchNorm::new(x, 1e-5) };
    let clamped = g.batch_norm("clamped norm", norm)?;
    g.store(clamped.y, "clamped", DType::F16)?;
    let back = BatchNormBackward { activation, bias: Some(bias), ..BatchNormBackward::new(x, x, normed.mean, normed.inv) };
    let (dx, dscale, dbias, _) = g.batch_norm_backward("clamped norm back", back)?;
    for (what, uid) in [("dx", dx), ("dscale", dscale), ("dbias", dbias)] {
        g.store(uid, &format!("{what} of the clamped norm"), DType::F32)?;
    }
    let (mean, m2) = g.batch_norm_statistics("moments", x)?;
    g.store(mean, "mean of moments", DType::F32)?;
    g.store(m2, "m2", DType::F32)?;

    let heads = |g: &mut GraphBuilder, name: &str, dims: &[u64]| g.tensor(name, DType::Bf16, rows(dims));
    // Two sequences in nine and twelve rows, at most five queries and seven keys each.
    let q = heads(&mut g, "q", &[1, 4, 9, 8]);
    let [k, v] = ["k", "v"].map(|name| heads(&mut g, name, &[1, 2, 12, 8]));
    let [q_offsets, kv_offsets] = ["q offsets", "kv offsets"].map(|name| Some(g.tensor(name, DType::I32, rows(&[3, 1, 1, 1]))));
    let (scores, sinks) = (heads(&mut g, "scores", &[4, 1, 7]), heads(&mut g, "sinks", &[1, 4, 1, 1]));
    let mask = g.tensor("mask", DType::U8, rows(&[2, 1, 5, 7]));
    let slopes = g.tensor("slopes", DType::F32, rows(&[2, 4, 1, 1]));
    let [q_lengths, kv_lengths] = ["q lengths", "kv lengths"].map(|name| g.tensor(name, DType::I32, rows(&[2, 1, 1, 1])));
    let spec = AttentionSpec {
        scale: HostScalar::Bound(factor),
        causal: Causal::BottomRight,
        left: Some(3),
        right: Some(1),
        soft_cap: Some(Real(30.0)),
        longest_q: Some(5),
        longest_kv: Some(7),
        dropout: Some(Real(0.25)),
    };
    let drawn_from = Some(g.tensor("dropout state", DType::I32, rows(&[4])));
    let [seed, offset] = ["dropout seed", "dropout offset"].map(|name| Some(g.host_scalar(name, DType::I64)));
    let [bias, mask, slopes, sinks, q_lengths, kv_lengths] = [scores, mask, slopes, sinks, q_lengths, kv_lengths].map(Some);
    let plain = Attention { dropout_state: drawn_from, ..Attention::new(spec, q, k, v) };
    let attention = Attention { bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, ..plain };
    let attended = g.attention("attention", attention)?;
    g.store(attended.o, "attended", DType::Bf16)?;
    g.store(attended.log_sum_exp, "log sum exp", DType::F32)?;
    g.store(attended.max_scores, "max scores", DType::F32)?;
    // A function of the score comes in place of a soft cap.
    let mut score = ScoreFunction::default();
    let t = score.push(ScoreStep::Given);
    let (key, read) = (score.push(ScoreStep::Place(ScorePlace::Key)), score.push(ScoreStep::Operand(0)));
    let hidden = score.push(ScoreStep::Number(Real(f64::NEG_INFINITY)));
    let sum = score.push(ScoreStep::Binary { f: BinaryOp::Add, x: t, z: key });
    let chosen = score.push(ScoreStep::Ternary { f: TernaryOp::Select, x: sum, z: hidden, t: read });
    let bent = score.push(ScoreStep::Unary { f: UnaryOp::LeakyRelu { slope: Real(0.5) }, x: chosen });
    let of_head = score.push(ScoreStep::Operand(1));
    let gated = score.push(ScoreStep::Binary { f: BinaryOp::Mul, x: bent, z: of_head });
    score.push(ScoreStep::Round { dtype: DType::F16, x: gated });
    let score_operands = vec![
        g.tensor("score operand", DType::U8, rows(&[2, 1, 1, 7])),
        g.tensor("score operand of a head", DType::F32, rows(&[1, 4, 1, 1])),
    ];
    let plain =
        Attention { dropout_state: seed, dropout_offset: offset, ..Attention::new(AttentionSpec { soft_cap: None, ..spec }, q, k, v) };
    let made = Attention { q_offsets, kv_offsets, score: Some(score.clone()), score_operands: score_operands.clone(), ..plain };
    let made = g.attention("attention by a function", made)?;
    g.store(made.o, "attended by a function", DType::Bf16)?;
    let plain = AttentionBackward::new(AttentionSpec { soft_cap: None, ..spec }, [q, k, v], made.o, made.log_sum_exp, made.o);
    let plain = AttentionBackward { dropout_state: seed, dropout_offset: offset, ..plain };
    let back = AttentionBackward { q_offsets, kv_offsets, score: Some(score), score_operands, ..plain };
    let back = g.attention_backward("attention back by a function", back)?;
    g.store(back.dq, "dq of attention by a function", DType::F32)?;
    // Of what is no real there is none.
    let [None, Some(of_head), None, None] = back.d_score_operands else { panic!("{back:?}") };
    g.store(of_head, "d score operand of attention by a function", DType::F32)?;
    let plain = AttentionBackward::new(spec, [q, k, v], attended.o, attended.log_sum_exp, attended.o);
    let plain = AttentionBackward { dropout_state: seed, dropout_offset: offset, ..plain };
    let back = AttentionBackward { bias, mask, slopes, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets, ..plain };
    let back = g.attention_backward("attention back", back)?;
    for (what, uid) in [("dq", Some(back.dq)), ("dk", Some(back.dk)), ("dv", Some(back.dv)), ("dbias", back.dbias), ("dsinks", back.dsinks)]
    {
        if let Some(uid) = uid {
            g.store(uid, &format!("{what} of attention"), DType::F32)?;
        }
    }

    let turned = g.transpose("transpose", logits, &[1, 0])?;
    let part = g.slice("slice", turned, &[1, 0], &[10, 5], &[3, 2])?;
    let both = g.concat("concat", &[part, part], 0)?;
    let framed = g.pad("pad", both, &[1, 0], &[0, 2], -1.5)?;
    let flat = g.reshape("reshape", framed, &[35, 1])?;
    let wide = g.broadcast("broadcast", flat, &[2, 35, 3])?;
    g.store(wide, "wide", DType::F32)?;
    let product =
        g.matmul_with("mm", Matmul { beta: HostScalar::Bound(factor), ..Matmul::new(logits, turned, Uid(0), Precision::Ieee) })?;
    g.store(product, "product", DType::F32)?;
    g.finish()
}

#[test]
fn every_op_survives_json() -> TestResult {
    let graph = everything()?;
    let kinds: BTreeSet<String> = (graph.nodes.iter())
        .map(|node| match serde_json::to_value(&node.op).unwrap() {
            serde_json::Value::Object(map) => map.keys().next().unwrap().clone(),
            other => panic!("{other}"),
        })
        .collect();
    assert_eq!(kinds, SPECS.iter().map(|spec| spec.name.to_owned()).collect());
    assert_eq!(json::graph_from_json(&json::graph_to_json(&graph))?, graph);
    // Names in the text are those that `name` gives.
    for f in UNARY {
        assert!(serde_json::to_string(&f)?.contains(&format!("\"{}\"", f.name())), "{f:?}");
    }
    for f in BinaryOp::ALL {
        assert_eq!(serde_json::to_string(&f)?, format!("\"{}\"", f.name()));
    }
    for f in ReductionOp::ALL {
        assert_eq!(serde_json::to_string(&f)?, format!("\"{}\"", f.name()));
    }
    // A field that no op has is refused, in every op.
    for node in &graph.nodes {
        let mut value = serde_json::to_value(&node.op)?;
        fields_of(&mut value).insert("surprise".to_owned(), 1.into());
        assert!(serde_json::from_value::<Op>(value.clone()).is_err(), "{value}");
    }
    Ok(())
}

/// The fields of an op, under the one or two tags around them.
fn fields_of(value: &mut serde_json::Value) -> &mut serde_json::Map<String, serde_json::Value> {
    let map = value.as_object_mut().expect("an op has fields");
    if map.len() == 1 { fields_of(map.values_mut().next().expect("there is one")) } else { map }
}

/// The uids that stand under a field: one, a list, or one with attributes.
fn uids_of(value: &serde_json::Value) -> Vec<i64> {
    match value {
        serde_json::Value::Array(list) => list.iter().flat_map(uids_of).collect(),
        serde_json::Value::Object(map) => map.get("tensor").or(map.get("bound")).into_iter().flat_map(uids_of).collect(),
        value => value.as_i64().into_iter().collect(),
    }
}

/// The table says of each op what its JSON has: names, fields, which of them are tensors read and written, what may be left out and what
/// stands for it, and a value that is refused for each attribute.
#[test]
fn the_table_is_what_json_reads() -> TestResult {
    let graph = everything()?;
    let (mut forms, mut tried) = (BTreeSet::new(), BTreeSet::new());
    for (at, node) in graph.nodes.iter().enumerate() {
        let spec = node.op.spec();
        let value = serde_json::to_value(&node.op)?;
        let (name, inner) = value.as_object().and_then(|map| map.iter().next()).ok_or("an op is an object")?;
        assert_eq!(name, spec.name);
        let fields = inner.as_object().ok_or("an op has fields")?;
        let form = match spec.forms {
            [form] if form.name.is_empty() => form,
            forms => forms.iter().find(|form| fields.contains_key(form.name)).ok_or(format!("{spec:?} lacks {inner}"))?,
        };
        forms.insert((spec.name, form.name));
        let pointer = if form.name.is_empty() { format!("/{name}") } else { format!("/{name}/{}", form.name) };
        let of = |name: &str| format!("{pointer}/{}", name.replace('.', "/"));

        // Every field is in the table, once.
        let mut named: BTreeSet<&str> = form.operands.iter().map(|operand| operand.name).collect();
        named.extend(form.attributes.iter().map(|attribute| attribute.name.split('.').next().unwrap()));
        for field in value.pointer(&pointer).and_then(|fields| fields.as_object()).ok_or("fields")?.keys() {
            assert!(named.contains(field.as_str()), "{name}: {field}");
        }
        // Tensors are read and written as it says; host scalars are read, too.
        let mut uids = BTreeSet::new();
        for operand in form.operands {
            let role = match operand.role {
                Some(role) => role,
                None if value.pointer(&of(operand.name)) == Some(&node.op.output().0.into()) => Role::Output,
                None => Role::Input,
            };
            uids.extend(value.pointer(&of(operand.name)).into_iter().flat_map(uids_of).map(|uid| (role == Role::Output, Uid(uid))));
        }
        let bound = form.attributes.iter().filter_map(|attribute| value.pointer(&of(attribute.name))?.get("bound"));
        uids.extend(bound.flat_map(uids_of).map(|uid| (false, Uid(uid))));
        let read = node.op.inputs().into_iter().map(|uid| (false, uid));
        assert_eq!(uids, read.chain(node.op.outputs().into_iter().map(|uid| (true, uid))).collect(), "{name}");

        // What must be there and what need not.
        let without = |field: &str| {
            let mut less = value.clone();
            let (parent, last) = of(field).rsplit_once('/').map(|(parent, last)| (parent.to_owned(), last.to_owned())).unwrap();
            let removed = less.pointer_mut(&parent).and_then(|fields| fields.as_object_mut()).and_then(|fields| fields.remove(&last));
            (removed.is_some(), serde_json::from_value::<Op>(less))
        };
        for operand in form.operands {
            let (was_there, read) = without(operand.name);
            assert_eq!(read.is_ok(), operand.presence == Presence::Optional, "{name} without {}", operand.name);
            assert!(was_there || operand.presence == Presence::Optional);
            if operand.presence == Presence::Optional {
                let mut more = value.clone();
                let fields = more.pointer_mut(&pointer).and_then(|fields| fields.as_object_mut()).ok_or("fields")?;
                fields.entry(operand.name).or_insert(serde_json::json!([]));
                let error = serde_json::from_value::<Op>(more).err().map(|error| error.to_string()).unwrap_or_default();
                assert!(!error.contains("unknown field"), "{name}: {error}");
            }
        }
        for attribute in form.attributes {
            let (is_there, read) = without(attribute.name);
            // What may be left out is, where it and another come in place of each other.
            if !is_there && attribute.default.is_some() {
                continue;
            }
            tried.insert((spec.name, form.name, attribute.name));
            match attribute.default {
                None => assert!(read.is_err(), "{name} without {}", attribute.name),
                Some(default) => {
                    let mut set = value.clone();
                    let place = of(attribute.name);
                    *set.pointer_mut(&place).ok_or(format!("{name} has {place}"))? = serde_json::from_str(default)?;
                    assert_eq!(read?, serde_json::from_value::<Op>(set)?, "{name}: what stands for {}", attribute.name);
                }
            }
            // A value that the check refuses, in the graph that is right without it.
            let mut wrong = serde_json::to_value(&graph)?;
            let place = format!("/nodes/{at}/op{}", of(attribute.name));
            *wrong.pointer_mut(&place).ok_or(place)? = serde_json::from_str(attribute.refused)?;
            let error =
                json::graph_from_json(&wrong.to_string()).expect_err(&format!("{name}: {} = {}", attribute.name, attribute.refused));
            assert!(matches!(&error, Error::Json { .. }) || error.to_string().contains(&format!("`{}`", node.name)), "{error}");
        }
    }
    let all = SPECS.iter().flat_map(|spec| spec.forms.iter().map(|form| (spec.name, form.name))).collect();
    assert_eq!(forms, all, "the graph of everything has an op of each form");
    let told = SPECS.iter().flat_map(|spec| spec.forms.iter().map(move |form| (spec, form)));
    let told = told.flat_map(|(spec, form)| form.attributes.iter().map(move |attribute| (spec.name, form.name, attribute.name))).collect();
    assert_eq!(tried, told, "each attribute is said by an op");
    Ok(())
}

#[test]
fn uids_are_visited_in_one_order() -> TestResult {
    let graph = everything()?;
    for node in &graph.nodes {
        let mut seen = Vec::new();
        node.op.clone().visit_uids(&mut |role, uid| seen.push((role, *uid)));
        let inputs: Vec<Uid> = seen.iter().filter(|(role, _)| *role == Role::Input).map(|&(_, uid)| uid).collect();
        assert_eq!(node.op.inputs(), inputs);
        assert_eq!(inputs.len() + node.op.outputs().len(), seen.len());
        assert_eq!(node.op.output(), node.op.outputs()[0]);
        // What the text names is what is visited.
        let mut in_text = BTreeSet::new();
        collect_uids(&serde_json::to_value(&node.op)?, &mut in_text);
        let visited: BTreeSet<i64> = seen.iter().map(|(_, uid)| uid.0).collect();
        assert_eq!(in_text, visited, "{:?}", node.op);
    }
    let outputs = |name: &str| graph.nodes.iter().find(|node| node.name == name).unwrap().op.outputs().len();
    assert_eq!([outputs("max"), outputs("loss Sum"), outputs("fprop")], [2, 2, 1]);
    Ok(())
}

/// The scale of an affine function is a number with a point.
fn collect_uids(value: &serde_json::Value, uids: &mut BTreeSet<i64>) {
    const FIELDS: &str = "a b c d x y z t w index samples dy dx logits labels loss dloss lse dlogits bound xs residual scale bias sum mean inv dsum dscale dbias \
                          add running_mean running_var rows lengths next_mean next_var dadd m2 q k v mask slopes sinks q_lengths kv_lengths q_offsets kv_offsets \
                          page_table dropout_state dropout_offset q_descale k_descale v_descale block_map mask_blocks o log_sum_exp max_scores d_o dq dk dv dsinks state offset";
    match value {
        serde_json::Value::Object(map) => {
            for (key, entry) in map {
                match entry {
                    serde_json::Value::Number(number) if FIELDS.split(' ').any(|field| field == key) && !number.is_f64() => {
                        uids.insert(number.as_i64().unwrap());
                    }
                    // Positions of steps.
                    _ if key == "score" => {}
                    serde_json::Value::Array(list) if matches!(key.as_str(), "xs" | "score_operands" | "d_score_operands") => {
                        uids.extend(list.iter().filter_map(|uid| uid.as_i64()))
                    }
                    other => collect_uids(other, uids),
                }
            }
        }
        serde_json::Value::Array(list) => list.iter().for_each(|entry| collect_uids(entry, uids)),
        _ => {}
    }
}

#[test]
fn fingerprints_see_the_graph_and_not_its_names() -> TestResult {
    let graph = everything()?;
    let key = Key::of_graph(&graph)?;
    let mut other = graph.clone();
    other.name = "another".to_owned();
    for tensor in &mut other.tensors {
        tensor.name.push('!');
        tensor.uid.0 = 7000 - 3 * tensor.uid.0;
    }
    other.tensors.reverse();
    for node in &mut other.nodes {
        node.name.insert(0, '?');
        node.op.visit_uids(&mut |_, uid| uid.0 = 7000 - 3 * uid.0);
    }
    // A tensor that no op names plays no part.
    other.tensors.push(TensorDesc::new(Uid(-1), "idle", DType::F32, rows(&[3])));
    verdigris_graph::validate::validate(&other)?;
    assert_eq!(Key::of_graph(&other)?, key);
    let (canonical, old) = other.canonical()?;
    assert_eq!(canonical.tensors.len(), old.len());
    for (tensor, uid) in canonical.tensors.iter().zip(&old) {
        assert_eq!(tensor.layout, other.tensor(*uid).unwrap().layout);
    }
    verdigris_graph::validate::validate(&canonical)?;
    assert_eq!(canonical.canonical()?.0, canonical);

    // Anything else does.
    let changes: [&dyn Fn(&mut Graph); 6] = [
        &|g| g.tensors[0].dtype = DType::Bf16,
        &|g| g.tensors[0].layout = Layout::with_order(&[2, 4, 9, 8], &[0, 2, 3, 1]).unwrap(),
        &|g| g.determinism = verdigris_graph::Determinism::Repeatable,
        &|g| {
            let Op::Conv(conv) = &mut g.nodes[0].op else { panic!() };
            conv.pads_after[1] += 1;
        },
        &|g| {
            g.nodes.pop();
        },
        &|g| {
            let Op::Conv(conv) = &mut g.nodes[2].op else { panic!() };
            conv.x = conv.y;
        },
    ];
    let mut keys = BTreeSet::from([key]);
    for change in changes {
        let mut changed = graph.clone();
        change(&mut changed);
        assert!(keys.insert(Key::of_graph(&changed)?), "a change that no key shows");
    }
    let mut lost = graph;
    lost.tensors.remove(0);
    assert!(matches!(Key::of_graph(&lost), Err(Error::UnknownTensor { .. })));
    Ok(())
}

/// The text of the fault in `everything` after a change.
fn fault(change: &dyn Fn(&mut Graph)) -> String {
    let mut graph = everything().unwrap();
    change(&mut graph);
    verdigris_graph::validate::validate(&graph).unwrap_err().to_string()
}

fn node<'g>(graph: &'g mut Graph, name: &str) -> &'g mut Op {
    &mut graph.nodes.iter_mut().find(|node| node.name == name).unwrap_or_else(|| panic!("no node {name}")).op
}

fn tensor<'g>(graph: &'g mut Graph, name: &str) -> &'g mut TensorDesc {
    graph.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap_or_else(|| panic!("no tensor {name}"))
}

macro_rules! with {
    ($name:literal, $kind:ident, $op:ident => $change:expr) => {
        fault(&|g| {
            let Op::$kind($op) = node(g, $name) else { panic!($name) };
            $change;
        })
    };
}

#[test]
fn convolutions_that_break_a_rule() {
    let has = |text: String, part: &str| assert!(text.contains(part), "{text}\nlacks {part}");
    has(with!("fprop", Conv, c => c.strides = vec![1; 4]), "op `fprop`: strides = [1, 1, 1, 1]; a convolution has 1, 2 or 3 spatial");
    has(with!("fprop", Conv, c => c.pads_before = vec![1]), "pads_before = [1]; there is one entry for each");
    has(with!("fprop", Conv, c => c.pads_after = vec![]), "pads_after");
    has(with!("fprop", Conv, c => c.dilations = vec![1; 3]), "dilations");
    has(with!("fprop", Conv, c => c.strides[1] = 0), "a stride is at least 1");
    has(with!("fprop", Conv, c => c.dilations[0] = 0), "a dilation is at least 1");
    has(with!("fprop", Conv, c => c.groups = 0), "at least one group");
    has(with!("fprop", Conv, c => c.groups = 3), "tensor `x`: dim 1 (c) modulo 3 groups is 1, expected 0");
    has(with!("fprop", Conv, c => c.groups = 4), "tensor `w`: dim 0 (k) modulo 4 groups is 2, expected 0");
    has(with!("fprop", Conv, c => c.groups = 1), "tensor `w`: dim 1 (c / groups) is 2, expected 4");
    has(with!("fprop", Conv, c => c.dilations[1] = 5), "tensor `x`: dim 3 is 8, expected 10; the dilated filter fits");
    has(with!("fprop", Conv, c => c.pads_after[1] = 3), "tensor `y`: dim 3 is 5, expected 7");
    has(with!("fprop", Conv, c => c.precision = Precision::I32), "i32 sums take i8 and u8 operands");
    has(with!("dgrad", Conv, c => c.strides[0] = 3), "op `dgrad`, tensor `y`");
    has(fault(&|g| tensor(g, "x").layout = rows(&[2, 4, 72])), "tensor `x`: the number of dims is 3, expected 4");
    has(fault(&|g| tensor(g, "w").layout = rows(&[6, 2, 0, 3])), "at least one tap");
    has(fault(&|g| tensor(g, "dw").layout = rows(&[6, 2, 3, 4])), "op `wgrad`, tensor `y`: dim 3");
    has(fault(&|g| tensor(g, "w").dtype = DType::Bf16), "A and B share one type");
    let text = fault(&|g| {
        let factor = tensor(g, "factor").uid;
        let Op::Conv(conv) = node(g, "fprop") else { panic!() };
        conv.x = factor;
    });
    has(text, "is a factor");
}

#[test]
fn pointwise_ops_that_break_a_rule() {
    let has = |f: UnaryOp, part: &str| {
        let text = f.check("op").unwrap_err().to_string();
        assert!(text.contains(part), "{text}\nlacks {part}");
        if f.is_activation() {
            assert_eq!(BinaryOp::Backward(f).check("op").unwrap_err().to_string(), text);
        }
    };
    let (inf, one) = (Real(f64::INFINITY), Real(1.0));
    has(UnaryOp::LeakyRelu { slope: inf }, "slope = inf");
    has(UnaryOp::Clamp { lower: inf, upper: one }, "lower = inf");
    has(UnaryOp::Clamp { lower: one, upper: Real(0.0) }, "not below the lower");
    has(UnaryOp::ClippedRelu { lower: inf, upper: one, slope: one }, "lower = inf");
    has(UnaryOp::ClippedRelu { lower: one, upper: inf, slope: one }, "upper = inf");
    has(UnaryOp::ClippedRelu { lower: one, upper: one, slope: inf }, "slope = inf");
    has(UnaryOp::ClippedRelu { lower: one, upper: Real(0.0), slope: one }, "not below the lower");
    has(UnaryOp::Elu { alpha: Real(f64::NAN) }, "alpha = NaN");
    has(UnaryOp::Softplus { beta: Real(0.0) }, "above 0");
    has(UnaryOp::Swish { beta: inf }, "beta = inf");
    has(UnaryOp::Affine { scale: inf, shift: one }, "scale = inf");
    has(UnaryOp::Affine { scale: one, shift: inf }, "shift = inf");
    for f in UNARY {
        assert!(f.check("op").is_ok());
        assert_eq!(BinaryOp::Backward(f).check("op").is_ok(), f.is_activation());
    }
    assert!(BinaryOp::Backward(UnaryOp::Exp).check("op").unwrap_err().to_string().contains("backward = exp; activations"));

    let text = fault(&|g| tensor(g, "column").layout = rows(&[6, 1, 6]));
    assert!(text.contains("op `shift`, tensor `column`: dim 2 is 6, expected 5"), "{text}");
    let text = fault(&|g| tensor(g, "column").layout = rows(&[6]));
    assert!(text.contains("op `column`, tensor `column`: the number of dims is 1, expected 3; an axis"), "{text}");
    let text = fault(&|g| tensor(g, "ternary0").layout = rows(&[2, 6, 5, 1]));
    assert!(text.contains("op `ternary0`, tensor `ternary0`: dim 3"), "{text}");
}

#[test]
fn reductions_and_pools_that_break_a_rule() {
    let has = |text: String, part: &str| assert!(text.contains(part), "{text}\nlacks {part}");
    has(with!("reduce0", Reduction, r => r.axes = vec![]), "at least one axis");
    has(with!("reduce0", Reduction, r => r.axes = vec![2, 1]), "axes = [2, 1]");
    has(with!("reduce0", Reduction, r => r.axes = vec![1, 1]), "axes = [1, 1]");
    has(with!("reduce0", Reduction, r => r.axes = vec![4]), "the number of dims is 4, expected 5");
    has(with!("reduce0", Reduction, r => r.axes = vec![0]), "tensor `reduced0`: dim 2 is 1, expected 5");

    let sliding = |change: &dyn Fn(&mut [&mut Vec<u64>; 5])| {
        fault(&|g| {
            let Op::Pool(pool) = node(g, "max") else { panic!() };
            let PoolWindows::Sliding { window, strides, dilations, pads_before, pads_after } = &mut pool.windows else { panic!() };
            change(&mut [window, strides, dilations, pads_before, pads_after]);
        })
    };
    has(sliding(&|lists| lists[0].clear()), "1, 2 or 3 spatial dims");
    has(sliding(&|lists| lists[0].push(1)), "tensor `x`: the number of dims is 4, expected 5");
    for (i, name) in ["window", "strides", "dilations", "pads_before", "pads_after"].into_iter().enumerate() {
        if i > 0 {
            has(sliding(&|lists| lists[i].push(1)), &format!("{name} = "));
        }
        if i < 3 {
            has(sliding(&|lists| lists[i][0] = 0), &format!("{name} = [0"));
        } else {
            has(sliding(&|lists| lists[i][0] = 3), &format!("{name} = 3; padding is smaller"));
        }
    }
    has(sliding(&|lists| lists[0][1] = 6), "tensor `x`: dim 3 is 8, expected 10; the dilated window fits");
    has(sliding(&|lists| lists[1][1] = 1), "tensor `pooled`: dim 3 is 4, expected 7");
    has(with!("max", Pool, p => p.mode = PoolMode::Average { count_include_pad: true }), "tensor `at`: max pooling has an index");
    has(fault(&|g| tensor(g, "at").dtype = DType::F32), "an index is i32 or i64");
    has(fault(&|g| tensor(g, "at").layout = rows(&[2, 4, 4, 3])), "tensor `at`: dim 3 is 3, expected 4");
    has(with!("mean1", Pool, p => p.windows = PoolWindows::Adaptive { out: vec![0, 3] }), "at least one element");
    has(with!("mean1", Pool, p => p.windows = PoolWindows::Adaptive { out: vec![u64::MAX, 3] }), "at most 2^62");
    has(with!("max back 0", PoolBackward, p => p.x = None), "either x or the index");
    has(with!("max back 0", PoolBackward, p => p.index = Some(p.dy)), "either x or the index");
    has(with!("max back 0", PoolBackward, p => p.x = Some(p.dy)), "tensor `pooled`: dim 2");
    has(with!("max back 1", PoolBackward, p => p.index = Some(p.dy)), "an index is i32 or i64");
    has(with!("mean back 0", PoolBackward, p => p.index = Some(p.dy)), "reads dy only");
    has(with!("mean back 0", PoolBackward, p => p.x = Some(p.dy)), "reads dy only");
    has(fault(&|g| tensor(g, "mean dx 0").layout = rows(&[2, 4, 9, 6])), "op `mean back 0`, tensor `mean of 0`: dim 3 is 4, expected 3");
    let fractional = |change: &dyn Fn(&mut Vec<u64>, &mut Vec<u64>)| {
        fault(&|g| {
            let Op::Pool(pool) = node(g, "fractional") else { panic!() };
            let PoolWindows::Fractional { window, out } = &mut pool.windows else { panic!() };
            change(window, out);
        })
    };
    has(fractional(&|_, out| out.push(1)), "as many as in window");
    has(fractional(&|window, _| window[0] = 0), "at least one");
    has(fractional(&|_, out| out[1] = 0), "at least one");
    has(fractional(&|_, out| out[1] = 7), "dim 3 is 8, expected 9; fractional windows fit");
    has(fractional(&|window, _| window[0] = u64::MAX), "fractional windows fit");
    has(with!("fractional", Pool, p => p.samples = None), "and there are none");
    has(with!("max", Pool, p => p.samples = Some(p.x)), "only fractional windows");
    has(with!("fractional", Pool, p => p.index = None), "max pooling that writes the index");
    has(
        with!("fractional", Pool, p => p.mode = PoolMode::Average { count_include_pad: true }),
        "fractional windows are those of max pooling",
    );
    has(fault(&|g| tensor(g, "samples").dtype = DType::I32), "samples are floating-point");
    has(fault(&|g| tensor(g, "samples").layout = rows(&[2, 4, 3])), "tensor `samples`: dim 2 is 3, expected 2");
    has(with!("fractional back", PoolBackward, p => p.index = None), "and reads the index");
    has(with!("fractional back", PoolBackward, p => p.x = Some(p.dy)), "and reads the index");
    let long = PoolWindows::Fractional { window: vec![1], out: vec![2] };
    let text = long.infer("pool", &desc("x", &[1, 1, (1 << 20) + 1])).unwrap_err().to_string();
    has(text, "at most 2^20");
    assert_eq!(long.infer("pool", &desc("x", &[1, 1, 1 << 20])).unwrap(), [1, 1, 2]);
    let empty = PoolWindows::Adaptive { out: vec![2] }.infer("pool", &desc("x", &[1, 1, 0])).unwrap_err();
    has(empty.to_string(), "tensor `x`: dim 2 is 0, expected 1");
}

#[test]
fn softmaxes_and_losses_that_break_a_rule() {
    let has = |text: String, part: &str| assert!(text.contains(part), "{text}\nlacks {part}");
    has(with!("softmax true", Softmax, s => s.axis = 2), "the number of dims is 2, expected 3");
    has(with!("softmax back true", SoftmaxBackward, s => s.axis = 2), "the number of dims is 2, expected 3");
    has(with!("loss Sum", CrossEntropy, l => l.spec.axis = 9), "expected 10; an axis");
    has(with!("loss Sum", CrossEntropy, l => l.spec.label_smoothing = Real(1.5)), "label_smoothing = 1.5");
    has(with!("loss Sum", CrossEntropy, l => l.spec.label_smoothing = Real(f64::NAN)), "label_smoothing = NaN");
    has(with!("loss Sum", CrossEntropy, l => l.spec.reduction = LossReduction::None), "tensor `l Sum`: dim 0 is 1, expected 5");
    has(with!("loss None", CrossEntropy, l => l.spec.reduction = LossReduction::Mean), "tensor `l None`: dim 0 is 5, expected 1");
    has(with!("loss back None", CrossEntropyBackward, l => l.dloss = l.logits), "tensor `logits`: dim 1 is 10, expected 1");
    has(with!("loss Mean", CrossEntropy, l => l.labels = l.logits), "labels are integers");
    has(fault(&|g| tensor(g, "labels").layout = rows(&[5])), "tensor `labels`: the number of dims is 1, expected 2");
    has(fault(&|g| tensor(g, "lse Sum").layout = rows(&[1, 5])), "the log-sum-exp has the dims of the labels");
    has(fault(&|g| tensor(g, "lse Sum").dtype = DType::I32), "floating-point");
    has(fault(&|g| tensor(g, "p true").dtype = DType::I8), "tensor `p true`: element type i8; softmax and cross-entropy");
    has(fault(&|g| tensor(g, "p true").layout = rows(&[5, 11])), "y has the dims of x");
    has(fault(&|g| tensor(g, "dp true").layout = rows(&[5, 11])), "dx has the dims of y");
    has(with!("softmax back true", SoftmaxBackward, s => s.y = Uid(1)), "dy has the dims of y");
    has(fault(&|g| tensor(g, "dl Sum").layout = rows(&[5, 11])), "dlogits has the dims of the logits");
}

#[test]
fn norms_that_break_a_rule() {
    let has = |text: String, part: &str| assert!(text.contains(part), "{text}\nlacks {part}");
    has(with!("norm Layer", Normalize, n => n.spec.axes = vec![]), "a row lies along at least one axis");
    has(with!("norm Layer", Normalize, n => n.spec.axes = vec![1, 1]), "a row lies along at least one axis");
    has(with!("norm Layer", Normalize, n => n.spec.axes = vec![1, 3]), "expected 4; an axis");
    has(with!("norm Layer", Normalize, n => n.spec.groups = 4), "groups = \"4 of an axis of 6\"");
    has(with!("norm Layer", Normalize, n => n.spec.groups = 2), "tensor `mean Layer`: dim 1 is 3, expected 2");
    has(with!("norm Layer", Normalize, n => n.spec.eps = Real(f64::INFINITY)), "eps = inf");
    has(with!("norm Layer", Normalize, n => n.spec.kind = NormKind::Rms), "root-mean-square norm has no mean");
    has(with!("norm Rms", Normalize, n => n.residual = None), "there is a sum where there is a residual");
    has(with!("norm back Layer", NormalizeBackward, n => n.inv = None), "the statistics are given all or not at all");
    has(with!("norm back Layer", NormalizeBackward, n => n.mean = None), "the statistics are given all or not at all");
    has(with!("norm back Rms", NormalizeBackward, n => n.dx = None), "the gradient of the sum is added to dx");
    has(with!("norm back Rms", NormalizeBackward, n => n.scale = None), "there is a gradient of the scale where there is a scale");
    let none = |n: &mut NormalizeBackward| (n.dx, n.dsum, n.dscale, n.dbias) = (None, None, None, None);
    has(with!("norm back Rms", NormalizeBackward, n => none(n)), "at least one of dx, dscale and dbias is written");
    has(fault(&|g| tensor(g, "vector").layout = rows(&[3, 2, 6, 1])), "scale and bias broadcast to x");
    has(fault(&|g| tensor(g, "dbias Rms").layout = rows(&[3, 2, 6, 1])), "scale and bias broadcast to x");
    has(fault(&|g| tensor(g, "vector").layout = rows(&[6, 2])), "dim 1 is 2, expected 5");
    has(fault(&|g| tensor(g, "dscale Rms").layout = rows(&[1, 6, 1])), "dscale has the dims of scale");
    has(fault(&|g| tensor(g, "inv Rms").dtype = DType::I32), "normalization is of floating-point data");
    has(fault(&|g| tensor(g, "normed Rms").layout = rows(&[2, 6, 4])), "y has the dims of x");
    has(fault(&|g| tensor(g, "dx Layer").layout = rows(&[2, 6, 4])), "dx has the dims of x");
    has(fault(&|g| tensor(g, "summed Layer").layout = rows(&[2, 6, 4])), "the sum has the dims of x");
}

#[test]
fn ragged_attention_that_breaks_a_rule() {
    let has = |text: String, part: &str| assert!(text.contains(part), "{text}\nlacks {part}");
    has(with!("attention", Attention, a => a.kv_offsets = None), "offsets of queries and of keys come together");
    has(with!("attention", Attention, a => (a.q_offsets, a.kv_offsets) = (None, None)), "longest_q = 5; the longest sequence");
    has(fault(&|g| tensor(g, "kv offsets").layout = rows(&[4, 1, 1, 1])), "dim 0 is 4, expected 3; there is one offset more");
}

#[test]
fn dropout_of_attention_that_breaks_a_rule() {
    let has = |text: String, part: &str| assert!(text.contains(part), "{text}\nlacks {part}");
    has(with!("attention", Attention, a => a.dropout_state = None), "dropout comes with a random state, or a seed and an offset by value");
    has(with!("attention", Attention, a => a.spec.dropout = None), "a random state of attention comes with a probability of dropout");
    has(with!("attention", Attention, a => a.spec.dropout = Some(Real(1.5))), "a probability is from 0 to 1");
    has(with!("attention back", AttentionBackward, a => a.dropout_state = None), "an offset by value comes with a seed");
    has(with!("attention back", AttentionBackward, a => a.dropout_offset = None), "a seed with its offset, not an operand");
    has(fault(&|g| tensor(g, "dropout state").layout = rows(&[3])), "a random state is four numbers");
    has(fault(&|g| tensor(g, "dropout offset").dtype = DType::F32), "seed and offset by value are of i64");
}

#[test]
fn movements_that_break_a_rule() {
    let has = |text: String, part: &str| assert!(text.contains(part), "{text}\nlacks {part}");
    let set = |name: &'static str, to: &dyn Fn(Uid, Uid) -> Movement| {
        fault(&|g| {
            let Op::Movement(movement) = node(g, name) else { panic!("{name}") };
            let (x, y) = (Op::Movement(movement.clone()).inputs()[0], movement.output());
            *movement = to(x, y);
        })
    };
    let slice = |starts: &[u64], stops: &[u64], steps: &[u64]| {
        let [starts, stops, steps] = [starts, stops, steps].map(<[u64]>::to_vec);
        set("slice", &move |x, y| Movement::Slice { starts: starts.clone(), stops: stops.clone(), steps: steps.clone(), x, y })
    };
    has(slice(&[1], &[10, 5], &[3, 2]), "starts = [1]; there is one entry for each dim");
    has(slice(&[1, 0], &[10], &[3, 2]), "stops = [10]");
    has(slice(&[1, 0], &[10, 5], &[3]), "steps = [3]");
    has(slice(&[1, 0], &[10, 5], &[0, 2]), "a step is at least 1");
    has(slice(&[9, 0], &[8, 5], &[3, 2]), "not below its start");
    has(slice(&[1, 0], &[11, 5], &[3, 2]), "tensor `transpose`: dim 0 is 10, expected 11");
    has(slice(&[1, 0], &[7, 5], &[3, 2]), "tensor `slice`: dim 0 is 3, expected 2");
    has(set("transpose", &|x, y| Movement::Transpose { permutation: vec![0, 0], x, y }), "names each dim of x once");
    has(set("transpose", &|x, y| Movement::Transpose { permutation: vec![0], x, y }), "names each dim of x once");
    has(set("transpose", &|x, y| Movement::Transpose { permutation: vec![0, 1], x, y }), "tensor `transpose`: dim 0 is 10, expected 5");
    has(set("concat", &|x, y| Movement::Concat { axis: 2, xs: vec![x], y }), "an axis is below");
    has(set("concat", &|_, y| Movement::Concat { axis: 0, xs: vec![], y }), "at least one input");
    has(set("concat", &|x, y| Movement::Concat { axis: 0, xs: vec![x, Uid(1)], y }), "tensor `x`: the number of dims is 4, expected 2");
    has(set("concat", &|x, y| Movement::Concat { axis: 0, xs: vec![x, x, x], y }), "tensor `concat`: dim 0 is 6, expected 9");
    let pad = |before: &[u64], after: &[u64], value: f64| {
        let [before, after] = [before, after].map(<[u64]>::to_vec);
        set("pad", &move |x, y| Movement::Pad { before: before.clone(), after: after.clone(), value: Real(value), x, y })
    };
    has(pad(&[1], &[0, 2], 0.0), "before = [1]");
    has(pad(&[1, 0], &[0], 0.0), "after = [0]");
    has(pad(&[1, 0], &[0, 2], f64::NAN), "value = NaN");
    has(pad(&[1, 0], &[0, 3], 0.0), "tensor `pad`: dim 1 is 5, expected 6");
    has(fault(&|g| tensor(g, "reshape").layout = rows(&[36, 1])), "the number of elements is 36, expected 35");
    has(fault(&|g| tensor(g, "wide").layout = rows(&[2, 34, 3])), "dim 0 is 35, expected 34");
    has(fault(&|g| tensor(g, "wide").dtype = DType::F16), "a movement keeps the element type");
}

#[test]
fn steps_beyond_what_positions_can_hold_are_refused() {
    const LIMIT: u64 = 1 << 31;
    let mut g = GraphBuilder::new("steps");
    let x = g.tensor("x", DType::F32, rows(&[1, 1, 9]));
    let w = g.tensor("w", DType::F32, rows(&[1, 1, 3]));
    let conv = Conv::new(ConvDirection::Fprop, x, w, Uid(0), 1, Precision::Ieee);
    let with = |change: &dyn Fn(&mut Conv)| {
        let mut conv = conv.clone();
        change(&mut conv);
        conv
    };
    let said = |error: Result<Uid, Error>, attribute: &str| {
        let text = error.expect_err(attribute).to_string();
        assert!(text.contains(&format!("{attribute} = [2147483648]")) && text.contains("below 2^31"), "{text}");
    };
    said(g.conv_fprop("conv", with(&|conv| conv.strides = vec![LIMIT])), "strides");
    said(g.conv_fprop("conv", with(&|conv| conv.pads_before = vec![LIMIT])), "pads_before");
    said(g.conv_fprop("conv", with(&|conv| conv.pads_after = vec![LIMIT])), "pads_after");
    said(g.conv_fprop("conv", with(&|conv| (conv.dilations, conv.pads_before) = (vec![LIMIT], vec![LIMIT - 1]))), "dilations");
    g.conv_fprop("conv", with(&|conv| (conv.strides, conv.pads_before) = (vec![LIMIT - 1], vec![LIMIT - 1]))).expect("just within");
    let windows = |window, dilation, pad| PoolWindows::Sliding {
        window: vec![window],
        strides: vec![1],
        dilations: vec![dilation],
        pads_before: vec![pad],
        pads_after: vec![pad],
    };
    let mut pool = |windows| g.pool("pool", PoolMode::Max, windows, x);
    said(pool(windows(LIMIT, 1, LIMIT / 2)), "window");
    said(pool(windows(2, LIMIT, LIMIT - 1)), "dilations");
    pool(windows(LIMIT - 1, 1, LIMIT / 2)).expect("just within");
}

#[test]
fn second_results_that_nobody_wants_are_left_out() -> TestResult {
    let build = |keep: bool| -> Result<Graph, Error> {
        let mut g = GraphBuilder::new("losses");
        let x = g.tensor("x", DType::F32, rows(&[2, 3, 4]));
        let labels = g.tensor("labels", DType::I32, rows(&[2, 1, 4]));
        let spec = CrossEntropySpec::new(1, LossReduction::Mean);
        let (loss, lse) = g.cross_entropy_with_lse("loss", spec, x, labels)?;
        let (pooled, index) = g.max_pool_with_index("pool", PoolWindows::tiles(&[2]), x, DType::I32)?;
        g.store(loss, "loss", DType::F32)?;
        g.store(pooled, "pooled", DType::F32)?;
        if keep {
            g.store(lse, "lse", DType::F32)?;
            g.store(index, "index", DType::I32)?;
        }
        g.finish()
    };
    let (less, whole) = (build(false)?, build(true)?);
    assert_eq!((less.tensors.len(), whole.tensors.len()), (4, 6));
    let outputs = |graph: &Graph| graph.nodes.iter().map(|node| node.op.outputs().len()).collect::<Vec<_>>();
    assert_eq!((outputs(&less), outputs(&whole)), (vec![1, 1], vec![2, 2]));
    assert_eq!(json::graph_from_json(&json::graph_to_json(&less))?, less);
    Ok(())
}
