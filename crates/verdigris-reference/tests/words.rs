//! Problems in words, over everything that is listed, tested or drawn: what is printed reads as the same problem, and different problems print
//! differently.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::path::Path;

use verdigris_graph::{Graph, Key, Problem, pattern};
use verdigris_reference::data::Random;
use verdigris_reference::graph_cases::{self, FAMILIES};
use verdigris_reference::networks::{self, Shape};
use verdigris_reference::{bench_list, cases, conv_list, crowded, fuzz};

fn file(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn listed() -> Vec<Problem> {
    let mut all = Vec::new();
    for list in ["conv"] {
        for row in conv_list::load_file(&file(&format!("bench/lists/{list}.toml"))).expect("the list loads") {
            all.extend(row.problem.cut_as_gemm().map(Problem::Gemm));
            all.push(Problem::Conv(row.problem));
        }
    }
    all.extend(
        bench_list::load_file(&file("bench/lists/gemm.toml")).expect("the list loads").into_iter().map(|row| Problem::Gemm(row.problem)),
    );
    all.extend(cases::load_file(&file("cases/gemm.toml")).expect("the cases load").into_iter().map(|case| case.problem));
    all
}

fn parts(graph: &Graph) -> impl Iterator<Item = Problem> {
    pattern::partition(graph).expect("a valid graph can be cut").parts.into_iter().map(|part| part.problem)
}

fn tested() -> Vec<Problem> {
    let mut all = Vec::new();
    for family in FAMILIES {
        let cases = graph_cases::load_file(&file(&format!("cases/{family}.toml"))).expect("the cases load");
        all.extend(cases.iter().flat_map(|case| parts(&case.graph)));
    }
    all.extend(crowded::cases().expect("fits").iter().flat_map(|case| parts(&case.graph)));
    for shape in Shape::ALL {
        all.extend(parts(&networks::graph(shape, 60).expect("valid")));
    }
    all
}

fn drawn(count: u64) -> Vec<Problem> {
    (0..count).flat_map(|seed| parts(&fuzz::graph(seed).graph).collect::<Vec<_>>()).collect()
}

#[test]
fn what_is_printed_reads_as_the_same_problem() {
    let mut keys: HashMap<String, Key> = HashMap::new();
    let mut kinds: HashMap<&str, usize> = HashMap::new();
    for problem in listed().into_iter().chain(tested()).chain(drawn(3000)) {
        let text = problem.to_string();
        let read: Problem = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(read, problem, "{text}");
        assert!(!text.contains(['\t', '\n', '#']), "{text:?}");
        // Equal words are equal problems.
        assert_eq!(*keys.entry(text).or_insert_with(|| Key::of(&problem)), Key::of(&problem));
        *kinds.entry(problem.kind()).or_default() += 1;
    }
    for kind in ["gemm", "conv", "map", "reduce", "softmax", "pool"] {
        assert!(kinds.get(kind).is_some_and(|&count| count > 50), "{kinds:?}");
    }
    let distinct: std::collections::HashSet<&Key> = keys.values().collect();
    assert_eq!(distinct.len(), keys.len(), "different words are different problems");
}

#[test]
fn listed_problems_are_lines_that_a_person_reads() {
    let longest = listed().iter().map(|problem| problem.to_string().len()).max();
    assert!(longest.is_some_and(|length| length < 200), "{longest:?}");
}

/// Text that was damaged is refused, or is another problem; it is never taken for the one that it was, and nothing panics.
#[test]
fn damaged_words_are_refused_or_another_problem() {
    let (mut refused, mut others) = (0, 0);
    for (seed, problem) in tested().into_iter().chain(drawn(300)).enumerate() {
        let text = problem.to_string();
        let mut random = Random::new(seed as u64);
        for _ in 0..8 {
            let mut bytes = text.clone().into_bytes();
            let at = random.below(bytes.len() as u64) as usize;
            match random.below(3) {
                0 => {
                    bytes.remove(at);
                }
                1 => bytes[at] = b"0123456789()[]:@,=+<x. abcz"[random.below(27) as usize],
                _ => bytes.truncate(at),
            }
            let Ok(damaged) = String::from_utf8(bytes) else { continue };
            match damaged.parse::<Problem>() {
                Err(_) => refused += 1,
                Ok(read) => {
                    others += usize::from(read != problem);
                    assert_eq!(read.to_string().parse(), Ok(read.clone()), "{damaged}");
                }
            }
        }
    }
    assert!(refused > 1000 && others > 100, "{refused} refused, {others} others");
}
