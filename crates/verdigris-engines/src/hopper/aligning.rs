//! The source of lines that begin anywhere: matrices of 16-bit elements, and of f32 along the depth, whose lines are no multiple of 16 bytes apart,
//! which no tensor map takes as they lie.
//!
//! **Every eighth line.** Lines that are eight apart begin at the same place within 16 bytes, whatever their pitch. So eight maps, one for each
//! class of lines, map an operand exactly: each begins at the 16 bytes in which the first line of its class begins, and its lines end where the
//! operand's do, so that the end of the depth is filled with zeros and nothing beyond a matrix's last element is read. By them the loading warp
//! brings *windows* into a ring of its own: the pieces of lines that a step multiplies, with what lies in front of them in 16 bytes.
//!
//! **Into place.** [`ALIGNERS`] warps read the windows, move each line's elements to its beginning, and write them to the stages of the main loop
//! under their swizzle. In which 16 bytes of the banks a line's window begins is settled by its place in its class, and where it is written by
//! its class: eight lanes take lines of eight classes at eight places, so that neither reads nor writes wait for each other.
//!
//! **Cost.** A step passes shared memory three times, where by [`super::tiled`] it does once: the windows in and out, and the tiles in. Of 128×128 that
//! is 1216 cycles beside 512 of products, so products by copies are faster where there are enough of them to pay for the copies.
//!
//! Lines are counted from the beginning of their matrix. So the matrices of a batch are a multiple of 16 bytes apart, and the operand's address is a
//! multiple of 16: lines begin anywhere, operands do not.

use std::panic::Location;

use verdigris_graph::{Matrix, Order};
use verdigris_kir::face::{Kernel, LoadOptions, Role, SharedPiece, Val};
use verdigris_kir::ir::{Access, MapDecl, Swizzle};
use verdigris_kir::params::Map;
use verdigris_kir::program::{Address, MapSpec};
use verdigris_kir::tile::operand::{Major, OperandTile, ROW_BYTES};
use verdigris_kir::tile::ring::{Cursor, Ring, RingScope};
use verdigris_kir::tile::schedule::Work;

use super::SHARED_BYTES;
use super::spec::{MainLoopSpec, Operand};
use super::stages::Stages;
use super::tiled::matrix_map;
use crate::fuse::formats::map_type;

/// Warps that align: those of the producer's warpgroup beside the one that loads.
pub(crate) const ALIGNERS: u32 = 3;
/// Lines after which one begins at the same place within 16 bytes.
const CLASSES: u32 = 8;
const CHUNK_BYTES: u32 = 16;
/// Lines of 128 bytes of a tile that make a block: a panel, or as many rows along the depth.
const BLOCK: u32 = 64;
/// Those of a warp.
const LANES: u32 = 32;
/// Shared memory of a ring's stage beside its bytes: barriers, and room to align.
const BESIDE_STAGE: u32 = 16 + 128;
/// The most stages of either ring: three turns of windows are on their way from memory while one is aligned.
const MOST_STAGES: u32 = 4;

/// What shapes a main loop of such operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct AligningSpec {
    pub(crate) main: MainLoopSpec,
    /// Stages of the ring of windows.
    pub(crate) waiting: u32,
}

/// The windows of an operand in a stage: class by class, and in each line by line.
#[derive(Clone, Copy)]
struct Windows {
    lines_of_class: u32,
    line_bytes: u32,
    /// From one block of the tile to the next: further lines of each class, or further along its lines.
    block_bytes: u32,
}

impl Windows {
    fn of(tile: &OperandTile) -> Windows {
        match tile.major {
            Major::Depth => {
                let line_bytes = ROW_BYTES + CHUNK_BYTES;
                Windows { lines_of_class: tile.rows / CLASSES, line_bytes, block_bytes: BLOCK / CLASSES * line_bytes }
            }
            Major::Rows => {
                let line_bytes = tile.rows * tile.ty.bytes() + CHUNK_BYTES;
                Windows { lines_of_class: tile.depth() / CLASSES, line_bytes, block_bytes: ROW_BYTES }
            }
        }
    }

