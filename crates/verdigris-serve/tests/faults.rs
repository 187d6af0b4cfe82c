//! A thousand requests with faults, and each bound on its own: nothing is lost, nothing is answered twice, every refusal is typed and counted.

mod kit;

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use kit::{Random, affine, affine_signature, connect, json, json_request, kind, numbers, observed, served, start, until};
use verdigris_serve::{Client, ExecuteError, Limits, Reply, Service, Settings, Signature};

const THREADS: u64 = 20;
const REQUESTS_EACH: u64 = 50;

fn quick_limits() -> Limits {
    Limits {
        header_timeout: Duration::from_millis(300),
        body_timeout: Duration::from_millis(250),
        write_timeout: Duration::from_millis(400),
        grace: Duration::from_secs(5),
        ..Limits::default()
    }
}

/// What a thread's clients saw.
#[derive(Default)]
struct Seen {
    /// Answers by the outcome that they tell.
    outcomes: BTreeMap<&'static str, u64>,
    /// Requests whose head was sent whole and whose answer was not waited for.
    unseen: u64,
    /// Requests whose head was never whole.
    headless: u64,
}

impl Seen {
    fn saw(&mut self, outcome: &'static str) {
        *self.outcomes.entry(outcome).or_default() += 1;
    }
}

/// Checks an answer to an honest request: its own numbers, or a typed refusal that the faults explain.
fn judge(reply: &Reply, values: &[f32], seen: &mut Seen) {
    if reply.status == 200 {
        let wanted: Vec<f64> = values.iter().map(|&x| f64::from(affine(x))).collect();
        assert_eq!(numbers(reply), wanted, "somebody else's answer");
        return seen.saw("ok");
    }
    match (reply.status, kind(reply).as_str()) {
        (500, "failed") | (503, "out_of_memory") => seen.saw("failed"),
        (504, "deadline") => seen.saw("deadline"),
        (429, "queue_full") => seen.saw("queue_full"),
        other => panic!("{other:?}: {}", reply.text()),
    }
}

fn refused(reply: &Reply, status: u16, wanted: &str, outcome: &'static str, seen: &mut Seen) {
    assert_eq!((reply.status, kind(reply).as_str()), (status, wanted), "{}", reply.text());
    seen.saw(outcome);
}

