//! What those are told who operate the library, on a driver without a device: each metric that an execution, a choice or an error moves, and that
//! nothing moves where nobody listens. Who listens is known to the whole process, so that these tests take turns.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use verdigris::observe::{self, Limits, Listen, Sampling, read_workload, table};
use verdigris::plan_cache::Answer;
use verdigris::workspace::WorkspaceSource;
use verdigris::{Binding, Config, Device, Error, GraphPlan, Handle, Policy, Tensor};
use verdigris_cuda::{DeviceBuffer, Pool, PoolOptions, fake};
use verdigris_graph::{BinaryOp, GemmProblem, Graph, GraphBuilder, Precision, Problem, Uid, UnaryOp};
use verdigris_tensor::{DType, Layout};

mod heard;

use heard::{Heard, Said, Warned, hear};

static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn handle(config: &Config) -> Handle {
    Handle::on(&fake::context(), config).expect("the fake is always there")
}

/// A product with a large depth, which is split, and a function of it.
fn graph() -> Graph {
    let rows = |dims: &[u64]| Layout::row_major(dims).expect("small");
    let mut g = GraphBuilder::new("watched");
    let (a, b) = (g.tensor("a", DType::Bf16, rows(&[64, 4096])), g.tensor("b", DType::Bf16, rows(&[4096, 64])));
    let product = g.matmul("product", a, b, Precision::Fp32).expect("fits");
    g.store(product, "d", DType::F32).expect("known");
    let soft = g.softmax("softmax", product, 1, false).expect("fits");
    g.store(soft, "p", DType::F32).expect("known");
    g.finish().expect("valid")
}

fn buffers(handle: &Handle, plan: &GraphPlan) -> Vec<(Uid, DeviceBuffer)> {
    plan.tensors().iter().map(|tensor| (tensor.uid, handle.pool().alloc(handle.stream(), tensor.bytes).expect("allocates"))).collect()
}

fn bound(buffers: &[(Uid, DeviceBuffer)]) -> Vec<(Uid, Binding<'_>)> {
    buffers.iter().map(|(uid, buffer)| (*uid, Binding::Buffer(buffer.slice()))).collect()
}

/// What was recorded: series by name and labels, in the order of the table.
struct Seen(HashMap<String, DebugValue>);

impl Seen {
    fn of(snapshotter: &Snapshotter) -> Seen {
        let mut seen = HashMap::new();
        for (key, _, _, value) in snapshotter.snapshot().into_vec() {
            let key = key.key();
            let metric = table::metric_of(key.name()).unwrap_or_else(|| panic!("{} stands in no table", key.name()));
            let labels: Vec<String> = key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
            let names: Vec<&str> = key.labels().map(|label| label.key()).collect();
            assert_eq!(names, metric.labels, "{}", metric.name);
            seen.insert(format!("{}{{{}}}", key.name(), labels.join(",")), value);
        }
        Seen(seen)
    }

    /// The sum of the counters, and the number of values of the histograms, of a name whose labels hold all of these.
    fn count(&self, name: &str, labels: &[&str]) -> u64 {
        let is_meant = |key: &str| key.starts_with(&format!("{name}{{")) && labels.iter().all(|label| key.contains(label));
        let of = |value: &DebugValue| match value {
            DebugValue::Counter(count) => *count,
            DebugValue::Histogram(values) => values.len() as u64,
            DebugValue::Gauge(value) => value.into_inner() as u64,
        };
        self.0.iter().filter(|(key, _)| is_meant(key)).map(|(_, value)| of(value)).sum()
    }
}

impl Seen {
    /// The values of the histograms of a name whose labels hold all of these, in order.
    fn values(&self, name: &str, labels: &[&str]) -> Vec<f64> {
        let is_meant = |key: &str| key.starts_with(&format!("{name}{{")) && labels.iter().all(|label| key.contains(label));
        let of = |value: &DebugValue| match value {
            DebugValue::Histogram(values) => values.iter().map(|value| value.into_inner()).collect(),
            DebugValue::Counter(_) | DebugValue::Gauge(_) => Vec::new(),
        };
        let mut values: Vec<f64> = self.0.iter().filter(|(key, _)| is_meant(key)).flat_map(|(_, value)| of(value)).collect();
        values.sort_by(f64::total_cmp);
        values
    }
}

/// What `work` moves while somebody listens, from one reading to the next.
fn seen<R>(listen: Listen, work: impl FnOnce(&dyn Fn() -> Seen) -> R) -> R {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || {
        let _listening = observe::listen(listen);
        work(&|| Seen::of(&snapshotter))
    })
}

fn every(every: u32) -> Listen {
    Listen { sampling: Sampling { every, per_second: 1_000_000 }, ..Listen::default() }
}

#[test]
fn nobody_is_told_who_does_not_listen() {
    let _turn = turn();
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || {
        let handle = handle(&Config::default());
        let plan = handle.plan_graph(&graph(), &Policy::default()).expect("plans");
        let buffers = buffers(&handle, &plan);
        plan.execute_from(handle.stream(), &bound(&buffers), handle.pool()).expect("executes");
        assert!(!observe::is_listening());
    });
    assert!(snapshotter.snapshot().into_vec().is_empty());
}

