//! `C = A · B` on operands that are named by offset tables.
//!
//! Element `(i, k)` of an operand is `data[outer[i] + depth[k]]`. Strided matrices are of this form, and so are the pixels that a
//! convolution gathers: image offset plus tap offset. So one routine serves them all, and no matrix of gathered pixels is ever stored.
//!
//! The product is formed in blocks: a register tile of [`TILE_ROWS`] rows and up to three panels of [`Real::TILE_COLUMNS`] runs along at
//! most [`DEPTH`] of k. The tile reads panels that were packed into contiguous scratch, or an operand where it lies: rows of A that run
//! along k, or columns of B that run beside each other. Each element of C is one chain of multiply-adds a block, and the blocks are added
//! in ascending order of k. That order depends on the problem alone: not on the tile an element falls into, nor on how rows were given
//! to threads.

use pulp::{Arch, NullaryFnOnce, Simd, WithSimd};
use rayon::prelude::*;

use crate::real::Real;
use crate::scratch::Scratch;

/// Rows of the register tile, and of a panel of A.
pub(crate) const TILE_ROWS: usize = 8;
/// Steps of k between two additions into C: three panels of B of this depth (36 KiB) stay in a first-level cache of 48 KiB.
pub(crate) const DEPTH: usize = 192;
/// Rows of A packed at once: 96 KiB, for the second-level cache.
const BLOCK_ROWS: usize = 16 * TILE_ROWS;
/// Columns of B packed at once, whole tiles of three panels: 180 KiB.
const BLOCK_COLUMNS: usize = 240;
/// Runs along k from this mean length on are read where they lie.
const LONG_RUN: usize = 4;

/// An operand where it lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gather<'a, T> {
    pub(crate) data: &'a [T],
    /// Offset of each row of A or column of B.
    pub(crate) outer: &'a [usize],
    /// Offset of each k.
    pub(crate) depth: &'a [usize],
}

/// An operand, gathered block by block or packed whole beforehand.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operand<'a, T> {
    Gather(Gather<'a, T>),
    /// Panels as [`pack_whole`] lays them out, of an operand of this many rows (or columns).
    Packed {
        panels: &'a [T],
        outer: usize,
    },
}

/// Where the elements of C go: element `(i, j)` is `c[rows[i] + columns[j]]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target<'a> {
    pub(crate) rows: &'a [usize],
    pub(crate) columns: &'a [usize],
}

/// Elements that [`pack_whole`] writes.
pub(crate) fn packed_len(outer: usize, depth: usize, width: usize) -> usize {
    outer.next_multiple_of(width) * depth
}

/// Packs a whole operand, over all threads: for each block of [`DEPTH`], for each panel of `width`, `[k][width]`, anything beyond the edge.
pub(crate) fn pack_whole<T: Real>(gather: Gather<'_, T>, width: usize, panels: &mut [T]) {
    let block_len = gather.outer.len().next_multiple_of(width) * DEPTH;
    if gather.outer.is_empty() || gather.depth.is_empty() {
        return;
    }
    gather.depth.par_chunks(DEPTH).zip(panels.par_chunks_mut(block_len)).for_each(|(depth, panels)| {
        pack(gather.data, gather.outer, depth, width, panels);
    });
}

/// Packs one block.
fn pack<T: Real>(data: &[T], outer: &[usize], depth: &[usize], width: usize, panels: &mut [T]) {
    // With widths known here, a line is a few instructions and no call.
    match width {
        8 => pack_lines::<T, 8>(data, outer, depth, panels),
        _ => pack_lines::<T, 16>(data, outer, depth, panels),
    }
}

/// Rows that are packed together where they run along k; every width is a multiple of it.
const EIGHT: usize = 8;

