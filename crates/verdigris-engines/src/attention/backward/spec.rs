//! What shapes the kernels.

use std::fmt;

use verdigris_kir::face::{Header, Kernel, Val, build};
use verdigris_kir::inst::{MatrixType, WgmmaShape};
use verdigris_kir::ir::{Access, KernelBody, MapDecl, Target};
use verdigris_kir::program::KernelRef;
use verdigris_kir::tile::fragment::{Fragment, wgmma_shape};

use super::super::function::{self, Source};
use super::super::half::Half;
use super::super::sequences;
use super::super::tile::{HeadTile, PANEL};
use super::{STAGES, around, kernel, long};
use crate::fuse::steps::Step;
use crate::hopper::{FIRST_BARRIER, WARPGROUP};

/// Keys of a warpgroup.
pub(super) const OWN_KEYS: u32 = 64;
/// Warpgroups that multiply.
pub(super) const CONSUMERS: u32 = 2;
/// Queries of one turn.
pub(super) const QUERIES: u32 = sequences::QUERIES;
/// Bytes of a number for each query of a turn.
pub(super) const NUMBERS_BYTES: u32 = QUERIES * 4;

/// Elements of queries and keys, and of values, for which there are kernels, shortest first.
pub(super) const HEADS: [(u32, u32); 6] = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)];

/// Elements of queries and keys up to which a consumer has whole rows of keys ([`super::kernel`]); of longer ones it has a half of each ([`super::long`]).
const WHOLE_ROWS: u32 = 128;

/// Elements of a head whose gradients one consumer computes: the columns of a piece.
pub(super) const fn own_elements(head: u32) -> u32 {
    head / CONSUMERS
}

/// Columns of the head that a consumer multiplies at a time, counted in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) columns: u32,
    /// Where those of the first consumer begin, and how much further those of the second.
    pub(super) first: u32,
    pub(super) of_consumer: u32,
}

/// The columns of a consumer: half of the head in one part. What is read across the swizzle begins with a panel or stays within one: of three panels, one of its own
/// and a half of the middle one; of a panel and a half, 32 elements at the start of either panel and 16 of what is left of the first.
pub(super) fn parts(head: u32) -> Vec<Part> {
    if head == 3 * PANEL {
        let own = Part { columns: PANEL, first: 0, of_consumer: 2 * PANEL };
        return vec![own, Part { columns: PANEL / 2, first: PANEL, of_consumer: PANEL / 2 }];
    }
    if head == PANEL + PANEL / 2 {
        let own = Part { columns: PANEL / 2, first: 0, of_consumer: PANEL };
        return vec![own, Part { columns: PANEL / 4, first: PANEL / 2, of_consumer: PANEL / 4 }];
    }
    vec![Part { columns: own_elements(head), first: 0, of_consumer: own_elements(head) }]
}

/// Accumulators of a consumer's columns.
pub(super) fn own_columns<'k>(k: Kernel<'k>, head: u32) -> Vec<(Part, Fragment<'k, f32>)> {
    parts(head).into_iter().map(|part| (part, Fragment::unset(k, part.columns))).collect()
}

/// What they hold, in the order in which [`super::around::behind`] reads it.
pub(super) fn values_of<'k>(columns: &[(Part, Fragment<'k, f32>)]) -> Vec<Val<'k, f32>> {
    columns.iter().flat_map(|(_, own)| own.registers()).map(|register| register.get()).collect()
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
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(in crate::attention) struct Spec {
    pub(super) ty: Half,
    /// Elements of queries and keys, and of values: two of [`HEADS`].
    pub(super) head: u32,
    pub(super) value: u32,
    /// Blocks of queries in shared memory at a time.
    pub(super) stages: u32,
    pub(super) mask: Mask,
    /// Shares of the gradient of the queries are added in one order.
    pub(super) in_order: bool,
    /// Something stands between the products and the softmax; with a mask of bands.
    pub(super) score_mod: bool,
    /// Batches have numbers of queries and keys of their own, be they ragged or have lengths; with a mask of bands.
    pub(super) ragged: bool,
    /// Some pairs are dropped; with a mask of bands.
    pub(super) dropout: bool,
    /// Tiles go through lists of blocks; with a mask of bands, of heads that are not long.
    pub(super) listed: bool,
    /// The function of scores and behind it its slope, where there is one; with what stands between the products, of heads that are not long.
    pub(super) function: Vec<Step<Source>>,
    /// The step of the function whose value is the score.
    pub(super) score: u32,
}

impl fmt::Display for Spec {
    /// `attention_backward_bf16_d128_m64_n128_s2_band_ordered`, or `…_d192_v128_m64_n64_…`: the entry's name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Spec { head, value, stages, .. }, keys) = (self, self.keys());
        write!(f, "attention_backward_{}_d{head}", self.ty.name())?;
        if value != head {
            write!(f, "_v{value}")?;
        }
        write!(f, "_m{QUERIES}_n{keys}_s{stages}_{}", self.mask.name())?;
        let of_order = [(self.in_order, "_ordered"), (self.score_mod, "_scoremod")];
        let marks = of_order.into_iter().chain([(self.ragged, "_ragged"), (self.dropout, "_dropout"), (self.listed, "_listed")]);
        marks.filter(|(has, _)| *has).try_for_each(|(_, name)| f.write_str(name))?;
        if self.function.is_empty() {
            return Ok(());
        }
        function::write_name(f, &self.function)?;
        write!(f, "_score{}", self.score)
    }
}

/// Whether kernels of such heads are [`super::long`]'s.
pub(super) const fn is_long(head: u32) -> bool {
    head > WHOLE_ROWS
}

