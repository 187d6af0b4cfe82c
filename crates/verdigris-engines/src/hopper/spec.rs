//! What shapes a main loop, and what follows from that.

use std::fmt;

use verdigris_kir::face::Header;
use verdigris_kir::inst::{MatrixType, WgmmaShape};
use verdigris_kir::ir::Target;
use verdigris_kir::tile::clip::ClippedTile;
use verdigris_kir::tile::fragment::wgmma_shape;
use verdigris_kir::tile::operand::{Major, OperandTile};
use verdigris_tensor::DType;

use super::sums::Keep;
use super::{SHARED_BYTES, WARPGROUP};
use crate::fuse::formats::{map_type, matrix_type};
use crate::split_k::reduction::PartTile;

/// An operand of the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Operand {
    A,
    B,
}

/// What becomes of tiles whose depth is split over the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Split {
    /// There are none.
    No,
    /// Fixup: whoever finishes last adds the parts up and stores.
    Fixup,
    /// Every part of every tile goes to scratch; the launch of [`crate::split_k::reduction`] that follows adds them up.
    Reduced,
}

/// A CTA's tile, and how consumers and CTAs share it: what is chosen of a main loop, not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TileShape {
    /// Rows and columns.
    pub(crate) m: u32,
    pub(crate) n: u32,
    /// Warpgroups that multiply; each takes an equal share of the tile's rows, or takes whole tiles under ping-pong.
    pub(crate) consumers: u32,
    /// CTAs of a cluster that take neighbouring tiles: so many one below the other, which share B, and so many side by side, which share A.
    pub(crate) cluster: [u32; 2],
    /// Cluster split-K: CTAs of a cluster among which the depth of each tile is split, a power of two; 1 for none.
    pub(crate) cluster_split: u32,
    /// Ping-pong: the consumers alternate in whole tiles.
    pub(crate) ping_pong: bool,
}

impl TileShape {
    /// Clusters of `cluster` CTAs that share one operand.
    pub(crate) const fn new(m: u32, n: u32, consumers: u32, cluster: u32, shared: Operand) -> Self {
        let cluster = match shared {
            Operand::A => [1, cluster],
            Operand::B => [cluster, 1],
        };
        TileShape { m, n, consumers, cluster, cluster_split: 1, ping_pong: false }
    }

    /// Clusters of so many CTAs one below the other, and so many side by side, that share both operands: each loads a part of both.
    pub(crate) const fn sharing(m: u32, n: u32, consumers: u32, cluster: [u32; 2]) -> Self {
        TileShape { cluster, ..TileShape::new(m, n, consumers, 1, Operand::B) }
    }

    /// Ping-pong of two consumers; CTAs of a cluster share B.
    pub(crate) const fn ping_pong(m: u32, n: u32, cluster: u32) -> Self {
        TileShape { ping_pong: true, ..TileShape::new(m, n, 2, cluster, Operand::B) }
    }

    /// Clusters of `ctas` that split the depth of each tile, and of `cluster` times as many that share B besides.
    pub(crate) const fn deep(m: u32, n: u32, consumers: u32, cluster: u32, ctas: u32) -> Self {
        TileShape { cluster_split: ctas, ..TileShape::new(m, n, consumers, cluster, Operand::B) }
    }

    /// Rows of A, or columns of B.
    pub(crate) fn extent(&self, operand: Operand) -> u32 {
        match operand {
            Operand::A => self.m,
            Operand::B => self.n,
        }
    }

    /// Rows of A (columns of B) that one CTA loads of a tile; the rest comes from its peers.
    pub(crate) fn loaded(&self, operand: Operand) -> u32 {
        self.extent(operand) / self.sharers_of(operand)
    }

    /// CTAs of a cluster that an operand's tile is loaded for at once.
    pub(crate) fn sharers_of(&self, operand: Operand) -> u32 {
        let [down, across] = self.cluster;
        match operand {
            Operand::A => across,
            Operand::B => down,
        }
    }

    /// CTAs of a cluster that take neighbouring tiles.
    pub(crate) fn peers(&self) -> u32 {
        self.cluster[0] * self.cluster[1]
    }

    /// Rows and columns of clusters' tiles that cover a matrix.
    pub(crate) fn clusters(&self, [rows, columns]: [u32; 2]) -> [u32; 2] {
        let [down, across] = self.cluster;
        [rows.div_ceil(self.m).div_ceil(down), columns.div_ceil(self.n).div_ceil(across)]
    }

    /// CTAs of a cluster.
    pub(crate) fn ctas(&self) -> u32 {
        self.peers() * self.cluster_split
    }

    pub(crate) fn threads(&self) -> u32 {
        WARPGROUP * (1 + self.consumers)
    }

    /// Consumers that share a tile.
    pub(crate) fn sharers(&self) -> u32 {
        if self.ping_pong { 1 } else { self.consumers }
    }

