//! How a filter's gradient is cut: its sums into slices and units of threads, y into tiles, tiles into runs of pixels.

use verdigris_graph::ConvProblem;

use super::kernel::{TilesArgs, UnitsArgs};
use super::{ARENA_BYTES, CHANNELS, CTAS_OF_SM, Spec};
use crate::conv::in_patches::{Axis, SourceArgs, THREADS, is_channels_first, lanes};
use crate::layout::images::StridedArguments;
use crate::layout::space::divisor;
use crate::split_k::MOST_PARTS_BYTES;

/// The most channels of a slice, eight by eight.
const MOST_DOWN: u64 = 16;
/// Into how many tiles a line of y is cut, and into how many runs a line of a tile.
const ACROSS: [u64; 7] = [1, 2, 3, 4, 6, 8, 12];
const RUNS: [u64; 4] = [1, 2, 4, 8];

/// Instructions by which a thread brings an element, beside what it works out once for a column.
const OF_ELEMENT: u64 = 10;

/// A way to cut a problem.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::conv) struct Cut {
    axes: [Axis; 2],
    /// Positions of a filter, and places of a pixel of x that take its channels.
    positions: u64,
    planes: u64,
    /// Slices of the result along its channels and its taps, and units of a slice.
    pub(super) slices: [u64; 2],
    pub(super) down: u64,
    pub(super) across: u64,
    groups: u64,
    /// Rows and columns of a tile, and runs of a row.
    tile: [u64; 2],
    runs: u64,
    run: u64,
    /// Rows of a patch, columns of a residue, places of a residue and of a row.
    rows: u64,
    quotients: u64,
    residue_places: u64,
    row_places: u64,
    /// Times that a warp reads shared memory for a position of its lanes.
    reads: u64,
    /// Tiles of a slice, and parts that walk over them.
    tiles: [u64; 2],
    pub(super) count: u64,
    pub(super) parts: u64,
    /// How tiles of x and y are shared out to threads, and a thread's instructions.
    x_lanes: (u32, u64),
    y_lanes: (u32, u64),
}

impl Cut {
    /// The best cut of each way to slice the result, the best of all first.
    pub(super) fn all(p: &ConvProblem, spec: &Spec, sms: u32) -> Vec<Cut> {
        let axes = [1, 2].map(|dim| Axis::of(p, dim));
        let planes = p.c.div_ceil(u64::from(spec.channels()));
        let positions = axes[0].taps.saturating_mul(axes[1].taps).saturating_mul(planes);
        let (wide, tall) = (positions.div_ceil(u64::from(spec.positions())), p.k.div_ceil(u64::from(CHANNELS)));
        let fewest = tall.div_ceil(MOST_DOWN);
        let mut cuts: Vec<(f64, Cut)> = Vec::new();
        for down in [1, 2, 4].map(|times| tall.div_ceil(fewest * times)) {
            let fewest = wide.div_ceil(u64::from(THREADS) / down);
            for across in (fewest..fewest + 3).map(|slices| wide.div_ceil(slices)) {
                if cuts.iter().any(|(_, cut)| (cut.down, cut.across) == (down, across)) {
                    continue;
                }
                let cut = Cut {
                    axes,
                    positions,
                    planes,
                    slices: [tall.div_ceil(down), wide.div_ceil(across)],
                    down,
                    across,
                    groups: u64::from(THREADS) / (down * across),
                    tile: [1; 2],
                    runs: 1,
                    run: 1,
                    rows: 1,
                    quotients: 1,
                    residue_places: 1,
                    row_places: 1,
                    reads: u64::from(spec.words()),
                    tiles: [1; 2],
                    count: 1,
                    parts: 1,
                    x_lanes: (0, 0),
                    y_lanes: (0, 0),
                };
                cuts.extend(cut.tiled(p, spec, sms).map(|cut| cut.set_apart(spec)).map(|cut| (cut.cost(p, spec, sms), cut)));
            }
        }
        cuts.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        cuts.into_iter().map(|(_, cut)| cut).collect()
    }

