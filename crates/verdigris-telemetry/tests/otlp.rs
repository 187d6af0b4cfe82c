//! A collector made here receives and decodes what is pushed.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use opentelemetry_proto::tonic::metrics::v1::{Metric, metric, number_data_point};
use prost::Message;
use verdigris_telemetry::Telemetry;

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

/// Takes everything; the first push of metrics is told that the collector is busy.
fn collector() -> (SocketAddr, Receiver<(String, Vec<u8>)>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    let (tell, told) = channel();
    std::thread::spawn(move || {
        let busy = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
        for stream in listener.incoming() {
            let (tell, busy) = (tell.clone(), std::sync::Arc::clone(&busy));
            std::thread::spawn(move || {
                let Ok(mut stream) = stream else { return };
                while let Some((path, head, body)) = request(&mut stream) {
                    assert!(head.contains("content-type: application/x-protobuf"), "{head}");
                    let is_busy = path == "/v1/metrics" && busy.swap(false, std::sync::atomic::Ordering::Relaxed);
                    let status = if is_busy { "503 Service Unavailable" } else { "200 OK" };
                    let _ = write!(stream, "HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n");
                    if !is_busy && tell.send((path, body)).is_err() {
                        return;
                    }
                }
            });
        }
    });
    (address, told)
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
    let guard = Telemetry::builder().otlp(format!("http://{address}/"), Duration::from_millis(50)).install().expect("installed");
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
    let mut pushes: Vec<(String, Vec<u8>)> = Vec::new();
    while !pushes.iter().any(|(path, _)| path == "/v1/metrics") {
        pushes.push(told.recv_timeout(end - Instant::now()).expect("a push in time"));
    }
    // Spans come at the latest when the guard goes.
    drop(guard);
    pushes.extend(told.try_iter());
    let spans: Vec<_> = pushes
        .iter()
        .filter(|(path, _)| path == "/v1/traces")
        .map(|(_, body)| ExportTraceServiceRequest::decode(body.as_slice()).expect("a batch of spans"))
        .flat_map(|batch| batch.resource_spans)
        .flat_map(|spans| spans.scope_spans)
        .flat_map(|spans| spans.spans)
        .collect();
    let named = |name: &str| spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("{name} in {spans:?}"));
    assert_eq!(named("plan").parent_span_id, named("request").span_id, "the application's span is around ours");
    assert_eq!(named("plan").trace_id, named("request").trace_id);
    assert_eq!(texts(&named("request").attributes)["model"], "digits");

    let last = pushes.iter().rev().find(|(path, _)| path == "/v1/metrics").expect("metrics");
    let last = ExportMetricsServiceRequest::decode(last.1.as_slice()).expect("a batch of metrics");
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
