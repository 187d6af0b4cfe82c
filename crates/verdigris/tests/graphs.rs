//! Random graphs and the case files as plans: on the fake driver each is planned and launched; on a GPU, where there is one, each is held
//! against the reference. `VERDIGRIS_FUZZ_GRAPHS` and `VERDIGRIS_FUZZ_SEED` say how many random graphs and which, `VERDIGRIS_CASE` picks
//! cases by a part of their names.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use verdigris::{Binding, Config, Error, Handle, Mode, Policy, Tuning};
use verdigris_cuda::{DeviceBuffer, fake};
use verdigris_graph::{Graph, Uid, json};
use verdigris_reference::fuzz;
use verdigris_reference::graph::Selection;
use verdigris_reference::graph_cases::{FAMILIES, GraphCase, load_file};
use verdigris_reference::judge::judge;
use verdigris_reference::run::Inputs;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn random_graphs(count: u64) -> impl Iterator<Item = (u64, GraphCase)> {
    let first = number("VERDIGRIS_FUZZ_SEED").unwrap_or(0);
    let count = number("VERDIGRIS_FUZZ_GRAPHS").unwrap_or(count);
    (first..first + count).map(|seed| (seed, fuzz::graph(seed)))
}

/// Where tensors are put.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Addresses {
    /// At multiples of 256 bytes.
    Round,
    /// As badly aligned as the plan takes them.
    Loose,
}

