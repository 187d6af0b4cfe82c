//! Repacking: a copy of an operand in lines that TMA can map, and the way back.
//!
//! Tensor maps need lines that begin at multiples of 16 bytes, and the tensor cores take tf32 and 8-bit operands along the depth alone. An
//! operand of another shape is copied into scratch first, line by line, each line padded to a whole number of segments ([`pack`]); a result
//! that TMA writes in such lines is brought to wherever its elements lie ([`unpack`]). Either copies along the contiguous index, or
//! transposes: by the tiles of [`Transposing`] where neighbouring lines of the loose tensor are neighbouring elements and many, else element by element
//! through tiles of its own.
//!
//! **Cost.** Every element is read once and written once; what follows reads a copy from L2 in the measure that it fits. **Numbers.** Bytes
//! are moved, never converted.

mod lines;
mod pack;
mod slots;
mod unpack;

use verdigris_graph::{Matrix, Order, Tensor};
use verdigris_kir::face::{Header, Kernel, build};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::program::{Address, KernelRef, Launch};

use super::batch::Chunk;
use super::transposing::{self, Transposing};
use crate::cost::{Stream, Traffic};

pub(crate) use lines::{Lines, packed_tensor};
pub(crate) use slots::Slots;

/// Threads of a CTA.
const THREADS: u32 = 256;
/// What one access of a line takes.
const CHUNK_BYTES: u32 = 16;
/// Chunks, or elements, that a copying thread has on their way at a time.
const PIECES: u32 = 4;
/// Pieces of lines of a transposed tile, and bytes of each.
const TILE_LINES: u32 = 64;
const TILE_BYTES: u32 = 128;
/// One word beyond a line of the tile keeps columns of words, and groups of four of them, on different banks.
const TILE_PITCH_BYTES: u32 = TILE_BYTES + 4;
/// Lines below which pieces of several lines have to share a tile.
const LEAST_LINES: u64 = 32;
/// The most chunks or tiles of one launch.
const LAUNCH_PIECES: u64 = 1 << 30;

/// Everything that shapes a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Spec {
    /// Bytes of an element: 1, 2 or 4.
    bytes: u32,
    /// Neighbouring elements of a line are not those of the operand.
    transpose: bool,
    /// From lines to the operand.
    back: bool,
}

