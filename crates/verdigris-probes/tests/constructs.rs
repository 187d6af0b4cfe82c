//! The constructs, each verified and run against plain loops in f64.

#[path = "constructs/attention.rs"]
mod attention;
#[path = "constructs/exchange.rs"]
mod exchange;
#[path = "constructs/harness.rs"]
mod harness;
#[path = "constructs/product.rs"]
mod product;

use std::collections::BTreeSet;

use verdigris_kir::verify;
use verdigris_probes::constructs;

#[test]
fn every_probe_is_verified_and_nothing_in_it_is_forgotten() {
    let mut names = BTreeSet::new();
    for probe in constructs::all() {
        let body = (probe.build)();
        assert!(names.insert(body.name.clone()), "two probes are called {}", body.name);
        assert_eq!(probe.kernel().name(), body.name);
        assert_eq!(body.allowed_spill_bytes, 0, "{}", probe.name);
        if let Err(faults) = verify::verify(body) {
            panic!("{faults}");
        }
    }
}
