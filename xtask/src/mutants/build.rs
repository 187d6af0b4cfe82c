//! The copy of the sources with all mutants in it, and the programs that are built of it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::list::{List, Mutant};
use super::plant;
use crate::source_copy::SourceCopy;
use crate::tree::Tree;

/// What nothing in the copy reads, and is large.
const LEFT_OUT: [&str; 2] = ["bench/record/", "mutants/"];
/// What is read all the same: the test of the choice at once holds it against these times.
const KEPT: &str = "bench/record/h200/2026-11-23-choice-90210.jsonl";

/// The crates that the runs of mutants spend their time in. The others make kernels and do not run them, or are not asked at all, and are compiled without optimization.
const HOT: [&str; 3] = ["verdigris-kir", "verdigris-reference", "verdigris-tensor"];

/// Where the programs that were built are noted, below the root.
const NOTE: &str = "target/mutants/programs.json";

/// Codegen units of its crates: see [`SourceCopy`].
const UNITS_OF_CODE: u32 = 32;

/// What unit tests are called: those of a library, and those of a program.
const UNITS: [&str; 2] = ["lib", "bin"];

/// The programs of the copy, and where they are run.
pub(super) struct Programs {
    pub(super) folder: PathBuf,
    pub(super) workshop: PathBuf,
    /// Test programs by package and name.
    pub(super) tests: BTreeMap<(String, String), PathBuf>,
    pub(super) build_seconds: f64,
}

/// Writes the copy and builds what the selected mutants run.
///
/// # Errors
/// A mutant that does not fit the sources, or does not compile.
pub(super) fn programs(root: &Path, tree: &Tree, list: &List, selected: &[&Mutant]) -> Result<Programs> {
    let begun = Instant::now();
    let copy = SourceCopy::new(root, tree, "mutants", UNITS_OF_CODE, &HOT);
    // Files that are as they should be are left alone, and with them what was built of them.
    tree.write_copy(&planted(tree, list)?, &LEFT_OUT, &copy.folder)?;
    // By the programs' names and not their packages', so that dependencies have the features that the whole workspace asks for; and one at least, for where
    // nothing is tested they have fewer.
    let tests_of = |mutants: &mut dyn Iterator<Item = &Mutant>| -> BTreeSet<(String, String)> {
        mutants.filter_map(|one| Some((one.run.package.clone()?, one.run.test.clone()?))).collect()
    };
    let (wanted, all) = (tests_of(&mut selected.iter().copied()), tests_of(&mut list.mutants.iter()));
    let mut command = vec!["build", "--bin", "workshop"];
    let named = |of: &'_ BTreeSet<(String, String)>| -> Vec<String> {
        of.iter().map(|(_, name)| name.clone()).filter(|name| !UNITS.contains(&name.as_str())).collect()
    };
    let names = Some(named(&wanted)).filter(|names| !names.is_empty()).unwrap_or_else(|| named(&all).into_iter().take(1).collect());
    command.extend(names.iter().flat_map(|name| ["--test", name]));
    // Unit tests have no name of their own.
    let of_units = wanted.iter().filter(|(_, name)| UNITS.contains(&name.as_str()));
    let of_units =
        of_units.map(|(package, name)| vec!["test", "--no-run", "--package", package, if name == "lib" { "--lib" } else { "--bins" }]);
    let commands: Vec<Vec<&str>> = std::iter::once(command).chain(of_units).collect();
    let mut built = BTreeMap::new();
    for command in &commands {
        built.extend(cargo(command, &copy)?);
    }
    let program = |key: &(String, String)| built.get(key).cloned().with_context(|| format!("cargo built no {} of {}", key.1, key.0));
    let workshop = program(&("verdigris-workshop".to_owned(), "workshop".to_owned()))?;
    let tests = wanted.into_iter().map(|key| program(&key).map(|path| (key, path))).collect::<Result<_>>()?;
    Ok(Programs { folder: copy.folder, workshop, tests, build_seconds: begun.elapsed().as_secs_f64() })
}

/// Notes which programs were built and of what; the file that says so, with their absolute paths: on another machine they, and the copy of the sources, which
/// tests read, have to lie where they lie here.
///
/// # Errors
/// A folder that cannot be written.
pub(super) fn note(root: &Path, tree: &Tree, list: &List, programs: &Programs) -> Result<PathBuf> {
    let file = root.join(NOTE);
    let note = Note {
        sources: digest(tree, list)?,
        folder: programs.folder.clone(),
        workshop: programs.workshop.clone(),
        tests: programs.tests.iter().map(|((package, name), path)| (package.clone(), name.clone(), path.clone())).collect(),
        build_seconds: programs.build_seconds,
    };
    std::fs::write(&file, serde_json::to_string_pretty(&note)?).with_context(|| format!("writing {}", file.display()))?;
    Ok(file)
}

/// The programs that [`note`] has noted.
///
/// # Errors
/// No note, or one of other sources or mutants than these.
pub(super) fn noted(root: &Path, tree: &Tree, list: &List) -> Result<Programs> {
    let file = root.join(NOTE);
    let text = std::fs::read_to_string(&file).with_context(|| format!("reading {}: `mutants --build-only` writes it", file.display()))?;
    let note: Note = serde_json::from_str(&text).with_context(|| format!("reading {}", file.display()))?;
    let sources = digest(tree, list)?;
    ensure!(note.sources == sources, "{} is of sources {}, these are {sources}: build again", file.display(), note.sources);
    let tests = note.tests.into_iter().map(|(package, name, path)| ((package, name), path)).collect();
    Ok(Programs { folder: note.folder, workshop: note.workshop, tests, build_seconds: note.build_seconds })
}