fn pack_lines<T: Real, const WIDTH: usize>(data: &[T], outer: &[usize], depth: &[usize], panels: &mut [T]) {
    let depth_runs = runs(depth);
    let long_depth_runs = depth_runs.len() * 8 <= depth.len();
    for (outer, panel) in outer.chunks(WIDTH).zip(panels.chunks_exact_mut(WIDTH * depth.len())) {
        let lines = panel.as_chunks_mut::<WIDTH>().0;
        if outer.len() < WIDTH && !(long_depth_runs && outer.len() + EIGHT > WIDTH) {
            lines.fill([T::default(); WIDTH]);
        }
        if outer.len() == WIDTH && is_run(outer) {
            for (k, line) in depth.iter().zip(lines) {
                line.copy_from_slice(&data[outer[0] + k..][..WIDTH]);
            }
        } else if long_depth_runs {
            for (eight, outer) in outer.chunks(EIGHT).enumerate() {
                for run in &depth_runs {
                    // Beyond the edge the last one is read again.
                    let row = |i: usize| &data[outer[i.min(outer.len() - 1)] + run.offset..][..run.len];
                    let rows: [&[T]; EIGHT] = std::array::from_fn(row);
                    for (k, line) in lines[run.place..][..run.len].iter_mut().enumerate() {
                        let line = &mut line.as_chunks_mut::<EIGHT>().0[eight];
                        for i in 0..EIGHT {
                            line[i] = rows[i][k];
                        }
                    }
                }
            }
        } else {
            pack_pieces::<T, WIDTH>(data, &runs(outer), outer, depth, panel);
        }
    }
}

/// Packs one panel by the runs of consecutive offsets across it.
fn pack_pieces<T: Real, const WIDTH: usize>(data: &[T], pieces: &[Run], outer: &[usize], depth: &[usize], panel: &mut [T]) {
    let gather = pieces.len() * 2 > outer.len();
    for (i, &k) in depth.iter().enumerate() {
        let line = &mut panel[i * WIDTH..];
        if gather {
            for (place, &offset) in line.iter_mut().zip(outer) {
                *place = data[offset + k];
            }
            continue;
        }
        for piece in pieces {
            let (to, from) = (&mut line[piece.place..], &data[piece.offset + k..]);
            // A whole line costs less than a few of its elements. What is too much is written again: by the next piece or the next line.
            match (to.first_chunk_mut::<WIDTH>(), from.first_chunk::<WIDTH>()) {
                (Some(to), Some(from)) if outer.len() == WIDTH => *to = *from,
                _ => to[..piece.len].copy_from_slice(&from[..piece.len]),
            }
        }
    }
}

/// Consecutive offsets in a table.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// Where in the table.
    place: usize,
    offset: usize,
    len: usize,
}

fn runs(offsets: &[usize]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (place, &offset) in offsets.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if run.offset + run.len == offset => run.len += 1,
            _ => runs.push(Run { place, offset, len: 1 }),
        }
    }
    runs
}

fn is_run(offsets: &[usize]) -> bool {
    offsets.windows(2).all(|pair| pair[1] == pair[0] + 1)
}

/// Writes `C = A · B`, or adds it to C, for the rows `first_row ..` of A that `target.rows` lists. Runs on the calling thread. `depth` is
/// the common extent k; with none, C is filled with 0 (or left, if it is added to). `first_row` starts a panel if A is packed.
pub(crate) fn gemm<T: Real>(
    scratch: &Scratch,
    c: &mut [T],
    target: Target<'_>,
    (a, first_row): (Operand<'_, T>, usize),
    b: Operand<'_, T>,
    depth: usize,
    add: bool,
) {
    let plan = Plan::new(target.columns, a, b, target.rows.len(), depth);
    plan.run(scratch, c, target.rows, (a, first_row), b, add);
}

/// How products of operands with the same offsets are formed: found once, where many of them follow.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    columns: &'a [usize],
    depth: usize,
    /// Panels of B with their first offsets, and whether they are read where they lie.
    panels: Vec<Run>,
    b_in_place: bool,
    /// Runs along k of each block of the depth, if A is read where it lies.
    a_runs: Option<Vec<Vec<Run>>>,
    /// Runs of columns that lie together in C and in the sums, for each block of columns.
    pieces: Vec<Vec<Run>>,
}

