//! The epilogue store: a warpgroup's results to global memory, through the epilogue, then shared memory and from there by TMA or line by
//! line, or elements straight from registers.
//!
//! A [`StoreSpec`] is the part that shapes code. A kernel declares it once and, for each tile of results, calls [`Store::write`] with
//! accumulators of 64 rows each, one below the other; before the kernel ends, [`Store::finish`]. D is any matrix with a row stride, a
//! column stride and batch strides: of a product, or of a convolution whose pixels are rows.
//!
//! [`span`] is for kernels whose results lie one behind the other in shared memory, as in global memory.

mod row_staging;
pub(crate) mod span;

use std::collections::VecDeque;
use std::panic::Location;

use serde::{Deserialize, Serialize};
use verdigris_graph::{Matrix, Order};
use verdigris_kir::face::{Kernel, Number, TensorMap, Val};
use verdigris_kir::inst::{Cache, CvtRound, Packed};
use verdigris_kir::ir::{MapDecl, MapType};
use verdigris_kir::params::{Map, Write};
use verdigris_kir::program::{Address, L2Promotion, MapSpec};
use verdigris_kir::tile::fragment::Fragment;
use verdigris_kir::tile::staging::{STAGE_ROWS, Staging, store_map_with_rows};
use verdigris_tensor::DType;

use crate::fuse::epilogue::{Epilogue, EpilogueArgs, EpilogueSpec, Fetched, Place};
use crate::layout::batch::{BatchStridesBytes, DIMS, Indices};
use crate::sums::column_sums::{ColumnSums, ColumnSumsArgs, SumsSpec, TileSums};
use row_staging::{RowStage, RowStaging};

/// What a sum is kept in.
pub(crate) trait Sum: Number {
    /// As f32: exact, or rounded to nearest.
    fn to_f32<'k>(value: Val<'k, Self>) -> Val<'k, f32>;
    /// From f32, rounded to nearest.
    fn of_f32(value: Val<'_, f32>) -> Val<'_, Self>;
    /// The sum of nothing.
    const ZERO: Self;
    /// `factor · value + to`; integers have no factors, and only add.
    fn scaled<'k>(k: Kernel<'k>, value: Val<'k, Self>, factor: Val<'k, f32>, to: Val<'k, Self>) -> Val<'k, Self>;
}

impl Sum for f32 {
    fn to_f32<'k>(value: Val<'k, f32>) -> Val<'k, f32> {
        value
    }
    fn of_f32(value: Val<'_, f32>) -> Val<'_, f32> {
        value
    }
    const ZERO: f32 = 0.0;
    fn scaled<'k>(k: Kernel<'k>, value: Val<'k, f32>, factor: Val<'k, f32>, to: Val<'k, f32>) -> Val<'k, f32> {
        k.fma(value, factor, to)
    }
}

impl Sum for i32 {
    #[track_caller]
    fn to_f32<'k>(value: Val<'k, i32>) -> Val<'k, f32> {
        value.to_f32()
    }
    fn of_f32(value: Val<'_, f32>) -> Val<'_, i32> {
        value.convert(CvtRound::IntNearest)
    }
    const ZERO: i32 = 0;
    fn scaled<'k>(_: Kernel<'k>, value: Val<'k, i32>, _: Val<'k, f32>, to: Val<'k, i32>) -> Val<'k, i32> {
        value + to
    }
}

/// How a result reaches global memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Out {
    /// Through shared memory and TMA: rows of D 16-byte aligned.
    Tma,
    /// Through shared memory, line by line: rows (or columns) of D contiguous, beginning anywhere.
    Rows,
    /// Through shared memory, 16 bytes at a time, each row to a place of its own: rows of D 16-byte aligned.
    Scattered,
    /// From registers, element by element: any strides.
    Direct,
}

/// The part of an epilogue store that shapes code.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct StoreSpec {
    /// How results leave.
    pub(crate) out: Out,
    /// D's rows are contiguous along the rows of the tile: it is written transposed.
    pub(crate) transposed: bool,
    /// Columns of the tile.
    pub(crate) tile_columns: u32,
    /// Warpgroups of a CTA that write.
    pub(crate) warpgroups: u32,
    /// Warpgroup `w` uses named barrier `barrier + w`.
    pub(crate) barrier: u32,
    /// What stands between sums and D; it stores D for [`Out::Direct`] alone.
    pub(crate) epilogue: EpilogueSpec,
    /// Sums over D's columns are formed on the way, of an [`Out::Tma`] that is not transposed and a type that
    /// [`crate::sums::column_sums::takes`].
    pub(crate) has_sums: bool,
}

