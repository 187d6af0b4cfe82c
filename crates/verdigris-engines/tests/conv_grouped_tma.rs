//! The configs of `conv.grouped` that TMA feeds, all of them, on every case of convolution that they take, interpreted and held against the
//! reference.

mod conv_corpus;

use std::collections::HashSet;

use conv_corpus::Variants;
use verdigris_engines::arch::Arch;
use verdigris_engines::engine::Engine;
use verdigris_engines::interpret::Parts;
use verdigris_graph::{ConvExtents, ConvProblem, Direction, Problem};
use verdigris_kir::interp::Kernels;
use verdigris_kir::ir::Target;
use verdigris_reference::data::Random;
use verdigris_reference::graph_cases::{GraphCase, load};
use verdigris_tensor::DType;

/// They were an engine of that name.
fn engine() -> &'static dyn Engine {
    verdigris_engines::engine("conv.diagonal").expect("the engine is registered")
}

/// Runs every config of cases with their numbers; how many were taken.
fn run_all(cases: &[(usize, GraphCase)]) -> usize {
    let filter = conv_corpus::filter().unwrap_or_default();
    let kernels = Kernels::new();
    let (mut runs, mut wrong) = (0, Vec::new());
    for (number, case) in cases.iter().filter(|(_, case)| case.id.contains(&filter)) {
        match conv_corpus::run(engine(), case, *number, &Arch::virtual_device(1 + *number as u32 % 5), &kernels, Variants::All) {
            Ok(count) => runs += count,
            Err(what) => wrong.push(what),
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    runs
}

#[test]
fn all_cases_that_it_takes() {
    let runs = run_all(&conv_corpus::corpus());
    eprintln!("{runs} runs");
    assert!(runs > 0, "nothing was taken");
}

/// Tiles met whole, ragged and barely, channel tiles with a last one of few channels, all sizes of groups, and steps behind the sums.
#[test]
fn edges_of_tiles_and_channel_tiles() {
    let cases = load(
        "conv",
        r#"
[[group]]
id = "edges"
types = ["bf16"]
layouts = ["nhwc"]
shapes = [
    "n1 c8 i14x16 k8 f3x3 p1 g8", "n2 c72 i15x17 k72 f3x3 p1 g72", "n5 c32 i7x7 k32 f3x3 p1 g8", "n1 c136 i9x33 k136 f5x5 p2 g34",
    "n3 c16 i8x8 k16 f7x7 p3 g2", "n1 c8 i5x5 k8 f5x5 g8", "n1 c24 i17x19 k24 f3x3 p1 s2 g6", "n1 c40 i16x15 k40 f5x5 p2 s2 g40", "n2 c8 i9x35 k8 f7x7 p3 s2 g4",
    "n1 c16 i12x13 k16 f3x3 s2 g16", "n1 c16 i9x9 k16 f3x3 p2 g16",
]
"#,
    )
    .expect("the cases load");
    let runs = run_all(&cases.into_iter().enumerate().collect::<Vec<_>>());
    // Seven shapes of stride 1 in three directions with three tiles; of stride 2, the 7×7 in dgrad alone, and the one without padding in
    // the other two.
    assert!(conv_corpus::filter().is_some() || runs == 7 * 3 * 3 + 3 + 3 + 1 + 2, "{runs} runs");
}

/// A channel tile and half of another on 19 SMs: ten CTAs for the whole one and nine for the last, which no smaller device cuts so.
#[test]
fn the_last_channel_tile_has_fewer_ctas() {
    let group = "[[group]]\nid = \"last\"\ntypes = [\"bf16\"]\nlayouts = [\"nhwc\"]\nshapes = [\"n11 c96 i14x16 k96 f3x3 p1 g12\"]\n";
    let (arch, kernels) = (Arch::virtual_device(19), Kernels::new());
    let mut uneven = 0;
    for case in load("conv", group).expect("the case loads") {
        let parts = Parts::all(&case.graph, &arch, &[engine()]).expect("a graph");
        uneven +=
            parts.configs.iter().flatten().filter(|way| way.program.launches().next().is_some_and(|first| first.grid[0] == 19)).count();
        let runs = conv_corpus::run_parts(&case, &parts, 0, &arch, &kernels, Variants::All).unwrap_or_else(|what| panic!("{what}"));
        assert_eq!(runs, 3, "{}", case.id);
    }
    // Two boxes of 64 channels in each direction; a third one cuts 96 channels evenly.
    assert_eq!(uneven, 6);
}

/// No shape leads outside of the catalog, and what is taken is expected to be quicker than by the engine that takes everything.
#[test]
fn random_shapes_name_only_kernels_of_the_catalog() {
    let arch = Arch::h200();
    let direct = verdigris_engines::engine("conv.direct").expect("the engine is registered");
    let catalog: HashSet<String> = engine().catalog(Target::Sm90a).iter().map(|kernel| kernel.name().to_owned()).collect();
    assert!(catalog.len() <= 300 && engine().catalog(Target::Sm89).is_empty());
    let mut random = Random::new(5);
    let (mut used, mut taken, mut slower) = (HashSet::new(), 0, Vec::new());
    for _ in 0..1000 {
        let dtype = [DType::Bf16, DType::F16][random.below(2) as usize];
        let c = 8 * (1 + random.below(120));
        let filter = [3, 5, 7, 7, 9][random.below(5) as usize];
        let stride = 1 + random.below(3) / 2;
        let extents = ConvExtents {
            direction: Direction::ALL[random.below(3) as usize],
            n: 1 + random.below(300),
            c,
            k: c,
            groups: c >> random.below(4),
            input: [1, 1 + random.below(130), 1 + random.below(300)],
            filter: [1, filter, filter],
            pads: [0, filter / 2, random.below(filter)],
            strides: [1, stride, stride],
            dilations: [1; 3],
        };
        let Ok(problem) = ConvProblem::packed(extents, dtype, dtype) else { continue };
        let Ok(problem) = problem.canonical() else { continue };
        let problem = Problem::Conv(problem);
        let Ok(candidate) = engine().accept(&problem, &arch) else { continue };
        taken += 1;
        let space = candidate.knobs();
        for knobs in space.configs() {
            for launch in candidate.program(knobs).expect("a listed config has a program").launches() {
                assert!(catalog.contains(launch.kernel.name()), "{knobs} on {problem:?}: {}", launch.kernel.name());
                used.insert(launch.kernel.name().to_owned());
            }
        }
        let other = direct.accept(&problem, &arch).expect("it takes everything");
        let costs = [candidate.cost(space.default_config()), other.cost(other.knobs().default_config())];
        let us = costs.map(|cost| cost.expect("the default is listed").us);
        if us[0] > us[1] {
            slower.push(format!("{us:?} µs: {problem:?}"));
        }
    }
    let unused: Vec<&String> = catalog.difference(&used).collect();
    assert!(taken > 400 && unused.is_empty(), "{taken} problems; nothing names {unused:?}");
    assert!(slower.len() < taken / 20, "{} of {taken}, such as {:?}", slower.len(), slower.first());
}