impl<'a> Plan<'a> {
    /// For about `rows` rows. What data follow that of `b` in a later product must be as long.
    pub(crate) fn new<T: Real>(columns: &'a [usize], a: Operand<'_, T>, b: Operand<'_, T>, rows: usize, depth: usize) -> Plan<'a> {
        let width = T::TILE_COLUMNS;
        let in_place = b.panels_in_place(width, rows);
        let b_in_place = in_place.is_some();
        let panels = in_place.unwrap_or_else(|| {
            (0..columns.len()).step_by(width).map(|place| Run { place, offset: 0, len: width.min(columns.len() - place) }).collect()
        });
        let a_runs = match a {
            Operand::Gather(gather) => Some(gather.depth.chunks(DEPTH).map(runs).collect()),
            Operand::Packed { .. } => None,
        };
        let a_runs = a_runs.filter(|blocks: &Vec<Vec<Run>>| blocks.iter().map(Vec::len).sum::<usize>() * LONG_RUN <= depth);
        let pieces = panels.chunks(BLOCK_COLUMNS / width).map(|panels| {
            let mut pieces: Vec<Run> = Vec::new();
            for (i, panel) in panels.iter().enumerate() {
                for (j, &offset) in columns[panel.place..][..panel.len].iter().enumerate() {
                    let place = i * width + j;
                    match pieces.last_mut() {
                        Some(last) if last.place + last.len == place && last.offset + last.len == offset => last.len += 1,
                        _ => pieces.push(Run { place, offset, len: 1 }),
                    }
                }
            }
            pieces
        });
        Plan { columns, depth, pieces: pieces.collect(), panels, b_in_place, a_runs }
    }

    /// As [`gemm`], with `a` and `b` of the same offsets as those planned for.
    pub(crate) fn run<T: Real>(
        &self,
        scratch: &Scratch,
        c: &mut [T],
        target_rows: &[usize],
        (a, first_row): (Operand<'_, T>, usize),
        b: Operand<'_, T>,
        add: bool,
    ) {
        let (row_count, column_count, depth) = (target_rows.len(), self.columns.len(), self.depth);
        if row_count == 0 || column_count == 0 {
            return;
        }
        if depth == 0 {
            if !add {
                for row in target_rows {
                    for column in self.columns {
                        c[row + column] = T::default();
                    }
                }
            }
            return;
        }
        let width = T::TILE_COLUMNS;
        let arch = Arch::new();
        let needs = |operand: &Operand<'_, T>, in_place: bool, len: usize| match operand {
            Operand::Gather(_) if !in_place => len,
            _ => 0,
        };
        let a_len = packed_len(row_count.min(BLOCK_ROWS), depth.min(DEPTH), TILE_ROWS);
        let b_len = packed_len(column_count.min(BLOCK_COLUMNS), depth.min(DEPTH), width);
        let mut a_scratch = T::pool(scratch).lend(needs(&a, self.a_runs.is_some(), a_len));
        let mut b_scratch = T::pool(scratch).lend(needs(&b, self.b_in_place, b_len));
        // Sums are formed where their rows lie close together: rows of C may be a power of two apart, and then all fall into the same few
        // lines of the cache. The odd panel between two rows keeps them apart here.
        let stride = self.panels.len().min(BLOCK_COLUMNS / width) * width + width;
        let mut sums = T::pool(scratch).lend(row_count * stride);
        for (panels, pieces) in self.panels.chunks(BLOCK_COLUMNS / width).zip(&self.pieces) {
            let (first_column, last) = (panels[0].place, panels[panels.len() - 1]);
            let columns = first_column..last.place + last.len;
            for (block_k, first_k) in (0..depth).step_by(DEPTH).enumerate() {
                let k = first_k..depth.min(first_k + DEPTH);
                let right = match b {
                    Operand::Gather(Gather { data, depth, .. }) if self.b_in_place => {
                        Right::InPlace { data, depth: &depth[k.clone()], panels }
                    }
                    _ => Right::Panels(b.block(columns.clone(), k.clone(), width, &mut b_scratch)),
                };
                for block in (0..row_count).step_by(BLOCK_ROWS) {
                    let rows = block..row_count.min(block + BLOCK_ROWS);
                    let a_rows = first_row + rows.start..first_row + rows.end;
                    let left = match (&self.a_runs, a) {
                        (Some(runs), Operand::Gather(Gather { data, outer, .. })) => {
                            Left::InPlace { data, rows: &outer[a_rows], runs: &runs[block_k] }
                        }
                        _ => Left::Panels(a.block(a_rows, k.clone(), TILE_ROWS, &mut a_scratch)),
                    };
                    let sums = &mut sums[rows.start * stride..];
                    let (rows, panels) = (rows.len(), panels.len());
                    arch.dispatch(Block { sums, stride, rows, panels, depth: k.len(), left, right, add: first_k > 0 });
                }
            }
            for (&row, sums) in target_rows.iter().zip(sums.chunks_exact(stride)) {
                for piece in pieces {
                    let (to, from) = (&mut c[row + piece.offset..][..piece.len], &sums[piece.place..][..piece.len]);
                    match (to, from) {
                        (to, from) if add => to.iter_mut().zip(from).for_each(|(to, from)| *to += *from),
                        ([to], [from]) => *to = *from,
                        (to, from) => to.copy_from_slice(from),
                    }
                }
            }
        }
    }
}

impl<T: Real> Operand<'_, T> {
    /// The panels of `outer` and `k`. `outer` starts at a panel.
    fn block<'s>(&'s self, outer: std::ops::Range<usize>, k: std::ops::Range<usize>, width: usize, scratch: &'s mut [T]) -> &'s [T] {
        match self {
            Operand::Gather(gather) => {
                let len = packed_len(outer.len(), k.len(), width);
                pack(gather.data, &gather.outer[outer], &gather.depth[k], width, &mut scratch[..len]);
                &scratch[..len]
            }
            Operand::Packed { panels, outer: whole } => {
                let block = &panels[k.start * whole.next_multiple_of(width)..];
                &block[outer.start * k.len()..][..packed_len(outer.len(), k.len(), width)]
            }
        }
    }