    /// 64-row blocks of one consumer.
    pub(crate) fn blocks(&self) -> u32 {
        self.m / (64 * self.sharers())
    }

    /// Accumulators of one consumer.
    pub(crate) fn accumulators(&self) -> u32 {
        self.m * self.n / self.sharers()
    }

    /// The tile as parts are kept of it.
    pub(crate) fn parts(&self) -> PartTile {
        PartTile { rows: self.m, columns: self.n, warpgroups: self.consumers }
    }

    /// Registers of a producer's and of a consumer's thread, where the producer's one warp keeps little.
    pub(crate) fn registers(&self) -> [u32; 2] {
        if self.consumers <= 2 { [40, 232] } else { [32, 160] }
    }
}

/// Everything that shapes a main loop; extents are arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MainLoopSpec {
    pub(crate) tile: TileShape,
    pub(crate) a: DType,
    pub(crate) b: DType,
    /// What is contiguous in A and in B.
    pub(crate) majors: [Major; 2],
    /// Terms of which each element of A and of B is the sum ([`crate::terms`]); 1 for operands as they are. A step of depth then fills as many
    /// stages, one for each term of both.
    pub(crate) terms: u32,
    pub(crate) stages: u32,
    pub(crate) keep: Keep,
}

impl fmt::Display for MainLoopSpec {
    /// `128x256_s4_c2_x2b` and so on: tile, stages, consumers, the tiles of a cluster and what they share.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TileShape { m, n, consumers, cluster, .. } = self.tile;
        write!(f, "{m}x{n}_s{}_c{consumers}", self.stages)?;
        match cluster {
            [1, 1] => Ok(()),
            [down, 1] => write!(f, "_x{down}b"),
            [1, across] => write!(f, "_x{across}a"),
            [down, across] => write!(f, "_x{down}x{across}"),
        }
    }
}

impl MainLoopSpec {
    /// The shared tile of an operand: where rows are contiguous, in whole panels, of which the last may reach into the next tile.
    pub(crate) fn operand(&self, operand: Operand) -> OperandTile {
        let (ty, major) = match operand {
            Operand::A => (self.a, self.majors[0]),
            Operand::B => (self.b, self.majors[1]),
        };
        let tile = OperandTile { rows: self.tile.extent(operand), ty: map_type(ty), major };
        let rows = if major == Major::Rows { tile.rows.next_multiple_of(tile.depth()) } else { tile.rows };
        OperandTile { rows, ..tile }
    }

    /// Whether an operand's tile ends with a panel, and a CTA's share of it too.
    pub(crate) fn ends_with_panels(&self, operand: Operand) -> bool {
        self.operand(operand).major == Major::Depth || self.tile.loaded(operand).is_multiple_of(self.depth())
    }

    /// Whether an operand's tile suits the panels that it is loaded in. One that no other CTA shares may end within its last panel: what the tensor
    /// cores do not multiply, they do not spend time on. It is read from L2 all the same, which pays where it is no more than a fifth.
    fn suits_panels(&self, operand: Operand) -> bool {
        let (loaded, tile) = (self.operand(operand).rows, self.tile.extent(operand));
        self.ends_with_panels(operand) || self.tile.sharers_of(operand) == 1 && 5 * loaded <= 6 * tile
    }

    /// Tiles of one operand, of which this CTA loads a share.
    pub(crate) fn clipped(&self, operand: Operand) -> ClippedTile {
        let tile = self.operand(operand);
        ClippedTile { tile, loaded: tile.rows / self.tile.sharers_of(operand), pitch: self.tile.extent(operand) }
    }

    /// Elements of depth in one stage; also those of a line of 128 bytes.
    pub(crate) fn depth(&self) -> u32 {
        self.operand(Operand::A).depth()
    }

    /// The products of terms that are formed, as terms of A and of B, those of the smallest size first; those that are left out are smaller than
    /// the rounding of f32.
    pub(crate) fn products(&self) -> impl Iterator<Item = [u32; 2]> {
        let terms = self.terms;
        (0..terms).rev().flat_map(move |size| (0..=size).rev().map(move |a| [a, size - a]))
    }

    /// Sums are promoted after each step.
    pub(crate) fn promotes(&self) -> bool {
        self.keep == Keep::Promoted
    }

    pub(crate) fn is_integer(&self) -> bool {
        matches!(self.a, DType::I8 | DType::U8)
    }

    /// The instruction.
    pub(crate) fn shape(&self) -> WgmmaShape {
        let d = match (self.is_integer(), self.keep) {
            (true, _) => MatrixType::S32,
            (false, Keep::Halves) => MatrixType::F16,
            (false, Keep::InPlace | Keep::Promoted) => MatrixType::F32,
        };
        let [transpose_a, transpose_b] = self.majors.map(|major| major == Major::Rows);
        WgmmaShape { transpose_a, transpose_b, ..wgmma_shape(self.tile.n, matrix_type(self.a), matrix_type(self.b), d) }
    }