/// Whether keys and values of such heads fit into registers beside the gradients.
pub(super) const fn may_keep_keys(head: u32) -> bool {
    head == PANEL
}

/// Keys of a CTA.
pub(super) const fn keys_of(head: u32) -> u32 {
    if is_long(head) { OWN_KEYS } else { OWN_KEYS * CONSUMERS }
}

impl Spec {
    /// Of heads of 64 elements, with nothing between the products.
    pub(super) fn plain(ty: Half) -> Spec {
        let (head, value) = HEADS[0];
        let (mask, function) = (Mask::End, Vec::new());
        let [in_order, score_mod, ragged, dropout, listed] = [false; 5];
        Spec { ty, head, value, stages: STAGES, mask, in_order, score_mod, ragged, dropout, listed, function, score: 0 }
    }

    pub(super) const fn keys(&self) -> u32 {
        keys_of(self.head)
    }

    /// Whether the gradient of the values is multiplied before the gradients of probabilities are there, so that what makes probabilities runs under their product:
    /// where that takes long.
    pub(super) const fn adds_values_first(&self) -> bool {
        self.score_mod || self.dropout
    }

    /// Whether keys and values are operands in registers, and pieces are rows of 32 queries: where registers are left for them.
    pub(super) const fn keeps_keys(&self) -> bool {
        may_keep_keys(self.head) && !self.adds_values_first() && !self.listed
    }

    pub(super) const fn key_tile(&self) -> HeadTile {
        HeadTile { rows: self.keys(), elements: self.head, ty: self.ty.map() }
    }

    pub(super) const fn value_tile(&self) -> HeadTile {
        HeadTile { elements: self.value, ..self.key_tile() }
    }

    pub(super) const fn query_tile(&self) -> HeadTile {
        HeadTile { rows: QUERIES, elements: self.head, ty: self.ty.map() }
    }

    /// Results, and their gradients.
    pub(super) const fn result_tile(&self) -> HeadTile {
        HeadTile { elements: self.value, ..self.query_tile() }
    }

    /// The gradients of keys and of values, a panel of a consumer at a time.
    pub(super) fn gradient_map(&self) -> MapDecl {
        HeadTile { rows: OWN_KEYS, elements: PANEL, ty: self.ty.map() }.map(Access::Write)
    }

    /// Keys by so many queries.
    pub(super) fn transposed_shape(&self, queries: u32) -> WgmmaShape {
        wgmma_shape(queries, self.ty.matrix(), self.ty.matrix(), MatrixType::F32)
    }

    /// Keys, or elements, in registers by so many queries.
    pub(super) fn kept_shape(&self, queries: u32) -> WgmmaShape {
        WgmmaShape { a_in_registers: true, ..self.transposed_shape(queries) }
    }

    /// Keys by elements.
    pub(super) fn key_shape(&self) -> WgmmaShape {
        let shape = wgmma_shape(self.head, self.ty.matrix(), self.ty.matrix(), MatrixType::F32);
        WgmmaShape { a_in_registers: true, transpose_b: true, ..shape }
    }

    /// Keys, or queries, by the columns of a part, out of scores in shared memory.
    pub(super) fn part_shape(&self, part: Part) -> WgmmaShape {
        WgmmaShape { transpose_b: true, ..wgmma_shape(part.columns, self.ty.matrix(), self.ty.matrix(), MatrixType::F32) }
    }

    /// Queries by the columns of a part, out of scores whose rows are keys.
    pub(super) fn query_part_shape(&self, part: Part) -> WgmmaShape {
        WgmmaShape { transpose_a: true, ..self.part_shape(part) }
    }

    pub(super) fn build(&self) -> KernelBody {
        let header = Header { name: self.to_string(), target: Target::Sm90a, threads: kernel::THREADS, min_ctas: 1, cluster: 1 };
        build(header, |k| if is_long(self.head) { long::backward(k, self) } else { kernel::backward(k, self) })
    }

    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.to_string(), move || self.build())
    }
}

/// Named barriers: both consumers; then for each of them staging, room for a piece, a piece written. A second sender has the latter two of its own.
pub(super) const BOTH: u32 = FIRST_BARRIER;
pub(super) const STAGING: u32 = BOTH + 1;
pub(super) const ROOM: u32 = STAGING + CONSUMERS;
pub(super) const WRITTEN: u32 = ROOM + CONSUMERS;
pub(super) const SENDER_BARRIERS: u32 = 2 * CONSUMERS;

/// The launches in front of the main one and behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Around {
    /// Two numbers of each query; of batches with numbers of queries of their own or others.
    Before(Half, bool),
    /// The gradient of the queries, rounded; of heads of so many elements, out of pieces that are rows or accumulators, of such batches or others.
    Behind(Half, u32, bool, bool),
}

impl fmt::Display for Around {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ragged = match self {
            Around::Before(ty, ragged) => write!(f, "attention_backward_rows_{}", ty.name()).map(|()| ragged),
            Around::Behind(ty, head, by_rows, ragged) => {
                write!(f, "attention_backward_queries_{}_d{head}{}", ty.name(), if *by_rows { "_rows" } else { "" }).map(|()| ragged)
            }
        }?;
        f.write_str(if *ragged { "_ragged" } else { "" })
    }
}

impl Around {
    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.to_string(), move || {
            let threads = match self {
                Around::Before(..) => around::THREADS,
                Around::Behind(..) => WARPGROUP,
            };
            let header = Header { name: self.to_string(), target: Target::Sm90a, threads, min_ctas: 1, cluster: 1 };
            build(header, |k| match self {
                Around::Before(ty, ragged) => around::before(k, ty, ragged),
                Around::Behind(ty, head, by_rows, ragged) => around::behind(k, ty, head, by_rows, ragged),
            })
        })
    }
}
