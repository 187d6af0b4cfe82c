//! Which pixels, which taps: the numbers of a convolution as its kernels take them.

use verdigris_graph::{ConvProblem, Direction};
use verdigris_kir::params::{Divide, Read};
use verdigris_kir::program::{Address, Divisor};

use super::kernel::PHASE_BYTES;
use crate::layout::space::divisor;

/// A box of images, depths, heights and widths.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Boxes {
    /// Its first pixel.
    pub(super) first: [u64; 4],
    /// Its extents.
    pub(super) lengths: [u64; 4],
}

impl Boxes {
    /// Cuts pixels into boxes of at most `most` (at least 1) pixels: whole rows, planes and images as far as that allows. An extent of 0
    /// makes none.
    pub(super) fn all(extents: [u64; 4], most: u64) -> Vec<Boxes> {
        let mut lengths = [1; 4];
        let mut room = most.max(1);
        for (length, extent) in lengths.iter_mut().zip(extents).rev() {
            *length = extent.min(room).max(1);
            room /= *length;
        }
        let mut boxes = vec![Boxes { first: [0; 4], lengths: [0; 4] }];
        for dim in 0..4 {
            boxes = boxes
                .into_iter()
                .flat_map(|one| {
                    (0..extents[dim].div_ceil(lengths[dim])).map(move |i| {
                        let mut next = one;
                        next.first[dim] = i * lengths[dim];
                        next.lengths[dim] = lengths[dim].min(extents[dim] - next.first[dim]);
                        next
                    })
                })
                .collect();
        }
        boxes
    }

    /// Its pixels.
    pub(super) fn count(&self) -> u64 {
        self.lengths.iter().product()
    }

    pub(super) fn arguments(&self) -> PixelBoxArguments {
        let [_, depths, heights, widths] = self.lengths;
        PixelBoxArguments { first: self.first.map(|first| first as u32), lengths: [depths, heights, widths].map(divisor) }
    }
}

verdigris_kir::parameters! {
    /// The pixels of a launch: a box of images, depths, heights and widths.
    #[derive(Clone, Copy)]
    pub(super) struct PixelBox / PixelBoxArguments of () as _spec {
        pub(super) first: [u32; 4],
        pub(super) lengths: [Divide; 3],
    }
}

verdigris_kir::parameters! {
    /// How the pixels of fprop or dgrad meet activations ([`PixelGeometry`]), by depth, height and width.
    #[derive(Clone, Copy)]
    pub(in crate::conv) struct Steps / StepsArguments of () as _spec {
        /// From pixel to pixel, in the activations.
        pub(in crate::conv) pixels: [i32; 3],
        /// From tap to tap, in the activations.
        pub(in crate::conv) taps: [i32; 3],
        /// The result's pixel is `index · step + phase`.
        pub(in crate::conv) results: [u32; 3],
        /// Extents of the activations.
        pub(in crate::conv) extents: [u32; 3],
    }
}

verdigris_kir::parameters! {
    /// A filter of fprop or dgrad whose address is a multiple of so many bytes: strides in bytes, which count modulo 2⁶⁴ so that a walk may
    /// go backwards from the origin.
    #[derive(Clone, Copy)]
    pub(in crate::conv) struct FilterWalk / FilterWalkArguments of u32 as alignment_bytes {
        pub(in crate::conv) pointer: Read = *alignment_bytes,
        pub(in crate::conv) origin: u64,
        /// Over groups, channels of the result, and channels of the activations.
        pub(in crate::conv) group: u64,
        pub(in crate::conv) outer: u64,
        pub(in crate::conv) channel: u64,
        /// Over taps.
        pub(in crate::conv) taps: [u64; 3],
        /// Over the taps of a phase.
        pub(in crate::conv) tap_steps: [u64; 3],
    }
}

verdigris_kir::parameters! {
    /// How a wgrad's taps meet x, by depth, height and width.
    #[derive(Clone, Copy)]
    pub(super) struct GradientSteps / GradientStepsArguments of () as _spec {
        /// From pixel to pixel of the output.
        pub(super) pixels: [i32; 3],
        /// From tap to tap.
        pub(super) taps: [i32; 3],
        /// What tap 0 of pixel 0 reads.
        pub(super) offsets: [i32; 3],
        /// Extents of x.
        pub(super) extents: [u32; 3],
    }
}

/// A phase: the pixels of one residue modulo the stride, in one dim, and the taps that they meet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Phase {
    extent: u64,
    first_tap: u64,
    /// The coordinate that pixel 0 reads with the first tap.
    offset: i64,
    taps: u64,
}

