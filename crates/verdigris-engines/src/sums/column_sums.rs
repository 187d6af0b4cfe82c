//! Sums and sums of squares of a result's columns, formed in the epilogue: what batch norm needs of a convolution, without reading it
//! again.
//!
//! **What.** `sum[c] = Σ v`, `squares[c] = Σ v²` over the rows of the result, of its values as they are stored, in f32.
//! **How.** Results pass through stages of shared memory as they are stored. Each thread reads back the 16 bytes of a chunk from some rows
//! of every stage and adds them up; the threads that hold the same chunk share the sums out among them, so that what is kept from stage to
//! stage is a few registers. Behind the last stage of a tile the first warp adds what the warpgroup's other warps hold, and stores a
//! *part*: the sums of the rows that this warpgroup held. One more launch adds the parts of each column up, or two, where they are many.
//! **Numbers.** The order of addition follows from the spec and the extents alone, so repeats agree bit for bit. An infinity or a NaN in a
//! column reaches the sums of that column and no other.
//! **Cost.** A few instructions an element, and 8 bytes a column for each part: at most a sixteenth of a 16-bit result.
//!
//! **Scratch.** Lines of parts, one for the rows of each warpgroup: the sums of all columns, then their squares' sums. Columns stand as
//! tiles hold them, those of one matrix of the batch behind those of the one before.
//!
//! Kernels whose results leave otherwise form no sums; [`of_lines`] forms the same of a result that lies in memory, which it reads again.

use verdigris_kir::face::{Header, Kernel, Val, Var, build};
use verdigris_kir::inst::Cache;
use verdigris_kir::ir::Target;
use verdigris_kir::params::{Divide, Read, Write};
use verdigris_kir::program::{Address, KernelRef, Launch, Program};
use verdigris_kir::tile::staging::STAGE_ROWS;
use verdigris_tensor::DType;

use crate::cost::{Stream, Traffic};
use crate::fuse::compute;

/// Threads of a warpgroup.
const WARPGROUP: u32 = 128;
/// Lanes of a warp.
const LANES: u32 = 32;
/// Warps of a CTA of the adding launch; each takes parts in strides of the warps.
const WARPS: u32 = 32;
/// Parts that are on their way at a time.
const UNROLL: u32 = 4;
/// Parts that one CTA adds up; more are cut into shares.
const SHARE: u32 = 1024;
/// What a thread reads of a stage at once.
const CHUNK_BYTES: u32 = 16;

/// Whether sums can be formed of a result of this type as it leaves.
pub(crate) fn takes(stored: DType) -> bool {
    matches!(stored, DType::Bf16 | DType::F16 | DType::F32)
}

/// What shapes code of the sums of a tile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SumsSpec {
    /// The type in which results are stored.
    pub(crate) stored: DType,
    /// Columns of a tile.
    pub(crate) tile_columns: u32,
    /// Bytes of a stage's row.
    pub(crate) row_bytes: u32,
}

impl SumsSpec {
    fn columns_of_chunk(self) -> u32 {
        CHUNK_BYTES / self.stored.bytes() as u32
    }

    fn chunks_of_row(self) -> u32 {
        self.row_bytes / CHUNK_BYTES
    }

    fn stages(self) -> u32 {
        (self.tile_columns * self.stored.bytes() as u32).div_ceil(self.row_bytes)
    }

    /// Values that a thread keeps of each stage: sums and squares of a chunk's columns, shared out among the lanes of a warp that hold it.
    fn kept(self) -> u32 {
        2 * self.columns_of_chunk() * self.chunks_of_row() / LANES
    }
}

verdigris_kir::parameters! {
    /// The parameters of a kernel that forms sums.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct ColumnSumsValues / #[derive(Clone, Copy, Debug)] ColumnSumsArgs of () as _spec {
        sums_parts: Write = 16,
        /// Columns of all matrices, and of one, as tiles hold them.
        sums_width: u32,
        sums_pitch: u32,
    }
}

/// The parameters of a kernel that forms sums, and what follows from its threads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ColumnSums<'k> {
    kernel: Kernel<'k>,
    spec: SumsSpec,
    values: ColumnSumsValues<'k>,
}