/// Runs a graph on the handle's device: inputs up, outputs down.
fn execute(
    handle: &Handle,
    policy: &Policy,
    addresses: Addresses,
    graph: &Graph,
    inputs: &Inputs<Uid>,
    outputs: &mut BTreeMap<Uid, Vec<u8>>,
) -> Result<(), String> {
    let words = |error: Error| error.to_string();
    let plan = handle.plan_graph(graph, policy).map_err(words)?;
    let stream = handle.stream();
    // What is written in place is bound once more to what it is the place of.
    let in_place = graph.in_place();
    let lies_in = |uid: Uid| in_place.iter().find(|(_, input)| *input == uid).map_or(uid, |(output, _)| *output);
    let mut memory: Vec<(Uid, Option<(DeviceBuffer, u64)>)> = Vec::new();
    for tensor in plan.tensors() {
        let offset_bytes = if addresses == Addresses::Loose { tensor.least_alignment_bytes } else { 0 };
        let bytes = outputs.get(&tensor.uid).or_else(|| inputs.buffers.get(&tensor.uid));
        let place = |bytes: &Vec<u8>| -> Result<(DeviceBuffer, u64), verdigris_cuda::Error> {
            let mut buffer = handle.pool().alloc(stream, offset_bytes + bytes.len() as u64)?;
            buffer.upload(stream, offset_bytes, bytes)?;
            Ok((buffer, offset_bytes))
        };
        memory.push((tensor.uid, bytes.map(place).transpose().map_err(|error| error.to_string())?));
    }
    let mut bindings: Vec<(Uid, Binding<'_>)> = Vec::new();
    for (uid, _) in &memory {
        let place = memory.iter().find(|(other, _)| *other == lies_in(*uid)).and_then(|(_, place)| place.as_ref());
        let binding = match place {
            None => Binding::Scalar(inputs.scalars.get(uid).copied().unwrap_or(f64::NAN)),
            Some((buffer, offset)) => {
                let part = buffer.slice().part(*offset, buffer.len_bytes() - offset);
                Binding::Buffer(part.map_err(|error| error.to_string())?)
            }
        };
        bindings.push((*uid, binding));
    }
    plan.execute_from(stream, &bindings, handle.pool()).map_err(words)?;
    stream.synchronize().map_err(|error| error.to_string())?;
    for (uid, place) in &memory {
        if let (Some(output), Some((buffer, offset))) = (outputs.get_mut(uid), place) {
            buffer.download(stream, *offset, output).map_err(|error| error.to_string())?;
        }
    }
    Ok(())
}

#[test]
fn every_random_graph_is_planned_and_launched() {
    let handle = Handle::on(&fake::context(), &Config::default()).expect("the fake is always there");
    let mut wrong = Vec::new();
    let mut parts = 0;
    for (seed, case) in random_graphs(200) {
        let inputs = verdigris_reference::data::graph_inputs(&case.graph, case.distribution, case.seed);
        let mut outputs: BTreeMap<Uid, Vec<u8>> = BTreeMap::new();
        for tensor in case.graph.tensors.iter().filter(|tensor| !tensor.is_virtual && !inputs.buffers.contains_key(&tensor.uid)) {
            if !tensor.by_value {
                outputs.insert(tensor.uid, vec![0; tensor.layout.span_bytes(tensor.dtype) as usize]);
            }
        }
        let addresses = if seed % 4 == 0 { Addresses::Loose } else { Addresses::Round };
        match execute(&handle, &Policy::default(), addresses, &case.graph, &inputs, &mut outputs) {
            Ok(()) => parts += fake::launch_count(),
            Err(error) => wrong.push(format!("seed {seed}: {error}\n{}", json::graph_to_json(&case.graph))),
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    assert!(parts > 200, "{parts} launches");
}

fn gpu(test: &str) -> Option<Handle> {
    match Handle::open(&Config::from_environment().expect("reads")) {
        Ok(handle) => Some(handle),
        Err(Error::Device(error @ (verdigris_cuda::Error::NoDriver { .. } | verdigris_cuda::Error::NoDevice))) => {
            eprintln!("{test}: skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn fault(handle: &Handle, policy: &Policy, case: &GraphCase, graph: &Graph) -> Option<String> {
    fault_at(handle, policy, Addresses::Round, case, graph)
}

fn fault_at(handle: &Handle, policy: &Policy, addresses: Addresses, case: &GraphCase, graph: &Graph) -> Option<String> {
    let selection = if case.device_only { Selection::Sample { count: 4096, seed: case.seed } } else { Selection::All };
    let run = |graph: &Graph, inputs: &Inputs<Uid>, outputs: &mut BTreeMap<Uid, Vec<u8>>| {
        execute(handle, policy, addresses, graph, inputs, outputs)
    };
    judge(graph, case.distribution, case.seed, selection, run).err()
}

#[test]
fn badly_aligned_tensors_are_right_on_the_gpu() {
    let Some(handle) = gpu("badly_aligned_tensors_are_right_on_the_gpu") else { return };
    let mut wrong = Vec::new();
    for (seed, case) in random_graphs(100) {
        if let Some(fault) = fault_at(&handle, &Policy::default(), Addresses::Loose, &case, &case.graph) {
            wrong.push(format!("seed {seed}, {:?}: {fault}\n{}", case.distribution, json::graph_to_json(&case.graph)));
        }
    }
    for family in ["pointwise", "reduction", "softmax", "pool", "resample"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../cases/{family}.toml"));
        for case in load_file(&path).expect("reads").iter().filter(|case| !case.device_only).step_by(3) {
            let fault = fault_at(&handle, &Policy::default(), Addresses::Loose, case, &case.graph);
            wrong.extend(fault.map(|fault| format!("{}: {fault}", case.id)));
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn every_case_is_right_on_the_gpu() {
    let Some(handle) = gpu("every_case_is_right_on_the_gpu") else { return };
    let filter = std::env::var("VERDIGRIS_CASE").unwrap_or_default();
    let mut wrong = Vec::new();
    for family in FAMILIES {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../cases/{family}.toml"));
        for case in load_file(&path).expect("reads").iter().filter(|case| !case.device_only && case.id.contains(&filter)) {
            wrong.extend(fault(&handle, &Policy::default(), case, &case.graph).map(|fault| format!("{}: {fault}", case.id)));
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn every_random_graph_is_right_on_the_gpu() {
    let Some(handle) = gpu("every_random_graph_is_right_on_the_gpu") else { return };
    let mut wrong = Vec::new();
    for (seed, case) in random_graphs(300) {
        let policy = Policy { deterministic: seed % 4 == 0, ..Policy::default() };
        if let Some(first) = fault(&handle, &policy, &case, &case.graph) {
            let smallest = fuzz::shrink(&case.graph, |graph| fault(&handle, &policy, &case, graph).is_some());
            let what = fault(&handle, &policy, &case, &smallest).unwrap_or(first);
            wrong.push(format!("seed {seed}, {:?}: {what}\n{}", case.distribution, json::graph_to_json(&smallest)));
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn measured_choices_are_right_too_and_planned_work_can_be_captured() {
    let Some(handle) = gpu("measured_choices_are_right_too_and_planned_work_can_be_captured") else { return };
    let tuning = Tuning { candidates: 4, budget: Duration::from_millis(20), again: true, ..Tuning::default() };
    let policy = Policy { mode: Mode::Measured(tuning), remember: false, ..Policy::default() };
    for (seed, case) in random_graphs(300).take(12) {
        if let Some(fault) = fault(&handle, &policy, &case, &case.graph) {
            panic!("seed {seed}: {fault}\n{}", json::graph_to_json(&case.graph));
        }
        // Captured and replayed, with a workspace that stays.
        let stream = handle.stream();
        let outcome = judge(&case.graph, case.distribution, case.seed, Selection::All, |graph, inputs, outputs| {
            let words = |error: Error| error.to_string();
            let plan = handle.plan_graph(graph, &Policy::default()).map_err(words)?;
            let workspace = handle.pool().alloc(stream, plan.workspace_bytes()).map_err(|error| error.to_string())?;
            let mut memory: BTreeMap<Uid, DeviceBuffer> = BTreeMap::new();
            for tensor in plan.tensors().iter().filter(|tensor| !tensor.is_scalar) {
                let bytes = outputs.get(&tensor.uid).or_else(|| inputs.buffers.get(&tensor.uid)).ok_or("no bytes")?;
                memory.insert(tensor.uid, handle.pool().alloc_from(stream, bytes).map_err(|error| error.to_string())?);
            }
            let bindings: Vec<(Uid, Binding<'_>)> = (plan.tensors().iter())
                .map(|tensor| match memory.get(&tensor.uid) {
                    Some(buffer) => (tensor.uid, Binding::Buffer(buffer.slice())),
                    None => (tensor.uid, Binding::Scalar(inputs.scalars.get(&tensor.uid).copied().unwrap_or(f64::NAN))),
                })
                .collect();
            let graph = stream.capture::<Error>(|| plan.execute(stream, &bindings, workspace.slice())).map_err(words)?;
            let mut replay = graph.instantiate().map_err(|error| error.to_string())?;
            for _ in 0..2 {
                replay.launch(stream).map_err(|error| error.to_string())?;
            }
            stream.synchronize().map_err(|error| error.to_string())?;
            for (uid, output) in outputs.iter_mut() {
                if let Some(buffer) = memory.get(uid) {
                    *output = buffer.download_all(stream).map_err(|error| error.to_string())?;
                }
            }
            Ok(())
        });
        if let Err(fault) = outcome {
            panic!("seed {seed}, replayed: {fault}\n{}", json::graph_to_json(&case.graph));
        }
    }
}
