//! What shapes a kernel, and the numbers that follow from it alone.

use std::fmt;

use serde::{Deserialize, Serialize};
use verdigris_kir::face::{Header, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::program::KernelRef;
use verdigris_tensor::DType;

use super::{filter, pixels};
use crate::conv::geometry::spacing::Stride;
use crate::fuse::epilogue::EpilogueSpec;

/// Which kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Kind {
    /// fprop and dgrad: the result is pixels.
    Pixels,
    /// wgrad: the result is a filter.
    Filter,
}

/// How a CTA's threads share its tile.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Team {
    /// 64 bytes of channels, and many outputs a thread: the least is read twice, and no channels are idle that a narrower CTA would not have.
    Plain,
    /// 128 bytes of channels: whole lines of L2.
    Wide,
    /// 64 bytes of channels, and few outputs a thread: where work does not fill the chip, it takes the shortest way.
    Fine,
}

/// How a tile comes to shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Copying {
    /// So many bytes of neighbouring channels at a time: 16, 8 or 4.
    Vectors(u32),
    /// Element by element, with any strides.
    Elements,
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct Spec {
    pub(super) kind: Kind,
    pub(super) stride: Stride,
    pub(super) team: Team,
    /// Rows and columns of the taps that are unrolled; a larger filter is a sequence of such blocks.
    pub(super) block: [u32; 2],
    /// Filters need not be whole blocks: what a block has beyond them is stepped over, for zero times infinity would be NaN.
    pub(super) ragged: bool,
    /// Of all operands.
    pub(super) dtype: DType,
    pub(super) copying: Copying,
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
        let copying = match self.copying {
            Copying::Vectors(16) => "vectors".to_owned(),
            Copying::Vectors(bytes) => format!("vectors{bytes}"),
            Copying::Elements => "elements".to_owned(),
        };
        let team = match self.team {
            Team::Plain => "",
            Team::Wide => "_wide",
            Team::Fine => "_fine",
        };
        let [rows, columns] = self.block;
        let ragged = if self.ragged { "r" } else { "" };
        write!(f, "conv_depthwise_{kind}_{}_{stride}_{rows}x{columns}{ragged}{team}_{copying}", self.dtype)?;
        self.epilogue.iter().try_for_each(|epilogue| write!(f, "_{}", epilogue.name()))
    }
}

impl Spec {
    pub(super) fn target(&self) -> Target {
        let own = if self.overlaps() { Target::Sm90 } else { Target::Sm80 };
        self.epilogue.as_ref().map_or(own, |epilogue| epilogue.target().max(own))
    }

    /// Bytes of activations that are copied at a time.
    pub(super) fn copied_bytes(&self) -> u32 {
        match self.copying {
            Copying::Vectors(bytes) => bytes,
            Copying::Elements => self.dtype.bytes() as u32,
        }
    }

    /// Whether a launch begins while the one in front of it ends.
    pub(super) fn overlaps(&self) -> bool {
        self.team != Team::Plain
    }

    /// A reference to the kernel.
    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.to_string(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header =
            Header { name: self.to_string(), target: self.target(), threads: self.threads(), min_ctas: self.ctas_of_sm(), cluster: 1 };
        build(header, |k| match self.kind {
            Kind::Pixels => pixels::kernel(k, self),
            Kind::Filter => filter::kernel(k, self),
        })
    }

    /// Channels of a thread: those of a 32-bit word.
    pub(super) fn channels(&self) -> u32 {
        4 / self.dtype.bytes() as u32
    }

    /// Threads of a CTA side by side along channels; each has the channels of one 32-bit word.
    pub(super) fn lanes(&self) -> u32 {
        if self.team == Team::Wide { 32 } else { 16 }
    }

    /// Threads of a CTA that have the same channels, and different pixels.
    pub(super) fn places(&self) -> u32 {
        // Of wide tiles of x and of gradients, there is room for half as many pixels.
        if self.team == Team::Wide && self.kind == Kind::Filter { 4 } else { 8 }
    }

    /// Threads of a CTA.
    pub(super) fn threads(&self) -> u32 {
        self.lanes() * self.places()
    }

    /// Bytes of a pixel in shared memory.
    pub(super) fn pixel_bytes(&self) -> u32 {
        self.lanes() * 4
    }

    /// Channels of a CTA.
    pub(super) fn cta_channels(&self) -> u32 {
        self.lanes() * self.channels()
    }

