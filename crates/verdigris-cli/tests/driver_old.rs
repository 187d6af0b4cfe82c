//! F2: a driver that is too old. It is a library of our own in the place of the driver's, which says that it supports CUDA 11.8: what an init container, a user
//! and a monitor are told.
#![cfg(unix)]

mod running;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use running::Running;

/// Enough of a driver to be asked for its version.
const DRIVER: &str =
    "int cuDriverGetVersion(int *version) { *version = 11080; return 0; }\nint cuInit(unsigned flags) { return (int)flags; }\n";

/// The folder of the library; `None` where no C compiler is there to make it.
fn driver(folder: &Path) -> Option<()> {
    let source = folder.join("driver.c");
    std::fs::write(&source, DRIVER).expect("writes");
    let made = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(folder.join("libcuda.so.1")).arg(&source).output();
    match made {
        Ok(output) if output.status.success() => Some(()),
        Ok(output) => panic!("cc: {}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => {
            eprintln!("skipped: cc is not there ({error})");
            None
        }
    }
}

#[test]
fn an_old_driver_is_told_by_doctor_by_the_error_and_by_the_event() {
    let folder = tempfile::tempdir().expect("a folder");
    if driver(folder.path()).is_none() {
        return;
    }
    let events = folder.path().join("events.jsonl");
    let graph = folder.path().join("graph.json");
    let layout = serde_json::json!({ "dims": [3], "strides": [1] });
    let tensor = |uid: u32, name: &str| serde_json::json!({ "uid": uid, "name": name, "dtype": "f32", "layout": layout });
    let relu = serde_json::json!({ "name": "relu", "op": { "pointwise": { "unary": { "f": "relu", "x": 1, "y": 2 } } } });
    let text = serde_json::json!({ "name": "relu", "tensors": [tensor(1, "x"), tensor(2, "y")], "nodes": [relu] });
    std::fs::write(&graph, text.to_string()).expect("writes");
    let run = |words: &[&str]| -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_verdigris"));
        command.args(words).env("LD_LIBRARY_PATH", folder.path()).env("VERDIGRIS_CACHE", "off").env("VERDIGRIS_EVENTS", &events);
        command.output().expect("the program starts")
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();

    // The init container.
    let doctor = run(&["doctor", "--json", "--require", "gpu"]);
    assert_eq!(doctor.status.code(), Some(1), "{doctor:?}");
    let report: serde_json::Value = serde_json::from_slice(&doctor.stdout).expect("one JSON object");
    let error = report["driver"]["error"].as_str().expect("an error").to_owned();
    assert!(error.contains("11.8") && error.contains("12.0"), "{error}");
    let findings = report["findings"].as_array().expect("a list");
    let of_gpu = findings.iter().find(|finding| finding["need"] == "gpu" && finding["is_missing"] == true).expect("the GPU is missing");
    assert!(of_gpu["mend"].as_str().is_some_and(|mend| !mend.is_empty()), "{of_gpu}");

    // The user, and whoever watches: the event has the kind that the metric counts by.
    let refused = run(&["run", graph.to_str().expect("text"), "--device", "cuda:0"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert!(text(&refused.stderr).contains("11.8"), "{refused:?}");
    let told: Vec<serde_json::Value> = text(&std::fs::read(&events).expect("written"))
        .lines()
        .map(|line| serde_json::from_str(line).expect("a JSON object a line"))
        .filter(|line: &serde_json::Value| line["fields"]["event"] == "error")
        .collect();
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!((&told[0]["fields"]["kind"], &told[0]["fields"]["device"]), (&"driver_old".into(), &"cuda:0".into()), "{told:?}");
}

/// The service whose device cannot be had stays for a scrape, is never ready, and says in its log why.
#[test]
#[cfg(feature = "serve")]
fn a_service_without_a_driver_is_scraped_before_it_ends_and_says_why_in_its_log() {
    let folder = tempfile::tempdir().expect("a folder");
    if driver(folder.path()).is_none() {
        return;
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_verdigris"));
    command.args(["serve", "--demo", "--device", "cuda:0", "--listen", "127.0.0.1:0", "--linger-seconds", "120"]);
    command.env("LD_LIBRARY_PATH", folder.path()).env("VERDIGRIS_CACHE", "off").stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = Running(command.spawn().expect("the program starts"));
    let mut said = BufReader::new(running.0.stdout.take().expect("a pipe"));
    let mut line = String::new();
    said.read_line(&mut line).expect("a line");
    let address = line.strip_prefix("listening on http://").and_then(|rest| rest.split(';').next()).expect("an address").to_owned();
    let mut log = BufReader::new(running.0.stderr.take().expect("a pipe"));
    let mut lines = String::new();
    while !lines.contains("stays for 120 s") {
        assert!(log.read_line(&mut lines).expect("a line") > 0, "it ended: {lines}");
    }
    let told: Vec<serde_json::Value> = lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let [error] = told.as_slice() else { panic!("one line of JSON: {lines}") };
    assert_eq!(
        (&error["level"], &error["fields"]["kind"], &error["fields"]["device"]),
        (&"ERROR".into(), &"driver_old".into(), &"cuda:0".into()),
        "{error}"
    );
    assert!(error["fields"]["message"].as_str().is_some_and(|message| message.contains("11.8")), "{error}");

    let ask = |path: &str| {
        let mut stream = TcpStream::connect(&address).expect("it listens");
        stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n").as_bytes()).expect("written");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        text
    };
    let page = ask("/metrics");
    assert!(page.lines().any(|line| line == "verdigris_errors_total{device=\"cuda:0\",kind=\"driver_old\"} 1"), "{page}");
    assert!(ask("/readyz").starts_with("HTTP/1.1 503") && ask("/healthz").starts_with("HTTP/1.1 200"));
    let killed = Command::new("kill").args(["-TERM", &running.0.id().to_string()]).status().expect("kill is there");
    assert!(killed.success());
    let mut rest = String::new();
    log.read_to_string(&mut rest).expect("the rest");
    assert!(rest.contains("ended by SIGTERM") && rest.contains("11.8"), "{rest}");
    assert_eq!(running.0.wait().expect("it ends").code(), Some(2));
}
