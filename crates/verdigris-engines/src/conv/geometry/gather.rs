//! A convolution as a product with gathered pixels: which pixels TMA walks, and where each tap of the filter reads.
//!
//! Rows of the product are the pixels of a *walk*: positions `lower + i·step` along each spatial dimension, image after image. A *tap*
//! moves the whole walk by an offset and names the filter position to multiply by.
//!
//! **Forward**, `y[p] = Σ_r x[p·s − pad + r·d] · w[r]`: the walk is over x, from `−pad` in steps of `s`; tap `r` moves it by `r·d`.
//!
//! **Backward data**, `dx[h] = Σ_r dy[(h + pad − r·d) / s] · w[r]` over the r that s divides. Rows fall into phases `h = s·i + ρ` with taps
//! of their own ([`AxisShape::phase`]): a dense walk over dy in steps of 1, moved by non-negative offsets from one lower corner that all
//! phases share. Each phase walks `⌈H / s⌉` positions; those past H are left out when results are written.
//!
//! Source: own derivation.

use super::axis::{AxisShape, PhaseTaps};

/// What TMA walks along one dimension.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::conv) struct AxisWalk {
    /// Extent of the tensor walked over.
    pub(in crate::conv) extent: u64,
    /// The first position.
    pub(in crate::conv) lower: i64,
    /// How many positions.
    pub(in crate::conv) count: u64,
    /// From one to the next.
    pub(in crate::conv) step: u64,
}

impl AxisWalk {
    /// The last position, counted from the last pixel of the tensor.
    pub(in crate::conv) fn upper(&self) -> i64 {
        self.lower + (self.count as i64 - 1) * self.step as i64 + 1 - self.extent as i64
    }
}

/// A tap: how far it moves the walk in each dimension (innermost first), and the position in the filter (in memory order) that it
/// multiplies by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::conv) struct Tap {
    pub(in crate::conv) offsets: [u64; 3],
    pub(in crate::conv) position: u64,
}

/// Rows that share their taps: those at `first + scatter·i` of the target.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::conv) struct Phase {
    pub(in crate::conv) first: [u64; 3],
    pub(in crate::conv) taps: Vec<Tap>,
}

/// A walk, its phases (most taps first), and where their rows belong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::conv) struct Gather {
    /// Innermost dimension first.
    pub(in crate::conv) walks: Vec<AxisWalk>,
    pub(in crate::conv) phases: Vec<Phase>,
    /// From one row of a phase to the next in the target, and the target's extents, by dimension.
    pub(in crate::conv) scatter: Vec<u64>,
    pub(in crate::conv) target: Vec<u64>,
}

/// The taps of one dimension at which rows of the phase that begins at `first` read: offset and filter position.
struct AxisPhase {
    first: u64,
    lower: i64,
    taps: Vec<(u64, u64)>,
}

impl Gather {
    /// The walk over x that gives y; also that by which the filter's gradient reads x. `flip`: a true convolution, whose filter runs
    /// backwards.
    pub(in crate::conv) fn forward(axes: &[AxisShape], flip: bool) -> Gather {
        let walks = axes.iter().map(|a| AxisWalk { extent: a.input, lower: -a.pad_low, count: a.output, step: a.stride }).collect();
        let phases: Vec<Vec<AxisPhase>> = axes
            .iter()
            .map(|a| vec![AxisPhase { first: 0, lower: 0, taps: (0..a.filter).map(|r| (r * a.dilation, r)).collect() }])
            .collect();
        Gather {
            walks,
            phases: combine(axes, &phases, flip),
            scatter: vec![1; axes.len()],
            target: axes.iter().map(|a| a.output).collect(),
        }
    }

