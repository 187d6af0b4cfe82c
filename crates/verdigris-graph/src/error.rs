//! What can be wrong with a request. Always the caller's fault, and always named: the op, the tensor, the values, the rule.

use verdigris_tensor::{DType, LayoutError};

use crate::tensor::Uid;

/// A fault in a graph or in a problem.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum Error {
    /// Two numbers that must agree do not.
    #[error("op `{op}`, tensor `{tensor}`: {quantity} is {got}, expected {want}; {rule}")]
    Mismatch {
        /// The op at which it was seen.
        op: String,
        /// The tensor that carries `got`.
        tensor: String,
        /// What was counted, such as `dim 1 (k)`.
        quantity: String,
        /// The number found.
        got: u64,
        /// The number that the rule asks for.
        want: u64,
        /// The rule broken.
        rule: &'static str,
    },
    /// An element type that the op does not take.
    #[error("op `{op}`, tensor `{tensor}`: element type {got}; {rule}")]
    DType {
        /// The op.
        op: String,
        /// The tensor.
        tensor: String,
        /// Its type.
        got: DType,
        /// The rule broken.
        rule: &'static str,
    },
    /// An attribute outside its range.
    #[error("op `{op}`: {attribute} = {value}; {rule}")]
    Attribute {
        /// The op.
        op: String,
        /// The attribute.
        attribute: &'static str,
        /// Its value, as text.
        value: String,
        /// The rule broken.
        rule: &'static str,
    },
    /// Dims and strides that cannot be.
    #[error("tensor `{tensor}`: {source}")]
    Layout {
        /// The tensor.
        tensor: String,
        /// What is wrong with its layout.
        source: LayoutError,
    },
    /// An element, or a step from one to the next, too many bytes away.
    #[error(
        "tensor `{tensor}` reaches over {elements} elements of {dtype}; a tensor ends less than 2^63 bytes behind the start of its buffer"
    )]
    Reach {
        /// The tensor.
        tensor: String,
        /// From the start of its buffer to behind its last one, or from one to the next, where that is more; at most 2^64 − 1 is told.
        elements: u64,
        /// Their type.
        dtype: DType,
    },
    /// A uid that names no tensor of the graph.
    #[error("op `{op}` names tensor {uid}, which the graph does not have")]
    UnknownTensor {
        /// The op.
        op: String,
        /// The uid it names.
        uid: Uid,
    },
    /// The graph is no graph of single assignments.
    #[error("op `{op}`, tensor `{tensor}`: {rule}")]
    Structure {
        /// The op, or the graph's name where no op is to blame.
        op: String,
        /// The tensor.
        tensor: String,
        /// The rule broken.
        rule: &'static str,
    },
    /// A valid graph of a form that is not documented as supported.
    #[error("op `{op}`: {rule}")]
    Unsupported {
        /// The op.
        op: String,
        /// What is supported instead.
        rule: &'static str,
    },
    /// A gradient that does not exist, or that no ops express.
    #[error("op `{op}`, tensor `{tensor}`: no gradient; {rule}")]
    Gradient {
        /// The op that passes none on, or the graph's name where no op is to blame.
        op: String,
        /// The tensor whose gradient it would be.
        tensor: String,
        /// Why.
        rule: &'static str,
    },
    /// A gradient that is 0 wherever it exists.
    #[error("op `{op}`, tensor `{tensor}`: no gradient; {rule}")]
    Constant {
        /// The last op that depends on the tensor, or the graph's name.
        op: String,
        /// The tensor whose gradient it would be.
        tensor: String,
        /// Why.
        rule: &'static str,
    },
    /// An op that is cut into no problem, so that no engine of a GPU can take it.
    #[error("op `{op}`: `{kind}` is no problem that an engine of a GPU could take; the CPU runs it")]
    NoProblem {
        /// The op.
        op: String,
        /// Its kind: the name in the table of ops.
        kind: &'static str,
    },
    /// Text that is no graph or problem.
    #[error("line {line}, column {column}: {message}")]
    Json {
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// What the parser says.
        message: String,
    },
    /// Words that say no problem.
    #[error("a problem in words: {rule}; {found}")]
    Words {
        /// What stands there in words of a problem.
        rule: String,
        /// What was found.
        found: String,
    },
}
