//! The kernel of fprop and dgrad: rows of the product are pixels of the result, columns its channels, the depth runs over taps and channels
//! of a block.
//!
//! The filter of a channel tile lies in shared memory in the order in which lanes multiply it, with zeros between groups; a CTA makes it
//! once, from a filter of any layout, and then takes one tile of pixels after the other. A tile's halo is copied once; each tap reads it by
//! `ldmatrix` at its own distance. Sums leave through shared memory, 16 bytes a lane.

use serde::{Deserialize, Serialize};
use verdigris_kir::face::{Header, Kernel, Pointer, Val, Var, build};
use verdigris_kir::inst::{Cache, MatrixType, MmaShape};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::{Divide, Read, Write};
use verdigris_kir::program::KernelRef;
use verdigris_tensor::DType;

use super::super::CHUNK;
use super::THREADS;
use super::channel_tile::{ChannelTile, PITCH_BYTES, SLOTS};
use super::tiling::{PHASE_TABLE_BYTES, PIXEL_BYTES, Room, TAP_BYTES, filter_tap_bytes};
use super::walk::{Chunk, PhaseTable, Phases, Place, Walk, WalkArguments, coordinates};
use crate::conv::geometry::phases::{FilterWalk, FilterWalkArguments};
use crate::fuse::compute;
use crate::fuse::epilogue::{Epilogue, EpilogueArgs, EpilogueSpec};

const WARPS: u32 = THREADS / 32;
/// Rows and columns of a tensor core's product.
const ROWS: u32 = 16;

/// The tile of a CTA; its number is the value of a knob, so it stays.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Tile {
    /// 128 pixels, three CTAs on an SM of 228 KiB.
    Small,
    /// 256 pixels, two CTAs.
    Large,
    /// 128 pixels and a filter of many taps, one CTA.
    Deep,
}

impl Tile {
    pub(super) const ALL: [Tile; 3] = [Tile::Small, Tile::Large, Tile::Deep];

    /// Pixels.
    pub(super) const fn pixels(self) -> u32 {
        match self {
            Tile::Small | Tile::Deep => 128,
            Tile::Large => 256,
        }
    }

    /// CTAs that share an SM.
    pub(super) const fn ctas(self) -> u32 {
        match self {
            Tile::Small => 3,
            Tile::Large => 2,
            Tile::Deep => 1,
        }
    }

    /// Shared memory of a CTA: a share of 228 KiB, less the 1 KiB that each takes beside its own; what one may ask for on sm_80.
    pub(super) const fn shared_bytes(self) -> u32 {
        match self {
            Tile::Small => 76_800,
            Tile::Large => 115_712,
            Tile::Deep => 166_912,
        }
    }

    pub(super) const fn arena_bytes(self) -> u32 {
        self.shared_bytes() - PHASE_TABLE_BYTES - self.pixels() * PIXEL_BYTES
    }

    const fn name(self) -> &'static str {
        match self {
            Tile::Small => "small",
            Tile::Large => "large",
            Tile::Deep => "deep",
        }
    }
}

/// Everything that shapes a kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct Spec {
    /// bf16 or f16.
    pub(super) operands: DType,
    pub(super) channel_tile: ChannelTile,
    pub(super) tile: Tile,
    /// The result leaves through shared memory, where it is one of 16 bits whose pixels are whole chunks; otherwise from registers.
    pub(super) staged: bool,
    pub(super) epilogue: EpilogueSpec,
}

impl Spec {
    pub(super) fn name(&self) -> String {
        let (operands, channels, tile, epilogue) =
            (self.operands, self.channel_tile.chunks * CHUNK, self.tile.name(), self.epilogue.name());
        format!("conv_grouped_pixels_{operands}_c{channels}_{tile}_{epilogue}")
    }

