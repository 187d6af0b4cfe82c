//! Matrices and stacks of them: operands of products, by strides.

use serde::{Deserialize, Serialize};
use verdigris_tensor::{DType, Layout, LayoutError};

use crate::problem::Slot;

/// Which index of a matrix runs through neighbouring elements.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Order {
    /// The column index: `column_stride` is 1.
    RowMajor,
    /// The row index: `row_stride` is 1.
    ColumnMajor,
    /// Neither.
    Strided,
}

/// A matrix, or a stack of them: where element `(batch, row, column)` of a buffer lies.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Matrix {
    /// The buffer.
    pub slot: Slot,
    /// Its element type.
    pub dtype: DType,
    /// Elements from one row to the next; 0 repeats one row.
    pub row_stride: u64,
    /// Elements from one column to the next; 0 repeats one column.
    pub column_stride: u64,
    /// Elements from one matrix to the next, one for each of the problem's batch dims; 0 repeats one matrix.
    pub batch_strides: Vec<u64>,
}

impl Matrix {
    /// A single packed matrix of `columns` columns, row-major.
    pub fn row_major(slot: Slot, dtype: DType, columns: u64) -> Matrix {
        Matrix::with_leading_dimension(slot, dtype, Order::RowMajor, columns)
    }

    /// A single matrix whose rows (columns, if column-major) begin `leading` elements apart. [`Order::Strided`] is taken as row-major
    /// here, since one leading dimension cannot describe it.
    pub fn with_leading_dimension(slot: Slot, dtype: DType, order: Order, leading: u64) -> Matrix {
        let (row_stride, column_stride) = match order {
            Order::RowMajor | Order::Strided => (leading, 1),
            Order::ColumnMajor => (1, leading),
        };
        Matrix { slot, dtype, row_stride, column_stride, batch_strides: Vec::new() }
    }

    /// Which index is contiguous. A canonical matrix of one row or one column is row-major where it can be.
    pub fn order(&self) -> Order {
        match (self.row_stride, self.column_stride) {
            (_, 1) => Order::RowMajor,
            (1, _) => Order::ColumnMajor,
            _ => Order::Strided,
        }
    }

    /// The stride of the index that is not contiguous: the leading dimension of BLAS. `None` if neither is contiguous.
    pub fn leading_dimension(&self) -> Option<u64> {
        match self.order() {
            Order::RowMajor => Some(self.row_stride),
            Order::ColumnMajor => Some(self.column_stride),
            Order::Strided => None,
        }
    }

    /// Whether every row is the same: one value for each column, as a bias over n has.
    pub fn is_per_column(&self) -> bool {
        self.row_stride == 0 && self.column_stride != 0
    }

    /// Whether every column is the same: one value for each row, as a bias over m has.
    pub fn is_per_row(&self) -> bool {
        self.column_stride == 0 && self.row_stride != 0
    }

    /// Whether one value serves a whole matrix.
    pub fn is_scalar(&self) -> bool {
        self.row_stride == 0 && self.column_stride == 0
    }

    /// The offset of an element, in elements.
    #[inline]
    pub fn offset(&self, batch: &[u64], row: u64, column: u64) -> u64 {
        let base: u64 = batch.iter().zip(&self.batch_strides).map(|(index, stride)| index * stride).sum();
        base + row * self.row_stride + column * self.column_stride
    }

    /// The layout `[batch…, rows, columns]`.
    ///
    /// # Errors
    /// As [`Layout::new`].
    pub fn layout(&self, batch: &[u64], rows: u64, columns: u64) -> Result<Layout, LayoutError> {
        let dims: Vec<u64> = batch.iter().copied().chain([rows, columns]).collect();
        Layout::new(&dims, &self.all_strides())
    }

    /// Those of `[batch…, rows, columns]`.
    pub(crate) fn all_strides(&self) -> Vec<u64> {
        self.batch_strides.iter().copied().chain([self.row_stride, self.column_stride]).collect()
    }

    /// The same matrix read the other way round.
    pub fn transposed(&self) -> Matrix {
        Matrix { row_stride: self.column_stride, column_stride: self.row_stride, ..self.clone() }
    }

    pub(crate) fn normalize_strides(&mut self, rows: u64, columns: u64) {
        // The stride of an index that takes one value decides nothing; fixing it makes equal problems equal and gives every vector
        // an order. A broadcast (0) of extent 1 is no broadcast.
        if columns <= 1 {
            self.column_stride = 1;
            if rows <= 1 {
                self.row_stride = 1;
            }
        } else if rows <= 1 {
            self.row_stride = match self.column_stride {
                1 => columns,
                0 => 0,
                _ => 1,
            };
        }
    }
}
