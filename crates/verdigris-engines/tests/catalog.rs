//! No shape leads outside of a catalog: whatever the extents, strides and batches, a plain problem's programs name kernels that are in it.
//!
//! Plain is a product of a type's usual result, times alpha: beta · C, other result types and chains are what a user's graph makes.

use std::collections::HashSet;

use verdigris_engines::arch::Arch;
use verdigris_graph::{ConvExtents, ConvProblem, Direction, GemmProblem, HostScalar, Matrix, Precision, Problem, Real, Slot, Tensor};
use verdigris_kir::ir::Target;
use verdigris_reference::data::Random;
use verdigris_tensor::DType;

/// An extent: often small, often near a power of two, at times large.
fn extent(random: &mut Random) -> u64 {
    match random.below(4) {
        0 => random.below(20),
        1 => (1 << random.below(14)) + random.below(3) - 1,
        2 => 64 * (1 + random.below(200)),
        _ => {
            let bits = 1 + random.below(24);
            random.below(1 << bits)
        }
    }
}

fn matrix(random: &mut Random, slot: u32, dtype: DType, rows: u64, columns: u64, batch: &[u64]) -> Matrix {
    let pad = if random.below(3) == 0 { random.below(40) } else { 0 };
    let (row_stride, column_stride, size) = match random.below(5) {
        0 | 1 => (columns + pad, 1, rows * (columns + pad)),
        2 | 3 => (1, rows + pad, columns * (rows + pad)),
        _ => (2 * columns + pad, 2, rows * (2 * columns + pad)),
    };
    let mut stride = size + if random.below(4) == 0 { random.below(9) } else { 0 };
    let mut batch_strides = Vec::new();
    for dim in batch.iter().rev() {
        batch_strides.push(stride);
        stride *= dim;
    }
    batch_strides.reverse();
    Matrix { slot: Slot(slot), dtype, row_stride, column_stride, batch_strides }
}

/// A problem without a chain, of types that catalogs hold.
fn problem(random: &mut Random) -> Option<GemmProblem> {
    let types = [
        (DType::Bf16, DType::Bf16, Precision::Fp32),
        (DType::F16, DType::F16, Precision::Fp32),
        (DType::E4m3, DType::Bf16, Precision::Fp8Promoted),
        (DType::F32, DType::F32, Precision::Tf32),
        (DType::F32, DType::F32, Precision::Ieee),
        (DType::F64, DType::F64, Precision::F64),
        (DType::I8, DType::I32, Precision::I32),
    ];
    let (operands, d, precision) = types[random.below(types.len() as u64) as usize];
    let (m, n, k) = (extent(random), extent(random), extent(random));
    let batch: Vec<u64> = (0..random.below(3)).map(|_| 1 + random.below(5)).collect();
    let mut problem = GemmProblem::packed(1, 1, 1, operands, d).ok()?;
    (problem.m, problem.n, problem.k, problem.precision) = (m, n, k, precision);
    problem.a = matrix(random, 0, operands, m, k, &batch);
    problem.b = matrix(random, 1, operands, k, n, &batch);
    problem.d = matrix(random, 2, d, m, n, &batch);
    problem.alpha = HostScalar::Fixed(Real(if operands == DType::I8 { 1.0 } else { 2.0 }));
    problem.batch = batch;
    problem.canonical().ok()
}

#[test]
fn random_shapes_name_only_kernels_of_the_catalog() {
    let arch = Arch::h200();
    for name in ["gemm.wgmma", "gemm.mma", "gemm.simt"] {
        let engine = verdigris_engines::engine(name).expect("the engine is registered");
        let catalog: HashSet<String> = engine.catalog(Target::Sm90a).iter().map(|kernel| kernel.name().to_owned()).collect();
        let mut random = Random::new(7);
        let mut used = HashSet::new();
        let (mut problems, mut taken) = (0, 0);
        while problems < 1000 {
            let Some(problem) = problem(&mut random) else { continue };
            problems += 1;
            let problem = Problem::Gemm(problem);
            let Ok(candidate) = engine.accept(&problem, &arch) else { continue };
            taken += 1;
            for knobs in candidate.knobs().configs() {
                let program = candidate.program(knobs).expect("a listed config has a program");
                for launch in program.launches() {
                    assert!(catalog.contains(launch.kernel.name()), "{name} with {knobs} on {problem:?}: {}", launch.kernel.name());
                    used.insert(launch.kernel.name().to_owned());
                }
            }
        }
        assert!(taken > 150 && used.len() > catalog.len() / 4, "{name}: {taken} problems, {} kernels", used.len());
    }
}