/// A tile's sums while it leaves: of each stage, the values that this thread keeps.
pub(crate) struct TileSums<'s, 'k> {
    sums: &'s ColumnSums<'k>,
    thread: Val<'k, u32>,
    kept: Vec<Vec<Var<'k, f32>>>,
}

impl<'k> ColumnSums<'k> {
    /// Of parameters that a group declares.
    pub(crate) fn new(k: Kernel<'k>, values: ColumnSumsValues<'k>, spec: SumsSpec) -> Self {
        // What the other warps hold lies in one stage for a moment.
        assert!(
            3 * LANES * 4 * spec.kept() * spec.stages() <= STAGE_ROWS * spec.row_bytes,
            "{spec:?}: the sums of a tile fit into a stage"
        );
        ColumnSums { kernel: k, spec, values }
    }

    /// Begins a tile.
    pub(crate) fn begin(&self, thread: Val<'k, u32>) -> TileSums<'_, 'k> {
        let k = self.kernel;
        let stage = || (0..self.spec.kept()).map(|_| k.var(0.0f32)).collect();
        TileSums { sums: self, thread, kept: (0..self.spec.stages()).map(|_| stage()).collect() }
    }
}

/// Of a row and a chunk of it: the chunk's words, and whether the row is one of the result's.
pub(crate) type ReadChunk<'a, 'k> = dyn Fn(Val<'k, u32>, Val<'k, u32>) -> (Vec<Val<'k, u32>>, Val<'k, bool>) + 'a;

