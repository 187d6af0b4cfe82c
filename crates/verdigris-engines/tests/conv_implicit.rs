//! `conv.implicit_gemm` on the interpreter against plain loops: all directions, edges, strides, dilations, groups, types, clusters, splits.

mod conv_check;

use std::collections::HashSet;
use std::process::Command;

use conv_check::{a_quarter, bf16, check_on, encode, placed, plane, reference, small};
use verdigris_engines::arch::Arch;
use verdigris_engines::engine::{Knobs, Notes, Reason};
use verdigris_graph::ops::matmul::Precision;
use verdigris_graph::{
    BinaryOp, Channels, ConvExtents, ConvProblem, Direction, EpilogueStep, Problem, Real, Slot, Statistics, Tensor, UnaryOp,
};
use verdigris_kir::interp::matrix::Accumulation;
use verdigris_kir::interp::{self, Kernels, Memory, Options};
use verdigris_kir::ir::Target;
use verdigris_kir::program::KernelRef;
use verdigris_kir::ptx::{self, Isa};
use verdigris_kir::verify;
use verdigris_reference::data::Random;
use verdigris_tensor::DType;
use verdigris_tensor::num::{read_element, round_to};

/// Runs a problem under the configs that `pick` chooses and compares.
fn check(problem: &ConvProblem, arch: &Arch, kernels: &Kernels, seed: u64, pick: &dyn Fn(usize, &Knobs) -> bool) {
    check_on("conv.implicit_gemm", problem, arch, kernels, seed, pick);
}

/// The first configs of each tile, whose number is in `shapes`.
fn shapes(shapes: &'static [u32], most: usize) -> impl Fn(usize, &Knobs) -> bool {
    let seen = std::cell::RefCell::new(std::collections::BTreeMap::new());
    move |_, knobs| {
        let shape = knobs.value("shape").unwrap_or(0);
        let mut seen = seen.borrow_mut();
        let count = seen.entry(shape).or_insert(0usize);
        *count += 1;
        shapes.contains(&shape) && *count <= most
    }
}

fn run(problem: &ConvProblem, seed: u64, shapes_tried: &'static [u32], most: usize) {
    check(problem, &small(), &Kernels::new(), seed, &shapes(shapes_tried, most));
}

#[test]
fn fprop_of_two_straddled_images() {
    // 2 · 9 · 11 pixels: tiles end inside of rows and images; 72 channels: a channel block and a bit.
    let problem = bf16(plane(Direction::Fprop, [2, 72, 48], [9, 11], [3, 3], [1, 1]));
    run(&problem, 1, &[8, 12], 3);
}

#[test]
fn dgrad_with_a_filter_that_runs_along_channels() {
    let problem = bf16(plane(Direction::Dgrad, [2, 72, 80], [7, 10], [3, 3], [1, 1]));
    run(&problem, 2, &[8, 12], 3);
}

#[test]
fn sizes_around_the_edges_of_a_tile() {
    for (number, width) in [63u64, 64, 65, 127, 128, 129].into_iter().enumerate() {
        for (direction, [c, k]) in [(Direction::Fprop, [64, 56]), (Direction::Dgrad, [72, 64]), (Direction::Wgrad, [64, 72])] {
            let problem = bf16(plane(direction, [1, c, k], [1, width], [1, 3], [0, 1]));
            run(&problem, 10 + number as u64, &[8, 12], 1);
        }
    }
    for channels in [8, 56, 64, 120, 128, 136] {
        for direction in Direction::ALL {
            let problem = bf16(plane(direction, [1, channels, 192 - channels], [5, 5], [2, 2], [1, 0]));
            run(&problem, 20 + channels, &[8, 12], 1);
        }
    }
    // One pixel, one tap, a padding as large as the image, an image smaller than the filter.
    for direction in Direction::ALL {
        run(&bf16(plane(direction, [1, 8, 8], [1, 1], [1, 1], [0, 0])), 3, &[12], 1);
        run(&bf16(plane(direction, [3, 8, 16], [2, 3], [2, 3], [2, 3])), 3, &[12], 1);
        run(&bf16(plane(direction, [2, 16, 8], [2, 2], [5, 5], [2, 3])), 3, &[12], 1);
    }
}

#[test]
fn strides_dilations_and_paddings_that_differ_by_side() {
    let mut random = Random::new(5);
    for number in 0..36 {
        let direction = Direction::ALL[number % 3];
        let mut problem = bf16(plane(direction, [2, 64, 72], [9, 12], [1, 1], [0, 0]));
        for dim in 1..3 {
            problem.filter[dim] = 1 + random.below(4);
            problem.strides[dim] = 1 + random.below(3);
            problem.dilations[dim] = 1 + random.below(3);
            problem.pads_before[dim] = random.below(4);
            problem.pads_after[dim] = random.below(4);
            problem.input[dim] = (problem.filter[dim] - 1) * problem.dilations[dim] + 1 + random.below(8);
        }
        problem.flip = random.below(3) == 0;
        run(&placed(problem), 100 + number as u64, &[8, 12], 1);
    }
}

#[test]
fn phases_without_taps_are_zero_and_pass_through_the_epilogue() {
    // A filter of one tap and a stride of 3: eight of nine phases are empty.
    let mut problem = bf16(plane(Direction::Dgrad, [2, 64, 64], [7, 8], [1, 1], [0, 0]));
    problem.strides = [1, 3, 3];
    let mut problem = placed(problem);
    run(&problem, 7, &[8, 12], 1);
    let residual = Tensor { slot: Slot(3), ..problem.x.clone() };
    problem.epilogue =
        vec![EpilogueStep::Binary { f: BinaryOp::Add, operand: residual, v_is_right: false }, EpilogueStep::Unary(UnaryOp::Relu)];
    run(&problem.canonical().expect("a valid problem"), 8, &[8, 12], 1);
}

