//! `C = A · B` on operands that are named by offset tables.
//!
//! Element `(i, k)` of an operand is `data[outer[i] + depth[k]]`. Strided matrices are of this form, and so are the pixels that a
//! convolution gathers: image offset plus tap offset. So one routine packs them all, and no matrix of gathered pixels is ever stored.
//!
//! The product is formed in blocks: panels of A and of B are packed into contiguous scratch, and a register tile of
//! [`TILE_ROWS`] × [`Real::TILE_COLUMNS`] runs along at most [`DEPTH`] of k. Each element of C is one chain of multiply-adds a block, and
//! the blocks are added in ascending order of k. That order depends on the problem alone: not on the tile an element falls into, nor
//! on how rows were given to threads.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use crate::real::Real;
use crate::scratch::Scratch;

/// Rows of the register tile.
pub(crate) const TILE_ROWS: usize = 6;
/// Steps of k between two additions into C: a panel of B of this depth (16 KiB) stays in the first-level cache.
pub(crate) const DEPTH: usize = 256;
/// Rows of A packed at once: 96 KiB, for the second-level cache.
const BLOCK_ROWS: usize = 16 * TILE_ROWS;
/// Columns of B packed at once: 256 KiB.
const BLOCK_COLUMNS: usize = 256;

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

/// Packs a whole operand, over all threads: for each block of [`DEPTH`], for each panel of `width`, `[k][width]`, zeros beyond the edge.
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
    // (place along the depth, offset, length) of each run of consecutive offsets.
    let mut depth_runs: Vec<(usize, usize, usize)> = Vec::new();
    for (i, &offset) in depth.iter().enumerate() {
        match depth_runs.last_mut() {
            Some((_, start, len)) if *start + *len == offset => *len += 1,
            _ => depth_runs.push((i, offset, 1)),
        }
    }
    let long_depth_runs = depth_runs.len() * 8 <= depth.len();
    for (outer, panel) in outer.chunks(width).zip(panels.chunks_exact_mut(width * depth.len())) {
        let whole = outer.len() == width;
        if whole && is_run(outer) {
            let first = outer[0];
            for (k, line) in depth.iter().zip(panel.chunks_exact_mut(width)) {
                line.copy_from_slice(&data[first + k..first + k + width]);
            }
        } else if long_depth_runs {
            if !whole {
                panel.fill(T::default());
            }
            for &(place, offset, len) in &depth_runs {
                let lines = &mut panel[place * width..(place + len) * width];
                for (i, &row) in outer.iter().enumerate() {
                    let source = &data[row + offset..row + offset + len];
                    for (line, &value) in lines.chunks_exact_mut(width).zip(source) {
                        line[i] = value;
                    }
                }
            }
        } else {
            pack_pieces(data, outer, depth, width, panel);
        }
    }
}

