//! Which kernels a change alters: the text of every kernel of the catalog, now and at another revision.
//!
//! A refactoring should alter none, and a change to one engine only that engine's. Kernels are compared in their canonical form, for a line that
//! moved or a parameter that has another name is no change of the kernel.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::canonical::canonical;
use crate::ptxas::{self, Assembly};

/// What became of one kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    /// Not there before.
    Added(String),
    /// No longer there.
    Removed(String),
    /// The text differs: lines that only the old one has, and lines that only the new one has.
    Altered {
        /// The kernel's name.
        name: String,
        /// Lines lost.
        lost: usize,
        /// Lines gained.
        gained: usize,
    },
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Change::Added(name) => write!(f, "added    {name}"),
            Change::Removed(name) => write!(f, "removed  {name}"),
            Change::Altered { name, lost, gained } => write!(f, "altered  {name} (-{lost} +{gained} lines)"),
        }
    }
}

/// Every difference between two sets of kernels, in order of name.
pub(crate) fn compare(then: &[Assembly], now: &[Assembly]) -> Vec<Change> {
    let by_name = |assemblies: &[Assembly]| -> BTreeMap<String, Vec<String>> {
        assemblies.iter().map(|assembly| (format!("{} ({})", assembly.name, assembly.target), canonical(&assembly.ptx))).collect()
    };
    let (then, now) = (by_name(then), by_name(now));
    let mut changes = Vec::new();
    for (name, old) in &then {
        match now.get(name) {
            None => changes.push(Change::Removed(name.clone())),
            Some(new) if new != old => {
                let (lost, gained) = difference(old, new);
                changes.push(Change::Altered { name: name.clone(), lost, gained });
            }
            Some(_) => {}
        }
    }
    changes.extend(now.keys().filter(|name| !then.contains_key(*name)).map(|name| Change::Added(name.clone())));
    changes
}

/// Lines lost and gained, counted as multisets; lines that only changed places count on neither side.
fn difference(old: &[String], new: &[String]) -> (usize, usize) {
    let mut balance: BTreeMap<&str, isize> = BTreeMap::new();
    for line in old {
        *balance.entry(line).or_default() -= 1;
    }
    for line in new {
        *balance.entry(line).or_default() += 1;
    }
    let lost: usize = balance.values().filter(|count| **count < 0).map(|count| count.unsigned_abs()).sum();
    let gained: usize = balance.values().filter(|count| **count > 0).map(|count| count.unsigned_abs()).sum();
    (lost, gained)
}

/// The kernels of another revision: checks it out beside this tree, builds its `xtask` and has it print its catalog.
pub(crate) fn kernels_at(root: &Path, revision: &str) -> Result<Vec<Assembly>> {
    let commit = Command::new("git")
        .args(["rev-parse", "--verify", "--quiet", "--end-of-options"])
        .arg(format!("{revision}^{{commit}}"))
        .current_dir(root)
        .output()
        .context("running git")?;
    if !commit.status.success() {
        bail!("`{revision}` names no commit");
    }
    let commit = String::from_utf8_lossy(&commit.stdout).trim().to_string();
    let folder = tempfile::Builder::new().prefix("verdigris-replay-").tempdir().context("making a temporary folder")?;
    let checkout = Checkout::make(root, &commit, folder.path().join("tree"))?;
    let out = folder.path().join("ptx");
    // Builds of old revisions share one folder, apart from the one in daily use, so that neither throws out the other's work.
    let target = root.join("target").join("replay");
    eprintln!("building `xtask` of {revision}");
    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["run", "--quiet", "--package", "xtask", "--", "ptx", "--out"])
        .arg(&out)
        .env("CARGO_TARGET_DIR", target)
        .current_dir(&checkout.path)
        .status()
        .context("running cargo")?;
    if !status.success() {
        bail!("{revision} could not print its kernels ({status}); revisions before `cargo xtask ptx` cannot be compared");
    }
    if fs::read_dir(&out).with_context(|| format!("reading {}", out.display()))?.next().is_none() {
        return Ok(Vec::new());
    }
    ptxas::read_folder(&out)
}

/// A second work tree of the repository, taken away again when dropped.
struct Checkout {
    root: PathBuf,
    path: PathBuf,
}

impl Checkout {
    fn make(root: &Path, commit: &str, path: PathBuf) -> Result<Self> {
        let output = Command::new("git")
            .args(["worktree", "add", "--quiet", "--detach"])
            .arg(&path)
            .arg(commit)
            .current_dir(root)
            .output()
            .context("running git")?;
        if !output.status.success() {
            bail!("checking out {commit}: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(Self { root: root.to_path_buf(), path })
    }
}

impl Drop for Checkout {
    fn drop(&mut self) {
        let removed = Command::new("git").args(["worktree", "remove", "--force"]).arg(&self.path).current_dir(&self.root).status();
        if !removed.is_ok_and(|status| status.success()) {
            eprintln!("left behind: the work tree {}; `git worktree prune` forgets it", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(name: &str, ptx: &str) -> Assembly {
        let (name, target, ptx) = (name.to_string(), "sm_90a".to_string(), ptx.to_string());
        Assembly { name, target, ptx, allow_spill_bytes: 0, max_registers: None, demands: None }
    }

    #[test]
    fn every_kind_of_change_is_named() {
        let then = [kernel("a", "add;\nsub;"), kernel("b", "x;"), kernel("c", "y;")];
        let now = [kernel("a", "add;\nmul;\nmul;"), kernel("c", "y;"), kernel("d", "z;")];
        let altered = Change::Altered { name: "a (sm_90a)".to_string(), lost: 1, gained: 2 };
        assert_eq!(compare(&then, &now), [altered, Change::Removed("b (sm_90a)".to_string()), Change::Added("d (sm_90a)".to_string())]);
    }

    #[test]
    fn moved_lines_of_the_source_are_no_change() {
        let then = [kernel("a", "// spec\n.file 1 \"gemm.rs\"\n.loc 1 10 5\n  add; // sum\n")];
        let now = [kernel("a", ".file 1 \"gemm.rs\"\n.loc 1 20 5\nadd;\n\n")];
        assert_eq!(compare(&then, &now), []);
    }

    #[test]
    fn an_order_that_changed_is_a_change() {
        let changes = compare(&[kernel("a", "add;\nsub;")], &[kernel("a", "sub;\nadd;")]);
        assert_eq!(changes, [Change::Altered { name: "a (sm_90a)".to_string(), lost: 0, gained: 0 }]);
    }

    #[test]
    fn an_unknown_revision_is_refused() {
        let root = crate::tree::workspace_root().expect("tests run inside the workspace");
        let error = kernels_at(&root, "no-such-revision").expect_err("must refuse");
        assert!(error.to_string().contains("names no commit"), "{error}");
    }
}
