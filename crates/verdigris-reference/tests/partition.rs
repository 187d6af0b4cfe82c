//! Graphs cut into parts, judged without the code that cuts: every op in one part, each part what a kernel takes, none waiting for another that
//! waits for it, and no fusion left undone for fear of that where it was possible. And what cutting costs by the number of ops.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::time::Instant;

use verdigris_graph::pattern::{Account, Partition, fusions, partition_with_account};
use verdigris_graph::{Access, Graph, Op, Problem, Uid};
use verdigris_reference::graph_cases::{FAMILIES, load_file};
use verdigris_reference::networks::{self, Shape};
use verdigris_reference::{crowded, fuzz};

/// Cases, random graphs, and networks, the longest of so many ops.
fn corpus(most: usize) -> Vec<(String, Graph)> {
    let mut all = Vec::new();
    for family in FAMILIES {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../cases/{family}.toml"));
        all.extend(load_file(&path).expect("the cases load").into_iter().map(|case| (case.id, case.graph)));
    }
    all.extend(crowded::cases().expect("fits").into_iter().map(|case| (case.id, case.graph)));
    all.extend((0..600).map(|seed| (format!("fuzz/{seed}"), fuzz::graph(seed).graph)));
    for seed in 0..120 {
        let ops = 8 + seed as usize * 7 % 140;
        all.push((format!("tangle/{seed}/{ops}"), networks::tangle(seed, ops).expect("valid")));
    }
    for shape in Shape::ALL {
        for ops in [most / 4, most] {
            all.push((format!("{shape:?}/{ops}"), networks::graph(shape, ops).expect("valid")));
        }
    }
    all
}

fn cut(id: &str, graph: &Graph) -> (Partition, Account) {
    partition_with_account(graph).unwrap_or_else(|error| panic!("{id}: {error}"))
}

fn is_view(graph: &Graph, op: usize) -> bool {
    let node = &graph.nodes[op].op;
    matches!(node, Op::Movement(_)) && graph.tensor(node.output()).is_some_and(|tensor| tensor.is_virtual)
}

/// For each op, the ops that write what it reads.
fn writers(graph: &Graph) -> Vec<Vec<usize>> {
    let mut producer: HashMap<Uid, usize> = HashMap::new();
    let mut all = Vec::new();
    for (i, node) in graph.nodes.iter().enumerate() {
        all.push(node.op.inputs().iter().filter_map(|uid| producer.get(uid).copied()).collect());
        producer.extend(node.op.outputs().into_iter().map(|uid| (uid, i)));
    }
    all
}

#[test]
fn every_op_is_in_one_part_and_every_part_can_run_in_its_turn() {
    for (id, graph) in corpus(120) {
        let (partition, account) = cut(&id, &graph);
        // Where in the order each op is done; a view as soon as what it is made of.
        let mut turn: Vec<Option<usize>> = vec![None; graph.nodes.len()];
        for (number, ops) in account.parts.iter().enumerate() {
            for &op in ops {
                assert_eq!(turn[op].replace(number), None, "{id}: op {op} is in two parts");
            }
        }
        let writers = writers(&graph);
        let mut known = vec![0; graph.nodes.len()];
        for op in 0..graph.nodes.len() {
            let ready = writers[op].iter().map(|&writer| known[writer]).max().unwrap_or(0);
            assert!(turn[op].is_some() || is_view(&graph, op), "{id}: op {op} is in no part");
            known[op] = turn[op].unwrap_or(ready);
            assert!(known[op] >= ready, "{id}: op {op} runs in part {} and waits for part {ready}", known[op]);
        }
        for ops in &account.parts {
            legal(&id, &graph, ops);
        }
        runs(&id, &graph, &partition);
    }
}

