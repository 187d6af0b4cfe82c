//! What is asked: operations, inferred shapes, validation, identity.
//!
//! A [`Graph`] of [`Op`]s on [`TensorDesc`]s is built ([`GraphBuilder`]) or read from JSON ([`json`]), checked as a whole
//! ([`validate`]), and cut into [`Problem`]s ([`pattern::problems`]): canonical, device-free subgraphs that one engine may take. Equal
//! problems have equal [`Key`]s, whatever their tensors were called, and equal words: a [`Problem`] prints as a line of text that reads as the same problem. [`gradient`] adds to a graph what computes its gradients. What a caller
//! binds to a graph's tensors is checked by [`binding`].
#![forbid(unsafe_code)]

pub mod binding;
pub mod error;
pub mod gradient;
mod graph;
pub mod json;
mod key;
mod op;
pub mod ops;
pub mod pattern;
pub mod problem;
pub mod spec;
mod tensor;
pub mod validate;
mod words;

pub use error::Error;
pub use graph::{Graph, GraphBuilder, Node};
pub use key::Key;
pub use op::{HostScalar, Op, Real, Role};
pub use ops::names::*;
pub use problem::{
    Access, AttentionPass, AttentionProblem, BatchNormProblem, Chain, ChainStep, ChannelFunction, Channels, ConvExtents, ConvProblem,
    Corner, Determinism, Direction, EpilogueStep, GemmProblem, Loss, MapProblem, Matrix, NormPass, NormProblem, Operand, Order, PoolPass,
    PoolProblem, Problem, ReduceProblem, ResampleProblem, RowFunction, RowPlace, Scale, ScanProblem, Slot, SoftmaxProblem, Statistics,
    Tensor, View, Window, Windows,
};
pub use tensor::{TensorDesc, Uid};
