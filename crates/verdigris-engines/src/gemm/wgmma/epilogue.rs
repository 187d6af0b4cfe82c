//! The epilogue of a tile: the parts of a split depth are reduced, and results are stored.

use verdigris_kir::face::{Kernel, Val, Var};
use verdigris_kir::tile::fragment::Fragment;
use verdigris_kir::tile::schedule::Work;

use super::spec::Spec;
use crate::hopper::FIRST_BARRIER;
use crate::hopper::share::{Consumer, Share};
use crate::hopper::spec::TileShape;
use crate::layout::batch::BatchIndex;
use crate::split_k::cluster::ClusterSplitK;
use crate::split_k::fixup::{Fixup, FixupValues};
use crate::split_k::reduction::{Parts, PartsValues};
use crate::store::{Store, StoreValues, Sum, Tile};

/// The parameters and the shared memory of the epilogue.
pub(super) struct TileEpilogue<'k> {
    kernel: Kernel<'k>,
    batch: BatchIndex<'k>,
    lead: Option<Val<'k, u32>>,
    /// How results leave; they do not where parts are added up by a launch of their own.
    store: Option<Store<'k>>,
    reduction: SplitReduction<'k>,
}

/// How the parts of a tile are reduced.
enum SplitReduction<'k> {
    No,
    Scratch(Fixup<'k>),
    Cluster { exchange: ClusterSplitK<'k>, blocks: u32, columns: u32 },
    Later(Parts<'k>),
}

/// What a warpgroup keeps from tile to tile.
pub(super) struct Kept<'k, T> {
    /// The sums of this CTA's columns, under cluster split-K.
    slice_sums: Vec<Fragment<'k, T>>,
    turn: Var<'k, u32>,
}

/// Where the results of a piece of work belong, and who has them.
#[derive(Clone, Copy)]
pub(super) struct Place<'k> {
    /// Row and column of tiles.
    tile: [Val<'k, u32>; 2],
    /// First row and column of the warpgroup's results.
    pub(super) first: [Val<'k, u32>; 2],
    share: Share<'k>,
    by: Consumer<'k>,
}

impl<'k> Place<'k> {
    pub(super) fn new(share: Share<'k>, shape: TileShape, work: &Work<'k>, by: Consumer<'k>) -> Self {
        let tile = [share.row(work), share.column(work)];
        Place { tile, first: [tile[0] * shape.m + by.first_row, tile[1] * shape.n], share, by }
    }
}

impl<'k> TileEpilogue<'k> {
    /// Declares the shared memory.
    pub(super) fn new(
        k: Kernel<'k>,
        spec: &Spec,
        (batch, lead): (BatchIndex<'k>, Option<Val<'k, u32>>),
        store: Option<StoreValues<'k>>,
        fixup: Option<FixupValues<'k>>,
        parts: Option<PartsValues<'k>>,
    ) -> Self {
        let store = store.map(|store| Store::new(k, store, spec.store()));
        let reduction = match (spec.cluster_split_k(), fixup, parts) {
            (Some(fixup), ..) => {
                SplitReduction::Cluster { exchange: fixup.declare(k), blocks: spec.main.tile.blocks(), columns: fixup.slice_columns() }
            }
            (None, Some(fixup), _) => SplitReduction::Scratch(Fixup::new(k, fixup, spec.main.tile.consumers, FIRST_BARRIER)),
            (None, None, Some(parts)) => SplitReduction::Later(Parts::new(k, parts, spec.main.tile.parts())),
            (None, None, None) => SplitReduction::No,
        };
        TileEpilogue { kernel: k, batch, lead, store, reduction }
    }

    /// Initializes barriers: by one thread, before they are published.
    pub(super) fn init(&self) {
        if let SplitReduction::Cluster { exchange, .. } = &self.reduction {
            exchange.init();
        }
    }

    /// What a warpgroup needs before its first tile.
    pub(super) fn begin<T: Sum>(&self) -> Kept<'k, T> {
        let k = self.kernel;
        let slice_sums = match self.reduction {
            SplitReduction::Cluster { blocks, columns, .. } => (0..blocks).map(|_| Fragment::unset(k, columns)).collect(),
            _ => Vec::new(),
        };
        Kept { slice_sums, turn: k.var_named("turn", 0u32) }
    }

    /// A warpgroup's results of a piece of work, on their way.
    pub(super) fn take<T: Sum>(&self, kept: &Kept<'k, T>, results: &[Fragment<'k, T>], work: &Work<'k>, place: Place<'k>) {
        let k = self.kernel;
        let Place { tile: [tile_row, tile_column], first: [row, column], share, by } = place;
        let Consumer { warpgroup, thread, .. } = by;
        let lead = self.lead.map(|lead| lead * work.batch);
        let tile = || Tile { row, column, lead, batch: work.batch, indices: self.batch.split(work.batch), warpgroup, thread };
        let write = |sums: &[Fragment<'k, T>], tile: &Tile<'k>| {
            if let Some(store) = &self.store {
                store.write(sums, tile);
            }
        };
        match &self.reduction {
            SplitReduction::No => write(results, &tile()),
            SplitReduction::Scratch(fixup) => {
                let tile = tile();
                let last = fixup.is_last(results, share.part(work, by));
                k.when(last, || write(results, &tile));
            }
            SplitReduction::Cluster { exchange, columns, .. } => {
                let tile = tile();
                exchange.sum(results, &kept.slice_sums, kept.turn, by.index());
                write(&kept.slice_sums, &Tile { column: column + share.depth_rank * *columns, ..tile });
            }
            SplitReduction::Later(parts) => {
                let sums = results.iter().flat_map(|sum| sum.registers()).copied();
                parts.keep(sums, [tile_row, tile_column, work.batch, work.part], warpgroup, thread);
            }
        }
    }

    /// D's extents, where results leave.
    pub(super) fn extents(&self) -> Option<[Val<'k, u32>; 2]> {
        self.store.as_ref().map(Store::extents)
    }

    /// Before the kernel ends.
    pub(super) fn finish<T>(&self, kept: &Kept<'k, T>, thread: Val<'k, u32>) {
        if let Some(store) = &self.store {
            store.finish(thread);
        }
        if let SplitReduction::Cluster { exchange, .. } = &self.reduction {
            // A peer may still tell this CTA that it has taken its slice.
            exchange.drain(kept.turn);
        }
    }
}