/// Phases without taps have no tiles: warps that do not multiply clear their rows beside the tiles of the others, in each way that tiles
/// are taken.
#[test]
fn rows_without_taps_are_cleared_beside_tiles() {
    const ALL: &[u32] = &[0, 1, 8, 9, 12, 18];
    let sparse = |dims, image, filter, strides| {
        let extents = plane(Direction::Dgrad, dims, image, filter, [0, 0]);
        ConvExtents { strides, ..extents }
    };
    // Three of four phases; images, rows of tiles and columns of tiles end inside of tiles.
    run(&placed(bf16(sparse([5, 136, 64], [15, 13], [1, 1], [1, 2, 2]))), 950, ALL, 1);
    run(&placed(bf16(sparse([3, 264, 72], [7, 9], [1, 1], [1, 2, 2]))), 951, ALL, 1);
    // Four phases with taps and five without, two and two; one of seven with taps.
    run(&placed(bf16(sparse([2, 72, 64], [11, 8], [2, 2], [1, 3, 3]))), 952, ALL, 1);
    run(&placed(bf16(sparse([2, 72, 64], [11, 8], [1, 2], [1, 2, 2]))), 953, ALL, 1);
    run(&placed(bf16(sparse([2, 72, 64], [1, 29], [1, 1], [1, 1, 7]))), 954, ALL, 1);
    // No phase has taps.
    let padded = ConvExtents { pads: [0, 1, 1], ..sparse([2, 72, 64], [1, 1], [1, 1], [1, 2, 2]) };
    run(&placed(bf16(padded)), 955, ALL, 1);
    // Groups, a third dim, and results of four bytes.
    run(&placed(bf16(ConvExtents { groups: 3, ..sparse([2, 192, 192], [6, 5], [1, 1], [1, 2, 2]) })), 956, ALL, 1);
    let space = ConvExtents { input: [3, 5, 4], ..sparse([2, 72, 64], [1, 1], [1, 1], [2, 2, 2]) };
    run(&placed(bf16(space)), 957, ALL, 1);
    let wide = |extents| ConvProblem::packed(extents, DType::Bf16, DType::F32).expect("a valid problem");
    run(&placed(wide(sparse([2, 136, 64], [9, 8], [1, 1], [1, 2, 2]))), 958, ALL, 1);
    run(&placed(wide(sparse([2, 264, 64], [9, 8], [1, 1], [1, 2, 2]))), 959, ALL, 1);
}

#[test]
fn one_and_three_dimensions() {
    for direction in Direction::ALL {
        let line = ConvExtents { dilations: [1, 1, 300], ..plane(direction, [2, 64, 24], [1, 700], [1, 3], [0, 300]) };
        run(&bf16(line), 31, &[8, 12], 1);
        let space = ConvExtents {
            input: [4, 5, 6],
            filter: [3, 2, 3],
            pads: [1, 0, 1],
            strides: [2, 1, 2],
            ..plane(direction, [2, 64, 72], [1, 1], [1, 1], [0, 0])
        };
        run(&bf16(space), 32, &[8, 12], 1);
    }
}

#[test]
fn groups_of_whole_channel_blocks() {
    for direction in Direction::ALL {
        let extents = ConvExtents { groups: 3, ..plane(direction, [2, 192, 192], [5, 6], [3, 3], [1, 1]) };
        run(&bf16(extents), 41, &[8, 12], 2);
        let strided = ConvExtents { strides: [1, 2, 2], ..extents };
        run(&bf16(strided), 42, &[12], 1);
    }
}

#[test]
fn every_tile_and_every_split() {
    for (direction, [c, k]) in [(Direction::Fprop, [136, 264]), (Direction::Dgrad, [264, 136]), (Direction::Wgrad, [64, 264])] {
        let problem = bf16(plane(direction, [3, c, k], [9, 10], [3, 3], [1, 1]));
        let kernels = Kernels::new();
        // One of seven configs: over the three directions, each tile is met by several of them.
        check(&problem, &small(), &kernels, 50, &|number, _| number % 7 == direction as usize * 2);
    }
    let strided = ConvExtents { strides: [1, 2, 2], ..plane(Direction::Dgrad, [3, 200, 72], [12, 14], [3, 3], [1, 1]) };
    check(&bf16(strided), &small(), &Kernels::new(), 51, &|number, _| number % 2 == 0);
}

#[test]
fn parts_that_a_second_launch_adds_up() {
    for (direction, [c, k]) in
        [(Direction::Fprop, [320, 40]), (Direction::Dgrad, [40, 320]), (Direction::Wgrad, [64, 72]), (Direction::Wgrad, [24, 72])]
    {
        // Of 24 channels each tap is a matrix of tiles: few of them.
        let filter = if c == 24 { [1, 2] } else { [3, 3] };
        let images = if direction == Direction::Wgrad { 12 } else { 4 };
        let mut problem = bf16(plane(direction, [images, c, k], [9, 10], filter, [0, 1]));
        let kernels = Kernels::new();
        let parts = |_: usize, knobs: &Knobs| knobs.value("split").is_some_and(|split| split > 3) && knobs.value("along") == Some(0);
        check(&problem, &small(), &kernels, 55, &a_quarter(parts));
        let old = Tensor { slot: Slot(3), dtype: DType::F32, ..problem.result().clone() };
        problem.epilogue = vec![EpilogueStep::Binary { f: BinaryOp::Add, operand: old, v_is_right: false }];
        let left = std::cell::Cell::new(2);
        let few = |number: usize, knobs: &Knobs| parts(number, knobs) && left.replace(left.get().max(1) - 1) > 0;
        check(&problem.canonical().expect("a valid problem"), &small(), &kernels, 56, &few);
    }
    // Groups, and a result whose rows have odd lengths.
    let groups = bf16(ConvExtents { groups: 2, ..plane(Direction::Wgrad, [9, 128, 128], [9, 10], [1, 2], [0, 1]) });
    let any = |_: usize, knobs: &Knobs| knobs.value("split").is_some_and(|split| split > 3);
    check(&groups, &small(), &Kernels::new(), 57, &any);
    let mut odd = bf16(plane(Direction::Fprop, [1, 512, 40], [5, 5], [3, 3], [1, 1]));
    odd.k = 37;
    check(&placed(odd), &small(), &Kernels::new(), 58, &any);
}

