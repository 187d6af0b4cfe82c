//! What a CTA takes of the planes, their lines on the way to shared memory, and a thread's words of them.
//!
//! Lines lie in shared memory in f32, zeros in place of what is outside of the tensor: a plane behind the other, whole quads of words a line. No product asks where it is, rows
//! may begin anywhere in global memory, and a thread reads four neighbours at a time.
//!
//! Where blocks are twice as many words apart as they have outputs ([`Spec::is_split`]), the even words of all lines lie in the first half of the room and the odd ones in the second:
//! of one half, neighbouring threads read quads side by side, and no two meet in a bank.

use verdigris_kir::face::{Kernel, Val, Var};
use verdigris_kir::params::{Divide, Read};
use verdigris_tensor::DType;

use super::{Spec, THREADS};
use crate::fuse::compute;

verdigris_kir::parameters! {
    /// How outputs are cut: blocks of a thread's below and beside each other, of which a CTA takes those of some whole planes, or some of a plane's.
    #[derive(Clone, Copy)]
    pub(super) struct Cut / CutArgs of () as _spec {
        /// In all, and of a CTA.
        pub(super) planes: u32,
        pub(super) planes_of_cta: u32,
        /// CTAs of a plane, below and beside each other.
        pub(super) bands: Divide,
        pub(super) tiles: Divide,
        /// Blocks of a CTA, below and beside each other.
        pub(super) strips: Divide,
        pub(super) groups: Divide,
        /// Rows and columns of blocks before the first output.
        pub(super) before: [u32; 2],
        /// Of outputs: rows and columns.
        pub(super) extents: [u32; 2],
    }
}

/// What a CTA takes.
#[derive(Clone, Copy)]
pub(super) struct Share<'k> {
    pub(super) first_plane: Val<'k, u32>,
    pub(super) planes: Val<'k, u32>,
    /// The first block, along rows and columns.
    pub(super) block: [Val<'k, u32>; 2],
}

/// A thread's block in a share.
#[derive(Clone, Copy)]
pub(super) struct Place<'k> {
    pub(super) plane: Val<'k, u32>,
    pub(super) strip: Val<'k, u32>,
    pub(super) group: Val<'k, u32>,
    pub(super) is_used: Val<'k, bool>,
}

impl<'k> Cut<'k> {
    pub(super) fn share(&self, number: Val<'k, u32>) -> Share<'k> {
        let (rest, tile) = self.tiles.split(number);
        let (group, band) = self.bands.split(rest);
        let first_plane = group * self.planes_of_cta;
        let planes = (self.planes - first_plane).min(self.planes_of_cta);
        Share { first_plane, planes, block: [band * self.strips.value(), tile * self.groups.value()] }
    }

    pub(super) fn place(&self, thread: Val<'k, u32>, share: &Share<'k>) -> Place<'k> {
        let (rest, group) = self.groups.split(thread);
        let (plane, strip) = self.strips.split(rest);
        Place { plane, strip, group, is_used: plane.lt(share.planes) }
    }

    /// Row and column of the first output of a thread's block; before the first one at times.
    pub(super) fn first_output(&self, spec: &Spec, share: &Share<'k>, place: &Place<'k>) -> [Val<'k, i32>; 2] {
        let own = [place.strip, place.group];
        std::array::from_fn(|i| ((share.block[i] + own[i]) * spec.outputs()[i] - self.before[i]).signed())
    }
}

verdigris_kir::parameters! {
    /// A tensor whose lines are staged.
    #[derive(Clone, Copy)]
    pub(super) struct Source / SourceArgs of DType as dtype {
        pub(super) pointer: Read = dtype.bytes() as u32,
        /// Rows and columns.
        pub(super) extents: [u32; 2],
        pub(super) row_bytes: u32,
        /// Row and column of the first line and word of the first block.
        pub(super) first: [i32; 2],
        /// Staged: lines of a plane, quads of a line.
        pub(super) lines: Divide,
        pub(super) quads: Divide,
    }
}

