//! `conv.grouped`: convolutions of groups of few channels on tensor cores, by block-diagonal filters.
//!
//! **What.** All three directions of bf16 and f16 with f32 sums, activations with their channels last, filters of any layout;
//! activations that lie otherwise are copied ahead ([`InLines`]).
//!
//! **Method.** The filter of several groups taken together is, at one tap, a block-diagonal matrix. Channels are counted in *chunks* of 8,
//! the 16 bytes of a copy and of a row of `ldmatrix`; a CTA takes a *channel tile* of up to 64 channels and brings the pixels that a tile
//! reads, its neighbours included, to shared memory once, where every tap reads them. Two kinds of algorithms do it: those of [`cp_async`],
//! for all chips from sm_80 on and up to 64 channels a group on either side, and [`tma`], for one to eight.

mod cp_async;
mod tma;

use verdigris_graph::{ConvProblem, Direction, Precision, Problem, Tensor};
use verdigris_kir::program::KernelRef;
use verdigris_tensor::DType;

use crate::algorithm::Joined;
use crate::conv::geometry::require_elements;
use crate::conv::in_lines::InLines;
use crate::cost::{Stream, Traffic};
use crate::engine::{EngineId, Reason, Refusal};
use crate::fuse::epilogue::{EpilogueSpec, OperandSpec, Walk};
use crate::split_k::filter::grouped as reduction;

use cp_async::CpAsync;
pub(super) use tma::BlockDiagonal;

const ID: EngineId = EngineId { name: "conv.grouped", number: 207 };

/// All algorithms.
pub(super) type Grouped = InLines<Joined<CpAsync, BlockDiagonal>>;

/// Channels of a chunk.
const CHUNK: u32 = 8;
/// Operands of the catalogs' kernels.
const TYPES: [DType; 2] = [DType::Bf16, DType::F16];

/// What all algorithms ask of the problem as a whole.
fn require<'p>(problem: &'p Problem, directions: &[Direction]) -> Result<&'p ConvProblem, Refusal> {
    let Problem::Conv(conv) = problem else {
        return Err(ID.refusal(Reason::Problem, format_args!("{}; takes conv", problem.kind())));
    };
    ID.require(directions.contains(&conv.direction), Reason::Direction, format_args!("{:?}; takes {directions:?}", conv.direction))?;
    let [(_, a, _), (_, b, _)] = conv.operands();
    ID.require(
        a.dtype == b.dtype && TYPES.contains(&a.dtype),
        Reason::DType,
        format_args!("{} and {}; takes two of bf16 or of f16", a.dtype, b.dtype),
    )?;
    ID.require(conv.precision == Precision::Fp32, Reason::Precision, format_args!("{:?}; takes f32 sums", conv.precision))?;
    ID.require(
        conv.prologue.is_empty(),
        Reason::Epilogue,
        format_args!("{} steps on the activations; takes them as they are stored", conv.prologue.len()),
    )?;
    require_elements(ID, conv)?;
    Ok(conv)
}

/// Activations are copied by chunks of 16 bytes.
fn require_chunks(name: &str, tensor: &Tensor, extents: [u64; 5]) -> Result<(), Refusal> {
    ID.require(tensor.strides[1] == 1, Reason::Layout, format_args!("{name} with channels {} elements apart", tensor.strides[1]))?;
    ID.require(are_chunks(tensor, extents), Reason::Alignment, format_args!("{name} with strides {:?}, no multiples of 8", tensor.strides))
}

/// Whether each pixel begins with a whole chunk.
fn are_chunks(tensor: &Tensor, extents: [u64; 5]) -> bool {
    [0, 2, 3, 4].iter().all(|&dim| extents[dim] <= 1 || tensor.strides[dim].is_multiple_of(u64::from(CHUNK)))
}

/// The epilogue of plain results that leave shared memory by chunks.
fn plain(result: DType) -> EpilogueSpec {
    EpilogueSpec { stores_d: false, pairs: true, ..EpilogueSpec::plain(OperandSpec { dtype: result, walk: Walk::Row }) }
}

/// What adds up the parts of a filter's gradient.
fn reduction_of(conv: &ConvProblem) -> reduction::Spec {
    let epilogue = EpilogueSpec { pairs: false, ..EpilogueSpec::of_conv(conv) };
    // The plain ones make a catalog, which one class of strides keeps short; a user's chain is compiled for its own.
    reduction::Spec { epilogue: if epilogue.is_plain() { epilogue.strided() } else { epilogue } }
}

/// The kernels of the catalogs that add up parts.
fn reductions() -> impl Iterator<Item = KernelRef> {
    TYPES.into_iter().map(|dtype| reduction::Spec { epilogue: EpilogueSpec::plain(OperandSpec::strided(dtype)) }.kernel())
}

/// Bytes of one part of a filter's gradient.
fn part_bytes(conv: &ConvProblem) -> u64 {
    4 * conv.k * conv.gemm_extents().n
}

/// What writing and adding up `count` parts asks.
fn parts_work(conv: &ConvProblem, count: u64) -> Stream {
    Stream::new(Traffic::Reduced, 2.0 * (count * part_bytes(conv)) as f64)
}
