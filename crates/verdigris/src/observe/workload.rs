//! The problems that an application runs on GPUs, with how often: a list for `tune`, `bench workload` and `gate`.
//!
//! Named by `VERDIGRIS_RECORD`. A file of lines, each a number of executions, a tab, and the problem in words ([`verdigris_graph::Problem`]'s
//! text); lines of the same problem are added up by who reads them. A problem is written when it is first planned, and what was executed since every minute and
//! at the end, so that a process that is killed loses the counts of a minute. Lines are added under a lock beside the file, so that several processes may record into
//! one; a file that grows beyond [`MOST_BYTES`] is written anew with a line for each problem. Graphs on the CPU are run op by op, and are cut into no problems: nothing
//! is recorded of them.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use verdigris_graph::Problem;

use super::lock;
use crate::whole_files::write_whole;

/// How often counts are written.
const INTERVAL: Duration = Duration::from_secs(60);
/// The largest file: beyond it each problem gets one line, and those executed least are left out if that does not halve it.
const MOST_BYTES: u64 = 16 << 20;
/// Problems of one handle that are recorded; those that come later are not.
const MOST_PROBLEMS: usize = 65_536;

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

/// What a file of a workload says.
#[derive(Debug)]
pub struct Recorded {
    /// Each problem once, the most executed first.
    pub entries: Vec<Entry>,
    /// Lines that are none, and were passed over.
    pub bad_lines: usize,
    /// What is wrong with the first of them.
    pub first_bad: Option<WorkloadError>,
}

impl Recorded {
    /// What its reader should be told; `None` where every line could be read.
    pub fn remark(&self) -> Option<String> {
        let first = self.first_bad.as_ref()?;
        Some(format!("{} lines are passed over; the first: {first}", self.bad_lines))
    }
}

/// Reads a workload. A last line without its end is what a killed process left, and passed over in silence; other lines that are none are passed over and counted. A
/// file in which no line is one is refused.
///
/// ```
/// use verdigris::observe::{Entry, Recorded, WorkloadError, read_workload};
/// use verdigris::{DType, GemmProblem, Problem};
///
/// let problem = Problem::Gemm(GemmProblem::packed(64, 32, 16, DType::F64, DType::F64)?.canonical()?);
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("workload.txt");
/// std::fs::write(&path, format!("0\t{problem}\n3\t{problem}\n4\t{problem}\nfour\n4\tgemm f64"))?;
/// let recorded: Recorded = read_workload(&path)?;
/// let entries: &[Entry] = &recorded.entries;
/// assert_eq!((entries.len(), entries[0].executions), (1, 7));
/// assert_eq!(entries[0].problem, problem);
/// assert_eq!(recorded.bad_lines, 1);
/// assert!(recorded.remark().is_some_and(|remark| remark.contains("line 4")));
/// assert!(matches!(read_workload(&folder.path().join("none")), Err(WorkloadError::File { .. })));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`WorkloadError`].
pub fn read_workload(path: &Path) -> Result<Recorded, WorkloadError> {
    let bytes = std::fs::read(path).map_err(|source| WorkloadError::File { path: path.to_owned(), source })?;
    let recorded = read(path, &String::from_utf8_lossy(&bytes));
    match recorded {
        Recorded { entries, first_bad: Some(error), .. } if entries.is_empty() => Err(error),
        recorded => Ok(recorded),
    }
}

fn read(path: &Path, text: &str) -> Recorded {
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let mut sums: BTreeMap<&str, (u64, Vec<usize>)> = BTreeMap::new();
    let mut bad: BTreeMap<usize, WorkloadError> = BTreeMap::new();
    for (number, line) in whole.lines().enumerate().filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#')) {
        match counted(line) {
            Ok((count, words)) => {
                let sum = sums.entry(words).or_default();
                sum.0 = sum.0.saturating_add(count);
                sum.1.push(number + 1);
            }
            Err(reason) => drop(bad.insert(number + 1, bad_line(path, number + 1, line, reason))),
        }
    }
    let mut entries = Vec::with_capacity(sums.len());
    for (words, (executions, lines)) in sums {
        match words.parse::<Problem>() {
            Ok(problem) => entries.push(Entry { problem, executions }),
            Err(error) => bad.extend(lines.into_iter().map(|line| (line, bad_line(path, line, words, error.to_string())))),
        }
    }
    entries.sort_by_key(|entry| std::cmp::Reverse(entry.executions));
    Recorded { entries, bad_lines: bad.len(), first_bad: bad.into_values().next() }
}

fn counted(line: &str) -> Result<(u64, &str), String> {
    let (count, words) = line.split_once('\t').ok_or("there is no tab")?;
    Ok((count.parse().map_err(|_| format!("`{count}` is no number"))?, words))
}

fn bad_line(path: &Path, line: usize, text: &str, reason: String) -> WorkloadError {
    WorkloadError::Line { path: path.to_owned(), line, text: text.chars().take(80).collect(), reason }
}

