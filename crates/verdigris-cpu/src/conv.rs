//! Convolution in its three directions, as products of gathered pixels and filters.
//!
//! Forward and data gradient are one thing here, a *gather*: outputs `t` of a *class* read source positions `t · step + tap`. Forward has
//! one class. The data gradient has one for each residue of the position modulo the stride, each with the taps that meet it, so no
//! product with an inserted zero is formed. The weight gradient sums over pixels instead of taps, with the same tables turned round.
//!
//! Images are taken where they lie; where windows reach beyond the edge, a few images at a time are copied into a border of zeros.

use rayon::prelude::*;

use crate::gemm::{DEPTH, Gather, Operand, Plan, TILE_ROWS, Target, gemm, pack_whole, packed_len};
use crate::real::Real;
use crate::scratch::{Lent, Scratch, out_of_memory};

/// Sizes of a convolution, always with three spatial dims; missing ones lead and have extent 1.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Geometry {
    pub(crate) batch: usize,
    pub(crate) groups: usize,
    /// Channels of x in one group.
    pub(crate) channels: usize,
    /// Filters in one group.
    pub(crate) filters: usize,
    pub(crate) extent: [usize; 3],
    pub(crate) filter: [usize; 3],
    pub(crate) out: [usize; 3],
    pub(crate) stride: [usize; 3],
    pub(crate) dilation: [usize; 3],
    pub(crate) pad: [usize; 3],
    /// Whether the filter is flipped.
    pub(crate) flip: bool,
}

/// `[n, c, d, h, w]` (or `[k, c, d, h, w]`) in a slice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensor5<'a, T> {
    pub(crate) data: &'a [T],
    pub(crate) strides: [usize; 5],
}

/// How a packed result is ordered; the batch is always slowest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Order {
    ChannelsFirst,
    ChannelsLast,
}

impl Order {
    /// Strides of a packed `[n, c, d, h, w]`.
    pub(crate) fn strides(self, channels: usize, extent: [usize; 3]) -> [usize; 5] {
        let [d, h, w] = extent;
        let image = channels * d * h * w;
        match self {
            Order::ChannelsFirst => [image, d * h * w, h * w, w, 1],
            Order::ChannelsLast => [image, 1, h * w * channels, w * channels, channels],
        }
    }

    /// The order whose inner loops suit a tensor of these strides.
    fn of(strides: [usize; 5]) -> Order {
        if strides[1] == 1 && strides[4] != 1 { Order::ChannelsLast } else { Order::ChannelsFirst }
    }
}

/// One spatial dim of a class.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Axis {
    /// Positions written: `first + t · step`, t below `count`.
    first: usize,
    step: usize,
    count: usize,
    /// Source elements from one t to the next.
    source_step: usize,
    /// (source position at t = 0, index of the filter tap).
    taps: Vec<(isize, usize)>,
}

fn tap_index(geometry: &Geometry, dim: usize, tap: usize) -> usize {
    if geometry.flip { geometry.filter[dim] - 1 - tap } else { tap }
}

fn forward_axis(geometry: &Geometry, dim: usize) -> Axis {
    Axis {
        first: 0,
        step: 1,
        count: geometry.out[dim],
        source_step: geometry.stride[dim],
        taps: (0..geometry.filter[dim])
            .map(|tap| ((tap * geometry.dilation[dim]) as isize - geometry.pad[dim] as isize, tap_index(geometry, dim, tap)))
            .collect(),
    }
}

/// The classes of one dim of the data gradient: `i = o · stride − pad + tap · dilation`, solved for `o`.
fn backward_axes(geometry: &Geometry, dim: usize) -> Vec<Axis> {
    let (stride, extent) = (geometry.stride[dim], geometry.extent[dim]);
    (0..stride.min(extent))
        .map(|first| Axis {
            first,
            step: stride,
            count: (extent - first).div_ceil(stride),
            source_step: 1,
            taps: (0..geometry.filter[dim])
                .filter_map(|tap| {
                    let reach = (first + geometry.pad[dim]) as isize - (tap * geometry.dilation[dim]) as isize;
                    (reach.rem_euclid(stride as isize) == 0).then(|| (reach.div_euclid(stride as isize), tap_index(geometry, dim, tap)))
                })
                .collect(),
        })
        .collect()
}

