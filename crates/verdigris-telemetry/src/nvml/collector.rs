//! Reads devices at an interval and sets their metrics.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use metrics::{Gauge, Key, Label, Level, Metadata, Recorder};

use super::{Nvml, NvmlError, Reading, Xid, XidNews};
use crate::error::Error;
use crate::registry::Registry;

/// Where these metrics say that they come from.
const WHERE: Metadata<'static> = Metadata::new(module_path!(), Level::INFO, None);

/// The shortest interval: a reading takes some milliseconds of a core for each device.
const LEAST_INTERVAL: Duration = Duration::from_millis(100);

/// How often a library or devices that were not there are looked for: with every tenth reading, and at least so often.
const SEARCH_INTERVAL: Duration = Duration::from_secs(10);

/// Looks in that time after which devices whose events are not watched are tried again.
const XID_SEARCHES: u32 = 6;

/// How long the end of the thread that waits for events is waited for.
const XID_PAUSE: Duration = Duration::from_millis(200);

/// Which devices are told of, and by which names.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum DeviceNames {
    /// All, as `cuda:N` with NVML's number. It is CUDA's own number where all devices are alike and none is hidden from the process.
    #[default]
    ByNumber,
    /// Those of the map, from their identity (`GPU-…`) to the name that the library gives them; others are left out.
    ByUuid(HashMap<String, String>),
}

impl DeviceNames {
    /// The devices that CUDA shows this process, by its numbers. This loads the driver.
    ///
    /// # Errors
    /// Where there is no driver or no device.
    pub fn of_cuda() -> Result<DeviceNames, verdigris::cuda::Error> {
        let devices = verdigris::cuda::Driver::load()?.devices()?;
        let names = (0..).zip(&devices).map(|(number, device): (u32, _)| (device.properties().uuid.clone(), format!("cuda:{number}")));
        Ok(DeviceNames::ByUuid(names.collect()))
    }
}

/// Opens NVML; asked again and again until it is there.
type Open = Box<dyn Fn() -> Result<Arc<dyn Nvml>, NvmlError> + Send>;

/// Two threads: one reads every device at an interval, one waits for critical events. They end when this is dropped.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
/// use verdigris_telemetry::nvml::{Collector, DeviceNames, NvmlError};
/// use verdigris_telemetry::{Bounds, Registry};
///
/// // A machine without a driver; `Collector::of_library` asks the real one.
/// let open = || Err(NvmlError::NotThere { detail: "no driver".to_owned() });
/// let registry = Arc::new(Registry::new(Bounds::default()));
/// let collector = Collector::start(open, Arc::clone(&registry), Duration::from_secs(1), DeviceNames::ByNumber)?;
/// assert_eq!(collector.missing().map(|error| error.to_string()).as_deref(), Some("NVML is not there: no driver"));
/// # Ok::<(), verdigris_telemetry::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "nothing is read any more once this is dropped"]
pub struct Collector {
    /// Dropped, it ends the reader.
    stop: Option<Sender<()>>,
    reader: Option<JoinHandle<()>>,
    missing: Option<NvmlError>,
}

impl Collector {
    /// Asks `open` for NVML, reads all devices once, and goes on reading at the interval (at least 100 ms) from a thread of its own. Where NVML is
    /// not there, or is no more, it is asked for again every ten intervals, or ten seconds if that is sooner: a driver may come after us, and be loaded
    /// anew. Where it has no devices, they are counted again as often.
    ///
    /// # Errors
    /// [`Error::Thread`].
    pub fn start(
        open: impl Fn() -> Result<Arc<dyn Nvml>, NvmlError> + Send + 'static,
        registry: Arc<Registry>,
        interval: Duration,
        names: DeviceNames,
    ) -> Result<Collector, Error> {
        let open: Open = Box::new(open);
        let (reader, missing) = match open() {
            Ok(nvml) => {
                let mut reader = Reader::new(nvml, Arc::clone(&registry), names.clone());
                // So that the first scrape has values.
                reader.read();
                (Some(reader), None)
            }
            Err(error) => (None, Some(error)),
        };
        let (stop, stopped) = channel();
        let name = "verdigris-nvml";
        let interval = interval.max(LEAST_INTERVAL);
        let body = move || run(&open, reader, &registry, interval, &names, &stopped);
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(body).map_err(|source| Error::Thread { name, source })?;
        Ok(Collector { stop: Some(stop), reader: Some(thread), missing })
    }

