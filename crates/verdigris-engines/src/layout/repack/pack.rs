//! The kernels that copy an operand into lines.
//!
//! **Copying** keeps the contiguous index and changes the pitch. A thread makes 16 bytes of a line: it reads the two aligned 16-byte
//! windows that they lie in, whatever their alignment, and shifts them together. Windows that reach beyond the elements of the matrix are
//! not read; what they would bring is loaded element by element.
//!
//! **Transposing** makes another index contiguous. A CTA takes a tile through shared memory: element by element in, 16 bytes out. It takes
//! any two strides, also where neither index is contiguous. A tile has pieces of neighbouring lines, and where these are few (the taps of a filter) the next
//! pieces of the same ones.

use verdigris_kir::face::{Kernel, Val, Var};
use verdigris_kir::inst::Cache;
use verdigris_kir::params::{Divide, Read, Write};
use verdigris_kir::program::Launch;

use super::slots::Slots;
use super::{CHUNK_BYTES, PIECES, Part, Repack, Spec, THREADS, TILE_BYTES, TILE_LINES, TILE_PITCH_BYTES, begin};
use crate::layout::batch::{BatchIndexArgs, BatchStridesBytes};
use crate::layout::transposing::shifted;

/// The launch that copies a part.
pub(super) fn launch(repack: &Repack, part: &Part) -> Launch {
    let (spec, bytes) = (repack.spec, u64::from(repack.spec.bytes));
    let [source, packed] = part.ends;
    let (line_stride, along) = repack.strides(&repack.loose);
    let (pitch, _) = repack.strides(&repack.packed);
    // Where lines follow each other without a gap, all that lies between the first and the last element may be read.
    let line_bytes = repack.length * bytes;
    let lines = u64::from(part.lines);
    let gapless = line_stride <= repack.length;
    let fence = if gapless { [0, (lines - 1) * line_stride * bytes + line_bytes] } else { [line_stride * bytes, line_bytes] };
    let args = ParamsArgs {
        source,
        packed,
        line_stride: line_stride * bytes,
        pitch: pitch * bytes,
        lines: part.lines,
        length: repack.length as u32,
        pieces: part.pieces,
        batch: part.chunk.index(),
        source_batch: part.chunk.strides_bytes(&repack.loose),
        packed_batch: part.chunk.strides_bytes(&repack.packed),
        along_stride: spec.transpose.then_some(along * bytes),
        fence: (!spec.transpose).then_some(fence),
    };
    Launch::new(spec.kernel(), part.grid, args.bound(&spec))
}

verdigris_kir::parameters! {
    /// Parameters of both kernels; strides in bytes.
    #[derive(Clone, Copy)]
    struct Params / ParamsArgs of Spec as spec {
        source: Read = spec.bytes,
        packed: Write = CHUNK_BYTES,
        line_stride: u64,
        pitch: u64,
        lines: Divide,
        length: u32,
        /// Chunks, or pieces of a tile, of a line.
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

pub(super) fn copy<'k>(k: Kernel<'k>, spec: Spec) {
    let params = Params::declare(k, &spec);
    let [fence_stride, fence_bytes] = params.fence.expect("copying kernels have it");
    begin(k);
    let [source, packed] = params.matrices();
    let count = params.lines.value() * params.pieces.value();
    let first = k.cta() * (THREADS * PIECES) + k.thread();
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

    let pieces: Vec<Piece<'k>> = (0..PIECES).map(|turn| piece(first + turn * THREADS)).collect();
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
                k.st_global_vector(piece.to, 0, &shifted(k, spec.bytes, words, piece.from.low32()), Cache::Default);
            }
        },
        || {
            k.range(PIECES, |turn| {
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

pub(super) fn transpose<'k>(k: Kernel<'k>, spec: Spec) {
    let params = Params::declare(k, &spec);
    let along_stride = params.along_stride.expect("transposing kernels have it");
    begin(k);
    let tile = k.shared("tile", TILE_LINES * TILE_PITCH_BYTES, 4).address();
    let [source, packed] = params.matrices();
    let slots = Slots { lines: params.lines, pieces: params.pieces.value(), first: k.cta() * TILE_LINES, length: spec.tile_length() };

    // In: a warp takes 32 neighbouring lines at one depth; a thread takes the elements of every fourth word of its line.
    let (thread, warp) = (k.thread(), k.warp());
    let place = k.lane() + (warp & 1u32) * 32;
    let slot = slots.at(place);
    let first_word = warp >> 1;
    let per_word = 4 / spec.bytes;
    let along = slot.along + first_word * per_word;
    let start = source + slot.line.widen() * params.line_stride + along.widen() * along_stride;
    let words = TILE_BYTES / 4 / 4;
    let elements: Vec<Element<'k>> = (0..words * per_word)
        .map(|i| {
            let ahead = i / per_word * (4 * per_word) + i % per_word;
            let inside = slot.exists & (along + ahead).lt(params.length);
            Element::load(k, spec, inside, start + along_stride * u64::from(ahead), 0)
        })
        .collect();
    let at = tile + place * TILE_PITCH_BYTES + first_word * 4;
    for (i, part) in elements.chunks(per_word as usize).enumerate() {
        k.st_shared(at, 16 * i as i64, Element::word(k, part));
    }
    k.bar_sync();

    // Out: eight threads write a line.
    for turn in 0..TILE_LINES / (THREADS / 8) {
        let place = (thread >> 3) + turn * (THREADS / 8);
        let slot = slots.at(place);
        let chunk = thread & 7;
        let along = slot.along + chunk * spec.chunk();
        k.when(slot.exists & along.lt(params.length), || {
            let from = tile + place * TILE_PITCH_BYTES + chunk * CHUNK_BYTES;
            let words: Vec<Val<'k, u32>> = (0..4).map(|i| k.ld_shared(from, 4 * i)).collect();
            let to = packed + slot.line.widen() * params.pitch + along.mul_wide(spec.bytes);
            k.st_global_vector(to, 0, &words, Cache::Default);
        });
    }
}
