//! Measured choices, remembered on disk as plain text: one line for each.
//!
//! ```text
//! plan2 <problem> <device> <driver> <policy> <engine> <version> <config> <µs> <check>        fields parted by tabs
//! plan2 gemm bf16 m=4096 n=4096 k=1024 b=t + relu ...
//! ```
//!
//! The problem stands in words ([`Problem`](verdigris_graph::Problem) prints and reads them). A choice is found again for the same problem on the
//! same kind of device, under the same driver and the same limits; a later line stands before an earlier one. It holds as long as its engine has
//! the version that it was measured with ([`Engine::version`]); whoever asks looks. `check` is the start of a
//! BLAKE3 of the text before it: a line that does not agree is skipped and reported, and spoils no other. Lines are added, each in one write under
//! a lock, so that processes may share a file and one that is killed loses nothing that it had kept. Empty lines and lines that begin with `#` say
//! nothing. A file in which most lines are no longer asked for is written anew without them, beside the old one and then in its place
//! ([`PlanCache::compact`]); where the path is a link, it stays one, and files are written and locks held where it leads to, so that processes may name one file in several ways. Lines of an earlier form (`plan1`, kept under a hash of all sources) are counted, left where they are, and not read: what
//! they were measured with cannot be told from them ([`PlanCache::remark`]).
//!
//! A set of lines ships with the library and is asked after the user's own. There `*` in a field stands for any value, and the driver need not be
//! this one: a line that was measured with another serves, and says so. The config that it names is asked of its engine before it is used, as with
//! every remembered choice; one that is gone is passed over, and the explanation tells it.

mod shipped;

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use verdigris_cuda::trust::{self, Distrust};
use verdigris_engines::engine::{Engine, Knobs};

use crate::select::Ranked;
use crate::whole_files::{Beside, behind_links};

pub use shipped::{TunedChoice, with_choices};

/// The first field of each line; changes with the meaning of the others.
const VERSION: &str = "plan2";
/// Forms of earlier builds.
const EARLIER: [&str; 1] = ["plan1"];

/// What a choice depends on.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Question {
    /// The problem, in words.
    pub problem: String,
    /// Kind of device: name, architecture, number of SMs.
    pub device: String,
    /// The driver's version.
    pub driver: String,
    /// The limits, as text.
    pub policy: String,
}

/// Those of a [`Question`], in order.
type Fields = [String; 4];

impl Question {
    pub(crate) fn fields(&self) -> Fields {
        // The words of a problem hold no white space but single spaces.
        [self.problem.clone(), word(&self.device), word(&self.driver), word(&self.policy)]
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
    /// The engine's version when it was measured.
    pub version: u32,
    /// Its setting.
    pub knobs: Knobs,
    /// The time that was measured.
    pub us: f64,
}

impl Answer {
    /// This way, measured with its engine as it is in this build.
    pub fn of(way: &Ranked, us: f64) -> Answer {
        let Ranked { engine, knobs, .. } = way;
        let version = verdigris_engines::engine(engine.name).map_or(0, Engine::version);
        Answer { engine: engine.name.to_owned(), version, knobs: knobs.clone(), us }
    }
}

/// Where a choice was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Found {
    /// In the user's file.
    User,
    /// In the set that ships with the library.
    Shipped {
        /// Whether it was measured with another driver than this one.
        with_another_driver: bool,
    },
}

impl Found {
    /// In words.
    pub const fn words(&self) -> &'static str {
        match self {
            Found::User => "the plan cache",
            Found::Shipped { .. } => "the set that ships",
        }
    }
}

/// Whose choices are asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Whose {
    /// Those of this machine alone.
    Users,
    /// Those of this machine, and where there is none those that ship with the library.
    UsersThenShipped,
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
    /// What the system says, or the [`Distrust`] of a file that others can write.
    pub source: std::io::Error,
}

impl PlanCacheError {
    /// Who else can write the file, if it was refused for that.
    pub fn distrust(&self) -> Option<&Distrust> {
        Distrust::of(&self.source)
    }
}

