//! How lines of activations lie to the outputs of a depthwise convolution: lines and outputs are rows, or columns.

use serde::{Deserialize, Serialize};
use verdigris_graph::{ConvProblem, Direction};

/// How the lines that are read lie to those of the outputs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::conv) enum Stride {
    /// One line further for each output: stride 1, in all directions.
    One,
    /// Two lines further: fprop and wgrad of stride 2.
    Two,
    /// One line further for every second output: dgrad of stride 2.
    Half,
}

impl Stride {
    /// Of a problem whose filter has taps, or whose outputs are several, along height and width at most; `None` where these step differently, or by more than 2.
    pub(in crate::conv) fn of(p: &ConvProblem) -> Option<Stride> {
        let [height, width] = [1, 2].map(|dim| (p.strides[dim], p.filter[dim] == 1 && p.output[dim] == 1));
        let stride = match (height, width) {
            ((stride, _), (other, _)) if stride == other => stride,
            ((_, true), (stride, _)) | ((stride, _), (_, true)) => stride,
            _ => return None,
        };
        match (stride, p.direction == Direction::Dgrad) {
            (1, _) => Some(Stride::One),
            (2, false) => Some(Stride::Two),
            (2, true) => Some(Stride::Half),
            _ => None,
        }
    }

    /// The line that output `output` meets with tap `tap`, both counted inside of a block of outputs.
    pub(in crate::conv) fn line(self, output: u32, tap: u32, taps: u32) -> Option<u32> {
        match self {
            Stride::One => Some(output + tap),
            Stride::Two => Some(2 * output + tap),
            Stride::Half => {
                let reached = (output + 2 * Stride::lead(taps)).checked_sub(tap)?;
                reached.is_multiple_of(2).then_some(reached / 2)
            }
        }
    }

    /// Of [`Stride::Half`]: lines before the one that output 0 meets with tap 0.
    pub(in crate::conv) fn lead(taps: u32) -> u32 {
        (taps - 1) / 2
    }

    /// Lines that `outputs` outputs (of [`Stride::Half`] an even number) meet.
    pub(in crate::conv) fn lines(self, outputs: u32, taps: u32) -> u32 {
        let all = (0..outputs).flat_map(|output| (0..taps).filter_map(move |tap| self.line(output, tap, taps)));
        all.max().map_or(0, |last| last + 1)
    }

    /// Lines between outputs that are `outputs` apart.
    pub(in crate::conv) fn apart(self, outputs: u32) -> u32 {
        match self {
            Stride::One => outputs,
            Stride::Two => 2 * outputs,
            Stride::Half => outputs / 2,
        }
    }

    /// Which outputs and taps meet at a line.
    pub(in crate::conv) fn pairs(self, outputs: u32, taps: u32, line: u32) -> Vec<(usize, usize)> {
        let all = (0..outputs).flat_map(|output| (0..taps).map(move |tap| (output, tap)));
        let met = all.filter(|&(output, tap)| self.line(output, tap, taps) == Some(line));
        met.map(|(output, tap)| (output as usize, tap as usize)).collect()
    }

    /// Outputs along a dim before the first: of a strided dgrad, blocks of outputs begin where taps and outputs are even together.
    pub(in crate::conv) fn before(self, p: &ConvProblem, dim: usize) -> u64 {
        if self == Stride::Half { p.pads_before[dim] % 2 } else { 0 }
    }

    /// Whether taps along height or width are met from the last of the filter in memory to the first: those of a dgrad of stride 1 are, and those of a flipped
    /// filter the other way round.
    pub(in crate::conv) fn is_reversed(self, p: &ConvProblem) -> bool {
        p.flip != (p.direction == Direction::Dgrad && self == Stride::One)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every output and tap of a dgrad of stride 2, by its formula: line = (output − tap) / 2 behind the lead.
    #[test]
    fn half_strides_meet_what_the_formula_says() {
        for taps in 1..=8 {
            let lead = Stride::lead(taps) as i32;
            for output in 0..8i32 {
                for tap in 0..taps as i32 {
                    let wanted = ((output - tap) % 2 == 0).then(|| (output - tap) / 2 + lead);
                    assert!(wanted.is_none_or(|line| line >= 0), "{taps} taps reach before the tile");
                    assert_eq!(Stride::Half.line(output as u32, tap as u32, taps), wanted.map(|line| line as u32));
                }
            }
        }
        assert_eq!([Stride::One.lines(7, 3), Stride::Two.lines(4, 5), Stride::Half.lines(8, 3)], [9, 11, 5]);
    }
}