/// Packs one panel by the runs of consecutive offsets across it.
fn pack_pieces<T: Real>(data: &[T], outer: &[usize], depth: &[usize], width: usize, panel: &mut [T]) {
    // At most `width` pieces: (place in the line, offset, length).
    let mut pieces = [(0usize, 0usize, 0usize); 16];
    let mut count = 0;
    for (i, &offset) in outer.iter().enumerate() {
        match &mut pieces[..count] {
            [.., (_, start, len)] if *start + *len == offset => *len += 1,
            _ => {
                pieces[count] = (i, offset, 1);
                count += 1;
            }
        }
    }
    let gather = count * 2 > outer.len();
    for (&k, line) in depth.iter().zip(panel.chunks_exact_mut(width)) {
        if gather {
            for (place, &offset) in line.iter_mut().zip(outer) {
                *place = data[offset + k];
            }
        } else {
            for &(place, offset, len) in &pieces[..count] {
                for (to, from) in line[place..place + len].iter_mut().zip(&data[offset + k..offset + k + len]) {
                    *to = *from;
                }
            }
        }
        line[outer.len()..].fill(T::default());
    }
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
    let (row_count, column_count) = (target.rows.len(), target.columns.len());
    if row_count == 0 || column_count == 0 {
        return;
    }
    if depth == 0 {
        if !add {
            for row in target.rows {
                for column in target.columns {
                    c[row + column] = T::default();
                }
            }
        }
        return;
    }
    let width = T::TILE_COLUMNS;
    let arch = Arch::new();
    let needs = |operand: &Operand<'_, T>, len: usize| if matches!(operand, Operand::Gather(_)) { len } else { 0 };
    let block_depth = depth.min(DEPTH);
    let mut a_scratch = T::pool(scratch).lend(needs(&a, packed_len(row_count.min(BLOCK_ROWS), block_depth, TILE_ROWS)));
    let mut b_scratch = T::pool(scratch).lend(needs(&b, packed_len(column_count.min(BLOCK_COLUMNS), block_depth, width)));
    // A sum of several blocks is formed where its rows lie close together: rows of C may be a power of two apart, and then all fall
    // into the same few lines of the cache. The odd line between two rows keeps them apart here.
    let stride = column_count.min(BLOCK_COLUMNS) + width;
    let is_long = depth > DEPTH;
    let mut sums = T::pool(scratch).lend(if is_long { row_count * stride } else { 0 });
    let sum_rows: Vec<usize> = (0..if is_long { row_count } else { 0 }).map(|i| i * stride).collect();
    let sum_columns: Vec<usize> = (0..stride).collect();
    for first_column in (0..column_count).step_by(BLOCK_COLUMNS) {
        let columns = &target.columns[first_column..column_count.min(first_column + BLOCK_COLUMNS)];
        for first_k in (0..depth).step_by(DEPTH) {
            let k = first_k..depth.min(first_k + DEPTH);
            let b_panels = b.block(first_column..first_column + columns.len(), k.clone(), width, &mut b_scratch);
            for block in (0..row_count).step_by(BLOCK_ROWS) {
                let block_end = row_count.min(block + BLOCK_ROWS);
                let a_panels = a.block(first_row + block..first_row + block_end, k.clone(), TILE_ROWS, &mut a_scratch);
                let (a, b, depth) = (a_panels, b_panels, k.len());
                arch.dispatch(if is_long {
                    let (rows, columns) = (&sum_rows[block..block_end], &sum_columns[..columns.len()]);
                    Block { c: &mut sums, rows, columns, depth, a, b, add: first_k > 0 }
                } else {
                    Block { c: &mut *c, rows: &target.rows[block..block_end], columns, depth, a, b, add }
                });
            }
        }
        if is_long {
            for (&row, sums) in target.rows.iter().zip(sums.chunks_exact(stride)) {
                let row = &mut c[row..];
                if !add && is_run(columns) {
                    row[columns[0]..columns[0] + columns.len()].copy_from_slice(&sums[..columns.len()]);
                    continue;
                }
                for (&column, &sum) in columns.iter().zip(sums) {
                    row[column] = if add { row[column] + sum } else { sum };
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
}

/// One block of C from packed panels.
struct Block<'a, T> {
    c: &'a mut [T],
    rows: &'a [usize],
    columns: &'a [usize],
    depth: usize,
    a: &'a [T],
    b: &'a [T],
    add: bool,
}

impl<T: Real> WithSimd for Block<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // Vectors in a row of the tile.
        match T::TILE_COLUMNS * size_of::<T>() / size_of::<T::Vector<S>>() {
            1 => self.tiles::<S, 1>(simd),
            2 => self.tiles::<S, 2>(simd),
            4 => self.tiles::<S, 4>(simd),
            8 => self.tiles::<S, 8>(simd),
            _ => self.tiles::<S, 16>(simd),
        }
    }
}

impl<T: Real> Block<'_, T> {
    #[inline(always)]
    fn tiles<S: Simd, const VECTORS: usize>(self, simd: S) {
        let width = T::TILE_COLUMNS;
        for (b, columns) in self.b.chunks_exact(width * self.depth).zip(self.columns.chunks(width)) {
            let b = T::vectors::<S>(b).as_chunks::<VECTORS>().0;
            let run = columns.len() == width && columns[width - 1] == columns[0] + width - 1 && columns.windows(2).all(|c| c[0] < c[1]);
            for (tile, a) in self.a.chunks_exact(TILE_ROWS * self.depth).enumerate() {
                let sums = tile_product::<T, S, VECTORS>(simd, a.as_chunks::<TILE_ROWS>().0, b);
                for (&row, sums) in self.rows[tile * TILE_ROWS..].iter().zip(&sums) {
                    let row = &mut self.c[row..];
                    if run {
                        let row = T::vectors_mut::<S>(&mut row[columns[0]..columns[0] + width]);
                        if self.add {
                            for (place, &sum) in row.iter_mut().zip(sums) {
                                *place = T::add_vectors(simd, *place, sum);
                            }
                        } else {
                            row.copy_from_slice(sums);
                        }
                    } else {
                        let sums: &[T] = bytemuck::cast_slice(sums);
                        for (&column, &sum) in columns.iter().zip(sums) {
                            let place = &mut row[column];
                            *place = if self.add { *place + sum } else { sum };
                        }
                    }
                }
            }
        }
    }
}

/// The register tile: every step of k broadcasts six elements of A against a row of B.
#[inline(always)]
fn tile_product<T: Real, S: Simd, const VECTORS: usize>(
    simd: S,
    a: &[[T; TILE_ROWS]],
    b: &[[T::Vector<S>; VECTORS]],
) -> [[T::Vector<S>; VECTORS]; TILE_ROWS] {
    let mut sums = [[T::splat(simd, T::default()); VECTORS]; TILE_ROWS];
    for (a, b) in a.iter().zip(b) {
        for i in 0..TILE_ROWS {
            let a = T::splat(simd, a[i]);
            for j in 0..VECTORS {
                sums[i][j] = T::multiply_add(simd, a, b[j], sums[i][j]);
            }
        }
    }
    sums
}