/// What is read beyond the ends of one dim: elements before the first and after the last.
fn border<'a>(axes: impl Iterator<Item = &'a Axis>, extent: usize) -> (usize, usize) {
    let (mut before, mut after) = (0, 0);
    for axis in axes.filter(|axis| axis.count > 0) {
        for (tap, _) in &axis.taps {
            before = before.max(-tap);
            after = after.max(tap + ((axis.count - 1) * axis.source_step) as isize - (extent as isize - 1));
        }
    }
    (before.max(0) as usize, after.max(0) as usize)
}

/// The images that windows are taken from.
struct Source<'a, T> {
    tensor: Tensor5<'a, T>,
    channels: usize,
    extent: [usize; 3],
    before: [usize; 3],
    padded: [usize; 3],
    order: Order,
    /// Where windows step along a line, its copy is sorted by the residue of the position modulo the step: then they read runs.
    phases: usize,
}

impl<'a, T: Real> Source<'a, T> {
    /// `step` is how far all windows step along a line.
    fn new(tensor: Tensor5<'a, T>, channels: usize, extent: [usize; 3], borders: [(usize, usize); 3], step: usize) -> Source<'a, T> {
        let order = Order::of(tensor.strides);
        let phases = if order == Order::ChannelsFirst { step } else { 1 };
        let mut padded = [0, 1, 2].map(|i| borders[i].0 + extent[i] + borders[i].1);
        padded[2] = padded[2].next_multiple_of(phases);
        // Before numbers of elements are multiplied any further: strides and padding far beyond the images leave every address space.
        let image_bytes = [channels].iter().chain(&padded).fold(size_of::<T>() as u64, |bytes, &count| bytes.saturating_mul(count as u64));
        if image_bytes > ADDRESSABLE_BYTES {
            out_of_memory(image_bytes);
        }
        Source { tensor, channels, extent, before: borders.map(|(before, _)| before), padded, order, phases }
    }

    /// Images that are always copied with channels last, where they lie otherwise.
    fn channels_last(tensor: Tensor5<'a, T>, channels: usize, extent: [usize; 3], borders: [(usize, usize); 3]) -> Source<'a, T> {
        Source { order: Order::ChannelsLast, ..Source::new(tensor, channels, extent, borders, 1) }
    }

    fn is_direct(&self) -> bool {
        self.padded == self.extent && self.phases == 1 && self.order == Order::of(self.tensor.strides)
    }

    /// Offset of a position in a line.
    fn along_line(&self, position: usize, stride: usize) -> usize {
        (position % self.phases * (self.padded[2] / self.phases) + position / self.phases) * stride
    }

    /// Strides within what [`Source::images`] returns.
    fn strides(&self) -> [usize; 5] {
        if self.is_direct() { self.tensor.strides } else { self.order.strides(self.channels, self.padded) }
    }

    fn image_len(&self) -> usize {
        self.channels * self.padded.iter().product::<usize>()
    }

    /// Images `range`, with their borders.
    fn images<'s>(&self, scratch: &'s Scratch, range: std::ops::Range<usize>) -> Images<'a, 's, T> {
        if self.is_direct() {
            let start = (range.start * self.tensor.strides[0]).min(self.tensor.data.len());
            return Images::Direct(&self.tensor.data[start..]);
        }
        // Whole vectors are read of what lies beside the last pixels.
        let len = range.len() * self.image_len();
        let mut copy = T::pool(scratch).lend(len + T::TILE_COLUMNS);
        copy[len..].fill(T::default());
        copy[..len].par_chunks_mut(self.image_len().max(1)).zip(range).for_each(|(copy, image)| self.copy(copy, image));
        Images::Copied(copy)
    }

    fn copy(&self, to: &mut [T], image: usize) {
        to.fill(T::default());
        let from_strides = self.tensor.strides;
        let to_strides = self.order.strides(self.channels, self.padded);
        let (outer, inner, outer_count, inner_count) = match self.order {
            Order::ChannelsFirst => (1, 4, self.channels, self.extent[2]),
            Order::ChannelsLast => (4, 1, self.extent[2], self.channels),
        };
        if inner_count == 0 || outer_count == 0 {
            return;
        }
        let corner = (0..2).map(|i| self.before[i] * to_strides[i + 2]).sum::<usize>();
        let line_start = self.before[2] * to_strides[4];
        if self.order == Order::ChannelsLast && from_strides[4] == 1 {
            for d in 0..self.extent[0] {
                for h in 0..self.extent[1] {
                    let from = &self.tensor.data[image * from_strides[0] + d * from_strides[2] + h * from_strides[3]..];
                    let to = &mut to[corner + line_start + d * to_strides[2] + h * to_strides[3]..][..self.extent[2] * self.channels];
                    turn_lines(from, from_strides[1], self.channels, to);
                }
            }
            return;
        }
        for o in 0..outer_count {
            for d in 0..self.extent[0] {
                for h in 0..self.extent[1] {
                    let from = image * from_strides[0] + o * from_strides[outer] + d * from_strides[2] + h * from_strides[3];
                    let from = &self.tensor.data[from..][..(inner_count - 1) * from_strides[inner] + 1];
                    let to = &mut to[corner + o * to_strides[outer] + d * to_strides[2] + h * to_strides[3]..];
                    if self.phases > 1 {
                        for first in 0..self.phases.min(inner_count) {
                            let place = self.along_line(self.before[2] + first, 1);
                            let count = (inner_count - first).div_ceil(self.phases);
                            every(&from[first * from_strides[4]..], self.phases * from_strides[4], &mut to[place..][..count]);
                        }
                    } else {
                        every(from, from_strides[inner], &mut to[line_start..][..inner_count]);
                    }
                }
            }
        }
    }

    /// Offsets of the channels of one group and the taps of a class, in the order that suits the source, each with its (channel, tap
    /// numbers).
    fn taps<'p>(&self, scratch: &'p Scratch, axes: [&Axis; 3], channels: usize) -> Lent<'p, Tap> {
        let strides = self.strides();
        let mut taps = Vec::new();
        // Of all taps the sum is not negative, since `before` covers the least.
        let position = |i: usize, tap: isize| (tap + self.before[i] as isize) as usize;
        for &(d, d_tap) in &axes[0].taps {
            for &(h, h_tap) in &axes[1].taps {
                for &(w, w_tap) in &axes[2].taps {
                    let line = position(0, d) * strides[2] + position(1, h) * strides[3];
                    taps.push((line + self.along_line(position(2, w), strides[4]), [d_tap, h_tap, w_tap]));
                }
            }
        }
        let both = |c: usize, (tap, numbers): (usize, [usize; 3])| (c * strides[1] + tap, c, numbers);
        let count = channels * taps.len();
        match self.order {
            Order::ChannelsFirst => scratch.taps.collected(count, (0..channels).flat_map(|c| taps.iter().map(move |&tap| both(c, tap)))),
            Order::ChannelsLast => scratch.taps.collected(count, taps.iter().flat_map(|&tap| (0..channels).map(move |c| both(c, tap)))),
        }
    }

    /// Source offsets of the positions of a class in `images` images.
    fn pixels<'p>(&self, scratch: &'p Scratch, axes: [&Axis; 3], images: usize) -> Lent<'p, usize> {
        let strides = self.strides();
        let mut dims = axes.map(|axis| (0, axis.source_step, axis.count));
        dims[2].1 /= self.phases;
        positions(scratch, images, dims, [strides[0], strides[2], strides[3], strides[4]])
    }
}

