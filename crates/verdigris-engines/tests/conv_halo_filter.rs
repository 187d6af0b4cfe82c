//! wgrad of `conv.halo` on the interpreter against plain loops: edges of boxes, images and tiles, dilations, paddings, groups of taps,
//! types, shares.

mod conv_check;

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};

use conv_check::{a_quarter, bf16, check_on, placed, plane, small};
use verdigris_engines::arch::Arch;
use verdigris_engines::engine::{Knobs, Reason};
use verdigris_graph::{BinaryOp, Channels, ConvExtents, ConvProblem, Direction, EpilogueStep, Problem, Slot, Tensor, UnaryOp};
use verdigris_kir::interp::Kernels;
use verdigris_kir::ir::Target;
use verdigris_reference::data::Random;
use verdigris_tensor::DType;

const ENGINE: &str = "conv.halo";

fn wgrad(nck: [u64; 3], input: [u64; 2], filter: [u64; 2], pads: [u64; 2]) -> ConvExtents {
    plane(Direction::Wgrad, nck, input, filter, pads)
}

/// The first `most` configs of each shape.
fn of_each_shape(most: usize) -> impl Fn(usize, &Knobs) -> bool {
    let seen = RefCell::new(BTreeMap::new());
    move |_, knobs| {
        let mut seen = seen.borrow_mut();
        let count = seen.entry(knobs.value("shape")).or_insert(0usize);
        *count += 1;
        *count <= most
    }
}

/// The quickest by estimate.
fn first(number: usize, _: &Knobs) -> bool {
    number == 0
}

fn run(problem: &ConvProblem, seed: u64, pick: &dyn Fn(usize, &Knobs) -> bool) {
    check_on(ENGINE, problem, &small(), &Kernels::new(), seed, pick);
}

#[test]
fn every_shape_on_an_image_that_boxes_straddle() {
    run(&bf16(wgrad([2, 72, 80], [9, 11], [3, 3], [1, 1])), 1, &of_each_shape(2));
    run(&bf16(wgrad([2, 40, 16], [9, 11], [5, 5], [2, 2])), 2, &of_each_shape(1));
}

#[test]
fn images_around_the_edges_of_a_box() {
    for (number, extent) in [1u64, 7, 8, 9, 14, 15, 16, 17, 31, 33].into_iter().enumerate() {
        let seed = 10 + number as u64;
        run(&bf16(wgrad([3, 32, 64], [extent, extent + 1], [3, 3], [1, 1])), seed, &first);
        run(&bf16(wgrad([2, 64, 32], [17 - extent.min(16), extent], [1, 3], [0, 1])), seed + 20, &first);
    }
}

#[test]
fn channels_from_eight_on() {
    for channels in [8, 24, 32, 40, 64, 72, 128, 136, 200] {
        run(&bf16(wgrad([1, channels, 208 - channels], [7, 9], [2, 3], [1, 0])), 40 + channels, &first);
    }
}

#[test]
fn dilations_paddings_that_differ_by_side_and_filters_that_run_backwards() {
    let mut random = Random::new(5);
    for number in 0..24 {
        let mut problem = bf16(wgrad([2, 32, 24], [9, 12], [2, 2], [0, 0]));
        for dim in 1..3 {
            problem.filter[dim] = 1 + random.below(5);
            problem.dilations[dim] = 1 + random.below(3);
            problem.pads_before[dim] = random.below(8);
            problem.pads_after[dim] = random.below(8);
            problem.input[dim] = (problem.filter[dim] - 1) * problem.dilations[dim] + 1 + random.below(8);
        }
        problem.filter[2] += u64::from(problem.filter[1] == 1);
        problem.input[2] += problem.dilations[2];
        problem.flip = random.below(3) == 0;
        run(&placed(problem), 100 + number, &of_each_shape(1));
    }
}

#[test]
fn one_and_three_dimensions() {
    run(&bf16(ConvExtents { dilations: [1, 1, 30], ..wgrad([2, 64, 24], [1, 200], [1, 3], [0, 30]) }), 31, &of_each_shape(1));
    let space = |filter: [u64; 3], pads| ConvExtents { input: [4, 5, 9], filter, pads, ..wgrad([2, 32, 72], [1, 1], [1, 1], [0, 0]) };
    run(&bf16(space([3, 3, 3], [1, 1, 1])), 32, &of_each_shape(1));
    run(&bf16(space([3, 1, 1], [1, 0, 0])), 33, &of_each_shape(1));
    run(&bf16(space([1, 3, 3], [0, 1, 1])), 34, &first);
    run(&bf16(space([2, 3, 4], [0, 2, 1])), 35, &first);
}