/// One spatial dim of fprop or dgrad: pixel `i` of phase `ρ` is pixel `i · result_step + ρ` of the result, and reads with tap `j` of its
/// phase the activations at `i · pixel_step + j · tap_step + offset`, with the filter's tap `first_tap + j · filter_step`.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Dim {
    phases: Vec<Phase>,
    result_step: u64,
    pixel_step: i64,
    tap_step: i64,
    filter_step: u64,
    /// Extent of the activations.
    extent: u64,
}

impl Dim {
    fn fprop(p: &ConvProblem, dim: usize) -> Dim {
        let all = Phase { extent: p.output[dim], first_tap: 0, offset: -(p.pads_before[dim] as i64), taps: p.filter[dim] };
        Dim {
            phases: vec![all],
            result_step: 1,
            pixel_step: p.strides[dim] as i64,
            tap_step: p.dilations[dim] as i64,
            filter_step: 1,
            extent: p.input[dim],
        }
    }

    fn dgrad(p: &ConvProblem, dim: usize) -> Dim {
        let (stride, dilation) = (p.strides[dim] as i64, p.dilations[dim] as i64);
        let (pad, filter, input) = (p.pads_before[dim] as i64, p.filter[dim] as i64, p.input[dim]);
        let shared = gcd(stride, dilation);
        let step = stride / shared;
        let phase = |phase_index: u64| {
            let extent = (input - phase_index).div_ceil(p.strides[dim]);
            let reached = phase_index as i64 + pad;
            let first = (0..step.min(filter)).find(|tap| (reached - tap * dilation) % stride == 0);
            match first {
                Some(tap) => {
                    let taps = ((filter - 1 - tap) / step + 1) as u64;
                    Phase { extent, first_tap: tap as u64, offset: (reached - tap * dilation) / stride, taps }
                }
                None => Phase { extent, first_tap: 0, offset: 0, taps: 0 },
            }
        };
        Dim {
            phases: (0..p.strides[dim].min(input)).map(phase).collect(),
            result_step: p.strides[dim],
            pixel_step: 1,
            tap_step: -(dilation / shared),
            filter_step: step as u64,
            extent: p.output[dim],
        }
    }
}

fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// fprop or dgrad in three dims.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::conv) struct PixelGeometry([Dim; 3]);

impl PixelGeometry {
    pub(in crate::conv) fn of(problem: &ConvProblem) -> PixelGeometry {
        PixelGeometry(std::array::from_fn(|dim| {
            if problem.direction == Direction::Dgrad { Dim::dgrad(problem, dim) } else { Dim::fprop(problem, dim) }
        }))
    }

    pub(in crate::conv) fn phase_counts(&self) -> [u64; 3] {
        self.0.each_ref().map(|dim| dim.phases.len() as u64)
    }

    pub(in crate::conv) fn phase_count(&self) -> u64 {
        self.phase_counts().into_iter().fold(1, u64::saturating_mul)
    }

    /// Of a dim: the step of the activations over pixels, the distance of neighbouring taps there, and the most taps of a phase.
    pub(in crate::conv) fn reach(&self, dim: usize) -> [u64; 3] {
        let Dim { phases, pixel_step, tap_step, .. } = &self.0[dim];
        [pixel_step.unsigned_abs(), tap_step.unsigned_abs(), phases.iter().map(|phase| phase.taps).max().unwrap_or(0)]
    }

    /// Images, depths, heights and widths of the largest phase.
    pub(in crate::conv) fn pixels(&self, n: u64) -> [u64; 4] {
        let [d, h, w] = self.0.each_ref().map(|dim| dim.phases.first().map_or(0, |phase| phase.extent));
        [n, d, h, w]
    }

    /// The table of all phases of all dims, and where each dim's begins, in bytes.
    pub(in crate::conv) fn tables(&self) -> (Vec<u8>, [u64; 3]) {
        let mut bytes = Vec::new();
        let mut starts = [0; 3];
        for (start, dim) in starts.iter_mut().zip(&self.0) {
            *start = bytes.len() as u64;
            for phase in &dim.phases {
                let taps = Divisor::new(phase.taps.max(1) as u32).map_or([1, 0, 0, 0], Divisor::words);
                let words = [phase.extent as u32, phase.first_tap as u32, phase.offset as i32 as u32, phase.taps as u32];
                bytes.extend(words.into_iter().chain(taps).flat_map(u32::to_le_bytes));
            }
        }
        debug_assert!(bytes.len().is_multiple_of(PHASE_BYTES as usize));
        (bytes, starts)
    }

    pub(in crate::conv) fn steps(&self) -> StepsArguments {
        let dims = self.0.each_ref();
        StepsArguments {
            pixels: dims.map(|dim| dim.pixel_step as i32),
            taps: dims.map(|dim| dim.tap_step as i32),
            results: dims.map(|dim| dim.result_step as u32),
            extents: dims.map(|dim| dim.extent as u32),
        }
    }