impl Spec {
    fn name(self) -> String {
        let way = match (self.back, self.transpose) {
            (false, false) => "gemm_repack_copy",
            (false, true) => "gemm_repack_transpose",
            (true, false) => "unpack_spread",
            (true, true) => "unpack_transpose",
        };
        format!("{way}_b{}", 8 * self.bytes)
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(self) -> KernelBody {
        let header = Header { name: self.name(), target: Target::Sm90, threads: THREADS, ..Header::default() };
        build(header, |k| match (self.back, self.transpose) {
            (false, false) => pack::copy(k, self),
            (false, true) => pack::transpose(k, self),
            (true, false) => unpack::spread(k, self),
            (true, true) => unpack::transpose(k, self),
        })
    }

    /// Elements of a chunk.
    fn chunk(self) -> u32 {
        CHUNK_BYTES / self.bytes
    }

    /// Elements of a line of a tile.
    fn tile_length(self) -> u32 {
        TILE_BYTES / self.bytes
    }
}

/// What is in front of the launch may still run: nothing of it is touched above this.
fn begin(k: Kernel<'_>) {
    k.griddep_wait();
    k.griddep_launch();
}

/// Every kernel that brings operands of products of 1, 2 or 4 bytes into lines. Those of 2 bytes are taken along either index, so that none whose lines are contiguous transposes.
pub(crate) fn catalog() -> impl Iterator<Item = KernelRef> {
    let one = Spec { bytes: 2, transpose: true, back: false }.kernel();
    let copies = [1, 2, 4].map(|bytes| Spec { bytes, transpose: false, back: false }.kernel());
    copies.into_iter().chain([one]).chain(transposing::catalog_of([1, 4], false, 1))
}

/// Those of filters, whose neighbours are no neighbouring lines, for elements of so many bytes.
pub(crate) fn catalog_of_filters<const N: usize>(bytes: [u32; N]) -> impl Iterator<Item = KernelRef> {
    own(bytes, false)
}

/// Those of images, and of the way back: for elements of so many bytes, of which those of the way back are all.
pub(crate) fn catalog_of_images<const N: usize, const M: usize>(ahead: [u32; N], back: [u32; M]) -> impl Iterator<Item = KernelRef> {
    let tiles = transposing::catalog_of(back, false, 1).chain(transposing::catalog_of(back, true, 1));
    own(ahead, false).chain(own(back, true)).chain(tiles)
}

fn own<const N: usize>(bytes: [u32; N], back: bool) -> impl Iterator<Item = KernelRef> {
    bytes.into_iter().flat_map(move |bytes| [false, true].map(|transpose| Spec { bytes, transpose, back }.kernel()))
}

/// A copy to be made of one operand, and what the operand is then; or the way back.
#[derive(Clone, Debug)]
pub(crate) struct Repack {
    /// The operand, of any strides.
    loose: Matrix,
    /// The copy: strides within the scratch. Its slot is that of the operand, and means nothing.
    pub(crate) packed: Matrix,
    spec: Spec,
    /// An operand of a product, of whose kinds there are fewer.
    of_product: bool,
    /// Lines run along the depth, not along the rows.
    along_depth: bool,
    /// Lines of one matrix, and elements of a line.
    lines: u64,
    length: u64,
    /// The batch, with 1 for dims over which the operand repeats.
    batch: Vec<u64>,
}

/// What one launch copies.
struct Part {
    chunk: Chunk,
    /// The operand's place, and the lines'.
    ends: [Address; 2],
    lines: u32,
    /// Pieces of a line.
    pieces: u32,
    grid: [u32; 3],
}

impl Repack {
    /// The copy that an operand of `rows` by `depth` needs before TMA can feed the tensor cores with it, if it needs one.
    /// `either`: the tensor cores take the type along the rows too.
    pub(crate) fn needed(operand: &Matrix, rows: u64, depth: u64, batch: &[u64], either: bool) -> Option<Repack> {
        let order = operand.order();
        let want = if either && order == Order::ColumnMajor { order } else { Order::RowMajor };
        let whole = |elements: u64| (elements * operand.dtype.bytes() as u64).is_multiple_of(16);
        // A line that repeats has no stride that a map could hold.
        let lines_fit = operand.leading_dimension().is_some_and(|leading| leading != 0 && whole(leading));
        let mapped = order == want && lines_fit && operand.batch_strides.iter().all(|&stride| whole(stride));
        (!mapped).then(|| Repack::plan(operand, rows, depth, batch, want))
    }

    /// The copy of an operand of `rows` by `depth` (elements of 1, 2 or 4 bytes) whose contiguous index is `want`: [`Order::RowMajor`] for
    /// the depth, [`Order::ColumnMajor`] for the rows.
    fn plan(source: &Matrix, rows: u64, depth: u64, batch: &[u64], want: Order) -> Repack {
        let along_depth = want != Order::ColumnMajor;
        let (lines, length) = if along_depth { (rows, depth) } else { (depth, rows) };
        let bytes = source.dtype.bytes() as u64;
        let line_bytes = length * bytes;
        // Lines of whole segments, but for those that padding would multiply.
        let pitch = line_bytes.next_multiple_of(if line_bytes < 128 { 16 } else { 128 }) / bytes;
        let (row_stride, column_stride) = if along_depth { (pitch, 1) } else { (1, pitch) };
        let batch: Vec<u64> =
            batch.iter().zip(&source.batch_strides).map(|(&extent, &stride)| if stride == 0 { 1 } else { extent }).collect();
        let mut matrices = 1;
        let mut batch_strides = vec![0; batch.len()];
        for ((packed, &extent), &stride) in batch_strides.iter_mut().zip(&batch).zip(&source.batch_strides).rev() {
            if stride != 0 {
                *packed = matrices * lines * pitch;
                matrices *= extent;
            }
        }
        let along = if along_depth { source.column_stride } else { source.row_stride };
        Repack {
            packed: Matrix { row_stride, column_stride, batch_strides, ..source.clone() },
            loose: source.clone(),
            spec: Spec { bytes: bytes as u32, transpose: along != 1, back: false },
            of_product: true,
            along_depth,
            lines,
            length,
            batch,
        }
    }