/// Whether a tensor map may store D, whose contiguous side has `line_elements`: lines begin and end at multiples of 16 bytes. A store into
/// a line that ends elsewhere would write what lies behind it.
pub(crate) fn is_mappable(d: &Matrix, line_elements: u64) -> bool {
    let whole = |elements: u64| (elements * d.dtype.bytes() as u64).is_multiple_of(16);
    let strides = d.leading_dimension().into_iter().chain(d.batch_strides.iter().copied());
    d.order() != Order::Strided && whole(line_elements) && strides.into_iter().all(whole)
}

impl StoreSpec {
    fn d(&self) -> DType {
        self.epilogue.d.dtype
    }

    /// Stages of a warpgroup.
    fn stages(&self) -> u32 {
        match self.out {
            Out::Rows | Out::Direct => 0,
            Out::Tma | Out::Scattered => 2,
        }
    }

    /// Rows of a stage of a transposed tile: columns of the tile, as many as divide it.
    fn transposed_rows(&self) -> u32 {
        [64, 32, 16].into_iter().find(|rows| self.tile_columns.is_multiple_of(*rows)).unwrap_or(16)
    }

    /// Bytes of a stage's row: half a swizzle span where the tile's width is not whole ones.
    fn stage_row_bytes(&self) -> u32 {
        if !self.transposed && !(self.tile_columns * self.d().bytes() as u32).is_multiple_of(128) { 64 } else { 128 }
    }

    /// The stage for [`Out::Rows`]: up to 256 bytes of D's contiguous side by up to 64 of the other.
    fn row_stage(&self) -> RowStage {
        let element_bytes = self.d().bytes() as u32;
        let (lines, line_bytes) = match self.transposed {
            true => (self.transposed_rows(), STAGE_ROWS * element_bytes),
            false => (STAGE_ROWS, (self.tile_columns * element_bytes).min(256)),
        };
        RowStage { lines, line_bytes, element_bytes, transposed: self.transposed }
    }

    /// Shared memory that it takes.
    pub(crate) fn shared_bytes(&self) -> u32 {
        match self.out {
            Out::Rows => self.warpgroups * self.row_stage().bytes(),
            Out::Tma | Out::Scattered | Out::Direct => self.warpgroups * self.stages() * STAGE_ROWS * self.stage_row_bytes(),
        }
    }

    /// The tensor map of D, for [`Out::Tma`].
    fn d_map(&self) -> MapDecl {
        let ty = match self.d() {
            DType::Bf16 => MapType::Bf16,
            DType::F16 => MapType::F16,
            DType::F32 => MapType::F32,
            DType::I32 => MapType::S32,
            _ => MapType::U8,
        };
        store_map_with_rows(ty, if self.transposed { self.transposed_rows() } else { STAGE_ROWS }, self.stage_row_bytes())
    }

    /// Where D is: its extents (`rows` and `columns` of the tile's space) and, but for [`Out::Direct`], its map, or its address and
    /// strides. `leading_bytes` is the distance of its contiguous lines.
    pub(crate) fn place(
        &self,
        d: Address,
        [rows, columns, batch]: [u32; 3],
        leading_bytes: u64,
        batch_strides_bytes: [u64; DIMS],
    ) -> PlaceArgs {
        let lines = || LinesArgs { d, stride_bytes: leading_bytes, batch: batch_strides_bytes };
        let map = || {
            let (x, y) = if self.transposed { (rows, columns) } else { (columns, rows) };
            let batch_stride = if batch > 1 { batch_strides_bytes[DIMS - 1] } else { leading_bytes };
            let map = MapSpec {
                decl: self.d_map(),
                dims: [x, y, batch].map(u64::from).to_vec(),
                strides_bytes: vec![leading_bytes, batch_stride],
                element_strides: vec![1; 3],
                lower_corner: vec![],
                upper_corner: vec![],
                fill: Default::default(),
                l2: L2Promotion::B256,
            };
            (d, map)
        };
        PlaceArgs { rows, columns, lines: self.line_alignment_bytes().map(|_| lines()), d: (self.out == Out::Tma).then(map) }
    }

