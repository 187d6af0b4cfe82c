//! Unpacking: results that a kernel left in scratch, in lines that TMA writes, on their way to a tensor of any strides.
//!
//! The opposite of [`super::repack`]: lines run along one dim (channels), begin at multiples of 16 bytes and are written out to wherever
//! the tensor's elements lie.
//!
//! **Spreading** keeps the contiguous index: lanes walk a line together, an element each, four of them on their way. **Transposing** takes
//! a tile through shared memory: 16 bytes of a line in, and out along the lines, of which neighbours are neighbouring elements where
//! channels come first.
//!
//! **Cost.** Every element is read once and written once. **Numbers.** Bytes are moved, never converted.

use verdigris_graph::{Matrix, Tensor};
use verdigris_kir::face::{Header, Kernel, Val, Var, build};
use verdigris_kir::inst::{Cache, CvtRound};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::{Divide, Read, Write};
use verdigris_kir::program::{Address, KernelRef, Launch};

use super::batch::{BatchIndexArgs, BatchStridesBytes, Chunk};
use super::repack::{Lines, packed_tensor};
use crate::cost::{Stream, Traffic};

/// Threads of a CTA.
const THREADS: u32 = 256;
/// Elements that a spreading thread has on their way at a time.
const UNROLL: u32 = 4;
/// Lines of a transposed tile, and bytes of each.
const TILE_LINES: u32 = 64;
const TILE_BYTES: u32 = 128;
/// One word beyond a line of the tile keeps its columns on different banks.
const TILE_PITCH_BYTES: u32 = TILE_BYTES + 4;
/// What a thread reads of a line at once.
const CHUNK_BYTES: u32 = 16;
/// The most elements (spreading) or tiles (transposing) of one launch.
const LAUNCH_PIECES: u64 = 1 << 30;

/// Everything that shapes a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Spec {
    /// Bytes of an element: 1, 2 or 4.
    bytes: u32,
    /// The tensor's neighbouring elements are not those of a line.
    transpose: bool,
}

impl Spec {
    fn name(self) -> String {
        format!("unpack_{}_b{}", if self.transpose { "transpose" } else { "spread" }, 8 * self.bytes)
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(self) -> KernelBody {
        let header = Header { name: self.name(), target: Target::Sm90, threads: THREADS, ..Header::default() };
        build(header, |k| if self.transpose { transpose(k, self) } else { spread(k, self) })
    }
}

/// Every unpacking kernel.
pub(crate) fn catalog() -> impl Iterator<Item = KernelRef> {
    [1, 2, 4].into_iter().flat_map(|bytes| [false, true].map(|transpose| Spec { bytes, transpose }.kernel()))
}

/// A tensor to be written from a packed copy of it.
#[derive(Clone, Debug)]
pub(crate) struct Unpack {
    packed: Matrix,
    target: Matrix,
    spec: Spec,
    /// Lines of one matrix, and elements of a line.
    lines: u64,
    length: u64,
    batch: Vec<u64>,
}

impl Unpack {
    /// The way back from [`packed_tensor`] with the same arguments. Elements have 1, 2 or 4 bytes.
    pub(crate) fn of_tensor(target: &Tensor, extents: [u64; 5], along: usize, order: [usize; 4]) -> Unpack {
        let packed = packed_tensor(target, extents, along, order);
        let lines = Lines::of(&packed, target, extents, order);
        let [packed, target] = lines.matrices([&packed, target], [1, target.strides[along]]);
        let spec = Spec { bytes: target.dtype.bytes() as u32, transpose: target.column_stride != 1 };
        Unpack { packed, target, spec, lines: lines.count, length: extents[along], batch: lines.batch }
    }

    /// The size of the packed copy.
    pub(crate) fn scratch_bytes(&self) -> u64 {
        self.batch.iter().product::<u64>() * self.lines * self.packed.row_stride * u64::from(self.spec.bytes)
    }

    /// What the copy asks.
    pub(crate) fn work(&self) -> Stream {
        let bytes = f64::from(self.spec.bytes);
        let elements = self.batch.iter().product::<u64>() as f64 * self.lines as f64 * self.length as f64;
        // A warp writes neighbouring lines; where they do not touch, each element costs a sector.
        let write = if self.spec.transpose { (self.target.row_stride as f64 * bytes).clamp(bytes, 32.0) } else { bytes };
        Stream::new(if self.spec.transpose { Traffic::Transposed } else { Traffic::Lines }, elements * (write + bytes))
    }

