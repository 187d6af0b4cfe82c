//! Operands of an epilogue's or a prologue's steps: how they lie, and their parameters.

use serde::{Deserialize, Serialize};
use verdigris_graph::{Channels, Matrix, Slot, Tensor, View};
use verdigris_kir::face::Val;
use verdigris_kir::program::Address;
use verdigris_tensor::DType;

use super::steps::{OperandWord, Role};
use crate::layout::batch::{BatchStridesBytes, Chunk, DIMS};
use crate::layout::space::{Access, Memory};

/// How an operand runs along the innermost index: columns, channels, the last dim of a space.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Walk {
    /// Neighbours are neighbouring elements.
    Row,
    /// One element serves all.
    PerRow,
    /// By a stride.
    Strided,
}

impl Walk {
    /// That of a stride.
    pub(crate) fn of(stride: u64) -> Walk {
        match stride {
            1 => Walk::Row,
            0 => Walk::PerRow,
            _ => Walk::Strided,
        }
    }
}

/// An operand, as far as it shapes code.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct OperandSpec {
    /// Element type.
    pub dtype: DType,
    /// How it lies; rows have strides of their own (0 for a bias over columns).
    pub walk: Walk,
}

impl OperandSpec {
    /// The class that serves any strides.
    pub fn strided(dtype: DType) -> OperandSpec {
        OperandSpec { dtype, walk: Walk::Strided }
    }
}

impl OperandWord for OperandSpec {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn word(&self, written: bool) -> String {
        let walk = match self.walk {
            Walk::Row => "",
            Walk::PerRow => "p",
            Walk::Strided => "s",
        };
        format!("{}{}{walk}", if written { "aux" } else { "" }, self.dtype)
    }
}

/// What operands are, and with that how many strides their rows have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Layout {
    /// Matrices in a batch: a row has one stride.
    Matrices,
    /// Tensors: rows are pixels, which have four strides, of the first dim and the three spatial ones; the second dim (channels) is the columns.
    Tensors,
    /// Vectors over channels.
    Channels,
    /// Views over a space of so many dims, all of which are rows'.
    Space(usize),
}

/// Where an operand of a problem lies; strides in elements.
#[derive(Clone, Debug)]
pub(super) struct Strides {
    slot: Slot,
    dtype: DType,
    rows: Vec<u64>,
    columns: u64,
    batch: Vec<u64>,
    /// Where a launch begins, and its strides over the batch in bytes, if it has one.
    first: Address,
    launch_batch: Option<[u64; DIMS]>,
}

impl Strides {
    fn new(slot: Slot, dtype: DType, rows: Vec<u64>, columns: u64) -> Strides {
        let first = Address::buffer(slot.0 as usize);
        Strides { slot, dtype, rows, columns, batch: Vec::new(), first, launch_batch: None }
    }

    pub(super) fn spec(&self) -> OperandSpec {
        OperandSpec { dtype: self.dtype, walk: Walk::of(self.columns) }
    }

    /// Of a launch that begins elsewhere than the buffer does.
    pub(super) fn at(self, first: Address) -> Strides {
        Strides { first, ..self }
    }

    /// Of a launch over a part of a batch, from `(row, column)` of its matrices on.
    pub(super) fn of_part(matrix: &Matrix, chunk: &Chunk, row: u64, column: u64) -> Strides {
        let launch_batch = Some(chunk.strides_bytes(matrix));
        Strides { launch_batch, ..Strides::from(matrix).at(chunk.address(matrix, row, column)) }
    }

    /// The same without the strides of the last dim of a space, along which neighbours are taken together.
    pub(super) fn of_lines(mut self) -> Strides {
        self.columns = self.rows.pop().unwrap_or(1);
        self
    }

    /// Whether two neighbouring columns, of which the first is even, are one access, provided that the buffer is aligned to two elements.
    pub(super) fn takes_pairs(&self) -> bool {
        match self.spec().walk {
            Walk::Row => self.rows.iter().chain(&self.batch).all(|stride| stride.is_multiple_of(2)),
            // One element for two columns: no pair access.
            Walk::PerRow => true,
            Walk::Strided => false,
        }
    }

