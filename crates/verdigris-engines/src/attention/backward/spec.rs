//! What shapes the kernels.

use std::fmt;

use verdigris_kir::face::{Header, build};
use verdigris_kir::inst::{MatrixType, WgmmaShape};
use verdigris_kir::ir::{Access, KernelBody, MapDecl, Target};
use verdigris_kir::program::KernelRef;
use verdigris_kir::tile::fragment::wgmma_shape;

use super::super::half::Half;
use super::super::tile::{HeadTile, PANEL};
use super::{around, kernel};
use crate::hopper::{FIRST_BARRIER, WARPGROUP};

/// Keys of a warpgroup.
pub(super) const OWN_KEYS: u32 = 64;
/// Warpgroups that multiply.
pub(super) const CONSUMERS: u32 = 2;
/// Keys of a CTA.
pub(super) const KEYS: u32 = OWN_KEYS * CONSUMERS;
/// Queries of one turn.
pub(super) const QUERIES: u32 = 64;
/// Bytes of a number for each query of a turn.
pub(super) const NUMBERS_BYTES: u32 = QUERIES * 4;

/// Elements of a head whose gradient of the queries one consumer computes: the columns of a piece.
pub(super) const fn own_elements(head: u32) -> u32 {
    head / CONSUMERS
}

/// Bytes of a piece: 64 queries, f32.
pub(super) const fn piece_bytes(head: u32) -> u32 {
    QUERIES * own_elements(head) * 4
}

/// Which scores a kernel may mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Mask {
    /// Keys beyond the last.
    End,
    /// And those outside of a band.
    Band,
}

impl Mask {
    const fn name(self) -> &'static str {
        match self {
            Mask::End => "end",
            Mask::Band => "band",
        }
    }
}

/// Everything that shapes the main kernel; extents are arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::attention) struct Spec {
    pub(super) ty: Half,
    /// Elements of a head: 64 or 128.
    pub(super) head: u32,
    /// Blocks of queries in shared memory at a time.
    pub(super) stages: u32,
    pub(super) mask: Mask,
    /// Shares of the gradient of the queries are added in one order.
    pub(super) in_order: bool,
    /// Something stands between the products and the softmax; with a mask of bands.
    pub(super) score_mod: bool,
}

impl fmt::Display for Spec {
    /// `attention_backward_bf16_d128_m64_n128_s2_band_ordered`: the entry's name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Spec { head, stages, .. } = self;
        write!(f, "attention_backward_{}_d{head}_m{QUERIES}_n{KEYS}_s{stages}_{}", self.ty.name(), self.mask.name())?;
        let marks = [(self.in_order, "_ordered"), (self.score_mod, "_scoremod")];
        marks.iter().filter(|(has, _)| *has).try_for_each(|(_, name)| f.write_str(name))
    }
}

impl Spec {
    pub(super) const fn key_tile(&self) -> HeadTile {
        HeadTile { rows: KEYS, elements: self.head, ty: self.ty.map() }
    }

    pub(super) const fn query_tile(&self) -> HeadTile {
        HeadTile { rows: QUERIES, elements: self.head, ty: self.ty.map() }
    }

    /// The gradients of keys and of values, a panel of a consumer at a time.
    pub(super) fn gradient_map(&self) -> MapDecl {
        HeadTile { rows: OWN_KEYS, elements: PANEL, ty: self.ty.map() }.map(Access::Write)
    }

    /// Keys by queries.
    pub(super) fn transposed_shape(&self) -> WgmmaShape {
        wgmma_shape(QUERIES, self.ty.matrix(), self.ty.matrix(), MatrixType::F32)
    }

    /// Keys by elements.
    pub(super) fn key_shape(&self) -> WgmmaShape {
        let shape = wgmma_shape(self.head, self.ty.matrix(), self.ty.matrix(), MatrixType::F32);
        WgmmaShape { a_in_registers: true, transpose_b: true, ..shape }
    }

    /// Queries by the elements of a piece.
    pub(super) fn query_shape(&self) -> WgmmaShape {
        WgmmaShape { transpose_b: true, ..wgmma_shape(own_elements(self.head), self.ty.matrix(), self.ty.matrix(), MatrixType::F32) }
    }

    pub(super) fn build(&self) -> KernelBody {
        let threads = WARPGROUP * (1 + CONSUMERS);
        let header = Header { name: self.to_string(), target: Target::Sm90a, threads, min_ctas: 1, cluster: 1 };
        build(header, |k| kernel::backward(k, self))
    }

    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.to_string(), move || self.build())
    }
}

/// Named barriers: both consumers; then for each of them staging, room for a piece, a piece written.
pub(super) const BOTH: u32 = FIRST_BARRIER;
pub(super) const STAGING: u32 = BOTH + 1;
pub(super) const ROOM: u32 = STAGING + CONSUMERS;
pub(super) const WRITTEN: u32 = ROOM + CONSUMERS;

/// The launches in front of the main one and behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Around {
    /// Two numbers of each query.
    Before(Half),
    /// The gradient of the queries, rounded; of heads of so many elements.
    Behind(Half, u32),
}

impl fmt::Display for Around {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Around::Before(ty) => write!(f, "attention_backward_rows_{}", ty.name()),
            Around::Behind(ty, head) => write!(f, "attention_backward_queries_{}_d{head}", ty.name()),
        }
    }
}

impl Around {
    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.to_string(), move || {
            let threads = match self {
                Around::Before(_) => around::THREADS,
                Around::Behind(..) => WARPGROUP,
            };
            let header = Header { name: self.to_string(), target: Target::Sm90a, threads, min_ctas: 1, cluster: 1 };
            build(header, |k| match self {
                Around::Before(ty) => around::before(k, ty),
                Around::Behind(ty, head) => around::behind(k, ty, head),
            })
        })
    }
}
