//! What the programs send to a collector of OpenTelemetry: nothing unless the environment names one, and an error where they cannot.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output};

const VERDIGRIS: &str = env!("CARGO_BIN_EXE_verdigris");

/// A graph of a `relu`, run once on the CPU.
fn run(folder: &Path, variables: &[(&str, &str)]) -> Output {
    let path = |name: &str| folder.join(name).to_string_lossy().into_owned();
    let layout = serde_json::json!({ "dims": [3], "strides": [1] });
    let tensor = |uid: u32, name: &str| serde_json::json!({ "uid": uid, "name": name, "dtype": "f32", "layout": layout });
    let relu = serde_json::json!({ "name": "relu", "op": { "pointwise": { "unary": { "f": "relu", "x": 1, "y": 2 } } } });
    let text = serde_json::json!({ "name": "relu", "tensors": [tensor(1, "x"), tensor(2, "y")], "nodes": [relu] });
    std::fs::write(path("graph.json"), text.to_string()).expect("writes");
    let mut npy = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
    npy.extend_from_slice(format!("{:<117}\n", "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }").as_bytes());
    npy.extend([0u8; 12]);
    std::fs::write(path("x.npy"), npy).expect("writes");
    let (x, y) = (format!("x={}", path("x.npy")), format!("y={}", path("y.npy")));
    let mut command = Command::new(VERDIGRIS);
    command.args(["run", &path("graph.json"), "--in", &x, "--out", &y]).env_remove("OTEL_EXPORTER_OTLP_ENDPOINT");
    command.envs(variables.iter().copied()).output().expect("the program starts")
}

/// 4318 is where OpenTelemetry's kits send to unless they are told otherwise. Ours do not.
#[test]
fn nothing_is_sent_unless_a_collector_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let Ok(listener) = TcpListener::bind("127.0.0.1:4318") else {
        eprintln!("skipped: a collector listens here");
        return;
    };
    listener.set_nonblocking(true).expect("set");
    let trace = folder.path().join("trace.json");
    for variables in
        [&[][..], &[("OTEL_EXPORTER_OTLP_ENDPOINT", "")], &[("OTEL_SERVICE_NAME", "trainer"), ("OTEL_EXPORTER_OTLP_HEADERS", "a=b")]]
    {
        let traced = [variables, &[("VERDIGRIS_TRACE", trace.to_str().expect("text"))]].concat();
        let output = run(folder.path(), &traced);
        assert!(output.status.success(), "{output:?}");
        assert!(listener.accept().is_err(), "{variables:?}");
    }
}

#[test]
fn headers_that_are_none_are_told_without_what_stands_in_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let variables = [("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1"), ("OTEL_EXPORTER_OTLP_HEADERS", "a=b,hunter2")];
    let output = run(folder.path(), &variables);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("entry 2 of the headers") && !said.contains("hunter2"), "{said}");
}

#[test]
fn metrics_and_spans_reach_the_collector_that_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let endpoint = format!("http://{}", listener.local_addr().expect("bound"));
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let tell = tell.clone();
            std::thread::spawn(move || {
                let Ok(mut stream) = stream else { return };
                let (mut bytes, mut buffer) = (Vec::new(), [0; 1 << 16]);
                while let Some(read) = stream.read(&mut buffer).ok().filter(|read| *read > 0) {
                    bytes.extend_from_slice(&buffer[..read]);
                    let text = String::from_utf8_lossy(&bytes).into_owned();
                    let length = text
                        .to_ascii_lowercase()
                        .split("content-length: ")
                        .nth(1)
                        .and_then(|rest| rest.split("\r\n").next()?.parse::<usize>().ok());
                    let head = bytes.windows(4).position(|four| four == b"\r\n\r\n").map(|at| at + 4);
                    if head.zip(length).is_some_and(|(head, length)| bytes.len() >= head + length) {
                        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
                        if tell.send(text).is_err() {
                            return;
                        }
                        bytes.clear();
                    }
                }
            });
        }
    });
    let variables =
        [("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()), ("OTEL_EXPORTER_OTLP_HEADERS", "x-key=k"), ("OTEL_SERVICE_NAME", "trainer")];
    let output = run(folder.path(), &variables);
    assert!(output.status.success(), "{output:?}");
    let pushes: Vec<String> = told.try_iter().collect();
    let of = |path: &str| {
        pushes.iter().find(|push| push.starts_with(&format!("POST {path} "))).unwrap_or_else(|| panic!("{path} in {pushes:?}"))
    };
    let (metrics, spans) = (of("/v1/metrics"), of("/v1/traces"));
    assert!(metrics.contains("verdigris_executions_total") && metrics.contains("trainer") && metrics.contains("x-key: k"), "{metrics}");
    assert!(spans.contains("cpu.pointwise") && spans.contains("trainer") && spans.contains("x-key: k"), "{spans}");
}
