//! What a command tells of its work where the environment asks for it: a trace in which the CPU's ops are spans, and a page of metrics that stays.

mod program;
mod running;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};

use program::{Program, stdout};
use running::Running;

const VERDIGRIS: Program = Program(env!("CARGO_BIN_EXE_verdigris"));

/// A graph of a softmax and a `relu` behind it, as a file, with a tensor to read and one to write.
fn graph(folder: &Path) -> [String; 3] {
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        std::fs::write(&path, bytes).expect("writes");
        path.to_string_lossy().into_owned()
    };
    let layout = serde_json::json!({ "dims": [3], "strides": [1] });
    let tensor = |uid: u32, name: &str| serde_json::json!({ "uid": uid, "name": name, "dtype": "f32", "layout": layout });
    let mut between = tensor(2, "y");
    between["virtual"] = true.into();
    let graph = serde_json::json!({
        "name": "sum",
        "tensors": [tensor(1, "x"), between, tensor(3, "z")],
        "nodes": [
            { "name": "softmax", "op": { "softmax": { "x": 1, "y": 2, "axis": 0, "log": false } } },
            { "name": "relu", "op": { "pointwise": { "unary": { "f": "relu", "x": 2, "y": 3 } } } },
        ],
    });
    let head = "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }";
    let mut npy = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
    npy.extend_from_slice(format!("{head:<117}\n").as_bytes());
    npy.extend([1.0f32, -1.0, 0.5].iter().flat_map(|value| value.to_le_bytes()));
    [
        write("graph.json", graph.to_string().as_bytes()),
        format!("x={}", write("x.npy", &npy)),
        format!("z={}", folder.join("z.npy").display()),
    ]
}

#[test]
fn the_ops_of_a_run_on_the_cpu_are_spans_of_the_trace() {
    let folder = tempfile::tempdir().expect("a folder");
    let [graph, x, z] = graph(folder.path());
    let trace = folder.path().join("trace.json");
    let output =
        Command::new(VERDIGRIS.0).args(["run", &graph, "--in", &x, "--out", &z]).env("VERDIGRIS_TRACE", &trace).output().expect("runs");
    assert!(output.status.success() && stdout(&output).is_empty(), "{output:?}");
    let events: Vec<serde_json::Value> = serde_json::from_slice(&std::fs::read(&trace).expect("written")).expect("a whole array");
    let spans: Vec<&serde_json::Value> = events.iter().filter(|event| event["ph"] == "X").collect();
    let engines: Vec<&str> = spans.iter().filter_map(|span| span["args"]["engine"].as_str()).collect();
    assert_eq!(engines, ["cpu.softmax", "cpu.pointwise"], "{events:?}");
    let plan = events.iter().find(|event| event["ph"] == "B" && event["name"] == "plan");
    assert!(plan.is_some_and(|plan| plan["args"]["device"] == "cpu"), "{events:?}");
    assert!(spans[0]["name"] == "softmax" && spans[0]["dur"].as_f64() > Some(0.0), "{spans:?}");
    let end = spans[0]["ts"].as_f64().zip(spans[0]["dur"].as_f64()).map(|(ts, dur)| ts + dur);
    assert!(end.zip(spans[1]["ts"].as_f64()).is_some_and(|(end, next)| end <= next + 0.001), "one after the other: {spans:?}");
    let track = |event: &&serde_json::Value| event["name"] == "thread_name" && event["pid"] == spans[0]["pid"];
    assert_eq!(events.iter().find(track).expect("a track")["args"]["name"], "cpu thread 1");
}

#[test]
#[cfg(unix)]
fn the_page_of_metrics_stays_until_it_is_told_to_go() {
    let folder = tempfile::tempdir().expect("a folder");
    let [graph, x, z] = graph(folder.path());
    let mut command = Command::new(VERDIGRIS.0);
    command.args(["run", &graph, "--in", &x, "--out", &z, "--hold"]).env("VERDIGRIS_METRICS", "127.0.0.1:0").stderr(Stdio::piped());
    let mut running = Running(command.spawn().expect("the program starts"));
    let mut said = BufReader::new(running.0.stderr.take().expect("a pipe"));
    let mut lines = String::new();
    while !lines.contains("until ctrl-c") {
        assert!(said.read_line(&mut lines).expect("a line") > 0, "it ended: {lines}");
    }
    assert!(Path::new(z.trim_start_matches("z=")).exists(), "the work is done");
    let address = lines.rsplit("http://").next().and_then(|rest| rest.split("/metrics").next()).expect("an address");
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n").expect("written");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    let counted = |engine: &str| {
        text.lines().any(|line| line.starts_with("verdigris_executions_total{") && line.contains(engine) && line.ends_with(" 1"))
    };
    assert!(counted("engine=\"cpu.softmax\"") && counted("engine=\"cpu.pointwise\""), "{text}");
    let killed = Command::new("kill").args(["-INT", &running.0.id().to_string()]).status().expect("kill is there");
    assert!(killed.success());
    let mut rest = String::new();
    said.read_to_string(&mut rest).expect("the rest");
    assert!(rest.ends_with("ended by SIGINT\n"), "{rest}");
    assert_eq!(running.0.wait().expect("it ends").code(), Some(0));
}

#[test]
fn a_page_that_there_is_not_cannot_stay() {
    for words in [&["run", "absent.json", "--hold"][..], &["--hold", "matrix"]] {
        let said = VERDIGRIS.refused(words);
        assert!(said.contains("--hold keeps the page of metrics") && said.contains("VERDIGRIS_METRICS=9464"), "{said}");
    }
}