#[test]
fn filters_of_one_element_are_products() {
    let first = |number: usize, _: &Knobs| number == 0;
    for direction in Direction::ALL {
        for groups in [1, 2] {
            let extents = ConvExtents { groups, ..plane(direction, [2, 64, 96], [5, 7], [1, 1], [0, 0]) };
            let mut problem = bf16(extents);
            check_on("conv.pointwise", &problem, &small(), &Kernels::new(), 61, &first);
            if direction != Direction::Wgrad {
                check_on("conv.pointwise", &summed(problem.clone()), &small(), &Kernels::new(), 60, &first);
            }
            let residual = Tensor { slot: Slot(3), ..problem.result().clone() };
            problem.epilogue =
                vec![EpilogueStep::Binary { f: BinaryOp::Add, operand: residual, v_is_right: false }, EpilogueStep::Unary(UnaryOp::Relu)];
            check_on("conv.pointwise", &problem.canonical().expect("a valid problem"), &small(), &Kernels::new(), 62, &first);
        }
    }
    let engine = verdigris_engines::engine("conv.pointwise").expect("the engine is registered");
    let padded = Problem::Conv(bf16(plane(Direction::Fprop, [2, 64, 96], [5, 7], [1, 1], [1, 0])));
    assert_eq!(engine.accept(&padded, &small()).err().map(|refusal| refusal.reason), Some(Reason::Extent));
}

#[test]
fn no_shape_leads_outside_of_the_catalog() {
    let engine = verdigris_engines::engine("conv.implicit_gemm").expect("the engine is registered");
    let catalog: HashSet<String> = engine.catalog(Target::Sm90a).iter().map(|kernel| kernel.name().to_owned()).collect();
    let mut random = Random::new(9);
    let types = [
        (DType::Bf16, DType::Bf16, Precision::Fp32),
        (DType::F16, DType::F16, Precision::Fp32),
        (DType::F32, DType::F32, Precision::Tf32),
        (DType::F32, DType::F32, Precision::Fp32),
        (DType::E4m3, DType::Bf16, Precision::Fp8Fast),
        (DType::E4m3, DType::Bf16, Precision::Fp8Promoted),
        (DType::I8, DType::I32, Precision::I32),
    ];
    let (mut taken, mut used) = (0, HashSet::new());
    for number in 0..400 {
        let (operands, result, precision) = types[random.below(7) as usize];
        let direction = Direction::ALL[number % 3];
        let mut one = |most: u64| 1 + random.below(most);
        let rank = one(3);
        let mut spatial = |most: u64| [0, 1, 2].map(|dim| if dim + rank as usize >= 3 { one(most) } else { 1 });
        let (filter, strides, dilations, input) = (spatial(4), spatial(3), spatial(2), spatial(60));
        let channels = if one(2) == 1 { [16 * one(20), 16 * one(40)] } else { [one(320), one(640)] };
        let extents = ConvExtents {
            filter,
            strides,
            dilations,
            input: [0, 1, 2].map(|dim| if dim + rank as usize >= 3 { input[dim] + filter[dim] * dilations[dim] } else { 1 }),
            pads: filter.map(|extent| extent / 2),
            groups: 1,
            ..plane(direction, [one(64), channels[0], channels[1]], [1, 1], [1, 1], [0, 0])
        };
        let Ok(problem) = ConvProblem::packed(extents, operands, result) else { continue };
        let problem = laid_out(ConvProblem { precision, ..problem }, if random.below(2) == 0 { random.below(4) as u32 } else { 3 });
        let Ok(candidate) = engine.accept(&Problem::Conv(problem.clone()), &Arch::h200()) else { continue };
        taken += 1;
        for knobs in candidate.knobs().configs() {
            let program = candidate.program(knobs).unwrap_or_else(|refusal| panic!("{refusal}"));
            for launch in program.launches() {
                assert!(catalog.contains(launch.kernel.name()), "{knobs} on {problem:?}: {}", launch.kernel.name());
                used.insert(launch.kernel.name().to_owned());
            }
        }
    }
    assert!(taken > 150 && used.len() > catalog.len() / 2, "{taken} taken, {} of {} kernels used", used.len(), catalog.len());
}

/// The same with sums over channels, in two buffers behind those in use.
fn summed(mut problem: ConvProblem) -> ConvProblem {
    let next = problem.slots().iter().map(|slot| slot.0 + 1).max().unwrap_or(0);
    let sums = |slot| Channels { slot: Slot(slot), dtype: DType::F32, stride: 1 };
    problem.statistics = Some(Statistics { sum: sums(next), sum_of_squares: sums(next + 1) });
    problem.canonical().expect("a valid problem")
}

/// Runs it with sums formed in the epilogue, and of the stored result.
fn run_summed(problem: ConvProblem, seed: u64, shapes_tried: &'static [u32]) {
    for formed in [1, 0] {
        let wanted = shapes(shapes_tried, 1);
        let pick = |number: usize, knobs: &Knobs| knobs.value("sums") == Some(formed) && wanted(number, knobs);
        check(&summed(problem.clone()), &small(), &Kernels::new(), seed, &pick);
    }
}

#[test]
fn sums_over_channels() {
    for direction in [Direction::Fprop, Direction::Dgrad] {
        let mut problem = bf16(plane(direction, [2, 72, 48], [5, 6], [3, 3], [1, 1]));
        run_summed(problem.clone(), 95, &[8]);
        // Rows beyond the result's last hold what the chain makes of nothing: 2.
        problem.epilogue = vec![EpilogueStep::Unary(UnaryOp::Clamp { lower: Real(2.0), upper: Real(40.0) })];
        run_summed(problem, 96, &[0, 8, 12]);
    }
    // Strided rows of a data gradient leave elsewhere, and are read again.
    let strided = ConvExtents { strides: [1, 2, 1], ..plane(Direction::Dgrad, [2, 72, 48], [7, 6], [3, 3], [1, 1]) };
    run(&summed(bf16(strided)), 97, &[8], 1);
}

