//! Measured choices, remembered on disk as plain text: one line for each.
//!
//! ```text
//! plan1 <problem key> <device> <driver> <sources> <policy> <engine> <knobs> <µs> <check>        fields parted by tabs
//! ```
//!
//! A choice is found again for the same problem on the same kind of device, under the same driver, the same sources of the kernels and the
//! same limits; a later line stands before an earlier one. `check` is the start of a BLAKE3 of the text before it: a line that does not
//! agree is skipped and reported, and spoils no other. Lines are only ever added, each in one write under a lock, so that processes may
//! share a file and one that is killed loses nothing that it had kept. Empty lines and lines that begin with `#` say nothing.
//!
//! A set of lines ships with the library and is asked after the user's own; there, `*` in a field stands for any value.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use verdigris_engines::engine::Knobs;
use verdigris_graph::Key;

/// The first field of each line; changes with the meaning of the others.
const VERSION: &str = "plan1";
/// What ships with the library.
const SHIPPED: &str = include_str!("../tuned/tuned.txt");

/// What a choice depends on.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Question {
    /// The problem.
    pub problem: Key,
    /// Kind of device: name, architecture, number of SMs.
    pub device: String,
    /// The driver's version.
    pub driver: String,
    /// Hash of the sources of kernels and engines.
    pub sources: String,
    /// The limits, as text.
    pub policy: String,
}

impl Question {
    fn fields(&self) -> [String; 5] {
        [self.problem.to_string(), self.device.clone(), self.driver.clone(), self.sources.clone(), self.policy.clone()].map(|f| word(&f))
    }
}

/// Text as a field: no white space.
fn word(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { text.replace(char::is_whitespace, "_") }
}

/// A choice.
#[derive(Clone, PartialEq, Debug)]
pub struct Answer {
    /// The engine.
    pub engine: String,
    /// Its setting.
    pub knobs: Knobs,
    /// The time that was measured.
    pub us: f64,
}

/// Where a choice was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    /// In the user's file.
    User,
    /// In the set that ships with the library.
    Shipped,
}

/// A line that says nothing that can be used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DamagedLine {
    /// Its number, from 1.
    pub line: usize,
    /// What is wrong with it.
    pub what: &'static str,
}

/// A file of choices that cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("plan cache {path}, {doing}: {source}")]
pub struct PlanCacheError {
    /// The file.
    pub path: PathBuf,
    /// What was being done.
    pub doing: &'static str,
    /// What the system says.
    pub source: std::io::Error,
}

/// Choices in memory, and their file.
#[derive(Debug)]
pub struct PlanCache {
    path: Option<PathBuf>,
    shipped: Vec<([String; 5], Answer)>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    answers: HashMap<[String; 5], Answer>,
    damaged: Vec<DamagedLine>,
    /// The file's length when it was last read.
    read_bytes: u64,
}

impl PlanCache {
    /// A cache in that file, which need not exist; `None` remembers while the process lives.
    ///
    /// # Errors
    /// A file that is there and cannot be read.
    pub fn open(path: Option<PathBuf>) -> Result<PlanCache, PlanCacheError> {
        PlanCache::with_shipped(path, SHIPPED)
    }

    fn with_shipped(path: Option<PathBuf>, shipped: &str) -> Result<PlanCache, PlanCacheError> {
        let shipped = shipped.lines().filter_map(|line| parse(line).ok().flatten()).collect();
        let cache = PlanCache { path, shipped, state: Mutex::default() };
        cache.read(&mut cache.state())?;
        Ok(cache)
    }

    /// A cache without a file, and without what ships.
    pub fn in_memory() -> PlanCache {
        PlanCache { path: None, shipped: Vec::new(), state: Mutex::default() }
    }

    /// The file.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Lines of the user's file that were skipped.
    pub fn damaged(&self) -> Vec<DamagedLine> {
        self.state().damaged.clone()
    }

    /// The choice for a question. Where it is not known and the file has grown, other processes' choices are read.
    ///
    /// # Errors
    /// A file that can no longer be read.
    pub fn find(&self, question: &Question) -> Result<Option<(Answer, Found)>, PlanCacheError> {
        let fields = question.fields();
        let mut state = self.state();
        if !state.answers.contains_key(&fields) && self.file_bytes() != state.read_bytes {
            self.read(&mut state)?;
        }
        if let Some(answer) = state.answers.get(&fields) {
            return Ok(Some((answer.clone(), Found::User)));
        }
        let is_it = |known: &[String; 5]| known.iter().zip(&fields).all(|(known, asked)| known == "*" || known == asked);
        Ok(self.shipped.iter().find(|(known, _)| is_it(known)).map(|(_, answer)| (answer.clone(), Found::Shipped)))
    }

