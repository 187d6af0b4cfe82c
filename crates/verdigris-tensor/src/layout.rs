//! Where the elements of a tensor lie: dims and strides.
//!
//! Element `(i₀, …, iᵣ₋₁)` lies `Σ iⱼ · strideⱼ` elements after the first. Strides are not negative; a stride of 0 repeats one
//! element along its dim (broadcast). All counts are in elements and 64 bits wide; [`Layout::span_bytes`] makes bytes of them.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::dtype::DType;

/// The largest number of dims of a tensor.
pub const MAX_RANK: usize = 8;

/// Why a layout cannot be made.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LayoutError {
    /// More than [`MAX_RANK`] dims.
    #[error("a tensor of {rank} dims; the limit is {MAX_RANK}")]
    Rank {
        /// The number of dims asked for.
        rank: usize,
    },
    /// The number of strides is not the number of dims.
    #[error("{dims} dims but {strides} strides; each dim has one stride")]
    StrideCount {
        /// Number of dims.
        dims: usize,
        /// Number of strides.
        strides: usize,
    },
    /// An order or a permutation that does not name each dim once.
    #[error("order {order:?} of {rank} dims; it must name each of them once")]
    Order {
        /// The order given.
        order: Vec<usize>,
        /// The number of dims.
        rank: usize,
    },
    /// The last element lies beyond 2^63 elements.
    #[error("dims {dims:?} with strides {strides:?} reach beyond 2^63 elements")]
    TooLarge {
        /// The dims.
        dims: Vec<u64>,
        /// The strides; empty where they were to be computed.
        strides: Vec<u64>,
    },
    /// A dim that is neither equal nor 1 and so cannot be broadcast.
    #[error("dims {from:?} cannot be broadcast to {to:?}; from the last on, each dim must be equal or 1")]
    Broadcast {
        /// The dims of this layout.
        from: Vec<u64>,
        /// The dims asked for.
        to: Vec<u64>,
    },
}

/// Dims and strides of a tensor, in elements. Small, `Copy`, and compared by value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Parts", into = "Parts")]
pub struct Layout {
    rank: u8,
    // Entries past `rank` are 0, so that derived equality and hashing are right.
    dims: [u64; MAX_RANK],
    strides: [u64; MAX_RANK],
}

/// The stored form of a layout.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Parts {
    dims: Vec<u64>,
    strides: Vec<u64>,
}

impl TryFrom<Parts> for Layout {
    type Error = LayoutError;

    fn try_from(parts: Parts) -> Result<Layout, LayoutError> {
        Layout::new(&parts.dims, &parts.strides)
    }
}

impl From<Layout> for Parts {
    fn from(layout: Layout) -> Parts {
        Parts { dims: layout.dims().to_vec(), strides: layout.strides().to_vec() }
    }
}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}:{:?}", self.dims(), self.strides())
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}:{:?}", self.dims(), self.strides())
    }
}

impl Layout {
    /// A layout of given dims and strides.
    ///
    /// # Errors
    /// Too many dims, not one stride a dim, or a span or element count beyond 2^63. Of an empty tensor, the dims that are not 0 have a product
    /// below 2^64, so that the product of any of its dims can be told.
    pub fn new(dims: &[u64], strides: &[u64]) -> Result<Layout, LayoutError> {
        if dims.len() > MAX_RANK {
            return Err(LayoutError::Rank { rank: dims.len() });
        }
        if dims.len() != strides.len() {
            return Err(LayoutError::StrideCount { dims: dims.len(), strides: strides.len() });
        }
        let mut layout = Layout { rank: dims.len() as u8, dims: [0; MAX_RANK], strides: [0; MAX_RANK] };
        layout.dims[..dims.len()].copy_from_slice(dims);
        layout.strides[..dims.len()].copy_from_slice(strides);
        let is_empty = dims.contains(&0);
        let limit = 1u128 << 63;
        let most_elements = if is_empty { u128::from(u64::MAX) } else { limit };
        let mut last = 0u128;
        let mut elements = 1u128;
        for (&dim, &stride) in dims.iter().zip(strides) {
            // An empty tensor has no last element.
            last += if is_empty { 0 } else { u128::from(dim - 1) * u128::from(stride) };
            elements = elements.saturating_mul(u128::from(dim.max(1)));
            if last >= limit || elements > most_elements {
                return Err(LayoutError::TooLarge { dims: dims.to_vec(), strides: strides.to_vec() });
            }
        }
        Ok(layout)
    }

