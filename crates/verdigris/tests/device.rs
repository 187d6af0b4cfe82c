//! Plans on a GPU: right results from one thread, from several, and from a captured graph; what does not fit is refused before anything
//! is submitted. Where there is no GPU, each test says so and passes.

use verdigris::error::BindingRule;
use verdigris::{Binding, Config, Error, Handle, Limits, ProblemPlan};
use verdigris_cuda::{DeviceBuffer, Stream};
use verdigris_graph::{GemmProblem, Problem};
use verdigris_reference::compare::compare;
use verdigris_reference::data::{self, Distribution};
use verdigris_reference::run::{Expected, Inputs, Positions, run};
use verdigris_tensor::DType;

fn handle(test: &str) -> Option<Handle> {
    // No folder: the tests see their own kernels compiled.
    match Handle::open(&Config::default()) {
        Ok(handle) => Some(handle),
        Err(Error::Device(error @ (verdigris_cuda::Error::NoDriver { .. } | verdigris_cuda::Error::NoDevice))) => {
            eprintln!("{test}: skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// A product, its inputs and what comes out.
struct Example {
    problem: Problem,
    inputs: Inputs,
    expected: Expected,
}

impl Example {
    fn new(m: u64, n: u64, k: u64) -> Example {
        let problem = Problem::Gemm(GemmProblem::packed(m, n, k, DType::Bf16, DType::Bf16).expect("a plain product"));
        let inputs = data::inputs(&problem, Distribution::Normal, m + n + k);
        let expected = run(&problem, &inputs, Positions::All).expect("computes").remove(0);
        Example { problem, inputs, expected }
    }

    fn operands(&self, handle: &Handle, stream: &Stream) -> [DeviceBuffer; 3] {
        let Problem::Gemm(gemm) = &self.problem else { unreachable!("made in `new`") };
        let upload = |bytes: &[u8]| handle.pool().alloc_from(stream, bytes).expect("uploads");
        [upload(&self.inputs.buffers[&gemm.a.slot]), upload(&self.inputs.buffers[&gemm.b.slot]), upload(&self.before())]
    }

    fn before(&self) -> Vec<u8> {
        data::output_buffer(&self.expected, &self.inputs)
    }

    fn assert_right(&self, after: &[u8]) {
        let report = compare(&self.expected, &self.before(), after);
        assert!(report.passes(), "{report}");
    }
}

fn bindings(operands: &[DeviceBuffer; 3]) -> [Binding<'_>; 3] {
    operands.each_ref().map(|buffer| Binding::Buffer(buffer.slice()))
}

fn execute(handle: &Handle, plan: &ProblemPlan, example: &Example, stream: &Stream) -> Vec<u8> {
    let operands = example.operands(handle, stream);
    let workspace = handle.pool().alloc(stream, plan.workspace_bytes()).expect("allocates");
    plan.execute(stream, &bindings(&operands), workspace.slice()).expect("executes");
    operands[2].download_all(stream).expect("downloads")
}

#[test]
fn a_plan_computes_what_the_reference_does() {
    let Some(handle) = handle("a_plan_computes_what_the_reference_does") else { return };
    for (m, n, k) in [(256, 192, 128), (1, 1, 1), (129, 65, 33), (64, 512, 1024)] {
        let example = Example::new(m, n, k);
        for way in handle.survey(&example.problem, &Limits::default()).expect("asks").ranked {
            let plan = handle.load(&example.problem, &way).expect("prepares");
            example.assert_right(&execute(&handle, &plan, &example, handle.stream()));
        }
    }
}

#[test]
fn a_plan_is_shared_by_threads_and_loads_nothing_twice() {
    let Some(handle) = handle("a_plan_is_shared_by_threads_and_loads_nothing_twice") else { return };
    let example = Example::new(384, 320, 256);
    let plan = handle.plan(&example.problem, &Limits::default()).expect("plans");
    let loaded = handle.loader().cache.loaded_count();
    let results: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let stream = Stream::new(handle.context()).expect("a stream");
                    (0..8).map(|_| execute(&handle, &plan, &example, &stream)).collect::<Vec<_>>()
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
    });
    for result in &results {
        example.assert_right(result);
        assert!(!plan.notes().deterministic || *result == results[0], "noted as deterministic");
    }
    let again = handle.plan(&example.problem, &Limits::default()).expect("plans again");
    assert!(again.reports().iter().all(|(_, report)| report.origin == verdigris_cuda::Origin::Memory));
    assert_eq!(handle.loader().cache.loaded_count(), loaded);
}

#[test]
fn a_captured_plan_computes_at_each_replay() {
    let Some(handle) = handle("a_captured_plan_computes_at_each_replay") else { return };
    let example = Example::new(200, 136, 512);
    let plan = handle.plan(&example.problem, &Limits::default()).expect("plans");
    let stream = handle.stream();
    let mut operands = example.operands(&handle, stream);
    let workspace = handle.pool().alloc(stream, plan.workspace_bytes()).expect("allocates");
    let graph = stream.capture::<Error>(|| plan.execute(stream, &bindings(&operands), workspace.slice())).expect("captures");
    let mut graph = graph.instantiate().expect("instantiates");
    for _ in 0..3 {
        operands[2].upload(stream, 0, &example.before()).expect("uploads");
        graph.launch(stream).expect("launches");
        example.assert_right(&operands[2].download_all(stream).expect("downloads"));
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_submitted() {
    let Some(handle) = handle("what_does_not_fit_is_refused_before_anything_is_submitted") else { return };
    let example = Example::new(64, 64, 64);
    let plan = handle.plan(&example.problem, &Limits::default()).expect("plans");
    let stream = handle.stream();
    let operands = example.operands(&handle, stream);
    let workspace = handle.pool().alloc(stream, plan.workspace_bytes()).expect("allocates");
    let slot = |slot: usize| Binding::Buffer(operands[slot].slice());
    let refused = |bindings: &[Binding<'_>], name: &str, rule: BindingRule| match plan.execute(stream, bindings, workspace.slice()) {
        Err(Error::Binding(error)) => assert_eq!((error.name.as_str(), error.rule), (name, rule), "{error}"),
        other => panic!("{other:?}"),
    };
    refused(&[slot(0), slot(1)], "slot 2", BindingRule::Missing);
    refused(&[slot(0), Binding::Scalar(1.0), slot(2)], "slot 1", BindingRule::Kind);
    let short = Binding::Buffer(operands[1].slice().part(0, 64 * 64 * 2 - 2).expect("a part"));
    refused(&[slot(0), short, slot(2)], "slot 1", BindingRule::Length);
    refused(&[slot(2), slot(1), slot(2)], "slot 2", BindingRule::Overlap);
    assert_eq!(operands[2].download_all(stream).expect("downloads"), example.before(), "nothing was written");
}

#[test]
fn an_engine_that_does_not_exist_is_named_with_those_that_do() {
    let Some(handle) = handle("an_engine_that_does_not_exist_is_named_with_those_that_do") else { return };
    let limits = Limits { engine: Some("gemm.magic".to_owned()), ..Limits::default() };
    let error = handle.plan(&Example::new(8, 8, 8).problem, &limits).expect_err("no such engine").to_string();
    assert!(error.contains("`gemm.magic`") && error.contains("gemm.simt"), "{error}");
}
