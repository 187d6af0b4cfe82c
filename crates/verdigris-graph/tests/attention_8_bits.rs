//! Attention of 8-bit floats: factors of heads, its problem, what it refuses.

use verdigris_graph::pattern::partition;
use verdigris_graph::problem::{AttentionProblem, Problem};
use verdigris_graph::{Attention, AttentionBackward, AttentionSpec, Error, Graph, GraphBuilder, Uid, json};
use verdigris_tensor::{DType, Layout};

type TestResult = Result<(), Box<dyn std::error::Error>>;

fn rows(dims: &[u64]) -> Layout {
    Layout::row_major(dims).expect("legal")
}

/// Four heads of queries, two of keys; the factor of values is one for all.
fn drawn(of: DType, heads: u64, factors: DType) -> Result<(GraphBuilder, Attention), Error> {
    let mut g = GraphBuilder::new("8 bits");
    let q = g.tensor("q", of, rows(&[3, 4, 5, 16]));
    let [k, v] = ["k", "v"].map(|name| g.tensor(name, of, rows(&[3, 2, 5, 16])));
    let [q_descale, k_descale, v_descale] = [("q descale", [3, heads, 1, 1]), ("k descale", [1, 2, 1, 1]), ("v descale", [1; 4])]
        .map(|(name, dims)| Some(g.tensor(name, factors, rows(&dims))));
    let attention = Attention { q_descale, k_descale, v_descale, ..Attention::new(AttentionSpec::new(0.25), q, k, v) };
    Ok((g, attention))
}

fn graph(of: DType, heads: u64, factors: DType) -> Result<Graph, Error> {
    let (mut g, attention) = drawn(of, heads, factors)?;
    let made = g.attention("attention", attention)?;
    g.store(made.o, "o", DType::Bf16)?;
    g.finish()
}

#[test]
fn the_problem_has_the_factors_and_words_say_them() -> TestResult {
    let graph = graph(DType::E4m3, 2, DType::F32)?;
    assert_eq!(json::graph_from_json(&json::graph_to_json(&graph))?, graph);
    let part = partition(&graph)?.parts.remove(0);
    let names: Vec<_> = part.bindings.iter().filter_map(|&uid| graph.tensor(uid)).map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["q", "k", "v", "q descale", "k descale", "v descale", "o"]);
    let Problem::Attention(problem) = &part.problem else { panic!("{:?}", part.problem) };
    let strides = |view: &Option<verdigris_graph::View>| view.as_ref().map(|view| view.strides.clone());
    let AttentionProblem { q_descale, k_descale, v_descale, .. } = problem;
    assert_eq!([q_descale, k_descale, v_descale].map(strides), [Some(vec![2, 1, 0, 0]), Some(vec![0, 1, 0, 0]), Some(vec![0; 4])]);
    let words = part.problem.to_string();
    assert!(words.contains("q_descale=") && words.contains("v_descale="), "{words}");
    assert_eq!(words.parse::<Problem>()?.canonical()?, part.problem, "{words}");
    assert_eq!(json::problem_from_json(&json::problem_to_json(&part.problem))?, part.problem);

    let refused = |problem: AttentionProblem| problem.canonical().map_or_else(|error| error.to_string(), |_| String::new());
    let halves = |view: &verdigris_graph::View| verdigris_graph::View { dtype: DType::Bf16, ..view.clone() };
    let [q, k, v] = [&problem.q, &problem.k, &problem.v].map(halves);
    let text = refused(AttentionProblem { q, k, v, ..problem.clone() });
    assert!(text.contains("queries, keys and values of 8 bits have factors"), "{text}");
    let text = refused(AttentionProblem { k_descale: problem.k_descale.as_ref().map(halves), ..problem.clone() });
    assert!(text.contains("factors of queries, keys and values are f32"), "{text}");
    Ok(())
}

#[test]
fn what_breaks_a_rule_is_told() -> TestResult {
    let refused = |made: Result<Graph, Error>, part: &str| {
        let text = made.map_or_else(|error| error.to_string(), |_| String::new());
        assert!(text.contains(part), "{text}\nlacks {part}");
    };
    refused(graph(DType::F16, 2, DType::F32), "queries, keys and values of 8 bits have factors");
    refused(graph(DType::I8, 2, DType::F32), "attention is of 8-bit floats, f16, bf16, f32 and f64");
    refused(graph(DType::E5m2, 2, DType::Bf16), "factors of queries, keys and values are f32");
    refused(graph(DType::E5m2, 3, DType::F32), "tensor `q descale`: dim 1 is 3, expected 2");
    Ok(())
}

