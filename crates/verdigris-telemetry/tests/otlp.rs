//! A collector made here receives and decodes what is pushed.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use opentelemetry_proto::tonic::metrics::v1::{Metric, metric, number_data_point};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use tracing::subscriber::with_default;
use tracing_subscriber::layer::SubscriberExt;
use verdigris_telemetry::otlp::Otlp;
use verdigris_telemetry::{Bounds, OtlpCollector, Registry, Telemetry};

/// Reads one request: path, headers in small letters, body.
fn request(stream: &mut TcpStream) -> Option<(String, String, Vec<u8>)> {
    let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
    let head_end = loop {
        if let Some(at) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break at + 4;
        }
        let read = stream.read(&mut buffer).ok().filter(|read| *read > 0)?;
        bytes.extend_from_slice(&buffer[..read]);
    };
    let head = String::from_utf8_lossy(&bytes[..head_end]).to_ascii_lowercase();
    let length: usize = head.split("content-length: ").nth(1)?.split("\r\n").next()?.parse().ok()?;
    while bytes.len() < head_end + length {
        let read = stream.read(&mut buffer).ok().filter(|read| *read > 0)?;
        bytes.extend_from_slice(&buffer[..read]);
    }
    let path = head.split(' ').nth(1)?.to_owned();
    Some((path, head, bytes[head_end..].to_vec()))
}

struct Push {
    path: String,
    /// Its headers, in small letters.
    head: String,
    body: Vec<u8>,
}

/// Takes everything; the first push of metrics is told that the collector is busy.
fn collector() -> (SocketAddr, Receiver<Push>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    let (tell, told) = channel();
    std::thread::spawn(move || {
        let busy = Arc::new(AtomicBool::new(true));
        for stream in listener.incoming() {
            let (tell, busy) = (tell.clone(), Arc::clone(&busy));
            std::thread::spawn(move || {
                let Ok(mut stream) = stream else { return };
                while let Some((path, head, body)) = request(&mut stream) {
                    assert!(head.contains("content-type: application/x-protobuf"), "{head}");
                    let is_busy = path == "/v1/metrics" && busy.swap(false, Ordering::Relaxed);
                    let status = if is_busy { "503 Service Unavailable" } else { "200 OK" };
                    let _ = write!(stream, "HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n");
                    if !is_busy && tell.send(Push { path, head, body }).is_err() {
                        return;
                    }
                }
            });
        }
    });
    (address, told)
}

fn spans(pushes: &[Push]) -> Vec<Span> {
    let of_spans = pushes.iter().filter(|push| push.path == "/v1/traces");
    of_spans
        .map(|push| ExportTraceServiceRequest::decode(push.body.as_slice()).expect("a batch of spans"))
        .flat_map(|batch| batch.resource_spans)
        .flat_map(|spans| spans.scope_spans)
        .flat_map(|spans| spans.spans)
        .collect()
}

fn texts(attributes: &[KeyValue]) -> HashMap<String, String> {
    let text = |value: &KeyValue| match value.value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(any_value::Value::StringValue(text)) => text.clone(),
        other => format!("{other:?}"),
    };
    attributes.iter().map(|attribute| (attribute.key.clone(), text(attribute))).collect()
}

