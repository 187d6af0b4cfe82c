//! Convolution problems: canonical forms, extents, the product that a pointwise convolution is, and what is refused.

use verdigris_graph::problem::GemmExtents;
use verdigris_graph::{
    BinaryOp, Channels, ConvExtents, ConvProblem, Direction, EpilogueStep, Error, Key, Precision, Problem, Real, Slot, Tensor, UnaryOp,
    json,
};
use verdigris_tensor::DType;

const PLAIN: ConvExtents = ConvExtents {
    direction: Direction::Fprop,
    n: 2,
    c: 16,
    k: 24,
    groups: 2,
    input: [1, 13, 9],
    filter: [1, 3, 3],
    pads: [0, 1, 1],
    strides: [1, 2, 1],
    dilations: [1, 1, 2],
};

fn packed(extents: ConvExtents) -> ConvProblem {
    ConvProblem::packed(extents, DType::Bf16, DType::Bf16).unwrap()
}

#[test]
fn outputs_and_products_have_the_extents_of_the_formula() {
    let fprop = packed(PLAIN);
    assert_eq!(fprop.output, [1, 7, 7], "(13 + 2 − 2 − 1) / 2 + 1, and 9 + 2 − 4 − 1 + 1");
    assert_eq!(fprop.gemm_extents(), GemmExtents { m: 2 * 49, n: 12, k: 9 * 8, groups: 2 });
    let dgrad = packed(ConvExtents { direction: Direction::Dgrad, ..PLAIN });
    assert_eq!(dgrad.gemm_extents(), GemmExtents { m: 2 * 13 * 9, n: 8, k: 9 * 12, groups: 2 });
    let wgrad = packed(ConvExtents { direction: Direction::Wgrad, ..PLAIN });
    assert_eq!(wgrad.gemm_extents(), GemmExtents { m: 12, n: 9 * 8, k: 2 * 49, groups: 2 });
    for problem in [fprop, dgrad, wgrad] {
        assert_eq!(problem.flops(), 2.0 * 2.0 * 49.0 * 24.0 * 9.0 * 8.0);
        assert_eq!(problem.slots(), [Slot(0), Slot(1), Slot(2)], "{}", problem.direction.name());
    }
}

#[test]
fn equal_work_has_one_form() {
    let plain = packed(PLAIN);
    let key = |problem: ConvProblem| Key::of(&Problem::Conv(problem));
    // A plane of one row is a line, wherever its row stands.
    let line = ConvExtents { input: [1, 1, 9], filter: [1, 1, 3], pads: [0, 0, 1], strides: [1; 3], dilations: [1; 3], ..PLAIN };
    let column = ConvExtents { input: [1, 9, 1], filter: [1, 3, 1], pads: [0, 1, 0], ..line };
    let depth = ConvExtents { input: [9, 1, 1], filter: [3, 1, 1], pads: [1, 0, 0], ..line };
    assert_eq!(key(packed(line)), key(packed(column)));
    assert_eq!(key(packed(line)), key(packed(depth)));
    // Zeros that no output reads are no part of it: 13 + 2 rows, of which a stride of 2 reads all; 14 + 2 leave one unread.
    let mut wider = ConvProblem { input: [1, 14, 9], ..plain.clone() };
    wider.x = Tensor::channels_last(Slot(0), DType::Bf16, wider.x_extents());
    let less = ConvProblem { pads_after: [0, 0, 1], ..wider.clone() };
    assert_eq!(wider.clone().canonical().unwrap().pads_after, [0, 0, 1]);
    assert_eq!(key(wider.canonical().unwrap()), key(less.canonical().unwrap()));
    // The stride of an extent of 1 decides nothing.
    let mut odd = packed(ConvExtents { n: 1, ..PLAIN });
    let same = odd.clone();
    odd.x.strides[0] = 77;
    odd.x.strides[2] = 5;
    assert_eq!(odd.canonical().unwrap(), same);
    // Steps that do nothing are dropped.
    let mut idle = plain.clone();
    idle.epilogue = vec![EpilogueStep::Unary(UnaryOp::Identity), EpilogueStep::Round { dtype: DType::Bf16 }];
    idle.prologue = vec![EpilogueStep::Round { dtype: DType::F32 }];
    assert_eq!(idle.canonical().unwrap(), plain);
}

