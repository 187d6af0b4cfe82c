//! Matrices copied so that their other index is contiguous, by tiles in shared memory: operands and images on their way into lines and back,
//! and maps that transpose.
//!
//! The columns of the source's rows are neighbours in memory (or else are read one by one), the rows of the target's columns are. Elements have 1, 2 or 4 bytes; both
//! tensors may begin at any element, and their lines as far apart as they like.
//!
//! **Method.** A thread reads 16 bytes of each of two rows (four of bytes), all loads before the first use, and changes places in registers: what it
//! stores is a word that has the elements of its rows at one column, or two words. So no store to shared memory has less than four bytes, and no access to
//! memory, where nothing ends, less than 16. Where rows of the source begin anywhere, a thread reads the two
//! aligned windows that its bytes lie in and shifts them together. Where columns of the target begin anywhere, a tile owns of each of them what lies in
//! whole sectors of memory, which is some rows more than it has at one end and as many less at the other: of a sector that two tiles wrote a part of
//! each, memory may have to read the rest (counted, not profiled). The tile reads the rows that it may need twice.
//!
//! **Numbers.** Bits are moved.

use verdigris_graph::Matrix;
use verdigris_kir::face::{Header, Kernel, Val, Var, build};
use verdigris_kir::inst::{Cache, CvtRound};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::{Divide, Read, Write};
use verdigris_kir::program::{Address, KernelRef, Launch};

use super::batch::{BatchIndexArgs, BatchStridesBytes, Chunk};
use crate::cost::{Stream, Traffic};

/// What one access takes.
const CHUNK_BYTES: u32 = 16;
/// Chunks of a row of the source that neighbouring threads read.
const CHUNKS: u32 = 8;
/// Threads that write.
const WRITERS: u32 = 256;
/// Blocks of rows that a tile has, those that it reads twice apart.
const BLOCKS: u32 = 32;
/// What memory is written in.
const SECTOR_BYTES: u32 = 32;

/// Everything that shapes a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Spec {
    /// Bytes of an element: 1, 2 or 4.
    bytes: u32,
    /// Columns of the target begin anywhere.
    shifted: bool,
    /// Blocks that a thread reads: one or two.
    turns: u32,
}