fn one_request(random: &mut Random, client: &mut Client, service: &Service, number: u64, seen: &mut Seen) {
    const PATH: &str = "/v2/models/faulty/infer";
    let address = service.address();
    let rows = 1 + random.below(3);
    // No two requests have the same numbers, and f32 holds them all.
    let values: Vec<f32> = (0..rows).map(|row| (number * 8 + row) as f32).collect();
    let body = json_request(&values);
    let head = |length: usize| format!("POST {PATH} HTTP/1.1\r\nhost: test\r\ncontent-length: {length}\r\n\r\n");
    let raw = || TcpStream::connect(address).unwrap();
    match random.below(16) {
        0 => refused(&client.post(PATH, &[], &body.as_bytes()[..body.len() / 2]).unwrap(), 400, "bad_request", "bad_request", seen),
        1 => {
            let wrong = body.replace(&format!("[{rows},1]"), &format!("[{rows},2]"));
            refused(&client.post(PATH, &[], wrong.as_bytes()).unwrap(), 400, "bad_request", "bad_request", seen);
        }
        2 => {
            let wrong = body.replace("FP32", "INT32");
            refused(&client.post(PATH, &[], wrong.as_bytes()).unwrap(), 400, "bad_request", "bad_request", seen);
        }
        3 => {
            // A length that nobody can hold, and nothing behind it.
            let mut other = connect(address);
            other.send(head(usize::MAX / 4).as_bytes()).unwrap();
            refused(&other.reply().unwrap(), 413, "too_large", "too_large", seen);
        }
        4 => {
            let many = json_request(&[1.0; 9]);
            refused(&client.post(PATH, &[], many.as_bytes()).unwrap(), 413, "too_large", "too_large", seen);
        }
        5 => refused(&client.post(PATH, &[("x-deadline-ms", "0")], body.as_bytes()).unwrap(), 504, "deadline", "deadline", seen),
        6 => judge(&client.post(PATH, &[("x-deadline-ms", "3")], body.as_bytes()).unwrap(), &values, seen),
        7 => {
            let mut other = raw();
            other.write_all(&head(body.len()).as_bytes()[..30]).unwrap();
            seen.headless += 1;
        }
        8 => {
            let mut other = raw();
            other.write_all(head(body.len()).as_bytes()).unwrap();
            other.write_all(&body.as_bytes()[..10]).unwrap();
            seen.unseen += 1;
        }
        9 => {
            // Cut after the request, before or within the answer.
            let mut other = raw();
            other.write_all((head(body.len()) + &body).as_bytes()).unwrap();
            other.shutdown(if random.below(2) == 0 { Shutdown::Both } else { Shutdown::Write }).unwrap();
            seen.unseen += 1;
        }
        10 if random.below(4) == 0 => {
            // A client that sends half of its body, and then nothing.
            let mut other = connect(address);
            other.send((head(body.len()) + &body[..body.len() / 2]).as_bytes()).unwrap();
            refused(&other.reply().unwrap(), 408, "slow_client", "bad_request", seen);
        }
        11 if random.below(4) == 0 => {
            // A client that never ends its head is cut.
            let mut other = raw();
            other.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            other.write_all(b"POST /v2/models/faulty/infer HTTP/1.1\r\nhost").unwrap();
            let mut rest = Vec::new();
            let _ = other.read_to_end(&mut rest);
            assert!(!rest.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&rest));
            seen.headless += 1;
        }
        12 => {
            // In chunks, without a length.
            let text =
                format!("POST {PATH} HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
            client.send(text.as_bytes()).unwrap();
            judge(&client.reply().unwrap(), &values, seen);
        }
        _ => judge(&client.post(PATH, &[], body.as_bytes()).unwrap(), &values, seen),
    }
}

#[test]
fn a_thousand_requests_with_faults_lose_nothing_and_double_nothing() {
    let observed = observed();
    let seed = 19;
    eprintln!("seed {seed}");
    let batches = AtomicU64::new(0);
    let model = served(Signature { queue_rows: 64, ..affine_signature("faulty", &[1, 2, 4, 8]) }, move |_| {
        match batches.fetch_add(1, Ordering::Relaxed) % 13 {
            3 => Err(ExecuteError { message: "no memory for 4096 bytes".to_owned(), is_lack_of_memory: true }),
            7 => panic!("a planted panic"),
            11 => {
                std::thread::sleep(Duration::from_millis(8));
                Ok(())
            }
            _ => Ok(()),
        }
    });
    // Longer than this machine keeps a client of the test from its next request.
    let service = start(Limits { header_timeout: Duration::from_secs(2), ..quick_limits() }, vec![model]);
    let all = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (service, all) = (&service, &all);
            scope.spawn(move || {
                let mut random = Random(seed * 1000 + thread);
                let mut seen = Seen::default();
                let mut client = connect(service.address());
                for request in 0..REQUESTS_EACH {
                    let start = Instant::now();
                    one_request(&mut random, &mut client, service, thread * REQUESTS_EACH + request, &mut seen);
                    // An idle connection is cut after the time for heads: one that a slow request has kept waiting is made anew.
                    if start.elapsed() > Duration::from_millis(200) || request % 8 == 7 {
                        client = connect(service.address());
                    }
                }
                all.lock().unwrap().push(seen);
            });
        }
    });
    let all = all.into_inner().unwrap();
    let headless: u64 = all.iter().map(|seen| seen.headless).sum();
    let unseen: u64 = all.iter().map(|seen| seen.unseen).sum();
    let told: u64 = all.iter().flat_map(|seen| seen.outcomes.values()).sum();
    assert_eq!(headless + unseen + told, THREADS * REQUESTS_EACH);
    // A client that has gone before the service began with its request is not counted; every other request is, once.
    until("the queue is empty", || observed.gauge("queue_rows{model=faulty}") == 0.0);
    let total = || observed.outcomes("faulty").values().sum::<u64>();
    until("each request that was answered is counted", || total() >= told);
    std::thread::sleep(Duration::from_millis(300));
    let counted = observed.outcomes("faulty");
    let mut spare = 0;
    for outcome in ["ok", "bad_request", "too_large", "queue_full", "deadline", "cancelled", "shutting_down", "failed"] {
        let told: u64 = all.iter().map(|seen| seen.outcomes.get(outcome).copied().unwrap_or(0)).sum();
        let counted = counted.get(outcome).copied().unwrap_or(0);
        eprintln!("{outcome}: {told} told, {counted} counted");
        assert!(counted >= told, "{outcome}: {told} told, {counted} counted");
        spare += counted - told;
    }
    assert!(spare <= unseen, "{spare} more are counted than were told, and {unseen} went away");
    // Each kind of fault was there.
    for outcome in ["ok", "bad_request", "too_large", "deadline", "cancelled", "failed"] {
        assert!(counted[outcome] > 0, "{outcome}: {counted:?}");
    }
    // What was answered in time has its time, and nothing waits any more.
    assert_eq!(observed.count("request_seconds{model=faulty}"), counted["ok"]);
    // And the service answers.
    let mut client = connect(service.address());
    let answered =
        (0..26).filter(|_| client.post("/v2/models/faulty/infer", &[], json_request(&[5.0]).as_bytes()).unwrap().status == 200).count();
    assert!(answered >= 20, "{answered}");
    // The connections of the scope are gone, so that the end is quick and clean.
    assert!(service.shutdown().is_clean());
}

