//! The source of operands whose lines begin anywhere: matrices of 16 bits and of f32 whose lines are no multiple of 16 bytes apart, which no tensor
//! map takes as they lie; and of f32 along the rows, which the tensor cores do not take.
//!
//! **Every eighth line.** Lines of 16 bits that are eight apart (of f32, four) begin at the same place within 16 bytes, whatever their pitch. So eight
//! maps, one for each class of lines, map an operand exactly: each begins at the 16 bytes in which the first line of its class begins, and its lines
//! end where the operand's do, so that the end of the depth is filled with zeros and nothing beyond a matrix's last element is read. By them the
//! warps that load bring *windows* into a ring of its own: the pieces of lines that a step multiplies, with what lies in front of them in 16 bytes.
//!
//! **Into place.** [`ALIGNERS`] warps read the windows, move each line's elements to its beginning, and write them to the stages of the main loop
//! under their swizzle. In which 16 bytes of the banks a line's window begins is settled by its place in its class, and where it is written by
//! its number among eight: eight lanes take lines that differ in both, so that neither reads nor writes wait for each other.
//! Lines along the rows of an operand that is to lie along the depth are **transposed**: 32 lanes read neighbouring elements of a line, word by word, wherever
//! it begins, and each writes what it has read of 16 lines as the depth of its row. Nothing has to be moved within words.
//!
//! **Straight.** An operand that a map takes as it lies goes to its stage at once, while the other one is aligned: the stage is full when its bytes have
//! arrived and the aligners have.
//!
//! **Cost.** An operand passes shared memory three times, where by [`super::tiled`] it does once: the windows in and out, and the tiles in. Of 128×128
//! that is 1216 cycles of a step beside 512 of products (928 where one operand goes straight), so products by copies are faster where there are enough
//! of them to pay for the copies. On an H200 a step of 128×128 took 0.9 µs of lines along the rows and 1.25 along the depth, which fits a time of TMA's for
//! each 128 bytes of L2 that a line of a window touches: short lines touch more of them for what they bring.
//!
//! Lines are counted from the beginning of their matrix. So the matrices of a batch are a multiple of 16 bytes apart, and the operand's address is a
//! multiple of 16: lines begin anywhere, operands do not.

use std::panic::Location;

use verdigris_graph::{Matrix, Order};
use verdigris_kir::face::{Kernel, LoadOptions, Role, SharedPiece, TensorMap, Val};
use verdigris_kir::ir::{Access, MapDecl, Swizzle};
use verdigris_kir::params::Map;
use verdigris_kir::program::{Address, MapSpec};
use verdigris_kir::tile::clip::{Clip, ClipArgs, ClippedTile};
use verdigris_kir::tile::operand::{Major, OperandTile, ROW_BYTES};
use verdigris_kir::tile::ring::{Cursor, Ring, RingScope};
use verdigris_kir::tile::schedule::Work;

use super::spec::{MainLoopSpec, Operand};
use super::stages::Stages;
use super::tiled::{TiledArgs, matrix_map};
use super::{SHARED_BYTES, WARPGROUP};
use crate::fuse::formats::map_type;

/// Warpgroups of producers: of one, what is left beside the warps that load would take longer to align a step than the tensor cores and shared memory
/// need for it.
pub(crate) const PRODUCERS: u32 = 2;
/// Warps that load: one each operand. A step of sixteen loads by one thread would take as long as all the rest of it.
const LOADERS: u32 = 2;
/// Warps that align: the others of the producers' warpgroups.
const ALIGNERS: u32 = 4 * PRODUCERS - LOADERS;
const CHUNK_BYTES: u32 = 16;
/// Lines of 128 bytes of a tile that make a block: a panel, or as many rows along the depth.
const BLOCK: u32 = 64;
/// Those of a warp.
const LANES: u32 = 32;
/// Lines of a tile after which the swizzle repeats.
const OCTET: u32 = 8;
/// What a thread takes of a line at once: half of it, so that the warps have more equal shares.
const PIECE_BYTES: u32 = ROW_BYTES / 2;
/// Shared memory of a ring's stage beside its bytes: barriers, and room to align.
const BESIDE_STAGE: u32 = 16 + 128;
/// Bytes that pass shared memory while TMA brings what lies in one line of L2 of windows: three and a half cycles of an SM, by the steps of
/// `bench/record/h200/2026-11-29-lines-second-configs.jsonl` (0.9 to 1.25 us of 128x128).
const REQUEST_BYTES: u32 = 448;
/// The most stages of either ring: three turns of windows are on their way from memory while one is aligned.
const MOST_STAGES: u32 = 4;
/// The same where an operand goes straight: it needs a stage from its load on, not only from when the other has been aligned.
const MOST_STAGES_STRAIGHT: [u32; 2] = [6, 3];

