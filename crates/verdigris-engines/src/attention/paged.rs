//! Paged keys and values: pages of a few positions each, which a table names for each sequence.
//!
//! A block of keys comes in *boxes*, each within one page: as many keys as divide both a page and a block. How many those are is told at launch, so that one
//! kernel serves pages of all sizes. The table is data, which nobody has checked: whatever it holds, boxes are of pages that there are, and of a sequence's
//! entries only those in front of its length are read.

use std::panic::Location;

use verdigris_graph::{AttentionProblem, View};
use verdigris_kir::face::{Kernel, LoadOptions, Mbarrier, Pointer, TensorMap, Val};
use verdigris_kir::ir::Access;
use verdigris_kir::params::{Divide, Read};
use verdigris_kir::program::{Address, MapSpec};

use super::mapped;
use super::tile::HeadTile;
use crate::engine::{EngineId, Reason, Refusal};
use crate::layout::space::element;

/// Keys of the least box: the rows after which the swizzle of shared memory repeats.
const LEAST_BOX: u64 = 8;

verdigris_kir::parameters! {
    /// Which page has which keys.
    pub(super) struct Pages / #[derive(Clone, Copy, Debug)] PagesArgs of () as _spec {
        /// i32, with the bytes from one sequence to the next, and from one entry to the next.
        table: Read = 4,
        strides_bytes: [u64; 2],
        /// The number of the last page.
        last: u32,
        page_size: Divide,
        /// Keys of a box: a power of two.
        box_rows: u32,
    }
}

verdigris_kir::parameters! {
    /// Which page has which keys, for kernels that take keys which are paged or not: the launch says which.
    pub(super) struct PagesIfAny / #[derive(Clone, Copy, Debug)] PagesIfAnyArgs of () as _spec {
        pub(super) pages: PagesArgs = (),
        pub(super) is_paged: u32,
    }
}

/// Keys of a box of blocks of `block` keys.
fn box_rows(page_size: u64, block: u32) -> u64 {
    1 << page_size.trailing_zeros().min(block.trailing_zeros())
}

/// The map of keys or values that a kernel takes in blocks of `tile`, paged or not.
pub(super) fn map(p: &AttentionProblem, name: &str, view: &View, tile: HeadTile) -> (Address, MapSpec) {
    let mut decl = tile.map(Access::Read);
    if p.is_paged() {
        decl.box_dims[1] = box_rows(p.page_size, tile.rows) as u32;
    }
    mapped::map(decl, view, p.dims(name, view))
}

impl PagesArgs {
    /// Those of `p`, if its keys are paged, for a kernel that takes `block` keys at a time.
    pub(super) fn of(p: &AttentionProblem, block: u32) -> Option<PagesArgs> {
        let table = p.page_table.as_ref()?;
        Some(PagesArgs {
            table: element(table, []),
            strides_bytes: [0, 1].map(|i| table.strides[i] * 4),
            last: p.pages as u32 - 1,
            page_size: p.page_size as u32,
            box_rows: box_rows(p.page_size, block) as u32,
        })
    }
}

impl PagesIfAnyArgs {
    /// Those of `p`; some address of the problem stands for a table that it does not have.
    pub(super) fn of(p: &AttentionProblem, block: u32) -> PagesIfAnyArgs {
        let none = PagesArgs { table: element(&p.q, []), strides_bytes: [0; 2], last: 0, page_size: 1, box_rows: 1 };
        PagesIfAnyArgs { pages: PagesArgs::of(p, block).unwrap_or(none), is_paged: u32::from(p.is_paged()) }
    }
}

impl<'k> Pages<'k> {
    /// The entries of a batch.
    #[track_caller]
    pub(super) fn entries(&self, batch: Val<'k, u32>) -> Pointer<'k> {
        self.table.moved(batch.widen() * self.strides_bytes[0])
    }

    /// Where a key in front of the length is: within a page, and which.
    #[track_caller]
    pub(super) fn place(&self, k: Kernel<'k>, entries: Pointer<'k>, key: Val<'k, u32>) -> [Val<'k, u32>; 2] {
        let (entry, within) = self.page_size.split(key);
        let page = k.ld_global::<i32>(entries.moved(entry.widen() * self.strides_bytes[1]).address(), 0);
        [within, page.max(0).min(self.last.signed()).unsigned()]
    }

    /// Loads all panels of the keys (or values) from `first_key` on, of a batch that has `keys` of them: by one thread; the bytes complete on `barrier`.
    /// Boxes behind the last key repeat the one that has it.
    #[track_caller]
    pub(super) fn load(
        &self,
        tile: &HeadTile,
        slot: Val<'k, u32>,
        map: &TensorMap<'k>,
        [first_key, head, batch]: [Val<'k, u32>; 3],
        keys: Val<'k, u32>,
        barrier: Mbarrier<'k>,
    ) {
        let k: Kernel<'k> = slot.kernel();
        k.scope(Location::caller(), || {
            let entries = self.entries(batch);
            let last_box = (keys.max(1) - 1) & (k.constant(0u32) - self.box_rows);
            k.range_step(0, tile.rows, self.box_rows, |row| {
                let [within, page] = self.place(k, entries, (first_key + row).min(last_box));
                tile.load_at(slot, row, map, [within, head, page], barrier, LoadOptions::default());
            });
        });
    }
}

/// What kernels of tensor cores ask of paged keys that they take in blocks of `block`.
///
/// # Errors
/// A refusal that names the first requirement not met.
pub(super) fn require(id: EngineId, p: &AttentionProblem, block: u32) -> Result<(), Refusal> {
    let Some(table) = &p.page_table else { return Ok(()) };
    let rows = box_rows(p.page_size, block);
    id.require(rows >= LEAST_BOX, Reason::Extent, format_args!("pages of {} keys, taken are multiples of {LEAST_BOX}", p.page_size))?;
    let most = p.pages.max(p.page_size);
    id.require(
        most < mapped::MOST_ROWS,
        Reason::Extent,
        format_args!("{} pages of {} keys; each must be below 2^28", p.pages, p.page_size),
    )?;
    for stride in &table.strides {
        id.require(
            *stride < 1 << 38,
            Reason::Layout,
            format_args!("entries of the table of pages are {stride} elements apart, taken below 2^38"),
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