/// A model whose batches wait for a gate, and the rows that were computed.
fn gated(name: &str, change: impl FnOnce(&mut Signature)) -> (Service, mpsc::Sender<()>, Arc<AtomicU64>) {
    let mut signature = affine_signature(name, &[1, 2, 4]);
    change(&mut signature);
    let (open, gate) = mpsc::channel::<()>();
    let computed = Arc::new(AtomicU64::new(0));
    let rows = computed.clone();
    let model = served(signature, move |planned| {
        // Open for ever once the sender is gone.
        let _ = gate.recv();
        rows.fetch_add(planned, Ordering::Relaxed);
        Ok(())
    });
    (start(quick_limits(), vec![model]), open, computed)
}

#[test]
fn a_full_queue_a_passed_deadline_and_a_client_that_goes_cost_nothing() {
    let observed = observed();
    let (service, open, computed) = gated("gated", |signature| signature.queue_rows = 4);
    let path = "/v2/models/gated/infer";
    let address = service.address();
    let ask = move |values: Vec<f32>, deadline: &'static str| {
        std::thread::spawn(move || connect(address).post(path, &[("x-deadline-ms", deadline)], json_request(&values).as_bytes()).unwrap())
    };
    let waiting = || observed.gauge("queue_rows{model=gated}");
    // One request is within the executor, four rows wait behind it.
    let first = ask(vec![1.0], "10000");
    until("the first request is taken", || observed.count("batch_rows{model=gated}") == 1);
    let second = ask(vec![2.0, 3.0], "10000");
    until("two rows wait", || waiting() == 2.0);
    let late = ask(vec![4.0], "100");
    until("three rows wait", || waiting() == 3.0);
    let mut leaving = TcpStream::connect(address).unwrap();
    let body = json_request(&[5.0]);
    leaving.write_all(format!("POST {path} HTTP/1.1\r\nhost: test\r\ncontent-length: {}\r\n\r\n{body}", body.len()).as_bytes()).unwrap();
    until("four rows wait", || waiting() == 4.0);

    let full = ask(vec![6.0], "10000").join().unwrap();
    assert_eq!((full.status, kind(&full).as_str(), full.header("retry-after")), (429, "queue_full", Some("1")));
    assert!(full.text().contains("4 rows wait, the request has 1, and the bound is 4"), "{}", full.text());
    // The deadline is told while the device is still busy.
    let late = late.join().unwrap();
    assert_eq!((late.status, kind(&late).as_str()), (504, "deadline"));
    drop(leaving);
    until("the client that went is counted", || observed.outcomes("gated").get("cancelled") == Some(&1));
    // Their rows are free again.
    let third = ask(vec![7.0, 8.0], "10000");
    until("the queue was cleaned", || waiting() == 4.0 && observed.outcomes("gated").values().sum::<u64>() == 3);
    drop(open);
    assert_eq!(numbers(&first.join().unwrap()), [3.0]);
    assert_eq!(numbers(&second.join().unwrap()), [5.0, 7.0]);
    assert_eq!(numbers(&third.join().unwrap()), [15.0, 17.0]);
    // One row, then four: neither the late one nor the one that nobody waits for.
    assert_eq!(computed.load(Ordering::Relaxed), 5);
    // A batch is counted once its rows are answered.
    until("the rows are counted", || observed.count("rows_total{model=gated}") == 5);
    assert!(service.shutdown().is_clean());
}

