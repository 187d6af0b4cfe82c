//! The description of one tensor of a graph.

use std::fmt;

use serde::{Deserialize, Serialize};
use verdigris_tensor::{DType, Layout};

/// The caller's name for a tensor: unique within a graph, and what pointers are bound to at execution.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Uid(pub i64);

impl fmt::Display for Uid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// One tensor: what it holds and where its elements lie.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorDesc {
    /// Unique within the graph.
    pub uid: Uid,
    /// For people: error messages and `inspect`. No part of any fingerprint.
    pub name: String,
    /// The element type. The value of a tensor is what this type holds, for a virtual tensor too.
    pub dtype: DType,
    /// Dims and strides in elements.
    pub layout: Layout,
    /// What the address of its first element is a multiple of at every execution, in bytes: a power of two, not below the element's size.
    /// Without it, the way that is chosen may ask for any; what it asks for is checked at execution.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alignment_bytes: Option<u64>,
    /// Never stored: exists between the ops of one problem only.
    #[serde(default, rename = "virtual", skip_serializing_if = "is_false")]
    pub is_virtual: bool,
    /// One element, bound by value from the host at execution and not by a device pointer.
    #[serde(default, skip_serializing_if = "is_false")]
    pub by_value: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's skip_serializing_if passes a reference")]
fn is_false(flag: &bool) -> bool {
    !flag
}

impl TensorDesc {
    /// A stored tensor.
    pub fn new(uid: Uid, name: &str, dtype: DType, layout: Layout) -> TensorDesc {
        TensorDesc { uid, name: name.to_owned(), dtype, layout, alignment_bytes: None, is_virtual: false, by_value: false }
    }

    /// A scalar that the host passes by value.
    pub fn host_scalar(uid: Uid, name: &str, dtype: DType) -> TensorDesc {
        TensorDesc { by_value: true, ..TensorDesc::new(uid, name, dtype, Layout::scalar()) }
    }
}
