//! The kernel of wgrad: rows of a product are the channels of x of a chunk at two taps, columns the chunk's channels of y, the depth is two
//! rows of eight pixels.
//!
//! Activations and gradients are read transposed, by `ldmatrix.trans`. A warp keeps the sums of its chunks at all taps in registers from
//! its first tile to its last; then they go to scratch as a part of their own.

use verdigris_kir::face::{Kernel, Val, Var};
use verdigris_kir::params::{Map, Write};
use verdigris_kir::tile::ring::{Ring, RingScope, publish_barriers};

use super::super::CHUNK;
use super::spec::{STRIP, Spec, Tap, WARPS};
use super::tile::{Rows, ThreadCoordinates, Tiles, TilesArguments, Window, roles};

/// Sums of a chunk: by pairs of taps.
type Sums<'k> = Vec<[Var<'k, f32>; 4]>;

verdigris_kir::parameters! {
    /// What the kernel reads and writes.
    pub(super) struct Filter / FilterArguments of Spec as spec {
        pub(super) tiles: TilesArguments = (),
        pub(super) activations: Map = spec.read_map(),
        pub(super) gradients: Map = spec.other_map(),
        pub(super) channels: u32,
        /// Channels of a group are 2 to this.
        pub(super) group_shift: u32,
        pub(super) flipped: u32,
        pub(super) parts: Write = 4,
        pub(super) part_bytes: u64,
    }
}

/// Builds the kernel.
pub(super) fn kernel<'k>(k: Kernel<'k>, spec: &Spec) {
    let Filter { tiles, activations, gradients, channels, group_shift: group, flipped, parts, part_bytes } = Filter::declare(k, spec);
    let tiles = Tiles::new(k, spec, tiles);
    let is_flipped = flipped.ne(0);

    let stages = k.shared("tiles", spec.stages() * spec.stage_bytes(), 1024).address();
    let ring = Ring::new(k, spec.stages(), WARPS, RingScope::Cta);
    k.when(k.thread().eq(0), || ring.init());
    publish_barriers(k);

    let load = || tiles.load(k, spec, stages, &ring.cursor(), &activations, Some(&gradients));
    let multiply = || {
        let cursor = ring.cursor();
        let coordinates = ThreadCoordinates::of_warp(k, spec);
        let taps = spec.phases().swap_remove(0).1;
        let sums: Vec<Sums<'k>> =
            (0..spec.chunks()).map(|_| taps.chunks(2).map(|_| std::array::from_fn(|_| k.var(0.0f32))).collect()).collect();
        tiles.each(k, spec, |_| {
            cursor.wait();
            let stage = stages + cursor.stage() * spec.stage_bytes();
            coordinates.each_unit(k, spec, |image, strip| {
                let window = Window::new(k, spec, stage, coordinates.chunk, [image, strip], true);
                add_products(k, spec, &window, stage + spec.read_bytes(), coordinates, [image, strip], &taps, &sums);
            });
            k.warp_sync();
            cursor.release(cursor.stage(), k.lane());
            cursor.advance();
        });

        // What a warp has is a part of its own.
        let part = parts.address() + (tiles.part * spec.sharing() + coordinates.turn).widen() * part_bytes;
        let lane = k.lane();
        let first = tiles.channel + coordinates.chunk * CHUNK;
        let within = |channel: Val<'k, u32>| channel - channel.shr(group).shl(group);
        let all = spec.taps * spec.taps;
        for (chunk, sums) in (0u32..).zip(&sums) {
            let input = first + (lane >> 2) + chunk * CHUNK;
            for odd in 0..2u32 {
                let output = first + ((lane & 3u32) << 1) + (odd + chunk * CHUNK);
                k.when(output.lt(channels) & input.shr(group).eq(output.shr(group)), || {
                    let element = |tap: u32| {
                        let tap = k.select(is_flipped, all - 1 - tap, k.constant(tap));
                        part + ((output * all + tap).shl(group) + within(input)).mul_wide(4)
                    };
                    for (pair, sum) in taps.chunks(2).zip(sums) {
                        for (half, tap) in (0u32..).zip(pair) {
                            k.st_global(element(tap.number as u32), 0, sum[(2 * half + odd) as usize].get());
                        }
                    }
                });
            }
        }
    };
    roles(k, spec, &multiply, &load);
}

/// Adds the products of a unit, whose gradients stand in the tile at `gradients`.
#[allow(clippy::too_many_arguments, reason = "both operands, where the unit lies in them, and the sums")]
fn add_products<'k>(
    k: Kernel<'k>,
    spec: &Spec,
    window: &Window<'_, 'k>,
    gradients: Val<'k, u32>,
    coordinates: ThreadCoordinates<'k>,
    [image, strip]: [Val<'k, u32>; 2],
    taps: &[Tap],
    sums: &[Sums<'k>],
) {
    let [height, width] = spec.written();
    let lane = k.lane();
    // Both rows, and both chunks.
    let (row, chunk) = if spec.chunks() == 2 { (lane >> 4, (lane >> 3) & 1u32) } else { ((lane >> 3) & 1u32, k.constant(0)) };
    let pixel = (image * height + row) * width + (strip * STRIP + (lane & (STRIP - 1)));
    let rows = Rows::new(k, spec, gradients + pixel * spec.pixel_bytes() + (coordinates.chunk + chunk) * (2 * CHUNK));
    let (chunks, step) = (spec.chunks() as usize, spec.stride.step());
    for row in (0..spec.shape.rows).step_by(2) {
        let (address, offset) = rows.at(row * width);
        let gradients = k.ldmatrix(2 * chunks as u8, true, address, offset);
        for (number, pair) in taps.chunks(2).enumerate() {
            // Of an odd number of taps, the last one fills both halves of the rows.
            let [one, other] = [pair[0], pair[pair.len() - 1]];
            for (chunk, sums) in sums.iter().enumerate() {
                let matrix = |tap: Tap, below: u32| window.matrix((row + below) * step + tap.row, tap.column, chunk as u32);
                let pixels = [matrix(one, 0), matrix(other, 0), matrix(one, 1), matrix(other, 1)];
                k.mma(spec.mma(2 * STRIP), &pixels, &[gradients[chunk], gradients[chunks + chunk]], &sums[number]);
            }
        }
    }
}