/// How an operand comes to its stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Way {
    /// By a tensor map, as it lies.
    Straight,
    /// Its lines are moved into place.
    Moved,
    /// Its lines run along the rows, and are transposed.
    Transposed,
}

impl Way {
    /// Of an operand of `rows` by `depth`, which a tensor map takes as it lies or does not; `None` where there is no way.
    pub(crate) fn of(operand: &Matrix, [rows, depth]: [u32; 2], is_mapped: bool) -> Option<Way> {
        match operand.order() {
            _ if is_mapped => Some(Way::Straight),
            _ if !has_windows(operand, [rows, depth]) => None,
            // The tensor cores take no f32 along the rows.
            Order::ColumnMajor if operand.dtype.bytes() == 4 => Some(Way::Transposed),
            _ => Some(Way::Moved),
        }
    }

    /// What is contiguous in the stages, of an operand whose lines run along `lines`.
    pub(crate) fn arrives(self, lines: Major) -> Major {
        if self == Way::Transposed { Major::Depth } else { lines }
    }

    /// In a kernel's name.
    pub(crate) fn letter(self) -> char {
        match self {
            Way::Straight => 's',
            Way::Moved => 'm',
            Way::Transposed => 't',
        }
    }
}

/// What shapes a main loop of such operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct AligningSpec {
    pub(crate) main: MainLoopSpec,
    pub(crate) ways: [Way; 2],
    /// Stages of the ring of windows.
    pub(crate) waiting: u32,
}

/// The windows of an operand in a stage: class by class, and in each line by line.
#[derive(Clone, Copy)]
struct Windows {
    /// Lines after which one begins at the same place within 16 bytes.
    classes: u32,
    /// What the lines run along.
    along: Major,
    lines_of_class: u32,
    line_bytes: u32,
    /// From one block of the tile to the next: further lines of each class, or further along its lines.
    block_bytes: u32,
}

impl Windows {
    fn of(tile: &OperandTile, way: Way) -> Windows {
        let classes = CHUNK_BYTES / tile.ty.bytes();
        let along = if way == Way::Transposed { Major::Rows } else { tile.major };
        match along {
            Major::Depth => {
                let line_bytes = ROW_BYTES + CHUNK_BYTES;
                Windows { classes, along, lines_of_class: tile.rows / classes, line_bytes, block_bytes: BLOCK / classes * line_bytes }
            }
            Major::Rows => {
                let line_bytes = tile.rows * tile.ty.bytes() + CHUNK_BYTES;
                Windows { classes, along, lines_of_class: tile.depth() / classes, line_bytes, block_bytes: ROW_BYTES }
            }
        }
    }

    fn loaded_bytes(&self) -> u32 {
        self.classes * self.lines_of_class * self.line_bytes
    }

    /// Lines of 128 bytes of L2 that a step's loads touch: each line of a window begins anywhere in one.
    fn requests(&self) -> u32 {
        self.classes * self.lines_of_class * ((self.line_bytes - CHUNK_BYTES).div_ceil(ROW_BYTES) + 1)
    }

    /// Loads begin at multiples of 128 bytes.
    fn class_bytes(&self) -> u32 {
        (self.lines_of_class * self.line_bytes).next_multiple_of(128)
    }

    fn bytes(&self) -> u32 {
        self.classes * self.class_bytes()
    }
}

/// Whether windows of an operand of `rows` by `depth` can be loaded.
fn has_windows(operand: &Matrix, [rows, depth]: [u32; 2]) -> bool {
    let bytes = operand.dtype.bytes() as u64;
    let lines = match operand.order() {
        Order::RowMajor => rows,
        Order::ColumnMajor => depth,
        Order::Strided => 0,
    };
    let chunk = u64::from(CHUNK_BYTES);
    // What a map takes for a stride.
    let is_near = |stride: u64, times: u64| stride.checked_mul(times * bytes).is_some_and(|stride| stride < 1 << 40);
    matches!(bytes, 2 | 4)
        && operand.leading_dimension().is_some_and(|leading| leading != 0 && is_near(leading, chunk / bytes))
        && operand.batch_strides.iter().all(|&stride| is_near(stride, 1) && (stride * bytes).is_multiple_of(chunk))
        && u64::from(lines) >= chunk / bytes
}

