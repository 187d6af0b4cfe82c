//! How a problem is cut into tiles for a kernel, and what a CTA then does.

use verdigris_graph::{ConvProblem, Direction};

use super::kernel::{ENTRY_BYTES, TapsArgs, TilesArgs, WARP_PIXELS, WINDOW};
use super::{Order, Spec, WARPS};
use crate::conv::geometry::phases::{FilterWalkArguments, PixelGeometry};
use crate::conv::in_patches::{Axis, SourceArgs, is_channels_first, lanes};
use crate::layout::images::StridedArguments;
use crate::layout::space::divisor;

/// A way to cut a problem.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cut {
    axes: [Axis; 2],
    width_log2: u32,
    pub(super) groups: u32,
    pub(super) parts: u32,
    /// Windows of one residue, and of a row of taps.
    residue_windows: u64,
    windows: u64,
    /// Words of a residue, a row and a plane of the patch, and its rows.
    residue_words: u64,
    row_words: u64,
    plane_words: u64,
    rows: u64,
    /// Channels that are staged at a time, and how often.
    pub(super) chunk: u64,
    pub(super) chunks: u64,
    lanes_log2: u32,
    /// Instructions by which a thread stages its elements of a chunk's patch.
    staging_issued: u64,
    /// Tiles across, down, of images with their groups and slices of channels.
    tiles: [u64; 4],
}

impl Cut {
    /// The best width for groups of channels and parts of the depth, if there is room for one channel.
    pub(super) fn best(p: &ConvProblem, spec: &Spec, groups: u32, parts: u32) -> Option<Cut> {
        let all = (3..=5).rev().filter_map(|width_log2| Cut::new(p, spec, width_log2, groups, parts));
        all.min_by(|a, b| (a.issued(spec) * a.ctas()).total_cmp(&(b.issued(spec) * b.ctas())))
    }

    fn new(p: &ConvProblem, spec: &Spec, width_log2: u32, groups: u32, parts: u32) -> Option<Cut> {
        let axes @ [down, right] = [1, 2].map(|dim| Axis::of(p, dim));
        let (depth, channels) = channels(p);
        let tile_width = 1u64 << width_log2;
        let residue_windows = right.ahead() / u64::from(WINDOW) + 1;
        let windows = right.step.checked_mul(residue_windows)?;
        let residue_words = tile_width + u64::from(WINDOW) * residue_windows;
        let mut cut = Cut {
            axes,
            width_log2,
            groups,
            parts,
            residue_windows,
            windows,
            residue_words,
            row_words: 0,
            plane_words: 0,
            rows: 0,
            chunk: 1,
            chunks: depth,
            lanes_log2: 0,
            staging_issued: 0,
            tiles: [0; 4],
        };
        let tile_height = cut.tile_height(spec);
        cut.rows = (tile_height - 1).checked_mul(down.step)?.checked_add((down.taps - 1) * down.dilation)? + 1;
        let columns = residue_words.checked_mul(right.step)?;
        // Eight lanes that read quads of several rows meet no bank twice where rows are far enough apart.
        let padded = (0..8).map(|quads| columns.saturating_add(4 * quads));
        cut.row_words = padded.min_by_key(|&words| cut.conflicts(words))?;
        // Neighbouring lanes stage neighbouring channels where these are neighbours in memory.
        let apart = if gathers_channels_first(p) { 0 } else { (32 / depth.next_power_of_two()).max(4) };
        let plane = cut.rows.checked_mul(cut.row_words)?;
        cut.plane_words = plane.checked_add(apart.wrapping_sub(plane) % 32)?;
        let channel_bytes = cut.channel_bytes(spec)?;
        let most = u64::from(spec.arena_bytes()) / channel_bytes;
        // What does not fit at once is staged in two places by turns.
        let most = if depth <= most { depth } else { most / 2 };
        if most == 0 {
            return None;
        }
        cut.chunks = depth.div_ceil(most);
        cut.chunk = depth.div_ceil(cut.chunks);
        cut.chunks = depth.div_ceil(cut.chunk);
        (cut.lanes_log2, cut.staging_issued) = lanes(cut.line(), cut.rows, 14);
        let slices = channels.div_ceil(u64::from(groups * spec.channels()));
        cut.tiles = [right.result.div_ceil(tile_width), down.result.div_ceil(tile_height), p.n.checked_mul(p.groups)?, slices];
        Some(cut)
    }

