//! How a service ends: in good order whenever it is told to, and whoever reads what it says.
#![cfg(all(unix, feature = "serve"))]

mod running;

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use running::Running;
use verdigris::{DType, GraphBuilder, Layout, UnaryOp};
use verdigris_serve::{Client, Model, Spec};

/// Logarithms, whose requests of one row wait for a second one.
fn saved(folder: &Path) {
    let graph = |batch: u64| {
        let mut g = GraphBuilder::new("logs");
        let x = g.tensor("x", DType::F32, Layout::row_major(&[batch, 2]).expect("a layout"));
        let log = g.unary("log", UnaryOp::Log, x).expect("an op");
        g.store(log, "y", DType::F32).expect("stored");
        (batch, g.finish().expect("a graph"))
    };
    let spec = Spec { max_wait_us: 10_000_000, deadline_ms: 60_000, ..Spec::new("logs", &["x"], &["y"], &[1, 2]) };
    Model::new(spec, [graph(1), graph(2)].into(), [].into()).expect("a model").save(folder).expect("saved");
}

fn started(folder: &Path) -> (Running, BufReader<std::process::ChildStdout>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_verdigris"));
    command.arg("serve").arg(folder).args(["--listen", "127.0.0.1:0"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = Running(command.spawn().expect("the program starts"));
    let said = BufReader::new(running.0.stdout.take().expect("a pipe"));
    (running, said)
}

fn terminate(running: &Running) {
    assert!(Command::new("kill").args(["-TERM", &running.0.id().to_string()]).status().expect("kill is there").success());
}

#[test]
fn a_service_that_is_ended_before_it_is_ready_ends_in_good_order() {
    let folder = tempfile::tempdir().expect("a folder");
    saved(folder.path());
    for wait in [0, 1, 5, 20] {
        let (mut running, mut said) = started(folder.path());
        let mut line = String::new();
        said.read_line(&mut line).expect("a line");
        assert!(line.starts_with("listening on"), "{line}");
        std::thread::sleep(Duration::from_millis(wait));
        terminate(&running);
        said.read_to_string(&mut line).expect("the rest");
        assert_eq!(running.0.wait().expect("it ends").code(), Some(0), "after {wait} ms: {line}");
        assert!(line.ends_with("ended by SIGTERM\n"), "{line}");
    }
}

#[test]
fn a_service_whose_words_nobody_reads_answers_what_it_accepted() {
    let folder = tempfile::tempdir().expect("a folder");
    saved(folder.path());
    let (mut running, mut said) = started(folder.path());
    let mut lines = String::new();
    while !lines.ends_with("\nready\n") {
        assert!(said.read_line(&mut lines).expect("a line") > 0, "it ended: {lines}");
    }
    let address = lines.split("listening on http://").nth(1).and_then(|rest| rest.split(';').next()).expect("an address");
    let mut client = Client::connect(address.parse().expect("an address"), Duration::from_secs(20)).expect("it listens");
    drop(said);
    let body = r#"{ "inputs": [{ "name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 1] }] }"#;
    let head = format!("POST /v2/models/logs/infer HTTP/1.1\r\nhost: test\r\ncontent-length: {}\r\n\r\n", body.len());
    client.send((head + body).as_bytes()).expect("sent");
    // Long enough to be in the queue, and far less than it waits there.
    std::thread::sleep(Duration::from_millis(500));
    terminate(&running);
    let reply = client.reply().expect("an answer");
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert!(reply.text().contains("\"data\":[0.0,0.0]"), "{}", reply.text());
    assert_eq!(running.0.wait().expect("it ends").code(), Some(0));
}