impl Spec {
    fn name(self) -> String {
        format!("transpose_tiles{}_t{}_b{}", if self.shifted { "_shifted" } else { "" }, self.turns, 8 * self.bytes)
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(self) -> KernelBody {
        // What a thread has on its way says how many registers it takes.
        let min_ctas = match (self.bytes, self.turns) {
            (1, 2) => 2,
            (1, _) | (_, 2) => 3,
            _ => 4,
        };
        let header = Header { name: self.name(), target: Target::Sm90, threads: self.threads(), min_ctas, ..Header::default() };
        build(header, |k| transpose(k, self))
    }

    /// Elements of a chunk.
    fn chunk(self) -> u32 {
        CHUNK_BYTES / self.bytes
    }

    /// Rows of which a thread reads a chunk each.
    fn block(self) -> u32 {
        (4 / self.bytes).max(2)
    }

    /// Rows and columns of a tile.
    fn rows(self) -> u32 {
        BLOCKS * self.block()
    }

    fn columns(self) -> u32 {
        self.chunks() * self.chunk()
    }

    /// Chunks of a row of the tile, and of a column.
    fn chunks(self) -> u32 {
        self.turns * CHUNKS
    }

    fn chunks_of_column(self) -> u32 {
        self.rows() / self.chunk()
    }

    /// Rows in front of a tile's own that columns of the target may have in its first sector.
    fn rows_ahead(self) -> u32 {
        if self.shifted { SECTOR_BYTES / self.bytes } else { 0 }
    }

    /// One for each chunk of a block.
    fn threads(self) -> u32 {
        (self.rows() + self.rows_ahead()) / self.block() * CHUNKS
    }

    /// From one column in shared memory to the next. Sixteen bytes more behind the columns of a chunk keep the chunks of a row on different banks.
    fn pitch_bytes(self) -> u32 {
        (self.rows() + self.rows_ahead()) * self.bytes
    }

    fn group_bytes(self) -> u32 {
        self.chunk() * self.pitch_bytes() + CHUNK_BYTES
    }
}

/// Those for elements of so many bytes, of so many blocks of a thread.
pub(crate) fn catalog_of<const N: usize>(bytes: [u32; N], shifted: bool, turns: u32) -> impl Iterator<Item = KernelRef> {
    bytes.into_iter().map(move |bytes| Spec { bytes, shifted, turns }.kernel())
}

/// A copy to be made.
#[derive(Clone, Debug)]
pub(crate) struct Transposing {
    /// Columns are neighbours in the source, rows in the target. Their slots mean nothing.
    source: Matrix,
    target: Matrix,
    rows: u64,
    columns: u64,
    batch: Vec<u64>,
    /// Rows that a column of the target has room for.
    room: u64,
    spec: Spec,
}

impl Transposing {
    /// The copy of the `rows` by `columns` of each matrix of a batch, if it is one that transposes. Behind the rows of a column of the target nothing is kept up to row
    /// `room`; `first` is the distance of the target from an address that is a multiple of 16 bytes, as far as is known.
    pub(crate) fn of(
        [source, target]: [&Matrix; 2],
        [rows, columns]: [u64; 2],
        batch: &[u64],
        room: u64,
        first: u64,
    ) -> Option<Transposing> {
        let bytes = source.dtype.bytes() as u32;
        if !matches!(bytes, 1 | 2 | 4) || target.row_stride != 1 {
            return None;
        }
        let strides = target.batch_strides.iter().zip(batch).filter(|(_, extent)| **extent > 1).map(|(stride, _)| *stride);
        let is_whole = |elements: u64| (elements * u64::from(bytes)).is_multiple_of(CHUNK_BYTES.into());
        let shifted = !strides.chain([target.column_stride, first]).all(is_whole);
        let spec = Spec { bytes, shifted, turns: 1 };
        let copy = Transposing { source: source.clone(), target: target.clone(), rows, columns, batch: batch.to_vec(), room, spec };
        let [down, along] = copy.tiles();
        (rows.max(columns) < 1 << 30 && down * along < 1 << 31).then_some(copy)
    }

    /// The same with so many blocks of a thread, one or two.
    pub(crate) fn in_turns(self, turns: u32) -> Transposing {
        Transposing { spec: Spec { turns, ..self.spec }, ..self }
    }

    /// Whether tiles of two blocks a thread have columns for both, and are CTAs for the chip all the same.
    pub(crate) fn has_many_tiles(&self) -> bool {
        /// Half of them are four waves of an H200.
        const MANY: u64 = 4096;
        let [down, along] = self.tiles();
        along > 1 && down * along * self.matrices() >= MANY
    }

    fn matrices(&self) -> u64 {
        self.batch.iter().product()
    }

    /// Tiles along the rows and the columns. Where those of the target begin anywhere, the last tile may own nothing but the end of a column's last sector.
    fn tiles(&self) -> [u64; 2] {
        let spec = self.spec;
        let behind = u64::from(spec.rows_ahead().saturating_sub(1));
        [(self.rows + behind).div_ceil(spec.rows().into()), self.columns.div_ceil(spec.columns().into())]
    }

    /// What the copy asks.
    pub(crate) fn work(&self) -> Stream {
        let matrices = self.matrices() as f64;
        let elements = matrices * self.rows as f64 * self.columns as f64;
        let ctas = self.tiles().iter().product::<u64>() as f64 * matrices;
        let issued = ctas * f64::from(self.spec.threads() / 32) * issued_per_thread(self.spec);
        Stream::new(Traffic::Tiles, 2.0 * elements * f64::from(self.spec.bytes)).issuing(issued).of_ctas(ctas)
    }