    /// Of the library itself.
    ///
    /// # Errors
    /// [`Error::Thread`]; [`Error::NotBuilt`] without the feature `nvml`.
    #[cfg(feature = "nvml")]
    pub fn of_library(registry: Arc<Registry>, interval: Duration, names: DeviceNames) -> Result<Collector, Error> {
        let open = || super::NvmlLibrary::load().map(|nvml| -> Arc<dyn Nvml> { Arc::new(nvml) });
        Collector::start(open, registry, interval, names)
    }

    /// Of the library itself.
    ///
    /// # Errors
    /// [`Error::NotBuilt`]: this build has no NVML.
    #[cfg(not(feature = "nvml"))]
    pub fn of_library(_: Arc<Registry>, _: Duration, _: DeviceNames) -> Result<Collector, Error> {
        Err(Error::NotBuilt { exporter: "NVML", feature: "nvml" })
    }

    /// Why there was no NVML at the start.
    pub fn missing(&self) -> Option<&NvmlError> {
        self.missing.as_ref()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(reader) = self.reader.take() {
            // A panic there was printed there; the end is reached all the same.
            let _ = reader.join();
        }
    }
}

/// How often what is not there is looked for.
fn search_interval(interval: Duration) -> Duration {
    interval.saturating_mul(10).min(SEARCH_INTERVAL).max(interval)
}

/// The reader's thread.
fn run(open: &Open, mut reader: Option<Reader>, registry: &Arc<Registry>, interval: Duration, names: &DeviceNames, stopped: &Receiver<()>) {
    let search = search_interval(interval);
    let mut events = reader.as_ref().and_then(|reader| Events::start(reader, search));
    let mut searched = Instant::now();
    loop {
        let pause = if reader.is_some() { interval } else { search };
        if stopped.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
            break;
        }
        let is_lacking = reader.as_ref().is_none_or(|reader| reader.is_gone || reader.labels.is_empty());
        if is_lacking && searched.elapsed() >= search {
            searched = Instant::now();
            // The thread that waits has the old library.
            events = None;
            match (&mut reader, open()) {
                (Some(reader), Ok(nvml)) => reader.reopen(nvml),
                (reader @ None, Ok(nvml)) => *reader = Some(Reader::new(nvml, Arc::clone(registry), names.clone())),
                // It is looked for again.
                (_, Err(_)) => {}
            }
        }
        if let Some(reader) = &mut reader {
            reader.read();
            if events.is_none() && !reader.is_gone {
                events = Events::start(reader, search);
            }
        }
    }
    drop(events);
}

/// The thread that waits for critical events, again and again.
struct Events {
    is_stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Events {
    /// `None` where there is no device to be watched.
    fn start(reader: &Reader, search: Duration) -> Option<Events> {
        if reader.labels.is_empty() {
            return None;
        }
        let is_stopped = Arc::new(AtomicBool::new(false));
        let mut watching = Watching {
            nvml: Arc::clone(&reader.nvml),
            registry: Arc::clone(&reader.registry),
            names: reader.labels.clone(),
            is_stopped: Arc::clone(&is_stopped),
            told: HashSet::new(),
        };
        // Without a thread there are no events, which the metric says; the rest goes on.
        let thread = std::thread::Builder::new().name("verdigris-xid".to_owned()).spawn(move || watching.go_on(search)).ok()?;
        Some(Events { is_stopped, thread: Some(thread) })
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic there was printed there.
            let _ = thread.join();
        }
    }
}

