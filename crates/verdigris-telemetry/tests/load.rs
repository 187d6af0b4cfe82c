//! The endpoint under many scrapers at a time: how much memory that takes.
#![cfg(target_os = "linux")]

mod client;

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use client::{WHERE, connect, exporter, get, resident_bytes_of};
use metrics::{Key, Label, Recorder};
use verdigris_telemetry::Registry;

fn fill(registry: &Registry, metrics: &[&'static str], sets: usize) {
    for name in metrics {
        for set in 0..sets {
            let labels = vec![Label::new("op", "gemm"), Label::new("engine", format!("gemm.engine{set}")), Label::new("device", "cuda:0")];
            registry.register_histogram(&Key::from_parts(*name, labels), &WHERE).record(1e-4 * set as f64);
        }
    }
}

/// Asks over one connection as often as it is left open, `count` times in all.
fn scrape(address: SocketAddr, count: usize, expected_bytes: usize) -> usize {
    let mut done = 0;
    while done < count {
        let mut stream = connect(address);
        let mut buffer = vec![0; 64 * 1024];
        while done < count {
            if stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n").is_err() {
                break;
            }
            let mut answer: Vec<u8> = Vec::new();
            let body_at = loop {
                if let Some(at) = answer.windows(4).position(|four| four == b"\r\n\r\n") {
                    break at + 4;
                }
                match stream.read(&mut buffer) {
                    Ok(bytes) if bytes > 0 => answer.extend_from_slice(&buffer[..bytes]),
                    _ => break 0,
                }
            };
            if body_at == 0 {
                break;
            }
            let head = String::from_utf8_lossy(&answer[..body_at]).to_ascii_lowercase();
            assert!(head.starts_with("http/1.1 200 ok"), "{head}");
            let length = head.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next()).expect("a length");
            let length: usize = length.parse().expect("a number");
            assert!(length >= expected_bytes, "{length} bytes");
            let mut have = answer.len() - body_at;
            while have < length {
                let bytes = stream.read(&mut buffer).expect("the rest");
                assert!(bytes > 0, "cut off");
                have += bytes;
            }
            done += 1;
        }
    }
    done
}

/// Not a test of its own: the process that is scraped, with series enough for a large installation, until its input ends.
#[test]
#[ignore = "what the others start"]
fn serves_until_its_input_ends() {
    let Some(file) = std::env::var_os("VERDIGRIS_TEST_ADDRESS") else { return };
    let (registry, exporter) = exporter();
    fill(&registry, &["verdigris_device_seconds", "verdigris_drift_ratio"], 512);
    // Whole at once: who waits for the name finds the address.
    let written = std::path::PathBuf::from(&file).with_extension("part");
    std::fs::write(&written, exporter.address().to_string()).expect("written");
    std::fs::rename(&written, &file).expect("renamed");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

/// Growth of an exporter's process over so many scrapes by so many clients at a time: afterwards, and at most meanwhile.
fn growth_bytes(scrapes: usize, clients: usize) -> (u64, u64, Duration) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("address");
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "serves_until_its_input_ends", "--ignored", "--nocapture"])
        .env("VERDIGRIS_TEST_ADDRESS", &file)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("it starts");
    let end = Instant::now() + Duration::from_secs(60);
    let address: SocketAddr = loop {
        assert!(Instant::now() < end, "it listens");
        match std::fs::read_to_string(&file) {
            Ok(text) => break text.parse().expect("an address"),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let resident = || resident_bytes_of(child.id());
    let text_bytes = get(address, "/metrics").1.len();
    assert!(text_bytes > 1 << 20, "{text_bytes}");
    let done = AtomicUsize::new(0);
    let storm = |each: usize| {
        std::thread::scope(|scope| {
            for _ in 0..clients {
                scope.spawn(|| done.fetch_add(scrape(address, each, text_bytes), Ordering::Relaxed));
            }
        });
    };
    // All connections at once, before memory is looked at.
    storm(1);
    let before = resident();
    let begun = Instant::now();
    let most = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let storm = scope.spawn(|| storm(scrapes / clients));
        while !storm.is_finished() {
            most.fetch_max(resident(), Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    assert_eq!(done.into_inner(), scrapes + clients);
    let grown = (resident().saturating_sub(before), most.into_inner().saturating_sub(before), begun.elapsed());
    drop(child.stdin.take());
    assert!(child.wait().expect("it ends").success());
    grown
}

#[test]
fn scrapes_do_not_grow_memory() {
    let (after, most, took) = growth_bytes(1000, 100);
    eprintln!("1,000 scrapes by 100 clients: {after} bytes more afterwards, {most} at most meanwhile, {took:?}");
    assert!(after <= 5 << 20, "{after} bytes");
}

#[test]
#[ignore = "takes half a minute: 10,000 scrapes of more than a megabyte"]
fn ten_thousand_scrapes_by_a_hundred_clients_grow_memory_by_five_megabytes_at_most() {
    let (after, most, took) = growth_bytes(10_000, 100);
    eprintln!("10,000 scrapes by 100 clients: {after} bytes more afterwards, {most} at most meanwhile, {took:?}");
    assert!(after <= 5 << 20, "{after} bytes");
}