    /// The same spec with as many stages as shared memory holds beside `beside_bytes`, and `beside_stage_bytes` for each stage; nothing where
    /// that is less than two, or an operand does not suit the tile.
    pub(crate) fn fitted(self, beside_bytes: u32, beside_stage_bytes: u32) -> Option<Self> {
        // Two sets of accumulators.
        let registers_fit = !self.promotes() || self.tile.accumulators() <= 64 * 128;
        // With the stage's barriers, and room to align.
        let stage_bytes = self.operand(Operand::A).bytes() + self.operand(Operand::B).bytes() + beside_stage_bytes + 16;
        let stages = SHARED_BYTES.saturating_sub(beside_bytes + 64) / stage_bytes;
        // A step of terms is multiplied out of all its stages, while the next is on its way; consumers of whole tiles skip single stages.
        let terms_fit = self.terms == 1 || stages > self.terms && self.promotes() && !self.tile.ping_pong;
        let fits = self.ends_with_panels(Operand::A) && self.suits_panels(Operand::B) && registers_fit && stages >= 2 && terms_fit;
        fits.then_some(MainLoopSpec { stages: stages.min(12), ..self })
    }

    /// The head of the kernel of that name.
    pub(crate) fn header(&self, name: String) -> Header {
        Header { name, target: Target::Sm90a, threads: self.tile.threads(), min_ctas: 1, cluster: self.tile.ctas() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(tile: TileShape, majors: [Major; 2], keep: Keep) -> MainLoopSpec {
        MainLoopSpec { tile, a: DType::Bf16, b: DType::Bf16, majors, terms: 1, stages: 2, keep }
    }

    #[test]
    fn stages_fill_shared_memory() {
        let majors = [Major::Depth; 2];
        for (m, n, beside_bytes) in [(128, 256, 0), (128, 256, 65_536), (64, 16, 0), (256, 160, 40_000)] {
            let fitted = spec(TileShape::new(m, n, 2, 1, Operand::B), majors, Keep::InPlace).fitted(beside_bytes, 8).expect("fits");
            let bytes = |stages: u32| stages * ((m + n) * 128 + 24) + beside_bytes + 64;
            assert!(fitted.stages >= 2 && bytes(fitted.stages) <= SHARED_BYTES, "{fitted}");
            assert!(fitted.stages == 12 || bytes(fitted.stages + 1) > SHARED_BYTES, "{fitted}");
        }
        let large = spec(TileShape::new(256, 256, 2, 1, Operand::B), majors, Keep::InPlace);
        assert!(large.fitted(102_000, 0).is_none() && large.fitted(u32::MAX / 2, 0).is_none());
    }

    #[test]
    fn panels_are_whole_and_promoted_sums_have_two_sets_of_accumulators() {
        // Of a cluster's shared B each CTA loads half: 32 columns are no panel of 64.
        let shared = |n| spec(TileShape::new(128, n, 2, 2, Operand::B), [Major::Depth, Major::Rows], Keep::InPlace).fitted(0, 0);
        assert!(shared(64).is_none() && shared(128).is_some());
        // Alone, a CTA loads three panels for 160 columns; for 96, two would be a third too much.
        let alone = |n| spec(TileShape::new(128, n, 2, 1, Operand::B), [Major::Depth, Major::Rows], Keep::InPlace).fitted(0, 0);
        assert_eq!([160, 224, 96].map(|n| alone(n).map(|spec| spec.operand(Operand::B).rows)), [Some(192), Some(256), None]);
        assert_eq!(alone(160).map(|spec| spec.clipped(Operand::B).loaded), Some(192));
        let promoted =
            |n, consumers| spec(TileShape::new(128, n, consumers, 1, Operand::B), [Major::Depth; 2], Keep::Promoted).fitted(0, 0);
        assert!(promoted(128, 2).is_some() && promoted(256, 2).is_none() && promoted(128, 1).is_none());
        let ping_pong = spec(TileShape::ping_pong(128, 128, 1), [Major::Depth; 2], Keep::Promoted);
        assert!(ping_pong.fitted(0, 0).is_none(), "each consumer has a whole tile");
    }

    #[test]
    fn clusters_cover_a_matrix() {
        let below = TileShape::new(128, 256, 2, 2, Operand::B);
        let beside = TileShape::new(128, 256, 2, 2, Operand::A);
        let both = TileShape::sharing(128, 96, 2, [4, 2]);
        assert_eq!([below, beside, both].map(|tile| tile.clusters([257, 257])), [[2, 2], [3, 1], [1, 2]]);
        let loaded = |tile: TileShape| (tile.loaded(Operand::A), tile.loaded(Operand::B));
        assert_eq!([below, beside, both].map(loaded), [(128, 128), (64, 256), (64, 24)]);
        assert_eq!([below, beside, both].map(|tile| tile.ctas()), [2, 2, 8]);
    }
}