/// Choices in memory, and their file.
#[derive(Debug)]
pub struct PlanCache {
    path: Option<PathBuf>,
    shipped: Cow<'static, str>,
    /// Where the lines of each problem stand in it; made when it is first asked, and read a line at a time, since most are never wanted.
    shipped_lines: OnceLock<HashMap<String, Vec<Range<usize>>>>,
    state: Mutex<State>,
    /// Held while lines are added: threads of this process stand behind each other where the file system has no locks, too. Taken before the state.
    appending: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    answers: HashMap<Fields, Answer>,
    damaged: Vec<DamagedLine>,
    /// Lines of an earlier form.
    earlier: usize,
    /// The file as it was when it was last read or written.
    seen: Option<Stamp>,
    /// Lines with choices in it.
    lines: usize,
    /// Choices that are not in it yet, in the order in which they were kept; they are newer than all that is read of it.
    unwritten: Vec<Line>,
}

/// What tells one state of a file from another: its length and when it was changed.
type Stamp = (u64, Option<SystemTime>);

/// What [`PlanCache::compact`] did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Compaction {
    /// Lines with choices that are left.
    pub kept: usize,
    /// Lines that are gone: earlier choices, damaged lines, and of a problem's choices with other drivers all but the last few.
    pub dropped: usize,
}

/// Of a problem's choices, those with so many drivers are kept.
const MOST_DRIVERS: usize = 4;

/// A file is written anew when it has this many lines more than twice those that are asked for.
const SPARE_LINES: usize = 64;

impl PlanCache {
    /// A cache in that file, which need not exist; `None` remembers while the process lives.
    ///
    /// # Errors
    /// A file that is there and cannot be read, or that others can write ([`PlanCacheError::distrust`]).
    pub fn open(path: Option<PathBuf>) -> Result<PlanCache, PlanCacheError> {
        PlanCache::with_shipped(path, shipped::SET)
    }

    pub(crate) fn with_shipped(path: Option<PathBuf>, shipped: impl Into<Cow<'static, str>>) -> Result<PlanCache, PlanCacheError> {
        let cache = PlanCache::new(path, shipped.into());
        cache.read(&mut cache.state())?;
        Ok(cache)
    }

    /// A cache in that file as [`PlanCache::open`] makes it, and nothing that ships is in it.
    pub(crate) fn without_shipped(path: Option<PathBuf>) -> Result<PlanCache, PlanCacheError> {
        PlanCache::with_shipped(path, "")
    }

    /// A cache without a file, and without what ships.
    pub fn in_memory() -> PlanCache {
        PlanCache::new(None, Cow::Borrowed(""))
    }

    fn new(path: Option<PathBuf>, shipped: Cow<'static, str>) -> PlanCache {
        PlanCache { path, shipped, shipped_lines: OnceLock::new(), state: Mutex::default(), appending: Mutex::default() }
    }

    /// The file.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Lines of the user's file that were skipped.
    pub fn damaged(&self) -> Vec<DamagedLine> {
        self.state().damaged.clone()
    }

    /// What a reader should know of the user's file: how many choices of an earlier form it holds, which are not read.
    pub fn remark(&self) -> Option<String> {
        let earlier = self.state().earlier;
        let path = self.path.as_ref().filter(|_| earlier > 0)?;
        let (path, forms) = (path.display(), EARLIER.join(", "));
        Some(format!("plan cache {path}: {earlier} choices of an earlier form ({forms}) are not read; tuning measures them again"))
    }

    /// The choice for a question. Where it is not known and the file has changed, other processes' choices are read.
    ///
    /// # Errors
    /// A file that can no longer be read.
    pub fn find(&self, question: &Question) -> Result<Option<(Answer, Found)>, PlanCacheError> {
        self.find_of(question, Whose::UsersThenShipped)
    }

    /// As [`PlanCache::find`], in that of the sets that is asked.
    pub(crate) fn find_of(&self, question: &Question, whose: Whose) -> Result<Option<(Answer, Found)>, PlanCacheError> {
        let fields = question.fields();
        let mut state = self.state();
        if !state.answers.contains_key(&fields) && self.stamp() != state.seen {
            self.read(&mut state)?;
        }
        if let Some(answer) = state.answers.get(&fields) {
            return Ok(Some((answer.clone(), Found::User)));
        }
        Ok(if whose == Whose::Users { None } else { self.shipped(&fields) })
    }

