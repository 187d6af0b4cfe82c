//! What shapes the kernel: everything that is chosen before it is built, and what follows from that.

use std::fmt;

use serde::{Deserialize, Serialize};
use verdigris_kir::face::{Header, build};
use verdigris_kir::inst::{MatrixType, WgmmaShape};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::tile::clip::ClippedTile;
use verdigris_kir::tile::fragment::wgmma_shape;
use verdigris_kir::tile::operand::{Major, OperandTile, ROW_BYTES};
use verdigris_tensor::DType;

use super::kernel;
use super::promote::Scaled;
use super::sums::Keep;
use crate::fuse::epilogue::EpilogueSpec;
use crate::fuse::formats::{map_type, matrix_type};
use crate::split_k::cluster::ClusterSplitKSpec;
use crate::split_k::reduction::PartTile;
pub(super) use crate::store::Out;
use crate::store::StoreSpec;

/// Threads of a warpgroup.
pub(super) const WARPGROUP: u32 = 128;
/// The named barrier of the first consumer; the others' follow.
pub(super) const FIRST_BARRIER: u32 = 1;

/// Which operand the CTAs of a cluster share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) enum Shared {
    /// Tiles one below the other: they share B.
    B,
    /// Tiles side by side: they share A.
    A,
}

/// What becomes of tiles whose depth is split over the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) enum Split {
    /// There are none.
    No,
    /// Fixup: whoever finishes last adds the parts up and stores.
    Fixup,
    /// Every part of every tile goes to scratch; the launch of [`crate::split_k::reduction`] that follows adds them up.
    Reduced,
}

/// Everything that shapes the kernel; extents are arguments.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct Spec {
    pub(super) a: DType,
    pub(super) b: DType,
    pub(super) a_major: Axis,
    pub(super) b_major: Axis,
    /// Rows and columns of a CTA's tile.
    pub(super) tile_m: u32,
    pub(super) tile_n: u32,
    pub(super) stages: u32,
    /// Warpgroups that multiply; each takes an equal share of the tile's rows, or takes whole tiles under ping-pong.
    pub(super) consumers: u32,
    /// CTAs of a cluster, and what they share.
    pub(super) cluster: u32,
    pub(super) shared: Shared,
    /// The depth of tiles may be split among CTAs.
    pub(super) split: Split,
    /// CTAs of a cluster among which the depth of each tile is split; 1 for none. Such a cluster shares no operand.
    pub(super) cluster_split: u32,
    /// Ping-pong: the consumers alternate in whole tiles.
    pub(super) ping_pong: bool,
    /// Sums are kept in f16.
    pub(super) half_sums: bool,
    /// fp8 sums are moved into f32 registers every 128 of depth.
    pub(super) promote: bool,
    /// Factors of A's and of B's blocks, by which promoted sums are multiplied.
    pub(super) scaled: [Scaled; 2],
    pub(super) out: Out,
    /// D is written transposed: its contiguous lines are columns of the tile, as under swap-AB.
    pub(super) swap_ab: bool,
    /// What stands between sums and D, for the problem as it is computed.
    pub(super) epilogue: EpilogueSpec,
}

/// Serializable twin of [`Major`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) enum Axis {
    Depth,
    Rows,
}

impl From<Axis> for Major {
    fn from(axis: Axis) -> Major {
        match axis {
            Axis::Depth => Major::Depth,
            Axis::Rows => Major::Rows,
        }
    }
}

impl fmt::Display for Spec {
    /// `gemm_wgmma_bf16_bf16_kk_128x256_s4_c2_x2b_split_bf16_map` and so on: the entry's name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = |axis| if axis == Axis::Depth { 'k' } else { 'r' };
        write!(f, "gemm_wgmma_{}_{}_{}{}", self.a, self.b, letter(self.a_major), letter(self.b_major))?;
        write!(f, "_{}x{}_s{}_c{}", self.tile_m, self.tile_n, self.stages, self.consumers)?;
        if self.cluster > 1 {
            write!(f, "_x{}{}", self.cluster, if self.shared == Shared::B { 'b' } else { 'a' })?;
        }
        if self.cluster_split > 1 {
            write!(f, "_k{}", self.cluster_split)?;
        }
        for (on, word) in [
            (self.ping_pong, "_pingpong"),
            (self.half_sums, "_f16sum"),
            (self.split == Split::Fixup, "_split"),
            (self.promote, "_promote"),
            (self.swap_ab, "_turned"),
            (self.out == Out::Rows, "_rows"),
        ] {
            if on {
                f.write_str(word)?;
            }
        }
        if self.split == Split::Reduced {
            return f.write_str("_parts");
        }
        for (scaled, letter) in self.scaled.into_iter().zip(['a', 'b']) {
            match scaled {
                Scaled::No => {}
                Scaled::Lines => write!(f, "_lines{letter}")?,
                Scaled::Tile => write!(f, "_block{letter}")?,
            }
        }
        write!(f, "_{}", self.epilogue.name())
    }
}

