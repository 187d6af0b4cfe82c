//! Both operands on their way: from tensor maps into the ring's stages by the load warp, and out of the stages by descriptors to the tensor
//! cores.

use verdigris_kir::face::{Kernel, Mbarrier, SharedPiece, TensorMap, Val};
use verdigris_kir::tile::clip::{Clip, ClipValues};
use verdigris_kir::tile::operand::OperandTile;
use verdigris_kir::tile::ring::{Cursor, Ring, RingScope};
use verdigris_kir::tile::schedule::Work;

use super::share::Share;
use super::spec::{Shared, Spec};

/// A and B, in this order wherever there are two of a kind.
const BOTH: [Shared; 2] = [Shared::A, Shared::B];

/// The operands in memory: the parameters that say where.
pub(super) struct Operands<'k, 's> {
    kernel: Kernel<'k>,
    spec: &'s Spec,
    maps: [TensorMap<'k>; 2],
    batches: [Val<'k, u32>; 2],
    clips: [Clip<'k>; 2],
}

impl<'k, 's> Operands<'k, 's> {
    pub(super) fn new(
        k: Kernel<'k>,
        spec: &'s Spec,
        maps: [TensorMap<'k>; 2],
        batches: [Val<'k, u32>; 2],
        [a, b]: [ClipValues<'k>; 2],
    ) -> Self {
        let clips = [Clip::new(spec.clipped(Shared::A), a), Clip::new(spec.clipped(Shared::B), b)];
        Operands { kernel: k, spec, maps, batches, clips }
    }

    /// Declares the stages that they are loaded into.
    pub(super) fn stages(self) -> Stages<'k, 's> {
        let (k, spec) = (self.kernel, self.spec);
        let tiles = [spec.a_tile(), spec.b_tile()];
        let slots = [("a tiles", &tiles[0]), ("b tiles", &tiles[1])].map(|(name, tile)| k.shared(name, spec.stages * tile.bytes(), 1024));
        let scope = if spec.cluster > 1 { RingScope::Cluster } else { RingScope::Cta };
        let ring = Ring::new(k, spec.stages, if spec.ping_pong { 1 } else { spec.consumers }, scope);
        Stages { operands: self, tiles, slots, ring }
    }
}

/// The stages: each holds a tile of A and one of B, [`Spec::depth`] deep.
pub(super) struct Stages<'k, 's> {
    operands: Operands<'k, 's>,
    tiles: [OperandTile; 2],
    slots: [SharedPiece<'k>; 2],
    pub(super) ring: Ring<'k>,
}

/// The tile loads of a piece of work, step by step.
pub(super) struct TileLoad<'k> {
    first_step: Val<'k, u32>,
    pub(super) steps: Val<'k, u32>,
    /// What arrives in each step, also from peers in the cluster.
    pub(super) bytes: Val<'k, u32>,
    /// Of each operand: the first row that this CTA loads, how many the tile has, and which matrix of the batch.
    first: [Val<'k, u32>; 2],
    rows: [Val<'k, u32>; 2],
    matrix: [Val<'k, u32>; 2],
}

impl<'k, 's> Stages<'k, 's> {
    /// Brings the tensor maps near: by one thread.
    pub(super) fn prefetch_maps(&self) {
        self.operands.maps.iter().for_each(|map| self.operands.kernel.prefetch_tensormap(map));
    }

    /// Clears what no load will write: by all threads, in front of a barrier.
    pub(super) fn clear(&self) {
        let (k, spec) = (self.operands.kernel, self.operands.spec);
        for (clip, slots) in self.operands.clips.iter().zip(&self.slots) {
            clip.clear(slots.address(), spec.stages, k.thread(), spec.threads());
        }
    }

    /// The load warp's view, where this CTA has its share of a cluster's work.
    pub(super) fn loader(&self, share: Share<'k, 's>) -> Loader<'k, 's, '_> {
        Loader { stages: self, share, begins: BOTH.map(|operand| share.loads_from(operand)) }
    }

    /// The consumers' view: what lies from row `first_row` of A's tile on.
    pub(super) fn descriptors(&self, first_row: Val<'k, u32>) -> Descriptors<'k, '_> {
        let [a, b] = &self.tiles;
        let low = [a.descriptor_base(self.slots[0].address(), first_row), b.descriptor_base(self.slots[1].address(), 0u32)];
        Descriptors { tiles: &self.tiles, low }
    }
}

/// Fills stages.
pub(super) struct Loader<'k, 's, 'r> {
    stages: &'r Stages<'k, 's>,
    share: Share<'k, 's>,
    /// Of each tile, the first row that this CTA loads.
    begins: [Val<'k, u32>; 2],
}

impl<'k> Loader<'k, '_, '_> {
    /// What is to be loaded of a piece of work.
    pub(super) fn tile_load(&self, work: &Work<'k>) -> TileLoad<'k> {
        let Operands { spec, batches, clips: [a, b], .. } = &self.stages.operands;
        let [row, column] = self.share.tile(work);
        let first = [row * spec.tile_m + self.begins[0], column * spec.tile_n + self.begins[1]];
        let matrix = batches.map(|batches| work.batch * batches);
        let (first_step, steps) = self.share.steps(work);
        let rows = [a.rows(row * spec.tile_m), b.rows(column * spec.tile_n)];
        TileLoad { first_step, steps, bytes: a.bytes(rows[0]) + b.bytes(rows[1]), first, rows, matrix }
    }

    /// The depth at which a step begins.
    pub(super) fn depth(&self, tile_load: &TileLoad<'k>, step: Val<'k, u32>) -> Val<'k, u32> {
        (tile_load.first_step + step) * self.stages.operands.spec.depth()
    }

    /// Loads a step of both operands into the cursor's stage; the bytes complete on `full`.
    pub(super) fn load(&self, tile_load: &TileLoad<'k>, depth: Val<'k, u32>, cursor: &Cursor<'k>, full: Mbarrier<'k>) {
        let Stages { operands: Operands { maps, clips, .. }, tiles, slots, .. } = self.stages;
        let to = [0, 1].map(|i| slots[i].address() + cursor.stage() * tiles[i].bytes());
        for (i, operand) in BOTH.into_iter().enumerate() {
            let options = self.share.options(operand);
            clips[i].load(
                to[i],
                self.begins[i],
                tile_load.rows[i],
                &maps[i],
                tile_load.first[i],
                depth,
                tile_load.matrix[i],
                full,
                options,
            );
        }
    }
}

/// The low words of the descriptors of both operands' tiles.
pub(super) struct Descriptors<'k, 'r> {
    tiles: &'r [OperandTile; 2],
    low: [Val<'k, u32>; 2],
}

impl<'k, 'r> Descriptors<'k, 'r> {
    /// Those of a stage.
    pub(super) fn of(&self, stage: Val<'k, u32>) -> Descriptors<'k, 'r> {
        Descriptors { tiles: self.tiles, low: [0, 1].map(|i| self.low[i] + stage * (self.tiles[i].bytes() >> 4)) }
    }

    /// A's, of 64 rows from `row` on, at an instruction's step of depth.
    pub(super) fn a(&self, row: u32, step: u32) -> Val<'k, u64> {
        self.at(0, row, step)
    }

    /// B's.
    pub(super) fn b(&self, step: u32) -> Val<'k, u64> {
        self.at(1, 0, step)
    }

    fn at(&self, operand: usize, row: u32, step: u32) -> Val<'k, u64> {
        let tile = &self.tiles[operand];
        tile.descriptor_from(self.low[operand] + tile.advance(row, step))
    }
}