impl<'k> TileSums<'_, 'k> {
    /// Adds the rows of stage `stage` of the tile.
    pub(crate) fn add(&self, stage: u32, read: &ReadChunk<'_, 'k>) {
        let (k, spec) = (self.sums.kernel, self.sums.spec);
        let (in_row, columns) = (spec.chunks_of_row(), spec.columns_of_chunk() as usize);
        let at_once = WARPGROUP / in_row;
        let chunk = self.thread & (in_row - 1);
        let first_row = self.thread >> in_row.trailing_zeros();
        let mut values: Vec<Val<'k, f32>> = Vec::new();
        for turn in 0..STAGE_ROWS / at_once {
            let (words, inside) = read(first_row + turn * at_once, chunk);
            let elements: Vec<Val<'k, f32>> = (words.into_iter())
                .map(|word| k.select(inside, word, 0u32))
                .flat_map(|word| match spec.stored {
                    DType::F32 => vec![word.bitcast::<f32>()],
                    stored => compute::widen_pair(k, stored, word).to_vec(),
                })
                .collect();
            if turn == 0 {
                values = elements.iter().copied().chain(elements.iter().map(|&value| value * value)).collect();
                continue;
            }
            for (column, value) in elements.into_iter().enumerate() {
                values[column] = values[column] + value;
                values[columns + column] = k.fma(value, value, values[columns + column]);
            }
        }
        // Lanes that hold the same chunk: each keeps half of the values and adds to them what the other has of these.
        let mut lanes = in_row;
        while lanes < LANES {
            let upper = (self.thread & lanes).ne(0u32);
            let (low, high) = values.split_at(values.len() / 2);
            let halves = low.iter().zip(high).map(|(&low, &high)| {
                let (own, other) = (k.select(upper, high, low), k.select(upper, low, high));
                own + k.shfl_bfly(other, lanes)
            });
            values = halves.collect();
            lanes *= 2;
        }
        self.kept[stage as usize].iter().zip(values).for_each(|(kept, value)| kept.set(*kept + value));
    }

    /// Stores the part that the warpgroup's rows are: `place` is its line, the tile's matrix and its first column. `stage` is a stage's
    /// address that no one reads or writes; `sync` brings the warpgroup together. Until it has come together once more, the stage is in
    /// use.
    pub(crate) fn store(&self, place: [Val<'k, u32>; 3], wanted: Val<'k, bool>, stage: Val<'k, u32>, sync: &dyn Fn()) {
        let (k, sums, spec) = (self.sums.kernel, self.sums, self.sums.spec);
        let (warp, lane) = (self.thread >> 5, self.thread & (LANES - 1));
        let bytes = 4 * spec.kept();
        let at = |warp: Val<'k, u32>| stage + (warp * (spec.stages() * LANES) + lane) * bytes;
        let values = |of: &[Var<'k, f32>]| of.iter().map(|value| value.get()).collect::<Vec<_>>();
        k.when(warp.gt(0u32), || {
            for (index, kept) in self.kept.iter().enumerate() {
                k.st_shared_vector(at(warp - 1), index as i64 * i64::from(LANES * bytes), &values(kept));
            }
        });
        sync();
        k.when(warp.eq(0u32) & wanted, || {
            let [line, matrix, column] = place;
            let chunk = lane & (spec.chunks_of_row() - 1);
            // Half of the values for each bit of the lane beyond those that say the chunk: first sums or squares, then which columns.
            let first = spec.chunks_of_row();
            let kind = (lane & first).ne(0u32);
            let mut in_chunk = k.constant(0u32);
            let (mut bit, mut half) = (2 * first, spec.columns_of_chunk() / 2);
            while bit < LANES {
                in_chunk = in_chunk + k.select((lane & bit).ne(0u32), half, 0u32);
                (bit, half) = (2 * bit, half / 2);
            }
            let in_tile = chunk * spec.columns_of_chunk() + in_chunk;
            let ColumnSumsValues { sums_parts, sums_width, sums_pitch } = sums.values;
            let column = matrix * sums_pitch + column + in_tile + k.select(kind, sums_width, 0u32);
            let to = sums_parts.moved(line.widen() * sums_width.mul_wide(8u32)).at(column, 4);
            let per_stage = spec.row_bytes / spec.stored.bytes() as u32;
            for (index, kept) in self.kept.iter().enumerate() {
                let total = |column: usize| {
                    (0..3).map(|other| (other, column)).fold(kept[column].get(), |total, (other, column)| {
                        let offset = (other * spec.stages() + index as u32) * LANES * bytes + 4 * column as u32;
                        total + k.ld_shared::<f32>(stage + lane * bytes, i64::from(offset))
                    })
                };
                let totals: Vec<Val<'k, f32>> = (0..kept.len()).map(total).collect();
                let first = index as u32 * per_stage;
                let store = || k.st_global_vector(to, i64::from(4 * first), &totals, Cache::Default);
                // A tile may end inside of its last stage.
                if spec.tile_columns - first < per_stage { k.when((in_tile + first).lt(spec.tile_columns), store) } else { store() }
            }
        });
    }
}

/// The parts of a result's sums.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SumGrid {
    /// Lines of parts.
    pub(crate) parts: u32,
    /// Matrices of the batch, columns of each, and as tiles hold them.
    pub(crate) matrices: u32,
    pub(crate) columns: u32,
    pub(crate) pitch: u32,
    /// The adding launch may begin while what forms the parts still runs, on compute capability 9.0 and later.
    pub(crate) overlaps: bool,
}

/// Where the sums of each column go, then those of their squares: an address, and the bytes from one to the next.
pub(crate) type Targets = [(Address, u64); 2];

impl SumGrid {
    fn width(&self) -> u32 {
        self.matrices * self.pitch
    }

    /// Bytes of the parts.
    pub(crate) fn scratch_bytes(&self) -> u64 {
        u64::from(self.parts) * self.line_bytes()
    }

    fn line_bytes(&self) -> u64 {
        8 * u64::from(self.matrices) * u64::from(self.pitch)
    }

    /// Shares that the first of two adding launches makes of the parts; 1 where one launch is enough.
    fn shares(&self) -> u32 {
        if self.parts > SHARE { self.parts.div_ceil(SHARE) } else { 1 }
    }

    /// The arguments of the kernel that forms the parts.
    pub(crate) fn arguments(&self, scratch: Address) -> ColumnSumsArgs {
        ColumnSumsArgs { sums_parts: scratch, sums_width: self.width(), sums_pitch: self.pitch }
    }

    /// What follows the kernel that forms the parts.
    pub(crate) fn work(&self) -> Stream {
        let launches = if self.shares() > 1 { 2.0 } else { 1.0 };
        Stream::new(Traffic::Reduced, 2.0 * self.scratch_bytes() as f64).in_launches(launches)
    }

