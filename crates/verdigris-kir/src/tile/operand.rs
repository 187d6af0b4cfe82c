//! Shared tiles of matrix operands: filled by TMA, read by `wgmma`.

use crate::face::{AsVal, Kernel, LoadOptions, Mbarrier, TensorMap, Val};
use crate::ir::{Access, MapDecl, MapType, Swizzle};
use std::panic::Location;

/// Which of an operand's two dimensions is contiguous in memory, and so in the rows of its shared tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Major {
    /// The reduction dimension: a row of the tile is a row of A, or a column of B.
    Depth,
    /// The row of A, or the column of B. `wgmma` takes it for 16-bit types only.
    Rows,
}

/// The bytes of one row of a shared tile: the span of the 128-byte swizzle.
pub const ROW_BYTES: u32 = 128;

/// A tile of A or B in shared memory: `rows` (of A, or columns of B) by 128 bytes of depth, under the 128-byte swizzle.
///
/// With [`Major::Depth`] the tile is `rows` rows of 128 bytes. With [`Major::Rows`] it is `rows / 64` panels, each of `depth` rows that
/// hold 64 elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OperandTile {
    /// Rows of A, or columns of B.
    pub rows: u32,
    /// Element format.
    pub ty: MapType,
    /// What is contiguous.
    pub major: Major,
}

impl OperandTile {
    /// Elements along the reduction.
    pub const fn depth(&self) -> u32 {
        ROW_BYTES / self.ty.bytes()
    }

    /// Size.
    pub const fn bytes(&self) -> u32 {
        self.rows * ROW_BYTES
    }

    /// Rows that one tensor load brings.
    pub const fn box_rows(&self, loaded_rows: u32) -> u32 {
        match self.major {
            Major::Depth => {
                if loaded_rows > 256 {
                    256
                } else {
                    loaded_rows
                }
            }
            Major::Rows => ROW_BYTES / self.ty.bytes(),
        }
    }

    /// The tensor map through which the tile is loaded, `loaded_rows` rows at a time: rank 3, `{contiguous, other, batch}`.
    pub fn map(&self, loaded_rows: u32) -> MapDecl {
        let box_dims = match self.major {
            Major::Depth => vec![self.depth(), self.box_rows(loaded_rows), 1],
            Major::Rows => vec![self.box_rows(loaded_rows), self.depth(), 1],
        };
        MapDecl { ty: self.ty, rank: 3, box_dims, im2col: false, swizzle: Swizzle::B128, access: Access::Read }
    }

    const fn panel_bytes(&self) -> u32 {
        self.depth() * ROW_BYTES
    }

    /// Loads rows `first_row .. first_row + loaded_rows` of the tile at shared address `slot`; the tensor's coordinates are `row` and
    /// `depth`, of the first row loaded. By one thread; the bytes complete on `barrier`.
    #[track_caller]
    #[allow(clippy::too_many_arguments, reason = "a load names both ends of the copy")]
    pub fn load<'k>(
        &self,
        slot: Val<'k, u32>,
        first_row: Val<'k, u32>,
        loaded_rows: u32,
        map: &TensorMap<'k>,
        row: Val<'k, u32>,
        depth: Val<'k, u32>,
        batch: Val<'k, u32>,
        barrier: Mbarrier<'k>,
        options: LoadOptions<'k>,
    ) {
        let k = slot.kernel();
        k.scope(Location::caller(), || {
            let step = self.box_rows(loaded_rows);
            for part in 0..loaded_rows / step {
                let to = slot + first_row * ROW_BYTES + part * step * ROW_BYTES;
                let at_row = (row + part * step).signed();
                let coordinates = match self.major {
                    Major::Depth => [depth.signed(), at_row, batch.signed()],
                    Major::Rows => [at_row, depth.signed(), batch.signed()],
                };
                k.tma_load(to, map, &coordinates, barrier, options);
            }
        });
    }

    /// The descriptor of the tile's part that starts at row `first_row` and at instruction step `step` (32 bytes of depth each), for a tile
    /// at shared address `slot`.
    #[track_caller]
    pub fn descriptor<'k>(&self, slot: Val<'k, u32>, first_row: impl AsVal<'k, u32>, step: u32) -> Val<'k, u64> {
        let k = slot.kernel();
        k.scope(Location::caller(), || {
            let first_row = first_row.operand_val(k);
            // Row distance of 8 rows: 1024 bytes; the distance between panels matters where rows are contiguous.
            let (start, leading) = match self.major {
                Major::Depth => (slot + first_row * ROW_BYTES + step * 32, 1),
                Major::Rows => {
                    let per_step = 32 / self.ty.bytes();
                    (slot + (first_row * self.depth() * self.ty.bytes()) + step * per_step * ROW_BYTES, self.panel_bytes() >> 4)
                }
            };
            let low = ((start & 0x3ffff) >> 4) | (leading << 16);
            k.join32(low, k.constant((1024 >> 4) | (1u32 << 30)))
        })
    }

    /// A descriptor's low word for the tile at `slot`, to be advanced by [`OperandTile::advance`]: what a main loop keeps.
    #[track_caller]
    pub fn descriptor_base<'k>(&self, slot: Val<'k, u32>, first_row: impl AsVal<'k, u32>) -> Val<'k, u32> {
        let k = slot.kernel();
        k.scope(Location::caller(), || {
            let first_row = first_row.operand_val(k);
            let start = match self.major {
                Major::Depth => slot + first_row * ROW_BYTES,
                Major::Rows => slot + first_row * (self.depth() * self.ty.bytes()),
            };
            let leading = match self.major {
                Major::Depth => 1,
                Major::Rows => self.panel_bytes() >> 4,
            };
            ((start & 0x3ffff) >> 4) | (leading << 16)
        })
    }

    /// How far the low word of a descriptor moves for `rows` rows and `steps` instruction steps.
    pub const fn advance(&self, rows: u32, steps: u32) -> u32 {
        match self.major {
            Major::Depth => (rows * ROW_BYTES + steps * 32) >> 4,
            Major::Rows => (rows * self.depth() * self.ty.bytes() + steps * (32 / self.ty.bytes()) * ROW_BYTES) >> 4,
        }
    }

    /// The whole descriptor for a low word.
    #[track_caller]
    pub fn descriptor_from<'k>(&self, low: Val<'k, u32>) -> Val<'k, u64> {
        let k: Kernel<'k> = low.kernel();
        k.join32(low, (1024 >> 4) | (1u32 << 30))
    }
}
