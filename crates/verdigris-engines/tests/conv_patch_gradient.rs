//! `conv.patch_gradient`: which kernels its problems name, and for which it is expected to be quicker than `conv.direct`.

use std::collections::HashSet;

use verdigris_engines::arch::Arch;
use verdigris_graph::{ConvExtents, ConvProblem, Direction, Precision, Problem, Tensor};
use verdigris_kir::ir::Target;
use verdigris_reference::data::Random;
use verdigris_tensor::DType;

/// A filter gradient of f32 without steps; with channels first, or last.
fn problem(extents: ConvExtents, is_first: bool) -> Option<Problem> {
    let mut problem = ConvProblem { precision: Precision::Ieee, ..ConvProblem::packed(extents, DType::F32, DType::F32).ok()? };
    if is_first {
        problem.x = Tensor::channels_first(problem.x.slot, DType::F32, problem.x_extents());
        problem.w = Tensor::channels_first(problem.w.slot, DType::F32, problem.w_extents());
        problem.y = Tensor::channels_first(problem.y.slot, DType::F32, problem.y_extents());
    }
    problem.canonical().ok().map(Problem::Conv)
}

fn extents(n: u64, [c, k]: [u64; 2], [height, width]: [u64; 2], filter: u64, stride: u64, pad: u64) -> ConvExtents {
    ConvExtents {
        direction: Direction::Wgrad,
        n,
        c,
        k,
        groups: 1,
        input: [1, height, width],
        filter: [1, filter, filter],
        pads: [0, pad, pad],
        strides: [1, stride, stride],
        dilations: [1; 3],
    }
}

/// First layers.
fn random_extents(random: &mut Random) -> ConvExtents {
    let filter = [2, 3, 3, 3, 4, 5, 7, 7, 11, 16][random.below(10) as usize];
    let channels = [1 + random.below(9), 8 * (1 + random.below(16)) - random.below(8) / 7 * random.below(7)];
    let side = [0; 2].map(|_| filter + random.below(280));
    extents(1 + random.below(200), channels, side, filter, 1 + random.below(4), random.below(filter / 2 + 1))
}

/// The estimate of an engine's first choice in microseconds, if it takes the problem.
fn estimate(name: &str, problem: &Problem) -> Option<f64> {
    let candidate = verdigris_engines::engine(name).expect("the engine is registered").accept(problem, &Arch::h200()).ok()?;
    Some(candidate.cost(candidate.knobs().default_config()).expect("the default is listed").us)
}

/// No shape leads outside of the catalog, all of which is of use; few channels are taken, and expected to be quicker than by gathers where there is work.
#[test]
fn random_shapes_name_only_kernels_of_the_catalog() {
    let engine = verdigris_engines::engine("conv.patch_gradient").expect("the engine is registered");
    let catalog: HashSet<String> = engine.catalog(Target::Sm90a).iter().map(|kernel| kernel.name().to_owned()).collect();
    let mut random = Random::new(11);
    let (mut used, mut problems, mut taken, mut slower) = (HashSet::new(), 0, 0, Vec::new());
    while problems < 300 {
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
        let [own, direct] = ["conv.patch_gradient", "conv.direct"].map(|name| estimate(name, &problem).expect("both take it"));
        if direct > 30.0 && own > direct {
            slower.push(format!("{own:.1} µs and {direct:.1}: {extents:?}"));
        }
    }
    let unused: Vec<&String> = catalog.difference(&used).collect();
    assert!(taken > problems * 9 / 10 && unused.is_empty(), "{taken} of {problems} problems; nothing names {unused:?}");
    assert!(slower.len() < taken / 10, "{} of {taken}, such as {:?}", slower.len(), slower.first());
}

/// What a measurement on an H200 found slow: estimates are below what the quickest peer took there.
#[test]
fn measured_problems_are_expected_to_be_quicker() {
    for (extents, measured_us) in [
        (extents(122, [3, 16], [235, 235], 7, 2, 3), 739.0),
        (extents(142, [3, 32], [221, 151], 11, 4, 5), 345.0),
        (extents(1, [3, 24], [133, 101], 16, 2, 7), 26.0),
    ] {
        let us = estimate("conv.patch_gradient", &problem(extents, false).expect("a valid problem")).expect("it is taken");
        eprintln!("{us:.1} µs, measured {measured_us}");
        assert!(us < measured_us, "{extents:?}");
    }
}
