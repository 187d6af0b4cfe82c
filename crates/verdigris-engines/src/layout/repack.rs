//! Repacking: a copy of an operand that TMA can map.
//!
//! Tensor maps need lines that begin at multiples of 16 bytes, and the tensor cores take tf32 and 8-bit operands along the depth alone. An
//! operand of another shape is copied into scratch first, line by line, each line padded to a whole number of segments. The copy reads and
//! writes the operand once; the product that follows reads it from L2 in the measure that it fits.
//!
//! **Copying** keeps the contiguous index and changes the pitch. A thread makes 16 bytes of a line: it reads the two aligned 16-byte
//! windows that they lie in, whatever their alignment, and shifts them together. Windows that reach beyond the elements of the matrix are
//! not read; what they would bring is loaded element by element.
//!
//! **Transposing** makes another index contiguous. A CTA takes a tile through shared memory: element by element in, 16 bytes out. It takes
//! any two strides, also where neither index is contiguous.
//!
//! A tensor of a convolution is such an operand too: [`Repack::of_tensor`] copies it in lines along one of its dims.
//!
//! **Numbers.** Bytes are moved, never converted.

use verdigris_graph::{Matrix, Order, Tensor};
use verdigris_kir::face::{Header, Kernel, Val, Var, build};
use verdigris_kir::inst::Cache;
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::{Divide, Read, Write};
use verdigris_kir::program::{Address, KernelRef, Launch};

use super::batch::{BatchIndexArgs, BatchStridesBytes, Chunk};
use crate::cost::{Stream, Traffic};

/// Threads of a CTA.
const THREADS: u32 = 256;
/// What a thread stores at once.
const CHUNK_BYTES: u32 = 16;
/// Chunks that a copying thread has on their way at a time.
const CHUNKS: u32 = 4;
/// Lines of a transposed tile, and bytes of each.
const TILE_LINES: u32 = 64;
const TILE_BYTES: u32 = 128;
/// One word beyond a line of the tile keeps columns of words, and groups of four of them, on different banks.
const TILE_PITCH_BYTES: u32 = TILE_BYTES + 4;
/// The most chunks or tiles of one launch.
const LAUNCH_PIECES: u64 = 1 << 30;

/// Everything that shapes a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Spec {
    /// Bytes of an element: 1, 2 or 4.
    bytes: u32,
    /// The contiguous index of the packed matrix is not that of the source.
    transpose: bool,
}

