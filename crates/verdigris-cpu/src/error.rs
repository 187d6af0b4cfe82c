//! What can be wrong with a request to the CPU device. Always the caller's fault, but for memory that is not there, and always named.

use verdigris_tensor::BindingError;

/// A graph that cannot be planned, or bindings that do not fit it.
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
    /// What is bound does not suit the graph's tensors.
    #[error(transparent)]
    Binding(#[from] BindingError),
}