    fn loaded_bytes(&self) -> u32 {
        CLASSES * self.lines_of_class * self.line_bytes
    }

    /// Loads begin at multiples of 128 bytes.
    fn class_bytes(&self) -> u32 {
        (self.lines_of_class * self.line_bytes).next_multiple_of(128)
    }

    fn bytes(&self) -> u32 {
        CLASSES * self.class_bytes()
    }
}

/// Whether windows of an operand of `rows` by `depth` can be loaded.
pub(crate) fn takes(operand: &Matrix, [rows, depth]: [u32; 2]) -> bool {
    let bytes = operand.dtype.bytes() as u64;
    let (lines, fits) = match operand.order() {
        Order::RowMajor => (rows, matches!(bytes, 2 | 4)),
        // The tensor cores take no others along the rows.
        Order::ColumnMajor => (depth, bytes == 2),
        Order::Strided => (0, false),
    };
    // What a map takes for a stride.
    let is_near = |stride: u64, times: u64| stride.checked_mul(times * bytes).is_some_and(|stride| stride < 1 << 40);
    fits && operand.leading_dimension().is_some_and(|leading| leading != 0 && is_near(leading, CLASSES.into()))
        && operand.batch_strides.iter().all(|&stride| is_near(stride, 1) && (stride * bytes).is_multiple_of(u64::from(CHUNK_BYTES)))
        && lines >= CLASSES
}

impl AligningSpec {
    /// With as many stages as shared memory holds beside `beside_bytes`; nothing where that is less than two of either ring, or the tile is not
    /// made of whole blocks that one CTA loads.
    pub(crate) fn fitted(main: MainLoopSpec, beside_bytes: u32) -> Option<AligningSpec> {
        let tile = &main.tile;
        let whole = tile.peers() == 1 && tile.m.is_multiple_of(BLOCK) && tile.n.is_multiple_of(BLOCK) && tile.m.max(tile.n) <= 192;
        let plain = main.terms == 1 && !main.promotes() && !tile.ping_pong && main.a == main.b && matches!(main.a.bytes(), 2 | 4);
        if !whole || !plain {
            return None;
        }
        let of_windows = AligningSpec { main, waiting: 1 }.window_bytes() + BESIDE_STAGE;
        let of_tiles = (tile.m + tile.n) * ROW_BYTES + BESIDE_STAGE;
        let room = SHARED_BYTES.checked_sub(beside_bytes + 2 * of_tiles)?;
        let waiting = (room / of_windows).min(MOST_STAGES);
        let main = main.fitted(beside_bytes + waiting * of_windows, BESIDE_STAGE)?;
        let main = MainLoopSpec { stages: main.stages.min(MOST_STAGES), ..main };
        (waiting >= 2).then_some(AligningSpec { main, waiting })
    }

    fn windows(&self) -> [Windows; 2] {
        [Operand::A, Operand::B].map(|operand| Windows::of(&self.main.operand(operand)))
    }

    /// Bytes of the windows in a stage.
    fn window_bytes(&self) -> u32 {
        self.windows().iter().map(Windows::bytes).sum()
    }

    /// The lines of a step's tiles, of 128 bytes.
    fn lines(&self) -> u32 {
        self.main.tile.m + self.main.tile.n
    }

    /// Registers of a thread of the producers, and of a consumer's.
    pub(crate) fn registers(&self) -> [u32; 2] {
        [120, if self.main.tile.consumers == 1 { 232 } else { 192 }]
    }

    /// Of a step: bytes that are loaded, bytes that pass shared memory beside the tensor cores' reads, and instructions of warps.
    pub(crate) fn step(&self) -> AligningStep {
        let loaded = self.windows().map(|windows| f64::from(windows.loaded_bytes()));
        let tiles = f64::from(self.lines() * ROW_BYTES);
        // Of 32 lines: 9 loads, 8 stores with their addresses, and three instructions for each of 32 words.
        let issued = f64::from(self.lines() / LANES) * (9.0 + 16.0 + 99.0 + 16.0);
        AligningStep { loaded, passed: 2.0 * loaded.iter().sum::<f64>() + tiles, issued }
    }