#[test]
fn plans_choices_kernels_and_executions_are_counted_by_what_they_are() {
    let _turn = turn();
    seen(every(0), |read| {
        let handle = handle(&Config::default());
        let plan = handle.plan_graph(&graph(), &Policy::default()).expect("plans");
        let buffers = buffers(&handle, &plan);
        for _ in 0..5 {
            plan.execute_from(handle.stream(), &bound(&buffers), handle.pool()).expect("executes");
        }
        observe::collect();
        let seen = read();
        assert_eq!(seen.count("verdigris_build_info", &[]), 1);
        assert_eq!((seen.count("verdigris_plans_total", &["device=cuda:0"]), seen.count("verdigris_plan_seconds", &[])), (1, 1));
        let engines: Vec<&str> = plan.parts().map(|part| part.engine().name).collect();
        assert!(engines.len() >= 2, "{engines:?}");
        assert_eq!(seen.count("verdigris_choices_total", &[]), engines.len() as u64);
        for engine in engines {
            let engine = format!("engine={engine},");
            assert_eq!(seen.count("verdigris_choices_total", &[&engine, "chosen_by=estimate"]), 1, "{engine}");
            assert_eq!(seen.count("verdigris_executions_total", &[&engine, "device=cuda:0"]), 5, "{engine}");
        }
        assert_eq!(seen.count("verdigris_executions_total", &["op=gemm", "dtype=bf16"]), 5);
        let counts = handle.kernel_counts();
        assert!(counts.compiled > 0);
        assert_eq!(seen.count("verdigris_kernels_total", &["origin=compiled"]), counts.compiled);
        assert_eq!(seen.count("verdigris_kernel_compile_seconds", &[]), counts.compiled);
        assert_eq!(seen.count("verdigris_workspace_bytes", &[]), if plan.workspace_bytes() > 0 { 5 } else { 0 });
        // Nothing was sampled, and nothing else has happened.
        for name in
            ["device_seconds", "samples_total", "errors_total", "fallbacks_total", "choice_switches_total", "workspace_failures_total"]
        {
            assert_eq!(read().count(&format!("verdigris_{name}"), &[]), 0, "{name}");
        }
        assert!(seen.count("verdigris_pool_reserved_bytes", &["device=cuda:0"]) > 0);
    });
}

#[test]
fn samples_are_taken_as_often_as_asked_and_never_of_a_capture() {
    let _turn = turn();
    let run = |listen: Listen, times: u32| {
        seen(listen, |read| {
            let handle = handle(&Config::default());
            let plan = handle.plan_graph(&graph(), &Policy::default()).expect("plans");
            let buffers = buffers(&handle, &plan);
            for _ in 0..times {
                plan.execute_from(handle.stream(), &bound(&buffers), handle.pool()).expect("executes");
            }
            observe::collect();
            (read(), plan.parts().count() as u64)
        })
    };
    // The second, and every fourth from the fifth on: 1, 4, 8.
    let (seen_four, parts) = run(every(4), 10);
    assert_eq!(seen_four.count("verdigris_samples_total", &["outcome=taken"]), 3);
    assert_eq!(seen_four.count("verdigris_device_seconds", &[]), 3 * parts);
    for (key, value) in &seen_four.0 {
        if let DebugValue::Histogram(values) = value
            && key.starts_with("verdigris_device_seconds")
        {
            // The fake's clock: a microsecond a launch and more.
            assert!(values.iter().all(|seconds| (1e-6..1.0).contains(&seconds.into_inner())), "{key}: {values:?}");
        }
    }
    // No more than the budget of a second; two seconds may have been touched.
    let (seen_few, _) = run(Listen { sampling: Sampling { every: 1, per_second: 3 }, ..Listen::default() }, 20);
    let taken = seen_few.count("verdigris_samples_total", &["outcome=taken"]);
    assert!((3..=6).contains(&taken), "{taken}");
    assert_eq!(taken + seen_few.count("verdigris_samples_total", &["outcome=skipped"]), 19);
    // Events do not belong into what is captured.
    fake::set_capturing(true);
    let (seen_captured, _) = run(every(1), 5);
    fake::set_capturing(false);
    assert_eq!(seen_captured.count("verdigris_samples_total", &[]), 0);
    assert!(seen_captured.count("verdigris_executions_total", &[]) > 0);
}

#[test]
fn a_single_problem_is_sampled_as_a_graph_is() {
    let _turn = turn();
    seen(every(1), |read| {
        let handle = handle(&Config::default());
        let problem = Problem::Gemm(GemmProblem::packed(64, 64, 64, DType::F32, DType::F32).expect("a plain product"));
        let plan = handle.plan(&problem, &verdigris::Limits::default()).expect("plans");
        let buffer = || handle.pool().alloc(handle.stream(), 64 * 64 * 4).expect("allocates");
        let (a, b, d) = (buffer(), buffer(), buffer());
        let workspace = handle.pool().alloc(handle.stream(), plan.workspace_bytes()).expect("allocates");
        for _ in 0..4 {
            let bindings = [&a, &b, &d].map(|buffer| Binding::Buffer(buffer.slice()));
            plan.execute(handle.stream(), &bindings, workspace.slice()).expect("executes");
        }
        let seen = read();
        assert_eq!(seen.count("verdigris_executions_total", &["op=gemm", "dtype=f32"]), 4);
        assert_eq!(seen.count("verdigris_device_seconds", &["op=gemm"]), 3);
    });
}

/// What the parts of a plan compute, and who does.
fn parts(plan: &GraphPlan) -> Vec<(String, String)> {
    plan.explain().parts.iter().zip(plan.parts()).map(|(why, part)| (why.problem.clone(), part.engine().name.to_owned())).collect()
}

