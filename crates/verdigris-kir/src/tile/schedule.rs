//! Schedules: which output tile, and which part of its depth, a CTA (or cluster) works on next.
//!
//! Every role of a kernel iterates the same schedule, so producers and consumers agree on the work without talking. The kernel sees
//! [`Work`]; how tiles are laid over the matrix (the raster) and how depth is split is settled here, by arguments, not by the spec.

use crate::face::{Kernel, Val, Var};
use crate::params::{Arguments, Divide, Parameter};
use std::panic::Location;

crate::parameters! {
    /// How a grid of tiles is walked: in groups of rows of tiles, so that the operands of tiles under way at the same time fit in L2.
    #[derive(Clone, Copy, Debug)]
    pub struct Raster / #[derive(Clone, Copy, Debug, PartialEq, Eq)] RasterArgs of () as _spec {
        /// Tiles of one matrix.
        pub tiles_per_batch: Divide,
        /// Tiles of a full group.
        pub tiles_per_group: Divide,
        /// Rows of tiles in a full group.
        pub group_rows: Divide,
        /// Rows of tiles in the last group.
        pub last_group_rows: Divide,
        /// Index of the last group.
        pub last_group: u32,
        /// 1 when groups are of columns instead of rows.
        pub along_columns: u32,
    }
}

impl RasterArgs {
    /// Walks `rows` × `columns` tiles in groups of `group` rows (or columns).
    pub fn new(rows: u32, columns: u32, group: u32, along_columns: bool) -> Self {
        let (rows, columns) = if along_columns { (columns, rows) } else { (rows, columns) };
        let group_rows = group.clamp(1, rows.max(1));
        let last_group = rows.max(1).div_ceil(group_rows) - 1;
        RasterArgs {
            tiles_per_batch: (rows * columns).max(1),
            tiles_per_group: (group_rows * columns).max(1),
            group_rows,
            last_group_rows: (rows - last_group * group_rows).max(1),
            last_group,
            along_columns: u32::from(along_columns),
        }
    }

    /// Rows and columns of tiles of which the first `tiles` places of the walk are, of one matrix.
    pub fn covered(&self, tiles: u32) -> [u32; 2] {
        let tiles = tiles.clamp(1, self.tiles_per_batch);
        let columns = self.tiles_per_group / self.group_rows;
        let rows = self.last_group * self.group_rows + self.last_group_rows;
        let covered = match tiles.div_ceil(self.tiles_per_group) {
            1 => [tiles.min(self.group_rows), tiles.div_ceil(self.group_rows)],
            groups => [(groups * self.group_rows).min(rows), columns],
        };
        if self.along_columns == 1 { [covered[1], covered[0]] } else { covered }
    }

    /// The tile at place `index` of the walk: `(row, column, batch)`, by the same steps as on the device.
    pub fn tile(&self, index: u32) -> (u32, u32, u32) {
        let (batch, rest) = (index / self.tiles_per_batch, index % self.tiles_per_batch);
        let (group, rest) = (rest / self.tiles_per_group, rest % self.tiles_per_group);
        let rows = if group == self.last_group { self.last_group_rows } else { self.group_rows };
        let (row, column) = (group * self.group_rows + rest % rows, rest / rows);
        if self.along_columns == 1 { (column, row, batch) } else { (row, column, batch) }
    }
}

impl<'k> Raster<'k> {
    /// The tile at place `index` of the walk: `(row, column, batch)`.
    #[track_caller]
    pub fn tile(&self, index: Val<'k, u32>) -> (Val<'k, u32>, Val<'k, u32>, Val<'k, u32>) {
        let k = index.kernel();
        k.scope(Location::caller(), || {
            let (batch, rest) = self.tiles_per_batch.split(index);
            let (group, rest) = self.tiles_per_group.split(rest);
            let last = group.eq(self.last_group);
            let column = k.select(last, self.last_group_rows.quotient(rest), self.group_rows.quotient(rest));
            let rows = k.select(last, self.last_group_rows.value(), self.group_rows.value());
            let row = group * self.group_rows.value() + (rest - column * rows);
            let swap = self.along_columns.ne(0);
            (k.select(swap, column, row), k.select(swap, row, column), batch)
        })
    }
}

