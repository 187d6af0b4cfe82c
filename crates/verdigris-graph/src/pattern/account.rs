//! How a graph came to its parts.

use std::fmt::Write as _;

use crate::graph::Graph;

use super::rules::FUSIONS;

/// One fusion that was looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Decision {
    /// The row of the table ([`fusions`]).
    pub fusion: &'static str,
    /// The op whose part it is about, by its place in the graph.
    pub host: usize,
    /// The op that came, or did not.
    pub op: usize,
    /// `None` where they were put together; else what would have had to hold and does not.
    pub refused: Option<&'static str>,
}

/// How a graph came to its parts ([`super::partition_with_account`]).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Account {
    /// The ops that each part was gathered from, by their places in the graph, in the order in which the parts run. Movements of which
    /// nothing is done are in none; of some parts, as of a long concatenation, several problems are made.
    pub parts: Vec<Vec<usize>>,
    /// All that was looked at, in order.
    pub decisions: Vec<Decision>,
    /// What it took: conditions, edges and tensors that were looked at.
    pub work: u64,
}

impl Account {
    /// The decisions in words, a line each, with the ops' names.
    pub fn describe(&self, graph: &Graph) -> String {
        let name = |op: usize| graph.nodes.get(op).map_or("?", |node| node.name.as_str());
        let mut text = String::new();
        for &Decision { fusion, host, op, refused } in &self.decisions {
            let (op_name, host_name) = (name(op), name(host));
            // Writing to a string does not fail.
            let _ = match refused {
                None => writeln!(text, "{fusion}: {op} `{op_name}` stands with {host} `{host_name}`"),
                Some(rule) => writeln!(text, "{fusion}: {op} `{op_name}` and {host} `{host_name}` stand together only if {rule}"),
            };
        }
        text
    }
}

/// A row of the table of fusions, in words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FusionText {
    /// Its name.
    pub name: &'static str,
    /// Which op may come to which.
    pub pattern: &'static str,
    /// What must hold, in the order in which it is asked.
    pub conditions: Vec<&'static str>,
    /// What the op is then.
    pub becomes: &'static str,
}

/// The table of fusions: each row that [`super::partition`] goes by, in order.
pub fn fusions() -> Vec<FusionText> {
    let row = |row: &super::rules::Fusion| FusionText {
        name: row.name,
        pattern: row.pattern,
        conditions: row.conditions.iter().map(|condition| condition.rule).chain([super::rules::NOTHING_BETWEEN]).collect(),
        becomes: row.becomes,
    };
    FUSIONS.iter().map(row).collect()
}