/// F3: an execution beyond its estimate is counted and told of, each part by its problem and its engine.
#[test]
fn a_slow_execution_is_counted() {
    let _turn = turn();
    let run = |slow_factor: f64| {
        let limits = Limits { slow_factor, slow_least: Duration::ZERO, ..Limits::default() };
        hear(|heard| {
            seen(Listen { limits, ..every(1) }, |read| {
                let handle = handle(&Config::default());
                let plan = handle.plan_graph(&graph(), &Policy::default()).expect("plans");
                let buffers = buffers(&handle, &plan);
                for _ in 0..2 {
                    plan.execute_from(handle.stream(), &bound(&buffers), handle.pool()).expect("executes");
                }
                observe::collect();
                (read().count("verdigris_slow_executions_total", &[]), heard.take("slow"), parts(&plan))
            })
        })
    };
    let (count, told, parts) = run(1e-9);
    assert_eq!(count, parts.len() as u64, "each part of the second execution is slow beside a limit of nothing");
    assert_eq!(told.iter().map(Said::part).collect::<Vec<_>>(), parts);
    for slow in &told {
        assert_eq!(slow.field("device"), "cuda:0");
        assert!(slow.number("us") > 1e-9 * slow.number("estimate_us"), "{slow:?}");
    }
    let (count, told, _) = run(1e9);
    assert_eq!((count, told.len()), (0, 0));
}

/// F3: a planted slow choice. The plan cache names another way than the estimate, and that way is slow: by the limits that everybody has, its executions are
/// counted under the engine that was chosen, and the choice says who made it.
#[test]
fn a_planted_slow_choice_is_seen_under_its_engine() {
    let _turn = turn();
    hear(|heard| {
        seen(every(1), |read| {
            let handle = handle(&Config { shipped: false, ..Config::default() });
            let problem = Problem::Gemm(GemmProblem::packed(96, 96, 64, DType::F32, DType::F32).expect("a plain product"));
            let limits = verdigris::Limits::default();
            let best = handle.choose(&problem, &limits).expect("chooses");
            let survey =
                handle.survey(&problem, &verdigris::Limits { settings: verdigris::Settings::All, ..limits.clone() }).expect("asks");
            let is_other = |way: &&verdigris::Ranked| (way.engine.name, &way.knobs) != (best.way.engine.name, &best.way.knobs);
            let planted = survey.ranked.iter().find(is_other).expect("another way");
            handle.plan_cache().keep(&handle.question(&problem, &limits), &Answer::of(planted, 0.5)).expect("in memory");
            handle.load(&problem, planted).expect("loads");
            let plan = handle.plan(&problem, &limits).expect("plans");
            let buffer = || handle.pool().alloc(handle.stream(), 96 * 96 * 4).expect("allocates");
            let (a, b, d) = (buffer(), buffer(), buffer());
            let workspace = handle.pool().alloc(handle.stream(), plan.workspace_bytes()).expect("allocates");
            let run = || {
                for _ in 0..4 {
                    plan.execute(handle.stream(), &[&a, &b, &d].map(|buffer| Binding::Buffer(buffer.slice())), workspace.slice())
                        .expect("executes");
                }
                observe::collect();
                read()
            };
            let engine = format!("engine={},", planted.engine.name);
            let quick = run();
            assert_eq!(quick.count("verdigris_slow_executions_total", &[]), 0, "as fast as its estimate");
            assert_eq!(quick.count("verdigris_choices_total", &[&engine, "chosen_by=plan_cache"]), 1);
            assert_eq!(heard.take("slow").len(), 0);
            // The fake's launch takes a microsecond; a tenth of a second is beyond any estimate of this product.
            fake::slow_down(100_000);
            let slow = run();
            fake::slow_down(1);
            assert_eq!(slow.count("verdigris_slow_executions_total", &["op=gemm", &engine]), 4);
            let told = heard.take("slow");
            assert_eq!(told.len(), 4);
            for slow in &told {
                assert_eq!(slow.part(), (verdigris::explain::describe(&problem), planted.engine.name.to_owned()), "{slow:?}");
                assert!(slow.number("us") > 1e5, "{slow:?}");
            }
        })
    });
}

/// F6: a build whose kernels are slower. The same graph is counted under the same labels, so that the new build's times stand beside the old one's.
#[test]
fn a_slower_build_moves_the_times_of_the_same_series() {
    let _turn = turn();
    let times = |factor: u64| {
        seen(every(1), |read| {
            fake::slow_down(factor);
            let handle = handle(&Config::default());
            let plan = handle.plan_graph(&graph(), &Policy::default()).expect("plans");
            let buffers = buffers(&handle, &plan);
            for _ in 0..20 {
                plan.execute_from(handle.stream(), &bound(&buffers), handle.pool()).expect("executes");
            }
            fake::slow_down(1);
            observe::collect();
            let seen = read();
            assert_eq!(seen.count("verdigris_build_info", &[]), 1);
            seen.values("verdigris_device_seconds", &["op=gemm", "dtype=bf16", "device=cuda:0"])
        })
    };
    let (old, new) = (times(9), times(12));
    assert!(old.len() == new.len() && !old.is_empty(), "{old:?} {new:?}");
    // VerdigrisSlowerAfterUpgrade fires beyond 1.2.
    let p95 = |values: &[f64]| values[values.len() * 95 / 100];
    let ratio = p95(&new) / p95(&old);
    assert!((1.3..1.37).contains(&ratio), "{ratio}: {old:?} {new:?}");
}