/// A piece of work: a tile and a part of its depth.
#[derive(Clone, Copy, Debug)]
pub struct Work<'k> {
    /// Row of tiles.
    pub row: Val<'k, u32>,
    /// Column of tiles.
    pub column: Val<'k, u32>,
    /// Matrix of the batch.
    pub batch: Val<'k, u32>,
    /// Place of the tile in the walk.
    pub tile: Val<'k, u32>,
    /// First step of depth.
    pub first_step: Val<'k, u32>,
    /// How many steps of depth.
    pub steps: Val<'k, u32>,
    /// Which part of the tile this is.
    pub part: Val<'k, u32>,
    /// How many parts the tile has; 1 when its depth is not split.
    pub parts: Val<'k, u32>,
}

/// A static persistent schedule: worker `w` of `workers` first takes its share of the depth of the split tiles (stream-K), then whole tiles
/// `w`, `w + workers`, … behind them.
///
/// Source of the split: Osama et al., "Stream-K: Work-centric parallel decomposition for dense matrix-matrix multiplication", PPoPP 2023.
#[derive(Clone, Copy, Debug)]
pub struct Schedule<'k> {
    raster: Raster<'k>,
    tiles: Val<'k, u32>,
    steps: Val<'k, u32>,
    split: Option<Split<'k>>,
    worker: Val<'k, u32>,
    workers: Val<'k, u32>,
}

crate::parameters! {
    /// Tiles and their depth.
    struct Tiles / TilesArgs of bool as can_split {
        raster: RasterArgs = (),
        tiles: u32,
        steps: u32,
        split: Option<SplitArgs> = can_split.then_some(()),
    }
}

crate::parameters! {
    #[derive(Clone, Copy, Debug)]
    struct Split / SplitArgs of () as _spec {
        /// Tiles whose depth is split; they come first in the walk.
        split_tiles: u32,
        /// Steps of depth of one tile, rounded up to whole shares where every tile is split evenly.
        split_steps: Divide,
        /// Steps that one worker takes.
        share: Divide,
        abreast: Divide,
        apart: u32,
    }
}

/// The numbers behind a [`Schedule`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduleArgs {
    /// The walk.
    pub raster: RasterArgs,
    /// All tiles.
    pub tiles: u32,
    /// Steps of depth of one tile.
    pub steps: u32,
    /// Tiles whose depth is split.
    pub split_tiles: u32,
    /// Steps of split depth that one worker takes.
    pub share: u32,
    /// Steps of a split tile as they are counted: `steps`, or more where shares do not divide it.
    pub counted_steps: u32,
    /// Workers that follow each other take shares that are `apart` from each other, `abreast` of them before the shares between are taken.
    /// Where every tile has as many shares, those of neighbouring tiles at the same depth: measured, up to a sixth quicker than those of
    /// one tile.
    pub abreast: u32,
    /// See `abreast`; 1 for shares in order.
    pub apart: u32,
}

/// More workers than any launch has.
const ALL_WORKERS: u32 = 1 << 30;

impl ScheduleArgs {
    /// Whole tiles only.
    pub fn whole(raster: RasterArgs, tiles: u32, steps: u32) -> Self {
        ScheduleArgs { raster, tiles, steps, split_tiles: 0, share: 1, counted_steps: steps, abreast: ALL_WORKERS, apart: 1 }
    }

    /// Splits the depth of the first `split_tiles` tiles evenly over `workers`, at least `least` steps each.
    pub fn split(raster: RasterArgs, tiles: u32, steps: u32, split_tiles: u32, workers: u32, least: u32) -> Self {
        let total = u64::from(split_tiles) * u64::from(steps);
        let share = total.div_ceil(u64::from(workers.max(1))).max(u64::from(least.max(1))) as u32;
        ScheduleArgs { raster, tiles, steps, split_tiles, share, counted_steps: steps, abreast: ALL_WORKERS, apart: 1 }
    }

    /// Splits the depth of every tile into `parts` shares, a worker each: needs `tiles · parts` workers. The last share may be short;
    /// `None` where one would be empty.
    pub fn split_evenly(raster: RasterArgs, tiles: u32, steps: u32, parts: u32) -> Option<Self> {
        let share = steps.div_ceil(parts.max(1)).max(1);
        ((parts - 1) * share < steps).then_some(ScheduleArgs {
            raster,
            tiles,
            steps,
            split_tiles: tiles,
            share,
            counted_steps: share * parts,
            abreast: tiles,
            apart: parts,
        })
    }

    /// The most parts that a tile can have.
    pub fn most_parts(&self) -> u32 {
        match (self.split_tiles, self.counted_steps.is_multiple_of(self.share)) {
            (0, _) => 1,
            (_, true) => self.counted_steps / self.share,
            (_, false) => (self.steps - 1).div_ceil(self.share) + 1,
        }
    }
}

