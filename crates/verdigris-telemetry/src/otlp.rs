//! Spans and metrics pushed to a collector of OpenTelemetry, by HTTP and protobuf.
//!
//! Spans go through OpenTelemetry's own kit, in batches; what does not fit its queue is dropped. Metrics are written from the [`Registry`], so that
//! a scraper and a collector see the same numbers. A collector that does not answer costs nothing but what it misses: counts are cumulative.
//!
//! The library tells of a device's times, and of what is slow, overdue or wrong, when they are seen and not where they happened: in no span. Such events become
//! spans of their own here, under the span `execute` of the execution whose number they have.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use opentelemetry::trace::TracerProvider;
use opentelemetry::{Key, Value as Attribute};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value};
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint, ResourceMetrics, ScopeMetrics, Sum, metric,
    number_data_point,
};
use opentelemetry_proto::tonic::resource::v1::Resource as ResourceMessage;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use prost::Message;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::filter_fn;

use crate::collector::OtlpCollector;
use crate::error::Error;
use crate::exposition::families;
use crate::observe::{self, DEVICE_TARGET, MetricKind, Unit};
use crate::registry::{REFUSED, Registry, Series, Value, read};
use seen::SeenSpans;

mod seen;

/// How long a collector has for an answer, and at the end for all of them.
const TIME: Duration = Duration::from_secs(5);

/// Who speaks.
const SCOPE: &str = "verdigris";

/// A running push. Dropping it sends what is left, for which the collector has five seconds in all.
#[derive(Debug)]
#[must_use = "nothing is pushed any more once this is dropped"]
pub struct Otlp {
    provider: SdkTracerProvider,
    stop: Option<Sender<()>>,
    pusher: Option<JoinHandle<()>>,
    /// Nothing comes through it; it ends with the pusher's thread.
    is_done: Receiver<()>,
    failed: Arc<AtomicU64>,
}

impl Otlp {
    /// Begins to push: spans of the layer that it gives in batches, metrics at the collector's interval.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use verdigris_telemetry::otlp::Otlp;
    /// use verdigris_telemetry::{Bounds, OtlpCollector, Registry};
    ///
    /// let registry = Arc::new(Registry::new(Bounds::default()));
    /// let started = Otlp::start::<tracing_subscriber::Registry>(&OtlpCollector::new("collector:4318"), registry);
    /// assert!(started.is_err_and(|error| error.to_string().contains("write http://HOST:PORT")));
    /// ```
    ///
    /// # Errors
    /// [`Error::Endpoint`] for what is no address of HTTP (this build speaks no TLS: a collector on the same machine or network takes it on),
    /// [`Error::Otlp`], [`Error::Thread`].
    pub fn start<S>(collector: &OtlpCollector, registry: Arc<Registry>) -> Result<(impl Layer<S> + Send + Sync + use<S>, Otlp), Error>
    where
        S: tracing::Subscriber + for<'span> tracing_subscriber::registry::LookupSpan<'span> + Send + Sync,
    {
        let OtlpCollector { endpoint, headers, service, interval } = collector;
        let base = endpoint.trim().trim_end_matches('/');
        let is_address = base.strip_prefix("http://").is_some_and(|rest| !rest.is_empty());
        let url = reqwest::Url::parse(base).ok().filter(|url| is_address && url.has_host());
        if url.is_none() {
            return Err(Error::Endpoint { text: endpoint.to_owned() });
        }
        let wrong = |detail: String| Error::Otlp { endpoint: base.to_owned(), detail };
        let spans = SpanExporter::builder()
            .with_http()
            .with_endpoint(format!("{base}/v1/traces"))
            .with_protocol(Protocol::HttpBinary)
            .with_timeout(TIME)
            .with_headers(headers.iter().cloned().collect())
            .build()
            .map_err(|error| wrong(error.to_string()))?;
        let resource = resource(service.as_deref());
        let provider = SdkTracerProvider::builder().with_batch_exporter(spans).with_resource(resource.clone()).build();
        // Times of the device are spans, and no events of the span in which they were told of.
        let around = tracing_opentelemetry::layer()
            .with_tracer(provider.tracer(SCOPE))
            .with_filter(filter_fn(|what| !(what.is_event() && what.target() == DEVICE_TARGET)));
        let layer = around.and_then(SeenSpans::new(provider.tracer(SCOPE)));
        let failed = Arc::<AtomicU64>::default();
        let metrics = Metrics {
            url: format!("{base}/v1/metrics"),
            headers: headers.clone(),
            resource: message(&resource),
            registry,
            begun_ns: now_ns(),
            failed: Arc::clone(&failed),
        };
        let (stop, stopped) = channel();
        let (done, is_done) = channel();
        let (name, interval) = ("verdigris-otlp", *interval);
        let body = move || {
            metrics.push_on(interval, &stopped);
            drop(done);
        };
        let pusher = std::thread::Builder::new().name(name.to_owned()).spawn(body).map_err(|source| Error::Thread { name, source })?;
        Ok((layer, Otlp { provider, stop: Some(stop), pusher: Some(pusher), is_done, failed }))
    }