/// F4: an execution that does not end is seen while it hangs, and forgotten once it has ended.
#[test]
fn a_hang_is_seen_and_nothing_waits_for_it() {
    let _turn = turn();
    let limits = Limits { overdue_least: Duration::ZERO, overdue_factor: 0.0, ..Limits::default() };
    hear(|heard| {
        seen(Listen { limits, ..every(1) }, |read| {
            let handle = handle(&Config::default());
            let plan = handle.plan_graph(&graph(), &Policy::default()).expect("plans");
            let buffers = buffers(&handle, &plan);
            let run = || plan.execute_from(handle.stream(), &bound(&buffers), handle.pool()).expect("executes");
            run();
            observe::collect();
            assert_eq!(read().count("verdigris_overdue_executions", &[]), 0);
            assert_eq!(heard.take("overdue").len(), 0);
            // The device begins with it, and does not come back.
            fake::hang_behind(Some(1));
            run();
            observe::collect();
            let hung = read();
            assert_eq!(hung.count("verdigris_overdue_executions", &["device=cuda:0"]), 1);
            assert_eq!(hung.count("verdigris_device_seconds", &[]), 0);
            // Told once, of the part that hangs.
            observe::collect();
            let told = heard.take("overdue");
            assert_eq!(told.iter().map(Said::part).collect::<Vec<_>>(), parts(&plan)[..1]);
            assert_eq!(told[0].field("device"), "cuda:0");
            fake::hang_behind(None);
            observe::collect();
            assert_eq!(read().count("verdigris_overdue_executions", &[]), 0);
            // What waits behind another stream's hang has not begun, and is not what hangs.
            fake::hang_behind(Some(0));
            run();
            observe::collect();
            assert_eq!(read().count("verdigris_overdue_executions", &[]), 0);
            assert_eq!(heard.take("overdue").len(), 0);
            fake::hang_behind(None);
        })
    });
}

/// F4: at the rate that everybody has, an execution that hangs is seen whichever it is: also between two samples.
#[test]
fn a_hang_between_samples_is_seen_at_the_default_rate() {
    let _turn = turn();
    let limits = Limits { waiting_least: Duration::from_millis(50), overdue_factor: 0.0, ..Limits::default() };
    hear(|heard| {
        seen(Listen { limits, ..Listen::default() }, |read| {
            let handle = handle(&Config::default());
            let plan = handle.plan_graph(&graph(), &Policy::default()).expect("plans");
            let buffers = buffers(&handle, &plan);
            let run = || plan.execute_from(handle.stream(), &bound(&buffers), handle.pool()).expect("executes");
            (0..3).for_each(|_| run());
            observe::collect();
            // Two intervals: a stream has no more than one mark in each.
            std::thread::sleep(Duration::from_millis(45));
            // The fourth execution: the second was sampled, and the next sample is the 257th.
            fake::hang_behind(Some(0));
            run();
            observe::collect();
            assert_eq!(read().count("verdigris_overdue_executions", &[]), 0, "not so soon");
            std::thread::sleep(Duration::from_millis(60));
            for _ in 0..2 {
                observe::collect();
                assert_eq!(read().count("verdigris_overdue_executions", &["device=cuda:0"]), 1);
            }
            assert_eq!(read().count("verdigris_samples_total", &[]), 0, "no sample since");
            let told = heard.take("overdue");
            assert_eq!(told.iter().map(Said::part).collect::<Vec<_>>(), parts(&plan)[parts(&plan).len() - 1..], "told once");
            assert_eq!((told[0].field("state"), told[0].field("device")), ("waiting", "cuda:0"));
            fake::hang_behind(None);
            observe::collect();
            assert_eq!(read().count("verdigris_overdue_executions", &[]), 0);
        })
    });
}

/// F4: a device that is lost, as after an Xid: the typed error, its kind in metric and event, samples that were on their way counted as lost, and each further
/// call of the process fails alike.
#[test]
fn a_lost_device_is_counted_and_told_by_each_call() {
    let _turn = turn();
    hear(|heard| {
        seen(every(1), |read| {
            let device = Device::gpu(handle(&Config::default()), Policy::default());
            let handle = device.handle().expect("a GPU");
            let plan = device.plan(&graph()).expect("plans");
            let buffers = buffers(handle, plan.on_a_gpu().expect("a GPU's"));
            let run = || plan.run(&mut bound(&buffers), Some(handle.stream()), verdigris::Workspace::Own);
            run().expect("the device is there");
            observe::collect();
            assert_eq!(read().count("verdigris_errors_total", &[]), 0);
            // A sample is on its way when it happens.
            fake::hang_behind(Some(1));
            run().expect("submitted");
            fake::lose_device(true);
            let lost = [run(), run()].map(|ran| ran.expect_err("there is no device"));
            observe::collect();
            fake::lose_device(false);
            fake::hang_behind(None);
            assert!(lost.iter().all(|error| error.kind() == "device_lost" && error.to_string().contains("719")), "{lost:?}");
            let seen = read();
            assert_eq!(seen.count("verdigris_errors_total", &["kind=device_lost", "device=cuda:0"]), 2);
            assert_eq!(seen.count("verdigris_samples_total", &["outcome=lost"]), 1);
            let told = heard.take("error");
            assert_eq!(told.iter().map(|error| error.field("kind")).collect::<Vec<_>>(), ["device_lost"; 2]);
            assert_eq!(told[0].field("device"), "cuda:0");
        })
    });
}

/// Those who are told may execute themselves: nothing is locked while they are.
#[test]
fn a_subscriber_may_execute() {
    let _turn = turn();
    let (done, is_done) = std::sync::mpsc::channel();
    let work = move || {
        let limits = Limits { slow_factor: 1e-9, slow_least: Duration::ZERO, ..Limits::default() };
        seen(Listen { limits, ..every(1) }, |read| {
            let handle = handle(&Config::default());
            let plan = handle.plan_graph(&graph(), &Policy::default()).expect("plans");
            let buffers = buffers(&handle, &plan);
            let told = Arc::new(AtomicUsize::new(0));
            let run: Arc<dyn Fn() + Send + Sync> =
                Arc::new(move || plan.execute_from(handle.stream(), &bound(&buffers), handle.pool()).expect("executes"));
            let subscriber = Warned { told: Arc::clone(&told), then: Arc::clone(&run) };
            tracing::subscriber::with_default(subscriber, || {
                (0..2).for_each(|_| run());
                observe::collect();
            });
            (read().count("verdigris_samples_total", &["outcome=taken"]), told.load(Ordering::Relaxed))
        })
    };
    std::thread::spawn(move || done.send(work()));
    let (taken, told) = is_done.recv_timeout(Duration::from_secs(60)).expect("it does not wait for itself");
    assert!(told >= 1 && taken > 1, "{told} told, {taken} taken");
}

