//! dgrad: blocks of pixels of dx by windows of dy.
//!
//! All pixels of a block of dx, one stride on each side, and their channels are the columns of one product, whose rows are
//! the blocks and whose depth is the window of dy that a block reads, by channels of y. So each phase of a strided convolution is a few
//! columns among others, and a pixel of dy is brought once for all of them. The window of a box of blocks comes to shared memory as rows of
//! 128 bytes, one a pixel; `ldmatrix` reads it at rows moved by each tap. The filters, spread over the columns, stay in shared memory.

use verdigris_kir::face::{Divisor, Header, Kernel, Pointer, Val, Var, build};
use verdigris_kir::inst::{MatrixType, Special};
use verdigris_kir::ir::KernelBody;
use verdigris_kir::program::KernelRef;

use super::super::fprop::kernel::shape;
use super::super::geometry::NO_ELEMENT;
use crate::fuse::epilogue::EpilogueSpec;

/// Blocks of dx in a box.
pub(super) const BOX_BLOCKS: u32 = 128;
const WARPS: u32 = 4;
const THREADS: u32 = 32 * WARPS;
/// Rows of 16 blocks of a warp.
const ROWS: u32 = BOX_BLOCKS / 16 / WARPS;
/// Windows that a CTA holds: one is multiplied, one is on its way.
const STAGES: u32 = 2;
/// Bytes of channels of a pixel of dy in a K-tile.
pub(super) const PIXEL_BYTES: u32 = 128;
const STEP_BYTES: u32 = 32;
/// Lanes that copy a pixel together.
const LANES: u32 = 8;
/// Elements, and words of the filter, that a thread has on their way at a time.
const ON_THEIR_WAY: u32 = 8;
const WORDS_ON_THEIR_WAY: u32 = 16;
/// Bytes of shared memory for one window.
pub(super) const WINDOW_BYTES: u32 = 30 * 1024;

/// The part of a spec that is chosen.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Tile {
    /// Columns: pixels of a block by channels.
    pub(super) columns: u32,
    /// One CTA an SM, with room for deeper filters.
    pub(super) large: bool,
}

impl Tile {
    /// By number; numbers are never reused, for plan caches hold them.
    pub(super) const ALL: [Tile; 3] =
        [Tile { columns: 16, large: false }, Tile { columns: 16, large: true }, Tile { columns: 64, large: true }];

    /// Bytes of shared memory for the filters.
    pub(super) const fn filter_bytes(self) -> u32 {
        if self.large { 98 * 1024 } else { 36 * 1024 }
    }

    /// Bytes of shared memory in all.
    pub(super) const fn shared_bytes(self) -> u32 {
        self.filter_bytes() + STAGES * WINDOW_BYTES
    }

    /// CTAs that share an SM.
    pub(super) const fn ctas(self) -> u32 {
        if self.large { 1 } else { 2 }
    }
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Spec {
    pub(super) operands: MatrixType,
    /// dy is brought by asynchronous copies.
    pub(super) copies: bool,
    pub(super) tile: Tile,
    pub(super) epilogue: EpilogueSpec,
}

impl Spec {
    pub(super) fn name(&self) -> String {
        let (copies, size) = (if self.copies { "async" } else { "direct" }, if self.tile.large { "large" } else { "small" });
        let (operands, columns, epilogue) = (self.operands.ptx(), self.tile.columns, self.epilogue.name());
        format!("conv_small_dgrad_{operands}_{BOX_BLOCKS}x{columns}_{copies}_{size}_{epilogue}")
    }

    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let (target, min_ctas) = (self.epilogue.target().with_room(self.tile.shared_bytes()), self.tile.ctas());
        let header = Header { name: self.name(), target, threads: THREADS, min_ctas, cluster: 1 };
        build(header, |k| dgrad(k, self))
    }

    fn element_bytes(&self) -> u32 {
        self.operands.bits() / 8
    }
}

/// A box of blocks: image, block along depth, first blocks along height and width.
#[derive(Clone, Copy)]
struct BlockBox<'k> {
    image: Val<'k, u32>,
    depth: Val<'k, u32>,
    row: Val<'k, u32>,
    column: Val<'k, u32>,
}