#[test]
fn a_problem_survives_json() {
    let mut problem = packed(PLAIN);
    let bias = Tensor { slot: Slot(5), dtype: DType::F32, strides: [0, 1, 0, 0, 0] };
    problem.epilogue.push(EpilogueStep::Binary { f: BinaryOp::Add, operand: bias, v_is_right: false });
    let scale = Channels { slot: Slot(4), dtype: DType::F32, stride: 1 };
    problem.prologue.push(EpilogueStep::Binary { f: BinaryOp::Mul, operand: scale, v_is_right: false });
    let mut problem = problem.canonical().unwrap();
    assert_eq!(problem.number_slots(), [Slot(0), Slot(1), Slot(4), Slot(5), Slot(2)]);
    let problem = Problem::Conv(problem);
    assert_eq!(json::problem_from_json(&json::problem_to_json(&problem)), Ok(problem));
}

#[test]
fn a_filter_of_one_element_is_a_product() {
    let one = ConvExtents { filter: [1; 3], pads: [0; 3], strides: [1; 3], dilations: [1; 3], ..PLAIN };
    for direction in Direction::ALL {
        let problem = packed(ConvExtents { direction, ..one });
        let gemm = problem.as_gemm().unwrap();
        let extents = problem.gemm_extents();
        assert_eq!((gemm.m, gemm.n, gemm.k, gemm.batch_count()), (extents.m, extents.n, extents.k, 2), "{}", direction.name());
        assert_eq!(gemm.flops(), problem.flops());
        // Every element of the result is where the convolution has it: of group 1, pixel 3 and channel 5, or k 5 and c 3.
        let place = problem.result().layout(problem.result_extents()).unwrap();
        let (index, row, column) = match direction {
            Direction::Fprop => ([0, 12 + 5, 0, 0, 3], 3, 5),
            Direction::Dgrad => ([0, 8 + 5, 0, 0, 3], 3, 5),
            Direction::Wgrad => ([12 + 5, 3, 0, 0, 0], 5, 3),
        };
        assert_eq!(gemm.d.offset(&[1], row, column), place.offset(&index).unwrap(), "{}", direction.name());
    }
    // Channels first: pixels are contiguous, and each image is a product of its own.
    let mut nchw = packed(one);
    nchw.x = Tensor::channels_first(Slot(0), DType::Bf16, nchw.x_extents());
    nchw.y = Tensor::channels_first(Slot(2), DType::Bf16, nchw.y_extents());
    let gemm = nchw.canonical().unwrap().as_gemm().unwrap();
    assert_eq!((gemm.m, gemm.batch_count()), (13 * 9, 4));
    // Larger filters, strides and padding are none.
    assert_eq!(packed(PLAIN).as_gemm(), None);
    assert_eq!(packed(ConvExtents { strides: [1, 2, 2], ..one }).as_gemm(), None);
    assert_eq!(packed(ConvExtents { pads: [0, 1, 1], ..one }).as_gemm(), None);
}

#[test]
fn a_filter_gradient_of_f32_stays_a_convolution() {
    let one = ConvExtents { filter: [1; 3], pads: [0; 3], strides: [1; 3], dilations: [1; 3], ..PLAIN };
    for (direction, dtype, precision, stays) in [
        (Direction::Wgrad, DType::F32, Precision::Tf32, true),
        (Direction::Wgrad, DType::F32, Precision::Fp32, true),
        (Direction::Wgrad, DType::F32, Precision::Ieee, false),
        (Direction::Wgrad, DType::Bf16, Precision::Fp32, false),
        (Direction::Dgrad, DType::F32, Precision::Tf32, false),
        (Direction::Fprop, DType::F32, Precision::Fp32, false),
    ] {
        let problem = ConvProblem { precision, ..ConvProblem::packed(ConvExtents { direction, ..one }, dtype, dtype).unwrap() };
        let gemm = problem.as_gemm();
        assert!(gemm.is_some());
        assert_eq!(problem.cut_as_gemm(), gemm.filter(|_| !stays), "{} {dtype} {precision:?}", direction.name());
    }
    assert_eq!(packed(PLAIN).cut_as_gemm(), None);
}

#[test]
fn a_depthwise_convolution_of_one_element_stays_one() {
    let one = ConvExtents { filter: [1; 3], pads: [0; 3], strides: [1; 3], dilations: [1; 3], ..PLAIN };
    for (c, groups, of_channel, stays) in
        [(one.c, one.c, 3, true), (one.c, one.c, 8, true), (one.c, one.c, 9, false), (one.c, 2, 3, false), (1, 1, 3, false)]
    {
        for direction in Direction::ALL {
            let problem = packed(ConvExtents { direction, c, groups, k: of_channel * one.c, ..one });
            assert!(problem.as_gemm().is_some());
            assert_eq!(problem.cut_as_gemm().is_none(), stays, "{} {c} channels in {groups} groups", direction.name());
        }
    }
}

