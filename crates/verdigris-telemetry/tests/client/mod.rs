//! What the tests of the endpoint share: a client that says exactly what it is told to, and the memory of this process.
#![allow(dead_code, reason = "each program of tests uses a part of it")]
#![allow(unreachable_pub, reason = "a module of programs")]

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use metrics::{Level, Metadata};
use verdigris_telemetry::{Bounds, Exporter, Registry};

pub const WHERE: Metadata<'static> = Metadata::new("tests", Level::INFO, None);

pub fn exporter() -> (Arc<Registry>, Exporter) {
    let registry = Arc::new(Registry::new(Bounds::default()));
    let exporter = Exporter::start(Arc::clone(&registry), "127.0.0.1:0".parse().expect("an address")).expect("a free port");
    (registry, exporter)
}

pub fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("the endpoint listens");
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout");
    stream
}

/// Status and body of the answer to these bytes; an empty text where the connection was closed without one.
pub fn ask(address: SocketAddr, request: &[u8]) -> (u16, String) {
    let mut stream = connect(address);
    // A server that has said no may have closed already.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        Err(error) => panic!("{error}"),
    }
    let answer = String::from_utf8(answer).expect("text");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    (head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0), body.to_owned())
}

pub fn get(address: SocketAddr, path: &str) -> (u16, String) {
    ask(address, format!("GET {path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n").as_bytes())
}

/// Memory of this process, as the system counts it.
#[cfg(target_os = "linux")]
pub fn resident_bytes() -> u64 {
    resident_bytes_of(std::process::id())
}

/// Memory of a process, as the system counts it.
#[cfg(target_os = "linux")]
pub fn resident_bytes_of(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("the system tells");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("a line");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number") * 1024
}
