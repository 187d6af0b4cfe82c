//! Tensor-core arithmetic: operands decoded from shared memory and registers as the hardware does, products, fragment layouts.
//!
//! **Summation.** The chip forms exact products, aligns them to the largest and adds them with truncation, in an order that is not
//! documented. Here products of the 16-bit and 8-bit formats and of tf32 are exact in f32 too, and are added to the accumulator one
//! after the other by ascending k, each addition rounded to nearest. For one instruction of depth `k` both lie within
//! `(k + 1) · 2⁻²³ · (|c| + Σ|aᵢ·bᵢ|)` of the exact value for f32 accumulators, and within half an f16 ulp more for f16
//! accumulators, which are rounded once at the end. Integer products are exact; f64 uses a chain of fused multiply-adds by ascending k.
//! [`Accumulation::Hopper`] models `wgmma`'s truncation, and its shortened accumulation of 8-bit floats.

mod descriptor;
mod fragment;
mod mma;
mod sparse;
mod wgmma;

pub use descriptor::{Descriptor, Major, operand_chunks};
pub use fragment::{a_element, accumulator_element, b_element, ldmatrix, movmatrix, stmatrix};
pub use mma::mma;
pub use wgmma::{Accumulation, Accumulator, Operand, multiply, place_sparse, read_a, read_a_registers, read_b};

use crate::inst::MatrixType;
use crate::ir::Swizzle;
use std::fmt;
use verdigris_tensor::num::{Format, tf32_truncate};

/// An operand or a product that the tensor core, or this model of it, does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixError {
    /// A descriptor with a base offset: its effect is not documented well enough to model. Align the tile to the swizzle's repeat.
    BaseOffset {
        /// The field, 1 to 7.
        base_offset: u32,
    },
    /// A descriptor whose reserved bits are set.
    ReservedBits {
        /// Those bits.
        bits: u64,
    },
    /// A chunk of the operand lies outside the CTA's shared memory.
    OutOfRange {
        /// Address of the chunk.
        address: u32,
        /// Size of the CTA's shared memory.
        shared_bytes: u32,
    },
    /// The operand's rows reach past the swizzle's span: the start address stands too far into the row.
    CrossesSpan {
        /// Where in its row the operand starts.
        start_bytes: u32,
        /// Bytes that one row of the operand needs there.
        row_bytes: u32,
        /// The swizzle.
        swizzle: Swizzle,
    },
    /// A sparsity selector beyond those that the shape has.
    Selector {
        /// The selector.
        selector: u32,
        /// How many the shape has.
        selectors: u32,
    },
    /// Sparsity metadata that is no ascending choice of places.
    Metadata {
        /// The row of the warp's 16.
        row: usize,
        /// The stored element of that row.
        index: usize,
    },
    /// A combination of shape, types and layout that is not supported.
    Unsupported {
        /// What it is.
        what: &'static str,
    },
}

impl fmt::Display for MatrixError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MatrixError::BaseOffset { base_offset } => {
                write!(f, "matrix descriptor has base offset {base_offset}, only 0 is modelled: align the tile to 1024 bytes")
            }
            MatrixError::ReservedBits { bits } => write!(f, "matrix descriptor has reserved bits {bits:#x} set"),
            MatrixError::OutOfRange { address, shared_bytes } => {
                write!(f, "matrix operand reaches shared address {address:#x} + 16, the CTA has {shared_bytes:#x} bytes")
            }
            MatrixError::CrossesSpan { start_bytes, row_bytes, swizzle } => write!(
                f,
                "matrix operand needs {row_bytes} bytes of a row from byte {start_bytes} on, rows of swizzle {swizzle:?} have {}",
                swizzle.span_bytes()
            ),
            MatrixError::Selector { selector, selectors } => {
                write!(f, "sparsity selector {selector}, the shape has {selectors}")
            }
            MatrixError::Metadata { row, index } => {
                write!(f, "sparsity metadata of row {row} gives stored element {index} no place behind the one before")
            }
            MatrixError::Unsupported { what } => write!(f, "unsupported matrix operation: {what}"),
        }
    }
}

impl std::error::Error for MatrixError {}