    fn map(&self, operand: Operand) -> MapDecl {
        let (tile, windows) = (self.main.operand(operand), Windows::of(&self.main.operand(operand)));
        let box_dims = vec![windows.line_bytes / tile.ty.bytes(), windows.lines_of_class, 1];
        MapDecl { ty: tile.ty, rank: 3, box_dims, im2col: false, swizzle: Swizzle::None, access: Access::Read }
    }

    /// What a launch gives for an operand of `rows` by `depth` and `batch` at `place`.
    pub(crate) fn arguments(&self, operand: Operand, place: Address, matrix: &Matrix, [rows, depth, batch]: [u32; 3]) -> LinesArgs {
        debug_assert_eq!(map_type(matrix.dtype), self.map(operand).ty);
        let (lines, length) = if matrix.order() == Order::RowMajor { (rows, depth) } else { (depth, rows) };
        let pitch = matrix.leading_dimension().unwrap_or(1);
        let bytes = matrix.dtype.bytes() as u64;
        let chunk = u64::from(CHUNK_BYTES) / bytes;
        let strides_bytes = match matrix.batch_strides.first().copied().unwrap_or(0) {
            0 => [u64::from(CLASSES) * pitch * bytes; 2],
            stride => [u64::from(CLASSES) * pitch * bytes, stride * bytes],
        };
        let batches = u32::from(matrix.batch_strides.first().is_some_and(|&stride| stride != 0));
        let map = |class: u32| {
            let begins = u64::from(class) * pitch;
            let shift = begins % chunk;
            let count = (lines - class).div_ceil(CLASSES);
            let dims = [shift + u64::from(length), u64::from(count), u64::from(if batches == 1 { batch } else { 1 })];
            let at = Address { offset_bytes: place.offset_bytes + (begins - shift) * bytes, ..place };
            (at, matrix_map(self.map(operand), dims, strides_bytes)) as (Address, MapSpec)
        };
        LinesArgs { classes: std::array::from_fn(|class| map(class as u32)), pitch: (pitch % chunk) as u32, batches }
    }
}

/// What a step asks beside its products.
pub(crate) struct AligningStep {
    pub(crate) loaded: [f64; 2],
    pub(crate) passed: f64,
    pub(crate) issued: f64,
}

/// An operand of which it is declared.
#[derive(Clone, Copy)]
pub(crate) struct LinesOf {
    spec: AligningSpec,
    operand: Operand,
}

verdigris_kir::parameters! {
    /// An operand's lines.
    pub(crate) struct LinesValues / LinesArgs of LinesOf as lines {
        classes: [Map; CLASSES as usize] = lines.spec.map(lines.operand),
        /// Elements from a line to the next, of those of 16 bytes.
        pitch: u32,
        /// 1 for an operand with a matrix for each of the batch, 0 for one that all share.
        batches: u32,
    }
}

verdigris_kir::parameters! {
    /// Where the operands are.
    pub(crate) struct AligningValues / AligningArgs of AligningSpec as spec {
        pub(crate) a: LinesArgs = LinesOf { spec: *spec, operand: Operand::A },
        pub(crate) b: LinesArgs = LinesOf { spec: *spec, operand: Operand::B },
    }
}

/// The operands in memory, and their windows in shared memory.
pub(crate) struct Aligning<'k> {
    kernel: Kernel<'k>,
    spec: AligningSpec,
    operands: [LinesValues<'k>; 2],
    windows: SharedPiece<'k>,
    pub(crate) waiting: Ring<'k>,
}

/// The role of the warps that align.
pub(crate) fn align(body: &dyn Fn()) -> Role<'_> {
    Role { name: "align", warps: ALIGNERS, registers: None, body }
}

