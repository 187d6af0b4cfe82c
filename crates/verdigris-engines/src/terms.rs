//! Copies that change values: operands as sums of 16-bit terms, and activations behind their prologue. Convolutions and products share them.
//!
//! **What.** `v = prologue(x)`, written as `terms` numbers of the type that the tensor cores take: `t₀ = round(v)`, `t₁ = round(v − t₀)`,
//! `t₂ = round(v − t₀ − t₁)`. A product is then a sum of products of terms, formed one after the other in the depth, those of the smallest
//! size first. An f32 value of 2⁻¹⁰⁹ and more is three bf16 terms exactly, a smaller one to 2⁻¹³⁴, half of the least bf16; of the nine products, the three that
//! are left out are below 2⁻²³ of the product. Two terms, and three products, are short of it by 2⁻¹⁶, where tf32 is short by 2⁻¹¹. 8-bit floats are bf16 values as they are.
//! The copy of a tensor has its channels last, that of a matrix its depth, whatever the order of the source.
//! **Cost.** The operand is read once and each term written once.
//! **Numbers.** What is not finite stands in the last term, behind a first one of 1 with its sign: the last terms are multiplied by first terms
//! alone, so that an infinity meets no zero but a factor that is one, and what comes of it has the right sign. The last term lies in front of the
//! others ([`place`]): loads that run past the end of a term's images, whose factors are zero, come upon finite numbers.
//! **Source.** Henry et al., "Leveraging the bfloat16 artificial intelligence datatype for higher-precision computations", ARITH 2019.

use verdigris_graph::{ConvProblem, Matrix, Tensor};
use verdigris_kir::face::{Header, Kernel, Val, Var, build};
use verdigris_kir::inst::Cache;
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::{Divide, Read, Write};
use verdigris_kir::program::{Address, KernelRef, Launch};
use verdigris_tensor::DType;

use crate::cost::{Stream, Traffic};
use crate::fuse::compute;
use crate::fuse::prologue::{PrologueArgs, PrologueSpec};
use crate::layout::batch::{BatchIndexArgs, BatchStridesBytes, Chunk};
use crate::layout::repack::{Lines, Slots, packed_tensor};

/// Threads of a CTA.
const THREADS: u32 = 256;
/// Pairs of channels that a thread has on their way at a time.
const UNROLL: u32 = 2;
/// Pieces of lines of a tile that is transposed, bytes of each, and their distance: one word more keeps columns on different banks.
const TILE_LINES: u32 = 64;
const TILE_BYTES: u32 = 128;
const TILE_PITCH_BYTES: u32 = TILE_BYTES + 4;
/// The most pairs or tiles of one launch.
const LAUNCH_PIECES: u64 = 1 << 30;

/// How a line's elements lie in the source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Walk {
    /// Side by side, lines beginning at even places.
    Pairs,
    /// Side by side.
    Single,
    /// Apart: a tile goes through shared memory.
    Across,
}

impl Walk {
    /// That of a source in lines.
    fn of(source: &Matrix) -> Walk {
        let even = source.batch_strides.iter().chain([&source.row_stride]).all(|stride| stride.is_multiple_of(2));
        match source.column_stride {
            1 if even => Walk::Pairs,
            1 => Walk::Single,
            _ => Walk::Across,
        }
    }
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Debug)]
struct Spec {
    from: DType,
    to: DType,
    terms: u32,
    walk: Walk,
    prologue: PrologueSpec,
}

impl Spec {
    fn name(&self) -> String {
        let walk = match self.walk {
            Walk::Pairs => "pairs",
            Walk::Single => "single",
            Walk::Across => "across",
        };
        format!("conv_terms_{}_{}x{}_{walk}{}", self.from, self.to, self.terms, self.prologue.name())
    }

    fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: Target::Sm90, threads: THREADS, ..Header::default() };
        build(header, |k| if self.walk == Walk::Across { across(k, self) } else { along(k, self) })
    }

    /// What the source's address is a multiple of: its elements, or pairs of them.
    fn source_alignment_bytes(&self) -> u32 {
        self.from.bytes() as u32 * if self.walk == Walk::Pairs { 2 } else { 1 }
    }

    /// Channels of a tile.
    fn tile_channels(&self) -> u32 {
        TILE_BYTES / self.to.bytes() as u32
    }
}

