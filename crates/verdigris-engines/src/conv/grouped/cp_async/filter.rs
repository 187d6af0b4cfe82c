//! The kernel of wgrad: rows of the product are channels of y, columns channels of x, one product for each tap; the depth runs over pixels.
//!
//! A CTA takes a channel tile, up to nine taps, and one tile of pixels after the other: of x the halo, of y the pixels themselves. Both are
//! read transposed, by `ldmatrix.trans`. A warp keeps the sums of 16 by 16 channels at all of its taps in registers from the first tile to
//! the last; then they go to scratch, and a launch of its own adds up what the CTAs have ([`crate::split_k::filter::grouped`]).

use serde::{Deserialize, Serialize};
use verdigris_kir::face::{Header, Kernel, Val, Var, build};
use verdigris_kir::inst::{MatrixType, MmaShape};
use verdigris_kir::ir::{KernelBody, Target};
use verdigris_kir::params::{Divide, Read, Write};
use verdigris_kir::program::KernelRef;
use verdigris_tensor::DType;

use super::super::CHUNK;
use super::THREADS;
use super::channel_tile::{ChannelTile, PITCH_BYTES, SLOTS};
use super::pixels::{Blocks, BlocksArguments, Pixels, Tile};
use super::tiling::{PIXEL_BYTES, Room, TAP_BYTES};
use super::walk::{Chunk, Place, Walk, WalkArguments};

/// Pixels of a tile, and shared memory as that tile has it.
const TILE: Tile = Tile::Small;
/// Pixels that are multiplied at once, and channels of y and of x that a warp sums.
const STEP: u32 = 16;

/// Everything that shapes a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct Spec {
    /// bf16 or f16.
    pub(super) operands: DType,
    /// Any class but that of 3 chunks.
    pub(super) channel_tile: ChannelTile,
    /// Taps of a CTA: 3 or 9.
    pub(super) taps: u32,
}

impl Spec {
    /// The numbers of taps that kernels are made for.
    pub(super) const TAPS: [u32; 2] = [3, 9];

    /// The classes of channels that kernels are made for.
    pub(super) fn channel_tiles() -> impl Iterator<Item = ChannelTile> {
        ChannelTile::ALL.into_iter().filter(|channel_tile| channel_tile.chunks != 3)
    }

    pub(super) fn name(&self) -> String {
        format!("conv_grouped_filter_{}_c{}_t{}", self.operands, self.channel_tile.chunks * CHUNK, self.taps)
    }

    pub(super) fn kernel(self) -> KernelRef {
        KernelRef::new(self.name(), move || self.build())
    }

    fn build(&self) -> KernelBody {
        let header = Header { name: self.name(), target: Target::Sm80, threads: THREADS, min_ctas: self.ctas(), cluster: 1 };
        build(header, |k| filter_gradient(k, self))
    }

    /// CTAs that share an SM.
    pub(super) fn ctas(&self) -> u32 {
        // As many as registers allow.
        if self.taps_of_warp() > 5 { 2 } else { TILE.ctas() }
    }

    pub(super) fn shared_bytes() -> u32 {
        TILE.shared_bytes()
    }

    /// What a tiling has to fit: y stands beside the halo of x.
    pub(super) fn room() -> Room {
        Room { pixels: TILE.pixels(), arena_bytes: TILE.arena_bytes(), staged_bytes: PITCH_BYTES, beside: true, tap_bytes: 0 }
    }

    /// CTAs that share the channels of x of a channel tile: 32 each, where blocks are larger.
    pub(super) const fn column_parts(self) -> u32 {
        if self.channel_tile.chunks > 4 { 2 } else { 1 }
    }

    /// Warps that share the taps.
    const fn sharing(self) -> u32 {
        if self.channel_tile.chunks <= 2 { 2 } else { 1 }
    }

    const fn taps_of_warp(self) -> u32 {
        self.taps.div_ceil(self.sharing())
    }
}

/// What a warp sums: channels of y by channels of x, as chunks of a pixel in shared memory, and as numbers in their blocks.
struct Share<'k> {
    /// Whether there is anything.
    busy: Val<'k, bool>,
    /// The first chunk of y, of x, in shared memory.
    slots: [Val<'k, u32>; 2],
    /// The block of the first chunk, counted in the channel tile; the second one is of the next block where a block is one chunk.
    block: Val<'k, u32>,
    /// The first channel of y and of x in the block.
    first: [Val<'k, u32>; 2],
    /// Which of the warps that share taps this is.
    turn: Val<'k, u32>,
}

impl<'k> Share<'k> {
    fn of_warp(k: Kernel<'k>, spec: &Spec, column_part: Val<'k, u32>) -> Share<'k> {
        let (warp, zero) = (k.warp(), k.constant(0u32));
        let pairs = 2 * CHUNK;
        match spec.channel_tile.chunks {
            1 | 2 => {
                let unit = warp & 3u32;
                let blocks_of_unit = 2 / spec.channel_tile.chunks;
                Share { busy: unit.lt(4), slots: [unit * 2, unit * 2], block: unit * blocks_of_unit, first: [zero; 2], turn: warp >> 2 }
            }
            4 => {
                let (block, row, column) = (warp >> 2, (warp >> 1) & 1u32, warp & 1u32);
                let slots = [block * 4 + row * 2, block * 4 + column * 2];
                Share { busy: block.lt(2), slots, block, first: [row * pairs, column * pairs], turn: zero }
            }
            chunks => {
                let (row, column) = (warp >> 1, warp & 1u32);
                let first = [row * pairs, (column_part * 2 + column) * pairs];
                Share { busy: row.lt(chunks / 2), slots: [row * 2, column * 2], block: zero, first, turn: zero }
            }
        }
    }
}

