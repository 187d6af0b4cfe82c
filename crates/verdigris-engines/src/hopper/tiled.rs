//! The source by tiled TMA: both operands are matrices, or batches of them, from which boxes come as they lie.

use std::panic::Location;

use verdigris_kir::face::{Divisor, Kernel, Mbarrier, TensorMap, Val};
use verdigris_kir::ir::MapDecl;
use verdigris_kir::params::Map;
use verdigris_kir::program::{L2Promotion, MapSpec};
use verdigris_kir::tile::clip::{Clip, ClipArgs};
use verdigris_kir::tile::ring::Cursor;
use verdigris_kir::tile::schedule::Work;

use super::share::Share;
use super::spec::{MainLoopSpec, Operand};
use super::stages::Stages;
use crate::terms;

verdigris_kir::parameters! {
    /// Where the operands are.
    pub(crate) struct TiledValues / TiledArgs of MainLoopSpec as spec {
        pub(crate) a: Map = spec.clipped(Operand::A).map(),
        pub(crate) b: Map = spec.clipped(Operand::B).map(),
        /// 1 for an operand with a matrix for each of the batch, 0 for one that all share; of planes: rows from a matrix to the next.
        pub(crate) a_batches: u32,
        pub(crate) b_batches: u32,
        /// Of operands in terms: matrices from a term of A, and of B, to the next.
        pub(crate) a_term: Option<u32> = (spec.terms > 1).then_some(()),
        pub(crate) b_term: Option<u32> = (spec.terms > 1).then_some(()),
        pub(crate) a_clip: ClipArgs = (),
        pub(crate) b_clip: ClipArgs = (),
    }
}

/// The map of a matrix, or of a stack of them; `dims` are innermost first.
pub(crate) fn matrix_map(decl: MapDecl, dims: [u64; 3], strides_bytes: [u64; 2]) -> MapSpec {
    MapSpec {
        decl,
        dims: dims.to_vec(),
        strides_bytes: strides_bytes.to_vec(),
        element_strides: vec![1; 3],
        lower_corner: vec![],
        upper_corner: vec![],
        fill: Default::default(),
        l2: L2Promotion::of_lines(&strides_bytes),
    }
}