impl Spec {
    fn name(self) -> String {
        format!("gemm_repack_{}_b{}", if self.transpose { "transpose" } else { "copy" }, 8 * self.bytes)
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(self) -> KernelBody {
        let header = Header { name: self.name(), target: Target::Sm90, threads: THREADS, ..Header::default() };
        build(header, |k| if self.transpose { transpose(k, self) } else { copy(k, self) })
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

/// Every repacking kernel.
pub(crate) fn catalog() -> impl Iterator<Item = KernelRef> {
    catalog_of([1, 2, 4])
}

/// Those for elements of so many bytes.
pub(crate) fn catalog_of<const N: usize>(bytes: [u32; N]) -> impl Iterator<Item = KernelRef> {
    bytes.into_iter().flat_map(|bytes| [false, true].map(|transpose| Spec { bytes, transpose }.kernel()))
}

/// A copy to be made of one operand, and what the operand is then.
#[derive(Clone, Debug)]
pub(crate) struct Repack {
    source: Matrix,
    /// The copy: strides within the scratch. Its slot is that of the source, and means nothing.
    pub(crate) packed: Matrix,
    spec: Spec,
    /// Lines run along the depth, not along the rows.
    along_depth: bool,
    /// Lines of one matrix, and elements of a line.
    lines: u64,
    length: u64,
    /// The batch, with 1 for dims over which the source repeats.
    batch: Vec<u64>,
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
            source: source.clone(),
            spec: Spec { bytes: bytes as u32, transpose: along != 1 },
            along_depth,
            lines,
            length,
            batch,
        }
    }

    /// The copy of a tensor as [`packed_tensor`] with the same arguments places it. Elements have 1, 2 or 4 bytes.
    pub(crate) fn of_tensor(source: &Tensor, extents: [u64; 5], along: usize, order: [usize; 4]) -> Repack {
        let packed = packed_tensor(source, extents, along, order);
        let lines = Lines::of(source, &packed, extents, order);
        let [from, to] = lines.matrices([source, &packed], [source.strides[along], 1]);
        Repack {
            spec: Spec { bytes: from.dtype.bytes() as u32, transpose: from.column_stride != 1 },
            source: from,
            packed: to,
            along_depth: true,
            lines: lines.count,
            length: extents[along],
            batch: lines.batch,
        }
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

    /// What the copy asks.
    pub(crate) fn work(&self) -> Stream {
        let bytes = f64::from(self.spec.bytes);
        let elements = self.matrices() as f64 * self.lines as f64 * self.length as f64;
        // A warp reads neighbouring lines; where they do not touch, each element costs a sector.
        let (line_stride, _) = self.strides(&self.source);
        let read = if self.spec.transpose { (line_stride as f64 * bytes).clamp(bytes, 32.0) } else { bytes };
        Stream::new(if self.spec.transpose { Traffic::Transposed } else { Traffic::Lines }, elements * (read + bytes))
    }

    /// The launches that make the copy at `scratch` (16-byte aligned), the operand being at `source`.
    pub(crate) fn launches(&self, source: Address, scratch: Address) -> Vec<Launch> {
        // Pieces of a line, and lines that share one.
        let (piece, shared) = if self.spec.transpose { (self.spec.tile_length(), TILE_LINES) } else { (self.spec.chunk(), 1) };
        let pieces = self.length.div_ceil(u64::from(piece));
        let lines_at_once = ((LAUNCH_PIECES / pieces.max(1)).max(1) * u64::from(shared)).min(LAUNCH_PIECES);
        let mut launches = Vec::new();
        for chunk in Chunk::all(&self.batch) {
            for first_line in (0..self.lines).step_by(lines_at_once as usize) {
                let lines = lines_at_once.min(self.lines - first_line);
                let (row, column) = if self.along_depth { (first_line, 0) } else { (0, first_line) };
                let at = |matrix: &Matrix, base: Address| {
                    let bytes = matrix.offset(&chunk.first, row, column) * u64::from(self.spec.bytes);
                    Address { offset_bytes: base.offset_bytes + bytes, ..base }
                };
                let places = [at(&self.source, source), at(&self.packed, scratch)];
                launches.push(self.launch(&chunk, places, lines, pieces as u32));
            }
        }
        launches
    }

    fn launch(&self, chunk: &Chunk, [source, packed]: [Address; 2], lines: u64, pieces: u32) -> Launch {
        let bytes = u64::from(self.spec.bytes);
        let (line_stride, along) = self.strides(&self.source);
        let (pitch, _) = self.strides(&self.packed);
        // Where lines follow each other without a gap, all that lies between the first and the last element may be read.
        let line_bytes = self.length * bytes;
        let gapless = line_stride <= self.length;
        let fence = if gapless { [0, (lines - 1) * line_stride * bytes + line_bytes] } else { [line_stride * bytes, line_bytes] };
        let args = ParamsArgs {
            source,
            packed,
            line_stride: line_stride * bytes,
            pitch: pitch * bytes,
            lines: lines as u32,
            length: self.length as u32,
            pieces,
            batch: chunk.index(),
            source_batch: chunk.strides_bytes(&self.source),
            packed_batch: chunk.strides_bytes(&self.packed),
            along_stride: self.spec.transpose.then_some(along * bytes),
            fence: (!self.spec.transpose).then_some(fence),
        };
        let ctas = match self.spec.transpose {
            true => lines.div_ceil(u64::from(TILE_LINES)) * u64::from(pieces),
            false => (lines * u64::from(pieces)).div_ceil(u64::from(THREADS * CHUNKS)),
        };
        let [y, z] = chunk.grid();
        Launch::new(self.spec.kernel(), [ctas as u32, y, z], args.bound(&self.spec)).overlapping()
    }
}

/// A tensor like `like`, packed: lines along dim `along`, each of whole 16 bytes (longer ones of whole sectors), the other dims in `order`,
/// outermost first.
pub(crate) fn packed_tensor(like: &Tensor, extents: [u64; 5], along: usize, order: [usize; 4]) -> Tensor {
    let bytes = like.dtype.bytes() as u64;
    let line_bytes = extents[along] * bytes;
    let mut stride = line_bytes.next_multiple_of(if line_bytes < 128 { 16 } else { 32 }) / bytes;
    let mut strides = [0; 5];
    strides[along] = 1;
    for dim in order.into_iter().rev() {
        strides[dim] = stride;
        stride = stride.saturating_mul(extents[dim]);
    }
    Tensor { strides, ..like.clone() }
}

/// The lines of two tensors of equal extents: dims that run on in both are one.
pub(crate) struct Lines {
    /// The dims outside of the lines, outermost first: at most three.
    pub(crate) batch: Vec<u64>,
    /// Lines of one index of the batch.
    pub(crate) count: u64,
    /// Strides of both tensors over the batch, and from line to line.
    batch_strides: [Vec<u64>; 2],
    strides: [u64; 2],
}

impl Lines {
    /// The lines over the dims of `order`, outermost first.
    pub(crate) fn of(one: &Tensor, other: &Tensor, extents: [u64; 5], order: [usize; 4]) -> Lines {
        let mut dims: Vec<(u64, [u64; 2])> = Vec::new();
        for dim in order.into_iter().filter(|&dim| extents[dim] != 1) {
            let (extent, strides) = (extents[dim], [one.strides[dim], other.strides[dim]]);
            match dims.last_mut() {
                Some((outer, outer_strides)) if *outer_strides == strides.map(|stride| stride.saturating_mul(extent)) => {
                    *outer = outer.saturating_mul(extent);
                    *outer_strides = strides;
                }
                _ => dims.push((extent, strides)),
            }
        }
        let innermost = [one, other].map(|tensor| tensor.strides[order[3]]);
        let (count, strides) = dims.pop().unwrap_or((1, innermost));
        Lines {
            batch: dims.iter().map(|(extent, _)| *extent).collect(),
            count,
            batch_strides: [0, 1].map(|side| dims.iter().map(|(_, strides)| strides[side]).collect()),
            strides,
        }
    }

    /// Both tensors as matrices of lines, with strides `along` from one element of a line to the next.
    pub(crate) fn matrices(&self, tensors: [&Tensor; 2], along: [u64; 2]) -> [Matrix; 2] {
        [0, 1].map(|side| Matrix {
            slot: tensors[side].slot,
            dtype: tensors[side].dtype,
            row_stride: self.strides[side],
            column_stride: along[side],
            batch_strides: self.batch_strides[side].clone(),
        })
    }
}

verdigris_kir::parameters! {
    /// Parameters of both kernels; strides in bytes.
    #[derive(Clone, Copy)]
    struct Params / ParamsArgs of Spec as spec {
        source: Read = spec.bytes,
        packed: Write = CHUNK_BYTES,
        line_stride: u64,
        pitch: u64,
        lines: u32,
        length: u32,
        /// Chunks, or tiles, of a line.
        pieces: Divide,
        batch: BatchIndexArgs = (),
        source_batch: BatchStridesBytes = (),
        packed_batch: BatchStridesBytes = (),
        /// Of the source, from one element of a line to the next.
        along_stride: Option<u64> = spec.transpose.then_some(()),
        /// From one line's fence to the next, and bytes within.
        fence: Option<[u64; 2]> = (!spec.transpose).then_some(()),
    }
}

impl<'k> Params<'k> {
    /// The CTA's matrix and its copy.
    fn matrices(&self) -> [Val<'k, u64>; 2] {
        let indices = self.batch.of_cta();
        [self.source_batch.matrix(self.source, indices), self.packed_batch.matrix(self.packed, indices)]
    }
}

/// One element on its way; 0 where it lies outside.
#[derive(Clone, Copy)]
enum Element<'k> {
    Byte(Var<'k, u32>),
    Half(Var<'k, u16>),
    Word(Var<'k, u32>),
}

impl<'k> Element<'k> {
    fn load(k: Kernel<'k>, spec: Spec, inside: Val<'k, bool>, address: Val<'k, u64>, offset_bytes: i64) -> Self {
        match spec.bytes {
            1 => {
                let bits = k.var(0u32);
                k.when(inside, || bits.set(k.ld_global_byte(address, offset_bytes, false)));
                Element::Byte(bits)
            }
            2 => {
                let bits = k.var(0u16);
                k.when(inside, || bits.set(k.ld_global::<u16>(address, offset_bytes)));
                Element::Half(bits)
            }
            _ => {
                let bits = k.var(0u32);
                k.when(inside, || bits.set(k.ld_global::<u32>(address, offset_bytes)));
                Element::Word(bits)
            }
        }
    }

    /// The elements of one word, lowest first.
    fn word(k: Kernel<'k>, elements: &[Element<'k>]) -> Val<'k, u32> {
        match *elements {
            [Element::Byte(a), Element::Byte(b), Element::Byte(c), Element::Byte(d)] => {
                a.prmt(b, 0x0040u32).prmt(c.prmt(d, 0x0040u32), 0x5410u32)
            }
            [Element::Half(low), Element::Half(high)] => k.join16(low, high),
            [Element::Word(word)] => word.get(),
            _ => unreachable!("a word is one, two or four elements"),
        }
    }
}

/// Sixteen bytes of the copy.
struct Piece<'k> {
    exists: Val<'k, bool>,
    /// The windows lie inside the fence.
    whole: Val<'k, bool>,
    /// Elements from here to the end of the line.
    left: Val<'k, u32>,
    from: Val<'k, u64>,
    to: Val<'k, u64>,
}

fn copy<'k>(k: Kernel<'k>, spec: Spec) {
    let params = Params::declare(k, &spec);
    let [fence_stride, fence_bytes] = params.fence.expect("copying kernels have it");
    // What is in front of this launch may still run: nothing of it is touched above.
    k.griddep_wait();
    k.griddep_launch();
    let [source, packed] = params.matrices();
    let count = params.lines * params.pieces.value();
    let first = k.cta() * (THREADS * CHUNKS) + k.thread();
    let window_of = |address: Val<'k, u64>| address & !u64::from(CHUNK_BYTES - 1);
    let piece = |index: Val<'k, u32>| {
        let (line, piece) = params.pieces.split(index);
        let from = source + line.widen() * params.line_stride + piece.mul_wide(CHUNK_BYTES);
        let (window, fence) = (window_of(from), source + line.widen() * fence_stride);
        let exists = index.lt(count);
        Piece {
            exists,
            whole: exists & window.ge(fence) & (window + u64::from(2 * CHUNK_BYTES)).le(fence + fence_bytes),
            left: params.length - piece * spec.chunk(),
            from,
            to: packed + line.widen() * params.pitch + piece.mul_wide(CHUNK_BYTES),
        }
    };

    let pieces: Vec<Piece<'k>> = (0..CHUNKS).map(|turn| piece(first + turn * THREADS)).collect();
    let whole = pieces[1..].iter().fold(pieces[0].whole, |all, piece| all & piece.whole);
    k.when_else(
        whole,
        || {
            // All loads stand before the first use, so that they are on their way together.
            let windows: Vec<Vec<Val<'k, u32>>> = pieces
                .iter()
                .map(|piece| {
                    let load = |offset| k.ld_global_vector::<u32>(window_of(piece.from), offset, 4, Cache::NonCoherent);
                    [load(0), load(i64::from(CHUNK_BYTES))].concat()
                })
                .collect();
            for (piece, words) in pieces.iter().zip(windows) {
                k.st_global_vector(piece.to, 0, &shifted(k, spec, words, piece.from.low32()), Cache::Default);
            }
        },
        || {
            k.range(CHUNKS, |turn| {
                let piece = piece(first + turn * THREADS);
                k.when(piece.exists, || {
                    let elements: Vec<Element<'k>> = (0..spec.chunk())
                        .map(|i| Element::load(k, spec, piece.left.gt(i), piece.from, i64::from(i * spec.bytes)))
                        .collect();
                    let words: Vec<Val<'k, u32>> = elements.chunks(4 / spec.bytes as usize).map(|part| Element::word(k, part)).collect();
                    k.st_global_vector(piece.to, 0, &words, Cache::Default);
                });
            });
        },
    );
}

