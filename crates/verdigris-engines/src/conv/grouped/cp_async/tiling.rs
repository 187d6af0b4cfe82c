//! Tiles of pixels: which box of the result a CTA computes at a time, and where the activations that it reads lie in shared memory.
//!
//! **Halo.** What a box of pixels reads, with all taps, is a box of activations. In shared memory its pixels lie in rows; where the
//! result's neighbours are `step` activations apart along the width, a row is `step` *phases*, of the columns that are equal modulo `step`,
//! and so are the rows along the height. So neighbours of the tile read neighbours of the halo, whatever the stride and the tap, and a tap
//! is a distance.

use verdigris_graph::ConvProblem;
use verdigris_kir::params::Divide;

use super::channel_tile::{ChannelTile, PITCH_BYTES};
use crate::conv::geometry::phases::PixelGeometry;
use crate::layout::space::divisor;

/// Bytes of a tap in the table of taps.
pub(super) const TAP_BYTES: u32 = 16;
/// Bytes of a pixel in the table of pixels.
pub(super) const PIXEL_BYTES: u32 = 16;
/// Shared memory for what a CTA knows of its phase.
pub(super) const PHASE_TABLE_BYTES: u32 = 64;
/// Extents of a tile in each dim stay below this, so that four coordinates are compared in one word.
const TILE_LIMIT: u64 = 128;

/// What a kernel's tile is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Room {
    /// Pixels of a tile.
    pub(super) pixels: u32,
    /// Shared memory for taps, filter and halo.
    pub(super) arena_bytes: u32,
    /// Shared memory that a pixel of the tile takes in the halo's place when the halo has been read, or beside it.
    pub(super) staged_bytes: u32,
    /// That is beside the halo.
    pub(super) beside: bool,
    /// Bytes of the filter of a channel tile at one tap.
    pub(super) tap_bytes: u32,
}

/// How a problem is cut into tiles.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Tiling {
    /// Images, depths, heights and widths of a tile.
    pub(super) tile: [u64; 4],
    /// Tiles along each, of the largest phase.
    pub(super) tiles: [u64; 4],
    /// Depths, heights and widths of the halo of the largest phase.
    pub(super) halo: [u64; 3],
    /// Distances in pixels of shared memory: of phases of columns, rows, phases of rows, planes and images.
    pitches: [u64; 5],
    /// Where filter, halo and what stands beside it begin in the arena.
    pub(super) filter_at: u32,
    pub(super) halo_at: u32,
    pub(super) beside_at: u32,
    /// Activations from pixel to pixel along height and width.
    steps: [u64; 2],
}

