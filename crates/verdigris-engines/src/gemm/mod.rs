//! Matrix multiplication: `D = epilogue(alpha · A · B + beta · C)` ([`verdigris_graph::GemmProblem`] has the formula in full).

mod factors;
mod mma;
mod simt;
mod wgmma;

use verdigris_graph::{GemmProblem, Order, Problem, Slot};
use verdigris_kir::ir::Ty;
use verdigris_kir::program::{Arg, KernelRef, Launch, Residency, Step};

use crate::engine::{Engine, EngineId, Reason, Refusal};
use crate::parts::batch::Chunk;
use crate::parts::transposed::transposed;

/// The engines of this family. The table is all there is to registering one.
pub static ENGINES: &[&dyn Engine] = &[&wgmma::Wgmma, &mma::Mma, &simt::Simt];

/// The engine on Hopper's tensor cores, and what it offers for sums of 16-bit products that stay in f32.
pub(crate) static HOPPER: &dyn Engine = &wgmma::Wgmma;
pub(crate) use wgmma::{forms_sums, sums};

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

/// Bytes that must cross the memory bus if each matrix does so once.
fn traffic_bytes(problem: &GemmProblem) -> f64 {
    let batch = problem.batch_count() as f64;
    problem
        .matrices()
        .iter()
        .map(|(_, matrix, rows, columns)| {
            let rows = if matrix.row_stride == 0 { 1 } else { *rows };
            let columns = if matrix.column_stride == 0 { 1 } else { *columns };
            rows as f64 * columns as f64 * batch * matrix.dtype.bytes() as f64
        })
        .sum()
}

/// The alignment of each buffer slot: what the elements of A, B and block factors need, and what `more` says.
fn buffer_alignments(problem: &GemmProblem, more: impl IntoIterator<Item = (Slot, u64)>) -> Vec<u64> {
    let slots = problem.slots().iter().map(|slot| slot.0 as usize + 1).max().unwrap_or(0);
    let mut alignments = vec![1; slots];
    let elements = problem.matrices().into_iter().map(|(_, matrix, ..)| (matrix.slot, matrix.dtype.bytes() as u64));
    for (slot, bytes) in elements.chain(more) {
        let alignment: &mut u64 = &mut alignments[slot.0 as usize];
        *alignment = bytes.max(*alignment);
    }
    alignments
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

/// The launches of a kernel whose CTAs compute a tile each: one launch a chunk of the batch and part of D. Its first arguments are the part's
/// rows and columns, its columns of tiles, and the slabs of `depth` that k has with the depth of the last one; `more` adds the others.
fn launches(
    problem: &GemmProblem,
    kernel: &KernelRef,
    tile: [u32; 2],
    depth: u32,
    more: impl Fn(&mut Vec<Arg>, &Chunk, &Part),
) -> Vec<Step> {
    if problem.is_empty() {
        return Vec::new();
    }
    let depth = u64::from(depth);
    let (slabs, last_depth) = (problem.k.div_ceil(depth), problem.k - problem.k.saturating_sub(1) / depth * depth);
    let mut steps = Vec::new();
    for chunk in Chunk::all(&problem.batch) {
        for part in split_tiles(problem.m, problem.n, tile) {
            let mut args = vec![
                Arg::Scalar(Ty::U32, part.rows.into()),
                Arg::Scalar(Ty::U32, part.columns.into()),
                Arg::Divisor(part.column_tiles),
                Arg::Scalar(Ty::U32, slabs),
                Arg::Scalar(Ty::U32, last_depth),
            ];
            more(&mut args, &chunk, &part);
            let [y, z] = chunk.grid();
            steps.push(Step::Launch(Launch {
                kernel: kernel.clone(),
                grid: [part.row_tiles * part.column_tiles, y, z],
                residency: Residency::Any,
                overlap: false,
                args: args.into(),
            }));
        }
    }
    steps
}

/// Cuts D into parts whose rows and columns count in 31 bits and whose tiles fit grid x. One part but for giants.
fn split_tiles(m: u64, n: u64, [tile_rows, tile_columns]: [u32; 2]) -> Vec<Part> {
    const LINE_TILES: u64 = 1 << 23;
    const TILES: u64 = 1 << 30;
    let (tile_rows, tile_columns) = (u64::from(tile_rows), u64::from(tile_columns));
    let column_tiles = n.div_ceil(tile_columns).clamp(1, LINE_TILES);
    let row_tiles = m.div_ceil(tile_rows).min(LINE_TILES).min(TILES / column_tiles).max(1);
    let (part_rows, part_columns) = (row_tiles * tile_rows, column_tiles * tile_columns);
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
        for (m, n) in [(1u64 << 33, 100), (100, 1 << 33), ((1 << 31) + 5, 3000)] {
            let parts = part(m, n);
            assert!(parts.len() > 1);
            assert_eq!(parts.iter().map(|p| u128::from(p.rows) * u128::from(p.columns)).sum::<u128>(), u128::from(m) * u128::from(n));
            assert!(parts.iter().all(|p| u64::from(p.row_tiles) * u64::from(p.column_tiles) < 1 << 31));
        }
    }
}