    /// With the best tiles, if there is room for any.
    fn tiled(&self, p: &ConvProblem, spec: &Spec, sms: u32) -> Option<Cut> {
        let [height, width] = self.axes.map(|axis| axis.result);
        let mut best: Option<(f64, Cut)> = None;
        for columns in ACROSS.map(|tiles| width.div_ceil(tiles)) {
            for run in RUNS.map(|runs| columns.div_ceil(runs)) {
                let runs = columns.div_ceil(run);
                // One row, or as many as give each group a run, or two.
                for rows in [0, 1, 2].map(|turns| (self.groups * turns).div_ceil(runs).clamp(1, height)) {
                    let rows = height.div_ceil(height.div_ceil(rows));
                    let cut = Cut { tile: [rows, columns], runs, run, ..*self };
                    let Some(cut) = cut.placed(p, spec) else { continue };
                    for share in [1, 2, 4] {
                        let cut = cut.in_parts(p, sms, share);
                        let cost = cut.cost(p, spec, sms);
                        if best.is_none_or(|(least, _)| cost < least) {
                            best = Some((cost, cut));
                        }
                    }
                }
            }
        }
        best.map(|(_, cut)| cut)
    }

    /// With its place in shared memory, if there is room.
    fn placed(self, p: &ConvProblem, spec: &Spec) -> Option<Cut> {
        let [down, right] = self.axes;
        let [rows, columns] = self.tile;
        let quotients = columns + right.ahead();
        let patch_rows = (rows - 1).checked_mul(down.step)?.checked_add((down.taps - 1) * down.dilation)? + 1;
        // Neighbouring taps are of neighbouring residues: these begin so far apart that lanes that read together meet no bank twice.
        let together = lanes_together(spec);
        let apart = if right.step > 1 { together.div_ceil(right.step).wrapping_sub(quotients) % together } else { 0 };
        let residue_places = quotients + apart;
        let row_places = residue_places.checked_mul(right.step)?.checked_add(together)?;
        let cut = Cut { rows: patch_rows, quotients, residue_places, row_places, ..self };
        let places = self.planes.checked_mul(patch_rows)?.checked_mul(row_places)?;
        let x_bytes = places.checked_mul(4 * u64::from(spec.words()))?;
        let stage_bytes = x_bytes.checked_add(16)?.checked_add(rows.checked_mul(columns)?.checked_mul(cut.pixel_bytes())?)?;
        if 2 * stage_bytes > u64::from(ARENA_BYTES) {
            return None;
        }
        let tiles = [down.result.div_ceil(rows), right.result.div_ceil(columns)];
        let x_lanes = lanes(p.c * quotients * right.step, patch_rows, OF_ELEMENT);
        let y_lanes = lanes(columns * cut.y_channels(spec), rows, OF_ELEMENT);
        Some(Cut { tiles, count: (tiles[0] * tiles[1]).saturating_mul(p.n), x_lanes, y_lanes, ..cut })
    }

    /// With as many parts as there is room for on the chip, or a share of them.
    fn in_parts(self, p: &ConvProblem, sms: u32, share: u64) -> Cut {
        let resident = u64::from(sms * CTAS_OF_SM) / share;
        let most = (MOST_PARTS_BYTES / self.part_bytes(p)).max(1);
        let parts = (resident / self.all_slices()).clamp(1, self.count.min(most));
        // As few as have no more tiles each.
        Cut { parts: self.count.div_ceil(self.count.div_ceil(parts)), ..self }
    }

    /// Cycles of the busiest SM, about.
    fn cost(&self, p: &ConvProblem, spec: &Spec, sms: u32) -> f64 {
        let ctas = self.ctas();
        let waves = (ctas / f64::from(sms * CTAS_OF_SM)).ceil();
        let beside = (ctas / f64::from(sms)).ceil().min(f64::from(CTAS_OF_SM));
        let of_cta = self.tiles_of_cta() * (self.issued(spec) + self.products(spec)) + self.end_issued(spec);
        let of_cta = of_cta.max(3.0 * self.tiles_of_cta() * self.warp_pixels() * (2 + self.reads * u64::from(spec.positions())) as f64);
        let waiting = self.tiles_of_cta() * 800.0 + 4_000.0;
        waves * (beside * of_cta / 3.0).max(of_cta / 2.0 + waiting) + self.parts as f64 * self.part_bytes(p) as f64 / f64::from(sms) / 12.0
    }

    /// With so many places between rows, beyond their columns, that lanes that read together meet the fewest banks twice.
    fn set_apart(self, spec: &Spec) -> Cut {
        let together = lanes_together(spec);
        let least = self.row_places - together;
        let all = (least..=self.row_places).map(|row_places| Cut { row_places, reads: self.conflicts(together, row_places), ..self });
        all.min_by_key(|cut| cut.reads).unwrap_or(self)
    }

