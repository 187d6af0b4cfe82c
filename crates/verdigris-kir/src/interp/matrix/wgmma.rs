//! `wgmma`: the product of a warpgroup, 64 rows by `n` columns.
//!
//! Reading the operands, multiplying and the registers of the accumulator are separate steps, since the machine may place them at
//! different times: operands are read at any moment between issue and completion, and accumulators may stay in an [`Accumulator`] over a
//! whole group of instructions.

use super::super::alu::Lanes;
use super::mma::canonical;
use super::{
    Descriptor, Major, MatrixError, a_element, accumulate, accumulate_sparse, accumulator_element, add_integer, element, is_integer,
    operand_chunks, sparse, with_element,
};
use crate::inst::{MatrixType, WgmmaShape};
use verdigris_tensor::num::{Format, Rounding, f32_to_f16, f64_to_f32};

/// How products of floats are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Accumulation {
    /// One after the other in f32, each sum rounded to nearest.
    #[default]
    Full,
    /// As observed on Hopper. Of 8-bit floats, the products of one instruction and the accumulator are aligned to the largest exponent among
    /// them and cut off 13 binary places below it, then added. (DeepSeek-V3 technical report, section 3.3.2: 14 bits survive.) Of
    /// the wider types, the sum of the products and the accumulator is cut off to 24 bits, toward zero, once for each instruction: what a long
    /// chain of them loses is biased, and grows with its length and not with the root of it. (Fasi, Higham, Mikaitis, Pranesh, "Numerical
    /// behavior of NVIDIA tensor cores", 2021; how many places below 24 bits take part is not documented, and all do here.)
    Hopper,
}

/// An operand of a warpgroup product, converted once. Values are f32, exactly.
#[derive(Clone, Debug)]
pub struct Operand {
    /// A: `[64][k]`, or `[64][k / 2]` if sparse. B: `[k][n]`.
    values: Vec<f32>,
    /// Of a sparse A, the column of each value.
    columns: Vec<u16>,
    /// The 16-byte chunks of shared memory that it was read from, by address; empty for registers.
    pub chunks: Vec<u32>,
}

/// Checks the combination of shape and types.
fn check(shape: &WgmmaShape) -> Result<(), MatrixError> {
    use MatrixType::{Bf16, E4m3, E5m2, F16, F32, S8, S32, Tf32, U8};
    let fail = |what| Err(MatrixError::Unsupported { what });
    if shape.n == 0 || shape.n > 256 || !shape.n.is_multiple_of(8) {
        return fail("wgmma: n must be a multiple of 8 up to 256");
    }
    match (shape.a, shape.b, shape.d) {
        (F16, F16, F16 | F32) | (Bf16, Bf16, F32) => {}
        (Tf32, Tf32, F32) | (E4m3 | E5m2, E4m3 | E5m2, F16 | F32) => {
            if shape.transpose_a || shape.transpose_b {
                return fail("wgmma: only 16-bit operands may be transposed");
            }
        }
        (S8 | U8, S8 | U8, S32) => {
            if shape.transpose_a || shape.transpose_b {
                return fail("wgmma: only 16-bit operands may be transposed");
            }
            if shape.negate_a || shape.negate_b {
                return fail("wgmma: integer operands have no negated form");
            }
            // Every multiple of 8 up to 32, then every multiple of 16.
            if shape.n > 32 && !shape.n.is_multiple_of(16) {
                return fail("wgmma: with integers n beyond 32 must be a multiple of 16");
            }
        }
        _ => return fail("wgmma: no such combination of types"),
    }
    if shape.a_in_registers && shape.transpose_a {
        return fail("wgmma: an A operand in registers has no transposed form");
    }
    Ok(())
}

