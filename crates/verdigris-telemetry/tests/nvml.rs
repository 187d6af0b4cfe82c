//! Device metrics from devices that do as they are told.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use verdigris_telemetry::nvml::{
    Clocks, Collector, DeviceNames, EccErrors, Memory, Nvml, NvmlError, ProcessMemory, Reading, Throttling, Utilization, Xid, XidNews,
};
use verdigris_telemetry::{Bounds, Registry};

/// Devices with readings that a test changes, and events that it plants.
struct Fake {
    devices: Mutex<Vec<Result<Reading, NvmlError>>>,
    xids: Mutex<Vec<Xid>>,
    reads: AtomicUsize,
    /// The device whose events cannot be watched.
    refuses_xids: AtomicU32,
    /// Whether the next wait fails.
    fails_to_wait: AtomicBool,
}

fn reading() -> Reading {
    Reading {
        utilization: Ok(Utilization { gpu: 0.75, memory: 0.5 }),
        memory: Ok(Memory { used_bytes: 40 << 30, total_bytes: 80 << 30 }),
        clocks: Ok(Clocks { sm_hertz: 1_980_000_000, memory_hertz: 2_619_000_000 }),
        throttling: Ok(Throttling { power: true, ..Throttling::default() }),
        temperature_celsius: Ok(61.0),
        power_watts: Ok(512.5),
        ecc_errors: Ok(EccErrors { corrected: 3, uncorrected: 0 }),
        processes: Ok(vec![
            ProcessMemory { process: std::process::id(), used_bytes: 1000 },
            ProcessMemory { process: u32::MAX, used_bytes: 30 },
            ProcessMemory { process: u32::MAX - 1, used_bytes: 4 },
        ]),
        is_mig: Ok(false),
    }
}

impl Nvml for Fake {
    fn device_count(&self) -> Result<u32, NvmlError> {
        Ok(u32::try_from(self.devices.lock().expect("not poisoned").len()).expect("few"))
    }

    fn uuid(&self, device: u32) -> Result<String, NvmlError> {
        Ok(format!("GPU-{device}"))
    }

    fn read(&self, device: u32) -> Result<Reading, NvmlError> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.devices.lock().expect("not poisoned")[device as usize].clone()
    }

    fn watch_xids(&self, pause: Duration, tell: &mut dyn FnMut(XidNews) -> bool) -> Result<(), NvmlError> {
        let refused = self.refuses_xids.load(Ordering::Relaxed);
        for device in 0..self.device_count()? {
            let lost = || NvmlError::Lost { detail: "planted refusal".to_owned() };
            let news = if device == refused { XidNews::Refused(device, lost()) } else { XidNews::Watched(device) };
            if !tell(news) {
                return Ok(());
            }
        }
        loop {
            if self.fails_to_wait.swap(false, Ordering::Relaxed) {
                return Err(NvmlError::Other { detail: "planted failure to wait".to_owned() });
            }
            let xid = self.xids.lock().expect("not poisoned").pop();
            if xid.is_none() {
                std::thread::sleep(pause.min(Duration::from_millis(5)));
            }
            if !tell(xid.map_or(XidNews::Pause, XidNews::Event)) {
                return Ok(());
            }
        }
    }
}

fn collect(fake: &Arc<Fake>, names: DeviceNames) -> (Arc<Registry>, Collector) {
    let registry = Arc::new(Registry::new(Bounds::default()));
    let nvml = Arc::clone(fake);
    let open = move || Ok(Arc::clone(&nvml) as Arc<dyn Nvml>);
    let collector = Collector::start(open, Arc::clone(&registry), Duration::from_millis(1), names).expect("a thread");
    (registry, collector)
}

