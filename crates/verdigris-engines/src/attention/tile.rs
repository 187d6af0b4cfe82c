//! Rows of a head in shared memory: filled by TMA, read by `wgmma` along the head or across it.

use std::panic::Location;

use verdigris_kir::face::{Kernel, LoadOptions, Mbarrier, TensorMap, Val};
use verdigris_kir::ir::{Access, MapDecl, MapType, Swizzle};
use verdigris_kir::program::{L2Promotion, MapSpec};

/// Bytes of one row of a panel: the span of the swizzle.
const PANEL_ROW_BYTES: u32 = 128;
/// Elements of such a row, of types of two bytes.
pub(super) const PANEL: u32 = 64;
/// Depth of one `wgmma`, in bytes.
const STEP_BYTES: u32 = 32;
/// The same in elements of two bytes.
const STEP: u32 = 16;

/// `rows` rows (queries or keys) of `elements` elements each: panels of 64 elements (128 of a byte), one behind the other, each with all rows under the
/// 128-byte swizzle. One copy serves products over the elements (*along*) and, of types of two bytes, products over the rows (*across*).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct HeadTile {
    pub(super) rows: u32,
    /// Whole steps of a `wgmma`; the last panel may be half empty.
    pub(super) elements: u32,
    pub(super) ty: MapType,
}

impl HeadTile {
    /// Elements of a row of a panel.
    const fn panel(&self) -> u32 {
        PANEL_ROW_BYTES / self.ty.bytes()
    }

    pub(super) const fn panels(&self) -> u32 {
        self.elements.div_ceil(self.panel())
    }

    const fn panel_bytes(&self) -> u32 {
        self.rows * PANEL_ROW_BYTES
    }

    pub(super) const fn bytes(&self) -> u32 {
        self.panels() * self.panel_bytes()
    }

    /// The map through which panels are copied: `{elements, rows, heads, batch}`. What lies beyond the tensor is read as zero and not written, so a
    /// head of fewer elements needs no copy.
    pub(super) fn map(&self, access: Access) -> MapDecl {
        MapDecl { ty: self.ty, rank: 4, box_dims: vec![self.panel(), self.rows, 1, 1], im2col: false, swizzle: Swizzle::B128, access }
    }

    /// The same where the launch says how many rows a copy brings.
    pub(super) fn open_map(&self, access: Access) -> MapDecl {
        self.map(access).with_open_box()
    }

    /// Loads all panels of the rows from `row` on: by one thread; the bytes complete on `barrier`.
    #[track_caller]
    pub(super) fn load<'k>(
        &self,
        slot: Val<'k, u32>,
        map: &TensorMap<'k>,
        at: [Val<'k, u32>; 3],
        barrier: Mbarrier<'k>,
        options: LoadOptions<'k>,
    ) {
        slot.kernel().scope(Location::caller(), || self.load_panels(slot, map, None, at, barrier, options));
    }

    /// Loads all panels of the elements from `first` on, of the first rows of a head: by one thread; the bytes complete on `barrier`.
    #[track_caller]
    pub(super) fn load_from<'k>(
        &self,
        slot: Val<'k, u32>,
        map: &TensorMap<'k>,
        first: Val<'k, u32>,
        [head, batch]: [Val<'k, u32>; 2],
        barrier: Mbarrier<'k>,
    ) {
        let k = slot.kernel();
        let at = [k.constant(0), head, batch];
        k.scope(Location::caller(), || self.load_panels(slot, map, Some(first), at, barrier, LoadOptions::default()));
    }

    /// Loads all panels of a box of rows, from `row` on, to the tile's rows from `first` on, a multiple of 8: by one thread; the bytes complete on `barrier`.
    #[track_caller]
    pub(super) fn load_at<'k>(
        &self,
        slot: Val<'k, u32>,
        first: Val<'k, u32>,
        map: &TensorMap<'k>,
        at: [Val<'k, u32>; 3],
        barrier: Mbarrier<'k>,
        options: LoadOptions<'k>,
    ) {
        let k = slot.kernel();
        k.scope(Location::caller(), || self.load_panels(slot + first * PANEL_ROW_BYTES, map, None, at, barrier, options));
    }

    fn load_panels<'k>(
        &self,
        slot: Val<'k, u32>,
        map: &TensorMap<'k>,
        first: Option<Val<'k, u32>>,
        [row, head, batch]: [Val<'k, u32>; 3],
        barrier: Mbarrier<'k>,
        options: LoadOptions<'k>,
    ) {
        let k = slot.kernel();
        for panel in 0..self.panels() {
            let element = panel * self.panel();
            let element = first.map_or_else(|| k.constant(element), |first| first + element);
            let at = [element, row, head, batch].map(|at| at.signed());
            k.tma_load(slot + panel * self.panel_bytes(), map, &at, barrier, options);
        }
    }

