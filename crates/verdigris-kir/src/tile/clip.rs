//! Operands that end within a tile: what lies beyond is not loaded.
//!
//! TMA fills rows outside of a tensor with zeros, and takes several times as long for that as for rows that it loads: on an H200 a
//! product of 64×4096×4096 in tiles of 64 rows takes 11.7 µs, and one of 8×4096×4096 in the same tiles 18.0. Nobody reads the sums of such
//! rows, so any number would do in their place. Boxes are therefore made to end with the operand, or to end near there and be left out
//! beyond, and what no load may ever reach is cleared once, for nothing may be read that was not written.

use super::operand::{Major, OperandTile, ROW_BYTES};
use crate::face::{Kernel, LoadOptions, Mbarrier, TensorMap, Val};
use crate::inst::{Fence, Scope};
use crate::ir::MapDecl;
use std::panic::Location;

/// The most boxes that bring a tile whose rows run along the depth.
const MOST_BOXES: u32 = 2;

/// An operand's tiles, of which this CTA loads `loaded` rows and its peers in the cluster the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClippedTile {
    /// The whole tile.
    pub tile: OperandTile,
    /// Rows that one CTA loads: all, or an equal share. At most 256, which a box may have.
    pub loaded: u32,
    /// Rows from a tile to the next: fewer than the tile's where its last panel is partly in the next tile.
    pub pitch: u32,
}

crate::parameters! {
    /// The parameters of a [`Clip`].
    #[derive(Clone, Copy)]
    pub struct ClipValues / #[derive(Clone, Copy, Debug, PartialEq, Eq)] ClipArgs of () as _spec {
        extent: u32,
        box_rows: u32,
        kept_bytes: u32,
    }
}

impl ClippedTile {
    /// The tensor map through which the tile is loaded; where rows run along the depth, the launch gives the box.
    pub fn map(&self) -> MapDecl {
        let whole = self.tile.map(self.loaded);
        if self.tile.major == Major::Depth { whole.with_open_box() } else { whole }
    }

    /// Rows of one load where they are contiguous: a panel.
    const fn panel_rows(&self) -> u32 {
        ROW_BYTES / self.tile.ty.bytes()
    }

    /// For an operand of `extent` rows, cut into `tiles` tiles, of which the last may begin beyond them.
    pub fn args(&self, extent: u32, tiles: u32) -> ClipArgs {
        let loaded = self.loaded;
        let ragged = extent % loaded;
        let box_rows = match self.tile.major {
            Major::Rows => self.panel_rows(),
            Major::Depth if extent < loaded => extent.max(1),
            // Half boxes, where they leave out half of the last.
            Major::Depth if (1..=loaded / MOST_BOXES).contains(&ragged) && loaded.is_multiple_of(8 * MOST_BOXES) => loaded / MOST_BOXES,
            Major::Depth => loaded,
        };
        // The rows of the tile that has the fewest.
        let last_begins = u64::from(tiles.max(1) - 1) * u64::from(self.pitch);
        let fewest = u64::from(extent).saturating_sub(last_begins).min(u64::from(self.tile.rows)) as u32;
        let kept_bytes = (fewest.div_ceil(box_rows) * box_rows).min(self.tile.rows) * ROW_BYTES;
        ClipArgs { extent, box_rows, kept_bytes }
    }

    /// For tiles that all have `extent` rows along the depth, of which each CTA loads an equal share in one box.
    pub fn args_of_share(&self, extent: u32) -> ClipArgs {
        ClipArgs { extent, box_rows: extent / (self.tile.rows / self.loaded), kept_bytes: extent * ROW_BYTES }
    }
}

impl ClipArgs {
    /// The map of the launch.
    pub fn boxed(&self, mut decl: MapDecl) -> MapDecl {
        if decl.has_open_box() {
            decl.box_dims[1] = self.box_rows;
            decl.box_dims[2..].fill(1);
        }
        decl
    }
}

/// The kernel's side.
#[derive(Clone, Copy)]
pub struct Clip<'k> {
    tile: ClippedTile,
    values: ClipValues<'k>,
}

impl<'k> Clip<'k> {
    /// Declares the parameters of [`ClipArgs`].
    #[track_caller]
    pub fn declare(k: Kernel<'k>, tile: ClippedTile) -> Self {
        Clip::new(tile, ClipValues::declare(k, &()))
    }

    /// Of parameters that a group declares.
    pub fn new(tile: ClippedTile, values: ClipValues<'k>) -> Self {
        Clip { tile, values }
    }

    /// Clears what no load writes in the tile's `stages` places from shared address `slots` on. By `threads` threads, of which this is
    /// number `thread`; a barrier of all of them is due behind it.
    #[track_caller]
    pub fn clear(&self, slots: Val<'k, u32>, stages: u32, thread: Val<'k, u32>, threads: u32) {
        let k = slots.kernel();
        k.scope(Location::caller(), || {
            let bytes = self.tile.tile.bytes();
            k.when(self.values.kept_bytes.lt(bytes), || {
                let zero = k.constant(0u32);
                k.range_step(self.values.kept_bytes + thread * 16u32, bytes, 16 * threads, |offset| {
                    k.range(stages, |stage| k.st_shared_vector(slots + stage * bytes + offset, 0, &[zero; 4]));
                });
                k.fence_proxy_async();
                // A peer's copies may land beside what was cleared.
                if k.cluster_ctas() > 1 {
                    k.fence(Fence::AcqRel(Scope::Cluster));
                }
            });
        });
    }

