//! Plans of graphs on a driver without a device: what is chosen, remembered, laid out, launched and refused. Results are the GPU tests'.
#![forbid(unsafe_code)]

use std::time::Duration;

use verdigris::error::{BindingError, BindingRule};
use verdigris::explain::ChosenBy;
use verdigris::plan_cache::Answer;
use verdigris::{Binding, Config, Error, GraphPlan, Handle, Limits, Mode, Pin, Policy, Ranked, Settings, Stage, Tuning};
use verdigris_cuda::{DeviceBuffer, HostSlice, Pool, PoolOptions, fake};
use verdigris_engines::engine::Knobs;
use verdigris_graph::{
    Attention, AttentionSpec, BinaryOp, Conv, ConvDirection, Determinism, GemmProblem, Graph, GraphBuilder, HostScalar, Precision, Problem,
    RandomState, Real, ReductionOp, Uid, UnaryOp,
};
use verdigris_reference::graph_cases::GraphCase;
use verdigris_tensor::{DType, Layout};

fn handle(config: &Config) -> Handle {
    Handle::on(&fake::context(), config).expect("the fake is always there")
}

fn rows(dims: &[u64]) -> Layout {
    Layout::row_major(dims).expect("small")
}

/// Two linear layers with a residual; `h` and `y` are stored.
fn mlp(rows_of_x: u64) -> Graph {
    let mut g = GraphBuilder::new("mlp");
    let x = g.tensor("x", DType::F32, rows(&[rows_of_x, 64]));
    let w1 = g.tensor("w1", DType::F32, rows(&[64, 128]));
    let w2 = g.tensor("w2", DType::F32, rows(&[128, 64]));
    let factor = g.host_scalar("factor", DType::F32);
    let build = |g: &mut GraphBuilder| -> Result<(), verdigris_graph::Error> {
        let h = g.matmul("up", x, w1, Precision::Ieee)?;
        let h = g.unary("relu", UnaryOp::Relu, h)?;
        g.store(h, "h", DType::F32)?;
        let y = g.matmul("down", h, w2, Precision::Ieee)?;
        let y = g.scale("scale", y, HostScalar::Bound(factor))?;
        let y = g.binary("residual", BinaryOp::Add, y, x)?;
        g.store(y, "y", DType::F32)
    };
    build(&mut g).expect("fits");
    g.finish().expect("valid")
}

fn buffers(handle: &Handle, plan: &GraphPlan) -> Vec<(Uid, Option<DeviceBuffer>)> {
    let make = |bytes| handle.pool().alloc(handle.stream(), bytes).expect("allocates");
    plan.tensors().iter().map(|tensor| (tensor.uid, (!tensor.is_scalar).then(|| make(tensor.bytes)))).collect()
}

fn bindings<'b>(buffers: &'b [(Uid, Option<DeviceBuffer>)]) -> Vec<(Uid, Binding<'b>)> {
    let of = |buffer: &'b DeviceBuffer| Binding::Buffer(buffer.slice());
    buffers.iter().map(|(uid, buffer)| (*uid, buffer.as_ref().map_or(Binding::Scalar(0.5), of))).collect()
}

/// Memory of a GPU may be bound as often as one likes.
fn copied<'b>(bindings: &[(Uid, Binding<'b>)]) -> Vec<(Uid, Binding<'b>)> {
    let copy = |binding: &Binding<'b>| match binding {
        Binding::Buffer(slice) => Binding::Buffer(*slice),
        Binding::Scalar(value) => Binding::Scalar(*value),
        Binding::Integer(value) => Binding::Integer(*value),
        Binding::Unsigned(value) => Binding::Unsigned(*value),
        Binding::Host(_) => panic!("these plans run on a GPU"),
    };
    bindings.iter().map(|(uid, binding)| (*uid, copy(binding))).collect()
}

fn uid(plan: &GraphPlan, name: &str) -> Uid {
    plan.tensors().iter().find(|tensor| tensor.name == name).unwrap_or_else(|| panic!("no {name}")).uid
}

#[test]
fn a_graph_of_two_products_runs_as_two_parts() {
    let handle = handle(&Config::default());
    let plan = handle.plan_graph(&mlp(32), &Policy::default()).expect("plans");
    assert_eq!(plan.parts().count(), 2);
    let names: Vec<&str> = plan.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
    let mut sorted = names.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, ["factor", "h", "w1", "w2", "x", "y"]);
    let written: Vec<&str> = plan.tensors().iter().filter(|tensor| tensor.is_written).map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(written, ["h", "y"]);

    let buffers = buffers(&handle, &plan);
    let workspace = handle.pool().alloc(handle.stream(), plan.workspace_bytes()).expect("allocates");
    let launches: usize = plan.parts().map(|part| part.program().launch_count()).sum();
    fake::launch_count();
    let mut bound = bindings(&buffers);
    for _ in 0..bound.len() {
        // Any order will do.
        bound.rotate_left(1);
        plan.execute(handle.stream(), &bound, workspace.slice()).expect("executes");
        assert_eq!(fake::launch_count(), launches);
    }
    plan.execute_from(handle.stream(), &bound, handle.pool()).expect("executes");
    assert_eq!((fake::launch_count(), plan.downgrades()), (launches, 0));

    let text = plan.explain().to_string();
    assert!(text.contains("mlp on Fake: 2 parts") && text.contains("part 1: gemm") && text.contains("->"), "{text}");
    let record = serde_json::to_value(plan.explain()).expect("numbers and words");
    assert_eq!(record["parts"][0]["chosen_by"], "estimate");
    assert!(record["parts"][0]["ways"][0]["engine"].is_string(), "{record}");
    // Each kernel is counted once, however often it is planned with.
    let counts = handle.kernel_counts();
    assert_eq!(counts.compiled, handle.loader().cache.loaded_count() as u64, "{counts}");
    handle.plan_graph(&mlp(32), &Policy::default()).expect("plans");
    assert_eq!(handle.kernel_counts(), counts);
    // Plans may be shared between threads.
    fn shared<T: Send + Sync>(_: &T) {}
    shared(&plan);
}