/// The kernels without a prologue.
pub(crate) fn catalog() -> impl Iterator<Item = KernelRef> {
    let kinds = [(DType::F32, 3), (DType::F32, 2), (DType::E4m3, 1), (DType::E5m2, 1)];
    kinds.into_iter().flat_map(|(from, terms)| {
        [Walk::Pairs, Walk::Single, Walk::Across]
            .map(|walk| Spec { from, to: DType::Bf16, terms, walk, prologue: PrologueSpec::none(from) }.kernel())
    })
}

/// Elements from one line of a matrix of terms to the next: lines that TMA maps, of whole segments but for those that padding would multiply.
pub(crate) fn pitch(depth: u64, to: DType) -> u64 {
    depth.next_multiple_of(if depth < 64 { 16 / to.bytes() as u64 } else { 64 })
}

/// A copy to be made of an operand, in lines of channels.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    source: Matrix,
    packed: Matrix,
    spec: Spec,
    /// Lines of one matrix, and channels.
    lines: u64,
    length: u64,
    /// Elements of a line of the copy, with what lies between two.
    pitch: u64,
    /// From one term to the next within lines; nothing where each term has lines of its own behind those of the one before.
    beside: Option<u64>,
    batch: Vec<u64>,
    prologue: Option<PrologueArgs>,
}

impl Terms {
    /// The copy of an operand as `terms` tensors of `to`, one behind the other, each as [`packed_tensor`] places it along dim 1 and in `order`.
    /// `through`: the problem whose prologue the operand passes through.
    pub(crate) fn of_tensor(
        source: &Tensor,
        to: DType,
        terms: u32,
        extents: [u64; 5],
        order: [usize; 4],
        through: Option<&ConvProblem>,
    ) -> Terms {
        let packed = packed_tensor(&Tensor { dtype: to, ..source.clone() }, extents, 1, order);
        let pitch = packed.strides[order[3]];
        // Where channels lie apart, neighbours are neighbouring pixels (or taps), whatever order the copy has.
        let lines = Lines::of(source, &packed, extents, if source.strides[1] == 1 { order } else { [0, 2, 3, 4] });
        let [source, packed] = lines.matrices([source, &packed], [source.strides[1], 1]);
        let walk = Walk::of(&source);
        let prologue = through.map_or(PrologueSpec::none(source.dtype), PrologueSpec::of);
        let args = through.filter(|_| !prologue.is_empty()).map(|problem| prologue.arguments(problem));
        let spec = Spec { from: source.dtype, to, terms, walk, prologue };
        Terms { source, packed, spec, lines: lines.count, length: extents[1], pitch, beside: None, batch: lines.batch, prologue: args }
    }

    /// The same, but that the terms of a line stand beside each other in it, as further channels; and the copy. The channels are whole 16 bytes.
    pub(crate) fn side_by_side(source: &Tensor, to: DType, terms: u32, extents: [u64; 5], order: [usize; 4]) -> (Terms, Tensor) {
        let mut wide = extents;
        wide[1] *= u64::from(terms);
        let copy = packed_tensor(&Tensor { dtype: to, ..source.clone() }, wide, 1, order);
        let lines = Lines::of(source, &copy, extents, if source.strides[1] == 1 { order } else { [0, 2, 3, 4] });
        let [source, packed] = lines.matrices([source, &copy], [source.strides[1], 1]);
        let (pitch, walk) = (copy.strides[order[3]], Walk::of(&source));
        let spec = Spec { from: source.dtype, to, terms, walk, prologue: PrologueSpec::none(source.dtype) };
        let beside = Some(extents[1]);
        let terms =
            Terms { source, packed, spec, lines: lines.count, length: extents[1], pitch, beside, batch: lines.batch, prologue: None };
        (terms, copy)
    }

    /// All lines.
    fn lines_bytes(&self) -> u64 {
        self.matrices() * self.lines * self.pitch * self.spec.to.bytes() as u64
    }

    /// From one term to the next.
    fn term_bytes(&self) -> u64 {
        self.beside.map_or_else(|| self.lines_bytes(), |channels| channels * self.spec.to.bytes() as u64)
    }

