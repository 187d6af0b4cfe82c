//! How long planning takes, from a graph to a plan, by the number of ops. On the driver without a device, so that no kernel is compiled.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use verdigris::{Config, Handle, Policy};
use verdigris_cuda::fake;
use verdigris_graph::Graph;
use verdigris_reference::networks::{self, Shape};

/// What cutting a graph of up to 2,000 ops and planning it for the CPU may take.
const MOST: Duration = Duration::from_millis(50);

fn planned(handle: &Handle, graph: &Graph) -> Duration {
    let begun = Instant::now();
    let plan = handle.plan_graph(graph, &Policy::default()).expect("plans");
    assert!(plan.parts().count() > 0);
    begun.elapsed()
}

#[test]
#[ignore = "a timing: run it in release on a quiet machine"]
fn planning_takes_time_by_the_number_of_ops() {
    let handle = Handle::on(&fake::context(), &Config::default()).expect("the fake is always there");
    for shape in Shape::ALL {
        for ops in [250, 500, 1000, 2000, 4000] {
            let graph = networks::graph(shape, ops).expect("valid");
            // The first plan chooses and makes kernels ready; the next finds them.
            let first = planned(&handle, &graph);
            let again = planned(&handle, &graph);
            let begun = Instant::now();
            let parts = verdigris_graph::pattern::partition(&graph).expect("valid").parts.len();
            let cut = begun.elapsed();
            let begun = Instant::now();
            verdigris_cpu::GraphPlan::new(&graph).expect("valid");
            let cpu = begun.elapsed();
            assert!(ops > 2000 || cut + cpu < MOST, "{shape:?} of {ops} ops: cut in {cut:.1?}, planned for the CPU in {cpu:.1?}");
            eprintln!(
                "{shape:?}: {} ops, {parts} parts: plan {first:.1?}, again {again:.1?}, of which cut {cut:.1?}; cpu {cpu:.1?}",
                graph.nodes.len()
            );
        }
    }
}