    /// Panels of columns that lie beside each other, if reading them in place costs less than packing them for `rows` rows.
    fn panels_in_place(&self, width: usize, rows: usize) -> Option<Vec<Run>> {
        let Operand::Gather(gather) = self else { return None };
        let mut panels: Vec<Run> = Vec::new();
        for run in runs(gather.outer) {
            panels.extend((0..run.len).step_by(width).map(|first| Run {
                place: run.place + first,
                offset: run.offset + first,
                len: width.min(run.len - first),
            }));
        }
        // Packing an element costs about as much as twenty rows of a tile; what a panel lacks in columns costs all rows.
        let empty = panels.len() * width - gather.outer.len();
        if empty * rows > 20 * gather.outer.len() {
            return None;
        }
        // A panel is read in whole vectors, which must not reach beyond the end.
        let last = panels.iter().map(|panel| panel.offset).max()? + gather.depth.iter().max()?;
        (last + width <= gather.data.len()).then_some(panels)
    }
}

/// Rows of A, for one block.
#[derive(Clone, Copy)]
enum Left<'a, T> {
    Panels(&'a [T]),
    InPlace { data: &'a [T], rows: &'a [usize], runs: &'a [Run] },
}

/// Columns of B, for one block.
#[derive(Clone, Copy)]
enum Right<'a, T> {
    Panels(&'a [T]),
    InPlace { data: &'a [T], depth: &'a [usize], panels: &'a [Run] },
}

/// One block of sums.
struct Block<'a, T> {
    sums: &'a mut [T],
    /// Elements from row to row of the sums.
    stride: usize,
    rows: usize,
    panels: usize,
    depth: usize,
    left: Left<'a, T>,
    right: Right<'a, T>,
    add: bool,
}

impl<T: Real> WithSimd for Block<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // Vectors in a row of a panel.
        match T::TILE_COLUMNS * size_of::<T>() / size_of::<T::Vector<S>>() {
            1 => self.wide_tiles::<S>(simd),
            2 => self.tiles::<S, 2>(simd),
            4 => self.tiles::<S, 4>(simd),
            8 => self.tiles::<S, 8>(simd),
            _ => self.tiles::<S, 16>(simd),
        }
    }
}

