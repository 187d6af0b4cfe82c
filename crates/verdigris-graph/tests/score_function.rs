//! Attention with a function of the score: the op's rules, its problem, and its text.

use verdigris_graph::pattern::partition;
use verdigris_graph::problem::{AttentionPass, AttentionProblem, Problem};
use verdigris_graph::{
    Attention, AttentionSpec, BinaryOp, ChainStep, Error, Graph, GraphBuilder, HostScalar, Key, Op, Real, ScoreFunction, ScorePlace,
    ScoreStep, TensorDesc, TernaryOp, UnaryOp, json, validate,
};
use verdigris_tensor::{DType, Layout};

type TestResult = Result<(), Box<dyn std::error::Error>>;

fn rows(dims: &[u64]) -> Layout {
    Layout::row_major(dims).expect("legal")
}

/// `t · gate[head] + table[query, key]` in bf16, −∞ where the query's bit is 0, and less a thousandth of the key.
fn score() -> ScoreFunction {
    let mut score = ScoreFunction::default();
    let t = score.push(ScoreStep::Given);
    let gate = score.push(ScoreStep::Operand(0));
    let product = score.push(ScoreStep::Binary { f: BinaryOp::Mul, x: t, z: gate });
    let table = score.push(ScoreStep::Operand(2));
    let sum = score.push(ScoreStep::Binary { f: BinaryOp::Add, x: product, z: table });
    let rounded = score.push(ScoreStep::Round { dtype: DType::Bf16, x: sum });
    let shown = score.push(ScoreStep::Operand(1));
    let hidden = score.push(ScoreStep::Number(Real(f64::NEG_INFINITY)));
    let chosen = score.push(ScoreStep::Ternary { f: TernaryOp::Select, x: rounded, z: hidden, t: shown });
    let key = score.push(ScoreStep::Place(ScorePlace::Key));
    let small = score.push(ScoreStep::Unary { f: UnaryOp::Affine { scale: Real(0.001), shift: Real(0.0) }, x: key });
    score.push(ScoreStep::Binary { f: BinaryOp::Sub, x: chosen, z: small });
    score
}

fn graph() -> Result<Graph, Error> {
    let mut g = GraphBuilder::new("score");
    let q = g.tensor("q", DType::Bf16, rows(&[2, 4, 20, 8]));
    let (k, v) = (g.tensor("k", DType::Bf16, rows(&[2, 2, 50, 8])), g.tensor("v", DType::Bf16, rows(&[2, 2, 50, 8])));
    let gate = g.tensor("gate", DType::F16, rows(&[1, 4, 1, 1]));
    let shown = g.tensor("shown", DType::U8, rows(&[2, 1, 20, 1]));
    let table = g.tensor("table", DType::F32, rows(&[20, 50]));
    let plain = Attention::new(AttentionSpec::new(0.5), q, k, v);
    let made = g.attention("attention", Attention { score: Some(score()), score_operands: vec![gate, shown, table], ..plain })?;
    g.store(made.o, "o", DType::Bf16)?;
    g.finish()
}

fn tensor<'g>(graph: &'g mut Graph, name: &str) -> &'g mut TensorDesc {
    graph.tensors.iter_mut().find(|tensor| tensor.name == name).expect("a tensor of the graph")
}

fn op(graph: &mut Graph) -> &mut Attention {
    match &mut graph.nodes[0].op {
        Op::Attention(op) => op,
        other => panic!("{other:?}"),
    }
}

fn steps(graph: &mut Graph) -> &mut Vec<ScoreStep> {
    &mut op(graph).score.as_mut().expect("a function").steps
}