    /// The copy of an operand of `rows` by `depth` as `terms` stacks of matrices of `to`, one behind the other: each has one matrix for each of the
    /// batch that the operand has one for, and its rows are lines.
    pub(crate) fn of_matrix(source: &Matrix, to: DType, terms: u32, [rows, depth]: [u64; 2], batch: &[u64]) -> Terms {
        let pitch = pitch(depth, to);
        let batch: Vec<u64> =
            batch.iter().zip(&source.batch_strides).map(|(&extent, &stride)| if stride == 0 { 1 } else { extent }).collect();
        let mut matrices = 1;
        let mut batch_strides = vec![0; batch.len()];
        for ((packed, &extent), &stride) in batch_strides.iter_mut().zip(&batch).zip(&source.batch_strides).rev() {
            if stride != 0 {
                *packed = matrices * rows * pitch;
                matrices *= extent;
            }
        }
        let packed = Matrix { dtype: to, row_stride: pitch, column_stride: 1, batch_strides, ..source.clone() };
        let spec = Spec { from: source.dtype, to, terms, walk: Walk::of(source), prologue: PrologueSpec::none(source.dtype) };
        Terms { source: source.clone(), packed, spec, lines: rows, length: depth, pitch, beside: None, batch, prologue: None }
    }

    /// A term of a matrix as it lies in the copy. Its slot is that of the operand, and means nothing.
    pub(crate) fn packed(&self) -> &Matrix {
        &self.packed
    }

    /// Matrices of one term.
    pub(crate) fn matrices(&self) -> u64 {
        self.batch.iter().product()
    }

    /// The size of the copy.
    pub(crate) fn scratch_bytes(&self) -> u64 {
        if self.beside.is_some() { self.lines_bytes() } else { u64::from(self.spec.terms) * self.lines_bytes() }
    }

    /// What the copy asks.
    pub(crate) fn work(&self) -> Stream {
        let bytes = self.spec.from.bytes() as f64 + self.spec.to.bytes() as f64 * f64::from(self.spec.terms);
        let elements = self.matrices() as f64 * self.lines as f64 * self.length as f64;
        Stream::new(if self.spec.walk == Walk::Across { Traffic::Transposed } else { Traffic::Lines }, elements * bytes)
    }

    /// The launches that make the copy at `scratch`.
    pub(crate) fn launches(&self, source: Address, scratch: Address) -> Vec<Launch> {
        let (from_bytes, to_bytes) = (self.spec.from.bytes() as u64, self.spec.to.bytes() as u64);
        let across = self.spec.walk == Walk::Across;
        let pieces = if across { self.length.div_ceil(u64::from(self.spec.tile_channels())) } else { self.length.div_ceil(2) };
        let of_cta = u64::from(if across { TILE_LINES } else { THREADS * UNROLL });
        let lines_at_once = (LAUNCH_PIECES / pieces.max(1)).max(1);
        let mut launches = Vec::new();
        for chunk in Chunk::all(&self.batch) {
            for first_line in (0..self.lines).step_by(lines_at_once as usize) {
                let lines = lines_at_once.min(self.lines - first_line);
                let at = |matrix: &Matrix, base: Address, bytes: u64| Address {
                    offset_bytes: base.offset_bytes + matrix.offset(&chunk.first, first_line, 0) * bytes,
                    ..base
                };
                let args = TermsArgs {
                    source: at(&self.source, source, from_bytes),
                    terms: at(&self.packed, scratch, to_bytes),
                    line_bytes: self.source.row_stride * from_bytes,
                    channel_bytes: self.source.column_stride * from_bytes,
                    pitch_bytes: self.packed.row_stride * to_bytes,
                    term_bytes: self.term_bytes(),
                    lines: lines as u32,
                    channels: self.length as u32,
                    pieces: pieces as u32,
                    batch: chunk.index(),
                    source_batch: chunk.strides_bytes(&self.source),
                    target_batch: chunk.strides_bytes(&self.packed),
                    prologue: self.prologue.clone(),
                };
                let ctas = (lines * pieces).div_ceil(of_cta);
                let [y, z] = chunk.grid();
                launches.push(Launch::new(self.spec.clone().kernel(), [ctas as u32, y, z], args.bound(&self.spec)).overlapping());
            }
        }
        launches
    }
}

verdigris_kir::parameters! {
    /// Parameters of both kernels.
    struct Values / TermsArgs of Spec as spec {
        source: Read = spec.source_alignment_bytes(),
        terms: Write = 16,
        /// From a line, and from a channel, of the source to the next.
        line_bytes: u64,
        channel_bytes: u64,
        /// From a line of a term to the next, and from a term.
        pitch_bytes: u64,
        term_bytes: u64,
        lines: Divide,
        channels: u32,
        /// Pairs, or pieces of a tile, of a line.
        pieces: Divide,
        batch: BatchIndexArgs = (),
        source_batch: BatchStridesBytes = (),
        target_batch: BatchStridesBytes = (),
        prologue: Option<PrologueArgs> = (!spec.prologue.is_empty()).then(|| spec.prologue.over_channels(false)),
    }
}