    /// Rows of a tile.
    fn tile_height(&self, spec: &Spec) -> u64 {
        u64::from((WARP_PIXELS * spec.rows()) >> self.width_log2) * u64::from(WARPS / (self.groups * self.parts))
    }

    /// The most quads of one quarter of a warp that lie in the same banks.
    fn conflicts(&self, row_words: u64) -> usize {
        let quads_log2 = self.width_log2 - 2;
        let bank = |lane: u64| ((lane >> quads_log2) * self.axes[0].step * row_words + (lane & ((1 << quads_log2) - 1)) * 4) % 32;
        let banks: Vec<u64> = (0..8).map(bank).collect();
        banks.iter().map(|bank| banks.iter().filter(|&other| other == bank).count()).max().unwrap_or(0)
    }

    /// Shared memory for a channel: its patch, its taps and its part of the table.
    fn channel_bytes(&self, spec: &Spec) -> Option<u64> {
        let window_bytes = u64::from(WINDOW * 4 * self.groups * spec.channels() + ENTRY_BYTES);
        let windows = self.axes[0].taps.checked_mul(self.windows)?;
        self.plane_words.checked_mul(4)?.checked_add(windows.checked_mul(window_bytes)?)
    }

    fn patch_bytes(&self) -> u64 {
        self.chunk * self.plane_words * 4
    }

    /// Bytes of a chunk's patch and taps.
    fn stage_bytes(&self, spec: &Spec) -> u64 {
        self.patch_bytes() + self.chunk * self.axes[0].taps * self.windows * u64::from(WINDOW * 4 * self.groups * spec.channels())
    }

    /// Elements of a line of a patch.
    fn line(&self) -> u64 {
        self.chunk * self.axes[1].step * self.residue_words
    }

    /// CTAs.
    pub(super) fn ctas(&self) -> f64 {
        self.tiles.iter().map(|&tiles| tiles as f64).product()
    }

    /// Taps of a chunk.
    pub(super) fn taps(&self) -> f64 {
        (self.chunk * self.axes[0].taps * self.axes[1].taps) as f64
    }

    /// Windows of a chunk.
    pub(super) fn chunk_windows(&self) -> f64 {
        (self.chunk * self.axes[0].taps * self.windows) as f64
    }

    /// Bytes that a chunk comes to.
    pub(super) fn staged_bytes(&self, spec: &Spec) -> f64 {
        4.0 * ((self.line() * self.rows) as f64 + self.taps() * f64::from(self.groups * spec.channels()))
    }

    /// Instructions of a CTA's warps for a chunk beside the products.
    pub(super) fn chunk_issued(&self, spec: &Spec) -> f64 {
        let warps = f64::from(WARPS);
        let patch = warps * self.staging_issued as f64;
        let taps = self.chunk_windows() * (45.0 + 13.0 * f64::from(self.groups * spec.channels()) / 8.0);
        let of_warp = self.chunk_windows() * (14.0 + 3.0 * f64::from(spec.rows())) + self.taps() * (4.0 + f64::from(spec.channels()) / 4.0);
        patch + taps + warps / f64::from(self.parts) * of_warp + warps * 30.0
    }

    /// Products of a CTA's warps for a chunk.
    pub(super) fn chunk_products(&self, spec: &Spec) -> f64 {
        f64::from(WARPS) / f64::from(self.parts) * self.taps() * f64::from(spec.sums())
    }

