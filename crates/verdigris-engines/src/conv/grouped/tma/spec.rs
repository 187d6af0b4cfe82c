//! What shapes a kernel, and the numbers that follow from it alone.

use std::fmt;

use serde::{Deserialize, Serialize};
use verdigris_kir::face::{Header, build};
use verdigris_kir::inst::{MatrixType, MmaShape};
use verdigris_kir::ir::{Access, KernelBody, MapDecl, MapType, Swizzle, Target};
use verdigris_kir::program::KernelRef;
use verdigris_tensor::DType;

use super::super::CHUNK;
use super::{filter, pixels};
use crate::fuse::epilogue::EpilogueSpec;

/// Pixels side by side that a matrix has: a *strip*.
pub(super) const STRIP: u32 = 8;
/// Warps that multiply, and their threads.
pub(super) const WARPS: u32 = 8;
pub(super) const MULTIPLIERS: u32 = 32 * WARPS;
/// Tiles of the result that wait to leave.
pub(super) const LEAVING: u32 = 2;
/// What a stage begins at a multiple of: the pattern of the widest swizzle.
const STAGE_ALIGNMENT: u32 = 1024;
/// Shared memory of a CTA, less what its barriers take and what aligns the first stage.
const ROOM_BYTES: u32 = 232_448 - 2 * STAGE_ALIGNMENT;
/// Stages beyond these bring nothing.
const MOST_STAGES: u32 = 4;

/// Which kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Kind {
    /// fprop and dgrad: the result is pixels.
    Pixels,
    /// wgrad: the result is a filter.
    Filter,
}

/// How the pixels that are read lie to those of the tile.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Stride {
    /// Stride 1, in all directions.
    One,
    /// fprop and wgrad of stride 2: two pixels further for each of the tile's.
    Two,
    /// dgrad of stride 2: the tile's pixels are blocks of 2×2 of the result.
    Half,
}

impl Stride {
    /// Pixels read from one of the tile's to the next.
    pub(super) const fn step(self) -> u32 {
        if matches!(self, Stride::Two) { 2 } else { 1 }
    }

    /// Pixels of the result along an axis for each of the tile's.
    pub(super) const fn spread(self) -> u32 {
        if matches!(self, Stride::Half) { 2 } else { 1 }
    }
}

/// A tile: rows, strips of eight columns, and images.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub(super) struct Shape {
    /// Even.
    pub(super) rows: u32,
    /// A power of two.
    pub(super) strips: u32,
    pub(super) images: u32,
}

impl Shape {
    pub(super) const fn columns(self) -> u32 {
        self.strips * STRIP
    }

    /// What warps share out: strips of all images.
    pub(super) const fn units(self) -> u32 {
        self.strips * self.images
    }
}

/// One tap of a phase of pixels: the row and the column of the pixel that it meets, counted from the tile's pixel, and its number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Tap {
    pub(super) row: u32,
    pub(super) column: u32,
    pub(super) number: usize,
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct Spec {
    pub(super) kind: Kind,
    pub(super) stride: Stride,
    /// Rows and columns of the filter: 3, 5 or 7.
    pub(super) taps: u32,
    /// Channels of a CTA, 64 or 32: a *channel tile*.
    pub(super) channels: u32,
    pub(super) shape: Shape,
    /// Of the operands: bf16 or f16.
    pub(super) dtype: DType,
    /// What follows the sums of [`Kind::Pixels`].
    pub(super) epilogue: Option<EpilogueSpec>,
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.kind == Kind::Pixels { "pixels" } else { "wgrad" };
        let stride = match self.stride {
            Stride::One => "s1",
            Stride::Two => "s2",
            Stride::Half => "half",
        };
        let (taps, Shape { rows, strips, images }) = (self.taps, self.shape);
        write!(f, "conv_diagonal_{kind}_{}_{stride}_{taps}x{taps}_c{}_{rows}x{}x{images}", self.dtype, self.channels, strips * STRIP)?;
        self.epilogue.iter().try_for_each(|epilogue| write!(f, "_{}", epilogue.name()))
    }
}

impl Spec {
    /// The tiles that kernels are made for, with the channels of each.
    pub(super) fn shapes(kind: Kind, stride: Stride, taps: u32) -> Vec<(u32, Shape)> {
        let shape = |rows, strips, images| Shape { rows, strips, images };
        match (kind, stride, taps) {
            // Fourteen divides the heights that networks for 224 pixels have all the way down.
            (_, Stride::One, 3 | 5) => vec![(64, shape(14, 2, 1)), (64, shape(8, 1, 4)), (32, shape(14, 4, 1))],
            (_, Stride::One, 7) => vec![(64, shape(14, 2, 1)), (64, shape(8, 1, 2)), (32, shape(14, 4, 1))],
            (_, Stride::Two, 3 | 5) | (Kind::Pixels, Stride::Half, 3 | 5 | 7) => vec![(64, shape(8, 2, 1))],
            _ => Vec::new(),
        }
    }