    /// Keeps a choice, on disk before this returns.
    ///
    /// # Errors
    /// A file that cannot be written; the choice is kept in memory nevertheless.
    pub fn keep(&self, question: &Question, answer: &Answer) -> Result<(), PlanCacheError> {
        let fields = question.fields();
        let line = line_of(&fields, answer);
        let mut state = self.state();
        state.answers.insert(fields, answer.clone());
        let Some(path) = &self.path else { return Ok(()) };
        let at = |doing| move |source| PlanCacheError { path: path.clone(), doing, source };
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(at("making its folder"))?;
        }
        let _lock = lock(path).map_err(at("locking it"))?;
        let mut file = OpenOptions::new().create(true).append(true).read(true).open(path).map_err(at("opening it"))?;
        // One who was killed while writing may have left a line without its end.
        let mut text = Vec::new();
        if file.seek(SeekFrom::End(0)).map_err(at("reading it"))? > 0 {
            let mut last = [0];
            file.seek(SeekFrom::End(-1)).and_then(|_| file.read_exact(&mut last)).map_err(at("reading it"))?;
            if last != *b"\n" {
                text.push(b'\n');
            }
        }
        text.extend_from_slice(line.as_bytes());
        file.write_all(&text).and_then(|()| file.sync_data()).map_err(at("writing to it"))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file_bytes(&self) -> u64 {
        self.path.as_ref().and_then(|path| fs::metadata(path).ok()).map_or(0, |metadata| metadata.len())
    }

    fn read(&self, state: &mut State) -> Result<(), PlanCacheError> {
        let Some(path) = &self.path else { return Ok(()) };
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(source) => return Err(PlanCacheError { path: path.clone(), doing: "reading it", source }),
        };
        state.read_bytes = bytes.len() as u64;
        state.damaged.clear();
        for (number, line) in String::from_utf8_lossy(&bytes).lines().enumerate() {
            match parse(line) {
                Ok(Some((fields, answer))) => {
                    state.answers.insert(fields, answer);
                }
                Ok(None) => {}
                Err(what) => state.damaged.push(DamagedLine { line: number + 1, what }),
            }
        }
        Ok(())
    }
}

/// A lock beside the file, held until it is dropped. A file system without locks goes without: a line is one write.
fn lock(path: &Path) -> std::io::Result<Option<File>> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let file = OpenOptions::new().create(true).append(true).open(PathBuf::from(name))?;
    match file.lock() {
        Ok(()) => Ok(Some(file)),
        Err(error) if error.kind() == std::io::ErrorKind::Unsupported => Ok(None),
        Err(error) => Err(error),
    }
}

/// A line, its end included.
fn line_of(fields: &[String; 5], answer: &Answer) -> String {
    let text = format!("{VERSION}\t{}\t{}\t{}\t{:.3}", fields.join("\t"), word(&answer.engine), answer.knobs, answer.us);
    let check = check(&text);
    format!("{text}\t{check}\n")
}

fn check(text: &str) -> String {
    blake3::hash(text.as_bytes()).to_hex().as_str()[..8].to_owned()
}

type Line = ([String; 5], Answer);

/// What a line says; `None` for one that says nothing.
fn parse(line: &str) -> Result<Option<Line>, &'static str> {
    if line.trim().is_empty() || line.starts_with('#') {
        return Ok(None);
    }
    let (text, told) = line.rsplit_once('\t').ok_or("it has one field")?;
    if check(text) != told {
        return Err("its check does not agree");
    }
    let fields: Vec<&str> = text.split('\t').collect();
    let [version, problem, device, driver, sources, policy, engine, knobs, us] = fields[..] else {
        return Err("it has too few or too many fields");
    };
    if version != VERSION {
        // Another version's line is whole, and not for us.
        return Ok(None);
    }
    let us: f64 = us.parse().map_err(|_| "its time is no number")?;
    let answer = Answer { engine: engine.to_owned(), knobs: knobs_of(knobs).ok_or("its knobs cannot be read")?, us };
    Ok(Some(([problem, device, driver, sources, policy].map(str::to_owned), answer)))
}