#[test]
fn what_breaks_a_rule_is_refused_by_name() {
    let has = |change: &dyn Fn(&mut Graph), part: &str| {
        let mut graph = graph().expect("legal");
        change(&mut graph);
        let text = validate::validate(&graph).expect_err(part).to_string();
        assert!(text.contains(part), "{text}\nlacks {part}");
    };
    has(&|g| op(g).spec.soft_cap = Some(Real(2.0)), "soft_cap = 2.0; a score function comes in place of a soft cap");
    has(&|g| op(g).score = None, "tensor `gate`: score operands are read by a score function");
    let empty = |g: &mut Graph| {
        steps(g).clear();
        op(g).score_operands.clear();
    };
    has(&empty, "the number of steps of the score = 0; a score function has 1 to 64 steps");
    let long = |g: &mut Graph| (0..60).for_each(|_| steps(g).push(ScoreStep::Unary { f: UnaryOp::Neg, x: 11 }));
    has(&long, "the number of steps of the score = 72; a score function has 1 to 64 steps");
    has(&|g| steps(g)[2] = ScoreStep::Unary { f: UnaryOp::Neg, x: 2 }, "a step of a score function names values of earlier steps");
    has(
        &|g| steps(g)[2] = ScoreStep::Unary { f: UnaryOp::Neg, x: 1 },
        "score = Given; every step of a score function but the last is named by a later one",
    );
    has(&|g| steps(g)[7] = ScoreStep::Number(Real(f64::NAN)), "score = NaN; a number of a score function is one");
    has(
        &|g| steps(g)[5] = ScoreStep::Round { dtype: DType::I32, x: 4 },
        "element type i32; a value of a score function is rounded to f16, bf16 or f32",
    );
    has(&|g| steps(g)[1] = ScoreStep::Operand(3), "Operand(3); a step reads a score operand that there is");
    has(&|g| steps(g)[1] = ScoreStep::Operand(2), "tensor `gate`: each score operand is read by one step");
    let sharp = UnaryOp::Softplus { beta: Real(0.0) };
    has(&|g| steps(g)[10] = ScoreStep::Unary { f: sharp, x: 9 }, "beta = 0; the beta of softplus is finite and above 0");
    let two_more = |g: &mut Graph| {
        let gate = op(g).score_operands[0];
        op(g).score_operands.extend([gate, gate]);
    };
    has(&two_more, "the number of score operands = 5; a score function reads at most 4 tensors");
    has(&|g| tensor(g, "shown").dtype = DType::I64, "element type i64; score operands are u8, i32, f16, bf16, f32 or f64");
    has(&|g| tensor(g, "shown").layout = rows(&[2, 1, 19, 1]), "tensor `shown`: dim 2 is 19, expected 20");
    has(&|g| tensor(g, "table").layout = rows(&[2, 20, 50]), "tensor `table`: dim 0 is 2, expected 4");
}

/// `t + table[key − query + 1]` of a table of these dims, whose place is made of the score too where that is asked for.
fn gathering(dims: &[u64], by_score: bool) -> Result<Graph, Error> {
    let mut g = GraphBuilder::new("gathering");
    let [q, k, v] = ["q", "k", "v"].map(|name| g.tensor(name, DType::F32, rows(&[2, 3, 5, 8])));
    let table = g.tensor("table", DType::F32, rows(dims));
    let mut score = ScoreFunction::default();
    let t = score.push(ScoreStep::Given);
    let [query, key] = [ScorePlace::Query, ScorePlace::Key].map(|place| score.push(ScoreStep::Place(place)));
    let apart = score.push(ScoreStep::Binary { f: BinaryOp::Sub, x: key, z: query });
    let place = score.push(ScoreStep::Binary { f: BinaryOp::Add, x: apart, z: if by_score { t } else { query } });
    let entry = score.push(ScoreStep::Gather { operand: 0, x: place });
    score.push(ScoreStep::Binary { f: BinaryOp::Add, x: t, z: entry });
    let plain = Attention::new(AttentionSpec::new(0.5), q, k, v);
    let made = g.attention("attention", Attention { score: Some(score), score_operands: vec![table], ..plain })?;
    g.store(made.o, "o", DType::F32)?;
    g.finish()
}