    /// Instructions of a CTA's warps for what follows the sums.
    pub(super) fn tile_issued(&self, spec: &Spec) -> f64 {
        let sums = f64::from(spec.sums());
        let of_element = if spec.order == Order::ChannelsLast { 8.5 } else { 12.5 };
        let added = 2.5 * f64::from(self.parts - 1);
        f64::from(WARPS) * (sums * 0.5 + sums * (of_element + added) / f64::from(self.parts) + 200.0)
    }

    /// Instructions of a CTA's warps.
    fn issued(&self, spec: &Spec) -> f64 {
        (self.chunk_issued(spec) + self.chunk_products(spec)) * self.chunks as f64 + self.tile_issued(spec)
    }

    pub(super) fn grid(&self) -> u64 {
        self.tiles.iter().fold(1, |all, &tiles| all.saturating_mul(tiles))
    }

    pub(super) fn tiles_arguments(&self, p: &ConvProblem, spec: &Spec) -> TilesArgs {
        let [across, down, _, slices] = self.tiles;
        TilesArgs {
            slices: divisor(slices),
            across: divisor(across),
            down: divisor(down),
            conv_groups: divisor(p.groups),
            extents: self.axes.map(|axis| axis.result as u32),
            channels: channels(p).1 as u32,
            width_log2: self.width_log2,
            height: self.tile_height(spec) as u32,
            groups_log2: self.groups.ilog2(),
            parts_log2: self.parts.ilog2(),
        }
    }

    pub(super) fn source_arguments(&self, p: &ConvProblem, spec: &Spec) -> SourceArgs {
        let columns = self.axes[1].step * self.residue_words;
        let is_first = gathers_channels_first(p);
        SourceArgs {
            tensor: StridedArguments::of(p.activations()),
            extents: self.axes.map(|axis| axis.source as u32),
            first: self.axes.map(|axis| axis.first as i32),
            steps: self.axes.map(|axis| axis.step as u32),
            by_column_step: divisor(self.axes[1].step),
            channels: channels(p).0 as u32,
            chunk: self.chunk as u32,
            chunks: self.chunks as u32,
            stage_bytes: self.stage_bytes(spec) as u32,
            channels_first: u32::from(is_first),
            inner: divisor(if is_first { columns } else { self.chunk }),
            rows: self.rows as u32,
            columns: columns as u32,
            residue_bytes: self.residue_words as u32 * 4,
            row_bytes: self.row_words as u32 * 4,
            plane_bytes: self.plane_words as u32 * 4,
            lanes_log2: self.lanes_log2,
        }
    }

    pub(super) fn taps_arguments(&self, p: &ConvProblem, spec: &Spec) -> TapsArgs {
        let mut filter = PixelGeometry::of(p).filter(p);
        if p.direction == Direction::Dgrad {
            // The pixels of a gradient meet gradients upwards with the taps from the last one on; addresses count modulo 2⁶⁴.
            let FilterWalkArguments { origin, taps, .. } = &mut filter;
            for (extent, tap) in p.filter.iter().zip(taps) {
                *origin = origin.wrapping_add((extent - 1).wrapping_mul(*tap));
                *tap = tap.wrapping_neg();
            }
        }
        TapsArgs {
            filter,
            rows: divisor(self.axes[0].taps),
            columns: self.axes[1].taps as u32,
            down: self.axes[0].dilation as u32,
            right: divisor(self.axes[1].dilation),
            windows: divisor(self.windows),
            residue_windows: divisor(self.residue_windows),
            start: self.patch_bytes() as u32,
            table_start: (self.stage_bytes(spec) * self.chunks.min(2)) as u32,
        }
    }
}

/// Channels of a group that are summed over, and those of the result.
pub(super) fn channels(p: &ConvProblem) -> (u64, u64) {
    let (c, k) = (p.c / p.groups, p.k / p.groups);
    if p.direction == Direction::Dgrad { (k, c) } else { (c, k) }
}

/// Whether pixels of what is gathered lie closer than its channels.
fn gathers_channels_first(p: &ConvProblem) -> bool {
    is_channels_first(p.activations(), channels(p).0)
}
