//! Graphs and problems as JSON text.
//!
//! Reading checks what it reads: a graph that comes back has passed [`crate::validate::validate`], a problem is canonical. Writing
//! puts fields in the order of their declaration, which makes the text of a problem fit to be hashed ([`crate::Key`]).

use crate::error::Error;
use crate::graph::Graph;
use crate::problem::Problem;

/// A graph as indented JSON.
pub fn graph_to_json(graph: &Graph) -> String {
    serde_json::to_string_pretty(graph).expect("a graph has string keys and finite numbers only")
}

/// A graph from JSON, validated.
///
/// # Errors
/// Text that is no graph, or a graph that breaks a rule.
pub fn graph_from_json(text: &str) -> Result<Graph, Error> {
    let graph: Graph = serde_json::from_str(text).map_err(syntax)?;
    crate::validate::validate(&graph)?;
    Ok(graph)
}

/// A problem as JSON in one line: the canonical text that keys are made of.
pub fn problem_to_json(problem: &Problem) -> String {
    serde_json::to_string(problem).expect("a problem has string keys and finite numbers only")
}

/// A problem from JSON, brought into canonical form.
///
/// # Errors
/// Text that is no problem, or a problem that breaks a rule.
pub fn problem_from_json(text: &str) -> Result<Problem, Error> {
    let problem: Problem = serde_json::from_str(text).map_err(syntax)?;
    problem.canonical()
}

fn syntax(error: serde_json::Error) -> Error {
    Error::Json { line: error.line(), column: error.column(), message: error.to_string() }
}
