//! How pixels are cut into boxes, and boxes into blocks of 64 rows; where taps read.
//!
//! A halo box holds what a box of pixels reads. In a *square* box a block is eight pixels along the width by eight along the height, and
//! blocks stand side by side in the width, height, depth and over images. In a *flat* box rows of the product are pixels of the halo box
//! one behind the other, halo and all, which for images of odd sizes leaves fewer rows without a pixel.

use super::super::geometry::{AXES, Axes, BOX_AXES, MOST_EXTENT, RUN, counts, halo};
use super::kernel::BLOCK;

/// A box of pixels of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PixelBox {
    /// Pixels in each dim, and images.
    pub(super) extents: [u64; 4],
    pub(super) flat: bool,
}

/// A box with its halo box.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) pixels: PixelBox,
    /// Extents of the halo box.
    pub(super) halo_box: [u64; 4],
    /// Pixels of the halo box from one run of a block to the next.
    pub(super) run_pitch: u64,
    /// The halo box's pixel at which each block begins.
    pub(super) blocks: Vec<u64>,
}

impl Cut {
    /// A box of so many blocks; nothing where it is none.
    pub(super) fn new(axes: &Axes, pixels: PixelBox, blocks: u64) -> Option<Cut> {
        let [width, height, depth, images] = pixels.extents;
        let halo = halo(axes);
        let mut halo_box = [width + halo[0], height + halo[1], depth + halo[2], images];
        let rows = blocks * u64::from(BLOCK);
        let run = u64::from(RUN);
        let whole = |extent: u64| extent.is_multiple_of(run);
        let suits = if pixels.flat {
            // The last pixel is one of the rows.
            depth == 1 && images == 1 && (height - 1) * halo_box[0] + width <= rows
        } else {
            whole(width) && whole(height) && width / run * (height / run) * depth * images == blocks
        };
        if !suits {
            return None;
        }
        let cut = if pixels.flat {
            // What the last row's taps read is part of the halo box.
            halo_box[1] = halo_box[1].max(halo[1] + (rows + halo[0]).div_ceil(halo_box[0]));
            Cut { pixels, halo_box, run_pitch: run, blocks: (0..blocks).map(|block| block * u64::from(BLOCK)).collect() }
        } else {
            let at = |block: u64| {
                let (rest, w) = (block / (width / run), block % (width / run));
                let (rest, h) = (rest / (height / run), rest % (height / run));
                let (n, d) = (rest / depth, rest % depth);
                ((n * halo_box[2] + d) * halo_box[1] + h * run) * halo_box[0] + w * run
            };
            Cut { pixels, halo_box, run_pitch: halo_box[0], blocks: (0..blocks).map(at).collect() }
        };
        cut.halo_box.iter().all(|&extent| extent <= MOST_EXTENT).then_some(cut)
    }

    /// Pixels of the halo box.
    pub(super) fn halo_box_pixels(&self) -> u64 {
        self.halo_box.iter().product()
    }

    /// Boxes in each dim.
    pub(super) fn counts(&self, axes: &Axes) -> [u64; AXES] {
        counts(axes, self.pixels.extents)
    }

    /// How far the halo box's pixel of a tap lies from that of the tap before: in the filter's row, in the next row, in the next plane.
    pub(super) fn tap_steps(&self, axes: &Axes) -> [i64; BOX_AXES] {
        let (filter, dilation) = (axes.map(|axis| axis.filter as i64), axes.map(|axis| axis.dilation as i64));
        let row = self.halo_box[0] as i64;
        let plane = row * self.halo_box[1] as i64;
        let back_in_row = (filter[0] - 1) * dilation[0];
        let back_in_plane = (filter[1] - 1) * dilation[1] * row + back_in_row;
        [dilation[0], dilation[1] * row - back_in_row, dilation[2] * plane - back_in_plane]
    }
}

