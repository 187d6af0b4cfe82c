//! wgrad: sums over boxes of pixels of `dyᵀ · x`, for 64 channels of y by the taps and channels of a K-tile.
//!
//! Each CTA walks over its share of the boxes with the sums in registers, and leaves them as one part of the result, which another launch
//! adds up. dy comes to shared memory as `[pixel][channel]` and is turned by `ldmatrix`; the other fragment pairs two neighbouring pixels
//! at one place of the depth, which are read from the patch one by one. A warp has all 64 channels and a quarter of the columns.

use verdigris_graph::{ConvProblem, Tensor};
use verdigris_kir::face::{Header, Kernel, Pointer, Val, Var, build};
use verdigris_kir::inst::{Cache, MatrixType, Special};
use verdigris_kir::ir::{KernelBody, Target, Ty};
use verdigris_kir::program::{Address, Arg, KernelRef};

use super::super::fprop::kernel::shape;
use super::super::geometry::CHUNK_BYTES;
use super::super::patch::{PixelBox, Source};
use crate::split_k::filter::small_channels::CHANNELS;

const CHANNEL_BLOCKS: u32 = CHANNELS / 16;
const WARPS: u32 = 4;
const THREADS: u32 = 32 * WARPS;
/// Boxes that a CTA holds: one is multiplied, one is on its way.
const STAGES: u32 = 2;
/// CTAs that share an SM.
pub(super) const CTAS: u32 = 2;
/// Lanes that copy a pixel's channels together.
const LANES: u32 = 8;
/// Elements that a thread has on their way at a time.
const ON_THEIR_WAY: u32 = 8;
/// Words of a box that say which of its pixels y has.
const MASKS: u32 = 64;

/// Everything that shapes a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Spec {
    pub(super) operands: MatrixType,
    /// x and dy are brought by asynchronous copies.
    pub(super) copies: bool,
    /// Blocks of 8 columns of a warp.
    pub(super) blocks: u32,
}

impl Spec {
    /// The blocks that there are kernels for.
    pub(super) const BLOCKS: [u32; 2] = [1, 5];

    pub(super) fn name(&self) -> String {
        let copies = if self.copies { "async" } else { "direct" };
        format!("conv_small_wgrad_{}_{CHANNELS}x{}_{copies}_parts", self.operands.ptx(), self.columns())
    }

    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(self) -> KernelBody {
        let header = Header { name: self.name(), target: Target::Sm80, threads: THREADS, min_ctas: CTAS, cluster: 1 };
        build(header, |k| wgrad(k, self))
    }

    /// Columns of a CTA.
    pub(super) const fn columns(self) -> u32 {
        8 * self.blocks * WARPS
    }

    fn element_bytes(self) -> u32 {
        self.operands.bits() / 8
    }
}

/// The most pixels of a box.
pub(super) const fn box_pixels(element_bytes: u32) -> u32 {
    256 / element_bytes
}

/// Pixels that a matrix step sums over.
pub(super) const fn step_pixels(element_bytes: u32) -> u32 {
    32 / element_bytes
}

/// Bytes of shared memory for one patch.
pub(super) const fn patch_bytes(element_bytes: u32) -> u32 {
    if element_bytes == 2 { 20 * 1024 } else { 24 * 1024 }
}

/// From one pixel of dy to the next in shared memory. Words are read across pixels, which 32 bytes more keep in different banks; halves are
/// permuted by chunks.
const fn pitch_bytes(element_bytes: u32) -> u32 {
    if element_bytes == 2 { CHANNELS * 2 } else { CHANNELS * 4 + 32 }
}

const fn dy_bytes(element_bytes: u32) -> u32 {
    box_pixels(element_bytes) * pitch_bytes(element_bytes)
}

/// Bytes of shared memory in all.
pub(super) const fn shared_bytes(element_bytes: u32) -> u32 {
    STAGES * (patch_bytes(element_bytes) + dy_bytes(element_bytes) + MASKS * 4) + box_pixels(element_bytes) * 4
}

/// dy: its parameters, and how a box of it comes to shared memory.
struct Gradient<'k> {
    k: Kernel<'k>,
    element_bytes: u32,
    dy: Pointer<'k>,
    strides: [Val<'k, u64>; 4],
    channels: Val<'k, u32>,
    first_channel: Val<'k, u32>,
    path: LoadPath<'k>,
}