    /// Adds the launches that add the parts in `scratch` up. `to` is where sums and sums of squares go.
    pub(crate) fn steps(&self, scratch: Address, to: Targets, program: &mut Program) {
        let shares = self.shares();
        if shares == 1 {
            program.launch(self.launch(scratch, self.columns, 1, to.map(|(at, stride)| (at, stride, 0))));
            return;
        }
        let sums = SumGrid { parts: shares, ..*self };
        let shared = program.add_scratch("shares of sums", sums.scratch_bytes());
        program.launch(self.launch(scratch, self.pitch, shares, sums.between(shared)));
        sums.steps(shared, to, program);
    }

    /// Where a launch puts the sums of its shares, of which these are the parts.
    fn between(&self, shared: Address) -> [(Address, u64, u64); 2] {
        let squares = Address { offset_bytes: shared.offset_bytes + u64::from(self.width()) * 4, ..shared };
        [shared, squares].map(|at| (at, 4, self.line_bytes()))
    }

    /// One adding launch: `spread` columns from one matrix's first result to the next one's.
    fn launch(&self, parts: Address, spread: u32, shares: u32, to: [(Address, u64, u64); 2]) -> Launch {
        let adds = Adds { source: Source::Parts, overlaps: self.overlaps };
        let line_bytes = self.line_bytes();
        adds.launch(parts, [self.parts, shares], line_bytes, [self.width(), self.pitch, self.columns, spread], to)
    }
}

/// Adds the launches that sum up the columns of `count` lines in memory. Elements of a line are neighbours.
pub(crate) fn of_lines(lines: Address, stored: DType, [count, columns]: [u32; 2], line_bytes: u64, to: Targets, program: &mut Program) {
    let adds = Adds { source: Source::Lines(stored), overlaps: false };
    let of_columns = [columns; 4];
    let shares = count.div_ceil(SHARE).clamp(1, SHARE);
    if shares == 1 {
        program.launch(adds.launch(lines, [count, 1], line_bytes, of_columns, to.map(|(at, stride)| (at, stride, 0))));
        return;
    }
    let sums = SumGrid { parts: shares, matrices: 1, columns, pitch: columns, overlaps: false };
    let shared = program.add_scratch("shares of sums", sums.scratch_bytes());
    program.launch(adds.launch(lines, [count, shares], line_bytes, of_columns, sums.between(shared)));
    sums.steps(shared, to, program);
}

/// What an adding kernel reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Source {
    /// Lines of sums, then of their squares' sums.
    Parts,
    /// Lines of elements of a type.
    Lines(DType),
}

/// What shapes an adding kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Adds {
    source: Source,
    overlaps: bool,
}

/// The kernel that adds up what kernels form in the epilogue.
pub(crate) fn kernel() -> KernelRef {
    Adds { source: Source::Parts, overlaps: true }.kernel()
}

impl Adds {
    fn name(self) -> String {
        let what = match self.source {
            Source::Parts => "parts".to_owned(),
            Source::Lines(stored) => stored.to_string(),
        };
        format!("column_sums_of_{what}{}", if self.overlaps { "_overlapped" } else { "" })
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || {
            let target = match (self.source, self.overlaps) {
                (_, true) => Target::Sm90,
                (Source::Parts, false) => compute::target_of(DType::F32),
                (Source::Lines(stored), false) => compute::target_of(stored),
            };
            build(Header { name: self.name(), target, threads: WARPS * LANES, ..Header::default() }, |k| add(k, self))
        })
    }

    /// The launch over `count` lines in so many shares, of a width in columns, with so many from one matrix to the next and of one, and
    /// `spread` from one matrix's first result to the next one's.
    fn launch(
        self,
        lines: Address,
        [count, shares]: [u32; 2],
        line_bytes: u64,
        [width, pitch, columns, spread]: [u32; 4],
        to: [(Address, u64, u64); 2],
    ) -> Launch {
        let blocks = width.div_ceil(LANES);
        let [sum, squares] = to.map(|(at, bytes, share_bytes)| TotalArgs { at, bytes, share_bytes });
        let args = AddArgs {
            lines,
            lines_in_all: count,
            lines_of_a_share: count.div_ceil(shares),
            line_bytes,
            width,
            column_blocks: blocks,
            pitch,
            columns,
            spread,
            totals: [sum, squares],
        };
        let launch = Launch::new(self.kernel(), [blocks * shares, 1, 1], args.bound(&self));
        if self.overlaps { launch.overlapping() } else { launch }
    }

    /// Bytes of an element that it reads.
    fn element_bytes(self) -> u32 {
        match self.source {
            Source::Parts => 4,
            Source::Lines(stored) => stored.bytes() as u32,
        }
    }
}