    /// The launches that copy from one place to the other.
    pub(crate) fn launches(&self, from: Address, to: Address) -> Vec<Launch> {
        let bytes = u64::from(self.spec.bytes);
        let [down, along] = self.tiles();
        let stride = self.source.row_stride * bytes;
        // Windows reach less than two chunks beyond the ends of a row.
        let gapless = stride <= self.columns * bytes && stride >= u64::from(2 * CHUNK_BYTES);
        let launch = |chunk: Chunk| {
            let at = |matrix: &Matrix, base: Address| {
                let offset = matrix.offset(&chunk.first, 0, 0) * bytes;
                Address { offset_bytes: base.offset_bytes + offset, ..base }
            };
            let args = ParamsArgs {
                source: at(&self.source, from),
                target: at(&self.target, to),
                row_stride: stride,
                step: self.source.column_stride * bytes,
                column_stride: self.target.column_stride * bytes,
                rows: self.rows as u32,
                columns: self.columns as u32,
                tiles: along as u32,
                gapless_from: if gapless { 1 } else { u32::MAX },
                batch: chunk.index(),
                source_batch: chunk.strides_bytes(&self.source),
                target_batch: chunk.strides_bytes(&self.target),
                room: (!self.spec.shifted).then_some(self.room as u32),
            };
            let [y, z] = chunk.grid();
            Launch::new(self.spec.kernel(), [(down * along) as u32, y, z], args.bound(&self.spec)).overlapping()
        };
        if self.rows * self.columns == 0 { Vec::new() } else { Chunk::all(&self.batch).into_iter().map(launch).collect() }
    }
}

/// Instructions of a thread, counted where nothing ends within the tile and rows of the source begin anywhere.
fn issued_per_thread(spec: Spec) -> f64 {
    let block = match (spec.bytes, spec.shifted) {
        (1, _) => 180.0,
        (_, false) => 80.0,
        (_, true) => 130.0,
    };
    100.0 + f64::from(spec.turns) * block
}

verdigris_kir::parameters! {
    /// Parameters; strides in bytes.
    #[derive(Clone, Copy)]
    struct Params / ParamsArgs of Spec as spec {
        source: Read = spec.bytes,
        target: Write = spec.bytes,
        /// Of the source, from row to row and from column to column.
        row_stride: u64,
        step: u64,
        /// Of the target.
        column_stride: u64,
        rows: u32,
        columns: u32,
        /// Tiles along the columns.
        tiles: Divide,
        /// The first row of which windows may reach beyond its ends, all rows if there is none: where rows follow each other without gaps.
        gapless_from: u32,
        batch: BatchIndexArgs = (),
        source_batch: BatchStridesBytes = (),
        target_batch: BatchStridesBytes = (),
        /// Rows that a column of the target may be written to.
        room: Option<u32> = (!spec.shifted).then_some(()),
    }
}

/// What a CTA copies.
#[derive(Clone, Copy)]
struct Tile<'k> {
    k: Kernel<'k>,
    spec: Spec,
    params: Params<'k>,
    source: Val<'k, u64>,
    target: Val<'k, u64>,
    first_row: Val<'k, u32>,
    first_column: Val<'k, u32>,
    /// In shared memory.
    place: Val<'k, u32>,
}

fn transpose(k: Kernel<'_>, spec: Spec) {
    let params = Params::declare(k, &spec);
    let place = k.shared("tile", spec.chunks() * spec.group_bytes(), CHUNK_BYTES).address();
    let indices = params.batch.of_cta();
    let (down, along) = params.tiles.split(k.cta());
    let tile = Tile {
        k,
        spec,
        params,
        source: params.source_batch.matrix(params.source, indices),
        target: params.target_batch.matrix(params.target, indices),
        first_row: down * spec.rows(),
        first_column: along * spec.columns(),
        place,
    };
    // What is in front of the launch may still run: nothing of it is touched above this.
    k.griddep_wait();
    k.griddep_launch();
    tile.read();
    k.bar_sync();
    if spec.shifted {
        k.when(k.thread().lt(WRITERS), || tile.write_sectors());
    } else {
        tile.write_chunks();
    }
}

/// A chunk of each of some rows, on its way through a thread.
struct Block<'k> {
    column: Val<'k, u32>,
    exists: Val<'k, bool>,
    /// All of it exists, and so do the windows that its rows lie in.
    whole: Val<'k, bool>,
    /// What was read of each row: its chunk, or the two windows.
    words: Vec<Vec<Var<'k, u32>>>,
}

