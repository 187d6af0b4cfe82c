//! The tiles of a problem laid over the chip: schedules with the clusters that they take, and what they ask of the chip in counts.

use verdigris_kir::tile::operand::ROW_BYTES;
use verdigris_kir::tile::schedule::{RasterArgs, ScheduleArgs};

use super::spec::{MainLoopSpec, Operand};
use crate::cost::{Join, Loop, wgmma_cycles};
use crate::split_k::MOST_PARTS_BYTES;
use crate::split_k::reduction::PartGrid;

/// The least steps of depth of a part, so that its ring fills.
const LEAST_STEPS: u32 = 4;

/// The tiles of a problem, as clusters count them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileGrid {
    /// Rows and columns of one matrix.
    pub(crate) extents: [u32; 2],
    pub(crate) matrices: u32,
    /// Steps of depth of each, at most.
    pub(crate) steps: u32,
    /// Clusters that are resident at once.
    pub(crate) workers: u32,
}

/// The order in which tiles are walked: in groups of so many rows of tiles, or of columns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileOrder {
    pub(crate) group: u32,
    pub(crate) along_columns: bool,
}

/// Work laid over the chip.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(crate) schedule: ScheduleArgs,
    /// CTAs, or clusters of them, that are launched.
    pub(crate) grid: u32,
    /// Tiles and parts, where a second launch adds these up.
    pub(crate) parts: Option<PartGrid>,
}

impl TileGrid {
    /// All tiles; nothing where they are too many to count.
    pub(crate) fn tiles(&self) -> Option<u32> {
        let [rows, columns] = self.extents;
        rows.checked_mul(columns)?.checked_mul(self.matrices).filter(|&tiles| tiles < 1 << 31)
    }

    fn raster(&self, order: TileOrder) -> RasterArgs {
        RasterArgs::new(self.extents[0], self.extents[1], order.group, order.along_columns)
    }

    /// Each tile whole.
    pub(crate) fn whole(&self, order: TileOrder) -> Option<Layout> {
        let tiles = self.tiles()?;
        let schedule = ScheduleArgs::whole(self.raster(order), tiles, self.steps);
        Some(Layout { schedule, grid: self.workers.min(tiles), parts: None })
    }

    /// Stream-K: the depth of the tiles of the last waves, of which the last of all is ragged, is split over all workers. Nothing where
    /// there is no such tile.
    pub(crate) fn last_waves(&self, order: TileOrder, waves: u32) -> Option<Layout> {
        let (tiles, workers) = (self.splittable()?, self.workers);
        let split_tiles = (tiles % workers + (waves - 1) * workers).min(tiles);
        if split_tiles == 0 {
            return None;
        }
        let schedule = ScheduleArgs::split(self.raster(order), tiles, self.steps, split_tiles, workers, LEAST_STEPS);
        let busy = (u64::from(split_tiles) * u64::from(self.steps)).div_ceil(u64::from(schedule.share)) as u32;
        Some(Layout { schedule, grid: workers.min(busy.max(tiles - split_tiles)).max(1), parts: None })
    }

    /// Split-K: every tile in so many parts, a worker each, in at most so many waves. Nothing where they are more, or one were empty.
    pub(crate) fn in_parts(&self, order: TileOrder, parts: u32, most_waves: u32) -> Option<Layout> {
        let tiles = self.splittable()?;
        let grid = tiles.checked_mul(parts).filter(|&every| every <= most_waves * self.workers)?;
        Some(Layout { schedule: ScheduleArgs::split_evenly(self.raster(order), tiles, self.steps, parts)?, grid, parts: None })
    }

    /// The same where a launch of its own adds the parts up. Nothing where they do not fit into scratch.
    pub(crate) fn reduced(&self, spec: &MainLoopSpec, order: TileOrder, parts: u32, most_waves: u32) -> Option<Layout> {
        let [down, across] = spec.tile.cluster;
        let [rows, columns] = self.extents;
        let (tile_rows, tile_columns) = (rows * down, columns * across);
        let grid = PartGrid { tile: spec.tile.parts(), tile_rows, tile_columns, matrices: self.matrices, parts };
        let layout = self.in_parts(order, parts, most_waves)?;
        (grid.fits() && grid.scratch_bytes() <= MOST_PARTS_BYTES).then_some(Layout { parts: Some(grid), ..layout })
    }

    /// The numbers of parts that are worth a trial: of whole waves up to `most_waves`, at least `least` a tile, each of some depth; as many as
    /// come out of whole shares.
    pub(crate) fn part_counts(&self, most_waves: u32, least: u32) -> Vec<u32> {
        let Some(tiles) = self.tiles() else { return Vec::new() };
        let of_waves =
            |waves: u32| (u64::from(self.workers) * u64::from(waves) / u64::from(tiles)).min(u64::from(self.steps / LEAST_STEPS));
        let counts = (1..=most_waves).map(|waves| of_waves(waves) as u32).filter(|&parts| parts >= least);
        let mut counts: Vec<u32> = counts.map(|parts| self.steps.div_ceil(self.steps.div_ceil(parts))).collect();
        counts.dedup();
        counts
    }

    /// All tiles, where the steps of split ones can be counted in 32 bits.
    fn splittable(&self) -> Option<u32> {
        self.tiles().filter(|&tiles| u64::from(tiles) * (u64::from(self.steps) + 64) < 1 << 32)
    }
}

