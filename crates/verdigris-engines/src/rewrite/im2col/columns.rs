//! The order in which taps and channels stand as columns: that of the filter in memory, so that the filter is a matrix of them as it lies.

use verdigris_graph::{ConvProblem, Matrix, Tensor};

use crate::split_k::filter::im2col::PartLayout;

/// The side of the convolution whose few channels become columns, together with the taps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Side {
    /// Channels of x: pixels of y meet them.
    X,
    /// Channels of y: pixels of x meet them.
    Y,
}

impl Side {
    pub(super) const ALL: [Side; 2] = [Side::X, Side::Y];

    /// Which dim of the filter the channels are.
    fn dim(self) -> usize {
        match self {
            Side::X => 1,
            Side::Y => 0,
        }
    }

    pub(super) fn channels(self, p: &ConvProblem) -> u64 {
        match self {
            Side::X => p.c,
            Side::Y => p.k,
        }
    }
}

/// Columns: taps by channels of a side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Columns {
    side: Side,
    /// How many.
    pub(super) count: u64,
    /// Columns from one tap to the next along depth, height, width.
    pub(super) taps: [u64; 3],
    /// Columns from one channel to the next.
    pub(super) channel: u64,
}

impl Columns {
    /// The columns of a filter; `None` where they do not lie at a single stride.
    pub(super) fn of(p: &ConvProblem, side: Side) -> Option<Columns> {
        let extents = p.w_extents();
        let mut dims: Vec<usize> = [side.dim(), 2, 3, 4].into_iter().filter(|&dim| extents[dim] > 1).collect();
        dims.sort_by_key(|&dim| p.w.strides[dim]);
        let unit = dims.first().map_or(1, |&dim| p.w.strides[dim]);
        let (mut count, mut strides) = (1u64, [0; 5]);
        for dim in dims {
            if unit == 0 || p.w.strides[dim] != unit.checked_mul(count)? {
                return None;
            }
            strides[dim] = count;
            count = count.checked_mul(extents[dim])?;
        }
        Some(Columns { side, count, taps: [strides[2], strides[3], strides[4]], channel: strides[side.dim()] })
    }

    /// How a part of a filter's gradient lies: a product's rows by columns, these or channels of the other side.
    pub(super) fn part_layout(&self, p: &ConvProblem) -> PartLayout {
        let (rows, length) = match self.side {
            Side::X => (p.k, self.count),
            Side::Y => (self.count, p.c),
        };
        let pitch = length.next_multiple_of(4);
        let [d, h, w] = self.taps;
        let strides = match self.side {
            Side::X => [pitch, d, h, w, self.channel],
            Side::Y => [self.channel * pitch, d * pitch, h * pitch, w * pitch, 1],
        };
        PartLayout { rows, pitch, strides }
    }

    /// A filter, or what has its dims, as a matrix: channels of the other side by columns. `None` where its columns have no single stride.
    pub(super) fn filter(&self, tensor: &Tensor) -> Option<Matrix> {
        let of_dims = [(self.side.dim(), self.channel), (2, self.taps[0]), (3, self.taps[1]), (4, self.taps[2])];
        let mut found = of_dims.into_iter().filter(|(_, columns)| *columns > 0);
        // One of the dims runs from column to column.
        let unit = found.clone().find(|(_, columns)| *columns == 1).map_or(1, |(dim, _)| tensor.strides[dim]);
        let fits = found.all(|(dim, columns)| unit.checked_mul(columns) == Some(tensor.strides[dim]));
        fits.then(|| Matrix {
            slot: tensor.slot,
            dtype: tensor.dtype,
            row_stride: tensor.strides[1 - self.side.dim()],
            column_stride: unit,
            batch_strides: Vec::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_graph::{ConvExtents, Direction, Slot};
    use verdigris_tensor::DType;

    fn problem() -> ConvProblem {
        let extents = ConvExtents {
            direction: Direction::Fprop,
            n: 1,
            c: 3,
            k: 5,
            groups: 1,
            input: [1, 9, 9],
            filter: [1, 4, 2],
            pads: [0; 3],
            strides: [1; 3],
            dilations: [1; 3],
        };
        ConvProblem::packed(extents, DType::Bf16, DType::Bf16).unwrap()
    }

    #[test]
    fn columns_run_as_the_filter_lies() {
        let last = problem();
        // [k, r, s, c]
        let columns = Columns::of(&last, Side::X).unwrap();
        assert_eq!((columns.count, columns.taps, columns.channel), (24, [0, 6, 3], 1));
        let matrix = columns.filter(&last.w).unwrap();
        assert_eq!((matrix.row_stride, matrix.column_stride), (24, 1));
        let columns = Columns::of(&last, Side::Y).unwrap();
        assert_eq!((columns.count, columns.taps, columns.channel), (40, [0, 2, 1], 8));
        let matrix = columns.filter(&last.w).unwrap();
        assert_eq!((matrix.row_stride, matrix.column_stride), (1, 3));

        let mut first = last.clone();
        first.w = Tensor::channels_first(Slot(1), DType::Bf16, last.w_extents());
        // [k, c, r, s]
        let columns = Columns::of(&first, Side::X).unwrap();
        assert_eq!((columns.count, columns.taps, columns.channel), (24, [0, 2, 1], 8));
        // Between one k and the next there are other channels.
        assert_eq!(Columns::of(&first, Side::Y), None);
        assert!(columns.filter(&last.w).is_none());
    }
}
