//! What an engine leaves to the skeleton: arguments by name, and the one candidate that ranks configs.

use super::Finding;
use crate::source;
use crate::tree::Tree;

const ENGINES: &str = "crates/verdigris-engines/src/";

/// The file that makes an engine of an algorithm.
const SKELETON: &str = "crates/verdigris-engines/src/algorithm.rs";

/// Where arguments may be given by their place, and why.
const BY_PLACE: &[(&str, &str)] = &[
    ("conv/small_channels/", "its launches choose how wide their copies are, and with that what their pointers must be multiples of"),
    ("fuse/epilogue/", "the epilogue of conv/small_channels"),
    ("split_k/filter/small_channels.rs", "the second launch of conv/small_channels"),
];

/// Candidates beside the skeleton's, and why.
const CANDIDATES: &[(&str, &str)] = &[("rewrite/pointwise.rs", "it hands on the candidate of the product, with all of its configs")];

/// Traits that are implemented once, there.
const ONCE: [&str; 2] = ["Engine", "Candidate"];

/// The rules `arguments` and `skeleton`.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    for (path, text) in tree.rust_under(ENGINES) {
        let source = source::read(text, &[]);
        let is_excepted = |table: &[(&str, &str)]| table.iter().any(|(inside, _)| path[ENGINES.len()..].starts_with(inside));
        let by_place = is_excepted(BY_PLACE);
        for named in source.named.iter().filter(|named| !by_place && named.path.iter().any(|word| word == "Arg")) {
            let message = "`Arg`: an argument is declared and bound by `verdigris_kir::params`".to_string();
            found.push(Finding::new("arguments", path, named.line, message));
        }
        if path == SKELETON || is_excepted(CANDIDATES) {
            continue;
        }
        for (index, line) in text.lines().enumerate() {
            let line = line.trim_start();
            let implemented = ONCE.into_iter().find(|name| line.starts_with("impl") && line.contains(&format!(" {name} for ")));
            if let Some(name) = implemented {
                let message = format!("`impl {name}`: an engine is an `Algorithm` that `Listed` lists");
                found.push(Finding::new("skeleton", path, index + 1, message));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::spoken;

    fn found(file: &str, text: &str) -> Vec<String> {
        spoken(&check(&Tree::of(&[(&format!("{ENGINES}{file}"), text)])))
    }

    #[test]
    fn arguments_are_bound_by_name() {
        for text in ["\nuse verdigris_kir::program::{Address, Arg};", "\nfn f() { g(Arg::Divisor(3)) }", "\nfn f() -> Vec<program::Arg> {}"]
        {
            assert_eq!(found("gemm/simt.rs", text), [format!("arguments {ENGINES}gemm/simt.rs:2")], "{text}");
        }
        assert_eq!(found("gemm/simt.rs", "use verdigris_kir::params::Arguments;\n// Arg::Scalar was here"), [""; 0]);
    }

    #[test]
    fn the_skeleton_is_the_only_candidate() {
        for text in ["impl Candidate for Accepted {}", "    impl<A: B> Engine for Own<A> {}"] {
            assert_eq!(found("map.rs", text), [format!("skeleton {ENGINES}map.rs:1")], "{text}");
            assert_eq!(found("algorithm.rs", text), [""; 0]);
        }
        assert_eq!(found("map.rs", "impl Algorithm for Accepted {}"), [""; 0]);
    }
}
