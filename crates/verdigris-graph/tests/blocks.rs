//! Attention by blocks of pairs: the op's rules, and its problem.

use verdigris_graph::pattern::partition;
use verdigris_graph::problem::{AttentionProblem, Problem};
use verdigris_graph::{Attention, AttentionSpec, Error, Graph, GraphBuilder, Op, TensorDesc, json, validate};
use verdigris_tensor::{DType, Layout};

type TestResult = Result<(), Box<dyn std::error::Error>>;

fn rows(dims: &[u64]) -> Layout {
    Layout::row_major(dims).expect("legal")
}

/// Blocks of 16 queries and 24 keys, a map for each head, of 20 queries and 50 keys.
fn graph() -> Result<Graph, Error> {
    let mut g = GraphBuilder::new("blocks");
    let q = g.tensor("q", DType::Bf16, rows(&[2, 4, 20, 8]));
    let (k, v) = (g.tensor("k", DType::Bf16, rows(&[2, 2, 50, 8])), g.tensor("v", DType::Bf16, rows(&[2, 2, 50, 8])));
    let block_map = Some(g.tensor("map", DType::I32, rows(&[1, 4, 2, 3])));
    let mask_blocks = Some(g.tensor("masks", DType::U8, rows(&[5, 1, 16, 3])));
    let made = g.attention("attention", Attention { block_map, mask_blocks, ..Attention::new(AttentionSpec::new(0.5), q, k, v) })?;
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

#[test]
fn what_breaks_a_rule_is_refused_by_name() {
    let has = |change: &dyn Fn(&mut Graph), part: &str| {
        let mut graph = graph().expect("legal");
        change(&mut graph);
        let text = validate::validate(&graph).expect_err(part).to_string();
        assert!(text.contains(part), "{text}\nlacks {part}");
    };
    has(&|g| op(g).mask_blocks = None, "`map`: a map of blocks and the masks of its blocks come together");
    has(&|g| op(g).block_map = None, "`masks`: a map of blocks and the masks of its blocks come together");
    has(&|g| tensor(g, "map").dtype = DType::I64, "a map of blocks is i32");
    has(&|g| tensor(g, "masks").dtype = DType::I8, "masks of blocks are bits, eight in a u8");
    has(&|g| tensor(g, "map").layout = rows(&[1, 4, 2, 2]), "tensor `map`: dim 3 is 2, expected 3");
    has(&|g| tensor(g, "map").layout = rows(&[1, 3, 2, 3]), "tensor `map`: dim 1 is 3, expected 4");
    has(&|g| tensor(g, "masks").layout = rows(&[5, 2, 16, 3]), "dim 1 is 2, expected 1; masks of blocks are");
    has(&|g| tensor(g, "masks").layout = rows(&[0, 1, 16, 3]), "dim 0 is 0, expected 1; masks of blocks are");
    has(&|g| tensor(g, "masks").layout = rows(&[5, 1, 16, 0]), "dim 3 is 0, expected 1; masks of blocks are");
}

#[test]
fn the_problem_has_the_extents_of_blocks_and_words_say_them() -> TestResult {
    let Problem::Attention(problem) = partition(&graph()?)?.parts.remove(0).problem else { panic!("attention") };
    assert_eq!((problem.blocks, problem.block_q, problem.block_kv), (5, 16, 24));
    let dims = |name: &str| problem.dims(name, problem.operand(name).expect(name));
    assert_eq!([dims("block_map"), dims("mask_blocks")], [[2, 4, 2, 3], [5, 1, 16, 3]]);
    assert_eq!(problem.block_map.as_ref().map(|map| map.strides.clone()), Some(vec![0, 6, 3, 1]));
    let whole = Problem::Attention(problem.clone());
    let words = whole.to_string();
    assert!(words.contains("blocks=5 block_q=16 block_kv=24"), "{words}");
    assert_eq!(words.parse::<Problem>()?.canonical()?, whole, "{words}");
    assert_eq!(json::problem_from_json(&json::problem_to_json(&whole))?, whole);
    assert_eq!(json::graph_from_json(&json::graph_to_json(&graph()?))?, graph()?);
    for (change, part) in [
        (AttentionProblem { mask_blocks: None, ..problem.clone() }, "come together"),
        (AttentionProblem { block_kv: 20, ..problem.clone() }, "its keys fill whole bytes"),
        (AttentionProblem { blocks: 0, ..problem.clone() }, "there is at least one mask of a block"),
    ] {
        let text = change.canonical().expect_err(part).to_string();
        assert!(text.contains(part), "{text}");
    }
    let without = AttentionProblem { block_map: None, mask_blocks: None, ..problem }.canonical()?;
    assert_eq!((without.blocks, without.block_q, without.block_kv), (0, 0, 0));
    Ok(())
}