    /// Pushes of metrics that the collector did not take.
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }
}

impl Drop for Otlp {
    fn drop(&mut self) {
        let end = Instant::now() + TIME;
        self.stop = None;
        // Spans that a collector does not take are lost, as they are while we run. Meanwhile the other thread pushes the last metrics.
        let _ = self.provider.shutdown_with_timeout(TIME);
        let is_late = self.is_done.recv_timeout(end.saturating_duration_since(Instant::now())) == Err(RecvTimeoutError::Timeout);
        if let (false, Some(pusher)) = (is_late, self.pusher.take()) {
            // A panic there was printed there; the end is reached all the same. A thread that waits still for a collector goes with the process.
            let _ = pusher.join();
        }
    }
}

/// Who this process is: by the name that was given, else what the variables of OpenTelemetry say, else the name of the program.
fn resource(service: Option<&str>) -> Resource {
    if let Some(service) = service {
        return Resource::builder().with_service_name(service.to_owned()).build();
    }
    let found = Resource::builder().build();
    let is_named = found.get(&Key::from_static_str("service.name")).is_some_and(|name| !name.as_str().starts_with("unknown_service"));
    if is_named {
        return found;
    }
    let program = std::env::current_exe().ok().and_then(|path| Some(path.file_stem()?.to_string_lossy().into_owned()));
    Resource::builder().with_service_name(program.unwrap_or_else(|| SCOPE.to_owned())).build()
}

fn message(resource: &Resource) -> ResourceMessage {
    let text = |value: &Attribute| value.as_str().into_owned();
    let attributes = resource.iter().map(|(key, value)| attribute(key.as_str(), &text(value))).collect();
    ResourceMessage { attributes, ..ResourceMessage::default() }
}

fn attribute(key: &str, value: &str) -> KeyValue {
    let value = AnyValue { value: Some(any_value::Value::StringValue(value.to_owned())) };
    KeyValue { key: key.to_owned(), value: Some(value), ..KeyValue::default() }
}

