//! `conv.patch`: which kernels its problems name, and for which it is expected to be quicker than `conv.direct`.

use std::collections::HashSet;

use verdigris_engines::arch::Arch;
use verdigris_graph::{ConvExtents, ConvProblem, Direction, Precision, Problem, Tensor};
use verdigris_kir::ir::Target;
use verdigris_reference::data::Random;
use verdigris_tensor::DType;

/// A convolution of f32 without steps; with channels first, or last.
fn problem(extents: ConvExtents, is_first: bool) -> Option<Problem> {
    let mut problem = ConvProblem { precision: Precision::Ieee, ..ConvProblem::packed(extents, DType::F32, DType::F32).ok()? };
    if is_first {
        problem.x = Tensor::channels_first(problem.x.slot, DType::F32, problem.x_extents());
        problem.w = Tensor::channels_first(problem.w.slot, DType::F32, problem.w_extents());
        problem.y = Tensor::channels_first(problem.y.slot, DType::F32, problem.y_extents());
    }
    problem.canonical().ok().map(Problem::Conv)
}

/// Few channels are gathered by a fprop, or are a dgrad's result.
fn random_extents(random: &mut Random) -> ConvExtents {
    let (few, many) = (1 + random.below(8), 1 + random.below(130));
    let direction = [Direction::Fprop, Direction::Dgrad][random.below(2) as usize];
    let filter = [1, 2, 3, 3, 3, 5, 5, 7, 7, 11][random.below(10) as usize];
    let stride = if direction == Direction::Fprop { 1 + random.below(3) } else { 1 };
    ConvExtents {
        direction,
        n: 1 + random.below(40),
        c: few,
        k: many,
        groups: 1,
        input: [1, filter + random.below(200), filter + random.below(200)],
        filter: [1, filter, filter],
        pads: [0, filter / 2, filter / 2],
        strides: [1, stride, stride],
        dilations: [1, 1 + random.below(5) / 4, 1 + random.below(5) / 4],
    }
}

/// The estimate of an engine's first choice in microseconds, if it takes the problem.
fn estimate(name: &str, problem: &Problem) -> Option<f64> {
    let candidate = verdigris_engines::engine(name).expect("the engine is registered").accept(problem, &Arch::h200()).ok()?;
    Some(candidate.cost(candidate.knobs().default_config()).expect("the default is listed").us)
}

/// No shape leads outside of the catalog, all of which is of use; few channels are taken, and expected to be quicker than by gathers where there is work.
#[test]
fn random_shapes_name_only_kernels_of_the_catalog() {
    let engine = verdigris_engines::engine("conv.patch").expect("the engine is registered");
    let catalog: HashSet<String> = engine.catalog(Target::Sm90a).iter().map(|kernel| kernel.name().to_owned()).collect();
    let mut random = Random::new(7);
    let (mut used, mut problems, mut taken, mut slower) = (HashSet::new(), 0, 0, Vec::new());
    while problems < 400 {
        let extents = random_extents(&mut random);
        let Some(problem) = problem(extents, random.below(2) == 0) else { continue };
        problems += 1;
        let Ok(candidate) = engine.accept(&problem, &Arch::h200()) else { continue };
        taken += 1;
        for knobs in candidate.knobs().configs() {
            for launch in candidate.program(knobs).expect("a listed config has a program").launches() {
                assert!(catalog.contains(launch.kernel.name()), "{knobs} on {problem:?}");
                used.insert(launch.kernel.name().to_owned());
            }
        }
        let [own, direct] = ["conv.patch", "conv.direct"].map(|name| estimate(name, &problem).expect("both take it"));
        if direct > 30.0 && own > direct {
            slower.push(format!("{own:.1} µs and {direct:.1}: {extents:?}"));
        }
    }
    let unused: Vec<&String> = catalog.difference(&used).collect();
    assert!(taken > problems * 9 / 10 && unused.is_empty(), "{taken} of {problems} problems; nothing names {unused:?}");
    assert!(slower.len() < taken / 10, "{} of {taken}, such as {:?}", slower.len(), slower.first());
}

/// What a measurement on an H200 found slow: estimates are below what other engines took there.
#[test]
fn measured_problems_are_expected_to_be_quicker() {
    let extents = |direction, n, [c, k]: [u64; 2], side, filter: u64, stride, pad| ConvExtents {
        direction,
        n,
        c,
        k,
        groups: 1,
        input: [1, side, side],
        filter: [1, filter, filter],
        pads: [0, pad, pad],
        strides: [1, stride, stride],
        dilations: [1; 3],
    };
    for (extents, is_first, measured_us) in [
        (extents(Direction::Fprop, 23, [4, 88], 77, 3, 1, 1), false, 112.0),
        (extents(Direction::Fprop, 10, [1, 24], 163, 5, 1, 0), false, 72.0),
        (extents(Direction::Fprop, 249, [3, 16], 183, 3, 2, 1), true, 470.0),
        (extents(Direction::Dgrad, 3, [3, 64], 215, 7, 1, 0), false, 729.0),
    ] {
        let us = estimate("conv.patch", &problem(extents, is_first).expect("a valid problem")).expect("it is taken");
        eprintln!("{us:.1} µs, measured {measured_us}");
        assert!(us < measured_us, "{extents:?}");
    }
}