/// The parameters, and where this CTA's matrices lie.
struct Params<'k> {
    values: Values<'k>,
    source: Val<'k, u64>,
    target: Val<'k, u64>,
}

impl<'k> Params<'k> {
    fn declare(k: Kernel<'k>, spec: &Spec) -> Self {
        let values = Values::declare(k, spec);
        let indices = values.batch.of_cta();
        let (source, target) = (values.source_batch.matrix(values.source, indices), values.target_batch.matrix(values.terms, indices));
        Params { values, source, target }
    }

    /// Two neighbouring channels on their way: behind the prologue where they exist, 0 elsewhere.
    fn prepare(&self, k: Kernel<'k>, values: &[Var<'k, f32>; 2], exists: [Val<'k, bool>; 2], channel: Val<'k, u32>) {
        let Some(prologue) = &self.values.prologue else { return };
        for (i, (value, exists)) in values.iter().zip(exists).enumerate() {
            k.when(exists, || value.set(prologue.apply(value.get(), channel + i as u32)));
        }
    }
}

/// Two neighbouring channels, 0 where they do not exist.
struct Pair<'k> {
    values: [Var<'k, f32>; 2],
    exists: [Val<'k, bool>; 2],
    channel: Val<'k, u32>,
}

/// Where term `term` of so many lies among the copies.
pub(crate) fn place(term: u32, terms: u32) -> u32 {
    (term + 1) % terms
}

/// The terms of two neighbouring values, by place: words of two 16-bit numbers, or of f32 the two values themselves.
fn terms<'k>(k: Kernel<'k>, spec: &Spec, values: [Val<'k, f32>; 2]) -> Vec<Vec<Val<'k, u32>>> {
    if spec.to == DType::F32 {
        return vec![values.map(|value| value.bitcast()).to_vec()];
    }
    if spec.terms == 1 {
        return vec![vec![compute::pack_16(k, spec.to, values)]];
    }
    split_pair(k, spec.to, spec.terms, values).into_iter().map(|word| vec![word]).collect()
}

/// The terms of two neighbouring values, two and more, by place: words of two 16-bit numbers.
pub(crate) fn split_pair<'k>(k: Kernel<'k>, to: DType, terms: u32, values: [Val<'k, f32>; 2]) -> Vec<Val<'k, u32>> {
    /// The largest finite bf16: what lies beyond it is rounded to it, and the rest is finite.
    const LARGEST: f32 = f32::from_bits(0x7f7f_0000);
    let bits = values.map(|value| value.bitcast::<u32>());
    let special = bits.map(|bits| (bits & 0x7f80_0000u32).eq(0x7f80_0000u32));
    let mut rest = [0, 1].map(|i| k.select(special[i], ((bits[i] & 0x8000_0000u32) | 0x3f80_0000u32).bitcast(), values[i]));
    let mut words = Vec::new();
    for term in 0..terms {
        if term + 1 == terms {
            let last = [0, 1].map(|i| k.select(special[i], values[i], rest[i]));
            words.push(compute::pack_16(k, to, last));
        } else {
            let word = compute::pack_16(k, to, rest.map(|value| value.min(LARGEST).max(-LARGEST)));
            words.push(word);
            rest = [rest[0] - (word << 16).bitcast::<f32>(), rest[1] - (word & 0xffff_0000u32).bitcast::<f32>()];
        }
    }
    words.rotate_right(1);
    words
}

fn along<'k>(k: Kernel<'k>, spec: &Spec) {
    let params = Params::declare(k, spec);
    // What is in front of this launch may still run: nothing of it is touched above.
    k.griddep_wait();
    k.griddep_launch();
    let count = params.values.lines.value() * params.values.pieces.value();
    let first = k.cta() * (THREADS * UNROLL) + k.thread();
    let element = spec.from.bytes() as u32;
    // All loads stand before the first use, so that they are on their way together.
    let pairs: Vec<(Pair<'k>, Val<'k, u64>)> = (0..UNROLL)
        .map(|turn| {
            let index = first + turn * THREADS;
            let (line, pair) = params.values.pieces.split(index);
            let channel = pair * 2;
            let from = params.source + line.widen() * params.values.line_bytes + channel.mul_wide(element);
            let values = [k.var(0.0f32), k.var(0.0f32)];
            let exists = [index.lt(count), index.lt(count) & (channel + 1).lt(params.values.channels)];
            if spec.walk == Walk::Pairs {
                k.when_else(
                    exists[1],
                    || {
                        let loaded = compute::load_pair::<f32>(k, spec.from, from, 0);
                        values.iter().zip(loaded).for_each(|(value, loaded)| value.set(loaded));
                    },
                    || k.when(exists[0], || values[0].set(compute::load::<f32>(k, spec.from, from, 0))),
                );
            } else {
                for (i, value) in values.iter().enumerate() {
                    k.when(exists[i], || value.set(compute::load::<f32>(k, spec.from, from, i as i64 * i64::from(element))));
                }
            }
            let to = params.target + line.widen() * params.values.pitch_bytes + pair.mul_wide(2 * spec.to.bytes() as u32);
            (Pair { values, exists, channel }, to)
        })
        .collect();
    for (Pair { values, exists, channel }, to) in pairs {
        k.when(exists[0], || {
            params.prepare(k, &values, exists, channel);
            let mut to = to;
            for words in terms(k, spec, [values[0].get(), values[1].get()]) {
                match words[..] {
                    [word] => k.st_global(to, 0, word),
                    _ => k.st_global_vector(to, 0, &words, Cache::Default),
                }
                to = to + params.values.term_bytes;
            }
        });
    }
}

fn across<'k>(k: Kernel<'k>, spec: &Spec) {
    let params = Params::declare(k, spec);
    // What is in front of this launch may still run: nothing of it is touched above.
    k.griddep_wait();
    k.griddep_launch();
    let tile_bytes = TILE_LINES * TILE_PITCH_BYTES;
    let tiles = k.shared("tiles", spec.terms * tile_bytes, 4).address();
    let values = &params.values;
    let slots = Slots { lines: values.lines, pieces: values.pieces.value(), first: k.cta() * TILE_LINES, length: spec.tile_channels() };
    let thread = k.thread();

    // In: a warp takes 32 neighbouring lines at one channel; a thread every fourth pair of channels of its line.
    let place = k.lane() + (k.warp() & 1u32) * 32;
    let slot = slots.at(place);
    let first_pair = k.warp() >> 1;
    let from = params.source + slot.line.widen() * params.values.line_bytes;
    let pairs: Vec<Pair<'k>> = (0..spec.tile_channels() / 8)
        .map(|turn| {
            let channel = slot.along + (first_pair + turn * 4) * 2;
            let values = [k.var(0.0f32), k.var(0.0f32)];
            let exists = [0, 1].map(|i| slot.exists & (channel + i as u32).lt(params.values.channels));
            for (i, value) in values.iter().enumerate() {
                let at = from + (channel + i as u32).widen() * params.values.channel_bytes;
                k.when(exists[i], || value.set(compute::load::<f32>(k, spec.from, at, 0)));
            }
            Pair { values, exists, channel }
        })
        .collect();
    let pair_bytes = 2 * spec.to.bytes() as u32;
    let at = tiles + place * TILE_PITCH_BYTES + first_pair * pair_bytes;
    for (turn, Pair { values, exists, channel }) in pairs.into_iter().enumerate() {
        params.prepare(k, &values, exists, channel);
        for (term, words) in terms(k, spec, [values[0].get(), values[1].get()]).into_iter().enumerate() {
            for (i, word) in words.into_iter().enumerate() {
                let offset = term as i64 * i64::from(tile_bytes) + turn as i64 * 4 * i64::from(pair_bytes) + 4 * i as i64;
                k.st_shared(at, offset, word);
            }
        }
    }
    k.bar_sync();

    // Out: eight threads write a line.
    for turn in 0..TILE_LINES / (THREADS / 8) {
        let place = (thread >> 3) + turn * (THREADS / 8);
        let slot = slots.at(place);
        let chunk = thread & 7;
        let channel = slot.along + chunk * (spec.tile_channels() / 8);
        k.when(slot.exists & channel.lt(params.values.channels), || {
            let from = tiles + place * TILE_PITCH_BYTES + chunk * 16;
            let to = params.target + slot.line.widen() * params.values.pitch_bytes + channel.mul_wide(spec.to.bytes() as u32);
            for term in 0..spec.terms {
                let words: Vec<Val<'k, u32>> = (0..4).map(|i| k.ld_shared(from, i64::from(term * tile_bytes) + 4 * i)).collect();
                k.st_global_vector(to + params.values.term_bytes * u64::from(term), 0, &words, Cache::Default);
            }
        });
    }
}