/// The operands in memory. A and B, in this order wherever there are two of a kind.
pub(crate) struct Tiled<'k> {
    kernel: Kernel<'k>,
    spec: MainLoopSpec,
    maps: [TensorMap<'k>; 2],
    batches: [Val<'k, u32>; 2],
    apart: [Option<Val<'k, u32>>; 2],
    clips: [Clip<'k>; 2],
    /// How many rows earlier tiles of B begin in the second matrix of the batch, where there are two.
    lead: Option<Val<'k, u32>>,
    /// Steps of depth of a plane, where depth runs over planes.
    plane_steps: Option<Divisor<'k>>,
}

impl<'k> Tiled<'k> {
    pub(crate) fn new(k: Kernel<'k>, spec: &MainLoopSpec, values: TiledValues<'k>) -> Self {
        let TiledValues { a, b, a_batches, b_batches, a_term, b_term, a_clip, b_clip } = values;
        let clips = [Clip::new(spec.clipped(Operand::A), a_clip), Clip::new(spec.clipped(Operand::B), b_clip)];
        Tiled {
            kernel: k,
            spec: *spec,
            maps: [a, b],
            batches: [a_batches, b_batches],
            apart: [a_term, b_term],
            clips,
            lead: None,
            plane_steps: None,
        }
    }

    /// The same, but that tiles of the second matrix of a batch of two begin so many columns of the product earlier, if given. What lies in front of B's
    /// first row is zeros.
    pub(crate) fn interleaved(self, lead: Option<Val<'k, u32>>) -> Self {
        Tiled { lead, ..self }
    }

    /// The same, but that depth runs over planes, each of so many steps, if given: the third index of a map is the plane, whose last step ends with
    /// zeros, and the matrices of a batch have their rows one behind the other's.
    pub(crate) fn over_planes(self, plane_steps: Option<Divisor<'k>>) -> Self {
        Tiled { plane_steps, ..self }
    }

    /// Brings the tensor maps near: by one thread.
    #[track_caller]
    pub(crate) fn prefetch_maps(&self) {
        self.kernel.scope(Location::caller(), || {
            self.maps.iter().for_each(|map| self.kernel.prefetch_tensormap(map));
        });
    }

    /// Clears what no load will write: by all threads, in front of a barrier.
    #[track_caller]
    pub(crate) fn clear(&self, stages: &Stages<'k>) {
        self.kernel.scope(Location::caller(), || {
            for (clip, slots) in self.clips.iter().zip(&stages.slots) {
                clip.clear(slots.address(), self.spec.stages, self.kernel.thread(), self.spec.tile.threads());
            }
        });
    }

    /// The load warp's view of stages, where this CTA has its share of a cluster's work.
    #[track_caller]
    pub(crate) fn loader(&self, stages: &Stages<'k>, share: Share<'k>) -> Loader<'k, '_> {
        self.kernel.scope(Location::caller(), || {
            let begins =
                [Operand::A, Operand::B].map(|operand| share.loads_from(operand, || self.kernel.constant(self.spec.tile.loaded(operand))));
            Loader { source: self, stages: *stages, share, begins }
        })
    }
}

/// Fills stages.
pub(crate) struct Loader<'k, 'r> {
    source: &'r Tiled<'k>,
    stages: Stages<'k>,
    share: Share<'k>,
    /// Of each tile, the first row that this CTA loads.
    begins: [Val<'k, u32>; 2],
}

impl<'k> Loader<'k, '_> {
    /// Loads a piece of work, step by step: by one thread.
    #[track_caller]
    pub(crate) fn load(&self, work: &Work<'k>, cursor: &Cursor<'k>) {
        self.source.kernel.scope(Location::caller(), || {
            let Tiled { kernel: k, spec, batches, clips: [a, b], plane_steps, .. } = self.source;
            let (row, column) = (self.share.row(work), self.share.column(work));
            let mut first = [row * spec.tile.m + self.begins[0], column * spec.tile.n + self.begins[1]];
            if let Some(lead) = self.source.lead {
                first[1] = first[1] - lead * work.batch;
            }
            let of_batch = batches.map(|batches| work.batch * batches);
            if plane_steps.is_some() {
                first = [0, 1].map(|i| first[i] + of_batch[i]);
            }
            let (first_step, steps) = self.share.steps(work);
            let rows = [a.rows(row * spec.tile.m), b.rows(column * spec.tile.n)];
            // What arrives in each step, also from peers in the cluster.
            let bytes = a.bytes(rows[0]) + b.bytes(rows[1]);
            k.range(steps, |step| {
                let (matrix, step) = match plane_steps {
                    None => (of_batch, first_step + step),
                    Some(steps) => {
                        let (plane, step) = steps.split(first_step + step);
                        ([plane; 2], step)
                    }
                };
                let depth = step * spec.depth();
                // The last term first: its products are formed first.
                for term in (0..spec.terms).rev() {
                    let place = terms::place(term, spec.terms);
                    let matrix = [0, 1].map(|i| self.source.apart[i].map_or(matrix[i], |apart| matrix[i] + apart * place));
                    let full = cursor.acquire(bytes);
                    self.load_step([first, rows, matrix], depth, cursor, full);
                    cursor.advance();
                }
            });
        });
    }

    /// Loads a step of both operands into the cursor's stage; the bytes complete on `full`. Of each operand: the first row that this CTA
    /// loads, how many the tile has, and which matrix of the batch.
    fn load_step(&self, [first, rows, matrix]: [[Val<'k, u32>; 2]; 3], depth: Val<'k, u32>, cursor: &Cursor<'k>, full: Mbarrier<'k>) {
        let Stages { tiles, slots, .. } = self.stages;
        let to = [0, 1].map(|i| slots[i].address() + cursor.stage() * tiles[i].bytes());
        for (i, operand) in [Operand::A, Operand::B].into_iter().enumerate() {
            let (clip, map, options) = (&self.source.clips[i], &self.source.maps[i], self.share.options(operand));
            clip.load(to[i], self.begins[i], rows[i], map, first[i], depth, matrix[i], full, options);
        }
    }
}
