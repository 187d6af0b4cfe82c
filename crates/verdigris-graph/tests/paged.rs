//! Attention to paged keys: the op's rules, and its problem.

use verdigris_graph::pattern::partition;
use verdigris_graph::problem::{AttentionProblem, Problem};
use verdigris_graph::{Attention, AttentionSpec, Causal, Error, Graph, GraphBuilder, Op, TensorDesc, json, validate};
use verdigris_tensor::{DType, Layout};

type TestResult = Result<(), Box<dyn std::error::Error>>;

fn rows(dims: &[u64]) -> Layout {
    Layout::row_major(dims).expect("legal")
}

/// Two sequences of at most three pages of four keys, out of six pages. Pages lie as `[pages, page_size, heads, elements]`.
fn graph() -> Result<Graph, Error> {
    let mut g = GraphBuilder::new("paged");
    let q = g.tensor("q", DType::Bf16, rows(&[2, 4, 1, 8]));
    let k = g.tensor("k", DType::Bf16, Layout::new(&[6, 2, 4, 8], &[64, 8, 16, 1]).expect("legal"));
    let v = g.tensor("v", DType::Bf16, rows(&[6, 2, 4, 16]));
    let page_table = Some(g.tensor("table", DType::I32, rows(&[2, 3, 1, 1])));
    let kv_lengths = Some(g.tensor("lengths", DType::I32, rows(&[2, 1, 1, 1])));
    let spec = AttentionSpec { causal: Causal::BottomRight, ..AttentionSpec::new(0.5) };
    let made = g.attention("attention", Attention { kv_lengths, page_table, ..Attention::new(spec, q, k, v) })?;
    g.store(made.o, "o", DType::Bf16)?;
    g.finish()
}

