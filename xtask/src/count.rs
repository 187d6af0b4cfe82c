//! How many files an engine and an op touch: a toy of each is added to a copy of the sources, counted, built and tested there.
//!
//! A toy stands in `xtask/count/NAME`: new files at their paths, and `edits.toml` with what it changes in files that are there, what commands
//! write of it, and the commands that test it. CONTRIBUTING says how to add either; where that grows by a file, or where the toy no longer
//! builds, the command fails. The copy and its programs stay below `target/count`; only files that changed are written again.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::source_copy::SourceCopy;
use crate::tree::Tree;

/// Something small of a kind that is added often.
struct Toy {
    /// Its folder below [`FOLDER`].
    name: &'static str,
    /// The most files that it may touch.
    most: usize,
}

const TOYS: [Toy; 2] = [Toy { name: "engine", most: 4 }, Toy { name: "op", most: 12 }];
const FOLDER: &str = "xtask/count/";

/// What nothing in the copy reads, and is large.
const LEFT_OUT: &str = "bench/record/";

/// Crates above all others: where they are right, all are.
const CHECKED: &str = "check --package verdigris-python --package verdigris-workshop";

/// Codegen units of the copy's crates: see [`SourceCopy`]. None is optimized: a toy is run on numbers that this is quick enough for.
const UNITS_OF_CODE: u32 = 24;

/// `edits.toml` of a toy.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Edits {
    /// Arguments of cargo, run in the copy.
    commands: Vec<String>,
    /// Files that commands write, whether they are among `commands` or too slow to be.
    written: Vec<String>,
    edit: Vec<Edit>,
}

/// A change of a file that is there.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Edit {
    file: String,
    /// Stands there once.
    find: String,
    /// Takes its place.
    put: String,
}

type Files = BTreeMap<String, String>;

/// Adds a toy to the files. Gives its edits, and every file that it touches.
fn add(tree: &Tree, toy: &Toy, files: &mut Files) -> Result<(Edits, BTreeSet<String>)> {
    let folder = format!("{FOLDER}{}/", toy.name);
    let path = format!("{folder}edits.toml");
    let text = tree.text(&path).with_context(|| format!("{path} is not there"))?;
    let edits: Edits = toml::from_str(text).with_context(|| format!("reading {path}"))?;
    let mut touched: BTreeSet<String> = edits.written.iter().cloned().collect();
    if let Some(absent) = touched.iter().find(|file| !files.contains_key(*file)) {
        bail!("{path}: `written` names {absent}, which is not there");
    }
    for (place, text) in tree.files().filter_map(|(place, text)| Some((place.strip_prefix(&folder)?, text))) {
        if place == "edits.toml" {
            continue;
        }
        if files.insert(place.to_owned(), text.to_owned()).is_some() {
            bail!("{folder}{place} is to be a new file, and {place} is there already");
        }
        touched.insert(place.to_owned());
    }
    for Edit { file, find, put } in &edits.edit {
        let text = files.get_mut(file).with_context(|| format!("{path} edits {file}, which is not there"))?;
        let count = text.matches(find.as_str()).count();
        if count != 1 {
            bail!("{path} looks for a text that stands {count} times in {file}, and has to stand there once:\n{find}");
        }
        *text = text.replace(find.as_str(), put);
        touched.insert(file.clone());
    }
    Ok((edits, touched))
}

/// What a toy touches beyond its limit.
fn beyond(toy: &Toy, touched: &BTreeSet<String>) -> Option<String> {
    let list = || touched.iter().map(|file| format!("\n  {file}")).collect::<String>();
    (touched.len() > toy.most)
        .then(|| format!("the toy {} touches {} files, at most {} are wanted:{}", toy.name, touched.len(), toy.most, list()))
}

/// Adds the toys, builds and tests them; `false` if one touches too many files.
///
/// # Errors
/// A toy that does not fit the sources any more, does not build or fails its tests.
pub(crate) fn run(root: &Path) -> Result<bool> {
    let tree = Tree::read(root)?;
    let mut files: Files =
        tree.files().filter(|(path, _)| !path.starts_with(LEFT_OUT)).map(|(path, text)| (path.to_owned(), text.to_owned())).collect();
    let mut good = true;
    let mut commands = Vec::new();
    let mut written = BTreeSet::new();
    for toy in &TOYS {
        let (edits, touched) = add(&tree, toy, &mut files)?;
        match beyond(toy, &touched) {
            Some(finding) => println!("{finding}"),
            None => println!("count: the toy {} touches {} files, at most {}", toy.name, touched.len(), toy.most),
        }
        good &= touched.len() <= toy.most;
        commands.extend(edits.commands);
        written.extend(edits.written);
    }
    let copy = SourceCopy::new(root, &tree, "count", UNITS_OF_CODE, &[]);
    tree.write_copy(&files, &[LEFT_OUT], &copy.folder)?;
    commands.push(CHECKED.to_owned());
    for command in &commands {
        cargo(command, &copy)?;
    }
    let changed = files.iter().filter(|(path, text)| !fs::read_to_string(copy.folder.join(path)).is_ok_and(|now| now == **text));
    let unnamed: Vec<&str> = changed.map(|(path, _)| path.as_str()).filter(|path| !written.contains(*path)).collect();
    if !unnamed.is_empty() {
        bail!("commands wrote {}, which no toy names under `written`", unnamed.join(", "));
    }
    Ok(good)
}