    /// The packed layout whose last dim has stride 1.
    ///
    /// # Errors
    /// As [`Layout::new`].
    pub fn row_major(dims: &[u64]) -> Result<Layout, LayoutError> {
        let order: Vec<usize> = (0..dims.len()).collect();
        Layout::with_order(dims, &order)
    }

    /// The packed layout in which `order` lists the dims from the slowest to the fastest (the last one listed has stride 1).
    ///
    /// # Errors
    /// As [`Layout::new`], and an order that does not name each dim once.
    pub fn with_order(dims: &[u64], order: &[usize]) -> Result<Layout, LayoutError> {
        if dims.len() > MAX_RANK {
            return Err(LayoutError::Rank { rank: dims.len() });
        }
        check_order(order, dims.len())?;
        let mut strides = [0u64; MAX_RANK];
        let mut stride = 1u64;
        for &dim in order.iter().rev() {
            strides[dim] = stride;
            // A dim of 0 empties the tensor; the strides stay those of dim 1, so that they remain legal numbers.
            stride =
                stride.checked_mul(dims[dim].max(1)).ok_or_else(|| LayoutError::TooLarge { dims: dims.to_vec(), strides: Vec::new() })?;
        }
        Layout::new(dims, &strides[..dims.len()])
    }

    /// The layout of a scalar: no dims, one element.
    pub const fn scalar() -> Layout {
        Layout { rank: 0, dims: [0; MAX_RANK], strides: [0; MAX_RANK] }
    }

    /// Number of dims.
    #[inline]
    pub const fn rank(&self) -> usize {
        self.rank as usize
    }

    /// The extents, in elements.
    #[inline]
    pub fn dims(&self) -> &[u64] {
        &self.dims[..self.rank()]
    }

    /// The strides, in elements.
    #[inline]
    pub fn strides(&self) -> &[u64] {
        &self.strides[..self.rank()]
    }

    /// Number of index tuples: the product of the dims (1 without dims).
    #[inline]
    pub fn elements(&self) -> u64 {
        self.dims().iter().product()
    }