/// Four heads of queries, two of keys and values kept in other types.
fn kept(of: DType, [k, v]: [DType; 2], with_q_descale: bool) -> Result<Graph, Error> {
    let mut g = GraphBuilder::new("a cache of 8 bits");
    let q = g.tensor("q", of, rows(&[3, 4, 5, 16]));
    let (k, v) = (g.tensor("k", k, rows(&[3, 2, 7, 16])), g.tensor("v", v, rows(&[3, 2, 7, 16])));
    let [q_descale, k_descale, v_descale] =
        ["q descale", "k descale", "v descale"].map(|name| g.tensor(name, DType::F32, rows(&[3, 2, 1, 1])));
    let q_descale = with_q_descale.then_some(q_descale);
    let attention = Attention {
        q_descale,
        k_descale: Some(k_descale),
        v_descale: Some(v_descale),
        ..Attention::new(AttentionSpec::new(0.25), q, k, v)
    };
    let made = g.attention("attention", attention)?;
    g.store(made.o, "o", of)?;
    g.finish()
}

#[test]
fn keys_and_values_alone_may_be_of_8_bits() -> TestResult {
    for of in [DType::Bf16, DType::F16, DType::F32, DType::F64] {
        let graph = kept(of, [DType::E4m3; 2], false)?;
        assert_eq!(json::graph_from_json(&json::graph_to_json(&graph))?, graph);
        let part = partition(&graph)?.parts.remove(0);
        let words = part.problem.to_string();
        assert!(words.contains("e4m3") && words.contains("k_descale="), "{words}");
        assert_eq!(words.parse::<Problem>()?.canonical()?, part.problem, "{words}");
        let Problem::Attention(problem) = part.problem else { panic!("{words}") };
        // A factor of queries that have none, and types that differ.
        let told = |problem: AttentionProblem| problem.canonical().map_or_else(|error| error.to_string(), |_| String::new());
        let text = told(AttentionProblem { q_descale: problem.k_descale.clone(), ..problem.clone() });
        assert!(text.contains("queries, keys and values of 8 bits have factors"), "{text}");
        let v = verdigris_graph::View { dtype: DType::E5m2, ..problem.v.clone() };
        let text = told(AttentionProblem { v, ..problem });
        assert!(text.contains("keys and values of one of 8 bits beside queries"), "{text}");
    }
    let refused = |made: Result<Graph, Error>, part: &str| {
        let text = made.map_or_else(|error| error.to_string(), |_| String::new());
        assert!(text.contains(part), "{text}\nlacks {part}");
    };
    refused(kept(DType::Bf16, [DType::E4m3; 2], true), "queries, keys and values of 8 bits have factors");
    for types in [[DType::E4m3, DType::E5m2], [DType::E4m3, DType::Bf16], [DType::Bf16, DType::E4m3], [DType::F16; 2]] {
        refused(kept(DType::Bf16, types, false), "keys and values of one of 8 bits beside queries");
    }
    refused(kept(DType::E4m3, [DType::E5m2; 2], true), "keys and values of one of 8 bits beside queries");
    Ok(())
}

#[test]
fn there_is_no_gradient_of_a_cache_of_8_bits() -> TestResult {
    let mut g = GraphBuilder::new("a cache of 8 bits");
    let q = g.tensor("q", DType::Bf16, rows(&[1, 2, 5, 16]));
    let [k, v] = ["k", "v"].map(|name| g.tensor(name, DType::E4m3, rows(&[1, 2, 7, 16])));
    let d_o = g.tensor("d_o", DType::Bf16, rows(&[1, 2, 5, 16]));
    refuses_gradients(g, Attention::new(AttentionSpec::new(0.25), q, k, v), d_o, q)
}

/// The rule of differentiation refuses, and so does the op of the gradient.
fn refuses_gradients(mut g: GraphBuilder, attention: Attention, d_o: Uid, wanted: Uid) -> TestResult {
    let read = [attention.q, attention.k, attention.v];
    let made = g.attention("attention", attention)?;
    let told = g.gradient_from(&[(made.o, d_o)], &[wanted]).map_or_else(|error| error.to_string(), |_| String::new());
    assert!(told.contains("attention of 8-bit floats has no gradient"), "{told}");
    let back = AttentionBackward::new(AttentionSpec::new(0.25), read, made.o, made.log_sum_exp, d_o);
    let made = g.attention_backward("backward", back)?;
    g.store(made.dq, "dq", DType::Bf16)?;
    let told = g.finish().map_or_else(|error| error.to_string(), |_| String::new());
    assert!(told.contains("attention of 8-bit floats has no gradient"), "{told}");
    Ok(())
}

#[test]
fn there_is_no_gradient() -> TestResult {
    let (mut g, attention) = drawn(DType::E4m3, 2, DType::F32)?;
    let (d_o, v) = (g.tensor("d_o", DType::Bf16, rows(&[3, 4, 5, 16])), attention.v);
    refuses_gradients(g, attention, d_o, v)
}
