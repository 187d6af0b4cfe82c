//! What runs said, a line each as they end, so that a run of many mutants that was cut off goes on where it stopped.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::Mutex;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::judge::Said;
use super::list::Run;

/// The runs that are known, and the file to which others are added.
#[derive(Default)]
pub(super) struct Journal {
    sources: String,
    known: BTreeMap<(String, u64, u64), Said>,
    file: Option<Mutex<File>>,
}

/// A line: a run of a mutant (0: none) under a seed, of these sources.
#[derive(Serialize, Deserialize)]
struct Line {
    sources: String,
    run: String,
    seed: u64,
    mutant: u64,
    said: Said,
}

impl Journal {
    /// Reads what `path` has of these sources; lines of others, and a last one that was cut off, are passed over.
    ///
    /// # Errors
    /// A file that cannot be read or written.
    pub(super) fn open(path: &Path, sources: String) -> Result<Journal> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error).with_context(|| format!("reading {}", path.display())),
        };
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok()).filter(|line| line.sources == sources);
        let known = lines.map(|line| ((line.run, line.seed, line.mutant), line.said)).collect();
        let mut file = OpenOptions::new().create(true).append(true).open(path).with_context(|| format!("opening {}", path.display()))?;
        if !text.is_empty() && !text.ends_with('\n') {
            writeln!(file).with_context(|| format!("writing {}", path.display()))?;
        }
        Ok(Journal { sources, known, file: Some(Mutex::new(file)) })
    }

    /// What a run said before.
    pub(super) fn said(&self, run: &Run, seed: u64, mutant: u64) -> Option<Said> {
        self.known.get(&(run.words(), seed, mutant)).cloned()
    }

    /// Takes a run down.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub(super) fn keep(&self, run: &Run, seed: u64, mutant: u64, said: &Said) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let line = Line { sources: self.sources.clone(), run: run.words(), seed, mutant, said: said.clone() };
        let text = serde_json::to_string(&line)? + "\n";
        let mut file = file.lock().map_err(|_| anyhow::anyhow!("a run of a mutant panicked"))?;
        file.write_all(text.as_bytes()).context("writing what a run said")
    }
}

#[cfg(test)]
mod tests {
    use super::super::judge::{Found, Place};
    use super::*;

    #[test]
    fn a_run_goes_on_where_it_was_cut_off() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("journal");
        let run = Run { verify: Some("gemm/x".to_owned()), ..Run::default() };
        let found = Found { by: "race".to_owned(), line: "a.rs:1:1".to_owned(), place: Place::Kernel };
        let said = Said { found: Some(found), reached: true, ran: 3, seconds: 0.5 };
        let first = Journal::open(&path, "one".to_owned()).expect("new");
        assert_eq!(first.said(&run, 1, 7), None);
        first.keep(&run, 1, 7, &said).expect("kept");
        // Killed while it wrote.
        std::fs::write(&path, std::fs::read_to_string(&path).expect("text") + "{\"sources\":\"one\",\"run").expect("written");
        let next = Journal::open(&path, "one".to_owned()).expect("there");
        assert_eq!(next.said(&run, 1, 7), Some(said.clone()));
        assert_eq!((next.said(&run, 2, 7), next.said(&run, 1, 8)), (None, None));
        next.keep(&run, 2, 7, &said).expect("kept behind what was cut off");
        assert_eq!(Journal::open(&path, "one".to_owned()).expect("there").said(&run, 2, 7), Some(said));
        assert_eq!(Journal::open(&path, "two".to_owned()).expect("there").said(&run, 1, 7), None, "other sources");
        assert!(Journal::open(folder.path(), "one".to_owned()).is_err(), "a folder");
    }
}
