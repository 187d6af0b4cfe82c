//! A tile of the matrix that a convolution multiplies by: pixels as rows, channels as depth, gathered by TMA.

use super::operand::{Major, OperandTile};
use crate::face::{LoadOptions, Mbarrier, TensorMap, Val};
use crate::ir::{Access, MapDecl, MapType, Swizzle};
use std::panic::Location;

/// `pixels` rows of 128 bytes of channels, under the 128-byte swizzle: pixels follow each other through a row of the image, its rows, its
/// planes and the batch, as the tensor map's corners and strides say; what lies outside of the image is zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Im2colTile {
    /// Pixels of one load: at most 1024.
    pub pixels: u32,
    /// Element format.
    pub ty: MapType,
    /// Spatial dimensions: 1, 2, 3.
    pub spatial: u32,
}

impl Im2colTile {
    /// The tile as an operand whose depth is the channels: its bytes and descriptors.
    pub const fn operand(&self) -> OperandTile {
        OperandTile { rows: self.pixels, ty: self.ty, major: Major::Depth }
    }

    /// The tensor map through which the tile is loaded: `{channels, W, [H, [D,]] batch}`.
    pub fn map(&self) -> MapDecl {
        MapDecl {
            ty: self.ty,
            rank: self.spatial + 2,
            box_dims: vec![self.operand().depth(), self.pixels],
            im2col: true,
            swizzle: Swizzle::B128,
            access: Access::Read,
        }
    }

    /// Loads the tile to shared address `slot`: `channel` and `image` of the first pixel, its `base` place in the image (W first) before
    /// the filter's position, `taps`, is added. By one thread; the bytes complete on `barrier`.
    #[track_caller]
    #[allow(clippy::too_many_arguments, reason = "a load names both ends of the copy")]
    pub fn load<'k>(
        &self,
        slot: Val<'k, u32>,
        map: &TensorMap<'k>,
        channel: Val<'k, u32>,
        base: &[Val<'k, i32>],
        image: Val<'k, u32>,
        taps: &[Val<'k, u32>],
        barrier: Mbarrier<'k>,
        options: LoadOptions<'k>,
    ) {
        let k = slot.kernel();
        k.scope(Location::caller(), || {
            let mut coordinates = vec![channel.signed()];
            coordinates.extend(base);
            coordinates.push(image.signed());
            let offsets: Vec<Val<'k, u16>> = taps.iter().map(|tap| tap.low16()).collect();
            k.tma_load_im2col(slot, map, &coordinates, &offsets, barrier, options);
        });
    }
}