/// Fills `to` with every `step`-th number of `from`.
fn every<T: Copy>(from: &[T], step: usize, to: &mut [T]) {
    match step {
        0 => to.fill(from[0]),
        1 => to.copy_from_slice(&from[..to.len()]),
        2 => {
            let (pairs, rest) = from.as_chunks::<2>();
            to.iter_mut().zip(pairs).for_each(|(to, pair)| *to = pair[0]);
            if let ([last], Some(to)) = (rest, to.get_mut(pairs.len())) {
                *to = *last;
            }
        }
        _ => to.iter_mut().zip(from.iter().step_by(step)).for_each(|(to, from)| *to = *from),
    }
}

/// Turns `count` lines, `stride` apart, into columns.
fn turn_lines<T: Copy>(from: &[T], stride: usize, count: usize, to: &mut [T]) {
    const EIGHT: usize = 8;
    let len = to.len() / count;
    for first in (0..count).step_by(EIGHT) {
        if count - first < EIGHT {
            for line in first..count {
                let column = to[line..].iter_mut().step_by(count);
                column.zip(&from[line * stride..]).for_each(|(to, from)| *to = *from);
            }
            continue;
        }
        let lines: [&[T]; EIGHT] = std::array::from_fn(|i| &from[(first + i) * stride..][..len]);
        for (j, to) in to.chunks_exact_mut(count).enumerate() {
            let to = &mut to[first..][..EIGHT];
            for i in 0..EIGHT {
                to[i] = lines[i][j];
            }
        }
    }
}