impl AligningSpec {
    /// With as many stages as shared memory holds beside `beside_bytes`; nothing where that is less than two of either ring, or the tile is not
    /// made of whole blocks that one CTA loads.
    pub(crate) fn fitted(main: MainLoopSpec, ways: [Way; 2], beside_bytes: u32) -> Option<AligningSpec> {
        let tile = &main.tile;
        // Registers are shared out to two warpgroups of consumers at most.
        let whole = tile.peers() == 1
            && tile.consumers <= 2
            && tile.m.is_multiple_of(BLOCK)
            && tile.n.is_multiple_of(BLOCK)
            && tile.m.max(tile.n) <= 192;
        let plain = main.terms == 1 && !main.promotes() && !tile.ping_pong && main.a == main.b && matches!(main.a.bytes(), 2 | 4);
        if !whole || !plain || ways == [Way::Straight; 2] {
            return None;
        }
        let [most_stages, most_waiting] = if ways.contains(&Way::Straight) { MOST_STAGES_STRAIGHT } else { [MOST_STAGES; 2] };
        let of_windows = AligningSpec { main, ways, waiting: 1 }.window_bytes() + BESIDE_STAGE;
        let of_tiles = (tile.m + tile.n) * ROW_BYTES + BESIDE_STAGE;
        let room = SHARED_BYTES.checked_sub(beside_bytes + 2 * of_tiles)?;
        let waiting = (room / of_windows).min(most_waiting);
        let main = main.fitted(beside_bytes + waiting * of_windows, BESIDE_STAGE)?;
        let main = MainLoopSpec { stages: main.stages.min(most_stages), ..main };
        (waiting >= 2).then_some(AligningSpec { main, ways, waiting })
    }

    fn way(&self, operand: Operand) -> Way {
        self.ways[operand as usize]
    }

    /// Of the operands that come by windows.
    fn windows(&self, operand: Operand) -> Option<Windows> {
        (self.way(operand) != Way::Straight).then(|| Windows::of(&self.main.operand(operand), self.way(operand)))
    }

    /// Bytes of the windows in a stage.
    fn window_bytes(&self) -> u32 {
        BOTH.iter().filter_map(|&operand| self.windows(operand)).map(|windows| windows.bytes()).sum()
    }

    /// Parts of a step: 32 lines of an operand's tile, of each a piece.
    fn parts(&self, operand: Operand) -> u32 {
        if self.way(operand) == Way::Straight { 0 } else { self.main.tile.extent(operand) / LANES * (ROW_BYTES / PIECE_BYTES) }
    }

    /// Who fills a stage together: those who align, and who loads the operand that goes straight.
    pub(crate) fn fillers(&self) -> u32 {
        ALIGNERS + u32::from(self.ways.contains(&Way::Straight))
    }

    /// Registers of a thread of the producers, and of a consumer's.
    pub(crate) fn registers(&self) -> [u32; 2] {
        if self.main.tile.consumers == 1 { [120, 232] } else { [104, 152] }
    }

    /// Threads of a CTA.
    pub(crate) fn threads(&self) -> u32 {
        self.main.tile.threads() + WARPGROUP * (PRODUCERS - 1)
    }