    pub(super) fn target(&self) -> Target {
        self.epilogue.target().with_room(self.tile.shared_bytes())
    }

    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: self.target(), threads: THREADS, min_ctas: self.ctas(), cluster: 1 };
        build(header, |k| pixels(k, self))
    }

    /// CTAs that share an SM: of large blocks, registers allow two.
    pub(super) fn ctas(&self) -> u32 {
        self.tile.ctas().min(if self.channel_tile.chunks > 4 { 2 } else { 3 })
    }

    /// What a tiling has to fit.
    pub(super) fn room(&self) -> Room {
        Room {
            pixels: self.tile.pixels(),
            arena_bytes: self.tile.arena_bytes(),
            staged_bytes: if self.staged { PITCH_BYTES } else { 0 },
            beside: false,
            tap_bytes: filter_tap_bytes(self.channel_tile),
        }
    }

    /// Warps side by side along pixels, and blocks of 16 pixels of one.
    fn rows(&self) -> [u32; 2] {
        let along = WARPS / self.channel_tile.units();
        [along, self.tile.pixels() / ROWS / along]
    }
}

/// `value / by` for values below 64.
pub(super) fn quotient_of_few(value: Val<'_, u32>, by: u32) -> Val<'_, u32> {
    if by.is_power_of_two() { value >> by.ilog2() } else { (value * (65_536 / by + 1)) >> 16 }
}

/// A tensor with its channels last.
#[derive(Clone, Copy)]
pub(super) struct Pixels<'k> {
    pub(super) pointer: Pointer<'k>,
    /// Distances of images, depths, heights and widths in bytes.
    pub(super) strides: [Val<'k, u64>; 4],
}

impl<'k> Pixels<'k> {
    /// The address of a pixel.
    pub(super) fn at(&self, pixel: [Val<'k, u32>; 4]) -> Val<'k, u64> {
        pixel.into_iter().zip(self.strides).fold(self.pointer.address(), |address, (at, stride)| address + at.widen() * stride)
    }
}

verdigris_kir::parameters! {
    /// Blocks and channels.
    #[derive(Clone, Copy)]
    pub(super) struct Blocks / BlocksArguments of () as _spec {
        /// Blocks of the problem.
        pub(super) count: u32,
        pub(super) groups: u32,
        /// Groups of a block.
        pub(super) merged: u32,
        /// Channels of x and of y of a group, of a block, and of the problem.
        pub(super) group_inputs: Divide,
        pub(super) group_outputs: Divide,
        pub(super) inputs_of_block: u32,
        pub(super) outputs_of_block: u32,
        pub(super) inputs: u32,
        pub(super) outputs: u32,
    }
}

verdigris_kir::parameters! {
    /// What the kernel reads and writes.
    pub(super) struct Values / PixelsArguments of Spec as spec {
        pub(super) walk: WalkArguments = (),
        pub(super) blocks: BlocksArguments = (),
        pub(super) channel_tiles: Divide,
        pub(super) phases: Divide,
        /// Tiles that are worked on at a time.
        pub(super) lanes: u32,
        pub(super) activations: Read = 16,
        pub(super) activation_strides: [u64; 4],
        pub(super) filter: FilterWalkArguments = 2,
        pub(super) result: Option<Write> = spec.staged.then_some(16),
        pub(super) result_strides: Option<[u64; 4]> = spec.staged.then_some(()),
        pub(super) epilogue: EpilogueArgs = spec.epilogue.over_tensors(),
    }
}

impl<'k> Blocks<'k> {
    /// Channels of x of a group.
    pub(super) fn inputs_of_group(&self) -> Val<'k, u32> {
        self.group_inputs.value()
    }

    /// The chunk that a lane copies of each pixel: `lane % 8` of the blocks from `first` on, of which each has `channels` of `whole`;
    /// `skipped` chunks further on, and of the first `slots` alone.
    pub(super) fn chunk(
        &self,
        channel_tile: ChannelTile,
        first: Val<'k, u32>,
        tensor: &Pixels<'k>,
        [channels, whole]: [Val<'k, u32>; 2],
        (skipped, slots): (Val<'k, u32>, u32),
    ) -> Chunk<'k> {
        let k = first.kernel();
        let slot = k.lane() & (SLOTS - 1);
        let within = quotient_of_few(slot, channel_tile.chunks);
        let block = first + within;
        let begin = (slot - within * channel_tile.chunks + skipped) * CHUNK;
        let channel = block * channels + begin;
        let is_inside = slot.lt(slots) & block.lt(self.count) & begin.lt(channels) & channel.lt(whole);
        let channel = k.select(is_inside, channel, 0u32);
        let begin = k.select(is_inside, begin, 0u32);
        let left = (channels - begin).min(whole - channel).min(k.constant(CHUNK));
        Chunk { address: tensor.pointer.at(channel, 2), strides: tensor.strides, bytes: k.select(is_inside, left * 2, 0u32), slots }
    }
}

impl<'k> FilterWalk<'k> {
    /// The distance of a tap of a phase from the filter's start.
    fn tap(&self, phases: &Phases<'k>, taps: [Val<'k, u32>; 3]) -> Val<'k, u64> {
        (0..3).fold(self.origin, |sum, dim| {
            sum + phases.dims[dim].first_tap.widen() * self.taps[dim] + taps[dim].widen() * self.tap_steps[dim]
        })
    }
}

/// Puts the filter of the channel tile that begins at block `first` into shared memory, by all warps. Of a unit at a tap, register `r`
/// holds of each lane the elements `(8 c + 2 (lane % 4), 8 j + lane / 4)` and the next one along the input, with `r = c · columns + j`:
/// what `mma` takes as B. (Of units of two blocks, register `r` is that of block `r`.)
fn keep_filter<'k>(
    k: Kernel<'k>,
    channel_tile: ChannelTile,
    walk: &Walk<'k>,
    filter: &FilterWalk<'k>,
    blocks: &Blocks<'k>,
    first: Val<'k, u32>,
    taps: Val<'k, u32>,
) {
    let (lane, warp) = (k.lane(), k.warp());
    let vectors = channel_tile.registers() / channel_tile.vector();
    let items = channel_tile.units() * vectors;
    // Where there are fewer vectors than warps, warps share their taps.
    let sharing = (WARPS / items).max(1);
    let [item, first_tap] = if sharing > 1 { [warp & (items - 1), warp >> items.ilog2()] } else { [warp, k.constant(0)] };
    let turns = (taps + (sharing - 1) - first_tap) >> sharing.ilog2();
    k.range_step(item, items, WARPS, |item| {
        let unit = quotient_of_few(item, vectors);
        let vector = item - unit * vectors;
        let elements: Vec<[(Val<'k, bool>, Val<'k, u64>); 2]> = (0..channel_tile.vector())
            .map(|i| {
                let register = vector * channel_tile.vector() + i;
                let (block, c, j) = if channel_tile.chunks == 1 {
                    (first + unit * 2 + register, k.constant(0), k.constant(0))
                } else {
                    let c = quotient_of_few(register, channel_tile.columns());
                    (first + unit, c, register - c * channel_tile.columns())
                };
                let output = j * CHUNK + (lane >> 2);
                let (group_of_output, output_of_group) = blocks.group_outputs.split(output);
                [0, 1].map(|odd| {
                    let input = c * CHUNK + ((lane & 3u32) << 1) + odd;
                    let (group_of_input, input_of_group) = blocks.group_inputs.split(input);
                    let group = block * blocks.merged + group_of_input;
                    let is_inside = input.lt(blocks.inputs_of_block)
                        & output.lt(blocks.outputs_of_block)
                        & group_of_input.eq(group_of_output)
                        & group.lt(blocks.groups);
                    let distance =
                        group.widen() * filter.group + input_of_group.widen() * filter.channel + output_of_group.widen() * filter.outer;
                    (is_inside, filter.pointer.address() + k.select(is_inside, distance, 0u64))
                })
            })
            .collect();
        let to =
            walk.filter_at + unit * channel_tile.unit_bytes() + vector * (channel_tile.vector() * 128) + lane * (channel_tile.vector() * 4);
        k.range_unrolled(turns, 3, |turn| {
            let tap = first_tap + turn * sharing;
            let halves = k.ld_shared_vector::<u32>(walk.taps_at + tap * TAP_BYTES, 0, 2);
            let distance = k.join32(halves[0], halves[1]);
            let words: Vec<Val<'k, u32>> = elements
                .iter()
                .map(|pair| {
                    let [low, high] = pair.map(|(is_inside, address)| k.select(is_inside, k.ld_global::<u16>(address + distance, 0), 0u16));
                    k.join16(low, high)
                })
                .collect();
            k.st_shared_vector(to + tap * filter_tap_bytes(channel_tile), 0, &words);
        });
    });
}

