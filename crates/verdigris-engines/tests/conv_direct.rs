//! `conv.direct` on the interpreter against plain loops over the formula, in all directions, layouts, types, with all kinds of steps.
//!
//! Operands are small whole numbers, so sums are exact in every accumulator and results are compared bit for bit; every element that is no
//! part of an output must keep what it held.

use std::collections::HashMap;

use verdigris_engines::arch::Arch;
use verdigris_engines::engine::Knobs;
use verdigris_graph::{
    Access, BinaryOp, Channels, ConvExtents, ConvProblem, Direction, EpilogueStep, HostScalar, Precision, Problem, Real, Slot, Statistics,
    Tensor, UnaryOp,
};
use verdigris_kir::interp::{self, Kernels, Memory, Options};
use verdigris_reference::data::Random;
use verdigris_tensor::DType;
use verdigris_tensor::num::{read_element, round_to, write_element};

type Index = [u64; 5];

fn indices(extents: Index) -> impl Iterator<Item = Index> {
    let count = extents.iter().product::<u64>();
    (0..count).map(move |position| {
        let mut rest = position;
        let mut index = [0; 5];
        for dim in (0..5).rev() {
            index[dim] = rest % extents[dim];
            rest /= extents[dim];
        }
        index
    })
}

fn offset(tensor: &Tensor, index: Index) -> usize {
    index.iter().zip(&tensor.strides).map(|(i, stride)| i * stride).sum::<u64>() as usize
}

/// Values by slot, one for each element of the buffer.
type Values = HashMap<Slot, Vec<f64>>;

fn unary(f: UnaryOp, x: f64) -> f64 {
    match f {
        UnaryOp::Relu => x.max(0.0),
        UnaryOp::Neg => -x,
        UnaryOp::LeakyRelu { slope } => {
            if x > 0.0 {
                x
            } else {
                slope.0 * x
            }
        }
        other => panic!("{} is not used here", other.name()),
    }
}

fn binary(f: BinaryOp, x: f64, y: f64) -> f64 {
    match f {
        BinaryOp::Add => x + y,
        BinaryOp::Sub => x - y,
        BinaryOp::Mul => x * y,
        BinaryOp::Max => x.max(y),
        other => panic!("{} is not used here", other.name()),
    }
}

/// One step; `place` is where an operand's element lies.
fn step<P>(step: &EpilogueStep<P>, v: f64, values: &Values, place: impl Fn(&P) -> (Slot, usize)) -> f64 {
    match step {
        EpilogueStep::Unary(f) => unary(*f, v),
        EpilogueStep::Binary { f, operand, v_is_right } => {
            let (slot, at) = place(operand);
            let other = values[&slot][at];
            if *v_is_right { binary(*f, other, v) } else { binary(*f, v, other) }
        }
        EpilogueStep::Scale { factor: HostScalar::Fixed(factor) } => factor.0 * v,
        EpilogueStep::Scale { factor: HostScalar::Bound(slot) } => values[slot][0] * v,
        EpilogueStep::Round { dtype } => round_to(*dtype, v),
        EpilogueStep::Store { .. } => v,
        EpilogueStep::Random { .. } => panic!("convolutions draw no random numbers"),
    }
}