/// A device that can no longer be asked has what it last had, and one without a handle has nothing.
#[test]
fn gauges_keep_what_is_known_and_end_with_the_last_handle() {
    let _turn = turn();
    seen(every(0), |read| {
        let handle = handle(&Config::default());
        let buffer = handle.pool().alloc(handle.stream(), 4096).expect("allocates");
        observe::collect();
        let used = read().count("verdigris_pool_used_bytes", &["device=cuda:0"]);
        assert!(used >= 4096, "{used}");
        fake::lose_device(true);
        observe::collect();
        let lost = read().count("verdigris_pool_used_bytes", &["device=cuda:0"]);
        fake::lose_device(false);
        assert_eq!(lost, used);
        drop((buffer, handle));
        observe::collect();
        let seen = read();
        for name in ["pool_reserved_bytes", "pool_used_bytes", "overdue_executions"] {
            let name = format!("verdigris_{name}");
            assert_eq!(seen.0.keys().filter(|key| key.starts_with(&name)).count(), 1, "{name} is set once more");
            assert_eq!(seen.count(&name, &["device=cuda:0"]), 0, "{name}");
        }
    });
}

/// F1: workspace that cannot be had is counted, an execution with less too, and the event says what was asked for, what would do, and who has the memory.
#[test]
fn memory_that_is_lacking_is_accounted_for() {
    let _turn = turn();
    let work = |heard: &Heard, read: &dyn Fn() -> Seen| {
        let handle = handle(&Config::default());
        let graph = graph();
        let plan = handle.plan_graph(&graph, &Policy::default()).expect("plans");
        let (asked, least) = (plan.workspace_bytes(), plan.least_workspace_bytes());
        assert!(asked > least, "{}", plan.explain());
        let buffers = buffers(&handle, &plan);
        let small = PoolOptions { limit_bytes: Some(asked - 1), ..PoolOptions::default() };
        let small = Pool::new(handle.context(), small).expect("makes a pool");
        plan.execute_from(handle.stream(), &bound(&buffers), &small).expect("executes in less");
        let seen = read();
        assert_eq!(seen.count("verdigris_workspace_failures_total", &["device=cuda:0"]), 1);
        assert_eq!(seen.count("verdigris_fallbacks_total", &["reason=workspace"]), 1);
        assert_eq!(seen.count("verdigris_errors_total", &[]), 0, "it was computed after all");
        // What was asked for beside what it ran in.
        assert_eq!(seen.values("verdigris_workspace_bytes", &["device=cuda:0"]), [asked as f64]);
        let had = seen.values("verdigris_workspace_had_bytes", &["device=cuda:0"]);
        assert!(had.len() == 1 && (least as f64..asked as f64).contains(&had[0]), "{had:?}");
        let account = handle.memory().expect("asks");
        assert!(account.pool_used_bytes > 0 && account.total_bytes > account.free_bytes, "{account}");
        assert!(account.to_string().contains("held by this pool"), "{account}");
        let told = heard.take("memory");
        assert_eq!(told.len(), 1, "{told:?}");
        assert_eq!((told[0].field("graph"), told[0].field("device")), ("watched", "cuda:0"));
        let bytes = |name: &str| told[0].number(name) as u64;
        assert_eq!((bytes("asked_bytes"), bytes("least_bytes")), (asked, least));
        assert_eq!((bytes("total_bytes"), bytes("free_bytes")), (account.total_bytes, account.free_bytes));
        assert_eq!(bytes("others_bytes"), bytes("total_bytes") - bytes("free_bytes") - bytes("pool_reserved_bytes"));
        assert!(bytes("pool_used_bytes") > 0 && told[0].field("account").contains("held by others"), "{told:?}");
    };
    hear(|heard| seen(every(0), |read| work(heard, read)));
}

/// F1: the typed error itself says what was asked for, who holds the memory, and what a smaller plan needs. Of a pool's limit, of a buffer that is too
/// short, and of a device that is full.
#[test]
fn an_error_of_memory_says_who_holds_it_and_what_would_do() {
    let _turn = turn();
    seen(every(0), |read| {
        let handle = handle(&Config::default());
        let plan = handle.plan_graph(&between(), &Policy::default()).expect("plans");
        let least = plan.least_workspace_bytes();
        assert!(least > 256, "a temporary: {}", plan.explain());
        let buffers = buffers(&handle, &plan);
        let run =
            |source: &dyn WorkspaceSource| plan.execute_from(handle.stream(), &bound(&buffers), source).expect_err("nothing to be had");
        let whose = handle.memory().expect("asks");
        let said = |error: &Error, least: u64| {
            let text = error.to_string();
            assert!(
                text.contains(&format!("the plan's smallest ways need {least}; of the device's {} bytes: ", whose.total_bytes)),
                "{text}"
            );
            assert!(text.contains("held by this pool (") && text.contains("held by others"), "{text}");
            assert_eq!(error.kind(), "out_of_memory");
        };

        let limited = Pool::new(handle.context(), PoolOptions { limit_bytes: Some(least - 1), ..PoolOptions::default() }).expect("a pool");
        let error = run(&limited);
        said(&error, least);
        let Error::OutOfMemory { source, asked_bytes, least_bytes, account: Some(account) } = &error else { panic!("{error:?}") };
        assert_eq!((*asked_bytes, *least_bytes, *account), (least, least, whose));
        assert!(matches!(**source, verdigris_cuda::Error::PoolLimit { requested_bytes, .. } if requested_bytes == least), "{source:?}");

        let short = handle.pool().alloc(handle.stream(), 256).expect("allocates");
        let whose = handle.memory().expect("asks");
        let error = run(&short);
        said(&error, least);
        let Error::NoWorkspace { needed_bytes, lent_bytes, least_bytes, account } = error else { panic!("{error:?}") };
        assert_eq!((needed_bytes, lent_bytes, least_bytes, account), (least, 256, Some(least), Some(whose)));

        fake::refuse_memory(Some((0, u32::MAX)));
        let error = run(handle.pool());
        fake::refuse_memory(None);
        said(&error, least);
        let Error::OutOfMemory { source, .. } = &error else { panic!("{error:?}") };
        assert!(matches!(**source, verdigris_cuda::Error::OutOfMemory { .. }), "{source:?}");
        // None of the three has run, and each was asked for.
        let seen = read();
        let asked = plan.workspace_bytes() as f64;
        assert_eq!(seen.values("verdigris_workspace_bytes", &[]), [asked; 3]);
        assert_eq!(seen.values("verdigris_workspace_had_bytes", &[]), [0.0; 3]);
    });
}

