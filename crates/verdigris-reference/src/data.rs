//! Deterministic inputs: the same bytes for the same seed on every machine.

use verdigris_graph::{Access, EpilogueStep, GemmProblem, HostScalar, Matrix, Problem, Scale, Slot};
use verdigris_tensor::DType;
use verdigris_tensor::num::{self, Format, Rounding};

use serde::Deserialize;

pub use crate::data_graph::graph_inputs;
use crate::run::{Expected, Inputs};

/// Bytes of untouched memory behind each output, to catch writes past its end.
pub const GUARD_BYTES: usize = 64;

/// What the elements of A and B look like. Integer operands take uniform values over the whole range of their type in all of them but
/// `SmallIntegers`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Distribution {
    /// Between −1 and 1.
    Uniform,
    /// Mean 0, variance 1 (the sum of twelve uniform values, so within ±6).
    Normal,
    /// Whole numbers from −4 to 4: sums of a few thousand products are exact in f32, in every order.
    SmallIntegers,
    /// Between 0.5 and 1.5: sums grow with K, and truncation adds up.
    SameSign,
    /// Signs that alternate along memory, sizes almost equal: sums far smaller than their terms.
    Cancellation,
    /// A within the subnormals of its type and a little above, B near 1.
    Denormals,
    /// Normal values, one in 64 of them NaN, ±∞ or −0, where the type has them.
    Special,
    /// Only +0 and −0.
    Zeros,
    /// Normal values times powers of two from 2⁻⁶ to 2⁶.
    WideRange,
}

/// A splitmix64 stream.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// A stream of its own for each seed.
    pub fn new(seed: u64) -> Random {
        Random { state: seed.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(0x6a09_e667_f3bc_c909) }
    }

    /// 64 random bits.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A multiple of 2⁻⁵³ in [0, 1).
    #[inline]
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 * num::power_of_two(-53)
    }

    /// A whole number below `bound`, which is not 0.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        self.bits() % bound
    }

    /// Mean 0, variance 1, within ±6: by addition alone, so that no platform's `ln` or `cos` has a say.
    #[inline]
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
    }
}

/// `elements` values of type `dtype`. `is_left` tells the operand that takes the odd values of `Denormals` and the alternating signs of
/// `Cancellation` from the one beside it.
pub fn fill(dtype: DType, distribution: Distribution, is_left: bool, seed: u64, elements: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut bytes = vec![0; elements as usize * dtype.bytes()];
    for (i, element) in bytes.chunks_exact_mut(dtype.bytes()).enumerate() {
        let value = if let (Some((low, high)), true) = (dtype.integer_range(), distribution != Distribution::SmallIntegers) {
            let width = (high.min(1 << 20) - low.max(-(1 << 20)) + 1) as u64;
            (low.max(-(1 << 20)) + random.below(width) as i64) as f64
        } else {
            value(dtype, distribution, is_left, i, &mut random)
        };
        // The chunk has the size of one element, so the write cannot be refused.
        let _ = num::write_element(dtype, value, element);
    }
    bytes
}

fn value(dtype: DType, distribution: Distribution, is_left: bool, i: usize, random: &mut Random) -> f64 {
    match distribution {
        Distribution::Uniform => 2.0 * random.unit() - 1.0,
        Distribution::Normal => random.normal(),
        Distribution::SmallIntegers => {
            let lowest = if dtype == DType::U8 { 0 } else { -4 };
            (lowest + random.below(9) as i64) as f64
        }
        Distribution::SameSign => 0.5 + random.unit(),
        Distribution::Cancellation => {
            let size = 1.0 + random.unit() / 64.0;
            if is_left && i % 2 == 1 { -size } else { size }
        }
        Distribution::Denormals if is_left => {
            let smallest_normal = dtype.format().map_or(f64::MIN_POSITIVE, |f: Format| num::power_of_two(f.min_exponent()));
            // For f32 and bf16 the products must stay in f32's range, so the other operand is near 1.
            smallest_normal * (2.5 * random.unit() - 1.25)
        }
        Distribution::Denormals => 1.0 + random.unit(),
        Distribution::Special => match random.below(256) {
            0 => f64::NAN,
            1 if dtype != DType::E4m3 => f64::INFINITY,
            2 if dtype != DType::E4m3 => f64::NEG_INFINITY,
            3 => -0.0,
            _ => random.normal(),
        },
        Distribution::Zeros => {
            if random.below(2) == 0 {
                0.0
            } else {
                -0.0
            }
        }
        Distribution::WideRange => random.normal() * num::power_of_two(random.below(13) as i32 - 6),
    }
}

