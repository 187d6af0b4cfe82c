//! Boxes of pixels, their halo boxes, and how the taps of a filter are dealt among CTAs and warpgroups.
//!
//! **Axes.** The pixels of x and y have four axes, innermost first: the spatial dims that are more than a single pixel (the width always),
//! then the images, then axes of one. A box extends over the first three, and its runs of eight pixels lie along the first. Or the images
//! are first: then runs are the same pixel of eight images, which leaves nothing over where images are small and many.
//!
//! **Units.** Taps that lie side by side along one axis, at one distance, are the columns of one matrix instruction: a *unit*. Where the
//! last unit of a line would reach beyond the filter, it begins earlier, and the taps that it shares with the one before are formed twice
//! and kept once. A CTA takes a *group* of neighbouring units; its halo box covers the taps of these and no more.

use std::collections::HashSet;

use super::super::geometry::{AXES, Axes, Axis, BOX_AXES, MOST_EXTENT, RUN, counts};

/// The axes of a problem in each order that serves: images behind the spatial dims, and in front of them.
pub(super) fn orders([spatial @ .., images]: Axes) -> Vec<Axes> {
    let single = |axis: &Axis| [axis.source, axis.pixels, axis.filter] == [1; 3];
    let spatial: Vec<Axis> = spatial.into_iter().enumerate().filter(|(i, axis)| *i == 0 || !single(axis)).map(|(_, axis)| axis).collect();
    // An axis of one is never stepped along.
    let one = Axis { source: 1, pixels: 1, ..images };
    let filled = |list: &[Axis]| -> Axes { std::array::from_fn(|i| list.get(i).copied().unwrap_or(one)) };
    let behind: Vec<Axis> = spatial.iter().copied().chain([images]).collect();
    let in_front: Vec<Axis> = [images].into_iter().chain(spatial.iter().copied()).collect();
    let mut orders = vec![filled(&behind)];
    // Boxes and filters extend over the first axes alone.
    orders.extend((spatial.len() < BOX_AXES && images.pixels > 1).then(|| filled(&in_front)));
    orders
}

/// Taps that one instruction multiplies by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Unit {
    /// The first tap, by axis.
    pub(super) tap: [u64; BOX_AXES],
    /// The first that is kept; as many as a unit has where none is.
    pub(super) kept_from: u32,
}

/// The units of a CTA.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Group {
    /// The least tap along each axis.
    pub(super) first: [u64; BOX_AXES],
    pub(super) units: Vec<Unit>,
}

/// All taps of a filter, dealt among groups.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Cover {
    /// Along which axis a unit's taps lie.
    pub(super) axis: usize,
    pub(super) groups: Vec<Group>,
    /// Pixels by which a halo box is larger than its box, by axis.
    pub(super) halo: [u64; BOX_AXES],
}

impl Cover {
    /// Units of `taps` taps along `axis`, `units` of them a group; nothing where the filter has not as many taps there.
    pub(super) fn new(axes: &Axes, axis: usize, taps: u64, units: usize) -> Option<Cover> {
        let filter: [u64; BOX_AXES] = std::array::from_fn(|i| axes[i].filter);
        if filter[axis] < taps {
            return None;
        }
        let starts = |i: usize| -> Vec<(u64, u32)> {
            if i != axis {
                return (0..filter[i]).map(|tap| (tap, 0)).collect();
            }
            let start = |wanted: u64| (wanted.min(filter[i] - taps), (wanted - wanted.min(filter[i] - taps)) as u32);
            (0..filter[i].div_ceil(taps)).map(|unit| start(unit * taps)).collect()
        };
        let lines = [starts(0), starts(1), starts(2)];
        let mut all = Vec::new();
        for &(depth, kept2) in &lines[2] {
            for &(row, kept1) in &lines[1] {
                for &(column, kept0) in &lines[0] {
                    all.push(Unit { tap: [column, row, depth], kept_from: kept0 + kept1 + kept2 });
                }
            }
        }
        // The last group is filled up with a unit whose sums are dropped.
        let idle = Unit { kept_from: taps as u32, ..*all.last()? };
        all.resize(all.len().next_multiple_of(units), idle);
        let groups: Vec<Group> = (all.chunks(units))
            .map(|units| Group {
                first: std::array::from_fn(|i| units.iter().map(|unit| unit.tap[i]).min().unwrap_or(0)),
                units: units.to_vec(),
            })
            .collect();
        let reach = |i: usize| {
            let own = if i == axis { taps - 1 } else { 0 };
            let of_group = |group: &Group| group.units.iter().map(|unit| unit.tap[i] - group.first[i] + own).max().unwrap_or(0);
            groups.iter().map(of_group).max().unwrap_or(0) * axes[i].dilation
        };
        let halo = std::array::from_fn(reach);
        Some(Cover { axis, groups, halo })
    }

    /// Taps from one along the unit's axis to the next, in the order of the filter.
    pub(super) fn tap_step(&self, axes: &Axes) -> u64 {
        axes[..self.axis].iter().map(|axis| axis.filter).product()
    }
}

