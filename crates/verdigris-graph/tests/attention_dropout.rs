//! Dropout of attention: its problem, its gradient, and the rule of the mask.

use verdigris_graph::pattern::partition;
use verdigris_graph::problem::{AttentionProblem, Problem};
use verdigris_graph::{Attention, AttentionSpec, DropoutMask, Error, Graph, GraphBuilder, Op, Real, json};
use verdigris_tensor::{DType, Layout};

type TestResult = Result<(), Box<dyn std::error::Error>>;

fn rows(dims: &[u64]) -> Layout {
    Layout::row_major(dims).expect("legal")
}

/// With a state in memory, or a seed and an offset by value.
fn graph(p: f64, by_value: bool) -> Result<Graph, Error> {
    let mut g = GraphBuilder::new("dropout");
    let [q, k, v] = ["q", "k", "v"].map(|name| g.tensor(name, DType::Bf16, rows(&[2, 4, 9, 8])));
    let spec = AttentionSpec { dropout: Some(Real(p)), ..AttentionSpec::new(0.5) };
    let (dropout_state, dropout_offset) = if by_value {
        (Some(g.host_scalar("seed", DType::I64)), Some(g.host_scalar("offset", DType::I64)))
    } else {
        (Some(g.tensor("state", DType::I32, Layout::new(&[4], &[3]).expect("legal"))), None)
    };
    let made = g.attention("attention", Attention { dropout_state, dropout_offset, ..Attention::new(spec, q, k, v) })?;
    g.store(made.o, "o", DType::Bf16)?;
    g.finish()
}

fn problem(graph: &Graph) -> Result<(AttentionProblem, Vec<String>), Error> {
    let part = partition(graph)?.parts.remove(0);
    let names = part.bindings.iter().map(|&uid| graph.tensor(uid).map_or(String::new(), |tensor| tensor.name.clone())).collect();
    match part.problem {
        Problem::Attention(problem) => Ok((problem, names)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_problem_has_the_state_and_words_say_it() -> TestResult {
    for (by_value, bound, part) in
        [(false, &["q", "k", "v", "state", "o"][..], "dropout=0.25"), (true, &["q", "k", "v", "seed", "offset", "o"], "dropout_seed=")]
    {
        let graph = graph(0.25, by_value)?;
        let (problem, names) = problem(&graph)?;
        assert_eq!(names, bound);
        assert_eq!(
            (problem.dropout, problem.dropout_state.is_some(), problem.dropout_seed.is_some()),
            (Some(Real(0.25)), !by_value, by_value)
        );
        let whole = Problem::Attention(problem);
        assert_eq!(whole.scalars().len(), if by_value { 2 } else { 0 });
        let words = whole.to_string();
        assert!(words.contains(part), "{words}");
        assert_eq!(words.parse::<Problem>()?.canonical()?, whole, "{words}");
        assert_eq!(json::problem_from_json(&json::problem_to_json(&whole))?, whole);
        assert_eq!(json::graph_from_json(&json::graph_to_json(&graph))?, graph);
    }
    Ok(())
}

#[test]
fn a_probability_of_0_leaves_the_problem_that_there_is_without() -> TestResult {
    let mut without = graph(0.0, false)?;
    let Op::Attention(op) = &mut without.nodes[0].op else { panic!("an attention") };
    (op.spec.dropout, op.dropout_state) = (None, None);
    for by_value in [false, true] {
        assert_eq!(problem(&graph(0.0, by_value)?)?.0, problem(&without)?.0);
    }
    Ok(())
}

#[test]
fn a_problem_that_breaks_a_rule_is_refused_by_name() -> TestResult {
    let (problem, _) = problem(&graph(0.25, false)?)?;
    let refused = |problem: AttentionProblem| problem.canonical().expect_err("refused").to_string();
    let text = refused(AttentionProblem { dropout: Some(Real(1.25)), ..problem.clone() });
    assert!(text.contains("a probability is from 0 to 1"), "{text}");
    let text = refused(AttentionProblem { dropout: None, ..problem.clone() });
    assert!(text.contains("comes with a probability of dropout"), "{text}");
    let text = refused(AttentionProblem { dropout_state: None, ..problem });
    assert!(text.contains("a random state in memory or a seed and an offset by value"), "{text}");
    Ok(())
}

/// Each pair has a word of its own: the four that share a block have its four words, and no two blocks have a pair in common.
#[test]
fn pairs_have_words_of_their_own() {
    let mut seen = std::collections::HashSet::new();
    for i in 0..40 {
        for j in 0..72 {
            assert!(seen.insert((DropoutMask::fold(i), DropoutMask::fold(j), DropoutMask::word(i, j))), "{i} {j}");
        }
    }
}

#[test]
fn words_are_dropped_as_uniform_numbers_are_below_the_probability() {
    for p in [1e-9, 0.1, 0.25, 0.3, 0.5, 0.999_999_99, 1.0] {
        let last = DropoutMask::of(p).last_dropped;
        for word in [0, 255, 256, last.saturating_sub(1), last, last.saturating_add(1), u32::MAX] {
            let is_below = f64::from(word >> 8) / f64::from(1u32 << 24) < f64::from(p as f32);
            assert_eq!(word <= last, is_below, "{word} at {p}");
        }
    }
}