/// A warp's sums: of blocks of 16 pixels, of columns of 8 channels, of four registers.
type Sums<'k> = Vec<Vec<[Var<'k, f32>; 4]>>;

/// Adds the products of a tile's pixels with all taps. `rows` are where the lane's pixels begin in the halo.
fn multiply<'k>(
    k: Kernel<'k>,
    spec: &Spec,
    walk: &Walk<'k>,
    unit: Val<'k, u32>,
    taps: Val<'k, u32>,
    rows: &[Val<'k, u32>],
    sums: &Sums<'k>,
) {
    let channel_tile = spec.channel_tile;
    let element = if spec.operands == DType::Bf16 { MatrixType::Bf16 } else { MatrixType::F16 };
    let shape = |k| MmaShape { m: ROWS, n: CHUNK, k, a: element, b: element, d: MatrixType::F32, saturate: false, sparse: false };
    let filter = walk.filter_at + unit * channel_tile.unit_bytes() + k.lane() * (channel_tile.vector() * 4);
    // As many taps at once as leave the assembler enough registers.
    let unroll = match (channel_tile.chunks, spec.tile) {
        (1, Tile::Large) => 1,
        (1, _) => 2,
        (2, _) => 3,
        _ => 1,
    };
    let add = |tap: Val<'k, u32>| {
        let distance = k.ld_shared::<u32>(walk.taps_at + tap * TAP_BYTES, 8);
        let at = filter + tap * filter_tap_bytes(channel_tile);
        let vectors = |range: std::ops::Range<u32>| -> Vec<Val<'k, u32>> {
            range
                .flat_map(|vector| {
                    k.ld_shared_vector::<u32>(at, i64::from(vector * channel_tile.vector() * 128), channel_tile.vector() as u8)
                })
                .collect()
        };
        if channel_tile.chunks == 1 {
            let filters = vectors(0..1);
            for (row, line) in rows.iter().zip(sums) {
                let pixels = k.ldmatrix(4, false, *row + distance, 0);
                for (block, sum) in line.iter().enumerate() {
                    k.mma(shape(8), &pixels[2 * block..][..2], &filters[block..][..1], sum);
                }
            }
            return;
        }
        // Of an odd number of chunks, the last one stands alone; its filter shares vectors with the others.
        let odd = (channel_tile.chunks % 2 == 1).then(|| vectors(0..channel_tile.registers() / 4));
        for first in (0..channel_tile.chunks).step_by(2) {
            let columns = channel_tile.columns();
            let filters = match &odd {
                Some(all) => all[(first * columns) as usize..].to_vec(),
                None => vectors(first * columns / 4..(first + 2) * columns / 4),
            };
            let pair = first + 1 < channel_tile.chunks;
            for (row, line) in rows.iter().zip(sums) {
                let pixels = k.ldmatrix(if pair { 4 } else { 2 }, false, *row + distance, i64::from(first * 16));
                for (j, sum) in line.iter().enumerate() {
                    if pair {
                        k.mma(shape(16), &pixels, &[filters[j], filters[j + columns as usize]], sum);
                    } else {
                        k.mma(shape(8), &pixels, &filters[j..][..1], sum);
                    }
                }
            }
        }
    };
    if unroll > 1 { k.range_unrolled(taps, unroll, add) } else { k.range(taps, add) }
}

