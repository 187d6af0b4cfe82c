//! A trace of host and device that Perfetto and `chrome://tracing` open.
//!
//! The file is an array of events in Chrome's format. The process `host` has a track for each thread, with the spans of `tracing` on it; the
//! process `device` has one for each stream of each device, with the executions whose time was taken. Each write ends in the array's bracket
//! and the next one begins on it, and each event is a line of its own. A process that is killed between two writes leaves whole JSON. One that is
//! killed within a write leaves whole lines and the start of one more: the kernel looks for a fatal signal before each page that it copies, so
//! that no write of several pages is all or nothing. The format allows the bracket to be missing; strict JSON is the file less its last line,
//! with the comma before it replaced by a bracket.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use metrics::counter;
use serde_json::{Map, Value, json};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer};
use tracing_subscriber::registry::LookupSpan;

use crate::error::Error;
use crate::fields::Fields;
use crate::files;
use crate::observe::{DEVICE_TARGET, epoch};

/// Size that a trace may have unless told otherwise.
pub const TRACE_BYTES: u64 = 256 << 20;

/// The least that a trace can be bounded by.
const LEAST_BYTES: u64 = 64 << 10;

/// Kept free for the ends of open spans and the word that the file is full.
const RESERVE_BYTES: u64 = 16 << 10;

/// Events wait in memory until there are so many bytes of them, or until [`PAUSE`] is over.
const PENDING_BYTES: usize = 64 << 10;

/// How long an event waits at most before it is in the file.
const PAUSE: Duration = Duration::from_millis(200);

/// Streams that get a track of their own.
const MOST_TRACKS: usize = 1024;

/// Closes the array.
const END: &str = "\n]\n";

/// The process `device` is no process of the system: its number is ours and this, beyond what systems give.
const DEVICE_PROCESS: u64 = 1 << 30;

/// A layer of `tracing` that writes a trace, with a [`TraceFile`] that ends it.
#[derive(Debug)]
pub struct TraceLayer {
    shared: Arc<Shared>,
}

/// A trace that is being written. Dropping it writes what is left and ends the trace.
///
/// ```
/// use tracing_subscriber::layer::SubscriberExt;
/// use verdigris_telemetry::{TRACE_BYTES, TraceFile};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("trace.json");
/// let (layer, trace) = TraceFile::create(&path, TRACE_BYTES)?;
/// tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
///     let _step = tracing::info_span!("step", number = 1).entered();
///     tracing::info!(target: "verdigris::device", device = "cuda:0", stream = 7u64, name = "gemm", start_us = 10.0, duration_us = 4.5);
/// });
/// drop(trace);
/// let events: Vec<serde_json::Value> = serde_json::from_slice(&std::fs::read(&path)?)?;
/// assert!(events.iter().any(|event| event["ph"] == "B" && event["name"] == "step"));
/// assert!(events.iter().any(|event| event["ph"] == "X" && event["dur"] == 4.5));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "the trace ends when this is dropped"]
pub struct TraceFile {
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    /// Tells layers of one process apart on a thread's own list of open spans.
    number: u64,
    /// Whose trace it is. A child of it shares the file, has no writer, and may find the state locked by a thread that it does not have.
    process: u32,
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Debug)]
struct State {
    /// None in a child that let go of it.
    file: Option<File>,
    /// Where the bracket stands that closes the array.
    end_at: u64,
    most_bytes: u64,
    /// Events with a comma before each.
    pending: String,
    /// Tracks of streams, in the order in which they came.
    tracks: HashMap<(String, u64), Track>,
    is_full: bool,
    is_closed: bool,
    dropped: u64,
}

/// A stream of a device.
#[derive(Clone, Copy, Debug)]
struct Track {
    number: u64,
    last_start_ns: i64,
    last_end_ns: i64,
}

