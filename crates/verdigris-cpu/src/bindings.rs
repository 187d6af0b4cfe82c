//! What the tensors of a graph are bound to for one run.

use std::collections::BTreeMap;

use verdigris_graph::Uid;

/// Buffers and host scalars by uid. Buffers hold the elements as bytes, from the first element of the tensor on, and may be longer than
/// needed. They need no alignment; `f32` and `f64` data that are aligned are used in place.
#[derive(Debug, Default)]
pub struct Bindings<'a> {
    pub(crate) inputs: BTreeMap<Uid, &'a [u8]>,
    pub(crate) outputs: BTreeMap<Uid, &'a mut [u8]>,
    pub(crate) scalars: BTreeMap<Uid, f64>,
}

impl<'a> Bindings<'a> {
    /// Nothing bound.
    pub fn new() -> Bindings<'a> {
        Bindings::default()
    }

    /// Binds a tensor that the graph reads and does not write.
    pub fn input(&mut self, uid: Uid, bytes: &'a [u8]) -> &mut Bindings<'a> {
        self.inputs.insert(uid, bytes);
        self
    }

    /// Binds a tensor that the graph writes. Bytes between its elements are left as they are.
    pub fn output(&mut self, uid: Uid, bytes: &'a mut [u8]) -> &mut Bindings<'a> {
        self.outputs.insert(uid, bytes);
        self
    }

    /// Binds a host scalar.
    pub fn scalar(&mut self, uid: Uid, value: f64) -> &mut Bindings<'a> {
        self.scalars.insert(uid, value);
        self
    }
}
