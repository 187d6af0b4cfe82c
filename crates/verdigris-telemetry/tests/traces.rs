//! Traces are whole JSON, nested and in order, and keep their whole lines when the process is killed.

use std::collections::HashMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tracing::subscriber::with_default;
use tracing_subscriber::layer::SubscriberExt;
use verdigris_telemetry::{Error, TRACE_BYTES, TraceFile};

/// The least page of the systems that run this: where a killed process' write may end.
const PAGE_BYTES: usize = 4096;

/// What a checker of the format finds: spans by name with how often they were begun and ended; executions by track.
#[derive(Default, Debug)]
struct Found {
    begun: HashMap<String, usize>,
    open: usize,
    executions: usize,
    instants: Vec<String>,
    tracks: Vec<String>,
}

/// Reads the file as strict JSON and holds it against the format: each event has what its phase asks for, times of a thread do not run back, each
/// end has a beginning on its own track, and executions of a stream do not cross.
fn check(path: &Path) -> Found {
    let text = std::fs::read(path).expect("a file");
    judge(&serde_json::from_slice::<Vec<Value>>(&text).expect("a whole array"))
}

/// What a killed process left, as the module's documentation says to read it: a whole array, or one that lacks its bracket and a part of its last line.
/// Returns whether it was cut as well.
fn check_killed(path: &Path) -> (Found, bool) {
    let mut text = std::fs::read_to_string(path).expect("text");
    let whole = serde_json::from_str::<Vec<Value>>(&text);
    let is_cut = whole.is_err();
    let events = whole.unwrap_or_else(|_| {
        // Not the bracket alone: a write covers the bracket of the one before it, so that what it left begins with its comma.
        // Behind the last whole page, at most what was left of that bracket.
        assert!(text.len() % PAGE_BYTES < "\n]\n".len(), "{} bytes are no whole pages", text.len());
        text.truncate(text.rfind(",\n").expect("lines"));
        text.push(']');
        serde_json::from_str(&text).expect("whole lines")
    });
    (judge(&events), is_cut)
}

fn judge(events: &[Value]) -> Found {
    let mut found = Found::default();
    let mut stacks: HashMap<(u64, u64), Vec<String>> = HashMap::new();
    let mut last: HashMap<(u64, u64), f64> = HashMap::new();
    let mut busy: HashMap<(u64, u64), Vec<(i64, i64)>> = HashMap::new();
    for event in events {
        let number = |name: &str| event[name].as_u64().unwrap_or_else(|| panic!("{name} in {event}"));
        let track = (number("pid"), number("tid"));
        let phase = event["ph"].as_str().expect("a phase");
        if phase == "M" {
            let name = event["args"]["name"].as_str().unwrap_or_default().to_owned();
            found.tracks.extend((event["name"] == "thread_name").then_some(name));
            continue;
        }
        let time = event["ts"].as_f64().expect("a time");
        if phase != "X" {
            let before = last.insert(track, time).unwrap_or(0.0);
            assert!(time >= before, "{event} after {before}");
        }
        match phase {
            "B" => {
                let name = event["name"].as_str().expect("a name").to_owned();
                *found.begun.entry(name.clone()).or_default() += 1;
                stacks.entry(track).or_default().push(name);
            }
            "E" => {
                stacks.entry(track).or_default().pop().unwrap_or_else(|| panic!("{event} ends nothing"));
            }
            "X" => {
                let duration = event["dur"].as_f64().expect("a duration");
                assert!(duration >= 0.0, "{event}");
                let ns = |us: f64| (us * 1e3).round() as i64;
                busy.entry(track).or_default().push((ns(time), ns(time) + ns(duration)));
                found.executions += 1;
            }
            "i" => found.instants.push(event["name"].as_str().expect("a name").to_owned()),
            other => panic!("phase {other}"),
        }
    }
    for (track, mut spans) in busy {
        spans.sort_unstable();
        for pair in spans.windows(2) {
            assert!(pair[0].1 <= pair[1].0, "{track:?}: {pair:?} cross");
        }
    }
    found.open = stacks.values().map(Vec::len).sum();
    found
}

fn device(device: &str, stream: u64, start_us: f64, duration_us: f64) {
    tracing::info!(target: "verdigris::device", device, stream, name = "gemm 512", engine = "gemm.wgmma", start_us, duration_us);
}

