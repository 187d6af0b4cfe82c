//! The stages of a ring: each holds a tile of A and one of B, [`MainLoopSpec::depth`] deep, loaded by TMA and read by `wgmma`.

use verdigris_kir::face::{Kernel, SharedPiece, Val};
use verdigris_kir::tile::operand::OperandTile;
use verdigris_kir::tile::ring::{Ring, RingScope};

use super::spec::{MainLoopSpec, Operand};

/// The shared memory of both operands, and the ring's barriers.
#[derive(Clone, Copy)]
pub(crate) struct Stages<'k> {
    /// Of A and of B.
    pub(crate) tiles: [OperandTile; 2],
    pub(crate) slots: [SharedPiece<'k>; 2],
    pub(crate) ring: Ring<'k>,
}

impl<'k> Stages<'k> {
    /// Stages that each consumer gives back once a turn.
    #[track_caller]
    pub(crate) fn new(k: Kernel<'k>, spec: &MainLoopSpec) -> Self {
        Stages::read_by(k, spec, spec.tile.sharers())
    }

    /// Stages that `readers` parties of each CTA give back once a turn.
    #[track_caller]
    pub(crate) fn read_by(k: Kernel<'k>, spec: &MainLoopSpec, readers: u32) -> Self {
        Stages::filled_by(k, spec, 1, readers)
    }

    /// The same that `writers` parties fill together.
    #[track_caller]
    pub(crate) fn filled_by(k: Kernel<'k>, spec: &MainLoopSpec, writers: u32, readers: u32) -> Self {
        let tiles = [Operand::A, Operand::B].map(|operand| spec.operand(operand));
        let slots = [("a tiles", tiles[0]), ("b tiles", tiles[1])].map(|(name, tile)| k.shared(name, spec.stages * tile.bytes(), 1024));
        let scope = match (spec.tile.peers(), spec.tile.cluster_split) {
            (1, _) => RingScope::Cta,
            (_, 1) => RingScope::Cluster,
            (peers, _) => RingScope::Peers(peers),
        };
        Stages { tiles, slots, ring: Ring::filled_by(k, spec.stages, writers, readers, scope) }
    }

    /// The consumers' view: what lies from row `first_row` of A's tile on.
    #[track_caller]
    pub(crate) fn descriptors(&self, first_row: Val<'k, u32>) -> Descriptors<'k> {
        let [a, b] = self.tiles;
        let low = [a.descriptor_base(self.slots[0].address(), first_row), b.descriptor_base(self.slots[1].address(), 0u32)];
        Descriptors { tiles: self.tiles, low }
    }
}

/// The low words of the descriptors of both operands' tiles.
pub(crate) struct Descriptors<'k> {
    tiles: [OperandTile; 2],
    low: [Val<'k, u32>; 2],
}

impl<'k> Descriptors<'k> {
    /// Those of a stage.
    pub(crate) fn of(&self, stage: Val<'k, u32>) -> Self {
        Descriptors { tiles: self.tiles, low: [0, 1].map(|i| self.low[i] + stage * (self.tiles[i].bytes() >> 4)) }
    }

    /// A's, of 64 rows from `row` on, at an instruction's step of depth.
    #[track_caller]
    pub(crate) fn a(&self, row: u32, step: u32) -> Val<'k, u64> {
        self.at(0, row, step)
    }

    /// B's.
    #[track_caller]
    pub(crate) fn b(&self, step: u32) -> Val<'k, u64> {
        self.at(1, 0, step)
    }

    #[track_caller]
    fn at(&self, operand: usize, row: u32, step: u32) -> Val<'k, u64> {
        let tile = &self.tiles[operand];
        tile.descriptor_from(self.low[operand] + tile.advance(row, step))
    }
}
