//! What the tests share: an executor that fails on demand, counters that can be read, requests.
#![allow(dead_code, reason = "each test file uses a part")]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use verdigris::DType;
use verdigris_serve::{Client, ExecuteError, Executor, Limits, Port, Reply, Served, Service, Settings, Signature};

/// Every counter, gauge and histogram of the process, by name and labels.
#[derive(Default)]
pub(crate) struct Observed {
    numbers: Mutex<BTreeMap<String, Arc<AtomicU64>>>,
}

struct Counted(Arc<AtomicU64>);

impl HistogramFn for Counted {
    fn record(&self, _: f64) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Observed {
    fn number(&self, key: &Key) -> Arc<AtomicU64> {
        let labels: Vec<String> = key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
        let name = format!("{}{{{}}}", key.name().trim_start_matches("verdigris_serve_"), labels.join(","));
        self.numbers.lock().unwrap().entry(name).or_default().clone()
    }

    /// A counter; of a histogram, how often it was recorded.
    pub(crate) fn count(&self, name: &str) -> u64 {
        self.numbers.lock().unwrap().get(name).map_or(0, |number| number.load(Ordering::Relaxed))
    }

    pub(crate) fn gauge(&self, name: &str) -> f64 {
        f64::from_bits(self.count(name))
    }

    /// Requests of a model by outcome.
    pub(crate) fn outcomes(&self, model: &str) -> BTreeMap<String, u64> {
        let prefix = format!("requests_total{{model={model},outcome=");
        let numbers = self.numbers.lock().unwrap();
        let of_model = numbers.iter().filter_map(|(name, number)| {
            let outcome = name.strip_prefix(&prefix)?.trim_end_matches('}');
            Some((outcome.to_owned(), number.load(Ordering::Relaxed)))
        });
        of_model.collect()
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.numbers.lock().unwrap().keys().cloned().collect()
    }
}

struct Recording(Arc<Observed>);

impl Recorder for Recording {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.0.number(key))
    }
    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.0.number(key))
    }
    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(Arc::new(Counted(self.0.number(key))))
    }
}

/// The process's counters.
pub(crate) fn observed() -> Arc<Observed> {
    static OBSERVED: OnceLock<Arc<Observed>> = OnceLock::new();
    let install = || {
        let observed = Arc::new(Observed::default());
        assert!(metrics::set_global_recorder(Recording(observed.clone())).is_ok(), "no other recorder");
        observed
    };
    OBSERVED.get_or_init(install).clone()
}

/// y = 2 x + 1 over rows of one f32, and whatever a closure does before that: wait, fail, panic.
pub(crate) struct Affine<F> {
    pub(crate) before: F,
}

pub(crate) fn affine(x: f32) -> f32 {
    2.0 * x + 1.0
}

impl<F: FnMut(u64) -> Result<(), ExecuteError> + Send> Executor for Affine<F> {
    fn execute(&mut self, planned_rows: u64, inputs: &[Vec<u8>]) -> Result<Vec<Vec<u8>>, ExecuteError> {
        (self.before)(planned_rows)?;
        Ok(vec![inputs[0].chunks_exact(4).flat_map(|x| affine(f32::from_le_bytes(x.try_into().unwrap())).to_le_bytes()).collect()])
    }
}

pub(crate) fn affine_signature(name: &str, batch_sizes: &[u64]) -> Signature {
    let port = |name: &str| Port { name: name.to_owned(), dtype: DType::F32, row_dims: vec![1] };
    Signature {
        name: name.to_owned(),
        inputs: vec![port("x")],
        outputs: vec![port("y")],
        batch_sizes: batch_sizes.to_vec(),
        max_wait: Duration::from_millis(1),
        deadline: Duration::from_secs(10),
        queue_rows: 256,
        device: "fake".to_owned(),
        engines: BTreeMap::new(),
        rows_proved_apart: true,
    }
}

pub(crate) fn served(signature: Signature, before: impl FnMut(u64) -> Result<(), ExecuteError> + Send + 'static) -> Served {
    Served { signature, executor: Box::new(Affine { before }) }
}

pub(crate) fn start(limits: Limits, models: Vec<Served>) -> Service {
    let mut service = Service::start(Settings { listen: "127.0.0.1:0".parse().unwrap(), limits, metrics: None }).unwrap();
    service.serve(models).unwrap();
    service
}

pub(crate) fn connect(address: SocketAddr) -> Client {
    Client::connect(address, Duration::from_secs(20)).unwrap()
}

/// A request for rows of these numbers.
pub(crate) fn json_request(values: &[f32]) -> String {
    serde_json::json!({ "inputs": [{ "name": "x", "shape": [values.len(), 1], "datatype": "FP32", "data": values }] }).to_string()
}

pub(crate) fn json(reply: &Reply) -> serde_json::Value {
    serde_json::from_slice(&reply.body).unwrap_or_else(|error| panic!("{error}: {}", reply.text()))
}

/// The numbers of the first output.
pub(crate) fn numbers(reply: &Reply) -> Vec<f64> {
    assert_eq!(reply.status, 200, "{}", reply.text());
    json(reply)["outputs"][0]["data"].as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
}

/// The kind of a refusal, which has a message and an id.
pub(crate) fn kind(reply: &Reply) -> String {
    let value = json(reply);
    assert!(!value["error"].as_str().unwrap().is_empty(), "{value}");
    assert_eq!(value["request_id"].as_str(), reply.header("x-request-id"), "{value}");
    value["kind"].as_str().unwrap().to_owned()
}

/// Waits until something is so.
pub(crate) fn until(what: &str, is_so: impl Fn() -> bool) {
    let start = std::time::Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Seeded numbers (splitmix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}