/// What every output holds afterwards.
fn reference(p: &ConvProblem, values: &Values) -> Values {
    let mut after = values.clone();
    let (c, k) = (p.c / p.groups, p.k / p.groups);
    let activation = |index: Index| {
        let tensor = p.activations();
        let place = |vector: &Channels| (vector.slot, (index[1] * vector.stride) as usize);
        let v = values[&tensor.slot][offset(tensor, index)];
        let v = p.prologue.iter().fold(v, |v, one| step(one, v, values, place));
        round_to(tensor.dtype, v)
    };
    let plain = |tensor: &Tensor, index: Index| values[&tensor.slot][offset(tensor, index)];
    let mut sums: HashMap<Index, f64> = indices(p.result_extents()).map(|index| (index, 0.0)).collect();
    for [n, _, o0, o1, o2] in indices([p.n, 1, p.output[0], p.output[1], p.output[2]]) {
        for [_, _, t0, t1, t2] in indices([1, 1, p.filter[0], p.filter[1], p.filter[2]]) {
            let read = |dim: usize, o: u64, t: u64| {
                let t = if p.flip { p.filter[dim] - 1 - t } else { t };
                (o * p.strides[dim] + t * p.dilations[dim]).checked_sub(p.pads_before[dim]).filter(|&i| i < p.input[dim])
            };
            let (Some(i0), Some(i1), Some(i2)) = (read(0, o0, t0), read(1, o1, t1), read(2, o2, t2)) else { continue };
            for g in 0..p.groups {
                for (ki, ci) in (0..k).flat_map(|ki| (0..c).map(move |ci| (ki, ci))) {
                    let x = [n, g * c + ci, i0, i1, i2];
                    let w = [g * k + ki, ci, t0, t1, t2];
                    let y = [n, g * k + ki, o0, o1, o2];
                    let (result, product) = match p.direction {
                        Direction::Fprop => (y, activation(x) * plain(&p.w, w)),
                        Direction::Dgrad => (x, activation(y) * plain(&p.w, w)),
                        Direction::Wgrad => (w, activation(x) * plain(&p.y, y)),
                    };
                    *sums.get_mut(&result).unwrap() += product;
                }
            }
        }
    }
    let mut totals = vec![[0.0; 2]; p.result_extents()[1] as usize];
    for index in indices(p.result_extents()) {
        let mut v = sums[&index];
        if p.precision == Precision::F16 {
            v = round_to(DType::F16, v);
        }
        for one in &p.epilogue {
            v = step(one, v, values, |tensor: &Tensor| (tensor.slot, offset(tensor, index)));
            if let EpilogueStep::Store { target } = one {
                after.get_mut(&target.slot).unwrap()[offset(target, index)] = round_to(target.dtype, v);
            }
        }
        let v = round_to(p.result().dtype, v);
        after.get_mut(&p.result().slot).unwrap()[offset(p.result(), index)] = v;
        totals[index[1] as usize][0] += v;
        totals[index[1] as usize][1] += v * v;
    }
    if let Some(Statistics { sum, sum_of_squares }) = &p.statistics {
        for (channel, [total, squares]) in totals.into_iter().enumerate() {
            after.get_mut(&sum.slot).unwrap()[channel * sum.stride as usize] = total;
            after.get_mut(&sum_of_squares.slot).unwrap()[channel * sum_of_squares.stride as usize] = squares;
        }
    }
    after
}

/// Elements behind every buffer that nobody may touch.
const GUARD: u64 = 16;
/// What outputs hold before: no result of these tests.
const SENTINEL: f64 = -112.0;

fn check(problem: ConvProblem) {
    check_on(problem, 0);
}

/// Runs every config; `at_least` says how many there must be.
fn check_on(problem: ConvProblem, at_least: usize) {
    let problem = problem.canonical().expect("a valid problem");
    let whole = Problem::Conv(problem.clone());
    let arch = Arch::virtual_device(2);
    let engine = verdigris_engines::engine("conv.direct").expect("the engine is registered");
    let candidate = engine.accept(&whole, &arch).expect("taken");
    let mut random = Random::new(problem.flops() as u64 + problem.c);
    let buffers = whole.buffers().expect("canonical");
    let mut types: HashMap<Slot, DType> = HashMap::new();
    let mut values = Values::new();
    for operand in &buffers {
        types.insert(operand.slot, operand.dtype);
        let size = (operand.layout.span_elements() + GUARD) as usize;
        let is_written = operand.access == Access::Written;
        let held = values.entry(operand.slot).or_default();
        if held.len() < size || !is_written {
            let fill = (0..size).map(|_| if is_written { SENTINEL } else { random.below(5) as f64 - 2.0 }).collect();
            *held = fill;
        }
    }
    for slot in whole.scalars() {
        values.insert(slot, vec![0.5]);
    }
    let expected = reference(&problem, &values);
    let kernels = Kernels::new();
    let space = candidate.knobs();
    assert!(space.configs().len() >= at_least, "{:?}", space.configs());
    for knobs in space.configs() {
        let told = |what: &str| format!("{what} with {knobs} of {problem:?}");
        let program = candidate.program(knobs).unwrap_or_else(|refusal| panic!("{}", told(&refusal.to_string())));
        let slots = whole.slots().iter().map(|slot| slot.0 + 1).max().unwrap_or(0);
        let mut memory = Memory::new();
        let mut host_scalars = Vec::new();
        for slot in (0..slots).map(Slot) {
            let bytes = types.get(&slot).map_or_else(Vec::new, |&dtype| encode(dtype, &values[&slot]));
            memory.add(&bytes);
            host_scalars.push(if types.contains_key(&slot) { 0.0 } else { 0.5 }.into());
        }
        let options = Options { sms: arch.sm_count, host_scalars, ..Options::schedule(random.bits()) };
        interp::run(&program, &kernels, &mut memory, &options).unwrap_or_else(|findings| panic!("{}", told(&findings.to_string())));
        for (slot, dtype) in &types {
            let got = decode(*dtype, &memory.to_vec(slot.0 as usize));
            let wanted = &expected[slot];
            if let Some(i) = (0..wanted.len()).find(|&i| got[i] != wanted[i]) {
                panic!("{}", told(&format!("{slot}, element {i}: {} instead of {}", got[i], wanted[i])));
            }
        }
    }
}

fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * dtype.bytes()];
    for (value, place) in values.iter().zip(bytes.chunks_exact_mut(dtype.bytes())) {
        write_element(dtype, *value, place).expect("a number");
    }
    bytes
}

fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    bytes.chunks_exact(dtype.bytes()).map(|element| read_element(dtype, element).expect("a number")).collect()
}

const BASE: ConvExtents = ConvExtents {
    direction: Direction::Fprop,
    n: 2,
    c: 6,
    k: 10,
    groups: 1,
    input: [1, 7, 9],
    filter: [1, 3, 3],
    pads: [0, 1, 1],
    strides: [1; 3],
    dilations: [1; 3],
};

fn packed(extents: ConvExtents, operands: DType, result: DType) -> ConvProblem {
    ConvProblem::packed(extents, operands, result).expect("fits")
}

fn in_all_directions(extents: ConvExtents, change: impl Fn(&mut ConvProblem)) {
    for direction in Direction::ALL {
        let mut problem = packed(ConvExtents { direction, ..extents }, DType::F32, DType::F32);
        problem.precision = Precision::Ieee;
        change(&mut problem);
        check(problem);
    }
}

fn channels_first(problem: &mut ConvProblem) {
    problem.x = Tensor::channels_first(problem.x.slot, problem.x.dtype, problem.x_extents());
    problem.w = Tensor::channels_first(problem.w.slot, problem.w.dtype, problem.w_extents());
    problem.y = Tensor::channels_first(problem.y.slot, problem.y.dtype, problem.y_extents());
}

#[test]
fn shapes() {
    let plane = ConvExtents { input: [1, 8, 5], ..BASE };
    for extents in [
        BASE,
        ConvExtents { strides: [1, 2, 2], ..BASE },
        ConvExtents { strides: [1, 3, 2], dilations: [1, 2, 3], pads: [0, 4, 3], ..BASE },
        ConvExtents { dilations: [1, 2, 2], strides: [1, 2, 4], pads: [0, 2, 2], ..BASE },
        ConvExtents { groups: 2, ..BASE },
        ConvExtents { c: 5, k: 5, groups: 5, ..BASE },
        ConvExtents { n: 1, c: 1, k: 1, input: [1, 1, 1], filter: [1; 3], pads: [0; 3], ..BASE },
        ConvExtents { filter: [1; 3], pads: [0; 3], strides: [1, 2, 2], ..BASE },
        ConvExtents { pads: [0, 4, 5], ..plane },
        ConvExtents { strides: [1, 4, 5], filter: [1, 2, 2], pads: [0; 3], ..BASE },
        ConvExtents { input: [1, 1, 31], filter: [1, 1, 5], pads: [0, 0, 2], strides: [1, 1, 2], ..BASE },
        ConvExtents { n: 1, c: 3, k: 4, input: [4, 5, 6], filter: [3, 2, 3], pads: [1, 0, 1], strides: [2, 1, 2], ..BASE },
    ] {
        in_all_directions(extents, |_| {});
    }
}

#[test]
fn layouts() {
    for extents in [BASE, ConvExtents { groups: 2, strides: [1, 2, 1], ..BASE }] {
        in_all_directions(extents, channels_first);
        // Neither: gaps between channels, rows and images, and a filter whose k runs fastest.
        in_all_directions(extents, |p| {
            p.x.strides = [1400, 3, 0, 190, 20];
            p.y.strides = [2, 200, 0, 9, 2009].map(|stride| stride * 2);
            let taps = p.filter[2];
            p.w.strides = [1, 10 * 9, 0, 10 * taps, 10];
        });
    }
}

#[test]
fn asymmetric_padding_and_flip() {
    in_all_directions(ConvExtents { strides: [1, 2, 2], ..BASE }, |p| {
        p.pads_before = [0, 2, 0];
        p.pads_after = [0, 1, 2];
        p.output = [1, 4, 5];
        p.y = Tensor::channels_last(p.y.slot, p.y.dtype, p.y_extents());
        p.flip = true;
    });
}

#[test]
fn nothing_to_sum_and_nothing_to_write() {
    for direction in Direction::ALL {
        for extents in [ConvExtents { n: 0, ..BASE }, ConvExtents { c: 0, ..BASE }, ConvExtents { k: 0, ..BASE }] {
            check(packed(ConvExtents { direction, ..extents }, DType::F32, DType::F32));
        }
    }
}