    pub(in crate::conv) fn filter(&self, problem: &ConvProblem) -> FilterWalkArguments {
        let w = &problem.w;
        let bytes = w.dtype.bytes() as u64;
        let [k, c, taps @ ..] = w.strides.map(|stride| stride * bytes);
        let (outer, channel) = if problem.direction == Direction::Dgrad { (c, k) } else { (k, c) };
        // Flipped, the walk begins at the last tap and goes backwards; addresses count modulo 2^64.
        let origin = if problem.flip { (0..3).fold(0u64, |sum, dim| sum + (problem.filter[dim] - 1) * taps[dim]) } else { 0 };
        let taps = taps.map(|stride| if problem.flip { stride.wrapping_neg() } else { stride });
        FilterWalkArguments {
            pointer: Address::buffer(w.slot.0 as usize),
            origin,
            group: k * (problem.k / problem.groups),
            outer,
            channel,
            taps,
            tap_steps: std::array::from_fn(|dim| taps[dim].wrapping_mul(self.0[dim].filter_step)),
        }
    }
}

/// How the taps of a wgrad meet x.
pub(super) fn gradient_steps(p: &ConvProblem) -> GradientStepsArguments {
    let step = |dim: usize| p.dilations[dim] as i32;
    let first = |dim: usize| (if p.flip { (p.filter[dim] - 1) as i32 * step(dim) } else { 0 }) - p.pads_before[dim] as i32;
    GradientStepsArguments {
        pixels: p.strides.map(|stride| stride as i32),
        taps: [0, 1, 2].map(|dim| if p.flip { -step(dim) } else { step(dim) }),
        offsets: [0, 1, 2].map(first),
        extents: p.input.map(|extent| extent as u32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_graph::{ConvExtents, Direction};
    use verdigris_tensor::DType;

    #[test]
    fn boxes_cover_pixels_once() {
        assert_eq!(Boxes::all([3, 1, 5, 7], 1 << 20), [Boxes { first: [0; 4], lengths: [3, 1, 5, 7] }]);
        assert_eq!(Boxes::all([0, 1, 5, 7], 100), []);
        let boxes = Boxes::all([3, 4, 5, 7], 50);
        assert_eq!(boxes.iter().map(Boxes::count).sum::<u64>(), 3 * 4 * 5 * 7);
        assert!(boxes.iter().all(|one| one.count() <= 50) && boxes.len() == 12, "planes of 35 pixels");
        let rows = Boxes::all([1, 1, 3, 100], 33);
        assert_eq!(rows.len(), 3 * 4);
    }

    /// Every product of a dgrad, by its definition and by phases.
    #[test]
    fn phases_meet_each_tap_once() {
        for (input, filter, stride, dilation, pad) in
            [(9, 3, 2, 1, 1), (10, 4, 3, 2, 0), (7, 5, 2, 2, 4), (5, 1, 2, 1, 0), (12, 3, 4, 6, 5), (3, 2, 5, 1, 4), (8, 7, 1, 1, 3)]
        {
            let extents = ConvExtents {
                direction: Direction::Dgrad,
                n: 1,
                c: 1,
                k: 1,
                groups: 1,
                input: [1, 1, input],
                filter: [1, 1, filter],
                pads: [0, 0, pad],
                strides: [1, 1, stride],
                dilations: [1, 1, dilation],
            };
            let problem = verdigris_graph::ConvProblem::packed(extents, DType::F32, DType::F32).unwrap();
            let output = problem.output[2];
            let mut wanted = Vec::new();
            for p in 0..output {
                for t in 0..filter {
                    if let Some(j) = (p * stride + t * dilation).checked_sub(pad).filter(|&j| j < input) {
                        wanted.push((j, t, p));
                    }
                }
            }
            let dim = Dim::dgrad(&problem, 2);
            let mut met = Vec::new();
            for (phase_index, phase) in dim.phases.iter().enumerate() {
                for i in 0..phase.extent {
                    for j in 0..phase.taps {
                        let read = i as i64 * dim.pixel_step + j as i64 * dim.tap_step + phase.offset;
                        if (0..output as i64).contains(&read) {
                            met.push((i * dim.result_step + phase_index as u64, phase.first_tap + j * dim.filter_step, read as u64));
                        }
                    }
                }
            }
            wanted.sort_unstable();
            met.sort_unstable();
            assert_eq!(met, wanted, "input {input}, filter {filter}, stride {stride}, dilation {dilation}, pad {pad}");
            assert_eq!(dim.phases.iter().map(|phase| phase.extent).sum::<u64>(), input);
        }
    }
}
