//! Numeric guards: a planted NaN and a planted wrong result are found, nothing else is, and no execution is changed, failed or waited for. On the CPU, and on
//! the driver without a device, whose kernels leave results as they lie: what a test puts there is the result. Who listens is known to the whole process,
//! so that these tests take turns.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use verdigris::observe::{self, Guards, Listen, Sampling};
use verdigris::{Binding, Config, Device, Handle, Plan, Policy, Tensor, Workspace};
use verdigris_cuda::{DeviceBuffer, fake};
use verdigris_graph::{Graph, GraphBuilder, Precision, Uid, UnaryOp};
use verdigris_tensor::{DType, Layout};

mod heard;

use heard::{Said, hear};

static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

const OFTEN: u32 = 1_000_000;

fn every(every: u32) -> Sampling {
    Sampling { every, per_second: OFTEN }
}

fn numbers() -> Guards {
    Guards { numbers: every(1), ..Guards::default() }
}

fn drift() -> Guards {
    Guards { drift: every(1), ..Guards::default() }
}

/// `y = relu(x·w)`, or the product alone.
fn product(dtype: DType, extent: u64, is_single: bool) -> Graph {
    let square = || Layout::row_major(&[extent, extent]).expect("small");
    let mut g = GraphBuilder::new("guarded");
    let (x, w) = (g.tensor("x", dtype, square()), g.tensor("w", dtype, square()));
    let y = g.matmul("product", x, w, Precision::Fp32).expect("fits");
    let y = if is_single { y } else { g.unary("relu", UnaryOp::Relu, y).expect("fits") };
    g.store(y, "y", dtype).expect("known");
    g.finish().expect("valid")
}

/// What the metrics say once everything was looked at: name and labels, with counts of counters and histograms.
fn told(snapshotter: &Snapshotter) -> HashMap<String, u64> {
    (0..8).for_each(|_| observe::collect());
    let all = snapshotter.snapshot().into_vec().into_iter().map(|(key, _, _, value)| {
        let labels: Vec<String> = key.key().labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
        let count = match value {
            DebugValue::Counter(count) => count,
            DebugValue::Histogram(values) => values.len() as u64,
            DebugValue::Gauge(value) => value.into_inner() as u64,
        };
        (format!("{}{{{}}}", key.key().name(), labels.join(",")), count)
    });
    let words = ["number_checks", "nonfinite", "amax", "drift", "guard_skips"];
    all.filter(|(key, _)| words.iter().any(|word| key.contains(word))).collect()
}

/// What `work` makes the guards say.
fn seen(guards: Guards, work: impl FnOnce()) -> HashMap<String, u64> {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || {
        let _listening = observe::listen(Listen { sampling: Sampling { every: 0, per_second: 0 }, guards, ..Listen::default() });
        work();
        told(&snapshotter)
    })
}

fn says(told: &HashMap<String, u64>, expected: &[(&str, u64)]) {
    let expected: HashMap<String, u64> = expected.iter().map(|(key, count)| ((*key).to_owned(), *count)).collect();
    assert_eq!(told, &expected);
}

/// A product on the CPU, of these values of `x`: its bits.
fn on_cpu(x: &[f64]) -> Vec<u8> {
    let device = Device::cpu();
    let plan = device.plan(&product(DType::F32, 4, true)).expect("plans");
    let w = Tensor::from_values(&device, DType::F32, &[4, 4], &[0.5; 16]).expect("fits");
    let x = Tensor::from_values(&device, DType::F32, &[4, 4], x).expect("fits");
    let uids: Vec<Uid> = plan.inputs().map(|input| input.uid).collect();
    let mut outputs = device.run(&plan, &[(uids[0], &x), (uids[1], &w)], &[]).expect("runs");
    outputs.remove(0).to_bytes().expect("reads")
}

#[test]
fn nothing_is_looked_at_unless_it_is_asked_for() {
    let _turn = turn();
    says(&seen(Guards::default(), || drop(on_cpu(&[f64::NAN; 16]))), &[]);
}

#[test]
fn a_planted_nan_is_found_on_the_cpu() {
    let _turn = turn();
    let looked = "verdigris_number_checks_total{op=gemm,device=cpu}";
    let amax = "verdigris_amax_ratio{op=gemm,device=cpu}";
    let mut x = [1.0; 16];
    says(&seen(numbers(), || drop(on_cpu(&x))), &[(looked, 1), (amax, 1)]);
    x[5] = f64::INFINITY;
    says(&seen(numbers(), || drop(on_cpu(&x))), &[(looked, 1), (amax, 1), ("verdigris_nonfinite_total{op=gemm,device=cpu}", 1)]);
}