/// Offsets of a grid of positions in each image, row-major. Each dim is (first, step, count).
fn positions(scratch: &Scratch, images: usize, dims: [(usize, usize, usize); 3], strides: [usize; 4]) -> Lent<'_, usize> {
    let mut offsets = scratch.places.lend(images * dims.iter().map(|dim| dim.2).product::<usize>());
    let mut lines = offsets.chunks_exact_mut(dims[2].2.max(1));
    for image in 0..images {
        for d in 0..dims[0].2 {
            for h in 0..dims[1].2 {
                let line = image * strides[0] + (dims[0].0 + d * dims[0].1) * strides[1] + (dims[1].0 + h * dims[1].1) * strides[2];
                let to = lines.next().unwrap_or_default();
                to.iter_mut().enumerate().for_each(|(w, offset)| *offset = line + (dims[2].0 + w * dims[2].1) * strides[3]);
            }
        }
    }
    drop(lines);
    offsets
}

/// An offset, with the channel and the numbers of the tap.
pub(crate) type Tap = (usize, usize, [usize; 3]);

enum Images<'a, 's, T: Real> {
    Direct(&'a [T]),
    Copied(Lent<'s, T>),
}

impl<T: Real> Images<'_, '_, T> {
    fn data(&self) -> &[T] {
        match self {
            Images::Direct(data) => data,
            Images::Copied(copy) => copy,
        }
    }
}

/// More than any processor of today addresses.
const ADDRESSABLE_BYTES: u64 = 1 << 57;

/// Elements of gathered pixels that several threads share: 4 MiB in f32, for the last-level cache.
const SHARED_PANELS: usize = 1 << 20;

/// Elements of sums that one task forms at once: 512 KiB in f32, for the second-level cache.
const SUMS: usize = 1 << 17;

/// Elements of the images whose sum a filter gradient is formed of at once: 16 MiB in f32.
const SHARED_IMAGES: usize = 1 << 22;

/// Images that are worked on at once, so that columns fill whole panels and every thread has work.
fn images_at_once(batch: usize, pixels: usize) -> usize {
    let for_columns = 256usize.div_ceil(pixels.max(1));
    let for_threads = batch.div_ceil(rayon::current_num_threads());
    for_columns.min(for_threads).clamp(1, batch.max(1))
}

/// `y` from `x` and `w`, packed in `order`.
pub(crate) fn fprop<T: Real>(scratch: &Scratch, g: &Geometry, x: Tensor5<'_, T>, w: Tensor5<'_, T>, y: &mut [T], order: Order) {
    let axes = [0, 1, 2].map(|dim| vec![forward_axis(g, dim)]);
    let sides = Sides { source_channels: g.channels, result_channels: g.filters, w_source: w.strides[1], w_result: w.strides[0] };
    gathered(scratch, g, &axes, &sides, (x, g.extent), w, (y, g.out, order));
}

/// `x` from `y` and `w`, packed in `order`.
pub(crate) fn dgrad<T: Real>(scratch: &Scratch, g: &Geometry, y: Tensor5<'_, T>, w: Tensor5<'_, T>, x: &mut [T], order: Order) {
    let axes = [0, 1, 2].map(|dim| backward_axes(g, dim));
    let sides = Sides { source_channels: g.filters, result_channels: g.channels, w_source: w.strides[0], w_result: w.strides[1] };
    gathered(scratch, g, &axes, &sides, (y, g.out), w, (x, g.extent, order));
}

/// Which side of the filter is summed over: channels of one group, and their strides in the filter.
struct Sides {
    source_channels: usize,
    result_channels: usize,
    w_source: usize,
    w_result: usize,
}

/// One class, ready.
struct Class<'p, T> {
    axes: [Axis; 3],
    /// Source offsets of what is summed over.
    depth: Lent<'p, usize>,
    /// The filters of every group, packed.
    filters: Lent<'p, T>,
}

fn gathered<T: Real>(
    scratch: &Scratch,
    g: &Geometry,
    axes: &[Vec<Axis>; 3],
    sides: &Sides,
    (source, source_extent): (Tensor5<'_, T>, [usize; 3]),
    w: Tensor5<'_, T>,
    (result, result_extent, order): (&mut [T], [usize; 3], Order),
) {
    let result_channels = g.groups * sides.result_channels;
    let pixels: usize = result_extent.iter().product();
    let image_len = result_channels * pixels;
    if g.batch == 0 || image_len == 0 {
        return;
    }
    let borders = [0, 1, 2].map(|dim| border(axes[dim].iter(), source_extent[dim]));
    let step = axes[2].iter().map(|axis| axis.source_step).min().unwrap_or(1);
    let source = Source::new(source, g.groups * sides.source_channels, source_extent, borders, step);
    let filter_width = if order == Order::ChannelsFirst { TILE_ROWS } else { T::TILE_COLUMNS };

    let mut classes = Vec::new();
    for d in &axes[0] {
        for h in &axes[1] {
            for w_axis in &axes[2] {
                let taps = source.taps(scratch, [d, h, w_axis], sides.source_channels);
                let of_filter =
                    |&(_, c, [td, th, tw]): &Tap| c * sides.w_source + td * w.strides[2] + th * w.strides[3] + tw * w.strides[4];
                let w_depth = scratch.places.collected(taps.len(), taps.iter().map(of_filter));
                let w_outer: Vec<usize> = (0..sides.result_channels).map(|k| k * sides.w_result).collect();
                let len = packed_len(sides.result_channels, taps.len(), filter_width);
                let mut filters = T::pool(scratch).lend(g.groups * len);
                filters.par_chunks_mut(len.max(1)).enumerate().for_each(|(group, panels)| {
                    // Groups always lie along k, the first dim of the filter.
                    let start = (group * g.filters * w.strides[0]).min(w.data.len());
                    pack_whole(Gather { data: &w.data[start..], outer: &w_outer, depth: &w_depth }, filter_width, panels);
                });
                let depth = scratch.places.collected(taps.len(), taps.iter().map(|&(offset, ..)| offset));
                classes.push(Class { axes: [d.clone(), h.clone(), w_axis.clone()], depth, filters });
            }
        }
    }

    let at_once = images_at_once(g.batch, pixels);
    let tasks = g.batch.div_ceil(at_once);
    let source_strides = source.strides();
    let result_strides = order.strides(result_channels, result_extent);
    result.par_chunks_mut(at_once * image_len).enumerate().for_each(|(task, result)| {
        let first = task * at_once;
        let count = result.len() / image_len;
        let images = source.images(scratch, first..first + count);
        for class in &classes {
            let axes = class.axes.each_ref();
            let from = source.pixels(scratch, axes, count);
            let to = positions(
                scratch,
                count,
                axes.map(|axis| (axis.first, axis.step, axis.count)),
                [result_strides[0], result_strides[2], result_strides[3], result_strides[4]],
            );
            let rows: Vec<usize> = (0..sides.result_channels).map(|k| k * result_strides[1]).collect();
            let mut plan = None;
            // The last one first: what its data are long enough for, those of all others are.
            for group in (0..g.groups).rev() {
                let len = packed_len(sides.result_channels, class.depth.len(), filter_width);
                let filters = Operand::Packed { panels: &class.filters[group * len..][..len], outer: sides.result_channels };
                let start = (group * sides.source_channels * source_strides[1]).min(images.data().len());
                let data = &images.data()[start..];
                let channel = |k: usize| (group * sides.result_channels + k) * result_strides[1];
                match order {
                    Order::ChannelsFirst if count == 1 && tasks < 2 * rayon::current_num_threads() => {
                        // Few images: pixels are gathered once for all, and the rows of one image go to several threads.
                        let at_once = (SHARED_PANELS / class.depth.len().max(1)).next_multiple_of(T::TILE_COLUMNS);
                        let rows_at_once = sides.result_channels.div_ceil(4 * rayon::current_num_threads());
                        let rows_at_once = rows_at_once.next_multiple_of(TILE_ROWS).max(4 * TILE_ROWS);
                        for (from, to) in from.chunks(at_once).zip(to.chunks(at_once)) {
                            let mut panels = T::pool(scratch).lend(packed_len(from.len(), class.depth.len(), T::TILE_COLUMNS));
                            pack_whole(Gather { data, outer: from, depth: &class.depth }, T::TILE_COLUMNS, &mut panels);
                            let pixels_of = Operand::Packed { panels: &panels, outer: from.len() };
                            let result = &mut result[channel(0)..][..sides.result_channels * pixels];
                            result.par_chunks_mut(rows_at_once * pixels).enumerate().for_each(|(part, result)| {
                                let rows: Vec<usize> = (0..result.len() / pixels).map(|i| i * pixels).collect();
                                let target = Target { rows: &rows, columns: to };
                                gemm(scratch, result, target, (filters, part * rows_at_once), pixels_of, class.depth.len(), false);
                            });
                        }
                    }
                    Order::ChannelsFirst => {
                        let pixels_of = Operand::Gather(Gather { data, outer: &from, depth: &class.depth });
                        let result = &mut result[channel(0)..];
                        let plan = plan.get_or_insert_with(|| Plan::new(&to, filters, pixels_of, rows.len(), class.depth.len()));
                        plan.run(scratch, result, &rows, (filters, 0), pixels_of, false);
                    }
                    Order::ChannelsLast => {
                        let pixels_of = Operand::Gather(Gather { data, outer: &from, depth: &class.depth });
                        let result = &mut result[channel(0)..];
                        let plan = plan.get_or_insert_with(|| Plan::new(&rows, pixels_of, filters, to.len(), class.depth.len()));
                        plan.run(scratch, result, &to, (pixels_of, 0), filters, false);
                    }
                }
            }
        }
    });
}

/// `w`, as packed `[k, c, filter…]`, from `x` and `y`. The sum over the batch is formed in blocks of images whose size depends on the
/// problem alone.
pub(crate) fn wgrad<T: Real>(scratch: &Scratch, g: &Geometry, x: Tensor5<'_, T>, y: Tensor5<'_, T>, w: &mut [T]) {
    let axes = [0, 1, 2].map(|dim| forward_axis(g, dim));
    let axes = axes.each_ref();
    let pixels: usize = g.out.iter().product();
    let taps_count: usize = g.channels * g.filter.iter().product::<usize>();
    if w.is_empty() {
        return;
    }
    if g.batch * pixels == 0 {
        w.fill(T::default());
        return;
    }
    let borders = [0, 1, 2].map(|dim| border(std::iter::once(axes[dim]), g.extent[dim]));
    if g.groups > 1 && 2 * g.filters <= T::TILE_COLUMNS && Order::of(x.strides) == Order::ChannelsFirst {
        return wgrad_of_small_groups(scratch, g, axes, borders, (x, y), w);
    }
    let source = Source::new(x, g.groups * g.channels, g.extent, borders, axes[2].source_step);
    // The sum is formed as [c, filter…][k]: a row of it is one tap, so that each thread gathers pixels that no other needs.
    let mut taps = source.taps(scratch, axes, g.channels);
    let filter_stride = [g.filter[1] * g.filter[2], g.filter[2], 1];
    let place = |&(_, c, [d, h, w]): &Tap| c * g.filter.iter().product::<usize>() + d * filter_stride[0] + h * filter_stride[1] + w;
    taps.sort_by_key(place);
    let outer = scratch.places.collected(taps.len(), taps.iter().map(|&(offset, ..)| offset));
    let parts = (4 * rayon::current_num_threads()).div_ceil(g.groups);
    let rows_at_once = taps_count.div_ceil(parts).min(SUMS / g.filters).next_multiple_of(TILE_ROWS).max(4 * TILE_ROWS);

    let image_len = source.image_len() + g.groups * g.filters * pixels;
    let rounds = g.batch.div_ceil((SHARED_IMAGES / image_len).max((4 * DEPTH).div_ceil(pixels)));
    let at_once = g.batch.div_ceil(rounds);
    let columns: Vec<usize> = (0..g.filters).collect();
    let y_outer: Vec<usize> = (0..g.filters).map(|k| k * y.strides[1]).collect();
    for first in (0..g.batch).step_by(at_once) {
        let count = at_once.min(g.batch - first);
        let images = source.images(scratch, first..first + count);
        let depth = source.pixels(scratch, axes, count);
        let y_depth = positions(scratch, count, g.out.map(|out| (0, 1, out)), [y.strides[0], y.strides[2], y.strides[3], y.strides[4]]);
        let len = packed_len(g.filters, depth.len(), T::TILE_COLUMNS);
        let mut gradients = T::pool(scratch).lend(g.groups * len);
        gradients.par_chunks_mut(len).enumerate().for_each(|(group, panels)| {
            let data = &y.data[first * y.strides[0] + group * g.filters * y.strides[1]..];
            pack_whole(Gather { data, outer: &y_outer, depth: &y_depth }, T::TILE_COLUMNS, panels);
        });
        // What one task forms: some taps of every filter of a group.
        let mut results: Vec<Vec<&mut [T]>> = Vec::new();
        for group in w.chunks_mut(taps_count * g.filters) {
            let mut parts: Vec<Vec<&mut [T]>> = (0..taps_count.div_ceil(rows_at_once)).map(|_| Vec::with_capacity(g.filters)).collect();
            for filter in group.chunks_mut(taps_count) {
                parts.iter_mut().zip(filter.chunks_mut(rows_at_once)).for_each(|(part, taps)| part.push(taps));
            }
            results.extend(parts);
        }
        let parts = taps_count.div_ceil(rows_at_once);
        results.par_iter_mut().enumerate().for_each(|(task, result)| {
            let (group, part) = (task / parts, task % parts);
            let data = &images.data()[group * g.channels * source.strides()[1]..];
            let gradients = Operand::Packed { panels: &gradients[group * len..][..len], outer: g.filters };
            let rows: Vec<usize> = (0..result[0].len()).map(|i| i * g.filters).collect();
            let taps = Operand::Gather(Gather { data, outer: &outer[part * rows_at_once..][..rows.len()], depth: &depth });
            let mut sums = T::pool(scratch).lend(rows.len() * g.filters);
            gemm(scratch, &mut sums, Target { rows: &rows, columns: &columns }, (taps, 0), gradients, depth.len(), false);
            turn(&sums, g.filters, result, first > 0);
        });
    }
}

/// [`wgrad`] of groups that are too small to fill vectors with their filters. The images of a group are copied with channels last: then the
/// taps along a line of the window lie together, and vectors are filled with them.
fn wgrad_of_small_groups<T: Real>(
    scratch: &Scratch,
    g: &Geometry,
    axes: [&Axis; 3],
    borders: [(usize, usize); 3],
    (x, y): (Tensor5<'_, T>, Tensor5<'_, T>),
    w: &mut [T],
) {
    let window: usize = g.filter.iter().product();
    let at_once = (4 * DEPTH).div_ceil(g.out.iter().product()).max(8).min(g.batch);
    let rows: Vec<usize> = (0..g.filters).map(|k| k * g.channels * window).collect();
    let y_outer: Vec<usize> = (0..g.filters).map(|k| k * y.strides[1]).collect();
    w.par_chunks_mut(g.filters * g.channels * window).enumerate().for_each(|(group, w)| {
        let tensor = Tensor5 { data: &x.data[group * g.channels * x.strides[1]..], ..x };
        let source = Source::channels_last(tensor, g.channels, g.extent, borders);
        let taps = source.taps(scratch, axes, g.channels);
        let outer = scratch.places.collected(taps.len(), taps.iter().map(|&(offset, ..)| offset));
        let place = |&(_, c, [d, h, w]): &Tap| ((c * g.filter[0] + d) * g.filter[1] + h) * g.filter[2] + w;
        let columns = scratch.places.collected(taps.len(), taps.iter().map(place));
        for first in (0..g.batch).step_by(at_once) {
            let count = at_once.min(g.batch - first);
            let images = source.images(scratch, first..first + count);
            let depth = source.pixels(scratch, axes, count);
            let y_depth = positions(scratch, count, g.out.map(|out| (0, 1, out)), [y.strides[0], y.strides[2], y.strides[3], y.strides[4]]);
            let gradients =
                Gather { data: &y.data[first * y.strides[0] + group * g.filters * y.strides[1]..], outer: &y_outer, depth: &y_depth };
            let pixels_of = Operand::Gather(Gather { data: images.data(), outer: &outer, depth: &depth });
            let target = Target { rows: &rows, columns: &columns };
            gemm(scratch, w, target, (Operand::Gather(gradients), 0), pixels_of, depth.len(), first > 0);
        }
    });
}

/// Edge of the squares that a matrix is turned round in: whole lines of the cache are read and written.
const TURN: usize = 16;

/// Writes lines `to`, or adds to them, from the columns of `from`, whose lines are `stride` apart.
fn turn<T: Real>(from: &[T], stride: usize, to: &mut [&mut [T]], add: bool) {
    for (block, lines) in to.chunks_mut(TURN).enumerate() {
        for first in (0..lines[0].len()).step_by(TURN) {
            for (i, line) in lines.iter_mut().enumerate() {
                let end = line.len().min(first + TURN);
                let column = from[first * stride + block * TURN + i..].iter().step_by(stride);
                for (place, &value) in line[first..end].iter_mut().zip(column) {
                    *place = if add { *place + value } else { value };
                }
            }
        }
    }
}
