//! Everything at once, for applications: what is asked for is started, and lives as long as a guard.

use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::Registry as Spans;
use tracing_subscriber::util::SubscriberInitExt;

use crate::collector::{self, Layers, Otlp, OtlpCollector};
use crate::error::Error;
use crate::files::{RotatingFile, path_of_process};
use crate::http::{Exporter, ListenAddress};
use crate::nvml::{Collector, DeviceNames};
use crate::nvtx::NvtxLayer;
use crate::observe::{self, Listen, Listening};
use crate::registry::{Bounds, Registry};
use crate::stderr::{self, Severity};
use crate::trace::{TRACE_BYTES, TraceFile};

/// Size of a file of events unless told otherwise.
pub const EVENT_BYTES: u64 = 64 << 20;

/// Older files of events that are kept.
const OLDER_FILES: u32 = 2;

/// How often samples of devices are read.
const READ_INTERVAL: Duration = Duration::from_secs(1);

/// What an application asks for. Nothing is on unless it is named.
///
/// ```
/// use verdigris_telemetry::Telemetry;
///
/// let folder = tempfile::tempdir()?;
/// let guard = Telemetry::builder()
///     .prometheus("127.0.0.1:0".parse()?)
///     .trace_file(folder.path().join("trace.json"))
///     .json_lines(folder.path().join("events.jsonl"))
///     .install()?;
/// // … the application runs, and a scraper asks `http://…/metrics`:
/// assert!(guard.prometheus_address().is_some());
/// metrics::counter!("verdigris_plans_total", "device" => "cpu").increment(1);
/// assert!(guard.registry().text().contains("verdigris_plans_total{device=\"cpu\"} 1"));
/// drop(guard); // ends the endpoint and the files
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "nothing is on until it is installed"]
pub struct Telemetry {
    prometheus: Option<ListenAddress>,
    trace: Option<PathBuf>,
    trace_bytes: Option<u64>,
    events: Option<PathBuf>,
    event_bytes: Option<u64>,
    nvml: Option<Duration>,
    nvtx: Option<Option<PathBuf>>,
    otlp: Option<OtlpCollector>,
    stderr: Option<Severity>,
    bounds: Bounds,
    listen: Listen,
}

/// The same as text, as variables of the environment or a configuration have it; what is none or empty is off.
///
/// | field | variable | example |
/// |---|---|---|
/// | `metrics` | `VERDIGRIS_METRICS` | `9464`, `127.0.0.1:9464`, `0.0.0.0:9464` |
/// | `trace` | `VERDIGRIS_TRACE` | `trace-%p.json` |
/// | `events` | `VERDIGRIS_EVENTS` | `events-%p.jsonl` |
/// | `otlp` | `OTEL_EXPORTER_OTLP_ENDPOINT` | `http://127.0.0.1:4318` |
/// | `otlp_headers` | `OTEL_EXPORTER_OTLP_HEADERS` | `authorization=Basic%20…,tenant=a` |
/// | `service` | `OTEL_SERVICE_NAME` | `trainer` |
/// | `nvtx_injection` | `NVTX_INJECTION64_PATH` | set by the profiler |
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Settings {
    /// Where to listen for scrapers; device metrics come with it.
    pub metrics: Option<String>,
    /// The file of the trace.
    pub trace: Option<PathBuf>,
    /// The file of events.
    pub events: Option<PathBuf>,
    /// The collector of OpenTelemetry.
    pub otlp: Option<String>,
    /// What it is sent with each push, as [`OtlpCollector::headers`] reads it.
    pub otlp_headers: Option<String>,
    /// Who speaks to it.
    pub service: Option<String>,
    /// The profiler's library.
    pub nvtx_injection: Option<PathBuf>,
}

impl Settings {
    /// The collector that is named, if one is. Headers and service without an endpoint name none.
    ///
    /// # Errors
    /// [`Error::Headers`].
    pub fn collector(&self) -> Result<Option<OtlpCollector>, Error> {
        let said = |text: &Option<String>| text.clone().filter(|text| !text.trim().is_empty());
        let Some(endpoint) = said(&self.otlp) else { return Ok(None) };
        let mut collector = OtlpCollector::new(endpoint).headers(&said(&self.otlp_headers).unwrap_or_default())?;
        if let Some(service) = said(&self.service) {
            collector = collector.service(service);
        }
        Ok(Some(collector))
    }
}