/// Two products with a tensor between them that nobody binds.
fn between() -> Graph {
    let mut g = GraphBuilder::new("two products");
    let x = g.tensor("x", DType::F32, Layout::row_major(&[64, 64]).expect("small"));
    let h = g.matmul("first", x, x, Precision::Ieee).expect("fits");
    let y = g.matmul("second", h, h, Precision::Ieee).expect("fits");
    g.store(y, "y", DType::F32).expect("known");
    g.finish().expect("valid")
}

/// F7: a second process fills the device. What we ask for cannot be had, the error and the metric say so, and the account says who holds the memory; when the
/// neighbour is gone the same plan runs.
#[test]
fn a_neighbour_that_fills_the_device_is_seen_and_named() {
    let _turn = turn();
    hear(|heard| {
        seen(every(0), |read| {
            let device = Device::gpu(handle(&Config::default()), Policy::default());
            let handle = device.handle().expect("a GPU");
            let plan = device.plan(&graph()).expect("plans");
            assert!(plan.workspace_bytes() > 0);
            let buffers = buffers(handle, plan.on_a_gpu().expect("a GPU's"));
            let run = || plan.run(&mut bound(&buffers), Some(handle.stream()), verdigris::Workspace::Own);
            run().expect("alone on the device");
            fake::refuse_memory(Some((0, u32::MAX)));
            let ran = run();
            fake::refuse_memory(None);
            let seen = read();
            assert!(seen.count("verdigris_workspace_failures_total", &["device=cuda:0"]) >= 1);
            match ran {
                Err(error) => {
                    assert_eq!(error.kind(), "out_of_memory", "{error}");
                    assert_eq!(seen.count("verdigris_errors_total", &["kind=out_of_memory", "device=cuda:0"]), 1);
                }
                // A way that needs none.
                Ok(()) => {
                    assert_eq!((plan.least_workspace_bytes(), seen.count("verdigris_fallbacks_total", &["reason=workspace"])), (0, 1))
                }
            }
            let told = heard.take("memory");
            assert!(!told.is_empty() && told.iter().all(|lack| lack.field("graph") == "watched"), "{told:?}");
            assert!(told[0].number("others_bytes") > told[0].number("total_bytes") / 2.0, "{told:?}");
            let account = handle.memory().expect("asks");
            assert!(account.others_bytes() > account.total_bytes / 2, "{account}");
            assert!(account.to_string().contains("held by others"), "{account}");
            run().expect("the neighbour is gone");
        })
    });
}

/// M4, F2: each error that a caller gets is counted by whose fault it is.
#[test]
fn errors_are_counted_by_kind() {
    let _turn = turn();
    seen(every(0), |read| {
        let device = Device::gpu(handle(&Config::default()), Policy::default());
        let wrong = Policy { limits: verdigris::Limits { workspace_bytes: Some(0), ..verdigris::Limits::default() }, ..Policy::default() };
        let error = device.plan_under(&between(), &wrong, &mut |_| {}).err().expect("the product between has no room");
        assert_eq!(error.kind(), "out_of_memory", "{error}");
        let plan = Device::cpu().plan(&cpu_graph()).expect("plans");
        let error = plan.run(&mut [], None, verdigris::Workspace::Own).expect_err("nothing is bound");
        assert_eq!(error.kind(), "binding");
        let seen = read();
        assert_eq!(seen.count("verdigris_errors_total", &["kind=out_of_memory", "device=cuda:0"]), 1);
        assert_eq!(seen.count("verdigris_errors_total", &["kind=binding", "device=cpu"]), 1);
        assert_eq!(seen.count("verdigris_errors_total", &[]), 2);
    });
}

fn cpu_graph() -> Graph {
    let rows = |dims: &[u64]| Layout::row_major(dims).expect("small");
    let mut g = GraphBuilder::new("on the CPU");
    let x = g.tensor("x", DType::F32, rows(&[4, 4]));
    let y = g.matmul("product", x, x, Precision::Ieee).expect("fits");
    let y = g.unary("relu", UnaryOp::Relu, y).expect("fits");
    let y = g.binary("sum", BinaryOp::Add, y, x).expect("fits");
    g.store(y, "y", DType::F32).expect("known");
    g.finish().expect("valid")
}

