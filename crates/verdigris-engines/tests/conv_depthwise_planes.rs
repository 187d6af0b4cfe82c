//! `conv.depthwise_planes`: which kernels its problems name, and for which it is expected to be quicker than other engines.

use std::collections::HashSet;

use verdigris_engines::arch::Arch;
use verdigris_graph::{ConvExtents, ConvProblem, Direction, Problem, Tensor};
use verdigris_kir::ir::Target;
use verdigris_reference::data::Random;
use verdigris_tensor::DType;

/// A depthwise convolution of channels-first tensors without steps.
fn channels_first(extents: ConvExtents, dtype: DType) -> Option<ConvProblem> {
    let mut problem = ConvProblem::packed(extents, dtype, dtype).ok()?;
    problem.x = Tensor::channels_first(problem.x.slot, dtype, problem.x_extents());
    problem.w = Tensor::channels_first(problem.w.slot, dtype, problem.w_extents());
    problem.y = Tensor::channels_first(problem.y.slot, dtype, problem.y_extents());
    problem.canonical().ok()
}

fn random_extents(random: &mut Random) -> ConvExtents {
    let c = 1 + random.below(700);
    let k = if random.below(5) == 0 { c * (1 + random.below(3)) } else { c };
    let filter = [1, 3, 3, 3, 4, 5, 5, 7, 7, 9][random.below(10) as usize];
    let stride = 1 + random.below(3) / 2;
    let is_row = random.below(6) == 0;
    let of_rows = |extent: u64, row: u64| if is_row { row } else { extent };
    ConvExtents {
        direction: Direction::ALL[random.below(3) as usize],
        n: 1 + random.below(30),
        c,
        k,
        groups: c,
        input: [1, of_rows(1 + random.below(130), 1), 1 + random.below(if is_row { 3000 } else { 300 })],
        filter: [1, of_rows(filter, 1), filter],
        pads: [0, of_rows(filter / 2, 0), filter / 2],
        strides: [1, stride, stride],
        dilations: [1; 3],
    }
}

/// The estimate of an engine's first choice in microseconds, if it takes the problem.
fn estimate(name: &str, problem: &Problem) -> Option<f64> {
    let candidate = verdigris_engines::engine(name).expect("the engine is registered").accept(problem, &Arch::h200()).ok()?;
    Some(candidate.cost(candidate.knobs().default_config()).expect("the default is listed").us)
}

/// No shape leads outside of the catalog, all of which is of use, and what is taken is expected to be quicker than by the engines that know no planes.
#[test]
fn random_shapes_name_only_kernels_of_the_catalog() {
    let engine = verdigris_engines::engine("conv.depthwise_planes").expect("the engine is registered");
    let catalog: HashSet<String> = engine.catalog(Target::Sm90a).iter().map(|kernel| kernel.name().to_owned()).collect();
    let mut random = Random::new(3);
    let (mut used, mut taken, mut slower) = (HashSet::new(), 0, Vec::new());
    for _ in 0..1500 {
        let extents = random_extents(&mut random);
        let dtype = [DType::Bf16, DType::F16, DType::F32][random.below(3) as usize];
        let Some(problem) = channels_first(extents, dtype) else { continue };
        let problem = Problem::Conv(problem);
        let Ok(candidate) = engine.accept(&problem, &Arch::h200()) else { continue };
        taken += 1;
        for knobs in candidate.knobs().configs() {
            for launch in candidate.program(knobs).expect("a listed config has a program").launches() {
                assert!(
                    catalog.contains(launch.kernel.name()) || launch.kernel.name().starts_with("conv_depthwise_join"),
                    "{knobs} on {problem:?}"
                );
                used.insert(launch.kernel.name().to_owned());
            }
        }
        let own = estimate("conv.depthwise_planes", &problem).expect("it is taken");
        let others = ["conv.direct", "conv.depthwise"].map(|name| estimate(name, &problem));
        if let Some(other) = others.into_iter().flatten().find(|&other| other < own) {
            slower.push(format!("{own:.1} µs and {other:.1}: {problem:?}"));
        }
    }
    let unused: Vec<&String> = catalog.difference(&used).collect();
    assert!(taken > 1000 && unused.is_empty(), "{taken} problems; nothing names {unused:?}");
    assert!(slower.len() < taken / 50, "{} of {taken}, such as {:?}", slower.len(), slower.first());
}

/// Where channels are neighbours, rows of neighbours are what one channel alone has.
#[test]
fn channels_last_is_left_to_others() {
    let engine = verdigris_engines::engine("conv.depthwise_planes").expect("the engine is registered");
    let mut random = Random::new(5);
    for _ in 0..100 {
        let extents = random_extents(&mut random);
        let is_alike = extents.c == 1 || extents.input[2] == 1;
        let Ok(problem) = ConvProblem::packed(extents, DType::F16, DType::F16).and_then(ConvProblem::canonical) else { continue };
        let one_column = problem.output[2] == 1;
        let taken = engine.accept(&Problem::Conv(problem), &Arch::h200()).is_ok();
        assert!(is_alike || one_column || !taken, "{extents:?}");
    }
}

/// What a measurement on an H200 found slow: estimates are below what the other engines took there.
#[test]
fn measured_problems_are_expected_to_be_quicker() {
    let extents = |direction, n, c, [height, width]: [u64; 2], filter: u64, stride| ConvExtents {
        direction,
        n,
        c,
        k: c,
        groups: c,
        input: [1, height, width],
        filter: [1, filter, filter],
        pads: [0, filter / 2, filter / 2],
        strides: [1, stride, stride],
        dilations: [1; 3],
    };
    for (extents, dtype, measured_us) in [
        (extents(Direction::Fprop, 4, 528, [10, 10], 3, 1), DType::Bf16, 14.2),
        (extents(Direction::Fprop, 8, 760, [61, 53], 7, 1), DType::F16, 447.0),
        (extents(Direction::Wgrad, 3, 32, [7, 7], 3, 2), DType::Bf16, 4.8),
        (extents(Direction::Dgrad, 23, 200, [77, 71], 3, 1), DType::F32, 509.0),
    ] {
        let problem = Problem::Conv(channels_first(extents, dtype).expect("a valid problem"));
        let us = estimate("conv.depthwise_planes", &problem).expect("it is taken");
        let others = ["conv.direct", "conv.depthwise"].map(|name| estimate(name, &problem));
        eprintln!("{us:.1} µs of an estimated {others:?}, measured {measured_us}");
        assert!(us < measured_us && others.into_iter().flatten().all(|other| us < other), "{extents:?}");
    }
}
