//! Load for a service, and what came of it: latencies and rows a second.
//!
//! Clients wait for each answer before they ask again (a closed loop), so what is offered is what the service bears; the number of clients
//! is part of the result.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::client::Client;
use crate::model::Signature;
use crate::protocol::{JSON_LENGTH, datatype};

/// What to offer.
#[derive(Clone, PartialEq, Debug)]
pub struct Load {
    /// Clients, each on a connection and a thread of its own.
    pub clients: usize,
    /// Rows of each request.
    pub rows: u64,
    /// How long answers are counted.
    pub time: Duration,
    /// How long the clients ask before that.
    pub warm_up: Duration,
}

/// What came of it.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Measured {
    /// Clients that asked.
    pub clients: usize,
    /// Answers with a result.
    pub answers: u64,
    /// Answers without, and requests that broke off.
    pub failures: u64,
    /// Rows of results a second.
    pub rows_per_second: f64,
    /// The median time from a request's first byte to its answer's last, as a client sees it, in milliseconds.
    pub p50_ms: f64,
    /// The 99th percentile, in milliseconds.
    pub p99_ms: f64,
    /// The mean number of rows in the batches that the answers came from.
    pub mean_batch_rows: f64,
}

/// A request of so many rows for a model, with bytes in and out: its body, and the length of its JSON.
pub fn binary_request(signature: &Signature, rows: u64, seed: u64) -> (Vec<u8>, usize) {
    let mut inputs = Vec::new();
    let mut bytes = Vec::new();
    let mut state = seed;
    for port in &signature.inputs {
        let size = port.row_bytes() * rows as usize;
        let shape: Vec<u64> = std::iter::once(rows).chain(port.row_dims.iter().copied()).collect();
        inputs.push(serde_json::json!({
            "name": port.name, "shape": shape, "datatype": datatype(port.dtype), "parameters": { "binary_data_size": size }
        }));
        for _ in 0..size / port.dtype.bytes() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let mut element = [0; 8];
            if port.dtype.is_float() {
                // The slice is as long as any element.
                let _ = verdigris::tensor::num::write_element(port.dtype, (state >> 40) as f64 / (1 << 24) as f64, &mut element);
            } else {
                element[0] = (state >> 63) as u8;
            }
            bytes.extend_from_slice(&element[..port.dtype.bytes()]);
        }
    }
    let mut body = serde_json::json!({ "inputs": inputs, "parameters": { "binary_data_output": true } }).to_string().into_bytes();
    let json_bytes = body.len();
    body.extend(bytes);
    (body, json_bytes)
}

/// Offers load to the model of a service, and measures.
pub fn offer(address: SocketAddr, signature: &Signature, load: &Load) -> Measured {
    let path = format!("/v2/models/{}/infer", signature.name);
    let (is_counted, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    let mut measured = Measured { clients: load.clients, ..Measured::default() };
    let mut times: Vec<Duration> = Vec::new();
    let mut batch_rows = 0;
    let mut counted_time = load.time;
    let ask = |seed: usize| {
        let (body, json_bytes) = binary_request(signature, load.rows, seed as u64);
        let json_bytes = json_bytes.to_string();
        let headers = [(JSON_LENGTH, json_bytes.as_str()), ("x-deadline-ms", "30000")];
        let (mut times, mut failures, mut batch_rows) = (Vec::new(), 0, 0u64);
        let connect = || Client::connect(address, Duration::from_secs(30));
        let mut client = connect().ok();
        while !is_over.load(Ordering::Relaxed) {
            let start = Instant::now();
            let reply = client.as_mut().and_then(|client| client.post(&path, &headers, &body).ok());
            let is_within = is_counted.load(Ordering::Relaxed) && !is_over.load(Ordering::Relaxed);
            match reply {
                Some(reply) if reply.status == 200 => {
                    if is_within {
                        times.push(start.elapsed());
                        batch_rows += batch_rows_of(&reply.body);
                    }
                }
                Some(_) => failures += u64::from(is_within),
                None => {
                    failures += u64::from(is_within);
                    std::thread::sleep(Duration::from_millis(10));
                    client = connect().ok();
                }
            }
        }
        (times, failures, batch_rows)
    };
    std::thread::scope(|scope| {
        let ask = &ask;
        let clients: Vec<_> = (0..load.clients).map(|seed| scope.spawn(move || ask(seed))).collect();
        std::thread::sleep(load.warm_up);
        let start = Instant::now();
        is_counted.store(true, Ordering::Relaxed);
        std::thread::sleep(load.time);
        is_over.store(true, Ordering::Relaxed);
        counted_time = start.elapsed();
        for client in clients {
            match client.join() {
                Ok((of_client, failures, rows)) => {
                    times.extend(of_client);
                    measured.failures += failures;
                    batch_rows += rows;
                }
                Err(_) => measured.failures += 1,
            }
        }
    });
    times.sort_unstable();
    measured.answers = times.len() as u64;
    measured.rows_per_second = (measured.answers * load.rows) as f64 / counted_time.as_secs_f64();
    measured.p50_ms = percentile_ms(&times, 0.50);
    measured.p99_ms = percentile_ms(&times, 0.99);
    measured.mean_batch_rows = if times.is_empty() { 0.0 } else { batch_rows as f64 / times.len() as f64 };
    measured
}

/// The nearest rank.
fn percentile_ms(sorted: &[Duration], part: f64) -> f64 {
    let rank = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).map_or(0.0, |time| 1e3 * time.as_secs_f64())
}

/// What an answer says of its batch, found without reading all of it.
fn batch_rows_of(body: &[u8]) -> u64 {
    const KEY: &[u8] = br#""batch_rows":"#;
    let head = &body[..body.len().min(512)];
    let Some(place) = head.windows(KEY.len()).position(|window| window == KEY) else { return 0 };
    head[place + KEY.len()..].iter().take_while(|byte| byte.is_ascii_digit()).fold(0, |number, byte| 10 * number + u64::from(byte - b'0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_ranks() {
        let times: Vec<Duration> = (1..=200).map(Duration::from_millis).collect();
        assert_eq!((percentile_ms(&times, 0.5), percentile_ms(&times, 0.99)), (100.0, 198.0));
        assert_eq!((percentile_ms(&times[..1], 0.99), percentile_ms(&[], 0.5)), (1.0, 0.0));
    }

    #[test]
    fn batch_rows_are_found_in_an_answer() {
        assert_eq!(batch_rows_of(br#"{"parameters":{"batch_id":3,"batch_rows":17,"planned_rows":32}}"#), 17);
        assert_eq!(batch_rows_of(b"{}"), 0);
    }
}