/// Half a panel of A: as many rows as sixteen registers hold, and what few rows need no more than.
const HALF: usize = TILE_ROWS / 2;

impl<'a, T: Real> Block<'a, T> {
    /// Where a panel's row is one vector, there are 32 of them: 24 hold sums.
    #[inline(always)]
    fn wide_tiles<S: Simd>(mut self, simd: S) {
        let mut panel = 0;
        while panel < self.panels {
            let count = match self.panels - panel {
                4 => 2,
                rest => rest.min(3),
            };
            for row in (0..self.rows).step_by(TILE_ROWS) {
                match (count, self.rows - row > HALF) {
                    (1, true) => self.tile::<S, 1, 1, TILE_ROWS>(simd, row, panel),
                    (2, true) => self.tile::<S, 1, 2, TILE_ROWS>(simd, row, panel),
                    (_, true) => self.tile::<S, 1, 3, TILE_ROWS>(simd, row, panel),
                    (1, false) => self.tile::<S, 1, 1, HALF>(simd, row, panel),
                    (2, false) => self.tile::<S, 1, 2, HALF>(simd, row, panel),
                    (_, false) => self.tile::<S, 1, 3, HALF>(simd, row, panel),
                }
            }
            panel += count;
        }
    }

    #[inline(always)]
    fn tiles<S: Simd, const VECTORS: usize>(mut self, simd: S) {
        for panel in 0..self.panels {
            for row in (0..self.rows).step_by(HALF) {
                self.tile::<S, VECTORS, 1, HALF>(simd, row, panel);
            }
        }
    }

    /// The tile at `row` and `panel`. Not inlined: beside other kernels in one function, its sums would not all be kept in registers.
    #[inline(never)]
    fn tile<S: Simd, const VECTORS: usize, const PANELS: usize, const ROWS: usize>(&mut self, simd: S, row: usize, panel: usize) {
        let width = T::TILE_COLUMNS;
        let (left, depth) = (self.left, self.depth);
        let place = Place {
            lines: &mut self.sums[row * self.stride + panel * width..],
            stride: self.stride,
            rows: ROWS.min(self.rows - row),
            add: self.add,
        };
        match self.right {
            Right::Panels(b) => {
                let mut panels: [&[[T::Vector<S>; VECTORS]]; PANELS] = [&[]; PANELS];
                for (p, place) in panels.iter_mut().enumerate() {
                    *place = T::vectors::<S>(&b[(panel + p) * width * depth..][..width * depth]).as_chunks().0;
                }
                Self::tile_of::<S, _, VECTORS, PANELS, ROWS>(left, depth, simd, row, PackedColumns { panels }, place);
            }
            Right::InPlace { data, depth: offsets, panels } => {
                let mut first = [0; PANELS];
                for (place, panel) in first.iter_mut().zip(&panels[panel..]) {
                    *place = panel.offset;
                }
                Self::tile_of::<S, _, VECTORS, PANELS, ROWS>(left, depth, simd, row, ColumnsInPlace { data, depth: offsets, first }, place);
            }
        }
    }

    #[inline(always)]
    fn tile_of<S: Simd, B: Columns<T, S, VECTORS, PANELS>, const VECTORS: usize, const PANELS: usize, const ROWS: usize>(
        left: Left<'a, T>,
        depth: usize,
        simd: S,
        row: usize,
        b: B,
        place: Place<'_, T>,
    ) {
        match left {
            Left::Panels(a) => {
                let a = a[row / TILE_ROWS * TILE_ROWS * depth..][..TILE_ROWS * depth].as_chunks().0;
                simd.vectorize(PackedTile::<T, S, B, VECTORS, PANELS, ROWS> { simd, a, first: row % TILE_ROWS, b, place });
            }
            Left::InPlace { data, rows, runs } => {
                let mut first = [0; ROWS];
                for (i, first) in first.iter_mut().enumerate() {
                    // Beyond the last row it is read again; those sums are left.
                    *first = rows[(row + i).min(rows.len() - 1)];
                }
                simd.vectorize(RowsTile::<T, S, B, VECTORS, PANELS, ROWS> { simd, data, rows: first, runs, b, place });
            }
        }
    }
}