impl<'k> Tile<'k> {
    /// A thread reads a chunk of each row of its block, and stores it by columns.
    fn read(&self) {
        let Tile { k, spec, params, source, .. } = *self;
        let (chunk, number) = (k.thread() & (CHUNKS - 1), k.thread() >> CHUNKS.ilog2());
        // Rows in front of the first one are far behind the last.
        let row = self.first_row + number * spec.block() - spec.rows_ahead();
        let first_column = self.first_column + chunk * spec.chunk();
        let first = source + row.widen() * params.row_stride + first_column.mul_wide(spec.bytes);
        let rows: Vec<Val<'k, u64>> = (0..spec.block()).map(|i| first + params.row_stride * u64::from(i)).collect();
        let aligned = ((source.low32() | params.row_stride.low32()) & (CHUNK_BYTES - 1)).eq(0);
        // What windows bring from beyond a row is written nowhere.
        let rows_exist = (row + spec.block()).le(params.rows) & params.step.eq(u64::from(spec.bytes));
        let gapless = row.ge(params.gapless_from) & (row + spec.block()).lt(params.rows);
        let needed = if spec.shifted { row } else { row & !(spec.chunk() - 1) }.lt(params.rows);
        let blocks: Vec<Block<'k>> = (0..spec.turns)
            .map(|turn| {
                let column = first_column + turn * CHUNKS * spec.chunk();
                let inside = (column + spec.chunk()).le(params.columns)
                    & (aligned | (column.ne(0) & (column + 2 * spec.chunk()).le(params.columns)));
                let exists = needed & column.lt(params.columns);
                let words = rows.iter().map(|_| (0..8).map(|_| k.var(0u32)).collect()).collect();
                Block { column, exists, whole: exists & rows_exist & (inside | gapless), words }
            })
            .collect();

        // All loads stand before the first use, so that they are on their way together.
        for (block, turn) in blocks.iter().zip(0..) {
            let offset = i64::from(turn * CHUNKS * CHUNK_BYTES);
            k.when(block.whole, || {
                for (&from, words) in rows.iter().zip(&block.words) {
                    let load = |from, offset, words: &[Var<'k, u32>]| {
                        let loaded = k.ld_global_vector::<u32>(from, offset, 4, Cache::NonCoherent);
                        words.iter().zip(loaded).for_each(|(var, word)| var.set(word));
                    };
                    // Aligned chunks are windows.
                    let window = from & !u64::from(CHUNK_BYTES - 1);
                    load(window, offset, &words[..4]);
                    k.when(!aligned, || load(window, offset + i64::from(CHUNK_BYTES), &words[4..]));
                }
            });
        }
        for (block, turn) in blocks.iter().zip(0..) {
            let to = self.place + chunk * spec.group_bytes() + number * (spec.block() * spec.bytes);
            let to = to + turn * CHUNKS * spec.group_bytes();
            k.when_else(
                block.whole,
                || {
                    k.when(!aligned, || {
                        for (from, words) in rows.iter().zip(&block.words) {
                            let moved = shifted(k, spec.bytes, words.iter().map(|word| word.get()).collect(), from.low32());
                            words.iter().zip(moved).for_each(|(var, word)| var.set(word));
                        }
                    });
                    let words: Vec<Vec<Val<'k, u32>>> = block.words.iter().map(|row| row.iter().map(|word| word.get()).collect()).collect();
                    for (words, column) in turned(spec, &words).into_iter().zip(0..) {
                        k.st_shared_vector(to, i64::from(column * spec.pitch_bytes()), &words);
                    }
                },
                || k.when(block.exists, || self.read_elements(row, block.column, to)),
            );
        }
    }