#[test]
fn many_shares_of_the_pixels_are_added_up_by_slices() {
    let problem = bf16(wgrad([12, 32, 24], [9, 10], [3, 3], [1, 1]));
    for sms in [9, 16] {
        let slices = |_: usize, knobs: &Knobs| knobs.value("parts").is_some_and(|parts| parts >= 8);
        check_on(ENGINE, &problem, &Arch::virtual_device(sms), &Kernels::new(), 50, &a_quarter(slices));
    }
}

#[test]
fn results_of_other_types_and_layouts_and_what_is_added_to_them() {
    for (operands, result) in [(DType::Bf16, DType::F32), (DType::F16, DType::F16), (DType::F16, DType::F32), (DType::F16, DType::Bf16)] {
        let extents = wgrad([2, 40, 72], [6, 9], [3, 3], [1, 1]);
        let mut problem = ConvProblem::packed(extents, operands, result).expect("a valid problem");
        run(&problem, 60, &first);
        let old = Tensor { slot: Slot(3), dtype: DType::F32, ..problem.result().clone() };
        problem.epilogue =
            vec![EpilogueStep::Binary { f: BinaryOp::Add, operand: old, v_is_right: false }, EpilogueStep::Unary(UnaryOp::Relu)];
        run(&problem.clone().canonical().expect("a valid problem"), 61, &first);
    }
    // Images and pixels with room between them.
    let mut problem = bf16(wgrad([2, 40, 72], [6, 9], [3, 3], [1, 1]));
    for tensor in [&mut problem.x, &mut problem.y] {
        let [n, c, d, h, w] = tensor.strides;
        tensor.strides = [n * 2 + 64, c, d * 2 + 32, h * 2 + 16, w * 2];
    }
    run(&problem.canonical().expect("a valid problem"), 63, &first);
}

#[test]
fn what_is_not_taken_is_refused_by_its_reason() {
    let engine = verdigris_engines::engine(ENGINE).expect("the engine is registered");
    let refused = |problem: ConvProblem| match engine.accept(&Problem::Conv(problem), &small()) {
        Err(refusal) => refusal.reason,
        Ok(_) => panic!("was taken"),
    };
    let extents = wgrad([2, 64, 64], [9, 9], [3, 3], [1, 1]);
    assert_eq!(refused(bf16(ConvExtents { strides: [1, 1, 2], ..extents })), Reason::Extent);
    assert_eq!(refused(bf16(ConvExtents { groups: 64, ..extents })), Reason::Extent);
    assert_eq!(refused(bf16(ConvExtents { filter: [1, 1, 1], pads: [0; 3], ..extents })), Reason::Extent);
    assert_eq!(refused(bf16(ConvExtents { k: 68, ..extents })), Reason::Alignment);
    assert_eq!(refused(ConvProblem::packed(extents, DType::F32, DType::F32).expect("a valid problem")), Reason::DType);
    let far = ConvExtents { input: [1, 9, 900], dilations: [1, 1, 400], pads: [0, 1, 0], ..extents };
    assert_eq!(refused(bf16(ConvExtents { filter: [1, 3, 3], ..far })), Reason::SharedMemory);
    // What does not lie in lines is taken by copies alone.
    let mut first_channels = bf16(extents);
    first_channels.x.strides = Tensor::channels_first(first_channels.x.slot, DType::Bf16, first_channels.x_extents()).strides;
    let mut outermost = bf16(extents);
    outermost.w.strides = Tensor::channels_first(outermost.w.slot, DType::Bf16, outermost.w_extents()).strides;
    for problem in [first_channels, outermost] {
        let candidate = engine.accept(&Problem::Conv(problem), &small()).expect("taken");
        assert!(candidate.knobs().configs().iter().all(|knobs| knobs.value("copies").is_some()));
    }
    let mut scaled = bf16(extents);
    scaled.prologue = vec![EpilogueStep::Binary {
        f: BinaryOp::Mul,
        operand: Channels { slot: Slot(3), dtype: DType::F32, stride: 1 },
        v_is_right: false,
    }];
    assert_eq!(refused(scaled), Reason::Epilogue);
}