/// Reads an operand of `rows` rows; the steps say how far the elements of neighbouring rows and depths lie apart in the result.
fn read(
    ty: MatrixType,
    descriptor: u64,
    shared: &[u8],
    (rows, depth): (usize, usize),
    transpose: bool,
    negate: bool,
    (row_step, k_step): (usize, usize),
) -> Result<Operand, MatrixError> {
    let descriptor = Descriptor::decode(descriptor)?;
    let major = if transpose { Major::Mn } else { Major::K };
    let bits = ty.bits() as usize;
    let shared_bytes = u32::try_from(shared.len()).unwrap_or(u32::MAX);
    let chunks = operand_chunks(&descriptor, major, rows as u32, (depth * bits / 8) as u32, shared_bytes)?;
    let mut values = vec![0f32; rows * depth];
    let sign = if negate { -1.0 } else { 1.0 };
    with_element!(ty, bits, convert => {
        let width = bits as usize / 8;
        let per_chunk = 16 / width;
        let chunks_along_k = depth / per_chunk;
        for (index, &address) in chunks.iter().enumerate() {
            let (first, step) = match major {
                Major::K => (index / chunks_along_k * row_step + index % chunks_along_k * per_chunk * k_step, k_step),
                Major::Mn => (index % (rows / 8) * 8 * row_step + index / (rows / 8) * k_step, row_step),
            };
            let from = address as usize;
            for (i, word) in shared[from..from + 16].chunks_exact(width).enumerate() {
                let code = word.iter().rev().fold(0u32, |code, &byte| (code << 8) | u32::from(byte));
                values[first + i * step] = sign * convert(code);
            }
        }
    });
    Ok(Operand { values, columns: Vec::new(), chunks })
}

/// Columns of A as stored: half of the depth where it is sparse.
fn stored_depth(shape: &WgmmaShape) -> usize {
    if shape.sparse { shape.k() as usize / 2 } else { shape.k() as usize }
}

/// Places the stored elements of a sparse operand A by the metadata registers of the four warps; [`multiply`] needs it.
pub fn place_sparse(shape: &WgmmaShape, a: &mut Operand, metadata: &[&Lanes; 4], selector: u32) -> Result<(), MatrixError> {
    check(shape)?;
    if !shape.sparse {
        return Err(MatrixError::Unsupported { what: "wgmma: metadata for a dense shape" });
    }
    a.columns.clear();
    for metadata in metadata {
        a.columns.extend(sparse::columns(shape.a, shape.k() as usize, metadata, selector)?);
    }
    Ok(())
}

/// Operand A, 64 rows, from the CTA's shared memory, of which `shared` is all.
pub fn read_a(shape: &WgmmaShape, descriptor: u64, shared: &[u8]) -> Result<Operand, MatrixError> {
    check(shape)?;
    let depth = stored_depth(shape);
    read(shape.a, descriptor, shared, (64, depth), shape.transpose_a, shape.negate_a, (depth, 1))
}

/// Operand B, `n` columns, from the CTA's shared memory, of which `shared` is all.
pub fn read_b(shape: &WgmmaShape, descriptor: u64, shared: &[u8]) -> Result<Operand, MatrixError> {
    check(shape)?;
    let n = shape.n as usize;
    read(shape.b, descriptor, shared, (n, shape.k() as usize), shape.transpose_b, shape.negate_b, (1, n))
}

/// Operand A from the four registers of each of the four warps.
pub fn read_a_registers(shape: &WgmmaShape, registers: &[[&Lanes; 4]; 4]) -> Result<Operand, MatrixError> {
    check(shape)?;
    let depth = stored_depth(shape);
    let sign = if shape.negate_a { -1.0 } else { 1.0 };
    let mut values = vec![0f32; 64 * depth];
    with_element!(shape.a, bits, convert => for (warp, registers) in registers.iter().enumerate() {
        for (register, lanes) in registers.iter().enumerate() {
            for (lane, &word) in lanes.iter().enumerate() {
                for index in 0..32 / bits {
                    let (row, k) = a_element(bits, 16, register as u32, lane as u32, index);
                    values[(16 * warp + row as usize) * depth + k as usize] = sign * convert((word as u32) >> (index * bits));
                }
            }
        }
    });
    Ok(Operand { values, columns: Vec::new(), chunks: Vec::new() })
}

