//! What follows a tile's main loop: the parts of a depth that was split come together, and results leave.

use verdigris_kir::face::{Kernel, Val, Var};
use verdigris_kir::tile::fragment::Fragment;
use verdigris_kir::tile::schedule::Work;

use super::share::{Consumer, Place};
use super::spec::{Spec, Split, WARPGROUP};
use crate::parts::add_parts::Parts;
use crate::parts::batch::BatchIndex;
use crate::parts::cluster_join::ClusterJoin;
use crate::parts::join::{Join, Part};
use crate::parts::way_out::{Sum, Tile, Way};

/// The parameters and the shared memory of what follows.
pub(super) struct Ending<'k> {
    kernel: Kernel<'k>,
    consumers: u32,
    /// CTAs that take neighbouring tiles.
    cluster: u32,
    batch: BatchIndex<'k>,
    /// How results leave; they do not where parts are added up by a launch of their own.
    way: Option<Way<'k>>,
    joining: Joining<'k>,
}

/// How the parts of a tile come together.
enum Joining<'k> {
    No,
    Scratch(Join<'k>),
    Cluster { join: ClusterJoin<'k>, blocks: u32, columns: u32 },
    Later(Parts<'k>),
}

/// What a warpgroup keeps from tile to tile.
pub(super) struct Kept<'k, T> {
    /// The sums of this CTA's columns, where a cluster joins.
    joined: Vec<Fragment<'k, T>>,
    turn: Var<'k, u32>,
}

impl<'k> Ending<'k> {
    /// Declares the parameters.
    pub(super) fn declare(k: Kernel<'k>, spec: &Spec, batch: BatchIndex<'k>) -> Self {
        let way = (spec.split != Split::Reduced).then(|| spec.way().declare(k));
        let joining = match (spec.cluster_join(), spec.split) {
            (Some(join), _) => Joining::Cluster { join: join.declare(k), blocks: spec.blocks(), columns: join.slice_columns() },
            (None, Split::No) => Joining::No,
            (None, Split::Joined) => Joining::Scratch(Join::declare(k, spec.consumers, super::spec::FIRST_BARRIER)),
            (None, Split::Reduced) => Joining::Later(Parts::declare(k, spec.part_tile())),
        };
        Ending { kernel: k, consumers: spec.consumers, cluster: spec.cluster, batch, way, joining }
    }

    /// Initializes barriers: by one thread, before they are published.
    pub(super) fn init(&self) {
        if let Joining::Cluster { join, .. } = &self.joining {
            join.init();
        }
    }

    /// What a warpgroup needs before its first tile.
    pub(super) fn begin<T: Sum>(&self) -> Kept<'k, T> {
        let k = self.kernel;
        let joined = match self.joining {
            Joining::Cluster { blocks, columns, .. } => (0..blocks).map(|_| Fragment::unset(k, columns)).collect(),
            _ => Vec::new(),
        };
        Kept { joined, turn: k.var_named("turn", 0u32) }
    }

    /// A warpgroup's results of a piece of work, on their way.
    pub(super) fn take<T: Sum>(&self, kept: &Kept<'k, T>, results: &[Fragment<'k, T>], work: &Work<'k>, place: Place<'k>) {
        let k = self.kernel;
        let Place { tile: [tile_row, tile_column], first: [row, column], rank, peer, by: Consumer { warpgroup, thread, .. } } = place;
        let tile = || Tile { row, column, batch: work.batch, indices: self.batch.split(work.batch), warpgroup, thread };
        let write = |sums: &[Fragment<'k, T>], tile: &Tile<'k>| {
            if let Some(way) = &self.way {
                way.write(sums, tile);
            }
        };
        match &self.joining {
            Joining::No => write(results, &tile()),
            Joining::Scratch(join) => {
                let tile = tile();
                let owner = (work.tile * self.cluster + peer) * self.consumers + warpgroup;
                let last = join.is_last(results, Part { owner, part: work.part, parts: work.parts, warpgroup, thread });
                k.when(last, || write(results, &tile));
            }
            Joining::Cluster { join, columns, .. } => {
                let tile = tile();
                join.sum(results, &kept.joined, kept.turn, k.thread() - WARPGROUP);
                write(&kept.joined, &Tile { column: column + rank * *columns, ..tile });
            }
            Joining::Later(parts) => {
                let sums = results.iter().flat_map(|sum| sum.registers()).copied();
                parts.keep(sums, [tile_row, tile_column, work.batch, work.part], warpgroup, thread);
            }
        }
    }

    /// D's extents, where results leave.
    pub(super) fn extents(&self) -> Option<[Val<'k, u32>; 2]> {
        self.way.as_ref().map(Way::extents)
    }

    /// Before the kernel ends.
    pub(super) fn finish<T>(&self, kept: &Kept<'k, T>, thread: Val<'k, u32>) {
        if let Some(way) = &self.way {
            way.finish(thread);
        }
        if let Joining::Cluster { join, .. } = &self.joining {
            // A peer may still tell this CTA that it has taken its slice.
            join.drain(kept.turn);
        }
    }
}
