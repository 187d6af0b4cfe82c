//! Which part of the work a CTA of a cluster takes: tiles beside its peers', of which it loads a part of what they share, or a part of one
//! depth.

use std::panic::Location;

use verdigris_kir::face::{Kernel, LoadOptions, Val};
use verdigris_kir::tile::schedule::Work;

use super::WARPGROUP;
use super::spec::{Operand, TileShape};
use crate::split_k::fixup::Part;

/// A thread of a consumer.
#[derive(Clone, Copy)]
pub(crate) struct Consumer<'k> {
    /// Its index in the warpgroup, and the warpgroup's among the consumers.
    pub(crate) thread: Val<'k, u32>,
    pub(crate) warpgroup: Val<'k, u32>,
    /// The first row of a tile that the warpgroup has.
    pub(crate) first_row: Val<'k, u32>,
    /// Warpgroups in front of the consumers.
    producers: u32,
}

impl<'k> Consumer<'k> {
    #[track_caller]
    pub(crate) fn new(k: Kernel<'k>, tile: TileShape) -> Self {
        Consumer::behind(k, tile, 1)
    }

    /// Behind so many warpgroups of producers.
    #[track_caller]
    pub(crate) fn behind(k: Kernel<'k>, tile: TileShape, producers: u32) -> Self {
        let thread = k.thread() & (WARPGROUP - 1);
        let warpgroup = k.uniform(k.thread() >> 7) - producers;
        let first_row = if tile.ping_pong { k.constant(0) } else { warpgroup * (64 * tile.blocks()) };
        Consumer { thread, warpgroup, first_row, producers }
    }

    /// The thread's index among those of all consumers.
    #[track_caller]
    pub(crate) fn index(&self) -> Val<'k, u32> {
        self.thread.kernel().thread() - WARPGROUP * self.producers
    }
}

/// A CTA's place in its cluster.
#[derive(Clone, Copy)]
pub(crate) struct Share<'k> {
    kernel: Kernel<'k>,
    shape: TileShape,
    /// Among the CTAs that take tiles of their own: column by column of tiles.
    peer: Val<'k, u32>,
    /// The row and the column of tiles among those.
    place: [Val<'k, u32>; 2],
    /// Among those that take parts of one tile's depth.
    pub(crate) depth_rank: Val<'k, u32>,
    /// The CTAs that share A and those that share B with this one, as masks, where others do.
    shared_with: [Option<Val<'k, u16>>; 2],
}

impl<'k> Share<'k> {
    #[track_caller]
    pub(crate) fn new(k: Kernel<'k>, shape: TileShape) -> Self {
        let rank = if shape.ctas() > 1 { k.cluster_rank() } else { k.constant(0) };
        let (peer, depth_rank) = match (shape.peers(), shape.cluster_split) {
            (1, _) => (k.constant(0), rank),
            (_, 1) => (rank, k.constant(0)),
            (peers, _) => (rank & (peers - 1), rank >> peers.ilog2()),
        };
        let place = match shape.cluster {
            [_, 1] => [peer, k.constant(0)],
            [1, _] => [k.constant(0), peer],
            [down, _] => [peer & (down - 1), peer >> down.ilog2()],
        };
        let shared_with = k.scope(Location::caller(), || {
            let first = (shape.peers() > 1 && shape.cluster_split > 1).then(|| rank - peer);
            [Operand::A, Operand::B].map(|operand| (shape.sharers_of(operand) > 1).then(|| shared_with(k, shape, operand, place, first)))
        });
        Share { kernel: k, shape, peer, place, depth_rank, shared_with }
    }

    /// How an operand is loaded: for all CTAs that share it.
    pub(crate) fn options(&self, operand: Operand) -> LoadOptions<'k> {
        LoadOptions { multicast: self.shared_with[operand as usize], policy: None }
    }

    /// First row (or column) of a tile that this CTA loads, where each loads `loaded` of those that are shared.
    #[track_caller]
    pub(crate) fn loads_from(&self, operand: Operand, loaded: impl FnOnce() -> Val<'k, u32>) -> Val<'k, u32> {
        let [row, column] = self.place;
        match operand {
            _ if self.shape.sharers_of(operand) == 1 => self.kernel.constant(0),
            Operand::A => column * loaded(),
            Operand::B => row * loaded(),
        }
    }

    /// Row of tiles. A cluster takes neighbouring ones.
    #[track_caller]
    pub(crate) fn row(&self, work: &Work<'k>) -> Val<'k, u32> {
        self.beside(work.row, 0)
    }

    /// Column of tiles.
    #[track_caller]
    pub(crate) fn column(&self, work: &Work<'k>) -> Val<'k, u32> {
        self.beside(work.column, 1)
    }

    #[track_caller]
    fn beside(&self, index: Val<'k, u32>, side: usize) -> Val<'k, u32> {
        match self.shape.cluster[side] {
            1 => index,
            tiles => index * tiles + self.place[side],
        }
    }

    /// The CTA's part of a piece of work. The CTAs that share a tile each take a part of its depth, in the order of their ranks.
    #[track_caller]
    pub(crate) fn own(&self, work: Work<'k>) -> Work<'k> {
        if self.shape.cluster_split == 1 {
            return work;
        }
        let first_step = self.cut(&work, self.depth_rank);
        Work { first_step, steps: self.cut(&work, self.depth_rank + 1) - first_step, ..work }
    }

    /// First step and number of steps of the same.
    #[track_caller]
    pub(crate) fn steps(&self, work: &Work<'k>) -> (Val<'k, u32>, Val<'k, u32>) {
        match self.shape.cluster_split {
            1 => (work.first_step, work.steps),
            _ => (self.cut(work, self.depth_rank), self.cut(work, self.depth_rank + 1) - self.cut(work, self.depth_rank)),
        }
    }

    /// The first step of the part of the depth that the CTA of such a rank takes.
    #[track_caller]
    fn cut(&self, work: &Work<'k>, depth_rank: Val<'k, u32>) -> Val<'k, u32> {
        (work.steps * depth_rank) >> self.shape.cluster_split.ilog2()
    }

    /// The part that `by` has of a tile whose depth is split over the grid.
    #[track_caller]
    pub(crate) fn part(&self, work: &Work<'k>, by: Consumer<'k>) -> Part<'k> {
        let owner = (work.tile * self.shape.peers() + self.peer) * self.shape.consumers + by.warpgroup;
        Part { owner, part: work.part, parts: work.parts, warpgroup: by.warpgroup, thread: by.thread }
    }
}

/// The CTAs that share an operand with the one at a place, as a mask; `first` is the rank of the first of the CTAs that take tiles beside it.
#[track_caller]
fn shared_with<'k>(
    k: Kernel<'k>,
    shape: TileShape,
    operand: Operand,
    place: [Val<'k, u32>; 2],
    first: Option<Val<'k, u32>>,
) -> Val<'k, u16> {
    let [down, across] = shape.cluster;
    // Of the CTA in the first row and column of tiles.
    let mask = match operand {
        Operand::A => (0..across).fold(0, |mask, column| mask | 1 << (column * down)),
        Operand::B => (1u32 << down) - 1,
    };
    let [row, column] = place;
    let moved = match operand {
        Operand::A if down > 1 && across > 1 => Some(row),
        Operand::B if down > 1 && across > 1 => Some(column * down),
        _ => None,
    };
    match (first, moved) {
        (None, None) => k.constant(mask as u16),
        (Some(by), None) | (None, Some(by)) => k.constant(mask).shl(by).low16(),
        (Some(first), Some(moved)) => k.constant(mask).shl(first + moved).low16(),
    }
}