/// A table has any number of elements along its last dim, and broadcasts along the others; its words and JSON are its own again.
#[test]
fn a_table_has_a_last_dim_of_its_own() {
    for dims in [&[1, 3, 1, 77][..], &[2, 1, 5, 1], &[77], &[5, 2], &[1; 4]] {
        let graph = gathering(dims, false).unwrap_or_else(|error| panic!("{dims:?}: {error}"));
        assert_eq!(json::graph_from_json(&json::graph_to_json(&graph)).expect("its own"), graph);
        let problem = partition(&graph).expect("a problem").parts.remove(0).problem;
        let words = problem.to_string();
        assert!(words.contains(&format!("gather(4,{},", dims[dims.len() - 1])), "{words}");
        assert_eq!(words.parse::<Problem>().unwrap_or_else(|error| panic!("{words}: {error}")), problem, "{words}");
        let Problem::Attention(p) = &problem else { panic!("{words}") };
        let (name, view) = p.score_operands().next().expect("a table");
        assert_eq!(p.dims(name, view), [2, 3, 5, dims[dims.len() - 1]]);
    }
    let refused = |dims: &[u64], by_score| gathering(dims, by_score).expect_err("refused").to_string();
    let text = refused(&[1, 2, 1, 77], false);
    assert!(text.contains("dim 1 is 2, expected 3; dims broadcast from the right"), "{text}");
    assert!(refused(&[1, 3, 1, (1 << 23) + 1], false).contains("= 8388609; a table has 1 to 8388608 elements along its last dim"));
    assert!(refused(&[1, 3, 1, 0], false).contains("= 0; a table has 1 to 8388608 elements along its last dim"));
    assert!(
        refused(&[1, 3, 1, 77], true).contains("the place of what is gathered is of coordinates, numbers and operands, not of the score")
    );
}

/// Coordinates of a dim beyond 2²⁴ are no numbers of f32, and are of f64.
#[test]
fn coordinates_are_exact() {
    let of = |keys: u64, dtype: DType| {
        let mut g = GraphBuilder::new("far");
        let [q, k, v] = [1, keys, keys].map(|rows_of| g.tensor("x", dtype, rows(&[1, 1, rows_of, 8])));
        let mut score = ScoreFunction::default();
        let (t, key) = (score.push(ScoreStep::Given), score.push(ScoreStep::Place(ScorePlace::Key)));
        score.push(ScoreStep::Binary { f: BinaryOp::Add, x: t, z: key });
        let made = g.attention("attention", Attention { score: Some(score), ..Attention::new(AttentionSpec::new(0.5), q, k, v) })?;
        g.store(made.o, "o", dtype)?;
        g.finish()
    };
    of(1 << 24, DType::Bf16).expect("each is a number");
    of((1 << 24) + 1, DType::F64).expect("each is a number");
    let text = of((1 << 24) + 1, DType::Bf16).expect_err("2^24 + 1").to_string();
    assert!(text.contains("dim 3 of the scores is 16777217, expected 16777216; coordinates"), "{text}");
}

/// The graph of `attention(score, operands)` and of its gradient with respect to `wanted`: tensors by the names q, k, v, o, d_o and `operand`, f32.
fn differentiated(score: ScoreFunction, operands: &[&[u64]], wanted: &str) -> Result<Graph, Error> {
    let mut g = GraphBuilder::new("gradient");
    let [q, k, v] = ["q", "k", "v"].map(|name| g.tensor(name, DType::F32, rows(&[1, 1, 5, 8])));
    let d_o = g.tensor("d_o", DType::F32, rows(&[1, 1, 5, 8]));
    let score_operands: Vec<_> = operands.iter().map(|dims| g.tensor("operand", DType::F32, rows(dims))).collect();
    let of = match wanted {
        "operand" => score_operands[0],
        "k" => k,
        _ => q,
    };
    let plain = Attention::new(AttentionSpec::new(0.5), q, k, v);
    let made = g.attention("attention", Attention { score: Some(score), score_operands, ..plain })?;
    g.store(made.o, "o", DType::F32)?;
    let gradient = g.gradient_from(&[(made.o, d_o)], &[of])?[0];
    g.store(gradient, "gradient", DType::F32)?;
    g.finish()
}