#[test]
fn a_right_result_is_within_its_bound_and_guards_change_no_bit() {
    let _turn = turn();
    let x: Vec<f64> = (0..16).map(|i| f64::from(i) * 0.3 - 2.0).collect();
    let plain = on_cpu(&x);
    let both = Guards { numbers: every(1), ..drift() };
    let told = seen(both, || assert_eq!(on_cpu(&x), plain));
    assert_eq!(told.get("verdigris_drift_checks_total{op=gemm,outcome=within,device=cpu}"), Some(&1), "{told:?}");
    assert_eq!(told.get("verdigris_drift_ratio{op=gemm,device=cpu}"), Some(&1), "{told:?}");
    assert_eq!(told.len(), 4, "{told:?}");
}

/// A plan on the driver without a device, with its memory.
struct OnFake {
    device: Device,
    plan: Plan,
    buffers: Vec<(Uid, String, DeviceBuffer)>,
}

impl OnFake {
    fn new(graph: &Graph) -> OnFake {
        let handle = Handle::on(&fake::context(), &Config::default()).expect("the fake is always there");
        let device = Device::gpu(handle, Policy::default());
        let plan = device.plan(graph).expect("plans");
        let handle = device.handle().expect("a GPU");
        let make = |bytes| handle.pool().alloc_zeroed(handle.stream(), bytes).expect("allocates");
        let buffers = plan.bound().iter().map(|tensor| (tensor.uid, tensor.name.clone(), make(tensor.bytes))).collect();
        OnFake { device, plan, buffers }
    }

    fn put(&mut self, name: &str, values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let stream = self.device.handle().expect("a GPU").stream();
        let (.., buffer) = self.buffers.iter_mut().find(|(_, known, _)| known == name).expect("bound");
        buffer.upload(stream, 0, &bytes).expect("fits");
    }

    fn run(&self) {
        let mut bindings: Vec<_> = self.buffers.iter().map(|(uid, _, buffer)| (*uid, Binding::Buffer(buffer.slice()))).collect();
        let stream = self.device.handle().expect("a GPU").stream();
        self.plan.run(&mut bindings, Some(stream), Workspace::Own).expect("a guard fails no execution");
    }
}

/// 8 by 8, of which the identity times `x` is `x`.
fn identity() -> Vec<f32> {
    (0..64).map(|i| if i / 8 == i % 8 { 1.0 } else { 0.0 }).collect()
}

#[test]
fn a_planted_wrong_result_is_beyond_its_bound_on_a_gpu() {
    let _turn = turn();
    let mut on = OnFake::new(&product(DType::F32, 8, true));
    let x: Vec<f32> = (0..64).map(|i| i as f32 * 0.25 - 3.0).collect();
    on.put("x", &x);
    on.put("w", &identity());
    on.put("y", &x);
    let within = "verdigris_drift_checks_total{op=gemm,outcome=within,device=cuda:0}";
    let beyond = "verdigris_drift_checks_total{op=gemm,outcome=beyond,device=cuda:0}";
    let ratio = "verdigris_drift_ratio{op=gemm,device=cuda:0}";
    says(&seen(drift(), || on.run()), &[(within, 1), (ratio, 1)]);
    let mut wrong = x.clone();
    wrong[37] += 0.001;
    on.put("y", &wrong);
    says(&seen(drift(), || on.run()), &[(beyond, 1), (ratio, 1)]);
    wrong[37] = f32::NAN;
    on.put("y", &wrong);
    let looked = "verdigris_number_checks_total{op=gemm,device=cuda:0}";
    let both = Guards { numbers: every(1), ..drift() };
    let amax = "verdigris_amax_ratio{op=gemm,device=cuda:0}";
    let nonfinite = "verdigris_nonfinite_total{op=gemm,device=cuda:0}";
    says(&seen(both, || on.run()), &[(beyond, 1), (ratio, 1), (looked, 1), (amax, 1), (nonfinite, 1)]);
}

/// F5: the same input gives other numbers. Last digits may differ, as another engine's would; beyond what rounding explains the metric moves that the alert
/// VerdigrisDrift looks at, and once runs agree with the bound again it does not.
#[test]
fn runs_that_differ_are_told_apart_from_rounding() {
    let _turn = turn();
    let mut on = OnFake::new(&product(DType::F32, 8, true));
    let x: Vec<f32> = (0..64).map(|i| (i as f32 * 0.37).sin()).collect();
    on.put("x", &x);
    on.put("w", &identity());
    let within = "verdigris_drift_checks_total{op=gemm,outcome=within,device=cuda:0}";
    let beyond = "verdigris_drift_checks_total{op=gemm,outcome=beyond,device=cuda:0}";
    let ratio = "verdigris_drift_ratio{op=gemm,device=cuda:0}";
    let engine = on.plan.engines()[0].engine;
    let mut run = |difference: f32| {
        let y: Vec<f32> = x.iter().map(|value| value * (1.0 + difference)).collect();
        on.put("y", &y);
        hear(|heard| (seen(drift(), || on.run()), heard.take("drift")))
    };
    let agrees = |(told, events): (HashMap<String, u64>, Vec<Said>)| {
        says(&told, &[(within, 1), (ratio, 1)]);
        assert!(events.is_empty(), "{events:?}");
    };
    agrees(run(0.0));
    agrees(run(f32::EPSILON / 2.0));
    let (told, events) = run(1e-3);
    says(&told, &[(beyond, 1), (ratio, 1)]);
    // The event says of what, and by whom.
    assert_eq!(events.len(), 1, "{events:?}");
    let about = ["graph", "op", "engine", "tensor", "device"].map(|name| events[0].field(name));
    assert_eq!(about, ["guarded", "gemm", engine, "y", "cuda:0"]);
    assert!(events[0].number("ratio") > 1.0 && events[0].number("wrong") > 0.0, "{events:?}");
    agrees(run(0.0));
}

