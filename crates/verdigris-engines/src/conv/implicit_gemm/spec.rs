//! What shapes the kernel, and what follows from that.

use std::fmt;

use verdigris_kir::face::build;
use verdigris_kir::inst::WgmmaShape;
use verdigris_kir::ir::{KernelBody, MapDecl};
use verdigris_kir::tile::im2col::Im2colTile;
use verdigris_kir::tile::operand::Major;
use verdigris_tensor::DType;

use super::kernel::{self, PACES};
use super::transposed_tiles;
use crate::fuse::epilogue::EpilogueSpec;
use crate::fuse::formats::map_type;
use crate::hopper::FIRST_BARRIER;
use crate::hopper::epilogue::stores_whole_panels;
use crate::hopper::spec::{MainLoopSpec, Operand, Split};
use crate::split_k::cluster::ClusterSplitKSpec;
use crate::store::{Out, StoreSpec};

/// What the rows, columns and depth of the product are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// Rows are pixels that are gathered, columns are channels of the filter; depth runs over taps and channels.
    Gather {
        /// Rows fall into phases with taps of their own, and are scattered over the result.
        phases: bool,
        /// What is contiguous in the filter: the depth, or the columns.
        filter: Major,
    },
    /// The filter's gradient: rows are channels of dy, columns are taps and channels of x, which are gathered; depth runs over pixels.
    Filter,
}

impl Kind {
    /// What is contiguous in A and in B; these are swapped under `swap_ab`.
    pub(super) fn majors(self, swap_ab: bool) -> [Major; 2] {
        match (self, swap_ab) {
            (Kind::Filter, _) => [Major::Rows; 2],
            (Kind::Gather { filter, .. }, false) => [Major::Depth, filter],
            (Kind::Gather { filter, .. }, true) => [filter, Major::Depth],
        }
    }
}

/// Everything that shapes the kernel; extents, taps, strides, dilations and paddings are arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Spec {
    pub(super) kind: Kind,
    /// Spatial dimensions of the gathered tensor: 1, 2, 3.
    pub(super) spatial: u32,
    pub(super) main: MainLoopSpec,
    /// A and B are swapped (swap-AB): rows are channels of the filter, columns are pixels. Under cluster split-K the launch says how many
    /// pixels a tile has.
    pub(super) swap_ab: bool,
    /// The depth of tiles may be split among CTAs.
    pub(super) split: Split,
    pub(super) out: Out,
    /// What stands between sums and the result.
    pub(super) epilogue: EpilogueSpec,
    /// Sums over the channels of what is stored are formed in the epilogue.
    pub(super) has_sums: bool,
}

impl fmt::Display for Spec {
    /// `conv_gather2_bf16_bf16_k_128x256_s4_c2_x2b_split_bf16_map` and so on: the entry's name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (main, spatial) = (&self.main, self.spatial);
        let letter = |major| if major == Major::Depth { 'k' } else { 'r' };
        match self.kind {
            Kind::Gather { phases, filter } => {
                let word = if phases { "classes" } else { "gather" };
                write!(f, "conv_{word}{spatial}_{}_{}_{}_{main}", main.a, main.b, letter(filter))?;
            }
            Kind::Filter => write!(f, "conv_filter{spatial}_{}_{}_{main}", main.a, main.b)?,
        }
        let rows = self.out == Out::Rows && self.split != Split::Reduced;
        for (on, word) in [
            (self.writes_transposed(), "_across"),
            (main.tile.ping_pong, "_pingpong"),
            (main.promotes(), "_promote"),
            (rows, "_rows"),
            (self.has_sums, "_sums"),
        ] {
            if on {
                f.write_str(word)?;
            }
        }
        match self.split {
            Split::No if self.shares_depth() => write!(f, "_across{}_{}", main.tile.cluster_split, self.epilogue.name()),
            Split::No => write!(f, "_{}", self.epilogue.name()),
            Split::Fixup => write!(f, "_split_{}", self.epilogue.name()),
            Split::Reduced => write!(f, "_parts"),
        }
    }
}

impl Spec {
    /// Whether tiles are transposed in shared memory: those of a filter's gradient, of a type that the tensor cores read along the depth
    /// alone.
    pub(super) fn transposes_tiles(&self) -> bool {
        self.kind == Kind::Filter && self.main.a == DType::F32
    }

    /// Whether results leave through the tile's transpose: rows of D are columns of the tile.
    pub(super) fn writes_transposed(&self) -> bool {
        self.swap_ab && !self.shares_depth()
    }

    /// Whether a cluster's CTAs split a tile's depth (cluster split-K).
    pub(super) fn shares_depth(&self) -> bool {
        self.main.tile.cluster_split > 1
    }

    /// Whether rows of phases without taps are no tiles: warps beside the one that loads store their zeros while others multiply.
    pub(super) fn clears(&self) -> bool {
        let stores_zeros = self.out == Out::Scattered && self.epilogue.keeps_zero() && self.main.tile.n.is_power_of_two();
        self.has_phases() && stores_zeros
    }

    /// Whether rows fall into phases with taps of their own.
    pub(super) fn has_phases(&self) -> bool {
        matches!(self.kind, Kind::Gather { phases: true, .. })
    }