impl Telemetry {
    /// Nothing yet.
    pub fn builder() -> Telemetry {
        Telemetry::default()
    }

    /// What settings say; an address brings device metrics each second too.
    ///
    /// ```
    /// use verdigris_telemetry::{Settings, Telemetry};
    ///
    /// let settings = Settings { metrics: Some("here".to_owned()), ..Settings::default() };
    /// assert!(Telemetry::from_settings(&settings).is_err_and(|error| error.to_string().contains("`here` names no address")));
    /// ```
    ///
    /// # Errors
    /// [`Error::Address`], [`Error::Headers`].
    pub fn from_settings(settings: &Settings) -> Result<Telemetry, Error> {
        let file = |path: &Option<PathBuf>| path.clone().filter(|path| !path.as_os_str().is_empty());
        let mut telemetry = Telemetry::builder();
        if let Some(address) = settings.metrics.as_deref().filter(|address| !address.is_empty()) {
            telemetry.prometheus = Some(address.parse()?);
            telemetry.nvml = cfg!(feature = "nvml").then_some(Duration::from_secs(1));
        }
        (telemetry.trace, telemetry.events) = (file(&settings.trace), file(&settings.events));
        telemetry.otlp = settings.collector()?;
        telemetry.nvtx = file(&settings.nvtx_injection).map(Some);
        Ok(telemetry)
    }

    /// Whether nothing is asked for.
    pub fn is_nothing(&self) -> bool {
        let no_file = self.trace.is_none() && self.events.is_none();
        let no_line = self.stderr.is_none_or(|severity| severity == Severity::Off);
        self.prometheus.is_none() && no_file && no_line && self.nvml.is_none() && self.nvtx.is_none() && self.otlp.is_none()
    }

    /// Metrics for scrapers, at `/metrics` of this address.
    pub fn prometheus(mut self, address: ListenAddress) -> Telemetry {
        self.prometheus = Some(address);
        self
    }

    /// A trace of host and device in this file, for Perfetto; `%p` in the name is the number of the process.
    pub fn trace_file(mut self, path: impl Into<PathBuf>) -> Telemetry {
        self.trace = Some(path.into());
        self
    }

    /// The most that the trace may take, [`TRACE_BYTES`] unless said.
    pub fn trace_bytes(mut self, most: u64) -> Telemetry {
        self.trace_bytes = Some(most);
        self
    }

    /// Events as lines of JSON in this file; `%p` in the name is the number of the process.
    pub fn json_lines(mut self, path: impl Into<PathBuf>) -> Telemetry {
        self.events = Some(path.into());
        self
    }

    /// The most that a file of events may take, [`EVENT_BYTES`] unless said; two older ones are kept beside it.
    pub fn event_bytes(mut self, most: u64) -> Telemetry {
        self.event_bytes = Some(most);
        self
    }

    /// Device metrics by NVML, read at this interval. On a machine without a driver they are absent, and [`Guard::absent`] says why.
    pub fn nvml(mut self, interval: Duration) -> Telemetry {
        self.nvml = Some(interval);
        self
    }

    /// Ranges for NVIDIA's profilers, by the library that `NVTX_INJECTION64_PATH` names, or the older one. Without a profiler they are absent, and
    /// [`Guard::absent`] says why.
    pub fn nvtx(mut self, injection: Option<PathBuf>) -> Telemetry {
        self.nvtx = Some(injection);
        self
    }

    /// Spans and metrics pushed to a collector of OpenTelemetry (feature `otlp`).
    pub fn otlp(mut self, collector: OtlpCollector) -> Telemetry {
        self.otlp = Some(collector);
        self
    }

    /// Events of this severity as lines of JSON on standard error, at most fifty warnings and fifty errors a second: what is beyond is counted there.
    pub fn stderr_lines(mut self, least: Severity) -> Telemetry {
        self.stderr = Some(least);
        self
    }