    /// The line that ships for a question: that measured under the most alike circumstances, of several the last.
    fn shipped(&self, asked: &Fields) -> Option<(Answer, Found)> {
        let fits = |known: &str, asked: &str| known == "*" || known == asked;
        let mut best: Option<(Answer, bool)> = None;
        let lines = self.shipped_lines.get_or_init(|| lines_by_problem(&self.shipped)).get(&asked[0])?;
        for ([_, device, driver, policy], answer) in lines.iter().filter_map(|at| parse(&self.shipped[at.clone()]).ok().flatten()) {
            if !fits(&device, &asked[1]) || !fits(&policy, &asked[3]) {
                continue;
            }
            let with_another_driver = !fits(&driver, &asked[2]);
            if best.as_ref().is_none_or(|(_, least)| with_another_driver <= *least) {
                best = Some((answer, with_another_driver));
            }
        }
        best.map(|(answer, with_another_driver)| (answer, Found::Shipped { with_another_driver }))
    }

    /// Keeps a choice, on disk before this returns. Whoever asks meanwhile does not wait for the disk, nor for other processes.
    ///
    /// # Errors
    /// A file that cannot be written, or that another process has locked for seconds; the choice is kept in memory nevertheless, and is written with
    /// the next one, or at the end.
    pub fn keep(&self, question: &Question, answer: &Answer) -> Result<(), PlanCacheError> {
        let fields = question.fields();
        let mut state = self.state();
        state.answers.insert(fields.clone(), answer.clone());
        let Some(path) = &self.path else { return Ok(()) };
        state.unwritten.push((fields, answer.clone()));
        drop(state);
        self.write(path)
    }

    /// Adds what is not in the file yet.
    fn write(&self, path: &Path) -> Result<(), PlanCacheError> {
        let at = |doing| move |source| PlanCacheError { path: path.to_owned(), doing, source };
        if let Some(folder) = behind_links(path).parent() {
            create_folder(folder).map_err(at("making its folder"))?;
        }
        let lock = lock(path).map_err(at("locking it"))?;
        let appending = self.appending.lock().unwrap_or_else(PoisonError::into_inner);
        // They are unwritten until they are on the disk: whoever reads the file meanwhile does not take older ones for them.
        let (lines, seen) = {
            let state = self.state();
            (state.unwritten.iter().map(|(fields, answer)| line_of(fields, answer)).collect::<Vec<_>>(), state.seen)
        };
        // Another thread may have written them all.
        if lines.is_empty() {
            return Ok(());
        }
        // What others have written meanwhile is not read for the sake of a line.
        let is_ours = self.stamp() == seen;
        append(path, &lines).map_err(|(doing, source)| at(doing)(source))?;
        let stamp = self.stamp();
        let mut state = self.state();
        state.unwritten.drain(..lines.len());
        state.lines += lines.len();
        if is_ours && state.seen == seen {
            state.seen = stamp;
        }
        let is_long = state.lines > 2 * state.answers.len() + SPARE_LINES;
        drop(state);
        drop(appending);
        if lock.is_some() && is_long {
            self.rewrite(path)?;
        }
        Ok(())
    }

    /// Writes the file anew with what is still asked for: of each question the last choice, of each problem those for the last few drivers; comments
    /// and lines of other forms stay, and so does a link at its path, and the file's mode. `None` where there is no file, or no lock to be had: other processes
    /// may be adding to it.
    ///
    /// # Errors
    /// A file that cannot be read or written; the old one stays as it was.
    pub fn compact(&self) -> Result<Option<Compaction>, PlanCacheError> {
        let Some(path) = self.path.as_deref().filter(|path| path.exists()) else { return Ok(None) };
        let at = |doing| move |source| PlanCacheError { path: path.to_owned(), doing, source };
        match lock(path).map_err(at("locking it"))? {
            Some(_lock) => self.rewrite(path).map(Some),
            None => Ok(None),
        }
    }