/// The accumulators of a warpgroup as a matrix of 64 rows.
#[derive(Clone, Debug)]
pub struct Accumulator {
    n: usize,
    ty: MatrixType,
    /// Row by row. f16 values are held as f32.
    floats: Vec<f32>,
    integers: Vec<i32>,
}

impl Accumulator {
    /// All zero.
    pub fn new(shape: &WgmmaShape) -> Self {
        let n = shape.n as usize;
        let (floats, integers) = if is_integer(shape.a) { (0, 64 * n) } else { (64 * n, 0) };
        Accumulator { n, ty: shape.d, floats: vec![0.0; floats], integers: vec![0; integers] }
    }

    /// Whether an instruction of this shape can add to it.
    pub fn fits(&self, shape: &WgmmaShape) -> bool {
        self.n == shape.n as usize && self.ty == shape.d
    }

    /// Takes over accumulator register `register` of warp `warp` (0 to 3).
    pub fn load(&mut self, warp: usize, register: usize, lanes: &Lanes) {
        let (row, column) = accumulator_element(0, if self.ty == MatrixType::F16 { 2 * register } else { register } as u32);
        let first = (16 * warp + row as usize) * self.n + column as usize;
        for (row, words) in lanes.chunks_exact(4).enumerate() {
            let line = first + row * self.n..first + row * self.n + 7;
            match self.ty {
                MatrixType::F16 => {
                    let pairs = self.floats[line.start..line.end + 1].chunks_exact_mut(2);
                    for (pair, &word) in pairs.zip(words) {
                        pair[0] = Format::F16.decode_f32(word as u32 & 0xffff);
                        pair[1] = Format::F16.decode_f32((word >> 16) as u32 & 0xffff);
                    }
                }
                MatrixType::S32 => self.integers[line].iter_mut().step_by(2).zip(words).for_each(|(to, &word)| *to = word as u32 as i32),
                _ => self.floats[line].iter_mut().step_by(2).zip(words).for_each(|(to, &word)| *to = f32::from_bits(word as u32)),
            }
        }
    }

    /// What accumulator register `register` of warp `warp` holds; NaN canonical.
    pub fn store(&self, warp: usize, register: usize) -> Lanes {
        let mut lanes = [0; 32];
        match self.ty {
            MatrixType::F16 => {
                let half = |value: f32| u64::from(f32_to_f16(value));
                self.gather(&self.floats, warp, 2 * register, 8, &mut lanes, |pair| half(pair[0]) | half(pair[1]) << 16);
            }
            MatrixType::S32 => self.gather(&self.integers, warp, register, 7, &mut lanes, |of| u64::from(of[0] as u32)),
            _ => self.gather(&self.floats, warp, register, 7, &mut lanes, |of| canonical(of[0])),
        }
        lanes
    }

    /// Accumulator element `index` of each lane, and what stands behind it: eight rows of four lanes, which reach over `reach` elements.
    #[inline(always)]
    fn gather<T>(&self, of: &[T], warp: usize, index: usize, reach: usize, lanes: &mut Lanes, word: impl Fn(&[T]) -> u64) {
        let (row, column) = accumulator_element(0, index as u32);
        let first = (16 * warp + row as usize) * self.n + column as usize;
        for (row, lanes) in lanes.chunks_exact_mut(4).enumerate() {
            let line = &of[first + row * self.n..first + row * self.n + reach];
            for (lane, pair) in lanes.iter_mut().zip(line.chunks(2)) {
                *lane = word(pair);
            }
        }
    }
}

