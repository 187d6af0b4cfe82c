//! Parameters of an epilogue's or a prologue's steps: numbers from the host, and operands in memory.

use verdigris_kir::face::{Kernel, Pointer, Val};
use verdigris_kir::params::{Arguments, AtExecution, HostNumber, Parameter, Read, Write};
use verdigris_kir::program::Address;

use super::compute::Compute;
use super::epilogue::{OperandSpec, Walk};
use crate::layout::batch::BatchStridesBytes;

/// A number from the host, in the type that an epilogue computes in.
#[derive(Clone, Copy, Debug)]
pub(super) enum HostVal<'k> {
    Single(Val<'k, f32>),
    Double(Val<'k, f64>),
}

impl<'k> HostVal<'k> {
    pub(super) fn get<T: Compute>(self) -> Val<'k, T> {
        match self {
            HostVal::Single(value) => T::from_f32(value),
            HostVal::Double(value) => T::from_f64(value),
        }
    }
}

/// A factor from the host, fixed or given at execution. The spec is whether the epilogue computes in f64.
#[derive(Clone, Copy, Debug)]
pub(super) enum Factor {}

impl Parameter for Factor {
    type Spec = bool;
    type Value<'k> = HostVal<'k>;
    type Argument = HostNumber;

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, name: &'static str, double: &bool) -> HostVal<'k> {
        match double {
            true => HostVal::Double(AtExecution::<f64>::declare(k, name, &())),
            false => HostVal::Single(AtExecution::<f32>::declare(k, name, &())),
        }
    }

    fn bind(argument: HostNumber, name: &'static str, double: &bool, to: &mut Arguments) {
        match double {
            true => AtExecution::<f64>::bind(argument, name, &(), to),
            false => AtExecution::<f32>::bind(argument, name, &(), to),
        }
    }
}

/// An attribute of a function, given in f64. The spec is whether the epilogue computes in f64.
#[derive(Clone, Copy, Debug)]
pub(super) enum Attribute {}

impl Parameter for Attribute {
    type Spec = bool;
    type Value<'k> = HostVal<'k>;
    type Argument = f64;

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, name: &'static str, double: &bool) -> HostVal<'k> {
        let value = f64::declare(k, name, &());
        if *double { HostVal::Double(value) } else { HostVal::Single(f32::from_f64(value)) }
    }

    fn bind(argument: f64, name: &'static str, _: &bool, to: &mut Arguments) {
        f64::bind(argument, name, &(), to);
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Access {
    Read,
    Write,
}

/// What operands are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Layout {
    /// Matrices in a batch: a row has one stride.
    Matrices,
    /// Tensors: rows are pixels, which have four strides, of the first dim and the three spatial ones; the second dim (channels) is the columns.
    Tensors,
    /// Vectors over channels.
    Channels,
}

/// What the parameters of one operand are made from.
#[derive(Clone, Copy, Debug)]
pub(super) struct OperandDecl {
    pub(super) spec: OperandSpec,
    pub(super) layout: Layout,
    pub(super) pairs: bool,
    pub(super) access: Access,
}

/// Memory that is read or written. The spec says which, and the alignment in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Accessed {}

impl Parameter for Accessed {
    type Spec = (Access, u32);
    type Value<'k> = Pointer<'k>;
    type Argument = Address;

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, name: &'static str, (access, alignment_bytes): &(Access, u32)) -> Pointer<'k> {
        // What is read may also be D's buffer, so loads never take the read-only path.
        match access {
            Access::Read => Read::declare(k, name, alignment_bytes),
            Access::Write => Write::declare(k, name, alignment_bytes),
        }
    }

    fn bind(argument: Address, name: &'static str, (_, alignment_bytes): &(Access, u32), to: &mut Arguments) {
        Read::bind(argument, name, alignment_bytes, to);
    }
}

verdigris_kir::parameters! {
    /// Parameters of one operand; strides in bytes.
    #[derive(Clone, Debug)]
    pub(super) struct Operand / #[derive(Clone, Debug)] OperandArgs of OperandDecl as decl {
        pub(super) operand: Accessed = (decl.access, decl.alignment_bytes()),
        pub(super) row_strides: Vec<u64> = vec![(); decl.row_strides()],
        pub(super) column_stride: Option<u64> = (decl.spec.walk == Walk::Strided).then_some(()),
        pub(super) batch: Option<BatchStridesBytes> = (decl.layout == Layout::Matrices).then_some(()),
    }
}

impl OperandDecl {
    /// What one access takes.
    fn alignment_bytes(&self) -> u32 {
        let many = if self.pairs && self.spec.walk == Walk::Row { 2 } else { 1 };
        many * self.spec.dtype.bytes() as u32
    }

    fn row_strides(&self) -> usize {
        match self.layout {
            Layout::Matrices => 1,
            Layout::Tensors => 4,
            Layout::Channels => 0,
        }
    }
}