impl<'k> Aligning<'k> {
    /// Declares the shared memory of the windows.
    #[track_caller]
    pub(crate) fn new(k: Kernel<'k>, spec: AligningSpec, values: AligningValues<'k>) -> Self {
        let AligningValues { a, b } = values;
        let windows = k.shared("windows", spec.waiting * spec.window_bytes(), 128);
        let waiting = k.scope(Location::caller(), || Ring::new(k, spec.waiting, ALIGNERS, RingScope::Cta));
        Aligning { kernel: k, spec, operands: [a, b], windows, waiting }
    }

    /// Brings the tensor maps near: by one thread.
    #[track_caller]
    pub(crate) fn prefetch_maps(&self) {
        self.kernel.scope(Location::caller(), || {
            self.operands.iter().flat_map(|operand| &operand.classes).for_each(|map| self.kernel.prefetch_tensormap(map));
        });
    }

    /// Loads the windows of a piece of work, step by step: by one thread.
    #[track_caller]
    pub(crate) fn load(&self, work: &Work<'k>, waiting: &Cursor<'k>) {
        let (k, main) = (self.kernel, &self.spec.main);
        k.scope(Location::caller(), || {
            let first = [work.row * main.tile.m, work.column * main.tile.n];
            let windows = self.spec.windows();
            let bytes = windows.iter().map(Windows::loaded_bytes).sum::<u32>();
            k.range(work.steps, |step| {
                let depth = (work.first_step + step) * main.depth();
                let full = waiting.acquire(bytes);
                let mut to = self.windows.address() + waiting.stage() * self.spec.window_bytes();
                for (i, operand) in self.operands.iter().enumerate() {
                    let (along, line) = if main.majors[i] == Major::Depth { (depth, first[i]) } else { (first[i], depth) };
                    let at = [along.signed(), (line >> CLASSES.ilog2()).signed(), (work.batch * operand.batches).signed()];
                    for (class, map) in (0..).zip(&operand.classes) {
                        k.tma_load(to + class * windows[i].class_bytes(), map, &at, full, LoadOptions::default());
                    }
                    to = to + windows[i].bytes();
                }
                waiting.advance();
            });
        });
    }

    /// What a thread of the warps that align has of each step.
    #[track_caller]
    pub(crate) fn aligner(&self, stages: &Stages<'k>) -> Aligner<'k, '_> {
        let k = self.kernel;
        k.scope(Location::caller(), || {
            let warp = k.uniform(k.warp()) - 1;
            let warps = self.spec.lines() / LANES;
            let parts = (0..warps.div_ceil(ALIGNERS)).map(|turn| {
                let number = warp + turn * ALIGNERS;
                let exists = ((turn + 1) * ALIGNERS > warps).then(|| number.lt(warps));
                let number = if exists.is_some() { number.min(warps - 1) } else { number };
                self.part(stages, number, exists)
            });
            Aligner { source: self, parts: parts.collect() }
        })
    }