    /// Of a step: bytes that are loaded, bytes that pass shared memory beside the tensor cores' reads, and instructions of warps.
    pub(crate) fn step(&self) -> AligningStep {
        let tiles = BOTH.map(|operand| f64::from(self.main.tile.extent(operand) * ROW_BYTES));
        let windows = BOTH.map(|operand| self.windows(operand).map(|windows| f64::from(windows.loaded_bytes())));
        let loaded = [0, 1].map(|i| windows[i].unwrap_or(tiles[i]));
        let through = windows.iter().flatten().sum::<f64>();
        let requests = BOTH.map(|operand| self.windows(operand).map_or(0, |windows| windows.requests()));
        let requested = f64::from(requests.iter().sum::<u32>() * REQUEST_BYTES);
        // Of a part: loads and stores with their addresses, and of words that are moved three instructions each.
        let issued = BOTH.map(|operand| match self.way(operand) {
            Way::Straight => 0.0,
            Way::Moved => 5.0 + 8.0 + 51.0 + 8.0,
            Way::Transposed => 16.0 + 8.0 + 8.0,
        });
        // As many as the warp that has the most parts: the others wait for it.
        let parts = BOTH.map(|operand| self.parts(operand));
        let mean = [0, 1].map(|i| f64::from(parts[i]) * issued[i]).iter().sum::<f64>() / f64::from(parts[0] + parts[1]);
        let longest = f64::from((parts[0] + parts[1]).div_ceil(ALIGNERS));
        let passed = (2.0 * through + tiles.iter().sum::<f64>()).max(requested);
        AligningStep { loaded, passed, issued: longest * mean * f64::from(ALIGNERS) }
    }

    fn lines(&self, operand: Operand) -> Option<LinesOf> {
        let windows = self.windows(operand)?;
        let ty = self.main.operand(operand).ty;
        let box_dims = vec![windows.line_bytes / ty.bytes(), windows.lines_of_class, 1];
        let map = MapDecl { ty, rank: 3, box_dims, im2col: false, swizzle: Swizzle::None, access: Access::Read };
        Some(LinesOf { classes: windows.classes, map })
    }

    fn straight(&self, operand: Operand) -> Option<ClippedTile> {
        (self.way(operand) == Way::Straight).then(|| self.main.clipped(operand))
    }

    /// What a launch gives for operands of so many rows and so much depth, of `batch` matrices; `tiled` is how a map takes each, if one does.
    pub(crate) fn arguments(&self, tiled: TiledArgs, matrices: [&Matrix; 2], rows: [u32; 2], depth: u32, batch: u32) -> AligningArgs {
        let TiledArgs { a, b, a_batches, b_batches, a_clip, b_clip, .. } = tiled;
        let source = |operand: Operand, (place, map), batches, clip| {
            let extents = [rows[operand as usize], depth, batch];
            let lines = self.lines(operand).map(|lines| lines.arguments(place, matrices[operand as usize], extents));
            SourceArgs { lines, straight: self.straight(operand).map(|_| StraightArgs { map: (place, map), batches, clip }) }
        };
        AligningArgs { a: source(Operand::A, a, a_batches, a_clip), b: source(Operand::B, b, b_batches, b_clip) }
    }
}

const BOTH: [Operand; 2] = [Operand::A, Operand::B];

/// What a step asks beside its products.
pub(crate) struct AligningStep {
    pub(crate) loaded: [f64; 2],
    pub(crate) passed: f64,
    pub(crate) issued: f64,
}

/// The windows' maps of an operand.
#[derive(Clone)]
pub(crate) struct LinesOf {
    classes: u32,
    map: MapDecl,
}

impl LinesOf {
    /// What a launch gives for an operand of `rows` by `depth` and `batch` at `place`.
    fn arguments(&self, place: Address, matrix: &Matrix, [rows, depth, batch]: [u32; 3]) -> LinesArgs {
        debug_assert_eq!(map_type(matrix.dtype), self.map.ty);
        let (lines, length) = if matrix.order() == Order::RowMajor { (rows, depth) } else { (depth, rows) };
        let pitch = matrix.leading_dimension().unwrap_or(1);
        let (bytes, chunk) = (matrix.dtype.bytes() as u64, u64::from(self.classes));
        let strides_bytes = match matrix.batch_strides.first().copied().unwrap_or(0) {
            0 => [chunk * pitch * bytes; 2],
            stride => [chunk * pitch * bytes, stride * bytes],
        };
        let batches = u32::from(matrix.batch_strides.first().is_some_and(|&stride| stride != 0));
        let map = |class: u32| {
            let begins = u64::from(class) * pitch;
            let shift = begins % chunk;
            let count = (lines - class).div_ceil(self.classes);
            let dims = [shift + u64::from(length), u64::from(count), u64::from(if batches == 1 { batch } else { 1 })];
            let at = Address { offset_bytes: place.offset_bytes + (begins - shift) * bytes, ..place };
            (at, matrix_map(self.map.clone(), dims, strides_bytes)) as (Address, MapSpec)
        };
        LinesArgs { classes: (0..self.classes).map(map).collect(), pitch: (pitch % chunk) as u32, batches }
    }
}

