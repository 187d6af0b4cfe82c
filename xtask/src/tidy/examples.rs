//! Documentation that runs: what the public library offers is called by name in an example of its documentation, as far as a CPU can run it.

use std::collections::BTreeSet;

use super::Finding;
use crate::tree::Tree;

/// The public library's sources.
const LIBRARY: &str = "crates/verdigris/src/";

/// The page that every reader begins with; its examples count for all files.
const FRONT: &str = "crates/verdigris/src/lib.rs";

/// Items without a runnable example, and why. A name ends in the item's, a file stands for all of its items.
const EXCEPTIONS: &[(&str, &str)] = &[
    ("device.rs gpu", "needs a GPU's handle"),
    ("explain.rs Explanation", "tells of the plan of a GPU"),
    ("explain.rs PartExplanation", "tells of the plan of a GPU"),
    ("explain.rs TuningSummary", "tells of the plan of a GPU"),
    ("explain.rs WayExplanation", "tells of the plan of a GPU"),
    ("graph_plan.rs", "a graph planned on a GPU"),
    ("handle.rs", "a handle is a GPU"),
    ("lib.rs Readme", "is made of examples"),
    ("loss_scale.rs LossScaleError", "an error that has no parts to look at"),
    ("plan.rs PartEngine", "what `engines` gives"),
    ("plan.rs PartReport", "what `run_timed` gives"),
    ("plan.rs RunReport", "what `run_timed` gives"),
    ("plan_cache/mod.rs", "keeps what a GPU has measured"),
    ("plan_cache/shipped.rs", "choices that were measured on a GPU"),
    ("planning.rs", "planning on a GPU tells how far it is"),
    ("problem_plan.rs", "a problem planned on a GPU"),
    ("tune.rs", "measures on a GPU"),
    ("workspace.rs WorkspaceSource", "lends memory of a GPU"),
];

/// The rule `example`.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let front = tree.text(FRONT).map(words_of_examples).unwrap_or_default();
    let mut found = Vec::new();
    let mut used = BTreeSet::new();
    for (path, text) in tree.rust_under(LIBRARY) {
        let file = &path[LIBRARY.len()..];
        let words = words_of_examples(text);
        for (line, name) in public_items(text) {
            let exception = EXCEPTIONS.iter().map(|(of, _)| *of).find(|of| *of == file || *of == format!("{file} {name}"));
            match (words.contains(name) || front.contains(name), exception) {
                (true, _) => {}
                (false, Some(of)) => {
                    used.insert(of);
                }
                (false, None) => {
                    let message =
                        format!("no runnable example of this file, or of lib.rs, names `{name}`; show it, or give a reason in EXCEPTIONS");
                    found.push(Finding::new("example", path, line, message));
                }
            }
        }
    }
    // A tree without the library has nothing to except.
    if tree.text(FRONT).is_some() {
        for (of, _) in EXCEPTIONS.iter().filter(|(of, _)| !used.contains(of)) {
            found.push(Finding::new("example", FRONT, 0, format!("`{of}` needs no exception any more: remove its row")));
        }
    }
    found
}

/// Lines before the file's tests.
fn before_tests(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().take_while(|(_, line)| *line != "#[cfg(test)]").map(|(index, line)| (index + 1, line))
}

/// Functions, structs, enums and traits that are `pub`, with their lines.
fn public_items(text: &str) -> impl Iterator<Item = (usize, &str)> {
    before_tests(text).filter_map(|(number, line)| {
        let rest = line.trim_start().strip_prefix("pub ")?;
        let rest = rest.strip_prefix("const ").unwrap_or(rest);
        let rest = ["fn ", "struct ", "enum ", "trait "].into_iter().find_map(|kind| rest.strip_prefix(kind))?;
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        Some((number, &rest[..end]))
    })
}

/// Every word of the examples that `cargo test` runs: fenced blocks of documentation without a mark such as `no_run` or `text`.
fn words_of_examples(text: &str) -> BTreeSet<&str> {
    let (mut words, mut fence) = (BTreeSet::new(), None);
    for (_, line) in before_tests(text) {
        let line = line.trim_start();
        let Some(line) = line.strip_prefix("///").or_else(|| line.strip_prefix("//!")) else {
            fence = None;
            continue;
        };
        match (line.trim().strip_prefix("```"), fence) {
            (Some(mark), None) => fence = Some(matches!(mark, "" | "rust")),
            (Some(_), Some(_)) => fence = None,
            // What follows `//` in an example is no code.
            (None, Some(true)) => {
                let code = line.split(" // ").next().unwrap_or(line);
                words.extend(code.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()));
            }
            (None, _) => {}
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::spoken;

    fn found(file: &str, text: &str) -> Vec<String> {
        spoken(&check(&Tree::of(&[(&format!("{LIBRARY}{file}"), text)])))
    }

    #[test]
    fn a_public_item_needs_an_example_that_runs() {
        let shown = "//! ```\n//! assert_eq!(one(), 1);\n//! ```\npub fn one() -> u8 { 1 }\n";
        assert_eq!(found("a.rs", shown), [""; 0]);
        let example = "example crates/verdigris/src/a.rs:4";
        assert_eq!(found("a.rs", &shown.replace("one(),", "two(),")), [example]);
        for mark in ["no_run", "ignore", "text", "compile_fail"] {
            assert_eq!(found("a.rs", &shown.replacen("```", &format!("```{mark}"), 1)), [example], "{mark}");
        }
        assert_eq!(found("a.rs", &shown.replace("assert_eq!(one(), 1);", "f(); // as one does")), [example]);
        assert_eq!(
            found("a.rs", "pub struct A;\nimpl A {\n    pub const fn b(&self) {}\n    pub(crate) fn c() {}\n    fn d() {}\n}\n").len(),
            2
        );
        assert_eq!(found("a.rs", "#[cfg(test)]\nmod tests {\n    pub fn planted() {}\n}\n"), [""; 0]);
    }

    #[test]
    fn the_front_page_counts_for_all_and_exceptions_are_used() {
        let front = (FRONT, "//! ```\n//! one();\n//! ```\n");
        let stale = |found: &[Finding]| found.iter().filter(|finding| finding.message.contains("any more")).count();
        let shown = check(&Tree::of(&[front, ("crates/verdigris/src/a.rs", "pub fn one() {}\n")]));
        assert_eq!(stale(&shown), shown.len(), "{shown:?}");
        assert_eq!(stale(&shown), EXCEPTIONS.len());
        let excepted = check(&Tree::of(&[front, ("crates/verdigris/src/tune.rs", "pub fn measure() {}\n")]));
        assert_eq!(stale(&excepted), shown.len() - 1);
        assert_eq!(stale(&excepted), excepted.len(), "{excepted:?}");
    }
}