impl TraceFile {
    /// Begins a trace in the file, which is written anew, of at most `most_bytes`. Events beyond are counted and left out.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::FileInUse`], [`Error::Thread`], and [`Error::Bound`] for a bound below 64 KiB.
    pub fn create(path: &Path, most_bytes: u64) -> Result<(TraceLayer, TraceFile), Error> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        if most_bytes < LEAST_BYTES {
            return Err(Error::Bound { what: "a trace", bytes: most_bytes, least: LEAST_BYTES });
        }
        epoch();
        let mut file = files::own(path)?;
        let names = [(host_process(), "host", 0), (device_process(), "device", 1)].map(|(process, name, order)| {
            let name = json!({ "ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": { "name": name } });
            let order = json!({ "ph": "M", "pid": process, "tid": 0, "name": "process_sort_index", "args": { "sort_index": order } });
            format!("{name},\n{order}")
        });
        let head = format!("[\n{}", names.join(",\n"));
        let begun = file.set_len(0).and_then(|()| file.write_all(format!("{head}{END}").as_bytes()));
        begun.map_err(|source| Error::File { path: path.to_owned(), source })?;
        let state = State {
            file: Some(file),
            end_at: head.len() as u64,
            most_bytes,
            pending: String::new(),
            tracks: HashMap::new(),
            is_full: false,
            is_closed: false,
            dropped: 0,
        };
        let shared = Arc::new(Shared {
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            process: std::process::id(),
            state: Mutex::new(state),
            wake: Condvar::new(),
        });
        let writer = {
            let (shared, name) = (Arc::clone(&shared), "verdigris-trace");
            let thread = std::thread::Builder::new().name(name.to_owned());
            thread.spawn(move || shared.write_on()).map_err(|source| Error::Thread { name, source })?
        };
        Ok((TraceLayer { shared: Arc::clone(&shared) }, TraceFile { shared, writer: Some(writer) }))
    }

    /// Events that were left out: beyond the bound on bytes, or since the file could not be written.
    pub fn dropped(&self) -> u64 {
        self.shared.lock().map_or(0, |state| state.dropped)
    }
}

impl Drop for TraceFile {
    fn drop(&mut self) {
        {
            let Some(mut state) = self.shared.lock() else {
                self.shared.disown();
                // A child has no such thread: there is nothing to wait for, and nothing to give back.
                std::mem::forget(self.writer.take());
                return;
            };
            if state.dropped > 0 {
                let dropped = state.dropped;
                state.put(&json!({
                    "ph": "i", "s": "g", "name": format!("{dropped} events were left out"), "cat": "verdigris", "ts": us(now_ns()),
                    "pid": host_process(), "tid": 0,
                }));
            }
            state.write();
            state.is_closed = true;
        }
        self.shared.wake.notify_all();
        if let Some(writer) = self.writer.take() {
            // It has nothing left to say.
            let _ = writer.join();
        }
    }
}

impl Shared {
    /// `None` in a child of the process that traces.
    fn lock(&self) -> Option<MutexGuard<'_, State>> {
        // What stands behind this lock is whole between any two statements.
        (std::process::id() == self.process).then(|| self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// In a child: lets go of the file, whose lock would last as long as the child. Where the state is locked for ever that stays so.
    fn disown(&self) {
        if let Ok(mut state) = self.state.try_lock() {
            (state.file, state.is_closed) = (None, true);
            state.pending.clear();
        }
    }

    /// The writer's thread: nothing waits in memory for longer than [`PAUSE`].
    fn write_on(&self) {
        let Some(mut state) = self.lock() else { return };
        while !state.is_closed {
            state = self.wake.wait_timeout(state, PAUSE).unwrap_or_else(PoisonError::into_inner).0;
            if !state.is_closed {
                state.write();
            }
        }
    }
}

impl State {
    /// Counts an event that is left out.
    fn leave_out(&mut self) {
        self.dropped += 1;
        counter!("verdigris_telemetry_lost_total", "file" => "trace").increment(1);
    }

    /// Takes an event if there is room for it.
    fn add(&mut self, event: &Value) -> bool {
        if self.is_closed {
            return false;
        }
        if self.is_full {
            self.leave_out();
            return false;
        }
        // Texts of others have no bound; what does not fit is left out whole.
        let text = event.to_string();
        let used = self.end_at + (self.pending.len() + text.len() + 2 + END.len()) as u64;
        if used + RESERVE_BYTES > self.most_bytes {
            self.is_full = true;
            self.leave_out();
            self.put(&json!({
                "ph": "i", "s": "g", "name": "the trace is full", "cat": "verdigris", "ts": event["ts"], "pid": host_process(), "tid": 0,
                "args": { "most_bytes": self.most_bytes },
            }));
            return false;
        }
        self.put_text(&text);
        true
    }