    /// As [`PlanCache::compact`], with the lock held.
    fn rewrite(&self, path: &Path) -> Result<Compaction, PlanCacheError> {
        let at = |doing| move |source| PlanCacheError { path: path.to_owned(), doing, source };
        // What other processes added is in the file alone.
        self.read(&mut self.state())?;
        let bytes = fs::read(path).map_err(at("reading it"))?;
        let text = String::from_utf8_lossy(&bytes);
        let mut done = Compaction { kept: 0, dropped: 0 };
        let mut seen = HashSet::new();
        let mut drivers: HashMap<[String; 3], usize> = HashMap::new();
        let mut kept: Vec<&str> = Vec::new();
        // From the end: the last of equal questions stands.
        for line in text.lines().rev() {
            let stays = match parse(line) {
                Ok(None) => {
                    kept.push(line);
                    continue;
                }
                Err(_) => false,
                Ok(Some((fields, _))) => {
                    let [problem, device, _, policy] = fields.clone();
                    let is_last = seen.insert(fields);
                    let count = drivers.entry([problem, device, policy]).or_default();
                    *count += usize::from(is_last);
                    is_last && *count <= MOST_DRIVERS
                }
            };
            if stays {
                kept.push(line);
                done.kept += 1;
            } else {
                done.dropped += 1;
            }
        }
        let mut text: String = kept.into_iter().rev().flat_map(|line| [line, "\n"]).collect();
        if text.trim().is_empty() {
            text.clear();
        }
        let place = behind_links(path);
        // Nobody else could write what was trusted just now; who may read it stays.
        let permissions = fs::metadata(&place).map_err(at("reading it"))?.permissions();
        let (beside, mut file) = Beside::create(place, private(&mut OpenOptions::new())).map_err(at("writing it anew"))?;
        file.write_all(text.as_bytes())
            .and_then(|()| file.set_permissions(permissions))
            .and_then(|()| file.sync_all())
            .map_err(at("writing it anew"))?;
        drop(file);
        beside.put().map_err(at("putting the new one in its place"))?;
        self.read(&mut self.state())?;
        Ok(done)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stamp(&self) -> Option<Stamp> {
        let metadata = fs::metadata(self.path.as_ref()?).ok()?;
        Some((metadata.len(), metadata.modified().ok()))
    }

    fn read(&self, state: &mut State) -> Result<(), PlanCacheError> {
        let Some(path) = &self.path else { return Ok(()) };
        // Asked before it is read: what is added in between is read the next time.
        state.seen = self.stamp();
        let mut bytes = Vec::new();
        match trust::open(path).and_then(|mut file| file.read_to_end(&mut bytes)) {
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(source) if Distrust::of(&source).is_some() => {
                return Err(PlanCacheError { path: path.clone(), doing: "trusting it", source });
            }
            Err(source) => return Err(PlanCacheError { path: path.clone(), doing: "reading it", source }),
        }
        state.damaged.clear();
        (state.lines, state.earlier) = (0, 0);
        for (number, line) in String::from_utf8_lossy(&bytes).lines().enumerate() {
            match parse(line) {
                Ok(Some((fields, answer))) => {
                    state.lines += 1;
                    state.answers.insert(fields, answer);
                }
                Ok(None) => state.earlier += usize::from(EARLIER.iter().any(|form| line.split('\t').next() == Some(form))),
                Err(what) => state.damaged.push(DamagedLine { line: number + 1, what }),
            }
        }
        // What this process kept last and has not written yet stands behind all of these.
        state.answers.extend(state.unwritten.iter().cloned());
        Ok(())
    }
}

impl Drop for PlanCache {
    /// Tries once more to write what could not be written.
    fn drop(&mut self) {
        let is_whole = self.state.get_mut().unwrap_or_else(PoisonError::into_inner).unwritten.is_empty();
        if let Some(path) = self.path.clone().filter(|_| !is_whole) {
            // Whoever kept the choice was told.
            let _ = self.write(&path);
        }
    }
}

/// Adds lines to a file, in one write, and sees them on the disk; else what was being done.
fn append(path: &Path, lines: &[String]) -> Result<(), (&'static str, std::io::Error)> {
    let at = |doing| move |source| (doing, source);
    let mut file = private(OpenOptions::new().create(true).append(true).read(true)).open(path).map_err(at("opening it"))?;
    trust::judge(path, &file).map_err(at("trusting it"))?;
    // One who was killed while writing may have left a line without its end.
    let mut text = Vec::new();
    if file.seek(SeekFrom::End(0)).map_err(at("reading it"))? > 0 {
        let mut last = [0];
        file.seek(SeekFrom::End(-1)).and_then(|_| file.read_exact(&mut last)).map_err(at("reading it"))?;
        if last != *b"\n" {
            text.push(b'\n');
        }
    }
    lines.iter().for_each(|line| text.extend_from_slice(line.as_bytes()));
    file.write_all(&text).and_then(|()| file.sync_data()).map_err(at("writing to it"))
}

/// Where the lines of each problem stand.
fn lines_by_problem(text: &str) -> HashMap<String, Vec<Range<usize>>> {
    let mut lines: HashMap<String, Vec<Range<usize>>> = HashMap::new();
    let mut begin = 0;
    for line in text.split_inclusive('\n') {
        let mut fields = line.split('\t');
        if let (Some(VERSION), Some(problem)) = (fields.next(), fields.next()) {
            lines.entry(problem.to_owned()).or_default().push(begin..begin + line.trim_end().len());
        }
        begin += line.len();
    }
    lines
}

/// A file that is made is this user's alone.
#[cfg(unix)]
fn private(options: &mut OpenOptions) -> &mut OpenOptions {
    use std::os::unix::fs::OpenOptionsExt;
    options.mode(0o600)
}

#[cfg(not(unix))]
fn private(options: &mut OpenOptions) -> &mut OpenOptions {
    options
}

/// Folders that are not there are made, for this user alone.
#[cfg(unix)]
fn create_folder(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

#[cfg(not(unix))]
fn create_folder(path: &Path) -> std::io::Result<()> {
    fs::create_dir_all(path)
}

/// The longest that is waited for another process, which holds a lock while it writes a line, or a file of some hundred kilobytes.
const LONGEST_LOCK: Duration = Duration::from_secs(2);

/// A lock beside the file, held until it is dropped. A file system without locks goes without: a line is one write.
pub(crate) fn lock(path: &Path) -> std::io::Result<Option<File>> {
    // By whatever links the file is named, there is one lock of it.
    let mut name = behind_links(path).into_os_string();
    name.push(".lock");
    let name = PathBuf::from(name);
    let file = private(OpenOptions::new().create(true).append(true)).open(&name)?;
    let until = Instant::now() + LONGEST_LOCK;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Some(file)),
            Err(TryLockError::WouldBlock) if Instant::now() < until => std::thread::sleep(Duration::from_millis(2)),
            Err(TryLockError::WouldBlock) => {
                let held = format!("another process has held {} for {} seconds", name.display(), LONGEST_LOCK.as_secs());
                return Err(std::io::Error::new(std::io::ErrorKind::TimedOut, held));
            }
            Err(TryLockError::Error(error)) if has_no_locks(&error) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}

/// Whether the file system says that it has no locks, or none left to give: `ENOLCK`, as of a network without the service.
fn has_no_locks(error: &std::io::Error) -> bool {
    const ENOLCK: i32 = if cfg!(target_os = "macos") { 77 } else { 37 };
    error.kind() == std::io::ErrorKind::Unsupported || (cfg!(unix) && error.raw_os_error() == Some(ENOLCK))
}

/// A line, its end included.
pub(crate) fn line_of(fields: &Fields, answer: &Answer) -> String {
    let Answer { engine, version, knobs, us } = answer;
    let text = format!("{VERSION}\t{}\t{}\t{version}\t{knobs}\t{us:.3}", fields.join("\t"), word(engine));
    let check = check(&text);
    format!("{text}\t{check}\n")
}

fn check(text: &str) -> String {
    blake3::hash(text.as_bytes()).to_hex().as_str()[..8].to_owned()
}

type Line = (Fields, Answer);

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
    if fields[0] != VERSION {
        // A line of another form is whole, and not for us.
        return Ok(None);
    }
    let [_, problem, device, driver, policy, engine, version, knobs, us] = fields[..] else {
        return Err("it has too few or too many fields");
    };
    let version = version.parse().map_err(|_| "its engine's version is no number")?;
    let us: f64 = us.parse().map_err(|_| "its time is no number")?;
    let answer = Answer { engine: engine.to_owned(), version, knobs: knobs_of(knobs).ok_or("its config cannot be read")?, us };
    Ok(Some(([problem, device, driver, policy].map(str::to_owned), answer)))
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
    use std::sync::atomic::{AtomicBool, Ordering};
    use verdigris_graph::{GemmProblem, Problem};
    use verdigris_tensor::DType;