/// Where a tile's sums go.
struct Place<'a, T> {
    lines: &'a mut [T],
    stride: usize,
    rows: usize,
    add: bool,
}

/// The sums of a tile, in registers.
type Sums<V, const VECTORS: usize, const PANELS: usize, const ROWS: usize> = [[[V; VECTORS]; PANELS]; ROWS];

impl<T: Real> Place<'_, T> {
    #[inline(always)]
    fn put<S: Simd, const VECTORS: usize, const PANELS: usize, const ROWS: usize>(
        self,
        simd: S,
        sums: Sums<T::Vector<S>, VECTORS, PANELS, ROWS>,
    ) {
        for (line, sums) in self.lines.chunks_mut(self.stride).zip(&sums).take(self.rows) {
            let line = T::vectors_mut::<S>(&mut line[..PANELS * T::TILE_COLUMNS]).as_chunks_mut::<VECTORS>().0;
            for (line, sums) in line.iter_mut().zip(sums) {
                for (place, &sum) in line.iter_mut().zip(sums) {
                    *place = if self.add { T::add_vectors(simd, *place, sum) } else { sum };
                }
            }
        }
    }
}

/// One step of k: elements of A against a row of B.
#[inline(always)]
fn step<T: Real, S: Simd, const VECTORS: usize, const PANELS: usize, const ROWS: usize>(
    simd: S,
    sums: &mut Sums<T::Vector<S>, VECTORS, PANELS, ROWS>,
    a: [T; ROWS],
    b: [[T::Vector<S>; VECTORS]; PANELS],
) {
    for i in 0..ROWS {
        let a = T::splat(simd, a[i]);
        for p in 0..PANELS {
            for j in 0..VECTORS {
                sums[i][p][j] = T::multiply_add(simd, a, b[p][j], sums[i][p][j]);
            }
        }
    }
}

/// Columns of B in a tile.
trait Columns<T: Real, S: Simd, const VECTORS: usize, const PANELS: usize>: Copy {
    /// Those of some steps of k.
    fn of(self, k: std::ops::Range<usize>) -> Self;

    /// Row `k` of panel `p`.
    fn at(&self, k: usize, p: usize) -> [T::Vector<S>; VECTORS];
}

#[derive(Clone, Copy)]
struct PackedColumns<'a, V, const VECTORS: usize, const PANELS: usize> {
    panels: [&'a [[V; VECTORS]]; PANELS],
}

impl<T: Real, S: Simd, const VECTORS: usize, const PANELS: usize> Columns<T, S, VECTORS, PANELS>
    for PackedColumns<'_, T::Vector<S>, VECTORS, PANELS>
{
    #[inline(always)]
    fn of(mut self, k: std::ops::Range<usize>) -> Self {
        for p in 0..PANELS {
            self.panels[p] = &self.panels[p][k.start..][..k.end - k.start];
        }
        self
    }

    #[inline(always)]
    fn at(&self, k: usize, p: usize) -> [T::Vector<S>; VECTORS] {
        self.panels[p][k]
    }
}

#[derive(Clone, Copy)]
struct ColumnsInPlace<'a, T, const PANELS: usize> {
    data: &'a [T],
    depth: &'a [usize],
    /// Offset of each panel.
    first: [usize; PANELS],
}

