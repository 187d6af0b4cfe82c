//! Deterministic inputs: the same bytes for the same seed on every machine.

use std::fmt;

use verdigris_graph::{Access, EpilogueStep, GemmProblem, HostScalar, Matrix, Problem, Scale, Slot};
use verdigris_tensor::num::{self, Format, Rounding};
use verdigris_tensor::{DType, Layout};

use serde::Deserialize;

pub use crate::data_graph::graph_inputs;
use crate::data_places;
use crate::run::{Expected, Inputs};

/// Bytes of untouched memory behind each output, to catch writes past its end.
pub const GUARD_BYTES: usize = 64;

/// What the elements of operands look like. Integers are uniform, over the whole range of their type if that is no wider than ±2²⁰, in all of them but
/// `SmallIntegers`, `Constant` and `Limits`, and but for what stands at the places of `Masked` and `Edges`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Deserialize)]
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
    /// Between −200 and 200: of a row's exponentials few are not 0 beside the greatest, and squares pass the range of f16.
    Hundreds,
    /// Sizes over the whole range of the type, subnormals and the greatest among them; the operand beside it near 1, of either sign.
    Limits,
    /// Normal values around a mean that leaves them a few significant bits (1024, or what the type's precision allows): what takes the
    /// difference of two sums loses all.
    LargeMean,
    /// One normal value in all elements.
    Constant,
    /// Normal values; in each dim a quarter of the indices, neighbours, have −∞ (the least value of a type without it) in all their elements: whole
    /// rows, whole windows, and the beginning or the end of others.
    Masked,
    /// Normal values; NaN and infinities where every index is the first, the last or one beside a tile's edge, and NaN in the gaps between
    /// elements.
    Edges,
    /// Normal values, and NaN in the gaps between elements.
    Gaps,
}

impl Distribution {
    /// The word of the case files.
    pub const fn name(self) -> &'static str {
        match self {
            Distribution::Uniform => "uniform",
            Distribution::Normal => "normal",
            Distribution::SmallIntegers => "small_integers",
            Distribution::SameSign => "same_sign",
            Distribution::Cancellation => "cancellation",
            Distribution::Denormals => "denormals",
            Distribution::Special => "special",
            Distribution::Zeros => "zeros",
            Distribution::WideRange => "wide_range",
            Distribution::Hundreds => "hundreds",
            Distribution::Limits => "limits",
            Distribution::LargeMean => "large_mean",
            Distribution::Constant => "constant",
            Distribution::Masked => "masked",
            Distribution::Edges => "edges",
            Distribution::Gaps => "gaps",
        }
    }

    /// What stands beside the operands of a product: C, bias, residual.
    fn beside_products(self) -> Distribution {
        match self {
            Distribution::SmallIntegers | Distribution::Hundreds | Distribution::LargeMean | Distribution::Edges | Distribution::Gaps => {
                self
            }
            _ => Distribution::Normal,
        }
    }
}

impl fmt::Display for Distribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
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

/// `elements` values of type `dtype`, which lie one behind the other. `is_left` tells the operand that takes the odd values of `Denormals` and
/// `Limits` and the alternating signs of `Cancellation` from the one beside it in a product.
pub fn fill(dtype: DType, distribution: Distribution, is_left: bool, seed: u64, elements: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut bytes = vec![0; elements as usize * dtype.bytes()];
    let mut first = None;
    for (i, element) in bytes.chunks_exact_mut(dtype.bytes()).enumerate() {
        let value = match first {
            Some(value) => value,
            None => element_value(dtype, distribution, is_left, i, &mut random),
        };
        if distribution == Distribution::Constant {
            first = Some(value);
        }
        // The chunk has the size of one element, so the write cannot be refused.
        let _ = num::write_element(dtype, value, element);
    }
    bytes
}

/// The elements of a layout with what lies between them, as [`fill`] makes them; and what a distribution has at some places alone.
pub fn fill_layout(dtype: DType, distribution: Distribution, is_left: bool, seed: u64, layout: &Layout) -> Vec<u8> {
    let mut bytes = fill(dtype, distribution, is_left, seed, layout.span_elements());
    data_places::put(&mut bytes, dtype, distribution, seed, layout);
    bytes
}