#[test]
fn what_is_bound_wrongly_is_told_by_name_before_anything_is_launched() {
    let handle = handle(&Config::default());
    let plan = handle.plan_graph(&mlp(32), &Policy::default()).expect("plans");
    let buffers = buffers(&handle, &plan);
    let workspace = handle.pool().alloc(handle.stream(), plan.workspace_bytes()).expect("allocates");
    let good = bindings(&buffers);
    fake::launch_count();
    let refused = |bound: &[(Uid, Binding<'_>)]| match plan.execute(handle.stream(), bound, workspace.slice()) {
        Err(Error::Binding(error)) => {
            assert_eq!(fake::launch_count(), 0);
            error
        }
        other => panic!("{other:?}"),
    };
    let place = |name: &str| good.iter().position(|(known, _)| *known == uid(&plan, name)).expect("bound");
    let slice = |name: &str| {
        let (_, Binding::Buffer(slice)) = &good[place(name)] else { panic!("{name} is memory") };
        *slice
    };
    let replaced = |name: &str, binding| {
        let mut bound = copied(&good);
        bound[place(name)].1 = binding;
        bound
    };
    let says = |error: BindingError, name: &str, rule: BindingRule| assert_eq!((error.name.as_str(), error.rule), (name, rule), "{error}");

    let mut bound = copied(&good);
    bound.remove(place("w1"));
    says(refused(&bound), "w1", BindingRule::Missing);
    let mut bound = copied(&good);
    bound.push((Uid(99), Binding::Scalar(1.0)));
    says(refused(&bound), "#99", BindingRule::Unknown);
    bound.pop();
    bound.push(copied(&good).swap_remove(1));
    says(refused(&bound), &plan.tensors()[1].name, BindingRule::Twice);
    says(refused(&replaced("x", Binding::Scalar(1.0))), "x", BindingRule::Kind);
    let error = refused(&replaced("factor", Binding::Buffer(slice("x"))));
    assert_eq!(error.wanted, "a host scalar of f32");
    says(error, "factor", BindingRule::Kind);
    let short = slice("w1").part(0, 100).expect("a part");
    let needed_bytes = 64 * 128 * 4;
    let error = refused(&replaced("w1", Binding::Buffer(short)));
    assert_eq!(error, BindingError::new("w1", "memory of 32768 bytes", "100 bytes", BindingRule::Length));
    // An odd address: no f32 lies there.
    let large = handle.pool().alloc(handle.stream(), 2 * needed_bytes).expect("allocates");
    let odd = large.slice().part(2, needed_bytes).expect("a part");
    says(refused(&replaced("w1", Binding::Buffer(odd))), "w1", BindingRule::Alignment);
    // A buffer without memory is too short before it is a null pointer.
    let nothing = handle.pool().alloc(handle.stream(), 0).expect("allocates nothing");
    says(refused(&replaced("w1", Binding::Buffer(nothing.slice()))), "w1", BindingRule::Length);
    let error = refused(&replaced("w1", Binding::Buffer(fake::null(needed_bytes))));
    assert_eq!(error.to_string(), "`w1` is bound to a null pointer, it needs memory of 32768 bytes: memory is not at a null pointer");
    // Memory of the host is no memory of the GPU.
    let bytes = vec![0; needed_bytes as usize + 256];
    let aligned = bytes.as_ptr().align_offset(256);
    says(refused(&replaced("w1", HostSlice::read(&bytes[aligned..]).into())), "w1", BindingRule::Device);

    // y may not lie on h, nor on w1; nor may h lie where x does, for x is read again by the second part.
    says(refused(&replaced("y", Binding::Buffer(slice("h")))), "h", BindingRule::Overlap);
    let error = refused(&replaced("h", Binding::Buffer(slice("w1")))).to_string();
    assert!(error.contains("`h` is bound to bytes that `w1` shares"), "{error}");
    // But the residual's own place is y's for the taking.
    plan.execute(handle.stream(), &replaced("y", Binding::Buffer(slice("x"))), workspace.slice()).expect("in place");
    assert!(fake::launch_count() > 0);
    let shifted = handle.pool().alloc(handle.stream(), 32 * 64 * 4 + 256).expect("allocates");
    let half = |offset| Binding::Buffer(shifted.slice().part(offset, 32 * 64 * 4).expect("a part"));
    let mut bound = replaced("x", half(0));
    bound[place("y")].1 = half(256);
    says(refused(&bound), "y", BindingRule::Overlap);
}

#[test]
fn what_is_read_behind_a_store_lies_under_the_last_output_alone() {
    // One kernel stores h, then loads r, then stores d.
    let handle = handle(&Config::default());
    let product = |g: &mut GraphBuilder| -> Result<(Uid, Vec<u64>), verdigris_graph::Error> {
        let (a, b) = (g.tensor("a", DType::F32, rows(&[32, 64])), g.tensor("b", DType::F32, rows(&[64, 48])));
        Ok((g.matmul("product", a, b, Precision::Ieee)?, vec![32, 48]))
    };
    let convolution = |g: &mut GraphBuilder| -> Result<(Uid, Vec<u64>), verdigris_graph::Error> {
        let (x, w) = (g.tensor("x", DType::F32, rows(&[2, 8, 9, 9])), g.tensor("w", DType::F32, rows(&[16, 8, 3, 3])));
        let conv = Conv::new(ConvDirection::Fprop, x, w, Uid(0), 2, Precision::Ieee);
        Ok((g.conv_fprop("convolution", conv)?, vec![2, 16, 7, 7]))
    };
    type Build<'b> = &'b dyn Fn(&mut GraphBuilder) -> Result<(Uid, Vec<u64>), verdigris_graph::Error>;
    for build in [&product as Build<'_>, &convolution] {
        let mut g = GraphBuilder::new("sum behind a store");
        let (h, dims) = build(&mut g).expect("fits");
        let (r, s) = (g.tensor("r", DType::F32, rows(&dims)), g.tensor("s", DType::F32, rows(&dims)));
        let before = g.binary("before", BinaryOp::Add, h, s).expect("fits");
        let d = g.binary("sum", BinaryOp::Add, before, r).expect("fits");
        g.store(before, "h", DType::F32).expect("stored");
        g.store(d, "d", DType::F32).expect("stored");
        let plan = handle.plan_graph(&g.finish().expect("valid"), &Policy::default()).expect("plans");
        assert_eq!(plan.parts().count(), 1, "{}", plan.explain());
        let buffers = buffers(&handle, &plan);
        let shared = |output: &str, other: &str| {
            let mut bound = bindings(&buffers);
            let place = |name: &str| bound.iter().position(|(known, _)| *known == uid(&plan, name)).expect("bound");
            let (output, other) = (place(output), place(other));
            bound[output].1 = copied(&bound).swap_remove(other).1;
            plan.execute_from(handle.stream(), &bound, handle.pool())
        };
        assert!(matches!(shared("h", "r"), Err(Error::Binding(error)) if error.rule == BindingRule::Overlap));
        shared("d", "r").expect("r is read before d is written");
        shared("h", "s").expect("s is read before h is written");
        shared("d", "s").expect("s is read before d is written");
    }
}

#[test]
fn a_plan_belongs_to_its_device() {
    let handle = handle(&Config::default());
    let plan = handle.plan_graph(&mlp(8), &Policy::default()).expect("plans");
    let buffers = buffers(&handle, &plan);
    let workspace = handle.pool().alloc(handle.stream(), plan.workspace_bytes()).expect("allocates");
    let elsewhere = Handle::on(&fake::other_context(), &Config::default()).expect("another context");
    let error = plan.execute(elsewhere.stream(), &bindings(&buffers), workspace.slice()).expect_err("another device's stream");
    assert!(matches!(error, Error::Device(verdigris_cuda::Error::ContextMismatch { .. })), "{error}");
}

#[test]
fn memory_that_nobody_vouches_for_can_be_asked_about() {
    let handle = handle(&Config::default());
    let plan = handle.plan_graph(&mlp(8), &Policy::default()).expect("plans");
    let buffers = buffers(&handle, &plan);
    let bound = bindings(&buffers);
    plan.check_memory(handle.stream(), &bound).expect("all of it is the fake's first device's");
    let elsewhere = Handle::on(&fake::other_context(), &Config::default()).expect("another context");
    let error = plan.check_memory(elsewhere.stream(), &bound).expect_err("asked for the other device").to_string();
    assert!(error.contains("memory of device 0, it needs memory of device 1"), "{error}");
}

#[test]
fn what_lies_between_two_products_is_workspace() {
    let handle = handle(&Config::default());
    let mut g = GraphBuilder::new("chain");
    let mut value = g.tensor("x", DType::F32, rows(&[16, 32]));
    let mut build = |g: &mut GraphBuilder| -> Result<(), verdigris_graph::Error> {
        for layer in 0..4 {
            let w = g.tensor(&format!("w{layer}"), DType::F32, rows(&[32, 32]));
            value = g.matmul(&format!("mm{layer}"), value, w, Precision::Ieee)?;
        }
        g.store(value, "y", DType::F32)
    };
    build(&mut g).expect("fits");
    let plan = handle.plan_graph(&g.finish().expect("valid"), &Policy::default()).expect("plans");
    assert_eq!((plan.parts().count(), plan.tensors().len()), (4, 6));
    // Three temporaries, of which two live at a time.
    let one = 16 * 32 * 4;
    assert_eq!(plan.explain().temporaries_bytes, 2 * one);
    assert!(plan.workspace_bytes() >= 2 * one);
    let buffers = buffers(&handle, &plan);
    let workspace = handle.pool().alloc(handle.stream(), plan.workspace_bytes()).expect("allocates");
    fake::launch_count();
    let times = plan.execute_timed(handle.stream(), &bindings(&buffers), workspace.slice()).expect("executes");
    assert_eq!(times.len(), 4);
    assert!(times.iter().all(|us| *us > 0.0) && fake::launch_count() >= 4);
    let mut policy = Policy::default();
    policy.limits.workspace_bytes = Some(2 * one - 1);
    let error = handle.plan_graph(&mlp_of_virtuals(), &policy).err();
    assert!(error.is_none(), "one temporary fits: {error:?}");
    policy.limits.workspace_bytes = Some(one - 1);
    let error = handle.plan_graph(&mlp_of_virtuals(), &policy).expect_err("none fits");
    assert!(matches!(error, Error::NoWorkspace { .. }), "{error}");
}

/// Two products with 16 × 32 numbers between them.
fn mlp_of_virtuals() -> Graph {
    let mut g = GraphBuilder::new("virtual");
    let x = g.tensor("x", DType::F32, rows(&[16, 32]));
    let w = g.tensor("w", DType::F32, rows(&[32, 32]));
    let h = g.matmul("up", x, w, Precision::Ieee).expect("fits");
    let y = g.matmul("down", h, w, Precision::Ieee).expect("fits");
    g.store(y, "y", DType::F32).expect("stores");
    g.finish().expect("valid")
}

#[test]
fn a_declared_alignment_is_enough_for_what_is_chosen() {
    let handle = handle(&Config::default());
    let graph = |alignment_bytes: Option<u64>| {
        let mut g = GraphBuilder::new("aligned");
        let a = g.tensor("a", DType::F16, rows(&[256, 256]));
        let b = g.tensor("b", DType::F16, rows(&[256, 256]));
        let d = g.matmul("mm", a, b, Precision::Fp32).expect("fits");
        g.store(d, "d", DType::F16).expect("stores");
        if let Some(bytes) = alignment_bytes {
            g.align(a, bytes).expect("known");
        }
        g.finish()
    };
    let needed = |graph: Graph| {
        let plan = handle.plan_graph(&graph, &Policy::default()).expect("plans");
        let tensor = plan.tensors().iter().find(|tensor| tensor.name == "a").expect("bound").clone();
        (tensor.alignment_bytes, plan.parts().next().expect("one part").engine().name)
    };
    let (freely, fast) = needed(graph(None).expect("valid"));
    assert!(freely >= 16, "{fast} reads 16 bytes at a time");
    let (bound_by_word, _) = needed(graph(Some(2)).expect("valid"));
    assert_eq!(bound_by_word, 2);
    for wrong in [0, 1, 3, 24] {
        let error = graph(Some(wrong)).expect_err("no alignment of f16").to_string();
        assert!(error.contains("tensor `a`") && error.contains("power of two"), "{error}");
    }
}

#[test]
fn addresses_that_are_less_aligned_run_with_other_settings() {
    let handle = handle(&Config::default());
    let graph = |alignment_bytes: Option<u64>| {
        let mut g = GraphBuilder::new("chain");
        let x = g.tensor("x", DType::F16, rows(&[64, 256]));
        let build = |g: &mut GraphBuilder| -> Result<(), verdigris_graph::Error> {
            let relu = g.unary("relu", UnaryOp::Relu, x)?;
            g.store(relu, "y", DType::F16)?;
            let sum = g.reduction("sum", ReductionOp::Add, relu, &[1])?;
            g.store(sum, "s", DType::F32)?;
            let soft = g.softmax("softmax", x, 1, false)?;
            g.store(soft, "p", DType::F16)
        };
        build(&mut g).expect("fits");
        if let Some(bytes) = alignment_bytes {
            g.align(x, bytes).expect("known");
        }
        g.finish().expect("valid")
    };
    let plan = handle.plan_graph(&graph(None), &Policy::default()).expect("plans");
    let x = plan.tensors().iter().find(|tensor| tensor.name == "x").expect("bound");
    assert!(x.alignment_bytes >= 8, "several elements at a time: {}", plan.explain());
    assert_eq!(x.least_alignment_bytes, 2);
    assert!(!plan.explain().less_aligned.is_empty() && plan.explain().to_string().contains("less aligned"), "{}", plan.explain());
    let loaded = handle.loader().cache.loaded_count();
    let buffers = buffers(&handle, &plan);
    let workspace = handle.pool().alloc(handle.stream(), plan.workspace_bytes()).expect("allocates");
    let room = handle.pool().alloc(handle.stream(), x.bytes + 64).expect("allocates");
    let shifted = |offset: u64| {
        let mut bound = bindings(&buffers);
        let place = bound.iter().position(|(uid, _)| *uid == x.uid).expect("bound");
        bound[place].1 = Binding::Buffer(room.slice().part(offset, x.bytes).expect("a part"));
        bound
    };
    let stream = handle.stream();
    plan.execute(stream, &shifted(0), workspace.slice()).expect("executes");
    assert_eq!(plan.downgrades(), 0);
    fake::launch_count();
    plan.execute(stream, &shifted(2), workspace.slice()).expect("executes otherwise");
    assert!(fake::launch_count() > 0);
    plan.execute_from(stream, &shifted(6), handle.pool()).expect("executes otherwise");
    plan.execute_timed(stream, &shifted(2), workspace.slice()).expect("executes otherwise");
    assert_eq!((plan.downgrades(), handle.loader().cache.loaded_count()), (2, loaded), "nothing is loaded at run time");
    let is_alignment = |outcome: Result<(), Error>, bytes: u64| match outcome {
        Err(Error::Binding(error)) => {
            error == BindingError { wanted: format!("a multiple of {bytes} bytes"), rule: BindingRule::Alignment, ..error.clone() }
        }
        _ => false,
    };
    assert!(is_alignment(plan.execute(stream, &shifted(1), workspace.slice()), 2), "no element lies there");
    fake::set_capturing(true);
    let captured = plan.execute(stream, &shifted(2), workspace.slice());
    fake::set_capturing(false);
    assert!(is_alignment(captured, x.alignment_bytes), "a capture would keep the slower ways");
    // Whoever declares an alignment is held to it, as far as it is relied on.
    let declared = handle.plan_graph(&graph(Some(16)), &Policy::default()).expect("plans");
    let x = declared.tensors().iter().find(|tensor| tensor.name == "x").expect("bound");
    assert_eq!(x.least_alignment_bytes, x.alignment_bytes);
}

#[test]
fn nobody_waits_for_a_compiler_while_something_nearly_as_good_is_ready() {
    let cold = handle(&Config::default());
    let graph = mlp(48);
    let first = cold.plan_graph(&graph, &Policy::default()).expect("plans");
    assert!(first.explain().parts.iter().all(|part| part.chosen_by == ChosenBy::Estimate), "nothing is ready");
    // Warm now: the same choice, and again by estimate.
    let again = cold.plan_graph(&graph, &Policy::default()).expect("plans");
    let engines = |plan: &GraphPlan| plan.parts().map(|part| (part.engine(), part.knobs().clone())).collect::<Vec<_>>();
    assert_eq!(engines(&again), engines(&first));
    // Another engine's kernels are ready, the best one's are not.
    let part = &first.explain().parts[0];
    for other in part.ways.iter().skip(1) {
        let warm = handle(&Config::default());
        let pin = Pin { part: None, engine: other.summary.engine.to_owned(), knobs: other.summary.knobs.clone() };
        warm.plan_graph(&graph, &Policy { mode: Mode::Pinned(vec![pin]), ..Policy::default() }).expect("plans");
        let plan = warm.plan_graph(&graph, &Policy::default()).expect("plans");
        let near = other.summary.estimate_us <= 1.3 * part.ways[0].summary.estimate_us;
        let chosen = &plan.explain().parts[0];
        let engine = chosen.ways[chosen.chosen].summary.engine;
        let expected = if near { (other.summary.engine, ChosenBy::Ready) } else { (part.ways[0].summary.engine, ChosenBy::Estimate) };
        assert_eq!((engine, chosen.chosen_by), expected, "{}", plan.explain());
    }
}

#[test]
fn functions_run_on_a_gpu_and_keep_their_plans() {
    let device = verdigris::Device::gpu(handle(&Config::default()), Policy::default());
    let ones = |dims: &[u64]| {
        let count = dims.iter().product::<u64>() as usize;
        verdigris::Tensor::from_values(&device, DType::F32, dims, &vec![1.0; count]).expect("fits")
    };
    let (a, b) = (ones(&[16, 32]), ones(&[32, 8]));
    assert_eq!(a.to_values().expect("downloads"), vec![1.0; 512], "the fake's memory is memory");
    fake::launch_count();
    let first = verdigris::functional::matmul(&a, &b).expect("submits");
    let launches = fake::launch_count();
    assert!(launches > 0 && first.dims() == [16, 8]);
    let loaded = device.handle().expect("a GPU").loader().cache.loaded_count();
    verdigris::functional::matmul(&a, &b).expect("submits");
    assert_eq!(fake::launch_count(), launches);
    assert_eq!(device.handle().expect("a GPU").loader().cache.loaded_count(), loaded);
    let other = verdigris::Device::gpu(handle(&Config::default()), Policy::default());
    let foreign = verdigris::Tensor::from_values(&other, DType::F32, &[32, 8], &[1.0; 256]).expect("fits");
    assert!(matches!(verdigris::functional::matmul(&a, &foreign), Err(Error::Binding(BindingError { rule: BindingRule::Device, .. }))));
}

/// One choice is remembered, which no estimate would make: whoever asks for the product gets it.
#[test]
fn a_remembered_choice_is_taken_by_every_door() {
    let (m, n, k) = (96, 96, 64);
    let problem = Problem::Gemm(GemmProblem::packed(m, n, k, DType::F32, DType::F32).expect("a plain product"));
    let graph = {
        let mut g = GraphBuilder::new("product");
        let (a, b) = (g.tensor("a", DType::F32, rows(&[m, k])), g.tensor("b", DType::F32, rows(&[k, n])));
        let d = g.matmul("mm", a, b, Precision::Fp32).expect("fits");
        g.store(d, "d", DType::F32).expect("stores");
        g.finish().expect("valid")
    };
    let (device, limits) = (verdigris::Device::gpu(handle(&Config::default()), Policy::default()), Limits::default());
    let handle = device.handle().expect("a GPU");
    // The dearest way by estimate, which is loaded, as the cheapest is: what is ready does not decide.
    let survey = handle.survey(&problem, &Limits { settings: Settings::All, ..Limits::default() }).expect("asks");
    let (best, last) = (&survey.ranked[0], survey.ranked.last().expect("there is one"));
    assert_ne!((best.engine, &best.knobs), (last.engine, &last.knobs));
    let launches = |way: &Ranked| way.program.launches().map(|launch| launch.kernel.name().to_owned()).collect::<Vec<_>>();
    assert_ne!(launches(best), launches(last));
    for way in [best, last] {
        handle.load(&problem, way).expect("the fake compiles everything");
    }
    let takes = |wanted: &Ranked, by: ChosenBy| {
        let wanted = (wanted.engine, wanted.knobs.clone());
        let chosen = handle.choose(&problem, &limits).expect("chooses");
        assert_eq!(((chosen.way.engine, chosen.way.knobs), chosen.explanation.chosen_by), (wanted.clone(), by), "Handle::choose");
        let plan = handle.plan(&problem, &limits).expect("plans");
        assert_eq!((plan.engine(), plan.knobs().clone()), wanted, "Handle::plan");
        let plan = handle.plan_graph(&graph, &Policy::default()).expect("plans");
        let part = plan.parts().next().expect("one part");
        assert_eq!(
            (part.engine(), part.knobs().clone(), plan.explain().parts[0].chosen_by),
            (wanted.0, wanted.1.clone(), by),
            "plan_graph"
        );
        let plan = device.plan(&graph).expect("plans");
        let explained = &plan.explain().expect("a GPU's plan").parts[0];
        let summary = &explained.ways[explained.chosen].summary;
        assert_eq!((summary.engine, &summary.knobs, explained.chosen_by), (wanted.0.name, &wanted.1, by), "Device");
    };
    takes(best, ChosenBy::Estimate);
    let question = handle.question(&problem, &limits);
    let answer = Answer::of(last, 1.0);
    handle.plan_cache().keep(&question, &answer).expect("in memory");
    takes(last, ChosenBy::PlanCache);
    // Who names an engine gets that one.
    let named = Limits { engine: Some(best.engine.name.to_owned()), settings: Settings::Matching(best.knobs.clone()), ..Limits::default() };
    let plan = handle.plan(&problem, &named).expect("plans");
    assert_eq!((plan.engine(), plan.knobs()), (best.engine, &best.knobs));
    // A function of tensors draws the same product: on a device where no other kernels are loaded, it loads none.
    assert!(last.cost.us > 1.5 * best.cost.us, "so that it is not taken for being ready");
    let device = verdigris::Device::gpu(self::handle(&Config::default()), Policy::default());
    let handle = device.handle().expect("a GPU");
    handle.load(&problem, last).expect("the fake compiles everything");
    handle.plan_cache().keep(&question, &answer).expect("in memory");
    let loaded = handle.loader().cache.loaded_count();
    let ones = |dims: &[u64; 2]| {
        verdigris::Tensor::from_values(&device, DType::F32, dims, &vec![1.0; (dims[0] * dims[1]) as usize]).expect("fits")
    };
    verdigris::functional::matmul(&ones(&[m, k]), &ones(&[k, n])).expect("submits");
    assert_eq!(handle.loader().cache.loaded_count(), loaded);
}

/// A graph whose best way needs scratch while another of equal notes needs less: the first of many that is one, since estimates move.
fn deep(handle: &Handle) -> Graph {
    let product = |dtype: DType, m: u64, n: u64, k: u64| {
        let mut g = GraphBuilder::new("deep");
        let a = g.tensor("a", dtype, rows(&[m, k]));
        let b = g.tensor("b", dtype, rows(&[k, n]));
        let d = g.matmul("mm", a, b, Precision::usual(dtype, dtype).expect("a type of products")).expect("fits");
        g.store(d, "d", DType::F32).expect("stores");
        g.finish().expect("valid")
    };
    let sum = |dtype: DType, count: u64| {
        let mut g = GraphBuilder::new("deep");
        let a = g.tensor("a", dtype, rows(&[count]));
        let d = g.reduction("sum", ReductionOp::Add, a, &[0]).expect("fits");
        g.store(d, "d", DType::F32).expect("stores");
        g.finish().expect("valid")
    };
    let filter = |dtype: DType, pixels: u64| {
        let mut g = GraphBuilder::new("deep");
        let order = [0, 2, 3, 1];
        let tensor =
            |g: &mut GraphBuilder, name: &str, dims: &[u64]| g.tensor(name, dtype, Layout::with_order(dims, &order).expect("an order"));
        let x = tensor(&mut g, "a", &[8, 64, pixels, pixels]);
        let y = tensor(&mut g, "b", &[8, 64, pixels - 2, pixels - 2]);
        let precision = Precision::usual(dtype, dtype).expect("a type of products");
        let conv = Conv::new(ConvDirection::Wgrad, x, Uid(0), y, 2, precision);
        let d = g.conv_wgrad("wgrad", conv, &[64, 64, 3, 3]).expect("fits");
        g.store_as(d, "d", DType::F32, Layout::with_order(&[64, 64, 3, 3], &order).expect("an order")).expect("stores");
        g.finish().expect("valid")
    };
    let mut graphs = Vec::new();
    for dtype in [DType::F16, DType::F32, DType::E4m3] {
        for (m, n, k) in [(64, 64, 65_536), (128, 128, 1 << 18), (64, 256, 1 << 20), (16, 16, 1 << 16), (320, 256, 1 << 14)] {
            graphs.push(product(dtype, m, n, k));
        }
        graphs.push(filter(dtype, 34));
        graphs.push(filter(dtype, 130));
        graphs.push(sum(dtype, 1 << 24));
    }
    let has_ladder = |graph: &Graph| handle.plan_graph(graph, &Policy::default()).is_ok_and(|plan| plan.explain().ladder_bytes.len() > 1);
    graphs.into_iter().find(has_ladder).expect("some way of some graph needs scratch that another does not")
}

#[test]
fn less_workspace_is_met_by_other_ways_that_were_loaded_before() {
    let handle = handle(&Config::default());
    let deep = deep(&handle);
    let plan = handle.plan_graph(&deep, &Policy::default()).expect("plans");
    let ladder = plan.explain().ladder_bytes.clone();
    assert!(ladder.len() > 1 && ladder.is_sorted_by(|a, b| a > b), "{ladder:?}\n{}", plan.explain());
    assert_eq!((ladder[0], plan.least_workspace_bytes()), (plan.workspace_bytes(), ladder[ladder.len() - 1]));
    let loaded = handle.loader().cache.loaded_count();
    let buffers = buffers(&handle, &plan);
    let bound = bindings(&buffers);
    let stream = handle.stream();
    let workspace = handle.pool().alloc(stream, plan.workspace_bytes()).expect("allocates");
    let part = |bytes| workspace.slice().part(0, bytes).expect("a part");
    plan.execute(stream, &bound, part(ladder[0])).expect("executes");
    assert_eq!(plan.downgrades(), 0);
    plan.execute(stream, &bound, part(ladder[0] - 256)).expect("executes otherwise");
    plan.execute(stream, &bound, part(plan.least_workspace_bytes())).expect("executes otherwise");
    assert_eq!(plan.downgrades(), 2);
    assert_eq!(handle.loader().cache.loaded_count(), loaded, "nothing is loaded at run time");
    // A pool that is too small lends what it has.
    let small = Pool::new(handle.context(), PoolOptions { limit_bytes: Some(plan.least_workspace_bytes()), ..PoolOptions::default() });
    plan.execute_from(stream, &bound, &small.expect("a pool")).expect("executes otherwise");
    assert_eq!(plan.downgrades(), 3);
    // Timed executions take the same ways, and tell which.
    let whole = plan.execute_timed_from(stream, &bound, &workspace).expect("executes");
    assert!(!whole.is_downgraded && whole.workspace_bytes == ladder[0] && whole.parts.len() == plan.parts().count());
    assert_eq!(plan.downgrades(), 3);
    let least = handle.pool().alloc(stream, plan.least_workspace_bytes()).expect("allocates");
    let timed = plan.execute_timed_from(stream, &bound, &least).expect("executes otherwise");
    assert!(timed.is_downgraded && timed.workspace_bytes == plan.least_workspace_bytes(), "{timed:?}");
    let way = |plan: &verdigris::ProblemPlan| (plan.engine().name, plan.knobs().clone());
    assert!(timed.parts.iter().zip(plan.parts()).any(|((ran, us), chosen)| way(ran) != way(chosen) && *us > 0.0), "{timed:?}");
    assert_eq!(plan.downgrades(), 4);
    // While a stream captures, and for a pinned plan, less is an error.
    fake::set_capturing(true);
    let captured = plan.execute(stream, &bound, part(ladder[0] - 256));
    fake::set_capturing(false);
    assert!(matches!(captured, Err(Error::Binding(BindingError { rule: BindingRule::Workspace, .. }))), "{captured:?}");
    let chosen = plan.parts().next().expect("one part");
    let pin = Pin { part: Some(0), engine: chosen.engine().name.to_owned(), knobs: chosen.knobs().clone() };
    let pinned = handle.plan_graph(&deep, &Policy { mode: Mode::Pinned(vec![pin]), ..Policy::default() }).expect("plans");
    assert_eq!(pinned.workspace_bytes(), ladder[0]);
    let refused = pinned.execute(stream, &bound, part(ladder[0] - 256));
    assert!(matches!(refused, Err(Error::Binding(BindingError { rule: BindingRule::Workspace, .. }))), "{refused:?}");

    // A limit is for the whole plan; what cannot be kept is refused.
    for most in [ladder[0] - 256, 0] {
        let mut policy = Policy::default();
        policy.limits.workspace_bytes = Some(most);
        assert!(handle.plan_graph(&deep, &policy).expect("plans").workspace_bytes() <= most);
    }
}

#[test]
fn what_must_repeat_runs_one_way_or_not_at_all() {
    let handle = handle(&Config::default());
    let deep = deep(&handle);
    // Whether the graph asks for the same bits or the policy does.
    let asking = Graph { determinism: Determinism::Repeatable, ..deep.clone() };
    for (graph, policy) in [(&asking, Policy::default()), (&deep, Policy { deterministic: true, ..Policy::default() })] {
        let plan = handle.plan_graph(graph, &policy).expect("plans");
        assert_eq!(plan.explain().ladder_bytes, [plan.workspace_bytes()], "{}", plan.explain());
        assert_eq!(plan.least_workspace_bytes(), plan.workspace_bytes());
        if plan.workspace_bytes() == 0 {
            continue;
        }
        let buffers = buffers(&handle, &plan);
        let less = handle.pool().alloc(handle.stream(), plan.workspace_bytes() - 256).expect("allocates");
        fake::launch_count();
        let refused = plan.execute(handle.stream(), &bindings(&buffers), less.slice());
        assert!(matches!(refused, Err(Error::Binding(BindingError { rule: BindingRule::Workspace, .. }))), "{refused:?}");
        let small = Pool::new(handle.context(), PoolOptions { limit_bytes: Some(plan.workspace_bytes() - 256), ..PoolOptions::default() });
        let refused = plan.execute_from(handle.stream(), &bindings(&buffers), &small.expect("a pool"));
        assert!(matches!(refused, Err(Error::OutOfMemory { .. } | Error::NoWorkspace { .. })), "{refused:?}");
        assert_eq!((fake::launch_count(), plan.downgrades()), (0, 0));
    }
    // A map gives each element the same bits however it is read; a softmax adds in another order.
    let graph = |softmax: bool| {
        let mut g = GraphBuilder::new("rows");
        let x = g.tensor("x", DType::F16, rows(&[64, 256]));
        let y = if softmax { g.softmax("softmax", x, 1, false) } else { g.unary("relu", UnaryOp::Relu, x) }.expect("fits");
        g.store(y, "y", DType::F16).expect("stored");
        Graph { determinism: Determinism::Repeatable, ..g.finish().expect("valid") }
    };
    for softmax in [false, true] {
        let plan = handle.plan_graph(&graph(softmax), &Policy::default()).expect("plans");
        let buffers = buffers(&handle, &plan);
        let x = plan.tensors().iter().find(|tensor| tensor.name == "x").expect("bound");
        assert!(x.alignment_bytes >= 8, "several elements at a time: {}", plan.explain());
        let room = handle.pool().alloc(handle.stream(), x.bytes + 64).expect("allocates");
        let mut bound = bindings(&buffers);
        let place = bound.iter().position(|(uid, _)| *uid == x.uid).expect("bound");
        bound[place].1 = Binding::Buffer(room.slice().part(2, x.bytes).expect("a part"));
        let outcome = plan.execute_from(handle.stream(), &bound, handle.pool());
        let is_refused = matches!(&outcome, Err(Error::Binding(error)) if error.rule == BindingRule::Alignment);
        assert_eq!((is_refused, plan.downgrades()), (softmax, u64::from(!softmax)), "{outcome:?}");
    }
}

#[test]
fn a_random_state_by_value_is_measured_with_as_an_integer() {
    let handle = handle(&Config::default());
    let dropout = || -> Result<Graph, verdigris_graph::Error> {
        let mut g = GraphBuilder::new("dropout");
        let (x, factor) = (g.tensor("x", DType::F32, rows(&[64, 96])), g.host_scalar("factor", DType::F32));
        let state = RandomState::by_value(g.host_scalar("seed", DType::I64), g.host_scalar("offset", DType::I64));
        let y = g.scale("scale", x, HostScalar::Bound(factor))?;
        let y = g.dropout("dropout", y, state, 0.25)?;
        g.store(y, "y", DType::F32)?;
        g.finish()
    };
    let product = || -> Result<Graph, verdigris_graph::Error> {
        let mut g = GraphBuilder::new("product");
        let (a, b) = (g.tensor("a", DType::Bf16, rows(&[64, 96])), g.tensor("b", DType::Bf16, rows(&[96, 64])));
        let state = RandomState::by_value(g.host_scalar("seed", DType::I64), g.host_scalar("offset", DType::I64));
        let y = g.matmul("product", a, b, Precision::Fp32)?;
        let y = g.dropout("dropout", y, state, 0.25)?;
        g.store(y, "y", DType::Bf16)?;
        g.finish()
    };
    let attention = || -> Result<Graph, verdigris_graph::Error> {
        let mut g = GraphBuilder::new("attention");
        let [q, k, v] = ["q", "k", "v"].map(|name| g.tensor(name, DType::Bf16, rows(&[2, 2, 64, 64])));
        let spec = AttentionSpec { dropout: Some(Real(0.1)), ..AttentionSpec::new(0.125) };
        let mut attention = Attention::new(spec, q, k, v);
        (attention.dropout_state, attention.dropout_offset) =
            (Some(g.host_scalar("seed", DType::I64)), Some(g.host_scalar("offset", DType::I64)));
        let y = g.attention("attention", attention)?.o;
        g.store(y, "y", DType::Bf16)?;
        g.finish()
    };
    for graph in [dropout(), product(), attention()].map(|graph| graph.expect("fits")) {
        let tuning = Tuning { candidates: 4, budget: Duration::from_secs(5), ..Tuning::default() };
        let policy = Policy { mode: Mode::Measured(tuning), remember: false, ..Policy::default() };
        let plan = handle.plan_graph(&graph, &policy).expect("plans");
        assert!(plan.explain().parts.iter().all(|part| part.chosen_by == ChosenBy::Clock), "{}", plan.explain());
        // The problem's own plan tells which of its slots are integers.
        let part = plan.parts().next().expect("one part");
        let integers = part.tensors().iter().filter(|tensor| tensor.is_scalar && tensor.dtype.is_integer());
        assert_eq!(integers.count(), 2, "{}: {:?}", graph.name, part.tensors());
    }
}

#[test]
fn measured_choices_are_kept_and_found_by_the_next_process() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = Config { plans: Some(folder.path().join("plans.txt")), ..Config::default() };
    let first = handle(&config);
    let tuning = Tuning { candidates: 4, budget: Duration::from_secs(5), ..Tuning::default() };
    let measured = Policy { mode: Mode::Measured(tuning), ..Policy::default() };
    let mut seen = Vec::new();
    let plan = first.plan_graph_watched(&mlp(48), &measured, &mut |progress| seen.push(progress)).expect("plans");
    assert!(plan.explain().parts.iter().all(|part| part.chosen_by == ChosenBy::Clock), "{}", plan.explain());
    for stage in [Stage::Kernels, Stage::Measuring] {
        let last = seen.iter().rfind(|progress| progress.stage == stage).expect("was shown");
        assert_eq!(last.done, last.total);
    }
    for part in &plan.explain().parts {
        let time = |way: usize| part.ways[way].measured.map_or(f64::INFINITY, |measured| measured.us);
        assert!((0..part.ways.len()).all(|way| time(part.chosen) <= time(way)), "{}", plan.explain());
        assert!(part.ways.len() >= 2, "one is no choice");
    }
    assert_eq!(first.plan_cache_trouble(), None);

    // Another process: also a plan by estimate takes the choice; one that does not remember does not.
    let second = handle(&config);
    let engines = |plan: &GraphPlan| plan.parts().map(|part| (part.engine(), part.knobs().clone())).collect::<Vec<_>>();
    let again = second.plan_graph(&mlp(48), &Policy::default()).expect("plans");
    assert!(again.explain().parts.iter().all(|part| part.chosen_by == ChosenBy::PlanCache), "{}", again.explain());
    assert_eq!(engines(&again), engines(&plan));
    // The second process finds the measured kernels compiled, and may rather take one of these.
    let is_estimated = |by| matches!(by, ChosenBy::Estimate | ChosenBy::Ready);
    let forgetful = second.plan_graph(&mlp(48), &Policy { remember: false, ..Policy::default() }).expect("plans");
    assert!(forgetful.explain().parts.iter().all(|part| is_estimated(part.chosen_by)));
    // Other limits are another question.
    let mut stricter = Policy::default();
    stricter.limits.split_operands = false;
    let other = second.plan_graph(&mlp(48), &stricter).expect("plans");
    assert!(other.explain().parts.iter().all(|part| is_estimated(part.chosen_by)));

    // A file that cannot be written is told, and spoils nothing.
    let blocked = Config { plans: Some(folder.path().join("plans.txt/below")), ..Config::default() };
    let third = handle(&blocked);
    third.plan_graph(&mlp(48), &measured).expect("plans");
    assert!(third.plan_cache_trouble().is_some());
}