/// Numbers to cut `extent` into: even shares, and powers of two.
fn lengths(extent: u64, most: u64) -> Vec<u64> {
    let most = most.min(TILE_LIMIT - 1).min(extent);
    let mut lengths: Vec<u64> = (1..=16).map(|shares| extent.div_ceil(shares)).chain((0..7).map(|power| 1 << power)).collect();
    lengths.retain(|&length| (1..=most).contains(&length));
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

impl Tiling {
    /// The tiling with the least work: pixels copied and pixels computed, those beyond the result included. Nothing where the filter and
    /// the halo of one pixel do not fit.
    pub(super) fn of(problem: &ConvProblem, geometry: &PixelGeometry, room: Room) -> Option<Tiling> {
        let extents = geometry.pixels(problem.n);
        let most = u64::from(room.pixels);
        let mut best: Option<(f64, Tiling)> = None;
        for &w in &lengths(extents[3], most) {
            for &h in &lengths(extents[2], most / w) {
                for &d in &lengths(extents[1], most / (w * h)) {
                    // Images are taken together where they are small.
                    let whole = [d, h, w] == [extents[1], extents[2], extents[3]];
                    let fitting = (most / (w * h * d)).min(extents[0]).min(TILE_LIMIT - 1);
                    let images = if whole { lengths(extents[0], fitting) } else { vec![1] };
                    for n in images {
                        let Some(tiling) = Tiling::with(geometry, [n, d, h, w], extents, room) else { continue };
                        let count = tiling.count() as f64;
                        let halo = (n * tiling.halo.iter().product::<u64>()) as f64;
                        let work = count * (halo + most as f64 + 48.0);
                        if best.is_none_or(|(least, _)| work < least) {
                            best = Some((work, tiling));
                        }
                    }
                }
            }
        }
        best.map(|(_, tiling)| tiling)
    }

    /// This tile, if it fits.
    fn with(geometry: &PixelGeometry, tile: [u64; 4], extents: [u64; 4], room: Room) -> Option<Tiling> {
        let reaches: [[u64; 3]; 3] = std::array::from_fn(|dim| geometry.reach(dim));
        let halo: [u64; 3] = std::array::from_fn(|dim| {
            let [step, tap, taps] = reaches[dim];
            if taps == 0 { 0 } else { (tile[dim + 1] - 1) * step + (taps - 1) * tap + 1 }
        });
        let taps: u64 = reaches.iter().map(|[.., taps]| taps).product();
        let filter_at = u32::try_from(taps * u64::from(TAP_BYTES)).ok()?.next_multiple_of(128);
        let halo_at = filter_at.checked_add(u32::try_from(taps.checked_mul(u64::from(room.tap_bytes))?).ok()?)?;
        let staged = room.pixels * room.staged_bytes;
        let left = room.arena_bytes.checked_sub(halo_at.checked_add(if room.beside { staged } else { 0 })?)?;
        let [height_step, width_step] = [reaches[1][0], reaches[2][0]];
        let phase = halo[2].div_ceil(width_step);
        let row = phase * width_step;
        // The last pixel of a row of the tile and the first of the next are neighbours modulo 8, so that the rows of a matrix never meet in
        // a bank; where that takes too much room, some do.
        let aligned = (row..row + 8).find(|row| row % 8 == tile[3] % 8);
        [aligned, Some(row)].into_iter().flatten().find_map(|row| {
            let rows = row.checked_mul(halo[1].div_ceil(height_step))?;
            let plane = rows.checked_mul(height_step)?;
            let image = plane.checked_mul(halo[0])?;
            let bytes = image.checked_mul(tile[0])?.checked_mul(u64::from(PITCH_BYTES))?;
            let halo_bytes = bytes.max(if room.beside { 0 } else { u64::from(staged) });
            (halo_bytes <= u64::from(left)).then(|| Tiling {
                tile,
                tiles: std::array::from_fn(|dim| extents[dim].div_ceil(tile[dim])),
                halo,
                pitches: [phase, row, rows, plane, image],
                filter_at,
                halo_at,
                beside_at: halo_at + halo_bytes as u32,
                steps: [height_step, width_step],
            })
        })
    }

    /// Tiles of the largest phase.
    pub(super) fn count(&self) -> u64 {
        self.tiles.iter().product()
    }

    /// Activations that a tile copies.
    pub(super) fn halo_pixels(&self) -> u64 {
        self.tile[0] * self.halo.iter().product::<u64>()
    }

    /// `relative` are the distances of a tensor's neighbours in images, depths, heights and widths of the tile, in units of 16 bytes.
    pub(super) fn arguments(&self, relative: [u64; 4]) -> TilingArguments {
        let [tile_images, tile @ ..] = self.tile;
        let [_, tiles @ ..] = self.tiles;
        let [halo @ .., _] = self.halo;
        let [height_step, width_step] = self.steps.map(divisor);
        TilingArguments {
            tile_pixels: self.tile.iter().product::<u64>() as u32,
            tile_count: self.count() as u32,
            tile: tile.map(divisor),
            tiles: tiles.map(divisor),
            halo: halo.map(divisor),
            height_step,
            width_step,
            tile_images: tile_images as u32,
            pitches: self.pitches.map(|pitch| pitch as u32),
            relative: relative.map(|distance| distance as u32),
            filter_at: self.filter_at,
            halo_at: self.halo_at,
            beside_at: self.beside_at,
        }
    }
}

verdigris_kir::parameters! {
    /// How a result is cut into tiles, and how a tile lies in shared memory.
    #[derive(Clone, Copy)]
    pub(super) struct Cut / TilingArguments of () as _spec {
        /// Pixels of a tile.
        pub(super) tile_pixels: u32,
        /// Tiles of the largest phase.
        pub(super) tile_count: u32,
        /// Depth, height and width of a tile, and how many tiles there are along each.
        pub(super) tile: [Divide; 3],
        pub(super) tiles: [Divide; 3],
        /// Depth and height of the halo.
        pub(super) halo: [Divide; 2],
        pub(super) height_step: Divide,
        pub(super) width_step: Divide,
        pub(super) tile_images: u32,
        /// Of a phase of columns, rows, a phase of rows, planes and images.
        pub(super) pitches: [u32; 5],
        pub(super) relative: [u32; 4],
        /// Where the filter, the halo and what stands beside it begin.
        pub(super) filter_at: u32,
        pub(super) halo_at: u32,
        pub(super) beside_at: u32,
    }
}

/// Shared memory of a channel tile's filter at one tap.
pub(super) fn filter_tap_bytes(channel_tile: ChannelTile) -> u32 {
    channel_tile.units() * channel_tile.unit_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_graph::{ConvExtents, Direction};
    use verdigris_tensor::DType;

    #[test]
    fn tiles_cover_the_result_and_fit_their_room() {
        let room = Room { pixels: 128, arena_bytes: 74_752, staged_bytes: PITCH_BYTES, beside: false, tap_bytes: 1024 };
        for (input, filter, stride, dilation) in [
            ([28, 28], 3, 1, 1),
            ([14, 14], 3, 1, 1),
            ([7, 7], 3, 2, 1),
            ([1, 1], 1, 1, 1),
            ([1, 300], 5, 3, 2),
            ([56, 57], 7, 2, 3),
            ([3, 200], 3, 1, 1),
        ] {
            for direction in [Direction::Fprop, Direction::Dgrad] {
                let extents = ConvExtents {
                    direction,
                    n: 5,
                    c: 64,
                    k: 64,
                    groups: 8,
                    input: [1, input[0], input[1]],
                    filter: [1, filter.min(input[0]), filter],
                    pads: [0, (filter / 2).min(input[0] / 2), dilation * (filter / 2)],
                    strides: [1, stride, stride],
                    dilations: [1, 1, dilation],
                };
                let Ok(problem) = ConvProblem::packed(extents, DType::Bf16, DType::Bf16) else { panic!("{extents:?}") };
                let geometry = PixelGeometry::of(&problem);
                let tiling = Tiling::of(&problem, &geometry, room).expect("fits");
                assert!(tiling.tile.iter().product::<u64>() <= 128 && tiling.tile.iter().all(|&length| length < 128));
                let pixels = geometry.pixels(5);
                assert!((0..4).all(|dim| tiling.tiles[dim] * tiling.tile[dim] >= pixels[dim]));
                assert!(tiling.beside_at <= room.arena_bytes && tiling.beside_at >= tiling.halo_at + 128 * PITCH_BYTES);
            }
        }
    }
}
