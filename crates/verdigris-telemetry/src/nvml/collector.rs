//! Reads devices at an interval and sets their metrics.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use metrics::{Gauge, Key, Label, Level, Metadata, Recorder};

use super::{Nvml, NvmlError, Reading, Xid};
use crate::error::Error;
use crate::registry::Registry;

/// Where these metrics say that they come from.
const WHERE: Metadata<'static> = Metadata::new(module_path!(), Level::INFO, None);

/// The shortest interval: a reading takes some milliseconds of a core for each device.
const LEAST_INTERVAL: Duration = Duration::from_millis(100);

/// How often a library that was not there is looked for.
const SEARCH_INTERVAL: Duration = Duration::from_secs(10);

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
    /// not there, it is asked for again every ten seconds: a driver may come after us.
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

/// The reader's thread.
fn run(open: &Open, mut reader: Option<Reader>, registry: &Arc<Registry>, interval: Duration, names: &DeviceNames, stopped: &Receiver<()>) {
    let mut events = reader.as_ref().and_then(Events::start);
    loop {
        let pause = if reader.is_some() { interval } else { SEARCH_INTERVAL.max(interval) };
        if stopped.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
            break;
        }
        if reader.is_none()
            && let Ok(nvml) = open()
        {
            let found = Reader::new(nvml, Arc::clone(registry), names.clone());
            events = Events::start(&found);
            reader = Some(found);
        }
        if let Some(reader) = &mut reader {
            reader.read();
        }
    }
    drop(events);
}

/// The thread that waits for critical events.
struct Events {
    is_stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Events {
    fn start(reader: &Reader) -> Option<Events> {
        let is_stopped = Arc::new(AtomicBool::new(false));
        let (nvml, registry, names) = (Arc::clone(&reader.nvml), Arc::clone(&reader.registry), reader.labels.clone());
        let stop = Arc::clone(&is_stopped);
        let body = move || {
            let mut tell = |xid: Option<Xid>| {
                if let Some(xid) = xid {
                    count_xid(&registry, &names, xid);
                }
                !stop.load(Ordering::Relaxed)
            };
            if let Err(error) = nvml.watch_xids(XID_PAUSE, &mut tell) {
                tracing::warn!(target: "verdigris", event = "nvml", field = "xid", reason = %error, "critical events are not counted");
            }
        };
        // Without a thread there are no events; the rest goes on.
        let thread = std::thread::Builder::new().name("verdigris-xid".to_owned()).spawn(body).ok()?;
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
    /// The label of each device that is told of.
    labels: HashMap<u32, String>,
    /// Gauges that have been set, by metric, device and further label.
    gauges: HashMap<(&'static str, u32, &'static str), Gauge>,
    /// What has been told to be missing.
    told: HashSet<(u32, &'static str)>,
}

impl Reader {
    fn new(nvml: Arc<dyn Nvml>, registry: Arc<Registry>, names: DeviceNames) -> Reader {
        let count = nvml.device_count().unwrap_or_else(|error| {
            tracing::warn!(target: "verdigris", event = "nvml", field = "devices", reason = %error, "devices cannot be counted");
            0
        });
        let label = |number| match &names {
            DeviceNames::ByNumber => Some(format!("cuda:{number}")),
            DeviceNames::ByUuid(names) => names.get(&nvml.uuid(number).ok()?).cloned(),
        };
        let labels = (0..count).filter_map(|number| Some((number, label(number)?))).collect();
        Reader { nvml, registry, labels, gauges: HashMap::new(), told: HashSet::new() }
    }

    fn read(&mut self) {
        let mut numbers: Vec<u32> = self.labels.keys().copied().collect();
        numbers.sort_unstable();
        for number in numbers {
            let reading = self.nvml.read(number);
            self.set("verdigris_gpu_up", number, "", f64::from(u8::from(reading.is_ok())));
            self.tell(number, "device", reading.as_ref().err());
            self.take(number, &reading.unwrap_or_else(|error| Reading::nothing(&error)));
        }
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
                self.registry.register_counter(&key, &WHERE).absolute(count);
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