    /// Takes an event out of what is kept free.
    fn put(&mut self, event: &Value) {
        self.put_text(&event.to_string());
    }

    fn put_text(&mut self, text: &str) {
        if self.is_closed {
            return;
        }
        let used = self.end_at + (self.pending.len() + text.len() + 2 + END.len()) as u64;
        if used > self.most_bytes {
            self.leave_out();
            return;
        }
        // Writing to a string does not fail.
        let _ = write!(self.pending, ",\n{text}");
        if self.pending.len() > PENDING_BYTES {
            self.write();
        }
    }

    /// Brings what waits into the file, over the bracket, with a bracket behind it.
    fn write(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let added = self.pending.len();
        self.pending.push_str(END);
        let Some(file) = &mut self.file else { return };
        let written = put_at(file, self.end_at, self.pending.as_bytes());
        self.pending.clear();
        match written {
            Ok(()) => self.end_at += added as u64,
            Err(_) => {
                // A full disk, say: the file ends where it did, and takes nothing more.
                let at = self.end_at;
                let _ = put_at(file, at, END.as_bytes()).and_then(|()| file.set_len(at + END.len() as u64));
                self.leave_out();
                self.is_full = true;
            }
        }
    }

    /// The number of this thread's track, whose name is told once.
    fn thread(&mut self, layer: u64) -> u64 {
        // On a thread that is ending there is nothing local any more: what it says then stands on the track 0.
        let Ok((number, is_new)) = THREAD.try_with(|thread| {
            let mut named = thread.named.borrow_mut();
            let is_new = !named.contains(&layer);
            if is_new {
                named.push(layer);
            }
            (thread.number, is_new)
        }) else {
            return 0;
        };
        if is_new {
            let thread = std::thread::current();
            let name = thread.name().map_or_else(|| format!("thread {number}"), str::to_owned);
            self.add(&json!({ "ph": "M", "pid": host_process(), "tid": number, "name": "thread_name", "args": { "name": name } }));
        }
        number
    }