fn pixels(k: Kernel<'_>, spec: &Spec) {
    let channel_tile = spec.channel_tile;
    let values = Values::declare(k, spec);
    let Values { blocks, channel_tiles, phases: phase_count, lanes, filter, epilogue, .. } = values;
    let walk = Walk::new(k, values.walk, spec.tile.pixels(), spec.tile.arena_bytes());
    let activations = Pixels { pointer: values.activations, strides: values.activation_strides };
    let staged = values.result.zip(values.result_strides).map(|(pointer, strides)| Pixels { pointer, strides });

    let (rest, channel_tile_number) = channel_tiles.split(k.cta());
    let (first_tile, phase) = phase_count.split(rest);
    let first_block = channel_tile_number * channel_tile.blocks();
    let phases = walk.phases(phase);
    let phase_table = walk.write_tables(&phases, spec.tile.pixels(), |taps| {
        let (low, high) = k.split32(filter.tap(&phases, taps));
        [low, high]
    });
    k.bar_sync();
    let chunk = blocks.chunk(
        channel_tile,
        first_block,
        &activations,
        [blocks.inputs_of_block, blocks.inputs],
        (k.constant(0), channel_tile.slots()),
    );
    walk.fill(&phase_table, &walk.place(&phase_table, first_tile), &chunk);
    keep_filter(k, channel_tile, &walk, &filter, &blocks, first_block, phase_table.taps());

    let (warp, lane) = (k.warp(), k.lane());
    let [_, row_blocks] = spec.rows();
    let unit = warp & (channel_tile.units() - 1);
    let first_row = (warp >> channel_tile.units().ilog2()) * (row_blocks * ROWS);
    let blocks_of_unit = channel_tile.blocks() / channel_tile.units();
    let unit_block = first_block + unit * blocks_of_unit;
    let chunks_of_unit = blocks_of_unit * channel_tile.chunks;
    // A lane's row and chunk of the four matrices that `ldmatrix` reads.
    let reading = walk.halo_at + ((unit * chunks_of_unit + (lane >> 4)) << 4);
    let rows: Vec<Val<'_, u32>> = (0..row_blocks)
        .map(|block| {
            let pixel = first_row + block * ROWS + (lane & 15u32);
            reading + k.ld_shared::<u32>(walk.pixels_at + pixel * PIXEL_BYTES, 0)
        })
        .collect();
    let sums: Sums<'_> =
        (0..row_blocks).map(|_| (0..channel_tile.columns()).map(|_| std::array::from_fn(|_| k.var(0.0f32))).collect()).collect();

    k.range_step(first_tile, walk.cut.tile_count, lanes, |tile| {
        sums.iter().flatten().flatten().for_each(|sum| sum.set(0.0f32));
        // The halo has arrived, for all threads.
        k.cp_async_wait(0);
        k.bar_sync();
        k.when(unit_block.lt(blocks.count), || multiply(k, spec, &walk, unit, phase_table.taps(), &rows, &sums));
        // All have done with the halo.
        k.bar_sync();
        let place = walk.place(&phase_table, tile);
        let next = tile + lanes;
        let fill_next = || k.when(next.lt(walk.cut.tile_count), || walk.fill(&phase_table, &walk.place(&phase_table, next), &chunk));
        let leaving = Leaving { k, spec, walk: &walk, phase_table: &phase_table, place: &place, blocks: &blocks };
        match &staged {
            Some(result) => {
                k.when(unit_block.lt(blocks.count), || leaving.finish(&epilogue, unit, unit_block, first_row, &sums));
                k.bar_sync();
                leaving.copy_out(result, first_block);
                k.bar_sync();
                fill_next();
            }
            None => {
                fill_next();
                k.when(unit_block.lt(blocks.count), || leaving.finish(&epilogue, unit, unit_block, first_row, &sums));
            }
        }
    });
    k.cp_async_wait(0);
}

