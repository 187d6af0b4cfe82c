//! Patches of a tensor in shared memory, with the zeros around it, for the engines that multiply out of them without tensor cores: which pixels outputs
//! meet along a dim ([`Axis`]), and how a CTA's threads bring them ([`Source`]), element by element and each checked once for all of its products.

use verdigris_graph::{ConvProblem, Direction, Tensor};
use verdigris_kir::face::{Kernel, Val};
use verdigris_kir::params::Divide;

use crate::layout::images::{Strided, StridedArguments};

/// Threads of a CTA.
pub(in crate::conv) const THREADS: u32 = 256;

/// Height or width: output `o` meets with tap `t` the activations at `o · step + t · dilation + first`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::conv) struct Axis {
    pub(in crate::conv) step: u64,
    pub(in crate::conv) dilation: u64,
    pub(in crate::conv) taps: u64,
    pub(in crate::conv) first: i64,
    pub(in crate::conv) source: u64,
    pub(in crate::conv) result: u64,
}

impl Axis {
    /// Of a fprop, or of a dgrad of stride 1, which meets its taps from the last one on.
    pub(in crate::conv) fn of(p: &ConvProblem, dim: usize) -> Axis {
        let (pad, reach) = (p.pads_before[dim] as i64, (p.dilations[dim] * (p.filter[dim] - 1)) as i64);
        let (dilation, taps) = (p.dilations[dim], p.filter[dim]);
        if p.direction == Direction::Dgrad {
            Axis { step: 1, dilation, taps, first: pad - reach, source: p.output[dim], result: p.input[dim] }
        } else {
            Axis { step: p.strides[dim], dilation, taps, first: -pad, source: p.input[dim], result: p.output[dim] }
        }
    }

    /// Outputs by which tap `t` is ahead of tap 0 at most, whole ones.
    pub(in crate::conv) fn ahead(&self) -> u64 {
        (self.taps - 1) * self.dilation / self.step
    }

    /// What counts of positions stay below.
    pub(in crate::conv) fn reach(&self) -> u64 {
        let outputs = self.result.saturating_add(1 << 12).saturating_mul(self.step);
        outputs
            .saturating_add(self.taps.saturating_mul(self.dilation))
            .saturating_add(self.source)
            .saturating_add(self.first.unsigned_abs())
    }
}

verdigris_kir::parameters! {
    /// The tensor that is gathered, and how a patch of it lies in shared memory: planes, rows, in a row the columns of each residue modulo
    /// the stride, so that neighbouring outputs read neighbouring places. Its address is a multiple of so many bytes.
    #[derive(Clone, Copy)]
    pub(in crate::conv) struct Source / SourceArgs of u32 as alignment_bytes {
        pub(in crate::conv) tensor: StridedArguments = *alignment_bytes,
        /// Height and width.
        pub(in crate::conv) extents: [u32; 2],
        /// What output 0 reads with tap 0, and from output to output.
        pub(in crate::conv) first: [i32; 2],
        pub(in crate::conv) steps: [u32; 2],
        pub(in crate::conv) by_column_step: Divide,
        pub(in crate::conv) channels: u32,
        /// Channels that are staged at a time.
        pub(in crate::conv) chunk: u32,
        pub(in crate::conv) chunks: u32,
        /// Of a chunk's patch and taps; the next one is on its way to the other of two places while one is worked on.
        pub(in crate::conv) stage_bytes: u32,
        /// Elements of a line are numbered channel by channel if so, else column by column; how many of the inner ones there are.
        pub(in crate::conv) channels_first: u32,
        pub(in crate::conv) inner: Divide,
        /// Of a patch.
        pub(in crate::conv) rows: u32,
        pub(in crate::conv) columns: u32,
        pub(in crate::conv) residue_bytes: u32,
        pub(in crate::conv) row_bytes: u32,
        pub(in crate::conv) plane_bytes: u32,
        /// Threads along a line, as a logarithm to base 2; the others have the lines below.
        pub(in crate::conv) lanes_log2: u32,
    }
}

/// Rows that a thread brings in a turn of its loop, except of planes.
const UNROLL: u32 = 4;

/// Where the channels of a pixel lie in a patch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::conv) enum Packing {
    /// In planes of their own, words side by side along a row.
    Planes,
    /// So many side by side in a place of so many words, further ones in further planes.
    Places { channels: u32, words: u32 },
    /// All side by side, brought by copies of so many bytes, which are what counts as a channel. A plane is a pixel.
    Pixels { copy_bytes: u8 },
}

