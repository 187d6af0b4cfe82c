//! How pixels of x lie in shared memory: a *patch*, and where in it each product of a pixel with a tap reads.
//!
//! A CTA computes for a box of `pixel_rows × pixel_columns` positions of y. What they read of x is brought to shared memory as it lies in
//! memory, line by line: a *line* is a stretch of elements that stand side by side, channels and columns of one row of x where channels are
//! innermost, columns of one channel otherwise. Element `e` of the box's line stands at `e + shift`, where the shift keeps copies aligned.
//!
//! The sum over taps and channels, the *depth*, is cut into *K-tiles* of whole filter rows, each with a patch of its own. Position `i` of a
//! K-tile's depth reads, for every pixel of the box, at the pixel's offset plus an offset of its own; so one table of the depth, which
//! knows all of taps, dilations and order of channels, is all that the main loop needs. Positions that are there to fill a matrix step are
//! masked.
//!
//! **Lines of a patch**: planes (channels where they are outermost, depth taps), then rows of the box, then lines of a row of the box:
//! `((channel · depth_taps + depth_tap) · line_rows + row) · row_lines + line`. Boxes whose rows overlap are dense: one row of the patch
//! with all lines from the first to the last. Otherwise each row of the box has its own lines, and a box may reach from one image into the
//! next.

use verdigris_graph::{ConvProblem, Tensor};
use verdigris_kir::ir::Ty;
use verdigris_kir::program::Arg;

use crate::conv::geometry::filter_tap;

/// A copy's largest alignment.
pub(super) const CHUNK_BYTES: u64 = 16;
/// Bytes of depth that one matrix step multiplies.
pub(super) const STEP_BYTES: u64 = 32;
/// Entries of a step in the table of the depth, of 4 bytes of depth each.
pub(super) const STEP_ENTRIES: usize = 8;
/// In the table of the filter: no element.
pub(super) const NO_ELEMENT: u32 = u32::MAX;

/// What stands side by side in a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Lines {
    /// Channels of a line: all of them, or one where channels are outermost.
    pub(super) channels: u64,
    /// Planes of channels: the rest of them.
    pub(super) planes: u64,
    /// The largest of 16, 8, 4 bytes that divides the distance of lines; 0 where elements do not stand side by side, or lines at less.
    pub(super) copy_bytes: u64,
}

impl Lines {
    /// How the lines of a tensor of `[n, c, d, h, w]` lie.
    pub(super) fn of(x: &Tensor, [n, c, d, h, w]: [u64; 5]) -> Lines {
        let [sn, sc, sd, sh, sw] = x.strides;
        let bytes = x.dtype.bytes() as u64;
        let aligned = |others: &[(u64, u64)]| {
            let steps = others.iter().filter(|(extent, _)| *extent > 1).map(|(_, stride)| stride * bytes);
            let alignment = steps.fold(CHUNK_BYTES, |alignment, step| alignment.min(1 << step.trailing_zeros().min(4)));
            if alignment < 4 { 0 } else { alignment }
        };
        let is_last = (c == 1 || sc == 1) && (w <= 1 || sw == c);
        let is_first = w <= 1 || sw == 1;
        match (is_last, is_first) {
            (true, _) => Lines { channels: c, planes: 1, copy_bytes: aligned(&[(n, sn), (d, sd), (h, sh)]) },
            (_, true) => Lines { channels: 1, planes: c, copy_bytes: aligned(&[(n, sn), (c, sc), (d, sd), (h, sh)]) },
            // Element by element; the order is that in which neighbours in a line are nearer to each other.
            _ if sc <= sw => Lines { channels: c, planes: 1, copy_bytes: 0 },
            _ => Lines { channels: 1, planes: c, copy_bytes: 0 },
        }
    }
}

/// How the main loop reads four bytes of depth.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Reads {
    /// Two neighbouring 16-bit elements at once: every pixel stands at an even distance from the first.
    Pairs,
    /// Two 16-bit elements, one by one.
    Singles,
    /// One element of 32 bits.
    Words,
}

/// Filter rows of a K-tile, and how the lines for them lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct KTile {
    /// Taps along depth and along height.
    pub(super) taps: [u64; 2],
    /// Boxes' rows have lines of their own.
    pub(super) gathered: bool,
}