/// Inputs for every slot that a problem reads. A and B follow `distribution`; C, bias and residual are normal (whole numbers with
/// `SmallIntegers`); scale factors lie in [0.5, 2); bound scalars are whole and half numbers
/// in ±2 and never 0, in f64 with a digit that f32 would lose.
pub fn inputs(problem: &Problem, distribution: Distribution, seed: u64) -> Inputs {
    let Problem::Gemm(gemm) = problem else {
        return inputs_of_buffers(problem, distribution, seed);
    };
    let mut inputs = Inputs::default();
    let others = if distribution == Distribution::SmallIntegers { distribution } else { Distribution::Normal };
    let mut stream = Random::new(seed);
    let mut add = |name: &str, matrix: &Matrix, rows: u64, columns: u64| {
        let seed = stream.bits();
        let elements = matrix.layout(&gemm.batch, rows, columns).map_or(0, |layout| layout.span_elements());
        let bytes = match name {
            "a" => fill(matrix.dtype, distribution, true, seed, elements),
            "b" => fill(matrix.dtype, distribution, false, seed, elements),
            "scale_a" | "scale_b" => factors(seed, elements),
            _ => fill(matrix.dtype, others, false, seed, elements),
        };
        // A slot that is read twice is as long as the longer of its readers needs.
        let buffer = inputs.buffers.entry(matrix.slot).or_default();
        if let Some(rest) = bytes.get(buffer.len()..) {
            buffer.extend_from_slice(rest);
        }
    };
    let stores = stored_slots(gemm);
    for (name, matrix, rows, columns) in gemm.matrices() {
        if !stores.contains(&matrix.slot) || gemm.c.as_ref().is_some_and(|c| c.slot == matrix.slot) {
            add(name, matrix, rows, columns);
        }
    }
    for scale in [&gemm.scale_a, &gemm.scale_b].into_iter().flatten() {
        if let Scale::Tensor { slot } = scale {
            inputs.buffers.insert(*slot, factors(stream.bits(), 1));
        }
    }
    let steps = gemm.epilogue.iter().filter_map(|step| match step {
        EpilogueStep::Scale { factor } => Some(*factor),
        _ => None,
    });
    for scalar in [gemm.alpha, gemm.beta].into_iter().chain(steps) {
        if let HostScalar::Bound(slot) = scalar {
            let scalar = host_scalar(&mut stream, gemm.precision.epilogue() == DType::F64);
            inputs.scalars.entry(slot).or_insert(scalar);
        }
    }
    inputs
}

/// The same for kinds of problems whose operands are known by their uses alone.
fn inputs_of_buffers(problem: &Problem, distribution: Distribution, seed: u64) -> Inputs {
    let mut inputs = Inputs::default();
    let others = if distribution == Distribution::SmallIntegers { distribution } else { Distribution::Normal };
    let mut stream = Random::new(seed);
    let buffers = problem.buffers().unwrap_or_default();
    let is_first = |slot: Slot| buffers.first().is_some_and(|operand| operand.slot == slot);
    for operand in buffers.iter().filter(|operand| operand.access != Access::Written) {
        let seed = stream.bits();
        let kind = if operand.access == Access::Read { distribution } else { others };
        let bytes = fill(operand.dtype, kind, is_first(operand.slot), seed, operand.layout.span_elements());
        let buffer = inputs.buffers.entry(operand.slot).or_default();
        if let Some(rest) = bytes.get(buffer.len()..) {
            buffer.extend_from_slice(rest);
        }
    }
    for slot in problem.scalars() {
        let scalar = host_scalar(&mut stream, false);
        inputs.scalars.entry(slot).or_insert(scalar);
    }
    inputs
}

