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

use verdigris_graph::{ConvProblem, Slot};
use verdigris_kir::program::Program;

use crate::algorithm::Listed;
use crate::engine::Engine;
use crate::parts::epilogue::EpilogueSpec;

/// The engines of this family; `pointwise` and `unfolded`, which stand on another family's, are registered with both.
pub static ENGINES: &[&dyn Engine] = &[
    &implicit_gemm::ImplicitGemm,
    &halo_wgrad::HaloWgrad,
    &halo::Halo,
    &Listed::<small_channels::SmallChannels>::new(),
    &Listed::<grouped::Grouped>::new(),
    &Listed::<diagonal::Diagonal>::new(),
    &Listed::<depthwise::Depthwise>::new(),
    &Listed::<direct::Direct>::new(),
];

/// A program without launches, with a place for each buffer of the problem.
fn empty_program(p: &ConvProblem) -> Program {
    let slots = p.slots().iter().map(|slot| slot.0 as usize + 1).max().unwrap_or(0);
    Program { buffer_alignment_bytes: vec![1; slots], ..Program::default() }
}

/// A program without launches for a problem whose buffers are aligned to their elements, to what the epilogue relies on, and to what `more` says.
fn program(p: &ConvProblem, epilogue: &EpilogueSpec, more: impl IntoIterator<Item = (Slot, u64)>) -> Program {
    let mut alignments = vec![1; p.slots().iter().map(|slot| slot.0 as usize + 1).max().unwrap_or(0)];
    let elements = p.tensors().into_iter().map(|(_, tensor, _)| (tensor.slot, tensor.dtype.bytes() as u64));
    let sums = p.statistics.iter().flat_map(|both| [both.sum, both.sum_of_squares]).map(|sum| (sum.slot, sum.dtype.bytes() as u64));
    for (slot, bytes) in elements.chain(sums).chain(more).chain(epilogue.conv_alignments(p)) {
        let alignment: &mut u64 = &mut alignments[slot.0 as usize];
        *alignment = bytes.max(*alignment);
    }
    Program { buffer_alignment_bytes: alignments, ..Program::default() }
}
