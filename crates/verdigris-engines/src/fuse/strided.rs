//! Operands that lie over a space by strides, read and written as values of the pointwise language.

use verdigris_graph::View;
use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::inst::CvtRound;
use verdigris_kir::params::{Arguments, Parameter};
use verdigris_kir::program::Address;
use verdigris_tensor::DType;

use super::steps::{AnyVal, Chained, Raw, load_raw, store_raw};
use crate::layout::space::{Access, Memory, element};

/// An operand over a space, by strides: the kernel gets a [`Strided`].
#[derive(Clone, Debug)]
pub(crate) struct Operand {
    first: Address,
    strides_bytes: Vec<u64>,
}

impl Operand {
    /// From an index on.
    pub(crate) fn of(view: &View, first: &[u64]) -> Operand {
        let bytes = view.dtype.bytes() as u64;
        let strides_bytes = view.strides.iter().map(|stride| stride * bytes).collect();
        Operand { first: element(view, first.iter().copied()), strides_bytes }
    }
}

/// What shapes an operand in a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OperandSpec {
    pub dtype: DType,
    /// Dims of the space.
    pub rank: usize,
    pub written: bool,
}

impl OperandSpec {
    /// Operands of these types, of which the last `outputs` are written.
    pub(crate) fn list(types: &[DType], rank: usize, outputs: usize) -> Vec<OperandSpec> {
        types.iter().enumerate().map(|(i, &dtype)| OperandSpec { dtype, rank, written: i + outputs >= types.len() }).collect()
    }

    fn access(&self) -> Access {
        Access { written: self.written, bytes: self.dtype.bytes() as u32 }
    }
}

impl Parameter for Operand {
    type Spec = OperandSpec;
    type Value<'k> = Strided<'k>;
    type Argument = Operand;

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, name: &'static str, spec: &OperandSpec) -> Strided<'k> {
        let address = Memory::declare(k, name, &spec.access()).address();
        Strided { dtype: spec.dtype, address, strides_bytes: Vec::<u64>::declare(k, name, &vec![(); spec.rank]) }
    }

    fn bind(operand: Operand, name: &'static str, spec: &OperandSpec, to: &mut Arguments) {
        Memory::bind(operand.first, name, &spec.access(), to);
        Vec::<u64>::bind(operand.strides_bytes, name, &vec![(); spec.rank], to);
    }
}

/// An operand in a kernel, or what is left of one at an index of its first dims.
#[derive(Clone, Debug)]
pub(crate) struct Strided<'k> {
    pub dtype: DType,
    address: Val<'k, u64>,
    strides_bytes: Vec<Val<'k, u64>>,
}

impl<'k> Strided<'k> {
    fn address(&self, index: &[Val<'k, u32>]) -> Val<'k, u64> {
        self.strides_bytes.iter().zip(index).fold(self.address, |address, (&stride, &i)| address + i.widen() * stride)
    }

    /// What is left at an index of the first dims.
    pub(crate) fn at(&self, index: &[Val<'k, u32>]) -> Strided<'k> {
        let strides_bytes = self.strides_bytes.iter().skip(index.len()).copied().collect();
        Strided { dtype: self.dtype, address: self.address(index), strides_bytes }
    }

    /// The bits at an index; dims that it leaves out are at 0.
    fn raw(&self, index: &[Val<'k, u32>]) -> Raw<'k> {
        load_raw(self.address.kernel(), self.dtype, self.address(index), 1)[0]
    }

    /// The element at an index; dims that it leaves out are at 0.
    pub(crate) fn load<T: Chained>(&self, index: &[Val<'k, u32>]) -> Val<'k, T> {
        AnyVal::Stored(self.dtype, self.raw(index)).get(self.address.kernel())
    }

    /// The element, of an integer type.
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
    pub(crate) fn store(&self, index: &[Val<'k, u32>], value: AnyVal<'k>) {
        let (k, address) = (self.address.kernel(), self.address(index));
        store_raw(k, address, &[value.encoded(k, self.dtype)]);
    }
}
