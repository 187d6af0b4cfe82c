//! What can be wrong with a request to the CPU device. Always the caller's fault, but for memory that is not there, and always named.

use verdigris_graph::Uid;

/// A graph that cannot be prepared, or bindings that do not fit it.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum Error {
    /// The graph breaks a rule.
    #[error(transparent)]
    Graph(#[from] verdigris_graph::Error),
    /// A tensor larger than this machine's address space.
    #[error("tensor `{tensor}` spans {need_bytes} bytes; this machine addresses {limit_bytes}")]
    TooLarge {
        /// The tensor.
        tensor: String,
        /// What it spans.
        need_bytes: u128,
        /// The most that can be addressed.
        limit_bytes: u64,
    },
    /// Memory that this machine does not give: for a temporary, or for what an op needs while it runs.
    #[error("out of memory: {need_bytes} bytes cannot be had; give the graph smaller tensors, or cut it")]
    OutOfMemory {
        /// What was asked for at once.
        need_bytes: u64,
    },
    /// A stored tensor without a buffer.
    #[error("tensor `{tensor}` ({uid}) is {role}, but no buffer is bound to it{hint}")]
    Unbound {
        /// The tensor.
        tensor: String,
        /// Its uid.
        uid: Uid,
        /// `read` or `written`.
        role: &'static str,
        /// What was bound instead, if anything.
        hint: &'static str,
    },
    /// A host scalar without a value.
    #[error("host scalar `{tensor}` ({uid}) is read, but no value is bound to it")]
    NoScalar {
        /// The scalar.
        tensor: String,
        /// Its uid.
        uid: Uid,
    },
    /// A buffer that ends before its tensor does.
    #[error("tensor `{tensor}` ({uid}) spans {need_bytes} bytes, but its buffer has {have_bytes}")]
    ShortBuffer {
        /// The tensor.
        tensor: String,
        /// Its uid.
        uid: Uid,
        /// Bytes bound.
        have_bytes: u64,
        /// Bytes needed.
        need_bytes: u64,
    },
    /// A binding for a tensor that the graph does not have, or that takes none.
    #[error("a buffer or value is bound to {uid}; {rule}")]
    Stray {
        /// The uid bound.
        uid: Uid,
        /// The rule broken.
        rule: &'static str,
    },
}