#[test]
fn the_gradient_has_the_function_and_what_it_reads() -> TestResult {
    let mut score = ScoreFunction::default();
    let (t, gate) = (score.push(ScoreStep::Given), score.push(ScoreStep::Operand(0)));
    score.push(ScoreStep::Binary { f: BinaryOp::Mul, x: t, z: gate });
    let graph = differentiated(score.clone(), &[&[5, 1]], "k")?;
    let Op::AttentionBackward(back) = &graph.nodes[1].op else { panic!("{graph:?}") };
    let Op::Attention(forward) = &graph.nodes[0].op else { panic!("{graph:?}") };
    assert_eq!((back.score.as_ref(), &back.score_operands), (Some(&score), &forward.score_operands));
    assert_eq!((back.dq, back.dv, back.dk.is_some()), (None, None, true));
    assert_eq!(json::graph_from_json(&json::graph_to_json(&graph))?, graph);
    // Its problem reads what the function does, has the steps alone, and gives the slope: the gate.
    let Problem::Attention(problem) = partition(&graph)?.parts.remove(1).problem else { panic!("attention") };
    let names: Vec<&str> = problem.operands().iter().map(|(name, ..)| *name).collect();
    assert_eq!(names, ["q", "k", "v", "score_0", "o", "log_sum_exp", "d_o", "dk"]);
    let own = problem.score.clone().expect("a function");
    let sloped = problem.sloped_score().expect("a slope");
    assert_eq!((own.steps.len(), &sloped.steps[..3]), (3, &own.steps[..]));
    assert_eq!(sloped.steps[3..], [ChainStep::Unary { f: UnaryOp::Identity, x: 1 }]);
    let as_problem = Problem::Attention(problem);
    let words = as_problem.to_string();
    assert!(words.starts_with("attention backward") && words.contains(" + given + load("), "{words}");
    assert_eq!(words.parse::<Problem>().and_then(Problem::canonical).as_ref(), Ok(&as_problem), "{words}");
    Ok(())
}

/// Of what is read alone, and of a table, whose entries are its last dim.
#[test]
fn what_the_function_reads_has_a_gradient() -> TestResult {
    let mut score = ScoreFunction::default();
    let (t, gate, key) = (score.push(ScoreStep::Given), score.push(ScoreStep::Operand(0)), score.push(ScoreStep::Place(ScorePlace::Key)));
    let entry = score.push(ScoreStep::Gather { operand: 1, x: key });
    let gated = score.push(ScoreStep::Binary { f: BinaryOp::Mul, x: t, z: gate });
    score.push(ScoreStep::Binary { f: BinaryOp::Sub, x: gated, z: entry });
    let slope = |number| score.operand_slope("attention", number).map(|sloped| sloped.steps[score.steps.len()..].to_vec());
    // By the gate the product, by the entry −1.
    assert_eq!(slope(0)?, [ScoreStep::Unary { f: UnaryOp::Identity, x: t }]);
    assert_eq!(slope(1)?, [ScoreStep::Number(Real(-1.0))]);
    let graph = differentiated(score, &[&[5, 1], &[1, 7]], "operand")?;
    let Op::AttentionBackward(back) = &graph.nodes[1].op else { panic!("{graph:?}") };
    assert_eq!((back.dq, back.d_score_operands.len(), back.d_score_operands[0].is_some()), (None, 2, true));
    assert_eq!(json::graph_from_json(&json::graph_to_json(&graph))?, graph);
    let Problem::Attention(mut problem) = partition(&graph)?.parts.remove(1).problem else { panic!("attention") };
    let gradient = problem.operand("d_score_0").expect("written").clone();
    assert_eq!(problem.dims("d_score_0", &gradient), [1, 1, 5, 1]);
    let as_problem = Problem::Attention(problem.clone());
    assert_eq!(as_problem.to_string().parse::<Problem>().and_then(Problem::canonical).as_ref(), Ok(&as_problem), "{as_problem}");
    let Problem::Attention(AttentionProblem { pass: AttentionPass::Backward { d_score, .. }, .. }) = &as_problem else {
        panic!("backward")
    };
    assert_eq!(d_score.len(), 1);
    // Of more than the function reads there is none.
    let AttentionPass::Backward { d_score, .. } = &mut problem.pass else { panic!("backward") };
    d_score.resize(3, Some(gradient));
    let error = problem.canonical().expect_err("three of two").to_string();
    assert!(error.contains("there is a gradient of what is read"), "{error}");
    Ok(())
}