    /// Where the 16 bytes of chunk `chunk + 2 · pair` of a row stand, of rows that threads fill in themselves. All of them are in the panel
    /// of pair `pair`: `chunk` is below `8 − 2 · (pair mod 4)`.
    #[track_caller]
    pub(super) fn chunk<'k>(&self, slot: Val<'k, u32>, row: Val<'k, u32>, chunk: Val<'k, u32>, pair: u32) -> Val<'k, u32> {
        slot.kernel().scope(Location::caller(), || {
            let within = ((chunk + 2 * (pair % 4)) ^ (row & 7)) << 4;
            slot + (row * PANEL_ROW_BYTES + within) + pair / 4 * self.panel_bytes()
        })
    }

    /// Makes the rows from `first` on 0, by `threads` threads of the CTA from `first_thread` on. What copies bring there has landed.
    #[track_caller]
    pub(super) fn clear<'k>(&self, slot: Val<'k, u32>, first: Val<'k, u32>, [first_thread, threads]: [u32; 2]) {
        let k = slot.kernel();
        k.scope(Location::caller(), || {
            let zeros = [k.constant(0u32); 4];
            for panel in 0..self.panels() {
                k.range_step((first << 3) + (k.thread() - first_thread), self.rows * 8, threads, |chunk| {
                    k.st_shared_vector(slot + (chunk << 4), i64::from(panel * self.panel_bytes()), &zeros);
                });
            }
        });
    }

    /// The low word of a descriptor that reads along the head, from row `first_row` on.
    #[track_caller]
    pub(super) fn along<'k>(&self, slot: Val<'k, u32>, first_row: Val<'k, u32>) -> Val<'k, u32> {
        slot.kernel().scope(Location::caller(), || low(slot + first_row * PANEL_ROW_BYTES, 1))
    }

    /// How far it moves for `steps` steps: of 16 elements of two bytes, or 32 of one.
    pub(super) const fn along_steps(&self, steps: u32) -> u32 {
        let per_panel = PANEL_ROW_BYTES / STEP_BYTES;
        (steps / per_panel * self.panel_bytes() + steps % per_panel * STEP_BYTES) >> 4
    }

    /// The low word of a descriptor that reads across the head (transposed), from the first row on.
    #[track_caller]
    pub(super) fn across<'k>(&self, slot: Val<'k, u32>) -> Val<'k, u32> {
        slot.kernel().scope(Location::caller(), || low(slot, self.panel_bytes() >> 4))
    }

    /// How far it moves for `steps` steps of 16 rows.
    pub(super) const fn across_steps(&self, steps: u32) -> u32 {
        (steps * STEP * PANEL_ROW_BYTES) >> 4
    }

    /// How far it moves for `elements` elements: whole panels, or a part of one.
    pub(super) const fn across_elements(&self, elements: u32) -> u32 {
        (elements / PANEL * self.panel_bytes() + elements % PANEL * 2) >> 4
    }

    /// How far either moves for `slots` tiles that lie one behind the other.
    pub(super) fn slots<'k>(&self, slots: Val<'k, u32>) -> Val<'k, u32> {
        slots * (self.bytes() >> 4)
    }
}

fn low<'k>(start: Val<'k, u32>, leading: u32) -> Val<'k, u32> {
    ((start & 0x3ffff) >> 4) | (leading << 16)
}

/// The whole descriptor for a low word: eight rows are 1024 bytes.
#[track_caller]
pub(super) fn descriptor<'k>(low: Val<'k, u32>) -> Val<'k, u64> {
    let k: Kernel<'k> = low.kernel();
    k.join32(low, (1024 >> 4) | (1u32 << 30))
}

/// The map of `{elements, rows, heads, batch}` with the strides of the last three.
pub(super) fn head_map(decl: MapDecl, dims: [u64; 4], strides_bytes: [u64; 3]) -> MapSpec {
    MapSpec {
        decl,
        dims: dims.to_vec(),
        strides_bytes: strides_bytes.to_vec(),
        element_strides: vec![1; 4],
        lower_corner: vec![],
        upper_corner: vec![],
        fill: Default::default(),
        l2: L2Promotion::of_lines(&strides_bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_go_through_a_panel_and_on_to_the_next() {
        let tile = HeadTile { rows: 176, elements: 96, ty: MapType::Bf16 };
        assert_eq!((tile.panels(), tile.bytes()), (2, 2 * 176 * 128));
        assert_eq!(tile.along_steps(3), 3 * 32 / 16);
        assert_eq!(tile.along_steps(5), (176 * 128 + 32) / 16);
        assert_eq!(tile.across_steps(11), 176 * 128 / 16);
        let bytes = HeadTile { rows: 64, elements: 192, ty: MapType::U8 };
        assert_eq!((bytes.panels(), bytes.bytes(), bytes.along_steps(5)), (2, 2 * 64 * 128, (64 * 128 + 32) / 16));
        assert_eq!((tile.across_elements(64), tile.across_elements(32)), (176 * 128 / 16, 64 / 16));
    }
}