impl ScheduleArgs {
    /// The arguments of a launch whose kernel declares its schedule with `can_split`.
    pub fn bound(self, can_split: bool) -> Arguments {
        let mut arguments = Arguments::new();
        arguments.bind::<ScheduleArgs>("schedule", &can_split, self);
        arguments
    }
}

impl Parameter for ScheduleArgs {
    /// Whether the depth of tiles may be split.
    type Spec = bool;
    type Value<'k> = Schedule<'k>;
    type Argument = ScheduleArgs;

    #[track_caller]
    fn declare<'k>(k: Kernel<'k>, _: &'static str, can_split: &bool) -> Schedule<'k> {
        Schedule::declare(k, *can_split)
    }

    fn bind(schedule: ScheduleArgs, name: &'static str, can_split: &bool, to: &mut Arguments) {
        let ScheduleArgs { raster, tiles, steps, split_tiles, share, counted_steps, abreast, apart } = schedule;
        let split = can_split.then(|| SplitArgs { split_tiles, split_steps: counted_steps.max(1), share, abreast: abreast.max(1), apart });
        TilesArgs::bind(TilesArgs { raster, tiles, steps, split }, name, can_split, to);
    }
}

impl<'k> Schedule<'k> {
    /// Declares the parameters of [`ScheduleArgs`], and takes the worker's place from the cluster's (or CTA's) index.
    #[track_caller]
    pub fn declare(k: Kernel<'k>, can_split: bool) -> Self {
        use crate::inst::Special;
        let clusters = k.cluster_ctas() > 1;
        let Tiles { raster, tiles, steps, split } = Tiles::declare(k, &can_split);
        let mut worker = k.special(if clusters { Special::ClusterX } else { Special::CtaX });
        if let Some(Split { abreast, apart, .. }) = &split {
            let (between, place) = abreast.split(worker);
            worker = place * *apart + between;
        }
        Schedule { raster, tiles, steps, split, worker, workers: k.special(if clusters { Special::ClustersX } else { Special::GridX }) }
    }

    /// Runs `body` for each piece of this worker's work, in order.
    #[track_caller]
    pub fn for_each(&self, body: impl Fn(Work<'k>)) {
        let k = self.tiles.kernel();
        let at = Location::caller();
        k.scope_around(at, |caller| match &self.split {
            None => k.range_step(self.worker, self.tiles, self.workers, |tile| {
                let (row, column, batch) = self.raster.tile(tile);
                let (zero, one) = (k.constant(0), k.constant(1));
                let work = Work { row, column, batch, tile, first_step: zero, steps: self.steps, part: zero, parts: one };
                caller.run(|| body(work));
            }),
            Some(split) => self.for_each_split(split, &|work| caller.run(|| body(work))),
        });
    }

    /// The same for every `of`th piece, from piece `first` on: the work of one of several parties that take turns. Depth is not split.
    ///
    /// # Panics
    /// If the schedule was declared with a split.
    #[track_caller]
    pub fn for_each_ping_pong(&self, first: Val<'k, u32>, of: u32, body: impl Fn(Work<'k>)) {
        assert!(self.split.is_none(), "parties that take turns have whole tiles");
        let k = self.tiles.kernel();
        k.scope_around(Location::caller(), |caller| {
            let own = Schedule { worker: self.worker + first * self.workers, workers: self.workers * of, ..*self };
            own.for_each(|work| caller.run(|| body(work)));
        });
    }

    /// Whether this worker has another whole tile behind a piece of work.
    #[track_caller]
    pub fn goes_on_behind(&self, work: &Work<'k>) -> Val<'k, bool> {
        work.tile.kernel().scope(Location::caller(), || (work.tile + self.workers).lt(self.tiles))
    }

    /// Steps of depth of a whole tile.
    pub fn steps(&self) -> Val<'k, u32> {
        self.steps
    }