    /// The walk over dy that gives dx.
    pub(in crate::conv) fn backward_data(axes: &[AxisShape], flip: bool) -> Gather {
        let mut walks = Vec::new();
        let mut phases = Vec::new();
        for a in axes {
            let mut axis: Vec<AxisPhase> = (0..a.stride.min(a.input)).map(|first| axis_phase(a, first)).collect();
            let lower = axis.iter().filter(|c| !c.taps.is_empty()).map(|c| c.lower).min().unwrap_or(0);
            for phase in &mut axis {
                let moved = (phase.lower - lower) as u64;
                phase.taps.iter_mut().for_each(|(offset, _)| *offset += moved);
            }
            walks.push(AxisWalk { extent: a.output, lower, count: a.input.div_ceil(a.stride), step: 1 });
            phases.push(axis);
        }
        let mut phases = combine(axes, &phases, flip);
        phases.sort_by_key(|phase| std::cmp::Reverse(phase.taps.len()));
        Gather { walks, phases, scatter: axes.iter().map(|a| a.stride).collect(), target: axes.iter().map(|a| a.input).collect() }
    }

    /// The same with the taps of each phase in the order of the filter, for a product whose columns they are.
    pub(in crate::conv) fn by_position(mut self) -> Gather {
        self.phases.iter_mut().for_each(|phase| phase.taps.sort_by_key(|tap| tap.position));
        self
    }

    /// Positions of the walk in one image.
    pub(in crate::conv) fn pixels(&self) -> u64 {
        self.walks.iter().map(|walk| walk.count).product()
    }

    /// Whether the rows of the walk are those of the target, in order.
    pub(in crate::conv) fn is_linear(&self) -> bool {
        self.phases.len() == 1 && self.scatter.iter().all(|&stride| stride == 1)
    }

    /// The largest offset in a dimension.
    pub(in crate::conv) fn largest_offset(&self, axis: usize) -> u64 {
        self.phases.iter().flat_map(|phase| &phase.taps).map(|tap| tap.offsets[axis]).max().unwrap_or(0)
    }

    /// All taps of all phases, one phase behind the other.
    pub(in crate::conv) fn taps(&self) -> impl Iterator<Item = &Tap> {
        self.phases.iter().flat_map(|phase| &phase.taps)
    }
}

/// The taps of the rows `s·i + first` of a data gradient, and the position that row `i = 0` reads with an offset of 0.
fn axis_phase(a: &AxisShape, first: u64) -> AxisPhase {
    let PhaseTaps { first_tap, taps: count, offset } = a.phase(first);
    let [filter_step, distance] = a.phase_steps();
    // The tap that reads the lowest position is the last one.
    let last = count.saturating_sub(1);
    let taps = (0..count).map(|j| ((last - j) * distance, first_tap + j * filter_step)).collect();
    AxisPhase { first, lower: offset - (last * distance) as i64, taps }
}