#[test]
fn pins_are_kept_or_refused_with_reasons() {
    let handle = handle(&Config::default());
    let plan = |pins: Vec<Pin>| handle.plan_graph(&mlp(48), &Policy { mode: Mode::Pinned(pins), ..Policy::default() });
    let pin = |part, engine: &str| Pin { part, engine: engine.to_owned(), knobs: Knobs::default() };
    let pinned = plan(vec![pin(None, "gemm.simt")]).expect("plans");
    assert!(pinned.parts().all(|part| part.engine().name == "gemm.simt"));
    assert!(pinned.explain().parts.iter().all(|part| part.chosen_by == ChosenBy::Pin));
    let one = plan(vec![pin(Some(1), "gemm.simt")]).expect("plans");
    assert_eq!(one.explain().parts.iter().map(|part| part.chosen_by).collect::<Vec<_>>(), [ChosenBy::Estimate, ChosenBy::Pin]);
    assert!(matches!(plan(vec![pin(None, "gemm.magic")]), Err(Error::UnknownEngine { .. })));
    assert!(matches!(plan(vec![pin(Some(2), "gemm.simt")]), Err(Error::Pin { .. })), "there is no such part");
    let knobs = Knobs::new([("nonsense", 1)]);
    let error = plan(vec![Pin { knobs, ..pin(None, "gemm.simt") }]).expect_err("no such knob").to_string();
    assert!(error.contains("gemm.simt") && error.contains("nonsense=1") && error.contains("knobs"), "{error}");
}

