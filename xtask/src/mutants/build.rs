//! The copy of the sources with all mutants in it, and the programs that are built of it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
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
    write(tree, list, &copy.folder)?;
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

/// Writes the copy; files that are as they should be are left alone, and with them what was built of them.
fn write(tree: &Tree, list: &List, copy: &Path) -> Result<()> {
    let kept = tree.files().filter(|(path, _)| *path == KEPT || !LEFT_OUT.iter().any(|out| path.starts_with(out)));
    let mut files: BTreeMap<String, String> = kept.map(|(path, text)| (path.to_owned(), text.to_owned())).collect();
    files.extend(plant::all(tree, list)?);
    tree.write_copy(&files, &LEFT_OUT, copy)
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