#[test]
fn the_cpu_tells_the_same() {
    let _turn = turn();
    seen(every(0), |read| {
        let (device, graph) = (Device::cpu(), cpu_graph());
        let plan = device.plan(&graph).expect("plans");
        let x = Tensor::from_values(&device, DType::F32, &[4, 4], &[1.0; 16]).expect("fits");
        let uid = plan.inputs().next().expect("an input").uid;
        for _ in 0..3 {
            device.run(&plan, &[(uid, &x)], &[]).expect("runs");
        }
        let seen = read();
        let parts = plan.engines().len() as u64;
        assert_eq!(seen.count("verdigris_plans_total", &["device=cpu"]), 1);
        assert_eq!(seen.count("verdigris_choices_total", &["chosen_by=cpu", "device=cpu"]), parts);
        assert_eq!(seen.count("verdigris_executions_total", &["device=cpu", "dtype=f32"]), 3 * parts);
        assert_eq!(seen.count("verdigris_device_seconds", &["device=cpu"]), 3 * parts);
    });
}

/// Whoever reads of a choice reads what it was chosen over, and by how much.
#[test]
fn a_choice_is_told_with_the_second_best_way() {
    let _turn = turn();
    hear(|heard| {
        seen(every(0), |_| {
            let handle = handle(&Config { shipped: false, ..Config::default() });
            let problem = Problem::Gemm(GemmProblem::packed(96, 96, 64, DType::F32, DType::F32).expect("a plain product"));
            let limits = verdigris::Limits::default();
            let words = |way: &verdigris::Ranked| format!("{} {}", way.engine.name, way.knobs);
            let chosen = handle.choose(&problem, &limits).expect("chooses");
            let ranked = handle.survey(&problem, &limits).expect("asks").ranked;
            let is_other = |way: &&verdigris::Ranked| words(way) != words(&chosen.way);
            let second = ranked.iter().filter(is_other).min_by(|a, b| a.cost.us.total_cmp(&b.cost.us)).expect("two engines take it");
            let told = heard.take("choice");
            assert_eq!(told.len(), 1, "{told:?}");
            assert_eq!((told[0].field("engine"), told[0].field("chosen_by")), (chosen.way.engine.name, "estimate"));
            assert_eq!(told[0].field("alternative"), words(second));
            assert_eq!(told[0].number("alternative_us"), second.cost.us);
            assert!(told[0].number("alternative_us") >= told[0].number("estimate_us"), "{told:?}");
            // One way alone has no second.
            let pin = verdigris::Limits { engine: Some("gemm.simt".to_owned()), ..limits };
            let ranked = handle.survey(&problem, &pin).expect("asks").ranked;
            assert_eq!(ranked.len(), 1, "{ranked:?}");
            let pins = vec![verdigris::Pin { engine: "gemm.simt".to_owned(), knobs: verdigris::Knobs::default(), part: None }];
            let policy = Policy { mode: verdigris::Mode::Pinned(pins), ..Policy::default() };
            handle.plan_graph(&single(), &policy).expect("plans");
            let told = heard.take("choice");
            assert_eq!((told.len(), told[0].field("chosen_by")), (1, "pin"), "{told:?}");
            assert!(!told[0].fields.contains_key("alternative") && !told[0].fields.contains_key("alternative_us"), "{told:?}");
        })
    });
}

/// One product.
fn single() -> Graph {
    let mut g = GraphBuilder::new("one product");
    let x = g.tensor("x", DType::F32, Layout::row_major(&[64, 64]).expect("small"));
    let y = g.matmul("product", x, x, Precision::Ieee).expect("fits");
    g.store(y, "y", DType::F32).expect("known");
    g.finish().expect("valid")
}

/// From a span of the device's time to the batch that it was part of, and to the requests of that batch: the spans are those of the service, and what the
/// device did is told while another batch is under way.
#[test]
fn a_span_of_the_device_leads_to_its_batch_and_to_the_requests() {
    let _turn = turn();
    hear(|heard| {
        seen(every(1), |_| {
            let handle = handle(&Config::default());
            let plan = handle.plan_graph(&single(), &Policy::default()).expect("plans");
            let buffers = buffers(&handle, &plan);
            let run = || plan.execute_from(handle.stream(), &bound(&buffers), handle.pool()).expect("executes");
            run();
            let batch = |number: u64, ids: &[&str]| {
                let batch = tracing::info_span!(target: "test", "batch", batch_id = number);
                for &id in ids {
                    batch.follows_from(tracing::info_span!(target: "test", "request", request_id = id).id());
                }
                batch
            };
            // The device has not ended the first batch when the second one begins.
            fake::hang_behind(Some(0));
            batch(1, &["a", "b"]).in_scope(run);
            assert_eq!(heard.take(observe::DEVICE_TARGET).len(), 0);
            batch(2, &["c"]).in_scope(|| {
                fake::hang_behind(None);
                run();
            });
            observe::collect();
            let told = heard.take(observe::DEVICE_TARGET);
            assert_eq!(told.len(), 2, "{told:?}");
            let requests_of = |device: &Said| {
                assert_eq!(device.within, None, "it stands in nobody else's span: {device:?}");
                let same = |(_, span): &(usize, Said)| span.field("execution") == device.field("execution");
                let executions: Vec<_> = heard.spans("execute").into_iter().filter(same).collect();
                assert_eq!(executions.len(), 1, "{executions:?}");
                assert_eq!(executions[0].1.field("graph"), "one product");
                let batch = heard.span(executions[0].1.within.expect("a batch"));
                let requests = batch.follows.iter().map(|&place| heard.span(place).field("request_id").to_owned());
                (batch.field("batch_id").to_owned(), requests.collect::<Vec<_>>())
            };
            assert_eq!(requests_of(&told[0]), ("1".to_owned(), vec!["a".to_owned(), "b".to_owned()]));
            assert_eq!(requests_of(&told[1]), ("2".to_owned(), vec!["c".to_owned()]));
        })
    });
}

