//! The kernel of fprop and dgrad: rows of a product are two rows of eight pixels, columns the channels of a chunk, the depth is one tap or
//! two of the chunk's channels.
//!
//! A warp holds the filters of its chunks as blocks of a block-diagonal matrix, in registers, for as long as the CTA lives. It walks down a
//! strip: each row of pixels is read once for each column of taps, and meets all rows of taps from registers.

use verdigris_kir::face::{Kernel, Val, Var};
use verdigris_kir::params::{Map, Read};
use verdigris_kir::tile::ring::{Ring, RingScope, publish_barriers};

use super::super::CHUNK;
use super::spec::{LEAVING, MULTIPLIERS, STRIP, Spec, Tap, WARPS};
use super::tile::{Rows, ThreadCoordinates, Tile, Tiles, TilesArguments, Window, roles};
use crate::fuse::compute;
use crate::fuse::epilogue::{Epilogue, EpilogueArgs, EpilogueSpec};

/// The named barrier of the warps that multiply.
const BARRIER: u32 = 1;

/// The matrices of a warp's filters: by chunk, then by tap.
type Filters<'k> = Vec<Vec<Val<'k, u32>>>;

verdigris_kir::parameters! {
    /// What the kernel reads and writes.
    pub(super) struct Pixels / PixelsArguments of Spec as spec {
        pub(super) tiles: TilesArguments = (),
        pub(super) activations: Map = spec.read_map(),
        pub(super) result: Map = spec.other_map(),
        /// Images, rows, columns and channels of the result.
        pub(super) extents: [u32; 4],
        pub(super) filter: FilterArguments = (),
        pub(super) epilogue: Option<EpilogueArgs> = spec.epilogue.as_ref().map(EpilogueSpec::over_tensors),
    }
}

/// Builds the kernel.
pub(super) fn kernel<'k>(k: Kernel<'k>, spec: &Spec) {
    let Pixels { tiles, activations, result, extents, filter, epilogue } = Pixels::declare(k, spec);
    let tiles = Tiles::new(k, spec, tiles);
    let epilogue = epilogue.expect("a product of pixels has an epilogue");

    let stages = k.shared("tiles", spec.stages() * spec.stage_bytes(), 1024).address();
    let leaving = k.shared("leaving", LEAVING * spec.other_bytes(), 1024).address();
    let ring = Ring::new(k, spec.stages(), WARPS, RingScope::Cta);
    k.when(k.thread().eq(0), || ring.init());
    publish_barriers(k);

    let load = || tiles.load(k, spec, stages, &ring.cursor(), &activations, None);
    let multiply = || {
        let cursor = ring.cursor();
        let coordinates = ThreadCoordinates::of_warp(k, spec);
        let filters = filter.fetch(k, spec, tiles.channel + coordinates.chunk * CHUNK, extents[3]);
        let turn = k.var_named("turn", 0u32);
        tiles.each(k, spec, |tile| {
            let to = leaving + turn * spec.other_bytes();
            cursor.wait();
            // The tile that stood here has been read by TMA.
            k.when(k.thread().eq(0), || k.bulk_wait_read(LEAVING - 1));
            k.barrier_sync(BARRIER, MULTIPLIERS);
            let stage = stages + cursor.stage() * spec.stage_bytes();
            coordinates.each_unit(k, spec, |image, strip| {
                let window = Window::new(k, spec, stage, coordinates.chunk, [image, strip], false);
                let unit = Unit { k, spec, tiles: &tiles, tile: &tile, coordinates, place: [image, strip], extents, epilogue: &epilogue };
                unit.walk(&window, &filters, to);
            });
            k.warp_sync();
            cursor.release(cursor.stage(), k.lane());
            cursor.advance();
            k.fence_proxy_async();
            k.barrier_sync(BARRIER, MULTIPLIERS);
            k.when(k.thread().eq(0), || {
                k.tma_store(&result, &tiles.coordinates(tile.image, tile.first.map(|at| at.signed())), to);
                k.bulk_commit();
            });
            turn.set(turn ^ 1u32);
        });
        k.when(k.thread().eq(0), || k.bulk_wait(0));
    };
    roles(k, spec, &multiply, &load);
}

verdigris_kir::parameters! {
    /// The filter in memory. Of input channel `i` and output channel `o`, which share a group, an element is `input · i + output · o` and
    /// the like of their numbers in the group away from the first one.
    pub(super) struct Filter / FilterArguments of () as _spec {
        pub(super) pointer: Read = 2,
        pub(super) origin: u64,
        pub(super) input: [u64; 2],
        pub(super) output: [u64; 2],
        /// From row to row and from column to column.
        pub(super) taps: [u64; 2],
        /// Channels of a group are 2 to this.
        pub(super) group: u32,
    }
}