#[test]
fn what_has_no_gradient_is_refused_by_name() {
    let refused = |score: ScoreFunction, operands: &[&[u64]], wanted: &str, part: &str| {
        let text = differentiated(score, operands, wanted).expect_err(part).to_string();
        assert!(text.contains(part), "{text}\nlacks {part}");
    };
    let mut curved = ScoreFunction::default();
    let (t, one) = (curved.push(ScoreStep::Given), curved.push(ScoreStep::Number(Real(1.0))));
    curved.push(ScoreStep::Binary { f: BinaryOp::Backward(UnaryOp::Tanh), x: one, z: t });
    refused(curved, &[], "q", "tensor `score`: no gradient; the second derivative of a curved activation is no op");
    // Each quotient of two values that depend on t takes several steps more.
    let mut long = ScoreFunction::default();
    let (mut x, mut z) = (long.push(ScoreStep::Given), 0);
    for _ in 0..63 {
        (x, z) = (long.push(ScoreStep::Binary { f: BinaryOp::Atan2, x, z }), x);
    }
    assert_eq!(long.steps.len(), ScoreFunction::MOST_STEPS);
    refused(long, &[], "q", "; a score function with a gradient has at most 256 steps, with those of its slope");
}

/// Steps of a slope as text: `f(x, z)`, where `0` is the first step.
fn slope_of(build: &dyn Fn(&mut ScoreFunction)) -> String {
    let mut score = ScoreFunction::default();
    build(&mut score);
    let sloped = score.slope("attention").unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(sloped.steps[..score.steps.len()], score.steps);
    let name = |step: &ScoreStep| match step {
        ScoreStep::Number(number) => number.to_string(),
        ScoreStep::Unary { f, x } => format!("{}({x})", f.name()),
        ScoreStep::Binary { f: BinaryOp::Backward(f), x, z } => format!("d_{}({x},{z})", f.name()),
        ScoreStep::Binary { f, x, z } => format!("{}({x},{z})", f.name()),
        ScoreStep::Ternary { f, x, z, t } => format!("{}({x},{z},{t})", f.name()),
        other => format!("{other:?}"),
    };
    sloped.steps[score.steps.len()..].iter().map(name).collect::<Vec<_>>().join(" ")
}

/// What is behind the function's own steps: nothing that the slope is not made of, no product with 1, each step once.
#[test]
fn the_slope_is_steps() {
    let t = |score: &mut ScoreFunction| score.push(ScoreStep::Given);
    let number = |score: &mut ScoreFunction, x: f64| score.push(ScoreStep::Number(Real(x)));
    let key = |score: &mut ScoreFunction| score.push(ScoreStep::Place(ScorePlace::Key));
    let both = |score: &mut ScoreFunction, f, x, z| score.push(ScoreStep::Binary { f, x, z });
    let slope = |build: &dyn Fn(&mut ScoreFunction), text: &str| assert_eq!(slope_of(build), text);
    slope(&|s| _ = t(s), "1");
    // t + key, in bf16.
    slope(
        &|s| {
            let (x, z) = (t(s), key(s));
            let x = both(s, BinaryOp::Add, x, z);
            s.push(ScoreStep::Round { dtype: DType::Bf16, x });
        },
        "1",
    );
    // No t at all, and t by steps alone.
    slope(&|s| _ = key(s), "0");
    slope(
        &|s| {
            let x = t(s);
            s.push(ScoreStep::Unary { f: UnaryOp::Floor, x });
        },
        "0",
    );
    // 20 · tanh(t / 20).
    slope(
        &|s| {
            let (x, z) = (t(s), number(s, 20.0));
            let x = both(s, BinaryOp::Div, x, z);
            let x = s.push(ScoreStep::Unary { f: UnaryOp::Tanh, x });
            both(s, BinaryOp::Mul, x, z);
        },
        "d_tanh(1,2) div(5,1)",
    );
    // What is not shown is −∞, and has the slope 0; no factor is infinite.
    slope(
        &|s| {
            let (x, z, shown) = (t(s), number(s, f64::NEG_INFINITY), key(s));
            s.push(ScoreStep::Ternary { f: TernaryOp::Select, x, z, t: shown });
        },
        "not(2) not(4) 1 d_relu(6,5)",
    );
    // Twice the same product.
    slope(
        &|s| {
            let (x, again) = (t(s), t(s));
            both(s, BinaryOp::Add, x, again);
        },
        "2",
    );
    // Numbers are multiplied here, and not for each pair: 2 · t · 3.
    slope(
        &|s| {
            let (x, two, three) = (t(s), number(s, 2.0), number(s, 3.0));
            let x = both(s, BinaryOp::Mul, x, two);
            both(s, BinaryOp::Mul, x, three);
        },
        "6",
    );
    // t³.
    slope(
        &|s| {
            let (x, z) = (t(s), number(s, 3.0));
            both(s, BinaryOp::Pow, x, z);
        },
        "2 pow(0,3) mul(1,4)",
    );
}