impl Layout {
    /// What the main loop asks, where `workers` clusters are resident and a tile has so many steps in the mean and at most, with what the
    /// problem says of itself as `base`.
    pub(crate) fn work(&self, spec: &MainLoopSpec, workers: u32, [mean_steps, most_steps]: [f64; 2], base: Loop) -> Loop {
        let Layout { schedule, grid, parts } = self;
        let tile = &spec.tile;
        let [rows, columns] = [tile.m, tile.n].map(f64::from);
        // Whole tiles, then a share of those that are split.
        let whole = (schedule.tiles - schedule.split_tiles).div_ceil((*grid).min(workers).max(1));
        let rounds = if parts.is_some() { grid.div_ceil(workers) } else { 1 };
        let has_parts = parts.is_some() || schedule.split_tiles > 0;
        let own_steps = |steps: f64| if tile.cluster_split > 1 { (steps / f64::from(tile.cluster_split)).ceil() } else { steps };
        // For one tile alone the mean does not count.
        let whole_steps = f64::from(whole) * own_steps(if whole > 1 { mean_steps } else { most_steps });
        let (longest_steps, longest_tiles) = match has_parts {
            true => (whole_steps + f64::from(rounds * schedule.share), f64::from(whole + rounds)),
            false => (whole_steps, f64::from(whole)),
        };
        let join = match (parts, tile.cluster_split > 1, schedule.split_tiles > 0) {
            (Some(_), ..) => Join::Launch,
            (None, true, _) => Join::Cluster,
            (None, false, true) => Join::Fixup,
            (None, false, false) => Join::None,
        };
        let loaded = [Operand::A, Operand::B].map(|operand| f64::from(spec.clipped(operand).loaded * ROW_BYTES));
        let loaded_bytes: f64 = loaded.iter().zip(base.load_cost).map(|(bytes, cost)| bytes * cost).sum();
        Loop {
            tile: [rows, columns],
            tiles: f64::from(schedule.tiles * tile.ctas()),
            grid: f64::from(grid * tile.ctas()),
            resident: f64::from(workers * tile.ctas()),
            steps: own_steps(mean_steps),
            longest_steps,
            longest_tiles,
            parts: f64::from(if has_parts { schedule.most_parts() } else { 1 }),
            join,
            tensor_cycles: wgmma_cycles(rows, columns),
            shared_bytes: (rows + columns * rows / 64.0) * f64::from(ROW_BYTES) + loaded.iter().sum::<f64>(),
            loaded_bytes,
            wave_bytes: self.wave_bytes(spec, workers, rows, columns),
            issued: if spec.promotes() { rows * columns / 32.0 } else { 0.0 },
            threads: f64::from(tile.threads()),
            cluster: f64::from(tile.ctas()),
            stages: f64::from(spec.stages),
            ping_pong: tile.ping_pong,
            promoted: spec.promotes(),
            ..base
        }
    }

    /// The bytes of a step that the CTAs of a wave read, each counted once: those of the rows and columns of tiles that a wave covers.
    fn wave_bytes(&self, spec: &MainLoopSpec, workers: u32, rows: f64, columns: f64) -> f64 {
        let Layout { schedule, grid, .. } = self;
        let [down, across] = spec.tile.cluster.map(f64::from);
        let busy = (*grid).min(workers).max(1);
        let parts = if schedule.split_tiles == schedule.tiles { schedule.most_parts().max(1) } else { 1 };
        let [tile_rows, tile_columns] = schedule.raster.covered(busy.div_ceil(parts)).map(f64::from);
        (tile_rows * down * rows + tile_columns * across * columns) * f64::from(ROW_BYTES) * f64::from(parts.min(busy))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORDER: TileOrder = TileOrder { group: 8, along_columns: false };

    fn grid(extents: [u32; 2], steps: u32, workers: u32) -> TileGrid {
        TileGrid { extents, matrices: 1, steps, workers }
    }

    #[test]
    fn stream_k_splits_the_last_waves_where_the_last_is_ragged() {
        // Of ten tiles on four workers two are left over.
        let split = |waves| grid([5, 2], 16, 4).last_waves(ORDER, waves).map(|layout| (layout.schedule.split_tiles, layout.grid));
        assert_eq!([split(1), split(2)], [Some((2, 4)), Some((6, 4))]);
        assert!(grid([4, 2], 16, 4).last_waves(ORDER, 1).is_none());
        // Steps of split tiles are counted in 32 bits, those of whole ones are not.
        let deep = grid([1 << 10, 3], 1 << 22, 7);
        assert!(deep.last_waves(ORDER, 1).is_none() && deep.in_parts(ORDER, 2, u32::MAX >> 8).is_none() && deep.whole(ORDER).is_some());
    }

    #[test]
    fn parts_fill_waves_and_none_is_empty() {
        let launched = |steps, parts, waves| grid([2, 1], steps, 6).in_parts(ORDER, parts, waves).map(|layout| layout.grid);
        assert_eq!([launched(16, 3, 1), launched(16, 4, 1), launched(16, 4, 2)], [Some(6), None, Some(8)]);
        assert_eq!(launched(4, 3, 1), None, "two steps a part leave none for the third");
        // Seven parts of 64 steps would be ten steps each, and the last four.
        assert_eq!(grid([2, 1], 64, 14).part_counts(1, 3), [7]);
        assert_eq!(grid([2, 1], 64, 18).part_counts(1, 3), [8], "nine parts are eight of whole shares");
        assert_eq!(grid([2, 1], 64, 8).part_counts(3, 5), [8, 11]);
        assert!(grid([2, 1], 8, 18).part_counts(4, 3).is_empty(), "no part has less than four steps");
    }

    #[test]
    fn tiles_that_cannot_be_counted_are_nothing() {
        assert!(grid([1 << 16, 1 << 15], 1, 4).whole(ORDER).is_none() && grid([1 << 16, 1 << 16], 1, 4).whole(ORDER).is_none());
        assert!(grid([1 << 16, 1 << 16], 16, 4).part_counts(4, 1).is_empty());
    }
}