#[test]
fn sums_over_channels_out_of_every_tile() {
    let extents = plane(Direction::Fprop, [3, 72, 264], [9, 10], [3, 3], [1, 1]);
    let every: &'static [u32] = &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21];
    let formed = |knobs: &Knobs| knobs.value("sums") == Some(1);
    let tiles = shapes(every, 1);
    check(&summed(bf16(extents)), &small(), &Kernels::new(), 98, &a_quarter(|number, knobs| formed(knobs) && tiles(number, knobs)));
    for (operands, result) in [(DType::F16, DType::F16), (DType::Bf16, DType::F32), (DType::F32, DType::F32), (DType::E4m3, DType::Bf16)] {
        run_summed(ConvProblem::packed(extents, operands, result).expect("a valid problem"), 99, &[0, 8, 12]);
    }
    // Groups are matrices beside each other; and depths that are split.
    let grouped = ConvExtents { groups: 2, c: 128, k: 144, ..extents };
    run_summed(bf16(grouped), 100, &[8, 12]);
    let deep = summed(bf16(ConvExtents { c: 264, ..plane(Direction::Fprop, [2, 264, 136], [6, 7], [3, 3], [1, 1]) }));
    for split in 1..=3 {
        let wanted = shapes(&[0, 8], 1);
        check(&deep, &small(), &Kernels::new(), 101, &|number, knobs| {
            knobs.value("split") == Some(split) && formed(knobs) && wanted(number, knobs)
        });
    }
}

#[test]
fn sums_over_channels_read_nothing_again_where_results_leave_whole() {
    let engine = verdigris_engines::engine("conv.implicit_gemm").expect("the engine is registered");
    let problem = summed(bf16(plane(Direction::Fprop, [64, 128, 128], [56, 56], [3, 3], [1, 1])));
    let candidate = engine.accept(&Problem::Conv(problem), &Arch::h200()).unwrap_or_else(|refusal| panic!("{refusal}"));
    let mut formed = 0;
    for knobs in candidate.knobs().configs() {
        let program = candidate.program(knobs).expect("a listed config has a program");
        let names: Vec<&str> = program.launches().map(|launch| launch.kernel.name()).collect();
        let forms = names.iter().any(|name| name.starts_with("conv_gather") && name.contains("_sums_"));
        let reads_again = names.iter().any(|name| name.starts_with("column_sums_of_bf16"));
        assert!(forms != reads_again && forms == (knobs.value("sums") == Some(1)), "{knobs}: {names:?}");
        // Parts that a launch of its own adds up are no results yet.
        assert!(!(forms && names.iter().any(|name| name.starts_with("add_parts"))), "{knobs}: {names:?}");
        formed += usize::from(forms);
    }
    assert!(formed > 10, "{formed}");
}

#[test]
fn ping_pong_tiles() {
    for direction in [Direction::Fprop, Direction::Dgrad] {
        let extents = plane(direction, [3, 136, 264], [9, 10], [3, 3], [1, 1]);
        run(&bf16(extents), 91, &[17, 18, 19], 2);
        // Phases of 4, 2, 2 and 1 taps; then some without.
        run(&bf16(ConvExtents { strides: [1, 2, 2], ..extents }), 92, &[17, 18, 19], 2);
        let sparse = ConvExtents { strides: [1, 3, 2], dilations: [1, 1, 2], ..extents };
        run(&bf16(sparse), 93, &[17, 18, 19], 2);
    }
    let extents = plane(Direction::Fprop, [3, 136, 264], [9, 10], [3, 3], [1, 1]);
    run(&ConvProblem::packed(extents, DType::F16, DType::F16).expect("a valid problem"), 94, &[18], 1);
}

#[test]
fn every_type() {
    let types = [
        (DType::F16, DType::F16),
        (DType::Bf16, DType::F32),
        (DType::F32, DType::F32),
        (DType::E4m3, DType::Bf16),
        (DType::E5m2, DType::F16),
        (DType::I8, DType::I32),
        (DType::I8, DType::F32),
        (DType::U8, DType::I32),
    ];
    for (number, (operands, result)) in types.into_iter().enumerate() {
        for direction in Direction::ALL {
            if direction == Direction::Wgrad && matches!(operands, DType::I8 | DType::U8) {
                continue;
            }
            for strides in [[1, 1, 1], [1, 2, 1]] {
                let extents = ConvExtents { strides, ..plane(direction, [2, 80, 48], [6, 7], [3, 3], [1, 1]) };
                let mut problem = ConvProblem::packed(extents, operands, result).expect("a valid problem");
                if operands == DType::F32 {
                    problem.precision = Precision::Tf32;
                }
                run(&problem, 60 + number as u64, &[8, 12], 1);
                if operands.is_fp8() {
                    problem.precision = Precision::Fp8Promoted;
                    run(&problem, 70 + number as u64, &[8, 12], 1);
                }
            }
        }
    }
}

#[test]
fn filters_and_results_as_they_lie() {
    // The filter in the order k, c, taps, as it lies where channels come first: copied.
    let mut problem = bf16(plane(Direction::Fprop, [2, 72, 40], [6, 7], [3, 3], [1, 1]));
    problem.w = Tensor::channels_first(problem.w.slot, problem.w.dtype, problem.w_extents());
    run(&problem.clone().canonical().expect("a valid problem"), 80, &[8, 12], 1);
    // Results whose rows begin anywhere, and x as a part of something wider.
    problem.k = 37;
    let mut problem = placed(problem);
    for dim in [0, 2, 3, 4] {
        problem.x.strides[dim] *= 2;
    }
    run(&problem.clone().canonical().expect("a valid problem"), 81, &[8, 12], 1);
    problem.direction = Direction::Dgrad;
    (problem.x.slot, problem.y.slot) = (problem.y.slot, problem.x.slot);
    problem.k = 40;
    problem.c = 37;
    for strides in [[1, 1, 1], [1, 2, 2]] {
        problem.strides = strides;
        run(&placed(problem.clone()), 82, &[8, 12], 1);
    }
    // The filter's gradient with a bias along k and an old value.
    for c in [64, 24] {
        let mut problem = bf16(plane(Direction::Wgrad, [2, c, 72], [6, 7], [3, 3], [1, 1]));
        let old = Tensor { slot: Slot(3), ..problem.w.clone() };
        problem.epilogue = vec![EpilogueStep::Binary { f: BinaryOp::Add, operand: old, v_is_right: false }];
        run(&problem.canonical().expect("a valid problem"), 83, &[8, 12], 2);
    }
}