    /// Most of the lanes that read of a bank, over the lanes of a warp that read together.
    fn conflicts(&self, together: u64, row_places: u64) -> u64 {
        let place = |lane: u64| {
            let position = (lane % self.across).min(self.positions - 1);
            let (tap, plane) = (position / self.planes, position % self.planes);
            let (row, column) = (tap / self.axes[1].taps, tap % self.axes[1].taps * self.axes[1].dilation);
            let (quotient, residue) = (column / self.axes[1].step, column % self.axes[1].step);
            (plane * self.rows + row * self.axes[0].dilation) * row_places + residue * self.residue_places + quotient
        };
        let of_phase = |phase: u64| {
            let mut readers = [0u64; 32];
            let lanes = phase * together..(phase + 1) * together;
            // Lanes beyond the units along the taps read what the first ones read.
            lanes.filter(|&lane| lane < self.across).for_each(|lane| readers[(place(lane) % together) as usize] += 1);
            readers.into_iter().max().unwrap_or(0)
        };
        (0..32 / together).map(of_phase).sum()
    }

    /// Copies that bring a pixel's channels.
    fn y_channels(&self, spec: &Spec) -> u64 {
        self.down * u64::from(4 * CHANNELS) / u64::from(spec.y_copy_bytes())
    }

    /// From one pixel of y to the next: quads of channels of neighbouring pixels begin in other banks.
    fn pixel_bytes(&self) -> u64 {
        self.down * u64::from(4 * CHANNELS) + 16
    }

    fn plane_bytes(&self, spec: &Spec) -> u64 {
        self.rows * self.row_places * 4 * u64::from(spec.words())
    }

    fn y_start(&self, spec: &Spec) -> u64 {
        (self.planes * self.plane_bytes(spec)).next_multiple_of(16)
    }

    fn stage_bytes(&self, spec: &Spec) -> u64 {
        self.y_start(spec) + self.tile[0] * self.tile[1] * self.pixel_bytes()
    }

    fn all_slices(&self) -> u64 {
        self.slices[0].saturating_mul(self.slices[1])
    }

    /// Elements from one channel of y to the next in a part: whole 16 bytes.
    pub(super) fn pitch(p: &ConvProblem) -> u64 {
        (p.c.saturating_mul(p.filter[1]).saturating_mul(p.filter[2])).next_multiple_of(4)
    }

    fn part_bytes(&self, p: &ConvProblem) -> u64 {
        4 * Cut::pitch(p).saturating_mul(p.k)
    }

    pub(super) fn grid(&self) -> u64 {
        self.all_slices().saturating_mul(self.parts)
    }

    pub(super) fn ctas(&self) -> f64 {
        self.grid() as f64
    }

    pub(super) fn tiles_of_cta(&self) -> f64 {
        self.count.div_ceil(self.parts) as f64
    }

    /// Pixels that the warps of a CTA multiply in a tile, each counted for each of its warps.
    fn warp_pixels(&self) -> f64 {
        let warps = (self.groups * self.down * self.across).div_ceil(32);
        (warps * (self.tile[0] * self.runs).div_ceil(self.groups) * self.run) as f64
    }

    /// Multiply-adds of a CTA's warps for a tile.
    pub(super) fn products(&self, spec: &Spec) -> f64 {
        self.warp_pixels() * f64::from(spec.taps() * CHANNELS)
    }

    /// Their other instructions.
    pub(super) fn issued(&self, spec: &Spec) -> f64 {
        let positions = f64::from(spec.positions());
        let of_pixel = positions + 3.0 + (positions + 3.0) / f64::from(spec.unroll());
        let runs = self.warp_pixels() / self.run as f64;
        let warps = f64::from(THREADS / 32);
        self.warp_pixels() * of_pixel + runs * 50.0 + warps * ((self.x_lanes.1 + self.y_lanes.1) as f64 + 80.0)
    }

    /// Instructions of a CTA's warps behind its tiles.
    pub(super) fn end_issued(&self, spec: &Spec) -> f64 {
        let sums = (self.down * self.across) as f64 * f64::from(spec.taps() * CHANNELS);
        let warps = f64::from(THREADS / 32);
        sums / 32.0 * (45.0 + 3.0 * self.groups as f64) + warps * (2.5 * f64::from(spec.taps() * CHANNELS) + 300.0)
    }