/// The value of one element of a matrix operand, from its bits in the low part of `bits`, as f32. Not for f64.
///
/// One-bit elements give 1 and −1 for 0 and 1, so that a sum of products counts the differing bits: `k − 2 · popc(a ^ b)`.
#[inline(always)]
fn element(ty: MatrixType, bits: u32) -> f32 {
    match ty {
        MatrixType::F16 => Format::F16.decode_f32(bits & 0xffff),
        MatrixType::Bf16 => f32::from_bits(bits << 16),
        MatrixType::Tf32 => tf32_truncate(f32::from_bits(bits)),
        MatrixType::F32 | MatrixType::F64 => f32::from_bits(bits),
        MatrixType::E4m3 => Format::E4M3.decode_f32(bits & 0xff),
        MatrixType::E5m2 => Format::E5M2.decode_f32(bits & 0xff),
        MatrixType::S8 => f32::from(bits as u8 as i8),
        MatrixType::U8 => f32::from(bits as u8),
        MatrixType::S4 => f32::from(((bits << 4) as u8 as i8) >> 4),
        MatrixType::U4 => f32::from(bits as u8 & 15),
        MatrixType::B1 => 1.0 - 2.0 * (bits & 1) as f32,
        MatrixType::S32 => bits as i32 as f32,
    }
}

/// Runs `$body` with `$bits` the size of an element of type `$ty` and `$element` its conversion, both constant for the usual types: the
/// compiler folds them into the loops over an operand.
macro_rules! with_element {
    ($ty:expr, $bits:ident, $element:ident => $body:expr) => {{
        macro_rules! constant {
            ($name:ident) => {{
                let $bits: u32 = MatrixType::$name.bits();
                let $element = |bits: u32| element(MatrixType::$name, bits);
                $body
            }};
        }
        match $ty {
            MatrixType::F16 => constant!(F16),
            MatrixType::Bf16 => constant!(Bf16),
            MatrixType::Tf32 => constant!(Tf32),
            MatrixType::E4m3 => constant!(E4m3),
            MatrixType::E5m2 => constant!(E5m2),
            MatrixType::S8 => constant!(S8),
            ty => {
                let $bits = ty.bits();
                let $element = |bits: u32| element(ty, bits);
                $body
            }
        }
    }};
}
use with_element;

fn is_integer(ty: MatrixType) -> bool {
    matches!(ty, MatrixType::S8 | MatrixType::U8 | MatrixType::S4 | MatrixType::U4 | MatrixType::B1)
}

/// `d[m][n] += a[m][k] · b[k][n]` in f32, by ascending k, `n` columns wide. Rows of `a` are `depth` long.
fn accumulate(d: &mut [f32], a: &[f32], b: &[f32], depth: usize, n: usize) {
    super::alu::wide(|| if n == 8 { accumulate_narrow(d, a, b, depth) } else { accumulate_rows(d, a, b, depth, n) });
}

#[inline(always)]
fn accumulate_rows(d: &mut [f32], a: &[f32], b: &[f32], depth: usize, n: usize) {
    for (row, a_row) in d.chunks_exact_mut(n).zip(a.chunks_exact(depth)) {
        let mut quads = a_row.chunks_exact(4);
        let mut b_rows = b.chunks_exact(4 * n);
        for (quad, four) in quads.by_ref().zip(b_rows.by_ref()) {
            let (b0, rest) = four.split_at(n);
            let (b1, rest) = rest.split_at(n);
            let (b2, b3) = rest.split_at(n);
            let [a0, a1, a2, a3] = [quad[0], quad[1], quad[2], quad[3]];
            for ((((d, b0), b1), b2), b3) in row.iter_mut().zip(b0).zip(b1).zip(b2).zip(b3) {
                *d = (((*d + a0 * b0) + a1 * b1) + a2 * b2) + a3 * b3;
            }
        }
    }
}

/// The same for the eight columns of `mma`: a row of sums stays in registers.
#[inline(always)]
fn accumulate_narrow(d: &mut [f32], a: &[f32], b: &[f32], depth: usize) {
    let (b_rows, _) = b.as_chunks::<8>();
    for (row, a_row) in d.as_chunks_mut::<8>().0.iter_mut().zip(a.chunks_exact(depth)) {
        let mut sums = *row;
        for (a, b_row) in a_row.iter().zip(b_rows) {
            for (sum, b) in sums.iter_mut().zip(b_row) {
                *sum += a * b;
            }
        }
        *row = sums;
    }
}

/// The same for an `a` of which only the elements in `columns` are stored: the others take no part, not even against an infinity.
fn accumulate_sparse(d: &mut [f32], a: &[f32], columns: &[u16], b: &[f32], stored: usize, n: usize) {
    for ((row, a_row), columns) in d.chunks_exact_mut(n).zip(a.chunks_exact(stored)).zip(columns.chunks_exact(stored)) {
        for (&a, &column) in a_row.iter().zip(columns) {
            let from = usize::from(column) * n;
            for (d, b) in row.iter_mut().zip(&b[from..from + n]) {
                *d += a * b;
            }
        }
    }
}

/// An integer accumulator after adding `sum`: clamped to its range, or wrapped.
#[inline(always)]
fn add_integer(accumulator: i32, sum: i64, saturate: bool) -> i32 {
    let exact = i64::from(accumulator) + sum;
    if saturate { exact.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as i32 } else { exact as i32 }
}
