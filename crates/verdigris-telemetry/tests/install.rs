//! All of it at once, as an application has it. One program, since a process has one recorder and one subscriber.

use std::io::{Read, Write};
use std::net::TcpStream;

use verdigris_telemetry::{Error, ListenAddress, Settings, Telemetry};

#[test]
fn everything_that_was_asked_for_runs_until_the_guard_goes() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str| folder.path().join(name);
    // What cannot be had is refused before anything is installed: the next try is not spoiled.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address: ListenAddress = taken.local_addr().expect("bound").to_string().parse().expect("an address");
    let refused = Telemetry::builder().prometheus(address).install().map(|_| ()).expect_err("the port is taken");
    assert!(matches!(refused, Error::Listen { .. }), "{refused}");
    let refused = Telemetry::builder().trace_file(file("no/such/folder/trace.json")).install().map(|_| ()).expect_err("no folder");
    assert!(matches!(refused, Error::File { .. }) && refused.to_string().contains("no/such/folder"), "{refused}");

    let settings = Settings {
        metrics: Some("127.0.0.1:0".to_owned()),
        trace: Some(file("trace-%p.json")),
        events: Some(file("events.jsonl")),
        nvtx_injection: Some(file("no-profiler.so")),
        ..Settings::default()
    };
    let telemetry = Telemetry::from_settings(&settings).expect("settings are good");
    assert!(!telemetry.is_nothing() && Telemetry::from_settings(&Settings::default()).expect("nothing").is_nothing());
    let guard = telemetry.install().expect("installed");
    let absent = guard.absent().join("\n");
    assert!(absent.contains("NVTX: ") && absent.contains("no-profiler.so"), "{absent}");

    metrics::counter!("verdigris_plans_total", "device" => "cpu").increment(5);
    {
        let _plan = tracing::info_span!(target: "verdigris", "plan", device = "cpu").entered();
        tracing::debug!(target: "verdigris", event = "choice", engine = "gemm.simt", "chosen");
        tracing::debug!(target: "an_application", "what nobody wants to read");
        tracing::info!(target: "verdigris::device", device = "cuda:0", stream = 1u64, name = "gemm", start_us = 1.0, duration_us = 2.0);
    }
    let mut client = TcpStream::connect(guard.prometheus_address().expect("asked for")).expect("it listens");
    client.write_all(b"GET /metrics HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").expect("written");
    let mut text = String::new();
    client.read_to_string(&mut text).expect("an answer");
    assert!(text.contains("verdigris_plans_total{device=\"cpu\"} 5\n"), "{text}");

    let again = Telemetry::builder().install().map(|_| ()).expect_err("a process has one recorder");
    assert!(matches!(again, Error::RecorderTaken), "{again}");
    let again = Telemetry::builder().json_lines(file("other.jsonl")).install().map(|_| ()).expect_err("and one subscriber");
    assert!(matches!(again, Error::SubscriberTaken), "{again}");

    let address = guard.prometheus_address().expect("asked for");
    drop(guard);
    assert!(TcpStream::connect(address).is_err());
    tracing::info!("nobody is there any more");
    let trace = std::fs::read(file(&format!("trace-{}.json", std::process::id()))).expect("a trace");
    let trace: Vec<serde_json::Value> = serde_json::from_slice(&trace).expect("whole");
    let count = |phase: &str| trace.iter().filter(|event| event["ph"] == phase).count();
    assert_eq!((count("B"), count("E"), count("X")), (1, 1, 1));
    let lines = std::fs::read_to_string(file("events.jsonl")).expect("events");
    let lines: Vec<serde_json::Value> = lines.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect();
    let choice = lines.iter().find(|line| line["fields"]["event"] == "choice").expect("the event");
    assert_eq!((&choice["fields"]["engine"], &choice["span"]["name"]), (&"gemm.simt".into(), &"plan".into()), "{choice}");
    assert!(!lines.iter().any(|line| line["target"] == "an_application" || line["fields"]["message"] == "nobody is there any more"));
}
