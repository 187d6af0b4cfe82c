//! Keys and values of 8 bits, beside queries of 16: a block arrives as bytes, and the threads that attend widen it into a tile of the queries' type.
//!
//! Widening rounds nothing: either type of 16 bits has all numbers of either of 8. A tile of bytes and the wide one lie under the same swizzle, so that eight
//! threads with neighbouring rows meet no bank twice, neither where they read 16 bytes nor where they write them.

use std::panic::Location;

use verdigris_kir::face::{F16, Kernel, Val};
use verdigris_kir::inst::{CvtRound, Packed};
use verdigris_kir::ir::MapType;
use verdigris_tensor::DType;

use super::super::half::Half;
use super::super::tile::HeadTile;
use crate::hopper::WARPGROUP;

/// Elements of 16 bytes, as they arrive.
const CHUNK: u32 = 16;

/// A type of one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Byte {
    E4m3,
    E5m2,
}

impl Byte {
    /// Both.
    pub(super) const ALL: [Byte; 2] = [Byte::E4m3, Byte::E5m2];

    /// The type of one byte that this is.
    pub(super) fn of(dtype: DType) -> Option<Byte> {
        Byte::ALL.into_iter().find(|byte| byte.dtype() == dtype)
    }

    pub(super) const fn dtype(self) -> DType {
        match self {
            Byte::E4m3 => DType::E4m3,
            Byte::E5m2 => DType::E5m2,
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Byte::E4m3 => "e4m3",
            Byte::E5m2 => "e5m2",
        }
    }

    const fn packed(self) -> Packed {
        match self {
            Byte::E4m3 => Packed::E4m3x2,
            Byte::E5m2 => Packed::E5m2x2,
        }
    }

    /// Two numbers side by side, exactly, as two of a type of two bytes.
    fn widen<'k>(self, k: Kernel<'k>, to: Half, pair: Val<'k, u16>) -> Val<'k, u32> {
        let halves = k.widen_fp8(self.packed(), pair).bitcast::<u32>();
        match to {
            Half::F16 => halves,
            Half::Bf16 => {
                let (low, high) = k.split16(halves);
                let [low, high] = [low, high].map(|half| half.bitcast::<F16>().convert::<f32>(CvtRound::None));
                k.pack::<u32>(Packed::Bf16x2, low, high)
            }
        }
    }
}

/// How rows of a type of 16 bits arrive, if it is as bytes.
pub(super) const fn stored(wide: HeadTile, cache: Option<Byte>) -> HeadTile {
    if cache.is_some() { HeadTile { ty: MapType::U8, ..wide } } else { wide }
}

/// Tiles of bytes that become tiles of a type of 16 bits, by the threads of a warpgroup.
pub(super) struct Widening<'k> {
    pub(super) kernel: Kernel<'k>,
    pub(super) from: Byte,
    pub(super) to: Half,
    /// Of the warpgroup.
    pub(super) thread: Val<'k, u32>,
}

impl<'k> Widening<'k> {
    /// Widens what stands in a slot into another: all rows of the wide tile, of which those from `count` on become 0, whatever they are.
    #[track_caller]
    pub(super) fn run(&self, wide: &HeadTile, [from, to]: [Val<'k, u32>; 2], count: Option<Val<'k, i32>>) {
        let k = self.kernel;
        let narrow = stored(*wide, Some(self.from));
        // Threads of a row have every other chunk.
        let threads_of_row = WARPGROUP / wide.rows;
        let row = self.thread & (wide.rows - 1);
        let own = self.thread >> wide.rows.trailing_zeros();
        k.scope(Location::caller(), || {
            // All reads in front of the first write: the assembler does not know that they are of other memory.
            let chunks = (0..wide.elements / CHUNK).step_by(threads_of_row as usize).map(|first| (own + first % 2, first / 2));
            let read = chunks.map(|(own, pair)| (own, pair, k.ld_shared_vector::<u32>(narrow.chunk(from, row, own, pair), 0, 4)));
            for (own, pair, bytes) in read.collect::<Vec<_>>() {
                let bytes = bytes.into_iter().map(|word| match count {
                    Some(count) => k.select(row.signed().lt(count), word, 0u32),
                    None => word,
                });
                let pairs = bytes.flat_map(|word| {
                    let (low, high) = k.split16(word);
                    [low, high].map(|pair| self.from.widen(k, self.to, pair))
                });
                for (half, words) in (0..).zip(pairs.collect::<Vec<_>>().chunks(4)) {
                    k.st_shared_vector(wide.chunk(to, row, (own << 1) + half, 2 * pair), 0, words);
                }
            }
        });
    }
}