    fn question(m: u64) -> Question {
        let gemm = GemmProblem::packed(m, 4, 5, DType::F32, DType::F32).expect("a plain product");
        Question {
            problem: Problem::Gemm(gemm).to_string(),
            device: "NVIDIA H200/sm_90a/132".to_owned(),
            driver: "13000".to_owned(),
            policy: String::new(),
        }
    }

    fn answer(tile: u32) -> Answer {
        Answer { engine: "gemm.simt".to_owned(), version: 2, knobs: Knobs::new([("tile", tile), ("stages", 3)]), us: 12.5 }
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
            [|q| q.problem.push('x'), |q| q.device.push('x'), |q| q.driver.push('x'), |q| q.policy.push('x')];
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
        let later = "plan3\tanything";
        bytes.extend_from_slice(format!("{later}\t{}\n", check(later)).as_bytes());
        fs::write(&path, bytes).expect("writes");
        assert_eq!(open(&path).damaged().len(), 4, "a later version's line is none of ours");
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
    fn a_lock_that_is_held_for_long_holds_up_nobody_who_asks_and_loses_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("plans.txt");
        let cache = open(&path);
        cache.keep(&question(1), &answer(1)).expect("writes");
        let held = lock(&path).expect("locks").expect("this file system has locks");
        std::thread::scope(|scope| {
            let keeping = scope.spawn(|| cache.keep(&question(2), &answer(2)));
            while found(&cache, 2).is_none() && !keeping.is_finished() {
                std::thread::yield_now();
            }
            assert!(!keeping.is_finished(), "it waits for the lock");
            let begun = Instant::now();
            assert_eq!((found(&cache, 1), found(&cache, 3)), (Some(answer(1)), None));
            assert!(begun.elapsed() < LONGEST_LOCK / 4 && !keeping.is_finished());
            let error = keeping.join().expect("no panic").expect_err("the lock is held");
            assert_eq!((error.doing, error.source.kind()), ("locking it", std::io::ErrorKind::TimedOut), "{error}");
        });
        assert_eq!((found(&cache, 2), found(&open(&path), 2)), (Some(answer(2)), None));
        drop(held);
        // With the next one, or at the end.
        cache.keep(&question(3), &answer(3)).expect("writes");
        assert_eq!([1, 2, 3].map(|m| found(&open(&path), m)), [1, 2, 3].map(|tile| Some(answer(tile))));
        let held = lock(&path).expect("locks");
        cache.keep(&question(4), &answer(4)).expect_err("the lock is held");
        drop(held);
        drop(cache);
        assert_eq!(found(&open(&path), 4), Some(answer(4)));
    }

