//! `conv.halo`: convolutions out of halo boxes on Hopper's tensor cores: every tap of the filter reads one copy of the pixels.
//!
//! **What.** Convolutions without strides in one to three spatial dims: bf16 and f16 operands, filters of several elements, any dilation
//! whose halo leaves room in shared memory, any padding, channels innermost in multiples of 8 on both sides, one group or several, every
//! epilogue. Tensors that lie otherwise are copied ([`InLines`]).
//!
//! **Method.** A box of pixels is brought with its halo by one tiled copy, which fills in zeros outside of the image; a tap is a shift of a
//! matrix operand's first row ([`verdigris_kir::tile::halo`]). So pixels cross L2 about once instead of once for each tap. Two algorithms
//! read such boxes: [`pixels`] has fprop and dgrad, whose products' rows are pixels, [`filter`] wgrad, whose products' depth they are.
//! [`geometry`] is what they have in common. [`terms`] has wgrad of f32 by that of its terms.

mod filter;
mod geometry;
mod pixels;
mod terms;

use verdigris_graph::{ConvProblem, Direction, Precision, Problem, Tensor};
use verdigris_kir::inst::MatrixType;
use verdigris_kir::ir::{MapType, Target};
use verdigris_tensor::DType;

use super::geometry::lines::lies_in_lines;
use super::geometry::{require_elements, tap_count};
use super::in_lines::InLines;
use crate::algorithm::Joined;
use crate::arch::Arch;
use crate::engine::{EngineId, Reason, Refusal};

pub(super) use filter::Filter;
use pixels::Pixels;
use terms::FilterOfTerms;

const ID: EngineId = EngineId { name: "conv.halo", number: 208 };

/// All algorithms.
pub(super) type Halo = Joined<InLines<Joined<Pixels, Filter>>, FilterOfTerms>;

/// Threads of a warpgroup.
const WARPGROUP: u32 = 128;
/// Dynamic shared memory of a CTA on compute capability 9.0.
const SHARED_BYTES: u32 = 232_448;

/// What is multiplied, as TMA and as the tensor cores call it.
fn types(dtype: DType) -> (MapType, MatrixType) {
    if dtype == DType::F16 { (MapType::F16, MatrixType::F16) } else { (MapType::Bf16, MatrixType::Bf16) }
}

/// What both algorithms ask: of the problem as a whole, and of the tensors that TMA reads as boxes.
fn require<'p>(problem: &'p Problem, arch: &Arch, directions: &[Direction], most_taps: u64) -> Result<&'p ConvProblem, Refusal> {
    let Problem::Conv(conv) = problem else {
        return Err(ID.refusal(Reason::Problem, "takes convolutions"));
    };
    ID.require(directions.contains(&conv.direction), Reason::Direction, format_args!("{:?}; takes {directions:?}", conv.direction))?;
    let [(_, a, _), (_, b, _)] = conv.operands();
    let halves = a.dtype == b.dtype && matches!(a.dtype, DType::Bf16 | DType::F16);
    ID.require(halves, Reason::DType, format_args!("{} and {}; takes two of bf16 or of f16", a.dtype, b.dtype))?;
    ID.require(conv.precision == Precision::Fp32, Reason::Precision, format_args!("{:?}; takes fp32", conv.precision))?;
    ID.require(
        conv.prologue.is_empty(),
        Reason::Epilogue,
        format_args!("{} steps on the activations; takes them as they are stored", conv.prologue.len()),
    )?;
    ID.require(arch.runs(Target::Sm90a), Reason::Target, format_args!("compute capability {:?}; needs (9, 0)", arch.capability))?;
    require_elements(ID, conv)?;
    let read: &[(&str, &Tensor)] = match conv.direction {
        Direction::Fprop => &[("x", &conv.x)],
        Direction::Dgrad => &[("dy", &conv.y)],
        Direction::Wgrad => &[("x", &conv.x), ("dy", &conv.y)],
    };
    for (name, tensor) in read {
        ID.require(
            lies_in_lines(tensor),
            Reason::Layout,
            format_args!("{name} with strides {:?}; channels must be innermost and pixels begin at multiples of 16 bytes", tensor.strides),
        )?;
    }
    ID.require(
        conv.c.is_multiple_of(8) && conv.k.is_multiple_of(8),
        Reason::Alignment,
        format_args!("{} and {} channels; takes multiples of 8", conv.c, conv.k),
    )?;
    ID.require(conv.strides == [1; 3], Reason::Extent, format_args!("strides {:?}; takes 1", conv.strides))?;
    let taps = tap_count(conv);
    ID.require(
        (2..=most_taps).contains(&taps),
        Reason::Extent,
        format_args!("a filter of {taps} elements; takes 2 to {most_taps}, for a single one is a product"),
    )?;
    Ok(conv)
}
