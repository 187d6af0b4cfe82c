//! Convolutions on the interpreter against plain loops.
//!
//! Operands are small whole numbers, so sums are exact in every accumulator and results are compared bit for bit.

#![allow(dead_code, reason = "each test uses a part of it")]

#[path = "../by_day/mod.rs"]
mod by_day;

use std::cell::Cell;

use verdigris_engines::arch::Arch;
use verdigris_engines::engine::Knobs;
use verdigris_graph::ops::matmul::Precision;
use verdigris_graph::problem::output_extent;
use verdigris_graph::{BinaryOp, Channels, ConvExtents, ConvProblem, Direction, EpilogueStep, Problem, Slot, Tensor, UnaryOp};
use verdigris_kir::interp::{self, Kernels, Memory, Options};
use verdigris_reference::data::Random;
use verdigris_tensor::DType;
use verdigris_tensor::num::{read_element, round_to, write_element};

/// Elements from the first to the last, and some behind it that nobody may touch.
pub(crate) const GUARD: u64 = 16;

pub(crate) fn elements(tensor: &Tensor, extents: [u64; 5]) -> u64 {
    1 + extents.iter().zip(&tensor.strides).map(|(&extent, &stride)| (extent - 1) * stride).sum::<u64>() + GUARD
}

/// Offsets in a tensor in the order `[n (or k), d, h, w, channel]`.
pub(crate) fn offsets(tensor: &Tensor, [n, c, d, h, w]: [u64; 5]) -> Vec<u64> {
    let s = tensor.strides;
    let mut list = Vec::new();
    for n in 0..n {
        for d in 0..d {
            for h in 0..h {
                for w in 0..w {
                    list.extend((0..c).map(|c| n * s[0] + c * s[1] + d * s[2] + h * s[3] + w * s[4]));
                }
            }
        }
    }
    list
}

pub(crate) fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    let bytes = dtype.bytes();
    let mut out = vec![0; values.len() * bytes];
    for (value, slot) in values.iter().zip(out.chunks_exact_mut(bytes)) {
        write_element(dtype, *value, slot).expect("the type holds numbers");
    }
    out
}

/// What the formula of [`ConvProblem`] says, in the order of [`offsets`] of the result.
pub(crate) fn reference(problem: &ConvProblem, first: &[f64], second: &[f64]) -> Vec<f64> {
    let (groups, c, k) = (problem.groups as usize, (problem.c / problem.groups) as usize, (problem.k / problem.groups) as usize);
    let (x, w, y) = (problem.x_extents(), problem.w_extents(), problem.y_extents());
    let size = |e: [u64; 5]| e.iter().product::<u64>() as usize;
    let result = match problem.direction {
        Direction::Fprop => size(y),
        Direction::Dgrad => size(x),
        Direction::Wgrad => size(w),
    };
    let mut sums = vec![0.0; result];
    let at = |[_, _, d, h, w]: [u64; 5], n: u64, p: [u64; 3]| ((n * d + p[0]) * h + p[1]) * w + p[2];
    let triples = |e: [u64; 3]| (0..e[0]).flat_map(move |a| (0..e[1]).flat_map(move |b| (0..e[2]).map(move |c| [a, b, c])));
    for n in 0..problem.n {
        for p in triples(problem.output) {
            for t in triples(problem.filter) {
                let place = |i: usize| {
                    let tap = if problem.flip { problem.filter[i] - 1 - t[i] } else { t[i] };
                    (p[i] * problem.strides[i] + tap * problem.dilations[i])
                        .checked_sub(problem.pads_before[i])
                        .filter(|&j| j < problem.input[i])
                };
                let (Some(j0), Some(j1), Some(j2)) = (place(0), place(1), place(2)) else { continue };
                let (xp, yp) = (at(x, n, [j0, j1, j2]) as usize * c * groups, at(y, n, p) as usize * k * groups);
                for g in 0..groups {
                    let (xp, yp) = (xp + g * c, yp + g * k);
                    for ki in 0..k {
                        let wp = at(w, (g * k + ki) as u64, t) as usize * c;
                        match problem.direction {
                            Direction::Fprop => {
                                sums[yp + ki] += first[xp..xp + c].iter().zip(&second[wp..wp + c]).map(|(a, b)| a * b).sum::<f64>();
                            }
                            Direction::Dgrad => {
                                let dy = first[yp + ki];
                                sums[xp..xp + c].iter_mut().zip(&second[wp..wp + c]).for_each(|(sum, w)| *sum += dy * w);
                            }
                            Direction::Wgrad => {
                                let dy = first[yp + ki];
                                sums[wp..wp + c].iter_mut().zip(&second[xp..xp + c]).for_each(|(sum, x)| *sum += dy * x);
                            }
                        }
                    }
                }
            }
        }
    }
    sums
}