verdigris_kir::parameters! {
    /// An operand's lines.
    pub(crate) struct LinesValues / LinesArgs of LinesOf as lines {
        classes: Vec<Map> = vec![lines.map.clone(); lines.classes as usize],
        /// Elements from a line to the next, of those of 16 bytes.
        pitch: u32,
        /// 1 for an operand with a matrix for each of the batch, 0 for one that all share.
        batches: u32,
    }
}

verdigris_kir::parameters! {
    /// An operand that goes straight to its stage.
    pub(crate) struct StraightValues / StraightArgs of ClippedTile as tile {
        map: Map = tile.map(),
        batches: u32,
        clip: ClipArgs = (),
    }
}

/// An operand of which it is declared.
pub(crate) struct SourceOf {
    spec: AligningSpec,
    operand: Operand,
}

verdigris_kir::parameters! {
    /// An operand, as it is loaded.
    pub(crate) struct SourceValues / SourceArgs of SourceOf as source {
        lines: Option<LinesArgs> = source.spec.lines(source.operand),
        straight: Option<StraightArgs> = source.spec.straight(source.operand),
    }
}

verdigris_kir::parameters! {
    /// Where the operands are.
    pub(crate) struct AligningValues / AligningArgs of AligningSpec as spec {
        a: SourceArgs = SourceOf { spec: *spec, operand: Operand::A },
        b: SourceArgs = SourceOf { spec: *spec, operand: Operand::B },
    }
}

/// How an operand is loaded.
enum Source<'k> {
    Lines(Lines<'k>),
    Straight(Straight<'k>),
}

/// An operand that comes by windows.
struct Lines<'k> {
    windows: Windows,
    /// Where its windows begin in a stage of them.
    begins: u32,
    values: LinesValues<'k>,
}

/// One that goes straight.
struct Straight<'k> {
    map: TensorMap<'k>,
    batches: Val<'k, u32>,
    clip: Clip<'k>,
}

/// The operands in memory, and their windows in shared memory.
pub(crate) struct Aligning<'k> {
    kernel: Kernel<'k>,
    spec: AligningSpec,
    /// Of A and of B.
    sources: Vec<Source<'k>>,
    windows: SharedPiece<'k>,
    pub(crate) waiting: Ring<'k>,
}

/// The roles of the producers: the warps that load A and B, and those that align.
pub(crate) fn roles<'b>(load_a: &'b dyn Fn(), load_b: &'b dyn Fn(), align: &'b dyn Fn()) -> [Role<'b>; 1 + LOADERS as usize] {
    let role = |name, warps, body| Role { name, warps, registers: None, body };
    [role("load a", 1, load_a), role("load b", 1, load_b), role("align", ALIGNERS, align)]
}

impl<'k> Aligning<'k> {
    /// Declares the shared memory of the windows.
    #[track_caller]
    pub(crate) fn new(k: Kernel<'k>, spec: AligningSpec, values: AligningValues<'k>) -> Self {
        let AligningValues { a, b } = values;
        let mut begins = 0;
        let mut sources = Vec::new();
        for (operand, SourceValues { lines, straight }) in BOTH.into_iter().zip([a, b]) {
            if let Some((values, windows)) = lines.zip(spec.windows(operand)) {
                sources.push(Source::Lines(Lines { windows, begins, values }));
                begins += windows.bytes();
            }
            sources.extend(straight.map(|StraightValues { map, batches, clip }| {
                Source::Straight(Straight { map, batches, clip: Clip::new(spec.main.clipped(operand), clip) })
            }));
        }
        let windows = k.shared("windows", spec.waiting * spec.window_bytes(), 128);
        let loaders = spec.ways.iter().filter(|&&way| way != Way::Straight).count() as u32;
        let waiting = k.scope(Location::caller(), || Ring::filled_by(k, spec.waiting, loaders, ALIGNERS, RingScope::Cta));
        Aligning { kernel: k, spec, sources, windows, waiting }
    }

