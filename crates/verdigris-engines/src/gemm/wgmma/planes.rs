//! Products whose depth runs over planes: `D = Σ A_p · B_p`, as a filter's gradient is of tensors that have their channels first.
//!
//! The operands of a plane lie along the depth, each plane some distance behind the one before. No copy is needed: a map has planes as its third index,
//! and a step of depth lies within a plane, whose last one TMA fills with zeros in both operands. So the depth that is counted is that of whole steps.

use verdigris_graph::{GemmProblem, Matrix, Problem};
use verdigris_kir::program::KernelRef;
use verdigris_kir::tile::operand::{Major, ROW_BYTES};
use verdigris_tensor::DType;

use super::block_factors::Scaled;
use super::spec::Spec;
use super::{Given, HALVES, LINES, SHAPES, Shape, View, WORDS, Wgmma, reference};
use crate::algorithm::{Algorithm, candidate};
use crate::arch::Arch;
use crate::engine::{Candidate, Reason, Refusal};
use crate::fuse::epilogue::{EpilogueSpec, OperandSpec, Walk};
use crate::hopper::sums::Keep;
use crate::store::Out;

/// The planes that a depth runs over: how many, and elements from one to the next, of A and of B.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planes {
    pub(crate) count: u64,
    pub(crate) apart: [u64; 2],
}

/// The same as a view has it: how many, and the depth of each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Depths {
    pub(super) count: u32,
    pub(super) depth: u32,
}

/// The shape of a number as a view's problems are offered it.
pub(super) fn shape_for(view: &View, number: u32) -> Option<Shape> {
    if view.planes.is_some() { shape(number) } else { SHAPES.get(number as usize).copied() }
}

/// The shape of a number as products over planes are offered it. Few tiles of much depth are the rule, so parts are most of the kernels; one of each type
/// and store has the other problems.
fn shape(number: u32) -> Option<Shape> {
    let (along_rows, adds_later) = match number {
        2 => (HALVES | WORDS, true),
        9 => (HALVES | WORDS | LINES, true),
        11 | 13 | 16 => (0, true),
        _ => return None,
    };
    Some(Shape { along_rows, along_columns: 0, splits: number == 9, adds_later, ..*SHAPES.get(number as usize)? })
}

/// The sum over planes of the products of `plane`, whose k is the depth of one.
pub(crate) fn of_planes(plane: &GemmProblem, planes: Planes, arch: &Arch) -> Result<Box<dyn Candidate>, Refusal> {
    let id = Wgmma::ID;
    let step = ROW_BYTES as u64 / (plane.a.dtype.bytes() as u64).max(1);
    let depth = planes.count.checked_mul(plane.k.next_multiple_of(step));
    let depth = depth.filter(|&depth| depth < 1 << 31);
    let k = depth
        .ok_or_else(|| id.refusal(Reason::Extent, format_args!("{} planes of {}; takes below 2^31 of depth", planes.count, plane.k)))?;
    // The matrices of a batch have their rows one behind the other's.
    let rows_follow = |matrix: &Matrix, rows: u64, row_stride: u64| {
        plane.batch.iter().zip(&matrix.batch_strides).all(|(_, &stride)| Some(stride) == rows.checked_mul(row_stride))
    };
    id.require(
        plane.batch.len() <= 1
            && rows_follow(&plane.a, plane.m, plane.a.row_stride)
            && rows_follow(&plane.b, plane.n, plane.b.column_stride),
        Reason::Batch,
        format_args!("a batch {:?} of matrices in planes; takes those whose rows follow each other", plane.batch),
    )?;
    let over = |matrix: &Matrix, apart: u64| Matrix { batch_strides: vec![apart], ..matrix.clone() };
    let [a, b] = [over(&plane.a, planes.apart[0]), over(&plane.b, planes.apart[1])];
    let mut accepted = Wgmma::accept(&Problem::Gemm(GemmProblem { k, a, b, ..plane.clone() }), arch)?;
    id.require(
        accepted.copies.iter().all(Option::is_none),
        Reason::Layout,
        format_args!("planes with strides {:?} and {:?}; takes lines along the depth at multiples of 16 bytes", plane.a, plane.b),
    )?;
    let depths = Depths { count: planes.count as u32, depth: plane.k as u32 };
    accepted.interleaved = None;
    for view in [&mut accepted.unswapped, &mut accepted.swap_ab] {
        id.require(
            view.operands().each_ref().map(View::major) == [Major::Depth; 2],
            Reason::Layout,
            "planes whose lines run along the rows; takes lines along the depth",
        )?;
        view.planes = Some(depths);
    }
    id.require(!accepted.configs().is_empty(), Reason::Extent, "no tile suits this product over planes")?;
    candidate(accepted, arch)
}

/// The kernels; they are in the catalog of those who ask for such products.
pub(crate) fn over_planes() -> impl Iterator<Item = KernelRef> {
    let mut specs: Vec<Spec> = Vec::new();
    for operands in [DType::Bf16, DType::F16, DType::F32] {
        let epilogue = EpilogueSpec { stores_d: false, ..EpilogueSpec::plain(OperandSpec { dtype: operands, walk: Walk::Row }) };
        for (shape, out) in (0..SHAPES.len() as u32).filter_map(shape).flat_map(|shape| [Out::Tma, Out::Rows].map(|out| (shape, out))) {
            let given = Given {
                a: operands,
                b: operands,
                majors: [Major::Depth; 2],
                terms: 1,
                keep: Keep::InPlace,
                scaled: [Scaled::No; 2],
                out,
                swap_ab: false,
                interleaved: false,
                planes: true,
                ways: None,
            };
            specs.extend(given.spec(&shape, epilogue.clone()));
            specs.extend(given.in_parts(&shape).filter(|_| out == Out::Tma));
        }
    }
    specs.into_iter().map(reference)
}