/// What [`note`] writes.
#[derive(Serialize, Deserialize)]
struct Note {
    sources: String,
    folder: PathBuf,
    workshop: PathBuf,
    tests: Vec<(String, String, PathBuf)>,
    build_seconds: f64,
}

/// Tells sources with their mutants apart.
pub(super) fn digest(tree: &Tree, list: &List) -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    for (path, text) in planted(tree, list)? {
        for part in [path, text] {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
        }
    }
    Ok(hasher.finalize().to_hex()[..16].to_owned())
}

/// The texts of the copy.
fn planted(tree: &Tree, list: &List) -> Result<BTreeMap<String, String>> {
    let kept = tree.files().filter(|(path, _)| *path == KEPT || !LEFT_OUT.iter().any(|out| path.starts_with(out)));
    let mut files: BTreeMap<String, String> = kept.map(|(path, text)| (path.to_owned(), text.to_owned())).collect();
    files.extend(plant::all(tree, list)?);
    Ok(files)
}

/// Runs one command of cargo in the copy; the programs that it made, by package and target. Unit tests are of target `lib`, those of a program of target `bin`.
/// Unit tests alone are built by package, with the features which that package asks for: what lies below is then compiled for it once more.
fn cargo(arguments: &[&str], copy: &SourceCopy) -> Result<BTreeMap<(String, String), PathBuf>> {
    let output = copy.cargo(arguments.iter().copied().chain(["--message-format=json"])).output().context("running cargo")?;
    let said = String::from_utf8_lossy(&output.stdout);
    let messages: Vec<Value> = said.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    if !output.status.success() {
        let errors: Vec<&str> = (messages.iter())
            .filter(|message| message["message"]["level"] == "error")
            .filter_map(|message| message["message"]["rendered"].as_str())
            .collect();
        bail!(
            "cargo {}, in {}:\n{}{}",
            arguments.join(" "),
            copy.folder.display(),
            errors.concat(),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(messages.iter().filter_map(program).collect())
}

/// A program that cargo says it made.
fn program(message: &Value) -> Option<((String, String), PathBuf)> {
    let path = message["executable"].as_str()?;
    // `path+file:///…/crates/NAME#VERSION`, or `…#NAME@VERSION` where the folder has another name.
    let id = message["package_id"].as_str()?;
    let (place, version) = id.rsplit_once('#')?;
    let package = version.split_once('@').map_or_else(|| place.rsplit('/').next().unwrap_or_default(), |(name, _)| name);
    let is_kind = |wanted: &str| message["target"]["kind"].as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == wanted));
    let name = match message["profile"]["test"].as_bool() {
        _ if is_kind("lib") => "lib",
        Some(true) if is_kind("bin") => "bin",
        _ => message["target"]["name"].as_str()?,
    };
    Some(((package.to_owned(), name.to_owned()), PathBuf::from(path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_that_are_noted_are_of_the_same_sources() {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path();
        std::fs::create_dir_all(root.join("target/mutants")).expect("made");
        let key = ("verdigris-kir".to_owned(), "tables".to_owned());
        let programs = Programs {
            folder: root.join("target/mutants/tree"),
            workshop: root.join("workshop"),
            tests: [(key.clone(), root.join("tables"))].into(),
            build_seconds: 2.5,
        };
        const SWITCH: (&str, &str) = ("crates/verdigris-kir/src/lib.rs", "");
        let (tree, list) = (Tree::of(&[SWITCH, ("a.rs", "one"), ("bench/record/x.jsonl", "{}")]), List::default());
        assert!(noted(root, &tree, &list).err().expect("no note").to_string().contains("--build-only"));
        note(root, &tree, &list, &programs).expect("noted");
        let read = noted(root, &Tree::of(&[SWITCH, ("a.rs", "one")]), &list).expect("records do not count");
        assert_eq!((read.tests[&key].clone(), read.workshop, read.build_seconds), (root.join("tables"), root.join("workshop"), 2.5));
        let refused = noted(root, &Tree::of(&[SWITCH, ("a.rs", "two")]), &list).err().expect("other sources");
        assert!(refused.to_string().contains("build again"), "{refused}");
    }

    #[test]
    fn programs_are_told_apart_by_package_and_target() {
        let message = |id: &str, kind: &str, name: &str| {
            program(&serde_json::json!({ "package_id": id, "target": { "kind": [kind], "name": name }, "executable": "/x" }))
                .map(|(key, _)| key)
        };
        let key = |package: &str, name: &str| Some((package.to_owned(), name.to_owned()));
        assert_eq!(message("path+file:///a/crates/verdigris-kir#0.0.0", "lib", "verdigris_kir"), key("verdigris-kir", "lib"));
        assert_eq!(message("path+file:///a/b#verdigris-kir@0.0.0", "test", "tables"), key("verdigris-kir", "tables"));
        let units = serde_json::json!({ "package_id": "path+file:///a/b#w@0", "target": { "kind": ["bin"], "name": "w" }, "executable": "/x",
            "profile": { "test": true } });
        assert_eq!(program(&units).map(|(key, _)| key), key("w", "bin"));
        assert_eq!(message("path+file:///a/b#w@0", "bin", "w"), key("w", "w"));
        assert_eq!(program(&serde_json::json!({ "reason": "build-finished" })), None);
    }
}