impl<'k> Source<'k> {
    /// Bytes from line to line in shared memory.
    pub(super) fn pitch_bytes(&self, spec: &Spec) -> Val<'k, u32> {
        self.quads.value() << spec.quad_bytes().ilog2()
    }

    /// Brings the lines of a share to shared memory at `to`; they are there behind a barrier. `plane` is the address of a plane of the share, `ahead` are rows and columns of taps before
    /// those that are worked on.
    pub(super) fn stage(
        &self,
        k: Kernel<'k>,
        spec: &Spec,
        share: &Share<'k>,
        ahead: [Val<'k, u32>; 2],
        plane: impl Fn(Val<'k, u32>) -> Val<'k, u64>,
        to: Val<'k, u32>,
    ) {
        let bytes = spec.dtype.bytes() as u32;
        let [first_row, first_column] =
            std::array::from_fn(|i| (share.block[i] * spec.stride.apart(spec.outputs()[i]) + ahead[i]).signed() + self.first[i]);
        let all = share.planes * self.lines.value() * self.quads.value();
        k.range_step(k.thread(), all, spec.quads_ahead() * THREADS, |first| {
            let quads: Vec<_> = (0..spec.quads_ahead())
                .map(|i| (first + i * THREADS, std::array::from_fn::<_, 4, _>(|_| Held::new(k, spec.dtype))))
                .collect();
            for (quad, words) in &quads {
                k.when(quad.lt(all), || {
                    let (rest, column) = self.quads.split(*quad);
                    let (number, line) = self.lines.split(rest);
                    let row = first_row + line.signed();
                    let column = first_column + (column << 2).signed();
                    let end = k.select(row.unsigned().lt(self.extents[0]), self.extents[1], 0u32);
                    let from = plane(number) + row.unsigned().mul_wide(self.row_bytes) + column.widen().unsigned() * u64::from(bytes);
                    for (i, word) in (0u32..).zip(words) {
                        k.when((column.unsigned() + i).lt(end), || word.load(k, from, i));
                    }
                });
            }
            for (quad, words) in &quads {
                k.when(quad.lt(all), || {
                    let values = words.map(|word| word.value(spec.dtype));
                    let own = to + (*quad << spec.quad_bytes().ilog2());
                    if spec.is_split() {
                        let [even, odd, next_even, next_odd] = values;
                        k.st_shared_vector(own, 0, &[even, next_even]);
                        k.st_shared_vector(own, spec.odd_words(), &[odd, next_odd]);
                    } else {
                        k.st_shared_vector(own, 0, &values);
                    }
                });
            }
        });
    }

    /// Where the lines that a thread's block meets begin.
    pub(super) fn own(&self, spec: &Spec, place: &Place<'k>, staged: Val<'k, u32>) -> Val<'k, u32> {
        let [rows, columns] = spec.outputs().map(|outputs| spec.stride.apart(outputs));
        let line = place.plane * self.lines.value() + place.strip * rows;
        staged + line * self.pitch_bytes(spec) + place.group * (columns / 4 * spec.quad_bytes())
    }
}

/// An element as it is stored, in a register of its own: what is computed of it at once would wait for it, and loads behind it with it.
#[derive(Clone, Copy)]
pub(super) enum Held<'k> {
    Half(Var<'k, u16>),
    Word(Var<'k, u32>),
}

impl<'k> Held<'k> {
    /// Zero.
    pub(super) fn new(k: Kernel<'k>, dtype: DType) -> Held<'k> {
        if dtype.bytes() == 2 { Held::Half(k.var(0u16)) } else { Held::Word(k.var(0u32)) }
    }

    /// Loads element `index` behind an address.
    pub(super) fn load(&self, k: Kernel<'k>, address: Val<'k, u64>, index: u32) {
        match self {
            Held::Half(held) => held.set(k.ld_global::<u16>(address, i64::from(index * 2))),
            Held::Word(held) => held.set(k.ld_global::<u32>(address, i64::from(index * 4))),
        }
    }

    pub(super) fn value(&self, dtype: DType) -> Val<'k, f32> {
        match self {
            Held::Half(held) => compute::decode_half(dtype, held.get()),
            Held::Word(held) => held.get().bitcast(),
        }
    }
}

/// The first words of a line from where a thread's block begins.
pub(super) fn words_of_line<'k>(k: Kernel<'k>, spec: &Spec, address: Val<'k, u32>, count: u32) -> Vec<Val<'k, f32>> {
    if !spec.is_split() {
        return words(k, address, 0, count);
    }
    let halves = [words(k, address, 0, count.div_ceil(2)), words(k, address, spec.odd_words(), count / 2)];
    (0..count as usize).map(|word| halves[word % 2][word / 2]).collect()
}

/// Neighbouring words of shared memory, from a multiple of 16 bytes on.
pub(super) fn words<'k>(k: Kernel<'k>, address: Val<'k, u32>, offset_bytes: i64, count: u32) -> Vec<Val<'k, f32>> {
    let mut words = Vec::new();
    while (words.len() as u32) < count {
        let offset = offset_bytes + 4 * words.len() as i64;
        match count - words.len() as u32 {
            1 => words.push(k.ld_shared(address, offset)),
            2 => words.extend(k.ld_shared_vector::<f32>(address, offset, 2)),
            _ => words.extend(k.ld_shared_vector::<f32>(address, offset, 4)),
        }
    }
    // Of three, a fourth comes along.
    words.truncate(count as usize);
    words
}