/// A tap's place in the filter's order.
pub(super) fn position(axes: &Axes, tap: [u64; BOX_AXES]) -> u64 {
    (0..BOX_AXES).rev().fold(0, |place, i| place * axes[i].filter + tap[i])
}

verdigris_kir::parameters! {
    /// Steps of sixteen pixels through a box or a halo box, counted in its pixels.
    #[derive(Clone, Copy)]
    pub(super) struct StrideValues / #[derive(Clone, Copy, PartialEq, Eq, Debug)] Stride of () as _spec {
        /// From one run of a step to the other.
        pub(super) pitch: u32,
        /// From one step to the next, and from one line of steps to the next.
        pub(super) inner: u32,
        pub(super) outer: u32,
    }
}

/// A box of pixels of y and the halo box of x around it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PixelBox {
    /// Pixels of the box by axis; the first in whole runs.
    pub(super) extents: [u32; BOX_AXES],
    /// Those of the halo box.
    pub(super) halo_box: [u32; BOX_AXES],
    /// Steps of a line, and lines.
    pub(super) steps: [u32; 2],
    /// How the steps go through the box, and through the halo box.
    pub(super) of_box: Stride,
    pub(super) of_halo_box: Stride,
}

impl PixelBox {
    /// The walk through a box; nothing where its runs are not pairs at one pitch, or more than two loops deep.
    pub(super) fn new(extents: [u32; BOX_AXES], halo: [u64; BOX_AXES]) -> Option<PixelBox> {
        let halo_box: [u32; BOX_AXES] = [0, 1, 2].map(|i| extents[i].saturating_add(u32::try_from(halo[i]).unwrap_or(u32::MAX)));
        // TMA's boxes.
        if halo_box.iter().any(|&extent| u64::from(extent) > MOST_EXTENT) || extents[0] == 0 || !extents[0].is_multiple_of(RUN) {
            return None;
        }
        let row = |[width, height, _]: [u32; BOX_AXES]| [1, width, width * height];
        let (box_rows, halo_box_rows) = (row(extents), row(halo_box));
        let [width, height, depth] = extents;
        // Which axis holds the second run of a step, and how far it is.
        let (paired, distance) = match (width == RUN, height.is_multiple_of(2), depth.is_multiple_of(2)) {
            (false, ..) if width.is_multiple_of(2 * RUN) => (0, RUN),
            (true, true, _) => (1, 1),
            (true, false, true) => (2, 1),
            _ => return None,
        };
        let counts = [width / RUN, height, depth];
        let mut loops = (0..BOX_AXES)
            .map(|i| {
                let (unit, share) = (if i == 0 { RUN } else { 1 }, if i == paired { 2 } else { 1 });
                (counts[i] / share, box_rows[i] * unit * share, halo_box_rows[i] * unit * share)
            })
            .filter(|&(count, ..)| count > 1);
        let [inner, outer] = [loops.next(), loops.next()].map(|one| one.unwrap_or((1, 0, 0)));
        if loops.next().is_some() {
            return None;
        }
        let stride = |rows: [u32; BOX_AXES], of: fn((u32, u32, u32)) -> u32| Stride {
            pitch: rows[paired] * distance,
            inner: of(inner),
            outer: of(outer),
        };
        Some(PixelBox {
            extents,
            halo_box,
            steps: [inner.0, outer.0],
            of_box: stride(box_rows, |(_, of_box, _)| of_box),
            of_halo_box: stride(halo_box_rows, |(.., of_halo_box)| of_halo_box),
        })
    }

    /// Pixels of the box, and of the halo box.
    pub(super) fn pixels(&self) -> u32 {
        self.extents.iter().product()
    }

    pub(super) fn halo_box_pixels(&self) -> u32 {
        self.halo_box.iter().product()
    }

    /// Boxes along each axis.
    pub(super) fn counts(&self, axes: &Axes) -> [u64; AXES] {
        let [width, height, depth] = self.extents.map(u64::from);
        counts(axes, [width, height, depth, 1])
    }

    /// The pixels of a halo box from its first to that of a tap.
    pub(super) fn tap_pixels(&self, axes: &Axes, tap: [u64; BOX_AXES]) -> u64 {
        (0..BOX_AXES).rev().fold(0, |place, i| place * u64::from(self.halo_box[i]) + tap[i] * axes[i].dilation)
    }
}

