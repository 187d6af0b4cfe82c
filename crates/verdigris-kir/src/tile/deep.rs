//! Operands whose depth is more than one swizzled row: several operand tiles behind each other.

use super::operand::OperandTile;
use crate::face::{AsVal, LoadOptions, Mbarrier, TensorMap, Val};
use std::panic::Location;

/// Instruction steps of 32 bytes in one operand tile.
const STEPS_PER_TILE: u32 = 4;

/// `tiles` operand tiles that follow each other along the reduction, one behind the other in shared memory: a whole head of attention, a
/// block of keys, the state of a recurrent network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeepTile {
    /// One tile: 128 bytes of depth.
    pub tile: OperandTile,
    /// How many.
    pub tiles: u32,
}

impl DeepTile {
    /// Enough tiles for `depth` elements of reduction, which must be a multiple of one tile's.
    pub const fn new(tile: OperandTile, depth: u32) -> Self {
        assert!(depth.is_multiple_of(tile.depth()), "a deep tile is whole operand tiles");
        DeepTile { tile, tiles: depth / tile.depth() }
    }

    /// Size of all tiles.
    pub const fn bytes(&self) -> u32 {
        self.tiles * self.tile.bytes()
    }

    /// Instruction steps (32 bytes of depth each) of all tiles.
    pub const fn steps(&self) -> u32 {
        self.tiles * STEPS_PER_TILE
    }

    /// Loads all tiles; `row` and `depth` are the tensor's coordinates of the first element. By one thread; the bytes complete on `barrier`.
    #[track_caller]
    #[allow(clippy::too_many_arguments, reason = "a load names both ends of the copy")]
    pub fn load<'k>(
        &self,
        slot: Val<'k, u32>,
        map: &TensorMap<'k>,
        row: impl AsVal<'k, u32>,
        depth: impl AsVal<'k, u32>,
        batch: impl AsVal<'k, u32>,
        barrier: Mbarrier<'k>,
        options: LoadOptions<'k>,
    ) {
        let k = slot.kernel();
        let (row, depth, batch) = (row.operand_val(k), depth.operand_val(k), batch.operand_val(k));
        k.scope(Location::caller(), || {
            for part in 0..self.tiles {
                let to = slot + part * self.tile.bytes();
                let at = depth + part * self.tile.depth();
                self.tile.load(to, k.constant(0), self.tile.rows, map, row, at, batch, barrier, options);
            }
        });
    }

    /// How far the low word of a descriptor ([`OperandTile::descriptor_base`]) moves for `rows` rows and `steps` instruction steps.
    pub const fn advance(&self, rows: u32, steps: u32) -> u32 {
        steps / STEPS_PER_TILE * (self.tile.bytes() >> 4) + self.tile.advance(rows, steps % STEPS_PER_TILE)
    }
}

#[cfg(test)]
mod tests {
    use super::super::operand::Major;
    use super::*;
    use crate::ir::MapType;

    #[test]
    fn steps_go_through_one_tile_and_on_to_the_next() {
        let deep = DeepTile::new(OperandTile { rows: 64, ty: MapType::Bf16, major: Major::Depth }, 128);
        assert_eq!((deep.tiles, deep.steps(), deep.bytes()), (2, 8, 2 * 64 * 128));
        assert_eq!(deep.advance(0, 3), 3 * 32 / 16);
        assert_eq!(deep.advance(8, 5), (64 * 128 + 8 * 128 + 32) / 16);
        let along_rows = DeepTile::new(OperandTile { rows: 128, ty: MapType::Bf16, major: Major::Rows }, 128);
        assert_eq!(along_rows.advance(0, 4), 128 * 128 / 16);
        assert_eq!(along_rows.advance(0, 1), 16 * 128 / 16);
    }
}