/// The usual layouts, and some that nobody would choose.
fn laid_out(mut problem: ConvProblem, layout: u32) -> ConvProblem {
    let (x, w, y) = (problem.x_extents(), problem.w_extents(), problem.y_extents());
    for (tensor, extents) in [(&mut problem.x, x), (&mut problem.w, w), (&mut problem.y, y)] {
        let [n, c, d, h, width] = extents;
        tensor.strides = match layout {
            0 => Tensor::channels_first(tensor.slot, tensor.dtype, extents).strides,
            // Rows of pixels with a gap behind each, channels last.
            1 => [c * d * h * (width + 3), 1, c * h * (width + 3), c * (width + 3), c],
            // Every second element, images innermost but one.
            2 => [2, 2 * n, 2 * n * c, 2 * n * c * d, 2 * n * c * d * h],
            _ => tensor.strides,
        };
    }
    problem.canonical().expect("a valid problem")
}

#[test]
fn layouts_and_channels_that_cannot_be_mapped() {
    for direction in Direction::ALL {
        for (number, [c, k]) in [[37, 21], [64, 40], [3, 72], [72, 5]].into_iter().enumerate() {
            for layout in 0..4 {
                for strides in [[1, 1, 1], [1, 2, 2]] {
                    if number > 0 && !(number + layout as usize + strides[1] as usize).is_multiple_of(4) {
                        continue;
                    }
                    let extents = ConvExtents { strides, ..plane(direction, [2, c, k], [7, 9], [3, 3], [1, 1]) };
                    run(&laid_out(bf16(extents), layout), 300 + number as u64, &[8, 12], 1);
                }
            }
        }
        for (operands, result, precision) in [
            (DType::F32, DType::F32, Precision::Tf32),
            (DType::F32, DType::F32, Precision::Fp32),
            (DType::E4m3, DType::Bf16, Precision::Fp8Fast),
            (DType::I8, DType::I32, Precision::I32),
        ] {
            if direction == Direction::Wgrad && operands == DType::I8 {
                continue;
            }
            for (layout, [c, k]) in [(0, [37, 21]), (2, [37, 24]), (3, [37, 21])] {
                let packed = ConvProblem::packed(plane(direction, [2, c, k], [5, 6], [3, 3], [1, 1]), operands, result);
                let problem = ConvProblem { precision, ..packed.expect("a valid problem") };
                run(&laid_out(problem, layout), 320 + u64::from(layout), &[12], 1);
            }
        }
        // One and three dims, and groups.
        run(&laid_out(bf16(plane(direction, [2, 21, 30], [1, 70], [1, 3], [0, 1])), 0), 330, &[8, 12], 1);
        let space =
            ConvExtents { input: [3, 4, 5], filter: [2, 3, 2], pads: [1, 1, 0], ..plane(direction, [2, 21, 30], [1, 1], [1, 1], [0, 0]) };
        run(&laid_out(bf16(space), 0), 331, &[8, 12], 1);
        let groups = ConvExtents { groups: 2, ..plane(direction, [2, 128, 128], [5, 6], [3, 3], [1, 1]) };
        run(&laid_out(bf16(groups), 0), 332, &[8, 12], 1);
    }
}

#[test]
fn tiles_that_are_transposed_in_shared_memory() {
    let tf32 = |extents: ConvExtents| {
        let packed = ConvProblem::packed(extents, DType::F32, DType::F32).expect("a valid problem");
        ConvProblem { precision: Precision::Tf32, ..packed }
    };
    let base = |channels, filter, pads| plane(Direction::Wgrad, channels, [9, 10], filter, pads);
    // Taps as columns, every tile, whole and in parts; then taps as matrices.
    run(&tf32(base([3, 64, 288], [3, 3], [1, 1])), 370, &[1, 4, 8, 10, 12], 1);
    let kernels = Kernels::new();
    let parts = |_: usize, knobs: &Knobs| knobs.value("split").is_some_and(|split| split > 3) && knobs.value("along") == Some(0);
    check(&tf32(base([6, 40, 96], [1, 2], [0, 1])), &small(), &kernels, 371, &parts);
    run(&tf32(ConvExtents { strides: [1, 2, 3], dilations: [1, 2, 1], ..base([2, 72, 64], [3, 2], [2, 1]) }), 372, &[1, 12], 1);
    run(&tf32(ConvExtents { groups: 3, ..base([2, 96, 96], [3, 3], [1, 1]) }), 373, &[8, 12], 1);
    run(&tf32(plane(Direction::Wgrad, [2, 32, 32], [1, 70], [1, 3], [0, 1])), 374, &[8], 1);
    let space = ConvExtents { input: [3, 4, 5], filter: [2, 3, 2], pads: [1, 1, 0], ..base([2, 40, 64], [1, 1], [0, 0]) };
    run(&tf32(space), 375, &[8], 1);
    let engine = verdigris_engines::engine("conv.implicit_gemm").expect("the engine is registered");
    let candidate =
        engine.accept(&Problem::Conv(tf32(base([3, 64, 96], [3, 3], [1, 1]))), &small()).unwrap_or_else(|refusal| panic!("{refusal}"));
    let notes = candidate.notes(candidate.knobs().default_config()).expect("listed");
    assert!(notes.down_convert == Some(DType::Tf32) && !notes.split_operands);
}

#[test]
fn chains_over_tensors_that_are_copied() {
    for direction in [Direction::Fprop, Direction::Dgrad] {
        for layout in [0, 1] {
            let mut problem = laid_out(bf16(plane(direction, [2, 40, 37], [5, 6], [3, 3], [1, 1])), layout);
            let bias = Tensor { slot: Slot(3), dtype: DType::F32, strides: [0, 1, 0, 0, 0] };
            // The old value, in place; and sums over channels of what is stored.
            let old = problem.result().clone();
            problem.epilogue = vec![
                EpilogueStep::Binary { f: BinaryOp::Add, operand: bias, v_is_right: false },
                EpilogueStep::Binary { f: BinaryOp::Add, operand: Tensor { slot: Slot(4), ..old }, v_is_right: false },
                EpilogueStep::Unary(UnaryOp::Relu),
            ];
            let sums = |slot| Channels { slot: Slot(slot), dtype: DType::F32, stride: 1 };
            problem.statistics = Some(Statistics { sum: sums(5), sum_of_squares: sums(6) });
            run(&problem.canonical().expect("a valid problem"), 340, &[8], 1);
        }
    }
}