    /// Rows and columns of outputs of one thread.
    pub(super) const fn outputs(&self) -> [u32; 2] {
        match (self.stride, self.team) {
            (Stride::One, Team::Fine) => [2, 4],
            // Seven divides the widths that networks for 224 pixels have all the way down.
            (Stride::One, _) => [4, 7],
            (Stride::Two, _) => [2, 4],
            (Stride::Half, _) => [4, 8],
        }
    }

    /// CTAs that share an SM: registers and shared memory are cut to this.
    pub(super) fn ctas_of_sm(&self) -> u32 {
        match (self.kind, self.team, self.block) {
            (Kind::Pixels, Team::Fine, _) => 6,
            (Kind::Pixels, Team::Wide, _) => 2,
            (Kind::Pixels, _, [7, 7] | [6, 6] | [5, 5]) => 3,
            (Kind::Pixels, ..) => 4,
            // Of stride 2, a thread holds fewer gradients.
            (Kind::Filter, _, [7, 7] | [5, 5]) if self.stride == Stride::One => 2,
            (Kind::Filter, ..) => 3,
        }
    }

    /// Tiles in shared memory at a time: the next is on its way while one is worked on, unless other CTAs cover the wait.
    pub(super) fn stages(&self) -> u32 {
        if self.kind == Kind::Pixels && self.block == [7, 7] { 1 } else { 2 }
    }

    /// The most pixels of a tile of activations.
    pub(super) fn tile_pixels(&self) -> u32 {
        match (self.kind, self.team, self.block) {
            (Kind::Pixels, Team::Fine, [5, 5]) => 256,
            (Kind::Pixels, Team::Fine, _) => 192,
            (Kind::Pixels, _, [7, 7]) => 736,
            (Kind::Pixels, _, [5, 5]) => 532,
            (Kind::Pixels, ..) => 364,
            (Kind::Filter, Team::Wide, _) => 180,
            (Kind::Filter, _, [7, 7]) => 500,
            (Kind::Filter, _, [5, 5]) => 400,
            (Kind::Filter, ..) => 330,
        }
    }

    /// Blocks of taps that there is room for: where a filter has no more of them, they are read once.
    pub(super) fn table_blocks(&self) -> u32 {
        if self.block == [3, 3] { 3 } else { 1 }
    }

    /// The most bytes of a tile of activations.
    pub(super) fn tile_bytes(&self) -> u32 {
        self.tile_pixels() * self.pixel_bytes()
    }

    /// The most bytes of a wgrad's tile of gradients, however its places lie.
    pub(super) fn gradient_bytes(&self) -> u32 {
        let [rows, columns] = self.outputs();
        let lines = self.places() * rows;
        let gaps = self.columns_between_gaps().map_or(0, |apart| lines * columns / apart * self.pixel_bytes());
        lines * (columns * self.pixel_bytes() + self.line_gap_bytes()) + gaps
    }

    /// Rows and columns of the tile that one thread meets.
    pub(super) fn thread_lines(&self) -> [u32; 2] {
        let outputs = self.outputs();
        std::array::from_fn(|dim| self.stride.lines(outputs[dim], self.block[dim]))
    }

    /// Of a tile, columns behind which a pixel stays free. Blocks of a wgrad of stride 2 that are neighbours are a whole number of turns of the banks apart: without it, the two of a
    /// warp would meet in all of theirs.
    pub(super) fn columns_between_gaps(&self) -> Option<u32> {
        (self.kind == Kind::Filter && self.stride == Stride::Two).then(|| self.stride.apart(self.outputs()[1]))
    }

    /// Bytes that stay free behind a line: where the two blocks of a warp lie below each other, they are four lines apart, and half a turn of the banks.
    fn line_gap_bytes(&self) -> u32 {
        if self.columns_between_gaps().is_some() { 16 } else { 0 }
    }

    /// Bytes in front of a column of a tile; of the first column of a block and those behind it likewise.
    pub(super) fn column_bytes(&self, column: u32) -> u32 {
        (column + self.columns_between_gaps().map_or(0, |columns| column / columns)) * self.pixel_bytes()
    }

    /// Bytes from line to line of a tile.
    pub(super) fn pitch_bytes(&self, columns: u32) -> u32 {
        self.column_bytes(columns.saturating_sub(1)) + self.pixel_bytes() + self.line_gap_bytes()
    }

    /// Which outputs and rows of taps meet a line of the tile.
    pub(super) fn pairs(&self, line: u32) -> Vec<(usize, usize)> {
        self.stride.pairs(self.outputs()[0], self.block[0], line)
    }

    /// Taps of a block.
    pub(super) fn taps(&self) -> u32 {
        self.block[0] * self.block[1]
    }
}
