//! The table of ops against what is written from it and what is written by hand beside it.
#![forbid(unsafe_code)]

use std::path::Path;

use verdigris_graph::spec::{Method, SPECS, page, stubs};

fn text(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

const AGAIN: &str = "`cargo run -p verdigris-graph --example ops` writes it again";

#[test]
fn the_page_and_the_stubs_are_those_of_the_table() {
    assert_eq!(text("docs/ops.md"), page(), "docs/ops.md; {AGAIN}");
    let native = text("crates/verdigris-python/python/verdigris/_native.pyi");
    assert!(native.contains(&stubs()), "_native.pyi; {AGAIN}");
    assert_eq!(native.matches(&stubs()).count(), 1);
}

/// A parameter of a Python method: its name, and the default as Python has it.
type Parameter = (String, Option<String>);

fn of_stub(method: &Method) -> Vec<Parameter> {
    let one = |parameter: &str| {
        let (declared, default) = parameter.split_once(" = ").map_or((parameter, None), |(name, value)| (name, Some(value)));
        let name = declared.split(':').next().unwrap_or_default();
        (name.to_owned(), default.map(str::to_owned))
    };
    method.parameters().into_iter().map(one).collect()
}

/// The signature that stands in front of a method of the bindings.
fn of_binding(source: &str, name: &str) -> Vec<Parameter> {
    let at = source.find(&format!("    fn {name}(")).unwrap_or_else(|| panic!("graph.rs has no method `{name}`"));
    let from = source[..at].rfind("#[pyo3(signature = (").unwrap_or_else(|| panic!("`{name}` has no signature"));
    let signature = source[from..at].trim_start_matches("#[pyo3(signature = (");
    let signature = signature.rsplit_once("))]").unwrap_or_else(|| panic!("the signature of `{name}` ends")).0;
    let one = |parameter: &str| {
        let (name, default) = parameter.split_once(" = ").map_or((parameter, None), |(name, value)| (name, Some(value)));
        let python = |value: &str| match value {
            "true" => "True".to_owned(),
            "false" => "False".to_owned(),
            value => value.trim_start_matches("Each::One(").trim_end_matches(')').to_owned(),
        };
        (name.trim().to_owned(), default.map(python))
    };
    let joined = signature.split_whitespace().collect::<Vec<&str>>().join(" ");
    joined.split(", ").map(one).collect()
}

#[test]
fn python_bindings_have_the_signatures_of_the_table() {
    let source = text("crates/verdigris-python/src/graph.rs");
    for method in SPECS.iter().flat_map(|spec| spec.forms).flat_map(|form| form.methods) {
        assert_eq!(of_binding(&source, method.name), of_stub(method), "{}", method.name);
    }
    // The other way round: a method that gives tensors is an op's or one of the few that make inputs.
    let methods: Vec<&str> = SPECS.iter().flat_map(|spec| spec.forms).flat_map(|form| form.methods).map(|method| method.name).collect();
    let body = source.split_once("#[pymethods]\n#[expect").expect("the methods of Graph").1;
    for function in body.split("\n    fn ").skip(1) {
        let (name, rest) = function.split_once('(').expect("a function has parameters");
        let gives = rest.split_once("-> ").map_or("", |(_, gives)| gives.split('{').next().unwrap_or_default().trim());
        if matches!(gives, "PyResult<Uid>" | "PyResult<(Uid, Uid)>") && !["tensor", "host_scalar"].contains(&name) {
            assert!(methods.contains(&name), "`{name}` is in no line of the table");
        }
    }
}