verdigris_kir::parameters! {
    /// What the kernel reads and writes.
    pub(super) struct Values / FilterArguments of () as _spec {
        pub(super) walk: WalkArguments = (),
        pub(super) blocks: BlocksArguments = (),
        pub(super) channel_tiles: Divide,
        pub(super) column_parts: Divide,
        pub(super) tap_groups: Divide,
        /// Parts of a sum.
        pub(super) lanes: u32,
        pub(super) x: Read = 16,
        pub(super) x_strides: [u64; 4],
        pub(super) y: Read = 16,
        pub(super) y_strides: [u64; 4],
        pub(super) flipped: u32,
        pub(super) parts: Write = 4,
        pub(super) part_bytes: u64,
    }
}

fn filter_gradient<'k>(k: Kernel<'k>, spec: &Spec) {
    let (channel_tile, taps_of_warp) = (spec.channel_tile, spec.taps_of_warp());
    let values = Values::declare(k, &());
    let Values { blocks, channel_tiles, column_parts, tap_groups, lanes, flipped, parts, part_bytes, .. } = values;
    let walk = Walk::new(k, values.walk, TILE.pixels(), TILE.arena_bytes());
    let x = Pixels { pointer: values.x, strides: values.x_strides };
    let y = Pixels { pointer: values.y, strides: values.y_strides };

    let (rest, channel_tile_number) = channel_tiles.split(k.cta());
    let (rest, column_part) = column_parts.split(rest);
    let (part, tap_group) = tap_groups.split(rest);
    let first_block = channel_tile_number * channel_tile.blocks();
    let phases = walk.phases(k.constant(0));
    let phase_table = walk.write_tables(&phases, TILE.pixels(), |_| [k.constant(0); 2]);
    k.bar_sync();
    let x_slots = if spec.column_parts() > 1 { SLOTS / 2 } else { channel_tile.slots() };
    let x_chunk =
        blocks.chunk(channel_tile, first_block, &x, [blocks.inputs_of_block, blocks.inputs], (column_part * (SLOTS / 2), x_slots));
    let y_chunk =
        blocks.chunk(channel_tile, first_block, &y, [blocks.outputs_of_block, blocks.outputs], (k.constant(0), channel_tile.slots()));
    let fill = |tile: Val<'k, u32>| {
        let place = walk.place(&phase_table, tile);
        fill_pixels(k, &walk, &place, &y_chunk);
        walk.fill(&phase_table, &place, &x_chunk);
    };
    fill(part);

    let lane = k.lane();
    let share = Share::of_warp(k, spec, column_part);
    let is_busy = share.busy & (first_block + share.block).lt(blocks.count);
    let first_tap = tap_group * spec.taps + share.turn * taps_of_warp;
    let distances: Vec<Val<'_, u32>> =
        (0..taps_of_warp).map(|i| k.ld_shared::<u32>(walk.taps_at + (first_tap + i).min(phase_table.taps() - 1) * TAP_BYTES, 8)).collect();
    // A matrix of y has its pixels along rows: the second one is the other half of the channels. One of x: the other half of the pixels.
    let y_at = walk.beside_at + ((lane & 7u32) + ((lane >> 4) << 3)) * PITCH_BYTES + ((share.slots[0] + ((lane >> 3) & 1u32)) << 4);
    let x_at = walk.halo_at + ((share.slots[1] + (lane >> 4)) << 4);
    let sums: Vec<[[Var<'_, f32>; 4]; 2]> =
        (0..taps_of_warp).map(|_| std::array::from_fn(|_| std::array::from_fn(|_| k.var(0.0f32)))).collect();
    let element = if spec.operands == DType::Bf16 { MatrixType::Bf16 } else { MatrixType::F16 };
    let shape = MmaShape { m: 16, n: CHUNK, k: STEP, a: element, b: element, d: MatrixType::F32, saturate: false, sparse: false };
    let steps = (walk.cut.tile_pixels + (STEP - 1)) >> STEP.ilog2();

    k.range_step(part, walk.cut.tile_count, lanes, |tile| {
        k.cp_async_wait(0);
        k.bar_sync();
        k.when(is_busy, || {
            k.range(steps, |step| {
                let rows = k.ldmatrix(4, true, k.fma(step, STEP * PITCH_BYTES, y_at), 0);
                let number = step * STEP + (lane & 15u32);
                // A pixel that the tile does not have is zero in y. It reads zeros as x too, at any tap, since an infinity times zero would be NaN: those of
                // y's last one, which no tile has that lacks any.
                let is_pixel = number.lt(walk.cut.tile_pixels);
                let nothing = walk.beside_at + (TILE.pixels() - 1) * PITCH_BYTES;
                let pixel = k.select(is_pixel, x_at + k.ld_shared::<u32>(walk.pixels_at + number * PIXEL_BYTES, 0), nothing);
                for (sum, &distance) in sums.iter().zip(&distances) {
                    let columns = k.ldmatrix(4, true, pixel + k.select(is_pixel, distance, 0u32), 0);
                    for (j, sum) in sum.iter().enumerate() {
                        k.mma(shape, &rows, &columns[2 * j..][..2], sum);
                    }
                }
            });
        });
        // All have done with the tile.
        k.bar_sync();
        let next = tile + lanes;
        k.when(next.lt(walk.cut.tile_count), || fill(next));
    });
    k.cp_async_wait(0);

    let to = parts.address() + part.widen() * part_bytes;
    let taps = phase_table.taps();
    k.when(is_busy, || {
        let places = elements(k, spec, &blocks, &share, first_block, taps);
        for (i, sum) in (0u32..).zip(&sums) {
            let tap = first_tap + i;
            let is_tap = tap.lt(taps) & (share.turn * taps_of_warp + i).lt(spec.taps);
            k.when(is_tap, || {
                let tap = k.select(flipped.ne(0), taps - 1 - tap, tap);
                let at = to + (tap * blocks.inputs_of_group()).mul_wide(4);
                for place in &places {
                    k.when(place.is_inside, || k.st_global(at + place.element.mul_wide(4), 0, sum[place.column][place.register].get()));
                }
            });
        }
    });
}

/// Where one of a lane's sums goes.
struct Element<'k> {
    /// Column of 8 and register of the warp's sums.
    column: usize,
    register: usize,
    is_inside: Val<'k, bool>,
    /// Its place among the elements of a part at tap 0.
    element: Val<'k, u32>,
}

