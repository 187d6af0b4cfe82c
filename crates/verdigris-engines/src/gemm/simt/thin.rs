//! The kernel for products with few columns: matrix times vector, and a little more.
//!
//! Such a product is as fast as A can be read. A CTA has 32 rows of A and 4 columns of B; a K-tile is 32 deep, of which each thread takes 4
//! elements of A, straight into registers. Where A runs along k the lanes of a warp stand along k and the warp has 4 rows; otherwise the
//! lanes stand along the rows and the warp has 4 of k. Either way each place of the K-tile adds up its own part of k, and the 32 parts meet
//! in shared memory at the end, in order.

use verdigris_kir::face::{Kernel, Val, Var};

use super::{Params, Spec, Tile, Tiles};
use crate::fuse::compute::Compute;
use crate::fuse::element::{Arithmetic, Element, RawVar};

const ROWS: u32 = Tile::Thin.rows();
const COLUMNS: u32 = Tile::Thin.columns();
const DEPTH: u32 = Tile::Thin.depth();
/// Elements of A that a thread takes from a K-tile.
const SHARE: u32 = ROWS * DEPTH / super::THREADS;
/// K-tiles that are on their way at a time.
const UNROLL: u32 = 4;

/// The parameters are those of the tiled kernel; no operand has factors.
pub(super) fn gemm<'k, S: Element, T: Compute>(k: Kernel<'k>, spec: &Spec, finish: impl Fn(Val<'k, S>) -> Val<'k, T>) {
    let Params { tiles, batch, a, b, epilogue } = Params::declare(k, spec);
    let Tiles { rows, columns, column_tiles, k_tiles, last_depth } = tiles;
    let epilogue = epilogue.of::<T>();

    let (row_tile, column_tile) = column_tiles.split(k.cta());
    let (first_row, first_column) = (row_tile * ROWS, column_tile * COLUMNS);
    let indices = batch.of_cta();

    let along_k = a.along_k.ne(0);
    let (lane, share) = (k.lane(), k.warp() * SHARE);
    // Row and place along k of the thread's element `i`.
    let row = |i: u32| k.select(along_k, share + i, lane);
    let place = |i: u32| k.select(along_k, lane, share + i);
    let rows_and_places: Vec<(Val<'k, u32>, Val<'k, u32>)> = (0..SHARE).map(|i| (row(i), place(i))).collect();
    let a_matrix = a.batch.matrix(a.matrix, indices);
    let a_places: Vec<Val<'k, u64>> = (rows_and_places.iter())
        .map(|&(row, place)| a_matrix + (first_row + row).widen() * a.outer_stride + place.widen() * a.k_stride)
        .collect();
    let b_matrix = b.batch.matrix(b.matrix, indices) + first_column.widen() * b.outer_stride;
    let b_places: Vec<Val<'k, u64>> = rows_and_places.iter().map(|&(_, place)| b_matrix + place.widen() * b.k_stride).collect();
    let (a_moved, b_moved) = (k.var(0u64), k.var(0u64));
    let sums: Vec<Vec<Var<'k, S>>> = (0..SHARE).map(|_| (0..COLUMNS).map(|_| k.var(k.constant(S::ZERO))).collect()).collect();

    let decode = |dtype, raw| {
        let value = S::decode(k, dtype, raw);
        if spec.arithmetic == Arithmetic::Tf32 { S::rounded_to_tf32(value) } else { value }
    };
    // With `one_place` all elements of the thread stand at the same place along k and share their elements of B.
    let k_tile = |k_tile: Val<'k, u32>, one_place: bool| {
        let depth = k.select((k_tile + 1).eq(k_tiles), last_depth, DEPTH);
        let (a_far, b_far) = (a_moved.get(), b_moved.get());
        let load = |inside: Val<'k, bool>, dtype, address: Val<'k, u64>| {
            let raw = RawVar::new(k, dtype);
            k.when(inside, || raw.load(k, dtype, address));
            raw
        };
        let of_b = |i: usize| -> Vec<RawVar<'k>> {
            let inside = rows_and_places[i].1.lt(depth);
            let mut address = b_places[i] + b_far;
            (0..COLUMNS)
                .map(|column| {
                    let raw = load(inside & (first_column + column).lt(columns), spec.b, address);
                    address = address + b.outer_stride;
                    raw
                })
                .collect()
        };
        let shared_b = one_place.then(|| of_b(0));
        let loaded: Vec<(RawVar<'k>, Vec<RawVar<'k>>)> = (0..SHARE as usize)
            .map(|i| {
                let (row, place) = rows_and_places[i];
                let inside = (first_row + row).lt(rows) & place.lt(depth);
                (load(inside, spec.a, a_places[i] + a_far), shared_b.clone().unwrap_or_else(|| of_b(i)))
            })
            .collect();
        for (line, (x, row)) in sums.iter().zip(loaded) {
            let x = decode(spec.a, x);
            for (sum, y) in line.iter().zip(row) {
                sum.set(k.fma(x, decode(spec.b, y), *sum));
            }
        }
        a_moved.set(a_moved + a.k_stride * u64::from(DEPTH));
        b_moved.set(b_moved + b.k_stride * u64::from(DEPTH));
    };
    k.when_else(
        along_k,
        || k.range_unrolled(k_tiles, UNROLL, |i| k_tile(i, true)),
        || k.range_unrolled(k_tiles, UNROLL, |i| k_tile(i, false)),
    );

    // One line of all 32×4 results for each place along k.
    let bytes = S::TY.bytes();
    let line_bytes = ROWS * COLUMNS * bytes;
    let parts = k.shared("parts", DEPTH * line_bytes, 16).address();
    for (line, (row, place)) in sums.iter().zip(&rows_and_places) {
        let to = parts + *place * line_bytes + *row * (COLUMNS * bytes);
        for (i, group) in (0u32..).zip(line.chunks(S::GROUP as usize)) {
            let values: Vec<Val<'k, S>> = group.iter().map(|sum| sum.get()).collect();
            k.st_shared_vector(to, i64::from(i * 16), &values);
        }
    }
    k.bar_sync();
    let thread = k.thread();
    let (row, column) = (first_row + (thread >> COLUMNS.ilog2()), first_column + (thread & (COLUMNS - 1)));
    let mine = thread.lt(ROWS * COLUMNS) & row.lt(rows) & column.lt(columns);
    k.when(mine, || {
        let from = parts + thread * bytes;
        let mut sum = k.ld_shared::<S>(from, 0);
        for place in 1..DEPTH {
            sum = sum + k.ld_shared::<S>(from, i64::from(place * line_bytes));
        }
        let place = epilogue.begin(indices).at(row, column);
        if spec.epilogue.exact {
            place.store_exact(S::to_i32(sum), 0);
        } else {
            place.store(place.apply(finish(sum), 0), 0);
        }
    });
}