    /// What the address of D is a multiple of, where lines of it are stored.
    fn line_alignment_bytes(&self) -> Option<u32> {
        match self.out {
            Out::Rows => Some(self.d().bytes() as u32),
            Out::Scattered => Some(PIECE_BYTES),
            Out::Tma | Out::Direct => None,
        }
    }
}

verdigris_kir::parameters! {
    /// The parameters of a [`Store`].
    #[derive(Debug)]
    pub(crate) struct StoreValues / #[derive(Clone, Debug)] StoreArgs of StoreSpec as spec {
        pub(crate) epilogue: EpilogueArgs = spec.epilogue.over_matrices(),
        pub(crate) place: PlaceArgs = spec.clone(),
        pub(crate) sums: Option<ColumnSumsArgs> = spec.has_sums.then_some(()),
    }
}

verdigris_kir::parameters! {
    /// D's extents, and where it is.
    #[derive(Debug)]
    pub(crate) struct PlaceValues / #[derive(Clone, Debug)] PlaceArgs of StoreSpec as spec {
        rows: u32,
        columns: u32,
        lines: Option<LinesArgs> = spec.line_alignment_bytes(),
        pub(crate) d: Option<Map> = (spec.out == Out::Tma).then(|| spec.d_map()),
    }
}

verdigris_kir::parameters! {
    /// D by its lines.
    #[derive(Clone, Copy, Debug)]
    struct Lines / #[derive(Clone, Copy, Debug)] LinesArgs of u32 as alignment_bytes {
        d: Write = *alignment_bytes,
        stride_bytes: u64,
        batch: BatchStridesBytes = (),
    }
}

/// Parameters and shared memory of an [`Out`].
#[derive(Debug)]
enum StorePath<'k> {
    Elements,
    Rows { lines: Lines<'k>, staging: RowStaging<'k> },
    Scattered { lines: Lines<'k>, staging: Staging<'k> },
    Tma { map: TensorMap<'k>, staging: Staging<'k> },
}

/// Lanes of a warp.
const WARP: u32 = 32;
/// Rows that a warp clears at a time.
pub(crate) const CLEARED_ROWS: u32 = 16;
/// The number of a row that D does not have.
const NOWHERE: u32 = u32::MAX;
/// What a thread stores at once under [`Out::Scattered`].
const PIECE_BYTES: u32 = 16;
/// Threads of a warpgroup.
const WARPGROUP: u32 = 128;

/// Where a row of the tile's space belongs: which row of D (and of the epilogue's operands) it is, and whether it is one.
pub(crate) type PlaceRow<'a, 'k> = &'a dyn Fn(Val<'k, u32>) -> (Val<'k, u32>, Val<'k, bool>);

/// Where a warpgroup's results belong: their first row and column in D, and which matrix of the batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tile<'k> {
    pub(crate) row: Val<'k, u32>,
    pub(crate) column: Val<'k, u32>,
    /// How many columns earlier the tile lies in fact, also in front of D's first one, where nothing is stored; of [`Out::Scattered`] alone, since
    /// TMA stores no box that begins in front of a tensor.
    pub(crate) lead: Option<Val<'k, u32>>,
    pub(crate) batch: Val<'k, u32>,
    /// The batch's index by dims, for the epilogue's operands.
    pub(crate) indices: Indices<'k>,
    /// The warpgroup, counted among those that write, and the thread in it.
    pub(crate) warpgroup: Val<'k, u32>,
    pub(crate) thread: Val<'k, u32>,
}

impl<'k> Tile<'k> {
    /// The column of D of one that is counted; wrapping in front of D.
    fn in_d(&self, column: Val<'k, u32>) -> Val<'k, u32> {
        self.lead.map_or(column, |lead| column - lead)
    }
}

/// The epilogue store of results to D: the epilogue, then shared memory and TMA, or elements straight from registers.
#[derive(Debug)]
pub(crate) struct Store<'k> {
    kernel: Kernel<'k>,
    spec: StoreSpec,
    epilogue: Epilogue<'k, f32>,
    rows: Val<'k, u32>,
    columns: Val<'k, u32>,
    path: StorePath<'k>,
    sums: Option<ColumnSums<'k>>,
}