#[test]
fn plain_problems_name_kernels_of_the_catalog_alone() {
    let engine = verdigris_engines::engine(ENGINE).expect("the engine is registered");
    let catalog: HashSet<String> = engine.catalog(Target::Sm90a).iter().map(|kernel| kernel.name().to_owned()).collect();
    let mut random = Random::new(9);
    let arch = Arch::h200();
    let mut taken = 0;
    for _ in 0..300 {
        let mut extents = wgrad([1 + random.below(40), 8 * (1 + random.below(60)), 8 * (1 + random.below(60))], [1, 1], [1, 1], [0, 0]);
        for dim in 0..3 {
            extents.filter[dim] = 1 + random.below(4);
            extents.dilations[dim] = 1 + random.below(3);
            extents.input[dim] = (extents.filter[dim] - 1) * extents.dilations[dim] + 1 + random.below(90);
            extents.pads[dim] = random.below(4);
        }
        // Groups of whole chunks.
        let groups = [1, 2, 4, 8][random.below(4) as usize];
        extents.groups = if [extents.c, extents.k].iter().all(|channels| channels.is_multiple_of(8 * groups)) { groups } else { 1 };
        let operands = if random.below(2) == 0 { DType::Bf16 } else { DType::F16 };
        let problem = ConvProblem::packed(extents, operands, operands).expect("a valid problem");
        let Ok(candidate) = engine.accept(&Problem::Conv(problem.clone()), &arch) else { continue };
        taken += 1;
        for knobs in candidate.knobs().configs() {
            assert!(candidate.cost(knobs).is_ok_and(|cost| cost.us.is_finite()), "{knobs}");
            let program = candidate.program(knobs).expect("a listed config has a program");
            for launch in program.launches() {
                assert!(catalog.contains(launch.kernel.name()), "{} for {problem:?}", launch.kernel.name());
            }
        }
    }
    assert!(taken > 200, "{taken}");
}

/// Groups that fill a tile's diagonal, fill it in part, are larger than it, have unlike numbers of channels on their sides; and bundles
/// that reach beyond the last group.
#[test]
fn groups_are_blocks_along_the_diagonal_that_clusters_add_up() {
    for (number, (groups, c, k)) in
        [(4, 32, 32), (9, 16, 16), (16, 8, 8), (12, 2, 6), (3, 24, 40), (5, 8, 16), (2, 96, 80), (2, 64, 64), (7, 40, 8)]
            .into_iter()
            .enumerate()
    {
        let extents = ConvExtents { groups, ..wgrad([2, c * groups, k * groups], [6, 9], [3, 3], [1, 1]) };
        run(&bf16(extents), 200 + number as u64, &of_each_shape(1));
    }
}

#[test]
fn clusters_of_every_size_share_the_pixels() {
    let extents = ConvExtents { groups: 2, ..wgrad([9, 64, 64], [7, 7], [3, 3], [1, 1]) };
    for parts in [1, 2, 4, 8] {
        let seen = RefCell::new(HashSet::new());
        let each = |_: usize, knobs: &Knobs| knobs.value("parts") == Some(parts) && seen.borrow_mut().insert(knobs.value("shape"));
        run(&bf16(extents), 220 + u64::from(parts), &each);
    }
}

#[test]
fn groups_of_an_odd_number_of_channels_are_stored_one_by_one() {
    let extents = ConvExtents { groups: 8, ..wgrad([2, 24, 40], [6, 9], [3, 3], [1, 1]) };
    let mut problem = bf16(extents);
    let engine = verdigris_engines::engine(ENGINE).expect("the engine is registered");
    let refusal = engine.accept(&Problem::Conv(problem.clone()), &small()).err().map(|refusal| refusal.reason);
    assert_eq!(refusal, Some(Reason::Alignment), "the catalog's kernels store pairs");
    let old = Tensor { slot: Slot(3), dtype: DType::F32, ..problem.result().clone() };
    problem.epilogue = vec![EpilogueStep::Binary { f: BinaryOp::Add, operand: old, v_is_right: false }, EpilogueStep::Unary(UnaryOp::Relu)];
    run(&problem.canonical().expect("a valid problem"), 230, &of_each_shape(1));
}

#[test]
fn filters_of_groups_that_run_backwards_over_one_and_three_dims() {
    let mut problem = bf16(ConvExtents { groups: 4, ..wgrad([2, 64, 64], [5, 9], [2, 3], [1, 1]) });
    problem.flip = true;
    run(&problem, 240, &of_each_shape(1));
    let space = ConvExtents { input: [4, 5, 9], filter: [3, 3, 3], pads: [1; 3], groups: 3, ..wgrad([2, 48, 96], [1, 1], [1, 1], [0, 0]) };
    run(&bf16(space), 241, &of_each_shape(1));
    let line = ConvExtents { dilations: [1, 1, 5], groups: 4, ..wgrad([2, 64, 64], [1, 70], [1, 3], [0, 5]) };
    run(&bf16(line), 242, &of_each_shape(1));
}
