//! Patches in kernels: which pixels a box has, and how the elements that they read come to shared memory ([`super::geometry`]).

use verdigris_graph::ConvProblem;
use verdigris_kir::face::{Divisor, Kernel, Pointer, Val};
use verdigris_kir::ir::Ty;
use verdigris_kir::program::{Address, Arg};

use super::geometry::Lines;

/// Threads that copy a line together: in chunks, and element by element.
const CHUNK_LANES: u32 = 8;
const ELEMENT_LANES: u32 = 32;
/// Elements that a thread has on their way at a time.
const ON_THEIR_WAY: u32 = 4;

/// A box of pixels of y: rows from `row` to `end`, counted over all images and depths, and columns from `column` on.
#[derive(Clone, Copy)]
pub(super) struct PixelBox<'k> {
    pub(super) row: Val<'k, u32>,
    pub(super) end: Val<'k, u32>,
    pub(super) column: Val<'k, u32>,
}

/// Parameters of the boxes, of the patches and of x.
pub(super) struct Source<'k> {
    k: Kernel<'k>,
    element_bytes: u32,
    /// Boxes in all.
    pub(super) boxes: Val<'k, u32>,
    boxes_across: Divisor<'k>,
    boxes_of_block: Divisor<'k>,
    block_rows: Val<'k, u32>,
    rows: Val<'k, u32>,
    heights: Divisor<'k>,
    depths: Divisor<'k>,
    columns: Val<'k, u32>,
    pixel_columns: Divisor<'k>,
    pixel_rows: Val<'k, u32>,
    down_bytes: Val<'k, u32>,
    right_bytes: Val<'k, u32>,
    lines: Val<'k, u32>,
    row_lines: Divisor<'k>,
    line_rows: Divisor<'k>,
    depth_taps: Divisor<'k>,
    line_bytes: Val<'k, u32>,
    depth_step: Val<'k, i32>,
    row_step: Val<'k, i32>,
    depth_tap_step: Val<'k, i32>,
    row_tap_step: Val<'k, i32>,
    line_step: Val<'k, i32>,
    depth_origin: Val<'k, i32>,
    row_origin: Val<'k, i32>,
    input_depth: Val<'k, u32>,
    input_height: Val<'k, u32>,
    column_step: Val<'k, i32>,
    column_origin: Val<'k, i32>,
    line_end: Val<'k, u32>,
    lead_bytes: Val<'k, u32>,
    x: Pointer<'k>,
    image_bytes: Val<'k, u64>,
    plane_bytes: Val<'k, u64>,
    depth_bytes: Val<'k, u64>,
    row_bytes: Val<'k, u64>,
    path: LoadPath<'k>,
}