/// M8, F6: another choice than before is counted, and so is a remembered one that can no longer be had.
#[test]
fn switches_are_counted() {
    let _turn = turn();
    hear(|heard| {
        seen(every(0), |read| {
            let handle = handle(&Config { shipped: false, ..Config::default() });
            let problem = Problem::Gemm(GemmProblem::packed(96, 96, 64, DType::F32, DType::F32).expect("a plain product"));
            let limits = verdigris::Limits::default();
            let chosen = handle.choose(&problem, &limits).expect("chooses");
            handle.choose(&problem, &limits).expect("chooses");
            assert_eq!(read().count("verdigris_choice_switches_total", &[]), 0);
            assert_eq!(heard.take("switch").len(), 0);
            let question = handle.question(&problem, &limits);
            let answer = Answer::of(&chosen.way, 1.0);
            let of = |version: u32| Answer { version, ..answer.clone() };
            handle.plan_cache().keep(&question, &of(answer.version + 1)).expect("in memory");
            handle.choose(&problem, &limits).expect("chooses");
            assert_eq!(read().count("verdigris_choice_switches_total", &["op=gemm"]), 1, "the cache's version is passed over");
            let told = heard.take("switch");
            assert_eq!(told.iter().map(Said::part).collect::<Vec<_>>(), [(problem.to_string(), chosen.way.engine.name.to_owned())]);
            let why = format!("measured with version {} of the engine, and this build has version {}", answer.version + 1, answer.version);
            assert!(told[0].field("passed_over").contains(&why), "{told:?}");
            let all = verdigris::Limits { settings: verdigris::Settings::All, ..limits.clone() };
            let survey = handle.survey(&problem, &all).expect("asks");
            let is_other = |way: &&verdigris::Ranked| (way.engine.name, &way.knobs) != (chosen.way.engine.name, &chosen.way.knobs);
            let other = survey.ranked.iter().find(is_other).expect("another way");
            handle.plan_cache().keep(&question, &Answer::of(other, 0.5)).expect("in memory");
            handle.load(&problem, other).expect("loads");
            let now = handle.choose(&problem, &limits).expect("chooses");
            assert_eq!((now.way.engine.name, &now.way.knobs), (other.engine.name, &other.knobs), "{}", now.explanation);
            assert_eq!(read().count("verdigris_choice_switches_total", &["op=gemm"]), 1, "another way than before");
            let told = heard.take("switch");
            assert_eq!(told.iter().map(Said::part).collect::<Vec<_>>(), [(problem.to_string(), other.engine.name.to_owned())]);
            assert_eq!(told[0].field("before"), format!("{} {}", chosen.way.engine.name, chosen.way.knobs));
        })
    });
}

/// A program whose handles are never dropped has its counts written all the same.
#[test]
fn a_workload_is_written_though_its_handle_stays() {
    let _turn = turn();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("workload.txt");
    let handle = handle(&Config { record: Some(path.clone()), ..Config::default() });
    let plan = handle.plan_graph(&graph(), &Policy::default()).expect("plans");
    let buffers = buffers(&handle, &plan);
    plan.execute_from(handle.stream(), &bound(&buffers), handle.pool()).expect("executes");
    let sum = || read_workload(&path).expect("reads").entries.iter().map(|entry| entry.executions).sum::<u64>();
    // Whoever scrapes each second writes nothing.
    observe::collect();
    assert_eq!(sum(), 0);
    observe::write_workloads();
    assert_eq!(sum(), plan.parts().count() as u64);
}

/// Several processes append to one file; what a killed one left of a line is passed over.
#[test]
fn a_workload_is_recorded_whether_or_not_anybody_listens() {
    let _turn = turn();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("workload.txt");
    let config = Config { record: Some(path.clone()), ..Config::default() };
    let graph = graph();
    let run = |times: usize| {
        let handle = handle(&config);
        let plan = handle.plan_graph(&graph, &Policy::default()).expect("plans");
        assert!(path.exists(), "problems are told when they are planned");
        let buffers = buffers(&handle, &plan);
        for _ in 0..times {
            plan.execute_from(handle.stream(), &bound(&buffers), handle.pool()).expect("executes");
        }
        assert_eq!(handle.record_trouble(), None);
        plan.parts().count()
    };
    let parts = run(3);
    run(4);
    let entries = read_workload(&path).expect("reads").entries;
    assert_eq!(entries.len(), parts, "each problem once");
    assert!(entries.iter().all(|entry| entry.executions == 7), "{entries:?}");
    assert!(entries.iter().any(|entry| matches!(entry.problem, Problem::Gemm(_))));
    let whole = std::fs::read_to_string(&path).expect("reads");
    std::fs::write(&path, format!("{whole}5\tgemm bf1")).expect("writes");
    assert_eq!(read_workload(&path).expect("reads").entries, entries);
    std::fs::write(&path, format!("{whole}five\tgemm\n")).expect("writes");
    let recorded = read_workload(&path).expect("reads");
    assert_eq!((&recorded.entries, recorded.bad_lines), (&entries, 1));
    let remark = recorded.remark().expect("a line is passed over");
    assert!(remark.contains("workload.txt, line") && remark.contains("`five` is no number"), "{remark}");
    // A file that cannot be written stops nothing, and is told.
    let nowhere = Config { record: Some(folder.path().join("missing/workload.txt")), ..Config::default() };
    let handle = handle(&nowhere);
    handle.plan_graph(&graph, &Policy::default()).expect("plans all the same");
    assert!(handle.record_trouble().is_some_and(|trouble| trouble.contains("missing/workload.txt")));
    assert!(matches!(Device::open("cpu", &nowhere, Policy::default()), Ok(_) | Err(Error::DeviceName { .. })));
}
