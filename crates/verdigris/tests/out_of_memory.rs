//! F1: a device that is full at any one of the allocations of a training step, from the handle's own to the workspace of the execution. Whoever asks gets the
//! typed error, or the step runs in less; nothing leaks, and the same handle works as soon as there is memory again.
#![forbid(unsafe_code)]

use verdigris::{Binding, Config, Error, GraphPlan, Handle, Policy};
use verdigris_cuda::{DeviceBuffer, fake};
use verdigris_graph::{Graph, Uid};
use verdigris_tensor::DType;

mod step;

fn handle() -> Result<Handle, Error> {
    Handle::on(&fake::context(), &Config::default())
}

/// One step with all that it takes: planned, its tensors allocated, executed twice. The plan.
fn run(handle: &Handle, graph: &Graph) -> Result<GraphPlan, Error> {
    let plan = handle.plan_graph(graph, &Policy::default())?;
    let stream = handle.stream();
    let mut buffers: Vec<(Uid, bool, DeviceBuffer)> = Vec::new();
    for tensor in plan.tensors() {
        let bytes = if tensor.is_scalar { 0 } else { tensor.bytes };
        buffers.push((tensor.uid, tensor.is_scalar, handle.pool().alloc(stream, bytes)?));
    }
    for _ in 0..2 {
        let bind = |is_scalar, buffer| if is_scalar { Binding::Scalar(-0.1) } else { Binding::Buffer(DeviceBuffer::slice(buffer)) };
        let bindings: Vec<(Uid, Binding<'_>)> = buffers.iter().map(|(uid, is_scalar, buffer)| (*uid, bind(*is_scalar, buffer))).collect();
        plan.execute_from(stream, &bindings, handle.pool())?;
    }
    stream.synchronize()?;
    Ok(plan)
}

#[test]
fn a_training_step_survives_a_full_device_at_every_allocation() {
    let graph = step::step(DType::F32).expect("fits");
    let nothing = fake::live_allocations();
    // How many requests a step makes, the first time and when all is loaded.
    fake::allocations();
    let known = handle().expect("there is memory");
    run(&known, &graph).expect("there is memory");
    let first_time = fake::allocations().device;
    let idle = fake::live_allocations();
    let plan = run(&known, &graph).expect("there is memory");
    let later = fake::allocations().device;
    assert!(plan.workspace_bytes() > 0 && later > 10, "{later} requests\n{}", plan.explain());
    drop(plan);
    assert_eq!(fake::live_allocations(), idle, "a step keeps no memory");

    // One request is refused (a pool asks twice), or all from one on.
    let mut outcomes = [0; 2];
    for refused in [2, u32::MAX] {
        for served in 0..later {
            fake::refuse_memory(Some((served as u32, refused)));
            let result = run(&known, &graph);
            fake::refuse_memory(None);
            match result {
                // A way that needs less workspace ran.
                Ok(plan) => {
                    assert!(plan.downgrades() > 0, "request {served} of {later} was refused, and nobody noticed");
                    outcomes[0] += 1;
                }
                Err(error) => {
                    assert_eq!(error.kind(), "out_of_memory", "request {served}: {error}");
                    assert!(error.to_string().contains("bytes"), "{error}");
                    outcomes[1] += 1;
                }
            }
            assert_eq!(fake::live_allocations(), idle, "request {served} of {later}, {refused} refused: something leaked");
        }
        run(&known, &graph).unwrap_or_else(|error| panic!("there is memory again: {error}"));
    }
    assert!(outcomes[1] > 0, "{outcomes:?}");
    drop(known);
    assert_eq!(fake::live_allocations(), nothing);

    // What is asked for once alone: by the handle, and for constants of kernels.
    for served in 0..first_time - later {
        fake::refuse_memory(Some((served as u32, 2)));
        let result = handle().and_then(|fresh| run(&fresh, &graph).map(drop));
        fake::refuse_memory(None);
        if let Err(error) = result {
            assert_eq!(error.kind(), "out_of_memory", "request {served}: {error}");
        }
        assert_eq!(fake::live_allocations(), nothing, "request {served} of a fresh handle: something leaked");
    }
}
