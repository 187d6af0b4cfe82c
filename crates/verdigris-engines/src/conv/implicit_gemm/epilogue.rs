//! The epilogue of a tile: parts of a split depth go to scratch or are added up, whole sums are stored.

use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::tile::fragment::Fragment;
use verdigris_kir::tile::schedule::Work;

use super::kernel::TileStore;
use super::producer::Target;
use super::spec::Spec;
use super::swap_ab::{Place, SwapAbStore, SwapAbValues};
use crate::hopper::share::{Consumer, Share};
use crate::hopper::spec::TileShape;
use crate::hopper::{FIRST_BARRIER, WARPGROUP};
use crate::layout::batch::BatchIndex;
use crate::split_k::fixup::{Fixup, FixupValues};
use crate::split_k::reduction::{Parts, PartsValues};
use crate::store::{Store, Sum, Tile};

/// The parameters and the shared memory of the epilogue.
pub(super) struct TileEpilogue<'k> {
    kernel: Kernel<'k>,
    shape: TileShape,
    parts: Option<Parts<'k>>,
    swap_ab: Option<SwapAbStore<'k>>,
    store: Option<(BatchIndex<'k>, Store<'k>)>,
    fixup: Option<Fixup<'k>>,
}

impl<'k> TileEpilogue<'k> {
    /// Declares the shared memory.
    pub(super) fn new(
        k: Kernel<'k>,
        spec: &Spec,
        parts: Option<PartsValues<'k>>,
        swap_ab: Option<SwapAbValues<'k>>,
        store: Option<TileStore<'k>>,
        fixup: Option<FixupValues<'k>>,
    ) -> Self {
        let shape = spec.main.tile;
        TileEpilogue {
            kernel: k,
            shape,
            parts: parts.map(|parts| Parts::new(k, parts, shape.parts())),
            swap_ab: swap_ab.map(|swap_ab| SwapAbStore::new(k, swap_ab, spec)),
            store: store.map(|TileStore { batch, store }| (batch, Store::new(k, store, spec.store()))),
            fixup: fixup.map(|fixup| Fixup::new(k, fixup, shape.consumers, FIRST_BARRIER)),
        }
    }

    /// Initializes barriers: by one thread, before they are published.
    pub(super) fn init(&self) {
        self.swap_ab.iter().for_each(|swap_ab| swap_ab.init());
    }

    /// A warpgroup's results of a piece of work, on their way. `pixels` are those of a tile, where a cluster shares its depth.
    pub(super) fn take<T: Sum>(
        &self,
        results: &[Fragment<'k, T>],
        work: &Work<'k>,
        target: &Target<'_, 'k>,
        share: Share<'k>,
        own: Consumer<'k>,
        pixels: impl FnOnce() -> Val<'k, u32>,
    ) {
        let (k, Consumer { thread, warpgroup, first_row, .. }) = (self.kernel, own);
        if let Some(parts) = &self.parts {
            let place = [share.row(work), share.column(work), target.batch, work.part];
            parts.keep(results.iter().flat_map(|sum| sum.registers()).copied(), place, warpgroup, thread);
        }
        if let Some(swap_ab) = &self.swap_ab {
            let pixels = pixels();
            let place = Place { channel: share.row(work) * self.shape.m, pixel: work.column * pixels, pixels, batch: target.batch };
            swap_ab.write(results, &place, [first_row, k.thread() - WARPGROUP]);
        }
        let Some((batch, store)) = &self.store else { return };
        let tile = Tile {
            row: share.row(work) * self.shape.m + first_row,
            column: share.column(work) * self.shape.n,
            lead: None,
            batch: target.batch,
            indices: batch.split(target.batch),
            warpgroup,
            thread,
        };
        let write = || match &target.rows {
            None => store.write(results, &tile),
            Some(rows) => store.write_placed(results, &tile, &|row| rows.place(k, row)),
        };
        match &self.fixup {
            None => write(),
            Some(fixup) => k.when(fixup.is_last(results, share.part(work, own)), write),
        }
    }

    /// Stores zeros beside a tile: [`Store::clear_rows`], into the matrix of a group.
    pub(super) fn clear_rows(&self, column: Val<'k, u32>, group: Val<'k, u32>, place: (Val<'k, u32>, Val<'k, bool>)) {
        if let Some((batch, store)) = &self.store {
            store.clear_rows(column, batch.split(group), place);
        }
    }

    /// Before the kernel ends.
    pub(super) fn finish(&self, thread: Val<'k, u32>) {
        if let Some((_, store)) = &self.store {
            store.finish(thread);
        }
    }
}