#[test]
fn the_problem_reads_operands_and_words_say_them() -> TestResult {
    let Problem::Attention(problem) = partition(&graph()?)?.parts.remove(0).problem else { panic!("attention") };
    let names: Vec<&str> = problem.operands().iter().map(|(name, ..)| *name).collect();
    assert_eq!(names, ["q", "k", "v", "score_0", "score_1", "score_2", "o"]);
    // In the order in which steps read them.
    let strides: Vec<_> = problem.score_operands().map(|(_, view)| view.strides.clone()).collect();
    assert_eq!(strides, [vec![0, 1, 0, 0], vec![0, 0, 50, 1], vec![20, 0, 1, 0]]);
    let as_problem = Problem::Attention(problem.clone());
    let words = as_problem.to_string();
    assert!(
        words.contains(" + given + load(") && words.contains(" + scalar(-inf) + ") && words.contains(" + index((0,0,0,1)) + "),
        "{words}"
    );
    assert_eq!(words.parse::<Problem>().and_then(Problem::canonical).as_ref(), Ok(&as_problem), "{words}");
    let text = serde_json::to_string(&as_problem)?;
    assert_eq!(serde_json::from_str::<Problem>(&text)?, as_problem, "{text}");
    // What steps say is part of what is asked.
    let mut other = problem.clone();
    other.score.as_mut().expect("a function").steps[7] = ChainStep::Scalar(HostScalar::Fixed(Real(0.0)));
    assert_ne!(Key::of(&Problem::Attention(other)), Key::of(&as_problem));
    for (wrong, part) in [
        (AttentionProblem { soft_cap: Some(Real(2.0)), ..problem.clone() }, "in place of a soft cap"),
        (with(&problem, 0, ChainStep::Scalar(HostScalar::Bound(problem.q.slot))), "reads scores, numbers, operands and coordinates"),
        (with(&problem, 9, ChainStep::Index { strides: vec![0, 0, 0, 2] }), "is the batch, the head, the query or the key"),
        (with(&problem, 9, ChainStep::Index { strides: vec![0, 0, 0] }), "is the batch, the head, the query or the key"),
    ] {
        let text = wrong.canonical().expect_err(part).to_string();
        assert!(text.contains(part), "{text}");
    }
    // Without one, nothing of it is left.
    let without = AttentionProblem { score: None, ..problem }.canonical()?;
    assert_eq!((without.score_operands().count(), without.operands().len()), (0, 4));
    Ok(())
}

fn with(problem: &AttentionProblem, at: usize, step: ChainStep) -> AttentionProblem {
    let mut problem = problem.clone();
    problem.score.as_mut().expect("a function").steps[at] = step;
    problem
}

#[test]
fn a_graph_is_read_as_it_was_written() -> TestResult {
    let graph = graph()?;
    let text = json::graph_to_json(&graph);
    assert!(text.contains("-inf"), "{text}");
    assert_eq!(json::graph_from_json(&text)?, graph);
    Ok(())
}
