//! Sparse operands: A holds half of its elements, metadata tells where each stands.
//!
//! 16- and 8-bit elements keep two of each four, tf32 one of each two, 4-bit elements two pairs of each four pairs. A 2-bit index (tf32: the
//! 4 bits `0b0100` or `0b1110`) gives the place of each element (or pair) in its group, the first in the lowest bits. The metadata of 16
//! rows lies in one register of the warp. With `g` the lane's group of four and `s` the selector:
//!
//! | bits per row | lane | holds |
//! |---|---|---|
//! | 16 | `4g + s` | row g in the low half, row g + 8 in the high half |
//! | 32, elements of 16 bits and more | `4g + 2s + c` | bits 16c to 16c + 15: of row g in the low half, of row g + 8 in the high half |
//! | 64 | `4g + 2w + h` | word w of row g + 8h; the selector is 0 |
//!
//! Source: PTX ISA, "Sparse matrix storage"; the distribution over lanes agrees with CUTLASS's host-side reordering of metadata. The
//! distribution of 32 bits per row for smaller elements (m16n8k32 with 8 bits, m16n8k64 with 4) is not established, so it is refused.

use super::MatrixError;
use crate::inst::MatrixType;
use crate::interp::alu::Lanes;

/// The columns in which the `k / 2` stored elements of each of 16 rows stand: `[16][k / 2]`.
pub(super) fn columns(ty: MatrixType, k: usize, metadata: &Lanes, selector: u32) -> Result<Vec<u16>, MatrixError> {
    let bits = ty.bits();
    let row_bits = match bits {
        4 => k / 2,
        32 => 2 * k,
        _ => k,
    };
    let selectors = match (row_bits, bits >= 16) {
        (16, _) => 4,
        (32, true) => 2,
        (64, _) => 1,
        _ => return Err(MatrixError::Unsupported { what: "sparse product: the layout of this metadata is not established" }),
    };
    if selector >= selectors {
        return Err(MatrixError::Selector { selector, selectors });
    }
    let mut columns = Vec::with_capacity(8 * k);
    for row in 0..16usize {
        let (group, high) = (row % 8, row / 8);
        let half = |lane: usize| (metadata[lane] >> (16 * high)) & 0xffff;
        let s = selector as usize;
        let word = match row_bits {
            16 => half(4 * group + s),
            32 => half(4 * group + 2 * s) | half(4 * group + 2 * s + 1) << 16,
            _ => (metadata[4 * group + high] & 0xffff_ffff) | metadata[4 * group + 2 + high] << 32,
        };
        let mut last = None;
        for index in 0..k / 2 {
            let column = match bits {
                32 => match (word >> (4 * index)) & 15 {
                    0b0100 => 2 * index,
                    0b1110 => 2 * index + 1,
                    _ => return Err(MatrixError::Metadata { row, index }),
                },
                4 => 8 * (index / 4) + 2 * ((word >> (2 * (index / 2))) & 3) as usize + index % 2,
                _ => 4 * (index / 2) + ((word >> (2 * index)) & 3) as usize,
            };
            // The places of a group ascend.
            if last.is_some_and(|last| column <= last) {
                return Err(MatrixError::Metadata { row, index });
            }
            last = Some(column);
            columns.push(column as u16);
        }
    }
    Ok(columns)
}
