//! Shared-memory matrix descriptors.
//!
//! Source: PTX ISA, "Asynchronous warpgroup level matrix shared memory layout" and "matrix descriptor format"; the canonical layouts in
//! 16-byte chunks, with `r` the row of a K-major operand (M or N) and `c` its chunk along K; for an MN-major operand `c` is the chunk
//! along M or N and `k` the row along K; `span` the chunks of a swizzle row:
//!
//! | major | swizzle | address of the chunk before the XOR |
//! |---|---|---|
//! | K | none | `(r % 8) · 16 + (r / 8) · SBO + c · LBO` |
//! | K | 32, 64, 128 B | `(r % 8) · span + (r / 8) · SBO + c · 16` |
//! | M/N | none | `(k % 8) · 16 + (k / 8) · LBO + c · SBO` |
//! | M/N | 32, 64, 128 B | `(k % 8) · span + (k / 8) · SBO + (c % span) · 16 + (c / span) · LBO` |

use super::MatrixError;
use crate::ir::Swizzle;

/// Along which dimension an operand is contiguous in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Major {
    /// Along K.
    K,
    /// Along M (operand A) or N (operand B): the transposed form, for 16-bit types.
    Mn,
}

/// A shared-memory matrix descriptor, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Address of the operand's first chunk: below 2¹⁸, a multiple of 16.
    pub start_bytes: u32,
    /// The "leading dimension" distance (LBO).
    pub leading_bytes: u32,
    /// The "stride dimension" distance (SBO).
    pub stride_bytes: u32,
    /// The XOR pattern.
    pub swizzle: Swizzle,
}

impl Descriptor {
    /// Decodes the 64 bits: start address >> 4 in bits 0–13, LBO >> 4 in 16–29, SBO >> 4 in 32–45, base offset in 49–51, swizzle in 62–63
    /// (0 none, 1 128 B, 2 64 B, 3 32 B).
    pub fn decode(bits: u64) -> Result<Self, MatrixError> {
        const RESERVED: u64 = !(0x3fff | 0x3fff << 16 | 0x3fff << 32 | 7 << 49 | 3 << 62);
        if bits & RESERVED != 0 {
            return Err(MatrixError::ReservedBits { bits: bits & RESERVED });
        }
        let base_offset = (bits >> 49) as u32 & 7;
        if base_offset != 0 {
            return Err(MatrixError::BaseOffset { base_offset });
        }
        let field = |from: u32| ((bits >> from) as u32 & 0x3fff) << 4;
        let swizzle = match bits >> 62 {
            0 => Swizzle::None,
            1 => Swizzle::B128,
            2 => Swizzle::B64,
            _ => Swizzle::B32,
        };
        Ok(Descriptor { start_bytes: field(0), leading_bytes: field(16), stride_bytes: field(32), swizzle })
    }
}

/// Addresses of an operand's 16-byte chunks, swizzled: `rows` along M or N, `depth_bytes` along K (K-major) or `depth` elements of 2 bytes
/// (MN-major, where `depth_bytes = 2 · depth`).
///
/// K-major: chunk `c` of row `r` at index `r · (depth_bytes / 16) + c`. MN-major: chunk `c` (8 elements) of depth `k` at `k · (rows / 8) + c`.
pub fn operand_chunks(
    descriptor: &Descriptor,
    major: Major,
    rows: u32,
    depth_bytes: u32,
    shared_bytes: u32,
) -> Result<Vec<u32>, MatrixError> {
    let Descriptor { start_bytes, leading_bytes, stride_bytes, swizzle } = *descriptor;
    let span = swizzle.span_bytes();
    let row_bytes = match major {
        Major::K => depth_bytes,
        Major::Mn => (rows * 2).min(span),
    };
    if swizzle != Swizzle::None && start_bytes % span + row_bytes > span {
        return Err(MatrixError::CrossesSpan { start_bytes: start_bytes % span, row_bytes, swizzle });
    }
    let mut chunks = Vec::with_capacity((rows * depth_bytes / 16) as usize);
    let mut push = |offset: u32| {
        let address = swizzle.apply(start_bytes + offset);
        if u64::from(address) + 16 > u64::from(shared_bytes) {
            return Err(MatrixError::OutOfRange { address, shared_bytes });
        }
        chunks.push(address);
        Ok(())
    };
    match major {
        Major::K => {
            let along_k = if swizzle == Swizzle::None { leading_bytes } else { 16 };
            for r in 0..rows {
                for c in 0..depth_bytes / 16 {
                    push((r % 8) * span + (r / 8) * stride_bytes + c * along_k)?;
                }
            }
        }
        Major::Mn => {
            let span_chunks = span / 16;
            // Without a swizzle a "row" is one chunk, and the two distances change places.
            let (along_mn, along_k) = if swizzle == Swizzle::None { (stride_bytes, leading_bytes) } else { (leading_bytes, stride_bytes) };
            for k in 0..depth_bytes / 2 {
                for c in 0..rows / 8 {
                    push((k % 8) * span + (k / 8) * along_k + (c % span_chunks) * 16 + (c / span_chunks) * along_mn)?;
                }
            }
        }
    }
    Ok(chunks)
}