/// How lines are brought.
#[derive(Clone, Copy)]
enum LoadPath<'k> {
    /// By asynchronous copies of so many bytes.
    Copies(Val<'k, u32>),
    /// Element by element: channels of a line, bytes from one column to the next and from one channel to the next.
    Elements { channels: Divisor<'k>, column_bytes: Val<'k, u64>, channel_bytes: Val<'k, u64> },
}

impl<'k> Source<'k> {
    /// Declares the parameters: those of [`super::geometry::Patch::args`], then those of [`source_args`].
    pub(super) fn declare(k: Kernel<'k>, element_bytes: u32, copies: bool) -> Self {
        let word = |name| k.scalar::<u32>(name);
        let signed = |name| k.scalar::<i32>(name);
        Source {
            k,
            element_bytes,
            boxes: word("boxes"),
            boxes_across: k.divisor("boxes_across"),
            boxes_of_block: k.divisor("boxes_of_block"),
            block_rows: word("block_rows"),
            rows: word("rows"),
            heights: k.divisor("heights"),
            depths: k.divisor("depths"),
            columns: word("columns"),
            pixel_columns: k.divisor("pixel_columns"),
            pixel_rows: word("pixel_rows"),
            down_bytes: word("down_bytes"),
            right_bytes: word("right_bytes"),
            lines: word("lines"),
            row_lines: k.divisor("row_lines"),
            line_rows: k.divisor("line_rows"),
            depth_taps: k.divisor("depth_taps"),
            line_bytes: word("line_bytes"),
            depth_step: signed("depth_step"),
            row_step: signed("row_step"),
            depth_tap_step: signed("depth_tap_step"),
            row_tap_step: signed("row_tap_step"),
            line_step: signed("line_step"),
            depth_origin: signed("depth_origin"),
            row_origin: signed("row_origin"),
            input_depth: word("input_depth"),
            input_height: word("input_height"),
            column_step: signed("column_step"),
            column_origin: signed("column_origin"),
            line_end: word("line_end"),
            lead_bytes: word("lead_bytes"),
            x: k.input("x", if copies { element_bytes.max(4) } else { element_bytes }),
            image_bytes: k.scalar("image_bytes"),
            plane_bytes: k.scalar("plane_bytes"),
            depth_bytes: k.scalar("depth_bytes"),
            row_bytes: k.scalar("row_bytes"),
            path: if copies {
                LoadPath::Copies(word("copy_bytes"))
            } else {
                let channels = k.divisor("line_channels");
                LoadPath::Elements { channels, column_bytes: k.scalar("column_bytes"), channel_bytes: k.scalar("channel_bytes") }
            },
        }
    }

    /// The box of a number.
    pub(super) fn at(&self, number: Val<'k, u32>) -> PixelBox<'k> {
        let (down, across) = self.boxes_across.split(number);
        let (block, within) = self.boxes_of_block.split(down);
        let first = block * self.block_rows;
        let row = first + within * self.pixel_rows;
        PixelBox { row, end: (first + self.block_rows).min(self.rows), column: across * self.pixel_columns.value() }
    }

    /// Row and column in the box of its pixel `index`, and whether the box has such a pixel.
    fn pixel(&self, index: Val<'k, u32>) -> (Val<'k, u32>, Val<'k, u32>, Val<'k, bool>) {
        let (row, column) = self.pixel_columns.split(index);
        (row, column, row.lt(self.pixel_rows))
    }

    /// Where pixel `index` of a box reads: its distance in the patch; that of the first one if the box has no such pixel.
    pub(super) fn offset(&self, index: Val<'k, u32>) -> Val<'k, u32> {
        let (row, column, exists) = self.pixel(index);
        self.k.select(exists, row * self.down_bytes + column * self.right_bytes, 0u32)
    }

    /// Image, depth, height and width of pixel `index` of a box, and whether y has it.
    pub(super) fn place(&self, pixels: &PixelBox<'k>, index: Val<'k, u32>) -> ([Val<'k, u32>; 4], Val<'k, bool>) {
        let (row, column, exists) = self.pixel(index);
        let (row, column) = (pixels.row + row, pixels.column + column);
        let ([n, d, h], inside) = (self.row_place(row), exists & row.lt(pixels.end) & column.lt(self.columns));
        ([n, d, h, column], inside)
    }

    fn row_place(&self, row: Val<'k, u32>) -> [Val<'k, u32>; 3] {
        let (rest, h) = self.heights.split(row);
        let (n, d) = self.depths.split(rest);
        [n, d, h]
    }

    /// The element of a line that the box's first pixel reads first.
    fn first_element(&self, pixels: &PixelBox<'k>) -> Val<'k, i32> {
        self.k.fma(pixels.column.signed(), self.column_step, self.column_origin)
    }

    /// Elements before a line's first one, so that copies are aligned.
    fn shift(&self, first: Val<'k, i32>) -> Val<'k, u32> {
        match self.path {
            LoadPath::Copies(bytes) => first.unsigned() & ((bytes >> self.element_bytes.ilog2()) - 1),
            LoadPath::Elements { .. } => self.k.constant(0),
        }
    }

    /// How far from its beginning the places of a patch are counted.
    pub(super) fn start_bytes(&self, pixels: &PixelBox<'k>) -> Val<'k, u32> {
        self.shift(self.first_element(pixels)) * self.element_bytes - self.lead_bytes
    }

    /// Brings a patch to shared memory at `to`: all threads of the CTA together. `k_tile` is the first tap of the K-tile along depth and
    /// height. Asynchronous copies are left to be committed.
    pub(super) fn load(&self, pixels: &PixelBox<'k>, k_tile: [Val<'k, u32>; 2], to: Val<'k, u32>) {
        let k = self.k;
        let lanes = if matches!(self.path, LoadPath::Copies(_)) { CHUNK_LANES } else { ELEMENT_LANES };
        let (line, lane) = (k.thread() >> lanes.ilog2(), k.thread() & (lanes - 1));
        let first = self.first_element(pixels);
        let [k_tile_depth, k_tile_row] = k_tile;
        let row_origin = k.fma(k_tile_row.signed(), self.row_tap_step, self.row_origin);
        k.range_step(line, self.lines, k.threads() / lanes, |line| {
            let (rest, below) = self.row_lines.split(line);
            let (rest, row) = self.line_rows.split(rest);
            let (plane, depth_tap) = self.depth_taps.split(rest);
            let row = pixels.row + row;
            let [n, pixel_depth, pixel_row] = self.row_place(row);
            let h = k.fma(pixel_row.signed(), self.row_step, k.fma(below.signed(), self.line_step, row_origin)).unsigned();
            let d = k.fma((k_tile_depth + depth_tap).signed(), self.depth_tap_step, self.depth_origin);
            let d = k.fma(pixel_depth.signed(), self.depth_step, d).unsigned();
            let is_inside = row.lt(pixels.end) & h.lt(self.input_height) & d.lt(self.input_depth);
            // Lines outside are not read: they are told to begin where x does.
            let inside = |index: Val<'k, u32>| k.select(is_inside, index, 0u32).widen();
            let address = self.x.address()
                + inside(n) * self.image_bytes
                + inside(plane) * self.plane_bytes
                + inside(d) * self.depth_bytes
                + inside(h) * self.row_bytes;
            let end = k.select(is_inside, self.line_end, 0u32);
            let to = to + line * self.line_bytes;
            match self.path {
                LoadPath::Copies(bytes) => self.copy_line(address, first, end, to, lane, bytes),
                LoadPath::Elements { .. } => self.move_line(address, first, end, to, lane),
            }
        });
    }

    /// Starts copying a line whose elements end before `end`: this thread's chunks.
    fn copy_line(
        &self,
        address: Val<'k, u64>,
        first: Val<'k, i32>,
        end: Val<'k, u32>,
        to: Val<'k, u32>,
        lane: Val<'k, u32>,
        bytes: Val<'k, u32>,
    ) {
        let k = self.k;
        let element_bytes = self.element_bytes as i32;
        let start = (first - self.shift(first).signed()) * element_bytes;
        let end = end.signed() * element_bytes;
        k.range_step(lane * bytes, self.line_bytes, bytes * CHUNK_LANES, |at| {
            let from = start + at.signed();
            let zero = k.constant(0i32);
            // Chunks begin at the line's first element or at whole chunks from there, so none lies on both sides of it.
            let left = k.select(from.ge(0), (end - from).max(zero), zero).unsigned().min(bytes);
            let from = address + from.max(zero).unsigned().min(end.unsigned()).widen();
            let to = to + at;
            let with = |bytes: u8| k.cp_async(to, 0, from, 0, bytes, left);
            k.when_else(bytes.eq(16), || with(16), || k.when_else(bytes.eq(8), || with(8), || with(4)));
        });
    }

    /// Moves a line through registers: this thread's elements.
    fn move_line(&self, address: Val<'k, u64>, first: Val<'k, i32>, end: Val<'k, u32>, to: Val<'k, u32>, lane: Val<'k, u32>) {
        let k = self.k;
        let LoadPath::Elements { channels, column_bytes, channel_bytes } = self.path else { return };
        let elements = self.line_bytes >> self.element_bytes.ilog2();
        k.range_step(lane, elements, ELEMENT_LANES * ON_THEIR_WAY, |at| {
            let places: Vec<Val<'k, u32>> = (0..ON_THEIR_WAY).map(|i| at + ELEMENT_LANES * i).collect();
            let found = |place: Val<'k, u32>| {
                let element = (first + place.signed()).unsigned();
                let is_inside = element.lt(end);
                let (column, channel) = channels.split(k.select(is_inside, element, 0u32));
                (address + column.widen() * column_bytes + channel.widen() * channel_bytes, is_inside)
            };
            let found: Vec<_> = places.iter().map(|&place| found(place)).collect();
            // All of them are on their way before the first is waited for.
            if self.element_bytes == 2 {
                let values: Vec<Val<'k, u16>> = found.iter().map(|&(from, _)| k.ld_global::<u16>(from, 0)).collect();
                for ((&place, (_, is_inside)), value) in places.iter().zip(&found).zip(values) {
                    k.when(place.lt(elements), || k.st_shared(to + place * 2, 0, k.select(*is_inside, value, 0u16)));
                }
            } else {
                let values: Vec<Val<'k, u32>> = found.iter().map(|&(from, _)| k.ld_global::<u32>(from, 0)).collect();
                for ((&place, (_, is_inside)), value) in places.iter().zip(&found).zip(values) {
                    k.when(place.lt(elements), || k.st_shared(to + place * 4, 0, k.select(*is_inside, value, 0u32)));
                }
            }
        });
    }
}

/// The arguments of x, behind those of the patch.
pub(super) fn source_args(p: &ConvProblem, lines: Lines, copies: bool) -> Vec<Arg> {
    let [image, channel, depth, row, column] = p.x.strides.map(|stride| stride * p.x.dtype.bytes() as u64);
    let double_word = |value: u64| Arg::Scalar(Ty::U64, value);
    let mut args = vec![Arg::Pointer(Address::buffer(p.x.slot.0 as usize))];
    args.extend([image, channel, depth, row].map(double_word));
    if copies {
        args.push(Arg::Scalar(Ty::U32, lines.copy_bytes));
    } else {
        args.push(Arg::Divisor(lines.channels.max(1) as u32));
        args.extend([column, channel].map(double_word));
    }
    args
}
