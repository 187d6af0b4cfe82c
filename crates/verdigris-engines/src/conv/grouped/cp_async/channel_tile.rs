//! Channel tiles: which groups a CTA takes together, and how they lie in its shared memory.
//!
//! Groups of fewer channels than a chunk has, or of a number that is no multiple of 8, are taken together until input and output channels
//! both are one: a *block*, whose filter has zeros where input and output belong to different groups. A *channel tile* is as many blocks as
//! 64 channels hold.
//!
//! Each block has as many places for chunks as the size class of its channels says, in shared memory as in the tile of sums. Places without
//! channels hold zeros, so that blocks of a multiple of 8 channels see nothing of their neighbours.

use serde::{Deserialize, Serialize};
use verdigris_graph::{ConvProblem, Direction};

use super::super::CHUNK;

/// Chunks of a pixel in shared memory.
pub(super) const SLOTS: u32 = 8;
/// Distance of pixels in shared memory: one chunk more than they hold, so that a chunk of eight neighbouring pixels touches all banks.
pub(super) const PITCH_BYTES: u32 = 16 * (SLOTS + 1);

/// The size class of a block: chunks of its input and of its output.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct ChannelTile {
    /// 1, 2, 3, 4, 6 or 8.
    pub(super) chunks: u32,
}

impl ChannelTile {
    /// All classes, the last of which is the largest block.
    pub(super) const ALL: [ChannelTile; 6] = [
        ChannelTile { chunks: 1 },
        ChannelTile { chunks: 2 },
        ChannelTile { chunks: 3 },
        ChannelTile { chunks: 4 },
        ChannelTile { chunks: 6 },
        ChannelTile { chunks: 8 },
    ];

    /// Blocks of a channel tile.
    pub(super) const fn blocks(self) -> u32 {
        SLOTS / self.chunks
    }

    /// Chunks of a pixel that blocks have places for.
    pub(super) const fn slots(self) -> u32 {
        self.blocks() * self.chunks
    }

    /// What a warp takes at a time: a block, or two of one chunk each, which one `ldmatrix` reads.
    pub(super) const fn units(self) -> u32 {
        if self.chunks == 1 { SLOTS / 2 } else { self.blocks() }
    }

    /// Chunks of a unit's output: columns of 8 in the tile of sums.
    pub(super) const fn columns(self) -> u32 {
        if self.chunks == 1 { 2 } else { self.chunks }
    }

    /// Registers of a unit's filter at one tap: of 8×8 elements each, in vectors of up to four.
    pub(super) const fn registers(self) -> u32 {
        if self.chunks == 1 { 2 } else { (self.chunks * self.chunks).next_multiple_of(4) }
    }

    /// Registers of one vector.
    pub(super) const fn vector(self) -> u32 {
        if self.chunks == 1 { 2 } else { 4 }
    }

    /// Bytes of a unit's filter at one tap.
    pub(super) const fn unit_bytes(self) -> u32 {
        self.registers() * 128
    }
}

/// Channels and groups of a problem as an engine's kernels count them: *input* is what is read, *output* what is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Channels {
    /// Groups of the problem.
    pub(super) groups: u32,
    /// Groups of a block.
    pub(super) merged: u32,
    /// Channels of a group.
    pub(super) group_inputs: u32,
    pub(super) group_outputs: u32,
    /// Channels over all groups.
    pub(super) inputs: u32,
    pub(super) outputs: u32,
}

impl Channels {
    /// Nothing where numbers do not fit 32 bits.
    pub(super) fn of(problem: &ConvProblem) -> Option<Channels> {
        let (inputs, outputs) = if problem.direction == Direction::Dgrad { (problem.k, problem.c) } else { (problem.c, problem.k) };
        let groups = u32::try_from(problem.groups).ok().filter(|&groups| groups > 0)?;
        let (inputs, outputs) = (u32::try_from(inputs).ok()?, u32::try_from(outputs).ok()?);
        let (group_inputs, group_outputs) = (inputs / groups, outputs / groups);
        let needed = |channels: u32| CHUNK >> channels.trailing_zeros().min(CHUNK.ilog2());
        // A single group has no neighbour to be taken together with. Both numbers are powers of two.
        let merged = if groups == 1 { 1 } else { needed(group_inputs).max(needed(group_outputs)) };
        Some(Channels { groups, merged, group_inputs, group_outputs, inputs, outputs })
    }

    /// Blocks of the problem.
    pub(super) fn blocks(&self) -> u32 {
        self.groups.div_ceil(self.merged)
    }

    /// Input channels of a block.
    pub(super) fn block_inputs(&self) -> u32 {
        self.merged.saturating_mul(self.group_inputs)
    }

    /// Output channels of a block.
    pub(super) fn block_outputs(&self) -> u32 {
        self.merged.saturating_mul(self.group_outputs)
    }

    /// The size class; nothing where a block is larger than a channel tile.
    pub(super) fn channel_tile(&self) -> Option<ChannelTile> {
        let channels = self.block_inputs().max(self.block_outputs());
        ChannelTile::ALL.into_iter().find(|channel_tile| channel_tile.chunks * CHUNK >= channels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn channels(groups: u32, group_inputs: u32, group_outputs: u32) -> Channels {
        let needed = |channels: u32| (1..=8u32).find(|merged| (merged * channels).is_multiple_of(8)).unwrap();
        let merged = if groups == 1 { 1 } else { needed(group_inputs).max(needed(group_outputs)) };
        Channels { groups, merged, group_inputs, group_outputs, inputs: groups * group_inputs, outputs: groups * group_outputs }
    }

    #[test]
    fn blocks_are_whole_chunks_and_classes_hold_them() {
        for (groups, inputs, outputs, class, blocks) in [
            (32, 4, 4, Some(1), 16),
            (32, 8, 8, Some(1), 32),
            (4, 8, 16, Some(2), 4),
            (12, 2, 6, Some(3), 3),
            (3, 24, 16, Some(3), 3),
            (5, 5, 5, Some(6), 1),
            (2, 40, 40, Some(6), 2),
            (2, 64, 8, Some(8), 2),
            (1, 20, 3, Some(3), 1),
            (8, 9, 8, None, 1),
            (2, 72, 8, None, 2),
        ] {
            let one = channels(groups, inputs, outputs);
            let extents = verdigris_graph::ConvExtents {
                direction: Direction::Fprop,
                n: 1,
                c: u64::from(one.inputs),
                k: u64::from(one.outputs),
                groups: u64::from(groups),
                input: [1, 4, 4],
                filter: [1, 1, 1],
                pads: [0; 3],
                strides: [1; 3],
                dilations: [1; 3],
            };
            let dtype = verdigris_tensor::DType::Bf16;
            let problem = ConvProblem::packed(extents, dtype, dtype).unwrap();
            assert_eq!(Channels::of(&problem), Some(one));
            assert_eq!(one.channel_tile().map(|channel_tile| channel_tile.chunks), class, "{one:?}");
            assert_eq!(one.blocks(), blocks, "{one:?}");
            assert!(groups == 1 || (one.block_inputs() % 8, one.block_outputs() % 8) == (0, 0), "{one:?}");
        }
    }

    #[test]
    fn a_unit_has_columns_for_its_blocks() {
        for channel_tile in ChannelTile::ALL {
            assert_eq!(channel_tile.units() * channel_tile.columns(), channel_tile.blocks() * channel_tile.chunks);
            assert!(
                channel_tile.registers() >= channel_tile.chunks * channel_tile.columns()
                    && channel_tile.registers() % channel_tile.vector() == 0
            );
            assert!(channel_tile.units().is_power_of_two());
        }
    }
}