/// A consumer's 64 rows of results on their way: which warpgroup, which stage is next, where they belong.
struct Block<'w, 'k> {
    store: &'w Store<'k>,
    /// The epilogue at this thread's first element of each row half.
    places: [Place<'w, 'k, f32>; 2],
    /// Whether each row half lies in D.
    rows_inside: [Val<'k, bool>; 2],
    /// This thread's first column.
    column: Val<'k, u32>,
}

/// The pairs of results in 16 columns: which column block of the two, and which row half.
const ORDER: [(u32, u32); 4] = [(0, 0), (0, 1), (1, 0), (1, 1)];
/// What is read of them, of each pair as one or element by element; nothing where the epilogue reads nothing.
type Ahead<'k> = [Vec<Fetched<'k, f32>>; 4];
/// How many times 16 columns are read together: 16 registers for each operand, and as many that are on their way meanwhile.
const TOGETHER: usize = 2;

/// What the epilogue reads of 64 rows, loaded before the results in front of it are computed, so that no load is waited for.
struct ReadAhead<'k> {
    /// The column blocks that follow, each the first of 16 columns, in the order in which they are written.
    left: VecDeque<u32>,
    held: VecDeque<Ahead<'k>>,
}

impl<'k> ReadAhead<'k> {
    fn of(blocks: impl Iterator<Item = u32>) -> ReadAhead<'k> {
        ReadAhead { left: blocks.collect(), held: VecDeque::new() }
    }

    /// Has twice as many columns on their way as are read together.
    fn fill(&mut self, block: &Block<'_, 'k>) {
        while self.held.len() < 2 * TOGETHER
            && let Some(next) = self.left.pop_front()
        {
            self.held.push_back(block.fetch(next));
        }
    }
}

/// Where results are staged.
#[derive(Clone, Copy)]
enum Staged<'s, 'k> {
    Rows(&'s RowStaging<'k>),
    Tma(&'s Staging<'k>),
}