impl<'k> Source<'k> {
    /// The same from a channel on: those of a group.
    pub(in crate::conv) fn of_channels_behind(self, channel: Val<'k, u32>) -> Self {
        let pointer = self.tensor.pointer.moved(channel.widen() * self.tensor.channel);
        Source { tensor: Strided { pointer, ..self.tensor }, ..self }
    }

    /// Starts bringing the patch of a chunk to shared memory, zeros in place of what the tensor does not have. A thread stays in its column, and walks down.
    pub(in crate::conv) fn stage(
        &self,
        k: Kernel<'k>,
        packing: Packing,
        image: Val<'k, u32>,
        corner: [Val<'k, u32>; 2],
        first_depth: Val<'k, u32>,
        arena: Val<'k, u32>,
    ) {
        let bytes = if let Packing::Pixels { copy_bytes } = packing { copy_bytes } else { 4 };
        let one = k.constant(1u32);
        let (lanes, lines) = (one.shl(self.lanes_log2), k.constant(THREADS).shr(self.lanes_log2));
        let (lane, line) = (k.thread() & (lanes - 1), k.thread().shr(self.lanes_log2));
        let [first_row, first_column]: [Val<'k, i32>; 2] = std::array::from_fn(|i| (corner[i] * self.steps[i]).signed() + self.first[i]);
        let is_first = self.channels_first.ne(0);
        let height = first_row + line.signed();
        let base = self.tensor.pointer.address() + image.widen() * self.tensor.first + height.widen().unsigned() * self.tensor.spatial[1];
        let down_bytes = lines.widen() * self.tensor.spatial[1];
        k.range_step(lane, self.chunk * self.columns, lanes, |element| {
            let (outer, inner) = self.inner.split(element);
            let (channel, column) = (k.select(is_first, outer, inner), k.select(is_first, inner, outer));
            let (quotient, residue) = self.by_column_step.split(column);
            let (depth, width) = (first_depth + channel, first_column + column.signed());
            let is_inside = depth.lt(self.channels) & width.unsigned().lt(self.extents[1]);
            let extent = k.select(is_inside, self.extents[0], 0u32);
            let from = base + depth.widen() * self.tensor.channel + width.widen().unsigned() * self.tensor.spatial[2];
            let place = match packing {
                Packing::Planes => channel * self.plane_bytes,
                Packing::Places { channels, .. } => {
                    let plane = over(channel, channels);
                    plane * self.plane_bytes + (channel - plane * channels) * 4
                }
                Packing::Pixels { copy_bytes } => channel * u32::from(copy_bytes),
            };
            let to = arena + place + line * self.row_bytes + residue * self.residue_bytes;
            let to = match packing {
                Packing::Planes => to + quotient * 4,
                Packing::Places { words, .. } => to + quotient * (4 * words),
                Packing::Pixels { .. } => to + quotient * self.plane_bytes,
            };
            let (from, to, height) = (k.var(from), k.var(to), k.var(height));
            let bring = || {
                // Nothing is read, and a zero is written, where the source has no bytes.
                k.cp_async(to, 0, from, 0, bytes, k.select(height.unsigned().lt(extent), u32::from(bytes), 0u32));
                from.set(from + down_bytes);
                to.set(to + lines * self.row_bytes);
                height.set(height + lines.signed());
            };
            if packing == Packing::Planes {
                k.range_step(line, self.rows, lines, |_| bring());
            } else {
                let turns = (self.rows + (lines - 1) - line).shr(k.constant(THREADS.ilog2()) - self.lanes_log2);
                k.range_unrolled(turns, UNROLL, |_| bring());
            }
        });
    }
}

/// `number / divisor` of a number below 2¹⁶.
pub(in crate::conv) fn over<'k>(number: Val<'k, u32>, divisor: u32) -> Val<'k, u32> {
    if divisor == 1 { number } else { number.mul_hi(u32::MAX / divisor + 1) }
}

/// How a patch's lines are shared out to threads: those along a line, as a logarithm to base 2, and the instructions of a thread, for columns and, so many, for each
/// column's rows.
pub(in crate::conv) fn lanes(line: u64, rows: u64, of_element: u64) -> (u32, u64) {
    let issued = |lanes_log2: u32| line.div_ceil(1 << lanes_log2) * (45 + of_element * rows.div_ceil(u64::from(THREADS >> lanes_log2)));
    let lanes_log2 = (3..8).rev().fold(8, |best, lanes_log2| if issued(lanes_log2) <= issued(best) { lanes_log2 } else { best });
    (lanes_log2, issued(lanes_log2))
}

/// Whether pixels of a tensor lie closer than its channels, if there are several.
pub(in crate::conv) fn is_channels_first(tensor: &Tensor, channels: u64) -> bool {
    channels == 1 || tensor.strides[4] < tensor.strides[1]
}