    /// The same element by element, 0 where there is none.
    fn read_elements(&self, row: Val<'k, u32>, column: Val<'k, u32>, to: Val<'k, u32>) {
        const AT_A_TIME: u32 = 2;
        let Tile { k, spec, params, source, .. } = *self;
        k.range(spec.chunk() / AT_A_TIME, |turn| {
            let first = turn * AT_A_TIME;
            let elements: Vec<Vec<Var<'k, u32>>> = (0..AT_A_TIME)
                .map(|i| {
                    let of_row = |number| {
                        let bits = k.var(0u32);
                        let (row, column) = (row + number, column + first + i);
                        let from = source + row.widen() * params.row_stride + column.widen() * params.step;
                        k.when(column.lt(params.columns) & row.lt(params.rows), || bits.set(load(k, spec.bytes, from, 0)));
                        bits
                    };
                    (0..spec.block()).map(of_row).collect()
                })
                .collect();
            for (bits, i) in elements.iter().zip(0..) {
                let bits: Vec<Val<'k, u32>> = bits.iter().map(|bits| bits.get()).collect();
                let words = match (spec.bytes, &bits[..]) {
                    (1, &[a, b, c, d]) => vec![a.prmt(b, 0x0040u32).prmt(c.prmt(d, 0x0040u32), 0x5410u32)],
                    (2, &[a, b]) => vec![a.prmt(b, 0x5410u32)],
                    _ => bits,
                };
                k.st_shared_vector(to + first * spec.pitch_bytes(), i64::from(i * spec.pitch_bytes()), &words);
            }
        });
    }

    /// Which chunk of columns a thread writes.
    fn chunk_of_column(&self) -> Val<'k, u32> {
        self.k.thread() & (self.spec.chunks_of_column() - 1)
    }

    /// The columns of the tile, of which a thread writes a chunk each: where they begin in shared memory and in the target.
    fn each_column(&self, body: impl Fn(Val<'k, u32>, Val<'k, u64>)) {
        let Tile { k, spec, params, target, .. } = *self;
        let number = k.thread() >> spec.chunks_of_column().ilog2();
        let at_once = WRITERS / spec.chunks_of_column();
        let column = self.first_column + number;
        let from = self.place + number * spec.pitch_bytes() + (number >> spec.chunk().ilog2()) * CHUNK_BYTES;
        let to = target + column.widen() * params.column_stride;
        for turn in 0..spec.columns() / at_once {
            let from = from + turn * (at_once / spec.chunk()) * spec.group_bytes();
            let to = to + params.column_stride * u64::from(turn * at_once);
            k.when((column + turn * at_once).lt(params.columns), || body(from, to));
        }
    }

    fn write_chunks(&self) {
        let Tile { k, spec, params, target, .. } = *self;
        let room = params.room.expect("columns that begin at chunks have it");
        let aligned = ((target.low32() | params.column_stride.low32()) & (CHUNK_BYTES - 1)).eq(0);
        let chunk = self.chunk_of_column();
        let row = self.first_row + chunk * spec.chunk();
        let (along, offset) = (chunk * CHUNK_BYTES, row.mul_wide(spec.bytes));
        k.when_else(
            row.lt(params.rows) & aligned & (row + spec.chunk()).le(room),
            || {
                self.each_column(|from, to| {
                    k.st_global_vector(to + offset, 0, &k.ld_shared_vector::<u32>(from + along, 0, 4), Cache::Default);
                });
            },
            || self.each_column(|from, to| self.write_elements(row, from, along, to + offset)),
        );
    }

    fn write_sectors(&self) {
        let Tile { k, spec, params, .. } = *self;
        let chunk = self.chunk_of_column();
        let first_row = self.first_row + chunk * spec.chunk();
        let offset = first_row.mul_wide(spec.bytes);
        self.each_column(|from, to| {
            // From the sector in which the column begins to its first row.
            let shift = to.low32() & (SECTOR_BYTES - 1);
            let row = first_row - (shift >> spec.bytes.ilog2());
            let to = (to & !u64::from(SECTOR_BYTES - 1)) + offset;
            let byte = chunk * CHUNK_BYTES + SECTOR_BYTES - shift;
            k.when_else(
                row.lt(params.rows) & (row + spec.chunk()).le(params.rows),
                || {
                    let first = from + (byte & !3u32);
                    let mut words: Vec<Val<'k, u32>> = (0..4).map(|i| k.ld_shared(first, 4 * i)).collect();
                    if spec.bytes < 4 {
                        // The last byte's word is the fourth one where bytes are those of whole words.
                        words.push(k.ld_shared(from + ((byte + (CHUNK_BYTES - 1)) & !3u32), 0));
                        words = (0..4).map(|i| words[i].prmt(words[i + 1], selector(byte))).collect();
                    }
                    k.st_global_vector(to, 0, &words, Cache::Default);
                },
                || self.write_elements(row, from, byte, to),
            );
        });
    }

    /// The elements of a chunk that exist, from byte `byte` of `from` on.
    fn write_elements(&self, row: Val<'k, u32>, from: Val<'k, u32>, byte: Val<'k, u32>, to: Val<'k, u64>) {
        let Tile { k, spec, params, .. } = *self;
        let any = row.signed().lt(params.rows.signed()) & (row + spec.chunk()).signed().gt(0);
        k.range(k.select(any, spec.chunk(), 0u32), |i| {
            k.when((row + i).lt(params.rows), || {
                let byte = byte + i * spec.bytes;
                let word = k.ld_shared::<u32>(from + (byte & !3u32), 0);
                store(k, spec.bytes, to + i.mul_wide(spec.bytes), word.shr((byte & 3u32) * 8));
            });
        });
    }
}

