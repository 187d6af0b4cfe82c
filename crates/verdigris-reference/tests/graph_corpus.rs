//! The case files of graphs: they load, their graphs are valid and stay what they are as text, and their truth can be computed.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::Path;

use verdigris_graph::{ConvDirection, Node, Op, Uid, json};
use verdigris_reference::cases::CaseError;
use verdigris_reference::compare::compare;
use verdigris_reference::data;
use verdigris_reference::data::Distribution;
use verdigris_reference::graph::{Selection, evaluate};
use verdigris_reference::graph_cases::{FAMILIES, GraphCase, load, load_file};

fn all() -> Vec<GraphCase> {
    let load = |family: &&str| load_file(&Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../cases/{family}.toml"))).unwrap();
    FAMILIES.iter().flat_map(load).collect()
}

#[test]
fn there_are_enough_convolutions_of_every_kind() {
    let mut directions: BTreeMap<&str, usize> = BTreeMap::new();
    let mut dims: BTreeMap<usize, usize> = BTreeMap::new();
    for case in all().iter().filter(|case| !case.device_only) {
        for node in &case.graph.nodes {
            if let Op::Conv(conv) = &node.op {
                *directions.entry(conv.direction.name()).or_default() += 1;
                *dims.entry(conv.spatial()).or_default() += 1;
            }
        }
    }
    eprintln!("{directions:?} {dims:?}");
    assert!(directions.values().sum::<usize>() >= 400);
    assert!(ConvDirection::ALL.iter().all(|direction| directions[direction.name()] > 150));
    assert!([1, 2, 3].iter().all(|spatial| dims[spatial] > 40));
}

#[test]
fn every_case_has_a_truth_that_its_own_rounding_meets() {
    let mut slowest = Vec::new();
    let (mut elements, mut unjudged) = (0, 0);
    let mut dull = Vec::new();
    for case in all().iter().filter(|case| !case.device_only) {
        let text = json::graph_to_json(&case.graph);
        assert_eq!(json::graph_from_json(&text).as_ref(), Ok(&case.graph), "{}", case.id);
        let begun = std::time::Instant::now();
        let inputs = data::graph_inputs(&case.graph, case.distribution, case.seed);
        let outputs = evaluate(&case.graph, &inputs, Selection::All).unwrap_or_else(|error| panic!("{}: {error}", case.id));
        assert!(!outputs.is_empty(), "{}", case.id);
        let unjudged_before = dull.len();
        for output in &outputs {
            let before = data::output_buffer(output, &inputs);
            let report = compare(output, &before, &output.rounded(&before));
            assert!(report.passes(), "{}: {report}", case.id);
            elements += report.elements;
            unjudged += report.unjudged;
            if report.unjudged * 4 > report.elements {
                dull.push(format!("{} ({} of {})", case.id, report.unjudged, report.elements));
            }
            // What was not written is seen, where there is something to write.
            let untouched = compare(output, &before, &before);
            assert!(!untouched.passes() || report.elements == 0 || output.dtype.is_integer(), "{}", case.id);
        }
        // Where numbers that are none stand on purpose, one result may be nothing but these; not all of them.
        if case.distribution == Distribution::Edges && dull.len() - unjudged_before < outputs.len() {
            dull.truncate(unjudged_before);
        }
        slowest.push((begun.elapsed(), case.id.clone()));
    }
    slowest.sort();
    slowest.reverse();
    eprintln!("{elements} elements, {unjudged} not judged; slowest {:?}", &slowest[..5]);
    assert!(dull.is_empty(), "cases of which nothing much is judged: {dull:#?}");
    assert!(slowest[0].0.as_millis() < 2000, "{:?}", slowest[0]);
}

#[test]
fn large_cases_leave_the_reach_of_31_bits() {
    let large: Vec<GraphCase> = all().into_iter().filter(|case| case.device_only).collect();
    let greatest = |case: &GraphCase| case.graph.tensors.iter().map(|tensor| tensor.layout.elements()).max().unwrap_or(0);
    assert!(large.iter().filter(|case| greatest(case) > 1 << 31).count() >= 5);
    // The others are as large as those of networks: nothing that the interpreter could take is kept from it. Of attention, whose tensors are small beside
    // its work, the products count.
    let scores = |case: &GraphCase| {
        let dims = |uid| case.graph.tensor(uid).map_or(&[][..], |tensor| tensor.layout.dims());
        let products = |q: Uid, k: Uid| dims(q).iter().product::<u64>() * dims(k)[2];
        let of_node = |node: &Node| match &node.op {
            // Of paged keys a page has as many as `k` says, and a row of the table as many pages.
            Op::Attention(op) => products(op.q, op.k) * op.page_table.map_or(1, |table| dims(table)[1]),
            Op::AttentionBackward(op) => products(op.q, op.k),
            _ => 0,
        };
        case.graph.nodes.iter().map(of_node).max().unwrap_or(0)
    };
    for case in large {
        assert!(greatest(&case).max(scores(&case)) > 1 << 21, "{}", case.id);
    }
}

#[test]
fn faults_of_a_case_file_are_named() {
    let group = |text: &str| load("conv", &format!("[[group]]\nid = \"g\"\ntypes = [\"bf16\"]\n{text}"));
    assert!(matches!(group("shapes = [\"n1 c8 i4 k8\"]"), Err(CaseError::Field { field: "shapes", .. })));
    assert!(matches!(group("shapes = [\"n1 c8 i2 k8 f5\"]"), Err(CaseError::Field { field: "shapes", .. })));
    assert!(matches!(group("shapes = [\"n1 c8 iq k8 f1\"]"), Err(CaseError::Field { field: "shapes", .. })));
    assert!(matches!(group("shapes = [\"n1 c8 i4 k9 f1 g2\"]"), Err(CaseError::Problem { .. })));
    assert!(matches!(group("shapes = [\"n1 c8 i4 k8 f1\"]\nlayouts = [\"tilted\"]"), Err(CaseError::Field { field: "layouts", .. })));
    assert!(matches!(group("shapes = []"), Err(CaseError::Field { field: "group", .. })));
    assert!(matches!(group("shapes = [\"n1 c8 i4 k8 f1\", \"n1 c8 i4 k8 f1\"]"), Err(CaseError::DuplicateId { .. })));
    assert!(matches!(group("shapes = 3"), Err(CaseError::Syntax(_))));
    assert!(matches!(load("gemv", ""), Err(CaseError::Field { field: "family", .. })));
}