/// Waits until every device has been read once more, whole.
fn next(fake: &Fake) {
    let (before, devices) = (fake.reads.load(Ordering::Relaxed), fake.devices.lock().expect("not poisoned").len());
    let end = Instant::now() + Duration::from_secs(10);
    while fake.reads.load(Ordering::Relaxed) < before + 2 * devices {
        assert!(Instant::now() < end, "the collector reads");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn fake(devices: Vec<Result<Reading, NvmlError>>) -> Arc<Fake> {
    Arc::new(Fake {
        devices: Mutex::new(devices),
        xids: Mutex::default(),
        reads: AtomicUsize::new(0),
        refuses_xids: AtomicU32::new(u32::MAX),
        fails_to_wait: AtomicBool::new(false),
    })
}

#[test]
fn every_field_is_told_in_the_units_of_the_table() {
    let (registry, _collector) = collect(&fake(vec![Ok(reading())]), DeviceNames::ByNumber);
    let text = registry.text();
    for line in [
        "verdigris_gpu_up{device=\"cuda:0\"} 1",
        "verdigris_gpu_utilization_ratio{device=\"cuda:0\"} 0.75",
        "verdigris_gpu_memory_utilization_ratio{device=\"cuda:0\"} 0.5",
        "verdigris_gpu_memory_used_bytes{device=\"cuda:0\"} 42949672960",
        "verdigris_gpu_memory_total_bytes{device=\"cuda:0\"} 85899345920",
        "verdigris_gpu_process_memory_bytes{device=\"cuda:0\",process=\"self\"} 1000",
        "verdigris_gpu_process_memory_bytes{device=\"cuda:0\",process=\"others\"} 34",
        "verdigris_gpu_sm_clock_hertz{device=\"cuda:0\"} 1980000000",
        "verdigris_gpu_memory_clock_hertz{device=\"cuda:0\"} 2619000000",
        "verdigris_gpu_throttled{device=\"cuda:0\",reason=\"power\"} 1",
        "verdigris_gpu_throttled{device=\"cuda:0\",reason=\"thermal\"} 0",
        "verdigris_gpu_throttled{device=\"cuda:0\",reason=\"hw_slowdown\"} 0",
        "verdigris_gpu_throttled{device=\"cuda:0\",reason=\"sync_boost\"} 0",
        "verdigris_gpu_throttled{device=\"cuda:0\",reason=\"other\"} 0",
        "verdigris_gpu_temperature_celsius{device=\"cuda:0\"} 61",
        "verdigris_gpu_power_watts{device=\"cuda:0\"} 512.5",
        "verdigris_gpu_ecc_errors_total{device=\"cuda:0\",kind=\"corrected\"} 3",
        "verdigris_gpu_ecc_errors_total{device=\"cuda:0\",kind=\"uncorrected\"} 0",
        "verdigris_gpu_mig_enabled{device=\"cuda:0\"} 0",
    ] {
        assert!(text.contains(&format!("{line}\n")), "{line} is not in\n{text}");
    }
    // All of the table's device metrics but the event, which nobody has planted.
    let expected = verdigris_telemetry::observe::METRICS.iter().filter(|metric| metric.name.starts_with("verdigris_gpu_")).count() - 1;
    assert_eq!(text.matches("# TYPE verdigris_gpu_").count(), expected);
}

#[test]
fn what_is_not_supported_is_absent_and_the_rest_is_there() {
    let partly = Reading {
        power_watts: Err(NvmlError::NotSupported),
        ecc_errors: Err(NvmlError::NotSupported),
        processes: Err(NvmlError::Other { detail: "no permission".to_owned() }),
        ..reading()
    };
    let (registry, _collector) = collect(&fake(vec![Ok(partly), Ok(reading())]), DeviceNames::ByNumber);
    let text = registry.text();
    for name in ["verdigris_gpu_power_watts", "verdigris_gpu_ecc_errors_total", "verdigris_gpu_process_memory_bytes"] {
        assert!(!text.contains(&format!("{name}{{device=\"cuda:0\"")) && text.contains(&format!("{name}{{device=\"cuda:1\"")), "{name}");
    }
    assert!(text.contains("verdigris_gpu_temperature_celsius{device=\"cuda:0\"} 61\n"));
}

#[test]
fn a_lost_device_is_down_and_has_no_values_until_it_is_back() {
    let fake = fake(vec![Ok(reading()), Ok(reading())]);
    let (registry, _collector) = collect(&fake, DeviceNames::ByNumber);
    fake.devices.lock().expect("not poisoned")[0] = Err(NvmlError::Lost { detail: "fallen off the bus".to_owned() });
    next(&fake);
    let text = registry.text();
    assert!(text.contains("verdigris_gpu_up{device=\"cuda:0\"} 0\n") && text.contains("verdigris_gpu_up{device=\"cuda:1\"} 1\n"), "{text}");
    assert!(!text.contains("verdigris_gpu_temperature_celsius{device=\"cuda:0\"}"), "no stale value");
    assert!(text.contains("verdigris_gpu_temperature_celsius{device=\"cuda:1\"}"));
    fake.devices.lock().expect("not poisoned")[0] = Ok(Reading { temperature_celsius: Ok(30.0), ..reading() });
    next(&fake);
    assert!(registry.text().contains("verdigris_gpu_temperature_celsius{device=\"cuda:0\"} 30\n"));
}

/// F7: a second process fills the device, and goes. The series are those of which the alert VerdigrisNoisyNeighbour makes its ratio: 0.1 is its bound.
#[test]
fn a_second_process_that_fills_the_device_is_told_as_others() {
    const GIB: u64 = 1 << 30;
    let ours = ProcessMemory { process: std::process::id(), used_bytes: 20 * GIB };
    let with = |neighbours: &[u64]| {
        let others = (1..).zip(neighbours).map(|(number, &used_bytes)| ProcessMemory { process: u32::MAX - number, used_bytes });
        let processes: Vec<ProcessMemory> = std::iter::once(ours).chain(others).collect();
        let used_bytes = processes.iter().map(|process| process.used_bytes).sum();
        Reading { memory: Ok(Memory { used_bytes, total_bytes: 80 * GIB }), processes: Ok(processes), ..reading() }
    };
    let fake = fake(vec![Ok(with(&[]))]);
    let (registry, _collector) = collect(&fake, DeviceNames::ByNumber);
    let value = |series: &str| -> f64 {
        let text = registry.text();
        let line = text.lines().find(|line| line.starts_with(series)).unwrap_or_else(|| panic!("no {series} in\n{text}"));
        line.rsplit_once(' ').expect("a value").1.parse().expect("a number")
    };
    let others = || value("verdigris_gpu_process_memory_bytes{device=\"cuda:0\",process=\"others\"}");
    let ratio = || others() / value("verdigris_gpu_memory_total_bytes{device=\"cuda:0\"}");
    next(&fake);
    assert_eq!(others(), 0.0);
    fake.devices.lock().expect("not poisoned")[0] = Ok(with(&[40 * GIB, 20 * GIB]));
    next(&fake);
    assert_eq!((others(), ratio()), ((60 * GIB) as f64, 0.75));
    assert_eq!(value("verdigris_gpu_process_memory_bytes{device=\"cuda:0\",process=\"self\"}"), (20 * GIB) as f64);
    assert_eq!(value("verdigris_gpu_memory_used_bytes{device=\"cuda:0\"}"), (80 * GIB) as f64);
    fake.devices.lock().expect("not poisoned")[0] = Ok(with(&[]));
    next(&fake);
    assert_eq!(ratio(), 0.0);
}

#[test]
fn critical_events_are_counted_by_number() {
    let fake = fake(vec![Ok(reading())]);
    let (registry, collector) = collect(&fake, DeviceNames::ByNumber);
    let xid = |device, number| Xid { device, number };
    fake.xids.lock().expect("not poisoned").extend([
        xid(Some(0), Some(79)),
        xid(Some(0), Some(79)),
        xid(Some(0), Some(48)),
        xid(None, Some(79)),
        xid(Some(0), None),
        xid(Some(7), Some(13)),
    ]);
    let end = Instant::now() + Duration::from_secs(10);
    while !fake.xids.lock().expect("not poisoned").is_empty() {
        assert!(Instant::now() < end, "events are waited for");
        std::thread::sleep(Duration::from_millis(5));
    }
    // The last one is counted before its thread ends.
    drop(collector);
    let text = registry.text();
    for line in [
        "{device=\"cuda:0\",xid=\"79\"} 2",
        "{device=\"cuda:0\",xid=\"48\"} 1",
        "{device=\"unknown\",xid=\"79\"} 1",
        "{device=\"cuda:0\",xid=\"unknown\"} 1",
    ] {
        assert!(text.contains(&format!("verdigris_gpu_xid_events_total{line}\n")), "{line} is not in\n{text}");
    }
    assert!(!text.contains("xid=\"13\""), "a device that is not told of");
}

/// Waits until the text of all series has this line.
fn until(registry: &Registry, line: &str) {
    let end = Instant::now() + Duration::from_secs(30);
    while !registry.text().contains(&format!("{line}\n")) {
        assert!(Instant::now() < end, "{line} is not in\n{}", registry.text());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_device_that_refuses_to_be_watched_leaves_the_others_watched_and_is_tried_again() {
    let fake = fake(vec![Ok(reading()), Ok(reading())]);
    fake.refuses_xids.store(0, Ordering::Relaxed);
    let (registry, _collector) = collect(&fake, DeviceNames::ByNumber);
    until(&registry, "verdigris_gpu_xid_watched{device=\"cuda:1\"} 1");
    assert!(registry.text().contains("verdigris_gpu_xid_watched{device=\"cuda:0\"} 0\n"), "{}", registry.text());
    fake.xids.lock().expect("not poisoned").push(Xid { device: Some(1), number: Some(79) });
    until(&registry, "verdigris_gpu_xid_events_total{device=\"cuda:1\",xid=\"79\"} 1");
    fake.refuses_xids.store(u32::MAX, Ordering::Relaxed);
    until(&registry, "verdigris_gpu_xid_watched{device=\"cuda:0\"} 1");
}

#[test]
fn a_wait_that_fails_is_told_by_the_metric_and_begun_again() {
    let fake = fake(vec![Ok(reading())]);
    let (registry, _collector) = collect(&fake, DeviceNames::ByNumber);
    until(&registry, "verdigris_gpu_xid_watched{device=\"cuda:0\"} 1");
    fake.fails_to_wait.store(true, Ordering::Relaxed);
    until(&registry, "verdigris_gpu_xid_watched{device=\"cuda:0\"} 0");
    fake.xids.lock().expect("not poisoned").push(Xid { device: Some(0), number: Some(48) });
    until(&registry, "verdigris_gpu_xid_events_total{device=\"cuda:0\",xid=\"48\"} 1");
    assert!(registry.text().contains("verdigris_gpu_xid_watched{device=\"cuda:0\"} 1\n"), "{}", registry.text());
}

#[test]
fn memory_errors_go_on_rising_where_a_reset_begins_the_devices_count_anew() {
    let fake = fake(vec![Ok(reading())]);
    let (registry, _collector) = collect(&fake, DeviceNames::ByNumber);
    let is = |corrected: u64, uncorrected: u64| {
        let (ecc, series) = (EccErrors { corrected, uncorrected }, "verdigris_gpu_ecc_errors_total{device=\"cuda:0\",kind=");
        fake.devices.lock().expect("not poisoned")[0] = Ok(Reading { ecc_errors: Ok(ecc), ..reading() });
        next(&fake);
        let text = registry.text();
        let of = |kind: &str| text.lines().find_map(|line| line.strip_prefix(&format!("{series}\"{kind}\"}} "))).map(str::to_owned);
        (of("corrected").expect("a series"), of("uncorrected").expect("a series"))
    };
    let pair = |corrected: &str, uncorrected: &str| (corrected.to_owned(), uncorrected.to_owned());
    assert_eq!(is(3, 0), pair("3", "0"), "what the driver has counted before");
    assert_eq!(is(5, 1), pair("5", "1"));
    // Reset: 5 and 1 are forgotten, and the same numbers come again.
    assert_eq!(is(0, 0), pair("5", "1"));
    assert_eq!(is(2, 1), pair("7", "2"));
}

#[test]
fn devices_that_come_later_are_found() {
    let fake = fake(vec![]);
    let (registry, _collector) = collect(&fake, DeviceNames::ByNumber);
    assert!(!registry.text().contains("verdigris_gpu_"), "{}", registry.text());
    *fake.devices.lock().expect("not poisoned") = vec![Ok(reading())];
    until(&registry, "verdigris_gpu_temperature_celsius{device=\"cuda:0\"} 61");
    until(&registry, "verdigris_gpu_xid_watched{device=\"cuda:0\"} 1");
}

/// As when the driver is loaded anew below an exporter: its library has to be opened again.
#[test]
fn a_library_that_is_no_more_there_is_opened_again() {
    let gone = NvmlError::NotThere { detail: "uninitialized".to_owned() };
    let (first, second) =
        (fake(vec![Ok(reading())]), fake(vec![Ok(Reading { temperature_celsius: Ok(30.0), ..reading() }), Ok(reading())]));
    let registry = Arc::new(Registry::new(Bounds::default()));
    let opened = Arc::new(AtomicUsize::new(0));
    let (of_first, of_second, counted) = (Arc::clone(&first), Arc::clone(&second), Arc::clone(&opened));
    let open = move || match counted.fetch_add(1, Ordering::Relaxed) {
        0 => Ok(Arc::clone(&of_first) as Arc<dyn Nvml>),
        1 => Err(NvmlError::NotThere { detail: "not yet".to_owned() }),
        _ => Ok(Arc::clone(&of_second) as Arc<dyn Nvml>),
    };
    let _collector = Collector::start(open, Arc::clone(&registry), Duration::from_millis(100), DeviceNames::ByNumber).expect("a thread");
    first.devices.lock().expect("not poisoned")[0] = Err(gone);
    until(&registry, "verdigris_gpu_up{device=\"cuda:0\"} 0");
    until(&registry, "verdigris_gpu_temperature_celsius{device=\"cuda:0\"} 30");
    until(&registry, "verdigris_gpu_up{device=\"cuda:1\"} 1");
    assert_eq!(opened.load(Ordering::Relaxed), 3);
    // The same count of memory errors is none that is new.
    assert!(registry.text().contains("verdigris_gpu_ecc_errors_total{device=\"cuda:0\",kind=\"corrected\"} 3\n"), "{}", registry.text());
}

#[test]
fn names_follow_identities_and_hide_what_cuda_hides() {
    let names = HashMap::from([("GPU-2".to_owned(), "cuda:0".to_owned()), ("GPU-0".to_owned(), "cuda:1".to_owned())]);
    let hot = Reading { temperature_celsius: Ok(90.0), ..reading() };
    let (registry, _collector) = collect(&fake(vec![Ok(reading()), Ok(reading()), Ok(hot)]), DeviceNames::ByUuid(names));
    let text = registry.text();
    assert!(text.contains("verdigris_gpu_temperature_celsius{device=\"cuda:0\"} 90\n"), "{text}");
    assert_eq!(text.matches("verdigris_gpu_up{").count(), 2);
}

#[test]
fn the_collector_ends_at_once_and_outlives_a_missing_library() {
    let registry = Arc::new(Registry::new(Bounds::default()));
    let open = || Err(NvmlError::NotThere { detail: "libnvidia-ml.so.1".to_owned() });
    let collector = Collector::start(open, Arc::clone(&registry), Duration::from_secs(3600), DeviceNames::ByNumber).expect("a thread");
    assert!(matches!(collector.missing(), Some(NvmlError::NotThere { .. })));
    let begun = Instant::now();
    drop(collector);
    let (_, collector) = collect(&fake(vec![Ok(reading())]), DeviceNames::ByNumber);
    assert!(collector.missing().is_none());
    drop(collector);
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    assert!(!registry.text().contains("verdigris_gpu_"));
}

/// Counts warnings.
struct Warnings(Arc<Mutex<Vec<String>>>, Arc<AtomicBool>);

impl<S: tracing::Subscriber> Layer<S> for Warnings {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!("{field}={value:?} ");
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        if *event.metadata().level() == tracing::Level::WARN {
            self.0.lock().expect("not poisoned").push(text.0);
        }
        self.1.store(true, Ordering::Relaxed);
    }
}

#[test]
fn trouble_is_told_once() {
    let (told, seen) = (Arc::default(), Arc::default());
    let subscriber = tracing_subscriber::registry().with(Warnings(Arc::clone(&told), Arc::clone(&seen)));
    // The collector's own thread tells, so the subscriber has to be the process's; no other test of this program listens.
    tracing::subscriber::set_global_default(subscriber).expect("the first");
    let partly = Reading { processes: Err(NvmlError::Other { detail: "planted trouble".to_owned() }), ..reading() };
    let fake = fake(vec![Ok(partly)]);
    let (_, _collector) = collect(&fake, DeviceNames::ByNumber);
    for _ in 0..3 {
        next(&fake);
    }
    let told = told.lock().expect("not poisoned");
    let planted: Vec<&String> = told.iter().filter(|text| text.contains("planted trouble")).collect();
    assert_eq!(planted.len(), 1, "{told:?}");
    assert!(planted[0].contains("field=\"processes\"") && planted[0].contains("cuda:0"), "{planted:?}");
}