/// `d = a · b`, or `d += a · b` with `scale_d`.
///
/// Cost: `64 · n · k` multiply-adds in f32, vectorized. Errors: an accumulator of another shape.
pub fn multiply(
    shape: &WgmmaShape,
    a: &Operand,
    b: &Operand,
    scale_d: bool,
    d: &mut Accumulator,
    accumulation: Accumulation,
) -> Result<(), MatrixError> {
    check(shape)?;
    let (n, depth, stored) = (shape.n as usize, shape.k() as usize, stored_depth(shape));
    let placed = if shape.sparse { 64 * stored } else { 0 };
    if !d.fits(shape) || a.values.len() != 64 * stored || a.columns.len() != placed || b.values.len() != depth * n {
        return Err(MatrixError::Unsupported {
            what: "wgmma: operands or accumulator of another shape, or a sparse A without its metadata",
        });
    }
    if !scale_d {
        d.floats.fill(0.0);
        d.integers.fill(0);
    }
    let add_products = |d: &mut [f32]| {
        if shape.sparse {
            accumulate_sparse(d, &a.values, &a.columns, &b.values, stored, n);
        } else {
            accumulate(d, &a.values, &b.values, depth, n);
        }
    };
    if is_integer(shape.a) {
        // Exact in f32: a sum of 32 products stays below 2²⁴.
        let mut sums = vec![0f32; 64 * n];
        add_products(&mut sums);
        for (accumulator, &sum) in d.integers.iter_mut().zip(&sums) {
            *accumulator = add_integer(*accumulator, i64::from(sum as i32), shape.saturate);
        }
        return Ok(());
    }
    let fp8 = matches!(shape.a, MatrixType::E4m3 | MatrixType::E5m2);
    if fp8 && accumulation == Accumulation::Hopper {
        for row in 0..64 {
            for column in 0..n {
                let products = (0..stored).map(|index| {
                    let at = row * stored + index;
                    let k = a.columns.get(at).map_or(index, |&k| usize::from(k));
                    a.values[at] * b.values[k * n + column]
                });
                let at = row * n + column;
                d.floats[at] = truncated_sum(d.floats[at], products);
            }
        }
    } else if accumulation == Accumulation::Hopper {
        let mut sums = vec![0f64; n];
        for (row, floats) in d.floats.chunks_exact_mut(n).enumerate() {
            sums.iter_mut().zip(&*floats).for_each(|(sum, &start)| *sum = f64::from(start));
            for index in row * stored..(row + 1) * stored {
                let k = a.columns.get(index).map_or(index - row * stored, |&k| usize::from(k));
                let a = f64::from(a.values[index]);
                sums.iter_mut().zip(&b.values[k * n..][..n]).for_each(|(sum, &b)| *sum += a * f64::from(b));
            }
            floats.iter_mut().zip(&sums).for_each(|(float, &sum)| *float = f64_to_f32(sum, Rounding::TowardZero));
        }
    } else {
        add_products(&mut d.floats);
    }
    if shape.d == MatrixType::F16 {
        for value in &mut d.floats {
            *value = Format::F16.decode_f32(u32::from(f32_to_f16(*value)));
        }
    }
    Ok(())
}

/// The sum of terms that are first cut off 13 binary places below the largest exponent among them.
fn truncated_sum(start: f32, terms: impl Iterator<Item = f32> + Clone) -> f32 {
    let all = || std::iter::once(start).chain(terms.clone());
    if all().any(|term| !term.is_finite()) {
        return all().sum();
    }
    let largest = all().fold(0f32, |largest, term| largest.max(term.abs()));
    if largest == 0.0 {
        return all().sum();
    }
    let exponent = (f64::from(largest).to_bits() >> 52) as i32 - 1023;
    let quantum = verdigris_tensor::num::power_of_two(exponent - 13);
    // At most 33 terms of 14 bits: exact in f64 and in f32.
    all().map(|term| (f64::from(term) / quantum).trunc()).sum::<f64>().mul_add(quantum, 0.0) as f32
}