fn now_ns() -> u64 {
    // A clock before 1970 is no clock.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

/// What the pusher's thread has.
struct Metrics {
    url: String,
    headers: Vec<(String, String)>,
    resource: ResourceMessage,
    registry: Arc<Registry>,
    begun_ns: u64,
    failed: Arc<AtomicU64>,
}

impl Metrics {
    fn push_on(&self, interval: Duration, stopped: &std::sync::mpsc::Receiver<()>) {
        let client = match reqwest::blocking::Client::builder().timeout(TIME).build() {
            Ok(client) => client,
            Err(error) => {
                tracing::warn!(target: "verdigris", event = "otlp", reason = %error, "metrics are not pushed");
                return;
            }
        };
        let mut is_told = false;
        loop {
            let is_last = stopped.recv_timeout(interval) != Err(RecvTimeoutError::Timeout);
            observe::collect_metrics();
            let request = client.post(&self.url).header("content-type", "application/x-protobuf").body(self.message().encode_to_vec());
            let request = self.headers.iter().fold(request, |request, (name, value)| request.header(name, value));
            match request.send().and_then(reqwest::blocking::Response::error_for_status) {
                Ok(_) => is_told = false,
                Err(error) => {
                    self.failed.fetch_add(1, Ordering::Relaxed);
                    if !is_told {
                        tracing::warn!(target: "verdigris", event = "otlp", reason = %error, "the collector does not take metrics");
                    }
                    is_told = true;
                }
            }
            if is_last {
                return;
            }
        }
    }

    fn message(&self) -> ExportMetricsServiceRequest {
        let now_ns = now_ns();
        let mut metrics: Vec<Metric> = Vec::new();
        for (family, series) in families(&self.registry) {
            let description = read(&family.help).to_string();
            let data = self.data(family.kind, &series, now_ns);
            metrics.push(Metric {
                name: family.name.to_string(),
                description,
                unit: unit(family.unit).to_owned(),
                data,
                ..Metric::default()
            });
        }
        let refused = self.point(&[], number_data_point::Value::AsInt(as_int(self.registry.refused_count())), now_ns);
        metrics.push(Metric { name: REFUSED.to_owned(), unit: "1".to_owned(), data: Some(sum(vec![refused])), ..Metric::default() });
        let scope = InstrumentationScope {
            name: SCOPE.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..InstrumentationScope::default()
        };
        let scope_metrics = vec![ScopeMetrics { scope: Some(scope), metrics, ..ScopeMetrics::default() }];
        let resource = Some(self.resource.clone());
        ExportMetricsServiceRequest { resource_metrics: vec![ResourceMetrics { resource, scope_metrics, ..ResourceMetrics::default() }] }
    }

    fn data(&self, kind: MetricKind, series: &[Arc<Series>], now_ns: u64) -> Option<metric::Data> {
        let number = |series: &Arc<Series>| {
            let value = match &series.value {
                Value::Counter(total) => number_data_point::Value::AsInt(as_int(total.get())),
                Value::Gauge(newest) => number_data_point::Value::AsDouble(newest.get()?),
                Value::Histogram(_) => return None,
            };
            Some(self.point(&series.labels, value, now_ns))
        };
        match kind {
            MetricKind::Counter => Some(sum(series.iter().filter_map(number).collect())),
            MetricKind::Gauge => Some(metric::Data::Gauge(Gauge { data_points: series.iter().filter_map(number).collect() })),
            MetricKind::Histogram => {
                let points = series.iter().filter_map(|series| self.histogram(series, now_ns)).collect();
                Some(metric::Data::Histogram(Histogram { data_points: points, aggregation_temporality: cumulative() }))
            }
        }
    }

    fn point(&self, labels: &[(Box<str>, Box<str>)], value: number_data_point::Value, now_ns: u64) -> NumberDataPoint {
        NumberDataPoint {
            attributes: labels.iter().map(|(name, value)| attribute(name, value)).collect(),
            start_time_unix_nano: self.begun_ns,
            time_unix_nano: now_ns,
            value: Some(value),
            ..NumberDataPoint::default()
        }
    }

    fn histogram(&self, series: &Series, now_ns: u64) -> Option<HistogramDataPoint> {
        let Value::Histogram(counts) = &series.value else { return None };
        let bucket_counts: Vec<u64> = counts.counts().collect();
        Some(HistogramDataPoint {
            attributes: series.labels.iter().map(|(name, value)| attribute(name, value)).collect(),
            start_time_unix_nano: self.begun_ns,
            time_unix_nano: now_ns,
            count: bucket_counts.iter().sum(),
            sum: Some(counts.sum()),
            bucket_counts,
            explicit_bounds: counts.bounds.to_vec(),
            ..HistogramDataPoint::default()
        })
    }
}

fn sum(data_points: Vec<NumberDataPoint>) -> metric::Data {
    metric::Data::Sum(Sum { data_points, aggregation_temporality: cumulative(), is_monotonic: true })
}

fn cumulative() -> i32 {
    AggregationTemporality::Cumulative as i32
}

fn as_int(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// The unit as UCUM has it, which OpenTelemetry uses.
fn unit(unit: Unit) -> &'static str {
    match unit {
        Unit::Count | Unit::Ratio => "1",
        Unit::Seconds => "s",
        Unit::Bytes => "By",
        Unit::Hertz => "Hz",
        Unit::Celsius => "Cel",
        Unit::Watts => "W",
    }
}
