//! Why what is bound to a tensor does not suit it: one error for every floor that takes memory of others.

use std::fmt;

/// What is bound to a tensor does not suit it; found before anything runs.
///
/// ```
/// use verdigris_tensor::{BindingError, BindingRule};
///
/// let error = BindingError::new("w", "128 bytes", "100 bytes", BindingRule::Length);
/// assert_eq!(error.to_string(), "`w` is bound to 100 bytes, it needs 128 bytes: memory reaches from the first element to the last");
/// ```
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{name}` is bound to {given}, it needs {wanted}: {rule}")]
pub struct BindingError {
    /// The tensor, as the graph names it; `slot N` where a problem is bound by its slots, `workspace` for what is lent beside them.
    pub name: String,
    /// What it needs.
    pub wanted: String,
    /// What it was given.
    pub given: String,
    /// The rule that was broken.
    pub rule: BindingRule,
}

impl BindingError {
    /// An error from words.
    pub fn new(name: impl Into<String>, wanted: impl Into<String>, given: impl Into<String>, rule: BindingRule) -> BindingError {
        BindingError { name: name.into(), wanted: wanted.into(), given: given.into(), rule }
    }
}

/// The rules of what may be bound.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum BindingRule {
    /// Each tensor is bound.
    Missing,
    /// Nothing else is bound.
    Unknown,
    /// No tensor is bound twice.
    Twice,
    /// A host scalar is bound by value, any other tensor to memory.
    Kind,
    /// A host scalar is a number of the kind that its type holds.
    Number,
    /// What is written is bound to memory that may be written, what is only read to memory that is only read.
    Access,
    /// Type, dims and strides are the graph's.
    Layout,
    /// Memory is as long as the tensor.
    Length,
    /// Memory is somewhere.
    Null,
    /// Memory is on the plan's device.
    Device,
    /// Addresses are multiples of what the plan relies on.
    Alignment,
    /// Outputs share no bytes with other tensors.
    Overlap,
    /// What is written in place of another tensor is bound to its memory.
    InPlace,
    /// The workspace is as large as the ways need that may run.
    Workspace,
}

impl fmt::Display for BindingRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BindingRule::Missing => "each tensor that is read or written is bound",
            BindingRule::Unknown => "the plan has no such tensor to bind",
            BindingRule::Twice => "a tensor is bound once",
            BindingRule::Kind => "a host scalar is bound by value, any other tensor to memory",
            BindingRule::Number => "a host scalar is a number that its type holds",
            BindingRule::Access => "an output is written, an input is only read",
            BindingRule::Layout => "type, dims and strides are the graph's",
            BindingRule::Length => "memory reaches from the first element to the last",
            BindingRule::Null => "memory is not at a null pointer",
            BindingRule::Device => "a tensor is used on the device that made it",
            BindingRule::Alignment => "the plan relies on the alignment",
            BindingRule::Overlap => {
                "an output may only take the place of an input of the same elements that is not read after it is written"
            }
            BindingRule::InPlace => "the op writes in the place of what it reads, and nothing else of it",
            BindingRule::Workspace => "scratch and the tensors between ops lie in it",
        })
    }
}