#[test]
fn steps_on_the_activations() {
    let vector = |slot| Channels { slot: Slot(slot), dtype: DType::F32, stride: 1 };
    let steps = |first| {
        vec![
            EpilogueStep::Binary { f: BinaryOp::Mul, operand: vector(first), v_is_right: false },
            EpilogueStep::Binary { f: BinaryOp::Add, operand: vector(first + 1), v_is_right: false },
            EpilogueStep::Unary(UnaryOp::Relu),
        ]
    };
    for direction in Direction::ALL {
        for (operands, result, precision) in [
            (DType::Bf16, DType::Bf16, Precision::Fp32),
            (DType::F16, DType::F16, Precision::Fp32),
            (DType::F32, DType::F32, Precision::Tf32),
            (DType::F32, DType::F32, Precision::Fp32),
            (DType::E4m3, DType::Bf16, Precision::Fp8Promoted),
        ] {
            for layout in [0, 3] {
                // Padding stays zero: with it, sums at the edges would show a bias that was added to it.
                let packed = ConvProblem::packed(plane(direction, [2, 40, 21], [5, 6], [3, 3], [1, 1]), operands, result);
                let mut problem = laid_out(ConvProblem { precision, ..packed.expect("a valid problem") }, layout);
                problem.prologue = steps(3);
                run(&problem.canonical().expect("a valid problem"), 350, &[12], 1);
            }
        }
    }
}

/// Operands with the digits of f32 in ±1, drawn anew; those of a type that has fewer are rounded to it.
fn draw(random: &mut Random, dtype: DType, count: u64) -> Vec<f64> {
    let value = |random: &mut Random| f64::from((random.below(1 << 24) as f32 - (1 << 23) as f32) / (1 << 23) as f32);
    (0..count).map(|_| round_to(dtype, value(random))).collect()
}

/// What the default config of `conv.implicit_gemm`, or the first that `pick` likes, makes of operands on a tensor core that cuts sums off or
/// rounds them, with its notes.
fn results(problem: &ConvProblem, values: &[Vec<f64>; 2], pick: impl Fn(&Knobs) -> bool, accumulation: Accumulation) -> (Vec<f64>, Notes) {
    let engine = verdigris_engines::engine("conv.implicit_gemm").expect("the engine is registered");
    let candidate = engine.accept(&Problem::Conv(problem.clone()), &small()).unwrap_or_else(|refusal| panic!("{refusal}"));
    let space = candidate.knobs();
    let knobs = space.configs().iter().find(|knobs| pick(knobs)).expect("a config to pick");
    let result = problem.result();
    let elements: u64 = problem.result_extents().iter().product();
    let mut memory = Memory::new();
    let operands = problem.operands();
    let mut buffers: Vec<(Slot, Vec<u8>)> =
        operands.iter().zip(values).map(|((_, tensor, _), values)| (tensor.slot, encode(tensor.dtype, values))).collect();
    buffers.push((result.slot, vec![0xA5; result.dtype.bytes() * elements as usize]));
    buffers.sort_by_key(|(slot, _)| slot.0);
    buffers.iter().for_each(|(_, bytes)| {
        memory.add(bytes);
    });
    let program = candidate.program(knobs).expect("a listed config has a program");
    let options = Options { sms: 4, accumulation, ..Options::schedule(3) };
    interp::run(&program, &Kernels::new(), &mut memory, &options).unwrap_or_else(|findings| panic!("{findings}"));
    let out = memory.to_vec(result.slot.0 as usize);
    let values = out.chunks_exact(result.dtype.bytes()).map(|bytes| read_element(result.dtype, bytes).expect("a number")).collect();
    (values, candidate.notes(knobs).expect("listed"))
}

/// f32 operands of 24 digits under the policy `fp32`: no further from the sum in f64 than f32 multiply-adds may be.
#[test]
fn split_operands_keep_the_digits_of_f32() {
    for direction in Direction::ALL {
        let packed = ConvProblem::packed(plane(direction, [2, 72, 40], [6, 7], [3, 3], [1, 1]), DType::F32, DType::F32);
        let problem = ConvProblem { precision: Precision::Fp32, ..packed.expect("a valid problem") };
        let mut random = Random::new(360);
        let values = problem.operands().map(|(_, tensor, extents)| draw(&mut random, tensor.dtype, extents.iter().product()));
        let sums = reference(&problem, &values[0], &values[1]);
        let sizes = values.each_ref().map(|values| values.iter().map(|v| v.abs()).collect::<Vec<_>>());
        let sizes = reference(&problem, &sizes[0], &sizes[1]);
        let (out, notes) = results(&problem, &values, |_| true, Accumulation::Full);
        assert!(notes.split_operands && notes.down_convert.is_none());
        let depth = problem.gemm_extents().k as f64;
        let errors = out.iter().zip(sums.iter().zip(&sizes)).map(|(out, (sum, size))| (out - sum).abs() / (size * depth * 2f64.powi(-24)));
        let worst = errors.fold(0.0, f64::max);
        assert!(worst < 0.5, "{direction:?}: {worst} of what f32 multiply-adds are allowed");
    }
}

/// Over 16,384 terms on a tensor core that cuts off: within 4 times 2⁻²⁴ · √(L/6) of the sums in f64, the error that one chain of f32 multiply-adds
/// has in the mean. Sums that stay in the accumulators lie outside, so this would tell.
#[test]
fn sums_of_terms_are_as_close_as_multiply_adds_however_deep() {
    let extents = plane(Direction::Wgrad, [1, 64, 64], [128, 128], [1, 1], [0, 0]);
    let model = 2f64.powi(-24) * (128.0 * 128.0 / 6f64).sqrt();
    let error = |operands: DType, precision| {
        let packed = ConvProblem::packed(extents, operands, DType::F32).expect("a valid problem");
        let problem = ConvProblem { precision, ..packed };
        let mut random = Random::new(361);
        let values = problem.operands().map(|(_, tensor, extents)| draw(&mut random, tensor.dtype, extents.iter().product()));
        let sums = reference(&problem, &values[0], &values[1]);
        // The whole depth in one chain.
        let (out, _) = results(&problem, &values, |knobs| knobs.value("split") == Some(0), Accumulation::Hopper);
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
        norm(&mut out.iter().zip(&sums).map(|(out, sum)| out - sum)) / norm(&mut sums.iter().copied())
    };
    let (terms, in_place) = (error(DType::F32, Precision::Fp32), error(DType::Bf16, Precision::Fp32));
    assert!(terms < 4.0 * model, "{terms:e}, and 4 times the model is {:e}", 4.0 * model);
    assert!(in_place > 4.0 * model, "sums kept in accumulators have only {in_place:e}: the model of the tensor core does not cut off");
}

