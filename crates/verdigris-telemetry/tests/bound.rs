//! Memory under label sets without end. Alone in its program, so that nothing else moves it.
#![cfg(target_os = "linux")]

mod client;

use client::{WHERE, resident_bytes};
use metrics::{Key, Label, Recorder};
use verdigris_telemetry::{Bounds, Registry};

#[test]
fn label_sets_beyond_the_bound_cost_no_memory() {
    let registry = Registry::new(Bounds::default());
    let record = |sets: std::ops::Range<usize>| {
        for set in sets {
            let labels = vec![Label::new("op", format!("m{set}n{set}k{set}")), Label::new("device", "cuda:0")];
            for name in ["verdigris_device_seconds", "verdigris_drift_ratio", "verdigris_plan_seconds"] {
                registry.register_histogram(&Key::from_parts(name, labels.clone()), &WHERE).record(1e-4);
            }
        }
    };
    record(0..10_000);
    let before = resident_bytes();
    record(10_000..110_000);
    let grown = resident_bytes().saturating_sub(before);
    assert_eq!((registry.series_count(), registry.refused_count()), (3 * 512, 3 * (110_000 - 512)));
    assert!(grown < 1 << 20, "{grown} bytes for 300,000 label sets that are not kept");
}