impl<T: Real, S: Simd, const VECTORS: usize, const PANELS: usize> Columns<T, S, VECTORS, PANELS> for ColumnsInPlace<'_, T, PANELS> {
    #[inline(always)]
    fn of(mut self, k: std::ops::Range<usize>) -> Self {
        self.depth = &self.depth[k.start..][..k.end - k.start];
        self
    }

    #[inline(always)]
    fn at(&self, k: usize, p: usize) -> [T::Vector<S>; VECTORS] {
        let line = &self.data[self.first[p] + self.depth[k]..][..T::TILE_COLUMNS];
        T::vectors::<S>(line).as_chunks().0[0]
    }
}

/// A tile of packed rows.
struct PackedTile<'a, T, S, B, const VECTORS: usize, const PANELS: usize, const ROWS: usize> {
    simd: S,
    a: &'a [[T; TILE_ROWS]],
    /// The first row in the panel.
    first: usize,
    b: B,
    place: Place<'a, T>,
}

impl<T: Real, S: Simd, B: Columns<T, S, VECTORS, PANELS>, const VECTORS: usize, const PANELS: usize, const ROWS: usize> NullaryFnOnce
    for PackedTile<'_, T, S, B, VECTORS, PANELS, ROWS>
{
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let simd = self.simd;
        let mut sums = zeros::<T, S, VECTORS, PANELS, ROWS>(simd);
        let b = self.b.of(0..self.a.len());
        for k in 0..self.a.len() {
            let b = columns(simd, &b, k);
            step(simd, &mut sums, some_rows(&self.a[k], self.first), b);
        }
        self.place.put(simd, sums);
    }
}

/// A tile of rows where they lie.
struct RowsTile<'a, T, S, B, const VECTORS: usize, const PANELS: usize, const ROWS: usize> {
    simd: S,
    data: &'a [T],
    /// Offset of each row.
    rows: [usize; ROWS],
    runs: &'a [Run],
    b: B,
    place: Place<'a, T>,
}

impl<T: Real, S: Simd, B: Columns<T, S, VECTORS, PANELS>, const VECTORS: usize, const PANELS: usize, const ROWS: usize> NullaryFnOnce
    for RowsTile<'_, T, S, B, VECTORS, PANELS, ROWS>
{
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let simd = self.simd;
        let mut sums = zeros::<T, S, VECTORS, PANELS, ROWS>(simd);
        for run in self.runs {
            let mut rows: [&[T]; ROWS] = [&[]; ROWS];
            for (row, first) in rows.iter_mut().zip(self.rows) {
                *row = &self.data[first + run.offset..][..run.len];
            }
            let b = self.b.of(run.place..run.place + run.len);
            for k in 0..run.len {
                let b = columns(simd, &b, k);
                let mut a = [T::default(); ROWS];
                for (a, row) in a.iter_mut().zip(rows) {
                    *a = row[k];
                }
                step(simd, &mut sums, a, b);
            }
        }
        self.place.put(simd, sums);
    }
}

/// Row `k` of every panel.
#[inline(always)]
fn columns<T: Real, S: Simd, B: Columns<T, S, VECTORS, PANELS>, const VECTORS: usize, const PANELS: usize>(
    simd: S,
    b: &B,
    k: usize,
) -> [[T::Vector<S>; VECTORS]; PANELS] {
    let mut columns = [[T::splat(simd, T::default()); VECTORS]; PANELS];
    for (p, columns) in columns.iter_mut().enumerate() {
        *columns = b.at(k, p);
    }
    columns
}

#[inline(always)]
fn zeros<T: Real, S: Simd, const VECTORS: usize, const PANELS: usize, const ROWS: usize>(
    simd: S,
) -> Sums<T::Vector<S>, VECTORS, PANELS, ROWS> {
    [[[T::splat(simd, T::default()); VECTORS]; PANELS]; ROWS]
}

/// The rows of a tile, from a panel's.
#[inline(always)]
fn some_rows<T: Real, const ROWS: usize>(panel: &[T; TILE_ROWS], first: usize) -> [T; ROWS] {
    let mut rows = [T::default(); ROWS];
    for i in 0..ROWS {
        rows[i] = if ROWS == TILE_ROWS { panel[i] } else { panel[(first + i) % TILE_ROWS] };
    }
    rows
}