#[test]
fn types() {
    let pairs = [
        (DType::F64, DType::F64, Precision::F64),
        (DType::F32, DType::F32, Precision::Tf32),
        (DType::F16, DType::F16, Precision::F16),
        (DType::F16, DType::F32, Precision::Fp32),
        (DType::Bf16, DType::Bf16, Precision::Ieee),
        (DType::I8, DType::I32, Precision::I32),
        (DType::E4m3, DType::Bf16, Precision::Fp8Promoted),
        (DType::E5m2, DType::F32, Precision::Fp8Fast),
    ];
    for (operands, result, precision) in pairs {
        for direction in Direction::ALL {
            let extents = ConvExtents { direction, n: 1, groups: 2, c: 4, k: 6, input: [1, 5, 6], strides: [1, 2, 1], ..BASE };
            let mut problem = packed(extents, operands, result);
            problem.precision = precision;
            check(problem);
        }
    }
}

#[test]
fn wide_tiles_have_edges() {
    for direction in Direction::ALL {
        for (c, k) in [(65, 3), (3, 129), (17, 64)] {
            // Pixels enough for a filter gradient to be summed in parts.
            let (n, height) = if direction == Direction::Wgrad { (3, 16) } else { (1, 9) };
            let extents = ConvExtents { direction, n, c, k, input: [1, height, 15], filter: [1, 1, 2], pads: [0; 3], ..BASE };
            let mut problem = packed(extents, DType::F32, DType::F32);
            problem.precision = Precision::Ieee;
            check_on(problem, if direction == Direction::Wgrad { 3 } else { 2 });
        }
    }
}

#[test]
fn prologue_epilogue_and_statistics() {
    for direction in Direction::ALL {
        for first in [false, true] {
            let extents = ConvExtents { direction, groups: 2, strides: [1, 2, 1], ..BASE };
            let mut p = packed(extents, DType::F16, DType::F16);
            if first {
                channels_first(&mut p);
            }
            let vector = |slot| Channels { slot: Slot(slot), dtype: DType::F32, stride: 2 };
            let binary = |f, operand, v_is_right| EpilogueStep::Binary { f, operand, v_is_right };
            p.prologue = vec![
                EpilogueStep::Binary { f: BinaryOp::Mul, operand: vector(3), v_is_right: false },
                // Not 0 for 0: what stands around the tensor must not become it.
                EpilogueStep::Binary { f: BinaryOp::Sub, operand: vector(4), v_is_right: true },
                EpilogueStep::Unary(UnaryOp::Relu),
                EpilogueStep::Scale { factor: HostScalar::Fixed(Real(2.0)) },
            ];
            let like = |slot, dtype| Tensor { slot: Slot(slot), dtype, ..p.result().clone() };
            let bias = Tensor { slot: Slot(5), dtype: DType::Bf16, strides: [0, 1, 0, 0, 0] };
            let per_row = Tensor { slot: Slot(6), dtype: DType::F32, strides: [3, 0, 0, 0, 0] };
            p.epilogue = vec![
                binary(BinaryOp::Add, bias, false),
                EpilogueStep::Round { dtype: DType::Bf16 },
                EpilogueStep::Store { target: like(7, DType::F32) },
                binary(BinaryOp::Max, per_row, false),
                EpilogueStep::Scale { factor: HostScalar::Bound(Slot(8)) },
                binary(BinaryOp::Sub, like(9, DType::I8), true),
                EpilogueStep::Unary(UnaryOp::LeakyRelu { slope: Real(0.25) }),
            ];
            if direction != Direction::Wgrad {
                let sums = |slot| Channels { slot: Slot(slot), dtype: DType::F32, stride: 3 };
                p.statistics = Some(Statistics { sum: sums(10), sum_of_squares: sums(11) });
            }
            check(p);
        }
    }
}

#[test]
fn a_residual_may_lie_where_the_result_goes() {
    in_all_directions(BASE, |p| {
        let residual = p.result().clone();
        p.epilogue.push(EpilogueStep::Binary { f: BinaryOp::Add, operand: residual, v_is_right: false });
    });
}

#[test]
fn an_unknown_config_is_refused() {
    let problem = Problem::Conv(packed(BASE, DType::F32, DType::F32));
    let engine = verdigris_engines::engine("conv.direct").expect("the engine is registered");
    let candidate = engine.accept(&problem, &Arch::h200()).expect("taken");
    assert!(candidate.program(&Knobs::new([("tile", 7)])).is_err());
}