    /// The copy of a tensor as [`packed_tensor`] with the same arguments places it. Elements have 1, 2 or 4 bytes.
    pub(crate) fn of_tensor(tensor: &Tensor, extents: [u64; 5], along: usize, order: [usize; 4]) -> Repack {
        let packed = packed_tensor(tensor, extents, along, order);
        let lines = Lines::of(tensor, &packed, extents, order);
        let [loose, packed] = lines.matrices([tensor, &packed], [tensor.strides[along], 1]);
        Repack {
            spec: Spec { bytes: loose.dtype.bytes() as u32, transpose: loose.column_stride != 1, back: false },
            of_product: false,
            loose,
            packed,
            along_depth: true,
            lines: lines.count,
            length: extents[along],
            batch: lines.batch,
        }
    }

    /// The way back from such a copy to the tensor.
    pub(crate) fn back(self) -> Repack {
        Repack { spec: Spec { back: true, ..self.spec }, ..self }
    }

    /// Elements from line to line, and from one element of a line to the next.
    fn strides(&self, matrix: &Matrix) -> (u64, u64) {
        let Matrix { row_stride, column_stride, .. } = *matrix;
        if self.along_depth { (row_stride, column_stride) } else { (column_stride, row_stride) }
    }

    fn matrices(&self) -> u64 {
        self.batch.iter().product()
    }

    /// The size of the copy.
    pub(crate) fn scratch_bytes(&self) -> u64 {
        let (pitch, _) = self.strides(&self.packed);
        self.matrices() * self.lines * pitch * u64::from(self.spec.bytes)
    }

    /// The copy by tiles of whole accesses: where neighbouring lines of the loose matrix are neighbouring elements, and for all operands of products of
    /// 1 and 4 bytes.
    fn transposing(&self) -> Option<Transposing> {
        let Spec { bytes, transpose, back } = self.spec;
        let is_dense = self.lines >= LEAST_LINES && self.strides(&self.loose).0 == 1;
        if !transpose || !(is_dense || (self.of_product && bytes != 2)) {
            return None;
        }
        // Rows of the source are its contiguous lines.
        let matrix = |matrix: &Matrix| {
            let (line, along) = self.strides(matrix);
            let (row_stride, column_stride) = if back { (line, along) } else { (along, line) };
            Matrix { row_stride, column_stride, ..matrix.clone() }
        };
        let [loose, packed] = [matrix(&self.loose), matrix(&self.packed)];
        if back {
            Transposing::of([&packed, &loose], [self.lines, self.length], &self.batch, self.lines, 0)
        } else {
            let room = self.length.next_multiple_of(u64::from(CHUNK_BYTES / bytes));
            Transposing::of([&loose, &packed], [self.length, self.lines], &self.batch, room, 0)
        }
    }

    /// What the copy asks.
    pub(crate) fn work(&self) -> Stream {
        if let Some(copy) = self.transposing() {
            return copy.work();
        }
        let bytes = f64::from(self.spec.bytes);
        let elements = self.matrices() as f64 * self.lines as f64 * self.length as f64;
        // A warp takes neighbouring lines of the operand; where they do not touch, each element costs a sector.
        let (line_stride, _) = self.strides(&self.loose);
        let loose = if self.spec.transpose { (line_stride as f64 * bytes).clamp(bytes, 32.0) } else { bytes };
        Stream::new(if self.spec.transpose { Traffic::Transposed } else { Traffic::Lines }, elements * (loose + bytes))
    }