#[test]
fn pixels_merge_where_they_lie_evenly() {
    let problem = packed(PLAIN);
    assert_eq!(problem.x.pixel_stride(problem.x_extents()), Some(16));
    let matrix = problem.x.as_matrix(problem.x_extents()).unwrap();
    assert_eq!((matrix.row_stride, matrix.column_stride), (16, 1));
    let first = Tensor::channels_first(Slot(0), DType::Bf16, problem.x_extents());
    assert_eq!(first.pixel_stride(problem.x_extents()), None);
    assert!(!first.is_channels_last());
    let bias = Tensor { slot: Slot(0), dtype: DType::F32, strides: [0, 1, 0, 0, 0] };
    assert!(bias.is_per_channel(problem.y_extents()) && !bias.is_scalar(problem.y_extents()));
}

#[test]
fn what_does_not_fit_is_named() {
    let problem = packed(PLAIN);
    let told = |change: &dyn Fn(&mut ConvProblem)| {
        let mut changed = problem.clone();
        change(&mut changed);
        changed.canonical().unwrap_err()
    };
    assert!(matches!(told(&|p| p.output[1] = 8), Error::Mismatch { got: 8, want: 7, .. }));
    assert!(matches!(told(&|p| p.groups = 3), Error::Attribute { attribute: "groups", .. }));
    assert!(matches!(told(&|p| p.strides[2] = 0), Error::Attribute { attribute: "strides", .. }));
    assert!(matches!(told(&|p| p.filter[1] = 99), Error::Attribute { attribute: "filter", .. }));
    assert!(matches!(told(&|p| p.input[1] = 1 << 40), Error::Attribute { attribute: "extent", .. }));
    assert!(matches!(told(&|p| p.w.dtype = DType::F16), Error::DType { .. }));
    assert!(matches!(told(&|p| p.y.dtype = DType::Bool), Error::DType { .. }));
    assert!(matches!(told(&|p| p.y.strides[1] = 0), Error::Structure { .. }), "an output has a place for each element");
    assert!(matches!(told(&|p| p.y.slot = Slot(0)), Error::Structure { .. }), "an output never lies over a factor");
    let sums = Channels { slot: Slot(3), dtype: DType::F32, stride: 1 };
    let both = verdigris_graph::Statistics { sum: sums, sum_of_squares: sums };
    assert!(matches!(told(&|p| p.statistics = Some(both)), Error::Structure { .. }), "two outputs have two buffers");
    let store = EpilogueStep::Store { target: sums };
    assert!(matches!(told(&|p| p.prologue.push(store.clone())), Error::Structure { .. }));
    // A step may read what an output takes the place of, but not what it has taken the place of.
    let beside = |problem: &ConvProblem| Tensor { slot: Slot(3), ..problem.y.clone() };
    let add = |problem: &ConvProblem| EpilogueStep::Binary { f: BinaryOp::Add, operand: beside(problem), v_is_right: false };
    let store = |problem: &ConvProblem| EpilogueStep::Store { target: beside(problem) };
    let mut problem = packed(PLAIN);
    problem.epilogue = vec![add(&problem), store(&problem), EpilogueStep::Unary(UnaryOp::Relu)];
    problem.clone().canonical().expect("read before it is written");
    assert!(matches!(told(&|p| p.epilogue = vec![store(p), add(p)]), Error::Structure { .. }));
}

#[test]
fn epilogues_refuse_long_functions_and_wrong_attributes() {
    let refusal = |f: BinaryOp| {
        let mut problem = packed(PLAIN);
        let operand = Tensor { slot: Slot(3), ..problem.y.clone() };
        problem.epilogue.push(EpilogueStep::Binary { f, operand, v_is_right: false });
        problem.canonical().err().map(|error| error.to_string())
    };
    let told = |f: BinaryOp| refusal(f).expect("refused");
    assert!(told(BinaryOp::Pow).contains("epilogue = pow"), "{}", told(BinaryOp::Pow));
    assert!(told(BinaryOp::Backward(UnaryOp::Exp)).contains("activations have a backward"));
    let slope = UnaryOp::LeakyRelu { slope: Real(f64::INFINITY) };
    assert!(told(BinaryOp::Backward(slope)).contains("a slope is finite"));
    assert_eq!(refusal(BinaryOp::Backward(UnaryOp::Relu)), None);
    let mut problem = packed(PLAIN);
    problem.prologue.push(EpilogueStep::Unary(UnaryOp::Tan));
    let told = problem.canonical().expect_err("refused").to_string();
    assert!(told.contains("tan"), "{told}");
}