    pub(super) fn target(&self) -> Target {
        let own = if self.registers().is_some() { Target::Sm90a } else { Target::Sm90 };
        self.epilogue.as_ref().map_or(own, |epilogue| epilogue.target().max(own))
    }

    /// Registers of a thread that multiplies and of one that loads, where the sums of a filter's gradient take more than an even share.
    pub(super) fn registers(&self) -> Option<(u32, u32)> {
        (self.kind == Kind::Filter && self.taps == 7).then_some((216, 40))
    }

    /// Warps of the producer; one of them loads, for registers are handed on by whole warpgroups.
    pub(super) fn loading_warps(&self) -> u32 {
        if self.registers().is_some() { 4 } else { 1 }
    }

    /// A reference to the kernel.
    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.to_string(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header {
            name: self.to_string(),
            target: self.target(),
            threads: MULTIPLIERS + 32 * self.loading_warps(),
            min_ctas: 1,
            cluster: 1,
        };
        build(header, |k| match self.kind {
            Kind::Pixels => pixels::kernel(k, self),
            Kind::Filter => filter::kernel(k, self),
        })
    }

    /// Chunks that a warp multiplies: as many as its registers hold filters for.
    pub(super) const fn chunks(&self) -> u32 {
        if self.taps == 7 { 1 } else { 2 }
    }

    /// Warps side by side along channels.
    pub(super) const fn across(&self) -> u32 {
        self.channels / CHUNK / self.chunks()
    }

    /// Warps that share out the units of the same channels.
    pub(super) const fn sharing(&self) -> u32 {
        WARPS / self.across()
    }

    /// Bytes of a pixel in shared memory.
    pub(super) const fn pixel_bytes(&self) -> u32 {
        self.channels * 2
    }

    pub(super) const fn swizzle(&self) -> Swizzle {
        if self.channels == 64 { Swizzle::B128 } else { Swizzle::B64 }
    }

    /// Rows or columns read for one pixel of the tile.
    pub(super) const fn reach(&self) -> u32 {
        if matches!(self.stride, Stride::Half) { self.taps.div_ceil(2) } else { self.taps }
    }

    /// Rows and columns of the pixels that a tile reads of an image.
    pub(super) const fn read(&self) -> [u32; 2] {
        let step = self.stride.step();
        [(self.shape.rows - 1) * step + self.reach(), (self.shape.columns() - 1) * step + self.reach()]
    }

    /// Rows and columns of the result of a tile of one image; of [`Kind::Filter`], of the gradients of y.
    pub(super) const fn written(&self) -> [u32; 2] {
        let spread = self.stride.spread();
        [self.shape.rows * spread, self.shape.columns() * spread]
    }

    fn map(&self, [rows, columns]: [u32; 2], access: Access) -> MapDecl {
        let ty = if self.dtype == DType::Bf16 { MapType::Bf16 } else { MapType::F16 };
        let box_dims = vec![self.channels, columns, rows, self.shape.images];
        MapDecl { ty, rank: 4, box_dims, im2col: false, swizzle: self.swizzle(), access }
    }

    /// The tensor that is read with its neighbours.
    pub(super) fn read_map(&self) -> MapDecl {
        self.map(self.read(), Access::Read)
    }

    /// The result, or the gradients of y of [`Kind::Filter`].
    pub(super) fn other_map(&self) -> MapDecl {
        self.map(self.written(), if self.kind == Kind::Pixels { Access::Write } else { Access::Read })
    }

    /// Bytes of a stage's activations, from there to its gradients.
    pub(super) fn read_bytes(&self) -> u32 {
        self.read_map().box_bytes().next_multiple_of(STAGE_ALIGNMENT)
    }

    pub(super) fn other_bytes(&self) -> u32 {
        self.other_map().box_bytes().next_multiple_of(STAGE_ALIGNMENT)
    }

    pub(super) fn stage_bytes(&self) -> u32 {
        self.read_bytes() + if self.kind == Kind::Filter { self.other_bytes() } else { 0 }
    }

    /// Bytes that a stage waits for.
    pub(super) fn loaded_bytes(&self) -> u32 {
        self.read_map().box_bytes() + if self.kind == Kind::Filter { self.other_map().box_bytes() } else { 0 }
    }

    /// As many as there is room for.
    pub(super) fn stages(&self) -> u32 {
        let leaving = if self.kind == Kind::Pixels { LEAVING * self.other_bytes() } else { 0 };
        ((ROOM_BYTES - leaving) / self.stage_bytes()).min(MOST_STAGES)
    }