#[test]
fn shutting_down_under_load_answers_all_that_was_accepted() {
    let observed = observed();
    let model = served(affine_signature("ending", &[1, 2, 4, 8]), |_| {
        std::thread::sleep(Duration::from_millis(2));
        Ok(())
    });
    let service = start(quick_limits(), vec![model]);
    let address = service.address();
    let is_over = AtomicBool::new(false);
    let (mut ok, mut refused, mut broken) = (0, 0, 0);
    let ask = |thread: u32| {
        let (mut ok, mut refused, mut broken) = (0u64, 0u64, 0u64);
        let mut number = 0;
        while !is_over.load(Ordering::Relaxed) {
            let Ok(mut client) = Client::connect(address, Duration::from_secs(10)) else { break };
            for _ in 0..20 {
                number += 1;
                let value = (thread * 10_000 + number) as f32;
                match client.post("/v2/models/ending/infer", &[], json_request(&[value]).as_bytes()) {
                    Ok(reply) if reply.status == 200 => {
                        assert_eq!(numbers(&reply), [f64::from(affine(value))]);
                        ok += 1;
                    }
                    Ok(reply) => {
                        assert_eq!((reply.status, kind(&reply).as_str()), (503, "shutting_down"));
                        refused += 1;
                    }
                    // Between two requests, a connection is closed without a word, as HTTP has it.
                    Err(_) => {
                        broken += 1;
                        break;
                    }
                }
            }
        }
        (ok, refused, broken)
    };
    let ended = std::thread::scope(|scope| {
        let ask = &ask;
        let clients: Vec<_> = (0..16).map(|thread| scope.spawn(move || ask(thread))).collect();
        std::thread::sleep(Duration::from_millis(300));
        let ended = service.shutdown();
        is_over.store(true, Ordering::Relaxed);
        for client in clients {
            let counts = client.join().unwrap();
            (ok, refused, broken) = (ok + counts.0, refused + counts.1, broken + counts.2);
        }
        ended
    });
    assert!(ended.is_clean(), "{ended:?}");
    let counted = observed.outcomes("ending");
    eprintln!("{ok} answered, {refused} refused, {broken} connections closed; counted {counted:?}");
    assert!(ok > 100, "{ok}");
    // Everything that was counted as answered was received, and the other way round.
    assert_eq!(counted.get("ok"), Some(&ok));
    assert_eq!(counted.get("shutting_down").copied().unwrap_or(0), refused);
    assert_eq!(counted.values().sum::<u64>(), ok + refused);
    assert!(TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_err(), "nobody listens any more");
}