#[test]
fn memory_that_is_not_there_is_an_error_and_nothing_leaks() {
    let handle = handle(&Config::default());
    let plan = handle.plan_graph(&deep(&handle), &Policy::default()).expect("plans");
    let error = handle.pool().alloc(handle.stream(), 1 << 41).expect_err("too much");
    assert!(matches!(error, verdigris_cuda::Error::OutOfMemory { .. }), "{error}");
    assert!(Error::from(error).is_lack_of_memory());
    // A source that has nothing at all, where the least ways need something, is told as such.
    let nothing = handle.pool().alloc(handle.stream(), 0).expect("allocates nothing");
    let buffers = buffers(&handle, &plan);
    let outcome = plan.execute_from(handle.stream(), &bindings(&buffers), &nothing);
    assert_eq!(outcome.is_ok(), plan.least_workspace_bytes() == 0, "{outcome:?}");
    assert_eq!(fake::context_depth(), 0);
}

#[test]
fn more_operands_than_a_kernel_takes_are_spread_over_several() {
    let handle = handle(&Config::default());
    for GraphCase { graph, .. } in verdigris_reference::crowded::cases().expect("valid graphs") {
        let plan = handle.plan_graph(&graph, &Policy::default()).unwrap_or_else(|error| panic!("{}: {error}", graph.name));
        assert!(plan.parts().count() > 1, "{}", graph.name);
        // Parts of a concatenation write some of the result each; what is bound is the whole of it.
        for bound in plan.tensors() {
            let tensor = graph.tensor(bound.uid).expect("a tensor of the graph");
            assert!(bound.is_scalar || u128::from(bound.bytes) == tensor.layout.span_bytes(tensor.dtype), "{}: {bound:?}", graph.name);
        }
        let buffers = buffers(&handle, &plan);
        let executed = plan.execute_from(handle.stream(), &bindings(&buffers), handle.pool());
        executed.unwrap_or_else(|error| panic!("{}: {error}", graph.name));
    }
    // What one kernel takes stays one.
    let mlp = handle.plan_graph(&mlp(32), &Policy::default()).expect("plans");
    assert_eq!(mlp.parts().count(), 2);
}