/// A box of pixels with the patch of a K-tile.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Patch {
    pub(super) lines: Lines,
    pub(super) k_tile: KTile,
    pub(super) pixel_rows: u64,
    pub(super) pixel_columns: u64,
    /// Rows of the box in the patch, and lines of each.
    pub(super) line_rows: u64,
    pub(super) row_lines: u64,
    /// Elements of a line, the room for the shift included; a whole number of chunks.
    pub(super) line_elements: u64,
    /// 1 where pairs begin one element before a line's first.
    pub(super) lead: u64,
    element_bytes: u64,
}

impl Patch {
    /// The patch of a box.
    pub(super) fn new(p: &ConvProblem, lines: Lines, reads: Reads, k_tile: KTile, [pixel_rows, pixel_columns]: [u64; 2]) -> Patch {
        let element_bytes = p.x.dtype.bytes() as u64;
        let taps = k_tile.taps[1];
        let (line_rows, row_lines) =
            if k_tile.gathered { (pixel_rows, taps) } else { (1, (pixel_rows - 1) * p.strides[1] + (taps - 1) * p.dilations[1] + 1) };
        let columns = (pixel_columns - 1) * p.strides[2] + (p.filter[2] - 1) * p.dilations[2] + 1;
        let chunk = CHUNK_BYTES / element_bytes;
        let lead = if reads == Reads::Pairs { p.pads_before[2] * lines.channels % 2 } else { 0 };
        let line_elements = (columns * lines.channels + chunk).next_multiple_of(chunk);
        Patch { lines, k_tile, pixel_rows, pixel_columns, line_rows, row_lines, line_elements, lead, element_bytes }
    }

    /// Lines in all.
    pub(super) fn line_count(&self) -> u64 {
        [self.k_tile.taps[0], self.line_rows, self.row_lines].into_iter().fold(self.lines.planes, u64::saturating_mul)
    }

    /// Bytes of shared memory.
    pub(super) fn bytes(&self) -> u64 {
        self.line_count().saturating_mul(self.line_bytes())
    }

    fn line_bytes(&self) -> u64 {
        self.line_elements * self.element_bytes
    }

    /// What one pixel of the box is from the next in bytes: down and to the right.
    fn pixel_steps(&self, p: &ConvProblem) -> [u64; 2] {
        let down = if self.k_tile.gathered { self.row_lines } else { p.strides[1] };
        [down * self.line_bytes(), p.strides[2] * self.lines.channels * self.element_bytes]
    }

    /// Boxes over all pixels, in rows of boxes and boxes of a row.
    pub(super) fn boxes(&self, p: &ConvProblem) -> [u64; 2] {
        let rows = p.n * p.output[0] * p.output[1];
        let down =
            if self.k_tile.gathered { rows.div_ceil(self.pixel_rows) } else { p.n * p.output[0] * p.output[1].div_ceil(self.pixel_rows) };
        [down, p.output[2].div_ceil(self.pixel_columns)]
    }

    /// The arguments of a kernel's patch, in the order of [`super::patch::Source::declare`].
    pub(super) fn args(&self, p: &ConvProblem) -> Vec<Arg> {
        let word = |value: u64| Arg::Scalar(Ty::U32, value);
        let divisor = |value: u64| Arg::Divisor(value.max(1) as u32);
        let signed = |value: i64| Arg::Scalar(Ty::S32, u64::from(value as i32 as u32));
        let [boxes_down, boxes_across] = self.boxes(p);
        let rows = p.n * p.output[0] * p.output[1];
        let (boxes_of_block, block_rows) =
            if self.k_tile.gathered { (1, self.pixel_rows) } else { (p.output[1].div_ceil(self.pixel_rows), p.output[1]) };
        let mut args = vec![word(boxes_down * boxes_across), divisor(boxes_across), divisor(boxes_of_block), word(block_rows), word(rows)];
        args.extend([divisor(p.output[1]), divisor(p.output[0]), word(p.output[2])]);
        args.extend([divisor(self.pixel_columns), word(self.pixel_rows)]);
        args.extend(self.pixel_steps(p).map(word));
        // Lines.
        args.extend([word(self.line_count()), divisor(self.row_lines), divisor(self.line_rows), divisor(self.k_tile.taps[0])]);
        args.push(word(self.line_bytes()));
        let line_step = if self.k_tile.gathered { p.dilations[1] } else { 1 };
        args.extend([p.strides[0], p.strides[1], p.dilations[0], p.dilations[1], line_step].map(|step| signed(step as i64)));
        args.extend([-(p.pads_before[0] as i64), -(p.pads_before[1] as i64)].map(signed));
        args.extend([word(p.input[0]), word(p.input[1])]);
        // Elements of a line.
        let channels = self.lines.channels;
        args.extend([signed((p.strides[2] * channels) as i64), signed(-((p.pads_before[2] * channels) as i64))]);
        args.extend([word(p.input[2] * channels), word(self.lead * self.element_bytes)]);
        args
    }