impl Spec {
    pub(super) fn a_tile(&self) -> OperandTile {
        OperandTile { rows: self.tile_m, ty: map_type(self.a), major: self.a_major.into() }
    }

    pub(super) fn b_tile(&self) -> OperandTile {
        OperandTile { rows: self.tile_n, ty: map_type(self.b), major: self.b_major.into() }
    }

    /// Rows of A (columns of B) that one CTA loads of a tile; the rest comes from its peers.
    pub(super) fn loaded(&self, operand: Shared) -> u32 {
        let rows = if operand == Shared::A { self.tile_m } else { self.tile_n };
        if self.cluster > 1 && self.shared == operand { rows / self.cluster } else { rows }
    }

    /// Tiles of one operand, of which this CTA loads a share.
    pub(super) fn clipped(&self, operand: Shared) -> ClippedTile {
        let tile = if operand == Shared::A { self.a_tile() } else { self.b_tile() };
        ClippedTile { tile, loaded: self.loaded(operand) }
    }

    /// The type of D.
    pub(super) fn d(&self) -> DType {
        self.epilogue.d.dtype
    }

    /// Elements of depth in one stage.
    pub(super) fn depth(&self) -> u32 {
        self.a_tile().depth()
    }

    pub(super) fn threads(&self) -> u32 {
        WARPGROUP * (1 + self.consumers)
    }

    /// 64-row blocks of one consumer.
    pub(super) fn blocks(&self) -> u32 {
        if self.ping_pong { self.tile_m / 64 } else { self.tile_m / (64 * self.consumers) }
    }

    /// CTAs of a cluster.
    pub(super) fn ctas(&self) -> u32 {
        self.cluster * self.cluster_split
    }

    pub(super) fn keep(&self) -> Keep {
        match (self.promote, self.half_sums) {
            (true, _) => Keep::Promoted,
            (false, true) => Keep::Halves,
            (false, false) => Keep::InPlace,
        }
    }

    pub(super) fn cluster_split_k(&self) -> Option<ClusterSplitKSpec> {
        (self.cluster_split > 1).then(|| ClusterSplitKSpec {
            ctas: self.cluster_split,
            apart: 1,
            once: false,
            warpgroups: self.consumers,
            blocks: self.blocks(),
            columns: self.tile_n,
            barrier: FIRST_BARRIER + self.consumers,
        })
    }

    fn is_integer(&self) -> bool {
        matches!(self.a, DType::I8 | DType::U8)
    }

    pub(super) fn shape(&self) -> WgmmaShape {
        let d = match (self.is_integer(), self.half_sums) {
            (true, _) => MatrixType::S32,
            (false, true) => MatrixType::F16,
            (false, false) => MatrixType::F32,
        };
        WgmmaShape {
            transpose_a: self.a_major == Axis::Rows,
            transpose_b: self.b_major == Axis::Rows,
            ..wgmma_shape(self.tile_n, matrix_type(self.a), matrix_type(self.b), d)
        }
    }

    /// Shared memory, with room for barriers.
    pub(super) fn shared_bytes(&self) -> u32 {
        let store = if self.split == Split::Reduced { 0 } else { self.store().shared_bytes() };
        self.stages * (self.tile_m + self.tile_n) * ROW_BYTES
            + store
            + self.cluster_split_k().map_or(0, |fixup| fixup.shared_bytes())
            + 16 * self.stages
            + 64
    }

    /// The epilogue store of results to D.
    pub(super) fn store(&self) -> StoreSpec {
        StoreSpec {
            out: self.out,
            transposed: self.swap_ab,
            tile_columns: self.tile_n / self.cluster_split,
            warpgroups: self.consumers,
            barrier: FIRST_BARRIER,
            epilogue: self.epilogue.clone(),
            has_sums: false,
        }
    }

    /// Registers of a producer's and of a consumer's thread.
    pub(super) fn registers(&self) -> (u32, u32) {
        match self.consumers {
            1 | 2 => (40, 232),
            _ => (32, 160),
        }
    }

    /// The tile as parts are kept of it.
    pub(super) fn part_tile(&self) -> PartTile {
        PartTile { rows: self.tile_m, columns: self.tile_n, warpgroups: self.consumers }
    }

    /// Builds the kernel.
    pub(super) fn build(&self) -> KernelBody {
        let header = Header { name: self.to_string(), target: Target::Sm90a, threads: self.threads(), min_ctas: 1, cluster: self.ctas() };
        if self.is_integer() { build(header, |k| kernel::gemm::<i32>(k, self)) } else { build(header, |k| kernel::gemm::<f32>(k, self)) }
    }
}
