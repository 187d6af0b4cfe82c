//! Matrix multiplication: `D = epilogue(alpha · A · B + beta · C)` ([`verdigris_graph::GemmProblem`] has the formula in full).

mod factors;
mod mma;
mod simt;
mod wgmma;

use verdigris_graph::{GemmProblem, Order, Problem};
use verdigris_kir::params::{Arguments, Divide};
use verdigris_kir::program::{KernelRef, Launch, Program};

use crate::algorithm::Listed;
use crate::engine::{Engine, EngineId, Reason, Refusal, empty_program};
use crate::layout::batch::Chunk;
use crate::layout::transposed::transposed;

/// The engines of this family. The table is all there is to registering one.
pub static ENGINES: &[&dyn Engine] = &[HOPPER, &Listed::<mma::Mma>::new(), &Listed::<simt::Simt>::new()];

/// The engine on Hopper's tensor cores, and what it offers for sums of 16-bit products that stay in f32.
pub(crate) const HOPPER: &dyn Engine = &Listed::<wgmma::Wgmma>::new();
pub(crate) use wgmma::{F32_TERMS, Planes, TERM_TYPE, forms_sums, of_planes, of_terms, over_planes, sums};

/// The product that a problem is, or the engine's refusal of anything else.
#[track_caller]
fn product(id: EngineId, problem: &Problem) -> Result<&GemmProblem, Refusal> {
    match problem {
        Problem::Gemm(problem) => Ok(problem),
        other => Err(id.refusal(Reason::Problem, format_args!("{}, taken is gemm", other.kind()))),
    }
}

/// The problem with a D that is not column-major: a column-major D is the row-major D of the transposed problem.
fn along_rows_of_d(problem: &GemmProblem) -> GemmProblem {
    if problem.d.order() == Order::ColumnMajor { transposed(problem) } else { problem.clone() }
}

/// A part of D that one launch covers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Part {
    first_row: u64,
    first_column: u64,
    rows: u32,
    columns: u32,
    row_tiles: u32,
    column_tiles: u32,
}

verdigris_kir::parameters! {
    /// What CTAs that compute a tile each have in common.
    #[derive(Clone, Copy, Debug)]
    struct Tiles / #[derive(Clone, Copy, Debug)] TilesArgs of () as _spec {
        /// Of the part of D.
        rows: u32,
        columns: u32,
        column_tiles: Divide,
        /// K-tiles that k has, and the depth of the last one.
        k_tiles: u32,
        last_depth: u32,
    }
}

/// The program of a kernel whose CTAs compute a tile each: one launch a chunk of the batch and part of D, with K-tiles of k of `depth`.
fn tiled(
    problem: &GemmProblem,
    kernel: &KernelRef,
    tile: [u32; 2],
    depth: u32,
    arguments: impl Fn(TilesArgs, &Chunk, &Part) -> Arguments,
) -> Program {
    let mut program = empty_program(&problem.slots());
    if problem.is_empty() {
        return program;
    }
    let depth = u64::from(depth);
    let (k_tiles, last_depth) = (problem.k.div_ceil(depth) as u32, (problem.k - problem.k.saturating_sub(1) / depth * depth) as u32);
    for chunk in Chunk::all(&problem.batch) {
        for part in split_tiles(problem.m, problem.n, tile) {
            let Part { rows, columns, row_tiles, column_tiles, .. } = part;
            let arguments = arguments(TilesArgs { rows, columns, column_tiles, k_tiles, last_depth }, &chunk, &part);
            let [y, z] = chunk.grid();
            program.launch(Launch::new(kernel.clone(), [row_tiles * column_tiles, y, z], arguments));
        }
    }
    program
}

/// Parts of D, and so launches, at the most: a program of more is no longer made in the time that a plan may take.
const MOST_PARTS: u64 = 1024;

/// Rows and columns of the largest part of D: they count in 31 bits, and its tiles fit grid x.
fn part_extents(m: u64, n: u64, [tile_rows, tile_columns]: [u32; 2]) -> [u64; 2] {
    const LINE_TILES: u64 = 1 << 23;
    const TILES: u64 = 1 << 30;
    let (tile_rows, tile_columns) = (u64::from(tile_rows), u64::from(tile_columns));
    let column_tiles = n.div_ceil(tile_columns).clamp(1, LINE_TILES);
    let row_tiles = m.div_ceil(tile_rows).min(LINE_TILES).min(TILES / column_tiles).max(1);
    [row_tiles * tile_rows, column_tiles * tile_columns]
}

/// How many parts [`split_tiles`] cuts D into, counted and not made.
fn part_count(m: u64, n: u64, tile: [u32; 2]) -> u64 {
    let [part_rows, part_columns] = part_extents(m, n, tile);
    m.div_ceil(part_rows).saturating_mul(n.div_ceil(part_columns))
}

/// Cuts D into parts. One but for giants; engines refuse extents that have more than [`MOST_PARTS`] with each tile.
fn split_tiles(m: u64, n: u64, tile: [u32; 2]) -> Vec<Part> {
    let [part_rows, part_columns] = part_extents(m, n, tile);
    let [tile_rows, tile_columns] = tile.map(u64::from);
    let mut parts = Vec::new();
    for first_row in (0..m).step_by(part_rows as usize) {
        for first_column in (0..n).step_by(part_columns as usize) {
            let rows = part_rows.min(m - first_row);
            let columns = part_columns.min(n - first_column);
            parts.push(Part {
                first_row,
                first_column,
                rows: rows as u32,
                columns: columns as u32,
                row_tiles: rows.div_ceil(tile_rows) as u32,
                column_tiles: columns.div_ceil(tile_columns) as u32,
            });
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_d_once() {
        let part = |m, n| split_tiles(m, n, [128, 64]);
        let one = Part { first_row: 0, first_column: 0, rows: 129, columns: 64, row_tiles: 2, column_tiles: 1 };
        assert_eq!(part(129, 64), [one]);
        assert_eq!(part(0, 64), []);
        assert_eq!([part_count(0, 64, [128, 64]), part_count(129, 64, [128, 64]), part_count(1 << 63, 1 << 63, [1, 1])], [0, 1, u64::MAX]);
        for (m, n) in [(1u64 << 33, 100), (100, 1 << 33), ((1 << 31) + 5, 3000)] {
            let parts = part(m, n);
            assert!(parts.len() > 1);
            assert_eq!(parts.iter().map(|p| u128::from(p.rows) * u128::from(p.columns)).sum::<u128>(), u128::from(m) * u128::from(n));
            assert!(parts.iter().all(|p| u64::from(p.row_tiles) * u64::from(p.column_tiles) < 1 << 31));
            assert_eq!(part_count(m, n, [128, 64]), parts.len() as u64);
        }
    }
}