    /// Offsets of a K-tile's taps over rows of the filter: `[depth, height]` of the first one.
    pub(super) fn k_tile_first(&self, p: &ConvProblem, k_tile: u64) -> [u64; 2] {
        let across = p.filter[1].div_ceil(self.k_tile.taps[1]);
        [k_tile / across * self.k_tile.taps[0], k_tile % across * self.k_tile.taps[1]]
    }

    /// How many K-tiles the depth is cut into.
    pub(super) fn k_tiles(&self, p: &ConvProblem) -> u64 {
        p.filter[0].div_ceil(self.k_tile.taps[0]) * p.filter[1].div_ceil(self.k_tile.taps[1])
    }

    /// How many elements from the first one that a pixel reads a tap of a K-tile and a channel stand: `[depth, height, width]` in the
    /// K-tile.
    fn offset(&self, p: &ConvProblem, [z, b, s]: [u64; 3], channel: u64) -> u64 {
        let below = if self.k_tile.gathered { b } else { b * p.dilations[1] };
        let (plane, channel) = if self.lines.planes > 1 { (channel, 0) } else { (0, channel) };
        let line = (plane * self.k_tile.taps[0] + z) * self.line_rows * self.row_lines + below;
        line * self.line_elements + s * p.dilations[2] * self.lines.channels + channel
    }

    /// The elements of a K-tile's depth in the order in which they lie: runs of neighbours.
    fn runs(&self, p: &ConvProblem, k_tile: u64) -> Vec<Vec<Element>> {
        let [first_depth, first_row] = self.k_tile_first(p, k_tile);
        let channels = self.lines.channels;
        let mut runs = Vec::new();
        for plane in 0..self.lines.planes {
            for z in 0..self.k_tile.taps[0].min(p.filter[0] - first_depth) {
                for b in 0..self.k_tile.taps[1].min(p.filter[1] - first_row) {
                    let mut run = Vec::new();
                    for s in 0..p.filter[2] {
                        for c in plane..plane + channels {
                            let (tap, offset) = ([first_depth + z, first_row + b, s], self.offset(p, [z, b, s], c));
                            run.push(Element { offset, tap, channel: c });
                        }
                        if p.dilations[2] != 1 {
                            runs.push(std::mem::take(&mut run));
                        }
                    }
                    if !run.is_empty() {
                        runs.push(run);
                    }
                }
            }
        }
        runs
    }

    /// Where the columns of a filter's gradient are read, in bytes: each tap of a K-tile and each channel, channels innermost. The same for
    /// every K-tile; the last ones may have fewer taps.
    pub(super) fn columns(&self, p: &ConvProblem) -> Vec<u32> {
        let [depths, rows] = self.k_tile.taps;
        let taps = (0..depths).flat_map(|z| (0..rows).flat_map(move |b| (0..p.filter[2]).map(move |s| [z, b, s])));
        taps.flat_map(|tap| (0..p.c).map(move |c| (self.offset(p, tap, c) * self.element_bytes) as u32)).collect()
    }

    /// The depth of a K-tile, four bytes an entry.
    pub(super) fn entries(&self, p: &ConvProblem, reads: Reads, k_tile: u64) -> Vec<Entry> {
        let bytes = self.element_bytes;
        let mut entries = Vec::new();
        match reads {
            Reads::Words => {
                let elements = self.runs(p, k_tile).into_iter().flatten();
                entries.extend(elements.map(|element| Entry {
                    place: (element.offset * bytes) as u32,
                    mask: u32::MAX,
                    elements: [Some(element), None],
                }));
            }
            Reads::Singles => {
                let elements: Vec<Element> = self.runs(p, k_tile).into_iter().flatten().collect();
                entries.extend(elements.chunks(2).map(|pair| {
                    let at = |i: usize| pair.get(i).map_or(0, |element| (element.offset * bytes) as u32);
                    let mask = if pair.len() == 2 { u32::MAX } else { 0xffff };
                    Entry { place: at(0) | at(1) << 16, mask, elements: [pair.first().copied(), pair.get(1).copied()] }
                }));
            }
            Reads::Pairs => {
                for run in self.runs(p, k_tile) {
                    let start = run[0].offset + self.lead;
                    let mut rest = run.as_slice();
                    if start % 2 == 1 {
                        // The pair's other half belongs to a neighbour.
                        entries.push(Entry { place: ((start - 1) * bytes) as u32, mask: 0xffff_0000, elements: [None, Some(run[0])] });
                        rest = &run[1..];
                    }
                    entries.extend(rest.chunks(2).map(|pair| Entry {
                        place: ((pair[0].offset + self.lead) * bytes) as u32,
                        mask: if pair.len() == 2 { u32::MAX } else { 0xffff },
                        elements: [Some(pair[0]), pair.get(1).copied()],
                    }));
                }
            }
        }
        entries
    }
}

