//! The kernels that bring lines back to a tensor of any strides: the opposite of [`super::pack`].
//!
//! **Spreading** keeps the contiguous index: lanes walk a line together, an element each, four of them on their way. **Transposing** takes
//! a tile through shared memory: 16 bytes of a line in, and out along the lines, of which neighbours are neighbouring elements where
//! channels come first.

use verdigris_kir::face::{Kernel, Val, Var};
use verdigris_kir::inst::Cache;
use verdigris_kir::params::{Divide, Read, Write};
use verdigris_kir::program::Launch;

use super::slots::Slots;
use super::{CHUNK_BYTES, PIECES, Part, Repack, Spec, THREADS, TILE_LINES, TILE_PITCH_BYTES, begin};
use crate::layout::batch::{BatchIndexArgs, BatchStridesBytes};
use crate::layout::transposing::{load, store};

/// The launch that writes a part.
pub(super) fn launch(repack: &Repack, part: &Part) -> Launch {
    let (spec, bytes) = (repack.spec, u64::from(repack.spec.bytes));
    let [target, packed] = part.ends;
    let args = ParamsArgs {
        packed,
        target,
        pitch: repack.packed.row_stride * bytes,
        line_stride: repack.loose.row_stride * bytes,
        along_stride: repack.loose.column_stride * bytes,
        lines: part.lines,
        length: repack.length as u32,
        pieces: part.pieces,
        batch: part.chunk.index(),
        packed_batch: part.chunk.strides_bytes(&repack.packed),
        target_batch: part.chunk.strides_bytes(&repack.loose),
    };
    Launch::new(spec.kernel(), part.grid, args.bound(&spec))
}

verdigris_kir::parameters! {
    /// Parameters of both kernels; strides in bytes.
    #[derive(Clone, Copy)]
    struct Params / ParamsArgs of Spec as spec {
        packed: Read = CHUNK_BYTES,
        target: Write = spec.bytes,
        pitch: u64,
        line_stride: u64,
        along_stride: u64,
        lines: Divide,
        length: u32,
        /// Elements, or pieces of a tile, of a line.
        pieces: Divide,
        batch: BatchIndexArgs = (),
        packed_batch: BatchStridesBytes = (),
        target_batch: BatchStridesBytes = (),
    }
}

impl<'k> Params<'k> {
    /// The CTA's packed matrix and the target's.
    fn matrices(&self) -> [Val<'k, u64>; 2] {
        let indices = self.batch.of_cta();
        [self.packed_batch.matrix(self.packed, indices), self.target_batch.matrix(self.target, indices)]
    }
}

pub(super) fn spread<'k>(k: Kernel<'k>, spec: Spec) {
    let params = Params::declare(k, &spec);
    let [packed, target] = params.matrices();
    begin(k);
    let count = params.lines.value() * params.pieces.value();
    let first = k.cta() * (THREADS * PIECES) + k.thread();
    // All loads stand before the first store, so that they are on their way together.
    let elements: Vec<(Val<'k, bool>, Val<'k, u64>, Var<'k, u32>)> = (0..PIECES)
        .map(|turn| {
            let index = first + turn * THREADS;
            let (line, element) = params.pieces.split(index);
            let (inside, bits) = (index.lt(count), k.var(0u32));
            let from = packed + line.widen() * params.pitch + element.mul_wide(spec.bytes);
            k.when(inside, || bits.set(load(k, spec.bytes, from, 0)));
            (inside, target + line.widen() * params.line_stride + element.widen() * params.along_stride, bits)
        })
        .collect();
    for (inside, to, bits) in elements {
        k.when(inside, || store(k, spec.bytes, to, bits.get()));
    }
}

pub(super) fn transpose<'k>(k: Kernel<'k>, spec: Spec) {
    let params = Params::declare(k, &spec);
    let [packed, target] = params.matrices();
    begin(k);
    let tile = k.shared("tile", TILE_LINES * TILE_PITCH_BYTES, 4).address();
    let tile_length = spec.tile_length();
    let slots = Slots { lines: params.lines, pieces: params.pieces.value(), first: k.cta() * TILE_LINES, length: tile_length };
    let thread = k.thread();

    // In: eight threads read a line, 16 bytes each; what lies beyond the line's elements is not read.
    for turn in 0..TILE_LINES / (THREADS / 8) {
        let place = (thread >> 3) + turn * (THREADS / 8);
        let slot = slots.at(place);
        let chunk = thread & 7;
        let element = slot.along + chunk * (CHUNK_BYTES / spec.bytes);
        let from = packed + slot.line.widen() * params.pitch + element.mul_wide(spec.bytes);
        let to = tile + place * TILE_PITCH_BYTES + chunk * CHUNK_BYTES;
        k.when(slot.exists, || {
            k.when_else(
                (element + CHUNK_BYTES / spec.bytes).le(params.length),
                || {
                    let words = k.ld_global_vector::<u32>(from, 0, 4, Cache::Default);
                    words.iter().zip(0..).for_each(|(&word, i)| k.st_shared(to, 4 * i, word));
                },
                || {
                    for word in 0..4 {
                        let bits = k.var(0u32);
                        for i in 0..4 / spec.bytes {
                            let offset = 4 * word + i * spec.bytes;
                            k.when((element + offset / spec.bytes).lt(params.length), || {
                                bits.set(bits.get() | (load(k, spec.bytes, from, i64::from(offset)) << (8 * i * spec.bytes)));
                            });
                        }
                        k.st_shared(to, 4 * i64::from(word), bits.get());
                    }
                },
            );
        });
    }
    k.bar_sync();

    // Out: a warp takes neighbouring lines at one element.
    let place = k.lane() + (k.warp() & 1u32) * 32;
    let slot = slots.at(place);
    let to = target + slot.line.widen() * params.line_stride;
    for turn in 0..tile_length / (THREADS / 64) {
        let along = (k.warp() >> 1) + turn * (THREADS / 64);
        k.when(slot.exists & (slot.along + along).lt(params.length), || {
            let to = to + (slot.along + along).widen() * params.along_stride;
            // The word that the element stands in.
            let bit = (along * (8 * spec.bytes)) & 31u32;
            let word = k.ld_shared::<u32>(tile + place * TILE_PITCH_BYTES + ((along * spec.bytes) & !3u32), 0);
            store(k, spec.bytes, to, word.shr(bit));
        });
    }
}