/// Parameters of boxes and windows, and of dy.
struct Windows<'k> {
    k: Kernel<'k>,
    element_bytes: u32,
    boxes: Val<'k, u32>,
    boxes_across: Divisor<'k>,
    boxes_down: Divisor<'k>,
    depths: Divisor<'k>,
    box_rows: Val<'k, u32>,
    box_columns: Divisor<'k>,
    /// The first pixel of dy that block 0 reads: depth, height, width. The next block reads from the next one on.
    origins: [Val<'k, i32>; 3],
    extents: [Val<'k, u32>; 3],
    window_columns: Divisor<'k>,
    window_pixels: Val<'k, u32>,
    depth_taps: Divisor<'k>,
    dy: Pointer<'k>,
    strides: [Val<'k, u64>; 4],
    channels: Val<'k, u32>,
    path: LoadPath<'k>,
}

#[derive(Clone, Copy)]
enum LoadPath<'k> {
    /// By asynchronous copies of so many bytes.
    Copies(Val<'k, u32>),
    /// Element by element: bytes from one channel to the next.
    Elements(Val<'k, u64>),
}

impl<'k> Windows<'k> {
    fn declare(k: Kernel<'k>, spec: &Spec) -> Self {
        let element_bytes = spec.element_bytes();
        let word = |name| k.scalar::<u32>(name);
        Windows {
            k,
            element_bytes,
            boxes: word("boxes"),
            boxes_across: k.divisor("boxes_across"),
            boxes_down: k.divisor("boxes_down"),
            depths: k.divisor("depth_blocks"),
            box_rows: word("box_rows"),
            box_columns: k.divisor("box_columns"),
            origins: ["depth_origin", "row_origin", "column_origin"].map(|name| k.scalar::<i32>(name)),
            extents: ["dy_depth", "dy_height", "dy_width"].map(word),
            window_columns: k.divisor("window_columns"),
            window_pixels: word("window_pixels"),
            depth_taps: k.divisor("depth_taps"),
            dy: k.input("dy", if spec.copies { element_bytes.max(4) } else { element_bytes }),
            strides: ["dy_image_bytes", "dy_depth_bytes", "dy_row_bytes", "dy_column_bytes"].map(|name| k.scalar(name)),
            channels: word("channels"),
            path: if spec.copies { LoadPath::Copies(word("dy_copy_bytes")) } else { LoadPath::Elements(k.scalar("dy_channel_bytes")) },
        }
    }

    fn at(&self, number: Val<'k, u32>) -> BlockBox<'k> {
        let (rest, across) = self.boxes_across.split(number);
        let (rest, down) = self.boxes_down.split(rest);
        let (image, depth) = self.depths.split(rest);
        BlockBox { image, depth, row: down * self.box_rows, column: across * self.box_columns.value() }
    }

    /// Row and column in the box of its block `index`.
    fn block(&self, index: Val<'k, u32>) -> (Val<'k, u32>, Val<'k, u32>) {
        self.box_columns.split(index)
    }

    /// The pixel of a window that block `index` of the box reads first; that of block 0 if the box has no such block.
    fn first_pixel(&self, index: Val<'k, u32>) -> Val<'k, u32> {
        let (row, column) = self.block(index);
        let pixel = row * self.window_columns.value() + column;
        self.k.select(row.lt(self.box_rows), pixel, 0u32)
    }

    /// Brings the window of a K-tile, some channels at one tap of depth, to shared memory at `to`.
    fn load(&self, blocks: &BlockBox<'k>, k_tile: Val<'k, u32>, to: Val<'k, u32>) {
        let k = self.k;
        let (channel_k_tile, depth_tap) = self.depth_taps.split(k_tile);
        let start = |dim: usize, block: Val<'k, u32>| block.signed() + self.origins[dim];
        let depth = (start(0, blocks.depth) + depth_tap.signed()).unsigned();
        let (first_row, first_column) = (start(1, blocks.row), start(2, blocks.column));
        let pixel_of = |pixel: Val<'k, u32>| {
            let (row, column) = self.window_columns.split(pixel);
            let (row, column) = ((first_row + row.signed()).unsigned(), (first_column + column.signed()).unsigned());
            let is_inside = depth.lt(self.extents[0]) & row.lt(self.extents[1]) & column.lt(self.extents[2]);
            // Pixels outside are not read: they are told to be where dy begins.
            let address = [blocks.image, depth, row, column]
                .into_iter()
                .zip(self.strides)
                .fold(self.dy.address(), |address, (index, stride)| address + k.select(is_inside, index, 0u32).widen() * stride);
            (address, is_inside)
        };
        let place = |pixel: Val<'k, u32>, chunk: Val<'k, u32>| to + pixel * PIXEL_BYTES + ((chunk ^ (pixel & 7u32)) << 4);
        match self.path {
            LoadPath::Copies(bytes) => {
                let first_byte = channel_k_tile * PIXEL_BYTES;
                let end = self.channels * self.element_bytes - first_byte;
                let (pixel, lane) = (k.thread() >> LANES.ilog2(), k.thread() & (LANES - 1));
                k.range_step(pixel, self.window_pixels, THREADS / LANES, |pixel| {
                    let (address, is_inside) = pixel_of(pixel);
                    let from = address + first_byte.widen();
                    let inside_end = k.select(is_inside, end, 0u32);
                    k.range_step(lane * bytes, PIXEL_BYTES, bytes * LANES, |at| {
                        let left = k.select(at.lt(inside_end), (inside_end - at.min(inside_end)).min(bytes), 0u32);
                        // Nothing is read behind the channels, so no address points there.
                        let from = from + at.min(end).widen();
                        let to = place(pixel, at >> 4) + (at & 15u32);
                        let with = |bytes: u8| k.cp_async(to, 0, from, 0, bytes, left);
                        k.when_else(bytes.eq(16), || with(16), || k.when_else(bytes.eq(8), || with(8), || with(4)));
                    });
                });
            }
            LoadPath::Elements(channel_bytes) => {
                // A thread has a pixel, so that neighbours in a row are neighbours in a warp.
                let per_chunk = 16 / self.element_bytes;
                let first_channel = channel_k_tile * (PIXEL_BYTES / self.element_bytes);
                k.range_step(k.thread(), self.window_pixels, THREADS, |pixel| {
                    let (address, is_inside) = pixel_of(pixel);
                    k.range(PIXEL_BYTES / self.element_bytes / ON_THEIR_WAY, |group| {
                        let first = group * ON_THEIR_WAY;
                        let found: Vec<_> = (0..ON_THEIR_WAY)
                            .map(|i| {
                                let channel = first_channel + first + i;
                                let exists = is_inside & channel.lt(self.channels);
                                (address + k.select(exists, channel, 0u32).widen() * channel_bytes, exists)
                            })
                            .collect();
                        let words: Vec<Val<'k, u32>> = if self.element_bytes == 2 {
                            let values: Vec<_> = found.iter().map(|&(from, _)| k.ld_global::<u16>(from, 0)).collect();
                            let values: Vec<_> =
                                found.iter().zip(values).map(|((_, exists), value)| k.select(*exists, value, 0u16)).collect();
                            values.chunks(2).map(|pair| k.join16(pair[0], pair[1])).collect()
                        } else {
                            let values: Vec<_> = found.iter().map(|&(from, _)| k.ld_global::<u32>(from, 0)).collect();
                            found.iter().zip(values).map(|((_, exists), value)| k.select(*exists, value, 0u32)).collect()
                        };
                        for (chunk, words) in (0..).zip(words.chunks(4)) {
                            let chunk = (first >> per_chunk.ilog2()) + chunk;
                            k.st_shared_vector(place(pixel, chunk), 0, words);
                        }
                    });
                });
            }
        }
    }
}

/// The filters of a CTA's columns: rows of all K-tiles, taps and channels.
struct Filters<'k> {
    k: Kernel<'k>,
    /// Where a lane's rows of a pair of column blocks begin.
    rows: Vec<Val<'k, u32>>,
}

impl<'k> Filters<'k> {
    /// Brings them to shared memory; a barrier of the CTA has to follow. Takes the parameters.
    fn load(k: Kernel<'k>, spec: &Spec, windows: &Windows<'k>, first_column: Val<'k, u32>) -> Self {
        let element_bytes = spec.element_bytes();
        let columns = spec.tile.columns;
        let elements = k.input("filter_elements", 4);
        let filter = k.input("filter", element_bytes);
        let channel_bytes = k.scalar::<u64>("filter_channel_bytes");
        let row_words = k.divisor("row_words");
        let taps = k.divisor("window_taps");
        let rows = k.shared("filters", spec.tile.filter_bytes(), 128).address();
        // An odd number of 16-byte chunks, so that eight rows stand in different banks.
        let pitch = row_words.value() * 4 + 16;
        let words = row_words.value() * columns;
        let per_word = 4 / element_bytes;
        k.range_step(k.thread(), words, THREADS * WORDS_ON_THEIR_WAY, |first| {
            let places: Vec<_> = (0..WORDS_ON_THEIR_WAY)
                .map(|i| {
                    let word = first + THREADS * i;
                    let (row, at) = row_words.split(word.min(words - 1));
                    let (k_tile, tap) = taps.split(at >> 5);
                    let (channel_k_tile, depth_tap) = windows.depth_taps.split(k_tile);
                    let entry = ((first_column + row) * windows.depth_taps.value() + depth_tap) * taps.value() + tap;
                    let channel = (channel_k_tile * (PIXEL_BYTES / 4) + (at & 31u32)) * per_word;
                    (word, rows + row * pitch + at * 4, entry, channel)
                })
                .collect();
            let offsets: Vec<_> = places.iter().map(|&(_, _, entry, _)| k.ld_global::<u32>(elements.at(entry, 4), 0)).collect();
            // Where there is no element the filter's first is read and thrown away.
            let from = |offset: Val<'k, u32>, channel: Val<'k, u32>| {
                let exists = offset.ne(NO_ELEMENT) & channel.lt(windows.channels);
                let address = filter.address() + k.select(exists, channel, 0u32).widen() * channel_bytes;
                (address + k.select(exists, offset, 0u32).widen(), exists)
            };
            let pairs = places.iter().zip(&offsets);
            let values: Vec<Val<'k, u32>> = if element_bytes == 2 {
                let halves: Vec<[Val<'k, u16>; 2]> = pairs
                    .map(|(&(.., channel), &offset)| {
                        [0, 1].map(|odd| {
                            let (address, exists) = from(offset, channel + odd);
                            k.select(exists, k.ld_global::<u16>(address, 0), 0u16)
                        })
                    })
                    .collect();
                halves.into_iter().map(|[low, high]| k.join16(low, high)).collect()
            } else {
                pairs
                    .map(|(&(.., channel), &offset)| {
                        let (address, exists) = from(offset, channel);
                        k.select(exists, k.ld_global::<u32>(address, 0), 0u32)
                    })
                    .collect()
            };
            for (&(word, to, ..), value) in places.iter().zip(values) {
                k.when(word.lt(words), || k.st_shared(to, 0, value));
            }
        });
        // Four 8×8 matrices at a time: both halves of a step of eight columns, then of the next eight.
        let (within, matrix) = (k.lane() & 7u32, k.lane() >> 3);
        let row = (matrix >> 1) * 8 + within;
        let rows = (0..columns / 16).map(|pair| rows + (row + 16 * pair) * pitch + (matrix & 1u32) * 16).collect();
        Filters { k, rows }
    }

    /// The fragments at a distance from the rows' beginning, two column blocks each.
    fn fragments(&self, at: Val<'k, u32>, offset_bytes: u32) -> Vec<Vec<Val<'k, u32>>> {
        self.rows.iter().map(|&row| self.k.ldmatrix(4, false, row + at, i64::from(offset_bytes))).collect()
    }
}

fn dgrad<'k>(k: Kernel<'k>, spec: &Spec) {
    let windows = Windows::declare(k, spec);
    let ctas = k.divisor("ctas");
    let k_tiles = k.scalar::<u32>("slabs");
    let [tap_rows, tap_columns] = ["tap_rows", "tap_columns"].map(|name| k.scalar::<u32>(name));
    let columns = k.scalar::<u32>("columns");
    // A block's pixels, and channels of x: what a column is.
    let block_depth = k.scalar::<u32>("block_depth");
    let [block_rows, block_columns, channels] = ["block_rows", "block_columns", "channels_in"].map(|name| k.divisor(name));
    let extents = ["depth", "height", "width"].map(|name| k.scalar::<u32>(name));
    let first_column = k.special(Special::CtaY) * spec.tile.columns;
    let filters = Filters::load(k, spec, &windows, first_column);
    let epilogue = spec.epilogue.declare_conv::<f32>(k);
    let stages = k.shared("windows", STAGES * WINDOW_BYTES, 1024).address();

    let lane = k.lane();
    let first_block = k.warp() * (16 * ROWS);
    // The lane's row of the matrices of 16 blocks: both halves of the blocks, then of the step.
    let (within, matrix) = (lane & 7u32, lane >> 3);
    let half = matrix >> 1;
    let pixels: Vec<Val<'k, u32>> =
        (0..ROWS).map(|row| windows.first_pixel(first_block + (matrix & 1u32) * 8 + within + 16 * row)).collect();
    let sums: Vec<Vec<[Var<'k, f32>; 4]>> =
        (0..ROWS).map(|_| (0..spec.tile.columns / 8).map(|_| [(); 4].map(|()| k.var(0.0f32))).collect()).collect();

    // What is brought next, and what is multiplied: a box and one of its K-tiles.
    let step_on = |number: Var<'k, u32>, k_tile: Var<'k, u32>| {
        let next = k_tile + 1;
        let is_last = next.eq(k_tiles);
        number.set(k.select(is_last, number + ctas.value(), number));
        k_tile.set(k.select(is_last, 0u32, next));
    };
    let (next_box, next_k_tile) = (k.var_named("next_box", k.cta()), k.var_named("next_slab", 0u32));
    let bring = |stage: Val<'k, u32>| {
        windows.load(&windows.at(next_box.get()), next_k_tile.get(), stages + stage * WINDOW_BYTES);
        step_on(next_box, next_k_tile);
    };
    let (number, k_tile) = (k.var_named("box", k.cta()), k.var_named("slab", 0u32));
    let turns = (ctas.quotient(windows.boxes - 1 - k.cta()) + 1) * k_tiles;

    bring(k.constant(0));
    k.cp_async_commit();
    k.range(turns, |turn| {
        // This window has arrived, for all threads; and all have done with the one before, whose place the next one takes.
        k.cp_async_wait(0);
        k.bar_sync();
        k.when((turn + 1).lt(turns), || bring((turn + 1) & 1u32));
        k.cp_async_commit();

        let window = stages + (turn & 1u32) * WINDOW_BYTES;
        let filter = k.var(k_tile * tap_rows * tap_columns * PIXEL_BYTES);
        k.range(tap_rows, |down| {
            let line = down * windows.window_columns.value();
            k.range(tap_columns, |right| {
                let starts: Vec<Val<'k, u32>> = (pixels.iter())
                    .map(|&pixel| {
                        let pixel = pixel + line + right;
                        window + pixel * PIXEL_BYTES + ((half ^ (pixel & 7u32)) << 4)
                    })
                    .collect();
                for step in 0..PIXEL_BYTES / STEP_BYTES {
                    let columns = filters.fragments(filter.get(), step * STEP_BYTES);
                    for (line, &start) in sums.iter().zip(&starts) {
                        // A step on is another chunk of the row: what permutes the chunks does so after it, too.
                        let rows = k.ldmatrix(4, false, start ^ (step * STEP_BYTES), 0);
                        for (j, sum) in line.iter().enumerate() {
                            k.mma(shape(spec.operands), &rows, &columns[j / 2][j % 2 * 2..][..2], sum);
                        }
                    }
                }
                filter.set(filter + PIXEL_BYTES);
            });
        });
        k.when((k_tile + 1).eq(k_tiles), || {
            let blocks = windows.at(number.get());
            for (row, line) in (0..).zip(&sums) {
                for below in 0..2u32 {
                    let index = first_block + (lane >> 2) + (16 * row + 8 * below);
                    let (down, right) = windows.block(index);
                    let first = [
                        blocks.depth * block_depth,
                        (blocks.row + down) * block_rows.value(),
                        (blocks.column + right) * block_columns.value(),
                    ];
                    for (column, sum) in
                        (0..).zip(line).flat_map(|(j, sum)| [0u32, 1].map(|odd| (8 * j + odd, sum[(2 * below + odd) as usize])))
                    {
                        let column = first_column + (lane & 3u32) * 2 + column;
                        let (rest, channel) = channels.split(column);
                        let (rest, w) = block_columns.split(rest);
                        let (d, h) = block_rows.split(rest);
                        let [d, h, w] = [first[0] + d, first[1] + h, first[2] + w];
                        let is_inside =
                            column.lt(columns) & down.lt(windows.box_rows) & d.lt(extents[0]) & h.lt(extents[1]) & w.lt(extents[2]);
                        k.when(is_inside, || {
                            let place = epilogue.at_pixel([blocks.image, d, h, w], channel);
                            place.store(place.apply(sum.get(), 0), 0);
                        });
                    }
                }
            }
            sums.iter().flatten().flatten().for_each(|sum| sum.set(0.0f32));
        });
        step_on(number, k_tile);
    });
}
