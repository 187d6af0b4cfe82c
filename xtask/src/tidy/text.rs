//! Rules on the text of single files.

use super::Finding;
use crate::source;
use crate::tree::Tree;

/// Lines that a source file may have before it has to be split.
const LENGTH_CAP: usize = 900;

/// Files that are one table or one exhaustive match, read top to bottom: splitting them would hide
/// what is missing.
const LONG: &[(&str, &str)] = &[
    ("crates/verdigris-kir/src/inst.rs", "the one table of instructions"),
    ("crates/verdigris-kir/src/ptx/print.rs", "one match over every instruction"),
];

/// Crates that may hold `unsafe`: the driver's room and the doors to other languages.
const MAY_BE_UNSAFE: &[&str] = &["verdigris-cuda", "verdigris-capi", "verdigris-cudnn", "verdigris-python"];

/// The one file that reads the environment.
const ENVIRONMENT: &str = "crates/verdigris/src/config.rs";

/// Folders below `src/` that hold tests and nothing that ships. What only a test reads (where an assembler stands, whether snapshots
/// are to be written anew) decides nothing for a user; `#[cfg(test)]` modules within a file are free for the same reason.
const TEST_FOLDER: &str = "/tests/";

/// Functions of `std::env` that read or change the environment.
const ENVIRONMENT_CALLS: &[&str] = &["var", "var_os", "vars", "vars_os", "set_var", "remove_var", "home_dir", "*"];

/// Names that say nothing about what is inside.
const EMPTY_NAMES: &[&str] = &["util", "utils", "helper", "helpers", "misc"];

/// The licences that the manifests name.
const LICENCES: &[&str] = &["LICENSE-MIT", "LICENSE-APACHE"];

/// The rules `unsafe`, `environment`, `module-name`, `length`, `machine-path` and `licence`.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    for (path, text) in tree.files() {
        if path.ends_with(".rs") {
            source_rules(path, text, &mut found);
        }
        machine_paths(path, text, &mut found);
    }
    for licence in LICENCES {
        if tree.text("Cargo.toml").is_some() && tree.text(licence).is_none() {
            let message = "named by every manifest, but not in the root".to_string();
            found.push(Finding::new("licence", licence, 0, message));
        }
    }
    found
}

fn source_rules(path: &str, text: &str, found: &mut Vec<Finding>) {
    let mut say = |rule, line, message| found.push(Finding::new(rule, path, line, message));
    let crate_name = match path.strip_prefix("crates/") {
        Some(inside) => inside.split('/').next().unwrap_or(""),
        None => path.split('/').next().unwrap_or(""),
    };
    let source = source::read(text, &[]);

    let lines = text.lines().count();
    if lines > LENGTH_CAP && !LONG.iter().any(|(long, _)| *long == path) {
        say("length", 0, format!("{lines} lines; the cap is {LENGTH_CAP} (one-table and one-match files: LONG)"));
    }

    let file_name = path.rsplit('/').next().unwrap_or("");
    let folders = path.split('/').rev().skip(1);
    let stem = file_name.strip_suffix(".rs").unwrap_or(file_name);
    for name in std::iter::once(stem).chain(folders) {
        if EMPTY_NAMES.contains(&name) {
            say("module-name", 0, format!("`{name}` says nothing about what is inside"));
        }
    }
    for (name, line) in &source.modules {
        if EMPTY_NAMES.contains(&name.as_str()) {
            say("module-name", *line, format!("`mod {name}` says nothing about what is inside"));
        }
    }

    if !MAY_BE_UNSAFE.contains(&crate_name) {
        for line in &source.unsafe_lines {
            say("unsafe", *line, format!("`{crate_name}` may not hold unsafe code"));
        }
        let in_sources = path.split_once("/src/").is_some_and(|(_, inside)| is_root(inside));
        // A root that names nothing is a room nobody has moved into; there is nothing to forbid yet.
        let empty = source.modules.is_empty() && source.named.is_empty();
        if in_sources && !empty && !source.forbids_unsafe {
            say("unsafe", 0, "`#![forbid(unsafe_code)]` is missing".to_string());
        }
    }

    let shipped = path.starts_with("crates/") && path.contains("/src/") && !path.contains(TEST_FOLDER);
    if shipped && path != ENVIRONMENT {
        for named in source.named.iter().filter(|named| !named.in_test) {
            let reads = named.path.windows(2).any(|pair| pair[0] == "env" && ENVIRONMENT_CALLS.contains(&pair[1].as_str()));
            if reads {
                say("environment", named.line, format!("`{}`: only {ENVIRONMENT} reads the environment", named.path.join("::")));
            }
        }
    }
}

/// Whether a file below `src/` is the root of a library or a program.
fn is_root(inside: &str) -> bool {
    matches!(inside, "lib.rs" | "main.rs")
        || inside.strip_prefix("bin/").is_some_and(|name| !name.contains('/') || name.ends_with("/main.rs"))
}