    /// The slot of the buffer.
    pub(super) fn slot(&self) -> Slot {
        self.slot
    }

    /// What a launch gives where the spec says `spec`.
    pub(super) fn arguments(&self, spec: OperandSpec) -> OperandArgs {
        let bytes = self.dtype.bytes() as u64;
        OperandArgs {
            operand: Some(self.first),
            number: None,
            row_strides: self.rows.iter().map(|stride| stride * bytes).collect(),
            column_stride: (spec.walk == Walk::Strided).then_some(self.columns * bytes),
            batch: self.launch_batch,
        }
    }

    /// The same of what counts elements, each of which is one byte to the strides.
    pub(super) fn counts(&self, spec: OperandSpec) -> OperandArgs {
        OperandArgs { operand: None, number: Some(self.first.offset_bytes), ..self.arguments(spec) }
    }

    /// The slot, and the bytes that `many` elements take.
    pub(super) fn alignment(&self, many: u64) -> (Slot, u64) {
        (self.slot, many * self.dtype.bytes() as u64)
    }
}

impl From<&Matrix> for Strides {
    fn from(matrix: &Matrix) -> Strides {
        let Matrix { slot, dtype, row_stride, column_stride, ref batch_strides } = *matrix;
        Strides { batch: batch_strides.clone(), ..Strides::new(slot, dtype, vec![row_stride], column_stride) }
    }
}

impl From<&Tensor> for Strides {
    fn from(tensor: &Tensor) -> Strides {
        let [first, channel, depth, height, width] = tensor.strides;
        Strides::new(tensor.slot, tensor.dtype, vec![first, depth, height, width], channel)
    }
}

impl From<&Channels> for Strides {
    fn from(vector: &Channels) -> Strides {
        Strides::new(vector.slot, vector.dtype, Vec::new(), vector.stride)
    }
}

impl From<&View> for Strides {
    fn from(view: &View) -> Strides {
        Strides::new(view.slot, view.dtype, view.strides.clone(), 0)
    }
}

/// What the parameters of one operand are made from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OperandDecl {
    pub(super) spec: OperandSpec,
    pub(super) layout: Layout,
    /// Elements that one access takes where neighbours are neighbouring elements.
    pub(super) together: u32,
    pub(super) is: Role,
}

verdigris_kir::parameters! {
    /// Parameters of one operand; strides in bytes. What is read may also be D's buffer, so loads never take the read-only path.
    #[derive(Clone, Debug)]
    pub(crate) struct Operand / #[derive(Clone, Debug)] OperandArgs of OperandDecl as decl {
        pub(super) operand: Option<Memory> =
            (decl.is != Role::Counted).then(|| Access { written: decl.is == Role::Written, bytes: decl.alignment_bytes() }),
        /// The number of the first element, of what only counts.
        pub(super) number: Option<u64> = (decl.is == Role::Counted).then_some(()),
        pub(super) row_strides: Vec<u64> = vec![(); decl.row_strides()],
        pub(super) column_stride: Option<u64> = (decl.spec.walk == Walk::Strided).then_some(()),
        pub(super) batch: Option<BatchStridesBytes> = (decl.layout == Layout::Matrices).then_some(()),
    }
}

impl<'k> Operand<'k> {
    /// The address of the first element, or its number.
    pub(super) fn start(&self) -> Val<'k, u64> {
        match (self.operand, self.number) {
            (Some(operand), _) => operand.address(),
            (None, Some(number)) => number,
            (None, None) => unreachable!("an operand is in memory, or counts"),
        }
    }
}

impl OperandDecl {
    /// What one access takes.
    fn alignment_bytes(&self) -> u32 {
        let many = if self.spec.walk == Walk::Row { self.together } else { 1 };
        // Beyond 16 bytes, several accesses.
        (many * self.spec.dtype.bytes() as u32).min(16)
    }

    fn row_strides(&self) -> usize {
        match self.layout {
            Layout::Matrices => 1,
            Layout::Tensors => 4,
            Layout::Channels => 0,
            Layout::Space(rank) => rank,
        }
    }
}
