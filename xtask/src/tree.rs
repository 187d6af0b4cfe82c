//! The files that the house rules read: a map from workspace-relative path to text; beside it the files that are no text, which copies need.
//!
//! Rules see only this map, so a test can plant a violation in a tree of three lines, without a disk.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Text files by workspace-relative path, with `/` as separator on every system.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    files: BTreeMap<String, String>,
    /// What is not UTF-8.
    binary: BTreeMap<String, Vec<u8>>,
}

impl Tree {
    /// A tree made of the given files, for tests.
    #[cfg(test)]
    pub(crate) fn of(files: &[(&str, &str)]) -> Self {
        let files = files.iter().map(|(path, text)| (path.to_string(), text.to_string())).collect();
        Self { files, binary: BTreeMap::new() }
    }

    /// The files under `root` that git tracks, and those that it would track (new and not ignored), so
    /// that a violation is found before it is committed. Rules read those that are UTF-8.
    pub(crate) fn read(root: &Path) -> Result<Self> {
        let listing = Command::new("git")
            // The listing is only read, so it does not matter whose checkout this is.
            .args(["-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .current_dir(root)
            .output()
            .context("running `git ls-files`")?;
        if !listing.status.success() {
            bail!("`git ls-files` failed in {}: {}", root.display(), String::from_utf8_lossy(&listing.stderr).trim());
        }
        let names = String::from_utf8(listing.stdout).context("file names are not UTF-8")?;
        let (mut files, mut binary) = (BTreeMap::new(), BTreeMap::new());
        for name in names.split('\0').filter(|name| !name.is_empty()) {
            // A file deleted but not yet committed is still listed; it is no longer ours to judge.
            let Ok(bytes) = std::fs::read(root.join(name)) else {
                continue;
            };
            match String::from_utf8(bytes) {
                Ok(text) => _ = files.insert(name.to_string(), text),
                Err(error) => _ = binary.insert(name.to_string(), error.into_bytes()),
            }
        }
        Ok(Self { files, binary })
    }

    /// Every text file, in order of path.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files.iter().map(|(path, text)| (path.as_str(), text.as_str()))
    }

    /// Writes these texts, and the tree's files that are no text and below none of the folders `left_out`, into a folder which then has nothing else. Files
    /// that are as they should be are left alone, and with them what was built of them.
    pub(crate) fn write_copy(&self, texts: &BTreeMap<String, String>, left_out: &[&str], folder: &Path) -> Result<()> {
        let texts = texts.iter().map(|(path, text)| (path.as_str(), text.as_bytes()));
        let kept = self.binary.iter().filter(|(path, _)| !left_out.iter().any(|out| path.starts_with(out)));
        let binary = kept.map(|(path, bytes)| (path.as_str(), bytes.as_slice()));
        write_folder(&texts.chain(binary).collect(), folder)
    }

    /// The text of one file.
    pub(crate) fn text(&self, path: &str) -> Option<&str> {
        self.files.get(path).map(String::as_str)
    }

    /// Every Rust source under `folder` (which ends in `/`), in order of path.
    pub(crate) fn rust_under<'a>(&'a self, folder: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.files().filter(move |(path, _)| path.starts_with(folder) && path.ends_with(".rs"))
    }
}

/// The root of the workspace: the nearest folder, from the current one upward, whose `Cargo.toml`
/// opens a `[workspace]`.
///
/// Searched at run time rather than baked in, so that a built `xtask` judges the tree that it stands in.
pub(crate) fn workspace_root() -> Result<PathBuf> {
    let start = std::env::current_dir().context("asking for the current folder")?;
    for folder in start.ancestors() {
        let manifest = folder.join("Cargo.toml");
        if let Ok(text) = std::fs::read_to_string(&manifest)
            && text.lines().any(|line| line.trim() == "[workspace]")
        {
            return Ok(folder.to_path_buf());
        }
    }
    bail!("no Cargo.toml with a [workspace] in {} or above it: run this from inside the repository", start.display())
}

/// Makes a folder of these files and nothing else.
fn write_folder(files: &BTreeMap<&str, &[u8]>, folder: &Path) -> Result<()> {
    for stale in found(folder)? {
        let inside = stale.strip_prefix(folder).unwrap_or(&stale).to_string_lossy().replace('\\', "/");
        if !files.contains_key(inside.as_str()) {
            fs::remove_file(&stale).with_context(|| format!("removing {}", stale.display()))?;
        }
    }
    for (path, bytes) in files {
        let path = folder.join(path);
        if fs::read(&path).is_ok_and(|now| now == *bytes) {
            continue;
        }
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).with_context(|| format!("making {}", parent.display()))?;
        }
        fs::write(&path, bytes).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// Every file below a folder; none if it is not there yet.
fn found(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop().filter(|folder| folder.is_dir()) {
        for entry in fs::read_dir(&folder).with_context(|| format!("listing {}", folder.display()))? {
            let path = entry.with_context(|| format!("listing {}", folder.display()))?.path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_the_files_and_nothing_else() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let tree = Tree { files: BTreeMap::new(), binary: ["e.npy", "left/f.npy"].map(|path| (path.to_owned(), vec![0xff])).into() };
        let texts =
            |list: &[(&str, &str)]| list.iter().map(|(path, text)| (path.to_string(), text.to_string())).collect::<BTreeMap<_, _>>();
        tree.write_copy(&texts(&[("a/b.rs", "1"), ("c.rs", "2")]), &["left/"], folder.path()).expect("writable");
        let written = fs::metadata(folder.path().join("c.rs")).and_then(|file| file.modified()).expect("there");
        tree.write_copy(&texts(&[("a/d.rs", "3"), ("c.rs", "2")]), &["left/"], folder.path()).expect("writable");
        let mut names: Vec<PathBuf> = found(folder.path()).expect("readable");
        names.sort();
        assert_eq!(names, ["a/d.rs", "c.rs", "e.npy"].map(|name| folder.path().join(name)));
        assert_eq!(fs::read(folder.path().join("e.npy")).expect("there"), [0xff]);
        assert_eq!(fs::metadata(folder.path().join("c.rs")).and_then(|file| file.modified()).expect("there"), written);
    }
}