/// The sums of a lane that belong to a group.
fn elements<'k>(
    k: Kernel<'k>,
    spec: &Spec,
    blocks: &Blocks<'k>,
    share: &Share<'k>,
    first_block: Val<'k, u32>,
    taps: Val<'k, u32>,
) -> Vec<Element<'k>> {
    let lane = k.lane();
    let single = spec.channel_tile.chunks == 1;
    let mut list = Vec::new();
    for half in 0..2u32 {
        // Of blocks of one chunk, the second half of the rows is the next block.
        let block = first_block + share.block + if single { half } else { 0 };
        let row = share.first[0] + (lane >> 2) + if single { 0 } else { half * CHUNK };
        let (group_of_row, _) = blocks.group_outputs.split(row);
        let output = block * blocks.outputs_of_block + row;
        let is_row = block.lt(blocks.count) & row.lt(blocks.outputs_of_block) & output.lt(blocks.outputs);
        for j in 0..2u32 {
            if single && j != half {
                continue;
            }
            for odd in 0..2u32 {
                let column = share.first[1] + ((lane & 3u32) << 1) + (odd + if single { 0 } else { j * CHUNK });
                let (group_of_column, column_of_group) = blocks.group_inputs.split(column);
                let is_inside = is_row & column.lt(blocks.inputs_of_block) & group_of_row.eq(group_of_column);
                let element = output * taps * blocks.inputs_of_group() + column_of_group;
                list.push(Element { column: j as usize, register: (2 * half + odd) as usize, is_inside, element });
            }
        }
    }
    list
}

/// Starts copying a tile's pixels of y, by all threads; where the tile has none, or the result ends, they are zero.
fn fill_pixels<'k>(k: Kernel<'k>, walk: &Walk<'k>, place: &Place<'k>, chunk: &Chunk<'k>) {
    let slot = k.lane() & (SLOTS - 1);
    let first = place.first.into_iter().zip(chunk.strides).fold(chunk.address, |address, (at, stride)| address + at.widen() * stride);
    for turn in 0..TILE.pixels() * SLOTS / THREADS {
        let pixel = (k.thread() >> SLOTS.ilog2()) + turn * (THREADS / SLOTS);
        let entry = k.ld_shared_vector::<u32>(walk.pixels_at + pixel * PIXEL_BYTES, 0, 4);
        let is_inside = place.holds(entry[2]);
        let from = k.select(is_inside, first + entry[1].mul_wide(16), chunk.address);
        let to = k.fma(pixel, PITCH_BYTES, walk.beside_at + (slot << 4));
        k.cp_async(to, 0, from, 0, 16, k.select(is_inside, chunk.bytes, 0u32));
    }
}