/// The recorder of one handle.
#[derive(Debug)]
pub(crate) struct Workload {
    counts: Arc<Counts>,
    /// Whoever drops it ends the thread that writes.
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Counts {
    path: PathBuf,
    /// Whose counts they are: a child of it has copies, and writes none.
    process: u32,
    most_bytes: u64,
    counts: Mutex<HashMap<String, Arc<AtomicU64>>>,
    /// One writes at a time, so that the counts of a write that fails are added back before the next.
    writing: Mutex<()>,
    trouble: Mutex<Option<WorkloadError>>,
}

impl Workload {
    pub(crate) fn new(path: PathBuf) -> Workload {
        Workload::with(path, INTERVAL, MOST_BYTES)
    }

    fn with(path: PathBuf, interval: Duration, most_bytes: u64) -> Workload {
        let process = std::process::id();
        let counts = Counts { path, process, most_bytes, counts: Mutex::default(), writing: Mutex::default(), trouble: Mutex::default() };
        let counts = Arc::new(counts);
        let (end, ended) = channel::<()>();
        let written = Arc::clone(&counts);
        let work = move || {
            while ended.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                written.write();
            }
        };
        let thread = std::thread::Builder::new().name("verdigris-record".to_owned()).spawn(work);
        // Without a thread they are written at the end.
        let thread = thread.map_err(|source| counts.failed(source)).ok();
        Workload { counts, end: Some(end), thread }
    }

    /// Where executions of the problem are counted. A problem that is new is written at once, so that a killed process has told of it.
    pub(crate) fn counter(&self, problem: &Problem) -> Arc<AtomicU64> {
        let words = problem.to_string();
        let mut counts = lock(&self.counts.counts);
        if let Some(count) = counts.get(&words) {
            return Arc::clone(count);
        }
        if counts.len() >= MOST_PROBLEMS {
            return Arc::default();
        }
        let count = Arc::clone(counts.entry(words.clone()).or_default());
        drop(counts);
        self.counts.append(&format!("0\t{words}\n"));
        count
    }

    /// Writes what was counted since the last time.
    pub(crate) fn write(&self) {
        self.counts.write();
    }

    /// What last went wrong, as text. A workload that cannot be written stops nobody.
    pub(crate) fn trouble(&self) -> Option<String> {
        lock(&self.counts.trouble).as_ref().map(ToString::to_string)
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        drop(self.end.take());
        let thread = self.thread.take();
        if std::process::id() != self.counts.process {
            // A child of the process has no such thread: there is nothing to wait for, and nothing to give back.
            std::mem::forget(thread);
            return;
        }
        // What panicked there has told so itself.
        thread.map(JoinHandle::join);
        self.counts.write();
    }
}

impl Counts {
    fn write(&self) {
        if std::process::id() != self.process {
            return;
        }
        let _writing = lock(&self.writing);
        let mut lines = String::new();
        let mut written = Vec::new();
        for (words, count) in &*lock(&self.counts) {
            let executions = count.swap(0, Ordering::Relaxed);
            if executions > 0 {
                lines.push_str(&format!("{executions}\t{words}\n"));
                written.push((Arc::clone(count), executions));
            }
        }
        if !lines.is_empty() && !self.append(&lines) {
            for (count, executions) in written {
                count.fetch_add(executions, Ordering::Relaxed);
            }
        }
    }

    /// Adds lines; false where they could not be written.
    fn append(&self, lines: &str) -> bool {
        self.try_append(lines).map_err(|source| self.failed(source)).is_ok()
    }

    fn try_append(&self, lines: &str) -> std::io::Result<()> {
        let _lock = crate::plan_cache::lock(&self.path)?;
        let mut file = OpenOptions::new().create(true).append(true).read(true).open(&self.path)?;
        // Where a killed process left the beginning of a line, that line alone is bad.
        let begin = if ends_in_a_line(&mut file)? { "" } else { "\n" };
        file.write_all(format!("{begin}{lines}").as_bytes())?;
        let length_bytes = file.seek(SeekFrom::End(0))?;
        if length_bytes > self.most_bytes { self.compact() } else { Ok(()) }
    }

    /// Writes the file anew, under the lock: beside the old one, and then in its place.
    fn compact(&self) -> std::io::Result<()> {
        let text = String::from_utf8_lossy(&std::fs::read(&self.path)?).into_owned();
        let mut anew = String::new();
        let mut left_out = 0;
        for Entry { problem, executions } in read(&self.path, &text).entries {
            let line = format!("{executions}\t{problem}\n");
            // The most executed stand first.
            if left_out == 0 && (anew.len() + line.len()) as u64 <= self.most_bytes / 2 { anew.push_str(&line) } else { left_out += 1 }
        }
        if left_out > 0 {
            anew.push_str(&format!(
                "# {left_out} problems that were executed least are left out: the file was larger than {} bytes\n",
                self.most_bytes
            ));
        }
        write_whole(&[(&self.path, anew.as_bytes())]).map_err(|failed| failed.source)
    }

