//! A whole step of training as one graph: every kind of part, temporaries between them, parameters updated in place. On the fake driver it
//! is planned and launched; on the CPU device its numbers are checked.
#![forbid(unsafe_code)]

use verdigris::error::{BindingError, BindingRule};
use verdigris::{Binding, Config, Device, Error, Handle, Policy, Tensor};
use verdigris_cuda::fake;
use verdigris_graph::{Graph, Op, Uid};
use verdigris_tensor::DType;

mod step;

use step::step;

fn uid(graph: &Graph, name: &str) -> Uid {
    graph.tensors.iter().find(|tensor| tensor.name == name).unwrap_or_else(|| panic!("no {name}")).uid
}

#[test]
fn every_part_of_a_training_step_has_an_engine_and_runs_in_place() {
    for (dtype, deterministic) in [(DType::F32, false), (DType::F16, false), (DType::Bf16, true), (DType::F64, false)] {
        let handle = Handle::on(&fake::context(), &Config::default()).expect("the fake is always there");
        let graph = step(dtype).expect("fits");
        let policy = Policy { deterministic, ..Policy::default() };
        let plan = handle.plan_graph(&graph, &policy).unwrap_or_else(|error| panic!("{dtype}: {error}"));
        assert!(plan.parts().count() >= 8, "{}", plan.explain());
        assert!(!deterministic || plan.parts().all(|part| part.notes().deterministic), "{}", plan.explain());
        assert!(plan.explain().temporaries_bytes > 0);
        let stream = handle.stream();
        let buffers: Vec<_> =
            (plan.tensors().iter()).map(|tensor| (tensor, handle.pool().alloc(stream, tensor.bytes).expect("allocates"))).collect();
        let bind = || -> Vec<(Uid, Binding<'_>)> {
            let bind = |is_scalar: bool, slice| if is_scalar { Binding::Scalar(-0.1) } else { Binding::Buffer(slice) };
            buffers.iter().map(|(tensor, buffer)| (tensor.uid, bind(tensor.is_scalar, buffer.slice()))).collect()
        };
        fake::launch_count();
        plan.execute_from(stream, &bind(), handle.pool()).unwrap_or_else(|error| panic!("{dtype}: {error}"));
        assert!(fake::launch_count() >= plan.parts().count());

        // Parameters in place: the new ones lie where the old ones are.
        let slice = |name: &str| {
            let wanted = uid(&graph, name);
            buffers.iter().find(|(tensor, _)| tensor.uid == wanted).map(|(_, buffer)| Binding::Buffer(buffer.slice())).expect("bound")
        };
        let with = |pairs: &[(&str, &str)]| -> Vec<(Uid, Binding<'_>)> {
            let mut bound = bind();
            for (output, input) in pairs {
                let place = bound.iter().position(|(known, _)| *known == uid(&graph, output)).expect("bound");
                bound[place].1 = slice(input);
            }
            bound
        };
        let in_place = with(&[("w1 next", "w1"), ("b1 next", "b1"), ("w2 next", "w2"), ("b2 next", "b2")]);
        plan.execute_from(stream, &in_place, handle.pool()).unwrap_or_else(|error| panic!("{dtype}: {error}\n{}", plan.explain()));
        // But not just anywhere.
        let refused = plan.execute_from(stream, &with(&[("dx", "x")]), handle.pool());
        assert!(matches!(refused, Err(Error::Binding(BindingError { rule: BindingRule::Overlap, .. }))), "{refused:?}");
    }
}

#[test]
fn a_step_goes_down_the_gradient_on_the_cpu() {
    let device = Device::cpu();
    let graph = step(DType::F32).expect("fits");
    let plan = device.plan(&graph).expect("the CPU takes every graph");
    let mut state = 1_u64;
    let mut tensors: Vec<(Uid, Tensor)> = Vec::new();
    for input in plan.inputs() {
        let values: Vec<f64> = (0..input.layout.elements())
            .map(|i| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let unit = (state >> 33) as f64 / (1_u64 << 31) as f64 - 0.5;
                match input.name.as_str() {
                    "labels" => i as f64,
                    "dloss" => 1.0,
                    _ => unit,
                }
            })
            .collect();
        // Every input is packed, in whatever order: values in the order of memory will do.
        let packed = Tensor::from_values(&device, input.dtype, &[values.len() as u64], &values).expect("fits");
        let bytes = packed.to_bytes().expect("reads");
        tensors.push((input.uid, Tensor::from_bytes(&device, input.dtype, input.layout, &bytes).expect("fits")));
    }
    let rate = [(uid(&graph, "minus the learning rate"), (-0.05).into())];
    let mut losses = Vec::new();
    for _ in 0..20 {
        let inputs: Vec<(Uid, &Tensor)> = tensors.iter().map(|(uid, tensor)| (*uid, tensor)).collect();
        let results = device.run(&plan, &inputs, &rate).expect("runs");
        for (wanted, result) in plan.outputs().zip(results) {
            if wanted.name == "loss" {
                losses.push(result.to_values().expect("reads")[0]);
            }
            if let Some(name) = wanted.name.strip_suffix(" next") {
                let place = tensors.iter().position(|(known, _)| *known == uid(&graph, name)).expect("a parameter");
                tensors[place].1 = result;
            }
        }
    }
    assert!(losses.windows(2).all(|pair| pair[1] < pair[0]), "{losses:?}");
    assert!(losses[19] < 0.5 * losses[0], "{losses:?}");
    assert!(graph.nodes.iter().any(|node| matches!(node.op, Op::Conv(_))));
}