    /// Shared memory of a CTA.
    pub(super) fn shared_bytes(&self) -> u32 {
        let leaving = if self.kind == Kind::Pixels { LEAVING * self.other_bytes() } else { 0 };
        self.stages() * self.stage_bytes() + leaving + 2 * STAGE_ALIGNMENT
    }

    /// The product of a matrix of two rows of a strip and `depth` of channels, or of pixels.
    pub(super) fn mma(&self, depth: u32) -> MmaShape {
        let element = if self.dtype == DType::Bf16 { MatrixType::Bf16 } else { MatrixType::F16 };
        MmaShape { m: 16, n: CHUNK, k: depth, a: element, b: element, d: MatrixType::F32, saturate: false, sparse: false }
    }

    /// Of a dgrad of stride 2: whether the padding is odd, as that is which leaves extents halved.
    pub(super) const fn odd_pad(&self) -> u32 {
        (self.taps - 1) / 2 % 2
    }

    /// Of a dgrad of stride 2: lines that are read before the one that pixel `2·i` of an image without padding meets with tap 0.
    pub(super) const fn lead(&self) -> u32 {
        (self.taps - 1) / 2 - self.odd_pad()
    }

    /// The phases of the result's pixels (row and column in a block of [`Stride::spread`]) with the taps that each meets.
    ///
    /// Of a dgrad of stride 2 under a padding of `2·e + s`, pixel `2·i + a` meets tap `r` at pixel `i + e + (a + s − r) / 2` of y where
    /// that is whole.
    pub(super) fn phases(&self) -> Vec<([u32; 2], Vec<Tap>)> {
        let number = |row: u32, column: u32| (row * self.taps + column) as usize;
        if self.stride != Stride::Half {
            let all = (0..self.taps).flat_map(|row| (0..self.taps).map(move |column| (row, column)));
            return vec![([0, 0], all.map(|(row, column)| Tap { row, column, number: number(row, column) }).collect())];
        }
        let (odd, lead) = (self.odd_pad(), self.lead());
        let of = move |pixel: u32| ((pixel + odd) % 2..self.taps).step_by(2).map(move |tap| (lead + (pixel + odd) / 2 - tap / 2, tap));
        let phase = |a: u32, b: u32| {
            let taps = of(a).flat_map(|(row, tap)| of(b).map(move |(column, other)| (row, column, tap, other)));
            ([a, b], taps.map(|(row, column, tap, other)| Tap { row, column, number: number(tap, other) }).collect())
        };
        [0, 1].into_iter().flat_map(|a| [0, 1].map(|b| phase(a, b))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specs() -> Vec<Spec> {
        let mut specs = Vec::new();
        for kind in [Kind::Pixels, Kind::Filter] {
            for stride in [Stride::One, Stride::Two, Stride::Half] {
                for taps in [3, 5, 7] {
                    for (channels, shape) in Spec::shapes(kind, stride, taps) {
                        specs.push(Spec { kind, stride, taps, channels, shape, dtype: DType::Bf16, epilogue: None });
                    }
                }
            }
        }
        specs
    }

    #[test]
    fn every_tile_has_two_stages_and_whole_shares() {
        for spec in specs() {
            assert!(spec.stages() >= 2 && spec.shared_bytes() <= 232_448, "{spec}: {} stages", spec.stages());
            assert!(spec.shape.units().is_multiple_of(spec.sharing()) && spec.shape.rows.is_multiple_of(2), "{spec}");
            assert!(spec.shape.strips.is_power_of_two() && spec.read().iter().all(|&extent| extent <= 256), "{spec}");
        }
    }

    /// Every pixel of a block and tap of a dgrad of stride 2, by its formula: `2·(line − lead) + tap = a + s`.
    #[test]
    fn phases_meet_what_the_formula_says() {
        for spec in specs().into_iter().filter(|spec| spec.stride == Stride::Half) {
            let (lead, odd) = (spec.lead() as i32, spec.odd_pad() as i32);
            let mut met = vec![0; (spec.taps * spec.taps) as usize];
            for ([a, b], taps) in spec.phases() {
                for tap in taps {
                    let (row, column) = (tap.number as u32 / spec.taps, tap.number as u32 % spec.taps);
                    for (pixel, tap, line) in [(a, row, tap.row), (b, column, tap.column)] {
                        assert!(line < spec.reach());
                        assert_eq!(2 * (line as i32 - lead) + tap as i32, pixel as i32 + odd);
                    }
                    met[tap.number] += 1;
                }
            }
            assert!(met.iter().all(|&count| count == 1), "{spec}: {met:?}");
        }
    }
}