/// Of the configs that `pick` chooses the first, and of the others one of every four, another each day ([`by_day`]).
pub(crate) fn a_quarter(pick: impl Fn(usize, &Knobs) -> bool) -> impl Fn(usize, &Knobs) -> bool {
    let picked = Cell::new(0);
    let has_its_turn = move || match picked.replace(picked.get() + 1) {
        0 => true,
        number => by_day::has_its_turn(number, 4),
    };
    move |number, knobs| pick(number, knobs) && has_its_turn()
}

/// Runs a problem on an engine under the configs that `pick` chooses and compares.
pub(crate) fn check_on(
    engine: &str,
    problem: &ConvProblem,
    arch: &Arch,
    kernels: &Kernels,
    seed: u64,
    pick: &dyn Fn(usize, &Knobs) -> bool,
) {
    let engine = verdigris_engines::engine(engine).expect("the engine is registered");
    let candidate = engine.accept(&Problem::Conv(problem.clone()), arch).unwrap_or_else(|refusal| panic!("{refusal}\n{problem:?}"));
    let mut random = Random::new(seed);
    let operands = problem.operands();
    let largest = if problem.precision == Precision::I32 { 9 } else { 5 };
    let values = operands.map(|(_, tensor, extents)| {
        let unsigned = tensor.dtype == DType::U8;
        let values: Vec<f64> =
            (0..extents.iter().product::<u64>())
                .map(|_| {
                    if random.below(2) == 0 {
                        0.0
                    } else {
                        random.below(largest) as f64 - if unsigned { 0.0 } else { (largest / 2) as f64 }
                    }
                })
                .collect();
        values
    });
    // Of f32, one operand has more digits than a bf16 value holds.
    let mut values = values;
    if operands[0].1.dtype == DType::F32 {
        values[seed as usize % 2].iter_mut().for_each(|value| *value *= 257.0);
    }
    // The activations behind their prologue, and its vectors.
    let mut vectors: Vec<(Slot, Vec<u8>)> = Vec::new();
    let mut multiplied = values.clone();
    let read = usize::from(problem.direction == Direction::Wgrad);
    let channels = problem.activation_channels() as usize;
    for step in &problem.prologue {
        match step {
            EpilogueStep::Unary(UnaryOp::Relu) => multiplied[read].iter_mut().for_each(|v| *v = v.max(0.0)),
            EpilogueStep::Binary { f, operand, .. } => {
                let vector: Vec<f64> = (0..channels).map(|_| random.below(3) as f64 + 1.0).collect();
                let act = |v: f64, z: f64| if *f == BinaryOp::Mul { v * z } else { v + z };
                multiplied[read].iter_mut().enumerate().for_each(|(i, v)| *v = act(*v, vector[i % channels]));
                vectors.push((operand.slot, encode(operand.dtype, &vector)));
            }
            other => panic!("{other:?} is not checked here"),
        }
    }
    let sums = reference(problem, &multiplied[0], &multiplied[1]);
    let result = problem.result();
    let result_extents = problem.result_extents();
    let places = offsets(result, result_extents);

    // Operands of the epilogue: whole numbers too.
    let mut buffers = vectors;
    for ((_, tensor, extents), values) in operands.iter().zip(&values) {
        // What lies between the elements must not be read, or be multiplied by zero alone.
        let mut all = vec![1.0; elements(tensor, *extents) as usize];
        offsets(tensor, *extents).iter().zip(values).for_each(|(&at, &value)| all[at as usize] = value);
        buffers.push((tensor.slot, encode(tensor.dtype, &all)));
    }
    let mut expected = sums;
    for step in &problem.epilogue {
        match step {
            EpilogueStep::Unary(UnaryOp::Relu) => expected.iter_mut().for_each(|v| *v = v.max(0.0)),
            EpilogueStep::Unary(UnaryOp::Clamp { lower, upper }) => expected.iter_mut().for_each(|v| *v = v.clamp(lower.0, upper.0)),
            EpilogueStep::Binary { f: BinaryOp::Add, operand, .. } => {
                let all: Vec<f64> = (0..elements(operand, result_extents)).map(|_| random.below(7) as f64 - 3.0).collect();
                offsets(operand, result_extents).iter().zip(&mut expected).for_each(|(&at, v)| *v += all[at as usize]);
                buffers.push((operand.slot, encode(operand.dtype, &all)));
            }
            other => panic!("{other:?} is not checked here"),
        }
    }
    let bytes = result.dtype.bytes();
    let before = vec![0xA5u8; elements(result, result_extents) as usize * bytes];
    let mut after_expected = before.clone();
    for (&at, &value) in places.iter().zip(&expected) {
        write_element(result.dtype, round_to(result.dtype, value), &mut after_expected[at as usize * bytes..][..bytes]).expect("a number");
    }
    buffers.push((result.slot, before));
    let mut sums_expected: Vec<(Channels, Vec<f64>, Vec<f64>)> = Vec::new();
    if let Some(statistics) = &problem.statistics {
        let channels = result_extents[1] as usize;
        let stored: Vec<f64> = expected.iter().map(|&value| round_to(result.dtype, value)).collect();
        for (sum, power) in [(statistics.sum, 1), (statistics.sum_of_squares, 2)] {
            let totals: Vec<f64> = (0..channels).map(|c| stored.iter().skip(c).step_by(channels).map(|v| v.powi(power)).sum()).collect();
            // Sums of whole numbers below 2^24 are exact, others rounded at each of their additions.
            let of_channel = |c: usize| stored.iter().skip(c).step_by(channels);
            let magnitudes = (0..channels).map(|c| of_channel(c).map(|v| v.abs().powi(power)).sum::<f64>());
            let additions = (stored.len() / channels) as f64;
            let bounds = magnitudes.map(|all| if all < (1 << 24) as f64 { 0.0 } else { all * additions * 0.5f64.powi(24) }).collect();
            buffers.push((sum.slot, vec![0xA5; 4 * channels]));
            sums_expected.push((sum, totals, bounds));
        }
    }
    buffers.sort_by_key(|(slot, _)| slot.0);

    let knobs = candidate.knobs();
    let mut ran = 0;
    for (number, knobs) in knobs.configs().iter().enumerate().filter(|(number, knobs)| pick(*number, knobs)) {
        let program = candidate.program(knobs).expect("a listed config has a program");
        let mut memory = Memory::new();
        buffers.iter().for_each(|(_, bytes)| {
            memory.add(bytes);
        });
        let options = Options { sms: arch.sm_count, ..Options::schedule(seed + number as u64) };
        let name = || program.launches().last().map(|launch| launch.kernel.name().to_owned()).unwrap_or_default();
        if let Err(findings) = interp::run(&program, kernels, &mut memory, &options) {
            panic!("{knobs} seed {}: {}\n{findings}\n{problem:?}", options.seed, name());
        }
        let after = memory.to_vec(result.slot.0 as usize);
        if after != after_expected {
            let differ: Vec<_> = (0..after.len() / bytes)
                .filter(|i| after[i * bytes..][..bytes] != after_expected[i * bytes..][..bytes])
                .map(|i| {
                    (
                        i,
                        read_element(result.dtype, &after[i * bytes..][..bytes]),
                        read_element(result.dtype, &after_expected[i * bytes..][..bytes]),
                    )
                })
                .collect();
            panic!(
                "{knobs}: {}: {} of {} differ, first {:?}\n{problem:?}",
                name(),
                differ.len(),
                places.len(),
                &differ[..differ.len().min(8)]
            );
        }
        for (sum, wanted, bounds) in &sums_expected {
            let got = memory.to_vec(sum.slot.0 as usize);
            for (channel, ((bytes, wanted), bound)) in got.chunks_exact(sum.dtype.bytes()).zip(wanted).zip(bounds).enumerate() {
                let value = read_element(sum.dtype, bytes).expect("a number");
                let off = (value - wanted).abs();
                assert!(off <= *bound, "{knobs}: {}: the sum of channel {channel} in {} is {value}, not {wanted}", name(), sum.slot);
            }
        }
        ran += 1;
    }
    assert!(ran > 0, "no config was picked for {problem:?}");
}