/// Three sequences of at most seven queries each, in twenty rows, to the keys of three such lines of the table.
fn ragged() -> Result<Graph, Error> {
    let mut g = GraphBuilder::new("ragged and paged");
    let q = g.tensor("q", DType::Bf16, rows(&[1, 4, 20, 8]));
    let (k, v) = (g.tensor("k", DType::Bf16, rows(&[6, 2, 4, 8])), g.tensor("v", DType::Bf16, rows(&[6, 2, 4, 16])));
    let mut numbers = |name: &str, dims: &[u64]| Some(g.tensor(name, DType::I32, rows(dims)));
    let (page_table, kv_lengths) = (numbers("table", &[3, 3, 1, 1]), numbers("lengths", &[3, 1, 1, 1]));
    let q_offsets = numbers("offsets", &[4, 1, 1, 1]);
    let spec = AttentionSpec { causal: Causal::BottomRight, longest_q: Some(7), ..AttentionSpec::new(0.5) };
    let made = g.attention("attention", Attention { kv_lengths, page_table, q_offsets, ..Attention::new(spec, q, k, v) })?;
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

fn problem() -> Result<AttentionProblem, Error> {
    match partition(&graph()?)?.parts.remove(0).problem {
        Problem::Attention(problem) => Ok(problem),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_breaks_a_rule_is_refused_by_name() {
    let has = |change: &dyn Fn(&mut Graph), part: &str| {
        let mut graph = graph().expect("legal");
        change(&mut graph);
        let text = validate::validate(&graph).expect_err(part).to_string();
        assert!(text.contains(part), "{text}\nlacks {part}");
    };
    has(&|g| tensor(g, "table").dtype = DType::I64, "numbers of pages are i32");
    has(&|g| tensor(g, "table").layout = rows(&[3, 3, 1, 1]), "dim 0 is 3, expected 2; each batch has a line");
    has(&|g| tensor(g, "table").layout = rows(&[2, 3, 2, 1]), "dim 2 is 2, expected 1; each batch has a line");
    has(&|g| tensor(g, "v").layout = rows(&[6, 2, 5, 16]), "dim 2 is 5, expected 4; paged values have the pages");
    has(&|g| tensor(g, "v").layout = rows(&[5, 2, 4, 16]), "dim 0 is 5, expected 6; paged values have the pages");
    has(&|g| tensor(g, "k").layout = rows(&[6, 2, 4, 9]), "dim 3 is 9, expected 8; paged keys have");
    for (pages, page_size, part) in [(0, 4, "there is at least one page"), (6, 0, "a page has at least one key")] {
        let change = |g: &mut Graph| {
            tensor(g, "k").layout = rows(&[pages, 2, page_size, 8]);
            tensor(g, "v").layout = rows(&[pages, 2, page_size, 16]);
        };
        has(&change, part);
    }
    let ragged = |g: &mut Graph| {
        let op = op(g);
        (op.q_offsets, op.kv_offsets) = (op.kv_lengths, op.kv_lengths);
    };
    has(&ragged, "a table of pages comes without offsets of keys");
    has(&|g| op(g).spec.longest_q = Some(1), "longest_q = 1; the longest sequence is told of ragged tensors");
}

#[test]
fn what_breaks_a_rule_of_ragged_queries_is_refused_by_name() {
    let has = |change: &dyn Fn(&mut Graph), part: &str| {
        let mut graph = ragged().expect("legal");
        change(&mut graph);
        let text = validate::validate(&graph).expect_err(part).to_string();
        assert!(text.contains(part), "{text}\nlacks {part}");
    };
    has(&|g| op(g).kv_offsets = op(g).q_offsets, "a table of pages comes without offsets of keys");
    has(&|g| op(g).page_table = None, "come together, those of queries alone where keys are paged");
    has(&|g| op(g).q_offsets = None, "longest_q = 7; the longest sequence is told of ragged tensors");
    has(&|g| (op(g).kv_offsets, op(g).q_offsets) = (op(g).q_offsets, None), "a table of pages comes without offsets of keys");
    has(&|g| op(g).spec.longest_kv = Some(9), "longest_kv = 9; paged keys number as many as");
    has(&|g| tensor(g, "table").layout = rows(&[2, 3, 1, 1]), "dim 0 is 2, expected 3; each batch has a line");
    has(&|g| tensor(g, "lengths").layout = rows(&[2, 1, 1, 1]), "dim 0 is 2, expected 3; there is a length for each batch");
    has(&|g| tensor(g, "offsets").dtype = DType::I64, "offsets are i32");
    has(&|g| tensor(g, "offsets").layout = rows(&[4, 1, 2, 1]), "dim 2 is 2, expected 1; there is one offset more");
    has(&|g| tensor(g, "q").layout = rows(&[3, 4, 20, 8]), "dim 0 is 3, expected 1; queries of ragged tensors");
    has(&|g| tensor(g, "o").layout = rows(&[3, 4, 20, 16]), "dim 0 is 3, expected 1; the result has the dims");
}

#[test]
fn ragged_queries_have_the_sequences_of_the_table() -> TestResult {
    let Problem::Attention(problem) = partition(&ragged()?)?.parts.remove(0).problem else { panic!("attention") };
    let AttentionProblem { b, s_q, s_kv, q_rows, kv_rows, pages, page_size, .. } = problem;
    assert_eq!((b, s_q, s_kv, q_rows, kv_rows, pages, page_size), (3, 7, 12, 20, 12, 6, 4));
    assert!(problem.is_ragged() && problem.is_paged() && !problem.has_ragged_keys());
    let dims = |name: &str| problem.dims(name, problem.operand(name).expect(name));
    assert_eq!([dims("q"), dims("k"), dims("v"), dims("o")], [[1, 4, 20, 8], [6, 2, 4, 8], [6, 2, 4, 16], [1, 4, 20, 16]]);
    assert_eq!([dims("q_offsets"), dims("page_table"), dims("kv_lengths")], [[4, 1, 1, 1], [3, 3, 1, 1], [3, 1, 1, 1]]);
    // Of queries the mean, of keys all that there may be.
    let mean = problem.of_mean_length();
    assert_eq!((mean.s_q, mean.s_kv, mean.dims("q", &mean.q), mean.is_paged()), (7, 12, [3, 4, 7, 8], true));
    let whole = Problem::Attention(problem.clone());
    let words = whole.to_string();
    assert!(words.contains("q_rows=20 ragged pages=6 page_size=4"), "{words}");
    assert_eq!(words.parse::<Problem>()?.canonical()?, whole, "{words}");
    assert_eq!(json::problem_from_json(&json::problem_to_json(&whole))?, whole);
    assert_eq!(json::graph_from_json(&json::graph_to_json(&ragged()?))?, ragged()?);
    for (change, part) in [
        (AttentionProblem { page_table: None, ..problem.clone() }, "those of queries alone where keys are paged"),
        (AttentionProblem { kv_offsets: problem.q_offsets.clone(), ..problem.clone() }, "comes without offsets of keys"),
        (AttentionProblem { s_q: 21, ..problem.clone() }, "a sequence has at most the rows that there are"),
    ] {
        let text = change.canonical().expect_err(part).to_string();
        assert!(text.contains(part), "{text}");
    }
    Ok(())
}

#[test]
fn the_problem_counts_keys_of_all_entries_and_words_say_it() -> TestResult {
    let problem = problem()?;
    assert_eq!((problem.b, problem.s_kv, problem.kv_rows, problem.pages, problem.page_size, problem.entries()), (2, 12, 12, 6, 4, 3));
    assert_eq!(problem.dims("k", &problem.k), [6, 2, 4, 8]);
    let operands: Vec<&str> = problem.operands().into_iter().map(|(name, ..)| name).collect();
    assert_eq!(operands, ["q", "k", "v", "kv_lengths", "page_table", "o"]);
    let whole = Problem::Attention(problem.clone());
    let words = whole.to_string();
    assert!(words.contains("pages=6 page_size=4"), "{words}");
    assert_eq!(words.parse::<Problem>()?.canonical()?, whole, "{words}");
    assert_eq!(json::problem_from_json(&json::problem_to_json(&whole))?, whole);
    assert_eq!(json::graph_from_json(&json::graph_to_json(&graph()?))?, graph()?);
    // What is told of pages says nothing without a table.
    let without = AttentionProblem { page_table: None, ..problem.clone() }.canonical()?;
    assert_eq!((without.pages, without.page_size, without.dims("k", &without.k)), (0, 0, [2, 2, 12, 8]));
    let uneven = AttentionProblem { s_kv: 13, ..problem.clone() }.canonical().expect_err("keys fill pages").to_string();
    assert!(uneven.contains("keys fill whole pages"), "{uneven}");
    Ok(())
}

#[test]
fn there_is_no_gradient() -> TestResult {
    let mut g = GraphBuilder::new("gradient");
    let q = g.tensor("q", DType::F32, rows(&[1, 1, 2, 4]));
    let [k, v] = ["k", "v"].map(|name| g.tensor(name, DType::F32, rows(&[3, 1, 4, 4])));
    let page_table = Some(g.tensor("table", DType::I32, rows(&[1, 2, 1, 1])));
    let o = g.attention("attention", Attention { page_table, ..Attention::new(AttentionSpec::new(0.5), q, k, v) })?.o;
    let d_o = g.tensor("d_o", DType::F32, rows(&[1, 1, 2, 4]));
    let error = g.gradient_from(&[(o, d_o)], &[q]).expect_err("refused").to_string();
    assert!(error.contains("attention to paged keys has no gradient"), "{error}");
    let q_offsets = Some(g.tensor("offsets", DType::I32, rows(&[2, 1, 1, 1])));
    let o = g.attention("ragged", Attention { page_table, q_offsets, ..Attention::new(AttentionSpec::new(0.5), q, k, v) })?.o;
    let error = g.gradient_from(&[(o, d_o)], &[q]).expect_err("refused").to_string();
    assert!(error.contains("attention to paged keys has no gradient"), "{error}");
    Ok(())
}