    /// Part `number` of a step: 32 lines of a tile, one a lane.
    fn part(&self, stages: &Stages<'k>, number: Val<'k, u32>, exists: Option<Val<'k, bool>>) -> Part<'k> {
        let (k, spec) = (self.kernel, &self.spec);
        let of_a = spec.main.tile.m / LANES;
        let is_b = number.ge(of_a);
        let of = |[a, b]: [u32; 2]| k.select(is_b, k.constant(b), k.constant(a));
        let windows = spec.windows();
        let number = number - of([0, of_a]);
        let (block, half) = (number >> 1, number & 1u32);
        // Eight lanes have a line of each class, at eight places in their classes.
        let class = k.lane() & (CLASSES - 1);
        let place = (half * (LANES / CLASSES) + (k.lane() >> CLASSES.ilog2()) + class) & (BLOCK / CLASSES - 1);
        let from = of([0, windows[0].bytes()])
            + class * of(windows.map(|windows| windows.class_bytes()))
            + place * of(windows.map(|windows| windows.line_bytes))
            + block * of(windows.map(|windows| windows.block_bytes));
        let slot = k.select(is_b, stages.slots[1].address(), stages.slots[0].address());
        let line = class + place * CLASSES;
        // Chunks of a line stand where their number and the line's, of eight, differ in.
        let to = slot + block * (BLOCK * ROW_BYTES) + line * ROW_BYTES + class * CHUNK_BYTES;
        let pitch = k.select(is_b, self.operands[1].pitch, self.operands[0].pitch);
        let element_bytes = spec.main.operand(Operand::A).ty.bytes();
        let shift_bytes = ((class * pitch) & (CHUNK_BYTES / element_bytes - 1)) * element_bytes;
        Part {
            exists,
            from,
            to,
            stage_bytes: of(stages.tiles.map(|tile| tile.bytes())),
            by_two_words: (shift_bytes & 8u32).ne(0),
            by_a_word: (shift_bytes & 4u32).ne(0),
            selector: (element_bytes == 2).then(|| (shift_bytes & 2u32) * 0x1111u32 + 0x3210u32),
        }
    }
}

/// A thread's line of 128 bytes.
struct Part<'k> {
    /// Where not every warp has such a line.
    exists: Option<Val<'k, bool>>,
    /// Where its window begins in a stage of windows, and its first chunk in the first stage of tiles.
    from: Val<'k, u32>,
    to: Val<'k, u32>,
    stage_bytes: Val<'k, u32>,
    /// Of how many words and bytes its elements stand behind the window's beginning.
    by_two_words: Val<'k, bool>,
    by_a_word: Val<'k, bool>,
    selector: Option<Val<'k, u32>>,
}

/// Moves lines into place.
pub(crate) struct Aligner<'k, 'r> {
    source: &'r Aligning<'k>,
    parts: Vec<Part<'k>>,
}

impl<'k> Aligner<'k, '_> {
    /// Aligns a piece of work, step by step: by all threads of the warps that align.
    #[track_caller]
    pub(crate) fn align(&self, work: &Work<'k>, waiting: &Cursor<'k>, cursor: &Cursor<'k>) {
        let k = self.source.kernel;
        k.scope(Location::caller(), || {
            k.range(work.steps, |_| {
                waiting.wait();
                let windows = self.source.windows.address() + waiting.stage() * self.source.spec.window_bytes();
                // The windows of the next part are on their way to registers while this one is moved.
                let mut next = self.parts.first().map(|part| self.window(part, windows));
                cursor.claim();
                for (number, part) in self.parts.iter().enumerate() {
                    let window = next.take();
                    next = self.parts.get(number + 1).map(|part| self.window(part, windows));
                    let words = window.map(|window| part.moved(k, window)).unwrap_or_default();
                    let to = part.to + cursor.stage() * part.stage_bytes;
                    match part.exists {
                        Some(exists) => k.when(exists, || write(k, to, &words)),
                        None => write(k, to, &words),
                    }
                }
                k.fence_proxy_async();
                k.warp_sync();
                cursor.fill(k.lane());
                waiting.release(waiting.stage(), k.lane());
                cursor.advance();
                waiting.advance();
            });
        });
    }

    /// The words of a part's window.
    fn window(&self, part: &Part<'k>, windows: Val<'k, u32>) -> Vec<Val<'k, u32>> {
        let chunks = ROW_BYTES / CHUNK_BYTES + 1;
        (0..chunks).flat_map(|chunk| self.source.kernel.ld_shared_vector(windows + part.from, i64::from(chunk * CHUNK_BYTES), 4)).collect()
    }
}

/// Writes the words of a line whose first chunk stands at `to`.
fn write<'k>(k: Kernel<'k>, to: Val<'k, u32>, words: &[Val<'k, u32>]) {
    for (chunk, words) in (0..).zip(words.chunks(4)) {
        k.st_shared_vector(to ^ (chunk * CHUNK_BYTES), 0, words);
    }
}