/// Folders of somebody's machine. Spelled in pieces, for this file obeys its own rule.
const MACHINE_FOLDERS: &[&str] = &[
    concat!("/ho", "me/"),
    concat!("/Us", "ers/"),
    concat!("/ro", "ot/"),
    concat!("/wo", "rk/"),
    concat!("/op", "t/"),
    concat!("/m", "nt/"),
    concat!("C:", "\\"),
];

fn machine_paths(path: &str, text: &str, found: &mut Vec<Finding>) {
    for (index, line) in text.lines().enumerate() {
        for folder in MACHINE_FOLDERS {
            let hit = line.match_indices(folder).any(|(at, _)| {
                // `src/work/` goes on from a relative path; an absolute one begins here.
                let before = line[..at].chars().next_back();
                !before.is_some_and(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '/' | '}'))
            });
            if hit {
                let message = format!("`{folder}…` exists on one machine only");
                found.push(Finding::new("machine-path", path, index + 1, message));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::spoken;

    const LIB: &str = "crates/verdigris-kir/src/lib.rs";
    const FORBID: &str = "#![forbid(unsafe_code)]\n";

    fn file(path: &str, text: &str) -> Vec<String> {
        spoken(&check(&Tree::of(&[(path, text)])))
    }

    #[test]
    fn unsafe_needs_its_room() {
        assert_eq!(file(LIB, FORBID), [""; 0]);
        assert_eq!(file(LIB, "//! Empty still.\nfn main() {}"), [""; 0]);
        assert_eq!(file(LIB, "mod ir;"), [format!("unsafe {LIB}:0")]);
        let held = format!("{FORBID}fn f() {{\n unsafe {{ g() }} }}");
        assert_eq!(file(LIB, &held), [format!("unsafe {LIB}:3")]);
        assert_eq!(file("crates/verdigris-kir/tests/a.rs", "unsafe fn f() {}"), ["unsafe crates/verdigris-kir/tests/a.rs:1"]);
        assert_eq!(file("crates/verdigris-cuda/src/lib.rs", "unsafe fn f() {}"), [""; 0]);
        assert_eq!(file("xtask/src/main.rs", "use std::fmt;"), ["unsafe xtask/src/main.rs:0"]);
        assert_eq!(file("crates/verdigris-cli/src/bin/x.rs", "mod y;"), ["unsafe crates/verdigris-cli/src/bin/x.rs:0"]);
    }

    #[test]
    fn the_environment_has_one_reader() {
        let path = "crates/verdigris-cuda/src/module.rs";
        for text in
            ["\nfn f() { std::env::var(\"X\"); }", "\nuse std::env::{args, var_os};", "\nfn f() { env::vars(); }", "\nuse std::env::*;"]
        {
            assert_eq!(file(path, text), [format!("environment {path}:2")], "{text}");
        }
        assert_eq!(file(path, "fn f() { std::env::args(); let _ = env!(\"X\"); }"), [""; 0]);
        assert_eq!(file(ENVIRONMENT, "fn f() { std::env::var(\"X\"); }"), [""; 0]);
        assert_eq!(file("crates/verdigris-cuda/tests/a.rs", "fn f() { std::env::var(\"X\"); }"), [""; 0]);
        assert_eq!(file("crates/verdigris-cuda/src/module/tests/a.rs", "fn f() { std::env::var(\"X\"); }"), [""; 0]);
    }

    #[test]
    fn a_module_is_named_for_what_it_holds() {
        let path = "crates/verdigris-graph/src/utils.rs";
        assert_eq!(file(path, ""), [format!("module-name {path}:0")]);
        let path = "crates/verdigris-graph/src/helpers/a.rs";
        assert_eq!(file(path, ""), [format!("module-name {path}:0")]);
        let path = "crates/verdigris-graph/src/key.rs";
        assert_eq!(file(path, "\nmod util {}"), [format!("module-name {path}:2")]);
    }

    #[test]
    fn long_files_are_found_unless_they_are_one_table() {
        let long = "// x\n".repeat(LENGTH_CAP + 1);
        let path = "crates/verdigris-graph/src/key.rs";
        assert_eq!(file(path, &long), [format!("length {path}:0")]);
        assert_eq!(file(path, &long[5..]), [""; 0]);
        assert_eq!(file(LONG[0].0, &long), [""; 0]);
    }

    #[test]
    fn machine_paths_are_found_in_any_text() {
        let planted = concat!("see\n`/ho", "me/someone/x`\n");
        assert_eq!(file("README.md", planted), ["machine-path README.md:2"]);
        assert_eq!(file("a.toml", concat!("p = \"/wo", "rk/x\"")), ["machine-path a.toml:1"]);
        assert_eq!(file("a.md", "src/work/queue.rs and docs/home/x"), [""; 0]);
    }

    #[test]
    fn licences_are_in_the_root() {
        let manifest = ("Cargo.toml", "");
        assert_eq!(spoken(&check(&Tree::of(&[manifest, ("LICENSE-MIT", "x")]))), ["licence LICENSE-APACHE:0"]);
        let both = [manifest, ("LICENSE-MIT", "x"), ("LICENSE-APACHE", "x")];
        assert_eq!(check(&Tree::of(&both)), []);
    }
}