    /// Adds an execution to its stream's track.
    fn execution(&mut self, mut fields: Map<String, Value>) {
        let text = |fields: &mut Map<String, Value>, name| fields.remove(name).and_then(|value| Some(value.as_str()?.to_owned()));
        let number = |fields: &mut Map<String, Value>, name| fields.remove(name).as_ref().and_then(Value::as_f64);
        let device = text(&mut fields, "device").unwrap_or_default();
        let stream = fields.remove("stream").as_ref().and_then(Value::as_u64).unwrap_or(0);
        let (Some(start_us), Some(duration_us)) = (number(&mut fields, "start_us"), number(&mut fields, "duration_us")) else {
            // Without times there is no place on a track.
            self.leave_out();
            return;
        };
        let name = text(&mut fields, "name").unwrap_or_else(|| "execution".to_owned());
        let key = (device, stream);
        let track = match self.tracks.get(&key) {
            Some(track) => *track,
            None if self.tracks.len() >= MOST_TRACKS => {
                self.leave_out();
                return;
            }
            None => {
                let track = Track { number: self.tracks.len() as u64 + 1, last_start_ns: i64::MIN, last_end_ns: i64::MIN };
                // The CPU has no streams: its plans run on the threads that call them.
                let name = format!("{} {} {stream}", key.0, if key.0 == "cpu" { "thread" } else { "stream" });
                self.add(
                    &json!({ "ph": "M", "pid": device_process(), "tid": track.number, "name": "thread_name", "args": { "name": name } }),
                );
                self.tracks.insert(key.clone(), track);
                track
            }
        };
        let end_ns = ns(start_us + duration_us.max(0.0));
        let mut start_ns = ns(start_us);
        // A stream does one thing at a time. Where times, which are measured to half a microsecond, say otherwise, the later part begins where the
        // earlier one ends: events of one track may not cross.
        if (track.last_start_ns..track.last_end_ns).contains(&start_ns) {
            start_ns = track.last_end_ns;
        }
        let end_ns = end_ns.max(start_ns);
        if end_ns >= track.last_end_ns {
            self.tracks.insert(key, Track { last_start_ns: start_ns, last_end_ns: end_ns, ..track });
        }
        self.add(&json!({
            "ph": "X", "name": name, "cat": "device", "ts": us(start_ns), "dur": us(end_ns.saturating_sub(start_ns)), "pid": device_process(),
            "tid": track.number, "args": fields,
        }));
    }
}

fn put_at(file: &mut File, at: u64, bytes: &[u8]) -> io::Result<()> {
    file.seek(SeekFrom::Start(at))?;
    // One call of the system, as a rule: a process that is killed before or after it leaves a whole file, and one that is killed within it a whole
    // number of pages.
    file.write_all(bytes)
}

fn host_process() -> u64 {
    u64::from(std::process::id())
}

fn device_process() -> u64 {
    DEVICE_PROCESS + host_process()
}

fn now_ns() -> i64 {
    i64::try_from(epoch().elapsed().as_nanos()).unwrap_or(i64::MAX)
}

/// Rounded, so that the end of one event and the start of the next are equal where they should be.
fn ns(us: f64) -> i64 {
    (us * 1e3).round() as i64
}

/// Microseconds, as the format has them, with the nanoseconds behind the point.
fn us(ns: i64) -> f64 {
    ns as f64 / 1e3
}

/// A thread's track.
struct Thread {
    number: u64,
    /// Layers that know its name.
    named: RefCell<Vec<u64>>,
}

impl Thread {
    fn new() -> Thread {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        Thread { number: NUMBER.fetch_add(1, Ordering::Relaxed), named: RefCell::default() }
    }
}

thread_local! {
    static THREAD: Thread = Thread::new();

    /// Open spans of this thread: which layer, and whether the beginning is in the file. A beginning that was left out has no end either.
    static OPEN: RefCell<Vec<(u64, bool)>> = const { RefCell::new(Vec::new()) };
}

/// What a span said of itself.
struct Said(Map<String, Value>);

impl<S: Subscriber + for<'span> LookupSpan<'span>> Layer<S> for TraceLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        if let Some(span) = context.span(id) {
            span.extensions_mut().replace(Said(fields.0));
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let mut fields = Fields::default();
        values.record(&mut fields);
        if let Some(span) = context.span(id)
            && let Some(Said(said)) = span.extensions_mut().get_mut::<Said>()
        {
            said.extend(fields.0);
        }
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let arguments = span.extensions().get::<Said>().map(|Said(said)| said.clone()).unwrap_or_default();
        let metadata = span.metadata();
        let Some(mut state) = self.shared.lock() else { return };
        let thread = state.thread(self.shared.number);
        let is_in = state.add(&json!({
            "ph": "B", "name": metadata.name(), "cat": metadata.target(), "ts": us(now_ns()), "pid": host_process(), "tid": thread,
            "args": arguments,
        }));
        drop(state);
        // On a thread that is ending there is no list any more; its last spans have no end then.
        let _ = OPEN.try_with(|open| open.borrow_mut().push((self.shared.number, is_in)));
    }

    fn on_exit(&self, _: &Id, _: Context<'_, S>) {
        let is_in = OPEN.try_with(|open| {
            let mut open = open.borrow_mut();
            let place = open.iter().rposition(|(layer, _)| *layer == self.shared.number)?;
            Some(open.remove(place).1)
        });
        if !matches!(is_in, Ok(Some(true))) {
            return;
        }
        let Some(mut state) = self.shared.lock() else { return };
        let thread = state.thread(self.shared.number);
        state.put(&json!({ "ph": "E", "ts": us(now_ns()), "pid": host_process(), "tid": thread }));
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let metadata = event.metadata();
        let Some(mut state) = self.shared.lock() else { return };
        if metadata.target() == DEVICE_TARGET {
            state.execution(fields.0);
            return;
        }
        let thread = state.thread(self.shared.number);
        let said = fields.0.get("message").or_else(|| fields.0.get("event")).and_then(Value::as_str);
        let name = said.unwrap_or_else(|| metadata.name()).to_owned();
        fields.0.insert("level".to_owned(), json!(metadata.level().as_str()));
        state.add(&json!({
            "ph": "i", "s": "t", "name": name, "cat": metadata.target(), "ts": us(now_ns()), "pid": host_process(), "tid": thread,
            "args": fields.0,
        }));
    }
}