impl<'k> Store<'k> {
    /// Of parameters that a group declares; declares the shared memory.
    #[track_caller]
    pub(crate) fn new(k: Kernel<'k>, values: StoreValues<'k>, spec: StoreSpec) -> Store<'k> {
        let StoreValues { epilogue, place: PlaceValues { rows, columns, lines, d }, sums } = values;
        let stages = || Staging::with_rows(k, spec.warpgroups, spec.stages(), spec.barrier, spec.stage_row_bytes());
        let path = match (d, lines) {
            (Some(map), _) => StorePath::Tma { map, staging: stages() },
            (None, Some(lines)) if spec.out == Out::Scattered => StorePath::Scattered { lines, staging: stages() },
            (None, Some(lines)) => StorePath::Rows { lines, staging: RowStaging::new(k, spec.row_stage(), spec.warpgroups, spec.barrier) },
            (None, None) => StorePath::Elements,
        };
        let of_sums = SumsSpec { stored: spec.d(), tile_columns: spec.tile_columns, row_bytes: spec.stage_row_bytes() };
        let sums = sums.map(|sums| ColumnSums::new(k, sums, of_sums));
        Store { kernel: k, spec, epilogue, rows, columns, path, sums }
    }

    /// Writes accumulators of 64 rows each, one below the other, the first one beginning at the tile's place. All threads of the warpgroup
    /// call it.
    #[track_caller]
    pub(crate) fn write<T: Sum>(&self, sums: &[Fragment<'k, T>], tile: &Tile<'k>) {
        self.kernel.scope(Location::caller(), || self.write_placed(sums, tile, &|row| (row, row.lt(self.rows))));
    }

    /// The same with rows out of order, for [`Out::Scattered`] and [`Out::Direct`].
    #[track_caller]
    pub(crate) fn write_placed<T: Sum>(&self, sums: &[Fragment<'k, T>], tile: &Tile<'k>, place: PlaceRow<'_, 'k>) {
        self.kernel.scope_around(Location::caller(), |caller| {
            let (spec, thread, warpgroup) = (&self.spec, tile.thread, tile.warpgroup);
            let place: PlaceRow<'_, 'k> = &|row| caller.run(|| place(row));
            if let StorePath::Scattered { .. } = &self.path {
                // TMA may still read the stages of the tile before.
                self.kernel.barrier_sync(warpgroup + spec.barrier, WARPGROUP);
            }
            let matrix = self.epilogue.begin(tile.indices);
            let matrix = match tile.lead {
                None => matrix,
                Some(lead) => matrix.earlier(lead),
            };
            let totals = self.sums.as_ref().map(|sums| sums.begin(thread));
            // The first column block of each 16 columns of a stage.
            let blocks = |first: u32, per_stage: u32| -> Vec<u32> {
                (0..per_stage.min(spec.tile_columns - first) / 16).map(move |pair| first / 8 + 2 * pair).collect()
            };
            for (i, sum) in sums.iter().enumerate() {
                let first_row = tile.row + 64 * i as u32;
                let row = first_row + Fragment::<T>::row(thread);
                let column = tile.column + Fragment::<T>::column(thread);
                let (upper, lower) = (place(row), place(row + 8));
                let block = Block {
                    store: self,
                    places: [matrix.at(upper.0, column), matrix.at(lower.0, column)],
                    rows_inside: [upper.1, lower.1],
                    column: tile.in_d(column),
                };
                let mut ahead = ReadAhead::of((0..spec.tile_columns / 16).map(|pair| 2 * pair));
                match &self.path {
                    StorePath::Elements => block.write_direct(sum),
                    StorePath::Scattered { lines, staging } => {
                        let pieces = lines.pieces(spec, staging, tile, first_row, place);
                        let per_stage = staging.row_bytes() / spec.d().bytes() as u32;
                        let stages = spec.tile_columns.div_ceil(per_stage);
                        for index in 0..stages {
                            let first = index * per_stage;
                            let stage = staging.stage(warpgroup, (i as u32 * stages + index) % staging.stages());
                            block.write_stage(sum, Staged::Tma(staging), stage, thread, &blocks(first, per_stage), &mut ahead, || ());
                            // One barrier a stage: when it is written again, two turns later, all warps have passed the next barrier, and so
                            // have read it.
                            self.kernel.barrier_sync(warpgroup + spec.barrier, WARPGROUP);
                            pieces.iter().for_each(|piece| piece.store(self, staging, stage, first));
                        }
                    }
                    StorePath::Rows { lines: Lines { d, stride_bytes, batch }, staging } => {
                        let RowStage { lines, line_bytes, element_bytes, transposed } = staging.shape();
                        let stage = staging.address(warpgroup);
                        let per_stage = if transposed { lines } else { line_bytes / element_bytes };
                        let d = batch.matrix(*d, tile.indices);
                        let rows_left = (self.rows.max(first_row) - first_row).min(STAGE_ROWS);
                        for first in (0..spec.tile_columns).step_by(per_stage as usize) {
                            let ready = || staging.acquire(warpgroup);
                            block.write_stage(sum, Staged::Rows(staging), stage, thread, &blocks(first, per_stage), &mut ahead, ready);
                            let first_column = tile.column + first;
                            let width = per_stage.min(spec.tile_columns - first);
                            let columns_left = (self.columns.max(first_column) - first_column).min(width);
                            let (line, place) = if transposed { (first_column, first_row) } else { (first_row, first_column) };
                            let (lines, elements) = if transposed { (columns_left, rows_left) } else { (rows_left, columns_left) };
                            let to = d + line.widen() * *stride_bytes + place.mul_wide(element_bytes);
                            staging.store(stage, warpgroup, thread, to, *stride_bytes, lines, elements * element_bytes);
                        }
                    }
                    StorePath::Tma { map, staging } => {
                        // A stage is 128 bytes of D's contiguous side by up to 64 of the other.
                        let per_stage =
                            if spec.transposed { spec.transposed_rows() } else { spec.stage_row_bytes() / spec.d().bytes() as u32 };
                        let stages = spec.tile_columns.div_ceil(per_stage);
                        for index in 0..stages {
                            let first = index * per_stage;
                            let turn = i as u32 * stages + index;
                            let stage = staging.stage(warpgroup, turn % staging.stages());
                            let ready = || staging.acquire_turn(warpgroup, thread, turn, sums.len() as u32 * stages);
                            block.write_stage(sum, Staged::Tma(staging), stage, thread, &blocks(first, per_stage), &mut ahead, ready);
                            let (x, y) = if spec.transposed { (first_row, tile.column + first) } else { (tile.column + first, first_row) };
                            match self.epilogue.adds_to_d() {
                                None => staging.store(stage, warpgroup, thread, map, x, y, tile.batch),
                                Some(adds) => staging.store_or_add(adds, stage, warpgroup, thread, map, x, y, tile.batch),
                            }
                            // All of the stage is written by now, and it is read until someone writes it again, behind the barrier of its turn.
                            if let Some(totals) = &totals {
                                let read = |row, chunk| (staging.read_chunk(stage, row, chunk), (first_row + row).lt(self.rows));
                                totals.add(index, &read);
                            }
                        }
                    }
                }
            }
            if let (Some(totals), StorePath::Tma { staging, .. }) = (&totals, &self.path) {
                self.store_sums(totals, staging, tile, sums.len() as u32);
            }
        });
    }

    /// Stores the sums over the columns of the `blocks` times 64 rows that a warpgroup wrote, through the next stage.
    fn store_sums(&self, totals: &TileSums<'_, 'k>, staging: &Staging<'k>, tile: &Tile<'k>, blocks: u32) {
        let (k, spec, Tile { warpgroup, thread, .. }) = (self.kernel, &self.spec, *tile);
        let per_stage = spec.stage_row_bytes() / spec.d().bytes() as u32;
        let turn = blocks * spec.tile_columns.div_ceil(per_stage);
        staging.acquire(warpgroup, thread, staging.stages() - 1);
        let stage = staging.stage(warpgroup, turn % staging.stages());
        let rows = STAGE_ROWS * blocks;
        assert!(rows.is_power_of_two(), "a warpgroup's rows, {rows}, are shifted out of a row's number");
        let line = tile.row >> rows.trailing_zeros();
        let together = || k.barrier_sync(warpgroup + spec.barrier, WARPGROUP);
        totals.store([line, tile.batch, tile.column], tile.row.lt(self.rows), stage, &together);
    }

    /// Stores zeros beside a tile: into rows of D, in the tile's columns, for [`Out::Scattered`]. All lanes of a warp call it; each of the
    /// first [`CLEARED_ROWS`] gives a row's place, as [`PlaceRow`] does: finding it takes longer than writing a row.
    #[track_caller]
    pub(crate) fn clear_rows(&self, column: Val<'k, u32>, indices: Indices<'k>, (row, inside): (Val<'k, u32>, Val<'k, bool>)) {
        self.kernel.scope(Location::caller(), || {
            let StorePath::Scattered { lines, .. } = &self.path else { unreachable!("rows are cleared where each has a place of its own") };
            let (k, bytes) = (self.kernel, self.spec.d().bytes() as u32);
            let row = k.select(inside, row, NOWHERE);
            let pieces = self.spec.tile_columns * bytes / PIECE_BYTES;
            // Lanes that share a row, and the rows that a warp has at once.
            let lanes = pieces.min(WARP);
            let (own_row, own_piece) = (k.lane() >> lanes.ilog2(), k.lane() & (lanes - 1));
            let own_column = column + own_piece * (PIECE_BYTES / bytes);
            let first = lines.batch.matrix(lines.d, indices) + own_column.mul_wide(bytes);
            let zeros: [Val<'k, u32>; 4] = std::array::from_fn(|_| k.constant(0));
            for turn in (0..CLEARED_ROWS).step_by((WARP / lanes) as usize) {
                let row = k.shfl_idx(row, own_row + turn);
                let line = first + row.widen() * lines.stride_bytes;
                for piece in (0..pieces).step_by(lanes as usize) {
                    let inside = (own_column + piece * (PIECE_BYTES / bytes)).lt(self.columns);
                    k.when(row.ne(NOWHERE) & inside, || {
                        k.st_global_vector(line, i64::from(piece * PIECE_BYTES), &zeros, Cache::Default);
                    });
                }
            }
        });
    }

    /// D's extents in rows and columns of the tile's space.
    pub(crate) fn extents(&self) -> [Val<'k, u32>; 2] {
        [self.rows, self.columns]
    }

    /// Waits until everything that the warpgroup wrote has left shared memory; before the kernel ends.
    #[track_caller]
    pub(crate) fn finish(&self, thread: Val<'k, u32>) {
        if let StorePath::Tma { staging, .. } = &self.path {
            staging.finish(thread);
        }
    }
}

/// The 16 bytes that a thread stores of each stage of a block.
struct Piece<'k> {
    /// Row and chunk in the stage.
    row: Val<'k, u32>,
    chunk: Val<'k, u32>,
    /// Column and address in D, for the tile's first stage.
    column: Val<'k, u32>,
    address: Val<'k, u64>,
    /// Whether the row is one of D's.
    inside: Val<'k, bool>,
}

impl<'k> Lines<'k> {
    fn pieces(
        &self,
        spec: &StoreSpec,
        staging: &Staging<'k>,
        tile: &Tile<'k>,
        first_row: Val<'k, u32>,
        place: PlaceRow<'_, 'k>,
    ) -> Vec<Piece<'k>> {
        let bytes = spec.d().bytes() as u32;
        let in_row = staging.row_bytes() / PIECE_BYTES;
        let at_once = WARPGROUP / in_row;
        let chunk = tile.thread & (in_row - 1);
        let column = tile.column + chunk * (PIECE_BYTES / bytes);
        let matrix = self.batch.matrix(self.d, tile.indices) + column.mul_wide(bytes);
        let matrix = tile.lead.map_or(matrix, |lead| matrix - lead.mul_wide(bytes));
        let column = tile.in_d(column);
        (0..STAGE_ROWS / at_once)
            .map(|turn| {
                let row = (tile.thread >> in_row.trailing_zeros()) + turn * at_once;
                let (target, inside) = place(first_row + row);
                Piece { row, chunk, column, address: matrix + target.widen() * self.stride_bytes, inside }
            })
            .collect()
    }
}

