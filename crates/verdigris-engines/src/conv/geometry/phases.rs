//! Which pixels, which taps: the numbers of a convolution as kernels take them that work out where each activation lies. Of a strided
//! dgrad they come by phases, in a table.

use verdigris_graph::{ConvProblem, Direction};
use verdigris_kir::face::{Divisor as Divided, Kernel, Val};
use verdigris_kir::inst::Cache;
use verdigris_kir::params::Read;
use verdigris_kir::program::{Address, Divisor};

use super::axis::{AxisShape, PhaseTaps};
use crate::layout::space::divisor;

/// Bytes of what the table of phases holds for one phase of one dim.
const PHASE_BYTES: u32 = 32;

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
    pub(in crate::conv) struct GradientSteps / GradientStepsArguments of () as _spec {
        /// From pixel to pixel of the output.
        pub(in crate::conv) pixels: [i32; 3],
        /// From tap to tap.
        pub(in crate::conv) taps: [i32; 3],
        /// What tap 0 of pixel 0 reads.
        pub(in crate::conv) offsets: [i32; 3],
        /// Extents of x.
        pub(in crate::conv) extents: [u32; 3],
    }
}

/// Which pixels of the result a CTA computes in one spatial dim, and with which taps: those of one phase of a strided dgrad; all of
/// a fprop.
#[derive(Clone, Copy)]
pub(in crate::conv) struct Phase<'k> {
    /// Which phase: the result's coordinate is `index · step + phase`.
    pub(in crate::conv) phase_index: Val<'k, u32>,
    /// Pixels of the phase.
    pub(in crate::conv) extent: Val<'k, u32>,
    /// The first tap that meets it.
    pub(in crate::conv) first_tap: Val<'k, u32>,
    /// The coordinate that pixel 0 reads with the first tap.
    pub(in crate::conv) offset: Val<'k, i32>,
    /// Taps that meet it; 0 where none does.
    pub(in crate::conv) count: Val<'k, u32>,
    /// The same, for divisions (1 in place of 0).
    pub(in crate::conv) taps: Divided<'k>,
}

impl<'k> Phase<'k> {
    /// Reads a phase of a dim from the table that begins at `address`.
    pub(in crate::conv) fn read(k: Kernel<'k>, address: Val<'k, u64>, phase_index: Val<'k, u32>) -> Self {
        let at = address + phase_index.mul_wide(PHASE_BYTES);
        let words = |offset| {
            let list = k.ld_global_vector::<u32>(at, offset, 4, Cache::Default);
            [list[0], list[1], list[2], list[3]]
        };
        let [extent, first_tap, offset, count] = words(0);
        Phase { phase_index, extent, first_tap, offset: offset.signed(), count, taps: Divided::of_words(words(16)) }
    }
}

/// A row of the table of phases: the pixels of one residue modulo the stride, in one dim, and the taps that they meet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Row {
    extent: u64,
    taps: PhaseTaps,
}

/// One spatial dim of fprop or dgrad: pixel `i` of phase `ρ` is pixel `i · result_step + ρ` of the result, and reads with tap `j` of its
/// phase the activations at `i · pixel_step + j · tap_step + offset`, with the filter's tap `first_tap + j · filter_step`.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Dim {
    phases: Vec<Row>,
    result_step: u64,
    pixel_step: i64,
    tap_step: i64,
    filter_step: u64,
    /// Extent of the activations.
    extent: u64,
}

impl Dim {
    fn fprop(p: &ConvProblem, dim: usize) -> Dim {
        let taps = PhaseTaps { first_tap: 0, taps: p.filter[dim], offset: -(p.pads_before[dim] as i64) };
        Dim {
            phases: vec![Row { extent: p.output[dim], taps }],
            result_step: 1,
            pixel_step: p.strides[dim] as i64,
            tap_step: p.dilations[dim] as i64,
            filter_step: 1,
            extent: p.input[dim],
        }
    }

    fn dgrad(p: &ConvProblem, dim: usize) -> Dim {
        let axis = AxisShape::of(p, dim);
        let row = |phase: u64| Row { extent: (axis.input - phase).div_ceil(axis.stride), taps: axis.phase(phase) };
        let [filter_step, distance] = axis.phase_steps();
        Dim {
            phases: (0..axis.stride.min(axis.input)).map(row).collect(),
            result_step: axis.stride,
            pixel_step: 1,
            tap_step: -(distance as i64),
            filter_step,
            extent: axis.output,
        }
    }
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
        [pixel_step.unsigned_abs(), tap_step.unsigned_abs(), phases.iter().map(|phase| phase.taps.taps).max().unwrap_or(0)]
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
            for Row { extent, taps: PhaseTaps { first_tap, taps, offset } } in &dim.phases {
                let by_taps = Divisor::new(divisor(*taps)).map_or([1, 0, 0, 0], Divisor::words);
                let words = [*extent as u32, *first_tap as u32, *offset as i32 as u32, *taps as u32];
                bytes.extend(words.into_iter().chain(by_taps).flat_map(u32::to_le_bytes));
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
pub(in crate::conv) fn gradient_steps(p: &ConvProblem) -> GradientStepsArguments {
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
                    for j in 0..phase.taps.taps {
                        let read = i as i64 * dim.pixel_step + j as i64 * dim.tap_step + phase.taps.offset;
                        if (0..output as i64).contains(&read) {
                            met.push((i * dim.result_step + phase_index as u64, phase.taps.first_tap + j * dim.filter_step, read as u64));
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