    /// Before the roles begin: clears what no load will write, and brings each operand's tensor maps near, by the warp that will load it. By all
    /// threads, in front of a barrier.
    #[track_caller]
    pub(crate) fn begin(&self, stages: &Stages<'k>) {
        let (k, main) = (self.kernel, &self.spec.main);
        k.scope(Location::caller(), || {
            for operand in BOTH {
                k.when(k.thread().eq(LANES * operand as u32), || match &self.sources[operand as usize] {
                    Source::Lines(lines) => lines.values.classes.iter().for_each(|map| k.prefetch_tensormap(map)),
                    Source::Straight(straight) => k.prefetch_tensormap(&straight.map),
                });
                if let Source::Straight(Straight { clip, .. }) = &self.sources[operand as usize] {
                    clip.clear(stages.slots[operand as usize].address(), main.stages, k.thread(), self.spec.threads());
                }
            }
        });
    }

    /// Where the warp that loads an operand begins: in the ring of the windows, or that of the stages.
    #[track_caller]
    pub(crate) fn cursor(&self, operand: Operand, stages: &Stages<'k>) -> Cursor<'k> {
        self.kernel.scope(Location::caller(), || match self.sources[operand as usize] {
            Source::Lines(_) => self.waiting.cursor(),
            Source::Straight(_) => stages.ring.cursor(),
        })
    }

    /// Loads an operand's part of a piece of work, step by step: by one thread.
    #[track_caller]
    pub(crate) fn load(&self, operand: Operand, work: &Work<'k>, cursor: &Cursor<'k>, stages: &Stages<'k>) {
        let (k, main, i) = (self.kernel, &self.spec.main, operand as usize);
        k.scope(Location::caller(), || {
            let first = [work.row, work.column][i] * main.tile.extent(operand);
            let depth = |step| (work.first_step + step) * main.depth();
            match &self.sources[i] {
                Source::Lines(Lines { windows, begins, values }) => k.range(work.steps, |step| {
                    let full = cursor.acquire(windows.loaded_bytes());
                    let to = self.windows.address() + cursor.stage() * self.spec.window_bytes();
                    let (along, line) = if windows.along == Major::Depth { (depth(step), first) } else { (first, depth(step)) };
                    let at = [along.signed(), (line >> windows.classes.ilog2()).signed(), (work.batch * values.batches).signed()];
                    for (class, map) in (0..).zip(&values.classes) {
                        k.tma_load(to + (*begins + class * windows.class_bytes()), map, &at, full, LoadOptions::default());
                    }
                    cursor.advance();
                }),
                Source::Straight(Straight { map, batches, clip }) => {
                    let rows = clip.rows(first);
                    let bytes = clip.bytes(rows);
                    k.range(work.steps, |step| {
                        let full = cursor.acquire(bytes);
                        let to = stages.slots[i].address() + cursor.stage() * stages.tiles[i].bytes();
                        let (begins, options) = (k.constant(0), LoadOptions::default());
                        clip.load(to, begins, rows, map, first, depth(step), work.batch * *batches, full, options);
                        cursor.advance();
                    });
                }
            }
        });
    }

    /// What a thread of the warps that align has of each step.
    #[track_caller]
    pub(crate) fn aligner(&self, stages: &Stages<'k>) -> Aligner<'k, '_> {
        let k = self.kernel;
        k.scope(Location::caller(), || {
            let warp = k.uniform(k.warp()) - LOADERS;
            let mut parts = Vec::new();
            // Who has one part more of an operand has one less of the next.
            let mut before = 0;
            for operand in BOTH {
                let Source::Lines(lines) = &self.sources[operand as usize] else { continue };
                let count = self.spec.parts(operand);
                let own = match before % ALIGNERS {
                    0 => warp,
                    more => k.select(warp.lt(more), warp + (ALIGNERS - more), warp - more),
                };
                parts.extend((0..count.div_ceil(ALIGNERS)).map(|turn| {
                    let number = own + turn * ALIGNERS;
                    let exists = ((turn + 1) * ALIGNERS > count).then(|| number.lt(count));
                    self.part(stages, operand, lines, number, exists)
                }));
                before += count;
            }
            Aligner { source: self, parts }
        })
    }

    /// Part `number` of an operand's step: 32 lines of its tile, one a lane, of each a piece.
    fn part(
        &self,
        stages: &Stages<'k>,
        operand: Operand,
        lines: &Lines<'k>,
        number: Val<'k, u32>,
        exists: Option<Val<'k, bool>>,
    ) -> Part<'k> {
        let (k, windows, pitch) = (self.kernel, &lines.windows, lines.values.pitch);
        let tile = &stages.tiles[operand as usize];
        let (slot, element_bytes) = (stages.slots[operand as usize].address(), tile.ty.bytes());
        let (group, piece) = (number >> 1, number & 1u32);
        let octet_line = k.lane() & (OCTET - 1);
        let shift_bytes = |class: Val<'k, u32>| ((class * pitch) & (windows.classes - 1)) * element_bytes;
        let (line, from, moves) = match self.spec.way(operand) {
            Way::Transposed => {
                let line = group * LANES + k.lane();
                let from = line * element_bytes + piece * (PIECE_BYTES / element_bytes / windows.classes * windows.line_bytes);
                (line, from, Moves::Across((0..windows.classes).map(|class| shift_bytes(k.constant(class))).collect()))
            }
            _ => {
                let (block, half) = (group >> 1, group & 1u32);
                // Eight lanes have eight lines under the swizzle, at eight places of the banks in their classes.
                let class = octet_line & (windows.classes - 1);
                let octet = (half * (LANES / OCTET) + (k.lane() >> OCTET.ilog2()) + class) & (BLOCK / OCTET - 1);
                let place = octet * (OCTET / windows.classes) + (octet_line >> windows.classes.ilog2());
                let from = class * windows.class_bytes() + place * windows.line_bytes + block * windows.block_bytes + piece * PIECE_BYTES;
                let shift_bytes = shift_bytes(class);
                let moves = Moves::Along {
                    by_two_words: (shift_bytes & 8u32).ne(0),
                    by_a_word: (shift_bytes & 4u32).ne(0),
                    selector: (element_bytes == 2).then(|| (shift_bytes & 2u32) * 0x1111u32 + 0x3210u32),
                };
                (block * BLOCK + octet * OCTET + octet_line, from, moves)
            }
        };
        // Chunks of a line stand where their number and the line's, of eight, differ in.
        let to = slot + line * ROW_BYTES + (octet_line ^ (piece * (PIECE_BYTES / CHUNK_BYTES))) * CHUNK_BYTES;
        Part { exists, from: from + lines.begins, to, stage_bytes: tile.bytes(), windows: *windows, moves }
    }
}