    /// Where the gathered pixels and the filter stand, where these are what is multiplied.
    pub(super) fn gathers(&self) -> [Operand; 2] {
        if self.swap_ab { [Operand::B, Operand::A] } else { [Operand::A, Operand::B] }
    }

    /// The operand that is gathered, as one load brings it: all of a CTA's pixels, or as many as a stage is deep.
    pub(super) fn gathered(&self) -> Im2colTile {
        let (pixels, ty) = match self.kind {
            Kind::Gather { .. } => (self.main.tile.loaded(self.gathers()[0]), self.main.a),
            Kind::Filter => (self.main.depth(), self.main.b),
        };
        Im2colTile { pixels, ty: map_type(ty), spatial: self.spatial }
    }

    /// Its map; where a cluster shares a depth, the launch says how many pixels one load brings.
    pub(super) fn gathered_map(&self) -> MapDecl {
        let map = self.gathered().map();
        if self.shares_depth() { map.with_open_box() } else { map }
    }

    /// The map of dy: panels as a third dim where one load brings all of a tile.
    pub(super) fn dy_map(&self) -> MapDecl {
        let (tile, depth) = (self.main.clipped(Operand::A).map(), self.main.depth());
        if self.transposes_tiles() { MapDecl { box_dims: vec![depth, depth, self.main.tile.m / depth], ..tile } } else { tile }
    }

    /// The instruction of tiles that are transposed in shared memory.
    pub(super) fn transposed_shape(&self) -> WgmmaShape {
        WgmmaShape { a_in_registers: true, transpose_a: false, transpose_b: false, ..self.main.shape() }
    }

    /// The epilogue store.
    pub(super) fn store(&self) -> StoreSpec {
        StoreSpec {
            out: self.out,
            transposed: self.writes_transposed(),
            tile_columns: self.main.tile.n,
            warpgroups: self.main.tile.consumers,
            barrier: FIRST_BARRIER,
            epilogue: self.epilogue.clone(),
            has_sums: self.has_sums,
        }
    }

    /// The same spec with as many stages as shared memory holds; nothing where its parts do not suit each other.
    pub(super) fn fitted(mut self) -> Option<Spec> {
        let (tile, panel) = (&self.main.tile, self.main.depth());
        // Each load of a stage is prepared in uniform registers, of which there are 63: with more loads than these the assembler spills
        // some.
        let loads = [Operand::A, Operand::B].map(|operand| tile.loaded(operand) / panel);
        let loads_fit = self.kind != Kind::Filter || self.transposes_tiles() || (loads[1] <= 3 && loads[0] + loads[1] <= 5);
        let alone = !self.transposes_tiles() || tile.peers() == 1 && !tile.ping_pong;
        // Under swap-AB, CTAs may share pixels, in whole swizzle atoms.
        let shares = !tile.ping_pong && tile.cluster[1] == 1 && tile.loaded(Operand::B).is_multiple_of(8);
        let lies = !self.swap_ab || shares && tile.n.is_multiple_of(8 * tile.cluster_split);
        if !(alone && lies && loads_fit && self.main.ends_with_panels(Operand::B) && stores_whole_panels(&self.store())) {
            return None;
        }
        let store = match self.split {
            Split::Reduced => 0,
            Split::No if self.shares_depth() => self.cluster_split_k().shared_bytes(),
            Split::No | Split::Fixup => self.store().shared_bytes(),
        };
        // Where tiles are transposed in shared memory, a barrier more for each stage, and the places of the panels.
        let (places, barrier) = if self.transposes_tiles() { (16 * (tile.n / 32), 8) } else { (0, 0) };
        let paces = if self.clears() { 16 * PACES } else { 0 };
        self.main = self.main.fitted(store + places + paces, barrier)?;
        Some(self)
    }

    /// Cluster split-K of a swap-AB tile.
    pub(super) fn cluster_split_k(&self) -> ClusterSplitKSpec {
        let tile = &self.main.tile;
        ClusterSplitKSpec {
            ctas: tile.cluster_split,
            apart: tile.peers(),
            once: true,
            warpgroups: tile.consumers,
            blocks: tile.blocks(),
            columns: tile.n,
            barrier: FIRST_BARRIER,
        }
    }

    /// Registers of a producer's and of a consumer's thread.
    pub(super) fn registers(&self) -> [u32; 2] {
        match (self.main.tile.consumers, self.kind) {
            // Warps beside the one that loads transpose tiles.
            (1 | 2, Kind::Filter) if self.transposes_tiles() => [72, 216],
            // The producer knows a tap and a channel for each panel of columns.
            (1 | 2, Kind::Filter) => [56, 224],
            _ => self.main.tile.registers(),
        }
    }

    /// Builds the kernel.
    pub(super) fn build(&self) -> KernelBody {
        let header = self.main.header(self.to_string());
        match (self.transposes_tiles(), self.main.is_integer()) {
            (true, _) => build(header, |k| transposed_tiles::convolve(k, self)),
            (_, true) => build(header, |k| kernel::convolve::<i32>(k, self)),
            _ => build(header, |k| kernel::convolve::<f32>(k, self)),
        }
    }
}