#[test]
fn fused_chains() {
    for strides in [[1, 1, 1], [1, 2, 2]] {
        for direction in [Direction::Fprop, Direction::Dgrad] {
            let mut problem = bf16(ConvExtents { strides, ..plane(direction, [2, 64, 64], [7, 9], [3, 3], [1, 1]) });
            let bias = Tensor { slot: Slot(3), dtype: DType::F32, strides: [0, 1, 0, 0, 0] };
            let residual = Tensor { slot: Slot(4), ..problem.result().clone() };
            problem.epilogue = vec![
                EpilogueStep::Binary { f: BinaryOp::Add, operand: bias, v_is_right: false },
                EpilogueStep::Binary { f: BinaryOp::Add, operand: residual, v_is_right: false },
                EpilogueStep::Unary(UnaryOp::Relu),
            ];
            run(&problem.canonical().expect("a valid problem"), 90, &[8, 12], 2);
        }
    }
}

#[test]
fn refusals_name_what_was_seen() {
    let engine = verdigris_engines::engine("conv.implicit_gemm").expect("the engine is registered");
    let refused = |problem: &ConvProblem| {
        let problem = Problem::Conv(problem.clone());
        match engine.accept(&problem, &Arch::h200()) {
            Err(refusal) => (refusal.reason, refusal.seen),
            Ok(_) => panic!("taken: {problem:?}"),
        }
    };
    let base = |direction| plane(direction, [2, 64, 64], [30, 30], [3, 3], [1, 1]);
    let groups = bf16(ConvExtents { groups: 16, ..base(Direction::Fprop) });
    let begins = "16 groups of 4 and 4 channels of bf16; each must begin at a multiple of 16 bytes";
    assert_eq!(refused(&groups), (Reason::Extent, begins.to_owned()));
    let far = bf16(ConvExtents { dilations: [1, 200, 1], pads: [0, 200, 1], ..base(Direction::Fprop) });
    assert!(refused(&far).1.contains("a tap lies 400 pixels away") || refused(&far).1.contains("-200"), "{:?}", refused(&far));
    let strided = bf16(ConvExtents { strides: [1, 9, 1], ..base(Direction::Fprop) });
    assert_eq!(refused(&strided), (Reason::Extent, "the stride of spatial dim 1 is 9; TMA takes up to 8".to_owned()));
    let uneven = bf16(ConvExtents { groups: 2, ..plane(Direction::Fprop, [2, 128, 74], [30, 30], [3, 3], [1, 1]) });
    let uneven = ConvProblem { strides: [1, 1, 1], ..laid_out(uneven, 0) };
    assert_eq!(refused(&ConvProblem { y: Tensor { dtype: DType::I32, ..uneven.y.clone() }, ..uneven }).0, Reason::Alignment);
    let bytes = ConvProblem::packed(base(Direction::Wgrad), DType::I8, DType::I32).expect("a valid problem");
    assert_eq!(refused(&bytes).0, Reason::DType);
}