/// The words of each column of a block, whose rows are given.
fn turned<'k>(spec: Spec, rows: &[Vec<Val<'k, u32>>]) -> Vec<Vec<Val<'k, u32>>> {
    let of_word = |word: usize| -> Vec<Vec<Val<'k, u32>>> {
        let of: Vec<Val<'k, u32>> = rows.iter().map(|row| row[word]).collect();
        match (spec.bytes, &of[..]) {
            (1, &[a, b, c, d]) => [0x5140u32, 0x7362]
                .into_iter()
                .flat_map(|pairs| {
                    let (ab, cd) = (a.prmt(b, pairs), c.prmt(d, pairs));
                    [vec![ab.prmt(cd, 0x5410u32)], vec![ab.prmt(cd, 0x7632u32)]]
                })
                .collect(),
            (2, &[a, b]) => vec![vec![a.prmt(b, 0x5410u32)], vec![a.prmt(b, 0x7632u32)]],
            _ => vec![of],
        }
    };
    (0..4).flat_map(of_word).collect()
}

/// Byte `first % 4` of the first word, and the three behind it.
fn selector(first: Val<'_, u32>) -> Val<'_, u32> {
    (first & 3u32) * 0x1111u32 + 0x3210u32
}

/// Four words of eight, from byte `first % 16` on. Elements have so many bytes.
pub(crate) fn shifted<'k>(k: Kernel<'k>, bytes: u32, mut words: Vec<Val<'k, u32>>, first: Val<'k, u32>) -> Vec<Val<'k, u32>> {
    for step in [2usize, 1] {
        let moves = (first & (4 * step as u32)).ne(0);
        words = (0..words.len() - step).map(|i| k.select(moves, words[i + step], words[i])).collect();
    }
    if bytes < 4 {
        let selector = selector(first);
        words = (0..4).map(|i| words[i].prmt(words[i + 1], selector)).collect();
    }
    words.truncate(4);
    words
}

/// The bits of an element, in the low part of a word.
pub(crate) fn load<'k>(k: Kernel<'k>, bytes: u32, from: Val<'k, u64>, offset_bytes: i64) -> Val<'k, u32> {
    match bytes {
        1 => k.ld_global_byte(from, offset_bytes, false),
        2 => k.ld_global::<u16>(from, offset_bytes).convert(CvtRound::None),
        _ => k.ld_global(from, offset_bytes),
    }
}

