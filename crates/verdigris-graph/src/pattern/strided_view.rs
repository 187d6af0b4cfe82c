//! Tensors that are strided views of a buffer, perhaps another tensor's.

use verdigris_tensor::{DType, Layout, MAX_RANK};

use crate::op::Op;
use crate::ops::movement::Movement;
use crate::problem::{Slot, View};
use crate::tensor::{TensorDesc, Uid};

/// Where the elements of a tensor lie in a buffer, perhaps another tensor's.
#[derive(Clone, Debug)]
pub(super) struct StridedView {
    /// What the buffer is bound to.
    pub(super) uid: Uid,
    /// The element type.
    pub(super) dtype: DType,
    /// Elements before the first.
    pub(super) offset: u64,
    /// Extents.
    pub(super) dims: Vec<u64>,
    /// Elements from one index to the next.
    pub(super) strides: Vec<u64>,
}

impl StridedView {
    /// A tensor in its own buffer.
    pub(super) fn own(tensor: &TensorDesc) -> StridedView {
        StridedView {
            uid: tensor.uid,
            dtype: tensor.dtype,
            offset: 0,
            dims: tensor.layout.dims().to_vec(),
            strides: tensor.layout.strides().to_vec(),
        }
    }

    /// The elements as a tensor, where they begin where the buffer does.
    pub(super) fn as_tensor(&self, name: &str) -> Option<TensorDesc> {
        let layout = Layout::new(&self.dims, &self.strides).ok()?;
        (self.offset == 0).then(|| TensorDesc::new(self.uid, name, self.dtype, layout))
    }

    /// The elements broadcast, from the right, to `dims`.
    pub(super) fn over(&self, dims: &[u64], slot: Slot) -> View {
        let new = dims.len().saturating_sub(self.dims.len());
        let strides = (0..dims.len())
            .map(|i| match i.checked_sub(new) {
                // Nothing is read along an empty dim; a stride of 0 would tell that it is repeated.
                Some(i) if self.dims[i] == 0 => self.strides[i].max(1),
                Some(i) if self.dims[i] != 1 => self.strides[i],
                _ => 0,
            })
            .collect();
        View { slot, dtype: self.dtype, offset: self.offset, strides }
    }

    /// The result of a movement of these elements, if strides can say it. `dims` are those of the result.
    pub(super) fn moved(&self, movement: &Movement, dims: &[u64]) -> Option<StridedView> {
        let with =
            |offset: u64, strides: Vec<u64>| Some(StridedView { uid: self.uid, dtype: self.dtype, offset, dims: dims.to_vec(), strides });
        match movement {
            Movement::Transpose { permutation, .. } => {
                with(self.offset, permutation.iter().map(|&dim| self.strides[dim as usize]).collect())
            }
            Movement::Slice { starts, steps, .. } => {
                let mut offset = self.offset;
                let mut strides = Vec::new();
                for (i, (&start, &step)) in starts.iter().zip(steps).enumerate() {
                    // Of an empty slice nothing is read, and its start may lie behind the end.
                    if !dims.contains(&0) {
                        offset = offset.checked_add(start.checked_mul(self.strides[i])?)?;
                    }
                    strides.push(if dims[i] <= 1 { 0 } else { self.strides[i].checked_mul(step)? });
                }
                with(offset, strides)
            }
            Movement::Broadcast { .. } => with(self.offset, self.over(dims, Slot(0)).strides),
            Movement::Reshape { .. } => with(self.offset, reshaped(&self.dims, &self.strides, dims)?),
            Movement::Concat { .. } | Movement::Pad { .. } => None,
        }
    }
}

/// The strides with which elements of `dims` and `strides`, taken in row-major order, have the dims `new`; `None` if there are none.
pub(super) fn reshaped(dims: &[u64], strides: &[u64], new: &[u64]) -> Option<Vec<u64>> {
    if new.len() > MAX_RANK {
        return None;
    }
    if dims.contains(&0) {
        return Some(vec![0; new.len()]);
    }
    // Old dims merged as far as their strides allow, outermost first.
    let mut merged: Vec<(u64, u64)> = Vec::new();
    for (&dim, &stride) in dims.iter().zip(strides).filter(|(dim, _)| **dim != 1) {
        match merged.last_mut() {
            Some((extent, outer)) if stride.checked_mul(dim) == Some(*outer) => {
                *extent *= dim;
                *outer = stride;
            }
            _ => merged.push((dim, stride)),
        }
    }
    // New dims are split off from the right end of the merged ones.
    let mut result = vec![0; new.len()];
    let mut rest = merged.pop();
    for (i, &dim) in new.iter().enumerate().rev() {
        if dim == 1 {
            continue;
        }
        if rest.is_none_or(|(extent, _)| extent == 1) {
            rest = merged.pop();
        }
        let (extent, stride) = rest?;
        if extent % dim != 0 {
            return None;
        }
        result[i] = stride;
        rest = Some((extent / dim, stride.checked_mul(dim)?));
    }
    Some(result)
}

/// The tensors that a movement reads, in order.
pub(super) fn sources(op: &Op) -> Vec<Uid> {
    if let Op::Movement(_) = op { op.inputs() } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stride of 0 tells that a dim is repeated, which an empty one is not.
    #[test]
    fn empty_dims_are_not_repeated() {
        for strides in [[0, 0, 0], [5, 0, 1], [0, 9, 1]] {
            let view = StridedView { uid: Uid(0), dtype: DType::F32, offset: 0, dims: vec![1, 0, 5], strides: strides.to_vec() };
            let over = view.over(&[2, 3, 0, 5], Slot(0)).strides;
            assert_eq!(over, [0, 0, strides[1].max(1), strides[2]]);
        }
    }

    #[test]
    fn reshapes_are_seen_where_strides_can_say_them() {
        assert_eq!(reshaped(&[6, 4], &[4, 1], &[3, 8]), Some(vec![8, 1]));
        assert_eq!(reshaped(&[6, 4], &[8, 1], &[3, 2, 4]), Some(vec![16, 8, 1]));
        assert_eq!(reshaped(&[6, 4], &[8, 1], &[24]), None);
        assert_eq!(reshaped(&[6, 4], &[1, 6], &[2, 3, 2, 2]), Some(vec![3, 1, 12, 6]));
        assert_eq!(reshaped(&[6, 4], &[4, 1], &[1, 24, 1]), Some(vec![0, 1, 0]));
        assert_eq!(reshaped(&[4, 6], &[0, 1], &[2, 2, 6]), Some(vec![0, 0, 1]));
        assert_eq!(reshaped(&[1, 1], &[5, 7], &[1]), Some(vec![0]));
        assert_eq!(reshaped(&[0, 3], &[3, 1], &[3, 0]), Some(vec![0, 0]));
        assert_eq!(reshaped(&[6, 4], &[4, 1], &[4, 6]), Some(vec![6, 1]));
    }
}