#[test]
fn a_collector_receives_spans_and_metrics() {
    let (address, told) = collector();
    let guard = Telemetry::builder().otlp(OtlpCollector::new(format!("http://{address}/")).every(Duration::from_millis(50)));
    let guard = guard.install().expect("installed");
    metrics::counter!("verdigris_plans_total", "device" => "cpu").increment(7);
    metrics::gauge!("verdigris_pool_used_bytes", "device" => "cuda:0").set(4096.0);
    let seconds = metrics::histogram!("verdigris_plan_seconds", "device" => "cpu");
    seconds.record(0.003);
    seconds.record(1e9);
    {
        let _request = tracing::info_span!(target: "verdigris", "request", model = "digits").entered();
        let _plan = tracing::info_span!(target: "verdigris", "plan").entered();
    }
    // Metrics come by themselves, also after a push that failed.
    let end = Instant::now() + Duration::from_secs(20);
    let mut pushes: Vec<Push> = Vec::new();
    while !pushes.iter().any(|push| push.path == "/v1/metrics") {
        pushes.push(told.recv_timeout(end - Instant::now()).expect("a push in time"));
    }
    // Spans come at the latest when the guard goes.
    drop(guard);
    pushes.extend(told.try_iter());
    let spans = spans(&pushes);
    let named = |name: &str| spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("{name} in {spans:?}"));
    assert_eq!(named("plan").parent_span_id, named("request").span_id, "the application's span is around ours");
    assert_eq!(named("plan").trace_id, named("request").trace_id);
    assert_eq!(texts(&named("request").attributes)["model"], "digits");

    let last = pushes.iter().rev().find(|push| push.path == "/v1/metrics").expect("metrics");
    let last = ExportMetricsServiceRequest::decode(last.body.as_slice()).expect("a batch of metrics");
    let resource = last.resource_metrics[0].resource.clone().expect("who speaks");
    assert!(texts(&resource.attributes)["service.name"].starts_with("otlp"), "the name of this program: {resource:?}");
    let metrics: HashMap<String, Metric> =
        last.resource_metrics[0].scope_metrics[0].metrics.iter().map(|metric| (metric.name.clone(), metric.clone())).collect();
    let Some(metric::Data::Sum(plans)) = &metrics["verdigris_plans_total"].data else { panic!("a sum") };
    assert_eq!(plans.data_points[0].value, Some(number_data_point::Value::AsInt(7)));
    assert!(plans.is_monotonic && plans.aggregation_temporality == 2, "cumulative");
    assert_eq!(texts(&plans.data_points[0].attributes), HashMap::from([("device".to_owned(), "cpu".to_owned())]));
    let Some(metric::Data::Gauge(pool)) = &metrics["verdigris_pool_used_bytes"].data else { panic!("a gauge") };
    assert_eq!(pool.data_points[0].value, Some(number_data_point::Value::AsDouble(4096.0)));
    assert_eq!(metrics["verdigris_pool_used_bytes"].unit, "By");
    let Some(metric::Data::Histogram(plan)) = &metrics["verdigris_plan_seconds"].data else { panic!("a histogram") };
    let plan = &plan.data_points[0];
    assert_eq!((plan.count, plan.bucket_counts.len()), (2, plan.explicit_bounds.len() + 1));
    assert_eq!(plan.bucket_counts.last(), Some(&1), "beyond all bounds");
    let bucket = plan.bucket_counts.iter().position(|count| *count == 1).expect("a bucket");
    assert!(plan.explicit_bounds[bucket - 1] < 0.003 && 0.003 <= plan.explicit_bounds[bucket]);
    assert!(metrics.contains_key("verdigris_series_refused_total"));
}

