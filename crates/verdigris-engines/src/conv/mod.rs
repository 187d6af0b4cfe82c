//! Convolution in its three directions ([`verdigris_graph::ConvProblem`] has the formula in full).

mod block_diagonal;
mod depthwise;
mod direct;
pub(crate) mod geometry;
mod grouped;
mod halo;
mod halo_wgrad;
mod implicit_gemm;
mod small_channels;

use verdigris_graph::ConvProblem;
use verdigris_kir::program::Program;

use crate::algorithm::Listed;
use crate::engine::Engine;

/// The engines of this family; [`crate::rewrite`] has those that stand on products.
pub static ENGINES: &[&dyn Engine] = &[
    &Listed::<implicit_gemm::ImplicitGemm>::new(),
    &Listed::<halo_wgrad::HaloWgrad>::new(),
    &Listed::<halo::Halo>::new(),
    &Listed::<small_channels::SmallChannels>::new(),
    &Listed::<grouped::Grouped>::new(),
    &Listed::<block_diagonal::BlockDiagonal>::new(),
    &Listed::<depthwise::Depthwise>::new(),
    &Listed::<direct::Direct>::new(),
];

/// A program without steps for the buffers of a problem; its launches say what their addresses must be multiples of.
fn empty_program(problem: &ConvProblem) -> Program {
    let slots = problem.slots().iter().map(|slot| slot.0 as usize + 1).max().unwrap_or(0);
    Program { buffer_alignment_bytes: vec![1; slots], ..Program::default() }
}
