//! Convolution in its three directions ([`verdigris_graph::ConvProblem`] has the formula in full).

mod chain;
mod depthwise;
mod diagonal;
mod direct;
mod grouped;
mod halo;
mod halo_wgrad;
mod implicit_gemm;
mod lines;
pub(crate) mod pointwise;
mod small_channels;
pub(crate) mod unfolded;

use verdigris_graph::ConvProblem;
use verdigris_kir::program::Program;

use crate::algorithm::Listed;
use crate::engine::Engine;

/// The engines of this family; `pointwise` and `unfolded`, which stand on another family's, are registered with both.
pub static ENGINES: &[&dyn Engine] = &[
    &Listed::<implicit_gemm::ImplicitGemm>::new(),
    &Listed::<halo_wgrad::HaloWgrad>::new(),
    &Listed::<halo::Halo>::new(),
    &small_channels::SmallChannels,
    &grouped::Grouped,
    &diagonal::Diagonal,
    &depthwise::Depthwise,
    &direct::Direct,
];

/// A program without steps for the buffers of a problem; its launches say what their addresses must be multiples of.
fn empty_program(problem: &ConvProblem) -> Program {
    let slots = problem.slots().iter().map(|slot| slot.0 as usize + 1).max().unwrap_or(0);
    Program { buffer_alignment_bytes: vec![1; slots], ..Program::default() }
}