/// The library tells of a device's times when it sees them, in no span; `crates/verdigris/src/observe` has these events.
#[test]
fn what_was_seen_later_is_a_span_under_its_execution() {
    let (address, told) = collector();
    let target = OtlpCollector::new(format!("http://{address}")).headers("X-Key=a%20b").expect("headers").service("a trainer");
    let registry = Arc::new(Registry::new(Bounds::default()));
    let (layer, otlp) = Otlp::start(&target, registry).expect("started");
    let since = verdigris_telemetry::observe::epoch().elapsed();
    let epoch = std::time::SystemTime::now() - since;
    with_default(tracing_subscriber::registry().with(layer), || {
        let batch = tracing::info_span!(target: "verdigris_serve", "batch").entered();
        for execution in [7u64, 8] {
            let _execute = tracing::trace_span!(target: "verdigris", "execute", execution, graph = "g", device = "cuda:0").entered();
        }
        drop(batch);
        // Another request is under way.
        let _other = tracing::info_span!(target: "verdigris_serve", "other").entered();
        tracing::warn!(
            target: "verdigris", parent: None, event = "slow", execution = 7u64, device = "cuda:0", problem = "a product", engine = "gemm.simt", us = 250.0,
            estimate_us = 10.0
        );
        tracing::trace!(
            target: "verdigris::device", parent: None, execution = 7u64, device = "cuda:0", stream = 3u64, name = "a product", engine = "gemm.simt",
            start_us = 2e6, duration_us = 250.0
        );
        tracing::error!(target: "verdigris", parent: None, event = "overdue", execution = 8u64, problem = "a product", engine = "gemm.mma");
        // Of an execution that nobody knows any more, and of none.
        tracing::error!(target: "verdigris", parent: None, event = "overdue", execution = 9u64, engine = "lost");
        tracing::error!(target: "verdigris", parent: None, event = "drift", message = "wrong");
        tracing::debug!(target: "verdigris", parent: None, event = "kernel");
        // On the CPU they stand in the caller's span.
        tracing::trace!(target: "verdigris::device", device = "cpu", stream = 1u64, name = "relu", engine = "cpu.pointwise", start_us = 3e6, duration_us = 5.0);
        tracing::warn!(target: "verdigris", event = "fallback", "an event of its span");
    });
    drop(otlp);
    let pushes: Vec<Push> = told.try_iter().collect();
    assert!(pushes.iter().all(|push| push.head.contains("x-key: a b\r\n")), "{}", pushes[0].head);
    let spans = spans(&pushes);
    let named = |name: &str| spans.iter().filter(|span| span.name == name).collect::<Vec<&Span>>();
    let only = |name: &str| match named(name)[..] {
        [span] => span,
        _ => panic!("one {name} in {spans:?}"),
    };
    let of_execution = |number: i64| {
        let is = |span: &&&Span| texts(&span.attributes)["execution"] == number.to_string();
        *named("execute").iter().find(is).expect("its span")
    };
    let batch = only("batch");
    for (span, execution) in [(only("gemm.simt"), 7), (only("slow"), 7), (named("overdue")[0], 8)] {
        let above = of_execution(execution);
        assert_eq!((&span.parent_span_id, &span.trace_id), (&above.span_id, &batch.trace_id), "{span:?}");
        assert_eq!(above.parent_span_id, batch.span_id);
    }
    let time = only("gemm.simt");
    let expected = (epoch + Duration::from_secs(2)).duration_since(std::time::UNIX_EPOCH).expect("since").as_nanos() as u64;
    assert!(time.start_time_unix_nano.abs_diff(expected) < 50_000_000, "{} and {expected}", time.start_time_unix_nano);
    assert_eq!(time.end_time_unix_nano - time.start_time_unix_nano, 250_000);
    assert_eq!(texts(&time.attributes)["name"], "a product");
    assert!(texts(&only("slow").attributes)["us"].contains("250"));
    let (overdue, lost) = (named("overdue")[0], named("overdue")[1]);
    assert_eq!(overdue.status.as_ref().map(|status| status.code), Some(2), "an error: {overdue:?}");
    assert!(lost.parent_span_id.is_empty() && only("drift").parent_span_id.is_empty());
    assert_eq!(only("drift").status.as_ref().map(|status| status.message.as_str()), Some("wrong"));
    assert!(named("kernel").is_empty() && named("fallback").is_empty());
    let other = only("other");
    assert_eq!(only("cpu.pointwise").parent_span_id, other.span_id);
    assert_eq!(other.events.len(), 1, "the fallback alone: {other:?}");
    let batch = pushes.iter().find(|push| push.path == "/v1/traces").expect("spans");
    let resource = ExportTraceServiceRequest::decode(batch.body.as_slice()).expect("a batch").resource_spans.remove(0).resource;
    assert_eq!(texts(&resource.expect("who speaks").attributes)["service.name"], "a trainer");
}

#[test]
fn a_collector_that_never_answers_holds_nobody_up_for_longer_than_five_seconds() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    let (tell, told) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            if tell.send(stream).is_err() {
                return;
            }
        }
    });
    let target = OtlpCollector::new(format!("http://{address}")).every(Duration::from_millis(10));
    let (layer, otlp) = Otlp::start(&target, Arc::new(Registry::new(Bounds::default()))).expect("started");
    // A push is on its way, and a span waits.
    let waits = told.recv_timeout(Duration::from_secs(20)).expect("a connection");
    with_default(tracing_subscriber::registry().with(layer), || drop(tracing::info_span!(target: "verdigris", "plan").entered()));
    let began = Instant::now();
    drop(otlp);
    let took = began.elapsed();
    // Time for the system's own threads is added.
    assert!(took < Duration::from_millis(7500), "{took:?}");
    drop(waits);
}