    /// The launches that copy from one place to the other: to scratch (16-byte aligned) from the operand's place, or back.
    pub(crate) fn launches(&self, from: Address, to: Address) -> Vec<Launch> {
        if let Some(copy) = self.transposing() {
            return copy.launches(from, to);
        }
        let Spec { bytes, transpose, back } = self.spec;
        let [loose, packed] = if back { [to, from] } else { [from, to] };
        // Elements of a piece of a line, and pieces of a CTA.
        let (piece, of_cta) = match (transpose, back) {
            (true, _) => (self.spec.tile_length(), TILE_LINES),
            (false, true) => (1, THREADS * PIECES),
            (false, false) => (self.spec.chunk(), THREADS * PIECES),
        };
        let pieces = self.length.div_ceil(u64::from(piece));
        let lines_at_once = (LAUNCH_PIECES / pieces.max(1)).max(1);
        let mut launches = Vec::new();
        for chunk in Chunk::all(&self.batch) {
            for first_line in (0..self.lines).step_by(lines_at_once as usize) {
                let lines = lines_at_once.min(self.lines - first_line);
                let (row, column) = if self.along_depth { (first_line, 0) } else { (0, first_line) };
                let at = |matrix: &Matrix, base: Address| {
                    let offset = matrix.offset(&chunk.first, row, column) * u64::from(bytes);
                    Address { offset_bytes: base.offset_bytes + offset, ..base }
                };
                let ctas = (lines * pieces).div_ceil(u64::from(of_cta));
                let [y, z] = chunk.grid();
                let part = Part {
                    ends: [at(&self.loose, loose), at(&self.packed, packed)],
                    chunk: chunk.clone(),
                    lines: lines as u32,
                    pieces: pieces as u32,
                    grid: [ctas as u32, y, z],
                };
                let launch = if back { unpack::launch(self, &part) } else { pack::launch(self, &part) };
                launches.push(launch.overlapping());
            }
        }
        launches
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use verdigris_graph::Slot;
    use verdigris_kir::interp::{Kernels, Memory, Options, run};
    use verdigris_kir::program::Program;
    use verdigris_tensor::DType;

    const SENTINEL: u8 = 0xEE;

    /// A source and what is asked of its copy.
    struct Case {
        dtype: DType,
        rows: u64,
        depth: u64,
        batch: Vec<u64>,
        strides: (u64, u64),
        batch_strides: Vec<u64>,
        want: Order,
        /// Elements in front of the operand.
        first: u64,
    }

    impl Case {
        /// One matrix whose lines along `order` have `gap` elements between them.
        fn plain(dtype: DType, (lines, length): (u64, u64), gap: u64, order: Order, want: Order, first: u64) -> Case {
            let pitch = length + gap;
            let (rows, depth, strides) = if order == Order::RowMajor { (lines, length, (pitch, 1)) } else { (length, lines, (1, pitch)) };
            Case { dtype, rows, depth, batch: vec![], strides, batch_strides: vec![], want, first }
        }

        /// Copies on the interpreter and compares with a plain loop. Only elements of the source have been written, so that whatever else
        /// reaches the copy is a finding.
        fn check(&self, kernels: &Kernels, seed: u64) {
            let bytes = self.dtype.bytes() as u64;
            let matrix = Matrix {
                slot: Slot(0),
                dtype: self.dtype,
                row_stride: self.strides.0,
                column_stride: self.strides.1,
                batch_strides: self.batch_strides.clone(),
            };
            let mut indices: Vec<Vec<u64>> = vec![vec![]];
            for &extent in &self.batch {
                indices = indices.iter().flat_map(|index| (0..extent).map(|i| [&index[..], &[i]].concat())).collect();
            }
            let element = |offset: u64| -> Vec<u8> {
                (0..bytes).map(|byte| ((offset * bytes + byte + seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as u8).collect()
            };
            let last: Vec<u64> = self.batch.iter().map(|extent| extent - 1).collect();
            let span = matrix.offset(&last, self.rows - 1, self.depth - 1) + 1;
            let repack = Repack::plan(&matrix, self.rows, self.depth, &self.batch, self.want);
            let mut memory = Memory::new();
            let source = memory.add_unwritten((self.first + span) * bytes);
            for index in &indices {
                for (row, column) in (0..self.rows).flat_map(|row| (0..self.depth).map(move |column| (row, column))) {
                    let offset = matrix.offset(index, row, column);
                    memory.write(source, (self.first + offset) * bytes, &element(offset));
                }
            }
            let packed = memory.add_filled(repack.scratch_bytes(), SENTINEL);
            let from = Address { offset_bytes: self.first * bytes, ..Address::buffer(source) };
            let mut program = Program { buffer_alignment_bytes: vec![1; 2], ..Program::default() };
            repack.launches(from, Address::buffer(packed)).into_iter().for_each(|launch| program.launch(launch));
            // Tiles of whole accesses rely on nothing, and are slower where the scratch begins at less.
            let scratch = if repack.transposing().is_some() { bytes } else { 16 };
            assert_eq!(program.buffer_alignment_bytes, [bytes, scratch]);
            let said = format!(
                "{} {}x{} batch {:?} strides {:?} {:?} first {} want {:?}",
                self.dtype, self.rows, self.depth, self.batch, self.strides, self.batch_strides, self.first, self.want
            );
            run(&program, kernels, &mut memory, &Options::schedule(seed)).unwrap_or_else(|findings| panic!("{said}: {findings}"));

            let out = memory.to_vec(packed);
            let mut ours = vec![false; out.len()];
            for index in &indices {
                for (row, column) in (0..self.rows).flat_map(|row| (0..self.depth).map(move |column| (row, column))) {
                    let at = (repack.packed.offset(index, row, column) * bytes) as usize;
                    let wanted = element(matrix.offset(index, row, column));
                    assert_eq!(out[at..at + bytes as usize], wanted, "{said}: row {row}, column {column} of {index:?}");
                    ours[at..at + bytes as usize].fill(true);
                }
            }
            // Of the padding at most the rest of a chunk is written.
            for (chunk, ours) in out.chunks(16).zip(ours.chunks(16)).filter(|(_, ours)| !ours.contains(&true)) {
                assert_eq!(chunk, &[SENTINEL; 16][..ours.len()], "{said}");
            }
            let leading = repack.packed.leading_dimension().unwrap() * bytes;
            assert!(leading.is_multiple_of(16) && repack.packed.order() == self.want, "{said}");
            assert!(repack.packed.batch_strides.iter().all(|stride| (stride * bytes).is_multiple_of(16)), "{said}");
        }
    }

    const DTYPES: [DType; 3] = [DType::E4m3, DType::Bf16, DType::F32];

    #[test]
    fn lines_of_every_alignment_are_copied() {
        let kernels = Kernels::new();
        for dtype in DTYPES {
            let chunk = 16 / dtype.bytes() as u64;
            for first in 0..chunk + 1 {
                for gap in [0, 1, chunk - 1] {
                    for length in [1, chunk - 1, chunk, chunk + 1, 2 * chunk - 1, 2 * chunk, 2 * chunk + 1, 5 * chunk + 3] {
                        Case::plain(dtype, (5, length), gap, Order::RowMajor, Order::RowMajor, first).check(&kernels, first + gap);
                    }
                }
            }
        }
    }

    #[test]
    fn copies_of_about_one_cta_and_of_the_rows() {
        let kernels = Kernels::new();
        for dtype in DTYPES {
            let chunk = 16 / dtype.bytes() as u64;
            for (lines, chunks) in [(1, 1023), (1, 1024), (1, 1025), (93, 11), (2, 513), (1024, 1), (1025, 1)] {
                for length in [chunks * chunk - 1, chunks * chunk] {
                    Case::plain(dtype, (lines, length), 0, Order::ColumnMajor, Order::ColumnMajor, 1).check(&kernels, lines);
                }
            }
        }
    }

    #[test]
    fn tiles_are_transposed_up_to_every_edge() {
        let kernels = Kernels::new();
        for dtype in DTYPES {
            let (chunk, tile) = (16 / dtype.bytes() as u64, 128 / dtype.bytes() as u64);
            for lines in [1, 31, 33, 63, 64, 65] {
                for length in [1, chunk - 1, chunk, chunk + 1, tile - 1, tile, tile + 1, 4 * tile + 3] {
                    // The copy's lines run across those of the source.
                    Case::plain(dtype, (length, lines), lines % 3, Order::RowMajor, Order::ColumnMajor, length % 4).check(&kernels, lines);
                    Case::plain(dtype, (length, lines), lines % 2, Order::ColumnMajor, Order::RowMajor, lines % 5).check(&kernels, length);
                }
            }
        }
    }

    #[test]
    fn any_strides_and_batches() {
        let kernels = Kernels::new();
        let case = |dtype, strides, batch: &[u64], batch_strides: &[u64], want| Case {
            dtype,
            rows: 37,
            depth: 21,
            batch: batch.to_vec(),
            strides,
            batch_strides: batch_strides.to_vec(),
            want,
            first: 3,
        };
        for dtype in DTYPES {
            for want in [Order::RowMajor, Order::ColumnMajor] {
                // Neither index contiguous; rows that repeat; rows that overlap.
                for strides in [(50, 2), (3, 113), (0, 1), (5, 1), (0, 0)] {
                    case(dtype, strides, &[], &[], want).check(&kernels, strides.0);
                }
                for (batch, batch_strides) in [
                    (vec![3], vec![801]),
                    (vec![3], vec![0]),
                    (vec![2, 3], vec![811, 2000]),
                    (vec![2, 3, 2], vec![5001, 0, 803]),
                    (vec![2, 1, 3, 2], vec![10_007, 1, 1601, 801]),
                ] {
                    case(dtype, (21, 1), &batch, &batch_strides, want).check(&kernels, batch[0]);
                }
            }
        }
    }

    #[test]
    fn large_copies_are_cut_into_launches_of_31_bits() {
        let matrix = Matrix::row_major(Slot(0), DType::Bf16, (1 << 20) + 1);
        let repack = Repack::plan(&matrix, 1 << 20, (1 << 20) + 1, &[], Order::RowMajor);
        let launches = repack.launches(Address::buffer(0), Address::scratch(0));
        let chunks = ((1u64 << 20) + 1).div_ceil(8);
        let at_once = u64::from(THREADS * PIECES);
        let pieces: Vec<u64> = launches.iter().map(|launch| u64::from(launch.grid[0]) * at_once).collect();
        let (all, wanted) = (pieces.iter().sum::<u64>(), chunks << 20);
        assert!(all >= wanted && all < wanted + at_once * launches.len() as u64);
        assert!(pieces.iter().all(|&pieces| pieces <= LAUNCH_PIECES));
        assert!(launches.len() > 1);
    }

    #[test]
    fn only_what_cannot_be_mapped_is_copied() {
        let matrix = |dtype, row_stride, column_stride, batch_stride| Matrix {
            slot: Slot(0),
            dtype,
            row_stride,
            column_stride,
            batch_strides: vec![batch_stride],
        };
        let wanted = |matrix: Matrix, either| {
            Repack::needed(&matrix, 100, 64, &[3], either).map(|repack| (repack.packed.order(), repack.spec.transpose))
        };
        let (rows, columns) = (Order::RowMajor, Order::ColumnMajor);
        for (source, either, expected) in [
            (matrix(DType::Bf16, 64, 1, 6400), true, None),
            (matrix(DType::Bf16, 1, 104, 0), true, None),
            (matrix(DType::Bf16, 1, 100, 0), true, Some((columns, false))),
            (matrix(DType::Bf16, 65, 1, 0), true, Some((rows, false))),
            (matrix(DType::Bf16, 64, 1, 6401), true, Some((rows, false))),
            (matrix(DType::Bf16, 128, 2, 0), true, Some((rows, true))),
            (matrix(DType::Bf16, 0, 1, 0), true, Some((rows, false))),
            (matrix(DType::F32, 1, 104, 0), false, Some((rows, true))),
            (matrix(DType::E4m3, 64, 1, 6400), false, None),
        ] {
            assert_eq!(wanted(source.clone(), either), expected, "{source:?}");
        }
    }

    #[test]
    fn tensors_of_any_strides_are_written_whole_and_alone() {
        let kernels = Kernels::new();
        let order = [0, 2, 3, 4];
        for (number, dtype) in [DType::E4m3, DType::Bf16, DType::F32].into_iter().enumerate() {
            let bytes = dtype.bytes();
            for (seed, extents) in [[2, 1, 1, 3, 5], [1, 67, 1, 5, 13], [3, 24, 2, 3, 4], [2, 130, 1, 1, 65]].into_iter().enumerate() {
                let [n, c, d, h, w] = extents;
                let first = Tensor::channels_first(Slot(0), dtype, extents);
                let last = Tensor::channels_last(Slot(0), dtype, extents);
                // Gaps between rows, and neither index contiguous.
                let gaps = Tensor { strides: [c * d * h * (w + 2), 1, c * h * (w + 2), c * (w + 2), c], ..last.clone() };
                let strided = Tensor { strides: [2 * c * d * h * w, 2 * d * h * w, 2 * h * w, 2 * w, 2], ..first.clone() };
                for target in [first, last, gaps, strided] {
                    let unpack = Repack::of_tensor(&target, extents, 1, order).back();
                    let packed = packed_tensor(&target, extents, 1, order);
                    let index = |i: u64| [i / (c * d * h * w), i / (d * h * w) % c, i / (h * w) % d, i / w % h, i % w];
                    let offset = |tensor: &Tensor, i: u64| index(i).iter().zip(&tensor.strides).map(|(i, stride)| i * stride).sum::<u64>();
                    let size = n * c * d * h * w;
                    let span = (0..size).map(|i| offset(&target, i)).max().unwrap_or(0) + 9;
                    let element = |i: u64| -> Vec<u8> {
                        (0..bytes as u64).map(|b| ((i * 4 + b).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as u8).collect()
                    };
                    let mut memory = Memory::new();
                    // Of the copy only its elements have been written.
                    let from = memory.add_unwritten(unpack.scratch_bytes());
                    let to = memory.add_filled(span * bytes as u64, 0xEE);
                    let mut wanted = vec![0xEE; span as usize * bytes];
                    for i in 0..size {
                        memory.write(from, offset(&packed, i) * bytes as u64, &element(i));
                        wanted[offset(&target, i) as usize * bytes..][..bytes].copy_from_slice(&element(i));
                    }
                    let mut program = Program { buffer_alignment_bytes: vec![1; 2], ..Program::default() };
                    unpack.launches(Address::buffer(from), Address::buffer(to)).into_iter().for_each(|launch| program.launch(launch));
                    let scratch = if unpack.transposing().is_some() { bytes as u64 } else { 16 };
                    assert_eq!(program.buffer_alignment_bytes, [scratch, bytes as u64]);
                    let said = format!("{dtype} {extents:?} {:?}", target.strides);
                    run(&program, &kernels, &mut memory, &Options::schedule((number * 4 + seed) as u64))
                        .unwrap_or_else(|findings| panic!("{said}: {findings}"));
                    assert_eq!(memory.to_vec(to), wanted, "{said}");
                }
            }
        }
    }
}
