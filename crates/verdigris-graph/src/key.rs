//! The identity of a problem.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::graph::Graph;
use crate::json;
use crate::problem::Problem;

/// A 128-bit fingerprint of a problem or of a graph: the first half of BLAKE3 over a version tag and the canonical JSON.
///
/// The same on every machine and in every build with the same tag, so it may be stored. Names and uids play no part; extents, strides,
/// types, attributes and which operands share a buffer do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Key([u8; 16]);

/// Changes whenever the canonical form or the meaning of a field does, so that stored keys of older forms are not found.
const VERSION: &str = "verdigris-problem-1\n";
/// Likewise for graphs.
const GRAPH_VERSION: &str = "verdigris-graph-1\n";

impl Key {
    /// The key of a canonical problem.
    pub fn of(problem: &Problem) -> Key {
        Key::hash(VERSION, &json::problem_to_json(problem))
    }

    /// The key of a graph: that of its [`Graph::canonical`] form. It is told apart from the key of any problem.
    ///
    /// # Errors
    /// An op that names a tensor which the graph does not have.
    pub fn of_graph(graph: &Graph) -> Result<Key, Error> {
        Ok(Key::hash(GRAPH_VERSION, &json::graph_to_json(&graph.canonical()?.0)))
    }

    fn hash(version: &str, text: &str) -> Key {
        let mut hasher = blake3::Hasher::new();
        hasher.update(version.as_bytes());
        hasher.update(text.as_bytes());
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        Key(bytes)
    }

    /// The sixteen bytes.
    pub const fn bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({self})")
    }
}