    /// Whether a dim is 0.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.dims().contains(&0)
    }

    /// Elements from the first to the last one, both included: what a buffer must hold. 0 if empty.
    #[inline]
    pub fn span_elements(&self) -> u64 {
        if self.is_empty() {
            return 0;
        }
        1 + self.dims().iter().zip(self.strides()).map(|(dim, stride)| (dim - 1) * stride).sum::<u64>()
    }

    /// [`Layout::span_elements`] in bytes. `u128`, since 2^63 elements of 8 bytes do not fit 64 bits.
    #[inline]
    pub fn span_bytes(&self, dtype: DType) -> u128 {
        u128::from(self.span_elements()) * dtype.bytes() as u128
    }

    /// The offset of an element from the first one. `None` if the index has another rank or leaves a dim.
    #[inline]
    pub fn offset(&self, index: &[u64]) -> Option<u64> {
        if index.len() != self.rank() {
            return None;
        }
        let mut offset = 0;
        for ((&i, &dim), &stride) in index.iter().zip(self.dims()).zip(self.strides()) {
            if i >= dim {
                return None;
            }
            offset += i * stride;
        }
        Some(offset)
    }

    /// The offset of the element that stands at `position` when the indices are counted row-major (the last dim fastest).
    /// `None` at or past [`Layout::elements`].
    #[inline]
    pub fn offset_of_position(&self, position: u64) -> Option<u64> {
        if position >= self.elements() {
            return None;
        }
        let mut rest = position;
        let mut offset = 0;
        for (&dim, &stride) in self.dims().iter().zip(self.strides()).rev() {
            offset += rest % dim * stride;
            rest /= dim;
        }
        Some(offset)
    }

    /// Whether the elements lie packed in row-major order. Strides of dims of extent 1 do not matter; an empty layout counts.
    pub fn is_row_major(&self) -> bool {
        let mut expected = 1;
        for (&dim, &stride) in self.dims().iter().zip(self.strides()).rev() {
            if dim != 1 && stride != expected {
                return self.is_empty();
            }
            expected *= dim.max(1);
        }
        true
    }

    /// Whether the elements fill their span without gap or overlap, in whatever order.
    pub fn is_packed(&self) -> bool {
        self.is_empty() || (!self.may_overlap() && self.span_elements() == self.elements())
    }

    /// Whether some dim of extent above 1 has stride 0.
    pub fn is_broadcast(&self) -> bool {
        self.dims().iter().zip(self.strides()).any(|(&dim, &stride)| dim > 1 && stride == 0)
    }

    /// Whether two indices might name one element. `false` is a proof: sorted by stride, each dim steps past everything that the
    /// faster ones span. `true` may be a false alarm for interleaved strides that happen not to collide.
    pub fn may_overlap(&self) -> bool {
        if self.is_empty() {
            return false;
        }
        let mut steps: Vec<(u64, u64)> = (self.dims().iter().copied())
            .zip(self.strides().iter().copied())
            .filter(|&(dim, _)| dim > 1)
            .map(|(dim, stride)| (stride, dim))
            .collect();
        steps.sort_unstable();
        let mut span = 1;
        for (stride, dim) in steps {
            if stride < span {
                return true;
            }
            span += (dim - 1) * stride;
        }
        false
    }

    /// The largest power of two, in elements, that divides every stride other than those of `dim` and of dims of extent 1: vectors
    /// of that width along `dim` start aligned on every row if the first element is so aligned. 2^63 where no other stride counts.
    pub fn row_alignment_elements(&self, dim: usize) -> u64 {
        let strides = self.dims().iter().zip(self.strides()).enumerate();
        let bits = strides.filter(|&(i, (&extent, _))| i != dim && extent > 1).fold(0, |bits, (_, (_, &stride))| bits | stride);
        if bits == 0 { 1 << 63 } else { 1 << bits.trailing_zeros() }
    }

    /// The same elements seen with other dims: a new leading dim, or a dim of 1 that grows, gets stride 0.
    ///
    /// # Errors
    /// A dim that is neither equal nor 1, or too many dims.
    pub fn broadcast_to(&self, dims: &[u64]) -> Result<Layout, LayoutError> {
        let mismatch = || LayoutError::Broadcast { from: self.dims().to_vec(), to: dims.to_vec() };
        let new = dims.len().checked_sub(self.rank()).ok_or_else(mismatch)?;
        let mut strides = vec![0; dims.len()];
        for i in 0..self.rank() {
            if self.dims[i] == dims[new + i] {
                strides[new + i] = self.strides[i];
            } else if self.dims[i] != 1 {
                return Err(mismatch());
            }
        }
        Layout::new(dims, &strides)
    }

    /// The same elements with the dims in another order: dim `i` of the result is dim `order[i]` of this layout.
    ///
    /// # Errors
    /// An order that does not name each dim once.
    pub fn permuted(&self, order: &[usize]) -> Result<Layout, LayoutError> {
        check_order(order, self.rank())?;
        let dims: Vec<u64> = order.iter().map(|&i| self.dims[i]).collect();
        let strides: Vec<u64> = order.iter().map(|&i| self.strides[i]).collect();
        Layout::new(&dims, &strides)
    }
}