/// Runs one command of cargo in the copy. A command that tests has to find a test.
fn cargo(command: &str, copy: &SourceCopy) -> Result<()> {
    println!("count: cargo {command}");
    let output = copy.cargo(command.split_whitespace()).output().context("running cargo")?;
    let said = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        bail!("cargo {command}, in {}:\n{said}{}", copy.folder.display(), String::from_utf8_lossy(&output.stderr));
    }
    if command.starts_with("test ") && passed(&said) == 0 {
        bail!("cargo {command} finds no test in {}", copy.folder.display());
    }
    Ok(())
}

/// How many tests passed, by the lines in which test programs say so.
fn passed(said: &str) -> u32 {
    said.lines().filter_map(|line| line.strip_prefix("test result: ok. ")?.split(' ').next()?.parse::<u32>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_toys_fit_the_sources_and_touch_few_files() {
        let tree = Tree::read(&crate::tree::workspace_root().expect("tests run inside the workspace")).expect("the sources can be listed");
        let mut files: Files = tree.files().map(|(path, text)| (path.to_owned(), text.to_owned())).collect();
        for toy in &TOYS {
            let (_, touched) = add(&tree, toy, &mut files).unwrap_or_else(|error| panic!("{error:#}"));
            assert_eq!(beyond(toy, &touched), None);
        }
    }

    const PLANTED: &str = "commands = []\nwritten = [\"page.md\"]\n[[edit]]\nfile = \"table.rs\"\nfind = \"one\"\nput = \"one, toy\"\n";

    fn planted(edits: &str, table: &str) -> Result<(Files, BTreeSet<String>)> {
        let tree = Tree::of(&[
            ("page.md", ""),
            ("table.rs", table),
            ("xtask/count/engine/edits.toml", edits),
            ("xtask/count/engine/src/toy.rs", "new"),
        ]);
        let mut files: Files = tree.files().map(|(path, text)| (path.to_owned(), text.to_owned())).collect();
        add(&tree, &TOYS[0], &mut files).map(|(_, touched)| (files, touched))
    }

    #[test]
    fn new_edited_and_written_files_are_counted() {
        let (files, touched) = planted(PLANTED, "[one, two]").expect("fits");
        assert_eq!((files["table.rs"].as_str(), files["src/toy.rs"].as_str()), ("[one, toy, two]", "new"));
        assert_eq!(touched.iter().collect::<Vec<_>>(), ["page.md", "src/toy.rs", "table.rs"]);
        assert_eq!(beyond(&Toy { name: "engine", most: 3 }, &touched), None);
        let finding = beyond(&Toy { name: "engine", most: 2 }, &touched).expect("one too many");
        assert_eq!(finding, "the toy engine touches 3 files, at most 2 are wanted:\n  page.md\n  src/toy.rs\n  table.rs");
    }

    #[test]
    fn edits_that_do_not_fit_are_told() {
        let told = |edits: &str, table: &str| format!("{:#}", planted(edits, table).expect_err("does not fit"));
        assert!(told(PLANTED, "[two]").contains("stands 0 times in table.rs, and has to stand there once:\none"));
        assert!(told(PLANTED, "[one, one]").contains("stands 2 times in table.rs"));
        assert!(told(&PLANTED.replace("table.rs", "gone.rs"), "one").contains("edits gone.rs, which is not there"));
        assert!(told(&PLANTED.replace("page.md", "gone.md"), "one").contains("`written` names gone.md, which is not there"));
        assert!(told("written = 1", "one").contains("reading xtask/count/engine/edits.toml"));
    }

    #[test]
    fn tests_that_ran_are_counted() {
        let said = "running 2 tests\ntest result: ok. 2 passed; 0 failed; 0 ignored;\n\ntest result: ok. 0 passed; 0 failed;\n";
        assert_eq!((passed(said), passed("")), (2, 0));
    }
}
