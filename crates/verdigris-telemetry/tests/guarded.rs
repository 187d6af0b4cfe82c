//! A scraper does not wait for numeric guards: they look on the thread that collects.

mod client;

use std::sync::Arc;

use client::get;
use verdigris::observe::{self, Guards, Listen, Sampling};
use verdigris::{DType, Device, GraphBuilder, Layout, Tensor, UnaryOp};
use verdigris_telemetry::{Bounds, Exporter, Registry};

#[test]
fn a_scrape_leaves_results_to_the_thread_that_collects() {
    let registry = Arc::new(Registry::new(Bounds::default()));
    let exporter = Exporter::start(Arc::clone(&registry), "127.0.0.1:0".parse().expect("an address")).expect("started");
    metrics::with_local_recorder(&*registry, || {
        let all = Sampling { every: 1, per_second: 1000 };
        let _listening = observe::listen(Listen { guards: Guards { numbers: all, drift: all, ..Guards::default() }, ..Listen::default() });
        let mut g = GraphBuilder::new("logs");
        let x = g.tensor("x", DType::F32, Layout::row_major(&[4]).expect("small"));
        let y = g.unary("log", UnaryOp::Log, x).expect("fits");
        g.store(y, "y", DType::F32).expect("known");
        let device = Device::cpu();
        let plan = device.plan(&g.finish().expect("valid")).expect("plans");
        let x = Tensor::from_values(&device, DType::F32, &[4], &[1.0; 4]).expect("fits");
        let uid = plan.inputs().next().expect("an input").uid;
        device.run(&plan, &[(uid, &x)], &[]).expect("runs");
        let (status, text) = get(exporter.address(), "/metrics");
        assert!(status == 200 && text.contains("verdigris_executions_total{"), "{text}");
        // Had the scrape looked, there would be nothing left, and the exporter's thread has no recorder to count by.
        assert!(!text.contains("verdigris_number_checks_total"), "{text}");
        observe::collect();
        let text = registry.text();
        assert!(text.contains("verdigris_number_checks_total{device=\"cpu\",op=\"pointwise\"} 1\n"), "{text}");
        assert!(text.contains("verdigris_drift_checks_total{device=\"cpu\",op=\"pointwise\",outcome=\"within\"} 1\n"), "{text}");
    });
}