#[test]
fn nobody_waits_for_the_device_and_no_memory_is_kept() {
    let _turn = turn();
    let on = OnFake::new(&product(DType::F32, 8, true));
    on.run();
    let before = fake::live_allocations();
    let looked = "verdigris_number_checks_total{op=gemm,device=cuda:0}";
    let amax = "verdigris_amax_ratio{op=gemm,device=cuda:0}";
    let unread = "verdigris_guard_skips_total{guard=numbers,reason=unread,device=cuda:0}";
    // The device hangs behind the execution: what is copied is not there, and not waited for. Eight wait, what comes then is left out.
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || {
        let _listening = observe::listen(Listen { guards: numbers(), ..Listen::default() });
        fake::hang_behind(Some(0));
        (0..10).for_each(|_| on.run());
        says(&told(&snapshotter), &[(unread, 2)]);
        fake::hang_behind(None);
        // One collection has time for all of them.
        observe::collect();
        (0..8).for_each(|_| on.run());
        says(&told(&snapshotter), &[(looked, 16), (amax, 16), (unread, 0)]);
        // What waits when the last one goes who listens is not kept.
        fake::hang_behind(Some(0));
        (0..3).for_each(|_| on.run());
        assert!(fake::live_allocations() > before);
    });
    fake::hang_behind(None);
    assert_eq!(fake::live_allocations(), before);
}

#[test]
fn what_stands_in_the_way_is_counted_and_fails_nobody() {
    let _turn = turn();
    let skip = |guard: &str, reason: &str| format!("verdigris_guard_skips_total{{guard={guard},reason={reason},device=cuda:0}}");
    let on = OnFake::new(&product(DType::F32, 8, true));
    on.run();
    let live = fake::live_allocations();
    fake::set_capturing(true);
    let told = seen(numbers(), || on.run());
    fake::set_capturing(false);
    says(&told, &[(&skip("numbers", "capture"), 1)]);
    // No memory for the copies; the execution itself asks for none.
    assert_eq!(on.plan.workspace_bytes(), 0, "a small product needs no workspace");
    fake::refuse_memory(Some((0, u32::MAX)));
    let told = seen(Guards { drift: every(1), ..numbers() }, || on.run());
    fake::refuse_memory(None);
    says(&told, &[(&skip("numbers", "memory"), 1), (&skip("drift", "memory"), 1)]);
    // Of outputs as much is looked at as the bound leaves; a shadow execution needs all.
    let small = Guards { most_bytes: 100, numbers: every(1), ..drift() };
    let looked = "verdigris_number_checks_total{op=gemm,device=cuda:0}";
    let amax = "verdigris_amax_ratio{op=gemm,device=cuda:0}";
    says(&seen(small, || on.run()), &[(looked, 1), (amax, 1), (&skip("drift", "size"), 1)]);
    // Of several ops everything between is computed; of one alone the elements that are compared.
    let large = OnFake::new(&product(DType::F32, 512, false));
    says(&seen(drift(), || large.run()), &[(&skip("drift", "work"), 1)]);
    drop(large);
    assert_eq!(fake::live_allocations(), live);
}

#[test]
fn checks_are_as_rare_as_asked() {
    let _turn = turn();
    let on = OnFake::new(&product(DType::F32, 8, true));
    let run = |sampling: Sampling| {
        let told = seen(Guards { numbers: sampling, ..Guards::default() }, || {
            for _ in 0..12 {
                on.run();
                observe::collect();
            }
        });
        told.get("verdigris_number_checks_total{op=gemm,device=cuda:0}").copied().unwrap_or(0)
    };
    assert_eq!(run(every(4)), 3);
    // Others have taken of this second's budget. Two seconds may be touched.
    std::thread::sleep(Duration::from_millis(1100));
    let few = run(Sampling { every: 1, per_second: 2 });
    assert!((2..=4).contains(&few), "{few}");
}