#[test]
fn a_device_that_does_not_answer_does_not_keep_the_service_from_ending() {
    let (open, gate) = mpsc::channel::<()>();
    let model = served(affine_signature("stuck", &[1]), move |_| {
        let _ = gate.recv();
        Ok(())
    });
    let service = start(Limits { grace: Duration::from_millis(300), ..quick_limits() }, vec![model]);
    let address = service.address();
    let ask =
        |value: f32| std::thread::spawn(move || connect(address).post("/v2/models/stuck/infer", &[], json_request(&[value]).as_bytes()));
    let observed = observed();
    let within = ask(1.0);
    until("one request is within the device", || observed.count("batch_rows{model=stuck}") == 1);
    let queued = ask(2.0);
    until("one waits", || observed.gauge("queue_rows{model=stuck}") == 1.0);
    let start = Instant::now();
    let shutdown = std::thread::spawn(move || service.shutdown());
    let ended = shutdown.join().unwrap();
    assert!(start.elapsed() < Duration::from_secs(5));
    assert!(ended.is_stuck && !ended.is_clean(), "{ended:?}");
    // Both clients are told, the one whose batch the device never gave back as well.
    for client in [within, queued] {
        let reply = client.join().unwrap().unwrap();
        assert_eq!((reply.status, kind(&reply).as_str()), (503, "shutting_down"));
    }
    assert_eq!(observed.outcomes("stuck"), [("shutting_down".to_owned(), 2)].into());
    drop(open);
}

#[test]
fn connections_beyond_the_limit_are_told_so() {
    let limits = Limits { connections: 2, header_timeout: Duration::from_secs(5), ..quick_limits() };
    let service = start(limits, vec![served(affine_signature("few", &[1]), |_| Ok(()))]);
    let (mut one, mut two) = (connect(service.address()), connect(service.address()));
    assert_eq!((one.get("/healthz").unwrap().status, two.get("/healthz").unwrap().status), (200, 200));
    let mut three = connect(service.address());
    let reply = three.reply().unwrap();
    assert_eq!((reply.status, reply.header("retry-after")), (503, Some("1")));
    assert_eq!(json(&reply)["kind"], "queue_full");
    drop(one);
    until("a place is free", || connect(service.address()).get("/healthz").is_ok_and(|reply| reply.status == 200));
}

#[test]
fn bodies_share_a_bounded_memory() {
    let limits = Limits { body_bytes: 4096, held_body_bytes: 8192, body_timeout: Duration::from_secs(5), ..quick_limits() };
    let service = start(limits, vec![served(affine_signature("held", &[1]), |_| Ok(()))]);
    let head = "POST /v2/models/held/infer HTTP/1.1\r\nhost: test\r\ncontent-length: 4096\r\n\r\n{";
    let mut slow: Vec<Client> = Vec::new();
    // Another request may have been quicker than the slow ones, so that one of those was refused: then once more.
    let is_held = |slow: &mut Vec<Client>| {
        *slow = (0..2).map(|_| connect(service.address())).collect();
        slow.iter_mut().for_each(|client| client.send(head.as_bytes()).unwrap());
        std::thread::sleep(Duration::from_millis(100));
        let reply = connect(service.address()).post("/v2/models/held/infer", &[], json_request(&[1.0]).as_bytes()).unwrap();
        reply.status == 429 && kind(&reply) == "queue_full"
    };
    assert!((0..20).any(|_| is_held(&mut slow)), "all memory is held");
    drop(slow);
    let served = || connect(service.address()).post("/v2/models/held/infer", &[], json_request(&[1.0]).as_bytes()).unwrap().status == 200;
    until("the memory of clients that went is free", served);
}