/// The boxes of so many blocks that are worth a look: no wider than the result.
pub(super) fn cuts(axes: &Axes, blocks: u64) -> Vec<Cut> {
    let run = u64::from(RUN);
    let extents = axes.map(|axis| axis.pixels);
    let mut boxes = Vec::new();
    for w in 1..=blocks {
        for h in (1..=blocks / w).filter(|h| (blocks / w).is_multiple_of(*h) && blocks.is_multiple_of(w)) {
            let rest = blocks / w / h;
            for d in (1..=rest).filter(|d| rest.is_multiple_of(*d)) {
                boxes.push(PixelBox { extents: [w * run, h * run, d, rest / d], flat: false });
            }
        }
    }
    // One block more than needed in a dim belongs to no tile.
    let fits = |pixels: &PixelBox| {
        let unit = [run, run, 1, 1];
        (0..4).all(|dim| pixels.extents[dim] <= extents[dim].next_multiple_of(unit[dim]))
    };
    boxes.retain(fits);
    let rows = blocks * u64::from(BLOCK);
    let [width, height, ..] = extents;
    let line = width + halo(axes)[0];
    if width <= rows && line <= MOST_EXTENT {
        let most = ((rows - width) / line + 1).min(height);
        // As many boxes, and no taller ones than these need.
        let even = height.div_ceil(height.div_ceil(most));
        boxes.push(PixelBox { extents: [width, even, 1, 1], flat: true });
    }
    boxes.into_iter().filter_map(|pixels| Cut::new(axes, pixels, blocks)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::super::geometry::Axis;
    use super::*;

    fn problems() -> Vec<Axes> {
        let dense = |images, result: [u64; 3], filter: [u64; 3], dilation: [u64; 3], pad: [i64; 3]| {
            let axis = |pixels: u64, filter: u64, dilation: u64, pad: i64| {
                let source = (pixels + (filter - 1) * dilation).saturating_sub(2 * pad as u64).max(1);
                Axis { pixels, source, filter, dilation, origin: -pad, pixel_stride: 8, source_stride: 8 }
            };
            let [w, h, d] = [0, 1, 2].map(|dim| axis(result[dim], filter[dim], dilation[dim], pad[dim]));
            [w, h, d, axis(images, 1, 1, 0)]
        };
        vec![
            dense(3, [56, 56, 1], [3, 3, 1], [1, 1, 1], [1, 1, 0]),
            dense(1, [13, 9, 5], [3, 2, 3], [1, 2, 1], [1, 0, 2]),
            dense(2, [7, 7, 1], [5, 1, 1], [3, 1, 1], [6, 0, 0]),
            dense(5, [100, 1, 1], [4, 1, 1], [1, 1, 1], [0, 0, 0]),
            dense(1, [1, 40, 3], [1, 7, 1], [1, 1, 1], [0, 3, 0]),
        ]
    }

    /// Every pixel is a row of just one block, and its taps read the pixels that the formula names.
    #[test]
    fn every_pixel_is_met_once_and_reads_what_it_should() {
        for axes in problems() {
            let filter = axes.map(|axis| axis.filter);
            for blocks in [1, 2, 4] {
                let cuts = cuts(&axes, blocks);
                assert!(!cuts.is_empty(), "{axes:?}");
                for cut in cuts {
                    let extents = axes.map(|axis| axis.pixels);
                    let counts = cut.counts(&axes);
                    let mut met = vec![0u32; extents.iter().product::<u64>() as usize];
                    let steps = cut.tap_steps(&axes);
                    for index in 0..counts.iter().product::<u64>() {
                        let boxes = [
                            index % counts[0],
                            index / counts[0] % counts[1],
                            index / counts[0] / counts[1] % counts[2],
                            index / counts[0] / counts[1] / counts[2],
                        ];
                        for row in 0..blocks * 64 {
                            let start = cut.blocks[(row / 64) as usize] + row % 64 / 8 * cut.run_pitch + row % 8;
                            let of = |pixel: u64| {
                                let [w, h, d, _] = cut.halo_box;
                                [pixel % w, pixel / w % h, pixel / w / h % d, pixel / w / h / d]
                            };
                            let here = of(start);
                            let at: [u64; 4] = std::array::from_fn(|dim| boxes[dim] * cut.pixels.extents[dim] + here[dim]);
                            let inside = (0..4).all(|dim| here[dim] < cut.pixels.extents[dim] && at[dim] < extents[dim]);
                            // The walk over taps as the kernel makes it; every row reads inside of the halo box.
                            let mut pixel = start as i64;
                            let mut taps = Vec::new();
                            for tap in 0..filter.iter().product::<u64>() {
                                assert!((0..cut.halo_box_pixels() as i64).contains(&pixel), "{axes:?} {cut:?} row {row} tap {tap}");
                                taps.push(of(pixel as u64));
                                let [fw, fh, ..] = filter;
                                let step = if (tap + 1) % fw > 0 { 0 } else { 1 + usize::from((tap + 1) % (fw * fh) == 0) };
                                pixel += steps[step];
                            }
                            if !inside {
                                continue;
                            }
                            met[(((at[3] * extents[2] + at[2]) * extents[1] + at[1]) * extents[0] + at[0]) as usize] += 1;
                            for (tap, read) in (0..).zip(&taps) {
                                let [fw, fh, ..] = filter;
                                let tap = [tap % fw, tap / fw % fh, tap / fw / fh];
                                for dim in 0..3 {
                                    assert_eq!(read[dim], here[dim] + tap[dim] * axes[dim].dilation, "{axes:?} {cut:?} row {row}");
                                }
                                assert_eq!(read[3], here[3]);
                            }
                        }
                    }
                    assert!(met.iter().all(|&times| times == 1), "{axes:?} {cut:?}");
                }
            }
        }
    }
}