    /// How many series are kept.
    pub fn bounds(mut self, bounds: Bounds) -> Telemetry {
        self.bounds = bounds;
        self
    }

    /// Which executions have their time taken.
    pub fn listen(mut self, listen: Listen) -> Telemetry {
        self.listen = listen;
        self
    }

    /// Starts all of it. The recorder of metrics becomes the process's, and so do the layers of `tracing`; both can be done once.
    ///
    /// # Errors
    /// [`Error::RecorderTaken`] and [`Error::SubscriberTaken`] where the process has them already, [`Error::Listen`] where the address is taken,
    /// [`Error::File`] and [`Error::FileInUse`], [`Error::Endpoint`], [`Error::NotBuilt`]. Nothing is running then.
    pub fn install(self) -> Result<Guard, Error> {
        let registry = Arc::new(Registry::new(self.bounds));
        let mut absent = Vec::new();
        let mut layers = Layers::new();
        // What may fail comes before what cannot be taken back.
        let trace = match &self.trace {
            Some(path) => {
                let (layer, trace) = TraceFile::create(&path_of_process(path), self.trace_bytes.unwrap_or(TRACE_BYTES))?;
                layers.push(layer.with_filter(interesting()).boxed());
                Some(trace)
            }
            None => None,
        };
        let lines = match &self.events {
            Some(path) => {
                let file = RotatingFile::open(&path_of_process(path), self.event_bytes.unwrap_or(EVENT_BYTES), OLDER_FILES)?;
                let (layer, lines) = json_layer(file);
                layers.push(layer);
                Some(lines)
            }
            None => None,
        };
        layers.extend(self.stderr.and_then(stderr::layer));
        if let Some(injection) = &self.nvtx {
            match NvtxLayer::load(injection.as_deref()) {
                Ok(layer) => layers.push(layer.boxed()),
                Err(reason) => absent.push(format!("NVTX: {reason}")),
            }
        }
        let otlp = match &self.otlp {
            Some(collector) => Some(collector::start(collector, &registry, &mut layers)?),
            None => None,
        };
        let exporter = self.prometheus.map(|address| Exporter::start(Arc::clone(&registry), address)).transpose()?;
        if !layers.is_empty() && tracing::dispatcher::has_been_set() {
            return Err(Error::SubscriberTaken);
        }
        metrics::set_global_recorder(Arc::clone(&registry)).map_err(|_| Error::RecorderTaken)?;
        if !layers.is_empty() {
            tracing_subscriber::registry().with(layers).try_init().map_err(|_| Error::SubscriberTaken)?;
        }
        let nvml = match self.nvml {
            // By CUDA's numbers where there is CUDA.
            Some(interval) => {
                let names = DeviceNames::of_cuda().unwrap_or_default();
                let collector = Collector::of_library(Arc::clone(&registry), interval, names)?;
                absent.extend(collector.missing().map(ToString::to_string));
                Some(collector)
            }
            None => None,
        };
        let listening = observe::listen(self.listen);
        let reader = Reader::start()?;
        let address = exporter.as_ref().map(Exporter::address);
        let threads = Threads { reader, nvml, otlp, exporter };
        Ok(Guard {
            process: std::process::id(),
            absent,
            registry,
            address,
            listening: Some(listening),
            listen: self.listen,
            threads: Some(threads),
            _lines: lines,
            _trace: trace,
        })
    }
}

/// What files are told of: all of the library, and of an application what it calls information or worse.
pub(crate) fn interesting() -> Targets {
    Targets::new().with_target("verdigris", LevelFilter::TRACE).with_default(LevelFilter::INFO)
}

/// Events as lines of JSON, and what closes their file.
fn json_layer(file: RotatingFile) -> (Box<dyn Layer<Spans> + Send + Sync>, Lines) {
    let lines = Lines(Arc::new(OwnedLines { process: std::process::id(), file: Mutex::new(Some(file)) }));
    let writer = lines.0.clone();
    let layer = tracing_subscriber::fmt::layer().json().with_ansi(false).with_writer(move || LineWriter(Arc::clone(&writer)));
    (layer.with_filter(interesting()).boxed(), lines)
}

