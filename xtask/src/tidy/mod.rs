//! House rules as tests. Each rule prevents one failure, and says which.
//!
//! | rule | reads | prevents |
//! |---|---|---|
//! | `floors` | every `Cargo.toml` | an upward or sideways dependency: the driver leaking into `engines`, truth importing the accused |
//! | `manifest` | every `Cargo.toml` | a crate outside the workspace's lints, licence or naming |
//! | `dependency-reason` | every `Cargo.toml`, `DESIGN.md` | a dependency that nobody can justify any more |
//! | `arrows` | sources of `kir` and `engines` | modules that know each other in circles, within one crate where Cargo cannot see it |
//! | `arguments` | sources of `engines` | an argument that is given by its place, and the one behind it taken for it |
//! | `skeleton` | sources of `engines` | an engine that ranks, prices or refuses configs in its own way |
//! | `example` | sources of `verdigris` | a public function or type that no example calls, so that nobody has seen it used |
//! | `unsafe` | every source | unsafe code outside the rooms that may have it |
//! | `environment` | every source under `crates/` | behaviour that depends on a variable no table lists |
//! | `module-name` | every source | `utils`: a module that means nothing and attracts everything |
//! | `length` | every source | the god file |
//! | `machine-path` | every text file | a path that exists on one machine only |
//! | `licence` | the root | a licence named but not given |
//! | `mutants` | `mutants/*.toml` and the sources that they name | a mutant that has lost its place, so that a mistake is planted no more |
//! | `words` | `GLOSSARY.md`, every source and document | a word that the field does not have, or one word with two meanings |
//!
//! Rules read a [`Tree`] and never the disk. An exception is a row in a table beside its rule, with its
//! reason; there is no comment that silences a rule.

mod arrows;
mod engines;
mod examples;
mod floors;
mod text;
mod words;

use std::fmt;

use crate::tree::Tree;

/// One violation of one rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    rule: &'static str,
    path: String,
    /// From 1; 0 where the whole file is meant.
    line: usize,
    message: String,
}

impl Finding {
    fn new(rule: &'static str, path: &str, line: usize, message: String) -> Self {
        let path = path.to_string();
        Self { rule, path, line, message }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path)?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        write!(f, ": [{}] {}", self.rule, self.message)
    }
}

/// Everything that is wrong with the tree, in order of rule and path; empty when the house is tidy.
pub(crate) fn findings(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    found.extend(floors::check(tree));
    found.extend(arrows::check(tree));
    found.extend(engines::check(tree));
    found.extend(examples::check(tree));
    found.extend(crate::mutants::stale(tree).into_iter().map(|(path, message)| Finding::new("mutants", &path, 0, message)));
    found.extend(text::check(tree));
    found.extend(words::check(tree));
    found
}

/// What every rule's tests ask: which rules speak about a planted tree.
#[cfg(test)]
fn spoken(found: &[Finding]) -> Vec<String> {
    found.iter().map(|finding| format!("{} {}:{}", finding.rule, finding.path, finding.line)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_house_is_tidy() {
        let root = crate::tree::workspace_root().expect("tests run inside the workspace");
        let tree = Tree::read(&root).expect("the sources can be listed");
        assert!(tree.text("Cargo.toml").is_some(), "an empty listing would pass every rule");
        let found = findings(&tree);
        let lines: Vec<String> = found.iter().map(Finding::to_string).collect();
        assert!(found.is_empty(), "{} findings:\n{}", lines.len(), lines.join("\n"));
    }

    #[test]
    fn a_finding_names_file_line_and_rule() {
        let finding = Finding::new("length", "crates/a/src/b.rs", 7, "too long".to_string());
        assert_eq!(finding.to_string(), "crates/a/src/b.rs:7: [length] too long");
    }
}