#[test]
fn a_client_that_reads_nothing_is_cut_and_others_are_served() {
    // Answers of 8 MiB, which no socket buffers.
    const ROW: usize = 2 << 20;
    let mut signature = affine_signature("wide", &[1]);
    signature.outputs[0].row_dims = vec![ROW as u64];
    struct Wide;
    impl verdigris_serve::Executor for Wide {
        fn execute(&mut self, _: u64, _: &[Vec<u8>]) -> Result<Vec<Vec<u8>>, ExecuteError> {
            Ok(vec![vec![7; 4 * ROW]])
        }
    }
    let service = start(quick_limits(), vec![verdigris_serve::Served { signature, executor: Box::new(Wide) }]);
    let body = json_request(&[1.0]).replace("}]}", "}],\"parameters\":{\"binary_data_output\":true}}");
    let mut lazy = TcpStream::connect(service.address()).unwrap();
    let head = format!("POST /v2/models/wide/infer HTTP/1.1\r\nhost: test\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    lazy.write_all(head.as_bytes()).unwrap();
    let reply = connect(service.address()).post("/v2/models/wide/infer", &[], body.as_bytes()).unwrap();
    let json_bytes: usize = reply.header("inference-header-content-length").unwrap().parse().unwrap();
    assert_eq!((reply.status, reply.body.len() - json_bytes), (200, 4 * ROW));
    // After the time for writes, what is left of the lazy client's answer is not sent.
    std::thread::sleep(Duration::from_millis(1200));
    lazy.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut taken = Vec::new();
    let _ = lazy.read_to_end(&mut taken);
    assert!(taken.len() < 4 * ROW, "{} bytes", taken.len());
    assert!(service.shutdown().is_clean());
}

#[test]
fn two_services_on_one_port_are_told_apart() {
    let settings = |listen| Settings { listen, limits: Limits::default(), metrics: None };
    let one = Service::start(settings("127.0.0.1:0".parse().unwrap())).unwrap();
    let told = Service::start(settings(one.address())).err().unwrap().to_string();
    assert!(told.contains(&format!("cannot listen on {}", one.address())) && told.contains("choose another port"), "{told}");
    // The first is unharmed.
    assert_eq!(connect(one.address()).get("/healthz").unwrap().status, 200);
}

#[test]
fn what_a_client_says_comes_back_cut() {
    let service = start(quick_limits(), vec![served(affine_signature("short", &[1]), |_| Ok(()))]);
    let mut client = connect(service.address());
    let body = json_request(&[1.0]);
    let long = "9".repeat(200_000);
    for (wrong, told) in [
        (body.replace("[1,1]", &format!("[{}1]", "1,".repeat(50_000))), "a shape of more than 8 extents"),
        (body.replace("\"inputs\"", &format!("\"{long}\":1,\"inputs\"")), "unknown field"),
        (body.replace("[1.0]", &format!("\"{long}\"")), "a number or an array of numbers"),
    ] {
        assert!(wrong.len() > body.len() + 90_000, "replaced");
        let reply = client.post("/v2/models/short/infer", &[], wrong.as_bytes()).unwrap();
        assert_eq!((reply.status, kind(&reply).as_str()), (400, "bad_request"));
        assert!(reply.body.len() < 4096, "{} bytes", reply.body.len());
        // Where the reason stands behind the words that are cut, it is cut too.
        assert!(reply.text().contains(told) || reply.text().contains('…'), "{}", &reply.text());
    }
}

#[test]
fn bodies_come_in_pieces_of_any_length_and_uncompressed() {
    let limits = Limits { body_bytes: 1024, body_timeout: Duration::from_secs(10), ..quick_limits() };
    let service = start(limits, vec![served(affine_signature("pieces", &[1]), |_| Ok(()))]);
    let chunked = |body: &[u8], ends: bool| {
        let mut text = b"POST /v2/models/pieces/infer HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
        body.iter().for_each(|&byte| text.extend([b'1', b'\r', b'\n', byte, b'\r', b'\n']));
        text.extend(if ends { &b"0\r\n\r\n"[..] } else { b"" });
        text
    };
    let mut client = connect(service.address());
    client.send(&chunked(json_request(&[3.0]).as_bytes(), true)).unwrap();
    assert_eq!(numbers(&client.reply().unwrap()), [7.0]);
    client.send(&chunked(&[b' '; 1025], false)).unwrap();
    let reply = client.reply().unwrap();
    assert_eq!((reply.status, kind(&reply).as_str()), (413, "too_large"));
    let ask = |coding: &str| {
        connect(service.address())
            .post("/v2/models/pieces/infer", &[("content-encoding", coding)], json_request(&[3.0]).as_bytes())
            .unwrap()
    };
    assert_eq!(numbers(&ask("identity")), [7.0]);
    let reply = ask("gzip");
    assert_eq!((reply.status, kind(&reply).as_str()), (400, "bad_request"));
    assert!(reply.text().contains("content-encoding `gzip`"), "{}", reply.text());
}

#[test]
fn of_connections_beyond_the_limit_some_are_told_and_the_rest_closed() {
    let limits = Limits { connections: 1, header_timeout: Duration::from_secs(20), ..quick_limits() };
    let service = start(limits, vec![served(affine_signature("crowd", &[1]), |_| Ok(()))]);
    let mut one = connect(service.address());
    assert_eq!(one.get("/healthz").unwrap().status, 200);
    // All are open before one of them reads; each that is told keeps its place for a second or until it is closed.
    let crowd: Vec<TcpStream> = (0..300).map(|_| TcpStream::connect(service.address()).unwrap()).collect();
    let mut told = 0;
    let mut silent = 0;
    for mut stream in crowd {
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut text = Vec::new();
        let _ = stream.read_to_end(&mut text);
        let is_told = text.starts_with(b"HTTP/1.1 503");
        assert!(is_told || text.is_empty(), "{}", String::from_utf8_lossy(&text));
        *(if is_told { &mut told } else { &mut silent }) += 1;
    }
    assert!(told >= 64 && silent > 0, "{told} were told, {silent} were not");
    assert_eq!(one.get("/healthz").unwrap().status, 200);
}

#[test]
fn before_models_are_warm_they_are_not_ready_and_not_unknown() {
    let settings = Settings { listen: "127.0.0.1:0".parse().unwrap(), limits: quick_limits(), metrics: None };
    let mut service = Service::start(settings).unwrap();
    let mut client = connect(service.address());
    for path in ["/v2/models/cold", "/v2/models/cold/ready", "/readyz"] {
        let reply = client.get(path).unwrap();
        assert_eq!((reply.status, kind(&reply).as_str(), reply.header("retry-after")), (503, "not_ready", Some("1")), "{path}");
    }
    service.serve(vec![served(affine_signature("cold", &[1]), |_| Ok(()))]).unwrap();
    let mut client = connect(service.address());
    assert_eq!([client.get("/v2/models/cold").unwrap().status, client.get("/v2/models/cold/ready").unwrap().status], [200, 200]);
}

/// The memory of a body is held as long as its inputs are: longer than the client waits.
#[test]
fn a_request_that_is_too_late_holds_its_memory_until_it_leaves_the_queue() {
    let limits = Limits { body_bytes: 1024, held_body_bytes: 2048, body_timeout: Duration::from_secs(5), ..quick_limits() };
    let (open, gate) = mpsc::channel::<()>();
    let model = served(affine_signature("late", &[1]), move |_| {
        let _ = gate.recv();
        Ok(())
    });
    let service = start(limits, vec![model]);
    let address = service.address();
    let observed = observed();
    let ask = move |deadline: &'static str| {
        connect(address).post("/v2/models/late/infer", &[("x-deadline-ms", deadline)], json_request(&[1.0]).as_bytes()).unwrap()
    };
    let first = std::thread::spawn(move || ask("10000"));
    until("one request is within the device", || observed.count("batch_rows{model=late}") == 1);
    assert_eq!(ask("50").status, 504);
    let full = ask("50");
    assert_eq!((full.status, kind(&full).as_str()), (429, "queue_full"), "{}", full.text());
    assert!(full.text().contains("requests hold all of the 2048 bytes"), "{}", full.text());
    drop(open);
    assert_eq!(numbers(&first.join().unwrap()), [3.0]);
    until("the memory is given back", || ask("10000").status == 200);
}
