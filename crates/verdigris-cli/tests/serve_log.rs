//! What a service writes to standard error, where `kubectl logs` finds it: failures as lines of JSON.
#![cfg(all(unix, feature = "serve"))]

mod running;

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::time::Duration;

use running::Running;
use verdigris::{DType, GraphBuilder, Layout, UnaryOp};
use verdigris_serve::{Client, Model, Spec};

/// Serves logarithms with the guard of numbers on, asks for that of -1, and returns what stood on standard error.
fn log_of(words: &[&str]) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let mut g = GraphBuilder::new("logs");
    let x = g.tensor("x", DType::F32, Layout::row_major(&[1, 2]).expect("a layout"));
    let log = g.unary("log", UnaryOp::Log, x).expect("an op");
    g.store(log, "y", DType::F32).expect("stored");
    let model =
        Model::new(Spec::new("logs", &["x"], &["y"], &[1]), [(1, g.finish().expect("a graph"))].into(), [].into()).expect("a model");
    model.save(folder.path()).expect("saved");
    let mut command = Command::new(env!("CARGO_BIN_EXE_verdigris"));
    command.arg("serve").arg(folder.path()).args(["--listen", "127.0.0.1:0"]).args(words).env("VERDIGRIS_CHECK_NUMBERS", "1/1000");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = Running(command.spawn().expect("the program starts"));
    let mut said = BufReader::new(running.0.stdout.take().expect("a pipe"));
    let mut lines = String::new();
    while !lines.ends_with("\nready\n") {
        assert!(said.read_line(&mut lines).expect("a line") > 0, "it ended: {lines}");
    }
    let address = lines.split("listening on http://").nth(1).and_then(|rest| rest.split(';').next()).expect("an address");
    let mut client = Client::connect(address.parse().expect("an address"), Duration::from_secs(10)).expect("it listens");
    let body = r#"{ "inputs": [{ "name": "x", "shape": [1, 2], "datatype": "FP32", "data": [-1, 1] }] }"#;
    client.post("/v2/models/logs/infer", &[], body.as_bytes()).expect("an answer");
    // Results are looked at within a second, and at the end what is left.
    std::thread::sleep(Duration::from_millis(1500));
    let killed = Command::new("kill").args(["-TERM", &running.0.id().to_string()]).status().expect("kill is there");
    assert!(killed.success());
    let mut log = String::new();
    running.0.stderr.take().expect("a pipe").read_to_string(&mut log).expect("its log");
    assert_eq!(running.0.wait().expect("it ends").code(), Some(0), "{log}");
    log
}

#[test]
fn failures_stand_in_the_log_unless_it_is_turned_off() {
    let log = log_of(&[]);
    let told: Vec<serde_json::Value> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let found = told.iter().find(|line| line["fields"]["event"] == "nonfinite").unwrap_or_else(|| panic!("the event in {log}"));
    assert_eq!(
        (&found["level"], &found["fields"]["graph"], &found["fields"]["tensor"]),
        (&"WARN".into(), &"logs".into(), &"y".into()),
        "{found}"
    );
    assert!(told.iter().all(|line| line["level"] == "WARN" || line["level"] == "ERROR"), "{log}");
    for words in [["--log", "off"], ["--log", "error"]] {
        let log = log_of(&words);
        assert!(!log.contains("nonfinite"), "{words:?}: {log}");
    }
    assert!(log_of(&["--log", "information"]).contains("\"listening\""));
}