/// A file of events that its guard closes: the layer stays in the process's subscriber.
#[derive(Debug)]
struct Lines(Arc<OwnedLines>);

#[derive(Debug)]
struct OwnedLines {
    /// Whose file it is. A child of it shares the file, and may find it locked by a thread that it does not have.
    process: u32,
    file: Mutex<Option<RotatingFile>>,
}

impl Drop for Lines {
    fn drop(&mut self) {
        if std::process::id() == self.0.process {
            *self.0.file.lock().unwrap_or_else(PoisonError::into_inner) = None;
        } else if let Ok(mut file) = self.0.file.try_lock() {
            *file = None;
        }
    }
}

/// Takes one line.
struct LineWriter(Arc<OwnedLines>);

impl io::Write for LineWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if std::process::id() != self.0.process {
            return Ok(line.len());
        }
        match &mut *self.0.file.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(file) => file.write(line),
            None => Ok(line.len()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads what devices have passed, also where nobody scrapes.
#[derive(Debug)]
struct Reader {
    /// Dropped, it ends the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Reader {
    fn start() -> Result<Reader, Error> {
        let name = "verdigris-observe";
        let (stop, stopped) = channel();
        let body = move || {
            while stopped.recv_timeout(READ_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                observe::collect();
            }
            observe::collect();
        };
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(body).map_err(|source| Error::Thread { name, source })?;
        Ok(Reader { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic there was printed there; the end is reached all the same.
            let _ = thread.join();
        }
    }
}

/// Telemetry that runs. Dropping it ends the endpoint, the threads and the files; what the process counts is counted on, for nobody.
///
/// A child that the process forks has none of the threads and shares the files: it writes nothing into them, and dropping its copy of the guard gives back what it
/// shares and waits for nobody.
#[derive(Debug)]
#[must_use = "telemetry ends when this is dropped"]
pub struct Guard {
    process: u32,
    absent: Vec<String>,
    registry: Arc<Registry>,
    address: Option<std::net::SocketAddr>,
    // In this order they end: the last samples are read, nobody tells any more, then those go who send and write.
    listening: Option<Listening>,
    listen: Listen,
    threads: Option<Threads>,
    _lines: Option<Lines>,
    _trace: Option<TraceFile>,
}

/// What has a thread, which a child of the process has not.
#[derive(Debug)]
struct Threads {
    reader: Reader,
    nvml: Option<Collector>,
    otlp: Option<Otlp>,
    exporter: Option<Exporter>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let Some(Threads { reader, nvml, otlp, exporter }) = self.threads.take() else { return };
        if std::process::id() != self.process {
            std::mem::forget((reader, nvml, otlp, exporter));
            return;
        }
        drop(reader);
        self.listening = None;
        drop((nvml, otlp, exporter));
    }
}

impl Guard {
    /// The series of this process.
    pub fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// Where scrapers find `/metrics`, if they were asked for.
    pub fn prometheus_address(&self) -> Option<std::net::SocketAddr> {
        self.address
    }

    /// Nobody listens until [`Guard::resume`]: the library counts, times and tells nothing, and calls cost what they cost without telemetry. The
    /// endpoint goes on with what was counted, device metrics are read, and the application's own spans are written.
    ///
    /// ```
    /// use verdigris_telemetry::{Telemetry, observe};
    ///
    /// let mut guard = Telemetry::builder().install()?;
    /// guard.pause();
    /// assert!(!observe::is_listening());
    /// guard.resume();
    /// assert!(observe::is_listening());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn pause(&mut self) {
        self.listening = None;
    }

    /// Listens again, as it did before.
    pub fn resume(&mut self) {
        if self.listening.is_none() {
            self.listening = Some(observe::listen(self.listen));
        }
    }

    /// What was asked for and is not there on this machine, with the reason: NVML without a driver, NVTX without a profiler.
    pub fn absent(&self) -> &[String] {
        &self.absent
    }
}