    /// Rows that a tile has whose first row is `first`.
    #[track_caller]
    pub fn rows(&self, first: Val<'k, u32>) -> Val<'k, u32> {
        first.kernel().scope(Location::caller(), || (self.values.extent - first.min(self.values.extent)).min(self.tile.tile.rows))
    }

    /// Rows of one box.
    pub fn box_rows(&self) -> Val<'k, u32> {
        self.values.box_rows
    }

    /// Bytes that arrive in each CTA for a tile of so many rows.
    #[track_caller]
    pub fn bytes(&self, rows: Val<'k, u32>) -> Val<'k, u32> {
        let k = rows.kernel();
        k.scope(Location::caller(), || match self.tile.tile.major {
            Major::Rows => {
                let panel = self.tile.panel_rows();
                ((rows + (panel - 1)) >> panel.trailing_zeros()) * (panel * ROW_BYTES)
            }
            Major::Depth => {
                let most = self.tile.tile.rows / self.tile.loaded * MOST_BOXES;
                let one = k.constant(1u32);
                let boxes = (0..most).map(|number| k.select(rows.gt(self.values.box_rows * number), one, 0u32));
                boxes.reduce(|sum, more| sum + more).unwrap_or(one) * self.values.box_rows * ROW_BYTES
            }
        })
    }

    /// Loads the rows from `first_row` of the tile on that this CTA brings, as far as they are among the tile's `rows`:
    /// [`OperandTile::load`].
    #[track_caller]
    #[allow(clippy::too_many_arguments, reason = "a load names both ends of the copy")]
    pub fn load(
        &self,
        slot: Val<'k, u32>,
        first_row: Val<'k, u32>,
        rows: Val<'k, u32>,
        map: &TensorMap<'k>,
        row: Val<'k, u32>,
        depth: Val<'k, u32>,
        batch: Val<'k, u32>,
        barrier: Mbarrier<'k>,
        options: LoadOptions<'k>,
    ) {
        let k = slot.kernel();
        k.scope(Location::caller(), || {
            let own = rows - first_row.min(rows);
            let slot = slot + first_row * ROW_BYTES;
            match self.tile.tile.major {
                Major::Rows => {
                    let panel = self.tile.panel_rows();
                    for number in 0..self.tile.loaded / panel {
                        let at = [(row + number * panel).signed(), depth.signed(), batch.signed()];
                        k.when(own.gt(number * panel), || k.tma_load(slot + number * panel * ROW_BYTES, map, &at, barrier, options));
                    }
                }
                Major::Depth => {
                    for number in 0..MOST_BOXES {
                        let beyond = self.values.box_rows * number;
                        let at = [depth.signed(), (row + beyond).signed(), batch.signed()];
                        k.when(own.gt(beyond) & beyond.lt(self.tile.loaded), || {
                            k.tma_load(slot + beyond * ROW_BYTES, map, &at, barrier, options);
                        });
                    }
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::MapType;

    /// Rows that the kernel loads of the tile that begins at row `first`: those of the boxes that it asks for, share by share.
    fn loaded_rows(tile: ClippedTile, args: ClipArgs, first: u32) -> u32 {
        let rows = args.extent.saturating_sub(first).min(tile.tile.rows);
        let boxes = if tile.tile.major == Major::Rows { tile.loaded / tile.panel_rows() } else { MOST_BOXES };
        let of_share = |begins: u32| {
            let asked = |number: &u32| rows.saturating_sub(begins) > number * args.box_rows && number * args.box_rows < tile.loaded;
            (0..boxes).filter(asked).count() as u32 * args.box_rows
        };
        (0..tile.tile.rows / tile.loaded).map(|share| of_share(share * tile.loaded)).sum()
    }

    #[test]
    fn every_row_is_loaded_or_cleared_and_few_beyond_the_operand_are_loaded() {
        for major in [Major::Depth, Major::Rows] {
            for (rows, loaded, pitch) in
                [(64, 64, 64), (128, 128, 128), (256, 256, 256), (256, 128, 256), (192, 192, 160), (160, 160, 160), (32, 32, 32), (8, 8, 8)]
            {
                if major == Major::Rows && loaded % 64 != 0 {
                    continue;
                }
                let tile = ClippedTile { tile: OperandTile { rows, ty: MapType::Bf16, major }, loaded, pitch };
                for extent in 1..700u32 {
                    let tiles = extent.div_ceil(pitch);
                    for more in [0, 1] {
                        let args = tile.args(extent, tiles + more);
                        assert!((1..=256).contains(&args.box_rows) && args.kept_bytes <= tile.tile.bytes());
                        for number in 0..tiles + more {
                            let (first, got) = (number * pitch, loaded_rows(tile, args, number * pitch));
                            let wanted = extent.saturating_sub(first).min(rows);
                            assert!(got >= wanted && got <= rows, "{extent} of {tile:?}: {got} rows of tile {number}");
                            assert!(
                                got * ROW_BYTES >= args.kept_bytes,
                                "{extent} of {tile:?}: rows {got} of tile {number} are neither loaded nor cleared"
                            );
                            // No box lies wholly beyond the operand.
                            assert!(got - wanted < args.box_rows, "{extent} of {tile:?}: {got} for {wanted}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn an_operand_of_fewer_rows_than_a_tile_is_loaded_by_a_box_of_its_own_height() {
        let tile = ClippedTile { tile: OperandTile { rows: 64, ty: MapType::Bf16, major: Major::Depth }, loaded: 64, pitch: 64 };
        let args = tile.args(33, 1);
        assert_eq!(args, ClipArgs { extent: 33, box_rows: 33, kept_bytes: 33 * ROW_BYTES });
        assert_eq!(args.boxed(tile.map()).box_dims, [64, 33, 1]);
        assert!(tile.map().has_open_box() && tile.map().takes(&args.boxed(tile.map())));
    }
}