/// A convolution without steps, of types that catalogs hold, in one of the usual layouts. With few channels, of one group and with filters
/// of first layers among others.
fn convolution(random: &mut Random, most_channels: u64) -> Option<ConvProblem> {
    let types = [
        (DType::Bf16, DType::Bf16, Precision::Fp32),
        (DType::F16, DType::F16, Precision::Fp32),
        (DType::F16, DType::F16, Precision::F16),
        (DType::F32, DType::F32, Precision::Ieee),
        (DType::F32, DType::F32, Precision::Tf32),
        (DType::F64, DType::F64, Precision::F64),
        (DType::I8, DType::I32, Precision::I32),
    ];
    let (operands, result, precision) = types[random.below(types.len() as u64) as usize];
    let few = most_channels < 100;
    let groups = if !few && random.below(3) == 0 { 1 + random.below(6) } else { 1 };
    let taps = if few { [4, 8, 17][random.below(3) as usize] } else { 4 };
    let extents = ConvExtents {
        direction: Direction::ALL[random.below(3) as usize],
        n: random.below(300),
        c: groups * (1 + random.below(most_channels.min(100))),
        k: groups * (1 + random.below(200)),
        groups,
        input: [1 + random.below(3), 1 + random.below(60), 1 + random.below(300)],
        filter: [1, 1 + random.below(taps), 1 + random.below(taps)],
        pads: [0, random.below(3), random.below(3)],
        strides: [1, 1 + random.below(3), 1 + random.below(3)],
        dilations: [1, 1 + random.below(2), 1 + random.below(2)],
    };
    let mut problem = ConvProblem { precision, ..ConvProblem::packed(extents, operands, result).ok()? };
    if random.below(2) == 0 {
        problem.x = Tensor::channels_first(problem.x.slot, problem.x.dtype, problem.x_extents());
        problem.w = Tensor::channels_first(problem.w.slot, problem.w.dtype, problem.w_extents());
        problem.y = Tensor::channels_first(problem.y.slot, problem.y.dtype, problem.y_extents());
    }
    problem.canonical().ok()
}

#[test]
fn random_convolutions_name_only_kernels_of_the_catalog() {
    let arch = Arch::h200();
    for (name, most_channels) in [("conv.direct", u64::MAX), ("conv.small_channels", 8)] {
        let engine = verdigris_engines::engine(name).expect("the engine is registered");
        let catalog: HashSet<String> = engine.catalog(Target::Sm90a).iter().map(|kernel| kernel.name().to_owned()).collect();
        let mut random = Random::new(11);
        let mut used = HashSet::new();
        let (mut problems, mut taken) = (0, 0);
        while problems < 1000 {
            let Some(problem) = convolution(&mut random, most_channels) else { continue };
            problems += 1;
            let problem = Problem::Conv(problem);
            let Ok(candidate) = engine.accept(&problem, &arch) else { continue };
            taken += 1;
            for knobs in candidate.knobs().configs() {
                for launch in candidate.program(knobs).expect("a listed config has a program").launches() {
                    assert!(catalog.contains(launch.kernel.name()), "{knobs} on {problem:?}: {}", launch.kernel.name());
                    used.insert(launch.kernel.name().to_owned());
                }
            }
        }
        assert!(taken == problems || name != "conv.direct", "it takes everything");
        assert!(taken > 100 && used.len() > catalog.len() / 2, "{name}: {taken} problems, {} of {} kernels", used.len(), catalog.len());
    }
}

#[test]
fn random_convolutions_out_of_halo_boxes_name_only_kernels_of_the_catalog() {
    let arch = Arch::h200();
    let engine = verdigris_engines::engine("conv.halo").expect("the engine is registered");
    // Those of wgrad are tried beside its cases.
    let mut catalog: HashSet<String> = engine.catalog(Target::Sm90a).iter().map(|kernel| kernel.name().to_owned()).collect();
    catalog.retain(|name| name.starts_with("conv_halo_") && !name.starts_with("conv_halo_filter_"));
    assert!(catalog.len() <= 112, "{} kernels", catalog.len());
    let mut random = Random::new(17);
    let mut used = HashSet::new();
    let (mut problems, mut taken) = (0, 0);
    while problems < 800 {
        let dtype = [DType::Bf16, DType::F16][random.below(2) as usize];
        let groups = [1, 1, 1, 2 + random.below(8)][random.below(4) as usize];
        // Of several groups, half have as many channels on both sides as share a tile.
        let even = 16 << random.below(2);
        let [c, k] = match (groups, random.below(2)) {
            (1, _) => [8 * (1 + random.below(40)), 8 * (1 + random.below(40))],
            (_, 0) => [groups * even; 2],
            _ => [16 * groups * (1 + random.below(6)), 16 * groups * (1 + random.below(6))],
        };
        let extents = ConvExtents {
            direction: Direction::ALL[random.below(2) as usize],
            n: 1 + random.below(100),
            c,
            k,
            groups,
            input: [1 + random.below(9), 1 + random.below(60), 1 + random.below(300)],
            filter: [1 + random.below(3), 1 + random.below(5), 1 + random.below(5)],
            pads: [random.below(2), random.below(4), random.below(7)],
            strides: [1; 3],
            dilations: [1, 1 + random.below(2), 1 + random.below(3)],
        };
        let Ok(mut problem) = ConvProblem::packed(extents, dtype, dtype) else { continue };
        // Filters of either order.
        if random.below(3) == 0 {
            let [k, c, _, h, w] = problem.w_extents();
            problem.w.strides = [1, k, h * w * c * k, w * c * k, c * k];
        }
        problems += 1;
        let Ok(candidate) = engine.accept(&Problem::Conv(problem.clone()), &arch) else { continue };
        taken += 1;
        let estimates: Vec<f64> = candidate.knobs().configs().iter().map(|knobs| candidate.cost(knobs).expect("listed").us).collect();
        assert!(estimates.iter().all(|us| us.is_finite() && *us > 0.0) && estimates.is_sorted(), "{estimates:?}");
        for knobs in candidate.knobs().configs() {
            let program = candidate.program(knobs).expect("a listed config has a program");
            for launch in program.launches() {
                assert!(catalog.contains(launch.kernel.name()), "{knobs} on {problem:?}: {}", launch.kernel.name());
                used.insert(launch.kernel.name().to_owned());
            }
        }
    }
    assert!(taken > 300 && used.len() == catalog.len(), "{taken} problems, {} of {} kernels", used.len(), catalog.len());
}