/// Whether a part is of one of the few kinds that there are.
fn legal(id: &str, graph: &Graph, ops: &[usize]) {
    let op = |i: &usize| &graph.nodes[*i].op;
    let dims = |i: &usize| {
        let of = if let Op::Append(append) = op(i) { append.rows } else { op(i).output() };
        graph.tensor(of).expect("there").layout.dims()
    };
    let anchors: Vec<&usize> = ops.iter().filter(|&i| !matches!(op(i), Op::Pointwise(_) | Op::Movement(_) | Op::Append(_))).collect();
    let others = || ops.iter().filter(|i| !anchors.contains(i));
    assert!(ops.len() <= 96 + 3, "{id}: {} ops", ops.len());
    match anchors[..] {
        [] => {
            assert!(ops.windows(2).all(|pair| dims(&pair[0]) == dims(&pair[1])), "{id}: a map of several dims");
            let is_copy = |i: &usize| matches!(op(i), Op::Movement(verdigris_graph::Movement::Concat { .. }));
            assert!(ops.len() == 1 || !ops.iter().any(is_copy), "{id}: a concatenation in a map");
        }
        [host] => {
            let takes = matches!(op(host), Op::Matmul(_) | Op::Conv(_) | Op::Reduction(_));
            assert!(ops.len() == 1 || takes, "{id}: something stands with {:?}", op(host));
            assert!(others().all(|i| matches!(op(i), Op::Pointwise(_))), "{id}: a movement stands with {:?}", op(host));
        }
        [conv, sum, sum_of_squares] => {
            assert!(matches!(op(conv), Op::Conv(_)), "{id}");
            assert!([sum, sum_of_squares].into_iter().all(|i| matches!(op(i), Op::Reduction(_))), "{id}");
            assert!(others().all(|i| matches!(op(i), Op::Pointwise(_))), "{id}");
        }
        _ => panic!("{id}: {} ops that have problems of their own are one part", anchors.len()),
    }
}

/// Whether every problem reads what is there already, every stored tensor is written, and once, and no problem has more than a kernel takes.
fn runs(id: &str, graph: &Graph, partition: &Partition) {
    let written: BTreeSet<Uid> = graph.nodes.iter().flat_map(|node| node.op.outputs()).collect();
    let is_given = |uid: &Uid| graph.tensor(*uid).is_some_and(|tensor| !tensor.is_virtual) && !written.contains(uid);
    let mut there: BTreeSet<Uid> = graph.tensors.iter().map(|tensor| tensor.uid).filter(is_given).collect();
    // Several copies may write parts of one tensor.
    for part in &partition.parts {
        let operands = part.problem.buffers().expect("canonical");
        let uid = |slot: verdigris_graph::Slot| part.bindings[slot.0 as usize];
        for operand in operands.iter().filter(|operand| operand.access != Access::Written) {
            // Nobody has to write what has no elements.
            let is_empty = graph.tensor(uid(operand.slot)).is_some_and(|tensor| tensor.layout.elements() == 0);
            assert!(is_empty || there.contains(&uid(operand.slot)), "{id}: {} is read before it is written", uid(operand.slot));
        }
        for operand in operands.iter().filter(|operand| operand.access == Access::Written) {
            let is_new = there.insert(uid(operand.slot));
            assert!(is_new || matches!(part.problem, Problem::Map(_)), "{id}: {} is written twice", uid(operand.slot));
        }
        assert!(part.bindings.len() <= 24 + 2, "{id}: {} tensors", part.bindings.len());
    }
    for tensor in graph.tensors.iter().filter(|tensor| !tensor.is_virtual && written.contains(&tensor.uid)) {
        assert!(there.contains(&tensor.uid) || tensor.layout.elements() == 0, "{id}: {} is not written", tensor.uid);
    }
    for temporary in &partition.temporaries {
        assert!(there.contains(&temporary.uid) || temporary.layout.elements() == 0, "{id}: {} is not written", temporary.uid);
    }
}

/// Whether parts can run one after the other, by sorting all of them.
fn can_run(part: &[usize], writers: &[Vec<usize>]) -> bool {
    let mut waits: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    for (op, writers) in writers.iter().enumerate() {
        let others = writers.iter().map(|&writer| part[writer]).filter(|&other| other != part[op]);
        waits.entry(part[op]).or_default().extend(others);
    }
    while !waits.is_empty() {
        let ready: Vec<usize> = waits.iter().filter(|(_, others)| others.is_empty()).map(|(&part, _)| part).collect();
        if ready.is_empty() {
            return false;
        }
        waits.retain(|part, _| !ready.contains(part));
        waits.values_mut().for_each(|others| others.retain(|other| !ready.contains(other)));
    }
    true
}