#[test]
fn host_and_device_stand_on_tracks_of_their_own() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trace.json");
    let (layer, trace) = TraceFile::create(&path, TRACE_BYTES).expect("a trace");
    let dispatch = tracing::Dispatch::new(tracing_subscriber::registry().with(layer));
    std::thread::scope(|scope| {
        for number in 0..4 {
            let dispatch = dispatch.clone();
            std::thread::Builder::new()
                .name(format!("worker {number}"))
                .spawn_scoped(scope, move || {
                    tracing::dispatcher::with_default(&dispatch, || {
                        for step in 0..50u64 {
                            let _step = tracing::info_span!("step", step, text = "\"quoted\" \\ \n").entered();
                            let late = tracing::info_span!("plan", found = tracing::field::Empty);
                            late.record("found", true);
                            late.in_scope(|| tracing::debug!("chosen"));
                            device("cuda:0", number, step as f64 * 10.0, 10.0004);
                            device("cuda:1", number, step as f64 * 10.0, f64::from(u32::try_from(step).unwrap_or(0)) % 10.0);
                        }
                    });
                })
                .expect("a thread");
        }
    });
    drop(trace);
    let found = check(&path);
    assert_eq!((found.begun["step"], found.begun["plan"], found.open), (200, 200, 0));
    assert_eq!((found.executions, found.instants.len()), (400, 200));
    for name in ["worker 0", "worker 3", "cuda:0 stream 0", "cuda:1 stream 3"] {
        assert!(found.tracks.iter().any(|track| track == name), "{name} in {:?}", found.tracks);
    }
    let text = std::fs::read_to_string(&path).expect("text");
    assert!(text.contains(r#""found":true"#) && text.contains(r#""engine":"gemm.wgmma""#));
    assert!(text.ends_with("\n]\n"));
}

#[test]
fn spans_that_are_left_out_of_order_leave_no_end_without_a_beginning() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trace.json");
    let (layer, trace) = TraceFile::create(&path, TRACE_BYTES).expect("a trace");
    with_default(tracing_subscriber::registry().with(layer), || {
        let (first, second) = (tracing::info_span!("first"), tracing::info_span!("second"));
        let (first, second) = (first.enter(), second.enter());
        drop(first);
        drop(second);
        device("cuda:0", 1, f64::NAN, 1.0);
        device("cuda:0", 1, 5.0, -1.0);
        tracing::info!(target: "verdigris::device", device = "cuda:0", "no times");
        assert_eq!(trace.dropped(), 2, "what has no place in time");
    });
    drop(trace);
    let found = check(&path);
    assert_eq!((found.open, found.executions), (0, 1));
}

#[test]
fn a_full_trace_is_whole_and_says_so() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trace.json");
    let most_bytes = 128 << 10;
    let (layer, trace) = TraceFile::create(&path, most_bytes).expect("a trace");
    with_default(tracing_subscriber::registry().with(layer), || {
        let _outer = tracing::info_span!("outer").entered();
        for number in 0..5000 {
            let _inner = tracing::info_span!("inner", number).entered();
            tracing::info!(text = "x".repeat(number % 100), "event");
        }
    });
    let dropped = trace.dropped();
    assert!(dropped > 1000, "{dropped}");
    drop(trace);
    assert!(std::fs::metadata(&path).expect("a file").len() <= most_bytes);
    let found = check(&path);
    assert_eq!(found.open, 0, "what was begun within the bound is ended within what is kept free");
    assert!(found.instants.contains(&"the trace is full".to_owned()));
    assert!(found.instants.contains(&format!("{dropped} events were left out")), "{:?}", found.instants.last());
    let error = TraceFile::create(&path, 100).map(|_| ()).expect_err("too small");
    assert!(matches!(error, Error::Bound { bytes: 100, .. }), "{error}");
}

#[test]
fn two_traces_and_two_layers_do_not_mix() {
    let folder = tempfile::tempdir().expect("a folder");
    let paths = ["a.json", "b.json"].map(|name| folder.path().join(name));
    let [(a, a_trace), (b, b_trace)] = [&paths[0], &paths[1]].map(|path| TraceFile::create(path, TRACE_BYTES).expect("a trace"));
    let taken = TraceFile::create(&paths[0], TRACE_BYTES).map(|_| ()).expect_err("it is being written");
    assert!(matches!(taken, Error::FileInUse { .. }), "{taken}");
    with_default(tracing_subscriber::registry().with(a).with(b), || {
        for _ in 0..10 {
            let _span = tracing::info_span!("both").entered();
        }
        drop(a_trace);
        let _span = tracing::info_span!("one").entered();
    });
    drop(b_trace);
    let found = [check(&paths[0]), check(&paths[1])];
    assert_eq!((found[0].begun["both"], found[0].begun.get("one")), (10, None));
    assert_eq!((found[1].begun["both"], found[1].begun.get("one")), (10, Some(&1)));
}

/// Not a test of its own: what [`a_killed_process_leaves_whole_lines`] starts and kills.
#[test]
#[ignore = "runs until it is killed"]
fn writes_for_ever() {
    let Some(path) = std::env::var_os("VERDIGRIS_TEST_TRACE") else { return };
    let (layer, _trace) = TraceFile::create(path.as_ref(), TRACE_BYTES).expect("a trace");
    with_default(tracing_subscriber::registry().with(layer), || {
        let _outer = tracing::info_span!("outer").entered();
        for number in 0u64.. {
            let _inner = tracing::info_span!("inner", number).entered();
            device("cuda:0", 0, number as f64, 1.0);
        }
    });
}

#[test]
#[cfg(unix)]
fn a_killed_process_leaves_whole_lines() {
    let folder = tempfile::tempdir().expect("a folder");
    for round in 0..5u64 {
        let path = folder.path().join(format!("trace{round}.json"));
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "writes_for_ever", "--ignored", "--nocapture"])
            .env("VERDIGRIS_TEST_TRACE", &path)
            .stdout(Stdio::null())
            .spawn()
            .expect("it starts");
        let end = Instant::now() + Duration::from_secs(20);
        while std::fs::metadata(&path).map_or(0, |file| file.len()) < (100 << 10) * (round + 1) {
            assert!(Instant::now() < end, "it writes");
            std::thread::sleep(Duration::from_micros(700 + 131 * round));
        }
        // SIGKILL, in the middle of its work.
        child.kill().expect("killed");
        child.wait().expect("gone");
        let (found, is_cut) = check_killed(&path);
        assert!(found.begun["inner"] > 100 && found.open >= 1, "cut {is_cut}: {:?} open {}", found.begun, found.open);
        // The lock went with the process.
        drop(TraceFile::create(&path, TRACE_BYTES).expect("the file is free"));
    }
}