fn element_value(dtype: DType, distribution: Distribution, is_left: bool, i: usize, random: &mut Random) -> f64 {
    let Some((low, high)) = dtype.integer_range().filter(|_| distribution != Distribution::SmallIntegers) else {
        return value(dtype, distribution, is_left, i, random);
    };
    if distribution == Distribution::Limits && dtype != DType::I64 && random.below(4) == 0 {
        return if random.below(2) == 0 { low as f64 } else { high as f64 };
    }
    let width = (high.min(1 << 20) - low.max(-(1 << 20)) + 1) as u64;
    (low.max(-(1 << 20)) + random.below(width) as i64) as f64
}

fn value(dtype: DType, distribution: Distribution, is_left: bool, i: usize, random: &mut Random) -> f64 {
    match distribution {
        Distribution::Uniform => 2.0 * random.unit() - 1.0,
        Distribution::Normal | Distribution::Constant | Distribution::Masked | Distribution::Edges | Distribution::Gaps => random.normal(),
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
        Distribution::Hundreds => 400.0 * random.unit() - 200.0,
        Distribution::Limits => {
            let sign = if random.below(2) == 0 { 1.0 } else { -1.0 };
            sign * if is_left { size_within(dtype, random) } else { 0.5 + random.unit() }
        }
        Distribution::LargeMean => {
            let bits = dtype.format().map_or(52, |format| format.mantissa_bits);
            num::power_of_two(bits.min(10) as i32) + random.normal()
        }
    }
}

/// The greatest value of a floating-point type, or any below it: all exponents alike, those of subnormals among them. Of types as wide as f32 the greatest
/// are rare, and those next to it left out, so that not every sum overflows; of f32 it is bf16's, for what is cut to fewer bits must not
/// turn to infinity. Of f64, in which the reference itself computes, it is what leaves room for sums.
fn size_within(dtype: DType, random: &mut Random) -> f64 {
    let wide = Format::BF16.max_value();
    let (largest, least_exponent) = match dtype.format() {
        Some(format) => (format.max_value().min(wide), format.min_exponent() - format.mantissa_bits as i32),
        None => (num::power_of_two(960), -960),
    };
    let (one_of, room) = if largest < wide { (32, 0) } else { (512, 24) };
    if random.below(one_of) == 0 {
        return largest;
    }
    let exponents = (exponent_of(largest) - room - least_exponent) as u64;
    let exponent = least_exponent + random.below(exponents) as i32;
    num::power_of_two(exponent) * (1.0 + random.unit())
}

/// The exponent of a normal number.
fn exponent_of(value: f64) -> i32 {
    (value.to_bits() >> 52 & 0x7ff) as i32 - 1023
}

/// Inputs for every slot that a problem reads. A and B follow `distribution`; C, bias and residual do with `SmallIntegers`, `Hundreds`, `LargeMean`,
/// `Edges` and `Gaps`, and are normal with the others; scale factors lie in [0.5, 2); bound scalars are whole and half numbers
/// in ±2 and never 0, in f64 with a digit that f32 would lose.
pub fn inputs(problem: &Problem, distribution: Distribution, seed: u64) -> Inputs {
    let Problem::Gemm(gemm) = problem else {
        return inputs_of_buffers(problem, distribution, seed);
    };
    let mut inputs = Inputs::default();
    let others = distribution.beside_products();
    let mut stream = Random::new(seed);
    let mut add = |name: &str, matrix: &Matrix, rows: u64, columns: u64| {
        let seed = stream.bits();
        let Ok(layout) = matrix.layout(&gemm.batch, rows, columns) else { return };
        // What lies between the elements of one reader may be an element of another.
        let filled = |distribution, is_left| match gemm.matrices().iter().filter(|(_, other, ..)| other.slot == matrix.slot).count() {
            0 | 1 => fill_layout(matrix.dtype, distribution, is_left, seed, &layout),
            _ => fill(matrix.dtype, distribution, is_left, seed, layout.span_elements()),
        };
        let bytes = match name {
            "a" => filled(distribution, true),
            "b" => filled(distribution, false),
            "scale_a" | "scale_b" => factors(seed, layout.span_elements()),
            _ => filled(others, false),
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
    for step in &gemm.epilogue {
        match *step {
            EpilogueStep::Random { ref number, offset: None, .. } => {
                let words = (0..4).flat_map(|_| (stream.bits() as u32).to_le_bytes());
                inputs.buffers.insert(number.slot, words.collect());
            }
            EpilogueStep::Random { ref number, offset: Some(offset), .. } => {
                for slot in [number.slot, offset] {
                    inputs.scalars.insert(slot, stream.below(1 << 40) as f64);
                }
            }
            _ => {}
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
    let others = distribution.beside_products();
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