#[test]
fn a_fusion_is_refused_for_its_place_only_where_sorting_the_whole_graph_refuses_it() {
    let nothing_between = *fusions()[0].conditions.last().expect("conditions");
    let (mut joined, mut refused) = (0, 0);
    for (id, graph) in corpus(120).into_iter().filter(|(_, graph)| graph.nodes.len() > 1) {
        let (_, account) = cut(&id, &graph);
        let writers = writers(&graph);
        let mut part: Vec<usize> = (0..graph.nodes.len()).collect();
        for decision in &account.decisions {
            let is_join = decision.refused.is_none();
            if !is_join && decision.refused != Some(nothing_between) {
                continue;
            }
            let (from, to) = (part[decision.op], part[decision.host]);
            let together: Vec<usize> = part.iter().map(|&part| if part == from { to } else { part }).collect();
            assert_eq!(can_run(&together, &writers), is_join, "{id}: {decision:?}");
            if is_join {
                part = together;
            }
            *(if is_join { &mut joined } else { &mut refused }) += 1;
        }
        // The decisions are all that happened.
        for ops in &account.parts {
            let alike = (0..part.len()).filter(|&op| part[op] == part[ops[0]]);
            assert!(alike.eq(ops.iter().copied()), "{id}: {ops:?}");
        }
    }
    eprintln!("{joined} joins, {refused} refusals");
    assert!(joined > 2000 && refused > 300, "{joined} joins, {refused} refusals");
}

#[test]
fn every_row_of_the_table_of_fusions_is_used_and_says_why_not() {
    let table = fusions();
    let names: BTreeSet<&str> = table.iter().map(|row| row.name).collect();
    assert_eq!(names.len(), table.len(), "names are unique");
    let (mut used, mut rules) = (BTreeSet::new(), BTreeSet::new());
    for (id, graph) in corpus(120) {
        for decision in cut(&id, &graph).1.decisions {
            match decision.refused {
                None => used.extend([decision.fusion]),
                Some(rule) => rules.extend([(decision.fusion, rule)]),
            }
        }
    }
    assert_eq!(used, names);
    let listed: BTreeSet<(&str, &str)> = table.iter().flat_map(|row| row.conditions.iter().map(|rule| (row.name, *rule))).collect();
    assert!(rules.is_subset(&listed));
    assert!(
        rules.len() * 3 >= listed.len() * 2,
        "{} of {} conditions refuse something, not: {:?}",
        rules.len(),
        listed.len(),
        listed.difference(&rules).collect::<Vec<_>>()
    );
}

#[test]
fn the_work_of_cutting_grows_as_the_number_of_ops_does() {
    let work = |shape: Shape, ops: usize| {
        let graph = networks::graph(shape, ops).expect("valid");
        let (ops, work) = (graph.nodes.len() as f64, cut("", &graph).1.work as f64);
        eprintln!("{shape:?}: {work} for {ops} ops, {:.1} n log n", work / ops / ops.log2());
        (ops, work)
    };
    for shape in Shape::ALL {
        // Towers read one tensor in every layer, so that each op has many places to join and a long way to each.
        let most = if shape == Shape::Towers { 40.0 } else { 8.0 };
        let [(_, _), (few, less), (many, more)] = [500, 2000, 8000].map(|ops| work(shape, ops));
        assert!(less <= most * few * few.log2(), "{shape:?}: {less} for {few} ops");
        // Four times the ops: four times the work and some, not sixteen times.
        assert!(more / less <= 1.5 * (many / few), "{shape:?}: {less} for {few} ops, {more} for {many}");
    }
}

#[test]
#[ignore = "a timing: run it in release on a quiet machine"]
fn two_thousand_ops_are_cut_in_fifty_milliseconds() {
    for shape in Shape::ALL {
        for ops in [250, 500, 1000, 2000, 4000] {
            let graph = networks::graph(shape, ops).expect("valid");
            let time = |f: &dyn Fn()| {
                let once = || {
                    let begun = Instant::now();
                    f();
                    begun.elapsed()
                };
                (0..5).map(|_| once()).min().expect("five")
            };
            let validated = time(&|| verdigris_graph::validate::validate(&graph).expect("valid"));
            let taken = time(&|| drop(cut("", &graph)));
            let parts = cut("", &graph).1.parts.len();
            eprintln!("{shape:?}: {} ops, {parts} parts: {taken:.1?}, of which validating {validated:.1?}", graph.nodes.len());
            assert!(ops > 2000 || taken.as_millis() < 50, "{shape:?}: {taken:?} for {ops} ops");
        }
    }
}