impl<'k> Part<'k> {
    /// The words of the line out of those of its window.
    fn moved(&self, k: Kernel<'k>, mut words: Vec<Val<'k, u32>>) -> Vec<Val<'k, u32>> {
        for (by, moves) in [(2, self.by_two_words), (1, self.by_a_word)] {
            words = (0..words.len() - by).map(|i| k.select(moves, words[i + by], words[i])).collect();
        }
        (0..(ROW_BYTES / 4) as usize).map(|i| self.selector.map_or(words[i], |selector| words[i].prmt(words[i + 1], selector))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hopper::spec::TileShape;
    use crate::hopper::sums::Keep;
    use verdigris_graph::Slot;
    use verdigris_tensor::DType;

    fn spec(m: u32, n: u32, majors: [Major; 2]) -> MainLoopSpec {
        let tile = TileShape::new(m, n, m / 64, 1, Operand::B);
        MainLoopSpec { tile, a: DType::Bf16, b: DType::Bf16, majors, terms: 1, stages: 2, keep: Keep::InPlace }
    }

    #[test]
    fn windows_and_tiles_fit_beside_each_other() {
        for majors in [[Major::Depth; 2], [Major::Rows; 2], [Major::Depth, Major::Rows]] {
            for (m, n, beside_bytes) in [(128, 128, 0), (128, 128, 32_768), (128, 64, 16_384), (64, 64, 8_192), (128, 192, 0)] {
                let fitted = AligningSpec::fitted(spec(m, n, majors), beside_bytes).expect("fits");
                let bytes = fitted.main.stages * (m + n) * ROW_BYTES + fitted.waiting * fitted.window_bytes();
                assert!(bytes + beside_bytes + 1024 <= SHARED_BYTES, "{fitted:?}");
                assert!(fitted.main.stages >= 2 && fitted.waiting >= 2, "{fitted:?}");
            }
            // Neither half panels nor boxes of more than 256 elements, and not without two stages of either.
            for (m, n, beside_bytes) in [(128, 96, 0), (128, 256, 0), (128, 128, 120_000)] {
                assert_eq!(AligningSpec::fitted(spec(m, n, majors), beside_bytes), None, "{m}x{n}");
            }
        }
    }

    #[test]
    fn windows_of_a_step_have_a_chunk_in_front() {
        let windows = |major| Windows::of(&OperandTile { rows: 128, ty: map_type(DType::F16), major });
        let [depth, rows] = [Major::Depth, Major::Rows].map(windows);
        assert_eq!([depth.loaded_bytes(), rows.loaded_bytes()], [128 * 144, 64 * 272]);
        // Eight lines of a class begin in eight different chunks of the banks, and classes in the same.
        assert!([depth, rows].iter().all(|windows| windows.line_bytes % 32 == 16 && windows.class_bytes() % 128 == 0));
    }

    #[test]
    fn matrices_whose_classes_of_lines_are_mapped() {
        let matrix = |dtype, row_stride, column_stride, batch_stride| Matrix {
            slot: Slot(0),
            dtype,
            row_stride,
            column_stride,
            batch_strides: vec![batch_stride],
        };
        for (operand, extents, taken) in [
            (matrix(DType::Bf16, 65, 1, 6504), [100, 65], true),
            (matrix(DType::F16, 1, 101, 0), [101, 8], true),
            (matrix(DType::Bf16, 64, 1, 6400), [100, 64], true),
            (matrix(DType::Bf16, 65, 1, 6501), [100, 65], false),
            (matrix(DType::Bf16, 65, 1, 0), [7, 65], false),
            (matrix(DType::Bf16, 0, 1, 0), [100, 65], false),
            (matrix(DType::Bf16, (1 << 36) - 1, 1, 0), [100, 65], true),
            (matrix(DType::Bf16, (1 << 36) + 1, 1, 0), [100, 65], false),
            (matrix(DType::Bf16, 65, 1, 1 << 39), [100, 65], false),
            (matrix(DType::Bf16, 130, 2, 0), [100, 65], false),
            (matrix(DType::F32, 65, 1, 6500), [100, 65], true),
            (matrix(DType::F32, 1, 101, 0), [101, 65], false),
            (matrix(DType::E4m3, 65, 1, 0), [100, 65], false),
        ] {
            assert_eq!(takes(&operand, extents), taken, "{operand:?}");
        }
    }
}