    fn for_each_split(&self, split: &Split<'k>, body: &dyn Fn(Work<'k>)) {
        let k = self.tiles.kernel();
        let counted = split.split_steps.value();
        let total = split.split_tiles * counted;
        let position: Var<'k, u32> = k.var_named("position", (self.worker * split.share.value()).min(total));
        let end = (position + split.share.value()).min(total);
        let whole: Var<'k, u32> = k.var_named("tile", split.split_tiles + self.worker);
        k.while_(
            || position.lt(end) | whole.lt(self.tiles),
            || {
                let in_split = position.lt(end);
                let (split_tile, split_step) = split.split_steps.split(position);
                let tile = k.select(in_split, split_tile, whole);
                let first_step = k.select(in_split, split_step, 0u32);
                let taken = (counted - first_step).min(end - position);
                let steps = k.select(in_split, (self.steps - first_step).min(taken), self.steps);
                let first = split.share.quotient(split_tile * counted);
                let last = split.share.quotient(split_tile * counted + (self.steps - 1));
                let part = k.select(in_split, self.worker - first, 0u32);
                let parts = k.select(in_split, last - first + 1, 1u32);
                let (row, column, batch) = self.raster.tile(tile);
                body(Work { row, column, batch, tile, first_step, steps, part, parts });
                whole.set(k.select(in_split, whole, whole + self.workers));
                position.set(k.select(in_split, position + taken, position));
            },
        );
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_raster_visits_every_tile_once() {
        for (rows, columns, group, along) in
            [(1, 1, 8, false), (7, 5, 3, false), (7, 5, 3, true), (16, 3, 8, false), (3, 16, 8, true), (9, 9, 1, false)]
        {
            let raster = RasterArgs::new(rows, columns, group, along);
            let mut seen: Vec<_> = (0..2 * rows * columns).map(|i| raster.tile(i)).collect();
            assert!(seen.iter().all(|&(r, c, b)| r < rows && c < columns && b < 2), "{rows}×{columns} group {group}");
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen.len() as u32, 2 * rows * columns);
        }
    }

    #[test]
    fn the_first_places_of_a_walk_cover_so_many_rows_and_columns() {
        for (rows, columns, group) in [(1, 1, 8), (7, 5, 3), (16, 3, 8), (3, 16, 8), (9, 9, 1), (20, 11, 8)] {
            for along in [false, true] {
                let raster = RasterArgs::new(rows, columns, group, along);
                for tiles in 1..=rows * columns {
                    let walked: Vec<_> = (0..tiles).map(|i| raster.tile(i)).collect();
                    let count = |of: fn(&(u32, u32, u32)) -> u32| walked.iter().map(of).collect::<BTreeSet<_>>().len() as u32;
                    let (seen, covered) = ([count(|tile| tile.0), count(|tile| tile.1)], raster.covered(tiles));
                    // A group that is begun counts whole.
                    let most = if along { [0, group] } else { [group, 0] };
                    assert!(
                        (0..2).all(|i| seen[i] <= covered[i] && covered[i] <= seen[i] + most[i]),
                        "{tiles} of {rows}×{columns}: {seen:?} {covered:?}"
                    );
                    if tiles <= raster.tiles_per_group || tiles == rows * columns {
                        assert_eq!(seen, covered, "{tiles} of {rows}×{columns} in groups of {group}, along {along}");
                    }
                }
                assert_eq!(raster.covered(2 * rows * columns), [rows, columns], "more than a matrix");
            }
        }
    }

    #[test]
    fn even_splits_cover_the_depth_once() {
        for steps in 1..60u32 {
            for parts in 1..9u32 {
                let Some(args) = ScheduleArgs::split_evenly(RasterArgs::new(3, 1, 1, false), 3, steps, parts) else { continue };
                assert_eq!(args.most_parts(), parts);
                // Every share has a worker.
                let mut shares: Vec<u32> =
                    (0..3 * parts).map(|worker| worker % args.abreast * args.apart + worker / args.abreast).collect();
                shares.sort_unstable();
                assert_eq!(shares, (0..3 * parts).collect::<Vec<_>>());
                let covered: u32 = (0..parts).map(|p| steps.min((p + 1) * args.share) - p * args.share).sum();
                assert_eq!((covered, (args.counted_steps + args.steps - 1) / args.share), (steps, 2 * parts - 1), "{steps} in {parts}");
            }
        }
    }

    #[test]
    fn the_most_parts_are_never_exceeded() {
        for steps in 1..40u32 {
            for share in 1..50u32 {
                let args = ScheduleArgs { share, split_tiles: 9, ..ScheduleArgs::whole(RasterArgs::new(1, 9, 1, false), 9, steps) };
                let parts = (0..9).map(|t| (t * steps + steps - 1) / share - t * steps / share + 1).max().unwrap();
                assert!(parts <= args.most_parts(), "steps {steps} share {share}: {parts} > {}", args.most_parts());
            }
        }
    }
}