/// What that thread has.
struct Watching {
    nvml: Arc<dyn Nvml>,
    registry: Arc<Registry>,
    names: HashMap<u32, String>,
    is_stopped: Arc<AtomicBool>,
    /// What has been told to be the matter.
    told: HashSet<String>,
}

impl Watching {
    fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }

    fn go_on(&mut self, search: Duration) {
        let nvml = Arc::clone(&self.nvml);
        while !self.is_stopped() {
            let began = Instant::now();
            let mut is_one_refused = false;
            let ended = nvml.watch_xids(XID_PAUSE, &mut |news| {
                match news {
                    XidNews::Watched(device) => self.watched(device, true),
                    XidNews::Refused(device, error) => {
                        is_one_refused = true;
                        self.watched(device, false);
                        self.tell(self.names.get(&device).cloned(), &error);
                    }
                    XidNews::Event(xid) => count_xid(&self.registry, &self.names, xid),
                    XidNews::Pause => {}
                }
                let is_tried_again = is_one_refused && began.elapsed() >= search * XID_SEARCHES;
                !is_tried_again && !self.is_stopped()
            });
            let Err(error) = ended else { continue };
            let devices: Vec<u32> = self.names.keys().copied().collect();
            devices.into_iter().for_each(|device| self.watched(device, false));
            self.tell(None, &error);
            let again = Instant::now() + search;
            while Instant::now() < again && !self.is_stopped() {
                std::thread::sleep(XID_PAUSE.min(search));
            }
        }
    }

    fn watched(&self, device: u32, is_watched: bool) {
        if let Some(name) = self.names.get(&device) {
            let key = Key::from_parts(WATCHED, vec![Label::new("device", name.clone())]);
            self.registry.register_gauge(&key, &WHERE).set(f64::from(u8::from(is_watched)));
        }
    }

    /// Says once what is the matter.
    fn tell(&mut self, device: Option<String>, error: &NvmlError) {
        let device = device.unwrap_or_default();
        if self.told.insert(format!("{device}: {error}")) {
            tracing::warn!(target: "verdigris", event = "nvml", device, field = "xid", reason = %error, "critical events are not counted");
        }
    }
}

/// Whether critical events of a device are counted.
const WATCHED: &str = "verdigris_gpu_xid_watched";

fn count_xid(registry: &Registry, names: &HashMap<u32, String>, xid: Xid) {
    let device = match xid.device {
        // One that is not told of.
        Some(number) if !names.contains_key(&number) => return,
        Some(number) => names[&number].clone(),
        None => "unknown".to_owned(),
    };
    let number = xid.number.map_or_else(|| "unknown".to_owned(), |number| number.to_string());
    tracing::error!(target: "verdigris", event = "xid", device = %device, xid = %number, "the driver reports a critical event");
    let labels = vec![Label::new("device", device), Label::new("xid", number)];
    registry.register_counter(&Key::from_parts("verdigris_gpu_xid_events_total", labels), &WHERE).increment(1);
}