/// A thread's piece of a line of 128 bytes.
struct Part<'k> {
    /// Where not every warp has such a piece.
    exists: Option<Val<'k, bool>>,
    /// Where its window begins in a stage of windows, and its first chunk in the first stage of tiles.
    from: Val<'k, u32>,
    to: Val<'k, u32>,
    stage_bytes: u32,
    windows: Windows,
    moves: Moves<'k>,
}

/// How a thread gets its piece.
enum Moves<'k> {
    /// From one window, whose elements stand so many words and bytes behind its beginning.
    Along { by_two_words: Val<'k, bool>, by_a_word: Val<'k, bool>, selector: Option<Val<'k, u32>> },
    /// Word by word across windows, whose elements stand so many bytes behind their beginnings, class by class.
    Across(Vec<Val<'k, u32>>),
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
                let (every, some): (Vec<&Part<'k>>, Vec<&Part<'k>>) = self.parts.iter().partition(|part| part.exists.is_none());
                // The windows of the next part are on their way to registers while this one is moved.
                let mut next = every.first().map(|part| part.read(k, windows));
                cursor.claim();
                let write = |part: &Part<'k>, window| {
                    let to = part.to + cursor.stage() * part.stage_bytes;
                    for (chunk, words) in (0..).zip(part.moved(k, window).chunks(4)) {
                        k.st_shared_vector(to ^ (chunk * CHUNK_BYTES), 0, words);
                    }
                };
                for (number, part) in every.iter().enumerate() {
                    let window = next.take().unwrap_or_default();
                    next = every.get(number + 1).map(|part| part.read(k, windows));
                    write(part, window);
                }
                for (part, exists) in some.iter().filter_map(|part| Some((part, part.exists?))) {
                    k.when(exists, || write(part, part.read(k, windows)));
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
}

impl<'k> Part<'k> {
    /// The words that it reads of a stage of windows.
    fn read(&self, k: Kernel<'k>, windows: Val<'k, u32>) -> Vec<Val<'k, u32>> {
        let from = windows + self.from;
        match &self.moves {
            Moves::Along { .. } => {
                let chunks = PIECE_BYTES / CHUNK_BYTES + 1;
                (0..chunks).flat_map(|chunk| k.ld_shared_vector(from, i64::from(chunk * CHUNK_BYTES), 4)).collect()
            }
            Moves::Across(shifts) => {
                let from: Vec<Val<'k, u32>> = shifts.iter().map(|&shift| from + shift).collect();
                let Windows { classes, line_bytes, .. } = self.windows;
                let offset = |line: u32| i64::from(line % classes * self.windows.class_bytes() + line / classes * line_bytes);
                (0..PIECE_BYTES / 4).map(|line| k.ld_shared(from[(line % classes) as usize], offset(line))).collect()
            }
        }
    }

    /// The words of the piece out of those that were read.
    fn moved(&self, k: Kernel<'k>, mut words: Vec<Val<'k, u32>>) -> Vec<Val<'k, u32>> {
        let Moves::Along { by_two_words, by_a_word, selector } = self.moves else { return words };
        for (by, moves) in [(2, by_two_words), (1, by_a_word)] {
            words = (0..words.len() - by).map(|i| k.select(moves, words[i + by], words[i])).collect();
        }
        (0..(PIECE_BYTES / 4) as usize).map(|i| selector.map_or(words[i], |selector| words[i].prmt(words[i + 1], selector))).collect()
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
        let (moved, straight) = ([Way::Moved; 2], [Way::Straight, Way::Moved]);
        for (majors, ways) in [([Major::Depth; 2], moved), ([Major::Rows; 2], moved), ([Major::Depth, Major::Rows], straight)] {
            for (m, n, beside_bytes) in [(128, 128, 0), (128, 128, 32_768), (128, 64, 16_384), (64, 64, 8_192), (128, 192, 0)] {
                let fitted = AligningSpec::fitted(spec(m, n, majors), ways, beside_bytes).expect("fits");
                let bytes = fitted.main.stages * (m + n) * ROW_BYTES + fitted.waiting * fitted.window_bytes();
                assert!(bytes + beside_bytes + 1024 <= SHARED_BYTES, "{fitted:?}");
                assert!(fitted.main.stages >= 2 && fitted.waiting >= 2, "{fitted:?}");
            }
            assert_eq!(AligningSpec::fitted(spec(128, 128, majors), [Way::Straight; 2], 0), None, "nothing is to be aligned");
            // Neither half panels nor boxes of more than 256 elements, and not without two stages of either.
            for (m, n, beside_bytes) in [(128, 96, 0), (128, 256, 0), (128, 128, 120_000)] {
                assert_eq!(AligningSpec::fitted(spec(m, n, majors), moved, beside_bytes), None, "{m}x{n}");
            }
        }
    }

    #[test]
    fn windows_of_a_step_have_a_chunk_in_front() {
        let windows = |dtype, major, way| Windows::of(&OperandTile { rows: 128, ty: map_type(dtype), major }, way);
        let depth = [DType::F16, DType::F32].map(|dtype| windows(dtype, Major::Depth, Way::Moved));
        let (rows, transposed) = (windows(DType::F16, Major::Rows, Way::Moved), windows(DType::F32, Major::Depth, Way::Transposed));
        assert_eq!(depth.map(|windows| windows.loaded_bytes()), [128 * 144; 2]);
        assert_eq!([rows.loaded_bytes(), transposed.loaded_bytes()], [64 * 272, 32 * 528]);
        assert_eq!([depth[0], depth[1], rows, transposed].map(|windows| windows.classes), [8, 4, 8, 4]);
        // Lines of a class that follow each other begin in eight different chunks of the banks, and classes in the same.
        let moved = [depth[0], depth[1], rows];
        assert!(moved.iter().all(|windows| windows.line_bytes % 32 == 16 && windows.class_bytes() % 128 == 0));
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
            (matrix(DType::F32, 1, 101, 0), [101, 65], true),
            (matrix(DType::F32, 65, 1, 0), [4, 65], true),
            (matrix(DType::F32, 65, 1, 0), [3, 65], false),
            (matrix(DType::E4m3, 65, 1, 0), [100, 65], false),
        ] {
            assert_eq!(has_windows(&operand, extents), taken, "{operand:?}");
        }
    }
}
