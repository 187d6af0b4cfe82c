//! What the kernels of attention and of its gradient share: rows of a head in shared memory, copied by `cp.async` and read by `ldmatrix`, and the two kinds of
//! products.
//!
//! Rows of shared memory are 16 bytes longer than the elements that they have, so that the eight rows of an 8×8 matrix stand in different banks. The result of a
//! product along the elements is, rounded, the operand of one across the rows: the accumulator of one is the operand of the next.

use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::inst::{MatrixType, MmaShape};
use verdigris_kir::params::Read;
use verdigris_kir::tile::fragment::Fragment;

use super::super::half::Half;

const WARPS: u32 = 4;
/// Threads of a CTA.
pub(super) const THREADS: u32 = 32 * WARPS;
/// What `cp.async` and `ldmatrix` move at once.
pub(super) const CHUNK_BYTES: u32 = 16;
const ELEMENTS_OF_CHUNK: u32 = CHUNK_BYTES / 2;
/// Rows of a tile that each warp has 16 of.
pub(super) const ROWS: u32 = 16 * WARPS;

verdigris_kir::parameters! {
    /// Queries, keys or values.
    pub(super) struct Rows / #[derive(Debug)] RowsArgs of u32 as copy_bytes {
        pub(super) at: Read = *copy_bytes,
        /// Bytes from one batch (or page), head and row to the next.
        pub(super) strides: [u64; 3],
        /// Bytes of the elements of a row.
        pub(super) bytes: u32,
    }
}

/// Rows of a head in shared memory.
#[derive(Clone, Copy)]
pub(super) struct SharedRows {
    pub(super) rows: u32,
    pub(super) elements: u32,
}

impl SharedRows {
    /// An odd number of chunks.
    pub(super) const fn pitch_bytes(&self) -> u32 {
        2 * self.elements + CHUNK_BYTES
    }

    pub(super) const fn bytes(&self) -> u32 {
        self.rows * self.pitch_bytes()
    }

    /// Threads that copy a row together.
    const fn lanes(&self) -> u32 {
        let lanes = 1 << (self.elements / ELEMENTS_OF_CHUNK).trailing_zeros();
        if lanes > 8 { 8 } else { lanes }
    }

    /// Starts copying all rows to `slot`, by all threads: `rows_at` gives where those of a thread are, and whether each is there at all. Zeros stand for
    /// what is not, and behind the `bytes` of the others.
    pub(super) fn copy<'k>(
        &self,
        k: Kernel<'k>,
        slot: Val<'k, u32>,
        [bytes, copy_bytes]: [Val<'k, u32>; 2],
        rows_at: impl Fn(Vec<Val<'k, u32>>) -> Vec<(Val<'k, u64>, Val<'k, bool>)>,
    ) {
        let (thread, lanes) = (k.thread(), self.lanes());
        let (first, lane) = (thread >> lanes.ilog2(), thread & (lanes - 1));
        let begin = lane * CHUNK_BYTES;
        let to = slot + first * self.pitch_bytes() + begin;
        let rows = || (0..self.rows).step_by((THREADS / lanes) as usize);
        let rows: Vec<_> = rows().zip(rows_at(rows().map(|row| first + row).collect())).collect();
        let with = |piece_bytes: u32| {
            for &(row, (from, is_there)) in &rows {
                let of_row = k.select(is_there, bytes, 0u32);
                for chunk in (0..self.elements / ELEMENTS_OF_CHUNK).step_by(lanes as usize) {
                    for piece in (0..CHUNK_BYTES).step_by(piece_bytes as usize) {
                        let offset = chunk * CHUNK_BYTES + piece;
                        let left = of_row - of_row.min(begin + offset);
                        let place = i64::from(row * self.pitch_bytes() + offset);
                        k.cp_async(to, place, from + begin.widen(), i64::from(offset), piece_bytes as u8, left.min(piece_bytes));
                    }
                }
            }
        };
        k.when_else(copy_bytes.eq(16), || with(16), || k.when_else(copy_bytes.eq(8), || with(8), || with(4)));
    }
}

/// What a warp reads by `ldmatrix`: four matrices of 8×8, two along the rows and two along the elements.
pub(super) struct Matrices<'k> {
    k: Kernel<'k>,
    /// Where the lane's row begins.
    row: Val<'k, u32>,
    pitch_bytes: u32,
    is_turned: bool,
}