/// A step of SGD with momentum over many tensors of many sizes, in one graph.
fn update(count: u64) -> Result<Graph, verdigris_graph::Error> {
    let mut g = GraphBuilder::new("update");
    let rate = g.host_scalar("rate", DType::F32);
    for i in 0..count {
        let mut input = |name: &str| g.tensor(&format!("{name}{i}"), DType::F32, rows(&[8 + i]));
        let (w, m, dw) = (input("w"), input("m"), input("dw"));
        let kept = g.scale("keep", m, HostScalar::Fixed(verdigris_graph::Real(0.9)))?;
        let mean = g.binary("mean", BinaryOp::Add, kept, dw)?;
        g.store(mean, &format!("mean{i}"), DType::F32)?;
        let step = g.scale("step", mean, HostScalar::Bound(rate))?;
        let moved = g.binary("move", BinaryOp::Sub, w, step)?;
        g.store(moved, &format!("moved{i}"), DType::F32)?;
    }
    g.finish()
}

#[test]
fn a_graph_of_more_than_a_thousand_tensors_is_planned_and_its_bindings_are_checked() {
    let handle = handle(&Config::default());
    let plan = handle.plan_graph(&update(210).expect("fits"), &Policy::default()).expect("plans");
    assert_eq!((plan.parts().count(), plan.tensors().len()), (210, 1051));
    let buffers = buffers(&handle, &plan);
    let mut bound = bindings(&buffers);
    fake::launch_count();
    plan.execute_from(handle.stream(), &bound, handle.pool()).expect("executes");
    assert_eq!(fake::launch_count(), 210);
    let place = |name: &str| bound.iter().position(|(known, _)| *known == uid(&plan, name)).expect("bound");
    let (moved, w, other) = (place("moved7"), place("w7"), place("w8"));
    // In place is as good as apart; in the place of another is not.
    bound[moved].1 = copied(&bound[w..=w]).swap_remove(0).1;
    plan.execute_from(handle.stream(), &bound, handle.pool()).expect("executes in place");
    bound[moved].1 = copied(&bound[other..=other]).swap_remove(0).1;
    let error = plan.execute_from(handle.stream(), &bound, handle.pool()).expect_err("w8 is read later").to_string();
    assert!(error.contains("`moved7` is bound to bytes that `w8` shares"), "{error}");
}
