//! The problems that an application runs, with how often: a list for `tune`, `inspect`, `canary` and `gate`.
//!
//! Named by `VERDIGRIS_RECORD`. A file of lines, each a number of executions, a tab, and the problem in words ([`verdigris_graph::Problem`]'s
//! text); lines of the same problem are added up by who reads them. Lines are only ever appended, each by one write, so that several processes may
//! record into one file, and one that is killed loses no more than its latest counts.

use std::collections::{BTreeMap, HashMap};
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use verdigris_graph::Problem;

use super::lock;

/// What was wrong with the file of a workload.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkloadError {
    /// It cannot be read or written.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A line that is none.
    #[error("{path}, line {line}: `{text}` is no workload; a line is a number of executions, a tab, and a problem in words: {reason}", path = path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line's number, from 1.
        line: usize,
        /// What it says, shortened.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// A problem of a workload.
#[derive(Clone, PartialEq, Debug)]
pub struct Entry {
    /// The problem.
    pub problem: Problem,
    /// How often it was executed.
    pub executions: u64,
}

/// Reads a workload: each problem once, the most executed first. A last line without its end is what a killed process left, and passed over.
///
/// ```
/// use verdigris::observe::{Entry, WorkloadError, read_workload};
/// use verdigris::{DType, GemmProblem, Problem};
///
/// let problem = Problem::Gemm(GemmProblem::packed(64, 32, 16, DType::F64, DType::F64)?.canonical()?);
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("workload.txt");
/// std::fs::write(&path, format!("0\t{problem}\n3\t{problem}\n4\t{problem}\n4\tgemm f64"))?;
/// let entries: Vec<Entry> = read_workload(&path)?;
/// assert_eq!((entries.len(), entries[0].executions), (1, 7));
/// assert_eq!(entries[0].problem, problem);
/// assert!(matches!(read_workload(&folder.path().join("none")), Err(WorkloadError::File { .. })));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`WorkloadError`].
pub fn read_workload(path: &Path) -> Result<Vec<Entry>, WorkloadError> {
    let bytes = std::fs::read(path).map_err(|source| WorkloadError::File { path: path.to_owned(), source })?;
    let text = String::from_utf8_lossy(&bytes);
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let mut sums: BTreeMap<&str, (u64, usize)> = BTreeMap::new();
    for (number, line) in whole.lines().enumerate().filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#')) {
        let bad = |reason: String| {
            let text = line.chars().take(80).collect();
            WorkloadError::Line { path: path.to_owned(), line: number + 1, text, reason }
        };
        let (count, words) = line.split_once('\t').ok_or_else(|| bad("there is no tab".to_owned()))?;
        let count: u64 = count.parse().map_err(|_| bad(format!("`{count}` is no number")))?;
        let sum = sums.entry(words).or_insert((0, number + 1));
        sum.0 = sum.0.saturating_add(count);
    }
    let mut entries = Vec::with_capacity(sums.len());
    for (words, (executions, line)) in sums {
        let problem = words.parse().map_err(|error: verdigris_graph::Error| {
            let text = words.chars().take(80).collect();
            WorkloadError::Line { path: path.to_owned(), line, text, reason: error.to_string() }
        })?;
        entries.push(Entry { problem, executions });
    }
    entries.sort_by_key(|entry| std::cmp::Reverse(entry.executions));
    Ok(entries)
}

/// The recorder of one handle.
#[derive(Debug)]
pub(crate) struct Workload {
    path: PathBuf,
    counts: Mutex<HashMap<String, Arc<AtomicU64>>>,
    trouble: Mutex<Option<WorkloadError>>,
}

impl Workload {
    pub(crate) fn new(path: PathBuf) -> Workload {
        Workload { path, counts: Mutex::default(), trouble: Mutex::default() }
    }

    /// Where executions of the problem are counted. A problem that is new is written at once, so that a killed process has told of it.
    pub(crate) fn counter(&self, problem: &Problem) -> Arc<AtomicU64> {
        let words = problem.to_string();
        let mut counts = lock(&self.counts);
        if let Some(count) = counts.get(&words) {
            return Arc::clone(count);
        }
        self.append(&format!("0\t{words}\n"));
        Arc::clone(counts.entry(words).or_default())
    }

    /// Writes what was counted since the last time.
    pub(crate) fn write(&self) {
        let mut lines = String::new();
        for (words, count) in &*lock(&self.counts) {
            let executions = count.swap(0, Ordering::Relaxed);
            if executions > 0 {
                lines.push_str(&format!("{executions}\t{words}\n"));
            }
        }
        if !lines.is_empty() {
            self.append(&lines);
        }
    }

    /// What last went wrong, as text. A workload that cannot be written stops nobody.
    pub(crate) fn trouble(&self) -> Option<String> {
        lock(&self.trouble).as_ref().map(ToString::to_string)
    }

    fn append(&self, lines: &str) {
        let written = OpenOptions::new().create(true).append(true).open(&self.path).and_then(|mut file| file.write_all(lines.as_bytes()));
        if let Err(source) = written {
            *lock(&self.trouble) = Some(WorkloadError::File { path: self.path.clone(), source });
        }
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        self.write();
    }
}