/// Boxes that are worth a try: those that cut the pixels evenly, from `least` to `most` pixels.
pub(super) fn boxes(axes: &Axes, halo: [u64; BOX_AXES], [least, most]: [u32; 2]) -> Vec<PixelBox> {
    let mut widths = vec![RUN, 2 * RUN];
    // Lines alone may be long.
    widths.extend((axes[1].pixels == 1).then_some([4 * RUN, 8 * RUN, 16 * RUN]).into_iter().flatten());
    // The extents of even parts that a box may have, the largest first: an extent is one where no fewer pixels make as few parts.
    let cuts = |extent: u64| {
        let is_even = move |part: &u32| extent.div_ceil(extent.div_ceil(u64::from(*part))) == u64::from(*part);
        (1..=most / RUN).rev().filter(is_even)
    };
    let mut heights: Vec<u32> = cuts(axes[1].pixels.min(1 << 12)).collect();
    let mut pairs: Vec<u32> = heights.iter().map(|height| height.next_multiple_of(2)).collect();
    pairs.dedup();
    heights.extend(pairs);
    let mut seen = HashSet::new();
    let mut list = Vec::new();
    for &width in &widths {
        for depth in cuts(axes[2].pixels.min(64)).chain((width == RUN).then_some(2)) {
            let fitting = heights.iter().map(|&height| [width, height, depth]);
            let fitting = fitting.filter(|extents| (least..=most).contains(&extents.iter().product()));
            list.extend(fitting.filter(|&extents| seen.insert(extents)).filter_map(|extents| PixelBox::new(extents, halo)));
        }
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(pixels: u64, filter: u64, dilation: u64) -> Axis {
        Axis { pixels, source: pixels + (filter - 1) * dilation, filter, dilation, origin: 0, pixel_stride: 8, source_stride: 8 }
    }

    #[test]
    fn every_tap_is_kept_once_and_lies_in_its_halo_box() {
        for filter in [[3, 3, 1], [3, 3, 3], [7, 1, 1], [1, 5, 1], [5, 5, 1], [4, 2, 3], [2, 3, 2]] {
            for dilation in [1, 3] {
                let axes = [axis(20, filter[0], dilation), axis(9, filter[1], dilation), axis(5, filter[2], 1), axis(2, 1, 1)];
                for (which, taps, units) in [(0, 3, 3), (0, 2, 6), (1, 1, 9), (1, 3, 3), (2, 2, 3), (0, 5, 3)] {
                    let Some(cover) = Cover::new(&axes, which, taps, units) else {
                        assert!(filter[which] < taps);
                        continue;
                    };
                    let mut kept = vec![0; (filter[0] * filter[1] * filter[2]) as usize];
                    for group in &cover.groups {
                        assert_eq!(group.units.len(), units);
                        for unit in &group.units {
                            for tap in 0..taps {
                                let mut at = unit.tap;
                                at[which] += tap;
                                for i in 0..BOX_AXES {
                                    assert!(at[i] < filter[i]);
                                    assert!((at[i] - group.first[i]) * axes[i].dilation <= cover.halo[i], "{cover:?}");
                                }
                                let place = position(&axes, unit.tap) + tap * cover.tap_step(&axes);
                                assert_eq!(place, position(&axes, at));
                                if tap >= u64::from(unit.kept_from) {
                                    kept[place as usize] += 1;
                                }
                            }
                        }
                    }
                    assert!(kept.iter().all(|&n| n == 1), "{filter:?} along {which} by {taps}: {kept:?}");
                }
            }
        }
    }

    #[test]
    fn the_steps_of_a_box_meet_every_pixel_once_and_the_same_in_box_and_halo_box() {
        let halo = [2, 3, 1];
        let mut made = 0;
        for extents in [[8, 16, 1], [16, 8, 1], [8, 7, 2], [16, 7, 3], [8, 2, 4], [64, 1, 1], [64, 1, 3], [16, 1, 1], [8, 6, 3]] {
            let Some(pixels) = PixelBox::new(extents, halo) else { panic!("{extents:?}") };
            made += 1;
            let mut met = Vec::new();
            for outer in 0..pixels.steps[1] {
                for inner in 0..pixels.steps[0] {
                    for (run, lane) in (0..2).flat_map(|run| (0..RUN).map(move |lane| (run, lane))) {
                        let at = |s: Stride| outer * s.outer + inner * s.inner + run * s.pitch + lane;
                        let (in_box, in_halo_box) = (at(pixels.of_box), at(pixels.of_halo_box));
                        let split = |n: u32, [w, h, _]: [u32; 3]| [n % w, n / w % h, n / w / h];
                        assert_eq!(split(in_box, extents), split(in_halo_box, pixels.halo_box), "{extents:?}");
                        met.push(in_box);
                    }
                }
            }
            // The copy of the box is read without gaps, step by step.
            met.sort_unstable();
            assert_eq!(met, (0..pixels.pixels()).collect::<Vec<_>>(), "{extents:?}");
        }
        assert_eq!(made, 9);
        assert!(PixelBox::new([8, 7, 1], halo).is_none(), "an odd number of runs");
        assert!(PixelBox::new([32, 4, 4], halo).is_none(), "three loops");
        assert!(PixelBox::new([8, 255, 1], halo).is_none(), "beyond TMA's boxes");
    }

    #[test]
    fn boxes_of_small_images_take_several() {
        let axes = [axis(7, 3, 1), axis(7, 3, 1), axis(64, 1, 1), axis(1, 1, 1)];
        let list = boxes(&axes, [2, 2, 0], [64, 256]);
        assert!(list.iter().any(|made| made.extents == [8, 7, 2]), "{list:?}");
        assert!(list.iter().all(|made| made.pixels() % 16 == 0));
    }
}