/// About `count` positions of an output of `[batch…, m, n]`, counted row-major and ascending, for [`crate::run::Positions::Some`].
///
/// They hold the corners of the first and of the last matrix, a part of their last rows and columns, and others anywhere. An output of
/// no more than `count` elements is taken whole.
pub fn sample_positions(gemm: &GemmProblem, count: u64, seed: u64) -> Vec<u64> {
    let (m, n) = (gemm.m, gemm.n);
    let one = m * n;
    let all = one * gemm.batch_count();
    if all <= count {
        return (0..all).collect();
    }
    let mut random = Random::new(seed);
    let mut positions = Vec::new();
    for base in [0, all - one] {
        positions.extend([0, n - 1, (m - 1) * n, one - 1].map(|corner| base + corner));
        for _ in 0..count / 16 {
            positions.push(base + (m - 1) * n + random.below(n));
            positions.push(base + random.below(m) * n + n - 1);
        }
    }
    while (positions.len() as u64) < count {
        positions.push(random.below(all));
    }
    positions.sort_unstable();
    positions.dedup();
    positions
}

fn stored_slots(gemm: &GemmProblem) -> Vec<Slot> {
    gemm.outputs().iter().map(|output| output.slot).collect()
}

/// A whole or half number in ±2, not 0. Where it is taken as f64, it has a digit more than f32 holds.
pub(crate) fn host_scalar(stream: &mut Random, is_double: bool) -> f64 {
    let half_steps = 1 + stream.below(4) as i32;
    let sign = if stream.below(2) == 0 { 0.5 } else { -0.5 };
    let scalar = sign * f64::from(half_steps);
    if is_double { scalar * (1.0 + num::power_of_two(-40)) } else { scalar }
}

pub(crate) fn factors(seed: u64, elements: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut bytes = Vec::with_capacity(elements as usize * 4);
    for _ in 0..elements {
        let factor = 0.5 + 1.5 * random.unit();
        bytes.extend(num::f64_to_f32(factor, Rounding::NearestEven).to_le_bytes());
    }
    bytes
}

/// The bits that outputs hold before a run: a NaN that no conversion makes (ours give the canonical one), or `0xa5` in every byte of an
/// integer, which may also be a right answer.
pub fn sentinel(dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F64 => 0xfff5_a5a5_a5a5_a5a5u64.to_le_bytes().to_vec(),
        DType::F32 | DType::Tf32 => 0xffa5_a5a5u32.to_le_bytes().to_vec(),
        DType::F16 => 0xfda5u16.to_le_bytes().to_vec(),
        DType::Bf16 => 0xffa5u16.to_le_bytes().to_vec(),
        DType::E4m3 => vec![0xff],
        DType::E5m2 => vec![0xfe],
        DType::I8 | DType::U8 | DType::I32 | DType::I64 | DType::Bool => vec![0xa5; dtype.bytes()],
    }
}

/// A buffer for an output: what the input in its place holds if it shares its buffer with one (C in place), else a sentinel in every
/// element, gaps between rows included. [`GUARD_BYTES`] more of the sentinel stand behind it.
pub fn output_buffer<Id: Ord>(expected: &Expected<Id>, inputs: &Inputs<Id>) -> Vec<u8> {
    let bytes = expected.layout.span_elements() as usize * expected.dtype.bytes();
    let mut buffer: Vec<u8> = sentinel(expected.dtype).into_iter().cycle().take(bytes + GUARD_BYTES).collect();
    if let Some(held) = inputs.buffers.get(&expected.id) {
        let length = held.len().min(bytes);
        buffer[..length].copy_from_slice(&held[..length]);
    }
    buffer
}
