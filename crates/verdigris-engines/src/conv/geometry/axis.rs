//! One spatial dim of a convolution, and the phases of a strided dgrad along it.
//!
//! `dx[h] = Σ_r dy[(h + pad − r·d) / s] · w[r]` over the r that s divides. Rows fall into phases `h = s·i + ρ`. With `g = gcd(d, s)`, a
//! phase whose `ρ + pad` is no multiple of g has no taps: its gradient is zero. Else the taps are `r = r0 + j·(s/g)`, and
//! `dx[s·i + ρ] = Σ_j dy[i + b − j·(d/g)] · w[r0 + j·s/g]` with `b = (ρ + pad − r0·d) / s`: a dense correlation of stride 1.
//!
//! Source: the phases are those of CUTLASS 2's strided data gradient.

use verdigris_graph::ConvProblem;

/// One spatial dimension of a convolution.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::conv) struct AxisShape {
    /// Extent of x.
    pub(in crate::conv) input: u64,
    /// Extent of y.
    pub(in crate::conv) output: u64,
    /// Extent of the filter.
    pub(in crate::conv) filter: u64,
    pub(in crate::conv) stride: u64,
    pub(in crate::conv) dilation: u64,
    /// Padding in front.
    pub(in crate::conv) pad_low: i64,
}

/// The taps that the pixels of a phase meet: `first_tap + j · filter_step`, none where `taps` is 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::conv) struct PhaseTaps {
    pub(in crate::conv) first_tap: u64,
    pub(in crate::conv) taps: u64,
    /// The position that pixel 0 reads with the first tap.
    pub(in crate::conv) offset: i64,
}

impl AxisShape {
    /// Of a problem's dim.
    pub(in crate::conv) fn of(p: &ConvProblem, dim: usize) -> AxisShape {
        AxisShape {
            input: p.input[dim],
            output: p.output[dim],
            filter: p.filter[dim],
            stride: p.strides[dim],
            dilation: p.dilations[dim],
            pad_low: p.pads_before[dim] as i64,
        }
    }

    /// From one tap of a phase to the next: taps of the filter, and pixels of y, downwards.
    pub(in crate::conv) fn phase_steps(&self) -> [u64; 2] {
        let shared = gcd(self.dilation, self.stride);
        [self.stride / shared, self.dilation / shared]
    }

    /// The taps of a phase of a dgrad.
    pub(in crate::conv) fn phase(&self, phase: u64) -> PhaseTaps {
        let (stride, dilation) = (self.stride as i64, self.dilation as i64);
        let [step, _] = self.phase_steps();
        let reached = phase as i64 + self.pad_low;
        let first = (0..step.min(self.filter)).find(|&tap| (reached - tap as i64 * dilation) % stride == 0);
        first.map_or(PhaseTaps { first_tap: 0, taps: 0, offset: 0 }, |first_tap| PhaseTaps {
            first_tap,
            taps: (self.filter - 1 - first_tap) / step + 1,
            offset: (reached - first_tap as i64 * dilation) / stride,
        })
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