/// What [`Knobs`] print.
fn knobs_of(text: &str) -> Option<Knobs> {
    if text == "default" {
        return Some(Knobs::default());
    }
    let pairs: Vec<(&str, u32)> = (text.split(','))
        .map(|pair| pair.split_once('=').and_then(|(name, value)| Some((name, value.parse().ok()?))))
        .collect::<Option<_>>()?;
    Some(Knobs::new(pairs))
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_graph::{GemmProblem, Problem};
    use verdigris_tensor::DType;

    fn question(m: u64) -> Question {
        let gemm = GemmProblem::packed(m, 4, 5, DType::F32, DType::F32).expect("a plain product");
        Question {
            problem: Key::of(&Problem::Gemm(gemm)),
            device: "NVIDIA H200/sm_90a/132".to_owned(),
            driver: "13000".to_owned(),
            sources: "0123456789abcdef".to_owned(),
            policy: String::new(),
        }
    }

    fn answer(tile: u32) -> Answer {
        Answer { engine: "gemm.simt".to_owned(), knobs: Knobs::new([("tile", tile), ("stages", 3)]), us: 12.5 }
    }

    fn open(path: &Path) -> PlanCache {
        PlanCache::with_shipped(Some(path.to_owned()), "").expect("opens")
    }

    fn found(cache: &PlanCache, m: u64) -> Option<Answer> {
        cache.find(&question(m)).expect("reads").map(|(answer, _)| answer)
    }

    #[test]
    fn what_is_kept_is_found_by_another_process_and_the_last_stands() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("deep/plans.txt");
        let (writer, reader) = (open(&path), open(&path));
        assert_eq!(found(&reader, 1), None);
        writer.keep(&question(1), &answer(1)).expect("writes");
        writer.keep(&question(2), &Answer { knobs: Knobs::default(), ..answer(0) }).expect("writes");
        assert_eq!(found(&reader, 1), Some(answer(1)), "the file has grown");
        assert_eq!(found(&reader, 2).map(|answer| answer.knobs), Some(Knobs::default()));
        writer.keep(&question(1), &answer(7)).expect("writes");
        assert_eq!(found(&open(&path), 1), Some(answer(7)));
        // Each part of the question counts.
        let changes: [fn(&mut Question); 4] =
            [|q| q.device.push('x'), |q| q.driver.push('x'), |q| q.sources.push('x'), |q| q.policy.push('x')];
        for change in changes {
            let mut other = question(1);
            change(&mut other);
            assert_eq!(writer.find(&other).expect("reads"), None, "{other:?}");
        }
    }

    #[test]
    fn damage_is_skipped_and_reported_and_spoils_nothing_else() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("plans.txt");
        let cache = open(&path);
        for m in 1..=4 {
            cache.keep(&question(m), &answer(m as u32)).expect("writes");
        }
        let text = fs::read_to_string(&path).expect("reads");
        let lines: Vec<&str> = text.lines().collect();
        // The second line has another time, the third is cut short, and the last one has lost its end: a writer was killed.
        let damaged = format!("# words\n\n{}\n{}\n{}\n{}", lines[0], lines[1].replace("12.500", "1.500"), &lines[2][..30], &lines[3][..50]);
        fs::write(&path, damaged).expect("writes");
        let cache = open(&path);
        assert_eq!([1, 2, 3, 4].map(|m| found(&cache, m).is_some()), [true, false, false, false]);
        assert_eq!(cache.damaged().iter().map(|line| line.line).collect::<Vec<_>>(), [4, 5, 6]);
        cache.keep(&question(5), &answer(5)).expect("writes");
        assert_eq!(found(&open(&path), 5), Some(answer(5)), "it does not hang on to the cut line");
        // Bytes that are no text, and lines of a later version.
        let mut bytes = fs::read(&path).expect("reads");
        bytes.extend_from_slice(b"\xff\xfe\x00\n");
        let later = "plan2\tanything";
        bytes.extend_from_slice(format!("{later}\t{}\n", check(later)).as_bytes());
        fs::write(&path, bytes).expect("writes");
        assert_eq!(open(&path).damaged().len(), 5);
    }

    #[test]
    fn many_writers_lose_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("plans.txt");
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let path = &path;
                scope.spawn(move || {
                    // A cache of one's own is what another process has: they share the file alone.
                    let cache = open(path);
                    for i in 0..10 {
                        cache.keep(&question(1 + writer * 10 + i), &answer(i as u32)).expect("writes");
                    }
                });
            }
        });
        let cache = open(&path);
        assert!((1..=40).all(|m| found(&cache, m).is_some()));
        assert_eq!(cache.damaged(), []);
    }

    #[test]
    fn what_ships_is_asked_last_and_any_value_fits_a_star() {
        let mut fields = question(1).fields();
        fields[2] = "*".to_owned();
        fields[3] = "*".to_owned();
        let shipped = line_of(&fields, &answer(9));
        let cache = PlanCache::with_shipped(None, &shipped).expect("opens");
        let mut other = question(1);
        other.driver = "14000".to_owned();
        assert_eq!(cache.find(&other).expect("reads"), Some((answer(9), Found::Shipped)));
        assert_eq!(cache.find(&question(2)).expect("reads"), None);
        cache.keep(&other, &answer(1)).expect("keeps");
        assert_eq!(cache.find(&other).expect("reads"), Some((answer(1), Found::User)));
        // What ships with this build can be read, every line of it.
        assert!(SHIPPED.lines().all(|line| parse(line).is_ok()));
        PlanCache::open(None).expect("opens");
    }
}