    /// The launches that write the tensor at `target` from its copy at `scratch` (16-byte aligned).
    pub(crate) fn launches(&self, scratch: Address, target: Address) -> Vec<Launch> {
        let bytes = u64::from(self.spec.bytes);
        let tile_length = u64::from(TILE_BYTES) / bytes;
        let pieces = if self.spec.transpose { self.length.div_ceil(tile_length) } else { self.length };
        let shared = if self.spec.transpose { u64::from(TILE_LINES) } else { 1 };
        let lines_at_once = ((LAUNCH_PIECES / pieces.max(1)).max(1) * shared).min(LAUNCH_PIECES);
        let mut launches = Vec::new();
        for chunk in Chunk::all(&self.batch) {
            for first_line in (0..self.lines).step_by(lines_at_once as usize) {
                let lines = lines_at_once.min(self.lines - first_line);
                let at = |matrix: &Matrix, base: Address| {
                    let offset = matrix.offset(&chunk.first, first_line, 0) * bytes;
                    Address { offset_bytes: base.offset_bytes + offset, ..base }
                };
                let args = ParamsArgs {
                    packed: at(&self.packed, scratch),
                    target: at(&self.target, target),
                    pitch: self.packed.row_stride * bytes,
                    line_stride: self.target.row_stride * bytes,
                    along_stride: self.target.column_stride * bytes,
                    lines: lines as u32,
                    length: self.length as u32,
                    pieces: pieces as u32,
                    batch: chunk.index(),
                    packed_batch: chunk.strides_bytes(&self.packed),
                    target_batch: chunk.strides_bytes(&self.target),
                };
                let ctas = if self.spec.transpose {
                    lines.div_ceil(shared) * pieces
                } else {
                    (lines * pieces).div_ceil(u64::from(THREADS * UNROLL))
                };
                let [y, z] = chunk.grid();
                launches.push(Launch::new(self.spec.kernel(), [ctas as u32, y, z], args.bound(&self.spec)).overlapping());
            }
        }
        launches
    }
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
        lines: u32,
        length: u32,
        /// Elements, or tiles, of a line.
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

fn spread<'k>(k: Kernel<'k>, spec: Spec) {
    let params = Params::declare(k, &spec);
    let [packed, target] = params.matrices();
    // What is in front of this launch may still run: nothing of it is touched above.
    k.griddep_wait();
    k.griddep_launch();
    let count = params.lines * params.pieces.value();
    let first = k.cta() * (THREADS * UNROLL) + k.thread();
    // All loads stand before the first store, so that they are on their way together.
    let elements: Vec<(Val<'k, bool>, Val<'k, u64>, Var<'k, u32>)> = (0..UNROLL)
        .map(|turn| {
            let index = first + turn * THREADS;
            let (line, element) = params.pieces.split(index);
            let (inside, bits) = (index.lt(count), k.var(0u32));
            let from = packed + line.widen() * params.pitch + element.mul_wide(spec.bytes);
            k.when(inside, || bits.set(load(k, spec, from, 0)));
            (inside, target + line.widen() * params.line_stride + element.widen() * params.along_stride, bits)
        })
        .collect();
    for (inside, to, bits) in elements {
        k.when(inside, || store(k, spec, to, bits.get()));
    }
}

/// The bits of an element, in the low part of a word.
fn load<'k>(k: Kernel<'k>, spec: Spec, from: Val<'k, u64>, offset_bytes: i64) -> Val<'k, u32> {
    match spec.bytes {
        1 => k.ld_global_byte(from, offset_bytes, false),
        2 => k.ld_global::<u16>(from, offset_bytes).convert(CvtRound::None),
        _ => k.ld_global(from, offset_bytes),
    }
}

fn store<'k>(k: Kernel<'k>, spec: Spec, to: Val<'k, u64>, bits: Val<'k, u32>) {
    match spec.bytes {
        1 => k.st_global_byte(to, 0, bits),
        2 => k.st_global(to, 0, bits.low16()),
        _ => k.st_global(to, 0, bits),
    }
}

fn transpose<'k>(k: Kernel<'k>, spec: Spec) {
    let params = Params::declare(k, &spec);
    let [packed, target] = params.matrices();
    // What is in front of this launch may still run: nothing of it is touched above.
    k.griddep_wait();
    k.griddep_launch();
    let tile = k.shared("tile", TILE_LINES * TILE_PITCH_BYTES, 4).address();
    let (tile_line, tile_piece) = params.pieces.split(k.cta());
    let tile_length = TILE_BYTES / spec.bytes;
    let (first_line, first_along) = (tile_line * TILE_LINES, tile_piece * tile_length);
    let thread = k.thread();

    // In: eight threads read a line, 16 bytes each; what lies beyond the line's elements is not read.
    for turn in 0..TILE_LINES / (THREADS / 8) {
        let line = (thread >> 3) + turn * (THREADS / 8);
        let chunk = thread & 7;
        let element = first_along + chunk * (CHUNK_BYTES / spec.bytes);
        let from = packed + (first_line + line).widen() * params.pitch + element.mul_wide(spec.bytes);
        let to = tile + line * TILE_PITCH_BYTES + chunk * CHUNK_BYTES;
        k.when((first_line + line).lt(params.lines), || {
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
                                bits.set(bits.get() | (load(k, spec, from, i64::from(offset)) << (8 * i * spec.bytes)));
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
    let line = k.lane() + (k.warp() & 1u32) * 32;
    let inside = (first_line + line).lt(params.lines);
    let to = target + (first_line + line).widen() * params.line_stride;
    for turn in 0..tile_length / (THREADS / 64) {
        let along = (k.warp() >> 1) + turn * (THREADS / 64);
        k.when(inside & (first_along + along).lt(params.length), || {
            let to = to + (first_along + along).widen() * params.along_stride;
            // The word that the element stands in.
            let bit = (along * (8 * spec.bytes)) & 31u32;
            let word = k.ld_shared::<u32>(tile + line * TILE_PITCH_BYTES + ((along * spec.bytes) & !3u32), 0);
            store(k, spec, to, word.shr(bit));
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
                    let unpack = Unpack::of_tensor(&target, extents, 1, order);
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
                    assert_eq!(program.buffer_alignment_bytes, [16, bytes as u64]);
                    let said = format!("{dtype} {extents:?} {:?}", target.strides);
                    run(&program, &kernels, &mut memory, &Options::schedule((number * 4 + seed) as u64))
                        .unwrap_or_else(|findings| panic!("{said}: {findings}"));
                    assert_eq!(memory.to_vec(to), wanted, "{said}");
                }
            }
        }
    }
}