/// Reads devices and sets metrics.
struct Reader {
    nvml: Arc<dyn Nvml>,
    registry: Arc<Registry>,
    names: DeviceNames,
    /// The label of each device that is told of.
    labels: HashMap<u32, String>,
    /// Gauges that have been set, by metric, device and further label.
    gauges: HashMap<(&'static str, u32, &'static str), Gauge>,
    /// Memory errors as the device counted them last, by its label and their kind.
    ecc_errors: HashMap<(String, &'static str), u64>,
    /// What has been told to be missing.
    told: HashSet<(u32, &'static str)>,
    /// Whether NVML said of every device that it is itself no more there.
    is_gone: bool,
}

impl Reader {
    fn new(nvml: Arc<dyn Nvml>, registry: Arc<Registry>, names: DeviceNames) -> Reader {
        let mut reader = Reader {
            nvml,
            registry,
            names,
            labels: HashMap::new(),
            gauges: HashMap::new(),
            ecc_errors: HashMap::new(),
            told: HashSet::new(),
            is_gone: false,
        };
        reader.recount();
        reader
    }

    /// Goes on with a library that was opened anew. What memory errors were counted is kept.
    fn reopen(&mut self, nvml: Arc<dyn Nvml>) {
        self.nvml = nvml;
        self.recount();
    }

    /// Which devices there are. Gauges of those before are absent until they are set again: numbers may have changed hands.
    fn recount(&mut self) {
        self.is_gone = false;
        self.gauges.drain().for_each(|(_, gauge)| gauge.set(f64::NAN));
        let count = match self.nvml.device_count() {
            Ok(count) => count,
            Err(error) => {
                if self.told.insert((u32::MAX, "devices")) {
                    tracing::warn!(target: "verdigris", event = "nvml", field = "devices", reason = %error, "devices cannot be counted");
                }
                0
            }
        };
        let label = |number| match &self.names {
            DeviceNames::ByNumber => Some(format!("cuda:{number}")),
            DeviceNames::ByUuid(names) => names.get(&self.nvml.uuid(number).ok()?).cloned(),
        };
        self.labels = (0..count).filter_map(|number| Some((number, label(number)?))).collect();
        for number in self.numbers() {
            self.set(WATCHED, number, "", 0.0);
        }
    }

    fn numbers(&self) -> Vec<u32> {
        let mut numbers: Vec<u32> = self.labels.keys().copied().collect();
        numbers.sort_unstable();
        numbers
    }

    fn read(&mut self) {
        let numbers = self.numbers();
        let mut is_gone = !numbers.is_empty();
        for number in numbers {
            let reading = self.nvml.read(number);
            is_gone &= matches!(reading, Err(NvmlError::NotThere { .. }));
            self.set("verdigris_gpu_up", number, "", f64::from(u8::from(reading.is_ok())));
            self.tell(number, "device", reading.as_ref().err());
            self.take(number, &reading.unwrap_or_else(|error| Reading::nothing(&error)));
        }
        self.is_gone = is_gone;
    }

    fn take(&mut self, device: u32, reading: &Reading) {
        fn value<T>(field: &Result<T, NvmlError>, of: impl Fn(&T) -> f64) -> f64 {
            // What is not there has no value.
            field.as_ref().map_or(f64::NAN, of)
        }
        let bit = |is_on: bool| f64::from(u8::from(is_on));
        let of_processes = |is_ours: bool| {
            let sum = |processes: &Vec<super::ProcessMemory>| {
                let ours = processes.iter().filter(|process| (process.process == std::process::id()) == is_ours);
                ours.map(|process| process.used_bytes).sum::<u64>() as f64
            };
            value(&reading.processes, sum)
        };
        let set = [
            ("verdigris_gpu_utilization_ratio", "", value(&reading.utilization, |busy| busy.gpu)),
            ("verdigris_gpu_memory_utilization_ratio", "", value(&reading.utilization, |busy| busy.memory)),
            ("verdigris_gpu_memory_used_bytes", "", value(&reading.memory, |memory| memory.used_bytes as f64)),
            ("verdigris_gpu_memory_total_bytes", "", value(&reading.memory, |memory| memory.total_bytes as f64)),
            ("verdigris_gpu_process_memory_bytes", "self", of_processes(true)),
            ("verdigris_gpu_process_memory_bytes", "others", of_processes(false)),
            ("verdigris_gpu_sm_clock_hertz", "", value(&reading.clocks, |clocks| clocks.sm_hertz as f64)),
            ("verdigris_gpu_memory_clock_hertz", "", value(&reading.clocks, |clocks| clocks.memory_hertz as f64)),
            ("verdigris_gpu_throttled", "power", value(&reading.throttling, |by| bit(by.power))),
            ("verdigris_gpu_throttled", "thermal", value(&reading.throttling, |by| bit(by.thermal))),
            ("verdigris_gpu_throttled", "hw_slowdown", value(&reading.throttling, |by| bit(by.hw_slowdown))),
            ("verdigris_gpu_throttled", "sync_boost", value(&reading.throttling, |by| bit(by.sync_boost))),
            ("verdigris_gpu_throttled", "other", value(&reading.throttling, |by| bit(by.other))),
            ("verdigris_gpu_temperature_celsius", "", value(&reading.temperature_celsius, |celsius| *celsius)),
            ("verdigris_gpu_power_watts", "", value(&reading.power_watts, |watts| *watts)),
            ("verdigris_gpu_mig_enabled", "", value(&reading.is_mig, |is_mig| bit(*is_mig))),
        ];
        for (metric, label, value) in set {
            self.set(metric, device, label, value);
        }
        if let Ok(errors) = &reading.ecc_errors {
            for (kind, count) in [("corrected", errors.corrected), ("uncorrected", errors.uncorrected)] {
                let key = self.key("verdigris_gpu_ecc_errors_total", device, kind);
                let label = self.labels.get(&device).cloned().unwrap_or_default();
                let before = self.ecc_errors.insert((label, kind), count);
                // The device counts from 0 again once it is reset or the driver is loaded anew; ours goes on.
                let more = before.map_or(count, |before| count.checked_sub(before).unwrap_or(count));
                self.registry.register_counter(&key, &WHERE).increment(more);
            }
        }
        self.tell(device, "utilization", reading.utilization.as_ref().err());
        self.tell(device, "memory", reading.memory.as_ref().err());
        self.tell(device, "clocks", reading.clocks.as_ref().err());
        self.tell(device, "throttling", reading.throttling.as_ref().err());
        self.tell(device, "temperature", reading.temperature_celsius.as_ref().err());
        self.tell(device, "power", reading.power_watts.as_ref().err());
        self.tell(device, "ecc", reading.ecc_errors.as_ref().err());
        self.tell(device, "processes", reading.processes.as_ref().err());
        self.tell(device, "mig", reading.is_mig.as_ref().err());
    }

    fn key(&self, metric: &'static str, device: u32, label: &'static str) -> Key {
        let mut labels = vec![Label::new("device", self.labels.get(&device).cloned().unwrap_or_default())];
        let further = match metric {
            "verdigris_gpu_throttled" => "reason",
            "verdigris_gpu_process_memory_bytes" => "process",
            _ => "kind",
        };
        labels.extend((!label.is_empty()).then(|| Label::new(further, label)));
        Key::from_parts(metric, labels)
    }

    /// Sets a gauge. What has never had a value gets no series, what has it no more is absent.
    fn set(&mut self, metric: &'static str, device: u32, label: &'static str, value: f64) {
        if let Some(gauge) = self.gauges.get(&(metric, device, label)) {
            gauge.set(value);
        } else if !value.is_nan() {
            let gauge = self.registry.register_gauge(&self.key(metric, device, label), &WHERE);
            gauge.set(value);
            self.gauges.insert((metric, device, label), gauge);
        }
    }

    /// Says once what cannot be read, and once more if that happens again after it could.
    fn tell(&mut self, device: u32, field: &'static str, error: Option<&NvmlError>) {
        let Some(error) = error else {
            self.told.remove(&(device, field));
            return;
        };
        let is_device_lost = field != "device" && self.told.contains(&(device, "device"));
        if is_device_lost || !self.told.insert((device, field)) {
            return;
        }
        let name = self.labels.get(&device).map_or("", String::as_str);
        match error {
            // That is how the device is, and no trouble.
            NvmlError::NotSupported => tracing::debug!(target: "verdigris", event = "nvml", device = name, field, reason = %error),
            _ => tracing::warn!(target: "verdigris", event = "nvml", device = name, field, reason = %error, "cannot be read"),
        }
    }
}