impl<'k> Filter<'k> {
    /// The matrices of the chunks from channel `first` on: a lane has elements `(2 (lane % 4), lane / 4)` and the next one along the input.
    fn fetch(&self, k: Kernel<'k>, spec: &Spec, first: Val<'k, u32>, channels: Val<'k, u32>) -> Filters<'k> {
        let lane = k.lane();
        let of_chunk = |chunk: u32| {
            let output = first + (lane >> 2) + chunk * CHUNK;
            let places = [0, 1].map(|odd| {
                let input = first + ((lane & 3u32) << 1) + (odd + chunk * CHUNK);
                let is_inside = output.lt(channels) & input.shr(self.group).eq(output.shr(self.group));
                let within = |channel: Val<'k, u32>| channel - (channel.shr(self.group)).shl(self.group);
                let distance = input.widen() * self.input[0]
                    + within(input).widen() * self.input[1]
                    + output.widen() * self.output[0]
                    + within(output).widen() * self.output[1];
                (is_inside, self.pointer.address() + self.origin + k.select(is_inside, distance, 0u64))
            });
            let mut matrices = Vec::new();
            for row in 0..spec.taps {
                for column in 0..spec.taps {
                    let [low, high] = places.map(|(is_inside, address)| {
                        let address = address + (self.taps[0] * u64::from(row) + self.taps[1] * u64::from(column));
                        k.select(is_inside, k.ld_global::<u16>(address, 0), 0u16)
                    });
                    matrices.push(k.join16(low, high));
                }
            }
            matrices
        };
        (0..spec.chunks()).map(of_chunk).collect()
    }
}

/// What a warp works on at a time.
struct Unit<'a, 'k> {
    k: Kernel<'k>,
    spec: &'a Spec,
    tiles: &'a Tiles<'k>,
    tile: &'a Tile<'k>,
    coordinates: ThreadCoordinates<'k>,
    /// Image and strip in the tile.
    place: [Val<'k, u32>; 2],
    /// Images, rows, columns and channels of the result.
    extents: [Val<'k, u32>; 4],
    epilogue: &'a Epilogue<'k, f32>,
}

impl<'k> Unit<'_, 'k> {
    /// Two rows after the other, from the first to the last; what leaves goes to `to`.
    fn walk(&self, window: &Window<'_, 'k>, filters: &Filters<'k>, to: Val<'k, u32>) {
        let Unit { k, spec, .. } = *self;
        let [height, width] = spec.written();
        let (spread, step) = (spec.stride.spread(), spec.stride.step());
        let [image, strip] = self.place;
        let lane = k.lane();
        // A lane names the row of a matrix that it stores: of both rows, and of both chunks.
        let (row, chunk) = if spec.chunks() == 2 { (lane >> 4, (lane >> 3) & 1u32) } else { ((lane >> 3) & 1u32, k.constant(0)) };
        let pixel = (image * height + row * spread) * width + (strip * STRIP + (lane & (STRIP - 1))) * spread;
        let rows = Rows::new(k, spec, to + pixel * spec.pixel_bytes() + (self.coordinates.chunk + chunk) * (2 * CHUNK));
        let sums: Vec<[Var<'k, f32>; 4]> = (0..spec.chunks()).map(|_| std::array::from_fn(|_| k.var(0.0f32))).collect();
        for row in (0..spec.shape.rows).step_by(2) {
            for ([a, b], taps) in spec.phases() {
                sums.iter().flatten().for_each(|sum| sum.set(0.0f32));
                let matrices = |tap: &Tap, chunk: u32| [0, 1].map(|below| window.matrix((row + below) * step + tap.row, tap.column, chunk));
                for pair in taps.chunks(2) {
                    for (chunk, sum) in (0u32..).zip(&sums) {
                        let pixels: Vec<Val<'k, u32>> = pair.iter().flat_map(|tap| matrices(tap, chunk)).collect();
                        let filter: Vec<Val<'k, u32>> = pair.iter().map(|tap| filters[chunk as usize][tap.number]).collect();
                        k.mma(spec.mma(CHUNK * pair.len() as u32), &pixels, &filter, sum);
                    }
                }
                self.apply([row * spread + a, b], &sums);
                let dtype = spec.dtype;
                let packed: Vec<Val<'k, u32>> = [0, 2]
                    .into_iter()
                    .flat_map(|half| sums.iter().map(move |sum| compute::pack_16(k, dtype, [sum[half].get(), sum[half + 1].get()])))
                    .collect();
                let (address, offset) = rows.at((row * spread + a) * width + b);
                k.stmatrix(false, address, offset, &packed);
            }
        }
    }

    /// Runs the epilogue on sums that begin at a row and column of the unit.
    fn apply(&self, [row, column]: [u32; 2], sums: &[[Var<'k, f32>; 4]]) {
        let Unit { k, spec, tiles, tile, coordinates, place: [image, strip], extents, epilogue } = *self;
        if spec.epilogue.as_ref().is_none_or(EpilogueSpec::is_plain) {
            return;
        }
        let [images, height, width, channels] = extents;
        let (lane, spread) = (k.lane(), spec.stride.spread());
        let image = tile.image + image;
        let at_column = tile.first[1] + ((strip * STRIP + (lane >> 2)) * spread + column);
        let channel = tiles.channel + coordinates.chunk * CHUNK + ((lane & 3u32) << 1);
        for below in 0..2u32 {
            let at_row = tile.first[0] + (row + below * spread);
            k.when(image.lt(images) & at_row.lt(height) & at_column.lt(width), || {
                let place = epilogue.at_pixel([image, k.constant(0), at_row, at_column], channel);
                for (chunk, sum) in (0u32..).zip(sums) {
                    k.when((channel + chunk * CHUNK).lt(channels), || {
                        let pair: [Var<'k, f32>; 2] = [0, 1].map(|odd| sum[(2 * below + odd) as usize]);
                        let values = place.apply_pair(pair.map(|sum| sum.get()), chunk * CHUNK);
                        pair.iter().zip(values).for_each(|(sum, value)| sum.set(value));
                    });
                }
            });
        }
    }
}