/// Two-dimensional extents: n, c, k, input, filter, pads, strides, dilations.
pub(crate) fn plane(direction: Direction, [n, c, k]: [u64; 3], input: [u64; 2], filter: [u64; 2], pads: [u64; 2]) -> ConvExtents {
    let front = |first: u64, [a, b]: [u64; 2]| [first, a, b];
    ConvExtents {
        direction,
        n,
        c,
        k,
        groups: 1,
        input: front(1, input),
        filter: front(1, filter),
        pads: front(0, pads),
        strides: [1; 3],
        dilations: [1; 3],
    }
}

pub(crate) fn bf16(extents: ConvExtents) -> ConvProblem {
    ConvProblem::packed(extents, DType::Bf16, DType::Bf16).expect("a valid problem")
}

pub(crate) fn small() -> Arch {
    Arch::virtual_device(4)
}

/// The same problem with packed tensors of the extents that its numbers give.
pub(crate) fn placed(mut problem: ConvProblem) -> ConvProblem {
    for dim in 0..3 {
        problem.output[dim] = output_extent(
            problem.input[dim],
            problem.filter[dim],
            problem.pads_before[dim],
            problem.pads_after[dim],
            problem.strides[dim],
            problem.dilations[dim],
        )
        .expect("the filter fits");
    }
    let (x, w, y) = (problem.x_extents(), problem.w_extents(), problem.y_extents());
    for (tensor, extents) in [(&mut problem.x, x), (&mut problem.w, w), (&mut problem.y, y)] {
        tensor.strides = Tensor::channels_last(tensor.slot, tensor.dtype, extents).strides;
    }
    problem.canonical().expect("a valid problem")
}