    fn failed(&self, source: std::io::Error) {
        *lock(&self.trouble) = Some(WorkloadError::File { path: self.path.clone(), source });
    }
}

/// Whether the file is empty, or its last line has its end.
fn ends_in_a_line(file: &mut File) -> std::io::Result<bool> {
    if file.seek(SeekFrom::End(0))? == 0 {
        return Ok(true);
    }
    file.seek(SeekFrom::End(-1))?;
    let mut last = [0];
    file.read_exact(&mut last)?;
    Ok(last == *b"\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_graph::GemmProblem;
    use verdigris_tensor::DType;

    const LONG: Duration = Duration::from_secs(3600);

    fn problem(m: u64) -> Problem {
        Problem::Gemm(
            GemmProblem::packed(m, 32, 16, DType::F32, DType::F32).and_then(|problem| problem.canonical()).expect("a plain product"),
        )
    }

    fn executions(path: &Path) -> Vec<u64> {
        read_workload(path).expect("reads").entries.iter().map(|entry| entry.executions).collect()
    }

    #[test]
    fn counts_are_written_in_time_though_nobody_collects() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("workload.txt");
        let workload = Workload::with(path.clone(), Duration::from_millis(5), MOST_BYTES);
        workload.counter(&problem(64)).fetch_add(3, Ordering::Relaxed);
        let end = std::time::Instant::now() + Duration::from_secs(20);
        while executions(&path) != [3] {
            assert!(std::time::Instant::now() < end, "{:?}", executions(&path));
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(workload.trouble(), None);
        drop(workload);
        assert_eq!(executions(&path), [3], "each once");
    }

    #[test]
    fn a_write_that_fails_loses_no_counts() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("later/workload.txt");
        let workload = Workload::with(path.clone(), LONG, MOST_BYTES);
        let count = workload.counter(&problem(64));
        count.fetch_add(5, Ordering::Relaxed);
        workload.write();
        assert!(workload.trouble().is_some_and(|trouble| trouble.contains("later/workload.txt")));
        std::fs::create_dir(folder.path().join("later")).expect("makes");
        count.fetch_add(2, Ordering::Relaxed);
        workload.write();
        assert_eq!(executions(&path), [7]);
    }

    /// What a killed process left of a line, and what another one writes behind it.
    #[test]
    fn a_torn_line_costs_itself_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("workload.txt");
        std::fs::write(&path, format!("4\t{}\n9\tgemm f3", problem(64))).expect("writes");
        let workload = Workload::with(path.clone(), LONG, MOST_BYTES);
        workload.counter(&problem(64)).fetch_add(1, Ordering::Relaxed);
        workload.counter(&problem(96)).fetch_add(2, Ordering::Relaxed);
        drop(workload);
        let recorded = read_workload(&path).expect("reads");
        assert_eq!(recorded.entries.iter().map(|entry| entry.executions).collect::<Vec<_>>(), [5, 2]);
        assert_eq!(recorded.bad_lines, 1);
        assert!(recorded.remark().is_some_and(|remark| remark.starts_with("1 lines") && remark.contains("line 2")), "{recorded:?}");
        std::fs::write(&path, "five\tgemm\n").expect("writes");
        assert!(matches!(read_workload(&path), Err(WorkloadError::Line { line: 1, .. })), "nothing in it is a workload");
    }

    #[test]
    fn the_file_is_bounded_and_keeps_its_sums() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("workload.txt");
        let workload = Workload::with(path.clone(), LONG, 4096);
        let counts: Vec<_> = (1..=3).map(|m| workload.counter(&problem(m))).collect();
        for _ in 0..500 {
            for (count, executions) in counts.iter().zip([1, 10, 100]) {
                count.fetch_add(executions, Ordering::Relaxed);
            }
            workload.write();
            let length_bytes = std::fs::metadata(&path).expect("is there").len();
            assert!(length_bytes <= 4096, "{length_bytes}");
        }
        assert_eq!(executions(&path), [50_000, 5_000, 500]);
        // More problems than there is room for: the most executed stay, and it is said.
        for m in 4..200 {
            workload.counter(&problem(m));
        }
        assert!(std::fs::metadata(&path).expect("is there").len() <= 4096);
        assert_eq!(executions(&path)[..3], [50_000, 5_000, 500]);
        assert!(std::fs::read_to_string(&path).expect("reads").contains("problems that were executed least are left out"));
        assert_eq!(workload.trouble(), None);
        let names: Vec<_> = std::fs::read_dir(folder.path()).expect("reads").map(|entry| entry.expect("an entry").file_name()).collect();
        assert_eq!(names.len(), 2, "the file and its lock: {names:?}");
    }
}
