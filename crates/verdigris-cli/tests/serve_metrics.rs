//! `verdigris serve-metrics` as a service manager and a scraper meet it.

mod program;
mod running;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};

use program::{Program, stdout};
use running::Running;

const VERDIGRIS: Program = Program(env!("CARGO_BIN_EXE_verdigris"));

#[test]
#[cfg(unix)]
fn it_serves_until_it_is_told_to_end() {
    for signal in ["TERM", "INT"] {
        let mut command = Command::new(VERDIGRIS.0);
        command.args(["serve-metrics", "--listen", "127.0.0.1:0", "--interval", "0.1"]).stdout(Stdio::piped());
        let mut running = Running(command.spawn().expect("the program starts"));
        let mut said = BufReader::new(running.0.stdout.take().expect("a pipe"));
        let mut line = String::new();
        said.read_line(&mut line).expect("a line");
        let address = line.trim().strip_prefix("metrics on http://").and_then(|rest| rest.strip_suffix("/metrics")).expect("an address");
        let mut stream = TcpStream::connect(address).expect("it listens");
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n").expect("written");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        assert!(text.starts_with("HTTP/1.1 200 OK") && text.contains("verdigris_build_info{source="), "{text}");
        // The standard library can kill, but not ask.
        let killed = Command::new("kill").args([&format!("-{signal}"), &running.0.id().to_string()]).status().expect("kill is there");
        assert!(killed.success());
        let mut rest = String::new();
        said.read_to_string(&mut rest).expect("the rest");
        assert!(rest.ends_with(&format!("ended by SIG{signal}\n")), "{rest}");
        assert_eq!(running.0.wait().expect("it ends").code(), Some(0));
    }
}

#[test]
fn one_reading_is_json() {
    let output = VERDIGRIS.run(&["serve-metrics", "--json"]);
    assert!(output.status.success(), "{output:?}");
    let report: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("one object");
    let names: Vec<&str> = report["metrics"].as_array().expect("metrics").iter().filter_map(|metric| metric["name"].as_str()).collect();
    assert!(names.contains(&"verdigris_build_info"), "{report}");
    // With a driver there are devices, without one there is the reason.
    let is_there = report["nvml"]["state"] == "there";
    assert_eq!(is_there, names.contains(&"verdigris_gpu_up"), "{report}");
    assert!(is_there || report["nvml"]["missing"].as_str().is_some_and(|reason| reason.contains("NVML is not there")), "{report}");
}

/// Enough of NVML for two devices, of which the first does not let its critical events be registered, as one that has fallen off the bus.
const NVML: &str = "
#include <unistd.h>
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(unsigned long)(index + 1); return 0; }
int nvmlEventSetCreate(void **set) { *set = (void *)7; return 0; }
int nvmlEventSetFree(void *set) { return 0; }
int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *set) { return device == (void *)1 ? 15 : 0; }
int nvmlEventSetWait_v2(void *set, void *data, unsigned timeout_ms) { usleep(1000 * timeout_ms); return 10; }
";

#[test]
#[cfg(target_os = "linux")]
fn a_device_whose_events_cannot_be_watched_is_told_by_the_metric_and_in_the_log() {
    let folder = tempfile::tempdir().expect("a folder");
    let source = folder.path().join("nvml.c");
    std::fs::write(&source, NVML).expect("writes");
    match Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(folder.path().join("libnvidia-ml.so.1")).arg(&source).output() {
        Ok(output) => assert!(output.status.success(), "cc: {}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => {
            eprintln!("skipped: cc is not there ({error})");
            return;
        }
    }
    let mut command = Command::new(VERDIGRIS.0);
    command.args(["serve-metrics", "--listen", "127.0.0.1:0", "--interval", "0.1"]).env("LD_LIBRARY_PATH", folder.path());
    let mut running = Running(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts"));
    let mut said = BufReader::new(running.0.stdout.take().expect("a pipe"));
    let mut line = String::new();
    said.read_line(&mut line).expect("a line");
    let address =
        line.trim().strip_prefix("metrics on http://").and_then(|rest| rest.strip_suffix("/metrics")).expect("an address").to_owned();
    // The warning is told once the first device has refused; the second is registered behind it.
    let mut log = BufReader::new(running.0.stderr.take().expect("a pipe"));
    let told = loop {
        let mut line = String::new();
        assert!(log.read_line(&mut line).expect("a line") > 0, "it ended");
        let event: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
        if event["fields"]["field"] == "xid" {
            break event;
        }
    };
    assert_eq!(
        (&told["level"], &told["fields"]["event"], &told["fields"]["device"]),
        (&"WARN".into(), &"nvml".into(), &"cuda:0".into()),
        "{told}"
    );
    let end = std::time::Instant::now() + std::time::Duration::from_secs(30);
    let text = loop {
        let mut stream = TcpStream::connect(&address).expect("it listens");
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n").expect("written");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        if text.contains("verdigris_gpu_xid_watched{device=\"cuda:1\"} 1\n") {
            break text;
        }
        assert!(std::time::Instant::now() < end, "{text}");
    };
    assert!(
        text.contains("verdigris_gpu_xid_watched{device=\"cuda:0\"} 0\n") && text.contains("verdigris_gpu_up{device=\"cuda:0\"} 1\n"),
        "{text}"
    );
}

#[test]
fn what_cannot_be_is_refused() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("bound").to_string();
    let said = VERDIGRIS.refused(&["serve-metrics", "--listen", &address]);
    assert!(said.contains(&format!("cannot listen on {address}")), "{said}");
    assert!(VERDIGRIS.refused(&["serve-metrics", "--listen", "example.org"]).contains("names no address"));
    assert!(VERDIGRIS.refused(&["serve-metrics", "--interval", "0"]).contains("--interval 0"));
    assert!(VERDIGRIS.refused(&["serve-metrics", "--log", "loud"]).contains("`loud` is none of off, error, warning and information"));
}
