//! The endpoint under clients that behave badly, over real connections.

mod client;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use client::{WHERE, ask, connect, exporter, get};
use metrics::{Key, Label, Recorder};
use verdigris_telemetry::{Bounds, Error, Exporter, HEADER_TIME, MOST_CONNECTIONS, Registry};

#[test]
fn a_scrape_has_what_was_recorded() {
    let (registry, exporter) = exporter();
    let key = Key::from_parts("verdigris_plans_total", vec![Label::new("device", "cpu")]);
    registry.register_counter(&key, &WHERE).increment(7);
    let (status, text) = get(exporter.address(), "/metrics");
    assert_eq!(status, 200);
    assert!(text.contains("verdigris_plans_total{device=\"cpu\"} 7\n"), "{text}");
    assert_eq!(get(exporter.address(), "/healthz"), (200, "ok\n".to_owned()));
    let request = b"GET /metrics HTTP/1.1\r\nHost: h\r\nAccept: application/openmetrics-text; version=1.0.0\r\nConnection: close\r\n\r\n";
    assert!(ask(exporter.address(), request).1.ends_with("# EOF\n"));
    let (status, text) = ask(exporter.address(), b"HEAD /metrics HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n");
    assert_eq!((status, text.as_str()), (200, ""));
}

#[test]
fn bad_requests_are_answered_and_harm_nobody() {
    let (_registry, exporter) = exporter();
    let address = exporter.address();
    assert_eq!(get(address, "/nowhere").0, 404);
    assert_eq!(ask(address, b"POST /metrics HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc").0, 405);
    assert_eq!(ask(address, b"what is this?\r\n\r\n").0, 400);
    assert_eq!(ask(address, b"GET /metrics HTTP/9.9\r\n\r\n").0, 400);
    assert_eq!(ask(address, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03").0, 400, "TLS");
    let long = format!("GET /metrics HTTP/1.1\r\nHost: h\r\nX: {}\r\n\r\n", "x".repeat(64 * 1024));
    assert_eq!(ask(address, long.as_bytes()).0, 431);
    let many = format!("GET /metrics HTTP/1.1\r\nHost: h\r\n{}\r\n", "A: b\r\n".repeat(1000));
    assert_eq!(ask(address, many.as_bytes()).0, 431);
    // A body that never comes, and one that is longer than said.
    assert_eq!(ask(address, b"GET /metrics HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999999\r\nConnection: close\r\n\r\n").0, 200);
    // Connections that are cut in the middle.
    for cut in 1..40 {
        let mut stream = connect(address);
        stream.write_all(&b"GET /metrics HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"[..cut]).expect("written");
    }
    assert_eq!(get(address, "/healthz").0, 200);
}

#[test]
fn who_says_nothing_is_cut_off() {
    let (_registry, exporter) = exporter();
    let begun = Instant::now();
    let (mut silent, mut slow) = (connect(exporter.address()), connect(exporter.address()));
    slow.write_all(b"GET /metr").expect("written");
    let mut rest = Vec::new();
    for stream in [&mut silent, &mut slow] {
        // Closed with or without words; either way the reading ends.
        let _ = stream.read_to_end(&mut rest);
    }
    let waited = begun.elapsed();
    assert!(waited < HEADER_TIME * 3, "{waited:?}");
}

#[test]
fn connections_are_bounded_and_come_back() {
    let (_registry, exporter) = exporter();
    let address = exporter.address();
    let held: Vec<TcpStream> = (0..MOST_CONNECTIONS).map(|_| connect(address)).collect();
    // All of them are accepted before the next one.
    let mut stream = connect(address);
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 503 ") && answer.ends_with("too many connections\n"), "{answer}");
    drop(held);
    let end = Instant::now() + Duration::from_secs(5);
    while get(address, "/healthz").0 != 200 {
        assert!(Instant::now() < end, "places come back when connections end");
    }
}

#[test]
fn the_port_is_free_after_the_drop() {
    let (_registry, exporter) = exporter();
    let address = exporter.address();
    let listen = address.to_string().parse().expect("an address");
    let second = Exporter::start(Arc::new(Registry::new(Bounds::default())), listen);
    let error = second.expect_err("two cannot have one port");
    assert!(matches!(&error, Error::Listen { address: of, .. } if *of == address), "{error}");
    // Neither silent connections nor one in the middle of a request hold up the end.
    let mut stream = connect(address);
    stream.write_all(b"GET /metr").expect("written");
    let begun = Instant::now();
    drop(exporter);
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    assert!(TcpStream::connect(address).is_err());
    let third = Exporter::start(Arc::new(Registry::new(Bounds::default())), listen);
    assert_eq!(third.expect("the port is free").address(), address);
}
