//! The watchdog collects without an exporter: what a guard keeps is looked at by its thread, as long as it lives. The recorder is the process's, since another
//! thread records, so that this is a program of one test.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use verdigris::observe::{self, Guards, Listen, Sampling, Watchdog};
use verdigris::{DType, Device, GraphBuilder, Layout, Tensor, UnaryOp};

#[test]
fn what_waits_is_looked_at_without_an_exporter() {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    recorder.install().expect("the first");
    let looked = || -> u64 {
        let all = snapshotter.snapshot().into_vec().into_iter();
        let of = |name: &str, value: &DebugValue| match value {
            DebugValue::Counter(count) if name == "verdigris_nonfinite_total" => *count,
            _ => 0,
        };
        all.map(|(key, _, _, value)| of(key.key().name(), &value)).sum()
    };
    let guards = Guards { numbers: Sampling { every: 1, per_second: 1000 }, ..Guards::default() };
    let _listening = observe::listen(Listen { guards, ..Listen::default() });

    let mut g = GraphBuilder::new("roots");
    let x = g.tensor("x", DType::F32, Layout::row_major(&[2]).expect("small"));
    let roots = g.unary("root", UnaryOp::Sqrt, x).expect("fits");
    g.store(roots, "y", DType::F32).expect("known");
    let device = Device::cpu();
    let plan = device.plan(&g.finish().expect("valid")).expect("plans");
    let values = Tensor::from_values(&device, DType::F32, &[2], &[4.0, -1.0]).expect("fits");
    let run = || drop(device.run(&plan, &[(x, &values)], &[]).expect("runs"));

    let watchdog = Watchdog::start(Duration::from_millis(2)).expect("a thread");
    run();
    let end = Instant::now() + Duration::from_secs(20);
    while looked() == 0 {
        assert!(Instant::now() < end, "the watchdog looks");
        std::thread::sleep(Duration::from_millis(2));
    }
    drop(watchdog);
    run();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(looked(), 0, "nobody looks any more");
    observe::collect();
    assert_eq!(looked(), 1);
    // One that waits long ends at once.
    let begun = Instant::now();
    drop(Watchdog::start(Duration::from_secs(3600)).expect("a thread"));
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}
