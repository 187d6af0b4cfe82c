//! A box of pixels with its halo in shared memory, of which every tap of a filter reads a part.
//!
//! One tiled copy brings the box: a row of the halo box is one pixel of 16, 32 or 64 channels of two bytes, rows follow each other through
//! the box's width, height and further dims, and what lies outside of the tensor is zero, which is what padding asks for. A `wgmma` reads
//! groups of eight neighbouring rows at one pitch, from any row on: a tap is nothing but another first row.
//!
//! A swizzle is an XOR of absolute shared addresses, by TMA and by the tensor core alike, so neither the first row nor the pitch
//! need be multiples of the eight rows in which the pattern repeats, as long as halo boxes begin at [`HaloTile::ALIGNMENT_BYTES`].
//! Conformance probes hold that against the chip.

use super::operand::Major;
use crate::face::{AsVal, LoadOptions, Mbarrier, TensorMap, Val};
use crate::ir::{Access, MapDecl, MapType, Swizzle};
use std::panic::Location;

/// A halo box: its rows are pixels of so many channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HaloTile {
    /// Channels of a pixel: 32, 64 or 128 bytes of them, which is the span of the swizzle.
    pub channels: u32,
    /// Element format.
    pub ty: MapType,
}

impl HaloTile {
    /// Where halo boxes begin in shared memory.
    pub const ALIGNMENT_BYTES: u32 = 1024;

    /// Bytes of one pixel.
    pub const fn row_bytes(&self) -> u32 {
        self.channels * self.ty.bytes()
    }

    /// The swizzle whose span is a pixel.
    ///
    /// # Panics
    /// If a pixel has not 32, 64 or 128 bytes.
    pub const fn swizzle(&self) -> Swizzle {
        match self.row_bytes() {
            32 => Swizzle::B32,
            64 => Swizzle::B64,
            128 => Swizzle::B128,
            _ => panic!("a halo box's pixel has 32, 64 or 128 bytes"),
        }
    }

    /// Instruction steps of 32 bytes over the channels.
    pub const fn steps(&self) -> u32 {
        self.row_bytes() / 32
    }

    /// The tensor map through which halo boxes are loaded: `{channels, width, …}`, `rank` dims in all. The launch gives the box
    /// ([`HaloTile::boxed`]).
    pub fn map(&self, rank: u32) -> MapDecl {
        self.boxed(&vec![0; rank as usize - 1])
    }

    /// The map of a launch: `extents` of the box from the width outwards, one for each dim beyond the channels.
    pub fn boxed(&self, extents: &[u32]) -> MapDecl {
        let box_dims = [self.channels].iter().chain(extents).copied().collect();
        MapDecl { ty: self.ty, rank: extents.len() as u32 + 1, box_dims, im2col: false, swizzle: self.swizzle(), access: Access::Read }
    }

    /// Loads the box whose first pixel is `place` (width first; it may lie outside) from channel `channel` on. By one thread; the bytes of
    /// the whole box complete on `barrier`.
    #[track_caller]
    #[allow(clippy::too_many_arguments, reason = "a load names both ends of the copy")]
    pub fn load<'k>(
        &self,
        slot: Val<'k, u32>,
        map: &TensorMap<'k>,
        channel: Val<'k, u32>,
        place: &[Val<'k, i32>],
        barrier: Mbarrier<'k>,
        options: LoadOptions<'k>,
    ) {
        let k = slot.kernel();
        k.scope(Location::caller(), || {
            let mut coordinates = vec![channel.signed()];
            coordinates.extend(place);
            k.tma_load(slot, map, &coordinates, barrier, options);
        });
    }

    /// A descriptor's low word for the halo box at `slot`, at its first pixel and channel; [`HaloTile::pixels`] and [`HaloTile::advance`]
    /// move it.
    ///
    /// With [`Major::Depth`] pixels are rows of A (or columns of B) and channels the depth. With [`Major::Rows`] channels are rows (or
    /// columns) and pixels the depth; those beyond a halo box's stand `next_bytes` further, in a halo box of the same kind.
    #[track_caller]
    pub fn descriptor_base<'k>(&self, slot: Val<'k, u32>, major: Major, next_bytes: impl AsVal<'k, u32>) -> Val<'k, u32> {
        let k = slot.kernel();
        k.scope(Location::caller(), || {
            let leading = match major {
                Major::Depth => k.constant(1),
                Major::Rows => next_bytes.operand_val(k) >> 4,
            };
            ((slot & 0x3ffff) >> 4) | (leading << 16)
        })
    }

    /// How far the low word moves for one pixel.
    pub const fn pixel_advance(&self) -> u32 {
        self.row_bytes() >> 4
    }

    /// How far the low word moves for `pixels` pixels.
    #[track_caller]
    pub fn pixels<'k>(&self, pixels: Val<'k, u32>) -> Val<'k, u32> {
        pixels.kernel().scope(Location::caller(), || pixels * self.pixel_advance())
    }

    /// How far the low word moves for `steps` instruction steps of 32 bytes of channels: the depth of [`Major::Depth`].
    pub const fn advance(&self, steps: u32) -> u32 {
        steps * 2
    }

    /// A descriptor's high word: groups of eight pixels lie `pitch` pixels apart, the box's width for instance.
    #[track_caller]
    pub fn descriptor_high<'k>(&self, pitch: Val<'k, u32>) -> Val<'k, u32> {
        let code: u32 = match self.swizzle() {
            Swizzle::B128 => 1,
            Swizzle::B64 => 2,
            _ => 3,
        };
        pitch.kernel().scope(Location::caller(), || (pitch * self.pixel_advance()) | (code << 30))
    }
}