/// Four words of eight, from byte `first % 16` on.
fn shifted<'k>(k: Kernel<'k>, spec: Spec, mut words: Vec<Val<'k, u32>>, first: Val<'k, u32>) -> Vec<Val<'k, u32>> {
    for step in [2usize, 1] {
        let moves = (first & (4 * step as u32)).ne(0);
        words = (0..words.len() - step).map(|i| k.select(moves, words[i + step], words[i])).collect();
    }
    if spec.bytes < 4 {
        // Byte n of the word and the three behind it.
        let selector = (first & 3u32) * 0x1111u32 + 0x3210u32;
        words = (0..4).map(|i| words[i].prmt(words[i + 1], selector)).collect();
    }
    words.truncate(4);
    words
}

fn transpose<'k>(k: Kernel<'k>, spec: Spec) {
    let params = Params::declare(k, &spec);
    let along_stride = params.along_stride.expect("transposing kernels have it");
    // What is in front of this launch may still run: nothing of it is touched above.
    k.griddep_wait();
    k.griddep_launch();
    let tile = k.shared("tile", TILE_LINES * TILE_PITCH_BYTES, 4).address();
    let [source, packed] = params.matrices();
    let (tile_line, tile_piece) = params.pieces.split(k.cta());
    let (first_line, first_along) = (tile_line * TILE_LINES, tile_piece * spec.tile_length());

    // In: a warp takes 32 neighbouring lines at one depth; a thread takes the elements of every fourth word of its line.
    let (thread, warp) = (k.thread(), k.warp());
    let line = k.lane() + (warp & 1u32) * 32;
    let first_word = warp >> 1;
    let per_word = 4 / spec.bytes;
    let along = first_along + first_word * per_word;
    let line_inside = (first_line + line).lt(params.lines);
    let start = source + (first_line + line).widen() * params.line_stride + along.widen() * along_stride;
    let words = TILE_BYTES / 4 / 4;
    let elements: Vec<Element<'k>> = (0..words * per_word)
        .map(|i| {
            let ahead = i / per_word * (4 * per_word) + i % per_word;
            let inside = line_inside & (along + ahead).lt(params.length);
            Element::load(k, spec, inside, start + along_stride * u64::from(ahead), 0)
        })
        .collect();
    let at = tile + line * TILE_PITCH_BYTES + first_word * 4;
    for (i, part) in elements.chunks(per_word as usize).enumerate() {
        k.st_shared(at, 16 * i as i64, Element::word(k, part));
    }
    k.bar_sync();

    // Out: eight threads write a line.
    for turn in 0..TILE_LINES / (THREADS / 8) {
        let line = (thread >> 3) + turn * (THREADS / 8);
        let chunk = thread & 7;
        let inside = (first_line + line).lt(params.lines) & (first_along + chunk * spec.chunk()).lt(params.length);
        k.when(inside, || {
            let from = tile + line * TILE_PITCH_BYTES + chunk * CHUNK_BYTES;
            let words: Vec<Val<'k, u32>> = (0..4).map(|i| k.ld_shared(from, 4 * i)).collect();
            let to = packed + (first_line + line).widen() * params.pitch + tile_piece.mul_wide(TILE_BYTES) + chunk.mul_wide(CHUNK_BYTES);
            k.st_global_vector(to, 0, &words, Cache::Default);
        });
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
            assert_eq!(program.buffer_alignment_bytes, [bytes, 16]);
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
                for length in [1, chunk - 1, chunk, chunk + 1, tile - 1, tile, tile + 1] {
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
        let at_once = u64::from(THREADS * CHUNKS);
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
}