    /// Bytes that a tile comes to.
    pub(super) fn staged_bytes(&self, p: &ConvProblem) -> f64 {
        let x = p.c * self.rows * self.quotients * self.axes[1].step;
        let y = self.tile[0] * self.tile[1] * self.down * u64::from(CHANNELS);
        4.0 * (x + y) as f64
    }

    /// Bytes for which warps keep shared memory busy in a tile: of each lane its positions, of all of them together the channels.
    pub(super) fn read_bytes(&self, spec: &Spec) -> f64 {
        128.0 * self.warp_pixels() * (2 + self.reads * u64::from(spec.positions())) as f64
    }

    pub(super) fn tiles_arguments(&self, p: &ConvProblem, spec: &Spec) -> TilesArgs {
        let is_full = p.c.is_multiple_of(u64::from(spec.channels())) && spec.channels() == spec.words();
        TilesArgs {
            count: self.count as u32,
            parts: self.parts as u32,
            across: divisor(self.tiles[1]),
            down: divisor(self.tiles[0]),
            extents: self.tile.map(|extent| extent as u32),
            runs: divisor(self.runs),
            run: self.run as u32,
            y_start: self.y_start(spec) as u32,
            zeroed_bytes: if is_full { 0 } else { 2 * self.stage_bytes(spec) as u32 },
        }
    }

    pub(super) fn units_arguments(&self, p: &ConvProblem, spec: &Spec) -> UnitsArgs {
        let [down, right] = self.axes;
        UnitsArgs {
            slices: divisor(self.all_slices()),
            tap_slices: divisor(self.slices[1]),
            units: divisor(self.down * self.across),
            across: divisor(self.across),
            down: self.down as u32,
            groups: self.groups as u32,
            positions: self.positions as u32,
            planes: divisor(self.planes),
            taps: (down.taps * right.taps) as u32,
            filter_columns: divisor(right.taps),
            dilations: [down, right].map(|axis| axis.dilation as u32),
            flipped: u32::from(p.flip),
            columns: divisor(self.across * u64::from(spec.taps())),
        }
    }

    pub(super) fn x_arguments(&self, p: &ConvProblem, spec: &Spec) -> SourceArgs {
        let columns = self.axes[1].step * self.quotients;
        let is_first = is_channels_first(&p.x, p.c);
        let place_bytes = 4 * spec.words();
        SourceArgs {
            tensor: StridedArguments::of(&p.x),
            extents: self.axes.map(|axis| axis.source as u32),
            first: self.axes.map(|axis| axis.first as i32),
            steps: self.axes.map(|axis| axis.step as u32),
            by_column_step: divisor(self.axes[1].step),
            channels: p.c as u32,
            chunk: p.c as u32,
            chunks: 1,
            stage_bytes: self.stage_bytes(spec) as u32,
            channels_first: u32::from(is_first),
            inner: divisor(if is_first { columns } else { p.c }),
            rows: self.rows as u32,
            columns: columns as u32,
            residue_bytes: self.residue_places as u32 * place_bytes,
            row_bytes: self.row_places as u32 * place_bytes,
            plane_bytes: self.plane_bytes(spec) as u32,
            lanes_log2: self.x_lanes.0,
        }
    }

    pub(super) fn y_arguments(&self, p: &ConvProblem, spec: &Spec) -> SourceArgs {
        let is_first = is_channels_first(&p.y, p.k);
        let (words, channels) = (u64::from(spec.y_copy_bytes()) / 4, self.y_channels(spec));
        let tensor = StridedArguments::of(&p.y);
        SourceArgs {
            tensor: StridedArguments { channel: tensor.channel * words, ..tensor },
            extents: self.axes.map(|axis| axis.result as u32),
            first: [0; 2],
            steps: [1; 2],
            by_column_step: divisor(1),
            channels: (p.k / words) as u32,
            chunk: channels as u32,
            chunks: 1,
            stage_bytes: self.stage_bytes(spec) as u32,
            channels_first: u32::from(is_first),
            inner: divisor(if is_first { self.tile[1] } else { channels }),
            rows: self.tile[0] as u32,
            columns: self.tile[1] as u32,
            residue_bytes: 0,
            row_bytes: (self.tile[1] * self.pixel_bytes()) as u32,
            plane_bytes: self.pixel_bytes() as u32,
            lanes_log2: self.y_lanes.0,
        }
    }
}

/// Lanes of a warp whose places are read at once: 128 bytes.
fn lanes_together(spec: &Spec) -> u64 {
    u64::from(32 / spec.words())
}