verdigris_kir::parameters! {
    struct Add / AddArgs of Adds as adds {
        lines: Read = adds.element_bytes(),
        lines_in_all: u32,
        lines_of_a_share: u32,
        line_bytes: u64,
        width: u32,
        column_blocks: Divide,
        pitch: Divide,
        columns: u32,
        /// Columns from one matrix's first result to the next one's.
        spread: u32,
        /// Sums, and sums of squares.
        totals: [TotalArgs; 2] = (),
    }
}

verdigris_kir::parameters! {
    /// Where totals go: bytes from one column to the next, and from one share to the next.
    #[derive(Clone, Copy)]
    struct Total / TotalArgs of () as _spec {
        at: Write = 4,
        bytes: u64,
        share_bytes: u64,
    }
}

fn add(k: Kernel<'_>, adds: Adds) {
    let Add { lines, lines_in_all: count, lines_of_a_share: share, line_bytes, width, column_blocks, pitch, columns, spread, totals: to } =
        Add::declare(k, &adds);
    if adds.overlaps {
        k.griddep_wait();
        k.griddep_launch();
    }

    let (warp, lane) = (k.thread() >> 5, k.thread() & (LANES - 1));
    let (cta_share, block) = column_blocks.split(k.cta());
    let column = block * LANES + lane;
    let (matrix, of_matrix) = pitch.split(column);
    let inside = column.lt(width) & of_matrix.lt(columns);
    let begin = cta_share * share;
    let own = ((begin + share).min(count).max(begin) - begin + (WARPS - 1) - warp) >> WARPS.trailing_zeros();

    let totals = [k.var(0.0f32), k.var(0.0f32)];
    let squares_bytes = width.mul_wide(4u32);
    k.when(inside, || {
        let first = lines.moved((begin + warp).widen() * line_bytes).at(column, adds.element_bytes());
        k.range_unrolled(own, UNROLL, |turn| {
            let at = first + (turn * WARPS).widen() * line_bytes;
            match adds.source {
                Source::Parts => {
                    for (total, at) in totals.iter().zip([at, at + squares_bytes]) {
                        total.set(*total + k.ld_global::<f32>(at, 0));
                    }
                }
                Source::Lines(stored) => {
                    let value = compute::load::<f32>(k, stored, at, 0);
                    totals[0].set(totals[0] + value);
                    totals[1].set(k.fma(value, value, totals[1].get()));
                }
            }
        });
    });
    let slots = k.shared("sums of warps", 8 * WARPS * LANES, 16).address();
    k.st_shared_vector(slots + k.thread() * 8, 0, &totals.map(|total| total.get()));
    k.bar_sync();
    k.when(inside & warp.eq(0u32), || {
        for other in 1..WARPS {
            let values = k.ld_shared_vector::<f32>(slots + lane * 8, i64::from(8 * LANES * other), 2);
            totals.iter().zip(values).for_each(|(total, value)| total.set(*total + value));
        }
        for (total, Total { at, bytes, share_bytes }) in totals.iter().zip(to) {
            let at = at.address() + (matrix * spread + of_matrix).widen() * bytes + cta_share.widen() * share_bytes;
            k.st_global(at, 0, total.get());
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_kir::interp::{self, Kernels, Memory, Options};

    /// Parts of whole numbers, one or two launches, against plain sums; what no tile holds is never written, and what no sum is never
    /// touched.
    #[test]
    fn parts_of_every_number_add_up() {
        for (number, parts) in [1u32, 31, 32, 33, 1023, 1024, 1025, 2600].into_iter().enumerate() {
            let grid = SumGrid { parts, matrices: 2, columns: 40, pitch: 64, overlaps: parts % 2 == 1 };
            let (width, columns) = (grid.width() as usize, grid.columns as usize);
            let value = |line: usize, kind: usize, column: usize| ((line * 31 + kind * 17 + column * 7) % 64) as f32 - 20.0;
            let mut lines = vec![f32::NAN; parts as usize * 2 * width];
            let mut totals = [vec![0.0f32; 2 * columns], vec![0.0f32; 2 * columns]];
            for (line, kind) in (0..parts as usize).flat_map(|line| [(line, 0), (line, 1)]) {
                for (matrix, column) in (0..2).flat_map(|matrix| (0..columns).map(move |column| (matrix, column))) {
                    let value = value(line, kind, matrix * 64 + column);
                    lines[(2 * line + kind) * width + matrix * 64 + column] = value;
                    totals[kind][matrix * columns + column] += value;
                }
            }
            let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
            // Sums stand every third element, sums of squares side by side.
            let strides = [3usize, 1];
            let spread = |kind: usize| {
                let mut all = vec![-7.0f32; 2 * columns * strides[kind] + 8];
                totals[kind].iter().enumerate().for_each(|(i, &total)| all[i * strides[kind]] = total);
                all
            };
            let mut memory = Memory::new();
            memory.add(&bytes(&lines));
            strides.iter().for_each(|stride| {
                memory.add(&bytes(&vec![-7.0f32; 2 * columns * stride + 8]));
            });
            let mut program = Program { buffer_alignment_bytes: vec![1; 3], ..Program::default() };
            grid.steps(Address::buffer(0), [(Address::buffer(1), 12), (Address::buffer(2), 4)], &mut program);
            assert_eq!(program.launches().count(), if parts > SHARE { 2 } else { 1 });
            if let Err(findings) = interp::run(&program, &Kernels::new(), &mut memory, &Options::schedule(number as u64)) {
                panic!("{parts} parts: {findings}");
            }
            for kind in 0..2 {
                assert_eq!(memory.to_vec(1 + kind), bytes(&spread(kind)), "{parts} parts, {}", ["sums", "squares"][kind]);
            }
        }
    }
    /// Lines of a pitch of their own, of every type that is stored, in one launch and in two.
    #[test]
    fn columns_of_lines_add_up() {
        for (stored, count) in [(DType::Bf16, 1u32), (DType::F16, 37), (DType::F32, 1024), (DType::Bf16, 2500), (DType::E4m3, 1100)] {
            let (columns, pitch) = (45usize, 48usize);
            let value = |line: usize, column: usize| ((line * 5 + column * 3) % 9) as f64 - 4.0;
            let element = stored.bytes();
            let mut lines = vec![0x7f; count as usize * pitch * element];
            let mut totals = [vec![0.0f32; columns], vec![0.0f32; columns]];
            for (line, column) in (0..count as usize).flat_map(|line| (0..columns).map(move |column| (line, column))) {
                let value = value(line, column);
                verdigris_tensor::num::write_element(stored, value, &mut lines[(line * pitch + column) * element..][..element]).unwrap();
                totals[0][column] += value as f32;
                totals[1][column] += (value * value) as f32;
            }
            let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
            let mut memory = Memory::new();
            memory.add(&lines);
            (0..2).for_each(|_| {
                memory.add(&[0xA5; 4 * 45]);
            });
            let mut program = Program { buffer_alignment_bytes: vec![1; 3], ..Program::default() };
            let to = [1, 2].map(|slot| (Address::buffer(slot), 4));
            of_lines(Address::buffer(0), stored, [count, columns as u32], (pitch * element) as u64, to, &mut program);
            assert_eq!(program.launches().count(), if count > SHARE { 2 } else { 1 });
            if let Err(findings) = interp::run(&program, &Kernels::new(), &mut memory, &Options::schedule(u64::from(count))) {
                panic!("{count} lines of {stored}: {findings}");
            }
            for kind in 0..2 {
                assert_eq!(memory.to_vec(1 + kind), bytes(&totals[kind]), "{count} lines of {stored}, {}", ["sums", "squares"][kind]);
            }
        }
    }
}