impl<'k> Matrices<'k> {
    /// The first two are along the rows: operands A, and B whose depth lies along rows and is turned.
    pub(super) fn by_rows(k: Kernel<'k>, rows: SharedRows, slot: Val<'k, u32>, is_turned: bool) -> Self {
        let lane = k.lane();
        let row = slot + (lane & 15) * rows.pitch_bytes() + (lane >> 4) * CHUNK_BYTES;
        Matrices { k, row, pitch_bytes: rows.pitch_bytes(), is_turned }
    }

    /// The first two are along the elements: an operand B whose depth they are.
    pub(super) fn by_elements(k: Kernel<'k>, rows: SharedRows, slot: Val<'k, u32>) -> Self {
        let lane = k.lane();
        let row = slot + ((lane & 7) + ((lane >> 4) << 3)) * rows.pitch_bytes() + ((lane >> 3) & 1) * CHUNK_BYTES;
        Matrices { k, row, pitch_bytes: rows.pitch_bytes(), is_turned: false }
    }

    /// Those from a row and an element on.
    pub(super) fn load(&self, row: u32, element: u32) -> Vec<Val<'k, u32>> {
        self.k.ldmatrix(4, self.is_turned, self.row, i64::from(row * self.pitch_bytes + 2 * element))
    }
}

/// A product of 16 rows and 8 columns by 16.
pub(super) const fn shape(ty: Half) -> MmaShape {
    MmaShape { m: 16, n: 8, k: 16, a: ty.matrix(), b: ty.matrix(), d: MatrixType::F32, saturate: false, sparse: false }
}

/// Adds the products of a warp's rows by `b`'s, over the first `elements` of each, to `sums`: one for each time that the warp has 16 rows.
pub(super) fn multiply_along<'k>(shape: MmaShape, a: &Matrices<'k>, b: &Matrices<'k>, elements: u32, sums: &[&Fragment<'k, f32>]) {
    for step in 0..elements / 16 {
        let a: Vec<_> = (0..).zip(sums).map(|(i, _)| a.load(ROWS * i, 16 * step)).collect();
        for sixteen in 0..sums[0].columns() / 16 {
            add(shape, &a, &b.load(16 * sixteen, 16 * step), sixteen, sums);
        }
    }
}

/// Adds the products of weights, of which `weights` gives 16 columns of a step, by the first `rows` of `b`, over these, to `sums`.
pub(super) fn multiply_across<'k>(
    shape: MmaShape,
    weights: impl Fn(usize, u32) -> [Val<'k, u32>; 4],
    b: &Matrices<'k>,
    rows: u32,
    sums: &[&Fragment<'k, f32>],
) {
    for step in 0..rows / 16 {
        let a: Vec<_> = (0..sums.len()).map(|row_block| weights(row_block, step).to_vec()).collect();
        for sixteen in 0..sums[0].columns() / 16 {
            add(shape, &a, &b.load(16 * step, 16 * sixteen), sixteen, sums);
        }
    }
}

/// Adds a step's products to the 16 columns of number `sixteen`.
fn add<'k>(shape: MmaShape, a: &[Vec<Val<'k, u32>>], b: &[Val<'k, u32>], sixteen: u32, sums: &[&Fragment<'k, f32>]) {
    for (sums, a) in sums.iter().zip(a) {
        for (half, b) in b.chunks(2).enumerate() {
            let columns = &sums.registers()[8 * sixteen as usize + 4 * half..][..4];
            b[0].kernel().mma(shape, a, b, columns);
        }
    }
}