/// Verifies kernels, and assembles them where the assembler is at hand.
fn assembles_without_spills(kernels: impl IntoIterator<Item = KernelRef>) {
    let ptxas = std::env::var_os("VERDIGRIS_PTXAS");
    if ptxas.is_none() {
        eprintln!("not assembled: VERDIGRIS_PTXAS is not set");
    }
    let mut faults = Vec::new();
    for kernel in kernels {
        let verified = match verify::verify(kernel.build()) {
            Ok(verified) => verified,
            Err(faults) => panic!("{}: {faults}", kernel.name()),
        };
        let Some(ptxas) = &ptxas else { continue };
        let source = std::env::temp_dir().join(format!("{}-{}.ptx", kernel.name(), std::process::id()));
        std::fs::write(&source, ptx::print(&verified, Isa::V9_0)).expect("a writable temporary folder");
        let output = Command::new(ptxas).args(["-v", "-arch=sm_90a", "-o", "/dev/null"]).arg(&source).output().expect("ptxas runs");
        let words = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        let _ = std::fs::remove_file(source);
        let clean = output.status.success() && !["(C75", "(C76", "warning"].iter().any(|word| words.contains(word));
        if !clean || !words.contains(" 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") {
            faults.push(format!("{}: {words}", kernel.name()));
        }
    }
    assert!(faults.is_empty(), "{} kernels\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn every_kernel_of_the_catalog_is_verified_and_assembles_without_spills() {
    let engine = verdigris_engines::engine("conv.implicit_gemm").expect("the engine is registered");
    let catalog = engine.catalog(Target::Sm90a);
    assert!(catalog.len() <= 310, "{} kernels", catalog.len());
    assembles_without_spills(catalog);
}

#[test]
fn kernels_that_form_sums_are_verified_and_assemble_without_spills() {
    let engine = verdigris_engines::engine("conv.implicit_gemm").expect("the engine is registered");
    let mut kernels = std::collections::BTreeMap::new();
    for (operands, result) in [(DType::Bf16, DType::Bf16), (DType::F16, DType::F16), (DType::Bf16, DType::F32), (DType::F32, DType::F32)] {
        for (direction, spatial) in [(Direction::Fprop, 2), (Direction::Dgrad, 2), (Direction::Fprop, 3)] {
            let mut extents = plane(direction, [64, 320, 320], [28, 28], [3, 3], [1, 1]);
            if spatial == 3 {
                (extents.input[0], extents.filter[0]) = (8, 3);
            }
            let problem = summed(ConvProblem::packed(extents, operands, result).expect("a valid problem"));
            let candidate = engine.accept(&Problem::Conv(problem), &Arch::h200()).unwrap_or_else(|refusal| panic!("{refusal}"));
            for knobs in candidate.knobs().configs() {
                let program = candidate.program(knobs).expect("a listed config has a program");
                let formed = program.launches().filter(|launch| launch.kernel.name().contains("sums"));
                kernels.extend(formed.map(|launch| (launch.kernel.name().to_owned(), launch.kernel.clone())));
            }
        }
    }
    assert!(kernels.len() > 50, "{} kernels", kernels.len());
    assembles_without_spills(kernels.into_values());
}

/// Tiles of channels by pixels that have their depth to themselves: fewer pixels than a tile has, as many, one more; channels that end
/// within a tile, and a cluster whose second tile has none; filters along the depth and along the channels; chains, whose operands are read
/// the other way round.
#[test]
fn swap_ab_with_whole_depths() {
    const ACROSS: &[u32] = &[31];
    let problem = |direction, channels, image| {
        let [c, k] = if direction == Direction::Fprop { [64, channels] } else { [channels, 64] };
        bf16(plane(direction, [1, c, k], image, [1, 3], [0, 1]))
    };
    run(&problem(Direction::Fprop, 72, [7, 7]), 920, ACROSS, 1);
    run(&problem(Direction::Dgrad, 136, [12, 16]), 921, ACROSS, 1);
    run(&problem(Direction::Fprop, 264, [1, 193]), 922, ACROSS, 1);
    let base = plane(Direction::Fprop, [5, 128, 136], [5, 6], [1, 3], [0, 1]);
    run(&bf16(ConvExtents { strides: [1, 2, 2], ..base }), 923, ACROSS, 1);
    run(&bf16(ConvExtents { dilations: [1, 1, 2], pads: [0, 0, 2], ..base }), 924, ACROSS, 1);
    let groups = ConvExtents { groups: 2, ..plane(Direction::Dgrad, [3, 256, 128], [5, 6], [2, 2], [1, 0]) };
    run(&bf16(groups), 925, ACROSS, 1);
    let mut problem = bf16(plane(Direction::Fprop, [2, 64, 136], [9, 12], [1, 3], [0, 1]));
    let residual = Tensor { slot: Slot(3), ..problem.y.clone() };
    let bias = Tensor { slot: Slot(4), dtype: DType::F32, strides: [0, 1, 0, 0, 0] };
    problem.epilogue = vec![
        EpilogueStep::Binary { f: BinaryOp::Add, operand: bias, v_is_right: false },
        EpilogueStep::Binary { f: BinaryOp::Add, operand: residual, v_is_right: false },
        EpilogueStep::Unary(UnaryOp::Relu),
    ];
    run(&problem.canonical().expect("a valid problem"), 926, ACROSS, 1);
    // Stages of the transpose hold halves: a result of four bytes would be staged over itself.
    let engine = verdigris_engines::engine("conv.implicit_gemm").expect("it is registered");
    let offers = |d: DType| {
        let mut problem = bf16(plane(Direction::Fprop, [2, 64, 136], [9, 12], [1, 3], [0, 1]));
        problem.y.dtype = d;
        let candidate = engine.accept(&Problem::Conv(problem), &Arch::h200()).unwrap_or_else(|refusal| panic!("{refusal}"));
        candidate.knobs().configs().iter().any(|knobs| knobs.value("shape") == Some(ACROSS[0]))
    };
    assert!(offers(DType::Bf16) && !offers(DType::F32));
}

/// Tiles of channels by pixels, whose depth a cluster shares: fewer pixels than a tile has, as many, one more, two tiles; channels that end
/// within a tile and within a block of it; filters along the depth and along the channels.
#[test]
fn swap_ab_of_few_pixels() {
    const SMALL: &[u32] = &[29, 30, 32];
    const WIDE: &[u32] = &[27];
    const ALL: &[u32] = &[27, 28, 29, 30, 32];
    let problem = |direction, channels, image| {
        let [c, k] = if direction == Direction::Fprop { [64, channels] } else { [channels, 64] };
        bf16(plane(direction, [1, c, k], image, [3, 3], [1, 1]))
    };
    run(&problem(Direction::Fprop, 72, [7, 7]), 900, SMALL, 1);
    run(&problem(Direction::Dgrad, 136, [7, 7]), 901, WIDE, 1);
    run(&problem(Direction::Fprop, 136, [8, 13]), 902, WIDE, 1);
    run(&problem(Direction::Fprop, 264, [7, 15]), 903, WIDE, 1);
    run(&problem(Direction::Dgrad, 264, [7, 15]), 904, &[28], 1);
    run(&problem(Direction::Dgrad, 264, [7, 15]), 904, SMALL, 1);
    run(&problem(Direction::Fprop, 56, [1, 1]), 905, ALL, 1);
    // Images end inside of tiles; strides, dilations and groups; a depth of as many steps as parts, and of more.
    let base = plane(Direction::Fprop, [5, 128, 72], [5, 6], [1, 3], [0, 1]);
    run(&bf16(base), 910, SMALL, 1);
    run(&bf16(ConvExtents { strides: [1, 2, 2], ..base }), 911, SMALL, 1);
    run(&bf16(ConvExtents { dilations: [1, 1, 2], pads: [0, 0, 2], ..base }), 912, WIDE, 1);
    let groups = ConvExtents { groups: 2, ..plane(Direction::Dgrad, [3, 256, 128], [5, 6], [2, 2], [1, 0]) };
    run(&bf16(groups), 913, SMALL, 1);
    run(&bf16(plane(Direction::Fprop, [2, 256, 72], [3, 5], [1, 2], [0, 1])), 914, SMALL, 1);
    // A chain behind the sums.
    let mut problem = bf16(plane(Direction::Fprop, [2, 64, 72], [5, 7], [3, 3], [1, 1]));
    let residual = Tensor { slot: Slot(3), ..problem.y.clone() };
    problem.epilogue =
        vec![EpilogueStep::Binary { f: BinaryOp::Add, operand: residual, v_is_right: false }, EpilogueStep::Unary(UnaryOp::Relu)];
    run(&problem.canonical().expect("a valid problem"), 916, SMALL, 1);
}