/// An element of the depth.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Element {
    /// Its distance in the patch from the first element that a pixel reads.
    offset: u64,
    /// The tap as it lies over x.
    pub(super) tap: [u64; 3],
    pub(super) channel: u64,
}

/// Four bytes of depth.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Entry {
    /// Where they are read: bytes; of singles two of 16 bits.
    place: u32,
    /// Which of their bits count.
    mask: u32,
    elements: [Option<Element>; 2],
}

/// The tables of a problem's depth.
pub(super) struct Depth {
    /// Steps of a K-tile.
    pub(super) steps: u64,
    pub(super) k_tiles: u64,
    /// Entries: place and mask, 8 bytes, those of `low` and `high` half of a step side by side; then the filter's elements, 4 bytes each.
    pub(super) table: Vec<u8>,
    /// Where the filter's elements begin.
    pub(super) filter_start: u64,
}

impl Depth {
    /// Tables for fprop: what the main loop reads, and which element of a filter's row belongs there, by its byte offset.
    pub(super) fn new(p: &ConvProblem, patch: &Patch, reads: Reads) -> Depth {
        let k_tiles = patch.k_tiles(p);
        let entries: Vec<Vec<Entry>> = (0..k_tiles).map(|k_tile| patch.entries(p, reads, k_tile)).collect();
        let steps = entries.iter().map(|entries| entries.len().div_ceil(STEP_ENTRIES)).max().unwrap_or(0) as u64;
        let mut table = Vec::new();
        let mut filter = Vec::new();
        let halves = if reads == Reads::Words { 1 } else { 2 };
        for entries in &entries {
            for step in 0..steps as usize {
                let entry = |i: usize| entries.get(step * STEP_ENTRIES + i).copied();
                for t in 0..STEP_ENTRIES / 2 {
                    for i in [t, t + STEP_ENTRIES / 2] {
                        let [place, mask] = entry(i).map_or([0, 0], |entry| [entry.place, entry.mask]);
                        table.extend([place, mask].into_iter().flat_map(u32::to_le_bytes));
                    }
                }
                for i in 0..STEP_ENTRIES {
                    let elements = entry(i).map_or([None; 2], |entry| entry.elements);
                    filter.extend(elements[..halves].iter().map(|element| element.map_or(NO_ELEMENT, |e| filter_offset(p, e))));
                }
            }
        }
        let filter_start = table.len() as u64;
        table.extend(filter.into_iter().flat_map(u32::to_le_bytes));
        Depth { steps, k_tiles, table, filter_start }
    }
}

/// The distance in bytes of an element from the first of its filter.
fn filter_offset(p: &ConvProblem, element: Element) -> u32 {
    let tap = filter_tap(p, element.tap);
    let [_, channel, spatial @ ..] = p.w.strides;
    let elements = element.channel * channel + tap.iter().zip(spatial).map(|(tap, stride)| tap * stride).sum::<u64>();
    (elements * p.w.dtype.bytes() as u64) as u32
}

/// The largest distance in bytes of a filter's element from the filter's first, short of 2³².
pub(super) fn filter_reach(p: &ConvProblem) -> Option<u32> {
    let [_, channels, spatial @ ..] = p.w_extents();
    let [_, channel, strides @ ..] = p.w.strides;
    let taps = spatial.iter().zip(strides).try_fold(0u64, |sum, (extent, stride)| sum.checked_add((extent - 1).checked_mul(stride)?));
    let elements = taps?.checked_add(channels.saturating_sub(1).checked_mul(channel)?)?;
    u32::try_from(elements.checked_mul(p.w.dtype.bytes() as u64)?).ok().filter(|&reach| reach < NO_ELEMENT)
}
