//! What shapes the kernel: everything that is chosen before it is built, and what follows from that.

use std::fmt;

use verdigris_kir::face::{Header, build};
use verdigris_kir::ir::KernelBody;
use verdigris_kir::tile::operand::Major;
use verdigris_kir::tile::schedule::Work;

use super::block_factors::Scaled;
use super::kernel;
use crate::fuse::epilogue::EpilogueSpec;
use crate::hopper::FIRST_BARRIER;
use crate::hopper::aligning::{AligningSpec, Way};
use crate::hopper::epilogue::stores_whole_panels;
use crate::hopper::spec::{MainLoopSpec, Split};
use crate::hopper::sums::Keep;
use crate::split_k::cluster::ClusterSplitKSpec;
use crate::store::{Out, StoreSpec};

/// Everything that shapes the kernel; extents are arguments.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Spec {
    pub(super) main: MainLoopSpec,
    /// Stages of the windows of operands whose lines begin anywhere ([`crate::hopper::aligning`]); 0 where TMA brings operands as they lie.
    pub(super) waiting: u32,
    /// How A and B come.
    pub(super) ways: [Way; 2],
    /// The depth of tiles may be split among CTAs.
    pub(super) split: Split,
    /// Factors of A's and of B's blocks, by which promoted sums are multiplied.
    pub(super) scaled: [Scaled; 2],
    pub(super) out: Out,
    /// D is written transposed: its contiguous lines are columns of the tile, as under swap-AB.
    pub(super) swap_ab: bool,
    /// The even rows of D are one matrix and the odd ones another, whose tiles begin earlier: see [`super::interleaved`].
    pub(super) interleaved: bool,
    /// The depth runs over planes: see [`super::planes`].
    pub(super) planes: bool,
    /// What stands between sums and D, for the problem as it is computed.
    pub(super) epilogue: EpilogueSpec,
}

impl fmt::Display for Spec {
    /// `gemm_wgmma_bf16_bf16_kk_128x256_s4_c2_x2b_split_bf16_map` and so on: the entry's name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let main = &self.main;
        let [a_letter, b_letter] = main.majors.map(|major| if major == Major::Depth { 'k' } else { 'r' });
        write!(f, "gemm_wgmma_{}_{}_{a_letter}{b_letter}_{main}", main.a, main.b)?;
        if main.tile.cluster_split > 1 {
            write!(f, "_k{}", main.tile.cluster_split)?;
        }
        if self.waiting > 0 {
            write!(f, "_aligns{}", self.waiting)?;
            if self.ways != [Way::Moved; 2] {
                let [a, b] = self.ways.map(Way::letter);
                write!(f, "{a}{b}")?;
            }
        }
        for (on, word) in [
            (main.tile.ping_pong, "_pingpong"),
            (main.keep == Keep::Halves, "_f16sum"),
            (self.split == Split::Fixup, "_split"),
            (main.promotes(), "_promote"),
            (main.terms > 1, "_terms"),
            (self.swap_ab, "_turned"),
            (self.interleaved, "_interleaved"),
            (self.planes, "_planes"),
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
    /// The named barrier behind the consumers' own: of their order under ping-pong, or of cluster split-K.
    pub(super) fn barrier(&self) -> u32 {
        FIRST_BARRIER + self.main.tile.consumers
    }

    /// Of interleaved matrices each has every other row of tiles: so those of both that lie between each other are stored together.
    pub(super) fn matrix_of<'k>(&self, work: Work<'k>) -> Work<'k> {
        if self.interleaved { Work { row: work.row >> 1, batch: work.row & 1, ..work } } else { work }
    }

    /// What brings operands whose lines begin anywhere.
    pub(super) fn aligning(&self) -> Option<AligningSpec> {
        (self.waiting > 0).then_some(AligningSpec { main: self.main, ways: self.ways, waiting: self.waiting })
    }

    pub(super) fn cluster_split_k(&self) -> Option<ClusterSplitKSpec> {
        let tile = &self.main.tile;
        (tile.cluster_split > 1).then(|| ClusterSplitKSpec {
            ctas: tile.cluster_split,
            apart: 1,
            once: false,
            warpgroups: tile.consumers,
            blocks: tile.blocks(),
            columns: tile.n,
            barrier: self.barrier(),
        })
    }

    /// The same spec with as many stages as shared memory holds; nothing where its parts do not suit each other.
    pub(super) fn fitted(mut self) -> Option<Spec> {
        let (tile, promotes) = (&self.main.tile, self.main.promotes());
        // The factors of a thread's columns stand beside two sets of accumulators; sums in f16 beside their widened ones for a while.
        let registers_fit = tile.accumulators() <= if self.main.keep == Keep::Halves { 64 * 160 } else { 64 * 256 }
            && (!promotes || self.scaled[1] != Scaled::Lines || tile.consumers <= 2);
        let (store, cluster_split_k) = (self.store(), self.cluster_split_k());
        let beside_bytes = store.shared_bytes() + cluster_split_k.map_or(0, |split_k| split_k.shared_bytes());
        if self.waiting > 0 {
            let aligning = AligningSpec::fitted(self.main, self.ways, beside_bytes)?;
            (self.main, self.waiting) = (aligning.main, aligning.waiting);
        } else {
            self.main = self.main.fitted(beside_bytes, 0)?;
        }
        (registers_fit && stores_whole_panels(&store)).then_some(self)
    }

    /// The epilogue store of results to D.
    pub(super) fn store(&self) -> StoreSpec {
        StoreSpec {
            out: self.out,
            transposed: self.swap_ab,
            tile_columns: self.main.tile.n / self.main.tile.cluster_split,
            warpgroups: self.main.tile.consumers,
            barrier: FIRST_BARRIER,
            epilogue: self.epilogue.clone(),
            has_sums: false,
        }
    }

    /// Builds the kernel.
    pub(super) fn build(&self) -> KernelBody {
        let header = self.main.header(self.to_string());
        let threads = self.aligning().map_or(header.threads, |aligning| aligning.threads());
        let header = Header { threads, ..header };
        match self.main.is_integer() {
            true => build(header, |k| kernel::gemm::<i32>(k, self)),
            false => build(header, |k| kernel::gemm::<f32>(k, self)),
        }
    }
}