/// Every choice of one phase a dimension; dimensions are innermost first, the innermost running fastest.
fn combine(axes: &[AxisShape], phases: &[Vec<AxisPhase>], flip: bool) -> Vec<Phase> {
    let mut combined = vec![Phase { first: [0; 3], taps: vec![Tap { offsets: [0; 3], position: 0 }] }];
    for (axis, (shape, choices)) in axes.iter().zip(phases).enumerate().rev() {
        combined = combined
            .iter()
            .flat_map(|outer| {
                choices.iter().map(move |choice| {
                    let mut phase = Phase { first: outer.first, taps: vec![] };
                    phase.first[axis] = choice.first;
                    for tap in &outer.taps {
                        for &(offset, position) in &choice.taps {
                            let mut offsets = tap.offsets;
                            offsets[axis] = offset;
                            let position = if flip { shape.filter - 1 - position } else { position };
                            phase.taps.push(Tap { offsets, position: tap.position * shape.filter + position });
                        }
                    }
                    phase
                })
            })
            .collect();
    }
    combined
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small generator, so that the shapes of a failure can be seen again.
    struct Shapes(u64);

    impl Shapes {
        fn below(&mut self, n: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % n
        }

        fn axis(&mut self) -> AxisShape {
            loop {
                let (filter, stride, dilation) = (1 + self.below(5), 1 + self.below(4), 1 + self.below(4));
                let (input, pad_low, pad_high) = (1 + self.below(12), self.below(6) as i64 - 1, self.below(6) as i64 - 1);
                let room = input as i64 + pad_low + pad_high - (dilation * (filter - 1) + 1) as i64;
                if room >= 0 {
                    return AxisShape { input, output: room as u64 / stride + 1, filter, stride, dilation, pad_low };
                }
            }
        }
    }

    fn value(seed: u64, index: i64) -> i64 {
        ((index + 7) * (seed as i64 + 13)) % 11 - 5
    }

    /// One row of one phase along one dimension, as the kernel sums it.
    fn gathered(gather: &Gather, phase: &Phase, row: u64, seed: u64) -> i64 {
        let walk = gather.walks[0];
        let base = walk.lower + (row * walk.step) as i64;
        let read = |at: i64| if (0..walk.extent as i64).contains(&at) { value(seed, at) } else { 0 };
        phase.taps.iter().map(|tap| read(base + tap.offsets[0] as i64) * value(seed + 1, tap.position as i64)).sum()
    }

    #[test]
    fn walks_and_taps_sum_what_the_formulas_say() {
        let mut shapes = Shapes(3);
        for seed in 0..4000 {
            let a = shapes.axis();
            let flip = shapes.below(2) == 1;
            let w = |r: u64| value(seed + 1, if flip { a.filter - 1 - r } else { r } as i64);
            let reads = |p: u64, r: u64| (p * a.stride + r * a.dilation) as i64 - a.pad_low;
            let inside = |at: i64| (0..a.input as i64).contains(&at);

            let gather = Gather::forward(&[a], flip);
            for p in 0..a.output {
                let wanted: i64 =
                    (0..a.filter).map(|r| reads(p, r)).zip(0..).filter(|&(at, _)| inside(at)).map(|(at, r)| value(seed, at) * w(r)).sum();
                assert_eq!(gathered(&gather, &gather.phases[0], p, seed), wanted, "{a:?} flip {flip} at {p}");
            }

            let gather = Gather::backward_data(&[a], flip);
            let mut written = vec![0; a.input as usize];
            for phase in &gather.phases {
                for row in 0..gather.walks[0].count {
                    let h = row * a.stride + phase.first[0];
                    if h >= a.input {
                        continue;
                    }
                    written[h as usize] += 1;
                    let hits = (0..a.output).flat_map(|p| (0..a.filter).map(move |r| (p, r))).filter(|&(p, r)| reads(p, r) == h as i64);
                    let wanted: i64 = hits.map(|(p, r)| value(seed, p as i64) * w(r)).sum();
                    assert_eq!(gathered(&gather, phase, row, seed), wanted, "{a:?} flip {flip} at {h}");
                }
            }
            assert!(written.iter().all(|&n| n == 1), "{a:?}: {written:?}");
        }
    }

    #[test]
    fn phases_of_two_dimensions_are_those_of_each() {
        let a = AxisShape { input: 8, output: 4, filter: 3, stride: 2, dilation: 1, pad_low: 1 };
        let gather = Gather::backward_data(&[a, a], false);
        let taps: Vec<usize> = gather.phases.iter().map(|phase| phase.taps.len()).collect();
        assert_eq!(taps, [4, 2, 2, 1]);
        // Odd rows and columns read taps 0 and 2 of both, even ones the middle tap.
        assert_eq!(gather.phases[0].first, [1, 1, 0]);
        assert_eq!(gather.phases[0].taps.iter().map(|tap| tap.position).collect::<Vec<_>>(), [0, 2, 6, 8]);
        assert_eq!(gather.phases[3].taps, [Tap { offsets: [0, 0, 0], position: 4 }]);
        assert!(!gather.is_linear());
        let dense = AxisShape { stride: 1, output: 8, ..a };
        let gather = Gather::backward_data(&[dense, dense], true);
        assert!(gather.is_linear());
        assert_eq!((gather.walks[0].lower, gather.walks[0].upper(), gather.largest_offset(1)), (-1, -1, 2));
    }
}