pub(crate) fn store<'k>(k: Kernel<'k>, bytes: u32, to: Val<'k, u64>, bits: Val<'k, u32>) {
    match bytes {
        1 => k.st_global_byte(to, 0, bits),
        2 => k.st_global(to, 0, bits.low16()),
        _ => k.st_global(to, 0, bits),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_graph::Slot;
    use verdigris_kir::interp::{Kernels, Memory, Options, run};
    use verdigris_kir::program::Program;
    use verdigris_tensor::DType;

    /// Three matrices of `rows` by `columns`: elements between neighbouring lines, and in front of the first, of the source and of the target.
    fn check(kernels: &Kernels, dtype: DType, [rows, columns]: [u64; 2], gaps: [u64; 2], first: [u64; 2], seed: u64) {
        const MATRICES: u64 = 3;
        let bytes = dtype.bytes() as u64;
        let [row_stride, column_stride] = [columns + gaps[0], rows + gaps[1]];
        let matrix = |row_stride, column_stride, batch_stride| Matrix {
            slot: Slot(0),
            dtype,
            row_stride,
            column_stride,
            batch_strides: vec![batch_stride],
        };
        let source = matrix(row_stride, 1, rows * row_stride + gaps[1]);
        let target = matrix(1, column_stride, columns * column_stride + gaps[0]);
        let copy = Transposing::of([&source, &target], [rows, columns], &[MATRICES], rows, first[1]).expect("transposes");
        let span = |matrix: &Matrix, first: u64| (first + matrix.offset(&[MATRICES - 1], rows - 1, columns - 1) + 1) * bytes;
        for copy in [copy.clone(), copy.in_turns(2)] {
            let mut memory = Memory::new();
            let from = memory.add_unwritten(span(&source, first[0]));
            let to = memory.add_filled(span(&target, first[1]), 0xEE);
            let mut wanted = vec![0xEE; span(&target, first[1]) as usize];
            for (batch, row, column) in (0..MATRICES).flat_map(|b| (0..rows).flat_map(move |r| (0..columns).map(move |c| (b, r, c)))) {
                let number = (batch * rows + row) * columns + column + seed;
                let element: Vec<u8> = (0..bytes).map(|b| ((number * 4 + b).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as u8).collect();
                memory.write(from, (first[0] + source.offset(&[batch], row, column)) * bytes, &element);
                let at = ((first[1] + target.offset(&[batch], row, column)) * bytes) as usize;
                wanted[at..at + bytes as usize].copy_from_slice(&element);
            }
            let [from_place, to_place] = [(from, first[0]), (to, first[1])]
                .map(|(buffer, first)| Address { offset_bytes: first * bytes, ..Address::buffer(buffer) });
            let mut program = Program { buffer_alignment_bytes: vec![1; 2], ..Program::default() };
            copy.launches(from_place, to_place).into_iter().for_each(|launch| program.launch(launch));
            let said = format!("{dtype} {rows}x{columns} turns {} gaps {gaps:?} first {first:?}", copy.spec.turns);
            run(&program, kernels, &mut memory, &Options::schedule(seed)).unwrap_or_else(|findings| panic!("{said}: {findings}"));
            assert!(memory.to_vec(to) == wanted, "{said}");
        }
    }

    const DTYPES: [DType; 3] = [DType::E4m3, DType::Bf16, DType::F32];

    #[test]
    fn lines_of_every_alignment_on_either_side() {
        let kernels = Kernels::new();
        for dtype in DTYPES {
            let chunk = 16 / dtype.bytes() as u64;
            for (turn, gap) in [0, 1, 2, chunk / 2, chunk - 1, chunk].into_iter().enumerate() {
                let spec = Spec { bytes: dtype.bytes() as u32, shifted: false, turns: 1 };
                let [rows, columns] = [spec.rows(), spec.columns()].map(u64::from);
                check(&kernels, dtype, [rows + 2 * chunk, columns + chunk], [gap, 0], [gap % 3, 0], gap);
                check(&kernels, dtype, [2 * rows, columns + chunk], [0, gap], [0, turn as u64], gap);
                check(&kernels, dtype, [rows - 1, columns + 1], [gap, chunk - gap], [1, 2 * chunk - 1], gap);
            }
        }
    }

    #[test]
    fn every_edge_of_a_tile() {
        let kernels = Kernels::new();
        for dtype in DTYPES {
            for shifted in [false, true] {
                let spec = Spec { bytes: dtype.bytes() as u32, shifted, turns: 1 };
                let [rows, columns, chunk] = [spec.rows(), spec.columns(), spec.chunk()].map(u64::from);
                for (turn, rows) in [1, chunk - 1, chunk + 1, rows - 1, rows, rows + 1, rows + 2 * chunk + 1].into_iter().enumerate() {
                    let columns = [columns + 1, 1, columns - 1, 2 * columns + 1, chunk + 1, columns][turn % 6];
                    // Columns of the target begin at chunks, or at the element behind one.
                    let behind = rows.next_multiple_of(chunk) - rows + u64::from(shifted);
                    check(&kernels, dtype, [rows, columns], [turn as u64 % 3, behind], [0, u64::from(shifted)], rows);
                }
            }
        }
    }
}
