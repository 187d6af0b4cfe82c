//! Operands that lie over a space by strides, read and written as values of the pointwise language.

use verdigris_graph::View;
use verdigris_kir::face::Val;
use verdigris_kir::inst::CvtRound;
use verdigris_tensor::DType;

use super::compute::Compute;
use super::operand::{Layout, Operand, OperandArgs, OperandDecl, OperandSpec, Strides, Walk};
use super::value::{AnyVal, Raw, load_raw, store_raw};
use crate::layout::space::element;

/// The declaration of an operand over `rank` dims.
pub(crate) fn declaration(dtype: DType, rank: usize, written: bool) -> OperandDecl {
    OperandDecl { spec: OperandSpec { dtype, walk: Walk::PerRow }, layout: Layout::Space(rank), pairs: false, written }
}

/// Those of operands of these types, of which the last `outputs` are written.
pub(crate) fn declarations(types: &[DType], rank: usize, outputs: usize) -> Vec<OperandDecl> {
    types.iter().enumerate().map(|(i, &dtype)| declaration(dtype, rank, i + outputs >= types.len())).collect()
}

/// The argument for an operand from an index on.
pub(crate) fn argument(view: &View, first: &[u64]) -> OperandArgs {
    let strides = Strides::from(view).at(element(view, first.iter().copied()));
    strides.arguments(strides.spec())
}

/// An operand in a kernel, or what is left of one at an index of its first dims.
#[derive(Clone, Debug)]
pub(crate) struct Strided<'k> {
    pub dtype: DType,
    address: Val<'k, u64>,
    strides_bytes: Vec<Val<'k, u64>>,
}

impl<'k> Strided<'k> {
    /// A declared operand.
    #[track_caller]
    pub(crate) fn new(dtype: DType, operand: Operand<'k>) -> Self {
        Strided { dtype, address: operand.operand.address(), strides_bytes: operand.row_strides }
    }

    /// Declared operands of these types.
    #[track_caller]
    pub(crate) fn all(dtypes: &[DType], operands: Vec<Operand<'k>>) -> Vec<Self> {
        dtypes.iter().zip(operands).map(|(&dtype, operand)| Strided::new(dtype, operand)).collect()
    }

    #[track_caller]
    fn address(&self, index: &[Val<'k, u32>]) -> Val<'k, u64> {
        self.strides_bytes.iter().zip(index).fold(self.address, |address, (&stride, &i)| address + i.widen() * stride)
    }

    /// What is left at an index of the first dims.
    #[track_caller]
    pub(crate) fn at(&self, index: &[Val<'k, u32>]) -> Strided<'k> {
        let strides_bytes = self.strides_bytes.iter().skip(index.len()).copied().collect();
        Strided { dtype: self.dtype, address: self.address(index), strides_bytes }
    }

    /// The bits at an index; dims that it leaves out are at 0.
    #[track_caller]
    fn raw(&self, index: &[Val<'k, u32>]) -> Raw<'k> {
        load_raw(self.address.kernel(), self.dtype, self.address(index), 1)[0]
    }

    /// The element at an index; dims that it leaves out are at 0.
    #[track_caller]
    pub(crate) fn load<T: Compute>(&self, index: &[Val<'k, u32>]) -> Val<'k, T> {
        AnyVal::Stored(self.dtype, self.raw(index)).get(self.address.kernel())
    }

    /// The element, of an integer type.
    #[track_caller]
    pub(crate) fn load_integer(&self, index: &[Val<'k, u32>]) -> Val<'k, i64> {
        match self.raw(index) {
            Raw::B8(bits) if self.dtype == DType::I8 => ((bits << 24).signed() >> 24).widen(),
            Raw::B8(bits) => bits.signed().widen(),
            Raw::B16(bits) => bits.convert(CvtRound::None),
            Raw::B32(bits) => bits.signed().widen(),
            Raw::B64(bits) => bits.bitcast(),
        }
    }

    /// Rounds and stores an element.
    #[track_caller]
    pub(crate) fn store(&self, index: &[Val<'k, u32>], value: AnyVal<'k>) {
        let (k, address) = (self.address.kernel(), self.address(index));
        store_raw(k, address, &[value.encoded(k, self.dtype)]);
    }
}
