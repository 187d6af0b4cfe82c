//! What the tensors of a graph are bound to for one run.

use verdigris_graph::Uid;
use verdigris_graph::binding::{Allowed, Given};

/// Buffers and host scalars by uid. Buffers hold the elements as bytes, from the first element of the tensor on, and may be longer than
/// needed. They need no alignment; `f32` and `f64` data that are aligned are used in place. Bindings in the order of the graph's tensors
/// are found fastest.
#[derive(Debug, Default)]
pub struct Bindings<'a> {
    pub(crate) list: Vec<(Uid, Bound<'a>)>,
}

/// What one tensor is bound to.
#[derive(Debug)]
pub(crate) enum Bound<'a> {
    Read(&'a [u8]),
    Write(&'a mut [u8]),
    Real(f64),
    Integer(i128),
}

impl<'a> Bindings<'a> {
    /// Nothing bound.
    pub fn new() -> Bindings<'a> {
        Bindings::default()
    }

    /// Binds a tensor that the graph reads and does not write.
    pub fn input(&mut self, uid: Uid, bytes: &'a [u8]) -> &mut Bindings<'a> {
        self.list.push((uid, Bound::Read(bytes)));
        self
    }

    /// Binds a tensor that the graph writes. Bytes between its elements are left as they are.
    pub fn output(&mut self, uid: Uid, bytes: &'a mut [u8]) -> &mut Bindings<'a> {
        self.list.push((uid, Bound::Write(bytes)));
        self
    }

    /// Binds a host scalar that is a real number.
    pub fn scalar(&mut self, uid: Uid, value: f64) -> &mut Bindings<'a> {
        self.list.push((uid, Bound::Real(value)));
        self
    }

    /// Binds a host scalar that is an integer, which its type holds.
    pub fn integer(&mut self, uid: Uid, value: impl Into<i128>) -> &mut Bindings<'a> {
        self.list.push((uid, Bound::Integer(value.into())));
        self
    }

    /// A binding as the check sees it.
    pub(crate) fn given(&self, number: usize) -> (Uid, Given) {
        let memory = |bytes: &[u8], access| Given::Memory { address: bytes.as_ptr() as u64, bytes: bytes.len() as u64, access };
        let (uid, bound) = &self.list[number];
        let given = match bound {
            Bound::Read(bytes) => memory(bytes, Allowed::Read),
            Bound::Write(bytes) => memory(bytes, Allowed::Write),
            Bound::Real(_) => Given::Real,
            Bound::Integer(value) => Given::Integer(*value),
        };
        (*uid, given)
    }
}