fn check_order(order: &[usize], rank: usize) -> Result<(), LayoutError> {
    let mut seen = [false; MAX_RANK];
    let mut legal = order.len() == rank;
    for &dim in order {
        legal &= dim < rank && !std::mem::replace(&mut seen[dim.min(MAX_RANK - 1)], true);
    }
    if legal { Ok(()) } else { Err(LayoutError::Order { order: order.to_vec(), rank }) }
}

/// Whether two byte ranges share a byte. Each is (address of the first byte, length); an empty range shares none.
pub fn ranges_overlap(a: (u64, u128), b: (u64, u128)) -> bool {
    let (a_begin, b_begin) = (u128::from(a.0), u128::from(b.0));
    a.1 > 0 && b.1 > 0 && a_begin < b_begin + b.1 && b_begin < a_begin + a.1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_tensor_may_not_have_dims_whose_product_overflows() {
        // Found by fuzzing: the product of the dims went beyond 64 bits before it came to the 0.
        for dims in [[u64::MAX, 9, 0], [0, u64::MAX, 9], [1 << 32, 0, 1 << 32]] {
            assert!(matches!(Layout::new(&dims, &[9, 1, 18]), Err(LayoutError::TooLarge { .. })), "{dims:?}");
            assert!(matches!(Layout::row_major(&dims), Err(LayoutError::TooLarge { .. })), "{dims:?}");
        }
        // Strides of an empty tensor lead nowhere, however long.
        let empty = Layout::new(&[1 << 31, 1 << 32, 0], &[u64::MAX, 1, u64::MAX]).unwrap();
        assert_eq!((empty.elements(), empty.span_elements()), (0, 0));
    }

    #[test]
    fn packed_orders() {
        let rows = Layout::row_major(&[2, 3, 4]).unwrap();
        assert_eq!(rows.strides(), [12, 4, 1]);
        assert!(rows.is_row_major() && rows.is_packed() && !rows.may_overlap());
        // NHWC: dims n, c, h, w stored in order n, h, w, c.
        let nhwc = Layout::with_order(&[2, 5, 3, 4], &[0, 2, 3, 1]).unwrap();
        assert_eq!(nhwc.strides(), [60, 1, 20, 5]);
        assert!(nhwc.is_packed() && !nhwc.is_row_major());
        assert_eq!(nhwc.permuted(&[0, 2, 3, 1]).unwrap(), Layout::row_major(&[2, 3, 4, 5]).unwrap());
    }

    #[test]
    fn spans_and_offsets() {
        let padded = Layout::new(&[3, 4], &[7, 1]).unwrap();
        assert_eq!((padded.elements(), padded.span_elements()), (12, 18));
        assert_eq!(padded.span_bytes(DType::Bf16), 36);
        assert!(!padded.is_packed());
        assert_eq!(padded.offset(&[2, 3]), Some(17));
        assert_eq!(padded.offset(&[3, 0]), None);
        assert_eq!(padded.offset(&[0]), None);
        let by_position: Vec<u64> = (0..12).map(|i| padded.offset_of_position(i).unwrap()).collect();
        let mut by_index = Vec::new();
        for i in 0..3 {
            for j in 0..4 {
                by_index.push(padded.offset(&[i, j]).unwrap());
            }
        }
        assert_eq!(by_position, by_index);
        assert_eq!(padded.offset_of_position(12), None);

        let empty = Layout::row_major(&[3, 0, 2]).unwrap();
        assert_eq!((empty.elements(), empty.span_elements()), (0, 0));
        assert_eq!(Layout::scalar().elements(), 1);
        assert_eq!(Layout::scalar().offset(&[]), Some(0));
    }

    #[test]
    fn broadcasting() {
        let bias = Layout::row_major(&[5]).unwrap();
        let wide = bias.broadcast_to(&[3, 4, 5]).unwrap();
        assert_eq!(wide.strides(), [0, 0, 1]);
        assert!(wide.is_broadcast() && wide.may_overlap());
        assert_eq!(wide.span_elements(), 5);
        let column = Layout::row_major(&[4, 1]).unwrap().broadcast_to(&[4, 6]).unwrap();
        assert_eq!(column.strides(), [1, 0]);
        assert!(matches!(bias.broadcast_to(&[3, 4]), Err(LayoutError::Broadcast { .. })));
        assert!(matches!(wide.broadcast_to(&[5]), Err(LayoutError::Broadcast { .. })));
    }

    #[test]
    fn overlap_agrees_with_enumeration_whenever_it_says_no() {
        for d0 in 1..4u64 {
            for d1 in 1..4u64 {
                for s0 in 0..6u64 {
                    for s1 in 0..6u64 {
                        let layout = Layout::new(&[d0, d1], &[s0, s1]).unwrap();
                        let mut offsets: Vec<u64> = (0..d0 * d1).map(|i| layout.offset_of_position(i).unwrap()).collect();
                        assert_eq!(offsets.iter().max().unwrap() + 1, layout.span_elements());
                        offsets.sort_unstable();
                        offsets.dedup();
                        let collides = offsets.len() as u64 != d0 * d1;
                        assert!(!collides || layout.may_overlap(), "{layout}");
                    }
                }
            }
        }
        // Distinct, yet not nested: the documented false alarm.
        assert!(Layout::new(&[3, 2], &[2, 3]).unwrap().may_overlap());
    }

    #[test]
    fn alignment_of_rows() {
        let layout = Layout::new(&[9, 64, 32], &[4096 + 8, 48, 1]).unwrap();
        assert_eq!(layout.row_alignment_elements(2), 8);
        let one_row = Layout::new(&[1, 1, 32], &[3, 5, 1]).unwrap();
        assert_eq!(one_row.row_alignment_elements(2), 1 << 63);
    }

    #[test]
    fn refusals() {
        assert_eq!(Layout::row_major(&[1; 9]), Err(LayoutError::Rank { rank: 9 }));
        assert_eq!(Layout::new(&[1, 2], &[1]), Err(LayoutError::StrideCount { dims: 2, strides: 1 }));
        assert!(matches!(Layout::with_order(&[1, 2], &[1, 1]), Err(LayoutError::Order { .. })));
        assert!(matches!(Layout::with_order(&[1, 2], &[0, 9]), Err(LayoutError::Order { .. })));
        assert!(matches!(Layout::row_major(&[1 << 40, 1 << 40]), Err(LayoutError::TooLarge { .. })));
        assert!(matches!(Layout::new(&[3, u64::MAX], &[u64::MAX, 2]), Err(LayoutError::TooLarge { .. })));
        assert!(matches!(Layout::new(&[1 << 40, 1 << 40], &[0, 0]), Err(LayoutError::TooLarge { .. })));
        // An empty tensor may have any strides.
        assert!(Layout::new(&[0, u64::MAX], &[u64::MAX, u64::MAX]).is_ok());
    }

    #[test]
    fn serde_checks_what_it_reads() {
        let layout = Layout::new(&[3, 4], &[7, 1]).unwrap();
        let json = serde_json::to_string(&layout).unwrap();
        assert_eq!(json, r#"{"dims":[3,4],"strides":[7,1]}"#);
        assert_eq!(serde_json::from_str::<Layout>(&json).unwrap(), layout);
        assert!(serde_json::from_str::<Layout>(r#"{"dims":[3,4],"strides":[7]}"#).is_err());
    }

    #[test]
    fn byte_ranges() {
        assert!(ranges_overlap((0, 10), (9, 1)));
        assert!(!ranges_overlap((0, 10), (10, 1)));
        assert!(!ranges_overlap((5, 0), (0, 100)));
    }
}