#[test]
fn layers_of_few_channels_are_taken() {
    let engine = verdigris_engines::engine("conv.halo").expect("the engine is registered");
    // Images and channels of x and y; pixels; the filter.
    let layers = [
        ([256, 64, 64], [1, 56, 56], [1, 3, 3]),
        ([64, 64, 64], [1, 224, 224], [1, 3, 3]),
        ([2, 32, 64], [128, 128, 128], [3, 3, 3]),
        ([1, 64, 128], [54, 62, 62], [3, 3, 3]),
        ([1, 128, 128], [1, 768, 768], [1, 3, 3]),
    ];
    for ([n, c, k], input, filter) in layers {
        for direction in [Direction::Fprop, Direction::Dgrad] {
            let pads = filter.map(|extent: u64| extent / 2);
            let extents = ConvExtents { direction, n, c, k, groups: 1, input, filter, pads, strides: [1; 3], dilations: [1; 3] };
            let problem = ConvProblem::packed(extents, DType::Bf16, DType::Bf16).expect("a valid problem");
            if let Err(refusal) = engine.accept(&Problem::Conv(problem), &Arch::h200()) {
                panic!("{extents:?}: {refusal}");
            }
        }
    }
}

#[test]
fn random_group_convolutions_name_only_kernels_of_the_catalog() {
    let arch = Arch::h200();
    let engine = verdigris_engines::engine("conv.grouped").expect("the engine is registered");
    let names = |target| engine.catalog(target).iter().map(|kernel| kernel.name().to_owned()).collect::<HashSet<String>>();
    let (catalog, later) = (names(Target::Sm80), names(Target::Sm90));
    assert!(catalog.len() <= 60, "{} kernels", catalog.len());
    let mut random = Random::new(13);
    let mut used = HashSet::new();
    let (mut problems, mut taken) = (0, 0);
    while problems < 1000 {
        let groups = 1 + random.below(40);
        let dtype = [DType::Bf16, DType::F16][random.below(2) as usize];
        let width = |random: &mut Random| [1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 72][random.below(16) as usize];
        let c = width(&mut random);
        let k = if random.below(2) == 0 { c } else { width(&mut random) };
        let extents = ConvExtents {
            direction: Direction::ALL[random.below(3) as usize],
            n: 1 + random.below(100),
            c: groups * c,
            k: groups * k,
            groups,
            input: [1 + random.below(2), 1 + random.below(60), 1 + random.below(200)],
            filter: [1, 1 + random.below(7), 1 + random.below(7)],
            pads: [0, random.below(4), random.below(4)],
            strides: [1, 1 + random.below(3), 1 + random.below(3)],
            dilations: [1, 1 + random.below(2), 1 + random.below(2)],
        };
        let Ok(problem) = ConvProblem::packed(extents, dtype, dtype) else { continue };
        problems += 1;
        let Ok(candidate) = engine.accept(&Problem::Conv(problem.clone()), &arch) else { continue };
        taken += 1;
        // Those that TMA feeds are for later chips, and have problems of their own; copies are for later chips too.
        for knobs in candidate.knobs().configs().iter().filter(|knobs| knobs.value("box").is_none()) {
            let names = if knobs.value("copies").is_some() { &later } else { &catalog };
            for launch in candidate.program(knobs).expect("a listed config has a program").launches() {
                assert!(names.contains(launch.kernel.name()), "{knobs} on {problem:?}: {}", launch.kernel.name());
                used.insert(launch.kernel.name().to_owned());
            }
        }
    }
    assert!(taken > 300 && used.len() > catalog.len() * 3 / 4, "{taken} problems, {} of {} kernels", used.len(), catalog.len());
}