/// A tile in the epilogue.
struct Leaving<'a, 'k> {
    k: Kernel<'k>,
    spec: &'a Spec,
    walk: &'a Walk<'k>,
    phase_table: &'a PhaseTable<'k>,
    place: &'a Place<'k>,
    blocks: &'a Blocks<'k>,
}

impl<'k> Leaving<'_, 'k> {
    /// The result's coordinates of a pixel of the tile.
    fn pixel(&self, packed: Val<'k, u32>) -> [Val<'k, u32>; 4] {
        let (within, phase_indices) = (coordinates(packed), self.phase_table.phase_indices());
        std::array::from_fn(|dim| {
            let at = self.place.first[dim] + within[dim];
            if dim == 0 { at } else { self.k.fma(at, self.walk.steps().results[dim - 1], phase_indices[dim - 1]) }
        })
    }

    /// Runs the epilogue on a warp's sums and stores them, to shared memory if they are staged.
    fn finish(&self, epilogue: &Epilogue<'k, f32>, unit: Val<'k, u32>, block: Val<'k, u32>, first_row: Val<'k, u32>, sums: &Sums<'k>) {
        let Leaving { k, spec, walk, blocks, .. } = *self;
        let (channel_tile, lane) = (spec.channel_tile, k.lane());
        let column = (lane & 3u32) << 1;
        let channel = block * blocks.outputs_of_block + column;
        let end = (block + channel_tile.blocks() / channel_tile.units()).min(blocks.count) * blocks.outputs_of_block;
        let end = end.min(blocks.outputs);
        let guarded = !spec.staged || spec.epilogue.reads_memory();
        for (i, line) in (0u32..).zip(sums) {
            for half in 0..2 {
                let row = first_row + (lane >> 2) + (i * ROWS + half * 8);
                let to = k.fma(row, PITCH_BYTES, walk.halo_at + ((unit * channel_tile.columns()) << 4) + column * 2);
                let packed = k.ld_shared::<u32>(walk.pixels_at + row * PIXEL_BYTES, 8);
                let body = || {
                    let zero = k.constant(0u32);
                    let pixel = if guarded { self.pixel(packed) } else { [zero; 4] };
                    let at = epilogue.at_pixel(pixel, channel);
                    for (j, sum) in (0u32..).zip(line) {
                        let pair = [0, 1].map(|odd| sum[(2 * half + odd) as usize].get());
                        let right = CHUNK * j;
                        let store = || {
                            let values = if spec.epilogue.pairs {
                                at.apply_pair(pair, right)
                            } else {
                                [0, 1].map(|odd| if spec.staged { at.apply(pair[odd as usize], right + odd) } else { pair[odd as usize] })
                            };
                            if spec.staged {
                                k.st_shared(to, i64::from(j * 16), compute::pack_16(k, spec.epilogue.d.dtype, values));
                            } else if spec.epilogue.pairs {
                                at.store_pair(values, right);
                            } else {
                                for odd in 0..2 {
                                    k.when((channel + right + odd).lt(end), || {
                                        at.store(at.apply(values[odd as usize], right + odd), right + odd);
                                    });
                                }
                            }
                        };
                        if guarded { k.when((channel + right).lt(end), store) } else { store() }
                    }
                };
                if guarded { k.when(self.place.holds(packed), body) } else { body() }
            }
        }
    }

    /// Copies the staged tile to the result, eight lanes a pixel.
    fn copy_out(&self, result: &Pixels<'k>, first_block: Val<'k, u32>) {
        let Leaving { k, spec, walk, place, blocks, .. } = *self;
        let channel_tile = spec.channel_tile;
        let slot = k.lane() & (SLOTS - 1);
        let within = quotient_of_few(slot, channel_tile.chunks);
        let block = first_block + within;
        let begin = (slot - within * channel_tile.chunks) * CHUNK;
        let channel = block * blocks.outputs_of_block + begin;
        // The last block may have fewer groups than the others.
        let is_channel = slot.lt(channel_tile.slots()) & begin.lt(blocks.outputs_of_block) & channel.lt(blocks.outputs);
        let first = self.pixel(k.constant(0));
        let base = result.at(first) + channel.mul_wide(2);
        let pixel = k.thread() >> SLOTS.ilog2();
        for turn in 0..spec.tile.pixels() * SLOTS / THREADS {
            let pixel = pixel + turn * (THREADS / SLOTS);
            let entry = k.ld_shared_vector::<u32>(walk.pixels_at + pixel * PIXEL_BYTES, 0, 4);
            k.when(is_channel & place.holds(entry[2]), || {
                let values = k.ld_shared_vector::<u32>(k.fma(pixel, PITCH_BYTES, walk.halo_at + (slot << 4)), 0, 4);
                k.st_global_vector(base + entry[1].mul_wide(16), 0, &values, Cache::Default);
            });
        }
    }
}