impl<'k> Piece<'k> {
    /// Stores the piece of the stage that begins at column `first` of the tile.
    fn store(&self, store: &Store<'k>, staging: &Staging<'k>, stage: Val<'k, u32>, first: u32) {
        let k = store.kernel;
        let mut inside = self.inside & (self.column + first).lt(store.columns);
        // A tile may end inside of its last stage.
        let left = store.spec.tile_columns - first;
        if left * (store.spec.d().bytes() as u32) < staging.row_bytes() {
            inside = inside & self.chunk.lt(left * store.spec.d().bytes() as u32 / PIECE_BYTES);
        }
        k.when(inside, || {
            let words = staging.read_chunk(stage, self.row, self.chunk);
            k.st_global_vector(self.address, i64::from(first) * store.spec.d().bytes() as i64, &words, Cache::Default);
        });
    }
}

impl<'k> Block<'_, 'k> {
    /// Whether two neighbouring results lie in D, of a column block and row half.
    fn inside(&self, block: u32, half: u32, odd: u32) -> Val<'k, bool> {
        self.rows_inside[half as usize] & (self.column + (8 * block + odd)).lt(self.store.columns)
    }

    /// What the epilogue reads for 16 columns of results, from column block `block` on: of each pair, in [`ORDER`].
    fn fetch(&self, block: u32) -> Ahead<'k> {
        ORDER.map(|(b, half)| {
            let (place, block) = (&self.places[half as usize], block + b);
            match &self.store.spec.epilogue {
                spec if !spec.reads_memory() => Vec::new(),
                spec if spec.pairs => vec![place.fetch(8 * block, 2, self.inside(block, half, 1))],
                _ => [0, 1].map(|odd| place.fetch(8 * block + odd, 1, self.inside(block, half, odd))).into(),
            }
        })
    }

    /// Two neighbouring results: the epilogue applied to the elements of a fragment's column block and row half. Operands exist only inside of D; what stands
    /// outside is clipped where it is stored.
    fn pair<T: Sum>(&self, sum: &Fragment<'k, T>, block: u32, half: u32, ahead: &[Fetched<'k, f32>]) -> [Val<'k, f32>; 2] {
        let place = &self.places[half as usize];
        let raw = [0, 1].map(|odd| T::to_f32(sum.element(block, half, odd).get()));
        match ahead {
            [] if self.store.spec.epilogue.pairs => place.apply_pair(raw, 8 * block),
            [] => [0, 1].map(|odd| place.apply(raw[odd as usize], 8 * block + odd)),
            [both] => place.apply_fetched(raw, 8 * block, both),
            each => std::array::from_fn(|odd| place.apply_fetched([raw[odd]], 8 * block + odd as u32, &each[odd])[0]),
        }
    }

    /// Puts 16 columns from each of these column blocks on into a stage, one pair of chunks behind the other. `ready` comes before anything is written.
    #[allow(clippy::too_many_arguments, reason = "where from, and where to")]
    fn write_stage<T: Sum>(
        &self,
        sum: &Fragment<'k, T>,
        to: Staged<'_, 'k>,
        stage: Val<'k, u32>,
        thread: Val<'k, u32>,
        blocks: &[u32],
        ahead: &mut ReadAhead<'k>,
        ready: impl FnOnce(),
    ) {
        ahead.fill(self);
        ready();
        for (pair, &block) in (0..).zip(blocks) {
            if pair > 0 && pair % TOGETHER as u32 == 0 {
                ahead.fill(self);
            }
            let read = ahead.held.pop_front().unwrap_or_else(|| self.fetch(block));
            self.write_columns(sum, to, stage, thread, block, pair, &read);
        }
    }

    /// Puts 16 columns of results into a stage: blocks `block` and `block + 1`, the stage's pair of chunks `pair`.
    #[allow(clippy::too_many_arguments, reason = "where from, and where to")]
    fn write_columns<T: Sum>(
        &self,
        sum: &Fragment<'k, T>,
        to: Staged<'_, 'k>,
        stage: Val<'k, u32>,
        thread: Val<'k, u32>,
        block: u32,
        pair: u32,
        ahead: &Ahead<'k>,
    ) {
        let k = self.store.kernel;
        match half_format(self.store.spec.d()) {
            Some(format) => {
                let packed = std::array::from_fn(|i| {
                    let [low, high] = self.pair(sum, block + ORDER[i].0, ORDER[i].1, &ahead[i]);
                    k.pack(format, low, high)
                });
                match to {
                    Staged::Rows(staging) => staging.write_halves(stage, thread, pair, &packed),
                    Staged::Tma(staging) if self.store.spec.transposed => staging.write_halves_transposed(stage, thread, pair, &packed),
                    Staged::Tma(staging) => staging.write_halves(stage, thread, pair, &packed),
                }
            }
            None => {
                for ((b, half), ahead) in ORDER.into_iter().zip(ahead) {
                    let words = match (self.store.spec.epilogue.exact, self.store.spec.d()) {
                        (true, _) => [0, 1].map(|odd| sum.element(block + b, half, odd).get().bitcast::<u32>()),
                        (false, DType::I32) => {
                            self.pair(sum, block + b, half, ahead).map(|v| v.convert::<i32>(CvtRound::IntNearest).unsigned())
                        }
                        (false, _) => self.pair(sum, block + b, half, ahead).map(|value| value.bitcast::<u32>()),
                    };
                    let row = Fragment::<T>::row(thread) + 8 * half;
                    let column = Fragment::<T>::column(thread) + (16 * pair + 8 * b);
                    match to {
                        Staged::Rows(staging) => staging.write_pair(stage, row, column, &words),
                        Staged::Tma(staging) => staging.write_pair(stage, row, column, &words),
                    }
                }
            }
        }
    }

    /// Stores each element that lies in D.
    fn write_direct<T: Sum>(&self, sum: &Fragment<'k, T>) {
        let k = self.store.kernel;
        for half in 0..2 {
            let place = &self.places[half as usize];
            k.when(self.rows_inside[half as usize], || {
                for block in 0..self.store.spec.tile_columns / 8 {
                    let value = |odd: u32| T::to_f32(sum.element(block, half, odd).get());
                    if self.store.spec.epilogue.pairs {
                        k.when((self.column + (8 * block + 1)).lt(self.store.columns), || {
                            place.store_pair(place.apply_pair([value(0), value(1)], 8 * block), 8 * block);
                        });
                        continue;
                    }
                    for odd in 0..2 {
                        let right = 8 * block + odd;
                        k.when((self.column + right).lt(self.store.columns), || {
                            if self.store.spec.epilogue.exact {
                                place.store_exact(sum.element(block, half, odd).get().bitcast(), right);
                            } else {
                                place.store(place.apply(value(odd), right), right);
                            }
                        });
                    }
                }
            });
        }
    }
}

fn half_format(d: DType) -> Option<Packed> {
    match d {
        DType::Bf16 => Some(Packed::Bf16x2),
        DType::F16 => Some(Packed::F16x2),
        _ => None,
    }
}