#[derive(Clone, Copy)]
enum LoadPath<'k> {
    /// By asynchronous copies of so many bytes.
    Copies(Val<'k, u32>),
    /// Element by element: bytes from one channel to the next.
    Elements(Val<'k, u64>),
}

/// The arguments of dy.
pub(super) fn gradient_args(p: &ConvProblem, copy_bytes: Option<u64>) -> Vec<Arg> {
    let [image, channel, depth, row, column] = p.y.strides.map(|stride| stride * p.y.dtype.bytes() as u64);
    let mut args = vec![Arg::Pointer(Address::buffer(p.y.slot.0 as usize))];
    args.extend([image, depth, row, column].map(|stride| Arg::Scalar(Ty::U64, stride)));
    args.push(Arg::Scalar(Ty::U32, p.k));
    args.push(copy_bytes.map_or(Arg::Scalar(Ty::U64, channel), |bytes| Arg::Scalar(Ty::U32, bytes)));
    args
}

/// The largest of 16, 8, 4 bytes by which the channels of pixels can be copied; 0 for none.
pub(in super::super) fn copy_bytes(tensor: &Tensor, [n, c, d, h, w]: [u64; 5]) -> u64 {
    let [first, channel, strides @ ..] = tensor.strides;
    let bytes = tensor.dtype.bytes() as u64;
    let steps = [(n, first), (d, strides[0]), (h, strides[1]), (w, strides[2])];
    let steps = steps.into_iter().filter(|(extent, _)| *extent > 1).map(|(_, stride)| stride * bytes);
    let alignment = steps.fold(CHUNK_BYTES, |alignment, step| alignment.min(1 << step.trailing_zeros().min(4)));
    if alignment >= 4 && (channel == 1 || c == 1) { alignment } else { 0 }
}

impl<'k> Gradient<'k> {
    fn declare(k: Kernel<'k>, spec: Spec) -> Self {
        let element_bytes = spec.element_bytes();
        Gradient {
            k,
            element_bytes,
            dy: k.input("dy", if spec.copies { element_bytes.max(4) } else { element_bytes }),
            strides: ["dy_image_bytes", "dy_depth_bytes", "dy_row_bytes", "dy_column_bytes"].map(|name| k.scalar(name)),
            channels: k.scalar("channels"),
            first_channel: k.special(Special::CtaZ) * CHANNELS,
            path: if spec.copies { LoadPath::Copies(k.scalar("dy_copy_bytes")) } else { LoadPath::Elements(k.scalar("dy_channel_bytes")) },
        }
    }

    /// A pixel of y, or where dy begins if there is none.
    fn pixel(&self, place: [Val<'k, u32>; 4], is_inside: Val<'k, bool>) -> Val<'k, u64> {
        let inside = |index: Val<'k, u32>| self.k.select(is_inside, index, 0u32).widen();
        place.into_iter().zip(self.strides).fold(self.dy.address(), |address, (index, stride)| address + inside(index) * stride)
    }

    /// Brings the `pixels` of a box to shared memory at `to`; what y does not have is zero.
    fn load(&self, source: &Source<'k>, pixel_box: &PixelBox<'k>, pixels: Val<'k, u32>, to: Val<'k, u32>) {
        let k = self.k;
        let pitch = pitch_bytes(self.element_bytes);
        let row_bytes = CHANNELS * self.element_bytes;
        match self.path {
            LoadPath::Copies(bytes) => {
                let first_byte = self.first_channel * self.element_bytes;
                let end = self.channels * self.element_bytes - first_byte;
                let (pixel, lane) = (k.thread() >> LANES.ilog2(), k.thread() & (LANES - 1));
                k.range_step(pixel, pixels, THREADS / LANES, |pixel| {
                    let (place, is_inside) = source.place(pixel_box, pixel);
                    let from = self.pixel(place, is_inside) + first_byte.widen();
                    let end = k.select(is_inside, end, 0u32);
                    k.range_step(lane * bytes, row_bytes, bytes * LANES, |at| {
                        let left = k.select(at.lt(end), (end - at.min(end)).min(bytes), 0u32);
                        // Nothing is read behind the channels, so no address points there.
                        let from = from + at.min(end).widen();
                        let chunk = (at >> 4) ^ if self.element_bytes == 2 { pixel & 7u32 } else { k.constant(0) };
                        let to = to + pixel * pitch + (chunk << 4) + (at & 15u32);
                        let with = |bytes: u8| k.cp_async(to, 0, from, 0, bytes, left);
                        k.when_else(bytes.eq(16), || with(16), || k.when_else(bytes.eq(8), || with(8), || with(4)));
                    });
                });
            }
            LoadPath::Elements(channel_bytes) => {
                // A thread has a pixel, so that neighbours in a row are neighbours in a warp.
                let threads_of_pixel = THREADS / box_pixels(self.element_bytes);
                let pixel = k.thread() & (box_pixels(self.element_bytes) - 1);
                let share = CHANNELS / threads_of_pixel;
                let first = (k.thread() >> box_pixels(self.element_bytes).ilog2()) * share;
                k.when(pixel.lt(pixels), || {
                    let (place, is_inside) = source.place(pixel_box, pixel);
                    let from = self.pixel(place, is_inside);
                    k.range_step(0, share, ON_THEIR_WAY, |group| {
                        let first = first + group;
                        let found: Vec<_> = (0..ON_THEIR_WAY)
                            .map(|i| {
                                let channel = self.first_channel + first + i;
                                let exists = is_inside & channel.lt(self.channels);
                                (from + k.select(exists, channel, 0u32).widen() * channel_bytes, exists)
                            })
                            .collect();
                        // Eight halves are one chunk.
                        let to = to + pixel * pitch;
                        if self.element_bytes == 2 {
                            let values: Vec<_> = found.iter().map(|&(from, _)| k.ld_global::<u16>(from, 0)).collect();
                            let values: Vec<_> =
                                found.iter().zip(values).map(|((_, exists), value)| k.select(*exists, value, 0u16)).collect();
                            let words: Vec<_> = values.chunks(2).map(|pair| k.join16(pair[0], pair[1])).collect();
                            k.st_shared_vector(to + (((first >> 3) ^ (pixel & 7u32)) << 4), 0, &words);
                        } else {
                            let values: Vec<_> = found.iter().map(|&(from, _)| k.ld_global::<u32>(from, 0)).collect();
                            let values: Vec<_> =
                                found.iter().zip(values).map(|((_, exists), value)| k.select(*exists, value, 0u32)).collect();
                            k.st_shared_vector(to + first * 4, 0, &values[..4]);
                            k.st_shared_vector(to + first * 4, 16, &values[4..]);
                        }
                    });
                });
            }
        }
    }
}

fn wgrad<'k>(k: Kernel<'k>, spec: Spec) {
    let element_bytes = spec.element_bytes();
    let source = Source::declare(k, element_bytes, spec.copies);
    let gradient = Gradient::declare(k, spec);
    let ctas = k.divisor("ctas");
    // Pixels of a box, a whole number of steps.
    let pixels = k.scalar::<u32>("pixels");
    let k_tiles_across = k.divisor("slabs_across");
    let k_tile_taps = ["slab_depth", "slab_rows"].map(|name| k.scalar::<u32>(name));
    let columns = k.input("columns", 4);
    let parts = k.output("parts", 16);
    let part_bytes = k.scalar::<u64>("part_bytes");

    let (patch_bytes, dy_bytes) = (patch_bytes(element_bytes), dy_bytes(element_bytes));
    let patches = k.shared("patches", STAGES * patch_bytes, 128).address();
    let gradients = k.shared("gradients", STAGES * dy_bytes, 128).address();
    let masks = k.shared("masks", STAGES * MASKS * 4, 16).address();
    let offsets = k.shared("offsets", box_pixels(element_bytes) * 4, 16).address();

    let thread = k.thread();
    k.when(thread.lt(box_pixels(element_bytes)), || k.st_shared(offsets + thread * 4, 0, source.offset(thread)));
    let lane = k.lane();
    let (group, member) = (lane >> 2, lane & 3u32);
    let first_column = k.warp() * (8 * spec.blocks);
    let places: Vec<Val<'k, u32>> =
        (0..spec.blocks).map(|block| k.ld_global::<u32>(columns.at(first_column + 8 * block + group, 4), 0)).collect();
    let sums: Vec<Vec<[Var<'k, f32>; 4]>> =
        (0..CHANNEL_BLOCKS).map(|_| (0..spec.blocks).map(|_| [(); 4].map(|()| k.var(0.0f32))).collect()).collect();

    let k_tile = k.special(Special::CtaY);
    let (k_tile_depth, k_tile_row) = k_tiles_across.split(k_tile);
    let k_tile_first = [k_tile_depth * k_tile_taps[0], k_tile_row * k_tile_taps[1]];
    let bring = |number: Val<'k, u32>, stage: Val<'k, u32>| {
        let pixel_box = source.at(number);
        source.load(&pixel_box, k_tile_first, patches + stage * patch_bytes);
        gradient.load(&source, &pixel_box, pixels, gradients + stage * dy_bytes);
        // What a patch holds for pixels that y does not have may be anything, so zeros of dy are not enough.
        k.when(thread.lt(MASKS), || {
            let mask = if element_bytes == 2 {
                let [low, high] = [0, 1].map(|odd| source.place(&pixel_box, thread * 2 + odd).1);
                k.select(low, 0xffffu32, 0u32) | k.select(high, 0xffff_0000u32, 0u32)
            } else {
                k.select(source.place(&pixel_box, thread).1, u32::MAX, 0u32)
            };
            k.st_shared(masks + stage * (MASKS * 4) + thread * 4, 0, mask);
        });
    };

    // A lane's row of the matrices of dy: pixels in rows, channels in chunks, both halves of the channels of a block, then of the pixels.
    let (within, matrix) = (lane & 7u32, lane >> 3);
    let pitch = pitch_bytes(element_bytes);
    let turned_row = ((matrix >> 1) * 8 + within) * pitch;
    let multiply = |gradient: Val<'k, u32>, start: Val<'k, u32>, masks: Val<'k, u32>, step: Val<'k, u32>| {
        // Two registers of the columns' fragment: halves pair the pixels 2t and 2t + 1, words have t; the second register's are half a step
        // on.
        let (pixels, masks): (Vec<Val<'k, u32>>, [Val<'k, u32>; 2]) = if element_bytes == 2 {
            let at = offsets + step * 64 + member * 8;
            let pixels = [0, 32].into_iter().flat_map(|half| k.ld_shared_vector::<u32>(at, half, 2));
            (pixels.map(|offset| start + offset).collect(), [0, 16].map(|half| k.ld_shared::<u32>(masks + step * 32 + member * 4, half)))
        } else {
            let at = step * 32 + member * 4;
            let pixels = [0, 16].map(|half| k.ld_shared::<u32>(offsets + at, half) + start);
            (pixels.to_vec(), [0, 16].map(|half| k.ld_shared::<u32>(masks + at, half)))
        };
        let rows: Vec<Vec<Val<'k, u32>>> = (0..CHANNEL_BLOCKS)
            .map(|block| {
                if element_bytes == 2 {
                    let chunk = ((matrix & 1u32) + 2 * block) ^ within;
                    k.ldmatrix(4, true, gradient + turned_row + (chunk << 4) + step * (16 * pitch), 0)
                } else {
                    let at = gradient + (step * 8 + member) * pitch + group * 4;
                    let word = |pixel: u32, channel: u32| k.ld_shared::<u32>(at, i64::from(pixel * pitch + (16 * block + channel) * 4));
                    vec![word(0, 0), word(0, 8), word(4, 0), word(4, 8)]
                }
            })
            .collect();
        for (j, &place) in places.iter().enumerate() {
            let column: Vec<Val<'k, u32>> = (0..2)
                .map(|half| {
                    let value = if element_bytes == 2 {
                        let [low, high] = [0, 1].map(|odd| k.ld_shared::<u16>(pixels[2 * half + odd] + place, 0));
                        k.join16(low, high)
                    } else {
                        k.ld_shared::<u32>(pixels[half] + place, 0)
                    };
                    value & masks[half]
                })
                .collect();
            for (line, row) in sums.iter().zip(&rows) {
                k.mma(shape(spec.operands), row, &column, &line[j]);
            }
        }
    };

    let turns = ctas.quotient(source.boxes - 1 - k.cta()) + 1;
    bring(k.cta(), k.constant(0));
    k.cp_async_commit();
    k.range(turns, |turn| {
        // This box has arrived, for all threads; and all have done with the one before, whose place the next one takes.
        k.cp_async_wait(0);
        k.bar_sync();
        let number = k.cta() + turn * ctas.value();
        k.when((turn + 1).lt(turns), || bring(number + ctas.value(), (turn + 1) & 1u32));
        k.cp_async_commit();
        let stage = turn & 1u32;
        let start = patches + stage * patch_bytes + source.start_bytes(&source.at(number));
        let (gradient, masks) = (gradients + stage * dy_bytes, masks + stage * (MASKS * 4));
        k.range(pixels >> step_pixels(element_bytes).ilog2(), |step| multiply(gradient, start, masks, step));
    });

    let tile = (k.special(Special::CtaZ) * k.special(Special::GridY) + k_tile).widen() * u64::from(CHANNELS * spec.columns() * 4);
    let own = parts.moved(k.cta().widen() * part_bytes + tile);
    for (block, line) in (0..).zip(&sums) {
        for half in 0..2u32 {
            let row = group + (16 * block + 8 * half);
            for (j, sum) in (0..).zip(line) {
                let pair = [sum[2 * half as usize].get(), sum[2 * half as usize + 1].get()];
                let column = first_column + member * 2 + 8 * j;
                k.st_global_vector(own.at(row * spec.columns() + column, 4), 0, &pair, Cache::Default);
            }
        }
    }
}