    /// What could not be written is newer than what the file says: to read that does not bring the older choice back.
    #[test]
    fn what_could_not_be_written_is_not_lost_to_an_older_line() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("plans.txt");
        let (ours, theirs) = (open(&path), open(&path));
        ours.keep(&question(1), &answer(1)).expect("writes");
        let held = lock(&path).expect("locks").expect("this file system has locks");
        ours.keep(&question(1), &answer(2)).expect_err("the lock is held");
        drop(held);
        // The file has changed, and is read for the sake of another question.
        theirs.keep(&question(2), &answer(3)).expect("writes");
        assert_eq!(found(&ours, 2), Some(answer(3)));
        assert_eq!(found(&ours, 1), Some(answer(2)), "it was kept last");
        ours.compact().expect("writes");
        assert_eq!(found(&ours, 1), Some(answer(2)));
        drop(ours);
        assert_eq!(found(&open(&path), 1), Some(answer(2)), "it is written at the end");
    }

    /// The same while a line is on its way to the disk, with a reader at any moment of it.
    #[test]
    fn what_is_being_written_is_not_lost_to_an_older_line() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("plans.txt");
        let (ours, theirs) = (open(&path), open(&path));
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // What another process adds makes each question a reason to read.
            let other = scope.spawn(|| {
                (100..160).for_each(|m| theirs.keep(&question(m), &answer(0)).expect("writes"));
                done.store(true, Ordering::SeqCst);
            });
            let asks = scope.spawn(|| {
                let asked = (1000..).take_while(|_| !done.load(Ordering::SeqCst));
                asked.for_each(|m| assert_eq!(found(&ours, m), None));
            });
            for tile in 0..60 {
                ours.keep(&question(1), &answer(tile)).expect("writes");
                assert_eq!(found(&ours, 1), Some(answer(tile)));
            }
            other.join().expect("no panic");
            asks.join().expect("no panic");
        });
        assert_eq!((found(&ours, 1), found(&open(&path), 1)), (Some(answer(59)), Some(answer(59))));
        assert!(ours.state().unwritten.is_empty());
    }

    #[cfg(unix)]
    #[test]
    fn a_link_to_the_file_stays_one_and_both_names_have_one_lock() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        // The link is there before the file is, and its folder too.
        std::os::unix::fs::symlink("deep/plans.txt", at("link.txt")).expect("a link");
        let (by_link, by_name) = (open(&at("link.txt")), open(&at("deep/plans.txt")));
        for tile in 0..4 {
            by_link.keep(&question(1), &answer(tile)).expect("writes");
            by_name.keep(&question(2), &answer(tile)).expect("writes");
        }
        fs::set_permissions(at("deep/plans.txt"), fs::Permissions::from_mode(0o640)).expect("ours");
        assert_eq!(by_link.compact().expect("writes"), Some(Compaction { kept: 2, dropped: 6 }));
        assert!(fs::symlink_metadata(at("link.txt")).expect("there").is_symlink());
        let metadata = fs::symlink_metadata(at("deep/plans.txt")).expect("there");
        assert!(metadata.is_file() && metadata.permissions().mode() & 0o777 == 0o640, "{metadata:?}");
        // Both go on with the new file.
        by_name.keep(&question(3), &answer(5)).expect("writes");
        assert_eq!([1, 2, 3].map(|m| found(&by_link, m)), [3, 3, 5].map(|tile| Some(answer(tile))));
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 2, "locks and what is written anew are where the file is");
        let held = lock(&at("link.txt")).expect("locks").expect("this file system has locks");
        by_name.keep(&question(4), &answer(4)).expect_err("the lock is held, by the other name");
        drop(held);
    }

    #[test]
    fn a_file_system_without_locks_goes_without() {
        let no_locks = std::io::Error::from_raw_os_error(37);
        assert_eq!(has_no_locks(&no_locks), cfg!(target_os = "linux"));
        assert!(has_no_locks(&std::io::ErrorKind::Unsupported.into()) && !has_no_locks(&std::io::ErrorKind::PermissionDenied.into()));
    }

    #[test]
    fn what_ships_is_asked_last_and_any_value_fits_a_star() {
        let mut fields = question(1).fields();
        fields[2] = "*".to_owned();
        let shipped = line_of(&fields, &answer(9));
        let cache = PlanCache::with_shipped(None, shipped).expect("opens");
        let mut other = question(1);
        other.driver = "14000".to_owned();
        assert_eq!(cache.find(&other).expect("reads"), Some((answer(9), Found::Shipped { with_another_driver: false })));
        assert_eq!(cache.find(&question(2)).expect("reads"), None);
        cache.keep(&other, &answer(1)).expect("keeps");
        assert_eq!(cache.find(&other).expect("reads"), Some((answer(1), Found::User)));
        PlanCache::open(None).expect("opens");
    }

    #[test]
    fn what_ships_says_what_it_was_measured_with() {
        let set = |drivers: &[&str]| -> String {
            let line = |driver: &&str| {
                let mut fields = question(1).fields();
                (fields[2], fields[3]) = ((*driver).to_owned(), "*".to_owned());
                line_of(&fields, &answer(driver.len() as u32))
            };
            drivers.iter().map(line).collect()
        };
        let found = |set: &str, change: fn(&mut Question)| {
            let mut asked = question(1);
            change(&mut asked);
            let found = PlanCache::with_shipped(None, set.to_owned()).expect("opens").find(&asked).expect("reads");
            found.map(|(answer, found)| (answer.knobs.value("tile").unwrap_or(0), found))
        };
        let shipped = |with_another_driver| Found::Shipped { with_another_driver };
        assert_eq!(found(&set(&["13000"]), |q| q.policy = "workspace=0".to_owned()), Some((5, shipped(false))), "any limits");
        assert_eq!(found(&set(&["13"]), |_| {}), Some((2, shipped(true))));
        assert_eq!(found(&set(&["13", "13000", "130"]), |_| {}), Some((5, shipped(false))), "the one for this driver");
        assert_eq!(found(&set(&["13", "130"]), |_| {}), Some((3, shipped(true))), "else the last");
        assert_eq!(found(&set(&["13000"]), |q| q.device.push('x')), None, "another chip");
    }

    /// A line of the form before this one, as a build of then wrote it.
    fn earlier_line() -> String {
        let text = "plan1\t97351663ac6495e7d29efb5dc6b81351\tNVIDIA_H200/132\t13000\t85803975c3d4aee5\t*\tgemm.simt\ttile=1\t3.000";
        format!("{text}\t{}\n", check(text))
    }

    #[test]
    fn lines_of_an_earlier_form_are_told_and_left_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("plans.txt");
        fs::write(&path, earlier_line().repeat(2)).expect("writes");
        let cache = open(&path);
        assert_eq!(cache.damaged(), []);
        let remark = cache.remark().expect("something to tell");
        assert!(remark.contains("2 choices of an earlier form (plan1) are not read") && remark.contains("plans.txt"), "{remark}");
        cache.keep(&question(1), &answer(1)).expect("writes");
        cache.compact().expect("writes");
        let text = fs::read_to_string(&path).expect("reads");
        assert!(text.starts_with(&earlier_line().repeat(2)) && text.lines().count() == 3, "{text}");
        assert_eq!((found(&open(&path), 1), open(&path).remark().is_some()), (Some(answer(1)), true));
        assert_eq!(PlanCache::in_memory().remark(), None);
    }

    #[test]
    fn a_file_of_old_choices_is_written_anew() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("plans.txt");
        let cache = open(&path);
        assert_eq!(cache.compact().expect("nothing to do"), None);
        for tile in 0..5 {
            cache.keep(&question(1), &answer(tile)).expect("writes");
        }
        for build in 0..6 {
            let other = Question { driver: format!("driver{build}"), ..question(2) };
            cache.keep(&other, &answer(build)).expect("writes");
        }
        let later = "plan3\tanything";
        let mut text = fs::read_to_string(&path).expect("reads");
        text += &format!("# a word\n{later}\t{}\nrubbish\n", check(later));
        fs::write(&path, text).expect("writes");
        // Another process's line, which this one has not read.
        open(&path).keep(&question(3), &answer(3)).expect("writes");
        assert_eq!(cache.compact().expect("writes"), Some(Compaction { kept: 1 + 4 + 1, dropped: 4 + 2 + 1 }));
        let text = fs::read_to_string(&path).expect("reads");
        assert!(text.contains("# a word\n") && text.contains(later) && !text.contains("rubbish"), "{text}");
        for cache in [&cache, &open(&path)] {
            assert_eq!([1, 3].map(|m| found(cache, m)), [4, 3].map(|tile| Some(answer(tile))));
            assert_eq!(cache.damaged(), []);
        }
        let build = |build: u32| Question { driver: format!("driver{build}"), ..question(2) };
        let fresh = open(&path);
        assert_eq!((0..6).filter(|&i| fresh.find(&build(i)).expect("reads").is_some()).collect::<Vec<_>>(), [2, 3, 4, 5]);
        // One who had the old file open goes on with the new one.
        cache.keep(&question(4), &answer(4)).expect("writes");
        assert_eq!(found(&open(&path), 4), Some(answer(4)));
        // It happens by itself when most lines are old.
        for tile in 0..2 * SPARE_LINES as u32 {
            cache.keep(&question(5), &answer(tile)).expect("writes");
        }
        assert!(fs::read_to_string(&path).expect("reads").lines().count() < 2 * SPARE_LINES);
        assert_eq!(found(&open(&path), 5), Some(answer(2 * SPARE_LINES as u32 - 1)));
    }
}
