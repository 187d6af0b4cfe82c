//! The file of what `verify` has found good, so that a run that was cut off can be finished and a long one need not begin anew.
//!
//! An entry stands for a run (case, engine, setting, seed, schedules) of certain launches of certain kernels: it counts as long as their text is
//! the same, wherever the kernels' source has moved to. What has changed runs again.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use verdigris_kir::program::{KernelRef, Program};
use verdigris_kir::text;

/// A line of the file.
#[derive(Serialize, Deserialize)]
struct Passed {
    id: String,
    /// Of the launches and their kernels.
    digest: String,
}

/// What has passed, in a file or, without one, nowhere.
#[derive(Default)]
pub(crate) struct Journal {
    file: Option<(Mutex<File>, PathBuf)>,
    passed: HashMap<String, String>,
    /// Kernels' texts by name, hashed.
    texts: Mutex<HashMap<String, blake3::Hash>>,
}

impl Journal {
    /// Reads the file, if there is one, and goes on writing behind its end.
    ///
    /// # Errors
    /// A file that cannot be read or written.
    pub(crate) fn open(path: Option<&Path>) -> Result<Journal> {
        let Some(path) = path else { return Ok(Journal::default()) };
        let mut passed = HashMap::new();
        if path.exists() {
            let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
            // The last line of a run that was cut off may be half a line.
            let lines = text.lines().filter_map(|line| serde_json::from_str::<Passed>(line).ok());
            passed.extend(lines.map(|line| (line.id, line.digest)));
        }
        let file = OpenOptions::new().create(true).append(true).open(path).with_context(|| format!("opening {}", path.display()))?;
        Ok(Journal { file: Some((Mutex::new(file), path.to_owned())), passed, ..Journal::default() })
    }

    /// Whether the run has passed with the same launches of the same kernels.
    pub(crate) fn has<'p>(&self, id: &str, programs: impl IntoIterator<Item = &'p Program>) -> bool {
        self.passed.get(id).is_some_and(|digest| *digest == self.digest(programs))
    }

    /// Keeps a run that passed. What cannot be written is said on stderr: the run was good all the same.
    pub(crate) fn keep<'p>(&self, id: &str, programs: impl IntoIterator<Item = &'p Program>) {
        let Some((file, path)) = &self.file else { return };
        let entry = Passed { id: id.to_owned(), digest: self.digest(programs) };
        let written = serde_json::to_string(&entry).map_err(std::io::Error::from).and_then(|line| {
            // One write a line, so that two processes on one file do not mix theirs.
            file.lock().unwrap_or_else(PoisonError::into_inner).write_all(format!("{line}\n").as_bytes())
        });
        if let Err(error) = written {
            eprintln!("writing {}: {error}", path.display());
        }
    }

    fn digest<'p>(&self, programs: impl IntoIterator<Item = &'p Program>) -> String {
        let mut hasher = blake3::Hasher::new();
        for program in programs {
            hasher.update(format!("{program:?}").as_bytes());
            program.launches().for_each(|launch| {
                hasher.update(self.text_hash(&launch.kernel).as_bytes());
            });
        }
        hasher.finalize().to_hex()[..16].to_owned()
    }

    fn text_hash(&self, kernel: &KernelRef) -> blake3::Hash {
        let known = || self.texts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(hash) = known().get(kernel.name()) {
            return *hash;
        }
        let hash = blake3::hash(without_positions(&text::print(&kernel.build())).as_bytes());
        known().insert(kernel.name().to_owned(), hash);
        hash
    }
}

/// The text form without the positions in the source that stand at the ends of its lines.
fn without_positions(text: &str) -> String {
    text.lines().map(|line| line.split("  ; ").next().unwrap_or_default().trim_end().to_owned() + "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_kir::face::{Header, build};
    use verdigris_kir::program::{Address, Arg, Launch, Residency, Step};

    fn program(value: u32, grid: u32) -> Program {
        let kernel = KernelRef::new(format!("test_{value}"), move || {
            build(Header { name: format!("test_{value}"), threads: 32, ..Header::default() }, |k| {
                let y = k.output("y", 4);
                k.st_global(y.at(k.thread(), 4), 0, k.constant(value % 10));
            })
        });
        let args = vec![Arg::Pointer(Address::buffer(0))];
        let launch = Launch { kernel, grid: [grid, 1, 1], residency: Residency::Any, overlap: false, args: args.into() };
        Program { steps: vec![Step::Launch(launch)], buffer_alignment_bytes: vec![4], ..Program::default() }
    }

    #[test]
    fn what_passed_counts_until_its_kernels_change() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("passed.jsonl");
        let journal = Journal::open(Some(&path)).expect("opens");
        assert!(!journal.has("a", [&program(1, 1)]));
        journal.keep("a", [&program(1, 1)]);
        journal.keep("b", [&program(2, 1)]);
        // A line that was cut off is no entry, and no harm.
        OpenOptions::new().append(true).open(&path).and_then(|mut file| file.write_all(b"{\"id\":\"c\",\"di")).expect("writes");
        let again = Journal::open(Some(&path)).expect("opens");
        assert!(again.has("a", [&program(1, 1)]) && again.has("b", [&program(2, 1)]));
        assert!(!again.has("c", [&program(1, 1)]), "half a line");
        assert!(!again.has("a", [&program(2, 1)]), "another kernel");
        assert!(!again.has("a", [&program(1, 2)]), "another launch");
        assert!(!Journal::open(None).expect("nothing to open").has("a", [&program(1, 1)]));
    }

    #[test]
    fn positions_in_the_source_do_not_count() {
        assert_eq!(without_positions("kernel k\n  r1 = Move 3    ; file.rs:3\n"), "kernel k\n  r1 = Move 3\n");
        let body = program(1, 1).launches().next().expect("one").kernel.build();
        let text = text::print(&body);
        assert!(text.contains("journal.rs:") && !without_positions(&text).contains("journal.rs:"), "{text}");
    }
}
